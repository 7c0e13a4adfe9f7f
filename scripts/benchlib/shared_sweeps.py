"""The SAN.FS report's experiments with the server in the path: Figures 5 to 7 (dbench by clients, writing by cipher threads, Postmark by largest file),
Table 2 (a large file in sequence) and Table 3 (Postmark by cipher and integrity).

Server and host are namespaces of this machine, the store is a directory in memory, and one host works. `lamassu` has its anchor in a file of the host,
`server` at the server, mounted by one host alone, and `shared` is `mount --shared`. `bare` has no integrity: no anchor, and no hash of a block is computed
again. Only a vault without a server can be so.
"""

from demolib.hosts import TOOLS, possible
from demolib.shell import DemoError, Undo, have, say

from . import integrity, measure, sweeps
from .shared import Place, System
from .small_files import dbench

BARE = System(init=("--anchor", "none"), mount=("--integrity", "metadata"), at_server=False)
BY_ANCHOR = {"lamassu": System(at_server=False), "server": System(), "shared": System(mount=("--shared",))}
CIPHERS = {f"{name}, {suite}": System(init=("--suite", suite), mount=system.mount, at_server=system.at_server)
           for suite in ("paper", "blake3", "chacha") for name, system in BY_ANCHOR.items() if name != "server"}
FIGURES = ("clients", "cipher-threads", "postmark-size")
# SAN.FS's Table 3 has 1000 files and 500 transactions; 10 GB would not lie in memory beside all the rest.
FILES, TRANSACTIONS = 200, 100


def run_all(bench):
    if not possible():
        raise DemoError(f"a host beside the server takes root and {', '.join(TOOLS)}")
    samples = []
    with Undo() as undo:
        place = Place(undo, bench, BY_ANCHOR | {"bare": BARE} | CIPHERS)
        for number, name in measure.alternating(list(place.systems), bench.runs, bench.minutes):
            found = [{"workload": w, "point": p, "value": round(v, 2), "system": name, "run": number} for w, p, v in passes(bench, place, name)]
            samples += found
            say(f"shared-sweeps, run {number + 1} of {bench.runs}, {name}: " + ", ".join(f"{s['workload']} {s['point']} {s['value']}" for s in found))
    return {"runs": 1 + samples[-1]["run"], "size_mib": bench.size(1024, 8), "files": bench.size(FILES, 20), "store": "tmpfs", "samples": samples,
            "figures": {name: {"title": sweeps.SWEEPS[name].title, "axis": sweeps.SWEEPS[name].axis, "unit": sweeps.SWEEPS[name].unit} for name in FIGURES}}


def passes(bench, place, name):
    """(workload, point, value): the figures by the place of the anchor, Table 2 for these and `bare`, Table 3 for all."""
    host, path = place.hosts[0], place.hosts[0].mountpoint

    def anew(work):
        host.run("rm", "-f", path / "bench.dat")
        return work()

    on_host = {
        "clients": lambda clients: dbench(path, bench.size(5, 2), clients, host.run),
        "cipher-threads": lambda _: anew(lambda: sweeps.write_1m(bench, path, run=host.run)),
        "postmark-size": lambda kib: measure.seconds_of("postmark", stdin=sweeps.postmark_script(bench, path, kib), run=host.run),
    }
    for figure in FIGURES if name in BY_ANCHOR else ():
        sweep = sweeps.SWEEPS[figure]
        for point in bench.size(sweep.points, sweep.toys) if all(map(have, sweep.needs)) else ():
            options, _ = sweep.mount(point)
            yield figure, point, place.alone(name, lambda work=on_host[figure], p=point: work(p), options)
    if name not in CIPHERS:
        yield "table 2", "write", place.alone(name, lambda: anew(lambda: place.fio(host, "write", "1m", bench.size(1024, 8))))
        yield "table 2", "read", place.alone(name, lambda: place.fio(host, "read", "1m", bench.size(1024, 8)))
        place.alone(name, lambda: host.run("rm", path / "bench.dat"))
    if have("postmark"):
        yield "table 3", "Postmark", place.alone(name, lambda: integrity.postmark(bench, path, bench.size(FILES, 20), bench.size(TRANSACTIONS, 20), host.run))
