#!/usr/bin/env python3
"""Writes the golden vectors of format v1 beside this file, from docs/format.md alone.

It shares no code with the Rust crates: AES, ChaCha20, SHA-256, AES-SIV and Argon2id come from the `cryptography` package, BLAKE3 and HChaCha20 are spelt out
here. The JSON files are checked in and opened by a test for ever after; run this only to add vectors, never to change those that are there.
"""
import base64, hashlib, hmac, json, pathlib, struct

from cryptography.hazmat.primitives import cmac
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV, ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

SUITES = {"aes": 1, "paper": 2, "blake3": 3, "chacha": 4}


# --- primitives -------------------------------------------------------------------------------------------------------------------

def prf(key, data):
    return hmac.new(key, data, hashlib.sha256).digest()


def hkdf(ikm, info, salt=b"", length=32):
    prk, out, t = prf(salt or bytes(32), ikm), b"", b""
    for i in range(1, -(-length // 32) + 1):
        t = prf(prk, t + info + bytes([i]))
        out += t
    return out[:length]


def derive(suite, key, purpose, length=32):
    return hkdf(key, f"lamassu v1 {suite} {purpose}".encode(), length=length)


def aes(mode, key, data):
    e = Cipher(algorithms.AES(key), mode).encryptor()
    return e.update(data) + e.finalize()


def ecb(key, data):
    return aes(modes.ECB(), key, data)


def xaes_seal(key, nonce, aad, plain):
    l = int.from_bytes(ecb(key, bytes(16)), "big")
    k1 = ((l << 1) & (2**128 - 1)) ^ (0x87 if l >> 127 else 0)
    xor = lambda m: (int.from_bytes(m, "big") ^ k1).to_bytes(16, "big")
    derived = b"".join(ecb(key, xor(bytes([0, c, 0x58, 0]) + nonce[:12])) for c in (1, 2))
    sealed = AESGCM(derived).encrypt(nonce[12:], plain, aad)
    return sealed[-16:], sealed[:-16]


def rotl(x, n):
    return ((x << n) | (x >> (32 - n))) & 0xFFFFFFFF


def hchacha20(key, nonce16):
    s = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), *struct.unpack("<4I", nonce16)]

    def quarter(a, b, c, d):
        for x, y, z, n in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            s[x] = (s[x] + s[y]) & 0xFFFFFFFF
            s[z] = rotl(s[z] ^ s[x], n)

    for _ in range(10):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return struct.pack("<8I", *s[:4], *s[12:])


def xchacha_seal(key, nonce, aad, plain):
    sealed = ChaCha20Poly1305(hchacha20(key, nonce[:16])).encrypt(bytes(4) + nonce[16:], plain, aad)
    return sealed[-16:], sealed[:-16]


def aead_seal(suite, *args):
    return (xchacha_seal if suite == "chacha" else xaes_seal)(*args)


IV = [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19]


def blake3_compress(cv, block, counter, length, flags):
    m = list(struct.unpack("<16I", block.ljust(64, b"\0")))
    v = list(cv) + IV[:4] + [counter & 0xFFFFFFFF, counter >> 32, length, flags]

    def g(a, b, c, d, x, y):
        v[a] = (v[a] + v[b] + x) & 0xFFFFFFFF
        v[d] = rotl(v[d] ^ v[a], 16)
        v[c] = (v[c] + v[d]) & 0xFFFFFFFF
        v[b] = rotl(v[b] ^ v[c], 20)
        v[a] = (v[a] + v[b] + y) & 0xFFFFFFFF
        v[d] = rotl(v[d] ^ v[a], 24)
        v[c] = (v[c] + v[d]) & 0xFFFFFFFF
        v[b] = rotl(v[b] ^ v[c], 25)

    for _ in range(7):
        for i in range(4):
            g(i, 4 + i, 8 + i, 12 + i, m[2 * i], m[2 * i + 1])
        for i in range(4):
            g(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[8 + 2 * i], m[9 + 2 * i])
        m = [m[i] for i in (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)]
    return [v[i] ^ v[i + 8] for i in range(8)]


def blake3_keyed(key, data):
    words, keyed, start, end, parent, root = list(struct.unpack("<8I", key)), 16, 1, 2, 4, 8

    def chunk(data, counter, last):
        cv, blocks = words, [data[i:i + 64] for i in range(0, len(data), 64)] or [b""]
        for i, b in enumerate(blocks):
            flags = keyed | (start if i == 0 else 0) | ((end | last) if i == len(blocks) - 1 else 0)
            cv = blake3_compress(cv, b, counter, len(b), flags)
        return cv

    def tree(data, counter, last):
        if len(data) <= 1024:
            return chunk(data, counter, last)
        left = 1024
        while left * 2 < len(data):
            left *= 2
        cvs = tree(data[:left], counter, 0) + tree(data[left:], counter + left // 1024, 0)
        return blake3_compress(words, struct.pack("<16I", *cvs), 0, 64, keyed | parent | last)

    return struct.pack("<8I", *tree(data, 0, root))


# The BLAKE3 team's test vectors, keyed mode, input lengths 0 and 4096 (first bytes).
_PATTERN, _KEY = bytes(i % 251 for i in range(4096)), b"whats the Elvish word for friend"
assert blake3_keyed(_KEY, b"").hex().startswith("92b2b75604ed3c761f9d6f62392c8a92")
assert xaes_seal(b"\3" * 32, b"ABCDEFGHIJKLMNOPQRSTUVWX", b"c2sp.org/XAES-256-GCM", b"XAES-256-GCM")[1].hex() == "986ec1832593df5443a17943"


# --- the format -------------------------------------------------------------------------------------------------------------------

OWN = {"aes": ("aes-256", "sha-256"), "paper": ("aes-256", "sha-256"), "blake3": ("aes-256", "blake3"), "chacha": ("chacha20", "blake3")}


def block_hash(suite, k_in, data, method):
    return hashlib.sha256(data).digest() if method[1] == "sha-256" else blake3_keyed(derive(suite, k_in, "block hash"), data)


def block_key(suite, k_in, data, salt=b"", method=None):
    method = method or OWN[suite]
    h = block_hash(suite, k_in, data, method)
    if suite == "paper":
        return ecb(k_in, h)
    differs = [part for part, own in zip(method, OWN[suite]) if part != own]
    kdf = derive(suite, k_in, " ".join(["block key", *differs]))
    if suite == "aes":
        key = b""
        for c in (1, 2):
            mac = cmac.CMAC(algorithms.AES(kdf))
            mac.update(struct.pack(">I", c) + b"lamassu\0" + h + salt + struct.pack(">I", 256))
            key += mac.finalize()
    else:
        key = blake3_keyed(kdf, h + salt)
    return key[:31] + bytes([key[31] & 0xFE])


def encrypt_block(suite, key, data, method=None):
    if method and method[0] == "aes-128":
        key = key[:16]
    if suite in ("aes", "paper"):
        return aes(modes.CBC(bytes(16)), key, data)
    if suite == "blake3":
        return aes(modes.CTR(bytes(16)), key, data)
    return Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor().update(data)


def seal(suite, k_out, what, nonce, aad, plain):
    tag, sealed = aead_seal(suite, derive(suite, k_out, f"{what} seal"), nonce, aad, plain)
    return nonce + tag + prf(derive(suite, k_out, f"{what} select"), nonce + aad)[:16] + sealed


def siv(key, aad, plain):
    # `cryptography` refuses an empty plaintext; no name is empty.
    return AESSIV(key).encrypt(plain, [aad])


def stream(label, length):
    """Deterministic bytes: SHA-256 in counter mode."""
    return b"".join(hashlib.sha256(f"{label} {i}".encode()).digest() for i in range(-(-length // 32)))[:length]


def b64(x):
    return base64.urlsafe_b64encode(x).rstrip(b"=").decode()


def blocks():
    for suite in SUITES:
        k_in = stream(f"K_in {suite}", 32)
        for label, data in (("text", stream("block", 4096)), ("zeros", bytes(4096)), ("large", stream("large block", 16384))):
            key = block_key(suite, k_in, data)
            cipher = encrypt_block(suite, key, data)
            row = {"suite": suite, "label": label, "k_in": k_in.hex(), "block_size": len(data), "k": key.hex()}
            if label == "text":
                row |= {"block": data.hex(), "ciphertext": cipher.hex()}
            elif label == "zeros":
                row |= {"block_zeros": len(data), "ciphertext_sha256": hashlib.sha256(cipher).hexdigest()}
            else:
                # SHA-256 of "large block 0", of "large block 1", …, joined.
                row |= {"block_stream": "large block", "ciphertext_sha256": hashlib.sha256(cipher).hexdigest()}
            yield row


def salted_blocks():
    file_id, number = stream("file id", 16), 0x0123456789ABCDEF
    for suite in ("aes", "blake3", "chacha"):
        k_in, data = stream(f"K_in {suite}", 32), stream("block", 4096)
        for domain, salt in (("file", file_id), ("none", file_id + struct.pack("<Q", number))):
            key = block_key(suite, k_in, data, salt)
            # SHA-256 of "block 0", of "block 1", …, joined.
            yield {"suite": suite, "domain": domain, "k_in": k_in.hex(), "file_id": file_id.hex(), "number": number, "block_size": len(data),
                   "k": key.hex(), "block_stream": "block", "ciphertext_sha256": hashlib.sha256(encrypt_block(suite, key, data)).hexdigest()}


def methods():
    """Blocks of files whose cipher or hash is not the suite's, and the K of the same blocks stored plain."""
    file_id = stream("file id", 16)
    for suite, ciphers in (("aes", ("aes-256", "aes-128")), ("blake3", ("aes-256", "aes-128")), ("chacha", ("chacha20",))):
        k_in = stream(f"K_in {suite}", 32)
        for method in ((cipher, h) for cipher in ciphers for h in ("sha-256", "blake3")):
            if method == OWN[suite]:
                continue
            for label, salt in (("zeros", b""), ("block", b""), ("block", file_id)):
                data = bytes(4096) if label == "zeros" else stream(label, 4096)
                key = block_key(suite, k_in, data, salt, method)
                plain_k = block_hash(suite, k_in, data, method)
                row = {"suite": suite, "cipher": method[0], "hash": method[1], "k_in": k_in.hex(), "block_size": len(data), "k": key.hex(),
                       "plain_k": (plain_k[:31] + bytes([plain_k[31] & 0xFE])).hex(),
                       "ciphertext_sha256": hashlib.sha256(encrypt_block(suite, key, data, method)).hexdigest()}
                row |= {"block_zeros": len(data)} if label == "zeros" else {"block_stream": label}
                yield row | ({"domain": "file", "file_id": file_id.hex(), "number": 7} if salt else {})


def compressed_blocks():
    """Blocks whose payloads are written here by hand: a repeated word by LZ4, one byte by an RLE block of Zstandard."""
    def lz4(size):
        match = size - 12 - 19
        return b"\x4fabcd\x04\x00" + b"\xff" * (match // 255) + bytes([match % 255]) + b"\x80abcdabcd"

    def zstd(size):
        return bytes.fromhex("28b52ffd60") + struct.pack("<H", size - 256) + (size << 3 | 3).to_bytes(3, "little") + b"x"

    file_id = stream("file id", 16)
    for suite in ("aes", "blake3", "chacha"):
        k_in = stream(f"K_in {suite}", 32)
        for size, round_ in ((4096, 512), (16384, 4096)):
            for codec, (number, made, word) in {"lz4": (1, lz4(size), b"abcd"), "zstd": (2, zstd(size), b"x")}.items():
                for salt in (b"", file_id):
                    payload = bytes([number]) + len(made).to_bytes(3, "little") + made
                    payload += bytes(-len(payload) % round_)
                    key = block_key(suite, k_in, payload, salt)
                    key = key[:31] + bytes([key[31] | 1])
                    stored = encrypt_block(suite, key, payload).ljust(size, b"\0")
                    row = {"suite": suite, "codec": codec, "round": round_, "k_in": k_in.hex(), "block_size": size, "block_word": word.decode(),
                           "payload_len": len(payload), "k": key.hex(), "ciphertext": stored[:len(payload)].hex()}
                    yield row | ({"domain": "file", "file_id": file_id.hex(), "number": 7} if salt else {})


def pages():
    for suite, ident in SUITES.items():
        k_out, content = stream(f"K_out {suite}", 32), stream("page", 4040)
        aad = struct.pack("<HBBHHQ", 1, ident, 12, 8, 0, 7)
        for kind in ("random", "convergent"):
            nonce = stream("page nonce", 24)
            if kind == "convergent":
                aad = struct.pack("<HBBHHQ", 1, ident, 12, 8, 0, 0)
                nonce = prf(derive(suite, k_out, "page convergent"), aad + content)[:24]
            page = seal(suite, k_out, "page", nonce, aad, content)
            assert len(page) == 4096
            yield {"suite": suite, "kind": kind, "k_out": k_out.hex(), "aad": aad.hex(), "nonce": nonce.hex(),
                   "content": content.hex(), "page": page.hex()}


def records():
    for suite, ident in SUITES.items():
        k_out, nonce = stream(f"K_out {suite}", 32), stream("record nonce", 24)
        attribute = siv(derive(suite, k_out, "xattr name", 64), b"lamassu v1 xattr", b"user.comment")
        stored = "user.lamassu." + b64(attribute)
        for kind, context, content in ((1, b"", stream("directory record", 56)), (2, b"", b"../target"), (3, b"", stream("head", 100)),
                                       (4, stream("link id", 16), b"rest"), (5, stored.encode(), b""), (5, stored.encode(), b"a value")):
            record = seal(suite, k_out, "record", nonce, struct.pack("<HBB", 1, ident, kind) + context, content)
            yield {"suite": suite, "k_out": k_out.hex(), "kind": kind, "context": context.hex(), "nonce": nonce.hex(),
                   "content": content.hex(), "record": record.hex()}


def xattrs():
    for suite in SUITES:
        k_out = stream(f"K_out {suite}", 32)
        for name in ("user.comment", "system.posix_acl_access", "a"):
            sealed = siv(derive(suite, k_out, "xattr name", 64), b"lamassu v1 xattr", name.encode())
            yield {"suite": suite, "k_out": k_out.hex(), "name": name, "sealed": sealed.hex(), "stored": "user.lamassu." + b64(sealed)}


def names():
    secret, ident = stream("directory secret", 32), stream("directory id", 16)
    for name in ("a", "report.txt", "exactly 16 bytes", "ünïcödé — 名前", "x" * 255):
        sealed = siv(hkdf(secret, b"lamassu v1 name", length=64), ident, name.encode())
        yield {"secret": secret.hex(), "id": ident.hex(), "name": name, "sealed": sealed.hex(), "entry": b64(sealed),
               "long": "lamassu.long." + b64(hashlib.sha256(sealed).digest())}


def slots():
    vault, salt, nonce, file_key = (stream(label, n) for label, n in (("vault id", 16), ("slot salt", 32), ("slot nonce", 24), ("file key", 32)))
    for ident, kind, source, cost in ((1, "raw", stream("raw key", 32), None), (7, "passphrase", b"correct horse battery staple", (64, 3, 2)),
                                      (8, "passphrase", "пароль".encode(), (256, 1, 4))):
        secret, row = source, {}
        if cost:
            m, t, p = cost
            secret = Argon2id(salt=salt, length=32, iterations=t, lanes=p, memory_cost=m).derive(source)
            row = {"argon2": {"memory_kib": m, "passes": t, "lanes": p}}
        wrapping = hkdf(secret, b"lamassu v1 slot", salt=salt)
        aad = b"lamassu v1 slot" + vault + struct.pack("<I", ident)
        tag, sealed = xaes_seal(wrapping, nonce, aad, file_key)
        yield row | {"id": ident, "kind": kind, "source": source.hex(), "salt": salt.hex(), "vault_id": vault.hex(), "secret": secret.hex(),
                     "wrapping_key": wrapping.hex(), "nonce": nonce.hex(), "aad": aad.hex(), "file_key": file_key.hex(),
                     "wrapped": (tag + sealed).hex()}


for make in (blocks, salted_blocks, methods, compressed_blocks, pages, records, xattrs, names, slots):
    path = pathlib.Path(__file__).with_name(make.__name__ + ".json")
    path.write_text(json.dumps(list(make()), indent=1, ensure_ascii=False) + "\n")
    print(path.name)
