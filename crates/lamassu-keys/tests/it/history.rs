//! The history of a vault's keys: what is written, what is found when it is changed, and crashes between its steps.
use lamassu_crypto::SecretBytes;
use lamassu_format::header::{Destroyed, Header, HistoryHead, HistoryMark, NameMode, Role, VaultHeader};
use lamassu_format::{Domain, Geometry, Suite, name};
use lamassu_keys::destroy::Destruction;
use lamassu_keys::history::{EventKind, Fault, History, Report};
use lamassu_keys::witness::{Replacement, Replacing, Witness, WitnessError};
use lamassu_keys::{
    Argon2Params, Event, FileError, HistoryError, KeyError, Material, NewSlot, NewVault, SlotKind, Terms, Tier,
    Unlocked, Update, Zone, create_vault, header_file, unlock,
};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

pub fn raw(byte: u8) -> Material {
    Material::new(SlotKind::Raw, SecretBytes::new(vec![byte; 32])).unwrap()
}

pub fn slot<'a>(material: &'a Material, label: &'a str) -> NewSlot<'a> {
    NewSlot { material, cost: Argon2Params::new(64, 1, 2).unwrap(), label, created: 5 }
}

/// A vault's directory with a header and a history.
struct Lab {
    dir: tempfile::TempDir,
}

/// Makes a vault's header and its history.
pub fn fill(dir: &Path) {
    let new = NewVault {
        suite: Suite::Aes,
        geometry: Geometry::new(4096, 8).unwrap(),
        names: NameMode::Encrypted,
        name_max: 255,
        convergent_small_files: true,
        compression: None,
        domain: Domain::Zone,
        zone: Zone::Private,
        created: 5,
    };
    let (mut header, keys) = create_vault(&new, &slot(&raw(1), "first")).unwrap();
    let update = Update::begin(&dir.join(name::HEADER), &lamassu_keys::nobody()).unwrap();
    update.create_recorded(&mut header, &keys, &[Event::new(EventKind::Created).slot(1)]).unwrap();
}

impl Lab {
    fn new() -> Lab {
        let lab = Lab { dir: tempfile::tempdir().unwrap() };
        fill(lab.dir.path());
        lab
    }

    fn header_path(&self) -> PathBuf {
        self.dir.path().join(name::HEADER)
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join(name::HISTORY)
    }

    fn header(&self) -> VaultHeader {
        header_file::read(&self.header_path()).unwrap()
    }

    fn keys(&self) -> Unlocked {
        unlock(&self.header(), &raw(1)).unwrap()
    }

    /// A slot more, as `key add` does.
    fn add(&self, label: &str) {
        let update = Update::begin(&self.header_path(), &lamassu_keys::nobody()).unwrap();
        let mut header: VaultHeader = update.read().unwrap();
        let keys = unlock(&header, &raw(1)).unwrap();
        let id = keys.add_slot(&mut header, &slot(&raw(2), label)).unwrap();
        update.record(&mut header, &keys, &[Event::new(EventKind::SlotAdded).slot(id).detail("label", label)]).unwrap();
    }

    fn history(&self) -> History {
        self.keys().history(self.dir.path(), &self.header()).unwrap()
    }

    fn note(&self, kind: EventKind) -> Result<(), KeyError> {
        self.history().note(Event::new(kind))
    }

    fn read(&self) -> Report {
        self.history().read().unwrap()
    }

    fn events(&self) -> Vec<String> {
        self.read().entries.into_iter().map(|e| e.event).collect()
    }

    fn bytes(&self) -> Vec<u8> {
        fs::read(self.log()).unwrap()
    }

    /// Where each entry begins, and the end of the last.
    fn borders(&self) -> Vec<usize> {
        let bytes = self.bytes();
        let mut at = vec![0];
        while *at.last().unwrap() < bytes.len() {
            let start = *at.last().unwrap();
            let len = u32::from_le_bytes(bytes[start..start + 4].try_into().unwrap());
            at.push(start + 44 + len as usize);
        }
        at
    }
}

#[test]
fn every_change_is_written_down_and_marked() {
    let lab = Lab::new();
    lab.add("second");
    lab.note(EventKind::Loaded).unwrap();
    lab.add("third");
    let report = lab.read();
    assert_eq!((report.fault, report.torn_bytes), (None, 0));
    let told: Vec<_> = report.entries.iter().map(|e| (e.sequence, e.event.as_str(), e.slot)).collect();
    let expected =
        [(1, "created", Some(1)), (2, "slot-added", Some(2)), (3, "loaded", None), (4, "slot-added", Some(3))];
    assert_eq!(told, expected);
    assert_eq!(report.entries[3].details["label"], "third");
    assert!(!report.entries[0].host.is_empty() && report.entries[0].time > 1_700_000_000);
    assert_eq!(lab.header().keys().history.unwrap().count, 4);
    // Nothing of it can be read in the store, not even by its lengths.
    let bytes = lab.bytes();
    assert!(!bytes.windows(6).any(|w| w == b"second" || w == b"loaded"));
    assert!(lab.borders().windows(2).all(|b| (b[1] - b[0] - 44).is_multiple_of(256)));
    // Opened with another slot, it is the same.
    let other = unlock(&lab.header(), &raw(2)).unwrap();
    let report = other.history(lab.dir.path(), &lab.header()).unwrap().read().unwrap();
    assert_eq!(report.entries.len(), 4);
}

#[test]
fn epochs_actors_and_long_details() {
    let lab = Lab::new();
    let event = Event::new(EventKind::Rotated).epoch(Tier::Outer, 2).by(4_000_000_000).detail("much", "é".repeat(5000));
    lab.history().note(event).unwrap();
    let entry = lab.read().entries.pop().unwrap();
    assert_eq!(
        (entry.tier.as_deref(), entry.epoch, entry.uid, entry.user),
        (Some("outer"), Some(2), 4_000_000_000, None)
    );
    assert_eq!(entry.details["much"].chars().count(), 1000);
}

#[test]
fn a_changed_entry_is_found() {
    let lab = Lab::new();
    lab.add("second");
    lab.add("third");
    let good = lab.bytes();
    let borders = lab.borders();
    for at in (0..good.len()).step_by(37).chain(borders[..3].iter().flat_map(|b| [*b, b + 1, b + 3, b + 4, b + 43])) {
        let mut bad = good.clone();
        bad[at] ^= 1;
        fs::write(lab.log(), &bad).unwrap();
        let report = lab.read();
        let which = borders.iter().filter(|b| **b <= at).count();
        assert_eq!(report.fault, Some(Fault::Broken { sequence: which as u64 }), "byte {at}");
        assert_eq!(report.entries.len(), which - 1, "what comes before it is shown");
    }
}

#[test]
fn removed_inserted_and_reordered_entries_are_found() {
    let lab = Lab::new();
    lab.add("second");
    lab.add("third");
    let (good, b) = (lab.bytes(), lab.borders());
    let entry = |i: usize| &good[b[i]..b[i + 1]];
    for (order, broken) in [
        (vec![1, 2], 1),
        (vec![0, 2], 2),
        (vec![0, 2, 1], 2),
        (vec![1, 0, 2], 1),
        (vec![0, 0, 1, 2], 2),
        (vec![0, 1, 1, 2], 3),
        (vec![0, 1, 2, 0, 1], 4),
    ] {
        let bytes: Vec<u8> = order.iter().flat_map(|i| entry(*i)).copied().collect();
        fs::write(lab.log(), bytes).unwrap();
        assert_eq!(lab.read().fault, Some(Fault::Broken { sequence: broken }), "{order:?}");
    }
    // One of another vault.
    let other = Lab::new();
    let bytes = [&good[..b[1]], &other.bytes()].concat();
    fs::write(lab.log(), bytes).unwrap();
    assert_eq!(lab.read().fault, Some(Fault::Broken { sequence: 2 }));
}

#[test]
fn an_end_that_the_header_has_seen_cannot_be_cut_off() {
    let lab = Lab::new();
    lab.add("second");
    lab.note(EventKind::Loaded).unwrap();
    let (good, b) = (lab.bytes(), lab.borders());
    // Behind the mark it can, and nothing here can tell: that takes an anchor elsewhere.
    fs::write(lab.log(), &good[..b[2]]).unwrap();
    assert_eq!(lab.read().fault, None);
    fs::write(lab.log(), &good[..b[1]]).unwrap();
    assert_eq!(lab.read().fault, Some(Fault::CutOff { seen: 2, found: 1 }));
    fs::write(lab.log(), b"").unwrap();
    assert_eq!(lab.read().fault, Some(Fault::CutOff { seen: 2, found: 0 }));
    fs::remove_file(lab.log()).unwrap();
    assert_eq!(lab.read().fault, Some(Fault::CutOff { seen: 2, found: 0 }));
    // In the middle of an entry that the header has counted is no interrupted append either.
    fs::write(lab.log(), &good[..b[2] - 1]).unwrap();
    assert_eq!(lab.read().fault, Some(Fault::Broken { sequence: 2 }));
}

/// The store cuts the history off and has the header say that it never went further. Whoever knows the keys believes no
/// such header, so the history is neither read nor appended to by it.
#[test]
fn a_mark_that_the_store_has_put_into_the_header_is_not_believed() {
    let lab = Lab::new();
    lab.add("second");
    lab.add("third");
    let (keys, good, borders) = (lab.keys(), lab.bytes(), lab.borders());
    let first = HistoryHead(lamassu_crypto::wrap::sha256(&good[..borders[1]]));
    for mark in [Some(HistoryMark { count: 1, head: first }), None] {
        let mut header = lab.header();
        header.keys_mut().history = mark;
        fs::write(lab.log(), &good[..mark.map_or(0, |_| borders[1])]).unwrap();
        let refused = keys.history(lab.dir.path(), &header).map(drop);
        assert!(matches!(refused, Err(KeyError::HeaderAltered)), "{mark:?}");
    }
    // Of another vault it is not believed either.
    let refused = keys.history(lab.dir.path(), &Lab::new().header()).map(drop);
    assert!(matches!(refused, Err(KeyError::OtherHeader)));
}

/// Who goes on appending notices what is cut off behind the header's mark, too: of what it has appended itself.
#[test]
fn an_end_that_was_appended_here_cannot_be_cut_off_either() {
    let lab = Lab::new();
    let mut history = lab.history();
    let before = lab.bytes();
    history.note(Event::new(EventKind::Loaded)).unwrap();
    fs::write(lab.log(), &before).unwrap();
    assert_eq!(lab.read().fault, None, "by the header alone it is not found");
    let refused = history.note(Event::new(EventKind::Unloaded)).unwrap_err();
    let found = Fault::CutOff { seen: 2, found: 1 };
    assert!(matches!(&refused, KeyError::History(HistoryError::Damaged { fault, .. }) if *fault == found), "{refused}");
    assert_eq!(lab.bytes(), before);
}

#[test]
fn an_interrupted_append_is_no_damage() {
    let lab = Lab::new();
    let header = fs::read(lab.header_path()).unwrap();
    let before = lab.bytes();
    lab.add("second");
    let after = lab.bytes();
    // The crash came before the header was replaced.
    fs::write(lab.header_path(), &header).unwrap();
    for len in before.len() + 1..after.len() {
        let zeros = [&before[..], &vec![0; len - before.len()]].concat();
        for torn in [after[..len].to_vec(), zeros] {
            fs::write(lab.log(), &torn).unwrap();
            let report = lab.read();
            assert_eq!((report.fault, report.entries.len()), (None, 1), "{len}");
            assert_eq!(report.torn_bytes as usize, len - before.len());
        }
    }
    lab.add("again");
    assert_eq!(lab.events(), ["created", "slot-added"]);
    assert_eq!((lab.read().fault, lab.read().torn_bytes), (None, 0));
    lab.note(EventKind::Loaded).unwrap();
    // More than one entry's worth behind the end is not what an append leaves.
    let bytes = [&lab.bytes()[..], &after].concat();
    fs::write(lab.log(), bytes).unwrap();
    assert_eq!(lab.read().fault, Some(Fault::Broken { sequence: 4 }));
}

/// The steps of a change are: the entry durable, then the header replaced. After a crash between any two, both verify,
/// and the next change goes through.
#[test]
fn a_crash_between_entry_and_header_is_harmless() {
    let lab = Lab::new();
    lab.add("second");
    let (header, log) = (fs::read(lab.header_path()).unwrap(), lab.bytes());
    lab.add("third");
    let (header_after, log_after) = (fs::read(lab.header_path()).unwrap(), lab.bytes());
    let put = |header: &[u8], log: &[u8], new: Option<&[u8]>| {
        fs::write(lab.header_path(), header).unwrap();
        fs::write(lab.log(), log).unwrap();
        let path = lab.dir.path().join(name::HEADER_NEW);
        match new {
            Some(bytes) => fs::write(path, bytes).unwrap(),
            None => {
                let _ = fs::remove_file(path);
            }
        }
    };
    let half = &log_after[..log.len() + 100];
    for (step, (header, log, new, entries)) in [
        (&header, &log[..], None, 2),
        (&header, half, None, 2),
        (&header, &log_after[..], None, 3),
        (&header, &log_after[..], Some(&b""[..]), 3),
        (&header, &log_after[..], Some(&header_after[..70]), 3),
        (&header, &log_after[..], Some(&header_after[..]), 3),
        (&header_after, &log_after[..], None, 3),
    ]
    .into_iter()
    .enumerate()
    {
        put(header, log, new);
        let report = lab.read();
        assert_eq!((report.fault, report.entries.len()), (None, entries), "step {step}");
        lab.add("fourth");
        let report = lab.read();
        assert_eq!((report.fault, report.entries.len()), (None, entries + 1), "step {step}");
        assert_eq!(report.entries.last().unwrap().details["label"], "fourth");
        assert_eq!(lab.header().keys().history.unwrap().count, entries as u64 + 1);
    }
    // What no crash leaves, as the entry comes first: a header that counts an entry that is not there.
    put(&header_after, &log, None);
    assert_eq!(lab.read().fault, Some(Fault::CutOff { seen: 3, found: 2 }));
}

#[test]
fn a_damaged_history_is_set_aside_by_the_next_change_and_noted() {
    let lab = Lab::new();
    lab.add("second");
    let mut bytes = lab.bytes();
    bytes[60] ^= 1;
    fs::write(lab.log(), &bytes).unwrap();
    // Nothing is appended where it would say nothing.
    let refused = lab.note(EventKind::Loaded).unwrap_err();
    assert!(matches!(refused, KeyError::History(HistoryError::Damaged { fault: Fault::Broken { sequence: 1 }, .. })));
    assert_eq!(lab.bytes(), bytes);
    // But keys can be changed.
    lab.add("third");
    assert_eq!(lab.events(), ["restarted", "slot-added"]);
    let report = lab.read();
    assert_eq!(report.fault, None);
    assert!(report.entries[0].details["fault"].contains("entry 1"));
    assert_eq!(fs::read(lab.dir.path().join(name::HISTORY_BROKEN)).unwrap(), bytes, "the evidence");
    // The same where it is gone altogether.
    fs::remove_file(lab.log()).unwrap();
    lab.add("fourth");
    assert_eq!(lab.events(), ["restarted", "slot-added"]);
}

#[test]
fn a_header_without_a_history_gains_it_with_its_next_change() {
    let lab = Lab::new();
    fs::remove_file(lab.log()).unwrap();
    let mut header: VaultHeader = lab.header();
    let keys = lab.keys();
    // As version 1 wrote it before there was one.
    header.keys_mut().history = None;
    header.keys_mut().admin = None;
    assert!(matches!(keys.may_change(&header), Err(KeyError::HeaderAltered)), "not without the MAC");
    let old: VaultHeader = Header::parse(include_bytes!("../data/vault.json")).unwrap();
    assert!(old.keys().history.is_none() && old.keys().admin.is_none());
    assert!(old.keys().slots.iter().all(|s| s.role == Role::Administrator && s.expires.is_none()));
    fs::write(lab.header_path(), include_bytes!("../data/vault.json")).unwrap();
    let keys = unlock(&old, &raw(0x51)).unwrap();
    let mut history = keys.history(lab.dir.path(), &old).unwrap();
    assert!(history.read().unwrap().entries.is_empty());
    history.note(Event::new(EventKind::Loaded)).unwrap();
    let update = Update::begin(&lab.header_path(), &lamassu_keys::nobody()).unwrap();
    let mut header = old;
    keys.add_slot(&mut header, &slot(&raw(2), "x")).unwrap();
    update.record(&mut header, &keys, &[Event::new(EventKind::SlotAdded)]).unwrap();
    let header = lab.header();
    assert_eq!(header.keys().history.unwrap().count, 2);
    let report = keys.history(lab.dir.path(), &header).unwrap().read().unwrap();
    assert_eq!((report.fault, report.entries.len()), (None, 2));
}

/// Has another host write to the new header, immediately before it is renamed.
#[derive(Debug)]
struct Overwriting(PathBuf, std::sync::atomic::AtomicUsize);

impl Witness for Overwriting {
    fn replacing(&self, _: &Replacement<'_>) -> Result<Box<dyn Replacing>, WitnessError> {
        Ok(Box::new(Overwriting(self.0.clone(), 0.into())))
    }
}

impl Replacing for Overwriting {
    fn may_go_on(&self) -> Result<(), WitnessError> {
        // Before it is emptied, before the old one gets its second name, before the rename.
        if self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 2 {
            fs::write(&self.0, "noise")?;
        }
        Ok(())
    }

    fn replaced(self: Box<Self>) -> Result<(), WitnessError> {
        Ok(())
    }
}

/// Where locks do not reach other hosts.
#[test]
fn a_header_that_another_host_has_overwritten_is_not_put_in_place() {
    let lab = Lab::new();
    let before = fs::read(lab.header_path()).unwrap();
    let overwriting: Arc<dyn Witness> = Arc::new(Overwriting(lab.dir.path().join(name::HEADER_NEW), 0.into()));
    let update = Update::begin(&lab.header_path(), &overwriting).unwrap();
    let mut header: VaultHeader = update.read().unwrap();
    let refused = update.record(&mut header, &lab.keys(), &[Event::new(EventKind::SlotAdded)]).unwrap_err();
    assert!(matches!(refused, KeyError::File(FileError::Busy { .. })), "{refused}");
    assert_eq!(fs::read(lab.header_path()).unwrap(), before);
}

/// What another host does between the moment when the old header has its second name and the rename.
#[derive(Clone, Debug)]
struct Meanwhile {
    header: PathBuf,
    does: fn(&Path),
    steps: Arc<AtomicUsize>,
}

impl Witness for Meanwhile {
    fn replacing(&self, _: &Replacement<'_>) -> Result<Box<dyn Replacing>, WitnessError> {
        Ok(Box::new(self.clone()))
    }
}

impl Replacing for Meanwhile {
    fn may_go_on(&self) -> Result<(), WitnessError> {
        if self.header.with_file_name(name::HEADER_REPLACING).exists() && self.steps.fetch_add(1, Relaxed) == 0 {
            (self.does)(&self.header);
        }
        Ok(())
    }

    fn replaced(self: Box<Self>) -> Result<(), WitnessError> {
        Ok(())
    }
}

/// Where locks do not reach other hosts: one begins an update and gives it up, or removes the old header's second name.
#[test]
fn the_old_header_is_overwritten_whatever_another_host_does() {
    let begins = |header: &Path| {
        let (new, away) = (header.with_file_name(name::HEADER_NEW), header.with_file_name("away"));
        fs::rename(&new, &away).unwrap();
        drop(Update::begin(header, &lamassu_keys::nobody()).unwrap());
        fs::rename(&away, &new).unwrap();
        assert!(header.with_file_name(name::HEADER_REPLACING).exists());
    };
    let removes = |header: &Path| fs::remove_file(header.with_file_name(name::HEADER_REPLACING)).unwrap();
    for does in [begins as fn(&Path), removes] {
        let lab = Lab::new();
        let (header, steps) = (lab.header_path(), Arc::default());
        let witness: Arc<dyn Witness> = Arc::new(Meanwhile { header: header.clone(), does, steps: Arc::clone(&steps) });
        let (mut old, mut left) = (fs::File::open(&header).unwrap(), String::new());
        let keys = lab.keys();
        let destroyed = Destroyed { time: 1, receipt: [1; 16] };
        let destruction = Destruction::begin(&header, &witness).unwrap();
        let destruction = destruction.commit(&keys, destroyed, &Event::new(EventKind::KeyDestroyed)).unwrap();
        assert!(steps.load(Relaxed) > 0);
        let cleared = destruction.clear().unwrap();
        assert_eq!(cleared.erased.iter().map(|one| &one.file[..]).collect::<Vec<_>>(), [name::HEADER_REPLACING]);
        let is_noise = old.read_to_string(&mut left).is_err();
        assert!(is_noise || !left.contains("slots"), "{left}");
    }
}

#[test]
fn odd_files_in_its_place_are_refused() {
    let lab = Lab::new();
    let elsewhere = lab.dir.path().join("elsewhere");
    fs::write(&elsewhere, "precious").unwrap();
    fs::remove_file(lab.log()).unwrap();
    std::os::unix::fs::symlink(&elsewhere, lab.log()).unwrap();
    let refused = lab.note(EventKind::Loaded).unwrap_err();
    assert!(matches!(refused, KeyError::History(HistoryError::NotAFile { .. })), "{refused}");
    assert_eq!(fs::read(&elsewhere).unwrap(), b"precious");
    fs::remove_file(lab.log()).unwrap();
    fs::create_dir(lab.log()).unwrap();
    assert!(matches!(lab.note(EventKind::Loaded), Err(KeyError::History(_))));
    fs::remove_dir(lab.log()).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, lab.log(), rustix::fs::Mode::RWXU).unwrap();
    assert!(matches!(lab.note(EventKind::Loaded), Err(KeyError::History(HistoryError::NotAFile { .. }))));
}

#[test]
fn what_cannot_be_read_keeps_nobody_from_changing_keys() {
    let lab = Lab::new();
    let kept = |n: &str| lab.dir.path().join(format!("{}{n}", name::HISTORY_BROKEN));
    for (n, place) in ["", ".1", ".2"].iter().enumerate() {
        fs::remove_file(lab.log()).unwrap();
        fs::create_dir(lab.log()).unwrap();
        lab.add(&n.to_string());
        assert_eq!(lab.events(), ["restarted", "slot-added"]);
        assert!(kept(place).is_dir(), "each is kept beside the others");
    }
    fs::remove_file(lab.log()).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", lab.log()).unwrap();
    lab.add("link");
    assert!(kept(".3").is_symlink());
    assert_eq!((lab.read().fault, lab.events().len()), (None, 2));
}

/// What the header has counted is evidence, also where it is the last entry: a mount does not cut it off.
#[test]
fn a_damaged_last_entry_is_not_taken_for_an_interrupted_append() {
    let lab = Lab::new();
    lab.add("second");
    let mut bytes = lab.bytes();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(lab.log(), &bytes).unwrap();
    assert!(matches!(lab.note(EventKind::Loaded), Err(KeyError::History(HistoryError::Damaged { .. }))));
    assert_eq!(lab.bytes(), bytes);
    // Nor does it begin a new one where there was one.
    fs::remove_file(lab.log()).unwrap();
    assert!(matches!(lab.note(EventKind::Loaded), Err(KeyError::History(HistoryError::Damaged { .. }))));
}

#[test]
fn a_history_that_cannot_be_written_keeps_the_header_as_it_is() {
    let lab = Lab::new();
    // Damaged, and every name to set it aside under is taken.
    fs::write(lab.log(), vec![7; 5000]).unwrap();
    for n in 0..16 {
        let suffix = if n == 0 { String::new() } else { format!(".{n}") };
        fs::create_dir_all(lab.dir.path().join(format!("{}{suffix}/full", name::HISTORY_BROKEN))).unwrap();
    }
    let before = fs::read(lab.header_path()).unwrap();
    let update = Update::begin(&lab.header_path(), &lamassu_keys::nobody()).unwrap();
    let mut header: VaultHeader = update.read().unwrap();
    let keys = lab.keys();
    keys.add_slot(&mut header, &slot(&raw(2), "x")).unwrap();
    let failed = update.record(&mut header, &keys, &[Event::new(EventKind::SlotAdded)]).unwrap_err();
    assert!(matches!(failed, KeyError::History(_)));
    assert_eq!(fs::read(lab.header_path()).unwrap(), before);
}

#[test]
fn appends_at_once_all_get_in() {
    let lab = Lab::new();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let mut history = lab.history();
            scope.spawn(move || (0..10).for_each(|_| history.note(Event::new(EventKind::Loaded)).unwrap()));
        }
    });
    assert_eq!((lab.read().fault, lab.events().len()), (None, 41));
}

#[test]
fn a_use_only_slot_appends_and_marks_nothing() {
    let lab = Lab::new();
    let update = Update::begin(&lab.header_path(), &lamassu_keys::nobody()).unwrap();
    let mut header: VaultHeader = update.read().unwrap();
    let keys = lab.keys();
    let terms = Terms { role: Role::Use, expires: None };
    keys.add_slot_on(&mut header, &slot(&raw(2), "job"), terms).unwrap();
    update.record(&mut header, &keys, &[Event::new(EventKind::SlotAdded).slot(2)]).unwrap();
    let user = unlock(&lab.header(), &raw(2)).unwrap();
    user.history(lab.dir.path(), &lab.header()).unwrap().note(Event::new(EventKind::Loaded)).unwrap();
    assert_eq!(lab.events(), ["created", "slot-added", "loaded"]);
    let log = lab.bytes();
    let mut header = lab.header();
    let update = Update::begin(&lab.header_path(), &lamassu_keys::nobody()).unwrap();
    let refused = update.record(&mut header, &user, &[Event::new(EventKind::SlotRemoved)]).unwrap_err();
    assert!(matches!(refused, KeyError::NotAdministrator { slot: 2 }));
    assert_eq!(lab.bytes(), log, "and leaves no entry that says it had");
}
