"""Where the time goes: Figure 9 of the Lamassu paper."""

from .. import published
from ..plots import bars
from .figures import by, median, names, number, runs, table


def stages(results, plots):
    result = results["stages"]
    samples = result["samples"]
    systems, workloads = names(samples, "system"), names(samples, "workload")
    columns = ("encrypt", "decrypt", "key", "store", "misc")
    spent = {(s, w): [median(by(samples, system=s, workload=w), c) for c in columns] for s in systems for w in workloads}
    bars(plots, "figure9", [f"{s}\n{w}" for s, w in spent], {c: [v[n] for v in spent.values()] for n, c in enumerate(columns)}, "s")
    rows = [[f"{w}, {s}", *(f"{v:.3f}" for v in values), f"{sum(values):.2f}", f"{values[2] / sum(values):.0%}"] for (s, w), values in spent.items()]
    part = lambda w: spent["lamassu", w][2] / sum(spent["lamassu", w])  # noqa: E731
    theirs = table(["GetCEKey's part", "published", "here", "here ÷ published"],
                   [[w, f"{p:.0%}", f"{part(w):.0%}", number(part(w) / p)] for w, p in published.FIGURE9_KEY.items() if ("lamassu", w) in spent])
    saved = ""
    if len(systems) == 2:
        full, meta = (sum(spent[s, "seq-read"]) for s in systems)
        saved = f" Without full integrity a read takes {1 - meta / full:.0%} less time here; published: {published.FIGURE9_READ_SAVED:.0%} ({(1 - meta / full) / published.FIGURE9_READ_SAVED:.2f} of it)."
    return f"""## Figure 9 of the Lamassu paper: where the time goes

{result["size_mib"]} MiB in sequence, 4 KiB psync, one cipher thread, no page cache (`--cache none`), {result["store"]}, {runs(result)}; `scripts/bench stages`. Seconds, measured by the mount
itself (the example `measured`); "key" is the paper's GetCEKey (hashing and deriving). "misc" is the rest of fio's time, mostly the kernel's way to the mount and back.

{table(["", *columns, "all", "key's part"], rows)}

![Figure 9](plots/figure9.svg)

{theirs}

{saved.strip()} They differ because SHA-256 runs in the processor's own instructions or in lanes here, so that FUSE's round trip outweighs it."""
