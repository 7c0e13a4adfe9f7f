"""A vault on sshfs: its store lies behind a network, which is cut and mended.

The server, an sshd with keys and a configuration of its own, lives in one network namespace, the client (ssh) in another; a pair of virtual
devices joins them. Needs root, `ip`, sshfs, sshd.
"""

import contextlib
import ctypes
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time

from lab import ROOT, Failure, Lab, call, is_mounted

CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)

# What one call of an application may take while the link is down, in seconds: longer is a hang. ssh gives up after 2 × 2 s.
PATIENCE_SECONDS = 90

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
    if os.geteuid() != 0:
        return False
    return all(shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin:/sbin") for tool in ("ip", "sshfs", "sshd", "ssh-keygen"))


class Network:
    """Two namespaces and what runs in them; a context manager. `lab.store` is what the server has, `lab.path / "far"` the same through sshfs."""

    def __init__(self, lab):
        self.lab = lab
        self.dir = lab.path / "ssh"
        self.near = lab.path / "far"
        tag = f"{os.getpid() & 0xFFFF:04x}{random.randrange(1 << 16):04x}"
        self.spaces = (f"lamassu-s{tag}", f"lamassu-c{tag}")
        self.devices = (f"ls{tag}", f"lc{tag}")
        self.address = f"10.{random.randrange(64, 128)}.{random.randrange(256)}."
        self.sshd = None

    def inside(self, n):
        return ["nsenter", f"--net=/run/netns/{self.spaces[n]}"]

    def __enter__(self):
        try:
            self.join()
            self.serve()
            self.connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for vault in self.lab.vaults:
            vault.bury()
        if is_mounted(self.near):
            subprocess.run(["umount", "-l", str(self.near)], capture_output=True)
        if self.sshd is not None:
            self.sshd.kill()
            self.sshd.wait()
        for space in self.spaces:
            # What still runs in there (ssh, the server's sessions) is ours.
            found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout
            for pid in found.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            subprocess.run(["ip", "netns", "del", space], capture_output=True)

    def join(self):
        for space in self.spaces:
            call("ip", "netns", "add", space)
        call("ip", "link", "add", self.devices[0], "netns", self.spaces[0], "type", "veth", "peer", "name", self.devices[1], "netns", self.spaces[1])
        for n in range(2):
            call("ip", "-n", self.spaces[n], "addr", "add", f"{self.address}{n + 1}/24", "dev", self.devices[n])
            call("ip", "-n", self.spaces[n], "link", "set", "lo", "up")
            call("ip", "-n", self.spaces[n], "link", "set", self.devices[n], "up")

    def serve(self):
        self.dir.mkdir()
        for key in ("host", "user"):
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.dir / key))
        (self.dir / "sshd_config").write_text(SSHD.format(dir=self.dir), encoding="ascii")
        pathlib.Path("/run/sshd").mkdir(exist_ok=True)
        sshd = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin")
        log = open(self.dir / "log", "wb")
        self.sshd = subprocess.Popen([*self.inside(0), sshd, "-D", "-e", "-f", str(self.dir / "sshd_config")], stderr=log, stdin=subprocess.DEVNULL)
        log.close()

    def connect(self):
        self.near.mkdir()
        options = [f"IdentityFile={self.dir}/user", f"UserKnownHostsFile={self.dir}/known", "StrictHostKeyChecking=accept-new"]
        options += ["reconnect", "ServerAliveInterval=2", "ServerAliveCountMax=2", "ConnectTimeout=3", "BatchMode=yes"]
        command = [*self.inside(1), "sshfs", f"root@{self.address}1:{self.lab.store}", str(self.near), "-o", ",".join(options)]
        for _ in range(50):
            said = subprocess.run(command, capture_output=True, text=True, timeout=30)
            if said.returncode == 0:
                return
            time.sleep(0.2)
        raise Failure(f"sshfs: {said.stderr}\n{(self.dir / 'log').read_text()}")

    def link(self, state):
        call("ip", "-n", self.spaces[0], "link", "set", self.devices[0], state)
        if state == "up":  # a device that went down has lost its address's route, not the address
            call("ip", "-n", self.spaces[0], "addr", "replace", f"{self.address}1/24", "dev", self.devices[0])


@contextlib.contextmanager
def far_vault(*options):
    """A vault behind the network, not mounted yet, and the network."""
    with Lab() as lab, Network(lab) as network:
        lab.store = network.near
        yield lab.vault("v", *options), network


def compare(left, right):
    done = subprocess.run(["diff", "-r", "--no-dereference", str(left), str(right)], capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise Failure(f"the copy differs: {done.stdout[:2000]}{done.stderr[:2000]}")
