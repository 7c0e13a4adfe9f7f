"""The integrity tree: its degree, and whether its records are fetched beside pages."""

from ..plots import lines
from .figures import by, median, names, number, runs, table


def tree(results, plots):
    result = results["tree"]
    samples = result["samples"]
    degrees, sizes, patterns, delays = (sorted(names(samples, k)) if k != "pattern" else names(samples, k) for k in ("degree", "size_mib", "pattern", "delay_us"))
    of = lambda key, **where: median(by(samples, **where), key)  # noqa: E731
    largest, slow = sizes[-1], delays[-1]
    for name, delay in (("tree-local", delays[0]), ("tree-network", slow)):
        series = {p: [of("seconds", degree=d, size_mib=largest, pattern=p, delay_us=delay, fetching="beside") / of("seconds", degree=16, size_mib=largest, pattern=p,
                  delay_us=delay, fetching="beside") for d in degrees] for p in patterns}
        lines(plots, name, [str(d) for d in degrees], series, f"degree, a file of {largest} MiB", "time ÷ degree 16", bottom=0)
    seconds = [[f"{size} MiB", pattern, f"{delay / 1000:g} ms", *(number(of("seconds", degree=d, size_mib=size, pattern=pattern, delay_us=delay, fetching="beside")) for d in degrees)]
               for size in sizes for pattern in patterns for delay in delays]
    records = [[f"{size} MiB", pattern, *(number(of("records_read", degree=d, size_mib=size, pattern=pattern, delay_us=0, fetching="in series")) for d in degrees)]
               for size in sizes for pattern in patterns]
    anchor = [[f"{size} MiB", *(number(of("anchor_bytes", degree=d, size_mib=size, pattern="overwrite", delay_us=0, fetching="in series") / 1024) for d in degrees)] for size in sizes]
    beside = [[f"{size} MiB", pattern, *(number(of("seconds", degree=d, size_mib=size, pattern=pattern, delay_us=slow, fetching="in series") /
                                                of("seconds", degree=d, size_mib=size, pattern=pattern, delay_us=slow, fetching="beside")) for d in degrees)]
              for size in sizes for pattern in patterns]
    heads = [str(d) for d in degrees]
    return f"""## The integrity tree of an anchored file

One file without a mount, aes, 4 KiB blocks, page cache empty before each pattern: read in sequence by 1 MiB; one block of each page; 1000 blocks at random; 256 blocks overwritten
at random with an fsync after each 16. The store is {result["store"]}, as it is and with {slow / 1000:g} ms added to each read, as over a network; {runs(result)}; `scripts/bench tree`.

Seconds by degree, records fetched beside pages:

{table(["file", "pattern", "added", *heads], seconds)}

![by degree](plots/tree-local.svg) ![by degree, over a network](plots/tree-network.svg)

Records read:

{table(["file", "pattern", *heads], records)}

KiB of tree records that the anchor was given for those 256 overwrites:

{table(["file", *heads], anchor)}

Time with records fetched after pages ÷ beside them, {slow / 1000:g} ms added to each read:

{table(["file", "pattern", *heads], beside)}"""
