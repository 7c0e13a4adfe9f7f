//! The staging directory: directories appear in the tree whole, with their record, and disappear whole.
//!
//! Nothing here is part of the tree, so leftovers of a crash are cleared when the vault is opened for writing. Only
//! entries that Lamassu itself puts here are deleted. Anything else stays and is reported.
//!
//! The owner of the directory that the vault lies in can replace the staging directory by another. So the staging
//! directory is opened once, used only if it is ours and closed to other users ([`open`]), and held open. Other users
//! then cannot change its content. A directory that is moved into it from the tree may belong to a user who still has
//! it open. So it is compared with what was looked up, and its owner is changed. Entries that are deleted below it are
//! compared with the listing.

mod deletion;

pub(crate) use deletion::delete_tree;

use crate::anchored::Fresh;
use crate::attr_value::Holder;
use crate::digests::digest_of_text;
use crate::dirs::Dir;
use crate::error::{errno, io, is_not_found};
use crate::names;
use crate::stored::{PRIVATE, goes_along, lending, rename_no_replace};
use crate::wanted::Wanted;
use crate::{Kind, Result, Vault, VaultError};
use deletion::stale;
use lamassu_anchor::Digest;
use lamassu_anchor::row::Sealed;
use lamassu_format::Profile;
use lamassu_format::header::NameMode;
use lamassu_format::name::{COMPANION_PREFIX, HEADER, HISTORY, LOCK, LOST, STAGING};
use lamassu_store::BackendDir;
use lamassu_store::backend::Stat;
use parking_lot::Mutex;
use std::ffi::{OsStr, OsString};
use std::io as stdio;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Prefix of a random name: a dataset that is being made or destroyed. Nothing in it is part of the tree.
const DATASET_PREFIX: &str = "dataset-";
/// How many entries of destroyed datasets are deleted in a turn, at least: a directory is listed anew in each turn.
const DELETED_IN_TURN: u32 = 1_024;
/// For how long they are deleted when a turn begins, for which other hosts wait.
const DELETING: Duration = Duration::from_millis(100);
/// A user of whom nothing is known, and that no process has.
const NOBODY: u32 = 65_534;
/// Before a random name: an empty file, made to see whose it is.
const PROBE_PREFIX: &str = "probe-";

/// A name in the staging directory for a dataset on its way in or out.
pub(crate) fn dataset_name() -> Result<OsString> {
    let mut name = OsString::from(DATASET_PREFIX);
    name.push(random_name()?);
    Ok(name)
}

/// Gives a directory the mode that admits only its owner. Other entries keep their mode.
fn make_private(parent: &dyn BackendDir, name: &OsStr) -> stdio::Result<()> {
    let held = parent.hold(name)?;
    let st = held.stat()?;
    if st.kind == Kind::Dir && st.mode & PRIVATE != PRIVATE { held.set_mode(PRIVATE) } else { Ok(()) }
}

/// Makes a directory in the staging directory and opens it.
fn make_fresh(staging: &Staging, name: &OsStr) -> Result<Arc<dyn BackendDir>> {
    let failed = || io("create a directory");
    staging.dir.make_dir(name, PRIVATE).map_err(failed())?;
    let dir = staging.dir.open_dir(name).map_err(failed())?;
    let st = dir.stat().map_err(failed())?;
    if staging.made.may_be(&st) && dir.read_dir().map_err(failed())?.is_empty() { Ok(dir) } else { Err(NOT_OURS) }
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

/// The staging directory of a vault that is written.
pub(crate) struct Staging {
    pub dir: Arc<dyn BackendDir>,
    made: Made,
    /// What is left of datasets that were destroyed.
    left: Mutex<Vec<OsString>>,
}

/// The store's stat of a private file that this process makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Made {
    /// Its owner, which may be another user (NFS with `root_squash`).
    uid: u32,
    /// Whether the store keeps the owners that we give. Where it does not (a FAT, many SMB mounts, NFS with
    /// `root_squash`), all entries have the one that it shows.
    keeps_owners: bool,
    /// Whether it is private. Stores without modes (FAT, many SMB mounts) show the same mode for everything: the
    /// options of that mount decide which users may enter, and a mode does not distinguish our directories from others.
    keeps_modes: bool,
}

impl Made {
    /// Whether a directory can belong to this process's user, and to no other.
    fn may_be(self, st: &Stat) -> bool {
        st.uid == self.uid && (!self.keeps_modes || st.mode & 0o077 == 0)
    }
}

/// The error if the staging directory may belong to another user.
const NOT_OURS: VaultError = VaultError::Refused(
    "the directory lamassu.staging of the vault belongs to another user, or others may enter it (its mode is not 0700), \
     and what lies in it would be deleted: nothing was; look at what it is, then move it away (a new one is made), or \
     give it to the user that opens the vault, with mode 0700",
);

/// The same of the directory for what is put away.
const LOST_NOT_OURS: VaultError = VaultError::Refused(
    "the directory lamassu.lost of the vault belongs to another user, or others may enter it (its mode is not 0700), \
     and what is found without a name would be theirs: look at what it is, then move it away (a new one is made), or \
     give it to the user that opens the vault, with mode 0700",
);

/// Opens the staging directory, which is made if it is not there.
///
/// # Errors
/// [`VaultError::Refused`] if it is not ours, or not ours alone; those of the store.
fn open(root: &dyn BackendDir) -> Result<Staging> {
    const NAME: &str = STAGING;
    let open = || root.open_dir(OsStr::new(NAME));
    let dir = match open() {
        Err(e) if is_not_found(&e) => {
            match root.make_dir(OsStr::new(NAME), PRIVATE) {
                Err(e) if e.kind() != stdio::ErrorKind::AlreadyExists => return Err(io("create lamassu.staging")(e)),
                _ => {}
            }
            open()
        }
        other => other,
    };
    let dir = dir.map_err(io("open lamassu.staging"))?;
    let st = dir.stat().map_err(io("stat lamassu.staging"))?;
    let made = probe(&*dir)?;
    if made.may_be(&st) { Ok(Staging { dir, made, left: Mutex::default() }) } else { Err(NOT_OURS) }
}

/// Whether a staging directory is open to other users, so that a writer refuses it. This makes no file: instead of the
/// one that [`probe`] makes, other files that a writer has made privately are examined.
///
/// # Errors
/// Those of the store.
pub(crate) fn is_open_to_others(root: &dyn BackendDir, staging: &dyn BackendDir) -> Result<bool> {
    let mut made = None;
    for name in [HEADER, LOCK, HISTORY] {
        let st = match root.stat_entry(OsStr::new(name)) {
            Err(e) if is_not_found(&e) => continue,
            other => other.map_err(io("stat a file of the vault"))?,
        };
        let made = made.get_or_insert(Made { uid: st.uid, keeps_owners: false, keeps_modes: false });
        made.keeps_modes |= st.mode & 0o077 == 0;
    }
    let st = staging.stat().map_err(io("stat lamassu.staging"))?;
    Ok(made.is_some_and(|made| !made.may_be(&st)))
}

/// Makes a private file and stats it, by the descriptor that made it: in a directory of another user the name could
/// lead to another entry of that user.
fn probe(dir: &dyn BackendDir) -> Result<Made> {
    let mut name = OsString::from(PROBE_PREFIX);
    name.push(random_name()?);
    let probe = match dir.create_file(&name) {
        // This process may not write to it, so it is another user's.
        Err(e) if e.kind() == stdio::ErrorKind::PermissionDenied => return Err(NOT_OURS),
        other => other.map_err(io("create a file in lamassu.staging"))?,
    };
    let st = probe.stat().map_err(io("stat"));
    let given = probe.set_owner(Some(NOBODY), None).and_then(|()| probe.stat());
    dir.unlink(&name).map_err(io("remove a file of lamassu.staging"))?;
    let st = st?;
    let keeps_owners = given.is_ok_and(|given| given.uid == NOBODY);
    Ok(Made { uid: st.uid, keeps_owners, keeps_modes: st.mode & 0o077 == 0 })
}

/// Whether a name is a prefix and what [`random_name`] makes.
fn is_random(name: &OsStr, prefix: &str) -> bool {
    let random = name.as_bytes().strip_prefix(prefix.as_bytes());
    random.is_some_and(|hex| hex.len() == 32 && hex.iter().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')))
}

/// Whether Lamassu gives such names to what it puts here. The directory may be another one of root's, which the owner
/// of a dataset's root has renamed: in that, other names lie.
pub(crate) fn is_put_here(name: &OsStr) -> bool {
    ["", DATASET_PREFIX, PROBE_PREFIX].iter().any(|prefix| is_random(name, prefix))
}

/// A name that is used nowhere else.
pub(crate) fn random_name() -> Result<OsString> {
    let mut raw = [0; 16];
    lamassu_crypto::random(&mut raw)?;
    Ok(raw.iter().map(|b| format!("{b:02x}")).collect::<String>().into())
}

impl Vault {
    /// The staging directory. It is opened once, and stays the same whatever its name leads to later.
    ///
    /// # Errors
    /// As [`open`].
    pub(crate) fn staging(&self) -> Result<&Staging> {
        if let Some(staging) = self.staging.get() {
            return Ok(staging);
        }
        // The root of a dataset may deny search.
        let opened = open(&*lending(&self.dirs.root().handle))?;
        Ok(self.staging.get_or_init(|| opened))
    }

    /// Opens `lamassu.lost` of the vault's directory, which is made if it is not there. Like the staging directory it
    /// has to be ours alone: what is moved there may be another user's.
    ///
    /// # Errors
    /// [`VaultError::Refused`] if it is not; those of the store.
    pub(crate) fn lost_dir(&self) -> Result<Arc<dyn BackendDir>> {
        let (root, made) = (&self.dirs.root().handle, self.staging()?.made);
        match root.make_dir(OsStr::new(LOST), PRIVATE) {
            Err(e) if e.kind() != stdio::ErrorKind::AlreadyExists => return Err(io("create lamassu.lost")(e)),
            _ => {}
        }
        let lost = root.open_dir(OsStr::new(LOST)).map_err(|source| match source.raw_os_error() {
            // The store's doing, and no path of a user's.
            Some(libc::ENOTDIR | libc::ELOOP) => {
                let source = stdio::Error::from_raw_os_error(libc::EIO);
                VaultError::Io { op: "open lamassu.lost, which has to be a directory", source }
            }
            _ => io("open lamassu.lost")(source),
        })?;
        match made.may_be(&lost.stat().map_err(io("stat lamassu.lost"))?) {
            true => Ok(lost),
            false => Err(LOST_NOT_OURS),
        }
    }

    /// Deletes what an interrupted mkdir or rmdir left. Returns how many directories went. In a turn, a part of what is
    /// left of datasets stays for [`Vault::clear_more`], or for the next one.
    pub(crate) fn clear_staging(&self) -> Result<u64> {
        let staging = self.staging()?;
        let (mut cleared, mut goes_on) = (0, self.until_others_wait());
        for e in staging.dir.read_dir().map_err(io("list lamassu.staging"))? {
            match staging.clear(&e.name, &mut goes_on) {
                Ok(true) => cleared += 1,
                Ok(false) => staging.left.lock().push(e.name),
                Err(error) => {
                    let text = "left in lamassu.staging: not something Lamassu put there, or not ours";
                    tracing::warn!(entry = %e.name.to_string_lossy(), %error, "{text}");
                }
            }
        }
        Ok(cleared)
    }

    /// Whether to delete one more entry. In a turn others wait.
    fn until_others_wait(&self) -> impl FnMut() -> bool + use<> {
        let (by_turns, mut entries, until) = (self.options.by_turns, 0, Instant::now() + DELETING);
        move || {
            entries += 1;
            !by_turns || entries <= DELETED_IN_TURN || Instant::now() < until
        }
    }

    /// Deletes more of what was left of datasets when the vault was opened, and asks for upkeep if some is still left.
    pub(crate) fn clear_more(&self) {
        let Some(staging) = self.staging.get() else { return };
        let (mut left, mut goes_on) = (staging.left.lock(), self.until_others_wait());
        while let Some(name) = left.last() {
            match staging.clear(name, &mut goes_on) {
                Ok(true) => {}
                Ok(false) => return self.options.upkeep.want(),
                Err(error) => {
                    let text = "left in lamassu.staging until the next open";
                    tracing::warn!(entry = %name.to_string_lossy(), %error, "{text}");
                }
            }
            left.pop();
        }
    }

    /// Goes on deleting a dataset that was destroyed and left in the staging directory, until `is_to_end` says that
    /// another host waits. False: some of it is left.
    ///
    /// # Errors
    /// Those of the store.
    pub fn delete_destroyed(&self, name: &OsStr, is_to_end: &dyn Fn() -> bool) -> Result<bool> {
        let _pass = self.change()?;
        let mut entries = 0;
        let mut goes_on = || {
            entries += 1;
            entries <= DELETED_IN_TURN || !is_to_end()
        };
        match delete_tree(&*self.staging()?.dir, name, &mut goes_on) {
            // A turn of another host has deleted the rest.
            Err(error) if is_not_found(&error) => Ok(true),
            done => done.map_err(io("delete a dataset that was destroyed")),
        }
    }

    /// An empty directory of the staging directory, and its name there.
    pub(crate) fn staged_dir(&self) -> Result<(Arc<dyn BackendDir>, OsString)> {
        let name = random_name()?;
        Ok((make_fresh(self.staging()?, &name)?, name))
    }

    /// The same for a dataset that is being made.
    pub(crate) fn staged_dataset(&self) -> Result<(Arc<dyn BackendDir>, OsString)> {
        let name = dataset_name()?;
        Ok((make_fresh(self.staging()?, &name)?, name))
    }

    /// Deletes such a directory with what is left in it.
    pub(crate) fn drop_staged_dir(&self, name: &OsStr) {
        let done = self.staging().and_then(|staging| delete(&*staging.dir, name).map_err(io("remove a directory")));
        if let Err(error) = done {
            tracing::warn!(entry = %name.to_string_lossy(), %error, "stays in lamassu.staging until the next open");
        }
    }

    /// Makes a directory with its record and puts it at (parent, stored).
    pub(crate) fn stage_dir(&self, parent: &Dir, stored: &OsStr, wanted: &Wanted) -> Result<Fresh> {
        let (dir, name) = self.staged_dir()?;
        let staging = &*self.staging()?.dir;
        let placed =
            self.profile_in(parent).and_then(|profile| self.fill_staged(&*dir, wanted, profile)).and_then(|filled| {
                rename_no_replace(staging, &name, &*parent.handle, stored).map_err(io("create a directory"))?;
                Ok(filled)
            });
        match placed {
            // Moving a directory takes write permission on it, so a mode without that comes last.
            Ok((mode, content, attributes)) => {
                if let Some(mode) = wanted.mode.filter(|mode| mode & PRIVATE != PRIVATE) {
                    dir.set_mode(mode).map_err(io("set the mode"))?;
                }
                Ok(Fresh { content, attributes, ..Fresh::new(dir.stat().map_err(io("stat"))?, mode) })
            }
            Err(e) => {
                if let Err(error) = delete(staging, &name) {
                    tracing::warn!(entry = %name.to_string_lossy(), %error, "left in lamassu.staging");
                }
                Err(e)
            }
        }
    }

    /// Returns its mode, the digest of its record, and that of its attributes.
    fn fill_staged(
        &self,
        dir: &dyn BackendDir,
        wanted: &Wanted,
        profile: Profile,
    ) -> Result<(Option<u32>, Digest, Sealed)> {
        let (id, record) = match self.name_mode {
            NameMode::Encrypted => {
                let made = names::create_record(&self.ctx.ring, dir, profile)?;
                (Some(made.id), digest_of_text(made.text.as_bytes()))
            }
            NameMode::Plain => (None, Digest::NONE),
        };
        let st = dir.stat().map_err(io("stat"))?;
        if let Some((uid, gid)) = wanted.owner_change(&st) {
            dir.set_owner(uid, gid).map_err(io("set the owner"))?;
        }
        let set = |attr: &OsStr, value: &[u8]| dir.set_xattr(attr, value, 0);
        let (mode, attributes) = self.store_inherited(wanted, Holder::Dir(id), set)?;
        if let Some(mode) = mode {
            dir.set_mode(mode | PRIVATE).map_err(io("set the mode"))?;
        }
        Ok((mode, record, attributes))
    }

    /// Takes an empty directory out of the tree and deletes it. A failure after it has left the tree is not reported to
    /// the caller.
    pub(crate) fn unstage_dir(&self, parent: &dyn BackendDir, stored: &OsStr, st: &Stat) -> Result<()> {
        let staging = self.staging()?;
        let name = random_name()?;
        let is_known = staging.take_out(parent, stored, st, &name).map_err(io("remove a directory"))?;
        if let Err(error) = is_known.and_then(|()| delete(&*staging.dir, &name)) {
            let text = "a removed directory stays in lamassu.staging until the next open";
            tracing::warn!(entry = %name.to_string_lossy(), %error, "{text}");
        }
        Ok(())
    }

    /// A directory that no other user can write to, and a fresh name in it. An entry that is made there is held, and
    /// given an owner and a mode, before it is moved to its place. The directory is kept until the vault is closed.
    /// Leftovers of a crash in it are cleared like everything in staging.
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

    /// Removes the workshop.
    pub(crate) fn close_workshop(&self) {
        if let Some((dir, name, _)) = self.workshop.lock().take() {
            drop(dir);
            self.drop_staged_dir(&name);
        }
    }
}

/// [`Vault::workshop`]: the directory, its name in the staging directory, and how many names were given out.
pub(crate) type Workshop = (Arc<dyn BackendDir>, OsString, u64);

impl Staging {
    /// See [`Made::keeps_modes`].
    pub fn keeps_modes(&self) -> bool {
        self.made.keeps_modes
    }

    /// See [`Made::keeps_owners`].
    pub fn keeps_owners(&self) -> bool {
        self.made.keeps_owners
    }

    /// Deletes what an interrupted change left under a name. False: some of it is left.
    fn clear(&self, name: &OsStr, goes_on: &mut dyn FnMut() -> bool) -> stdio::Result<bool> {
        let st = self.dir.stat_entry(name)?;
        // A directory gets its owner before it is moved to its place: so if it is empty, it may be deleted.
        // A probe is given to another user for a moment.
        let has_owner = st.uid == self.made.uid || (st.uid == NOBODY && is_random(name, PROBE_PREFIX));
        if !is_put_here(name) || (!has_owner && !is_random(name, "")) {
            return Err(stdio::Error::from_raw_os_error(libc::EPERM));
        }
        match st.kind {
            Kind::File if st.len == 0 && is_random(name, PROBE_PREFIX) => self.dir.unlink(name)?,
            _ if is_random(name, DATASET_PREFIX) => return delete_tree(&*self.dir, name, goes_on),
            _ => delete(&*self.dir, name)?,
        }
        Ok(true)
    }

    /// Moves the directory that was found with this stat here, under the name `to`, to be deleted. Its owner becomes
    /// this process's user, so that its former owner can no longer enter it, and a writer after a crash recognises it.
    /// If another directory has its name by now, that is put back: `ESTALE`.
    ///
    /// # Errors
    /// Those of the store: it is still there. Inside: it is here, and cannot be looked at, so that it may be another
    /// one, and must not be deleted.
    pub fn take_out(
        &self,
        parent: &dyn BackendDir,
        stored: &OsStr,
        st: &Stat,
        to: &OsStr,
    ) -> stdio::Result<stdio::Result<()>> {
        let moved = match rename_no_replace(parent, stored, &*self.dir, to) {
            // Ours, but not writable: moving a directory takes write permission on it.
            Err(e) if e.raw_os_error() == Some(libc::EACCES) => {
                parent.hold_same(stored, st)?.ok_or_else(stale)?.set_mode(PRIVATE)?;
                rename_no_replace(parent, stored, &*self.dir, to)
            }
            other => other,
        };
        let here = self.dir.stat_entry(to);
        // It may have been moved although the store reports a failure. Nothing else has this name.
        moved.or_else(|error| if here.is_ok() { Ok(()) } else { Err(error) })?;
        let moved = match here {
            Ok(moved) => moved,
            Err(error) => return Ok(Err(error)),
        };
        if !moved.is_same(st) {
            rename_no_replace(&*self.dir, to, parent, stored)?;
            return Err(stale());
        }
        if moved.uid != self.made.uid {
            // It has left the tree: a failure to change its owner is not reported to the caller.
            let given = self.dir.hold(to).and_then(|held| {
                held.set_owner(Some(self.made.uid), None)?;
                held.set_mode(PRIVATE)
            });
            if let Err(error) = given {
                let text = "in lamassu.staging, and still its owner's: if it cannot be deleted now, it stays";
                tracing::warn!(entry = %to.to_string_lossy(), %error, "{text}");
            }
        }
        Ok(Ok(()))
    }
}

/// The error of an operation that is not possible on a directory.
pub(crate) fn is_directory(op: &'static str, kind: Kind) -> Result<()> {
    if kind == Kind::Dir { Err(errno(op, libc::EPERM)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_store::Backend;
    use lamassu_store::backend::MemoryBackend;

    #[test]
    fn a_mode_tells_nothing_on_a_store_without_modes() {
        let base = MemoryBackend::new().root().stat().unwrap();
        let st = |uid, mode| Stat { uid, mode, ..base };
        let made = |keeps_modes| Made { uid: 7, keeps_owners: true, keeps_modes };
        let (kept, forced) = (made(true), made(false));
        assert!(kept.may_be(&st(7, 0o700)) && !kept.may_be(&st(7, 0o755)) && !kept.may_be(&st(8, 0o700)));
        assert!(forced.may_be(&st(7, 0o755)) && !forced.may_be(&st(8, 0o755)));
    }

    /// A kill in between leaves the probe with the owner that it was given.
    #[test]
    fn a_probe_that_was_left_is_cleared() {
        let dir = MemoryBackend::new().root();
        let uid = dir.stat().unwrap().uid;
        let made = Made { uid, keeps_owners: true, keeps_modes: true };
        let staging = Staging { dir: dir.clone(), made, left: Mutex::default() };
        let name = OsString::from(format!("{PROBE_PREFIX}00112233445566778899aabbccddeeff"));
        for (owner, is_cleared) in [(uid, true), (NOBODY, true), (NOBODY - 1, false)] {
            dir.create_file(&name).unwrap().set_owner(Some(owner), None).unwrap();
            assert_eq!(staging.clear(&name, &mut || true).is_ok(), is_cleared, "{owner}");
        }
    }

    #[test]
    fn only_whole_random_names_are_ours() {
        assert!(is_random(OsStr::new("dataset-00112233445566778899aabbccddeeff"), DATASET_PREFIX));
        for name in
            ["dataset-2024", "dataset-", "00112233445566778899aabbccddeeff", "dataset-00112233445566778899AABBCCDDEEFF"]
        {
            assert!(!is_random(OsStr::new(name), DATASET_PREFIX), "{name}");
        }
    }
}
