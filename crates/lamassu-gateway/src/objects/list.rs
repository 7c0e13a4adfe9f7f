//! Listings: the keys of a bucket in the order of their bytes, page by page.
//!
//! A directory's names are sorted as they appear in keys: a directory with its slash. A walk in that order then yields
//! keys in their order. Names of a large directory are kept for the next page, unless the directory was changed.

use super::attrs::Attrs;
use super::key::{self, KEY_MAX};
use super::node::Node;
use super::{Object, Objects, Result};
use lamassu_vault::{Ino, Kind, Time, VaultError};
use lru::LruCache;
use parking_lot::Mutex;
use std::ffi::OsStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Directories with fewer names are read again for each page.
const KEPT_MIN: usize = 256;
/// A directory changed more recently than this may change again with the same time.
const SETTLED: Duration = Duration::from_secs(2);

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

/// Names in a directory, with their kinds, in the order of keys.
struct Names {
    text: String,
    /// Start of each name; the next start is its end. A directory's name ends with a slash.
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

    /// The first position for which `is_before` is false.
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

/// Names kept for the next page.
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
    /// The last group that was found.
    group: Option<String>,
    may_list: &'a dyn Fn(&str) -> bool,
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
        let mut walk = Walk { listings: &self.listings, query, page: Page::default(), group: None, may_list };
        if query.max > 0 {
            walk.dir(&bucket, "")?;
        }
        Ok(walk.page)
    }
}

impl Walk<'_> {
    /// Walks through a directory, whose keys begin with `path`. Returns whether the page has room for more.
    fn dir(&mut self, dir: &Node, path: &str) -> Result<bool> {
        // Those above the prefix are only passed through.
        if path.starts_with(folder_of(&self.query.prefix)) && !(self.may_list)(path) {
            return Ok(true);
        }
        let names = match self.listings.of(dir) {
            // It was removed meanwhile.
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
                // Names with a common prefix are adjacent.
                if &*full > prefix { break } else { continue }
            }
            if full.len() <= KEY_MAX && !self.entry(dir, &full, name)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The position of the first name in a directory that belongs to this page.
    fn begin(&self, names: &Names, path: &str) -> usize {
        // A directory that contains the limit is included: its name ends where the limit's first part does.
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
        let attrs = Attrs::of(&node)?;
        self.page.items.push(Item::Key(full.into(), Object { node, attrs }));
        Ok(true)
    }
}
