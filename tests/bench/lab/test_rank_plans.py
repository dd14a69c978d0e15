"""bench/lab/rank_plans.py compares predicted with measured times of plans."""

import sys

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "bench" / "lab"))
sys.path.insert(0, str(ROOT / "bench"))
from cases import Case
from clock import read_csv
from rank_plans import compare, geometric_mean, predicted_plans
from variants import plan_rows


def rows_of(name, times):
    """What bench/lab/variants.py writes where plans take `times` of the predicted times."""
    case = Case.parse(name, "5x1")
    found = predicted_plans(case)
    assert len(found) >= len(times)
    return plan_rows(case, [(str(plan), 1e9 / (factor * time), 0.0) for (time, plan), factor in zip(found, times)])


def test_costs_and_ratios():
    (first, one), (second, two) = predicted_plans(Case.parse("dp|dp", "5x1"))[:2]
    ratios, costs = compare(rows_of("dp|dp", (2.0, 1.0)) + rows_of("gd|gd", (0.5,)))
    assert (one.path.name, two.path.name) == ("fused", "two_products")
    assert costs["(dp|dp) 5x1"] == (str(one), str(two), pytest.approx(2 * first / second))
    assert costs["(gd|gd) 5x1"][2] == 1
    assert ratios["fused, first contracted"] == [pytest.approx(2)]
    assert sorted(ratios["two_products, first contracted"]) == [pytest.approx(0.5), pytest.approx(1)]
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1)


def test_measured_plans_of_contracted_classes():
    """Taking the plan with the least predicted time costs next to nothing in those that were timed on an H200."""
    ratios, costs = compare(read_csv(ROOT / "bench" / "results" / "plans_contracted.csv"))
    assert len(costs) == 93
    assert geometric_mean([cost for *_, cost in costs.values()]) < 1.003
    assert all(0.9 < geometric_mean(found) < 1.1 for found in ratios.values())
