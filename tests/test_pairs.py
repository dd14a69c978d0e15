"""Shell pairs: primitive pairs, screening, classes, slices."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from molecules import WATER, molecule, relative_error

from md4.angular import AXES
from md4.basis import Basis
from md4.engine import Engine
from md4.errors import ArgumentError
from md4.pairs import shell_pairs, unique_pairs_by_class


@pytest.fixture(scope="module")
def basis():
    return Basis.from_mol(molecule(WATER, "cc-pvtz"))


def test_primitive_pairs(basis):
    """Written out for one pair of contracted shells."""
    a, b = 0, next(i for i, shell in enumerate(basis.shells) if shell.nprim > 1 and i > 6)
    one, two = basis.shells[a], basis.shells[b]
    last = shell_pairs(basis, [[a, b]], cutoff=0)
    assert last.nprim == one.nprim * two.nprim > 1
    for n in range(last.nprim):
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
        for f in fields(part):
            np.testing.assert_array_equal(getattr(part, f.name), getattr(again, f.name))


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


def test_screening_keeps_the_integrals(monkeypatch):
    """Dropped primitive pairs are far below what matters; without them there is less to do."""
    far = Basis.from_arrays(
        [2, 1], [[900.0, 30.0, 0.4], [200.0, 1.1, 0.2]], [[0.3, 0.4, 0.5]] * 2, [[0.0, 0.0, 0.0], [3.0, 4.0, 0.0]]
    )
    kept = shell_pairs(far, [[0, 1]])
    assert 0 < kept.nprim < 9
    screened = Engine(far, backend="cpu").compute([[0, 1]], [[0, 1]])
    monkeypatch.setattr("md4.pairs.shell_pairs.__defaults__", ("pair", 0.0))
    full = Engine(far, backend="cpu").compute([[0, 1]], [[0, 1]])
    assert relative_error(screened, full) < 1e-15


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[0, 1, 2]], "shape"),
        ([[0.5, 1]], "integer type"),
        ([[0, 99]], "names shell 99"),
        ([[0, 0], [0, 4]], "mixes classes"),
    ],
)
def test_refusals(basis, pairs, message):
    assert basis.classes[4, 0] != 0
    with pytest.raises(ArgumentError, match=message):
        shell_pairs(basis, pairs)
