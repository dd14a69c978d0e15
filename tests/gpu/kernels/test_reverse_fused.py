"""Steps 1 and 2 of gradients in one kernel, for ket pairs that are selected one by one, on the emulated GPU."""

from dataclasses import replace

import numpy as np
import pytest
from emulator import host_array, running
from gpu.kernels.test_limits import sent
from gpu.kernels.test_plain_python import basis_of
from nuclear_forces import symmetric

import md4
from md4.gpu import forces, reverse_ways
from md4.gpu.buffers import Buffer
from md4.gpu.kernels import reverse_fused, select_kets
from md4.gpu.kernels.select_kets import (
    THREADS,
    WARPS,
    count_sizes,
    excess_of,
    largest_norms,
    launch_select,
    packed_prims,
    packed_shells,
    tails_of,
)
from md4.gpu.tuning import REVERSE


@pytest.fixture
def tuned(monkeypatch):
    """Changes `REVERSE` for this kernel, which is taken for the smallest classes, too; a block takes all kets."""
    monkeypatch.setattr(reverse_ways, "lane_plan", lambda *_: None)
    monkeypatch.setattr(reverse_ways, "REVERSE", replace(REVERSE, most_parts=1))

    def change(**options):
        monkeypatch.setattr(reverse_fused, "REVERSE", replace(REVERSE, **options))

    reverse_fused.fused_reverse.cache_clear()
    yield change
    reverse_fused.fused_reverse.cache_clear()


@pytest.mark.sample("1-28-steps0")
@pytest.mark.races
@pytest.mark.parametrize("steps", REVERSE.steps)
@pytest.mark.parametrize("words", [0, REVERSE.most_words])
@pytest.mark.parametrize("nprim", [1, 2])
def test_steps(nprim, words, steps, tuned):
    """Several primitive quartets in a step, of one or of several ket pairs, with words in memory or in registers."""
    tuned(steps=(steps,), most_words=words, registers=(9999, 9999), least_warps=1)
    check(basis_of((0, 0, 1) if nprim == 1 else (0, 1), nprim))


@pytest.mark.thorough
@pytest.mark.races
@pytest.mark.parametrize("steps", [REVERSE.steps[0], REVERSE.steps[-1]])
def test_several_warps(steps, tuned):
    """They share the p of f functions, and H, r and Gamma in shared memory."""
    tuned(steps=(steps, REVERSE.steps[-1]), registers=(9999, 9999), least_warps=1)
    check(basis_of((0, 0, 3)))


@pytest.fixture
def singles(tuned, monkeypatch):
    """Changes which quartets are computed in TF32; as it is, all whose kernel can."""

    def change(ratio=1e28):
        ours = replace(REVERSE, single_ratio=ratio, single_share=0.0, single_seconds=0.0)
        monkeypatch.setattr(forces, "REVERSE", ours)

    change()
    return change


def in_tf32(basis, dm, tolerance=1e-25):
    """(forces with quartets in TF32, the CPU's)."""
    jk = md4.JK(basis, backend="cpu")
    right = jk.gradient(dm, tolerance=0)
    with running():
        found = md4.JK(basis, backend="cuda").gradient(dm, tolerance=tolerance)
    return found, right


@pytest.mark.sample("ls0")
@pytest.mark.races
@pytest.mark.parametrize("ls", [
    (1, 1), *(pytest.param(ls, marks=pytest.mark.thorough) for ls in ((1, 1, 2), (0, 0, 3))),
])  # fmt: skip
def test_singles(ls, singles):
    """All quartets in TF32, whose numbers have errors up to 2^-11."""
    basis = basis_of(ls)
    found, right = in_tf32(basis, symmetric(basis.nao))
    error = abs(found - right).max() / abs(right).max()
    assert 2**-18 < error < 2**-8


def test_singles_of_two_densities(singles):
    """Gamma of the second one is added to that of the first in memory."""
    basis = basis_of((1, 1))
    dms = np.stack([symmetric(basis.nao), 0.3 * symmetric(basis.nao)[::-1, ::-1]])
    found, right = in_tf32(basis, dms)
    assert 2**-18 < abs(found - right).max() / abs(right).max() < 2**-8


def test_singles_of_many_densities(singles):
    """Their sum is rounded to TF32 once."""
    basis = basis_of((1, 1))
    dm, errors, call = symmetric(basis.nao), [], {"tolerance": 1e-25}
    right = md4.JK(basis, backend="cpu").gradient(dm, tolerance=0)
    for count in (1, 32):
        parts = np.repeat(dm[None], count, axis=0)
        with running():
            jk = md4.JK(basis, backend="cuda")
            found = jk.product_gradient(parts, coulomb=[1 / count] * count, exchange=[0.5 / count] * count, **call)
        errors.append(abs(found - right).max() / abs(right).max())
    assert 2**-18 < errors[0]
    assert errors[1] < 1.01 * errors[0]


def test_few_are_single(singles):
    """With the bounds as they are: those above the limit are not, those below have errors below their share of it."""
    basis, tolerance, ratio = basis_of((1, 1), 2), 1e-2, 2e3
    dm, found = symmetric(basis.nao), []
    for single_ratio in (0.0, ratio):
        singles(single_ratio)
        with running():
            jk = md4.JK(basis, backend="cuda")
            found.append(jk.gradient(dm, tolerance=tolerance))
    assert 0 < abs(found[1] - found[0]).max() < jk.stats.computed * tolerance * ratio * 2**-9


def test_primitives_that_cancel_are_not_single(singles):
    """A shell whose primitives nearly cancel has a bound far below those of its primitives."""
    centres = np.array([[0.0, 0.0, 0.0], [0.3, 0.9, -0.4], [1.0, 0.2, 0.6]])
    exponents, cancelling = [[1.0, 1.001], [0.8], [0.6]], [[[1.0], [-1.0]], [[1.0]], [[0.7]]]
    basis = md4.Basis.from_arrays([1, 1, 1], exponents, cancelling, centres)
    dm, found = symmetric(basis.nao), []
    for ratio in (0.0, 1e4):
        singles(ratio)
        with running():
            jk = md4.JK(basis, backend="cuda")
            found.append(jk.gradient(dm, tolerance=1e-2))
    # of bounds below 100; some primitive quartets have larger ones, by which the error would be 4e5
    assert 0 < abs(found[1] - found[0]).max() < jk.stats.computed * 100 * 2**-9


def test_excess_of_bounds():
    """Powers of two by which bounds of primitive pairs may exceed that of their pair; none of a pair without any."""
    start, bounds = np.array([0, 1, 3, 3, 5, 6]), np.array([2.0, 1.0, 3.0, 1e-30, 0.0])
    of_prims = np.array([2.0, 1.5, 1.0, 1.0, 1.0, 1.0])
    np.testing.assert_array_equal(excess_of(start, bounds, of_prims), [0, 2, 0, 30, 30])
    packed = packed_prims(start, (excess_of(start, bounds, of_prims), np.arange(5)))
    np.testing.assert_array_equal(packed >> 32, start[:-1])
    np.testing.assert_array_equal(packed & 0xFFFF, np.diff(start))
    np.testing.assert_array_equal(packed >> 16 & 31, [0, 2, 0, 30, 30])
    np.testing.assert_array_equal(packed >> 24 & 31, np.arange(5))


def test_range_of_singles():
    """No quartet is single where Gamma, or what may be left out, could be beyond the range of FP32."""

    def limit(d, j=1.0, k=1.0, tolerance=1e-12, bound=1e3, count=1):
        return forces.single_limit(np.full((count, 2, 2), d), np.full(count, j), np.full(count, k), tolerance, bound)

    assert limit(1.0) == limit(1e-30) == limit(1.0, -1e3, 0.0) == limit(1.0, count=1024) == REVERSE.single_ratio * 1e-12
    # densities, factors and bounds that are large, or no numbers, tolerances that are small, and many terms
    for given in ((1e7,), (np.nan,), (1.0, 1e13), (1.0, 0.0, -1e13), (1e-25, 1e50), (1e40, 1e-80)):
        assert limit(*given) == 0
    assert limit(1.0, bound=1e18) == limit(1.0, bound=np.nan) == limit(1.0, count=1025) == 0
    assert limit(1.0, tolerance=1e-31) == limit(1.0, tolerance=0.0) == 0


@pytest.mark.parametrize("scale", [1e-6, 1e10, 1e20])
def test_functions_that_are_not_normalised(scale, singles):
    """Quartets of large coefficients are not single; densities of small ones are large, and make no error either."""
    shells = [md4.Shell(1, [1.0], [[scale if n else 1.0]], [0.0, 0.3 * n, n]) for n in range(2)]
    basis = md4.Basis(shells)
    scales = np.repeat([1.0, 1 / scale], 3)
    dm = symmetric(basis.nao) * scales[:, None] * scales
    found, right = in_tf32(basis, dm, 1e-14)
    error = abs(found - right).max() / abs(right).max()
    assert error < 1e-12 if scale != 1e-6 else error < 2**-8


def check(basis):
    """A gradient of which nothing is left out, beside the CPU's."""
    dm = symmetric(basis.nao)
    right = md4.JK(basis, backend="cpu").gradient(dm, tolerance=0)
    with running() as machine:
        found = md4.JK(basis, backend="cuda").gradient(dm, tolerance=0)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-13 * abs(right).max())
    assert machine.kernels >= {"reverse_fused", "select_kets"}
    assert "reverse_sums" not in machine.kernels


def use(monkeypatch, **constants):
    """Constants of `select_kets` with other values."""
    for name, value in constants.items():
        monkeypatch.setattr(select_kets, name, value)


def largest_bounds(bounds, j, k, norms, shells):
    """Bounds of bra pairs with any shells of kets, whose own bounds are 1; both densities added up."""
    of_pairs, rows = norms[:, shells[0], shells[1]], norms.max(axis=2)
    largest = abs(j) @ (of_pairs * rows.max(axis=1, keepdims=True))
    return bounds * (largest + abs(k) @ (rows[:, shells[0]] * rows[:, shells[1]]))


def replace_last(size, reach, bounds, limit):
    """Whether some of the last bounds of quartets, in whole turns of threads, are below a limit with the largest |D|.

    They are replaced by these larger bounds.
    """
    assert (size <= np.outer(reach, bounds) * (1 + 1e-12)).all()
    found = False
    for row, of_bra in zip(size, reach):
        behind = np.max(np.flatnonzero(of_bra * bounds >= limit) + 1, initial=0)
        behind = -(-behind // THREADS) * THREADS
        row[behind:] = of_bra * bounds[behind:]
        found = found or behind < len(bounds)
    return found


def in_order(counts, surviving, first, own, start):
    """Shell and primitive quartets of a kind in the order of the lists: (bra, ket), and with its shell quartet."""
    nbra, nket = counts.shape
    # each warp takes 32 ket pairs, the next ones the next warp
    of_warps = [[cd for cd in range(nket) if cd // 32 % WARPS == warp] for warp in range(WARPS)]
    of_shells = [(first + n, cd) for n in range(nbra) for warp in of_warps for cd in warp if counts[n, cd]]
    of_prims = [
        (start[0][first] + i, q, of_shells.index((first + n, cd))) for i, n in enumerate(own) for warp in of_warps
        for cd in warp for q in range(*start[1][cd : cd + 2]) if counts[n, cd] and surviving[i, q]
    ]  # fmt: skip
    return of_shells, of_prims


def check_counts(pairs, prims, kinds, of_prims):
    """Numbers of ket pairs, the end of the last, and of primitive ket pairs, which count as each of both kinds."""
    last = [max(np.flatnonzero(row), default=-1) + 1 for row in kinds[0] | kinds[1]]
    np.testing.assert_array_equal(pairs.T, [*(of_kind.sum(axis=1) for of_kind in kinds), last])
    np.testing.assert_array_equal(prims.T, [of_kind.sum(axis=1) for of_kind in of_prims])


def quartet_table(context, pairs, prims):
    """Room for the lists of what was counted, as of a chunk behind others of its list: fields of `QuartetTable`."""
    places = np.stack([np.cumsum([7, *pairs[:, 0]]), np.cumsum([11, *pairs[:, 1]]), [*pairs[:, 2], 0]], axis=1)
    quartets, shells, numbers = np.cumsum([[30, 41], *prims], axis=0), pairs[:, :2].sum(axis=0), prims.sum(axis=0)
    counted = np.repeat([shells.sum(), numbers.sum()], [2, 3]).tolist()
    rooms = [context.pool.get(size + 1) for size in counted]
    table = (Buffer(room.pointer, (size,), 4, room) for room, size in zip(rooms, counted))
    given = context.pool.upload([places, quartets.reshape(-1)], context.stream)[1]
    return *given, int(shells[0]), int(numbers[0]), *table


def behind_others(context, n, shells, start, excess, bounds, of_prims, norms):
    """Fields of `BoundedPairs` of a bra list behind one pair, or if n is 1 a ket list behind two, of three primitives.
    """
    every, others = np.concatenate([np.zeros((n + 1, 2), dtype=np.int64), shells]), np.zeros(n + 1)
    prims, tails = np.r_[[[3], [2, 1]][n], packed_prims(start, excess)], np.r_[tails_of(others), tails_of(bounds)]
    of_pairs, of_all = norms[:, every[:, 0], every[:, 1]].reshape(-1), np.r_[np.ones(3), of_prims]
    given = packed_shells(every), prims, np.r_[others, bounds], of_all, tails, of_pairs
    return context.pool.upload(given, context.stream)[1]


def test_tails_of_bounds():
    """Of an empty list there is only what is behind the last."""
    np.testing.assert_array_equal(tails_of(np.zeros(0)), np.zeros(3))
    bounds = np.r_[2.0, np.ones(THREADS - 1), 3.0, 0.5]
    right = [3.0, 3.0, 0.0, THREADS + 4.5, 3.5, 0.0, THREADS + 12.25, 9.25, 0.0]
    np.testing.assert_array_equal(tails_of(bounds), right)


@pytest.mark.races
@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("nket, early", [
    (1, 0.01), (31, 1.0), (THREADS, 1.0), (2 * THREADS + 5, 0.01), (3 * THREADS, 1.0), (3 * THREADS + 5, 1.0),
    (33 * THREADS + 5, 0.01),
])  # fmt: skip
def test_selected_kets(nket, early, near, monkeypatch):
    """Numbers, bounds and lists of quartets of a slice of a bra list, beside NumPy; pairs without primitives, too.

    Norms of densities are in shared memory, or where there are many, not. The last ket pairs are left out together. The
    bra list begins behind another pair, and the ket list behind one of two pairs, with which nothing counts.
    """
    use(monkeypatch, ROW_BYTES=176 if near else 175, EARLY=early)
    rng, nshell, first, nbra = np.random.default_rng(nket), 5, 2, 3
    shells = [rng.integers(nshell, size=(count, 2)) for count in (first + nbra, nket)]
    start = [np.append(0, np.cumsum(rng.integers(0, 4, len(these)))) for these in shells]
    start[0][first + 1 :] += 1  # the first bra pair that takes part has one at least
    excess = [rng.integers(0, 2, (2, len(these))) for these in shells]
    bounds, norms = [rng.uniform(0.4, 1, len(these)) for these in shells], rng.uniform(0, 1, (2, nshell, nshell))
    bounds[1] *= np.where(np.arange(nket) < THREADS, 1.0, 0.1)  # fall, but not one by one
    of_prims = [rng.uniform(0, 1, these[-1]) for these in start]
    j, k, tolerance, limit, least = np.array([1.0, 0.0]), np.array([-0.5, 2.0]), 0.4, 0.3, 0.5
    (a, b), (c, d) = shells[0][first:].T[:, :, None], shells[1].T
    of_d = sum(abs(j[s]) * n[a, b] * n[c, d] + abs(k[s]) / 2 * (n[a, c] * n[b, d] + n[a, d] * n[b, c])
               for s, n in enumerate(norms))  # fmt: skip
    size = bounds[0][first:, None] * bounds[1] * of_d
    counts = (size >= tolerance) & (np.diff(start[1]) > 0)
    single = size * 2.0 ** (excess[0][1, first:, None] + excess[1][0]) < least
    kinds = counts & ~single, counts & single
    # of primitive quartets
    own, owner = np.repeat(np.arange(nbra), np.diff(start[0])[first:]), np.repeat(np.arange(nket), np.diff(start[1]))
    of_quartets = of_prims[0][start[0][first] :, None] * of_prims[1] * of_d[own][:, owner]
    surviving, skipped = counts[own][:, owner] & (of_quartets >= limit), counts[own][:, owner] & (of_quartets < limit)
    with running():
        context = md4.Engine(basis_of((0,)), backend="cuda").backend.context
        sides = zip(shells, start, excess, bounds, of_prims)
        arrays = [behind_others(context, n, *side, norms) for n, side in enumerate(sides)]
        lists = np.array([[0, 0, 0], [2, 6, 3], [2 + nket, 6 + len(tails_of(bounds[1])), 3 + start[1][-1]]])
        lists = sent(context, lists).part(0, lists.shape)
        given = *(sent(context, array) for array in (norms, largest_norms(norms), j, k)), nshell, tolerance
        sizes, left = count_sizes(nbra, len(own)), context.pool.get(2 * nbra)
        numbers = [Buffer((room := context.pool.get(size)).pointer, (2 * size,), 4, room) for size in sizes]
        limits = sent(context, np.array([limit, least] * 2)).part(0, (2, 2))
        pass_of = context, (first + 1, 1, 3), nbra, len(own), 4, *arrays
        launch_select(*pass_of, lists, limits, given, True, (*numbers, left))
        other, found = host_array(numbers[0], "int32").copy().reshape(2, -1)
        pairs, prims = found[: 3 * nbra].reshape(-1, 3), found[3 * nbra :].reshape(-1, 2)
        assert not other.any()
        table = quartet_table(context, pairs, prims)
        counts_of = numbers[0], numbers[1].part(sizes[1], (sizes[1],)), left
        launch_select(
            *pass_of, lists.part(3, (2, 3)), limits.part(2, (1, 2)), given, True, counts_of, table
        )  # fmt: skip
        shells_of, listed = (np.stack([host_array(b, "int32") for b in part], 1) for part in (table[4:6], table[6:]))
        sums = host_array(left, "float64")[: 2 * nbra].reshape(2, -1).T.copy()
    check_counts(pairs, prims, kinds, [surviving & of_kind[own][:, owner] for of_kind in kinds])
    of_bras = largest_bounds(bounds[0][first:], j, k, norms, (a[:, 0], b[:, 0])), bounds[1], early * tolerance
    assert replace_last(size, *of_bras) == (early == 1.0 and nket > THREADS)
    right = np.stack([(size * ~counts).sum(axis=1), (size**2 * ~counts).sum(axis=1)], axis=1)
    without = np.array([(of_quartets * skipped)[own == n].sum(axis=0) for n in range(nbra)])
    right += np.stack([without.sum(axis=1), (without**2).sum(axis=1)], axis=1)
    np.testing.assert_allclose(sums, right, 1e-12)
    orders = zip(*(in_order(of_kind, surviving, first, own, start) for of_kind in kinds))
    for ours, (one, other) in zip((shells_of, listed), orders):
        np.testing.assert_array_equal(ours, np.reshape(one + other, ours.shape))
    assert nket < 100 or (0 < counts.sum() < counts.size and surviving.any() and skipped.any())
