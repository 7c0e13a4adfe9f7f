//! Drives this host's turns of a vault that several hosts use (`docs/sharing.md`). A thread waits for requests that
//! need a turn, takes it from the server, opens the vault, and closes it when another host wants it.
//!
//! Each turn opens the vault as if for the first time: nothing that an earlier turn has read is trusted.

use crate::anchors::Access;
use crate::keeper::Keeper;
use crate::{Error, Result};
use lamassu_anchor::row::Sealed;
use lamassu_anchor::{Anchor, AnchorError, ServerFault, Touched};
use lamassu_crypto::KeyRing;
use lamassu_format::header::VaultHeader;
use lamassu_lease::Mode;
use lamassu_rpc::host::{LockRequest, Told, Turn, Turns};
use lamassu_vault::locks::{self, Asked, Locks, Object, Waiting};
use lamassu_vault::turns::{self as requests, End, Need, Use};
use lamassu_vault::{FileSystem, Forest, Options, Vault, VaultError};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// How often to check whether caches may still be valid.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// The longest single wait for a message of the server.
const LISTEN: Duration = Duration::from_secs(3600);
/// Time between two attempts to get a turn.
const TRY_AGAIN: Duration = Duration::from_millis(300);
/// A turn longer than this means little contention. The next turn is then exclusive even for a read, so that the kernel
/// may cache. Doubled each time another host recalls such a turn sooner.
const CALM: Duration = Duration::from_secs(1);
/// The upper limit of that time.
const CALM_MAX: Duration = Duration::from_secs(300);
/// Sessions that may end while their turn is being opened, before the requests that wait get an error.
const ENDED_MAX: u32 = 3;
/// How long all others wait while files that a host left open are taken over. The rest is, when it is opened.
const TAKING_OVER: Duration = Duration::from_secs(2);
/// Minimum time between two warnings.
const QUIET: Duration = Duration::from_secs(60);

/// How the vault is opened in each turn.
pub struct TurnOpening {
    header: VaultHeader,
    ring: KeyRing,
    options: Options,
}

impl TurnOpening {
    /// As the vault was opened in the first turn, with this header.
    ///
    /// # Errors
    /// [`Error::SharedDatasets`].
    pub fn of(header: &VaultHeader, vault: &Vault) -> Result<TurnOpening> {
        match header.has_datasets() {
            true => Err(Error::SharedDatasets),
            false => {
                let options = Options { anchor: None, ..vault.options().clone() };
                Ok(TurnOpening { header: header.clone(), ring: vault.ring().clone(), options })
            }
        }
    }
}

/// Waits until this host holds the vault as a request needs it, and keeps it while the result is alive. `None`: the
/// vault is not used by turns, or there will be no further turn. If no turn can be taken now, the result has no open
/// vault.
pub(crate) fn hold(forest: &Forest, need: Need) -> Option<Use> {
    let turns = forest.turns()?;
    let (given, got) = mpsc::sync_channel(1);
    turns.run(need, move |held| drop(given.send(held)));
    got.recv().ok()
}

/// Whether the session that a call needs has ended.
fn has_ended(error: &Error) -> bool {
    let Error::Vault(VaultError::Anchor(error)) = error.innermost() else { return false };
    matches!(error, AnchorError::Server { fault: ServerFault::Ended, .. })
}

/// The locks of this host's programs, which its session has.
struct HostLocks(Arc<Turns>);

impl Locks for HostLocks {
    fn ask(&self, asked: Asked, done: locks::Done) -> Option<Box<dyn Waiting>> {
        let request = self.0.lock(asked, done)?;
        Some(Box::new(Sent(request)))
    }

    fn closes(&self, file: Object, owner: u64) -> Option<Asked> {
        self.0.locks(|holder| holder.closes(file, owner))
    }

    fn closed(&self, handle: u64) -> Vec<Asked> {
        self.0.locks(|holder| holder.closed(handle))
    }

    fn is_lost(&self, handle: u64) -> bool {
        self.0.locks(|holder| holder.is_lost(handle))
    }
}

/// A request about locks that was sent.
struct Sent(LockRequest);

impl Waiting for Sent {
    fn cancel(&self) {
        self.0.cancel();
    }
}

/// The thread that takes this host's turns.
struct Driver {
    forest: Arc<Forest>,
    requests: Arc<requests::Turns>,
    opening: TurnOpening,
    /// The anchor's record of the header that opens it.
    header: Sealed,
    turns: Arc<Turns>,
    /// Its anchors keep the last turn until the vault is closed.
    keeper: Arc<Keeper>,
    /// What others have changed since the vault was last open here; `None`: perhaps everything.
    touched: Option<Touched>,
    warned: Option<Instant>,
    /// See [`CALM`].
    calm: Duration,
    /// Whether the next turn is exclusive even if the next request only reads.
    is_calm: bool,
}

/// Starts the thread. The vault is open in the first turn, which `anchors` has.
pub(crate) fn start(forest: &Arc<Forest>, opening: TurnOpening, keeper: &Arc<Keeper>) -> Result<()> {
    let (turns, first) = keeper.policy().anchors.take_turn().ok_or(Error::NotAtServer)?;
    let header = Anchor::open(first.table.clone(), &opening.header.id())?.vault().header;
    let requests = requests::Turns::new();
    forest.take_turns(requests.clone(), Arc::new(HostLocks(turns.clone())));
    take_over(forest, &first, opening.options.read_only);
    let touched = Some(Touched::default());
    let (forest, keeper) = (forest.clone(), keeper.clone());
    let driver =
        Driver { forest, requests, opening, header, turns, keeper, touched, warned: None, calm: CALM, is_calm: true };
    let started = thread::Builder::new().name("lamassu-turns".into()).spawn(move || driver.run(first));
    started.map(drop).map_err(|source| Error::Vault(VaultError::Io { op: "start a thread", source }))
}

/// Takes over what a host left whose session ended while it had the vault (rules R8 and R9).
fn take_over(forest: &Forest, turn: &Turn, read_only: bool) {
    if !turn.takes_over {
        return;
    }
    tracing::warn!("another host's session of this vault did not end: what it had not synced is lost");
    if !read_only && let Err(error) = forest.recover_for(TAKING_OVER) {
        tracing::warn!(%error, "not every file that it left open could be recovered now");
    }
    turn.taken_over();
}

impl Driver {
    fn run(mut self, first: Turn) {
        let mut turn = Some(first);
        // The mount is new, so the kernel has nothing outdated: it may cache at once.
        let mut keeps = true;
        while let Some(now) = turn.or_else(|| self.next()) {
            if self.serve(&now, std::mem::take(&mut keeps)) == End::Stopping {
                self.keeper.policy().anchors.keep_turn(now);
                break;
            }
            now.pass();
            turn = None;
        }
        self.requests.over();
    }

    /// Takes the next turn and opens the vault; `None`: the mount ends.
    fn next(&mut self) -> Option<Turn> {
        let mut ended = 0;
        loop {
            let mode = match self.requests.wanted()? {
                requests::Mode::Look | requests::Mode::Change if self.opening.options.read_only => Mode::Shared,
                requests::Mode::Look if !self.is_calm && !self.requests.is_changing() => Mode::Shared,
                requests::Mode::Look | requests::Mode::Change => Mode::Exclusive,
            };
            let error = match self.turns.take(mode).map_err(Error::from).and_then(|turn| self.open(turn)) {
                Ok(turn) => return Some(turn),
                Err(error) => error,
            };
            if self.requests.is_stopping() {
                return None;
            }
            // The session ended between the grant and the first call. Another one begins; no request has begun.
            if ended < ENDED_MAX && has_ended(&error) {
                ended += 1;
                continue;
            }
            if self.warned.is_none_or(|at| at.elapsed() > QUIET) {
                tracing::error!(%error, "this host cannot get access to the vault; programs that use the mount get errors");
                self.warned = Some(Instant::now());
            }
            self.requests.fail_waiting();
            thread::sleep(TRY_AGAIN);
        }
    }

    /// Opens the vault in a turn; on failure the turn is passed.
    fn open(&mut self, turn: Turn) -> Result<Turn> {
        match (&turn.changed, &mut self.touched) {
            (Some(changed), Some(touched)) => touched.add(changed),
            (None, touched) => *touched = None,
            (Some(_), None) => {}
        }
        let id = self.opening.header.id();
        let anchor = Arc::new(Anchor::open(turn.table.clone(), &id)?);
        let read_only = self.opening.options.read_only || turn.mode() == Mode::Shared;
        // An exclusive turn settles which of two headers is the newest.
        let is_open = |header| matches!(header, Sealed::Becomes { .. });
        if anchor.vault().header != self.header || is_open(self.header) && !read_only {
            self.opening.header = self.keeper.take_header(&anchor, Access::of(read_only), &self.opening.ring)?;
            self.header = anchor.vault().header;
        }
        // Whoever replaces the header in this turn tells this anchor.
        self.keeper.policy().anchors.opened_in_turn(&id, &anchor, Access::of(read_only));
        let TurnOpening { header, ring, options } = &self.opening;
        let options = Options { anchor: Some(anchor), read_only, ..options.clone() };
        self.forest.begin_turn(header, ring.clone(), options, self.touched.as_ref())?;
        self.touched = Some(Touched::default());
        take_over(&self.forest, &turn, read_only);
        self.warned = None;
        Ok(turn)
    }

    /// Lets requests run until the turn is to end, and then closes the vault.
    fn serve(&mut self, turn: &Turn, keeps: bool) -> End {
        let (begun, is_shared) = (Instant::now(), turn.mode() == Mode::Shared && !self.opening.options.read_only);
        let number = self.requests.begin(match turn.mode() {
            // A read-only vault refuses changes itself.
            Mode::Shared if is_shared => requests::Mode::Look,
            Mode::Shared | Mode::Exclusive => requests::Mode::Change,
        });
        if keeps {
            self.requests.keep();
        }
        let (listener, told) = (turn.listener(), self.requests.clone());
        let listen = move || {
            let why = loop {
                if let Some(why) = listener.wait(LISTEN) {
                    break why;
                }
            };
            if why == Told::Recalled {
                told.wait_while_used(number);
            }
            told.recall(number);
        };
        if let Err(error) = thread::Builder::new().name("lamassu-told".into()).spawn(listen) {
            tracing::error!(%error, "cannot start a thread; this host releases the vault at once");
            self.requests.recall(number);
        }
        // In any turn the kernel may have pages of maps. In doubt, calls fail until the caches are dropped: dropping
        // them waits for calls under way.
        turn.has_caches();
        let mut dropped_in = None;
        let end = loop {
            match self.requests.wait_for_end(LOOK_AGAIN) {
                Some(end) => break end,
                None if turn.is_good() => {
                    self.requests.keep();
                    if is_shared && begun.elapsed() > self.calm && self.requests.was_used() {
                        break End::TooLittle;
                    }
                }
                None => {
                    if let Some(doubt) = turn.doubt().filter(|doubt| Some(*doubt) != dropped_in) {
                        // Rule R3. Pages first: nothing else limits how long the kernel uses them.
                        self.forest.drop_pages(&self.requests.filled());
                        self.expire();
                        turn.caches_are_dropped(doubt);
                        dropped_in = Some(doubt);
                    }
                }
            }
        };
        if end == End::Stopping {
            // The mount is gone. What is left to be committed waits for the server.
            turn.has_no_caches();
            return end;
        }
        if !turn.is_good() {
            self.forest.drop_pages(&self.requests.filled());
        }
        self.is_calm = begun.elapsed() > self.calm;
        self.calm = match self.is_calm {
            true => CALM,
            false if end == End::Recalled => CALM_MAX.min(2 * self.calm),
            false => self.calm,
        };
        self.expire();
        self.requests.stop_requests();
        while let Some(files) = self.requests.end() {
            self.forest.drop_pages(&files);
        }
        turn.has_no_caches();
        if let Err(error) = self.forest.end_turn() {
            tracing::error!(%error, "not everything that was written here could be committed: what was not is lost");
            // What is lost was visible to the kernel.
            self.touched = None;
        }
        end
    }

    /// Lets the kernel drop names and attributes. If it cannot be told, since a program holds a directory and waits for
    /// something else, waits until they expire.
    fn expire(&self) {
        let Some(kept) = self.requests.stop_keeping() else { return };
        let (runs_out_in, (tell, told)) = (kept.runs_out_in, mpsc::channel());
        let (forest, requests) = (self.forest.clone(), self.requests.clone());
        let expire = move || {
            forest.expire(&requests, &kept);
            // The receiver is gone if the timeout came first.
            let _ = tell.send(());
        };
        match thread::Builder::new().name("lamassu-expire".into()).spawn(expire) {
            Ok(_) => drop(told.recv_timeout(runs_out_in)),
            Err(_) => thread::sleep(runs_out_in),
        }
        self.requests.forgotten();
    }
}
