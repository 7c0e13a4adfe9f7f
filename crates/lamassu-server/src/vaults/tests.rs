use super::opening::{OPEN_MANY, close};
use super::*;
use crate::anchor_store::{self, Files, file_of};
use crate::bounds::Bounds;
use crate::metrics::Metrics;
use crate::policy::Policies;
use crate::state::Pending;
use crate::vault::{REPLIES_MAX, VAULT};
use lamassu_anchor::row::{Content, Sealed};
use lamassu_anchor::table::DiskTable;
use lamassu_anchor::{AnchorError, Digest, ObjectId, Row, Token, TokenKey, VaultRow};
use lamassu_keys::unix_now;
use lamassu_lease::{Call, Mode, RequestNo};
use std::path::{Path, PathBuf};
use tokio::sync::mpsc::channel;

const VAULTS: [VaultId; 3] = [VaultId([1; 16]), VaultId([2; 16]), VaultId([3; 16])];

fn anchor(dir: &Path, id: &VaultId) -> PathBuf {
    file_of(&dir.join(anchor_store::DIR), id)
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
            let table = Arc::new(DiskTable::create(&anchor(dir, &id)).unwrap());
            let of_root = Sealed::Is(Digest([1; 32]));
            let content = Content::Dir { record: of_root, parent: ObjectId::ROOT, name: Token([0; 16]) };
            let root = Row { mode: 0o700, uid: 0, gid: 0, links: 1, content, attributes: of_root };
            drop(Anchor::create(table.clone(), VaultRow::new(id, TokenKey::new([1; 32])), root).unwrap());
            table.commit(&[Head([3; 32]).change()]).unwrap();
            state.note_kept("one", &id, None).unwrap();
        }
    }
    let (terms, metrics) = (Terms::DEFAULT, Metrics::default());
    std::fs::write(dir.join("policy.toml"), "").unwrap();
    let policies = Arc::new(Policies::start(dir, terms, (state.clone(), metrics.clone())).unwrap());
    let common = Common { state, metrics, policies, pauses: Arc::default(), bounds: Bounds::new(2) };
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

/// Who may use two vaults could else put each into the other. Nothing would bound the datasets in them.
#[test]
fn a_vault_is_not_put_into_its_own_dataset() {
    let dir = tempfile::tempdir().unwrap();
    let (vaults, caller) = vaults(dir.path());
    let (vaults, [one, two, _]) = (Arc::new(vaults), VAULTS);
    let of = [one, two].map(|id| rows(&vaults, &id));
    let begin = |id, around| vaults.begin_put(&caller, &id, None, Some(around)).unwrap_or_else(|_| panic!("begins"));
    // Both begin while nothing lies in anything.
    let (mut first, mut second) = (begin(one, two), begin(two, one));
    for (put, rows) in [(&mut first, &of[0]), (&mut second, &of[1])] {
        put.take(rows).unwrap_or_else(|_| panic!("takes"));
    }
    vaults.forget(&one).unwrap_or_else(|_| panic!("retires"));
    first.finish(&caller).unwrap_or_else(|_| panic!("puts"));
    assert_eq!(vaults.state().around(&one), Some(two));
    vaults.forget(&two).unwrap_or_else(|_| panic!("retires"));
    assert!(matches!(second.finish(&caller), Err(Refused::NotGranted)));
    assert!(matches!(vaults.begin_put(&caller, &two, None, Some(one)), Err(Refused::NotGranted)));
    assert_eq!(vaults.state().around(&two), None);
    let mut alone = vaults.begin_put(&caller, &two, None, None).unwrap_or_else(|_| panic!("begins"));
    assert!(alone.take(&of[1]).is_ok() && alone.finish(&caller).is_ok());
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
