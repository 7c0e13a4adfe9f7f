//! The file of a history: locked while it is read or appended to, never followed through a link.

use super::chain::{self, End, Fault, HistoryEntry, Link, Report};
use super::copies::Copies;
use super::event::{Event, EventKind};
use crate::KeyError;
use crate::header_file::regular::{self, Links};
use crate::header_file::shown;
use lamassu_crypto::Secret;
use lamassu_format::header::HistoryMark;
use lamassu_format::name;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long to wait for another program's append, which takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(5);

/// A history cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The store failed, is full, or denies access.
    #[error("cannot {op} the history {path:?}: {source}")]
    Io {
        /// the operation
        op: &'static str,
        /// the file
        path: PathBuf,
        /// the cause
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
    /// It does not verify, so nothing may be appended.
    #[error("the history {path:?} does not verify: {fault}; `lamassu history` shows what is left of it")]
    Damaged {
        /// the file
        path: PathBuf,
        /// the fault
        fault: Fault,
    },
}

/// The history of one vault, its key, and a lower bound of its length. It keeps no other file open, so it can be held
/// while the vault is mounted.
///
/// Invariant: the mark comes from a verified header, or from entries appended here since. Nothing else constructs a
/// history, so no entry is chained to the end that an edited header claims.
#[derive(Debug)]
pub struct History {
    path: PathBuf,
    id: [u8; 16],
    key: Secret<32>,
    mark: Option<HistoryMark>,
    /// of the one whose place it takes, which another key sealed
    copies: Option<Copies>,
}

/// A scanned file.
struct Scanned {
    link: Link,
    len: u64,
    end: End,
    fault: Option<Fault>,
}

/// What [`History::append`] has done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Appended {
    /// the end of the history
    pub(super) mark: HistoryMark,
    /// it begins anew, under a name of its own: see [`History::put_in_place`]
    pub(super) begins: bool,
}

/// Whether the history of the vault in `dir` reaches a remembered mark, and has the same entry there. No key is needed;
/// the entries are not verified.
///
/// # Errors
/// [`HistoryError::Io`]. A missing file, or something that is not a file, reaches no mark.
pub fn reaches(dir: &Path, remembered: HistoryMark) -> Result<bool, HistoryError> {
    if remembered.count == 0 || reaches_at(&dir.join(name::HISTORY), remembered)? {
        return Ok(true);
    }
    // The header may have been replaced, and the history not yet.
    reaches_at(&dir.join(name::HISTORY_NEW), remembered)
}

fn reaches_at(path: &Path, remembered: HistoryMark) -> Result<bool, HistoryError> {
    let failed = |op| {
        let path = shown(path);
        move |source| HistoryError::Io { op, path, source }
    };
    let file = match regular::find(path, Links::Refused, OpenOptions::new().read(true)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        found => found.map_err(failed("open"))?,
    };
    let Some(file) = file else { return Ok(false) };
    let head = chain::head_at(BufReader::new(file), remembered.count).map_err(failed("read"))?;
    Ok(head == Some(remembered.head))
}

impl History {
    pub(super) fn new(path: PathBuf, id: [u8; 16], key: Secret<32>, mark: Option<HistoryMark>) -> History {
        History { path, id, key, mark, copies: None }
    }

    /// The same history, at the vault's new place.
    pub fn moved_to(self, dir: &Path) -> History {
        History { path: dir.join(name::HISTORY), ..self }
    }

    /// The same, as one that begins with these copies on record: another key sealed the one that is there.
    pub(super) fn taking_over(self, copies: Option<Copies>) -> History {
        History { copies, ..self }
    }

    /// The lower bound of its length.
    pub fn mark(&self) -> Option<HistoryMark> {
        self.mark
    }

    /// Whether it verifies, and reaches a remembered mark.
    ///
    /// # Errors
    /// As [`History::read`].
    pub fn goes_to(&self, remembered: HistoryMark) -> Result<bool, HistoryError> {
        match self.find()? {
            Some(file) => Ok(self.scan_to(&file, Some(remembered), drop)?.fault.is_none()),
            None => Ok(remembered.count == 0),
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All entries that verify, and the fault if there is one. A missing history has no entries.
    ///
    /// # Errors
    /// [`HistoryError::Io`], [`HistoryError::NotAFile`], [`HistoryError::Busy`].
    pub fn read(&self) -> Result<Report, HistoryError> {
        let mut report = Report::default();
        let Some(file) = self.find()? else {
            report.fault = self.mark.map(|m| Fault::CutOff { seen: m.count, found: 0 });
            return Ok(report);
        };
        // A caller without write permission still gets a lock: flock(2) needs no permission.
        let scanned = self.scan(&file, |entry| report.entries.push(entry))?;
        report.fault = scanned.fault;
        if let End::Torn(bytes) = scanned.end {
            report.torn_bytes = bytes;
        }
        Ok(report)
    }

    /// What it has on record of copies, for the history that takes its place. What cannot be read is no error: see
    /// [`Copies::lacks`].
    ///
    /// # Errors
    /// [`HistoryError::Busy`].
    pub fn copies(&self) -> Result<Copies, HistoryError> {
        match self.read() {
            Ok(report) => Ok(Copies::of(report)),
            Err(busy @ HistoryError::Busy { .. }) => Err(busy),
            Err(error) => Ok(Copies::unread(error.to_string())),
        }
    }

    /// Appends an event that does not change the header: a mount, a copy of the header.
    ///
    /// # Errors
    /// [`HistoryError::Damaged`]: nothing is appended to a history that does not verify; and [`HistoryError::Io`],
    /// [`HistoryError::NotAFile`], [`HistoryError::Busy`], in a [`KeyError::History`].
    pub fn note(&mut self, event: Event) -> Result<(), KeyError> {
        let (file, scanned) = self.open_and_scan()?;
        if let Some(fault) = scanned.fault {
            return Err(HistoryError::Damaged { path: shown(&self.path), fault }.into());
        }
        self.extend(&file, &scanned, [HistoryEntry::of(&event)])?;
        event.announce(&self.path);
        Ok(())
    }

    /// Appends events, and returns the mark for the header. If the history does not verify or cannot be read, another
    /// one is begun, so that damaging it cannot prevent changes of keys; the caller replaces the header, and calls
    /// [`History::put_in_place`].
    pub(super) fn append(&mut self, events: &[Event]) -> Result<Appended, KeyError> {
        let goes_on = |mark| Appended { mark, begins: false };
        let elsewhere = "what was there is sealed under an earlier file key, or damaged";
        let entries = || events.iter().map(HistoryEntry::of);
        let fault = match self.open_and_scan() {
            Ok(_) if self.copies.is_some() => "the file key was renewed".into(),
            // A single entry that does not open looks like a torn one, but may be the whole earlier history.
            Ok((_, Scanned { fault: None, len: 0, end: End::Torn(_), .. })) if self.mark.is_none() => elsewhere.into(),
            Ok((file, Scanned { fault: None, link, len, end })) => {
                return self.extend(&file, &Scanned { fault: None, link, len, end }, entries()).map(goes_on);
            }
            // It is missing, and was just created again.
            Ok((file, Scanned { fault: Some(fault), link, len: 0, end: End::Clean })) => {
                let said = self.restarted(&fault.to_string(), None, &Copies::unread(fault.to_string()));
                let entries = std::iter::once(said).chain(entries());
                return self
                    .extend(&file, &Scanned { fault: None, link, len: 0, end: End::Clean }, entries)
                    .map(goes_on);
            }
            // The header has no mark, as after its file key was renewed.
            Ok((_, Scanned { fault: Some(Fault::Broken { sequence: 1 }), .. })) if self.mark.is_none() => {
                elsewhere.into()
            }
            Ok((_, Scanned { fault: Some(fault), .. })) => fault.to_string(),
            Err(error @ HistoryError::Busy { .. }) => return Err(error.into()),
            Err(error) => error.to_string(),
        };
        Ok(Appended { mark: self.begin(&fault, entries())?, begins: true })
    }

    /// Begins another history, under a name of its own. What is in the history's place stays: it belongs to the header
    /// that is in place.
    fn begin(&mut self, fault: &str, entries: impl IntoIterator<Item = HistoryEntry>) -> Result<HistoryMark, KeyError> {
        let copies = match self.copies.take() {
            Some(copies) => copies,
            None => self.copies_before(fault)?,
        };
        // It is the history of the header in place, and was not put in its place.
        if self.begun()?.is_some() {
            return Err(HistoryError::Busy { path: shown(&self.path) }.into());
        }
        // Whatever is there: it may be the history of a header whose key this program has not.
        let path = self.begun_path();
        if path.symlink_metadata().is_ok() {
            let aside = path.with_file_name(self.name_to_keep_under()?);
            std::fs::rename(&path, aside).map_err(self.failed("set aside"))?;
        }
        let kept = if self.is_in_the_way() { Some(self.name_to_keep_under()?) } else { None };
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(self.failed("begin"))?;
        // A reader may have found it already.
        let deadline = Instant::now() + PATIENCE;
        while let Err(error) = file.try_lock() {
            match error {
                TryLockError::WouldBlock if Instant::now() < deadline => std::thread::sleep(POLL),
                error => return Err(self.failed("lock")(error.into()).into()),
            }
        }
        self.mark = None;
        let said = self.restarted(fault, kept.as_deref(), &copies);
        let entries = std::iter::once(said).chain(copies.entries).chain(entries);
        self.extend(&file, &Scanned { link: Link::START, len: 0, end: End::Clean, fault: None }, entries)
    }

    /// What can be read of a history that is damaged, or that another key sealed.
    fn copies_before(&self, fault: &str) -> Result<Copies, HistoryError> {
        Ok(self.copies()?.lacking(fault))
    }

    /// Puts the history that begins with the header into its place, after the header was replaced. After an
    /// interruption, the next process that appends does that.
    ///
    /// # Errors
    /// As [`History::read`].
    pub fn put_in_place(&self) -> Result<(), HistoryError> {
        match self.begun_path().symlink_metadata() {
            Ok(_) => self.open_and_scan().map(drop),
            Err(_) => Ok(()),
        }
    }

    fn begun_path(&self) -> PathBuf {
        self.path.with_file_name(name::HISTORY_NEW)
    }

    /// The history that begins with the header in place, if it is not yet in its own place.
    fn begun(&self) -> Result<Option<File>, HistoryError> {
        let path = self.begun_path();
        if self.mark.is_none() || path.symlink_metadata().is_err() {
            return Ok(None);
        }
        match self.open_at(&path, false) {
            Ok(Some(file)) => Ok(self.scan(&file, drop)?.fault.is_none().then_some(file)),
            Ok(None) | Err(HistoryError::NotAFile { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Renames the history that begins with the header in place, if there is one. False: there is none.
    fn take_over(&self) -> Result<bool, HistoryError> {
        let Some(_locked) = self.begun()? else { return Ok(false) };
        if self.is_in_the_way() {
            self.set_aside()?;
        }
        std::fs::rename(self.begun_path(), &self.path).map_err(self.failed("rename"))?;
        self.sync_dir()?;
        Ok(true)
    }

    /// Opens the history for reading; `None`: there is none.
    fn find(&self) -> Result<Option<File>, HistoryError> {
        let there = match self.open(false) {
            there if self.begun_path().symlink_metadata().is_err() => return there,
            Ok(Some(file)) if self.scan(&file, drop)?.fault.is_none() => return Ok(Some(file)),
            Err(error @ (HistoryError::Busy { .. } | HistoryError::Io { .. })) => return Err(error),
            there => there,
        };
        // The present file stays locked meanwhile: the same lock order as for appending.
        match self.begun()? {
            Some(begun) => Ok(Some(begun)),
            None => there,
        }
    }

    fn sync_dir(&self) -> Result<(), HistoryError> {
        let dir = self.path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(dir).and_then(|d| d.sync_all()).map_err(self.failed("sync the directory of"))
    }

    /// The entry that says why the history starts again.
    fn restarted(&self, fault: &str, kept_as: Option<&str>, copies: &Copies) -> HistoryEntry {
        let said = copies.told_in(Event::new(EventKind::Restarted).detail("fault", fault));
        let said = match kept_as {
            Some(name) => said.detail("kept_as", name),
            None => said,
        };
        said.announce(&self.path);
        HistoryEntry::of(&said)
    }

    /// Whether there is something in the history's place. A file that is empty was made just now.
    fn is_in_the_way(&self) -> bool {
        self.path.symlink_metadata().is_ok_and(|there| !there.is_file() || there.len() > 0)
    }

    /// Renames whatever is in the history's place.
    fn set_aside(&self) -> Result<(), HistoryError> {
        let kept = self.path.with_file_name(self.name_to_keep_under()?);
        std::fs::rename(&self.path, kept).map_err(self.failed("set aside"))
    }

    /// The name for what is in the history's place: the first that is free. If none is, the first set aside is given
    /// up, unless it is a directory.
    fn name_to_keep_under(&self) -> Result<String, HistoryError> {
        const KEPT_MAX: u32 = 16;
        let found = |kept: &str| self.path.with_file_name(kept).symlink_metadata();
        let free = (0..KEPT_MAX)
            .map(|n| if n == 0 { name::HISTORY_BROKEN.into() } else { format!("{}.{n}", name::HISTORY_BROKEN) })
            .find(|kept: &String| found(kept).is_err());
        match free {
            Some(free) => Ok(free),
            None if found(name::HISTORY_BROKEN).is_ok_and(|there| there.is_dir()) => {
                Err(self.failed("set aside")(io::ErrorKind::AlreadyExists.into()))
            }
            None => Ok(name::HISTORY_BROKEN.into()),
        }
    }

    /// Opens the history for writing, and puts it in its place if an interruption kept that from being done.
    fn open_and_scan(&self) -> Result<(File, Scanned), HistoryError> {
        let open = || {
            let file = self.open(true)?.expect("it is made where it is not there");
            let scanned = self.scan(&file, drop)?;
            Ok((file, scanned))
        };
        let there = match open() {
            Ok((file, scanned)) if scanned.fault.is_none() => return Ok((file, scanned)),
            Err(busy @ HistoryError::Busy { .. }) => return Err(busy),
            there => there,
        };
        // What is there stays locked meanwhile.
        if self.take_over()? { open() } else { there }
    }

    fn extend(
        &mut self,
        file: &File,
        scanned: &Scanned,
        entries: impl IntoIterator<Item = HistoryEntry>,
    ) -> Result<HistoryMark, KeyError> {
        let (mut bytes, mut link) = (Vec::new(), scanned.link);
        for entry in entries {
            let (sealed, next) = link.seal(&self.key, &self.id, &entry)?;
            bytes.extend_from_slice(&sealed);
            link = next;
        }
        let mut to = file;
        // The rest of an interrupted append is removed first: an entry after it would never be found.
        let written = file
            .set_len(scanned.len)
            .and_then(|()| to.seek(SeekFrom::Start(scanned.len)))
            .and_then(|_| to.write_all(&bytes))
            .and_then(|()| file.sync_all());
        written.map_err(self.failed("append to"))?;
        if scanned.len == 0 {
            self.give_to_owner(file);
            self.sync_dir()?;
        }
        self.mark = Some(link.mark);
        Ok(link.mark)
    }

    /// A new history gets the owner of the header: root may have been the first to write to it, and the owner must be
    /// able to continue.
    fn give_to_owner(&self, file: &File) {
        let Ok(header) = self.path.with_file_name(name::HEADER).symlink_metadata() else { return };
        // Only root can change the owner of a file; other users own it already.
        if std::os::unix::fs::fchown(file, Some(header.uid()), Some(header.gid())).is_ok() {
            let mode = header.mode() & 0o666 | 0o600;
            let _ = file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(mode));
        }
    }

    fn scan(&self, file: &File, each: impl FnMut(HistoryEntry)) -> Result<Scanned, HistoryError> {
        self.scan_to(file, self.mark, each)
    }

    fn scan_to(
        &self,
        file: &File,
        mark: Option<HistoryMark>,
        mut each: impl FnMut(HistoryEntry),
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
            // An append is durable before the header counts it, so a torn entry was never counted.
            (Some(mark), None) if end == End::Clean => Some(Fault::CutOff { seen: mark.count, found }),
            (Some(_), None) => Some(Fault::Broken { sequence: found + 1 }),
        };
        Ok(Scanned { link, len, end, fault })
    }

    /// Opens and locks the file; `None`: it does not exist, and is not to be created.
    fn open(&self, write: bool) -> Result<Option<File>, HistoryError> {
        self.open_at(&self.path, write)
    }

    fn open_at(&self, path: &Path, write: bool) -> Result<Option<File>, HistoryError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut access = OpenOptions::new();
            access.read(true).write(write);
            let file = match regular::find(path, Links::Refused, &access) {
                Ok(Some(file)) => file,
                Ok(None) => return Err(HistoryError::NotAFile { path: shown(path) }),
                Err(e) if e.kind() == io::ErrorKind::NotFound && !write => return Ok(None),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    match access.create_new(true).mode(0o600).open(path) {
                        Ok(file) => file,
                        // Another program was faster.
                        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && Instant::now() < deadline => continue,
                        Err(e) => return Err(self.failed("create")(e)),
                    }
                }
                Err(e) => return Err(self.failed("open")(e)),
            };
            let meta = file.metadata().map_err(self.failed("stat"))?;
            match file.try_lock() {
                // If it was set aside between open and lock, this lock is on a file that is no longer the history.
                Ok(()) if is_at(path, &meta) => return Ok(Some(file)),
                Ok(()) | Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(POLL),
                Ok(()) | Err(TryLockError::WouldBlock) => return Err(HistoryError::Busy { path: shown(&self.path) }),
                Err(TryLockError::Error(e)) => return Err(self.failed("lock")(e)),
            }
        }
    }

    fn failed(&self, op: &'static str) -> impl FnOnce(io::Error) -> HistoryError {
        let path = self.path.clone();
        move |source| HistoryError::Io { op, path: shown(&path), source }
    }
}

/// Whether a file still has this name.
fn is_at(path: &Path, meta: &std::fs::Metadata) -> bool {
    path.symlink_metadata().is_ok_and(|m| m.dev() == meta.dev() && m.ino() == meta.ino())
}
