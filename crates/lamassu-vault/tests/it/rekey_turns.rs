//! Re-keying in turns of a vault that several hosts use: it is interrupted anywhere, others move entries past it, keys
//! are rotated and sessions lost meanwhile, and when it says that it is complete, nothing needs an older key.
mod interrupted;

use crate::common;

use common::turns::{Host, Lab, Served};
use common::*;
use lamassu_vault::*;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

impl Lab {
    /// Opens with the newest epoch alone.
    fn has_all_under(&self, newest: u8, expected: &BTreeMap<String, Vec<u8>>) {
        let vault = self.opened(&[newest]);
        vault.clean();
        for (name, content) in expected {
            let found = DIRS.iter().find_map(|dir| {
                let path = format!("{dir}/{name}");
                let entry = vault.find(&path).ok()?;
                Some(match entry.attr.kind {
                    Kind::Symlink => vault.readlink(entry.attr.ino).unwrap(),
                    _ => vault.get(&path),
                })
            });
            assert!(found.as_ref() == Some(content), "{name}");
        }
        vault.close().unwrap();
    }
}

const DIRS: [&str; 6] = ["p", "q", "q/r", "s", "s/t", "u"];
const PER_DIR: usize = 4;

/// Files, and links with a long target, by name; each in one of the directories.
fn furnish(v: &Vault) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for dir in DIRS {
        v.dir(dir);
    }
    for (at, dir) in DIRS.iter().enumerate() {
        for number in 0..PER_DIR {
            let (name, content) = (format!("f{at}-{number}"), vec![at as u8 * 16 + number as u8; 9_000]);
            v.put(&format!("{dir}/{name}"), &content);
            all.insert(name, content);
        }
        let (name, target) = (format!("l{at}"), format!("{at}").repeat(2000));
        v.symlink(v.ino(dir), n(&name), target.as_bytes(), me()).unwrap();
        all.insert(name, target.into_bytes());
    }
    v.sync_all().unwrap();
    all
}

/// Moves all that is in one directory to the next one. From each turn to the next, so that much of it passes the walk.
fn shift(v: &Vault, all: &BTreeMap<String, Vec<u8>>, by: usize) {
    let at = |name: &String| DIRS.iter().position(|dir| v.find(&format!("{dir}/{name}")).is_ok()).unwrap();
    for name in all.keys() {
        let from = at(name);
        let to = v.ino(DIRS[(from + by) % DIRS.len()]);
        v.rename(v.ino(DIRS[from]), n(name), to, n(name), RenameMode::NoReplace).unwrap();
    }
}

/// Interrupts after so many steps.
struct Steps(AtomicU64);

impl Steps {
    fn of(steps: u64) -> Steps {
        Steps(AtomicU64::new(steps))
    }
}

impl RekeyProgress for Steps {
    fn dataset(&self, stored: &std::path::Path) -> Result<()> {
        panic!("{stored:?}: these vaults have none")
    }
    fn passed_over(&self, _: &str, _: &lamassu_format::profile::ProfileError) {}
    fn total(&self, _: u64) {}
    fn advance(&self, _: u64) {
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| Some(left.saturating_sub(1))).unwrap();
    }
    fn failed(&self, stored: &str, error: &VaultError) {
        panic!("{stored}: {error}");
    }
    fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::SeqCst) == 0
    }
}

fn go_on(vault: &Vault, walk: &mut Walk, steps: u64) -> Result<bool> {
    vault.rekey_in_turn((Rekey::Full, None), (walk, &Steps::of(steps)))
}

/// After each turn, and some of them fail, `meanwhile` gets the number of the turn. Returns how many there were.
fn rekeyed(lab: &Lab, newest: u8, steps: u64, mut meanwhile: impl FnMut(usize)) -> usize {
    let (mut walk, mut host) = (Walk::default(), Host::default());
    for turn in 1.. {
        let vault = lab.turn(&mut host, newest, true);
        let is_done = go_on(&vault, &mut walk, steps).unwrap();
        lab.end(&mut host, vault);
        if is_done {
            assert!(walk.done().complete && walk.done().failed == 0, "{:?}", walk.done());
            return turn;
        }
        assert!(turn < 2_000);
        meanwhile(turn);
    }
    unreachable!()
}

#[test]
fn what_another_host_moves_between_turns_is_not_missed() {
    for steps in [1, 3, 10] {
        let lab = Lab::new();
        let vault = lab.opened(&[1]);
        let all = furnish(&vault);
        vault.close().unwrap();
        let mut other = Host::default();
        let turns = rekeyed(&lab, 2, steps, |turn| {
            let vault = lab.turn(&mut other, 2, true);
            shift(&vault, &all, [1, 5, 2][turn % 3]);
            if turn % 4 == 0 {
                // A directory with all that is in it.
                let (from, to) = if vault.find("s/t").is_ok() { ("s", "p") } else { ("p", "s") };
                vault.rename(vault.ino(from), n("t"), vault.ino(to), n("t"), RenameMode::NoReplace).unwrap();
                vault.rename(vault.ino(to), n("t"), vault.ino(from), n("t"), RenameMode::NoReplace).unwrap();
            }
            lab.end(&mut other, vault);
        });
        assert!(turns > 3, "{turns}");
        lab.has_all_under(2, &all);
    }
}

/// The names of one link, found and put into place in different turns.
#[test]
fn a_link_whose_names_another_host_moves_keeps_all_of_them() {
    for steps in 1..12 {
        let lab = Lab::new();
        let vault = lab.opened(&[1]);
        for dir in DIRS {
            vault.dir(dir);
        }
        let target = "t".repeat(3000);
        vault.symlink(vault.ino("p"), n("l"), target.as_bytes(), me()).unwrap();
        for (dir, name) in [("q", "l"), ("s", "l"), ("u", "l")] {
            vault.link(vault.ino("p/l"), vault.ino(dir), n(name)).unwrap();
        }
        vault.close().unwrap();
        let (mut other, mut moves) = (Host::default(), 0);
        rekeyed(&lab, 2, steps, |turn| {
            let vault = lab.turn(&mut other, 2, true);
            let (from, to) = if vault.find("p/l").is_ok() { ("p", "q/r") } else { ("q/r", "p") };
            vault.rename(vault.ino(from), n("l"), vault.ino(to), n("l"), RenameMode::NoReplace).unwrap();
            if turn == 2 {
                vault.link(vault.ino("s/l"), vault.ino("s/t"), n("l")).unwrap();
            }
            moves += 1;
            lab.end(&mut other, vault);
        });
        let vault = lab.opened(&[2]);
        vault.clean();
        let names = DIRS.iter().filter(|dir| vault.find(&format!("{dir}/l")).is_ok()).count();
        assert_eq!(names, if moves >= 2 { 5 } else { 4 }, "{steps}");
        for dir in DIRS.iter().filter(|dir| vault.find(&format!("{dir}/l")).is_ok()) {
            assert_eq!(vault.readlink(vault.ino(&format!("{dir}/l"))).unwrap(), target.as_bytes());
        }
        vault.close().unwrap();
    }
}

#[test]
fn keys_that_are_rotated_in_the_middle_are_those_of_all_at_the_end() {
    let lab = Lab::new();
    let vault = lab.opened(&[1]);
    let all = furnish(&vault);
    vault.close().unwrap();
    let (mut walk, mut host) = (Walk::default(), Host::default());
    for turn in 0.. {
        // Two turns with each epoch, and the rest with the last one.
        let vault = lab.turn(&mut host, (2 + turn / 2).min(4), true);
        let is_done = go_on(&vault, &mut walk, 12).unwrap();
        lab.end(&mut host, vault);
        if is_done {
            break;
        }
    }
    assert!(walk.done().complete && walk.done().failed == 0);
    lab.has_all_under(4, &all);
}

/// The turn is lost with what it had not made durable, and what failed in it says nothing about the objects.
#[test]
fn it_goes_on_after_a_turn_that_was_lost() {
    for lost_after in [1, 4, 9, 20] {
        let lab = Lab::new();
        let vault = lab.opened(&[1]);
        let all = furnish(&vault);
        vault.close().unwrap();
        let (mut walk, mut host) = (Walk::default(), Host::default());
        let vault = lab.turn(&mut host, 2, true);
        assert!(!go_on(&vault, &mut walk, 5).unwrap());
        lab.end(&mut host, vault);
        let vault = lab.turn(&mut host, 2, true);
        let progress = Loses { steps: AtomicU64::new(lost_after), table: lab.table.clone() };
        vault.rekey_in_turn((Rekey::Full, None), (&mut walk, &progress)).unwrap_err();
        assert!(!walk.done().complete && walk.done().failed == 0, "{:?}", walk.done());
        let (left, done) = vault.leave();
        done.unwrap_err();
        lab.table.has_ended.store(false, Ordering::SeqCst);
        (host.left, host.seen) = (Some(left), lab.table.commits.lock().len());
        for _ in 0..1_000 {
            let vault = lab.turn(&mut host, 2, true);
            let is_done = go_on(&vault, &mut walk, 5).unwrap();
            lab.end(&mut host, vault);
            if is_done {
                break;
            }
        }
        assert!(walk.done().complete && walk.done().failed == 0, "{:?}", walk.done());
        lab.has_all_under(2, &all);
    }
}

/// The session ends after so many steps.
struct Loses {
    steps: AtomicU64,
    table: Arc<Served>,
}

impl RekeyProgress for Loses {
    fn dataset(&self, stored: &std::path::Path) -> Result<()> {
        panic!("{stored:?}: these vaults have none")
    }
    fn passed_over(&self, _: &str, _: &lamassu_format::profile::ProfileError) {}
    fn total(&self, _: u64) {}
    fn advance(&self, _: u64) {
        if self.steps.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.table.has_ended.store(true, Ordering::SeqCst);
        }
    }
    fn failed(&self, stored: &str, error: &VaultError) {
        panic!("{stored}: {error}");
    }
    fn is_cancelled(&self) -> bool {
        false
    }
}

#[test]
fn where_nobody_knows_what_was_moved_all_is_walked_again() {
    let lab = Lab::new();
    let vault = lab.opened(&[1]);
    let all = furnish(&vault);
    vault.close().unwrap();
    let (mut walk, mut host, mut other) = (Walk::default(), Host::default(), Host::default());
    let mut turns = 0;
    loop {
        let vault = lab.turn(&mut host, 2, turns != 2);
        let is_done = go_on(&vault, &mut walk, if turns < 3 { 12 } else { 1_000 }).unwrap();
        lab.end(&mut host, vault);
        if is_done {
            break;
        }
        turns += 1;
        if turns == 2 {
            let vault = lab.turn(&mut other, 2, true);
            shift(&vault, &all, 3);
            lab.end(&mut other, vault);
        }
    }
    assert!(walk.done().complete && turns > 2, "{turns}");
    lab.has_all_under(2, &all);
}

/// Copied blocks keep their keys, and a host that re-keys would not learn of them.
#[test]
fn blocks_under_an_older_key_are_not_copied_in_a_shared_vault() {
    let lab = Lab::new();
    let copied = |v: &Vault, name: &str| {
        let from = v.open_file(v.ino("from"), RO).unwrap();
        // The keys in the first page are not copied before it was read.
        assert_eq!(v.read(from, 0, &mut [0; 4096]).unwrap(), 4096);
        let to = v.new_file(name).1;
        let copied = v.copy_range((from, 0), (to, 0), 1_228_800).unwrap();
        [from, to].into_iter().for_each(|handle| v.release(handle).unwrap());
        copied
    };
    let vault = lab.opened(&[1]);
    vault.put("from", &[7; 1_228_800]);
    vault.close().unwrap();
    let vault = lab.opened(&[1]);
    assert_eq!(copied(&vault, "one"), Some(1_228_800));
    vault.close().unwrap();
    let vault = lab.opened(&[2, 1]);
    assert_eq!(copied(&vault, "two"), None);
    vault.close().unwrap();
}

/// Moves everything on at each step, in the vault that is being re-keyed itself.
struct Shifts<'a> {
    vault: &'a Vault,
    all: &'a BTreeMap<String, Vec<u8>>,
    left: AtomicU64,
}

impl RekeyProgress for Shifts<'_> {
    fn dataset(&self, stored: &std::path::Path) -> Result<()> {
        panic!("{stored:?}: these vaults have none")
    }
    fn passed_over(&self, _: &str, _: &lamassu_format::profile::ProfileError) {}
    fn total(&self, _: u64) {}
    fn advance(&self, _: u64) {
        let left = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| Some(left.saturating_sub(1)));
        if left != Ok(0) {
            shift(self.vault, self.all, 1 + left.unwrap() as usize % 5);
        }
    }
    fn failed(&self, stored: &str, error: &VaultError) {
        panic!("{stored}: {error}");
    }
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// Also where nobody else uses the vault, with and without an anchor. Nothing rests before everything is done.
#[test]
fn what_is_moved_all_the_time_is_not_missed() {
    for is_anchored in [false, true] {
        for left in [20, u64::MAX] {
            let recipe = if is_anchored { Recipe::default().anchored() } else { Recipe::default() };
            let (_dir, backend) = local_fast();
            let vault = recipe.make(&backend);
            let all = furnish(&vault);
            vault.ring().replace(&epochs(&[2, 1], 1), &epochs(&[2, 1], 2));
            let done = vault.rekey(Rekey::Full, None, &Shifts { vault: &vault, all: &all, left: AtomicU64::new(left) });
            let done = done.unwrap();
            assert!(done.complete && done.failed == 0, "{done:?}");
            vault.close().unwrap();
            let vault = recipe.open_with(&backend, &[2], &[2]);
            vault.clean();
            all.keys().for_each(|name| {
                assert!(DIRS.iter().any(|dir| vault.find(&format!("{dir}/{name}")).is_ok()), "{name}")
            });
            vault.close().unwrap();
        }
    }
}
