//! Listings: the keys of a bucket in the order of their bytes, page by page.
//!
//! A walk over names of directories, in the order in which they appear in keys, yields keys in their order. It holds
//! some names of each directory on its path, which are a few MiB together, however large directories are.

use super::attrs::{Attrs, is_of_one_object};
use super::key::{KEY_MAX, Key};
use super::names::{Listings, Names, unless_closed};
use super::node::Node;
use super::{Object, Objects, Result};
use std::ffi::OsStr;

/// Bytes of names that a walk holds. Half of what is left is for the next directory on its path, but never less than
/// what [`WINDOW_MIN`] says.
const WALK_MAX: usize = 2 << 20;
const WINDOW_MIN: usize = 4 << 10;

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
    /// An object.
    Key(String, Object),
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
    /// The last group that was found.
    group: Option<String>,
    may_list: &'a dyn Fn(&str) -> bool,
    /// Bytes of names that it may hold still.
    left: usize,
}

/// What names of a directory are to a page.
enum Passed {
    /// They were all passed.
    All,
    /// None of those behind belongs to the listing.
    Enough,
    /// The page is full.
    Full,
}

/// The folder that a prefix asks for: up to its last slash.
pub fn folder_of(prefix: &str) -> &str {
    prefix.rfind('/').map_or("", |slash| &prefix[..=slash])
}

impl Objects {
    /// A page of a listing. Of a folder that the caller may not list, by its path with a slash at its end, nothing is
    /// in it.
    ///
    /// # Errors
    /// [`super::Refusal::NoBucket`]; those of the vault.
    pub fn list(&self, bucket: &str, query: &Query, may_list: &dyn Fn(&str) -> bool) -> Result<Page> {
        let bucket = self.bucket(bucket)?;
        let mut walk =
            Walk { listings: &self.listings, query, page: Page::default(), group: None, may_list, left: WALK_MAX };
        if query.max > 0 {
            walk.dir(&bucket, "")?;
        }
        Ok(walk.page)
    }
}

impl<'a> Walk<'a> {
    /// Walks through a directory, whose keys begin with `path`. Returns whether the page has room for more.
    fn dir(&mut self, dir: &Node, path: &str) -> Result<bool> {
        // Those above the prefix are only passed through.
        if path.starts_with(folder_of(&self.query.prefix)) && !(self.may_list)(path) {
            return Ok(true);
        }
        if let Some(name) = self.name_above(path) {
            let full = format!("{path}{name}");
            // What is no key has no folder.
            return if Key::parse(&full).is_ok() { self.entry(dir, &full, name) } else { Ok(true) };
        }
        let mut from = self.begin(path).to_owned();
        loop {
            let found = self.listings.of(dir, &from, (self.left / 2).max(WINDOW_MIN));
            let found = if path.is_empty() { found.map(Some) } else { unless_closed(found) };
            let Some(names) = found? else { return Ok(true) };
            let left = self.left;
            self.left = left.saturating_sub(names.bytes());
            let passed = self.names(dir, path, &names, &from);
            self.left = left;
            match (passed?, names.next()) {
                (Passed::Full, _) => return Ok(false),
                (Passed::All, Some(next)) => from = next,
                (Passed::Enough, _) | (Passed::All, None) => return Ok(true),
            }
        }
    }

    /// The one name in a directory that leads to the folder of the prefix, if that is further below.
    fn name_above(&self, path: &str) -> Option<&'a str> {
        let rest = self.query.prefix.strip_prefix(path)?;
        rest.find('/').map(|slash| &rest[..=slash])
    }

    fn names(&mut self, dir: &Node, path: &str, names: &Names, from: &str) -> Result<Passed> {
        let mut full = String::with_capacity(KEY_MAX);
        for at in names.first(from)..names.len() {
            let name = names.get(at);
            full.clear();
            full.push_str(path);
            full.push_str(name);
            let prefix = &*self.query.prefix;
            if !full.starts_with(prefix) {
                // Names with a common prefix are adjacent.
                if &*full > prefix { return Ok(Passed::Enough) } else { continue }
            }
            if full.len() <= KEY_MAX && !self.entry(dir, &full, name)? {
                return Ok(Passed::Full);
            }
        }
        Ok(Passed::All)
    }

    /// Names before this one in a directory do not belong to the page.
    fn begin(&self, path: &str) -> &'a str {
        // A directory that contains the limit is included: its name ends where the limit's first part does.
        let bound = |limit: &'a str| match limit.strip_prefix(path) {
            Some(rest) => &rest[..rest.find('/').map_or(rest.len(), |slash| slash + 1)],
            None => "",
        };
        self.query.after.as_deref().map_or("", bound).max(bound(&self.query.prefix))
    }

    fn entry(&mut self, dir: &Node, full: &str, name: &str) -> Result<bool> {
        let is_dir = name.ends_with('/');
        if self.is_past(full, is_dir) {
            return Ok(true);
        }
        if let Some(group) = self.group_of(full) {
            return Ok(self.add_group(group));
        }
        let found = match dir.child_if_there(OsStr::new(name.trim_end_matches('/'))) {
            Err(error) if is_of_one_object(&error) => {
                tracing::warn!(%error, "an object is damaged, and is left out of a listing");
                return Ok(true);
            }
            found => unless_closed(found.map_err(Into::into))?.flatten(),
        };
        let node = match found {
            Some(node) if node.is_dir() == is_dir => node,
            _ => return Ok(true),
        };
        if !is_dir {
            return self.add_key(full, node);
        }
        let is_asked = full.starts_with(&*self.query.prefix) && self.is_behind(full);
        let is_object = is_asked && unless_closed(Attrs::are_of(&node).map_err(Into::into))?.unwrap_or(false);
        if is_object && !self.add_key(full, node.clone())? {
            return Ok(false);
        }
        self.dir(&node, full)
    }

    /// Whether all of it belongs to earlier pages.
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

    fn add_group(&mut self, group: String) -> bool {
        let is_met = self.group.as_ref() == Some(&group);
        let is_past = self.query.is_group && self.query.after.as_ref() == Some(&group);
        if is_met || is_past {
            return true;
        }
        if self.is_full() {
            return false;
        }
        self.group = Some(group.clone());
        self.page.items.push(Item::Group(group));
        true
    }

    fn add_key(&mut self, full: &str, node: Node) -> Result<bool> {
        if self.is_full() {
            return Ok(false);
        }
        let attrs = Attrs::listed(&node)?;
        self.page.items.push(Item::Key(full.into(), Object { node, attrs }));
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::Modes;
    use lamassu_plain::PlainFs;
    use lamassu_vault::Owner;
    use std::fs;
    use std::path::Path;
    use std::sync::Arc;

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

    /// Like the `lost+found` of a file system that is a tenant's own.
    #[test]
    fn a_directory_that_may_not_be_looked_into_has_nothing() {
        use std::os::unix::fs::{PermissionsExt, chown};
        let dir = tempfile::tempdir().expect("a directory");
        let bucket = dir.path().join("bucket");
        fs::create_dir_all(bucket.join("lost+found/x")).expect("makes");
        fs::create_dir(bucket.join("z")).expect("makes");
        ["a", "lost+found/y", "z/1"].iter().for_each(|key| fs::write(bucket.join(key), "").expect("writes"));
        if rustix::process::geteuid().is_root() {
            for path in ["", "bucket", "bucket/a", "bucket/z", "bucket/z/1"] {
                chown(dir.path().join(path), Some(65534), Some(65534)).expect("chown");
            }
        }
        fs::set_permissions(bucket.join("lost+found"), PermissionsExt::from_mode(0o000)).expect("chmod");
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
            let key = Key::parse("lost+found/").expect("a key");
            let found = objects.find("bucket", &key);
            assert!(matches!(found, Err(super::super::ObjectError::Refused(super::super::Refusal::NoKey))));
        });
        fs::set_permissions(bucket.join("lost+found"), PermissionsExt::from_mode(0o700)).expect("chmod");
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
