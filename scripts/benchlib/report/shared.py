"""Hosts that share a vault under a server, beside the same vault on one host."""

import statistics

from .figures import by, median, names, number, runs, table, values

TITLE = {"lamassu": "one host, anchor in a file", "server": "one host, anchor at the server", "shared": "`mount --shared`", "datasets": "the same, a dataset for each host",
         "sshfs": "sshfs, a plain directory"}


def ratio(result, system, workload):
    """Its speed ÷ that of one host with its anchor in a file: the median over runs, each with its own neighbour."""
    samples, is_time = result["samples"], result["units"][workload] == "s"
    pairs = [(own["value"], base["value"]) for own in by(samples, system=system, workload=workload) for base in by(samples, system="lamassu", workload=workload, run=own["run"])]
    found = [base / own if is_time else own / base for own, base in pairs if own and base]
    return statistics.median(found) if found else None


def figures(result):
    samples, units = result["samples"], result["units"]
    systems, workloads = names(samples, "system"), names(samples, "workload")
    cell = lambda s, w: number(median(by(samples, system=s, workload=w), "value")) if values(samples, system=s, workload=w) else "–"  # noqa: E731
    rows = [[f"{w}, {units[w]}", *(cell(s, w) for s in systems), *(number(ratio(result, s, w)) for s in ("server", "shared"))] for w in workloads]
    return table(["", *(TITLE[s] for s in systems), "at the server ÷ in a file", "shared ÷ in a file"], rows)


def shared(results, _plots):
    result = results["shared"]
    return f"""## A vault that hosts share

Server and hosts are namespaces of this machine, the store is a directory in memory. A tree of {result["files"]} files, {result["bytes"] / 1e6:.0f} MB; a file of {result["size_mib"]} MiB; {runs(result)};
`scripts/bench shared`. A hand-over is the time in which one host has written and synced a file and the other has read it, programs and all. After it: two hosts at once, until both have ended.

{figures(result)}{locks(result.get("locks"))}"""


LOCKED = {"plain": "a directory in memory", "lamassu": "one host: the kernel's locks", "shared": "`mount --shared`", "network": "the network alone"}


def locks(result):
    """What locks of programs cost. Results of earlier versions have none."""
    if not result or not result["samples"]:
        return ""
    samples, units = result["samples"], result["units"]
    systems = [system for system in LOCKED if system in names(samples, "system")]
    cell = lambda s, w: number(median(by(samples, system=s, workload=w), "value")) if by(samples, system=s, workload=w) else "–"  # noqa: E731
    rows = [[f"{w}, {units[w]}", *(cell(s, w) for s in systems)] for w in units if by(samples, workload=w)]
    return f"""

Locks of programs, exclusive, of a whole file; medians. On a mount of several hosts the server is asked for a lock and for its unlock: two messages there and back,
which take twice as long as the network alone at least. Two hosts: both want one lock all the time, and how long one of them waited for it. sshfs has no locks among
hosts.

{table(["", *(LOCKED[s] for s in systems)], rows)}"""


def shared_sweeps(results, _plots):
    result = results["shared-sweeps"]
    samples = result["samples"]
    value = lambda s, w, p: median(by(samples, system=s, workload=w, point=p), "value") if by(samples, system=s, workload=w, point=p) else None  # noqa: E731
    placed = [s for s in ("lamassu", "server", "shared") if s in names(samples, "system")]
    parts = [f"""## SAN.FS's experiments with the server in the path

Server and host are namespaces of this machine, the store is a directory in memory, one host works; {runs(result)}; `scripts/bench shared-sweeps`. Two hosts
at once are [above](#a-vault-that-hosts-share). Figures of one host without a server, beside plain files, are [above](#how-figures-change-with-another)."""]
    for figure, meant in result["figures"].items():
        points = names(by(samples, workload=figure), "point")
        if points:
            beside = lambda s, p: quotient(value(s, figure, p), value("lamassu", figure, p), meant["unit"])  # noqa: E731
            rows = [[str(p), *(number(value(s, figure, p)) for s in placed), *(number(beside(s, p)) for s in placed[1:])] for p in points]
            heads = [f"{meant['axis']}, {meant['unit']}", *(TITLE[s] for s in placed), *(f"{s} ÷ in a file" for s in placed[1:])]
            parts.append(f"### {meant['title']}\n\n{table(heads, rows)}")
    parts.append(f"### A large file in sequence, {result['size_mib']} MiB (SAN.FS, Table 2), MB/s\n\n{tables(value, ['bare', *placed], 'table 2', ['write', 'read'])}")
    systems = names(by(samples, workload="table 3"), "system")
    if systems:
        parts.append(f"### Postmark, {result['files']} files up to 20 MB, by cipher (SAN.FS, Table 3), MB/s\n\n{tables(value, systems, 'table 3', ['Postmark'])}")
    return "\n\n".join(parts)


def tables(value, systems, workload, points):
    return table(["", *points, *(f"{p} ÷ bare" for p in points)],
                 [[s, *(number(value(s, workload, p)) for p in points), *(number(value(s, workload, p) / value("bare", workload, p)) for p in points)] for s in systems])


def quotient(own, base, unit):
    """Of speeds."""
    return base / own if unit == "s" else own / base
