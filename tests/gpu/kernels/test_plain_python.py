"""The kernels as plain Python on the emulated GPU of `emulator`: what they compute is what the CPU computes."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from emulator import host_array, running
from offline import factories

import md4
from md4.contract import rows, team
from md4.contract.ranks import Alone
from md4.contract.tensor import Request, ao_tensor, locked_tensor
from md4.contract.three_centre import ThreeCentre, tensor_request
from md4.contract.work import Task
from md4.errors import MemoryLimitError
from md4.gpu import digest, paths, quartet_lists, tuning
from md4.gpu import hermite_coulomb as hermite_coulomb_target
from md4.gpu.backend import GpuBackend
from md4.gpu.dry_run import BLOCK_SHARED
from md4.gpu.kernels import (
    coulomb_threads,
    digest_in_place,
    pack,
    recurrence,
    select_quartets,
    summed_r,
    thread_quartet,
    unpack,
    whole_panel,
)
from md4.gpu.kernels.two_products import bra_shared, bra_tile, fitting_tile
from md4.gpu.paths import plans
from md4.method.angular import nherm
from md4.method.operators import OPERATORS, Operator, kind_table, zero_function
from md4.method.recurrence import by_axis
from md4.shells.shell_pairs import shell_pairs

TENSOR_CORES = ("dmma8", "dmma16")
UNITS = ("fma", *TENSOR_CORES)
# Kernels that every class needs, and what the tests run beside them.
ALWAYS = {"pair_primitives", "h_matrices"}
TWO = {"whole_panel", "ket_transform"}
ONE_QUARTET = {"thread_quartet_integrals", "pair_slots"}
REGISTERS, BY_AXIS = {"r_in_registers"}, {"r_by_axis"}
PLAIN = {"plain_bra_transform", "plain_ket_transform"}
ONE_PRODUCT = {"one_product", "ket_sums"}
FUSED = {"fused_transforms"}

# Angular momenta, primitives and contracted functions of the shells; kernels that compute such a class, all its plans
# taken, on tensor cores. Elsewhere the plain ones do.
CLASSES = {
    "(ps|ss), K = 4": ((1, 0, 0, 0), 2, 1, ONE_QUARTET | ONE_PRODUCT | TWO | FUSED | REGISTERS),
    "(pp|ps)": ((1, 1, 1, 0), 1, 1, ONE_QUARTET | TWO | FUSED | REGISTERS),
    "(pp|ps), K = 4": ((1, 1, 1, 0), 2, 1, ONE_QUARTET | TWO | FUSED | REGISTERS),
    "(dp|dd)": ((2, 1, 2, 2), 1, 1, TWO | FUSED | BY_AXIS),
    "(ps|ps) of two functions": ((1, 0, 1, 0), 2, 2, TWO | FUSED | REGISTERS),
}
FEW = ("(ps|ss), K = 4", "(pp|ps)")
DIGESTION = {"digest_rows", "pair_bounds"}
COULOMB = {
    "hermite_densities", "density_norms", "hermite_scales", "hermite_sums", "expanded_order", "correlation_by_threads",
}  # fmt: skip


def basis_of(ls, nprim=1, nctr=1, pure=True):
    """A shell of each angular momentum, of so many primitives and contracted functions."""
    rng = np.random.default_rng(0)
    exponents, coefficients = np.geomspace(0.5, 2.0, nprim), rng.uniform(0.2, 1.0, (nprim, nctr))
    count = len(ls)
    return md4.Basis.from_arrays(ls, [exponents] * count, [coefficients] * count, rng.normal(size=(count, 3)), pure)


def assert_same(ours, right):
    """But for rounding errors, relative to the largest element."""
    np.testing.assert_allclose(ours, right, rtol=0, atol=1e-14 * abs(right).max())


@pytest.fixture
def all_classes(monkeypatch):
    """A thread a quartet is a plan for few quartets, too."""
    monkeypatch.setattr(paths, "FEWEST_QUARTETS", 1)


# The two units with tensor cores differ in their instructions only: some classes do for one of them.
CASES = [
    pytest.param(unit, name, marks=[pytest.mark.races] if name in FEW else [])
    for name in CLASSES for unit in UNITS if unit != "dmma8" or name in FEW
]  # fmt: skip


@pytest.mark.sample("dmma16-(ps|*", "*-(pp|ps)")
@pytest.mark.parametrize("unit, name", CASES)
def test_all_plans_of_a_class(unit, name, all_classes):
    """Two pairs with one."""
    ls, nprim, nctr, kernels = CLASSES[name]
    basis, bra, ket = basis_of(ls, nprim, nctr), [[0, 1]] * 2, [[2, 3]]
    right = md4.Engine(basis, backend="cpu").compute(bra, ket)
    with running(unit) as machine:
        engine = md4.Engine(basis, backend="cuda")
        for plan in list(plans(unit, engine.prepare(bra).pairs, engine.prepare(ket).pairs)):
            engine.backend.plan = lambda *_, plan=plan: plan
            assert_same(engine.compute(bra, ket).copy_to_host(), right)
    if unit == "fma":
        kernels = PLAIN | (kernels & (REGISTERS | BY_AXIS)) | (machine.kernels & ONE_QUARTET)
    assert machine.kernels == ALWAYS | kernels


@pytest.mark.sample("5-3-whole_panel")
@pytest.mark.parametrize("rows, stages, kernel", [
    pytest.param(0, 2, "bra_transform", marks=pytest.mark.races), (5, 3, "whole_panel")
])  # fmt: skip
def test_two_products_of_contracted_pairs(rows, stages, kernel, monkeypatch):
    """Step 4 by the ring of large classes, and with H and r of more than two primitive pairs at a time."""
    monkeypatch.setattr(whole_panel, "CONTRACTED_ROWS", rows)
    monkeypatch.setattr(whole_panel, "CONTRACTED_STAGES", (stages,) * 5)
    basis, bra, ket = basis_of((2, 1, 1, 0), nprim=2), [[0, 1]] * 2, [[2, 3]] * 5
    with running() as machine:
        engine = md4.Engine(basis, backend="cuda")
        for one, other in ((bra, ket), (ket, bra)):
            every = plans("dmma16", engine.prepare(one).pairs, engine.prepare(other).pairs)
            (plan, *_) = (plan for plan in every if plan.path.name == "two_products")
            engine.backend.plan = lambda *_, plan=plan: plan
            assert_same(
                engine.compute(one, other).copy_to_host(), md4.Engine(basis, backend="cpu").compute(one, other)
            )
    assert machine.kernels >= {kernel}
    assert not machine.kernels & ({"bra_transform", "whole_panel"} - {kernel})


@pytest.mark.parametrize("unit", ["dmma16", "dmma8"])
def test_fewer_columns_where_shared_memory_is_small(unit, monkeypatch):
    """r of the ket primitives that a block's columns touch is what takes most where few functions q meet a high L."""
    monkeypatch.setattr(whole_panel, "CONTRACTED_ROWS", 0)
    basis, bra, ket = basis_of((2, 1, 1, 0), nprim=2), [[0, 1]] * 2, [[2, 3]] * 5
    right = md4.Engine(basis, backend="cpu").compute(bra, ket)
    with running(unit) as machine:
        engine = md4.Engine(basis, backend="cuda")
        sides = engine.prepare(bra).facts, engine.prepare(ket).facts
        whole = bra_tile(unit, sides[0])
        least = whole._replace(nt=2, warps=2, stages=2)
        room = engine.backend.context.block_shared = bra_shared(least, *sides)[1]
        assert fitting_tile(unit, *sides, room) == least
        assert fitting_tile(unit, *sides, 1 << 20) == whole
        with pytest.raises(md4.UnsupportedError, match="bytes of shared memory"):
            fitting_tile(unit, *sides, room - 1)
        every = plans(unit, engine.prepare(bra).pairs, engine.prepare(ket).pairs)
        plan = next(plan for plan in every if plan.path.name == "two_products" and not plan.swap)
        engine.backend.plan = lambda *_: plan
        assert_same(engine.compute(bra, ket).copy_to_host(), right)
    assert "bra_transform" in machine.kernels


@pytest.mark.parametrize("with_k", [True, False])
def test_j_beside_a_function_that_is_steep(with_k):
    """J alone in fixed point would have no digits of the other functions."""
    basis = md4.Basis.from_arrays([0, 0, 1], [[1e40], [0.5], [0.8]], [[1.0]] * 3, np.eye(3))
    right, _ = md4.JK(basis, backend="cpu", direct_scf_tol=0).get_jk(np.eye(basis.nao))
    with running():
        ours, other = md4.JK(basis, backend="cuda", direct_scf_tol=0).get_jk(np.eye(basis.nao), with_k=with_k)
    assert (other is None) != with_k
    assert abs(ours - right)[1:, 1:].max() < 1e-14 * abs(right[1:, 1:]).max()


@pytest.mark.parametrize("exponent", [1e-2, 1e-8])
def test_j_alone_of_diffuse_functions(exponent, monkeypatch):
    """[0]^(l) vanishes in FP32 for the second, so J is made in FP64."""
    monkeypatch.setattr(hermite_coulomb_target, "FEWEST_SINGLES", 0)
    tolerance, centres = 1e-10, np.array([[0, 0, 0], [0.3, -0.5, 0.8]]) / exponent**0.5
    basis = md4.Basis.from_arrays([3, 3], [[exponent]] * 2, [[1.0]] * 2, centres)
    dm = np.random.default_rng(0).normal(size=(basis.nao, basis.nao))
    dm += dm.T
    right, _ = md4.JK(basis, backend="cpu", direct_scf_tol=0).get_jk(dm, with_k=False)
    size = 400 * tolerance / abs(right).max()
    with running():
        ours, _ = md4.JK(basis, backend="cuda", direct_scf_tol=tolerance).get_jk(size * dm, with_k=False)
    assert abs(ours - size * right).max() < 0.01 * tolerance


@pytest.mark.parametrize("kind", ["erf", "coulomb"])
def test_j_alone_of_an_operator_that_hardly_acts(kind):
    """[0]^(n) of erf goes with omega^(2 n + 1) and vanishes for high n, but J does not."""
    basis, omega = basis_of((4, 0)), 1e-20 if kind == "erf" else 0.0
    dm = np.eye(basis.nao)
    right, _ = md4.JK(basis, omega, "cpu", direct_scf_tol=0).get_jk(dm, with_k=False)
    with running():
        ours, _ = md4.JK(basis, omega, "cuda", direct_scf_tol=0).get_jk(dm, with_k=False)
    np.testing.assert_allclose(ours, right, rtol=0, atol=1e-14 * abs(right).max())


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("ls, single", [
    ((15, 0, 1, 0), False), ((16, 0, 1, 0), False), ((13, 0, 1, 0), False), ((8, 8, 2), True), ((9, 9, 2), True),
    ((15, 15, 2), True),
])  # fmt: skip
def test_shared_memory_of_high_classes(capability, ls, single):
    """No launch asks for more than a block may have; a class that needs more is refused."""
    basis = basis_of(ls)
    dry = GpuBackend.without_device(Operator.coulomb(), capability, 100 << 30)
    engine, asked = md4.Engine(basis, backend=dry), dry.context.asked
    bra, ket = engine.prepare([[0, 1]]), engine.prepare([2] if single else [[2, 3]])
    for one, other in ((bra, ket), (ket, bra)):
        shape = (1, 1, one.facts.na, one.facts.nb, other.facts.na, other.facts.nb)
        refused = capability == (8, 0) and sum(ls) > 30
        with pytest.raises(md4.UnsupportedError, match="this GPU makes") if refused else nullcontext():
            engine.run_steps(one, other, dry.scratch(shape))
    assert max(asked.values()) <= BLOCK_SHARED[capability]


@pytest.mark.sample("ls0-2")
@pytest.mark.races
@pytest.mark.parametrize("ls, nctr", [((1, 0), 2), ((2, 1), 1)])
def test_sums_that_are_made_with_r(ls, nctr, monkeypatch):
    """Pairs of several primitives, of one and of none; more sums than a warp makes at once."""
    monkeypatch.setattr(summed_r, "FEWEST_SUMS", 1)
    rng = np.random.default_rng(5)
    shells = [md4.Shell(l, rng.uniform(0.5, 2.0, 2), rng.uniform(0.2, 1.0, (2, 1)), rng.normal(size=3)) for l in ls]
    shells += [
        md4.Shell(0, rng.uniform(0.5, 2.0, k), rng.uniform(0.2, 1.0, (k, nctr)), centre)
        for k, centre in ((3, rng.normal(size=3)), (1, rng.normal(size=3)), (2, np.full(3, 60.0)))
    ]
    basis, bra, ket = md4.Basis(shells), [[0, 1]] * 3, [[2, 3], [2, 4], [3, 3], [2, 2], [4, 4]] * 2
    right = md4.Engine(basis, backend="cpu").compute(bra, ket)
    with running() as machine:
        engine = md4.Engine(basis, backend="cuda")
        every = plans("dmma16", engine.prepare(bra).pairs, engine.prepare(ket).pairs)
        (plan,) = (plan for plan in every if plan.path.name == "one_product")
        engine.backend.plan = lambda *_: plan
        assert_same(engine.compute(bra, ket).copy_to_host(), right)
    assert "summed_r" in machine.kernels
    assert not machine.kernels & {"ket_sums", *R_KERNELS}


# Angular momenta of the shells of a pair and of the single shells, primitives, spherical or not.
FEW_CENTRES = {
    "(pp|d)": ((1, 1), (2, 2), 1, True),
    "(ps|p), K = 4": ((1, 0), (1, 1), 2, True),
    "(ps|h)": ((1, 0), (5, 5), 1, True),
    "(ps|f), Cartesian": ((1, 0), (3, 3), 1, False),
}
FEW_CASES = [(unit, name) for name in FEW_CENTRES for unit in UNITS if unit != "dmma8" or name == "(ps|p), K = 4"]


@pytest.mark.sample("fma-(ps|p), K = 4", "dmma16-(ps|p), K = 4")
@pytest.mark.parametrize("unit, name", FEW_CASES)
def test_all_plans_of_a_class_of_few_centres(unit, name, all_classes):
    """Two pairs with two single shells, single shells with a pair, and with each other."""
    ls, of_single, nprim, pure = FEW_CENTRES[name]
    basis, pairs, singles = basis_of((*ls, *of_single), nprim, pure=pure), [[0, 1]] * 2, [2, 3]
    paths_taken = set()
    with running(unit):
        engine = md4.Engine(basis, backend="cuda")
        for bra, ket in ((pairs, singles), (singles, pairs[:1]), (singles, singles)):
            right = md4.Engine(basis, backend="cpu").compute(bra, ket)
            for plan in list(plans(unit, engine.prepare(bra).pairs, engine.prepare(ket).pairs)):
                engine.backend.plan = lambda *_, plan=plan: plan
                assert_same(engine.compute(bra, ket).copy_to_host(), right)
                paths_taken.add(plan.path.name)
    assert paths_taken >= ({"plain"} if unit == "fma" else {"thread_quartet", "fused", "two_products"})


@pytest.mark.sample("0", "2")
@pytest.mark.parametrize("number", range(4))
def test_pairs_without_primitives_in_a_matrix(number, all_classes):
    """Shells far apart: the integrals of their pair are zeros, which are written."""
    centres = np.array([[0.0, 0.0, 0.0], [0.4, 0.1, -0.3], [0.0, 30.0, 0.0]])
    basis = md4.Basis.from_arrays([1, 1, 1], [[3.0]] * 3, [[1.0]] * 3, centres)
    auxiliary = basis_of((2, 2))
    right = ThreeCentre(basis, auxiliary, backend="cpu").integrals()
    with running():
        ours = ThreeCentre(basis, auxiliary, backend="cuda")
        ours.engine.backend.plan = lambda bra, ket, block: plans("dmma16", bra, ket, block.matrix)[number]
        assert_same(ours.integrals().copy_to_host(), right)
    assert not right.any(axis=0).all()
    assert right.any()


@pytest.mark.sample("dmma16-(ps|p), K = 4-[13]")
@pytest.mark.parametrize("unit, name, number", [
    *(("dmma16", name, number) for name in list(FEW_CENTRES)[:3] for number in range(5)), ("fma", "(pp|d)", 1)
])  # fmt: skip
def test_parts_of_a_matrix(unit, name, number, all_classes):
    """Each list with each by its first plan, its second, and so on: all columns, the last ones, and (P|Q)."""
    ls, of_single, nprim, pure = FEW_CENTRES[name]
    basis, auxiliary = (basis_of(shells, nprim, pure=pure) for shells in (ls, of_single))
    right = ThreeCentre(basis, auxiliary, backend="cpu", cutoff=1e-14)

    def plan(bra, ket, block=None):
        every = plans(unit, bra, ket, block is not None and block.matrix)
        return every[min(number, len(every) - 1)]

    with running(unit) as machine:
        ours = ThreeCentre(basis, auxiliary, backend="cuda", cutoff=1e-14)
        ours.engine.backend.plan = plan
        first = int(ours.edges[1])
        assert_same(ours.integrals().copy_to_host(), right.integrals())
        assert_same(ours.integrals(first, ours.ncol).copy_to_host(), right.integrals(first, right.ncol))
        below = np.tril_indices(ours.naux)
        assert_same(ours.metric().copy_to_host()[below], right.metric()[below])
    assert "pair_bounds" in machine.kernels


@pytest.mark.sample("int2c2e")
@pytest.mark.parametrize("name", ["int3c2e", "int2c2e"])
def test_tensors_of_few_centres(name):
    """In the order of PySCF, with two shells of each class."""
    basis = basis_of((1, 0, 1, 0))
    count = 3 if name == "int3c2e" else 2
    joined, shells = md4.Basis.joined([basis]), (0, basis.nshell)
    for aosym in ("s1", "s2ij")[: count - 1]:
        request = tensor_request(joined, aosym, None, (shells,) * count)
        right = locked_tensor(md4.Engine(joined, backend="cpu"), request, None, False, False)
        with running() as machine:
            ours = locked_tensor(md4.Engine(joined, backend="cuda"), request, None, False, False)
        assert_same(ours, right)
        assert "scatter_block" in machine.kernels


@pytest.mark.sample("erf*", "yukawa")
@pytest.mark.parametrize("kind", OPERATORS[1:])
def test_operators(kind):
    basis, operator = basis_of((1, 0, 0, 0)), Operator(kind, 0.7)
    right = md4.Engine(basis, operator=operator, backend="cpu").compute([[0, 1]], [[2, 3]])
    with running():
        ours = md4.Engine(basis, operator=operator, backend="cuda").compute([[0, 1]], [[2, 3]])
        assert_same(ours.copy_to_host(), right)


def plain_r(bra, ket, l):
    """r[bra primitive, ket primitive, t] of 1/r by the plain functions."""
    zero, table = zero_function("coulomb", lambda function: function), kind_table("coulomb")
    right = np.empty((len(bra.exponent), len(ket.exponent), nherm(l)))
    for i, k in np.ndindex(right.shape[:2]):
        separation = bra.centre[i] - ket.centre[k]
        arguments = bra.exponent[i], ket.exponent[k], separation @ separation, 0.0, table
        zeros = [zero(m, *arguments) for m in range(l + 1)]
        for t, value in by_axis(zeros, separation, lambda a, b: a * b, lambda a, b, c: a * b + c):
            right[i, k, t] = value
    return right


# The kernels that make r, and numbers of `recurrence` with which each takes any L.
R_KERNELS = {
    "r_in_registers": {"REGISTERS_L": 18}, "r_by_axis": {"REGISTERS_L": -1},
    "r_by_group": {"REGISTERS_L": -1, "AXIS_L": -1},
}  # fmt: skip


@pytest.mark.races
@pytest.mark.parametrize("kernel", R_KERNELS)
@pytest.mark.parametrize("ls", [(0, 0, 0, 0), (2, 1, 1, 1)], ids=str)
def test_r(kernel, ls, monkeypatch):
    """Each of the kernels for any L."""
    for name, l in R_KERNELS[kernel].items():
        monkeypatch.setattr(recurrence, name, l)
    basis, l = basis_of(ls, nprim=2), sum(ls)
    right = plain_r(shell_pairs(basis, [[0, 1]]).primitives, shell_pairs(basis, [[2, 3]]).primitives, l)
    with running() as machine:
        engine = md4.Engine(basis, backend="cuda")
        r = engine.backend.r(engine.prepare([[0, 1]]), engine.prepare([[2, 3]]))
        ours = host_array(r, "float64").reshape(*right.shape[:2], -1)[..., : nherm(l)]
        assert machine.kernels == {"pair_primitives", kernel}
        for t in range(nherm(l)):
            np.testing.assert_allclose(ours[..., t], right[..., t], rtol=1e-10, atol=1e-14 * abs(right).max())


def densities(basis, count):
    """Symmetric matrices."""
    dm = np.random.default_rng(1).normal(size=(count, basis.nao, basis.nao))
    return dm + dm.transpose(0, 2, 1)


@pytest.mark.sample("dmma16")
@pytest.mark.races
@pytest.mark.parametrize("unit", TENSOR_CORES)
def test_j_and_k(unit):
    """Diagonal classes and others."""
    basis = basis_of((1, 0))
    dm = densities(basis, 2)
    with running(unit) as machine:
        ours = md4.get_jk(basis, dm, backend="cuda")
    assert machine.kernels >= DIGESTION
    for found, right in zip(ours, md4.get_jk(basis, dm, backend="cpu")):
        assert_same(found, right)


@pytest.mark.thorough
@pytest.mark.parametrize("ls, nprim, nctr, pure, count, unit", [
    ((1, 0), 2, 2, True, 2, "dmma16"), pytest.param((2, 0), 1, 1, False, 1, "dmma8", marks=pytest.mark.races)
])  # fmt: skip
def test_j_and_k_digested_in_place(ls, nprim, nctr, pure, count, unit, all_classes):
    """General contractions and several matrices, Cartesian shells; matrices without symmetry."""
    basis = basis_of(ls, nprim, nctr, pure)
    dm = np.random.default_rng(1).normal(size=(count, basis.nao, basis.nao))
    with running(unit) as machine:
        ours = md4.get_jk(basis, dm, hermi=0, backend="cuda")
    assert "digest_in_place" in machine.kernels
    for found, right in zip(ours, md4.get_jk(basis, dm, hermi=0, backend="cpu")):
        assert_same(found, right)


def chain(ls, far=2.0):
    """Shells in a line, so that quartets of different sizes fall below a tolerance."""
    centres = far * np.arange(len(ls))[:, None] * [0.3, 0.2, 1.0]
    rng = np.random.default_rng(5)
    return md4.Basis.from_arrays(ls, rng.uniform(0.3, 2.0, (len(ls), 1)), [[1.0]] * len(ls), centres, True)


@pytest.mark.thorough
@pytest.mark.parametrize("most", [1 << 26, 60, 0])
def test_room_for_lists_of_quartets(most, all_classes, monkeypatch):
    """Plenty, some rows at a time, and none: then blocks are made. Items of several rounds."""
    monkeypatch.setattr(digest_in_place, "MOST_BLOCKS", 2)
    for module in (digest_in_place, thread_quartet):
        monkeypatch.setattr(module, "block_threads", lambda count, single=False: 32)
    made, lists = [], quartet_lists.QuartetLists.lists

    def limited(self, entries, items):
        if entries > most:
            raise MemoryLimitError("too much")
        made.append(entries)
        return lists(self, entries, items)

    monkeypatch.setattr(quartet_lists.QuartetLists, "lists", limited)
    basis = chain((0,) * 9 + (1,), far=0.5)
    dm = densities(basis, 1)
    with running() as machine:
        jk = md4.JK(basis, backend="cuda")
        ours = jk.get_jk(dm)
    for found, right in zip(ours, md4.get_jk(basis, dm, backend="cpu")):
        assert_same(found, right)
    assert ("digest_in_place" in machine.kernels) == (most > 0)
    assert ("digest_rows" in machine.kernels) == (most == 0)
    assert max(made, default=0) <= most
    pairs = basis.nshell * (basis.nshell + 1) // 2
    assert jk.stats.wanted + jk.stats.skipped == pairs * (pairs + 1) // 2
    assert jk.stats.computed == jk.stats.wanted or most == 0


def test_no_memory_between_parts_of_a_list(all_classes, monkeypatch):
    """Rooms that are given up while a pair of lists is worked on are in use: no quartet is refused, or taken twice."""
    parts, real = [], quartet_lists.QuartetLists.selected

    def refuse(items):
        raise MemoryLimitError("too much")

    def selected(self, *args):
        pool, count = self.context.pool, 0
        for part in real(self, *args):
            pool.trim()
            pool.get, count = refuse, count + 1
            yield part
        vars(pool).pop("get", None)
        parts.append(count)

    monkeypatch.setattr(quartet_lists.QuartetLists, "selected", selected)
    monkeypatch.setattr(quartet_lists, "SELECT", replace(tuning.SELECT, entries=7))
    basis = chain((0, 0, 0, 0), far=0.5)
    dm = densities(basis, 1)
    with running():
        ours = md4.JK(basis, backend="cuda").get_jk(dm)
    assert max(parts) > 1
    for found, right in zip(ours, md4.get_jk(basis, dm, backend="cpu")):
        assert_same(found, right)


def test_parts_of_tasks_digested_in_place(all_classes, monkeypatch):
    """Of each pair of lists three parts, as several devices take them; K alone, of a matrix without symmetry."""

    def parts(seconds, rows, workers):
        return [Task(n, k, 3, 1e-3) for n, most in enumerate(rows) for k in range(3) if most]

    monkeypatch.setattr(team, "make_tasks", parts)
    basis = chain((0, 0, 0, 0), far=0.5)
    dm = np.random.default_rng(1).normal(size=(basis.nao, basis.nao))
    options = {"hermi": 0, "with_j": False}
    with running() as machine:
        jk = md4.JK(basis, backend="cuda")
        _, ours = jk.get_jk(dm, **options)
    assert "digest_in_place" in machine.kernels
    assert_same(ours, md4.get_jk(basis, dm, backend="cpu", **options)[1])
    assert jk.stats.wanted == 10 * 11 // 2
    assert jk.stats.skipped == 0


@pytest.mark.sample("0.0001-1000.0-7-True")
@pytest.mark.parametrize(
    "tolerance, ratio, entries, with_j",
    [(1e-4, 0.0, 1 << 26, True), (1e-4, 1e3, 1 << 26, False), (1e-4, 1e3, 7, True), (0.0, 1e3, 1 << 26, True)],
)
def test_quartets_that_survive(tolerance, ratio, entries, with_j, all_classes, monkeypatch):
    """All that the rule keeps, each once, in items of the right precision; the rule in NumPy."""
    found, rules, size = [], [], 3

    def select(context, candidates, starts, row, places, shells, rule, out):
        select_quartets.launch_select(context, candidates, starts, row, places, shells, rule, out._replace(size=size))
        counts, numbers = (host_array(part, kind) for part, kind in ((out.counts, "int64"), (out.entries, "int32")))
        for single, part in enumerate(out.items):
            for ij, first, many in host_array(part, "int32")[: 3 * counts[single]].reshape(-1, 3):
                assert 0 < many <= size
                found.extend((*places, ij, kl, single) for kl in numbers[first : first + many])

    def lists(context, rule):
        rules.append(rule)
        return real(context, rule)

    real = digest.QuartetLists
    monkeypatch.setattr(digest, "QuartetLists", lists)
    monkeypatch.setattr(quartet_lists, "launch_select", select)
    monkeypatch.setattr(digest, "item_entries", lambda *_: size)
    monkeypatch.setattr(digest, "launch_in_place", lambda *_: None)
    changed = replace(tuning.SELECT, single_ratio=ratio, entries=entries, single_seconds=0.0)
    for module in (digest, quartet_lists):
        monkeypatch.setattr(module, "SELECT", changed)
    basis = chain((0, 1, 0, 0, 1, 0, 0))
    dm = densities(basis, 2) * np.exp(-abs(np.subtract.outer(*[np.arange(basis.nao)] * 2)))
    with running():
        jk = md4.JK(basis, backend="cuda", direct_scf_tol=tolerance)
        jk.get_jk(dm, with_j=with_j)
        numbers = [(jk.lists[bra], jk.lists[ket]) for bra, ket in jk.team.list_pairs(True).numbers]
    (rule,), ends = rules, [*np.cumsum([0, *map(len, jk.lists)])]
    first = {id(this): int(n) for this, n in zip(jk.lists, ends)}
    norms = np.array([[abs_norm(basis, dm, a, b) for b in range(basis.nshell)] for a in range(basis.nshell)])
    np.testing.assert_allclose(rule.norms, np.maximum(norms, norms.T))
    bounds, terms, own, norms = (
        quartet_lists.rounded_up(x).astype(float) for x in (rule.bounds, rule.terms, rule.own, rule.norms)
    )
    assert own.any() == with_j
    expected = set()
    for bra, ket in numbers:
        for (i, (a, b)), (k, (c, d)) in product(*(enumerate(side.pairs.pairs.tolist()) for side in (bra, ket))):
            ij, kl = first[id(bra)] + i, first[id(ket)] + k
            largest = max(norms[a, c], norms[a, d], norms[b, c], norms[b, d], own[ij], own[kl])
            value = float(np.float32(bounds[kl] * largest)) * bounds[ij]
            assert not 1 - 3e-7 < value / (tolerance or 1e-99) < 1  # would be decided by rounding
            if value >= tolerance and (bra is not ket or k <= i):
                value = float(np.float32(terms[kl] * largest)) * terms[ij]
                expected.add((first[id(bra)], first[id(ket)], i, k, int(value < ratio * tolerance)))
    assert set(found) == expected
    assert len(found) == len(expected) == jk.stats.computed == jk.stats.wanted
    kinds = {single for *_, single in found}
    assert kinds == ({0, 1} if ratio and tolerance else {0})
    assert (len(found) < jk._quartets) == (tolerance > 0)


def abs_norm(basis, dm, a, b):
    """The largest Frobenius norm of a block of some matrices."""
    loc = basis.ao_loc
    return max(np.linalg.norm(d[loc[a] : loc[a + 1], loc[b] : loc[b + 1]]) for d in dm)


@pytest.mark.parametrize("value", [0.0, 1e-300, 1e-45, 1e-38, 0.1, 1 / 3, 1.0, 3e38, 1e200])
def test_numbers_of_the_rule_are_rounded_up(value):
    found = quartet_lists.rounded_up(np.array([value]))
    assert found.dtype == np.float32
    assert float(found[0]) >= value
    assert float(found[0]) <= (value and max(2e-38, value * (1 + 3e-7))) or value > 3.4e38


def coulomb_tuning(monkeypatch, **changes):
    """Changes numbers of J alone, and lets any number of quartets have a launch in single precision."""
    for name, value in {"FEWEST_SINGLES": 0, **changes}.items():
        module = hermite_coulomb_target if hasattr(hermite_coulomb_target, name) else coulomb_threads
        monkeypatch.setattr(module, name, value)


@pytest.mark.sample("registers")
@pytest.mark.races
@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "correlation_by_threads"),
        ({"STAGED_L": ((0, 9), (8, 10))}, "correlation_by_threads"),
        ({"THREAD_L": -1}, "correlation_by_warps"),
    ],
    ids=["registers", "staged", "warps"],
)
def test_j_alone(changes, kernel, monkeypatch):
    """A thread a primitive quartet, with r in registers and in shared memory, and a warp each."""
    coulomb_tuning(monkeypatch, **changes)
    basis = basis_of((1, 0), nprim=2)
    dm = densities(basis, 1)
    with running() as machine:
        ours, _ = md4.get_jk(basis, dm, with_k=False, backend="cuda")
    assert machine.kernels >= {"hermite_densities", "hermite_sums", kernel}
    assert_same(ours, md4.get_jk(basis, dm, with_k=False, backend="cpu")[0])


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [{}, {"STAGED_L": ((7, 9), (0, 10))}, {"THREAD_L": -1}], ids=str)
def test_j_alone_in_a_plane(changes, monkeypatch):
    """By threads, with r in shared memory, and by warps; the densities are not their own mirror images."""
    coulomb_tuning(monkeypatch, **changes)
    centres = [[0.4, 0.0, 0.0], [0.4, 0.7, 0.3], [0.4, -0.5, 0.8]]
    basis = md4.Basis.from_arrays([1, 0, 1], [[0.8, 1.9]] * 3, [[0.7, 0.4]] * 3, centres)
    dm = densities(basis, 2)
    with running() as machine:
        ours, _ = md4.get_jk(basis, dm, with_k=False, backend="cuda")
    assert any("correlation" in name for name in machine.kernels)
    assert_same(ours, md4.get_jk(basis, dm, with_k=False, backend="cpu")[0])


@pytest.mark.sample("False-0.0")
@pytest.mark.parametrize("omega", [0.0, 0.4, -0.4])
@pytest.mark.parametrize("staged", [False, True])
def test_j_alone_in_single_precision(staged, omega, monkeypatch):
    """All quartets; the operators whose [0]^(m) are made in FP32, and one whose are not."""
    coulomb_tuning(monkeypatch, SINGLE_RATIO=1e60, STAGED_L=((7, 0 if staged else 10),) * 2)
    basis = basis_of((1, 0), nprim=2)
    dm = densities(basis, 2)
    with running() as machine:
        ours, _ = md4.JK(basis, backend="cuda", direct_scf_tol=1e-30, omega=omega).get_jk(dm, with_k=False)
    assert "narrowed" in machine.kernels
    right, _ = md4.JK(basis, backend="cpu", omega=omega).get_jk(dm, with_k=False)
    assert 1e-10 < abs(ours - right).max() / abs(right).max() < 1e-6


@pytest.mark.thorough
def test_j_alone_of_many_pairs(monkeypatch):
    """Some quartets in FP64, some in FP32, some left out; several warps and ranges of bras, both sides of diagonals."""
    coulomb_tuning(monkeypatch, SINGLE_RATIO=1e3, THREAD_BLOCKS=2, THREAD_BRAS=40, THIN=1)
    basis, tolerance = chain((0, 0, 1) * 4, far=1.1), 1e-8
    dm = densities(basis, 1) * np.exp(-abs(np.subtract.outer(*[np.arange(basis.nao)] * 2)))
    launched, launch = [], hermite_coulomb_target.launch_quartets

    def noted(*args):
        launched.append(args[-1])
        launch(*args)

    monkeypatch.setattr(hermite_coulomb_target, "launch_quartets", noted)
    with running():
        jk = md4.JK(basis, backend="cuda", direct_scf_tol=tolerance)
        ours, _ = jk.get_jk(dm, with_k=False)
    exact, _ = md4.JK(basis, backend="cpu", direct_scf_tol=0.0).get_jk(dm, with_k=False)
    assert set(launched) == {False, True}
    assert jk.stats.wanted < jk.stats.wanted + jk.stats.skipped
    assert 1e-13 < abs(ours - exact).max() < 20 * tolerance


def test_parts_of_j_alone(monkeypatch):
    """Parts of pairs of lists, as several workers take them, are together the whole; also of classes that swap."""
    add = hermite_coulomb_target.DeviceCoulomb.add

    def in_parts(self, l_bra, l_ket, part, parts):
        assert (part, parts) == (0, 1)
        for n in range(5):
            add(self, l_bra, l_ket, n, 5)

    monkeypatch.setattr(hermite_coulomb_target.DeviceCoulomb, "add", in_parts)
    basis = chain((0, 1, 0, 0), far=0.5)
    dm = densities(basis, 1)
    with running():
        ours, _ = md4.get_jk(basis, dm, with_k=False, backend="cuda")
    assert_same(ours, md4.get_jk(basis, dm, with_k=False, backend="cpu")[0])


@pytest.mark.sample("s8")
@pytest.mark.races
@pytest.mark.parametrize("aosym", ["s1", "s4", "s8"])
def test_tensors(aosym):
    """On a stream that does nothing before it is waited for."""
    basis = basis_of((1, 0))
    right = ao_tensor(md4.Engine(basis, backend="cpu"), aosym)
    with running(late={0}) as machine:
        assert_same(ao_tensor(md4.Engine(basis, backend="cuda"), aosym), right)
    assert "scatter_block" in machine.kernels


@pytest.mark.sample("s8")
@pytest.mark.parametrize("aosym", ["s1", "s4", "s8"])
def test_tensors_in_slices(aosym, monkeypatch):
    """Also slices within a shell."""
    basis = basis_of((1, 0))
    right = ao_tensor(md4.Engine(basis, backend="cpu"), aosym)
    monkeypatch.setattr(rows.TensorTeam, "most", lambda team, store: right.nbytes // 2)
    with running(late={0}):
        found = rows.shared_tensor([md4.Engine(basis, backend="cuda")], Request.checked(basis, aosym, None), Alone())
    assert_same(found.array, right)


@pytest.mark.sample("1-4-1", "32-32-3")
@pytest.mark.races
@pytest.mark.parametrize(("nao", "pitch", "count"), [(1, 4, 1), (32, 32, 3), (70, 80, unpack.ROWS + 1)])
def test_rows_as_symmetric_matrices(nao, pitch, count):
    """Tiles within the matrices and at their edges, pairs that are left out, rows of several blocks; with sums, too.

    Also of rows in another order, one of them twice.

    What is behind the columns of a matrix is not written.
    """
    rng = np.random.default_rng(nao)
    i, j = np.tril_indices(nao)
    width = len(i) + 1
    places = np.full((nao, nao), width - 1)
    places[i, j] = places[j, i] = rng.permutation(len(i))
    places[-1, 0] = places[0, -1] = width - 1
    table = rng.normal(size=(count, width))
    with running() as machine:
        context = md4.Engine(basis_of((0,)), backend="cuda").backend.context
        buffer, (given, numbers) = context.pool.upload([table.ravel(), places.ravel()], context.stream)
        out = context.pool.get(count * nao * pitch)
        unpack.launch_unpack(context, given, table.shape, numbers, out, (nao, pitch))
        found = host_array(out, "float64").reshape(count, nao, pitch).copy()
        unpack.launch_unpack(context, given, (0, width), numbers, out, (nao, pitch))
        density = rng.normal(size=(nao, nao))
        density += density.T
        _, [weights] = context.pool.upload([density.ravel()], context.stream)
        again, part = context.pool.get(count * nao * pitch), context.pool.get(unpack.parts_of_sums(nao) * count)
        unpack.launch_unpack(context, given, table.shape, numbers, again, (nao, pitch), weights, part)
        again = host_array(again, "float64").reshape(found.shape).copy()
        sums = host_array(part, "float64").reshape(count, -1).sum(axis=1)
        chosen = np.append(rng.permutation(count), 0)
        _, [rows] = context.pool.upload([chosen], context.stream)
        some = context.pool.get(len(chosen) * nao * pitch)
        unpack.launch_unpack(context, given, (len(chosen), width), numbers, some, (nao, pitch), rows=rows)
        some = host_array(some, "float64").reshape(len(chosen), nao, pitch).copy()
    assert machine.kernels == {"unpack_rows"}
    assert np.array_equal(found[:, :, :nao], table[:, places])
    assert np.array_equal(again[:, :, :nao], table[:, places])
    assert np.array_equal(some[:, :, :nao], table[chosen][:, places])
    assert np.isnan(found[:, :, nao:]).all()
    assert np.isnan(again[:, :, nao:]).all()
    assert np.allclose(sums, np.einsum("nij,ij->n", table[:, places], density), rtol=1e-12, atol=1e-11)
    context.pool.release(buffer)


@pytest.mark.sample("1-1")
@pytest.mark.races
@pytest.mark.parametrize(("nao", "count"), [(1, 1), (7, pack.ROWS), (25, 2 * pack.ROWS + 1)])
def test_symmetric_matrices_as_rows(nao, count):
    """Pairs of both orders, some left out, rows of several blocks; above the diagonal nothing is read."""
    rng = np.random.default_rng(nao)
    squares, i, j = rng.normal(size=(nao, count, nao)), *np.tril_indices(nao)
    for row, of_row in enumerate(squares):
        of_row[:, row + 1 :] = np.nan
    chosen = rng.permutation(len(i))[: max(1, len(i) - 2)]
    turned, read = rng.random(len(chosen)) < 0.5, squares[i[chosen], :, j[chosen]].T
    columns = np.where(turned, j[chosen] * nao + i[chosen], i[chosen] * nao + j[chosen])
    weights, scales, row = rng.normal(size=len(chosen)), rng.normal(size=count), rng.normal(size=len(chosen))
    with running() as machine:
        context = md4.Engine(basis_of((0,)), backend="cuda").backend.context
        arrays = [squares.ravel(), columns, weights, scales, row]
        buffer, (table, columns, *given) = context.pool.upload(arrays, context.stream)
        weighed, factors, values = given
        out, found = context.pool.get(count * len(chosen)), []
        for of_j, add in (((), False), ((factors, values), False), ((), True), ((factors, values), True)):
            pack.launch_pack(context, table, squares.shape, columns, weighed, out, *of_j, add=add)
            found.append(host_array(out, "float64").reshape(count, -1).copy())
        pack.launch_pack(context, table, (nao, 0, nao), columns, weighed, out)
    assert machine.kernels == {"pack_rows"}
    of_k, of_both = weights * read, weights * read + scales[:, None] * row
    for this, right in zip(found, (of_k, of_both, of_both + of_k, 2 * of_both + of_k)):
        assert np.allclose(this, right, rtol=1e-13, atol=1e-13)
    context.pool.release(buffer)


def test_no_kernel_is_left_out():
    tested = ALWAYS | PLAIN | DIGESTION | COULOMB | set(R_KERNELS)
    tested |= {"correlation_by_warps", "scatter_block", "digest_in_place", "unpack_rows", "pack_rows"}
    tested |= {"bra_transform", "summed_r", "select_quartets"}
    tested |= {"digest_mirrored"}  # by test_digest_mirrored.py
    tested |= {"fused_wide"}  # by test_fused_wide.py
    tested |= {"half_transform", "grouped_rows"}  # by test_half_transform.py
    # by test_reverse_*.py
    tested |= {"select_kets", "density_blocks", "gamma_blocks", "reverse_lanes", "reverse_fused", "reverse_sums"}
    tested |= {"pair_forces"}
    tested |= {"table_norms", "gamma_of_table"}  # by test_fitting_forces.py
    tested |= {"derivative_norms"}  # by test_shell_pairs.py
    tested |= {"hermite_products"}
    tested |= {"half_exchange", "exchange_derivatives"}  # by test_derivative_matrices.py
    tested |= {"narrowed"}  # by `test_single_precision.test_a_build`
    assert tested.union(*(kernels for *_, kernels in CLASSES.values())) == factories()
