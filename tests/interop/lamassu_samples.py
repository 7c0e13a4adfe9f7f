"""Samples made by the minimal writer, for other implementations to read.

    python lamassu_samples.py vectors       known answers as JSON (kept as vectors.json)
    python lamassu_samples.py vaults DIR    DIR/<suite>/{vault,plain,key}: vaults in every state, and what must be read from them;
                                            DIR/<suite>/damaged{,.json}: a vault of damaged files, and the one thing damaged in each

The key of every vault is the raw file `key`; its hex form and the passphrase `correct horse` open it too. Everything is the same
in every run.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from lamassu_reader.crypto import OF_SUITE, SUITES, b64, hkdf, outer, siv_seal
from lamassu_writer_min import CLOSED, HOLE, OPEN, PageSpec, Writer, counter_rand

RAW = bytes(range(0x40, 0x60))
K_IN, K_OUT = bytes(range(0x00, 0x20)), bytes(range(0x20, 0x40))


def _pattern(n: int, seed: int = 0) -> bytes:
    return hashlib.shake_256(b"pattern" + seed.to_bytes(4, "little")).digest(n)


def suite_vectors(name: str) -> dict[str, Any]:
    """Known answers of one suite, for B = 4096, R = 8, K_in = 00…1f, K_out = 20…3f."""
    suite = SUITES[name]
    with tempfile.TemporaryDirectory() as temp:
        w = Writer(Path(temp) / "v", name)
    w.inner_raw, w.outer_raw = [K_IN], [K_OUT]
    keys, inner = outer(suite, K_OUT), suite.inner(K_IN)
    plain = bytes(i % 251 for i in range(4096))
    block_key, cipher = w.block(plain)
    page = PageSpec(4096 + 13, keys=[block_key], tail=b"Hello, world!")
    nonce = bytes(range(0x60, 0x78))
    stored = "user.lamassu." + b64(siv_seal(keys.xattr_name, b"lamassu v1 xattr", b"user.comment")).decode()

    def record(kind: int, context: bytes, content: bytes) -> str:
        w.rand = lambda n: nonce[:n]
        return w.record(kind, context, content).hex()

    return {
        "page seal": keys.page_seal.hex(),
        "page select": keys.page_select.hex(),
        "page convergent": keys.page_convergent.hex(),
        "record seal": keys.record_seal.hex(),
        "record select": keys.record_select.hex(),
        "xattr name": keys.xattr_name.hex(),
        "block hash": inner.hash_key.hex() if suite.hashes_by_blake3(OF_SUITE) else None,
        "block key": inner.keys[OF_SUITE].hex(),
        "block": {
            "plaintext": "byte i is i mod 251",
            "K": block_key.hex(),
            "K of 4096 zero bytes": w.block(b"")[0].hex(),
            "ciphertext begins": cipher[:32].hex(),
            "ciphertext ends": cipher[-32:].hex(),
            "SHA-256 of ciphertext": hashlib.sha256(cipher).hexdigest(),
        },
        "convergent page": {
            "of": "that block, then the tail `Hello, world!`",
            "SHA-256 of the 4040 plaintext bytes": hashlib.sha256(page.plain()).hexdigest(),
            "nonce, tag, epoch tag": w.page_bytes(0, page)[:56].hex(),
            "SHA-256 of page": hashlib.sha256(w.page_bytes(0, page)).hexdigest(),
        },
        "record of kind 2, content `target`, nonce 60…77": record(2, b"", b"target"),
        "stored name of attribute `user.comment`": stored,
        "its record of kind 5, content `value`, nonce 60…77": record(5, stored.encode(), b"value"),
        "record of kind 7 of vault 80…8f, session 3 of 5 open, nonce 60…77": record(
            7, bytes(range(0x80, 0x90)), w.sessions_content(5, (3, 3))
        ),
    }


def vectors() -> str:
    """All known answers as JSON."""
    directory_id, secret, salt = bytes(range(0x80, 0x90)), bytes(range(0xA0, 0xC0)), bytes(range(0xC0, 0xE0))
    name_key = hkdf(secret, b"lamassu v1 name", 64)
    long = siv_seal(name_key, directory_id, b"n" * 200)
    out: dict[str, Any] = {
        "names": {
            "directory id": directory_id.hex(),
            "directory secret": secret.hex(),
            "name key": name_key.hex(),
            "sealed `hello.txt`": b64(siv_seal(name_key, directory_id, b"hello.txt")).decode(),
            "h of 200 times `n`": b64(hashlib.sha256(long).digest()).decode(),
        },
        "wrapping key of secret 40…5f, salt c0…df": hkdf(RAW, b"lamassu v1 slot", salt=salt).hex(),
        "keychain key of file key 40…5f": hkdf(RAW, b"lamassu v1 keychain").hex(),
        "header key of file key 40…5f": hkdf(RAW, b"lamassu v1 header").hex(),
        "suites": {name: suite_vectors(name) for name in SUITES},
    }
    return json.dumps(out, indent=2, ensure_ascii=False) + "\n"


def _states(w: Writer, plain: Path) -> None:
    """Files in the states that interruptions leave behind, and what they read as. What is under way is of the open session."""
    page, rand = w.N * w.B, counter_rand(b"states")

    def done(name: str, content: bytes) -> None:
        (plain / "states" / name).write_bytes(content)

    where = w.mkdir(w.dir, b"states")
    (plain / "states").mkdir()
    new, old = _pattern(w.B, 1), _pattern(w.B, 2)
    (kn, cn), (ko, co) = w.block(new), w.block(old)
    for name, stored, key, previous, want in (
        ("new", cn, kn, None, new),
        ("new over old", cn, kn, ko, new),
        ("new over hole", cn, kn, HOLE, new),
        ("kept old", co, kn, ko, old),
        ("kept hole", b"", kn, HOLE, bytes(w.B)),
        ("never written", b"", kn, None, bytes(w.B)),
        ("punched", b"", HOLE, ko, bytes(w.B)),
        ("not yet punched", co, HOLE, ko, old),
    ):
        path = w.name(where, name.encode())
        w.put(path, w.block_at(0), stored)
        before = {} if previous is None else {0: previous}
        w.put_page(path, 0, PageSpec(w.B, rand(16), OPEN, pending={0}, previous=before, keys=[key]))
        done(name, want)

    fid = rand(16)
    path = w.name(where, b"cut")
    keys = [w.put_block(path, b, _pattern(w.B, b)) for b in range(w.N)]
    w.put_page(path, 0, PageSpec(5000, fid, OPEN, cut=True, keys=keys))
    w.put_page(path, 2, PageSpec(2 * page + 1, fid, OPEN, tail=b"x"))
    done("cut", (_pattern(w.B, 0) + _pattern(w.B, 1))[:5000])

    fid = rand(16)
    path = w.name(where, b"absent above the floor")
    w.put_page(path, 0, PageSpec(7, fid, OPEN, tail=b"Hello, "))
    w.put_page(path, 2, PageSpec(2 * page + 6, fid, OPEN, tail=b"world!"))
    done("absent above the floor", b"Hello, ".ljust(2 * page, b"\0") + b"world!")

    for name, previous in (("pending in a closed session", None), ("replaced in a closed session", ko)):
        path = w.name(where, name.encode())
        w.put(path, w.block_at(0), cn)
        before = {} if previous is None else {0: previous}
        w.put_page(path, 0, PageSpec(w.B, rand(16), CLOSED, pending={0}, previous=before, keys=[kn]))
        done(name, new)

    path = w.name(where, b"never had a page")
    w.put(path, 0, bytes(4096))
    done("never had a page", b"")


def damaged_vault(suite: str, top: Path, **options: Any) -> None:
    """A vault of files that an interruption could have left behind, but for their session, which is not open; and what is damaged in each.

    They are what somebody makes who puts back pages and blocks that he has kept, and zeros.
    """
    w = Writer(top / "damaged", suite, seed=suite.encode() + b" damaged", **options)
    w.slot("raw", RAW, "the raw file")
    rand, page = counter_rand(b"damage"), w.N * w.B
    (kn, _), (ko, co) = w.block(_pattern(w.B, 1)), w.block(_pattern(w.B, 2))
    found: dict[str, str] = {}
    for name, stored, key, previous in (
        ("zeroed", b"", kn, None),
        ("zeroed over a hole", b"", kn, HOLE),
        ("old content", co, kn, ko),
        ("old content, unknown session", co, kn, ko),
    ):
        path = w.name(w.dir, name.encode())
        w.put(path, w.block_at(0), stored)
        before = {} if previous is None else {0: previous}
        session = OPEN + 1 if "unknown" in name else CLOSED
        w.put_page(path, 0, PageSpec(w.B, rand(16), session, pending={0}, previous=before, keys=[key]))
        found[name] = "block 0"

    path, fid = w.name(w.dir, b"cut"), rand(16)
    keys = [w.put_block(path, b, _pattern(w.B, b)) for b in range(2)]
    w.put_page(path, 0, PageSpec(w.B, fid, CLOSED, cut=True, keys=keys))
    found["cut"] = "page 0"

    path, fid = w.name(w.dir, b"absent"), rand(16)
    w.put_page(path, 0, PageSpec(7, fid, CLOSED, used=w.N))
    w.put_page(path, 2, PageSpec(2 * page + 6, fid, CLOSED, tail=b"world!"))
    found["absent"] = "page 1"
    w.finish()
    (top / "damaged.json").write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")


def vault(suite: str, top: Path, **options: Any) -> None:
    """One vault, its plain tree and its key; and one of damaged files."""
    top.mkdir(parents=True)
    plain = top / "plain"
    plain.mkdir()
    (top / "key").write_bytes(RAW)
    w = Writer(top / "vault", suite, seed=suite.encode(), **options)
    w.slot("raw", RAW, "the raw file")
    w.slot("hex", RAW, "the same in hex")
    w.slot("passphrase", b"correct horse", "a passphrase")
    made = w.dir
    for depth, folder in enumerate(("a folder", "ü" * 100, "n" * 255)):
        made, plain = w.mkdir(made, folder.encode()), plain / folder
        plain.mkdir()
        for size in (0, 1, w.B - 1, w.B, w.B + 1, 3 * w.B + 100, w.N * w.B, w.N * w.B + 1, w.P * w.N * w.B + 77):
            if size < 1 << 22:
                w.write_file(w.name(made, b"%d bytes" % size), _pattern(size, depth))
                (plain / f"{size} bytes").write_bytes(_pattern(size, depth))
        for name, target in (
            ("link", "a target"),
            ("m" * 200, "t" * 711),
            ("long link", "t" * 712),
            ("longest link", "t" * 4095),
        ):
            w.symlink(made, name.encode(), target.encode())
            os.symlink(target, plain / name)
        data = _pattern(w.B, 1).ljust((3 * w.N + 1) * w.B, b"\0") + b"end"
        if len(data) < 1 << 24:
            w.write_file(w.name(made, b"holes"), data, frozenset(range(1, 3 * w.N + 1)), sparse=True)
            (plain / "holes").write_bytes(data)
        w.epoch = min(w.epoch + 1, len(w.outer_raw) - 1)
    _states(w, top / "plain")
    w.finish()
    damaged_vault(suite, top, **options)


def main() -> int:
    """The command line."""
    if sys.argv[1:] == ["vectors"]:
        sys.stdout.write(vectors())
    elif len(sys.argv) == 3 and sys.argv[1] == "vaults":
        top = Path(sys.argv[2])
        vault("aes", top / "aes", outer_epochs=2, inner_epochs=2)
        vault("paper", top / "paper", block_size=8192, reserved=62, name_max=64)
        vault("blake3", top / "blake3", reserved=1, name_max=143, records_as_files=True)
        vault("chacha", top / "chacha", block_size=65536, names="plain")
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
