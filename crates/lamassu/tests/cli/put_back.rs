//! A store that puts an earlier header back while the vault is mounted.

use crate::datasets::{mounted, read, write};
use crate::support::Bench;
use std::fs;

const FILES: [&str; 2] = ["v/lamassu.vault", "v/lamassu.history"];

type Kept = [Vec<u8>; 2];

fn kept(b: &Bench) -> Kept {
    FILES.map(|file| fs::read(b.path(file)).unwrap())
}

/// The header alone, or the history with it.
fn put_back(b: &Bench, kept: &Kept, with_history: bool) {
    let files = if with_history { 2 } else { 1 };
    FILES.iter().zip(kept).take(files).for_each(|(file, bytes)| fs::write(b.path(file), bytes).unwrap());
}

fn slots(b: &Bench) -> usize {
    b.run("key list --json v").ok().json()["slots"].as_array().unwrap().len()
}

/// A mount on `m`, whose vault has a second slot, for the key `leaver`.
fn bench() -> Bench {
    // Without an anchor, which would see it first, and would keep the header from being restored while it is mounted.
    let b = mounted("--anchor none", "");
    b.key("leaver");
    b.key("new");
    b.run("key add --new-key raw:file:leaver --label leaver m").ok();
    b
}

/// What the daemon would write down from then on: every later header without the epochs that data lies under.
#[test]
fn epochs_that_were_put_back_are_not_forgotten() {
    for with_history in [false, true] {
        let b = bench();
        let before = kept(&b);
        b.run("key rotate --outer m").ok();
        b.run("key rotate --inner m").ok();
        write(&b, "m/one", b"one");
        b.run("key backup v newer").ok();
        put_back(&b, &before, with_history);
        b.run("key add --new-key raw:file:new m").code(23).says("older than the one").says("key restore");
        b.run("dataset create m/d").code(23).says("older than the one");
        b.run("key rotate --outer m").code(23);
        assert_eq!(kept(&b)[0], before[0], "nothing is written from it");
        write(&b, "m/two", b"two");
        b.run("key restore newer v").ok();
        b.unmount("m");
        b.run("mount v m").ok();
        assert_eq!((read(&b, "m/one"), read(&b, "m/two")), (b"one".to_vec(), b"two".to_vec()));
        b.run("key add --new-key raw:file:new m").ok();
        b.unmount("m");
        b.run("check v").ok();
    }
}

/// And whom it let in no more comes back with a fresh signature.
#[test]
fn a_removed_slot_that_was_put_back_is_not_signed_again() {
    for with_history in [false, true] {
        let b = bench();
        let before = kept(&b);
        b.run("key remove m 2").ok();
        let newest = kept(&b);
        put_back(&b, &before, with_history);
        b.run("key add --new-key raw:file:new m").code(23).says("older than the one");
        b.run("dataset create m/d").code(23);
        put_back(&b, &newest, true);
        b.run("key add --new-key raw:file:new m").ok();
        assert_eq!(slots(&b), 2);
        b.run("ls -k raw:file:leaver v").code(12);
        b.unmount("m");
    }
}

/// A history that begins anew is shorter, and no sign of an older header, where slots were made since.
#[test]
fn a_history_that_began_anew_keeps_nobody_from_changing_keys() {
    let b = bench();
    fs::remove_file(b.path("v/lamassu.history")).unwrap();
    b.run("key change --slot 2 --new-key raw:file:new m").ok();
    fs::remove_file(b.path("v/lamassu.history")).unwrap();
    b.run("key add --new-key raw:file:leaver v").ok();
    b.run("key remove m 3").ok();
    assert_eq!(slots(&b), 2);
    b.unmount("m");
}

/// What an earlier restore has kept may be the only good header.
#[test]
fn a_restore_that_is_refused_leaves_what_an_earlier_one_has_kept() {
    let b = mounted("", "");
    b.unmount("m");
    b.run("key backup v copy").ok();
    b.run("key restore copy v").ok();
    let kept = fs::read(b.path("v/lamassu.vault.replaced")).unwrap();
    b.run("mount v m").ok();
    assert_ne!(b.run("key restore copy v").code, 0);
    assert_eq!(fs::read(b.path("v/lamassu.vault.replaced")).unwrap(), kept);
    b.unmount("m");
    b.run("key restore copy v").ok();
    b.run("check v").ok();
}
