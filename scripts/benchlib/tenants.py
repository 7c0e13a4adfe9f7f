"""Two tenants of one server of S3: one asks at a steady rate, alone and beside another that floods the server.

By the gateway over a vault and by the access proxy of a provider, each with the limits it has by default. The steady client asks for 30 objects a second and puts 10,
of 256 KiB; times count from when a request was due. The flood asks by 128 threads: puts and gets of 16 MiB, listings, connections that are opened and held, from
another address. Everything runs on one machine; the flood's client has the lowest priority there, so that it takes the server's time and not the processor's, as a
client elsewhere would.
"""

import json
import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time

from demolib.schemes import write_secret
from demolib.shell import DemoError, Undo, run, say

from . import measure, s3load

SYSTEMS = ("gateway", "proxy")
TENANTS = ("steady", "flood")
LOAD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "s3load.py")
SERVED_SECONDS_MAX = 60


def run_all(bench):
    seconds, listed, samples = bench.size(20, 1), bench.size(1000, 50), []
    with Undo() as undo:
        work = pathlib.Path(tempfile.mkdtemp(prefix="tenants-", dir=bench.work))
        undo.callback(shutil.rmtree, work, ignore_errors=True)
        servers = {name: {"gateway": Gateway, "proxy": Proxy}[name](undo, bench, work / name) for name in SYSTEMS}
        for number, name in measure.alternating(list(SYSTEMS), bench.runs, bench.minutes):
            server = servers[name]
            with Undo() as running:
                server.start(running)
                # A second's worth of requests first: what a new process does once is no cost of a flood.
                steady(server, 1, prepare=number == 0)
                with bench.quiet():
                    alone = steady(server, seconds)
                    flooding = begin(running, server, prepare=0 if number else listed)
                    time.sleep(1)
                    beside = steady(server, seconds)
                flood = json.loads(flooding.communicate()[0].strip().splitlines()[-1])
            for found, is_beside in ((alone, False), (beside, True)):
                samples.append({"system": name, "run": number, "beside": is_beside, **found, **({"flood": flood} if is_beside else {})})
            say(f"tenants, run {number + 1} of {bench.runs}, {name}: {alone['rate']:.1f} requests/s alone and {beside['rate']:.1f} beside a flood of "
                f"{flood['mib_s']:.0f} MiB/s; p99 of GET {alone['get_p99_ms'] or 0:.0f} and {beside['get_p99_ms'] or 0:.0f} ms, of PUT {alone['put_p99_ms'] or 0:.0f} "
                f"and {beside['put_p99_ms'] or 0:.0f} ms")
    return {"seconds": seconds, "listed": listed, "body_kib": s3load.BODY >> 10, "gets_s": s3load.GETS, "puts_s": s3load.PUTS, "flood_mib": s3load.LARGE >> 20,
            "flood_threads": s3load.WRITERS + s3load.READERS + s3load.LISTERS + s3load.OPENERS, "runs": 1 + samples[-1]["run"], "samples": samples}


def steady(server, seconds, prepare=False):
    said = {**server.clients["steady"], "seconds": seconds, "prepare": prepare}
    return json.loads(run(sys.executable, "-B", LOAD, "steady", stdin=json.dumps(said) + "\n").stdout)


def begin(undo, server, prepare):
    flood = subprocess.Popen([sys.executable, "-B", LOAD, "flood"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.nice(19))
    undo.callback(flood.kill)
    flood.stdin.write(json.dumps({**server.clients["flood"], "from": "127.0.0.2", "prepare": prepare}) + "\n")
    flood.stdin.flush()
    if flood.stdout.readline().strip() != "begun":
        raise DemoError("the flood does not begin")
    return flood


class Server:
    """A program that serves at `address` until it is stopped; `clients`: what each tenant's client is given."""

    def __init__(self, bench, work):
        self.program, self.work, self.clients = bench.program, work, {}
        work.mkdir(mode=0o700)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.env = {"XDG_STATE_HOME": str(work / "state"), "HOME": str(work)}

    def lamassu(self, *argv, env={}, stdin=None):
        return run(self.program, "-q", *argv, env={**self.env, **env}, stdin=stdin).stdout.strip()

    def file(self, name, text):
        path = self.work / name
        write_secret(path, text.encode())
        return path

    def start(self, undo):
        with open(self.work / "log", "ab") as log:
            argv = [str(word) for word in (self.program, *self.command)]
            running = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **self.env})
        self.pid = running.pid

        def end():
            running.terminate()
            running.wait()

        undo.callback(end)
        until = time.monotonic() + SERVED_SECONDS_MAX
        while time.monotonic() < until and running.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                time.sleep(0.05)
        raise DemoError(f"it does not serve: {(self.work / 'log').read_text(errors='replace')[-500:]}")


class Gateway(Server):
    """Buckets of a vault."""

    def __init__(self, undo, bench, work):
        super().__init__(bench, work)
        write_secret(work / "vault.key", secrets.token_bytes(32))
        key = f"raw:file:{work}/vault.key"
        self.lamassu("init", "--key", key, work / "vault")
        users = []
        for tenant in TENANTS:
            access, secret = tenant.upper(), secrets.token_hex(20)
            users.append(f'[[user]]\nname = "{tenant}"\naccess_key = "{access}"\nsecret_key = "{secret}"\nwrite = ["{tenant}"]\nmake_buckets = true\n')
            self.clients[tenant] = {"address": self.address, "access_key": access, "secret_key": secret, "bucket": tenant, "prefix": ""}
        self.file("credentials.toml", "\n".join(users))
        config = self.file("gateway.toml", f'vault = "{work}/vault"\nkey = "{key}"\nlisten = "{self.address}"\n')
        self.command = ("gateway", "s3", "--config", config)
        with Undo() as running:
            self.start(running)
            for tenant in TENANTS:
                client = s3load.Client(self.clients[tenant])
                if client.ask("PUT", client.url("PUT"))[0] != 200:
                    raise DemoError("no bucket can be made")


class Proxy(Server):
    """A bucket for each tenant, whose policy manager has issued a credential."""

    def __init__(self, undo, bench, work):
        super().__init__(bench, work)
        config = work / "proxy.toml"
        self.command = ("gateway", "provider", "--config", config)
        self.configure(config, {tenant: "0" * 64 for tenant in TENANTS})
        proxy = self.lamassu("gateway", "provider", "--config", config, "--public-key")
        managers = {tenant: work / f"{tenant}-policy" for tenant in TENANTS}
        keys = {tenant: {"LAMASSU_POLICY_KEY": f"raw:file:{work}/{tenant}.key"} for tenant in TENANTS}
        public = {}
        for tenant in TENANTS:
            write_secret(work / f"{tenant}.key", secrets.token_bytes(32))
            public[tenant] = self.lamassu("policy", "init", "--bucket", tenant, "--provider", proxy, managers[tenant], env=keys[tenant])
        self.configure(config, public)
        for tenant in TENANTS:
            def policy(*argv, stdin=None, tenant=tenant):
                return self.lamassu("policy", *argv, env=keys[tenant], stdin=stdin)

            policy("attribute", "set", managers[tenant], "department", "text")
            policy("person", "set", managers[tenant], "somebody", "department=any")
            policy("rule", "set", managers[tenant], "all", "-", stdin='permit(principal == User::"somebody", action, resource in Key::"home");')
            published = work / "published" / tenant
            published.mkdir(parents=True)
            policy("publish", "--to", published, managers[tenant])
            issued = json.loads(policy("issue", managers[tenant], "somebody"))
            prefix = policy("name", managers[tenant], "home/")
            self.clients[tenant] = {"address": self.address, "access_key": issued["AccessKeyId"], "secret_key": issued["SecretAccessKey"],
                                    "token": issued["SessionToken"], "bucket": tenant, "prefix": prefix if prefix.endswith("/") else prefix + "/"}

    def configure(self, config, public):
        lines = [f'store = "{self.work}/store"', f'state = "{self.work}/proxy-state"', f'listen = "{self.address}"', "status_seconds_max = 3600"]
        for tenant, key in public.items():
            lines += ["[[tenant]]", f'bucket = "{tenant}"', f'key = "{key}"', f'published = "{self.work}/published/{tenant}"']
        config.write_text("\n".join(lines) + "\n")
