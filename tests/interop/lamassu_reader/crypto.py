"""Primitives and suites: sections 2, 3 and 10 of the format."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass
from functools import lru_cache

import blake3
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV
from cryptography.hazmat.primitives.cmac import CMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from nacl.bindings import (
    crypto_aead_xchacha20poly1305_ietf_decrypt,
    crypto_aead_xchacha20poly1305_ietf_encrypt,
)
from nacl.exceptions import CryptoError

TAG = 16
NONCE = 24


class OpenFailed(Exception):
    """An authenticated decryption failed."""


# --- encodings ---------------------------------------------------------------------------------

_B64 = re.compile(rb"[A-Za-z0-9_-]*\Z")


def b64(data: bytes) -> bytes:
    """base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def unb64(text: bytes) -> bytes:
    """Strict inverse of `b64`; ValueError for padding, foreign characters or trailing bits."""
    if not _B64.match(text):
        raise ValueError("a character outside the base64url alphabet")
    if len(text) % 4 == 1:
        raise ValueError("impossible base64url length")
    data = base64.urlsafe_b64decode(text + b"=" * (-len(text) % 4))
    if b64(data) != text:
        raise ValueError("non-zero trailing bits in base64url")
    return data


# --- key derivation ----------------------------------------------------------------------------


def hkdf(ikm: bytes, info: bytes, length: int = 32, salt: bytes = b"") -> bytes:
    """HKDF-SHA-256; an empty salt is RFC 5869's default (32 zero bytes)."""
    return HKDF(algorithm=hashes.SHA256(), length=length, salt=salt or None, info=info).derive(ikm)


def prf(key: bytes, data: bytes) -> bytes:
    """HMAC-SHA-256."""
    return hmac.digest(key, data, "sha256")


def same(a: bytes, b: bytes) -> bool:
    """Constant-time comparison."""
    return hmac.compare_digest(a, b)


# --- AEADs; the format stores tag and ciphertext apart, tag first --------------------------------


def _aes_block(key: bytes, block: bytes) -> bytes:
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(block)


def _xor(a: bytes, b: bytes) -> bytes:
    return bytes(x ^ y for x, y in zip(a, b, strict=True))


def _xaes_key(key: bytes, nonce: bytes) -> bytes:
    """The derived AES-256-GCM key of XAES-256-GCM."""
    if len(key) != 32 or len(nonce) != NONCE:
        raise ValueError("XAES-256-GCM takes a 32-byte key and a 24-byte nonce")
    doubled = int.from_bytes(_aes_block(key, bytes(16)), "big") << 1
    if doubled >> 128:
        doubled = (doubled & ((1 << 128) - 1)) ^ 0x87
    k1 = doubled.to_bytes(16, "big")
    halves = (_xor(k1, bytes((0, i, 0x58, 0)) + nonce[:12]) for i in (1, 2))
    return b"".join(_aes_block(key, half) for half in halves)


def xaes_seal(key: bytes, nonce: bytes, plain: bytes, aad: bytes) -> tuple[bytes, bytes]:
    """XAES-256-GCM: (tag, ciphertext)."""
    out = AESGCM(_xaes_key(key, nonce)).encrypt(nonce[12:], plain, aad)
    return out[-TAG:], out[:-TAG]


def xaes_open(key: bytes, nonce: bytes, tag: bytes, cipher: bytes, aad: bytes) -> bytes:
    """XAES-256-GCM; OpenFailed."""
    try:
        return AESGCM(_xaes_key(key, nonce)).decrypt(nonce[12:], cipher + tag, aad)
    except InvalidTag:
        raise OpenFailed from None


def xchacha_seal(key: bytes, nonce: bytes, plain: bytes, aad: bytes) -> tuple[bytes, bytes]:
    """XChaCha20-Poly1305: (tag, ciphertext)."""
    out = crypto_aead_xchacha20poly1305_ietf_encrypt(plain, aad, nonce, key)
    return out[-TAG:], out[:-TAG]


def xchacha_open(key: bytes, nonce: bytes, tag: bytes, cipher: bytes, aad: bytes) -> bytes:
    """XChaCha20-Poly1305; OpenFailed."""
    try:
        return crypto_aead_xchacha20poly1305_ietf_decrypt(cipher + tag, aad, nonce, key)
    except CryptoError:
        raise OpenFailed from None


def siv_seal(key: bytes, associated: bytes, plain: bytes) -> bytes:
    """AES-SIV with one associated-data string: SIV ‖ ciphertext."""
    return AESSIV(key).encrypt(plain, [associated])


def siv_open(key: bytes, associated: bytes, sealed: bytes) -> bytes:
    """AES-SIV; OpenFailed."""
    if len(sealed) <= 16:  # nothing the format seals this way is empty
        raise OpenFailed
    try:
        return AESSIV(key).decrypt(sealed, [associated])
    except InvalidTag:
        raise OpenFailed from None


# --- suites ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """What of a suite's cipher and hash a file has differently (section 10)."""

    short_key: bool = False
    """AES-128 in place of AES-256."""
    other_hash: bool = False
    """SHA-256 in a suite of BLAKE3, and the other way round."""


OF_SUITE = Method()


@dataclass(frozen=True)
class Suite:
    """One of the four suites."""

    name: str
    id: int

    def methods(self) -> list[Method]:
        """The methods that files of the suite may have."""
        shorts = (False, True) if self.name in ("aes", "blake3") else (False,)
        others = (False, True) if self.name != "paper" else (False,)
        return [Method(short, other) for other in others for short in shorts]

    def hashes_by_blake3(self, method: Method) -> bool:
        """Whether H of a method is keyed BLAKE3; otherwise it is SHA-256."""
        return (self.name in ("blake3", "chacha")) != method.other_hash

    def purpose(self, method: Method) -> str:
        """What the key is derived for under which block keys of a method are derived."""
        words = ["block key"]
        if method.short_key:
            words.append("aes-128")
        if method.other_hash:
            words.append("blake3" if self.hashes_by_blake3(method) else "sha-256")
        return " ".join(words)

    def derive(self, key: bytes, purpose: str, length: int = 32) -> bytes:
        """derive(key, purpose) of section 2."""
        return hkdf(key, f"lamassu v1 {self.name} {purpose}".encode(), length)

    def seal(self, key: bytes, nonce: bytes, plain: bytes, aad: bytes) -> tuple[bytes, bytes]:
        """The suite's page and record AEAD: (tag, ciphertext)."""
        return (xchacha_seal if self.name == "chacha" else xaes_seal)(key, nonce, plain, aad)

    def open(self, key: bytes, nonce: bytes, tag: bytes, cipher: bytes, aad: bytes) -> bytes:
        """The suite's page and record AEAD; OpenFailed."""
        return (xchacha_open if self.name == "chacha" else xaes_open)(key, nonce, tag, cipher, aad)

    def inner(self, k_in: bytes, oblivious: bool = False) -> InnerKeys:
        """What the suite needs of one K_in, of an epoch that is oblivious or not."""
        if self.name == "paper":
            return InnerKeys(self, {OF_SUITE: k_in}, b"")

        def derived(rest: str) -> dict[Method, bytes]:
            return {method: self.derive(k_in, self.purpose(method) + rest) for method in self.methods()}

        hash_key = self.derive(k_in, "block hash")
        if oblivious:
            return InnerKeys(self, derived(" oblivious"), hash_key, derived(" oblivious check"))
        return InnerKeys(self, derived(""), hash_key)

    def block_cipher(self, key: bytes, method: Method = OF_SUITE) -> Cipher:  # type: ignore[type-arg]
        """The data cipher under block key `key`."""
        if method.short_key:
            key = key[:16]
        if self.name in ("aes", "paper"):
            return Cipher(algorithms.AES(key), modes.CBC(bytes(16)))
        if self.name == "blake3":
            return Cipher(algorithms.AES(key), modes.CTR(bytes(16)))
        # The first 4 of these 16 bytes are the block counter (0), the other 12 the RFC 8439 nonce.
        return Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None)

    def encrypt_block(self, key: bytes, plain: bytes, method: Method = OF_SUITE) -> bytes:
        """A data block, from its plaintext."""
        enc = self.block_cipher(key, method).encryptor()
        return enc.update(plain) + enc.finalize()

    def decrypt_block(self, key: bytes, cipher: bytes, method: Method = OF_SUITE) -> bytes:
        """The plaintext of a data block; says nothing about its integrity."""
        dec = self.block_cipher(key, method).decryptor()
        return dec.update(cipher) + dec.finalize()

    @property
    def last_bit_kept(self) -> bool:
        """Whether the last bit of a block key is a key bit (and not the compression mark)."""
        return self.name == "paper"

    def is_compressed(self, key: bytes) -> bool:
        """Whether a block key marks its block as compressed."""
        return not self.last_bit_kept and bool(key[31] & 1)


@dataclass(frozen=True)
class InnerKeys:
    """The keys that come from one K_in."""

    suite: Suite
    keys: dict[Method, bytes]
    hash_key: bytes
    check: dict[Method, bytes] | None = None
    """Of an oblivious epoch, whose `keys` derive inputs of a server's function."""

    def block_hash(self, plain: bytes, method: Method = OF_SUITE) -> bytes:
        """h of a data block with plaintext `plain`."""
        if self.suite.hashes_by_blake3(method):
            return blake3.blake3(plain, key=self.hash_key).digest()
        return hashlib.sha256(plain).digest()

    def plain_key(self, plain: bytes, method: Method = OF_SUITE) -> bytes:
        """K of a block that is stored plain."""
        return self._fixed(self.block_hash(plain, method))

    def block_key(self, plain: bytes, salt: bytes = b"", method: Method = OF_SUITE, stored: bytes = b"") -> bytes:
        """K of a data block with plaintext `plain`. In an oblivious epoch: what `stored`, its key, must be, by its first half."""
        k = self._derived(self.keys[method], self.block_hash(plain, method), salt)
        if self.check is not None:
            token = stored[:16]
            k = token + self._derived(self.check[method], k, token)[:16]
        return self._fixed(k)

    def payload_key(self, payload: bytes, salt: bytes = b"", method: Method = OF_SUITE, stored: bytes = b"") -> bytes:
        """K of a block that is compressed to this payload."""
        k = self.block_key(payload, salt, method, stored)
        return k[:31] + bytes((k[31] | 1,))

    def _derived(self, key: bytes, h: bytes, salt: bytes) -> bytes:
        name = self.suite.name
        if name == "paper":
            k = _aes_block(key, h)
        elif name == "aes":
            parts = []
            for c in (1, 2):
                mac = CMAC(algorithms.AES(key))
                mac.update(c.to_bytes(4, "big") + b"lamassu\0" + h + salt + (256).to_bytes(4, "big"))
                parts.append(mac.finalize())
            k = b"".join(parts)
        else:
            k = blake3.blake3(h + salt, key=key).digest()
        return k

    def _fixed(self, k: bytes) -> bytes:
        """A key with the bits that the format sets and clears in every key."""
        if not self.suite.last_bit_kept:
            k = k[:31] + bytes((k[31] & 0xFE,))
        if k == bytes(32):  # cannot be tested
            k = b"\x80" + bytes(31)
        return k


SUITES = {s.name: s for s in (Suite("aes", 1), Suite("paper", 2), Suite("blake3", 3), Suite("chacha", 4))}


@dataclass(frozen=True)
class OuterKeys:
    """The keys that come from one K_out."""

    page_seal: bytes
    page_select: bytes
    page_convergent: bytes
    record_seal: bytes
    record_select: bytes
    xattr_name: bytes


@lru_cache(maxsize=64)
def outer(suite: Suite, k_out: bytes) -> OuterKeys:
    """The keys of one K_out."""
    return OuterKeys(
        page_seal=suite.derive(k_out, "page seal"),
        page_select=suite.derive(k_out, "page select"),
        page_convergent=suite.derive(k_out, "page convergent"),
        record_seal=suite.derive(k_out, "record seal"),
        record_select=suite.derive(k_out, "record select"),
        xattr_name=suite.derive(k_out, "xattr name", 64),
    )


# --- signatures --------------------------------------------------------------------------------


def ed25519_public(seed: bytes) -> bytes:
    """The public key of a signing seed (RFC 8032)."""
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def ed25519_verify(public: bytes, message: bytes, signature: bytes) -> bool:
    """Whether a signature verifies (RFC 8032)."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
