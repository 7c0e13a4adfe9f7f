use super::*;
use crate::state::Pending;
use lamassu_anchor::row::{Content, Sealed};
use lamassu_anchor::table::MemoryTable;
use lamassu_anchor::{Digest, ObjectId, Row, Token, TokenKey};
use lamassu_keys::unix_now;
use lamassu_lease::RequestNo;
use lamassu_lease::locks::{Lock, LockKey, LockKind, Range};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc::{Receiver, channel};

const ID: VaultId = VaultId([7; 16]);

/// A vault that one host may use.
fn vault(dir: &std::path::Path) -> (Vault, Caller) {
    let table = Arc::new(MemoryTable::default());
    let of_root = Sealed::Is(Digest([1; 32]));
    let content = Content::Dir { record: of_root, parent: ObjectId::ROOT, name: Token([0; 16]) };
    let root = Row { mode: 0o700, uid: 0, gid: 0, links: 1, content, attributes: of_root };
    drop(Anchor::create(table.clone(), VaultRow::new(ID, TokenKey::new([1; 32])), root).unwrap());
    table.commit(&[Head([3; 32]).change()]).unwrap();
    let state = Arc::new(State::make(dir).unwrap());
    let caller = Caller { name: "one".into(), key: Arc::from(*b"key") };
    let vaults = BTreeSet::from([ID.to_string()]);
    state.put_token(b"token", &Pending { host: "one".into(), until: unix_now() + 100, vaults }, 0).unwrap();
    assert!(state.use_token(b"token", unix_now(), &caller.key).unwrap().is_ok());
    let (terms, metrics) = (Terms::DEFAULT, Metrics::default());
    std::fs::write(dir.join("policy.toml"), "").unwrap();
    let policies = Arc::new(Policies::start(dir, terms, (state.clone(), metrics.clone())).unwrap());
    let common = Common { state, metrics, policies, pauses: Arc::default() };
    (Vault::open(ID, table, terms, common).unwrap_or_else(|_| panic!("the vault opens")), caller)
}

fn begin(vault: &Vault, caller: &Caller) -> (Line, Receiver<Told>) {
    let (replies, told) = channel(REPLIES_MAX);
    let begun = vault.begin(caller, Use::ByTurns, SessionId(u64::MAX), replies);
    (begun.unwrap_or_else(|_| panic!("a session begins")).line, told)
}

const KEY: LockKey = LockKey { file: Object(9), kind: LockKind::Range, owner: 1 };

fn lock(number: u64) -> Call {
    let lock = Lock { key: KEY, range: Range::ALL, mode: Mode::Exclusive, pid: 1 };
    Call::Lock { request: RequestNo(number), lock, waits: true }
}

/// A host takes what a new connection says for the state after its report. An answer between the two would give it a
/// lock that it does not name, and that is released.
#[test]
fn a_new_connection_hears_nothing_that_was_decided_before_its_report() {
    const CONNECTIONS: u64 = 100_000;
    let dir = tempfile::tempdir().unwrap();
    let (vault, caller) = vault(dir.path());
    let ((mut line, _), (other, mut heard)) = (begin(&vault, &caller), begin(&vault, &caller));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // The other session locks and unlocks: each unlock answers a request that waits.
        scope.spawn(|| {
            for number in 0.. {
                for call in [lock(number), Call::Unlock { request: RequestNo(number), key: KEY, range: Range::ALL }] {
                    assert!(vault.call(other, call).is_ok());
                    // Without sleeping: it must be quick to come between.
                    while heard.try_recv().is_err() {
                        std::thread::yield_now();
                    }
                }
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        let mut resume = || {
            let (replies, mut told) = channel(REPLIES_MAX);
            let report = Call::Resume { held: Vec::new(), locks: Vec::new() };
            let begun = vault.resumes(&caller.name, line.session, report, replies);
            line = begun.unwrap_or_else(|_| panic!("the session lasts")).line;
            // Nothing was asked on it yet.
            (line, told.try_recv().ok())
        };
        let (mut line, _) = resume();
        let told = (0..CONNECTIONS).find_map(|number| {
            assert!(vault.call(line, lock(number)).is_ok());
            let (next, told) = resume();
            line = next;
            told
        });
        is_over.store(true, Ordering::Relaxed);
        resume();
        assert_eq!(told, None);
    });
}
