//! Locks of this host's programs (rule R14 of `docs/sharing.md`). They belong to the session of the moment; when it
//! ends, they are lost.
//!
//! Locks: that of the session's state, then that of the [`Holder`]. Nobody is told of an answer while one is held.

use lamassu_lease::locks::{Answered, Asked, Holder, Lock, LockAnswer, Outcome};
use lamassu_lease::{Call, RequestNo};
use parking_lot::Mutex;
use std::collections::HashMap;

/// Is told how a request has ended.
pub type Done = Box<dyn FnOnce(Outcome) + Send>;

/// The locks of a mount, for all its sessions.
#[derive(Default)]
pub(super) struct HeldLocks(Mutex<State>);

#[derive(Default)]
struct State {
    holder: Holder,
    waiting: HashMap<RequestNo, Done>,
}

/// Answers whose callers are to be told, once no lock is held.
#[derive(Default)]
#[must_use = "the callers wait"]
pub(super) struct Tell(Vec<(Done, Outcome)>);

impl Tell {
    pub fn add(&mut self, more: Tell) {
        self.0.extend(more.0);
    }

    pub fn all(self) {
        self.0.into_iter().for_each(|(done, outcome)| done(outcome));
    }
}

impl HeldLocks {
    /// Notes a request. Returns its number and the call to send, or what the caller is to be told at once.
    pub fn ask(&self, asked: Asked, done: Done) -> Result<(RequestNo, Call), Tell> {
        let state = &mut *self.0.lock();
        match state.holder.ask(asked) {
            Ok((request, call)) => {
                state.waiting.insert(request, done);
                Ok((request, call))
            }
            Err(outcome) => Err(Tell(vec![(done, outcome)])),
        }
    }

    /// Gives a request up. `None`: it was answered.
    pub fn abandon(&self, request: RequestNo, outcome: Outcome) -> Option<Tell> {
        let state = &mut *self.0.lock();
        state.holder.abandon(request).then(|| state.tell([Answered { request, outcome }]))
    }

    pub fn cancel(&self, request: RequestNo) -> Option<Call> {
        self.0.lock().holder.cancel(request)
    }

    pub fn answer(&self, request: RequestNo, answer: LockAnswer) -> Tell {
        let state = &mut *self.0.lock();
        let answered = state.holder.answer(request, answer);
        state.tell(answered)
    }

    /// What a new connection reports, and the calls that follow.
    pub fn resumed(&self) -> (Vec<Lock>, Vec<Call>) {
        self.0.lock().holder.resumed()
    }

    /// The session has ended.
    pub fn session_ended(&self) -> Tell {
        let state = &mut *self.0.lock();
        let ended = state.holder.session_ended();
        state.tell(ended)
    }

    /// Looks at, or changes, what is known without asking the server.
    pub fn look<T>(&self, look: impl FnOnce(&mut Holder) -> T) -> T {
        look(&mut self.0.lock().holder)
    }
}

impl State {
    fn tell(&mut self, answered: impl IntoIterator<Item = Answered>) -> Tell {
        let done = answered
            .into_iter()
            .filter_map(|Answered { request, outcome }| Some((self.waiting.remove(&request)?, outcome)));
        Tell(done.collect())
    }
}
