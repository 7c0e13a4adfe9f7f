"""Another user of the host, who can write to a directory of the backing, exchanges entries there while a mount with `allow_other` makes and
changes entries at their request. The mount is root's, where the attacker owns a directory, or an ordinary user's, where the attacker may
write to a directory of that user's.

Nothing of the victim's may become the attacker's or change: no owner, mode, time, attribute or content of the victim's entries, and no
set-user-id file of the victim's may come to be. Beside root's mount the attacker first removes entries whose inode numbers the store gives to
the next files: none of those may be taken for what was removed.
"""

import contextlib
import os
import pathlib
import signal
import socket
import stat
import time

from lab import RENAME_EXCHANGE, Failure, Lab, call, program, renameat2

ATTACKER = 65534
ROOT, USER = 0, 1000
FUSE_CONF = pathlib.Path("/etc/fuse.conf")
STORES = ("ext4", "xfs", "btrfs")
# What the victim has in the attacker's directory, by the kind of entry that it stands in for.
VICTIMS = {"file": "its-file", "dir": "its-dir", "fifo": "its-fifo", "link": "its-link"}
SECRET = b"what the victim alone may read\n"
BAIT = b"what the attacker wrote\n" * 100
BAITS = 60


def exchange(a, b):
    """renameat2(2) of two names in the working directory; whether it was done."""
    return renameat2(a, b, RENAME_EXCHANGE)


def become(uid):
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.umask(0)


def as_attacker(work):
    """Runs `work` in a child that is the attacker's, until it is killed."""
    pid = os.fork()
    if pid:
        return pid
    try:
        become(ATTACKER)
        while True:
            with contextlib.suppress(OSError):
                work()
    finally:
        os._exit(1)


def once_as(uid, work):
    """Runs `work` in a child of this user's, to its end."""
    pid = os.fork()
    if pid == 0:
        try:
            become(uid)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(pid, 0)[1] != 0:
        raise Failure(f"user {uid} could not prepare the race")


@contextlib.contextmanager
def users_may_let_others_in():
    """fusermount3 asks /etc/fuse.conf whether an ordinary user may mount with allow_other."""
    before = FUSE_CONF.read_text() if FUSE_CONF.exists() else None
    FUSE_CONF.write_text((before or "") + "\nuser_allow_other\n")
    try:
        yield
    finally:
        if before is None:
            FUSE_CONF.unlink()
        else:
            FUSE_CONF.write_text(before)


def through_mount():
    """The name of the entry under way, where entries are made through the mount."""
    return "n"


def behind_mount():
    """The same where they are made in the backing: another one every 20 ms, since the kernel remembers the names that it has looked up."""
    return f"n{int(time.monotonic() * 50)}"


def swap(backing, name):
    """Exchanges the entry under way with each of the victim's, and back."""
    os.chdir(backing)
    while True:
        entry = name()
        for victim in VICTIMS.values():
            if exchange(entry, victim):
                exchange(entry, victim)


def ask(mine, makers, name):
    """Has the mount change and remove entries, and make them, unless that is done in the backing: an ordinary user's daemon gives no entry away."""
    os.chdir(mine)
    while True:
        n = name()
        made = os.path.join(makers, n)
        changes = (
            lambda: os.chmod(n, 0o6777),
            lambda: os.chown(n, ATTACKER, ATTACKER),
            lambda: os.utime(n, (1, 1)),
            lambda: os.setxattr(n, "user.note", b"theirs"),
            lambda: os.link(n, "l"),
            lambda: os.truncate(n, 0),
        )
        makes = (
            lambda: os.close(os.open(made, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o6777)),
            lambda: os.mkdir(made, 0o6777),
            lambda: os.mkfifo(made, 0o6777),
            lambda: os.symlink("target", made),
        )
        for make in makes:
            with contextlib.suppress(OSError):
                make()
            for change in changes:
                with contextlib.suppress(OSError):
                    change()
            for away in (lambda: os.unlink("l"), lambda: os.unlink(made), lambda: os.rmdir(made)):
                with contextlib.suppress(OSError):
                    away()


def state(fd):
    """What must not change of an entry of the victim's."""
    st = os.fstat(fd)
    attributes = ()
    if stat.S_ISREG(st.st_mode) or stat.S_ISDIR(st.st_mode):
        path = f"/proc/self/fd/{fd}"
        attributes = tuple((name, os.getxattr(path, name)) for name in sorted(os.listxattr(path)))
    size = st.st_size if stat.S_ISREG(st.st_mode) else 0
    return (st.st_uid, st.st_gid, st.st_mode, st.st_mtime_ns if not stat.S_ISDIR(st.st_mode) else 0, size, attributes)


def look(victim, backing, held, before):
    """Fails if anything of the victim's was given away or changed."""
    for kind, fd in held.items():
        if state(fd) != before[kind]:
            raise Failure(f"user {victim}'s {kind} was {before[kind]}, and is {state(fd)}")
    for entry in os.scandir(backing):
        with contextlib.suppress(FileNotFoundError):
            st = entry.stat(follow_symlinks=False)
            if st.st_uid == victim and stat.S_ISREG(st.st_mode) and st.st_mode & (stat.S_ISUID | stat.S_ISGID):
                raise Failure(f"{entry.name} is user {victim}'s, and set-user-id: {oct(st.st_mode)}")


def prepare(victim, mine):
    """The directory that the attacker may write to, and what the victim has in it."""
    mine.mkdir()
    if victim == ROOT:
        os.chown(mine, ATTACKER, ATTACKER)
    else:
        mine.chmod(0o777)
    (mine / VICTIMS["file"]).write_bytes(SECRET)
    (mine / VICTIMS["file"]).chmod(0o600)
    (mine / VICTIMS["dir"]).mkdir(0o700)
    os.mkfifo(mine / VICTIMS["fifo"], 0o600)
    (mine / VICTIMS["dir"] / "inner").write_bytes(SECRET)
    os.symlink("/etc/shadow", mine / VICTIMS["link"])


def thief(mine, backing):
    """What the attacker does at each word of root's. Each step returns what it could read."""
    held = []

    def read(paths):
        found = b""
        for path in paths:
            with contextlib.suppress(OSError), open(path, "rb") as file:
                found += file.read()
        return found

    def plant():
        for i in range(BAITS):
            (mine / f"bait{i}").write_bytes(BAIT)
            held.append(os.open(mine / f"bait{i}", os.O_PATH))
        return read(mine / f"bait{i}" for i in range(BAITS))

    def remove():
        for name in os.listdir(backing):
            os.unlink(backing / name)
        for i in range(5):
            (mine / f"new{i}").touch()
        return read(mine / f"new{i}" for i in range(5))

    return {"plant": plant, "remove": remove, "look": lambda: read(f"/proc/self/fd/{fd}" for fd in held)}


def reuse(vault):
    """Fails if the attacker reads what root wrote, or root what the attacker wrote."""
    mine, ours = vault.mnt / "theirs", vault.mnt / "ours"
    mine.mkdir()
    os.chown(mine, ATTACKER, ATTACKER)
    ours.mkdir(0o700)
    (mine / "secret").write_bytes(SECRET)
    (mine / "secret").chmod(0o600)
    root, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    steps = thief(mine, vault.dir / "theirs")
    child = as_attacker(lambda: theirs.send(b"." + steps[theirs.recv(100).decode()]()[:100_000]))
    root.settimeout(60)

    def ask(step):
        root.send(step.encode())
        if SECRET in (found := root.recv(1 << 20)):
            raise Failure(f"{step}: the attacker reads what root alone may read")
        return found

    try:
        ask("plant")
        # Files that were written are held open until they are settled, and their numbers taken.
        for command in ("freeze", "thaw"):
            call(program(), command, str(vault.mnt))
        (mine / "secret").read_bytes()
        ask("remove")
        for i in range(BAITS + 10):
            (ours / f"doc{i}").write_bytes(SECRET)
        if wrong := [i for i in range(BAITS + 10) if (ours / f"doc{i}").read_bytes() != SECRET]:
            raise Failure(f"{len(wrong)} files of root's read as something that root did not write")
        if (found := ask("look")).strip(b".").replace(BAIT, b""):
            raise Failure(f"the attacker reads by descriptors of what was removed: {found[:80]}")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def race(store, seconds, victim):
    with Lab(store, megabytes=512, where="/tmp") as lab:
        lab.path.chmod(0o755)
        lab.store.chmod(0o755)
        if victim != ROOT:
            lab.belong_to(victim)
        vault = lab.vault("v", "--names", "plain")
        os.chown(vault.mnt, victim, victim)
        vault.mount("-o", "allow_other")
        # A mount refuses a directory that others can search; its owner can still open it later.
        vault.dir.chmod(0o755)
        if victim == ROOT:
            reuse(vault)
        mine = vault.mnt / "mine"
        once_as(victim, lambda: prepare(victim, mine))
        os.sync()
        time.sleep(1)
        backing = vault.dir / "mine"
        # Who may write to a directory may remove what the victim has in it: then it is put there again.
        spare = lab.store / "spare"
        spare.mkdir(0o700)
        for kind in ("file", "fifo", "link"):
            os.link(backing / VICTIMS[kind], spare / VICTIMS[kind], follow_symlinks=False)
        held = {kind: os.open(backing / name, os.O_PATH | os.O_NOFOLLOW) for kind, name in VICTIMS.items()}
        before = {kind: state(fd) for kind, fd in held.items()}
        makers, name = (mine, through_mount) if victim == ROOT else (backing, behind_mount)
        children = [as_attacker(lambda: swap(backing, name))]
        children += [as_attacker(lambda: ask(mine, makers, name)) for _ in range(2)]
        looks = 0
        try:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                look(victim, backing, held, before)
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
    """On each kind of store, as root and as an ordinary user, for an equal share of the time."""
    share = seconds / (2 * len(STORES))
    looks = [race(store, share, ROOT) for store in STORES]
    with users_may_let_others_in():
        looks += [race(store, share, USER) for store in STORES]
    return f"nothing of the victim's was won in {sum(looks)} looks"
