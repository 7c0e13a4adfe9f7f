"""What deduplication saves: Figures 6 and 11 and Table 1 of the Lamassu paper."""

from .. import published
from ..plots import lines
from .figures import by, names, number, table


def space(results, plots):
    result = results["space"]
    percent = lambda r: 100 * r["after"] / r["before"]  # noqa: E731
    six, systems = result["figure6"], names(result["figure6"], "system")
    alphas = names(six, "alpha")
    lines(plots, "figure6", alphas, {s: [percent(by(six, system=s, alpha=a)[0]) for a in alphas] for s in systems},
          "redundant blocks, %", "in use after deduplication, %")

    def overhead(rows, **which):
        own, plain = by(rows, system="lamassu", **which)[0], by(rows, system="plain files", **which)[0]
        return 100 * (own["after"] / plain["after"] - 1)

    rows6 = [[f"{a} %", *(number(percent(by(six, system=s, alpha=a)[0])) for s in systems), f"{overhead(six, alpha=a):.2f} %",
              f"{published.FIGURE6_OVERHEAD[a]:.2f} %"] for a in alphas]
    # What duperemove did by itself; null where its time ran out.
    alone = lambda row: None if row["after_duperemove"] is None else 100 * row["after_duperemove"] / row["before"]  # noqa: E731
    steps6 = [[f"{a} %", *(f"{number(alone(x))} → {number(percent(x))}" for s in systems for x in by(six, system=s, alpha=a))] for a in alphas]
    one = result["table1"]
    steps1 = [[i, *(f"{number(alone(x))} → {number(percent(x))}" for s in systems for x in by(one, system=s, image=i))] for i in names(one, "image")]
    rows1 = [[f"{i}: {by(one, system='plain files', image=i)[0]['before'] / 1e6:.0f} MB", *(f"{100 - percent(by(one, system=s, image=i)[0]):.2f} %" for s in systems), f"{overhead(one, image=i):.2f} %"] for i in names(one, "image")]
    fewer = [percent(by(one, system="lamassu", image=i)[0]) - percent(by(one, system="plain files", image=i)[0]) for i in names(one, "image")]
    eleven = result["figure11"]
    slots = names(eleven, "slots")
    lines(plots, "figure11", slots, {f"α = {a} %": [by(eleven, alpha=a, slots=s)[0]["efficiency"] for s in slots] for a in names(eleven, "alpha")},
          "reserved key slots R", "data blocks of all blocks, %")
    rows11 = [[f"R = {s}", *(f"{by(eleven, alpha=a, slots=s)[0]['efficiency']:.2f}" for a in names(eleven, "alpha"))] for s in slots]
    theirs = ", ".join(f"{p:.2f}/{l:.2f} (+{o:.2f})" for p, l, o in published.TABLE1)
    return f"""## Space after deduplication

`scripts/bench space`; {result["store"]}, duperemove and an exact pass: the project's own program then hands the kernel every pair of equal blocks that is left, by the ioctl that
duperemove uses (FIDEDUPERANGE, which compares the bytes itself; docs/adr/0003). duperemove 0.11 compares the blocks of a file with those of *other* files
alone; its `same` option is about whole extents. So for a single file the exact pass does all the saving; for two versions of an image duperemove shares what they have in common. A store that deduplicates block by
block, as the paper's filer did, needs no such pass.

### Figure 6 of the Lamassu paper: synthetic files of {result["size_mib"]} MiB

In use after deduplication, percent of before; and how much more Lamassu takes than plain files then.

{table(["redundant", *systems, "overhead here", "published"], rows6)}

By duperemove → after the exact pass, percent of before (–: duperemove's time ran out):

{table(["redundant", *systems], steps6)}

![Figure 6](plots/figure6.svg)

The overhead is what metadata costs: one block for 116 of data, divided by what deduplication leaves. The paper's files are 4 GB; the rest of the difference is the
file system's own bookkeeping of shared extents, and the paper's 118 keys a page.

### Table 1: disk images

Saved, percent of the MB that the plain images take before. They are ext4: of this machine's installed packages; a copy of one from which packages were removed and others
added in place (by debugfs), where there is a second version; and, as far as Debian's archives could be had, of packages in two versions there, each image made afresh.

{table(["image", *systems, "overhead"], rows1)}

By duperemove → after the exact pass, percent of before:

{table(["image", *systems], steps1)}

Published for five virtual machines' images, plain/Lamassu saved (overhead): {theirs}. Lamassu's saving is {-min(fewer):.2f} to {-max(fewer):.2f} points off that of plain files here, -{min(p - l for p, l, _ in published.TABLE1):.2f} to
-{max(p - l for p, l, _ in published.TABLE1):.2f} there. How much plain files save depends on the images: theirs were systems in use, packages alone have few equal blocks, and two versions of an
image many. Where little is saved the overhead is that of the pages alone, {100 / 116:.2f} % here.

### Figure 11: data blocks among all, by R, percent

{table(["", *(f"α = {a} %" for a in names(eleven, "alpha"))], rows11)}

Published as a plot without numbers: the part falls as R rises, since fewer blocks share a page, and as α rises, since pages do not deduplicate. {trend(eleven)}

![Figure 11](plots/figure11.svg)"""


def trend(eleven):
    """Whether Figure 11's two trends are seen."""
    at = {(x["alpha"], x["slots"]): x["efficiency"] for x in eleven}
    alphas, slots = sorted({a for a, _ in at}), sorted({s for _, s in at})
    by_slots = all(at[a, s] >= at[a, more] for a in alphas for s, more in zip(slots, slots[1:]))
    by_alpha = all(at[a, s] >= at[more, s] for s in slots for a, more in zip(alphas, alphas[1:]))
    lost = [at[a, slots[0]] - at[a, slots[-1]] for a in (alphas[0], alphas[-1])]
    both = "Both hold here at every point" if by_slots and by_alpha else f"Here the first {'holds' if by_slots else 'does not hold'} at every point, and the second {'does' if by_alpha else 'does not'}"
    return f"{both}; from R = {slots[0]} to {slots[-1]} it costs {lost[0]:.2f} points at α = {alphas[0]} %, {lost[1]:.2f} at {alphas[-1]} %."
