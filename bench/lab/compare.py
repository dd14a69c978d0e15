"""Two checkouts of md4 side by side on one machine: rows of bench/eri.py and bench/scf.py, timed in turns.

    python bench/lab/compare.py BEFORE AFTER --table --csv out.csv                 all rows of `bench/eri.py --table`
    python bench/lab/compare.py BEFORE AFTER --classes 'dd|dd' 'ff|ff' --K 1 25    some of them
    python bench/lab/compare.py BEFORE AFTER --systems water/cc-pvtz               builds of J and K

BEFORE and AFTER are folders of checkouts. Each has a process of its own, which imports md4 and bench/ from there; only
one works at a time. A row is timed in rounds, in each of which both checkouts take a turn, and a turn is the median of
some calls. What counts is the median of the rounds. The results of both are compared, too.
"""

import argparse
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all scripts share
import numpy as np
from cases import SPLITS, table_classes
from clock import write_csv
from scf import TABLE

SIGN = "@@ "


def serve():
    """A worker: answers requests, one JSON a line; runs in a checkout, of which it takes all it imports."""
    import gc
    import json
    import sys
    from argparse import Namespace

    import numpy as np
    from cases import Case, batch
    from clock import seconds_once, wall_seconds
    from common import Output, Run, compile_ahead
    from scf import Build
    from systems import System

    output, work = Output("cuda"), {}

    def case(name, k):
        work.clear()
        gc.collect()
        this = Case.parse(name, k)
        run = Run.make(this, (batch(this, "cuda"),) * 2, "cuda", output, 0)
        run.evaluate()
        run.evaluate()
        flat = run.out.reshape(run.out.size)
        places = np.random.default_rng(0).integers(0, run.out.size, 200)
        blocks = [flat[p : p + 1].copy_to_host()[0] for p in places.tolist()]
        work.update(backend=run.backend, call=run.evaluate, clock=seconds_once, keep=run)
        return {"values": blocks, "quartets": int(run.sample.quartets)}

    def system(name, j_alone):
        work.clear()
        gc.collect()
        build = Build(System.parse(name), Namespace(backend="cuda", seed=0))
        call = (lambda: build.jk.get_jk(build.dm, with_k=False)) if j_alone else build.run
        found = [v for v in call() if v is not None]
        work.update(backend=build.jk.engine.backend, call=call, clock=wall_seconds, keep=build)
        places = np.random.default_rng(0).integers(0, found[0].size, 500)
        return {"values": [x for v in found for x in v.ravel()[places].tolist()], "quartets": 0}

    def turn(calls):
        return float(np.median([work["clock"](work["backend"], work["call"]) for _ in range(calls)]))

    def ahead(jobs, rows):
        cases = [Case.parse(name, k) for name, k in rows]
        compile_ahead(jobs, [(this, (300, 300)) for this in cases], "cuda")

    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = locals()[request.pop("do")](**request)
        except Exception as error:  # the other end reports it
            answer = {"error": repr(error)}
        print(SIGN + json.dumps(answer), flush=True)


class Worker:
    """A process in a checkout."""

    def __init__(self, root):
        root = Path(root).resolve()
        paths = [str(root / "bench"), str(root)]
        parts = [f"import sys; sys.path[:0] = {paths!r}", f"SIGN = {SIGN!r}", inspect.getsource(serve), "serve()"]
        code = "\n".join(parts)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            cwd=root,
        )  # fmt: skip

    def ask(self, **request):
        """Sends a request; the answer is to be fetched."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self):
        """The answer to the oldest request that is open."""
        for line in self.process.stdout:
            if line.startswith(SIGN):
                found = json.loads(line.removeprefix(SIGN))
                if isinstance(found, dict) and "error" in found:
                    raise RuntimeError(found["error"])
                return found
        raise RuntimeError("a worker has ended")

    def get(self, **request):
        self.ask(**request)
        return self.answer()


def compared(workers, name, request, rounds, calls):
    """One row."""
    made = [worker.get(**request) for worker in workers]
    values = [np.array(m["values"]) for m in made]
    scale = abs(values[0]).max() or 1.0
    times = np.empty((rounds, 2))
    for n in range(rounds):
        for which in (0, 1) if n % 2 == 0 else (1, 0):
            times[n, which] = workers[which].get(do="turn", calls=calls)
    before, after = np.median(times, axis=0)
    row = {
        "row": name, "before_s": before, "after_s": after, "change_%": 100 * (after / before - 1),
        "spread_before_%": 100 * np.ptp(times[:, 0]) / before, "spread_after_%": 100 * np.ptp(times[:, 1]) / after,
        "difference": abs(values[1] - values[0]).max() / scale,
    }  # fmt: skip
    spread = f"{row['spread_before_%']:.1f}, {row['spread_after_%']:.1f} %"
    print(f"{name:<26} {before:10.5f} {after:10.5f} s  {row['change_%']:+6.2f} %  (spread {spread})  "
          f"difference {row['difference']:.1e}", flush=True)  # fmt: skip
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--table", action="store_true", help="all rows of bench/eri.py --table")
    parser.add_argument("--classes", nargs="+", default=[])
    parser.add_argument("--K", nargs="+", default=list(SPLITS))
    parser.add_argument("--systems", nargs="*", help="as in bench/scf.py; without names its table")
    parser.add_argument("--j-alone", action="store_true", help="builds of J, not of J and K")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=3, help="of a turn")
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile, for each checkout")
    parser.add_argument("--csv", metavar="FILE")
    args = parser.parse_args()
    workers = [Worker(args.before), Worker(args.after)]
    names = table_classes() if args.table else args.classes
    cases = [(name, k) for k in args.K for name in names]
    rows = []
    if cases:
        for worker in workers:
            worker.ask(do="ahead", jobs=args.jobs, rows=cases)
        for worker in workers:
            worker.answer()
    todo = [(f"({name}) K {k}", {"do": "case", "name": name, "k": k}) for name, k in cases]
    systems = args.systems if args.systems is None or args.systems else TABLE
    todo += [(name, {"do": "system", "name": name, "j_alone": args.j_alone}) for name in systems or []]
    for name, request in todo:
        rows.append(compared(workers, name, request, args.rounds, args.calls))
        if args.csv:
            write_csv(args.csv, rows)
    changes = np.array([row["change_%"] for row in rows])
    print(f"{len(rows)} rows: median change {np.median(changes):+.2f} %, from {changes.min():+.2f} to "
          f"{changes.max():+.2f}; {(changes > 2).sum()} slower by more than 2 %")  # fmt: skip


if __name__ == "__main__":
    main()
