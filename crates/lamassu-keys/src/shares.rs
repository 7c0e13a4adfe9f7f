//! A recovery key in shares (§4b): any `need` of `of` shares give the key, and fewer reveal nothing of it.
//!
//! Shamir's scheme byte by byte, by the crate `blahaj`, which is built without its own generator: the coefficients are
//! this program's random numbers, with `--fips` the module's. It wipes what it keeps of them and of the key, and the
//! stack is overwritten after it. A share is 30 words of BIP-39's list: its number, how many are needed, the number of
//! the set, part of the vault's id, 32 bytes, and 34 bits of checksum. So a misread word, a share of another set and a
//! repeated share are all found before any slot is tried. The table lookups of the scheme are not constant in time:
//! shares are made and joined by a person's command, so no stranger can measure it.

use crate::words::whole;
use blahaj::{Share as Point, Sharks};
use lamassu_crypto::secret::without_trace;
use lamassu_crypto::{NoRandom, Secret, SecretBytes, wrap};
use rand_core::{TryCryptoRng, TryRng};
use std::convert::Infallible;
use zeroize::{Zeroize, Zeroizing};

/// Words of a share.
pub const WORDS: usize = 30;
/// Most shares of a set.
pub const SHARES_MAX: u8 = 15;
/// Bits of a word.
const BITS: usize = 11;
/// Number and need, set, vault, the point.
const PAYLOAD: usize = 1 + 2 + 2 + 32;
/// Letters of the longest word of the list.
const LETTERS_MAX: usize = 8;

/// The number of shares, and how many are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheme {
    need: u8,
    of: u8,
}

impl Scheme {
    /// 2 ≤ need ≤ of ≤ 15, or `None`.
    pub fn new(need: u8, of: u8) -> Option<Scheme> {
        (need >= 2 && need <= of && of <= SHARES_MAX).then_some(Scheme { need, of })
    }

    /// The number of shares that are needed.
    pub fn need(self) -> u8 {
        self.need
    }

    /// The number of shares.
    pub fn of(self) -> u8 {
        self.of
    }
}

impl std::str::FromStr for Scheme {
    type Err = &'static str;

    /// `3-of-5`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let numbers = text.split_once("-of-").and_then(|(need, of)| Some((need.parse().ok()?, of.parse().ok()?)));
        numbers
            .and_then(|(need, of)| Scheme::new(need, of))
            .ok_or("M-of-N, e.g. 3-of-5, with 2 to 15 shares, of which at least 2 are needed")
    }
}

/// Why texts are not shares that fit together. Never quotes them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShareError {
    /// The user's: words are missing, or there are too many.
    #[error("a share has {WORDS} words; the one given {} has {found}", nth(*.place))]
    Count {
        /// which text, from 1
        place: usize,
        /// number of words
        found: usize,
    },
    /// The user's: a word that is not in the list.
    #[error("word {position} of the share given {} is not one a share can have; look at it again", nth(*.place))]
    Word {
        /// which text, from 1
        place: usize,
        /// position of the word, from 1
        position: usize,
    },
    /// The user's: words were exchanged or misread.
    #[error("the words of the share given {} do not belong together: one was misread, or two changed places", nth(*.place))]
    Checksum {
        /// which text, from 1
        place: usize,
    },
    /// The user's: shares of two sets.
    #[error(
        "the share given {} (number {number}, of vault {vault}…) is of another set than the first (of vault {first}…): only shares that were printed together fit together",
        nth(*.place)
    )]
    Mixed {
        /// which of those given, from 1
        place: usize,
        /// its number
        number: u8,
        /// the first digits of its vault's id
        vault: String,
        /// those of the first share
        first: String,
    },
    /// The user's: the same share twice.
    #[error("share {number} was given twice; give another one of its set")]
    Duplicate {
        /// its number
        number: u8,
    },
    /// The user's: not enough shares.
    #[error("{found} of the {need} shares that are needed; {} more of the same set", need - found)]
    TooFew {
        /// how many there are
        found: u8,
        /// how many are needed
        need: u8,
    },
    /// The user's: no shares at all.
    #[error("no shares; give those there are, one after another")]
    None,
}

fn nth(place: usize) -> String {
    match place {
        1 => "first".into(),
        2 => "second".into(),
        3 => "third".into(),
        n => format!("as number {n}"),
    }
}

/// One share.
pub struct Share {
    number: u8,
    need: u8,
    set: [u8; 2],
    vault: [u8; 2],
    point: Secret<32>,
}

impl std::fmt::Debug for Share {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Share").field("number", &self.number).field("need", &self.need).finish_non_exhaustive()
    }
}

/// Splits a key into the shares of a set. `vault` is the id of the header they are for.
///
/// # Errors
/// [`NoRandom`] when getrandom(2) fails, or the FIPS module's generator where that is used.
pub fn split(key: &Secret<32>, scheme: Scheme, vault: &[u8; 16]) -> Result<Vec<Share>, NoRandom> {
    split_with(key, scheme, vault, lamassu_crypto::random)
}

/// The sheets of a set of shares, with an empty line in between: see [`split`].
pub(crate) fn sheets(key: &Secret<32>, scheme: Scheme, vault: &[u8; 16]) -> Result<SecretBytes, NoRandom> {
    let sheets: Vec<SecretBytes> = split(key, scheme, vault)?.iter().map(|s| s.sheet(scheme.of)).collect();
    // Reserved at once, so that no reallocation leaves a copy behind.
    let mut all = Vec::with_capacity(sheets.iter().map(|s| s.len() + 1).sum());
    for (i, sheet) in sheets.iter().enumerate() {
        if i > 0 {
            all.push(b'\n');
        }
        all.extend_from_slice(sheet.expose());
    }
    Ok(SecretBytes::new(all))
}

fn split_with(
    key: &Secret<32>,
    scheme: Scheme,
    vault: &[u8; 16],
    mut random: impl FnMut(&mut [u8]) -> Result<(), NoRandom>,
) -> Result<Vec<Share>, NoRandom> {
    let mut set = [0u8; 2];
    random(&mut set)?;
    let mut source = Source { random, failed: None };
    let share = |point: Point| {
        let bytes = Zeroizing::new(Vec::from(&point));
        let point = Secret::from_slice(&bytes[1..]).expect("as long as the key");
        Share { number: bytes[0], need: scheme.need, set, vault: [vault[0], vault[1]], point }
    };
    let shares = without_trace(|| {
        let points = Sharks(scheme.need).dealer_rng(key.expose(), &mut source);
        points.take(scheme.of.into()).map(share).collect()
    });
    match source.failed {
        None => Ok(shares),
        Some(error) => Err(error),
    }
}

/// Random numbers for the library, whose interface has no errors. The first error is kept, and the result is discarded.
struct Source<F> {
    random: F,
    failed: Option<NoRandom>,
}

impl<F: FnMut(&mut [u8]) -> Result<(), NoRandom>> Source<F> {
    fn draw<const N: usize>(&mut self) -> Zeroizing<[u8; N]> {
        let mut bytes = Zeroizing::new([0; N]);
        self.fill(&mut *bytes);
        bytes
    }

    fn fill(&mut self, out: &mut [u8]) {
        if let Err(error) = (self.random)(out) {
            self.failed.get_or_insert(error);
        }
    }
}

impl<F: FnMut(&mut [u8]) -> Result<(), NoRandom>> TryRng for Source<F> {
    type Error = Infallible;

    fn try_next_u32(&mut self) -> Result<u32, Infallible> {
        Ok(u32::from_le_bytes(*self.draw()))
    }

    fn try_next_u64(&mut self) -> Result<u64, Infallible> {
        Ok(u64::from_le_bytes(*self.draw()))
    }

    fn try_fill_bytes(&mut self, out: &mut [u8]) -> Result<(), Infallible> {
        self.fill(out);
        Ok(())
    }
}

impl<F: FnMut(&mut [u8]) -> Result<(), NoRandom>> TryCryptoRng for Source<F> {}

impl Share {
    /// From 1.
    pub fn number(&self) -> u8 {
        self.number
    }

    fn payload(&self) -> Zeroizing<[u8; PAYLOAD]> {
        let mut bytes = Zeroizing::new([0; PAYLOAD]);
        bytes[0] = self.number << 4 | self.need;
        bytes[1..3].copy_from_slice(&self.set);
        bytes[3..5].copy_from_slice(&self.vault);
        bytes[5..].copy_from_slice(self.point.expose());
        bytes
    }

    /// The share as a sheet to write down: a heading, which is not part of it, and the numbered words, four to a line.
    pub fn sheet(&self, of: u8) -> SecretBytes {
        const A_LINE: usize = 4;
        let list = bip39::Language::English.word_list();
        let all = with_checksum(&self.payload());
        // Heading; number, dot, space, 8 letters, two spaces or a line end.
        let mut text = Vec::with_capacity(128 + WORDS * 14);
        let (Share { number, need, .. }, vault) = (self, hex(self.vault));
        let heading = format!("# Share {number} of {of} of a recovery key for {vault}…: any {need} of them open it.\n");
        text.extend_from_slice(heading.as_bytes());
        for i in 0..WORDS {
            let word = list[bits(&*all, i * BITS)];
            text.extend_from_slice(format!("{:>2}. ", i + 1).as_bytes());
            text.extend_from_slice(word.as_bytes());
            let ends = (i + 1) % A_LINE == 0 || i + 1 == WORDS;
            text.extend(std::iter::repeat_n(b' ', if ends { 0 } else { LETTERS_MAX + 2 - word.len() }));
            if ends {
                text.push(b'\n');
            }
        }
        SecretBytes::new(text)
    }

    /// Parses a share from its words. `place`: its position among several, for the error.
    fn parse(words: &[&str], place: usize) -> Result<Share, ShareError> {
        if words.len() != WORDS {
            return Err(ShareError::Count { place, found: words.len() });
        }
        let mut all = Zeroizing::new([0u8; PAYLOAD + 5]);
        for (i, word) in words.iter().enumerate() {
            let index = whole(word)
                .and_then(|word| bip39::Language::English.find_word(word))
                .ok_or(ShareError::Word { place, position: i + 1 })?;
            for bit in 0..BITS {
                let at = i * BITS + bit;
                all[at / 8] |= ((index >> (BITS - 1 - bit) & 1) as u8) << (7 - at % 8);
            }
        }
        let payload: &[u8; PAYLOAD] = all.first_chunk().expect("the checksum is behind it");
        if *all != *with_checksum(payload) {
            return Err(ShareError::Checksum { place });
        }
        let (number, need) = (payload[0] >> 4, payload[0] & 15);
        if number == 0 || need < 2 {
            return Err(ShareError::Checksum { place });
        }
        let point = Secret::from_slice(&payload[5..]).expect("32 bytes");
        Ok(Share { number, need, set: [payload[1], payload[2]], vault: [payload[3], payload[4]], point })
    }
}

/// The words of any payload, with the checksum that belongs to it.
#[cfg(feature = "testing")]
pub fn text_of_payload(payload: &[u8; PAYLOAD]) -> String {
    let (list, all) = (bip39::Language::English.word_list(), with_checksum(payload));
    (0..WORDS).map(|i| list[bits(&*all, i * BITS)]).collect::<Vec<_>>().join(" ")
}

/// The payload and the 34 bits of checksum; the rest of the last byte is zero.
fn with_checksum(payload: &[u8; PAYLOAD]) -> Zeroizing<[u8; PAYLOAD + 5]> {
    let mut all = Zeroizing::new([0; PAYLOAD + 5]);
    let mut input = Zeroizing::new([0; 16 + PAYLOAD]);
    input[..16].copy_from_slice(b"lamassu v1 share");
    input[16..].copy_from_slice(payload);
    let sum = wrap::sha256(&*input);
    all[..PAYLOAD].copy_from_slice(payload);
    all[PAYLOAD..].copy_from_slice(&sum[..5]);
    all[PAYLOAD + 4] &= 0b1100_0000;
    all
}

/// Eleven bits.
fn bits(bytes: &[u8], at: usize) -> usize {
    (at..at + BITS).fold(0, |word, bit| word << 1 | usize::from(bytes[bit / 8] >> (7 - bit % 8) & 1))
}

fn hex(bytes: [u8; 2]) -> String {
    data_encoding::HEXLOWER.encode(&bytes)
}

/// Shares collected so far.
#[derive(Debug, Default)]
pub struct Collected {
    shares: Vec<Share>,
}

impl Collected {
    /// Adds one share's text, or that of several, separated by empty lines or lines that begin with `#`, or as runs of
    /// 30 words.
    ///
    /// # Errors
    /// [`ShareError`]; what was added before stays.
    pub fn add(&mut self, text: &[u8]) -> Result<(), ShareError> {
        let lower = Zeroizing::new(text.to_ascii_lowercase());
        let mut blocks: Vec<Vec<&str>> = vec![Vec::new()];
        for line in lower.split(|b| *b == b'\n') {
            let line = line.trim_ascii();
            if line.is_empty() || line.starts_with(b"#") {
                blocks.push(Vec::new());
                continue;
            }
            let words = line.split(|b| !b.is_ascii_lowercase()).filter(|w| !w.is_empty());
            let last = blocks.last_mut().expect("never empty");
            last.extend(words.map(|w| std::str::from_utf8(w).expect("letters")));
        }
        for block in blocks.iter().filter(|block| !block.is_empty()) {
            let one = if block.len().is_multiple_of(WORDS) { WORDS } else { block.len() };
            for words in block.chunks(one) {
                self.push(Share::parse(words, self.shares.len() + 1)?)?;
            }
        }
        Ok(())
    }

    fn push(&mut self, share: Share) -> Result<(), ShareError> {
        if let Some(first) = self.shares.first() {
            if (share.set, share.vault, share.need) != (first.set, first.vault, first.need) {
                let place = self.shares.len() + 1;
                let (vault, first) = (hex(share.vault), hex(first.vault));
                return Err(ShareError::Mixed { place, number: share.number, vault, first });
            }
            if self.shares.iter().any(|s| s.number == share.number) {
                return Err(ShareError::Duplicate { number: share.number });
            }
        }
        self.shares.push(share);
        Ok(())
    }

    /// How many shares there are, and how many are needed; unknown before the first.
    pub fn progress(&self) -> Option<(u8, u8)> {
        let need = self.shares.first()?.need;
        Some((u8::try_from(self.shares.len()).unwrap_or(u8::MAX), need))
    }

    /// The key.
    ///
    /// # Errors
    /// [`ShareError::None`], [`ShareError::TooFew`].
    pub fn join(&self) -> Result<Secret<32>, ShareError> {
        let (found, need) = self.progress().ok_or(ShareError::None)?;
        if found < need {
            return Err(ShareError::TooFew { found, need });
        }
        without_trace(|| {
            let points: Vec<Point> = self.shares.iter().take(need.into()).map(Share::point).collect();
            let mut key = Sharks(need).recover(&points).map_err(|_| ShareError::TooFew { found, need })?;
            let joined = Secret::from_slice(&key);
            key.zeroize();
            Ok(joined.expect("as long as the shares"))
        })
    }
}

impl Share {
    fn point(&self) -> Point {
        let mut bytes = Zeroizing::new([0; 33]);
        bytes[0] = self.number;
        bytes[1..].copy_from_slice(self.point.expose());
        Point::try_from(&bytes[..]).expect("long enough")
    }
}

/// The key from shares in one text.
///
/// # Errors
/// [`ShareError`].
pub fn join(text: &[u8]) -> Result<Secret<32>, ShareError> {
    let mut collected = Collected::default();
    collected.add(text)?;
    collected.join()
}

#[cfg(test)]
mod tests;
