//! The policy under which a process opens vaults: whose signature headers must carry, which primitives are allowed, how
//! much memory a slot gets. A front-end makes one [`Policy`] and passes it to everything that opens a vault.

use crate::anchors::Anchors;
use crate::notes::Notes;
use crate::pins::Pins;
use crate::{Error, Result};
use lamassu_crypto::selftest;
use lamassu_format::Suite;
use lamassu_format::header::SlotKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Knowledge that only the surrounding process has.
pub trait Surroundings: Send + Sync {
    /// Where on this machine the vault in `dir` is open for writing, if known.
    fn writer_of(&self, dir: &Path) -> Option<PathBuf>;
    /// Whether to give up waiting.
    fn is_interrupted(&self) -> bool;
    /// Whether this process can still make connections.
    fn has_network(&self) -> bool;
    /// From now on a first request to stop does not end this process: it ends when its work is done.
    fn go_through(&self);
}

/// A process that knows no other writer and is never interrupted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alone;

impl Surroundings for Alone {
    fn writer_of(&self, _: &Path) -> Option<PathBuf> {
        None
    }

    fn is_interrupted(&self) -> bool {
        false
    }

    fn has_network(&self) -> bool {
        true
    }

    fn go_through(&self) {}
}

/// The rules for opening vaults. Cheap to clone.
#[derive(Clone)]
pub struct Policy {
    approved_only: bool,
    any_memory: bool,
    /// the keys that must have signed headers
    pub pins: Pins,
    /// the notes on slots
    pub notes: Notes,
    /// the anchors
    pub anchors: Anchors,
    pub(crate) surroundings: Arc<dyn Surroundings>,
}

impl std::fmt::Debug for Policy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Policy")
            .field("approved_only", &self.approved_only)
            .field("any_memory", &self.any_memory)
            .field("pins", &self.pins)
            .finish_non_exhaustive()
    }
}

impl Default for Policy {
    /// Everything is allowed, nothing is pinned, nothing is noted.
    fn default() -> Self {
        Policy {
            approved_only: false,
            any_memory: false,
            pins: Pins::default(),
            notes: Notes::default(),
            anchors: Anchors::default(),
            surroundings: Arc::new(Alone),
        }
    }
}

impl Policy {
    /// The same with these pins and notes.
    pub fn with(self, pins: Pins, notes: Notes) -> Policy {
        Policy { pins, notes, ..self }
    }

    /// Whether only approved primitives are allowed.
    pub fn is_approved_only(&self) -> bool {
        self.approved_only
    }

    /// The same with these anchors.
    pub fn anchored_by(self, anchors: Anchors) -> Policy {
        Policy { anchors, ..self }
    }

    /// The same in these surroundings.
    pub fn within(self, surroundings: Arc<dyn Surroundings>) -> Policy {
        Policy { surroundings, ..self }
    }

    /// The same; with `any`, a passphrase slot may have more than half of the memory that is free.
    pub fn with_any_memory(self, any: bool) -> Policy {
        Policy { any_memory: any, ..self }
    }

    /// Whether a slot gets all the memory that it asks for.
    pub fn allows_any_memory(&self) -> bool {
        self.any_memory
    }

    /// The same, with approved primitives only (FIPS). Every known-answer test runs on the kernel that this process
    /// uses. [`lamassu_crypto::Provider::APPROVED`] must have been installed before.
    ///
    /// # Errors
    /// [`Error::SelfTest`].
    pub fn approved_only(self) -> Result<Policy> {
        selftest::run_approved()?;
        Ok(Policy { approved_only: true, ..self })
    }

    /// Called before a header is replaced, when nothing is asked any more. An old header that is not overwritten when
    /// the process ends opens with the keys of removed slots.
    ///
    /// # Errors
    /// [`Error::Interrupted`]: nothing was changed.
    pub fn go_through(&self) -> Result<()> {
        self.surroundings.go_through();
        if self.surroundings.is_interrupted() { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// Refuses a suite whose ciphers, hashes or derivation no NIST publication approves.
    ///
    /// # Errors
    /// [`Error::NotApproved`].
    pub fn check_suite(&self, suite: Suite) -> Result<()> {
        match lamassu_crypto::unapproved(suite) {
            Some(why) if self.approved_only => Err(Error::NotApproved { why }),
            _ => Ok(()),
        }
    }

    /// Refuses a vault that seals pages under nonces that SP 800-38D does not allow: those of convergent pages are
    /// computed from the content.
    ///
    /// # Errors
    /// [`Error::NotApproved`].
    pub fn check_small_files(&self, convergent: bool) -> Result<()> {
        let why = "GCM nonces of convergent small files are computed from content, which SP 800-38D does not take; \
            use --small-files random";
        if convergent && self.approved_only { Err(Error::NotApproved { why }) } else { Ok(()) }
    }

    /// Refuses keys that depend on a server's function, which uses a group that is not in any NIST publication.
    ///
    /// # Errors
    /// [`Error::NotApproved`].
    pub fn check_oblivious(&self, is_oblivious: bool) -> Result<()> {
        let why = "oblivious keys are computed in ristretto255 (RFC 9497), which SP 800-186 does not have; use a zone \
            without --oblivious";
        if is_oblivious && self.approved_only { Err(Error::NotApproved { why }) } else { Ok(()) }
    }

    /// Refuses slots that use Argon2id.
    ///
    /// # Errors
    /// [`Error::NotApproved`].
    pub fn check_kind(&self, kind: SlotKind) -> Result<()> {
        let why = "passphrases go through Argon2id, which is not approved (SP 800-132 knows PBKDF2 alone, which this \
            program does not have); use a raw, hex, recovery, kmip: or pkcs11: key";
        match kind {
            SlotKind::Passphrase if self.approved_only => Err(Error::NotApproved { why }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lamassu_format::header::Header;
    use lamassu_keys::{NewSlot, NewZone, cost, create_zone};

    #[test]
    fn approved_only_refuses_the_rest() {
        let (all, some) = (Policy::default(), Policy { approved_only: true, ..Policy::default() });
        for suite in Suite::ALL {
            assert!(all.check_suite(suite).is_ok());
            assert_eq!(some.check_suite(suite).is_ok(), suite == Suite::Aes);
        }
        assert!(all.check_small_files(true).is_ok() && some.check_small_files(false).is_ok());
        assert!(some.check_small_files(true).is_err());
        assert!(all.check_oblivious(true).is_ok() && some.check_oblivious(false).is_ok());
        assert!(some.check_oblivious(true).is_err());
        assert!(all.check_kind(SlotKind::Passphrase).is_ok() && some.check_kind(SlotKind::Raw).is_ok());
        assert!(some.check_kind(SlotKind::Passphrase).is_err());
    }

    /// Whoever opens a zone alone, as the daemon of a mount does whose vault takes over its epochs.
    #[test]
    fn approved_only_opens_no_header_with_other_keys() -> Result<(), Box<dyn std::error::Error>> {
        let (all, some) = (Policy::default(), Policy { approved_only: true, ..Policy::default() });
        let material = crate::testing::key();
        let slot = NewSlot { material: &material, cost: cost::FALLBACK, label: "", created: 1 };
        for suite in Suite::ALL {
            let new = NewZone { suite, block_size: 4096, compression: None, outer: true, created: 1 };
            let (mut zone, _) = create_zone(&new, &slot)?;
            assert!(all.try_slots(&zone, &material, None).is_ok());
            assert_eq!(some.try_slots(&zone, &material, None).is_ok(), suite == Suite::Aes);
            zone.keys_mut().keychain.oblivious = true;
            assert!(matches!(some.try_slots(&zone, &material, None), Err(Error::NotApproved { .. })));
        }
        Ok(())
    }
}
