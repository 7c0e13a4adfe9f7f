//! Names in directories, in the order in which they appear in keys: a directory's name includes its slash.
//!
//! A directory can have more names than fit in memory. So names are read in *windows*: consecutive names from a start
//! name on, as many as fit. Windows of large directories are kept for the next page, unless the directory has changed.
//! Reading a window means reading the whole directory. So a new window ends where a kept one begins, and kept windows
//! cover more and more of the directory, in any order of pages.

use super::key;
use super::node::Node;
use super::{ObjectError, Result};
use crate::work;
use lamassu_vault::{Ino, Kind, Time, VaultError};
use lru::LruCache;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// A directory of fewer names is read again for each page.
const KEPT_MIN: usize = 256;
/// A directory changed more recently than this may change again with the same time.
const SETTLED: Duration = Duration::from_secs(2);

/// Names in a directory.
pub(super) struct Names {
    /// the window's start: no earlier name is in it
    from: String,
    text: String,
    /// Start of each name; the next start is its end. A directory's name ends with a slash.
    starts: Vec<u32>,
    /// the window's end: all names before it, from `from` on, are here; `None`: up to the last name
    until: Option<String>,
    /// whether the directory is so large that keeping names costs less than reading it again
    is_of_many: bool,
}

impl Names {
    /// Reads the names from `from` on, up to `max` bytes, but at least one. It takes about four times as much memory
    /// meanwhile.
    pub fn read(dir: &Node, from: &str, max: usize) -> Result<Names> {
        let mut collected = Collected { from, max, text: String::new(), spans: Vec::new(), cut: None };
        let mut count = 0;
        dir.list(&mut |name, kind| {
            count += 1;
            let Some(name) = key::shown(name) else { return };
            match kind {
                Kind::File => collected.add(name, ""),
                Kind::Dir => collected.add(name, "/"),
                Kind::Symlink | Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => {}
            }
        })?;
        collected.cut();
        let starts = collected.spans.iter().map(|(start, _)| *start).collect();
        // The smallest text behind the last. No name has a zero byte.
        let until = collected.cut.map(|last| last + "\0");
        Ok(Names { from: from.into(), text: collected.text, starts, until, is_of_many: count >= KEPT_MIN })
    }

    pub fn len(&self) -> usize {
        self.starts.len()
    }

    pub fn get(&self, at: usize) -> &str {
        let end = self.starts.get(at + 1).map_or(self.text.len(), |end| *end as usize);
        &self.text[self.starts[at] as usize..end]
    }

    pub fn bytes(&self) -> usize {
        self.text.len() + self.starts.len() * size_of::<u32>()
    }

    /// The first position whose name is not before `from`.
    pub fn first(&self, from: &str) -> usize {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            match self.get(middle) < from {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        low
    }

    /// The start of the next window; `None`: there is none.
    pub fn next(&self) -> Option<&str> {
        self.until.as_deref()
    }

    /// Whether this window contains the first name at or after `from`, provided it is before the next window.
    fn has(&self, from: &str) -> bool {
        *self.from <= *from && self.until.as_deref().is_none_or(|until| from < until)
    }

    /// The part of the window before a name.
    fn before(&self, end: &str) -> Names {
        let count = self.first(end);
        let bytes = self.starts.get(count).map_or(self.text.len(), |start| *start as usize);
        let (from, text, starts) = (self.from.clone(), self.text[..bytes].into(), self.starts[..count].into());
        Names { from, text, starts, until: Some(end.into()), is_of_many: self.is_of_many }
    }

    /// Bytes of memory that a kept window takes.
    fn memory(&self) -> usize {
        self.bytes() + size_of::<Names>() + self.from.len() + self.until.as_ref().map_or(0, String::len)
    }
}

/// The smallest names met so far, in no order.
struct Collected<'a> {
    from: &'a str,
    max: usize,
    text: String,
    /// start and length of each
    spans: Vec<(u32, u32)>,
    /// Names behind this one are not collected.
    cut: Option<String>,
}

impl Collected<'_> {
    fn add(&mut self, name: &str, slash: &str) {
        let start = self.text.len();
        self.text.push_str(name);
        self.text.push_str(slash);
        let full = &self.text[start..];
        if full < self.from || self.cut.as_deref().is_some_and(|cut| full > cut) {
            self.text.truncate(start);
            return;
        }
        // Both are less than twice `max` and a name.
        self.spans.push((start as u32, full.len() as u32));
        if self.text.len() + self.spans.len() * size_of::<(u32, u32)>() > 2 * self.max {
            self.cut();
        }
    }

    /// Sorts the names and drops those beyond the limit.
    fn cut(&mut self) {
        let name = |(start, len): (u32, u32)| &self.text[start as usize..(start + len) as usize];
        self.spans.sort_unstable_by(|one, other| name(*one).cmp(name(*other)));
        let mut left = self.max;
        let fits = |(_, len): &&(u32, u32)| {
            let is_first = left == self.max;
            let rest = left.checked_sub(*len as usize + size_of::<u32>());
            left = rest.unwrap_or(0);
            rest.is_some() || is_first
        };
        let kept = self.spans.iter().take_while(fits).count();
        let mut text = String::with_capacity(self.text.len().min(self.max));
        let mut spans = Vec::with_capacity(kept);
        for span in &self.spans[..kept] {
            spans.push((text.len() as u32, span.1));
            text.push_str(name(*span));
        }
        if kept < self.spans.len() {
            self.cut = self.spans[..kept].last().map(|last| name(*last).to_owned());
        }
        (self.text, self.spans) = (text, spans);
    }
}

/// Windows of a directory, as it was at these times.
struct Kept {
    times: (Time, Time),
    windows: Vec<Arc<Names>>,
}

impl Kept {
    fn bytes(&self) -> usize {
        self.windows.iter().map(|names| names.memory()).sum()
    }
}

/// Windows kept for the next page.
pub(super) struct Listings {
    kept: Mutex<(LruCache<Ino, Kept>, usize)>,
    bytes_max: usize,
    /// A directory changed more recently than this may change again with the same time.
    settled: Duration,
}

impl Listings {
    pub fn new(bytes_max: usize) -> Listings {
        Listings { kept: Mutex::new((LruCache::unbounded(), 0)), bytes_max, settled: SETTLED }
    }

    #[cfg(test)]
    pub fn settled_at_once() -> Listings {
        Listings { settled: Duration::ZERO, ..Listings::new(64 << 20) }
    }

    /// How many windows of a directory are kept.
    #[cfg(test)]
    pub fn kept_of(&self, dir: Ino) -> usize {
        self.kept.lock().0.peek(&dir).map_or(0, |kept| kept.windows.len())
    }

    /// Names of a directory from `from` on, in `max` bytes.
    pub fn of(&self, dir: &Node, from: &str, max: usize) -> Result<Arc<Names>> {
        let attr = dir.fs().getattr(dir.ino(), None)?;
        let times = (attr.mtime, attr.ctime);
        if let Some(kept) = self.kept.lock().0.get(&dir.ino()).filter(|kept| kept.times == times)
            && let Some(names) = kept.windows.iter().find(|names| names.has(from) && names.bytes() <= max)
        {
            return Ok(names.clone());
        }
        work::wanted(VaultError::Stale)?;
        let names = Arc::new(Names::read(dir, from, max)?);
        if names.is_of_many && self.is_settled(attr.mtime) && self.is_settled(attr.ctime) {
            self.keep(dir.ino(), times, names.clone());
        }
        Ok(names)
    }

    fn keep(&self, ino: Ino, times: (Time, Time), mut names: Arc<Names>) {
        let (kept, bytes) = &mut *self.kept.lock();
        let mut new = Kept { times, windows: Vec::new() };
        if let Some(old) = kept.pop(&ino) {
            *bytes -= old.bytes();
            if old.times == times {
                new = old;
            }
        }
        // Another request may have read it meanwhile.
        let is_new = !new.windows.iter().any(|one| one.from == names.from && one.bytes() <= names.bytes());
        if is_new {
            let behind = new.windows.iter().map(|one| &*one.from).filter(|from| **from > *names.from);
            if let Some(next) = behind.min().filter(|next| names.has(next)) {
                names = Arc::new(names.before(next));
            }
            new.windows.push(names);
        }
        *bytes += new.bytes();
        kept.put(ino, new);
        self.shrink(kept, bytes);
    }

    /// Frees memory: first directories that were not asked for, then the oldest windows of the remaining one.
    fn shrink(&self, kept: &mut LruCache<Ino, Kept>, bytes: &mut usize) {
        while *bytes > self.bytes_max {
            let of_last = if kept.len() == 1 { kept.peek_lru().map(|(ino, _)| *ino) } else { None };
            match of_last.and_then(|ino| kept.get_mut(&ino)).filter(|last| last.windows.len() > 1) {
                Some(last) => *bytes -= last.windows.remove(0).memory(),
                None => match kept.pop_lru() {
                    Some((_, old)) => *bytes -= old.bytes(),
                    None => return,
                },
            }
        }
    }

    fn is_settled(&self, time: Time) -> bool {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let then = Duration::new(u64::try_from(time.seconds).unwrap_or(0), time.nanos);
        since.checked_sub(then).is_some_and(|age| age >= self.settled)
    }
}

/// Maps an entry that the gateway's user may not enter (such as `lost+found` of a file system) to `None`. Clients see
/// nothing there; nothing may be removed because of it.
pub(super) fn unless_closed<T>(found: Result<T>) -> Result<Option<T>> {
    /// EACCES.
    const CLOSED: i32 = 13;
    match found {
        Err(ObjectError::Vault(VaultError::Io { source, .. })) if source.raw_os_error() == Some(CLOSED) => Ok(None),
        found => found.map(Some),
    }
}

/// The same, and also `None` for an entry that was removed meanwhile.
pub(super) fn unless_gone<T>(found: Result<T>) -> Result<Option<T>> {
    match found {
        Err(ObjectError::Vault(VaultError::NotFound | VaultError::Stale)) => Ok(None),
        found => unless_closed(found),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::{Modes, Objects};
    use lamassu_plain::PlainFs;
    use std::collections::BTreeSet;
    use std::ffi::OsStr;
    use std::fs;
    use std::path::Path;

    const MODES: Modes = Modes { file: 0o600, dir: 0o700 };

    fn objects(root: &Path) -> Objects {
        let fs = PlainFs::open(root).expect("opens");
        Objects::open(Arc::new(fs), "/", MODES, 1 << 20).expect("opens")
    }

    fn node(objects: &Objects) -> Node {
        objects.root().expect("is there").child(OsStr::new("bucket")).expect("is there")
    }

    #[test]
    fn windows_have_all_names_in_order_and_little_memory() {
        let dir = tempfile::tempdir().expect("a directory");
        let bucket = dir.path().join("bucket");
        fs::create_dir(&bucket).expect("makes");
        let mut all = BTreeSet::new();
        for at in 0..500_u32 {
            // In no order, with names that begin like others.
            let name = format!("{:x}{}", at.wrapping_mul(0x9E37_79B1) % 997, ["", "a", "-", "0"][at as usize % 4]);
            match at % 7 {
                0 if !bucket.join(&name).exists() => {
                    fs::create_dir(bucket.join(&name)).expect("makes");
                    all.insert(name + "/");
                }
                _ if !bucket.join(&name).is_dir() => {
                    fs::write(bucket.join(&name), "").expect("writes");
                    all.insert(name);
                }
                _ => {}
            }
        }
        let objects = objects(dir.path());
        for max in [1, 20, 100, 1000, 1 << 20] {
            let (mut found, mut from, mut windows) = (Vec::new(), String::new(), 0);
            loop {
                let names = Names::read(&node(&objects), &from, max).expect("reads");
                assert!(names.bytes() <= max.max(names.get(0).len() + size_of::<u32>()), "{max}");
                assert!(names.has(&from) && (0..names.len()).all(|at| names.has(names.get(at))));
                found.extend((0..names.len()).map(|at| names.get(at).to_owned()));
                windows += 1;
                match names.next() {
                    Some(next) => {
                        assert!(!names.has(next));
                        from = next.to_owned();
                    }
                    None => break,
                }
            }
            assert!(found.iter().eq(&all), "{max}");
            assert!(max < 1 << 20 || windows == 1);
        }
    }

    /// Wherever pages begin, also in front of what is kept: a window is read once, and kept as long as there is room.
    #[test]
    fn kept_windows_are_taken_and_do_not_overlap() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::create_dir(dir.path().join("bucket")).expect("makes");
        let name = |at: usize| format!("{at:04}");
        (0..1000).for_each(|at| fs::write(dir.path().join("bucket").join(name(at)), "").expect("writes"));
        let objects = objects(dir.path());
        let (dir, listings) = (node(&objects), Listings::settled_at_once());
        // 100 names each.
        let max = 100 * (4 + size_of::<u32>());
        for from in (0..1000).rev().step_by(7).chain(0..1000) {
            let names = listings.of(&dir, &name(from), max).expect("reads");
            let again = listings.of(&dir, &name(from), max).expect("reads");
            assert!(Arc::ptr_eq(&again, &listings.of(&dir, &name(from), max).expect("reads")), "it is kept");
            assert_eq!(names.get(names.first(&name(from))), name(from));
        }
        let (kept, bytes) = &*listings.kept.lock();
        let kept = kept.peek(&dir.ino()).expect("kept");
        assert_eq!(kept.windows.iter().map(|names| names.len()).sum::<usize>(), 1000, "each name once");
        assert_eq!(kept.bytes(), *bytes);
        let mut windows: Vec<_> = kept.windows.iter().collect();
        windows.sort_by(|one, other| one.from.cmp(&other.from));
        assert!(windows.is_sorted_by(|one, other| one.until.as_deref().is_some_and(|until| until <= &*other.from)));
    }

    #[test]
    fn kept_windows_are_within_their_bytes() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::create_dir(dir.path().join("bucket")).expect("makes");
        let objects = objects(dir.path());
        let listings = Listings::new(1000);
        let window = |from: &str, len: usize| {
            let text = from.to_owned() + &"x".repeat(len);
            let until = Some(format!("{text}\0"));
            Arc::new(Names { from: from.into(), text, starts: vec![0], until, is_of_many: true })
        };
        let ino = node(&objects).ino();
        let time = |seconds| (Time { seconds, nanos: 0 }, Time { seconds, nanos: 0 });
        for at in 0..100 {
            listings.keep(ino, time(1), window(&at.to_string(), 20));
            // Another thread has read the same.
            listings.keep(ino, time(1), window(&at.to_string(), 20));
            let (kept, bytes) = &*listings.kept.lock();
            let kept = kept.peek(&ino).expect("kept");
            assert!(kept.bytes() == *bytes && *bytes <= 1000);
            assert_eq!(kept.windows.len(), (at + 1).min(1000 / window("00", 20).memory()), "the newest");
        }
        listings.keep(ino, time(2), window("a", 20));
        assert_eq!(listings.kept_of(ino), 1);
        listings.keep(ino, time(2), window("b", 2000));
        let (kept, bytes) = &*listings.kept.lock();
        assert!(kept.is_empty() && *bytes == 0);
    }
}
