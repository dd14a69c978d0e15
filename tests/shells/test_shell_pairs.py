"""Shell pairs: primitive pairs, screening, classes, slices."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from molecules import WATER, molecule, relative_error

import md4
from md4.engine import Engine
from md4.errors import ArgumentError
from md4.method.angular import AXES
from md4.shells.basis import Basis
from md4.shells.shell_pairs import (
    make_gaussian_product,
    make_schwarz_estimate,
    product_axis,
    shell_pair_lists,
    shell_pairs,
    unique_pairs_by_class,
)

exponents = st.floats(1e-3, 1e4)


@pytest.fixture(scope="module")
def basis():
    return Basis.from_mol(molecule(WATER, "cc-pvtz"))


def test_primitive_pairs(basis):
    """Written out for one pair of contracted shells."""
    a, b = 0, next(i for i, shell in enumerate(basis.shells) if shell.nprim > 1 and i > 6)
    one, two = basis.shells[a], basis.shells[b]
    pairs = shell_pairs(basis, [[a, b]], cutoff=0)
    last = pairs.primitives
    assert len(last.exponent) == pairs.nprim == one.nprim * two.nprim > 1
    for n in range(pairs.nprim):
        i, j = divmod(n, two.nprim)
        za, zb = one.exponents[i], two.exponents[j]
        p = za + zb
        centre = ((za * one.centre + zb * two.centre) / p)[AXES]
        assert last.exponent[n] == pytest.approx(p)
        np.testing.assert_allclose(last.centre[n], centre, atol=1e-14)
        np.testing.assert_allclose(last.pa[n], centre - one.centre[AXES], atol=1e-14)
        np.testing.assert_allclose(last.pb[n], centre - two.centre[AXES], atol=1e-14)
        overlap = np.exp(-za * zb / p * np.sum((one.centre - two.centre) ** 2))
        np.testing.assert_allclose(last.coef_a[n], one.coefficients[i] * overlap, rtol=1e-12)
        np.testing.assert_allclose(last.coef_b[n], two.coefficients[j])


@given(first=st.integers(0, 20), count=st.integers(0, 20))
def test_slices(basis, first, count):
    ss = next(p for p in unique_pairs_by_class(basis) if (basis.classes[p[0], 0] == 0).all())
    whole = shell_pairs(basis, ss)
    part = whole[first : first + count]
    chosen = ss[first : first + count]
    assert len(part) == len(chosen)
    if len(chosen):
        again = shell_pairs(basis, chosen)
        for name in ("pairs", "start", "npair", "nprim", "nab", "nherm"):
            np.testing.assert_array_equal(getattr(part, name), getattr(again, name))
        for one, two in zip(part.primitives.arrays, again.primitives.arrays):
            np.testing.assert_array_equal(one, two)


def test_slices_of_pairs_whose_primitives_a_gpu_keeps(basis):
    ss = next(p for p in unique_pairs_by_class(basis) if (basis.classes[p[0], 0] == 0).all())
    pairs = replace(shell_pairs(basis, ss), primitives=None)
    assert pairs[5:].primitives is None
    assert pairs[5:].nprim == pairs.nprim - pairs[:5].nprim > 0


def test_slices_take_no_step(basis):
    with pytest.raises(ArgumentError, match="step 1 only"):
        shell_pairs(basis, [[0, 0], [0, 0]])[::2]


def test_unique_pairs(basis):
    every = np.concatenate(unique_pairs_by_class(basis))
    n = basis.nshell
    assert len({tuple(sorted(p)) for p in every.tolist()}) == len(every) == n * (n + 1) // 2
    l = basis.classes[every, 0]
    assert (l[:, 0] >= l[:, 1]).all()


def test_unique_pairs_of_ranges(basis):
    rows, cols = np.arange(2, 7), np.arange(5, 11)
    pairs = np.concatenate(unique_pairs_by_class(basis, rows, cols))
    wanted = {tuple(sorted((int(a), int(b)))) for a in rows for b in cols}
    assert {tuple(sorted(p)) for p in pairs.tolist()} == wanted
    assert len(pairs) == len(wanted)


def test_screening_keeps_the_integrals():
    """Dropped primitive pairs are far below what matters; without them there is less to do."""
    far = Basis.from_arrays(
        [2, 1], [[900.0, 30.0, 0.4], [200.0, 1.1, 0.2]], [[0.3, 0.4, 0.5]] * 2, [[0.0, 0.0, 0.0], [3.0, 4.0, 0.0]]
    )
    kept = shell_pairs(far, [[0, 1]])
    assert 0 < kept.nprim < 9
    engine = Engine(far, backend="cpu")
    screened, full = engine.compute([[0, 1]], [[0, 1]]), np.empty((1, 1, 5, 3, 5, 3))
    every = engine.prepare([[0, 1]], cutoff=0)
    assert every.pairs.nprim == 9
    engine.evaluate(every, every, full)
    assert relative_error(screened, full) < 1e-15


@given(za=exponents, zb=exponents, r=st.floats(0, 20), la=st.integers(0, 6), lb=st.integers(0, 6))
def test_numbers_and_arrays(za, zb, r, la, lb):
    """What a GPU runs on numbers and the host on arrays is the same mathematics."""
    one, many = ((make_schwarz_estimate(lib), make_gaussian_product(lib)) for lib in (math, np))
    x, y, w = (np.array([v]) for v in (za, zb, r))
    assert many[0](x, y, la, lb, np.array([0.3]), w)[0] == pytest.approx(one[0](za, zb, la, lb, 0.3, r), rel=1e-14)
    np.testing.assert_allclose(np.ravel(many[1](x, y, w)), one[1](za, zb, r), rtol=1e-14, atol=1e-300)


@given(za=exponents, zb=exponents, a=st.floats(-9, 9), b=st.floats(-9, 9))
def test_an_axis_of_a_product(za, zb, a, b):
    p, share_a, share_b, overlap = make_gaussian_product(math)(za, zb, (a - b) ** 2)
    x, xpa, xpb = product_axis(a, b, share_a, share_b)
    assert x == pytest.approx((za * a + zb * b) / p, abs=1e-14)
    assert x - a == pytest.approx(xpa, abs=1e-14)
    assert x - b == pytest.approx(xpb, abs=1e-14)
    at = 0.7  # the product of two Gaussians is the one at P
    left = math.exp(-za * (at - a) ** 2 - zb * (at - b) ** 2)
    assert overlap * math.exp(-p * (at - x) ** 2) == pytest.approx(left, rel=1e-8, abs=1e-300)


@pytest.mark.parametrize("cutoff", [0, 1e-25, 1e-3])
def test_lists_together_are_as_each_alone(basis, cutoff):
    lists = unique_pairs_by_class(basis)
    assert len(lists) > 3
    for pairs, made in zip(lists, shell_pair_lists(basis, lists, cutoff)):
        alone = shell_pairs(basis, pairs, cutoff=cutoff)
        assert made.shell_class == alone.shell_class
        arrays, expected = ((this.pairs, this.start, *this.primitives.arrays) for this in (made, alone))
        for array, one in zip(arrays, expected):
            np.testing.assert_array_equal(array, one)
            assert array.flags.c_contiguous


def test_cutoff_of_zero_keeps_all():
    """Also a primitive whose coefficients are all zero, whose logarithm is minus infinity."""
    basis = Basis.from_arrays([0, 0], [[1.0, 2.0]] * 2, [[0.0, 1.0]] * 2, [[0, 0, 0], [0, 0, 1]], normalise=False)
    assert shell_pairs(basis, [[0, 1]], cutoff=0).nprim == 4
    assert shell_pairs(basis, [[0, 1]]).nprim == 1


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[0, 1, 2]], "shape"),
        ([[0.5, 1]], "integer type"),
        ([[0, 99]], "names shell 99"),
        ([[0, 0], [-1, 0]], "pair 1 names shell -1"),
        ([[0, 0], [0, 4]], r"mixes classes: pair 0 has .* = \(0, 2, 0, 2\), pair 1 has \(0, 2, [1-9], [12]\)"),
    ],
)
def test_refusals(basis, pairs, message):
    assert basis.classes[4, 0] != 0
    with pytest.raises(ArgumentError, match=message):
        shell_pairs(basis, pairs)


def test_underflow_that_a_caller_has_made_an_error():
    """What vanishes of pairs that are far apart is none."""
    basis = Basis.from_arrays([0, 0], [[1.0]] * 2, [[1.0]] * 2, np.array([[0, 0, 0], [0, 0, 80.0]]))
    jk = md4.JK(basis, backend="cpu", direct_scf_tol=0)
    with np.errstate(all="raise"):
        j, _ = jk.get_jk(np.eye(2))
        assert j[0, 1] == 0
        assert np.all(np.isfinite(md4.JK(basis, backend="cpu").gradient(np.eye(2))))
