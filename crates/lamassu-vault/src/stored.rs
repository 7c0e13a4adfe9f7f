//! Steps on entries of the store that know nothing of a vault: what lies in a directory, moves.

use crate::error::{io, is_not_found, is_unsupported};
use crate::{RenameMode, SetTime};
use lamassu_format::name::{COMPANION_PREFIX, DIR_RECORD, LINK_PREFIX};
use lamassu_store::BackendDir;
use parking_lot::Mutex;
use std::ffi::{OsStr, OsString};
use std::io as stdio;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

/// Held while the times of a vault's root are set, or kept over a change of an internal entry: a caller's times must
/// not be replaced by those of before, nor those of the change be kept.
static ROOT_TIMES: Mutex<()> = Mutex::new(());

/// Changes internal entries of a vault's root. Users see the root's times, which such a change must not touch.
pub(crate) fn keeping_times<T>(root: &dyn BackendDir, change: impl FnOnce() -> stdio::Result<T>) -> stdio::Result<T> {
    let _alone = ROOT_TIMES.lock();
    let st = root.stat()?;
    let done = change()?;
    root.set_times(SetTime::At(st.atime), SetTime::At(st.mtime))?;
    Ok(done)
}

/// Sets the times of a vault's root.
pub(crate) fn set_root_times(root: &dyn BackendDir, atime: SetTime, mtime: SetTime) -> stdio::Result<()> {
    let _alone = ROOT_TIMES.lock();
    root.set_times(atime, mtime)
}

/// Permissions of a directory for this process alone.
pub(crate) const PRIVATE: u32 = 0o700;

/// How many names are tried for one entry in `lamassu.lost`.
const TRIES_MAX: u32 = 10_000;

/// Whether an entry may be deleted with its directory: a record, or a companion without its entry.
pub(crate) fn goes_along(name: &OsStr) -> bool {
    let name = name.as_bytes();
    name == DIR_RECORD.as_bytes()
        || [COMPANION_PREFIX, LINK_PREFIX].iter().any(|prefix| name.starts_with(prefix.as_bytes()))
}

/// Whether a directory holds nothing that is a part of the tree.
pub(crate) fn is_empty(dir: &dyn BackendDir) -> stdio::Result<bool> {
    Ok(dir.read_dir()?.iter().all(|e| goes_along(&e.name)))
}

/// A directory that can be looked into even if its mode denies that to its owner, which is this process: see
/// [`BackendDir::lending`]. For callers that may change the store.
pub(crate) fn lending(dir: &Arc<dyn BackendDir>) -> Arc<dyn BackendDir> {
    dir.lending().unwrap_or_else(|| dir.clone())
}

/// Whether an entry of `parent` is a directory that holds nothing: rmdir needs no permission to look into it.
pub(crate) fn is_entry_empty(parent: &dyn BackendDir, name: &OsStr) -> stdio::Result<bool> {
    is_empty(&*lending(&parent.open_dir(name)?))
}

/// rename that fails with EEXIST, even if the store has no such rename: callers hold the lock of the directory.
pub(crate) fn rename_no_replace(
    from: &dyn BackendDir,
    name: &OsStr,
    to: &dyn BackendDir,
    to_name: &OsStr,
) -> stdio::Result<()> {
    match from.rename(name, to, to_name, RenameMode::NoReplace) {
        Err(e) if is_unsupported(&e) && e.raw_os_error() != Some(libc::EPERM) => match to.stat_entry(to_name) {
            Err(absent) if is_not_found(&absent) => from.rename(name, to, to_name, RenameMode::Replace),
            Ok(_) => Err(stdio::Error::from_raw_os_error(libc::EEXIST)),
            Err(other) => Err(other),
        },
        other => other,
    }
}

/// Moves an entry of a directory there, by its name as far as that is free. Returns its name there.
pub(crate) fn place_in_lost(lost: &dyn BackendDir, dir: &dyn BackendDir, entry: &OsStr) -> stdio::Result<OsString> {
    let mut name = entry.to_owned();
    for i in 1..TRIES_MAX {
        match rename_no_replace(dir, entry, lost, &name) {
            Err(e) if e.kind() == stdio::ErrorKind::AlreadyExists => {
                // Short enough for every store: the end of a long name is not needed here.
                let base = entry.to_string_lossy().chars().take(200).collect::<String>();
                name = format!("{base}.{i}").into();
            }
            other => return other.map(|()| name),
        }
    }
    Err(stdio::ErrorKind::AlreadyExists.into())
}

/// Renames over the existing entry. The directory keeps its modification time. If its owner may not write to it, the
/// permission is granted for the time of the call.
pub(crate) fn replace(from: &dyn BackendDir, temp: &OsStr, dir: &dyn BackendDir, name: &OsStr) -> crate::Result<()> {
    const LENT: u32 = 0o300;
    let before = dir.stat().map_err(io("stat a directory"))?;
    let rename = || from.rename(temp, dir, name, RenameMode::Replace);
    let renamed = match rename() {
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => {
            dir.set_mode(before.mode | LENT).map_err(io("set the mode"))?;
            let renamed = rename();
            dir.set_mode(before.mode).map_err(io("set the mode"))?;
            renamed
        }
        other => other,
    };
    renamed.map_err(io("replace an entry"))?;
    dir.set_times(SetTime::Keep, SetTime::At(before.mtime)).map_err(io("set times"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_store::Backend;
    use lamassu_store::backend::{LocalBackend, Time};

    /// A caller's times stay, whatever internal change goes on meanwhile.
    #[test]
    fn internal_changes_replace_no_times_that_were_set_meanwhile() {
        let dir = tempfile::tempdir().unwrap();
        let store = LocalBackend::open(dir.path()).unwrap();
        let root = store.root();
        let is_done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(std::sync::atomic::Ordering::Relaxed) {
                    let pause = || {
                        std::thread::yield_now();
                        Ok(())
                    };
                    keeping_times(&*root, pause).unwrap();
                }
            });
            let replaced = (1..20_000).find(|seconds| {
                let time = Time { seconds: *seconds, nanos: 0 };
                set_root_times(&*root, SetTime::Keep, SetTime::At(time)).unwrap();
                root.stat().unwrap().mtime != time
            });
            is_done.store(true, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(replaced, None);
        });
    }
}
