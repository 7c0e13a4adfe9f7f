"""Medians, ratios and tables: what the sections of the report share."""

import statistics

PEERS = ("gocryptfs", "securefs", "cryfs", "encfs")
# Ratios between these are called even: the machine's noise is as large.
EVEN = (0.9, 1.1)
SURE = "the medians differ by more than 10 % and the middle halves of at least three runs (their quartiles) do not overlap"
FEW = 3  # fewer runs establish nothing


def runs(result):
    return "1 run" if result["runs"] == 1 else f"{result['runs']} runs"


def median(samples, key):
    found = [s[key] for s in samples if s.get(key) is not None]
    return statistics.median(found) if found else None


def by(samples, **wanted):
    return [s for s in samples if all(s.get(k) == v for k, v in wanted.items())]


def names(samples, key):
    return list(dict.fromkeys(s[key] for s in samples))


def table(heads, rows):
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" + "--:|" * (len(heads) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def number(value):
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def rate(samples, system, workload):
    """The mount table's figure: what is read where anything is, else what is written."""
    found = rates(samples, system, workload)
    return statistics.median(found) if found else None


def rates(samples, system, workload):
    found = by(samples, system=system, workload=workload)
    return [s["read"] for s in found if s["read"]] or [s["write"] for s in found if s["write"]]


def values(samples, **wanted):
    return [s["value"] for s in by(samples, **wanted)]


def quartiles(found):
    if len(found) == 1:
        return found[0], found[0]
    low, _, high = statistics.quantiles(found, n=4, method="inclusive")
    return low, high


def best(found, systems, less_is_better, own="lamassu"):
    """(speed of `own` ÷ the best peer's, that peer, whether their runs are apart). `found`: system → values."""
    peers = {p: statistics.median(found(p)) for p in PEERS if p in systems and any(found(p))}
    if not peers or not any(found(own)):
        return None, "–", False
    peer, mine = (min if less_is_better else max)(peers, key=peers.get), statistics.median(found(own))
    (low, high), (peer_low, peer_high) = quartiles(found(own)), quartiles(found(peer))
    return (peers[peer] / mine if less_is_better else mine / peers[peer]), peer, min(len(found(own)), len(found(peer))) >= FEW and (low > peer_high or high < peer_low)


def spread(found):
    return f"{number(statistics.median(found))} ({number(min(found))}–{number(max(found))})" if found else "–"


def spreads(result, heads, rows):
    """A table of the runs' spread; nothing where there was one."""
    return f"\n\nMedian (lowest–highest of the runs):\n\n{table(heads, rows)}" if result["runs"] > 1 else ""


def like(other, result):
    """Lamassu's series to compare `other` with: both with `keep_awake`, or both without."""
    found = result.get("awake", ())
    return "lamassu-awake" if other in found and "lamassu" not in found else "lamassu"
