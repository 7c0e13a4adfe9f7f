//! `lamassu policy leak`: what a provider learns of a tenant, computed from the provider's own files.

use crate::fault::{Context, Result};
use crate::output::{print, print_json};
use lamassu_access::bundle::{BUNDLE_FILE, STATUS_FILE};
use lamassu_access::leak::{Insider, Leak, Objects};
use lamassu_access::{AccessError, Bundle, Claims, Status};
use lamassu_gateway::provider::ProviderConfig;
use lamassu_host::Error as HostError;
use serde_json::{Value as Json, json};
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  lamassu policy leak --config /etc/lamassu/proxy.toml acme
  lamassu policy leak --config /etc/lamassu/proxy.toml --insider eve.json,dept=law acme
An insider is a person of the tenant who gives the provider a credential (the JSON of `lamassu
policy issue`) and the attributes it was made for. With several insiders, the provider can match
tokens to attributes.";

/// Options of `policy leak`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Configuration file of the provider's proxy
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// A person who helps the provider: a credential, and the attributes it was made for; repeatable
    #[arg(long = "insider", value_name = "FILE,ATTRIBUTE=VALUE,…")]
    insiders: Vec<String>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The tenant's bucket
    bucket: String,
}

fn read(path: &Path) -> Result<String> {
    let local = |source| HostError::Local { op: "read", path: path.into(), source };
    Ok(std::fs::read_to_string(path).map_err(local)?)
}

pub fn run(args: &Args) -> Result<()> {
    let config = ProviderConfig::read(&args.config)?;
    let tenants = config.tenants().map_err(AccessError::Argument)?;
    let missing = || AccessError::NotFound { what: "tenant with the bucket", name: args.bucket.clone() };
    let tenant = tenants.into_iter().find(|tenant| tenant.bucket == args.bucket).ok_or_else(missing)?;
    let text = |name: &str| read(&tenant.published.join(name));
    let bundle = Bundle::verify(&tenant.key, &tenant.bucket, &text(BUNDLE_FILE)?)?;
    let status = Status::verify(&tenant.key, &tenant.bucket, &text(STATUS_FILE)?)?;
    let insiders = args.insiders.iter().map(|text| insider(text, &tenant.key, &tenant.bucket));
    let insiders = insiders.collect::<Result<Vec<_>>>()?;
    let leak = Leak::of(&bundle, &insiders);
    let mut stored = Vec::new();
    walk(&config.store.join(&tenant.bucket), "", &mut stored).context("the store")?;
    let objects = Objects::of(stored.iter().map(|(key, size)| (key.as_str(), *size)));
    if args.json {
        return print_json(&json!({ "rules": leak, "objects": objects, "revoked": status.revoked.len() }));
    }
    print(format_args!("statements       {} that permit, {} that forbid", leak.permits, leak.forbids))?;
    print(format_args!("people named     {}, as tokens", leak.people.len()))?;
    print(format_args!("keys named       {}, sealed", leak.keys.len()))?;
    print(format_args!("revoked          {}", status.revoked.len()))?;
    print(format_args!(
        "objects          {} in {} folders, {} deep, {} bytes, {} different sizes",
        objects.objects, objects.folders, objects.depth, objects.bytes, objects.sizes
    ))?;
    print(format_args!("tokens           {}", leak.tokens.len()))?;
    for (token, known) in &leak.tokens {
        let candidates: Vec<&str> = known.candidates.iter().map(String::as_str).collect();
        let is = match candidates.as_slice() {
            [] => String::new(),
            [only] => format!("  is {only}"),
            several => format!("  is one of {}", several.join(", ")),
        };
        let of = if insiders.is_empty() { String::new() } else { format!(", of {} insiders", known.insiders) };
        print(format_args!("  {token}  in {} statements, beside {}{of}{is}", known.statements, known.beside))?;
    }
    Ok(())
}

fn insider(text: &str, key: &[u8; 32], bucket: &str) -> Result<Insider> {
    let mut words = text.split(',');
    let path = PathBuf::from(words.next().unwrap_or_default());
    let credential: Json = serde_json::from_str(&read(&path)?).with_context(|| path.display().to_string())?;
    let token = credential["SessionToken"].as_str().unwrap_or_default();
    let claims = Claims::verify(key, bucket, token);
    let forged = |_| AccessError::Document { what: "the credential", detail: "it is not of this tenant" };
    Ok(Insider { claims: claims.map_err(forged)?, attributes: words.map(String::from).collect() })
}

/// The keys below a directory, with the sizes of their objects.
fn walk(dir: &Path, key: &str, found: &mut Vec<(String, u64)>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // The proxy's own: uploads under way.
        if name.starts_with(".lamassu-") {
            continue;
        }
        let key = if key.is_empty() { name } else { format!("{key}/{name}") };
        let st = entry.metadata()?;
        match st.is_dir() {
            true => walk(&entry.path(), &key, found)?,
            false => found.push((key, st.len())),
        }
    }
    Ok(())
}
