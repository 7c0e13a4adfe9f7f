"""A vault on sshfs: its store lies behind a network (`scripts/demolib/network.py`), which is cut and mended."""

import contextlib
import errno
import multiprocessing
import os
import random
import subprocess
import sys
import time

from lab import COMMAND_SECONDS_MAX, ROOT, Failure, Lab, call

sys.path.insert(0, str(ROOT / "scripts"))

from demolib import network  # noqa: E402

# What one call of an application may take while the link is down, in seconds: longer is a hang. ssh gives up after 2 × 2 s.
PATIENCE_SECONDS = COMMAND_SECONDS_MAX


class Network(network.Network):
    """Behind it lies a lab's store."""

    def __init__(self, lab):
        super().__init__(lab.path, lab.store)
        self.lab = lab

    def __exit__(self, *details):
        for vault in self.lab.vaults:
            vault.bury()
        super().__exit__(*details)


@contextlib.contextmanager
def far_vault(*options):
    """A vault behind the network, not mounted yet, and the network."""
    with Lab() as lab, Network(lab) as link:
        lab.store = link.near
        yield lab.vault("v", *options), link


def compare(left, right):
    done = subprocess.run(["diff", "-r", "--no-dereference", str(left), str(right)], capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise Failure(f"the copy differs: {done.stdout[:2000]}{done.stderr[:2000]}")


def functions(rng, cache, seconds):
    """What people do with files, over sshfs: a tree copied, compared, renamed, cut, linked, and random operations on a file."""
    with far_vault() as (vault, _):
        vault.mount("-c", cache)
        mnt = vault.mnt
        tree = ROOT / "crates" / "lamassu-vault"
        call("cp", "-a", str(tree), str(mnt / "tree"))
        compare(tree, mnt / "tree")
        (mnt / "tree").rename(mnt / "moved")
        data = rng.randbytes(300_000)
        for name in ("a", "b"):
            (mnt / name).write_bytes(data)
        os.rename(mnt / "a", mnt / "b")
        os.truncate(mnt / "b", 5000)
        os.truncate(mnt / "b", 100_000)
        os.symlink("b", mnt / "soft")
        # sshfs numbers the two names of a file differently: better no hard links than ruined files.
        try:
            os.link(mnt / "b", mnt / "hard")
            raise Failure("a hard link on sshfs was not refused")
        except PermissionError:
            pass
        held = os.open(mnt / "held", os.O_RDWR | os.O_CREAT)
        os.write(held, data)
        os.unlink(mnt / "held")
        if os.pread(held, len(data), 0) != data:
            raise Failure("a removed file that is still open has lost its content")
        os.close(held)
        fsx = [sys.executable, str(ROOT / "tests/torture/fsx.py"), "--seed", str(rng.getrandbits(32)), "--seconds", str(seconds)]
        call(*fsx, "--max-size", "700000", "--direct", "--without-allocate", str(mnt / "fsx"))
        vault.umount()
        vault.check()
        vault.mount("-c", cache)
        compare(tree, mnt / "moved")
        if (mnt / "soft").read_bytes() != data[:5000] + bytes(95_000):
            raise Failure("a file that was cut and grown is not what it must be")
        vault.umount()


RECORD = 9000
# What an application may meet while the link is down.
CUT = {errno.EIO, errno.ENOTCONN, errno.ECONNABORTED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.ESTALE}


def record(seed, n):
    return random.Random(seed * 1_000_003 + n).randbytes(RECORD)


def write_records(path, seed, acked, failed, stop):
    """One record after the other, each synced, through one descriptor; what fails is tried again."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    while not stop.is_set():
        try:
            os.pwrite(fd, record(seed, acked.value), acked.value * RECORD)
            os.fsync(fd)
            acked.value += 1
        except OSError as error:
            failed.value = failed.value + 1 if error.errno in CUT else -error.errno - 1000
            time.sleep(0.3)
    os._exit(0)


def make_names(top, seed, acked, failed, stop):
    """Small files, each synced and noted; what fails is tried again under another name."""
    tries = 0
    while not stop.is_set():
        tries += 1
        try:
            with open(top / f"{acked.value}", "wb") as file:
                file.write(record(seed, acked.value))
                file.flush()
                os.fsync(file.fileno())
            acked.value += 1
        except OSError as error:
            failed.value = failed.value + 1 if error.errno in CUT else -error.errno - 1000
            time.sleep(0.3)
    os._exit(0)


class Load:
    """A process and what it says."""

    def __init__(self, target, path, seed):
        self.seed, self.path = seed, path
        self.acked, self.failed = multiprocessing.Value("q", 0), multiprocessing.Value("q", 0)
        self.stop = multiprocessing.Event()
        self.process = multiprocessing.Process(target=target, args=(path, seed, self.acked, self.failed, self.stop))
        self.process.start()

    def wait(self, what, reached):
        until = time.monotonic() + PATIENCE_SECONDS
        while not reached():
            if self.failed.value < 0:
                raise Failure(f"{self.path.name}: errno {-self.failed.value - 1000} over a cut link")
            if time.monotonic() > until or not self.process.is_alive():
                raise Failure(f"{self.path.name}: {what}: nothing for {PATIENCE_SECONDS} s ({self.acked.value} acknowledged)")
            time.sleep(0.05)

    def end(self):
        self.stop.set()
        self.process.join(PATIENCE_SECONDS)
        if self.process.exitcode != 0:
            self.process.kill()
            raise Failure(f"{self.path.name}: the load did not end")

    def verify(self, mnt):
        for n in range(self.acked.value):
            if self.path.name == "names":
                got = (mnt / "names" / str(n)).read_bytes()
            else:
                with open(mnt / "records", "rb") as file:
                    file.seek(n * RECORD)
                    got = file.read(RECORD)
            if got != record(self.seed, n):
                raise Failure(f"{self.path.name}: {n} of {self.acked.value} acknowledged is not there after the link was cut")


def cut(rng, cache, times):
    """The link goes down and comes back under two loads."""
    with far_vault() as (vault, link):
        vault.mount("-c", cache)
        (vault.mnt / "names").mkdir()
        loads = [Load(write_records, vault.mnt / "records", rng.getrandbits(20)), Load(make_names, vault.mnt / "names", rng.getrandbits(20))]
        try:
            for _ in range(times):
                marks = [load.acked.value for load in loads]
                for load, mark in zip(loads, marks):
                    load.wait("at the start", lambda load=load, mark=mark: load.acked.value > mark + 10)
                link.link("down")
                marks = [load.failed.value for load in loads]
                for load, mark in zip(loads, marks):
                    load.wait("an error while the link is down", lambda load=load, mark=mark: load.failed.value > mark)
                link.link("up")
                marks = [load.acked.value for load in loads]
                for load, mark in zip(loads, marks):
                    load.wait("after the link came back", lambda load=load, mark=mark: load.acked.value > mark + 10)
            for load in loads:
                load.end()
            for load in loads:
                load.verify(vault.mnt)
            vault.umount()
            vault.check()
            vault.mount("-c", cache)
            for load in loads:
                load.verify(vault.mnt)
            vault.umount()
        except Failure as failure:
            raise Failure(f"{failure}\n{vault.log_tail()}") from None
        finally:
            for load in loads:
                load.process.kill()
        return sum(load.acked.value for load in loads)


def run(seed, seconds):
    """Functions in every cache mode, then cuts until the time is over."""
    if not network.possible():
        return "left out, it takes root, ip, sshfs and sshd"
    rng = random.Random(seed)
    until = time.monotonic() + seconds
    times = acked = 0
    while times == 0 or time.monotonic() < until:
        cache = ("writeback", "through", "none")[times % 3]
        try:
            functions(rng, cache, min(10, seconds / 4))
            acked += cut(rng, cache, 2)
        except Failure as failure:
            raise Failure(f"on sshfs, cache={cache}, seed {seed}: {failure}") from None
        times += 1
    return f"{times} times, {acked} acknowledged syncs around {2 * times} cuts"
