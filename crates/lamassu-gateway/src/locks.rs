//! Locks of names: one for each name that is in use. So whoever holds one delays only those who want the same name,
//! whatever names a client chooses. One holds a name alone, or several share it: while someone waits to have it alone,
//! nobody else begins to share it. While a thread has one, its work does not pause.

use crate::work::Unpaused;
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

/// The names that are in use.
pub struct Locks<K>(Mutex<HashMap<K, Arc<Lock>>>);

#[derive(Default)]
struct Lock {
    state: Mutex<State>,
    /// for those who want it alone, and for those who share it
    alone: Condvar,
    shared: Condvar,
}

#[derive(Default)]
struct State {
    is_alone: bool,
    sharing: usize,
    /// how many wait to have it alone
    waiting: usize,
}

struct Holding<'a, K: Eq + Hash> {
    locks: &'a Locks<K>,
    name: K,
    lock: Arc<Lock>,
    _unpaused: Unpaused,
}

/// Holds a name alone until this is dropped.
pub struct Alone<'a, K: Eq + Hash>(Holding<'a, K>);

/// Holds a name, which others may share, until this is dropped.
pub struct Shared<'a, K: Eq + Hash>(Holding<'a, K>);

impl<K> Default for Locks<K> {
    fn default() -> Self {
        Locks(Mutex::default())
    }
}

impl<K: Eq + Hash + Clone> Locks<K> {
    /// Waits until nobody else holds the name.
    pub fn alone(&self, name: K) -> Alone<'_, K> {
        let lock = self.lock_of(&name);
        {
            let state = &mut lock.state.lock();
            state.waiting += 1;
            while state.is_alone || state.sharing > 0 {
                lock.alone.wait(state);
            }
            state.waiting -= 1;
            state.is_alone = true;
        }
        Alone(self.holding(name, lock))
    }

    /// Waits until nobody has the name alone, or waits for that.
    pub fn shared(&self, name: K) -> Shared<'_, K> {
        let lock = self.lock_of(&name);
        {
            let state = &mut lock.state.lock();
            while state.is_alone || state.waiting > 0 {
                lock.shared.wait(state);
            }
            state.sharing += 1;
        }
        Shared(self.holding(name, lock))
    }

    fn lock_of(&self, name: &K) -> Arc<Lock> {
        self.0.lock().entry(name.clone()).or_default().clone()
    }

    fn holding(&self, name: K, lock: Arc<Lock>) -> Holding<'_, K> {
        Holding { locks: self, name, lock, _unpaused: Unpaused::begin() }
    }
}

#[cfg(test)]
impl<K: Eq + Hash> Locks<K> {
    /// How many hold a name or wait for it.
    pub fn users_of(&self, name: &K) -> usize {
        self.0.lock().get(name).map_or(0, |lock| Arc::strong_count(lock) - 1)
    }
}

impl<K: Eq + Hash> Drop for Alone<'_, K> {
    fn drop(&mut self) {
        self.0.lock.state.lock().is_alone = false;
    }
}

impl<K: Eq + Hash> Drop for Shared<'_, K> {
    fn drop(&mut self) {
        self.0.lock.state.lock().sharing -= 1;
    }
}

impl<K: Eq + Hash> Drop for Holding<'_, K> {
    fn drop(&mut self) {
        {
            let state = self.lock.state.lock();
            match state.waiting {
                0 => _ = self.lock.shared.notify_all(),
                _ if state.sharing == 0 => _ = self.lock.alone.notify_one(),
                _ => {}
            }
        }
        let names = &mut *self.locks.0.lock();
        // This one and the map's: nobody waits for it, and only here could someone begin to.
        if Arc::strong_count(&self.lock) == 2 {
            names.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn a_name_has_one_holder_and_others_do_not_wait_for_it() {
        let locks = Locks::default();
        let _held = locks.alone(0_u32);
        // Far more names than there ever were locks.
        for name in 1..10_000 {
            drop(locks.alone(name));
        }
        assert_eq!(locks.0.lock().len(), 1, "a name that nobody holds takes no memory");
    }

    #[test]
    fn those_who_share_a_name_keep_it_from_who_wants_it_alone() {
        let (locks, count) = (Locks::default(), AtomicU64::new(0));
        let first = locks.shared(0_u32);
        std::thread::scope(|threads| {
            let (count, locks) = (&count, &locks);
            let second = locks.shared(0);
            threads.spawn(move || {
                let _alone = locks.alone(0);
                count.fetch_add(1, Ordering::SeqCst);
            });
            while locks.users_of(&0) < 3 || locks.0.lock()[&0].state.lock().waiting == 0 {
                std::thread::yield_now();
            }
            // It comes after who waits to have it alone.
            threads.spawn(move || {
                let _shared = locks.shared(0);
                assert_eq!(count.load(Ordering::SeqCst), 1);
            });
            drop(second);
            assert_eq!(count.load(Ordering::SeqCst), 0);
            drop(first);
        });
        assert!(locks.0.lock().is_empty());
        // Many of both, one after the other.
        std::thread::scope(|threads| {
            for thread in 0..8 {
                let (count, locks) = (&count, &locks);
                threads.spawn(move || {
                    for _ in 0..200 {
                        if thread % 2 == 0 {
                            let _alone = locks.alone(1);
                            let before = count.load(Ordering::Relaxed);
                            std::thread::yield_now();
                            count.store(before + 1, Ordering::Relaxed);
                        } else {
                            drop(locks.shared(1));
                        }
                    }
                });
            }
        });
        assert_eq!(count.into_inner(), 801);
    }

    #[test]
    fn holders_of_a_name_come_one_after_the_other() {
        let (locks, count) = (Locks::default(), AtomicU64::new(0));
        std::thread::scope(|threads| {
            for _ in 0..8 {
                threads.spawn(|| {
                    for at in 0..200 {
                        let _alone = locks.alone(at % 2);
                        if at % 2 == 0 {
                            let before = count.load(Ordering::Relaxed);
                            std::thread::yield_now();
                            count.store(before + 1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!(count.into_inner(), 800);
        assert!(locks.0.lock().is_empty());
    }
}
