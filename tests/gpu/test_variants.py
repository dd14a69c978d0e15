"""What is compiled ahead: all that whole tensors and builds of J and K launch, and little else."""

from functools import cache
from itertools import product

import numpy as np
import pytest
from molecules import METHANE, WATER, molecule
from offline import UNITS, devices_without_memory, used_variants

import md4
from md4.contract.three_centre import ThreeCentre
from md4.gpu import part_plans, variants
from md4.gpu.backend import GpuBackend
from md4.gpu.kernels.unpack import unpack_variant
from md4.gpu.paths import timed_plans
from md4.gpu.predicted_times import Side
from md4.gpu.variants import possible_plans, sample_pairs, steps_between
from md4.method.digestion import digest_flags

TENSOR_CORES = sorted({*UNITS.values()} - {"fma"})
# Primitives of bra and ket, and pairs in either list, as `offline.used_variants` has them.
NPRIM = (1, 2, 6, 30, 200)
LENGTHS = [*((i, k, 1) for i in NPRIM for k in NPRIM), (1, 1, 300), (2, 2, 300)]

CHAIN = "; ".join(f"O 0 {3 * n} 0; H 0 {3 * n} 0.96; H 0.93 {3 * n} -0.24" for n in range(9))
ELEMENTS = "; ".join(f"{e} {3 * (n % 4)} {3 * (n // 4)} 0" for n, e in enumerate("OCNHSiSClPF"))
SYSTEMS = {
    "water cc-pvtz": (WATER, "cc-pvtz"), "methane aug-cc-pvdz": (METHANE, "aug-cc-pvdz"),
    "water def2-tzvp": (WATER, "def2-tzvp"), "methane 6-311++g**": (METHANE, "6-311++g**"),
    "9 waters cc-pvdz": (CHAIN, "cc-pvdz"), "9 waters 6-31g*": (CHAIN, "6-31g*"),
    "Cl2 cc-pvqz": ("Cl 0 0 0; Cl 0 0 2", "cc-pvqz"), "SiP cc-pcvdz": ("Si 0 0 0; P 0 0 2", "cc-pcvdz"),
}  # fmt: skip
ANO = {"water ano": (WATER, "ano"), "TiO cc-pvdz": ("Ti 0 0 0; O 0 0 1.6", "cc-pvdz")}
# Bytes that are free: plenty, and so few that lists are cut.
MEMORY = {"plenty": 1 << 45, "little": 3 << 26}


@cache
def system(name):
    return molecule(*{**SYSTEMS, **ANO}[name])


@cache
def of_all_classes(unit, lmax, pure=True):
    return set(variants.all_variants(unit, lmax=lmax, pure=pure))


def launched(unit, name, use, left, omega=None):
    """Variants that a call with md4's public functions launches."""
    mol = system(name)
    dm = np.random.default_rng(0).standard_normal((mol.nao, mol.nao))
    with devices_without_memory(unit, left) as found:
        if use in ("s1", "s4", "s8"):
            md4.int2e(mol, aosym=use, omega=omega, backend="cuda")
        else:
            options = {"jk": {}, "j": {"with_k": False}, "k": {"with_j": False}, "general": {"hermi": 0}}[use]
            md4.get_jk(mol, dm, omega=omega, backend="cuda", **options)
    return set(found)


CALLS = ("s1", "s4", "s8", "jk", "j", "k", "general")


# Tests with the lists of all classes of a unit, which take long to make.
WITH_ALL_CLASSES = {unit: pytest.mark.xdist_group(f"variants {unit}") for unit in TENSOR_CORES}
# Each molecule with one of the units and with one of the memories.
CASES = [
    pytest.param(name, unit := TENSOR_CORES[n % 2], list(MEMORY)[n // 2 % 2], marks=WITH_ALL_CLASSES[unit])
    for n, name in enumerate([*SYSTEMS, *ANO])
]


@pytest.mark.sample("methane aug-cc-pvdz-*")
@pytest.mark.parametrize(("name", "unit", "memory"), CASES)
def test_nothing_is_left_to_compile(name, unit, memory):
    """After `md4 warmup GEOMETRY --basis NAME`, for any use and however much memory there is.

    For basis sets of Dunning, Pople and Ahlrichs, and elements up to argon, `md4 warmup --lmax` does as well.
    """
    basis = md4.Basis.from_mol(system(name))
    warm = [set(variants.basis_variants(unit, "coulomb", basis))]
    warm += [of_all_classes(unit, basis.lmax)] if name in SYSTEMS else []
    for use, found in product(CALLS, warm):
        missing = launched(unit, name, use, MEMORY[memory]) - found
        assert not missing, f"{use}: {sorted(v.name for v in missing)}"


@pytest.mark.thorough
@WITH_ALL_CLASSES["dmma16"]
def test_other_contractions_are_not_in_the_list_of_all_classes():
    """So `md4 warmup` has to be given the molecule."""
    assert launched("dmma16", "water ano", "jk", MEMORY["plenty"]) - of_all_classes("dmma16", 4)


@pytest.mark.thorough
@pytest.mark.parametrize("omega", [0.3, -0.3])
def test_range_separation(omega):
    """J and K of erf and erfc need the Schwarz bounds of Coulomb, besides kernels of their own."""
    kind, basis = "erf" if omega > 0 else "erfc", md4.Basis.from_mol(system("water def2-tzvp"))
    warm = set(variants.basis_variants("dmma16", kind, basis))
    every = set(variants.all_variants("dmma16", kind, basis.lmax))
    for use in CALLS:
        found = launched("dmma16", "water def2-tzvp", use, MEMORY["plenty"], omega)
        assert found <= warm
        assert found <= every


@pytest.mark.parametrize("kind", ["yukawa", "slater", "gaussian", "gaussian_coulomb"])
def test_operators_without_j_and_k(kind):
    basis = md4.Basis.from_mol(system("water def2-tzvp"))
    for found in (variants.basis_variants("dmma16", kind, basis), variants.all_variants("dmma16", kind, 1)):
        names = {v.factory.__name__ for v in found}
        assert "scatter_block" in names
        assert not {n for n in names if n.startswith(("digest", "correlation", "hermite", "pair_bounds"))}
        assert {v.facts[10] for v in found if v.factory.__name__.startswith("thread")} <= {kind}
        assert {v.facts[1] for v in found if v.factory.__name__.startswith(("r_", "summed_r"))} == {kind}


FEW_CENTRES = {
    "water cc-pvtz": ("water cc-pvtz", "cc-pvtz-jkfit"), "9 waters 6-31g*": ("9 waters 6-31g*", "weigend"),
    "Cl2 cc-pvqz": ("Cl2 cc-pvqz", "cc-pvqz-jkfit"),
}  # fmt: skip


FEW_CASES = list(zip(FEW_CENTRES, [*TENSOR_CORES, "fma"], [*MEMORY, "little"]))


def launched_and_asked(unit, call, monkeypatch):
    """Variants that a call launches, and those that it has compiled ahead, of a device without memory."""
    asked = set()

    def compile_ahead(self, basis, use, progress, few=None):
        assert few is not None
        asked.update(variants.needed_variants(self.context.unit, self.operator.kind, basis, use, few=few))

    with devices_without_memory(unit) as found, monkeypatch.context() as patches:
        patches.setattr(GpuBackend, "compile_ahead", compile_ahead)
        call()
    return set(found), asked


@pytest.mark.sample("9 waters *")
@pytest.mark.parametrize(("name", "unit", "memory"), FEW_CASES)
def test_nothing_is_left_to_compile_for_density_fitting(name, unit, memory):
    """After a warm-up with the auxiliary basis, whatever is screened and however much memory there is."""
    from pyscf import df

    mol = system(FEW_CENTRES[name][0])
    auxmol = df.make_auxmol(mol, FEW_CENTRES[name][1])
    basis, auxiliary = map(md4.Basis.from_mol, (mol, auxmol))
    warm = set(variants.fitting_variants(unit, "coulomb", basis, auxiliary))
    with devices_without_memory(unit, MEMORY[memory]) as found:
        md4.int3c2e(mol, auxmol, "s2ij", backend="cuda")
        md4.int3c2e(mol, auxmol, backend="cuda")
        md4.int2c2e(auxmol, backend="cuda")
        for cutoff in (0.0, 1e-10, 1e-2):
            three = ThreeCentre(basis, auxiliary, backend="cuda", cutoff=cutoff)
            three.metric()
            for first, last in zip(three.edges[:-1:7].tolist(), [*three.edges[7::7].tolist(), three.ncol]):
                three.integrals(first, last)
    assert not set(found) - warm, sorted(v.name for v in set(found) - warm)
    assert {unpack_variant(sums) for sums in (False, True)} <= warm


@pytest.mark.sample("9 waters *")
@pytest.mark.parametrize("unit", [*TENSOR_CORES, "fma"])
@pytest.mark.parametrize("name", FEW_CENTRES)
def test_what_integrals_of_few_centres_need(name, unit, monkeypatch):
    """They have compiled ahead all that they launch, and little else: nothing of four shells."""
    from pyscf import df

    mol = system(FEW_CENTRES[name][0])
    auxmol = df.make_auxmol(mol, FEW_CENTRES[name][1])
    basis, auxiliary = map(md4.Basis.from_mol, (mol, auxmol))

    def matrix():
        three = ThreeCentre(basis, auxiliary, backend="cuda", cutoff=1e-10)
        three.compile_ahead()
        three.integrals()
        three.integrals(0, int(three.edges[len(three.edges) // 2]))
        three.metric()

    calls = {
        "int3c2e": lambda: md4.int3c2e(mol, auxmol, backend="cuda"), "matrix": matrix,
        "int2c2e": lambda: md4.int2c2e(auxmol, omega=0.3, backend="cuda"),
    }  # fmt: skip
    for what, call in calls.items():
        launched, asked = launched_and_asked(unit, call, monkeypatch)
        assert launched <= asked, f"{what}: {sorted(v.name for v in launched - asked)}"
        assert len(asked) <= 2 * len(launched) + 2
        highest = 2 * auxiliary.lmax if what == "int2c2e" else 2 * basis.lmax + max(2 * basis.lmax, auxiliary.lmax)
        assert max(v.facts[0] for v in asked if v.factory.__name__.startswith("r_")) <= highest
        assert not {v for v in asked if v.factory.__name__.startswith(("digest", "correlation", "hermite"))}
        assert (unpack_variant(True) in asked) == (what == "matrix")  # of which density fitting unpacks rows


@pytest.mark.sample("9 waters *")
@pytest.mark.parametrize("name", ["water cc-pvtz", "9 waters 6-31g*"])
def test_a_molecule_needs_little_else(name):
    """Not more than twice what is launched with plenty of memory."""
    warm = set(variants.basis_variants("dmma16", "coulomb", md4.Basis.from_mol(system(name))))
    used = set().union(*(launched("dmma16", name, use, MEMORY["plenty"]) for use in CALLS))
    assert len(warm) <= 2 * len(used)


@pytest.mark.sample("pure-fma")
@pytest.mark.parametrize("unit", [*TENSOR_CORES, "fma"])
@pytest.mark.parametrize("pure", [True, False], ids=["pure", "cartesian"])
def test_the_list_of_all_classes_is_what_the_launchers_ask_for(unit, pure):
    """Besides plans for lists whose pairs differ in their numbers of primitives, which are not among those here.

    Of spherical functions there are 17 on tensor cores, and were 11 before lists with limits had plans of their own.
    """
    general = [shell for shell in variants.GENERAL_CONTRACTIONS if shell[0] <= 1]
    asked = set(used_variants(unit, lmax=1, lengths=LENGTHS, kinds_of_shells=(pure,), general=general))
    found = of_all_classes(unit, 1, pure)
    assert asked <= found
    assert len(found - asked) <= 17


@pytest.mark.sample("9 waters *")
@pytest.mark.parametrize("use", ["tensor", "j", *(digest_flags(*n) for n in ((1, 1), (1, 0), (2, 1)))], ids=str)
@pytest.mark.parametrize("name", ["water cc-pvtz", "9 waters cc-pvdz", "methane 6-311++g**"])
def test_what_a_first_call_needs(name, use):
    """It is part of what can be asked of a basis at all, and holds what the call launches."""
    basis = md4.Basis.from_mol(system(name))
    part = basis.segmented() if use == "tensor" else basis.regrouped()[0]
    needed = set(variants.needed_variants("dmma16", "coulomb", part, use))
    assert needed < set(variants.basis_variants("dmma16", "coulomb", basis))
    digest = {v for v in needed if v.factory.__name__ == "digest_rows"}
    assert {v.facts[-2:] for v in digest} == (set() if use in ("tensor", "j") else set(use))
    calls = {"tensor": ("s1", "s4", "s8"), "j": ("j",), digest_flags(1, 1): ("jk",), digest_flags(1, 0): ("k",)}
    for call in calls.get(use, ("general",)):
        assert launched("dmma16", name, call, MEMORY["plenty"]) <= needed


def test_a_planar_molecule_that_lies_askew(monkeypatch):
    """J and K turn it where that gains, and launch the kernels of molecules in a plane."""
    flat = np.array([[0.3, 0.1, 0.0], [1.2, 0.9, 0.0], [-0.4, 1.1, 0.0]])
    askew = flat @ [[0.36, -0.8, 0.48], [0.48, 0.6, 0.64], [-0.8, 0.0, 0.6]]

    def warm(centres):
        basis = md4.Basis.from_arrays([1, 1, 0], [[0.9]] * 3, [[1.0]] * 3, centres)
        return set(variants.basis_variants("dmma16", "coulomb", basis))

    assert warm(askew) != warm(flat)
    monkeypatch.setattr(part_plans, "PLANE_L", 1)
    assert warm(askew) == warm(flat)


@pytest.mark.thorough
def test_a_general_contraction_of_a_basis():
    """Classes that the list up to an l does not know, and nothing above the basis's l."""
    coefficients = [np.random.default_rng(0).uniform(0.2, 1.0, (4, 4)), [1.0, 0.4], [1.0, 0.1]]
    exponents = [[9.0, 3.0, 1.0, 0.5], [3.0, 0.5], [3.0, 0.5]]
    basis = md4.Basis.from_arrays([0, 1, 2], exponents, coefficients, np.eye(3))
    found = set(variants.basis_variants("dmma16", "coulomb", basis))
    assert {v.name for v in found - of_all_classes("dmma16", 2)} >= {"digest_rows-4-4-4-True-True"}
    r_variants = {v for v in found if v.factory.__module__ == "md4.gpu.kernels.recurrence"}
    assert r_variants <= of_all_classes("dmma16", 2)


# plans ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shells", [((1, 1), (0, 1)), ((2, 1), (2, 1)), ((3, 1), (2, 1)), ((0, 2), (0, 1))], ids=str)
@pytest.mark.parametrize("other", [((0, 1), (0, 1)), ((4, 1), (0, 1)), ((3, 1), (3, 1))], ids=str)
def test_the_fastest_plan_of_any_means_is_possible(shells, other):
    rng = np.random.default_rng(0)
    for most in ((4, 5), (30, 1), (60, 40)):
        lists = [sample_pairs(*side, n, True) for side, n in zip((shells, other), most)]
        for long in (True, False):
            found = possible_plans("dmma16", *lists, long, (1, 0))
            for _ in range(30):
                means = [round(rng.uniform(min(1, n), n), 1) for n in most]
                sides = [Side.of(pairs)._replace(mean_prim=mean) for pairs, mean in zip(lists, means)]
                assert timed_plans("dmma16", *sides, long)[0][1] in found


def test_a_plan_that_is_always_slower_is_not_possible():
    """Of two uncontracted lists there is one mean, and one plan."""
    lists = [sample_pairs(*side, 1, True) for side in (((3, 1), (2, 1)), ((2, 1), (1, 1)))]
    assert len(timed_plans("dmma16", *map(Side.of, lists), False)) > 1
    assert len(possible_plans("dmma16", *lists, False, (1, 1))) == 1


@pytest.mark.parametrize(
    ("bra", "ket", "pairs"),
    [
        ((1,), (1,), {(1, 1)}),
        ((2, 8), (2, 8), {(2, 8), (8, 2), (8, 8)}),  # 16 and 64 primitive quartets
        ((1, 2, 30), (1, 4), {(1, 1), (1, 4), (30, 1), (2, 4), (30, 4)}),
    ],
)
def test_numbers_of_primitives(bra, ket, pairs):
    """The largest with and without contraction, and of few and of many primitive quartets."""
    sides = (variants.ListKind(((0, 1), (0, 1)), True, 1, most) for most in (bra, ket))
    assert set(variants.prim_pairs(*sides)) == pairs


def test_steps():
    assert steps_between(1, 1) == [1]
    assert steps_between(0, 30) == [0, 4, 16, 30]
    assert steps_between(3, 9) == [3, 9]
