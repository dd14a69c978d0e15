"""Roofline: every class of eri.py's CSV against the ceilings measured in the same run.

    python bench/roofline.py eri.csv --figures docs/figures

Across: useful FLOP a byte of output, the least traffic a class can have. Up: useful TFLOP/s of the whole call. The roof
is the FP64 peak, and the copy bandwidth below its knee.
"""

import argparse
from pathlib import Path

import matplotlib as mpl
import numpy as np
from clock import read_csv

mpl.use("Agg")
import matplotlib.pyplot as plt

MARKERS = {1: "o", 5: "s", 25: "^"}


def roof(axis, rows):
    """The ceilings."""
    peak, copy = rows[0]["peak_tflops"], rows[0]["copy_tbs"]
    x = np.geomspace(0.5 * min(r["flop"] / r["output_bytes"] for r in rows),
                     2 * max(r["flop"] / r["output_bytes"] for r in rows), 200)  # fmt: skip
    axis.plot(x, np.minimum(peak, copy * x), "k-", lw=1.2)
    axis.text(x[-1], peak * 1.08, f"FP64 peak {peak:.3g} TFLOP/s", ha="right", fontsize=8)
    axis.text(x[0] * 1.1, copy * x[0] * 2.2, f"copy bandwidth {copy:.3g} TB/s", fontsize=8)


def points(axis, rows):
    """One point a class and K, named at K = 1."""
    for k in sorted({int(r["K"]) for r in rows}):
        mine = [r for r in rows if r["K"] == k]
        axis.plot(
            [r["flop"] / r["output_bytes"] for r in mine], [r["tflops"] for r in mine], MARKERS.get(k, "x"),
            ms=4.5, alpha=0.8, label=f"K = {k}",
        )  # fmt: skip
    for r in rows:
        if r["K"] == min(x["K"] for x in rows):
            place = r["flop"] / r["output_bytes"], r["tflops"]
            axis.annotate(f"({r['class']})", place, xytext=(3, -8), textcoords="offset points", fontsize=6)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", help="what eri.py --csv wrote")
    parser.add_argument("--figures", metavar="DIR", default="docs/figures", help="where the PNG goes (%(default)s)")
    args = parser.parse_args()
    rows = read_csv(args.csv)
    figure, axis = plt.subplots(figsize=(9, 6))
    roof(axis, rows)
    points(axis, rows)
    axis.set(xscale="log", yscale="log", xlabel="useful FLOP per byte of output", ylabel="useful TFLOP/s, whole call")
    axis.set_title(f"{rows[0]['device']}, md4 {rows[0]['commit']}", fontsize=9)
    axis.grid(alpha=0.3, which="both", lw=0.4)
    axis.legend(loc="lower right")
    path = Path(args.figures) / "roofline.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
