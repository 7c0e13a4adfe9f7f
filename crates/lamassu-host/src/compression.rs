//! The compression of a new vault, dataset or zone: chosen or inherited.

use crate::{Error, Result};
use lamassu_crypto::compress::version_of;
use lamassu_format::{Codec, Compression, CompressionError, Suite};
use std::fmt;
use std::str::FromStr;

/// The user's choice: a codec, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen(pub Option<Codec>);

/// The word names no codec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected none, lz4, zstd or zstd:LEVEL, with a level from 1 to 19")]
pub struct NoCodec;

impl FromStr for Chosen {
    type Err = NoCodec;

    fn from_str(text: &str) -> std::result::Result<Chosen, NoCodec> {
        let codec = match text.split_once(':') {
            None if text == "none" => return Ok(Chosen(None)),
            None if text == "zstd" => Some(Codec::Zstd(Codec::ZSTD_LEVEL_DEFAULT)),
            None => Codec::of(text, None),
            Some((name, level)) => {
                let level: u8 = level.parse().map_err(|_| NoCodec)?;
                Codec::of(name, Some(level.into()))
            }
        };
        let is_spelt_so = |codec: &Codec| text == "zstd" || codec.to_string() == text;
        codec.filter(is_spelt_so).map(|codec| Chosen(Some(codec))).ok_or(NoCodec)
    }
}

impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(codec) => codec.fmt(f),
            None => f.write_str("none"),
        }
    }
}

/// The compression of something new with this suite and block size: as chosen; the rest from the zone or vault that it
/// belongs to, as far as it fits. An inherited release stays, since the other members name it, too: a mount says if
/// this program has another.
///
/// # Errors
/// [`Error::Usage`], [`Error::Member`]: the choice does not fit.
pub fn of_new(
    chosen: Option<Chosen>,
    round: Option<u32>,
    inherited: Option<Compression>,
    (suite, block_size): (Suite, u32),
) -> Result<Option<Compression>> {
    let (codec, version) = match (chosen, inherited) {
        (Some(Chosen(Some(codec))), _) => (codec, version_of(codec)),
        (None, Some(inherited)) if suite.marks_compressed() => (inherited.codec(), inherited.version()),
        (None, _) if round.is_some() => {
            return Err(Error::Usage("nothing is compressed whose lengths could be rounded: give a codec, too"));
        }
        (Some(Chosen(None)), _) if round.is_some() => {
            return Err(Error::Usage("without compression no lengths are rounded: leave out what to round up to"));
        }
        (Some(Chosen(None)) | None, _) => return Ok(None),
    };
    let fits = |round: &u32| Compression::new(codec, version, *round, (suite, block_size)).is_ok();
    let inherited = inherited.map(Compression::round).filter(fits);
    let round = round.or(inherited).unwrap_or(Compression::default_round(block_size));
    match Compression::new(codec, version, round, (suite, block_size)) {
        Ok(compression) => Ok(Some(compression)),
        Err(CompressionError::Paper) => Err(Error::Usage(
            "suite paper, as published, has no bit in its keys that could mark compressed blocks: choose another suite, or no compression",
        )),
        Err(CompressionError::Round) => Err(Error::Member {
            option: "what lengths of compressed blocks are rounded up to",
            rule: "a power of two from 512 to half a block",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        for (text, codec) in [
            ("none", None),
            ("lz4", Some(Codec::Lz4)),
            ("zstd", Some(Codec::Zstd(3))),
            ("zstd:1", Some(Codec::Zstd(1))),
            ("zstd:19", Some(Codec::Zstd(19))),
        ] {
            assert_eq!(text.parse(), Ok(Chosen(codec)));
            assert_eq!(Chosen(codec).to_string().parse(), Ok(Chosen(codec)));
        }
        for text in [
            "", "gzip", "lz4:1", "zstd:", "zstd:+3", "zstd:03", "zstd:0", "zstd:20", "zstd:300", "zstd:-1", "LZ4",
            "none:1",
        ] {
            assert_eq!(text.parse::<Chosen>(), Err(NoCodec), "{text:?}");
        }
    }

    #[test]
    fn what_is_asked_for_goes_before_what_is_inherited() {
        let of = |chosen: &str, round, inherited, suite| {
            let chosen = (!chosen.is_empty()).then(|| chosen.parse().unwrap());
            of_new(chosen, round, inherited, (suite, 65536))
        };
        let lz4 = of("lz4", Some(8192), None, Suite::Aes).unwrap();
        assert_eq!(lz4.map(|c| (c.codec(), c.round())), Some((Codec::Lz4, 8192)));
        assert_eq!(of("", None, lz4, Suite::Aes).unwrap(), lz4);
        assert_eq!(of("", Some(4096), lz4, Suite::Aes).unwrap().map(Compression::round), Some(4096));
        assert_eq!(
            of("zstd", None, lz4, Suite::Aes).unwrap().map(|c| (c.codec(), c.round())),
            Some((Codec::Zstd(3), 8192))
        );
        assert_eq!(of("none", None, lz4, Suite::Aes).unwrap(), None);
        assert_eq!(of("", None, lz4, Suite::Paper).unwrap(), None, "a dataset of another suite");
        assert_eq!(of_new(None, None, lz4, (Suite::Aes, 4096)).unwrap().map(Compression::round), Some(512));
        for (chosen, round, suite) in [
            ("lz4", None, Suite::Paper),
            ("lz4", Some(65536), Suite::Aes),
            ("lz4", Some(1000), Suite::Aes),
            ("none", Some(4096), Suite::Aes),
            ("", Some(4096), Suite::Aes),
        ] {
            assert!(of(chosen, round, None, suite).is_err(), "{chosen} {round:?} {suite:?}");
        }
    }
}
