//! The parts of the pool in its model: shuttle's threads, mutex and condition variable, with the interface of
//! parking_lot's. Shuttle runs every step of every thread in an order of its choice, and detects a deadlock.

pub(super) use shuttle::thread;

use shuttle::sync;
use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;

/// Waiting changes nothing that is modelled.
pub(super) fn linger(_: std::time::Duration, _: impl Fn() -> bool) {}

pub struct Mutex<T>(sync::Mutex<T>);

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Mutex(sync::Mutex::new(value))
    }

    pub fn lock(&self) -> Guard<'_, T> {
        Guard(Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }
}

/// Empty only while its thread waits.
pub struct Guard<'a, T>(Option<sync::MutexGuard<'a, T>>);

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.0.as_ref().expect("not within `wait`")
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("not within `wait`")
    }
}

pub struct Condvar(sync::Condvar);

impl Condvar {
    pub fn new() -> Self {
        Condvar(sync::Condvar::new())
    }

    pub fn wait<T>(&self, guard: &mut Guard<'_, T>) {
        let held = guard.0.take().expect("a guard is not waited with twice");
        guard.0 = Some(self.0.wait(held).unwrap_or_else(PoisonError::into_inner));
    }

    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}
