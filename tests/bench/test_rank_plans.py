"""bench/rank_plans.py compares predicted with measured times of plans."""

import sys

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "bench"))
from cases import Case
from rank_plans import compare, geometric_mean, predicted_plans


def rows_of(name, times):
    """Measured times: `times` of the predicted ones."""
    found = predicted_plans(Case.parse(name, "5x1"))
    assert len(found) >= len(times)
    return [
        {"class": name, "K_bra": 5, "K_ket": 1, "plan": str(plan), "ns": factor * time}
        for (time, plan), factor in zip(found, times)
    ]


def test_costs_and_ratios():
    first, second = (time for time, _ in predicted_plans(Case.parse("gs|gs", "5x1"))[:2])
    ratios, costs = compare(rows_of("gs|gs", (2.0, 1.0)) + rows_of("gd|gd", (0.5,)))
    assert costs["(gs|gs) 5x1"] == ("fused", "fused, ket first", pytest.approx(2 * first / second))
    assert costs["(gd|gd) 5x1"][2] == 1
    assert ratios["fused, first contracted"] == [pytest.approx(2)]
    assert ratios["fused, second contracted"] == [pytest.approx(1)]
    assert ratios["two_products, first contracted"] == [pytest.approx(0.5)]
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1)
