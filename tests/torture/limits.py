"""Large things: a file of 1 TiB that is nearly all hole, many files in one tree, many open files at once.

What counts is work and memory, not time: calls and bytes that the daemon reads (/proc/PID/io), and its resident memory.
"""

import os
import random
import resource

from lab import Failure, Lab
from soak import RSS_MAX, resident

TIB = 1 << 40
OPEN_FILES = 10_000
FILES_PER_DIR = 1000


def work(pid):
    """Calls that read, and bytes read, by the daemon so far."""
    with open(f"/proc/{pid}/io", encoding="ascii") as counters:
        found = dict(line.split(": ") for line in counters)
    return int(found["syscr"]), int(found["rchar"])


def visit(path, size, marks):
    """Opens a file and reads its parts; follows its data with lseek(2)."""
    fd = os.open(path, os.O_RDWR)
    try:
        if os.fstat(fd).st_size != size:
            raise Failure(f"{path.name}: {os.fstat(fd).st_size} bytes, not {size}")
        for at, data in marks.items():
            if os.pread(fd, len(data), at) != data:
                raise Failure(f"{path.name}: wrong content at {at}")
            found = os.lseek(fd, max(0, at - 300_000), os.SEEK_DATA)
            if not max(0, at - 300_000) <= found <= at:
                raise Failure(f"{path.name}: the data at {at} is found at {found}")
        if os.pread(fd, 4096, size // 3) != bytes(4096):
            raise Failure(f"{path.name}: a hole is not zeros")
    finally:
        os.close(fd)


def sparse(rng):
    """A file of 1 TiB takes the work of a small one with the same data."""
    with Lab("xfs", megabytes=512) as lab:
        vault = lab.vault("v")
        spent = {}
        files = {"small": 64 << 20, "large": TIB}
        marks = {}
        vault.mount()
        for name, size in files.items():
            marks[name] = {at: rng.randbytes(9000) for at in (0, size // 2 // 4096 * 4096, size - 9000)}
            with open(vault.mnt / name, "wb") as file:
                file.truncate(size)
                for at, data in marks[name].items():
                    file.seek(at)
                    file.write(data)
        vault.umount()
        for name, size in files.items():
            vault.mount()
            before, memory = work(vault.daemon.pid), resident(vault.daemon.pid)
            visit(vault.mnt / name, size, marks[name])
            with open(vault.mnt / name, "r+b") as file:
                file.seek(size // 2)
                file.write(b"changed")
                os.fsync(file.fileno())
            after = work(vault.daemon.pid)
            spent[name] = tuple(b - a for a, b in zip(before, after))
            grown = resident(vault.daemon.pid) - memory
            vault.umount()
            if grown > 32 << 20:
                raise Failure(f"{name}: memory grew by {grown >> 20} MiB")
        (few, little), (calls, read) = spent["small"], spent["large"]
        if calls > 2 * few + 40 or read > 2 * little + (1 << 20):
            raise Failure(f"1 TiB: {calls} calls and {read} bytes read; 64 MiB: {few} and {little}")
        # Cut to half and grown again: as much work as for a small file, and nothing comes back.
        vault.mount()
        os.truncate(vault.mnt / "large", TIB // 4)
        os.truncate(vault.mnt / "large", TIB)
        with open(vault.mnt / "large", "rb") as file:
            file.seek(TIB // 2)
            if file.read(4096) != bytes(4096):
                raise Failure("what was cut off came back")
        vault.umount()
        vault.check()
        return f"1 TiB: {calls} calls, {read >> 10} KiB read; 64 MiB: {few} calls, {little >> 10} KiB"


def open_files(rng):
    """Ten thousand files open at once, each of them written, read and synced."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(OPEN_FILES, hard - 100)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 100), hard))
    held = []
    try:
        with Lab() as lab:
            vault = lab.vault("v")
            vault.mount()
            for n in range(count):
                held.append(os.open(vault.mnt / f"f{n}", os.O_RDWR | os.O_CREAT))
                os.write(held[-1], n.to_bytes(8, "little") * 64)
            for n in rng.sample(range(count), 200):
                os.fsync(held[n])
            for n in range(count):
                if os.pread(held[n], 8, 0) != n.to_bytes(8, "little"):
                    raise Failure(f"file {n} of {count} open ones is another")
            memory = resident(vault.daemon.pid, "VmHWM")
            for fd in held:
                os.close(fd)
            held.clear()
            if memory > RSS_MAX:
                raise Failure(f"{count} open files take {memory >> 20} MiB")
            vault.umount()
            vault.check()
            return f"{count} open files in {memory >> 20} MiB"
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def tree(count):
    """So many files in one tree: made, listed, found again in the next mount."""
    with Lab() as lab:
        vault = lab.vault("v")
        vault.mount()
        for n in range(count):
            if n % FILES_PER_DIR == 0:
                top = vault.mnt / f"d{n // FILES_PER_DIR}"
                top.mkdir()
            with open(top / f"file-{n}", "wb") as file:
                file.write(b"%d" % n)
        peaks = [resident(vault.daemon.pid, "VmHWM")]
        vault.umount()
        vault.mount()
        found = 0
        for d in range(-(-count // FILES_PER_DIR)):
            with os.scandir(vault.mnt / f"d{d}") as entries:
                for entry in entries:
                    found += 1
                    if entry.stat().st_size != len(entry.name) - 5:
                        raise Failure(f"{entry.name} has {entry.stat().st_size} bytes")
        peaks.append(resident(vault.daemon.pid, "VmHWM"))
        if found != count:
            raise Failure(f"{found} files of {count}")
        vault.umount()
        report = vault.check()
        if report["files"] != count:
            raise Failure(f"check counts {report['files']} files of {count}")
        if max(peaks) > max(RSS_MAX, 300 * count):
            raise Failure(f"{count} files: {max(peaks) >> 20} MiB of memory")
        return f"{count} files in one tree: {peaks[0] >> 20} MiB while making, {peaks[1] >> 20} MiB while listing"


def run(seed, seconds):
    """The limits once each; the tree grows with the time given."""
    rng = random.Random(seed)
    return "; ".join((sparse(rng), open_files(rng), tree(max(5_000, int(seconds * 200)))))


def large_tree(_seed, _seconds):
    """TORTURE_FILES files, a million by default (4.5 KiB of store each)."""
    return tree(int(os.environ.get("TORTURE_FILES", "1000000")))
