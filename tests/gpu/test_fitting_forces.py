"""`DeviceFittingForces` on the emulated GPU: as on the CPU, for random tables, whatever is divided."""

from dataclasses import dataclass

import numpy as np
import pytest
from emulator import running
from gpu.kernels.test_plain_python import basis_of

import md4
from md4.contract.fitting_gradient import Bounded
from md4.contract.gradient import host_bounds
from md4.contract.screening import schwarz_bounds
from md4.gpu import fitting_forces, forces
from md4.shells.basis import Basis
from md4.shells.shell_pairs import PRIMITIVE_CUTOFF, unique_pairs_by_class


def given_lists(engine, joined, block_shells):
    """(lists of pairs, blocks of lists of single shells) of a joined basis, blocks of at most so many shells."""
    orbital, shells = np.arange(len(joined.parts[0])), np.arange(joined.unit)
    pairs = unique_pairs_by_class(joined, orbital, orbital)
    singles = unique_pairs_by_class(joined, shells[len(orbital) :], [joined.unit])
    blocks = [[these[n : n + block_shells]] for these in singles for n in range(0, len(these), block_shells)]
    every = [*pairs, *(piece for block in blocks for piece in block)]
    lists = [Bounded(this, *both) for this, both in zip(engine.prepare_lists(every, joined), schwarz_bounds(engine, every))]
    rest = iter(lists[len(pairs) :])
    return lists[: len(pairs)], [[next(rest) for _ in block] for block in blocks]


def made(joined, backend, block_shells=2):
    engine = md4.Engine(joined, backend=backend)
    pairs, blocks = given_lists(engine, joined, block_shells)
    every = [*pairs, *(this for block in blocks for this in block)]
    more = () if backend == "cpu" else (host_bounds(joined, every, PRIMITIVE_CUTOFF),)
    return engine.backend, engine.backend.sums.fitting_forces(joined, pairs, blocks, *more)


def tables(joined):
    rng = np.random.default_rng(3)
    pairs = unique_pairs_by_class(joined, *[np.arange(len(joined.parts[0]))] * 2)
    sizes = np.diff(joined.ao_loc)
    ncol, naux = sum(int(sizes[these].prod(axis=1).sum()) for these in pairs), joined.parts[1].nao
    two = rng.normal(size=(naux, naux))
    return rng.normal(size=(naux, ncol)), two + two.T


def run(joined, backend, three, two, tolerance=0.0, response=True, block_shells=2, **options):
    backend, made_forces = made(joined, backend, block_shells)
    for block in range(len(made_forces.blocks)):
        first, last = made_forces.rows[made_forces.edges[block : block + 2]].tolist()
        made_forces.add_three(backend, block, backend.send(three[first:last]), tolerance, response, **options)
    if response:
        made_forces.add_two(backend, backend.send(two), tolerance, **options)
    return made_forces.result(), made_forces.left_out

CASES = {"a": ((1, 0), (0, 1, 2), 1, 1, True), "b": ((2, 0), (3, 4), 1, 1, True), "K": ((0, 1), (0, 2), 2, 2, True),
    "cart": ((1, 2), (0, 1, 2), 1, 1, False), "h": ((0, 0), (5, 0), 1, 1, True), "f": ((3, 0), (1, 2), 1,1,True)}

@pytest.fixture(params=["lanes", "fused", "rectangles"])
def way(request, monkeypatch):
    """As in test_forces.py."""
    if request.param != "lanes":
        monkeypatch.setattr(forces, "lane_plan", lambda *_: None)
    if request.param == "rectangles":
        monkeypatch.setattr(forces, "fused_reverse", lambda *_: None)
    return request.param


@pytest.mark.parametrize("name", CASES)
def test_shells(name, way):
    orbital, aux, *more = CASES[name]
    joined = Basis.joined([basis_of(orbital, *more), basis_of(aux, *more)])
    three, two = tables(joined)
    want, _ = run(joined, "cpu", three, two)
    with running("dmma16"):
        found, left = run(joined, "cuda", three, two)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-13 * abs(want).max())
