"""Every plan of the GPU backend against the CPU backend, on lists that mix numbers of primitives."""

from itertools import product

import numpy as np
import pytest
from molecules import class_name, host, relative_error

import md4
from md4.contract.three_centre import ThreeCentre
from md4.gpu import paths
from md4.gpu.device_code import cuda
from md4.gpu.h_layout import KET_FLAT, KET_TURNED
from md4.gpu.kernels import thread_quartet
from md4.gpu.kernels.digest_in_place import blocks_in_place
from md4.gpu.paths import plans
from md4.gpu.predicted_times import Side
from md4.gpu.staircases import reach
from md4.gpu.tiles import STAGES, turned_split
from md4.shells.basis import Basis
from md4.shells.shell import Shell
from md4.shells.shell_pairs import check_side, shell_pairs

SHELLS = 6


def crowd(l, nprims, nctr=1, pure=True, seed=0):
    """`SHELLS` shells of degree l on a centre each, whose numbers of primitives run through `nprims`."""
    rng = np.random.default_rng([seed, l, nctr])
    shells = []
    for n in range(SHELLS):
        k = nprims[n % len(nprims)]
        columns = rng.uniform(0.2, 1.0, (k, nctr))
        shells.append(Shell(l, rng.uniform(0.3, 3.0, k), columns, rng.uniform(-1.0, 1.0, 3)))
    return shells


def sides(ls, nprims=(1,), nctr=1, pure=True):
    """A basis of four crowds, and all pairs of the first two and of the last two."""
    shells = [s for n, l in enumerate(ls) for s in crowd(l, nprims if n % 2 == 0 else (1,), nctr, pure, n)]
    bra, ket = (
        np.array(list(product(range(SHELLS * n, SHELLS * n + SHELLS), range(SHELLS * (n + 1), SHELLS * (n + 2)))))
        for n in (0, 2)
    )
    return Basis(shells, pure), bra, ket


def check(basis, bra, ket, path=None, operator="coulomb"):
    """Every plan (of `path`) gives the CPU's integrals; returns how many there were."""
    right = md4.Engine(basis, operator=operator, backend="cpu").compute(bra, ket)
    engine = md4.Engine(basis, operator=operator, backend="cuda")
    a, b = (engine.prepare(pairs).pairs for pairs in (bra, ket))
    chosen = [plan for plan in plans(engine.backend.context.unit, a, b) if path in (None, plan.path.name)]
    for plan in chosen:
        engine.backend.plan = lambda *_, plan=plan: plan
        assert relative_error(host(engine.compute(bra, ket)), right) < 1e-12, plan
    return len(chosen)


@pytest.fixture
def small_batches(monkeypatch):
    """A thread a quartet for lists of any length."""
    monkeypatch.setattr(paths, "FEWEST_QUARTETS", 1)


gpu = pytest.mark.gpu
NAMES = (
    "pppp", "dpps", "psdp", "dpds", "psfp", "dppp", "fsfs", "ddss", "dddd", "fdpp",
    "ddff", "hshs", "fpfd", "hdds", "ggps", "iffs",
)  # fmt: skip
CLASSES = [tuple("spdfghi".index(x) for x in name) for name in NAMES]


@gpu
@pytest.mark.parametrize("nprims", [(1,), (3,), (1, 4, 2)], ids=["K 1", "K 9", "mixed"])
@pytest.mark.parametrize("ls", CLASSES, ids=class_name)
def test_every_plan(gpu, small_batches, ls, nprims):
    assert check(*sides(ls, nprims)) > 1


@gpu
@pytest.mark.parametrize("pure", [True, False], ids=["pure", "cartesian"])
@pytest.mark.parametrize("ls", [(0, 0, 0, 0), (1, 0, 0, 0), (3, 2, 0, 0), (0, 0, 4, 4), (6, 6, 0, 0)], ids=class_name)
@pytest.mark.parametrize(("nprims", "nctr"), [((1,), 1), ((1, 4, 2), 1), ((2,), 3)], ids=["K 1", "mixed", "general"])
def test_kets_of_two_s_shells(gpu, ls, nprims, nctr, pure):
    assert check(*sides(ls, nprims, nctr, pure), path="one_product") == 1


@gpu
def test_bra_primitives_in_groups(gpu, monkeypatch):
    """Where shared memory holds H of two primitives of the bra at a time."""
    from md4.gpu.kernels import fused

    basis, bra, ket = sides((2, 2, 2, 2), (5, 1, 4))
    pairs = [shell_pairs(basis, side) for side in (bra, ket)]
    panel, rest = fused.fused_shared(*pairs)
    monkeypatch.setattr(fused, "SHARED_BYTES", 2 * panel + rest)
    assert check(basis, bra, ket, "fused") == 2


@gpu
@pytest.mark.parametrize("chunk", [1, 300_000])
@pytest.mark.parametrize("ls", [(3, 2, 0, 0), (2, 2, 2, 2), (3, 3, 3, 3)], ids=class_name)
def test_chunks(gpu, monkeypatch, ls, chunk):
    monkeypatch.setattr("md4.gpu.backend.CHUNK_BYTES", chunk)
    basis, bra, ket = sides(ls, (1, 3))
    check(basis, bra[:9], ket[3:12])


@gpu
@pytest.mark.parametrize("nprims", [(1,), (1, 3)], ids=["K 1", "mixed"])
def test_rows_in_several_blocks(gpu, nprims):
    """More functions ab than a block of the first product keeps in registers."""
    basis, bra, ket = sides((4, 4, 2, 2), nprims, pure=False)
    assert turned_split(shell_pairs(basis, bra).nab)[0] == 3
    assert check(basis, bra[:7], ket[:5], path="two_products") == 2


@gpu
@pytest.mark.parametrize(("ls", "nctr"), [((1, 1, 1, 1), 5), ((2, 1, 1, 0), 4)], ids=["pppp", "dpps"])
def test_rows_of_general_contractions(gpu, ls, nctr):
    """The last block of rows has less to do than the ring of copies is ahead, or as much."""
    basis, bra, ket = sides(ls, (4, 1), nctr)
    pairs = shell_pairs(basis, bra)
    row_blocks, rows8 = turned_split(pairs.nab)
    assert row_blocks > 1
    assert np.sum(reach(pairs.facts.h_class) > rows8 * (row_blocks - 1)) <= STAGES - 1
    assert check(basis, bra[:9], ket[:8], path="two_products") == 2


@gpu
@pytest.mark.parametrize("ls", [(3, 2, 0, 0), (2, 1, 1, 1), (2, 2, 2, 2), (4, 3, 3, 2)], ids=class_name)
def test_pairs_without_primitives(gpu, small_batches, ls):
    """Pairs that are far apart have no primitive pair left: their integrals are zero."""
    basis, bra, ket = sides(ls, (1, 3))
    shells = enumerate(basis.shells)
    far = Basis([Shell(s.l, 40 * s.exponents, s.coefficients, s.centre + n % 3 * 30.0) for n, s in shells], True)
    assert np.diff(shell_pairs(far, ket).start).min() == 0
    assert check(far, bra, ket) > 1


# Shells of pairs, and single shells.
FEW_CENTRES = (
    "ss s", "ps p", "ss h", "pp d", "ds p", "dp f", "dd f", "dd i", "fp g", "ff g", "gs h", "gd h", "gg i", "ii k",
)  # fmt: skip


def few_sides(name, nprims=(1,), pure=True):
    """A basis of three crowds, all pairs of the first two, and the single shells of the third."""
    (la, lb), l = (["spdfghik".index(letter) for letter in part] for part in name.split())
    shells = [*crowd(la, nprims, 1, pure, 0), *crowd(lb, (1,), 1, pure, 1), *crowd(*l, nprims, 1, pure, 2)]
    pairs = np.array(list(product(range(SHELLS), range(SHELLS, 2 * SHELLS))))
    return Basis(shells, pure), pairs, np.arange(2 * SHELLS, 3 * SHELLS)


@gpu
@pytest.mark.parametrize("nprims", [(1,), (3,), (1, 4, 2)], ids=["K 1", "K 9", "mixed"])
@pytest.mark.parametrize("name", FEW_CENTRES)
def test_every_plan_of_few_centres(gpu, small_batches, name, nprims):
    """Of pairs with single shells, single shells with pairs, and single shells with each other."""
    basis, pairs, singles = few_sides(name, nprims)
    assert check(basis, pairs, singles) > 1
    assert check(basis, singles, pairs[:5]) > 1
    assert check(basis, singles, singles[:5]) > 1


@gpu
@pytest.mark.parametrize("name", ["ps p", "pp d", "dp f", "ds g"])
def test_cartesian_functions_of_few_centres(gpu, small_batches, name):
    basis, pairs, singles = few_sides(name, (1, 3), pure=False)
    assert check(basis, pairs, singles) > 1
    assert check(basis, singles, singles) > 1


@gpu
@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("nprims", [(1,), (1, 4, 2)], ids=["K 1", "mixed"])
@pytest.mark.parametrize("name", FEW_CENTRES)
def test_every_plan_of_a_matrix(gpu, small_batches, name, nprims, number):
    """The first plan of each class, the second, and so on; every element is written."""
    whole, *_ = few_sides(name, nprims)
    basis, auxiliary = (Basis(whole.shells[first:last], True) for first, last in ((0, 2 * SHELLS), (2 * SHELLS, None)))
    right, ours = (ThreeCentre(basis, auxiliary, backend=backend) for backend in ("cpu", "cuda"))

    def plan(bra, ket, block=None):
        every = plans(ours.engine.backend.context.unit, bra, ket, block is not None and block.matrix)
        return every[min(number, len(every) - 1)]

    ours.engine.backend.plan = plan
    first = int(ours.edges[len(ours.edges) // 3])
    for columns in ((0, ours.ncol), (first, ours.ncol)):
        out = cuda.to_device(np.full((ours.naux, columns[1] - columns[0]), np.nan))
        ours.integrals(*columns, out)
        ours.engine.stream.synchronize()
        assert relative_error(host(out), right.integrals(*columns)) < 1e-12
    below = np.tril_indices(ours.naux)
    metric = ours.metric()
    ours.engine.stream.synchronize()
    assert relative_error(host(metric)[below], right.metric()[below]) < 1e-12


# without a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("matrix", [False, True])
def test_single_shells_are_transformed_first_where_that_is_less_work(matrix):
    """Of (ii|k), whose single shell has 15 rows where a pair has 169."""
    basis, pairs, singles = few_sides("ii k")
    bra, ket = shell_pairs(basis, pairs), shell_pairs(*check_side(basis, singles))
    assert (ket.nherm, ket.first) == (36, 84)
    for first, second, swap in ((bra, ket, True), (ket, bra, False)):
        of_two = [p.swap for p in plans("dmma16", first, second, matrix) if p.path.name == "two_products"]
        assert of_two == [swap, not swap]


@pytest.mark.parametrize("name, block, matrix", [
    ("pp d", "thread_quartet", "thread_quartet, ket first"), ("dp d", "thread_quartet", "thread_quartet"),
    ("dd f", "fused", "fused"),
    *((name, *["two_products, ket first"] * 2) for name in ("gg g", "hh h", "ii k")),
])  # fmt: skip
def test_the_fastest_plans_of_few_centres(name, block, matrix):
    """As measured on an H200 (`bench/results/three_centre_plans.csv`)."""
    basis, pairs, singles = few_sides(name)
    sides = Side.of(shell_pairs(basis, pairs)), Side.of(shell_pairs(*check_side(basis, singles)))
    taken = [paths.timed_plans("dmma16", *sides, True, to_matrix)[0][1] for to_matrix in (False, True)]
    assert list(map(str, taken)) == [block, matrix]


@pytest.mark.parametrize("name, block, matrix", [
    ("ps p", 5, (5, True)), ("pp p", 4, (4, True)), ("ds d", 4, (4, True)), ("pp d", 4, (3, True)),
    ("pp f", 1, (1, True)), ("dp d", 1, (1, False)), ("pp s", 1, (5, True)),
])  # fmt: skip
def test_blocks_of_a_thread_a_quartet_with_single_shells(name, block, matrix):
    """How many share a multiprocessor, and whether the single shells are the bra in a matrix."""
    basis, pairs, singles = few_sides(name)
    bra, ket = shell_pairs(basis, pairs).facts, shell_pairs(*check_side(basis, singles)).facts

    def blocks(*sides, matrix):
        variant = thread_quartet.thread_quartet_variant(*sides, "coulomb", False, matrix)
        return variant.kernel().launch_bounds[1]

    assert blocks(bra, ket, matrix=False) == block
    swap = thread_quartet.swapped(bra, ket, True)
    assert (blocks(*((ket, bra) if swap else (bra, ket)), matrix=True), swap) == matrix
    assert thread_quartet.swapped(ket, bra, True) == (not swap)


@pytest.mark.parametrize("swap", [False, True])
def test_rows_that_are_contiguous_in_the_result(swap):
    """The second product writes along them: in a block functions cd, in a matrix (ij, ab)."""
    basis, pairs, singles = few_sides("ff g")
    bra, ket = shell_pairs(basis, pairs), shell_pairs(*check_side(basis, singles))
    for matrix in (False, True):
        (plan,) = (p for p in plans("dmma16", bra, ket, matrix) if (p.path.name, p.swap) == ("two_products", swap))
        assert plan.ket_form == (KET_TURNED if swap != matrix else KET_FLAT)


def test_the_side_of_two_s_shells():
    """It is the ket of the one product; of two such sides, the one with more primitives."""
    basis, bra, ket = sides((2, 1, 0, 0), (2,))
    ab, cd = shell_pairs(basis, bra), shell_pairs(basis, ket)
    one = shell_pairs(basis, ket[:, ::-1][:1])

    def orders(first, second):
        return [plan.swap for plan in plans("dmma16", first, second) if plan.path.name == "one_product"]

    assert orders(ab, cd) == [False]
    assert orders(cd, ab) == [True]
    assert orders(ab, ab) == []
    assert orders(cd, cd) == [False]
    assert orders(one, cd) == [False]


def test_the_wide_kernel_is_for_uncontracted_classes():
    """On units with its instructions, where the fused kernel does not take ket pairs in groups."""

    def first(ls, unit="dmma16", nprims=(1,)):
        basis, bra, ket = sides(ls, nprims)
        found = plans(unit, *(shell_pairs(basis, pairs) for pairs in (bra, ket)))
        return found[0].path.name, any(plan.path.name == "fused_wide" for plan in found)

    assert first((2, 2, 3, 2)) == ("fused_wide", True)
    assert first((4, 2, 3, 2)) == ("fused_wide", True)
    assert first((2, 1, 2, 1)) == ("fused", False)
    assert first((4, 4, 4, 4)) == ("two_products", False)
    assert not first((2, 2, 3, 2), nprims=(1, 2))[1]
    assert not first((2, 2, 3, 2), "dmma8")[1]
    assert first((2, 2, 3, 2), "fma") == ("plain", False)


def mixed_pairs(one, other, nprim=1, count=300):
    """A list of pairs of two shells (l, nctr), the same again and again; the first has `nprim` primitives."""
    columns = [np.ones((n, nctr)) for n, (_, nctr) in zip((nprim, 1), (one, other))]
    basis = Basis.from_arrays([one[0], other[0]], [np.ones(nprim), [1.0]], columns, np.zeros((2, 3)))
    return shell_pairs(basis, [[0, 1]] * count, cutoff=0)


@pytest.mark.parametrize("bra, ket", [
    (((2, 1), (1, 1)), ((1, 1), (0, 2))),  # 90 integrals: rows of blocks would have the smaller side as the bra
    (((3, 1), (0, 2)), ((1, 1), (0, 2))),
    (((1, 1), (0, 1)), ((2, 1), (0, 1))),  # one function b and d
    (((2, 1), (1, 1)), ((1, 1), (1, 1))),  # L = 5: H of the side of higher l in shared memory
])  # fmt: skip
def test_order_of_digestion_in_place(bra, ket):
    """The fastest as measured on an H200 (`bench/results/jk_assembler.log`), whichever list comes first."""
    bra, ket = mixed_pairs(*bra), mixed_pairs(*ket)
    assert not paths.digest_order("dmma16", bra, ket)
    assert paths.digest_order("dmma16", ket, bra)
    assert paths.digest_order("dmma16", bra[:1], ket[:1], long=True) is False


def test_plans_of_contracted_bras_in_builds():
    """Two kernels leave out fewer of the quartets that do not count: there they are taken later than for full lists."""
    bra, ket = mixed_pairs((1, 1), (0, 2), nprim=8), mixed_pairs((2, 1), (2, 1))
    full, limited = (plans("dmma16", bra, ket, limited=flag)[0] for flag in (False, True))
    assert (full.path.name, limited.path.name) == ("two_products", "fused")
    times = [dict(map(reversed, paths.timed_plans("dmma16", Side.of(bra), Side.of(ket), True, limited=flag)))
             for flag in (False, True)]  # fmt: skip
    assert times[0][full] < times[1][full]


@pytest.mark.parametrize("shells, blocks, in_single", [
    ((1, 0, 1, 0), 5, 5), ((2, 0, 1, 0), 4, 4), ((2, 0, 1, 1), 3, 4), ((3, 0, 2, 0), 1, 3), ((4, 0, 2, 0), 1, 2),
    ((4, 0, 1, 0), 3, 3), ((2, 1, 1, 1), 1, 3),
])  # fmt: skip
def test_blocks_of_digestion_in_place(shells, blocks, in_single):
    """With more of them, kernels spill registers; from L = 5 on, those of more than 27 integrals spill too many."""
    count = int(np.prod([2 * l + 1 for l in shells]))
    assert blocks_in_place(sum(shells), count, False) == blocks
    assert blocks_in_place(sum(shells), count, True) == in_single
