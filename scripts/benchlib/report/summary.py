"""The page in the tree: one line of figures for each measurement, and the plots. Default options alone, also where a peer is ahead."""

import re
import textwrap

from ..plots import bars, lines
from .figures import PEERS, SURE, best, by, median, names, number, rate, rates, table, values
from .glance import factors, lost_in_sweeps, sorted_out
from .others import conditions, others

OWN = "lamassu"


def summary(results, plots, title, method):
    parts = (title, glance(results), peers(results, plots), other_experiments(results, plots), method, rest(results))
    return "\n\n".join(part for part in parts if part) + "\n"


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
    """What the section says of anchors, which are the default."""
    if by(samples, system=BARE):
        return ""
    return "Measured before anchors were the default: **`lamassu` is without one here**, as with `--anchor none`."


def peers(results, plots):
    """One table of all that is measured beside other encrypting file systems, and a plot of each experiment."""
    rows, systems, said, drawn = [], [OWN, *PEERS], [], []
    for name, part in (("mount", mount), ("small", timed), ("durable", timed)):
        result = results.get(name)
        if result and is_default(result):
            rows += part(result, systems)
            said.append(f"{name}: {CONDITIONS[name](result)}; {result['runs']} runs. {of_anchors(result['samples'])}".strip())
            plot(result, name, plots)
            drawn.append(f"![{name}](plots/{name}.svg)")
    if not rows:
        return ""
    start = ("Medians. `lamassu` has an anchor, the default. The last columns are Lamassu's speed ÷ that of the best peer, and ÷ that of Lamassu without an anchor; above 1 Lamassu "
             "is faster. Mixed reads and writes are rates of reads. CryFS answers fsync(2) without syncing its store, and is left out of `durable`.")
    heads = ["", *systems, "÷ best peer", "÷ without an anchor"]
    return "\n\n".join(["## Other encrypting file systems", paragraph(start), *["\n".join(paragraph(text, "* ") for text in said)], table(heads, rows), "\n".join(drawn)])


CONDITIONS = {
    "mount": lambda r: f"one file of {r['size_mib']} MiB, fio psync, fsync at the end of writes counted, stores on {r['store']}, cold cache",
    "small": lambda r: f"{r['files']} files, {r['bytes'] / 1e6:.0f} MB, stores on {r['store']}",
    "durable": lambda r: f"{r['store']}; files of {r['size_mib']} MiB",
}


def mount(result, systems):
    samples = result["samples"]
    for w in names(samples, "workload"):
        factor, peer, _ = best(lambda s, w=w: rates(samples, s, w), names(samples, "system"), False)
        yield [f"{w}, MB/s", *(number(rate(samples, s, w)) for s in systems), f"{number(factor)} {peer}", number(quotient(rate(samples, OWN, w), rate(samples, BARE, w)))]


def timed(result, systems):
    samples, units = result["samples"], result["units"]
    for w in names(samples, "workload"):
        is_time, value = units[w] == "s", lambda s, w=w: median(by(samples, system=s, workload=w), "value")
        factor, peer, _ = best(lambda s, w=w: values(samples, system=s, workload=w), names(samples, "system"), is_time)
        anchored = quotient(value(BARE), value(OWN)) if is_time else quotient(value(OWN), value(BARE))
        yield [f"{w}, {units[w]}", *(number(value(s)) for s in systems), f"{number(factor)} {peer}", number(anchored)]


def quotient(own, other):
    return own / other if own and other else None


def plot(result, name, plots):
    samples = result["samples"]
    systems, workloads = shown(names(samples, "system")), names(samples, "workload")
    if name == "mount":
        bars(plots, name, workloads, {s: [rate(samples, s, w) for w in workloads] for s in systems}, "MB/s")
        return
    value = lambda s, w: median(by(samples, system=s, workload=w), "value")  # noqa: E731
    relative = {s: [quotient(value(OWN, w), value(s, w)) if result["units"][w] == "s" else quotient(value(s, w), value(OWN, w)) for w in workloads] for s in systems}
    bars(plots, name, workloads, relative, "speed, Lamassu = 1")


def other_experiments(results, plots):
    rows = others(results)
    if not rows:
        return ""
    start = ("`scripts/bench EXPERIMENT` measures one. The last column says how many times as fast, or as small, Lamassu is: above 1 Lamassu is better. "
             "Several figures in a cell are in the order of the names.")
    heads = ["experiment", "what is measured", "Lamassu", "compared with", "ratio"]
    parts = ["## Other experiments", paragraph(start), table(heads, rows).replace("--:|", "---|", 1), "\n".join(paragraph(text, "* ") for text in conditions(results))]
    return "\n\n".join([*parts, "\n".join(drawn_others(results, plots))])


def drawn_others(results, plots):
    if "space" in results:
        six = results["space"]["figure6"]
        alphas = names(six, "alpha")
        percent = lambda s, a: next(100 * r["after"] / r["before"] for r in by(six, system=s, alpha=a))  # noqa: E731
        lines(plots, "figure6", alphas, {s: [percent(s, a) for a in alphas] for s in names(six, "system")}, "redundant blocks, %", "in use after deduplication, %")
        yield "![Figure 6 of the Lamassu paper](plots/figure6.svg)"
    if "ciphers" in results:
        samples = results["ciphers"]["samples"]
        of = lambda k, b: median(by(samples, suite="aes", kernel=k, op="seal", block=b, threads=1), "gb_per_s")  # noqa: E731
        kernels, blocks = [k for k in names(by(samples, suite="aes"), "kernel") if not k.startswith("device, ")], names(samples, "block")
        lines(plots, "ciphers", blocks, {k: [of(k, b) for b in blocks] for k in kernels}, "block", "GB/s sealed, suite aes, one thread", bottom=0)
        yield "![kernels](plots/ciphers.svg)"


def rest(results):
    left = [name for name, r in results.items() if not is_default(r)]
    left += [f"{name} ({', '.join(n for n, s in r['sweeps'].items() if not is_default(s))})" for name, r in results.items()
             if is_default(r) and any(not is_default(s) for s in r.get("sweeps", {}).values())]
    said = ("`make bench` measures everything again and writes the long report to `target/bench/report.md`: all systems and options, spreads, processor time, memory, the figures and tables of the "
            "published work, networks, sweeps. `scripts/bench report` writes it from the results in `results/`.")
    if left:
        said += f" Measured with `keep_awake`, which is off by default, and therefore in the long report alone: {', '.join(left)}."
    return f"## The long report\n\n{paragraph(said)}"
