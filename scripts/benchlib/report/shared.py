"""Hosts that share a vault under a server, beside the same vault on one host."""

import statistics

from .figures import by, median, names, number, runs, table, values

TITLE = {"lamassu": "one host, anchor in a file", "server": "one host, anchor at the server", "shared": "`mount --shared`", "sshfs": "sshfs, a plain directory"}


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
`scripts/bench shared`. A hand-over is the time in which one host has written and synced a file and the other has read it, programs and all.

{figures(result)}"""
