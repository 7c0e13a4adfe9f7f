//! Listings: the keys of a bucket in the order of their bytes, page by page.
//!
//! A walk over names of directories, in the order in which they appear in keys, yields keys in their order. It holds
//! some names of each directory on its path, which are a few MiB together, however large directories are.

use super::attrs::{Attrs, Shown, is_of_one_object};
use super::key::{KEY_MAX, Key};
use super::names::{Listings, Names, unless_closed, unless_gone};
use super::node::Node;
use super::{Object, Objects, Result};
use crate::work;
use std::ffi::OsStr;
use std::sync::Arc;

/// Bytes of names that a walk may hold. The next directory on its path gets half of what is left, but at least
/// [`WINDOW_MIN`] (8 MiB in all on the longest path): each window that does not fit means reading its directory again.
const WALK_MAX: usize = 2 << 20;
const WINDOW_MIN: usize = 16 << 10;

/// The parameters of a listing.
#[derive(Clone, Debug, Default)]
pub struct Query {
    /// prefix of keys
    pub prefix: String,
    /// keys are grouped up to this delimiter
    pub delimiter: Option<String>,
    /// only keys after this one
    pub after: Option<String>,
    /// `after` is a group: only keys after all that begin with it
    pub is_group: bool,
    /// most keys and groups
    pub max: usize,
}

/// An entry of a listing.
pub enum Item {
    /// An object. A page keeps no entry of the tree: many pages would hold more descriptors than a process has.
    Key(String, Shown),
    /// A group: the common part of keys up to the delimiter after the prefix.
    Group(String),
}

/// A page.
#[derive(Default)]
pub struct Page {
    /// in order
    pub items: Vec<Item>,
    /// start of the next page: after this key, or after this group
    pub next: Option<(String, bool)>,
}

/// A walk over a bucket.
struct Walk<'a> {
    listings: &'a Listings,
    query: &'a Query,
    page: Page,
    may_list: &'a dyn Fn(&str) -> bool,
    /// Bytes of names that it may still hold.
    left: usize,
}

/// A directory that the walk is in.
struct Level<'a> {
    dir: Node,
    /// How its keys begin.
    path: String,
    /// The one name in it that leads to the folder of the prefix.
    above: Option<&'a str>,
    /// Where the next window of names begins; `None`: there is none.
    from: Option<String>,
    /// The window, and the position of the next name in it.
    window: Option<(Arc<Names>, usize)>,
    /// Bytes of names that the walk could hold before it came here.
    left: usize,
}

/// Outcome of an entry.
enum Met {
    /// The entry, with everything below it, is done.
    Passed,
    /// The entry belongs to this group, which is on the page.
    Group(String),
    /// The directory of the entry is next.
    Below(Node),
    /// The page is full.
    Full,
}

/// The folder of a prefix: the part up to its last slash.
pub fn folder_of(prefix: &str) -> &str {
    prefix.rfind('/').map_or("", |slash| &prefix[..=slash])
}

impl Objects {
    /// A page of a listing. It omits folders that `may_list` refuses; a folder is given by its path with a trailing
    /// slash.
    ///
    /// # Errors
    /// [`super::Refusal::NoBucket`]; those of the vault.
    pub fn list(&self, bucket: &str, query: &Query, may_list: &dyn Fn(&str) -> bool) -> Result<Page> {
        let bucket = self.bucket(bucket)?;
        let mut walk = Walk { listings: &self.listings, query, page: Page::default(), may_list, left: WALK_MAX };
        if query.max > 0 {
            walk.through(bucket)?;
        }
        Ok(walk.page)
    }
}

impl<'a> Walk<'a> {
    /// Walks through a bucket until the page is full. Keys can have hundreds of levels, so they are no calls in calls.
    fn through(&mut self, bucket: Node) -> Result<()> {
        let mut levels = Vec::from_iter(self.level(bucket, String::new()));
        while let Some(level) = levels.last_mut() {
            let Some(full) = self.next(level)? else {
                self.left = level.left;
                levels.pop();
                continue;
            };
            work::pause()?;
            let name = &full[level.path.len()..];
            match self.entry(&level.dir, &full, name)? {
                Met::Passed => {}
                Met::Below(node) => levels.extend(self.level(node, full)),
                Met::Group(group) => level.skip(&group),
                Met::Full => return Ok(()),
            }
        }
        Ok(())
    }

    /// A directory, whose keys begin with `path`; `None`: nothing of it is listed.
    fn level(&self, dir: Node, path: String) -> Option<Level<'a>> {
        // Folders above the prefix are only passed through.
        if path.starts_with(folder_of(&self.query.prefix)) && !(self.may_list)(&path) {
            return None;
        }
        let above = self.name_above(&path);
        let from = if above.is_some() { None } else { Some(self.begin(&path)?) };
        Some(Level { dir, path, above, from, window: None, left: self.left })
    }

    /// The next entry of a directory that may be listed, by its key.
    fn next(&mut self, level: &mut Level<'a>) -> Result<Option<String>> {
        if let Some(name) = level.above.take() {
            let full = format!("{}{name}", level.path);
            // A name that is not a valid key has no folder.
            return Ok(Key::parse(&full).is_ok().then_some(full));
        }
        loop {
            let Some((names, at)) = &mut level.window else {
                let Some(from) = level.from.take() else { return Ok(None) };
                self.left = level.left;
                let found = self.listings.of(&level.dir, &from, (self.left / 2).max(WINDOW_MIN));
                let found = if level.path.is_empty() { found.map(Some) } else { unless_gone(found) };
                let Some(names) = found? else { return Ok(None) };
                self.left = self.left.saturating_sub(names.bytes());
                level.from = names.next().map(String::from);
                let at = names.first(&from);
                level.window = Some((names, at));
                continue;
            };
            if *at >= names.len() {
                level.window = None;
                continue;
            }
            let full = format!("{}{}", level.path, names.get(*at));
            *at += 1;
            let prefix = &*self.query.prefix;
            if !full.starts_with(prefix) {
                // Names with a common prefix are adjacent.
                if &*full > prefix {
                    return Ok(None);
                }
            } else if full.len() <= KEY_MAX {
                return Ok(Some(full));
            }
        }
    }

    /// If the folder of the prefix is below this directory: the one name here that leads to it.
    fn name_above(&self, path: &str) -> Option<&'a str> {
        let rest = self.query.prefix.strip_prefix(path)?;
        rest.find('/').map(|slash| &rest[..=slash])
    }

    /// Names before this one in a directory do not belong to the page; `None`: no name does.
    fn begin(&self, path: &str) -> Option<String> {
        // A directory that contains the limit is included: its name ends where the limit's first part does.
        let part = |limit: &'a str| match limit.strip_prefix(path) {
            Some(rest) => (&rest[..rest.find('/').map_or(rest.len(), |slash| slash + 1)], rest),
            None => ("", "-"),
        };
        let (of_prefix, _) = part(&self.query.prefix);
        let Some((of_after, rest)) = self.query.after.as_deref().map(part) else { return Some(of_prefix.into()) };
        let is_group = self.query.is_group && of_after == rest;
        let of_after = if is_group { behind_all(of_after)? } else { of_after.into() };
        Some(of_after.max(of_prefix.into()))
    }

    fn entry(&mut self, dir: &Node, full: &str, name: &str) -> Result<Met> {
        let is_dir = name.ends_with('/');
        if self.is_past(full, is_dir) {
            return Ok(Met::Passed);
        }
        if let Some(group) = self.group_of(full) {
            return Ok(if self.add_group(&group) { Met::Group(group) } else { Met::Full });
        }
        let found = match dir.child_if_there(OsStr::new(name.trim_end_matches('/'))) {
            Err(error) if is_of_one_object(&error) => {
                tracing::warn!(%error, "an object is damaged, and is left out of a listing");
                return Ok(Met::Passed);
            }
            found => unless_gone(found.map_err(Into::into))?.flatten(),
        };
        let node = match found {
            Some(node) if node.is_dir() == is_dir => node,
            _ => return Ok(Met::Passed),
        };
        if !is_dir {
            return Ok(if self.add_key(full, node)? { Met::Passed } else { Met::Full });
        }
        // A directory may be an object.
        let is_asked = full.starts_with(&*self.query.prefix) && self.is_behind(full);
        let is_object = is_asked && unless_gone(Attrs::are_of(&node).map_err(Into::into))?.unwrap_or(false);
        let has_room = !is_object || self.add_key(full, node.clone())?;
        Ok(if has_room { Met::Below(node) } else { Met::Full })
    }

    /// Whether an entry and everything below it belong to earlier pages.
    fn is_past(&self, full: &str, is_dir: bool) -> bool {
        let Some(after) = self.query.after.as_deref() else { return false };
        match is_dir {
            _ if self.query.is_group && full.starts_with(after) => true,
            true => full < after && !after.starts_with(full),
            false => full <= after,
        }
    }

    fn is_behind(&self, full: &str) -> bool {
        self.query.after.as_deref().is_none_or(|after| full > after)
    }

    /// The group of a key, or of all keys in a directory.
    fn group_of(&self, full: &str) -> Option<String> {
        let (delimiter, rest) = (self.query.delimiter.as_deref()?, full.strip_prefix(&*self.query.prefix)?);
        let at = rest.find(delimiter)?;
        Some(full[..self.query.prefix.len() + at + delimiter.len()].into())
    }

    fn is_full(&mut self) -> bool {
        if self.page.items.len() < self.query.max {
            return false;
        }
        self.page.next = match self.page.items.last() {
            Some(Item::Key(key, ..)) => Some((key.clone(), false)),
            Some(Item::Group(group)) => Some((group.clone(), true)),
            None => None,
        };
        true
    }

    fn add_group(&mut self, group: &str) -> bool {
        if self.is_full() {
            return false;
        }
        self.page.items.push(Item::Group(group.into()));
        true
    }

    fn add_key(&mut self, full: &str, node: Node) -> Result<bool> {
        if self.is_full() {
            return Ok(false);
        }
        let Some(attrs) = unless_closed(Attrs::listed(&node).map_err(Into::into))? else { return Ok(true) };
        self.page.items.push(Item::Key(full.into(), Object { node, attrs }.shown()));
        Ok(true)
    }
}

impl Level<'_> {
    /// Goes on behind a group. The walk does not enter a group, so it ends in this directory.
    fn skip(&mut self, group: &str) {
        let Some(behind) = behind_all(&group[self.path.len()..]) else {
            (self.from, self.window) = (None, None);
            return;
        };
        if let Some((names, at)) = &mut self.window {
            *at = names.first(&behind);
        }
        self.from = self.from.take().map(|from| from.max(behind));
    }
}

/// The smallest text after all texts with this beginning; `None`: there is none.
fn behind_all(begin: &str) -> Option<String> {
    let mut chars = begin.chars();
    while let Some(last) = chars.next_back() {
        // Byte order is code point order. `from_u32` skips surrogates.
        if let Some(next) = (u32::from(last) + 1..=u32::from(char::MAX)).find_map(char::from_u32) {
            return Some(format!("{}{next}", chars.as_str()));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits;
    use crate::objects::{Guard, Modes, ObjectError, Refusal};
    use lamassu_plain::PlainFs;
    use lamassu_vault::Owner;
    use std::fs;
    use std::path::Path;

    fn objects(root: &Path) -> Objects {
        let fs = PlainFs::open(root).expect("opens");
        Objects::open(Arc::new(fs), "/", Modes { file: 0o600, dir: 0o700 }, 1 << 20).expect("opens")
    }

    /// A thread of a user who is not root, for whom permissions count.
    fn as_user(work: impl FnOnce() + Send + 'static) {
        use rustix::thread::{Gid, Uid, set_thread_res_gid, set_thread_res_uid};
        let working = std::thread::spawn(move || {
            if rustix::process::geteuid().is_root() {
                let (uid, gid) = (Uid::from_raw(65534), Gid::from_raw(65534));
                set_thread_res_gid(gid, gid, gid).expect("a group");
                set_thread_res_uid(uid, uid, uid).expect("a user");
            }
            work();
        });
        working.join().expect("no panic");
    }

    /// However long it is, and however many there are at once. Other tests open files, too.
    #[test]
    fn a_page_holds_no_descriptors() {
        let dir = tempfile::tempdir().expect("a directory");
        let bucket = dir.path().join("bucket");
        for folder in 0..1000 {
            fs::create_dir_all(bucket.join(format!("d{folder:03}"))).expect("makes");
            fs::write(bucket.join(format!("d{folder:03}/object")), "").expect("writes");
        }
        let objects = objects(dir.path());
        let descriptors = || fs::read_dir("/proc/self/fd").expect("they are listed").count();
        let (before, most) = (descriptors(), std::cell::Cell::new(0));
        let may_list = |folder: &str| {
            if folder == "d999/" {
                most.set(descriptors());
            }
            true
        };
        let page = objects.list("bucket", &Query { max: 1000, ..Query::default() }, &may_list).expect("lists");
        assert_eq!(page.items.len(), 1000);
        let (meanwhile, after) = (most.get(), descriptors());
        assert!((1..before + 500).contains(&meanwhile) && after < before + 500, "{before}, {meanwhile}, {after}");
    }

    /// Like the `lost+found` of a file system that is a tenant's own.
    #[test]
    fn a_directory_that_may_not_be_looked_into_has_nothing() {
        use std::os::unix::fs::{PermissionsExt, chown};
        let dir = tempfile::tempdir().expect("a directory");
        let bucket = dir.path().join("bucket");
        fs::create_dir_all(bucket.join("lost+found/x")).expect("makes");
        fs::create_dir(bucket.join("z")).expect("makes");
        ["a", "closed", "lost+found/y", "z/1"].iter().for_each(|key| fs::write(bucket.join(key), "").expect("writes"));
        if rustix::process::geteuid().is_root() {
            for path in ["", "bucket", "bucket/a", "bucket/closed", "bucket/z", "bucket/z/1"] {
                chown(dir.path().join(path), Some(65534), Some(65534)).expect("chown");
            }
        }
        for closed in ["lost+found", "closed"] {
            fs::set_permissions(bucket.join(closed), PermissionsExt::from_mode(0o000)).expect("chmod");
        }
        let root = dir.path().to_owned();
        as_user(move || {
            fs::read_dir(root.join("bucket/lost+found")).expect_err("it is closed");
            let objects = objects(&root);
            let keys = |prefix: &str, delimiter: Option<&str>| {
                let (prefix, delimiter) = (prefix.to_owned(), delimiter.map(String::from));
                let query = Query { prefix, delimiter, max: 10, ..Query::default() };
                let page = objects.list("bucket", &query, &|_| true).expect("lists");
                let name = |item| match item {
                    Item::Key(name, _) | Item::Group(name) => name,
                };
                page.items.into_iter().map(name).collect::<Vec<_>>()
            };
            assert_eq!(keys("", None), ["a", "z/1"]);
            assert_eq!(keys("", Some("/")), ["a", "lost+found/", "z/"]);
            for prefix in ["lost+found", "lost+found/", "lost+found/x/"] {
                assert!(keys(prefix, None).is_empty(), "{prefix}");
            }
            for key in ["lost+found/", "lost+found/x", "lost+found/x/y", "closed"] {
                let key = Key::parse(key).expect("a key");
                assert!(matches!(objects.find("bucket", &key), Err(ObjectError::Refused(Refusal::NoKey))), "{key:?}");
            }
            for key in ["lost+found/y", "lost+found/x/y"] {
                let key = Key::parse(key).expect("a key");
                objects.remove("bucket", &key, &Guard::None).expect("nothing is there");
            }
        });
        fs::set_permissions(bucket.join("lost+found"), PermissionsExt::from_mode(0o700)).expect("chmod");
    }

    /// A settled bucket with many names of 200 bytes, which windows of a walk end within.
    fn with_many(count: u32) -> (tempfile::TempDir, Objects) {
        let dir = tempfile::tempdir().expect("a directory");
        fs::create_dir(dir.path().join("bucket")).expect("makes");
        for at in 0..count {
            let name = format!("{}-{at:05}", "n".repeat(194));
            fs::write(dir.path().join("bucket").join(name), "").expect("writes");
        }
        fs::write(dir.path().join("bucket/o"), "").expect("writes");
        let mut objects = objects(dir.path());
        objects.listings = Listings::settled_at_once();
        (dir, objects)
    }

    /// A listing skips a group's names, both when a page reaches the group and when a page resumes behind it.
    #[test]
    fn a_group_is_passed_at_once() {
        let (_dir, mut objects) = with_many(12_000);
        let bucket = objects.bucket("bucket").expect("is there").ino();
        let group = "n".repeat(194) + "-";
        let mut query = Query { delimiter: Some("-".into()), max: 10, ..Query::default() };
        let page = objects.list("bucket", &query, &|_| true).expect("lists");
        let [Item::Group(found), Item::Key(key, _)] = &*page.items else { panic!("a group and a key") };
        assert!(*found == group && key == "o" && page.next.is_none());
        assert_eq!(objects.listings.kept_of(bucket), 2, "that which the group begins in, and the one behind it");
        objects.listings = Listings::settled_at_once();
        (query.after, query.is_group) = (Some(group), true);
        let page = objects.list("bucket", &query, &|_| true).expect("lists");
        assert!(page.items.len() == 1 && page.next.is_none());
        assert_eq!(objects.listings.kept_of(bucket), 1, "the one behind the group");
    }

    #[test]
    fn what_is_behind_all_that_begin_with_a_text() {
        for (begin, behind) in [("a", "b"), ("a/", "a0"), ("a\u{d7ff}", "a\u{e000}"), ("a\u{10ffff}", "b")] {
            assert_eq!(behind_all(begin).as_deref(), Some(behind));
            assert!(format!("{begin}\u{10ffff}").as_str() < behind);
        }
        assert!(behind_all("").is_none() && behind_all("\u{10ffff}").is_none());
    }

    #[tokio::test]
    async fn a_listing_ends_when_its_client_has_gone() {
        let (_dir, objects) = with_many(1);
        let tenant = Arc::new(limits::Tenant::new("t", limits::Limits::default()));
        let (tell, told) = std::sync::mpsc::channel();
        let listing = work::spawn(Arc::new(tenant.begin("u").expect("a turn")), None, move || {
            while work::is_wanted() {
                std::thread::yield_now();
            }
            let query = Query { max: 10, ..Query::default() };
            tell.send(objects.list("bucket", &query, &|_| true).is_err()).expect("it is waited for");
        });
        drop(listing);
        let is_refused = tokio::task::spawn_blocking(move || told.recv()).await.expect("no panic");
        assert!(is_refused.expect("it ends"));
    }

    /// A listing of many pages, over windows that end within them.
    #[test]
    fn pages_go_on_over_windows() {
        let dir = tempfile::tempdir().expect("a directory");
        let objects = objects(dir.path());
        objects.make_bucket("bucket", Owner { uid: 0, gid: 0, umask: 0 }).expect("makes");
        // More than a window has, at two levels.
        let filling = "n".repeat(200);
        let mut all = Vec::new();
        for folder in ["", "folder/"] {
            fs::create_dir_all(dir.path().join("bucket").join(folder)).expect("makes");
            for at in 0..12_000 {
                let key = format!("{folder}{filling}{at:05}");
                fs::write(dir.path().join("bucket").join(&key), "").expect("writes");
                all.push(key);
            }
        }
        all.sort_unstable();
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let query = Query { after, max: 1000, ..Query::default() };
            let page = objects.list("bucket", &query, &|_| true).expect("lists");
            found.extend(page.items.iter().filter_map(|item| match item {
                Item::Key(key, _) => Some(key.clone()),
                Item::Group(_) => None,
            }));
            match page.next {
                Some((next, _)) => after = Some(next),
                None => break,
            }
        }
        assert!(found == all, "{} of {}", found.len(), all.len());
        for (prefix, count) in
            [("folder/", 12_000), ("folder/nn", 12_000), ("fold", 12_000), ("folder/x", 0), ("../", 0), ("folder//", 0)]
        {
            let query = Query { prefix: prefix.into(), max: 20_000, ..Query::default() };
            assert_eq!(objects.list("bucket", &query, &|_| true).expect("lists").items.len(), count, "{prefix}");
        }
    }

    /// The page that a query has of sorted keys.
    fn page_of(keys: &[String], query: &Query) -> (Vec<String>, Option<(String, bool)>) {
        let (after, is_group) = (query.after.as_deref().unwrap_or_default(), query.is_group);
        let mut found: Vec<(String, bool)> = Vec::new();
        for key in keys.iter().filter(|key| key.starts_with(&query.prefix)) {
            if key.as_str() <= after || (is_group && key.starts_with(after)) {
                continue;
            }
            let rest = &key[query.prefix.len()..];
            let group = query.delimiter.as_ref().and_then(|delimiter| Some(rest.find(delimiter)? + delimiter.len()));
            let item = group.map_or((key.clone(), false), |len| (key[..query.prefix.len() + len].to_owned(), true));
            if found.last() != Some(&item) {
                found.push(item);
            }
        }
        let next = (found.len() > query.max).then(|| found[query.max - 1].clone());
        (found.into_iter().take(query.max).map(|(name, _)| name).collect(), next)
    }

    /// 20,000 keys in folders whose names are beginnings of one another, and pages from any place.
    #[test]
    fn random_pages_are_those_of_sorted_keys() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as usize % below
        };
        let mut keys = Vec::new();
        for number in 0..20_000 {
            let mut key = String::from("bucket/");
            (0..random(4)).for_each(|_| key += ["a/", "a-b/", "a.b/", "ab/", "ä/", "z/"][random(6)]);
            fs::create_dir_all(dir.path().join(&key)).expect("makes");
            key += ["", "a-", "b.", "ä"][random(4)];
            key += &format!("{number}");
            fs::write(dir.path().join(&key), "").expect("writes");
            keys.push(key.split_off("bucket/".len()));
        }
        keys.sort_unstable();
        let mut objects = objects(dir.path());
        objects.listings = Listings::settled_at_once();
        for _ in 0..500 {
            let mut part = || {
                let key = &keys[random(keys.len())];
                let ends: Vec<usize> = key.char_indices().map(|(at, _)| at).chain([key.len()]).collect();
                key[..ends[random(ends.len())]].to_owned()
            };
            let (prefix, after) = (part(), part());
            let prefix = if random(3) == 0 { String::new() } else { prefix };
            let delimiter = [None, Some("/"), Some("-"), Some("b/")][random(4)].map(String::from);
            let mut query = Query { prefix, delimiter, max: 1 + random(1000), ..Query::default() };
            query.after = (random(3) > 0).then_some(after);
            // The page, and the two behind it.
            for _ in 0..3 {
                let page = objects.list("bucket", &query, &|_| true).expect("lists");
                let name = |item| match item {
                    Item::Key(name, _) | Item::Group(name) => name,
                };
                let found = (page.items.into_iter().map(name).collect::<Vec<_>>(), page.next);
                assert!(found == page_of(&keys, &query), "{query:?}: {:?}", found.1);
                let Some((after, is_group)) = found.1 else { break };
                (query.after, query.is_group) = (Some(after), is_group);
            }
        }
    }

    /// Pages of 1,000 over a large directory; prints what they take: `LAMASSU_NAMES=100000 cargo test … -- --ignored`.
    #[test]
    #[ignore = "a measurement"]
    fn pages_of_a_large_directory() {
        let count = std::env::var("LAMASSU_NAMES").ok().and_then(|count| count.parse().ok()).unwrap_or(100_000);
        let dir = tempfile::tempdir().expect("a directory");
        fs::create_dir(dir.path().join("bucket")).expect("makes");
        for at in 0..count {
            fs::write(dir.path().join(format!("bucket/an-object-of-thirty-bytes-{at:07}")), "").expect("writes");
        }
        std::thread::sleep(std::time::Duration::from_secs(3));
        let objects = objects(dir.path());
        let begun = std::time::Instant::now();
        let (mut pages, mut after) = (0, None);
        loop {
            let query = Query { after, max: 1000, ..Query::default() };
            let page = objects.list("bucket", &query, &|_| true).expect("lists");
            pages += 1;
            match page.next {
                Some((next, _)) => after = Some(next),
                None => break,
            }
        }
        eprintln!("{pages} pages of {count} names: {:?}", begun.elapsed());
    }
}
