"""What deduplication and compression save together."""

from .figures import by, names, table


def told(result):
    sizes = ", ".join(f"{kind} {size / 1e6:.0f} MB" for kind, size in result["sizes"].items())
    return (f"Of {sizes}: per cent that are saved by sharing equal blocks and, in some columns, compressing, as the store counts what is in use, its metadata and "
            "Lamassu's included. `plain` is the files as they are, shared in blocks of 64 KiB. `scripts/bench savings`.")


def tables(result):
    samples = result["samples"]
    found = []
    for store in names(samples, "store"):
        of = by(samples, store=store)
        systems = names(of, "system")
        rows = [[kind, *(f"{percent(by(of, data=kind, system=system), size):.1f}" for system in systems)] for kind, size in result["sizes"].items()]
        found.append(table([store, *(system.replace("plain files, 64K", "plain") for system in systems)], rows))
    return "\n\n".join(found)


def percent(samples, size):
    return 100 * (1 - samples[0]["used"] / size)


def savings(results, plots):
    del plots
    return f"## Savings\n\n{told(results['savings'])}\n\n{tables(results['savings'])}"
