"""What a server of shared vaults does by itself."""

from .figures import by, median, names, number, runs, table


def figures(result):
    samples, units = result["samples"], result["units"]
    systems, workloads = names(samples, "system"), names(samples, "workload")
    rows = [[f"{w}, {units[w]}", *(number(median(by(samples, system=s, workload=w), "value")) for s in systems)] for w in workloads]
    return table(["state in", *systems], rows)


def oblivious(result):
    rows = result.get("oblivious")
    if not rows:
        return ""
    columns = {"first": "written for the first time", "again": "written again", "server": "evaluated by the server"}
    lines = [[str(batch), *(number(median(by(rows, batch=batch), what)) for what in columns)] for batch in names(rows, "batch")]
    return f"""
Blocks of 4 KiB under an oblivious key, MB/s by one core of the host, and by one of its server; both in one process, without a network.

{table(["blocks at once", *columns.values()], lines)}"""


def told(result):
    return (f"{result['vaults']} vaults, one session each, for {result['seconds']} s: commits of {result['batch']} rows, one after the other, each durable; and the "
            f"vault taken to look at, and given back. Server, etcd and clients on one machine and its disk; {runs(result)}. `scripts/bench server`.")


def server(results, _plots):
    return f"""## A server by itself

{told(results["server"])}

{figures(results["server"])}
{oblivious(results["server"])}"""
