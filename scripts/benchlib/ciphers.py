"""The ciphers by themselves: every kernel by block size and threads, beside RustCrypto's calls one block after another; and what starting costs.

After the multi-tenant study (software one block at a time, a device block by block and in a pipeline; rates of writes and of ciphers apart) and the ZFS articles (acceleration
on and off by buffer size, SHA-256 over 1 to 128 KiB, a deduplicating write before and after a faster hash, the cost of a self-test at the start). OpenSSL's own figures, from
the same runs, are those of the best library there is.
"""

import json
import os
import re
import tempfile

from demolib.shell import have, run, say

from . import measure
from .systems import Lamassu, Measured, PlainFs

BLOCKS = ("1K", "2K", "4K", "8K", "16K", "32K", "64K", "128K")
OPENSSL = {"sha256": ("-evp", "sha256"), "encrypt": ("-evp", "aes-256-cbc"), "decrypt": ("-evp", "aes-256-cbc", "-decrypt")}
# What the hash may use of the processor; the ciphers keep AES-NI throughout.
HASHES = {"sixteen lanes or SHA-NI": "", "eight lanes (AVX2)": "-sha,-avx512", "portable": "-sha,-avx512,-avx2"}


def run_all(bench):
    samples, starts, openssl, hashed, engines = [], [], [], [], []
    program = bench.program
    plain, lamassu = PlainFs(bench.keys, program), Lamassu(bench.keys, program)
    # Approved primitives alone, as --fips wants them.
    approved = Lamassu(bench.keys, program, init=["--small-files", "random"], name="approved")
    bench.systems = {s.name: s for s in (approved, plain, lamassu)}
    store, key = bench.fresh_store(approved.name, bench.memory), approved.key()
    speed = os.path.join(os.path.dirname(program), "examples", "speed")
    # The study's four ways and ours.
    engines_of = {"plainfs": plain, "library": lamassu.with_mount(("--threads", "1"), {"LAMASSU_CPU": "library"}),
                  "device-sync": Measured(bench.keys, program, "device-sync"), "device": Measured(bench.keys, program, "device"),
                  "normal": lamassu}
    for number in range(bench.runs):
        for block in bench.size(BLOCKS, BLOCKS[:3]):
            with bench.quiet():
                told = run(speed, int(block[:-1]) << 10, bench.size(100, 5)).stdout
            samples += [row | {"block": block, "run": number} for row in json.loads(told)]
            with bench.quiet():
                openssl += [row | {"block": block, "run": number} for row in openssl_speed(bench, block)]
        with bench.quiet():
            for _ in range(bench.size(20, 2)):
                for options in ((), ("--fips",)):
                    seconds = measure.seconds_of(program, *options, "ls", "--key", key, store, env=approved.state(store))
                    starts.append({"options": " ".join(options), "seconds": round(seconds, 5)})
        hashed += [{"hash": name, "run": number, "value": write(bench, lamassu.with_mount((), {"LAMASSU_CPU": mask} if mask else {}), "--dedupe_percentage=90")}
                   for name, mask in HASHES.items()]
        for engine, system in engines_of.items():
            engines.append({"engine": engine, "run": number, "value": write(bench, system)})
        say(f"ciphers, run {number + 1} of {bench.runs}: {len(samples)} figures; writes " + ", ".join(f"{e['engine']} {e['value']}" for e in engines[-len(engines_of):]))
    return {"runs": bench.runs, "samples": samples, "starts": starts, "openssl": openssl, "hashed_writes": hashed, "engines": engines,
            "write_mib": bench.size(256, 8), "threads": os.cpu_count()}


def openssl_speed(bench, block):
    """Rows of OpenSSL's rates for one block size, one thread; nothing where it is not installed."""
    if not have("openssl"):
        return
    seconds = bench.size(1, 1)
    for op, options in OPENSSL.items() if not bench.toy or block == "4K" else ():
        said = run("openssl", "speed", "-mr", "-elapsed", "-seconds", seconds, "-bytes", int(block[:-1]) << 10, *options).stdout
        found = re.search(r"^\+F:\d+:[^:]+:([0-9.]+)", said, re.MULTILINE)
        if found:
            yield {"op": op, "gb_per_s": round(float(found.group(1)) / 1e9, 4)}


def write(bench, system, *more):
    """MB/s of writing a new file in 4 KiB requests on tmpfs."""
    with tempfile.TemporaryDirectory(dir=bench.memory) as folder:
        store = os.path.join(folder, "store")
        os.mkdir(store)
        system.make(store)
        with measure.mounted(system, store, bench.work) as mount, bench.quiet():
            measure.drop_caches()
            return round(measure.mb_per_s(measure.fio(mount.path, "write", "4k", bench.size(256, 8), *more), "write"), 1)
