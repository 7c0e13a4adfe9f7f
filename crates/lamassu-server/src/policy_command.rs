//! `lamassu-server policy`: an administrator's questions about the policy.

use crate::{print_json, say_each};
use clap::Subcommand;
use lamassu_server::admin::policy::{Decided, PolicyAnswer, PolicyRequest, Violation};
use lamassu_server::admin::{Answer, Request, ask};
use lamassu_server::policy::ShownRule;
use lamassu_server::{Result, ServerError};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(Subcommand)]
pub enum PolicyCommand {
    /// Show the rules: those in force if the server runs, otherwise those in the file
    Show {
        /// Print one JSON document
        #[arg(long)]
        json: bool,
        /// The server's directory
        dir: PathBuf,
    },
    /// Test whether a host may have files of a profile in a vault, and which rules forbid it
    Test {
        /// Print one JSON document
        #[arg(long)]
        json: bool,
        /// Use the rules in the file instead of those in force
        #[arg(long)]
        file: bool,
        /// The server's directory
        dir: PathBuf,
        /// The host's name
        host: String,
        /// The vault, by the id that `lamassu info` shows
        vault: String,
        /// Parts of a profile, separated by commas, such as `none` or `random,aes-128`; other parts are the defaults.
        /// Without this, all profiles are tested
        profile: Option<String>,
    },
    /// List the files of a vault, and of the datasets in it, whose profiles are forbidden to hosts that may use it
    Check {
        /// Print one JSON document
        #[arg(long)]
        json: bool,
        /// The server's directory
        dir: PathBuf,
        /// The vault, by the id that `lamassu info` shows
        vault: String,
    },
}

fn told(dir: &Path, asked: PolicyRequest) -> Result<PolicyAnswer> {
    match ask(dir, Request::Policy { asked })? {
        Answer::Policy { told } => Ok(told),
        _ => Err(ServerError::Garbled { detail: "an answer that was not asked for".into() }),
    }
}

pub fn run(command: PolicyCommand) -> Result<()> {
    match command {
        PolicyCommand::Show { json, dir } => {
            let answer = told(&dir, PolicyRequest::Show)?;
            match &answer {
                PolicyAnswer::Rules { .. } if json => print_json(&answer)?,
                PolicyAnswer::Rules { rules, in_force, note } => {
                    say_each(rules.iter().map(shown))?;
                    let which = if *in_force { "in force" } else { "in the file; no server runs" };
                    eprintln!("{} rules {which}", rules.len());
                    note.iter().for_each(|note| eprintln!("{note}"));
                }
                _ => {}
            }
            Ok(())
        }
        PolicyCommand::Test { json, file, dir, host, vault, profile } => {
            let one = profile.is_some();
            let answer = told(&dir, PolicyRequest::Test { host, vault, profile, file })?;
            let PolicyAnswer::Decided { decided } = &answer else { return Ok(()) };
            match json {
                true => print_json(&answer),
                false => say_each(decided.iter().map(decision)),
            }?;
            let forbidden = decided.iter().filter(|one| !one.forbidden.is_empty()).count();
            if one && forbidden > 0 { Err(ServerError::Forbidden { count: forbidden }) } else { Ok(()) }
        }
        PolicyCommand::Check { json, dir, vault } => {
            let answer = told(&dir, PolicyRequest::Check { vault })?;
            let PolicyAnswer::Found { files, more } = &answer else { return Ok(()) };
            match json {
                true => print_json(&answer),
                false => say_each(files.iter().map(found)),
            }?;
            let count = files.len() + usize::try_from(*more).unwrap_or(usize::MAX);
            if count > 0 { Err(ServerError::Forbidden { count }) } else { Ok(()) }
        }
    }
}

/// `"name"  hosts a, !b  vaults *  forbids protections none  requires ciphers aes-256`
fn shown(rule: &ShownRule) -> String {
    let said = |how: &str, words: &BTreeMap<String, Vec<String>>| {
        let each = words.iter().map(|(aspect, words)| format!("  {how} {aspect} {}", words.join(", ")));
        each.collect::<String>()
    };
    let (forbids, requires) = (said("forbids", &rule.forbids), said("requires", &rule.requires));
    let (hosts, vaults) = (rule.hosts.join(", "), rule.vaults.join(", "));
    format!("{:?}  hosts {hosts}  vaults {vaults}{forbids}{requires}", rule.rule)
}

fn decision(Decided { profile, forbidden }: &Decided) -> String {
    match forbidden.is_empty() {
        true => format!("allowed    {profile}"),
        false => {
            let by: Vec<_> = forbidden.iter().map(|(rule, what)| format!("{what} by {rule:?}")).collect();
            format!("forbidden  {profile}: {}", by.join("; "))
        }
    }
}

fn found(Violation { object, dataset, profile, rule, hosts }: &Violation) -> String {
    let hosts: Vec<_> = hosts.iter().map(String::as_str).collect();
    let place = dataset.as_ref().map(|dataset| format!(" in dataset {dataset}")).unwrap_or_default();
    format!("object {object}{place}  {profile}  by {rule:?} for {}", hosts.join(", "))
}
