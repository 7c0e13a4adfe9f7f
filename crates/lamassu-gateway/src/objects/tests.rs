//! Tests: what is durable when a call returns, and what a store refuses.

use super::*;
use crate::limits::{Limits, Tenant, Turn};
use lamassu_plain::PlainFs;
use lamassu_vault::{Entry, Overheard};
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::mpsc;

const OWNER: Owner = Owner { uid: 0, gid: 0, umask: 0 };

impl Tree for Overheard<PlainFs> {
    fn at(&self, path: &OsStr) -> lamassu_vault::Result<Entry> {
        Tree::at(&self.inner, path)
    }
    fn changed(&self, _: Ino, _: &OsStr) {}
    fn each_name(&self, dir: Ino, each: &mut dyn FnMut(&OsStr, Kind)) -> lamassu_vault::Result<()> {
        (self.told)("each_name");
        Tree::each_name(&self.inner, dir, each)
    }
    fn has_space(&self, ino: Ino) -> bool {
        Tree::has_space(&self.inner, ino)
    }
    fn namespace(&self) -> &'static str {
        self.inner.namespace()
    }
}

/// Objects in a directory, and the names of the calls that they make: changes of attributes and directories, and syncs.
fn watched(dir: &Path) -> (Arc<Objects>, Arc<Mutex<Vec<&'static str>>>) {
    std::fs::create_dir(dir.join("b")).expect("makes");
    let calls = Arc::new(Mutex::new(Vec::new()));
    let told = calls.clone();
    let is_noted = |name: &str| ["set_xattr", "remove_xattr", "mkdir", "fsync", "fsync_dir"].contains(&name);
    let told = Box::new(move |name| {
        if is_noted(name) {
            told.lock().push(name)
        }
    });
    let fs = Overheard { inner: PlainFs::open(dir).expect("opens"), told };
    let modes = Modes { file: 0o600, dir: 0o700 };
    (Arc::new(Objects::open(Arc::new(fs), "/", modes, 1 << 20).expect("opens")), calls)
}

fn key(text: &str) -> Key {
    Key::parse(text).expect("a key")
}

fn make_directory(objects: &Arc<Objects>, text: &str, attrs: &Attrs) -> Result<()> {
    objects.begin_directory("b", &key(text), OWNER)?.place(&Guard::None, attrs).map(drop)
}

fn upload(text: &str) -> Upload {
    let (given, user) = (attrs::Given::default(), "u".to_owned());
    Upload { key: text.into(), given, begun: 0, user, algorithm: None, is_full: false }
}

#[test]
fn tags_are_durable() {
    let dir = tempfile::tempdir().expect("a directory");
    let (objects, calls) = watched(dir.path());
    objects.stage("b", &key("a"), OWNER).and_then(|it| it.place(&Guard::None, &Attrs::default())).expect("places");
    make_directory(&objects, "d/", &Attrs::default()).expect("makes");
    for (name, sync) in [("a", "fsync"), ("d/", "fsync_dir")] {
        calls.lock().clear();
        let tags = [("tag".to_owned(), name.to_owned())].into();
        objects.set_tags("b", &key(name), tags).expect("sets");
        assert_eq!(*calls.lock(), ["set_xattr", sync], "{name}");
        assert_eq!(objects.find("b", &key(name)).expect("is there").attrs.given.tags["tag"], name);
    }
}

/// Its directory stays, since something is in it.
#[test]
fn the_removal_of_a_directory_object_is_durable() {
    let dir = tempfile::tempdir().expect("a directory");
    let (objects, calls) = watched(dir.path());
    make_directory(&objects, "d/", &Attrs::default()).expect("makes");
    std::fs::write(dir.path().join("b/d/file"), "").expect("writes");
    calls.lock().clear();
    objects.remove("b", &key("d/"), &Guard::None).expect("removes");
    assert_eq!(*calls.lock(), ["remove_xattr", "fsync_dir", "fsync_dir"], "of itself, and of the one above");
    assert!(matches!(objects.find("b", &key("d/")), Err(ObjectError::Refused(Refusal::NoKey))));
}

#[test]
fn the_first_upload_of_a_bucket_is_durable() {
    let dir = tempfile::tempdir().expect("a directory");
    let (objects, calls) = watched(dir.path());
    objects.begin_upload("b", &upload("k"), OWNER).expect("begins");
    assert_eq!(calls.lock()[..4], ["mkdir", "fsync_dir", "mkdir", "fsync_dir"], "its index, and the parts' directory");
}

/// A request's turn.
fn turn() -> Arc<Turn> {
    let tenant = Arc::new(Tenant::new("t", Limits::default()));
    Arc::new(tenant.begin("u").expect("the first request"))
}

/// Tells of the next call of this name, and holds it.
type Stall = (&'static str, mpsc::Sender<()>, mpsc::Receiver<()>);

/// Objects in a directory, whose calls can be made to stand still.
struct Slow {
    objects: Arc<Objects>,
    stall: Arc<Mutex<Option<Stall>>>,
}

impl Slow {
    fn new(dir: &Path) -> Slow {
        std::fs::create_dir(dir.join("b")).expect("makes");
        let stall = Arc::new(Mutex::new(None::<Stall>));
        let stalls = stall.clone();
        let told = Box::new(move |name: &'static str| {
            let stall = stalls.lock().take_if(|(stalled, ..)| *stalled == name);
            if let Some((_, stand, goes_on)) = stall {
                stand.send(()).expect("it is waited for");
                let _ = goes_on.recv();
            }
        });
        let fs = Overheard { inner: PlainFs::open(dir).expect("opens"), told };
        let modes = Modes { file: 0o600, dir: 0o700 };
        Slow { objects: Arc::new(Objects::open(Arc::new(fs), "/", modes, 1 << 20).expect("opens")), stall }
    }

    /// Holds the next call of this name. What it tells by, and what releases it.
    fn stall(&self, name: &'static str) -> (mpsc::Receiver<()>, mpsc::Sender<()>) {
        let ((stand, stands), (go_on, goes_on)) = (mpsc::channel(), mpsc::channel());
        *self.stall.lock() = Some((name, stand, goes_on));
        (stands, go_on)
    }

    /// Does something for a client that hangs up while a call of this name stands still; `meanwhile`, others come. How
    /// it ends.
    fn without_a_client(
        &self,
        name: &'static str,
        late: impl FnOnce(&Arc<Objects>) -> Result<()> + Send + 'static,
        meanwhile: impl FnOnce(&Arc<Objects>),
    ) -> Result<()> {
        let runtime = tokio::runtime::Runtime::new().expect("threads");
        let _entered = runtime.enter();
        let (stands, go_on) = self.stall(name);
        let (doing, (tell, ends)) = (self.objects.clone(), mpsc::channel());
        let work = work::spawn(turn(), None, move || tell.send(late(&doing)).expect("it is waited for"));
        stands.recv().expect("it comes there");
        drop(work);
        meanwhile(&self.objects);
        drop(go_on);
        ends.recv().expect("it ends")
    }
}

fn put(objects: &Arc<Objects>, text: &str, content: &[u8]) -> Result<()> {
    let staged = objects.stage("b", &key(text), OWNER)?;
    staged.open().write(0, content)?;
    staged.place(&Guard::None, &Attrs { etag: "put".into(), ..Attrs::default() }).map(drop)
}

fn set_tags(objects: &Objects, text: &str) -> Result<()> {
    objects.set_tags("b", &key(text), [("tag".to_owned(), String::new())].into())
}

/// The first request stands in fsync when its client hangs up. The client sends it again, and then another one.
#[test]
fn a_put_without_a_client_replaces_nothing_that_came_later() {
    let dir = tempfile::tempdir().expect("a directory");
    let slow = Slow::new(dir.path());
    let first = |objects: &Arc<Objects>| put(objects, "k", b"first");
    let ended = slow.without_a_client("fsync", first, |objects| {
        first(objects).expect("the same request again");
        put(objects, "k", b"later").expect("another");
    });
    assert!(is_given_up(&ended), "{ended:?}");
    assert_eq!(std::fs::read(dir.path().join("b/k")).expect("is there"), b"later");
    assert_eq!(std::fs::read_dir(dir.path().join("b")).expect("a directory").count(), 1, "nothing else is left");
}

fn put_part(objects: &Arc<Objects>, text: &str, id: &str, content: &[u8], etag: &str) -> Result<()> {
    let part = objects.stage_part("b", &key(text), id)?;
    part.open().write(0, content)?;
    let attrs = Attrs { etag: etag.into(), ..Attrs::default() };
    objects.place_part(("b", &key(text), id), part, 1, &attrs).map(drop)
}

/// Of two parts of one number the later one counts.
#[test]
fn a_part_without_a_client_replaces_nothing_that_came_later() {
    let dir = tempfile::tempdir().expect("a directory");
    let slow = Slow::new(dir.path());
    let id = slow.objects.begin_upload("b", &upload("k"), OWNER).expect("begins");
    let late = id.clone();
    let first = move |objects: &Arc<Objects>| put_part(objects, "k", &late, b"first", "first");
    let ended = slow.without_a_client("fsync", first.clone(), |objects| {
        first(objects).expect("the same request again");
        put_part(objects, "k", &id, b"the later", "later").expect("another");
    });
    assert!(is_given_up(&ended), "{ended:?}");
    let (_, parts) = slow.objects.parts("b", &key("k"), &id).expect("it goes on");
    let found: Vec<_> = parts.iter().map(|part| (part.number, part.shown.size, &*part.shown.attrs.etag)).collect();
    assert_eq!(found, [(1, 9, "later")]);
    // What waits for its client, and comes after the end of the upload.
    let part = slow.objects.stage_part("b", &key("k"), &id).expect("begins");
    slow.objects.abort_upload("b", &key("k"), &id).expect("aborts");
    let placed = slow.objects.place_part(("b", &key("k"), &id), part, 1, &Attrs::default());
    assert!(matches!(placed, Err(ObjectError::Refused(Refusal::NoUpload))));
}

fn copy(objects: &Arc<Objects>, from: &str, to: &str, etag: &str) -> Result<()> {
    let source = objects.source("b", &key(from))?;
    let mut attrs = Attrs { etag: etag.into(), ..Attrs::default() };
    objects.copy(&source, ("b", &key(to)), OWNER, &Guard::None, &mut attrs, &mut |_, _, _| Ok(())).map(drop)
}

/// What others do while work stands still, and whether the work still counts after that.
type Meanwhile = (&'static str, fn(&Arc<Objects>) -> Result<()>, bool);

const MEANWHILE: [Meanwhile; 4] = [
    ("nothing", |_| Ok(()), true),
    ("another content", |objects| put(objects, "to", b"later"), false),
    ("tags", |objects| set_tags(objects, "to"), false),
    ("a removal", |objects| objects.remove("b", &key("to"), &Guard::None), false),
];

/// It may take longer than its client waits, and is completed all the same.
#[test]
fn a_copy_without_a_client_replaces_only_what_was_there_when_it_began() {
    let dir = tempfile::tempdir().expect("a directory");
    copies_without_a_client(dir.path(), &Slow::new(dir.path()));
}

fn copies_without_a_client(dir: &Path, slow: &Slow) {
    let (to, objects) = (dir.join("b/to"), &slow.objects);
    put(objects, "from", b"copied").expect("puts");
    let late = |objects: &Arc<Objects>| copy(objects, "from", "to", "copy");
    for (what, meanwhile, is_placed) in MEANWHILE {
        put(objects, "to", b"before").expect("puts");
        let mut there = None;
        let ended = slow.without_a_client("fsync", late, |objects| {
            meanwhile(objects).expect(what);
            there = std::fs::read(&to).ok();
        });
        assert_eq!((ended.is_ok(), is_given_up(&ended)), (is_placed, !is_placed), "{what}: {ended:?}");
        let expected = if is_placed { Some(b"copied".to_vec()) } else { there };
        assert_eq!(std::fs::read(&to).ok(), expected, "{what}");
    }
    // Nothing was there, and then something is.
    assert!(slow.without_a_client("fsync", late, |_| ()).is_ok() && to.exists());
    std::fs::remove_file(&to).expect("is there");
    let ended = slow.without_a_client("fsync", late, |objects| put(objects, "to", b"later").expect("puts"));
    assert!(is_given_up(&ended) && std::fs::read(&to).expect("is there") == b"later", "{ended:?}");
}

/// A copy onto its own source, for other properties, is begun again if the source was replaced meanwhile.
#[test]
fn a_copy_that_begins_without_a_client_changes_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let slow = Slow::new(dir.path());
    put(&slow.objects, "k", b"first").expect("puts");
    let once = |objects: &Arc<Objects>| copy(objects, "k", "k", "copy");
    let late = move |objects: &Arc<Objects>| once(objects).or_else(|_| once(objects));
    let ended = slow.without_a_client("fsync", late, |objects| put(objects, "k", b"later").expect("puts"));
    assert!(is_given_up(&ended), "{ended:?}");
    assert_eq!(slow.objects.find("b", &key("k")).expect("is there").attrs.etag, "put");
    late(&slow.objects).expect("a client waits for it");
    assert_eq!(slow.objects.find("b", &key("k")).expect("is there").attrs.etag, "copy");
}

#[test]
fn the_end_of_an_upload_without_a_client_replaces_only_what_was_there_when_it_began() {
    let dir = tempfile::tempdir().expect("a directory");
    ends_of_uploads_without_a_client(dir.path(), &Slow::new(dir.path()));
}

fn ends_of_uploads_without_a_client(dir: &Path, slow: &Slow) {
    const TAG: &str = "d41d8cd98f00b204e9800998ecf8427e";
    let (to, objects) = (dir.join("b/to"), &slow.objects);
    for (what, meanwhile, is_placed) in MEANWHILE {
        put(objects, "to", b"before").expect("puts");
        let id = objects.begin_upload("b", &upload("to"), OWNER).expect("begins");
        put_part(objects, "to", &id, b"uploaded", TAG).expect("puts");
        let complete = move |objects: &Arc<Objects>| {
            let parts = [Completed { number: 1, etag: TAG.into(), checksums: Default::default() }];
            let place = ("b", &key("to"), id.as_str());
            let sum = |_: &Upload, _: &[multipart::Part], _: &mut Reader<'_>| Ok::<_, ObjectError>(None);
            objects.complete_upload(place, &parts, OWNER, &Guard::None, sum).map(drop)
        };
        let ended = slow.without_a_client("fsync", complete.clone(), |objects| meanwhile(objects).expect(what));
        assert_eq!((ended.is_ok(), is_given_up(&ended)), (is_placed, !is_placed), "{what}: {ended:?}");
        assert_eq!(std::fs::read(&to).is_ok_and(|content| content == b"uploaded"), is_placed, "{what}");
        complete(objects).expect("a client waits for it, or it has ended so before");
        assert_eq!(std::fs::read(&to).expect("is there"), b"uploaded", "{what}");
    }
}

/// The tree makes up numbers for entries of another file system than its own: each time that they are found, unless
/// somebody holds them.
#[test]
fn what_was_there_is_known_again_on_another_file_system() {
    let dir = tempfile::tempdir().expect("a directory");
    let slow = Slow::new(dir.path());
    let Some(_mounted) = Mounted::new(&dir.path().join("b"), "mode=700") else {
        eprintln!("NOTE: nothing can be mounted here: numbers that are made up were NOT tested");
        return;
    };
    if matches!(put(&slow.objects, "from", b"x"), Err(ObjectError::Vault(VaultError::Unsupported))) {
        eprintln!("NOTE: tmpfs has no attributes here: numbers that are made up were NOT tested");
        return;
    }
    copies_without_a_client(dir.path(), &slow);
    ends_of_uploads_without_a_client(dir.path(), &slow);
}

/// Does something for a client that hangs up while the work waits for another request to the key; how it ends.
fn without_a_client(
    objects: &Arc<Objects>,
    text: &str,
    late: impl FnOnce(&Arc<Objects>) -> Result<()> + Send + 'static,
) -> Result<()> {
    let name = (objects.bucket("b").expect("is there").ino(), OsString::from(key(text).path()));
    while_held(objects, &objects.keys, &name, late)
}

/// The same, while a name is locked.
fn while_held<K: Clone + Eq + std::hash::Hash>(
    objects: &Arc<Objects>,
    locks: &Locks<K>,
    name: &K,
    late: impl FnOnce(&Arc<Objects>) -> Result<()> + Send + 'static,
) -> Result<()> {
    let runtime = tokio::runtime::Runtime::new().expect("threads");
    let _entered = runtime.enter();
    let held = locks.alone(name.clone());
    let (doing, (tell, ends)) = (objects.clone(), mpsc::channel());
    let work = work::spawn(turn(), None, move || tell.send(late(&doing)).expect("it is waited for"));
    while locks.users_of(name) < 2 {
        std::thread::yield_now();
    }
    drop((work, held));
    ends.recv().expect("it ends")
}

fn is_given_up(ended: &Result<()>) -> bool {
    matches!(ended, Err(ObjectError::Vault(VaultError::Stale)))
}

#[test]
fn a_deletion_without_a_client_removes_nothing_that_came_later() {
    let dir = tempfile::tempdir().expect("a directory");
    let (objects, _) = watched(dir.path());
    let place = || objects.stage("b", &key("k"), OWNER).and_then(|it| it.place(&Guard::None, &Attrs::default()));
    place().expect("places");
    let ended = without_a_client(&objects, "k", |objects| objects.remove("b", &key("k"), &Guard::None));
    assert!(is_given_up(&ended), "{ended:?}");
    objects.find("b", &key("k")).expect("is there");
    objects.remove("b", &key("k"), &Guard::None).expect("a client waits for it");
    assert!(matches!(objects.find("b", &key("k")), Err(ObjectError::Refused(Refusal::NoKey))));
}

/// It was put again and removed meanwhile, or put again with other properties.
#[test]
fn a_directory_without_a_client_is_not_made() {
    let dir = tempfile::tempdir().expect("a directory");
    let (objects, _) = watched(dir.path());
    let make = |objects: &Arc<Objects>, etag: &str| {
        make_directory(objects, "d/", &Attrs { etag: etag.into(), ..Attrs::default() })
    };
    let ended = without_a_client(&objects, "d/", move |objects| make(objects, "first"));
    assert!(is_given_up(&ended) && !dir.path().join("b/d").exists(), "{ended:?}");
    make(&objects, "later").expect("a client waits for it");
    let ended = without_a_client(&objects, "d/", move |objects| make(objects, "first"));
    assert!(is_given_up(&ended), "{ended:?}");
    // A copy makes it in the same way.
    objects.stage("b", &key("k"), OWNER).and_then(|it| it.place(&Guard::None, &Attrs::default())).expect("places");
    let source = objects.source("b", &key("k")).expect("is there");
    let ended = without_a_client(&objects, "d/", move |objects| {
        let mut attrs = Attrs { etag: "copy".into(), ..Attrs::default() };
        objects.copy(&source, ("b", &key("d/")), OWNER, &Guard::None, &mut attrs, &mut |_, _, _| Ok(())).map(drop)
    });
    assert!(is_given_up(&ended), "{ended:?}");
    assert_eq!(objects.find("b", &key("d/")).expect("is there").attrs.etag, "later");
}

/// Those above it, and its own. Others may be a program's.
#[test]
fn a_directory_object_that_fails_leaves_no_directory() {
    let dir = tempfile::tempdir().expect("a directory");
    let (objects, _) = watched(dir.path());
    let bucket = dir.path().join("b");
    std::fs::create_dir_all(bucket.join("inbox/there")).expect("makes");
    let ended =
        without_a_client(&objects, "inbox/x/d/", |objects| make_directory(objects, "inbox/x/d/", &Attrs::default()));
    assert!(is_given_up(&ended) && !bucket.join("inbox/x").exists(), "{ended:?}");
    // Its client hangs up in front of the last step.
    let begun = objects.begin_directory("b", &key("inbox/x/d/"), OWNER).expect("begins");
    begun.make_parents().expect("makes");
    assert!(bucket.join("inbox/x").exists());
    drop(begun);
    assert!(!bucket.join("inbox/x").exists());
    let mut much = Attrs::default();
    much.given.metadata = [("m".to_owned(), "x".repeat(70_000))].into();
    for text in ["inbox/x/d/", "inbox/new/", "inbox/there/"] {
        let refused = make_directory(&objects, text, &much).expect_err("the store takes 64 KiB");
        assert!(matches!(refused, ObjectError::MuchMetadata), "{refused}");
    }
    let left: Vec<_> = std::fs::read_dir(bucket.join("inbox")).expect("is there").collect();
    assert!(left.len() == 1 && bucket.join("inbox/there").exists(), "{left:?}");
}

#[test]
fn tags_without_a_client_are_not_set() {
    let dir = tempfile::tempdir().expect("a directory");
    let (objects, _) = watched(dir.path());
    objects.stage("b", &key("k"), OWNER).and_then(|it| it.place(&Guard::None, &Attrs::default())).expect("places");
    let ended = without_a_client(&objects, "k", |objects| set_tags(objects, "k"));
    assert!(is_given_up(&ended), "{ended:?}");
    assert!(objects.find("b", &key("k")).expect("is there").attrs.given.tags.is_empty());
    set_tags(&objects, "k").expect("a client waits for it");
    assert_eq!(objects.find("b", &key("k")).expect("is there").attrs.given.tags.len(), 1);
}

/// The store is slow when it removes what the bucket had for uploads.
#[test]
fn a_bucket_is_not_removed_without_a_client() {
    let dir = tempfile::tempdir().expect("a directory");
    let slow = Slow::new(dir.path());
    let remove = |objects: &Arc<Objects>| objects.remove_bucket("b");
    let ended = slow.without_a_client("rmdir", remove, |objects| {
        remove(objects).expect("the same request again");
        objects.make_bucket("b", OWNER).expect("another");
    });
    assert!(is_given_up(&ended), "{ended:?}");
    slow.objects.bucket("b").expect("is there");
}

/// It was made again and removed meanwhile.
#[test]
fn a_bucket_is_not_made_without_a_client() {
    let dir = tempfile::tempdir().expect("a directory");
    let (objects, _) = watched(dir.path());
    let make = |objects: &Arc<Objects>| objects.make_bucket("new", OWNER);
    let ended = while_held(&objects, &objects.buckets, &"new".into(), make);
    assert!(is_given_up(&ended) && !dir.path().join("new").exists(), "{ended:?}");
    make(&objects).expect("a client waits for it");
    assert!(dir.path().join("new").exists());
}

/// A removal that has begun to change the store comes before what its client asks for after it has hung up.
#[test]
fn a_bucket_that_is_being_removed_is_made_after_that() {
    let dir = tempfile::tempdir().expect("a directory");
    let slow = Slow::new(dir.path());
    // What it had for uploads, and then the bucket itself.
    let (stands, go_on) = slow.stall("rmdir");
    let removing = slow.objects.clone();
    let removal = std::thread::spawn(move || removing.remove_bucket("b"));
    stands.recv().expect("it comes there");
    let (stands, go_on_then) = slow.stall("rmdir");
    drop(go_on);
    stands.recv().expect("it comes there");
    let making = slow.objects.clone();
    let made = std::thread::spawn(move || making.make_bucket("b", OWNER));
    while slow.objects.buckets.users_of(&"b".into()) < 2 && !made.is_finished() {
        std::thread::yield_now();
    }
    drop(go_on_then);
    removal.join().expect("no panic").expect("removes");
    made.join().expect("no panic").expect("makes");
    slow.objects.bucket("b").expect("is there");
}

#[test]
fn a_full_store_is_not_much_metadata() {
    let refused = |errno, has_space| {
        let source = std::io::Error::from_raw_os_error(errno);
        of_attributes(VaultError::Io { op: "set an attribute", source }, || has_space)
    };
    assert!(matches!(refused(libc::E2BIG, false), ObjectError::MuchMetadata));
    assert!(matches!(refused(libc::ENOSPC, true), ObjectError::MuchMetadata));
    assert!(matches!(refused(libc::ENOSPC, false), ObjectError::Vault(VaultError::Io { .. })));
}

/// A file system that is unmounted also where a test fails.
struct Mounted(PathBuf);

impl Mounted {
    /// One in memory; `None` where nothing can be mounted.
    fn new(at: &Path, options: &str) -> Option<Mounted> {
        let mut mount = std::process::Command::new("mount");
        let out = mount.args(["-t", "tmpfs", "-o", options, "none"]).arg(at).output();
        out.is_ok_and(|out| out.status.success()).then(|| Mounted(at.into()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

/// A bucket on a file system of its own, as a provider gives its tenants. That one is full, and the store's is not.
#[test]
fn a_full_file_system_of_a_bucket_is_not_much_metadata() {
    let dir = tempfile::tempdir().expect("a directory");
    let (objects, _) = watched(dir.path());
    let bucket = dir.path().join("b");
    // Room for names, and in few inodes for a small attribute, but not for a large one.
    let Some(_mounted) = Mounted::new(&bucket, "size=16k,nr_inodes=6,mode=700") else {
        eprintln!("NOTE: nothing can be mounted here: a full file system of a bucket was NOT tested");
        return;
    };
    let begin = || {
        let metadata = [("m".to_owned(), "x".repeat(2000))].into();
        let given = attrs::Given { metadata, ..attrs::Given::default() };
        objects.begin_upload("b", &Upload { given, ..upload("k") }, OWNER)
    };
    let much = begin().expect_err("no room for it");
    if matches!(much, ObjectError::Vault(VaultError::Unsupported)) {
        eprintln!("NOTE: tmpfs has no attributes here: a full file system of a bucket was NOT tested");
        return;
    }
    assert!(matches!(much, ObjectError::MuchMetadata), "{much}");
    std::fs::write(bucket.join("full"), vec![0; 1 << 20]).expect_err("no space");
    let full = begin().expect_err("no room for it");
    assert!(matches!(full, ObjectError::Vault(VaultError::Io { .. })), "{full}");
}
