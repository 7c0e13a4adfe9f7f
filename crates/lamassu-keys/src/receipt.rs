//! The receipt of an assured delete (§4d): what became unreadable, what was done, and what cannot be known. It is
//! signed by an audit key that survives the vault.
//!
//! Guarantees: it reveals no key (epochs are represented by a one-way digest of 256 random bits), and the signature
//! covers all of it.

pub mod served;

use crate::history::{HistoryEntry, host_name, user_name};
use crate::{KeyError, Material, SourceError, Tier, Unlocked, rotate};
use data_encoding::HEXLOWER;
use lamassu_crypto::{Secret, sign, wrap};
use lamassu_format::header::{Destroyed, VaultHeader, canonical};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::path::Path;

pub use crate::header_file::erase::Erased;

/// The value of the member `format`.
pub const FORMAT: &str = "lamassu-receipt";
const VERSION: u32 = 1;
/// Longest receipt that is read, in bytes: a history of backups can be long.
pub const RECEIPT_MAX: usize = 4 << 20;

/// Why a receipt is refused.
#[derive(Debug, thiserror::Error)]
pub enum ReceiptError {
    /// Not JSON, or not with exactly the members of §4d. The text may quote the file, so it is escaped.
    #[error("not a receipt: {0}")]
    Json(String),
    /// Another format, or a later version.
    #[error("it is of a format or version that this program does not know")]
    Version,
    /// It carries no signature.
    #[error("it is not signed")]
    Unsigned,
    /// Another audit key signed it.
    #[error("it is signed by {found}, not by the audit key that was given")]
    OtherKey {
        /// the key it names, in hex, or the text in its place
        found: String,
    },
    /// It was changed.
    #[error("its signature does not verify: it was changed, or the audit key did not sign it")]
    Signature,
    /// The user's: it belongs to another run, or vault.
    #[error("it is the receipt of another destruction")]
    Other,
}

/// The key that signs receipts. It is derived from key material, so that material which also opens vaults signs nothing
/// else.
pub struct AuditKey {
    seed: Secret<32>,
}

impl std::fmt::Debug for AuditKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AuditKey({})", HEXLOWER.encode(&self.public()))
    }
}

impl AuditKey {
    /// From key material of 32 bytes, in any notation.
    ///
    /// # Errors
    /// [`SourceError::RawLength`] for a passphrase, which can be guessed, or a token, which does not give its key.
    pub fn of(material: &Material) -> Result<AuditKey, SourceError> {
        match material {
            Material::Key { key, .. } => Ok(AuditKey { seed: wrap::hkdf(key.expose(), b"", b"lamassu v1 audit") }),
            Material::Passphrase(_) | Material::Token(_) => Err(SourceError::RawLength),
        }
    }

    /// The public key.
    pub fn public(&self) -> [u8; 32] {
        sign::public(&self.seed)
    }
}

/// A receipt. Times are seconds since 1970, byte strings hex.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    format: String,
    version: u32,
    /// random; also in the destroyed header
    pub id: String,
    /// whether everything was done
    pub complete: bool,
    /// when it was begun
    pub time: u64,
    /// who did it
    pub by: By,
    /// id of the vault
    pub vault: String,
    /// id of its zone
    pub zone: String,
    /// its directory
    pub path: String,
    /// when it was made
    pub created: u64,
    /// keys that its header held
    pub epochs: Vec<GoneEpoch>,
    /// slots that opened it
    pub slots: Vec<GoneSlot>,
    /// its history, which can no longer be read
    pub history: Option<GoneHistory>,
    /// bytes of its files in the store, where they were counted
    pub stored_bytes: Option<u64>,
    /// files that wrapped keys
    pub erased: Vec<Erased>,
    /// other headers of the vault in its directory, which were left and open it
    pub copies_beside: Vec<String>,
    /// keys destroyed at servers and in tokens
    pub servers: Vec<AtServer>,
    /// copies of the header on record
    pub backups: Vec<Backup>,
    /// recorded clones and snapshots: they hold the same keys in their own headers
    pub clones: Vec<Copied>,
    /// datasets in it that open without its keys
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub datasets: Vec<LeftDataset>,
    /// what cannot be known, in words
    pub cannot_know: Vec<String>,
    /// public half of the audit key
    pub audit_key: String,
    /// Ed25519 over everything else
    #[serde(default, skip_serializing_if = "Option::is_none")]
    signature: Option<String>,
}

/// A kind of receipt.
trait Form: Clone + Serialize + DeserializeOwned {
    const FORMAT: &'static str;

    fn form(&self) -> (&str, u32);
    fn audit_key(&mut self) -> &mut String;
    fn signature(&mut self) -> &mut Option<String>;

    /// The signed message: the canonical form (§4) without the signature. Its format distinguishes it from other kinds.
    fn message(&self) -> Vec<u8> {
        let mut unsigned = self.clone();
        *unsigned.signature() = None;
        let value = serde_json::to_value(unsigned).expect("structs of strings and integers always serialise");
        [&b"lamassu v1 receipt"[..], &canonical(&value)].concat()
    }

    fn put_signature(&mut self, audit: &AuditKey) {
        *self.audit_key() = HEXLOWER.encode(&audit.public());
        *self.signature() = Some(HEXLOWER.encode(&sign::sign(&audit.seed, &self.message())));
    }

    fn indented(&self) -> Vec<u8> {
        let mut out = serde_json::to_vec_pretty(self).expect("structs of strings and integers always serialise");
        out.push(b'\n');
        out
    }

    fn of_signer(json: &[u8], public: &[u8; 32]) -> Result<Self, ReceiptError> {
        let escaped = |e: serde_json::Error| e.to_string().escape_debug().take(300).collect();
        let mut receipt: Self = serde_json::from_slice(json).map_err(|e| ReceiptError::Json(escaped(e)))?;
        if receipt.form() != (Self::FORMAT, VERSION) {
            return Err(ReceiptError::Version);
        }
        let signer = receipt.audit_key();
        if *signer != HEXLOWER.encode(public) {
            return Err(ReceiptError::OtherKey { found: signer.escape_debug().take(64).collect() });
        }
        let signature = receipt.signature().as_ref().ok_or(ReceiptError::Unsigned)?;
        let signature = HEXLOWER.decode(signature.as_bytes()).ok().and_then(|s| s.try_into().ok());
        let signature: [u8; 64] = signature.ok_or(ReceiptError::Signature)?;
        sign::verify(public, &receipt.message(), &signature).map_err(|_| ReceiptError::Signature)?;
        Ok(receipt)
    }
}

impl Form for Receipt {
    const FORMAT: &'static str = FORMAT;

    fn form(&self) -> (&str, u32) {
        (&self.format, self.version)
    }

    fn audit_key(&mut self) -> &mut String {
        &mut self.audit_key
    }

    fn signature(&mut self) -> &mut Option<String> {
        &mut self.signature
    }
}

/// Who destroyed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct By {
    /// on that host
    pub uid: u32,
    /// where it has a name
    pub user: Option<String>,
    /// the machine
    pub host: String,
}

/// An epoch whose key the header held.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GoneEpoch {
    /// K_in or K_out
    pub key: Tier,
    /// its number
    pub epoch: u32,
    /// when it was made
    pub created: u64,
    /// HKDF of the key: identifies the key if a copy turns up, and reveals nothing else
    pub digest: String,
    /// whether a zone shares the key, by the header: then it is not gone
    pub zone_shares: bool,
}

/// An erased slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GoneSlot {
    /// its number
    pub id: u32,
    /// notation of its source
    pub kind: String,
    /// for people
    pub label: String,
    /// when it was made
    pub created: u64,
}

/// The end of the history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GoneHistory {
    /// number of entries that the header had counted
    pub entries: u64,
    /// SHA-256 of the last of them
    pub head: String,
    /// whether all of it verified when the receipt was made
    pub verified: bool,
}

/// A key at a server or in a token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AtServer {
    /// its source
    pub source: String,
    /// whether it was destroyed
    pub destroyed: bool,
    /// what the server or token answered
    pub answers: Vec<String>,
}

/// A recorded copy of the header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Backup {
    /// when it was made
    pub time: u64,
    /// the machine
    pub host: String,
    /// its file
    pub file: String,
    /// its SHA-256
    pub sha256: String,
    /// numbers of its slots, whose keys open it; not recorded by early versions
    pub slots: Option<String>,
    /// what was found in that place when the receipt was made
    pub now: String,
}

/// A recorded clone or snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Copied {
    /// when it was made
    pub time: u64,
    /// `clone` or `snapshot`
    pub kind: String,
    /// its id
    pub id: String,
}

/// A dataset in the vault that opens without the vault's keys: it has its own slots, or is in such a dataset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeftDataset {
    /// its directory in the store, below the vault's
    pub stored: String,
    /// its id; `None`: its header could not be read
    pub id: Option<String>,
    /// whether it has the vault's K_in, by its header
    pub zone_shares: bool,
}

impl By {
    /// The user of this process.
    fn this_user() -> By {
        let uid = rustix::process::getuid().as_raw();
        By { uid, user: user_name(uid), host: host_name() }
    }
}

impl Backup {
    /// From an entry of the history, with a look at whether the copy still exists.
    pub(crate) fn of(entry: &HistoryEntry) -> Backup {
        let detail = |name: &str| entry.details.get(name).cloned();
        let (file, sha256) = (detail("file").unwrap_or_default(), detail("sha256").unwrap_or_default());
        let now = if entry.host == host_name() {
            found_at(Path::new(&file), &sha256)
        } else {
            "on another machine: not looked for".into()
        };
        Backup { time: entry.time, host: entry.host.clone(), file, sha256, slots: detail("slots"), now }
    }
}

fn found_at(path: &Path, sha256: &str) -> String {
    match crate::header_file::read_bytes(path) {
        Ok(bytes) if HEXLOWER.encode(&wrap::sha256(&bytes)) == sha256 => "there, unchanged: opens the vault".into(),
        Ok(_) => "something else is there".into(),
        Err(crate::FileError::Missing { .. }) => "not there".into(),
        Err(error) => format!("could not be read: {error}"),
    }
}

impl Receipt {
    pub(crate) fn begin(dir: &Path, header: &VaultHeader, audit: &AuditKey) -> Result<Receipt, KeyError> {
        let mut id = [0; 16];
        lamassu_crypto::random(&mut id)?;
        let destroyed = Destroyed { time: crate::unix_now(), receipt: id };
        Ok(Receipt::bare(dir, header, destroyed, audit))
    }

    /// A receipt with only what a header without keys says: for a destruction whose interrupted run has left none.
    pub fn bare(dir: &Path, header: &VaultHeader, destroyed: Destroyed, audit: &AuditKey) -> Receipt {
        Receipt {
            format: FORMAT.into(),
            version: VERSION,
            id: HEXLOWER.encode(&destroyed.receipt),
            complete: false,
            time: destroyed.time,
            by: By::this_user(),
            vault: header.id().to_string(),
            zone: header.zone().to_string(),
            path: std::path::absolute(dir).unwrap_or_else(|_| dir.into()).display().to_string(),
            created: header.created(),
            epochs: Vec::new(),
            slots: Vec::new(),
            history: None,
            stored_bytes: None,
            erased: Vec::new(),
            copies_beside: Vec::new(),
            servers: Vec::new(),
            backups: Vec::new(),
            clones: Vec::new(),
            datasets: Vec::new(),
            cannot_know: vec![
                "Which epochs, slots and backups there were: the run that destroyed the keys was cut off, and its receipt was not given to the one that finished."
                    .into(),
            ],
            audit_key: HEXLOWER.encode(&audit.public()),
            signature: None,
        }
    }

    /// The mark of the receipt for the header.
    pub fn mark(&self) -> Result<Destroyed, ReceiptError> {
        let id = HEXLOWER.decode(self.id.as_bytes()).ok().and_then(|id| id.try_into().ok());
        Ok(Destroyed { time: self.time, receipt: id.ok_or(ReceiptError::Other)? })
    }

    /// Adds what no program can know about this vault.
    pub(crate) fn tell_limits(&mut self, header: &VaultHeader, keys: &Unlocked) {
        let mut said = vec![
            "Copies of the header that are not on record here: `lamassu key backup` without --key, a copy of the directory, a backup or snapshot of the store. Each opens \
             the vault with the keys of the slots it held. So do copies from before the history that was read began."
                .into(),
            "What the store keeps of bytes that were overwritten: copy-on-write, snapshots that share blocks, a journal of data, replicas, and flash behind its translation \
             layer may still hold the old header. Overwriting reaches the blocks that a file has now; headers replaced by programs that did not overwrite may lie in free blocks."
                .into(),
            "Processes that have the keys loaded: mounts on other machines, read-only ones too, and people who kept keys that they once loaded.".into(),
            "What was copied out of the vault, and what is in the page cache, swap or backups as plain data.".into(),
        ];
        said.push(
            "Clones and snapshots that are not on record here, clones of those, and the vault that this one was made from, if it is one: each holds the same keys in a \
             header of its own, and opens as before."
                .into(),
        );
        let shares = |tier| keys.keychain().epochs(tier).iter().any(|epoch| rotate::is_shared(header, tier, epoch));
        let zone = match header.has_private_zone() {
            true => "the zone that it was in".into(),
            false => format!("zone {}", header.zone()),
        };
        if shares(Tier::Inner) {
            said.push(format!(
                "Members of {zone}: a K_in is the zone's and lives on. They cannot read what they cannot guess, but can confirm a guess of a block that is stored here under it."
            ));
        }
        if shares(Tier::Outer) {
            said.push(format!(
                "A K_out is shared with {zone} too: its members go on READING what is stored here under it. To prevent that, re-key the vault first."
            ));
        }
        if !self.clones.is_empty() {
            said.push(
                "Clones and snapshots on record hold the same keys in headers of their own, and open as before; so do clones of those."
                    .into(),
            );
        }
        self.cannot_know = said;
    }

    /// Sets what became of keys at servers and in tokens.
    pub fn set_servers(&mut self, servers: Vec<AtServer>) {
        const COPIES: &str = "Copies of the keys that were destroyed at servers and in tokens: backups and replicas of a key server, a key that was exported from it, copies of a token's store \
             or a second token with the same key. Each of them opens what the key opened.";
        if !servers.is_empty() && !self.cannot_know.iter().any(|said| said == COPIES) {
            self.cannot_know.push(COPIES.into());
        }
        self.servers = servers;
    }

    /// Adds the datasets that stay readable, for a vault that has or may have some.
    pub fn leave(&mut self, datasets: Vec<LeftDataset>) {
        if datasets.iter().any(|d| d.zone_shares) {
            self.epochs.iter_mut().filter(|e| e.key == Tier::Inner).for_each(|e| e.zone_shares = true);
            self.cannot_know.push(
                "K_in lives on in datasets that are listed here: a holder of one's key can confirm a guess of a block that is stored in the vault.".into(),
            );
        }
        self.datasets = datasets;
        self.cannot_know.push(
            "Whether there are more datasets, in directories that could not be read, or taken elsewhere. A dataset with slots of its own opens as before, and is no part of \
             what became unreadable; one that inherits its key alone went with the vault."
                .into(),
        );
    }

    /// Signs it, replacing an earlier signature.
    pub fn sign(&mut self, audit: &AuditKey) {
        self.put_signature(audit);
    }

    /// Indented JSON with a line end.
    pub fn to_json(&self) -> Vec<u8> {
        self.indented()
    }

    /// Parses a receipt, and verifies the signature of the audit key with this public half.
    ///
    /// # Errors
    /// [`ReceiptError`].
    pub fn verified(json: &[u8], public: &[u8; 32]) -> Result<Receipt, ReceiptError> {
        Receipt::of_signer(json, public)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SlotKind;
    use lamassu_crypto::SecretBytes;

    fn audit(byte: u8) -> AuditKey {
        AuditKey::of(&Material::new(SlotKind::Raw, SecretBytes::new(vec![byte; 32])).unwrap()).unwrap()
    }

    fn receipt() -> Receipt {
        let key = Material::new(SlotKind::Raw, SecretBytes::new(vec![9; 32])).unwrap();
        let slot = crate::NewSlot { material: &key, cost: crate::cost::FALLBACK, label: "first", created: 5 };
        let new = crate::NewVault {
            domain: lamassu_format::Domain::Zone,
            suite: lamassu_format::Suite::Aes,
            geometry: lamassu_format::Geometry::new(4096, 8).unwrap(),
            names: lamassu_format::header::NameMode::Encrypted,
            name_max: 255,
            convergent_small_files: true,
            compression: None,
            zone: crate::Zone::Private,
            created: 5,
        };
        let (header, keys) = crate::create_vault(&new, &slot).unwrap();
        crate::destroy::draft(Path::new("/nowhere"), &header, &keys, &audit(7)).unwrap()
    }

    #[test]
    fn every_change_of_a_receipt_is_seen() {
        let mut made = receipt();
        let public = audit(7).public();
        assert!(matches!(Receipt::verified(&made.to_json(), &public), Err(ReceiptError::Unsigned)));
        made.sign(&audit(7));
        let json = made.to_json();
        assert_eq!(Receipt::verified(&json, &public).unwrap(), made);
        assert!(matches!(Receipt::verified(&json, &audit(8).public()), Err(ReceiptError::OtherKey { .. })));
        let text = String::from_utf8(json).unwrap();
        assert!(Receipt::verified(text.trim().as_bytes(), &public).is_ok(), "white space says nothing");
        for (from, to) in [
            ("\"complete\": false", "\"complete\": true"),
            ("\"label\": \"first\"", "\"label\": \"other\""),
            ("\"epoch\": 1", "\"epoch\": 2"),
            ("/nowhere", "/elsewhere"),
        ] {
            let changed = text.replacen(from, to, 1);
            assert_ne!(changed, text, "{from}");
            assert!(matches!(Receipt::verified(changed.as_bytes(), &public), Err(ReceiptError::Signature)), "{from}");
        }
        for bad in [
            text.replacen("{", "{\"more\": 1,", 1),
            text.replacen("{", "{\"complete\": true,", 1),
            text.replacen("\"version\": 1", "\"version\": 2", 1),
            text.replace("\"epochs\"", "\"epoch\""),
            String::new(),
        ] {
            assert!(Receipt::verified(bad.as_bytes(), &public).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_receipt_holds_no_key() {
        let key = Material::new(SlotKind::Passphrase, SecretBytes::new(b"guess me".to_vec())).unwrap();
        assert!(AuditKey::of(&key).is_err());
        let made = receipt();
        assert_eq!(made.epochs.len(), 2);
        assert!(made.epochs.iter().all(|e| e.digest.len() == 64 && !e.zone_shares));
        assert_ne!(made.epochs[0].digest, made.epochs[1].digest);
    }
}
