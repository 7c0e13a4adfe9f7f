use super::*;
use crate::audit::{Kept, Why};
use crate::state::leases::{Lasting, Use};
use lamassu_lease::server::{Change, Durable};
use lamassu_lease::{GrantNo, Object, SessionId};

#[test]
fn leases_come_back() {
    let dir = tempfile::tempdir().expect("a directory");
    let (vault, other) = (VaultId([7; 16]), VaultId([8; 16]));
    let changes = [
        Change::Run(3),
        Change::Began(SessionId(5)),
        Change::Began(SessionId(6)),
        Change::Began(SessionId(7)),
        Change::Began(SessionId(8)),
        Change::Exclusive(Object(0), SessionId(5), GrantNo(9)),
        Change::Abandoned(Object(1)),
        Change::Ended(SessionId(6)),
    ];
    let state = State::make(dir.path()).expect("opens");
    // One that is to write and has no lease yet is still one that is to write.
    let used = |session| match session {
        SessionId(5 | 8) => Use::Writes,
        _ => Use::ByTurns,
    };
    let host = |session: SessionId| (format!("host{}", session.0), used(session));
    state.change_leases(&vault, &changes, host, |_| (Why::Left, None)).expect("writes");
    state.change_leases(&other, &[Change::Run(1)], host, |_| (Why::Left, None)).expect("writes");
    assert_eq!(state.vaults().expect("reads"), [(vault, 3), (other, 1)]);
    assert!(matches!(State::open(dir.path()), Err(ServerError::Running { .. })));
    drop(state);
    let state = State::make(dir.path()).expect("opens");
    let mut expected = Durable::default();
    changes.iter().for_each(|change| expected.apply(change));
    let session =
        |number, used| Lasting { session: SessionId(number), host: format!("host{number}"), used, is_out: false };
    let sessions = vec![session(5, Use::Writes), session(7, Use::ByTurns), session(8, Use::Writes)];
    assert_eq!(state.leases(&vault).expect("reads"), (expected, sessions));
}

#[test]
fn a_token_is_used_once_and_in_time() {
    let dir = tempfile::tempdir().expect("a directory");
    let state = State::make(dir.path()).expect("opens");
    let pending = |host: &str| Pending { host: host.into(), until: 100, vaults: BTreeSet::new() };
    state.put_token(b"a", &pending("one"), 50).expect("writes");
    state.put_token(b"b", &pending("two"), 50).expect("writes");
    assert!(state.token(b"a", 100).is_none(), "its time is over");
    assert!(state.use_token(b"a", 99, b"key").expect("writes").is_ok_and(|name| name == "one"));
    assert_eq!(state.use_token(b"a", 99, b"key").expect("writes"), Err(NotJoined::KnownKey));
    assert_eq!(state.use_token(b"a", 99, b"other key").expect("writes"), Err(NotJoined::NoToken));
    // A second token for a host takes the place of the first.
    state.put_token(b"c", &pending("two"), 50).expect("writes");
    assert!(state.token(b"b", 50).is_none());
}

#[test]
fn a_key_is_a_hosts_until_it_is_revoked_or_joins_anew() {
    let dir = tempfile::tempdir().expect("a directory");
    let state = State::make(dir.path()).expect("opens");
    let vault = [5; 16];
    let pending =
        Pending { host: "one".into(), until: unix_now() + 100, vaults: BTreeSet::from([HEXLOWER.encode(&vault)]) };
    state.put_token(b"t", &pending, 0).expect("writes");
    assert_eq!((state.who(b"t"), state.who(b"k")), (Some(Who::Token), None));
    let mut changes = state.changes();
    state.use_token(b"t", 0, b"k").expect("writes").expect("is good");
    assert!(changes.has_changed().expect("there is a sender"));
    let host = |is_revoked| Some(Who::Host { name: "one".into(), is_revoked });
    assert_eq!((state.who(b"t"), state.who(b"k")), (None, host(false)));
    assert!(
        state.may_use(b"k", &VaultId(vault))
            && !state.may_use(b"k", &VaultId([6; 16]))
            && !state.may_use(b"j", &VaultId(vault))
    );
    state.grant("one", &HEXLOWER.encode(&vault), false).expect("writes");
    assert!(!state.may_use(b"k", &VaultId(vault)));
    state.grant("one", &HEXLOWER.encode(&vault), true).expect("writes");
    changes.mark_unchanged();
    state.revoke("one").expect("writes");
    assert!(!state.may_use(b"k", &VaultId(vault)) && changes.has_changed().expect("there is a sender"));
    assert_eq!(state.who(b"k"), host(true));
    assert!(state.grant("two", "x", true).is_err_and(|error| error.code() == 3));
    drop(state);
    let state = State::make(dir.path()).expect("opens");
    assert_eq!(state.who(b"k"), host(true));
    state.put_token(b"u", &pending, 0).expect("writes");
    state.use_token(b"u", 0, b"l").expect("writes").expect("is good");
    assert_eq!((state.who(b"k"), state.who(b"l")), (None, host(false)));
}

#[test]
fn names_of_hosts_are_plain() {
    for good in ["a", "node-1.example", "9"] {
        check_name(good).expect(good);
    }
    for bad in ["", "-a", ".", "a b", "a/b", "\u{e9}", &"x".repeat(64), "a\n"] {
        assert!(check_name(bad).is_err(), "{bad:?}");
    }
}

/// The audit log of a state as it verifies, from its first entry on.
fn audit_of(state: &State) -> Result<(Vec<crate::audit::AuditEntry>, crate::audit::ChainEnd)> {
    let page = state.audit(0, usize::MAX)?;
    let (place, entries) = page.verified(page.begins.expect("the first page"))?;
    Ok((entries, place))
}

/// Two administrators may enrol one host at once. Of the tokens one counts, and no host loses its name to a later one.
#[test]
fn nobody_joins_by_the_name_or_the_key_of_a_host() {
    let dir = tempfile::tempdir().expect("a directory");
    let state = State::make(dir.path()).expect("opens");
    let pending = |host: &str| Pending { host: host.into(), until: unix_now() + 100, vaults: BTreeSet::new() };
    state.put_token(b"t", &pending("one"), 0).expect("writes");
    state.use_token(b"t", 0, b"k").expect("writes").expect("is good");
    state.put_token(b"late", &pending("one"), 0).expect("writes");
    state.put_token(b"u", &pending("two"), 0).expect("writes");
    for known in [b"k", b"u"] {
        assert_eq!(state.use_token(b"u", 0, known).expect("writes"), Err(NotJoined::KnownKey));
    }
    assert_eq!(state.use_token(b"late", 0, b"l").expect("writes"), Err(NotJoined::NoToken));
    assert_eq!(state.who(b"k"), Some(Who::Host { name: "one".into(), is_revoked: false }));
    assert_eq!(state.use_token(b"u", 0, b"l").expect("writes").as_deref(), Ok("two"));
}

/// Looking up the owner of a key waits for nothing: neither for a verification, nor for the disk.
#[test]
fn a_key_is_looked_up_while_the_file_is_verified() {
    let dir = tempfile::tempdir().expect("a directory");
    let pending = Pending { host: "one".into(), until: unix_now() + 100, vaults: BTreeSet::new() };
    State::make(dir.path()).expect("opens").put_token(b"t", &pending, 0).expect("writes");
    let state = Arc::new(State::open(dir.path()).expect("opens"));
    let _verifying = state.database.write();
    let (said, told) = std::sync::mpsc::channel();
    let of = state.clone();
    std::thread::spawn(move || said.send([b"t", b"u"].map(|key| of.who(key))));
    let told = told.recv_timeout(Duration::from_secs(60)).expect("an answer");
    assert_eq!(told, [Some(Who::Token), None]);
}

#[test]
fn the_audit_log_keeps_its_chain_when_the_oldest_entries_go() {
    let dir = tempfile::tempdir().expect("a directory");
    let state = State::make(dir.path()).expect("opens");
    let pending = Pending { host: "one".into(), until: unix_now() + 100, vaults: BTreeSet::new() };
    state.put_token(b"t", &pending, 0).expect("writes");
    state.use_token(b"t", 0, b"k").expect("writes").expect("is good");
    state.grant("one", &VaultId([10; 16]).to_string(), true).expect("writes");
    state.revoke("one").expect("writes");
    let (all, place) = audit_of(&state).expect("verifies");
    assert_eq!(all.iter().map(|entry| entry.number).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert_eq!(all[3].event, Event::Revoked { host: "one".into() });
    state.keep_audit(Kept { entries: 2, ..Kept::default() });
    state.note(Event::BackupBegun).expect("writes");
    let (kept, next) = audit_of(&state).expect("verifies");
    assert_eq!(kept.iter().map(|entry| entry.number).collect::<Vec<_>>(), [4, 5]);
    assert_eq!(kept[0], all[3]);
    assert!(next.number == 5 && next.head != place.head);
    // All of it is gone but what the next one goes on from.
    state.keep_audit(Kept { entries: 0, ..Kept::default() });
    state.note(Event::BackupBegun).expect("writes");
    assert!(audit_of(&state).expect("verifies").0.is_empty());
    state.keep_audit(Kept { entries: 10, ..Kept::default() });
    state.note(Event::BackupBegun).expect("writes");
    assert_eq!(audit_of(&state).expect("verifies").0[0].number, 7);
    // What is refused is not told.
    assert!(state.grant("nobody", "v", true).is_err());
    assert_eq!(audit_of(&state).expect("verifies").1.number, 7);
    // Bytes count, also after the file was closed: an entry is longer than 100 of them here, and shorter than 200.
    drop(state);
    let state = State::open(dir.path()).expect("opens");
    state.keep_audit(Kept { bytes: 1000, ..Kept::default() });
    for _ in 0..40 {
        state.note(Event::Revoked { host: "n".repeat(40) }).expect("writes");
    }
    let (kept, place) = audit_of(&state).expect("verifies");
    assert!((5..10).contains(&kept.len()) && place.number == 47, "{} to {}", kept.len(), place.number);
}

/// A backup has the whole log of a server that keeps more of it than others do.
#[test]
fn a_backup_keeps_a_log_that_is_longer_than_the_usual_limit() {
    let most = Kept::default().entries;
    let dir = tempfile::tempdir().expect("a directory");
    let state = State::make(dir.path()).expect("opens");
    let entry = |number: u64| {
        let entry = format!(r#"{{"number":{number},"time":1,"event":"backup-begun"}}"#);
        crate::audit::ChainedEntry { head: [0; 32], entry }
    };
    // The first ones and the last one: what lies between takes its time.
    for (first, count) in [(1, 1000), (most + 1, 1)] {
        let place = crate::audit::ChainEnd { number: first - 1, head: [0; 32] };
        let entries = (first..first + count).map(entry).collect();
        state.put_audit(&crate::audit::Excerpt { begins: None, entries }, place).expect("writes");
    }
    state.fill(&Copied::default(), &[]).expect("fills");
    let kept = state.audit(0, 2000).expect("reads").entries;
    assert_eq!(kept.len(), 1002);
    assert_eq!(kept[0], entry(1));
}

#[test]
fn a_vault_that_was_put_back_waits_for_the_hosts_that_may_use_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let (vault, other) = (VaultId([7; 16]), VaultId([8; 16]));
    let host = |is_revoked, vaults: &[VaultId]| Host {
        key: String::new(),
        joined: 0,
        is_revoked,
        vaults: vaults.iter().map(|id| id.to_string()).collect(),
        keys: BTreeSet::new(),
    };
    let hosts = [("a", host(false, &[vault])), ("b", host(false, &[vault, other])), ("c", host(true, &[vault]))];
    let copied = Copied {
        hosts: hosts.into_iter().map(|(name, host)| (name.to_owned(), host)).collect(),
        runs: [(vault.to_string(), 5)].into(),
        last_alert: 0,
        ..Copied::default()
    };
    State::make(dir.path()).expect("opens").fill(&copied, &[vault, other]).expect("writes");
    let state = State::open(dir.path()).expect("opens");
    let names = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>());
    assert_eq!(state.waits_for(&vault), names(&["a", "b"]));
    assert_eq!(state.waits_for(&VaultId([9; 16])), None);
    assert!(state.leases(&vault).expect("reads").0.runs > 5 && state.leases(&other).expect("reads").0.runs > 5);
    // Nor are numbers used again of one that arrived at the server since.
    let before = state.leases(&VaultId([9; 16])).expect("reads").0.runs;
    assert!(before > 5);
    // Nor by a backup of this one, on which no server ran.
    let again = tempfile::tempdir().expect("a directory");
    let again = State::make(again.path()).expect("opens");
    again.fill(&state.copied().expect("reads"), &[vault]).expect("writes");
    assert!(again.leases(&VaultId([9; 16])).expect("reads").0.runs > before);
    assert!(state.reconciled(&vault, "a", true).expect("writes"));
    assert!(!state.reconciled(&vault, "a", true).expect("writes") && !state.reconciled(&vault, "x", true).expect("ok"));
    assert_eq!((state.waits_for(&vault), state.waits_for(&other)), (names(&["b"]), names(&["b"])));
    drop(state);
    let state = State::open(dir.path()).expect("opens");
    assert_eq!(state.waits_for(&vault), names(&["b"]));
    // Whoever may use it again may know more of it.
    state.grant("a", &vault.to_string(), true).expect("writes");
    let pending = Pending { host: "d".into(), until: u64::MAX, vaults: [vault.to_string()].into() };
    state.put_token(b"t", &pending, 0).expect("writes");
    state.use_token(b"t", 0, b"k").expect("writes").expect("is good");
    assert_eq!(state.waits_for(&vault), names(&["a", "b", "d"]));
    assert_eq!(Some(state.reopen(&vault).expect("reads")), names(&["a", "b", "d"]));
    for host in ["a", "d"] {
        assert!(state.reconciled(&vault, host, false).expect("writes"));
    }
    // One that is gone for good is not waited for.
    state.grant("b", &vault.to_string(), false).expect("writes");
    assert_eq!(state.waits_for(&vault), names(&[]));
    state.revoke("b").expect("writes");
    assert_eq!(state.waits_for(&other), names(&[]));
    assert!(state.reopen(&vault).expect("writes").is_empty());
    state.grant("b", &vault.to_string(), true).expect("writes");
    assert_eq!(state.waits_for(&vault), None);
}

#[test]
fn a_file_that_is_no_database_is_damaged() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join(FILE), [0x5a; 9000]).expect("writes");
    assert_eq!(State::open(dir.path()).err().map(|error| error.code()), Some(26));
    std::fs::write(dir.path().join(FILE), "redb").expect("writes");
    assert_eq!(State::open(dir.path()).err().map(|error| error.code()), Some(26));
}

fn finding(path: &str) -> crate::alerts::Finding {
    let text = format!(r#"{{"time":1,"kind":"stale","path":"{path}","found_by":"read","is_damage":true,"text":"x"}}"#);
    crate::alerts::Finding::parse(&text).expect("parses")
}

/// A host that reports more than there is room for drowns nothing: not of another vault, and not that there was more.
#[test]
fn alerts_of_a_vault_are_bounded_and_the_rest_is_counted() {
    use crate::alerts::{ALERTS_MAX, NOT_KEPT, Which};
    let dir = tempfile::tempdir().expect("a directory");
    let state = State::make(dir.path()).expect("opens");
    let (flooded, other) = (VaultId([7; 16]), VaultId([8; 16]));
    let all: Vec<_> = (0..ALERTS_MAX + 50).map(|n| finding(&n.to_string())).collect();
    for some in all.chunks(2000) {
        state.take_findings((&flooded, "evil"), some, 0, 5).expect("writes");
    }
    assert_eq!(state.take_findings((&other, "good"), &[finding("a")], 3, 6).expect("writes"), 2);
    assert_eq!(state.take_findings((&flooded, "evil"), &[finding("0"), finding("new")], 0, 7).expect("writes"), 0);
    let mut kept = Vec::new();
    let copied = state.read_alerts(|some| {
        kept.extend_from_slice(some);
        Ok(())
    });
    copied.expect("reads");
    let of = |vault: VaultId| kept.iter().filter(move |alert| alert.vault == vault.to_string());
    assert_eq!((of(flooded).count() as u64, of(other).count()), (ALERTS_MAX + 1, 2));
    let without = |vault| of(vault).find(|alert| alert.finding.kind == NOT_KEPT).map(|alert| alert.count);
    assert_eq!((without(flooded), without(other)), (Some(51), Some(3)));
    assert_eq!(
        of(flooded).find(|alert| alert.finding.path == "0").map(|alert| (alert.count, alert.last)),
        Some((2, 7))
    );
    // All that are named, or none.
    let numbers = |numbers: &[u64]| Which::Numbers(numbers.iter().copied().collect());
    assert_eq!(state.close(&numbers(&[1, 99_999])).expect_err("one is none").code(), 3);
    assert_eq!(state.alert_counts().expect("reads").open, ALERTS_MAX + 3);
    assert_eq!(state.close(&numbers(&[1, 2])).expect("closes"), 2);
    assert_eq!(state.take_findings((&flooded, "evil"), &[finding("0")], 0, 8).expect("writes"), 1, "there is room");
    let vault = Some(flooded.to_string());
    assert_eq!(state.acknowledge(&Which::All { vault: vault.clone() }, "", 9).expect("writes") as u64, ALERTS_MAX);
    assert_eq!(state.alert_counts().expect("reads").new, 2);
    assert_eq!(state.close(&Which::All { vault }).expect("closes") as u64, ALERTS_MAX);
    let left = AlertCounts { open: 2, new: 2, unposted: 2 };
    assert_eq!(state.alert_counts().expect("reads"), left);
    // Another state gets what is left, and what is to be posted of it; numbers go on.
    state.posted(&state.unposted(None, &BTreeSet::new(), 1).expect("reads").0).expect("writes");
    let left = AlertCounts { unposted: 1, ..left };
    let copy = tempfile::tempdir().expect("a directory");
    let copy = State::make(copy.path()).expect("opens");
    copy.fill(&state.copied().expect("reads"), &[]).expect("writes");
    copy.put_alerts(&state.alerts(0, 10).expect("reads")).expect("writes");
    assert_eq!((copy.alert_counts().expect("reads"), state.alert_counts().expect("reads")), (left, left));
    assert_eq!(copy.take_findings((&other, "good"), &[finding("a")], 0, 10).expect("writes"), 0);
    assert_eq!(copy.take_findings((&other, "good"), &[finding("b")], 0, 10).expect("writes"), 1);
    let last = copy.alerts(0, 10).expect("reads").pop().expect("there is one");
    assert!(last.number > ALERTS_MAX && last.finding.path == "b");
}

/// Who makes datasets, and retires them, would have any number of alerts else, and others' would wait for them.
#[test]
fn alerts_of_datasets_are_those_of_the_vault_around_them_and_others_have_their_turn() {
    use crate::alerts::{ALERTS_MAX, Alert, NOT_KEPT, Which};
    let dir = tempfile::tempdir().expect("a directory");
    let state = State::make(dir.path()).expect("opens");
    let [vault, other] = [VaultId([1; 16]), VaultId([200; 16])];
    state.note_kept("h", &vault, None).expect("writes");
    let some: Vec<_> = (0..700).map(|n| finding(&n.to_string())).collect();
    for number in 2..7 {
        let (outer, dataset) = (VaultId([100; 16]), VaultId([number; 16]));
        state.note_kept("h", &outer, Some(&vault)).expect("writes");
        state.note_kept("h", &dataset, Some(&outer)).expect("writes");
        state.take_findings((&dataset, "evil"), &some, 0, 5).expect("writes");
        state.will_put_away(&dataset).expect("writes");
    }
    state.take_findings((&other, "good"), &[finding("a")], 0, 5).expect("writes");
    assert_eq!(state.alert_counts().expect("reads").unposted, ALERTS_MAX + 2);
    let mut kept = Vec::new();
    state
        .read_alerts(|some| {
            kept.extend_from_slice(some);
            Ok(())
        })
        .expect("reads");
    let lost = kept.iter().find(|alert| alert.finding.kind == NOT_KEPT).expect("is kept");
    assert_eq!((&lost.vault, lost.count), (&vault.to_string(), 5 * 700 - ALERTS_MAX));
    // The other vault's comes with the first ones.
    let unposted = |but: &BTreeSet<u64>, turn, most| state.unposted(turn, but, most).expect("reads");
    let is_others = |alerts: &[Alert]| alerts.iter().any(|alert| alert.vault == other.to_string());
    let (first, turn) = unposted(&BTreeSet::new(), None, 50);
    assert!(first.len() == 50 && is_others(&first));
    state.posted(&first).expect("writes");
    let (second, _) = unposted(&BTreeSet::new(), turn, 50);
    assert!(second.len() == 50 && !first.iter().any(|alert| second.contains(alert)));
    // What was passed over does not come again.
    let but: BTreeSet<_> = second.iter().map(|alert| alert.number).collect();
    let (third, _) = unposted(&but, turn, 50);
    assert!(third.len() == 50 && third.iter().all(|alert| !but.contains(&alert.number)));
    // One by one, each vault has its turn.
    state.take_findings((&other, "good"), &[finding("b"), finding("c")], 0, 5).expect("writes");
    let (mut turn, mut vaults) = (None, Vec::new());
    for _ in 0..4 {
        let (one, last) = unposted(&BTreeSet::new(), turn, 1);
        state.posted(&one).expect("writes");
        vaults.push(is_others(&one));
        turn = last;
    }
    assert_eq!(vaults, [false, true, false, true]);
    // There is room again, for all of them.
    let all = Which::All { vault: Some(VaultId([2; 16]).to_string()) };
    assert_eq!(state.close(&all).expect("closes"), 700);
    assert_eq!(state.take_findings((&vault, "h"), &some, 0, 6).expect("writes"), 699, "one counts what was lost");
    assert_eq!(state.take_findings((&vault, "h"), &[finding("x")], 0, 6).expect("writes"), 0);
}

/// The server ends after it has got an anchor, or before it has put it away: at its start it finds it, and knows the
/// vault that it lies in.
#[test]
fn an_anchor_that_is_found_lies_where_it_was_put() {
    let dir = tempfile::tempdir().expect("a directory");
    let (vault, inner) = (VaultId([7; 16]), VaultId([8; 16]));
    let state = State::make(dir.path()).expect("opens");
    state.note_kept("h", &vault, None).expect("writes");
    state.will_keep(&inner, Some(&vault)).expect("writes");
    assert_eq!(state.around(&inner), None, "it is not here yet");
    drop(state);
    for _ in 0..2 {
        let state = State::make(dir.path()).expect("opens");
        state.note_found(&inner).expect("writes");
        assert_eq!(state.around(&inner), Some(vault));
        state.will_put_away(&inner).expect("writes");
    }
}

/// Its put was cut off, and the vault around it was put into it before the server started again.
#[test]
fn an_anchor_that_is_found_does_not_lie_in_its_own_dataset() {
    let dir = tempfile::tempdir().expect("a directory");
    let (one, other) = (VaultId([7; 16]), VaultId([8; 16]));
    let state = State::make(dir.path()).expect("opens");
    state.will_keep(&one, Some(&other)).expect("writes");
    state.note_kept("h", &other, Some(&one)).expect("writes");
    state.note_found(&one).expect("writes");
    assert_eq!((state.around(&one), state.around(&other)), (None, Some(one)));
    drop(state);
    let state = State::make(dir.path()).expect("opens");
    assert_eq!((state.around(&one), state.with_those_inside(&one)), (None, vec![one, other]));
}
