"""The daemon's memory under a mixed load that goes on for as long as one likes.

Four processes: random operations on two files, a large file written, overwritten and read, and trees of small files made, listed, renamed
and removed. The resident memory is sampled all the while. It must stay under its bound, and over a run of ten minutes or more it must not
grow: the fitted line's rise over the run is at most a tenth of the mean plus 8 MiB.
"""

import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import time

from lab import ROOT, Failure, Lab

RSS_MAX = 256 << 20
SAMPLE_SECONDS = 2.0
SLOPE_SECONDS_MIN = 600  # below, what a start costs is taken for growth

TREE_DIRS, TREE_FILES = 12, 60
LARGE = 192 << 20


def resident(pid, field="VmRSS"):
    """Bytes of a process's memory as /proc tells them."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) << 10
    raise Failure(f"no {field} of process {pid}")


def make_tree(top, rng):
    os.mkdir(top)
    for d in range(TREE_DIRS):
        os.mkdir(top / f"d{d}")
        for f in range(TREE_FILES):
            with open(top / f"d{d}" / f"f{f}", "wb") as file:
                file.write(rng.randbytes(rng.choice((0, 100, 3000, 9000, 70_000))))


def use_tree(top, rng):
    for parent, dirs, files in os.walk(top):
        for name in files:
            path = os.path.join(parent, name)
            os.stat(path)
            if rng.random() < 0.2:
                with open(path, "rb") as file:
                    file.read()
            if rng.random() < 0.1:
                os.rename(path, path + "-moved")
        dirs.sort()


def trees(mnt, seed, until):
    """Keeps three trees; the oldest is replaced by a new one, over and over."""
    rng = random.Random(seed)
    n = 0
    while time.monotonic() < until:
        make_tree(mnt / f"tree{n}", rng)
        for back in range(min(n + 1, 3)):
            use_tree(mnt / f"tree{n - back}", rng)
        if n >= 2:
            shutil.rmtree(mnt / f"tree{n - 2}")
        n += 1


def large(mnt, seed, until):
    rng = random.Random(seed)
    path = mnt / "large"
    piece = rng.randbytes(1 << 20)
    while time.monotonic() < until:
        with open(path, "wb") as file:
            for at in range(0, LARGE, len(piece)):
                file.write(at.to_bytes(8, "little") + piece[8:])
        with open(path, "r+b") as file:
            for _ in range(2000):
                file.seek(rng.randrange(LARGE - 70_000))
                file.write(piece[: rng.choice((100, 4096, 60_000))])
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            while file.read(1 << 20):
                pass
        os.unlink(path)


def fsx(mnt, n, seed, seconds):
    command = [sys.executable, str(ROOT / "tests/torture/fsx.py"), "--seed", str(seed), "--seconds", str(seconds)]
    command += ["--max-size", str((4 << 20) << n), "--direct", str(mnt / f"fsx{n}")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def slope(samples):
    """Bytes per second of the line through what was sampled after the first fifth."""
    kept = samples[len(samples) // 5 :]
    if len(kept) < 2:
        return 0.0
    times, sizes = zip(*kept)
    return statistics.linear_regression(times, sizes).slope


def sample(vault, until):
    samples = []
    begun = time.monotonic()
    csv = open(os.environ["SOAK_CSV"], "w", encoding="ascii") if "SOAK_CSV" in os.environ else None
    while time.monotonic() < until:
        if vault.daemon.poll() is not None:
            raise Failure(f"the daemon ended with {vault.daemon.returncode}\n{vault.log_tail()}")
        samples.append((time.monotonic() - begun, resident(vault.daemon.pid)))
        if csv:
            print(f"{samples[-1][0]:.1f},{samples[-1][1]}", file=csv, flush=True)
        time.sleep(SAMPLE_SECONDS)
    return samples


def judge(samples, peak, seconds):
    mean = statistics.fmean(size for _, size in samples)
    per_second = slope(samples)
    if peak > RSS_MAX:
        raise Failure(f"{peak >> 20} MiB of memory, at most {RSS_MAX >> 20} are allowed")
    if seconds >= SLOPE_SECONDS_MIN and per_second * seconds > mean / 10 + (8 << 20):
        raise Failure(f"memory grows by {per_second * 3600 / 2**20:.1f} MiB/h, the mean is {mean / 2**20:.0f} MiB")
    return f"mean {mean / 2**20:.0f} MiB, peak {peak >> 20} MiB, {per_second * 3600 / 2**20:+.1f} MiB/h"


def run(seed, seconds):
    """One mount under load for so long. `SOAK_CSV` names a file that gets the samples."""
    with Lab() as lab:
        vault = lab.vault("v")
        vault.mount()
        rng = random.Random(seed)
        until = time.monotonic() + seconds
        loads = [
            multiprocessing.Process(target=target, args=(vault.mnt, rng.getrandbits(32), until)) for target in (trees, large)
        ]
        for load in loads:
            load.start()
        operations = [fsx(vault.mnt, n, rng.getrandbits(32), seconds) for n in range(2)]
        try:
            samples = sample(vault, until)
            for load in loads:
                load.join(120)
                if load.exitcode != 0:
                    raise Failure(f"a load process ended with {load.exitcode}\n{vault.log_tail()}")
            for process in operations:
                said, _ = process.communicate(timeout=120)
                if process.returncode != 0:
                    raise Failure(said)
            peak = resident(vault.daemon.pid, "VmHWM")
        finally:
            for process in [*loads, *operations]:
                process.kill()
        vault.umount()
        vault.check()
        return judge(samples, peak, seconds)
