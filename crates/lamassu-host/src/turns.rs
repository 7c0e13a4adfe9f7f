//! Drives this host's turns of a vault that several hosts use (`docs/sharing.md`). A thread waits for requests that
//! need a turn, takes it from the server, opens the vault, and closes it when another host wants it. Each dataset has a
//! thread of its own, from its first use on.
//!
//! Each turn opens the vault as if for the first time: nothing that an earlier turn has read is trusted.

mod hold;
mod locks;

pub(crate) use hold::{hold, hold_along, hold_shown, hold_shown_soon, hold_stored, why_away};

use crate::anchors::Access;
use crate::keeper::{Keeper, TurnOpening};
use crate::{Error, Result};
use lamassu_anchor::row::Sealed;
use lamassu_anchor::{Anchor, AnchorError, ServerFault, Touched};
use lamassu_format::header::VaultId;
use lamassu_lease::Mode;
use lamassu_rpc::host::{Told, Turn, Turns};
use lamassu_vault::forest::{Number, ROOT_MEMBER};
use lamassu_vault::locks::Locks;
use lamassu_vault::turns::{self as requests, End};
use lamassu_vault::{Forest, Options, VaultError};
use locks::HostLocks;
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
/// Threads for requests that waited for a turn, and the same for a dataset.
const RUNNERS: usize = 4;
const RUNNERS_OF_DATASET: usize = 2;
/// Minimum time between two warnings.
const QUIET: Duration = Duration::from_secs(60);

/// Whether the session that a call needs has ended.
fn has_ended(error: &Error) -> bool {
    let Error::Vault(VaultError::Anchor(error)) = error.innermost() else { return false };
    matches!(error, AnchorError::Server { fault: ServerFault::Ended, .. })
}

/// The thread that takes this host's turns with one member.
struct Driver {
    member: Number,
    forest: Arc<Forest>,
    requests: Arc<requests::Turns>,
    locks: Arc<HostLocks>,
    /// Its anchors keep the last turn until the vault is closed.
    keeper: Arc<Keeper>,
    /// `None`: a dataset that was not used yet.
    session: Option<Session>,
    /// What others have changed since the vault was last open here; `None`: perhaps everything.
    touched: Option<Touched>,
    warned: Option<Instant>,
    /// See [`CALM`].
    calm: Duration,
    /// Whether the next turn is exclusive even if the next request only reads.
    is_calm: bool,
}

/// This host's use of a vault at its server.
struct Session {
    turns: Arc<Turns>,
    id: VaultId,
    opening: TurnOpening,
    /// The anchor's record of the header that opens it; [`Sealed::Nothing`]: it was not compared yet.
    header: Sealed,
}

/// Why there is no turn.
enum NoTurn {
    /// There will be none.
    Over,
    /// There is no key for this dataset here.
    Locked,
}

/// Starts the thread for the mount's own vault, which is open in the first turn that `anchors` has.
pub(crate) fn start(forest: &Arc<Forest>, opening: TurnOpening, keeper: &Arc<Keeper>) -> Result<()> {
    keeper.drive_datasets(start_dataset);
    let id = opening.header.id();
    let (turns, first) = keeper.policy().anchors.take_turn(&id).ok_or(Error::NotAtServer)?;
    let header = Anchor::open(first.table.clone(), &id)?.vault().header;
    let requests = requests::Turns::new();
    let locks = Arc::new(HostLocks::default());
    locks.begin(&turns);
    forest.take_turns(requests.clone(), locks.clone());
    take_over(forest, ROOT_MEMBER, &first, opening.options.read_only);
    let session = Some(Session { turns, id, opening, header });
    let driver = Driver { session, ..Driver::new(ROOT_MEMBER, forest, keeper, (&requests, &locks)) };
    driver.start(RUNNERS, Some(first))
}

/// Starts the thread for a dataset. Requests wait in what it returns.
pub(crate) fn start_dataset(
    forest: &Arc<Forest>,
    keeper: &Arc<Keeper>,
    member: Number,
) -> Result<(Arc<requests::Turns>, Arc<dyn Locks>)> {
    let (requests, locks) = (requests::Turns::new(), Arc::new(HostLocks::default()));
    let driver = Driver::new(member, forest, keeper, (&requests, &locks));
    // The threads that did start must not wait for ever.
    driver.start(RUNNERS_OF_DATASET, None).inspect_err(|_| requests.over())?;
    Ok((requests, locks))
}

/// Takes over what a host left whose session ended while it had the vault (rules R8 and R9).
fn take_over(forest: &Forest, member: Number, turn: &Turn, read_only: bool) {
    if !turn.takes_over {
        return;
    }
    tracing::warn!("another host's session of this vault did not end: what it had not synced is lost");
    if !read_only && let Err(error) = forest.recover_for(member, TAKING_OVER) {
        tracing::warn!(%error, "not every file that it left open could be recovered now");
    }
    turn.taken_over();
}

impl Driver {
    fn new(
        member: Number,
        forest: &Arc<Forest>,
        keeper: &Arc<Keeper>,
        (requests, locks): (&Arc<requests::Turns>, &Arc<HostLocks>),
    ) -> Driver {
        Driver {
            member,
            forest: forest.clone(),
            requests: requests.clone(),
            locks: locks.clone(),
            keeper: keeper.clone(),
            session: None,
            touched: Some(Touched::default()),
            warned: None,
            calm: CALM,
            is_calm: true,
        }
    }

    fn start(self, runners: usize, first: Option<Turn>) -> Result<()> {
        let started = self.requests.start_runners(runners).and_then(|()| {
            let name = format!("lamassu-turns-{}", self.member);
            thread::Builder::new().name(name).spawn(move || self.run(first)).map(drop)
        });
        started.map_err(|source| Error::Vault(VaultError::Io { op: "start a thread", source }))
    }

    fn run(mut self, first: Option<Turn>) {
        // The mount is new, so the kernel has nothing outdated: it may cache at once.
        let (mut turn, mut keeps) = (first, self.member == ROOT_MEMBER);
        loop {
            let now = match turn.take().map_or_else(|| self.next(), Ok) {
                Ok(now) => now,
                Err(NoTurn::Over) => break,
                Err(NoTurn::Locked) => {
                    // In this order: `key load` brings keys as soon as it is locked.
                    self.keeper.forget(self.member);
                    self.forest.has_no_key(self.member);
                    break;
                }
            };
            match self.serve(&now, std::mem::take(&mut keeps)) {
                End::Stopping => {
                    if let Some(session) = &self.session {
                        self.keeper.policy().anchors.keep_turn(&session.id, now);
                    }
                    break;
                }
                End::Retired => {
                    now.pass();
                    break;
                }
                End::Recalled | End::TooLittle => now.pass(),
            }
        }
        // Whoever waits for the end may use the anchor's copy at once.
        self.session = None;
        self.requests.over();
    }

    /// Takes the next turn and opens the vault.
    fn next(&mut self) -> std::result::Result<Turn, NoTurn> {
        let mut ended = 0;
        loop {
            let wanted = self.requests.wanted().ok_or(NoTurn::Over)?;
            let mode = match wanted {
                requests::Mode::Look | requests::Mode::Change if self.keeper.is_read_only() => Mode::Shared,
                requests::Mode::Look if !self.is_calm && !self.requests.is_changing() => Mode::Shared,
                requests::Mode::Look | requests::Mode::Change => Mode::Exclusive,
            };
            let error = match self.attend().and_then(|()| self.take(mode, wanted)) {
                Ok(Some(turn)) => return Ok(turn),
                // Nothing waits for it any more, or something for less: another host may have frozen the vault.
                Ok(None) => continue,
                Err(error) => error,
            };
            if self.requests.is_last() {
                return Err(NoTurn::Over);
            }
            if matches!(error.innermost(), Error::Vault(VaultError::KeyNotLoaded)) {
                return Err(NoTurn::Locked);
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

    /// Begins to use a dataset, unless that was done.
    fn attend(&mut self) -> Result<()> {
        if self.session.is_some() {
            return Ok(());
        }
        let (id, opening) = self.keeper.dataset_by_turns(&self.forest, self.member)?;
        let turns = self.keeper.policy().anchors.begin_turns(&id)?;
        self.locks.begin(&turns);
        self.keeper.has_used_brought(self.member);
        self.session = Some(Session { turns, id, opening, header: Sealed::Nothing });
        Ok(())
    }

    /// Takes a turn, and opens the vault in it. `None`: requests want none any more. On failure the turn is passed.
    fn take(&mut self, mode: Mode, wanted: requests::Mode) -> Result<Option<Turn>> {
        let Some(session) = &mut self.session else { return Err(Error::NoTurn) };
        let requests = self.requests.clone();
        let Some(turn) = session.turns.take_while(mode, &|| requests.is_wanted(wanted))? else { return Ok(None) };
        match (&turn.changed, &mut self.touched) {
            (Some(changed), Some(touched)) => touched.add(changed),
            (None, touched) => *touched = None,
            (Some(_), None) => {}
        }
        let id = session.id;
        let anchor = Arc::new(Anchor::open(turn.table.clone(), &id)?);
        let read_only = session.opening.options.read_only || turn.mode() == Mode::Shared;
        // An exclusive turn settles which of two headers is the newest.
        let is_open = |header| matches!(header, Sealed::Becomes { .. });
        if anchor.vault().header != session.header || is_open(session.header) && !read_only {
            let access = Access::of(read_only);
            let opening = &mut session.opening;
            opening.header = self.keeper.take_header(self.member, &anchor, access, &opening.ring)?;
            self.keeper.follow_header(&self.forest, self.member, opening)?;
            session.header = anchor.vault().header;
        }
        // Whoever replaces the header in this turn tells this anchor.
        self.keeper.policy().anchors.opened_in_turn(&id, &anchor, Access::of(read_only));
        let TurnOpening { header, ring, options } = &session.opening;
        let options = Options { anchor: Some(anchor), read_only, ..options.clone() };
        self.forest.begin_turn(self.member, header, ring.clone(), options, self.touched.as_ref())?;
        self.touched = Some(Touched::default());
        take_over(&self.forest, self.member, &turn, read_only);
        self.warned = None;
        Ok(Some(turn))
    }

    /// Lets requests run until the turn is to end, and then closes the vault.
    fn serve(&mut self, turn: &Turn, keeps: bool) -> End {
        let (begun, is_shared) = (Instant::now(), turn.mode() == Mode::Shared && !self.keeper.is_read_only());
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
        let (mut dropped_in, mut is_kept) = (None, false);
        let end = loop {
            if self.requests.is_frozen() != is_kept {
                is_kept = !is_kept;
                turn.keep(is_kept);
            }
            if is_kept {
                self.forest.watch_freeze();
            }
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
                        // Dropping waits for changes, which a freeze holds back, of this vault or of one in it.
                        self.requests.drops_caches(true);
                        self.forest.lose_freeze();
                        // Rule R3. Pages first: nothing else limits how long the kernel uses them.
                        self.forest.drop_pages(&self.requests.filled());
                        self.expire();
                        turn.caches_are_dropped(doubt);
                        dropped_in = Some(doubt);
                        self.requests.drops_caches(false);
                    }
                }
            }
        };
        turn.keep(false);
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
        self.requests.end(|ino, part| self.forest.drop_part(ino, part));
        turn.has_no_caches();
        if let Err(error) = self.forest.end_turn(self.member) {
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
