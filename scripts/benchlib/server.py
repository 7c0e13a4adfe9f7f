"""What a server of shared vaults does by itself: rows committed, and leases given, in a second, with its state in files, and in etcd; and its oblivious keys.

Server, etcd (one member, and three) and clients are processes of this machine; their state is on its disk. `load` is an example of the server's crate: it has no
anchor of its own, and speaks the protocol alone.
"""

import json
import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import tempfile
import time

from demolib.hosts import within
from demolib.schemes import write_secret
from demolib.shell import DemoError, Undo, have, run, say

from . import measure

MEMBERS = {"files": 0, "etcd, 1 member": 1, "etcd, 3 members": 3}
UNITS = {"row updates": "rows/s", "lease grants": "grants/s"}
BATCH, VAULTS = 100, 4


def run_all(bench):
    load = pathlib.Path(bench.program).parent / "examples" / "load"
    if not load.exists():
        raise DemoError(f"{load} is not there: `make bench-programs` builds it")
    systems = [name for name, members in MEMBERS.items() if not members or have("etcd")][:bench.size(len(MEMBERS), 2)]
    seconds, samples = bench.size(10, 1), []
    oblivious = [row | {"run": number} for number in range(bench.runs) for row in oblivious_rates(bench, load.with_name("oblivious"))]
    for number, name in measure.alternating(systems, bench.runs, bench.minutes):
        with Undo() as undo:
            found = measured(undo, bench, load, MEMBERS[name], seconds)
        samples += [{"system": name, "run": number, "workload": workload, "value": value} for workload, value in found.items()]
        say(f"server, run {number + 1} of {bench.runs}, {name}: " + ", ".join(f"{what} {value}" for what, value in found.items()))
    return {"seconds": seconds, "batch": BATCH, "vaults": VAULTS, "runs": 1 + samples[-1]["run"], "units": UNITS, "samples": samples, "oblivious": oblivious}


def oblivious_rates(bench, oblivious):
    """MB/s by a core: blocks of 4 KiB written for the first time and again, and what a server evaluates."""
    with bench.quiet():
        rows = json.loads(run(oblivious, bench.size(8192, 512)).stdout)
    say("server, oblivious keys: " + "; ".join(", ".join(f"{what} {value:.0f}" for what, value in row.items()) for row in rows))
    return rows


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def started(undo, *argv, log):
    with open(log, "ab") as out:
        running = subprocess.Popen([str(arg) for arg in argv], stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    undo.callback(running.wait)
    undo.callback(running.kill)
    return running


def start_etcd(undo, work, members):
    """Its endpoints."""
    ports = [(free_port(), free_port()) for _ in range(members)]
    cluster = ",".join(f"m{number}=http://127.0.0.1:{peer}" for number, (_, peer) in enumerate(ports))
    for number, (client, peer) in enumerate(ports):
        client, peer = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        started(undo, "etcd", "--name", f"m{number}", "--data-dir", work / f"m{number}", "--listen-client-urls", client, "--advertise-client-urls", client,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster, log=work / "etcd.log")
    return [f"http://127.0.0.1:{client}" for client, _ in ports]


def measured(undo, bench, load, members, seconds):
    work = pathlib.Path(tempfile.mkdtemp(prefix="server-", dir=bench.work))
    undo.callback(shutil.rmtree, work, ignore_errors=True)
    program, server, state = os.path.abspath(bench.program), os.path.abspath(bench.program) + "-server", work / "server"
    address, key = f"127.0.0.1:{free_port()}", work / "key"
    write_secret(key, secrets.token_bytes(32))
    env = {"LAMASSU_KEY": f"raw:file:{key}", "XDG_STATE_HOME": str(work / "state"), "HOME": str(work)}
    lamassu = lambda *argv, **options: run(program, "-q", *argv, env=env, **options)  # noqa: E731
    run(server, "init", state)
    config = state / "server.toml"
    config.write_text(f'listen = "{address}"\naddress = "{address}"\n', encoding="ascii")
    serve = lambda: started(undo, server, "run", state, log=work / "log")  # noqa: E731
    is_up = lambda: "running" in run(server, "status", state, check=False).stdout.splitlines()  # noqa: E731
    running = serve()
    if not within(20, is_up)[0]:
        raise DemoError(f"the server does not start:\n{(work / 'log').read_text()}")
    lamassu("host", "join", stdin=run(server, "enrol", state, "node1").stdout)
    vaults = []
    for number in range(VAULTS):
        store = work / f"v{number}"
        lamassu("init", store)
        vaults.append(json.loads(lamassu("info", "--json", store).stdout)["id"])
        run(server, "host", "grant", state, "node1", vaults[-1])
        lamassu("anchor", "move", store, f"server://{address}")
    if members:
        endpoints = start_etcd(undo, work, members)
        running.terminate()
        running.wait()
        config.write_text(config.read_text() + f"[etcd]\nendpoints = {json.dumps(endpoints)}\n", encoding="ascii")
        if not within(30, lambda: run(server, "to-etcd", state, check=False).returncode == 0)[0]:
            raise DemoError(f"etcd does not start:\n{(work / 'etcd.log').read_text()[-2000:]}")
        serve()
        if not within(30, is_up)[0]:
            raise DemoError(f"the server does not start:\n{(work / 'log').read_text()}")
    time.sleep(1)
    with bench.quiet():
        found = json.loads(run(load, work / "state" / "lamassu" / "servers", address, seconds, BATCH, *vaults).stdout)
    return {"row updates": found["rows_per_s"], "lease grants": found["grants_per_s"]}
