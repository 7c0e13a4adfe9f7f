"""How one figure changes with another: clients, threads, cipher threads, processor features.

They re-run SAN.FS's Figures 5 to 7 (Pease et al. with encryption added) and the ZFS articles' "acceleration on and off". A sweep has its points on
one axis, and at each point each system gets a store and a mount of its own.
"""

import os
from dataclasses import dataclass, field
from typing import Callable

from demolib.shell import have, run, say

from . import measure
from .small_files import dbench

CLOSE = ("lamassu", "plainfs", "gocryptfs", "securefs")
OURS = ("lamassu", "plainfs")
# With a single client the processors sleep between its requests, unless they are kept awake.
AWAKE_OR_NOT = ("lamassu", "lamassu-awake", "plainfs", "gocryptfs", "securefs")


@dataclass
class Sweep:
    """`work(bench, path, point)` gives the value at a point, from the mount's path."""

    title: str
    axis: str
    unit: str
    points: tuple
    toys: tuple
    systems: tuple
    work: Callable
    needs: tuple = ()
    # What is done right before, at a point.
    before: Callable = field(default=lambda point: None)
    # The mount at a point, where that is what changes: point → (options, environment).
    mount: Callable = field(default=lambda point: ((), {}))
    # Points that take too long to be measured more than once.
    once: tuple = ()


def write_1m(bench, path, size=None, run=run):
    return measure.mb_per_s(measure.fio(path, "write", "1m", size or bench.size(256, 8), run=run), "write")


def write_by_threads(bench, path, threads):
    """A file a thread; fio gives the sum."""
    size = max(bench.size(256, 8) // threads, 1)
    return measure.mb_per_s(measure.fio(path, "write", "4k", size, f"--numjobs={threads}", "--group_reporting", filename=None), "write")


def read_by_threads(bench, path, threads):
    size = max(bench.size(256, 8) // threads, 1)
    write_by_threads(bench, path, threads)
    measure.drop_caches(sync=True)
    return measure.mb_per_s(measure.fio(path, "randread", "4k", size, f"--numjobs={threads}", "--group_reporting", filename=None), "read")


def postmark_up_to(bench, path, kib):
    return measure.seconds_of("postmark", stdin=postmark_script(bench, path, kib))


def postmark_script(bench, path, kib):
    # So many that the largest files, which are the fewest, take a second, too.
    number = max(bench.size(16000, 50) * 16 // max(kib, 16), 20)
    return f"set location {path}\nset number {number}\nset transactions {2 * number}\nset size 512 {kib << 10}\nset seed 42\nrun\nquit\n"


SWEEPS = {
    "clients": Sweep("dbench by number of clients (SAN.FS, Figure 5)", "clients", "MB/s", (1, 2, 4, 8, 16, 48), (2,), AWAKE_OR_NOT,
                     lambda bench, path, clients: dbench(path, bench.size(5, 2), clients), needs=("dbench",)),
    "cipher-threads": Sweep("Writing by number of cipher threads (SAN.FS, Figure 6)", "threads", "MB/s", (1, 2, 4, 8), (1, 2), OURS,
                            lambda bench, path, _: write_1m(bench, path), mount=lambda threads: (("--threads", str(threads)), {})),
    "postmark-size": Sweep("Postmark by largest file, as many bytes each (SAN.FS, Figure 7)", "KiB", "s", (16, 64, 256, 1024), (16, 64), CLOSE,
                           postmark_up_to, needs=("postmark",)),
    "processor": Sweep("Writing by what the processor may use (LAMASSU_CPU)", "leaves out", "MB/s",
                       ("nothing", "-avx512", "-avx512,-vaes", "-avx512,-vaes,-sha", "-aes,-sha,-avx2"), ("nothing", "portable"), ("lamassu",),
                       lambda bench, path, _: write_1m(bench, path, bench.size(128, 4)),
                       mount=lambda left_out: ((), {} if left_out == "nothing" else {"LAMASSU_CPU": left_out})),
    "writers": Sweep("4 KiB writes by number of threads, a file each", "threads", "MB/s", (1, 2, 4, 8), (1, 2), CLOSE, write_by_threads),
    "readers": Sweep("4 KiB reads at random by number of threads, a file each", "threads", "MB/s", (1, 2, 4, 8), (1, 2), CLOSE, read_by_threads),
}


def run_all(bench):
    return run_sweeps(bench, SWEEPS, lambda sweep: bench.memory)


def run_sweeps(bench, sweeps, below):
    """`below(sweep)`: the directory that its stores lie in."""
    samples = []
    for number in range(bench.runs):
        for name, sweep in sweeps.items():
            if all(have(tool) for tool in sweep.needs):
                samples += one(bench, name, sweep, below(sweep), number)
    return {"runs": bench.runs, "samples": samples, "sweeps": {
        name: {"title": s.title, "axis": s.axis, "unit": s.unit, "points": list(bench.size(s.points, s.toys))} for name, s in sweeps.items()}}


def one(bench, name, sweep, below, number):
    samples = []
    for point in bench.size(sweep.points, sweep.toys):
        if number and point in sweep.once:
            continue
        for system in [s for s in sweep.systems if s in bench.systems]:
            store = bench.fresh_store(system, below)
            options, environment = sweep.mount(point)
            with measure.mounted(bench.systems[system].with_mount(options, environment), store, bench.work) as mount, bench.quiet():
                measure.drop_caches()
                sweep.before(point)
                value = sweep.work(bench, mount.path, point)
            run("rm", "-rf", os.path.dirname(store))
            samples.append({"sweep": name, "point": point, "system": system, "run": number, "value": round(value, 3),
                            "cpu_s": round(mount.used.cpu_s, 3), "rss_peak_mib": round(mount.used.rss_peak_mib, 1)})
    found = {s: [x["value"] for x in samples if x["system"] == s] for s in dict.fromkeys(x["system"] for x in samples)}
    say(f"{name}, run {number + 1} of {bench.runs}: " + "; ".join(f"{s} " + ", ".join(f"{v:.0f}" for v in values) for s, values in found.items()))
    return samples
