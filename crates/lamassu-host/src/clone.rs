//! Clones and snapshots: a vault's directory is copied in the store, sharing blocks if the store can, under a header of
//! its own.
//!
//! Nothing is decrypted: files carry their block keys. The header is written last, so an interrupted copy is not a
//! vault. A failed copy is removed.
//!
//! This module does not keep writers away from the original: the caller does, and passes in the locks.

mod anchors;
mod interrupted;

use crate::anchors::Made;
use crate::created::{is_empty, is_ours};
use crate::error::At;
use crate::lock::{WriterLock, lock_out_writers, lock_out_writers_below};
use crate::open::{Found, backend};
use crate::pins::Succession;
use crate::{Error, Policy, Result};
use lamassu_anchor::table::Table;
use lamassu_format::header::{VaultHeader, VaultId};
use lamassu_format::name;
use lamassu_keys::history::EventKind;
use lamassu_keys::{Argon2Params, Event, KeyError, Material, NewClone, NewSlot, Unlocked, Update, clone_vault};
use lamassu_store::Backend;
use lamassu_store::backend::{Copied, LocalBackend, Privileges, Watch as StoreWatch};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::{fs, io};

/// The vault that is copied, and its key material.
pub struct Original {
    dir: PathBuf,
    header: VaultHeader,
    keys: Unlocked,
    material: Rc<Material>,
}

/// The copy to make.
#[derive(Clone, Copy, Debug)]
pub struct NewCopy<'a> {
    /// its keys, and whether it is a snapshot
    pub keys: NewClone,
    /// label of its key slot
    pub label: &'a str,
    /// cost of its key slot's passphrase
    pub cost: Argon2Params,
    /// whether to trust the store about set-id bits, device nodes, and the directory's owner and mode
    pub privileges: Privileges,
}

/// Receives the progress of a copy.
pub trait Watch {
    /// That many more bytes were copied. `false`: stop.
    fn advance(&mut self, bytes: u64) -> bool;
    /// After an error, a part of the copy could not be removed.
    fn left(&mut self, place: &Path, error: &io::Error);
}

/// Keeps writers away from an original. When this is dropped, they go on.
pub trait Quiet {
    /// Whether the daemon of a mount does, which has the vault open.
    fn is_frozen(&self) -> bool;
    /// Lets writers go on.
    ///
    /// # Errors
    /// They may have written meanwhile: [`lamassu_vault::VaultError::FreezeLost`].
    fn end(self) -> Result<()>;
}

/// A finished copy.
pub struct Done {
    /// the copy, as the original of a further one
    pub copy: Original,
    /// what was copied
    pub copied: Copied,
    /// set if the pin of the original's administrator was updated to a new key
    pub succession: Option<Succession>,
    /// datasets without an anchor on this host; their copies have none either
    pub without_anchor: Vec<VaultId>,
    /// of a snapshot: datasets of which it is not known whether they have interrupted sessions: no key at hand opens
    /// them with the work of one attempt, or their record of sessions does not open
    pub not_looked_at: Vec<VaultId>,
    /// set if the original's history could not record the copy
    pub unrecorded: Option<KeyError>,
}

impl Original {
    /// The vault in `dir`, a path without links. `material` and `keys` opened its header.
    pub fn new(dir: PathBuf, header: VaultHeader, keys: Unlocked, material: Material) -> Original {
        Original { dir, header, keys, material: Rc::new(material) }
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its header.
    pub fn header(&self) -> &VaultHeader {
        &self.header
    }

    /// The keys that opened it.
    pub fn keys(&self) -> &Unlocked {
        &self.keys
    }

    /// Its key material.
    pub fn material(&self) -> &Material {
        &self.material
    }

    /// Makes a copy at `place`. `quiet` keeps writers away from the original, until nothing more of it is read.
    ///
    /// # Errors
    /// [`Error::SnapshotOfInterrupted`]; that of [`Quiet::end`]; those of keys, of anchors and of the store.
    pub fn copy(
        &self,
        policy: &Policy,
        quiet: impl Quiet,
        place: &Path,
        new: &NewCopy<'_>,
        watch: &mut dyn Watch,
    ) -> Result<Done> {
        let mut succession = None;
        // A rotation may have happened before the locks were taken: its epoch is needed too.
        let header = Found::at(policy, &self.dir)?.header;
        let newer = match header == self.header {
            true => None,
            false => {
                succession = policy.pins.check(&header)?;
                Some(policy.try_slots(&header, &self.material, None).at(&self.dir)?)
            }
        };
        let keys = newer.as_ref().unwrap_or(&self.keys);
        let of = self.anchor(policy, &header, keys, &quiet)?;
        let not_looked_at = match new.keys.snapshot {
            true => {
                let anchor = of.as_deref().map(|table| table as &dyn Table);
                self.refuse_interrupted(policy, (&header, keys), anchor, &quiet)?
            }
            false => Vec::new(),
        };
        let slot = NewSlot { material: &self.material, cost: new.cost, label: new.label, created: new.keys.created };
        let mut history = keys.history(&self.dir, &header)?;
        let (mut header, unlocked) = clone_vault(&header, keys, new.keys, &slot)?;
        let top = Top::make(place).map_err(|source| Error::Backing { op: "create", path: place.into(), source })?;
        let made = self.fill(&top, new.privileges, watch).and_then(|copied| {
            self.copy_sessions(keys, &top, (&header, &unlocked))?;
            let anchor = of.map(|table| self.copy_anchor(policy, &table, &header, &top, new.privileges)).transpose()?;
            let below = self.copy_anchors_below(policy, &header, &quiet)?;
            // Without a header the copy is no vault.
            quiet.end()?;
            let update = Update::begin(&top.path().join(name::HEADER), &policy.witness())?;
            update.create_recorded(&mut header, &unlocked, &[self.created(&unlocked, new)])?;
            anchor.map(Made::keep);
            Ok((copied, below.kept()))
        });
        let made = made.inspect_err(|_| {
            if let Err(error) = top.take_back(place) {
                watch.left(place, &error);
            }
        });
        let (copied, without_anchor) = made.at(place)?;
        let word = if new.keys.snapshot { "snapshot" } else { "clone" };
        let noted = Event::new(EventKind::Cloned).detail(word, header.id().to_string());
        let unrecorded = history.note(noted).err();
        let dir = place.canonicalize().map_err(|source| Error::NotADirectory { dir: place.into(), source })?;
        let copy = Original { dir, header, keys: unlocked, material: self.material.clone() };
        Ok(Done { copy, copied, succession, without_anchor, not_looked_at, unrecorded })
    }

    /// The first entry of the copy's history.
    fn created(&self, keys: &Unlocked, new: &NewCopy<'_>) -> Event {
        let of = if new.keys.snapshot { "snapshot-of" } else { "clone-of" };
        let event = Event::new(EventKind::Created).slot(keys.slot()).detail("kind", self.material.kind().name());
        event.detail(of, self.header.id().to_string())
    }

    /// Interrupted writes of the original are in the copy too, so the copy's record of sessions must say so.
    fn copy_sessions(&self, keys: &Unlocked, top: &Top, copy: (&VaultHeader, &Unlocked)) -> Result<()> {
        let suite = self.header.suite();
        let (from, to) = (backend(&self.dir)?.root(), backend(&top.path())?.root());
        let (from_ring, to_ring) = (keys.key_ring(suite)?, copy.1.key_ring(suite)?);
        lamassu_vault::copy_sessions((&*from, &from_ring, &self.header.id()), (&*to, &to_ring, &copy.0.id()))
            .map_err(|source| Error::CannotCopySessions { dir: self.dir.clone(), source })
    }

    /// Copies everything but the header and the record of sessions; durable.
    fn fill(&self, top: &Top, privileges: Privileges, watch: &mut dyn Watch) -> Result<Copied> {
        let (from, to) = (backend(&self.dir)?, backend(&top.path())?);
        let copied = LocalBackend::copy_to(&from, &to, privileges, &mut Chosen(watch))?;
        to.sync().map_err(|source| Error::Backing { op: "sync", path: top.path(), source })?;
        Ok(copied)
    }
}

/// The directory of a copy, held open: the owner of its parent could give its name to something else.
struct Top(OwnedFd);

impl Top {
    /// Makes it, private to its owner. `EAGAIN` if something else has its name by then.
    fn make(place: &Path) -> io::Result<Top> {
        fs::DirBuilder::new().mode(0o700).create(place)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = rustix::fs::open(place, flags, Mode::empty())?;
        let st = rustix::fs::fstat(&dir)?;
        let is_new = st.st_mode & 0o077 == 0 && is_empty(dir.as_fd())? && is_ours(dir.as_fd(), st.st_uid)?;
        match is_new {
            true => Ok(Top(dir)),
            false => Err(Errno::AGAIN.into()),
        }
    }

    /// A path that does not depend on its name.
    fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }

    /// Removes only what this program made: the content of the held directory, and the name if the directory is empty.
    fn take_back(&self, place: &Path) -> io::Result<()> {
        for entry in fs::read_dir(self.path())? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => fs::remove_dir_all(entry.path())?,
                false => fs::remove_file(entry.path())?,
            }
        }
        fs::remove_dir(place)
    }
}

/// Locks out writers of a vault that no process has open, and of every dataset in it.
///
/// # Errors
/// Those of [`Found::at`] and [`lock_out_writers_below`].
pub fn lock_out_all_writers(policy: &Policy, dir: &Path) -> Result<Vec<WriterLock>> {
    let mut held: Vec<WriterLock> = lock_out_writers(policy, dir)?.into_iter().collect();
    if Found::at(policy, dir)?.header.has_datasets() {
        held.extend(lock_out_writers_below(policy, dir)?);
    }
    Ok(held)
}

/// Refuses an existing place for a copy, and one in any of these directories, which belong to the original: it would be
/// copied too, or change during the copy.
///
/// # Errors
/// [`Error::CloneExists`], [`Error::CloneWithin`], [`Error::NotADirectory`].
pub fn refuse_place(place: &Path, mut belongs: impl Iterator<Item = PathBuf>) -> Result<()> {
    if place.symlink_metadata().is_ok() {
        return Err(Error::CloneExists { path: place.into() });
    }
    let parent = match place.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        Some(_) | None => Path::new("."),
    };
    let parent = parent.canonicalize().map_err(|source| Error::NotADirectory { dir: parent.into(), source })?;
    match belongs.find(|within| parent.starts_with(within)) {
        Some(within) => Err(Error::CloneWithin { path: place.into(), within }),
        None => Ok(()),
    }
}

/// Chooses what is copied.
struct Chosen<'a>(&'a mut dyn Watch);

/// Names in the root that are not copied. The copy has its own.
const NOT_COPIED: [&str; 8] = [
    name::HEADER,
    name::HEADER_NEW,
    name::HEADER_REPLACED,
    name::HEADER_REPLACING,
    name::HISTORY,
    name::HISTORY_NEW,
    name::LOCK,
    name::SESSIONS,
];

impl StoreWatch for Chosen<'_> {
    fn wants(&mut self, dir: &Path, entry: &OsStr) -> bool {
        match dir.as_os_str().is_empty() {
            true => {
                !NOT_COPIED.iter().any(|own| entry == *own)
                    && !entry.as_encoded_bytes().starts_with(name::HISTORY_BROKEN.as_bytes())
                    && !name::is_set_aside(entry.as_encoded_bytes())
            }
            false => dir != Path::new(name::STAGING),
        }
    }

    fn advance(&mut self, _files: u64, bytes: u64) -> bool {
        self.0.advance(bytes)
    }
}
