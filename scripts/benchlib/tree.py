"""The integrity tree of an anchored file by degree, size of the file, and pattern of access; its records fetched beside pages, and after them.

The example `tree` of lamassu-store writes and reads one file without a mount, so that what is measured is the tree. The stores: XFS on a disk, and the same
with a millisecond added to each read, as over a network.
"""

import json
import os
import subprocess
import tempfile

from demolib.shell import DemoError, Undo, run, say
from demolib.store import XfsStore

from . import measure

DEGREES = (2, 4, 16, 64, 256)
DELAYS_US = (0, 1000)


def run_all(bench):
    program = os.path.join(os.path.dirname(bench.program), "examples", "tree")
    if not os.access(program, os.X_OK):
        raise DemoError(f"{program} is not there: run `make bench-programs` first")
    sizes, samples = bench.size((16, 256, 1024), (16,)), []
    with Undo() as undo:
        xfs = XfsStore(undo, bench.work, bench.size(4, 2) << 30, exact=False)
        for number, degree in measure.alternating(DEGREES, bench.runs, bench.minutes):
            for size in sizes:
                for delay in DELAYS_US:
                    samples += [s | {"run": number} for s in one(bench, program, xfs.path, size, degree, delay)]
            say(f"tree, run {number + 1} of {bench.runs}, degree {degree}: {len(samples)} figures")
    return {"runs": 1 + samples[-1]["run"], "store": XfsStore.kind, "samples": samples}


def one(bench, program, below, size, degree, delay):
    folder = tempfile.mkdtemp(prefix="tree-", dir=below)
    with bench.quiet():
        ended = subprocess.run([program, folder, str(size), str(degree.bit_length() - 1), str(delay)], capture_output=True, text=True)
    run("rm", "-rf", folder)
    if ended.returncode:
        raise DemoError(f"tree: {ended.stderr[-400:]}")
    return [json.loads(line) for line in ended.stdout.splitlines()]
