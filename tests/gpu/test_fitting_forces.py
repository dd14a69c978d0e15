"""`DeviceFittingForces` on the emulated GPU: as on the CPU, for random tables, whatever is divided."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from emulator import running
from gpu.kernels.test_plain_python import basis_of
from gpu.test_forces import LIMITS

from md4.contract.fitting_lists import forces_of
from md4.contract.three_centre import ThreeCentre
from md4.cpu.fitting_forces import block_norms
from md4.errors import MemoryLimitError
from md4.gpu import reverse_ways
from md4.gpu.backend import GpuBackend
from md4.gpu.reverse_ways import hermite_of
from md4.method.angular import nherm
from md4.shells.basis import Basis


@dataclass(frozen=True)
class Case:
    """Angular momenta of the shells of both basis sets, primitives, contracted functions, and the unit."""

    orbital: tuple
    auxiliary: tuple
    nprim: int = 1
    nctr: int = 1
    pure: bool = True
    unit: str = "dmma16"


CASES = {
    "(ps|sp)": Case((1, 0), (0, 1)), "(ps|spd)": Case((1, 0), (0, 1, 2)),
    "(ps|spd), dmma8": Case((1, 0), (0, 1, 2), unit="dmma8"),
    "(ds|fg)": Case((2, 0), (3, 4)), "(sp|sd) of two functions, K = 4": Case((0, 1), (0, 2), 2, 2),
    "(pd|spd), Cartesian": Case((1, 2), (0, 1, 2), pure=False), "(ss|hs)": Case((0, 0), (5, 0)),
    "(fs|p)": Case((3, 0), (1,)), "(fs|pd)": Case((3, 0), (1, 2)), "(fs|pd), dmma8": Case((3, 0), (1, 2), unit="dmma8"),
}  # fmt: skip
SLOW = "(fs|pd)", "(fs|pd), dmma8"
SMALL = Case((1, 0), (0, 1, 0))


class Tables:
    """Random tables for a case, and what becomes of them; blocks of single shells have some shells of one class."""

    def __init__(self, case, block=2):
        self.case, self.block, rng = case, block, np.random.default_rng(0)
        bases = [basis_of(shells, case.nprim, case.nctr, case.pure) for shells in (case.orbital, case.auxiliary)]
        self.shapes, self.bases = [basis.nshell for basis in bases], bases
        three = ThreeCentre(*bases, backend="cpu")
        self.three, two = rng.normal(size=(three.naux, three.ncol)), rng.normal(size=(three.naux,) * 2)
        self.two = two + two.T

    def made(self, backend):
        """(backend, forces)."""
        three = ThreeCentre(*self.bases, backend=backend)
        pieces = [
            [(number, slice(n, n + self.block))]
            for number, these in enumerate(three.single) for n in range(0, len(these), self.block)
        ]  # fmt: skip
        return three.engine.backend, forces_of(three, three.engine, pieces)

    def run(self, backend, tolerance=0.0, response=True, **part):
        """(derivatives by the centres of the shells, bounds of what is left out)."""
        backend, found = self.made(backend)
        for block in range(len(found.blocks)):
            first, last = found.rows[found.edges[block : block + 2]].tolist()
            found.add_three(backend, block, backend.send(self.three[first:last]), tolerance, response, **part)
        if response:
            found.add_two(backend, backend.send(self.two), tolerance, **part)
        return found.result(), found.left_out

    def on_gpu(self, late=(), **options):
        with running(self.case.unit, late=late):
            return self.run("cuda", **options)


def assert_same(ours, right):
    np.testing.assert_allclose(ours, right, rtol=0, atol=1e-13 * abs(right).max())


@pytest.fixture(params=["lanes", "fused", "rectangles"])
def way(request, monkeypatch):
    """How the steps are done, as in test_forces.py."""
    if request.param != "lanes":
        monkeypatch.setattr(reverse_ways, "lane_plan", lambda *_: None)
    if request.param == "rectangles":
        monkeypatch.setattr(reverse_ways, "fused_reverse", lambda *_: None)
    return request.param


@pytest.mark.races
@pytest.mark.sample("*-(ps|sp)")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_shells(name, way):
    """Each row is the derivative by the centre of a shell, the last one by that of the unit function."""
    tables = Tables(CASES[name])
    (ours, left_out), (right, _) = tables.on_gpu(), tables.run("cpu")
    assert_same(ours, right)
    assert not left_out.any()
    assert not ours[-1].any()
    assert abs(ours.sum(axis=0)).max() < 1e-12 * abs(ours).max()


@pytest.mark.sample("lanes")
def test_pairs_without_primitive_pairs(way):
    """Of a class all pairs may be far apart: they have no derivatives."""
    tables, one = Tables(SMALL), [[1.0]]
    tables.bases[0] = Basis.from_arrays([1, 0], [[1.0], [0.9]], [one, one], [[0.0, 0.0, 0.0], [0.0, 0.0, 400.0]])
    (ours, _), (right, _) = tables.on_gpu(), tables.run("cpu")
    assert_same(ours, right)


@pytest.mark.sample("lanes")
def test_auxiliary_functions_that_do_not_move(way):
    tables = Tables(SMALL)
    (ours, _), (right, _) = tables.on_gpu(response=False), tables.run("cpu", response=False)
    assert_same(ours, right)
    assert not ours[tables.shapes[0] :].any()


@pytest.mark.parametrize("pure", [True, False])
def test_single_shells_have_derivatives_of_one_degree(pure):
    """If they are spherical, or of s or p functions."""
    three = ThreeCentre(basis_of((0,), pure=pure), basis_of((0, 1, 2), pure=pure), backend="cpu")
    for this in three.prepared[1]:
        l = this.facts.l + 1
        one_degree = pure or l < 3
        assert hermite_of(this.facts).nherm == nherm(l) - (nherm(l - 1) if one_degree else 0)
    assert hermite_of(three.prepared[0][0].facts).nherm == nherm(1)


# what is left out -----------------------------------------------------------------------------------------------------


@pytest.mark.sample("lanes")
def test_errors_are_bounded(way):
    """By the bounds of what is left out: the norms of blocks of the tables, and those of pairs without factors."""
    tables = Tables(SMALL)
    (exact, _), before = tables.run("cpu"), 0.0
    for tolerance in (20.0, 1e3):
        found, left_out = tables.on_gpu(tolerance=tolerance)
        assert before < left_out[0]
        assert 0 < abs(found - exact).max() <= left_out[0]
        before = left_out[0]
    assert not found.any()
    with running():
        _, made = tables.made("cuda")
        pairs, singles = (
            [np.concatenate([getattr(this, name) for this in some]) for name in ("own", "derivative")]
            for some in (made.bounds[: len(made.numbers)], made.bounds[len(made.numbers) :])
        )
        sizes, counts = zip(*((this.pairs.nab, len(this)) for this in made.lists[: len(made.numbers)]))
    columns = np.cumsum([0, *np.repeat(sizes, counts)])
    of_three, of_two = (block_norms(table, made.rows, these) for table, these in ((tables.three, columns),
                                                                                  (2 * tables.two, made.rows)))
    bounds = [np.outer(singles[0], pairs[1]) * of_three, np.outer(singles[1], pairs[0]) * of_three,
              np.outer(*singles) * of_two]  # fmt: skip
    for n, total in enumerate(left_out, start=1):
        assert total == pytest.approx(sum((these**n).sum() for these in bounds), rel=1e-12)


# what is divided ------------------------------------------------------------------------------------------------------


@pytest.mark.sample("rectangles-CHUNK*")
@pytest.mark.parametrize("name", LIMITS)
def test_batches_chunks_and_tasks(name, way, monkeypatch):
    module, value = LIMITS[name]
    monkeypatch.setattr(module, name, value if way == "rectangles" else min(1, value))
    tables = Tables(SMALL)
    assert_same(tables.on_gpu()[0], tables.run("cpu")[0])


@pytest.mark.sample("rectangles")
def test_many_parts_of_the_kets(way, monkeypatch):
    """Z has so many parts that some have no kets."""
    monkeypatch.setattr(reverse_ways, "REVERSE", replace(reverse_ways.REVERSE, most_parts=40))
    tables = Tables(SMALL)
    assert_same(tables.on_gpu()[0], tables.run("cpu")[0])


@pytest.mark.thorough
def test_parts_of_the_terms():
    """On unlike machines, whose blocks are others."""
    whole, left_out = Tables(SMALL).on_gpu(tolerance=20.0)
    parts = [Tables(SMALL, block).on_gpu(tolerance=20.0, part=n, parts=3) for n, block in enumerate((1, 2, 7))]
    assert_same(sum(part[0] for part in parts), whole)
    np.testing.assert_allclose(sum(part[1] for part in parts), left_out, rtol=1e-10)


@pytest.mark.sample("{0, 2, 3}")
@pytest.mark.parametrize("late", [{0}, {2}, {0, 2, 3}], ids=str)
def test_streams_that_are_late(late):
    tables = Tables(SMALL)
    assert_same(tables.on_gpu(late=late)[0], tables.run("cpu")[0])


def test_no_memory(monkeypatch):
    tables = Tables(SMALL)
    with running():
        backend, made = tables.made("cuda")
        table = backend.send(tables.three[:1])
        monkeypatch.setattr(GpuBackend, "memory_left", lambda backend: 1000)
        message = r"^gradients of Basis\(.* take at least .* of norms of Gamma, .*, but 1 kB may be used; raise max_mem"
        with pytest.raises(MemoryLimitError, match=message):
            made.add_three(backend, 0, table, 0.0, True)
