"""Volumes over NBD beside LUKS and plain files."""

from .figures import by, median, names, number, runs, table

TITLE = {"lamassu": "`volume export`", "luks": "qemu-nbd, LUKS", "file": "nbdkit, plain file"}


def figures(result):
    samples = result["samples"]
    systems, workloads = names(samples, "system"), names(samples, "workload")

    def rate(workload, system):
        return median(by(samples, system=system, workload=workload), "mib_s")

    rows = [[w, *(number(rate(w, s)) for s in systems), *(number(rate(w, "lamassu") / rate(w, s)) for s in ("luks", "file"))] for w in workloads]
    return table(["MiB/s", *(TITLE[s] for s in systems), "÷ LUKS", "÷ plain"], rows)


def told(result):
    return (f"A volume of {result['size_mib']} MiB, by fio over a local socket, {result['depth']} requests at once, {result['seconds']} s each and a flush at the "
            f"end; {runs(result)}. Caches of the host are warm: the plain file shows what NBD and they give. `scripts/bench volumes`.")


def volumes(results, _plots):
    return f"""## Volumes over NBD

{told(results["volumes"])}

{figures(results["volumes"])}"""
