"""Several processes on the same few names of one anchored mount, without locks, and then many files in a row.

No call may fail with anything but what such races give on any file system. The daemon warns of nothing. It ends with no session left open,
and neither `check` nor `scrub` finds anything. Contents are not compared here: `together` and `ops` do that.
"""

import collections
import errno
import json
import multiprocessing
import os
import queue
import random
import time

from lab import Failure, Lab, call, program, some_bytes

PROCESSES = 4
DIRS, NAMES, SUBDIRS = 4, 60, 10
LENGTHS = (10, 3000, 9000, 600_000)  # within a block, within a page, more than a page
RACES = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR, errno.ESTALE}
ROW, ROW_A_SECOND, FILES_PER_DIR = 20_000, 600, 1000
TOO_LONG = 120  # seconds that the processes may take beyond their time


class Calls:
    """What one process does; each method once."""

    def __init__(self, top, seed):
        self.top = top
        self.rng = random.Random(seed)

    def dir(self):
        return f"{self.top}/d{self.rng.randrange(DIRS)}"

    def name(self):
        return f"{self.dir()}/n{self.rng.randrange(NAMES)}"

    def subdir(self):
        return f"{self.dir()}/x{self.rng.randrange(SUBDIRS)}"

    def sync(self, fd):
        if self.rng.random() < 0.3:
            os.fsync(fd)

    def create(self):
        with open(self.name(), "wb", buffering=0) as file:
            file.write(some_bytes(self.rng, self.rng.choice(LENGTHS)))
            self.sync(file.fileno())

    def change(self):
        with open(self.name(), "r+b", buffering=0) as file:
            file.truncate(self.rng.choice((0, 100, 5000, 700_000)))
            os.pwrite(file.fileno(), some_bytes(self.rng, 6000), 3000)

    def read(self):
        with open(self.name(), "rb") as file:
            file.read()

    def unlink(self):
        os.unlink(self.name())

    def link_name(self):
        return f"{self.dir()}/l{self.rng.randrange(4)}"

    def symlink(self):
        """Made and removed, so that the store gives its inode number to the next one."""
        os.symlink(self.rng.choice(("x", "y" * 200, "z" * 3000)), self.link_name())

    def unsymlink(self):
        os.unlink(self.link_name())

    def readlink(self):
        os.readlink(self.link_name())

    def rename(self):
        os.rename(self.name(), self.name())

    def rename_open(self):
        name = self.name()
        with open(name, "r+b", buffering=0) as file:
            os.rename(name, self.name())
            file.write(self.rng.randbytes(5000))
            os.fchmod(file.fileno(), 0o640)
            self.sync(file.fileno())

    def link(self):
        os.link(self.name(), self.name())

    def unlink_open(self):
        """Two names of one open file go: one is removed, the other replaced."""
        name, second = self.name(), self.name()
        with open(name, "r+b", buffering=0) as file:
            os.link(name, second)
            self.sync(file.fileno())
            file.write(self.rng.randbytes(5000))
            os.unlink(second)
            os.rename(self.name(), name)

    def chmod(self):
        os.chmod(self.name(), self.rng.choice((0o600, 0o644)))

    def list(self):
        top = self.dir()
        for name in os.listdir(top):
            os.lstat(f"{top}/{name}")

    def subdirs(self):
        name = self.subdir()
        try:
            os.mkdir(name)
        except FileExistsError:
            if self.rng.random() < 0.5:
                os.rmdir(name)
            else:
                os.rename(name, self.subdir())

    def run(self, until):
        """Counts the calls that a race made fail; what else failed."""
        calls = (self.create, self.create, self.change, self.read, self.unlink, self.rename, self.rename_open)
        calls += (self.link, self.unlink_open, self.chmod, self.list, self.subdirs)
        calls += (self.symlink, self.unsymlink, self.readlink, self.readlink)
        tally, faults = collections.Counter(), collections.Counter()
        while time.monotonic() < until:
            one = self.rng.choice(calls)
            tally["calls"] += 1
            try:
                one()
            except OSError as error:
                if error.errno in RACES:
                    tally[errno.errorcode[error.errno]] += 1
                else:
                    faults[f"{one.__name__}: {error.strerror}"] += 1
        return tally, faults


def worker(top, seed, until, results):
    results.put(Calls(top, seed).run(until))


def crowd(top, seed, seconds):
    """Runs the processes; what they counted together."""
    for n in range(DIRS):
        os.mkdir(top / f"d{n}")
    results = multiprocessing.Queue()
    until = time.monotonic() + seconds
    running = [multiprocessing.Process(target=worker, args=(top, f"{seed} {n}", until, results)) for n in range(PROCESSES)]
    for process in running:
        process.start()
    tally, faults = collections.Counter(), collections.Counter()
    try:
        for _ in running:
            some, bad = results.get(timeout=seconds + TOO_LONG)
            tally += some
            faults += bad
    except queue.Empty:
        faults["a process hangs, or has ended with an error"] += 1
    finally:
        for process in running:
            process.join(1)
            process.kill()
    if faults:
        raise Failure("\n".join(f"{times} times {what}" for what, times in faults.most_common()))
    return tally


def row(top, count):
    """So many files are made in a row, while the anchor commits; then they are all there."""
    for n in range(count):
        if n % FILES_PER_DIR == 0:
            (top / f"row{n // FILES_PER_DIR}").mkdir()
        try:
            with open(top / f"row{n // FILES_PER_DIR}" / f"{n}", "wb") as file:
                file.write(b"%d" % n)
        except OSError as error:
            raise Failure(f"file {n} of {count} in a row: {error}") from None
    for n in range(0, count, FILES_PER_DIR):
        with os.scandir(top / f"row{n // FILES_PER_DIR}") as entries:
            found = {entry.name for entry in entries if entry.stat().st_size == len(entry.name)}
        if found != {str(m) for m in range(n, min(n + FILES_PER_DIR, count))}:
            raise Failure(f"row{n // FILES_PER_DIR} has {len(found)} files of {min(FILES_PER_DIR, count - n)} as they were made")


def scrub(vault):
    """`lamassu scrub`, which takes no key, finds nothing, and nothing unfinished."""
    said = json.loads(call(program(), "scrub", "-q", "--json", str(vault.dir)).stdout)
    if said["findings"] or said["unfinished"]:
        raise Failure(f"scrub: {said['unfinished']} unfinished, findings {said['findings'][:20]}")


def run(seed, seconds):
    """Half of the time for the processes; about as much takes the row."""
    try:
        with Lab() as lab:
            vault = lab.vault("v")
            vault.mount()
            count = max(ROW, int(seconds * ROW_A_SECOND))
            try:
                tally = crowd(vault.mnt, seed, max(3.0, seconds / 2))
                row(vault.mnt, count)
                vault.umount()
            except Failure as failure:
                raise Failure(f"{failure}\n{vault.log_tail()}") from None
            # The mount is quiet: what it says is a warning or an error.
            if vault.log_tail():
                raise Failure(f"the daemon says\n{vault.log_tail()}")
            said = vault.check()
            if said["problems"] or said["open_sessions"]:
                raise Failure(f"check: sessions {said['open_sessions']} are open, problems {said['problems'][:20]}")
            scrub(vault)
    except Failure as failure:
        raise Failure(f"seed={seed}: {failure}") from None
    return f"{tally['calls']} calls by {PROCESSES} processes, {tally['ESTALE']} of them ESTALE; {count} files in a row"
