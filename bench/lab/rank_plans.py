"""How well predicted times rank the plans of the GPU backend: beside measured times of all plans of some classes.

    python bench/lab/variants.py --lmax 4 --K 5 1x5 25 --plans plans.csv      on a GPU
    python bench/lab/rank_plans.py plans.csv                                  anywhere

A line for each class: the plan of the least predicted time, the fastest one, and what the first costs over the second.
Then, by path and by whether the side that is transformed first or second is contracted, the geometric mean and the
spread of measured over predicted times. Last the cost of all classes, as a geometric mean.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all scripts share
import numpy as np
from cases import Case, Sample
from clock import read_csv

from md4.gpu.paths import timed_plans
from md4.gpu.predicted_times import Side
from md4.shells.shell_pairs import shell_pairs


def predicted_plans(case, unit="dmma16"):
    """(predicted ns a quartet, plan) of all plans of a `Case` in long lists, the least time first."""
    sample = Sample.make(case, 100, 100)
    bra, ket = shell_pairs(sample.bra_basis, sample.bra_pairs), shell_pairs(sample.ket_basis, sample.ket_pairs)
    return timed_plans(unit, Side.of(bra), Side.of(ket), True)


def kind(case, plan):
    """What predictions are compared by: 'fused, first contracted'."""
    first, second = (case.k_bra, case.k_ket)[:: -1 if plan.swap else 1]
    sides = [name for name, k in (("first", first), ("second", second)) if k > 1]
    return f"{plan.path.name}, {' and '.join(sides) or 'nothing'} contracted"


def compare(rows):
    """({kind: [measured / predicted]}, {case: (name taken, name of the fastest, cost of the first)})."""
    times, ratios, costs = {}, {}, {}
    for row in rows:
        key = row["class"], int(row["K_bra"]), int(row["K_ket"])
        times.setdefault(key, {})[row["plan"]] = row["ns"]
    for (name, *splits), seen in times.items():
        case = Case.parse(name, "x".join(map(str, splits)))
        plans = [(time, plan) for time, plan in predicted_plans(case) if str(plan) in seen]
        for time, plan in plans:
            if time > 0:
                ratios.setdefault(kind(case, plan), []).append(seen[str(plan)] / time)
        taken, best = str(plans[0][1]), min(seen, key=seen.get)
        costs[f"({name}) {splits[0]}x{splits[1]}"] = taken, best, seen[taken] / seen[best]
    return ratios, costs


def geometric_mean(values):
    return float(np.exp(np.mean(np.log(values))))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", help="of bench/lab/variants.py --plans")
    ratios, costs = compare(read_csv(parser.parse_args().csv))
    for case, (taken, best, cost) in costs.items():
        print(f"{case:<16} {taken:<26} {'' if taken == best else best:<26} {cost:.3f}")
    for name, found in sorted(ratios.items()):
        print(f"{name:<48} {len(found):>4} plans, {geometric_mean(found):.2f}, {min(found):.2f} to {max(found):.2f}")
    print(f"cost of {len(costs)} classes: {geometric_mean([cost for *_, cost in costs.values()]):.4f}")


if __name__ == "__main__":
    main()
