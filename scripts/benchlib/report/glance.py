"""The first lines of the report: where Lamassu is faster than the best peer, and where it is not."""

from .figures import EVEN, SURE, best, by, names, rates, values

# Other mounts than the default, and what they are.
WAYS = {"lamassu-awake": "With `keep_awake=always`, which is off by default and root's alone, and which no peer has (docs/semantics.md):"}


def glance(results):
    lines = ["## At a glance", "", f"\"Faster\" and \"slower\" are said only where {SURE}.", "",
             "Lamassu, with full integrity and its default options, mounted by root, beside the fastest of the encrypting peers in each line:", "", *sorted_out(factors(results))]
    lost = [f"{title}, {point}: {factor:.2f}× ({peer})" for title, point, factor, peer in lost_in_sweeps(results)]
    if lost:
        lines += [f"* Slower by the medians of the sweeps below: {'; '.join(lost)}."]
    for own, said in WAYS.items():
        found = [f for f in factors(results, own) if f[1] is not None]
        if found:
            lines += ["", said, "", *sorted_out(found)]
    return "\n".join(lines)


def factors(results, own="lamassu"):
    """(what, how many times as fast as the best peer, that peer, whether the runs' middle halves are apart), over everything measured; `own`: which mount."""
    if "mount" in results:
        samples = results["mount"]["samples"]
        for workload in names(samples, "workload"):
            yield workload, *best(lambda s, w=workload: rates(samples, s, w), names(samples, "system"), False, own)
    for experiment in ("small", "durable"):
        if experiment in results:
            samples, units = results[experiment]["samples"], results[experiment]["units"]
            for workload in names(samples, "workload"):
                found = lambda s, w=workload: values(samples, system=s, workload=w)  # noqa: E731
                yield workload, *best(found, names(samples, "system"), units[workload] == "s", own)


def sorted_out(found):
    """Lines of what is faster, even and slower."""
    parts = {"Faster": [], "Even, or not established by these runs": [], "Slower": []}
    faster, even, slower = parts.values()
    for what, factor, peer, apart in found:
        if factor is None:
            continue
        if apart and factor > EVEN[1]:
            faster.append(f"{what} {factor:.1f}×")
        elif apart and factor < EVEN[0]:
            slower.append(f"**{what} {factor:.2f}×** ({peer})")
        else:
            even.append(f"{what} {factor:.2f}×")
    return [f"* {title}: {', '.join(part) or 'nowhere'}." for title, part in parts.items()]


def lost_in_sweeps(results):
    """(title, point, factor, peer) where Lamassu, by default options, is slower than the best peer of a sweep."""
    found = [(name, sweep, results[e]["samples"]) for e in ("sweeps", "growth") if e in results for name, sweep in results[e]["sweeps"].items()]
    for name, sweep, every in found:
        if "lamassu" in sweep.get("awake", ()):
            continue
        samples = by(every, sweep=name)
        for point in sweep["points"]:
            factor, peer, _ = best(lambda s, x=point: values(samples, system=s, point=x), names(samples, "system"), sweep["unit"] == "s")
            if factor is not None and factor < EVEN[0]:
                yield sweep["title"], f"at {point} {sweep['axis']}", factor, peer
