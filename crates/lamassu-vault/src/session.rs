//! The vault's record of sessions, in the directory `lamassu.sessions` of its root (§6a), and the end of a session.
//!
//! It has a directory of its own, since the process that serves a vault may lack the permission to write to its root.
//! The record is replaced whole, by a rename, and durable before a session counts as begun or closed. It is sealed
//! under K_out for this vault alone. Without it nothing is written, and no pending state counts: `check --repair` makes
//! a new one.

use crate::error::{io, is_not_found};
use crate::event::IntegrityKind;
use crate::record::{self, RecordFault, write_text};
use crate::{Result, Vault, VaultError, staging};
use lamassu_anchor::row::Announced;
use lamassu_anchor::{Anchor, AnchorError};
use lamassu_crypto::KeyRing;
use lamassu_format::header::VaultId;
use lamassu_format::name::{SESSIONS, SESSIONS_NEW, SESSIONS_RECORD};
use lamassu_format::sessions::{SessionRecord, SessionsError};
use lamassu_store::BackendDir;
use lamassu_store::backend::RenameMode;
use lamassu_store::file::{Ended, SessionKeeper, Standing};
use parking_lot::Mutex;
use std::ffi::{OsStr, OsString};
use std::io as stdio;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Others may read the record, as they may read the vault; what is in it is sealed.
const PLACE_MODE: u32 = 0o755;
/// How often at most a reader looks for a newer record when it finds a page of a session that it does not know.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

type SessionsFault = RecordFault<SessionsError>;

/// The record, in memory and in the store.
pub(crate) struct Book {
    root: Arc<dyn BackendDir>,
    ring: KeyRing,
    vault: VaultId,
    /// The vault's anchor, if it has one.
    anchor: Option<Arc<Anchor>>,
    kept: Mutex<Kept>,
}

struct Kept {
    record: std::result::Result<SessionRecord, SessionsFault>,
    looked: Instant,
}

impl Kept {
    /// A copy to be changed.
    fn opened(&self) -> stdio::Result<SessionRecord> {
        self.record.as_ref().cloned().map_err(|fault| {
            let text = format!("{SESSIONS} does not open: {fault}; `lamassu check --repair` makes a new one");
            stdio::Error::other(text)
        })
    }
}

impl Book {
    /// For the vault with this id below `root`. A record that does not open is reported when it is needed.
    pub fn open(root: Arc<dyn BackendDir>, ring: KeyRing, vault: VaultId, anchor: Option<Arc<Anchor>>) -> Book {
        let record = read(&*root, &ring, &vault);
        Book { root, ring, vault, anchor, kept: Mutex::new(Kept { record, looked: Instant::now() }) }
    }

    /// Why it does not open, if it does not, and whether it may be replaced if the keys are the vault's. A newer
    /// program's record may not be.
    pub fn fault(&self) -> Option<(String, bool)> {
        let kept = self.kept.lock();
        let fault = kept.record.as_ref().err()?;
        let may_go = match fault {
            SessionsFault::Missing | SessionsFault::NotARecord | SessionsFault::Text | SessionsFault::Seal(_) => true,
            SessionsFault::Unreadable(_) | SessionsFault::Content(_) => false,
        };
        Some((fault.to_string(), may_go))
    }

    /// Whether it is the newest, by the anchor. True in an unanchored vault, and for a record that does not open.
    ///
    /// # Errors
    /// [`AnchorError::Older`]: the anchor is not the newest.
    pub fn is_newest(&self) -> std::result::Result<bool, AnchorError> {
        self.anchor.as_ref().zip(self.last()).map_or(Ok(true), |(anchor, last)| anchor.may_be_recorded(last))
    }

    /// The highest number that was given, if the record opens.
    pub fn last(&self) -> Option<u32> {
        self.kept.lock().record.as_ref().ok().map(SessionRecord::last)
    }

    /// The sessions that were interrupted and not completed since: first and last of each range.
    pub fn interrupted(&self) -> Vec<(u32, u32)> {
        self.kept.lock().record.as_ref().map(|record| record.open().to_vec()).unwrap_or_default()
    }

    /// The same without some.
    fn interrupted_but(&self, own: &[u32]) -> Vec<(u32, u32)> {
        let mut record = self.kept.lock().record.as_ref().cloned().unwrap_or_default();
        own.iter().for_each(|session| record.close(*session));
        record.open().to_vec()
    }

    /// Makes a new record if none opens. `last` is the highest number in any page.
    pub fn renew(&self, last: u32) -> Result<()> {
        let last = self.anchor.as_ref().map_or(last, |anchor| last.max(anchor.vault().sessions.last));
        let record = SessionRecord::after(last, now());
        let last = record.last();
        if let Some(anchor) = self.anchor.as_ref().filter(|anchor| last > anchor.vault().sessions.last) {
            anchor.announce_session(last)?;
        }
        self.put(&mut self.kept.lock(), record).map_err(io("write the record of sessions"))?;
        Ok(self.anchor.as_ref().map_or(Ok(()), |anchor| anchor.sessions_go_to(last))?)
    }

    /// Closes all sessions except the current one. Everything they left has been completed durably.
    pub fn complete(&self, under_way: Option<u32>) -> Result<()> {
        self.change(|record| record.close_all_but(under_way)).map_err(io("write the record of sessions"))
    }

    /// Seals it under the newest key, if it is under an older one.
    pub fn reseal(&self) -> Result<()> {
        let is_newest = place(&*self.root).and_then(|dir| record::SESSIONS.is_newest(&*dir, &self.ring, &self.vault.0));
        match is_newest.map_err(io("read the record of sessions"))? {
            true => Ok(()),
            false => self.change(|_| ()).map_err(io("write the record of sessions")),
        }
    }

    fn change(&self, change: impl FnOnce(&mut SessionRecord)) -> stdio::Result<()> {
        let mut kept = self.kept.lock();
        let mut record = kept.opened()?;
        change(&mut record);
        self.put(&mut kept, record)
    }

    /// Writes a record, durably.
    fn put(&self, kept: &mut Kept, record: SessionRecord) -> stdio::Result<()> {
        write(&*self.root, &self.ring, &self.vault, &record)?;
        kept.record = Ok(record);
        Ok(())
    }
}

impl SessionKeeper for Book {
    fn begin(&self) -> stdio::Result<u32> {
        let mut kept = self.kept.lock();
        let mut record = kept.opened()?;
        if let Some(anchor) = &self.anchor {
            if !anchor.may_be_recorded(record.last()).map_err(stdio::Error::other)? {
                return Err(stdio::Error::other(outdated()));
            }
            // A session may have been announced, and then not begun.
            record.go_on_behind(anchor.vault().sessions.last);
        }
        let session = record.begin(now());
        let session = session.ok_or_else(|| stdio::Error::other("this vault has no session numbers left"))?;
        if let Some(anchor) = &self.anchor {
            anchor.announce_session(session).map_err(stdio::Error::other)?;
        }
        self.put(&mut kept, record)?;
        if let Some(anchor) = &self.anchor {
            anchor.session_is_recorded(session);
        }
        Ok(session)
    }

    fn close(&self, session: u32) -> stdio::Result<()> {
        self.change(|record| record.close(session))
    }

    fn standing(&self, session: u32) -> Standing {
        let mut kept = self.kept.lock();
        let is_later = |kept: &Kept| kept.record.as_ref().is_ok_and(|record| session > record.last());
        // A writer may have begun a session since this reader read the record.
        if is_later(&kept) && kept.looked.elapsed() >= LOOK_AGAIN {
            kept.looked = Instant::now();
            if let Ok(record) = read(&*self.root, &self.ring, &self.vault) {
                kept.record = Ok(record);
            }
        }
        match &kept.record {
            Ok(record) if record.is_open(session) => Standing::Open,
            Ok(record) if session > record.last() => Standing::Unknown,
            Ok(_) | Err(_) => Standing::Closed,
        }
    }
}

/// Unix time in seconds.
fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The record's directory, even if the root's mode denies search to its owner, which is this process.
fn place(root: &dyn BackendDir) -> stdio::Result<Arc<dyn BackendDir>> {
    let open = |dir: &dyn BackendDir| dir.open_dir(OsStr::new(SESSIONS));
    match open(root) {
        Err(e) if e.kind() == stdio::ErrorKind::PermissionDenied => root.lending().map_or(Err(e), |dir| open(&*dir)),
        opened => opened,
    }
}

/// The same, made if it is missing.
fn make_place(root: &dyn BackendDir) -> stdio::Result<Arc<dyn BackendDir>> {
    let make = |dir: &dyn BackendDir| dir.make_dir(OsStr::new(SESSIONS), PLACE_MODE);
    match place(root) {
        Err(e) if is_not_found(&e) => {}
        opened => return opened,
    }
    match make(root) {
        Err(e) if e.kind() == stdio::ErrorKind::PermissionDenied => root.lending().map_or(Err(e), |dir| make(&*dir))?,
        made => made?,
    }
    root.sync()?;
    place(root)
}

fn read(root: &dyn BackendDir, ring: &KeyRing, vault: &VaultId) -> std::result::Result<SessionRecord, SessionsFault> {
    record::SESSIONS.read(&*place(root)?, ring, &vault.0, SessionRecord::parse)
}

fn write(root: &dyn BackendDir, ring: &KeyRing, vault: &VaultId, record: &SessionRecord) -> stdio::Result<()> {
    let text = record::SESSIONS.seal(ring, &vault.0, &record.encode()).map_err(stdio::Error::other)?;
    let dir = make_place(root)?;
    clear(&*dir);
    let new = new_name()?;
    write_text(&*dir, &new, &text)?;
    if let Err(error) = give_name(&*dir, &new) {
        let _ = dir.unlink(&new);
        return Err(error);
    }
    dir.sync()
}

/// A name for a record until it is whole. It is random, so nothing can lie there already.
fn new_name() -> stdio::Result<OsString> {
    let mut name = OsString::from(format!("{SESSIONS_NEW}-"));
    name.push(staging::random_name().map_err(stdio::Error::other)?);
    Ok(name)
}

/// Removes what an interruption left, and entries that block the name. If one cannot be removed, it is harmless.
fn clear(dir: &dyn BackendDir) {
    let left = dir.read_dir().unwrap_or_default().into_iter();
    for entry in left.filter(|e| e.name.as_bytes().starts_with(SESSIONS_NEW.as_bytes())) {
        let gone = dir.unlink(&entry.name).or_else(|_| dir.remove_dir(&entry.name));
        if let Err(error) = gone {
            tracing::debug!(entry = %entry.name.to_string_lossy(), %error, "stays in {SESSIONS}");
        }
    }
}

/// Puts a complete record in the place of the old one. A directory under that name is moved aside, since it is no
/// record.
fn give_name(dir: &dyn BackendDir, new: &OsStr) -> stdio::Result<()> {
    let record = OsStr::new(SESSIONS_RECORD);
    match dir.rename(new, dir, record, RenameMode::Replace) {
        Err(e) if e.raw_os_error() == Some(libc::EISDIR) => {
            dir.rename(record, dir, &new_name()?, RenameMode::NoReplace)?;
            dir.rename(new, dir, record, RenameMode::Replace)
        }
        renamed => renamed,
    }
}

/// Makes the record of a new vault: no session yet.
pub(crate) fn create(root: &dyn BackendDir, ring: &KeyRing, vault: &VaultId) -> Result<()> {
    write(root, ring, vault, &SessionRecord::default()).map_err(io("write the record of sessions"))
}

/// Whether the record of the vault with this id below `root` names sessions that were interrupted, and not completed
/// since.
///
/// # Errors
/// [`VaultError::Damaged`] where the record does not open.
pub fn has_interrupted_sessions(root: &dyn BackendDir, ring: &KeyRing, vault: &VaultId) -> Result<bool> {
    read(root, ring, vault).map(|record| !record.open().is_empty()).map_err(|_| damaged())
}

/// The highest number of a session that the record of the vault with this id below `root` knows.
///
/// # Errors
/// [`VaultError::Damaged`] where the record does not open.
pub fn last_session(root: &dyn BackendDir, ring: &KeyRing, vault: &VaultId) -> Result<u32> {
    read(root, ring, vault).map(|record| record.last()).map_err(|_| damaged())
}

/// Verifies that the record of the vault with this id below `root` knows all sessions up to `last`.
///
/// # Errors
/// [`VaultError::Outdated`]; as [`last_session`].
pub fn verify_sessions(root: &dyn BackendDir, ring: &KeyRing, vault: &VaultId, last: u32) -> Result<()> {
    if last_session(root, ring, vault)? >= last { Ok(()) } else { Err(outdated()) }
}

/// Writes the record of a vault that is a copy of another: what an interruption left in the original is in the copy,
/// too.
///
/// # Errors
/// [`VaultError::Damaged`] where the original's record does not open; those of the store.
pub fn copy_sessions(
    from: (&dyn BackendDir, &KeyRing, &VaultId),
    to: (&dyn BackendDir, &KeyRing, &VaultId),
) -> Result<()> {
    let record = read(from.0, from.1, from.2).map_err(|_| damaged())?;
    write(to.0, to.1, to.2, &record).map_err(io("write the record of sessions"))
}

/// Accepts the record of the vault with this id below `root` as the newest, although sessions began that it does not
/// know. Its interrupted sessions stay, since the restored files may have their pending state. Returns whether it was
/// an older record. [`last_session`] then gives its last session.
///
/// # Errors
/// [`VaultError::Damaged`] where it does not open; those of the store.
pub fn accept_sessions(root: &dyn BackendDir, ring: &KeyRing, vault: &VaultId, known: Announced) -> Result<bool> {
    let mut record = read(root, ring, vault).map_err(|_| damaged())?;
    if record.last() >= known.recorded {
        return Ok(false);
    }
    record.go_on_behind(known.last);
    write(root, ring, vault, &record).map_err(io("write the record of sessions"))?;
    Ok(true)
}

/// Ranges of sessions, for people.
pub fn shown_ranges(ranges: &[(u32, u32)]) -> String {
    let shown = ranges.iter().map(|(from, to)| match from == to {
        true => from.to_string(),
        false => format!("{from} to {to}"),
    });
    shown.collect::<Vec<_>>().join(", ")
}

/// How many ranges of interrupted sessions the log lists.
const SHOWN_MAX: usize = 5;

fn outdated() -> VaultError {
    VaultError::Outdated { what: "record of sessions", stored: SESSIONS.to_owned() }
}

fn damaged() -> VaultError {
    VaultError::Damaged {
        what: "record of sessions (`lamassu check --repair` makes a new one)",
        stored: SESSIONS.to_owned(),
    }
}

impl Vault {
    /// Fails unless the record of sessions opens: without it nothing is written.
    pub(crate) fn verify_sessions(&self) -> Result<()> {
        let Some((fault, _)) = self.book.fault() else {
            if self.book.is_newest()? {
                return Ok(());
            }
            self.tell(IntegrityKind::Stale.at(SESSIONS, outdated().to_string()));
            return Err(outdated());
        };
        let text = format!("the record of sessions does not open: {fault}");
        self.tell(IntegrityKind::Sessions.at(SESSIONS, text));
        Err(damaged())
    }

    /// Logs sessions that were interrupted.
    pub(crate) fn tell_interrupted(&self) {
        let interrupted = self.book.interrupted();
        if interrupted.is_empty() {
            return;
        }
        let shown = match interrupted.len().checked_sub(SHOWN_MAX) {
            None | Some(0) => shown_ranges(&interrupted),
            Some(more) => format!("{more} more before, {}", shown_ranges(&interrupted[more..])),
        };
        if !self.events().is_new_line(&shown) {
            return;
        }
        tracing::warn!(
            sessions = shown,
            "this vault was not closed at the end of these sessions; what they left is completed file by file as it is \
             used, and all of it by `lamassu check --repair`"
        );
    }

    /// Ends the current session, if everything that was written is settled. The caller has closed the gate, settled
    /// all, and then issued a barrier of the whole store. A failure of the store is logged.
    pub(crate) fn end_session(&self) -> Ended {
        let sessions = &self.ctx.sessions;
        if self.options.read_only {
            return Ended::Closed;
        }
        let ended = self.end_session_under_way(sessions);
        if ended == Ended::Closed {
            self.note_out_of_use();
        }
        ended
    }

    fn end_session_under_way(&self, sessions: &lamassu_store::file::Sessions) -> Ended {
        if sessions.are_closed() {
            return Ended::Closed;
        }
        let _no_settling = self.settling.lock();
        let is_settled = |open: &Arc<crate::handles::OpenFile>| !open.is_writable() || open.file().is_settled();
        if !self.files.all().iter().all(is_settled) {
            return Ended::LeftOpen;
        }
        sessions.end().unwrap_or_else(|error| {
            tracing::warn!(%error, "the record of sessions could not be written: what is written next begins a session");
            Ended::LeftOpen
        })
    }

    /// As [`Vault::end_session`], for callers that rely on it: a session that stays open is logged.
    pub(crate) fn end_session_for_good(&self) {
        if self.end_session() == Ended::LeftOpen
            && let Some(session) = self.ctx.sessions.under_way()
        {
            tracing::warn!(
                session,
                "the session stays open, since not everything that it wrote could be settled: until `lamassu check \
                 --repair` has gone over the whole vault, the store has the choices that an interruption leaves"
            );
        }
    }

    /// Sessions that were not closed, without those of this process: first and last of each range.
    pub(crate) fn left_open(&self) -> Vec<(u32, u32)> {
        self.book.interrupted_but(&self.ctx.sessions.own())
    }

    /// After a complete repair of the whole vault: pending state of earlier sessions no longer counts.
    pub(crate) fn complete_sessions(&self) -> Result<()> {
        if self.left_open().is_empty() {
            return Ok(());
        }
        self.sync_store()?;
        self.book.complete(self.ctx.sessions.under_way())
    }
}
