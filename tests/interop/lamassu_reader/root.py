"""The permissions that the root of the tree shows: section 6b."""

from __future__ import annotations

import os
from dataclasses import dataclass

from . import records
from .errors import Damage, Where
from .header import Header

VERSION = 1
LENGTH = 16
MODE_BITS = 0o7777
NO_ID = (1 << 32) - 1


@dataclass(frozen=True)
class Permissions:
    """Mode, owner and group of the root."""

    mode: int
    uid: int
    gid: int


def parse(content: bytes, where: Where) -> Permissions:
    """The content of the record, strictly."""
    if len(content) != LENGTH:
        raise Damage(where, f"a record of the root's permissions of {len(content)} bytes")
    version, zero = (int.from_bytes(content[at : at + 2], "little") for at in (0, 2))
    mode, uid, gid = (int.from_bytes(content[at : at + 4], "little") for at in (4, 8, 12))
    if version != VERSION:
        raise Damage(where, f"record of the root's permissions, version {version}")
    if zero or mode & ~MODE_BITS or NO_ID in (uid, gid):
        raise Damage(where, "record of the root's permissions with values that no writer writes")
    return Permissions(mode, uid, gid)


def load(header: Header, directory: bytes) -> Permissions | None:
    """The record of the vault in `directory`; None where there is none, Damage where it does not open."""
    path = os.path.join(directory, b"lamassu.root")
    if not os.path.lexists(path):
        return None
    record = records.decode(records.read_text(path), path)
    return parse(records.open_record(header.suite, header.outer, records.ROOT, b"", record, path), path)
