"""What tests of fitted integrals over orbitals share: the fitting, orbitals, comparison, memory that is held."""

import numpy as np
import pytest
from pyscf import df

import md4
from md4.contract.density_fitting import DensityFitting

AUXILIARY = "cc-pvdz-ri"


def bases(mol, auxbasis):
    return [md4.Basis.from_mol(m) for m in (mol, df.make_auxmol(mol, auxbasis))]


def fitting(mol, auxbasis=AUXILIARY, **options):
    if options.get("backend") == "cuda":
        pytest.importorskip("cupy")
    return DensityFitting(*bases(mol, auxbasis), **{"backend": "cpu", **options})


def orbitals(mol, *counts):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(mol.nao, n)) for n in counts]


def assert_close(found, wanted, tolerance=1e-12):
    assert found.shape == wanted.shape
    assert abs(found - wanted).max(initial=0.0) <= tolerance * abs(wanted).max(initial=0.0)


def watched(fit):
    """The largest number of bytes that are held from now on, in a list."""
    memory, most = fit.engine.backend.memory, [0]
    watch = memory.watch

    def watching(*args):
        made = watch(*args)
        most[0] = max(most[0], memory.held)
        return made

    memory.watch = watching
    return most
