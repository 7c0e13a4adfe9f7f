//! What a walk keeps when it is interrupted, and what an error of the store in the middle of it means.

use super::*;
use lamassu_format::Profile;
use lamassu_format::profile::{Choice, KeyKind, Protection};
use lamassu_store::backend::fault::{Call, Fault};

/// Keeps why objects failed; the second part: it would be reported as damage by the store.
#[derive(Default)]
struct Failures(Mutex<Vec<(String, bool)>>);

impl Failures {
    fn add(&self, error: &VaultError) {
        let is_finding = matches!(error, VaultError::Outdated { .. } | VaultError::Damaged { .. });
        self.0.lock().push((error.to_string(), is_finding));
    }
}

impl RekeyProgress for Failures {
    fn dataset(&self, stored: &std::path::Path) -> Result<()> {
        panic!("{stored:?}: these vaults have none")
    }
    fn passed_over(&self, _: &str, _: &lamassu_format::profile::ProfileError) {}
    fn total(&self, _: u64) {}
    fn advance(&self, _: u64) {}
    fn failed(&self, _: &str, error: &VaultError) {
        self.add(error);
    }
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// A store that fails while others' moves are looked at does not withhold anything.
#[test]
fn an_error_of_the_store_is_not_an_entry_that_is_missing() {
    let (mut looked, mut failed) = (0, 0);
    for (call, step) in [(Call::ReadDir, 1), (Call::OpenDir, 1), (Call::DirStat, 9)] {
        for nth in (1..).step_by(step) {
            let lab = Lab::new();
            let vault = lab.opened(&[1]);
            let all = furnish(&vault);
            if call == Call::ReadDir {
                vault.link(vault.ino("p/l0"), vault.ino("u"), n("second")).unwrap();
            }
            vault.close().unwrap();
            let (mut walk, mut host, mut other) = (Walk::default(), Host::default(), Host::default());
            let vault = lab.turn(&mut host, 2, true);
            assert!(!go_on(&vault, &mut walk, 12).unwrap());
            lab.end(&mut host, vault);
            let vault = lab.turn(&mut other, 2, true);
            shift(&vault, &all, 1);
            lab.end(&mut other, vault);

            let vault = lab.turn(&mut host, 2, true);
            let (faults, failures) = (lab.backend.faults(), Failures::default());
            let first = faults.calls(call) + nth;
            faults.rule(move |c| (c.call == call && c.nth >= first).then_some(Fault::Errno(libc::EIO)));
            let gone = vault.rekey_in_turn((Rekey::Full, None), (&mut walk, &failures));
            let is_reached = faults.calls(call) >= first;
            faults.clear_rules();
            gone.as_ref().err().into_iter().for_each(|error| failures.add(error));
            let failures = failures.0.into_inner();
            assert!(failures.iter().all(|(_, is_finding)| !is_finding), "{call:?} {nth}: {failures:?}");
            (looked, failed) = (looked + 1, failed + usize::from(!failures.is_empty()));
            lab.end(&mut host, vault);
            let vault = lab.turn(&mut host, 2, true);
            vault.check(&[], true, &Quiet).unwrap();
            assert!(go_on(&vault, &mut Walk::default(), 1_000_000).unwrap());
            lab.end(&mut host, vault);
            lab.has_all_under(2, &all);
            if !is_reached {
                break;
            }
        }
    }
    assert!(looked > 10 && failed > 5, "{looked} {failed}");
}

/// Hosts that want the vault after each step make a walk over a large directory no longer than it is.
#[test]
fn a_directory_is_listed_once_however_often_the_walk_is_interrupted_in_it() {
    let lab = Lab::new();
    let vault = lab.opened(&[1]);
    vault.dir("d");
    (0..60).for_each(|number| vault.put(&format!("d/f{number}"), b"content"));
    vault.close().unwrap();
    let (mut walk, mut host, mut turns, mut listings) = (Walk::default(), Host::default(), 0, 0);
    loop {
        let vault = lab.turn(&mut host, 2, true);
        let before = lab.backend.faults().calls(Call::ReadDir);
        let is_done = go_on(&vault, &mut walk, 1).unwrap();
        listings += lab.backend.faults().calls(Call::ReadDir) - before;
        lab.end(&mut host, vault);
        turns += 1;
        if is_done {
            break;
        }
    }
    assert!(walk.done().complete && walk.done().failed == 0, "{:?}", walk.done());
    assert!(turns > 50, "{turns}");
    // A session, of which each turn has one, lists the directory of its record.
    assert!((turns..turns + 8).contains(&listings), "{listings} in {turns} turns");
}

/// Nothing is noted for a change of profiles: a directory in which it was interrupted is listed again at its end.
#[test]
fn a_profile_reaches_what_comes_to_a_directory_in_which_its_change_was_interrupted() {
    for moved_in in 1..8 {
        let lab = Lab::new();
        let vault = lab.opened(&[1]);
        let suite = vault.ring().suite();
        (0..12).for_each(|number| vault.put(&format!("f{number}"), b"content"));
        vault.dir("q");
        vault.put("q/late", b"content");
        let profile = |v: &Vault, path: &str| v.profile(v.ino(path)).unwrap().profile;
        let (old, new) = (profile(&vault, "q/late"), Profile::new(Protection::Both, KeyKind::Random).unwrap());
        let [old, new_for_all] = [old, new].map(|profile| Choice::of_all(profile, suite));
        vault.set_profile(ROOT, new_for_all, true, &Steps::of(u64::MAX)).unwrap();
        vault.set_profile(vault.ino("q/late"), old, false, &Steps::of(u64::MAX)).unwrap();
        vault.close().unwrap();
        let (mut walk, mut host, mut other) = (Walk::default(), Host::default(), Host::default());
        for turn in 1.. {
            let vault = lab.turn(&mut host, 1, true);
            let is_done = vault.set_profile_in_turn(ROOT, new_for_all, true, (&mut walk, &Steps::of(1))).unwrap();
            lab.end(&mut host, vault);
            if is_done {
                assert!(walk.done().complete && turn > moved_in, "{turn}");
                break;
            }
            if turn == moved_in {
                let vault = lab.turn(&mut other, 1, true);
                vault.rename(vault.ino("q"), n("late"), ROOT, n("late"), RenameMode::NoReplace).unwrap();
                lab.end(&mut other, vault);
            }
        }
        let vault = lab.opened(&[1]);
        assert_eq!(profile(&vault, "late"), new, "{moved_in}");
        vault.close().unwrap();
    }
}

/// Its first part is under keys that were the newest when the walk was there.
#[test]
fn a_file_in_whose_middle_keys_were_rotated_is_begun_anew() {
    let mut cut = 0;
    for steps in 2..5 {
        let lab = Lab::new();
        let vault = lab.opened(&[1]);
        vault.dir("p");
        // One block in each of its pages, and more pages than a step has.
        let mut content = vec![0; (70 << 20) + 4096];
        let (_, handle) = vault.new_file("p/large");
        for at in (0..content.len()).step_by(128 << 10) {
            content[at..at + 4096].fill(7);
            vault.write(handle, at as u64, &[7; 4096]).unwrap();
        }
        vault.release(handle).unwrap();
        let all = BTreeMap::from([("large".to_owned(), content)]);
        vault.close().unwrap();
        let (mut walk, mut host) = (Walk::default(), Host::default());
        let vault = lab.turn(&mut host, 2, true);
        let is_done = go_on(&vault, &mut walk, steps).unwrap();
        cut += usize::from(!is_done && walk.done().blocks > 0);
        lab.end(&mut host, vault);
        let vault = lab.turn(&mut host, 3, true);
        assert!(go_on(&vault, &mut walk, 1_000).unwrap());
        lab.end(&mut host, vault);
        assert!(walk.done().complete && walk.done().failed == 0, "{:?}", walk.done());
        lab.has_all_under(3, &all);
    }
    assert!(cut > 0, "{cut}");
}
