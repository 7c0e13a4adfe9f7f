"""Daemons that die under load, stores that lose power, and what must be left.

Two kinds of load. *Blocks*: a process writes, truncates and syncs files, and notes for every block of 4 KiB each content it has had since the last
completed fsync; after the crash the block must be one of these. *Names*: a process makes, renames, links and removes entries, and
notes after each call how the tree must look; after a killed daemon the tree is as after the last completed call, or the one under way.
With an anchor changes of names that nobody synced may be taken back, one by one (docs/freshness.md): each entry of a directory is as it
was at some moment of the mount, and what was there all the time is there.
"""

import multiprocessing
import os
import pathlib
import pickle
import random
import signal
import time

from lab import CRASHED, REPAIRED, Failure, Lab, some_bytes

BLOCK = 4096
FILE_BLOCKS_MAX = 300  # nearly three pages of 116 blocks
CRASH_ERRNO = {107, 103, 5, 117, 9, 116}  # ENOTCONN, ECONNABORTED, EIO, EUCLEAN (a store that was shut down), EBADF, ESTALE


class Blocks:
    """One file: what each block may hold, and which sizes the file may have, after a crash now."""

    def __init__(self, path):
        self.path = path
        self.now = bytearray()
        self.sizes = {0}
        self.may = {}  # block -> list of contents since the last fsync
        self.synced = False
        self.history = []

    def block(self, number):
        return bytes(self.now[number * BLOCK : (number + 1) * BLOCK])

    def remember(self, first, last):
        for number in range(first, last + 1):
            content = self.block(number)
            known = self.may.setdefault(number, [b""])
            if content not in known:
                known.append(content)

    def begin_write(self, offset, data):
        """To be called before the write: from its first byte on the new content is possible."""
        first, old = offset // BLOCK, len(self.now)
        self.history.append(f"write {offset} {len(data)}")
        end = offset + len(data)
        self.now.extend(bytes(max(0, end - old)))
        self.now[offset:end] = data
        self.sizes |= {len(self.now)}
        self.remember(min(first, old // BLOCK), (end - 1) // BLOCK)

    def begin_truncate(self, size):
        old = len(self.now)
        self.history.append(f"truncate {old} -> {size}")
        del self.now[size:]
        self.now.extend(bytes(size - len(self.now)))
        self.sizes |= {size}
        # A shrink may be on disk without the writes before it: it can have cut any earlier content.
        number, inside = divmod(size, BLOCK)
        known = self.may.setdefault(number, [b""])
        known += [content[:inside] for content in known if content[inside:].strip(b"\0")]
        self.remember(min(old, size) // BLOCK, max(old, size) // BLOCK)

    def done_sync(self):
        self.settle(bytes(self.now))
        self.synced = True

    def settle(self, content):
        """From here on, this is what a crash must leave."""
        self.now = bytearray(content)
        self.sizes = {len(content)}
        self.history = []
        count = -(-len(content) // BLOCK)
        self.may = {number: [self.block(number)] for number in range(count)}

    def verify(self, found):
        size = len(found)
        if not min(self.sizes) <= size <= max(self.sizes):
            raise Failure(f"{self.path.name}: size {size} after the crash, possible are {sorted(self.sizes)}")
        for number in range(-(-size // BLOCK)):
            got = found[number * BLOCK : (number + 1) * BLOCK]
            known = self.may.get(number, [b""])
            if not any((old + bytes(len(got)))[: len(got)] == got for old in known):
                old = len(known)
                first = got[:16].hex()
                raise Failure(
                    f"{self.path.name}: block {number} of size {size} is none of its {old} possible contents (begins {first}); "
                    + ", ".join(self.history[-20:])
                )


def write_blocks(seed, path, out, cut):
    """The process that loads one file until the mount dies. An fsync that ends after the `cut` counts for nothing: while XFS is being shut down,
    its fsync can succeed although the log will never be written."""
    rng = random.Random(seed)
    with open(out, "rb") as saved:
        model = pickle.load(saved)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if not model.synced:
            os.fsync(fd)
            if not cut.is_set():
                model.done_sync()
        while True:
            what = rng.random()
            if what < 0.72:
                limit = min(len(model.now) + 30_000, FILE_BLOCKS_MAX * BLOCK)
                offset = rng.randrange(limit)
                length = rng.choice((1, 40, 3000, BLOCK, 9000, 60_000))
                if rng.random() < 0.4:
                    offset, length = offset - offset % BLOCK, length + -length % BLOCK
                data = some_bytes(rng, length)
                model.begin_write(offset, data)
                os.pwrite(fd, data, offset)
            elif what < 0.80:
                size = rng.randrange(len(model.now) + 5000)
                model.begin_truncate(min(size, FILE_BLOCKS_MAX * BLOCK))
                os.ftruncate(fd, len(model.now))
            elif what < 0.94:
                os.fsync(fd)
                if not cut.is_set():
                    model.done_sync()
            else:
                os.close(fd)
                fd = os.open(path, os.O_RDWR)
    except OSError as error:
        # A failed fsync leaves the model as it is: nothing is known to be durable that was not before.
        crashed = error.errno in CRASH_ERRNO
        with open(out, "wb") as saved:
            pickle.dump(model, saved)
        os._exit(0 if crashed else 3)


class Names:
    """A directory: what the tree must look like, and the call under way."""

    def __init__(self):
        self.tree = {}  # path -> None for a directory, bytes for a file, str for a link's target
        self.under_way = None  # the tree as it is if the last call took effect
        self.past = [self.tree]  # the trees since this mount began, that one last
        self.first_names = {}  # last name of a directory, which is no other's -> the one that it was made with

    def done(self):
        self.tree = self.under_way
        self.past.append(self.tree)

    def settle(self, found):
        """From here on, this is what there is."""
        self.tree, self.under_way, self.past = found, None, [found]


def next_change(rng, tree, counter, first_names):
    """A random change: (call, tree after it). `call` takes the mount's directory."""
    dirs = [""] + [path for path, kind in tree.items() if kind is None]
    leaves = [path for path, kind in tree.items() if kind is not None]
    parent = rng.choice(dirs)
    fresh = os.path.join(parent, f"{counter:x}" + rng.choice(("", "n" * 200)))
    what = rng.choice(("mkdir", "write", "write", "replace", "move", "unlink", "rmdir", "symlink", "link", "movedir"))
    after = dict(tree)
    if what == "mkdir" and fresh.count("/") < 6:
        after[fresh] = None
        return (lambda top: os.mkdir(top / fresh)), after
    if what == "symlink":
        after[fresh] = "t" * rng.choice((1, 100, 600))  # XFS takes 1023 bytes, sealing included
        return (lambda top: os.symlink(after[fresh], top / fresh)), after
    if what == "link" and leaves:
        source = rng.choice(leaves)
        if isinstance(tree[source], bytes):
            after[fresh] = tree[source]
            return (lambda top: os.link(top / source, top / fresh)), after
    if what in ("move", "replace") and leaves:
        source, target = rng.choice(leaves), rng.choice(leaves) if what == "replace" else fresh
        if source != target:
            if tree.get(target) == tree[source]:
                return None  # may be two names of one file: rename(2) then does nothing
            after[target] = after.pop(source)
            return (lambda top: os.rename(top / source, top / target)), after
    if what == "unlink" and leaves:
        victim = rng.choice(leaves)
        del after[victim]
        return (lambda top: os.unlink(top / victim)), after
    if what in ("rmdir", "movedir") and len(dirs) > 1:
        victim = rng.choice(dirs[1:])
        inside = [path for path in tree if path.startswith(victim + "/")]
        if what == "rmdir" and not inside:
            del after[victim]
            return (lambda top: os.rmdir(top / victim)), after
        if what == "movedir" and not (fresh + "/").startswith(victim + "/"):
            first_names[os.path.basename(fresh)] = first_name(first_names, victim)
            for path in [victim, *inside]:
                after[fresh + path[len(victim) :]] = after.pop(path)
            return (lambda top: os.rename(top / victim, top / fresh)), after
    return None


def save(path, content):
    with open(path, "xb") as file:
        file.write(content)


def change_names(seed, path, out, _cut):
    """The process that changes names until the mount dies."""
    rng = random.Random(seed)
    with open(out, "rb") as saved:
        model = pickle.load(saved)
    counter = rng.getrandbits(60)
    try:
        while True:
            counter += 1
            if rng.random() < 0.35 or len(model.tree) < 5:
                # A new file: complete once it is closed. Before that it may be there without its content.
                name, content = f"{counter:x}", some_bytes(rng, rng.choice((0, 10, 4000, 5000, 30_000)))
                model.under_way = model.tree | {name: ...}
                save(path / name, content)
                model.under_way = model.tree | {name: content}
                model.done()
            elif (change := next_change(rng, model.tree, counter, model.first_names)) is not None:
                call, model.under_way = change
                call(path)
                model.done()
            if len(model.tree) > 60:
                # Deepest last: what nothing lies under can go.
                victim = max(model.tree, key=lambda p: (p.count("/"), rng.random()))
                model.under_way = {p: kind for p, kind in model.tree.items() if p != victim}
                (os.rmdir if model.tree[victim] is None else os.unlink)(path / victim)
                model.done()
    except OSError as error:
        with open(out, "wb") as saved:
            pickle.dump(model, saved)
        if error.errno not in CRASH_ERRNO:
            print(f"names: {error}", flush=True)
        os._exit(0 if error.errno in CRASH_ERRNO else 3)


def read_tree(top):
    found = {}
    for parent, dirs, files in os.walk(top):
        for name in dirs + files:
            path = pathlib.Path(parent) / name
            inside = str(path.relative_to(top))
            if path.is_symlink():
                found[inside] = os.readlink(path)
            elif path.is_dir():
                found[inside] = None
            else:
                found[inside] = path.read_bytes()
    return found


def verify_names(model, found):
    for tree in (model.tree, model.under_way or model.tree):
        if tree.keys() == found.keys() and all(found[p] == kind for p, kind in tree.items() if kind is not ...):
            return
    lines = []
    for path in sorted(model.tree.keys() | found.keys()):
        was, now = model.tree.get(path, "absent"), found.get(path, "absent")
        if was != now:
            short = [f"{len(x)} bytes" if isinstance(x, bytes) else repr(x)[:40] for x in (was, now)]
            lines.append(f"{path[:60]}: {short[0]} before the crash, {short[1]} after it")
    raise Failure("names: " + "; ".join(lines[:8]))


ABSENT = "absent"


def first_name(first_names, path):
    """Tells a directory from all others, wherever it was moved."""
    name = os.path.basename(path)
    return first_names.get(name, name)


def entries(model, tree):
    """(directory, name) -> what it leads to."""
    of = {}
    for path, kind in tree.items():
        parent, name = os.path.split(path)
        of[first_name(model.first_names, parent), name] = first_name(model.first_names, path) if kind is None else kind
    return of


def verify_unsynced_names(model, found):
    """Each entry by itself: an anchor acknowledges them one by one, so that a removal may be taken back and a later rename not. A new file
    may be there before its content is."""
    past = [entries(model, tree) for tree in model.past + [model.under_way or model.tree]]
    now = entries(model, found)
    for entry in {entry for moment in past for entry in moment} | now.keys():
        possible = [moment.get(entry, ABSENT) for moment in past]
        is_new_file = isinstance(now.get(entry), bytes) and ABSENT in possible and any(isinstance(kind, (bytes, type(...))) for kind in possible)
        if now.get(entry, ABSENT) not in possible and not is_new_file:
            raise Failure(f"names: {entry[1][:60]} is {str(now.get(entry, ABSENT))[:40]}, as it was at none of {len(past)} moments")
    dirs = [first_name(model.first_names, path) for path, kind in found.items() if kind is None]
    if len(dirs) != len(set(dirs)):
        raise Failure("names: a directory is in two places")
    # What nobody removed is somewhere.
    kept = [{kind for kind in moment.values() if isinstance(kind, bytes) and kind} for moment in past]
    if lost := set.intersection(*kept) - set(now.values()):
        raise Failure(f"names: {len(lost)} files are gone that nobody removed")


class Load:
    """The processes of a cycle, and their models between cycles."""

    def __init__(self, lab, files, names):
        self.saved = {}
        for n in range(files):
            self.saved[f"blocks{n}"] = lab.path / f"model-blocks{n}"
            self.save(f"blocks{n}", Blocks(pathlib.Path(f"blocks{n}")))
        for n in range(names):
            self.saved[f"names{n}"] = lab.path / f"model-names{n}"
            self.save(f"names{n}", Names())

    def save(self, name, model):
        with open(self.saved[name], "wb") as out:
            pickle.dump(model, out)

    def load(self, name):
        with open(self.saved[name], "rb") as saved:
            return pickle.load(saved)

    def start(self, mnt, rng, cut):
        processes = []
        for name, out in self.saved.items():
            if name.startswith("names"):
                (mnt / name).mkdir(exist_ok=True)
            target = write_blocks if name.startswith("blocks") else change_names
            arguments = (rng.getrandbits(32), mnt / name, out, cut)
            processes.append(multiprocessing.Process(target=target, args=arguments))
            processes[-1].start()
        return processes

    def verify(self, mnt, power, anchored):
        for name in self.saved:
            model = self.load(name)
            if isinstance(model, Names):
                found = read_tree(mnt / name) if (mnt / name).exists() else {}
                if not power:
                    (verify_unsynced_names if anchored else verify_names)(model, found)
                model.settle(found)
            elif (mnt / name).exists():
                found = (mnt / name).read_bytes()
                model.verify(found)
                model.settle(found)
            elif model.synced:
                raise Failure(f"{name}: fsynced, but not there after the crash")
            self.save(name, model)


def state_of(task):
    try:
        return task.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "T"  # it has just ended


def stop(daemon):
    """Stops a process; those of its threads that are in a call of the system stay in it."""
    daemon.send_signal(signal.SIGSTOP)
    states = {"S"}
    while not states <= {"T", "D"}:
        states = {state_of(task) for task in pathlib.Path(f"/proc/{daemon.pid}/task").glob("*/stat")}


def cycle(lab, vault, load, cache, rng, power, anchored):
    """Mount, load, crash, check, mount, verify."""
    vault.mount("-c", cache)
    cut = multiprocessing.Event()
    processes = load.start(vault.mnt, rng, cut)
    time.sleep(rng.choice((0.02, 0.1, 0.3, 0.6)) * (0.5 + rng.random()))
    if power:
        cut.set()
        if rng.random() < 0.5:
            # The power of the host goes at the same instant. Otherwise the store alone goes, under a daemon that lives on: XFS, being shut down,
            # may answer barriers well, and the anchor must not be told of what they have lost.
            stop(vault.daemon)
        lab.power_cut()
        time.sleep(rng.choice((0, 0.02)))
    vault.daemon.kill()
    try:
        for process in processes:
            process.join(60)
            if process.exitcode != 0:
                raise Failure(f"a load process ended with {process.exitcode}")
    finally:
        for process in processes:
            process.kill()
    vault.bury()
    if power:
        lab.detach()
        lab.attach()
    # Sometimes `check` comes first, sometimes the repair, sometimes just the next mount.
    turn = rng.randrange(3)
    if turn == 0:
        vault.check(expect=CRASHED)
    elif turn == 1:
        vault.check("--repair", expect=(*CRASHED, REPAIRED))
        report = vault.check()
        if report["recovered"]:
            raise Failure(f"check after a repair still recovers {report['recovered']} blocks")
    vault.mount("-c", cache)
    load.verify(vault.mnt, power, anchored)
    vault.umount()
    # What nobody used since the crash, and no repair has completed, is still as it was left.
    vault.check(expect=CRASHED)


# Blocks of 4 KiB alone: no common store writes larger ones atomically, and recovery promises nothing else (docs/format.md, section 12).
SETUPS = (
    ("writeback", ()),
    ("through", ("-R", "1", "-s", "paper")),
    ("none", ("-s", "blake3")),
    ("writeback", ("-s", "chacha", "--small-files", "random")),
)
UNANCHORED = ("--anchor", "none")


def run(seed, seconds, power=False):
    """Cycles until the time is over; `power` cuts the store's power instead of killing the daemon alone (needs XFS)."""
    rng = random.Random(seed)
    until = time.monotonic() + seconds
    cycles = 0
    while cycles == 0 or time.monotonic() < until:
        # Four of five times with an anchor, as vaults are made.
        for cache, options in (*SETUPS, ("writeback", UNANCHORED)):
            with Lab("xfs" if power else "dir") as lab:
                vault = lab.vault("v", *options)
                load = Load(lab, files=2, names=1)
                part = time.monotonic() + seconds / 8
                done = 0
                while done < 3 or time.monotonic() < min(part, until):
                    try:
                        cycle(lab, vault, load, cache, rng, power, options != UNANCHORED)
                    except Failure as failure:
                        name = "power cut" if power else "kill"
                        where = f"{name} {done} of cache={cache} {' '.join(options)} seed={seed}"
                        raise Failure(f"{where}: {failure}\n{vault.log_tail()}") from None
                    done += 1
                    cycles += 1
            if time.monotonic() > until and cycles > 3:
                break
    return f"{cycles} crashes"
