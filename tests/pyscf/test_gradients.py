"""Gradients of attached objects beside PySCF's own, from the same orbitals: they differ by integrals only."""

import copy
import io
import pickle
from pathlib import Path

import emulator
import numpy as np
import pytest
from molecules import HYDROGEN_FLUORIDE, molecule
from pyscf import dft, lib, qmmm, scf
from solvers import density, solver

import md4
from md4.pyscf.gradients import MD4Derivatives, MD4Forces
from md4.pyscf.scf import MD4SCF

# Without any symmetry, so that no component of a force is zero.
WATER = "O 0.1 0.05 0.118; H 0.02 0.755 -0.471; H -0.03 -0.79 -0.44"
HYDROXYL = "O 0 0 0; H 0.3 0.2 0.9"
ORBITALS = ("mo_coeff", "mo_occ", "mo_energy", "e_tot", "converged")
CLOSE = 1e-10  # Hartree/Bohr


def own(kind, xc=None, atom=None, basis="6-31g", change=lambda mf: mf, **options):
    """A converged object of PySCF, by default of water or, with open shells, of OH."""
    closed = kind in ("RHF", "RKS")
    mf = change(solver(kind, molecule(atom or (WATER if closed else HYDROXYL), basis, **options), xc))
    return mf.run(conv_tol=1e-11)


def ours(mf, change=lambda mf: mf):
    """A copy of it that is attached, with the same orbitals; to it, or to what it was before `change`."""
    return change(md4.attach(mf.copy(), backend="cpu"))


def gradient(mf, **settings):
    return mf.nuc_grad_method().set(verbose=0, **settings).kernel()


@pytest.fixture
def calls(monkeypatch):
    """The methods of `md4.JK` for derivatives that were called."""
    found = []

    def watch(name):
        method = getattr(md4.JK, name)

        def watched(self, *args, **options):
            found.append(name)
            return method(self, *args, **options)

        monkeypatch.setattr(md4.JK, name, watched)

    watch("gradient")
    watch("derivative_jk")
    return found


@pytest.fixture(scope="module")
def plain():
    return own("RHF")


# kinds of objects -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, xc", [
    ("RHF", None), ("UHF", None), ("ROHF", None), ("RKS", "pbe"), ("RKS", "camb3lyp"), ("RKS", "hse06"),
    ("RKS", "lc_wpbe"), ("RKS", "r2scan"), ("UKS", "lda,vwn"), ("UKS", "b3lyp"), ("UKS", "wb97x"), ("ROKS", "camb3lyp"),
])  # fmt: skip
def test_kinds(kind, xc, calls):
    mf = own(kind, xc)
    want = gradient(mf)
    attached = ours(mf)
    for found in (attached.nuc_grad_method(), attached.Gradients()):
        assert isinstance(found, MD4Forces)
        calls.clear()
        assert abs(found.set(verbose=0).kernel() - want).max() < CLOSE
        assert abs(found.de - want).max() < CLOSE
        assert set(calls) == {"gradient"}


def nonlocal_correlation(mf):
    mf.nlcgrids.level = 0
    return mf


def hubbard(mf):
    return dft.rkspu.RKSpU(mf.mol, xc="pbe", U_idx=["0 O 2p"], U_val=[3.0]).set(grids=mf.grids, verbose=0)


@pytest.mark.parametrize("kind, xc, options, settings", [
    ("RHF", None, {"basis": "cc-pvdz"}, {}), ("RHF", None, {"basis": "cc-pvdz", "cart": True}, {}),
    ("UHF", None, {"atom": "O 0 0 0; ghost-H 0.3 0.2 0.9; O 0.1 0 1.2", "spin": 2}, {}),
    ("RHF", None, {"atom": "Na 0 0 0; I 0.2 0.1 2.7", "basis": "lanl2dz", "ecp": "lanl2dz"}, {}),
    ("RHF", None, {"atom": "O 0 0 0.1; H 0 0.76 -0.47; H 0 -0.76 -0.47", "symmetry": True}, {}),
    ("ROHF", None, {"symmetry": True, "spin": 1}, {}),
    ("RKS", "wb97m_v", {"change": nonlocal_correlation}, {}),
    ("RKS", "b3lyp", {}, {"grid_response": True}), ("UKS", "camb3lyp", {}, {"grid_response": True}),
    ("RKS", "pbe", {"change": hubbard}, {}),
    ("RHF", None, {"change": lambda mf: mf.smearing(0.1)}, {}),
    ("RHF", None, {"change": lambda mf: mf.sfx2c1e()}, {}),
    ("RHF", None, {}, {"atmlst": [2, 0]}),
], ids=lambda value: str(value)[:30])  # fmt: skip
def test_molecules_and_settings(kind, xc, options, settings, calls):
    mf = own(kind, xc, **options)
    want = gradient(mf, **settings)
    assert abs(gradient(ours(mf), **settings) - want).max() < CLOSE
    assert set(calls) == {"gradient"}


def test_another_operator_of_the_molecule():
    mol = molecule(WATER, "6-31g")
    mol.omega = 0.4
    mf = solver("RHF", mol).run(conv_tol=1e-11)
    assert abs(gradient(ours(mf)) - gradient(mf)).max() < CLOSE


def solvent(mf):
    mf = mf.PCM()
    mf.with_solvent.verbose = 0
    return mf


CHANGES = {
    "newton": lambda mf: mf.newton(), "PCM": solvent,
    "point charges": lambda mf: qmmm.mm_charge(mf, [[0.0, 0.1, 3.0]], [0.5]),
    "dispersion": lambda mf: mf.set(disp="d3bj"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_put_around_an_object(change, plain, calls):
    """Before `attach` and after it."""
    if change == "dispersion":
        pytest.importorskip("pyscf.dispersion")
    mf = CHANGES[change](plain.copy()).run(conv_tol=1e-11)
    want = gradient(mf)
    assert not calls
    after = md4.attach(CHANGES[change](plain.copy()), backend="cpu")
    before = CHANGES[change](md4.attach(plain.copy(), backend="cpu"))
    for attached in (after, before):
        attached.__dict__.update({name: getattr(mf, name) for name in ORBITALS})
        attached.__dict__.update({name: value for name, value in vars(mf).items() if name == "with_solvent"})
        calls.clear()
        assert abs(gradient(attached) - want).max() < CLOSE
        assert calls == ["gradient"]


def test_objects_without_gradients(cation):
    for kind in ("GHF", "GKS"):
        attached = md4.attach(solver(kind, cation))
        for make in (attached.nuc_grad_method, attached.Gradients):
            with pytest.raises(NotImplementedError):
                make()


# excited states -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, xc, method", [
    ("RHF", None, "TDA"), ("UHF", None, "TDHF"), ("RKS", "camb3lyp", "TDDFT"), ("RKS", "pbe", "TDDFT"),
    pytest.param("UKS", "b3lyp", "TDA", marks=pytest.mark.thorough),
])  # fmt: skip
def test_excited_states(kind, xc, method, calls):
    """The same amplitudes; PySCF's solver of the Z vector stops at 1e-8."""
    mf = own(kind, xc, atom=HYDROGEN_FLUORIDE if kind[0] == "R" else None)
    excited = getattr(mf, method)().set(nstates=2, conv_tol=1e-10, verbose=0).run()
    want = excited.Gradients().set(verbose=0, cphf_conv_tol=1e-12).kernel(state=1)
    assert not calls
    attached = getattr(ours(mf), method)().set(verbose=0, e=excited.e, xy=excited.xy, converged=excited.converged)
    for td in (attached, attached.copy(), pickle.loads(pickle.dumps(attached))):
        calls.clear()
        found = td.nuc_grad_method().set(verbose=0, cphf_conv_tol=1e-12)
        assert abs(found.kernel(state=1) - want).max() < 1e-9
        assert set(calls) == {"derivative_jk"}


# the methods of a gradient --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("omega", [None, 0.3])
@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_derivatives_of_j_and_k(omega, shape, plain):
    """Of matrices without symmetry; None are those of the object."""
    n = plain.mol.nao
    theirs, mine = plain.Gradients().set(verbose=0), ours(plain).Gradients().set(verbose=0)
    for dm in (None, np.random.default_rng(1).normal(size=(*shape, n, n)), [density(n, 2)] * 2):
        want, found = (g.get_jk(dm=dm, omega=omega) for g in (theirs, mine))
        alone = mine.get_j(dm=dm, omega=omega), mine.get_k(dm=dm, omega=omega)
        for a, b, c in zip(found, want, alone, strict=True):
            assert a.shape == c.shape == b.shape
            assert abs(a - b).max() < 1e-9
            assert abs(c - b).max() < 1e-9


def test_veff_has_j_and_k_unless_forces_are_summed(plain, calls):
    theirs, mine = plain.Gradients().set(verbose=0), ours(plain).Gradients().set(verbose=0)
    for _ in range(2):
        assert abs(mine.get_veff() - theirs.get_veff()).max() < 1e-9
        assert calls.pop() == "derivative_jk"
        mine.kernel()
        assert calls.pop() == "gradient"


def test_an_error_leaves_no_zeros_behind(plain, monkeypatch):
    mine = ours(plain).Gradients().set(verbose=0)
    want = mine.get_veff()
    with monkeypatch.context() as patch:
        patch.setattr("pyscf.grad.rhf.get_veff", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mine.kernel()
    assert np.array_equal(mine.get_veff(), want)
    assert abs(mine.kernel() - gradient(plain)).max() < CLOSE


def test_methods_that_a_user_has_replaced(plain):
    """Forces of one's own are added, and derivatives of J and K of one's own replace those of md4."""
    want, field = gradient(plain), np.arange(9.0).reshape(3, 3)
    found = ours(plain).Gradients().set(verbose=0)
    found.extra_force = lambda atom, envs: field[atom]
    assert abs(found.kernel() - want - field).max() < CLOSE
    found, zero = ours(plain).Gradients().set(verbose=0), np.zeros((3, plain.mol.nao, plain.mol.nao))
    theirs = plain.Gradients().set(verbose=0)
    for gradients in (found, theirs):
        gradients.get_jk = lambda *args: (zero, zero)
    assert abs(found.kernel() - theirs.kernel()).max() < CLOSE


# what is done to an object --------------------------------------------------------------------------------------------


GEOMETRIES = [f"H 0 0 0; F 0 0 {r}" for r in (0.9, 0.95, 1.0)]


@pytest.mark.parametrize("kind, xc", [("RHF", None), ("UKS", "camb3lyp")])
def test_scanner(kind, xc):
    mf = solver(kind, molecule(GEOMETRIES[0], "6-31g"), xc).set(conv_tol=1e-12)
    scan = md4.attach(mf.copy(), backend="cpu").nuc_grad_method().as_scanner()
    assert isinstance(scan, MD4Forces)
    assert isinstance(scan.base, MD4SCF)
    theirs = mf.nuc_grad_method().as_scanner()
    for geometry in GEOMETRIES:
        (e, g), (energy, want) = scan(geometry), theirs(geometry)
        assert abs(e - energy) < 1e-9
        assert abs(g - want).max() < 1e-6  # as far as the orbitals have converged


@pytest.mark.parametrize("kind, xc, settings", [
    ("RKS", "camb3lyp", {"omega": -0.3}), ("UKS", "hse06", {"omega": -0.3}),
    ("RKS", "RSH(0.4;0.65;-0.46) + 0.46*ITYH + .35*B88,", {}),
])  # fmt: skip
def test_a_short_range_by_its_sign(kind, xc, settings, calls):
    """PySCF takes an omega below zero for erfc."""
    mf = own(kind, xc, change=lambda mf: mf.set(**settings))
    assert abs(gradient(ours(mf)) - gradient(mf)).max() < 1e-9
    assert calls == ["gradient"]


@pytest.mark.parametrize("factors", [{"hyb": 0.2}, {"rsh": (0.3, 0.5, -0.3)}])
@pytest.mark.parametrize("fitted", [False, True])
def test_hybrids_that_are_not_by_name(factors, fitted):
    """PySCF asks the name of the functional first, for the energy as for the gradient, whatever the factors are."""
    mol = molecule("H 0 0 0; F 0 0 0.95", "6-31g")

    def pbe(xc, *options, **named):
        return dft.libxc.eval_xc("pbe,pbe", *options, **named)

    mf = mol.RKS().define_xc_(pbe, "GGA", **factors)
    mf = (mf.density_fit() if fitted else mf).set(verbose=0)
    mf.kernel()
    assert abs(gradient(ours(mf)) - gradient(mf)).max() < CLOSE


def test_molecule_moved(plain):
    """In place and by reset."""
    stretched = "O 0 0 0; H 0 0.1 1; H 0 1 0.2"
    mf = plain.copy().set(mol=plain.mol.copy())
    found, theirs = ours(mf).Gradients().set(verbose=0), mf.Gradients().set(verbose=0)
    before = gradient(plain)
    assert abs(found.kernel() - before).max() < CLOSE
    mf.mol.set_geom_(stretched)
    want = theirs.kernel()
    assert abs(want - before).max() > 1e-3
    assert abs(found.kernel() - want).max() < CLOSE
    found.reset(molecule(WATER, "6-31g"))
    found.base.__dict__.update({name: getattr(plain, name) for name in ORBITALS})
    assert abs(found.kernel() - before).max() < CLOSE


@pytest.mark.parametrize("change", [
    lambda g: g.copy(), copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g)),
    lambda g: pickle.loads(pickle.dumps(g.as_scanner())).undo_scanner(),
], ids=["copy", "deepcopy", "pickle", "pickle of a scanner"])  # fmt: skip
def test_copies(change, plain, calls):
    found = change(ours(plain).Gradients().set(verbose=0))
    assert type(found).__name__ == "MD4Gradients"
    assert abs(found.kernel() - gradient(plain)).max() < CLOSE
    assert calls == ["gradient"]


def test_detach(plain, calls):
    """Also for a gradient that was made before."""
    attached = ours(plain)
    before, excited = attached.Gradients(), attached.TDA().Gradients()
    mf = md4.detach(attached)
    for made in (before, mf.Gradients()):
        assert abs(made.set(verbose=0).kernel() - gradient(plain)).max() < 1e-12
    assert not isinstance(mf.nuc_grad_method(), MD4Derivatives)
    for name in ("get_jk", "get_j", "get_k"):
        want = getattr(plain.Gradients(), name)(dm=plain.make_rdm1())
        for made in (before, excited):
            assert np.array_equal(getattr(made, name)(dm=plain.make_rdm1()), want)
    assert not calls


@pytest.mark.parametrize("verbose", [3, 4, 5])
def test_the_log_tells_who_made_what(verbose, plain):
    found = ours(plain).Gradients().set(verbose=verbose, stdout=io.StringIO())
    found.kernel()
    found.get_k()
    text = found.stdout.getvalue()
    assert text.count("Forces of two-electron integrals by md4: backend cpu (") == (verbose >= 4)
    assert text.count("Derivatives of J and K by md4: backend cpu (") == (verbose >= 4)
    # PySCF's log shows a table before the forces are added.
    _, _, after = text.partition("forces of two-electron integrals, which the gradients above do not contain")
    assert after.count("0 O ") == (2 if verbose == 5 else 0)


def test_forces_on_a_gpu():
    """And derivatives of J and K as matrices."""
    mf = own("RHF", atom="H 0 0 0; H 0.3 0.2 0.7", basis={"H": [[0, [0.8, 1.0]]]})
    with emulator.running("dmma16"):
        attached = md4.attach(mf.copy(), backend="cuda")
        found = attached.Gradients().set(verbose=4, stdout=io.StringIO())
        assert abs(found.kernel() - gradient(mf)).max() < CLOSE
        assert attached.md4_jk.engine.backend.name == "cuda"
        theirs = mf.Gradients()
        assert abs(found.get_k() - theirs.get_k()).max() < CLOSE
    assert "Forces of two-electron integrals by md4: backend cuda (" in found.stdout.getvalue()
    assert "Derivatives of J and K by md4: backend cuda (" in found.stdout.getvalue()


@pytest.fixture
def libxc():
    """Skips where bench/lab/pack_peers.py has replaced it by a library that ends the process."""
    (library, *_) = Path(dft.__file__).parents[1].glob("lib/deps/lib/libxc*.so*")
    if b"has left libxc out" in library.read_bytes():
        pytest.skip("there is no libxc")


@pytest.mark.gpu
@pytest.mark.parametrize("kind, basis", [("RHF", "cc-pvdz"), ("UHF", "6-31g*"), ("ROHF", "6-31g")])
def test_hartree_fock_on_a_gpu(kind, basis, gpu, calls):
    check_on_a_gpu(own(kind, basis=basis), calls)


@pytest.mark.gpu
@pytest.mark.parametrize("kind, xc", [("UKS", "b3lyp"), ("RKS", "camb3lyp"), ("RKS", "hse06"), ("RKS", "pbe")])
def test_functionals_on_a_gpu(kind, xc, gpu, libxc, calls):
    check_on_a_gpu(own(kind, xc), calls)


@pytest.mark.gpu
def test_excited_states_on_a_gpu(gpu):
    """The same amplitudes."""
    mf = own("RHF", basis="cc-pvdz")
    excited = mf.TDHF().set(nstates=2, conv_tol=1e-10, verbose=0).run()
    want = excited.Gradients().set(verbose=0, cphf_conv_tol=1e-12).kernel(state=1)
    attached = md4.attach(mf.copy(), backend="cuda").TDHF()
    attached.set(verbose=0, e=excited.e, xy=excited.xy, converged=excited.converged)
    found = attached.nuc_grad_method().set(verbose=4, stdout=io.StringIO(), cphf_conv_tol=1e-12)
    assert abs(found.kernel(state=1) - want).max() < 1e-9
    assert "Derivatives of J and K by md4: backend cuda (" in found.stdout.getvalue()


def check_on_a_gpu(mf, calls):
    """`kernel()` from the same orbitals, with all its forces of J and K made there."""
    attached = md4.attach(mf.copy(), backend="cuda")
    found = attached.nuc_grad_method().set(verbose=4, stdout=io.StringIO())
    assert abs(found.kernel() - gradient(mf)).max() < CLOSE
    assert set(calls) == {"gradient"}
    assert "Forces of two-electron integrals by md4: backend cuda (" in found.stdout.getvalue()


@pytest.mark.gpu
def test_scanner_on_a_gpu(gpu):
    """Lists and bounds are made again where the molecule moves; compiled kernels stay."""
    from md4.gpu import compile as dispatch

    mol, moved = (molecule(place, "6-31g") for place in (WATER, WATER.replace("0.118", "0.15")))
    theirs = scf.RHF(mol).set(conv_tol=1e-12, verbose=0).nuc_grad_method().as_scanner()
    mine = md4.attach(scf.RHF(mol).set(conv_tol=1e-12, verbose=0), backend="cuda").nuc_grad_method().as_scanner()
    counts = []
    for place in (mol, moved):
        (energy, forces), (right, want) = mine(place), theirs(place)
        assert abs(energy - right) < 1e-9
        assert abs(forces - want).max() < 1e-7  # those of two converged densities
        counts.append(dispatch.compile_count)
    assert counts[0] == counts[1]


def test_gradients_of_a_solver_whose_module_was_not_imported():
    """`scf.RHF(mol).Gradients()` is defined by pyscf.grad only."""
    attached = md4.attach(scf.RHF(molecule(HYDROGEN_FLUORIDE, "sto-3g")))
    assert isinstance(attached.Gradients(), MD4Forces)
    assert isinstance(attached.nuc_grad_method(), lib.StreamObject)
