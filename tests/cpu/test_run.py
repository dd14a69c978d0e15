"""Tasks: what they cover, screening, little memory, and that threads make the same as one."""

import threading

import numpy as np
import pytest
from pair_lists import TRIANGLE, few_shells, mixed_basis, pairs_of, two_classes

import md4
from md4.cpu.emit.vectors import LANES
from md4.cpu.groups import FIELD, SAME, STATE, TASK
from md4.cpu.run import WORK_SECONDS, Extent, Lists, by_work, run_lists, sizes_of_pairs, task_rows, work_of
from md4.engine import Engine
from md4.plan import ListPair
from md4.shells.basis import Basis


@pytest.fixture(scope="module", params=[two_classes, few_shells])
def engine(request):
    return Engine(request.param(), backend="cpu")


@pytest.fixture(scope="module")
def lists(engine):
    """Prepared lists of ss, ps and pp pairs."""
    s, p = (np.flatnonzero(engine.bra_basis.classes[:, 0] == l).tolist() for l in (0, 1))
    return [engine.prepare(pairs_of(*ranges)) for ranges in ((s, s), (p, s), (p, p))]


def all_pairs(lists):
    """`ListPair` of all unordered pairs of lists."""
    return [ListPair(bra, ket, bra is ket) for n, bra in enumerate(lists) for ket in lists[: n + 1]]


class Quartets:
    """Collects which quartets of which lists were made, with their blocks, and by which threads."""

    def __init__(self, lists, wait=None):
        self.lists, self.made, self.threads, self.wait = lists, {}, set(), wait

    def __call__(self, thread, items, tasks, table, blocks):
        for n, row, group, place in items.tolist():
            bra, ket = (self.number(table[tasks[n, side]]) for side in (TASK.bra, TASK.ket))
            one, two = (self.lists[number] for number in (bra, ket))
            block = blocks[place : place + one.pairs.nab * two.pairs.nab * LANES]
            block = block.reshape(one.pairs.nab, two.pairs.nab, LANES).copy()
            first = group * two.data.per_group
            for m, pair in enumerate(two.data.order[first : first + two.data.per_group].tolist()):
                if tasks[n, TASK.same] != SAME or first + m <= row:
                    key = bra, int(one.data.order[row]), ket, pair
                    assert key not in self.made
                    self.made[key] = block[..., m * two.data.width]
        if thread not in self.threads:
            self.threads.add(thread)
            if self.wait is not None:
                self.wait.wait(60)

    def number(self, row):
        """Which of the lists a row of the table of lists is."""
        return [this.data.order.ctypes.data for this in self.lists].index(row[FIELD.order])


def quartets_of(lists, pair):
    """Keys of `Quartets` of a `ListPair`, without regard to the order of bra and ket."""
    bra, ket = (lists.index(side) for side in pair[:2])
    return {
        frozenset([(bra, n), (ket, m)])
        for n in range(len(pair.bra))
        for m in range(n + 1 if pair.same else len(pair.ket))
    }


def test_all_quartets_once(engine, lists):
    take, pairs = Quartets(lists), all_pairs(lists)
    done = run_lists(engine.backend, pairs, take)
    assert done == len(take.made)
    assert {frozenset([key[:2], key[2:]]) for key in take.made} == set().union(*(quartets_of(lists, p) for p in pairs))
    for (bra, n, ket, m), block in list(take.made.items())[::97]:
        one, two = (lists[number].pairs.pairs[row] for number, row in ((bra, n), (ket, m)))
        expected = engine.compute([one], [two]).reshape(block.shape)
        assert abs(block - expected).max() <= 1e-13 * abs(expected).max()


@pytest.mark.parametrize("parts", [3, 50])
def test_parts_of_all_pairs_are_all_quartets_once(two_threads, engine, lists, parts):
    """Also where a pair of lists has fewer rows than parts."""
    take, pairs = Quartets(lists), all_pairs(lists)
    done = [
        run_lists(engine.backend, [pair._replace(part=part, parts=parts) for pair in pairs], take)
        for part in range(parts)
    ]
    assert sum(done) == len(take.made)
    assert {frozenset([key[:2], key[2:]]) for key in take.made} == set().union(*(quartets_of(lists, p) for p in pairs))


def test_many_tasks_and_threads_make_the_same(engine, lists, monkeypatch, two_threads):
    """To the last bit: a block does not depend on what is made beside it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one, two = Quartets(lists), Quartets(lists, threading.Barrier(2))
    run_lists(engine.backend, all_pairs(lists), one)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr("md4.cpu.run.TASKS", 40)
    monkeypatch.setattr("md4.cpu.run.ITEMS", 2)  # so that no thread takes all tasks at once
    engine.backend.memory.kept.clear()
    run_lists(engine.backend, all_pairs(lists), two)
    assert one.threads == {0}
    assert two.threads == {0, 1}
    assert one.made.keys() == two.made.keys()
    for key, block in one.made.items():
        np.testing.assert_array_equal(block, two.made[key])


@pytest.mark.parametrize("most", [1, 1e3, 1e5, 1e9])
def test_tasks_cover_each_bra_pair_once(lists, most):
    for pair in all_pairs(lists):
        (this,), table = by_work([pair]), Lists()
        rows = task_rows(this, table, most)
        ends = [(row[TASK.first], row[TASK.last]) for row in rows]
        assert [n for first, last in ends for n in range(first, last)] == list(range(len(this.bra)))
        assert len(rows) <= max(1, -(-this.work // most))
        assert len(table.table()) == (1 if pair.same else 2)
        assert len(rows) > 1 or this.work <= most


def test_the_side_with_less_work_is_the_bra(lists):
    for pair in all_pairs(lists):
        (this,) = by_work([pair])
        if pair.same:
            assert not this.swapped
            continue
        one, two = (Extent.of(side.pairs) for side in pair[:2])
        assert this.work == min(work_of(one, two), work_of(two, one))
        assert (this.bra, this.ket) == ((pair.ket, pair.bra) if this.swapped else (pair.bra, pair.ket))


# screening ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("tolerance", [0.0, 1e-6, 1e-3, 1.0])
def test_bounds(engine, lists, same, tolerance):
    """A group of kets is left out if the largest of its bounds is too small, whatever the order of the list."""
    rng = np.random.default_rng(7)
    bra, ket = lists[0], lists[0] if same else lists[2]
    bounds = [10 ** rng.uniform(-5, 0, len(this)) for this in (bra, ket)]
    bounds[0][1] = 0.0
    take, order = Quartets(lists), ket.data.order
    done = run_lists(engine.backend, [ListPair(bra, ket, same, *bounds)], take, tolerance=tolerance)
    size = ket.data.per_group
    of_groups = [bounds[1][order[n : n + size]].max() for n in range(0, len(ket), size)]
    expected = {
        (lists.index(bra), int(bra.data.order[n]), lists.index(ket), int(order[m]))
        for n in range(len(bra))
        for m in range(n + 1 if same else len(ket))
        if bounds[0][bra.data.order[n]] * of_groups[m // size] >= tolerance
    }
    assert take.made.keys() == expected
    assert done == len(expected)
    assert (len(expected) == 0) == (tolerance == 1.0)


def test_progress_is_told(engine, lists, monkeypatch):
    monkeypatch.setattr("md4.cpu.run.ITEMS", 1)
    engine.backend.memory.kept.clear()
    told, pairs = [], all_pairs(lists)
    run_lists(engine.backend, pairs, Quartets(lists), report=told.append)
    every = by_work(pairs)
    assert sum(told) == pytest.approx(WORK_SECONDS * sum(this.work for this in every))
    assert len(told) > 10
    assert min(told) >= 0


def test_progress_counts_work(monkeypatch):
    """Not quartets or integrals: those of most work come first, and a bar of them would promise hours."""
    monkeypatch.setattr("md4.cpu.run.ITEMS", 1)
    basis, told = Basis([*mixed_basis(0).shells, *mixed_basis(3).shells]), []
    engine = Engine(basis, backend="cpu")
    lists = [engine.prepare(pairs_of(these, these)) for these in (range(6), range(6, 12))]
    run_lists(engine.backend, all_pairs(lists), Quartets(lists), report=told.append)
    assert told[0] > 100 * told[-2] > 0


# little memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("out", "items"), [(1, 4096), (700, 4096), (1 << 17, 1), (1 << 17, 7)])
@pytest.mark.parametrize("make", [two_classes, few_shells])
def test_where_a_thread_stops_does_not_matter(make, out, items, monkeypatch):
    """The memory for blocks may be full at any group of kets; integrals, J and K are the same to the last bit."""
    basis = make()
    dm = np.random.default_rng(0).normal(size=(2, basis.nao, basis.nao))

    def results():
        engine = Engine(basis, backend="cpu")
        s, p = (np.flatnonzero(basis.classes[:, 0] == l).tolist() for l in (0, 1))
        block = engine.compute(pairs_of(p, s), pairs_of(p, p))
        tensor = md4.contract.tensor.ao_tensor(engine, "s8")
        return block, tensor, *md4.get_jk(basis, dm, 0, backend="cpu")

    expected = results()
    monkeypatch.setattr("md4.cpu.backend.OUT", out)
    monkeypatch.setattr("md4.cpu.run.ITEMS", items)
    for one, two in zip(results(), expected):
        np.testing.assert_array_equal(one, two)


def test_the_least_workspace_is_enough(monkeypatch):
    """One block of the largest class at a time, where there is no memory for more."""
    engine = Engine(mixed_basis(2), backend="cpu")
    expected = engine.compute(TRIANGLE, TRIANGLE)
    pairs = engine.prepare(TRIANGLE).pairs
    small = Engine(mixed_basis(2), backend="cpu", max_memory=200)
    monkeypatch.setattr("md4.cpu.backend.WORKSPACE_SHARE", 0.0)
    np.testing.assert_array_equal(small.compute(TRIANGLE, TRIANGLE), expected)
    (work,) = small.backend.memory.kept
    assert sum(array.nbytes for array in work) <= sizes_of_pairs(pairs, pairs).nbytes
    assert len(work.out) == pairs.nab**2 * LANES
    assert work.state[STATE.quartets] == len(TRIANGLE) ** 2
