"""What is timed as a whole: trees of small files, and work that syncs."""

from ..plots import bars
from .figures import best, by, like, median, names, number, runs, spread, spreads, table, values


def small(results, plots):
    result = results["small"]
    return f"""## Many small files

A tree of {result["files"]} files of installed Debian packages, {result["bytes"] / 1e6:.0f} MB, at most 64 KiB each, stores on {result["store"]}: `tar -x` and syncfs; `tar -c`, `find` by
time and `rm -r`, each with a fresh mount and an empty page cache; dbench 4 with 4 clients; Postmark 1.51. {runs(result)}; `scripts/bench small`.

{timed_table(result, "small", plots)}"""


def durable(results, plots):
    result = results["durable"]
    return f"""## Synced writes and overwriting, on {result["store"]}

Files of {result["size_mib"]} MiB are overwritten; {runs(result)}; `scripts/bench durable`. Overwriting in place costs Lamassu a second barrier: the old keys
must be durable before the data changes, and a page has room for the old keys of R = 8 of its 116 blocks. Overwriting in sequence takes 15 rounds of two barriers for every 64 MiB, some 500
a GiB (`init --reserved-slots` gives more room, for fewer blocks a page). Appending takes one barrier, as in every system. CryFS is left out: it answers fsync(2) without syncing anything of its store.
{barrier(result)}
{timed_table(result, "durable", plots)}"""


def timed_table(result, experiment, plots):
    samples, units = result["samples"], result["units"]
    systems, workloads = names(samples, "system"), names(samples, "workload")

    def value(system, workload, key="value"):
        return median(by(samples, system=system, workload=workload), key)

    rows = []
    for w in workloads:
        factor, peer, _ = best(lambda s, w=w: values(samples, system=s, workload=w), systems, units[w] == "s")
        rows.append([f"{w}, {units[w]}", *(number(value(s, w)) for s in systems), f"{number(factor)}× {peer}"])
    relative = {s: [speed(value(s, w), value("lamassu", w), units[w]) for w in workloads] for s in systems}
    bars(plots, experiment, workloads, relative, "speed, Lamassu = 1")
    peaks = {s: max(x["rss_peak_mib"] for x in by(samples, system=s)) for s in systems}
    return f"""{table(["", *systems, "Lamassu's speed ÷ best peer's"], rows)}{spreads(result, ["", *systems], [[f"{w}, {units[w]}", *(spread(values(samples, system=s, workload=w)) for s in systems)] for w in workloads])}

![relative speed](plots/{experiment}.svg)

Processor seconds of the serving process:

{table(["s", *systems], [[w, *(number(value(s, w, "cpu_s")) for s in systems)] for w in workloads])}

Peak memory, MiB: {", ".join(f"{s} {p:.0f}" for s, p in peaks.items())}."""


def speed(value, lamassu, unit):
    if not value or not lamassu:
        return None
    return lamassu / value if unit == "s" else value / lamassu


def barrier(result):
    """What the second barrier costs, where there is a mount without."""
    samples, own = result["samples"], like("lamassu-relaxed", result)
    if not by(samples, system="lamassu-relaxed"):
        return ""
    cost = {w: median(by(samples, system=own, workload=w), "value") / median(by(samples, system="lamassu-relaxed", workload=w), "value")
            for w in ("append 4K, fsync each", "overwrite 4K at random, fsync each")}
    append, overwrite = cost.values()
    return f"""
`lamassu-relaxed` omits the barrier between keys and data (`--durability relaxed`; it does not survive a power cut), and is otherwise the same. The second barrier costs {1 - overwrite:.0%} of
the rate where blocks are overwritten with an fsync each ({overwrite:.2f}×), and {1 - append:.0%} where they are appended ({append:.2f}×).
"""
