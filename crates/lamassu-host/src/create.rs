//! Creates a vault in an empty directory.
//!
//! The header is written last: without it there is no vault. After an error the caller undoes what was made.

use crate::anchors::{Choice, Made, NewTrees, disk};
use crate::open::backend;
use crate::{Error, Policy, Result};
use lamassu_format::header::VaultHeader;
use lamassu_format::root::MODE_BITS;
use lamassu_format::{RootRecord, name};
use lamassu_keys::history::EventKind;
use lamassu_keys::{Event, NewSlot, NewVault, Unlocked, Update, create_vault};
use lamassu_store::Backend;
use lamassu_vault::Vault;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Mode of a vault directory: other users have no access.
const PRIVATE: u32 = 0o700;
const NAME_LEN_MIN: u32 = 64;

/// Refuses a directory that is not empty, and anything that is not a directory.
///
/// # Errors
/// [`Error::DirNotEmpty`], [`Error::NotADirectory`].
pub fn refuse_full(dir: &Path) -> Result<()> {
    match fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(Error::NotADirectory { dir: dir.into(), source }),
        Ok(mut entries) => match entries.next() {
            None => Ok(()),
            Some(_) => Err(Error::DirNotEmpty { dir: dir.into() }),
        },
    }
}

/// The vault's directory, and what to undo after an error.
pub struct VaultPlace {
    dir: PathBuf,
    held: File,
    made_dir: bool,
    /// the directory's attributes before it became private: they become those of the tree's root
    root: RootRecord,
}

impl VaultPlace {
    /// Makes the directory, or takes an empty one, and makes it private: other users need no access to what the store
    /// holds. `mode`: that of the tree's root, if the directory is created. Also returns why the directory could not be
    /// made private, if so.
    ///
    /// # Errors
    /// As [`refuse_full`].
    pub fn prepare(dir: &Path, mode: u32) -> Result<(VaultPlace, Option<io::Error>)> {
        let unusable = |source| Error::NotADirectory { dir: dir.into(), source };
        let made_dir = match fs::DirBuilder::new().mode(PRIVATE).create(dir) {
            Ok(()) => true,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => false,
            Err(source) => return Err(unusable(source)),
        };
        let flags = libc::O_DIRECTORY | libc::O_CLOEXEC;
        let held = OpenOptions::new().read(true).custom_flags(flags).open(dir).map_err(unusable)?;
        refuse_full(dir)?;
        let st = held.metadata().map_err(unusable)?;
        let mode = if made_dir { mode } else { st.mode() & MODE_BITS };
        let root = RootRecord { mode, uid: st.uid(), gid: st.gid() };
        let not_private = held.set_permissions(fs::Permissions::from_mode(PRIVATE)).err();
        Ok((VaultPlace { dir: dir.into(), held, made_dir, root }, not_private))
    }

    /// Removes only what this code created; the directory was empty.
    pub fn take_back(&self) {
        let files = [
            name::HEADER,
            name::HEADER_NEW,
            name::DIR_RECORD,
            name::HISTORY,
            name::HISTORY_NEW,
            name::LOCK,
            name::ROOT_RECORD,
            name::ROOT_RECORD_NEW,
        ];
        for file in files {
            let _ = fs::remove_file(self.dir.join(file));
        }
        let _ = fs::remove_file(self.dir.join(name::SESSIONS).join(name::SESSIONS_RECORD));
        let _ = fs::remove_dir(self.dir.join(name::SESSIONS));
        let _ = fs::remove_dir(self.dir.join(name::STAGING));
        let _ = self.held.set_permissions(fs::Permissions::from_mode(self.root.mode));
        if self.made_dir {
            let _ = fs::remove_dir(&self.dir);
        }
    }

    /// The longest name that the store accepts, in bytes: for [`NewVault::name_max`].
    ///
    /// # Errors
    /// [`Error::NameMax`], [`Error::Backing`].
    pub fn name_max(&self) -> Result<u8> {
        let op = "ask the limits of";
        let stat = backend(&self.dir)?.stat_fs();
        let stat = stat.map_err(|source| Error::Backing { op, path: self.dir.clone(), source })?;
        if stat.name_max < NAME_LEN_MIN {
            return Err(Error::NameMax { dir: self.dir.clone(), found: stat.name_max });
        }
        Ok(u8::try_from(stat.name_max).unwrap_or(u8::MAX))
    }

    /// Makes the tree, the anchor unless the policy goes without one, and the header with its first slot. Returns the
    /// header, and the anchor's file.
    ///
    /// # Errors
    /// Those of keys, of the store and of anchors.
    pub fn fill(
        &self,
        policy: &Policy,
        new: &NewVault<'_>,
        slot: &NewSlot<'_>,
        trees: NewTrees,
    ) -> Result<(VaultHeader, Option<PathBuf>)> {
        let backend = backend(&self.dir)?;
        let (mut header, unlocked) = create_vault(new, slot)?;
        let ring = unlocked.key_ring(header.suite())?;
        lamassu_vault::create_root_record(&*backend.root(), &ring, self.root)
            .and_then(|()| Vault::make_tree(&backend, &header, &ring))
            .map_err(|source| Error::CannotMakeRoot { source })?;
        let anchor = self.anchor(policy, &mut header, &unlocked, trees)?;
        let update = Update::begin(&self.dir.join(name::HEADER), &policy.witness())?;
        let made = Event::new(EventKind::Created)
            .slot(unlocked.slot())
            .detail("kind", slot.material.kind().name())
            .detail("suite", header.suite().name())
            .detail("domain", header.domain().name());
        update.create_recorded(&mut header, &unlocked, &[made])?;
        Ok((header, anchor.map(Made::keep)))
    }

    /// Makes the vault's anchor from its present tree, and records it in the header.
    fn anchor(
        &self,
        policy: &Policy,
        header: &mut VaultHeader,
        keys: &Unlocked,
        trees: NewTrees,
    ) -> Result<Option<Made>> {
        if *policy.anchors.choice() == Choice::Unverified {
            return Ok(None);
        }
        let file = policy.anchors.file_for_new(&header.id(), None)?;
        disk::check(&file, &self.dir)?;
        keys.set_anchored(header)?;
        Ok(Some(policy.anchors.make(header, keys, trees, &file, &self.dir)?))
    }
}
