//! TTLV, the encoding of KMIP (KMIP 1.2 §9.1): tag, type, length, value, each item padded to a multiple of eight bytes.
//!
//! Only what this client sends and reads. Guarantees: parsing borrows from the answer and makes no copy, so a key in it
//! is wiped with it; every length is checked before it is used; there is no recursion; unknown items are skipped.

/// Tags of §9.1.3.1 that are used here.
pub(super) mod tag {
    pub const APPLICATION_DATA: u32 = 0x42_0002;
    pub const APPLICATION_NAMESPACE: u32 = 0x42_0003;
    pub const ATTRIBUTE: u32 = 0x42_0008;
    pub const ATTRIBUTE_NAME: u32 = 0x42_000a;
    pub const ATTRIBUTE_VALUE: u32 = 0x42_000b;
    pub const BATCH_COUNT: u32 = 0x42_000d;
    pub const BATCH_ITEM: u32 = 0x42_000f;
    pub const KEY: u32 = 0x42_003f;
    pub const KEY_BLOCK: u32 = 0x42_0040;
    pub const KEY_FORMAT_TYPE: u32 = 0x42_0042;
    pub const KEY_MATERIAL: u32 = 0x42_0043;
    pub const KEY_VALUE: u32 = 0x42_0045;
    pub const KEY_WRAPPING_DATA: u32 = 0x42_0046;
    pub const MAXIMUM_ITEMS: u32 = 0x42_004f;
    pub const MAXIMUM_RESPONSE_SIZE: u32 = 0x42_0050;
    pub const NAME_TYPE: u32 = 0x42_0054;
    pub const NAME_VALUE: u32 = 0x42_0055;
    pub const OBJECT_TYPE: u32 = 0x42_0057;
    pub const OPERATION: u32 = 0x42_005c;
    pub const PROTOCOL_VERSION: u32 = 0x42_0069;
    pub const PROTOCOL_VERSION_MAJOR: u32 = 0x42_006a;
    pub const PROTOCOL_VERSION_MINOR: u32 = 0x42_006b;
    pub const REQUEST_HEADER: u32 = 0x42_0077;
    pub const REQUEST_MESSAGE: u32 = 0x42_0078;
    pub const REQUEST_PAYLOAD: u32 = 0x42_0079;
    pub const RESPONSE_MESSAGE: u32 = 0x42_007b;
    pub const RESPONSE_PAYLOAD: u32 = 0x42_007c;
    pub const RESULT_MESSAGE: u32 = 0x42_007d;
    pub const RESULT_REASON: u32 = 0x42_007e;
    pub const RESULT_STATUS: u32 = 0x42_007f;
    pub const REVOCATION_REASON: u32 = 0x42_0081;
    pub const REVOCATION_REASON_CODE: u32 = 0x42_0082;
    pub const SYMMETRIC_KEY: u32 = 0x42_008f;
    pub const TEMPLATE_ATTRIBUTE: u32 = 0x42_0091;
    pub const UNIQUE_IDENTIFIER: u32 = 0x42_0094;
}

/// Bytes before a value.
pub(super) const HEAD_LEN: usize = 8;
const ALIGN: usize = 8;

const STRUCTURE: u8 = 1;
const INTEGER: u8 = 2;
const ENUMERATION: u8 = 5;
const TEXT: u8 = 7;
const BYTES: u8 = 8;

/// Why an answer is invalid. The server's fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Malformed {
    /// An item extends past the end of its container.
    #[error("item {tag:06x} of its answer is cut short")]
    Cut {
        /// its tag, zero if that is cut off too
        tag: u32,
    },
    /// An item's type or length does not fit its tag.
    #[error("item {tag:06x} of its answer has type {found}, or a length that this type does not have")]
    Type {
        /// its tag
        tag: u32,
        /// its type
        found: u8,
    },
    /// A required item is missing.
    #[error("its answer lacks item {tag:06x}")]
    Lacks {
        /// the tag looked for
        tag: u32,
    },
}

/// Builds a request.
#[derive(Default)]
pub(super) struct Writer(Vec<u8>);

impl Writer {
    /// The bytes.
    pub(super) fn finish(self) -> Vec<u8> {
        self.0
    }

    fn head(&mut self, tag: u32, kind: u8, len: usize) {
        self.0.extend_from_slice(&tag.to_be_bytes()[1..]);
        self.0.push(kind);
        // Messages of this program are short: the address's parser limits names.
        self.0.extend_from_slice(&u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes());
    }

    fn pad(&mut self) {
        self.0.resize(self.0.len().next_multiple_of(ALIGN), 0);
    }

    /// A structure with what `fill` puts into it.
    pub(super) fn structure(&mut self, tag: u32, fill: impl FnOnce(&mut Writer)) {
        self.head(tag, STRUCTURE, 0);
        let start = self.0.len();
        fill(self);
        let len = u32::try_from(self.0.len() - start).unwrap_or(u32::MAX);
        self.0[start - 4..start].copy_from_slice(&len.to_be_bytes());
    }

    /// An Integer.
    pub(super) fn integer(&mut self, tag: u32, value: i32) {
        self.head(tag, INTEGER, 4);
        self.0.extend_from_slice(&value.to_be_bytes());
        self.pad();
    }

    /// An Enumeration.
    pub(super) fn enumeration(&mut self, tag: u32, value: u32) {
        self.head(tag, ENUMERATION, 4);
        self.0.extend_from_slice(&value.to_be_bytes());
        self.pad();
    }

    /// A Text String.
    pub(super) fn text(&mut self, tag: u32, value: &str) {
        self.head(tag, TEXT, value.len());
        self.0.extend_from_slice(value.as_bytes());
        self.pad();
    }
}

#[cfg(test)]
impl Writer {
    /// A Byte String: only servers send them.
    pub(super) fn bytes(&mut self, tag: u32, value: &[u8]) {
        self.head(tag, BYTES, value.len());
        self.0.extend_from_slice(value);
        self.pad();
    }
}

/// One item of an answer.
#[derive(Clone, Copy)]
pub(super) struct Item<'a> {
    tag: u32,
    kind: u8,
    value: &'a [u8],
}

impl<'a> Item<'a> {
    /// The item at the start of `bytes`, and the rest.
    pub(super) fn split(bytes: &'a [u8]) -> Result<(Item<'a>, &'a [u8]), Malformed> {
        let Some(([t0, t1, t2, kind, l0, l1, l2, l3], rest)) = bytes.split_first_chunk::<HEAD_LEN>() else {
            return Err(Malformed::Cut { tag: 0 });
        };
        let tag = u32::from_be_bytes([0, *t0, *t1, *t2]);
        let cut = Malformed::Cut { tag };
        let len = usize::try_from(u32::from_be_bytes([*l0, *l1, *l2, *l3])).map_err(|_| cut)?;
        let value = rest.get(..len).ok_or(cut)?;
        // Padding that is cut off at the end of the answer is not needed.
        let padded = len.checked_next_multiple_of(ALIGN).ok_or(cut)?;
        let rest = rest.get(padded..).unwrap_or_default();
        Ok((Item { tag, kind: *kind, value }, rest))
    }

    /// The items of a structure, in order.
    pub(super) fn children(&self) -> Result<Children<'a>, Malformed> {
        Ok(Children(self.value_of(STRUCTURE)?))
    }

    /// The first item of a tag in a structure.
    pub(super) fn child(&self, tag: u32) -> Result<Item<'a>, Malformed> {
        self.find(tag)?.ok_or(Malformed::Lacks { tag })
    }

    /// The first item of a tag in a structure, if there is one.
    pub(super) fn find(&self, tag: u32) -> Result<Option<Item<'a>>, Malformed> {
        for item in self.children()? {
            let item = item?;
            if item.tag == tag {
                return Ok(Some(item));
            }
        }
        Ok(None)
    }

    /// Whether this is an item of `tag`.
    pub(super) fn is(&self, tag: u32) -> bool {
        self.tag == tag
    }

    /// An Integer's value.
    #[cfg(test)]
    pub(super) fn integer(&self) -> Result<i32, Malformed> {
        Ok(i32::from_be_bytes(self.four(INTEGER)?))
    }

    /// An Enumeration's value.
    pub(super) fn enumeration(&self) -> Result<u32, Malformed> {
        Ok(u32::from_be_bytes(self.four(ENUMERATION)?))
    }

    /// A Text String's value.
    pub(super) fn text(&self) -> Result<&'a str, Malformed> {
        std::str::from_utf8(self.value_of(TEXT)?).map_err(|_| self.mistyped())
    }

    /// A Byte String's value.
    pub(super) fn bytes(&self) -> Result<&'a [u8], Malformed> {
        self.value_of(BYTES)
    }

    fn four(&self, kind: u8) -> Result<[u8; 4], Malformed> {
        self.value_of(kind)?.try_into().map_err(|_| self.mistyped())
    }

    fn value_of(&self, kind: u8) -> Result<&'a [u8], Malformed> {
        if self.kind == kind { Ok(self.value) } else { Err(self.mistyped()) }
    }

    fn mistyped(&self) -> Malformed {
        Malformed::Type { tag: self.tag, found: self.kind }
    }
}

/// Consecutive items, up to the first invalid one.
pub(super) struct Children<'a>(&'a [u8]);

impl<'a> Iterator for Children<'a> {
    type Item = Result<Item<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let split = Item::split(self.0);
        self.0 = split.map_or(&[], |(_, rest)| rest);
        Some(split.map(|(item, _)| item))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The examples of §9.1.2, as the standard prints them.
    #[test]
    fn examples_of_the_standard() {
        let hex = |text: &str| data_encoding::HEXUPPER.decode(text.replace([' ', '|'], "").as_bytes()).unwrap();
        let written = |fill: &dyn Fn(&mut Writer)| {
            let mut w = Writer::default();
            fill(&mut w);
            w.finish()
        };
        let integer = hex("42 00 20 | 02 | 00 00 00 04 | 00 00 00 08 00 00 00 00");
        assert_eq!(written(&|w| w.integer(0x42_0020, 8)), integer);
        assert_eq!(Item::split(&integer).unwrap().0.integer(), Ok(8));
        let enumeration = hex("42 00 20 | 05 | 00 00 00 04 | 00 00 00 FF 00 00 00 00");
        assert_eq!(written(&|w| w.enumeration(0x42_0020, 255)), enumeration);
        assert_eq!(Item::split(&enumeration).unwrap().0.enumeration(), Ok(255));
        let text = hex("42 00 20 | 07 | 00 00 00 0B | 48 65 6C 6C 6F 20 57 6F 72 6C 64 00 00 00 00 00");
        assert_eq!(written(&|w| w.text(0x42_0020, "Hello World")), text);
        assert_eq!(Item::split(&text).unwrap().0.text(), Ok("Hello World"));
        let bytes = hex("42 00 20 | 08 | 00 00 00 03 | 01 02 03 00 00 00 00 00");
        assert_eq!(Item::split(&bytes).unwrap().0.bytes(), Ok(&[1, 2, 3][..]));
        let structure = hex(
            "42 00 20 | 01 | 00 00 00 20 | 42 00 04 | 05 | 00 00 00 04 | 00 00 00 FE 00 00 00 00 | 42 00 05 | 02 | 00 00 00 04 | 00 00 00 FF 00 00 00 00",
        );
        let made = written(&|w| {
            w.structure(0x42_0020, |w| {
                w.enumeration(0x42_0004, 254);
                w.integer(0x42_0005, 255);
            });
        });
        assert_eq!(made, structure);
        let read = Item::split(&structure).unwrap().0;
        assert_eq!(read.child(0x42_0004).unwrap().enumeration(), Ok(254));
        assert_eq!(read.child(0x42_0005).unwrap().integer(), Ok(255));
        assert_eq!(read.child(0x42_0006).err(), Some(Malformed::Lacks { tag: 0x42_0006 }));
    }

    #[test]
    fn what_is_cut_or_of_another_type_is_told() {
        let mut w = Writer::default();
        w.structure(1, |w| w.text(2, "twelve bytes"));
        let whole = w.finish();
        for len in 0..whole.len() {
            let item = Item::split(&whole[..len]);
            assert!(item.is_err_and(|e| matches!(e, Malformed::Cut { .. })), "{len}");
        }
        let item = Item::split(&whole).unwrap().0;
        assert_eq!(item.integer(), Err(Malformed::Type { tag: 1, found: STRUCTURE }));
        assert_eq!(item.child(2).unwrap().bytes(), Err(Malformed::Type { tag: 2, found: TEXT }));
        // An inner item longer than the outer one.
        let mut longer = whole.clone();
        longer[15] = 200;
        assert_eq!(Item::split(&longer).unwrap().0.child(2).err(), Some(Malformed::Cut { tag: 2 }));
        // An Enumeration of five bytes, a length of four thousand million, a text that is none.
        assert!(
            Item::split(&[0, 0, 1, ENUMERATION, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap().0.enumeration().is_err()
        );
        assert!(Item::split(&[0, 0, 1, BYTES, 255, 255, 255, 255, 0]).is_err());
        assert!(Item::split(&[0, 0, 1, TEXT, 0, 0, 0, 1, 255]).unwrap().0.text().is_err());
    }

    /// Reads everything that can be read.
    fn walk(bytes: &[u8], depth: usize) -> usize {
        let mut seen = 0;
        for item in Children(bytes) {
            let Ok(item) = item else { break };
            let _ = (item.integer(), item.enumeration(), item.text(), item.bytes(), item.find(7).map(|i| i.is_some()));
            seen += 1;
            if depth > 0 && item.kind == STRUCTURE {
                seen += walk(item.value, depth - 1);
            }
        }
        seen
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic_and_end(bytes in prop::collection::vec(prop_oneof![3 => 0u8..9, 1 => any::<u8>()], 0..300)) {
            prop_assert!(walk(&bytes, 4) <= bytes.len());
        }

        #[test]
        fn what_is_written_is_read(fields in prop::collection::vec((0u32..1 << 24, any::<i32>(), "\\PC{0,20}"), 0..9)) {
            let mut w = Writer::default();
            w.structure(9, |w| for (tag, number, text) in &fields {
                w.integer(*tag, *number);
                w.text(*tag, text);
            });
            let bytes = w.finish();
            prop_assert_eq!(bytes.len() % ALIGN, 0);
            let (item, rest) = Item::split(&bytes).unwrap();
            prop_assert!(rest.is_empty());
            let mut children = item.children().unwrap();
            for (tag, number, text) in &fields {
                let (n, t) = (children.next().unwrap().unwrap(), children.next().unwrap().unwrap());
                prop_assert!(n.is(*tag) && t.is(*tag));
                prop_assert_eq!(n.integer(), Ok(*number));
                prop_assert_eq!(t.text(), Ok(text.as_str()));
            }
            prop_assert!(children.next().is_none());
        }
    }
}
