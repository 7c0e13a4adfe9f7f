#!/usr/bin/env python3
"""Makes vault.json and zone.json beside it, from docs/format.md sections 2 to 4 alone, with the `cryptography` package (46 or later).

The files are stored; run this again only when the format changes. Every "random" value is a fixed pattern, so the output is always the same.
"""
import hashlib
import hmac
import json
from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

HERE = Path(__file__).parent


def hkdf(ikm, salt, info):
    return HKDF(SHA256(), 32, salt or None, info).derive(ikm)


def ecb(key, block):
    e = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    return e.update(block) + e.finalize()


def xaes_seal(key, nonce, aad, content):
    """XAES-256-GCM: tag, then ciphertext."""
    el = int.from_bytes(ecb(key, bytes(16)), "big")
    k1 = (el << 1) & ((1 << 128) - 1)
    if el >> 127:
        k1 ^= 0x87
    halves = []
    for i in (1, 2):
        m = bytes([0, i, 0x58, 0]) + nonce[:12]
        halves.append(ecb(key, (k1 ^ int.from_bytes(m, "big")).to_bytes(16, "big")))
    sealed = AESGCM(b"".join(halves)).encrypt(nonce[12:], content, aad)
    return sealed[-16:] + sealed[:-16]


def canonical(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def slot(header_id, file_key, number, kind, label, material):
    salt, nonce = bytes([0x10 + number] * 32), bytes([0x20 + number] * 24)
    out = {"id": number, "kind": kind, "label": label, "created": 1700000000 + number, "salt": salt.hex()}
    secret = material
    if kind == "passphrase":
        cost = {"memory_kib": 256, "passes": 2, "lanes": 2}
        out["argon2"] = cost
        secret = Argon2id(salt=salt, length=32, iterations=cost["passes"], lanes=cost["lanes"], memory_cost=cost["memory_kib"]).derive(material)
    wrapping = hkdf(secret, salt, b"lamassu v1 slot")
    aad = b"lamassu v1 slot" + header_id + number.to_bytes(4, "little")
    out["nonce"] = nonce.hex()
    out["wrapped"] = xaes_seal(wrapping, nonce, aad, file_key).hex()
    return out


def finish(head, header_id, file_key, keychain, slots):
    nonce = bytes([0x30] * 24)
    sealed = xaes_seal(hkdf(file_key, b"", b"lamassu v1 keychain"), nonce, b"lamassu v1 keychain" + header_id, canonical(keychain))
    head["next_slot"] = 10
    head["slots"] = slots
    head["keychain"] = {"nonce": nonce.hex(), "sealed": sealed.hex()}
    head["mac"] = hmac.new(hkdf(file_key, b"", b"lamassu v1 header"), canonical(head), hashlib.sha256).hexdigest()
    return head


def epoch(number, byte):
    return {"created": 1600000000 + number, "epoch": number, "key": bytes([byte] * 32).hex()}


def main():
    passphrase = "pässphräse with spaces".encode()
    vault_id, zone_id = bytes(range(16)), bytes(range(16, 32))

    key = bytes([0x40] * 32)
    slots = [
        slot(vault_id, key, 1, "passphrase", "Zoë's \"laptop\" \\ /", passphrase),
        slot(vault_id, key, 4, "raw", "", bytes([0x51] * 32)),
        slot(vault_id, key, 9, "hex", "safe", bytes([0x52] * 32)),
    ]
    head = {
        "format": "lamassu-vault", "version": 1, "features": [], "id": vault_id.hex(), "zone": zone_id.hex(), "suite": "chacha",
        "block_size": 131072, "reserved_slots": 12, "names": "plain", "name_max": 143, "small_files": "random", "created": 1700000000,
    }
    keychain = {"inner": [epoch(1, 0x61), epoch(3, 0x63)], "outer": [epoch(2, 0x72)]}
    vault = finish(head, vault_id, key, keychain, slots)
    (HERE / "vault.json").write_text(json.dumps(vault, indent=1, ensure_ascii=False) + "\n")

    key = bytes([0x41] * 32)
    slots = [slot(zone_id, key, 2, "raw", "zone", bytes([0x53] * 32))]
    head = {"format": "lamassu-zone", "version": 1, "features": [], "id": zone_id.hex(), "suite": "chacha", "block_size": 4096, "created": 1700000000}
    keychain = {"inner": [epoch(1, 0x61), epoch(3, 0x63)], "outer": []}
    zone = finish(head, zone_id, key, keychain, slots)
    (HERE / "zone.json").write_text(json.dumps(zone, indent=1, ensure_ascii=False) + "\n")


main()
