"""Gradients of attached objects with density fitting beside PySCF's own, from the same orbitals."""

import numpy as np
import pytest
from molecules import molecule
from solvers import solver

import md4
from md4.contract.density_fitting import DensityFitting
from md4.contract.fitting_gradient import FittingGradient
from md4.pyscf.gradients import MD4FittedForces

# Without any symmetry, so that no component of a force is zero.
WATER = "O 0.1 0.05 0.118; H 0.02 0.755 -0.471; H -0.03 -0.79 -0.44"
HYDROXYL = "O 0 0 0; H 0.3 0.2 0.9"
CLOSE = 1e-10  # Hartree/Bohr
# With erf(omega r)/r: its metric is nearly singular, and PySCF's and md4's ways to solve with it round differently.
CLOSE_ERF = 1e-8


@pytest.fixture
def calls(monkeypatch):
    """The calls of `FittingGradient.run`."""
    found, run = [], FittingGradient.run
    monkeypatch.setattr(FittingGradient, "run", lambda *args: found.append(args) or run(*args))
    return found


def own(kind, xc=None, **options):
    mf = solver(kind, molecule(WATER if kind in ("RHF", "RKS") else HYDROXYL, "6-31g"), xc)
    return mf.density_fit("def2-universal-jkfit").set(**options).run(conv_tol=1e-11)


def gradient(mf, **settings):
    return mf.nuc_grad_method().set(verbose=0, **settings).kernel()


@pytest.mark.parametrize("response", [True, False])
@pytest.mark.parametrize("kind, xc", [
    ("RHF", None), ("UHF", None), ("ROHF", None), ("RKS", "pbe"), ("RKS", "camb3lyp"), ("RKS", "hse06"),
    ("RKS", "lc_wpbe"), ("UKS", "b3lyp"), ("ROKS", "b3lyp"),
])  # fmt: skip
def test_kinds(kind, xc, response, calls):
    if not response and xc == "camb3lyp":
        pytest.skip("PySCF asks for the response that it does not have")
    mf = own(kind, xc)
    want = gradient(mf, auxbasis_response=response)
    assert not calls
    attached = md4.attach(mf.copy(), backend="cpu")
    assert isinstance(attached.nuc_grad_method(), MD4FittedForces)
    close = CLOSE_ERF if xc in ("camb3lyp", "lc_wpbe") else CLOSE
    assert abs(gradient(attached, auxbasis_response=response) - want).max() < close
    assert calls


def test_attached_before_density_fitting(calls):
    mf = own("RHF")
    after = md4.attach(solver("RHF", mf.mol), backend="cpu").density_fit("def2-universal-jkfit")
    after.__dict__.update({name: getattr(mf, name) for name in ("mo_coeff", "mo_occ", "mo_energy", "e_tot")})
    assert abs(gradient(after) - gradient(mf)).max() < CLOSE
    assert len(calls) == 1
    detached = md4.detach(after)
    assert not isinstance(detached.nuc_grad_method(), MD4FittedForces)


def test_exchange_that_is_not_fitted_stays_that_of_pyscf(calls):
    mf = own("RHF", only_dfj=True)
    assert abs(gradient(md4.attach(mf.copy(), backend="cpu")) - gradient(mf)).max() < 1e-9
    assert not calls


def test_blocks_of_auxiliary_shells(monkeypatch):
    """The same forces with one block and with several; they add up to zero, those of random signs of D, too."""
    mf = own("RHF")
    basis, auxiliary = md4.Basis.from_mol(mf.mol), md4.Basis.from_mol(mf.with_df.auxmol)
    fitting = DensityFitting(basis, auxiliary, backend="cpu")
    rng = np.random.default_rng(1).normal(size=(2, basis.nao, basis.nao))
    for dm in (mf.make_rdm1(), rng + rng.transpose(0, 2, 1)):
        one = FittingGradient(fitting).run(dm, 1.0, 0.7)
        with monkeypatch.context() as patch:
            patch.setattr("md4.contract.fitting_gradient.BLOCK_SHARE", 1e-9)
            assert len(FittingGradient(fitting).pieces()) > 3
            many = FittingGradient(fitting).run(dm, 1.0, 0.7)
        largest = max(abs(this).max() for this in one)
        for a, b in zip(one, many):
            assert abs(a - b).max() < 1e-12 * largest
        assert abs(sum(this.sum(axis=0) for this in one)).max() < 1e-11 * largest
