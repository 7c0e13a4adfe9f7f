use super::*;
use crate::control::protocol::{Caller, DatasetSpec, Ended, Properties};
use crate::testing::{anchored, key, served, served_under, vault};
use lamassu_crypto::SecretBytes;
use lamassu_format::header::{Header, HistoryHead, HistoryMark};
use lamassu_keys::{Material, NewSlot, SlotKind, Update, cost, unlock};
use lamassu_vault::FileSystem;
use lamassu_vault::forest::member_of;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::Barrier;
use std::thread;

const DATASETS: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

/// Every first opening of a dataset meets the re-keying that seals its parent slot anew.
#[test]
fn a_dataset_opens_while_its_parent_slot_is_sealed_anew() {
    const ROUNDS: usize = 3;
    let dir = tempfile::tempdir().unwrap();
    let (place, policy) = anchored(dir.path());
    let caller = Caller { uid: 0, gid: 0, groups: vec![0], is_owner: true };
    let first = served_under(policy.clone(), &place);
    for name in DATASETS {
        let spec = DatasetSpec {
            inherit: true,
            label: String::new(),
            domain: None,
            suite: None,
            block_size: None,
            compress: None,
            compress_round: None,
            names: None,
            properties: Properties::default(),
            mode: 0o700,
        };
        first.create_dataset(&caller, lamassu_vault::ROOT, OsStr::new(name), &spec, None).unwrap();
    }
    first.forest().close().unwrap();
    drop(first);
    for round in 0..ROUNDS {
        let served = served_under(policy.clone(), &place);
        served.rotate(&caller, ROOT_MEMBER, lamassu_keys::Tier::Outer, false, None).unwrap();
        let together = Barrier::new(DATASETS.len() + 1);
        let open = |name: &str| {
            let ino = served.forest().resolve(OsStr::new(name)).unwrap().attr.ino;
            let dir = served.keeper().dir(member_of(ino)).unwrap();
            let inode = || dir.join(name::HEADER).metadata().unwrap().ino();
            let old = inode();
            together.wait();
            while !dir.join(name::HEADER_NEW).exists() && inode() == old {
                thread::yield_now();
            }
            served.forest().at(ino).map(drop)
        };
        thread::scope(|scope| {
            let openings = DATASETS.map(|name| scope.spawn(move || open(name)));
            together.wait();
            let job = served.rekey(ROOT_MEMBER, (false, None), 0).unwrap();
            let job = served.job(job).unwrap();
            for opening in openings {
                opening.join().unwrap().unwrap_or_else(|error| panic!("round {round}: {error}"));
            }
            let ended = std::iter::repeat_with(|| job.progress().ended).find_map(|ended| ended).unwrap();
            assert!(matches!(&ended, Ended::Done(done) if done.failed == 0 && done.complete), "{ended:?}");
        });
        served.forest().close().unwrap();
    }
    let served = served_under(policy, &place);
    for name in DATASETS {
        let ino = served.forest().resolve(OsStr::new(name)).unwrap().attr.ino;
        served.forest().at(ino).unwrap();
    }
    served.forest().close().unwrap();
}

/// Between the moment when a header is read and the opening another process may change it. Whom the newest one lets
/// in is let in.
#[test]
fn what_is_opened_is_the_header_that_took_the_place_of_the_one_that_was_read() {
    let dir = tempfile::tempdir().unwrap();
    let (place, policy) = anchored(dir.path());
    let file = place.join(name::HEADER);
    let keys = |header: &VaultHeader| unlock(header, &key()).unwrap();
    let change = |change: &dyn Fn(&Unlocked, &mut VaultHeader)| {
        let update = Update::begin(&file, &policy.witness()).unwrap();
        let mut header: VaultHeader = update.read().unwrap();
        let keys = keys(&header);
        change(&keys, &mut header);
        update.record(&mut header, &keys, &[Event::new(EventKind::SlotAdded)]).unwrap();
    };
    let keeper = Keeper::new(Place::of(&place).unwrap(), crate::options(false), true, None, policy.clone());
    let read: VaultHeader = header_file::read(&file).unwrap();
    let material = Material::new(SlotKind::Raw, SecretBytes::new(vec![8; 32])).unwrap();
    let slot = NewSlot { material: &material, cost: cost::FALLBACK, label: "", created: 1 };
    change(&|keys, header| assert_eq!(keys.add_slot(header, &slot).unwrap(), 2));
    let opening = keeper.opening(ROOT_MEMBER, None, read.clone(), keys(&read)).unwrap();
    assert_eq!(opening.header.keys().slots.len(), 2);
    drop(opening);
    keeper.unloading(ROOT_MEMBER);
    change(&|keys, header| drop(keys.remove_slot(header, keys.slot()).unwrap()));
    let refused = keeper.opening(ROOT_MEMBER, None, read.clone(), keys(&read)).map(drop).unwrap_err();
    assert!(anchors::is_older_header(&refused), "{refused}");
}

/// Between the moment when a header is verified and the first entry the store has time to cut the history off, and
/// to say in the header that it never went further.
#[test]
fn nothing_is_chained_to_a_history_that_was_cut_off_while_the_vault_was_being_mounted() {
    for attacked in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let first = vault(dir.path());
        let served = served(dir.path());
        let (place, log) = (dir.path().join(name::HEADER), dir.path().join(name::HISTORY));
        if attacked {
            let kept = fs::read(&log).unwrap()[..first].to_vec();
            let mut header: VaultHeader = lamassu_keys::header_file::read(&place).unwrap();
            header.keys_mut().history =
                Some(HistoryMark { count: 1, head: HistoryHead(lamassu_crypto::wrap::sha256(&kept)) });
            fs::write(&place, header.to_json().unwrap()).unwrap();
            fs::write(&log, kept).unwrap();
        }
        let before = fs::read(&log).unwrap();
        served.keeper().mounted();
        served.forest().close().unwrap();
        let after = fs::read(&log).unwrap();
        assert!(after.starts_with(&before));
        assert_eq!(after.len() > before.len(), !attacked, "the mount and its end are written down");
    }
}

#[test]
fn the_end_of_a_mount_is_written_down_where_its_directory_lies_by_then() {
    let above = tempfile::tempdir().unwrap();
    let (dir, away) = (above.path().join("v"), above.path().join("away"));
    fs::create_dir(&dir).unwrap();
    vault(&dir);
    let served = served(&dir);
    served.keeper().mounted();
    let before = fs::metadata(dir.join(name::HISTORY)).unwrap().len();
    fs::rename(&dir, &away).unwrap();
    fs::create_dir(&dir).unwrap();
    served.forest().close().unwrap();
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "the other directory is left alone");
    assert!(fs::metadata(away.join(name::HISTORY)).unwrap().len() > before);
}

#[test]
fn keys_are_not_kept_for_a_directory_that_came_to_the_path() {
    let above = tempfile::tempdir().unwrap();
    let dir = above.path().join("v");
    fs::create_dir(&dir).unwrap();
    vault(&dir);
    let served = served(&dir);
    let store = backend(&dir).unwrap();
    served.keeper().require_store(&store).unwrap();
    fs::rename(&dir, above.path().join("away")).unwrap();
    fs::create_dir(&dir).unwrap();
    served.keeper().require_store(&store).unwrap();
    let refused = served.keeper().require_store(&backend(&dir).unwrap()).unwrap_err();
    assert!(matches!(refused, Error::Backing { .. }), "{refused}");
}
