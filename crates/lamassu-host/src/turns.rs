//! The turns of this host, of a vault that several hosts have (`docs/sharing.md`). A thread waits for requests that
//! need one, takes it from the server, opens the vault, and closes it when another host wants it.
//!
//! In each turn the vault is opened as if for the first time: nothing that was read in an earlier one is believed.

use crate::anchors::{Anchors, outdated_header};
use crate::{Error, Result};
use lamassu_anchor::row::Sealed;
use lamassu_anchor::{Anchor, Touched};
use lamassu_crypto::KeyRing;
use lamassu_format::header::VaultHeader;
use lamassu_lease::Mode;
use lamassu_rpc::host::{Turn, Turns};
use lamassu_vault::turns::{self as requests, End, Need, Use};
use lamassu_vault::{FileSystem, Forest, Options, Vault, VaultError};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// How often it is looked whether what is cached may be believed.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// The longest that is listened at once.
const LISTEN: Duration = Duration::from_secs(3600);
/// Between two tries to get a turn.
const TRY_AGAIN: Duration = Duration::from_millis(300);
/// A turn that lasted for so long was not one of many. Then the vault is had alone also for a request that looks, so
/// that the kernel may keep what it is told. Doubled each time that another host wants it back sooner.
const CALM: Duration = Duration::from_secs(1);
/// The longest that grows to.
const CALM_MAX: Duration = Duration::from_secs(300);
/// Between two warnings.
const QUIET: Duration = Duration::from_secs(60);

/// What a vault is opened with in each turn.
pub struct TurnOpening {
    header: VaultHeader,
    ring: KeyRing,
    options: Options,
}

impl TurnOpening {
    /// As a vault was opened in the first one, with this header.
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

/// Waits until this host has the vault as a request needs it, and keeps it while what comes back is there. `None`: it
/// is no vault that hosts have in turn, or there will be no further turn. Where no turn can be had now, no vault is
/// open.
pub(crate) fn hold(forest: &Forest, need: Need) -> Option<Use> {
    let turns = forest.turns()?;
    let (given, got) = mpsc::sync_channel(1);
    turns.run(need, move |held| drop(given.send(held)));
    got.recv().ok()
}

/// See the module's head.
struct Driver {
    forest: Arc<Forest>,
    requests: Arc<requests::Turns>,
    opening: TurnOpening,
    /// What the anchor says of the header that opens it.
    header: Sealed,
    turns: Arc<Turns>,
    /// Where the last turn is kept until the vault is closed.
    anchors: Anchors,
    /// What others changed since the vault was open here last; `None`: it may be anything.
    touched: Option<Touched>,
    warned: Option<Instant>,
    /// See [`CALM`].
    calm: Duration,
    /// Whether the vault is to be had alone though the next request looks.
    is_calm: bool,
}

/// Starts the thread. The vault is open in the first turn that `anchors` have.
pub(crate) fn start(forest: &Arc<Forest>, opening: TurnOpening, anchors: &Anchors) -> Result<()> {
    let (turns, first) = anchors.take_turn().ok_or(Error::NotAtServer)?;
    let header = Anchor::open(first.table.clone(), &opening.header.id())?.vault().header;
    let requests = requests::Turns::new();
    forest.take_turns(requests.clone());
    if first.takes_over && !opening.options.read_only {
        first.taken_over();
    }
    let touched = Some(Touched::default());
    let (forest, anchors) = (forest.clone(), anchors.clone());
    let driver =
        Driver { forest, requests, opening, header, turns, anchors, touched, warned: None, calm: CALM, is_calm: true };
    let started = thread::Builder::new().name("lamassu-turns".into()).spawn(move || driver.run(first));
    started.map(drop).map_err(|source| Error::Vault(VaultError::Io { op: "start a thread", source }))
}

impl Driver {
    fn run(mut self, first: Turn) {
        let mut turn = Some(first);
        // Nobody was here before: what the kernel has yet to learn it may keep at once.
        let mut keeps = true;
        while let Some(now) = turn.or_else(|| self.next()) {
            if self.serve(&now, std::mem::take(&mut keeps)) == End::Stopping {
                self.anchors.keep_turn(now);
                break;
            }
            now.pass();
            turn = None;
        }
        self.requests.over();
    }

    /// The next turn, with the vault open; `None`: the mount ends.
    fn next(&mut self) -> Option<Turn> {
        loop {
            let mode = match self.requests.wanted()? {
                requests::Mode::Look | requests::Mode::Change if self.opening.options.read_only => Mode::Shared,
                requests::Mode::Look if !self.is_calm => Mode::Shared,
                requests::Mode::Look | requests::Mode::Change => Mode::Exclusive,
            };
            let error = match self.turns.take(mode).map_err(Error::from).and_then(|turn| self.open(turn)) {
                Ok(turn) => return Some(turn),
                Err(error) => error,
            };
            if self.requests.is_stopping() {
                return None;
            }
            if self.warned.is_none_or(|at| at.elapsed() > QUIET) {
                tracing::error!(%error, "this host cannot get access to the vault; programs that use the mount get errors");
                self.warned = Some(Instant::now());
            }
            self.requests.fail_waiting();
            thread::sleep(TRY_AGAIN);
        }
    }

    /// Opens the vault in a turn, which is passed on where that fails.
    fn open(&mut self, turn: Turn) -> Result<Turn> {
        match (&turn.changed, &mut self.touched) {
            (Some(changed), Some(touched)) => touched.add(changed),
            (None, touched) => *touched = None,
            (Some(_), None) => {}
        }
        let TurnOpening { header, ring, options } = &self.opening;
        let anchor = Arc::new(Anchor::open(turn.table.clone(), &header.id())?);
        if anchor.vault().header != self.header {
            return Err(outdated_header());
        }
        let read_only = options.read_only || turn.mode() == Mode::Shared;
        let options = Options { anchor: Some(anchor), read_only, ..options.clone() };
        self.forest.begin_turn(header, ring.clone(), options, self.touched.as_ref())?;
        self.touched = Some(Touched::default());
        if turn.takes_over {
            tracing::warn!("another host's session of this vault did not end: what it had not synced is lost");
            if !read_only {
                turn.taken_over();
            }
        }
        self.warned = None;
        Ok(turn)
    }

    /// Has requests carried out until the turn is to end, and then closes the vault.
    fn serve(&mut self, turn: &Turn, keeps: bool) -> End {
        let (begun, is_shared) = (Instant::now(), turn.mode() == Mode::Shared && !self.opening.options.read_only);
        let number = self.requests.begin(match turn.mode() {
            // Where nothing is ever changed, the vault says so.
            Mode::Shared if is_shared => requests::Mode::Look,
            Mode::Shared | Mode::Exclusive => requests::Mode::Change,
        });
        if keeps {
            self.requests.keep();
        }
        let (listener, told) = (turn.listener(), self.requests.clone());
        let listen = move || {
            while listener.wait(LISTEN).is_none() {}
            told.recall(number);
        };
        if let Err(error) = thread::Builder::new().name("lamassu-told".into()).spawn(listen) {
            tracing::error!(%error, "cannot start a thread; this host releases the vault at once");
            self.requests.recall(number);
        }
        let mut are_dropped = false;
        let end = loop {
            match self.requests.wait_for_end(LOOK_AGAIN) {
                Some(end) => break end,
                None if turn.is_good() => {
                    are_dropped = false;
                    self.requests.keep();
                    if is_shared && begun.elapsed() > self.calm && self.requests.was_used() {
                        break End::TooLittle;
                    }
                }
                None if are_dropped => {}
                None => {
                    // R3.
                    self.expire();
                    self.forest.drop_pages(&self.requests.filled());
                    are_dropped = true;
                }
            }
        };
        if end == End::Stopping {
            return end;
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
        if let Err(error) = self.forest.end_turn() {
            tracing::error!(%error, "not everything that was written here could be committed: what was not is lost");
            // The kernel knows of what is lost.
            self.touched = None;
        }
        end
    }

    /// The kernel keeps no names and attributes any more. What it cannot be told, since a program holds a directory and
    /// waits for something else, it forgets by itself.
    fn expire(&self) {
        let Some(kept) = self.requests.stop_keeping() else { return };
        let (runs_out_in, (tell, told)) = (kept.runs_out_in, mpsc::channel());
        let (forest, requests) = (self.forest.clone(), self.requests.clone());
        let expire = move || {
            forest.expire(&requests, &kept);
            // Nobody listens where it came too late.
            let _ = tell.send(());
        };
        match thread::Builder::new().name("lamassu-expire".into()).spawn(expire) {
            Ok(_) => drop(told.recv_timeout(runs_out_in)),
            Err(_) => thread::sleep(runs_out_in),
        }
        self.requests.forgotten();
    }
}
