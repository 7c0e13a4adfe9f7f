"""A minimal writer of the format, for the reader's own tests and nothing else.

It shares the primitives (crypto.py) with the reader, and lays out everything else by itself. It keeps none of the promises
a real writer makes about interrupted writes; it can write states that such interruptions leave behind, and damage.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argon2 import Type
from argon2.low_level import hash_secret_raw
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lamassu_reader.crypto import OF_SUITE, SUITES, InnerKeys, Method, OuterKeys, b64, hkdf, outer, prf, siv_seal, xaes_seal

Rand = Callable[[int], bytes]
HOLE = bytes(32)
CLOSED, OPEN = 1, 2
"""Sessions of every vault, unless its record is written otherwise."""


def counter_rand(seed: bytes) -> Rand:
    """Bytes that are the same in every run."""
    state = [0]

    def rand(n: int) -> bytes:
        state[0] += 1
        return hashlib.shake_256(seed + state[0].to_bytes(8, "little")).digest(n)

    return rand


def le(value: int, size: int) -> bytes:
    """An unsigned little-endian integer."""
    return value.to_bytes(size, "little")


@dataclass
class PageSpec:
    """The fields of one metadata page, to be written as they are, right or wrong."""

    size: int
    file_id: bytes = bytes(16)
    session: int = 0
    tail: bytes | None = None
    sparse: bool = False
    cut: bool = False
    more_flags: int = 0
    used: int | None = None
    pending: set[int] = field(default_factory=set)
    previous: dict[int, bytes] = field(default_factory=dict)
    keys: list[bytes] = field(default_factory=list)
    junk: dict[int, int] = field(default_factory=dict)
    """Plaintext offset (0 to 4039) to byte: overrides, for damage."""
    sequence: int | None = None
    """1 in a page of a session, unless told otherwise."""

    def plain(self) -> bytes:
        """The 4040 plaintext bytes."""
        used = len(self.keys) if self.used is None else self.used
        flags = (self.tail is not None) | self.sparse << 1 | self.cut << 2 | used << 8 | self.more_flags
        slots = b"".join(self.keys) + b"".join(self.previous[i] for i in sorted(self.previous))
        tail = self.tail or b""
        tail += bytes(-len(tail) % 32)
        out = bytearray(
            le(self.size, 8)
            + self.file_id
            + le(self.session, 4)
            + le(min(self.session, 1) if self.sequence is None else self.sequence, 4)
            + le(flags, 8)
            + le(sum(1 << i for i in self.pending), 16)
            + le(sum(1 << i for i in self.previous), 16)
            + slots
            + bytes(124 * 32 - len(slots) - len(tail))
            + tail
        )
        for offset, value in self.junk.items():
            out[offset] = value
        assert len(out) == 4040
        return bytes(out)


class Writer:
    """A new vault in `directory`, written piece by piece."""

    def __init__(
        self,
        directory: Path,
        suite: str = "aes",
        *,
        block_size: int = 4096,
        reserved: int = 8,
        names: str = "encrypted",
        name_max: int = 255,
        inner_epochs: int = 1,
        outer_epochs: int = 1,
        seed: bytes = b"lamassu",
        records_as_files: bool = False,
    ) -> None:
        self.dir = directory
        self.suite = SUITES[suite]
        self.B, self.R, self.N, self.P = block_size, reserved, 124 - reserved, block_size // 4096
        self.name_max = name_max
        self.plain_names = names == "plain"
        self.records_as_files = records_as_files
        self.rand = counter_rand(seed)
        self.id = self.rand(16)
        self.file_key = self.rand(32)
        self.inner_raw = [self.rand(32) for _ in range(inner_epochs)]
        self.outer_raw = [self.rand(32) for _ in range(outer_epochs)]
        self.epoch = outer_epochs - 1
        self.secrets: dict[Path, tuple[bytes, bytes]] = {}
        self.seed: bytes | None = None  # of the administrator
        self.oblivious: dict[str, str] | None = None  # the server's key that the newest K_in goes with
        self.before: list[dict[str, str]] = []  # earlier keys of the administrator
        self.header: dict[str, Any] = {
            "format": "lamassu-vault",
            "version": 1,
            "features": [],
            "id": self.id.hex(),
            "zone": self.id.hex(),
            "suite": suite,
            "block_size": block_size,
            "reserved_slots": reserved,
            "names": names,
            "name_max": name_max,
            "small_files": "convergent",
            "created": 1700000000,
            "next_slot": 1,
            "slots": [],
        }
        directory.mkdir(exist_ok=True)
        (directory / "lamassu.lock").touch()
        (directory / "lamassu.staging").mkdir(0o700)
        if not self.plain_names:
            self.directory_record(directory)

    # --- keys ----------------------------------------------------------------------------------

    @property
    def outer(self) -> OuterKeys:
        """The keys of the epoch in use."""
        return outer(self.suite, self.outer_raw[self.epoch])

    @property
    def inner(self) -> InnerKeys:
        """The keys of the newest K_in."""
        return self.suite.inner(self.inner_raw[-1], self.oblivious is not None)

    def slot(self, kind: str, source: bytes, label: str = "", use_only: bool = False) -> None:
        """Add a key slot; `source` as the secret itself (32 bytes), or a passphrase."""
        number, salt, nonce = len(self.header["slots"]) + 1, self.rand(32), self.rand(24)
        slot: dict[str, Any] = {
            "id": number,
            "kind": kind,
            "label": label,
            "created": 1700000000,
            "salt": salt.hex(),
            "nonce": nonce.hex(),
        }
        secret = source
        if kind == "passphrase":
            slot["argon2"] = {"memory_kib": 64, "passes": 1, "lanes": 2}
            secret = hash_secret_raw(source, salt, 1, 64, 2, 32, Type.ID, 0x13)
        wrapping = hkdf(secret, b"lamassu v1 slot", salt=salt)
        content = self.file_key
        if use_only:
            slot["role"] = "use"
        elif self.seed is not None:
            content += self.seed
        tag, cipher = xaes_seal(wrapping, nonce, content, b"lamassu v1 slot" + self.id + le(number, 4))
        slot["wrapped"] = (tag + cipher).hex()
        self.header["slots"].append(slot)
        self.header["next_slot"] = number + 1

    def history(self, *events: str, mark: bool = True) -> list[bytes]:
        """Write a history of these events; its entries."""
        key, head, entries = hkdf(self.file_key, b"lamassu v1 history"), bytes(32), []
        for sequence, event in enumerate(events, 1):
            content = json.dumps({"time": 1700000000, "event": event, "uid": 0, "host": "h"}).encode()
            content = content.ljust(-(-len(content) // 256) * 256)
            nonce = self.rand(24)
            aad = b"lamassu v1 history" + self.id + le(sequence, 8) + head
            tag, cipher = xaes_seal(key, nonce, content, aad)
            entries.append(le(len(content), 4) + nonce + tag + cipher)
            head = hashlib.sha256(entries[-1]).digest()
        (self.dir / "lamassu.history").write_bytes(b"".join(entries))
        if mark:
            self.header["history"] = {"count": len(entries), "head": head.hex()}
        return entries

    def chain(self) -> dict[str, Any]:
        """The keychain object."""

        def epochs(keys: list[bytes]) -> list[dict[str, Any]]:
            return [{"created": 1700000000 + n, "epoch": n, "key": k.hex()} for n, k in enumerate(keys, 1)]

        inner = epochs(self.inner_raw)
        if self.oblivious is not None:
            inner[-1]["oblivious"] = self.oblivious
        return {"inner": inner, "outer": epochs(self.outer_raw)}

    def header_bytes(self, chain: bytes | None = None) -> bytes:
        """The header, sealed and authenticated."""
        nonce = self.rand(24)
        key = hkdf(self.file_key, b"lamassu v1 keychain")
        plain = json.dumps(self.chain(), sort_keys=True, separators=(",", ":")).encode() if chain is None else chain
        tag, cipher = xaes_seal(key, nonce, plain, b"lamassu v1 keychain" + self.id)
        body = dict(self.header) | {"keychain": {"nonce": nonce.hex(), "sealed": (tag + cipher).hex()}}


        def canonical_of(value: dict[str, Any]) -> bytes:
            return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

        if self.seed is not None:
            key_pair = Ed25519PrivateKey.from_private_bytes(self.seed)
            body["admin"] = {"public": key_pair.public_key().public_bytes_raw().hex()} | ({"before": self.before} if self.before else {})
            signature = key_pair.sign(b"lamassu v1 admin" + canonical_of(body))
            body["admin"] = body["admin"] | {"signature": signature.hex()}
        canonical = canonical_of(body)
        body["mac"] = prf(hkdf(self.file_key, b"lamassu v1 header"), canonical).hex()
        return (json.dumps(body, indent=2) + "\n").encode()

    def sessions_content(self, last: int, *ranges: tuple[int, int]) -> bytes:
        """The content of a record of sessions, right or wrong."""
        return le(1, 2) + le(len(ranges), 2) + le(last, 4) + b"".join(le(low, 4) + le(high, 4) for low, high in ranges)

    def put_sessions(self, content: bytes, vault_id: bytes | None = None, kind: int = 7) -> None:
        """Write the record of sessions, in the place of the one there."""
        path = self.dir / "lamassu.sessions" / "record"
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        self.put_text(path, b64(self.record(kind, self.id if vault_id is None else vault_id, content)))

    def put_root(self, content: bytes, kind: int = 8) -> None:
        """Write the record of the root's permissions, in the place of the one there."""
        path = self.dir / "lamassu.root"
        path.unlink(missing_ok=True)
        self.put_text(path, b64(self.record(kind, b"", content)))

    def finish(self) -> None:
        """Write the header and, if there is none, the record of sessions."""
        if not os.path.lexists(self.dir / "lamassu.sessions" / "record"):
            self.put_sessions(self.sessions_content(OPEN, (OPEN, OPEN)))
        (self.dir / "lamassu.vault").write_bytes(self.header_bytes())

    # --- records and names -----------------------------------------------------------------------

    def record(self, kind: int, context: bytes, content: bytes) -> bytes:
        """A sealed record."""
        nonce = self.rand(24)
        aad = le(1, 2) + bytes((self.suite.id, kind)) + context
        tag, cipher = self.suite.seal(self.outer.record_seal, nonce, content, aad)
        return nonce + tag + prf(self.outer.record_select, nonce + aad)[:16] + cipher

    def put_text(self, path: Path, text: bytes) -> None:
        """A record's text, as link or file."""
        if self.records_as_files:
            path.write_bytes(text)
        else:
            os.symlink(text, os.fsencode(path))

    def directory_record(self, directory: Path, content: bytes | None = None) -> None:
        """Give a directory its record."""
        directory_id, secret = self.rand(16), self.rand(32)
        if content is None:
            content = le(1, 2) + le(0, 2) + directory_id + secret + le(0, 4)
        self.put_text(directory / "lamassu.dir", b64(self.record(1, b"", content)))
        self.secrets[directory] = (directory_id, hkdf(secret, b"lamassu v1 name", 64))

    def name(self, directory: Path, name: bytes) -> Path:
        """Where an entry called `name` goes; makes the companion of a long one."""
        if self.plain_names:
            return directory / os.fsdecode(name)
        directory_id, key = self.secrets[directory]
        stored = b64(siv_seal(key, directory_id, name))
        if len(stored) <= self.name_max:
            return directory / stored.decode()
        h = b64(hashlib.sha256(siv_seal(key, directory_id, name)).digest()).decode()
        self.put_text(directory / f"lamassu.name.{h}", stored)
        return directory / f"lamassu.long.{h}"

    def mkdir(self, directory: Path, name: bytes) -> Path:
        """A directory with its record."""
        path = self.name(directory, name)
        path.mkdir()
        if not self.plain_names:
            self.directory_record(path)
        return path

    def symlink(self, directory: Path, name: bytes, target: bytes) -> Path:
        """A symbolic link, long or not."""
        path = self.name(directory, name)
        text = b64(self.record(2, b"", target))
        if len(text) > 1023:
            link_id = self.rand(16)
            text = b"." + b64(self.record(3, b"", link_id + le(len(target), 2) + target[:680]))
            rest = b64(self.record(4, link_id, target[680:]))
            (directory / f"lamassu.link.{b64(link_id).decode()}").write_bytes(rest)
        os.symlink(text, os.fsencode(path))
        return path

    def xattr(self, path: Path, name: bytes, value: bytes) -> str:
        """An extended attribute; returns its stored name."""
        stored = "user.lamassu." + b64(siv_seal(self.outer.xattr_name, b"lamassu v1 xattr", name)).decode()
        holder = b"/" + (b"" if self.plain_names else self.secrets[path][0]) if path.is_dir() else b""
        os.setxattr(path, stored, self.record(5, stored.encode() + holder, value))
        return stored

    # --- regular files ---------------------------------------------------------------------------

    def page_at(self, g: int) -> int:
        """Offset of page g."""
        return (g // self.P) * (self.B + self.P * self.N * self.B) + (g % self.P) * 4096

    def block_at(self, b: int) -> int:
        """Offset of block b."""
        pn = self.P * self.N
        return (b // pn) * (self.B + pn * self.B) + self.B + (b % pn) * self.B

    def page_bytes(self, g: int, page: PageSpec) -> bytes:
        """A sealed page."""
        plain = page.plain()
        aad = le(1, 2) + bytes((self.suite.id, self.B.bit_length() - 1)) + le(self.R, 2) + le(0, 2) + le(g, 8)
        convergent = page.file_id == bytes(16)
        nonce = prf(self.outer.page_convergent, aad + plain)[:24] if convergent else self.rand(24)
        tag, cipher = self.suite.seal(self.outer.page_seal, nonce, plain, aad)
        return nonce + tag + prf(self.outer.page_select, nonce + aad)[:16] + cipher

    def put_page(self, path: Path, g: int, page: PageSpec) -> None:
        """Write a page in place."""
        self.put(path, self.page_at(g), self.page_bytes(g, page))

    def put(self, path: Path, offset: int, data: bytes) -> None:
        """Write bytes in place."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(fd, data, offset)
        os.close(fd)

    def put_block(self, path: Path, b: int, data: bytes) -> bytes:
        """Write a data block in place; returns its key."""
        key, cipher = self.block(data)
        self.put(path, self.block_at(b), cipher)
        return key

    def block(
        self, data: bytes, inner: InnerKeys | None = None, salt: bytes = b"", method: Method = OF_SUITE
    ) -> tuple[bytes, bytes]:
        """Key and ciphertext of a block."""
        plain = data.ljust(self.B, b"\0")
        # In an oblivious epoch any function of the block is as good as a server's.
        key = (inner or self.inner).block_key(plain, salt, method, hashlib.sha256(b"token" + plain).digest())
        return key, self.suite.encrypt_block(key, plain, method)

    def write_file(self, path: Path, data: bytes, holes: frozenset[int] = frozenset(), sparse: bool = False) -> None:
        """A whole file. Blocks in `holes` must be zero in `data`; pages of holes alone are left out."""
        total = -(-len(data) // self.B)
        last = max(total - 1, 0) // self.N
        file_id = bytes(16) if last == 0 else self.rand(16)
        path.touch()
        for g in range(last, -1, -1):
            blocks = range(g * self.N, min((g + 1) * self.N, total))
            if 0 < g < last and all(b in holes for b in blocks):
                continue
            page = PageSpec(min(len(data), (g + 1) * self.N * self.B) if g else len(data), file_id, sparse=sparse and not g)
            page.session = 0 if last == 0 else CLOSED
            for b in blocks:
                content = data[b * self.B : (b + 1) * self.B]
                if len(content) < self.B and len(page.keys) + -(-len(content) // 32) <= 124:
                    page.tail = content
                elif b in holes:
                    page.keys.append(HOLE)
                else:
                    page.keys.append(self.put_block(path, b, content))
            self.put_page(path, g, page)
