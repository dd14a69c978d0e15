"""Gradients of attached objects with density fitting beside PySCF's own, from the same orbitals."""

import copy
import io
import pickle

import emulator
import numpy as np
import pytest
from emulator.array_library import cupy
from molecules import molecule
from nuclear_forces import WATER
from pyscf import qmmm
from solvers import solver

import md4
from md4.contract.fitting_gradient import FittingGradient
from md4.pyscf.gradients import MD4FittedForces

HYDROXYL = "O 0 0 0; H 0.3 0.2 0.9"
AUXILIARY = "def2-universal-jkfit"
ORBITALS = ("mo_coeff", "mo_occ", "mo_energy", "e_tot", "converged")
CLOSE = 1e-10  # Hartree/Bohr
# With libraries' sets the metric of erf(omega r)/r is singular within rounding. PySCF's gradient leaves out that the
# eigenvectors turn which stay (6e-9 for J of water with omega 0.33), and where one program finds a Cholesky factor and
# the other does not, the energies differ, too (their derivatives by 1.5e-8). md4's gradient is that of its energies:
# contract/test_fitting_gradient.py. So erf has a small set here, whose metric is regular.
SMALL = [
    [l, [exponent, 1.0]]
    for l, exponent in ((0, 3.0), (0, 1.0), (0, 0.3), (1, 1.5), (1, 0.5), (2, 0.8), (5, 1.0))
]
OF_ERF = ("camb3lyp", "lc_wpbe")


@pytest.fixture
def calls(monkeypatch):
    """The calls of `FittingGradient.run`."""
    found, run = [], FittingGradient.run
    monkeypatch.setattr(FittingGradient, "run", lambda *args: found.append(args) or run(*args))
    return found


def own(kind, xc=None, auxbasis=AUXILIARY, atom=None, basis="6-31g", settings=(), **options):
    """A converged object of PySCF, by default of water or, with open shells, of OH."""
    mol = molecule(atom or (WATER if kind in ("RHF", "RKS") else HYDROXYL), basis, **options)
    return solver(kind, mol, xc).density_fit(auxbasis).set(**dict(settings)).run(conv_tol=1e-11)


def ours(mf, **options):
    """A copy of it that is attached, with the same orbitals."""
    return md4.attach(mf.copy(), **{"backend": "cpu", **options})


def gradient(mf, **settings):
    return mf.nuc_grad_method().set(verbose=0, **settings).kernel()


@pytest.fixture(scope="module")
def plain():
    return own("RHF")


# kinds of objects -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("response", [True, False])
@pytest.mark.parametrize("kind, xc", [
    ("RHF", None), ("UHF", None), ("ROHF", None), ("RKS", "pbe"), ("RKS", "camb3lyp"), ("RKS", "hse06"),
    ("RKS", "lc_wpbe"), ("UKS", "b3lyp"), ("UKS", "camb3lyp"), ("ROKS", "b3lyp"),
])  # fmt: skip
def test_kinds(kind, xc, response, calls):
    if not response and xc == "camb3lyp":
        pytest.skip("PySCF asks for the response that it does not have")
    mf = own(kind, xc, {"default": SMALL} if xc in OF_ERF else AUXILIARY)
    want = gradient(mf, auxbasis_response=response)
    assert not calls
    attached = ours(mf)
    assert isinstance(attached.nuc_grad_method(), MD4FittedForces)
    assert isinstance(attached.Gradients(), MD4FittedForces)
    assert abs(gradient(attached, auxbasis_response=response) - want).max() < CLOSE
    assert calls


@pytest.mark.parametrize("options", [
    {"atom": "O 0 0 0; ghost-H 0.3 0.2 0.9; O 0.1 0 1.2"}, {"basis": "cc-pvdz", "cart": True},
    {"atom": "Na 0 0 0; I 0.2 0.1 2.7", "basis": "lanl2dz", "ecp": "lanl2dz"},
    {"atom": "O 0 0 0.1; H 0 0.76 -0.47; H 0 -0.76 -0.47", "symmetry": True}, {"auxbasis": {"default": SMALL}},
    {"basis": {"O": [[0, [1.0, 1.0]], [0, [4.0, 1.0]], [1, [1.0, 1.0]], [5, [1.2, 1.0]]], "H": "6-31g"}},
], ids=lambda value: str(value)[:30])  # fmt: skip
def test_molecules(options, calls):
    """With h functions on either side, too."""
    mf = own("RHF", **options)
    assert abs(gradient(ours(mf)) - gradient(mf)).max() < CLOSE
    assert len(calls) == 1


def test_another_operator_of_the_molecule():
    mf = solver("RHF", molecule(WATER, "6-31g")).density_fit({"default": SMALL})
    mf.mol.omega = 0.4
    mf.run(conv_tol=1e-11)
    assert abs(gradient(ours(mf)) - gradient(mf)).max() < CLOSE


def test_attached_before_density_fitting(plain, calls):
    after = md4.attach(solver("RHF", plain.mol), backend="cpu").density_fit(AUXILIARY)
    after.__dict__.update({name: getattr(plain, name) for name in ORBITALS})
    assert abs(gradient(after) - gradient(plain)).max() < CLOSE
    assert len(calls) == 1


@pytest.mark.parametrize("kind, xc", [("RHF", None), ("UKS", "b3lyp"), ("RKS", "pbe")])
def test_exchange_that_is_not_fitted(kind, xc, calls):
    """Its forces are those of `md4.JK`."""
    mf = own(kind, xc, settings={"only_dfj": True})
    found = ours(mf).nuc_grad_method().set(verbose=4, stdout=io.StringIO())
    assert abs(found.kernel() - gradient(mf)).max() < CLOSE
    assert len(calls) == 1
    assert ("Forces of two-electron integrals by md4" in found.stdout.getvalue()) == (xc != "pbe")


def test_what_stays_that_of_pyscf(plain, calls):
    """A tensor that was given, methods that were replaced, matrices, and objects after `detach`."""
    attached, want = ours(plain), gradient(plain)
    attached.with_df._cderi = np.array(attached.with_df._cderi)
    assert abs(gradient(attached) - want).max() < CLOSE
    mine, theirs = ours(plain).nuc_grad_method(), plain.nuc_grad_method()
    dm = plain.make_rdm1()
    for name in ("get_jk", "get_j", "get_k"):
        assert np.array_equal(getattr(mine, name)(plain.mol, dm), getattr(theirs, name)(plain.mol, dm))
    mine.get_jk = theirs.get_jk
    assert abs(mine.set(verbose=0).kernel() - want).max() < CLOSE
    detached = md4.detach(ours(plain))
    assert not isinstance(detached.nuc_grad_method(), MD4FittedForces)
    assert abs(gradient(detached) - want).max() < CLOSE
    assert not calls


def solvent(mf):
    mf = mf.PCM()
    mf.with_solvent.verbose = 0
    return mf


CHANGES = {
    "newton": lambda mf: mf.newton(), "PCM": solvent,
    "point charges": lambda mf: qmmm.mm_charge(mf, [[0.0, 0.1, 3.0]], [0.5]),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_put_around_an_object(change, plain, calls):
    """Before `attach` and after it."""
    mf = CHANGES[change](plain.copy()).run(conv_tol=1e-11)
    want = gradient(mf)
    assert not calls
    for attached in (md4.attach(CHANGES[change](plain.copy()), backend="cpu"), CHANGES[change](ours(plain))):
        attached.__dict__.update({name: getattr(mf, name) for name in ORBITALS})
        attached.__dict__.update({name: value for name, value in vars(mf).items() if name == "with_solvent"})
        calls.clear()
        assert abs(gradient(attached) - want).max() < CLOSE
        assert len(calls) == 1


# what is done to an object --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["device", "host", "direct"])
def test_stores(plain, store, calls):
    mf = plain.copy()
    mf.with_df = md4.DF(mf.mol, AUXILIARY, backend="cpu", store=store)
    assert abs(gradient(ours(mf)) - gradient(plain)).max() < CLOSE
    assert len(calls) == 1
    assert mf.with_df.store == store


def test_little_memory(plain):
    with pytest.raises(md4.MemoryLimitError, match="raise max_memory"):
        gradient(ours(plain, max_memory=0.9))
    assert abs(gradient(ours(plain, max_memory=12)) - gradient(plain)).max() < CLOSE


@pytest.mark.parametrize("kind", ["RHF", "UKS"])
def test_scanner(kind):
    geometries = [f"H 0 0 0; F 0 0 {r}" for r in (0.9, 0.95)]
    mf = solver(kind, molecule(geometries[0], "6-31g"), "pbe0" if kind == "UKS" else None).set(conv_tol=1e-12)
    theirs = mf.density_fit(AUXILIARY).nuc_grad_method().as_scanner()
    scan = md4.attach(mf.copy().density_fit(AUXILIARY), backend="cpu").nuc_grad_method().as_scanner()
    assert isinstance(scan, MD4FittedForces)
    for geometry in geometries:
        (e, g), (energy, want) = scan(geometry), theirs(geometry)
        assert abs(e - energy) < 1e-9
        assert abs(g - want).max() < 1e-6  # as far as the orbitals have converged


def test_molecule_moved(plain, calls):
    """In place, while the tensor is that of the former geometry."""
    mf = plain.copy().set(mol=plain.mol.copy())
    mf.with_df = md4.DF(mf.mol, AUXILIARY, backend="cpu")
    found = ours(mf).nuc_grad_method().set(verbose=0)
    assert abs(found.kernel() - gradient(plain)).max() < CLOSE
    mf.mol.set_geom_("O 0 0 0; H 0 0.1 1; H 0 1 0.2")
    theirs = solver("RHF", mf.mol).density_fit(AUXILIARY)
    theirs.__dict__.update({name: getattr(plain, name) for name in ORBITALS})
    assert abs(found.kernel() - gradient(theirs)).max() < CLOSE
    assert len(calls) == 2


@pytest.mark.parametrize("change", [
    lambda g: g.copy(), copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g)),
    lambda g: pickle.loads(pickle.dumps(g.as_scanner())).undo_scanner(),
    lambda g: pickle.loads(pickle.dumps(g.base)).nuc_grad_method(),
], ids=["copy", "deepcopy", "pickle", "pickle of a scanner", "pickle of an object"])  # fmt: skip
def test_copies(change, plain, calls):
    found = change(ours(plain).nuc_grad_method())
    assert isinstance(found, MD4FittedForces)
    assert abs(found.set(verbose=0).kernel() - gradient(plain)).max() < CLOSE
    assert len(calls) == 1


@pytest.mark.parametrize("verbose", [3, 4])
def test_the_log_tells_who_made_what(verbose, plain):
    found = ours(plain).nuc_grad_method().set(verbose=verbose, stdout=io.StringIO())
    found.kernel()
    assert found.stdout.getvalue().count("Forces of density fitting by md4: backend cpu") == (verbose >= 4)


def test_forces_on_a_gpu(calls):
    """By the object that has the tensor; the log says so."""
    mf = own("RHF", auxbasis={"default": SMALL[:4]}, atom="H 0 0 0; H 0.1 0.2 0.9", basis="sto-3g")
    with emulator.running("dmma16"), cupy():
        attached = ours(mf, backend="cuda")
        found = attached.nuc_grad_method().set(verbose=4, stdout=io.StringIO())
        assert abs(found.kernel() - gradient(mf)).max() < CLOSE
    ((gradients, *_),) = calls
    assert gradients.three.engine.backend.name == "cuda"
    assert gradients.fitting is attached.with_df._md4_fitting()
    assert "Forces of density fitting by md4: backend cuda" in found.stdout.getvalue()


def test_gradients_of_another_geometry():
    """Of gradients whose molecule is not that of the fit: PySCF's loops, which take integrals of both."""
    mol = molecule("H 0 0 0; F 0 0 0.9", "sto-3g")
    moved, found = mol.set_geom_("H 0 0 0; F 0 0 1.1", inplace=False), []
    for attach in (lambda mf: mf, lambda mf: md4.attach(mf, backend="cpu")):
        mf = attach(solver("RHF", mol).density_fit()).set(conv_tol=1e-12)
        mf.kernel()
        gradients = mf.nuc_grad_method()
        gradients.mol = moved
        found.append(gradients.grad_elec())
    assert abs(found[0] - found[1]).max() < 1e-8
