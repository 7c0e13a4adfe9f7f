//! Vault headers, zone files, key slots and keychains (`docs/format.md` §4).

use crate::bytes::Bytes;
use lamassu_crypto::{Secret, SecretBytes, wrap};
use lamassu_format::header::{
    Argon2Params, Header, KeyArea, NameMode, Role, SealedKeychain, Slot, SlotKind, VaultHeader, VaultParams, ZoneFile,
    ZoneId, ZoneParams,
};
use lamassu_format::{Domain, Geometry, Suite};
use lamassu_keys::{KeyError, Material};
use lamassu_keys::{Unlocked, unlock};

const KEY: [u8; 32] = [3; 32];

/// Bytes of a header file: refused, or a header that is written and read back the same.
pub fn header(input: &[u8]) {
    parse::<VaultHeader>(input);
    parse::<ZoneFile>(input);
}

fn parse<H: Header + PartialEq + std::fmt::Debug>(input: &[u8]) {
    let Ok(header) = H::parse(input) else { return };
    let written = header.to_json().expect("what was parsed can be written");
    let again = H::parse(&written).expect("what was written can be parsed");
    assert_eq!(again, header);
    assert_eq!(again.mac_input(), header.mac_input());
    // No secret was used to make it, so no key may open it.
    assert!(unlock(&header, &material(SlotKind::Raw)).is_err());
}

/// A slot and a keychain behind good seals: the content of both is made up.
pub fn keychain(input: &[u8]) {
    let mut bytes = Bytes::new(input);
    let is_zone = bytes.u8() & 1 == 1;
    let slot = slot(&mut bytes);
    let material = material(slot.kind);
    let keys = KeyArea {
        id: [4; 16],
        next_slot: slot.id.saturating_add(1),
        slots: vec![slot],
        keychain: SealedKeychain { nonce: [5; 24], sealed: Vec::new(), oblivious: false },
        admin: None,
        history: None,
        mac: [0; 32],
    };
    if is_zone {
        let params = ZoneParams { suite: Suite::Chacha, block_size: 4096, compression: None, created: 7 };
        open(ZoneFile::new(params, keys), &material, bytes.rest());
    } else {
        let params = VaultParams {
            zone: ZoneId([4; 16]),
            suite: Suite::Aes,
            geometry: Geometry::new(4096, 8).expect("a geometry"),
            names: NameMode::Encrypted,
            name_max: 255,
            convergent_small_files: true,
            domain: Domain::Zone,
            created: 7,
        };
        open(VaultHeader::new(params, keys), &material, bytes.rest());
    }
}

/// A slot as the fuzzer wants it, its costs small enough to be run.
fn slot(bytes: &mut Bytes<'_>) -> Slot {
    let kind = bytes.one_of(&[SlotKind::Raw, SlotKind::Hex, SlotKind::Passphrase]);
    let id = u32::from(bytes.u16());
    let len = usize::from(bytes.u8()) + usize::from(bytes.u8() & 1);
    let label = String::from_utf8_lossy(bytes.take(len)).into_owned();
    let cost = Argon2Params::new(8 + u32::from(bytes.u8()), 1 + u32::from(bytes.u8() & 1), 1);
    let argon2 = cost.filter(|_| kind == SlotKind::Passphrase);
    let (role, wrapped) = (Role::Administrator, vec![0; 48]);
    let created = bytes.u64();
    Slot {
        id,
        kind,
        label,
        created,
        salt: [6; 32],
        argon2,
        token: None,
        parent: None,
        role,
        expires: None,
        nonce: [7; 24],
        wrapped,
    }
}

fn material(kind: SlotKind) -> Material {
    let bytes = match kind {
        SlotKind::Passphrase => b"correct horse".to_vec(),
        SlotKind::Raw => KEY.to_vec(),
        SlotKind::Hex => KEY.iter().flat_map(|b| format!("{b:02x}").into_bytes()).collect(),
        SlotKind::Recovery | SlotKind::RecoveryShares | SlotKind::Pkcs11 | SlotKind::Parent => {
            unreachable!("`slot` makes none")
        }
    };
    Material::new(kind, SecretBytes::new(bytes)).expect("good material")
}

/// Seals `json` as the header's keychain, by §4 alone, and opens it.
fn open<H: Header + Clone + PartialEq + std::fmt::Debug>(mut header: H, material: &Material, json: &[u8]) {
    let file_key = Secret::new(&mut [8; 32]);
    let id = header.keys().id;
    let slot = header.keys().slots[0].clone();
    let secret = match &slot.argon2 {
        None => Secret::new(&mut KEY.clone()),
        Some(cost) => wrap::argon2id(b"correct horse", &slot.salt, *cost).expect("a small cost"),
    };
    let wrapping = wrap::hkdf(secret.expose(), &slot.salt, b"lamassu v1 slot");
    let aad = [&b"lamassu v1 slot"[..], &id, &slot.id.to_le_bytes()].concat();
    let wrapped = wrap::seal_with(&wrapping, &slot.nonce, &aad, file_key.expose());
    header.keys_mut().slots[0].wrapped = wrapped;
    let chain_key = wrap::hkdf(file_key.expose(), b"", b"lamassu v1 keychain");
    let aad = [&b"lamassu v1 keychain"[..], &id].concat();
    header.keys_mut().keychain.sealed = wrap::seal_with(&chain_key, &[5; 24], &aad, json);
    let mac_key = wrap::hkdf(file_key.expose(), b"", b"lamassu v1 header");
    header.keys_mut().mac = wrap::hmac(&mac_key, &header.mac_input());
    // What cannot be written is not found in a vault either.
    let Ok(written) = header.to_json() else { return };
    let header = H::parse(&written).expect("what was written can be parsed");
    match unlock(&header, material) {
        Ok(unlocked) => change(header, unlocked, material),
        Err(KeyError::KeychainInvalid) => {}
        Err(other) => panic!("slot and MAC are good: {other}"),
    }
}

/// A keychain that opens can be rotated and read again, or says that it cannot.
fn change<H: Header + Clone>(mut header: H, mut unlocked: Unlocked, material: &Material) {
    let chain = unlocked.keychain();
    assert!(!chain.inner().is_empty());
    assert!(!H::OUTER_REQUIRED || !chain.outer().is_empty());
    for epochs in [chain.inner(), chain.outer()] {
        assert!(epochs.iter().all(|e| e.number() > 0) && epochs.is_sorted_by(|a, b| a.number() < b.number()));
    }
    let newest = chain.inner().last().map_or(0, |e| e.number());
    match unlocked.rotate(&mut header, lamassu_keys::Tier::Inner, 9) {
        Ok(number) => {
            assert_eq!(number, newest + 1);
            let again = unlock(&header, material).expect("what was written opens");
            assert_eq!(again.keychain().inner().last().map(|e| e.number()), Some(number));
        }
        Err(KeyError::EpochsUsedUp) => assert_eq!(newest, u32::MAX),
        Err(KeyError::Header(_) | KeyError::KeychainInvalid) => {}
        Err(other) => panic!("{other}"),
    }
}
