"""What locks of programs cost: fcntl(2) and flock(2), a lock and its unlock, by a small program on a host.

`plain` is a directory in memory, and `lamassu` a mount of one host: the kernel keeps their locks. On a mount of several hosts, `shared`, the server is asked for
each. Two hosts that want one lock all the time: how many get it in a second, and how long one waits. The limit is `network`: a byte by TCP to the server's host and
back, without its program. sshfs has no locks among hosts.
"""

from concurrent.futures import ThreadPoolExecutor

from demolib.hosts import within
from demolib.shell import DemoError

PORT = 7434
KINDS = {"fcntl(2)": "lockf", "flock(2)": "flock"}
UNITS = {**{f"{kind}, lock and unlock": "µs" for kind in KINDS}, **{f"{kind}, two hosts, locks": "1/s" for kind in KINDS},
         **{f"{kind}, two hosts, longest wait": "ms" for kind in KINDS}, "TCP, there and back": "µs"}

# Prints the median, in µs.
ONE = """
import fcntl, statistics, sys, time
lock, file, took = getattr(fcntl, sys.argv[2]), open(sys.argv[1], "a+b"), []
for _ in range(int(sys.argv[3])):
    begun = time.perf_counter_ns()
    lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock(file, fcntl.LOCK_UN)
    took.append(time.perf_counter_ns() - begun)
print(statistics.median(took) / 1000)
"""
# Prints how often it had the lock, and its longest wait in ms.
TWO = """
import fcntl, sys, time
lock, file, count, longest = getattr(fcntl, sys.argv[2]), open(sys.argv[1], "a+b"), 0, 0
end = time.perf_counter() + float(sys.argv[3])
while (begun := time.perf_counter()) < end:
    lock(file, fcntl.LOCK_EX)
    longest = max(longest, time.perf_counter() - begun)
    lock(file, fcntl.LOCK_UN)
    count += 1
print(count, 1000 * longest)
"""
ECHO = """
import socket, sys
listening = socket.create_server((sys.argv[1], int(sys.argv[2])))
while True:
    with listening.accept()[0] as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while byte := peer.recv(1):
            peer.sendall(byte)
"""
ASK = """
import socket, statistics, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as peer:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    took = []
    for _ in range(int(sys.argv[3])):
        begun = time.perf_counter_ns()
        peer.sendall(b"x")
        peer.recv(1)
        took.append(time.perf_counter_ns() - begun)
print(statistics.median(took) / 1000)
"""


def passes(place, name):
    """Samples of a system of `place`; with those of `shared` come the limits."""
    if name not in ("lamassu", "shared"):
        return
    count = place.bench.size(3000, 100)
    for kind, call in KINDS.items():
        yield sample(name, f"{kind}, lock and unlock", place.alone(name, lambda c=call: one(place, place.hosts[0].mountpoint, c, count)))
    if name != "shared":
        return
    for kind, call in KINDS.items():
        seconds = place.bench.size(10, 1)
        pairs, longest = two(place, call, seconds)
        yield sample(name, f"{kind}, two hosts, locks", pairs / seconds)
        yield sample(name, f"{kind}, two hosts, longest wait", longest)
        with place.bench.quiet():
            yield sample("plain", f"{kind}, lock and unlock", one(place, place.work, call, count))
    with place.bench.quiet():
        yield sample("network", "TCP, there and back", there_and_back(place, count))


def sample(system, workload, value):
    return {"system": system, "workload": workload, "value": round(value, 1)}


def one(place, folder, call, count):
    return float(place.hosts[0].run("python3", "-c", ONE, folder / "locked", call, str(count)).stdout)


def two(place, call, seconds):
    """How often two hosts had the lock, and the longest wait in ms."""
    for host in place.hosts:
        place.mount(host, "shared")
    try:
        with place.bench.quiet(), ThreadPoolExecutor() as pool:
            runs = list(pool.map(lambda host: host.run("python3", "-c", TWO, host.mountpoint / "locked", call, str(seconds)), place.hosts))
        found = [tuple(map(float, run.stdout.split())) for run in runs]
        return sum(pairs for pairs, _ in found), max(longest for _, longest in found)
    finally:
        for host in place.hosts:
            place.umount(host, "shared")


def there_and_back(place, count):
    address, port = place.keeper.address, str(PORT)
    echo = place.keeper.start("python3", "-c", ECHO, address, port, log=place.work / "echo.log")
    try:
        asks = lambda: place.hosts[0].run("python3", "-c", ASK, address, port, str(count), check=False)  # noqa: E731
        said = within(10, lambda: (ran := asks()).returncode == 0 and ran.stdout)[0]
        if not said:
            raise DemoError(f"no TCP between hosts: {asks().stderr}")
        return float(said)
    finally:
        echo.kill()
        echo.wait()
