"""The study's experiment through volumes."""

from .figures import by, median, names, number, runs, table

TITLE = {"none": "no encryption", "synchronous": "synchronous", "pipelined": "pipelined"}


def told(result):
    return (f"Random 4 KiB writes over NBD, a volume of {result['size_mib']} MiB for each channel, a flush at the end; {runs(result)}. µs: the server's processor "
            f"time for 4 KiB. All directories lie on one disk, and {result['threads']} processors serve clients and servers. `scripts/bench study`.")


def figures(result):
    """The tables of writes, and of ciphers by themselves."""
    samples = result["samples"]
    ways, shapes = names(samples, "way"), list(dict.fromkeys((s["channels"], s["directories"]) for s in samples))

    def of(way, shape, key):
        return number(median(by(samples, way=way, channels=shape[0], directories=shape[1]), key))

    rows = [[f"{c} / {d}", *(of(w, (c, d), "mib_s") for w in ways), *(of(w, (c, d), "us_4k") for w in ways)] for c, d in shapes]
    writes = table(["channels / directories", *(f"{TITLE[w]}, MiB/s" for w in ways), *(f"{TITLE[w]}, µs" for w in ways)], rows)
    apart = table(["cipher alone, blocks of 4 KiB", "GB/s"], [[", ".join(f"{k} {v}" for k, v in row.items() if k != "gb_per_s"), number(row["gb_per_s"])]
                                                            for row in result["ciphers"]]) if result["ciphers"] else "The ciphers were not measured apart."
    return writes, apart


def study(results, _plots):
    writes, apart = figures(results["study"])
    return f"""## The study's experiment

{told(results["study"])}

{writes}

{apart}"""
