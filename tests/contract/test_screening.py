"""Lists of shell pairs and their bounds, against plain loops."""

from functools import reduce
from itertools import pairwise

import numpy as np
import pytest
from emulator import running
from molecules import WATER, molecule

from md4 import JK, Basis, Engine
from md4.contract.screening import (
    HEAD,
    ROUNDING,
    cut,
    diagonal_norms,
    merged_lists,
    pair_bounds,
    raised,
    schwarz_bounds,
    sorted_lists,
)
from md4.cpu.sums import HostSums
from md4.plan import even_pieces
from md4.shells.schwarz import FEW_PRIMITIVES, larger, row_norms
from md4.shells.shell import Shell, radial_norm
from md4.shells.shell_pairs import pairs_by_kind, shell_kinds, shell_pairs, unique_pairs_by_class
from md4.validation import oracle


@pytest.mark.parametrize("mixed", [0, 40])
def test_pairs_by_kind_are_all_pairs_once(mixed):
    """Of one class, and of one number of primitives where many shells differ in theirs."""
    basis = Basis.from_mol(molecule(WATER, "cc-pvtz"))
    kind, lists = shell_kinds(basis, mixed), pairs_by_kind(basis, mixed)
    pairs = np.concatenate(lists)
    assert len(np.unique(np.sort(pairs, axis=1), axis=0)) == len(pairs) == basis.nshell * (basis.nshell + 1) // 2
    for one in lists:
        assert len(np.unique(kind[one], axis=0)) == 1
        assert np.all(basis.classes[one] == basis.classes[one[0]])
        assert mixed or np.all(basis.nprims[one] == basis.nprims[one[0]])


def test_bounds_are_those_of_the_integrals():
    mol = molecule(WATER, "cc-pvdz")
    engine = Engine(Basis.from_mol(mol), backend="cpu")
    every = pairs_by_kind(engine.bra_basis, engine.backend.sums.mixed_shells)
    for this in sorted_lists(engine, every, pair_bounds(engine, every, 1e-13), 1e-13, 1 << 30):
        assert np.all(np.diff(this.bound) <= 0)
        for pair, bound in zip(this.pairs.pairs, this.bound):
            block = engine.compute([pair], [pair])[0, 0]
            diagonal = np.einsum("abab->ab", block)
            assert abs(bound - row_norms(diagonal[None])[0]) < 1e-12


@pytest.mark.parametrize("hermite_bytes, cuts", [(1 << 30, False), (4000, True)])
def test_lists_of_whole_classes(hermite_bytes, cuts, monkeypatch):
    """All pairs of a class in one list, or in lists of few bytes, as if their kinds had never been told apart."""
    monkeypatch.setattr(HostSums, "mixed_shells", 0)
    engine = Engine(Basis.from_mol(molecule(WATER, "cc-pvdz")), backend="cpu")
    basis, tolerance = engine.bra_basis, 1e-13
    every = pairs_by_kind(basis, 0)
    given = sorted_lists(engine, every, pair_bounds(engine, every, tolerance), tolerance, 1 << 30)
    found = merged_lists(engine, given, tolerance, hermite_bytes)
    whole = unique_pairs_by_class(basis)
    right = sorted_lists(engine, whole, pair_bounds(engine, whole, tolerance), tolerance, hermite_bytes)
    assert len(given) > len(whole)
    assert len(found) == len(right)
    assert (len(found) > len(whole)) == cuts
    assert cuts or merged_lists(engine, right, tolerance, hermite_bytes) is right
    of_class = {one.pairs.shell_class: one for one in right}
    for this in found:
        assert np.all(np.diff(this.bound) <= 0)
        if not cuts:
            assert this.pairs.nprim == of_class[this.pairs.shell_class].pairs.nprim
    ours, theirs = (
        {tuple(sorted(pair)): bounds for this in lists
         for pair, *bounds in zip(this.pairs.pairs.tolist(), this.exact, this.terms)} for lists in (found, right)
    )  # fmt: skip
    assert len(ours) == sum(map(len, found)) == basis.nshell * (basis.nshell + 1) // 2
    assert ours.keys() == theirs.keys()
    for pair, bounds in ours.items():
        np.testing.assert_allclose(bounds, theirs[pair], rtol=1e-10)


def test_lists_are_cut_by_their_primitives():
    """Long contractions do not cut those of few primitives short: no list could have a pair more."""
    engine = Engine(Basis.from_mol(molecule(WATER, "cc-pvdz")), backend="cpu")
    basis = engine.bra_basis
    for pairs in unique_pairs_by_class(basis):
        counts = np.multiply(*basis.nprims[pairs].T)
        one = pairs[[np.argmax(counts)]]
        longest = engine.backend.hermite_bytes(shell_pairs(basis, np.repeat(one, HEAD, axis=0), 0)) // HEAD
        for limit in (1, 3, 40):
            found = cut(engine, pairs, limit * longest)
            assert [n for piece in found for n in range(len(pairs))[piece]] == list(range(len(pairs)))
            most = limit * counts.max()
            for piece, following in pairwise(found):
                assert counts[piece].sum() <= most < counts[piece].sum() + counts[following.start]


def test_bounds_of_a_part_are_those_of_the_whole():
    """Workers that share the bounds put them together as one worker has them; a part may be empty."""
    engine = Engine(Basis.from_mol(molecule(WATER, "6-31g")), backend="cpu")
    every = pairs_by_kind(engine.bra_basis, engine.backend.sums.mixed_shells)
    parts = [pair_bounds(engine, every, 1e-13, n, 30) for n in range(30)]
    assert any(one.shape[1] == 0 for part in parts for one in part)
    for whole, pieces in zip(pair_bounds(engine, every, 1e-13), zip(*parts)):
        np.testing.assert_array_equal(np.concatenate(pieces, axis=1), whole)


def cancelling(rng, l, centre):
    """A shell of two primitives whose difference is 1e-1 to 1e-6 of them: they differ by as much in their exponents."""
    exponent, step = 10 ** rng.uniform(-1, 1), 10 ** rng.uniform(-6, -1)
    exponents = exponent * np.array([1.0, 1.0 + step])
    return Shell(l, exponents, (radial_norm(l, exponents) * [1.0, -1.0] / step)[:, None], centre)


def exact_norm(basis):
    """R_ab of both shells of a basis by the oracle."""
    na, nb = (basis.ncomp(shell.l) for shell in basis.shells)
    places = [(a, b, a, b) for a in range(na) for b in range(nb)]
    return row_norms(oracle.eri([*basis.shells] * 2, basis.pure, elements=places).reshape(1, na, nb))[0]


@pytest.mark.parametrize("la, lb", [(0, 0), (1, 0), (1, 1), (2, 1)])
@pytest.mark.parametrize("backend, seeds", [("cpu", 6), ("cuda", 2)])
def test_bounds_hold_where_coefficients_cancel(backend, seeds, la, lb):
    """R is not less than without errors by rounding, and hardly more where these are small; on one centre or apart."""
    for seed in range(seeds):
        rng = np.random.default_rng([seed, la, lb])
        apart = rng.normal(size=3) * (0.0, 0.2, 1.0)[seed % 3]
        basis = Basis([cancelling(rng, la, np.zeros(3)), cancelling(rng, lb, apart)])
        with running():
            (((bound,), (terms,)),) = schwarz_bounds(Engine(basis, backend=backend), [np.array([[0, 1]])])
        exact = exact_norm(basis)
        assert bound >= exact * (1 - 1e-12)
        assert bound**2 <= exact**2 + 2 * ROUNDING * terms**2
        # rounding takes less than the bound allows for
        (diagonal,) = np.einsum("pqabab->pab", Engine(basis, backend="cpu").compute([[0, 1]], [[0, 1]]))
        assert abs(max(diagonal.sum(axis=0).max(), diagonal.sum(axis=1).max()) - exact**2) < 0.05 * ROUNDING * terms**2


def test_terms():
    """T is R of the moduli of coefficients, of pairs with a shell of both signs, and R itself of all others.

    Of many primitive pairs it grows with the square root of their number.
    """
    columns = ([[1.0]], [[0.3], [0.8]], [[0.7], [-0.9]], [[0.5, 0.4], [0.9, -0.6]])
    shells = [Shell(n % 2, np.array([0.6, 2.0])[: len(c)], np.array(c), [0, 0, 0.7 * n]) for n, c in enumerate(columns)]
    basis = Basis(shells)
    assert basis.alternating.tolist() == [False, False, True, True]
    every, given = unique_pairs_by_class(basis), Engine(basis, backend="cpu")
    same = 0
    for pairs, (bounds, terms) in zip(every, schwarz_bounds(given, every)):
        expected = diagonal_norms(given, basis.absolute, [pairs], 0.0)[0]
        np.testing.assert_allclose(terms, np.maximum(bounds, expected), rtol=1e-12)
        of_both = basis.alternating[pairs].any(axis=1)
        np.testing.assert_array_equal(terms[~of_both], bounds[~of_both])
        assert (terms[of_both] > 1.05 * bounds[of_both]).all()
        same += (~of_both).sum()
    assert same == 3
    long = Basis([Shell(0, np.geomspace(0.1, 100, 20), np.ones((20, 1)), [0, 0, 0])])
    ((bounds, terms),) = schwarz_bounds(Engine(long, backend="cpu"), [np.array([[0, 0]])])
    np.testing.assert_allclose(terms, bounds * np.sqrt(400 / FEW_PRIMITIVES), rtol=1e-14)


@pytest.mark.parametrize("count, most", [(1, 1), (7, 3), (9, 3), (10, 100), (1001, 10)])
def test_even_pieces(count, most):
    pieces = even_pieces(count, most)
    assert [n for piece in pieces for n in range(count)[piece]] == list(range(count))
    lengths = {piece.stop - piece.start for piece in pieces}
    assert max(lengths) <= most
    assert max(lengths) - min(lengths) <= 1
    assert (len(pieces) - 1) * most < count


@pytest.mark.parametrize("shape", [(3, 1), (2, 5), (1, 1)])
def test_row_norms(shape):
    """Written out; rounding errors below zero count as zero, what is no number stays."""
    diagonal = np.random.default_rng(0).uniform(-0.1, 1, (4, *shape))
    diagonal[3, 0, 0] = np.nan
    for block, bound in zip(diagonal[:3], row_norms(diagonal)):
        positive = [[max(v, 0.0) for v in row] for row in block.tolist()]
        sums = [sum(row) for row in positive] + [sum(column) for column in zip(*positive)]
        assert bound == pytest.approx(reduce(larger, sums) ** 0.5)
    assert np.isnan(row_norms(diagonal)[3])


@pytest.mark.parametrize("x, y", [(1.0, 2.0), (2.0, 2.0), (np.nan, 1.0), (1.0, np.nan), (np.inf, np.nan)])
def test_larger(x, y):
    np.testing.assert_equal(larger(x, y), np.maximum(x, y))


@pytest.mark.parametrize("step", [1, 3])
def test_lists_sorted_by_shells_within_powers_of_two(step, monkeypatch):
    """Upper bounds are falling powers of 2^step, the next ones of R; where they are equal, shells decide."""
    engine = Engine(Basis.from_mol(molecule(WATER, "cc-pvdz")), backend="cpu")
    every = pairs_by_kind(engine.bra_basis, engine.backend.sums.mixed_shells)
    found = pair_bounds(engine, every, 1e-13)
    whole = sorted_lists(engine, every, found, 1e-13, 1 << 30)
    monkeypatch.setattr(HostSums, "bound_step", lambda self, functions: step if functions <= 9 else 0)
    some = 0
    for this, before in zip(sorted_lists(engine, every, found, 1e-13, 1 << 30), whole):
        np.testing.assert_array_equal(np.sort(this.exact), np.sort(before.exact))
        if this.prepared.facts.nab > 9:
            np.testing.assert_array_equal(this.bound, before.bound)
            continue
        assert np.all((this.bound >= this.exact) & (this.bound <= this.exact * 2**step))
        assert np.all(np.log2(this.bound) % step == 0)
        keys = [(-bound, *pair) for bound, pair in zip(this.bound.tolist(), this.pairs.pairs.tolist())]
        assert keys == sorted(keys)
        some += len(keys) > len(set(this.bound.tolist()))
    assert some


def test_raised_bounds_of_nothing():
    np.testing.assert_array_equal(raised(np.array([0.0, 1.0, 1.5, 5e-324]), 1), [0.0, 2.0, 2.0, 1e-323])


@pytest.mark.parametrize("distance", [6.0, 6.5])
def test_pairs_far_below_the_tolerance_count_with_large_densities(distance):
    """Their bounds without a density are between `PRIMITIVE_SHARE` and 1 of the tolerance."""
    tolerance, size = 1e-6, 1e4
    basis = Basis.from_arrays([0, 0], [[1.0]] * 2, [[1.0]] * 2, [[0, 0, 0], [0, 0, distance]])
    found, right = (
        JK(basis, backend="cpu", direct_scf_tol=finest).get_jk(np.diag([size, 0.0])) for finest in (tolerance, 0.0)
    )
    assert tolerance < abs(right[0][0, 1]) < size * tolerance
    for ours, whole in zip(found, right):
        assert abs(ours - whole).max() < tolerance
