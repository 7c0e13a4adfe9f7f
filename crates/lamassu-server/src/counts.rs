//! Counts what is in use at once, by host or by address.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

/// Counts by key.
#[derive(Clone, Debug)]
pub struct Counts<K>(Arc<Mutex<HashMap<K, usize>>>);

/// One that is counted until this is dropped.
#[derive(Debug)]
pub struct Counted<K: Hash + Eq> {
    counts: Counts<K>,
    key: K,
}

impl<K> Default for Counts<K> {
    fn default() -> Counts<K> {
        Counts(Arc::default())
    }
}

impl<K: Hash + Eq + Clone> Counts<K> {
    /// Counts one more, unless there are `most` already.
    pub fn one_more(&self, key: &K, most: usize) -> Option<Counted<K>> {
        let mut counts = self.0.lock();
        let count = counts.get(key).copied().unwrap_or_default();
        (count < most).then(|| {
            counts.insert(key.clone(), count + 1);
            Counted { counts: self.clone(), key: key.clone() }
        })
    }
}

impl<K: Hash + Eq> Drop for Counted<K> {
    fn drop(&mut self) {
        let mut counts = self.counts.0.lock();
        if let Some(count) = counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_has_its_own_limit_and_gets_back_what_is_dropped() {
        let counts = Counts::default();
        let (one, two) = (counts.one_more(&"a", 2), counts.one_more(&"a", 2));
        assert!(one.is_some() && two.is_some() && counts.one_more(&"a", 2).is_none());
        assert!(counts.one_more(&"b", 2).is_some());
        drop(one);
        assert!(counts.one_more(&"a", 2).is_some());
        drop(two);
        assert!(counts.0.lock().is_empty());
    }
}
