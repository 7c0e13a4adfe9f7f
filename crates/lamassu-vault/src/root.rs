//! Mode, owner and group of the tree's root: the record `lamassu.root` (`docs/format.md` §6b).
//!
//! The vault directory is its owner's alone (mode 0700), so that no other user of the host reaches the entries below
//! it. Users of a mount see the record's permissions instead, and chmod of a mount's root changes the record, never the
//! directory. A root without a record shows the permissions of its directory. So do the datasets in a mount: their
//! directories lie below a private one, and chmod changes them as it changes any directory. A record that does not open
//! shows the directory's permissions too, which are the stricter ones, until chmod or `check --repair` makes a new
//! record.

use crate::Result;
use crate::error::{io, is_not_found};
use crate::event::{Events, IntegrityKind};
use crate::record::{ROOT, RecordFault, write_text};
use lamassu_crypto::KeyRing;
use lamassu_format::name::{ROOT_RECORD, ROOT_RECORD_NEW};
use lamassu_format::root::{MODE_BITS, RootRecord, RootRecordError};
use lamassu_store::BackendDir;
use lamassu_store::backend::{RenameMode, SetTime, Stat};
use parking_lot::Mutex;
use std::ffi::OsStr;
use std::io as stdio;
use std::sync::Arc;

type RootFault = RecordFault<RootRecordError>;

/// Where the permissions of a root come from.
enum Source {
    /// There is no record: from the directory.
    Directory,
    /// The record does not open, and why. Shown are those of the directory.
    Damaged(RootFault),
    Record(RootRecord),
}

/// The permissions that a root shows. They outlive the vault's keys: an unloaded vault still has a root.
#[derive(Clone)]
pub(crate) struct ShownPermissions(Arc<Mutex<Source>>);

impl ShownPermissions {
    /// The stat of the vault directory, with the permissions that its root shows.
    pub fn over(&self, st: Stat) -> Stat {
        match *self.0.lock() {
            Source::Record(RootRecord { mode, uid, gid }) => Stat { mode, uid, gid, ..st },
            Source::Directory | Source::Damaged(_) => st,
        }
    }
}

/// The permissions of a loaded root. Changes are serialised by the lock of what is shown.
pub(crate) struct RootPermissions {
    dir: Arc<dyn BackendDir>,
    ring: KeyRing,
    top: Top,
    shown: ShownPermissions,
}

/// What a root is the root of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Top {
    /// The whole file system: a change makes the record where there is none.
    FileSystem,
    /// A dataset inside another vault.
    Dataset,
}

impl RootPermissions {
    /// Those of the vault below `dir`. A record that does not open is an event.
    pub fn open(dir: Arc<dyn BackendDir>, ring: KeyRing, top: Top, events: &Events) -> RootPermissions {
        let source = match ROOT.read(&*dir, &ring, &[], RootRecord::parse) {
            Ok(record) => Source::Record(record),
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
        RootPermissions { dir, ring, top, shown: ShownPermissions(Arc::new(Mutex::new(source))) }
    }

    pub fn shown(&self) -> &ShownPermissions {
        &self.shown
    }

    /// Why the record does not open, where there is one that does not.
    pub fn fault(&self) -> Option<String> {
        match &*self.shown.0.lock() {
            Source::Damaged(fault) => Some(fault.to_string()),
            Source::Directory | Source::Record(_) => None,
        }
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

    /// Replaces a record that does not open by one that says what the directory says.
    pub fn renew(&self) -> Result<()> {
        self.change(|_| {}, |_| Ok(())).map_err(io("write the record of the root's permissions"))
    }

    /// Seals the record under the newest key, if it is under an older one.
    pub fn reseal(&self) -> Result<()> {
        let shown = self.shown.0.lock();
        let Source::Record(record) = *shown else { return Ok(()) };
        let resealed = ROOT.is_newest(&*self.dir, &self.ring, &[]).and_then(|is_newest| match is_newest {
            true => Ok(()),
            false => write(&*self.dir, &self.ring, record),
        });
        resealed.map_err(io("seal the record of the root's permissions"))
    }

    fn change(
        &self,
        set: impl FnOnce(&mut RootRecord),
        of_directory: impl FnOnce(&dyn BackendDir) -> stdio::Result<()>,
    ) -> stdio::Result<()> {
        let mut source = self.shown.0.lock();
        let mut record = match &*source {
            Source::Directory if self.top == Top::Dataset => return of_directory(&*self.dir),
            Source::Directory | Source::Damaged(_) => record_of(&self.dir.stat()?),
            Source::Record(record) => *record,
        };
        set(&mut record);
        write(&*self.dir, &self.ring, record)?;
        *source = Source::Record(record);
        Ok(())
    }
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

/// Replaces the record whole, by a rename. The root's times stay, but for the change time: chmod(2) changes no other.
fn write(dir: &dyn BackendDir, ring: &KeyRing, record: RootRecord) -> stdio::Result<()> {
    let text = ROOT.seal(ring, &[], &record.encode()).map_err(stdio::Error::other)?;
    let (st, new) = (dir.stat()?, OsStr::new(ROOT_RECORD_NEW));
    match dir.unlink(new) {
        Err(e) if !is_not_found(&e) => return Err(e),
        Ok(()) | Err(_) => {}
    }
    write_text(dir, new, &text)?;
    dir.rename(new, dir, OsStr::new(ROOT_RECORD), RenameMode::Replace)?;
    dir.set_times(SetTime::At(st.atime), SetTime::At(st.mtime))
}
