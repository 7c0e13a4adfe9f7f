//! What a read finds and what `check` finds are events of one kind, with one sink.

use crate::common;

use common::anchored::{Lab, anchor, mv};
use common::{Quiet, RW, Recipe, Short, local, me, memory, n, options};
use lamassu_anchor::table::MemoryTable;
use lamassu_vault::event::{Events, FoundBy, IntegrityEvent, IntegritySink};
use lamassu_vault::{Access, Options, ROOT, RenameMode, SetAttr, Vault};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[derive(Default)]
struct Kept(Mutex<Vec<IntegrityEvent>>);

impl IntegritySink for Kept {
    fn deliver(&self, events: &[IntegrityEvent], _lost: u64) {
        self.0.lock().unwrap().extend_from_slice(events);
    }
}

#[test]
fn a_read_and_a_check_tell_the_same_sink() {
    let recipe = Recipe::default().anchored();
    let (dir, backend) = local();
    let vault = recipe.make(&backend);
    let (entry, handle) =
        vault.create(ROOT, n("secretname"), 0o600, Access { read: true, write: true, truncate: false }, me()).unwrap();
    vault.write(handle, 0, &[7; 20_000]).unwrap();
    vault.release(handle).unwrap();
    let stored = vault.stored_path(n("secretname")).unwrap();
    vault.close().unwrap();
    drop((vault, entry));
    let path = dir.path().join(&stored);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[3 * 4096] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    std::fs::write(dir.path().join("AAAA"), "").unwrap();

    let kept = Arc::new(Kept::default());
    let events = Events::with_sink(kept.clone()).unwrap();
    let options = Options { events: events.clone(), ..recipe.options(true) };
    let vault = Vault::open(backend, &recipe.header(), recipe.ring(), options).unwrap();
    let entry = vault.lookup(ROOT, n("secretname")).unwrap();
    let handle = vault.open_file(entry.attr.ino, Access { read: true, write: false, truncate: false }).unwrap();
    vault.read(handle, 2 * 4096, &mut [0; 4096]).unwrap_err();
    let report = vault.check(&[], false, &Quiet).unwrap();
    events.end(Duration::from_secs(60));

    let kept = kept.0.lock().unwrap();
    let of = |found_by| kept.iter().filter(move |e| e.found_by == found_by);
    let read: Vec<_> = of(FoundBy::Read).collect();
    assert_eq!(read.len(), 1, "{kept:?}");
    assert_eq!((read[0].what.word(), &*read[0].path), ("block-hash", stored.to_str().unwrap()));
    assert_eq!((read[0].range.unwrap().block, read[0].inode), (Some(2), Some(entry.attr.ino)));
    let checked: BTreeSet<_> = of(FoundBy::Check).map(|e| (e.what.word(), e.path.clone())).collect();
    let problems: BTreeSet<_> = report.problems.iter().map(|p| (&*p.kind, p.stored.clone())).collect();
    assert_eq!(checked, problems, "the same words and places");
    assert!(checked.iter().any(|(kind, _)| *kind == "foreign") && checked.len() >= 2);
    assert!(kept.iter().all(|e| e.vault.as_ref().is_some_and(|id| id.len() == 32) && !e.path.contains("secret")));
    let counts = events.counts();
    let count = |kind: &str| counts.found.iter().find(|count| count.kind == kind).map(|count| count.count);
    assert_eq!((count("block-hash"), count("foreign")), (Some(2), Some(1)), "once read, once checked: {counts:?}");
}

/// The kernel opens a file that it found by a name which another has by now; the one who had it open has just closed
/// it.
#[test]
fn what_this_process_has_left_of_a_file_without_a_name_is_no_interruption() {
    for is_anchored in [true, false] {
        let kept = Arc::new(Kept::default());
        let events = Events::with_sink(kept.clone()).unwrap();
        let recipe = Recipe::default();
        let (lab, vault) = Lab::over(recipe, memory(), Arc::new(MemoryTable::default()));
        vault.close().unwrap();
        drop(vault);
        let anchor = is_anchored.then(|| anchor(&recipe, &lab.table));
        let options = Options { events: events.clone(), anchor, ..options(false) };
        let vault = Vault::open(lab.backend, &recipe.header(), recipe.ring(), options).unwrap();
        vault.put("f", &[1; 900_000]);
        vault.put("g", &[2; 10]);
        vault.sync_all().unwrap();
        let found = vault.find("f").unwrap().attr.ino;
        let handle = vault.open_file(found, RW).unwrap();
        vault.setattr(found, Some(handle), &SetAttr { size: Some(5000), ..SetAttr::default() }).unwrap();
        vault.write(handle, 700_000, &[3; 6000]).unwrap();
        vault.flush(handle).unwrap();
        mv(&vault, "g", "f", RenameMode::Replace).unwrap();
        vault.release(handle).unwrap();
        let handle = vault.open_file(found, RW).unwrap();
        let mut bytes = vec![0; 706_001];
        assert_eq!(vault.read(handle, 0, &mut bytes).unwrap(), 706_000);
        assert!(bytes[4999] == 1 && bytes[5000] == 0 && bytes[705_999] == 3);
        vault.release(handle).unwrap();
        vault.close().unwrap();
        events.end(Duration::from_secs(60));
        assert!(kept.0.lock().unwrap().is_empty(), "anchored {is_anchored}: {:?}", kept.0.lock().unwrap());
    }
}
