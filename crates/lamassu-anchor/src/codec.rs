//! Encoding of rows: a writer, and a reader that refuses every other encoding.
//!
//! Numbers are LEB128 in the shortest form, so that a row has one encoding.

use crate::Digest;

/// Longest encoding of a number, in bytes.
const VARINT_MAX: usize = 10;

/// Appends a number.
pub(crate) fn put(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Parses bytes from the front. `None` means damage.
pub(crate) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// The next number.
    pub fn number(&mut self) -> Option<u64> {
        let mut number = 0_u64;
        for (at, byte) in self.0.iter().enumerate().take(VARINT_MAX) {
            let bits = u64::from(byte & 0x7f);
            let shift = 7 * at as u32;
            if shift == 63 && bits > 1 {
                return None;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                self.0 = &self.0[at + 1..];
                // The shortest form does not end with a zero byte.
                return (at == 0 || *byte != 0).then_some(number);
            }
        }
        None
    }

    /// The next number, of at most 32 bits.
    pub fn number32(&mut self) -> Option<u32> {
        self.number()?.try_into().ok()
    }

    /// The next bytes.
    pub fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }

    /// The next text: its length, then its bytes.
    pub fn text(&mut self, len_max: usize) -> Option<Box<[u8]>> {
        let len = self.number()?.try_into().ok().filter(|len| *len <= len_max)?;
        let (text, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(text.into())
    }

    /// The next digest.
    pub fn digest(&mut self) -> Option<Digest> {
        self.bytes().map(Digest)
    }

    /// Fails unless all bytes were read.
    pub fn end(self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_come_back(number: u64, rest: Vec<u8>) {
            let mut bytes = Vec::new();
            put(&mut bytes, number);
            prop_assert!(bytes.len() <= VARINT_MAX);
            bytes.extend(&rest);
            let mut reader = Reader(&bytes);
            prop_assert_eq!(reader.number(), Some(number));
            prop_assert_eq!(reader.0, &rest[..]);
        }

        #[test]
        fn what_is_read_is_what_would_be_written(bytes: Vec<u8>) {
            let mut reader = Reader(&bytes);
            if let Some(number) = reader.number() {
                let mut again = Vec::new();
                put(&mut again, number);
                prop_assert_eq!(&bytes[..bytes.len() - reader.0.len()], &again[..]);
            }
        }
    }

    #[test]
    fn longer_forms_are_refused() {
        for bytes in
            [&[0x80, 0][..], &[0xff; 11], &[0x80; 3], &[], &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2]]
        {
            assert_eq!(Reader(bytes).number(), None, "{bytes:?}");
        }
        assert_eq!(Reader(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]).number(), Some(u64::MAX));
    }
}
