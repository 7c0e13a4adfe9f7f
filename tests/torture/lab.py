"""Stores, vaults and mounts for the torture tests.

Guarantees that whatever was mounted or started here is gone when a `Lab` is left, also after an error or an interruption. Never touches
what it did not make, and never waits without a limit.
"""

import ctypes
import errno
import fcntl
import json
import os
import pathlib
import secrets
import shutil
import struct
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Longest time one command of `lamassu` may take, in seconds; longer means that it hangs. $TORTURE_PATIENCE is for machines that are busy otherwise.
COMMAND_SECONDS_MAX = float(os.environ.get("TORTURE_PATIENCE", "120"))

CLEAN, DAMAGED, REPAIRED, UNDONE = 0, 26, 27, 29  # exit codes of `lamassu check`, docs/cli.md
# After a crash what had not arrived is told; that it was never synced is for whoever knows what was.
CRASHED = (CLEAN, UNDONE)

# How a store in a loop device is made, and the options of its mount. ext4 here turns read-only at the first error, as most systems set it up.
MAKE = {
    "xfs": (("mkfs.xfs", "-q", "-m", "reflink=1"), "loop"),
    "ext4": (("mkfs.ext4", "-q", "-F"), "loop,errors=remount-ro"),
    "btrfs": (("mkfs.btrfs", "-q"), "loop"),
}

XFS_IOC_GOINGDOWN = 0x8004587D
XFS_FSOP_GOING_FLAGS_NOLOGFLUSH = 2

# What makes four letters of all bytes: they have two bits each.
LETTERS = b"gate" * 64

AT_FDCWD = -100
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
LIBC = ctypes.CDLL(None, use_errno=True)


def renameat2(source, target, flags):
    """renameat2(2): whether it was done; `ctypes.get_errno` says why not."""
    return LIBC.renameat2(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), flags) == 0


class Failure(Exception):
    """Lamassu broke a promise; the text says which."""


def program():
    """The binary under test: $LAMASSU, or the release build."""
    target = os.environ.get("CARGO_TARGET_DIR", ROOT / "target")
    return os.environ.get("LAMASSU", str(pathlib.Path(target) / "release" / "lamassu"))


def some_bytes(rng, length):
    """Random bytes, every other time of four letters alone: these compress."""
    data = rng.randbytes(length)
    return data.translate(LETTERS) if rng.random() < 0.5 else data


def call(*command, expect=(0,), limit=COMMAND_SECONDS_MAX):
    """Runs a command; another exit code than the expected ones is a failure."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as slow:
        raise Failure(f"{' '.join(map(str, command))}: no end after {limit} s") from slow
    if done.returncode not in expect:
        said = "\n".join((done.stdout[-3000:], done.stderr[-3000:]))
        raise Failure(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{said}")
    return done


def is_mounted(path):
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        return any(line.split(" ")[1] == str(path) for line in mounts)


class Lab:
    """A temporary directory with a store, vaults in it, and mounts; a context manager."""

    def __init__(self, store="dir", megabytes=2048, where=None):
        if where is None:
            where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="lamassu-torture-", dir=where))
        self.kind = store
        self.store = self.path / "store"
        self.store.mkdir()
        self.key = self.path / "key"
        self.key.write_bytes(secrets.token_bytes(32))
        self.key.chmod(0o600)
        self.vaults = []
        # Anchors and notes of this lab's vaults: outside of the store, and gone with the lab.
        os.environ["XDG_STATE_HOME"] = str(self.path / "state")
        # Who runs the program: a prefix of its command lines.
        self.run_as = ()
        if store in MAKE:
            self.image = self.path / "store.img"
            with open(self.image, "wb") as image:
                image.truncate(megabytes << 20)
            call(*MAKE[store][0], str(self.image))
            self.attach()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        keep = os.environ.get("TORTURE_KEEP")
        if kind is not None and keep:
            print(f"kept for a look: {self.keep(keep)}", flush=True)
        for vault in self.vaults:
            vault.bury()
        self.detach()
        shutil.rmtree(self.path, ignore_errors=True)

    def keep(self, where):
        """Copies everything to a new directory under `where`."""
        copy = tempfile.mkdtemp(prefix="kept-", dir=where)
        subprocess.run(["cp", "-ax", "--sparse=always", str(self.path), copy], capture_output=True)
        subprocess.run(["cp", "-ax", str(self.store), copy + "/store"], capture_output=True)
        return copy

    def attach(self):
        """Mounts the image (its journal is replayed)."""
        until = time.monotonic() + COMMAND_SECONDS_MAX
        while True:
            call("mount", "-o", MAKE[self.kind][1], str(self.image), str(self.store))
            try:
                os.listdir(self.store)
                return
            except OSError as error:
                # Another program's mount namespace, made while the store was mounted, still has it: shut down, it stays so until that is gone.
                if error.errno != errno.EIO or time.monotonic() > until:
                    raise
            self.detach()
            time.sleep(0.5)

    def detach(self):
        while is_mounted(self.store):
            # A process that was killed may hold it for a moment yet. Attached again before it is gone, a store that was shut down stays so.
            for _ in range(100):
                if subprocess.run(["umount", str(self.store)], capture_output=True, timeout=60).returncode == 0:
                    break
                time.sleep(0.05)
            if is_mounted(self.store):
                subprocess.run(["umount", "-l", str(self.store)], capture_output=True, timeout=60)

    def power_cut(self):
        """The XFS store stops at this instant: what no barrier covered is lost."""
        fd = os.open(self.store, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, XFS_IOC_GOINGDOWN, struct.pack("I", XFS_FSOP_GOING_FLAGS_NOLOGFLUSH))
        finally:
            os.close(fd)

    def vault(self, name, *options):
        """Makes a vault with these options of `init`."""
        vault = Vault(self, name)
        self.vaults.append(vault)
        codec = os.environ.get("TORTURE_COMPRESS")
        if codec and not {"paper", "--compress"} & set(options):
            options = (*options, "--compress", codec)
        call(*self.run_as, program(), "init", "-q", "-k", self.source, *options, str(vault.dir))
        return vault

    def belong_to(self, uid):
        """From here on vaults and mounts are made by this user, whose the store is."""
        self.run_as = (
            *("env", f"HOME={self.path}", f"XDG_STATE_HOME={self.path}/state-{uid}", "setpriv"),
            *(f"--reuid={uid}", f"--regid={uid}", "--clear-groups"),
        )
        for path in (self.path, self.store, self.key):
            os.chown(path, uid, uid)

    @property
    def source(self):
        return f"raw:file:{self.key}"


class Vault:
    """One vault and its mount."""

    def __init__(self, lab, name):
        self.lab = lab
        self.dir = lab.store / name
        self.mnt = lab.path / f"mnt-{self.dir.name}"
        self.mnt.mkdir()
        self.log = lab.path / f"log-{self.dir.name}"
        self.daemon = None

    def mount(self, *options):
        """Mounts in the foreground of a child, so that we know whom to kill; returns when the mount is usable."""
        command = [*self.lab.run_as, program(), "mount", "-f", "-q", "-k", self.lab.source, *options, str(self.dir), str(self.mnt)]
        log = open(self.log, "ab")
        self.daemon = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        log.close()
        until = time.monotonic() + COMMAND_SECONDS_MAX
        while not is_mounted(self.mnt):
            if self.daemon.poll() is not None or time.monotonic() > until:
                raise Failure(f"mount: exit code {self.daemon.returncode}\n{self.log_tail()}")
            time.sleep(0.005)

    def umount(self):
        """Unmounts; the daemon must end by itself, well."""
        call(program(), "umount", str(self.mnt))
        try:
            code = self.daemon.wait(COMMAND_SECONDS_MAX)
        except subprocess.TimeoutExpired as slow:
            raise Failure(f"the daemon of {self.dir} did not end after umount") from slow
        if code != 0:
            raise Failure(f"the daemon of {self.dir} ended with {code}\n{self.log_tail()}")
        self.daemon = None

    def bury(self):
        """Ends the daemon if it lives, and takes the mount away whatever its state."""
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon.wait()
            self.daemon = None
        while is_mounted(self.mnt):
            if subprocess.run(["umount", str(self.mnt)], capture_output=True).returncode != 0:
                subprocess.run(["umount", "-l", str(self.mnt)], capture_output=True)

    def check(self, *options, expect=(CLEAN,)):
        """`lamassu check`; returns its JSON report with the member `exit` added."""
        done = call(program(), "check", "-q", "--json", "-k", self.lab.source, *options, str(self.dir), expect=range(256))
        if done.returncode not in expect:
            problems = json.loads(done.stdout)["problems"] if done.stdout else []
            left = [f"{p['kind']} {p['stored'][-60:]}: {p['text']}" for p in problems if not (p["harmless"] or p["repaired"])]
            left = "\n".join(left[:20])
            raise Failure(f"check {' '.join(options)} of {self.dir}: exit code {done.returncode}\n{left}\n{done.stderr[-1000:]}")
        return json.loads(done.stdout) | {"exit": done.returncode}

    def log_tail(self):
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""
