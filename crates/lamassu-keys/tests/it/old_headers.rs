//! The header that is replaced, in stores of each kind: on a disk, and behind sshfs, which shows each name of a file as
//! a file of its own.

use crate::history::{fill, raw, slot};
use lamassu_format::header::{Destroyed, Header, VaultHeader};
use lamassu_format::name;
use lamassu_keys::destroy::Destruction;
use lamassu_keys::history::EventKind;
use lamassu_keys::witness::{Replacement, Replacing, Witness, WitnessError};
use lamassu_keys::{Event, FileError, KeyError, Update, header_file, nobody, unlock};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

const SFTP_SERVER: &str = "/usr/lib/openssh/sftp-server";

/// A store, as the machine shows it on which it is, and as this one does.
struct Store {
    _dir: tempfile::TempDir,
    there: PathBuf,
    here: PathBuf,
}

impl Drop for Store {
    fn drop(&mut self) {
        if self.here != self.there {
            let _ = Command::new("umount").arg("-l").arg(&self.here).output();
        }
    }
}

impl Store {
    fn on_disk() -> Store {
        let dir = tempfile::tempdir().unwrap();
        let there = dir.path().canonicalize().unwrap();
        fill(&there);
        Store { here: there.clone(), there, _dir: dir }
    }

    /// `None`: not on this machine.
    fn behind_sshfs() -> Option<Store> {
        Store::served_by(SFTP_SERVER)
    }

    /// The machine below has no hard links, which an SFTP server calls a lack of permission.
    fn without_links() -> Option<Store> {
        let trace = "-qqq -f -o /dev/null -e trace=link,linkat -e inject=link,linkat:error=EPERM";
        let store = Store::served_by(&format!("strace {trace} {SFTP_SERVER}"))?;
        let refused = fs::hard_link(store.header(), store.here.join("link")).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
        Some(store)
    }

    fn served_by(server: &str) -> Option<Store> {
        if !Path::new(SFTP_SERVER).exists() || !rustix::process::geteuid().is_root() {
            eprintln!("not run: it takes root, sshfs and {SFTP_SERVER}");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let [there, here, ssh] = ["there", "here", "ssh"].map(at);
        fs::create_dir(&there).unwrap();
        fs::create_dir(&here).unwrap();
        fs::write(&ssh, format!("#!/bin/sh\nexec {server}\n")).unwrap();
        fs::set_permissions(&ssh, fs::Permissions::from_mode(0o700)).unwrap();
        let mut sshfs = Command::new("sshfs");
        sshfs.arg(format!("x:{}", there.display())).arg(&here);
        let options = format!("ssh_command={},dir_cache=no,attr_timeout=0,entry_timeout=0", ssh.display());
        let done = sshfs.args(["-o", &options]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        fill(&here);
        Some(Store { _dir: dir, there, here })
    }

    fn both() -> impl Iterator<Item = Store> {
        [Some(Store::on_disk()), Store::behind_sshfs()].into_iter().flatten()
    }

    fn header(&self) -> PathBuf {
        self.here.join(name::HEADER)
    }

    /// Gives the header in place another name, as a command does that is killed then.
    fn link(&self, name: &str) {
        fs::hard_link(self.there.join(name::HEADER), self.there.join(name)).unwrap();
    }

    /// What is in the store of old headers.
    fn left(&self) -> Vec<String> {
        let names = fs::read_dir(&self.there).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|found| found.starts_with("lamassu.vault.")).collect()
    }
}

/// Is asked before each step, and refuses from the nth on.
#[derive(Clone, Debug)]
struct Asked {
    header: PathBuf,
    last: usize,
    /// at each time: whether the header was open by its name
    is_open: Arc<Mutex<Vec<bool>>>,
}

impl Asked {
    fn witness(store: &Store, last: usize) -> (Arc<dyn Witness>, Arc<Mutex<Vec<bool>>>) {
        let is_open = Arc::default();
        (Arc::new(Asked { header: store.header(), last, is_open: Arc::clone(&is_open) }), is_open)
    }
}

impl Witness for Asked {
    fn replacing(&self, _: &Replacement<'_>) -> Result<Box<dyn Replacing>, WitnessError> {
        if self.last == 0 { Err("refused".into()) } else { Ok(Box::new(self.clone())) }
    }
}

impl Replacing for Asked {
    fn may_go_on(&self) -> Result<(), WitnessError> {
        let open = fs::read_dir("/proc/self/fd")?.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
        let is_open = open.into_iter().any(|place| place == self.header);
        let mut seen = self.is_open.lock().unwrap();
        seen.push(is_open);
        if seen.len() > self.last { Err("refused".into()) } else { Ok(()) }
    }

    fn replaced(self: Box<Self>) -> Result<(), WitnessError> {
        Ok(())
    }
}

fn add(store: &Store, witness: &Arc<dyn Witness>) -> Result<(), KeyError> {
    let update = Update::begin(&store.header(), witness).unwrap();
    let mut header: VaultHeader = update.read().unwrap();
    let keys = unlock(&header, &raw(1)).unwrap();
    keys.add_slot(&mut header, &slot(&raw(2), "second")).unwrap();
    update.record(&mut header, &keys, &[Event::new(EventKind::SlotAdded)])
}

fn destroy(store: &Store, witness: &Arc<dyn Witness>) -> Result<Destruction, KeyError> {
    let destruction = Destruction::begin(&store.header(), witness)?;
    let keys = unlock(destruction.header(), &raw(1)).unwrap();
    destruction.commit(&keys, Destroyed { time: 1, receipt: [1; 16] }, &Event::new(EventKind::KeyDestroyed))
}

/// libfuse and NFS would first rename an open file aside, and for a moment no name would lead to a header.
#[test]
fn the_old_header_is_not_open_by_the_name_that_it_loses() {
    for store in Store::both() {
        let (witness, is_open) = Asked::witness(&store, 99);
        add(&store, &witness).unwrap();
        let before_rename = is_open.lock().unwrap().last().copied();
        assert_eq!(before_rename, Some(false));
        let (witness, is_open) = Asked::witness(&store, 99);
        let destruction = destroy(&store, &witness).unwrap();
        let before_rename = is_open.lock().unwrap().last().copied();
        assert_eq!(before_rename, Some(false));
        assert!(destruction.opens().unwrap().is_some(), "what the old header opens can still be proven");
        let cleared = destruction.clear().unwrap();
        let erased: Vec<_> = cleared.erased.iter().map(|erased| (&erased.file[..], erased.bytes > 0)).collect();
        assert_eq!(erased, [(name::HEADER_REPLACING, true)]);
        assert_eq!(store.left(), [""; 0]);
    }
}

/// The first destruction was killed when the header had its second name; the second one fails before it replaces it.
#[test]
fn a_second_destruction_that_fails_leaves_the_header_whole() {
    for store in Store::both() {
        store.link(name::HEADER_REPLACING);
        let before = fs::read(store.there.join(name::HEADER)).unwrap();
        let old = File::open(store.there.join(name::HEADER)).unwrap();
        for last in 0..3 {
            let (witness, _) = Asked::witness(&store, last);
            destroy(&store, &witness).unwrap_err();
            assert_eq!(fs::read(store.there.join(name::HEADER)).unwrap(), before, "{last}");
        }
        let destruction = destroy(&store, &nobody()).unwrap();
        assert!(destruction.opens().unwrap().is_some());
        destruction.clear().unwrap();
        assert_eq!(store.left(), [""; 0]);
        let mut bytes = vec![0; before.len()];
        let len = old.read_at(&mut bytes, 0).unwrap();
        assert!(!bytes[..len].windows(5).any(|word| word == b"slots"));
    }
}

/// A restore of a destroyed vault was killed when it had given the header in place other names.
#[test]
fn other_names_of_a_destroyed_header_are_removed_and_it_is_not_overwritten() {
    for store in Store::both() {
        destroy(&store, &nobody()).unwrap().clear().unwrap();
        let before = fs::read(store.there.join(name::HEADER)).unwrap();
        store.link(name::HEADER_REPLACING);
        store.link(name::HEADER_REPLACED);
        Destruction::begin(&store.header(), &nobody()).unwrap().clear().unwrap();
        assert_eq!(fs::read(store.there.join(name::HEADER)).unwrap(), before);
        assert_eq!(store.left(), [""; 0]);
    }
}

/// The header that a restore has kept gives way to another one's only when that has the right to the store.
#[test]
fn a_restore_that_is_refused_leaves_what_was_kept_before() {
    for store in Store::both() {
        let (kept, header) = (store.here.join(name::HEADER_REPLACED), fs::read(store.header()).unwrap());
        fs::write(&kept, "kept").unwrap();
        let restore = |witness: &Arc<dyn Witness>| {
            let mut update = Update::begin(&store.header(), witness).unwrap().decided();
            let found: VaultHeader = update.read().unwrap();
            update.take_witness(&found).unwrap();
            let kept_as = update.keeping_replaced();
            update.replace(&found).map(|()| kept_as.get().cloned())
        };
        let (refusing, _) = Asked::witness(&store, 0);
        assert!(matches!(restore(&refusing), Err(FileError::Witness { .. })));
        assert_eq!((fs::read(&kept).unwrap(), fs::read(store.header()).unwrap()), (b"kept".to_vec(), header.clone()));
        assert_eq!(restore(&nobody()).unwrap(), Some(kept.clone()));
        assert_eq!(fs::read(&kept).unwrap(), header);
        assert_eq!(store.left(), [name::HEADER_REPLACED]);
    }
}

/// Where there are no hard links, a command that was killed can leave the header its second name alone.
#[test]
fn a_header_gets_its_name_back_where_nothing_has_it() {
    for store in Store::both() {
        let (header, kept) = (store.header(), store.here.join(name::HEADER_REPLACING));
        fs::rename(&header, &kept).unwrap();
        let update = Update::begin(&header, &nobody()).unwrap();
        update.put_back().unwrap();
        let found: VaultHeader = update.read().unwrap();
        assert!(found.destroyed().is_none());
        // Another header is not replaced.
        fs::write(&kept, "older").unwrap();
        update.put_back().unwrap();
        assert_eq!(
            (header_file::read::<VaultHeader>(&header).unwrap(), fs::read(&kept).unwrap()),
            (found, b"older".to_vec())
        );
    }
}

/// Where each name of a file shows a number of its own, none can be taken away by that: a change takes them all.
#[test]
fn a_change_leaves_no_name_that_a_failed_destruction_has_made() {
    for store in Store::both().chain(Store::without_links()) {
        let before = fs::read(store.header()).unwrap();
        for _ in 0..2 {
            let (witness, _) = Asked::witness(&store, 2);
            destroy(&store, &witness).unwrap_err();
            assert_eq!(fs::read(store.header()).unwrap(), before);
            assert_ne!(store.left(), [""; 0]);
        }
        add(&store, &nobody()).unwrap();
        assert_eq!(store.left(), [""; 0]);
        assert_eq!(header_file::read::<VaultHeader>(&store.header()).unwrap().keys().slots.len(), 2);
    }
}

#[test]
fn a_vault_is_destroyed_where_the_server_denies_hard_links() {
    let Some(store) = Store::without_links() else { return };
    let old = File::open(store.there.join(name::HEADER)).unwrap();
    let destruction = destroy(&store, &nobody()).unwrap();
    assert!(destruction.opens().unwrap().is_some());
    destruction.clear().unwrap();
    assert_eq!(store.left(), [""; 0]);
    let mut bytes = vec![0; 1 << 20];
    let len = old.read_at(&mut bytes, 0).unwrap();
    assert!(len > 0 && !bytes[..len].windows(5).any(|word| word == b"slots"));
}

/// Another old header cannot be removed: the one that was replaced is overwritten all the same, and its name tells the
/// next run that something is left.
#[test]
fn one_leftover_does_not_stop_the_end_of_the_others() {
    for store in Store::both() {
        let old = File::open(store.there.join(name::HEADER)).unwrap();
        let destruction = destroy(&store, &nobody()).unwrap();
        let stuck = store.there.join(name::HEADER_REPLACED);
        fs::write(&stuck, "stuck").unwrap();
        let chattr = |how| Command::new("chattr").arg(how).arg(&stuck).status().unwrap().success();
        if !chattr("+i") {
            eprintln!("not run: it takes root, and a file system with immutable files");
            return;
        }
        let failed = destruction.clear();
        assert!(chattr("-i"));
        failed.unwrap_err();
        let mut left = store.left();
        left.sort();
        assert_eq!(left, [name::HEADER_REPLACED, name::HEADER_REPLACING]);
        let mut bytes = vec![0; 1 << 20];
        let len = old.read_at(&mut bytes, 0).unwrap();
        assert!(len > 0 && !bytes[..len].windows(5).any(|word| word == b"slots"));
        let again = Destruction::begin(&store.header(), &nobody()).unwrap();
        assert!(!again.is_cleared().unwrap());
        again.clear().unwrap();
        assert_eq!(store.left(), [""; 0]);
        assert!(Destruction::begin(&store.header(), &nobody()).unwrap().is_cleared().unwrap());
    }
}
