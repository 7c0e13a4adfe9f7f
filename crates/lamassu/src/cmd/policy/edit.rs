//! Attributes, people, rules.

use super::{DirArg, now};
use crate::fault::Result;
use crate::output::{Ui, print, print_json};
use lamassu_access::manager::Manager;
use lamassu_access::{AttributeKind, Value, attribute};
use lamassu_host::Error as HostError;
use std::io::Read;
use std::path::PathBuf;

/// Longest rule that is read.
const RULE_MAX: u64 = 1 << 20;

const ATTRIBUTE_EXAMPLES: &str = "\
Examples:
  lamassu policy attribute set /var/lib/acme/policy dept text
  lamassu policy attribute set /var/lib/acme/policy projects set
  lamassu policy attribute set /var/lib/acme/policy clearance number
  lamassu policy attribute remove /var/lib/acme/policy dept
  lamassu policy attribute list /var/lib/acme/policy
In rules: principal has dept && principal.dept == \"finance\",
principal.projects.contains(\"apollo\"), principal has clearance && principal.clearance >= 3.";

const PERSON_EXAMPLES: &str = "\
Examples:
  lamassu policy person set /var/lib/acme/policy alice dept=law projects=a projects=z clearance=3
  lamassu policy person remove /var/lib/acme/policy alice
  lamassu policy person list /var/lib/acme/policy
The given attributes replace all earlier ones. If they differ, the next publication revokes the
person's credentials.";

const RULE_EXAMPLES: &str = "\
Examples:
  lamassu policy rule set /var/lib/acme/policy finance finance.cedar
  lamassu policy rule set /var/lib/acme/policy finance -
  lamassu policy rule remove /var/lib/acme/policy finance
  lamassu policy rule list /var/lib/acme/policy
A rule, in Cedar:
  permit(principal, action in [Action::\"read\", Action::\"list\"], resource in Key::\"reports\")
  when { principal has dept && [\"finance\", \"audit\"].contains(principal.dept) };
A rule takes effect when it is published. docs/access.md says what tokens can express.";

/// `policy attribute`.
#[derive(clap::Subcommand, Debug)]
pub enum AttributeCommand {
    /// Declare an attribute
    #[command(after_help = ATTRIBUTE_EXAMPLES)]
    Set {
        #[command(flatten)]
        dir: DirArg,
        /// Name of the attribute
        name: String,
        /// Kind of its values: text: at most one text; set: any number of texts; number: at most one whole number
        kind: AttributeKind,
    },
    /// Remove an attribute that is not in use
    #[command(after_help = ATTRIBUTE_EXAMPLES)]
    Remove {
        #[command(flatten)]
        dir: DirArg,
        /// Name of the attribute
        name: String,
    },
    /// List the attributes; needs no key
    #[command(after_help = ATTRIBUTE_EXAMPLES)]
    List(List),
}

/// `policy person`.
#[derive(clap::Subcommand, Debug)]
pub enum PersonCommand {
    /// Set the attributes of a person, replacing earlier ones
    #[command(after_help = PERSON_EXAMPLES)]
    Set {
        #[command(flatten)]
        dir: DirArg,
        /// Name of the person
        name: String,
        /// The attributes; give a set once for each of its texts
        #[arg(value_name = "ATTRIBUTE=VALUE")]
        attributes: Vec<String>,
    },
    /// Remove a person
    #[command(after_help = PERSON_EXAMPLES)]
    Remove {
        #[command(flatten)]
        dir: DirArg,
        /// Name of the person
        name: String,
    },
    /// List the people and their attributes; needs no key
    #[command(after_help = PERSON_EXAMPLES)]
    List(List),
}

/// `policy rule`.
#[derive(clap::Subcommand, Debug)]
pub enum RuleCommand {
    /// Create or replace a rule
    #[command(after_help = RULE_EXAMPLES)]
    Set {
        #[command(flatten)]
        dir: DirArg,
        /// Name of the rule
        name: String,
        /// File with the rule in Cedar; - reads standard input
        file: PathBuf,
    },
    /// Remove a rule
    #[command(after_help = RULE_EXAMPLES)]
    Remove {
        #[command(flatten)]
        dir: DirArg,
        /// Name of the rule
        name: String,
    },
    /// List the rules; needs no key
    #[command(after_help = RULE_EXAMPLES)]
    List(List),
}

/// Options of the lists.
#[derive(clap::Args, Debug)]
pub struct List {
    #[command(flatten)]
    dir: DirArg,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub fn attribute(ui: &Ui, command: AttributeCommand) -> Result<()> {
    match command {
        AttributeCommand::Set { dir, name, kind } => Manager::open(&dir.dir)?.set_attribute(&name, kind, now())?,
        AttributeCommand::Remove { dir, name } => Manager::open(&dir.dir)?.remove_attribute(&name, now())?,
        AttributeCommand::List(args) => {
            let all = Manager::open(&args.dir.dir)?.attributes()?;
            if args.json {
                return print_json(&all);
            }
            for (name, kind) in all {
                print(format_args!("{name}  {}", kind.name()))?;
            }
            return Ok(());
        }
    }
    ui.detail("done");
    Ok(())
}

fn told(ui: &Ui, revoked: &[String]) {
    if !revoked.is_empty() {
        ui.note(format_args!("credentials that the next publication revokes: {}", revoked.len()));
    }
}

pub fn person(ui: &Ui, command: PersonCommand) -> Result<()> {
    match command {
        PersonCommand::Set { dir, name, attributes } => {
            let manager = Manager::open(&dir.dir)?;
            let attributes = attribute::parse(&manager.attributes()?, attributes.iter().map(String::as_str))?;
            told(ui, &manager.set_person(&name, &attributes, now())?);
        }
        PersonCommand::Remove { dir, name } => told(ui, &Manager::open(&dir.dir)?.remove_person(&name, now())?),
        PersonCommand::List(args) => {
            let all = Manager::open(&args.dir.dir)?.people()?;
            if args.json {
                return print_json(&all);
            }
            for (name, attributes) in all {
                let words = attributes.iter().flat_map(|(name, value)| match value {
                    Value::Number(number) => vec![format!("{name}={number}")],
                    Value::Text(text) => vec![format!("{name}={text}")],
                    Value::Set(all) => all.iter().map(|text| format!("{name}={text}")).collect(),
                });
                print(format_args!("{name}  {}", words.collect::<Vec<_>>().join(" ")).to_string().trim_end())?;
            }
        }
    }
    Ok(())
}

pub fn rule(ui: &Ui, command: RuleCommand) -> Result<()> {
    match command {
        RuleCommand::Set { dir, name, file } => {
            Manager::open(&dir.dir)?.set_rule(&name, &read(file)?, now())?;
            ui.note("in force when it is published: `lamassu policy publish`");
        }
        RuleCommand::Remove { dir, name } => {
            Manager::open(&dir.dir)?.remove_rule(&name, now())?;
            ui.note("in force until the next publication: `lamassu policy publish`");
        }
        RuleCommand::List(args) => {
            let all = Manager::open(&args.dir.dir)?.rules()?;
            if args.json {
                return print_json(&all);
            }
            for (name, text) in all {
                print(format_args!("# {name}\n{}\n", text.trim_end()))?;
            }
        }
    }
    Ok(())
}

fn read(file: PathBuf) -> Result<String> {
    let mut text = String::new();
    let read = match file.to_str() {
        Some("-") => std::io::stdin().lock().take(RULE_MAX).read_to_string(&mut text),
        _ => std::fs::File::open(&file).and_then(|file| file.take(RULE_MAX).read_to_string(&mut text)),
    };
    read.map_err(|source| HostError::Local { op: "read", path: file, source })?;
    Ok(text)
}
