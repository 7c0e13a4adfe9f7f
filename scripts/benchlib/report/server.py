"""What a server of shared vaults does by itself."""

from .figures import by, median, names, number, runs, table


def figures(result):
    samples, units = result["samples"], result["units"]
    systems, workloads = names(samples, "system"), names(samples, "workload")
    rows = [[f"{w}, {units[w]}", *(number(median(by(samples, system=s, workload=w), "value")) for s in systems)] for w in workloads]
    return table(["state in", *systems], rows)


def told(result):
    return (f"{result['vaults']} vaults, one session each, for {result['seconds']} s: commits of {result['batch']} rows, one after the other, each durable; and the "
            f"vault taken to look at, and given back. Server, etcd and clients on one machine and its disk; {runs(result)}. `scripts/bench server`.")


def server(results, _plots):
    return f"""## A server by itself

{told(results["server"])}

{figures(results["server"])}"""
