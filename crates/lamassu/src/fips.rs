//! `--fips`: known answers before anything else, and approved primitives alone.
//!
//! What it claims and what not is in docs/threat-model.md. Nothing is looked at or run without it.

use crate::fault::Fault;
use anyhow::Result;
use lamassu_crypto::{Provider, selftest};
use lamassu_format::Suite;
use lamassu_format::header::SlotKind;
use std::sync::atomic::{AtomicBool, Ordering};

static REQUIRED: AtomicBool = AtomicBool::new(false);

/// Whether `--fips` was given.
pub fn is_required() -> bool {
    REQUIRED.load(Ordering::Relaxed)
}

/// Has the FIPS module compute what it can, where it is built in (feature `fips`), and runs every known-answer test on the kernel that this process uses, which
/// asks the module for its own verdict too; from now on only what is approved is allowed.
///
/// # Errors
/// [`selftest::SelfTestFailure`].
pub fn require() -> Result<()> {
    REQUIRED.store(true, Ordering::Relaxed);
    Provider::require_module();
    tracing::info!("{}", module());
    Ok(selftest::run()?)
}

/// What this build has of a FIPS module.
pub fn module() -> &'static str {
    match Provider::is_module_built_in() {
        true => "FIPS module: AWS-LC, used with --fips",
        false => "FIPS module: none in this build (feature `fips`); --fips uses the program's own code",
    }
}

/// Refuses a suite whose ciphers, hashes or derivation no NIST publication approves.
///
/// # Errors
/// [`Fault::NotApproved`].
pub fn check_suite(suite: Suite) -> Result<(), Fault> {
    let why = match suite {
        _ if !is_required() => return Ok(()),
        Suite::Aes => return Ok(()),
        Suite::Paper => "suite paper derives keys by AES-256-ECB, which is no derivation of SP 800-108; use aes",
        Suite::Blake3 => "suite blake3 hashes with BLAKE3, which FIPS 180-4 and 202 do not know; use aes",
        Suite::Chacha => "suite chacha encrypts with ChaCha20, which is not approved; use aes",
    };
    Err(Fault::NotApproved { why })
}

/// Refuses a vault that seals pages under nonces that SP 800-38D does not take: those of convergent pages are computed from the content.
///
/// # Errors
/// [`Fault::NotApproved`].
pub fn check_small_files(convergent: bool) -> Result<(), Fault> {
    let why = "GCM nonces of convergent small files are computed from content, which SP 800-38D does not take; use --small-files random";
    if convergent && is_required() { Err(Fault::NotApproved { why }) } else { Ok(()) }
}

/// Refuses what goes through Argon2id.
///
/// # Errors
/// [`Fault::NotApproved`].
pub fn check_kind(kind: SlotKind) -> Result<(), Fault> {
    let why = "passphrases go through Argon2id, which is not approved (SP 800-132 knows PBKDF2 alone, which this program does not have); use a raw, hex, recovery, kmip: or pkcs11: key";
    match kind {
        SlotKind::Passphrase if is_required() => Err(Fault::NotApproved { why }),
        _ => Ok(()),
    }
}
