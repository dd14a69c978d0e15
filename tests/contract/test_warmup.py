"""What `md4 warmup` compiles, and what first calls do: all that whole tensors and builds launch, and little else."""

from functools import cache
from itertools import product

import numpy as np
import pytest
from emulator import running
from emulator.array_library import cupy
from molecules import METHANE, WATER, molecule
from offline import CAPABILITIES, devices_without_memory

import md4
from md4.contract import tensor
from md4.contract.density_fitting import DensityFitting
from md4.contract.fitting_gradient import FittingGradient
from md4.contract.pair_rows import PairRows
from md4.contract.screening import schwarz_bounds
from md4.contract.three_centre import ThreeCentre
from md4.contract.warmup import (
    MEMORIES,
    asked_by,
    asked_by_basis,
    asked_by_fitting,
    asked_by_shells,
    make_tensors,
    warmup,
)
from md4.errors import MemoryLimitError
from md4.gpu import backend as gpu_backend
from md4.gpu import part_plans
from md4.gpu.backend import GpuBackend
from md4.gpu.context import DeviceContext
from md4.gpu.targets import DeviceTensor

UNITS = sorted(CAPABILITIES)
TENSOR_CORES = [unit for unit in UNITS if unit != "fma"]
CHAIN = "; ".join(f"O 0 {3 * n} 0; H 0 {3 * n} 0.96; H 0.93 {3 * n} -0.24" for n in range(9))
SYSTEMS = {
    "water cc-pvtz": (WATER, "cc-pvtz"), "methane aug-cc-pvdz": (METHANE, "aug-cc-pvdz"),
    "water def2-tzvp": (WATER, "def2-tzvp"), "hydrogen cc-pvdz": ("H 0 0 0; H 0.3 0.2 0.7", "cc-pvdz"),
    "9 waters cc-pvdz": (CHAIN, "cc-pvdz"),
    "9 waters 6-31g*": (CHAIN, "6-31g*"), "Cl2 cc-pvqz": ("Cl 0 0 0; Cl 0 0 2", "cc-pvqz"),
    "water ano": (WATER, "ano"), "TiO cc-pvdz": ("Ti 0 0 0; O 0 0 1.6", "cc-pvdz"),
}  # fmt: skip
CALLS = {
    "s1": {}, "s4": {}, "s8": {}, "jk": {}, "j": {"with_k": False}, "k": {"with_j": False}, "general": {"hermi": 0},
}  # fmt: skip


@cache
def system(name):
    return molecule(*SYSTEMS[name])


def names(variants):
    return sorted(variant.name for variant in variants)


def launched(unit, name, call, left, omega=None, seed=0):
    """Variants that a call with md4's public functions launches, of a random density."""
    mol = system(name)
    dm = np.random.default_rng(seed).standard_normal((mol.nao, mol.nao))
    with devices_without_memory(unit, left) as found:
        if call in ("s1", "s4", "s8"):
            md4.int2e(mol, aosym=call, omega=omega, backend="cuda")
        else:
            md4.get_jk(mol, dm, omega=omega, backend="cuda", **CALLS[call])
    return set(found)


@pytest.mark.sample("methane *", "9 waters 6-31g*")
@pytest.mark.parametrize(
    ("name", "unit", "left"), [(name, TENSOR_CORES[n % 2], MEMORIES[n // 2 % 2]) for n, name in enumerate(SYSTEMS)]
)
def test_nothing_is_left_to_compile(name, unit, left):
    """After `md4 warmup GEOMETRY --basis NAME`, for any use and however much memory there is."""
    warm = set(asked_by_basis(md4.Basis.from_mol(system(name)), "coulomb", CAPABILITIES[unit]))
    for call in CALLS:
        assert not names(launched(unit, name, call, left) - warm), call


def test_one_of_equal_blocks_is_looked_at(monkeypatch):
    """A tensor of a large molecule has 1e6 of them."""
    monkeypatch.setattr(gpu_backend, "BLOCK_BYTES", 5000)
    asked, counts, take, one = [], [0, 0], DeviceTensor.take, tensor.one_of_each

    def counted(self, pairs, report=None):
        counts[len(asked)] += len(pairs)
        take(self, pairs, report)

    monkeypatch.setattr(DeviceTensor, "take", counted)
    basis = md4.Basis.from_mol(molecule("; ".join(f"He 0 {0.9 * n} 0" for n in range(9)), "6-31g"))
    for each in (one, lambda items, kind: items):
        monkeypatch.setattr(tensor, "one_of_each", each)
        asked.append(set(asked_by(lambda backend: make_tensors(backend, basis), "coulomb", (9, 0), MEMORIES[:1])))
    assert counts[0] < counts[1] / 2
    assert asked[0] == asked[1]


def test_a_molecule_that_needs_more_than_a_little_memory():
    """`md4 warmup` asks for what it needs with much memory, where it is refused with little."""

    def work(backend):
        if backend.memory_left() == MEMORIES[-1]:
            raise MemoryLimitError("2 GB are needed.")
        backend.context.asked["kernel"] = None

    assert asked_by(work, "coulomb", (9, 0)) == {"kernel": None}
    with pytest.raises(MemoryLimitError, match="2 GB"):
        asked_by(work, "coulomb", (9, 0), MEMORIES[1:])


# With exchange it takes 25 CPU seconds, as much as is allowed where the machine counts quickly (tests/conftest.py).
@pytest.mark.parametrize("exchange", [pytest.param(1.0, marks=pytest.mark.thorough), 0.0])
def test_nothing_is_left_to_compile_for_forces(exchange, monkeypatch):
    """After `md4 warmup GEOMETRY --basis NAME --forces`."""
    mol, asked = system("hydrogen cc-pvdz"), []

    def note(backend, use, basis, work, *_):
        if use == "forces":
            asked.append(backend.asked_by(work))

    with running("dmma16"), monkeypatch.context() as patches:
        jk = md4.JK(mol, backend="cuda")
        patches.setattr(GpuBackend, "compile_ahead", note)
        jk.gradient(np.eye(mol.nao), exchange=exchange)
    warm, more = (asked_by_basis(md4.Basis.from_mol(mol), "coulomb", (9, 0), forces=these) for these in (False, True))
    assert "pair_forces" in {variant.factory.__name__ for variant in set(more) - set(warm)}
    assert asked
    for these in asked:
        assert not names(set(these) - set(more))


def test_forces_of_density_fitting(monkeypatch):
    """What a gradient launches is compiled ahead of it, and by `warmup`, but for kernels of the rows of B."""
    shells = [{"O": [[l, [0.9, 1.0]]], "H": [[0, [1.2, 1.0]]]} for l in (1, 2)]
    bases = [md4.Basis.from_mol(molecule("O 0 0.1 0; H 0.3 0.9 -0.6", these)) for these in shells]
    launched, ahead = set(), {}
    launch = DeviceContext.launch
    with running("dmma16"), cupy(), monkeypatch.context() as patches:
        made = FittingGradient(DensityFitting(*bases, backend="cuda"))
        patches.setattr(DeviceContext, "launch", lambda self, *args: launched.add(args[0]) or launch(self, *args))
        patches.setattr(GpuBackend, "compile_ahead", lambda self, use, basis, work, *_, **__: ahead.update(
            {use: set(self.asked_by(work))}))  # fmt: skip
        made.run(np.eye(bases[0].nao), 1.0, 1.0)
    launched = {variant for variant in launched if variant.factory.__name__ not in ("unpack_rows", "half_transform")}
    assert {"gamma_of_table", "table_norms"} <= {variant.factory.__name__ for variant in launched}
    assert not names(launched - ahead["fitting"])
    assert not names(ahead["fitting"] - set(asked_by_fitting(*bases, "coulomb", (9, 0), forces=True)))


@pytest.mark.sample("dmma8-*", "fma-*")
@pytest.mark.parametrize(
    ("unit", "name"), [("dmma16", "9 waters cc-pvdz"), ("dmma8", "methane aug-cc-pvdz"), ("fma", "hydrogen cc-pvdz")]
)
def test_nothing_is_left_to_compile_for_mp2(unit, name, monkeypatch):
    """After `md4 warmup GEOMETRY --basis NAME --mp2`: what the calls of any number of orbitals compile ahead.

    Their shell pairs are left out by exact bounds, which the CPU makes.
    """
    basis, asked = md4.Basis.from_mol(system(name)), []
    warm, more = (set(asked_by_basis(basis, "coulomb", CAPABILITIES[unit], mp2=mp2)) for mp2 in (False, True))
    engine = md4.Engine(basis, backend="cpu")
    dry = GpuBackend.without_device(engine.operator, CAPABILITIES[unit], MEMORIES[0])
    monkeypatch.setattr("md4.contract.three_centre.schwarz_bounds", lambda _, lists: schwarz_bounds(engine, lists))
    rows = PairRows(engine.with_backend(dry))
    monkeypatch.setattr(
        GpuBackend, "compile_ahead", lambda self, use, basis, work, *_: asked.append(self.asked_by(work))
    )
    for complete, orbitals in product((False, True), (0, 1, 9, 17, 25, 33, 100)):
        rows.compile_ahead(complete, orbitals=orbitals)
    wanted = set().union(*asked)
    assert "unpack_rows" in {variant.factory.__name__ for variant in wanted - warm}
    assert not names(wanted - more)


def test_what_forces_take():
    """A basis, of angular momenta whose derivatives are within the limit, also with an auxiliary one."""
    basis = md4.Basis.from_arrays([8], [[1.0]], [[1.0]], np.zeros((1, 3)))
    with pytest.raises(md4.ArgumentError, match="forces=True takes a basis"):
        warmup(2, arch="sm_90", listed=True, forces=True)
    with pytest.raises(md4.UnsupportedError, match="L = 33, beyond the limit of 31 for derivatives"):
        warmup(2, basis=basis, auxiliary=basis, arch="sm_90", listed=True, forces=True)
    with pytest.raises(md4.UnsupportedError, match="L = 32, beyond the limit of 31 for derivatives"):
        warmup(2, basis=basis, arch="sm_90", listed=True, forces=True)


@pytest.mark.sample("hydrogen *")
@pytest.mark.parametrize("name", ["hydrogen cc-pvdz", "methane aug-cc-pvdz", "9 waters cc-pvdz"])
def test_shells_up_to_an_l(name):
    """`md4 warmup --lmax` knows no molecule: it leaves little of what a call launches.

    It left 5 of 80 kernels of methane and 1 of 125 of the waters, those of means of primitives that it does not have.
    """
    basis = md4.Basis.from_mol(system(name))
    warm = set(asked_by_shells(basis.lmax, True, "coulomb", (9, 0)))
    used = set().union(*(launched("dmma16", name, call, MEMORIES[0]) for call in CALLS))
    assert len(used - warm) <= 0.1 * len(used), names(used - warm)


@pytest.mark.thorough
@pytest.mark.parametrize("omega", [0.3, -0.3])
def test_range_separation(omega):
    """J and K of erf and erfc need the Schwarz bounds of Coulomb, besides kernels of their own."""
    kind, basis = "erf" if omega > 0 else "erfc", md4.Basis.from_mol(system("water def2-tzvp"))
    warm = set(asked_by_basis(basis, kind, (9, 0)))
    for call in CALLS:
        assert launched("dmma16", "water def2-tzvp", call, MEMORIES[0], omega) <= warm


@pytest.mark.parametrize("kind", ["yukawa", "slater", "gaussian", "gaussian_coulomb"])
def test_operators_without_j_and_k(kind):
    basis = md4.Basis.from_mol(system("water def2-tzvp"))
    factories = {variant.factory.__name__ for variant in asked_by_basis(basis, kind, (9, 0))}
    assert "scatter_block" in factories
    assert not {f for f in factories if f.startswith(("digest", "correlation", "hermite", "pair_bounds"))}


FITTING = {
    "water cc-pvtz": ("water cc-pvtz", "cc-pvtz-jkfit"), "9 waters 6-31g*": ("9 waters 6-31g*", "weigend"),
    "Cl2 cc-pvqz": ("Cl2 cc-pvqz", "cc-pvqz-jkfit"),
}  # fmt: skip


def bases(name):
    """A molecule, its auxiliary molecule, and the basis sets of both."""
    from pyscf import df

    mol = system(FITTING[name][0])
    auxmol = df.make_auxmol(mol, FITTING[name][1])
    return mol, auxmol, *map(md4.Basis.from_mol, (mol, auxmol))


@pytest.mark.sample("9 waters *")
@pytest.mark.parametrize(("name", "unit", "left"), [*zip(FITTING, UNITS, (*MEMORIES, MEMORIES[1]))])
def test_nothing_is_left_to_compile_for_density_fitting(name, unit, left):
    """After a warm-up with the auxiliary basis, whatever is screened."""
    mol, auxmol, basis, auxiliary = bases(name)
    warm = set(asked_by_fitting(basis, auxiliary, "coulomb", CAPABILITIES[unit]))
    with devices_without_memory(unit, left) as found:
        md4.int3c2e(mol, auxmol, "s2ij", backend="cuda")
        md4.int3c2e(mol, auxmol, backend="cuda")
        md4.int2c2e(auxmol, backend="cuda")
        for cutoff in (0.0, 1e-10):
            three = ThreeCentre(basis, auxiliary, backend="cuda", cutoff=cutoff)
            three.metric()
            three.integrals()
    assert not names(set(found) - warm)
    assert not {f for f in map(str, names(found)) if f.startswith(("digest", "correlation", "hermite"))}


def test_a_dry_run_of_density_fitting_compiles_nothing(monkeypatch):
    """Also where its bounds would be made first: the device of this process is none of a warm-up's business."""
    monkeypatch.setattr("md4.gpu.backend.compile_ahead", lambda *_: pytest.fail("compiled ahead"))
    basis = md4.Basis.from_arrays([0, 0], [[0.9]] * 2, [[1.0]] * 2, np.eye(2, 3))
    assert asked_by_fitting(basis, basis, "coulomb", (9, 0), MEMORIES[:1])


def test_a_planar_molecule_that_lies_askew(monkeypatch):
    """J and K turn it where that gains, and launch the kernels of molecules in a plane."""
    flat = np.array([[0.3, 0.1, 0.0], [1.2, 0.9, 0.0], [-0.4, 1.1, 0.0]])
    askew = flat @ [[0.36, -0.8, 0.48], [0.48, 0.6, 0.64], [-0.8, 0.0, 0.6]]

    def warm(centres):
        basis = md4.Basis.from_arrays([1, 1, 0], [[0.9]] * 3, [[1.0]] * 3, centres)
        return set(asked_by_basis(basis, "coulomb", (9, 0), MEMORIES[:1]))

    assert warm(askew) != warm(flat)
    monkeypatch.setattr(part_plans, "PLANE_L", 1)
    assert warm(askew) == warm(flat)


# first calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_a_first_call_compiles_what_it_launches(call, monkeypatch):
    """And nothing that it does not launch for a density of this size, or for a smaller one."""
    asked = {}

    def compile_ahead(self, use, basis, work, progress=None, part=None):
        asked.update(self.asked_by(work))

    mol, name = system("methane aug-cc-pvdz"), "methane aug-cc-pvdz"
    wanted = launched("dmma16", name, call, MEMORIES[0])
    with devices_without_memory("dmma16", MEMORIES[0]), monkeypatch.context() as patches:
        patches.setattr("md4.gpu.backend.GpuBackend.compile_ahead", compile_ahead)
        dm = np.random.default_rng(0).standard_normal((mol.nao, mol.nao))
        if call in ("s1", "s4", "s8"):
            md4.int2e(mol, aosym=call, backend="cuda")
        else:
            md4.get_jk(mol, dm, backend="cuda", **CALLS[call])
    assert wanted <= set(asked)
    if call in ("s1", "s4", "s8"):
        assert wanted == set(asked)
    smaller = set().union(*(launched_by_smaller(name, call, size) for size in (1e-3, 1e-6)))
    assert set(asked) <= wanted | smaller


def launched_by_smaller(name, call, size):
    """As `launched`, of a density times `size`."""
    mol = system(name)
    if call not in ("jk", "j", "k", "general"):
        return set()
    dm = size * np.random.default_rng(0).standard_normal((mol.nao, mol.nao))
    with devices_without_memory("dmma16", MEMORIES[0]) as found:
        md4.get_jk(mol, dm, backend="cuda", **CALLS[call])
    return set(found)
