"""bench/lab/exact.py: what it draws, and that it finds the errors that there are."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from places import ROOT

pytest.importorskip("pyscf")
sys.path.insert(0, str(ROOT / "bench" / "lab"))
import exact

SERIAL = SimpleNamespace(imap=map)  # in place of a pool of processes


@pytest.fixture(scope="module")
def quartet():
    return exact.draw((1, 0, 1, 1), 3, seed=5, backend="cpu")


def test_classes():
    found = exact.classes(2)
    assert found == [
        (0, 0, 0, 0), (1, 1, 1, 1), (1, 0, 1, 0), (1, 1, 0, 0), (1, 0, 1, 1),
        (2, 2, 2, 2), (2, 0, 2, 0), (2, 2, 0, 0), (2, 1, 2, 1),
    ]  # fmt: skip


def test_quartets_depend_on_seed_class_and_number_only(quartet):
    first, _ = quartet
    again, _ = exact.draw((1, 0, 1, 1), 3, seed=5, backend="cpu")
    np.testing.assert_array_equal(first.ours, again.ours)
    assert not any(np.array_equal(first.ours, exact.draw((1, 0, 1, 1), n, seed, "cpu")[0].ours)
                   for n, seed in ((4, 5), (3, 6)))  # fmt: skip


def test_shells_are_those_of_the_page():
    rng = np.random.default_rng(0)
    shells = [s for _ in range(50) for s in exact.random_shells(rng, (2, 1, 0, 2)).shells]
    exponents = np.concatenate([s.exponents for s in shells])
    assert exponents.min() >= 0.1
    assert exponents.max() <= 300
    assert {s.nprim for s in shells} == {1, 2, 3, 4}
    assert 0 <= min(s.centre.min() for s in shells) <= max(s.centre.max() for s in shells) <= exact.EDGE


def test_both_are_exact_for_small_l(quartet):
    ((_, ours, theirs),) = exact.judged([quartet], SERIAL)
    assert ours < 1e-13
    assert theirs < 1e-11


@pytest.mark.parametrize("name, place", [("ours", 0), ("theirs", 1)])
def test_an_error_is_found(name, place):
    quartet, rng = exact.draw((1, 0, 1, 1), 3, seed=5, backend="cpu")
    getattr(quartet, name)[2, 0, 1, 1] += 1e-5 * quartet.largest
    ((_, *errors),) = exact.judged([(quartet, rng)], SERIAL)
    assert errors[place] == pytest.approx(1e-5, rel=1e-6)
    assert errors[1 - place] < 1e-11


def test_a_copy_that_differs_is_found():
    blocks = np.zeros((3, 3, 1, 1, 1, 1))
    blocks[2, 1] = 0.5
    first, spread = exact.first_and_spread(blocks)
    assert first == 0
    assert spread == 0.5


def test_orders_of_the_same_block(quartet):
    """libcint's four permutations of a quartet are compared with the same block."""
    differences = [float(x) for x in quartet[0].orders().split()]
    assert len(differences) == 4
    assert max(differences) < 1e-11


def test_order_of_tight_and_diffuse():
    """libcint, not md4, loses digits with the tight function first."""
    errors = {
        exponents: exact.judged([(exact.Quartet(exact.beside(4, exponents, 1.0), "cpu"), np.random.default_rng(0))],
                                SERIAL)[0][1:]
        for exponents in ((exact.TIGHT, exact.DIFFUSE), (1.0, 1.0))
    }  # fmt: skip
    assert max(errors[1.0, 1.0]) < 1e-13
    ours, theirs = errors[exact.TIGHT, exact.DIFFUSE]
    assert ours < 1e-10
    assert theirs > 1e-9


def test_tables(quartet, capsys):
    found = exact.judged([quartet], SERIAL)
    cartesian = exact.largest_cartesian(quartet[0].basis, "cpu")
    kinds = ("random", "worst", "distance")
    rows = [exact.row(kind, 3, *found, "tight first", cartesian) | {"distance": 0.3} for kind in kinds]
    exact.print_tables(rows)
    printed = capsys.readouterr().out
    assert f"| p | 1 | {float(rows[0]['md4']):.0e} |" in printed
    assert printed.count("(ps\\|pp)") == 4
