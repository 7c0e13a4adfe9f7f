"""Figure 9 of the Lamassu paper: where the time of sequential 4 KiB writes and reads goes, with and without full integrity, on tmpfs.

The mount measures itself (the example `measured` of lamassu-fuse), with one cipher thread and no page cache, so that one
thing happens after another, as in the prototype.
What the stages leave of fio's own time is "misc": the kernel's way to the mount and back, copying, pages, locks.
"""

import re

from demolib.shell import DemoError, say

from . import measure
from .systems import Measured

STAGES = ("encrypt", "decrypt", "key", "store")
SYSTEMS = {"lamassu": "full", "lamassu-metadata": "metadata"}
TOLD = re.compile(r"seconds by stage: (.*)")


def run_all(bench):
    size, samples = bench.size(256, 8), []
    for number in range(bench.runs):
        for name in [s for s in SYSTEMS if s in bench.systems]:
            system = Measured(bench.keys, bench.program, "stages", SYSTEMS[name], mount=("-o", "cache=none"))
            store = bench.fresh_store(name, bench.memory)
            for rw in ("write", "read"):
                with measure.mounted(system, store, bench.work) as mount, bench.quiet():
                    measure.drop_caches()
                    job = measure.fio(mount.path, rw, "4k", size)
                said = TOLD.search(mount.said)
                if not said:
                    raise DemoError(f"the mount said no stages: {mount.said[-300:]}")
                spent = {k: float(v) for k, v in (word.split("=") for word in said.group(1).split())}
                total = job[rw]["runtime"] / 1000
                spent["misc"] = max(total - sum(spent.values()), 0)
                samples.append({"system": name, "workload": f"seq-{rw}", "run": number, **{k: round(v, 4) for k, v in spent.items()}})
                say(f"stages, run {number + 1} of {bench.runs}, {name}, seq-{rw}: " + ", ".join(f"{k} {v:.2f} s" for k, v in spent.items()))
    return {"size_mib": size, "runs": bench.runs, "store": "tmpfs", "unit": "s", "samples": samples}
