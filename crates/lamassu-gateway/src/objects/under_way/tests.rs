//! Tests: no empty directory is left, and none is removed that may be a program's.

use super::*;
use crate::objects::attrs::{Attrs, Given};
use crate::objects::put::Staged;
use crate::objects::{Guard, Modes, ObjectError, Upload};
use lamassu_plain::PlainFs;
use lamassu_vault::{Overheard, Owner, VaultError};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};

const OWNER: Owner = Owner { uid: 0, gid: 0, umask: 0 };

/// Does something in front of a call of the file system.
type Hook = Box<dyn FnOnce(&Arc<Objects>) + Send>;

/// Objects in a directory, whose calls can be stopped at.
struct Lab {
    dir: tempfile::TempDir,
    objects: Arc<Objects>,
    /// the next one, and the name of the call that it comes before
    hook: Arc<Mutex<Option<(&'static str, Hook)>>>,
    /// how often a directory was read
    readings: Arc<AtomicUsize>,
}

impl Lab {
    fn new() -> Lab {
        let dir = tempfile::tempdir().expect("a directory");
        fs::create_dir(dir.path().join("b")).expect("makes");
        let (hook, readings) = (Arc::new(Mutex::<Option<(&'static str, Hook)>>::default()), Arc::default());
        let told = {
            let (hook, readings): (_, Arc<AtomicUsize>) = (hook.clone(), Arc::clone(&readings));
            let shown: Arc<OnceLock<Arc<Objects>>> = Arc::default();
            let told = shown.clone();
            let hear = move |name: &'static str| {
                if name == "each_name" {
                    readings.fetch_add(1, Ordering::Relaxed);
                }
                let hook = hook.lock().take_if(|(before, _)| *before == name);
                if let (Some((_, hook)), Some(objects)) = (hook, told.get()) {
                    hook(objects);
                }
            };
            (Box::new(hear), shown)
        };
        let fs = Overheard { inner: PlainFs::open(dir.path()).expect("opens"), told: told.0 };
        let objects = Objects::open(Arc::new(fs), "/", Modes { file: 0o600, dir: 0o700 }, 1 << 20).expect("opens");
        let objects = Arc::new(objects);
        assert!(told.1.set(objects.clone()).is_ok());
        Lab { dir, objects, hook, readings }
    }

    fn path(&self, text: &str) -> PathBuf {
        self.dir.path().join("b").join(text)
    }

    fn before(&self, call: &'static str, hook: impl FnOnce(&Arc<Objects>) + Send + 'static) {
        *self.hook.lock() = Some((call, Box::new(hook)));
    }

    fn is_heard(&self) -> bool {
        self.hook.lock().is_none()
    }
}

fn key(text: &str) -> Key {
    Key::parse(text).expect("a key")
}

fn stage(objects: &Arc<Objects>, text: &str) -> Staged {
    objects.stage("b", &key(text), OWNER).expect("begins")
}

fn put(objects: &Arc<Objects>, text: &str) {
    stage(objects, text).place(&Guard::None, &Attrs::default()).expect("places");
}

fn remove(objects: &Objects, text: &str) {
    objects.remove("b", &key(text), &Guard::None).expect("removes");
}

/// An upload; one that the store cannot keep, if it `fails`.
fn upload(text: &str, fails: bool) -> Upload {
    let metadata = [("m".to_owned(), "x".repeat(if fails { 70_000 } else { 1 }))].into();
    let (given, user) = (Given { metadata, ..Given::default() }, "u".to_owned());
    Upload { key: text.into(), given, begun: 0, user, algorithm: None, is_full: false }
}

fn begin_in_vain(objects: &Objects, text: &str) {
    let refused = objects.begin_upload("b", &upload(text, true), OWNER).expect_err("the store takes 64 KiB");
    assert!(matches!(refused, ObjectError::MuchMetadata), "{refused}");
}

/// It was not empty when an object was removed there, and a program has removed the rest.
#[test]
fn a_directory_that_a_program_has_emptied_is_the_programs() {
    let lab = Lab::new();
    fs::create_dir(lab.path("inbox")).expect("makes");
    ["inbox/old", "inbox/other"].into_iter().for_each(|text| put(&lab.objects, text));
    let long = stage(&lab.objects, "inbox/long");
    remove(&lab.objects, "inbox/old");
    fs::remove_file(lab.path("inbox/other")).expect("removes");
    drop(long);
    assert!(lab.path("inbox").exists());
    // The same without a program's: it is left to what is under way.
    put(&lab.objects, "inbox/old");
    let long = stage(&lab.objects, "inbox/long");
    remove(&lab.objects, "inbox/old");
    drop(long);
    assert!(!lab.path("inbox").exists());
}

/// Who fails first has found more of its directories than who fails last, and would have kept them.
#[test]
fn what_is_left_to_another_is_no_more_than_its_own() {
    let lab = Lab::new();
    fs::create_dir(lab.path("inbox")).expect("makes");
    let first = stage(&lab.objects, "inbox/y/1");
    first.make_parents().expect("makes");
    let second = stage(&lab.objects, "inbox/y/2");
    drop(first);
    assert!(lab.path("inbox/y").exists(), "the other is in it");
    drop(second);
    assert!(lab.path("inbox").exists() && !lab.path("inbox/y").exists());
    // Of two who leave it, the one that would have kept less counts, in whatever order.
    let dir = lab.objects.bucket("b").expect("is there");
    for order in [[1, 0], [0, 1]] {
        let files = UnderWay::default();
        files.begin(OsStr::new("file"), &dir);
        assert!(order.into_iter().all(|levels| files.leave(dir.ino(), levels)));
        assert_eq!(files.end(OsStr::new("file")), Some(0));
        assert!(!files.leave(dir.ino(), 0) && !files.is_in(dir.ino()));
    }
}

/// It has its name, and its directory is being synced. Meanwhile it is removed again, and the last other one fails.
#[test]
fn a_file_that_is_placed_is_in_nobodys_way() {
    let lab = Lab::new();
    put(&lab.objects, "x/1");
    let (placed, other) = (stage(&lab.objects, "x/a"), stage(&lab.objects, "x/b"));
    remove(&lab.objects, "x/1");
    lab.before("fsync_dir", move |objects| {
        remove(objects, "x/a");
        drop(other);
    });
    let _ = placed.place(&Guard::None, &Attrs::default());
    assert!(lab.is_heard() && !lab.path("x").exists());
}

/// Its directory had been left to what is under way there, and then it came.
#[test]
fn who_is_placed_takes_the_directory_over() {
    let lab = Lab::new();
    put(&lab.objects, "x/1");
    let (placed, other) = (stage(&lab.objects, "x/a"), stage(&lab.objects, "x/b"));
    remove(&lab.objects, "x/1");
    placed.place(&Guard::None, &Attrs::default()).expect("places");
    fs::remove_file(lab.path("x/a")).expect("a program removes it");
    drop(other);
    assert!(lab.path("x").exists());
}

/// The beginning of an upload makes directories as a put does, and fails when its own directory is in them. An object
/// is removed beside it.
#[test]
fn an_upload_that_cannot_begin_leaves_no_directory() {
    let lab = Lab::new();
    put(&lab.objects, "x/1");
    lab.before("set_xattr", |objects| remove(objects, "x/1"));
    begin_in_vain(&lab.objects, "x/u");
    assert!(lab.is_heard() && !lab.path("x").exists());
}

/// The same before its own directory is made: those that were there are gone, and it makes them again.
#[test]
fn an_upload_that_cannot_begin_leaves_none_that_it_has_made_again() {
    let lab = Lab::new();
    put(&lab.objects, "x/1");
    lab.before("mkdir", |objects| remove(objects, "x/1"));
    begin_in_vain(&lab.objects, "x/u");
    assert!(lab.is_heard() && !lab.path("x").exists());
}

/// The second finds what the first has made, and ends last.
#[test]
fn of_two_uploads_that_cannot_begin_the_last_one_leaves_no_directory() {
    let lab = Lab::new();
    let ((go_on, goes_on), (stand, stands), (tell, ends)) = (channel::<()>(), channel(), channel());
    lab.before("set_xattr", move |_| {
        stand.send(()).expect("it is waited for");
        let _ = goes_on.recv();
    });
    let first = lab.objects.clone();
    let first = std::thread::spawn(move || {
        begin_in_vain(&first, "x/1");
        tell.send(()).expect("it is waited for");
    });
    stands.recv().expect("it begins");
    lab.before("set_xattr", move |_| {
        drop(go_on);
        ends.recv().expect("it ends");
    });
    begin_in_vain(&lab.objects, "x/2");
    first.join().expect("no panic");
    assert!(lab.is_heard() && !lab.path("x").exists());
}

/// An upload that has begun looks after its directory itself.
#[test]
fn an_upload_under_way_keeps_its_directory() {
    let lab = Lab::new();
    put(&lab.objects, "x/1");
    let id = lab.objects.begin_upload("b", &upload("x/u", false), OWNER).expect("begins");
    let other = stage(&lab.objects, "x/2");
    remove(&lab.objects, "x/1");
    drop(other);
    assert!(lab.path("x").exists());
    let other = stage(&lab.objects, "x/2");
    lab.objects.abort_upload("b", &key("x/u"), &id).expect("aborts");
    assert!(lab.path("x").exists(), "it is left to the other");
    drop(other);
    assert!(!lab.path("x").exists());
}

/// A file system that is unmounted also where a test fails.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

fn fill(dir: &Path) {
    assert!((0..100).any(|at| fs::write(dir.join(format!("filled-{at}")), "").is_err()), "it is full");
}

/// It was registered in a directory that was left to it, and then its file could not be created.
#[test]
fn a_file_that_cannot_be_created_leaves_no_directory() {
    let lab = Lab::new();
    let bucket = lab.path("");
    let mut mount = std::process::Command::new("mount");
    let out = mount.args(["-t", "tmpfs", "-o", "size=1m,nr_inodes=12,mode=700", "none"]).arg(&bucket).output();
    if !out.is_ok_and(|out| out.status.success()) {
        eprintln!("NOTE: nothing can be mounted here: a file that cannot be created was NOT tested");
        return;
    }
    let _mounted = Mounted(bucket.clone());
    fs::create_dir(bucket.join("x")).and_then(|()| fs::write(bucket.join("x/old"), "")).expect("writes");
    let other = stage(&lab.objects, "x/other");
    lab.before("create", move |objects| {
        remove(objects, "x/old");
        drop(other);
        fill(&bucket);
    });
    let failed = lab.objects.stage("b", &key("x/file"), OWNER).err();
    assert!(matches!(failed, Some(ObjectError::Vault(VaultError::Io { .. }))), "{failed:?}");
    assert!(lab.is_heard() && !lab.path("x").exists());
}

/// Whatever is removed from a large directory while a file is under way there, it is not read each time.
#[test]
fn a_large_directory_is_read_a_few_times() {
    let lab = Lab::new();
    fs::create_dir(lab.path("x")).expect("makes");
    let names: Vec<_> = (0..600).map(|at| format!("x/{at:03}")).collect();
    names.iter().for_each(|name| fs::write(lab.path(name), "").expect("writes"));
    let long = stage(&lab.objects, "x/long");
    names.iter().for_each(|name| remove(&lab.objects, name));
    let readings = lab.readings.load(Ordering::Relaxed);
    assert!((1..60).contains(&readings), "{readings}");
    assert!(lab.path("x").exists());
    drop(long);
    assert!(!lab.path("x").exists());
}
