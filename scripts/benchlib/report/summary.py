"""The page in the tree: one screen of figures with their plots. Default options alone, also where a peer is ahead."""

import re
import textwrap

from .. import published
from ..plots import bars, lines
from .compression import tables as of_compression
from .compression import told as told_of_compression
from .figures import PEERS, SURE, best, by, median, names, number, rate, rates, table, values
from .glance import factors, lost_in_sweeps, sorted_out
from .listings import figures as of_listings
from .listings import told as told_of_listings
from .savings import TARGET_POINTS, against_plain
from .savings import tables as of_savings
from .savings import told as told_of_savings
from .server import figures as of_server
from .server import told as told_of_server
from .shared import figures as of_shared
from .study import figures as of_study
from .study import told as told_of_study
from .tenants import figures as of_tenants
from .tenants import told as told_of_tenants
from .volumes import figures as of_volumes
from .volumes import told as told_of_volumes

OWN = "lamassu"
# Titles of the experiments that are timed as a whole.
TIMED = {"small": "Many small files", "durable": "Synced writes and overwriting"}


def summary(results, plots, title, method):
    figures = (mount(results, plots), timed(results, "small", plots), timed(results, "durable", plots), space(results, plots), several_hosts(results), a_server(results), some_tenants(results), some_listings(results), some_volumes(results), the_study(results), compression(results), savings(results), ciphers(results, plots))
    return "\n\n".join([title, glance(results), *(part for part in figures if part), method, rest(results)]) + "\n"


def is_default(result):
    """Whether this experiment, or sweep, measured Lamassu with today's default options."""
    return OWN not in result.get("awake", ())


def paragraph(text, start=""):
    """Wrapped as every page of the tree is, with code spans in one piece."""
    text = re.sub(r"`[^`]*`", lambda span: span.group().replace(" ", "\0"), text)
    return textwrap.fill(start + text, 120, subsequent_indent=" " * len(start), break_long_words=False, break_on_hyphens=False).replace("\0", " ")


def glance(results):
    said = (f"Lamassu's speed ÷ that of the fastest of {', '.join(PEERS[:-1])} and {PEERS[-1]} in each line. Lamassu has full integrity and its default options, and root mounts. "
            f'"Faster" and "slower" are said only where {SURE}.')
    found = [paragraph(line[2:], "* ") for line in sorted_out(factors(results))]
    lost = [f"{title}, {point}: {factor:.2f}× ({peer})" for title, point, factor, peer in lost_in_sweeps(results)]
    if lost:
        found.append(paragraph(f"Slower by the medians of sweeps: {'; '.join(lost)}.", "* "))
    return "\n".join(["## At a glance", "", paragraph(said), "", *found])


def shown(systems):
    return [s for s in (OWN, *PEERS) if s in systems]


BARE = "lamassu-unanchored"  # the same with `--anchor none`


def of_anchors(samples):
    """What a section says of anchors, which are the default."""
    if by(samples, system=BARE):
        return "`lamassu` has an anchor, the default."
    return "Measured before anchors were the default: **`lamassu` is without one here**, as with `--anchor none`."


def mount(results, plots):
    result = results.get("mount")
    if not result or not is_default(result):
        return ""
    samples, systems, workloads = result["samples"], shown(names(result["samples"], "system")), names(result["samples"], "workload")
    bars(plots, "mount", workloads, {s: [rate(samples, s, w) for w in workloads] for s in systems}, "MB/s")
    cell = lambda s, w: " / ".join(number(median(by(samples, system=s, workload=w), d)) for d in ("read", "write") if median(by(samples, system=s, workload=w), d))  # noqa: E731
    rows = [[s, *(cell(s, w) for w in workloads)] for s in systems]
    rows.append(["**lamassu ÷ best peer**", *(number(best(lambda s, w=w: rates(samples, s, w), systems, False)[0]) for w in workloads)])
    if by(samples, system=BARE):
        rows.append(["lamassu ÷ without an anchor", *(number(rate(samples, OWN, w) / rate(samples, BARE, w)) for w in workloads)])
    return f"""## One file

{paragraph(f"{result['size_mib']} MiB, fio psync, fsync at the end of writes counted, stores on {result['store']}, cold cache, medians of {result['runs']}; MB/s. `scripts/bench mount`. {of_anchors(samples)}")}

{table(["MB/s", *workloads], rows)}

![throughput](plots/mount.svg)"""


def timed(results, experiment, plots):
    result = results.get(experiment)
    if not result or not is_default(result):
        return ""
    samples, units = result["samples"], result["units"]
    systems, workloads = shown(names(samples, "system")), names(samples, "workload")
    value = lambda s, w: median(by(samples, system=s, workload=w), "value")  # noqa: E731
    speed = lambda own, other, unit: other / own if unit == "s" else own / other  # noqa: E731
    rows = []
    for w in workloads:
        factor, peer, _ = best(lambda s, w=w: values(samples, system=s, workload=w), systems, units[w] == "s")
        anchored = [f"{number(speed(value(OWN, w), value(BARE, w), units[w]))}×"] if by(samples, system=BARE) else []
        rows.append([f"{w}, {units[w]}", *(number(value(s, w)) for s in systems), f"{number(factor)}× {peer}", *anchored])
    relative = {s: [(value(OWN, w) / value(s, w) if units[w] == "s" else value(s, w) / value(OWN, w)) if value(s, w) and value(OWN, w) else None for w in workloads] for s in systems}
    bars(plots, experiment, workloads, relative, "speed, Lamassu = 1")
    on = f"{result['files']} files, {result['bytes'] / 1e6:.0f} MB, stores on {result['store']}" if experiment == "small" else f"{result['store']}; files of {result['size_mib']} MiB"
    return f"""## {TIMED[experiment]}

{paragraph(f"{on}; medians of {result['runs']}. `scripts/bench {experiment}`. {of_anchors(samples)}")}

{table(["", *systems, "Lamassu's speed ÷ best peer's", *(["÷ without an anchor"] if by(samples, system=BARE) else [])], rows)}

![relative speed](plots/{experiment}.svg)"""


def space(results, plots):
    result = results.get("space")
    if not result:
        return ""
    six = result["figure6"]
    systems, alphas = names(six, "system"), names(six, "alpha")
    percent = lambda s, a: next(100 * r["after"] / r["before"] for r in by(six, system=s, alpha=a))  # noqa: E731
    lines(plots, "figure6", alphas, {s: [percent(s, a) for a in alphas] for s in systems}, "redundant blocks, %", "in use after deduplication, %")
    rows = [[f"{a} %", *(number(percent(s, a)) for s in systems), f"{published.FIGURE6_OVERHEAD[a]:.2f} %"] for a in alphas]
    for row, a in zip(rows, alphas):
        own, plain = (next(r["after"] for r in by(six, system=s, alpha=a)) for s in (OWN, "plain files"))
        row.insert(-1, f"{100 * (own / plain - 1):.2f} %")
    return f"""## Space after deduplication

{paragraph(f"Synthetic files of {result['size_mib']} MiB on {result['store']}, as in Figure 6 of the Lamassu paper: in use after deduplication, percent of before; and how much more Lamassu then takes than plain files. `scripts/bench space`.")}

{table(["redundant", *systems, "overhead here", "published"], rows)}

![Figure 6](plots/figure6.svg)"""


def several_hosts(results):
    result = results.get("shared")
    if not result:
        return ""
    return f"""## Several hosts

{paragraph(f"One vault under a server, one host at work; server and hosts are namespaces of this machine, stores on {result['store']}. {result['files']} files, {result['bytes'] / 1e6:.0f} MB; a file of {result['size_mib']} MiB; medians of {result['runs']}. A hand-over: one host has written and synced a file, and the other has read it. `scripts/bench shared`.")}

{of_shared(result)}"""


def some_tenants(results):
    result = results.get("tenants")
    return f"## One tenant beside another that floods\n\n{paragraph(told_of_tenants(result))}\n\n{of_tenants(result)}" if result else ""


def some_listings(results):
    result = results.get("listings")
    return f"## Listings of a large bucket\n\n{paragraph(told_of_listings(result))}\n\n{of_listings(result)}" if result else ""


def some_volumes(results):
    result = results.get("volumes")
    return f"## Volumes over NBD\n\n{paragraph(told_of_volumes(result))}\n\n{of_volumes(result)}" if result else ""


def the_study(results):
    result = results.get("study")
    return f"## The study's experiment\n\n{paragraph(told_of_study(result))}\n\n{of_study(result)[0]}" if result else ""


def a_server(results):
    result = results.get("server")
    return f"## A server by itself\n\n{paragraph(told_of_server(result))}\n\n{of_server(result)}" if result else ""


def compression(results):
    result = results.get("compression")
    return f"## Compression\n\n{paragraph(told_of_compression(result))}\n\n{of_compression(result)}" if result else ""


def savings(results):
    result = results.get("savings")
    if not result:
        return ""
    points, said = against_plain(result)
    target = ("On the store that compresses, vaults that compress against plain files there, in points; the last column is what a page of 4096 bytes for each file comes to at most "
              f"(equal small files share theirs). The target is to save at most {TARGET_POINTS} points less. {said} [stores.md](../stores.md#what-compression-saves) has the reasons.")
    return "\n\n".join(["## Savings", paragraph(told_of_savings(result)), of_savings(result), *([paragraph(target), points] if points else [])])


def ciphers(results, plots):
    result = results.get("ciphers")
    if not result:
        return ""
    samples = result["samples"]
    of = lambda s, k, op, b: median(by(samples, suite=s, kernel=k, op=op, block=b, threads=1), "gb_per_s")  # noqa: E731
    kernels, blocks = [k for k in names(by(samples, suite="aes"), "kernel") if not k.startswith("device, ")], names(samples, "block")
    lines(plots, "ciphers", blocks, {k: [of("aes", k, "seal", b) for b in blocks] for k in kernels}, "block", "GB/s sealed, suite aes, one thread", bottom=0)
    block, fastest = "4K" if "4K" in blocks else blocks[0], kernels[-1]
    rows = [[f"`{s}`", *(number(of(s, k, op, block)) for k in (fastest, "library") for op in ("seal", "open"))] for s in names(samples, "suite")]
    return f"""## Ciphers

{paragraph(f"Blocks of {block}, one thread, GB/s, medians of {result['runs']}. `library` calls RustCrypto block by block; the other kernel is the one that this processor gets. `scripts/bench ciphers`.")}

{table(["suite", *(f"{op}, `{k}`" for k in (fastest, "library") for op in ("seal", "open"))], rows)}

![kernels](plots/ciphers.svg)"""


def rest(results):
    left = [name for name, r in results.items() if not is_default(r)]
    left += [f"{name} ({', '.join(n for n, s in r['sweeps'].items() if not is_default(s))})" for name, r in results.items()
             if is_default(r) and any(not is_default(s) for s in r.get("sweeps", {}).values())]
    said = ("`make bench` measures everything again and writes the long report to `target/bench/report.md`: all systems and options, spreads, processor time, memory, the figures and tables of the "
            "published work, networks, sweeps. `scripts/bench report` writes it from the results in `results/`.")
    if left:
        said += f" Measured with `keep_awake`, which is off by default, and therefore in the long report alone: {', '.join(left)}."
    return f"## The long report\n\n{paragraph(said)}"
