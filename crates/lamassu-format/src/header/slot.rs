//! Key slots, the sealed keychain and the MAC: the part that vault headers and zone files share.

use super::{Argon2Params, HeaderError, VaultId};
use crate::words;

/// How the bytes of a source become a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotKind {
    /// Argon2id over a passphrase.
    Passphrase,
    /// 32 bytes as they are.
    Raw,
    /// 32 bytes as 64 hex digits.
    Hex,
    /// 32 bytes as 24 words to write down (BIP-39, English).
    Recovery,
    /// The same 32 bytes, shared between several holders (§4b).
    RecoveryShares,
    /// 32 bytes that a PKCS #11 token unwraps. The slot holds them sealed by the token's key.
    Pkcs11,
    /// 32 bytes that a dataset's parent vault unseals. It has no source of its own.
    Parent,
}

words! {
    /// Every kind.
    SlotKind {
        Passphrase = "passphrase",
        Raw = "raw",
        Hex = "hex",
        Recovery = "recovery",
        RecoveryShares = "recovery-shares",
        Pkcs11 = "pkcs11",
        Parent = "parent",
    }
}

/// How a token's key sealed a slot's secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenMechanism {
    /// RSA-OAEP (RFC 8017) with SHA-256 and MGF1 with SHA-256, empty label.
    RsaOaepSha256,
    /// RSA-OAEP with SHA-1 and MGF1 with SHA-1, empty label, for tokens without SHA-256. OAEP needs no collision
    /// resistance.
    RsaOaepSha1,
    /// AES-GCM: nonce of 12 bytes ‖ ciphertext ‖ tag of 16, no associated data.
    AesGcm,
}

words! {
    /// Every mechanism, preferred first.
    TokenMechanism {
        RsaOaepSha256 = "rsa-oaep-sha256",
        RsaOaepSha1 = "rsa-oaep-sha1",
        AesGcm = "aes-gcm",
    }
}

/// How a token's key signed that it made a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenSigning {
    /// RSASSA-PSS (RFC 8017) with SHA-256, MGF1 with SHA-256, and a salt of 32 bytes.
    RsaPssSha256,
    /// RSASSA-PKCS1-v1_5 with SHA-256, for tokens without PSS.
    RsaPkcs1Sha256,
}

words! {
    /// Every mechanism, preferred first.
    TokenSigning {
        RsaPssSha256 = "rsa-pss-sha256",
        RsaPkcs1Sha256 = "rsa-pkcs1-sha256",
    }
}

/// The signature of a token's RSA key over a slot: without it, anyone who knows the public key could have sealed the
/// secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenSignature {
    /// how
    pub mechanism: TokenSigning,
    /// 1 to [`TokenSealed::MAX`] bytes
    pub value: Vec<u8>,
}

/// A slot's secret, sealed by a key that never leaves its token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenSealed {
    /// how
    pub mechanism: TokenMechanism,
    /// what the token unseals: 1 to [`TokenSealed::MAX`] bytes
    pub sealed: Vec<u8>,
    /// where the key is RSA, and may sign
    pub signature: Option<TokenSignature>,
}

impl TokenSealed {
    /// Most bytes: RSA with 16384 bits.
    pub const MAX: usize = 2048;
}

/// Bytes of the sealed record that a parent slot holds: its head and 32 bytes.
pub const PARENT_RECORD_LEN: usize = 88;

/// A key slot: the file key, wrapped by one source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// 1 to 2³²−1, never reused in this header
    pub id: u32,
    /// how the source's bytes become a secret
    pub kind: SlotKind,
    /// shown to the user; see [`check_label`]
    pub label: String,
    /// seconds since 1970
    pub created: u64,
    /// random
    pub salt: [u8; 32],
    /// present exactly for [`SlotKind::Passphrase`]
    pub argon2: Option<Argon2Params>,
    /// present exactly for [`SlotKind::Pkcs11`]
    pub token: Option<TokenSealed>,
    /// present exactly for [`SlotKind::Parent`]: the secret, in a record sealed under a K_out of the parent vault
    pub parent: Option<[u8; PARENT_RECORD_LEN]>,
    /// what its holder may do; [`Role::Administrator`] if the header has no `admin`
    pub role: Role,
    /// seconds since 1970 from which the slot should be replaced: warns, refuses nothing
    pub expires: Option<u64>,
    /// random
    pub nonce: [u8; 24],
    /// tag ‖ ciphertext of the file key, followed by the signing seed in an administrator's slot of a header with
    /// `admin`, and only there: 48 or 80 bytes
    pub wrapped: Vec<u8>,
}

/// What the holder of a slot may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Open the vault and change its header.
    Administrator,
    /// Open the vault.
    Use,
}

/// An administrator's Ed25519 public key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey(pub [u8; 32]);

/// The administrator's key, and its signature over the header. `lamassu-keys` verifies it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admin {
    /// the key
    pub public: PublicKey,
    /// over [`super::Header::signature_input`]
    pub signature: [u8; 64],
    /// the keys before it, the oldest first; at most [`Admin::BEFORE_MAX`]
    pub before: Vec<Predecessor>,
}

impl Admin {
    /// Most earlier keys of a header.
    pub const BEFORE_MAX: usize = 64;
}

/// An earlier key of the administrator, which signed its successor. `lamassu-keys` verifies it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Predecessor {
    /// the key
    pub public: PublicKey,
    /// over the header's id and the public key of its successor
    pub signature: [u8; 64],
}

/// A vault's administrator, as a zone file pins it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminPin {
    /// id of the vault
    pub vault: VaultId,
    /// the administrator's key
    pub admin: PublicKey,
}

/// The head of a history: SHA-256 of its last entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct HistoryHead(pub [u8; 32]);

/// How long the history was when the header was last changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HistoryMark {
    /// entries; at least one
    pub count: u64,
    /// the last of them
    pub head: HistoryHead,
}

/// The keys of a vault were destroyed: nothing opens its header any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destroyed {
    /// seconds since 1970
    pub time: u64,
    /// the id of the receipt
    pub receipt: [u8; 16],
}

/// The keychain under the file key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealedKeychain {
    /// random
    pub nonce: [u8; 24],
    /// tag ‖ ciphertext
    pub sealed: Vec<u8>,
    /// whether an epoch of it is oblivious: a feature that a reader must know
    pub oblivious: bool,
}

/// Slots, keychain and MAC of a header, and the id they are bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyArea {
    /// id of the vault or zone
    pub id: [u8; 16],
    /// the id the next slot gets: greater than that of any slot this header ever had
    pub next_slot: u32,
    /// 1 to [`super::SLOTS_MAX`] slots with distinct ids; none exactly if the keys were destroyed
    pub slots: Vec<Slot>,
    /// the keychain
    pub keychain: SealedKeychain,
    /// the key that may change the header; only vaults have it
    pub admin: Option<Admin>,
    /// how long the history was; only vaults have it
    pub history: Option<HistoryMark>,
    /// over everything else
    pub mac: [u8; 32],
}

impl KeyArea {
    /// The slot with an id.
    pub fn slot(&self, id: u32) -> Option<&Slot> {
        self.slots.iter().find(|s| s.id == id)
    }

    /// The work of trying a passphrase on every slot, in KiB of memory times passes.
    pub fn argon2_work(&self) -> u64 {
        self.slots.iter().filter_map(|s| s.argon2).map(|cost| cost.work()).sum()
    }
}

/// Checks a slot's label: at most 255 bytes, no control characters (Unicode category Cc). So it can be printed, and has
/// one canonical form.
///
/// # Errors
/// [`HeaderError::Member`].
pub fn check_label(label: &str) -> Result<(), HeaderError> {
    if label.len() > super::LABEL_MAX || label.chars().any(char::is_control) {
        return Err(HeaderError::Member { member: "label", rule: "at most 255 bytes without control characters" });
    }
    Ok(())
}
