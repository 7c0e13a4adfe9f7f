"""What becomes of throughput as a file grows, on XFS, and as files become more."""

import os
import time

from demolib.shell import Undo, run
from demolib.store import XfsStore

from . import measure
from .sweeps import OURS, Sweep, run_sweeps, write_1m

# PlainFS keeps a descriptor for each inode that the kernel knows: it cannot have so many.
ALONE = ("lamassu", "lamassu-unanchored")
SETTLES_S = 30
SIZES_MIB = (1, 16, 256, 4096, 32768)
LARGE_MIB = 256


def read_file_of(bench, path, mib):
    measure.fio(path, "write", "1m", mib)
    measure.drop_caches(sync=True)
    back_memory(mib)
    return measure.mb_per_s(measure.fio(path, "read", "1m", mib), "read")


MAKE = """
import os, sys
top, count = sys.argv[1], int(sys.argv[2])
for n in range(count):
    if n % 1000 == 0:
        os.mkdir(f"{top}/{n // 1000}")
    with open(f"{top}/{n // 1000}/{n}", "wb", buffering=0) as file:
        file.write(b"x" * 700)
"""


def files_made(bench, path, count):
    return count / measure.seconds_of("python3", "-c", MAKE, path, count)


def files_found(bench, path, count):
    run("python3", "-c", MAKE, path, count)
    measure.drop_caches(sync=True)
    return count / measure.seconds_of("find", path, "-type", "f", "-newermt", "1971-01-01", "-fprint", "/dev/null")


def back_memory(mib):
    if mib >= LARGE_MIB:
        measure.back_memory()


SIZES = {
    "write-size": Sweep("Writing a file by its size, on XFS", "MiB", "MB/s", SIZES_MIB, (1, 4), OURS, write_1m, before=back_memory, once=(32768,)),
    "read-size": Sweep("Reading a file by its size, on XFS", "MiB", "MB/s", SIZES_MIB, (1, 4), OURS, read_file_of, before=back_memory, once=(32768,)),
}
NUMBERS = {
    "files-made": Sweep("Making files by their number, a thousand a directory", "files", "files/s", (1000, 10_000, 100_000, 1_000_000), (100, 1000),
                        ALONE, files_made, once=(1_000_000,)),
    "files-found": Sweep("Finding files by their number", "files", "files/s", (1000, 10_000, 100_000, 1_000_000), (100, 1000), ALONE, files_found,
                         once=(1_000_000,)),
}


def fill(store):
    """Has the disk below allocate all that the image takes: it is no work of the systems compared, and XFS gives each new directory another part of the image."""
    path = os.path.join(store.path, "fill")
    run("dd", "if=/dev/zero", f"of={path}", "bs=16M", "conv=fsync", "status=none", check=False)
    os.unlink(path)
    # In a virtual machine the disk's host goes on for ten to twenty seconds and takes processor time: the first passes were several times too slow.
    time.sleep(SETTLES_S)


def run_all(bench):
    with Undo() as undo:
        xfs = XfsStore(undo, bench.work, bench.size(40, 2) << 30, exact=False)
        if not bench.toy:
            fill(xfs)
        sizes = SIZES.values()
        return run_sweeps(bench, {**SIZES, **NUMBERS}, lambda sweep: xfs.path if sweep in sizes else bench.memory)
