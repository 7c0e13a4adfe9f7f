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
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sheets(need: u8, of: u8) -> Vec<String> {
        let key = Secret::new(&mut [0x5a; 32]);
        let shares = split(&key, Scheme::new(need, of).unwrap(), &[0xab; 16]).unwrap();
        shares.iter().map(|s| String::from_utf8(s.sheet(of).expose().to_vec()).unwrap()).collect()
    }

    fn err(texts: &[&str]) -> ShareError {
        join(texts.join("\n\n").as_bytes()).unwrap_err()
    }

    #[test]
    fn any_three_of_five() {
        let s = sheets(3, 5);
        assert!(s[1].starts_with("# Share 2 of 5 of a recovery key for abab…: any 3 of them open it.\n 1. "));
        for (a, b, c) in [(0, 1, 2), (4, 2, 0), (3, 1, 4)] {
            let all = [&*s[a], &s[b], &s[c]].concat();
            assert_eq!(join(all.as_bytes()).unwrap().expose(), &[0x5a; 32]);
        }
        assert_eq!(join(s.concat().as_bytes()).unwrap().expose(), &[0x5a; 32], "more than it takes");
        // As words in one row, shortened, in capitals.
        let row: String = s[..3].concat().lines().filter(|l| !l.starts_with('#')).collect::<Vec<_>>().join(" ");
        let short = row.split_whitespace().map(|w| &w[..w.len().min(4)]).collect::<Vec<_>>().join(" ");
        assert_eq!(join(short.to_uppercase().as_bytes()).unwrap().expose(), &[0x5a; 32]);
    }

    #[test]
    fn mistakes_are_told_apart() {
        let (s, other) = (sheets(3, 5), sheets(3, 5));
        assert_eq!(err(&[]), ShareError::None);
        assert_eq!(err(&[&s[0], &s[1]]), ShareError::TooFew { found: 2, need: 3 });
        assert_eq!(err(&[&s[0], &s[3], &s[0]]), ShareError::Duplicate { number: 1 });
        assert!(matches!(err(&[&s[0], &s[1], &other[2]]), ShareError::Mixed { place: 3, number: 3, .. }));
        let words: Vec<&str> =
            s[1].lines().skip(1).flat_map(str::split_whitespace).filter(|w| !w.ends_with('.')).collect();
        assert_eq!(err(&[&s[0], &words[..29].join(" ")]), ShareError::Count { place: 2, found: 29 });
        let mut wrong = words.clone();
        wrong[6] = "lamassu";
        assert_eq!(err(&[&s[0], &wrong.join(" ")]), ShareError::Word { place: 2, position: 7 });
        wrong[6] = if words[6] == "zoo" { "zone" } else { "zoo" };
        assert_eq!(err(&[&s[0], &wrong.join(" ")]), ShareError::Checksum { place: 2 });
        let mut swapped = words.clone();
        let other = (1..30).find(|i| words[*i] != words[0]).unwrap();
        swapped.swap(0, other);
        assert_eq!(err(&[&swapped.join(" ")]), ShareError::Checksum { place: 1 });
        assert!(!err(&["correct horse battery staple"]).to_string().contains("horse"));
    }

    #[test]
    fn schemes() {
        assert_eq!("3-of-5".parse(), Ok(Scheme { need: 3, of: 5 }));
        assert_eq!("15-of-15".parse(), Ok(Scheme { need: 15, of: 15 }));
        for bad in ["1-of-5", "0-of-0", "4-of-3", "2-of-16", "3of5", "3-of-", "", "-of-"] {
            assert!(bad.parse::<Scheme>().is_err(), "{bad}");
        }
    }

    /// By hand: GF(2^8) modulo x^8+x^4+x^3+x^2+1.
    fn mul(mut a: u8, mut b: u8) -> u8 {
        let mut product = 0;
        while b > 0 {
            if b & 1 == 1 {
                product ^= a;
            }
            a = a << 1 ^ if a & 0x80 != 0 { 0x1d } else { 0 };
            b >>= 1;
        }
        product
    }

    /// Nothing but the source that it is given decides what the shares are: not one of their bits comes from another
    /// generator.
    #[test]
    fn every_coefficient_is_of_the_source_given() {
        let key = Secret::new(&mut std::array::from_fn(|i| i as u8 * 7 + 3));
        for (need, of) in [(2, 3), (3, 5), (15, 15)] {
            let (mut drawn, mut state) = (Vec::new(), 1u32);
            let source = |out: &mut [u8]| {
                out.fill_with(|| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 24) as u8
                });
                drawn.push(out.to_vec());
                Ok(())
            };
            let shares = split_with(&key, Scheme::new(need, of).unwrap(), &[0; 16], source).unwrap();
            assert_eq!(shares.len(), usize::from(of));
            // First the set's mark, then a draw for each coefficient, byte by byte of the key, the highest power first;
            // a coefficient is a draw's first byte.
            let (set, drawn) = drawn.split_first().unwrap();
            assert_eq!(drawn.len(), 32 * usize::from(need - 1));
            for share in &shares {
                assert_eq!(share.set, set[..]);
                for (i, powers) in drawn.chunks(usize::from(need - 1)).enumerate() {
                    let high = powers.iter().fold(0, |sum, draw| mul(sum, share.number) ^ draw[0]);
                    assert_eq!(share.point.expose()[i], mul(high, share.number) ^ key.expose()[i]);
                }
            }
        }
    }

    /// What is searched for is kept under this, so that the search does not find itself.
    const MASK: u8 = 0xa5;

    /// How many of `needles`, which are masked, stand in this process's memory.
    fn found(needles: &[Vec<u8>]) -> usize {
        use std::os::unix::fs::FileExt;
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let memory = std::fs::File::open("/proc/self/mem").unwrap();
        let stands_in = |content: &[u8], needle: &[u8]| {
            let is_it = |w: &[u8]| w.iter().zip(needle).all(|(a, b)| a ^ MASK == *b);
            content.windows(needle.len()).any(is_it)
        };
        let mut seen = vec![false; needles.len()];
        for line in maps.lines().filter(|line| line.contains(" rw")) {
            let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            let [from, to] = [from, to].map(|text| u64::from_str_radix(text, 16).unwrap());
            // Wiped: else the next search finds the copy that this one has made.
            let mut content = Zeroizing::new(vec![0; usize::try_from(to - from).unwrap()]);
            let Ok(read) = memory.read_at(&mut content, from) else { continue };
            seen.iter_mut().zip(needles).for_each(|(seen, needle)| *seen |= stands_in(&content[..read], needle));
        }
        seen.iter().filter(|seen| **seen).count()
    }

    /// Neither the coefficients, nor the points, nor the key that was joined of them: with the library's own wiping,
    /// ours, and what ciphers leave on the stack.
    #[test]
    fn nothing_of_a_set_is_left_in_memory() {
        const NEED: usize = 15;
        let masked = |bytes: &[u8]| bytes.iter().map(|b| b ^ MASK).collect::<Vec<u8>>();
        let mut coefficients = vec![Vec::with_capacity(NEED - 1)];
        let (key, mut needles) = (Secret::random().unwrap(), Vec::new());
        {
            let source = |out: &mut [u8]| {
                lamassu_crypto::random(out)?;
                // The first draw is the set's mark.
                if out.len() == 4 {
                    if coefficients.last().is_none_or(|c| c.len() == NEED - 1) {
                        coefficients.push(Vec::with_capacity(NEED - 1));
                    }
                    coefficients.last_mut().unwrap().push(out[0] ^ MASK);
                }
                Ok(())
            };
            let shares = split_with(&key, Scheme::new(15, 15).unwrap(), &[1; 16], source).unwrap();
            // In halves: what the allocator keeps in memory that was given back overwrites the first.
            needles.extend(shares.iter().flat_map(|s| s.point.expose().chunks(16)).map(masked));
            needles.extend(key.expose().chunks(16).map(masked));
            assert_eq!(found(&needles), needles.len(), "the search finds what is there");
            let collected = Collected { shares };
            assert_eq!(collected.join().unwrap().expose(), key.expose());
        }
        drop(key);
        assert_eq!(coefficients.len(), 32);
        needles.append(&mut coefficients);
        assert_eq!(found(&needles), 0);
    }

    #[test]
    fn where_the_source_fails_there_are_no_shares() {
        let key = Secret::new(&mut [7; 32]);
        for good in [0, 1, 2, 40] {
            let mut calls = 0;
            let source = |out: &mut [u8]| {
                calls += 1;
                out.fill(calls);
                if i32::from(calls) > good { Err(NoRandom::from(getrandom::Error::UNEXPECTED)) } else { Ok(()) }
            };
            assert!(split_with(&key, Scheme::new(3, 5).unwrap(), &[0; 16], source).is_err());
        }
    }

    /// The arithmetic of §4b: the key at x = 0.
    #[test]
    fn the_field_is_that_of_the_format_page() {
        let inverse = |a: u8| (1..=255).find(|b| mul(a, *b) == 1).unwrap();
        let key = Secret::new(&mut std::array::from_fn(|i| i as u8 * 7 + 1));
        let shares = split(&key, Scheme::new(2, 3).unwrap(), &[0; 16]).unwrap();
        let (a, b) = (&shares[0], &shares[2]);
        for i in 0..32 {
            // Lagrange: y_a · x_b / (x_b − x_a) + y_b · x_a / (x_a − x_b); minus is plus here.
            let d = inverse(a.number ^ b.number);
            let at_zero = mul(a.point.expose()[i], mul(b.number, d)) ^ mul(b.point.expose()[i], mul(a.number, d));
            assert_eq!(at_zero, key.expose()[i]);
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = join(&bytes);
        }

        #[test]
        fn words_in_any_number_never_panic(n in 0usize..100, seed in any::<u64>()) {
            let list = bip39::Language::English.word_list();
            let words: Vec<_> = (0..n).map(|i| list[(seed as usize ^ (i * 7919)) % 2048]).collect();
            prop_assert!(join(words.join(" ").as_bytes()).is_err());
        }
    }
}
