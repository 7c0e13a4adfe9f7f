"""Rounds of random operations in mounts of every kind, each followed by an unmount, a check and a comparison in the next mount."""

import random
import subprocess
import sys
import time

from lab import ROOT, Failure, Lab

# Cache modes and vaults that between them have every suite, block sizes, small and plain names, and both codecs.
SETUPS = (
    ("writeback", ()),
    ("none", ("-s", "blake3", "-b", "64K", "--compress", "zstd")),
    ("through", ("-s", "chacha", "-R", "2")),
    ("writeback", ("-s", "paper", "-b", "8K", "--small-files", "random")),
    ("through", ("-b", "64K", "-n", "plain")),
    ("none", ()),
    ("writeback", ("-b", "16K", "--compress", "lz4")),
)

# Within the tail, a few blocks, two pages, several pages.
SIZES = (3000, 30_000, 700_000, 4_000_000)
ROUND_SECONDS = 6.0


def worker(vault, n, seed, seconds, direct):
    """Starts fsx on one file; the shadow stays between rounds."""
    name = f"file{n}"
    command = [sys.executable, str(ROOT / "tests/torture/fsx.py"), "--seed", str(seed), "--seconds", str(seconds)]
    command += ["--max-size", str(SIZES[n % len(SIZES)]), "--shadow", str(vault.lab.path / f"shadow-{n}")]
    command += (["--direct"] if direct else []) + [str(vault.mnt / name)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def one_round(vault, cache, rng, seconds):
    vault.mount("-c", cache)
    running = [worker(vault, n, rng.getrandbits(32), seconds, direct=n % 2 == 0) for n in range(len(SIZES))]
    operations, failures = 0, []
    for process in running:
        try:
            said, _ = process.communicate(timeout=seconds + 120)
        except subprocess.TimeoutExpired:
            process.kill()
            failures.append("fsx hangs")
            continue
        if process.returncode == 0:
            operations += int(said.split()[0])
        else:
            failures.append(said)
    if failures:
        raise Failure("\n".join(failures) + vault.log_tail())
    vault.umount()
    vault.check()
    return operations


def run(seed, seconds, store):
    """Goes through the setups until the time is over; every setup has three rounds over the same files."""
    rng = random.Random(seed)
    until = time.monotonic() + seconds
    operations, rounds = 0, 0
    length = min(ROUND_SECONDS, seconds / 8)
    while rounds == 0 or time.monotonic() < until:
        for cache, options in SETUPS:
            if rounds and time.monotonic() > until:
                break
            with Lab(store) as lab:
                vault = lab.vault("v", *options)
                try:
                    for _ in range(3):
                        operations += one_round(vault, cache, rng, length)
                        rounds += 1
                except Failure as failure:
                    raise Failure(f"cache={cache} {' '.join(options)} store={store} seed={seed}: {failure}") from None
    return f"{rounds} rounds, {operations} operations"
