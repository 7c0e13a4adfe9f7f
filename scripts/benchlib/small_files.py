"""Many small files on tmpfs: a tree of real files unpacked, packed, searched and removed; dbench; Postmark.

The tree is made of files of this machine's installed Debian packages, at most 64 KiB each. Unpacking ends with syncfs,
whose time counts. Each pass has a mount of its own, and an empty page cache.
"""

import contextlib
import os
import re
import resource
import stat

from demolib import dataset
from demolib.shell import DemoError, have, run, say

from . import measure

FILE_BYTES_MAX = 64 << 10
DBENCH_CLIENTS = 4
# Katcher's defaults in kind (small mail-like files, as many reads as appends), enlarged until they take seconds.
POSTMARK = {"number": (5000, 200), "transactions": (10000, 400)}


def make_archive(bench):
    """(path of a tar in memory, number of files, their bytes)."""
    wanted, names = bench.size(20000, 500), []
    for package in dataset.installed_packages(1 << 40):
        for name in package.files:
            found = os.lstat(name)
            if stat.S_ISREG(found.st_mode) and found.st_size <= FILE_BYTES_MAX:
                names.append(name)
        if len(names) >= wanted:
            break
    archive = os.path.join(bench.memory, "tree.tar")
    listed = "\0".join(n.lstrip("/") for n in names[:wanted])
    run("tar", "-C", "/", "--hard-dereference", "--owner=0", "--group=0", "--null", "-T", "-", "-cf", archive, stdin=listed)
    size = sum(os.lstat(n).st_size for n in names[:wanted])
    return archive, min(wanted, len(names)), size


def run_all(bench):
    archive, files, size = make_archive(bench)
    say(f"small files: a tree of {files} files, {size / 1e6:.0f} MB")
    # PlainFS keeps a descriptor for each inode that the kernel knows; root may allow it as many.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[0], max(4 * files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    systems = [name for name in bench.systems if name != "plainfs" or descriptors > 2 * files]
    stores = {name: bench.fresh_store(name, bench.memory) for name in systems}
    samples = []
    for number, name in measure.alternating(systems, bench.runs, bench.minutes):
        found = list(passes(bench, name, stores[name], archive))
        samples += [s | {"system": name, "run": number} for s in found]
        say(f"small files, run {number + 1} of {bench.runs}, {name}: " + ", ".join(f"{s['workload']} {s['value']}" for s in found))
    os.unlink(archive)
    units = {"unpack": "s", "tar": "s", "find": "s", "rm -r": "s", "dbench": "MB/s", "Postmark": "s"}
    return {"files": files, "bytes": size, "runs": 1 + samples[-1]["run"], "store": "tmpfs", "units": units, "samples": samples}


def commands(archive):
    """What is done to a tree, in a shell, by workload."""
    return {
        "unpack": f"mkdir tree && tar -C tree -xf '{archive}' && sync -f tree",
        "tar": "tar -cf - tree | cat >/dev/null",  # GNU tar does not read what it writes to /dev/null
        "find": "test $(find tree -type f -newermt 1971-01-01 | wc -l) -gt 0",
        "rm -r": "rm -r tree",
    }


def passes(bench, name, store, archive):
    system = bench.systems[name]
    for workload, command in commands(archive).items():
        yield timed(bench, system, store, workload, lambda path, c=command: measure.seconds_of("sh", "-ec", f"cd '{path}'; {c}"))
    if have("dbench"):
        yield timed(bench, system, store, "dbench", lambda path: dbench(path, bench.size(5, 2)))
    if have("postmark"):
        yield timed(bench, system, store, "Postmark", lambda path: postmark(bench, path))


def timed(bench, system, store, workload, work):
    with measure.mounted(system, store, bench.work) as mount, bench.quiet():
        measure.drop_caches()
        value = work(mount.path)
    return {"workload": workload, "value": round(value, 3), "cpu_s": round(mount.used.cpu_s, 3),
            "rss_peak_mib": round(mount.used.rss_peak_mib, 1)}


def dbench(path, seconds, clients=DBENCH_CLIENTS, run=run):
    """MB/s of dbench's own account; its load file is the NetBench trace that comes with it. `run`: another way to run it, e.g. on another host."""
    ended = run("dbench", "-D", path, "-t", seconds, clients, check=False)
    found = re.search(r"^Throughput ([0-9.]+) MB/sec", ended.stdout, re.MULTILINE)
    if ended.returncode or not found:
        raise DemoError(f"dbench failed: {(ended.stdout + ended.stderr)[-400:]}")
    return float(found.group(1))


def postmark(bench, path):
    settings = [f"set {name} {bench.size(*sizes)}" for name, sizes in POSTMARK.items()]
    script = "\n".join([f"set location {path}", *settings, "set size 512 16384", "set seed 42", "run", "quit", ""])
    return measure.seconds_of("postmark", stdin=script)
