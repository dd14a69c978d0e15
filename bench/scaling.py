"""Cost against batch size, contraction and angular momentum, with libcint on one core beside it.

    python bench/scaling.py --csv scaling.csv --figures docs/figures       measures, then plots
    python bench/scaling.py --plot scaling.csv --figures docs/figures      plots an existing CSV

Times are what a caller waits for: the wall time of an evaluation and its synchronisation.
"""

import argparse
from contextlib import suppress
from pathlib import Path

from cases import Case, batch
from clock import describe, median_seconds, read_csv, wall_seconds, write_csv
from common import Output, Run, add_backend, compile_ahead, settle
from libcint import libcint_seconds

from md4.support.display import SPDF

LADDER = [f"{x}{x}|{x}{x}" for x in SPDF[:7]]
SIDES = [1, 2, 3, 6, 10, 18, 32, 56, 100, 178, 316, 562, 1000, 1778, 3163]
DEGREES = [1, 2, 3, 5, 7, 10]
K_CLASSES = ["pp|pp", "dd|dd", "gg|gg", "ii|ii"]


def sweeps(args):
    """(sweep, case, pairs on either side) of every point."""
    slow = 20 if args.backend == "cpu" else 1
    points = []
    for name in args.classes or LADDER:
        case = Case.parse(name)
        bound = max(args.max_bytes / case.output_bytes, 1)
        largest = min(bound, 8 * batch(case, args.backend) ** 2, args.max_quartets / slow)
        points += [("batch", case, n) for n in SIDES if n * n <= largest * 1.001]
    for name in K_CLASSES:
        for k in DEGREES:
            case = Case.parse(name, f"{k}x{k}")
            points.append(("K", case, batch(case, args.backend)))
    points += [("l", Case.parse(name), batch(Case.parse(name), args.backend)) for name in LADDER]
    return points


def measure(sweep, case, npair, args, output):
    """One row."""
    run = Run.make(case, (npair, npair), args.backend, output, args.seed)
    seconds, spread = median_seconds(run.backend, run.evaluate, args.repeats, 2, wall_seconds)
    libcint = ""
    if sweep != "batch":
        with suppress(ImportError):
            libcint = libcint_seconds(run.sample)
    error, libcint_error = run.errors()
    return {
        "sweep": sweep, "class": case.name, "l": case.l[0], "K_bra": case.k_bra, "K_ket": case.k_ket, "K": case.k,
        "quartets": npair * npair, "seconds": seconds, "spread": spread,
        "us_per_quartet": 1e6 * seconds / npair**2, "tflops": case.flops * npair**2 / seconds / 1e12,
        "libcint_us": libcint and 1e6 * libcint, "error": error, "libcint_error": libcint_error,
        "machine": describe(run.backend),
    }  # fmt: skip


def run_all(args):
    """All rows, printed as they come."""
    points = sweeps(args)
    compile_ahead(args.jobs, list({(case, (4, 4)): 0 for _, case, _ in points}), args.backend)
    output, rows = Output(args.backend), []
    for sweep, case, npair in points:
        row = measure(sweep, case, npair, args, output)
        rows.append(row)
        if len(rows) == 1:
            print(row["machine"])
        print(f"{sweep:<6} ({case.name}) {case.k_bra:>2}x{case.k_ket:<2} {row['quartets']:>9} quartets "
              f"{row['seconds']:9.3g} s {row['us_per_quartet']:10.4g} us each {row['tflops']:7.3f} TFLOP/s "
              f"error {row['error']:.1e}, from libcint {row['libcint_error']:.1e}", flush=True)  # fmt: skip
        if args.csv:
            write_csv(args.csv, rows)
    return rows


def plot(rows, folder):
    """scaling.png: three panels."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.6))
    plot_lines(left, [r for r in rows if r["sweep"] == "batch"], "quartets", "shell quartets of a call")
    left.set_title("batch size, K = 1")
    plot_lines(middle, [r for r in rows if r["sweep"] == "K"], "K", "primitive quartets K (dashed: libcint, one core)")
    middle.set_title("contraction")
    plot_l(right, [r for r in rows if r["sweep"] == "l"])
    for axis in (left, middle, right):
        axis.set_yscale("log")
        axis.set_ylabel("µs per shell quartet")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(rows[0]["machine"], fontsize=8)
    figure.tight_layout()
    path = Path(folder) / "scaling.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    print(f"wrote {path}")


def plot_lines(axis, rows, x, label):
    """One line a class, and libcint's dashed in the same colour."""
    for name in dict.fromkeys(r["class"] for r in rows):
        mine = [r for r in rows if r["class"] == name]
        (line,) = axis.plot([r[x] for r in mine], [r["us_per_quartet"] for r in mine], "o-", ms=3, label=f"({name})")
        theirs = [r for r in mine if r["libcint_us"] != ""]
        axis.plot([r[x] for r in theirs], [r["libcint_us"] for r in theirs], "--", color=line.get_color())
    axis.set_xscale("log")
    axis.set_xlabel(label)


def plot_l(axis, rows):
    """Cost of (ll|ll) against l."""
    axis.plot([r["l"] for r in rows], [r["us_per_quartet"] for r in rows], "o-", label="md4")
    theirs = [r for r in rows if r["libcint_us"] != ""]
    axis.plot([r["l"] for r in theirs], [r["libcint_us"] for r in theirs], "s--", label="libcint, one core")
    axis.set_xlabel("l of (ll|ll)")
    axis.set_title("angular momentum, K = 1, large batch")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", help="of the batch-size sweep; default: (ll|ll), l = 0..6")
    parser.add_argument("--csv", metavar="FILE", default="scaling.csv")
    parser.add_argument("--plot", metavar="CSV", help="only plot this file")
    parser.add_argument("--figures", metavar="DIR", default="docs/figures", help="where the PNG goes (%(default)s)")
    parser.add_argument("--max-bytes", type=float, default=8e9, help="largest output (%(default)g)")
    parser.add_argument("--max-quartets", type=float, default=1e7, help="largest batch (%(default)g)")
    parser.add_argument("--repeats", type=int, default=5)
    add_backend(parser)
    args = settle(parser.parse_args())
    rows = read_csv(args.plot) if args.plot else run_all(args)
    try:
        plot(rows, args.figures)
    except ImportError:
        print("no matplotlib here; plot the CSV elsewhere with --plot")


if __name__ == "__main__":
    main()
