#!/usr/bin/env python3
"""Random operations on one file, compared with a copy in memory after every read: fsx, in short.

    fsx.py [--seed N] [--ops N | --seconds S] [--max-size BYTES] [--direct] [--without-allocate] [--shadow FILE] [--trace] FILE

Overlapping writes and reads through three descriptors, truncation both ways, punched and zeroed ranges, allocation, shared maps,
O_DIRECT, holes as lseek(2) sees them, fsync, dropped caches, reopening. One seed is one sequence of operations, whatever the time limit. With
--shadow the expected content is kept in a file of its own, so that a later run goes on where this one ended, and first compares.
"""

import argparse
import ctypes
import ctypes.util
import errno
import mmap
import os
import random
import sys
import time

KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16  # fallocate(2)
LIBC = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
ALIGN = 4096


class Mismatch(Exception):
    """The file is not what it must be."""


def fallocate(fd, mode, offset, length):
    if LIBC.fallocate(fd, mode, offset, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Fsx:
    """The file, its shadow and the random source."""

    def __init__(self, path, seed, max_size, direct, trace):
        self.path, self.max_size, self.trace = path, max_size, trace
        self.rng = random.Random(seed)
        self.history = []
        self.shadow = bytearray()
        self.fds = []
        self.direct = None
        self.weights = dict(self.WEIGHTS)
        self.wants_direct = direct
        pool = random.Random(seed ^ 0x5EED).randbytes(1 << 20)
        # A quarter of it compresses: bytes of four values.
        self.pool = pool[1 << 18 :] + bytes(byte & 0x18 for byte in pool[: 1 << 18])

    # --- plumbing

    def open(self):
        self.fds = [os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644) for _ in range(2)]
        if self.wants_direct:
            self.direct = os.open(self.path, os.O_RDWR | os.O_DIRECT)

    def close(self):
        for fd in self.fds + ([self.direct] if self.direct is not None else []):
            os.close(fd)
        self.fds, self.direct = [], None

    def fd(self):
        return self.rng.choice(self.fds)

    def note(self, text):
        self.history.append(text)
        if self.trace:
            print(f"{len(self.history)}: {text}", flush=True)

    def range(self, within):
        """An offset and a length inside `within` bytes, often at or next to a border of a block."""
        offset = self.rng.randrange(within + 1)
        length = min(self.rng.choice((1, 31, 32, 100, 4095, 4096, 4097, 20000, 131072, 500000)), self.max_size)
        length = self.rng.randint(1, length)
        if self.rng.random() < 0.4:
            offset -= offset % ALIGN
            length += -length % ALIGN if self.rng.random() < 0.7 else 0
        return offset, length

    def data(self, length):
        """Random bytes, some of which compress; now and then one byte repeated, which makes equal blocks."""
        if self.rng.random() < 0.15:
            return bytes((self.rng.randrange(256),)) * length
        start = self.rng.randrange(len(self.pool))
        copies = self.pool[start:] + self.pool * (length // len(self.pool) + 1)
        return copies[:length]

    def expect(self, got, offset, what):
        wanted = bytes(self.shadow[offset : offset + len(got)])
        if got == wanted:
            return
        if len(wanted) != len(got):
            raise Mismatch(f"{what}: {len(got)} bytes at {offset}, the file has {len(self.shadow)}")
        first = next(i for i, (a, b) in enumerate(zip(got, wanted)) if a != b)
        bad = sum(a != b for a, b in zip(got, wanted))
        raise Mismatch(
            f"{what}: {bad} bytes differ from {offset + first} (block {(offset + first) // ALIGN}) on: "
            f"{got[first : first + 16].hex()} is not {wanted[first : first + 16].hex()}"
        )

    def put(self, offset, data):
        if not data:
            return  # a write of nothing does not make a file longer
        end = offset + len(data)
        if end > len(self.shadow):
            self.shadow.extend(bytes(end - len(self.shadow)))
        self.shadow[offset:end] = data

    # --- operations

    def op_write(self):
        offset, length = self.range(min(len(self.shadow) + 9000, self.max_size))
        data = self.data(min(length, self.max_size - offset))
        self.note(f"write {offset} {len(data)}")
        fd, done = self.fd(), 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)
        self.put(offset, data)

    def op_append(self):
        data = self.data(min(self.rng.choice((1, 33, 1000, 4096, 70000)), max(0, self.max_size - len(self.shadow))))
        self.note(f"append {len(data)} at {len(self.shadow)}")
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            if os.write(fd, data) != len(data):
                raise Mismatch("append: a short write")
        finally:
            os.close(fd)
        self.put(len(self.shadow), data)

    def op_read(self):
        offset, length = self.range(len(self.shadow))
        self.note(f"read {offset} {length}")
        wanted = max(0, min(length, len(self.shadow) - offset))
        got = os.pread(self.fd(), length, offset)
        if len(got) != wanted:
            raise Mismatch(f"read: {len(got)} bytes at {offset}, not {wanted}")
        self.expect(got, offset, "read")

    def op_direct_write(self):
        if self.direct is None:
            return
        offset, length = self.range(max(0, min(len(self.shadow), self.max_size - ALIGN)))
        offset -= offset % ALIGN
        length = max(ALIGN, min(length + -length % ALIGN, 1 << 20))
        data = self.data(length)
        self.note(f"direct write {offset} {length}")
        with mmap.mmap(-1, length) as buffer:
            buffer[:] = data
            if os.pwritev(self.direct, [buffer], offset) != length:
                raise Mismatch("direct write: short")
        self.put(offset, data)

    def op_direct_read(self):
        if self.direct is None:
            return
        offset, length = self.range(len(self.shadow))
        offset -= offset % ALIGN
        length = min(length + -length % ALIGN, 1 << 20)
        self.note(f"direct read {offset} {length}")
        with mmap.mmap(-1, length) as buffer:
            got = os.preadv(self.direct, [buffer], offset)
            wanted = max(0, min(length, len(self.shadow) - offset))
            if got != wanted:
                raise Mismatch(f"direct read: {got} bytes at {offset}, not {wanted}")
            self.expect(buffer[:got], offset, "direct read")

    def op_truncate(self):
        size = self.rng.choice((0, self.rng.randrange(self.max_size + 1), self.rng.randrange(len(self.shadow) + 1)))
        if self.rng.random() < 0.3:
            size -= size % ALIGN
        if size == 0 and self.rng.random() < 0.8:
            size = self.rng.randrange(len(self.shadow) + 1)
        self.note(f"truncate {len(self.shadow)} -> {size}")
        os.ftruncate(self.fd(), size)
        del self.shadow[size:]
        self.shadow.extend(bytes(size - len(self.shadow)))

    def op_punch(self):
        offset, length = self.range(len(self.shadow))
        zero = self.rng.random() < 0.3
        self.note(f"{'zero' if zero else 'punch'} {offset} {length}")
        try:
            fallocate(self.fd(), (ZERO_RANGE if zero else PUNCH_HOLE) | KEEP_SIZE, offset, length)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP or not zero:
                raise
            return  # tmpfs has no FALLOC_FL_ZERO_RANGE
        end = min(offset + length, len(self.shadow))
        if offset < end:
            self.shadow[offset:end] = bytes(end - offset)

    def op_allocate(self):
        offset, length = self.range(len(self.shadow))
        length = min(length, self.max_size - offset)
        keep = self.rng.random() < 0.5
        if length < 1:
            return
        self.note(f"allocate {offset} {length}{' keep' if keep else ''}")
        fallocate(self.fd(), KEEP_SIZE if keep else 0, offset, length)
        if not keep:
            self.shadow.extend(bytes(max(0, offset + length - len(self.shadow))))

    def op_map(self):
        if not self.shadow:
            return
        offset, length = self.range(len(self.shadow) - 1)
        length = min(length, len(self.shadow) - offset)
        base = offset - offset % mmap.ALLOCATIONGRANULARITY
        write = self.rng.random() < 0.6
        self.note(f"map {'write' if write else 'read'} {offset} {length}")
        with mmap.mmap(self.fds[0], offset - base + length, offset=base) as view:
            if write:
                data = self.data(length)
                view[offset - base :] = data
                self.shadow[offset : offset + length] = data
                if self.rng.random() < 0.5:
                    view.flush()
            else:
                self.expect(view[offset - base :], offset, "map")

    def op_size(self):
        self.note("size")
        for size in (os.fstat(self.fds[0]).st_size, os.stat(self.path).st_size, os.lseek(self.fds[1], 0, os.SEEK_END)):
            if size != len(self.shadow):
                raise Mismatch(f"size: {size}, not {len(self.shadow)}")

    def op_holes(self):
        """What lseek(2) calls a hole must read as zeros."""
        self.note("holes")
        fd, at, size = self.fds[0], 0, len(self.shadow)
        while at < size:
            try:
                data = os.lseek(fd, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                data = size
            if data < at or data > size or self.shadow[at:data].strip(b"\0"):
                raise Mismatch(f"holes: data before {data}, where a hole from {at} is said to end")
            if data == size:
                return
            at = os.lseek(fd, data, os.SEEK_HOLE)
            if at <= data or at > size:
                raise Mismatch(f"holes: data from {data} ends at {at}")

    def op_sync(self):
        self.note("fsync")
        self.rng.choice((os.fsync, os.fdatasync))(self.fd())

    def op_drop(self):
        self.note("sync, drop cache")
        os.fdatasync(self.fds[0])
        os.posix_fadvise(self.fds[0], 0, 0, os.POSIX_FADV_DONTNEED)

    def op_reopen(self):
        self.note("reopen")
        self.close()
        self.open()

    def compare(self, what="compare"):
        """The whole file."""
        self.op_size()
        for at in range(0, len(self.shadow), 1 << 20):
            got = os.pread(self.fds[0], 1 << 20, at)
            if len(got) != min(1 << 20, len(self.shadow) - at):
                raise Mismatch(f"{what}: {len(got)} bytes at {at}")
            self.expect(got, at, what)

    WEIGHTS = {
        "write": 25, "append": 6, "read": 20, "direct_write": 8, "direct_read": 8, "truncate": 8, "punch": 6, "allocate": 3,
        "map": 8, "size": 4, "holes": 3, "sync": 3, "drop": 3, "reopen": 2,
    }  # fmt: skip

    def step(self):
        (name,) = self.rng.choices(list(self.weights), self.weights.values())
        getattr(self, f"op_{name}")()


def main():
    usage = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    usage.add_argument("--seed", type=int, default=0)
    usage.add_argument("--ops", type=int, default=1 << 62, help="stop after so many operations")
    usage.add_argument("--seconds", type=float, default=10.0)
    usage.add_argument("--max-size", type=int, default=1 << 20)
    usage.add_argument("--direct", action="store_true", help="use O_DIRECT too")
    usage.add_argument("--without-allocate", action="store_true", help="for stores that cannot reserve space")
    usage.add_argument("--shadow", help="keeps the expected content between runs")
    usage.add_argument("--trace", action="store_true", help="print every operation")
    usage.add_argument("file")
    args = usage.parse_args()
    fsx = Fsx(args.file, args.seed, args.max_size, args.direct, args.trace)
    if args.without_allocate:
        del fsx.weights["allocate"]
    until = time.monotonic() + args.seconds
    try:
        if args.shadow and os.path.exists(args.shadow):
            with open(args.shadow, "rb") as shadow:
                fsx.shadow = bytearray(shadow.read())
        fsx.open()
        fsx.compare("compare at start")
        while len(fsx.history) < args.ops and time.monotonic() < until:
            fsx.step()
            if len(fsx.history) % 500 == 0:
                fsx.compare()
        fsx.compare("compare at end")
        fsx.close()
    except (Mismatch, OSError) as error:
        last = "\n  ".join(fsx.history[-30:])
        print(f"FAILED {args.file} --seed {args.seed} --max-size {args.max_size}", file=sys.stderr)
        print(f"after {len(fsx.history)} operations:\n  {last}\n{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if args.shadow:
        with open(args.shadow, "wb") as shadow:
            shadow.write(fsx.shadow)
    print(f"{len(fsx.history)} operations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
