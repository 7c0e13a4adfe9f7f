//! Whether a vault, or a dataset in it, has interrupted sessions. A snapshot is never written, so they could not be
//! completed in it: the store would keep the choices of the crash for ever.
//!
//! A record of sessions takes a key. Those at hand are the vault's, which open the datasets that inherit them, and the
//! key that opened the vault. Of other datasets nothing is known: they are named to the caller.

use super::anchors::look;
use super::{Original, Quiet};
use crate::error::At;
use crate::keeper::headers_below;
use crate::open::backend;
use crate::place::Place;
use crate::{Error, Policy, Result};
use lamassu_anchor::table::Table;
use lamassu_crypto::KeyRing;
use lamassu_format::header::{VaultHeader, VaultId};
use lamassu_keys::{KeyError, Unlocked, unlock_by_parent};
use lamassu_store::Backend as _;
use lamassu_vault::anchor::datasets_among;
use lamassu_vault::{VaultError, has_interrupted_sessions};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A vault, or a dataset, that has datasets in it.
struct Around {
    /// `None`: no key at hand opens it.
    ring: Option<KeyRing>,
    /// The datasets in it, as its anchor says; `None`: not known.
    has: Option<Arc<HashSet<VaultId>>>,
}

impl Original {
    /// Refuses a vault with interrupted sessions, its own or those of a dataset. Returns the datasets of which that is
    /// not known: no key at hand opens them, or their record of sessions does not open. `header` is the vault's of now,
    /// `keys` opened it, and `anchor` is its anchor's.
    ///
    /// The store can show headers of datasets without limit, while the vault is frozen. Those that the anchor of the
    /// vault around them does not have are passed over, and all others together get the work of one attempt.
    pub(super) fn refuse_interrupted(
        &self,
        policy: &Policy,
        (header, keys): (&VaultHeader, &Unlocked),
        anchor: Option<&dyn Table>,
        quiet: &impl Quiet,
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
        let below = headers_below(&self.dir)?;
        let ids: HashSet<VaultId> = below.iter().map(|(_, header)| header.id()).collect();
        let has = anchor.map(|table| datasets_among(table, &ids)).transpose()?.map(Arc::new);
        // The store can show a dataset's header in many places.
        let mut looks: HashMap<VaultId, Option<Arc<HashSet<VaultId>>>> = HashMap::new();
        let mut known = HashMap::from([(PathBuf::new(), Around { ring: Some(ring), has })]);
        let mut attempt = policy.attempt(&self.material);
        for (stored, header) in below {
            if policy.surroundings.is_interrupted() {
                return Err(Error::Interrupted);
            }
            let mut above = stored.ancestors().skip(1).filter_map(|above| known.get(above));
            let has = above.clone().next().and_then(|around| around.has.as_ref());
            if has.is_some_and(|has| !has.contains(&header.id())) {
                // Nobody uses it, nor what is in it.
                known.insert(stored, Around { ring: None, has: Some(Arc::default()) });
                continue;
            }
            let opened = above.find_map(|around| around.ring.as_ref()).map(|ring| unlock_by_parent(&header, ring));
            let opened = match opened {
                Some(Ok(keys)) => Ok(keys),
                Some(Err(_)) | None => policy.try_slots_in(&header, &mut attempt, None),
            };
            let is_destroyed = matches!(opened, Err(Error::Key(KeyError::Destroyed(_))));
            let ring = opened.ok().and_then(|keys| keys.key_ring(header.suite()).ok());
            let looked = ring.as_ref().map(|ring| is_interrupted(&place.below(&stored)?.path(), ring, &header));
            match looked {
                Some(Ok(true)) => return refused(self.dir.join(&stored)),
                Some(Ok(false)) => {}
                // What it has can never be completed, wherever it is.
                None if is_destroyed => {}
                Some(Err(Error::Vault(VaultError::Damaged { .. }))) | None => unknown.push(header.id()),
                Some(Err(error)) => return Err(error).at(&self.dir.join(&stored)),
            }
            let has_any = header.has_datasets() && header.is_anchored();
            let look = || {
                let (_, table) = look(policy, &header.id(), quiet).ok()?;
                datasets_among(&table, &ids).ok().map(Arc::new)
            };
            let has = if has_any { looks.entry(header.id()).or_insert_with(look).clone() } else { None };
            known.insert(stored, Around { ring, has });
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
    use crate::policy::Surroundings;
    use crate::{options, testing};
    use lamassu_anchor::row::{Content, Sealed};
    use lamassu_anchor::table::MemoryTable;
    use lamassu_anchor::{Anchor, Digest, EntryPlace, ObjectId, Row, Token, TokenKey, VaultRow};
    use lamassu_crypto::{Secret, SecretBytes, wrap};
    use lamassu_format::header::{Destroyed, NameMode, SLOTS_MAX, TokenMechanism, TokenSealed};
    use lamassu_format::{Domain, Geometry, Suite, name};
    use lamassu_keys::destroy::Destruction;
    use lamassu_keys::history::EventKind;
    use lamassu_keys::{
        Event, Material, NewDataset, NewSlot, SlotKind, SourceError, Update, cost, create_dataset, header_file, unlock,
    };
    use lamassu_vault::{Access, Owner, ROOT, Vault};
    use std::ffi::OsStr;
    use std::fs;
    use std::sync::atomic::{AtomicUsize, Ordering};

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

    /// Nobody has it open.
    struct Still;

    impl Quiet for Still {
        fn is_frozen(&self) -> bool {
            false
        }

        fn end(self) -> Result<()> {
            Ok(())
        }
    }

    fn looked(original: &Original, policy: &Policy, anchor: Option<&dyn Table>) -> Result<Vec<VaultId>> {
        original.refuse_interrupted(policy, (&original.header, &original.keys), anchor, &Still)
    }

    /// A vault that may have datasets, its header and its keys.
    fn vault(top: &Path) -> (VaultHeader, Unlocked) {
        fs::create_dir(top).unwrap();
        testing::vault(top);
        let mut header: VaultHeader = header_file::read(&top.join(name::HEADER)).unwrap();
        let keys = unlock(&header, &testing::key()).unwrap();
        keys.allow_datasets(&mut header).unwrap();
        (header, keys)
    }

    /// An anchor in which these datasets lie.
    fn anchor_with(header: &VaultHeader, datasets: &[VaultId]) -> Arc<MemoryTable> {
        let table = Arc::new(MemoryTable::default());
        let row = |content| Row { mode: 0o700, uid: 0, gid: 0, links: 1, content, attributes: Sealed::Nothing };
        let dir = |record, name| Content::Dir { record, parent: ObjectId::ROOT, name };
        let vault = VaultRow::new(header.id(), TokenKey::new([2; 32]));
        let anchor = Anchor::create(table.clone(), vault, row(dir(Sealed::Nothing, Token([0; 16])))).unwrap();
        for (number, id) in datasets.iter().enumerate() {
            let name = Token([number as u8 + 1; 16]);
            let record = Sealed::Is(Digest(wrap::sha256(&[&[5][..], &id.0].concat())));
            anchor.make(EntryPlace { dir: ObjectId::ROOT, name }, row(dir(record, name))).unwrap();
        }
        anchor.commit(anchor.mark()).unwrap();
        table
    }

    #[test]
    fn a_dataset_that_the_anchor_does_not_have_is_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("v");
        let (header, keys) = vault(&top);
        let strange = Material::new(SlotKind::Raw, SecretBytes::new(vec![8; 32])).unwrap();
        let of = (&header, &keys);
        let [unknown, forged] = ["unknown", "forged"].map(|name| Dataset::make(top.join(name), of, Some(&strange)));
        let own = Dataset::make(top.join("own"), of, Some(&testing::key()));
        let within = Dataset::make(top.join("forged/within"), of, Some(&testing::key()));
        for dataset in [&own, &within] {
            dataset.put(&dataset.records().0);
        }
        let original = Original::new(top.clone(), header.clone(), keys, testing::key());
        let look = |has: &[&Dataset]| {
            let has: Vec<_> = has.iter().map(|dataset| dataset.1.id()).collect();
            looked(&original, &Policy::default(), Some(&*anchor_with(&header, &has)))
        };
        assert_eq!(look(&[]).unwrap(), []);
        assert_eq!(look(&[&unknown, &within]).unwrap(), [unknown.1.id()], "what lies in one that is passed over");
        for (has, met) in [(&forged, &within), (&own, &own)] {
            let refused = look(&[has]).unwrap_err();
            assert!(matches!(refused, Error::SnapshotOfInterrupted { within, .. } if within == met.0));
        }
    }

    /// A token that opens nothing, and counts how often it was asked.
    struct Counting(Arc<AtomicUsize>);

    impl lamassu_keys::source::Token for Counting {
        fn seal(&self, _: &Secret<32>) -> std::result::Result<TokenSealed, SourceError> {
            Ok(TokenSealed { mechanism: TokenMechanism::AesGcm, sealed: vec![1; 60], signature: None })
        }

        fn unseal(&self, _: &TokenSealed) -> std::result::Result<Option<Secret<32>>, SourceError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(None)
        }
    }

    /// Told to stop at a look, counted from 0.
    struct Stopped(AtomicUsize);

    impl Surroundings for Stopped {
        fn writer_of(&self, _: &Path) -> Option<PathBuf> {
            None
        }

        fn is_interrupted(&self) -> bool {
            self.0.fetch_sub(1, Ordering::Relaxed) == 0
        }

        fn has_network(&self) -> bool {
            true
        }

        fn go_through(&self) {}
    }

    #[test]
    fn headers_without_limit_get_the_work_of_one_attempt() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("v");
        let (header, keys) = vault(&top);
        let asked = Arc::new(AtomicUsize::new(0));
        let token = || Material::Token(Box::new(Counting(asked.clone())));
        let first = Dataset::make(top.join("0"), (&header, &keys), Some(&token()));
        let all = SLOTS_MAX + 9;
        for number in 1..all {
            let copy = top.join(number.to_string());
            fs::create_dir(&copy).unwrap();
            fs::copy(first.0.join(name::HEADER), copy.join(name::HEADER)).unwrap();
        }
        asked.store(0, Ordering::Relaxed);
        let original = Original::new(top, header, keys, token());
        assert_eq!(looked(&original, &Policy::default(), None).unwrap(), vec![first.1.id(); all]);
        assert_eq!(asked.swap(0, Ordering::Relaxed), SLOTS_MAX);
        let stopped = Policy::default().within(Arc::new(Stopped(AtomicUsize::new(5))));
        assert!(matches!(looked(&original, &stopped, None), Err(Error::Interrupted)));
        assert_eq!(asked.load(Ordering::Relaxed), 5);
    }

    #[test]
    fn nothing_is_said_of_a_dataset_whose_keys_were_destroyed() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("v");
        let (header, keys) = vault(&top);
        let own = Dataset::make(top.join("own"), (&header, &keys), Some(&testing::key()));
        let place = own.0.join(name::HEADER);
        let own_keys = unlock(&own.1, &testing::key()).unwrap();
        let original = Original::new(top.clone(), header, keys, testing::key());
        let destroyed = Destroyed { time: 1, receipt: [1; 16] };
        let destruction = Destruction::begin(&place, &lamassu_keys::nobody()).unwrap();
        destruction.commit(&own_keys, destroyed, &Event::new(EventKind::KeyDestroyed)).unwrap();
        assert_eq!(looked(&original, &Policy::default(), None).unwrap(), []);
    }

    #[test]
    fn interrupted_sessions_of_datasets_are_met_where_a_key_is_at_hand() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("v");
        let (header, keys) = vault(&top);
        let strange = Material::new(SlotKind::Raw, SecretBytes::new(vec![8; 32])).unwrap();
        let a = Dataset::make(top.join("a"), (&header, &keys), None);
        let inner_keys = unlock_by_parent(&a.1, &keys.key_ring(header.suite()).unwrap()).unwrap();
        let within = Dataset::make(top.join("a/b"), (&a.1, &inner_keys), None);
        let own = Dataset::make(top.join("own"), (&header, &keys), Some(&testing::key()));
        let unknown = Dataset::make(top.join("unknown"), (&header, &keys), Some(&strange));
        let original = Original::new(top.clone(), header, keys, testing::key());
        let look = || looked(&original, &Policy::default(), None);
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
