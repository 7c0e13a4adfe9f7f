//! `lamassu inspect`: the on-disk structures of one entry, decoded. Never shows a block key or a directory's secret.

mod entry;
mod file;

use crate::fault::{Context, Result};
use crate::keys::{self, KeyArg};
use crate::open::{OrphanArg, Unsealed};
use crate::output::{self, Ui};
use crate::{open, text};
use lamassu_host::Error as HostError;
use lamassu_vault::{EntryRef, Kind};
use serde::Serialize;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  lamassu inspect /srv/store/vault disk.img      a file: geometry, size, and every page
  lamassu inspect /srv/store/vault photos        a directory: its id, and what is stored in it
  lamassu inspect --json /srv/store/vault disk.img | jq '.pages[] | select(.state != \"good\")'
  lamassu inspect --header backup/lamassu.vault backup/Zk3…/9aQ…";

/// Options of `inspect`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = EXAMPLES,
    after_long_help = help(),
    override_usage = "lamassu inspect [OPTIONS] <DIR> <PATH>\n       lamassu inspect [OPTIONS] --header <FILE> <STORED>\n       lamassu inspect [OPTIONS] --orphan <DIR> <STORED>"
)]
pub struct Args {
    #[command(flatten)]
    key: KeyArg,
    #[command(flatten)]
    orphan: OrphanArg,
    /// Print every slot in use, too: block, offset in the store, state
    #[arg(long)]
    slots: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// The vault, then a plain path in it
    #[arg(required = true, value_name = "PATH")]
    places: Vec<PathBuf>,
}

fn help() -> String {
    format!("{EXAMPLES}\n\n{}", keys::HELP)
}

/// What is inspected.
struct Subject<'a> {
    unsealed: &'a Unsealed,
    /// where its bytes are
    on_disk: PathBuf,
    /// what it is called in the vault, where that is known
    plain: Option<PathBuf>,
    slots: bool,
}

#[derive(Serialize)]
struct Head {
    plain: Option<String>,
    stored: String,
    kind: &'static str,
}

pub fn run(ui: &Ui, args: Args) -> Result<()> {
    let one = "give one path to inspect";
    if let Some((found, files)) = args.orphan.found(ui, &args.places)? {
        let [path] = files else { return Err(HostError::Usage(one).into()) };
        let unsealed = open::unlock(ui, found, &args.key)?;
        let subject = Subject { unsealed: &unsealed, on_disk: path.clone(), plain: None, slots: args.slots };
        return subject.show(Kind::File, args.json);
    }
    let [dir, path] = args.places.as_slice() else { return Err(HostError::Usage(one).into()) };
    let mut unsealed = open::unlocked(&ui.without_anchor(), dir, &args.key)?;
    let vault = unsealed.open(open::options(true))?;
    let named = || format!("vault:{}", path.display());
    let entry = EntryRef::new(&*vault, vault.resolve(path.as_os_str()).with_context(named)?);
    let stored = vault.stored_path(path.as_os_str()).with_context(named)?;
    let subject =
        Subject { unsealed: &unsealed, on_disk: dir.join(stored), plain: Some(path.clone()), slots: args.slots };
    subject.show(entry.attr().kind, args.json)
}

impl Subject<'_> {
    fn show(&self, kind: Kind, json: bool) -> Result<()> {
        let head = Head {
            plain: self.plain.as_ref().map(|p| p.to_string_lossy().into_owned()),
            stored: self.on_disk.to_string_lossy().into_owned(),
            kind: super::ls::kind_name(kind),
        };
        match kind {
            Kind::File => output_as(json, &head, &file::inspect(self)?),
            Kind::Dir => output_as(json, &head, &entry::directory(self)?),
            Kind::Symlink => output_as(json, &head, &entry::symlink(self)?),
            Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => {
                output_as(json, &head, &entry::special())
            }
        }
    }

    fn failed(&self, op: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> HostError {
        let path = path.to_path_buf();
        move |source| HostError::Backing { op, path, source }
    }
}

/// Something that is shown to people and to programs.
trait Shown: Serialize {
    fn text(&self) -> String;
}

#[derive(Serialize)]
struct Document<'a, T> {
    #[serde(flatten)]
    head: &'a Head,
    #[serde(flatten)]
    body: &'a T,
}

fn output_as<T: Shown>(json: bool, head: &Head, body: &T) -> Result<()> {
    if json {
        return output::print_json(&Document { head, body });
    }
    let plain = head
        .plain
        .as_ref()
        .map_or(String::new(), |p| format!("plain path    /{}\n", text::printable(p.trim_start_matches('/'))));
    let stored = text::printable(&head.stored);
    let text = format!("{plain}stored path   {stored}\nkind          {}\n{}", head.kind, body.text());
    output::print(text.trim_end())
}
