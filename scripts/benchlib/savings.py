"""What deduplication and compression save together: real data in five kinds, on a store that compresses and one that does not.

Each kind is written through a mount onto a fresh store, and every equal block of the vault's size is shared there, as an exact duperemove would (docs/adr/0003). The same
with the files as they are, in blocks of 64 KiB. Space is what the store says is in use, its metadata included.
"""

import gzip
import os
import shutil
import sqlite3
import subprocess
import tempfile

from demolib import dataset
from demolib.shell import DemoError, Undo, have, run, say
from demolib.store import BtrfsStore, XfsStore

from . import measure
from .systems import Lamassu

BLOCKS = {"4K": 4 << 10, "64K": 64 << 10, "128K": 128 << 10}
# (block, codec). What btrfs compresses at once is 128 KiB.
VAULTS = [(block, codec) for block in ("4K", "64K") for codec in ("none", "lz4", "zstd")] + [("64K", "zstd:9"), ("128K", "zstd")]
# Rows of the second dump that are other than in the first.
CHANGED_EVERY = 50


def run_all(bench):
    mega, samples, sizes, files = bench.size(100, 6), [], {}, {}
    stores = {"XFS": XfsStore, "btrfs, zstd": BtrfsStore} if have("mkfs.btrfs") else {"XFS": XfsStore}
    with tempfile.TemporaryDirectory(dir=bench.work) as folder:
        for kind, make in list(KINDS.items())[:bench.size(len(KINDS), 1)]:
            path = os.path.join(folder, kind.replace(" ", "-"))
            os.mkdir(path)
            try:
                make(path, mega * 10**6)
            except DemoError as error:
                say(f"NOTE: no {kind}: {str(error).splitlines()[-1]}")
                continue
            sizes[kind] = size_of(path)
            files[kind] = sum(len(names) for _, _, names in os.walk(path))
            for store, of in stores.items():
                for system, block in all_systems(bench, store):
                    used = saved(bench, of, system, BLOCKS[block], path, sizes[kind])
                    name = system.name if system else "plain files, 64K"
                    samples.append({"data": kind, "store": store, "system": name, "used": used})
                    say(f"savings, {kind}, {store}, {name}: {sizes[kind] / 1e6:.0f} MB take {used / 1e6:.0f} MB")
            shutil.rmtree(path)
    return {"sizes": sizes, "files": files, "samples": samples, "unit": "bytes"}


def all_systems(bench, store):
    """(system, block size); None is the files as they are."""
    yield None, "64K"
    for block, codec in VAULTS:
        # Blocks of 4 KiB get smaller only where the store below compresses.
        if (block != "4K" or store != "XFS") and bench.size(True, (block, codec) == ("64K", "zstd")):
            yield Lamassu(bench.keys, bench.program, init=["-b", block, "--compress", codec], name=f"{codec}, {block}"), block


def saved(bench, store_of, system, block, path, size):
    with Undo() as undo:
        disk = store_of(undo, bench.work, size * 2 + (2 << 30))
        store = os.path.join(disk.path, "store")
        os.mkdir(store)
        if system:
            system.make(store)
        with measure.mounted(system, store, bench.work) as mount:
            run("cp", "-r", "--reflink=never", "--sparse=auto", f"{path}/.", mount.path)
        disk.used()  # what is compressed when it is written out has been
        disk.deduplicate_all(block)
        return disk.used()


def size_of(path):
    """Bytes of the files, without the holes in them."""
    return sum(os.lstat(os.path.join(f, n)).st_blocks * 512 for f, _, names in os.walk(path) for n in names)


def trees(folder, size):
    dataset.make_trees(folder, size)


def images(folder, size):
    dataset.make_images(folder, size)


def databases(folder, size):
    """A database of Debian's packages, dumped as SQL; and again after some of its rows have changed."""
    packages = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, check=False).stdout.decode(errors="replace").split("\n\n")
    if len(packages) < 1000:
        raise DemoError("apt knows no packages (apt-get update?)")
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE package (id INTEGER PRIMARY KEY, name TEXT, version TEXT, description TEXT, installed INTEGER)")
    written = 0
    for number, text in enumerate(packages):
        fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line and not line.startswith(" "))
        database.execute("INSERT INTO package VALUES (?, ?, ?, ?, ?)", (number, fields.get("Package"), fields.get("Version"), text, 0))
        written += len(text) + 100
        if written > size:
            break
    for dump in (1, 2):
        with open(os.path.join(folder, f"dump-{dump}.sql"), "w") as file:
            file.writelines(line + "\n" for line in database.iterdump())
        database.execute("UPDATE package SET installed = 1 WHERE id % ? = 7", (CHANGED_EVERY,))


def archives(size):
    """Source archives that cargo has fetched, .tar.gz, up to a size."""
    home = os.environ.get("CARGO_HOME", os.path.expanduser("~/.cargo"))
    found = sorted(os.path.join(f, n) for f, _, names in os.walk(os.path.join(home, "registry", "cache")) for n in names if n.endswith(".crate"))
    if not found:
        raise DemoError("cargo has fetched no source archives")
    for path in found:
        size -= os.path.getsize(path)
        if size < 0:
            return
        yield path


def tarballs(folder, size):
    """Source archives, unpacked to .tar: a fifth of their size when compressed."""
    for path in archives(size // 5):
        with gzip.open(path) as source, open(os.path.join(folder, os.path.basename(path)) + ".tar", "wb") as out:
            shutil.copyfileobj(source, out)


def compressed(folder, size):
    """What is compressed already."""
    for path in archives(size):
        shutil.copy(path, folder)


KINDS = {"two trees": trees, "two disk images": images, "two database dumps": databases, "source tarballs": tarballs, "compressed archives": compressed}
