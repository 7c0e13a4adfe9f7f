"""One line per entry, the same for a vault and for the plain tree it was made from.

    type mode size sha256-or-target path

`type` is f, d, l, p, s, c or b; `mode` the permission bits in octal; `size` the bytes of a file or of a link target, `-` for
the rest; then the SHA-256 of a file's content, a link's target, `major:minor` of a device, `-` for the rest. Bytes that are
not printable ASCII, blanks and backslashes are written `\\xNN`. Lines are sorted by path; the root itself has none. With
attributes, each one of the namespace `user` is a line `x - size sha256 path NAME`.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator

from .errors import LamassuError
from .vault import Problem, Vault, type_letter


def escape(data: bytes) -> str:
    """Printable ASCII, one to one."""
    return "".join(chr(c) if 0x20 < c < 0x7F and c != 0x5C else f"\\x{c:02x}" for c in data)


def _hash(chunks: Iterable[bytes]) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    for chunk in chunks:
        digest.update(chunk)
        size += len(chunk)
    return size, digest.hexdigest()


def _line(st: os.stat_result, path: bytes, size: object, detail: str) -> str:
    return f"{type_letter(st.st_mode)} {stat.S_IMODE(st.st_mode):04o} {size} {detail} {escape(path)}"


def _special(st: os.stat_result) -> str:
    if stat.S_ISCHR(st.st_mode) or stat.S_ISBLK(st.st_mode):
        return f"{os.major(st.st_rdev)}:{os.minor(st.st_rdev)}"
    return "-"


def _attributes(path: bytes, found: dict[bytes, bytes]) -> Iterator[str]:
    for name, value in found.items():
        if name.startswith(b"user."):
            yield f"x - {len(value)} {hashlib.sha256(value).hexdigest()} {escape(path)} {escape(name)}"


def of_vault(vault: Vault, problem: Problem, attributes: bool = False) -> list[str]:
    """The lines of a vault."""
    found: list[tuple[bytes, list[str]]] = []
    for entry in vault.walk(problem=problem):
        try:
            size: object = "-"
            detail = _special(entry.stat)
            if entry.type == "f":
                with vault.open_file(entry) as f:
                    size, detail = _hash(f.chunks())
                    assert size == f.size
            elif entry.type == "l":
                target = vault.target(entry)
                size, detail = len(target), escape(target)
            lines = [_line(entry.stat, entry.path, size, detail)]
            if attributes:
                lines += _attributes(entry.path, vault.xattrs(entry))
            found.append((entry.path, lines))
        except LamassuError as e:
            problem(e)
    return [line for _, lines in sorted(found) for line in lines]


def _plain_chunks(path: bytes) -> Iterator[bytes]:
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            yield chunk


def of_plain(directory: str | bytes, attributes: bool = False) -> list[str]:
    """The lines of a plain tree."""
    found: list[tuple[bytes, list[str]]] = []
    top = os.fsencode(directory)
    stack = [b""]
    while stack:
        parent = stack.pop()
        for name in os.listdir(os.path.join(top, parent) if parent else top):
            path = os.path.join(parent, name)
            full = os.path.join(top, path)
            st = os.lstat(full)
            size: object = "-"
            detail = _special(st)
            if stat.S_ISDIR(st.st_mode):
                stack.append(path)
            elif stat.S_ISREG(st.st_mode):
                size, detail = _hash(_plain_chunks(full))
            elif stat.S_ISLNK(st.st_mode):
                target = os.readlink(full)
                size, detail = len(target), escape(target)
            lines = [_line(st, path, size, detail)]
            if attributes:
                names = sorted(os.fsencode(n) for n in os.listxattr(full, follow_symlinks=False))
                lines += _attributes(path, {n: os.getxattr(full, n, follow_symlinks=False) for n in names})
            found.append((path, lines))
    return [line for _, lines in sorted(found) for line in lines]
