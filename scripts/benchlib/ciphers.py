"""The ciphers by themselves: every kernel by block size and threads, beside RustCrypto's calls one block after another; and what starting costs.

After the multi-tenant study (software one block at a time, a device block by block and in a pipeline) and the ZFS articles (acceleration on and off by buffer size, the cost of a
self-test at the start).
"""

import json
import os

from demolib.shell import run, say

from . import measure
from .systems import Lamassu

BLOCKS = ("4K", "16K", "64K", "128K")


def run_all(bench):
    samples, starts = [], []
    program = bench.program
    # Approved primitives alone, as --fips wants them.
    approved = Lamassu(bench.keys, program, init=["--small-files", "random"], name="approved")
    bench.systems = {approved.name: approved}
    store, key = bench.fresh_store(approved.name, bench.memory), approved.key()
    for number in range(bench.runs):
        for block in bench.size(BLOCKS, BLOCKS[:1]):
            with bench.quiet():
                rows = json.loads(run(program, "speed", "--all", "--device", "--json", "--block-size", block, "--ms", bench.size(100, 5)).stdout)
            samples += [row | {"block": block, "run": number} for row in rows]
        with bench.quiet():
            for _ in range(bench.size(20, 2)):
                for options in ((), ("--fips",)):
                    seconds = measure.seconds_of(program, *options, "ls", "--key", key, store)
                    starts.append({"options": " ".join(options), "seconds": round(seconds, 5)})
        say(f"ciphers, run {number + 1} of {bench.runs}: {len(samples)} figures")
    return {"runs": bench.runs, "samples": samples, "starts": starts, "threads": os.cpu_count()}
