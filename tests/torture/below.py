"""A store that fails, fills up, turns read-only, goes away or is tampered with while a vault in it is mounted and in use.

The rules are the same everywhere: the application meets the store's own errno, nothing waits for ever, what was synced before stays, and
where the store comes back (space is freed, a limit raised, the store mounted again) life goes on.
"""

import contextlib
import errno
import os
import pathlib
import random
import shutil
import threading
import time

from lab import Failure, Lab, call, is_mounted, program

PIECE = 1 << 20
NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


@contextlib.contextmanager
def failing(*codes, what):
    """The body must fail with one of these codes."""
    try:
        yield
    except OSError as error:
        if error.errno not in codes:
            raise Failure(f"{what}: {error}, not {' or '.join(errno.errorcode[c] for c in codes)}") from error
    else:
        raise Failure(f"{what}: no error")


def write_synced(path, data):
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def expect(path, data):
    got = path.read_bytes()
    if got != data:
        raise Failure(f"{path.name}: {len(got)} bytes that are not the {len(data)} that were written")


def end(vault):
    """Unmounts where the end may be a bad one: it must come, and the daemon must go. Returns its exit code."""
    if call(program(), "umount", str(vault.mnt), expect=tuple(range(128))).returncode != 0:
        call(program(), "umount", "--lazy", str(vault.mnt))  # what the store does not take is given up
    code = vault.daemon.wait(60)
    vault.daemon = None
    if is_mounted(vault.mnt):
        raise Failure("the mount is still there after umount")
    return code


# --- no room


def fill_up(path, rng, code):
    """Appends synced pieces until the store refuses; returns what is synced, and what was refused."""
    taken = []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        while True:
            piece = rng.randbytes(PIECE)
            try:
                os.write(fd, piece)
                os.fsync(fd)
            except OSError as error:
                if error.errno != code:
                    raise Failure(f"filling up: {error}, not {errno.errorcode[code]}") from error
                return taken, piece
            taken.append(piece)
    finally:
        with contextlib.suppress(OSError):  # close(2) may tell it again
            os.close(fd)


def room_ends(vault, rng, code, more_room):
    """Fills the store; what was synced stays; another file can be emptied; with more room everything works again, in place."""
    mnt = vault.mnt
    keep = rng.randbytes(5 * PIECE)
    write_synced(mnt / "keep", keep)
    write_synced(mnt / "gone", rng.randbytes(2 * PIECE))
    taken, refused = fill_up(mnt / "fill", rng, code)
    if not taken:
        raise Failure("the store was full from the start")
    found = (mnt / "fill").read_bytes()
    if found[: len(taken) * PIECE] != b"".join(taken):
        raise Failure("what was synced before the store was full is not there")
    expect(mnt / "keep", keep)
    with failing(code, what="a large file in a full store"):
        write_synced(mnt / "other", rng.randbytes(16 * PIECE))
    (mnt / "other").unlink(missing_ok=True)
    more_room()
    # A second try of the same piece: where the first one failed, without a hole or a copy.
    with open(mnt / "fill", "r+b") as file:
        file.seek(len(taken) * PIECE)
        file.write(refused)
        file.truncate()
        os.fsync(file.fileno())
    expect(mnt / "fill", b"".join(taken) + refused)
    vault.umount()
    vault.check()


def accepted_stays(vault, rng, code, more_room):
    """Writes that the daemon has accepted outlast a failed fsync: with room again the next one writes them (cache=through: each write(2) is the daemon's)."""
    fd = os.open(vault.mnt / "fill", os.O_RDWR | os.O_CREAT, 0o600)
    accepted = []
    try:
        with failing(code, what="writing without end"):
            while True:
                piece = rng.randbytes(PIECE)
                done = os.write(fd, piece)
                accepted.append(piece[:done])
        with failing(code, what="fsync in a full store"):
            os.fsync(fd)
        more_room()
        os.fsync(fd)
    finally:
        os.close(fd)
    vault.umount()
    vault.check()
    vault.mount()
    expect(vault.mnt / "fill", b"".join(accepted))
    vault.umount()


def quota(rng, cache):
    """EDQUOT, of a btrfs subvolume; the limit is raised in the end."""
    with Lab("btrfs", megabytes=512) as lab:
        call("btrfs", "subvolume", "create", str(lab.store / "sub"))
        call("btrfs", "quota", "enable", str(lab.store))

        group = "0/" + call("btrfs", "inspect-internal", "rootid", str(lab.store / "sub")).stdout.strip()

        def limit(megabytes):
            # Asked of the root: the subvolume itself may have no room left for the transaction that gives it room.
            call("btrfs", "qgroup", "limit", f"{megabytes}M", group, str(lab.store))

        limit(24)
        vault = lab.vault("sub/v")
        vault.mount("-c", cache)
        room_ends(vault, rng, errno.EDQUOT, lambda: limit(200))
        if cache == "through":
            limit(60)
            vault.mount("-c", cache)
            accepted_stays(vault, rng, errno.EDQUOT, lambda: limit(300))


def space(rng, cache):
    """ENOSPC; another file of the store goes in the end."""
    with Lab("xfs", megabytes=320) as lab:
        ballast = lab.store / "ballast"
        vault = lab.vault("v")
        # What an XFS of this size offers, less 40 MB.
        free = shutil.disk_usage(lab.store).free
        call("fallocate", "-l", str(free - (40 << 20)), str(ballast))
        vault.mount("-c", cache)
        room_ends(vault, rng, errno.ENOSPC, ballast.unlink)
        if cache == "through":
            call("fallocate", "-l", str(shutil.disk_usage(lab.store).free - (40 << 20)), str(ballast))
            vault.mount("-c", cache)
            accepted_stays(vault, rng, errno.ENOSPC, ballast.unlink)


def names_without_room(rng):
    """No room for names either: what fails leaves nothing behind, and what is there stays."""
    with Lab("ext4", megabytes=32) as lab:
        vault = lab.vault("v")
        vault.mount()
        top = vault.mnt / "top"
        top.mkdir()
        made, failed = [], 0
        for n in range(20_000):
            name = top / f"{n:05}-{'n' * 180}"
            kind = n % 4
            try:
                if kind == 0:
                    name.mkdir()
                elif kind == 1:
                    name.symlink_to("t/" * 200)
                elif kind == 2:
                    write_synced(name, b"x" * 9000)
                else:
                    os.mkfifo(name)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise Failure(f"a new name in a full store: {error}") from error
                failed += 1
                if failed > 40:
                    break
                if kind == 2:
                    name.unlink(missing_ok=True)  # created, but without room for content
                continue
            made.append(name.name)
        else:
            raise Failure("the store never filled up")
        listed = sorted(os.listdir(top))
        if listed != sorted(made):
            raise Failure(f"{len(made)} names were made, {len(listed)} are there")
        for name in made[: len(made) // 2]:
            (shutil.rmtree if (top / name).is_dir() else os.unlink)(top / name)
        write_synced(top / "again", b"y" * 50_000)
        vault.umount()
        vault.check()


# --- a store that fails


def shut_down(rng, cache):
    """XFS shuts itself down under a living daemon: EIO, an end without waiting, and everything synced in the next mount."""
    with Lab("xfs", megabytes=320) as lab:
        vault = lab.vault("v")
        vault.mount("-c", cache)
        keep = rng.randbytes(3 * PIECE + 77)
        write_synced(vault.mnt / "keep", keep)
        os.sync()
        fd = os.open(vault.mnt / "late", os.O_RDWR | os.O_CREAT)
        os.write(fd, rng.randbytes(PIECE))
        lab.power_cut()
        with failing(errno.EIO, what="fsync over a dead store"):
            os.write(fd, rng.randbytes(PIECE))
            os.fsync(fd)
        with failing(errno.EIO, what="a new file in a dead store"):
            write_synced(vault.mnt / "new", b"x")
        with failing(errno.EIO, what="mkdir in a dead store"):
            os.mkdir(vault.mnt / "dir")
        with failing(errno.EIO, what="fsync over a dead store, again"):
            os.fsync(fd)
        with contextlib.suppress(OSError):
            os.close(fd)
        if end(vault) == 0:
            raise Failure("a vault that could not be closed well ended with 0")
        lab.detach()
        lab.attach()
        vault.mount()
        expect(vault.mnt / "keep", keep)
        vault.umount()
        vault.check()


def turns_read_only(rng, cache):
    """ext4 meets an error and turns read-only under a living daemon: EROFS for changes, reads go on."""
    with Lab("ext4", megabytes=256) as lab:
        vault = lab.vault("v")
        vault.mount("-c", cache)
        keep = rng.randbytes(3 * PIECE + 77)
        write_synced(vault.mnt / "keep", keep)
        os.sync()
        device = os.stat(lab.store).st_dev
        name = pathlib.Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
        pathlib.Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("torture\n", encoding="ascii")
        with failing(errno.EROFS, what="a change in a read-only store"):
            with open(vault.mnt / "keep", "r+b", buffering=0) as file:
                file.write(rng.randbytes(PIECE))
                os.fsync(file.fileno())
        with failing(errno.EROFS, what="mkdir in a read-only store"):
            os.mkdir(vault.mnt / "dir")
        with failing(errno.EROFS, what="rename in a read-only store"):
            os.rename(vault.mnt / "keep", vault.mnt / "kept")
        end(vault)
        call(program(), "mount", "-q", "--read-only", "-k", lab.source, str(vault.dir), str(vault.mnt))
        expect(vault.mnt / "keep", keep)
        call(program(), "umount", str(vault.mnt))
        lab.detach()
        call("e2fsck", "-fp", str(lab.image), expect=(0, 1))
        lab.attach()
        vault.check()


# --- a store that is moved, or taken away


def moved(rng):
    """The vault's directory is renamed, and then its file system detached: the mount goes on, since it never asks for the path again."""
    with Lab("xfs", megabytes=320) as lab:
        vault = lab.vault("v")
        vault.mount()
        data = rng.randbytes(2 * PIECE)
        write_synced(vault.mnt / "before", data)
        vault.dir.rename(lab.store / "elsewhere")
        vault.dir = lab.store / "elsewhere"
        write_synced(vault.mnt / "renamed", data)
        expect(vault.mnt / "before", data)
        call("umount", "-l", str(lab.store))
        write_synced(vault.mnt / "detached", data)
        (vault.mnt / "before").rename(vault.mnt / "after")
        vault.umount()
        lab.attach()
        vault.check()
        vault.mount()
        for name in ("after", "renamed", "detached"):
            expect(vault.mnt / name, data)
        vault.umount()


def removed(rng):
    """Everything of the vault is removed under it: errors, and an end."""
    gone = (errno.ENOENT, errno.ESTALE, errno.EIO)
    with Lab() as lab:
        vault = lab.vault("v")
        vault.mount()
        for n in range(20):
            (vault.mnt / f"d{n}").mkdir()
            write_synced(vault.mnt / f"d{n}" / "f", rng.randbytes(20_000))
        fd = os.open(vault.mnt / "d0" / "f", os.O_RDWR)
        shutil.rmtree(vault.dir)
        os.pwrite(fd, b"into a file without a name", 5)
        os.fsync(fd)
        os.close(fd)
        for n in range(1, 20):
            with failing(*gone, what="a file that was removed below"):
                write_synced(vault.mnt / f"d{n}" / "f", b"x")
            with failing(*gone, what="a new file in a directory that was removed below"):
                write_synced(vault.mnt / f"d{n}" / "new", b"x")
        with failing(*gone, what="mkdir in a vault that was removed"):
            os.mkdir(vault.mnt / "new")
        end(vault)


# --- a store with someone else in it


class Intruder(threading.Thread):
    """Exchanges entries of the store for links to what lies outside of it, removes and truncates others, without end."""

    def __init__(self, lab, vault, rng):
        super().__init__(daemon=True)
        self.top, self.rng = vault.dir, rng
        self.outside = lab.path / "outside"
        self.outside.mkdir()
        self.stopped = threading.Event()
        self.turns = 0

    def entries(self):
        found = []
        for parent, dirs, files in os.walk(self.top):
            found += [pathlib.Path(parent) / name for name in dirs + files if not name.startswith("lamassu.")]
        return found

    def turn(self, victim):
        what = self.rng.randrange(4)
        aside = victim.with_name(victim.name + ".aside")
        if what <= 1:
            target = self.outside if victim.is_dir() else self.outside / "canary"
            os.rename(victim, aside)
            os.symlink(target, victim)
            time.sleep(self.rng.random() / 500)
            os.unlink(victim)
            os.rename(aside, victim)
        elif what == 2 and victim.is_file() and not victim.is_symlink():
            if self.rng.random() < 0.1:
                victim.unlink()
            else:
                os.truncate(victim, self.rng.randrange(max(1, victim.stat().st_size)))
        elif victim.is_dir() and self.rng.random() < 0.05:
            shutil.rmtree(victim, ignore_errors=True)
        self.turns += 1

    def run(self):
        while not self.stopped.is_set():
            victims = self.entries()
            for victim in self.rng.sample(victims, min(len(victims), 20)):
                # The daemon makes and removes entries at the same time.
                with contextlib.suppress(OSError):
                    self.turn(victim)


# What an application may meet when the store under it is tampered with.
TAMPERED = {errno.EIO, errno.ENOENT, errno.ESTALE, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL}


def use(mnt, rng, canary):
    """One thing an application may do."""
    parent = mnt / f"d{rng.randrange(6)}"
    name = parent / f"f{rng.randrange(12)}"
    what = rng.randrange(7)
    if what == 0:
        parent.mkdir()
    elif what <= 2:
        with open(name, "wb") as file:
            file.write(rng.randbytes(rng.choice((100, 9000, 200_000))))
    elif what == 3:
        if canary in name.read_bytes():
            raise Failure("the application was given what lies outside of the vault")
    elif what == 4:
        os.rename(name, mnt / f"d{rng.randrange(6)}" / f"f{rng.randrange(12)}")
    elif what == 5:
        os.listdir(parent)
    else:
        os.chmod(name, 0o640)
        name.unlink()


def tampered(rng, seconds):
    """Links in place of entries, entries removed and cut: nothing outside is read or changed, nothing hangs, the daemon lives."""
    with Lab() as lab:
        vault = lab.vault("v")
        vault.mount()
        intruder = Intruder(lab, vault, random.Random(rng.getrandbits(32)))
        canary = rng.randbytes(9000)
        (intruder.outside / "canary").write_bytes(canary)
        before = {p.name: (p.read_bytes(), p.stat().st_mode, p.stat().st_mtime_ns) for p in intruder.outside.iterdir()}
        intruder.start()
        until = time.monotonic() + seconds
        calls = failed = 0
        while time.monotonic() < until:
            calls += 1
            try:
                use(vault.mnt, rng, canary)
            except OSError as error:
                failed += 1
                if error.errno not in TAMPERED:
                    raise Failure(f"with a tampered store: {error}\n{vault.log_tail()}") from error
        intruder.stopped.set()
        intruder.join(60)
        after = {p.name: (p.read_bytes(), p.stat().st_mode, p.stat().st_mtime_ns) for p in intruder.outside.iterdir()}
        if before != after:
            raise Failure(f"outside of the vault: {before.keys()} became {after.keys()}, or one of them changed")
        if vault.daemon.poll() is not None:
            raise Failure(f"the daemon ended with {vault.daemon.returncode}\n{vault.log_tail()}")
        if "panic" in vault.log.read_text(errors="replace"):
            raise Failure(f"the daemon panicked\n{vault.log_tail()}")
        end(vault)
        call(program(), "check", "-q", "-k", lab.source, str(vault.dir), expect=(0, 26, 30))
        return f"{calls} calls, {failed} with an error, {intruder.turns} turns of the intruder"


def faults(seed, seconds):
    """Every kind of failing store, at least once."""
    rng = random.Random(seed)
    until = time.monotonic() + seconds
    times = 0
    while times == 0 or time.monotonic() < until:
        for n, test in enumerate((space, quota, shut_down, turns_read_only)):
            cache = ("writeback", "through", "none")[(times + n) % 3]
            named(test, cache, lambda test=test, cache=cache: test(rng, cache))
        for test in (names_without_room, moved, removed):
            named(test, "writeback", lambda test=test: test(rng))
        times += 1
    return f"{times} times each of 7 failing stores"


def named(test, cache, run):
    try:
        run()
    except Failure as failure:
        raise Failure(f"{test.__name__}, cache={cache}: {failure}") from None


def intrusion(seed, seconds):
    return tampered(random.Random(seed), max(seconds, 4))
