"""Speed of md4.Engine.evaluate: quartets per second, useful TFLOP/s, share of the machine's limits, libcint's time.

    python bench/eri.py 'dd|dd' 'ff|ss' --K 1 25      some classes
    python bench/eri.py --table --csv eri.csv          all (ll|ll), (ll|ss), (ls|ls), twelve mixed ones; K = 1, 5, 25
    python bench/eri.py --libintx                      LibintX's protocol: 6000 x 6000 AO pairs, one warm and one timed
    python bench/eri.py --backend cpu 'gg|gg'          the CPU backend on one core

A timed call is an `Engine.evaluate` on prepared pair lists: it makes the H matrices, r, both transforms, and leaves the
output in device memory. Its time is the median of repeats, between two events of the engine's stream, after two warm
calls; '± %' is the largest minus the smallest repeat, over the median. Lists are products of random shells (seeded, in
a cube of edge 2 Bohr, exponents from 0.3 to 3), so that nothing is negligible. Useful FLOP are 2 Nab Np Nq K_bra K_ket
+ 2 Nab Nq Ncd K_ket if the bra is transformed first, with the names exchanged if the ket is, for the order that costs
less; padding, H and r are not counted. The limit of a class is the larger of its useful FLOP at the measured peak
(matrix instructions on registers) and its output at the measured copy bandwidth (bytes read plus written); 'bound'
names which. 'call s' is the wall time of `Engine.compute` on indices of shell pairs, with pair data and waiting. Errors
are those of four quartets from the CPU backend and from libcint, relative to each quartet's largest element; the output
is NaN before the run, so NaN means an element that was not written, or no reference.
"""

import argparse
from time import perf_counter

from cases import SPLITS, Case, batch, libintx_batch, table_classes
from clock import describe, device_name, write_csv
from common import Output, Run, add_backend, compile_ahead, settle
from libcint import libcint_seconds, libintx_rate
from peaks import peaks

import md4
from md4.support.display import SPDF

COLUMNS = (
    "  class      K      quartets  seconds    ± %  quartets/s  TFLOP/s  % peak  TB/s out  % limit  bound  call s    "
    "libcint us  x libcint  x LibintX    error  libcint's"
)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", help="as dd|dd; default: (ll|ll), l = 0..6")
    parser.add_argument("--K", nargs="+", metavar="K", help="1, 5 (= 5x1), 25 (= 5x5), or BRAxKET (default 1)")
    parser.add_argument("--table", action="store_true", help="the whole table")
    parser.add_argument("--libintx", action="store_true", help="LibintX's protocol")
    parser.add_argument("--csv", metavar="FILE", help="write all columns there")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls (%(default)s)")
    parser.add_argument("--pairs", type=int, help="pairs on either side instead of an automatic batch")
    parser.add_argument("--no-libcint", action="store_true", help="skip libcint's time; the check stays")
    add_backend(parser)
    return settle(parser.parse_args())


def cases(args):
    """The cases that the arguments name, in the table's order."""
    ladder = [f"{x}{x}|{x}{x}" for x in SPDF[:7]]
    names = args.classes or (table_classes() if args.table else ladder)
    degrees = args.K or (list(SPLITS) if args.table or args.libintx else ["1"])
    return [Case.parse(name, k) for k in degrees for name in names]


def pairs_of(case, args):
    """(bra pairs, ket pairs) of a batch."""
    if args.libintx:
        return libintx_batch(case)
    return (args.pairs or batch(case, args.backend),) * 2


def measure(case, args, output, machine):
    """One row of the table."""
    run = Run.make(case, pairs_of(case, args), args.backend, output, args.seed)
    seconds, spread = run.seconds(*((1, 1) if args.libintx else (args.repeats, 2)))
    error, libcint_error = run.errors()
    call = run.call_seconds(1 if args.libintx else 2)
    quartets = run.sample.quartets
    rate = quartets / seconds
    compute, write = case.flops / machine["peak"], case.output_bytes / machine["copy"]
    libcint = "" if args.no_libcint else time_libcint(run)
    libintx = libintx_rate(case, machine["device"])
    return {
        "class": case.name, "K": case.k, "K_bra": case.k_bra, "K_ket": case.k_ket, "backend": args.backend,
        "pairs_bra": run.sample.shape[0], "pairs_ket": run.sample.shape[1], "quartets": quartets,
        "seconds": seconds, "spread": spread, "quartets_per_s": rate, "flop": case.flops,
        "output_bytes": case.output_bytes, "tflops": case.flops * rate / 1e12,
        "share_of_peak": case.flops * rate / machine["peak"], "written_tbs": case.output_bytes * rate / 1e12,
        "share_of_limit": max(compute, write) * rate, "bound": "compute" if compute > write else "write",
        "call_seconds": call, "libcint_us": libcint and libcint * 1e6, "times_libcint": libcint and libcint * rate,
        "times_libintx": rate / libintx if libintx else "", "error": error, "libcint_error": libcint_error,
        "peak_tflops": machine["peak"] / 1e12, "copy_tbs": machine["copy"] / 1e12, "device": machine["device"],
        "commit": machine["commit"], "seed": args.seed,
    }  # fmt: skip


def time_libcint(run):
    """libcint's seconds a quartet on one core, '' where PySCF is missing."""
    try:
        return libcint_seconds(run.sample)
    except ImportError:
        return ""


def line(row):
    """A row of the printed table."""
    number = {k: "" if row[k] == "" else format(row[k], f) for k, f in OPTIONAL.items()}
    return (
        f"({row['class']}) {row['K_bra']:>2}x{row['K_ket']:<2} {row['quartets']:>11} {row['seconds']:>9.3g} "
        f"{100 * row['spread']:>5.1f} {row['quartets_per_s']:>11.3e} {row['tflops']:>8.3f} "
        f"{100 * row['share_of_peak']:>7.1f} {row['written_tbs']:>9.3f} {100 * row['share_of_limit']:>8.1f} "
        f"{row['bound']:>7} {row['call_seconds']:>8.3g} {number['libcint_us']:>12} {number['times_libcint']:>10} "
        f"{number['times_libintx']:>10} {row['error']:>8.1e} {row['libcint_error']:>10.1e}"
    )


OPTIONAL = {"libcint_us": ".3g", "times_libcint": ".0f", "times_libintx": ".2f"}


def machine_of(backend):
    """The ceilings and the names of what is measured."""
    peak, copy = peaks(backend)
    name = describe(backend)
    print(name)
    print(f"FP64 peak {peak / 1e12:.3g} TFLOP/s, copy (read + write) {copy / 1e12:.3g} TB/s, measured in this run")
    return {"peak": peak, "copy": copy, "device": device_name(backend), "commit": name.rsplit("md4 ", 1)[1]}


def main():
    args = arguments()
    begin = perf_counter()
    work = cases(args)
    compile_ahead(args.jobs, [(case, pairs_of(case, args)) for case in work], args.backend)
    if args.jobs:
        print(f"kernels compiled or loaded in {perf_counter() - begin:.1f} s by {args.jobs} processes")
    backend = md4.Engine(md4.Basis.from_arrays([0], [[1.0]], [[1.0]], [[0, 0, 0]]), backend=args.backend).backend
    machine, output, rows = machine_of(backend), Output(args.backend), []
    print(COLUMNS)
    for case in work:
        try:
            rows.append(measure(case, args, output, machine))
            print(line(rows[-1]), flush=True)
        except md4.MD4Error as error:
            print(f"({case.name}) {case.k_bra}x{case.k_ket}: {error}", flush=True)
        if args.csv and rows:
            write_csv(args.csv, rows)
    peak, copy = peaks(backend)
    print(f"at the end: FP64 peak {peak / 1e12:.3g} TFLOP/s, copy {copy / 1e12:.3g} TB/s; {len(rows)} rows, "
          f"{perf_counter() - begin:.0f} s in all")  # fmt: skip


if __name__ == "__main__":
    main()
