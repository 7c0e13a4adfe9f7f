"""One file on a mount: the table with targets, what is missed and why, Figure 8 of the Lamassu paper."""

from .. import published
from ..plots import bars
from .figures import PEERS, best, by, like, median, names, number, rate, rates, runs, spread, spreads, table

# What the mount table is to reach: Lamassu ÷ the best peer, and ÷ PlainFS.
TARGETS_OF_PEERS = {"seq-write 4K": 8, "seq-read 4K": 1.5, "rand-read 4K": 1.3, "rand-write 4K": 6, "rand-rw 70/30": 2, "write 1M": 2, "read 1M": 2}
TARGETS_OF_PLAINFS = {"seq-write 4K": 0.6, "seq-read 4K": 0.8, "rand-read 4K": 0.9, "rand-write 4K": 0.6, "rand-rw 70/30": 0.8, "write 1M": 0.4, "read 1M": 0.5}
SECUREFS_OF_TARGETS = 56  # MB/s of writing 4K, on the machine the targets came from


def mount(results, plots):
    result = results["mount"]
    samples = result["samples"]
    systems, workloads = names(samples, "system"), names(samples, "workload")
    bars(plots, "mount", workloads, {s: [rate(samples, s, w) for w in workloads] for s in systems}, "MB/s")

    def cells(system, key):
        return [number(median(by(samples, system=system, workload=w), key)) for w in workloads]

    def throughput(system):
        for w in workloads:
            found = by(samples, system=system, workload=w)
            yield " / ".join(number(median(found, d)) for d in ("read", "write") if median(found, d))

    of_peers = {w: best(lambda s, w=w: rates(samples, s, w), systems, False) for w in workloads}
    rows = [[s, *throughput(s)] for s in systems]
    rows += [["**lamassu ÷ best peer**", *(number(of_peers[w][0]) for w in workloads)], ["target", *(number(TARGETS_OF_PEERS.get(w)) for w in workloads)]]
    if "plainfs" in systems:
        plain, own = {w: rate(samples, "plainfs", w) for w in workloads}, like("plainfs", result)
        rows += [["plainfs ÷ best peer", *(number(best(lambda s, w=w: rates(samples, s, w), systems, False, "plainfs")[0]) for w in workloads)],
                 [f"**{own} ÷ plainfs**", *(number((rate(samples, own, w) or 0) / plain[w]) for w in workloads)],
                 ["target", *(number(TARGETS_OF_PLAINFS.get(w)) for w in workloads)]]
    peaks = {s: max(x["rss_peak_mib"] for x in by(samples, system=s)) for s in systems}
    return f"""## One file on a mount

{result["size_mib"]} MiB, fio psync, fsync at the end of writes counted, stores on {result["store"]}, page cache emptied and a new mount for each pass, {runs(result)}; MB/s
(10⁶ bytes; read / write of the mixture). `scripts/bench mount`. `plainfs` is Lamassu's own front-end without encryption (`make passthrough`),
`lamassu-metadata` does not re-hash blocks (`--integrity metadata`); `lamassu-unanchored` has no anchor (`--anchor none`); `lamassu-awake` keeps processors awake while requests come (`-o keep_awake=always`); `bindfs` encrypts
nothing either.

{table(["MB/s", *workloads], rows)}{spreads(result, ["MB/s", *workloads], [[s, *(spread(rates(samples, s, w)) for w in workloads)] for s in systems])}

![throughput](plots/mount.svg)

{missed(results)}

Processor seconds of the serving process per GiB:

{table(["s/GiB", *workloads], [[s, *cells(s, "cpu_s_per_gib")] for s in systems])}

Its peak memory over all passes, MiB: {", ".join(f"{s} {p:.0f}" for s, p in peaks.items())}. Lamassu's is what it gathers of dirty data, at most 80 MiB a file, and the
ciphertext of the batch in flight.

### Figure 8 of the Lamassu paper

{figure8(result)}"""


def missed(results):
    """Which targets the table misses, and what stands in the way, as far as the figures say it."""
    samples = results["mount"]["samples"]
    systems, workloads = names(samples, "system"), names(samples, "workload")
    if "plainfs" not in systems or not any(p in systems for p in PEERS):
        return ""
    peers, plain, needed = [], [], []
    for w in workloads:
        factor, peer, _ = best(lambda s, w=w: rates(samples, s, w), systems, False)
        front, part = (rate(samples, a, w) / rate(samples, b, w) for a, b in (("plainfs", peer), (like("plainfs", results["mount"]), "plainfs")))
        if factor < TARGETS_OF_PEERS[w]:
            peers.append(f"{w} {factor:.2f} of {TARGETS_OF_PEERS[w]:g} (plainfs itself {front:.2f})")
            if TARGETS_OF_PEERS[w] / front < 1:
                needed.append(f"{w} {TARGETS_OF_PEERS[w] / front:.2f}")
        if part < TARGETS_OF_PLAINFS[w]:
            plain.append(f"{w} {part:.2f} of {TARGETS_OF_PLAINFS[w]:g}")
    out_of_reach = [w for w in workloads if best(lambda s, w=w: rates(samples, s, w), systems, False, "plainfs")[0] < TARGETS_OF_PEERS[w]]
    said = f"""Missed beside the best peer: {'; '.join(peers) or 'none'}. Missed beside PlainFS: {'; '.join(plain) or 'none'}. Why:
"""
    if out_of_reach:
        said += f"""
* PlainFS, the same front-end without any encryption, also misses the target beside the best peer in {', '.join(out_of_reach)}: there FUSE on these processors is the bound,
  and no cipher could reach the target."""
    if needed:
        said += f"""
* Where PlainFS reaches the target beside the best peer, the target needs a larger part of PlainFS's rate than a mount has that hashes and encrypts on the same two processors:
  {', '.join(needed)} (÷ plainfs)."""
    if "securefs" in systems:
        low, high = sorted(rate(samples, "securefs", w) for w in ("seq-write 4K", "rand-write 4K"))
        said += f"""
* The peers are faster here than on the machine that the targets came from: securefs, which wrote {SECUREFS_OF_TARGETS} MB/s of 4 KiB blocks there, writes {low:.0f} to {high:.0f} here."""
    request = {s: 4.096e3 / rate(samples, s, "rand-read 4K") for s in (like("plainfs", results["mount"]), "plainfs") if rate(samples, s, "rand-read 4K")}
    single = median(by(results["ciphers"]["samples"], suite="aes", kernel="aesni+shani", op="open", block="4K", threads=1), "gb_per_s") if "ciphers" in results else None
    many = [s["gb_per_s"] for s in results["ciphers"]["samples"] if (s["suite"], s["op"], s["block"], s["threads"]) == ("aes", "open", "4K", 1)] if "ciphers" in results else []
    if single and many:
        said += f"""
* A block that is read alone is hashed alone. Opening it takes {4.096 / single:.1f} µs (`aesni+shani` below), and a single synchronous reader waits for that. PlainFS answers a random read in
  {request['plainfs']:.1f} µs on average, Lamassu in {next(iter(request.values())):.1f}. Lanes help only where several blocks are read at once.
* Full integrity hashes every block again when it is read, at {max(many):.1f} GB/s a processor at most, and the reader and the kernel use the same processors. `lamassu-metadata` shows the cost."""
    return said + "\n"


def figure8(result):
    samples, rows = result["samples"], []
    for title, system, base, theirs in (
        ("÷ EncFS", "lamassu", "encfs", published.FIGURE8_OF_ENCFS),
        ("metadata ÷ EncFS", "lamassu-metadata", "encfs", published.FIGURE8_METADATA_OF_ENCFS),
        ("÷ PlainFS", like("plainfs", result), "plainfs", published.FIGURE8_OF_PLAINFS),
    ):
        for workload, figure in theirs.items():
            own, other = rate(samples, system, workload), rate(samples, base, workload)
            if own and other:
                rows.append([f"{workload}, {title}", number(figure), number(own / other), number(own / other / figure)])
    return f"""The same workloads on a RAM disk, as ratios, since the machines are ten years apart.

{table(["Lamassu", "published", "here", "here ÷ published"], rows)}

Why they differ: the prototype hashed with AVX, one block at a time, in a single thread per request. Here SHA-256 runs in the processor's own instructions or over sixteen
lanes, AES over lanes of different keys, and the kernel gathers small writes into large ones. EncFS has its own defaults here (1 KiB blocks, encrypted names). The paper set
4 KiB blocks and plain names, which makes EncFS faster than here."""
