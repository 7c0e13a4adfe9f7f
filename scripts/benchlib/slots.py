"""Figure 10 of the Lamassu paper: throughput on tmpfs by the number of reserved slots, R = 1 … 60.

R bounds how many overwritten blocks share one commit of a metadata page. It does nothing for new blocks, so the writes
here overwrite an existing file, as the paper's do.
"""

from demolib.shell import say

from . import measure
from .systems import Lamassu

SLOTS = (1, 2, 8, 32, 48, 52, 56, 60)
WORKLOADS = {"seq-write": "write", "rand-write": "randwrite", "seq-read": "read", "rand-read": "randread"}


def run_all(bench):
    size, samples = bench.size(256, 8), []
    chosen = bench.size(SLOTS, (1, 48, 60))
    systems = {slots: Lamassu(bench.keys, bench.program, init=["--reserved-slots", slots], name=f"R{slots}") for slots in chosen}
    bench.systems = {system.name: system for system in systems.values()}
    stores = {slots: bench.fresh_store(system.name, bench.memory) for slots, system in systems.items()}
    for slots, system in systems.items():
        with measure.mounted(system, stores[slots], bench.work) as mount:
            measure.fio(mount.path, "write", "1m", size)
    for number, slots in measure.alternating(list(systems), bench.runs, bench.minutes):
        found = []
        for workload, rw in WORKLOADS.items():
            with measure.mounted(systems[slots], stores[slots], bench.work) as mount, bench.quiet():
                measure.drop_caches()
                job = measure.fio(mount.path, rw, "4k", size)
            rate = measure.mb_per_s(job, "write" if "write" in rw else "read")
            found.append({"slots": slots, "run": number, "workload": workload, "value": round(rate, 1),
                          "cpu_s_per_gib": round(mount.used.cpu_s / (size / 1024), 3)})
        samples += found
        say(f"slots, run {number + 1} of {bench.runs}, R = {slots}: " + ", ".join(f"{s['workload']} {s['value']:.0f}" for s in found))
    return {"size_mib": size, "runs": 1 + samples[-1]["run"], "store": "tmpfs", "unit": "MB/s", "samples": samples}
