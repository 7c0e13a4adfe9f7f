//! An anchor that refuses commits for long: calls that would lengthen the queue further fail, and nothing is lost.

use crate::common::anchored::Lab;
use crate::common::{Recipe, me, memory, n};
use lamassu_anchor::table::MemoryTable;
use lamassu_vault::*;
use std::sync::Arc;

#[test]
fn a_queue_has_an_end_and_all_of_it_is_committed_later() {
    let table = Arc::new(MemoryTable::default());
    let (lab, v) = Lab::over(Recipe::default(), memory(), table.clone());
    let old = v.mknod(ROOT, n("old"), Kind::Fifo, 0o600, 0, me()).unwrap();
    v.sync_all().unwrap();
    table.refuse(Some(libc::ENOSPC));
    let make = |number: usize| {
        let entry = v.mknod(ROOT, n(&number.to_string()), Kind::Fifo, 0o600, 0, me())?;
        v.forget(entry.attr.ino, 1);
        Ok(())
    };
    let (made, refused) = (0..).find_map(|number| make(number).err().map(|error| (number, error))).unwrap();
    let is_full = |error: &VaultError| assert_eq!(errno_of(error), libc::ENOSPC, "{error}");
    is_full(&refused);
    assert!((10_000..100_000).contains(&made), "{made}");
    is_full(&v.unlink(ROOT, n("old")).unwrap_err());
    is_full(&v.setattr(old.attr.ino, None, &SetAttr { mode: Some(0o640), ..SetAttr::default() }).unwrap_err());
    assert_eq!(v.lookup(ROOT, n("0")).unwrap().attr.kind, Kind::Fifo, "what was made is there");
    table.refuse(None);
    make(made).unwrap();
    v.unlink(ROOT, n("old")).unwrap();
    v.close().unwrap();
    let again = lab.open();
    let handle = again.open_dir(ROOT).unwrap();
    let mut shown = 0;
    again
        .read_dir(handle, 0, &mut |entry, _| {
            shown += usize::from(entry.kind == Kind::Fifo);
            true
        })
        .unwrap();
    assert_eq!(shown, made + 1);
}
