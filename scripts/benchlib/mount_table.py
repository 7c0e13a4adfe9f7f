"""The mount table, and the Lamassu paper's Figure 8: one file of 256 MiB on tmpfs, read and written in seven ways.

4 KiB and 1 MiB blocks of synchronous I/O. Each pass has a mount of its own, and an empty page cache.
"""

import os

from demolib.shell import say

from . import measure

# name: (fio's rw, block, on a new file, further options)
WORKLOADS = {
    "seq-write 4K": ("write", "4k", True, ()),
    "seq-read 4K": ("read", "4k", False, ()),
    "rand-read 4K": ("randread", "4k", False, ()),
    "rand-write 4K": ("randwrite", "4k", False, ()),
    "rand-rw 70/30": ("randrw", "4k", False, ("--rwmixread=70",)),
    "write 1M": ("write", "1m", True, ()),
    "read 1M": ("read", "1m", False, ()),
}


def run_all(bench):
    """Samples of every workload, every system, every run."""
    size = bench.size(256, 8)
    stores = {name: bench.fresh_store(name, bench.memory) for name in bench.systems}
    samples = []
    for number, name in measure.alternating(list(bench.systems), bench.runs, bench.minutes):
        for workload in WORKLOADS:
            samples.append(one(bench, name, stores[name], workload, size) | {"run": number})
        say(f"mount table, run {number + 1} of {bench.runs}, {name}: " + ", ".join(
            f"{s['workload']} {s['read'] or s['write']:.0f}" for s in samples[-len(WORKLOADS):]))
    return {"size_mib": size, "runs": 1 + samples[-1]["run"], "store": "tmpfs", "unit": "MB/s", "samples": samples}


def one(bench, name, store, workload, size):
    rw, block, new, more = WORKLOADS[workload]
    with measure.mounted(bench.systems[name], store, bench.work) as mount:
        path = os.path.join(mount.path, "bench.dat")
        if new and os.path.exists(path):
            os.unlink(path)
        with bench.quiet():
            measure.drop_caches()
            job = measure.fio(mount.path, rw, block, size, *more)
    moved = (job["read"]["io_bytes"] + job["write"]["io_bytes"]) / 2**30
    rate = {d: round(measure.mb_per_s(job, d), 2) if job[d]["io_bytes"] else None for d in ("read", "write")}
    return {"system": name, "workload": workload, **rate, "cpu_s_per_gib": round(mount.used.cpu_s / moved, 3),
            "rss_peak_mib": round(mount.used.rss_peak_mib, 1)}
