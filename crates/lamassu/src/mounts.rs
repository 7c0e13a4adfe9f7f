//! The mounts of this machine, from the kernel's table ([`mount_table`]).
//!
//! The table has the vault of a mount, unless `-o fsname=` changed that. Then the mount's daemon is asked, for a
//! limited time. If the table says read-only, the daemon is also asked whether it has the vault open for writing, since
//! a mount can become read-only later.

use crate::control;
use crate::fault::{Fault, Result};
use lamassu_format::name;
use lamassu_fuse::control::{Asked, Root};
use lamassu_host::control::protocol::{Request, Status};
use lamassu_store::mount_table::{self, MountLine, mounts_of};
use std::collections::HashSet;
use std::ops::Deref;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

/// The type of a Lamassu mount, unless `-o subtype=` changed it.
pub use lamassu_host::anchors::MOUNT_TYPE as TYPE;
/// How long a daemon may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount(MountLine);

/// The fields of [`MountLine`]. The source of a Lamassu mount is the vault's directory, unless `-o fsname=` changed it.
impl Deref for Mount {
    type Target = MountLine;

    fn deref(&self) -> &MountLine {
        &self.0
    }
}

impl Mount {
    /// Whether its daemon may write the vault. If the daemon does not answer, the table counts.
    fn may_write(&self) -> bool {
        !self.is_read_only() || self.asked(Mount::status).is_some_and(|status| !status.read_only)
    }

    /// The directory of its vault, by its daemon, if the table has something else. `None`: the table has it, or the
    /// daemon does not answer.
    fn renamed(&self) -> Option<PathBuf> {
        self.asked(|mount| {
            if has_vault(&mount.source) {
                return None;
            }
            Some(mount.status()?.dir.into())
        })
    }

    /// The result of `ask`, within the time limit. Daemons of other users are not asked: they may answer anything, or
    /// never. A mount that another one covers cannot be reached by a path.
    fn asked<T: Send + 'static>(&self, ask: impl FnOnce(&Mount) -> Option<T> + Send + 'static) -> Option<T> {
        if !self.is_trusted() || !self.is_on_top() {
            return None;
        }
        let (mount, (tell, told)) = (self.clone(), mpsc::channel());
        let ask = move || _ = tell.send(ask(&mount));
        std::thread::Builder::new().name("mounts".into()).spawn(ask).ok()?;
        told.recv_timeout(ANSWER_MAX).ok().flatten()
    }

    fn is_on_top(&self) -> bool {
        at(&self.mountpoint).is_some_and(|top| top.device == self.device)
    }

    /// Its daemon's status; waits without limit.
    fn status(&self) -> Option<Status> {
        control::ask(&self.root()?, &Request::Status {}).ok()
    }

    /// Its root, for requests to its daemon: `None` if the daemon is not trusted, or another mount covers it.
    pub fn root(&self) -> Option<Asked> {
        Asked::open(&self.mountpoint).ok().filter(|root| root.mount() == self.id)
    }

    /// The directory of its vault, if known.
    pub fn vault(&self) -> PathBuf {
        self.renamed().unwrap_or_else(|| self.source.clone())
    }

    /// The processes that see its file system, one of each mount namespace, as far as this process may find out: the
    /// lowest number, and its name.
    pub fn seen_by(&self) -> Vec<(u32, String)> {
        let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
        let mut numbers: Vec<u32> = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect();
        numbers.sort_unstable();
        let (mut namespaces, mut found) = (HashSet::new(), Vec::new());
        for number in numbers {
            let of = |file: &str| PathBuf::from(format!("/proc/{number}/{file}"));
            let Ok(namespace) = std::fs::read_link(of("ns/mnt")) else { continue };
            if !namespaces.insert(namespace) {
                continue;
            }
            if mounts_of(number).unwrap_or_default().iter().any(|mount| mount.device == self.device) {
                let name = std::fs::read_to_string(of("comm")).unwrap_or_default();
                found.push((number, name.trim_end().escape_default().to_string()));
            }
        }
        found
    }

    /// Whether its claim can be true that it is a mount of a vault in a directory below `dir`. Does not access anything
    /// outside of `dir`.
    fn is_of_one_below(&self, dir: &Path) -> bool {
        let is_plain = self.source.components().all(|c| matches!(c, Component::RootDir | Component::Normal(_)));
        is_plain && self.source != dir && self.source.starts_with(dir) && self.is_believed_of(&self.source)
    }

    /// Whether it counts as a mount of the vault in `dir`, a path without links. The claim of another user's mount
    /// counts only if that user owns a vault there.
    pub fn is_believed_of(&self, dir: &Path) -> bool {
        let owns = |id| dir.symlink_metadata().is_ok_and(|m| m.is_dir() && m.uid() == id);
        self.is_trusted() || (self.user().is_some_and(owns) && has_vault(dir))
    }
}

/// Whether a vault lies in a directory, given by its full path.
pub fn has_vault(dir: &Path) -> bool {
    dir.is_absolute() && dir.join(name::HEADER).symlink_metadata().is_ok_and(|m| m.is_file())
}

/// All mounts this process sees.
pub fn all() -> Vec<Mount> {
    mount_table::mounts().into_iter().map(Mount).collect()
}

/// The topmost mount at a path without links.
pub fn at(mountpoint: &Path) -> Option<Mount> {
    mount_table::at(mountpoint).map(Mount)
}

/// The mount of a number.
pub fn of_id(id: u64) -> Option<Mount> {
    all().into_iter().find(|m| m.id == id)
}

/// Where the vault in `dir` is mounted for writing: by root or the user of this process, or otherwise by the owner of
/// `dir`. Mounts of other users do not count: they could claim any vault.
pub fn of_vault(dir: &Path) -> Option<Mount> {
    let dir = dir.canonicalize().ok()?;
    let is_of = |m: &Mount| m.source == dir && m.may_write();
    find(|m| m.is_trusted() && is_of(m)).or_else(|| ours().find(|m| m.is_believed_of(&dir) && is_of(m)))
}

/// Where a dataset of the vault in `dir`, a path without links, is mounted by itself for writing.
pub fn of_dataset_in(dir: &Path) -> Option<Mount> {
    find(|m| m.is_of_one_below(dir) && m.may_write())
}

/// Where the vault in `dir` is mounted, also read-only, if that counts: for commands that are refused then because they
/// cannot be undone.
pub fn any_of_vault(dir: &Path) -> Option<Mount> {
    let dir = dir.canonicalize().ok()?;
    find(|m| m.source == dir && m.is_believed_of(&dir))
}

/// Where a dataset of the vault in `dir`, a path without links, is mounted by itself, also read-only: its daemon can
/// give the dataset a slot.
pub fn any_of_dataset_in(dir: &Path) -> Option<Mount> {
    find(|m| m.is_of_one_below(dir))
}

/// A mount that another user claims to be of the vault.
pub fn claimed_of_vault(dir: &Path) -> Option<Mount> {
    let dir = dir.canonicalize().ok()?;
    ours().find(|m| m.source == dir && !m.is_believed_of(&dir))
}

/// The path without links, and the Lamassu mount there. The mount itself is asked only if its type does not tell: its
/// daemon may be dead.
pub fn ours_at(given: &Path) -> Result<(PathBuf, Mount), Fault> {
    let (path, mount) = fuse_at(given)?;
    let answers = || Root::open(&path).and_then(|root| root.status()).is_ok();
    let is_ours = mount.fs_type == TYPE || answers();
    if is_ours { Ok((path, mount)) } else { Err(Fault::NotAMount { path: given.into() }) }
}

/// Opens the root of the Lamassu mount at a path: of that mount, not of one that was put there meanwhile.
pub fn root_at(given: &Path) -> Result<Root> {
    let (path, mount) = ours_at(given)?;
    let root = Root::open(&path)?;
    if root.mount() == Some(mount.id) { Ok(root) } else { Err(Fault::NotAMount { path: given.into() }.into()) }
}

/// The path without links, and the FUSE mount there, Lamassu's or another. It is not asked anything.
pub fn fuse_at(given: &Path) -> Result<(PathBuf, Mount), Fault> {
    let not_ours = || Fault::NotAMount { path: given.into() };
    let path = match (given.parent(), given.file_name()) {
        (Some(parent), Some(name)) => {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            parent.canonicalize().map_err(|_| not_ours())?.join(name)
        }
        _ => given.canonicalize().map_err(|_| not_ours())?,
    };
    // The last component may itself be a link to a mount point.
    let path = if at(&path).is_some() { path } else { path.canonicalize().map_err(|_| not_ours())? };
    let mount = at(&path).filter(|mount| mount.fs_type.starts_with("fuse.")).ok_or_else(not_ours)?;
    Ok((path, mount))
}

fn ours() -> impl Iterator<Item = Mount> {
    all().into_iter().filter(|m| m.fs_type == TYPE)
}

/// The first mount of a vault for which `wanted` is true. Its source is the vault's directory.
fn find(wanted: impl Fn(&Mount) -> bool) -> Option<Mount> {
    let renamed = |mount: Mount| mount.renamed().map(|source| Mount(MountLine { source, ..mount.0 }));
    ours().find(|m| wanted(m)).or_else(|| ours().filter_map(renamed).find(|m| wanted(m)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A user who may mount FUSE chooses what mountinfo shows.
    #[test]
    fn a_stranger_mounts_no_dataset_that_is_not_the_strangers() {
        let vault = tempfile::tempdir().unwrap();
        let dir = vault.path().canonicalize().unwrap();
        let dataset = dir.join("d");
        std::fs::create_dir(&dataset).unwrap();
        let of = |source: &Path, user: u32| {
            let line = format!("1 2 0:5 / /mnt rw - fuse.lamassu {} rw,user_id={user}", source.display());
            Mount(MountLine::parse(line.as_bytes()).unwrap()).is_of_one_below(&dir)
        };
        let (me, stranger) = (dataset.metadata().unwrap().uid(), 4_294_967_294);
        let theirs = tempfile::tempdir().unwrap();
        std::fs::write(theirs.path().join(name::HEADER), "{}").unwrap();
        std::fs::write(dataset.join(name::HEADER), "{}").unwrap();
        assert!(of(&dataset, 0) && of(&dataset, me));
        assert!(!of(&dataset, stranger) && !of(&dir, 0) && !of(&dir.join("../d"), 0));
        // Root sees what is not root's as its owner's.
        if me == 0 {
            let give = |to: &Path| rustix::fs::chown(to, Some(rustix::fs::Uid::from_raw(12_345)), None).unwrap();
            give(&dataset);
            give(theirs.path());
            assert!(of(&dataset, 12_345) && !of(&dataset, stranger));
            let outside: PathBuf = dir.join("..").join(theirs.path().file_name().unwrap());
            assert!(outside.join(name::HEADER).exists() && !of(&outside, 12_345));
            std::fs::remove_file(dataset.join(name::HEADER)).unwrap();
            assert!(!of(&dataset, 12_345), "no vault lies there");
        }
    }

    #[test]
    fn the_root_is_a_mount() {
        let root = at(Path::new("/")).unwrap();
        assert!(!root.seen_by().is_empty(), "this process sees it");
    }
}
