//! The profile of a file (§9): how its blocks are protected, under which kind of key, by which cipher and hash.
//! Directories have one for the files that are made in them (§6).
//!
//! A profile is sealed: in every page of a file, and in the record of a directory. A reader goes only by the sealed
//! profile, so a store cannot make a file look less protected than it is.

use crate::method::MethodError;
use crate::{Cipher, Domain, Hash, Method, Suite, words};

/// How a file's blocks are protected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Protection {
    /// Encrypted, and hashed again on each read.
    #[default]
    Both,
    /// Encrypted; reads do not hash.
    Encrypt,
    /// Stored as they are, and hashed again on each read.
    Integrity,
    /// Stored as they are; reads do not hash.
    None,
}

words! {
    /// Every protection, the strongest first.
    Protection { Both = "both", Encrypt = "encrypt", Integrity = "integrity", None = "none" }
}

impl Protection {
    /// Whether blocks are stored as they are.
    pub const fn is_plain(self) -> bool {
        matches!(self, Protection::Integrity | Protection::None)
    }

    /// Whether reads leave out the hash of a block.
    pub const fn is_unverified(self) -> bool {
        matches!(self, Protection::Encrypt | Protection::None)
    }

    const fn of(is_plain: bool, is_unverified: bool) -> Protection {
        match (is_plain, is_unverified) {
            (false, false) => Protection::Both,
            (false, true) => Protection::Encrypt,
            (true, false) => Protection::Integrity,
            (true, true) => Protection::None,
        }
    }
}

/// Which keys a file's blocks have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KeyKind {
    /// Keys that follow from the block, within the vault's domain.
    #[default]
    Convergent,
    /// Keys that also depend on the file's secret id: no other file has equal blocks.
    Random,
}

words! {
    /// Both kinds.
    KeyKind { Convergent = "convergent", Random = "random" }
}

/// How the blocks of a file are protected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Profile {
    protection: Protection,
    key: KeyKind,
    method: Method,
}

/// Why a vault cannot have files of a profile.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone, Copy)]
pub enum ProfileError {
    /// Plain blocks have no key.
    #[error("blocks that are stored plain have no key: leave the kind of key out, or protect with both or encrypt")]
    PlainKey,
    /// Plain blocks have no cipher.
    #[error("blocks that are stored plain are not encrypted: leave the cipher out, or protect with both or encrypt")]
    PlainCipher,
    /// The suite has no such cipher or hash.
    #[error(transparent)]
    Method(#[from] MethodError),
    /// The KDF of the suite takes no salt.
    #[error("suite {} derives its keys without a salt, so it has no random ones", .0.name())]
    NoSalt(Suite),
    /// The cipher of the suite lets chosen bits be flipped.
    #[error("the cipher of suite {} is malleable, so it does not encrypt without verifying: use both", .0.name())]
    Malleable(Suite),
}

impl Profile {
    /// The profile of files unless another one is chosen.
    pub const DEFAULT: Profile =
        Profile { protection: Protection::Both, key: KeyKind::Convergent, method: Method::OF_SUITE };
    /// Bits of its number.
    pub const BITS: u32 = 5;
    const PLAIN: u8 = 1;
    const UNVERIFIED: u8 = 2;
    const RANDOM: u8 = 4;
    const SHORT_KEY: u8 = 8;
    const OTHER_HASH: u8 = 16;

    /// From its parts, with the suite's cipher and hash.
    ///
    /// # Errors
    /// [`ProfileError::PlainKey`].
    pub const fn new(protection: Protection, key: KeyKind) -> Result<Profile, ProfileError> {
        match (protection.is_plain(), key) {
            (true, KeyKind::Random) => Err(ProfileError::PlainKey),
            (_, key) => Ok(Profile { protection, key, method: Method::OF_SUITE }),
        }
    }

    /// The same by another method.
    ///
    /// # Errors
    /// [`ProfileError::PlainCipher`].
    pub const fn by(self, method: Method) -> Result<Profile, ProfileError> {
        if self.protection.is_plain() && method.has_short_key() {
            return Err(ProfileError::PlainCipher);
        }
        Ok(Profile { method, ..self })
    }

    /// Whether a vault of this suite can have files of this profile.
    ///
    /// # Errors
    /// Why not.
    pub const fn check(self, suite: Suite) -> Result<(), ProfileError> {
        if matches!(self.key, KeyKind::Random) && !suite.takes_salt() {
            return Err(ProfileError::NoSalt(suite));
        }
        if matches!(self.protection, Protection::Encrypt) && suite.is_malleable() {
            return Err(ProfileError::Malleable(suite));
        }
        match self.method.check(suite) {
            Ok(()) => Ok(()),
            Err(error) => Err(ProfileError::Method(error)),
        }
    }

    /// How blocks are protected.
    pub const fn protection(self) -> Protection {
        self.protection
    }

    /// Which keys they have.
    pub const fn key(self) -> KeyKind {
        self.key
    }

    /// The difference of their cipher and hash from the suite's.
    pub const fn method(self) -> Method {
        self.method
    }

    /// Whether it is the default.
    pub fn is_default(self) -> bool {
        self == Profile::DEFAULT
    }

    /// The domain whose salt goes into the keys of its blocks, in a vault of domain `of_vault`.
    pub const fn domain(self, of_vault: Domain) -> Domain {
        match (self.key, of_vault) {
            (KeyKind::Random, Domain::Zone | Domain::Family) => Domain::File,
            (KeyKind::Random | KeyKind::Convergent, domain) => domain,
        }
    }

    /// Its number in pages and records; 0: the default.
    pub const fn number(self) -> u8 {
        let plain = if self.protection.is_plain() { Self::PLAIN } else { 0 };
        let unverified = if self.protection.is_unverified() { Self::UNVERIFIED } else { 0 };
        let random = if matches!(self.key, KeyKind::Random) { Self::RANDOM } else { 0 };
        let short_key = if self.method.has_short_key() { Self::SHORT_KEY } else { 0 };
        let other_hash = if self.method.has_other_hash() { Self::OTHER_HASH } else { 0 };
        plain | unverified | random | short_key | other_hash
    }

    /// The profile of a number; `None`: version 1 has none.
    pub fn of_number(number: u8) -> Option<Profile> {
        if number >> Self::BITS != 0 {
            return None;
        }
        let protection = Protection::of(number & Self::PLAIN != 0, number & Self::UNVERIFIED != 0);
        let key = if number & Self::RANDOM != 0 { KeyKind::Random } else { KeyKind::Convergent };
        let method = Method::new(number & Self::SHORT_KEY != 0, number & Self::OTHER_HASH != 0);
        Profile::new(protection, key).and_then(|profile| profile.by(method)).ok()
    }

    /// For people, in a vault of a suite: `both, convergent` and so on, and the cipher and hash that are not the
    /// suite's.
    pub fn named(self, suite: Suite) -> Named {
        Named { profile: self, suite }
    }
}

/// The parts of a profile that are chosen; the others stay as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// How blocks are protected.
    pub protection: Option<Protection>,
    /// Which keys they have.
    pub key: Option<KeyKind>,
    /// How they are encrypted.
    pub cipher: Option<Cipher>,
    /// How they are hashed.
    pub hash: Option<Hash>,
}

impl Choice {
    /// All of a profile, in a vault of that suite.
    pub fn of_all(profile: Profile, suite: Suite) -> Choice {
        let keyed = !profile.protection.is_plain();
        Choice {
            protection: Some(profile.protection),
            key: keyed.then_some(profile.key),
            cipher: keyed.then(|| profile.method.cipher(suite)),
            hash: Some(profile.method.hash(suite)),
        }
    }

    /// A profile with the chosen parts, and the others from `before`, in a vault of that suite.
    ///
    /// # Errors
    /// [`ProfileError`].
    pub fn over(self, before: Profile, suite: Suite) -> Result<Profile, ProfileError> {
        let protection = self.protection.unwrap_or(before.protection);
        // Plain blocks have no keys and no cipher, so that a file which had others than the default loses them.
        let kept = if protection.is_plain() { KeyKind::Convergent } else { before.key };
        let mut method = before.method;
        if protection.is_plain() {
            method = method.without_cipher();
        }
        if let Some(cipher) = self.cipher {
            method = method.with_cipher(suite, cipher)?;
        }
        if let Some(hash) = self.hash {
            method = method.with_hash(suite, hash)?;
        }
        let profile = Profile::new(protection, self.key.unwrap_or(kept))?.by(method)?;
        profile.check(suite)?;
        Ok(profile)
    }
}

/// A profile as [`Profile::named`] writes it.
#[derive(Clone, Copy, Debug)]
pub struct Named {
    profile: Profile,
    suite: Suite,
}

impl std::fmt::Display for Named {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Named { profile: Profile { protection, key, method }, suite } = *self;
        f.write_str(protection.name())?;
        if !protection.is_plain() {
            write!(f, ", {}", key.name())?;
        }
        if method.has_short_key() {
            write!(f, ", {}", method.cipher(suite).name())?;
        }
        if method.has_other_hash() {
            write!(f, ", {}", method.hash(suite).name())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_profile_has_a_number_of_its_own_and_no_other_number_is_one() {
        let kinds =
            Protection::ALL.iter().flat_map(|protection| KeyKind::ALL.map(|key| Profile::new(*protection, key)));
        let made: Vec<Profile> =
            kinds.flatten().flat_map(|profile| Method::ALL.map(|method| profile.by(method))).flatten().collect();
        assert_eq!(made.len(), 4 * 4 + 2 * 2, "plain blocks have no keys and no cipher");
        let of_numbers: Vec<Profile> = (0..=u8::MAX).filter_map(Profile::of_number).collect();
        assert_eq!(of_numbers.len(), made.len());
        assert!(made.iter().all(|profile| Profile::of_number(profile.number()) == Some(*profile)));
        assert!(Profile::default().is_default() && Profile::default().number() == 0);
        assert_eq!(Profile::new(Protection::None, KeyKind::Random), Err(ProfileError::PlainKey));
        let none = Profile::new(Protection::None, KeyKind::Convergent).unwrap();
        assert_eq!(none.by(Method::new(true, false)), Err(ProfileError::PlainCipher));
    }

    #[test]
    fn a_suite_allows_what_it_can_keep() {
        let of = |protection, key| Profile::new(protection, key).unwrap();
        let random = of(Protection::Both, KeyKind::Random);
        let encrypt = of(Protection::Encrypt, KeyKind::Convergent);
        for suite in Suite::ALL {
            for method in Method::ALL {
                assert_eq!(
                    random.by(method).unwrap().check(suite).is_ok(),
                    random.check(suite).is_ok() && method.check(suite).is_ok()
                );
            }
            assert_eq!(random.check(suite).is_ok(), suite.takes_salt());
            assert_eq!(encrypt.check(suite).is_ok(), !suite.is_malleable());
            assert!(
                of(Protection::None, KeyKind::Convergent).check(suite).is_ok() && Profile::DEFAULT.check(suite).is_ok()
            );
        }
        assert_eq!((random.domain(Domain::Zone), random.domain(Domain::None)), (Domain::File, Domain::None));
        assert_eq!((encrypt.domain(Domain::Family), encrypt.domain(Domain::File)), (Domain::Family, Domain::File));
    }

    #[test]
    fn a_name_says_what_is_not_the_suites() {
        let names = |number: u8| {
            let profile = Profile::of_number(number).unwrap();
            [Suite::Aes, Suite::Blake3].map(|suite| profile.named(suite).to_string())
        };
        assert_eq!(names(0), ["both, convergent", "both, convergent"]);
        assert_eq!(names(8 | 16 | 4), ["both, random, aes-128, blake3", "both, random, aes-128, sha-256"]);
        assert_eq!(names(1 | 16), ["integrity, blake3", "integrity, sha-256"]);
    }
}
