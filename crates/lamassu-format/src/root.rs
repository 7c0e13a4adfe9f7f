//! The content of the record of the root's permissions (§6b): mode, owner and group that the root of the tree shows.
//!
//! Only its owner may enter the vault directory, so its own mode cannot be the mode that users of a mount see.

/// Bytes of a version 1 record.
pub const ROOT_RECORD_LEN: usize = 16;
/// Version of the record's own layout.
pub const ROOT_RECORD_VERSION: u16 = 1;
/// The bits of a mode that a record may hold.
pub const MODE_BITS: u32 = 0o7777;

/// Mode, owner and group of the root of the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RootRecord {
    /// permission bits, within [`MODE_BITS`]
    pub mode: u32,
    /// owner, never `u32::MAX`, which stands for "no user" in system calls
    pub uid: u32,
    /// group, never `u32::MAX`
    pub gid: u32,
}

/// Why the content of a sealed record of the root's permissions is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone, Copy)]
pub enum RootRecordError {
    /// Shorter or longer than a record is.
    #[error("record of the root's permissions of {len} bytes, not {expected}", expected = ROOT_RECORD_LEN)]
    Length {
        /// bytes found
        len: usize,
    },
    /// Written by a later Lamassu.
    #[error("record of the root's permissions, version {found}, is not supported; use a newer lamassu")]
    Version {
        /// version found
        found: u16,
    },
    /// Unused bits are set, or an id stands for no user.
    #[error("record of the root's permissions holds what no writer writes")]
    Values,
}

impl RootRecord {
    /// The content of the record.
    pub fn encode(&self) -> [u8; ROOT_RECORD_LEN] {
        let mut bytes = [0; ROOT_RECORD_LEN];
        bytes[0..2].copy_from_slice(&ROOT_RECORD_VERSION.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.mode.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.uid.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.gid.to_le_bytes());
        bytes
    }

    /// Parses the content of a sealed record of kind 8.
    ///
    /// # Errors
    /// [`RootRecordError`]; never panics, whatever the bytes.
    pub fn parse(content: &[u8]) -> Result<Self, RootRecordError> {
        let bytes: &[u8; ROOT_RECORD_LEN] =
            content.try_into().map_err(|_| RootRecordError::Length { len: content.len() })?;
        let found = u16::from_le_bytes([bytes[0], bytes[1]]);
        if found != ROOT_RECORD_VERSION {
            return Err(RootRecordError::Version { found });
        }
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let record = RootRecord { mode: word(4), uid: word(8), gid: word(12) };
        let is_written =
            bytes[2..4] == [0, 0] && record.mode & !MODE_BITS == 0 && record.uid != u32::MAX && record.gid != u32::MAX;
        if is_written { Ok(record) } else { Err(RootRecordError::Values) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: RootRecord = RootRecord { mode: 0o2751, uid: 1000, gid: 0x0102_0304 };

    #[test]
    fn layout_is_that_of_the_format_page() {
        let bytes = SAMPLE.encode();
        assert_eq!(bytes, [1, 0, 0, 0, 0xe9, 5, 0, 0, 0xe8, 3, 0, 0, 4, 3, 2, 1]);
        assert_eq!(RootRecord::parse(&bytes), Ok(SAMPLE));
    }

    #[test]
    fn strangers_are_refused() {
        let with = |at: usize, value: u8| {
            let mut bytes = SAMPLE.encode();
            bytes[at] = value;
            RootRecord::parse(&bytes)
        };
        assert_eq!(with(0, 2), Err(RootRecordError::Version { found: 2 }));
        for (at, value) in [(2, 1), (3, 0x80), (5, 0x10), (7, 1)] {
            assert_eq!(with(at, value), Err(RootRecordError::Values), "byte {at}");
        }
        for nobody in [RootRecord { uid: u32::MAX, ..SAMPLE }, RootRecord { gid: u32::MAX, ..SAMPLE }] {
            assert_eq!(RootRecord::parse(&nobody.encode()), Err(RootRecordError::Values));
        }
        for len in (0..ROOT_RECORD_LEN).chain([ROOT_RECORD_LEN + 1]) {
            assert_eq!(RootRecord::parse(&vec![1; len]), Err(RootRecordError::Length { len }));
        }
    }
}
