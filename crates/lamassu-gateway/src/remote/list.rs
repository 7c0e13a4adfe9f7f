//! Listings in the order of keys. A provider lists in the order of sealed names, which is unrelated to the order of
//! keys. So all names below the prefix are fetched and opened; the smallest that fit in memory are kept, sorted.
//! Further pages come from memory, until the kept names end or a page asks for newer names; then all are fetched again.
//!
//! Kept names take at most `listing_mib_max`, and all listings under way share as much again. A bucket may have more
//! names.

use super::document::Listed;
use super::error::{RemoteError, Result, cut};
use super::failures::Failures;
use super::objects::{shown, shown_at};
use super::{Remote, at_once};
use crate::objects::attrs::Shown;
use crate::objects::list::Query;
use crate::work;
use lru::LruCache;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long kept names serve further pages of the same listing. Changes by this gateway show at once, changes by others
/// after this time.
const KEPT: Duration = Duration::from_secs(60);
/// Memory of an entry besides its texts, in bytes.
const ENTRY: usize = 64;
/// Most bytes of changes that are recorded during a listing: with more, the listing serves only one page.
const CHANGES_MAX: usize = 4 << 20;
/// Number of kept listings.
const KEPT_MAX: std::num::NonZeroUsize = std::num::NonZeroUsize::new(64).unwrap();

/// An entry of a listing.
pub enum Item {
    /// An object.
    Key(String, Shown),
    /// The common part of keys up to the delimiter after the prefix.
    Group(String),
}

/// A page.
pub struct Page {
    /// in order
    pub items: Vec<Item>,
    /// start of the next page: after this key, or after this group
    pub next: Option<(String, bool)>,
}

/// A listed object: the provider's tag and time. A group has none, and neither has an object stored after the listing.
#[derive(Clone)]
struct NameEntry {
    is_group: bool,
    stored: Option<(String, String)>,
}

/// Identifies a listing: bucket, prefix, delimiter.
type Which = (String, String, Option<String>);

/// The smallest names of a listing after some name.
struct Kept {
    names: BTreeMap<String, NameEntry>,
    bytes: usize,
    /// The start of the window: all names after it are here, or if `is_cut`, all up to the last one.
    after: Option<String>,
    /// The window starts after the group `after`: no key of the group is here.
    is_group: bool,
    is_cut: bool,
    taken: Instant,
}

/// All kept listings.
pub struct Listings {
    names: Mutex<Names>,
    bytes_max: usize,
}

struct Names {
    kept: LruCache<Which, Kept>,
    /// Changes by this gateway during each listing under way, by the listing's number. The provider may have listed the
    /// state before them.
    changes: BTreeMap<u64, Changes>,
    next: u64,
}

struct Changes {
    which: Which,
    /// a key, and whether it is there
    keys: Vec<(String, bool)>,
    bytes: usize,
}

/// A listing under way.
struct Collecting<'a> {
    listings: &'a Listings,
    number: u64,
}

impl Kept {
    fn weight(name: &str, entry: &NameEntry) -> usize {
        let stored = entry.stored.as_ref().map_or(0, |(etag, modified)| etag.len() + modified.len());
        ENTRY + name.len() + stored
    }

    /// Whether all names of a page would be here, as far as it is not cut. Users share what is kept, so a window that
    /// one has asked for must not hide names from another.
    fn covers(&self, query: &Query) -> bool {
        let (Some(own), Some(asked)) = (&self.after, &query.after) else { return self.after.is_none() };
        let is_same = asked == own && query.is_group;
        own <= asked && (!self.is_group || is_same || !asked.starts_with(own))
    }

    /// Applies a change by this gateway. Returns whether the listing is still correct: when a key of a group is
    /// removed, it is unknown whether the group has others.
    fn change(&mut self, which: &Which, key: &str, is_there: bool, bytes_max: usize) -> bool {
        let (_, prefix, delimiter) = which;
        match (name_of(key, prefix, delimiter.as_deref()), is_there) {
            ((_, true), false) => return false,
            ((name, is_group), true) => self.add(name, NameEntry { is_group, stored: None }, bytes_max),
            ((name, false), false) => {
                if let Some(entry) = self.names.remove(&name) {
                    self.bytes -= Self::weight(&name, &entry);
                }
            }
        }
        // Without a name it is unknown up to where it has all of them.
        !self.is_cut || !self.names.is_empty()
    }

    fn add(&mut self, name: String, entry: NameEntry, bytes_max: usize) {
        if self.is_cut && self.names.last_key_value().is_some_and(|(last, _)| name > *last) {
            return;
        }
        self.bytes += Self::weight(&name, &entry);
        if let Some(before) = self.names.insert(name.clone(), entry) {
            self.bytes -= Self::weight(&name, &before);
        }
        while self.bytes > bytes_max && self.names.len() > 1 {
            let Some((name, entry)) = self.names.pop_last() else { break };
            self.bytes -= Self::weight(&name, &entry);
            self.is_cut = true;
        }
    }
}

impl Listings {
    pub fn new(bytes_max: usize) -> Listings {
        let names = Names { kept: LruCache::new(KEPT_MAX), changes: BTreeMap::new(), next: 0 };
        Listings { names: Mutex::new(names), bytes_max }
    }

    /// Records a change by this gateway in kept listings and in those under way.
    pub fn changed(&self, bucket: &str, key: &str, is_there: bool) {
        let Names { kept, changes, .. } = &mut *self.names.lock();
        let has = |which: &Which| which.0 == bucket && key.starts_with(which.1.as_str());
        let mut stale = Vec::new();
        for (which, kept) in kept.iter_mut().filter(|(which, _)| has(which)) {
            if !kept.change(which, key, is_there, self.bytes_max) {
                stale.push(which.clone());
            }
        }
        stale.iter().for_each(|which| drop(kept.pop(which)));
        for changes in changes.values_mut().filter(|changes| has(&changes.which)) {
            changes.bytes += ENTRY + key.len();
            if changes.bytes <= CHANGES_MAX {
                changes.keys.push((key.into(), is_there));
            }
        }
    }

    /// Begins a listing.
    fn collect(&self, which: Which) -> Collecting<'_> {
        let names = &mut *self.names.lock();
        let number = names.next;
        names.next += 1;
        names.changes.insert(number, Changes { which, keys: Vec::new(), bytes: 0 });
        Collecting { listings: self, number }
    }
}

impl Collecting<'_> {
    /// Most bytes that this listing may take at present.
    fn bytes_max(&self) -> usize {
        self.listings.bytes_max / self.listings.names.lock().changes.len().max(1)
    }

    /// Keeps a listing, and drops others until all together fit.
    fn keep(self, mut listing: Kept) {
        let bytes_max = self.listings.bytes_max;
        let names = &mut *self.listings.names.lock();
        let Some(changes) = names.changes.remove(&self.number) else { return };
        let mut keys = changes.keys.iter();
        let is_right = changes.bytes <= CHANGES_MAX
            && keys.all(|(key, is_there)| listing.change(&changes.which, key, *is_there, bytes_max));
        if !is_right {
            return;
        }
        let kept = &mut names.kept;
        kept.put(changes.which, listing);
        while kept.len() > 1 && kept.iter().map(|(_, kept)| kept.bytes).sum::<usize>() > bytes_max {
            kept.pop_lru();
        }
    }
}

impl Drop for Collecting<'_> {
    fn drop(&mut self) {
        self.listings.names.lock().changes.remove(&self.number);
    }
}

/// The name of a key in a listing, and whether it is a group.
fn name_of(key: &str, prefix: &str, delimiter: Option<&str>) -> (String, bool) {
    let rest = key.strip_prefix(prefix).unwrap_or_default();
    match delimiter.and_then(|delimiter| Some(rest.find(delimiter)? + delimiter.len())) {
        Some(len) => (key[..prefix.len() + len].to_owned(), true),
        None => (key.to_owned(), false),
    }
}

impl Remote {
    /// A page of the keys of a bucket.
    ///
    /// # Errors
    /// [`Refusal::NoBucket`]; those of the provider.
    pub fn list(&self, bucket: &str, query: &Query) -> Result<Page> {
        self.bucket(bucket)?;
        if query.max == 0 {
            return Ok(Page { items: Vec::new(), next: None });
        }
        let which = (bucket.to_owned(), query.prefix.clone(), query.delimiter.clone());
        let (entries, next) = match self.page_kept(&which, query) {
            Some(page) => page,
            None => {
                let collecting = self.listings.collect(which);
                let listing = self.collect(bucket, query, &collecting)?;
                let page = page_of(&listing, query).unwrap_or_default();
                collecting.keep(listing);
                page
            }
        };
        let damaged = Mutex::new(Failures::<String>::default());
        let shown = at_once(&entries, |(name, entry)| match self.shown(bucket, name, entry) {
            Err(RemoteError::Damaged(what)) => {
                damaged.lock().add(what);
                Ok(None)
            }
            shown => shown,
        });
        // Also if the page has failed: what is damaged is always reported.
        damaged.into_inner().tell(|count, what| {
            tracing::error!(what, count, "damaged objects at the provider are not listed; this is the first one");
        });
        Ok(Page { items: shown?.into_iter().flatten().collect(), next })
    }

    /// A page after the first, from kept names; `None`: they do not have it.
    fn page_kept(&self, which: &Which, query: &Query) -> Option<Entries> {
        query.after.as_ref()?;
        let mut names = self.listings.names.lock();
        let listing = names.kept.get(which).filter(|kept| kept.taken.elapsed() < KEPT)?;
        listing.covers(query).then(|| page_of(listing, query)).flatten()
    }

    /// Fetches all names after the page's start, or the smallest of them.
    fn collect(&self, bucket: &str, query: &Query, collecting: &Collecting<'_>) -> Result<Kept> {
        let mut opener = self.opener(bucket);
        let sealed = opener.sealed_prefix(&query.prefix);
        let grouped = query.delimiter.as_deref() == Some("/");
        let (after, is_group, taken) = (query.after.clone(), query.is_group, Instant::now());
        let mut listing = Kept { names: BTreeMap::new(), bytes: 0, after, is_group, is_cut: false, taken };
        let marker = self.name(&self.marker(bucket));
        let mut foreign = Failures::<String>::default();
        let collected = self.client.pages(&sealed, grouped, |page| {
            let bytes_max = collecting.bytes_max();
            let keys = page.objects.into_iter().map(|Listed { name, stored }| (name, stored));
            for (name, stored) in keys.chain(page.prefixes.into_iter().map(|prefix| (prefix, None))) {
                let Some(key) = opener.key(&name) else {
                    if name != marker {
                        foreign.add(cut(&name));
                    }
                    continue;
                };
                if !key.starts_with(&query.prefix) || is_behind(&key, query) {
                    continue;
                }
                let (shown, is_group) = name_of(&key, &query.prefix, query.delimiter.as_deref());
                let stored = stored.filter(|_| !is_group);
                listing.add(shown, NameEntry { is_group, stored }, bytes_max);
            }
            Ok(())
        });
        foreign.tell(|count, name| {
            tracing::warn!(name, count, "objects that are none of the vault's are not listed; this is the first one");
        });
        collected.map(|()| listing)
    }

    /// The item of an entry; `None` if the object is gone by now.
    fn shown(&self, bucket: &str, name: &str, entry: &NameEntry) -> Result<Option<Item>> {
        if entry.is_group {
            return Ok(Some(Item::Group(name.into())));
        }
        work::wanted(RemoteError::GivenUp)?;
        let place = self.place(bucket, name)?;
        if let Some((etag, modified)) = &entry.stored
            && let Some(properties) = self.known(&place, etag)
        {
            let shown = shown_at(etag, modified, &properties);
            return Ok(Some(Item::Key(name.into(), shown)));
        }
        match self.found(&place) {
            Ok((found, properties)) => Ok(Some(Item::Key(name.into(), shown(&found, &properties)))),
            Err(RemoteError::Missing(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Entries of a page, and where the next one begins.
type Entries = (Vec<(String, NameEntry)>, Option<(String, bool)>);

/// Whether a key lies before a page's start.
fn is_behind(key: &str, query: &Query) -> bool {
    query.after.as_deref().is_some_and(|after| key <= after || (query.is_group && key.starts_with(after)))
}

/// A page from kept names; `None`: the kept names end before the page is full, and there may be more.
fn page_of(listing: &Kept, query: &Query) -> Option<Entries> {
    use std::ops::Bound::{Excluded, Unbounded};
    let from = query.after.as_deref().map_or(Unbounded, Excluded);
    let mut names = listing.names.range::<str, _>((from, Unbounded)).filter(|(name, _)| !is_behind(name, query));
    let page: Vec<(String, NameEntry)> =
        names.by_ref().take(query.max).map(|(name, entry)| (name.clone(), entry.clone())).collect();
    let is_more = names.next().is_some() || listing.is_cut;
    if page.is_empty() && is_more {
        return None;
    }
    let next = page.last().filter(|_| is_more).map(|(name, entry)| (name.clone(), entry.is_group));
    Some((page, next))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(names: &[&str], bytes_max: usize) -> Kept {
        let (after, taken) = (None, Instant::now());
        let mut kept = Kept { names: BTreeMap::new(), bytes: 0, after, is_group: false, is_cut: false, taken };
        for name in names {
            kept.add((*name).into(), NameEntry { is_group: name.ends_with('/'), stored: None }, bytes_max);
        }
        kept
    }

    /// Those between its last name and the new one are unknown.
    #[test]
    fn a_listing_that_was_cut_off_and_has_no_name_left_is_not_kept() {
        let which = ("b".to_owned(), String::new(), None);
        let mut cut = kept(&["a", "b", "c", "d"], 2 * (ENTRY + 1));
        assert!(cut.is_cut && cut.change(&which, "a", false, usize::MAX));
        assert!(!cut.change(&which, "b", false, usize::MAX));
        let mut whole = kept(&["a"], usize::MAX);
        assert!(whole.change(&which, "a", false, usize::MAX) && whole.change(&which, "z", true, usize::MAX));
    }

    fn names(entries: &Entries) -> Vec<&str> {
        entries.0.iter().map(|(name, _)| name.as_str()).collect()
    }

    #[test]
    fn pages_go_on_behind_keys_and_groups() {
        let listing = kept(&["b", "a", "g/", "g0", "c"], usize::MAX);
        let query = |after: Option<&str>, is_group, max| Query {
            after: after.map(String::from),
            is_group,
            max,
            ..Query::default()
        };
        let page = page_of(&listing, &query(None, false, 2)).expect("there");
        assert_eq!((names(&page), page.1.clone()), (vec!["a", "b"], Some(("b".into(), false))));
        let page = page_of(&listing, &query(Some("b"), false, 2)).expect("there");
        assert_eq!((names(&page), page.1.clone()), (vec!["c", "g/"], Some(("g/".into(), true))));
        let page = page_of(&listing, &query(Some("g/"), true, 2)).expect("there");
        assert_eq!((names(&page), page.1.clone()), (vec!["g0"], None));
    }

    /// However the group of a window was chosen: an empty one has all keys.
    #[test]
    fn a_window_behind_a_group_serves_no_page_that_begins_in_the_group() {
        let query = |after: Option<&str>, is_group| Query {
            after: after.map(String::from),
            is_group,
            max: 10,
            ..Query::default()
        };
        let window = |after: &str, is_group| {
            let (mut kept, asked) = (kept(&[], usize::MAX), query(Some(after), is_group));
            (kept.after, kept.is_group) = (asked.after.clone(), is_group);
            for name in ["g/1", "g/2", "g0", "k2"] {
                if !is_behind(name, &asked) {
                    kept.add(name.into(), NameEntry { is_group: false, stored: None }, usize::MAX);
                }
            }
            kept
        };
        let of_all = window("", true);
        assert!(of_all.names.is_empty() && !of_all.is_cut);
        assert!(!of_all.covers(&query(Some("k1"), false)) && !of_all.covers(&query(Some("g/"), true)));
        let of_one = window("g/", true);
        assert!(!of_one.covers(&query(Some("g/1"), false)) && !of_one.covers(&query(Some("g/"), false)));
        assert!(!of_one.covers(&query(None, false)) && !of_one.covers(&query(Some("f"), false)));
        for asked in [query(Some("g/"), true), query(Some("g0"), false), query(Some("k1"), false)] {
            assert!(of_one.covers(&asked));
            let page = page_of(&of_one, &asked).expect("there");
            assert_eq!(names(&page).last(), Some(&"k2"), "{asked:?}");
        }
        let of_a_key = window("g/", false);
        assert!(of_a_key.covers(&query(Some("g/1"), false)) && of_a_key.covers(&query(Some("g/"), true)));
        assert!(!of_a_key.covers(&query(Some("f"), false)));
        let whole = kept(&["a"], usize::MAX);
        assert!(whole.covers(&query(Some("a"), false)) && whole.covers(&query(Some(""), true)));
    }

    #[test]
    fn the_smallest_names_are_kept() {
        let listing = kept(&["d", "a", "c", "b", "e"], 2 * (ENTRY + 1));
        assert!(listing.is_cut && listing.bytes <= 2 * (ENTRY + 1));
        let query = Query { max: 5, ..Query::default() };
        let page = page_of(&listing, &query).expect("there");
        assert_eq!((names(&page), page.1.clone()), (vec!["a", "b"], Some(("b".into(), false))));
        let query = Query { after: Some("b".into()), max: 5, ..Query::default() };
        assert!(page_of(&listing, &query).is_none(), "there may be more");
    }

    #[test]
    fn names_are_grouped() {
        assert_eq!(name_of("a/b/c", "a/", Some("/")), ("a/b/".into(), true));
        assert_eq!(name_of("a/b", "a/", Some("/")), ("a/b".into(), false));
        assert_eq!(name_of("a//b", "", Some("//")), ("a//".into(), true));
        assert_eq!(name_of("a/b", "a/b", Some("/")), ("a/b".into(), false));
    }

    #[test]
    fn what_is_changed_while_a_listing_is_under_way_is_in_it() {
        let listings = Listings::new(1 << 20);
        let which = |prefix: &str| ("b".to_owned(), prefix.to_owned(), Some("/".to_owned()));
        let listed = |which: &Which| {
            let names = listings.names.lock();
            names.kept.peek(which).map(|kept| kept.names.keys().cloned().collect::<Vec<_>>())
        };
        let collecting = listings.collect(which(""));
        assert_eq!(collecting.bytes_max(), 1 << 20);
        let other = listings.collect(which("x/"));
        assert_eq!(collecting.bytes_max(), 1 << 19);
        for (key, is_there) in [("new", true), ("gone", false), ("x/1", true)] {
            listings.changed("b", key, is_there);
            listings.changed("another", key, !is_there);
        }
        collecting.keep(kept(&["a", "gone"], usize::MAX));
        assert_eq!(listed(&which("")).expect("kept"), ["a", "new", "x/"]);
        listings.changed("b", "x/2/3", false);
        other.keep(kept(&["x/2/"], usize::MAX));
        assert_eq!(listed(&which("x/")), None, "whether the group has other keys is not known");
        assert_eq!(listed(&which("")), None);
        assert!(listings.names.lock().changes.is_empty());
        drop(listings.collect(which("")));
        assert!(listings.names.lock().changes.is_empty());
    }

    #[test]
    fn changes_of_which_there_are_too_many_are_not_remembered() {
        let listings = Listings::new(1 << 20);
        let which = ("b".to_owned(), String::new(), None);
        let collecting = listings.collect(which.clone());
        let key = "k".repeat(1000);
        (0..=CHANGES_MAX / 1000).for_each(|_| listings.changed("b", &key, true));
        assert!(listings.names.lock().changes[&0].keys.len() <= CHANGES_MAX / 1000);
        collecting.keep(kept(&["a"], usize::MAX));
        assert!(listings.names.lock().kept.peek(&which).is_none());
    }
}
