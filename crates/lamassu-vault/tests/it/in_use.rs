//! Whether the anchor says that a writer uses the vault, where it is not known which of two commits was made.

use crate::common;

use common::anchored::*;
use common::*;
use lamassu_anchor::VaultRow;
use lamassu_anchor::table::{Change, Space, Table};
use lamassu_store::backend::MemoryBackend;
use lamassu_vault::event::{Events, IntegrityEvent, IntegritySink};
use lamassu_vault::*;
use parking_lot::Mutex;
use std::sync::Arc;

#[derive(Default)]
struct Kept(Mutex<Vec<IntegrityEvent>>);

impl IntegritySink for Kept {
    fn deliver(&self, events: &[IntegrityEvent], _lost: u64) {
        self.0.lock().extend_from_slice(events);
    }
}

/// The next writer would take what this one has made last for something that the store has made up.
#[test]
fn an_end_of_use_in_doubt_is_taken_back_before_the_next_change() {
    let (store, table) = (Arc::new(MemoryBackend::new()), Arc::new(Doubtful::default()));
    let (lab, v) = Lab::over(Recipe::default(), store.clone(), table.clone());
    v.put("f", b"f");
    v.sync_all().unwrap();
    table.doubt(|change: &Change| {
        let row = change.value.as_ref().filter(|_| change.space == Space::Vault);
        row.is_some_and(|row| !VaultRow::decode(row).unwrap().is_in_use)
    });
    v.freeze().unwrap();
    assert!(table.may_be_in_doubt(), "the end of the use");
    v.thaw().unwrap();
    v.dir("d");
    std::mem::forget(v);
    let lab = Lab { backend: Arc::new(store.snapshot()), table: Arc::new(table.durable.clone()), ..lab };
    let kept = Arc::new(Kept::default());
    let events = Events::with_sink(kept.clone()).unwrap();
    let anchor = common::anchored::anchor(&lab.recipe, &lab.table);
    let options = Options { anchor: Some(anchor), events: events.clone(), ..options(false) };
    let v = Vault::open(lab.backend.clone(), &lab.recipe.header(), lab.recipe.ring(), options).unwrap();
    assert_eq!(listed(&v, ""), (vec!["f".to_owned()], false));
    events.end(std::time::Duration::from_secs(60));
    let kept = kept.0.lock();
    assert!(kept.len() == 1 && !kept[0].is_damage, "{kept:?}");
}
