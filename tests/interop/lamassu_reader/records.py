"""Sealed records, directory records and sealed names: sections 5, 6 and 7."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from .crypto import NONCE, TAG, OpenFailed, Suite, b64, hkdf, outer, prf, same, siv_open, unb64
from .errors import Damage, Where
from .pages import is_profile, is_profile_of

DIRECTORY, LINK, LONG_LINK, LINK_REST, XATTR, PARENT_SLOT, SESSIONS, ROOT = 1, 2, 3, 4, 5, 6, 7, 8
HEAD = NONCE + TAG + 16
LONG_LINK_HEAD = 680
STORED_LINK_LIMIT = 1023
PATH_LIMIT = 4095
TEXT_LIMIT = 8191


def open_record(suite: Suite, epochs: tuple[bytes, ...], kind: int, context: bytes, record: bytes, where: Where) -> bytes:
    """The content of a sealed record. `epochs` are the K_out, newest first."""
    if len(record) < HEAD:
        raise Damage(where, f"a sealed record of {len(record)} bytes")
    nonce, tag, mark = record[:24], record[24:40], record[40:56]
    aad = (1).to_bytes(2, "little") + bytes((suite.id, kind)) + context
    for k_out in epochs:
        keys = outer(suite, k_out)
        if same(mark, prf(keys.record_select, nonce + aad)[:16]):
            try:
                return suite.open(keys.record_seal, nonce, tag, record[HEAD:], aad)
            except OpenFailed:
                raise Damage(where, f"the sealed record (kind {kind}) is damaged") from None
    raise Damage(where, f"no epoch opens the sealed record (kind {kind}): key not loaded, or damaged")


def decode(text: bytes, where: Where) -> bytes:
    """Strict base64url; Damage."""
    try:
        return unb64(text)
    except ValueError as e:
        raise Damage(where, str(e)) from None


def read_text(path: bytes, *, may_be_link: bool = True) -> bytes:
    """The target of a symbolic link, or the content of the regular file that stands for one."""
    try:
        mode = os.lstat(path).st_mode
        if may_be_link and stat.S_ISLNK(mode):
            return os.readlink(path)
        if stat.S_ISREG(mode):
            with open(path, "rb") as f:
                text = f.read(TEXT_LIMIT + 1)
            if len(text) > TEXT_LIMIT:
                raise Damage(path, f"longer than {TEXT_LIMIT} bytes")
            return text
    except FileNotFoundError:
        raise Damage(path, "missing") from None
    raise Damage(path, "neither a symbolic link nor a regular file" if may_be_link else "not a regular file")


@dataclass(frozen=True)
class DirectoryKeys:
    """What a directory record gives: how the names in that directory are sealed."""

    id: bytes
    name_key: bytes
    profile: int
    """Of what is made in the directory."""

    def open_name(self, sealed: bytes, where: Where) -> bytes:
        """The name behind a sealed name."""
        try:
            name = siv_open(self.name_key, self.id, sealed)
        except OpenFailed:
            raise Damage(where, "the name does not open in this directory") from None
        if not 1 <= len(name) <= 255 or b"/" in name or b"\0" in name or name in (b".", b".."):
            raise Damage(where, "the name opens to something that is not a file name")
        return name


def parse_directory(suite: Suite, content: bytes, where: Where) -> DirectoryKeys:
    """The content of a directory record."""
    if len(content) < 56:
        raise Damage(where, f"a directory record of {len(content)} bytes")
    version = int.from_bytes(content[0:2], "little")
    flags = int.from_bytes(content[2:4], "little")
    properties = int.from_bytes(content[52:56], "little")
    if version != 1:
        raise Damage(where, f"directory record version {version}")
    if flags:
        raise Damage(where, f"unknown directory flags {flags:#x}")
    if properties > 1 or len(content) != 56 + properties:
        raise Damage(where, f"directory record with properties or trailing bytes ({properties}, {len(content)})")
    profile = content[56] if properties else 0
    if properties and not (profile and is_profile(profile) and is_profile_of(suite, profile)):
        raise Damage(where, f"directory record with profile {profile}")
    return DirectoryKeys(content[4:20], hkdf(content[20:52], b"lamassu v1 name", 64), profile)


def open_link(suite: Suite, epochs: tuple[bytes, ...], path: bytes, stored: bytes) -> bytes:
    """The target behind the stored target `stored` of the symbolic link at `path`."""
    if not stored.startswith(b"."):
        target = open_record(suite, epochs, LINK, b"", decode(stored, path), path)
    else:
        head = open_record(suite, epochs, LONG_LINK, b"", decode(stored[1:], path), path)
        if len(head) != 18 + LONG_LINK_HEAD:
            raise Damage(path, f"the head of a long link target has {len(head)} bytes")
        link_id, total, first = head[:16], int.from_bytes(head[16:18], "little"), head[18:]
        rest_path = os.path.join(os.path.dirname(path), b"lamassu.link." + b64(link_id))
        text = read_text(rest_path, may_be_link=False)
        rest = open_record(suite, epochs, LINK_REST, link_id, decode(text, rest_path), rest_path)
        target = first + rest
        if len(target) != total:
            raise Damage(path, f"long link target of {len(target)} bytes, not {total}")
        if (HEAD + total) * 4 <= STORED_LINK_LIMIT * 3:
            raise Damage(path, f"a target of {total} bytes is not a long one")
    if not 1 <= len(target) <= PATH_LIMIT or b"\0" in target:
        raise Damage(path, "not a possible link target")
    return target
