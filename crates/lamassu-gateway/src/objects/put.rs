//! Creation of an object: written under one of the gateway's own names, synced, renamed to its key.

use super::attrs::Attrs;
use super::key::{Key, RESERVED};
use super::node::{Node, Open};
use super::{ObjectError, Objects, PIECE, Refusal, Result, none_there};
use crate::limits::Turn;
use crate::work;
use lamassu_vault::{Kind, Owner, RenameMode, VaultError};
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
    /// Whether all its directories were there.
    has_parents: bool,
}

impl Drop for Staged {
    fn drop(&mut self) {
        let (objects, name) = (self.objects.clone(), std::mem::take(&mut self.name));
        if self.is_placed {
            objects.staged.lock().remove(&name);
            return;
        }
        let (dir, place) = (self.dir.clone(), self.place.take());
        work::beside_async(self.turn.take(), move || {
            if let Err(error) = dir.unlink(&name).or_else(none_there) {
                tracing::warn!(%error, "what was written of an object could not be removed; the next start does it");
            }
            if let Some(Place { bucket, key, .. }) = place
                && let Err(error) = objects.prune(&bucket, &key)
            {
                tracing::debug!(%error, "directories that may be empty stay");
            }
            objects.staged.lock().remove(&name);
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
    /// [`ObjectError::MuchMetadata`]; those of the vault. Then nothing is changed, except if the last sync fails: the
    /// object is in its place, and may be gone after a crash.
    pub fn place(self, guard: &Guard, attrs: &Attrs) -> Result<lamassu_vault::Attr> {
        let attr = self.complete(attrs)?;
        self.place_complete(guard, |_| true)?;
        Ok(attr)
    }

    /// Whether directories of its key have to be made.
    pub fn lacks_parents(&self) -> bool {
        self.place.as_ref().is_some_and(|place| !place.has_parents)
    }

    /// Makes the directories of its key that are not there, in the tenant's turns.
    ///
    /// # Errors
    /// [`ObjectError::BelowObject`]; those of the vault.
    pub fn make_parents(&self) -> Result<()> {
        let Some(Place { bucket, key, owner, has_parents: false }) = &self.place else { return Ok(()) };
        work::in_turn(|| self.objects.make_parents(bucket, key, *owner).map(drop))
    }

    /// Gives the complete file the name of its key, durably, unless `is_meant` refuses what is there now.
    ///
    /// # Errors
    /// As [`Staged::place`]; [`VaultError::Stale`] if `is_meant` refuses.
    pub(super) fn place_complete(mut self, guard: &Guard, is_meant: impl Fn(Option<&Node>) -> bool) -> Result<()> {
        let Some(Place { bucket, key, owner, has_parents }) = self.place.clone() else {
            return Err(VaultError::Invalid.into());
        };
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
            Ok(()) => self.is_placed = true,
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
        let (dir, has_parents, (name, open)) = again_if_gone(|| {
            let (dir, has_parents) = Self::lowest(&bucket, key)?;
            if has_parents && dir.child_if_there(key.name())?.is_some_and(|there| there.is_dir()) {
                return Err(ObjectError::AboveObjects);
            }
            let made = self.new_file(&dir, owner)?;
            Ok((dir, has_parents, made))
        })?;
        let place = Some(Place { bucket, key: key.clone(), owner, has_parents });
        Ok(Staged { objects: self.clone(), dir, name, open, place, is_placed: false, turn: work::current() })
    }

    /// The lowest directory of a key that is there, and whether it is the lowest of all.
    fn lowest(bucket: &Node, key: &Key) -> Result<(Node, bool)> {
        Self::by_levels(key, || Self::walk_to_lowest(bucket, key))
    }

    fn walk_to_lowest(bucket: &Node, key: &Key) -> Result<(Node, bool)> {
        let mut dir = bucket.clone();
        for name in key.parents() {
            work::pause()?;
            match dir.child_if_there(name)? {
                Some(next) if next.is_dir() => dir = next,
                Some(_) => return Err(ObjectError::BelowObject),
                None => return Ok((dir, false)),
            }
        }
        Ok((dir, true))
    }

    /// Makes a file in one of the gateway's own directories.
    pub(super) fn stage_in(self: &Arc<Self>, dir: &Node, owner: Owner) -> Result<Staged> {
        let (name, open) = self.new_file(dir, owner)?;
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

    fn new_file(&self, dir: &Node, owner: Owner) -> Result<(OsString, Open)> {
        let name = OsString::from(format!("{STAGED}{}", random_name()?));
        // Registered before it exists, so that the sweep leaves it alone.
        self.staged.lock().insert(name.clone());
        let created = dir.create(&name, self.modes.file, owner);
        let open = created.inspect_err(|_| _ = self.staged.lock().remove(&name))?;
        Ok((name, open))
    }

    /// Runs `work` in the directory of a key, which is made with those above it if necessary. Another request may
    /// remove empty directories in between.
    pub(super) fn in_parent<T>(
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

    /// Makes the directories above a key that are not there, in the tenant's turns.
    ///
    /// # Errors
    /// [`Refusal::NoBucket`], [`ObjectError::BelowObject`]; those of the vault.
    pub fn make_parents_of(&self, bucket: &str, key: &Key, owner: Owner) -> Result<()> {
        let bucket = self.bucket(bucket)?;
        work::in_turn(|| self.make_parents(&bucket, key, owner).map(drop))
    }

    /// Makes the directories of a key that are not there; the lowest one.
    pub(super) fn make_parents(&self, bucket: &Node, key: &Key, owner: Owner) -> Result<Node> {
        let mut dir = bucket.clone();
        for name in key.parents() {
            work::pause()?;
            let next = match dir.child_if_there(name)? {
                Some(next) => next,
                None => match dir.make_dir(name, self.modes.dir, owner) {
                    Err(VaultError::Exists) => dir.child(name)?,
                    made => {
                        let made = made?;
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

    /// Makes a directory object, with the directories above it.
    ///
    /// # Errors
    /// As [`Objects::stage`] and [`Staged::place`].
    pub fn make_directory(&self, bucket: &str, key: &Key, owner: Owner, guard: &Guard, attrs: &Attrs) -> Result<Node> {
        let bucket = self.bucket(bucket)?;
        // Hundreds of directories, perhaps: made before the lock is taken.
        work::in_turn(|| self.make_parents(&bucket, key, owner))?;
        let _alone = self.alone_with(&bucket, key);
        let (dir, made) = self.in_parent(&bucket, key, owner, |dir| {
            Self::require(guard, Self::node_in(dir, key)?.as_ref())?;
            let made = match dir.make_dir(key.name(), self.modes.dir, owner) {
                Err(VaultError::Exists) => dir.child(key.name())?,
                made => made?,
            };
            if made.attr().kind != Kind::Dir {
                return Err(ObjectError::BelowObject);
            }
            attrs.store(&made, made.attr())?;
            Ok(made)
        })?;
        dir.sync_names()?;
        made.sync_names()?;
        Ok(made)
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
fn again_if_gone<T>(mut body: impl FnMut() -> Result<T>) -> Result<T> {
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
    use crate::objects::Modes;
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
        // The last of them was removed as empty.
        assert!(!path.exists());
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
            making.make_directory("b", &key(text), OWNER, &Guard::None, &Attrs::default()).map(drop)
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
