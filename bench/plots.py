"""Figures of bench/scf.py."""

from pathlib import Path

SERIES = (("seconds", "o-", "md4"), ("pyscf", "s--", "PySCF"))


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
