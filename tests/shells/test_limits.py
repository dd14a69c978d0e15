"""Shells at the limits of double precision: what is accepted is right, and what is not is refused."""

import numpy as np
import pytest
from molecules import host, molecule
from pyscf import gto

import md4
from md4 import BasisError
from md4.method.operators import OPERATORS
from md4.shells.basis import Basis
from md4.shells.limits import LARGEST_COORDINATE, largest_exponent, smallest_exponent
from md4.shells.shell import Shell
from md4.validation import oracle as reference


def at_limit(ls, exponents, centres, size=1.0):
    """Shells of one normalised primitive each, times `size`."""
    norms = [md4.shells.shell.radial_norm(l, np.array([z])) for l, z in zip(ls, exponents)]
    shells = zip(ls, exponents, norms, centres)
    return Basis([Shell(l, np.array([z]), size * norm[:, None], np.array(c)) for l, z, norm, c in shells])


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("limit", [largest_exponent, smallest_exponent])
@pytest.mark.parametrize("l", [0, 1, 2, 4, 6])
def test_exponents_at_the_limit(backend, l, limit, spread):
    """Right to the last digits, with shells as far apart as they are wide, by the oracle."""
    z = limit(l, l) * (1 - 1e-9) if limit is largest_exponent else limit(l) * (1 + 1e-9)
    width = min(spread / np.sqrt(z), 1e11)
    basis = at_limit([l] * 4, [z] * 4, width * np.array([[0, 0, 0], [0.3, 0.1, -0.2], [1, 0.5, 0.2], [0.8, -0.3, 0.9]]))
    block = host(md4.Engine(basis, backend=backend).compute([[0, 1]], [[2, 3]]))[0, 0]
    assert np.isfinite(block).all()
    element = tuple(int(n) for n in np.unravel_index(abs(block).argmax(), block.shape))
    exact = reference.eri(basis.shells, elements=[element], dps=20)
    np.testing.assert_allclose(block[element], np.ravel(exact)[0], rtol=2e-13)


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("size", [1e-30, 1.0, 0.999e30])
def test_extremes_together(backend, kind, size):
    """Steep beside diffuse, far apart, with large and small coefficients: finite for every operator."""
    lows, highs = [smallest_exponent(l) * 1.01 for l in range(9)], [largest_exponent(l, 8) * 0.99 for l in range(9)]
    places = [[0, 0, (-1e12, 0, 1, 1e12)[n % 4]] for n in range(18)]
    basis = at_limit([*range(9)] * 2, lows + highs, places, size)
    rng = np.random.default_rng(0)
    for parameter in (0.0,) if kind == "coulomb" else (1e-20, 1.0, 1e20):
        engine = md4.Engine(basis, operator=(kind, parameter), backend=backend)
        for quartet in rng.integers(0, 18, (12 if backend == "cpu" else 4, 4)):
            if basis.classes[quartet, 0].sum() < 20:
                assert np.isfinite(host(engine.compute([quartet[:2]], [quartet[2:]]))).all(), quartet


@pytest.mark.parametrize(("ls", "exponents", "message"), [
    ([8], [1.1e10], r"shell 0 \(l = 8\): exponent 1.1e\+10 is beyond 1.1e\+10, the largest"),
    ([8], [6e-11], r"shell 0 \(l = 8\): exponent 6e-11 is below 6.6e-11, the smallest"),
    ([4], [1e23], "is beyond 1.8e"), ([4], [1e-23], "is below 1.3e"),
    ([0], [1.1e100], "is beyond 1.0e"), ([0], [9e-101], "is below 1.0e"),
    ([8, 0], [1.0, 1e23], r"shell 1 \(l = 0\): exponent 1e\+23 is beyond 1.8e\+22, .* the highest l beside it"),
])  # fmt: skip
def test_exponents_beyond(ls, exponents, message):
    with pytest.raises(BasisError, match=message):
        Basis.from_arrays(ls, [[z] for z in exponents], [[1.0]] * len(ls), np.zeros((len(ls), 3)))


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_coordinates_beyond(axis, sign):
    """Of any shell, whose exponents and coefficients can be used."""
    shells = [Shell(l, [1.0], [[1.0]], np.zeros(3)) for l in range(2)]
    shells[1].centre[axis] = sign * LARGEST_COORDINATE
    Basis(shells)
    shells[1].centre[axis] *= 1.0 + 1e-12
    with pytest.raises(BasisError, match=r"shell 1 .* is further out than"):
        Basis(shells)


@pytest.mark.parametrize("scale", [1e-250, 1e-100, 1e100, 1e250])
def test_normalisation_of_any_scale(scale):
    plain, scaled = (Basis.from_arrays([2], [[3.0, 0.2]], [[c, -2 * c]], np.zeros((1, 3))) for c in (1.0, scale))
    np.testing.assert_allclose(scaled.coefficients, plain.coefficients, rtol=1e-14)


@pytest.mark.parametrize("l", [0, 1, 4, 8])
def test_normalisation_at_the_limits(l):
    ends = [smallest_exponent(l) * 1.01, 1.0, largest_exponent(l, l) * 0.99]
    assert np.isfinite(Basis.from_arrays([l], [ends], [[1.0, 1.0, 1.0]], np.zeros((1, 3))).coefficients).all()


def test_functions_that_cancel():
    with pytest.raises(BasisError, match="zero norm; its coefficients must not all cancel"):
        Basis.from_arrays([1], [[0.7, 0.7, 0.7]], [[0.1, 0.2, -0.3]], np.zeros((1, 3)))


def test_point_charges_beside_usual_shells():
    """PySCF's fakemol has s functions of exponent 1e16."""
    steep = gto.fakemol_for_charges(np.array([[0.0, 0.0, 0.3]]))
    both = Basis([*Basis.from_mol(molecule("H 0 0 0; H 0 0 1", "sto-3g")).shells, *Basis.from_mol(steep).shells])
    assert both.nao == 3
