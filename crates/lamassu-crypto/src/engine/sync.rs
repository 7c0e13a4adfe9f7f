//! What the pool is made of: threads, a mutex, a condition variable. Its model (`model.rs`) takes other ones.

pub(super) use parking_lot::{Condvar, Mutex};
pub(super) use std::thread;
