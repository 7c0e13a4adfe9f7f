//! Locks of programs: reports of them, and how many a host may have.

use super::*;

/// A vault that is opened again, and two sessions from before.
fn opened_again(common: &Common, callers: [&Caller; 2]) -> (Vault, [SessionId; 2]) {
    let before = open(table(), common);
    let sessions = callers.map(|caller| begin(&before, caller).0.session);
    drop(before);
    (open(table(), common), sessions)
}

/// Whoever has a vault look again until nothing is left would have it look for ever.
#[test]
fn a_vault_that_is_used_no_more_has_no_work_left() {
    let dir = tempfile::tempdir().unwrap();
    let (common, caller) = common(dir.path());
    let (vault, sessions) = opened_again(&common, [&caller, &caller]);
    let resumes = |session, report| vault.resumes(&caller, session, report, channel(REPLIES_MAX).0);
    let line = resumes(sessions[0], report(1, &[])).unwrap_or_else(|_| panic!("it lasts")).line;
    let of = |owner: u64| {
        let (key, range) = (LockKey { owner, ..KEY }, Range::new(owner, owner).unwrap());
        Lock { key, range, mode: Mode::Exclusive, pid: 1 }
    };
    // Each has the server look at all owners.
    for number in 0..20 {
        let test = Call::TestLock { request: RequestNo(number), lock: of(LOCKS_MAX as u64) };
        assert!(vault.call(line, test).is_ok());
    }
    let (held, kept, taken_over) = (Vec::new(), Vec::new(), Vec::new());
    let locks = (1..=LOCKS_MAX as u64).map(of).collect();
    assert!(resumes(sessions[1], Call::Resume { number: 1, held, kept, taken_over, locks }).is_ok());
    assert!(vault.has_work());
    assert!(vault.give_up(|_| Ok(()), || Err(Refused::NotNow)).is_err());
    assert!(vault.standing() == Standing::InDoubt && vault.tick().is_ok() && !vault.has_work());
}

/// One of the two lies, and the server cannot know which.
#[test]
fn whose_report_contradicts_anothers_ends_and_both_are_in_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let (common, one) = common(dir.path());
    let two = admitted_as("two", &common.state);
    let (vault, sessions) = opened_again(&common, [&one, &two]);
    let locks = vec![Lock { key: KEY, range: Range::ALL, mode: Mode::Exclusive, pid: 1 }];
    for (caller, session) in [&one, &two].into_iter().zip(sessions) {
        let (held, kept, taken_over) = (Vec::new(), Vec::new(), Vec::new());
        let report = Call::Resume { number: 1, held, kept, taken_over, locks: locks.clone() };
        assert!(vault.resumes(caller, session, report, channel(REPLIES_MAX).0).is_ok());
    }
    let ended = common.state.audit(0, 100).unwrap().entries.pop().expect("has entries").entry;
    for part in ["session-ended", "\"host\":\"two\"", "\"why\":\"misreported\"", "\"against\":\"one\""] {
        assert!(ended.contains(part), "{ended}");
    }
}

/// What is asked for before all have reported their locks waits, whatever it is.
#[test]
fn a_host_has_no_more_requests_that_wait_for_reports_than_it_may() {
    let dir = tempfile::tempdir().unwrap();
    let (common, caller) = common(dir.path());
    let (vault, sessions) = opened_again(&common, [&caller, &caller]);
    let (replies, mut told) = channel(REPLIES_MAX);
    let resumed = vault.resumes(&caller, sessions[0], report(1, &[]), replies);
    let line = resumed.unwrap_or_else(|_| panic!("it lasts")).line;
    let mut elsewhere = common.bounds.locks.of_session("one");
    elsewhere.set(LOCKS_OF_HOST - 1);
    let test = Lock { key: KEY, range: Range::ALL, mode: Mode::Exclusive, pid: 1 };
    let calls = [
        Call::TestLock { request: RequestNo(1), lock: test },
        Call::Unlock { request: RequestNo(2), key: KEY, range: Range::ALL },
        Call::CancelLock { request: RequestNo(1) },
        Call::TestLock { request: RequestNo(3), lock: test },
    ];
    for call in calls {
        assert!(vault.call(line, call).is_ok());
        assert_eq!(vault.inner.lock().leases.locks_of(line.session), 1, "the first one waits");
    }
    let mut answers = || -> Vec<_> {
        let replies = std::iter::from_fn(|| told.try_recv().ok());
        let of_locks = replies.filter_map(|(reply, _)| match reply {
            Reply::Lock { request, answer } => Some((request.0, answer)),
            _ => None,
        });
        of_locks.collect()
    };
    assert_eq!(answers(), [(3, LockAnswer::TooMany)], "whoever unlocks is not refused, and will report");
    assert!(vault.resumes(&caller, sessions[1], report(1, &[]), channel(REPLIES_MAX).0).is_ok());
    assert_eq!(answers(), [(1, LockAnswer::Done)]);
}

/// It may have them in any number of vaults, and by any number of sessions.
#[test]
fn a_host_has_no_more_locks_in_all_vaults_than_it_may() {
    let dir = tempfile::tempdir().unwrap();
    let (common, caller) = common(dir.path());
    let vault = open(table(), &common);
    let (line, mut told) = begin(&vault, &caller);
    let mut elsewhere = common.bounds.locks.of_session("one");
    let mut answer = |call: Call| {
        assert!(vault.call(line, call).is_ok());
        match told.try_recv() {
            Ok((Reply::Lock { answer, .. }, _)) => answer,
            other => panic!("{other:?}"),
        }
    };
    elsewhere.set(LOCKS_OF_HOST - 1);
    assert_eq!(answer(lock(1)), LockAnswer::Done, "the last one");
    assert_eq!(answer(lock(2)), LockAnswer::TooMany);
    assert_eq!(answer(Call::Unlock { request: RequestNo(3), key: KEY, range: Range::ALL }), LockAnswer::Done);
    assert_eq!(answer(lock(4)), LockAnswer::Done, "there is room again");
    // Nor does it get more by unlocking a part, which makes two ranges of one.
    elsewhere.set(LOCKS_OF_HOST);
    let unlock = |byte| Call::Unlock { request: RequestNo(5), key: KEY, range: Range::new(byte, byte).unwrap() };
    let count = |vault: &Vault| vault.inner.lock().leases.locks_of(line.session);
    assert_eq!((answer(unlock(7)), count(&vault)), (LockAnswer::TooMany, 1));
    assert_eq!((answer(unlock(0)), count(&vault)), (LockAnswer::Done, 1), "it is one range yet");
    // Nor does it get more by a report.
    let count = || vault.inner.lock().leases.locks_of(line.session) as u64;
    let reports = |number, locks: u64| {
        let one =
            |at: u64| Lock { key: KEY, range: Range::new(2 * at, 2 * at).unwrap(), mode: Mode::Exclusive, pid: 1 };
        let (held, kept, taken_over) = (Vec::new(), Vec::new(), Vec::new());
        Call::Resume { number, held, kept, taken_over, locks: (0..locks).map(one).collect() }
    };
    // It is the first message of a connection, and no other one.
    assert!(matches!(vault.call(line, reports(1, 8000)), Err(Refused::Nonsense)));
    assert_eq!(count(), 1);
    let resumes = |number, locks| {
        assert!(vault.resumes(&caller, line.session, reports(number, locks), channel(REPLIES_MAX).0).is_ok());
        count()
    };
    elsewhere.set(0);
    assert_eq!(resumes(2, 8000), 8000);
    elsewhere.set(LOCKS_OF_HOST);
    assert_eq!(resumes(3, 8000), 8000, "those it has");
    elsewhere.set(2 * LOCKS_OF_HOST);
    assert_eq!(resumes(4, 8000), 8000, "it has them: an unlock may have made more");
    assert_eq!(resumes(5, 8100), 0, "it cannot have more: the session ends");
    assert!(!vault.inner.lock().leases.is_alive(line.session));
    assert_eq!(ends(&common), ["misreported"]);
}
