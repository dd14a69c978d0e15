"""PySCF's correlated methods with integrals by md4, and energies of MP2; all methods: `test_features.py`."""

import copy
import gc
import io
import pickle
from contextlib import contextmanager
from threading import Thread

import numpy as np
import pytest
from emulator import running
from molecules import WATER, joined, molecule
from pyscf import ao2mo, cc, gto, mcscf, mp, scf
from pyscf.mp import mp2, ump2
from row_workers import divided
from solvers import solver

import md4
from md4.contract.mp2 import OccupiedVirtual
from md4.contract.pair_rows import PairRows
from md4.cpu.backend import CpuBackend
from md4.errors import DeviceError, MemoryLimitError
from md4.pyscf.builder import Builder
from md4.pyscf.correlated import builders, enter, responsible_for

ENERGY = "O 0 0 0; H 0 -0.757 0.587; H 0 0.757 0.587", -0.204019967288  # cc-pVDZ, from pyscf/mp/mp2.py itself
CLOSE = 1e-9  # Hartree


def own(kind="RHF", basis="6-31g", atom=WATER, **options):
    """A converged object of PySCF, of an open shell as UHF."""
    mol = molecule(atom, basis, **({"charge": 1} if kind == "UHF" else {}), **options)
    return solver(kind, mol).run(conv_tol=1e-11)


def ours(mf, backend="cpu", **options):
    """A copy of it that is attached, with the same orbitals and without a tensor."""
    return md4.attach(mf.copy().set(_eri=None), backend=backend, **options).set(max_memory=0)


@pytest.fixture(scope="module", params=["RHF", "UHF"])
def plain(request):
    return own(request.param)


@contextmanager
def sentinel():
    """Within it, PySCF's integrals over four centres raise."""

    def refused(*args, **options):
        raise AssertionError("PySCF makes integrals")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pyscf.gto.moleintor.getints4c", refused)
        patch.setattr("pyscf.ao2mo._ao2mo.nr_e1fill", refused)
        yield


def same(found, want):
    """Energies of two MP2 objects, and what there is of amplitudes."""
    for name in ("e_tot", "e_corr_ss", "e_corr_os"):
        assert abs(getattr(found, name) - getattr(want, name)) < CLOSE
    for one, other in zip(*((x.t2 if isinstance(x.t2, tuple) else [x.t2]) for x in (found, want)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-9)


def test_known_energy(backend):
    mf = md4.attach(molecule(ENERGY[0], "cc-pvdz").RHF(), backend=backend).set(max_memory=0)
    with sentinel():
        mf.run(conv_tol=1e-11)
        assert abs(mp.MP2(mf).kernel()[0] - ENERGY[1]) < CLOSE
        energy, amplitudes = md4.attach(mp.MP2(mf)).kernel(with_t2=False)
    assert abs(energy - ENERGY[1]) < CLOSE
    assert amplitudes is None


@pytest.mark.parametrize("frozen", [None, 1, [0, 3, 11]], ids=str)
def test_energies_and_amplitudes(plain, frozen, backend, monkeypatch):
    frozen = [frozen, frozen] if isinstance(frozen, list) and len(plain.mo_coeff) == 2 else frozen
    want, mf = mp.MP2(plain, frozen=frozen).run(), ours(plain, backend)
    with sentinel():
        same(mp.MP2(mf, frozen=frozen).run(), want)
        same(mf.MP2(frozen=frozen).run(), want)
        found = md4.attach(mp.MP2(mf, frozen=frozen))
        monkeypatch.setattr(OccupiedVirtual, "integrals", None)  # nobody stores them
        same(found.run(), want)


@pytest.mark.parametrize("count", [2, 3])
def test_several_workers(plain, count, monkeypatch):
    """Those of the attached object divide the rows, with the numbers of one."""
    one = ours(plain)
    want = md4.attach(mp.MP2(one, frozen=1)).run(), mp.MP2(one).run().e_corr
    monkeypatch.setattr("md4.contract.team.chosen", lambda *_: [None] * count)
    mf = ours(plain)
    with divided(count):
        found = md4.attach(mp.MP2(mf, frozen=1)).run()
    assert abs(found.e_corr - want[0].e_corr) < 1e-13
    for one, other in zip(found.t2, want[0].t2, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)
    with divided(count):
        assert abs(mp.MP2(mf).run().e_corr - want[1]) < 1e-13


def test_several_workers_of_other_methods(monkeypatch):
    """Integrals over active orbitals, and those times amplitudes; an error of one worker arrives, and all go on."""
    mf = own()
    want = mcscf.CASSCF(mf, 4, 4).set(verbose=0).run().e_tot, cc.CCSD(mf).set(verbose=0, max_cycle=3).run().e_corr
    monkeypatch.setattr("md4.contract.team.chosen", lambda *_: [None] * 2)
    mf, integrals = ours(mf), PairRows.integrals

    def fails(rows, *args):
        if rows.engine.backend.memory is workers[1].backend.memory:
            raise OSError("in a worker")
        integrals(rows, *args)

    with sentinel(), monkeypatch.context() as patch:
        workers = mf.md4_jk.team.workers
        patch.setattr(PairRows, "integrals", fails)
        with pytest.raises(OSError, match="in a worker"):
            md4.attach(mp.MP2(mf)).run()
    with sentinel():
        assert abs(mcscf.CASSCF(mf, 4, 4).set(verbose=0).run().e_tot - want[0]) < 1e-8
        found = cc.CCSD(mf).set(verbose=0, direct=True, max_cycle=3).run().e_corr
    assert abs(found - want[1]) < 1e-8


def test_what_asks_for_integrals(plain):
    """Density matrices and natural orbitals without amplitudes, also of an energy that was made without them."""
    want = mp.MP2(plain, frozen=1).run()
    found = md4.attach(mp.MP2(ours(plain), frozen=1))
    found.kernel(with_t2=False)
    for one, other in zip(found.make_rdm1(t2=found.init_amps()[1]), want.make_rdm1(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-9)
    eris = found.ao2mo()
    assert "ovov" not in vars(eris)
    np.testing.assert_allclose(eris.ovov, want.ao2mo().ovov, rtol=0, atol=1e-11)
    assert not hasattr(eris, "oooo")
    assert found.ao2mo(plain.mo_coeff).ovov.shape == eris.ovov.shape


@pytest.mark.parametrize("frozen", [1, [12]], ids=["occupied", "virtual"])
def test_integrals_of_other_frozen_orbitals(frozen):
    """They do not fit, as with PySCF, rather than give the energy of some orbitals of both."""
    found = md4.attach(mp.MP2(ours(own())))
    eris = found.ao2mo()
    found.frozen = frozen
    with pytest.raises(ValueError, match="shape"):
        found.kernel(eris=eris)


def test_energies_of_orbitals_that_are_given(plain):
    """They take the place of those of the object; not with frozen orbitals, whose number would not be theirs."""
    shifted = np.asarray(plain.mo_energy) + np.linspace(-0.1, 0.1, 13)
    want = mp.MP2(plain).set(verbose=0).kernel(mo_energy=shifted)[0]
    mf = ours(plain)
    with sentinel():
        assert abs(md4.attach(mp.MP2(mf)).set(verbose=0).kernel(mo_energy=shifted)[0] - want) < CLOSE
    with pytest.raises(AssertionError):  # PySCF's
        md4.attach(mp.MP2(mf, frozen=1)).set(verbose=0).kernel(mo_energy=shifted)


def test_natural_orbitals():
    plain = own()
    frozen, orbitals = mp.MP2(plain).run().make_fno(thresh=1e-3)
    found = md4.attach(mp.MP2(ours(plain)))
    found.kernel(with_t2=False)
    ours_frozen, ours_orbitals = found.make_fno(thresh=1e-3)
    np.testing.assert_array_equal(ours_frozen, frozen)
    np.testing.assert_allclose(abs(ours_orbitals), abs(orbitals), rtol=0, atol=1e-7)


def test_without_convergence():
    """PySCF's iterations, which need amplitudes and integrals."""
    mf = own()
    mf.mo_coeff, mf.converged = mf.mo_coeff @ np.linalg.qr(np.eye(13) + 0.01)[0], False
    mf._eri = None
    want = mp2.RMP2(mf).run(max_memory=0)
    found = md4.attach(mp2.RMP2(ours(mf))).run()
    assert abs(found.e_corr - want.e_corr) < 1e-7


@pytest.mark.parametrize("options", [{"cart": True}, {"basis": joined("6-31g", "HO")}], ids=["cart", "general"])
def test_other_functions(options):
    plain = own(**options)
    want = mp.MP2(plain).run()
    with sentinel():
        same(mp.MP2(ours(plain)).run(), want)


def test_range_separation():
    mol = molecule(WATER, "6-31g")
    with mol.with_range_coulomb(0.4):
        plain = mol.RHF().run(conv_tol=1e-11)
        same(mp.MP2(ours(plain)).run(), mp.MP2(plain).run())
        same(md4.attach(mp.MP2(ours(plain))).run(), mp.MP2(plain).run())


def test_objects_that_are_not_attached_keep_their_bits(plain):
    """With the same functions in place; also beside an attached object of the same molecule."""
    mf = plain.copy()
    mf._eri = None
    module = ump2 if len(mf.mo_coeff) == 2 else mp2
    md4.attach(scf.RHF(molecule("He 0 0 0", "6-31g")))  # by now functions are in place in any case
    theirs, found = module._ao2mo_ovov.__wrapped__, []
    for function in (theirs, module._ao2mo_ovov):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_ao2mo_ovov", function)
            found.append(mp.MP2(mf).set(max_memory=0).run())
    assert found[0].e_corr == found[1].e_corr
    for one, other in zip(found[0].t2, found[1].t2):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("change", [md4.detach, lambda mf: md4.attach(mf, backend="cpu", mo_integrals=False)])
def test_left_to_pyscf(change, monkeypatch):
    monkeypatch.setattr("md4.pyscf.correlated.OccupiedVirtual", None)
    mf = change(ours(own()))
    mf._eri = None
    want = mp.MP2(mf.to_rhf()).run().e_corr
    found = mp.MP2(mf).run()
    assert abs(found.e_corr - want) < CLOSE
    if isinstance(mf, md4.pyscf.scf.MD4SCF):
        assert "mo_integrals=False" in repr(mf)
        twin = pickle.loads(pickle.dumps(mf))
        twin.reset()
        assert abs(md4.attach(mp.MP2(twin)).run().e_corr - want) < CLOSE


def test_method_objects():
    """A method gets an attached copy of its mean-field object, or keeps the attached one; `detach` undoes it."""
    plain = own()
    plain._eri = None
    method = mp.MP2(plain)
    want = mp.MP2(plain).run().e_tot
    assert md4.attach(method, backend="cpu", max_memory=100) is method
    assert isinstance(method, mp2.RMP2)
    assert type(method).__name__ == "MD4RMP2"
    assert type(plain) is scf.hf.RHF
    assert "max_memory=100" in repr(method._scf)
    assert abs(method.run().e_tot - want) < CLOSE
    before = method._scf
    assert md4.attach(method)._scf._md4_builder is before._md4_builder
    assert type(method).__mro__.count(md4.pyscf.correlated.MD4MP2) == 1
    twins = pickle.loads(pickle.dumps(method)), copy.copy(method), method.copy()
    for twin in twins:
        assert type(twin).__name__ == "MD4RMP2"
        assert abs(twin.run().e_tot - want) < CLOSE
    method = md4.detach(method)
    assert type(method) is mp2.RMP2
    assert type(method._scf) is scf.hf.RHF
    assert abs(method.run().e_tot - want) < CLOSE
    with pytest.raises(md4.ArgumentError, match="RMP2 is not attached"):
        md4.detach(method)


def test_scanner():
    """Geometries one after the other, and the first one again."""
    places = [WATER, WATER.replace("0.1173", "0.15"), WATER]
    scan = md4.attach(mp.MP2(own())).as_scanner()
    scan._scf.conv_tol = 1e-11
    found = [scan(molecule(place, "6-31g")) for place in places]
    want = [mp.MP2(own(atom=place)).run().e_tot for place in places]
    np.testing.assert_allclose(found, want, rtol=0, atol=CLOSE)


def test_other_methods():
    """They take J and K of the attached copy."""
    plain = own()
    method = md4.attach(cc.CCSD(plain), backend="cpu").set(verbose=0)
    assert abs(method.run().e_tot - cc.CCSD(plain).run().e_tot) < 1e-7
    assert type(md4.detach(method)._scf) is scf.hf.RHF


@pytest.mark.parametrize("name", ["RCCSDT", "UCCSDT"])
def test_triples_without_a_tensor(name, backend):
    """PySCF finds a correlation energy of zero for two spins where nobody keeps integrals over AOs."""
    module = pytest.importorskip(f"pyscf.cc.{name.lower()}")
    plain = own(f"{name[0]}HF", "sto-3g", "Li 0 0 0; H 0 0 1.6")
    want, mf = getattr(module, name)(plain).set(verbose=0).run(), ours(plain, backend)
    found = getattr(module, name)(mf).set(verbose=0).run()
    assert abs(found.e_corr - want.e_corr) < CLOSE
    assert found.e_corr < -1e-4
    assert found._scf is mf
    assert mf._eri is None


def test_triples_without_memory(monkeypatch):
    module = pytest.importorskip("pyscf.cc.rccsdt")
    mf = ours(own(basis="sto-3g"))
    monkeypatch.setattr(Builder, "tensor", lambda *_: None)
    with pytest.raises(MemoryLimitError, match="RCCSDT of PySCF needs all integrals over AOs in memory"):
        module.RCCSDT(mf).set(verbose=0).run()


# functions that are given the molecule only ---------------------------------------------------------------------------


def whose(mol):
    """The builder that makes MO integrals of a molecule."""
    found = [ref() for ref in builders.get(mol, ()) if ref() is not None]
    return found[-1] if found else None


def test_who_is_responsible_for_a_molecule():
    """The object that was attached last and is still there; scanners, `reset` and pickles enter theirs."""
    mol = molecule(WATER, "sto-3g")
    first = md4.attach(mol.RHF(), backend="cpu")
    assert whose(mol) is first._md4
    second = md4.attach(mol.UHF(), backend="cpu")
    assert whose(mol) is second._md4
    copied = second.copy()
    md4.detach(second)
    assert whose(mol) is copied._md4  # which a copy still has
    md4.detach(copied)
    assert whose(mol) is first._md4
    md4.attach(first, backend="cpu", max_memory=100)
    assert whose(mol) is first._md4
    other = molecule(WATER, "6-31g")
    first.reset(other)
    assert whose(mol) is None
    assert whose(other) is first._md4
    second_order = md4.attach(mol.RHF(), backend="cpu").newton()
    second_order.reset(mol)
    assert whose(mol) is second_order._md4_builder  # whose JK is there in any case
    del second_order
    twin = pickle.loads(pickle.dumps(first))
    assert whose(twin.mol) is twin._md4
    del twin
    md4.attach(first, backend="cpu", mo_integrals=False)
    assert whose(other) is None
    del first
    gc.collect()
    assert whose(other) is None


def test_threads_enter_builders(monkeypatch):
    """None is lost where two threads enter one at a time when the other has read the list."""
    mol, made = molecule(WATER, "sto-3g"), [Builder(backend="cpu", comm=None) for _ in range(2)]
    second = Thread(target=enter, args=(mol, made[1]))

    class Slow(type(builders)):
        def get(self, *args):
            found = super().get(*args)
            if second.ident is None:
                second.start()
                second.join(0.2)  # which waits for the first
            return found

    monkeypatch.setattr("md4.pyscf.correlated.builders", slow := Slow())
    enter(mol, made[0])
    second.join()
    assert {ref() for ref in slow[mol]} == {*made}


def test_integrals_of_a_molecule():
    """PySCF's functions of any orbitals, while an object of the molecule is attached; others are PySCF's as before."""
    mol = molecule(WATER, "6-31g")
    orbitals = np.linalg.qr(np.random.default_rng(0).normal(size=(13, 13)))[0]
    a, b = orbitals[:, :4], orbitals[:, 3:9]

    def made():
        return ao2mo.general(mol, (a, b, b, b)), ao2mo.full(mol, a, aosym="s1"), mol.ao2mo(a, compact=False)

    def others():
        return [ao2mo.full(mol, a, intor=name, aosym="s1", comp=n) for name, n in (("int2e_ip1", 3), ("int2e_pp1", 1))]

    want, same_bits = made(), others()
    mf = md4.attach(mol.RHF(), backend="cpu")
    with sentinel():
        found = made()
    for one, other in zip(found, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-11)
    for one, other in zip(others(), same_bits, strict=True):
        np.testing.assert_array_equal(one, other)
    assert responsible_for(mol, a) is not None
    assert responsible_for(mol, a + 0j) is None
    for wrong in (a[:10], np.vstack([a, a])):
        with pytest.raises(AssertionError):  # PySCF's
            ao2mo.full(mol, wrong)
    md4.detach(mf)
    with sentinel(), pytest.raises(AssertionError, match="PySCF makes integrals"):
        made()
    for one, other in zip(made(), want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_casscf_with_core_integrals():
    """`ao2mo_level = 1` needs (pp|cc) and (pc|pc) as well."""
    mf = own(atom="Li 0 0 0; H 0 0 1.6")
    want = mcscf.CASSCF(mf, 2, 2).set(verbose=0, ao2mo_level=1).run().e_tot
    with sentinel():
        found = mcscf.CASSCF(ours(mf), 2, 2).set(verbose=0, ao2mo_level=1).run().e_tot
    assert abs(found - want) < 1e-8


def test_unrestricted_casscf_without_memory():
    """PySCF's UCASSCF takes max_memory as a limit, and a mean-field object without a tensor may have 0."""
    mol = molecule("Li 0 0 0; H 0 0 1.6", "6-31g")
    plain = scf.UHF(mol).run(conv_tol=1e-11, max_memory=0)
    with pytest.raises(RuntimeError, match="not enough"):
        mcscf.UCASSCF(plain, 2, 2).run()
    mf = ours(plain)
    with pytest.raises(md4.MemoryLimitError, match=r"max_memory = 0 MB.* 0\.1 MB more; set max_memory of this object"):
        mcscf.UCASSCF(mf, 2, 2).run()
    want = mcscf.UCASSCF(plain, 2, 2).run(max_memory=4000)
    with sentinel():
        assert abs(mcscf.UCASSCF(mf, 2, 2).run(max_memory=4000).e_tot - want.e_tot) < CLOSE


def test_response_matrices():
    """`get_ab` of TDHF."""
    mf = own()
    want = mf.TDHF().get_ab()
    with sentinel():
        found = ours(mf).TDHF().get_ab()
    for one, other in zip(found, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


def test_refusals():
    mf = ours(own(), max_memory=0.05)
    with pytest.raises(md4.MemoryLimitError, match=r"takes? .* but 50 kB may be used; raise max_memory"):
        mp.MP2(mf).run()
    with pytest.raises(md4.ArgumentError, match="mo_integrals"):
        md4.attach(molecule(WATER, "sto-3g").RHF(), mo_integrals="yes")


def test_a_gpu_without_cupy(plain, monkeypatch):
    """PySCF makes the integrals, and its log says why."""

    def missing(backend):
        raise DeviceError("no CuPy")

    monkeypatch.setattr(CpuBackend, "algebra", missing)
    monkeypatch.setattr("md4.pyscf.correlated.OccupiedVirtual", None)
    mf = ours(plain)
    assert abs(md4.attach(mp.MP2(mf)).run().e_tot - mp.MP2(plain).run().e_tot) < CLOSE


def test_incore_anyway_on_a_gpu():
    """PySCF says that there is no tensor, and md4 what to do about it."""
    mol = molecule("H 0 0 0", "sto-3g", spin=1)
    mol.stdout, mol.verbose, mol.incore_anyway = io.StringIO(), 3, True
    mf = md4.attach(mol.UHF(), backend="cuda")
    with running("dmma16"):
        mf._md4_builder.jk(mol, mf._tell_backend)
    assert "mol.incore_anyway asks for the AO tensor" in mol.stdout.getvalue()


def test_empty_shells():
    """No beta electron that correlates, and no virtual orbital."""
    for atom, spin, basis in (("Li 0 0 0", 3, "6-31g"), ("H 0 0 0", 1, "6-31g"), ("He 0 0 0", 0, "sto-3g")):
        mol = gto.M(atom=atom, basis=basis, spin=spin, verbose=0)
        plain = mol.UHF().run(conv_tol=1e-11)
        for made in (mp.MP2(ours(plain)), md4.attach(mp.MP2(ours(plain)))):
            assert abs(made.run().e_corr - mp.MP2(plain).run().e_corr) < CLOSE
