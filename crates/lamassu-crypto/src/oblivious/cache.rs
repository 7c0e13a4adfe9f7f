//! A cache of tokens, in secret memory of a fixed size.
//!
//! A table of sets of a few entries, the newest first in each; the oldest is dropped. Inputs are pseudorandom, so their
//! first bytes choose the set.

use super::{Input, Token};
use crate::SecretBytes;

/// Entries of a set.
const WAYS: usize = 4;
/// Sets. With [`WAYS`] and [`ENTRY_LEN`] the table takes 3 MiB, and has the tokens of 256 MiB of blocks of 4 KiB.
const SETS: usize = 1 << 14;
/// An input and its token.
const ENTRY_LEN: usize = size_of::<Input>() + size_of::<Token>();
const SET_LEN: usize = WAYS * ENTRY_LEN;

pub(super) struct Cache {
    table: SecretBytes,
}

impl Cache {
    pub fn new() -> Cache {
        Cache { table: SecretBytes::filled_by(SETS * SET_LEN, |_| ()) }
    }

    fn set_of(&mut self, input: &Input) -> &mut [u8] {
        let at = usize::from(u16::from_le_bytes([input[0], input[1]])) % SETS;
        &mut self.table.expose_mut()[at * SET_LEN..][..SET_LEN]
    }

    /// Fills in the token of an input. Returns whether it is known.
    pub fn get(&mut self, input: &Input, token: &mut Token) -> bool {
        let set = self.set_of(input);
        let Some(at) = set.chunks_exact(ENTRY_LEN).position(|entry| entry[..32] == *input) else { return false };
        set[..(at + 1) * ENTRY_LEN].rotate_right(ENTRY_LEN);
        token.copy_from_slice(&set[32..ENTRY_LEN]);
        true
    }

    /// Keeps a token.
    pub fn put(&mut self, input: &Input, token: &Token) {
        let set = self.set_of(input);
        set.rotate_right(ENTRY_LEN);
        set[..32].copy_from_slice(input);
        set[32..ENTRY_LEN].copy_from_slice(token);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Inputs of one set.
    fn input(n: u8) -> Input {
        let mut input = [7; 32];
        input[31] = n;
        input
    }

    #[test]
    fn what_was_used_last_stays() {
        let mut cache = Cache::new();
        let mut token = [0; 16];
        assert!(!cache.get(&input(0), &mut token));
        (0..4).for_each(|n| cache.put(&input(n), &[n; 16]));
        assert!(cache.get(&input(0), &mut token) && token == [0; 16]);
        cache.put(&input(4), &[4; 16]);
        // The oldest that was not used since.
        assert!(!cache.get(&input(1), &mut token));
        for n in [0, 2, 3, 4] {
            assert!(cache.get(&input(n), &mut token) && token == [n; 16], "{n}");
        }
        let mut elsewhere = input(0);
        elsewhere[0] ^= 1;
        assert!(!cache.get(&elsewhere, &mut token));
    }
}
