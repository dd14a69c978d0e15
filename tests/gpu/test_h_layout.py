"""How many function pairs a shell pair may have on the GPU: rows of H share a word with Hermite functions."""

import numpy as np
import pytest
from emulator import running

import md4
from md4.errors import UnsupportedError
from md4.gpu.h_layout import BRA_ELEMENTS, BRA_FLAT, KET_ELEMENTS, KET_FLAT, KET_SINGLES, form_positions, row_bits
from md4.method.angular import nherm
from md4.shells.shell_pairs import list_facts

PAIR = [[0, 1]]


def general_basis(la, lb, *counts):
    """Two shells of so many contracted functions, and an s shell."""
    rng = np.random.default_rng(0)
    shells = [md4.Shell(l, [0.5], rng.uniform(0.5, 1, (1, n)), rng.normal(size=3)) for l, n in zip((la, lb), counts)]
    return md4.Basis([*shells, md4.Shell(0, [0.8], [1.0], np.ones(3))])


@pytest.mark.parametrize("l", range(33))
def test_words_hold_every_row_and_function(l):
    """Their largest number is an int32, and there is room for more rows than of any basis set."""
    assert (nherm(l) << row_bits(l)) - 1 < 1 << 31
    assert row_bits(l) >= 18


@pytest.mark.gpu
def test_more_than_65536_function_pairs(gpu):
    """They are those of the CPU, as bra and as ket."""
    basis = general_basis(1, 0, 181, 122)
    right = md4.Engine(basis, backend="cpu").compute(PAIR, [[2, 2]])
    assert right.shape[2] * right.shape[3] > 1 << 16
    engine = md4.Engine(basis, backend="cuda")
    ours = engine.compute(PAIR, [[2, 2]]).copy_to_host()
    turned = engine.compute([[2, 2]], PAIR).copy_to_host()
    for found in (ours, turned.transpose(1, 0, 4, 5, 2, 3)):
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-13 * abs(right).max())


@pytest.mark.parametrize("la, lb, nprim", [(0, 0, 1), (1, 1, 1), (2, 1, 4), (3, 0, 2)])
@pytest.mark.parametrize("npair", [1, 40])
def test_no_form_takes_more_than_is_reckoned_with(la, lb, nprim, npair):
    """Also where pairs of few primitives are side by side with one of many, whose slots nothing fills."""
    rng = np.random.default_rng(0)
    shells = [md4.Shell(l, *rng.uniform(0.5, 1, (2, n)), np.zeros(3)) for l, n in ((la, nprim), (la, 1), (lb, nprim))]
    pairs = [[0, 2], *[[1, 2]] * (npair - 1)]
    with running():
        engine = md4.Engine(md4.Basis(shells), backend="cuda")
        prepared = engine.prepare(pairs)
        for form in (BRA_ELEMENTS, KET_ELEMENTS, KET_SINGLES, BRA_FLAT, KET_FLAT):
            h = prepared.h(form).array
            assert h.itemsize * h.size <= engine.backend.hermite_bytes(prepared.pairs)


def test_positions_of_many_rows():
    """Every element has a word of its own."""
    found = form_positions(BRA_FLAT, list_facts(1, 0, True, 160, 150, 3 * 160, 150, 1, False))
    bits = row_bits(1)
    rows, functions = found[found >= 0] & (1 << bits) - 1, found[found >= 0] >> bits
    assert len(np.unique(rows * nherm(1) + functions)) == 72_000 * nherm(1) == len(rows)


def test_too_many_function_pairs_are_refused():
    """Before a kernel runs, by the shells, the limit and what helps."""
    basis = general_basis(16, 15, 40, 200)
    with running() as machine:
        engine = md4.Engine(basis, backend="cuda")
        with pytest.raises(UnsupportedError, match=r"shells 0 \(l = 16, 40 .* have 8184000 .* 262144"):
            engine.compute(PAIR, [[2, 2]])
        with pytest.raises(UnsupportedError, match="divide their contracted functions"):
            engine.compute([[2, 2]], PAIR)
        assert "h_matrices" not in machine.kernels
