"""A store behind a network: Figure 7 of the Lamassu paper."""

from .. import published
from ..plots import bars
from .figures import names, number, rate, runs, table


def network(results, plots):
    result = results["network"]
    samples = result["samples"]
    systems, workloads = names(samples, "system"), names(samples, "workload")
    bars(plots, "figure7", workloads, {s: [rate(samples, s, w) for w in workloads] for s in systems}, "MB/s")
    rows = [[s, *(number(rate(samples, s, w)) for w in workloads)] for s in systems]
    ratio = lambda w: rate(samples, "lamassu", w) / rate(samples, "encfs", w)  # noqa: E731
    compared = [[w, number(theirs), number(ratio(w)), number(ratio(w) / theirs)]
                for w, theirs in published.FIGURE7_OF_ENCFS.items() if rate(samples, "encfs", w)]
    beside = f"\n\nLamassu ÷ EncFS:\n\n{table(['', 'published', 'here', 'here ÷ published'], compared)}\n\nOf reads the paper says 1.6 to 12.4 % less than EncFS: 0.93 is the middle of that." if compared else ""
    return f"""## Figure 7 of the Lamassu paper: a store behind a network

{result["size_mib"]} MiB, 4 KiB psync, store on {result["store"]}, {runs(result)}; `scripts/bench network`. MB/s:

{table(["", *workloads], rows)}

![Figure 7](plots/figure7.svg){beside}

The paper's filer used NFS, whose client caches. sshfs asks the server for every read that the mount above it does not gather. So gathering wins: Lamassu writes in
segments, and reads in windows where reads are sequential. The paper's file had 256 MB; with peers that write 10 MB/s that would take half an hour."""
