"""The report's plots, as SVG and PNG."""

import os

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams.update({"svg.hashsalt": "lamassu", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
import matplotlib.pyplot as plt  # noqa: E402


def save(figure, folder, name):
    """Writes both formats; the date is left out, so that equal figures are equal files."""
    os.makedirs(folder, exist_ok=True)
    figure.savefig(os.path.join(folder, name + ".svg"), bbox_inches="tight", metadata={"Date": None})
    figure.savefig(os.path.join(folder, name + ".png"), bbox_inches="tight", dpi=110)
    plt.close(figure)


def bars(folder, name, groups, series, unit):
    """Grouped bars. `series`: name → value per group (None: nothing)."""
    figure, axes = plt.subplots(figsize=(1.3 * len(groups) + 2, 3.4))
    width = 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        axes.bar([g + number * width for g in range(len(groups))], [v or 0 for v in values], width, label=label)
    axes.set_xticks([g + 0.4 - width / 2 for g in range(len(groups))], groups)
    axes.set_ylabel(unit)
    axes.legend(fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    save(figure, folder, name)


def lines(folder, name, xs, series, x_label, y_label, bottom=None):
    """Lines with markers. `series`: name → value per x."""
    figure, axes = plt.subplots(figsize=(5.5, 3.2))
    for label, values in series.items():
        axes.plot(xs, values, marker="o", markersize=4, label=label)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(bottom=bottom)
    axes.legend(fontsize=8, frameon=False)
    save(figure, folder, name)
