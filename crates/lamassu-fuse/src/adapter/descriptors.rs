//! Limits, for each user of a mount, the descriptors of this process and its memory for listings.
//!
//! An open file and an open directory take descriptors of this process, and the process has a limit of them. Requests
//! of users other than root and the one who mounted open something only while a reserve is left ([`reserve`]); the
//! others get `ENFILE`. The reserve is for directories that lookups open, for files that renames keep open, for
//! staging, and for root. One of these users holds a quarter of the limit at most, and gets `EMFILE` beyond that.
//!
//! The reserve is measured, not counted: the system gives out the lowest free number, so the number of a fresh
//! descriptor tells whether all below it are in use, for whatever purpose. Requests under way at the same time may each
//! take one more.
//!
//! The listing of a directory takes memory until the directory is closed. A user's new listing is refused (`ENOMEM`)
//! while the user's listings take [`LISTED_MAX`], or those of all limited users [`LISTED_MAX_ALL`]. So at most the last
//! listing exceeds these limits; again, requests under way at the same time may each take one more.

use super::acl::Caller;
use lamassu_vault::{HandleId, Ino, Result, VaultError};
use parking_lot::Mutex;
use rustix::process::{Resource, getrlimit};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Between two warnings.
const QUIET: Duration = Duration::from_secs(60);

/// Bytes of listings of one user, beyond which no new one is begun.
const LISTED_MAX: u64 = 128 << 20;
/// The same of all limited users.
const LISTED_MAX_ALL: u64 = 4 * LISTED_MAX;

/// What a handle has opened.
enum Opened {
    File(Ino),
    /// With the bytes of its listing.
    Dir(u64),
}

/// What one user holds. The handles of a file share a descriptor, those of a directory need not.
#[derive(Default)]
struct Held {
    files: HashMap<Ino, u32>,
    dirs: u64,
    /// bytes of listings
    listed: u64,
}

impl Held {
    fn count(&self) -> u64 {
        self.files.len() as u64 + self.dirs
    }
}

#[derive(Default)]
struct State {
    held: HashMap<u32, Held>,
    /// Which user opened what through a handle.
    handles: HashMap<HandleId, (u32, Opened)>,
    /// Bytes of all listings.
    listed: u64,
    warned: Option<Instant>,
}

/// How many each user holds.
pub(super) struct Descriptors {
    /// The user who mounted.
    owner: u32,
    /// Is duplicated: the number of the duplicate tells how many descriptors are in use.
    probe: File,
    state: Mutex<State>,
}

/// How many descriptors of `limit` are kept in reserve: one in sixteen; but at least those that the vault uses for
/// cached directories and for files that renames keep (`lamassu-vault`, `DIRS_MAX` and `nameless`), and some for
/// requests under way.
fn reserve(limit: u64) -> u64 {
    let kept_by_vault = limit.min(8192) / 8 + 256;
    (limit / 16).max(kept_by_vault + 64).min(limit / 2)
}

impl Descriptors {
    pub fn new(owner: u32) -> io::Result<Self> {
        Ok(Descriptors { owner, probe: File::open("/dev/null")?, state: Mutex::default() })
    }

    fn is_limited(&self, caller: Caller) -> bool {
        !caller.is_root() && caller.uid() != self.owner
    }

    /// Whether the caller may open one more.
    ///
    /// # Errors
    /// [`VaultError::Io`] with `EMFILE` or `ENFILE`.
    pub fn check(&self, caller: Caller) -> Result<()> {
        if !self.is_limited(caller) {
            return Ok(());
        }
        // Read each time: prlimit(1) changes it. `None` is no limit.
        let Some(limit) = getrlimit(Resource::Nofile).current else { return Ok(()) };
        let held = self.state.lock().held.get(&caller.uid()).map_or(0, Held::count);
        if held >= limit / 4 {
            self.warn(|| {
                tracing::warn!(
                    user = caller.uid(),
                    held,
                    limit,
                    "a user has a quarter of the files open that this mount may have; refused more (EMFILE)"
                )
            });
            return Err(VaultError::Io { op: "open", source: io::Error::from_raw_os_error(libc::EMFILE) });
        }
        let free_from = rustix::io::fcntl_dupfd_cloexec(&self.probe, 0).map_or(limit, |fd| fd.as_raw_fd() as u64);
        if free_from >= limit - reserve(limit) {
            self.warn(|| tracing::warn!(user = caller.uid(), held, limit, "almost as many files are open as this mount may have; the rest is kept for root and for directories (ENFILE)"));
            return Err(VaultError::Io { op: "open", source: io::Error::from_raw_os_error(libc::ENFILE) });
        }
        Ok(())
    }

    fn warn(&self, say: impl FnOnce()) {
        let mut state = self.state.lock();
        if state.warned.is_none_or(|at| at.elapsed() >= QUIET) {
            state.warned = Some(Instant::now());
            drop(state);
            say();
        }
    }

    /// Notes what the caller opened: a file, or with `None` a directory.
    pub fn opened(&self, caller: Caller, handle: HandleId, file: Option<Ino>) {
        if !self.is_limited(caller) {
            return;
        }
        let mut state = self.state.lock();
        state.handles.insert(handle, (caller.uid(), file.map_or(Opened::Dir(0), Opened::File)));
        let held = state.held.entry(caller.uid()).or_default();
        match file {
            Some(ino) => *held.files.entry(ino).or_default() += 1,
            None => held.dirs += 1,
        }
    }

    /// Notes that a handle was closed.
    pub fn closed(&self, handle: HandleId) {
        let mut state = self.state.lock();
        let Some((uid, opened)) = state.handles.remove(&handle) else { return };
        let State { held: all, listed, .. } = &mut *state;
        let Some(held) = all.get_mut(&uid) else { return };
        match opened {
            Opened::File(ino) => {
                let left = held.files.get(&ino).map_or(0, |handles| handles - 1);
                if left == 0 {
                    held.files.remove(&ino);
                } else {
                    held.files.insert(ino, left);
                }
            }
            Opened::Dir(bytes) => {
                held.dirs -= 1;
                held.listed -= bytes;
                *listed -= bytes;
            }
        }
        if held.count() == 0 {
            all.remove(&uid);
        }
    }

    /// Checks whether a listing may continue from a cookie. Returns whether that begins a listing: then
    /// [`Descriptors::listed`] must be called after it.
    ///
    /// # Errors
    /// [`VaultError::Io`] with `ENOMEM`.
    pub fn check_listing(&self, handle: HandleId, cookie: u64) -> Result<bool> {
        let state = self.state.lock();
        let Some(&(uid, Opened::Dir(own))) = state.handles.get(&handle) else { return Ok(false) };
        if cookie > 0 && own > 0 {
            return Ok(false);
        }
        let held = state.held.get(&uid).map_or(0, |held| held.listed);
        if held - own < LISTED_MAX && state.listed - own < LISTED_MAX_ALL {
            return Ok(true);
        }
        let all = state.listed;
        drop(state);
        self.warn(|| {
            tracing::warn!(
                user = uid,
                held,
                all,
                "the open listings of a user, or of all, take as much memory as they may; refused more (ENOMEM)"
            )
        });
        Err(VaultError::Io { op: "list a directory", source: io::Error::from_raw_os_error(libc::ENOMEM) })
    }

    /// Notes how much memory the listing of a directory takes now.
    pub fn listed(&self, handle: HandleId, bytes: usize) {
        let mut state = self.state.lock();
        let State { held: all, handles, listed, .. } = &mut *state;
        let Some((uid, Opened::Dir(own))) = handles.get_mut(&handle) else { return };
        let Some(held) = all.get_mut(uid) else { return };
        let before = std::mem::replace(own, bytes as u64);
        held.listed = held.listed - before + *own;
        *listed = *listed - before + *own;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USER: Caller = Caller::some(1000);

    #[test]
    fn the_reserve_leaves_most() {
        assert_eq!(reserve(1 << 20), 1 << 16);
        assert_eq!((reserve(1024), reserve(4096), reserve(256)), (448, 832, 128));
    }

    #[test]
    fn handles_of_a_file_share_and_all_is_given_back() {
        let all = Descriptors::new(7).unwrap();
        let count = || all.state.lock().held.get(&1000).map_or(0, Held::count);
        let id = HandleId;
        [(1, Some(5)), (2, Some(5)), (3, Some(6)), (4, None), (5, None)]
            .into_iter()
            .for_each(|(handle, file)| all.opened(USER, id(handle), file));
        all.opened(Caller::some(7), id(6), Some(9));
        all.opened(Caller::some(0), id(7), Some(9));
        assert_eq!((count(), all.state.lock().held.len()), (4, 1));
        all.closed(id(1));
        assert_eq!(count(), 4);
        (2..8).for_each(|handle| all.closed(id(handle)));
        all.closed(id(2));
        let state = all.state.lock();
        assert!(state.held.is_empty() && state.handles.is_empty());
    }

    #[test]
    fn listings_are_refused_to_one_who_holds_much_and_to_all_when_they_do() {
        const HALF: usize = LISTED_MAX as usize / 2;
        let all = Descriptors::new(7).unwrap();
        let id = HandleId;
        let list = |handle: u64| match all.check_listing(id(handle), 0) {
            Ok(begins) => {
                all.listed(id(handle), HALF);
                begins
            }
            Err(_) => panic!("refused: {handle}"),
        };
        let refused = |handle: u64, cookie| all.check_listing(id(handle), cookie).is_err();
        // By root, by users from 1000 on with three handles each.
        all.opened(Caller::some(0), id(1), None);
        assert!(!list(1));
        for handle in 10..40 {
            all.opened(Caller::some(1000 + (handle / 10) as u32), id(handle), None);
        }
        assert!(list(10) && list(11) && refused(12, 0) && refused(12, 5), "also from the middle");
        assert!(!refused(10, 7), "what has begun goes on");
        assert!(!refused(10, 0), "and begins anew");
        assert!(list(20));
        all.closed(id(10));
        assert!(!refused(12, 0));
        // The others take what there is.
        for user in 0..4 {
            (0..2).for_each(|i| all.opened(Caller::some(user + 1), id(100 + u64::from(user) * 10 + i), None));
            (0..2).take_while(|i| all.check_listing(id(100 + u64::from(user) * 10 + i), 0).is_ok()).for_each(|i| {
                all.listed(id(100 + u64::from(user) * 10 + i), HALF);
            });
        }
        assert!(refused(12, 0) && all.state.lock().listed >= LISTED_MAX_ALL);
        assert!(!list(1));
        (0..200).for_each(|handle| all.closed(id(handle)));
        let state = all.state.lock();
        assert!(state.held.is_empty() && state.handles.is_empty() && state.listed == 0);
    }
}
