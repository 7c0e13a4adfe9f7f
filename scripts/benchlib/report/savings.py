"""What deduplication and compression save together."""

from .figures import by, names, table

PLAIN = "plain files, 64K"
# Per cent that a vault may save less than plain files on the same store.
TARGET_POINTS = 3
# Of the header and keys of a file.
PAGE = 4096


def told(result):
    sizes = ", ".join(f"{kind} {size / 1e6:.0f} MB in {result['files'][kind]} files" for kind, size in result["sizes"].items())
    return (f"Of {sizes}: per cent that are saved by sharing equal blocks and, in some columns, compressing, as the store counts what is in use, its metadata and "
            "Lamassu's included. `plain` is the files as they are, shared in blocks of 64 KiB. `scripts/bench savings`.")


def tables(result):
    samples = result["samples"]
    found = []
    for store in names(samples, "store"):
        of = by(samples, store=store)
        systems = names(of, "system")
        rows = [[kind, *(f"{saved(of, kind, system, result):.1f}" for system in systems)] for kind in result["sizes"]]
        found.append(table([store, *(system.replace(PLAIN, "plain") for system in systems)], rows))
    return "\n\n".join(found)


def saved(samples, kind, system, result):
    return 100 * (1 - by(samples, data=kind, system=system)[0]["used"] / result["sizes"][kind])


def against_plain(result):
    """(table, sentences): how many points vaults that compress save more or less than plain files on the store that compresses."""
    of = [s for s in result["samples"] if s["store"] != "XFS"]
    systems = [system for system in names(of, "system") if system != PLAIN and not system.startswith("none")]
    if not systems:
        return "", ""
    points = {system: {kind: saved(of, kind, system, result) - saved(of, kind, PLAIN, result) for kind in result["sizes"]} for system in systems}
    page = {kind: 100 * PAGE * result["files"][kind] / size for kind, size in result["sizes"].items()}
    rows = [[kind, *(f"{points[system][kind]:+.1f}" for system in systems), f"{page[kind]:.1f}"] for kind in result["sizes"]]
    missed = {system: [kind for kind in page if points[system][kind] < -TARGET_POINTS] for system in systems}
    alike = {}
    for system, kinds in missed.items():
        alike.setdefault(tuple(kinds), []).append(system)
    told_of = lambda kinds: "met with all" if not kinds else "missed with all" if len(kinds) == len(page) else f"missed with {', '.join(kinds)}"  # noqa: E731
    said = " ".join(f"{'; '.join(systems)}: {told_of(kinds)}." for kinds, systems in alike.items())
    return table(["points", *systems, "a page for each file"], rows), said


def savings(results, plots):
    del plots
    points, said = against_plain(results["savings"])
    parts = ["## Savings", told(results["savings"]), tables(results["savings"])]
    if points:
        parts += ["On the store that compresses, vaults that compress against plain files there, in points; the last column is what a page of 4096 bytes for each file comes to at most "
                  f"(equal small files share theirs). The target is to save at most {TARGET_POINTS} points less. {said}", points]
    return "\n\n".join(parts)
