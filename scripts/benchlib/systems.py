"""The file systems that are measured, each with the options it has by default.

A system makes its store in an empty directory, and serves it from a foreground process, so that this process's time and
memory can be read. Passphrases are made for the run and lie in a directory in memory.
"""

import copy
import os
import secrets
import subprocess

from demolib.schemes import write_secret
from demolib.shell import have, run

PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


class System:
    """`name` in tables; `package` is Debian's."""

    name = command = package = ""
    mount_options = ()
    environment = {}

    def __init__(self, keys):
        self.keys = keys

    def with_mount(self, options, environment):
        """The same with further options of the mount, and a changed environment; only Lamassu's own take options."""
        changed = copy.copy(self)
        changed.mount_options, changed.environment = (*self.mount_options, *options), environment
        return changed

    def there(self):
        return have(self.command)

    def version(self):
        """Debian's, as not every peer knows its own."""
        return run("dpkg-query", "-W", "-f", "${Version}", self.package, check=False).stdout.strip() or "not from Debian"

    def make(self, store):
        """Prepares an empty directory."""

    def argv(self, store, mountpoint):
        """The foreground process that serves `store`."""
        raise NotImplementedError

    def start(self, store, mountpoint):
        environment = {**os.environ, "PATH": PATH, "LC_ALL": "C.UTF-8", "CRYFS_FRONTEND": "noninteractive", **self.state(store), **self.environment}
        process = subprocess.Popen([str(a) for a in self.argv(store, mountpoint)], stdin=subprocess.PIPE, env=environment,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        process.stdin.write(self.typed())
        process.stdin.close()
        return process

    def state(self, store):
        """Where what it keeps of a store outside of it lies: on the same kind of medium, or a store in memory would be compared with a disk."""
        memory = os.path.dirname(self.keys)
        return {"XDG_STATE_HOME": os.path.join(memory, "state")} if store.startswith(memory + os.sep) else {}

    def typed(self):
        """What is typed at the process's standard input."""
        return b""

    def passphrase(self):
        path = os.path.join(self.keys, f"{self.name}.pass")
        if not os.path.exists(path):
            write_secret(path, secrets.token_hex(16).encode())
        return path

    def umount(self, mountpoint):
        return run("fusermount3", "-u", mountpoint, check=False)


class Lamassu(System):
    name = "lamassu"

    def __init__(self, keys, program, init=(), mount=(), name=None):
        super().__init__(keys)
        self.command, self.init_options, self.mount_options = program, init, mount
        self.name = name or self.name

    def there(self):
        return os.access(self.command, os.X_OK)

    def version(self):
        return run(self.command, "--version").stdout.strip().removeprefix("lamassu ")

    def key(self):
        path = os.path.join(self.keys, "lamassu.key")
        if not os.path.exists(path):
            write_secret(path, secrets.token_bytes(32))
        return f"raw:file:{path}"

    def make(self, store):
        run(self.command, "init", "--key", self.key(), *self.init_options, store, env=self.state(store))

    def argv(self, store, mountpoint):
        return [self.command, "mount", "--foreground", "--key", self.key(), *self.mount_options, store, mountpoint]

    def umount(self, mountpoint):
        return run(self.command, "umount", mountpoint, check=False)


class Awake(Lamassu):
    """With `keep_awake=always`, which takes a device that root alone may open."""

    def there(self):
        return super().there() and os.access("/dev/cpu_dma_latency", os.W_OK)


class PlainFs(System):
    """The same front-end without encryption (`make bench-programs`): what Lamassu's cryptography and format cost is the difference."""

    name = "plainfs"

    def __init__(self, keys, program):
        super().__init__(keys)
        self.command = os.path.join(os.path.dirname(program), "examples", "passthrough")

    def there(self):
        return os.access(self.command, os.X_OK)

    def with_mount(self, options, environment):
        """It has no ciphers: what changes with the options is elsewhere."""
        return self

    def argv(self, store, mountpoint):
        return [self.command, store, mountpoint]


class Measured(Lamassu):
    """The example `measured` of lamassu-fuse: ciphers by a loop-back device, or their time told by stage."""

    def __init__(self, keys, program, how, integrity="full", mount=()):
        super().__init__(keys, program, mount=mount, name=how)
        self.how, self.integrity = how, integrity
        self.example = os.path.join(os.path.dirname(program), "examples", "measured")

    def there(self):
        return os.access(self.example, os.X_OK)

    def argv(self, store, mountpoint):
        key = self.key().removeprefix("raw:file:")
        return [self.example, self.how, self.integrity, key, store, mountpoint, *self.mount_options]

    def umount(self, mountpoint):
        return System.umount(self, mountpoint)


class Bindfs(System):
    name = command = package = "bindfs"

    def argv(self, store, mountpoint):
        return ["bindfs", "-f", store, mountpoint]


class Gocryptfs(System):
    name = command = package = "gocryptfs"

    def make(self, store):
        run("gocryptfs", "-init", "-q", "-scryptn", 10, "-passfile", self.passphrase(), store)

    def argv(self, store, mountpoint):
        return ["gocryptfs", "-fg", "-q", "-passfile", self.passphrase(), store, mountpoint]


class Securefs(System):
    name = command = package = "securefs"

    def make(self, store):
        run("securefs", "create", "--keyfile", self.passphrase(), "--pbkdf", "pkcs5-pbkdf2-hmac-sha256", "-r", 1000, store)

    def argv(self, store, mountpoint):
        return ["securefs", "mount", "--keyfile", self.passphrase(), store, mountpoint]


class Cryfs(System):
    """Its passphrase is stretched by scrypt with fixed costs; only mounting feels that."""

    name = command = package = "cryfs"

    def argv(self, store, mountpoint):
        config = os.path.join(self.keys, f"cryfs-{os.path.basename(os.path.dirname(store))}.config")
        return ["cryfs", "-f", "--allow-replaced-filesystem", "--config", config, store, mountpoint]

    def typed(self):
        with open(self.passphrase(), "rb") as file:
            return file.read() + b"\n"


class Encfs(Cryfs):
    name = command = package = "encfs"

    def argv(self, store, mountpoint):
        return ["encfs", "-f", "-S", "--standard", store, mountpoint]


def all_systems(program, keys):
    """Every system by name, in the order of the tables."""
    systems = [
        Lamassu(keys, program),
        Lamassu(keys, program, mount=["--integrity", "metadata"], name="lamassu-metadata"),
        Lamassu(keys, program, init=["--anchor", "none"], name="lamassu-unanchored"),
        Awake(keys, program, mount=["-o", "keep_awake=always"], name="lamassu-awake"),
        PlainFs(keys, program),
        Bindfs(keys), Gocryptfs(keys), Securefs(keys), Cryfs(keys), Encfs(keys),
    ]
    return {system.name: system for system in systems}
