"""A vault as a tree: sections 1, 6 and 7."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from . import records, root, sessions
from .content import File
from .crypto import OpenFailed, b64, outer, siv_open
from .errors import Damage, Destroyed, LamassuError, NoKey, NotFound
from .header import Header, KeySource, ParentKeys, load_vault
from .history import History

PREFIX = b"lamassu."
LONG, COMPANION, REST = b"lamassu.long.", b"lamassu.name.", b"lamassu.link."
ROOT_ONLY = {b"lamassu.vault", b"lamassu.vault.new", b"lamassu.vault.replaced", b"lamassu.vault.replacing", b"lamassu.history", b"lamassu.history.broken", b"lamassu.history.new", b"lamassu.lock", b"lamassu.root", b"lamassu.root.new", b"lamassu.sessions", b"lamassu.staging", b"lamassu.lost", b"lamassu.tree"}
NUMBERED = re.compile(rb"lamassu\.(history\.broken|vault\.replacing)\.[0-9]{1,3}")
XATTR_PREFIX = "user.lamassu."
XATTR_AD = b"lamassu v1 xattr"

_TYPES = {
    stat.S_IFREG: "f",
    stat.S_IFDIR: "d",
    stat.S_IFLNK: "l",
    stat.S_IFIFO: "p",
    stat.S_IFSOCK: "s",
    stat.S_IFCHR: "c",
    stat.S_IFBLK: "b",
}


def type_letter(mode: int) -> str:
    """f, d, l, p, s, c or b."""
    return _TYPES[stat.S_IFMT(mode)]


@dataclass(frozen=True)
class Entry:
    """One entry of the tree. `path` is the decrypted path, relative to the root of the vault."""

    path: bytes
    store: bytes
    stat: os.stat_result = field(repr=False)

    @property
    def type(self) -> str:
        """f, d, l, p, s, c or b."""
        return type_letter(self.stat.st_mode)


Problem = Callable[[LamassuError], None]


def _raise(error: LamassuError) -> None:
    raise error


class Vault:
    """An opened vault. `notices`: what is no damage and must be said all the same; it grows as things are read."""

    def __init__(self, directory: str | bytes, source: KeySource | ParentKeys) -> None:
        self.directory = os.fsencode(directory)
        self.header: Header = load_vault(directory, source)
        self.notices: list[str] = []
        self.sessions_damage: Damage | None = None
        try:
            self.sessions = sessions.load(self.header, self.directory)
        except Damage as damage:
            self.sessions, self.sessions_damage = sessions.NONE_OPEN, damage
            self.notices.append(f"{damage}: no session is taken for open")
        self.root_damage: Damage | None = None
        try:
            self.permissions = root.load(self.header, self.directory)
        except Damage as damage:
            self.permissions, self.root_damage = None, damage
            self.notices.append(f"{damage}: the root shows the vault directory's own")

    # --- names -------------------------------------------------------------------------------

    def _directory_keys(self, store: bytes) -> records.DirectoryKeys:
        path = os.path.join(store, b"lamassu.dir")
        record = records.decode(records.read_text(path), path)
        h = self.header
        content = records.open_record(h.suite, h.outer, records.DIRECTORY, b"", record, path)
        return records.parse_directory(h.suite, content, path)

    def _name(self, keys: records.DirectoryKeys, store: bytes, stored: bytes) -> bytes:
        """The decrypted name of an entry called `stored` in the directory `store`."""
        where = os.path.join(store, stored)
        if not stored.startswith(LONG):
            name = keys.open_name(records.decode(stored, where), where)
            if len(stored) > self.header.name_max:
                raise Damage(where, "a name longer than name_max is not kept as a long name")
            return name
        companion = os.path.join(store, COMPANION + stored[len(LONG) :])
        text = records.read_text(companion)
        sealed = records.decode(text, companion)
        if b64(hashlib.sha256(sealed).digest()) != stored[len(LONG) :]:
            raise Damage(companion, "the companion does not hash to its name")
        name = keys.open_name(sealed, companion)
        if len(text) <= self.header.name_max:
            raise Damage(where, "a short name is kept as a long one")
        return name

    def children(self, path: bytes, store: bytes, problem: Problem = _raise) -> list[Entry]:
        """The entries of one directory, sorted by decrypted name."""
        stored_names = sorted(os.listdir(store))
        found: dict[bytes, Entry] = {}
        keys = None
        if not self.header.plain_names:
            try:
                keys = self._directory_keys(store)
            except LamassuError as e:
                problem(e)
                return []
        for stored in stored_names:
            if stored.startswith(PREFIX) and not (keys and stored.startswith(LONG)):
                continue
            where = os.path.join(store, stored)
            try:
                name = self._name(keys, store, stored) if keys else stored
                if name in found:
                    raise Damage(where, "a second entry of the same name")
                found[name] = Entry(os.path.join(path, name), where, os.lstat(where))
            except LamassuError as e:
                problem(e)
        return [found[name] for name in sorted(found)]

    def is_dataset(self, entry: Entry) -> bool:
        """Whether an entry is the root of a vault of its own, in which nothing is this vault's."""
        return self.header.datasets and entry.type == "d" and bool(entry.path) and os.path.isfile(os.path.join(entry.store, b"lamassu.vault"))

    def dataset(self, entry: Entry) -> "Vault":
        """The vault there, opened by this one's keys; NoKey where it does not inherit."""
        return Vault(entry.store, ParentKeys(self.header.suite, self.header.outer))

    # --- the tree ----------------------------------------------------------------------------

    def root(self) -> Entry:
        """The root directory; its path is empty."""
        return Entry(b"", self.directory, os.lstat(self.directory))

    def walk(self, top: Entry | None = None, problem: Problem = _raise) -> Iterator[Entry]:
        """Every entry below `top` (the root), depth first, without `top` itself."""
        stack = [top or self.root()]
        while stack:
            parent = stack.pop()
            if parent is not top and parent.path:
                yield parent
            if parent.type == "d" and not self.is_dataset(parent):
                stack.extend(reversed(self.children(parent.path, parent.store, problem)))

    def find(self, path: bytes) -> Entry:
        """The entry with a decrypted path."""
        entry = self.root()
        for name in path.split(b"/"):
            if name in (b"", b"."):
                continue
            if entry.type != "d":
                raise NotFound(path, "a component is not a directory")
            ignored: list[LamassuError] = []
            for child in self.children(entry.path, entry.store, ignored.append):
                if os.path.basename(child.path) == name:
                    entry = child
                    break
            else:
                raise ignored[0] if ignored else NotFound(path, "no such entry")
        return entry

    def open_file(self, entry: Entry) -> File:
        """A regular file, ready to read."""
        if entry.type != "f":
            raise NotFound(entry.path, "not a regular file")
        return self.open_stored(entry.store)

    def open_stored(self, path: bytes) -> File:
        """A regular file by its path in the store."""
        return File(self.header, path, self.sessions, self.notices)

    def target(self, entry: Entry) -> bytes:
        """The target of a symbolic link."""
        return records.open_link(self.header.suite, self.header.outer, entry.store, os.readlink(entry.store))

    def xattrs(self, entry: Entry) -> dict[bytes, bytes]:
        """The extended attributes of an entry: name to value. Those of a dataset's root are the dataset's; none where that is locked."""
        if self.is_dataset(entry):
            try:
                dataset = self.dataset(entry)
            except (NoKey, Destroyed):
                return {}
            return dataset.xattrs(dataset.root())
        try:
            stored_names = os.listxattr(entry.store, follow_symlinks=False)
        except OSError as e:
            if e.errno != errno.ENOTSUP:
                raise
            return {}
        found: dict[bytes, tuple[int, bytes]] = {}
        holder = None
        for stored in sorted(stored_names):
            if not stored.startswith(XATTR_PREFIX):
                continue
            where = f"{os.fsdecode(entry.store)}: attribute {stored}"
            sealed = records.decode(os.fsencode(stored[len(XATTR_PREFIX) :]), where)
            n, name = self._xattr_name(sealed, where)
            if b"\0" in name:
                raise Damage(where, "the attribute name holds a NUL")
            if holder is None:
                holder = self._holder(entry)
            value = records.open_record(
                self.header.suite,
                self.header.outer,
                records.XATTR,
                stored.encode("ascii") + holder,
                os.getxattr(entry.store, stored, follow_symlinks=False),
                where,
            )
            if name not in found or n < found[name][0]:  # the newest epoch wins
                found[name] = (n, value)
        return {name: value for name, (_, value) in sorted(found.items())}

    def _holder(self, entry: Entry) -> bytes:
        """What the context of an entry's attributes has behind their stored names."""
        if entry.type != "d":
            return b""
        return b"/" if self.header.plain_names else b"/" + self._directory_keys(entry.store).id

    def _xattr_name(self, sealed: bytes, where: str) -> tuple[int, bytes]:
        """The epoch (0 is the newest) and the name behind a sealed attribute name."""
        for n, k_out in enumerate(self.header.outer):
            with contextlib.suppress(OpenFailed):
                return n, siv_open(outer(self.header.suite, k_out).xattr_name, XATTR_AD, sealed)
        raise Damage(where, "the attribute name does not open")

    def history(self) -> History:
        """What was done to the vault's keys, verified against the header."""
        try:
            return self._history_at(b"lamassu.history")
        except LamassuError:
            # The header was replaced, and the history that begins with it has not got its name yet.
            try:
                return self._history_at(b"lamassu.history.new")
            except LamassuError:
                pass
            raise

    def _history_at(self, name: bytes) -> History:
        path = os.path.join(self.directory, name)
        try:
            with open(path, "rb") as f:
                data = f.read()
        except FileNotFoundError:
            data = b""
        return History.read(data, self.header, path)

    # --- everything at once ------------------------------------------------------------------

    def verify(self, problem: Problem, top: Entry | None = None) -> int:
        """Read everything below `top`; returns the number of entries seen."""
        seen, note = 0, self.notices.append
        if self.sessions_damage:
            problem(self.sessions_damage)
        if self.root_damage:
            problem(self.root_damage)
        start = top or self.root()
        try:
            if self.history().torn:
                note("lamassu.history: an append was interrupted")
        except LamassuError as e:
            problem(e)
        for entry in [start, *self.walk(start, problem)] if start.type == "d" else [start]:
            seen += 1
            try:
                self.xattrs(entry)
                if entry.type == "l":
                    self.target(entry)
                elif entry.type == "f":
                    with self.open_file(entry) as f:
                        if f.summary.unwritten:
                            note(f"{os.fsdecode(entry.store)}: empty, its page was never written")
                        if f.summary.cut:
                            note(f"{os.fsdecode(entry.store)}: a shrink was interrupted")
                        for damage in f.damages():
                            problem(damage)
                elif entry.type == "d":
                    self._notes(entry)
            except LamassuError as e:
                problem(e)
        return seen

    def _notes(self, entry: Entry) -> None:
        note = self.notices.append
        stored = set(os.listdir(entry.store))
        for name in sorted(n for n in stored if n.startswith(PREFIX)):
            where = os.fsdecode(os.path.join(entry.store, name))
            if name.startswith(COMPANION):
                if LONG + name[len(COMPANION) :] not in stored:
                    note(f"{where}: a companion without an entry")
            elif name.startswith((LONG, REST)) or name == b"lamassu.dir":
                continue
            elif entry.path or not (name in ROOT_ONLY or NUMBERED.fullmatch(name)):
                note(f"{where}: a name of the format that this reader does not know")
