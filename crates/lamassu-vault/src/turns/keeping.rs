//! Names and attributes that the kernel may cache in a turn, and what it must drop before the end.

use super::{KEPT_FOR, Keeping, Kept, Mode, Name, Phase, State, TAKEN_IN, Turns};
use crate::Ino;
use std::ffi::OsStr;
use std::time::Instant;

impl Turns {
    /// Called in a request before the kernel is given attributes to cache. False: it must not cache them.
    pub fn may_keep(&self, ino: Ino) -> bool {
        self.tell(|state, now| state.inodes.add(ino, now))
    }

    /// The same for a name, or for its absence.
    pub fn may_keep_name(&self, dir: Ino, name: &OsStr) -> bool {
        self.tell(|state, now| state.names.add((dir, name.into()), now))
    }

    /// Notes that the kernel moves a cached name to another one, or exchanges two.
    pub fn is_moved(&self, names: [(Ino, &OsStr); 2]) {
        let state = &mut *self.state.lock();
        let names = names.map(|(dir, name)| (dir, Box::from(name)));
        match state.keeping {
            Keeping::No => {}
            Keeping::Yes => names.into_iter().for_each(|name| state.names.note(name, Instant::now())),
            // If the kernel has dropped the old name, it does not have the new one either.
            Keeping::Dropping if names.iter().any(|name| state.expiring.contains_key(name)) => {
                for name in names {
                    state.dropping_names += 1;
                    state.expiring.insert(name, state.dropping_names);
                }
            }
            Keeping::Dropping => {}
        }
    }

    fn tell(&self, add: impl FnOnce(&mut State, Instant) -> bool) -> bool {
        let mut state = self.state.lock();
        if state.keeping != Keeping::Yes {
            return false;
        }
        let now = Instant::now();
        state.last_told = Some(now);
        add(&mut state, now)
    }

    /// Whether the kernel may cache answers now.
    pub fn is_keeping(&self) -> bool {
        self.state.lock().keeping == Keeping::Yes
    }

    /// From now on the kernel may cache answers, if the turn is exclusive. (In a shared one, callers wait for the next
    /// turn while they hold locks that dropping caches would need.) Not in a turn that will end soon.
    pub fn keep(&self) {
        let mut state = self.state.lock();
        let is_free = !state.is_recalled && !state.share.is_sought();
        if matches!(state.phase, Phase::Here(Mode::Change)) && is_free && state.keeping == Keeping::No {
            state.keeping = Keeping::Yes;
        }
    }

    /// From now on the kernel may cache nothing more. Waits until all answers have reached their callers. Returns what
    /// the kernel may have cached, except names; `None`: nothing. Until [`Turns::forgotten`] all requests are carried
    /// out, even in a recalled turn; not if this turn or one that they need too is frozen, so a freeze ends first.
    pub fn stop_keeping(&self) -> Option<Kept> {
        let mut state = self.state.lock();
        if state.keeping == Keeping::No {
            return None;
        }
        state.keeping = Keeping::Dropping;
        state.dropping += 1;
        state.older_users = state.users;
        self.runnable.notify_all();
        self.quiet.wait_while(&mut state, |state| state.older_users > 0);
        let names = state.names.take();
        // A number of its own: a thread that was left behind by an earlier turn still takes away what it has dropped.
        state.dropping_names += 1;
        let number = state.dropping_names;
        state.expiring = names.into_iter().map(|name| (name, number)).collect();
        let (inodes, last_told) = (state.inodes.take(), state.last_told.take());
        drop(state);
        let until = |after| {
            let at = last_told.map(|at| at + after);
            at.map(|at| at.saturating_duration_since(Instant::now())).unwrap_or_default()
        };
        std::thread::sleep(until(TAKEN_IN));
        Some(Kept { inodes, runs_out_in: until(KEPT_FOR + TAKEN_IN) })
    }

    /// Calls `expire` for every name that the kernel has to drop; it may wait for requests. Names that are renamed
    /// meanwhile are included.
    pub fn expire_names(&self, expire: impl Fn(Ino, &OsStr)) {
        loop {
            let all: Vec<(Name, u64)> = self.state.lock().expiring.clone().into_iter().collect();
            if all.is_empty() {
                return;
            }
            for (name, number) in all {
                expire(name.0, &name.1);
                let expiring = &mut self.state.lock().expiring;
                if expiring.get(&name) == Some(&number) {
                    expiring.remove(&name);
                }
            }
        }
    }

    /// The kernel has dropped everything.
    pub fn forgotten(&self) {
        let mut state = self.state.lock();
        state.keeping = Keeping::No;
        state.expiring.clear();
    }
}
