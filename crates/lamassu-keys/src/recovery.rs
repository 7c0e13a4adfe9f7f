//! Recovery keys: 32 random bytes as 24 words of BIP-39's English list, for paper.
//!
//! The words carry a checksum of 8 bits and differ in their first four letters, so a misread or missing word is found
//! before any slot is tried. The notation is free: upper or lower case, numbered or not, on one line or several.

use crate::shares::{self, Scheme};
use crate::words::whole;
use crate::{Material, SlotKind};
use bip39::Mnemonic;
use lamassu_crypto::{NoRandom, Secret, SecretBytes};
use zeroize::{Zeroize, Zeroizing};

/// Words of a recovery key.
pub const WORDS: usize = 24;
/// Letters of the longest word of the list.
const LETTERS_MAX: usize = 8;

/// Why a text is not a recovery key. Never quotes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecoveryError {
    /// The user's: words are missing, or there are too many.
    #[error("a recovery key has {WORDS} words; these are {found}")]
    Count {
        /// how many
        found: usize,
    },
    /// The user's: a word that is not in the list.
    #[error("word {position} is not one a recovery key can have; look at it again")]
    Word {
        /// from 1
        position: usize,
    },
    /// The user's: words were exchanged or misread.
    #[error("the words do not belong together: one was misread, or two changed places")]
    Checksum,
}

/// Makes a recovery key: the material for its slot, and the text to write down. `shares`: as shares of this scheme, for
/// the header with this id.
///
/// # Errors
/// [`NoRandom`].
pub fn generate(shares: Option<(Scheme, &[u8; 16])>) -> Result<(Material, SecretBytes), NoRandom> {
    let key = Secret::random()?;
    let (kind, text) = match shares {
        None => (SlotKind::Recovery, sheet(&key)),
        Some((scheme, id)) => (SlotKind::RecoveryShares, shares::sheets(&key, scheme, id)?),
    };
    Ok((Material::Key { kind, key }, text))
}

/// The words of a key, separated by single spaces.
pub fn words(key: &Secret<32>) -> SecretBytes {
    let mut mnemonic = Mnemonic::from_entropy(key.expose()).expect("32 bytes are one of the lengths of BIP-39");
    // Reserved at once, so that no reallocation leaves a copy behind.
    let mut text = Vec::with_capacity(WORDS * (LETTERS_MAX + 1));
    for (i, word) in mnemonic.words().enumerate() {
        if i > 0 {
            text.push(b' ');
        }
        text.extend_from_slice(word.as_bytes());
    }
    mnemonic.zeroize();
    SecretBytes::new(text)
}

/// The words of a key as a sheet to write down: numbered, four to a line.
pub fn sheet(key: &Secret<32>) -> SecretBytes {
    const A_LINE: usize = 4;
    let words = words(key);
    // Number, dot, space, 8 letters, two spaces or a line end.
    let mut text = Vec::with_capacity(WORDS * 14);
    for (i, word) in words.expose().split(|b| *b == b' ').enumerate() {
        let number = i + 1;
        text.extend_from_slice(&[
            if number < 10 { b' ' } else { b'0' + (number / 10) as u8 },
            b'0' + (number % 10) as u8,
        ]);
        text.extend_from_slice(b". ");
        text.extend_from_slice(word);
        let pad = if number.is_multiple_of(A_LINE) { 0 } else { LETTERS_MAX + 2 - word.len() };
        text.extend(std::iter::repeat_n(b' ', pad));
        if pad == 0 {
            text.push(b'\n');
        }
    }
    SecretBytes::new(text)
}

/// A passphrase of ten words and a line end, made from 110 bits of a key: for people who have to type it.
pub fn passphrase_of(key: &Secret<32>) -> SecretBytes {
    const PASSPHRASE_WORDS: usize = 10;
    const BITS: usize = 11;
    let list = bip39::Language::English.word_list();
    let mut text = Vec::with_capacity(PASSPHRASE_WORDS * (LETTERS_MAX + 1));
    let (mut bits, mut have, mut bytes) = (0usize, 0, key.expose().iter());
    for i in 0..PASSPHRASE_WORDS {
        while have < BITS {
            bits = (bits << 8 | usize::from(*bytes.next().expect("110 bits of 256"))) & 0xff_ffff;
            have += 8;
        }
        have -= BITS;
        text.extend_from_slice(list[bits >> have & 0x7ff].as_bytes());
        text.push(if i + 1 == PASSPHRASE_WORDS { b'\n' } else { b' ' });
    }
    SecretBytes::new(text)
}

/// The key from its words.
///
/// # Errors
/// [`RecoveryError`].
pub fn parse(text: &[u8]) -> Result<Secret<32>, RecoveryError> {
    let lower = Zeroizing::new(text.to_ascii_lowercase());
    // Everything but letters separates: white space, and the numbers and dots of a printed list.
    let found = || lower.split(|b| !b.is_ascii_lowercase()).filter(|w| !w.is_empty());
    let count = found().count();
    if count != WORDS {
        return Err(RecoveryError::Count { found: count });
    }
    let mut clean = Zeroizing::new(String::with_capacity(lower.len()));
    for (i, word) in found().enumerate() {
        let word = std::str::from_utf8(word).ok().and_then(whole).ok_or(RecoveryError::Word { position: i + 1 })?;
        if i > 0 {
            clean.push(' ');
        }
        clean.push_str(word);
    }
    let mut mnemonic =
        Mnemonic::parse_in_normalized(bip39::Language::English, &clean).map_err(|_| RecoveryError::Checksum)?;
    let (mut entropy, len) = mnemonic.to_entropy_array();
    let key = Secret::from_slice(&entropy[..len]).ok_or(RecoveryError::Count { found: len });
    entropy.zeroize();
    mnemonic.zeroize();
    key
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(key: &Secret<32>) -> String {
        String::from_utf8(words(key).expose().to_vec()).unwrap()
    }

    /// The vectors of BIP-39 (trezor/python-mnemonic, vectors.json) with 256 bits.
    #[test]
    fn published_vectors() {
        let last = "abandon ".repeat(23) + "art";
        assert_eq!(text(&Secret::new(&mut [0; 32])), last);
        assert_eq!(text(&Secret::new(&mut [0xff; 32])), "zoo ".repeat(23) + "vote");
        assert_eq!(parse(last.as_bytes()).unwrap().expose(), &[0; 32]);
        let legal = "legal winner thank year wave sausage worth useful ".repeat(2)
            + "legal winner thank year wave sausage worth title";
        assert_eq!(text(&Secret::new(&mut [0x7f; 32])), legal);
    }

    #[test]
    fn written_in_other_ways() {
        let key = Secret::new(&mut [0x7f; 32]);
        let plain = text(&key);
        let numbered: String = plain.split(' ').enumerate().map(|(i, w)| format!("{:>2}. {}\r\n", i + 1, w)).collect();
        let short: Vec<_> = plain.split(' ').map(|w| &w[..w.len().min(4)]).collect();
        for other in [plain.to_uppercase(), numbered, short.join("\n"), format!("  {plain}  \n")] {
            assert_eq!(parse(other.as_bytes()).unwrap().expose(), &[0x7f; 32], "{other}");
        }
    }

    #[test]
    fn a_sheet_reads_as_its_key() {
        let sheet = sheet(&Secret::new(&mut [0x7f; 32]));
        let text = std::str::from_utf8(sheet.expose()).unwrap();
        assert_eq!(text.lines().next().unwrap(), " 1. legal      2. winner     3. thank      4. year");
        assert_eq!(text.lines().last().unwrap(), "21. wave      22. sausage   23. worth     24. title");
        assert_eq!(text.lines().count(), 6);
        assert_eq!(parse(text.as_bytes()).unwrap().expose(), &[0x7f; 32]);
    }

    #[test]
    fn passphrases_take_eleven_bits_a_word() {
        let text = |key: &mut [u8; 32]| String::from_utf8(passphrase_of(&Secret::new(key)).expose().to_vec()).unwrap();
        assert_eq!(text(&mut [0; 32]), "abandon ".repeat(9) + "abandon\n");
        assert_eq!(text(&mut [0xff; 32]), "zoo ".repeat(9) + "zoo\n");
        // The first ten words of the recovery key of the same bytes: both read them from the left.
        let mut bytes = [0u8; 32];
        bytes.iter_mut().enumerate().for_each(|(i, b)| *b = (i * 37 + 11) as u8);
        let all = super::tests::text(&Secret::new(&mut bytes.clone()));
        assert_eq!(text(&mut bytes).trim_end(), all.split(' ').take(10).collect::<Vec<_>>().join(" "));
    }

    #[test]
    fn mistakes_are_told_apart() {
        let good = text(&Secret::new(&mut [0x7f; 32]));
        let err = |text: &str| parse(text.as_bytes()).unwrap_err();
        assert_eq!(err(""), RecoveryError::Count { found: 0 });
        assert_eq!(err(good.rsplit_once(' ').unwrap().0), RecoveryError::Count { found: 23 });
        assert_eq!(err(&(good.clone() + " zoo")), RecoveryError::Count { found: 25 });
        assert_eq!(err(&good.replacen("winner", "winnner", 1)), RecoveryError::Word { position: 2 });
        assert_eq!(err(&good.replacen("legal winner", "winner legal", 1)), RecoveryError::Checksum);
        assert_eq!(err(&good.replacen("title", "zoo", 1)), RecoveryError::Checksum);
        assert!(parse(&[0xff; 400]).is_err());
        assert!(!err("correct horse battery staple").to_string().contains("horse"));
    }

    proptest! {
        #[test]
        fn every_key_comes_back(mut bytes in any::<[u8; 32]>()) {
            let expected = bytes;
            let written = words(&Secret::new(&mut bytes));
            let read = parse(written.expose()).unwrap();
            prop_assert_eq!(read.expose(), &expected);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
        }
    }
}
