//! Snapshots and clones.

use crate::lab::{Lab, named, read};
use lamassu_format::Profile;
use lamassu_format::profile::{KeyKind, Protection};
use lamassu_vault::{Access, FileSystem, Owner};
use lamassu_volume::VolumeError;
use std::cell::Cell;
use std::ffi::OsStr;

const MIB: u64 = 1 << 20;

#[test]
fn copies_have_the_profile_of_their_volume_from_the_first_block_on() {
    let profiles = [
        (Protection::Both, KeyKind::Random),
        (Protection::Both, KeyKind::Convergent),
        (Protection::Integrity, KeyKind::Convergent),
    ];
    for has_anchor in [false, true] {
        let lab = Lab::new(has_anchor);
        for (n, (protection, keys)) in profiles.into_iter().enumerate() {
            let profile = Profile::new(protection, keys).unwrap();
            let (name, clone) = (format!("a{n}"), format!("b{n}"));
            let volume = lab.volume(&name, 4 * MIB);
            volume.write(MIB, &[7; 300_000], true).unwrap();
            drop(volume);
            lab.set_profile(&name, profile);
            let snapshot = lab.volumes().snapshot(&named(&name), "s", &|| true).unwrap();
            lab.volumes().clone_to(&snapshot, &named(&clone), &|| true).unwrap();
            for copy in [format!("{name}@s"), clone] {
                assert_eq!(lab.profile(&copy), profile, "{copy}");
                let volume = lab.open(&copy);
                assert_eq!(read(&volume, MIB, 300_000), [7; 300_000]);
                assert_eq!(read(&volume, 0, MIB as usize), vec![0; MIB as usize]);
            }
        }
        assert_eq!(lab.files().len(), 9);
    }
}

/// What the profile of the directory says is for new volumes alone.
#[test]
fn the_directory_s_profile_is_not_that_of_a_copy() {
    let lab = Lab::new(false);
    lab.volume("a", MIB).write(0, &[7; 8192], true).unwrap();
    let random = Profile::new(Protection::Both, KeyKind::Random).unwrap();
    lab.set_profile("", random);
    lab.volumes().snapshot(&named("a"), "s", &|| true).unwrap();
    assert_eq!(lab.profile("a@s"), Profile::DEFAULT);
    drop(lab.volume("b", MIB));
    assert_eq!(lab.profile("b"), random);
}

#[test]
fn a_copy_that_is_ended_leaves_nothing() {
    let lab = Lab::new(false);
    let size = 1024 * MIB;
    let volume = lab.volume("a", size);
    (0..4).for_each(|n| volume.write(n * 256 * MIB, &vec![n as u8; MIB as usize], true).unwrap());
    let asked = Cell::new(0);
    let until = |most: u32| {
        asked.set(0);
        let asked = &asked;
        move || {
            asked.set(asked.get() + 1);
            asked.get() <= most
        }
    };
    for most in [0, 3] {
        let ended = lab.volumes().snapshot(&named("a"), "s", &until(most));
        assert!(matches!(ended, Err(VolumeError::Interrupted)), "{ended:?}");
        assert_eq!(asked.get(), most + 1, "it ends at once");
        assert_eq!(lab.files(), ["a"]);
    }
    let ended = lab.volumes().clone_to(&named("a"), &named("b"), &until(2));
    assert!(matches!(ended, Err(VolumeError::Interrupted)));
    lab.volumes().clone_to(&named("a"), &named("b"), &until(1000)).unwrap();
    assert_eq!(read(&lab.open("b"), 768 * MIB, MIB as usize), vec![3; MIB as usize]);
    // A piece is bounded, however long a run of data is.
    let volume = lab.volume("c", 160 * MIB);
    (0..160).for_each(|n| volume.write(n * MIB, &vec![7; MIB as usize], false).unwrap());
    lab.volumes().clone_to(&named("c"), &named("d"), &until(1000)).unwrap();
    assert!(asked.get() >= 3, "{}", asked.get());
}

/// What a process that was killed leaves: the next change of any volume removes it.
#[test]
fn leftovers_of_killed_copies_go() {
    let lab = Lab::new(false);
    drop(lab.volume("a", MIB));
    let leave = |name: &str| {
        let access = Access { read: true, write: true, truncate: false };
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let owner = Owner { uid, gid, umask: 0 };
        let (entry, handle) = lab.forest().create(lab.directory(), OsStr::new(name), 0o600, access, owner).unwrap();
        lab.forest().release(handle).unwrap();
        lab.forest().forget(entry.attr.ino, 1);
    };
    leave(".new-b");
    leave(".new-a@s");
    assert_eq!(lab.volumes().list(&mut |name, odd| panic!("{name}: {odd}")).unwrap().len(), 1);
    drop(lab.volume("c", MIB));
    assert_eq!(lab.files(), ["a", "c"]);
    leave(".new-b");
    lab.volumes().destroy(&named("c"), false).unwrap();
    assert_eq!(lab.files(), ["a"]);
}
