//! A store that was full has room again: after a removal, a close, a cut. The next call gets it, although the store
//! gives it back later than the user's call returns.

use crate::common;

use common::*;
use lamassu_store::Backend;
use lamassu_store::backend::fault::{Call, Fault};
use lamassu_store::backend::{FaultBackend, MemoryBackend};
use lamassu_vault::*;
use std::ffi::OsStr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What takes longer never comes.
const LONG: Duration = Duration::from_secs(60);

/// A store that is full for as long as the flag says so.
struct Store {
    fault: Arc<FaultBackend>,
    is_full: Arc<AtomicBool>,
    /// One for each call that it refused.
    refused: Mutex<Receiver<()>>,
    count: Arc<AtomicUsize>,
}

fn takes_space(call: Call) -> bool {
    use Call::{Allocate, CreateFile, Link, MakeDir, MakeNode, MakeSymlink, SetXattr, Write};
    matches!(call, Write | Allocate | CreateFile | Link | MakeDir | MakeNode | MakeSymlink | SetXattr)
}

impl Store {
    fn new() -> Store {
        let fault = Arc::new(FaultBackend::new(Arc::new(MemoryBackend::new())));
        let (is_full, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (tell, refused) = channel();
        let (full, counted) = (is_full.clone(), count.clone());
        fault.faults().rule(move |c| {
            let is_refused = takes_space(c.call) && full.load(Ordering::SeqCst);
            if is_refused {
                counted.fetch_add(1, Ordering::SeqCst);
                let _ = tell.send(());
            }
            is_refused.then_some(Fault::Errno(libc::ENOSPC))
        });
        Store { fault, is_full, refused: Mutex::new(refused), count }
    }

    fn backend(&self) -> Arc<dyn Backend> {
        self.fault.clone()
    }

    fn set_full(&self, is_full: bool) {
        self.is_full.store(is_full, Ordering::SeqCst);
    }

    fn wait_refused(&self, times: usize) {
        let refused = self.refused.lock().unwrap();
        (0..times).for_each(|_| refused.recv_timeout(LONG).unwrap());
    }

    /// It has room after the first call of this kind, of the entry if one is named.
    fn has_room_after(&self, call: Call, name: Option<&'static str>) {
        let full = self.is_full.clone();
        self.fault.faults().rule(move |c| {
            if c.call == call && name.is_none_or(|name| c.name == Some(OsStr::new(name))) {
                full.store(false, Ordering::SeqCst);
            }
            None
        });
    }
}

/// A vault with the settled file `fill`, and the directory `d`.
fn filled(recipe: &Recipe, store: &Store) -> Vault {
    let v = recipe.make(&store.backend());
    v.dir("d");
    v.put("fill", &[7; 100_000]);
    v.sync_all().unwrap();
    v
}

fn make(v: &Vault, dir: Ino) -> Result<()> {
    let (entry, handle) = v.create(dir, n("again"), 0o644, RW, me())?;
    v.release(handle)?;
    v.forget(entry.attr.ino, 1);
    Ok(())
}

fn is_full<T>(done: &Result<T>) -> bool {
    done.as_ref().is_err_and(|error| errno_of(error) == libc::ENOSPC)
}

/// The maintenance thread carries the removal out while a call is being refused.
#[test]
fn room_that_another_thread_gave_back_meanwhile_is_used() {
    let store = Store::new();
    let v = filled(&Recipe::default().anchored(), &store);
    let d = v.ino("d");
    v.unlink(ROOT, n("fill")).unwrap();
    let ((ask, asked), (answer, answered)) = (channel(), channel());
    let (full, answered) = (store.is_full.clone(), Mutex::new(answered));
    let once = AtomicBool::new(true);
    store.fault.faults().clear_rules();
    store.fault.faults().rule(move |c| {
        (c.call == Call::CreateFile && full.load(Ordering::SeqCst) && once.swap(false, Ordering::SeqCst)).then(|| {
            ask.send(()).unwrap();
            answered.lock().unwrap().recv().unwrap();
            Fault::Errno(libc::ENOSPC)
        })
    });
    store.set_full(true);
    std::thread::scope(|s| {
        let v = &v;
        s.spawn(move || {
            asked.recv_timeout(LONG).unwrap();
            v.sync_all().unwrap();
            answer.send(()).unwrap();
        });
        make(v, d).unwrap();
    });
    assert_eq!(v.list("d"), ["again"]);
}

/// The kernel tells of a close after close(2) has returned.
#[test]
fn room_that_comes_with_a_late_close_is_waited_for() {
    for (recipe, refusals) in [(Recipe::default().anchored(), 2), (Recipe::default(), 1)] {
        let store = Store::new();
        let v = filled(&recipe, &store);
        let d = v.ino("d");
        let handle = v.open_file(v.ino("fill"), RO).unwrap();
        v.unlink(ROOT, n("fill")).unwrap();
        store.set_full(true);
        std::thread::scope(|s| {
            s.spawn(|| {
                store.wait_refused(refusals);
                store.set_full(false);
                v.release(handle).unwrap();
            });
            make(&v, d).unwrap();
        });
        assert_eq!(v.list("d"), ["again"]);
        v.clean();
    }
}

/// It was removed long before: only close(2) says that it will be closed.
#[test]
fn a_close_of_a_file_that_was_removed_long_ago_is_waited_for() {
    let store = Store::new();
    let v = filled(&Recipe::default().anchored(), &store);
    let handle = v.open_file(v.ino("fill"), RO).unwrap();
    v.unlink(ROOT, n("fill")).unwrap();
    v.sync_all().unwrap();
    std::thread::sleep(Duration::from_millis(1_100));
    store.set_full(true);
    v.flush(handle).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| {
            store.wait_refused(1);
            store.set_full(false);
            v.release(handle).unwrap();
        });
        make(&v, ROOT).unwrap();
    });
    v.clean();
}

/// The file that rename(2) has replaced stays open until the kernel forgets it.
#[test]
fn room_of_a_replaced_file_is_waited_for() {
    for recipe in [Recipe::default().anchored(), Recipe::default()] {
        let store = Store::new();
        let v = filled(&recipe, &store);
        v.put("small", b"1");
        v.sync_all().unwrap();
        let fill = v.lookup(ROOT, n("fill")).unwrap().attr.ino;
        v.rename(ROOT, n("small"), ROOT, n("fill"), RenameMode::Replace).unwrap();
        store.set_full(true);
        std::thread::scope(|s| {
            s.spawn(|| {
                store.wait_refused(1);
                store.set_full(false);
                v.forget(fill, 1_000);
            });
            make(&v, ROOT).unwrap();
        });
    }
}

#[test]
fn a_removal_that_fails_does_not_hide_the_room_of_the_others() {
    let store = Store::new();
    let v = filled(&Recipe::plain().anchored(), &store);
    v.put("a stuck", b"1");
    v.sync_all().unwrap();
    v.unlink(ROOT, n("a stuck")).unwrap();
    v.unlink(ROOT, n("fill")).unwrap();
    store.has_room_after(Call::Unlink, Some("fill"));
    store
        .fault
        .faults()
        .rule(|c| (c.call == Call::Unlink && c.name == Some(OsStr::new("a stuck"))).then_some(Fault::Errno(libc::EIO)));
    store.set_full(true);
    make(&v, v.ino("d")).unwrap();
    store.fault.faults().clear_rules();
    v.clean();
}

/// Without the removal the write is refused for a second, without an attempt.
#[test]
fn a_refused_file_grows_as_soon_as_room_is_back() {
    for recipe in [Recipe::default().anchored(), Recipe::default()] {
        let store = Store::new();
        let v = filled(&recipe, &store);
        let (_, handle) = v.new_file("big");
        store.set_full(true);
        let mut at = 0;
        let refused = loop {
            match v.write(handle, at, &[3; 1 << 20]) {
                Ok(len) => at += len as u64,
                Err(error) => break Err::<(), _>(error),
            }
            assert!(at < 64 << 20, "nothing is refused");
        };
        assert!(is_full(&refused), "{refused:?}");
        store.set_full(false);
        v.unlink(ROOT, n("fill")).unwrap();
        v.write(handle, at, b"more").unwrap();
        v.release(handle).unwrap();
        v.clean();
    }
}

/// A file of one page gives back what was cut off when it is settled.
#[test]
fn room_of_a_file_that_was_emptied_comes_back_at_once() {
    let store = Store::new();
    let v = filled(&Recipe { codec: None, ..Recipe::default() }.anchored(), &store);
    let handle = v.open_file(v.ino("fill"), RW).unwrap();
    v.setattr(v.ino("fill"), Some(handle), &SetAttr { size: Some(5_000), ..SetAttr::default() }).unwrap();
    v.flush(handle).unwrap();
    store.has_room_after(Call::SetLen, None);
    store.set_full(true);
    make(&v, ROOT).unwrap();
    v.release(handle).unwrap();
    v.clean();
}

/// Each of them needs space, and gets that of a removed file.
#[test]
fn every_call_that_needs_space_gets_that_of_a_removed_file() {
    type Step = fn(&Vault, Ino, HandleId) -> Result<()>;
    let steps: [(&str, Step); 8] = [
        ("create", |v, _, _| make(v, ROOT)),
        ("mkdir", |v, _, _| v.mkdir(ROOT, n("new"), 0o755, me()).map(drop)),
        ("symlink", |v, _, _| v.symlink(ROOT, n("new"), b"target", me()).map(drop)),
        ("setxattr", |v, ino, _| v.set_xattr(ino, n("user.x"), b"1", SetXattr::Any)),
        ("write and flush", |v, _, h| v.write(h, 0, &[1; 50_000]).and_then(|_| v.flush(h))),
        ("fsync", |v, _, h| v.write(h, 0, &[1; 50_000]).and_then(|_| v.fsync(h, false))),
        ("fallocate", |v, _, h| v.fallocate(h, Fallocate::Reserve, 0, 50_000)),
        ("truncate", |v, ino, _| v.setattr(ino, None, &SetAttr { size: Some(5), ..SetAttr::default() }).map(drop)),
    ];
    for (name, step) in steps {
        let store = Store::new();
        let v = filled(&Recipe::default().anchored(), &store);
        v.put("other", &[5; 9_000]);
        v.sync_all().unwrap();
        let ino = v.ino("other");
        let handle = v.open_file(ino, RW).unwrap();
        v.unlink(ROOT, n("fill")).unwrap();
        store.has_room_after(Call::Unlink, None);
        store.set_full(true);
        let done = step(&v, ino, handle);
        assert!(done.is_ok(), "{name}: {done:?}");
        assert!(store.count.load(Ordering::SeqCst) > 0, "{name} was never refused");
        v.release(handle).unwrap();
        v.clean();
    }
}

/// A program may keep a removed file open, and the store may stay full.
#[test]
fn a_store_that_stays_full_is_not_asked_for_ever() {
    let store = Store::new();
    let v = filled(&Recipe::default().anchored(), &store);
    let handle = v.open_file(v.ino("fill"), RO).unwrap();
    v.unlink(ROOT, n("fill")).unwrap();
    store.set_full(true);
    let refused = make(&v, v.ino("d"));
    assert!(is_full(&refused), "{refused:?}");
    let first = store.count.load(Ordering::SeqCst);
    assert!(first <= 4, "{first} attempts");
    let refused = make(&v, v.ino("d"));
    assert!(is_full(&refused), "{refused:?}");
    assert_eq!(store.count.load(Ordering::SeqCst), first + 1, "nothing has changed since");
    store.set_full(false);
    v.release(handle).unwrap();
    v.clean();
}
