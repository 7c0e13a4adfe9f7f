#!/usr/bin/env python3
"""What one host's programs do with a shared mount, for tests/torture/shared.py, which starts one of these in the namespaces of each host.

    shared_host.py HOST TOP SEED LOG

Commands are lines on standard input, each answered by one line of JSON: `go` (work), `halt` (and every call under way has ended), `probe` (a
file written, synced and read), `read` (all blocks, as one more part of the history), `tree` (everything there is). Calls go to LOG, one line of
JSON each, as they end. Blocks have values of their own, one thread uses a file. Names are changed without sparing other hosts. A ledger
has what was synced, file and directory. Counters are incremented under locks.
"""

import errno
import fcntl
import hashlib
import json
import os
import random
import stat
import sys
import threading
import time

from histories import NAMES, PLACES

BLOCK = 4096
FILES = 3
# Blocks in the first page of a file, and in a later one.
PLACES_IN_FILE = (0, 1, 2, 400, 401)
VALUE = 16
# What a rename may end with on any file system, and what docs/sharing.md adds.
HONEST = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.ELOOP}


def block(value):
    return value.encode().ljust(VALUE, b".") * (BLOCK // VALUE)


def value_of(data):
    """A block's value; None if it is none, or two."""
    head = data[:VALUE]
    return head.rstrip(b".").decode(errors="replace") if len(data) == BLOCK and data == head * (BLOCK // VALUE) else None


class Log:
    """Calls, as they end."""

    def __init__(self, path):
        self.file, self.lock = open(path, "a", encoding="ascii"), threading.Lock()
        self.under_way = {}

    def begin(self, what):
        now = time.monotonic()
        self.under_way[threading.get_ident()] = (what, now)
        return now

    def end(self, **call):
        del self.under_way[threading.get_ident()]
        line = json.dumps(call) + "\n"
        with self.lock:
            self.file.write(line)
            self.file.flush()


class Worker:
    """One thread of a host."""

    def __init__(self, host, name):
        self.host, self.name = host, name
        self.rng = random.Random(f"{host.seed} {host.name} {name}")
        self.serial = 0
        self.thread = threading.Thread(target=self.work, daemon=True)

    def fresh(self):
        self.serial += 1
        return f"{self.host.name}{self.name}-{self.serial}"

    def call(self, kind, what, do, **more):
        """Times a call and logs it; the result, or None after an error."""
        begun, code, result = self.host.log.begin(f"{kind} {what}"), 0, None
        try:
            result = do()
        except OSError as error:
            code = error.errno
        said = {"result": result} if isinstance(result, (str, list)) else {}
        self.host.log.end(kind=kind, what=what, thread=self.name, begun=begun, ended=time.monotonic(), errno=code, **said, **more)
        if code and (code not in HONEST or kind != "name"):
            time.sleep(0.05)  # no storm of errors
        return None if code else result if result is not None else True

    def work(self):
        while True:
            self.host.may_run(self)
            self.step()


class Blocks(Worker):
    """One file: reads and writes of blocks, and syncs."""

    def __init__(self, host, number):
        super().__init__(host, f"f{number}")
        self.path = f"{host.top}/r/{number}"
        self.fds, self.opened = {}, {}
        self.open_for = 0

    def descriptor(self, flags):
        """Of the file; None: it cannot be opened."""
        if flags not in self.fds:
            opened = []
            if self.call("open", self.path, lambda: opened.append(os.open(self.path, flags))):
                self.fds[flags] = opened[0]
                self.open_for += 1
                self.opened[flags] = (self.open_for, time.monotonic())
        return self.fds.get(flags)

    def close(self, flags):
        if flags in self.fds:
            fd = self.fds.pop(flags)
            self.call("close", self.path, lambda: os.close(fd), since=self.opened[flags][1])

    def use(self, kind, flags, what, do, **more):
        fd = self.descriptor(flags)
        if fd is None:
            return
        number, since = self.opened[flags]
        if self.call(kind, what, lambda: do(fd), fd=f"{self.host.name}{self.name}-{number}", since=since, **more) is None:
            self.close(flags)

    def read(self, at, flags):
        def do(fd):
            data = os.pread(fd, BLOCK, PLACES_IN_FILE[at] * BLOCK)
            return value_of(data) or f"no value: {len(data)} bytes, {sorted({data[n:n + VALUE] for n in range(0, len(data), VALUE)})[:5]}"

        self.use("read", flags, [self.name, at], do)

    def step(self):
        what, at = self.rng.random(), self.rng.randrange(len(PLACES_IN_FILE))
        if what < 0.45:
            self.read(at, self.rng.choice((os.O_RDONLY, os.O_RDWR)))
        elif what < 0.82:
            value = self.fresh()

            def write(fd):
                if os.pwrite(fd, block(value), PLACES_IN_FILE[at] * BLOCK) != BLOCK:
                    raise OSError(errno.EIO, "a short write")

            self.use("write", os.O_RDWR, [self.name, at], write, value=value)
        elif what < 0.96:
            self.use("sync", os.O_RDWR, [self.name], os.fsync)
        else:
            self.close(self.rng.choice((os.O_RDONLY, os.O_RDWR)))


class Names(Worker):
    """Links, files and directories in two directories, which all hosts change."""

    def step(self):
        top, kind = f"{self.host.top}/n", self.rng.random()
        one, other = self.rng.choice(NAMES), self.rng.choice(NAMES)
        path = f"{top}/{one}"
        if kind < 0.25:
            target = self.fresh()
            self.call("name", ["symlink", one, target], lambda: os.symlink(target, path))
        elif kind < 0.30:
            # Not by open(2), which is two requests of the kernel: it starts anew if another host removes the file between them.
            self.call("name", ["create", one], lambda: os.mknod(path, 0o600 | stat.S_IFREG))
        elif kind < 0.37:
            self.call("name", ["mkdir", one], lambda: os.mkdir(path))
        elif kind < 0.44:
            self.call("name", ["rmdir", one], lambda: os.rmdir(path))
        elif kind < 0.58:
            self.call("name", ["unlink", one], lambda: os.unlink(path))
        elif kind < 0.72 and one != other:
            self.call("name", ["rename", one, other], lambda: os.rename(path, f"{top}/{other}"))
        elif kind < 0.88:
            self.call("name", ["readlink", one], lambda: os.readlink(path))
        else:
            place = self.rng.choice(PLACES)
            self.call("name", ["list", place], lambda: sorted(os.listdir(f"{top}/{place}")))


class Ledger(Worker):
    """Entries that are made or removed, and synced with their directory: what is acknowledged stays so."""

    def __init__(self, host):
        super().__init__(host, "l")
        self.made = []

    def step(self):
        folder, kind = f"{self.host.top}/l", self.rng.random()
        fds = []
        try:
            if kind < 0.2 and len(self.made) > 3:
                name = self.made.pop(self.rng.randrange(len(self.made)))
                self.call("ledger", ["gone", name, "begun"], lambda: fds.append(os.open(folder, os.O_RDONLY)))
                if fds and self.call("ledger", ["gone", name, "under way"], lambda: self.remove(folder, name, fds)):
                    self.call("ledger", ["gone", name, "synced"], lambda: os.fsync(fds[0]))
                return
            name = self.fresh()
            self.call("ledger", ["made", name, "begun"], lambda: fds.append(os.open(folder, os.O_RDONLY)))
            if fds and self.call("ledger", ["made", name, "under way"], lambda: self.make(folder, name, kind, fds)):
                if self.call("ledger", ["made", name, "synced"], lambda: os.fsync(fds[0])):
                    self.made.append(name)
        finally:
            for fd in fds:
                self.call("close", folder, lambda fd=fd: os.close(fd))
            time.sleep(self.rng.random() * 0.2)

    def make(self, folder, name, kind, fds):
        first = name if kind < 0.6 else f".{name}"
        fds.append(os.open(f"{folder}/{first}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        if os.write(fds[1], block(name)) != BLOCK:
            raise OSError(errno.EIO, "a short write")
        os.fsync(fds[1])
        if first != name:
            os.rename(f"{folder}/{first}", f"{folder}/{name}")

    def remove(self, folder, name, _):
        os.unlink(f"{folder}/{name}")


class Counters(Worker):
    """Two numbers that all hosts increment, one under flock(2) and one under fcntl(2): no increment that was synced is lost."""

    def step(self):
        kind = self.rng.choice(("whole", "range"))
        path, fds, since = f"{self.host.top}/c/{kind}", [], time.monotonic()
        if not self.call("open", path, lambda: fds.append(os.open(path, os.O_RDWR))):
            return
        lock = fcntl.flock if kind == "whole" else fcntl.lockf

        def increment():
            number = int(os.pread(fds[0], 20, 0)) + 1
            os.pwrite(fds[0], b"%020d" % number, 0)
            os.fsync(fds[0])
            return str(number)

        try:
            if self.call("locked", [kind, "lock"], lambda: lock(fds[0], fcntl.LOCK_EX), since=since):
                self.call("locked", [kind, "increment"], increment, since=since)
                if self.rng.random() < 0.5:
                    self.call("locked", [kind, "unlock"], lambda: lock(fds[0], fcntl.LOCK_UN), since=since)
        finally:
            self.call("close", path, lambda: os.close(fds[0]), since=since)
            time.sleep(self.rng.random() * 0.1)


class Host:
    """All threads of a host, and when they run: in bursts, so that a host has the vault for itself at times, and keeps much of it."""

    def __init__(self, name, top, seed, log):
        self.name, self.top, self.seed, self.log = name, top, seed, Log(log)
        self.rng = random.Random(f"{seed} {name}")
        self.lock = threading.Condition()
        self.may, self.burst, self.running = False, True, 0
        self.blocks = [Blocks(self, number) for number in range(FILES)]
        self.workers = [*self.blocks, Names(self, "n"), Ledger(self), Counters(self, "c")]
        self.probes = 0
        for worker in self.workers:
            worker.waits = True
            worker.thread.start()
        threading.Thread(target=self.pace, daemon=True).start()

    def pace(self):
        while True:
            time.sleep(self.rng.choice((0.1, 0.4, 1.5)))
            with self.lock:
                self.burst = self.rng.random() < 0.7
                self.lock.notify_all()

    def may_run(self, worker):
        with self.lock:
            worker.waits = True
            self.lock.notify_all()
            while not (self.may and self.burst):
                self.lock.wait()
            worker.waits = False

    def go(self):
        with self.lock:
            self.may = True
            self.lock.notify_all()
        return "going"

    def halt(self):
        with self.lock:
            self.may = False
            until = time.monotonic() + 300
            while not all(worker.waits for worker in self.workers):
                self.lock.wait(1)
                if time.monotonic() > until:
                    break
            return [[what, begun] for what, begun in self.log.under_way.values()]

    def under_way(self):
        return [[what, begun] for what, begun in list(self.log.under_way.values())]

    def probe(self):
        self.probes += 1
        path, data = f"{self.top}/p/{self.name}", block(f"{self.name}{self.probes}")
        try:
            fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                os.pwrite(fd, data, 0)
                os.fsync(fd)
                return "well" if os.pread(fd, BLOCK, 0) == data else "something else was read"
            finally:
                os.close(fd)
        except OSError as error:
            return str(error)

    def read(self):
        """In a halt."""
        for file in self.blocks:
            for flags in (os.O_RDONLY, os.O_RDWR):
                file.close(flags)
            for at in range(len(PLACES_IN_FILE)):
                file.read(at, os.O_RDONLY)
            file.close(os.O_RDONLY)
        return "done"

    def tree(self):
        """Of each path what it is: a link's target, a digest of a file's content, a directory."""
        found = {}
        for parent, dirs, files in os.walk(self.top, onerror=raise_it):
            for name in dirs + files:
                path = os.path.join(parent, name)
                status = os.lstat(path)
                if os.path.islink(path):
                    content = ["symlink", os.readlink(path)]
                elif os.path.isdir(path):
                    content = ["mkdir"]
                else:
                    with open(path, "rb") as file:
                        content = ["create", hashlib.sha256(file.read()).hexdigest()[:16], status.st_size]
                found[os.path.relpath(path, self.top)] = [*content, status.st_mode, status.st_uid]
        return found


def raise_it(error):
    raise error


def main():
    name, top, seed, log = sys.argv[1:]
    threading.stack_size(1 << 20)
    host = Host(name, top, seed, log)
    commands = {"go": host.go, "halt": host.halt, "probe": host.probe, "read": host.read, "tree": host.tree, "calls": host.under_way}
    for line in sys.stdin:
        try:
            said = commands[line.strip()]()
        except OSError as error:
            said = {"error": str(error)}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
