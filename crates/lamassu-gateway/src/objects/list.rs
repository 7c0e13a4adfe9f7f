//! Listings: the keys of a bucket in the order of their bytes, page by page.
//!
//! A directory's names are sorted as they stand in keys: a directory with its slash. Then a walk in that order meets
//! keys in theirs. Names of a large directory are kept for the next page, as long as the directory was not changed.

use super::attrs::Attrs;
use super::key::{self, KEY_MAX};
use super::node::Node;
use super::{Objects, Result};
use lamassu_vault::{FileSystem, Ino, Kind, Time, VaultError};
use lru::LruCache;
use parking_lot::Mutex;
use std::ffi::OsStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Directories with fewer names are listed anew each time.
const KEPT_MIN: usize = 256;
/// A directory that was changed so lately may change again without another time.
const SETTLED: Duration = Duration::from_secs(2);

/// What a listing asks for.
#[derive(Clone, Debug, Default)]
pub struct Query {
    /// keys that begin so
    pub prefix: String,
    /// what keys are grouped at
    pub delimiter: Option<String>,
    /// keys behind this one alone
    pub after: Option<String>,
    /// and behind all that begin with that
    pub is_group: bool,
    /// so many keys and groups
    pub max: usize,
}

/// An entry of a listing.
pub enum Item {
    /// An object.
    Key(String, Node, Attrs),
    /// What keys begin with that have the delimiter behind the prefix.
    Group(String),
}

/// A page.
#[derive(Default)]
pub struct Page {
    /// in order
    pub items: Vec<Item>,
    /// where the next page begins: behind this key, or behind this group
    pub next: Option<(String, bool)>,
}

/// Names in a directory, each with what it is, in the order of keys.
struct Names {
    text: String,
    /// Where each begins; its end is the next one's begin. A directory's name ends with a slash.
    starts: Vec<u32>,
}

impl Names {
    fn of(dir: &Node) -> Result<Names> {
        let mut names: Vec<String> = Vec::new();
        dir.list(&mut |name, kind| {
            let Some(name) = key::shown(name) else { return };
            match kind {
                Kind::File => names.push(name.into()),
                Kind::Dir => names.push(format!("{name}/")),
                Kind::Symlink | Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => {}
            }
        })?;
        names.sort_unstable();
        let mut starts = Vec::with_capacity(names.len());
        let mut text = String::with_capacity(names.iter().map(String::len).sum());
        for name in names {
            starts.push(u32::try_from(text.len()).map_err(|_| VaultError::NameTooLong)?);
            text.push_str(&name);
        }
        Ok(Names { text, starts })
    }

    fn len(&self) -> usize {
        self.starts.len()
    }

    fn get(&self, at: usize) -> &str {
        let end = self.starts.get(at + 1).map_or(self.text.len(), |end| *end as usize);
        &self.text[self.starts[at] as usize..end]
    }

    fn bytes(&self) -> usize {
        self.text.len() + self.starts.len() * size_of::<u32>()
    }

    /// The first that `is_before` does not hold of.
    fn first(&self, is_before: impl Fn(&str) -> bool) -> usize {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            match is_before(self.get(middle)) {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        low
    }
}

struct Kept {
    times: (Time, Time),
    names: Arc<Names>,
}

/// Names that are kept.
pub(super) struct Listings {
    kept: Mutex<(LruCache<Ino, Kept>, usize)>,
    bytes_max: usize,
}

impl Listings {
    pub(super) fn new(bytes_max: usize) -> Listings {
        Listings { kept: Mutex::new((LruCache::unbounded(), 0)), bytes_max }
    }

    fn of(&self, dir: &Node) -> Result<Arc<Names>> {
        let attr = dir.fs().getattr(dir.ino(), None)?;
        let times = (attr.mtime, attr.ctime);
        if let Some(kept) = self.kept.lock().0.get(&dir.ino())
            && kept.times == times
        {
            return Ok(kept.names.clone());
        }
        let names = Arc::new(Names::of(dir)?);
        if names.len() >= KEPT_MIN && is_settled(attr.mtime) && is_settled(attr.ctime) {
            self.keep(dir.ino(), Kept { times, names: names.clone() });
        }
        Ok(names)
    }

    fn keep(&self, ino: Ino, new: Kept) {
        let (kept, bytes) = &mut *self.kept.lock();
        *bytes += new.names.bytes();
        if let Some(old) = kept.put(ino, new) {
            *bytes -= old.names.bytes();
        }
        while *bytes > self.bytes_max
            && let Some((_, old)) = kept.pop_lru()
        {
            *bytes -= old.names.bytes();
        }
    }
}

fn is_settled(time: Time) -> bool {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let then = Duration::new(u64::try_from(time.seconds).unwrap_or(0), time.nanos);
    since.checked_sub(then).is_some_and(|age| age > SETTLED)
}

/// A walk over a bucket.
struct Walk<'a> {
    listings: &'a Listings,
    query: &'a Query,
    page: Page,
    /// The last group that was met.
    group: Option<String>,
}

impl Objects {
    /// A page of a listing.
    ///
    /// # Errors
    /// [`super::ObjectError::NoBucket`]; those of the vault.
    pub fn list(&self, bucket: &str, query: &Query) -> Result<Page> {
        let bucket = self.bucket(bucket)?;
        let mut walk = Walk { listings: &self.listings, query, page: Page::default(), group: None };
        if query.max > 0 {
            walk.dir(&bucket, "")?;
        }
        Ok(walk.page)
    }
}

impl Walk<'_> {
    /// Goes through a directory, whose keys begin with `path`. Whether there is room for more.
    fn dir(&mut self, dir: &Node, path: &str) -> Result<bool> {
        let names = match self.listings.of(dir) {
            // It was removed since.
            Err(super::ObjectError::Vault(VaultError::NotFound | VaultError::Stale)) if !path.is_empty() => {
                return Ok(true);
            }
            names => names?,
        };
        let mut full = String::with_capacity(KEY_MAX);
        for at in self.begin(&names, path)..names.len() {
            let name = names.get(at);
            full.clear();
            full.push_str(path);
            full.push_str(name);
            let prefix = &*self.query.prefix;
            let is_above = full.ends_with('/') && prefix.starts_with(&*full);
            if !is_above && !full.starts_with(prefix) {
                // The names that begin so lie side by side.
                if &*full > prefix { break } else { continue }
            }
            if full.len() <= KEY_MAX && !self.entry(dir, &full, name)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The first name in a directory that has something for this page.
    fn begin(&self, names: &Names, path: &str) -> usize {
        // A directory that the limit lies in is met, too: its name ends where the limit's first one does.
        let bound = |limit: &str| match limit.strip_prefix(path) {
            Some(rest) => {
                let name_end = rest.find('/').map_or(rest.len(), |slash| slash + 1);
                names.first(|name| name < &rest[..name_end])
            }
            None => 0,
        };
        let after = self.query.after.as_deref().map_or(0, bound);
        after.max(bound(&self.query.prefix))
    }

    fn entry(&mut self, dir: &Node, full: &str, name: &str) -> Result<bool> {
        let is_dir = name.ends_with('/');
        if self.is_past(full, is_dir) {
            return Ok(true);
        }
        if let Some(group) = self.group_of(full) {
            return Ok(self.add_group(group));
        }
        let node = match dir.child_if_there(OsStr::new(name.trim_end_matches('/')))? {
            Some(node) if node.is_dir() == is_dir => node,
            _ => return Ok(true),
        };
        if !is_dir {
            return self.add_key(full, node);
        }
        let is_object = full.starts_with(&*self.query.prefix) && self.is_behind(full) && Attrs::are_of(&node)?;
        if is_object && !self.add_key(full, node.clone())? {
            return Ok(false);
        }
        self.dir(&node, full)
    }

    /// Whether nothing of it belongs to this page: the pages before had it.
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
        let attrs = Attrs::of(&node)?;
        self.page.items.push(Item::Key(full.into(), node, attrs));
        Ok(true)
    }
}
