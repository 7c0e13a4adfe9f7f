//! The staging directory: directories appear in the tree whole, with their record, and disappear whole.
//!
//! What lies here is never part of the tree, so whatever a crash leaves is cleared when a writer opens the vault. Only what Lamassu itself puts here
//! is deleted; anything else stays and is reported.

use crate::attr::Wanted;
use crate::dirs::Dir;
use crate::error::{errno, io, is_not_found, is_unsupported};
use crate::names;
use crate::xattr::Holder;
use crate::{Kind, RenameMode, Result, Vault};
use lamassu_format::header::NameMode;
use lamassu_format::name::{COMPANION_PREFIX, DIR_RECORD, LINK_PREFIX, STAGING};
use lamassu_store::BackendDir;
use lamassu_store::backend::Stat;
use std::ffi::{OsStr, OsString};
use std::io as stdio;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

/// Permissions of a directory that only we work in.
pub(crate) const PRIVATE: u32 = 0o700;

/// Before a random name: a dataset that is being made or destroyed. With all that is in it it is no part of the tree.
const DATASET_PREFIX: &str = "dataset-";

/// A name in the staging directory for a dataset on its way in or out.
pub(crate) fn dataset_name() -> Result<OsString> {
    let mut name = OsString::from(DATASET_PREFIX);
    name.push(random_name()?);
    Ok(name)
}

/// Deletes a directory with all that is in it, without going deeper than memory allows. Directories are lent the permission to be emptied.
pub(crate) fn delete_tree(parent: &dyn BackendDir, name: &OsStr) -> stdio::Result<()> {
    // Directories on the way down, each with those in it that are left.
    let mut open = vec![emptied_of_files(parent, name)?];
    while let Some((dir, name, left)) = open.last_mut() {
        if let Some(below) = left.pop() {
            let below = emptied_of_files(&**dir, &below)?;
            open.push(below);
            continue;
        }
        let name = std::mem::take(name);
        open.pop();
        match open.last() {
            Some((above, ..)) => above.remove_dir(&name)?,
            None => parent.remove_dir(&name)?,
        }
    }
    Ok(())
}

/// A directory with nothing left in it but directories: these are the last of the answer.
fn emptied_of_files(
    parent: &dyn BackendDir,
    name: &OsStr,
) -> stdio::Result<(Arc<dyn BackendDir>, OsString, Vec<OsString>)> {
    let dir = enter(parent, name)?;
    let mut left = Vec::new();
    for e in dir.read_dir()? {
        let kind = match e.kind {
            Some(kind) => kind,
            None => dir.stat_entry(&e.name)?.kind,
        };
        match kind {
            Kind::Dir => left.push(e.name),
            _ => match dir.unlink(&e.name) {
                Err(e) if !is_not_found(&e) => return Err(e),
                _ => {}
            },
        }
    }
    Ok((dir, name.to_owned(), left))
}

/// Lets us into a directory, and nobody else. What is no directory stays as it is.
fn make_private(parent: &dyn BackendDir, name: &OsStr) -> stdio::Result<()> {
    let held = parent.hold(name)?;
    let st = held.stat()?;
    if st.kind == Kind::Dir && st.mode & PRIVATE != PRIVATE { held.set_mode(PRIVATE) } else { Ok(()) }
}

/// Opens a directory that is to be emptied.
fn enter(parent: &dyn BackendDir, name: &OsStr) -> stdio::Result<Arc<dyn BackendDir>> {
    make_private(parent, name)?;
    parent.open_dir(name)
}

/// Whether an entry may go with its directory: a record, or a companion whose entry is not there.
fn goes_along(name: &OsStr) -> bool {
    let name = name.as_bytes();
    name == DIR_RECORD.as_bytes()
        || [COMPANION_PREFIX, LINK_PREFIX].iter().any(|prefix| name.starts_with(prefix.as_bytes()))
}

/// Whether a directory holds nothing that is a part of the tree.
pub(crate) fn is_empty(dir: &dyn BackendDir) -> stdio::Result<bool> {
    Ok(dir.read_dir()?.iter().all(|e| goes_along(&e.name)))
}

/// A directory for looking into it also where its owner, who we are, may not: see [`BackendDir::lending`]. For those who may change something here.
pub(crate) fn lending(dir: &Arc<dyn BackendDir>) -> Arc<dyn BackendDir> {
    dir.lending().unwrap_or_else(|| dir.clone())
}

/// Whether an entry of `parent` is a directory that holds nothing: rmdir needs no permission to look into it.
pub(crate) fn is_entry_empty(parent: &dyn BackendDir, name: &OsStr) -> stdio::Result<bool> {
    is_empty(&*lending(&parent.open_dir(name)?))
}

/// Deletes the empty directory `name` of the staging directory.
pub(crate) fn delete(staging: &dyn BackendDir, name: &OsStr) -> stdio::Result<()> {
    let dir = match staging.open_dir(name) {
        Err(e) if e.kind() == stdio::ErrorKind::PermissionDenied => {
            make_private(staging, name)?;
            staging.open_dir(name)?
        }
        other => other?,
    };
    let entries = dir.read_dir()?;
    if !entries.iter().all(|e| goes_along(&e.name)) {
        return Err(stdio::Error::from_raw_os_error(libc::ENOTEMPTY));
    }
    for e in entries {
        match dir.unlink(&e.name) {
            Err(e) if e.kind() == stdio::ErrorKind::PermissionDenied => {
                dir.set_mode(PRIVATE)?;
            }
            Err(e) if !is_not_found(&e) => return Err(e),
            _ => continue,
        }
        dir.unlink(&e.name)?;
    }
    staging.remove_dir(name)
}

/// A name nobody else uses.
fn random_name() -> Result<OsString> {
    let mut raw = [0; 16];
    lamassu_crypto::random(&mut raw)?;
    Ok(raw.iter().map(|b| format!("{b:02x}")).collect::<String>().into())
}

impl Vault {
    /// The staging directory, made if it is not there.
    pub(crate) fn staging(&self) -> Result<Arc<dyn BackendDir>> {
        // The root of a dataset may be shut.
        let root = lending(&self.dirs.root().handle);
        match root.open_dir(OsStr::new(STAGING)) {
            Err(e) if is_not_found(&e) => {
                match root.make_dir(OsStr::new(STAGING), PRIVATE) {
                    Err(e) if e.kind() != stdio::ErrorKind::AlreadyExists => {
                        return Err(io("create lamassu.staging")(e));
                    }
                    _ => {}
                }
                root.open_dir(OsStr::new(STAGING)).map_err(io("open lamassu.staging"))
            }
            other => other.map_err(io("open lamassu.staging")),
        }
    }

    /// Deletes what an interrupted mkdir or rmdir left. Returns how many directories went.
    pub(crate) fn clear_staging(&self) -> Result<u64> {
        let staging = self.staging()?;
        let mut cleared = 0;
        for e in staging.read_dir().map_err(io("list lamassu.staging"))? {
            let is_dataset = e.name.as_bytes().starts_with(DATASET_PREFIX.as_bytes());
            let done = if is_dataset { delete_tree(&*staging, &e.name) } else { delete(&*staging, &e.name) };
            match done {
                Ok(()) => cleared += 1,
                Err(error) => {
                    tracing::warn!(entry = %e.name.to_string_lossy(), %error, "left in lamassu.staging: not something Lamassu put there");
                }
            }
        }
        Ok(cleared)
    }

    /// An empty directory of the staging directory, and its name there.
    pub(crate) fn staged_dir(&self) -> Result<(Arc<dyn BackendDir>, OsString)> {
        let (staging, name) = (self.staging()?, random_name()?);
        staging.make_dir(&name, PRIVATE).map_err(io("create a directory"))?;
        Ok((staging.open_dir(&name).map_err(io("create a directory"))?, name))
    }

    /// Deletes one with what was not taken out of it.
    pub(crate) fn drop_staged_dir(&self, name: &OsStr) {
        let done = self.staging().and_then(|staging| delete(&*staging, name).map_err(io("remove a directory")));
        if let Err(error) = done {
            tracing::warn!(entry = %name.to_string_lossy(), %error, "stays in lamassu.staging until the next open");
        }
    }

    /// Makes a directory with its record and puts it at (parent, stored).
    pub(crate) fn stage_dir(&self, parent: &Dir, stored: &OsStr, wanted: &Wanted) -> Result<Stat> {
        let staging = self.staging()?;
        let name = random_name()?;
        staging.make_dir(&name, PRIVATE).map_err(io("create a directory"))?;
        let placed = self.fill_staged(&*staging, &name, wanted).and_then(|dir| {
            rename_no_replace(&*staging, &name, &*parent.handle, stored).map_err(io("create a directory"))?;
            Ok(dir)
        });
        match placed {
            // Moving a directory takes write permission on it, so a mode without that comes last.
            Ok(dir) => {
                if let Some(mode) = wanted.mode.filter(|mode| mode & PRIVATE != PRIVATE) {
                    dir.set_mode(mode).map_err(io("set the mode"))?;
                }
                dir.stat().map_err(io("stat"))
            }
            Err(e) => {
                if let Err(error) = delete(&*staging, &name) {
                    tracing::warn!(entry = %name.to_string_lossy(), %error, "left in lamassu.staging");
                }
                Err(e)
            }
        }
    }

    fn fill_staged(&self, staging: &dyn BackendDir, name: &OsStr, wanted: &Wanted) -> Result<Arc<dyn BackendDir>> {
        let dir = staging.open_dir(name).map_err(io("create a directory"))?;
        let id = match self.name_mode {
            NameMode::Encrypted => Some(names::create_record(&self.ctx.ring, &*dir)?),
            NameMode::Plain => None,
        };
        let st = dir.stat().map_err(io("stat"))?;
        if let Some((uid, gid)) = wanted.owner_change(&st) {
            dir.set_owner(uid, gid).map_err(io("set the owner"))?;
        }
        let set = |attr: &OsStr, value: &[u8]| dir.set_xattr(attr, value, 0);
        if let Some(mode) = self.store_inherited(wanted, Holder::Dir(id), set)? {
            dir.set_mode(mode | PRIVATE).map_err(io("set the mode"))?;
        }
        Ok(dir)
    }

    /// Takes an empty directory out of the tree and deletes it. What fails after it has left the tree is not an error of the caller's.
    pub(crate) fn unstage_dir(&self, parent: &dyn BackendDir, stored: &OsStr, st: &Stat) -> Result<()> {
        let staging = self.staging()?;
        let name = random_name()?;
        take_out(parent, stored, st, &*staging, &name).map_err(io("remove a directory"))?;
        if let Err(error) = delete(&*staging, &name) {
            tracing::warn!(entry = %name.to_string_lossy(), %error, "a removed directory stays in lamassu.staging until the next open");
        }
        Ok(())
    }

    /// A directory that nobody else can write to, and a fresh name in it: for what is to be held, and given an owner and a mode, before it is moved to its place.
    /// It is kept for the next one, until the vault is closed; what a crash leaves in it is cleared as everything there is.
    pub(crate) fn workshop(&self) -> Result<(Arc<dyn BackendDir>, OsString)> {
        let mut shop = self.workshop.lock();
        let (dir, _, made) = match &mut *shop {
            Some(shop) => shop,
            none => {
                let (dir, name) = self.staged_dir()?;
                none.insert((dir, name, 0))
            }
        };
        *made += 1;
        Ok((dir.clone(), format!("{COMPANION_PREFIX}{made}").into()))
    }

    /// Takes the workshop away.
    pub(crate) fn close_workshop(&self) {
        if let Some((dir, name, _)) = self.workshop.lock().take() {
            drop(dir);
            self.drop_staged_dir(&name);
        }
    }
}

/// [`Vault::workshop`]: the directory, its name in the staging directory, and how many names were given out.
pub(crate) type Workshop = (Arc<dyn BackendDir>, OsString, u64);

/// Moves the directory that had this stat a moment ago to `(staging, to)`, to be deleted there. Another one that has come to be under its name meanwhile is put
/// back: `ESTALE`.
pub(crate) fn take_out(
    parent: &dyn BackendDir,
    stored: &OsStr,
    st: &Stat,
    staging: &dyn BackendDir,
    to: &OsStr,
) -> stdio::Result<()> {
    let stale = || stdio::Error::from_raw_os_error(libc::ESTALE);
    match rename_no_replace(parent, stored, staging, to) {
        // Ours, but not writable: moving a directory takes write permission on it.
        Err(e) if e.raw_os_error() == Some(libc::EACCES) => {
            parent.hold_same(stored, st)?.ok_or_else(stale)?.set_mode(PRIVATE)?;
            rename_no_replace(parent, stored, staging, to)?;
        }
        other => other?,
    }
    let moved = staging.stat_entry(to)?;
    if (moved.dev, moved.ino, moved.kind) != (st.dev, st.ino, st.kind) {
        rename_no_replace(staging, to, parent, stored)?;
        return Err(stale());
    }
    Ok(())
}

/// rename that fails with EEXIST, also where the store has no such rename: callers hold the lock of the directory.
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

/// The error of an operation that a directory does not take.
pub(crate) fn is_directory(op: &'static str, kind: Kind) -> Result<()> {
    if kind == Kind::Dir { Err(errno(op, libc::EPERM)) } else { Ok(()) }
}
