"""Volumes over NBD: Lamassu's plugin of nbdkit, beside qemu-nbd with a LUKS image and nbdkit's plain file plugin.

Server and client (fio's nbd engine) are processes of this machine, over a local socket; the stores lie on its disk. Each system has a volume of the same size, which
was written once before. A run is one workload of all systems, one after the other. Lamassu's server has the threads that `volume export` gives it. The server's
processor time is measured beside the rate: a shared machine disturbs it less.
"""

import json
import os
import pathlib
import secrets
import shutil
import subprocess
import tempfile
import time

from demolib.schemes import write_secret
from demolib.shell import DemoError, Undo, have, run, say

from . import measure

SYSTEMS = ("lamassu", "lamassu-62", "luks", "file")
SLOTS = {"lamassu": (), "lamassu-62": ("--reserved-slots", "62")}
# fio's pattern, the size of a request, connections. Where one connection has one thread of the server, several show what more of them give.
WORKLOADS = {"random writes, 4 KiB": ("randwrite", "4k", 1), "sequential writes, 4 KiB": ("write", "4k", 1), "sequential writes, 1 MiB": ("write", "1m", 1),
             "random reads, 4 KiB": ("randread", "4k", 1), "sequential reads, 4 KiB": ("read", "4k", 1), "sequential reads, 1 MiB": ("read", "1m", 1),
             "random writes, 4 KiB, 4 connections": ("randwrite", "4k", 4), "random reads, 4 KiB, 4 connections": ("randread", "4k", 4),
             "sequential writes, 1 MiB, 4 connections": ("write", "1m", 4), "sequential reads, 1 MiB, 4 connections": ("read", "1m", 4)}
# Requests at once, of all connections together.
DEPTH = 16
PLUGIN = "liblamassu_nbdkit.so"


def run_all(bench):
    plugin = plugin_of(bench)
    if missing := [program for program in ("nbdkit", "qemu-nbd", "qemu-img") if not have(program)]:
        raise DemoError(f"not installed: {', '.join(missing)} (`make setup` installs it)")
    mib, seconds, samples = bench.size(512, 16), bench.size(6, 1), []
    workloads = dict(list(WORKLOADS.items())[:bench.size(len(WORKLOADS), 4)])
    with Undo() as undo:
        work = pathlib.Path(tempfile.mkdtemp(prefix="volumes-", dir=bench.work))
        undo.callback(shutil.rmtree, work, ignore_errors=True)
        servers = {name: make(bench, name, work, plugin, mib) for name in SYSTEMS}
        for name in SYSTEMS:
            with Undo() as served:
                fio(start(served, servers[name], work, name)[0], "write", "1m", 1, mib, None)
        for number, name in measure.alternating(list(SYSTEMS), bench.runs, bench.minutes):
            with Undo() as served:
                uri, server = start(served, servers[name], work, name)
                for workload, (kind, block, connections) in workloads.items():
                    before = processor_seconds(server)
                    mib_s, moved = fio(uri, kind, block, connections, mib, seconds)
                    cost = (processor_seconds(server) - before) / moved * 4096 * 1e6
                    samples.append({"system": name, "run": number, "workload": workload, "mib_s": mib_s, "us_4k": cost})
            say(f"volumes, run {number + 1} of {bench.runs}, {name}: " + ", ".join(f"{s['workload']} {s['mib_s']:.0f} MiB/s" for s in samples[-len(workloads):]))
    return {"size_mib": mib, "seconds": seconds, "depth": DEPTH, "runs": 1 + samples[-1]["run"], "samples": samples}


def plugin_of(bench):
    """nbdkit's plugin: beside the program, or where cargo builds it for tests."""
    beside = pathlib.Path(bench.program).resolve().parent
    plugin = next((place for place in (beside / PLUGIN, beside / "deps" / PLUGIN) if place.exists()), None)
    if plugin is None:
        raise DemoError(f"{beside / PLUGIN} is not there: `make build` builds it")
    return plugin


def make(bench, name, work, plugin, mib):
    """Makes a volume of a system; the command that serves it at the socket {socket}."""
    key = work / f"{name}.key"
    if name in SLOTS:
        write_secret(key, secrets.token_bytes(32))
        env = {"LAMASSU_KEY": f"raw:file:{key}", "XDG_STATE_HOME": str(work / "state"), "HOME": str(work)}
        vault = work / f"vault-{name}"
        run(bench.program, "-q", "init", *SLOTS[name], vault, env=env)
        run(bench.program, "-q", "volume", "create", "--block-size", "4096", vault, "a", f"{mib}M", env=env)
        return [("nbdkit", "--foreground", "--threads", "1", "--unix", "{socket}", plugin, f"vault={vault}"), env]
    if name == "luks":
        image, secret = work / "luks.img", f"secret,id=k,file={key},format=raw"
        write_secret(key, secrets.token_hex(32).encode("ascii"))
        create = ("qemu-img", "create", "-q", "--object", secret, "-f", "luks", "-o", "key-secret=k,cipher-alg=aes-256,cipher-mode=xts,iter-time=10", image, f"{mib}M")
        # On a busy machine it may not get the processor for the moment in which it measures the stretching of keys.
        for _ in range(9):
            if run(*create, check=False).returncode == 0:
                break
        else:
            run(*create)
        opened = f"driver=luks,key-secret=k,file.driver=file,file.filename={image},file.discard=unmap"
        return [("qemu-nbd", "--persistent", "--shared=0", "--export-name=a", "--socket", "{socket}", "--cache=writeback", "--aio=threads", "--object", secret,
                 "--image-opts", opened), {}]
    plain = work / "plain.img"
    with open(plain, "wb") as file:
        file.truncate(mib << 20)
    # It serves its one file whatever name is asked for.
    return [("nbdkit", "--foreground", "--unix", "{socket}", "file", plain), {}]


def start(undo, server, work, name):
    """Serves until `undo`; where, and the process."""
    command, env = server
    socket = work / f"{name}.sock"
    argv = [str(word).format(socket=socket) for word in command]
    with open(work / f"{name}.log", "ab") as log:
        running = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **env})

    def end():
        running.terminate()
        running.wait()
        socket.unlink(missing_ok=True)

    undo.callback(end)
    for _ in range(600):
        if socket.exists():
            return f"nbd+unix:///a?socket={socket}", running.pid
        if running.poll() is not None:
            break
        time.sleep(0.1)
    raise DemoError(f"{name} does not serve: {(work / f'{name}.log').read_text(errors='replace')[-500:]}")


def fio(uri, kind, block, connections, mib, seconds):
    """MiB in a second, and bytes in all. What was written is flushed at the end of a pass, which counts. Each connection has a part of the volume."""
    part = mib // connections
    argv = ["fio", "--name=a", "--ioengine=nbd", f"--uri={uri}", f"--rw={kind}", f"--bs={block}", f"--iodepth={DEPTH // connections}", f"--size={part}M", "--end_fsync=1",
            "--randrepeat=0", "--refill_buffers=1", "--output-format=json",
            f"--numjobs={connections}", f"--offset_increment={part}M", "--group_reporting"]
    if seconds:
        argv += ["--time_based=1", f"--runtime={seconds}"]
    begun = time.monotonic()
    said = run(*argv).stdout
    job = json.loads(said[said.index("{\n"):])["jobs"][0]  # the engine greets first
    took = time.monotonic() - begun
    if job["error"]:
        raise DemoError(f"fio: error {job['error']}")
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    # By the clock of the whole pass where it writes: fio's own rate leaves the last flush out.
    mib_s = moved / 2**20 / (max(took, job["write"]["runtime"] / 1000) if "write" in kind else job["read"]["runtime"] / 1000)
    return mib_s, moved


def processor_seconds(pid):
    """What all threads of a process have used so far: user and system."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
