"""Many processes, each with several threads, on the same files of one mount, looking for lost updates and torn reads.

What each job keeps true, in every cache mode: appended records are all there, whole and in their writer's order; a counter under flock(2) has
every increment; cells under fcntl(2) range locks are never read half written; a log that is emptied under a lock loses no record; a file that
is replaced by rename(2) is always one whole version; tokens that everybody moves between directories stay as many, with their content.
"""

import collections
import fcntl
import hashlib
import multiprocessing
import os
import queue
import random
import struct
import threading
import time

from lab import Failure, Lab

PROCESSES, THREADS = 4, 3
MODES = (("writeback", ()), ("through", ("-s", "chacha", "-b", "8K")), ("none", ("-s", "blake3", "-R", "2")))
RECORD = 200  # bytes of an appended record: no divisor of a block
CELLS, CELL = 60, 900
TOKENS = 24
TOO_LONG = 180  # seconds that the workers may take beyond their time


def sealed(text, length):
    """A text with its hash, of exactly `length` bytes."""
    body = text.encode().ljust(length - 17, b".")
    return hashlib.sha256(body).hexdigest()[:16].encode() + body + b"\n"


def opened(record):
    """The text of a sealed record; one that is torn is a failure."""
    if hashlib.sha256(record[16:-1]).hexdigest()[:16].encode() != record[:16]:
        raise Failure(f"torn: {record[:60]!r}")
    return record[16:-1].rstrip(b".").decode()


class Jobs:
    """What one thread does; each method once."""

    def __init__(self, top, who, seed, tally):
        self.top, self.who, self.tally = top, who, tally
        self.rng = random.Random(f"{seed} {who}")
        self.log = os.open(f"{top}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def append(self):
        record = sealed(f"{self.who} {self.tally['append']}", RECORD)
        if os.write(self.log, record) != RECORD:
            raise Failure("a short append")
        self.tally["append"] += 1
        if self.rng.random() < 0.02:
            os.fsync(self.log)

    def count(self):
        # Opened each time: a range lock or a flock of one process would not keep its own threads apart.
        with open(f"{self.top}/counter", "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            number = int(opened(os.pread(file.fileno(), CELL, 0)))
            os.pwrite(file.fileno(), sealed(str(number + 1), CELL), 0)
        self.tally["count"] += 1

    def cell(self):
        at = self.rng.randrange(CELLS) * CELL
        fd = os.open(f"{self.top}/cells", os.O_RDWR)
        try:
            write = self.rng.random() < 0.4
            # A lock of the open file, not of the process: F_OFD_SETLKW.
            lock = fcntl.F_WRLCK if write else fcntl.F_RDLCK
            fcntl.fcntl(fd, 38, flock64(lock, at, CELL))
            opened(os.pread(fd, CELL, at))
            if write:
                os.pwrite(fd, sealed(f"{self.who} {self.rng.random()}", CELL), at)
                opened(os.pread(fd, CELL, at))
        finally:
            os.close(fd)

    def rotate(self):
        with open(f"{self.top}/rotated", "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            length = os.fstat(file.fileno()).st_size
            if length > 40 * RECORD:
                held = os.pread(file.fileno(), length, 0)
                self.tally["emptied"] += len(records(held, RECORD))
                os.ftruncate(file.fileno(), 0)
                length = 0
            os.pwrite(file.fileno(), sealed(f"{self.who} r", RECORD), length)
        self.tally["rotate"] += 1

    def publish(self):
        path = f"{self.top}/current"
        if self.rng.random() < 0.3:
            version = sealed(self.who, 6000 + self.rng.randrange(9000))
            mine = f"{self.top}/new-{self.who}"
            with open(mine, "wb") as file:
                file.write(version)
            os.rename(mine, path)
        with open(path, "rb") as file:
            opened(file.read())

    def move(self):
        name = f"token{self.rng.randrange(TOKENS)}"
        here, there = self.rng.sample(("left", "right"), 2)
        try:
            os.rename(f"{self.top}/{here}/{name}", f"{self.top}/{there}/{name}")
        except FileNotFoundError:
            return
        self.tally["moved"] += 1

    def run(self, until):
        jobs = (self.append, self.count, self.cell, self.rotate, self.publish, self.move)
        try:
            while time.monotonic() < until:
                self.rng.choice(jobs)()
                self.tally["operations"] += 1
        finally:
            os.close(self.log)


def flock64(kind, start, length):
    """struct flock as F_OFD_SETLKW wants it: pid is zero."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)


def records(data, length):
    if len(data) % length:
        raise Failure(f"{len(data)} bytes are no whole records")
    return [opened(data[at : at + length]) for at in range(0, len(data), length)]


def worker(top, n, seed, until, results):
    """One process: its threads, and what they counted."""
    tallies, faults = {}, []

    def thread(who):
        tallies[who] = collections.Counter()
        try:
            Jobs(top, who, seed, tallies[who]).run(until)
        except (Failure, OSError, ValueError) as fault:
            faults.append(f"{who}: {type(fault).__name__}: {fault}")

    threads = [threading.Thread(target=thread, args=(f"p{n}t{t}",)) for t in range(THREADS)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    results.put((tallies, faults))


def prepare(top):
    for name, length in (("counter", CELL), ("cells", CELL)):
        (top / name).write_bytes(sealed("0", length) * (CELLS if name == "cells" else 1))
    (top / "rotated").write_bytes(b"")
    (top / "current").write_bytes(sealed("first", 7000))
    for side in ("left", "right"):
        (top / side).mkdir()
    for n in range(TOKENS):
        (top / "left" / f"token{n}").write_bytes(sealed(f"token{n}", 300))


def together(top, seed, seconds):
    """Runs the workers; what each thread counted."""
    results = multiprocessing.Queue()
    until = time.monotonic() + seconds
    running = [multiprocessing.Process(target=worker, args=(str(top), n, seed, until, results)) for n in range(PROCESSES)]
    for process in running:
        process.start()
    tallies, faults = {}, []
    try:
        for _ in running:
            some, bad = results.get(timeout=seconds + TOO_LONG)
            tallies |= some
            faults += bad
    except queue.Empty:
        faults.append("a worker hangs")
    finally:
        for process in running:
            process.join(1)
            process.kill()
    if faults:
        raise Failure("\n".join(faults))
    return tallies


def verify(top, tallies):
    """Nothing of what was counted is missing."""
    total = sum(tallies.values(), collections.Counter())
    found = collections.defaultdict(list)
    for text in records((top / "log").read_bytes(), RECORD):
        who, number = text.split()
        found[who].append(int(number))
    for who, tally in tallies.items():
        if found[who] != list(range(tally["append"])):
            raise Failure(f"{who} appended {tally['append']} records; there are {len(found[who])}, or in another order")
    counter = int(opened((top / "counter").read_bytes()))
    if counter != total["count"]:
        raise Failure(f"{total['count']} increments, and the counter says {counter}")
    left = len(records((top / "rotated").read_bytes(), RECORD))
    if left + total["emptied"] != total["rotate"]:
        raise Failure(f"{total['rotate']} records written, {total['emptied']} taken out, {left} left")
    records((top / "cells").read_bytes(), CELL)
    opened((top / "current").read_bytes())
    tokens = sorted(path.name for side in ("left", "right") for path in (top / side).iterdir())
    if tokens != sorted(f"token{n}" for n in range(TOKENS)):
        raise Failure(f"tokens: {tokens}")
    for side in ("left", "right"):
        for path in (top / side).iterdir():
            if opened(path.read_bytes()) != path.name:
                raise Failure(f"{path.name} has another's content")
    return total["operations"]


def run(seed, seconds):
    """Every cache mode in turn; verified in the mount, after an unmount and a check, and in a new mount."""
    operations = 0
    for cache, options in MODES:
        try:
            with Lab() as lab:
                vault = lab.vault("v", *options)
                vault.mount("-c", cache)
                prepare(vault.mnt)
                tallies = together(vault.mnt, seed, max(2.0, seconds / len(MODES) - 2))
                operations += verify(vault.mnt, tallies)
                vault.umount()
                vault.check()
                vault.mount("-c", cache)
                verify(vault.mnt, tallies)
                vault.umount()
        except Failure as failure:
            raise Failure(f"cache={cache} {' '.join(options)} seed={seed}: {failure}") from None
    return f"{operations} operations by {PROCESSES} processes of {THREADS} threads in {len(MODES)} cache modes"
