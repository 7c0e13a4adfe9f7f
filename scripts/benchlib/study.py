"""The multi-tenant study's experiment through the path of volumes: 4 KiB writes without encryption, with a synchronous cipher and in a pipeline.

A channel is one NBD connection with a volume of its own; the volumes lie on one or more backing directories, each a vault. All directories are on one disk here.
Synchronous: one request at a time, ciphered by a library's calls block after block. Pipelined: 16 requests at once, our kernels over many blocks. Without encryption:
nbdkit's file plugin, 16 requests at once. Rates of writes end with a flush. The rates of ciphers are measured apart, in memory: the study's figure for its pipeline is
such a one, and lies above its rate of writes without encryption.
"""

import json
import os
import pathlib
import secrets
import shutil
import tempfile
import time

from demolib.schemes import write_secret
from demolib.shell import DemoError, Undo, run, say

from . import measure, volumes

# Requests at once, and LAMASSU_CPU; `None`: no encryption.
WAYS = {"none": (16, None), "synchronous": (1, "library"), "pipelined": (16, "")}
# Channels and backing directories.
SHAPES = ((1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 3), (4, 4))
CHANNELS_MAX = 4


def run_all(bench):
    plugin = volumes.plugin_of(bench)
    mib, seconds, samples = bench.size(256, 8), bench.size(5, 1), []
    shapes = bench.size(SHAPES, ((1, 1), (2, 2)))
    with Undo() as undo:
        work = pathlib.Path(tempfile.mkdtemp(prefix="study-", dir=bench.work))
        undo.callback(shutil.rmtree, work, ignore_errors=True)
        key = work / "key"
        write_secret(key, secrets.token_bytes(32))
        env = {"LAMASSU_KEY": f"raw:file:{key}", "XDG_STATE_HOME": str(work / "state"), "HOME": str(work)}
        # Every channel has a volume in every directory, so that all shapes have the same work.
        for n in range(CHANNELS_MAX):
            run(bench.program, "-q", "init", work / f"v{n}", env=env)
            (work / f"p{n}").mkdir()
            for channel in range(CHANNELS_MAX):
                run(bench.program, "-q", "volume", "create", "--block-size", "4096", work / f"v{n}", f"c{channel}", f"{mib}M", env=env)
                with open(work / f"p{n}" / f"c{channel}", "wb") as file:
                    file.truncate(mib << 20)
        cells = [(way, channels, dirs) for way in WAYS for channels, dirs in shapes]
        for number, (way, channels, dirs) in measure.alternating(cells, bench.runs, bench.minutes):
            sample = pass_of(work, plugin, env, way, channels, dirs, mib, seconds)
            samples.append({"way": way, "channels": channels, "directories": dirs, "run": number, **sample})
            say(f"study, run {number + 1} of {bench.runs}, {way}, {channels} channels, {dirs} directories: {sample['mib_s']:.0f} MiB/s, {sample['us_4k']:.1f} us of the server for 4 KiB")
    return {"runs": 1 + samples[-1]["run"], "size_mib": mib, "seconds": seconds, "threads": os.cpu_count(), "samples": samples, "ciphers": ciphers_alone(bench)}


def ciphers_alone(bench):
    speed = os.path.join(os.path.dirname(bench.program), "examples", "speed")
    if not os.path.exists(speed):
        say("NOTE: the ciphers are not measured apart: `make bench-programs` builds what does that")
        return []
    return json.loads(run(speed, 4096, bench.size(100, 5)).stdout)


def pass_of(work, plugin, env, way, channels, dirs, mib, seconds):
    """One server and all channels at once; MiB in a second by the clock, the flushes included."""
    depth, kernels = WAYS[way]
    # By directory: a server of plain files has one.
    if kernels is None:
        servers = [[("nbdkit", "--foreground", "--threads", "1", "--unix", "{socket}", "file", f"dir={work / f'p{n}'}"), {}] for n in range(dirs)]
        name = "c{channel}"
    else:
        vaults = [word for n in range(dirs) for word in (f"vault={work / f'v{n}'}", f"name=v{n}")]
        env = {**env, **({"LAMASSU_CPU": kernels} if kernels else {})}
        servers, name = [[("nbdkit", "--foreground", "--threads", "1", "--unix", "{socket}", plugin, *vaults), env]], "v{dir}/c{channel}"
    with Undo() as undo:
        started = [volumes.start(undo, server, work, f"{way}{n}") for n, server in enumerate(servers)]
        before = sum(volumes.processor_seconds(pid) for _, pid in started)
        argv = ["fio", "--ioengine=nbd", "--rw=randwrite", "--bs=4k", f"--iodepth={depth}", f"--size={mib}M", "--end_fsync=1", "--time_based=1", f"--runtime={seconds}",
                "--randrepeat=0", "--refill_buffers=1", "--output-format=json"]
        for channel in range(channels):
            base = started[channel % len(started)][0].replace("///a?", "///" + name.format(dir=channel % dirs, channel=channel) + "?")
            argv += [f"--name=c{channel}", f"--uri={base}"]
        begun = time.monotonic()
        said = run(*argv).stdout
        took = time.monotonic() - begun
        jobs = json.loads(said[said.index("{\n"):])["jobs"]
        if any(job["error"] for job in jobs) or len(jobs) != channels:
            raise DemoError("fio failed")
        moved = sum(job["write"]["io_bytes"] for job in jobs)
        used = sum(volumes.processor_seconds(pid) for _, pid in started) - before
    return {"mib_s": round(moved / 2**20 / took, 1), "us_4k": round(used / moved * 4096 * 1e6, 2)}
