//! Mode, owner and group of the tree's root: the record `lamassu.root` (`docs/format.md` §6b).
//!
//! The vault directory is its owner's alone (mode 0700), so that no other user of the host reaches the entries below
//! it. Users of a mount see the record's permissions instead, and chmod of a mount's root changes the record, never the
//! directory. A root without a record shows the permissions of its directory. So do the datasets in a mount: their
//! directories lie below a private one, and chmod changes them as it changes any directory. A record that does not open
//! shows the directory's permissions too, which are the stricter ones, until chmod or `check --repair` makes a new
//! record.
//!
//! In an anchored vault a record that is not the newest is stale: until it is accepted, the root is for the user of the
//! process alone (mode 0700), and chmod is refused. The record is replaced between the commit of {old, new} to the
//! anchor and a barrier. The store chooses the permissions of a directory. So a dataset in an anchored vault shows
//! those that the anchor has of its directory, which is an entry there. An anchored vault without a record, such as a
//! dataset that is mounted by itself, is for the user of the process alone until chmod makes a record.

use crate::Result;
use crate::digests::digest_of_text;
use crate::error::{io, is_not_found};
use crate::event::{Events, IntegrityKind};
use crate::record::{ROOT, RecordFault, read_text, write_text};
use crate::stored::keeping_times;
use lamassu_anchor::row::Sealed;
use lamassu_anchor::{Anchor, Digest, EntryMark};
use lamassu_crypto::KeyRing;
use lamassu_format::name::{ROOT_RECORD, ROOT_RECORD_NEW};
use lamassu_format::root::{MODE_BITS, RootRecord, RootRecordError};
use lamassu_store::BackendDir;
use lamassu_store::backend::{RenameMode, Stat};
use parking_lot::Mutex;
use rustix::process::{getegid, geteuid};
use std::collections::HashSet;
use std::ffi::OsStr;
use std::io as stdio;
use std::sync::Arc;

type RootFault = RecordFault<RootRecordError>;

/// Where the permissions of a root come from.
enum Source {
    /// There is no record: from the directory.
    Directory,
    /// The record does not open, and why. The directory's permissions are shown.
    Damaged(RootFault),
    Record(RootRecord),
    /// There is no record. It is a dataset's root: the permissions that the parent vault's anchor has of this entry.
    Entry(RootRecord),
    /// There is no record, and the store chooses the directory's permissions. The root is shown as the process's user's
    /// alone.
    Unrecorded,
    /// The record is not the newest, or it is gone. The root is shown as the process's user's alone.
    Stale,
}

/// The permissions that a root shows. They outlive the vault's keys: an unloaded vault still has a root.
#[derive(Clone)]
pub(crate) struct ShownPermissions(Arc<Mutex<Source>>);

impl ShownPermissions {
    /// The stat of the vault directory, with the permissions that its root shows.
    pub fn over(&self, st: Stat) -> Stat {
        match *self.0.lock() {
            Source::Record(RootRecord { mode, uid, gid }) | Source::Entry(RootRecord { mode, uid, gid }) => {
                Stat { mode, uid, gid, ..st }
            }
            Source::Directory | Source::Damaged(_) => st,
            Source::Unrecorded | Source::Stale => {
                let RootRecord { mode, uid, gid } = private();
                Stat { mode, uid, gid, ..st }
            }
        }
    }
}

/// The permissions of a loaded root. The lock of the shown permissions serialises changes.
pub(crate) struct RootPermissions {
    dir: Arc<dyn BackendDir>,
    ring: KeyRing,
    top: Top,
    anchor: Option<Arc<Anchor>>,
    shown: ShownPermissions,
}

/// What this root is the root of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Top {
    /// The whole file system: a change makes the record if there is none.
    FileSystem,
    /// A dataset inside another vault.
    Dataset,
}

impl RootPermissions {
    /// The permissions of the vault below `dir`. A record that does not open, or is not the newest, is reported as an
    /// event.
    pub fn open(
        dir: Arc<dyn BackendDir>,
        ring: KeyRing,
        top: Top,
        anchor: Option<Arc<Anchor>>,
        events: &Events,
    ) -> RootPermissions {
        let text = shown_text(&*dir);
        let is_newest = anchor.as_ref().is_none_or(|anchor| match &text {
            // Its owner may lack the permission in a dataset: see below.
            Err(error) => top == Top::Dataset && error.kind() == stdio::ErrorKind::PermissionDenied,
            Ok(text) => anchor.vault().root_permissions.is_current(digest(text.as_deref())),
        });
        let opened = text.map_err(RootFault::from).and_then(|text| {
            ROOT.open(&text.ok_or(RootFault::Missing)?, &ring, &[], RootRecord::parse) //
        });
        let source = match opened {
            _ if !is_newest => {
                events.found(IntegrityKind::Stale.at(
                    ROOT_RECORD,
                    "root permissions: the store shows another state than the newest; only the user of this process may enter",
                ));
                Source::Stale
            }
            Ok(record) => Source::Record(record),
            Err(RootFault::Missing) if top == Top::FileSystem && anchor.is_some() => Source::Unrecorded,
            Err(RootFault::Missing) => Source::Directory,
            // The mode of a dataset's directory may deny it to its owner, which is this process.
            Err(RootFault::Unreadable(e)) if top == Top::Dataset && e.kind() == stdio::ErrorKind::PermissionDenied => {
                Source::Directory
            }
            Err(fault) => {
                events.found(IntegrityKind::RootPermissions.at(
                    ROOT_RECORD,
                    format!(
                        "the record of the root's permissions does not open: {fault}; the vault directory's own are \
                         shown, and chmod of the mount's root makes a new record"
                    ),
                ));
                Source::Damaged(fault)
            }
        };
        RootPermissions { dir, ring, top, anchor, shown: ShownPermissions(Arc::new(Mutex::new(source))) }
    }

    pub fn shown(&self) -> &ShownPermissions {
        &self.shown
    }

    /// The root is a dataset's: without a record it shows the permissions that the parent vault's anchor has of its
    /// entry.
    pub fn follow(&self, entry: RootRecord) {
        let mut source = self.shown.0.lock();
        if matches!(*source, Source::Directory | Source::Entry(_)) {
            *source = Source::Entry(entry);
        }
    }

    /// Why the record does not open, if it does not.
    pub fn fault(&self) -> Option<String> {
        match &*self.shown.0.lock() {
            Source::Damaged(fault) => Some(fault.to_string()),
            Source::Directory | Source::Record(_) | Source::Entry(_) | Source::Unrecorded | Source::Stale => None,
        }
    }

    /// After a process that ended while it replaced the record: the record that the store shows, which a barrier has
    /// covered, is the newest.
    pub fn settle(&self) -> Result<()> {
        let Some(anchor) = &self.anchor else { return Ok(()) };
        let _shown = self.shown.0.lock();
        if let Sealed::Becomes { .. } = anchor.vault().root_permissions {
            let shown = shown_digest(&*self.dir)?;
            if anchor.vault().root_permissions.is_current(shown) {
                anchor.root_permissions_replaced(shown);
            }
        }
        Ok(())
    }

    /// Whether the store shows another record than the newest.
    pub fn is_stale(&self) -> bool {
        matches!(&*self.shown.0.lock(), Source::Stale)
    }

    /// Accepts durably what the store shows as the newest. Returns whether that differs from before.
    pub fn accept(&self) -> Result<bool> {
        let Some(anchor) = &self.anchor else { return Ok(false) };
        let mut source = self.shown.0.lock();
        self.dir.sync().map_err(io("sync the root"))?;
        let text = shown_text(&*self.dir).map_err(io("read the record of the root's permissions"))?;
        let shown = digest(text.as_deref());
        let is_other = !anchor.vault().root_permissions.is_current(shown);
        anchor.root_permissions_replaced(shown);
        anchor.commit_objects(&HashSet::new(), EntryMark::NOTHING)?;
        *source = match text.map(|text| ROOT.open(&text, &self.ring, &[], RootRecord::parse)) {
            None => Source::Directory,
            Some(Ok(record)) => Source::Record(record),
            Some(Err(fault)) => Source::Damaged(fault),
        };
        Ok(is_other)
    }

    /// chmod of the root.
    pub fn set_mode(&self, mode: u32) -> stdio::Result<()> {
        self.change(|record| record.mode = mode & MODE_BITS, |dir| dir.set_mode(mode))
    }

    /// chown of the root; `None` leaves.
    pub fn set_owner(&self, uid: Option<u32>, gid: Option<u32>) -> stdio::Result<()> {
        let set = |record: &mut RootRecord| {
            record.uid = uid.unwrap_or(record.uid);
            record.gid = gid.unwrap_or(record.gid);
        };
        self.change(set, |dir| dir.set_owner(uid, gid))
    }

    /// Replaces a record that does not open by one with the directory's permissions.
    pub fn renew(&self) -> Result<()> {
        self.change(|_| {}, |_| Ok(())).map_err(io("write the record of the root's permissions"))
    }

    /// Seals the record under the newest key, if it is under an older one.
    pub fn reseal(&self) -> Result<()> {
        let shown = self.shown.0.lock();
        let Source::Record(record) = *shown else { return Ok(()) };
        let resealed = ROOT.is_newest(&*self.dir, &self.ring, &[]).and_then(|is_newest| match is_newest {
            true => Ok(()),
            false => self.write(record),
        });
        resealed.map_err(io("seal the record of the root's permissions"))
    }

    fn change(
        &self,
        set: impl FnOnce(&mut RootRecord),
        of_directory: impl FnOnce(&dyn BackendDir) -> stdio::Result<()>,
    ) -> stdio::Result<()> {
        let mut source = self.shown.0.lock();
        let mut record = match *source {
            Source::Directory if self.top == Top::Dataset => return of_directory(&*self.dir),
            Source::Entry(mut entry) => {
                of_directory(&*self.dir)?;
                set(&mut entry);
                *source = Source::Entry(entry);
                return Ok(());
            }
            Source::Unrecorded => private(),
            Source::Stale => return Err(stdio::Error::other("the root's permissions in the store are not the newest")),
            Source::Directory | Source::Damaged(_) => record_of(&self.dir.stat()?),
            Source::Record(record) => record,
        };
        set(&mut record);
        self.write(record)?;
        *source = Source::Record(record);
        Ok(())
    }

    /// Replaces the record. The caller holds the lock of the shown permissions.
    fn write(&self, record: RootRecord) -> stdio::Result<()> {
        let Some(anchor) = &self.anchor else { return write(&*self.dir, &self.ring, record) };
        let text = ROOT.seal(&self.ring, &[], &record.encode()).map_err(stdio::Error::other)?;
        let (old, new) = (digest(shown_text(&*self.dir)?.as_deref()), digest(Some(text.as_bytes())));
        if matches!(anchor.vault().root_permissions, Sealed::Becomes { .. }) {
            // The state that an earlier replacement left must be durable before it counts as the old one.
            self.dir.sync()?;
        }
        if !anchor.replacing_root_permissions(old, new).map_err(stdio::Error::other)? {
            return Err(stdio::Error::other("the root's permissions in the store are not the newest"));
        }
        write_sealed(&*self.dir, &text)?;
        self.dir.sync()?;
        anchor.root_permissions_replaced(new);
        Ok(())
    }
}

/// The text of the record; `None` if it is missing.
fn shown_text(dir: &dyn BackendDir) -> stdio::Result<Option<Vec<u8>>> {
    match read_text(dir, OsStr::new(ROOT_RECORD)) {
        Err(e) if is_not_found(&e) => Ok(None),
        text => text.map(Some),
    }
}

fn digest(text: Option<&[u8]>) -> Digest {
    text.map_or(Digest::NONE, digest_of_text)
}

/// The digest of the root's record as the store shows it; that of no record if it is missing.
///
/// # Errors
/// Those of the store.
pub(crate) fn shown_digest(root: &dyn BackendDir) -> Result<Digest> {
    let text = shown_text(root).map_err(io("read the record of the root's permissions"))?;
    Ok(digest(text.as_deref()))
}

/// For the user of this process alone.
fn private() -> RootRecord {
    RootRecord { mode: 0o700, uid: geteuid().as_raw(), gid: getegid().as_raw() }
}

fn record_of(st: &Stat) -> RootRecord {
    RootRecord { mode: st.mode & MODE_BITS, uid: st.uid, gid: st.gid }
}

/// Makes the record of a new vault below `root`. Not durable before the next barrier of the root.
///
/// # Errors
/// Those of the store.
pub fn create_root_record(root: &dyn BackendDir, ring: &KeyRing, record: RootRecord) -> Result<()> {
    write(root, ring, record).map_err(io("write the record of the root's permissions"))
}

/// Replaces the record whole, by a rename. The root's times stay, except the change time, as with chmod(2).
fn write(dir: &dyn BackendDir, ring: &KeyRing, record: RootRecord) -> stdio::Result<()> {
    write_sealed(dir, &ROOT.seal(ring, &[], &record.encode()).map_err(stdio::Error::other)?)
}

fn write_sealed(dir: &dyn BackendDir, text: &str) -> stdio::Result<()> {
    let new = OsStr::new(ROOT_RECORD_NEW);
    keeping_times(dir, || {
        match dir.unlink(new) {
            Err(e) if !is_not_found(&e) => return Err(e),
            Ok(()) | Err(_) => {}
        }
        write_text(dir, new, text)?;
        dir.rename(new, dir, OsStr::new(ROOT_RECORD), RenameMode::Replace)
    })
}
