"""The record of sessions: section 6a."""

from __future__ import annotations

import os
from dataclasses import dataclass

from . import records
from .errors import Damage, Where
from .header import Header

VERSION = 1
HEAD, RANGE = 8, 8
RANGES_MAX = 64


@dataclass(frozen=True)
class Sessions:
    """Which sessions of a vault are open."""

    last: int
    """The last session that began."""
    ranges: tuple[tuple[int, int], ...]
    """First and last number of each range of open sessions."""

    def is_open(self, session: int) -> bool:
        """Whether pages of this session may hold something under way. One that is not known counts as closed."""
        return any(first <= session <= last for first, last in self.ranges)


_TOP = (1 << 32) - 1
NONE_OPEN = Sessions(_TOP, ())
"""For a vault whose record is not there or does not open."""
ALL_OPEN = Sessions(_TOP, ((1, _TOP),))
"""For a single file without a vault."""


def parse(content: bytes, where: Where) -> Sessions:
    """The content of the record, strictly."""

    def number(offset: int, size: int) -> int:
        return int.from_bytes(content[offset : offset + size], "little")

    if len(content) < HEAD:
        raise Damage(where, f"a record of sessions of {len(content)} bytes")
    version, n, latest = number(0, 2), number(2, 2), number(4, 4)
    if version != VERSION:
        raise Damage(where, f"record of sessions, version {version}")
    if n > RANGES_MAX or len(content) != HEAD + n * RANGE:
        raise Damage(where, f"{n} ranges of sessions in {len(content)} bytes")
    ranges = tuple((number(at, 4), number(at + 4, 4)) for at in range(HEAD, len(content), RANGE))
    free = 1  # the lowest number at which the next range may begin
    for first, last in ranges:
        if not free <= first <= last <= latest:
            raise Damage(where, f"sessions {first} to {last} of {latest} in this place")
        free = last + 2
    return Sessions(latest, ranges)


def load(header: Header, directory: bytes) -> Sessions:
    """The record of the vault in `directory`; Damage where it is missing or does not open."""
    path = os.path.join(directory, b"lamassu.sessions", b"record")
    try:
        text = records.read_text(path)
    except NotADirectoryError:
        raise Damage(path, "missing") from None
    record = records.decode(text, path)
    return parse(records.open_record(header.suite, header.outer, records.SESSIONS, header.id, record, path), path)
