//! `lamassu cp`: copies without a mount.

use crate::fault::{Context, Fault, Result};
use crate::keys::{self, KeyArg};
use crate::open::{self, OrphanArg};
use crate::output::Ui;
use crate::progress::Meter;
use crate::signals;
use crate::tree::copy::{self, Copier, in_store};
use crate::tree::grants::{Grants, LeftOut};
use crate::tree::local::{Local, read_stdin};
use crate::tree::stored::Stored;
use crate::tree::vault::VaultTree;
use crate::tree::whole::write_whole;
use crate::tree::{Dir, Meta, Tree};
use lamassu_host::Error as HostError;
use lamassu_vault::{FileSystem, Kind, VaultError};
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const EXAMPLES: &str = "\
Paths in the vault begin with `vault:`; others are local, and - is standard input.
Examples:
  lamassu cp /srv/store/vault report.pdf vault:            into the root of the vault
  lamassu cp -r /srv/store/vault ~/photos vault:/backup    a tree
  lamassu cp -r /srv/store/vault vault:/backup/photos .    out again
  lamassu cp /srv/store/vault vault:a vault:b              within the vault
  pg_dump db | lamassu cp -k raw:file:k /srv/store/vault - vault:db.sql
  lamassu cp -k raw:file:k --header backup/lamassu.vault backup/Zk3…/9aQ… ./found
      one stored file out of a backup, by its path in the store
`cp` keeps contents, holes, modes, times, extended attributes and links; owners, if run as root;
and several names of one file, if the target can link.
Copies out of a vault get no privileges from the store: modes lose set-id bits and the umask, files
are yours, device nodes are refused, and only `user.` attributes and access control lists are kept.
--trust-store keeps everything. A local file named vault:x is written ./vault:x.";

/// Options of `cp`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = EXAMPLES,
    after_long_help = help(),
    override_usage = "lamassu cp [OPTIONS] <DIR> <SRC>... <DST>\n       lamassu cp [OPTIONS] --header <FILE> <STORED>... <DST>\n       lamassu cp [OPTIONS] --orphan <DIR> <STORED>... <DST>"
)]
pub struct Args {
    #[command(flatten)]
    key: KeyArg,
    #[command(flatten)]
    orphan: OrphanArg,
    /// Copy directories with everything below them
    #[arg(short, long, visible_short_alias = 'R')]
    recursive: bool,
    /// When copying out of a vault: keep set-id bits, device nodes, owners, full modes and privileged attributes as the
    /// store has them. Anyone who can write to the store can choose them
    #[arg(long)]
    trust_store: bool,
    /// The vault, the paths to copy, and the target
    #[arg(required = true, num_args = 2.., value_name = "PATH")]
    places: Vec<PathBuf>,
}

fn help() -> String {
    format!("{EXAMPLES}\n\n{}", keys::HELP)
}

/// A path, and which tree it is of.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Destination {
    Vault(PathBuf),
    Local(PathBuf),
    Stdin,
}

impl Destination {
    fn of(path: &Path) -> Destination {
        let bytes = path.as_os_str().as_bytes();
        match bytes.strip_prefix(b"vault:") {
            Some(rest) => Destination::Vault(PathBuf::from(OsStr::from_bytes(rest))),
            None if bytes == b"-" => Destination::Stdin,
            None => Destination::Local(path.into()),
        }
    }
}

pub fn run(ui: &Ui, args: Args) -> Result<()> {
    if let Some((found, places)) = args.orphan.found(ui, &args.places)? {
        let (target, sources) = split(places)?;
        let store = store_of(&found.dir);
        refuse_in_store(target, store)?;
        let unsealed = open::unlock(ui, found, &args.key)?;
        let grants = out_of_store(&args, begin());
        // Both are local: a stored file is not replaced by its plaintext.
        let sides = Sides { from: &Stored::new(&unsealed), to: &Local, same: true, store, grants };
        return copy_all(ui, sides, sources, target, false);
    }
    let (dir, rest) = args.places.split_first().ok_or(HostError::Usage("give the vault first"))?;
    let (target, sources) = split(rest)?;
    let job = Job::of(sources, target)?;
    let store = store_of(dir);
    if let Destination::Local(target) = &job.target {
        refuse_in_store(target, store)?;
    }
    let mut key = args.key.clone();
    if job.sources.contains(&Destination::Stdin) {
        if key.source()?.takes_stdin() {
            let words = "standard input is copied, so the key must come from elsewhere, e.g. raw:fd:3";
            return Err(HostError::Usage(words).into());
        }
        // A passphrase or PIN is asked for on the terminal, or not at all: the first line of the data is none.
        key = key.leaving_stdin();
    }
    let read_only = matches!(job.target, Destination::Local(_));
    let vault = open::forest(ui, dir, &key, read_only)?;
    let mask = begin();
    let grants = if read_only { out_of_store(&args, mask) } else { Grants::Kept };
    let tree = VaultTree(Arc::clone(&vault));
    let done = job.run(ui, &tree, (store, grants), args.recursive);
    // What was copied before a failure is kept.
    let closed = vault.close();
    done?;
    Ok(closed?)
}

/// From here on a signal ends the copy in good order, and the umask is empty: each file is made for its owner alone and
/// then gets its mode. Call it after the keys are loaded, since files that loading writes must obey the umask. Returns
/// the previous umask. The limit of descriptors is raised, since a directory stays open for every level of a tree.
fn begin() -> u32 {
    signals::flag_only();
    open::raise_descriptor_limit();
    rustix::process::umask(rustix::fs::Mode::empty()).as_raw_mode()
}

/// What a copy to local directories takes over.
fn out_of_store(args: &Args, mask: u32) -> Grants {
    if args.trust_store { Grants::Kept } else { Grants::LeftOut { mask } }
}

fn split(places: &[PathBuf]) -> Result<(&Path, &[PathBuf]), HostError> {
    match places.split_last() {
        Some((target, sources)) if !sources.is_empty() => Ok((target, sources)),
        Some(_) | None => Err(HostError::Usage("give what to copy and where to, after the vault: DIR SRC… DST")),
    }
}

/// (st_dev, st_ino) of a vault's directory; of a header given by itself there is none that is known.
fn store_of(dir: &Path) -> Option<(u64, u64)> {
    dir.metadata().ok().filter(|m| m.is_dir()).map(|m| (m.dev(), m.ino()))
}

/// Plaintext does not go among the ciphertext.
fn refuse_in_store(target: &Path, store: Option<(u64, u64)>) -> Result<()> {
    let parent = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let dir = if is_dir(&Local, target)? { target } else { parent };
    match store {
        Some(store) if Local.lies_in(dir, store) => Err(in_store(Local.name(target))),
        Some(_) | None => Ok(()),
    }
}

/// What to copy, and where to.
struct Job {
    sources: Vec<Destination>,
    target: Destination,
}

impl Job {
    fn of(sources: &[PathBuf], target: &Path) -> Result<Job, HostError> {
        let sources: Vec<Destination> = sources.iter().map(|s| Destination::of(s)).collect();
        let target = Destination::of(target);
        let vault_sources = sources.iter().filter(|s| matches!(s, Destination::Vault(_))).count();
        if vault_sources != 0 && vault_sources != sources.len() {
            return Err(HostError::Usage("copy from the vault or from outside, not from both at once"));
        }
        match (&target, vault_sources) {
            (Destination::Stdin, _) => Err(HostError::Usage("to standard output: use `lamassu cat`")),
            (Destination::Local(_), 0) => {
                Err(HostError::Usage("neither side is in the vault: write its paths as vault:PATH"))
            }
            _ if sources.len() > 1 && sources.contains(&Destination::Stdin) => {
                Err(HostError::Usage("standard input can only be copied alone"))
            }
            _ => Ok(Job { sources, target }),
        }
    }

    fn run(
        &self,
        ui: &Ui,
        vault: &VaultTree,
        (store, grants): (Option<(u64, u64)>, Grants),
        recursive: bool,
    ) -> Result<()> {
        if let ([Destination::Stdin], Destination::Vault(target)) = (self.sources.as_slice(), &self.target) {
            return copy_stdin(vault, target);
        }
        let path = |p: &Destination| match p {
            Destination::Vault(path) | Destination::Local(path) => path.clone(),
            Destination::Stdin => PathBuf::from("-"),
        };
        let tree = |p: &Destination| -> &dyn Tree { if matches!(p, Destination::Vault(_)) { vault } else { &Local } };
        let sources: Vec<PathBuf> = self.sources.iter().map(path).collect();
        let from = self.sources.first().map_or(&Local as &dyn Tree, tree);
        let same = matches!((self.sources.first(), &self.target), (Some(Destination::Vault(_)), Destination::Vault(_)));
        let sides = Sides { from, to: tree(&self.target), same, store, grants };
        copy_all(ui, sides, &sources, &path(&self.target), recursive)
    }
}

fn copy_stdin(vault: &VaultTree, target: &Path) -> Result<()> {
    let (dir, name) = place_of(vault, target)?;
    let mask = 0o022;
    write_whole(
        &*dir,
        name,
        |output| read_stdin(|offset, data| output.write_at(offset, data)),
        |node| node.set_mode(0o666 & !mask),
    )
}

/// The directory that a path lies in, held, and its name there.
fn place_of<'p>(tree: &dyn Tree, path: &'p Path) -> Result<(Box<dyn Dir>, &'p OsStr)> {
    let name = path.file_name().ok_or(VaultError::InvalidName).with_context(|| tree.name(path))?;
    Ok((tree.dir(path.parent().unwrap_or(Path::new("")))?, name))
}

/// The trees of a copy, whether they are one, and where the vault's directory is.
struct Sides<'a> {
    from: &'a dyn Tree,
    to: &'a dyn Tree,
    same: bool,
    store: Option<(u64, u64)>,
    grants: Grants,
}

/// As cp(1): into the target if that is a directory, else to the target itself.
fn copy_all(ui: &Ui, sides: Sides<'_>, sources: &[PathBuf], target: &Path, recursive: bool) -> Result<()> {
    let Sides { from, to, same, store, grants } = sides;
    let into = is_dir(to, target)?;
    if !into && (sources.len() > 1 || ends_with_slash(target)) {
        return Err(crate::fault::Error::from(HostError::Usage("is not a directory")).context(to.name(target)));
    }
    refuse_same_names(to, sources, target)?;
    let is_tree = |source| matches!(from.stat(source), Ok(Some(Meta { kind: Kind::Dir, .. })));
    let mut copier = Copier {
        ui,
        from,
        same_tree: same,
        store,
        recursive,
        alone: sources.len() == 1 && !is_tree(&sources[0]),
        grants,
        left_out: LeftOut::default(),
        meter: Meter::bytes(ui, "copied"),
        failed: 0,
        all: 0,
        linked: HashMap::new(),
        first: None,
    };
    let copied = if into {
        copy_into(&mut copier, to, sources, target)
    } else {
        let (dir, name) = place_of(to, target)?;
        sources.iter().try_for_each(|source| copier.copy(source, copy::CopyPlace::Named(&*dir, name)))
    };
    copier.meter.suspend(|| copier.left_out.tell(ui));
    copied?;
    match copier.first {
        None => Ok(()),
        Some(error) => Err(error.context(Fault::SomeFailed { failed: copier.failed, all: copier.all })),
    }
}

/// Opened once: links on the way to it may change meanwhile.
fn copy_into(copier: &mut Copier<'_>, to: &dyn Tree, sources: &[PathBuf], target: &Path) -> Result<()> {
    let dir = to.dir(target)?;
    for source in sources {
        let place = match own_name(source) {
            Some(name) => copy::CopyPlace::Named(&*dir, name),
            None => copy::CopyPlace::Itself(to, target),
        };
        copier.copy(source, place)?;
    }
    Ok(())
}

/// The root of a vault, `.`, `..` and `dir/.` have no name of their own: their content goes into the target.
fn own_name(source: &Path) -> Option<&OsStr> {
    source.file_name().filter(|_| !source.as_os_str().as_bytes().ends_with(b"/."))
}

/// Only the last of several sources with one name would be left. Directories are no exception: files in them may have
/// one name.
fn refuse_same_names(to: &dyn Tree, sources: &[PathBuf], target: &Path) -> Result<()> {
    let mut names = HashSet::new();
    match sources.iter().filter_map(|source| own_name(source)).find(|name| !names.insert(*name)) {
        None => Ok(()),
        Some(name) => {
            let fault = HostError::Usage("several sources have this name; copy them to different places");
            Err(crate::fault::Error::from(fault).context(to.name(&target.join(name))))
        }
    }
}

fn is_dir(tree: &dyn Tree, path: &Path) -> Result<bool> {
    // A local link to a directory is one to cp(1) too.
    let through = if path.as_os_str().is_empty() { path.to_path_buf() } else { path.join(".") };
    match tree.stat(path)? {
        Some(Meta { kind: Kind::Dir, .. }) => Ok(true),
        Some(Meta { kind: Kind::Symlink, .. }) => Ok(matches!(tree.stat(&through), Ok(Some(_)))),
        Some(_) | None => Ok(false),
    }
}

fn ends_with_slash(path: &Path) -> bool {
    path.as_os_str().as_bytes().ends_with(b"/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_are_told_apart() {
        assert_eq!(Destination::of(Path::new("vault:a/b")), Destination::Vault("a/b".into()));
        assert_eq!(Destination::of(Path::new("vault:")), Destination::Vault("".into()));
        assert_eq!(Destination::of(Path::new("./vault:a")), Destination::Local("./vault:a".into()));
        assert_eq!(Destination::of(Path::new("-")), Destination::Stdin);
    }

    #[test]
    fn nonsense_is_refused() {
        let job = |sources: &[&str], target: &str| {
            Job::of(&sources.iter().map(PathBuf::from).collect::<Vec<_>>(), Path::new(target)).is_ok()
        };
        assert!(job(&["a", "b"], "vault:"));
        assert!(job(&["vault:a"], "vault:b"));
        assert!(job(&["-"], "vault:b"));
        assert!(!job(&["a"], "b"));
        assert!(!job(&["a", "vault:b"], "c"));
        assert!(!job(&["vault:a"], "-"));
        assert!(!job(&["-", "a"], "vault:"));
    }
}
