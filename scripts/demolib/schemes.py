"""Ways to keep two copies in one store: plain files, Lamassu with three kinds of key sharing, gocryptfs.

A scheme knows how to prepare two places in a store and how to open each of them for plain reading and writing.
"""

import contextlib
import os
import secrets
import tempfile

from .shell import Undo, run, unmount


class Plain:
    name = "plain files"

    def __init__(self, store):
        self.folders = [os.path.join(store, copy) for copy in ("first", "second")]
        for folder in self.folders:
            os.mkdir(folder)

    @contextlib.contextmanager
    def opened(self, copy, work, read_only=False):
        del work, read_only
        yield self.folders[copy]


class Mounted(Plain):
    """What gocryptfs and Lamassu have in common: a place is mounted while it is used."""

    def mount(self, copy, mountpoint, read_only):
        raise NotImplementedError

    def umount(self, mountpoint):
        return run("fusermount3", "-u", mountpoint, check=False)

    @contextlib.contextmanager
    def opened(self, copy, work, read_only=False):
        with Undo() as undo:
            mountpoint = tempfile.mkdtemp(prefix="mnt-", dir=work)
            undo.callback(os.rmdir, mountpoint)
            undo.callback(unmount, mountpoint, self.umount)
            self.mount(copy, mountpoint, read_only)
            yield mountpoint


class Gocryptfs(Mounted):
    """Two vaults under one passphrase: gocryptfs gives each a key and each file a random nonce."""

    name = "gocryptfs"

    def __init__(self, store, keys):
        super().__init__(store)
        self.passphrase = os.path.join(keys, f"gocryptfs-{secrets.token_hex(4)}.pass")
        write_secret(self.passphrase, secrets.token_hex(16).encode())
        for folder in self.folders:
            run("gocryptfs", "-init", "-q", "-scryptn", 10, "-passfile", self.passphrase, folder)

    def mount(self, copy, mountpoint, read_only):
        options = ["-ro"] if read_only else []
        run("gocryptfs", "-q", *options, "-passfile", self.passphrase, self.folders[copy], mountpoint)


class Lamassu(Mounted):
    """Two vaults. `zones`: the zone of each; `outer`: whether the second shares K_out with the first."""

    def __init__(self, program, zones, store, keys, name, places):
        super().__init__(store)
        self.program, self.name = program, name
        self.keys = []
        for folder, (zone, outer) in zip(self.folders, places):
            key = os.path.join(keys, f"vault-{secrets.token_hex(4)}.key")
            write_secret(key, secrets.token_bytes(32))
            self.keys.append(f"raw:file:{key}")
            zone_file, zone_key = zones.get(zone)
            run(program, "init", "--key", self.keys[-1], "--zone", zone_file, "--zone-key", zone_key, "--outer", outer, folder)

    def mount(self, copy, mountpoint, read_only):
        options = ["--read-only"] if read_only else []
        run(self.program, "mount", "--key", self.keys[copy], *options, self.folders[copy], mountpoint)

    def umount(self, mountpoint):
        return run(self.program, "umount", mountpoint, check=False)


class Zones:
    """Isolation zones by name, made when first asked for."""

    def __init__(self, program, keys):
        self.program, self.keys, self.made = program, keys, {}

    def get(self, zone):
        if zone not in self.made:
            key = os.path.join(self.keys, f"zone-{zone}.key")
            write_secret(key, secrets.token_bytes(32))
            file = os.path.join(self.keys, f"zone-{zone}.json")
            run(self.program, "zone", "create", "--key", f"raw:file:{key}", file)
            self.made[zone] = (file, f"raw:file:{key}")
        return self.made[zone]


ONE_ZONE, OWN_OUTER, TWO_ZONES = "Lamassu, one zone, K_out shared", "Lamassu, one zone, K_out own", "Lamassu, two zones"
LAMASSU_PLACES = {
    ONE_ZONE: [("blue", "shared"), ("blue", "shared")],
    OWN_OUTER: [("blue", "shared"), ("blue", "own")],
    TWO_ZONES: [("blue", "shared"), ("green", "shared")],
}


def all_schemes(program, keys):
    """name → maker of the scheme in a store, in the order of the table's rows."""
    zones = Zones(program, keys)

    def lamassu(name):
        return lambda store: Lamassu(program, zones, store, keys, name, LAMASSU_PLACES[name])

    makers = {Plain.name: Plain}
    makers.update({name: lamassu(name) for name in LAMASSU_PLACES})
    makers[Gocryptfs.name] = lambda store: Gocryptfs(store, keys)
    return makers


def write_secret(path, content):
    """A key file that only its owner may read."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
