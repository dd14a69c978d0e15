"""What tests of J and K share: molecules, and density matrices of any symmetry."""

import numpy as np
from pyscf import gto

BENZENE = "\n".join(
    f"{s} {r * np.cos(np.pi * k / 3)} {r * np.sin(np.pi * k / 3)} 0"
    for s, r in (("C", 1.397), ("H", 2.481))
    for k in range(6)
)
CHAIN = gto.M(atom=[f"H 0 {k % 2} {1.8 * k}" for k in range(12)], basis="6-31g**", verbose=0)
HERMITICITY = {0: lambda d: d, 1: lambda d: d + d.swapaxes(-1, -2), 2: lambda d: d - d.swapaxes(-1, -2)}


def random_densities(mol, hermi=1, count=1, seed=0):
    """Matrices of elements near 1, of a symmetry."""
    d = np.random.default_rng(seed).normal(size=(count, mol.nao, mol.nao))
    return HERMITICITY[hermi](d)
