//! `lamassu policy`: the tenant's policy manager: people, attributes, rules, publications, credentials
//! (docs/access.md).

mod edit;
mod leak;
mod publish;
mod show;

use crate::fault::Result;
use crate::keys::{self, SourceText};
use crate::output::Ui;
use lamassu_access::manager::Manager;
use lamassu_keys::{Purpose, unix_now};
use std::path::{Path, PathBuf};

/// Names the source of the key, where no option does.
const KEY_VARIABLE: &str = "LAMASSU_POLICY_KEY";

/// Who may do what at a provider.
#[derive(clap::Subcommand, Debug)]
pub enum PolicyCommand {
    /// Create a tenant's policy manager in a new directory
    Init(publish::Init),
    /// Show a policy manager: bucket, public key, present state; needs no key
    Show(show::Show),
    /// Declare the attributes of people
    #[command(subcommand)]
    Attribute(edit::AttributeCommand),
    /// Manage people and their attributes
    #[command(subcommand)]
    Person(edit::PersonCommand),
    /// Manage the rules: Cedar, over plain attributes
    #[command(subcommand)]
    Rule(edit::RuleCommand),
    /// Publish rules over tokens, and revocations, to the provider's proxy
    Publish(publish::Publish),
    /// Issue a credential for a person
    Issue(publish::Issue),
    /// Revoke a credential, or all credentials of a person
    Revoke(publish::Revoke),
    /// Begin an epoch: tokens change, and all earlier credentials become invalid
    Rotate(publish::Rotate),
    /// Test what the rules decide, over attributes and over tokens
    Test(show::Test),
    /// Translate keys of objects from plain to sealed, or back
    Name(show::Name),
    /// Show the audit trail, verified; needs no key
    Audit(show::Audit),
    /// Show what a provider learns of a tenant, alone and with insiders; needs no key
    Leak(leak::Args),
}

/// What opens the manager's keys.
#[derive(clap::Args, Clone, Debug)]
pub struct KeyArg {
    /// Key source that opens the manager's keys [default: passphrase:prompt] [env: LAMASSU_POLICY_KEY]
    #[arg(short, long, value_name = "SOURCE")]
    key: Option<SourceText>,
}

impl KeyArg {
    fn load(&self, ui: &Ui, dir: &Path, purpose: Purpose) -> Result<lamassu_keys::Material> {
        let said = std::env::var_os(KEY_VARIABLE).map(|text| SourceText::from(&*text.to_string_lossy()));
        let source = match (&self.key, &said) {
            (Some(key), _) => key.parse("--key")?,
            (None, Some(said)) => said.parse(KEY_VARIABLE)?,
            (None, None) => keys::source_or_prompt(None, "--key")?,
        };
        keys::load(ui, &source, &dir.display().to_string(), purpose)
    }

    /// The manager, with its keys.
    fn open(&self, ui: &Ui, dir: &Path) -> Result<Manager> {
        let mut manager = Manager::open(dir)?;
        manager.unlock(&self.load(ui, dir, Purpose::Unlock)?)?;
        Ok(manager)
    }
}

/// The directory of the manager.
#[derive(clap::Args, Clone, Debug)]
pub struct DirArg {
    /// The policy manager's directory
    dir: PathBuf,
}

fn now() -> u64 {
    unix_now()
}

pub fn run(ui: &Ui, command: PolicyCommand) -> Result<()> {
    match command {
        PolicyCommand::Init(args) => publish::init(ui, &args),
        PolicyCommand::Show(args) => show::show(&args),
        PolicyCommand::Attribute(command) => edit::attribute(ui, command),
        PolicyCommand::Person(command) => edit::person(ui, command),
        PolicyCommand::Rule(command) => edit::rule(ui, command),
        PolicyCommand::Publish(args) => publish::publish(ui, &args),
        PolicyCommand::Issue(args) => publish::issue(ui, &args),
        PolicyCommand::Revoke(args) => publish::revoke(ui, &args),
        PolicyCommand::Rotate(args) => publish::rotate(ui, &args),
        PolicyCommand::Test(args) => show::test(ui, &args),
        PolicyCommand::Name(args) => show::name(ui, &args),
        PolicyCommand::Audit(args) => show::audit(&args),
        PolicyCommand::Leak(args) => leak::run(&args),
    }
}
