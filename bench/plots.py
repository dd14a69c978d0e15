"""Figures of the site, from the CSV files in bench/results.

    python bench/plots.py [NAME ...]      writes docs/figures/NAME.svg, by default all for which there are files

`bench/tables.py` and the docstring of each figure say which file has what. Figures are transparent, and their colours
can be seen on white and on black, because a picture knows nothing of the theme of its page. They are narrow, so that
their text can be read on a phone.
"""

import sys
from itertools import product

import numpy as np
from clock import ROOT, read_csv
from tables import FRONT, RESULTS, builds, by_system, classes, idle_rows

FIGURES = ROOT / "docs" / "figures"
WIDTH = 4.1  # inches
TEXT = 10.5  # points; 11 pixels if a phone of 360 pixels shows a figure over its whole column
GREY, BLUE, ORANGE, GREEN, RED, VIOLET, TEAL = (
    "#7a7a7a", "#3a86c8", "#cc7a22", "#4c9a4c", "#cf5c5c", "#9470bd", "#2f9696",
)  # fmt: skip
COLOURS = (BLUE, ORANGE, GREEN, RED, VIOLET, TEAL, GREY)
SPDF = "spdfghi"
# Marker and colour of each program.
LOOKS = {"md4": ("o", BLUE), "GPU4PySCF": ("s", ORANGE), "LibintX": ("s", ORANGE), "PySCF": ("^", GREEN),
         "libcint": ("^", GREEN)}  # fmt: skip
# Kinds of work in cpu.svg: what it is called, marker and colour.
KINDS = {"int2e": ("tensor, libcint = 1", "o", BLUE), "jk": ("J and K, PySCF = 1", "s", ORANGE)}


def settled():
    """matplotlib.pyplot for SVG files that are the same whenever they are drawn."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({
        "svg.hashsalt": "md4", "savefig.transparent": True, "font.size": TEXT, "figure.max_open_warning": 0,
        "axes.spines.top": False, "axes.spines.right": False, "axes.prop_cycle": mpl.cycler(color=COLOURS),
        "grid.color": GREY, "grid.alpha": 0.3, "legend.frameon": False, "lines.markersize": 5,
        **dict.fromkeys(("axes.titlesize", "axes.labelsize", "legend.fontsize"), TEXT),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), TEXT),
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
    })  # fmt: skip
    return plt


def panels(plt, count, height):
    """A figure with panels of a height in inches below each other."""
    figure, axes = plt.subplots(count, 1, figsize=(WIDTH, count * height), layout="constrained", squeeze=False)
    return figure, list(axes[:, 0])


def legend(figure, handles=None, columns=1, **place):
    """A legend above all panels."""
    place = {"loc": "outside upper center", **place}
    handles = {} if handles is None else {"handles": handles}
    figure.legend(ncols=columns, handletextpad=0.3, columnspacing=1.0, **handles, **place)


def handle(plt, marker, colour, text, line=""):
    return plt.Line2D([], [], ls=line, marker=marker, color=colour, label=text)


def value(seconds):
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"


def plot_builds(plt):
    """J and K of molecules on the GPU and elsewhere; hollow markers for times of other runs."""
    rows = builds(FRONT)
    figure, (axis,) = panels(plt, 1, 0.62 * len(rows) + 1.0)
    for y, row in enumerate(reversed(rows)):
        axis.axhline(y, color=GREY, alpha=0.3, lw=1, zorder=0)
        text = f"{row['label']}, {row['row']['nao']:.0f}"
        axis.text(0.01, y + 0.18, text, transform=axis.get_yaxis_transform(), va="bottom")
        last = max(row["times"], key=row["times"].get)
        for program, (seconds, same_run) in row["times"].items():
            marker, colour = LOOKS[program]
            axis.plot(seconds, y, marker, color=colour, ms=7, mfc=colour if same_run else "none", zorder=3)
            # Away from each other: the number of the slowest begins at its marker, others end there.
            side, shift = ("left", -5) if program == last else ("right", 5)
            axis.annotate(value(seconds), (seconds, y), xytext=(shift, -5), textcoords="offset points",
                          ha=side, va="top", color=colour)  # fmt: skip
    axis.set(xscale="log", xlabel="seconds for one build of J and K", yticks=[], ylim=(-0.5, len(rows) - 0.3))
    axis.set_xmargin(0.1)
    axis.spines["left"].set_visible(False)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.grid(axis="x")
    names = {"md4": "md4, one H200", "GPU4PySCF": "GPU4PySCF 1.9, one H200", "PySCF": "PySCF, 16 cores"}
    legend(figure, [handle(plt, *LOOKS[program], name) for program, name in names.items()], columns=2)
    return figure


def plot_classes(plt):
    """Quartets a second and the share of the peak, against the angular momentum."""
    rows = classes()
    figure, (upper, lower) = panels(plt, 2, 2.6)
    rates = {
        "md4": ("md4, H200", [r["quartets_per_s"] for r in rows]),
        "LibintX": ("LibintX, H200", [r["quartets_per_s"] / r["times_libintx"] for r in rows]),
        "libcint": ("libcint, one core", [1e6 / r["libcint_us"] for r in rows]),
    }
    for program, (name, values) in rates.items():
        marker, colour = LOOKS[program]
        upper.semilogy(values, f"{marker}-", color=colour, lw=1, label=name)
    upper.set_ylabel("shell quartets per second")
    lower.bar(range(len(rows)), [100 * r["share_of_peak"] for r in rows], color=BLUE)
    lower.set(ylabel="useful share\nof the FP64 peak / %", ylim=(0, 100), xlabel="l of (ll|ll), uncontracted")
    for axis in (upper, lower):
        axis.set_xticks(range(len(rows)), [r["class"][0] for r in rows])
        axis.grid(axis="y")
    upper.legend()
    return figure


def plot_cpu(plt):
    """Times of molecules on the CPU over those of libcint and PySCF, a panel for each number of threads."""
    found = {}
    for (name, threads), kinds in by_system(idle_rows()).items():
        if KINDS.keys() & kinds.keys():
            found.setdefault(threads, {})[name] = kinds
    if not found:
        return None
    figure, axes = panels(plt, len(found), 2.3)
    for axis, (threads, rows) in zip(axes, found.items()):
        for kind, (_, marker, colour) in KINDS.items():
            points = [(rows[name][kind]["ratio"], y) for y, name in enumerate(rows) if kind in rows[name]]
            axis.plot(*zip(*points), marker, color=colour, ms=7)
        axis.axvline(1, color=GREY, lw=1)
        axis.set_yticks(range(len(rows)), rows)
        axis.invert_yaxis()
        axis.set(xscale="log", title=f"{threads} threads", xlim=(0.05, 20))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.grid()
    axes[-1].set_xlabel("time of md4, below 1 if faster")
    legend(figure, [handle(plt, marker, colour, text) for text, marker, colour in KINDS.values()], columns=2)
    return figure


def plot_exact(plt):
    """Errors of random quartets by l, and of tight beside diffuse functions by their distance: exact.csv."""
    rows = read_csv(RESULTS / "exact.csv")
    figure, (upper, lower) = panels(plt, 2, 3.1)
    draw_random(upper, [r for r in rows if r["kind"] == "random"])
    draw_distance(lower, [r for r in rows if r["kind"] == "distance"])
    for axis in (upper, lower):
        axis.set_yscale("log")
        axis.set_ylabel("error over the largest element")
        axis.grid()
    upper.legend()
    ls = sorted({int(r["l"]) for r in rows if r["kind"] == "distance"})
    handles = [handle(plt, "", COLOURS[2 + n], f"(ll|ss) of {SPDF[l]}", "-") for n, l in enumerate(ls)]
    handles += [handle(plt, "s", GREY, "libcint, tight first", "-"), handle(plt, "o", GREY, "md4", "-"),
                handle(plt, "s", GREY, "libcint, diffuse first", "--")]  # fmt: skip
    legend(figure, handles, columns=2, loc="outside lower center")
    return figure


def draw_random(axis, rows):
    """A point a quartet, and a line through the medians."""
    for shift, name in zip((-0.12, 0.12), ("md4", "libcint")):
        marker, colour = LOOKS[name]
        ls = np.array([float(r["l"]) for r in rows])
        errors = np.maximum([float(r[name]) for r in rows], 1e-17)
        axis.plot(ls + shift, errors, marker, color=colour, ms=3, alpha=0.5)
        medians = [np.median(errors[ls == l]) for l in np.unique(ls)]
        axis.plot(np.unique(ls) + shift, medians, "-", color=colour, label=f"{name}, median")
    axis.set_xticks(range(int(ls.max()) + 1), SPDF[: int(ls.max()) + 1])
    axis.set_xlabel("highest angular momentum of the quartet")


def draw_distance(axis, rows):
    """A line for each l, order and program; md4's only with the tight function first, since the other is the same."""
    ls = sorted({int(r["l"]) for r in rows})
    for (n, l), (note, style) in product(enumerate(ls), (("tight first", "-"), ("diffuse first", "--"))):
        mine = [r for r in rows if r["l"] == l and r["note"] == note]
        for name, marker in (("libcint", "s"), ("md4", "o"))[: 2 if style == "-" else 1]:
            errors = np.maximum([float(r[name]) for r in mine], 1e-17)
            axis.plot([float(r["distance"]) for r in mine], errors, style, marker=marker, ms=3, color=COLOURS[2 + n])
    axis.set(xscale="log", xlabel="distance of tight and diffuse function / Bohr")


def plot_published(plt):
    """Energies above numerical limits against the number of AOs, a line a system: published.csv."""
    rows = [r for r in read_csv(RESULTS / "published.csv") if isinstance(r["above"], float) and r["above"] > 0]
    figure, (axis,) = panels(plt, 1, 3.6)
    for name in dict.fromkeys(r["system"] for r in rows if r["system"] != "O"):
        mine = sorted((r["aos"], r["above"]) for r in rows if r["system"] == name)
        axis.loglog(*zip(*mine), "o-", ms=4, label=name)
    axis.set(xlabel="AOs", ylabel="energy above the limit / Hartree")
    axis.grid()
    legend(figure, columns=4)
    return figure


FIGURES_BY_NAME = {
    "builds": plot_builds, "classes": plot_classes, "cpu": plot_cpu, "exact": plot_exact,
    "published": plot_published,
}  # fmt: skip


def write(figure, name):
    path = FIGURES / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    # Matplotlib ends lines of paths with a space.
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))
    print(f"wrote {path.relative_to(ROOT)}")


def main(names):
    plt = settled()
    for name in names or FIGURES_BY_NAME:
        figure = FIGURES_BY_NAME[name](plt)
        if figure is not None:
            write(figure, name)


if __name__ == "__main__":
    main(sys.argv[1:])
