"""Hartree-Fock from plain arrays: md4's J and K in a loop of NumPy, without PySCF.

`rhf` takes any basis; the one-electron integrals, which md4 does not have, are the caller's. Here they are written out
for s functions, enough for HeH+ in 6-31G.
"""

from itertools import product
from math import erf, pi, sqrt

import numpy as np

import md4

# Exponents and coefficients of normalised primitives, for each shell; positions in Bohr.
HELIUM = [([38.421634, 5.77803, 1.241774], [0.0401397393, 0.261246097, 0.793184624]), ([0.297964], [1.0])]
HYDROGEN = [([18.731137, 2.8253937, 0.6401217], [0.0334946043, 0.2347269535, 0.8137573261]), ([0.1612778], [1.0])]
CHARGES, POSITIONS = np.array([2.0, 1.0]), np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 1.4632]])


def rhf(basis, hcore, overlap, nuclear_repulsion, electron_pairs, backend="auto", tolerance=1e-11):
    """Restricted Hartree-Fock energy and density matrix, by repeated diagonalisation."""
    jk = md4.JK(basis, backend=backend)
    values, vectors = np.linalg.eigh(overlap)
    orthogonal = vectors / np.sqrt(values)
    fock, energy = hcore, np.inf
    for _ in range(100):
        _, orbitals = np.linalg.eigh(orthogonal.T @ fock @ orthogonal)
        occupied = orthogonal @ orbitals[:, :electron_pairs]
        density = 2 * occupied @ occupied.T
        vj, vk = jk.update(density)  # from the change of the density: quartets that no longer matter are left out
        fock = hcore + vj - vk / 2
        last, energy = energy, nuclear_repulsion + np.sum(density * (hcore + fock)) / 2
        if abs(energy - last) < tolerance:
            return energy, density
    raise RuntimeError("no convergence in 100 cycles")


def one_electron(basis, charges, positions):
    """Overlap and core Hamiltonian over s functions."""
    overlap, hcore = np.zeros((2, basis.nao, basis.nao))
    for (i, a), (j, b) in product(enumerate(basis.shells), repeat=2):
        distance2 = np.sum((a.centre - b.centre) ** 2)
        coefficients = np.outer(a.coefficients, b.coefficients).ravel() / (4 * pi)  # with the angular norm
        for (za, zb), c in zip(product(a.exponents, b.exponents), coefficients):
            p, mu = za + zb, za * zb / (za + zb)
            s = c * (pi / p) ** 1.5 * np.exp(-mu * distance2)
            centre = (za * a.centre + zb * b.centre) / p
            overlap[i, j] += s
            hcore[i, j] += mu * (3 - 2 * mu * distance2) * s
            for charge, position in zip(charges, positions):
                t = p * np.sum((centre - position) ** 2)
                hcore[i, j] -= charge * s * 2 * sqrt(p / pi) * (sqrt(pi / t) / 2 * erf(sqrt(t)) if t > 1e-12 else 1)
    return overlap, hcore


def heh_cation(backend="auto"):
    """(energy, density) of HeH+."""
    shells = [(*shell, position) for shells, position in zip((HELIUM, HYDROGEN), POSITIONS) for shell in shells]
    basis = md4.Basis.from_arrays([0] * len(shells), *zip(*shells))
    overlap, hcore = one_electron(basis, CHARGES, POSITIONS)
    repulsion = CHARGES.prod() / np.linalg.norm(POSITIONS[1] - POSITIONS[0])
    return rhf(basis, hcore, overlap, repulsion, electron_pairs=1, backend=backend)


if __name__ == "__main__":
    print(f"HeH+, RHF/6-31G: {heh_cation()[0]:.10f} Hartree")
