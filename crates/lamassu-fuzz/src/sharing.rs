//! What a server of shared vaults takes from hosts, and a host from a person: messages of a session, tokens.
//!
//! The messages of several sessions go to the state machine that grants leases, as the server hands them on. Whatever
//! they say, no two sessions hold what conflicts, what is durable is enough to go on from, and who is silent is ended.
//! A server's answers about locks go to a host's record of them: whatever they say, each request ends once.

use lamassu_anchor::head::Head;
use lamassu_lease::locks::{Asked, Holder, Lock, LockKey, LockKind, Range};
use lamassu_lease::server::{Durable, Server, Step};
use lamassu_lease::{Call, Millis, Mode, Object, Reply, RequestNo, SessionId, Terms};
use lamassu_rpc::convert::{from_call, from_reply, head_of_grant, to_call, to_reply};
use lamassu_rpc::proto;
use lamassu_rpc::token::Token;
use prost::Message;
use std::collections::BTreeSet;

/// Sessions beside those that end.
const SESSIONS: u8 = 3;
/// Objects that are looked at.
const OBJECTS: u64 = 8;
/// Of the vault's table.
const HEAD: Head = Head([7; 32]);

/// A line of `lamassu-server enrol`, as it was pasted.
pub fn join_token(input: &[u8]) {
    let Ok(line) = std::str::from_utf8(input) else { return };
    if let Ok(token) = line.parse::<Token>() {
        assert_eq!(*token.line(), line.trim(), "one form");
    }
}

/// A byte that says what happens: a session speaks, time passes, the server starts anew. For a message two bytes more,
/// its session and its length, and the message.
pub fn leases(input: &[u8]) {
    let terms = Terms::DEFAULT;
    let mut now = Millis(1);
    let (mut server, step) = Server::start(terms, Durable::default(), now);
    let mut durable = Durable::default();
    take(&mut durable, &step);
    let mut sessions = Vec::new();
    for _ in 0..SESSIONS {
        let (session, step) = server.join(now);
        take(&mut durable, &step);
        sessions.push(session);
    }
    let mut rest = input;
    while let Some((what, after)) = rest.split_first() {
        rest = after;
        let step = match what % 8 {
            0 => {
                now = Millis(now.0 + u64::from(*what) * 200);
                server.tick(now)
            }
            1 => {
                let (started, step) = Server::start(terms, durable.clone(), now);
                server = started;
                step
            }
            2 => server.end_session(sessions[usize::from(what / 8) % sessions.len()], now),
            3 => {
                let (session, step) = server.join(now);
                sessions[usize::from(what / 8) % usize::from(SESSIONS)] = session;
                step
            }
            _ => {
                let Some(([who, len], after)) = rest.split_first_chunk() else { return };
                let (message, after) = after.split_at(after.len().min((*len).into()));
                rest = after;
                let Ok(up) = proto::Up::decode(message) else { continue };
                let Ok(call) = to_call(up) else { continue };
                comes_back(&call);
                server.call(sessions[usize::from(*who) % sessions.len()], call, now)
            }
        };
        take(&mut durable, &step);
        for (_, reply) in &step.replies {
            let down = from_reply(reply, HEAD);
            let is_granted = matches!(reply, Reply::Granted { .. });
            assert_eq!(head_of_grant(&down), Ok(is_granted.then_some(HEAD)), "a head comes with each grant alone");
            let reply_again = to_reply(down);
            assert_eq!(reply_again.as_ref(), Ok(reply), "a reply comes back");
        }
        assert_eq!(&durable, server.durable(), "what is durable is what was said to be");
        for object in (0..OBJECTS).map(Object) {
            exclusion(&server, &sessions, object);
        }
    }
    // A term later nobody is left, and a new session gets what it asks for.
    now = Millis(now.0 + terms.term().0 + 1);
    take(&mut durable, &server.tick(now));
    assert!(durable.sessions.is_empty() && durable.exclusive.is_empty(), "{durable:?}");
    let (session, step) = server.join(now);
    take(&mut durable, &step);
    take(&mut durable, &server.call(session, acquire(), now));
    assert_eq!(server.mode_of(session, Object(1)), Some(Mode::Exclusive));
}

/// A byte that says what happens: a program asks, cancels or gives up, the session reconnects or ends, the server
/// answers. For a request two bytes more, its range; for an answer its length, and the message.
pub fn lock_answers(input: &[u8]) {
    let (mut holder, mut waiting) = (Holder::default(), BTreeSet::new());
    let mut rest = input;
    while let Some((what, after)) = rest.split_first() {
        rest = after;
        let request = RequestNo((what / 8).into());
        match what % 8 {
            0 => {
                let ended = holder.session_ended();
                let ended: BTreeSet<_> = ended.into_iter().map(|answered| answered.request).collect();
                assert_eq!(ended, std::mem::take(&mut waiting), "all requests end with the session");
            }
            1 => reports(&mut holder, &waiting),
            2 => {
                assert!(holder.cancel(request).is_none() || waiting.contains(&request), "only what waits is cancelled")
            }
            3 => assert_eq!(holder.abandon(request), waiting.remove(&request), "only what waits is given up"),
            4 | 5 => {
                let Some(([first, len], after)) = rest.split_first_chunk() else { return };
                rest = after;
                if let Ok((request, call)) = holder.ask(asked(*what, *first, *len)) {
                    comes_back(&call);
                    assert!(waiting.insert(request), "each request has a number of its own");
                }
            }
            _ => {
                let Some((len, after)) = rest.split_first() else { return };
                let (message, after) = after.split_at(after.len().min((*len).into()));
                rest = after;
                let Ok(down) = proto::Down::decode(message) else { continue };
                let _ = head_of_grant(&down);
                let Ok(reply) = to_reply(down) else { continue };
                assert_eq!(to_reply(from_reply(&reply, HEAD)).as_ref(), Ok(&reply), "a reply comes back");
                let Reply::Lock { request, answer } = reply else { continue };
                if let Some(answered) = holder.answer(request, answer) {
                    assert!(waiting.remove(&answered.request), "each request ends once");
                }
            }
        }
    }
    reports(&mut holder, &waiting);
}

fn asked(what: u8, first: u8, len: u8) -> Asked {
    let (waits, is_whole, is_exclusive) = (what & 8 != 0, what & 16 != 0, what & 32 != 0);
    let kind = if is_whole { LockKind::Whole } else { LockKind::Range };
    let range = Range::new(first.into(), u64::from(first) + u64::from(len));
    let range = range.filter(|_| !is_whole).unwrap_or(Range::ALL);
    let mode = if is_exclusive { Mode::Exclusive } else { Mode::Shared };
    let key = LockKey { file: Object(1), kind, owner: (what >> 6).into() };
    match (what % 8, waits) {
        (4, _) => Asked::Lock { lock: Lock { key, range, mode, pid: 1 }, handle: 5, waits },
        (_, true) => Asked::Unlock { key, range },
        (_, false) => Asked::Test { lock: Lock { key, range, mode, pid: 1 } },
    }
}

/// A new connection: its messages reach the server, and make again what waits.
fn reports(holder: &mut Holder, waiting: &BTreeSet<RequestNo>) {
    let (locks, again) = holder.resumed();
    let of = |call: &Call| match call {
        Call::Lock { request, .. } | Call::Unlock { request, .. } | Call::TestLock { request, .. } => Some(*request),
        _ => None,
    };
    assert!(again.iter().filter_map(of).eq(waiting.iter().copied()), "what waits is asked for again");
    again.iter().for_each(comes_back);
    comes_back(&Call::Resume { number: 1, held: Vec::new(), kept: Vec::new(), taken_over: Vec::new(), locks });
    assert!(!holder.must_report());
}

fn comes_back(call: &Call) {
    let of = proto::Of { vault: vec![1; 16], session: 1 };
    assert_eq!(to_call(from_call(call, of)).as_ref(), Ok(call), "a call comes back");
}

fn acquire() -> Call {
    Call::Acquire { request: RequestNo(1), object: Object(1), mode: Mode::Exclusive }
}

fn take(durable: &mut Durable, step: &Step) {
    step.changes.iter().for_each(|change| durable.apply(change));
}

fn exclusion(server: &Server, sessions: &[SessionId], object: Object) {
    let modes: Vec<Mode> = sessions.iter().filter_map(|session| server.mode_of(*session, object)).collect();
    assert!(modes.len() <= 1 || !modes.contains(&Mode::Exclusive), "{object:?}: {modes:?}");
    for session in sessions.iter().filter(|session| server.mode_of(**session, object).is_some()) {
        assert!(server.is_alive(*session), "{session:?} has ended, and holds {object:?}");
    }
}
