"""Fsync-heavy work and overwriting on a real disk file system: stores on XFS in a loop device.

Appends cost Lamassu one barrier like anyone; overwriting in place costs a second one, as old keys must be durable before
the data changes (docs/format.md, the commit protocol).
"""

import os
import sqlite3
import time

from demolib.shell import Undo, say
from demolib.store import XfsStore

from . import measure
from .systems import Lamassu

# Its fsync(2) is answered without any of its store: strace(1) sees no fsync, fdatasync, sync_file_range or syncfs. Its rates say nothing beside those who sync.
SYNC_NOTHING = ("cryfs",)


def run_all(bench):
    samples = []
    with Undo() as undo:
        xfs = XfsStore(undo, bench.work, bench.size(14, 2) << 30, exact=False)
        if "lamassu" in bench.systems:
            # Without barriers: what they cost is the difference. It does not survive a power cut, so that it is no rival of the others.
            relaxed = Lamassu(bench.keys, bench.program, mount=["--durability", "relaxed"], name="lamassu-relaxed")
            bench.systems = {**bench.systems, relaxed.name: relaxed}
        systems = [name for name in bench.systems if name not in SYNC_NOTHING]
        stores = {name: bench.fresh_store(name, xfs.path) for name in systems}
        for number, name in measure.alternating(systems, bench.runs, bench.minutes):
            found = [s | {"system": name, "run": number} for s in passes(bench, name, stores[name])]
            samples += found
            say(f"durable, run {number + 1} of {bench.runs}, {name}: " + ", ".join(f"{s['workload']} {s['value']}" for s in found))
    units = {"SQLite inserts": "transactions/s", "append 4K, fsync each": "writes/s", "overwrite 4K at random, fsync each": "writes/s",
             "overwrite 1M in sequence": "MB/s", "overwrite 4K at random": "MB/s"}
    return {"runs": 1 + samples[-1]["run"], "size_mib": bench.size(1024, 8), "store": XfsStore.kind, "units": units, "samples": samples}


def passes(bench, name, store):
    system, size = bench.systems[name], bench.size(1024, 8)
    small = bench.size(8, 1)  # MiB written with an fsync after each 4 KiB
    fsync = ("--fsync=1",)

    def jobs(path, *job, **more):
        found = measure.fio(path, *job, **more)["write"]
        return found["iops"] if fsync[0] in job else found["bw_bytes"] / 1e6

    work = {
        "SQLite inserts": lambda path: sqlite_inserts(path, bench.size(500, 20)),
        "append 4K, fsync each": lambda path: jobs(path, "write", "4k", small, *fsync, filename="log.dat"),
        "overwrite 4K at random, fsync each": lambda path: jobs(path, "randwrite", "4k", small, *fsync, filename="log.dat"),
        "overwrite 1M in sequence": lambda path: jobs(path, "write", "1m", size),
        "overwrite 4K at random": lambda path: jobs(path, "randwrite", "4k", size, f"--io_size={bench.size(256, 4)}M"),
    }
    with measure.mounted(system, store, bench.work) as mount:
        remove(mount.path, "log.dat", "test.db")
        if not os.path.exists(os.path.join(mount.path, "bench.dat")):
            measure.fio(mount.path, "write", "1m", size)
    for workload, one in work.items():
        with measure.mounted(system, store, bench.work) as mount, bench.quiet():
            measure.drop_caches(sync=True)
            value = one(mount.path)
        yield {"workload": workload, "value": round(value, 1), "cpu_s": round(mount.used.cpu_s, 3),
               "rss_peak_mib": round(mount.used.rss_peak_mib, 1)}


def remove(path, *names):
    for name in names:
        if os.path.exists(os.path.join(path, name)):
            os.unlink(os.path.join(path, name))


def sqlite_inserts(path, count):
    """Transactions of one row each, a second, with SQLite's defaults: a rollback journal, and fsync at each step."""
    connection = sqlite3.connect(os.path.join(path, "test.db"), isolation_level=None)
    connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, text TEXT)")
    begun = time.monotonic()
    for number in range(count):
        connection.execute("INSERT INTO t (text) VALUES (?)", (f"row {number} " * 10,))
    seconds = time.monotonic() - begun
    connection.close()
    return count / seconds
