"""One line for each measurement that has no encrypting file system as its peer: its figure, what it is compared with, and the ratio."""

from .. import published
from .compression import paired
from .figures import by, median, names, number, runs
from .savings import PLAIN, TARGET_POINTS, against_plain, saved
from .shared import TITLE
from .shared import ratio as ratio_of_hosts
from .tenants import TITLE as GATEWAYS

OWN = "lamassu"


def others(results):
    """Rows: experiment, what is measured, Lamassu's figure, what it is compared with, ratio."""
    found = []
    for name, part in PARTS.items():
        if name in results:
            rows = list(part(results[name]))
            found += [[f"`{name}`" if number == 0 else "", *row] for number, row in enumerate(rows)]
    return found


def conditions(results):
    return [f"`{name}`: {text(results[name])}" for name, text in CONDITIONS.items() if name in results]


def several(found):
    return "; ".join(number(value) for value in found)


def listed(titles, found):
    return "; ".join(f"{title} {number(value)}" for title, value in zip(titles, found))


def of_speeds(own, others):
    return several(own / value if own and value else None for value in others)


def of_sizes(own, others):
    return several(value / own if own and value else None for value in others)


def space(result):
    six = result["figure6"]
    for alpha in names(six, "alpha")[::4]:
        at = {r["system"]: r for r in by(six, alpha=alpha)}
        systems = [s for s in at if s != OWN]
        used = {s: 100 * r["after"] / r["before"] for s, r in at.items()}
        if alpha == names(six, "alpha")[-1]:
            yield [f"{alpha} % redundant: in use after deduplication, %", number(used[OWN]), listed(systems, [used[s] for s in systems]), of_sizes(used[OWN], [used[s] for s in systems])]
        over = 100 * (at[OWN]["after"] / at["plain files"]["after"] - 1)
        theirs = published.FIGURE6_OVERHEAD[alpha]
        yield [f"{alpha} % redundant: more than plain files then, %", number(over), f"the paper {theirs:.2f}", of_sizes(over, [theirs])]


def shared(result):
    samples, units = result["samples"], result["units"]
    value = lambda s, w: median(by(samples, system=s, workload=w), "value")  # noqa: E731
    for w in (w for w in ("unpack", "seq-write 1M", "seq-read 1M", "rand-write 4K") if w in names(samples, "workload")):
        beside = [(TITLE[s], value(s, w), ratio_of_hosts(result, "shared", w, s)) for s in (OWN, "sshfs") if by(samples, system=s, workload=w)]
        titles, found, ratios = zip(*beside)
        yield [f"`mount --shared`, {w}, {units[w]}", number(value("shared", w)), listed(titles, found), several(ratios)]
    if by(samples, system="shared", workload="hand-over"):
        own, peer = (value(s, "hand-over") for s in ("shared", "sshfs"))
        beside = (f"{TITLE['sshfs']} {number(peer)}", of_sizes(own, [peer])) if peer else ("–", "–")
        yield ["hand-over between hosts, ms", number(own), *beside]


def server(result):
    samples, units = result["samples"], result["units"]
    own, *peers = names(samples, "system")
    for w in names(samples, "workload"):
        value = lambda s, w=w: median(by(samples, system=s, workload=w), "value")  # noqa: E731
        found = [value(s) for s in peers]
        yield [f"{w}, {units[w]}, state in {own}", number(value(own)), listed(peers, found), of_speeds(value(own), found)]


def tenants(result):
    for system in names(result["samples"], "system"):
        alone, beside = (by(result["samples"], system=system, beside=flag) for flag in (False, True))
        own, base = ([median(found, key) for key in ("get_p99_ms", "put_p99_ms")] for found in (beside, alone))
        yield [f"{GATEWAYS[system]}, p99 while another tenant floods, ms: GET, PUT", several(own), f"alone {several(base)}", several(b / a if a and b else None for a, b in zip(own, base))]


def listings(result):
    of = lambda system, key: median(by(result["samples"], system=system), key)  # noqa: E731
    for key, title in (("v2_first_ms", "first page, ms"), ("v2_p50_ms", "a further page, ms"), ("random_p99_ms", "a page from a random place, p99, ms"), ("peak_mib", "memory of the process, MiB")):
        own, other = of("gateway", key), of("proxy", key)
        yield [f"{GATEWAYS['gateway']}, {title}", number(own), f"{GATEWAYS['proxy']} {number(other)}", of_sizes(own, [other])]


def volumes(result):
    samples = result["samples"]
    for w in (w for w in names(samples, "workload") if "connections" not in w and not w.startswith(("sequential writes, 4", "sequential reads, 4"))):
        value = lambda s, w=w: median(by(samples, system=s, workload=w), "mib_s")  # noqa: E731
        found = [value("luks"), value("file")]
        yield [f"{w}, MiB/s", number(value(OWN)), listed(("LUKS", "plain file"), found), of_speeds(value(OWN), found)]


def study(result):
    samples = result["samples"]
    shapes = list(dict.fromkeys((s["channels"], s["directories"]) for s in samples))
    for channels, directories in (shapes[0], shapes[-1]):
        of = lambda way, c=channels, d=directories: median(by(samples, way=way, channels=c, directories=d), "mib_s")  # noqa: E731
        found = [of("synchronous"), of("none")]
        yield [f"pipelined, {channels} / {directories} channels / directories, MiB/s", number(of("pipelined")), listed(("synchronous", "no encryption"), found), of_speeds(of("pipelined"), found)]


def compression(result):
    samples, base, kind = result["samples"], "none, 64K", "mixed"
    codecs = [s for s in names(samples, "system") if s in ("lz4, 64K", "zstd, 64K")]
    columns = [(store, op) for store in names(samples, "store") for op in ("write", "read") if by(samples, store=store, op=op, data=kind)]
    for store, op in columns:
        value = lambda s, at=(store, op): median(by(samples, system=s, store=at[0], op=at[1], data=kind), "value")  # noqa: E731
        where = "" if store == "memory" else f" where the store gives {store.removeprefix('reads of ')}"
        yield [f"{kind} data, {op}{where}, MB/s: {', '.join(c.split(',')[0] for c in codecs)}", several(value(c) for c in codecs), f"no compression {number(value(base))}",
               several(paired(samples, c, base, (store, op, kind), "value") for c in codecs)]


def savings(result):
    of = [s for s in result["samples"] if s["store"] != "XFS"]
    series = [s for s in ("none, 64K", "lz4, 64K", "zstd, 64K") if by(of, system=s)]
    for kind in result["sizes"] if series else ():
        found, plain = [saved(of, kind, s, result) for s in series], saved(of, kind, PLAIN, result)
        yield [f"{kind}, saved on {of[0]['store']}, %: {', '.join(s.split(',')[0] for s in series)}", "; ".join(f"{x:.1f}" for x in found), f"plain files {plain:.1f}",
               "; ".join(f"{x - plain:+.1f}" for x in found) + " points"]


def ciphers(result):
    samples = result["samples"]
    blocks, kernels = names(samples, "block"), [k for k in names(by(samples, suite="aes"), "kernel") if not k.startswith("device, ")]
    block, fastest = "4K" if "4K" in blocks else blocks[0], kernels[-1]
    of = lambda suite, kernel, op: median(by(samples, suite=suite, kernel=kernel, op=op, block=block, threads=1), "gb_per_s")  # noqa: E731
    for suite in names(samples, "suite"):
        own, library = ([of(suite, kernel, op) for op in ("seal", "open")] for kernel in (fastest, "library"))
        yield [f"`{suite}`, GB/s: seal, open", several(own), f"RustCrypto {several(library)}", several(a / b if a and b else None for a, b in zip(own, library))]


PARTS = {"space": space, "shared": shared, "server": server, "tenants": tenants, "listings": listings, "volumes": volumes, "study": study, "compression": compression, "savings": savings,
         "ciphers": ciphers}


def missed(result):
    """Which codecs miss the target on the store that compresses."""
    points, said = against_plain(result)
    return f" The target is at most {TARGET_POINTS} points less than plain files. {said} [Reasons](../stores.md#what-compression-saves)." if points else ""


# What each experiment does, in a line or two; the long report says more.
CONDITIONS = {
    "space": lambda r: f"synthetic files of {r['size_mib']} MiB on {r['store']}, as in Figure 6 of the Lamassu paper.",
    "shared": lambda r: (f"one vault under a server, one host at work; {r['files']} files, {r['bytes'] / 1e6:.0f} MB, and a file of {r['size_mib']} MiB; {runs(r)}. A hand-over: one host has written and "
                         "synced a file, and the other has read it. Ratios are medians of each run's own."),
    "server": lambda r: f"{r['vaults']} vaults, commits of {r['batch']} rows, each durable; {runs(r)}.",
    "tenants": lambda r: (f"{r['gets_s']} GETs and {r['puts_s']} PUTs a second of {r['body_kib']} KiB, while another tenant floods the same server by {r['flood_threads']} threads; {runs(r)}. Times "
                          "count from when a request was due."),
    "listings": lambda r: f"a bucket of {r['keys']:,} empty objects, in pages of {r['page']:,}; stores in memory, one run.",
    "volumes": lambda r: f"a volume of {r['size_mib']} MiB over a local socket, {r['depth']} requests at once, warm caches; {runs(r)}.",
    "study": lambda r: f"random 4 KiB writes over NBD, {r['size_mib']} MiB for each channel, all on one disk; {runs(r)}.",
    "compression": lambda r: f"one file of {r['size_mib']} MiB in blocks of 64 KiB; {r['store']}; {runs(r)}. Ratios are medians of each run's own.",
    "savings": lambda r: f"{sum(r['sizes'].values()) / 1e6:.0f} MB in all, shared in blocks of 64 KiB; metadata of the store and of Lamassu is counted.{missed(r)}",
    "ciphers": lambda r: f"blocks of 4 KiB, one thread, batches; {runs(r)}.",
}
