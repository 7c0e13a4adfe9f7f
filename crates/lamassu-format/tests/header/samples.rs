//! A vault header and a zone file to change, as JSON.

use lamassu_format::header::{Header, HeaderError, VaultHeader};
use serde_json::{Value, json};

pub fn slot() -> Value {
    json!({
        "id": 3, "kind": "passphrase", "label": "Zoë's \"laptop\" \\ /", "created": 1700000001u64,
        "salt": "11".repeat(32), "argon2": {"memory_kib": 65536, "passes": 3, "lanes": 4},
        "nonce": "22".repeat(24), "wrapped": "33".repeat(48),
    })
}

pub fn raw_slot() -> Value {
    json!({
        "id": 5, "kind": "raw", "label": "", "created": 0,
        "salt": "44".repeat(32), "nonce": "55".repeat(24), "wrapped": "66".repeat(48),
    })
}

pub fn vault() -> Value {
    json!({
        "format": "lamassu-vault", "version": 1, "features": [], "id": "77".repeat(16), "zone": "88".repeat(16),
        "suite": "aes", "block_size": 4096, "reserved_slots": 8, "names": "encrypted", "name_max": 255,
        "small_files": "convergent", "created": 1700000000u64, "next_slot": 6, "slots": [slot(), raw_slot()],
        "keychain": {"nonce": "99".repeat(24), "sealed": "aa".repeat(40)}, "mac": "bb".repeat(32),
    })
}

pub fn zone() -> Value {
    let mut zone = vault();
    let members = zone.as_object_mut().unwrap();
    for name in ["zone", "reserved_slots", "names", "name_max", "small_files"] {
        members.remove(name);
    }
    members["format"] = json!("lamassu-zone");
    zone
}

pub fn parse(value: &Value) -> Result<VaultHeader, HeaderError> {
    VaultHeader::parse(value.to_string().as_bytes())
}

/// The sample with one member changed, by its JSON pointer.
pub fn with(pointer: &str, to: Value) -> Result<VaultHeader, HeaderError> {
    let mut value = vault();
    *value.pointer_mut(pointer).unwrap() = to;
    parse(&value)
}
