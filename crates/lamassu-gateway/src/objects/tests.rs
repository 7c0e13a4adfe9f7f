//! Tests: what is durable when a call returns, and what a store refuses.

use super::*;
use lamassu_plain::PlainFs;
use lamassu_vault::{Entry, Overheard};
use std::path::Path;

const OWNER: Owner = Owner { uid: 0, gid: 0, umask: 0 };

impl Tree for Overheard<PlainFs> {
    fn at(&self, path: &OsStr) -> lamassu_vault::Result<Entry> {
        Tree::at(&self.inner, path)
    }
    fn changed(&self, _: Ino, _: &OsStr) {}
    fn each_name(&self, dir: Ino, each: &mut dyn FnMut(&OsStr, Kind)) -> lamassu_vault::Result<()> {
        Tree::each_name(&self.inner, dir, each)
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

#[test]
fn tags_are_durable() {
    let dir = tempfile::tempdir().expect("a directory");
    let (objects, calls) = watched(dir.path());
    objects.stage("b", &key("a"), OWNER).and_then(|it| it.place(&Guard::None, &Attrs::default())).expect("places");
    objects.make_directory("b", &key("d/"), OWNER, &Guard::None, &Attrs::default()).expect("makes");
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
    objects.make_directory("b", &key("d/"), OWNER, &Guard::None, &Attrs::default()).expect("makes");
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
    let (given, user) = (attrs::Given::default(), "u".to_owned());
    let upload = Upload { key: "k".into(), given, begun: 0, user, algorithm: None, is_full: false };
    objects.begin_upload("b", &upload, OWNER).expect("begins");
    assert_eq!(calls.lock()[..4], ["mkdir", "fsync_dir", "mkdir", "fsync_dir"], "its index, and the parts' directory");
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
