//! The profile of a file (§9): how its blocks are protected, under which kind of key. Directories have one for the
//! files that are made in them (§6).
//!
//! A profile is sealed where it holds: in every page of a file, in the record of a directory. A reader goes by what is
//! sealed and by nothing else, so that a store cannot say that a file is less protected than it is.

use crate::{Domain, Suite, words};

/// What a file's blocks are protected from.
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
    /// Those that follow from the block, as far as the vault's domain reaches.
    #[default]
    Convergent,
    /// The file's secret id goes into them too: no other file has equal blocks.
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
}

/// Why a vault has no files of a profile.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone, Copy)]
pub enum ProfileError {
    /// There is no key.
    #[error("blocks that are stored plain have no key: leave the kind of key out, or protect with both or encrypt")]
    PlainKey,
    /// The KDF of the suite takes no salt.
    #[error("suite {} derives its keys without a salt, so it has no random ones", .0.name())]
    NoSalt(Suite),
    /// The cipher of the suite lets chosen bits be flipped.
    #[error("the cipher of suite {} is malleable, so it does not encrypt without verifying: use both", .0.name())]
    Malleable(Suite),
}

impl Profile {
    /// What files have unless another one is chosen.
    pub const DEFAULT: Profile = Profile { protection: Protection::Both, key: KeyKind::Convergent };
    /// Bits of its number.
    pub const BITS: u32 = 3;
    const PLAIN: u8 = 1;
    const UNVERIFIED: u8 = 2;
    const RANDOM: u8 = 4;

    /// From its parts.
    ///
    /// # Errors
    /// [`ProfileError::PlainKey`].
    pub const fn new(protection: Protection, key: KeyKind) -> Result<Profile, ProfileError> {
        match (protection.is_plain(), key) {
            (true, KeyKind::Random) => Err(ProfileError::PlainKey),
            (_, key) => Ok(Profile { protection, key }),
        }
    }

    /// Whether a vault of this suite can have files like that.
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
        Ok(())
    }

    /// What blocks are protected from.
    pub const fn protection(self) -> Protection {
        self.protection
    }

    /// Which keys they have.
    pub const fn key(self) -> KeyKind {
        self.key
    }

    /// Whether it is the default.
    pub fn is_default(self) -> bool {
        self == Profile::DEFAULT
    }

    /// What goes into the keys of its blocks, in a vault of a domain.
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
        plain | unverified | if matches!(self.key, KeyKind::Random) { Self::RANDOM } else { 0 }
    }

    /// The profile of a number; `None`: version 1 has none.
    pub fn of_number(number: u8) -> Option<Profile> {
        if number >> Self::BITS != 0 {
            return None;
        }
        let protection = Protection::of(number & Self::PLAIN != 0, number & Self::UNVERIFIED != 0);
        let key = if number & Self::RANDOM != 0 { KeyKind::Random } else { KeyKind::Convergent };
        Profile::new(protection, key).ok()
    }
}

/// `both, convergent` and so on.
impl std::fmt::Display for Profile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.protection.is_plain() {
            true => f.write_str(self.protection.name()),
            false => write!(f, "{}, {}", self.protection.name(), self.key.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_profile_has_a_number_of_its_own_and_no_other_number_is_one() {
        let made: Vec<Profile> = Protection::ALL
            .iter()
            .flat_map(|protection| KeyKind::ALL.map(|key| Profile::new(*protection, key)))
            .flatten()
            .collect();
        assert_eq!(made.len(), 6, "plain blocks have no keys");
        let of_numbers: Vec<Profile> = (0..=u8::MAX).filter_map(Profile::of_number).collect();
        assert_eq!(of_numbers.len(), made.len());
        assert!(made.iter().all(|profile| Profile::of_number(profile.number()) == Some(*profile)));
        assert!(Profile::default().is_default() && Profile::default().number() == 0);
        assert_eq!(Profile::new(Protection::None, KeyKind::Random), Err(ProfileError::PlainKey));
    }

    #[test]
    fn a_suite_allows_what_it_can_keep() {
        let of = |protection, key| Profile::new(protection, key).unwrap();
        let random = of(Protection::Both, KeyKind::Random);
        let encrypt = of(Protection::Encrypt, KeyKind::Convergent);
        for suite in Suite::ALL {
            assert_eq!(random.check(suite).is_ok(), suite.takes_salt());
            assert_eq!(encrypt.check(suite).is_ok(), !suite.is_malleable());
            assert!(
                of(Protection::None, KeyKind::Convergent).check(suite).is_ok() && Profile::DEFAULT.check(suite).is_ok()
            );
        }
        assert_eq!((random.domain(Domain::Zone), random.domain(Domain::None)), (Domain::File, Domain::None));
        assert_eq!((encrypt.domain(Domain::Family), encrypt.domain(Domain::File)), (Domain::Family, Domain::File));
    }
}
