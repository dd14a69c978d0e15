"""Figures of the site from the CSV files in bench/results, and those that bench/scf.py draws.

    python bench/plots.py      writes docs/figures/builds.svg, classes.svg and, if there are such files, cpu.svg
                               and scaling-devices.svg

`bench/tables.py` says which file has what.
"""

from pathlib import Path

from clock import ROOT
from tables import builds, by_system, classes, device_rows, idle_rows, molecule

SERIES = (("seconds", "o-", "md4"), ("pyscf", "s--", "PySCF"))
FIGURES = ROOT / "docs" / "figures"
# Marker and colour of each program.
LOOKS = {
    "md4": ("o", "#1f6fb4"), "GPU4PySCF": ("s", "#d9822b"), "PySCF": ("^", "#555555"), "libcint": ("^", "#555555"),
    "LibintX": ("s", "#d9822b"),
}  # fmt: skip
# Panels of cpu.svg: title, and the program beside md4.
KINDS = {"int2e": ("tensor", "libcint"), "jk": ("J and K", "PySCF")}


def plot_scf(rows, folder):
    """scf-waters.png and scf-basis.png from the rows that each is about; without matplotlib, says so."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no matplotlib here; plot the CSV elsewhere with --plot")
        return
    mpl.use("Agg")
    figures = {"scf-waters": (waters, [r for r in rows if r["waters"] >= 1]),
               "scf-basis": (bases, [r for r in rows if r["system"] == "benzene"])}  # fmt: skip
    for name, (draw, mine) in figures.items():
        if len(mine) > 1:
            save(draw, mine, Path(folder) / f"{name}.png")


def save(draw, rows, path):
    """One panel with logarithmic seconds."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 4.8))
    draw(axis, rows)
    axis.set_yscale("log")
    axis.set_ylabel("seconds for J and K, warm")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    figure.suptitle(rows[0]["machine"], fontsize=5, wrap=True)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    print(f"wrote {path}")


def lines(axis, rows, x, label):
    """md4 and, where it was run, PySCF dashed in the same colour."""
    color = None
    for key, style, name in SERIES:
        known = [r for r in rows if r[key] != ""]
        if known:
            (drawn,) = axis.plot([x(r) for r in known], [r[key] for r in known], style, ms=4, color=color,
                                 label=f"{name}, {label}")  # fmt: skip
            color = drawn.get_color()


def waters(axis, rows):
    """Time against the number of waters, a line a basis."""
    for basis in dict.fromkeys(r["basis"] for r in rows):
        lines(axis, [r for r in rows if r["basis"] == basis], lambda r: r["waters"], basis)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("waters")


def bases(axis, rows):
    """Time against the basis set."""
    order = sorted(rows, key=lambda r: r["nao"])
    lines(axis, order, lambda r: f"{r['basis']}\n{r['nao']:.0f} AOs", "benzene")
    axis.set_xlabel("basis")


def settled():
    """matplotlib.pyplot for SVG files that are the same whenever they are drawn."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "md4", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    return plt


def write(figure, name):
    path = FIGURES / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    # Matplotlib ends lines of paths with a space.
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))
    print(f"wrote {path.relative_to(ROOT)}")


def dots(axis, rows):
    """Seconds of programs, a line for each of (label, {program: (seconds, same run)}); hollow if of another run."""
    seen = set()
    for y, (_, times) in enumerate(reversed(rows)):
        axis.axhline(y, color="0.9", lw=1, zorder=0)
        for program, (seconds, same_run) in times.items():
            marker, colour = LOOKS[program]
            axis.plot(
                seconds, y, marker, color=colour, ms=7, mfc=colour if same_run else "white", zorder=3,
                label=None if program in seen else program,
            )  # fmt: skip
            text = f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"
            place = {"xytext": (0, -13 if program == "GPU4PySCF" else 6), "textcoords": "offset points"}
            axis.annotate(text, (seconds, y), **place, ha="center", fontsize=8, color=colour)
            seen.add(program)
    axis.set_yticks(range(len(rows)), [label for label, _ in reversed(rows)])
    axis.set_ylim(-0.5, len(rows) - 0.4)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
    axis.grid(axis="x", alpha=0.3)


def plot_builds(plt):
    """J and K of molecules on the GPU and elsewhere."""
    figure, axis = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    dots(axis, [(f"{r['label']}, {r['nao']}", r["times"]) for r in builds()])
    axis.set_xlabel("seconds for one build of J and K")
    names = {"md4": "md4, one H200", "GPU4PySCF": "GPU4PySCF 1.9, one H200", "PySCF": "PySCF, 16 cores"}
    handles = []
    for program, name in names.items():
        marker, colour = LOOKS[program]
        handles.append(plt.Line2D([], [], ls="", marker=marker, color=colour, label=name))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=8, frameon=False, handletextpad=0.1)
    write(figure, "builds")


def plot_classes(plt):
    """Quartets a second and the share of the peak, against the angular momentum."""
    rows = classes()
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.4, 3.2), layout="constrained")
    rates = {
        "md4": [r["quartets_per_s"] for r in rows],
        "LibintX": [r["quartets_per_s"] / r["times_libintx"] for r in rows],
        "libcint": [1e6 / r["libcint_us"] for r in rows],
    }
    names = {"md4": "md4, H200", "LibintX": "LibintX, H200", "libcint": "libcint, one core"}
    for program, values in rates.items():
        marker, colour = LOOKS[program]
        left.semilogy(values, f"{marker}-", color=colour, ms=5, lw=1, label=names[program])
    left.set_ylabel("shell quartets per second")
    right.bar(range(len(rows)), [100 * r["share_of_peak"] for r in rows], color=LOOKS["md4"][1])
    right.set_ylabel("useful share of the FP64 peak / %")
    right.set_ylim(0, 100)
    for axis in (left, right):
        axis.set_xticks(range(len(rows)), [r["class"][0] for r in rows])
        axis.set_xlabel("l of (ll|ll), uncontracted")
        axis.grid(axis="y", alpha=0.3)
    left.legend(fontsize=8, frameon=False)
    write(figure, "classes")


def plot_cpu(plt):
    """Molecules on the CPU beside libcint and PySCF, a panel for each kind of work."""
    rows = idle_rows()
    if not rows:
        return
    figure, axes = plt.subplots(1, len(KINDS), figsize=(6.4, 3.2), layout="constrained", sharey=True)
    for axis, (kind, (title, other)) in zip(axes, KINDS.items()):
        mine = {(name, threads): found[kind] for (name, threads), found in by_system(rows).items() if kind in found}
        several = len({threads for _, threads in mine}) > 1
        dots(axis, [
            (f"{name}, {threads}" if several else name, {"md4": (r["seconds"], True), other: (r["libcint"], True)})
            for (name, threads), r in mine.items()
        ])  # fmt: skip
        axis.set(title=title, xlabel="seconds")
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=8, frameon=False)
    write(figure, "cpu")


def plot_devices(plt):
    """Efficiency of builds of J and K on several GPUs: simulated as lines, measured as points of the same colour."""
    rows = [r for name in ("scaling-simulated.csv", "scaling-devices.csv") for r in device_rows(name)]
    rows = [r for r in rows if r["matrices"] == "J, K"]
    if not rows:
        return
    figure, axis = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for n, name in enumerate(dict.fromkeys(map(molecule, rows))):
        mine, colour = [r for r in rows if molecule(r) == name], f"C{n}"
        line = [(r["workers"], 100 * r["efficiency"]) for r in mine if "workers" in r]
        axis.plot(*zip(*line), color=colour, lw=1, label=f"{name}, simulated") if line else None
        for form, marker, text in (("process", "o", "one process"), ("ranks", "s", "MPI ranks")):
            found = [(r["devices"], 100 * r["efficiency"]) for r in mine if r.get("form") == form and r["devices"] > 1]
            if found:
                axis.plot(*zip(*found), marker, color=colour, ms=5, mfc="none", label=f"{name}, {text}")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set(xlabel="GPUs", ylabel="efficiency / %", ylim=(0, 105))
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    write(figure, "scaling-devices")


def main():
    plt = settled()
    for draw in (plot_builds, plot_classes, plot_cpu, plot_devices):
        draw(plt)


if __name__ == "__main__":
    main()
