"""One tenant beside another that floods."""

from .figures import by, median, names, number, runs, table

TITLE = {"gateway": "gateway over a vault", "proxy": "access proxy"}
TIMES = {"get_p50_ms": "GET, median", "get_p99_ms": "GET, p99", "put_p50_ms": "PUT, median", "put_p99_ms": "PUT, p99"}


def figures(result):
    samples, rows, floods = result["samples"], [], []
    for system in names(samples, "system"):
        alone, beside = by(samples, system=system, beside=False), by(samples, system=system, beside=True)
        rates = [median(found, "rate") for found in (alone, beside)]
        rows.append([TITLE[system], "requests/s", *(number(rate) for rate in rates), f"{100 * (1 - rates[1] / rates[0]):.0f} % less"])
        rows += [[TITLE[system], f"{title}, ms", *(number(median(found, name)) for found in (alone, beside)), ""] for name, title in TIMES.items()]
        rows.append([TITLE[system], "failed", *(str(sum(sample["failed"] for sample in found)) for found in (alone, beside)), ""])
        flood = [sample["flood"] for sample in beside]
        floods.append([TITLE[system], *(number(median(flood, name)) for name in ("requests_s", "refused_s", "mib_s"))])
    told = table(["", "", "alone", "beside the flood", "cost"], rows)
    return told + "\n\n" + table(["the flood", "requests/s answered", "refused", "MiB/s"], floods)


def told(result):
    return (f"A tenant asks for {result['gets_s']} objects a second and puts {result['puts_s']}, of {result['body_kib']} KiB; {result['seconds']} s alone and as long beside "
            f"another that floods the same server by {result['flood_threads']} threads with puts and gets of {result['flood_mib']} MiB, listings and connections; "
            f"{runs(result)}. Times count from when a request was due, so that a server that stalls cannot hide it. Limits are those by default. Client and server share the "
            "machine; the flood's client has the lowest priority there. `scripts/bench tenants`.")


def tenants(results, _plots):
    return f"""## One tenant beside another that floods

{told(results["tenants"])}

{figures(results["tenants"])}"""
