//! Creation of an object: written under one of the gateway's own names, synced, renamed to its key.

use super::attrs::Attrs;
use super::key::{Key, RESERVED};
use super::node::{Node, Open};
use super::{ObjectError, Objects, PIECE, Refusal, Result, none_there};
use crate::limits::Turn;
use crate::work;
use lamassu_vault::{Owner, RenameMode, VaultError};
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

/// Prefix of the names of files that are being written.
pub(super) const STAGED: &str = ".lamassu-put-";
/// How often a directory is made again after another request has removed it.
const ATTEMPTS: usize = 8;

const _: () = assert!(matches!(STAGED.as_bytes(), [b'.', b'l', ..]) && STAGED.len() > RESERVED.len());

/// A condition on the present object before another replaces it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Guard {
    /// No condition.
    #[default]
    None,
    /// There is no object.
    Absent,
    /// There is an object.
    Present,
    /// The object has this entity tag.
    Tag(String),
    /// There is no object with this entity tag.
    OtherTag(String),
}

impl Guard {
    /// Checks the condition.
    ///
    /// # Errors
    /// [`Refusal::Precondition`]; [`Refusal::NoKey`] if an object is required and missing.
    pub fn check(&self, there: Option<&Attrs>) -> Result<(), Refusal> {
        match (self, there) {
            (Guard::None, _) | (Guard::Absent | Guard::OtherTag(_), None) | (Guard::Present, Some(_)) => Ok(()),
            (Guard::Present | Guard::Tag(_), None) => Err(Refusal::NoKey),
            (Guard::Tag(tag), Some(there)) if there.etag == *tag => Ok(()),
            (Guard::OtherTag(tag), Some(there)) if there.etag != *tag => Ok(()),
            (Guard::Absent | Guard::Tag(_) | Guard::OtherTag(_), Some(_)) => Err(Refusal::Precondition),
        }
    }
}

/// A file that is being written, and is renamed to a key when it is complete. If it is dropped before, nothing remains.
pub struct Staged {
    objects: Arc<Objects>,
    /// The lowest directory of the key that was there when it was begun.
    dir: Node,
    name: OsString,
    open: Open,
    /// For what it was begun; `None`: a file in one of the gateway's own directories.
    place: Option<Place>,
    is_placed: bool,
    turn: Option<Arc<Turn>>,
}

/// Where a file belongs.
#[derive(Clone)]
struct Place {
    bucket: Node,
    key: Key,
    owner: Owner,
    /// How many of its directories were there. Empty ones of them may be a program's, and stay.
    levels: usize,
}

impl Place {
    fn has_parents(&self) -> bool {
        self.key.parents().nth(self.levels).is_none()
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if self.is_placed {
            return;
        }
        let (objects, name) = (self.objects.clone(), std::mem::take(&mut self.name));
        let (dir, place) = (self.dir.clone(), self.place.take());
        work::beside_async(self.turn.take(), move || {
            if let Err(error) = dir.unlink(&name).or_else(none_there) {
                tracing::warn!(%error, "what was written of an object could not be removed; the next start does it");
            }
            match place {
                Some(Place { bucket, key, levels, .. }) => objects.end_unplaced(&name, (&bucket, &key), levels),
                None => _ = objects.under_way.end(&name),
            }
        });
    }
}

impl Staged {
    /// The file.
    pub fn open(&self) -> &Open {
        &self.open
    }

    /// Puts the object in its place, durably: content, attributes, name.
    ///
    /// # Errors
    /// [`Refusal::Precondition`], [`ObjectError::BelowObject`], [`ObjectError::AboveObjects`],
    /// [`ObjectError::MuchMetadata`], [`VaultError::Stale`]: the client is gone; those of the vault. Then nothing is
    /// changed, except if the last sync fails: the object is in its place, and may be gone after a crash.
    pub fn place(self, guard: &Guard, attrs: &Attrs) -> Result<lamassu_vault::Attr> {
        let attr = self.complete(attrs)?;
        // A client that is gone may have sent the request again, and then others: this one must not come after them.
        self.place_complete(guard, |_| work::is_wanted())?;
        Ok(attr)
    }

    /// Whether directories of its key have to be made.
    pub fn lacks_parents(&self) -> bool {
        self.place.as_ref().is_some_and(|place| !place.has_parents())
    }

    /// Makes the directories of its key that are not there, in the tenant's turns.
    ///
    /// # Errors
    /// [`ObjectError::BelowObject`]; those of the vault.
    pub fn make_parents(&self) -> Result<()> {
        let Some(Place { bucket, key, owner, .. }) = self.place.as_ref().filter(|place| !place.has_parents()) else {
            return Ok(());
        };
        work::in_turn(|| self.objects.make_parents(bucket, key, *owner).map(drop))
    }

    /// Gives the complete file the name of its key, durably, unless `is_meant` refuses what is there now.
    ///
    /// # Errors
    /// As [`Staged::place`]; [`VaultError::Stale`] if `is_meant` refuses.
    pub(super) fn place_complete(mut self, guard: &Guard, is_meant: impl Fn(Option<&Node>) -> bool) -> Result<()> {
        let Some(begun) = self.place.clone() else { return Err(VaultError::Invalid.into()) };
        let has_parents = begun.has_parents();
        let Place { bucket, key, owner, .. } = begun;
        let (objects, begun_in) = (self.objects.clone(), self.dir.clone());
        let mut place = |dir: &Node| {
            let _alone = objects.alone_with(&bucket, &key);
            let there = Objects::node_in(dir, &key)?;
            Objects::require(guard, there.as_ref())?;
            if !is_meant(there.as_ref()) {
                return Ok(false);
            }
            let mode = if *guard == Guard::Absent { RenameMode::NoReplace } else { RenameMode::Replace };
            self.rename_to(dir, key.name(), mode)?;
            Ok(true)
        };
        let (dir, is_placed) = match has_parents {
            // As long as the file is in it, it is not removed.
            true => (begun_in.clone(), place(&begun_in)?),
            false => objects.in_parent(&bucket, &key, owner, place)?,
        };
        if is_placed { Ok(dir.sync_names()?) } else { Err(VaultError::Stale.into()) }
    }

    /// Renames the complete file to a name in the directory where it was begun. An existing file is replaced.
    pub(super) fn place_as(mut self, name: &OsStr) -> Result<()> {
        let dir = self.dir.clone();
        self.rename_to(&dir, name, RenameMode::Replace)?;
        Ok(dir.sync_names()?)
    }

    /// Makes content and attributes durable.
    pub(super) fn complete(&self, attrs: &Attrs) -> Result<lamassu_vault::Attr> {
        self.open.flush()?;
        let attr = self.open.attr()?;
        attrs.store(self.open.node(), &attr)?;
        self.open.sync()?;
        Ok(attr)
    }

    fn rename_to(&mut self, dir: &Node, name: &OsStr, mode: RenameMode) -> Result<()> {
        match self.dir.rename_into(&self.name, dir, name, mode) {
            Ok(()) => {
                self.is_placed = true;
                self.objects.under_way.placed(&self.name);
            }
            Err(VaultError::Exists) => return Err(Refusal::Precondition.into()),
            Err(VaultError::IsDirectory | VaultError::NotEmpty | VaultError::DatasetRoot) => {
                return Err(ObjectError::AboveObjects);
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

impl Objects {
    /// Begins the object of a key: a file in the lowest of its directories that is there. Those below it are made when
    /// the content is known to be good. Till then they would have the profile and the access lists of this one.
    ///
    /// # Errors
    /// [`Refusal::NoBucket`], [`ObjectError::BelowObject`], [`ObjectError::AboveObjects`]; those of the vault.
    pub fn stage(self: &Arc<Self>, bucket: &str, key: &Key, owner: Owner) -> Result<Staged> {
        let bucket = self.bucket(bucket)?;
        let (dir, levels, (name, open)) = again_if_gone(|| {
            let (dir, levels) = Self::lowest(&bucket, key)?;
            let has_parents = key.parents().nth(levels).is_none();
            if has_parents && dir.child_if_there(key.name())?.is_some_and(|there| there.is_dir()) {
                return Err(ObjectError::AboveObjects);
            }
            let made = self.new_file(&dir, owner, |name| self.end_unplaced(name, (&bucket, key), levels))?;
            Ok((dir, levels, made))
        })?;
        let place = Some(Place { bucket, key: key.clone(), owner, levels });
        Ok(Staged { objects: self.clone(), dir, name, open, place, is_placed: false, turn: work::current() })
    }

    /// The lowest directory of a key that is there, and how many are.
    pub(super) fn lowest(bucket: &Node, key: &Key) -> Result<(Node, usize)> {
        Self::by_levels(key, || Self::walk_to_lowest(bucket, key))
    }

    fn walk_to_lowest(bucket: &Node, key: &Key) -> Result<(Node, usize)> {
        let (mut dir, mut levels) = (bucket.clone(), 0);
        for name in key.parents() {
            work::pause()?;
            match dir.child_if_there(name)? {
                Some(next) if next.is_dir() => dir = next,
                Some(_) => return Err(ObjectError::BelowObject),
                None => break,
            }
            levels += 1;
        }
        Ok((dir, levels))
    }

    /// Makes a file in one of the gateway's own directories.
    pub(super) fn stage_in(self: &Arc<Self>, dir: &Node, owner: Owner) -> Result<Staged> {
        let (name, open) = self.new_file(dir, owner, |name| _ = self.under_way.end(name))?;
        Ok(Staged {
            objects: self.clone(),
            dir: dir.clone(),
            name,
            open,
            place: None,
            is_placed: false,
            turn: work::current(),
        })
    }

    /// Creates a file under a name of its own, which `end` ends if that fails.
    fn new_file(&self, dir: &Node, owner: Owner, end: impl FnOnce(&OsStr)) -> Result<(OsString, Open)> {
        let name = OsString::from(format!("{STAGED}{}", random_name()?));
        // Registered before it exists, so that the sweep leaves it alone.
        self.under_way.begin(&name, dir);
        let open = dir.create(&name, self.modes.file, owner).inspect_err(|_| end(&name))?;
        Ok((name, open))
    }

    /// Runs `work` in the directory of a key, which is made with those above it if necessary. Another request may
    /// remove empty directories in between.
    fn in_parent<T>(
        &self,
        bucket: &Node,
        key: &Key,
        owner: Owner,
        mut body: impl FnMut(&Node) -> Result<T>,
    ) -> Result<(Node, T)> {
        again_if_gone(|| {
            let dir = self.make_parents(bucket, key, owner)?;
            Ok((dir.clone(), body(&dir)?))
        })
    }

    /// Makes the directories of a key that are not there; the lowest one.
    fn make_parents(&self, bucket: &Node, key: &Key, owner: Owner) -> Result<Node> {
        self.make_missing(bucket, key, owner, &mut 0)
    }

    /// The same. `levels` becomes how many were there, if those are fewer.
    pub(super) fn make_missing(&self, bucket: &Node, key: &Key, owner: Owner, levels: &mut usize) -> Result<Node> {
        let mut dir = bucket.clone();
        for (above, name) in key.parents().enumerate() {
            work::pause()?;
            let next = match dir.child_if_there(name)? {
                Some(next) => next,
                None => match dir.make_dir(name, self.modes.dir, owner) {
                    Err(VaultError::Exists) => dir.child(name)?,
                    made => {
                        let made = made?;
                        *levels = above.min(*levels);
                        dir.sync_names()?;
                        made
                    }
                },
            };
            if !next.is_dir() {
                return Err(ObjectError::BelowObject);
            }
            dir = next;
        }
        Ok(dir)
    }

    /// Copies a range of an open object to offset `at`, the end of the staged file, in the tenant's turns.
    pub(super) fn append(staged: &Staged, from: &Open, at: u64, range: std::ops::Range<u64>) -> Result<()> {
        staged.open().copy_from(from, (range.start, at), range.end.saturating_sub(range.start))
    }

    /// Calls `each` with the content of an open file, piece by piece, each in the tenant's turn.
    ///
    /// # Errors
    /// Those of the vault.
    pub fn read_through(open: &Open, size: u64, each: &mut dyn FnMut(&[u8])) -> Result<()> {
        let mut at = 0;
        while at < size {
            at += work::in_turn(|| {
                let piece = open.read(at, PIECE)?;
                if piece.is_empty() {
                    return Err(ObjectError::from(VaultError::NoData));
                }
                each(&piece);
                Ok(piece.len() as u64)
            })?;
        }
        Ok(())
    }
}

/// Does it again if a directory is gone: another request has removed it because it was empty.
pub(super) fn again_if_gone<T>(mut body: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 1..ATTEMPTS {
        match body() {
            Err(ObjectError::Vault(VaultError::NotFound | VaultError::Stale)) => {}
            done => return done,
        }
    }
    body()
}

/// 128 random bits, for a name.
pub(crate) fn random_name() -> Result<String> {
    let mut bytes = [0; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        let got = rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty());
        filled += got.map_err(|error| VaultError::Io { op: "get random bytes", source: error.into() })?;
    }
    Ok(data_encoding::HEXLOWER.encode(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{Limits, Tenant};
    use crate::objects::{Modes, Upload};
    use crate::queue::{Queue, Queues};
    use lamassu_plain::PlainFs;
    use std::fs;
    use std::path::Path;

    const OWNER: Owner = Owner { uid: 0, gid: 0, umask: 0 };

    fn with_bucket() -> (tempfile::TempDir, Arc<Objects>) {
        let dir = tempfile::tempdir().expect("a directory");
        fs::create_dir(dir.path().join("b")).expect("makes");
        let fs = PlainFs::open(dir.path()).expect("opens");
        let objects = Objects::open(Arc::new(fs), "/", Modes { file: 0o600, dir: 0o700 }, 1 << 20).expect("opens");
        (dir, Arc::new(objects))
    }

    fn key(text: &str) -> Key {
        Key::parse(text).expect("a key")
    }

    fn names(dir: &Path) -> Vec<OsString> {
        fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").file_name()).collect()
    }

    /// A content that turns out wrong makes none, however many levels its key has.
    #[test]
    fn directories_are_made_for_a_content_that_is_good() {
        let (dir, objects) = with_bucket();
        fs::create_dir(dir.path().join("b/there")).expect("makes");
        fs::write(dir.path().join("b/there/file"), "").expect("writes");
        for (text, above, first) in [("x/y/z", "b", "x"), ("there/x/y", "b/there", "x"), ("there/z", "b/there", "z")] {
            let path = dir.path().join(above);
            let staged = objects.stage("b", &key(text), OWNER).expect("begins");
            staged.open().write(0, b"content").expect("writes");
            assert!(!path.join(first).exists() && names(&path).len() == 2, "{text}");
            staged.place(&Guard::Absent, &Attrs::default()).expect("places");
            assert_eq!(fs::read(dir.path().join("b").join(text)).expect("is there"), b"content", "{text}");
            objects.remove("b", &key(text), &Guard::None).expect("removes");
            drop(objects.stage("b", &key(text), OWNER).expect("begins"));
            assert_eq!(names(&dir.path().join("b")), ["there"], "{text}: nothing is left");
        }
    }

    /// Directories that were there may be a program's, with a mode, access lists and a profile of their own.
    #[test]
    fn what_fails_removes_the_directories_that_it_has_made_and_no_others() {
        let (dir, objects) = with_bucket();
        let bucket = dir.path().join("b");
        fs::create_dir(bucket.join("inbox")).expect("makes");
        let shown = || {
            let mut all = names(&bucket);
            all.retain(|name| !name.as_encoded_bytes().starts_with(b"."));
            (all, names(&bucket.join("inbox")))
        };
        let (given, user) = (Attrs::default().given, "u".to_owned());
        let mut upload = Upload { key: String::new(), given, begun: 0, user, algorithm: None, is_full: false };
        upload.given.metadata = [("m".to_owned(), "x".repeat(70_000))].into();
        for text in ["inbox/x", "inbox/y/z", "made/x"] {
            let staged = objects.stage("b", &key(text), OWNER).expect("begins");
            staged.make_parents().expect("makes");
            drop(staged);
            assert_eq!(shown(), (vec!["inbox".into()], vec![]), "{text}");
            upload.key = text.into();
            let refused = objects.begin_upload("b", &upload, OWNER).expect_err("the store takes 64 KiB");
            assert!(matches!(refused, ObjectError::MuchMetadata), "{refused}");
            assert_eq!(shown(), (vec!["inbox".into()], vec![]), "{text}");
        }
        // What a crash has left, of an object and of an upload.
        fs::write(bucket.join("inbox").join(format!("{STAGED}left")), "").expect("writes");
        fs::create_dir_all(bucket.join("made/.lamassu-upload-left")).expect("makes");
        let swept = objects.sweep(&std::sync::atomic::AtomicBool::new(false)).expect("searches");
        assert_eq!((swept.removed, swept.left_out), (2, 0));
        assert_eq!(shown(), (vec!["inbox".into()], vec![]));
    }

    /// Objects are removed beside files that are under way: the last of those removes the directory if it fails.
    #[test]
    fn no_empty_directory_is_left_by_who_was_in_the_way() {
        let (dir, objects) = with_bucket();
        let path = dir.path().join("b/x/y");
        let stage = |text: &str| objects.stage("b", &key(text), OWNER).expect("begins");
        let place = |staged: Staged| staged.place(&Guard::None, &Attrs::default()).expect("places");
        let remove = |text: &str| objects.remove("b", &key(text), &Guard::None).expect("removes");
        place(stage("x/y/1"));
        let (one, other) = (stage("x/y/2"), stage("x/y/3"));
        remove("x/y/1");
        drop(one);
        assert!(path.exists(), "another one is under way");
        drop(other);
        assert!(!dir.path().join("b/x").exists());
        // Who succeeds removes none, and neither does who comes later: it may be a program's by then.
        place(stage("x/y/1"));
        let one = stage("x/y/2");
        remove("x/y/1");
        place(one);
        fs::remove_file(path.join("2")).expect("removes");
        drop(stage("x/y/3"));
        assert!(path.exists());
    }

    /// Other requests make and remove its directories, or something else of that name, before it is placed.
    #[test]
    fn directories_may_come_and_go_meanwhile() {
        let (dir, objects) = with_bucket();
        let path = dir.path().join("b/x");
        let staged = objects.stage("b", &key("x/y/z"), OWNER).expect("begins");
        fs::create_dir_all(path.join("y")).expect("makes");
        let other = objects.stage("b", &key("x/y/other"), OWNER).expect("begins");
        staged.make_parents().expect("they are there");
        drop(other);
        fs::remove_dir(path.join("y")).and_then(|()| fs::remove_dir(&path)).expect("they are empty");
        staged.place(&Guard::Absent, &Attrs::default()).expect("places");
        assert!(path.join("y/z").exists());
        let below = objects.stage("b", &key("f/y"), OWNER).expect("begins");
        fs::write(dir.path().join("b/f"), "").expect("writes");
        assert!(matches!(below.place(&Guard::None, &Attrs::default()), Err(ObjectError::BelowObject)));
    }

    /// While directories above a directory object wait for a turn, nobody waits for the key.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_key_is_locked_while_its_directories_are_made() {
        let (_dir, objects) = with_bucket();
        let tenant = Arc::new(Tenant::new("t", Limits::default()));
        let turn = Arc::new(tenant.begin("u").expect("the first"));
        let queues = Arc::new(Queues { pieces: Queue::new(1), syncs: Queue::new(1), copies: Queue::new(1) });
        let place = queues.pieces.place(&Arc::new(Tenant::new("other", Limits::default()))).await;
        let (making, text) = (objects.clone(), "x/y/z/");
        let made = work::spawn(turn, Some(queues.clone()), move || {
            let directory = making.begin_directory("b", &key(text), OWNER)?;
            directory.place(&Guard::None, &Attrs::default()).map(drop)
        });
        while queues.pieces.waiting_of(&tenant) == 0 {
            tokio::task::yield_now().await;
        }
        let other = objects.clone();
        let is_free = move || drop(other.alone_with(&other.bucket("b").expect("is there"), &key(text)));
        tokio::time::timeout(std::time::Duration::from_secs(60), tokio::task::spawn_blocking(is_free))
            .await
            .expect("nobody has it")
            .expect("no panic");
        drop(place);
        made.await.expect("no panic").expect("made");
    }

    /// Removals wait for the store, and for one another. Others have the place meanwhile.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn who_waits_to_remove_has_no_place() {
        let (_dir, objects) = with_bucket();
        let staged = objects.stage("b", &key("x/y"), OWNER).expect("begins");
        staged.place(&Guard::None, &Attrs::default()).expect("places");
        let tenant = |name| Arc::new(Tenant::new(name, Limits::default()));
        let (many, few, pieces) = (tenant("many"), tenant("few"), Queue::new(1));
        let queues = Arc::new(Queues { pieces: pieces.clone(), syncs: Queue::new(1), copies: Queue::new(1) });
        // The object itself, then the directory that is empty without it.
        for path in ["x/y", "x"] {
            let name = (objects.bucket("b").expect("is there").ino(), OsString::from(path));
            let (end, ended) = std::sync::mpsc::channel::<()>();
            let (holding, held) = (objects.clone(), name.clone());
            let holder = std::thread::spawn(move || {
                let _alone = holding.keys.alone(held);
                let _ = ended.recv();
            });
            while objects.keys.users_of(&name) == 0 {
                tokio::task::yield_now().await;
            }
            let (removing, turn) = (objects.clone(), Arc::new(many.begin("u").expect("a request")));
            let removed = work::spawn(turn, Some(queues.clone()), move || {
                work::in_turn(|| removing.remove("b", &key("x/y"), &Guard::None))
            });
            while objects.keys.users_of(&name) < 2 {
                tokio::task::yield_now().await;
            }
            let place = tokio::time::timeout(std::time::Duration::from_secs(60), pieces.place(&few)).await;
            drop(place.expect("nobody has it"));
            drop(end);
            holder.join().expect("no panic");
            removed.await.expect("no panic").expect("removed");
            let staged = objects.stage("b", &key("x/y"), OWNER).expect("begins");
            staged.place(&Guard::None, &Attrs::default()).expect("places");
        }
    }
}
