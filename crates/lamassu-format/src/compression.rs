//! How the blocks of a vault are compressed before they are encrypted (§10): a property of its header.
//!
//! It tells a writer how to make blocks. A reader does not need it: the key of a block tells whether the block is
//! compressed, and the payload tells the codec.

use crate::Suite;
use std::fmt;
use std::str::FromStr;

/// Bytes of a payload's head: the codec, and the length of its output.
pub const PAYLOAD_HEAD_LEN: usize = 4;
/// The smallest number of bytes to which lengths of payloads may be rounded up.
pub const ROUND_MIN: u32 = 512;
/// The default for that, if it is less than a block: the unit in which stores allocate.
const ROUND_DEFAULT: u32 = 4096;

/// The codec that compresses a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// A block of LZ4.
    Lz4,
    /// A frame of Zstandard, at a level from 1 to 19.
    Zstd(u8),
}

impl Codec {
    /// The level of `zstd` without one.
    pub const ZSTD_LEVEL_DEFAULT: u8 = 3;
    /// The highest level of `zstd`.
    pub const ZSTD_LEVEL_MAX: u8 = 19;

    /// The number in payloads.
    pub const fn id(self) -> u8 {
        match self {
            Codec::Lz4 => 1,
            Codec::Zstd(_) => 2,
        }
    }

    /// The name in headers.
    pub const fn name(self) -> &'static str {
        match self {
            Codec::Lz4 => "lz4",
            Codec::Zstd(_) => "zstd",
        }
    }

    /// The level, if the codec has levels.
    pub const fn level(self) -> Option<u8> {
        match self {
            Codec::Lz4 => None,
            Codec::Zstd(level) => Some(level),
        }
    }

    /// The codec of a name and a level, if there is one.
    pub fn of(name: &str, level: Option<u64>) -> Option<Codec> {
        match (name, level) {
            ("lz4", None) => Some(Codec::Lz4),
            ("zstd", Some(level)) => {
                let level = u8::try_from(level).ok()?;
                (1..=Codec::ZSTD_LEVEL_MAX).contains(&level).then_some(Codec::Zstd(level))
            }
            _ => None,
        }
    }
}

/// `lz4`, `zstd:3`.
impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Codec::Lz4 => f.write_str("lz4"),
            Codec::Zstd(level) => write!(f, "zstd:{level}"),
        }
    }
}

/// The release of a codec's library. Others may compress the same block to other bytes, which do not deduplicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CodecVersion(pub u16, pub u16, pub u16);

impl fmt::Display for CodecVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CodecVersion(major, minor, patch) = self;
        write!(f, "{major}.{minor}.{patch}")
    }
}

/// The text is not three numbers without leading zeros, separated by dots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoVersion;

impl FromStr for CodecVersion {
    type Err = NoVersion;

    fn from_str(text: &str) -> Result<CodecVersion, NoVersion> {
        let mut parts = text.split('.').map(|part| part.parse().map_err(|_| NoVersion));
        let mut next = || parts.next().unwrap_or(Err(NoVersion));
        let version = CodecVersion(next()?, next()?, next()?);
        // One form for one version: the header is compared as text.
        if version.to_string() == text { Ok(version) } else { Err(NoVersion) }
    }
}

/// How a writer compresses blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Compression {
    codec: Codec,
    version: CodecVersion,
    round: u32,
}

/// Why there is no such compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompressionError {
    /// The suite's keys have no spare bit.
    #[error("not in suite \"paper\", whose keys have no bit that could mark compressed blocks")]
    Paper,
    /// Lengths cannot be rounded up to this.
    #[error("lengths are rounded up to a power of two from 512 to half a block")]
    Round,
}

impl Compression {
    /// Compression by `codec`, of this version; lengths are rounded up to a multiple of `round` bytes.
    ///
    /// # Errors
    /// [`CompressionError`], if the suite or the block size does not allow it.
    pub fn new(
        codec: Codec,
        version: CodecVersion,
        round: u32,
        (suite, block_size): (Suite, u32),
    ) -> Result<Compression, CompressionError> {
        let compression = Compression { codec, version, round };
        compression.check(suite, block_size)?;
        Ok(compression)
    }

    /// The default to which lengths are rounded up in blocks of this size.
    pub const fn default_round(block_size: u32) -> u32 {
        if block_size > ROUND_DEFAULT { ROUND_DEFAULT } else { block_size / 8 }
    }

    /// Whether a vault of this suite and block size can have it.
    ///
    /// # Errors
    /// [`CompressionError`].
    pub fn check(self, suite: Suite, block_size: u32) -> Result<(), CompressionError> {
        if !suite.marks_compressed() {
            return Err(CompressionError::Paper);
        }
        let is_round = self.round.is_power_of_two() && (ROUND_MIN..=block_size / 2).contains(&self.round);
        if is_round { Ok(()) } else { Err(CompressionError::Round) }
    }

    /// The codec.
    pub const fn codec(self) -> Codec {
        self.codec
    }

    /// Its release.
    pub const fn version(self) -> CodecVersion {
        self.version
    }

    /// To how many bytes lengths are rounded up.
    pub const fn round(self) -> u32 {
        self.round
    }

    /// How many bytes are encrypted if the codec compresses a block to `compressed` bytes. `None` if that saves less
    /// than an eighth of the block.
    pub fn payload_len(self, compressed: usize, block_size: usize) -> Option<usize> {
        let len = (PAYLOAD_HEAD_LEN + compressed).next_multiple_of(self.round as usize);
        (len <= Self::payload_max(block_size)).then_some(len)
    }

    /// The longest payload of a block, bytes.
    pub const fn payload_max(block_size: usize) -> usize {
        block_size - block_size / 8
    }
}

/// `zstd:3 of zstd 1.5.7, lengths in steps of 4096`, for people.
impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Compression { codec, version, round } = self;
        write!(f, "{codec} (version {version}), lengths in steps of {round} bytes")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_have_one_form() {
        for (text, version) in [("1.5.7", Some(CodecVersion(1, 5, 7))), ("0.14.2", Some(CodecVersion(0, 14, 2)))] {
            assert_eq!(text.parse().ok(), version);
        }
        for text in ["", "1", "1.5", "1.5.7.0", "01.5.7", "1.5.+7", "1.5.65536", "1..7", " 1.5.7", "1.5.7-rc1"] {
            assert_eq!(text.parse::<CodecVersion>(), Err(NoVersion), "{text:?}");
        }
    }

    #[test]
    fn codecs_by_name() {
        for codec in [Codec::Lz4, Codec::Zstd(1), Codec::Zstd(19)] {
            assert_eq!(Codec::of(codec.name(), codec.level().map(u64::from)), Some(codec));
        }
        for (name, level) in [
            ("lz4", Some(1)),
            ("zstd", None),
            ("zstd", Some(0)),
            ("zstd", Some(20)),
            ("zstd", Some(259)),
            ("LZ4", None),
        ] {
            assert_eq!(Codec::of(name, level), None, "{name} {level:?}");
        }
    }

    #[test]
    fn lengths() {
        let version = CodecVersion(1, 5, 7);
        let made = |round, suite, size| Compression::new(Codec::Lz4, version, round, (suite, size));
        assert_eq!(made(512, Suite::Paper, 4096), Err(CompressionError::Paper));
        for (round, size) in [(256, 4096), (4096, 4096), (768, 4096), (0, 4096), (8192, 8192), (1 << 20, 1 << 20)] {
            assert_eq!(made(round, Suite::Aes, size), Err(CompressionError::Round), "{round} of {size}");
        }
        for size in (12..=20).map(|log2| 1 << log2) {
            let compression = made(Compression::default_round(size), Suite::Aes, size).expect("the default");
            let (round, size) = (compression.round() as usize, size as usize);
            assert_eq!(compression.payload_len(1, size), Some(round));
            assert_eq!(compression.payload_len(round - 4, size), Some(round));
            assert_eq!(compression.payload_len(size - 4, size), None, "it saves nothing");
            let longest = (0..size).filter_map(|n| compression.payload_len(n, size)).max().expect("some");
            assert!(longest + size / 8 <= size && longest + size / 8 + round > size, "{longest} of {size}");
        }
    }
}
