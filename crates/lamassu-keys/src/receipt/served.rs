//! The receipt of a key that a Lamassu server kept, and has deleted (`docs/server.md`).

use super::{AuditKey, By, Form, ReceiptError, VERSION};
use data_encoding::HEXLOWER;
use lamassu_crypto::{Secret, wrap};
use serde::{Deserialize, Serialize};

/// The value of the member `format`.
pub const FORMAT: &str = "lamassu-key-receipt";

/// A receipt. Times are seconds since 1970, byte strings hex.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyReceipt {
    format: String,
    version: u32,
    /// when it was signed
    pub time: u64,
    /// by whom
    pub by: By,
    /// SHA-256 of the certificate of the server's authority
    pub server: String,
    /// what the server says about the key
    pub gone: GoneKey,
    /// what cannot be known, in words
    pub cannot_know: Vec<String>,
    /// public half of the audit key
    pub audit_key: String,
    /// Ed25519 over everything else
    #[serde(default, skip_serializing_if = "Option::is_none")]
    signature: Option<String>,
}

/// A server's statement about a key that it has deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GoneKey {
    /// its name
    pub key: String,
    /// when it was made
    pub made: u64,
    /// the host that made it
    pub made_by: String,
    /// identifies the key if a copy turns up, and reveals nothing else
    pub digest: String,
    /// when it was deleted
    pub deleted: u64,
    /// hosts that had a grant at the end
    pub granted: Vec<String>,
    /// hosts that were given it, as far as the audit log goes back, and when last
    pub given: Vec<Given>,
    /// times of the server's backups while the key existed, as far as the audit log goes back: they have the key,
    /// wrapped
    pub backups: Vec<u64>,
    /// time of the oldest entry that the audit log has
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_begins: Option<u64>,
    /// when the server was made from a backup, while the key existed: the log lacks what was between that backup and
    /// the server's loss
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub restored: Vec<u64>,
}

/// A host was given a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Given {
    /// its name
    pub host: String,
    /// when last
    pub last: u64,
}

/// The digest that identifies the key of a receipt.
pub fn digest(key: &Secret<32>) -> String {
    HEXLOWER.encode(wrap::hkdf::<32>(key.expose(), b"", b"lamassu v1 receipt served key").expose())
}

impl Form for KeyReceipt {
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

impl KeyReceipt {
    /// Makes and signs a receipt. `server`: the digest of its authority's certificate, hex.
    pub fn signed(server: &str, gone: GoneKey, audit: &AuditKey) -> KeyReceipt {
        let mut receipt = KeyReceipt {
            format: FORMAT.into(),
            version: VERSION,
            time: crate::unix_now(),
            by: By::this_user(),
            server: server.into(),
            gone,
            cannot_know: CANNOT_KNOW.map(String::from).to_vec(),
            audit_key: String::new(),
            signature: None,
        };
        receipt.put_signature(audit);
        receipt
    }

    /// Indented JSON with a line end.
    pub fn to_json(&self) -> Vec<u8> {
        self.indented()
    }

    /// Parses a receipt, and verifies the signature of the audit key with this public half.
    ///
    /// # Errors
    /// [`ReceiptError`].
    pub fn verified(json: &[u8], public: &[u8; 32]) -> Result<KeyReceipt, ReceiptError> {
        KeyReceipt::of_signer(json, public)
    }
}

const CANNOT_KNOW: [&str; 5] = [
    "What the hosts that were given the key have done with it: each may have kept it, and mounts that were open have what it opened.",
    "Which hosts were given the key, and which backups were made, where the audit log has nothing: before its oldest entry, and, if the server was restored \
     from a backup, between that backup and the loss of the server.",
    "Copies of the server's directory: backups, also those that the audit log no longer tells of, and snapshots of its disk. Each has the key, wrapped under the master key of \
     its time: destroy them, or that master key.",
    "What the server's database and disk keep of the key, wrapped, in places that are free: it opens with the master key of its time. Wrap all keys anew \
     (`lamassu-server keys rewrap`), and destroy the master key of before.",
    "Whether the vaults that the key opens have other slots, whose keys open them as before.",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Material;
    use crate::receipt::Receipt;
    use lamassu_crypto::SecretBytes;
    use lamassu_format::header::SlotKind;

    #[test]
    fn every_change_is_seen_and_no_form_passes_for_the_other() {
        let audit =
            AuditKey::of(&Material::new(SlotKind::Raw, SecretBytes::new(vec![7; 32])).expect("a key")).expect("a key");
        let gone = GoneKey {
            key: "vault".into(),
            made: 5,
            made_by: "a".into(),
            digest: digest(&Secret::new(&mut [3; 32])),
            deleted: 9,
            granted: vec!["a".into()],
            given: vec![Given { host: "a".into(), last: 8 }],
            backups: vec![6],
            log_begins: Some(4),
            restored: vec![7],
        };
        let receipt = KeyReceipt::signed("00", gone, &audit);
        let (text, public) = (String::from_utf8(receipt.to_json()).expect("text"), audit.public());
        assert_eq!(KeyReceipt::verified(text.as_bytes(), &public).expect("verifies"), receipt);
        for (from, to) in [("\"vault\"", "\"other\""), ("Copies", "Coqies")] {
            let changed = text.replacen(from, to, 1);
            assert_ne!(changed, text, "{from}");
            assert!(
                matches!(KeyReceipt::verified(changed.as_bytes(), &public), Err(ReceiptError::Signature)),
                "{from}"
            );
        }
        assert!(KeyReceipt::verified(text.as_bytes(), &[1; 32]).is_err());
        assert!(Receipt::verified(text.as_bytes(), &public).is_err());
    }
}
