//! The content of a directory record (§6): the directory's id, the secret that its names are sealed under, and the
//! profile of the files that are made in it.
//!
//! A parsed record borrows: the secret is never copied from the caller's (locked) memory, and `Debug` does not show it.

use crate::Profile;

/// Bytes of a record without properties.
pub const DIR_RECORD_LEN: usize = 56;
/// Bytes of the longest version 1 record: with a profile.
pub const DIR_RECORD_LEN_MAX: usize = DIR_RECORD_LEN + 1;
/// Version of the record's own layout.
pub const DIR_RECORD_VERSION: u16 = 1;

/// A directory record.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct DirRecord<'a> {
    /// random; associated data of every name in the directory
    pub id: [u8; 16],
    /// random; the key of its names derives from it
    pub secret: &'a [u8; 32],
    /// of the files and directories that are made in it
    pub profile: Profile,
}

impl std::fmt::Debug for DirRecord<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DirRecord").field("id", &self.id).field("profile", &self.profile).finish_non_exhaustive()
    }
}

/// Why the content of a sealed directory record is refused. Its seal is good, so a newer or faulty program wrote it.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone, Copy)]
pub enum RecordError {
    /// Shorter or longer than its fields say.
    #[error("directory record of {len} bytes, which is not what its fields say")]
    Length {
        /// bytes found
        len: usize,
    },
    /// Written by a later Lamassu.
    #[error("directory record version {found} is not supported; use a newer lamassu")]
    Version {
        /// version found
        found: u16,
    },
    /// Written by a later Lamassu.
    #[error("directory record flags {found:#x} are not supported; use a newer lamassu")]
    Flags {
        /// flags found
        found: u16,
    },
    /// Written by a later Lamassu: version 1 has one byte of properties at most.
    #[error("directory record with {len} bytes of properties is not supported; use a newer lamassu")]
    Properties {
        /// length found
        len: u32,
    },
    /// Written by a later Lamassu, or the default, which is not written.
    #[error("directory record with profile {found:#x} is not supported; use a newer lamassu")]
    Profile {
        /// number found
        found: u8,
    },
}

impl<'a> DirRecord<'a> {
    /// Parses the content of a sealed record of kind 1.
    ///
    /// # Errors
    /// [`RecordError`]; never panics, whatever the bytes.
    pub fn parse(content: &'a [u8]) -> Result<Self, RecordError> {
        let length = RecordError::Length { len: content.len() };
        let (fixed, properties) = content.split_first_chunk::<DIR_RECORD_LEN>().ok_or(length)?;
        let version = u16::from_le_bytes([fixed[0], fixed[1]]);
        if version != DIR_RECORD_VERSION {
            return Err(RecordError::Version { found: version });
        }
        let flags = u16::from_le_bytes([fixed[2], fixed[3]]);
        if flags != 0 {
            return Err(RecordError::Flags { found: flags });
        }
        let n = u32::from_le_bytes([fixed[52], fixed[53], fixed[54], fixed[55]]);
        if n > 1 {
            return Err(RecordError::Properties { len: n });
        }
        // One encoding of each record: the default is left out.
        let profile = match (n, properties) {
            (0, []) => Profile::DEFAULT,
            (1, &[found]) => {
                let profile = Profile::of_number(found).filter(|profile| !profile.is_default());
                profile.ok_or(RecordError::Profile { found })?
            }
            _ => return Err(length),
        };
        let (_, rest) = fixed.split_first_chunk::<4>().ok_or(length)?;
        let (id, rest) = rest.split_first_chunk::<16>().ok_or(length)?;
        let (secret, _) = rest.split_first_chunk::<32>().ok_or(length)?;
        Ok(DirRecord { id: *id, secret, profile })
    }

    /// Writes the content to be sealed to the first bytes, and returns their number. It contains the secret: the caller
    /// wipes it.
    #[must_use]
    pub fn encode_into(&self, out: &mut [u8; DIR_RECORD_LEN_MAX]) -> usize {
        out.fill(0);
        out[0..2].copy_from_slice(&DIR_RECORD_VERSION.to_le_bytes());
        out[4..20].copy_from_slice(&self.id);
        out[20..52].copy_from_slice(self.secret);
        if self.profile.is_default() {
            return DIR_RECORD_LEN;
        }
        out[52] = 1;
        out[DIR_RECORD_LEN] = self.profile.number();
        DIR_RECORD_LEN_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(profile: Profile) -> Vec<u8> {
        let mut out = [0xff; DIR_RECORD_LEN_MAX];
        let len = DirRecord { id: [1; 16], secret: &[2; 32], profile }.encode_into(&mut out);
        out[..len].to_vec()
    }

    fn sample() -> Vec<u8> {
        record(Profile::DEFAULT)
    }

    #[test]
    fn a_profile_is_a_property_and_the_default_is_none() {
        for profile in (0..=u8::MAX).filter_map(Profile::of_number) {
            let bytes = record(profile);
            assert_eq!(bytes.len(), if profile.is_default() { 56 } else { 57 });
            assert_eq!(DirRecord::parse(&bytes).map(|record| record.profile), Ok(profile));
        }
        let with = |number: u8| {
            let mut bytes = record(Profile::of_number(1).unwrap());
            bytes[56] = number;
            DirRecord::parse(&bytes).map(|record| record.profile)
        };
        for number in [0, 5, 9, 32, 255] {
            assert_eq!(with(number), Err(RecordError::Profile { found: number }), "{number}");
        }
    }

    #[test]
    fn layout_is_that_of_the_format_page() {
        let bytes = sample();
        assert_eq!(bytes[0..4], [1, 0, 0, 0]);
        assert_eq!(bytes[4..20], [1; 16]);
        assert_eq!(bytes[20..52], [2; 32]);
        assert_eq!(bytes[52..], [0; 4]);
        let parsed = DirRecord { id: [1; 16], secret: &[2; 32], profile: Profile::DEFAULT };
        assert_eq!(DirRecord::parse(&bytes), Ok(parsed));
    }

    #[test]
    fn strangers_are_refused() {
        let with = |at: usize, value: u8| {
            let mut bytes = sample();
            bytes[at] = value;
            DirRecord::parse(&bytes).map(|r| r.id).unwrap_err()
        };
        assert_eq!(with(0, 2), RecordError::Version { found: 2 });
        assert_eq!(with(1, 1), RecordError::Version { found: 0x101 });
        assert_eq!(with(3, 0x80), RecordError::Flags { found: 0x8000 });
        assert_eq!(with(55, 0xff), RecordError::Properties { len: 0xff00_0000 });
        let mut long = sample();
        long.push(0);
        assert_eq!(DirRecord::parse(&long).unwrap_err(), RecordError::Length { len: 57 });
        for len in 0..DIR_RECORD_LEN {
            assert_eq!(DirRecord::parse(&sample()[..len]).unwrap_err(), RecordError::Length { len });
        }
    }

    #[test]
    fn debug_hides_the_secret() {
        assert!(
            !format!("{:?}", DirRecord { id: [1; 16], secret: &[222; 32], profile: Profile::DEFAULT }).contains("222")
        );
    }
}
