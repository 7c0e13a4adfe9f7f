//! The `lamassu` command: composition root, progress, messages, exit codes.
//!
//! | module | what it does |
//! |---|---|
//! | `args`, `fstab` | the command line; the form in which mount(8) calls this program |
//! | `cmd/` | one module for each command |
//! | `keys`, `opening`, `policy`, `open` | key options and unlocking; options about vaults; the policy; vaults as commands name them |
//! | `mounts`, `served`, `control` | mounts of this machine; their daemons; requests to them by ioctl(2) |
//! | `job` | long work, in a daemon or in this process |
//! | `terminal` | the settings of the terminal, to be put back after a prompt |
//! | `daemon`, `confine`, `private` | leaving the terminal; giving up rights; whether a vault's directory is private |
//! | `signals` | SIGINT, SIGTERM, SIGHUP and SIGXFSZ |
//! | `alert/` | the process that runs the command for integrity events |
//! | `log/`, `output`, `progress`, `text` | logs; results and messages; progress; numbers and times as text |
//! | `fault`, `exit` | the errors; the exit code and the hint of each |
//! | `tree/` | trees of files for copying: local, in a vault, single stored files |
//! | `distinct`, `store_kind`, `users` | exact counts of distinct digests; advice on a store; users of this machine |
//!
//! Locks: `signals` holds its lock while it calls what a command has registered; those of `log` and of single commands
//! are held alone. Signals arrive on a thread of their own, so no lock is taken in a handler.
//!
//! Guarantees: results on standard output, all else on standard error; every failure has a message that says what,
//! where and what to do next, and the exit code that `docs/cli.md` promises. Never: holds logic that another crate
//! needs, shows a key, panics where it can report an error.
#![allow(missing_docs)]

mod alert;
mod args;
mod cmd;
mod confine;
mod control;
mod daemon;
mod distinct;
mod exit;
mod fault;
mod fstab;
mod job;
mod keys;
mod log;
mod mounts;
mod open;
mod opening;
mod output;
mod policy;
mod private;
mod progress;
mod served;
mod signals;
mod store_kind;
mod terminal;
mod text;
mod tree;
mod users;

use clap::{CommandFactory, FromArgMatches};
use exit::Code;
use lamassu_crypto::Provider;
use std::ffi::OsString;
use std::process::ExitCode;

fn main() -> ExitCode {
    set_panic_hook();
    let code = std::panic::catch_unwind(|| run(std::env::args_os().collect())).unwrap_or(Code::Internal);
    ExitCode::from(code.number())
}

fn run(argv: Vec<OsString>) -> Code {
    // Before anything else: keeps keys out of core dumps and away from tracers. A failure is no reason to refuse work.
    let hardened = lamassu_crypto::secret::harden_process();
    if argv.get(1).is_some_and(|word| word == alert::WORD) {
        return alert::serve();
    }
    let argv = match fstab::rewrite(argv) {
        Ok(argv) => argv,
        Err(error) => return failed(&error.into()),
    };
    let (cli, opening) = match parsed(argv) {
        Ok(parsed) => parsed,
        Err(error) => {
            // Also for --help and --version, whose text goes to standard output; a closed output is no error.
            let _ = error.print();
            return if error.use_stderr() { Code::Usage } else { Code::Done };
        }
    };
    if cli.global.fips() {
        // The process's only choice of a provider of cryptography.
        Provider::APPROVED.install().expect("nothing is computed before the command line is read");
    }
    let mut ui = cli.global.ui(opening);
    lamassu_host::served_keys::ask_as(&ui.policy.anchors);
    if let Err(error) = hardened {
        ui.warn(format_args!("core dumps could not be switched off: {error}"));
    }
    let started = log::start(&ui, cli.global.log_file());
    let approved = started.and_then(|()| if cli.global.fips() { take_approved_only(&mut ui) } else { Ok(()) });
    let done = approved.and_then(|()| cmd::run(&ui, cli.command));
    ui.policy.anchors.end_reports();
    log::limit::tell();
    match done {
        Ok(code) => code,
        Err(error) => failed(&error),
    }
}

/// The command line, and the options about vaults of its command.
fn parsed(argv: Vec<OsString>) -> Result<(args::Cli, opening::Opening), clap::Error> {
    let matches = args::Cli::command().try_get_matches_from(argv)?;
    let cli = args::Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut args::Cli::command()))?;
    Ok((cli, opening::Opening::given(&matches)))
}

/// `--fips`: known answers before anything else, and approved primitives alone.
fn take_approved_only(ui: &mut output::Ui) -> crate::fault::Result<()> {
    tracing::info!("{}", cmd::selftest::module());
    ui.policy = ui.policy.clone().approved_only()?;
    Ok(())
}

fn failed(error: &crate::fault::Error) -> Code {
    let code = exit::code_of(error);
    if code != Code::Done {
        output::say_error(error);
        if let Some(hint) = exit::hint(error) {
            output::say(format_args!("hint: {hint}"));
        }
    }
    code
}

/// A panic is a bug in Lamassu, and is reported as one, in one line, without a backtrace.
fn set_panic_hook() {
    std::panic::set_hook(Box::new(|info| {
        let place = info.location().map(|l| format!(" at {}:{}", l.file(), l.line())).unwrap_or_default();
        let what = info.payload_as_str().unwrap_or("unknown");
        output::say(format_args!("lamassu: internal error{place}: {what}; this is a bug, please report it"));
        tracing::error!(place, what, "internal error");
    }));
}
