//! The members of the file, before their bounds are checked. Words and byte strings are strings here, so that each has
//! one spelling: `serde`'s own enums would also accept `{"aes": null}`.

use super::json::{OBLIVIOUS, Object, present};
use super::slot::{
    Admin, AdminPin, Destroyed, HistoryHead, HistoryMark, KeyArea, PARENT_RECORD_LEN, Predecessor, PublicKey, Role,
    SealedKeychain, Slot, SlotKind, TokenMechanism, TokenSealed, TokenSignature, TokenSigning, check_label,
};
use super::{Argon2Params, HeaderError, PINS_MAX, SLOTS_MAX, VaultId};
use crate::{Codec, CodecVersion, Compression, CompressionError, Suite};
use data_encoding::HEXLOWER;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WireVault {
    pub format: String,
    pub version: u64,
    pub features: Vec<String>,
    pub id: String,
    pub zone: String,
    pub suite: String,
    pub block_size: u64,
    pub reserved_slots: u64,
    pub names: String,
    pub name_max: u64,
    pub small_files: String,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    pub created: u64,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub datasets: Option<bool>,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub anchored: Option<bool>,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub integrity: Option<String>,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub cache: Option<String>,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub compression: Option<Object<WireCompression>>,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub destroyed: Option<Object<WireDestroyed>>,
    pub next_slot: u64,
    pub slots: Vec<Object<WireSlot>>,
    pub keychain: Object<WireKeychain>,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub admin: Option<Object<WireAdmin>>,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub history: Option<Object<WireHistory>>,
    pub mac: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WireZone {
    pub format: String,
    pub version: u64,
    pub features: Vec<String>,
    pub id: String,
    pub suite: String,
    pub block_size: u64,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub compression: Option<Object<WireCompression>>,
    pub created: u64,
    pub next_slot: u64,
    pub slots: Vec<Object<WireSlot>>,
    pub keychain: Object<WireKeychain>,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub pins: Option<Vec<Object<WirePin>>>,
    pub mac: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WireCompression {
    codec: String,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    level: Option<u64>,
    version: String,
    round: u64,
}

impl WireCompression {
    pub fn of(compression: Compression) -> Object<WireCompression> {
        let codec = compression.codec();
        Object(WireCompression {
            codec: codec.name().into(),
            level: codec.level().map(u64::from),
            version: compression.version().to_string(),
            round: compression.round().into(),
        })
    }

    /// The compression, if vaults of this suite and block size can have it.
    pub fn parse(&self, suite: Suite, block_size: u32) -> Result<Compression, HeaderError> {
        let member = |member, rule| HeaderError::Member { member, rule };
        let codec = Codec::of(&self.codec, self.level);
        let codec = codec.ok_or(member("compression", "\"lz4\", or \"zstd\" with a level from 1 to 19"))?;
        let version = self.version.parse::<CodecVersion>();
        let version = version.map_err(|_| member("compression", "a version of three numbers"))?;
        let round = u32::try_from(self.round).unwrap_or(u32::MAX);
        Compression::new(codec, version, round, (suite, block_size)).map_err(|error| match error {
            CompressionError::Paper => member("compression", "left out in suite \"paper\""),
            CompressionError::Round => member("compression", "a round that is a power of two from 512 to half a block"),
        })
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WireSlot {
    id: u64,
    kind: String,
    label: String,
    created: u64,
    salt: String,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    argon2: Option<Object<WireArgon2>>,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    token: Option<Object<WireToken>>,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    role: Option<String>,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    expires: Option<u64>,
    nonce: String,
    wrapped: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WireArgon2 {
    memory_kib: u64,
    passes: u64,
    lanes: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WireToken {
    mechanism: String,
    sealed: String,
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    signature: Option<Object<WireTokenSignature>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireTokenSignature {
    mechanism: String,
    value: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WireKeychain {
    nonce: String,
    sealed: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WireAdmin {
    public: String,
    signature: String,
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    before: Option<Vec<Object<WirePredecessor>>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WirePredecessor {
    public: String,
    signature: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WirePin {
    vault: String,
    admin: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WireHistory {
    count: u64,
    head: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WireDestroyed {
    time: u64,
    receipt: String,
}

/// Which features a header with this keychain has.
pub fn features(keychain: &SealedKeychain) -> Vec<String> {
    keychain.oblivious.then(|| OBLIVIOUS.to_owned()).into_iter().collect()
}

pub fn hex(bytes: &[u8]) -> String {
    HEXLOWER.encode(bytes)
}

/// N bytes of lower-case hex.
pub fn bytes<const N: usize>(text: &str, member: &'static str) -> Result<[u8; N], HeaderError> {
    let rule = match N {
        16 => "16 bytes in lower-case hex",
        24 => "24 bytes in lower-case hex",
        32 => "32 bytes in lower-case hex",
        64 => "64 bytes in lower-case hex",
        _ => "lower-case hex of the right length",
    };
    let fail = HeaderError::Member { member, rule };
    let mut out = [0u8; N];
    if text.len() != 2 * N {
        return Err(fail);
    }
    HEXLOWER.decode_mut(text.as_bytes(), &mut out).map_err(|_| fail)?;
    Ok(out)
}

pub fn suite(name: &str) -> Result<Suite, HeaderError> {
    Suite::from_name(name)
        .ok_or(HeaderError::Member { member: "suite", rule: "\"aes\", \"paper\", \"blake3\" or \"chacha\"" })
}

/// A non-zero 32-bit integer.
fn positive(n: u64, member: &'static str) -> Result<u32, HeaderError> {
    match u32::try_from(n) {
        Ok(n) if n > 0 => Ok(n),
        Ok(_) | Err(_) => Err(HeaderError::Member { member, rule: "1 to 4294967295" }),
    }
}

/// The members of a header that make a [`KeyArea`].
pub struct WireKeys<'a> {
    pub id: &'a str,
    pub next_slot: u64,
    pub slots: &'a [Object<WireSlot>],
    pub destroyed: bool,
    pub keychain: &'a WireKeychain,
    pub features: &'a [String],
    pub suite: Suite,
    pub admin: Option<&'a WireAdmin>,
    pub history: Option<&'a WireHistory>,
    pub mac: &'a str,
}

impl WireKeys<'_> {
    pub fn parse(&self) -> Result<KeyArea, HeaderError> {
        if self.destroyed != self.slots.is_empty() || self.slots.len() > SLOTS_MAX {
            let rule = "an array of 1 to 64 slots, or of none where the keys were destroyed";
            return Err(HeaderError::Member { member: "slots", rule });
        }
        let next_slot = positive(self.next_slot, "next_slot")?;
        let mut seen = HashSet::new();
        let mut slots: Vec<Slot> = Vec::with_capacity(self.slots.len());
        for Object(wire) in self.slots {
            let slot = wire.parse(self.admin.is_some())?;
            if !seen.insert(slot.id) {
                return Err(HeaderError::DuplicateSlot { id: slot.id });
            }
            if slot.id >= next_slot {
                return Err(HeaderError::Member { member: "next_slot", rule: "greater than the id of every slot" });
            }
            if slot.kind == SlotKind::Parent && slots.iter().any(|s| s.kind == SlotKind::Parent) {
                return Err(HeaderError::Member { member: "slots", rule: "an array with one parent slot at most" });
            }
            slots.push(slot);
        }
        let mut keychain = self.keychain.parse()?;
        keychain.oblivious = self.features.iter().any(|name| name == OBLIVIOUS);
        if keychain.oblivious && !self.suite.takes_salt() {
            let rule = "[] in suite \"paper\", whose keys are as published";
            return Err(HeaderError::Member { member: "features", rule });
        }
        let admin = self.admin.map(WireAdmin::parse).transpose()?;
        let history = self.history.map(WireHistory::parse).transpose()?;
        let mac = bytes(self.mac, "mac")?;
        let keys = KeyArea { id: bytes(self.id, "id")?, next_slot, slots, keychain, admin, history, mac };
        match keys.argon2_work() {
            asked if asked > Argon2Params::WORK_MAX => Err(HeaderError::Argon2Work { asked: asked.div_ceil(1 << 20) }),
            _ => Ok(keys),
        }
    }
}

impl WireKeychain {
    fn parse(&self) -> Result<SealedKeychain, HeaderError> {
        let rule = "a tag and ciphertext in lower-case hex";
        let fail = HeaderError::Member { member: "keychain.sealed", rule };
        let Ok(sealed) = HEXLOWER.decode(self.sealed.as_bytes()) else { return Err(fail) };
        if sealed.len() < 16 {
            return Err(fail);
        }
        Ok(SealedKeychain { nonce: bytes(&self.nonce, "keychain.nonce")?, sealed, oblivious: false })
    }

    pub fn of(keychain: &SealedKeychain) -> Object<Self> {
        Object(WireKeychain { nonce: hex(&keychain.nonce), sealed: hex(&keychain.sealed) })
    }
}

impl WireAdmin {
    fn parse(&self) -> Result<Admin, HeaderError> {
        let before = match &self.before {
            None => Vec::new(),
            Some(list) if (1..=Admin::BEFORE_MAX).contains(&list.len()) => {
                list.iter().map(|Object(wire)| wire.parse()).collect::<Result<_, _>>()?
            }
            Some(_) => return Err(HeaderError::Member { member: "admin.before", rule: "1 to 64 keys, or left out" }),
        };
        Ok(Admin {
            public: PublicKey(bytes(&self.public, "admin.public")?),
            signature: bytes(&self.signature, "admin.signature")?,
            before,
        })
    }

    pub fn of(admin: &Admin) -> Object<Self> {
        let before = admin.before.iter().map(|p| Object(WirePredecessor::of(p))).collect::<Vec<_>>();
        Object(WireAdmin {
            public: hex(&admin.public.0),
            signature: hex(&admin.signature),
            before: (!before.is_empty()).then_some(before),
        })
    }
}

impl WirePredecessor {
    fn parse(&self) -> Result<Predecessor, HeaderError> {
        Ok(Predecessor {
            public: PublicKey(bytes(&self.public, "admin.before.public")?),
            signature: bytes(&self.signature, "admin.before.signature")?,
        })
    }

    fn of(before: &Predecessor) -> Self {
        WirePredecessor { public: hex(&before.public.0), signature: hex(&before.signature) }
    }
}

impl WirePin {
    /// Pins of a zone file.
    pub fn parse_all(pins: Option<&Vec<Object<WirePin>>>) -> Result<Vec<AdminPin>, HeaderError> {
        let rule = "1 to 4096 pins of different vaults, or left out";
        let Some(pins) = pins else { return Ok(Vec::new()) };
        let mut seen = HashSet::new();
        let parsed = pins.iter().map(|Object(wire)| {
            Ok(AdminPin {
                vault: VaultId(bytes(&wire.vault, "pins.vault")?),
                admin: PublicKey(bytes(&wire.admin, "pins.admin")?),
            })
        });
        let parsed: Vec<AdminPin> = parsed.collect::<Result<_, HeaderError>>()?;
        match (1..=PINS_MAX).contains(&parsed.len()) && parsed.iter().all(|pin| seen.insert(pin.vault)) {
            true => Ok(parsed),
            false => Err(HeaderError::Member { member: "pins", rule }),
        }
    }

    pub fn of_all(pins: &[AdminPin]) -> Option<Vec<Object<Self>>> {
        let wire = |pin: &AdminPin| Object(WirePin { vault: pin.vault.to_string(), admin: hex(&pin.admin.0) });
        (!pins.is_empty()).then(|| pins.iter().map(wire).collect())
    }
}

impl WireDestroyed {
    pub fn parse(&self) -> Result<Destroyed, HeaderError> {
        Ok(Destroyed { time: self.time, receipt: bytes(&self.receipt, "destroyed.receipt")? })
    }

    pub fn of(destroyed: &Destroyed) -> Object<Self> {
        Object(WireDestroyed { time: destroyed.time, receipt: hex(&destroyed.receipt) })
    }
}

impl WireHistory {
    fn parse(&self) -> Result<HistoryMark, HeaderError> {
        if self.count == 0 {
            return Err(HeaderError::Member { member: "history.count", rule: "at least 1" });
        }
        Ok(HistoryMark { count: self.count, head: HistoryHead(bytes(&self.head, "history.head")?) })
    }

    pub fn of(mark: &HistoryMark) -> Object<Self> {
        Object(WireHistory { count: mark.count, head: hex(&mark.head.0) })
    }
}

impl WireSlot {
    /// `signed`: whether the header has an administrator.
    fn parse(&self, signed: bool) -> Result<Slot, HeaderError> {
        let rule = "\"passphrase\", \"raw\", \"hex\", \"recovery\", \"recovery-shares\", \"pkcs11\" or \"parent\"";
        let kind = SlotKind::from_name(&self.kind).ok_or(HeaderError::Member { member: "kind", rule })?;
        let argon2 = self.argon2.as_ref().map(|Object(wire)| wire.parse()).transpose()?;
        if argon2.is_some() != (kind == SlotKind::Passphrase) {
            return Err(HeaderError::Member { member: "argon2", rule: "present for a passphrase and only there" });
        }
        let token = self.token.as_ref().map(|Object(wire)| wire.parse()).transpose()?;
        if token.is_some() != (kind == SlotKind::Pkcs11) {
            return Err(HeaderError::Member { member: "token", rule: "present for pkcs11 and only there" });
        }
        let parent = self.parent.as_deref().map(parent_record).transpose()?;
        if parent.is_some() != (kind == SlotKind::Parent) {
            return Err(HeaderError::Member { member: "parent", rule: "present for a parent slot and only there" });
        }
        check_label(&self.label)?;
        let role = match self.role.as_deref() {
            None => Role::Administrator,
            Some("use") if signed => Role::Use,
            Some(_) => {
                return Err(HeaderError::Member {
                    member: "role",
                    rule: "\"use\", where the header has an administrator",
                });
            }
        };
        Ok(Slot {
            id: positive(self.id, "slot id")?,
            kind,
            label: self.label.clone(),
            created: self.created,
            salt: bytes(&self.salt, "salt")?,
            argon2,
            token,
            parent,
            role,
            expires: self.expires,
            nonce: bytes(&self.nonce, "nonce")?,
            wrapped: wrapped(&self.wrapped, signed && role == Role::Administrator)?,
        })
    }

    pub fn all(slots: &[Slot]) -> Vec<Object<Self>> {
        slots.iter().map(|s| Object(Self::of(s))).collect()
    }

    fn of(slot: &Slot) -> Self {
        let argon2 = slot.argon2.map(|a| {
            Object(WireArgon2 { memory_kib: a.memory_kib().into(), passes: a.passes().into(), lanes: a.lanes().into() })
        });
        WireSlot {
            id: slot.id.into(),
            kind: slot.kind.name().into(),
            label: slot.label.clone(),
            created: slot.created,
            salt: hex(&slot.salt),
            argon2,
            token: slot.token.as_ref().map(|t| Object(WireToken::of(t))),
            parent: slot.parent.as_ref().map(|record| hex(record)),
            role: (slot.role == Role::Use).then(|| "use".into()),
            expires: slot.expires,
            nonce: hex(&slot.nonce),
            wrapped: hex(&slot.wrapped),
        }
    }
}

fn parent_record(text: &str) -> Result<[u8; PARENT_RECORD_LEN], HeaderError> {
    let mut record = [0; PARENT_RECORD_LEN];
    match text.len() == 2 * PARENT_RECORD_LEN && HEXLOWER.decode_mut(text.as_bytes(), &mut record).is_ok() {
        true => Ok(record),
        false => Err(HeaderError::Member { member: "parent", rule: "88 bytes in lower-case hex" }),
    }
}

/// What a slot wraps: the file key, and the signing seed in an administrator's slot.
fn wrapped(text: &str, with_seed: bool) -> Result<Vec<u8>, HeaderError> {
    let (len, rule) = match with_seed {
        false => (48, "48 bytes in lower-case hex"),
        true => (80, "80 bytes in lower-case hex in an administrator's slot"),
    };
    match HEXLOWER.decode(text.as_bytes()) {
        Ok(bytes) if bytes.len() == len => Ok(bytes),
        Ok(_) | Err(_) => Err(HeaderError::Member { member: "wrapped", rule }),
    }
}

impl WireToken {
    fn parse(&self) -> Result<TokenSealed, HeaderError> {
        let rule = "\"rsa-oaep-sha256\", \"rsa-oaep-sha1\" or \"aes-gcm\"";
        let mechanism = TokenMechanism::from_name(&self.mechanism)
            .ok_or(HeaderError::Member { member: "token.mechanism", rule })?;
        let bytes = |member, text: &str| match HEXLOWER.decode(text.as_bytes()) {
            Ok(bytes) if (1..=TokenSealed::MAX).contains(&bytes.len()) => Ok(bytes),
            Ok(_) | Err(_) => Err(HeaderError::Member { member, rule: "1 to 2048 bytes in lower-case hex" }),
        };
        let sealed = bytes("token.sealed", &self.sealed)?;
        let signature = match &self.signature {
            Some(Object(WireTokenSignature { mechanism, value })) => {
                let (member, rule) = ("token.signature.mechanism", "\"rsa-pss-sha256\" or \"rsa-pkcs1-sha256\"");
                let mechanism = TokenSigning::from_name(mechanism).ok_or(HeaderError::Member { member, rule })?;
                Some(TokenSignature { mechanism, value: bytes("token.signature.value", value)? })
            }
            None => None,
        };
        Ok(TokenSealed { mechanism, sealed, signature })
    }

    fn of(token: &TokenSealed) -> Self {
        let signature = token.signature.as_ref().map(|TokenSignature { mechanism, value }| {
            Object(WireTokenSignature { mechanism: mechanism.name().into(), value: hex(value) })
        });
        WireToken { mechanism: token.mechanism.name().into(), sealed: hex(&token.sealed), signature }
    }
}

impl WireArgon2 {
    fn parse(&self) -> Result<Argon2Params, HeaderError> {
        let small = |n: u64| u32::try_from(n).ok();
        let params = small(self.memory_kib)
            .zip(small(self.passes))
            .zip(small(self.lanes))
            .and_then(|((memory_kib, passes), lanes)| Argon2Params::new(memory_kib, passes, lanes));
        let rule = "within 8*lanes <= memory_kib <= 4194304, 1 <= passes <= 64, 1 <= lanes <= 16";
        params.ok_or(HeaderError::Member { member: "argon2", rule })
    }
}
