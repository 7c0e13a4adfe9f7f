//! The command line's grammar.

use crate::cmd;
use crate::opening::Opening;
use crate::output::Ui;
use clap::{Parser, Subcommand};
use std::path::{Path, PathBuf};

const AFTER_HELP: &str = "\
Two commands to begin with:
  lamassu init /srv/store/vault
  lamassu mount /srv/store/vault ~/private

Exit codes are listed in docs/cli.md; 12 means: wrong key.";

/// Encrypts files so that the storage below can still deduplicate them.
#[derive(Parser, Debug)]
#[command(name = "lamassu", version, propagate_version = true, max_term_width = 110, after_help = AFTER_HELP)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(clap::Args, Debug)]
pub struct Global {
    /// Print what is being done; twice for more
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = "Common options")]
    verbose: u8,
    /// Print only warnings and errors
    #[arg(short, long, global = true, help_heading = "Common options")]
    quiet: bool,
    /// Append logs to FILE, with times, instead of standard error and (for a mount in the background) syslog
    #[arg(long, global = true, value_name = "FILE", help_heading = "Common options")]
    log_file: Option<PathBuf>,
    /// Run the known-answer tests of all ciphers first, and refuse everything that is not built from FIPS-approved
    /// primitives; docs/threat-model.md says what that claims
    #[arg(long, global = true, help_heading = "Common options")]
    fips: bool,
}

impl Global {
    pub fn ui(&self, opening: Opening) -> Ui {
        Ui { quiet: self.quiet, verbose: self.verbose, policy: opening.policy() }
    }

    pub fn fips(&self) -> bool {
        self.fips
    }

    pub fn log_file(&self) -> Option<&Path> {
        self.log_file.as_deref()
    }
}

/// What to do.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Create a vault in an empty directory
    Init(cmd::init::Args),
    /// Create, describe or rotate an isolation zone: the key that lets several vaults deduplicate with one another
    #[command(subcommand)]
    Zone(cmd::zone::Zone),
    /// Mount a vault at a directory
    Mount(cmd::mount::Args),
    /// Serve a vault, or a provider's store of ciphertext objects, over S3
    #[command(subcommand)]
    Gateway(cmd::gateway::GatewayCommand),
    /// Manage a tenant's access rules at a provider, which enforces them without being able to read them
    #[command(subcommand)]
    Policy(cmd::policy::PolicyCommand),
    /// Create, list, resize, copy, destroy or export volumes: disk images in a vault
    #[command(subcommand)]
    Volume(cmd::volume::VolumeCommand),
    /// Unmount a vault, and wait until everything is in the store
    #[command(visible_alias = "unmount")]
    Umount(cmd::umount::Args),
    /// List, add, remove or change the key slots of a vault or zone
    #[command(subcommand)]
    Key(cmd::key::Key),
    /// Create, list, change or destroy datasets: directories with keys of their own
    #[command(subcommand)]
    Dataset(cmd::dataset::DatasetCommand),
    /// Show, copy, move or rebuild a vault's anchor: a file outside the store that knows the vault's newest state
    #[command(subcommand)]
    Anchor(cmd::anchor::AnchorCommand),
    /// Join a server that keeps anchors of shared vaults
    #[command(subcommand)]
    Host(cmd::host::HostCommand),
    /// Show and verify the record of changes to a vault's keys: what was done, when and by whom
    History(cmd::history::Args),
    /// Verify a receipt of `key destroy`, or print the public key that verifies it
    #[command(subcommand)]
    Receipt(cmd::receipt::Receipt),
    /// Re-encrypt stored metadata or data under the newest keys, after `key rotate`
    Rekey(cmd::rekey::Args),
    /// Describe a vault and its mount; needs no key
    Info(cmd::info::Args),
    /// Verify every seal, key and block of a vault that is not mounted
    #[command(visible_alias = "fsck")]
    Check(cmd::check::Args),
    /// Verify the whole store against the anchor; needs no key
    Scrub(cmd::scrub::Args),
    /// Decode and print the on-disk structures of one file or directory
    Inspect(cmd::inspect::Args),
    /// List files of a vault without mounting it
    Ls(cmd::ls::Args),
    /// Write files of a vault to standard output without mounting it
    Cat(cmd::cat::Args),
    /// Copy files into, out of or within a vault without mounting it
    Cp(cmd::cp::Args),
    /// Copy a vault within the store, sharing its blocks where the store can; the copy may get keys of its own
    Clone(cmd::clone::Args),
    /// Copy a vault within the store as a snapshot, which is never written
    Snapshot(cmd::clone::SnapshotArgs),
    /// Choose or show how the blocks of files are protected, by file and directory
    #[command(subcommand)]
    Profile(cmd::profile::ProfileCommand),
    /// Translate between paths in a vault and paths in the store
    Path(cmd::path::Args),
    /// Make everything durable and hold back changes, while a backup copies the store
    Freeze(cmd::freeze::Args),
    /// End a freeze
    Thaw(cmd::freeze::Args),
    /// Measure the speed of the ciphers on this machine
    Speed(cmd::speed::Args),
    /// Run the known-answer tests of all ciphers, on every kernel that this processor has
    Selftest(cmd::selftest::Args),
    /// Show what an observer of the store sees; needs no key
    Leak(cmd::leak::Args),
    /// Predict how much deduplication saves, for plain data and for a vault with the same data
    DedupEstimate(cmd::estimate::Args),
    /// Print a completion script for a shell
    Completions(cmd::completions::Args),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// Width of a terminal in which no line of an example wraps.
    const EXAMPLE_WIDTH_MAX: usize = 100;

    /// Every command without subcommands, with the words that call it.
    fn leaves() -> Vec<(String, clap::Command)> {
        fn below(command: &clap::Command, words: &str, found: &mut Vec<(String, clap::Command)>) {
            for sub in command.get_subcommands() {
                let words = format!("{words} {}", sub.get_name());
                match sub.has_subcommands() {
                    true => below(sub, &words, found),
                    false => found.push((words, sub.clone())),
                }
            }
        }
        let mut found = Vec::new();
        below(&Cli::command(), "lamassu", &mut found);
        found
    }

    /// The calls of this program among the examples, as far as a shell would pass them on: up to a comment, a pipe, a
    /// redirection.
    fn calls(help: &str) -> Vec<Vec<String>> {
        let lines = help.lines().filter_map(|line| line.strip_prefix("  "));
        let commands = lines.flat_map(|line| line.split(" && ")).flat_map(|part| part.split("; "));
        commands
            .filter(|command| command.starts_with("lamassu "))
            .map(|command| {
                let ends = ["  ", " | ", " > "].iter().filter_map(|end| command.find(end));
                let words = &command[..ends.min().unwrap_or(command.len())];
                words.split(' ').map(|word| word.trim_matches('\'').replace("HEX", &"00".repeat(32))).collect()
            })
            .collect()
    }

    #[test]
    fn every_command_has_examples_that_parse() {
        for (words, command) in leaves() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.lines().any(|line| line.starts_with("Example")), "{words}: {help}");
            let wide = help.lines().find(|line| line.chars().count() > EXAMPLE_WIDTH_MAX);
            assert!(wide.is_none(), "{words}: {wide:?} would wrap");
            let calls = calls(&help);
            for call in &calls {
                let parsed = Cli::try_parse_from(call).map(drop);
                assert!(parsed.is_ok(), "{words}: {call:?}: {parsed:?}");
            }
            assert!(calls.iter().any(|call| call.join(" ").starts_with(&words)), "{words} is not among its examples");
        }
    }

    /// docs/cli.md begins with a table of all commands.
    #[test]
    fn the_documentation_has_every_command() {
        let page = include_str!("../../../docs/cli.md");
        let table = page.lines().skip_while(|line| !line.starts_with("| command"));
        let named: Vec<Vec<&str>> = table
            .take_while(|line| line.starts_with('|'))
            .filter_map(|row| row.split(" | ").next())
            .flat_map(|cell| cell.split('`').skip(1).step_by(2))
            .map(|call| call.trim_start_matches("lamassu ").split(' ').collect())
            .collect();
        for (words, _) in leaves() {
            let words: Vec<&str> = words.split(' ').skip(1).collect();
            let is_it = |call: &Vec<&str>| {
                let matches = |(word, any): (&&str, &&str)| any.split("\\|").any(|one| one == *word);
                words.len() <= call.len() && words.iter().zip(call).all(matches)
            };
            assert!(named.iter().any(is_it), "{words:?}");
        }
    }
}
