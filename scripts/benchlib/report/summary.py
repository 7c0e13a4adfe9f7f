"""The page in the tree: the main figures with their plots. Default options alone, also where a peer is ahead. The long report has all tables."""

import re
import textwrap

from .. import published
from ..plots import bars, lines
from .compression import paired
from .figures import PEERS, SURE, best, by, median, names, number, rate, rates, table, values
from .glance import factors, lost_in_sweeps, sorted_out
from .savings import PLAIN, TARGET_POINTS, saved
from .shared import ratio
from .tenants import TITLE as SERVED

OWN = "lamassu"
# Titles of the experiments that are timed as a whole.
TIMED = {"small": "Many small files", "durable": "Synced writes and overwriting"}


def summary(results, plots, title):
    figures = (mount(results, plots), timed(results, "small", plots), timed(results, "durable", plots), space(results, plots), further(results), ciphers(results, plots))
    return "\n\n".join([title, glance(results), *(part for part in figures if part), rest(results)]) + "\n"


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
    after = lambda s, a: next(r["after"] for r in by(six, system=s, alpha=a))  # noqa: E731
    overhead = ", ".join(f"{a} %: {100 * (after(OWN, a) / after('plain files', a) - 1):.2f} % ({published.FIGURE6_OVERHEAD[a]:.2f} %)" for a in alphas)
    saved_most = ", ".join(f"{s} {abs(100 - percent(s, alphas[-1])):.1f} %" for s in systems)
    return f"""## Space after deduplication

{paragraph(f"Synthetic files of {result['size_mib']} MiB on {result['store']}, as in Figure 6 of the Lamassu paper. Lamassu takes more space than plain files after deduplication, by share of redundant blocks (the paper's figure in brackets): {overhead}. Deduplication of files with {alphas[-1]} % redundant blocks saves: {saved_most}. `scripts/bench space`.")}

![Figure 6](plots/figure6.svg)"""


def further(results):
    """One table of the other experiments: a few rows for each."""
    rows = [row for name, rows_of in FURTHER.items() if name in results for row in rows_of(results[name])]
    if not rows:
        return ""
    said = ("Medians; ratios of `shared` and `compression` are medians of each run's own ratio. `scripts/bench EXPERIMENT` measures one experiment. The long report describes each of them and has all "
            "of its figures.")
    lines = ["| experiment | measured | Lamassu | compared with | ratio |", "|---|---|---|---|---|", *(f"| `{' | '.join([row[0] + '`', *row[1:]])} |" for row in rows)]
    return "\n".join(["## Further experiments", "", paragraph(said), "", *lines])


def each(found):
    return " / ".join(number(value) for value in found)


AT_ONCE = {"datasets": "a dataset for each host", "sshfs": "sshfs"}


def rows_of_shared(result):
    value = lambda s, w: median(by(result["samples"], system=s, workload=w), "value")  # noqa: E731
    compared = [w for w in result["units"] if value("shared", w) and value(OWN, w)]
    rows = [["shared", f"`mount --shared`, one host at work, speed: {' / '.join(compared)}", "–", "one host, anchor in a file", each(ratio(result, "shared", w) for w in compared)]] if compared else []
    peer = [w for w in result["units"] if value("shared", w) and value("sshfs", w)]
    if peer:
        speed = lambda w: value("sshfs", w) / value("shared", w) if result["units"][w] in ("s", "ms") else value("shared", w) / value("sshfs", w)  # noqa: E731
        rows.append(["shared", f"the same: {' / '.join(peer)}", "–", "sshfs, a plain directory (medians)", each(speed(w) for w in peer)])
    several = [w for w in result["units"] if value("shared", w) and not value(OWN, w)]
    for workload in several:
        others = {s: value(s, workload) for s in ("datasets", "sshfs") if value(s, workload)}
        beside = "; ".join(f"{number(found)}, {AT_ONCE[s]}" for s, found in others.items())
        factors = "; ".join(number(found / value("shared", workload)) for found in others.values())
        rows.append(["shared", f"two hosts: {workload}, {result['units'][workload]}", number(value("shared", workload)), beside or "–", factors or "–"])
    return rows


def rows_of_server(result):
    samples = result["samples"]
    value = lambda s, w: median(by(samples, system=s, workload=w), "value")  # noqa: E731
    own, *others = names(samples, "system")
    sealed = result.get("oblivious", [])
    oblivious = [["server", "blocks of 4 KiB under an oblivious key, MB/s by a core: written first / again / evaluated by the server",
                  each(median(sealed, what) for what in ("first", "again", "server")), "60, asked of first writes", number(median(sealed, "first") / 60)]] if sealed else []
    return oblivious + [["server", f"{w}, {result['units'][w]}, state in {own}", number(value(own, w)), "; ".join(f"{number(value(s, w))}, {s}" for s in others) or "–",
             "; ".join(number(value(own, w) / value(s, w) if value(s, w) else None) for s in others) or "–"] for w in names(samples, "workload")]


def rows_of_tenants(result):
    rows = []
    for system in names(result["samples"], "system"):
        alone, flooded = by(result["samples"], system=system, beside=False), by(result["samples"], system=system, beside=True)
        own, base = ([median(found, key) for key in ("rate", "get_p99_ms", "put_p99_ms")] for found in (flooded, alone))
        rows.append(["tenants", f"{SERVED[system]}, while another tenant floods it: requests/s / GET p99, ms / PUT p99, ms", each(own), f"{each(base)}, alone", each(o / b for o, b in zip(own, base))])
    return rows


def rows_of_listings(result):
    of = lambda system, key: number(median(by(result["samples"], system=system), key))  # noqa: E731
    return [["listings", f"{SERVED[system]}, {result['keys']:,} keys: first page / further page, ms; memory at most, MiB",
             f"{of(system, 'v2_first_ms')} / {of(system, 'v2_p50_ms')}; {of(system, 'peak_mib')}", "–", "–"] for system in names(result["samples"], "system")]


def rows_of_volumes(result):
    value = lambda s, w: median(by(result["samples"], system=s, workload=w), "mib_s")  # noqa: E731
    return [["volumes", f"{w}, MiB/s", number(value(OWN, w)), f"{number(value('luks', w))}, LUKS; {number(value('file', w))}, plain file",
             f"{number(value(OWN, w) / value('luks', w))}; {number(value(OWN, w) / value('file', w))}"]
            for w in names(result["samples"], "workload") if "connections" not in w]


def rows_of_study(result):
    samples = result["samples"]
    shapes = list(dict.fromkeys((s["channels"], s["directories"]) for s in samples))
    value = lambda way, shape: median(by(samples, way=way, channels=shape[0], directories=shape[1]), "mib_s")  # noqa: E731
    return [["study", f"channels / directories {c} / {d}: pipelined writes, MiB/s", number(value("pipelined", (c, d))),
             f"{number(value('synchronous', (c, d)))}, synchronous; {number(value('none', (c, d)))}, no encryption",
             f"{number(value('pipelined', (c, d)) / value('synchronous', (c, d)))}; {number(value('pipelined', (c, d)) / value('none', (c, d)))}"]
            for c, d in (shapes[0], shapes[-1]) if value("pipelined", (c, d)) and value("synchronous", (c, d)) and value("none", (c, d))]


def rows_of_compression(result):
    samples, base, rows = result["samples"], "none, 64K", []
    for codec in ("lz4, 64K", "zstd, 64K"):
        for op in ("write", "read"):
            found = {kind: paired(samples, codec, base, ("memory", op, kind), "value") for kind in names(samples, "data")}
            if any(found.values()):
                rows.append(["compression", f"{codec}, {op}: {' / '.join(found)}", "–", "no compression, 64K", " / ".join(number(factor) for factor in found.values())])
    return rows


def rows_of_savings(result):
    of = [s for s in result["samples"] if s["store"] != "XFS"]
    vault = "zstd, 64K"
    if vault not in names(of, "system"):
        return []
    kinds = list(result["sizes"])
    own, plain = ([saved(of, kind, system, result) for kind in kinds] for system in (vault, PLAIN))
    missed = [kind for kind, one, other in zip(kinds, own, plain) if one < other - TARGET_POINTS]
    percent = lambda found: " / ".join(f"{value:.1f}" for value in found)  # noqa: E731
    points = f"{' / '.join(f'{one - other:+.1f}' for one, other in zip(own, plain))} points; the target, at most {TARGET_POINTS} points less, is {'missed with ' + ', '.join(missed) if missed else 'met'}"
    return [["savings", f"% saved on {of[0]['store']}, vault with {vault}: {' / '.join(kinds)}", percent(own), f"{percent(plain)}, plain files", points]]


def ciphers(results, plots):
    result = results.get("ciphers")
    if not result:
        return ""
    samples = result["samples"]
    of = lambda s, k, op, b: median(by(samples, suite=s, kernel=k, op=op, block=b, threads=1), "gb_per_s")  # noqa: E731
    kernels, blocks = [k for k in names(by(samples, suite="aes"), "kernel") if not k.startswith("device, ")], names(samples, "block")
    lines(plots, "ciphers", blocks, {k: [of("aes", k, "seal", b) for b in blocks] for k in kernels}, "block", "GB/s sealed, suite aes, one thread", bottom=0)
    block, fastest = "4K" if "4K" in blocks else blocks[0], kernels[-1]
    found = "; ".join(f"`{s}` {number(of(s, fastest, 'seal', block))} / {number(of(s, fastest, 'open', block))} ({number(of(s, 'library', 'seal', block))} / {number(of(s, 'library', 'open', block))})"
                      for s in names(samples, "suite"))
    return f"""## Ciphers

{paragraph(f"Blocks of {block}, one thread, GB/s, medians of {result['runs']}; seal / open with the kernel `{fastest}`, and in brackets with RustCrypto called block by block: {found}. `scripts/bench ciphers`.")}

![kernels](plots/ciphers.svg)"""


def rest(results):
    left = [name for name, r in results.items() if not is_default(r)]
    left += [f"{name} ({', '.join(n for n, s in r['sweeps'].items() if not is_default(s))})" for name, r in results.items()
             if is_default(r) and any(not is_default(s) for s in r.get("sweeps", {}).values())]
    said = ("Figures are medians. The systems take turns within one run, so that a slow minute of the machine affects all alike. Other virtual machines on the same host cannot be paused. "
            "**Ratios mean more than rates**, and differences below about 10 % mean nothing. Each file in `results/` names the machine, the versions and Lamassu's commit. "
            "`make bench` measures everything again and writes the long report to `target/bench/report.md`: all tables, systems and options, spreads, processor time, memory, the figures of the "
            "published work, networks, sweeps. `scripts/bench report` writes it from `results/` without measuring. To pause other work during each pass: `scripts/bench --before COMMAND --after COMMAND`.")
    if left:
        said += f" Measured with `keep_awake`, which is off by default, and therefore in the long report alone: {', '.join(left)}."
    return f"## Method and long report\n\n{paragraph(said)}"


FURTHER = {"shared": rows_of_shared, "server": rows_of_server, "tenants": rows_of_tenants, "listings": rows_of_listings, "volumes": rows_of_volumes, "study": rows_of_study,
           "compression": rows_of_compression, "savings": rows_of_savings}
