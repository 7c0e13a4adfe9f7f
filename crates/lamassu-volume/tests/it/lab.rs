//! A vault with volumes, in a directory of this host.

use lamassu_crypto::SecretBytes;
use lamassu_format::header::NameMode;
use lamassu_format::{Domain, Geometry, Profile, Suite};
use lamassu_host::anchors::{Choice, NewTrees};
use lamassu_host::create::VaultPlace;
use lamassu_host::{Anchors, Found, Policy, Served, Unsealed, options};
use lamassu_keys::{Material, NewSlot, NewVault, SlotKind, Zone, cost, unlock};
use lamassu_vault::forest::ROOT_MEMBER;
use lamassu_vault::{FileSystem, Forest, Ino, ROOT};
use lamassu_volume::{BlockSize, DIRECTORY, Name, Volume, Volumes};
use std::ffi::OsStr;
use std::sync::Arc;

pub struct Lab {
    served: Arc<Served>,
    _dir: tempfile::TempDir,
}

impl Lab {
    pub fn new(has_anchor: bool) -> Lab {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("v");
        let choice = if has_anchor { Choice::Remembered } else { Choice::Unverified };
        let policy = Policy::default().anchored_by(Anchors::within(Some(dir.path().join("state"))).chosen(choice));
        let material = Material::new(SlotKind::Raw, SecretBytes::new(vec![7; 32])).unwrap();
        let new = NewVault {
            domain: Domain::Zone,
            suite: Suite::Aes,
            geometry: Geometry::new(4096, 8).unwrap(),
            names: NameMode::Encrypted,
            name_max: 255,
            convergent_small_files: true,
            compression: None,
            zone: Zone::Private,
            created: 1,
        };
        let slot = NewSlot { material: &material, cost: cost::FALLBACK, label: "", created: 1 };
        let (made, _) = VaultPlace::prepare(&place, 0o700).unwrap();
        made.fill(&policy, &new, &slot, NewTrees::default()).unwrap();
        let found = Found::at(&policy, &place).unwrap();
        let keys = unlock(&found.header, &material).unwrap();
        let served = Unsealed::new(found, keys, policy).open_forest(options(false)).unwrap();
        Lab { served, _dir: dir }
    }

    pub fn forest(&self) -> &Arc<Forest> {
        self.served.forest()
    }

    pub fn volumes(&self) -> Volumes {
        Volumes::of(self.forest())
    }

    /// Makes a volume, and opens it.
    pub fn volume(&self, name: &str, size: u64) -> Volume {
        self.volumes().create(&named(name), size, BlockSize::B512).unwrap();
        self.open(name)
    }

    pub fn open(&self, name: &str) -> Volume {
        self.volumes().open(&named(name), false).unwrap()
    }

    /// The directory of volumes.
    pub fn directory(&self) -> Ino {
        self.forest().lookup(ROOT, OsStr::new(DIRECTORY)).unwrap().attr.ino
    }

    /// A file in it; it itself if there is no name.
    fn file(&self, name: &str) -> Ino {
        if name.is_empty() {
            return self.directory();
        }
        self.forest().lookup(self.directory(), OsStr::new(name)).unwrap().attr.ino
    }

    /// The names of the files in it.
    pub fn files(&self) -> Vec<String> {
        let handle = self.forest().open_dir(self.directory()).unwrap();
        let mut found = Vec::new();
        let mut add = |entry: &lamassu_vault::DirEntry, _| {
            found.push(entry.name.to_str().unwrap().to_owned());
            true
        };
        self.forest().read_dir(handle, 0, &mut add).unwrap();
        self.forest().release_dir(handle).unwrap();
        found.retain(|name| name != "." && name != "..");
        found.sort_unstable();
        found
    }

    pub fn profile(&self, name: &str) -> Profile {
        let known = self.forest().vault(ROOT_MEMBER).unwrap().profile(self.file(name)).unwrap();
        assert!(!known.is_changing);
        known.profile
    }

    pub fn set_profile(&self, name: &str, profile: Profile) {
        let vault = self.forest().vault(ROOT_MEMBER).unwrap();
        let choice = lamassu_format::profile::Choice::of_all(profile, Suite::Aes);
        vault.set_profile(self.file(name), choice, false, &Quiet).unwrap();
        assert_eq!(self.profile(name), profile);
    }
}

pub fn named(name: &str) -> Name {
    name.parse().unwrap()
}

pub fn read(volume: &Volume, offset: u64, len: usize) -> Vec<u8> {
    let mut data = vec![0xff; len];
    volume.read(offset, &mut data).unwrap();
    data
}

struct Quiet;

impl lamassu_vault::RekeyProgress for Quiet {
    fn passed_over(&self, stored: &str, why: &lamassu_format::profile::ProfileError) {
        panic!("{stored}: {why}");
    }
    fn total(&self, _: u64) {}
    fn advance(&self, _: u64) {}
    fn failed(&self, stored: &str, error: &lamassu_vault::VaultError) {
        panic!("{stored}: {error}");
    }
    fn dataset(&self, stored: &std::path::Path) -> lamassu_vault::Result<()> {
        panic!("{stored:?}: this vault has none")
    }
    fn is_cancelled(&self) -> bool {
        false
    }
}
