"""What the tests of mean-field objects share: solvers, densities, comparison."""

import numpy as np
from pyscf import dft, scf

SOLVERS = {
    "RHF": scf.RHF, "UHF": scf.UHF, "ROHF": scf.ROHF, "GHF": scf.GHF,
    "RKS": dft.RKS, "UKS": dft.UKS, "ROKS": dft.ROKS, "GKS": dft.GKS,
}  # fmt: skip


def solver(kind, mol, xc=None, grid=0, **settings):
    """A quiet mean-field object; Kohn-Sham ones with a small grid."""
    mf = SOLVERS[kind](mol)
    if xc:
        mf.xc = xc
        mf.grids.level = grid
    return mf.set(verbose=0, **settings)


def density(n, seed=0, complex_=False, shape=()):
    """Symmetric or Hermitian matrices."""
    rng = np.random.default_rng(seed)
    dm = rng.normal(size=(*shape, n, n)) + (1j * rng.normal(size=(*shape, n, n)) if complex_ else 0)
    return (dm + dm.conj().swapaxes(-1, -2)) / np.sqrt(n)


def assert_same(ours, theirs):
    """(vj, vk) against PySCF's, None where PySCF has None."""
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            assert abs(a - b).max() < 1e-10
