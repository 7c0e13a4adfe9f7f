//! A server that leaves out a rule.

use lamassu_lease::server::{Server, Step};
use lamassu_lease::{Call, Grant, GrantNo, Millis, Mode, Object, SessionId};

/// The server as it would be if every session were back.
pub fn without_grace(server: &Server, now: Millis) -> Server {
    let mut other = server.clone();
    for session in server.durable().sessions.clone() {
        let held = server.durable().exclusive.iter().filter(|(_, (of, _))| *of == session);
        let grant = |(object, (_, number)): (&Object, &(SessionId, GrantNo))| Grant {
            object: *object,
            mode: Mode::Exclusive,
            number: *number,
        };
        if !server.is_back(session) {
            let _ = other.call(session, Call::Resume { held: held.map(grant).collect() }, now);
        }
    }
    other
}

/// Ends those that hold on to what they were asked for, though they believe the answer to their last heartbeat.
pub fn end_who_holds_on(server: &mut Server, now: Millis, step: &mut Step) {
    for session in server.durable().sessions.clone() {
        if server.holds_on(session, now) {
            let ended = server.end_session(session, now);
            step.changes.extend(ended.changes);
            step.replies.extend(ended.replies);
        }
    }
}
