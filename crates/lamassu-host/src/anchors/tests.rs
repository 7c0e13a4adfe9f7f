#![allow(clippy::unwrap_used)] // a panic is a failed test

use super::*;
use crate::Found;
use crate::testing::{anchored, key};
use lamassu_anchor::row::{Content, Sealed};
use lamassu_anchor::table::{Change, Space, Table, Visit};
use lamassu_anchor::{Digest, ObjectId, Row, Token, TokenKey, VaultRow};
use lamassu_format::name;
use lamassu_keys::history::EventKind;
use lamassu_keys::{Event, Material, Update, header_file, unlock};
use std::fs;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

const VAULT: VaultId = VaultId([7; 16]);
const OTHER: VaultId = VaultId([8; 16]);

struct Host {
    dir: tempfile::TempDir,
    anchors: Anchors,
}

impl Host {
    fn new() -> Host {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("vault")).unwrap();
        let anchors = Anchors::within(Some(dir.path().join("state/anchors")));
        Host { dir, anchors }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join(name)
    }

    fn make(&self, vault: VaultId, file: &Path) -> Result<Made> {
        let content = Content::Dir { record: Sealed::Nothing, parent: ObjectId::ROOT, name: Token([0; 16]) };
        let root = Row { mode: 0o700, uid: 1, gid: 2, links: 1, content, attributes: Sealed::Nothing };
        let row = VaultRow::new(vault, TokenKey::random()?);
        self.anchors.made(vault, file, &self.path("vault"), |table| Ok(Anchor::create(table, row, root)?))
    }

    /// The same host, in another process.
    fn again(&self, choice: Choice) -> Anchors {
        Anchors::within(Some(self.path("state/anchors"))).chosen(choice)
    }

    fn header(&self) -> Sealed {
        self.again(Choice::Remembered).open(&VAULT, Access::Read).unwrap().vault().header
    }
}

fn replacement(basis: Basis, new: u8) -> Replacement<'static> {
    let (dir, new) = (Path::new("/"), [new; 32]);
    Replacement { dir, id: VAULT, is_anchored: true, basis, new, history: None, begins_history: false }
}

#[test]
fn an_anchor_lies_in_the_usual_place_or_where_it_was_put() {
    let host = Host::new();
    let usual = host.anchors.usual(&VAULT).unwrap();
    assert_eq!(host.anchors.file_for_new(&VAULT, None).unwrap(), usual);
    let _ = host.make(VAULT, &usual).unwrap().keep();
    let elsewhere = host.path("b");
    let _ = host.make(OTHER, &elsewhere).unwrap().keep();
    let again = host.again(Choice::Remembered);
    assert_eq!(again.file_of(&VAULT).unwrap().map(|file| file.canonicalize().unwrap()), usual.canonicalize().ok());
    assert_eq!(again.file_of(&OTHER).unwrap(), Some(elsewhere.clone()));
    // What lies in a vault goes beside its anchor.
    let below = again.file_for_new(&VaultId([9; 16]), Some(&OTHER)).unwrap();
    assert_eq!(below.parent(), elsewhere.parent());
    // What is chosen is chosen for the first alone.
    let chosen = host.again(Choice::File("/chosen".into()));
    assert_eq!(chosen.file_of(&VAULT).unwrap(), Some("/chosen".into()));
    assert_eq!(chosen.file_of(&OTHER).unwrap(), Some(elsewhere));
    // A note that makes no sense does not lead to the usual place.
    fs::write(host.path("state/anchors").join(format!("{VAULT}.place")), "relative").unwrap();
    assert!(matches!(host.again(Choice::Remembered).file_of(&VAULT), Err(Error::Local { .. })));
    assert!(matches!(Anchors::default().open(&VAULT, Access::Read), Err(Error::NoAnchorPlace)));
}

/// As with a HOME on another disk.
#[test]
fn an_anchor_whose_directory_is_reached_through_a_link_is_not_moved_onto_itself() {
    let host = Host::new();
    fs::create_dir(host.path("disk")).unwrap();
    std::os::unix::fs::symlink(host.path("disk"), host.path("link")).unwrap();
    let anchors = Anchors::within(Some(host.path("link/anchors")));
    let host = Host { anchors, ..host };
    let usual = host.anchors.usual(&VAULT).unwrap();
    let _ = host.make(VAULT, &usual).unwrap().keep();
    // The same place, so nothing is noted; and whoever noted it before is not harmed.
    assert_eq!(host.anchors.file_of(&VAULT).unwrap(), Some(usual.clone()));
    host.anchors.move_file(&VAULT, &settled(&usual).unwrap(), &usual).unwrap();
    host.anchors.open(&VAULT, Access::Read).unwrap();
}

#[test]
fn an_anchor_that_is_remembered_counts_while_its_disk_is_away() {
    let host = Host::new();
    fs::create_dir(host.path("disk")).unwrap();
    let file = host.path("disk/a");
    let _ = host.make(VAULT, &file).unwrap().keep();
    let again = host.again(Choice::Remembered);
    assert!(again.is_there(&VAULT).unwrap());
    fs::rename(host.path("disk"), host.path("away")).unwrap();
    assert!(again.is_there(&VAULT).unwrap());
    assert!(matches!(again.file_to_replace(&VAULT), Err(Error::RememberedAnchorGone { path }) if path == file));
    // A header that says nothing of an anchor is older than it.
    let lost = Replacement { is_anchored: false, ..replacement(Basis::Decided(None), 5) };
    assert!(again.replacing(&lost).is_err());
    // The user says where the new one is to be.
    let chosen = host.again(Choice::File(host.path("b")));
    assert_eq!(chosen.file_to_replace(&VAULT).unwrap(), host.path("b"));
    assert!(!again.is_there(&OTHER).unwrap());
}

/// A copy would have right checksums over wrong bytes.
#[test]
fn a_damaged_anchor_is_not_moved() {
    let host = Host::new();
    let usual = host.anchors.usual(&VAULT).unwrap();
    let made = host.make(VAULT, &usual).unwrap();
    made.anchor.as_ref().unwrap().history_goes_to(7, Digest([0xa5; 32])).unwrap();
    let _ = made.keep();
    let mut bytes = fs::read(&usual).unwrap();
    let last = bytes.windows(32).rposition(|window| window == [0xa5; 32]).unwrap();
    bytes[last + 3] ^= 1;
    fs::write(&usual, bytes).unwrap();
    let to = host.path("b");
    assert!(host.again(Choice::Remembered).move_to(&VAULT, &host.path("vault"), &to).is_err());
    assert!(usual.exists() && !to.exists());
}

#[test]
fn what_is_not_kept_is_taken_back() {
    let host = Host::new();
    let file = host.path("a");
    drop(host.make(VAULT, &file).unwrap());
    assert!(!file.exists() && host.again(Choice::Remembered).file_of(&VAULT).unwrap() != Some(file.clone()));
    let inside = host.make(VAULT, &host.path("vault/a")).map(drop);
    assert!(matches!(inside, Err(Error::AnchorInStore { .. })));
    let _ = host.make(VAULT, &file).unwrap().keep();
    assert!(host.make(VAULT, &file).is_err() && file.exists(), "what was there stays");
}

#[test]
fn a_process_opens_it_once_and_others_wait() {
    let host = Host::new();
    let _ = host.make(VAULT, &host.anchors.usual(&VAULT).unwrap()).unwrap().keep();
    let first = host.anchors.open(&VAULT, Access::Write).unwrap();
    assert!(Arc::ptr_eq(&first, &host.anchors.clone().open(&VAULT, Access::Read).unwrap()));
    let other = host.again(Choice::Remembered);
    for access in [Access::Read, Access::Write] {
        assert!(is_locked(&other.open(&VAULT, access).map(drop).unwrap_err()));
    }
    other.look(&VAULT).unwrap();
    drop(first);
    let reader = other.open(&VAULT, Access::Read).unwrap();
    assert!(is_locked(&host.anchors.open(&VAULT, Access::Write).map(drop).unwrap_err()));
    host.again(Choice::Remembered).open(&VAULT, Access::Read).unwrap();
    host.again(Choice::Remembered).look(&VAULT).unwrap();
    assert!(reader.row(ObjectId::ROOT).is_ok());
}

/// Between the two the process may die: both headers are the newest then.
#[test]
fn a_header_is_known_before_it_is_replaced() {
    let host = Host::new();
    let _ = host.make(VAULT, &host.anchors.usual(&VAULT).unwrap()).unwrap().keep();
    let digest = |n| Digest([n; 32]);
    host.anchors.replacing(&replacement(Basis::Decided(None), 1)).unwrap().replaced().unwrap();
    assert_eq!(host.header(), Sealed::Is(digest(1)));
    drop(host.anchors.replacing(&replacement(Basis::Read([1; 32]), 2)).unwrap());
    assert_eq!(host.header(), Sealed::Becomes { old: digest(1), new: digest(2) });
    // Either way it goes on.
    host.anchors.replacing(&replacement(Basis::Read([1; 32]), 3)).unwrap().replaced().unwrap();
    let refused = host.anchors.replacing(&replacement(Basis::Read([2; 32]), 4)).map(drop).unwrap_err();
    assert!(matches!(
        refused.downcast_ref::<Error>(),
        Some(Error::Vault(VaultError::Outdated { what: "vault header", .. }))
    ));
    assert_eq!(host.header(), Sealed::Is(digest(3)));
    let unverified = host.again(Choice::Unverified);
    assert!(unverified.replacing(&replacement(Basis::Decided(None), 5)).is_err());
    // A vault without an anchor has nobody to ask.
    let other = Replacement { id: OTHER, is_anchored: false, ..replacement(Basis::Decided(None), 5) };
    drop(host.again(Choice::Remembered).replacing(&other).unwrap());
    let lost = Replacement { is_anchored: true, ..other };
    assert!(host.again(Choice::Remembered).replacing(&lost).is_err());
}

/// Tells the anchor that a header is about to be replaced, has something done meanwhile, and is cut off before the
/// anchor knows of the end.
struct CutOff {
    anchors: Anchors,
    meanwhile: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for CutOff {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CutOff")
    }
}

impl Witness for CutOff {
    fn replacing(&self, replacement: &Replacement<'_>) -> Result<Box<dyn Replacing>, WitnessError> {
        drop(self.anchors.replacing(replacement)?);
        (self.meanwhile)();
        Ok(Box::new(Noted { anchor: None, new: replacement.new }))
    }
}

/// Who opens a vault settles which of two headers is the newest. Who replaces the header is not overtaken by that: else
/// the anchor would know the old one alone, and the store have the new one.
#[test]
fn which_header_is_the_newest_is_not_settled_while_it_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let (vault, policy) = anchored(dir.path());
    let found = Found::at(&policy, &vault).unwrap();
    let keys = Arc::new(unlock(&found.header, &key()).unwrap());
    let open = {
        let (policy, keys, vault) = (policy.clone(), keys.clone(), vault.clone());
        move |header: &VaultHeader| {
            let anchor = policy.anchors.open(&header.id(), Access::Write)?;
            check(&anchor, Access::Write, header, &keys, &vault)
        }
    };
    let (opened, as_it_was) = channel();
    let (opens, old) = (open.clone(), found.header.clone());
    let meanwhile = Box::new(move || {
        let (opens, old, opened) = (opens.clone(), old.clone(), opened.clone());
        let opening = thread::spawn(move || opened.send(opens(&old)).unwrap());
        let until = std::time::Instant::now() + Duration::from_millis(200);
        while !opening.is_finished() && std::time::Instant::now() < until {
            thread::sleep(CLOSING_POLL);
        }
    });
    let cut_off: Arc<dyn Witness> = Arc::new(CutOff { anchors: policy.anchors.clone(), meanwhile });
    let update = Update::begin(&vault.join(name::HEADER), &cut_off).unwrap();
    let mut new: VaultHeader = update.read().unwrap();
    update.record(&mut new, &keys, &[Event::new(EventKind::SlotChanged)]).unwrap();
    assert!(is_older_header(&as_it_was.recv().unwrap().unwrap_err()), "it is told to look again");
    open(&new).unwrap();
    assert!(is_older_header(&open(&found.header).unwrap_err()), "the one that was replaced is the newest no more");
}

/// Where a change of a header is cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
enum Cut {
    /// The anchor is not told.
    Announced,
    /// Before the new header is written, the old one gets its second name, the new one its name.
    Step(usize),
    /// The new header has its name.
    Renamed,
    /// The history before it has lost its name.
    SetAside,
}

/// Is cut off before a step, and keeps the new header.
#[derive(Debug)]
struct CutOffAt {
    anchors: Anchors,
    at: Cut,
    dir: PathBuf,
}

#[derive(Debug)]
struct CutOffStep {
    _noted: Box<dyn Replacing>,
    steps_left: std::sync::atomic::AtomicUsize,
    dir: PathBuf,
}

impl Witness for CutOffAt {
    fn take(&self, header: &ToReplace) -> std::result::Result<Box<dyn Taken>, WitnessError> {
        self.anchors.take(header)
    }

    fn replacing(&self, replacement: &Replacement<'_>) -> std::result::Result<Box<dyn Replacing>, WitnessError> {
        let steps_left = match self.at {
            Cut::Announced => return Err("cut off".into()),
            Cut::Step(n) => n.into(),
            Cut::Renamed | Cut::SetAside => 2.into(),
        };
        Ok(Box::new(CutOffStep { _noted: self.anchors.replacing(replacement)?, steps_left, dir: self.dir.clone() }))
    }
}

impl Replacing for CutOffStep {
    fn may_go_on(&self) -> std::result::Result<(), WitnessError> {
        use std::sync::atomic::Ordering::Relaxed;
        if self.steps_left.fetch_sub(1, Relaxed) > 0 {
            return Ok(());
        }
        fs::copy(self.dir.join(name::HEADER_NEW), self.dir.join("kept")).unwrap();
        Err("cut off".into())
    }

    fn replaced(self: Box<Self>) -> std::result::Result<(), WitnessError> {
        Err("cut off".into())
    }
}

/// A new file key begins a new history, with the copies on record. Wherever that is cut off, the header in the store
/// has its own history, as the anchor knows it, and both go on.
#[test]
fn a_renewed_header_that_was_cut_off_opens_with_its_history() {
    let new_key = Material::new(lamassu_keys::SlotKind::Raw, lamassu_crypto::SecretBytes::new(vec![9; 32])).unwrap();
    let old_key = key();
    let slot = lamassu_keys::NewSlot { material: &new_key, cost: lamassu_keys::cost::FALLBACK, label: "", created: 1 };
    for at in [Cut::Announced, Cut::Step(0), Cut::Step(1), Cut::Step(2), Cut::Renamed, Cut::SetAside] {
        let dir = tempfile::tempdir().unwrap();
        let (vault, policy) = anchored(dir.path());
        let in_vault = |file: &str| vault.join(file);
        let present: VaultHeader = header_file::read(&in_vault(name::HEADER)).unwrap();
        let backup = Event::new(EventKind::BackedUp).detail("file", "copy");
        unlock(&present, &key()).unwrap().history(&vault, &present).unwrap().note(backup).unwrap();
        let before = fs::read(in_vault(name::HISTORY)).unwrap();
        let cut_off: Arc<dyn Witness> = Arc::new(CutOffAt { anchors: policy.anchors.clone(), at, dir: vault.clone() });
        let update = Update::begin(&in_vault(name::HEADER), &cut_off).unwrap();
        let mut header: VaultHeader = update.read().unwrap();
        let mut keys = unlock(&header, &key()).unwrap();
        let copies = keys.history(&vault, &header).unwrap().copies().unwrap();
        keys.renew(&mut header, &slot).unwrap();
        let event = Event::new(EventKind::SlotChanged);
        assert!(update.record_renewed(&mut header, &keys, copies, &[event]).is_err(), "{at:?}");
        assert_eq!(fs::read(in_vault(name::HISTORY)).unwrap(), before, "{at:?}");
        if at >= Cut::Renamed {
            fs::rename(in_vault("kept"), in_vault(name::HEADER)).unwrap();
        }
        if at >= Cut::SetAside {
            fs::rename(in_vault(name::HISTORY), in_vault(name::HISTORY_BROKEN)).unwrap();
        }
        let is_new = at >= Cut::Renamed;
        // Another process looks, and then writes.
        let policy = Policy::default().anchored_by(Anchors::within(Some(dir.path().join("state"))));
        let found = Found::at(&policy, &vault).unwrap();
        let keys = unlock(&found.header, if is_new { &new_key } else { &old_key }).unwrap();
        let events = || {
            let report = keys.history(&vault, &found.header).unwrap().read().unwrap();
            assert_eq!(report.fault, None, "{at:?}");
            report.entries.into_iter().map(|entry| entry.event).collect::<Vec<_>>()
        };
        for access in [Access::Read, Access::Write] {
            let anchor = policy.anchors.open(&found.header.id(), access).unwrap();
            check(&anchor, access, &found.header, &keys, &vault).unwrap_or_else(|error| panic!("{at:?}: {error}"));
            let compared = compare_records(&vault, &anchor).unwrap();
            assert!(compared.findings.is_empty(), "{at:?}: {compared:?}");
        }
        let whole = if is_new { vec!["restarted", "backed-up", "slot-changed"] } else { vec!["created", "backed-up"] };
        assert_eq!(events(), whole, "{at:?}");
        keys.history(&vault, &found.header).unwrap().note(Event::new(EventKind::Loaded)).unwrap();
        assert_eq!(events().last().unwrap(), "loaded");
        let kept = fs::read(in_vault(name::HISTORY_BROKEN)).ok();
        assert_eq!(kept.as_ref(), is_new.then_some(&before), "{at:?}");
        assert_eq!(in_vault(name::HISTORY_NEW).exists(), !is_new, "{at:?}");
        let anchor = policy.anchors.open(&found.header.id(), Access::Write).unwrap();
        let known = (anchor.vault().header, anchor.vault().next_history);
        assert!(matches!(known, (Sealed::Is(_), None)), "{at:?}");
    }
}

/// A renewal that is under way may have read the history already.
#[test]
fn a_copy_waits_to_be_noted_while_the_header_is_being_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let (vault, policy) = anchored(dir.path());
    let update = Update::begin(&vault.join(name::HEADER), &policy.witness()).unwrap();
    let header: VaultHeader = update.read().unwrap();
    let (bytes, before) = (fs::read(vault.join(name::HEADER)).unwrap(), fs::read(vault.join(name::HISTORY)).unwrap());
    let keys = unlock(&header, &key()).unwrap();
    let record = || crate::restore::record_copy(&policy, &vault, (&header, &keys), Path::new("copy"), &bytes);
    std::thread::scope(|scope| {
        let recording = scope.spawn(record);
        std::thread::sleep(std::time::Duration::from_millis(200));
        assert_eq!(fs::read(vault.join(name::HISTORY)).unwrap(), before);
        drop(update);
        recording.join().unwrap().unwrap();
    });
    assert_ne!(fs::read(vault.join(name::HISTORY)).unwrap(), before);
}

/// A second renewal, after one that was cut off before its history was in place, and cut off in turn: the header in
/// place still has its history.
#[test]
fn a_second_renewal_loses_no_history_of_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let (vault, policy) = anchored(dir.path());
    let header_file = vault.join(name::HEADER);
    let renewed = |at, opened: &Material, by: u8| {
        let material = Material::new(lamassu_keys::SlotKind::Raw, lamassu_crypto::SecretBytes::new(vec![by; 32]));
        let material = material.unwrap();
        let cost = lamassu_keys::cost::FALLBACK;
        let slot = lamassu_keys::NewSlot { material: &material, cost, label: "", created: 1 };
        let cut_off: Arc<dyn Witness> = Arc::new(CutOffAt { anchors: policy.anchors.clone(), at, dir: vault.clone() });
        let update = Update::begin(&header_file, &cut_off).unwrap();
        let mut header: VaultHeader = update.read().unwrap();
        let mut keys = unlock(&header, opened).unwrap();
        crate::rotation::settle_history(&keys, &header, &vault);
        keys.renew(&mut header, &slot).unwrap();
        assert!(update.record(&mut header, &keys, &[Event::new(EventKind::SlotChanged)]).is_err());
        material
    };
    let first = renewed(Cut::Renamed, &key(), 9);
    fs::rename(vault.join("kept"), &header_file).unwrap();
    renewed(Cut::Announced, &first, 10);
    let policy = Policy::default().anchored_by(Anchors::within(Some(dir.path().join("state"))));
    let found = Found::at(&policy, &vault).unwrap();
    let keys = unlock(&found.header, &first).unwrap();
    let report = keys.history(&vault, &found.header).unwrap().read().unwrap();
    assert_eq!((report.fault, report.entries.len()), (None, 2));
    let anchor = policy.anchors.open(&found.header.id(), Access::Read).unwrap();
    check(&anchor, Access::Read, &found.header, &keys, &vault).unwrap();
}

/// A change that another process's use of the anchor forbids leaves no entry.
#[test]
fn what_the_anchor_refuses_is_not_in_the_history() {
    let dir = tempfile::tempdir().unwrap();
    let (vault, policy) = anchored(dir.path());
    let before = fs::read(vault.join(name::HISTORY)).unwrap();
    let reading = Policy::default().anchored_by(Anchors::within(Some(dir.path().join("state"))));
    let update = Update::begin(&vault.join(name::HEADER), &policy.witness()).unwrap();
    let mut header: VaultHeader = update.read().unwrap();
    let keys = unlock(&header, &key()).unwrap();
    let _reader = reading.anchors.open(&header.id(), Access::Read).unwrap();
    assert!(update.record(&mut header, &keys, &[Event::new(EventKind::SlotAdded)]).is_err());
    assert_eq!(fs::read(vault.join(name::HISTORY)).unwrap(), before);
}

/// A table that tells when its closing begins, and goes on when it is told.
struct SlowToClose {
    table: Arc<DiskTable>,
    closing: Sender<()>,
    goes_on: Mutex<Receiver<()>>,
}

impl Drop for SlowToClose {
    fn drop(&mut self) {
        self.closing.send(()).unwrap();
        self.goes_on.lock().unwrap().recv().unwrap();
    }
}

impl Table for SlowToClose {
    fn get(&self, space: Space, key: &[u8]) -> std::result::Result<Option<Vec<u8>>, AnchorError> {
        self.table.get(space, key)
    }

    fn scan(&self, space: Space, prefix: &[u8], visit: &mut Visit<'_>) -> std::result::Result<(), AnchorError> {
        self.table.scan(space, prefix, visit)
    }

    fn commit(&self, changes: &[Change]) -> std::result::Result<(), AnchorError> {
        self.table.commit(changes)
    }
}

/// One thread closes an anchor as another one opens it: the file is still locked then, by this process. Whoever opens
/// another anchor does not wait.
#[test]
fn an_anchor_that_this_process_is_closing_is_waited_for_by_nobody_else() {
    let host = Host::new();
    for vault in [VAULT, OTHER] {
        let _ = host.make(vault, &host.anchors.usual(&vault).unwrap()).unwrap().keep();
    }
    let ((closing, has_begun), (go_on, goes_on)) = (channel(), channel());
    let table = Arc::new(DiskTable::open(&host.anchors.usual(&VAULT).unwrap()).unwrap());
    let table = SlowToClose { table, closing, goes_on: Mutex::new(goes_on) };
    let anchor = Arc::new(Anchor::open(Arc::new(table), &VAULT).unwrap());
    host.anchors.opened().insert(VAULT, Open::of(&anchor, Access::Write));
    thread::scope(|scope| {
        scope.spawn(move || drop(anchor));
        has_begun.recv().unwrap();
        let opens = scope.spawn(|| host.anchors.open(&VAULT, Access::Write).map(drop));
        // Long enough for that thread to wait.
        for _ in 0..50 {
            drop(host.anchors.open(&OTHER, Access::Write).unwrap());
            thread::sleep(Duration::from_millis(2));
        }
        go_on.send(()).unwrap();
        opens.join().unwrap().unwrap();
    });
}

/// The new file of an anchor that is taken back is removed if the server has certainly not given it up, and only then.
#[test]
fn the_new_file_stays_if_it_may_be_the_anchor() {
    use lamassu_anchor::ServerFault;
    let fault = |fault| Err(Error::from(AnchorError::Server { server: "h:1".into(), fault }));
    let detail = String::new();
    let answers = [
        (Ok(()), true),
        (fault(ServerFault::Unreachable { detail: detail.clone() }), true),
        (fault(ServerFault::Failed { detail: detail.clone() }), true),
        (fault(ServerFault::InUse { by: detail.clone() }), false),
        (fault(ServerFault::Ended), false),
        (fault(ServerFault::UnknownVault), false),
        (fault(ServerFault::Refused { detail }), false),
    ];
    for (answer, stays) in answers {
        let host = Host::new();
        let (usual, to) = (host.anchors.usual(&VAULT).unwrap(), host.path("to"));
        for file in [&usual, &to] {
            let _ = host.make(VAULT, file).unwrap().keep();
        }
        host.anchors.remember_server(&VAULT, "h:1").unwrap();
        host.anchors.note_taken_to(&VAULT, &to).unwrap();
        if answer.is_ok() {
            // This host cannot note that the server has done it.
            let note = host.path("state/anchors").join(format!("{VAULT}.place"));
            fs::remove_file(&note).unwrap();
            fs::create_dir(&note).unwrap();
        }
        let shown = format!("{answer:?}");
        let done = host.anchors.given_up(&VAULT, &to, &usual, answer);
        let is_named = matches!(&done, Err(Error::NotTakenBack { path, .. }) if *path == to);
        assert!(done.is_err() && is_named == stays, "{shown}: {done:?}");
        assert_eq!((to.exists(), host.anchors.is_taken_to(&VAULT, &to).unwrap()), (stays, stays), "{shown}");
        assert!(usual.exists(), "{shown}");
    }
}

/// What is in the way of an import is replaced if nothing of it can be used.
#[test]
fn a_file_is_replaced_if_it_is_certainly_no_good_anchor() {
    use super::moved::present;
    let host = Host::new();
    let file = host.path("a");
    assert!(present(&file, &VAULT).unwrap().is_none());
    let _ = host.make(VAULT, &file).unwrap().keep();
    host.anchors.opened().clear();
    assert!(present(&file, &VAULT).unwrap().is_some());
    assert!(matches!(present(&file, &OTHER).map(drop), Err(Error::Vault(VaultError::Anchor(AnchorError::Foreign)))));
    let table = DiskTable::open(&file).unwrap();
    let mut row = table.get(Space::Vault, b"vault").unwrap().unwrap();
    row[0] = 200;
    table.commit(&[Change { space: Space::Vault, key: b"vault".to_vec(), value: Some(row) }]).unwrap();
    drop(table);
    let newer = present(&file, &VAULT).map(drop);
    assert!(matches!(newer, Err(Error::Vault(VaultError::Anchor(AnchorError::Version { found: 200 })))), "{newer:?}");
    assert!(matches!(present(&host.path(""), &VAULT).map(drop), Err(Error::Vault(VaultError::Anchor(_)))));
    fs::write(&file, b"rubbish").unwrap();
    assert!(present(&file, &VAULT).unwrap().is_none());
}
