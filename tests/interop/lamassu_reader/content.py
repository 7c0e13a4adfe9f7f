"""Reading a regular file: sections 9 to 12. Every block is verified against its hash."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from .crypto import InnerKeys, Method
from .errors import Damage, Where, show
from .header import Header
from .pages import NO_ID, PAGE, PLAIN, RANDOM, ZERO_KEY, Geometry, Page, method_of, open_page
from .payload import stored_len, unpack
from .sessions import ALL_OPEN, Sessions

ZEROS = bytes(1 << 20)


@dataclass(frozen=True)
class Summary:
    """What is known of a file from its metadata."""

    size: int
    pages: int
    unwritten: bool
    cut: bool
    lost_from: int | None
    """Blocks at and past this offset that have no key are lost, if the store lost the end of the file."""
    exact: bool = True
    """Whether the size is known, and not an estimate."""


class File:
    """An open regular file of a vault. Reads never change the store.

    `notices` tells what an interrupted session has left unwritten: it grows as the file is read. Without `sessions` every
    session is taken for open.
    """

    def __init__(self, header: Header, path: Where, sessions: Sessions = ALL_OPEN, notices: list[str] | None = None) -> None:
        self.notices: list[str] = [] if notices is None else notices
        self._said: set[str] = set()
        self._sessions = sessions
        self._where = show(path)
        self._suite = header.suite
        self._domain = header.domain
        self._outer = header.outer
        self._inner: list[InnerKeys] = [header.suite.inner(k, k in header.oblivious) for k in header.inner]
        self._geo = Geometry(header.block_size, header.reserved_slots)
        self._hole = (0, 0)
        self._cached: tuple[int, Page | Damage | None] | None = None
        self._refused: dict[int, Damage] = {}
        self._file_id: bytes | None = None
        self._profile, self._changing = 0, False
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._length = os.fstat(self._fd).st_size
            self._open()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    # --- the store ---------------------------------------------------------------------------

    def _read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes at `offset`; fewer only at the end of the backing file."""
        parts: list[bytes] = []
        while size:
            part = os.pread(self._fd, size, offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            size -= len(part)
        return b"".join(parts)

    def _in_hole(self, offset: int, size: int) -> bool:
        """Whether the backing file is known to have no data in this range."""
        low, high = self._hole
        if not (low <= offset and offset + size <= high):
            try:
                high = os.lseek(self._fd, offset, os.SEEK_DATA)
            except OSError as e:
                high = 1 << 63 if e.errno == errno.ENXIO else offset  # no data up to the end; or not supported
            low, self._hole = offset, (offset, high)
        return offset + size <= high

    def _raw_page(self, g: int) -> bytes | None:
        """The bytes of page g, fewer than 4096 if the backing file ends there; None when it is absent."""
        offset = self._geo.page_offset(g)
        if offset >= self._length or self._in_hole(offset, PAGE):
            return None
        raw = self._read(offset, PAGE)
        return raw if any(raw) else None

    def _raw_block(self, b: int) -> bytes:
        """The B bytes in the store for block b, zeros past the end."""
        size = self._geo.block
        return self._read(self._geo.block_offset(b), size).ljust(size, b"\0")

    def _extents(self) -> list[tuple[int, int]]:
        """The ranges of the backing file that hold data."""
        found: list[tuple[int, int]] = []
        at = 0
        while at < self._length:
            try:
                start = os.lseek(self._fd, at, os.SEEK_DATA)
                at = os.lseek(self._fd, start, os.SEEK_HOLE)
            except OSError as e:
                if e.errno == errno.ENXIO:  # no data after `at`
                    break
                return [(0, self._length)]
            found.append((start, min(at, self._length)))
        return found

    # --- pages -------------------------------------------------------------------------------

    def _page_name(self, g: int) -> str:
        return f"{self._where}: page {g} (offset {self._geo.page_offset(g)})"

    def _block_name(self, b: int) -> str:
        return f"{self._where}: block {b} (offset {self._geo.block_offset(b)})"

    def _last_present(self) -> int:
        """The highest page that is present; 0 when there is none."""
        checked: int | None = None
        for start, end in reversed(self._extents()):
            g = self._geo.last_page_within(end)
            if checked is not None:
                g = min(g, checked - 1)
            while g > 0 and self._geo.page_offset(g) + PAGE > start:
                checked = g
                if self._raw_page(g) is not None:
                    return g
                g -= 1
        return 0

    def _load(self, g: int) -> Page | None:
        """Page g as it is in the store, None when absent; Damage."""
        if self._cached is None or self._cached[0] != g:
            try:
                self._cached = (g, self._open_page(g))
            except Damage as damage:
                self._cached = (g, damage)
        page = self._cached[1]
        if isinstance(page, Damage):
            raise page
        return page

    def _open_page(self, g: int) -> Page | None:
        """Page g, its file id compared. Page 0 gives the id, or the last page if page 0 is damaged."""
        if g in self._refused:
            raise self._refused[g]
        name, raw = self._page_name(g), self._raw_page(g)
        if raw is None:
            if g == 0:
                raise Damage(name, "absent, with something behind it")
            return None
        if len(raw) < PAGE:
            raise Damage(name, "the backing file ends within this page")
        page = open_page(self._suite, self._outer, self._geo, g, raw, name)
        if page.file_id == NO_ID and self._domain in ("file", "none"):
            raise Damage(name, "a page without the file's id, on which the keys depend")
        if page.session > self._sessions.last:
            why = "an older record was put back, or the file is from elsewhere"
            self._notice(f"{self._where}: of a session that the record does not know: {why}")
        if page.cut and not self._sessions.is_open(page.session):
            raise Damage(name, f"an interrupted shrink in a page of session {page.session}, which is not open")
        if self._file_id is None:
            # Without page 0 nothing tells whether the profile is being changed.
            self._file_id, self._profile, self._changing = page.file_id, page.profile, page.changing or g > 0
        elif page.file_id != self._file_id:
            raise Damage(name, "the page belongs to another file")
        elif g and not self._changing and (page.changing or page.profile != self._profile):
            raise Damage(name, "an older page, of another profile")
        return page

    def _is_cut_stale(self, zero: Page) -> bool:
        """Whether the last page that is present and opens lies past the end that page 0 cuts at, and was written after it."""
        end, g = self._geo.page_of_size(zero.size), self._last_present()
        for g in range(g, max(end, g - 16), -1):
            page = self._good(g)
            if page and page.session <= self._sessions.last:
                return (page.session, page.sequence) > (zero.session, zero.sequence)
        return False

    def _good(self, g: int) -> Page | None:
        """Page g if it is present and not damaged."""
        try:
            return self._load(g)
        except Damage:
            return None

    def _open(self) -> None:
        """Size and states, section 9."""
        self._floor, self._sparse, self._last = 0, False, 0
        self._unknown: int | None = None  # from here on nothing tells holes, the last page being damaged
        if self._length <= PAGE and self._raw_page(0) is None:
            self.summary = Summary(0, 0, True, False, None)
            return
        covered = self._geo.covered
        zero = self._good(0)
        if zero and zero.cut and self._is_cut_stale(zero):
            self._refused[0] = Damage(self._page_name(0), "an interrupted shrink, but pages past its end were written later")
            zero, self._cached, self._file_id = None, None, None
        if zero:
            self._floor, self._sparse = zero.size, zero.sparse
            if zero.cut:
                self._notice(f"{self._where}: a shrink to {zero.size} bytes was interrupted: what lay past that is void")
                self._last = self._geo.page_of_size(zero.size)
                self.summary = Summary(zero.size, self._last + 1, False, True, None)
                return
        last = self._last = self._last_present()
        page = self._good(last) if last else zero
        if last and page and not last * covered < page.size <= (last + 1) * covered:
            self._refused[last] = Damage(self._page_name(last), f"the last page has a size of {page.size}, not in its reach")
            page, self._cached = None, None
        if zero and last and page and not self._sessions.is_open(page.session) and self._lacks_blocks(zero, 0):
            # A session that was closed has brought page 0 to its end: this one is from before.
            self._refused[0] = Damage(self._page_name(0), "an older page, from when the file ended in it")
            zero, self._cached, self._floor, self._sparse, self._file_id = None, None, 0, False, page.file_id
            self._changing = True  # as far as can be told
        if page is None:
            size = max(self._floor, self._geo.reach(last, self._length))
            # Past the floor nothing tells how far the file goes, nor that what is empty is a hole.
            self._unknown = self._floor if zero else None
            self.summary = Summary(size, last + 1, False, False, self._unknown, exact=False)
            self._floor = self._floor if zero else size  # as below
            return
        size, lost_from = page.size, None
        if self._floor > min(size, (last + 1) * covered):
            size, lost_from = self._floor, min(size, (last + 1) * covered)
        self.summary = Summary(size, last + 1, False, False, lost_from)
        if not zero or (last and not self._sessions.is_open(page.session)):
            # Page 0 would tell of holes: without it nothing is one. A session that was closed has raised the floor to the size.
            self._floor = size
        elif zero and last and not self._sessions.is_open(zero.session):
            self._floor = max(self._floor, last * covered)  # the open session wrote no page past page last

    @property
    def size(self) -> int:
        """The logical size."""
        return self.summary.size

    def _lacks_blocks(self, page: Page, g: int, size: int | None = None) -> bool:
        """Whether a page tells less than all the blocks it has in a file of `size`: it is from when the file ended in it."""
        blocks = self._geo.per_page
        if size is not None:
            blocks = min(max(-(-size // self._geo.block) - g * self._geo.per_page, 0), blocks)
        return page.used + (page.tail is not None) < blocks

    def _page(self, g: int) -> Page | None:
        """Page g for reading: None is a hole of N blocks."""
        page = self._load(g)
        if page and g < self._last and self.summary.lost_from is None:
            if self._lacks_blocks(page, g, self._floor):
                raise Damage(self._page_name(g), "an older page, from when the file ended in it")
            if self._lacks_blocks(page, g, self.size):
                self._notice(f"{self._page_name(g)}: not written since the file grew: an interrupted session may have done so")
        if page is None and g * self._geo.covered < self._floor and not self._sparse:
            raise Damage(self._page_name(g), "absent below the size that was known durable")
        if page is None and g and self._unknown is not None and (g + 1) * self._geo.covered > self._unknown:
            raise Damage(self._page_name(g), "absent where the end of the file is unknown")
        if page is None and not self._sparse:
            self._notice(f"{self._page_name(g)}: absent, so its blocks read as a hole: an interrupted session may have written them")
        return page

    def _notice(self, text: str) -> None:
        """Say once that something which may have been written is not there."""
        if text not in self._said:
            self._said.add(text)
            self.notices.append(text)

    # --- blocks ------------------------------------------------------------------------------

    def _salt(self, b: int, domain: str) -> bytes:
        """What the key of block b depends on beside its content and K_in. A page of the file has been opened before."""
        if domain not in ("file", "none"):
            return b""
        assert self._file_id is not None
        return self._file_id + (b.to_bytes(8, "little") if domain == "none" else b"")

    def _forms(self) -> list[tuple[str, Method]]:
        """The forms that a block may be in: `plain`, or the domain whose salt goes into its key; its cipher and hash."""
        salted = self._domain if self._domain in ("file", "none") or self._suite.name == "paper" else "file"
        if self._changing:
            methods = self._suite.methods()
            encrypted = [(domain, method) for method in methods for domain in dict.fromkeys((self._domain, salted))]
            return encrypted + [("plain", method) for method in methods if not method.short_key]
        form = "plain" if self._profile & PLAIN else salted if self._profile & RANDOM else self._domain
        return [(form, method_of(self._profile))]

    def _verified(self, b: int, key: bytes, raw: bytes) -> bytes | None:
        """The plaintext if it hashes back to `key` under some epoch. No plain block has a key with the compression mark."""
        compressed = self._suite.is_compressed(key)
        stored = raw[: stored_len(raw)] if compressed else raw
        for form, method in self._forms():
            content = raw if form == "plain" else self._suite.decrypt_block(key, stored, method)
            salt = self._salt(b, form)
            for n, keys in enumerate(self._inner):
                if form == "plain":
                    found = keys.plain_key(content, method)
                else:
                    found = (keys.payload_key if compressed else keys.block_key)(content, salt, method, key)
                if found == key:
                    if n:  # last hit first
                        self._inner.insert(0, self._inner.pop(n))
                    return unpack(content, self._geo.block) if compressed else content
        return None

    def _pending(self, b: int, key: bytes, previous: bytes | None) -> bytes | None:
        """A pending slot of an open session, section 12; None is a hole."""
        raw = self._raw_block(b)
        hole = not any(raw)
        reverted = "its last write is not there, what was there before is"
        unwritten = "its last write is not there, nothing is: a hole"
        for candidate, missing in ((key, None), (ZERO_KEY if previous is None else previous, unwritten if previous is None else reverted)):
            plain = None if candidate == ZERO_KEY else self._verified(b, candidate, raw)
            if plain is not None or (candidate == ZERO_KEY and hole):
                if missing:
                    self._notice(f"{self._block_name(b)}: {missing}")
                return plain
        raise Damage(self._block_name(b), "pending, and no candidate verifies")

    def _block(self, page: Page, g: int, i: int) -> bytes | None:
        """The B bytes of slot i of page g; None for a hole."""
        if i >= page.used:
            if page.tail is not None and i == page.used:
                return page.tail.ljust(self._geo.block, b"\0")
            return None
        b = g * self._geo.per_page + i
        key = page.keys[i]
        if page.pending >> i & 1 and self._sessions.is_open(page.session):
            return self._pending(b, key, page.previous.get(i))
        if key == ZERO_KEY:
            return None
        plain = self._verified(b, key, self._raw_block(b))
        if plain is None:
            raise Damage(self._block_name(b), "the content does not match its key")
        return plain

    def block(self, b: int) -> bytes:
        """Block b, cut at the size of the file."""
        size = min(self._geo.block, self.size - b * self._geo.block)
        if size <= 0:
            return b""
        g, i = divmod(b, self._geo.per_page)
        page = self._page(g)
        plain = self._block(page, g, i) if page else None
        if plain is not None:
            return plain[:size]
        lost = self.summary.lost_from
        if lost is not None and b * self._geo.block >= lost:
            raise Damage(self._block_name(b), "the store has lost the end of the file")
        return bytes(size)

    def chunks(self) -> Iterator[bytes]:
        """The whole content in order; Damage at the first thing that is not right."""
        for _, piece in self._pieces():
            if isinstance(piece, Damage):
                raise piece
            if isinstance(piece, bytes):
                yield piece
            else:
                for at in range(0, piece, len(ZEROS)):
                    yield ZEROS[: min(len(ZEROS), piece - at)]

    def damages(self) -> Iterator[Damage]:
        """Everything that is not right in the content."""
        for _, piece in self._pieces():
            if isinstance(piece, Damage):
                yield piece

    def _pieces(self) -> Iterator[tuple[int, bytes | int | Damage]]:
        """(offset, bytes | number of zeros | damage) in order. A damaged page counts once."""
        block, covered, per_page = self._geo.block, self._geo.covered, self._geo.per_page
        pages = self._last + 1
        end = min(self.size, pages * covered)
        g = 0
        while g * covered < end:
            start, here = g * covered, g
            g += 1
            try:
                page = self._page(here)
            except Damage as damage:
                yield start, damage
                continue
            if page is None:
                low, high = self._hole
                if low <= self._geo.page_offset(here) < high:  # what lies in the same hole of the store is absent too
                    g = max(g, min(self._geo.last_page_within(high), pages) if self._sparse or start >= self._floor else g)
                    if self._unknown is not None:
                        g = max(here + 1, min(g, self._unknown // covered))
                    if g > here + 1 and not self._sparse:
                        self._notice(f"{self._where}: pages {here + 1} to {g - 1}: absent like page {here}")
                yield start, min(g * covered, end) - start
                continue
            for b in range(here * per_page, -(-min(end, start + covered) // block)):
                try:
                    yield b * block, self.block(b)
                except Damage as damage:
                    yield b * block, damage
        if end < self.size:
            yield end, Damage(f"{self._where}: bytes {end} to {self.size}", "the store has lost the end of the file")
