//! Locks of names: one for each name that is in use. So whoever holds one delays only those who want the same name,
//! whatever names a client chooses. While a thread has one, its work does not pause.

use crate::work::Unpaused;
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

/// The names that are in use.
pub struct Locks<K>(Mutex<HashMap<K, Arc<Lock>>>);

#[derive(Default)]
struct Lock {
    is_held: Mutex<bool>,
    freed: Condvar,
}

/// Holds a name until this is dropped.
pub struct Alone<'a, K: Eq + Hash> {
    locks: &'a Locks<K>,
    name: K,
    lock: Arc<Lock>,
    _unpaused: Unpaused,
}

impl<K> Default for Locks<K> {
    fn default() -> Self {
        Locks(Mutex::default())
    }
}

impl<K: Eq + Hash + Clone> Locks<K> {
    /// Waits until nobody else holds the name.
    pub fn alone(&self, name: K) -> Alone<'_, K> {
        let lock = self.0.lock().entry(name.clone()).or_default().clone();
        {
            let is_held = &mut lock.is_held.lock();
            while **is_held {
                lock.freed.wait(is_held);
            }
            **is_held = true;
        }
        Alone { locks: self, name, lock, _unpaused: Unpaused::begin() }
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
        *self.lock.is_held.lock() = false;
        self.lock.freed.notify_one();
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
