//! Snapshots and clones.

use crate::lab::{Lab, named, read};
use lamassu_format::Profile;
use lamassu_format::profile::{KeyKind, Protection};

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
            let snapshot = lab.volumes().snapshot(&named(&name), "s").unwrap();
            lab.volumes().clone_to(&snapshot, &named(&clone)).unwrap();
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
    lab.volumes().snapshot(&named("a"), "s").unwrap();
    assert_eq!(lab.profile("a@s"), Profile::DEFAULT);
    drop(lab.volume("b", MIB));
    assert_eq!(lab.profile("b"), random);
}
