"""A server and hosts that share a vault (scripts/demolib/hosts.py), the store that they share, and what can befall each of them."""

import json
import os
import pathlib
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from lab import COMMAND_SECONDS_MAX, MAKE, ROOT, Failure, call, program

sys.path.insert(0, str(ROOT / "scripts"))

from demolib.hosts import Bridge, Host, within  # noqa: E402
from demolib.network import serve_ssh  # noqa: E402
from demolib.shell import DemoError, run  # noqa: E402

PORT = 7433
TERM = 5  # seconds, the shortest that a server takes
# What a call may take without a fault: hosts take turns, and machines are busy.
SLACK = COMMAND_SECONDS_MAX / 20
# After this time something has come to a halt.
PATIENCE = 6 * TERM + 0.2 * COMMAND_SECONDS_MAX
DISK_MIB = 512  # of the store, and of the server
HOSTS = ("n1", "n2", "n3")
# As docs/sharing.md has it.
SSHFS = "cache=no,entry_timeout=0,attr_timeout=0,negative_timeout=0"


class Machine:
    """A host with its mount and the programs that use it."""

    def __init__(self, lab, undo, name):
        self.lab, self.name = lab, name
        self.host = Host(undo, lab.bridge, name, lab.path)
        self.mnt, self.log = self.host.mountpoint, lab.path / f"log-{name}"
        self.store = lab.path / "store"
        self.daemon = self.programs = self.sshfs = None

    def connect(self):
        """Where the store lies behind a network: its directory here."""
        self.store = self.host.work / "store"
        self.store.mkdir(exist_ok=True)
        folder, options = self.lab.path / "ssh", os.environ.get("TORTURE_SSHFS", SSHFS)
        options += f",IdentityFile={folder}/user,UserKnownHostsFile={folder}/known-{self.name},StrictHostKeyChecking=accept-new,BatchMode=yes"
        options += ",reconnect,ServerAliveInterval=2,ServerAliveCountMax=2,ConnectTimeout=3"
        argv = ("sshfs", "-f", f"root@{self.lab.keeper.address}:{self.lab.path / 'store'}", self.store, "-o", options)
        self.sshfs = self.host.start(*argv, log=self.lab.path / f"sshfs-{self.name}")
        if not within(20, lambda: self.host.has_mounted(self.store))[0]:
            raise DemoError(f"sshfs: {(folder / 'log').read_text()}")

    def lamassu(self, *argv, **options):
        return self.host.run(program(), *argv, env={"LAMASSU_KEY": self.lab.source}, **options)

    @property
    def vault(self):
        return self.store / "vault"

    def mount(self):
        """Whether that went well."""
        argv = (program(), "mount", "-f", "-q", "-k", self.lab.source, "--shared", *self.lab.options, "--anchor", self.lab.url, self.vault, self.mnt)
        self.daemon = self.host.start(*argv, log=self.log)
        until = time.monotonic() + PATIENCE
        while not self.host.has_mounted(self.mnt):
            if self.daemon.poll() is not None:
                self.daemon = None
                return False
            if time.monotonic() > until:
                raise Failure(f"mount on {self.name}: no end after {PATIENCE} s")
            time.sleep(0.02)
        return True

    def kill(self):
        self.daemon.kill()
        self.daemon.wait()
        self.daemon = None
        while self.host.has_mounted(self.mnt):
            self.host.run("umount", "-l", self.mnt, check=False)

    def umount(self):
        """The daemon must end by itself, well."""
        self.lamassu("umount", self.mnt)
        code = self.daemon.wait(PATIENCE)
        self.daemon = None
        if code != 0:
            raise Failure(f"the daemon of {self.name} ended with {code}\n{self.log.read_text()[-3000:]}")

    def signal(self, number):
        os.kill(self.daemon.pid, number)

    def start_programs(self, seed):
        argv = (sys.executable, pathlib.Path(__file__).with_name("shared_host.py"), self.name, self.mnt / "t", seed, self.lab.path / f"calls-{self.name}")
        self.programs = self.host.talk(*argv, log=self.lab.path / f"programs-{self.name}")
        self.read_to = 0

    def ask(self, command):
        self.programs.stdin.write(command + "\n")
        self.programs.stdin.flush()

    def answer(self, command, seconds=PATIENCE):
        if not select.select([self.programs.stdout], [], [], seconds)[0]:
            raise Failure(f"host {self.name}: no end of `{command}` after {seconds:.0f} s: a call hangs; {self.hanging()}")
        line = self.programs.stdout.readline()
        if not line:
            raise Failure(f"the programs of {self.name} have ended: {(self.lab.path / f'programs-{self.name}').read_text()[-2000:]}")
        return json.loads(line)

    def hanging(self):
        """Where threads of the programs and of the daemon wait."""
        found = []
        for process in (self.programs, self.daemon):
            for task in pathlib.Path(f"/proc/{process.pid}/task").iterdir() if process else ():
                with_stack = [(task / name).read_text().strip() for name in ("comm", "wchan")]
                found.append("/".join(with_stack))
        return ", ".join(found)

    def tell(self, command, seconds=PATIENCE):
        self.ask(command)
        return self.answer(command, seconds)

    def calls(self):
        """Those that have ended since this was asked for last."""
        with open(self.lab.path / f"calls-{self.name}", encoding="ascii") as log:
            log.seek(self.read_to)
            lines = log.readlines()
            self.read_to = log.tell()
        return [json.loads(line) for line in lines]

    def end(self):
        for process in (self.programs, self.daemon, self.sshfs):
            if process is not None:
                process.kill()
                process.wait()
        for place in (self.mnt, self.store):
            if place != self.lab.path / "store" and self.host.has_mounted(place):
                self.host.run("umount", "-l", place, check=False)


class SharedLab:
    """Everything of one run; `undo` takes it away again."""

    def __init__(self, undo, kind, options=()):
        self.kind, self.undo, self.options = kind, undo, options
        where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.path = pathlib.Path(tempfile.mkdtemp(prefix="lamassu-shared-", dir=where))
        undo.callback(shutil.rmtree, self.path, ignore_errors=True)
        self.key = self.path / "key"
        self.key.write_bytes(secrets.token_bytes(32))
        self.key.chmod(0o600)
        self.source = f"raw:file:{self.key}"
        self.make_store()
        self.bridge = Bridge(undo)
        self.keeper = Host(undo, self.bridge, "keeper", self.path)
        self.state = self.path / "server"
        self.url = f"server://{self.keeper.address}:{PORT}"
        self.running = None
        self.make_server()
        self.machines = [Machine(self, undo, name) for name in HOSTS]
        for machine in self.machines:
            undo.callback(machine.end)
        if kind == "sshfs":
            sshd = serve_ssh(self.path / "ssh", self.keeper.start)
            undo.callback(sshd.wait)
            undo.callback(sshd.kill)
            time.sleep(0.5)
            for machine in self.machines:
                machine.connect()
        self.make_vault()

    def make_store(self):
        store = self.path / "store"
        store.mkdir()
        if self.kind == "xfs":
            image = self.path / "store.img"
            with open(image, "wb") as file:
                file.truncate(DISK_MIB << 20)
            call(*MAKE["xfs"][0], str(image))
            call("mount", "-o", MAKE["xfs"][1], str(image), str(store))
        else:
            call("mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=700", "tmpfs", str(store))
        self.undo.callback(run, "umount", "-l", store, check=False)
        (store / "vault").mkdir(mode=0o700)

    # --- the server

    def serve(self, *argv, **options):
        return self.keeper.run(program() + "-server", *argv, **options)

    def make_server(self):
        self.state.mkdir(mode=0o700)
        # A disk of its own, in the server's mounts alone.
        self.keeper.run("mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=700", "tmpfs", self.state)
        self.serve("init", self.state)
        address = f"{self.keeper.address}:{PORT}"
        text = f'listen = "{address}"\naddress = "{address}"\nterm_seconds = {TERM}\nheartbeat_seconds = 1\n'
        self.keeper.run("tee", self.state / "server.toml", stdin=text)
        self.start_server()
        self.undo.callback(self.kill_server)

    def start_server(self):
        self.running = self.keeper.start(program() + "-server", "run", self.state, log=self.path / "server.log")
        if not within(30, lambda: "running" in self.serve("status", self.state, check=False).stdout.splitlines())[0]:
            raise Failure(f"the server does not start:\n{(self.path / 'server.log').read_text()[-3000:]}")

    def kill_server(self):
        self.running.kill()
        self.running.wait()

    def make_vault(self):
        first = self.machines[0]
        for machine in self.machines:
            machine.lamassu("host", "join", stdin=self.serve("enrol", self.state, machine.name).stdout)
        first.lamassu("-q", "init", first.vault)
        self.id = json.loads(first.lamassu("info", "--json", first.vault).stdout)["id"]
        for machine in self.machines:
            self.serve("host", "grant", self.state, machine.name, self.id)
        first.lamassu("-q", "anchor", "move", first.vault, self.url)

    # --- disks that are full

    def fill(self, at_server):
        """As much as there is; a little less of the server's, whose last 64 MiB are for going on."""
        folder = self.state if at_server else self.path / "store"
        where = self.keeper.run if at_server else run
        where("sh", "-c", f"head -c {DISK_MIB << 20} /dev/zero > '{folder}/filler' 2>/dev/null", check=False)

    def empty(self, at_server):
        folder = self.state if at_server else self.path / "store"
        (self.keeper.run if at_server else run)("rm", "-f", folder / "filler")

    def freeze(self, frozen):
        run("fsfreeze", "--freeze" if frozen else "--unfreeze", self.path / "store")

    # --- the end

    def logs(self):
        """What went wrong by what daemons and server say."""
        found = []
        for path in (*(machine.log for machine in self.machines), self.path / "server.log"):
            text = path.read_text(errors="replace") if path.exists() else ""
            found += [f"{path.name}: {line}" for line in text.splitlines() if re.search("panicked|stack backtrace", line)]
        return found

    def alerts(self):
        return self.serve("alerts", "list", self.state).stdout.splitlines()

    def check(self):
        """By the first host, when none has the vault mounted. Sessions that were killed end by themselves."""
        first = self.machines[0]
        done, _ = within(PATIENCE, lambda: self.free(first))
        if done is None:
            raise Failure("the vault is in use although no host has it mounted")
        if done.returncode not in (0, 29):
            raise Failure(f"check: exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-1000:]}")

    def free(self, machine):
        done = machine.lamassu("check", "-q", "--anchor", self.url, machine.vault, check=False)
        return None if done.returncode == 63 else done

    def keep(self, where):
        """Copies logs, histories, store and the server's state to a new directory below."""
        copy = pathlib.Path(tempfile.mkdtemp(prefix="kept-shared-", dir=where))
        for machine in self.machines:
            (copy / f"mounts-{machine.name}").write_text(machine.hanging(), encoding="utf-8")
        self.keeper.run("cp", "-a", self.state, copy / "server-state", check=False)
        subprocess.run(["cp", "-a", "--sparse=always", *(path for path in self.path.iterdir() if path.name not in (*HOSTS, "keeper", "server", "store.img"))]
                       + [copy], capture_output=True, timeout=300)
        return copy


STOP, CONTINUE = signal.SIGSTOP, signal.SIGCONT
