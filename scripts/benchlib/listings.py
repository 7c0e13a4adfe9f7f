"""Listings of a bucket with many keys, by the gateway over a vault and by the access proxy of a provider.

Half of the keys lie in one directory, and the others in directories of a thousand each. All are listed in pages of 1,000, by both versions of the operation; then
groups, a prefix, and pages from random places. Keys are compared with those that were made. Stores lie in memory. Times are of whole requests; client and server
share the machine.
"""

import http.client
import os
import pathlib
import random
import re
import shutil
import statistics
import tempfile
import time

from demolib.shell import DemoError, Undo, say

from . import s3load, tenants

PAGE = 1000
RANDOM_PAGES = 200
# A page of a directory that has just changed is not kept (`objects/names.rs`).
SETTLES_S = 3


def run_all(bench):
    count, samples = bench.size(1_000_000, 4000), []
    keys = names(count)
    with Undo() as undo:
        work = pathlib.Path(tempfile.mkdtemp(prefix="listings-", dir=bench.memory))
        undo.callback(shutil.rmtree, work, ignore_errors=True)
        for name in tenants.SYSTEMS:
            server = {"gateway": tenants.Gateway, "proxy": tenants.Proxy}[name](undo, bench, work / name)
            filled = {"gateway": fill_vault, "proxy": fill_directory}[name](server, keys)
            time.sleep(SETTLES_S)
            with Undo() as running, bench.quiet():
                server.start(running)
                found = {"system": name, "run": 0, "filled_s": filled, **listed(server, keys)}
            samples.append(found)
            say(f"listings, {name}: {count} keys, the first page after {found['v2_first_ms']:.0f} ms, pages of {found['v2_p50_ms']:.1f} ms, "
                f"all after {found['v2_s']:.0f} s; at most {found['peak_mib']:.0f} MiB")
    return {"keys": count, "page": PAGE, "random_pages": RANDOM_PAGES, "runs": 1, "samples": samples}


def names(count):
    """Sorted."""
    half = count // 2
    return [f"flat/{n:07}" for n in range(half)] + [f"tree/{n // 1000:04}/{n:07}" for n in range(count - half)]


def make(below, keys):
    # The proxy takes no directory that others may enter.
    before = os.umask(0o077)
    for folder in sorted({os.path.dirname(key) for key in keys}):
        os.makedirs(below / folder, exist_ok=True)
    for key in keys:
        os.close(os.open(below / key, os.O_CREAT | os.O_WRONLY | os.O_EXCL))
    os.umask(before)


def fill_vault(server, keys):
    """By `lamassu cp`: a program that has copied files there."""
    plain = server.work / "plain"
    make(plain, keys)
    begun = time.monotonic()
    key = f"raw:file:{server.work}/vault.key"
    server.lamassu("cp", "-r", "-k", key, server.work / "vault", plain / "flat", plain / "tree", "vault:/steady")
    took = time.monotonic() - begun
    shutil.rmtree(plain)
    return took


def fill_directory(server, keys):
    """As files are there that others have made."""
    begun = time.monotonic()
    make(server.work / "store" / "steady" / server.clients["steady"]["prefix"], keys)
    return time.monotonic() - begun


class Lister:
    """A client that lists, and compares."""

    def __init__(self, server):
        self.client, self.prefix = s3load.Client(server.clients["steady"]), server.clients["steady"]["prefix"]

    def page(self, **query):
        """Keys, groups, the start of the next page, and seconds."""
        url = self.client.url("GET", **query)
        begun = time.monotonic()
        status, text = self.ask(url)
        took = time.monotonic() - begun
        if status != 200:
            raise DemoError(f"a listing was answered with {status}: {text[:300]}")
        element = lambda name: re.findall(f"<{name}>([^<]*)</{name.split('>')[-1].lstrip('<')}>", text)
        plain = lambda found: [name.removeprefix(self.prefix) for name in found]
        groups = element("CommonPrefixes><Prefix")
        truncated = "<IsTruncated>true</IsTruncated>" in text
        token = (element("NextContinuationToken") or [None])[0]
        return plain(element("Key")), plain(groups), truncated, token, took

    def ask(self, url):
        connection = getattr(self, "connection", None)
        if connection is None:
            connection = self.connection = http.client.HTTPConnection(self.client.said["address"], timeout=600)
        connection.request("GET", url)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def all(self, version, prefix=""):
        """Keys in order, and the seconds of each page."""
        keys, times, more = [], [], {}
        while True:
            query = {"max-keys": str(PAGE), "prefix": self.prefix + prefix, **({"list-type": "2"} if version == 2 else {}), **more}
            found, _, truncated, token, took = self.page(**query)
            keys += found
            times.append(took)
            if not truncated:
                return keys, times
            more = {"continuation-token": token} if version == 2 else {"marker": self.prefix + found[-1]}


def listed(server, keys):
    lister, found = Lister(server), {}
    for version in (2, 1):
        seen, times = lister.all(version)
        if seen != keys:
            raise DemoError(f"version {version} lists {len(seen)} keys of {len(keys)}, or others, or in another order")
        found |= {f"v{version}_s": sum(times), f"v{version}_first_ms": 1000 * times[0], f"v{version}_p50_ms": 1000 * statistics.median(times),
                  f"v{version}_max_ms": 1000 * max(times[1:] or times)}
    _, groups, _, _, took = lister.page(**{"list-type": "2", "delimiter": "/", "prefix": lister.prefix})
    same(groups, ["flat/", "tree/"])
    found["groups_ms"] = 1000 * took
    _, groups, _, _, took = lister.page(**{"list-type": "2", "delimiter": "/", "prefix": lister.prefix + "tree/"})
    same(groups, sorted({key[:10] for key in keys if key.startswith("tree/")})[:PAGE])
    found["folders_ms"] = 1000 * took
    begin = keys[len(keys) // 4][:-3]
    seen, times = lister.all(2, begin)
    same(seen, [key for key in keys if key.startswith(begin)])
    found["prefix_ms"] = 1000 * times[0]
    times = []
    for _ in range(RANDOM_PAGES):
        at = random.randrange(len(keys))
        seen, _, _, _, took = lister.page(**{"list-type": "2", "prefix": lister.prefix, "start-after": lister.prefix + keys[at]})
        same(seen, keys[at + 1:at + 1 + PAGE])
        times.append(took)
    times.sort()
    found |= {"random_p50_ms": 1000 * statistics.median(times), "random_p99_ms": 1000 * times[len(times) * 99 // 100]}
    memory = dict(re.findall(r"(VmHWM|VmRSS):\s+(\d+) kB", pathlib.Path(f"/proc/{server.pid}/status").read_text()))
    return found | {"peak_mib": int(memory["VmHWM"]) / 1024, "after_mib": int(memory["VmRSS"]) / 1024}


def same(found, expected):
    if found != expected:
        raise DemoError(f"a page has {len(found)} names where there are {len(expected)}, or others: {found[:3]} in place of {expected[:3]}")
