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
    said = " ".join(f"{system}: {'missed with ' + ', '.join(kinds) if kinds else 'met with all'}." for system, kinds in missed.items())
    return table(["points", *systems, "a page for each file"], rows), said


def savings(results, plots):
    del plots
    result = results["savings"]
    points, missed = against_plain(result)
    parts = [f"## Savings\n\n{told(result)}", tables(result)]
    if points:
        parts += [f"Points by which vaults that compress save more (+) or less (-) than plain files on the store that compresses. The last column is the most that a page of {PAGE} bytes for each "
                  f"file costs (equal small files share theirs). The target is to save at most {TARGET_POINTS} points less. {missed} docs/stores.md has the reasons.", points]
    return "\n\n".join(parts)
