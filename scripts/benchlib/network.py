"""Figure 7 of the Lamassu paper: the five workloads with the store behind a network of 1 Gbit/s.

The paper's filer spoke NFS; here the store lies on sshfs between two network namespaces, the link limited by a token bucket. What sshfs itself can do is
`sshfs alone`.
"""

import os
import tempfile

from demolib import network
from demolib.shell import DemoError, say

from . import measure

WORKLOADS = {"seq-write": ("write", True), "seq-read": ("read", False), "rand-read": ("randread", False), "rand-write": ("randwrite", False),
             "rand-rw 70/30": ("randrw", False)}
SYSTEMS = ("lamassu", "lamassu-metadata", "plainfs", "gocryptfs", "securefs", "encfs")
RATE = "1gbit"
ALONE = "sshfs alone"


def run_all(bench):
    if not network.possible():
        raise DemoError("a network takes root, ip, sshfs and sshd (`make setup` installs them)")
    size, samples = bench.size(64, 4), []
    chosen = [ALONE, *(s for s in SYSTEMS if s in bench.systems)]
    with tempfile.TemporaryDirectory(dir=bench.work) as folder, tempfile.TemporaryDirectory(dir=bench.memory) as far, network.Network(folder, far) as link:
        link.limit(RATE)
        stores = {}
        for name in chosen:
            stores[name] = os.path.join(link.near, name.replace(" ", "-"), "store")
            os.makedirs(stores[name])
            if bench.systems.get(name):
                bench.systems[name].make(stores[name])
        for number, name in measure.alternating(chosen, bench.runs, bench.minutes):
            found = [one(bench, name, stores[name], workload, size) | {"run": number} for workload in WORKLOADS]
            samples += found
            say(f"network, run {number + 1} of {bench.runs}, {name}: " + ", ".join(f"{s['workload']} {s['read'] or s['write']:.0f}" for s in found))
    return {"size_mib": size, "runs": 1 + samples[-1]["run"], "store": f"sshfs, {RATE}", "unit": "MB/s", "samples": samples}


def one(bench, name, store, workload, size):
    rw, new = WORKLOADS[workload]
    with measure.mounted(bench.systems.get(name), store, bench.work) as mount:
        path = os.path.join(mount.path, "bench.dat")
        if new and os.path.exists(path):
            os.unlink(path)
        with bench.quiet():
            measure.drop_caches()
            job = measure.fio(mount.path, rw, "4k", size, *(("--rwmixread=70",) if rw == "randrw" else ()))
    rate = {d: round(measure.mb_per_s(job, d), 2) if job[d]["io_bytes"] else None for d in ("read", "write")}
    return {"system": name, "workload": workload, **rate, "cpu_s": round(mount.used.cpu_s, 3)}
