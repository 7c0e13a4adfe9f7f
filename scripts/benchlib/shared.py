"""A vault that hosts share, beside the same vault on one host: what the server and the turns cost.

Server and hosts are network and mount namespaces of this machine, joined by a bridge; the store is a directory in memory that all hosts see. One host by
itself: a tree of small files unpacked, packed, searched and removed, and one file, by fio. Two hosts: how long it takes until one reads what the other wrote,
and trees that both unpack or pack at once, each its own.
`lamassu` has its anchor in a file of the host; `server`, at the server, mounted by one host alone; `shared` is `mount --shared`; with `datasets` each host
works in a dataset of its own there. `sshfs` is a plain directory.
"""

import json
import os
import pathlib
import secrets
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from demolib.hosts import TOOLS, Bridge, Host, possible, within
from demolib.network import serve_ssh
from demolib.schemes import write_secret
from demolib.shell import DemoError, Undo, have, run, say

from . import locks, measure, small_files

PORT = 7433

@dataclass(frozen=True)
class System:
    """A vault: how it is made and mounted, and where its anchor is."""

    init: tuple = ()
    mount: tuple = ()
    at_server: bool = True
    # Each host's folder is a dataset. Only what two hosts do at once differs by that.
    datasets: bool = False


OURS = {"lamassu": System(at_server=False), "server": System(), "shared": System(mount=("--shared",)), "datasets": System(mount=("--shared",), datasets=True)}
# (name, fio's --rw, block, whether the file is made anew)
FILE = (("seq-write 1M", "write", "1M", True), ("seq-read 1M", "read", "1M", False), ("seq-read 4K", "read", "4k", False), ("rand-read 4K", "randread", "4k", False),
        ("rand-write 4K", "randwrite", "4k", False))
HAND_OVERS = 50
# What two hosts do at once, each in a folder of its own: (what the first does, what the second does).
AT_ONCE = {"both unpack": ("unpack", "unpack"), "both tar": ("tar", "tar"), "rm -r beside tar": ("rm -r", "tar"), "unpack beside tar": ("unpack", "tar"),
           "both rm -r": ("rm -r", "rm -r")}


def run_all(bench):
    if not possible():
        raise DemoError(f"several hosts take root and {', '.join(TOOLS)}")
    archive, files, size = small_files.make_archive(bench)
    file_mib, samples, locked = bench.size(256, 4), [], []
    with Undo() as undo:
        place = Place(undo, bench, wanted(bench), sshfs=has_sshfs(bench))
        for number, name in measure.alternating(list(place.systems), bench.runs, bench.minutes):
            found = list(place.passes(name, archive, file_mib))
            samples += [s | {"system": name, "run": number} for s in found]
            locked += [s | {"run": number} for s in locks.passes(place, name)]
            say(f"shared, run {number + 1} of {bench.runs}, {name}: " + ", ".join(f"{s['workload']} {s['value']}" for s in found))
    units = {**dict.fromkeys(small_files.commands(archive), "s"), **{f[0]: "MB/s" for f in FILE}, "hand-over": "ms", **dict.fromkeys(AT_ONCE, "s")}
    return {"files": files, "bytes": size, "size_mib": file_mib, "runs": 1 + samples[-1]["run"], "store": "tmpfs", "units": units, "samples": samples,
            "locks": {"units": locks.UNITS, "samples": locked}}


def wanted(bench):
    return {name: system for name, system in OURS.items() if not {name, "lamassu"}.isdisjoint(bench.named) or not bench.named}


def has_sshfs(bench):
    """Toys leave it out, unless they are asked for it."""
    asked = "sshfs" in bench.named or not bench.named and not bench.toy
    return asked and have("sshfs") and have("sshd")


class Place:
    """The server, two hosts, and a store for each system."""

    def __init__(self, undo, bench, systems, sshfs=False):
        self.bench, self.program, self.undo = bench, os.path.abspath(bench.program), undo
        self.server = self.program + "-server"
        work = pathlib.Path(tempfile.mkdtemp(prefix="shared-", dir=bench.memory))
        undo.callback(shutil.rmtree, work, ignore_errors=True)
        bridge = Bridge(undo)
        self.keeper = Host(undo, bridge, "keeper", work)
        self.hosts = [Host(undo, bridge, name, work) for name in ("node1", "node2")]
        self.key, self.work = work / "key", work
        write_secret(self.key, secrets.token_bytes(32))
        self.systems = systems | ({"sshfs": None} if sshfs else {})
        self.stores = {name: work / f"store-{name}" for name in self.systems}
        for store in self.stores.values():
            store.mkdir()
        self._serve()
        for name in systems:
            self._make(name)
        if sshfs:
            self._end_with(serve_ssh(work / "ssh", self.keeper.start))

    def lamassu(self, host, *argv, **options):
        return host.run(self.program, "-q", *argv, env={"LAMASSU_KEY": f"raw:file:{self.key}"}, **options)

    def _serve(self):
        state, address = self.work / "server", f"{self.keeper.address}:{PORT}"
        self.state, self.url = state, f"server://{address}"
        self.keeper.run(self.server, "init", state)
        (state / "server.toml").write_text(f'listen = "{address}"\naddress = "{address}"\n', encoding="ascii")
        self._end_with(self.keeper.start(self.server, "run", state, log=self.work / "server.log"))
        if not within(20, lambda: "running" in self.keeper.run(self.server, "status", state).stdout.splitlines())[0]:
            raise DemoError(f"the server does not start:\n{(self.work / 'server.log').read_text()}")
        for host in self.hosts:
            self.lamassu(host, "host", "join", stdin=self.keeper.run(self.server, "enrol", state, host.name).stdout)

    def _end_with(self, running):
        self.undo.callback(running.wait)
        self.undo.callback(running.kill)

    def _make(self, name):
        store, system = self.stores[name], self.systems[name]
        self.lamassu(self.hosts[0], "init", *system.init, store)
        if not system.at_server:
            return
        vault = json.loads(self.lamassu(self.hosts[0], "info", "--json", store).stdout)["id"]
        for host in self.hosts:
            self.keeper.run(self.server, "host", "grant", self.state, host.name, vault)
        self.lamassu(self.hosts[0], "anchor", "move", store, self.url)

    def mount(self, host, name, options=()):
        if name == "sshfs":
            folder = self.work / "ssh"
            options = f"IdentityFile={folder}/user,UserKnownHostsFile={folder}/known,StrictHostKeyChecking=accept-new,BatchMode=yes"
            argv = ("sshfs", f"root@{self.keeper.address}:{self.stores[name]}", host.mountpoint, "-o", options)
            if not within(10, lambda: host.run(*argv, check=False).returncode == 0)[0]:
                raise DemoError(f"sshfs: {(folder / 'log').read_text()}")
        else:
            system = self.systems[name]
            anchor = ("--anchor", self.url) if system.at_server else ()
            self.lamassu(host, "mount", *system.mount, *options, *anchor, self.stores[name], host.mountpoint)

    def umount(self, host, name):
        if name == "sshfs":
            host.run("umount", host.mountpoint)
        else:
            self.lamassu(host, "umount", host.mountpoint)

    def passes(self, name, archive, size):
        if name != "sshfs" and self.systems[name].datasets:
            yield from self.at_once(name, small_files.commands(archive))
            return
        host = self.hosts[0]
        for workload, command in small_files.commands(archive).items():
            script = f"cd '{host.mountpoint}'; {command}"
            yield self.timed(name, workload, lambda s=script: round(self.seconds(host, "sh", "-ec", s), 3))
        for workload, rw, block, is_new in FILE:
            if name == "sshfs" and workload == "rand-write 4K":
                continue  # it takes minutes: sshfs sends them without waiting, and sshd moves its whole queue for each
            if is_new:
                self.alone(name, lambda: host.run("rm", "-f", host.mountpoint / "bench.dat"))
            yield self.timed(name, workload, lambda r=rw, b=block: round(self.fio(host, r, b, size), 1))
        if name in ("shared", "sshfs"):
            yield {"workload": "hand-over", "value": round(1000 * self.hand_over(name), 1)}
            yield from self.at_once(name, small_files.commands(archive))

    def alone(self, name, work, options=()):
        host = self.hosts[0]
        self.mount(host, name, options)
        try:
            with self.bench.quiet():
                measure.drop_caches()
                return work()
        finally:
            self.umount(host, name)

    def timed(self, name, workload, work):
        return {"workload": workload, "value": self.alone(name, work)}

    def seconds(self, host, *argv):
        begun = time.monotonic()
        host.run(*argv)
        return time.monotonic() - begun

    def fio(self, host, rw, block, size):
        job = measure.fio(host.mountpoint, rw, block, size, run=host.run)
        return measure.mb_per_s(job, "read" if "read" in rw else "write")

    def at_once(self, name, commands):
        """Seconds until both hosts have ended what they do at once."""
        for host in self.hosts:
            self.mount(host, name)
            folder = host.mountpoint / host.name
            if name != "sshfs" and self.systems[name].datasets and host.run("test", "-d", folder, check=False).returncode:
                self.lamassu(host, "dataset", "create", folder)
        try:
            with self.bench.quiet(), ThreadPoolExecutor(len(self.hosts)) as pool:
                measure.drop_caches()
                for workload, both in AT_ONCE.items():
                    done = [pool.submit(self.in_folder, host, commands[command]) for host, command in zip(self.hosts, both, strict=True)]
                    yield {"workload": workload, "value": round(max(one.result() for one in done), 3)}
        finally:
            for host in self.hosts:
                self.umount(host, name)

    def in_folder(self, host, command):
        return self.seconds(host, "sh", "-ec", f"mkdir -p '{host.mountpoint / host.name}'; cd '{host.mountpoint / host.name}'; {command}")

    def hand_over(self, name):
        """Seconds from the begin of a write on one host until the other has read it, in turn."""
        for host in self.hosts:
            self.mount(host, name)
        try:
            begun = time.monotonic()
            for number in range(HAND_OVERS):
                writes, reads = self.hosts if number % 2 else self.hosts[::-1]
                path = "count" if name == "shared" else f"count{number}"  # sshfs caches what it has read for some seconds
                (written, read) = (h.mountpoint / path for h in (writes, reads))
                writes.run("sh", "-c", 'printf %s "$2" > "$1" && sync "$1"', "sh", written, str(number))
                if reads.run("cat", read).stdout != str(number):
                    raise DemoError(f"{name}: one host does not read what the other wrote")
            return (time.monotonic() - begun) / HAND_OVERS
        finally:
            for host in self.hosts:
                self.umount(host, name)
