"""The kernels by themselves, and the engines under a mount."""

import statistics

from .. import published
from ..plots import lines
from .figures import by, median, names, number, runs, table


def ciphers(results, plots):
    result = results["ciphers"]
    samples = result["samples"]
    value = lambda **w: median(by(samples, **w), "gb_per_s")  # noqa: E731
    ways = [k for k in names(by(samples, suite="aes"), "kernel") if k.startswith("device, ")]
    kernels, blocks = [k for k in names(by(samples, suite="aes"), "kernel") if k not in ways], names(samples, "block")
    parts = []
    for suite in names(samples, "suite"):
        own = names(by(samples, suite=suite), "kernel")
        rows = [[f"{k}, {op}", *(number(value(suite=suite, kernel=k, op=op, block=b, threads=1)) for b in blocks)]
                for k in own for op in names(by(samples, suite=suite, kernel=k), "op")]
        parts.append(f"Suite `{suite}`:\n\n" + table(["GB/s", *blocks], rows))
    lines(plots, "ciphers", blocks, {k: [value(suite="aes", kernel=k, op="seal", block=b, threads=1) for b in blocks] for k in kernels},
          "block", "GB/s sealed, suite aes, one thread", bottom=0)
    threads = max(names(samples, "threads"))
    four = "4K" if "4K" in blocks else blocks[0]
    fastest, library = kernels[-1], "library"
    of = lambda k, op, t: value(suite="aes", kernel=k, op=op, block=four, threads=t)  # noqa: E731
    ratios = [[op, *(number(of(fastest, op, t) / of(library, op, 1)) for t in (1, threads))] for op in ("seal", "open", "open_unverified")]
    rate = lambda k, t=1: of(k, "seal", t)  # noqa: E731
    study = [(f"{library}, one block at a time", rate(library)), *((k, rate(k)) for k in ways),
             (f"{fastest}, 1 thread", rate(fastest)), (f"{fastest}, {threads} threads", rate(fastest, threads))]
    rows = [[name, number(r), number(r / rate(library))] for name, r in study]
    plain, fips = (1000 * statistics.median(s["seconds"] for s in result["starts"] if s["options"] == o) for o in ("", "--fips"))
    return f"""## The ciphers by themselves

One thread, {runs(result)}; `scripts/bench ciphers`. `library` composes RustCrypto's calls one block after another. "open" verifies, "open_unverified" does not.

{chr(10).join(part + chr(10) for part in parts)}
![kernels](plots/ciphers.svg)

### The multi-tenant study: one block at a time, a device, a pipeline

Sealing blocks of {four}, suite `aes`. `device` is a loop-back: a thread behind a ring of jobs in place of an accelerator (the example `speed`). Its
cost is the way there and back, which a pipeline hides and a single block waits for. The study wrote 198 MB/s without encryption, 102 with software one block
at a time, 101 with its device one request at a time and 367 through its pipeline, 3.6 times as much. The last figure is a rate of ciphers, above that of its writes, so this report has the two
in separate tables. Rates of ciphers:

{table(["", "GB/s", "÷ library"], rows)}

Opening, too, ÷ the library one block at a time, in batches of 1 MiB:

{table(["", f"{fastest}, 1 thread", f"{fastest}, {threads} threads"], ratios)}
{engines(result)}
### {threads} threads ÷ 1, by block size

Suite `aes`, `{fastest}`, batches of 1 MiB; medians of the ratios within each run.

{table(["", *blocks], [[op, *(number(scaling(samples, fastest, op, b, threads)) for b in blocks)] for op in ("seal", "open", "open_unverified")])}
{bounds(result, fastest, blocks)}
### SHA-256 by block size, after the ZFS articles

{sha256(result, kernels, blocks)}

### Starting

`lamassu ls` of an empty vault takes {plain:.1f} ms; with `--fips`, which tests every cipher against known answers first, {fips:.1f} ms."""


def scaling(samples, kernel, op, block, threads):
    """How many times as much several threads do as one: the median of the runs' own ratios."""
    found = []
    for number_of_run in names(samples, "run"):
        one, many = (median(by(samples, suite="aes", kernel=kernel, op=op, block=block, threads=t, run=number_of_run), "gb_per_s") for t in (1, threads))
        if one and many:
            found.append(many / one)
    return statistics.median(found) if found else None


def engines(result):
    """The study's rates of writes, where mounts were measured by engine."""
    if not result.get("engines"):
        return ""
    rate = {e: statistics.median(x["value"] for x in by(result["engines"], engine=e)) for e in names(result["engines"], "engine")}
    theirs, least = published.STUDY, rate["library"]
    rows = [[e, number(theirs.get(e)), number(theirs[e] / theirs["library"]) if e in theirs else "–", number(r), number(r / least),
             number(r / least / (theirs[e] / theirs["library"])) if e in theirs else "–"] for e, r in rate.items()]
    return f"""
Rates of writes: a new file of {result["write_mib"]} MiB, 4 KiB psync, tmpfs, by what seals (`LAMASSU_CPU=library`: a library's calls one block after another; the example `measured`: the loop-back device one
request at a time, and in a pipeline; `normal` is the mount as it is). The study's 367 is a rate of ciphers.

{table(["MB/s", "published", "÷ library", "here", "÷ library", "here ÷ published"], rows)}
"""


def bounds(result, fastest, blocks):
    """Seal and open beside what their parts allow, and beside OpenSSL's own calls one after another."""
    samples, parts = result["samples"], []
    at = lambda op, b: median(by(samples, suite="aes", kernel=fastest, op=op, block=b, threads=1), "gb_per_s")  # noqa: E731
    serial = lambda *rates: 1 / sum(1 / r for r in rates)  # noqa: E731
    if by(samples, suite="aes", op="hash"):
        rows = [["seal", *(number(at("seal", b) / serial(at("hash", b), at("encrypt", b))) for b in blocks)],
                ["open", *(number(at("open", b) / serial(at("hash", b), at("open_unverified", b))) for b in blocks)]]
        parts.append(f"""### What the parts allow

`{fastest}`, one thread: sealing ÷ 1/(1/hash + 1/encrypt), and opening ÷ 1/(1/hash + 1/open_unverified), each part measured by itself. The target is 0.85.

{table(["", *blocks], rows)}""")
    if result.get("openssl"):
        theirs = lambda op, b: median(by(result["openssl"], op=op, block=b), "gb_per_s")  # noqa: E731
        known = [b for b in blocks if theirs("sha256", b) and theirs("encrypt", b) and theirs("decrypt", b)]
        library = lambda op, b: median(by(samples, suite="aes", kernel="library", op=op, block=b, threads=1), "gb_per_s")  # noqa: E731
        rows = [["OpenSSL's SHA-256, GB/s", *(number(theirs("sha256", b)) for b in known)], ["its AES-256-CBC, encrypting", *(number(theirs("encrypt", b)) for b in known)],
                ["decrypting", *(number(theirs("decrypt", b)) for b in known)]]
        for op, part in (("seal", "encrypt"), ("open", "decrypt")):
            rows += [[f"**{op} ÷ OpenSSL's in series**", *(number(at(op, b) / serial(theirs("sha256", b), theirs(part, b))) for b in known)],
                     [f"{op} ÷ `library` (RustCrypto)", *(number(at(op, b) / library(op, b)) for b in known)]]
        parts.append(f"""### Beside the best library

{result["versions"].get("openssl", "OpenSSL")} (`openssl speed`, in the same runs), one thread: a block hashed and then encrypted by its own calls, with nothing between. The target for
sealing is 2.5. CBC encrypts the blocks of one chain one after another; lanes of different keys fill the processor.

{table(["", *known], rows)}""")
    return "".join(f"\n{part}\n" for part in parts)


def sha256(result, kernels, blocks):
    samples, said = result["samples"], ""
    if by(samples, suite="aes", op="hash"):
        rows = [[k, *(number(median(by(samples, suite="aes", kernel=k, op="hash", block=b, threads=1), "gb_per_s")) for b in blocks)] for k in kernels
                if by(samples, suite="aes", kernel=k, op="hash")]
        said = f"GB/s, one thread, by kernel:\n\n{table(['', *blocks], rows)}\n\nThe articles measured SHA-256 over blocks of 1 to 128 KiB, too; their text gives no figures of it but these:\n\n"
    theirs = ", ".join(f"{m} {before:.0f} s before, {after:.0f} s after, {before / after:.2f}×" for m, (before, after) in published.ZFS_DEDUP.items())
    said += f"A deduplicating write before and after a faster SHA-256, published: `mkfile 100g`, {theirs}."
    if result.get("hashed_writes"):
        rate = {h: statistics.median(x["value"] for x in by(result["hashed_writes"], hash=h)) for h in names(result["hashed_writes"], "hash")}
        slowest, gain = rate["portable"], published.ZFS_DEDUP["X4140"][0] / published.ZFS_DEDUP["X4140"][1]
        said += (f" Here, a file of {result['write_mib']} MiB of which nine tenths repeat, 4 KiB psync, tmpfs, by what SHA-256 may use (`LAMASSU_CPU`); \"here ÷ published\" is beside the X4140:\n\n"
                 + table(["", "MB/s", "÷ portable", "here ÷ published"], [[h, number(v), number(v / slowest), number(v / slowest / gain)] for h, v in rate.items()]))
    return said
