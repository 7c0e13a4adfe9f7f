"""Everything at once in a small anchored vault, and a daemon killed every few moments: whatever the store then holds is the vault's own.

No operation is remembered: the oracle is the vault itself. The store is honest, so that after each kill everything must be readable, and nothing
may be called stale, exchanged or damaged. A failure keeps the store and the anchor as the kill left them ($TORTURE_KEEP), so that the recovery
that went wrong can be repeated.
"""

import ctypes
import errno
import os
import pathlib
import random
import shutil
import subprocess
import threading
import time
import traceback
from functools import partial

from lab import CRASHED, RENAME_EXCHANGE, RENAME_NOREPLACE, REPAIRED, Failure, Lab, renameat2, some_bytes

BLOCK = 4096
NAMES = 5
# What `init` is given: leaf kinds, ciphers with and without keys at random, block sizes.
SETUPS = (
    (),
    ("--tree-leaves", "blocks"),
    ("--tree-leaves", "blocks", "-R", "1"),
    ("-s", "blake3", "--tree-leaves", "blocks", "--compress", "lz4"),
)
MOUNTS = ((), (), ("--freshness", "interval"), ("-c", "through"))


def rename(source, target, flags):
    if not renameat2(source, target, flags):
        raise OSError(ctypes.get_errno(), "renameat2")


def some_directory(rng, top):
    parts = [f"d{rng.randrange(3)}" for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    return top.joinpath(*parts)


def some_name(rng, top):
    return some_directory(rng, top) / f"n{rng.randrange(NAMES)}"


def synced(path, flags=os.O_RDONLY):
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write(rng, top, fresh):
    path = some_name(rng, top)
    if fresh:
        path = path.with_name(f"w{rng.randrange(3)}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | rng.choice((0, 0, os.O_TRUNC, os.O_APPEND)), 0o644)
    try:
        for _ in range(rng.choice((1, 1, 2, 4))):
            what = rng.random()
            size = os.fstat(fd).st_size
            if what < 0.7:
                offset = rng.choice((0, size, rng.randrange(size + 1), rng.randrange(3 * BLOCK), rng.randrange(150 * BLOCK)))
                # Zeros among it: they are stored otherwise.
                data = rng.choice((bytes, *[partial(some_bytes, rng)] * 3))(rng.choice((1, 100, BLOCK, 3 * BLOCK, 70_000)))
                os.pwrite(fd, data, offset)
            elif what < 0.85:
                os.ftruncate(fd, rng.choice((0, rng.randrange(size + 1), size + rng.randrange(200_000))))
            else:
                os.fsync(fd)
        if rng.random() < 0.4:
            os.fsync(fd)
    finally:
        os.close(fd)
    if fresh and rng.random() < 0.8:
        os.rename(path, some_name(rng, top))


def change(rng, top):
    """One random call."""
    what = rng.random()
    one, other = some_name(rng, top), some_name(rng, top)
    if rng.random() < 0.15:
        one = one.parent
    if rng.random() < 0.15:
        other = other.parent
    if what < 0.22:
        write(rng, top, fresh=False)
    elif what < 0.34:
        write(rng, top, fresh=True)
    elif what < 0.44:
        os.rename(one, other)
    elif what < 0.56:
        rename(one, other, RENAME_EXCHANGE)
    elif what < 0.58:
        rename(one, other, RENAME_NOREPLACE)
    elif what < 0.64:
        os.link(one, other)
    elif what < 0.70:
        os.unlink(one)
    elif what < 0.77:
        os.mkdir(some_directory(rng, top) / f"d{rng.randrange(3)}")
    elif what < 0.79:
        os.rmdir(one)
    elif what < 0.83:
        os.symlink("t" * rng.choice((1, 60, 140)), other)
    elif what < 0.87:
        os.setxattr(one, f"user.x{rng.randrange(2)}", rng.randbytes(rng.choice((1, 30, 500))), follow_symlinks=False)
    elif what < 0.89:
        os.removexattr(one, f"user.x{rng.randrange(2)}", follow_symlinks=False)
    elif what < 0.92:
        os.chmod(one, rng.choice((0o600, 0o644, 0o755)))
    elif what < 0.94:
        os.utime(one, (1, rng.randrange(2**31)), follow_symlinks=False)
    elif what < 0.98:
        synced(one)
    elif what < 0.99:
        shutil.rmtree(some_directory(rng, top) / "d0", ignore_errors=True)
    else:
        os.sync()


# What a call may end with here before the kill.
HONEST = {"ENOENT", "EEXIST", "ENOTDIR", "EISDIR", "ENOTEMPTY", "EINVAL", "EBUSY", "ENODATA", "ELOOP", "EPERM", "EMLINK", "ESTALE", "EXDEV"}
KILLED = {errno.ENOTCONN, errno.ECONNABORTED}


def load(rng, top, stop, bad):
    """Changes until the mount dies."""
    while not stop.is_set():
        try:
            change(rng, top)
        except OSError as error:
            # A call that was under way when the daemon was killed ends with EIO or EBADF, too.
            if error.errno in KILLED or (error.errno in (errno.EIO, errno.EBADF) and stop.is_set()):
                return
            if errno.errorcode[error.errno] not in HONEST:
                when = "after" if stop.is_set() else "before"
                bad.append(f"{error}, {when} it: {traceback.format_exc()[-400:]}")
                return


def read_all(top):
    """Every name, content, link target and attribute there is."""
    for parent, dirs, files in os.walk(top, onerror=raise_it):
        for name in dirs + files:
            path = pathlib.Path(parent, name)
            for attribute in os.listxattr(path, follow_symlinks=False):
                os.getxattr(path, attribute, follow_symlinks=False)
            if path.is_symlink():
                os.readlink(path)
            elif path.is_file():
                path.read_bytes()


def raise_it(error):
    raise error


def snapshot(lab, to):
    """What the kill left: the store and the anchor."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    subprocess.run(["cp", "-a", "--sparse=always", str(lab.store), str(lab.path / "state"), str(lab.key), str(to)], check=True)


def cycle(lab, vault, rng, options, left):
    """Load, kill, perhaps a check, mount, read everything."""
    stop, bad = threading.Event(), []
    threads = [threading.Thread(target=load, args=(random.Random(rng.random()), vault.mnt, stop, bad)) for _ in range(rng.choice((1, 2, 3)))]
    for thread in threads:
        thread.start()
    time.sleep(rng.choice((0.01, 0.05, 0.2)) * (0.5 + rng.random()))
    if rng.random() < 0.02:
        time.sleep(6)  # past the anchor's interval
    stop.set()
    vault.daemon.kill()
    for thread in threads:
        thread.join(60)
    vault.bury()
    snapshot(lab, left)
    if bad:
        raise Failure(f"a call ended beside the kill with {bad[0]}\n{vault.log_tail()}")
    before = vault.log.stat().st_size if vault.log.exists() else 0
    turn = rng.random()
    if turn < 0.15:
        vault.check(expect=CRASHED)
    elif turn < 0.25:
        vault.check("--repair", expect=(*CRASHED, REPAIRED))
    vault.mount(*options)
    try:
        read_all(vault.mnt)
    except OSError as error:
        raise Failure(f"read after a kill: {error}\n{vault.log_tail()}") from error
    with open(vault.log, "rb") as log:
        log.seek(before)
        said = log.read().decode(errors="replace")
    if any(word in said for word in ("stale", "ERROR", "panicked")):
        raise Failure(f"after a kill the daemon says:\n{said[-3000:]}")


def run(seed, seconds):
    until, begun, kills = time.monotonic() + seconds, 0, 0
    while begun == 0 or time.monotonic() < until:
        rng = random.Random(seed * 1_000_003 + begun)
        begun += 1
        made, options = rng.choice(SETUPS), rng.choice(MOUNTS)
        with Lab() as lab:
            left = lab.path / "left"
            vault = lab.vault("v", *made)
            try:
                vault.mount(*options)
                for _ in range(40):
                    cycle(lab, vault, rng, options, left)
                    kills += 1
                    if time.monotonic() > until:
                        break
                vault.umount()
                vault.check(expect=CRASHED)
            except Failure as failure:
                raise Failure(f"init {' '.join(made)}; mount {' '.join(options)}; seed={seed}, vault {begun}, kill {kills}: {failure}") from None
    return f"{begun} vaults, {kills} kills"
