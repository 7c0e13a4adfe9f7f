"""One figure by another: SAN.FS's figures, readers and writers, and what grows."""

import statistics

from .. import published
from ..plots import lines
from .figures import by, like, median, names, number, runs, table

# What a sweep shows, and why. In braces what `facts` knows of its samples.
SWEEP_NOTES = {
    "clients": "Lamassu ÷ PlainFS: {part}. Published: hardly any difference while the page cache takes what few clients write, then 13 % less with AES-128 and 17 % with AES-256 "
               "beyond 48 clients, over gigabit Ethernet. Here the store is memory and nothing waits for it, so what hashing, ciphers and encrypted names cost shows in full, and two processors are "
               "all there is for the clients, the kernel and the mount. A single client waits for each answer, and the processors sleep meanwhile where nothing keeps them awake; two clients "
               "keep them busy.{awake}",
    "cipher-threads": "Lamassu ÷ PlainFS: {part}. Published: 28 to 44 % less than without encryption from three threads on, and no gain beyond the number of processors. It is flat here: a request is "
                      "sealed by the thread that received it, at some 2 GB/s, and helpers are asked only while processors are idle, which two seldom are.",
    "postmark-size": "In seconds, so less is better. PlainFS's time as a part of Lamassu's: {inverse}. Published: at most 10 % overhead, on disks behind iSCSI that took most of the time.",
    "writers": "Lamassu ÷ PlainFS: {part}. One writer keeps both processors busy already (its own, and the mount's behind the kernel's write-back), so further writers share what one has; the peers, "
               "a request at a time, gain from the second processor.",
    "readers": "Lamassu ÷ PlainFS: {part}. As with writers. With eight files of 32 MiB each pass is short, and what opening and the first pages of each file cost weighs more, for PlainFS as well.",
    "write-size": "Lamassu ÷ PlainFS: {part}. Below 16 MiB creating, closing and syncing the file is most of it. PlainFS, which has no work of its own, ran from {least_plain} to {most_plain} MB/s from 256 MiB "
                  "on: the disk below is shared, and a figure measured once depends on its minute. From some GiB on the disk writes at the same time and uses a part of the two processors; at the "
                  "largest size Lamassu's process took {cpu_per_gib} processor seconds a GiB, PlainFS's {plain_cpu_per_gib}. Three page caches (the mount's, the store's and the image's) take a page for "
                  "each that is written, and a page that the hypervisor has to give costs a virtual machine several times the copy into it; memory is touched before each pass from 256 MiB on, but it "
                  "does not last for the largest. The daemon's peak memory: {memory}, of which the "
                  "dirty data that it gathers is at most 80 MiB a file.",
    "read-size": "Lamassu ÷ PlainFS: {part}. A file of 4 GiB comes from the disk below, smaller ones from the page cache of what the image lies on; where Lamassu comes out ahead of PlainFS, "
                 "that is the disk's minute. The daemon's peak memory: {memory}.",
    "files-made": "Rates from {least} to {most} files/s, a thousand files a directory. The daemon's peak memory: {memory}; {growth}.",
    "files-found": "More files share what the mount's first requests cost. The daemon's peak memory: {memory}; {growth}.",
    "processor": "Everything ÷ nothing: {on_off} in writing through the mount, where most of the time is FUSE's.",
}


def sweeps(results, plots):
    result = results["sweeps"]
    return "\n\n".join(part for part in [head("How figures change with another", "sweeps", result), sanfs_figures(result), *curves(results, result, plots)] if part)


def growth(results, plots):
    result = results["growth"]
    return "\n\n".join([head("Larger files, and more files", "growth", result), *curves(results, result, plots)])


def head(title, experiment, result):
    return f"## {title}\n\n{runs(result).capitalize()}; `scripts/bench {experiment}`. With each point: the serving process's processor seconds and its peak memory."


def curves(results, result, plots):
    """A section for each sweep."""
    for name, sweep in result["sweeps"].items():
        samples = by(result["samples"], sweep=name)
        if not samples:
            continue
        systems, points = names(samples, "system"), sweep["points"]
        value = lambda s, x: median(by(samples, system=s, point=x), "value")  # noqa: E731
        lines(plots, f"sweep-{name}", [str(x) for x in points], {s: [value(s, x) for x in points] for s in systems}, sweep["axis"], sweep["unit"], bottom=0)
        once = [x for x in points if result["runs"] > 1 and len(names(by(samples, point=x), "run")) == 1]
        rows = [[f"{x}{' (once)' if x in once else ''}", *(number(value(s, x)) for s in systems)] for x in points]
        used = [[str(x), *(" · ".join(number(median(by(samples, system=s, point=x), key)) for key in ("cpu_s", "rss_peak_mib")) for s in systems)] for x in points]
        known = facts(result, name, samples)
        note = SWEEP_NOTES[name].format(**known) if name in SWEEP_NOTES and ("part" in known or "{part}" not in SWEEP_NOTES[name] and "{inverse}" not in SWEEP_NOTES[name]) else ""
        if name == "processor":
            note += " " + zfs_aes(results)
        if once:
            note += f" Measured once: {', '.join(str(x) for x in once)}."
        yield f"""### {sweep["title"]}

{table([f"{sweep['axis']}, {sweep['unit']}", *systems], rows)}

{table([f"{sweep['axis']}, s · MiB", *systems], used)}

{note}

![{name}](plots/sweep-{name}.svg)"""


def facts(result, name, samples):
    """What the notes say of a sweep, from its samples."""
    points, systems = result["sweeps"][name]["points"], names(samples, "system")
    of = lambda s, x, key="value": median(by(samples, system=s, point=x), key)  # noqa: E731
    joined = lambda what, points=points: ", ".join(what(x) for x in points)  # noqa: E731
    own, found = [of("lamassu", x) for x in points], {}
    peaks = [of("lamassu", x, "rss_peak_mib") for x in points]
    found["memory"] = f"{', '.join(number(p) for p in peaks)} MiB"
    found["least"], found["most"], found["on_off"] = number(min(own)), number(max(own)), f"{own[0] / own[-1]:.1f}×"
    if name.startswith("files"):
        each = 2**20 * (peaks[-1] - peaks[0]) / (points[-1] - points[0])
        grows = peaks[-1] > 4 * peaks[0]
        found["growth"] = f"it grows with their number, by {each:.0f} bytes a file" if grows else "it does not grow in step with their number"
    ratio = joined(lambda x: f"{of('lamassu-awake', x) / of('lamassu', x):.0%}") if "lamassu-awake" in systems else ""
    found["awake"] = f" `lamassu-awake` ÷ Lamassu: {ratio}." if ratio else ""
    if "plainfs" in systems:
        ours = like("plainfs", result["sweeps"][name])
        found["part"] = joined(lambda x: f"{of(ours, x) / of('plainfs', x):.0%}")
        found["inverse"] = joined(lambda x: f"{of('plainfs', x) / of(ours, x):.0%}")
        if name == "write-size":
            large = [of("plainfs", x) for x in points if x >= 256] or [of("plainfs", points[-1])]
            found["least_plain"], found["most_plain"] = number(min(large)), number(max(large))
            found["cpu_per_gib"], found["plain_cpu_per_gib"] = (number(of(s, points[-1], "cpu_s") / (points[-1] / 1024)) for s in ("lamassu", "plainfs"))
    return found


def sanfs_figures(result):
    """SAN.FS's Figures 5 to 7 as far as its text gives numbers: what encryption costs."""
    rows = []
    for name, (where, least, most) in published.SANFS_FIGURES.items():
        samples = by(result["samples"], sweep=name)
        if name not in result["sweeps"] or not samples or "plainfs" not in names(samples, "system"):
            continue
        cost = {}
        for x in result["sweeps"][name]["points"]:
            own, plain = (median(by(samples, system=s, point=x), "value") for s in (like("plainfs", result["sweeps"][name]), "plainfs"))
            cost[x] = 100 * (1 - (plain / own if result["sweeps"][name]["unit"] == "s" else own / plain))
        far = {x: c for x, c in cost.items() if name == "postmark-size" or name == "clients" and x == max(cost) or name == "cipher-threads" and x >= min(3, max(cost))}
        here = f"{min(far.values()):.0f} to {max(far.values()):.0f} %" if len(far) > 1 else f"{next(iter(far.values())):.0f} %"
        kept = number((1 - statistics.mean(far.values()) / 100) / (1 - (least + most) / 200))
        rows.append([f"{result['sweeps'][name]['title']}: {where}", f"{least} to {most} %" if least else f"at most {most} %", f"{here} (at {', '.join(str(x) for x in far)} {result['sweeps'][name]['axis']})", kept])
    return f"What encryption costs beside none, and the speed kept, here ÷ published (middles of the ranges):\n\n{table(['', 'published', 'here', 'here ÷ published'], rows)}" if rows else ""


def zfs_aes(results):
    """The ZFS articles' acceleration on and off, beside this machine's."""
    on, off = published.ZFS_AES
    said = f"The ZFS articles' `openssl speed`, AES alone in blocks of 8 KiB: {on} against {off} MB/s, {on / off:.1f}×."
    if "ciphers" in results:
        samples = results["ciphers"]["samples"]
        block = "8K" if by(samples, block="8K") else "4K"
        rate = lambda k: median(by(samples, suite="aes", kernel=k, op="open_unverified", block=block, threads=1), "gb_per_s")  # noqa: E731
        fast = [rate(k) for k in names(by(samples, suite="aes"), "kernel") if not k.startswith("device") and rate(k)]
        if fast and rate("portable"):
            ours = max(fast) / rate("portable")
            said += f" AES-256 alone here (`open_unverified`, {block}): {1000 * max(fast):.0f} against {1000 * rate('portable'):.0f} MB/s, {ours:.0f}× ({ours * off / on:.1f} times their gain)."
    return said
