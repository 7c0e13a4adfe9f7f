//! Block keys in memory: a list that leaves nothing of them behind.

use crate::{BlockKey, KEY_LEN};
use std::ops::{Deref, DerefMut};
use zeroize::Zeroize;

/// Keys of blocks, wiped when the list is dropped, and where it is moved to grow.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Keys(Vec<BlockKey>);

impl Keys {
    /// As many hole keys.
    pub fn holes(len: usize) -> Keys {
        Keys(vec![[0; KEY_LEN]; len])
    }

    /// Makes it `len` long: hole keys are added at the end, or keys taken away there.
    pub fn resize(&mut self, len: usize) {
        self.truncate(len);
        self.reserve(len);
        self.0.resize(len, [0; KEY_LEN]);
    }

    /// Takes away all but the first `len`.
    pub fn truncate(&mut self, len: usize) {
        if let Some(gone) = self.0.get_mut(len..) {
            gone.as_flattened_mut().zeroize();
            self.0.truncate(len);
        }
    }

    /// Puts a key before the one at `at`.
    ///
    /// # Panics
    /// If the list is shorter than that.
    pub fn insert(&mut self, at: usize, key: BlockKey) {
        self.reserve(self.0.len() + 1);
        self.0.insert(at, key);
    }

    /// Puts a key at the end.
    pub fn push(&mut self, key: BlockKey) {
        self.insert(self.0.len(), key);
    }

    /// Room for `len` keys. A list that has to move is wiped where it was: the allocator would leave the keys there.
    fn reserve(&mut self, len: usize) {
        if len > self.0.capacity() {
            let mut moved = Vec::with_capacity(len.next_power_of_two());
            moved.extend_from_slice(&self.0);
            self.0.zeroize();
            self.0 = moved;
        }
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl From<&[BlockKey]> for Keys {
    fn from(keys: &[BlockKey]) -> Keys {
        Keys(keys.to_vec())
    }
}

impl Deref for Keys {
    type Target = [BlockKey];

    fn deref(&self) -> &[BlockKey] {
        &self.0
    }
}

impl DerefMut for Keys {
    fn deref_mut(&mut self) -> &mut [BlockKey] {
        &mut self.0
    }
}

/// Never shows a key.
impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[{} keys]", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_what_a_vector_would_be() {
        let mut keys = Keys::default();
        let mut vec: Vec<BlockKey> = Vec::new();
        for n in 0..40u8 {
            let at = usize::from(n) / 2;
            keys.insert(at, [n; KEY_LEN]);
            vec.insert(at, [n; KEY_LEN]);
        }
        for len in [50, 20, 20, 3, 0, 7] {
            keys.resize(len);
            vec.resize(len, [0; KEY_LEN]);
            assert_eq!(*keys, vec[..]);
        }
        assert_eq!(*Keys::from(&vec[..]), vec[..]);
        keys.push([9; KEY_LEN]);
        assert_eq!(keys.last(), Some(&[9; KEY_LEN]));
    }
}
