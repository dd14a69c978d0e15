"""Kernels that leave out the quartets beyond the limits of a block, on the emulated GPU."""

import numpy as np
import pytest
from emulator import host_array, running
from gpu.kernels.test_plain_python import R_KERNELS, TENSOR_CORES, all_classes, basis_of  # noqa: F401 a fixture

import md4
from md4.contract.survivors import Survivors
from md4.contract.tensor import ao_tensor
from md4.gpu.buffers import Buffer, copy_to_device
from md4.gpu.compile import Graph
from md4.gpu.hermite_coulomb import first_aos
from md4.gpu.kernels import recurrence
from md4.gpu.kernels.digestion import launch_digest
from md4.gpu.paths import plans
from md4.gpu.targets import DeviceBlock

# Angular momenta of a, b, c and d, primitives and contracted functions.
CLASSES = {
    "(ps|ss)": ((1, 0, 0, 0), 1, 1),
    "(ps|ss), K = 4": ((1, 0, 0, 0), 2, 1),
    "(ps|ps) of two functions": ((1, 0, 1, 0), 2, 2),
    "(dp|ps)": ((2, 1, 1, 0), 1, 1),
}


def on_device(context, numbers):
    """An int32 array in device memory."""
    room = context.pool.get(max(1, -(-numbers.size // 2)))
    copy_to_device(room.pointer, numbers, context.stream)
    return Buffer(room.pointer, numbers.shape, 4, room)


def sent(context, numbers):
    """An array of doubles in device memory."""
    room = context.pool.get(max(1, numbers.size))
    copy_to_device(room.pointer, np.ascontiguousarray(numbers), context.stream)
    return room.part(0, (numbers.size,))


def limited(rng, nbra, nket):
    """Numbers of ket pairs of each bra pair, 0 and all of them among these."""
    counts = rng.integers(0, nket + 1, nbra).astype(np.int32)
    counts[[1, 2]] = nket, 0
    return counts


@pytest.mark.sample("r_in_registers-*", "r_by_axis-True")
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("kernel", R_KERNELS)
def test_r(kernel, swapped, monkeypatch):
    """Where a quartet counts r is as without limits; much of the rest is not written."""
    for name, l in R_KERNELS[kernel].items():
        monkeypatch.setattr(recurrence, name, l)
    basis, counts = basis_of((1, 0, 1, 0)), np.repeat([6, 2, 4, 0], 20).astype(np.int32)
    live = np.arange(1, 7) < counts[1:80, None]
    with running():
        engine = md4.Engine(basis, backend="cuda")
        pool = engine.backend.context.pool
        ab, cd = engine.prepare([[0, 1]] * 80)[1:80], engine.prepare([[2, 3]] * 8)[1:7]
        block = engine.backend.scratch((79, 6, 3, 1, 3, 1))
        block.limit(on_device(engine.backend.context, counts))
        if swapped:
            ab, cd, block, live = cd, ab, block.swapped(), live.T
        right = host_array(engine.backend.r(ab, cd), "float64").copy()
        pool.trim()
        ours = host_array(engine.backend.r(ab, cd, block=block), "float64")
        shape = ab.npair, ab.nprim // ab.npair, cd.npair, cd.nprim // cd.npair, -1
        ours, right = (r.reshape(shape).swapaxes(1, 2) for r in (ours, right))
    assert np.array_equal(ours[live], right[live])
    assert np.isnan(ours[~live]).mean() > 0.3


@pytest.mark.sample("(ps|ss)-dmma16")
@pytest.mark.parametrize("unit", TENSOR_CORES)
@pytest.mark.parametrize("name", CLASSES)
def test_blocks(unit, name, all_classes):  # noqa: F811
    """Slices of lists, by each plan: what counts is right, and nothing of it depends on memory that nobody wrote."""
    ls, nprim, nctr = CLASSES[name]
    rng, basis = np.random.default_rng(5), basis_of((*ls, *ls), nprim, nctr)
    bra, ket = rng.choice([[0, 1], [4, 5], [0, 5], [4, 1]], 7), rng.choice([[2, 3], [6, 7], [2, 7], [6, 3]], 9)
    right = md4.Engine(basis, backend="cpu").compute(bra, ket)[1:6, 2:8]
    counts = limited(rng, 7, 9)
    live = np.arange(2, 8) < counts[1:6, None]
    assert 5 < live.sum() < 25
    with running(unit):
        engine = md4.Engine(basis, backend="cuda")
        backend = engine.backend
        ab, cd = engine.prepare(bra)[1:6], engine.prepare(ket)[2:8]
        for plan in list(plans(unit, ab, cd)):
            backend.plan = lambda *_, plan=plan: plan
            block = backend.scratch(right.shape)
            block.limit(on_device(backend.context, counts))
            engine.run_steps(ab, cd, block)
            found = host_array(block.array, "float64").reshape(right.shape)
            np.testing.assert_allclose(found[live], right[live], rtol=0, atol=1e-14 * abs(right).max(), err_msg=plan)
            # a thread a quartet leaves out nothing, and a group of ket pairs is made if one of them counts
            if plan.path.name == "two_products" or (plan.path.name != "thread_quartet" and not plan.swap):
                assert np.isnan(found[counts[1:6] <= 2]).all(), plan
            backend.context.pool.trim()  # other memory, in which nobody has written


# Functions of the four shells, and bra and ket pairs.
BLOCKS = {"few": ((0, 0, 1, 0), 5, 37), "many": ((2, 1, 1, 1), 5, 7), "one b and d": ((1, 0, 1, 0), 7, 15)}


@pytest.mark.sample("counts0-*")
@pytest.mark.races
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("counts", [(1, 1), (2, 0), (0, 1)])
def test_digestion(name, counts):
    """What does not count is not a number; the sums are those of a block with zeros there."""
    (la, lb, lc, ld), nbra, nket = BLOCKS[name]
    rng, basis, nao = np.random.default_rng(7), basis_of((la, lb, lc, ld)), sum(2 * l + 1 for l in (la, lb, lc, ld))
    with running("dmma16") as machine:
        engine = md4.Engine(basis, backend="cuda")
        context = engine.backend.context
        ab = engine.prepare([[0, 1]] * (nbra + 2))[1 : nbra + 1]
        cd = engine.prepare([[2, 3]] * (nket + 3))[2 : nket + 2]
        numbers = limited(rng, nbra + 2, nket + 3)
        live = np.arange(2, nket + 2) < numbers[1 : nbra + 1, None]
        shape = (nbra, nket, *(2 * l + 1 for l in (la, lb, lc, ld)))
        values, places = rng.normal(size=shape), [first_aos(context, side, basis) for side in (ab, cd)]
        sizes = [counts[0] * nao**2] * 2 + [counts[1] * nao**2] * 2
        densities = [rng.normal(size=size) for size in sizes]
        sums = []
        for fill, limits in ((0.0, None), (np.nan, on_device(context, numbers))):
            values[~live] = fill
            block = DeviceBlock.contiguous(sent(context, values), shape)
            if limits is not None:
                block.limit(limits)
            d, _, twice, _ = densities
            matrices = [sent(context, m) for m in (d, 0 * d, twice, 0 * twice)]
            launch_digest(context, block, ab, cd, places, False, matrices, counts, nao)
            sums.append([host_array(matrices[n], "float64") for n in (1, 3)])
    assert "digest_rows" in machine.kernels
    for ours, right in zip(*reversed(sums)):
        np.testing.assert_allclose(ours, right, rtol=0, atol=1e-13 * abs(right).max(initial=0))


@pytest.mark.thorough
@pytest.mark.parametrize("nprim", [1, 2])
def test_builds_of_other_survivors(nprim, monkeypatch):
    """Launches that are repeated heed the limits of their own build: J and K of just the quartets that survive."""
    repeated, again, builds = [], Graph.launch, []

    def whole(survivors, n, first, end, most, price):
        """One rectangle of each two lists, whatever survives."""
        builds.append(survivors)
        return [(slice(0, end - first), slice(0, len(survivors.pairs.lists[survivors.pairs.numbers[n][1]])))]

    monkeypatch.setattr(Survivors, "tiles", whole)
    monkeypatch.setattr(Graph, "launch", lambda graph, stream: (repeated.append(graph), again(graph, stream)))
    rng, found = np.random.default_rng(3), set()
    centres = np.outer([0.0, 1.0, 3.5, 6.0], [0.2, 0.3, 1.0])
    exponents, coefficients = [[0.7, 1.5][:nprim]] * 4, [[0.4, 0.7][:nprim]] * 4
    basis = md4.Basis.from_arrays([1, 0, 0, 1], exponents, coefficients, centres)
    tensor = ao_tensor(md4.Engine(basis, backend="cpu"))
    with running("dmma16"):
        jk = md4.JK(basis, backend="cuda", direct_scf_tol=1e-3)
        for _ in range(4):
            sizes = 10.0 ** rng.uniform(-3, 0, basis.nshell)[np.repeat(range(4), np.diff(basis.ao_loc))]
            dm = rng.normal(size=(basis.nao, basis.nao)) * np.outer(sizes, sizes)
            j, k = jk.get_jk(dm + dm.T)
            left = tensor * surviving(basis, builds[-1])
            for one, other in zip((j, k), ("ijkl,kl->ij", "ijkl,jl->ik")):
                right = np.einsum(other, left, dm + dm.T)
                np.testing.assert_allclose(one, right, rtol=0, atol=1e-13 * abs(right).max())
            assert jk.stats.computed == jk.stats.wanted == builds[-1].total
            found.add(builds[-1].total)
    assert len(repeated) > 1
    assert len(found) > 2


def surviving(basis, survivors):
    """1 for the integrals of quartets that survive, 0 for all others; shape (nao, nao, nao, nao)."""
    keep, aos = np.zeros((basis.nao,) * 4), [np.arange(*ends) for ends in zip(basis.ao_loc, basis.ao_loc[1:])]
    for n, (bra, ket) in enumerate(survivors.pairs.numbers):
        for ij, count in zip(survivors.pairs.lists[bra].pairs.pairs, survivors.counts(n)):
            for kl in survivors.pairs.lists[ket].pairs.pairs[:count]:
                for (a, b), (c, d) in ((ij, kl), (kl, ij)):
                    for shells in ((a, b, c, d), (b, a, c, d), (a, b, d, c), (b, a, d, c)):
                        keep[np.ix_(*(aos[shell] for shell in shells))] = 1.0
    return keep
