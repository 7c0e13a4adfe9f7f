"""What integrity costs: the SAN.FS report's Tables 2 (a large file in sequence) and 3 (Postmark, files up to 20 MB; by cipher, too), with the integrity modes there are.

"Without" is `--anchor none --integrity metadata`: no tree over a file's pages, and a block is trusted that its sealed key decrypts. "With" is the default: the
tree, its root in the anchor, and each block hashed again. Between them lie the tree alone (`lamassu-metadata`) and the hashes alone (`lamassu-unanchored`).
"""

import os
import re
import time

from demolib.shell import DemoError, Undo, have, run, say
from demolib.store import XfsStore

from . import measure
from .growth import fill
from .systems import Lamassu

SYSTEMS = ("plainfs", "lamassu-bare", "lamassu-metadata", "lamassu-unanchored", "lamassu")
# Table 3's other ciphers, by Postmark alone; (suite, integrity). `metadata` is there for suites aes and paper.
CIPHERS = (("paper", "metadata"), ("paper", "full"), ("blake3", "full"), ("chacha", "full"))
UNITS = {"kilobytes": 1e3, "megabytes": 1e6, "gigabytes": 1e9}


def run_all(bench):
    samples = []
    with Undo() as undo:
        xfs = XfsStore(undo, bench.work, bench.size(28, 2) << 30, exact=False)
        if not bench.toy:
            fill(xfs)
        ciphers = [Lamassu(bench.keys, bench.program, init=["--suite", suite], mount=["--integrity", mode], name=f"{suite}, {mode}") for suite, mode in CIPHERS]
        if "lamassu" in bench.systems:
            bare = Lamassu(bench.keys, bench.program, init=["--anchor", "none"], mount=["--integrity", "metadata"], name="lamassu-bare")
            bench.systems = {**bench.systems, bare.name: bare}
        systems = [name for name in SYSTEMS if name in bench.systems] + [c.name for c in ciphers]
        bench.systems = {**bench.systems, **{c.name: c for c in ciphers}}
        for number, name in measure.alternating(systems, bench.runs, bench.minutes):
            store = bench.fresh_store(name, xfs.path)
            found = [s | {"system": name, "run": number} for s in passes(bench, name, store)]
            samples += found
            run("rm", "-rf", os.path.dirname(store))
            say(f"integrity, run {number + 1} of {bench.runs}, {name}: " + ", ".join(f"{s['workload']} {s['value']}" for s in found))
    return {"runs": 1 + samples[-1]["run"], "size_mib": bench.size(4096, 8), "store": XfsStore.kind, "samples": samples}


def passes(bench, name, store):
    system, size = bench.systems[name], bench.size(4096, 8)
    work = {
        "write": lambda path: measure.mb_per_s(measure.fio(path, "write", "1m", size), "write"),
        "read": lambda path: measure.mb_per_s(measure.fio(path, "read", "1m", size), "read"),
        "Postmark": lambda path: postmark(bench, path, bench.size(1000, 20), bench.size(500, 20)),
    }
    for workload, one in work.items():
        if workload == "Postmark" and not have("postmark") or workload != "Postmark" and name not in SYSTEMS:
            continue
        with measure.mounted(system, store, bench.work) as mount, bench.quiet():
            measure.drop_caches(sync=True)
            value = one(mount.path)
        yield {"workload": workload, "value": round(value, 1), "cpu_s": round(mount.used.cpu_s, 3)}


def postmark(bench, path, files, transactions, run=run):
    """MB/s read and written, of all the time that it takes. How many transactions the report made in this test it does not say. `run`: another way to run it,
    e.g. on another host."""
    sizes = f"{1 << 10} {bench.size(20 << 20, 1 << 16)}"
    script = f"set location {path}\nset number {files}\nset transactions {transactions}\nset size {sizes}\nset seed 42\nrun\nquit\n"
    begun = time.monotonic()
    ended = run("postmark", stdin=script, check=False)
    seconds = time.monotonic() - begun
    moved = re.findall(r"([0-9.]+) (kilobytes|megabytes|gigabytes) (?:read|written)", ended.stdout)
    if ended.returncode or len(moved) != 2:
        raise DemoError(f"postmark failed: {(ended.stdout + ended.stderr)[-400:]}")
    return sum(float(number) * UNITS[unit] for number, unit in moved) / seconds / 1e6
