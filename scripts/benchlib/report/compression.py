"""What compression costs and gains."""

import statistics

from .figures import by, names, number, runs, table, values


def figures(result):
    """(rates, ratios, processor): MB/s by series; of some series what they are of others, each run against its own; the same of processor time."""
    samples = result["samples"]
    stores, kinds, series = (names(samples, key) for key in ("store", "data", "system"))
    columns = [(store, op, kind) for store in stores for op in ("write", "read") for kind in kinds if by(samples, store=store, op=op, data=kind)]
    heads = [f"{kind}, {op}{'' if store == 'memory' else ', ' + store}" for store, op, kind in columns]
    median = lambda s, c: statistics.median(found) if (found := values(samples, system=s, store=c[0], op=c[1], data=c[2])) else None  # noqa: E731
    rates = [[head, *(number(median(s, c)) for s in series)] for head, c in zip(heads, columns)]
    pairs = [(s, of) for s in series for of in (s.replace("none", "before"), "none, 64K") if of in series and of != s
             and (s.startswith("none") or of.startswith("none")) and not s.startswith("before")]
    titles = [f"{s} ÷ {of.split(',')[0]}" for s, of in pairs]
    of_pairs = lambda key: [[head, *(number(paired(samples, s, of, c, key)) for s, of in pairs)] for head, c in zip(heads, columns)]  # noqa: E731
    return (["MB/s", *series], rates), (["speed", *titles], of_pairs("value")), (["processor seconds", *titles], of_pairs("cpu_s"))


def paired(samples, system, of, column, key):
    """The median of the runs' ratios."""
    store, op, kind = column
    one, other = ({s["run"]: s[key] for s in by(samples, system=name, store=store, op=op, data=kind)} for name in (system, of))
    found = [one[run] / other[run] for run in one if run in other]
    return statistics.median(found) if found else None


def told(result):
    before = any(name.startswith("before") for name in names(result["samples"], "system"))
    said = " `before` is a build without the feature." if before else ""
    return (f"One file of {result['size_mib']} MiB, written with an fsync at the end and read by a new mount with cold caches; {result['store']}; {runs(result)}; "
            f"`scripts/bench compression`. `none` is a vault without compression, in blocks of 4 and 64 KiB; the codecs have 64 KiB.{said} Ratios are medians of each run's own.")


def tables(result):
    return "\n\n".join(table(*part) for part in figures(result))


def compression(results, plots):
    del plots
    return f"## Compression\n\n{told(results['compression'])}\n\n{tables(results['compression'])}"
