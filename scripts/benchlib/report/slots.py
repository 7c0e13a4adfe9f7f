"""Reserved slots: Figure 10 of the Lamassu paper."""

from .. import published
from ..plots import lines
from .figures import by, median, names, number, runs, table


def slots(results, plots):
    result = results["slots"]
    samples = result["samples"]
    counts, workloads = sorted(names(samples, "slots")), names(samples, "workload")
    value = lambda r, w: median(by(samples, slots=r, workload=w), "value")  # noqa: E731
    lines(plots, "figure10", counts, {w: [value(r, w) for r in counts] for w in workloads}, "reserved key slots R", "MB/s", bottom=0)
    rows = []
    for workload, (at, theirs) in published.FIGURE10.items():
        at = min(counts, key=lambda r, at=at: abs(r - at))
        own = value(at, workload) / value(counts[0], workload)
        rows.append([f"{workload}, R = {at} ÷ R = {counts[0]}", number(theirs), number(own), number(own / theirs)])
    return f"""## Figure 10 of the Lamassu paper: throughput by reserved slots

{result["size_mib"]} MiB, 4 KiB psync, {result["store"]}, writes over an existing file, {runs(result)}; `scripts/bench slots`. MB/s:

{table(["R", *workloads], [[str(r), *(number(value(r, w)) for w in workloads)] for r in counts])}

![Figure 10](plots/figure10.svg)

{table(["", "published", "here", "here ÷ published"], rows)}

Why they differ: the prototype committed after every R blocks. Here a commit gathers 16 MiB of dirty data, or 64 MiB where barriers take time, and R only bounds how many of a
page's 116 blocks may be replaced between two barriers. On tmpfs barriers are free, so the remaining cost is sealing the pages again in each round."""
