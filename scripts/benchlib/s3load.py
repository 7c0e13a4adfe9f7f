#!/usr/bin/env python3
"""Clients of S3 as load: one that asks at a steady rate, and one that asks for as much as it gets.

s3load.py steady|flood < JSON: {"address", "from", "access_key", "secret_key", "token", "bucket", "prefix", "seconds", "prepare"}. Writes what it found as JSON. All addresses are
signed before, so that clients cost little. A flood ends with its standard input.
"""

import hashlib
import hmac
import http.client
import json
import os
import sys
import threading
import time
import urllib.parse

BODY = 256 << 10
LARGE = 16 << 20
# The steady client: requests a second of each kind, and connections for each.
CONNECTIONS, GETS, PUTS = 4, 30, 10
KEYS = 64
# The flood: threads by what they do.
WRITERS, READERS, LISTERS, OPENERS = 64, 24, 24, 16


class Client:
    """Signs addresses, and asks by one connection a thread."""

    def __init__(self, said):
        self.said, self.here = said, threading.local()

    def url(self, method, key="", **query):
        date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        scope = f"{date[:8]}/us-east-1/s3/aws4_request"
        query |= {"X-Amz-Algorithm": "AWS4-HMAC-SHA256", "X-Amz-Credential": f"{self.said['access_key']}/{scope}", "X-Amz-Date": date, "X-Amz-Expires": "86400",
                  "X-Amz-SignedHeaders": "host"}
        if self.said.get("token"):
            query["X-Amz-Security-Token"] = self.said["token"]
        quote = lambda text: urllib.parse.quote(text, safe="-_.~")
        text = "&".join(f"{quote(name)}={quote(value)}" for name, value in sorted(query.items()))
        path = urllib.parse.quote(f"/{self.said['bucket']}" + (f"/{self.said['prefix']}{key}" if key else ""), safe="/-_.~")
        request = "\n".join([method, path, text, f"host:{self.said['address']}", "", "host", "UNSIGNED-PAYLOAD"])
        sign = ("AWS4" + self.said["secret_key"]).encode()
        for part in scope.split("/"):
            sign = hmac.new(sign, part.encode(), "sha256").digest()
        what = "\n".join(["AWS4-HMAC-SHA256", date, scope, hashlib.sha256(request.encode()).hexdigest()])
        return f"{path}?{text}&X-Amz-Signature={hmac.new(sign, what.encode(), 'sha256').hexdigest()}"

    def ask(self, method, url, body=None):
        """The status, and bytes of the answer; another connection after an error."""
        connection = getattr(self.here, "connection", None)
        if connection is None:
            connection = self.here.connection = http.client.HTTPConnection(self.said["address"], timeout=120, source_address=(self.said.get("from", "127.0.0.1"), 0))
        try:
            connection.request(method, url, body)
            answer = connection.getresponse()
            return answer.status, len(answer.read())
        except OSError:
            connection.close()
            self.here.connection = None
            raise


def steady(said):
    """Each request has its time. What is late is counted from then, so that a server that stalls cannot hide it."""
    client, seconds = Client(said), said["seconds"]
    body = os.urandom(BODY)
    gets = [client.url("GET", f"k{n}") for n in range(KEYS)]
    puts = [client.url("PUT", f"k{n}") for n in range(KEYS)]
    for url in puts if said.get("prepare") else []:
        status, _ = client.ask("PUT", url, body)
        if status != 200:
            raise SystemExit(f"the steady client's first puts are answered {status}")
    begun, lock, took, failed = time.monotonic() + 0.2, threading.Lock(), {"GET": [], "PUT": []}, []
    at = {kind: iter(range(10**9)) for kind in took}

    def work(kind, rate):
        while True:
            with lock:
                number = next(at[kind])
            due = begun + number / rate
            if due >= begun + seconds:
                return
            time.sleep(max(0, due - time.monotonic()))
            url = (gets if kind == "GET" else puts)[number * 7 % KEYS]
            try:
                status, _ = client.ask(kind, url, body if kind == "PUT" else None)
            except (OSError, http.client.HTTPException) as error:
                status = type(error).__name__
            with lock:
                if status == 200:
                    took[kind].append(time.monotonic() - due)
                else:
                    failed.append(status)

    threads = [threading.Thread(target=work, args=one) for one in (("GET", GETS), ("PUT", PUTS)) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {"rate": sum(map(len, took.values())) / max(seconds, time.monotonic() - begun), "failed": len(failed), "failures": sorted({str(status) for status in failed})}
    for kind, times in took.items():
        times.sort()
        for name, part in (("p50", 0.5), ("p99", 0.99)):
            found[f"{kind.lower()}_{name}_ms"] = 1000 * times[min(len(times) - 1, int(len(times) * part))] if times else None
    return found


def flood(said):
    """Large puts and gets, listings, and connections without end, all as fast as they are answered."""
    client, body = Client(said), os.urandom(LARGE)
    for n in range(said.get("prepare", 0)):
        client.ask("PUT", client.url("PUT", f"many/{n:05}"), b"x")
    counts, lock, ends = {"done": 0, "refused": 0, "broken": 0, "bytes": 0}, threading.Lock(), threading.Event()

    def count(**more):
        with lock:
            for name, value in more.items():
                counts[name] += value

    def work(kind, number):
        url = {"PUT": lambda: client.url("PUT", f"large{number}"), "GET": lambda: client.url("GET", f"large{number % WRITERS}"),
               "LIST": lambda: client.url("GET", **{"list-type": "2", "prefix": said["prefix"]}), "OPEN": lambda: client.url("GET", "many/00000")}[kind]()
        while not ends.is_set():
            try:
                status, size = client.ask("PUT" if kind == "PUT" else "GET", url, body if kind == "PUT" else None)
                if kind == "OPEN":
                    # It stays open, and another one is opened.
                    held.append(client.here.connection)
                    client.here.connection = None
                    if len(held) > 500:
                        held.pop(0).close()
                done = status in (200, 404)
                count(done=done, refused=not done, bytes=(size if kind != "PUT" else LARGE) * done)
                if not done:
                    time.sleep(0.01)
            except (OSError, http.client.HTTPException):
                count(broken=1)
                client.here.connection = None
                time.sleep(0.01)

    held = []
    kinds = ["PUT"] * WRITERS + ["GET"] * READERS + ["LIST"] * LISTERS + ["OPEN"] * OPENERS
    for number, kind in enumerate(kinds):
        threading.Thread(target=work, args=(kind, number), daemon=True).start()
    begun = time.monotonic()
    print("begun", flush=True)
    sys.stdin.read()
    ends.set()
    took = time.monotonic() - begun
    with lock:
        return {"requests_s": counts["done"] / took, "refused_s": counts["refused"] / took, "broken_s": counts["broken"] / took, "mib_s": counts["bytes"] / took / 2**20}


if __name__ == "__main__":
    asked = json.loads(sys.stdin.readline())
    print(json.dumps({"steady": steady, "flood": flood}[sys.argv[1]](asked)), flush=True)
    os._exit(0)  # threads of a flood may wait for an answer still
