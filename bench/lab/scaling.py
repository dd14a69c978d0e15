"""Cost against batch size, contraction and angular momentum, with libcint on one core beside it.

    python bench/lab/scaling.py --csv bench/results/scaling.csv

Times are what a caller waits for: the wall time of an evaluation and its synchronisation.
"""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all scripts share
from cases import Case, batch
from clock import describe, median_seconds, wall_seconds, write_csv
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", help="of the batch-size sweep; default: (ll|ll), l = 0..6")
    parser.add_argument("--csv", metavar="FILE", default="scaling.csv")
    parser.add_argument("--max-bytes", type=float, default=8e9, help="largest output (%(default)g)")
    parser.add_argument("--max-quartets", type=float, default=1e7, help="largest batch (%(default)g)")
    parser.add_argument("--repeats", type=int, default=5)
    add_backend(parser)
    run_all(settle(parser.parse_args()))


if __name__ == "__main__":
    main()
