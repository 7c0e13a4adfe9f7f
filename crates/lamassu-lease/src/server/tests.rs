use super::*;
use crate::RequestNo;
use crate::locks::{LockKey, LockKind, Range};

const OBJECT: Object = Object(1);

fn acquire(server: &mut Server, session: SessionId, mode: Mode, now: Millis) -> Vec<(SessionId, Reply)> {
    server.call(session, Call::Acquire { request: RequestNo(0), object: OBJECT, mode }, now).replies
}

/// The next report of a session, by a new connection.
fn report(server: &Server, session: SessionId, held: &[Grant], kept: &[Object], locks: &[Lock]) -> Call {
    let number = (1..).find(|number| !server.is_late(session, *number)).unwrap();
    let (held, kept, locks) = (held.to_vec(), kept.to_vec(), locks.to_vec());
    Call::Resume { number, held, kept, taken_over: Vec::new(), locks }
}

/// A session has a new connection.
fn resumes(server: &mut Server, session: SessionId, held: &[Grant], now: Millis) -> Step {
    let report = report(server, session, held, &[], &[]);
    server.call(session, report, now)
}

#[test]
fn a_lease_is_recalled_when_it_was_held_for_long_enough_and_the_server_says_when() {
    let terms = Terms::DEFAULT;
    let (mut server, _) = Server::start(terms, Durable::default(), Millis(0));
    let (a, _) = server.join(Millis(0));
    let (b, _) = server.join(Millis(0));
    assert_eq!(server.wake_after(Millis(0)), Some(terms.term()), "the end of a session that is silent");
    assert_eq!(acquire(&mut server, a, Mode::Exclusive, Millis(5)).len(), 1);
    assert_eq!(acquire(&mut server, b, Mode::Shared, Millis(6)), []);
    let at = Millis(5) + terms.min_hold();
    assert_eq!(server.wake_after(Millis(6)), Some(at));
    let recalled = server.tick(at).replies;
    assert!(matches!(recalled[..], [(to, Reply::Recall { keeps: Some(Mode::Shared), .. })] if to == a));
    assert_eq!(server.wake_after(at), Some(terms.term()), "it is asked once");
}

/// An expired session may not know: its leases are regranted after its own clock has stopped it.
#[test]
fn what_is_taken_from_a_session_is_given_to_others_a_term_later() {
    let term = Terms::DEFAULT.term();
    let (mut server, a, b, grant) = contended();
    assert!(beats(&mut server, a, Millis(200)) && beats(&mut server, b, Millis(200)));
    let out = server.turn_out(a, Millis(300));
    assert_eq!((out.replies, out.changes), (vec![(a, Reply::Ended)], vec![]));
    assert!(!server.may_change(a, OBJECT) && !beats(&mut server, a, Millis(400)));
    let _ = server.call(a, Call::Release { grant, keeps: None }, Millis(400));
    let _ = resumes(&mut server, a, &[grant], Millis(400));
    assert!(beats(&mut server, b, Millis(400)));
    assert!(server.tick(Millis(199) + term).replies.is_empty() && server.is_alive(a));
    let replies = server.tick(Millis(200) + term).replies;
    assert!(
        matches!(replies[..], [(to, Reply::Ended), (next, Reply::Granted { takes_over: true, .. })]
        if to == a && next == b),
        "{replies:?}"
    );
    // A session without leases is gone at once.
    let (c, _) = server.join(Millis(200) + term);
    assert_eq!(server.turn_out(c, Millis(200) + term).changes, [Change::Ended(c)]);
}

/// A newly started server, of which one session holds the object and another waits for it.
fn contended() -> (Server, SessionId, SessionId, Grant) {
    let (mut server, _) = Server::start(Terms::DEFAULT, Durable::default(), Millis(0));
    let (a, _) = server.join(Millis(0));
    let (b, _) = server.join(Millis(0));
    let granted = acquire(&mut server, a, Mode::Exclusive, Millis(0));
    let [(_, Reply::Granted { grant, .. })] = granted[..] else { panic!("{granted:?}") };
    let recalled = acquire(&mut server, b, Mode::Exclusive, Millis(100));
    assert!(matches!(recalled[..], [(to, Reply::Recall { .. })] if to == a), "{recalled:?}");
    (server, a, b, grant)
}

/// A session's heartbeat. Returns whether the server answers it.
fn beats(server: &mut Server, session: SessionId, now: Millis) -> bool {
    let said = server.call(session, Call::Heartbeat { beat: 0 }, now).replies;
    said.contains(&(session, Reply::Alive { beat: 0 }))
}

#[test]
fn a_holder_that_is_asked_and_holds_on_stops_and_then_ends_though_it_beats() {
    let (term, beat) = (Terms::DEFAULT.term().0, Terms::DEFAULT.heartbeat().0);
    let (mut server, a, b, grant) = contended();
    let (mut last, mut now) = (0, 100);
    let ended = loop {
        now += beat;
        let step = server.tick(Millis(now));
        if !server.is_alive(a) {
            break step;
        }
        assert_eq!(beats(&mut server, a, Millis(now)), now < 100 + term, "{now}");
        last = if now < 100 + term { now } else { last };
        assert!(beats(&mut server, b, Millis(now)));
        // A session with a new connection is recalled again, and gets no more time.
        let again = resumes(&mut server, a, &[grant], Millis(now));
        assert!(server.tick(Millis(now)).replies.is_empty() && again.changes.is_empty());
    };
    // Not before the host has stopped by its own clock.
    assert!(now >= last + term && now <= 100 + 2 * term + beat, "{now}");
    assert_eq!(ended.held_on, [a]);
    assert!(ended.replies.contains(&(a, Reply::Ended)));
    let takes_over = |(to, reply): &(_, Reply)| *to == b && matches!(reply, Reply::Granted { takes_over: true, .. });
    assert!(ended.replies.iter().any(takes_over), "{ended:?}");
}

#[test]
fn a_holder_that_gives_back_late_is_answered_again() {
    let term = Terms::DEFAULT.term().0;
    for by_resuming in [false, true] {
        let (mut server, a, b, grant) = contended();
        for now in [term / 2, term, term + 200] {
            assert_eq!(beats(&mut server, a, Millis(now)), now < term + 100);
            assert!(beats(&mut server, b, Millis(now)));
        }
        let now = Millis(term + 300);
        let given_back = match by_resuming {
            true => report(&server, a, &[], &[], &[]),
            false => Call::Release { grant, keeps: None },
        };
        let step = server.call(a, given_back, now);
        assert!(matches!(step.replies[..], [(to, Reply::Granted { takes_over: false, .. })] if to == b));
        assert!(beats(&mut server, a, now));
        assert!(server.tick(Millis(2 * term)).held_on.is_empty() && server.is_alive(a));
    }
}

#[test]
fn a_holder_that_is_silent_ends_as_any_other() {
    let term = Terms::DEFAULT.term();
    let (mut server, a, b, _) = contended();
    assert!(beats(&mut server, a, Millis(200)) && beats(&mut server, b, Millis(term.0 - 1)));
    let step = server.tick(Millis(200) + term);
    assert!(step.held_on.is_empty() && !server.is_alive(a) && server.is_alive(b));
}

#[test]
fn a_session_waits_once() {
    let (mut server, a, b, grant) = contended();
    for request in 1..1000 {
        let call = Call::Acquire { request: RequestNo(request), object: OBJECT, mode: Mode::Exclusive };
        assert!(server.call(b, call, Millis(200)).replies.is_empty());
    }
    let step = server.call(a, Call::Release { grant, keeps: None }, Millis(300));
    assert_eq!(step.replies.len(), 1);
    assert!(server.objects.get(&OBJECT).is_some_and(|held| !held.is_waited_for()));
}

/// The report by which a session comes back is the first that the server hears after another one's term. Grants and
/// locks of that moment are not in the report, so the session must not hear of them (R10).
#[test]
fn what_a_report_frees_is_not_given_to_the_session_that_reports() {
    let term = Terms::DEFAULT.term();
    let (mut server, a, b, _) = contended();
    for (session, request) in [(a, RequestNo(8)), (b, RequestNo(9))] {
        let key = LockKey { file: OBJECT, kind: LockKind::Range, owner: 1 };
        let lock = Lock { key, range: Range::new(0, 9).unwrap(), mode: Mode::Exclusive, pid: 1 };
        let _ = server.call(session, Call::Lock { request, lock, waits: true }, Millis(100));
    }
    assert!(beats(&mut server, b, Millis(200)));
    let step = resumes(&mut server, b, &[], Millis(100) + term);
    assert_eq!(step.replies, [(a, Reply::Ended)]);
    assert!(!server.is_alive(a) && server.is_alive(b) && !server.may_change(b, OBJECT));
}

/// Until it lets go, or is silent. From then on it has a term, as any other.
#[test]
fn a_holder_that_says_that_it_keeps_the_lease_is_answered_however_long() {
    let term = Terms::DEFAULT.term().0;
    let (mut server, a, b, grant) = contended();
    let keep = |kept| Call::Keep { grant, kept };
    // After the deadline it is answered again.
    assert!(beats(&mut server, a, Millis(term - 1)) && beats(&mut server, b, Millis(term - 1)));
    assert!(!beats(&mut server, a, Millis(term + 100)));
    assert_eq!(server.call(a, keep(true), Millis(term + 200)), Step::default());
    for now in (term + 200..5 * term).step_by(1000) {
        assert!(beats(&mut server, a, Millis(now)) && beats(&mut server, b, Millis(now)));
        assert!(server.tick(Millis(now)).replies.is_empty());
    }
    // A new connection says it again, and so it does to a server that starts anew.
    let resume = |server: &Server, kept: &[Object]| report(server, a, &[grant], kept, &[]);
    let says_again = resume(&server, &[OBJECT]);
    let _ = server.call(a, says_again, Millis(5 * term));
    assert!(beats(&mut server, a, Millis(5 * term)) && beats(&mut server, b, Millis(5 * term)));
    for by_resuming in [false, true] {
        let mut server = server.clone();
        let let_go = if by_resuming { resume(&server, &[]) } else { keep(false) };
        let _ = server.call(a, let_go, Millis(5 * term));
        for now in [5 * term, 6 * term - 1] {
            assert!(beats(&mut server, a, Millis(now)) && beats(&mut server, b, Millis(now)));
        }
        assert!(!beats(&mut server, a, Millis(6 * term)), "it has had its term");
    }
    // Who keeps it, and is silent.
    assert!(beats(&mut server, b, Millis(6 * term - 1)));
    let replies = server.tick(Millis(6 * term)).replies;
    assert!(replies.iter().any(|(to, reply)| *to == b && matches!(reply, Reply::Granted { takes_over: true, .. })));
}

/// In one run, an object that takes the place of another one gives none of its numbers again.
#[test]
fn numbers_go_on_when_a_process_starts_again_from_what_is_durable() {
    let (server, a, b, grant) = contended();
    let mut again = Server::start_again(Terms::DEFAULT, server.durable().clone(), server.given(), Millis(0));
    assert_eq!(again.durable(), server.durable(), "the run is the same");
    assert!(again.may_change(a, OBJECT) && !again.is_back(a));
    let (c, _) = again.join(Millis(0));
    assert!(c > b && c.0 > grant.number.0);
    let (mut next, _) = Server::start(Terms::DEFAULT, again.durable().clone(), Millis(0));
    assert!(next.join(Millis(0)).0 > c);
}

/// A machine was suspended, or an administrator had the vault checked. Meanwhile the holder could commit nothing.
#[test]
fn a_holder_that_is_asked_has_a_term_from_the_end_of_a_pause() {
    let term = Terms::DEFAULT.term().0;
    let (mut server, a, b, grant) = contended();
    let end = 100 + term + 1;
    server.was_away(Millis(end));
    // Its time counts once.
    server.was_at_work(Millis(100), Millis(end));
    for now in [end, end + term - 1] {
        assert!(beats(&mut server, a, Millis(now)) && beats(&mut server, b, Millis(now)));
    }
    let mut given_back = server.clone();
    let step = given_back.call(a, Call::Release { grant, keeps: None }, Millis(end + term - 1));
    assert!(matches!(step.replies[..], [(to, Reply::Granted { takes_over: false, .. })] if to == b), "{step:?}");
    assert!(step.held_on.is_empty() && given_back.is_alive(a));
    assert!(!beats(&mut server, a, Millis(end + term)), "it has had its term");
}

/// What a host says of its takeover may be lost with its connection. It keeps as shared only what it has taken over.
#[test]
fn what_is_kept_as_shared_is_taken_over() {
    let term = Terms::DEFAULT.term();
    for by_resuming in [false, true] {
        let (mut server, a, b, _) = contended();
        let now = Millis(100) + term;
        assert!(beats(&mut server, b, Millis(200)));
        let granted = server.tick(now).replies;
        let [(_, Reply::Ended), (_, Reply::Granted { grant, takes_over: true, .. })] = granted[..] else {
            panic!("{granted:?}")
        };
        assert!(!server.is_alive(a) && server.is_abandoned(OBJECT));
        let kept = Grant { mode: Mode::Shared, ..grant };
        let step = match by_resuming {
            true => resumes(&mut server, b, &[kept], now),
            false => server.call(b, Call::Release { grant, keeps: Some(Mode::Shared) }, now),
        };
        assert_eq!(step.changes, [Change::Released(OBJECT), Change::TakenOver(OBJECT)]);
        let (c, _) = server.join(now);
        let granted = acquire(&mut server, c, Mode::Shared, now);
        assert!(
            matches!(granted[..], [(to, Reply::Granted { grant: Grant { mode: Mode::Shared, .. }, takes_over: false, .. })]
            if to == c),
            "{granted:?}"
        );
        // A late report changes nothing.
        assert_eq!(server.call(b, Call::TakenOver { grant }, now), Step::default());
    }
}

/// A recall that it has not answered stays.
#[test]
fn a_shared_lease_that_is_kept_as_shared_stays_recalled() {
    let term = Terms::DEFAULT.term().0;
    let (mut server, _) = Server::start(Terms::DEFAULT, Durable::default(), Millis(0));
    let ((a, _), (b, _)) = (server.join(Millis(0)), server.join(Millis(0)));
    let granted = acquire(&mut server, a, Mode::Shared, Millis(0));
    let [(_, Reply::Granted { grant, .. })] = granted[..] else { panic!("{granted:?}") };
    assert_eq!(acquire(&mut server, b, Mode::Exclusive, Millis(100)).len(), 1);
    assert!(beats(&mut server, a, Millis(term - 1)) && beats(&mut server, b, Millis(term - 1)));
    let again = server.call(a, Call::Release { grant, keeps: Some(Mode::Shared) }, Millis(term - 1));
    assert_eq!(again, Step::default());
    assert!(!beats(&mut server, a, Millis(100 + term)), "its deadline is that of the recall");
}

/// Bytes of a connection that was given up may arrive after the next one has.
#[test]
fn a_report_that_comes_late_changes_nothing() {
    let (mut server, a, b, grant) = contended();
    let late = report(&server, a, &[], &[], &[]);
    let _ = resumes(&mut server, a, &[grant], Millis(200));
    let before = server.clone();
    // Of what it says one part would make no sense.
    let claims = Grant { number: GrantNo(7), ..grant };
    let nonsense = Call::Resume { number: 1, held: vec![claims], kept: vec![], taken_over: vec![], locks: vec![] };
    for late in [late, nonsense] {
        assert!(server.is_late(a, 1) && server.call(a, late, Millis(200)) == Step::default());
        assert!(server == before && server.may_change(a, OBJECT) && server.is_alive(b));
    }
    // A process that opens the vault again has heard of it.
    let mut again = Server::start_again(Terms::DEFAULT, server.durable().clone(), server.given(), Millis(200));
    again.has_heard(a, 1);
    assert!(again.is_late(a, 1) && !again.is_late(a, 2) && !again.is_late(b, 1));
}

#[test]
fn a_report_that_makes_no_sense_is_why_its_session_ends() {
    let (mut server, a, _, grant) = contended();
    let step = resumes(&mut server, a, &[Grant { number: GrantNo(7), ..grant }], Millis(200));
    assert!(step.misreported == [(a, None)] && step.replies.contains(&(a, Reply::Ended)) && !server.is_alive(a));
}

/// A server that has started again knows of no shared leases and no locks before they are reported.
#[test]
fn a_session_that_is_turned_out_before_it_has_reported_may_have_anything() {
    let term = Terms::DEFAULT.term();
    let (mut before, _) = Server::start(Terms::DEFAULT, Durable::default(), Millis(0));
    let ((a, _), (b, _)) = (before.join(Millis(0)), before.join(Millis(0)));
    assert_eq!(acquire(&mut before, a, Mode::Shared, Millis(0)).len(), 1);
    let (mut server, _) = Server::start(Terms::DEFAULT, before.durable().clone(), Millis(0));
    let _ = resumes(&mut server, b, &[], Millis(0));
    let out = server.turn_out(a, Millis(1));
    assert_eq!((out.replies, out.changes), (vec![(a, Reply::Ended)], vec![]));
    assert_eq!(acquire(&mut server, b, Mode::Exclusive, Millis(1)), []);
    let key = LockKey { file: OBJECT, kind: LockKind::Range, owner: 1 };
    let lock = Lock { key, range: Range::new(0, 9).unwrap(), mode: Mode::Exclusive, pid: 1 };
    let asked = server.call(b, Call::Lock { request: RequestNo(5), lock, waits: true }, Millis(1));
    assert_eq!(asked, Step::default());
    assert!(beats(&mut server, b, Millis(term.0 - 1)));
    let replies = server.tick(term).replies;
    assert!(
        matches!(replies[..], [(to, Reply::Ended), (next, Reply::Granted { .. }), (last, Reply::Lock { .. })]
        if to == a && next == b && last == b),
        "{replies:?}"
    );
}

/// Its place is that of its request, however often its connection breaks meanwhile.
#[test]
fn a_session_that_reports_again_keeps_its_place_among_those_that_wait() {
    let (mut server, a, b, grant) = contended();
    let (c, _) = server.join(Millis(200));
    assert_eq!(acquire(&mut server, c, Mode::Exclusive, Millis(200)), []);
    let next = |server: &Server| server.objects.get(&OBJECT)?.next(false).map(|next| next.session);
    for _ in 0..3 {
        let _ = resumes(&mut server, b, &[], Millis(200));
        assert_eq!(next(&server), Some(c), "who has not asked again is not waited for");
        assert_eq!(acquire(&mut server, b, Mode::Exclusive, Millis(200)), []);
        assert_eq!(next(&server), Some(b));
    }
    // Another request is a new one.
    let mut other = server.clone();
    let _ = resumes(&mut other, b, &[], Millis(200));
    assert_eq!(acquire(&mut other, b, Mode::Shared, Millis(200)), []);
    assert_eq!(next(&other), Some(c));
    let replies = server.call(a, Call::Release { grant, keeps: None }, Millis(300)).replies;
    let [(to, Reply::Granted { grant, .. })] = replies[..] else { panic!("{replies:?}") };
    assert_eq!(to, b);
    let replies = server.call(b, Call::Release { grant, keeps: None }, Millis(300)).replies;
    assert!(matches!(replies[..], [(to, Reply::Granted { .. })] if to == c), "it was granted once: {replies:?}");
}

/// What a host says of its takeover, and that it gives the object back, may be lost with its connection.
#[test]
fn what_was_taken_over_and_given_back_is_reported_by_the_next_connection() {
    let now = Millis(100) + Terms::DEFAULT.term();
    let (mut server, a, b, _) = contended();
    assert!(beats(&mut server, b, Millis(200)));
    let granted = server.tick(now).replies;
    let [_, (_, Reply::Granted { grant, takes_over: true, .. })] = granted[..] else { panic!("{granted:?}") };
    assert!(!server.is_alive(a));
    let report = |number, left: &[Grant]| {
        let taken_over = left.to_vec();
        Call::Resume { number, held: vec![], kept: vec![], taken_over, locks: vec![] }
    };
    let earlier = Grant { number: GrantNo(7), ..grant };
    for left in [&[] as &[Grant], &[earlier]] {
        let mut unfinished = server.clone();
        assert_eq!(unfinished.call(b, report(1, left), now).changes, [Change::Released(OBJECT)]);
        assert!(unfinished.is_abandoned(OBJECT) && unfinished.is_alive(b));
    }
    let mut heard = server.clone();
    for call in [Call::TakenOver { grant }, Call::Release { grant, keeps: None }] {
        let _ = heard.call(b, call, now);
    }
    let (d, _) = server.join(now);
    assert_eq!(acquire(&mut server, d, Mode::Shared, now), []);
    let step = server.call(b, report(1, &[grant]), now);
    assert_eq!(step.changes, [Change::Released(OBJECT), Change::TakenOver(OBJECT)]);
    assert!(matches!(step.replies[..], [(to, Reply::Granted { takes_over: false, .. })] if to == d), "{step:?}");
    // The server may have heard both.
    assert_eq!(heard.call(b, report(1, &[grant]), now), Step::default());
    assert!(heard.is_alive(b) && server.is_alive(b));
}

fn is_recalled(step: &Step, session: SessionId) -> bool {
    matches!(step.replies[..], [(to, Reply::Recall { .. })] if to == session)
}

/// The recall was lost with the holder's connection, and who asked has gone before there was another one.
#[test]
fn a_holder_has_no_deadline_when_nobody_waits_any_more() {
    let term = Terms::DEFAULT.term().0;
    let leaves: [fn(&mut Server, SessionId) -> Step; 3] = [
        |server, b| server.call(b, Call::Leave, Millis(200)),
        |server, b| server.turn_out(b, Millis(200)),
        // It is silent.
        |server, _| server.tick(Millis(200)),
    ];
    for leave in leaves {
        let (mut server, a, b, grant) = contended();
        let _ = leave(&mut server, b);
        let _ = resumes(&mut server, a, &[grant], Millis(300));
        for now in (1_000..3 * term).step_by(1_000) {
            assert!(beats(&mut server, a, Millis(now)), "{now}");
            assert!(!is_recalled(&server.tick(Millis(now)), a) || now < 100 + term);
        }
        assert!(!server.is_alive(b) && server.may_change(a, OBJECT));
        // The next request recalls it again, and it has a term from then on.
        let asked = 3 * term;
        let (c, _) = server.join(Millis(asked));
        assert!(
            matches!(acquire(&mut server, c, Mode::Shared, Millis(asked))[..], [(to, Reply::Recall { .. })] if to == a)
        );
        for now in [asked, asked + term - 1] {
            assert!(beats(&mut server, a, Millis(now)) && beats(&mut server, c, Millis(now)));
        }
        assert!(!beats(&mut server, a, Millis(asked + term)));
    }
}

/// Otherwise those that come and go would give the holder as much time as they like.
#[test]
fn a_deadline_goes_on_while_anybody_waits() {
    let term = Terms::DEFAULT.term().0;
    let (mut server, a, b, grant) = contended();
    let (c, _) = server.join(Millis(200));
    assert_eq!(acquire(&mut server, c, Mode::Shared, Millis(200)), []);
    assert_eq!(server.call(b, Call::Leave, Millis(300)).replies, []);
    // It has a new connection, and has not asked again by that.
    let _ = resumes(&mut server, c, &[], Millis(400));
    assert!(is_recalled(&resumes(&mut server, a, &[grant], Millis(500)), a), "who has a deadline is told");
    assert!(beats(&mut server, a, Millis(term + 99)) && beats(&mut server, c, Millis(term + 99)));
    assert!(!beats(&mut server, a, Millis(term + 100)));
}

/// A vault is frozen, and who waited for it has left when it is thawed.
#[test]
fn who_keeps_a_lease_no_longer_has_no_deadline_when_nobody_waits() {
    let term = Terms::DEFAULT.term().0;
    let (mut server, a, b, grant) = contended();
    let _ = server.call(a, Call::Keep { grant, kept: true }, Millis(200));
    let _ = server.call(b, Call::Leave, Millis(300));
    let _ = server.call(a, Call::Keep { grant, kept: false }, Millis(400));
    for now in (1_000..3 * term).step_by(1_000) {
        assert!(beats(&mut server, a, Millis(now)), "{now}");
    }
}

/// A reader got an abandoned object exclusively, has taken it over, and keeps it as shared. That was lost with its
/// connection, as was the recall for another reader.
#[test]
fn who_reports_a_lease_as_reduced_has_no_deadline_for_what_it_was() {
    let term = Terms::DEFAULT.term().0;
    for is_named in [false, true] {
        let (mut server, _, b, _) = contended();
        let now = 100 + term;
        assert!(beats(&mut server, b, Millis(200)));
        let granted = server.tick(Millis(now)).replies;
        let [_, (_, Reply::Granted { grant, takes_over: true, .. })] = granted[..] else { panic!("{granted:?}") };
        assert!(beats(&mut server, b, Millis(now)));
        let (c, _) = server.join(Millis(now + 100));
        let asked = acquire(&mut server, c, Mode::Shared, Millis(now + 100));
        assert!(matches!(asked[..], [(to, Reply::Recall { keeps: None, .. })] if to == b), "{asked:?}");
        if !is_named {
            let _ = resumes(&mut server, c, &[], Millis(now + 100));
        }
        let _ = resumes(&mut server, b, &[Grant { mode: Mode::Shared, ..grant }], Millis(now + 200));
        assert_eq!(server.mode_of(c, OBJECT), is_named.then_some(Mode::Shared));
        for now in (now + 1_000..now + 3 * term).step_by(1_000) {
            assert!(beats(&mut server, b, Millis(now)) && beats(&mut server, c, Millis(now)), "{now}");
            assert_eq!(server.tick(Millis(now)), Step::default());
        }
    }
}

/// Its host has said that it is alive, and the server has not looked yet.
#[test]
fn a_session_whose_message_waits_is_not_silent() {
    let term = Terms::DEFAULT.term();
    let (mut server, a, b, _) = contended();
    let _ = server.call(a, Call::Leave, Millis(150));
    assert!(beats(&mut server, b, Millis(200)));
    let (c, _) = server.join(Millis(200));
    let now = Millis(200) + term;
    assert_eq!(server.overdue(Millis(now.0 - 1)).count(), 0);
    assert_eq!(server.overdue(now).collect::<Vec<_>>(), [b, c]);
    server.has_arrived(b, Millis(300), now);
    assert_eq!(server.overdue(now).collect::<Vec<_>>(), [c]);
    assert_eq!(server.tick(now).replies, [(c, Reply::Ended)]);
    assert!(server.is_alive(b) && server.tick(now + term).replies == [(b, Reply::Ended)]);
}

/// Otherwise it would be kept by messages that are not answered (R13), or after a revocation (R3).
#[test]
fn a_message_that_waits_keeps_no_session_that_holds_on_or_is_out() {
    let term = Terms::DEFAULT.term();
    for is_out in [false, true] {
        let (mut server, a, b, _) = contended();
        assert!(beats(&mut server, a, Millis(200)) && beats(&mut server, b, Millis(200)));
        if is_out {
            let _ = server.turn_out(a, Millis(300));
        }
        let now = Millis(200) + term;
        assert!(beats(&mut server, b, Millis(now.0 - 1)));
        server.has_arrived(a, Millis(100) + term, now);
        assert!(server.tick(now).replies.contains(&(a, Reply::Ended)), "{is_out}");
    }
}

/// Otherwise it would keep what others wait for as long as its connections break often enough.
#[test]
fn a_holder_is_recalled_when_it_has_held_for_long_enough_however_often_it_reconnects() {
    let min_hold = Terms::DEFAULT.min_hold().0;
    let (mut server, _) = Server::start(Terms::DEFAULT, Durable::default(), Millis(0));
    let ((a, _), (b, _)) = (server.join(Millis(0)), server.join(Millis(0)));
    let granted = acquire(&mut server, a, Mode::Exclusive, Millis(0));
    let [(_, Reply::Granted { grant, .. })] = granted[..] else { panic!("{granted:?}") };
    assert_eq!(acquire(&mut server, b, Mode::Exclusive, Millis(1)), []);
    for now in 1..=min_hold {
        let resumed = resumes(&mut server, a, &[grant], Millis(now));
        assert_eq!(is_recalled(&resumed, a), now == min_hold, "{now}");
    }
}

/// It may have to commit before it can release the vault, and the vault was at work. Only a host whose heartbeat is
/// answered commits.
#[test]
fn a_holder_has_after_the_vaults_work_what_it_had_of_its_term_before() {
    let term = Terms::DEFAULT.term();
    let (mut server, a, b, grant) = contended();
    assert!(beats(&mut server, a, Millis(200)) && beats(&mut server, b, Millis(200)));
    let (since, now) = (Millis(250), Millis(500) + term);
    for session in [a, b] {
        server.has_arrived(session, since, now);
    }
    server.was_at_work(since, now);
    let end = now.0 + term.0 - (250 - 100);
    for now in [now.0, end - 1] {
        assert!(beats(&mut server, a, Millis(now)) && beats(&mut server, b, Millis(now)), "{now}");
    }
    let mut releases = server.clone();
    let step = releases.call(a, Call::Release { grant, keeps: None }, Millis(end - 1));
    assert!(matches!(step.replies[..], [(to, Reply::Granted { takes_over: false, .. })] if to == b), "{step:?}");
    assert!(!beats(&mut server, a, Millis(end)), "it has gained no more than the time of the work");
}

/// It may be the release, and is handled a moment after the deadline.
#[test]
fn a_holder_whose_message_has_waited_since_before_its_deadline_may_release_what_it_holds() {
    let term = Terms::DEFAULT.term();
    let (mut server, a, b, grant) = contended();
    assert!(beats(&mut server, a, Millis(200)) && beats(&mut server, b, Millis(200)));
    let now = Millis(500) + term;
    for session in [a, b] {
        server.has_arrived(session, Millis(300), now);
    }
    assert!(!beats(&mut server, a, now), "its deadline is over");
    let step = server.call(a, Call::Release { grant, keeps: None }, now);
    assert!(matches!(step.replies[..], [(to, Reply::Granted { takes_over: false, .. })] if to == b), "{step:?}");
    assert!(server.is_alive(a) && beats(&mut server, a, now));
}
