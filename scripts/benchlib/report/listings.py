"""Listings of a bucket with many keys."""

from .figures import by, median, names, number, table
from .tenants import TITLE

ROWS = {"v2_first_ms": "first page, ms", "v2_p50_ms": "a further page, ms", "v2_max_ms": "the slowest further page, ms", "v2_s": "all pages, s",
        "v1_s": "all pages by version 1, s", "groups_ms": "two groups, each of half the keys, ms", "folders_ms": "a page of folders, ms", "prefix_ms": "by a prefix, first page, ms",
        "random_p50_ms": "a page from a random place, ms", "random_p99_ms": "the same, p99, ms", "peak_mib": "memory of the process, at most, MiB",
        "after_mib": "the same at the end, MiB"}


def figures(result):
    systems = names(result["samples"], "system")
    rows = [[title, *(number(median(by(result["samples"], system=system), name)) for system in systems)] for name, title in ROWS.items()]
    return table(["", *(TITLE[system] for system in systems)], rows)


def told(result):
    return (f"A bucket of {result['keys']:,} empty objects, half of them in one directory and the others in directories of a thousand each. All are listed in pages of "
            f"{result['page']:,} and compared with the keys that were made, then {result['random_pages']} pages from random places; one run. Stores lie in memory, client and "
            "server share the machine. `scripts/bench listings`.")


def listings(results, _plots):
    return f"""## Listings

{told(results["listings"])}

{figures(results["listings"])}"""
