//! The file a history lives in: locked while it is read or appended to, never followed through a link.

use super::chain::{self, End, Entry, Fault, Link, Report};
use super::event::{Event, EventKind};
use crate::KeyError;
use crate::header_file::shown;
use lamassu_crypto::Secret;
use lamassu_format::header::HistoryMark;
use lamassu_format::name;
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long another program's append is waited for; it takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(5);

/// A history cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The store failed, is full, or does not let this user.
    #[error("cannot {op} the history {path:?}: {source}")]
    Io {
        /// what was tried
        op: &'static str,
        /// the file
        path: PathBuf,
        /// why
        source: io::Error,
    },
    /// A directory, link, device or fifo in its place.
    #[error("the history {path:?} is no regular file; look at it, and move it away")]
    NotAFile {
        /// the file
        path: PathBuf,
    },
    /// Another program holds it.
    #[error("another program holds the history {path:?}; try again when it is done")]
    Busy {
        /// the file
        path: PathBuf,
    },
    /// It does not verify, and an entry behind what does not would say nothing.
    #[error("the history {path:?} does not verify: {fault}; `lamassu history` shows what is left of it")]
    Damaged {
        /// the file
        path: PathBuf,
        /// how
        fault: Fault,
    },
}

/// The history of one vault, the key it is sealed under, and how far it goes at least. Cheap to keep while the vault is
/// mounted: it opens nothing else.
///
/// Invariant: the mark is that of a header that was verified, or of what was appended here since. Nothing else makes a
/// history, so none is chained to where an edited header says it ends.
#[derive(Debug)]
pub struct History {
    path: PathBuf,
    id: [u8; 16],
    key: Secret<32>,
    mark: Option<HistoryMark>,
}

/// A scanned file.
struct Scanned {
    link: Link,
    len: u64,
    end: End,
    fault: Option<Fault>,
}

/// Whether the history of the vault in `dir` goes as far as somebody remembers, and is the same there: told without a
/// key. Whether it verifies is not.
///
/// # Errors
/// [`HistoryError::Io`]. What is no file, or not there, goes nowhere.
pub fn reaches(dir: &Path, remembered: HistoryMark) -> Result<bool, HistoryError> {
    let path = dir.join(name::HISTORY);
    let failed = |op| {
        let path = shown(&path);
        move |source| HistoryError::Io { op, path, source }
    };
    if remembered.count == 0 {
        return Ok(true);
    }
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(e) if e.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => return Ok(false),
        opened => opened.map_err(failed("open"))?,
    };
    if !file.metadata().map_err(failed("stat"))?.is_file() {
        return Ok(false);
    }
    let head = chain::head_at(BufReader::new(file), remembered.count).map_err(failed("read"))?;
    Ok(head == Some(remembered.head))
}

impl History {
    pub(super) fn new(path: PathBuf, id: [u8; 16], key: Secret<32>, mark: Option<HistoryMark>) -> History {
        History { path, id, key, mark }
    }

    /// The same history, where the vault lies now.
    pub fn moved_to(self, dir: &Path) -> History {
        History { path: dir.join(name::HISTORY), ..self }
    }

    /// How far it goes at least.
    pub fn mark(&self) -> Option<HistoryMark> {
        self.mark
    }

    /// Whether it verifies, and goes at least as far as somebody remembers.
    ///
    /// # Errors
    /// As [`History::read`].
    pub fn goes_to(&self, remembered: HistoryMark) -> Result<bool, HistoryError> {
        match self.open(false)? {
            Some(file) => Ok(self.scan_to(&file, Some(remembered), drop)?.fault.is_none()),
            None => Ok(remembered.count == 0),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Everything that verifies, and what does not. A history that is not there has no entries.
    ///
    /// # Errors
    /// [`HistoryError::Io`], [`HistoryError::NotAFile`], [`HistoryError::Busy`].
    pub fn read(&self) -> Result<Report, HistoryError> {
        let mut report = Report::default();
        let Some(file) = self.open(false)? else {
            report.fault = self.mark.map(|m| Fault::CutOff { seen: m.count, found: 0 });
            return Ok(report);
        };
        // A caller that may read and not write still gets a lock: flock(2) asks for no right.
        let scanned = self.scan(&file, |entry| report.entries.push(entry))?;
        report.fault = scanned.fault;
        if let End::Torn(bytes) = scanned.end {
            report.torn_bytes = bytes;
        }
        Ok(report)
    }

    /// Appends what does not change the header: that the vault was mounted, that its header was copied.
    ///
    /// # Errors
    /// [`HistoryError::Damaged`]: nothing is appended to a history that does not verify; and [`HistoryError::Io`],
    /// [`HistoryError::NotAFile`], [`HistoryError::Busy`], in a [`KeyError::History`].
    pub fn note(&mut self, event: Event) -> Result<(), KeyError> {
        let (file, scanned) = self.open_and_scan()?;
        if let Some(fault) = scanned.fault {
            return Err(HistoryError::Damaged { path: shown(&self.path), fault }.into());
        }
        self.extend(&file, &scanned, std::slice::from_ref(&event))?;
        event.announce(&self.path);
        Ok(())
    }

    /// Appends, and gives the mark for the header. What does not verify or cannot be read is set aside, so that nobody
    /// can keep keys from being changed by damaging a log.
    pub(super) fn append(&mut self, events: &[Event]) -> Result<HistoryMark, KeyError> {
        let elsewhere = "what was there is sealed under an earlier file key, or damaged";
        let fault = match self.open_and_scan() {
            // One entry alone that does not open looks like one that was torn, and may be the whole history from
            // before.
            Ok((_, Scanned { fault: None, len: 0, end: End::Torn(_), .. })) if self.mark.is_none() => elsewhere.into(),
            Ok((file, Scanned { fault: None, link, len, end })) => {
                return self.extend(&file, &Scanned { fault: None, link, len, end }, events);
            }
            // Gone, and made anew just now.
            Ok((file, Scanned { fault: Some(fault), link, len: 0, end: End::Clean })) => {
                let events = self.restarted(&fault.to_string(), None, events);
                return self.extend(&file, &Scanned { fault: None, link, len: 0, end: End::Clean }, &events);
            }
            // The header knows of no history, as after its file key was made anew.
            Ok((_, Scanned { fault: Some(Fault::Broken { sequence: 1 }), .. })) if self.mark.is_none() => {
                elsewhere.into()
            }
            Ok((_, Scanned { fault: Some(fault), .. })) => fault.to_string(),
            Err(error @ HistoryError::Busy { .. }) => return Err(error.into()),
            Err(error) => error.to_string(),
        };
        let kept = self.set_aside()?;
        self.mark = None;
        let (file, fresh) = self.open_and_scan()?;
        let events = self.restarted(&fault, Some(&kept), events);
        self.extend(&file, &fresh, &events)
    }

    /// The events, behind one that says why the history begins anew.
    fn restarted(&self, fault: &str, kept_as: Option<&str>, events: &[Event]) -> Vec<Event> {
        let said = Event::new(EventKind::Restarted).detail("fault", fault);
        let said = match kept_as {
            Some(name) => said.detail("kept_as", name),
            None => said,
        };
        said.announce(&self.path);
        std::iter::once(said).chain(events.iter().cloned()).collect()
    }

    /// Renames what is in the history's place, whatever it is; tells the new name.
    fn set_aside(&self) -> Result<String, HistoryError> {
        const KEPT_MAX: u32 = 16;
        let kept = (0..KEPT_MAX)
            .map(|n| if n == 0 { name::HISTORY_BROKEN.into() } else { format!("{}.{n}", name::HISTORY_BROKEN) })
            .find(|kept| self.path.with_file_name(kept).symlink_metadata().is_err())
            .unwrap_or_else(|| name::HISTORY_BROKEN.into());
        std::fs::rename(&self.path, self.path.with_file_name(&kept)).map_err(self.failed("set aside"))?;
        Ok(kept)
    }

    fn open_and_scan(&self) -> Result<(File, Scanned), HistoryError> {
        let file = self.open(true)?.expect("it is made where it is not there");
        let scanned = self.scan(&file, drop)?;
        Ok((file, scanned))
    }

    fn extend(&mut self, file: &File, scanned: &Scanned, events: &[Event]) -> Result<HistoryMark, KeyError> {
        let (mut bytes, mut link) = (Vec::new(), scanned.link);
        for event in events {
            let (entry, next) = link.seal(&self.key, &self.id, &Entry::of(event))?;
            bytes.extend_from_slice(&entry);
            link = next;
        }
        let mut to = file;
        // What an interrupted append has left goes first: an entry behind it would never be found.
        let written = file
            .set_len(scanned.len)
            .and_then(|()| to.seek(SeekFrom::Start(scanned.len)))
            .and_then(|_| to.write_all(&bytes))
            .and_then(|()| file.sync_all());
        written.map_err(self.failed("append to"))?;
        if scanned.len == 0 {
            self.give_to_owner(file);
            let dir = self.path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
            File::open(dir).and_then(|d| d.sync_all()).map_err(self.failed("sync the directory of"))?;
        }
        self.mark = Some(link.mark);
        Ok(link.mark)
    }

    /// A new history belongs to the owner of the header: root may have been first to write it down, and its owner has
    /// to go on.
    fn give_to_owner(&self, file: &File) {
        let Ok(header) = self.path.with_file_name(name::HEADER).symlink_metadata() else { return };
        // Only root can give files away; for others it is theirs as it is.
        if std::os::unix::fs::fchown(file, Some(header.uid()), Some(header.gid())).is_ok() {
            let mode = header.mode() & 0o666 | 0o600;
            let _ = file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(mode));
        }
    }

    fn scan(&self, file: &File, each: impl FnMut(Entry)) -> Result<Scanned, HistoryError> {
        self.scan_to(file, self.mark, each)
    }

    fn scan_to(
        &self,
        file: &File,
        mark: Option<HistoryMark>,
        mut each: impl FnMut(Entry),
    ) -> Result<Scanned, HistoryError> {
        let mut seen = None;
        let mut input = BufReader::new(file);
        input.rewind().map_err(self.failed("read"))?;
        let walked = chain::walk(input, &self.key, &self.id, |entry, link| {
            if mark.is_some_and(|m| m.count == link.mark.count) {
                seen = Some(link.mark);
            }
            each(entry);
        });
        let (link, len, end) = walked.map_err(self.failed("read"))?;
        let found = link.mark.count;
        let fault = match (mark, seen) {
            _ if end == End::Broken => Some(Fault::Broken { sequence: found + 1 }),
            (Some(mark), Some(seen)) if seen != mark => Some(Fault::OtherHead { sequence: mark.count }),
            (Some(_), Some(_)) | (None, _) => None,
            // An append is durable before the header counts it: what is torn was never counted.
            (Some(mark), None) if end == End::Clean => Some(Fault::CutOff { seen: mark.count, found }),
            (Some(_), None) => Some(Fault::Broken { sequence: found + 1 }),
        };
        Ok(Scanned { link, len, end, fault })
    }

    /// Opens and locks; `None` where it is not there and is not to be made.
    fn open(&self, write: bool) -> Result<Option<File>, HistoryError> {
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(write).create(write).truncate(false).mode(0o600).custom_flags(flags);
            let file = match options.open(&self.path) {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::NotFound && !write => return Ok(None),
                Err(e) if e.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
                    return Err(HistoryError::NotAFile { path: shown(&self.path) });
                }
                Err(e) => return Err(self.failed("open")(e)),
            };
            let meta = file.metadata().map_err(self.failed("stat"))?;
            if !meta.is_file() {
                return Err(HistoryError::NotAFile { path: shown(&self.path) });
            }
            match file.try_lock() {
                // Set aside between open and lock: the lock is on a file that is no longer the history.
                Ok(()) if self.is_at(&meta) => return Ok(Some(file)),
                Ok(()) | Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(POLL),
                Ok(()) | Err(TryLockError::WouldBlock) => return Err(HistoryError::Busy { path: shown(&self.path) }),
                Err(TryLockError::Error(e)) => return Err(self.failed("lock")(e)),
            }
        }
    }

    fn is_at(&self, meta: &std::fs::Metadata) -> bool {
        self.path.symlink_metadata().is_ok_and(|m| m.dev() == meta.dev() && m.ino() == meta.ino())
    }

    fn failed(&self, op: &'static str) -> impl FnOnce(io::Error) -> HistoryError {
        let path = self.path.clone();
        move |source| HistoryError::Io { op, path: shown(&path), source }
    }
}
