"""Reading a regular file: sections 9 to 12. Every block is verified against its hash."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from .crypto import InnerKeys
from .errors import Damage, Where, show
from .header import Header
from .pages import PAGE, ZERO_KEY, Geometry, Page, open_page

ZEROS = bytes(1 << 20)


@dataclass(frozen=True)
class Summary:
    """What is known of a file from its metadata."""

    size: int
    pages: int
    unwritten: bool
    cut: bool
    lost_from: int | None
    """Bytes at and past this offset are lost, if the store lost the end of the file."""


class File:
    """An open regular file of a vault. Reads never change the store."""

    def __init__(self, header: Header, path: Where) -> None:
        self._where = show(path)
        self._suite = header.suite
        self._outer = header.outer
        self._inner: list[InnerKeys] = [header.suite.inner(k) for k in header.inner]
        self._geo = Geometry(header.block_size, header.reserved_slots)
        self._hole = (0, 0)
        self._cached: tuple[int, Page | None] | None = None
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
        """The bytes of page g, None when it is absent."""
        offset = self._geo.page_offset(g)
        if offset >= self._length or self._in_hole(offset, PAGE):
            return None
        raw = self._read(offset, PAGE)
        if not any(raw):
            return None
        if len(raw) < PAGE:
            raise Damage(self._page_name(g), "the backing file ends within this page")
        return raw

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
        """The highest page that is present; page 0 is."""
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
        """Page g as it is in the store, None when absent; file ids are compared."""
        if self._cached is None or self._cached[0] != g:
            raw = self._raw_page(g)
            page = None
            if raw is not None:
                page = open_page(self._suite, self._outer, self._geo, g, raw, self._page_name(g))
                if g and page.file_id != self._file_id:
                    raise Damage(self._page_name(g), "the page belongs to another file")
            self._cached = (g, page)
        return self._cached[1]

    def _open(self) -> None:
        """Size and states, section 9."""
        self.generation = 0
        self._floor, self._sparse, self._file_id = 0, False, bytes(16)
        if self._length == 0:
            self.summary = Summary(0, 0, True, False, None)
            return
        zero = self._load(0)
        if zero is None:
            if self._length > PAGE:
                raise Damage(self._page_name(0), "absent, with something behind it")
            self.summary = Summary(0, 0, True, False, None)
            return
        self.generation = zero.generation
        self._file_id, self._floor, self._sparse = zero.file_id, zero.size, zero.sparse
        covered = self._geo.covered
        if zero.cut:
            pages = self._geo.page_of_size(zero.size) + 1
            self.summary = Summary(zero.size, pages, False, True, None)
        else:
            last = self._last_present()
            size, lost_from = zero.size, None
            if last:
                if self._file_id == bytes(16):
                    raise Damage(self._page_name(last), "a convergent file with a second page")
                page = self._load(last)
                assert page is not None
                size = page.size
                if not last * covered < size <= (last + 1) * covered:
                    raise Damage(self._page_name(last), f"the last page has a size of {size}, not in its reach")
            if self._floor > size or (last == 0 and self._floor > covered):
                size = self._floor
                lost_from = min(size, (last + 1) * covered)
            self.summary = Summary(size, last + 1, False, False, lost_from)

    @property
    def size(self) -> int:
        """The logical size."""
        return self.summary.size

    def _page(self, g: int) -> Page | None:
        """Page g for reading: None is a hole of N blocks."""
        page = self._load(g)
        if page is None and g * self._geo.covered < self._floor and not self._sparse:
            raise Damage(self._page_name(g), "absent below the size that was known durable")
        return page

    # --- blocks ------------------------------------------------------------------------------

    def _verified(self, b: int, key: bytes, raw: bytes) -> bytes | None:
        """The plaintext if it hashes back to `key` under some epoch."""
        if key[31] & 1 and not self._suite.last_bit_kept:
            raise Damage(self._block_name(b), "a block compressed before encryption; this reader knows none")
        plain = self._suite.decrypt_block(key, raw)
        for n, keys in enumerate(self._inner):
            if keys.block_key(plain) == key:
                if n:  # last hit first
                    self._inner.insert(0, self._inner.pop(n))
                return plain
        return None

    def _pending(self, b: int, key: bytes, previous: bytes | None) -> bytes | None:
        """A pending slot, section 12; None is a hole."""
        raw = self._raw_block(b)
        hole = not any(raw)
        for candidate in (key, ZERO_KEY if previous is None else previous):
            if candidate != ZERO_KEY:
                plain = self._verified(b, candidate, raw)
                if plain is not None:
                    return plain
            elif hole:
                return None
        raise Damage(self._block_name(b), "pending, and no candidate verifies")

    def _block(self, page: Page, g: int, i: int) -> bytes | None:
        """The B bytes of slot i of page g; None for a hole."""
        if i >= page.used:
            if page.tail is not None and i == page.used:
                return page.tail.ljust(self._geo.block, b"\0")
            return None
        b = g * self._geo.per_page + i
        key = page.keys[i]
        if page.pending >> i & 1:
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
        lost = self.summary.lost_from
        if lost is not None and b * self._geo.block >= lost:
            raise Damage(self._block_name(b), "the store has lost the end of the file")
        g, i = divmod(b, self._geo.per_page)
        page = self._page(g)
        plain = self._block(page, g, i) if page else None
        return bytes(size) if plain is None else plain[:size]

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
        block, covered = self._geo.block, self._geo.covered
        lost = self.summary.lost_from
        end = self.size if lost is None else lost
        for g in range(-(-end // covered)):
            start = g * covered
            try:
                page = self._page(g)
            except Damage as damage:
                yield start, damage
                continue
            if page is None:
                yield start, min(covered, end - start)
                continue
            for b in range(g * self._geo.per_page, -(-min(end, start + covered) // block)):
                try:
                    yield b * block, self.block(b)
                except Damage as damage:
                    yield b * block, damage
        if lost is not None:
            yield lost, Damage(f"{self._where}: bytes {lost} to {self.size}", "the store has lost the end of the file")
