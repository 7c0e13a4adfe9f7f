//! Block keys in memory. They are wiped when dropped, and never shown.

use crate::{BlockKey, KEY_LEN, Suite};
use zeroize::Zeroize;

/// The bytes of a hole's slot.
const HOLE: BlockKey = [0; KEY_LEN];

/// A key slot of a page: the key of a block, or the zeros that mean a hole. Wiped when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct SlotKey(BlockKey);

impl SlotKey {
    /// The slot of a hole.
    pub const HOLE: SlotKey = SlotKey(HOLE);

    /// A slot with this key.
    pub const fn new(key: BlockKey) -> SlotKey {
        SlotKey(key)
    }

    /// Whether the block is a hole.
    pub fn is_hole(&self) -> bool {
        is_hole(&self.0)
    }

    /// Whether the block is compressed, in a vault of this suite.
    pub fn is_compressed(&self, suite: Suite) -> bool {
        is_compressed(suite, &self.0)
    }

    /// The key, as a batch of one.
    pub fn as_batch(&self) -> &[BlockKey] {
        std::slice::from_ref(&self.0)
    }
}

impl Drop for SlotKey {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

/// Never shows the key.
impl std::fmt::Debug for SlotKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.is_hole() { "hole" } else { "key" })
    }
}

/// Whether these bytes are the slot of a hole. For ciphers, which take raw keys; see [`SlotKey::is_hole`].
pub fn is_hole(key: &BlockKey) -> bool {
    *key == HOLE
}

/// Whether a key of a suite marks its block as compressed: by its last bit. For ciphers, which take raw keys; see
/// [`SlotKey::is_compressed`].
pub fn is_compressed(suite: Suite, key: &BlockKey) -> bool {
    suite.marks_compressed() && key[31] & 1 == 1
}

/// Consecutive slots. The list is wiped when it is dropped, and its old memory when it grows. Ciphers take it as
/// [`Keys::raw`].
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Keys(Vec<BlockKey>);

impl Keys {
    /// A list of holes.
    pub fn holes(len: usize) -> Keys {
        Keys(vec![HOLE; len])
    }

    /// The number of slots.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no slots.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The keys as ciphers take them.
    pub fn raw(&self) -> &[BlockKey] {
        &self.0
    }

    /// The keys as ciphers fill them.
    pub fn raw_mut(&mut self) -> &mut [BlockKey] {
        &mut self.0
    }

    /// Slot `i`; `None` past the end.
    pub fn get(&self, i: usize) -> Option<SlotKey> {
        self.0.get(i).copied().map(SlotKey)
    }

    /// Sets slot `i`.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn set(&mut self, i: usize, key: &SlotKey) {
        self.0[i] = key.0;
    }

    /// Sets slot `at` to slot `n` of another list.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn copy_from(&mut self, at: usize, other: &Keys, n: usize) {
        self.0[at] = other.0[n];
    }

    /// Whether slot `i` is equal to slot `n` of another list.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn is_same(&self, i: usize, other: &Keys, n: usize) -> bool {
        self.0[i] == other.0[n]
    }

    /// Whether slot `i` is a hole.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn is_hole(&self, i: usize) -> bool {
        is_hole(&self.0[i])
    }

    /// Whether the block of slot `i` is compressed, in a vault of this suite.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn is_compressed(&self, i: usize, suite: Suite) -> bool {
        is_compressed(suite, &self.0[i])
    }

    /// Whether slot `i` exists and holds a key.
    pub fn is_keyed(&self, i: usize) -> bool {
        self.0.get(i).is_some_and(|key| !is_hole(key))
    }

    /// Whether any slot from `from` on holds a key.
    pub fn any_keyed_from(&self, from: usize) -> bool {
        self.0.iter().skip(from).any(|key| !is_hole(key))
    }

    /// Sets the length: adds holes at the end, or removes slots there.
    pub fn resize(&mut self, len: usize) {
        self.truncate(len);
        self.reserve(len);
        self.0.resize(len, HOLE);
    }

    /// Removes all but the first `len` slots.
    pub fn truncate(&mut self, len: usize) {
        if let Some(gone) = self.0.get_mut(len..) {
            gone.as_flattened_mut().zeroize();
            self.0.truncate(len);
        }
    }

    /// Inserts a slot before the one at `at`.
    ///
    /// # Panics
    /// If the list is shorter than that.
    pub fn insert(&mut self, at: usize, key: &SlotKey) {
        self.reserve(self.0.len() + 1);
        self.0.insert(at, key.0);
    }

    /// Inserts slot `n` of another list before the slot at `at`.
    ///
    /// # Panics
    /// If a list is shorter than that.
    pub fn insert_from(&mut self, at: usize, other: &Keys, n: usize) {
        self.reserve(self.0.len() + 1);
        self.0.insert(at, other.0[n]);
    }

    /// Appends a slot.
    pub fn push(&mut self, key: &SlotKey) {
        self.insert(self.0.len(), key);
    }

    /// Makes room for `len` slots. If the list has to move, its old memory is wiped, since the allocator would leave
    /// the keys there.
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
            keys.insert(at, &SlotKey::new([n; KEY_LEN]));
            vec.insert(at, [n; KEY_LEN]);
        }
        for len in [50, 20, 20, 3, 0, 7] {
            keys.resize(len);
            vec.resize(len, [0; KEY_LEN]);
            assert_eq!(keys.raw(), &vec[..]);
        }
        assert_eq!(Keys::from(&vec[..]).raw(), &vec[..]);
        assert!(keys.is_hole(6) && !keys.is_keyed(6) && !keys.any_keyed_from(0));
        keys.push(&SlotKey::new([9; KEY_LEN]));
        assert!(keys.get(7) == Some(SlotKey::new([9; KEY_LEN])) && keys.get(8).is_none());
        assert!(keys.is_keyed(7) && !keys.is_keyed(8) && keys.any_keyed_from(7));
        let mut other = Keys::holes(1);
        other.insert_from(0, &keys, 7);
        assert!(other.len() == 2 && other.is_same(0, &keys, 7) && !other.is_same(1, &keys, 7));
        other.copy_from(1, &keys, 7);
        assert!(other.is_same(1, &keys, 7) && !other.any_keyed_from(2));
    }

    #[test]
    fn nothing_shows_a_key() {
        let key = SlotKey::new([0xab; KEY_LEN]);
        assert_eq!(format!("{key:?} {:?} {:?}", SlotKey::HOLE, Keys::from(key.as_batch())), "key hole [1 keys]");
    }
}
