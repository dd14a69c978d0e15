"""Launches that are recorded and launched again, on the emulated GPU: which, and that builds stay right."""

from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
from emulator import host_array, running

import md4
from md4.errors import MemoryLimitError
from md4.gpu import device_code, digest, part_plans, paths, recording
from md4.gpu.buffers import clear
from md4.gpu.compile import Graph, Kernel, Launcher, Variant
from md4.gpu.context import DeviceContext
from md4.gpu.device_code import F64, f64
from md4.gpu.pool import Pool


def add_number():
    """A factory of a kernel with arguments of all sorts that differ between launches."""

    def kernel(target: F64, number: f64):
        cuda = device_code.cuda  # that of the emulator
        if cuda.threadIdx.x == 0:
            target[cuda.blockIdx.x] += number

    return Kernel(kernel)


ADD = Variant(add_number, ())


class Side:
    """A list whose H has an address."""

    def __init__(self, pointer):
        self.pointer = pointer

    def h(self, form):
        return SimpleNamespace(array=SimpleNamespace(pointer=self.pointer))


class Rectangle:
    """A rectangle of a context: adds numbers to a room, and what `between` does."""

    def __init__(self, context, key="key", size=4):
        self.context, self.key, self.size = context, key, size
        self.bra, self.ket = Side(1), Side(2)

    def run(self, between=lambda: None):
        """Whether its launches were repeated."""
        recorder = self.context.recorder
        if recorder.repeat(self.key, self.bra, self.ket, self.context.handle):
            return True
        target = self.context.pool.room("r", self.size)
        self.context.launch(ADD, 1, 32, 0, target, 1.0)
        between()
        self.context.launch(ADD, self.size, 32, 0, target, 10.0)
        recorder.end(self.key, self.bra, self.ket, [(None, "one", "two")], self.context.handle)
        return False


@pytest.fixture
def context():
    """A context whose room 'r' is there, and holds zeros."""
    with running():
        context = DeviceContext()
        clear(context.pool.room("r", 100), context.stream)
        yield context


def recorded(rectangle):
    """The rectangle, which the first two builds have recorded."""
    for _ in range(2):
        rectangle.context.recorder.next_build()
        assert not rectangle.run()
    return rectangle


def test_the_third_build_repeats(context):
    rectangle = recorded(Rectangle(context))
    room = context.pool.room("r", 4)
    assert host_array(room, "float64").tolist() == [22.0, 20.0, 20.0, 20.0]
    context.recorder.next_build()
    assert rectangle.run()
    assert host_array(room, "float64").tolist() == [33.0, 30.0, 30.0, 30.0]
    assert not Rectangle(context, "another").run()
    assert context.recorder.count == 2


def test_h_at_another_address(context):
    rectangle = recorded(Rectangle(context))
    for side in (rectangle.bra, rectangle.ket):
        side.pointer += 8
        assert not rectangle.run()
        assert rectangle.run()


def test_rooms_at_another_address(context):
    rectangle = recorded(Rectangle(context))
    context.pool.room("r", 1000)
    assert not rectangle.run()
    assert rectangle.run()
    context.pool.left()
    assert rectangle.run()
    context.pool.trim()
    assert not rectangle.run()  # asks for the room
    assert not rectangle.run()  # finds it, and is recorded
    assert rectangle.run()


def test_a_smaller_room_at_the_same_address(context):
    """The driver may give an address away again with less memory behind it."""
    rectangle = recorded(Rectangle(context))
    (record,) = context.recorder.records.values()
    ((name, pointer, size),) = record.rooms
    assert (name, pointer, size) == ("r", context.pool.rooms["r"].pointer, 32)
    record.rooms = [(name, pointer, context.pool.rooms["r"].nbytes + 8)]
    assert not rectangle.run()


@pytest.mark.parametrize("work", [
    lambda context: context.pool.get(10),
    lambda context: context.pool.fresh(10),
    lambda context: context.pool.upload([np.zeros(3)], context.stream),
    lambda context: context.pool.room("new", 3),
    lambda context: context.pool.trim(),
    lambda context: clear(context.pool.room("r", 4).part(3, (1,)), context.stream),
])  # fmt: skip
def test_other_work_is_not_recorded(context, work):
    """Neither is what depends on it."""
    rectangle = Rectangle(context)
    for _ in range(4):
        context.recorder.next_build()
        done = rectangle.run(lambda: work(context))
        if done:
            break
        assert context.recorder.launches is None
    # A room that is new at first is there later; all else is done each time.
    assert done == ("new" in context.pool.rooms)


def test_work_of_another_thread_does_not_matter(context):
    """Such as that of another device, which copies what it needs meanwhile."""
    other = DeviceContext()
    buffer = other.pool.get(1)

    def elsewhere():
        thread = Thread(target=clear, args=(buffer, other.stream))
        thread.start()
        thread.join()

    rectangle = Rectangle(context)
    for expected in (False, False, True):
        context.recorder.next_build()
        assert rectangle.run(elsewhere) == expected


def test_an_exception_ends_a_recording(context):
    rectangle, other = Rectangle(context), Rectangle(context, "other")

    def fail():
        raise KeyboardInterrupt

    for between in (lambda: None, fail, fail):
        context.recorder.next_build()
        try:
            rectangle.run(between)
        except KeyboardInterrupt:
            context.recorder.end(other.key, other.bra, other.ket, ("one", "two"), context.handle)
            assert not context.recorder.records
    assert not rectangle.run()
    assert context.recorder.records[rectangle.key].graph.count == 2
    assert rectangle.run()


def test_their_number_is_bounded(context, monkeypatch):
    monkeypatch.setattr(recording, "MOST_LAUNCHES", 5)
    rectangles = [Rectangle(context, n) for n in range(8)]
    for _ in range(3):
        context.recorder.next_build()
        repeated = [rectangle.run() for rectangle in rectangles]
    assert repeated == [True] * 2 + [False] * 6
    assert context.recorder.count == 4
    assert len(context.recorder.seen) == 5
    long = Rectangle(context, "long")

    def many():
        for _ in range(10):
            context.launch(ADD, 1, 32, 0, context.pool.room("r", 4), 1.0)

    for _ in range(3):
        context.recorder.count = 0
        assert not long.run(many)
    assert len(context.recorder.records) == 2


def test_what_does_not_occur_is_forgotten(context):
    """After two builds, so that two operators may alternate."""
    one, two = (Rectangle(context, key) for key in ("one", "two"))
    for rectangle in (one, two, one, two):
        context.recorder.next_build()
        assert not rectangle.run()
    for rectangle in (one, two, one, two):
        context.recorder.next_build()
        assert rectangle.run()
    for _ in range(3):
        context.recorder.next_build()
    assert (context.recorder.records, context.recorder.seen, context.recorder.count) == ({}, {}, 0)


def test_repeated_rooms_stay_in_use():
    """A room that is repeated cannot be freed before the launches are made."""
    with running():
        pool = Pool()
        pool.room("r", 100)
        places = pool.room_places({"r": 800})
        loans = pool.rooms_at(places)
        pool.trim()
        assert pool.held == loans[0].nbytes
        del loans
        pool.trim()
        assert pool.held == 0
        assert pool.rooms_at(places) is None
        assert pool.room_places({"r": 800}) is None


# builds ---------------------------------------------------------------------------------------------------------------


def basis_of(*ls):
    """A shell of each angular momentum."""
    count = len(ls)
    return md4.Basis.from_arrays(ls, [[0.7]] * count, [[1.0]] * count, np.random.default_rng(0).normal(size=(count, 3)))


class Builds:
    """Builds on the emulated GPU, each compared with the CPU, with a density of its own."""

    def __init__(self, basis, monkeypatch, **options):
        self.basis, self.number = basis, 0
        self.jk, self.right = (md4.JK(basis, backend=name, progress=False, **options) for name in ("cuda", "cpu"))
        self.repeated, again, self.launched = [], Graph.launch, []
        launch = Launcher.launch

        def counting(graph, stream):
            self.repeated.append(graph.count)
            again(graph, stream)

        def noting(launcher, *args):
            self.launched.append(args[0])
            launch(launcher, *args)

        monkeypatch.setattr(Graph, "launch", counting)
        monkeypatch.setattr(Launcher, "launch", noting)

    @property
    def recorder(self):
        return self.jk.engine.backend.context.recorder

    @property
    def pool(self):
        return self.jk.engine.backend.context.pool

    @property
    def store(self):
        return self.jk.team.workers[0].store

    def run(self, count=1, jk=None, **options):
        """(launches that were repeated, launches that were not) of the last of some builds."""
        for _ in range(count):
            self.repeated.clear()
            self.launched.clear()
            self.number += 1
            dm = np.random.default_rng(self.number).normal(size=(self.basis.nao, self.basis.nao))
            ours, right = (each.get_jk(dm + dm.T, **options) for each in (jk or self.jk, self.right))
            for one, other in zip(ours, right):
                if other is None:
                    continue
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-13 * abs(other).max())
        return sum(self.repeated), len(self.launched)


@pytest.fixture
def builds(monkeypatch):
    """Builds of two shells, in several rectangles, three of which have been made; the third one repeats the second."""
    with running("dmma16"):
        monkeypatch.setattr(digest, "BLOCK_BYTES", 24)
        builds = Builds(basis_of(0, 0), monkeypatch)
        _, every = builds.run(2)
        assert builds.run() == (every, 0)
        assert every == builds.recorder.count > 6
        yield builds


def test_other_densities(builds):
    every = builds.recorder.count
    assert builds.run(2) == (every, 0)
    for other_numbers_of_matrices in ({"hermi": 0}, {"with_j": False}):
        assert builds.run(**other_numbers_of_matrices)[0] == 0
        assert builds.run() == (every, 0)


@pytest.fixture
def no_plans_kept():
    """Nothing is known of the plans that other tests have had made, nor of this one's later."""
    found = part_plans.whole_ways, part_plans.fastest_way, paths.ranked
    for function in found:
        function.cache_clear()
    yield
    for function in found:
        function.cache_clear()


@pytest.mark.sample("True")
@pytest.mark.parametrize("fused", [True, False])
def test_all_paths(fused, no_plans_kept, monkeypatch):
    """Rooms for r and (ab|q], several classes; without the fused path, others of several kernels are taken."""
    if not fused:
        monkeypatch.setattr(paths.Fused, "supports", lambda *_: False)
    with running("dmma16") as machine:
        builds = Builds(basis_of(1, 0), monkeypatch)
        _, every = builds.run(2)
        assert builds.run() == (every, 0)
    used = "fused_transforms" if fused else "whole_panel"
    assert machine.kernels >= {"r_in_registers", used, "digest_rows"}


@pytest.mark.thorough
def test_other_tiles(builds, monkeypatch):
    """Rectangles that are the same as before are repeated, others are not."""
    every = builds.recorder.count
    monkeypatch.setattr(digest, "BLOCK_BYTES", 16)
    repeated, others = builds.run()
    assert repeated < every
    assert others > 0
    monkeypatch.setattr(digest, "BLOCK_BYTES", 24)
    assert builds.run() == (every, 0)


@pytest.mark.thorough
def test_another_operator(builds):
    every = builds.recorder.count
    assert builds.run(omega=0.3) == (0, every)
    assert builds.run() == (every, 0)
    assert builds.run(omega=0.3) == (0, every)
    assert builds.run(omega=0.3) == (every, 0)
    assert builds.run(omega=0.4) == (0, every)


def hold(pool, sizes):
    """Buffers of so many bytes that hold NaN."""
    held = [pool.get(size // 8) for size in sizes]
    for buffer in held:
        host_array(buffer, "float64")[:] = np.nan
    return held


def test_dropped_h(builds):
    """Made again elsewhere, while others have its memory."""
    every = builds.recorder.count
    (piece,) = builds.store.held
    before = {h.array.pointer for h in piece._h.values()}
    sizes = [h.array.nbytes for h in piece._h.values()]
    builds.store.clear()
    held = hold(builds.pool, sizes * 4)
    assert builds.run()[0] == 0
    assert before.isdisjoint(h.array.pointer for h in piece._h.values())
    del held
    builds.run(2)
    assert builds.run() == (every, 0)


@pytest.mark.thorough
def test_dropped_h_at_the_same_address(builds, monkeypatch):
    """It is made again before the launches that read it."""
    every = builds.recorder.count
    (piece,) = builds.store.held
    record = next(iter(builds.recorder.records.values()))
    ((_, *forms),) = record.forms
    same = [piece._h[form].array for form in forms]
    for buffer in same:
        host_array(buffer, "float64")[:] = np.nan
    builds.store.clear()

    def same_memory(pool, items):
        buffer = same.pop(0)
        assert buffer.size == items
        return buffer

    made = type(builds.jk.engine.backend).hermite

    def made_there(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pool, "get", same_memory)
            return made(*args)

    monkeypatch.setattr(type(builds.jk.engine.backend), "hermite", made_there)
    assert builds.run() == (every, 2)
    assert [piece._h[form].array.pointer for form in forms] == record.h


def test_moved_rooms(builds):
    every = builds.recorder.count
    before = {name: loan.pointer for name, loan in builds.pool.rooms.items()}
    names = [name for name in before if name in ("r", "block")]
    held = hold(builds.pool, [builds.pool.rooms.pop(name).nbytes for name in names] * 2)
    assert builds.run()[0] == 0
    assert all(builds.pool.rooms[name].pointer != before[name] for name in names)
    del held
    builds.run(2)
    assert builds.run() == (every, 0)


@pytest.mark.thorough
def test_memory_that_is_given_back(builds):
    """Rooms that nobody uses are freed between builds, and made again."""
    every = builds.recorder.count
    builds.pool.trim()
    builds.run(2)
    assert builds.run() == (every, 0)


@pytest.mark.thorough
def test_halves(builds, monkeypatch):
    """Where there is no memory for a rectangle, its halves are made instead, and repeated."""
    room = Pool.room

    def refused(pool, name, items):
        if name == "block" and items > 1:
            raise MemoryLimitError("no memory.")
        return room(pool, name, items)

    monkeypatch.setattr(Pool, "room", refused)
    assert builds.run()[0] > 0  # whose rooms are there
    builds.pool.trim()
    repeated, others = builds.run()
    assert repeated < others
    builds.run(2)
    repeated, others = builds.run()
    assert repeated > others


@pytest.mark.thorough
def test_lists_made_again(builds):
    """Other pair data in the same context, perhaps in the same memory: nothing is repeated."""
    every = builds.recorder.count
    assert builds.run(direct_scf_tol=1e-15)[0] == 0
    builds.run(2, direct_scf_tol=1e-15)
    assert builds.run(direct_scf_tol=1e-15) == (every, 0)


@pytest.mark.thorough
def test_two_objects_of_one_context(builds):
    """Each repeats its own."""
    every = builds.recorder.count
    other = md4.JK(builds.basis, backend="cuda", progress=False)
    other.team.workers[0].engine = builds.jk.engine
    assert builds.run(jk=other)[0] == 0
    for _ in range(2):
        builds.run(jk=other)
        builds.run()
    assert [builds.run(jk=jk) for jk in (other, builds.jk)] == [(every, 0)] * 2


def test_interrupted_while_it_is_repeated(builds, monkeypatch):
    every, again = builds.recorder.count, Graph.launch

    def failing(graph, stream):
        again(graph, stream)
        raise KeyboardInterrupt

    monkeypatch.setattr(Graph, "launch", failing)
    with pytest.raises(KeyboardInterrupt):
        builds.run()
    monkeypatch.setattr(Graph, "launch", again)
    assert builds.run() == (every, 0)


@pytest.mark.sample("3")
@pytest.mark.parametrize("number", [2, 3, 5])
def test_interrupted_while_it_is_recorded(monkeypatch, number):
    """At one of its launches."""
    with running("dmma16"):
        monkeypatch.setattr(digest, "BLOCK_BYTES", 24)
        builds, launch = Builds(basis_of(0, 0), monkeypatch), DeviceContext.launch
        builds.run()

        def failing(*args):
            if len(builds.launched) == number:
                raise KeyboardInterrupt
            launch(*args)

        monkeypatch.setattr(DeviceContext, "launch", failing)
        with pytest.raises(KeyboardInterrupt):
            builds.run()
        monkeypatch.setattr(DeviceContext, "launch", launch)
        builds.jk.engine.compute([[0, 1]], [[0, 1]])  # is in no record
        assert builds.run(3)[1] == 0
