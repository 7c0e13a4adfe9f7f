//! Whether a vault, or a dataset in it, has interrupted sessions. A snapshot is never written, so they could not be
//! completed in it: the store would keep the choices of the crash for ever.
//!
//! A record of sessions takes a key. Those at hand are the vault's, which open the datasets that inherit them, and the
//! key that opened the vault. Of other datasets nothing is known: they are named to the caller.

use super::Original;
use crate::error::At;
use crate::keeper::headers_below;
use crate::open::backend;
use crate::place::Place;
use crate::{Error, Policy, Result};
use lamassu_crypto::KeyRing;
use lamassu_format::header::{VaultHeader, VaultId};
use lamassu_keys::{Unlocked, unlock_by_parent};
use lamassu_store::Backend as _;
use lamassu_vault::{VaultError, has_interrupted_sessions};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

impl Original {
    /// Refuses a vault with interrupted sessions, its own or those of a dataset. Returns the datasets of which that is
    /// not known: no key at hand opens them, or their record of sessions does not open. `header` is the vault's of now,
    /// and `keys` opened it.
    pub(super) fn refuse_interrupted(
        &self,
        policy: &Policy,
        header: &VaultHeader,
        keys: &Unlocked,
    ) -> Result<Vec<VaultId>> {
        let refused = |within: PathBuf| Err(Error::SnapshotOfInterrupted { within, dir: self.dir.clone() });
        let ring = keys.key_ring(header.suite())?;
        if is_interrupted(&self.dir, &ring, header).at(&self.dir)? {
            return refused(self.dir.clone());
        }
        let mut unknown = Vec::new();
        if !header.has_datasets() {
            return Ok(unknown);
        }
        let place = Place::of(&self.dir)?;
        let mut rings = HashMap::from([(PathBuf::new(), ring)]);
        for (stored, header) in headers_below(&self.dir)? {
            let around = stored.ancestors().skip(1).find_map(|above| rings.get(above));
            let opened = around.and_then(|around| unlock_by_parent(&header, around).ok());
            let opened = opened.or_else(|| policy.try_slots(&header, &self.material, None).ok());
            let Some(ring) = opened.and_then(|keys| keys.key_ring(header.suite()).ok()) else {
                unknown.push(header.id());
                continue;
            };
            let at = place.below(&stored)?;
            match is_interrupted(&at.path(), &ring, &header) {
                Ok(true) => return refused(self.dir.join(&stored)),
                Ok(false) => {}
                Err(Error::Vault(VaultError::Damaged { .. })) => unknown.push(header.id()),
                Err(error) => return Err(error).at(&self.dir.join(&stored)),
            }
            rings.insert(stored, ring);
        }
        Ok(unknown)
    }
}

fn is_interrupted(dir: &Path, ring: &KeyRing, header: &VaultHeader) -> Result<bool> {
    Ok(has_interrupted_sessions(&*backend(dir)?.root(), ring, &header.id())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options;
    use crate::testing;
    use lamassu_crypto::SecretBytes;
    use lamassu_format::header::NameMode;
    use lamassu_format::{Domain, Geometry, Suite, name};
    use lamassu_keys::{Material, NewDataset, NewSlot, SlotKind, Update, cost, create_dataset, header_file, unlock};
    use lamassu_vault::{Access, Owner, ROOT, Vault};
    use std::ffi::OsStr;
    use std::fs;
    use std::sync::Arc;

    /// A dataset in a vault's directory: its header, and a ring of its keys.
    struct Dataset(PathBuf, VaultHeader, KeyRing);

    impl Dataset {
        /// It inherits its keys, unless a key is given.
        fn make(dir: PathBuf, (parent, keys): (&VaultHeader, &Unlocked), own: Option<&Material>) -> Dataset {
            fs::create_dir(&dir).unwrap();
            let slot = own.map(|material| NewSlot { material, cost: cost::FALLBACK, label: "", created: 1 });
            let new = NewDataset {
                suite: Suite::Aes,
                geometry: Geometry::new(4096, 8).unwrap(),
                names: NameMode::Encrypted,
                domain: Domain::Family,
                compression: None,
                integrity: None,
                cache: None,
                inherit: own.is_none(),
                slot,
                created: 1,
            };
            let ring = keys.key_ring(parent.suite()).unwrap();
            let (mut header, keys) = create_dataset(parent, keys, &ring, &new).unwrap();
            let ring = keys.key_ring(header.suite()).unwrap();
            Vault::make_tree(&backend(&dir).unwrap(), &header, &ring).unwrap();
            let update = Update::begin(&dir.join(name::HEADER), &lamassu_keys::nobody()).unwrap();
            update.create_recorded(&mut header, &keys, &[]).unwrap();
            Dataset(dir, header, ring)
        }

        /// The record of sessions while one is open, and after it was closed.
        fn records(&self) -> (PathBuf, PathBuf) {
            let Dataset(dir, header, ring) = self;
            let vault = Vault::open(Arc::new(backend(dir).unwrap()), header, ring.clone(), options(false)).unwrap();
            let access = Access { read: true, write: true, truncate: false };
            let owner = Owner { uid: 0, gid: 0, umask: 0 };
            let (_, handle) = vault.create(ROOT, OsStr::new("f"), 0o600, access, owner).unwrap();
            vault.write(handle, 0, &[1; 100_000]).unwrap();
            vault.sync_all().unwrap();
            let record = || fs::read_link(dir.join(name::SESSIONS).join(name::SESSIONS_RECORD)).unwrap();
            let open = record();
            vault.close().unwrap();
            (open, record())
        }

        fn put(&self, record: &Path) {
            let place = self.0.join(name::SESSIONS).join(name::SESSIONS_RECORD);
            fs::remove_file(&place).unwrap();
            std::os::unix::fs::symlink(record, place).unwrap();
        }
    }

    #[test]
    fn interrupted_sessions_of_datasets_are_met_where_a_key_is_at_hand() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("v");
        fs::create_dir(&top).unwrap();
        testing::vault(&top);
        let place = top.join(name::HEADER);
        let mut header: VaultHeader = header_file::read(&place).unwrap();
        let keys = unlock(&header, &testing::key()).unwrap();
        keys.allow_datasets(&mut header).unwrap();
        let strange = Material::new(SlotKind::Raw, SecretBytes::new(vec![8; 32])).unwrap();
        let a = Dataset::make(top.join("a"), (&header, &keys), None);
        let inner_keys = unlock_by_parent(&a.1, &keys.key_ring(header.suite()).unwrap()).unwrap();
        let within = Dataset::make(top.join("a/b"), (&a.1, &inner_keys), None);
        let own = Dataset::make(top.join("own"), (&header, &keys), Some(&testing::key()));
        let unknown = Dataset::make(top.join("unknown"), (&header, &keys), Some(&strange));
        let original = Original::new(top.clone(), header, keys, testing::key());
        let look = || original.refuse_interrupted(&Policy::default(), &original.header, &original.keys);
        assert_eq!(look().unwrap(), [unknown.1.id()]);
        unknown.put(&unknown.records().0);
        assert_eq!(look().unwrap(), [unknown.1.id()]);
        for dataset in [&a, &within, &own] {
            let (open, closed) = dataset.records();
            dataset.put(&open);
            let refused = look();
            let is_it = |error: &Error| match error {
                Error::SnapshotOfInterrupted { within, dir } => (within, dir) == (&dataset.0, &top),
                _ => false,
            };
            assert!(refused.as_ref().is_err_and(is_it), "{refused:?}");
            dataset.put(&closed);
            assert_eq!(look().unwrap(), [unknown.1.id()]);
        }
    }
}
