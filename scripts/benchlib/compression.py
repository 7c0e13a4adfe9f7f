"""What compression costs and gains, by kind of data: whole files written and read, in memory and from a store that is slow to read.

The kinds: random bytes, which no codec makes smaller; text (documentation, headers, scripts) and a mixture (programs and libraries) of this machine.
$LAMASSU_BEFORE names an older program, which is then measured beside: what vaults lose that do not compress.
The slow store is XFS on a loop device whose reads the kernel limits (the controller blkio or io of cgroups), those of the serving process alone.
"""

import contextlib
import glob
import os
import random
import tempfile
import time

from demolib.shell import Undo, run, say
from demolib.store import XfsStore

from . import measure
from .systems import Lamassu

CODECS = ("none", "lz4", "zstd")
KINDS = {"random": (), "text": ("/usr/share/doc/*/*", "/usr/include/**/*.h", "/usr/lib/python3/**/*.py", "/usr/share/perl/**/*.p[lm]"),
         "mixed": ("/usr/bin/*", "/usr/lib/x86_64-linux-gnu/*.so.*")}
SLOW_BYTES_PER_S = (100_000_000, 400_000_000)
PIECE = 1 << 20


def run_all(bench):
    size, samples = bench.size(256, 8), []
    with Undo() as undo:
        data = {kind: content(bench, kind, size << 20) for kind in KINDS}
        series = list(all_series(bench))
        say(f"compression: {size} MiB of {', '.join(KINDS)}")
        for number, system in measure.alternating(series, bench.runs, bench.minutes):
            for kind, path in data.items():
                store = bench.fresh_store_of(system, bench.memory)
                of = {"system": system.name, "data": kind, "run": number}
                with measure.mounted(system, store, bench.work) as mount, bench.quiet():
                    value = copy(path, os.path.join(mount.path, "file"))
                samples.append({**of, "store": "memory", "op": "write", "value": value, "cpu_s": mount.used.cpu_s})
                samples.append({**of, "store": "memory", "op": "read", **read(bench, system, store)})
                run("rm", "-rf", os.path.dirname(store))
            say(f"compression, run {number + 1} of {bench.runs}, {system.name}: " + ", ".join(
                f"{s['data']} {s['op']} {s['value']:.0f}" for s in samples[-2 * len(KINDS):]) + " MB/s")
        slow = Throttle(undo)
        if slow.there():
            xfs = XfsStore(undo, bench.work, bench.size(4, 1) << 30, exact=False)
            stores = {}
            for system in [s for s in series if s.name.endswith("64K") and not s.name.startswith("before")]:
                for kind, path in data.items():
                    store = stores[system.name, kind] = bench.fresh_store_of(system, xfs.path)
                    with measure.mounted(system, store, bench.work) as mount:
                        copy(path, os.path.join(mount.path, "file"))
            for rate in SLOW_BYTES_PER_S:
                slow.limit(xfs.path, rate)
                for number, (name, kind) in measure.alternating(list(stores), bench.runs, bench.minutes):
                    system = next(s for s in series if s.name == name)
                    of = {"system": name, "data": kind, "run": number, "store": f"reads of {rate // 10**6} MB/s", "op": "read"}
                    samples.append({**of, **read(bench, system, stores[name, kind], slow.take)})
                say(f"compression: {len(samples)} figures")
    return {"size_mib": size, "runs": 1 + max(s["run"] for s in samples), "store": "tmpfs, and XFS with limited reads", "unit": "MB/s", "samples": samples}


def all_series(bench):
    """Vaults without compression of both programs, in two block sizes; with each codec in the larger one."""
    programs = {"before": os.environ.get("LAMASSU_BEFORE"), "none": bench.program}
    for name, program in programs.items():
        for block in ("4K", "64K") if program else ():
            yield Lamassu(bench.keys, program, init=["-b", block], name=f"{name}, {block}")
    for codec in CODECS[1:]:
        yield Lamassu(bench.keys, bench.program, init=["-b", "64K", "--compress", codec], name=f"{codec}, 64K")


def content(bench, kind, length):
    """A file of that kind, in memory."""
    path = os.path.join(tempfile.mkdtemp(prefix="data-", dir=bench.memory), kind)
    with open(path, "wb") as file:
        if kind == "random":
            random.seed(1)
            for _ in range(0, length, PIECE):
                file.write(random.randbytes(PIECE))
            return path
        names = sorted({name for pattern in KINDS[kind] for name in glob.glob(pattern, recursive=True) if not name.endswith((".gz", ".xz", ".png"))})
        random.Random(1).shuffle(names)
        while file.tell() < length:
            before = file.tell()
            for name in names:
                with contextlib.suppress(OSError), open(name, "rb") as source:
                    file.write(source.read(4 << 20))
                if file.tell() >= length:
                    break
            if file.tell() == before:
                raise OSError(f"there is nothing under {', '.join(KINDS[kind])}")
        file.truncate(length)
    return path


def copy(source, target):
    """MB/s, with the fsync at the end."""
    with open(source, "rb", buffering=0) as file, open(target, "wb", buffering=0) as out:
        begun = time.monotonic()
        while piece := file.read(PIECE):
            out.write(piece)
        os.fsync(out.fileno())
        return out.tell() / 1e6 / (time.monotonic() - begun)


def read(bench, system, store, take=lambda pid: None):
    """MB/s of a new mount with cold caches, and the processor seconds of what serves it."""
    with measure.mounted(system, store, bench.work) as mount, bench.quiet():
        take(mount.process.pid)
        measure.drop_caches(sync=True)
        with open(os.path.join(mount.path, "file"), "rb", buffering=0) as file:
            piece = bytearray(PIECE)
            begun = time.monotonic()
            while file.readinto(piece):
                pass
            value = file.tell() / 1e6 / (time.monotonic() - begun)
    return {"value": value, "cpu_s": mount.used.cpu_s}


class Throttle:
    """A control group whose reads from one device are limited."""

    def __init__(self, undo):
        self.old, self.path = os.path.exists("/sys/fs/cgroup/blkio"), None
        if os.geteuid() != 0:
            return
        path = os.path.join("/sys/fs/cgroup/blkio" if self.old else "/sys/fs/cgroup", f"lamassu-bench-{os.getpid()}")
        with contextlib.suppress(OSError):
            os.mkdir(path)
            undo.callback(os.rmdir, path)
            self.path = path

    def there(self):
        name = "blkio.throttle.read_bps_device" if self.old else "io.max"
        if self.path and os.path.exists(os.path.join(self.path, name)):
            return True
        say("NOTE: no control group limits reads here: no store is slow")
        return False

    def limit(self, path, rate):
        device = os.stat(path).st_dev
        said = f"{os.major(device)}:{os.minor(device)} {'' if self.old else 'rbps='}{rate}"
        with open(os.path.join(self.path, "blkio.throttle.read_bps_device" if self.old else "io.max"), "w") as file:
            file.write(said)

    def take(self, pid):
        with open(os.path.join(self.path, "cgroup.procs"), "w") as file:
            file.write(str(pid))
