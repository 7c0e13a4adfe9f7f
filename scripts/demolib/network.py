"""A directory behind a network: two network namespaces joined by a pair of virtual devices, an sshd with keys and a configuration of its own in
one, sshfs in the other. Needs root, `ip`, sshfs, sshd, ssh-keygen.
"""

import contextlib
import os
import pathlib
import random
import shutil
import subprocess
import time

from .shell import DemoError, have, run

SSHD = """
Port 22
HostKey {dir}/host
AuthorizedKeysFile {dir}/user.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
Subsystem sftp internal-sftp
"""


def possible():
    return os.geteuid() == 0 and all(have(tool) for tool in ("ip", "sshfs", "sshd", "ssh-keygen"))


def serve_ssh(folder, start):
    """An sshd with a key of its own and one for its users, both in `folder`, which is made. It answers a moment after `start` has run it."""
    folder.mkdir()
    for key in ("host", "user"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key)
    (folder / "sshd_config").write_text(SSHD.format(dir=folder), encoding="ascii")
    pathlib.Path("/run/sshd").mkdir(exist_ok=True)
    sshd = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin")
    return start(sshd, "-D", "-e", "-f", folder / "sshd_config", log=folder / "log")


def drop_space(name):
    """Removes a network namespace. What still runs in there is ours."""
    for pid in run("ip", "netns", "pids", name, check=False).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), 9)
    run("ip", "netns", "del", name, check=False)


class Network:
    """A context manager. `near` is the directory `far` through sshfs. Whatever it starts is gone at the end."""

    def __init__(self, folder, far):
        self.dir, self.far = pathlib.Path(folder) / "ssh", far
        self.near = pathlib.Path(folder) / "far"
        tag = f"{os.getpid() & 0xFFFF:04x}{random.randrange(1 << 16):04x}"
        self.spaces = (f"lamassu-s{tag}", f"lamassu-c{tag}")
        self.devices = (f"ls{tag}", f"lc{tag}")
        self.address = f"10.{random.randrange(64, 128)}.{random.randrange(256)}."
        self.sshd = None

    def _inside(self, n):
        return ["nsenter", f"--net=/run/netns/{self.spaces[n]}"]

    def __enter__(self):
        try:
            self._join()
            self.sshd = serve_ssh(self.dir, self._start)
            self._connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if os.path.ismount(self.near):
            run("umount", "-l", self.near, check=False)
        if self.sshd is not None:
            self.sshd.kill()
            self.sshd.wait()
        for space in self.spaces:
            drop_space(space)

    def _join(self):
        for space in self.spaces:
            run("ip", "netns", "add", space)
        run("ip", "link", "add", self.devices[0], "netns", self.spaces[0], "type", "veth", "peer", "name", self.devices[1], "netns", self.spaces[1])
        for n in range(2):
            run("ip", "-n", self.spaces[n], "addr", "add", f"{self.address}{n + 1}/24", "dev", self.devices[n])
            run("ip", "-n", self.spaces[n], "link", "set", "lo", "up")
            run("ip", "-n", self.spaces[n], "link", "set", self.devices[n], "up")

    def _start(self, *argv, log):
        with open(log, "wb") as file:
            return subprocess.Popen([*self._inside(0), *argv], stderr=file, stdin=subprocess.DEVNULL)

    def _connect(self):
        self.near.mkdir()
        options = [f"IdentityFile={self.dir}/user", f"UserKnownHostsFile={self.dir}/known", "StrictHostKeyChecking=accept-new"]
        options += ["reconnect", "ServerAliveInterval=2", "ServerAliveCountMax=2", "ConnectTimeout=3", "BatchMode=yes"]
        command = [*self._inside(1), "sshfs", f"root@{self.address}1:{self.far}", self.near, "-o", ",".join(options)]
        for _ in range(50):
            said = run(*command, check=False)
            if said.returncode == 0:
                return
            time.sleep(0.2)
        raise DemoError(f"sshfs: {said.stderr}\n{(self.dir / 'log').read_text()}")

    def link(self, state):
        """Takes the link `down` or `up`."""
        run("ip", "-n", self.spaces[0], "link", "set", self.devices[0], state)
        if state == "up":  # a device that went down has lost its address's route, not the address
            run("ip", "-n", self.spaces[0], "addr", "replace", f"{self.address}1/24", "dev", self.devices[0])

    def limit(self, rate):
        """At most `rate` (as tc(8) writes it) in each direction."""
        for n in range(2):
            run("tc", "-n", self.spaces[n], "qdisc", "add", "dev", self.devices[n], "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
