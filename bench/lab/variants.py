"""Every way that a class can be computed, timed: the one that md4 takes, the best and the runner-up.

    python bench/lab/variants.py 'dd|dd' 'ff|ss' --K 1 25
    python bench/lab/variants.py --csv variants.csv
    python bench/lab/variants.py --lmax 5 --K 1 --csv variants.csv         every class up to (hh|hh)
    python bench/lab/variants.py --lmin 6 --lmax 6 --K 1 --seconds 0.04    every class with i functions
    python bench/lab/variants.py --lmax 4 --K 5 1x5 25 --plans plans.csv   every plan's time, for rank_plans.py

A way is a plan of the GPU backend: the kernels, and which side they transform first; see `md4.plan`.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all scripts share
from cases import Case, batch, table_classes
from clock import describe, median_seconds, write_csv
from common import Output, Run, add_backend, compile_ahead, settle
from rank_plans import predicted_plans

from md4.gpu.paths import plans
from md4.support.display import shell_letter


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", help="as dd|dd; default: the table of bench/eri.py")
    parser.add_argument("--lmax", type=int, help="every class up to this l, instead")
    parser.add_argument("--lmin", type=int, default=0, help="of these, only classes with an l of this or more")
    parser.add_argument("--seconds", type=float, help="rough time of a batch; default: one that fills the machine")
    parser.add_argument("--K", nargs="+", metavar="K", default=["1", "5", "25"], help="1, 5, 25, or BRAxKET")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--plans", metavar="FILE", help="a line for each plan; classes that threads take are left out")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls (%(default)s)")
    add_backend(parser)
    return settle(parser.parse_args())


def every_class(lmax, lmin=0):
    """Names of the classes up to (ll|ll), one for its eight permutations, with an l of `lmin` or more among them."""
    pairs = [shell_letter(a) + shell_letter(b) for a in range(lmax + 1) for b in range(a + 1)]
    names = [f"{bra}|{ket}" for n, bra in enumerate(pairs) for ket in pairs[: n + 1]]
    return [name for name in names if max(Case.parse(name).l) >= lmin]


def every_plan(run, repeats):
    """[(name, quartets per second, error)] of all plans of a run, the one that md4 takes first."""
    out = []
    for plan in list(plans(run.backend.context.unit, run.bra.pairs, run.ket.pairs)):
        run.backend.plan = lambda *_, plan=plan: plan
        seconds, _ = median_seconds(run.backend, run.evaluate, repeats, 1)
        out.append((str(plan), run.sample.quartets / seconds, run.errors(2)[0]))
    return out


def row_of(case, found):
    """One line of the table."""
    best, *others = sorted(found, key=lambda way: -way[1])
    runner = others[0] if others else ("", 0.0, 0.0)
    return {
        "class": case.name, "K_bra": case.k_bra, "K_ket": case.k_ket, "taken": found[0][0], "best": best[0],
        "best_rate": best[1], "runner_up": runner[0], "runner_up_rate": runner[1], "taken_rate": found[0][1],
        "error": max(way[2] for way in found),
    }  # fmt: skip


def plan_rows(case, found):
    """Lines of --plans."""
    return [
        {"class": case.name, "K_bra": case.k_bra, "K_ket": case.k_ket, "plan": plan, "ns": 1e9 / rate, "error": error}
        for plan, rate, error in found
    ]


def main():
    args = arguments()
    classes = args.classes or (table_classes() if args.lmax is None else every_class(args.lmax, args.lmin))
    cases = [Case.parse(name, k) for k in args.K for name in classes]
    if args.plans:
        cases = [case for case in cases if predicted_plans(case)[0][0] > 0]
    compile_ahead(args.jobs, [(case, (300, 300)) for case in cases], args.backend, plans=True)
    output, rows, timed = Output(args.backend), [], []
    for case in cases:
        run = Run.make(case, (batch(case, args.backend, args.seconds),) * 2, args.backend, output, args.seed)
        if not rows:
            print(describe(run.backend))
        found = every_plan(run, args.repeats)
        rows.append(row_of(case, found))
        mark = "" if rows[-1]["taken"] == rows[-1]["best"] else "  <-"
        print(f"({case.name}) {case.k_bra}x{case.k_ket} " + "; ".join(f"{n} {r:.3g}" for n, r, _ in found)
              + f"; error {rows[-1]['error']:.1e}{mark}", flush=True)  # fmt: skip
        timed += plan_rows(case, found)
        for path, lines in ((args.csv, rows), (args.plans, timed)):
            if path:
                write_csv(path, lines)


if __name__ == "__main__":
    main()
