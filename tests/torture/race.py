"""Another user of the host, who can write to the backing of a directory of their own, exchanges entries there while the mount, root's with `allow_other`,
makes and changes entries at their request.

Nothing of root's may become theirs or change: no owner, mode, time, attribute or content of root's entries, and no set-user-id file of root's may come to be.
"""

import contextlib
import ctypes
import os
import signal
import stat
import time

from lab import Failure, Lab

ATTACKER = 65534
RENAME_EXCHANGE = 2
STORES = ("ext4", "xfs", "btrfs")
LIBC = ctypes.CDLL(None, use_errno=True)
# What root has in the attacker's directory, by the kind of entry that it stands in for.
VICTIMS = {"file": "root-file", "dir": "root-dir", "fifo": "root-fifo", "link": "root-link"}
SECRET = b"what root alone may read\n"


def exchange(a, b):
    """renameat2(2) of two names in the working directory; whether it was done."""
    return LIBC.renameat2(-100, a.encode(), -100, b.encode(), RENAME_EXCHANGE) == 0


def as_attacker(work):
    """Runs `work` in a child that is the attacker's, until it is killed."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setgroups([])
        os.setresgid(ATTACKER, ATTACKER, ATTACKER)
        os.setresuid(ATTACKER, ATTACKER, ATTACKER)
        os.umask(0)
        while True:
            with contextlib.suppress(OSError):
                work()
    finally:
        os._exit(1)


def swap(backing):
    """Exchanges the entry under way with each of root's, and back."""
    os.chdir(backing)
    while True:
        for victim in VICTIMS.values():
            if exchange("n", victim):
                exchange("n", victim)


def ask(mine):
    """Has the mount make, change and remove entries."""
    os.chdir(mine)
    changes = (
        lambda: os.chmod("n", 0o6777),
        lambda: os.chown("n", ATTACKER, ATTACKER),
        lambda: os.utime("n", (1, 1)),
        lambda: os.setxattr("n", "user.note", b"theirs"),
        lambda: os.link("n", "l"),
        lambda: os.truncate("n", 0),
    )
    makes = (
        lambda: os.close(os.open("n", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o6777)),
        lambda: os.mkdir("n", 0o6777),
        lambda: os.mkfifo("n", 0o6777),
        lambda: os.symlink("target", "n"),
    )
    while True:
        for make in makes:
            with contextlib.suppress(OSError):
                make()
            for change in changes:
                with contextlib.suppress(OSError):
                    change()
            for away in (lambda: os.unlink("l"), lambda: os.unlink("n"), lambda: os.rmdir("n")):
                with contextlib.suppress(OSError):
                    away()


def state(fd):
    """What must not change of an entry of root's."""
    st = os.fstat(fd)
    attributes = ()
    if stat.S_ISREG(st.st_mode) or stat.S_ISDIR(st.st_mode):
        path = f"/proc/self/fd/{fd}"
        attributes = tuple((name, os.getxattr(path, name)) for name in sorted(os.listxattr(path)))
    size = st.st_size if stat.S_ISREG(st.st_mode) else 0
    return (st.st_uid, st.st_gid, st.st_mode, st.st_mtime_ns if not stat.S_ISDIR(st.st_mode) else 0, size, attributes)


def look(backing, held, before):
    """Fails if anything of root's was given away or changed."""
    for kind, fd in held.items():
        if state(fd) != before[kind]:
            raise Failure(f"root's {kind} was {before[kind]}, and is {state(fd)}")
    for entry in os.scandir(backing):
        with contextlib.suppress(FileNotFoundError):
            st = entry.stat(follow_symlinks=False)
            if st.st_uid == 0 and stat.S_ISREG(st.st_mode) and st.st_mode & (stat.S_ISUID | stat.S_ISGID):
                raise Failure(f"{entry.name} is root's, and set-user-id: {oct(st.st_mode)}")


def race(store, seconds):
    with Lab(store, megabytes=512, where="/tmp") as lab:
        lab.path.chmod(0o755)
        lab.store.chmod(0o755)
        vault = lab.vault("v", "--names", "plain")
        vault.mount("-o", "allow_other")
        # Reached from the first look on by who kept a descriptor, or found it open.
        vault.dir.chmod(0o755)
        mine = vault.mnt / "mine"
        mine.mkdir()
        os.chown(mine, ATTACKER, ATTACKER)
        (mine / VICTIMS["file"]).write_bytes(SECRET)
        (mine / VICTIMS["file"]).chmod(0o600)
        (mine / VICTIMS["dir"]).mkdir(0o700)
        os.mkfifo(mine / VICTIMS["fifo"], 0o600)
        (mine / VICTIMS["dir"] / "inner").write_bytes(SECRET)
        os.symlink("/etc/shadow", mine / VICTIMS["link"])
        os.sync()
        time.sleep(1)
        backing = vault.dir / "mine"
        # Who owns a directory may remove what root has in it: then it is put there again.
        spare = lab.store / "spare"
        spare.mkdir(0o700)
        for kind in ("file", "fifo", "link"):
            os.link(backing / VICTIMS[kind], spare / VICTIMS[kind], follow_symlinks=False)
        held = {kind: os.open(backing / name, os.O_PATH | os.O_NOFOLLOW) for kind, name in VICTIMS.items()}
        before = {kind: state(fd) for kind, fd in held.items()}
        children = [as_attacker(lambda: swap(backing)), as_attacker(lambda: ask(mine)), as_attacker(lambda: ask(mine))]
        looks = 0
        try:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                look(backing, held, before)
                looks += 1
                for name in os.listdir(spare):
                    with contextlib.suppress(FileExistsError):
                        os.link(spare / name, backing / name, follow_symlinks=False)
                if vault.daemon.poll() is not None:
                    raise Failure(f"the daemon ended with {vault.daemon.returncode}\n{vault.log_tail()}")
        finally:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            for fd in held.values():
                os.close(fd)
        if "panic" in vault.log_tail():
            raise Failure(f"the daemon panicked\n{vault.log_tail()}")
        vault.bury()
        return looks


def run(_seed, seconds):
    """On each kind of store for an equal share of the time."""
    looks = [race(store, seconds / len(STORES)) for store in STORES]
    return f"nothing of root's was won in {sum(looks)} looks"
