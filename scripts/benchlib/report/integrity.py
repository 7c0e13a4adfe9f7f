"""What integrity costs: SAN.FS's Tables 2 and 3."""

from .. import published
from ..integrity import SYSTEMS
from ..plots import bars
from .figures import by, median, names, number, runs, table


def integrity(results, plots):
    result = results["integrity"]
    samples = result["samples"]
    systems, workloads = names(samples, "system"), names(samples, "workload")
    value = lambda s, w: median(by(samples, system=s, workload=w), "value")  # noqa: E731
    bars(plots, "integrity", workloads, {s: [value(s, w) for w in workloads] for s in systems}, "MB/s")
    shown = [s for s in systems if s in SYSTEMS]
    rows = [[w, *(number(value(s, w)) for s in shown)] for w in workloads]
    said = ""
    plain, without, full = "plainfs", "lamassu-bare", "lamassu"
    if all(s in shown for s in (plain, without, full)):
        compared = [(f"{w}: integrity", value(full, w) / value(without, w), published.SANFS_TABLE2[w]) for w in ("write", "read")]
        if "Postmark" in workloads:
            compared += [("Postmark: encryption", value(without, "Postmark") / value(plain, "Postmark"), published.SANFS_TABLE3["encryption"]),
                         ("Postmark: integrity", value(full, "Postmark") / value(without, "Postmark"), published.SANFS_TABLE3["integrity"])]
        said = "\n\n" + table(["speed kept", "published", "here", "here ÷ published"],
                              [[what, number(1 + theirs / 100), number(here), number(here / (1 + theirs / 100))] for what, here, theirs in compared])
    said += by_cipher(systems, lambda s: value(s, "Postmark"))
    return f"""## What integrity costs (SAN.FS, Tables 2 and 3)

A file of {result["size_mib"]} MiB in sequence, and Postmark with 1000 files of up to 20 MB and 500 transactions, MB/s; {result["store"]}, {runs(result)};
`scripts/bench integrity`. `lamassu` is the default: a Merkle tree over the pages of each file, its root in the anchor, and every block hashed again. `lamassu-unanchored` has no
tree (`--anchor none`), `lamassu-metadata` does not hash blocks again (`--integrity metadata`), `lamassu-bare` neither.

{table(["MB/s", *shown], rows)}{said}

![integrity](plots/integrity.svg)

They differ because the report's tree is over blocks, and is fetched before data is read. Here a block's key is derived from its hash, so that the tree is over pages alone, one for
116 blocks; its records are fetched beside them. Writing costs a commit of the anchor, reading one more hash of each block, from memory. The store is a disk that is shared with other
machines; its rate varies more than the modes differ."""


def by_cipher(systems, postmark):
    """Table 3's rows: Postmark by cipher, without and with integrity; nothing where no other cipher was measured."""
    kinds = {"aes": ("lamassu-metadata", "lamassu"), **{k: (f"{k}, metadata", f"{k}, full") for k in ("paper", "blake3", "chacha")}}
    if not any(s in systems for pair in list(kinds.values())[1:] for s in pair):
        return ""
    plain = postmark("plainfs") if "plainfs" in systems else None
    of = lambda a, b: number(a / b) if a and b else "–"  # noqa: E731
    rows = [["no encryption, plainfs", number(plain), "–", "–", "–", "–"]] if plain else []
    for kind, pair in kinds.items():
        without, full = (postmark(s) if s in systems else None for s in pair)
        rows.append([kind, number(without), of(without, plain), number(full), of(full, plain), of(full, without)])
    theirs = [[name, number(a), of(a, 219) if a != 219 else "–", number(b), of(b, 156) if b != 156 else "–", of(b, a)] for name, a, b in published.SANFS_POSTMARK]
    heads = ["no integrity", "÷ no encryption", "with integrity", "÷ no encryption", "integrity's part"]
    return f"""

Postmark by cipher, MB/s here (PlainFS has no integrity, so the second and fourth column compare with the same rate; suites `blake3` and `chacha` have no mode without integrity):

{table(["suite", *heads], rows)}

Published, Mbit/s:

{table(["", *heads], theirs)}"""
