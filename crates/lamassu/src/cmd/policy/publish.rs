//! What changes something at the provider: a manager's start, publications, credentials.

use super::{DirArg, KeyArg, now};
use crate::fault::Result;
use crate::keys;
use crate::output::{Ui, print, print_json};
use crate::{policy, signals};
use lamassu_access::manager::{Manager, Published};
use lamassu_keys::{Purpose, date};
use std::path::PathBuf;
use std::time::{Duration, Instant};

const INIT_EXAMPLES: &str = "\
Examples:
  lamassu policy init --bucket acme --provider HEX /var/lib/acme/policy
  lamassu policy init -k raw:file:policy.key --bucket acme --provider HEX /var/lib/acme/policy
The provider gets HEX from `lamassu gateway provider --public-key`. Give the provider the tenant's
public key, which this command prints.";

const PUBLISH_EXAMPLES: &str = "\
Examples:
  lamassu policy publish --to /mnt/provider/acme /var/lib/acme/policy
  lamassu policy publish --every 15 /var/lib/acme/policy
A proxy refuses all requests if the list of revocations is older than a minute: run --every as a
service.";

const ISSUE_EXAMPLES: &str = "\
Examples:
  lamassu policy issue /var/lib/acme/policy alice
  lamassu policy issue --env --minutes 15 /var/lib/acme/policy alice
  lamassu policy issue --toml --minutes 720 /var/lib/acme/policy gateway > provider.toml
In ~/.aws/config:
  credential_process = lamassu policy issue -k raw:file:policy.key /var/lib/acme/policy alice";

const REVOKE_EXAMPLES: &str = "\
Examples:
  lamassu policy revoke /var/lib/acme/policy alice
  lamassu policy revoke /var/lib/acme/policy 0123456789ABCDEF0123456789ABCDEF
The command publishes at once, to the last directory used.";

const ROTATE_EXAMPLES: &str = "\
Examples:
  lamassu policy rotate /var/lib/acme/policy
The command publishes at once, to the last directory used. Then everybody needs a new credential.";

/// Options of `policy init`.
#[derive(clap::Args, Debug)]
#[command(after_help = INIT_EXAMPLES, after_long_help = init_help())]
pub struct Init {
    #[command(flatten)]
    key: KeyArg,
    /// The tenant's bucket at the provider
    #[arg(long, value_name = "NAME")]
    bucket: String,
    /// Public key of the provider's proxy
    #[arg(long, value_name = "HEX", value_parser = policy::parse_other_key)]
    provider: [u8; 32],
    #[command(flatten)]
    dir: DirArg,
}

fn init_help() -> String {
    format!("{INIT_EXAMPLES}\n\n{}", keys::HELP)
}

/// Options of `policy publish`.
#[derive(clap::Args, Debug)]
#[command(after_help = PUBLISH_EXAMPLES)]
pub struct Publish {
    #[command(flatten)]
    key: KeyArg,
    /// Directory that the provider reads [default: the last one used]
    #[arg(long, value_name = "DIRECTORY")]
    to: Option<PathBuf>,
    /// Publish periodically, every SECONDS, until a signal comes
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    every: Option<u64>,
    #[command(flatten)]
    dir: DirArg,
}

/// Options of `policy issue`.
#[derive(clap::Args, Debug)]
#[command(after_help = ISSUE_EXAMPLES)]
pub struct Issue {
    #[command(flatten)]
    key: KeyArg,
    /// Life of the credential, in minutes
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=2160), conflicts_with = "seconds")]
    minutes: u64,
    /// Life of the credential, in seconds
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=129_600))]
    seconds: Option<u64>,
    /// Print shell commands (export AWS_ACCESS_KEY_ID=…) instead of the JSON of `credential_process` for AWS tools
    #[arg(long)]
    env: bool,
    /// Print the file that a gateway reads as provider.credentials
    #[arg(long, conflicts_with = "env")]
    toml: bool,
    #[command(flatten)]
    dir: DirArg,
    /// Name of the person
    person: String,
}

/// Options of `policy revoke`.
#[derive(clap::Args, Debug)]
#[command(after_help = REVOKE_EXAMPLES)]
pub struct Revoke {
    #[command(flatten)]
    key: KeyArg,
    #[command(flatten)]
    dir: DirArg,
    /// Name of a person, or number of a credential: its access key
    what: String,
}

/// Options of `policy rotate`.
#[derive(clap::Args, Debug)]
#[command(after_help = ROTATE_EXAMPLES)]
pub struct Rotate {
    #[command(flatten)]
    key: KeyArg,
    #[command(flatten)]
    dir: DirArg,
}

pub fn init(ui: &Ui, args: &Init) -> Result<()> {
    let dir = &args.dir.dir;
    let material = args.key.load(ui, dir, Purpose::Create)?;
    let manager = Manager::init(dir, &args.bucket, &args.provider, &material, now())?;
    ui.note("the provider needs this public key, for the bucket:");
    print(manager.public())
}

/// Reports what was published. The error is that of rules that could not be published.
fn tell(ui: &Ui, done: Published) -> Result<()> {
    let Published { bundle, is_new, is_behind, unfit, status, revoked, to } = done;
    if is_behind {
        ui.warn(
            "newer publications of this policy manager were there: its database is an older copy. All credentials are \
             void from now on; people, attributes and rules are those of the copy: look whether they are right",
        );
    }
    let text = format_args!(
        "published to {}: rules {bundle}{}, status {status}, revoked credentials {revoked}",
        to.display(),
        if is_new { " (new)" } else { "" }
    )
    .to_string();
    if is_new {
        ui.note(text)
    } else {
        ui.detail(text)
    }
    match unfit {
        None => Ok(()),
        Some(error) => {
            ui.warn("the present rules cannot be published: those from before stay in force");
            Err(error.into())
        }
    }
}

pub fn publish(ui: &Ui, args: &Publish) -> Result<()> {
    let manager = args.key.open(ui, &args.dir.dir)?;
    let told = tell(ui, manager.publish(args.to.as_deref(), now())?);
    let Some(every) = args.every else { return told };
    if let Err(error) = told {
        ui.warn(format_args!("{error}"));
    }
    let keys = manager.close()?;
    signals::flag_only();
    let every = Duration::from_secs(every);
    let mut next = Instant::now() + every;
    while !signals::interrupted() {
        if Instant::now() < next {
            std::thread::sleep(Duration::from_millis(100));
            continue;
        }
        next += every;
        // What fails now may work the next time; meanwhile the proxy refuses.
        let done = Manager::open_with(&args.dir.dir, &keys).and_then(|manager| manager.publish(None, now()));
        if let Err(error) = done.map_err(Into::into).and_then(|done| tell(ui, done)) {
            ui.warn(format_args!("not published: {error}"));
        }
    }
    Ok(())
}

pub fn issue(ui: &Ui, args: &Issue) -> Result<()> {
    let manager = args.key.open(ui, &args.dir.dir)?;
    let seconds = args.seconds.unwrap_or(args.minutes * 60);
    let issued = manager.issue(&args.person, seconds, now())?;
    if args.env {
        return print(format_args!(
            "export AWS_ACCESS_KEY_ID={}\nexport AWS_SECRET_ACCESS_KEY={}\nexport AWS_SESSION_TOKEN={}",
            issued.access_key, *issued.secret, issued.session_token
        ));
    }
    if args.toml {
        return print(format_args!(
            "access_key = \"{}\"\nsecret_key = \"{}\"\ntoken = \"{}\"",
            issued.access_key, *issued.secret, issued.session_token
        ));
    }
    print_json(&serde_json::json!({
        "Version": 1,
        "AccessKeyId": issued.access_key,
        "SecretAccessKey": *issued.secret,
        "SessionToken": issued.session_token,
        "Expiration": date::time(i64::try_from(issued.ends).unwrap_or(i64::MAX)),
    }))
}

/// Publishes to the last directory used, if there is one.
fn publish_again(ui: &Ui, manager: &Manager) -> Result<()> {
    match manager.in_force()? {
        (_, _, Some(_)) => tell(ui, manager.publish(None, now())?),
        (_, _, None) => {
            ui.note("nothing was published yet");
            Ok(())
        }
    }
}

pub fn revoke(ui: &Ui, args: &Revoke) -> Result<()> {
    let manager = args.key.open(ui, &args.dir.dir)?;
    let revoked = manager.revoke(&args.what, now())?;
    ui.note(format_args!("revoked credentials: {}", revoked.len()));
    publish_again(ui, &manager)
}

pub fn rotate(ui: &Ui, args: &Rotate) -> Result<()> {
    let manager = args.key.open(ui, &args.dir.dir)?;
    let epoch = manager.rotate(now())?;
    ui.note(format_args!("epoch {epoch}"));
    publish_again(ui, &manager)
}
