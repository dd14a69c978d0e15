"""md4.ao2mo beside pyscf.ao2mo: orders, symmetries and files."""

import gc
import tempfile

import h5py
import numpy as np
import pytest
from emulator import running
from emulator.array_library import cupy
from molecules import WATER, joined, molecule
from pyscf import ao2mo, lib
from pyscf.ao2mo import outcore
from pyscf.mcscf import mc_ao2mo
from row_workers import divided
from traced_memory import until_enough

import md4
from md4.contract.row_team import RowTeam
from md4.engine import Engine
from md4.pyscf.ao2mo import active_space
from md4.shells.basis import Basis
from md4.support.memory import HostMemory

CLOSE = 1e-11


def orbitals(mol):
    return np.linalg.qr(np.random.default_rng(1).normal(size=(mol.nao, mol.nao)))[0]


@pytest.fixture(scope="module")
def mol():
    return molecule(WATER, "6-31g")


@pytest.fixture(scope="module")
def sets(mol):
    """Of 3, 7, 5 and all orbitals."""
    every = orbitals(mol)
    return every[:, :3], every[:, 3:10], every[:, 8:], every


@pytest.mark.parametrize("aosym", ["s4", "s2ij", "s2kl", "s1", 1, "4"])
@pytest.mark.parametrize("compact", [True, False])
def test_general(mol, sets, aosym, compact, backend):
    a, b, c, every = sets
    for four in ((a, b, b, c), (b, b, a, c), (a, a, every, every), (every,) * 4, (a, a.copy(), b, b)):
        want = ao2mo.general(mol, four, aosym=aosym, compact=compact)
        found = md4.ao2mo.general(mol, four, aosym=aosym, compact=compact, backend=backend)
        assert found.shape == want.shape
        np.testing.assert_allclose(found, want, rtol=0, atol=CLOSE)


def test_one_set(mol, sets):
    every = sets[3]
    want = ao2mo.kernel(mol, every)
    np.testing.assert_allclose(md4.ao2mo.kernel(mol, every, backend="cpu"), want, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(md4.ao2mo.full(mol, every, backend="cpu"), want, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(md4.ao2mo.kernel(mol, (every,) * 4, backend="cpu"), want, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(md4.ao2mo.full(mol.intor("int2e", aosym="s8"), every), want, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("options", [
    {"cart": True}, {"basis": joined("cc-pvdz", "HO")}, {"omega": 0.3}, {"intor": "int2e_yp"}
], ids=str)  # fmt: skip
def test_other_integrals(options):
    intor, omega = options.get("intor", "int2e"), options.get("omega", 0)
    mol = molecule(WATER, options.get("basis", "6-31g"), cart=options.get("cart", False))
    if intor != "int2e":
        mol.set_f12_zeta(1.2)
    every = orbitals(mol)[:, :6]
    with mol.with_range_coulomb(omega):
        found = md4.ao2mo.full(mol, every, intor=intor, backend="cpu")
        want = ao2mo.full(md4.intor(mol, intor, "s8", backend="cpu"), every)
    np.testing.assert_allclose(found, want, rtol=0, atol=CLOSE)


def test_files(mol, sets, tmp_path):
    """By name, as an open file, as a group and as a temporary file; an old dataset is replaced, others stay."""
    a, b, c, _ = sets
    name, want = str(tmp_path / "eri.h5"), ao2mo.general(mol, (a, b, c, c))
    for four in ((a, a, a, a), (a, b, c, c)):
        assert md4.ao2mo.general(mol, four, name, backend="cpu") == name
    md4.ao2mo.general(mol, (a, a, b, b), name, "some/other", backend="cpu")
    with h5py.File(name, "r+") as file:
        np.testing.assert_allclose(file["eri_mo"], want, rtol=0, atol=CLOSE)
        assert file["some/other"].shape == (6, 28)
        group = file.create_group("mine")
        assert md4.ao2mo.general(mol, (c, c, a, b), group, backend="cpu") is group
        np.testing.assert_allclose(np.transpose(group["eri_mo"]), want, rtol=0, atol=CLOSE)
        md4.ao2mo.general(mol, (a[:, :0], b, c, c), group, "empty", backend="cpu")
        assert group["empty"].shape == (0, 15)
    with tempfile.NamedTemporaryFile() as file:
        md4.ao2mo.full(mol, a, file, backend="cpu")
        with h5py.File(file.name, "r") as made:
            assert made["eri_mo"].shape == (6, 6)


@pytest.mark.parametrize("basis", ["6-31g", joined("cc-pvdz", "HO")], ids=["segmented", "general"])
@pytest.mark.parametrize("compact", [True, False])
def test_half_transformed(basis, compact, backend):
    """The columns are PySCF's, also those of shells with several contractions."""
    mol = molecule(WATER, basis)
    every = orbitals(mol)
    for two in ((every[:, :3], every[:, 2:7]), (every, every[:, :3]), (every[:, :4], every[:, :4])):
        with lib.H5TmpFile() as theirs, lib.H5TmpFile() as ours:
            outcore.half_e1(mol, two, theirs, compact=compact)
            assert md4.ao2mo.half_e1(mol, two, ours, compact=compact, backend=backend) is ours
            want = outcore._load_from_h5g(theirs["0"], 0, theirs["0/0"].shape[0])
            np.testing.assert_allclose(ours["0/0"], want, rtol=0, atol=CLOSE)


def test_the_path_of_a_file(tmp_path):
    mol, path = molecule("O 0 0 0", "6-31g"), tmp_path / "half.h5"
    md4.ao2mo.half_e1(mol, (np.eye(mol.nao)[:, :2],) * 2, path, backend="cpu")
    with h5py.File(path) as file:
        assert "0" in file


def test_columns_of_cartesian_functions():
    """They are those of the integral's name, not of the molecule."""
    mol = molecule("O 0 0 0", "cc-pvdz")
    c = np.linalg.qr(np.random.default_rng(1).normal(size=(15, 15)))[0][:, :3]
    with lib.H5TmpFile() as theirs, lib.H5TmpFile() as ours:
        outcore.half_e1(mol, (c, c), theirs, intor="int2e_cart")
        md4.ao2mo.half_e1(mol, (c, c), ours, intor="int2e_cart", backend="cpu")
        want = outcore._load_from_h5g(theirs["0"], 0, theirs["0/0"].shape[0])
        assert ours["0/0"].shape == (6, 120)
        np.testing.assert_allclose(ours["0/0"], want, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("count", [2, 3])
def test_several_workers(mol, sets, count, monkeypatch, tmp_path):
    """They divide the rows, and then the pairs of orbitals; in memory, in a file, and half-transformed."""
    a, b, _, every = sets
    name, calls = str(tmp_path / "eri.h5"), (((a, b, b, b), {}), ((every, every, a, a), {"aosym": "s4"}))
    want = [md4.ao2mo.general(mol, four, backend="cpu", **options) for four, options in calls]
    with lib.H5TmpFile() as one, lib.H5TmpFile() as several:
        md4.ao2mo.half_e1(mol, (b, a), one, backend="cpu")
        monkeypatch.setattr("md4.contract.team.chosen", lambda *_: [None] * count)
        with divided(count):
            md4.ao2mo.half_e1(mol, (b, a), several, backend="cpu")
        np.testing.assert_allclose(several["0/0"], one["0/0"], rtol=0, atol=1e-13)
    for (four, options), wanted in zip(calls, want):
        with divided(count):
            found = md4.ao2mo.general(mol, four, backend="cpu", **options)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-13)
        md4.ao2mo.general(mol, four, name, backend="cpu", **options)
        with h5py.File(name, "r") as file:
            np.testing.assert_allclose(file["eri_mo"], wanted, rtol=0, atol=1e-13)


def test_empty_sets(mol, sets):
    """Different arrays of no orbital."""
    a, b, *_ = sets
    found = md4.ao2mo.general(mol, (a[:, :0], b[:, :0], a, b), backend="cpu")
    assert found.shape == (0, 21)


def test_what_a_refusal_names_is_enough(mol, sets):
    """With the result, which is not allocated before."""

    def work(cap):
        return md4.ao2mo.full(mol, sets[3], compact=False, backend="cpu", max_memory=cap)

    found, _, refusals = until_enough(work, 0.05)
    np.testing.assert_allclose(found, work(None), rtol=0, atol=1e-13)
    assert "integrals over 169 pairs of orbitals" in refusals[-1]


def test_results_count(mol, sets, monkeypatch):
    """They count against the cap as long as they are there."""
    memories, watch = [], HostMemory.watch

    def watched(memory, *args):
        memories.append(memory)
        return watch(memory, *args)

    monkeypatch.setattr(HostMemory, "watch", watched)
    found = md4.ao2mo.full(mol, sets[3], compact=False, backend="cpu", max_memory=2)
    held, nbytes = memories[0].held, found.nbytes
    del found
    assert memories[0].held == held - nbytes


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("ncore, ncas", [(3, 4), (0, 2), (5, 1)])
def test_active_space(mol, level, ncore, ncas, backend):
    every = orbitals(mol)
    with lib.H5TmpFile() as theirs:
        want = mc_ao2mo.trans_e1_outcore(mol, every, ncore, ncas, theirs, max_memory=2000, level=level)
        want = *want, theirs["ppaa"][()], theirs["papa"][()]
    team = RowTeam([Engine(Basis.from_mol(mol), backend=backend)])
    for found, expected in zip(active_space(team, every, ncore, ncas, level == 1), want, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE)


def test_active_space_that_does_not_fit(mol, monkeypatch):
    """Found before the first integral."""
    team = RowTeam([Engine(Basis.from_mol(mol), backend="cpu")])
    monkeypatch.setattr("md4.support.memory.host_memory", lambda: 1000)
    monkeypatch.setattr("md4.pyscf.ao2mo.OneIndexOfEachSide", None)
    with pytest.raises(md4.MemoryLimitError, match=r"over active orbitals take 21\.7 kB, but the host has 1 kB"):
        active_space(team, orbitals(mol), 3, 4, False)


@pytest.mark.parametrize("call, error, match", [
    (lambda mol, c: md4.ao2mo.general(mol, (c, c, c)), md4.ArgumentError, "mo_coeffs must hold 4 arrays"),
    (lambda mol, c: md4.ao2mo.general(mol, 5), md4.ArgumentError, "mo_coeffs must hold 4 arrays"),
    (lambda mol, c: md4.ao2mo.full(mol, c[:5]), md4.ArgumentError, r"shape \(13, n\), not \(5, 13\)"),
    (lambda mol, c: md4.ao2mo.general(mol, (c, c, c, c[:5])), md4.ArgumentError, r"shape \(13, n\), not \(5, 13\)"),
    (lambda mol, c: md4.ao2mo.full(mol, c + 0j), md4.UnsupportedError, "real orbitals"),
    (lambda mol, c: md4.ao2mo.full(mol, c * np.nan, backend="cpu"), md4.ArgumentError, "not finite"),
    (lambda mol, c: md4.ao2mo.full(mol, mol.RHF()), md4.ArgumentError, r"pass mf\.mo_coeff"),
    (lambda mol, c: md4.ao2mo.full(mol, c, progress="x"), md4.ArgumentError, "progress must be"),
    (lambda mol, c: md4.ao2mo.half_e1(mol, (c, c), "x", progress="x"), md4.ArgumentError, "progress must be"),
    (lambda mol, c: md4.ao2mo.full(mol, c, comp=np.ones(2)), md4.UnsupportedError, "one component"),
    (lambda mol, c: md4.ao2mo.full(mol, c, "x.h5", 3, backend="cpu"), md4.ArgumentError, "dataname must be"),
    (lambda mol, c: md4.ao2mo.full(mol, c, aosym=None), md4.ArgumentError, "aosym None is unknown"),
    (lambda mol, c: md4.ao2mo.full(mol, c, intor="int2e_ip1"), md4.UnsupportedError, "without derivatives"),
    (lambda mol, c: md4.ao2mo.full(mol, c, intor="int2e_ig1"), md4.UnsupportedError, "int2e_ig1"),
    (lambda mol, c: md4.ao2mo.full(mol, c, comp=3), md4.UnsupportedError, "one component"),
    (lambda mol, c: md4.ao2mo.full(mol, c, aosym="a4ij"), md4.ArgumentError, "aosym"),
    (lambda mol, c: md4.ao2mo.full(mol, c, 5), md4.ArgumentError, "a file is the name of one"),
    (lambda mol, c: md4.ao2mo.full(mol, c, backend="cpu", device=True), md4.DeviceError, "needs backend='cuda'"),
    (lambda mol, c: md4.ao2mo.full(mol, c, "x.h5", device=True), md4.ArgumentError, "erifile is given"),
    (lambda mol, c: md4.ao2mo.full(mol, c, backend="cpu", devices=[0]), md4.ArgumentError, "the CPU backend has none"),
    (lambda mol, c: md4.ao2mo.half_e1(mol, (c, c), "x", devices=-1), md4.DeviceError, "no GPU -1"),
    (lambda mol, c: md4.ao2mo.full(mol.intor("int2e"), c, "x.h5"), md4.ArgumentError, "transformed in memory"),
    (lambda mol, c: md4.ao2mo.full(mol.intor("int2e"), c, device=True), md4.ArgumentError, "transformed in memory"),
    (lambda mol, c: md4.ao2mo.full(mol, c, "x.h5", max_memory=0.01, backend="cpu"), md4.MemoryLimitError, "max_memory"),
    (lambda mol, c: md4.ao2mo.full(mol, c, backend="cpu", max_memory=0.01), md4.MemoryLimitError, "takes? .* may be"),
    (lambda mol, c: md4.ao2mo.half_e1(mol, (c, c), "x", aosym="s1"), md4.UnsupportedError, "'s4' or 's2kl'"),
    (lambda mol, c: md4.ao2mo.half_e1(mol, (c, c), "x", comp=3), md4.UnsupportedError, "one component"),
    (lambda mol, c: md4.ao2mo.half_e1("H", (c, c), "x"), md4.ArgumentError, "pyscf"),
])  # fmt: skip
def test_refusals(mol, call, error, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=match):
        call(mol, orbitals(mol))
    assert not [*tmp_path.iterdir()]


def test_on_the_emulated_device():
    """The result stays there, and outlives the engine."""
    mol = molecule("H 0 0 0", {"H": [[0, [0.9, 1.0]], [1, [0.8, 1.0]]]}, spin=1)
    a, b = orbitals(mol)[:, :2], orbitals(mol)[:, 1:]
    with running("dmma16"), cupy():
        found = md4.ao2mo.general(mol, (a, b, b, b), backend="cuda", device=True)
        swapped = md4.ao2mo.general(mol, (b, b, a, a), backend="cuda", device=True)
        gc.collect()
        np.testing.assert_allclose(found, ao2mo.general(mol, (a, b, b, b)), rtol=0, atol=CLOSE)
        np.testing.assert_allclose(swapped, ao2mo.general(mol, (b, b, a, a)), rtol=0, atol=CLOSE)


def test_on_one_of_several_devices(monkeypatch):
    """The result would have to be on one."""
    mol = molecule("H 0 0 0", "sto-3g", spin=1)
    monkeypatch.setattr("md4.contract.team.chosen", lambda *_: [0, 0])
    with running("dmma16"), cupy(), pytest.raises(md4.ArgumentError, match="on one device, but devices names 2"):
        md4.ao2mo.full(mol, np.eye(1), backend="cuda", device=True, devices=[0, 1])


@pytest.mark.gpu
def test_on_the_device(gpu, mol, sets):
    import cupy

    a, b, *_ = sets
    found = md4.ao2mo.general(mol, (a, b, b, b), device=True)
    assert isinstance(found, cupy.ndarray)
    np.testing.assert_allclose(found.get(), ao2mo.general(mol, (a, b, b, b)), rtol=0, atol=CLOSE)
