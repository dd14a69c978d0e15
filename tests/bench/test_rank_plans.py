"""bench/rank_plans.py compares predicted with measured times of plans."""

import sys

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "bench"))
from cases import Case
from rank_plans import compare, geometric_mean, predicted_plans
from variants import plan_rows


def rows_of(name, times):
    """What bench/variants.py writes where plans take `times` of the predicted times."""
    case = Case.parse(name, "5x1")
    found = predicted_plans(case)
    assert len(found) >= len(times)
    return plan_rows(case, [(str(plan), 1e9 / (factor * time), 0.0) for (time, plan), factor in zip(found, times)])


def test_costs_and_ratios():
    first, second = (time for time, _ in predicted_plans(Case.parse("gs|gs", "5x1"))[:2])
    ratios, costs = compare(rows_of("gs|gs", (2.0, 1.0)) + rows_of("gd|gd", (0.5,)))
    assert costs["(gs|gs) 5x1"] == ("fused", "fused, ket first", pytest.approx(2 * first / second))
    assert costs["(gd|gd) 5x1"][2] == 1
    assert ratios["fused, first contracted"] == [pytest.approx(2)]
    assert ratios["fused, second contracted"] == [pytest.approx(1)]
    assert ratios["two_products, first contracted"] == [pytest.approx(0.5)]
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1)
