//! What changes nothing.

use super::{DirArg, KeyArg};
use crate::fault::Result;
use crate::output::{Ui, print, print_json};
use lamassu_access::Action;
use lamassu_access::manager::Manager;
use lamassu_keys::date;
use serde_json::json;

const SHOW_EXAMPLES: &str = "\
Examples:
  lamassu policy show /var/lib/acme/policy
  lamassu policy show --json /var/lib/acme/policy";

const TEST_EXAMPLES: &str = "\
Examples:
  lamassu policy test /var/lib/acme/policy alice read reports/2026/q1.pdf
The test uses the present rules, published or not.";

const NAME_EXAMPLES: &str = "\
Examples:
  lamassu policy name /var/lib/acme/policy reports/2026/q1.pdf
  lamassu policy name --reverse /var/lib/acme/policy uNQ3wLhn5VqPnDwa0JTEmQ
A slash at the end is kept, for prefixes.";

const AUDIT_EXAMPLES: &str = "\
Examples:
  lamassu policy audit /var/lib/acme/policy
  lamassu policy audit --json /var/lib/acme/policy
Note the last head elsewhere: it shows later that no earlier entry was rewritten.";

/// Options of `policy show`.
#[derive(clap::Args, Debug)]
#[command(after_help = SHOW_EXAMPLES)]
pub struct Show {
    #[command(flatten)]
    dir: DirArg,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Options of `policy test`.
#[derive(clap::Args, Debug)]
#[command(after_help = TEST_EXAMPLES)]
pub struct Test {
    #[command(flatten)]
    key: KeyArg,
    #[command(flatten)]
    dir: DirArg,
    /// Name of the person
    person: String,
    /// The action: read, write, list or delete
    action: Action,
    /// Plain key of an object or of a folder
    object: String,
}

/// Options of `policy name`.
#[derive(clap::Args, Debug)]
#[command(after_help = NAME_EXAMPLES)]
pub struct Name {
    #[command(flatten)]
    key: KeyArg,
    /// Translate sealed keys to plain ones
    #[arg(long)]
    reverse: bool,
    #[command(flatten)]
    dir: DirArg,
    /// Keys to translate
    #[arg(required = true, value_name = "KEY")]
    objects: Vec<String>,
}

/// Options of `policy audit`.
#[derive(clap::Args, Debug)]
#[command(after_help = AUDIT_EXAMPLES)]
pub struct Audit {
    #[command(flatten)]
    dir: DirArg,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

pub fn show(args: &Show) -> Result<()> {
    let manager = Manager::open(&args.dir.dir)?;
    let (epoch, bundle, to) = manager.in_force()?;
    let issued = manager.issued()?;
    let valid = issued.values().filter(|one| !one.is_revoked && one.ends > super::now()).count();
    let to = to.map(|to| to.display().to_string());
    if args.json {
        return print_json(&json!({
            "bucket": manager.bucket(), "public_key": manager.public(), "proxy": manager.proxy(), "epoch": epoch,
            "bundle": bundle, "published_to": to, "people": manager.people()?.len(), "rules": manager.rules()?.len(),
            "credentials": valid,
        }));
    }
    print(format_args!("bucket        {}", manager.bucket()))?;
    print(format_args!("public key    {}", manager.public()))?;
    print(format_args!("proxy         {}", manager.proxy()))?;
    print(format_args!("epoch         {epoch}"))?;
    print(format_args!("published     {bundle}, to {}", to.as_deref().unwrap_or("nowhere yet")))?;
    print(format_args!("people        {}", manager.people()?.len()))?;
    print(format_args!("rules         {}", manager.rules()?.len()))?;
    print(format_args!("credentials   {valid}"))
}

pub fn test(ui: &Ui, args: &Test) -> Result<()> {
    let manager = args.key.open(ui, &args.dir.dir)?;
    let (plain, tokens) = manager.test(&args.person, args.action, &args.object)?;
    let said = |allowed| if allowed { "allowed" } else { "denied" };
    print(format_args!("{}, over tokens {}", said(plain), said(tokens)))
}

pub fn name(ui: &Ui, args: &Name) -> Result<()> {
    let manager = args.key.open(ui, &args.dir.dir)?;
    for key in &args.objects {
        print(if args.reverse { manager.open_key(key)? } else { manager.seal_key(key)? })?;
    }
    Ok(())
}

pub fn audit(args: &Audit) -> Result<()> {
    let all = Manager::open(&args.dir.dir)?.audit()?;
    let with_head = |(entry, head): &(lamassu_access::manager::audit::AuditEntry, String)| {
        let mut entry = serde_json::to_value(entry)?;
        entry["head"] = json!(head);
        Ok::<_, serde_json::Error>(entry)
    };
    let entries = all.iter().map(with_head).collect::<std::result::Result<Vec<_>, _>>()?;
    if args.json {
        return print_json(&entries);
    }
    for ((entry, head), value) in all.iter().zip(&entries) {
        let event = value["event"].as_str().unwrap_or_default();
        let fields = value.as_object().into_iter().flatten();
        let fields = fields.filter(|(name, _)| !["number", "time", "event", "head"].contains(&name.as_str()));
        let fields: Vec<String> = fields.map(|(name, value)| format!("{name}={value}")).collect();
        let time = date::time(i64::try_from(entry.time).unwrap_or(i64::MAX));
        print(format_args!("{:>6}  {time}  {event}  {}  head={}", entry.number, fields.join(" "), &head[..16]))?;
    }
    Ok(())
}
