mod puts;

use super::opening::{OPEN_MANY, close};
use super::*;
use crate::ServerError;
use crate::anchor_store::{self, Files, file_of};
use crate::arrivals::Arrivals;
use crate::bounds::Bounds;
use crate::metrics::Metrics;
use crate::numbers::Numbers;
use crate::policy::Policies;
use crate::state::Pending;
use crate::vault::{REPLIES_MAX, VAULT};
use lamassu_anchor::row::{Content, Sealed};
use lamassu_anchor::table::DiskTable;
use lamassu_anchor::{AnchorError, Digest, ObjectId, Row, Token, TokenKey, VaultRow};
use lamassu_keys::unix_now;
use lamassu_lease::{Call, Mode, RequestNo};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tokio::sync::mpsc::channel;

const VAULTS: [VaultId; 3] = [VaultId([1; 16]), VaultId([2; 16]), VaultId([3; 16])];

fn anchor(dir: &Path, id: &VaultId) -> PathBuf {
    file_of(&dir.join(anchor_store::DIR), id)
}

/// An anchor, of which no server has a head yet.
fn make(path: &Path, id: VaultId) -> Arc<DiskTable> {
    let table = Arc::new(DiskTable::create(path).unwrap());
    let of_root = Sealed::Is(Digest([1; 32]));
    let content = Content::Dir { record: of_root, parent: ObjectId::ROOT, name: Token([0; 16]) };
    let root = Row { mode: 0o700, uid: 0, gid: 0, links: 1, content, attributes: of_root };
    drop(Anchor::create(table.clone(), VaultRow::new(id, TokenKey::new([1; 32])), root).unwrap());
    table
}

/// Three vaults in files, and a host that may use them.
fn vaults(dir: &Path) -> (Vaults, Caller) {
    let anchors = Arc::new(Files::open(dir).unwrap());
    let state = Arc::new(if dir.join("state.redb").exists() { State::open(dir) } else { State::make(dir) }.unwrap());
    let caller = Caller { name: "one".into(), key: Arc::from(*b"key") };
    if state.host("one").is_none() {
        let pending = Pending { host: "one".into(), until: u64::MAX, vaults: VAULTS.map(|id| id.to_string()).into() };
        state.put_token(b"token", &pending, 0).unwrap();
        assert!(state.use_token(b"token", unix_now(), &caller.key).unwrap().is_ok());
        for id in VAULTS {
            make(&anchor(dir, &id), id).commit(&[Head([3; 32]).change()]).unwrap();
            state.note_kept("one", &id, None).unwrap();
        }
    }
    let (terms, metrics) = (Terms::DEFAULT, Metrics::default());
    std::fs::write(dir.join("policy.toml"), "").unwrap();
    let policies = Arc::new(Policies::start(dir, terms, (state.clone(), metrics.clone())).unwrap());
    let common = Common {
        state,
        metrics,
        policies,
        pauses: Arc::default(),
        bounds: Bounds::new(2),
        numbers: Numbers::default(),
        arrivals: Arrivals::default(),
    };
    (Vaults { unused: 0, ..Vaults::new(anchors, terms, common, 100) }, caller)
}

fn attend(vaults: &Vaults, caller: &Caller, id: &VaultId) -> (Arc<Vault>, Begun) {
    let begun = vaults.begin(id, caller, (Use::ByTurns, SessionId(u64::MAX)), channel(REPLIES_MAX).0);
    begun.unwrap_or_else(|_| panic!("a session begins"))
}

fn open(vaults: &Vaults) -> Vec<VaultId> {
    let mut open: Vec<_> = vaults.in_use().into_iter().map(|(id, _)| id).collect();
    open.sort();
    open
}

/// Each that is open takes two of the files that the process may open.
#[test]
fn a_vault_is_open_while_it_has_sessions() {
    let dir = tempfile::tempdir().unwrap();
    {
        let (vaults, caller) = vaults(dir.path());
        assert!(vaults.open_attended().is_ok_and(|count| count == 3) && open(&vaults).is_empty());
        let (vault, begun) = attend(&vaults, &caller, &VAULTS[0]);
        let acquire = Call::Acquire { request: RequestNo(1), object: VAULT, mode: Mode::Exclusive };
        assert!(vault.call(begun.line, acquire).is_ok());
        let (other, left) = attend(&vaults, &caller, &VAULTS[1]);
        assert!(other.call(left.line, Call::Leave).is_ok());
        drop(vault);
        assert!(vaults.tick().is_ok());
        assert_eq!(open(&vaults), VAULTS[..2], "another one is used");
        drop(other);
        assert!(vaults.tick().is_ok());
        assert_eq!(open(&vaults), VAULTS[..1]);
        // Nothing is left of the others, once they are closed.
        while vaults.slots.lock().len() > 1 {
            assert!(vaults.tick().is_ok());
        }
        // It is opened again, also while it is being closed.
        let (vault, _) = attend(&vaults, &caller, &VAULTS[1]);
        let rows = vault.table_to_look_at();
        drop(vault);
        vaults.close_unused(&VAULTS[1]);
        assert_eq!(open(&vaults), VAULTS[..2]);
        drop(rows);
        assert!(vaults.vault(&VAULTS[2]).is_ok() && vaults.is_open(&VAULTS[2]));
        vaults.close_unused(&VAULTS[2]);
        assert!(!vaults.is_open(&VAULTS[2]) && vaults.is_open(&VAULTS[1]));
    }
    let (vaults, _) = vaults(dir.path());
    assert!(vaults.open_attended().is_ok());
    assert_eq!(open(&vaults), VAULTS[..2], "those that have sessions from before");
    assert!(matches!(DiskTable::open(&anchor(dir.path(), &VAULTS[0])), Err(AnchorError::Locked { .. })));
    assert!(DiskTable::open(&anchor(dir.path(), &VAULTS[2])).is_ok());
}

/// Who reads its rows slowly keeps it open: a host that came meanwhile would have to wait for that.
#[test]
fn a_vault_whose_rows_are_read_stays_open() {
    let dir = tempfile::tempdir().unwrap();
    let (vaults, _) = vaults(dir.path());
    let table = vaults.vault(&VAULTS[0]).unwrap_or_else(|_| panic!("opens")).table_to_look_at();
    assert!(vaults.tick().is_ok());
    assert_eq!(open(&vaults), VAULTS[..1]);
    drop(table);
    assert!(vaults.tick().is_ok());
    assert!(open(&vaults).is_empty());
    assert!(vaults.vault(&VAULTS[0]).is_ok(), "it is opened again");
    let vaults = Vaults { unused: UNUSED, ..vaults };
    assert!(vaults.tick().is_ok());
    assert_eq!(open(&vaults), VAULTS[..1], "it may be used soon");
    assert_eq!([1, OPEN_MANY + 1].map(|open| vaults.may_be_unused(open)), [UNUSED, 0]);
}

/// The server ends when the anchor is retired, and the state does not know that yet; and when it is about to come.
#[test]
fn a_dataset_whose_anchor_was_just_retired_keeps_its_place() {
    const INNER: VaultId = VaultId([4; 16]);
    const NEVER_OPENED: VaultId = VaultId([5; 16]);
    const COMING: VaultId = VaultId([6; 16]);
    let dir = tempfile::tempdir().unwrap();
    {
        let (vaults, caller) = vaults(dir.path());
        let state = vaults.state();
        for id in [INNER, NEVER_OPENED] {
            make(&anchor(dir.path(), &id), id).commit(&[Head([3; 32]).change()]).unwrap();
            state.note_kept("one", &id, Some(&VAULTS[0])).unwrap();
        }
        let (vault, _) = attend(&vaults, &caller, &INNER);
        drop(vault);
        for id in [INNER, NEVER_OPENED] {
            state.will_put_away(&id).unwrap();
            assert!(vaults.anchors.put_away(&id).unwrap());
        }
        state.will_keep(&COMING, Some(&VAULTS[0])).unwrap();
    }
    let (vaults, _) = vaults(dir.path());
    assert!(vaults.open_attended().is_ok_and(|count| count == 3));
    let spoken_for =
        |id: &VaultId| [VAULTS[0], VAULTS[1]].map(|around| vaults.state().is_spoken_for(id, &around).unwrap());
    for id in [INNER, NEVER_OPENED] {
        assert!(!vaults.state().keeps(&id).unwrap());
        assert_eq!(spoken_for(&id), [false, true], "{id}");
    }
    assert_eq!(spoken_for(&COMING), [false; 2]);
    assert!(vaults.state().attended().unwrap().is_empty(), "its sessions have ended");
    let again = vaults.state().copied().unwrap();
    assert_eq!(again.lay_in.len(), 2, "{again:?}");
}

/// Files, of which one install does its work and fails all the same.
struct Doubtful {
    files: Files,
    fails: Arc<AtomicBool>,
    /// How often it was asked of one anchor whether it has it.
    asked: Arc<AtomicUsize>,
}

struct DoubtfulNew(Box<dyn NewAnchor>, Arc<AtomicBool>);

impl AnchorStore for Doubtful {
    fn all(&self) -> Result<Vec<VaultId>> {
        self.files.all()
    }

    fn has(&self, id: &VaultId) -> Result<bool> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.files.has(id)
    }

    fn open(&self, id: &VaultId) -> std::result::Result<Arc<dyn Table>, AnchorError> {
        self.files.open(id)
    }

    fn begin(&self, id: &VaultId) -> std::result::Result<Box<dyn NewAnchor>, AnchorError> {
        Ok(Box::new(DoubtfulNew(self.files.begin(id)?, self.fails.clone())))
    }

    fn put_away(&self, id: &VaultId) -> Result<bool> {
        self.files.put_away(id)
    }

    fn free(&self) -> u64 {
        self.files.free()
    }

    fn name(&self, id: &VaultId) -> String {
        self.files.name(id)
    }
}

impl NewAnchor for DoubtfulNew {
    fn table(&self) -> Arc<dyn Table> {
        self.0.table()
    }

    fn install(self: Box<Self>) -> Result<()> {
        self.0.install()?;
        if self.1.swap(false, Ordering::SeqCst) { Err(ServerError::NotRunning) } else { Ok(()) }
    }
}

/// The host repeats the put: that is a success, and the anchor is kept from then on, where it was put.
#[test]
fn a_put_that_was_in_doubt_is_noted_when_it_is_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let (vaults, caller) = vaults(dir.path());
    let fails = Arc::new(AtomicBool::new(false));
    let files = Files::open(dir.path()).unwrap();
    let anchors = Arc::new(Doubtful { files, fails: fails.clone(), asked: Arc::default() });
    let vaults = Arc::new(Vaults { anchors, ..vaults });
    let [dataset, granted] = [VaultId([4; 16]), VaultId([5; 16])];
    vaults.state().grant("one", &granted.to_string(), true).unwrap();
    for (id, around) in [(dataset, Some(VAULTS[0])), (granted, None)] {
        let mut rows = Vec::new();
        let table: Arc<dyn Table> = make(&dir.path().join(id.to_string()), id);
        let visited = table.visit_all(|space, key, value| {
            rows.push(Change { space, key: key.to_vec(), value: Some(value.to_vec()) });
            Ok::<(), AnchorError>(())
        });
        visited.unwrap();
        let put = |around: Option<VaultId>| -> Answer<Head> {
            let mut put = vaults.begin_put(&caller, &id, None, around)?;
            put.take(&rows)?;
            put.finish(&caller)
        };
        fails.store(true, Ordering::SeqCst);
        assert!(matches!(put(around), Err(Refused::Failed(_))));
        assert!(vaults.anchors.has(&id).unwrap() && !vaults.state().keeps(&id).unwrap());
        // What it came as decides, not what is said now.
        if around.is_some() {
            assert!(matches!(put(Some(VAULTS[1])), Err(Refused::NotGranted)));
        }
        for _ in 0..2 {
            put(around).unwrap();
            assert!(vaults.state().keeps(&id).unwrap());
            assert_eq!(vaults.state().around(&id), around);
        }
    }
}

/// With etcd each question takes the time of an answer from its members, and hosts wait for the leader.
#[test]
fn a_server_that_starts_asks_of_no_single_anchor_whether_it_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let (vaults, _) = vaults(dir.path());
    let (files, asked) = (Files::open(dir.path()).unwrap(), Arc::<AtomicUsize>::default());
    let anchors = Arc::new(Doubtful { files, fails: Arc::default(), asked: asked.clone() });
    let vaults = Vaults { anchors, ..vaults };
    std::fs::remove_file(anchor(dir.path(), &VAULTS[1])).unwrap();
    assert_eq!(missing(vaults.anchors(), vaults.state()).unwrap(), [VAULTS[1]]);
    assert!(vaults.open_attended().is_ok_and(|count| count == 2));
    assert_eq!(asked.load(Ordering::SeqCst), 0);
}

/// Files, each of which opens when another one does, or after a while.
struct Together {
    files: Files,
    /// How many are being opened, and how many were at once.
    opening: std::sync::Mutex<(usize, usize)>,
    more: std::sync::Condvar,
}

impl AnchorStore for Together {
    fn all(&self) -> Result<Vec<VaultId>> {
        self.files.all()
    }

    fn has(&self, id: &VaultId) -> Result<bool> {
        self.files.has(id)
    }

    fn open(&self, id: &VaultId) -> std::result::Result<Arc<dyn Table>, AnchorError> {
        let mut opening = self.opening.lock().unwrap();
        opening.0 += 1;
        opening.1 = opening.1.max(opening.0);
        self.more.notify_all();
        let is_alone = |opening: &mut (usize, usize)| opening.1 < 2;
        let waited = self.more.wait_timeout_while(opening, Duration::from_secs(10), is_alone);
        waited.unwrap().0.0 -= 1;
        self.files.open(id)
    }

    fn begin(&self, id: &VaultId) -> std::result::Result<Box<dyn NewAnchor>, AnchorError> {
        self.files.begin(id)
    }

    fn put_away(&self, id: &VaultId) -> Result<bool> {
        self.files.put_away(id)
    }

    fn free(&self) -> u64 {
        self.files.free()
    }

    fn name(&self, id: &VaultId) -> String {
        self.files.name(id)
    }
}

/// A host may have sessions in hundreds of vaults, and each waits for answers of etcd.
#[test]
fn a_server_that_starts_opens_several_vaults_at_once() {
    let dir = tempfile::tempdir().unwrap();
    {
        let (vaults, caller) = vaults(dir.path());
        for id in &VAULTS[..2] {
            attend(&vaults, &caller, id);
        }
    }
    let (vaults, _) = vaults(dir.path());
    let (files, (opening, more)) = (Files::open(dir.path()).unwrap(), Default::default());
    let anchors = Arc::new(Together { files, opening, more });
    let vaults = Vaults { anchors: anchors.clone(), ..vaults };
    assert!(vaults.open_attended().is_ok_and(|count| count == 3));
    assert_eq!((anchors.opening.lock().unwrap().1, open(&vaults)), (2, VAULTS[..2].to_vec()));
}

/// All rows of the anchor of a vault.
fn rows(vaults: &Vaults, id: &VaultId) -> Vec<Change> {
    let table = vaults.vault(id).unwrap_or_else(|_| panic!("opens")).table_to_look_at();
    let mut rows = Vec::new();
    let visited = table.visit_all(|space, key, value| {
        rows.push(Change { space, key: key.to_vec(), value: Some(value.to_vec()) });
        Ok::<(), AnchorError>(())
    });
    visited.unwrap();
    rows
}

/// Each takes files of the process, also while nobody is connected: a host could else take all of them.
#[test]
fn a_host_has_sessions_in_so_many_vaults_and_leaves_others_theirs() {
    let dir = tempfile::tempdir().unwrap();
    {
        let (vaults, caller) = vaults(dir.path());
        let begin = |id: &VaultId, caller: &Caller| {
            let none = (Use::ByTurns, SessionId(u64::MAX));
            vaults.begin(id, caller, none, channel(REPLIES_MAX).0).map(|(vault, begun)| (vault, begun.line))
        };
        let [one, two, three] = VAULTS.map(|id| begin(&id, &caller));
        let (Ok(_one), Ok((vault, line))) = (one, two) else { panic!("two are as many as it may") };
        assert!(matches!(three, Err(Refused::TooMuch(_))));
        assert!(begin(&VAULTS[1], &caller).is_ok_and(|(vault, more)| vault.call(more, Call::Leave).is_ok()));
        assert!(begin(&VAULTS[2], &caller).is_err(), "it still has the first session there");
        assert!(vault.call(line, Call::Leave).is_ok());
        assert!(begin(&VAULTS[2], &caller).is_ok(), "it has left one");
    }
    // After a restart it still has them.
    let (vaults, caller) = vaults(dir.path());
    assert!(vaults.open_attended().is_ok());
    let none = (Use::ByTurns, SessionId(u64::MAX));
    assert!(matches!(vaults.begin(&VAULTS[1], &caller, none, channel(1).0), Err(Refused::TooMuch(_))));
    assert!(vaults.begin(&VAULTS[0], &caller, none, channel(1).0).is_ok());
}

#[test]
fn of_the_vaults_that_may_be_open_those_that_nobody_uses_give_way() {
    let dir = tempfile::tempdir().unwrap();
    let (vaults, caller) = vaults(dir.path());
    let vaults = Vaults { unused: UNUSED, room: Room::of(2), ..vaults };
    let use_once = |id: &VaultId| vaults.vault_for(&caller, id).map(drop);
    let (used, _) = attend(&vaults, &caller, &VAULTS[0]);
    drop(used);
    assert!(use_once(&VAULTS[1]).is_ok() && use_once(&VAULTS[2]).is_ok());
    assert_eq!(open(&vaults), [VAULTS[0], VAULTS[2]], "it has a session");
    let _other = attend(&vaults, &caller, &VAULTS[2]);
    assert!(matches!(use_once(&VAULTS[1]), Err(Refused::TooMuch(_))));
    assert!(vaults.vault(&VAULTS[1]).is_ok(), "an administrator is refused nothing");
    assert!(use_once(&VAULTS[0]).is_ok(), "nor is who has one open");
}

/// Ticks and administrators do, and so does monitoring.
#[test]
fn who_looks_at_all_vaults_keeps_none_of_the_others_open() {
    let dir = tempfile::tempdir().unwrap();
    let (vaults, caller) = vaults(dir.path());
    let vaults = Vaults { unused: UNUSED, room: Room::of(2), ..vaults };
    let use_once = |id: &VaultId| vaults.vault_for(&caller, id).map(drop);
    assert!(use_once(&VAULTS[0]).is_ok() && use_once(&VAULTS[1]).is_ok());
    let slots = vaults.slots();
    let mut opened = Vaults::opened(&slots, |slot| Some(slot.lock()));
    let looked_at = opened.next().expect("two are open");
    assert!(use_once(&VAULTS[2]).is_ok());
    assert_eq!(open(&vaults).len(), 2);
    assert!(vaults.is_open(&looked_at.id()));
}

#[test]
fn a_vault_that_is_used_for_a_moment_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let (vaults, caller) = vaults(dir.path());
    let vaults = Vaults { unused: UNUSED, room: Room::of(1), ..vaults };
    let looked_at = vaults.vault(&VAULTS[0]).unwrap_or_else(|_| panic!("opens"));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let looked_at = looked_at;
            // Until the other one has been asked for.
            while !vaults.slots.lock().contains_key(&VAULTS[1]) {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(50));
            drop(looked_at);
        });
        assert!(vaults.vault_for(&caller, &VAULTS[1]).is_ok());
    });
}

/// It would else count as one that can be closed, for ever.
#[test]
fn a_vault_in_doubt_that_nobody_uses_gives_way() {
    let dir = tempfile::tempdir().unwrap();
    let (vaults, caller) = vaults(dir.path());
    let vaults = Vaults { unused: UNUSED, room: Room::of(1), ..vaults };
    {
        let doubtful = vaults.vault(&VAULTS[0]).unwrap_or_else(|_| panic!("opens"));
        assert!(doubtful.give_up(|_| Ok(()), || Err(Refused::NotNow)).is_err());
        assert_eq!(doubtful.standing(), Standing::InDoubt);
    }
    assert!(vaults.vault_for(&caller, &VAULTS[1]).is_ok());
}

/// An administrator's command looks at all slots.
#[test]
fn while_a_vault_is_closed_its_slot_is_free_and_nobody_opens_it() {
    let dir = tempfile::tempdir().unwrap();
    let (vaults, _) = vaults(dir.path());
    assert!(vaults.vault(&VAULTS[0]).is_ok());
    let slot = vaults.slot(&VAULTS[0]);
    let closing = close(&slot, 0, None).expect("nobody uses it");
    // Its file is not even looked for.
    let (file, elsewhere) = (anchor(dir.path(), &VAULTS[0]), dir.path().join("elsewhere"));
    std::fs::rename(&file, &elsewhere).unwrap();
    assert!(matches!(vaults.vault_in(&VAULTS[0], &mut slot.lock(), true), Err(Refused::NotNow)));
    assert!(open(&vaults).is_empty() && !vaults.is_open(&VAULTS[0]));
    std::fs::rename(&elsewhere, &file).unwrap();
    drop(closing);
    assert!(vaults.vault(&VAULTS[0]).is_ok());
}

/// Whatever a host has a vault do: it is to be out at once.
#[test]
fn a_right_is_taken_away_without_waiting_for_a_vault_that_is_at_work() {
    let dir = tempfile::tempdir().unwrap();
    let (vaults, caller) = vaults(dir.path());
    let (vault, begun) = attend(&vaults, &caller, &VAULTS[0]);
    let _slot_is_locked = attend(&vaults, &caller, &VAULTS[1]);
    let (works, at_work) = std::sync::mpsc::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let working = move |_: &Inner| {
            works.send(()).expect("is awaited");
            let _ = released.recv();
            Err(Refused::NotNow)
        };
        let at = vault.clone();
        scope.spawn(move || at.give_up(working, || panic!("it is put away")));
        at_work.recv().expect("begins");
        let slot = vaults.slot(&VAULTS[1]);
        let slot = slot.lock();
        scope.spawn(|| {
            vaults.state().grant("one", &VAULTS[0].to_string(), false).unwrap();
            done.send(vaults.rights_have_changed().is_ok()).expect("is awaited");
        });
        let in_time = is_done.recv_timeout(Duration::from_secs(60));
        drop((slot, release));
        assert_eq!(in_time, Ok(true));
    });
    // It is looked at before anything else.
    assert!(matches!(vault.call(begun.line, Call::Heartbeat { beat: 1 }), Err(Refused::Ended)));
    assert!(vault.hosts().is_empty());
}
