"""A store that puts something older back: what gocryptfs, a vault without an anchor and an anchored vault serve of it.

Real programs over real directories. The store rolls a file back, exchanges two directories, and zeroes what a sparse
file holds between two holes; then each file is read through a mount. What the anchored vault finds it also names: by
kind and path, with `lamassu check`.
"""

import json
import os
import secrets
import shutil

from .shell import Undo, run, say, unmount

HOLE = 2 << 20  # where the sparse file goes on, and as far again once more
GOCRYPTFS_HEADER, GOCRYPTFS_BLOCK = 18, 4096 + 32
ATTACKED = ("report", "accounts", "archive", "sparse")
PAGE_BLOCKS = 116  # data blocks that a page of a Lamassu file covers, by default


class Gocryptfs:
    """With plain names, so that the store finds its way."""

    name = "gocryptfs"

    def __init__(self, work, _lamassu):
        self.store = os.path.join(work, "gocryptfs")
        self.password = os.path.join(work, "password")
        os.mkdir(self.store)
        with open(self.password, "w", opener=private) as file:
            file.write(secrets.token_hex(16))
        run("gocryptfs", "-q", "-init", "-plaintextnames", "-scryptn", "10", "-passfile", self.password, self.store)

    def mount(self, at):
        run("gocryptfs", "-q", "-passfile", self.password, self.store, at)

    def umount(self, at):
        return run("fusermount3", "-u", at, check=False)

    def stored(self, name):
        return os.path.join(self.store, name)

    def between_the_holes(self):
        """Offset and length of what the sparse file holds there."""
        return GOCRYPTFS_HEADER + HOLE // 4096 * GOCRYPTFS_BLOCK, GOCRYPTFS_BLOCK


class Vault:
    name = "Lamassu, --anchor none"
    anchor = ["--anchor", "none"]

    def __init__(self, work, lamassu):
        self.lamassu, self.store = lamassu, os.path.join(work, type(self).__name__)
        self.key = ["--key", f"raw:file:{self.store}.key"]
        os.mkdir(self.store, 0o700)
        with open(f"{self.store}.key", "wb", opener=private) as file:
            file.write(secrets.token_bytes(32))
        run(lamassu, "-q", "init", self.store, *self.key, *self.anchor)

    def mount(self, at):
        run(self.lamassu, "-q", "mount", self.store, at, *self.key)

    def umount(self, at):
        return run(self.lamassu, "umount", at, check=False)

    def stored(self, name):
        return os.path.join(self.store, run(self.lamassu, "path", *self.key, self.store, name).stdout.strip())

    def between_the_holes(self):
        page = (PAGE_BLOCKS + 1) * 4096
        return HOLE // 4096 // PAGE_BLOCKS * page, page


class Anchored(Vault):
    name = "Lamassu"

    def __init__(self, work, lamassu):
        self.anchor = ["--anchor", os.path.join(work, "vault.anchor")]
        super().__init__(work, lamassu)


def private(path, flags):
    return os.open(path, flags, 0o600)


def write(path, data, offset=0):
    with open(path, "r+b" if os.path.exists(path) else "wb") as file:
        file.seek(offset)
        file.write(data)


def fill(at):
    write(os.path.join(at, "report"), b"first version")
    for name in ("accounts", "archive"):
        os.mkdir(os.path.join(at, name))
        write(os.path.join(at, name, "file"), name.encode())
    for offset in (0, HOLE, 2 * HOLE):
        write(os.path.join(at, "sparse"), b"x" * 4096, offset)


def attack(scheme, kept):
    """What the store does: it has `kept` a copy of the report's first version."""
    shutil.copyfile(kept, scheme.stored("report"))
    one, other = scheme.stored("accounts"), scheme.stored("archive")
    os.rename(one, one + ".aside")
    os.rename(other, one)
    os.rename(one + ".aside", other)
    offset, length = scheme.between_the_holes()
    write(scheme.stored("sparse"), bytes(length), offset)


def read(path, offset=0, length=4096):
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(length)
    except OSError:
        return None


def look(at):
    """For each thing that the store did: whether a reader gets it, an error, or the newest."""
    found = {
        "a file rolled back": (read(os.path.join(at, "report")), b"second version"),
        "two directories exchanged": (read(os.path.join(at, "accounts", "file")), b"accounts"),
        "a page of a sparse file zeroed": (read(os.path.join(at, "sparse"), HOLE), b"x" * 4096),
    }
    return {what: "error" if data is None else "newest" if data == newest else "served" for what, (data, newest) in found.items()}


def named(scheme):
    """What `check` names: paths as the user knows them, and the kinds of what is wrong there."""
    report = json.loads(run(scheme.lamassu, "check", "--json", *scheme.key, scheme.store, check=False).stdout)
    kinds = {}
    for problem in report["problems"]:
        kinds.setdefault(problem["path"] or problem["stored"], set()).add(problem["kind"])
    return report["status"], {path: ", ".join(sorted(words)) for path, words in kinds.items()}


def outcome(make, work, lamassu):
    scheme, at = make(work, lamassu), os.path.join(work, "mnt")
    os.makedirs(at, exist_ok=True)

    def mounted(use):
        with Undo() as undo:
            undo.callback(unmount, at, scheme.umount)
            scheme.mount(at)
            return use(at)

    mounted(fill)
    kept = os.path.join(work, "kept")
    shutil.copyfile(scheme.stored("report"), kept)
    mounted(lambda at: write(os.path.join(at, "report"), b"second version"))
    attack(scheme, kept)
    return mounted(look), named(scheme) if isinstance(scheme, Anchored) else None


def show(work, lamassu, judge, makers=(Gocryptfs, Vault, Anchored)):
    say("a store that rolls back, exchanges and zeroes")
    outcomes = {make.name: outcome(make, work, lamassu) for make in makers}
    results = {name: found for name, (found, _) in outcomes.items()}
    print("What a reader gets of it when the store ...\n")
    heads = list(next(iter(results.values())))
    width = max(len(name) for name in results)
    print("  ".join([" " * width] + heads))
    for name, found in results.items():
        print("  ".join([name.ljust(width)] + [found[head].ljust(len(head)) for head in heads]))
    print()
    for name, found in results.items():
        expected = "error" if name == Anchored.name else "served"
        what = "an error" if expected == "error" else "served as if it were the newest"
        judge(all(value == expected for value in found.values()), f"{name}: what the store put back is {what}")
    for name, (_, names) in outcomes.items():
        if names:
            show_names(name, *names, judge)


def show_names(vault, status, kinds, judge):
    print(f"\nWhat `lamassu check` names of the vault with an anchor ({status}):\n")
    width = max(map(len, kinds), default=0)
    for path, words in sorted(kinds.items()):
        print(f"  {path.ljust(width)}  {words}")
    print()
    # Each that the store touched, itself or by what is in it.
    missed = [place for place in ATTACKED if not any(path.split("/")[0] == place for path in kinds)]
    judge(not missed, f"{vault}: what the store put back is named, each by its path{': not ' + ', '.join(missed) if missed else ''}")
    judge(status == "stale", f"{vault}: and as what is not the newest, which is no other damage")
