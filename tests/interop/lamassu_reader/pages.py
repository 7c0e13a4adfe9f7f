"""Geometry and metadata pages: sections 8 and 9."""

from __future__ import annotations

from dataclasses import dataclass

from .crypto import NONCE, TAG, Method, OpenFailed, Suite, outer, prf, same
from .errors import Damage, Where

PAGE = 4096
SLOTS = 124
SLOT = 32
HEAD = NONCE + TAG + 16
ZERO_KEY = bytes(SLOT)
NO_ID = bytes(16)
"""The file id of a convergent page."""

_TAIL, _SPARSE, _CUT = 1, 2, 4
_PROFILE_SHIFT, _PROFILE, _CHANGING = 3, 31, 1 << 15

PLAIN, UNVERIFIED, RANDOM, SHORT_KEY, OTHER_HASH = 1, 2, 4, 8, 16
"""The bits of a profile."""


def is_profile(number: int) -> bool:
    """Whether version 1 has this profile: plain blocks have no random keys and no cipher."""
    return number <= _PROFILE and not (number & PLAIN and number & (RANDOM | SHORT_KEY))


def is_profile_of(suite: Suite, number: int) -> bool:
    """Whether a suite can keep it: what sections 9 and 10 exclude."""
    if number & RANDOM and suite.name == "paper":
        return False
    if number & (PLAIN | UNVERIFIED) == UNVERIFIED and suite.name in ("blake3", "chacha"):
        return False
    return method_of(number) in suite.methods()


def method_of(number: int) -> Method:
    """The cipher and the hash of a profile."""
    return Method(bool(number & SHORT_KEY), bool(number & OTHER_HASH))


@dataclass(frozen=True)
class Geometry:
    """Where pages and blocks lie."""

    block: int
    """B"""
    reserved: int
    """R"""

    @property
    def per_page(self) -> int:
        """N: data blocks a page."""
        return SLOTS - self.reserved

    @property
    def pages(self) -> int:
        """P: pages a metadata area."""
        return self.block // PAGE

    @property
    def segment(self) -> int:
        """G: bytes a segment."""
        return self.block + self.pages * self.per_page * self.block

    @property
    def covered(self) -> int:
        """Logical bytes a page covers."""
        return self.per_page * self.block

    @property
    def largest(self) -> int:
        """The largest logical size: no offset in the backing file passes 2⁶³ − 1."""
        return (((1 << 63) - 1) // self.segment - 1) * self.pages * self.covered

    def page_offset(self, g: int) -> int:
        """Where page g lies."""
        return g // self.pages * self.segment + g % self.pages * PAGE

    def block_offset(self, b: int) -> int:
        """Where block b lies."""
        per_segment = self.pages * self.per_page
        return b // per_segment * self.segment + self.block + b % per_segment * self.block

    def last_page_within(self, length: int) -> int:
        """The highest page that begins below offset `length` > 0."""
        segment, rest = divmod(length - 1, self.segment)
        return segment * self.pages + min(rest // PAGE, self.pages - 1)

    def reach(self, g: int, length: int) -> int:
        """Logical bytes up to the end of what page g can cover in a backing file of `length` bytes."""
        low, high = g * self.per_page, (g + 1) * self.per_page
        present = -(-(length - self.block_offset(low)) // self.block)  # blocks of one page lie one behind the other
        return min(max(low + present, low + 1), high) * self.block

    def page_of_size(self, size: int) -> int:
        """The last page of a file of `size` bytes."""
        return (-(-size // self.block) - 1) // self.per_page if size else 0


@dataclass(frozen=True)
class Page:
    """A metadata page that opened and obeys every rule."""

    size: int
    file_id: bytes
    session: int
    """The session that wrote the page; 0 in a convergent page."""
    sequence: int
    sparse: bool
    cut: bool
    profile: int
    changing: bool
    """The profile is being changed: blocks of this page may be in any form."""
    used: int
    pending: int
    keys: tuple[bytes, ...]
    previous: dict[int, bytes]
    """Previous keys of the `replaced` slots."""
    tail: bytes | None


def page_aad(suite: Suite, geo: Geometry, g: int) -> bytes:
    """The associated data of page g."""
    return (
        (1).to_bytes(2, "little")
        + bytes((suite.id, geo.block.bit_length() - 1))
        + geo.reserved.to_bytes(2, "little")
        + bytes(2)
        + g.to_bytes(8, "little")
    )


def open_page(suite: Suite, epochs: tuple[bytes, ...], geo: Geometry, g: int, raw: bytes, where: Where) -> Page:
    """Open and parse page g from its 4096 bytes. `epochs` are the K_out, newest first."""
    nonce, tag, mark = raw[:24], raw[24:40], raw[40:56]
    aad = page_aad(suite, geo, g)
    for k_out in epochs:
        keys = outer(suite, k_out)
        if same(mark, prf(keys.page_select, nonce + aad)[:16]):
            try:
                return parse_page(suite, geo, g, suite.open(keys.page_seal, nonce, tag, raw[HEAD:], aad), where)
            except OpenFailed:
                raise Damage(where, "the page is damaged") from None
    raise Damage(where, "no epoch opens the page: key not loaded, or damaged")


def parse_page(suite: Suite, geo: Geometry, g: int, plain: bytes, where: Where) -> Page:
    """Parse the 4040 plaintext bytes of page g, strictly."""

    def field(offset: int, size: int) -> int:
        return int.from_bytes(plain[offset - HEAD : offset - HEAD + size], "little")

    size, flags, session_tag = field(56, 8), field(88, 2), field(90, 6)
    file_id, session, sequence = plain[64 - HEAD : 80 - HEAD], field(80, 4), field(84, 4)
    pending, replaced = field(96, 16), field(112, 16)
    slots = plain[128 - HEAD :]
    used = flags >> 8 & 0x7F

    profile, changing = flags >> _PROFILE_SHIFT & _PROFILE, bool(flags & _CHANGING)
    if not is_profile(profile):
        raise Damage(where, "keys or a cipher of plain blocks")
    if not is_profile_of(suite, profile):
        raise Damage(where, f"profile {profile}, which the suite cannot keep")
    if g and flags & (_SPARSE | _CUT):
        raise Damage(where, "`sparse` or `cut` in a page other than page 0")
    if used > geo.per_page:
        raise Damage(where, f"{used} slots used, a page has {geo.per_page}")
    if pending >> used:
        raise Damage(where, "a pending bit at or above the used slots")
    if replaced & ~pending:
        raise Damage(where, "`replaced` is not within `pending`")
    q = replaced.bit_count()
    if q > geo.reserved:
        raise Damage(where, f"{q} previous keys, {geo.reserved} slots are reserved")
    if size > geo.largest:
        raise Damage(where, f"a size of {size}")

    tail, tail_slots = None, 0
    if flags & _TAIL:
        if used == geo.per_page:
            raise Damage(where, "a tail for a block of the next page")
        t = size - (g * geo.per_page + used) * geo.block
        tail_slots = -(-t // SLOT)
        if not 0 < t < geo.block or used + q + tail_slots > SLOTS:
            raise Damage(where, f"a tail of {t} bytes")
        area = slots[(SLOTS - tail_slots) * SLOT :]
        tail = area[:t]
        if any(area[t:]):
            raise Damage(where, "non-zero bytes after the tail")
    if any(slots[(used + q) * SLOT : (SLOTS - tail_slots) * SLOT]):
        raise Damage(where, "non-zero bytes in an unused slot")
    flagged = bool(flags & (_SPARSE | _CUT | _CHANGING | RANDOM << _PROFILE_SHIFT))
    _check_identity(g, file_id, session, sequence or session_tag, bool(pending), flagged, where)

    def slot(i: int) -> bytes:
        return slots[i * SLOT : (i + 1) * SLOT]

    marked = [i for i in range(used) if replaced >> i & 1]
    return Page(
        size=size,
        file_id=file_id,
        session=session,
        sequence=sequence,
        sparse=bool(flags & _SPARSE),
        cut=bool(flags & _CUT),
        profile=profile,
        changing=changing,
        used=used,
        pending=pending,
        keys=tuple(slot(i) for i in range(used)),
        previous={i: slot(used + n) for n, i in enumerate(marked)},
        tail=tail,
    )


def _check_identity(g: int, file_id: bytes, session: int, stamp: int, pending: bool, flagged: bool, where: Where) -> None:
    """A page has a file id and a session, or neither; without them it is the clean, only page of its file."""
    if file_id != NO_ID:
        if not session:
            raise Damage(where, "a page with a file id, of no session")
        return
    if session:
        raise Damage(where, f"a page of session {session} without a file id")
    if g:
        raise Damage(where, "a page other than page 0 without a file id")
    if stamp or pending or flagged:
        raise Damage(where, "a page without a file id has a sequence, a session tag, a pending bit, `sparse`, `cut` or the like")
