"""Gradients of random molecules, densities and operators against sums over PySCF's tensor of derivatives; see
`strategies` for seeds."""

from dataclasses import dataclass

import numpy as np
import pytest
from arbitration import NEGLIGIBLE, TOLERANCE, pair_bounds, positive, tensor
from hypothesis import strategies as st
from nuclear_forces import forces_by_tensor, rows_of_atoms
from strategies import GPU_EXAMPLES, GPU_KINDS, TALLY, Molecule, fuzz, molecules, report

import md4
from md4.shells.basis import Basis


@dataclass(frozen=True)
class Case:
    """Products L R of random matrices with elements of some size, or the energy of one symmetric density.

    `tolerance` None is that of the object; `omega` None is the molecule's.
    """

    molecule: Molecule
    count: int = 1
    seed: int = 0
    size: float = 1.0
    coulomb: float = 1.0
    exchange: float = 1.0
    omega: float = None
    tolerance: float = None
    max_memory: float = None
    backend: str = "cpu"

    def matrices(self, nao):
        """L and R, shapes (count, nao, nao); of count 0 one symmetric density."""
        d = self.size * np.random.default_rng(self.seed).normal(size=(2, max(1, self.count), nao, nao))
        return d if self.count else (d[:1] + d[:1].swapaxes(-1, -2))[[0, 0]]


@st.composite
def cases(draw, most=16, backend="cpu"):
    factors = st.sampled_from([1.0, 0.0, -0.5, 3.0])
    kinds, own, given = GPU_KINDS, (0.0,), [None, 0.0]
    if backend == "cpu":
        kinds, own, given = None, (0.0, 0.0, 0.3, -0.2), [None, None, 0.0, 0.4, -0.3]
    return Case(
        draw(molecules(most, kinds, own)), draw(st.sampled_from([0, 0, 1, 3])),
        draw(st.integers(0, 10**6)), draw(st.sampled_from([1.0, 1e-3, 30.0])), draw(factors), draw(factors),
        draw(st.sampled_from(given)), draw(st.sampled_from([None, 0.0, 1e-9, 1e-6, 1e-3])),
        draw(st.none() | st.none() | st.integers(800, 1500).map(lambda n: 10 ** (n / 1000))), backend,
    )  # fmt: skip


def derivative_bounds(mol):
    """The largest of (nabla i j|nabla i j)^1/2 over the functions of both shells, shape (nao, nao)."""
    found = positive(mol).intor("int2e_ip1ip2").reshape(3, 3, *[mol.nao] * 4)
    square = np.sqrt(np.abs(np.einsum("xxijij->xij", found)).max(axis=0))
    basis = Basis.from_mol(mol)
    first, sizes = basis.ao_loc[:-1], np.diff(basis.ao_loc)
    largest = np.maximum.reduceat(np.maximum.reduceat(square, first, axis=0), first, axis=1)
    return np.repeat(np.repeat(largest, sizes, axis=0), sizes, axis=1)


def check_gradient(case):
    """A gradient is off by rounding and its bound at most, or refused for its memory."""
    mol = case.molecule.mol()
    left, right = case.matrices(mol.nao)
    jk = md4.JK(mol, backend=case.backend, max_memory=case.max_memory)
    options = {"omega": case.omega, "tolerance": case.tolerance}
    try:
        if case.count:
            found = jk.product_gradient(left, right, case.coulomb, case.exchange, **options)
        else:
            found = jk.gradient(left[0], case.coulomb, 2 * case.exchange, **options)
    except md4.MemoryLimitError:
        assert case.max_memory is not None
        TALLY[check_gradient.__qualname__, "refused for their memory"] += 1
        return
    omega = float(mol.omega if case.omega is None else case.omega)
    theirs = tensor(mol, omega, "int2e_ip1")
    factors = case.coulomb, case.exchange
    want = sum(rows_of_atoms(mol, forces_by_tensor(theirs, *both, *factors)) for both in zip(left, right))
    scale = np.multiply.outer(derivative_bounds(mol), pair_bounds(mol))[None]
    sizes = zip(abs(left), abs(right))
    sums = sum(abs(forces_by_tensor(scale, *both, abs(case.coulomb), -abs(case.exchange))).sum() for both in sizes)
    total = sum(np.sum(one) * np.sum(two) for one, two in zip(abs(left), abs(right)))
    assert found.shape == (mol.natm, 3)
    off = abs(found - want).max()
    TALLY[check_gradient.__qualname__, "with quartets left out" if jk.stats.skipped else "without screening"] += 1
    allowed = TOLERANCE * sums + NEGLIGIBLE * (abs(case.coulomb) + abs(case.exchange)) * total
    assert off <= allowed + jk.stats.error_bound, f"off by {off:.1e}, {allowed:.1e} is rounding, {jk.stats}"


def test_gradients(backend):
    fuzz(check_gradient, cases(12, backend), 25 if backend == "cpu" else GPU_EXAMPLES)
    report(check_gradient)


@pytest.mark.slow
def test_gradients_at_length():
    fuzz(check_gradient, cases(), 600)
    report(check_gradient)
