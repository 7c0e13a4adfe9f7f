//! Open files without a name, where hosts take turns: a program goes on with the file that it has removed.
use crate::common;

use common::anchored::{mv, rm};
use common::turns::{Host, Lab};
use common::*;
use lamassu_anchor::VaultRow;
use lamassu_anchor::table::{Space, Table};
use lamassu_store::backend::RenameMode;
use lamassu_store::backend::fault::{Call, Fault};
use lamassu_vault::*;
use std::ffi::OsStr;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What the other host does meanwhile: it gets the numbers that this one has not recorded.
fn elsewhere(lab: &Lab, other: &mut Host, name: &str) {
    let v = lab.turn(other, 1, true);
    v.put(name, &vec![7; 300_000]);
    lab.end(other, v);
}

fn read(v: &Vault, handle: HandleId, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let got = v.read(handle, 0, &mut bytes)?;
    bytes.truncate(got);
    Ok(bytes)
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Goes {
    /// Made and removed in one turn.
    AtOnce,
    /// Removed in a later turn, in which its handle was used.
    Used,
    /// The same, and it was not used.
    Unused,
    /// Replaced in a later turn, in which its handle was not used.
    Replaced,
    /// Removed in a later turn, in which another handle was used, and closed.
    OfTwoHandles,
    /// Two names of it are removed in a later turn, in which its handle was not used.
    OfTwoNames,
}

#[test]
fn an_open_file_without_a_name_outlives_turns() {
    for goes in [Goes::AtOnce, Goes::Used, Goes::Unused, Goes::Replaced, Goes::OfTwoHandles, Goes::OfTwoNames] {
        for len in [10, 5_000, 3_000_000] {
            goes_on(goes, len);
        }
    }
}

fn goes_on(goes: Goes, len: usize) {
    let lab = Lab::new();
    let (mut a, mut b) = (Host::default(), Host::default());
    let mut v = lab.turn(&mut a, 1, true);
    let (entry, handle) = v.create(ROOT, n("f"), 0o644, RW, me()).unwrap();
    let mut content = vec![1; len];
    v.write(handle, 0, &content).unwrap();
    let other = v.open_file(entry.attr.ino, RW).unwrap();
    if goes == Goes::OfTwoNames {
        v.link(entry.attr.ino, ROOT, n("second")).unwrap();
    }
    if goes != Goes::AtOnce {
        lab.end(&mut a, v);
        elsewhere(&lab, &mut b, "x");
        v = lab.turn(&mut a, 1, true);
    }
    match goes {
        Goes::AtOnce | Goes::Unused | Goes::OfTwoNames => {}
        Goes::OfTwoHandles => {
            content[0] = 3;
            v.write(other, 0, &[3]).unwrap();
        }
        Goes::Used => assert!(read(&v, handle, len).unwrap() == content),
        Goes::Replaced => v.put("new", b"new"),
    }
    match goes {
        Goes::Replaced => mv(&v, "new", "f", RenameMode::Replace).unwrap(),
        Goes::OfTwoNames => ["second", "f"].iter().for_each(|name| rm(&v, name).unwrap()),
        Goes::AtOnce | Goes::Used | Goes::Unused | Goes::OfTwoHandles => rm(&v, "f").unwrap(),
    }
    v.release(other).unwrap();
    if goes == Goes::OfTwoHandles {
        assert!(read(&v, handle, len).unwrap() == content);
    }
    for round in 0..3_u8 {
        lab.end(&mut a, v);
        elsewhere(&lab, &mut b, &format!("y{round}"));
        v = lab.look(&mut a);
        let attr = v.getattr(entry.attr.ino, None).unwrap();
        assert_eq!((attr.nlink, attr.size), (0, content.len() as u64), "{goes:?}, {len}");
        assert!(read(&v, handle, content.len()).unwrap() == content, "{goes:?}, {len}, {round}");
        lab.end(&mut a, v);
        v = lab.turn(&mut a, 1, true);
        let attr = v.getattr(entry.attr.ino, None).unwrap();
        assert_eq!((attr.nlink, attr.size), (0, content.len() as u64), "{goes:?}, {len}");
        assert!(read(&v, handle, content.len()).unwrap() == content, "{goes:?}, {len}, {round}");
        assert!(matches!(v.link(entry.attr.ino, ROOT, n("again")), Err(VaultError::Stale)));
        content[len / 2] = round;
        content.extend_from_slice(&[round; 9_000]);
        v.write(handle, len as u64 / 2, &[round]).unwrap();
        v.write(handle, content.len() as u64 - 9_000, &[round; 9_000]).unwrap();
        if round == 1 {
            v.fsync(handle, false).unwrap();
        }
        assert!(read(&v, handle, content.len()).unwrap() == content);
        if goes == Goes::Replaced {
            assert_eq!(v.get("f"), b"new");
        } else {
            assert!(v.find("f").is_err());
        }
    }
    v.release(handle).unwrap();
    v.forget(entry.attr.ino, 1);
    lab.end(&mut a, v);
    // Nothing is left of it.
    let v = lab.opened(&[1]);
    v.clean();
    v.close().unwrap();
    assert_eq!(deleted_below(lab.dir.path()), 0);
}

/// How many descriptors this process has of files below a directory that have no name.
fn deleted_below(dir: &Path) -> usize {
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    let targets = all.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
    targets.filter(|to| to.starts_with(dir) && to.to_string_lossy().ends_with("(deleted)")).count()
}

/// The only file of the store that is longer than a page.
fn stored(dir: &Path) -> Option<std::path::PathBuf> {
    std::fs::read_dir(dir).unwrap().find_map(|entry| {
        let (path, meta) = (entry.as_ref().unwrap().path(), entry.as_ref().unwrap().metadata().unwrap());
        match meta.is_dir() {
            true => stored(&path),
            false => Some(path).filter(|_| meta.size() > 50_000),
        }
    })
}

#[test]
fn the_store_cannot_exchange_it_between_two_turns() {
    let lab = Lab::new();
    let (mut a, mut b) = (Host::default(), Host::default());
    let v = lab.turn(&mut a, 1, true);
    let (_, handle) = v.create(ROOT, n("f"), 0o644, RW, me()).unwrap();
    v.write(handle, 0, &[1; 100_000]).unwrap();
    v.sync_all().unwrap();
    let path = stored(lab.dir.path()).unwrap();
    let (older, file) = (std::fs::read(&path).unwrap(), std::fs::File::options().write(true).open(&path).unwrap());
    rm(&v, "f").unwrap();
    v.write(handle, 0, &[2; 100_000]).unwrap();
    lab.end(&mut a, v);
    elsewhere(&lab, &mut b, "x");
    file.write_all_at(&older, 0).unwrap();
    let v = lab.turn(&mut a, 1, true);
    read(&v, handle, 100_000).unwrap_err();
    v.release(handle).unwrap();
    lab.end(&mut a, v);
}

#[test]
fn it_is_gone_with_a_lost_turn_and_closed_when_it_is_forgotten_between_turns() {
    let lab = Lab::new();
    let (mut a, mut b) = (Host::default(), Host::default());
    let v = lab.turn(&mut a, 1, true);
    let [kept, lost] = ["kept", "lost"].map(|name| {
        let (entry, handle) = v.create(ROOT, n(name), 0o644, RW, me()).unwrap();
        v.write(handle, 0, name.as_bytes()).unwrap();
        (entry.attr.ino, handle)
    });
    rm(&v, "kept").unwrap();
    lab.end(&mut a, v);
    assert_eq!(deleted_below(lab.dir.path()), 1);
    let left = a.left.as_mut().unwrap();
    left.release(kept.1).unwrap();
    left.forget(kept.0, 1);
    assert_eq!(deleted_below(lab.dir.path()), 0);
    elsewhere(&lab, &mut b, "x");
    let v = lab.turn(&mut a, 1, true);
    assert_eq!(read(&v, lost.1, 10).unwrap(), b"lost");
    rm(&v, "lost").unwrap();
    lab.table.has_ended.store(true, Ordering::SeqCst);
    let (left, done) = v.leave();
    done.unwrap_err();
    (a.left, a.seen) = (Some(left), lab.table.commits.lock().len());
    let v = lab.turn(&mut a, 1, false);
    // The removal was lost with the turn. The file has its name, and the handle is of no file.
    assert!(matches!(read(&v, lost.1, 10), Err(VaultError::Stale)));
    assert_eq!(v.get("lost"), b"lost");
    v.release(lost.1).unwrap();
    lab.end(&mut a, v);
}

#[test]
fn it_outlives_a_turn_in_which_something_else_is_lost() {
    let lab = Lab::new();
    let (mut a, mut b) = (Host::default(), Host::default());
    let v = lab.turn(&mut a, 1, true);
    let (_, handle) = v.create(ROOT, n("temporary"), 0o644, RW, me()).unwrap();
    v.write(handle, 0, b"temporary").unwrap();
    rm(&v, "temporary").unwrap();
    lab.end(&mut a, v);
    elsewhere(&lab, &mut b, "x");
    let v = lab.turn(&mut a, 1, true);
    let (_, other) = v.create(ROOT, n("other"), 0o644, RW, me()).unwrap();
    v.write(other, 0, b"other").unwrap();
    lab.table.has_ended.store(true, Ordering::SeqCst);
    let (left, done) = v.leave();
    done.unwrap_err();
    (a.left, a.seen) = (Some(left), lab.table.commits.lock().len());
    elsewhere(&lab, &mut b, "y");
    let v = lab.turn(&mut a, 1, false);
    assert_eq!(read(&v, handle, 20).unwrap(), b"temporary");
    v.release(handle).unwrap();
    v.release(other).unwrap_or_default();
    lab.end(&mut a, v);
}

/// A user whose file cannot be committed ends no other user's files.
#[test]
fn it_outlives_a_turn_in_which_another_file_cannot_be_written() {
    const FAR: u64 = 1 << 20;
    let lab = Lab::new();
    let (mut a, mut b) = (Host::default(), Host::default());
    let mut v = lab.turn(&mut a, 1, true);
    let make = |v: &Vault, name: &str| {
        let (_, handle) = v.create(ROOT, n(name), 0o644, RW, me()).unwrap();
        v.write(handle, 0, name.as_bytes()).unwrap();
        handle
    };
    let earlier = ["removed", "replaced", "unused", "written in vain"].map(|name| make(&v, name));
    lab.end(&mut a, v);
    elsewhere(&lab, &mut b, "x");
    v = lab.turn(&mut a, 1, true);
    let [at_once, full] = ["at once", "full"].map(|name| make(&v, name));
    assert_eq!(read(&v, earlier[0], 20).unwrap(), b"removed");
    ["removed", "unused", "written in vain", "at once"].iter().for_each(|name| rm(&v, name).unwrap());
    v.put("new", b"new");
    mv(&v, "new", "replaced", RenameMode::Replace).unwrap();
    // The quota of the user who writes these is exceeded.
    lab.backend.faults().rule(|call| {
        let is_refused = call.call == Call::Write && call.offset >= FAR;
        is_refused.then_some(Fault::Errno(libc::EDQUOT))
    });
    for handle in [full, earlier[3]] {
        v.write(handle, 2 * FAR, &[1; 100_000]).unwrap();
    }
    let (left, done) = v.leave();
    done.unwrap_err();
    lab.backend.faults().clear_rules();
    (a.left, a.seen) = (Some(left), lab.table.commits.lock().len());
    elsewhere(&lab, &mut b, "y");
    v = lab.turn(&mut a, 1, true);
    for (handle, content) in
        [(at_once, "at once"), (earlier[0], "removed"), (earlier[1], "replaced"), (earlier[2], "unused")]
    {
        v.fsync(handle, false).unwrap();
        assert_eq!(read(&v, handle, 20).unwrap(), content.as_bytes());
        v.write(handle, 0, b"again").unwrap();
        v.release(handle).unwrap();
    }
    assert!(matches!(read(&v, earlier[3], 20), Err(VaultError::Stale)));
    v.fsync(full, false).unwrap_err();
    assert_eq!(v.get("replaced"), b"new");
    [full, earlier[3]].into_iter().for_each(|handle| v.release(handle).unwrap());
    lab.end(&mut a, v);
    let v = lab.opened(&[1]);
    v.clean();
    v.close().unwrap();
}

/// Tree records of files that the kernel forgets between two turns are not removed while the next one begins, nor in
/// one that only looks, but in the background, a part at a time.
#[test]
fn what_files_that_were_closed_between_turns_have_left_is_removed_in_the_background() {
    const FILES: usize = 200;
    const AT_ONCE: usize = 64;
    let lab = Lab::new();
    let mut a = Host::default();
    let v = lab.turn(&mut a, 1, true);
    let made: Vec<_> = (0..FILES)
        .map(|number| {
            let (entry, handle) = v.create(ROOT, n(&format!("f{number}")), 0o644, RW, me()).unwrap();
            rm(&v, &format!("f{number}")).unwrap();
            (entry.attr.ino, handle)
        })
        .collect();
    lab.end(&mut a, v);
    // Half of them between two turns, half while a turn begins or in one.
    let (between, during) = made.split_at(FILES / 2);
    for (ino, handle) in between {
        let left = a.left.as_mut().unwrap();
        left.release(*handle).unwrap();
        left.forget(*ino, 1);
    }
    for number in 0..=255 {
        std::fs::create_dir_all(lab.dir.path().join(format!("lamassu.tree/{number:02x}"))).unwrap();
    }
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    lab.backend.faults().rule(move |call| {
        let is_record =
            |name: &OsStr| name.len() == 16 && name.to_string_lossy().bytes().all(|b| b.is_ascii_hexdigit());
        if call.call == Call::Unlink && call.name.is_some_and(is_record) {
            count.fetch_add(1, Ordering::SeqCst);
        }
        None
    });
    let asked = || asked.load(Ordering::SeqCst);
    let forget = |v: &Vault, (ino, handle): (Ino, HandleId)| {
        v.release(handle).unwrap();
        v.forget(ino, 1);
    };
    let v = lab.look(&mut a);
    during[..10].iter().for_each(|file| forget(&v, *file));
    v.work_off().unwrap();
    lab.end(&mut a, v);
    assert_eq!(asked(), 0, "in a turn that only looks");
    let v = lab.turn(&mut a, 1, true);
    during[10..].iter().for_each(|file| forget(&v, *file));
    assert_eq!(asked(), 0, "while a turn begins");
    v.work_off().unwrap();
    assert_eq!(asked(), AT_ONCE);
    lab.end(&mut a, v);
    assert_eq!(asked(), AT_ONCE, "while a turn ends");
    let v = lab.turn(&mut a, 1, true);
    for _ in 0..FILES {
        v.work_off().unwrap();
    }
    assert_eq!(asked(), FILES);
    lab.end(&mut a, v);
}

/// A number that was lost with its turn is another host's. That one's tree records stay.
#[test]
fn tree_records_of_a_number_that_another_host_has_are_left_alone() {
    let lab = Lab::new();
    let (mut a, mut b) = (Host::default(), Host::default());
    let mut v = lab.turn(&mut a, 1, true);
    // The first change is committed with the note that the vault is in use.
    v.put("first", b"first");
    let next = || VaultRow::decode(&lab.table.get(Space::Vault, b"vault").unwrap().unwrap()).unwrap().next_object.0;
    let number = next();
    let (lost, handle) = v.create(ROOT, n("lost"), 0o644, RW, me()).unwrap();
    v.release(handle).unwrap();
    rm(&v, "lost").unwrap();
    v.forget(lost.attr.ino, 1);
    lab.table.has_ended.store(true, Ordering::SeqCst);
    let (left, done) = v.leave();
    done.unwrap_err();
    (a.left, a.seen) = (Some(left), lab.table.commits.lock().len());
    lab.table.has_ended.store(false, Ordering::SeqCst);
    assert_eq!(next(), number, "no commit has recorded it");
    let other = lab.turn(&mut b, 1, true);
    other.put("theirs", b"theirs");
    lab.end(&mut b, other);
    assert_eq!(next(), number + 1);
    let dir = lab.dir.path().join(format!("lamassu.tree/{:02x}", number & 0xff));
    std::fs::create_dir_all(&dir).unwrap();
    let records = dir.join(format!("{number:016x}"));
    std::fs::write(&records, b"").unwrap();
    v = lab.turn(&mut a, 1, false);
    v.work_off().unwrap();
    lab.end(&mut a, v);
    assert!(records.exists());
}

/// Whoever opens a handle again waits for names; whoever removes a name does not wait for that.
#[test]
fn handles_that_are_opened_again_and_removals_and_renames_do_not_wait_for_each_other() {
    for _ in 0..20 {
        let lab = Lab::new();
        let (mut a, mut b) = (Host::default(), Host::default());
        let v = lab.turn(&mut a, 1, true);
        let handles: Vec<HandleId> = (0..40)
            .map(|number| {
                let (_, handle) = v.create(ROOT, n(&format!("open{number}")), 0o644, RW, me()).unwrap();
                handle
            })
            .collect();
        for number in 0..40 {
            v.put(&format!("f{number}"), b"f");
        }
        lab.end(&mut a, v);
        elsewhere(&lab, &mut b, "x");
        let v = lab.turn(&mut a, 1, true);
        std::thread::scope(|scope| {
            let (v, handles) = (&v, &handles);
            scope.spawn(move || handles.iter().for_each(|handle| drop(read(v, *handle, 1).unwrap())));
            scope.spawn(move || (0..20).for_each(|number| rm(v, &format!("f{number}")).unwrap()));
            scope.spawn(move || {
                for number in 20..40 {
                    mv(v, &format!("f{number}"), &format!("g{number}"), RenameMode::NoReplace).unwrap();
                }
            });
        });
        handles.iter().for_each(|handle| v.release(*handle).unwrap());
        lab.end(&mut a, v);
    }
}
