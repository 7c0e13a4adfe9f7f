"""What is left after deduplication: the Lamassu paper's Figure 6, Table 1 and Figure 11.

Files go through each file system onto a fresh XFS with reflink, duperemove shares equal 4 KiB blocks there, an exact
pass finishes what it passes over (docs/adr/0003), and XFS says what is in use. duperemove 0.11 searches for equal blocks
of different files alone, whatever `--dedupe-options=same` says (that is of whole extents): of a single file the exact
pass saves all.
"""

import os
import random
import shutil
import tempfile

from demolib import dataset
from demolib.blocks import BLOCK, survey
from demolib.shell import DemoError, Undo, run, say
from demolib.store import XfsStore

from . import measure
from .systems import Lamassu

REDUNDANCY = (10, 20, 30, 40, 50)  # percent of redundant blocks, the paper's α
SLOTS = (1, 2, 8, 32, 48, 52, 56, 60)  # R of Figure 11
IMAGES_MB = (40, 80, 160)  # of installed packages, roughly
# Packages of which Debian's archives hold two versions, the release's and a security update's.
PAIRS = (("git", "perl-modules-5.36", "libpython3.11-stdlib"), ("postgresql-15", "bind9-libs", "python3.11-minimal"))


def synthetic(path, size_mib, percent, seed):
    """A file of which `percent` of the 4 KiB blocks repeat others, spread evenly, as the paper's generator made them."""
    blocks = size_mib * 256
    fresh = random.Random(seed)
    distinct = [fresh.randbytes(BLOCK) for _ in range(blocks - blocks * percent // 100)]
    order = distinct + [distinct[fresh.randrange(len(distinct))] for _ in range(blocks - len(distinct))]
    fresh.shuffle(order)
    with open(path, "wb") as file:
        file.writelines(order)


def run_all(bench):
    # Figure 11's ratio does not depend on the size beyond a few pages, and is counted forty times.
    size, smaller = bench.size(1024, 8), bench.size(128, 8)
    names = [n for n in ("lamassu", "encfs", "gocryptfs") if n in bench.systems]
    result = {"size_mib": size, "store": XfsStore.kind, "figure6": [], "table1": [], "figure11": []}
    with tempfile.TemporaryDirectory(dir=bench.work) as folder:
        for percent in bench.size(REDUNDANCY, (10, 50)):
            path = os.path.join(folder, "synthetic")
            synthetic(path, size, percent, percent)
            for name in [None, *names]:
                result["figure6"].append({"alpha": percent, **deduplicated(bench, name, [path])})
            synthetic(path, smaller, percent, percent)
            result["figure11"] += list(efficiency(bench, path, percent))
            os.unlink(path)
    for title, images in make_images(bench):
        for name in [None, *names]:
            result["table1"].append({"image": title, **deduplicated(bench, name, images)})
    return result


def make_images(bench):
    """(title, paths) of disk images made of this machine's packages, one after another."""
    for number, mega in enumerate(bench.size(IMAGES_MB, (10,)), 1):
        with tempfile.TemporaryDirectory(dir=bench.work) as folder:
            first, second = (os.path.join(f, "disk.img") for f in dataset.make_images(folder, mega * 10**6))
            yield f"image {number}, installed packages", [first]
            if number == 2 or bench.toy:
                yield f"image {number} and a copy in which packages were removed and added", [first, second]
    for number, names in enumerate(bench.size(PAIRS, ()), len(IMAGES_MB) + 1):
        with tempfile.TemporaryDirectory(dir=bench.work) as folder:
            try:
                images = dataset.make_pair(folder, names)
            except DemoError as error:
                say(f"NOTE: two versions of {', '.join(names)} cannot be had: {str(error).splitlines()[-1]}")
                continue
            yield f"image {number}, {', '.join(names)}", images[:1]
            yield f"image {number} and its next version in Debian", images


def deduplicated(bench, name, files):
    """Bytes in use before and after deduplication; `name` of None: plain files."""
    system = bench.systems.get(name)
    with Undo() as undo:
        xfs = XfsStore(undo, bench.work, sum(os.stat(f).st_size for f in files) * 2 + (1 << 30))
        store = os.path.join(xfs.path, "store")
        os.mkdir(store)
        if system:
            system.make(store)
        before_files = xfs.used()
        with measure.mounted(system, store, bench.work) as mount:
            for number, path in enumerate(files):
                run("cp", "--reflink=never", "--sparse=auto", path, os.path.join(mount.path, f"file-{number}"))
        before = xfs.used() - before_files
        in_time = xfs.duperemove(bench.memory)
        by_duperemove = xfs.used() - before_files
        xfs.deduplicate_all()
        after = xfs.used() - before_files
    say(f"space, {name or 'plain files'}: {before / 1e6:.1f} MB, {after / 1e6:.1f} MB after deduplication")
    return {"system": name or "plain files", "before": before, "after_duperemove": by_duperemove if in_time else None, "after": after}


def efficiency(bench, path, percent):
    """Figure 11: distinct data blocks among all distinct blocks of the store, by the number of reserved slots."""
    plain = len(survey_of([path]))
    for slots in bench.size(SLOTS, (1, 60)):
        store = tempfile.mkdtemp(dir=bench.memory)
        system = Lamassu(bench.keys, bench.program, init=["--reserved-slots", slots])
        system.make(store)
        with measure.mounted(system, store, bench.work) as mount:
            shutil.copyfile(path, os.path.join(mount.path, "file"))
        # The vault's own small files (header, the directory's record) are no part of the file.
        largest = max((os.path.join(f, n) for f, _, names in os.walk(store) for n in names), key=lambda p: os.lstat(p).st_size)
        yield {"alpha": percent, "slots": slots, "efficiency": round(100 * plain / len(survey_of([largest])), 3)}
        shutil.rmtree(store)


def survey_of(paths):
    """The distinct blocks of files."""
    found = set()
    for path in paths:
        with tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as folder:
            os.link(path, os.path.join(folder, "file"))
            found |= survey(folder).distinct
    return found
