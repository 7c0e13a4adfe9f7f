"""Volumes over NBD beside LUKS and plain files."""

from .figures import by, median, names, number, runs, table

TITLE = {"lamassu": "`volume export`", "lamassu-62": "with 62 slots", "luks": "qemu-nbd, LUKS", "file": "nbdkit, plain file"}


def figures(result):
    samples = result["samples"]
    systems, workloads = names(samples, "system"), names(samples, "workload")

    def rate(workload, system):
        return median(by(samples, system=system, workload=workload), "mib_s")

    rows = [[w, *(number(rate(w, s)) for s in systems), *(number(rate(w, "lamassu") / rate(w, s)) for s in ("luks", "file"))] for w in workloads]
    costs = [[w, *(number(median(by(samples, system=s, workload=w), "us_4k")) for s in systems)] for w in workloads]
    rates = table(["MiB/s", *(TITLE[s] for s in systems), "÷ LUKS", "÷ plain"], rows)
    return rates + "\n\n" + table(["server's processor time, µs for 4 KiB", *(TITLE[s] for s in systems)], costs)


def told(result):
    return (f"A volume of {result['size_mib']} MiB, by fio over a local socket, {result['depth']} requests at once, on one connection unless said otherwise, {result['seconds']} s each and a flush at the "
            f"end; {runs(result)}. Caches of the host are warm: the plain file shows what NBD and they give. `scripts/bench volumes`.")


def volumes(results, _plots):
    return f"""## Volumes over NBD

{told(results["volumes"])}

{figures(results["volumes"])}"""
