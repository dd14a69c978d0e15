"""Where the time goes: the steps of one evaluation, as the paper's Table 2.

    python bench/lab/breakdown.py                     (dd|dd) and (ii|ii), K = 1
    python bench/lab/breakdown.py 'gg|gg' --K 25
    python bench/lab/breakdown.py --unfused           both transforms as kernels of their own, whatever md4 would choose

Every step of the backend is bracketed by two events on its stream (by the wall clock on the CPU) while the engine runs
as it always does; the kernel launches of one step belong to it. FLOP: both transforms as in `Case.orders`; H and r by
counting the operations of their formulas, each evaluated once.
"""

import argparse
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all scripts share
import numpy as np
from cases import Case, batch
from clock import describe, synchronize, write_csv
from common import Output, Run, add_backend, compile_ahead, settle
from peaks import peaks

from md4.gpu.context import cuda
from md4.method.angular import nherm
from md4.method.hermite import axis_size, component_table

STEPS = {"r": "[0]^(m), r", "transform_bra": "(ab|q]", "transform_ket": "(ab|cd)"}
MERGED = "both in one"
# What backends ask of a path beside its steps.
PATH_FACTS = ("name", "merges_steps", "keeps_chunks")


class Stopwatch:
    """Records the time of every step, by the names of the table."""

    def __init__(self, backend):
        self.backend = backend
        self.marks = defaultdict(list)
        self.merged = False
        backend.hermite = self.timed(backend.hermite, lambda prepared, form: "H_cd" if form.sign else "H_ab")
        backend.r = self.timed(backend.r, lambda *_: STEPS["r"])
        plan = backend.plan
        backend.plan = lambda *args: self.watched(plan(*args))

    def watched(self, plan):
        """The plan with a path whose steps are timed; of one that merges them, all but r."""
        path = plan.path
        self.merged |= path.merges_steps
        names = ["run"] if path.merges_steps else ["transform_bra", "transform_ket"]
        watched = SimpleNamespace(**{name: getattr(path, name) for name in PATH_FACTS if hasattr(path, name)})
        for name in names:
            label = STEPS.get(name, MERGED)
            setattr(watched, name, self.timed(getattr(path, name), lambda *_, label=label: label))
        return replace(plan, path=watched)

    def timed(self, step, label):
        def call(*args):
            start = self.mark()
            result = step(*args)
            self.marks[label(*args)].append((start, self.mark()))
            return result

        return call

    def mark(self):
        if self.backend.name == "cpu":
            return perf_counter()
        event = cuda.event()
        event.record(self.backend.context.stream)
        return event

    def seconds(self):
        """{step: seconds} since the last call."""
        synchronize(self.backend)
        found = {name: sum(elapsed(*pair) for pair in pairs) for name, pairs in self.marks.items()}
        if MERGED in found:
            found[MERGED] -= found.get(STEPS["r"], 0.0)
        self.marks.clear()
        return found


def elapsed(start, stop):
    return stop - start if isinstance(start, float) else start.elapsed_time(stop) * 1e-3


def h_flops(la, lb):
    """FLOP of one primitive pair's H: five a term of the sum over monomials and p, five an E coefficient."""
    (_, wa, _), (_, wb, _) = component_table(la, True), component_table(lb, True)
    terms = np.ones((len(wa), len(wb)))
    for shift in (0, 8, 16):
        terms *= ((wa >> shift) & 255)[:, None] + ((wb >> shift) & 255)[None, :] + 1
    return 5 * terms.sum() + 3 * 5 * axis_size(la, lb)


def r_flops(l):
    """FLOP of one primitive quartet's r: three an element of each level m, ten for each [0]^(m)."""
    return sum(3 * nherm(m) + 10 for m in range(l + 1))


def step_flops(case, nbra, nket):
    """{step: FLOP} of a whole evaluation; the side transformed first counts as ab, as in the engine."""
    bra_first, ket_first = case.orders()
    swap = sum(ket_first) < sum(bra_first)
    la, lb, lc, ld = case.l
    h = [nbra * case.k_bra * h_flops(la, lb), nket * case.k_ket * h_flops(lc, ld)]
    n = nbra * nket
    t1, t2 = ket_first if swap else bra_first
    r = n * case.k * r_flops(sum(case.l))
    return dict(zip(("H_ab", "H_cd", *STEPS.values()), (*h[:: -1 if swap else 1], r, n * t1, n * t2)))


def breakdown(run, repeats):
    """({step: median seconds}, median seconds of one without the stopwatch, whether a kernel did both products)."""
    total, _ = run.seconds(repeats)
    watch = Stopwatch(run.backend)
    samples = []
    for _ in range(repeats):
        run.evaluate()
        samples.append(watch.seconds())
    return {name: float(np.median([s[name] for s in samples])) for name in samples[0]}, total, watch.merged


def rows_of(case, run, repeats, peak):
    """One row a step."""
    seconds, total, merged = breakdown(run, repeats)
    flops = step_flops(case, *run.sample.shape[:2])
    if merged:
        flops[MERGED] = flops.pop("(ab|q]") + flops.pop("(ab|cd)")
    everything, measured = sum(flops.values()), sum(seconds.values())
    rows = []
    for step, work in flops.items():
        t = seconds.get(step, float("nan"))
        rows.append({
            "class": case.name, "K_bra": case.k_bra, "K_ket": case.k_ket, "quartets": run.sample.quartets, "step": step,
            "flop": work, "share_of_flop": work / everything, "seconds": t, "share_of_time": t / measured,
            "tflops": work / t / 1e12, "share_of_peak": work / t / peak, "sum_seconds": measured,
            "total_seconds": total,
        })  # fmt: skip
    return rows


def show(rows, errors):
    first = rows[0]
    print(f"\n({first['class']}) {first['K_bra']}x{first['K_ket']}, {first['quartets']} quartets, "
          f"error {errors[0]:.1e}, from libcint {errors[1]:.1e}: "
          f"{first['total_seconds']:.4g} s whole, {first['sum_seconds']:.4g} s as the sum of the steps")  # fmt: skip
    print("  step          FLOP share  time share   TFLOP/s  % of peak")
    for row in rows:
        print(f"  {row['step']:<12} {100 * row['share_of_flop']:>10.2f}% {100 * row['share_of_time']:>10.2f}% "
              f"{row['tflops']:>9.3f} {100 * row['share_of_peak']:>9.1f}%")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", default=["dd|dd", "ii|ii"])
    parser.add_argument("--K", nargs="+", default=["1"], metavar="K", help="1, 5, 25 or BRAxKET (default 1)")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--unfused", action="store_true", help="never fuse the transforms (GPU)")
    add_backend(parser)
    args = settle(parser.parse_args())
    if args.unfused:
        from md4.gpu.kernels import fused, fused_wide

        fused.choose_fused = fused_wide.wide_tile = lambda *_: None
    cases = [Case.parse(name, k) for k in args.K for name in args.classes]
    compile_ahead(args.jobs, [(case, (4, 4)) for case in cases], args.backend)
    output, every, peak = Output(args.backend), [], None
    for case in cases:
        run = Run.make(case, (batch(case, args.backend),) * 2, args.backend, output, args.seed)
        if peak is None:
            peak, copy = peaks(run.backend)
            print(describe(run.backend))
            print(f"FP64 peak {peak / 1e12:.3g} TFLOP/s, copy {copy / 1e12:.3g} TB/s, measured in this run")
        rows = rows_of(case, run, args.repeats, peak)
        show(rows, run.errors())
        every += rows
    if args.csv:
        write_csv(args.csv, every)


if __name__ == "__main__":
    main()
