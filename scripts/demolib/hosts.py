"""Hosts that share a store: each has a network namespace, a mount namespace and a state of its own on this machine.

They are joined by a bridge. The store is a directory that all of them see, as it would be on a NAS. Needs root and `ip`.
"""

import os
import pathlib
import random
import subprocess
import time

from .network import drop_space
from .shell import DemoError, have, run

TOOLS = ("ip", "nsenter", "unshare")


def possible():
    return os.geteuid() == 0 and all(have(tool) for tool in TOOLS)


class Bridge:
    """Gives each host an address; its link can be cut."""

    def __init__(self, undo):
        self.tag = f"{os.getpid() & 0xFFFF:04x}{random.randrange(1 << 8):02x}"
        self.net = f"10.{random.randrange(64, 128)}.{random.randrange(256)}."
        self.space = f"lamassu-b{self.tag}"
        self.hosts = 0
        add_space(undo, self.space)
        run("ip", "-n", self.space, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self.space, "link", "set", "br0", "up")

    def join(self, space):
        """Joins a network namespace; returns its address and its end of the link."""
        self.hosts += 1
        near, far, address = f"l{self.tag}n{self.hosts}", f"l{self.tag}f{self.hosts}", f"{self.net}{self.hosts}"
        run("ip", "link", "add", near, "netns", space, "type", "veth", "peer", "name", far, "netns", self.space)
        run("ip", "-n", self.space, "link", "set", far, "master", "br0", "up")
        run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", near)
        for device in ("lo", near):
            run("ip", "-n", space, "link", "set", device, "up")
        return address, far

    def link(self, far, state):
        run("ip", "-n", self.space, "link", "set", far, state)


def add_space(undo, name):
    run("ip", "netns", "add", name)
    undo.callback(drop_space, name)


class Host:
    """One machine."""

    def __init__(self, undo, bridge, name, work):
        self.name, self.work = name, pathlib.Path(work) / name
        self.mountpoint = self.work / "mnt"
        self.mountpoint.mkdir(parents=True)
        space = f"lamassu-{name}{bridge.tag}"
        add_space(undo, space)
        self.address, self.port = bridge.join(space)
        self.bridge = bridge
        # It holds the mount namespace, with all that is mounted there.
        command = ["nsenter", f"--net=/run/netns/{space}", "unshare", "--mount", "--propagation", "private", "sleep", "infinity"]
        self.holder = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        undo.callback(self._end)
        self._wait_for_holder()

    def _wait_for_holder(self):
        for _ in range(200):
            if os.readlink(f"/proc/{self.holder.pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt"):
                return
            time.sleep(0.02)
        raise DemoError(f"{self.name} has no mount namespace of its own")

    def _end(self):
        self.run("umount", "-l", self.mountpoint, check=False)
        self.holder.kill()
        self.holder.wait()

    def _inside(self):
        return ["nsenter", f"--target={self.holder.pid}", "--net", "--mount"]

    def _env(self):
        return {"HOME": str(self.work), "XDG_STATE_HOME": str(self.work / "state"), "XDG_CONFIG_HOME": ""}

    def run(self, *argv, **options):
        options["env"] = {**self._env(), **options.get("env", {})}
        return run(*self._inside(), *argv, **options)

    def start(self, *argv, log):
        """A program that runs on; the caller ends it."""
        path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
        with open(log, "ab") as file:
            return subprocess.Popen([*self._inside(), *map(str, argv)], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                                    env={**os.environ, **self._env(), "PATH": path})

    def talk(self, *argv, log):
        """A program that answers lines with lines; the caller ends it."""
        with open(log, "ab") as file:
            return subprocess.Popen([*self._inside(), *map(str, argv)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
                                    text=True, env={**os.environ, **self._env()})

    def has_mounted(self, place):
        with open(f"/proc/{self.holder.pid}/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
            return any(line.split(" ")[1] == str(place) for line in mounts)

    def link(self, state):
        """Its cable: `up` or `down`."""
        self.bridge.link(self.port, state)

    def read(self, name):
        """What a program on this host reads; None: an error."""
        said = self.run("cat", self.mountpoint / name, check=False)
        return said.stdout if said.returncode == 0 else None

    def write(self, name, text):
        """Writes a file and syncs it; whether that was acknowledged."""
        path = self.mountpoint / name
        script = 'printf %s "$2" > "$1" && sync "$1"'
        return self.run("sh", "-c", script, "sh", path, text, check=False).returncode == 0


def within(seconds, attempt):
    """Tries until it gives something; what it gives, and how long that took."""
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        if done := attempt():
            return done, time.monotonic() - begun
        time.sleep(0.2)
    return None, seconds

