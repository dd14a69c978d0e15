"""Pair lists and Schwarz bounds made by kernels are those of the host, on a GPU and on the emulated one."""

import gc
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from math import isqrt

import numpy as np
import pytest
from emulator import running
from molecules import WATER, molecule

from md4 import Engine
from md4.contract.fitting_lists import Bounded
from md4.contract.screening import schwarz_bounds
from md4.cpu.forces import largest_norms
from md4.errors import MemoryLimitError
from md4.gpu import shell_pairs as device_pairs
from md4.gpu.buffers import Buffer, copy_to_host
from md4.gpu.context import DeviceContext, as_stream, cuda
from md4.gpu.kernels.bounds import launch_bounds
from md4.gpu.pair_layout import SIDE_BY_SIDE
from md4.gpu.paths import build_time, square_pairs
from md4.gpu.predicted_times import EVALUATION, Side
from md4.gpu.shell_pairs import PairMaker
from md4.gpu.targets import DeviceBlock
from md4.method.derivatives import OF_A, OF_B
from md4.plan import SQUARE_BYTES
from md4.shells.basis import Basis
from md4.shells.schwarz import TOGETHER, GradientBounds, row_norms
from md4.shells.shell_pairs import shell_pairs, unique_pairs_by_class

gpu = pytest.mark.gpu


@pytest.fixture(params=["python", pytest.param("cuda", marks=gpu)])
def device(request):
    """(a new `PairMaker` for a cap on memory, reader of a buffer of a type) of each device."""
    with ExitStack() as stack:
        if request.param == "cuda":
            request.getfixturevalue("gpu")
        else:
            stack.enter_context(running())
        stream = as_stream(None)

        def read(buffer, dtype):
            array = np.empty(buffer.shape, dtype)
            copy_to_host(array, buffer.pointer, stream)
            return array

        yield lambda cap=None: PairMaker(DeviceContext(stream, cap)), read


class Listed(Bounded):
    """A list as gradients take it."""

    pairs = property(lambda self: self.prepared.pairs)

    def __len__(self):
        return len(self.prepared)


def basis_of(nprims, l=(1, 0), nctr=(1, 1), count=6, spread=2.0, pure=True):
    """Shells of two kinds in turn, of numbers of primitives that go round in `nprims`."""
    rng = np.random.default_rng(0)
    shells = [(l[n % 2], nctr[n % 2], nprims[n // 2 % len(nprims)]) for n in range(2 * count)]
    return Basis.from_arrays(
        [s[0] for s in shells],
        [np.geomspace(0.1, 40.0, s[2]) * rng.uniform(0.9, 1.1, s[2]) for s in shells],
        [rng.uniform(-1, 1, (s[2], s[1])) for s in shells],
        rng.uniform(-spread, spread, (2 * count, 3)),
        pure,
    )


# What a basis is made with, the cutoff, and whether pairs without any primitive pair are wanted.
CASES = {
    "K 1": ({"nprims": [1]}, 1e-25, False),
    "5 x 5": ({"nprims": [5]}, 1e-25, False),
    "5 x 5, far apart": ({"nprims": [5], "spread": 20.0}, 1e-12, True),
    "all of 5 x 5": ({"nprims": [5], "spread": 4.0}, 0, False),
    "one far pair": ({"nprims": [1], "spread": 30.0, "count": 2}, 1e-25, True),
    "9 x 9, 1 x 1, 4 x 4": ({"nprims": [9, 1, 4], "spread": 5.0}, 1e-10, False),
    "12 x 12, three passes": ({"nprims": [12], "count": 3, "spread": 5.0}, 1e-15, False),
    "general": ({"nprims": [4, 3], "nctr": (3, 2), "l": (2, 1)}, 1e-25, False),
    "Cartesian": ({"nprims": [2, 3], "l": (3, 2), "pure": False}, 1e-25, False),
}


@pytest.mark.parametrize("case", CASES)
def test_lists_are_those_of_the_host(device, case):
    options, cutoff, empty = CASES[case]
    basis = basis_of(**options)
    shells = np.arange(basis.nshell)
    pairs = np.stack(np.meshgrid(shells[::2], shells[1::2]), axis=-1).reshape(-1, 2)
    new_maker, read = device
    maker = new_maker()
    ours, data = maker.prepare(basis, pairs, cutoff)
    right = shell_pairs(basis, pairs, cutoff=cutoff)
    counts = np.diff(right.start)
    assert (counts.min() == 0) == empty
    assert ours.primitives is None
    for name in ("pairs", "start", "nprim", "la", "lb", "nctr_a", "nctr_b", "na", "nb", "nherm", "pure", "max_prim"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(right, name))
    np.testing.assert_array_equal(read(data.start, "int64"), right.start)
    np.testing.assert_array_equal(read(data.owner, "int64"), np.repeat(np.arange(len(pairs)), counts))
    records = read(data.records, "float64").reshape(right.nprim, data.width)
    assert_same_records(records, right.primitives)
    slots = maker.slots(ours, data)
    assert maker.slots(ours, data) is slots
    place, first = read(slots.place, "int64"), read(slots.first, "int64")
    rank = np.arange(right.nprim) - np.repeat(right.start[:-1], counts)
    np.testing.assert_array_equal(place, np.repeat(first, counts) + SIDE_BY_SIDE * rank)
    in_slots = read(slots.numbers, "float64").reshape(4, slots.count)
    np.testing.assert_array_equal(in_slots[:, place], records[:, :4].T)


@pytest.mark.parametrize("nctr", [(1, 1), (3, 2)])
def test_single_shells(device, nctr):
    """Pairs with the unit function, whose exponent is 0: p and P are those of the shell to the last bit."""
    basis = basis_of([3, 1], l=(4, 2), nctr=nctr).with_unit
    shells = np.arange(0, basis.unit, 2)
    pairs = np.stack([shells, np.full_like(shells, basis.unit)], axis=1)
    new_maker, read = device
    maker = new_maker()  # whose memory goes with it
    ours, data = maker.prepare(basis, pairs, 1e-25)
    right = shell_pairs(basis, pairs, cutoff=1e-25)
    assert ours.single
    assert ours.facts is right.facts
    np.testing.assert_array_equal(ours.start, right.start)
    records = read(data.records, "float64").reshape(right.nprim, data.width)
    assert np.isfinite(records).all()
    assert_same_records(records, right.primitives)
    np.testing.assert_array_equal(records[:, 0], np.concatenate([basis.shells[n].exponents for n in shells]))
    np.testing.assert_array_equal(records[:, 1:4], np.repeat(basis.centres[shells][:, ::-1], [3, 1] * 3, axis=0))
    np.testing.assert_array_equal(records[:, 4:7], 0.0)


def assert_same_records(records, primitives):
    """[p, P, P - A, P - B, za, zb, coefficients of a, of b], but for rounding errors: of coordinates, of their size."""
    expected = np.column_stack([*primitives.arrays[:4], *primitives.arrays[-2:], *primitives.arrays[4:-2]])
    assert records.shape == expected.shape
    bohr = np.zeros(expected.shape[1])
    bohr[1:10] = 1e-13 * abs(primitives.centre).max(initial=1.0)
    np.testing.assert_array_less(abs(records - expected), 1e-13 * abs(expected) + bohr + 1e-300)


def test_memory_goes_back_in_order(device):
    """The basis stays as long as it lives, a list's memory serves the next, that for counting serves all."""
    maker, basis = device[0](), basis_of([2])
    pairs = np.array([[0, 1], [2, 3], [4, 5]])
    _, data = maker.prepare(basis, pairs, 0)
    held, scratch = maker.pool.held, maker.scratch.pointer
    pointer = data.records.pointer
    del data
    for _ in range(3):
        _, data = maker.prepare(basis, pairs, 0)
        assert (data.records.pointer, maker.scratch.pointer, maker.pool.held) == (pointer, scratch, held)
        del data
    assert len(maker.bases) == 1
    idle, size = maker.pool._idle_bytes(), next(iter(maker.bases.values())).arrays[0].owner.nbytes
    del basis
    gc.collect()
    assert len(maker.bases) == 0
    assert maker.pool._idle_bytes() == idle + size
    assert maker.pool.held == held


def test_memory_for_counting_grows(device, monkeypatch):
    monkeypatch.setattr(device_pairs, "LEAST_PAIRS", 1)
    new_maker, read = device
    maker, basis = new_maker(), basis_of([2])
    for count in (1, 40, 7, 60):
        pairs = np.repeat([[0, 1]], count, axis=0)
        ours, data = maker.prepare(basis, pairs, 0)
        assert maker.scratch.size >= 3 * count
        np.testing.assert_array_equal(read(data.start, "int64"), ours.start)
        assert ours.nprim == 4 * count
    assert maker.scratch.size == 3 * 60


def test_more_primitive_pairs_than_kernels_can_count(device, monkeypatch):
    new_maker, _ = device
    maker, pairs = new_maker(), np.repeat([[0, 1]], 3, axis=0)
    ours, data = maker.prepare(basis_of([2]), pairs, 0)
    monkeypatch.setattr(device_pairs, "MOST_SLOTS", 11)
    with pytest.raises(MemoryLimitError, match=r"a list of 3 shell pairs takes \d+ places .* takes 11 at once"):
        maker.slots(ours, data)


def test_the_cap_holds(device):
    """Of a list that does not fit nothing stays but the basis and the memory for counting."""
    new_maker, _ = device
    maker, basis = new_maker(cap=0.1), basis_of([5])
    _, data = maker.prepare(basis, np.repeat([[0, 1]], 20, axis=0), 0)
    del data
    with pytest.raises(MemoryLimitError, match="raise max_memory"):
        maker.prepare(basis, np.repeat([[0, 1]], 60, axis=0), 0)
    assert maker.pool.peak <= 100_000
    maker.prepare(basis, np.repeat([[0, 1]], 20, axis=0), 0)


@pytest.mark.parametrize("na, nb", [(1, 1), (3, 5), (40, 2)])
def test_bounds_of_a_block(device, na, nb):
    """Rounding errors below zero count as zero; what is no number is not hidden."""
    new_maker, read = device
    context, npair = new_maker().context, 11
    rng = np.random.default_rng(na)
    block = np.zeros((npair, npair, na, nb, na, nb))
    diagonal = np.einsum("iiabab->iab", block)  # a view
    diagonal[:] = rng.uniform(-0.2, 1, diagonal.shape)
    block[4, 4, -1, 0, -1, 0] = np.nan
    expected = row_norms(diagonal)
    _, (on_device, bounds) = context.pool.upload([block, np.zeros(npair)], context.stream)
    flat = Buffer(on_device.pointer, (block.size,), 8, on_device.owner)
    launch_bounds(context, DeviceBlock.contiguous(flat, block.shape), bounds)
    assert np.isnan(expected[4])
    np.testing.assert_allclose(read(bounds, "float64"), expected, rtol=1e-14)


def lists_of(basis):
    """A basis with the unit function, and its lists of pairs and of single shells by class; one more list is empty."""
    joined, shells = basis.with_unit, np.arange(basis.nshell)
    pairs = unique_pairs_by_class(joined, shells, shells)
    return joined, [*pairs, pairs[0][:0], *unique_pairs_by_class(joined, shells, [joined.unit])]


def check_bounds(basis):
    """The bounds of all lists of a basis are those of the CPU; returns them."""
    joined, lists = lists_of(basis)
    ours, right = (schwarz_bounds(Engine(joined, backend=name), lists) for name in ("cuda", "cpu"))
    assert [one.shape for one in ours] == [(2, len(pairs)) for pairs in lists]
    for one, other in zip(ours, right):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * other.max(initial=0.0))
    return ours


@gpu
@pytest.mark.parametrize("nctr", [(1, 1), (3, 2)])
@pytest.mark.parametrize("most", [5, None])
def test_schwarz_bounds(gpu, nctr, most, monkeypatch):
    if most is not None:
        monkeypatch.setattr("md4.gpu.sums.square_pairs", lambda *_: most)
    check_bounds(basis_of([2, 3], l=(2, 1), nctr=nctr, count=3))


@pytest.mark.sample("2-60.0")
@pytest.mark.parametrize(("most", "spread"), [(2, 1.0), (2, 60.0), (100, 1.0)])
def test_schwarz_bounds_in_plain_python(most, spread, monkeypatch):
    """In squares of two or three pairs, in one for each list, and 0 for pairs that are too far apart."""
    monkeypatch.setattr("md4.gpu.sums.square_pairs", lambda *_: most)
    with running():
        found = np.concatenate(check_bounds(basis_of([1, 2], count=2, spread=spread)), axis=1)
    assert (found == 0).any() == (spread > 10)


def check_gradient_bounds(basis):
    """The norms of the pairs of all lists of a basis, and of their derivatives, are those of the CPU; returns these.

    Those of primitive pairs are those of pairs of one primitive pair each.
    """
    joined, lists = lists_of(basis)
    cpu, lists = Engine(joined, backend="cpu"), [pairs for pairs in lists if len(pairs)]
    ours, right = (
        engine.backend.sums.forces(
            joined, list(map(Listed, engine.prepare_lists(lists, joined), *zip(*schwarz_bounds(engine, lists))))
        )
        for engine in (Engine(joined, backend="cuda"), cpu)
    )
    for pairs, one, other, prims in zip(lists, ours.bounds, right.bounds, ours.of_prims):
        of_host = shell_pairs(joined, pairs)
        counts = np.diff(of_host.start)
        each = replace(of_host, pairs=np.repeat(pairs, counts, axis=0), start=np.arange(of_host.nprim + 1))
        if each.nprim:
            largest = largest_norms(cpu.backend, each.derived(OF_A if each.single else OF_A + OF_B))
            expected = GradientBounds(each.pairs, joined.centres, largest, largest)
            np.testing.assert_allclose(prims.derivative, expected.derivative, rtol=1e-9, atol=1e-12 * largest.max())
        np.testing.assert_array_equal(prims.own[np.repeat(counts == 1, counts)], one.own[counts == 1])
        sums = np.bincount(np.repeat(np.arange(len(pairs)), counts), prims.own, len(pairs))
        assert (sums >= (1 - 1e-12) * one.own).all()
        np.testing.assert_allclose(one.derivative, other.derivative, rtol=1e-9, atol=1e-12 * other.derivative.max())
        block, factor = cpu.compute(pairs, pairs), np.where(pairs[:, 0] == pairs[:, 1], 1.0, 2.0)
        squares = np.einsum("iikk->i", block.reshape(len(pairs), len(pairs), *[isqrt(block[0, 0].size)] * 2))
        exact, rounding = factor * np.sqrt(np.maximum(squares, 0.0)), 1e-12 * one.own.max()
        assert (one.own >= (1 - 1e-12) * exact - rounding).all()
        few = joined.nprims[pairs].prod(axis=1) <= TOGETHER
        np.testing.assert_allclose(one.own[few], exact[few], rtol=1e-9, atol=rounding)
    return np.concatenate([one.derivative for one in ours.bounds])


@gpu
@pytest.mark.parametrize("options", [
    {"nprims": [1], "l": (5, 4), "count": 3}, {"nprims": [2, 3], "l": (3, 2), "count": 4},
    {"nprims": [6, 3], "l": (1, 0), "nctr": (2, 3)}, {"nprims": [1, 2], "l": (4, 1), "pure": False, "count": 3},
    {"nprims": [1, 4], "l": (2, 1), "spread": 40.0, "count": 12},
], ids=str)  # fmt: skip
def test_bounds_of_derivatives(gpu, options):
    check_gradient_bounds(basis_of(**options))


@pytest.mark.parametrize("options", [
    pytest.param({"nprims": [2], "l": (0, 0), "nctr": (2, 1)}, marks=pytest.mark.races),
    {"nprims": [1], "l": (1, 0), "spread": 60.0, "count": 2},
    *(pytest.param(case, marks=pytest.mark.thorough) for case in (
        {"nprims": [2], "nctr": (2, 1)}, {"nprims": [5], "l": (0, 0)}, {"nprims": [1], "l": (2, 1), "pure": False},
    )),
], ids=str)  # fmt: skip
def test_bounds_of_derivatives_in_plain_python(options, monkeypatch):
    """Of primitive pairs that count together and in parts; of more pairs than there are blocks of threads."""
    monkeypatch.setattr("md4.gpu.kernels.derivative_norms.BLOCKS", 2)
    with running() as machine:
        found = check_gradient_bounds(basis_of(**({"count": 1} | options)))
    assert "derivative_norms" in machine.kernels
    assert (found == 0).any() == (options.get("spread") == 60.0)


def test_the_squares_of_bounds_take_the_least_time():
    """Predicted times of the launches and of the integrals together; within the memory for one square."""
    for l, count in product(((0, 0), (1, 1), (2, 1), (3, 3), (6, 6)), (1, 3)):
        basis = basis_of([count], l=l)
        side = Side.of(shell_pairs(basis, [[0, 1]]))
        quartet, most = build_time("dmma16", side, side, 0), square_pairs("dmma16", side)

        def cost(n, quartet=quartet):
            return EVALUATION / n + n * quartet

        assert cost(most) <= cost(max(1, most - 1))
        full = 8 * ((most + 1) * side.facts.nab) ** 2 > SQUARE_BYTES
        assert full or cost(most) <= cost(most + 1)
        assert 8 * (most * side.facts.nab) ** 2 <= SQUARE_BYTES


@cuda.jit
def sleep(turns):
    """Keeps its stream busy for a millisecond a turn."""
    for _ in range(turns):
        cuda.nanosleep(1_000_000)


@gpu
@pytest.mark.filterwarnings("ignore:.*Grid size")  # what sleeps needs no more than one thread
@pytest.mark.parametrize("count", [3, 30000])
def test_preparing_does_not_wait(gpu, count):
    """The host has a pair list while the engine's stream is still at work, for two seconds."""
    basis = basis_of([3])
    engine = Engine(basis, backend="cuda")
    pairs, stream = np.repeat([[0, 1], [2, 3], [4, 1]], count // 3, axis=0), engine.backend.context.stream
    engine.prepare(pairs)  # the kernels are loaded, the memory is there
    sleep[1, 1, stream](1)
    stream.synchronize()
    done, start = cuda.event(), time.perf_counter()
    sleep[1, 1, stream](2000)
    done.record(stream)
    prepared = engine.prepare(pairs)
    finished = done.query()
    seconds = time.perf_counter() - start
    assert not finished, f"{seconds:.3f} s"
    array = np.empty(len(pairs) + 1, dtype=np.int64)
    copy_to_host(array, prepared.data.start.pointer, stream)
    np.testing.assert_array_equal(array, prepared.pairs.start)
    assert done.query()


@gpu
@pytest.mark.parametrize("stream", [None, 0])
def test_lists_made_while_others_are_computed(gpu, stream):
    """Nothing is waited for between them; memory goes from one to the other."""
    basis = Basis.from_mol(molecule(WATER, "cc-pvtz"))
    lists = unique_pairs_by_class(basis)
    engine, right = Engine(basis, backend="cuda", stream=stream), Engine(basis, backend="cpu")
    blocks = [[engine.compute(bra, ket) for ket in lists[-2:]] for bra in lists for _ in range(3)]
    engine.backend.context.stream.synchronize()
    for n, bra in enumerate(lists):
        for k, ket in enumerate(lists[-2:]):
            expected = right.compute(bra, ket)
            for again in range(3):
                ours = blocks[3 * n + again][k].copy_to_host()
                np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-12 * abs(expected).max())
