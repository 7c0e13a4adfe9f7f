//! One module per command.

pub mod anchor;
pub mod cat;
pub mod check;
pub mod clone;
pub mod completions;
pub mod cp;
pub mod dataset;
pub mod estimate;
pub mod freeze;
pub mod gateway;
pub mod history;
pub mod host;
pub mod info;
pub mod init;
pub mod inspect;
pub mod key;
pub mod leak;
pub mod ls;
pub mod mount;
pub mod path;
pub mod policy;
pub mod profile;
pub mod receipt;
pub mod rekey;
pub mod remount;
pub mod scrub;
pub mod selftest;
pub mod speed;
pub mod umount;
pub mod volume;
pub mod zone;

use crate::args::Command;
use crate::exit::Code;
use crate::fault::Result;
use crate::output::Ui;
use crate::signals;

/// Runs a command.
pub fn run(ui: &Ui, command: Command) -> Result<Code> {
    // A mount forks, and a process with threads must not. A gateway waits for signals by itself.
    if !matches!(command, Command::Mount(_) | Command::Gateway(_)) {
        signals::start();
    }
    let done = match command {
        Command::Init(args) => init::run(ui, args),
        Command::Zone(zone) => zone::run(ui, zone),
        Command::Mount(args) => return mount::run(ui, args),
        Command::Gateway(command) => return gateway::run(ui, command),
        Command::Policy(command) => policy::run(ui, command),
        Command::Volume(command) => return volume::run(ui, command),
        Command::Umount(args) => return umount::run(ui, args),
        Command::Key(key) => key::run(ui, key),
        Command::Dataset(command) => dataset::run(ui, command),
        Command::Anchor(command) => anchor::run(ui, command),
        Command::Host(command) => host::run(ui, &command),
        Command::History(args) => history::run(ui, &args),
        Command::Receipt(command) => receipt::run(&command),
        Command::Rekey(args) => rekey::run(ui, &args),
        Command::Info(args) => info::run(ui, args),
        Command::Check(args) => check::run(ui, args),
        Command::Scrub(args) => scrub::run(ui, &args),
        Command::Inspect(args) => inspect::run(ui, args),
        Command::Ls(args) => ls::run(ui, args),
        Command::Cat(args) => cat::run(ui, args),
        Command::Cp(args) => cp::run(ui, args),
        Command::Clone(args) => clone::run(ui, args),
        Command::Snapshot(args) => clone::snapshot(ui, args),
        Command::Path(args) => path::run(ui, args),
        Command::Profile(command) => profile::run(ui, command),
        Command::Freeze(args) => freeze::freeze(ui, args),
        Command::Thaw(args) => freeze::thaw(ui, args),
        Command::Speed(args) => speed::run(ui, args),
        Command::Selftest(args) => selftest::run(args),
        Command::Leak(args) => leak::run(ui, args),
        Command::DedupEstimate(args) => estimate::run(ui, args),
        Command::Completions(args) => completions::run(args),
    };
    done.map(|()| Code::Done)
}
