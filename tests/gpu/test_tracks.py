"""Builds on several streams at once, on the emulated GPU: each of them in turn works as late as it may."""

from contextlib import nullcontext

import numpy as np
import pytest
from densities import random_densities
from emulator import host_array, running
from molecules import METHANE, molecule

import md4
from md4.errors import MemoryLimitError
from md4.gpu import backend, dealing, device_code, hermite_coulomb, part_plans, paths, tracks
from md4.gpu.backend import GpuBackend
from md4.gpu.buffers import clear, copy_to_host
from md4.gpu.compile import Graph, Kernel, Variant
from md4.gpu.context import DeviceContext
from md4.gpu.dealing import DealtTarget
from md4.gpu.device_code import F64, f64
from md4.gpu.tracks import Tracks

# The engine's stream, the one that counts primitive pairs, and those of tracks 1 and 2.
ENGINE, COUNTING, FIRST, SECOND = range(4)
LATE = [{ENGINE}, {FIRST}, {SECOND}, {FIRST, SECOND}, {ENGINE, COUNTING, FIRST, SECOND}]


def add_to():
    """A factory: target += source + number."""

    def kernel(target: F64, source: F64, number: f64):
        cuda = device_code.cuda  # that of the emulator
        if cuda.threadIdx.x == 0:
            target[0] += source[0] + number

    return Kernel(kernel)


ADD = Variant(add_to, ())


class Work:
    """Three tracks of a context, which add numbers."""

    def __init__(self):
        context = DeviceContext()
        self.tracks = [context, context.on_track(1), context.on_track(2)]
        self.pool, self.zero = context.pool, context.pool.get(1)
        clear(self.zero, context.stream)

    def set(self, track, buffer, number):
        """buffer = number"""
        clear(buffer, self.tracks[track].stream)
        self.add(track, buffer, self.zero, number)

    def add(self, track, buffer, source, number=0.0):
        """buffer += source + number"""
        self.tracks[track].launch(ADD, 1, 32, 0, buffer.part(0, (1,)), source.part(0, (1,)), number)

    def value(self, buffer):
        """What is in a buffer when the engine's stream has come to where it is."""
        found = np.empty(1)
        copy_to_host(found, buffer.pointer, self.tracks[0].stream)
        return float(found[0])


# FIRST is one less here: no stream counts pairs.
@pytest.mark.parametrize("late", [{0}, {1}, {2}, {1, 2}, {0, 1, 2}], ids=str)
def test_order(late):
    """Tracks come after what was given before, and before what follows; so does what is made for all of them."""
    with running(late=late):
        work = Work()
        one, two, three = (work.pool.get(1) for _ in range(3))
        work.set(0, one, 1.0)
        group = work.tracks[0].tracks
        group.begin(3)
        work.add(1, one, work.zero, 10.0)
        work.set(2, two, 100.0)
        for track in range(3):
            with work.tracks[track].alone():
                work.set(track, three, track)
                work.add(track, three, two)
                work.add(track, three, one)
            for other in range(3):
                work.add(other, one, three)
        group.end()
        expected = 11.0
        for track in range(3):
            expected += 3 * (track + 100.0 + expected)
        assert work.value(one) == expected
        assert group.active == 1


@pytest.mark.parametrize("track", range(3))
def test_memory_that_is_still_used(track):
    """A room grows, and another track takes its old memory: it writes there when what was launched before is done."""
    with running(late={0, 1, 2} - {track}):
        work = Work()
        before = (track + 1) % 3
        total = work.pool.get(1)
        clear(total, work.tracks[0].stream)
        work.tracks[0].tracks.begin(3)
        room = work.tracks[before].pool.room("r", 1)
        place = room.pointer
        work.set(before, room, 5.0)
        work.tracks[before].stream.synchronize()
        work.add(before, total, room)
        del room
        work.tracks[before].pool.room("r", 1000)
        taken = work.tracks[track].pool.get(1)
        assert taken.pointer == place
        work.set(track, taken, 7.0)
        work.tracks[0].tracks.end()
        assert work.value(total) == 5.0


def test_rooms_of_tracks():
    """Each track has its own, which count as memory that can be had."""
    with running():
        work = Work()
        rooms = [context.pool.room("r", 10).pointer for context in work.tracks]
        assert len(set(rooms)) == 3
        assert [context.pool.room("r", 10).pointer for context in work.tracks] == rooms
        held = work.pool.held
        work.pool.cap = held
        assert work.pool.left() >= 3 * 80
        work.pool.trim()
        assert work.pool.held < held - 2 * 80


def test_the_mark_of_all_tracks():
    with running(late={0, 1, 2}):
        work = Work()
        rooms = [context.pool.room("r", 1) for context in work.tracks]
        work.tracks[0].tracks.begin(3)
        for track, room in enumerate(rooms):
            work.set(track, room, track + 1.0)
        mark = work.tracks[0].tracks.mark()
        work.set(1, rooms[1], 9.0)
        mark()
        assert [host_array(room, "float64")[0] for room in rooms] == [1.0, 2.0, 3.0]
        work.tracks[0].tracks.end()


@pytest.mark.parametrize("most, found", [(4, [1, 1, 2, 3, 4]), (1, [1] * 5)])
def test_number_of_tracks(most, found, monkeypatch):
    monkeypatch.setattr(tracks, "MOST_TRACKS", most)
    monkeypatch.setattr(tracks, "TRACK_SHARE", 100)
    assert [tracks.number_of_tracks(left) for left in (0, 99, 100, 250, 10**6)] == found


# builds ---------------------------------------------------------------------------------------------------------------


def basis_of(*ls, planar=False):
    """A shell of each angular momentum; `planar`: on centres with the same z."""
    count, centres = len(ls), np.random.default_rng(0).normal(size=(len(ls), 3))
    centres[:, 2] *= not planar
    return md4.Basis.from_arrays(ls, [[0.7]] * count, [[1.0]] * count, centres)


@pytest.fixture(autouse=True)
def three(monkeypatch):
    """Three tracks."""
    monkeypatch.setattr(tracks, "MOST_TRACKS", 3)


class Builds:
    """Builds on the emulated GPU and on the CPU."""

    def __init__(self, monkeypatch, *ls, planar=False, **options):
        self.basis, self.number, self.used, self.repeated = basis_of(*ls, planar=planar), 0, set(), 0
        self.jk, self.right = (
            md4.JK(self.basis, backend=name, progress=False, **options) for name in ("cuda", "cpu")
        )  # fmt: skip
        use, again = DealtTarget.use, Graph.launch

        def noting(target, track):
            self.used.add(track)
            use(target, track)

        def counting(graph, stream):
            self.repeated += 1
            again(graph, stream)

        monkeypatch.setattr(DealtTarget, "use", noting)
        monkeypatch.setattr(Graph, "launch", counting)

    @property
    def engine(self):
        return self.jk.engine

    def error(self, **options):
        """The largest relative error of J and K of the next build."""
        self.number += 1
        dm = np.random.default_rng(self.number).normal(size=(self.basis.nao, self.basis.nao))
        ours, right = (jk.get_jk(dm + dm.T, **options) for jk in (self.jk, self.right))
        pairs = [(one, other) for one, other in zip(ours, right) if other is not None]
        return max(float(abs(one - other).max() / abs(other).max()) for one, other in pairs)


def assert_right(error):
    assert error < 1e-13


@pytest.mark.sample("{0, 1, 2, 3}")
@pytest.mark.parametrize("late", LATE, ids=str)
def test_builds(late, monkeypatch):
    """The first one makes H and first AOs while others are at work, the second one records, the third one repeats."""
    with running(late=late):
        builds = Builds(monkeypatch, 1, 0)
        for number in range(3):
            builds.repeated = 0
            assert_right(builds.error())
            assert builds.used == {0, 1, 2}
            assert (builds.repeated > 0) == (number == 2)
        assert {key[-1] for key in builds.engine.backend.context.recorder.records} == {0, 1, 2}
        builds.used.clear()
        assert_right(builds.error(with_k=False))
        assert builds.used == {0, 1, 2}


@pytest.mark.thorough
def test_builds_of_parts(monkeypatch):
    """Even and odd parts of classes, of all that can be made in parts: their H, their blocks, and what is repeated."""

    def every_part(unit, bra, ket, axis):
        ways = part_plans.build_ways(unit, bra.facts, ket.facts, 1.0, 1.0, False, axis)
        return next((way for _, way in ways if len(way) > 1), ())

    monkeypatch.setattr(backend, "part_plans", every_part)
    with running(late={ENGINE, SECOND}) as machine:
        builds = Builds(monkeypatch, 2, 1, 0, planar=True)
        for _ in range(3):
            assert_right(builds.error())
        assert builds.used == {0, 1, 2}
        records = builds.engine.backend.context.recorder.records.values()
        assert any(len(record.forms) == 2 for record in records)
    assert "digest_mirrored" in machine.kernels


@pytest.mark.sample("{3}")
@pytest.mark.parametrize("late", LATE, ids=str)
def test_lists_of_quartets(late, monkeypatch):
    """Quartets that are selected and digested in place, in both precisions; each is counted once."""
    monkeypatch.setattr(paths, "FEWEST_QUARTETS", 1)
    with running(late=late) as machine:
        builds = Builds(monkeypatch, 1, 0, 0)
        assert builds.error() < 1e-12
        assert builds.used == {0, 1, 2}
        assert "digest_in_place" in machine.kernels
        assert builds.jk.stats.computed == builds.jk.stats.wanted == builds.right.stats.wanted


@pytest.mark.sample("True-{3}")
@pytest.mark.parametrize("late", LATE, ids=str)
@pytest.mark.parametrize("single", [False, True])
def test_j_alone(single, late, monkeypatch):
    """Several degrees at once, in both precisions."""
    monkeypatch.setattr(hermite_coulomb, "SINGLE_RATIO", 1e60 if single else 0.0)
    monkeypatch.setattr(hermite_coulomb, "FEWEST_SINGLES", 0)
    with running(late=late) as machine:
        builds = Builds(monkeypatch, 1, 1, 0, 0, direct_scf_tol=1e-30)
        for _ in range(2):
            assert builds.error(with_k=False) < (1e-6 if single else 1e-13)
        assert builds.used == {0, 1, 2}
        assert machine.kernels >= {"expanded_order", "correlation_by_threads"}
        assert ("narrowed" in machine.kernels) == single


# What is left out, streams that are late then, and how many builds are right before.
MISSING = {
    "begin": (lambda tracks, count: setattr(tracks, "active", count), {ENGINE}, 1),
    "end": (lambda tracks: setattr(tracks, "active", 1), {FIRST, SECOND}, 1),
    "alone": (lambda tracks, track: nullcontext(), {ENGINE}, 0),
}


@pytest.mark.sample("alone")
@pytest.mark.parametrize("name", MISSING)
def test_each_of_these_is_needed(name, monkeypatch):
    """Without it the emulator finds builds that are wrong."""
    without, late, before = MISSING[name]
    with running(late=late):
        builds = Builds(monkeypatch, 1, 0)
        for _ in range(before):
            assert_right(builds.error())
        monkeypatch.setattr(Tracks, name, without)
        with pytest.raises(AssertionError):
            assert_right(builds.error())


@pytest.mark.thorough
@pytest.mark.parametrize("late", LATE, ids=str)
def test_memory_is_refused(late, monkeypatch):
    """H matrices are dropped and made again, in memory that tracks at work still read."""
    scratch, refused = GpuBackend.scratch, []

    def little(steps, shape):
        if shape[0] * shape[1] > 1:
            refused.append(steps.context.track)
            raise MemoryLimitError("no memory.")
        return scratch(steps, shape)

    with running(late=late):
        builds = Builds(monkeypatch, 1, 0, 0)
        monkeypatch.setattr(GpuBackend, "scratch", little)
        for _ in range(2):
            assert_right(builds.error())
            assert set(refused) > {1}
            refused.clear()


def test_little_memory(monkeypatch):
    """One track where the cap has no room for more, or not for the H matrices of all lists."""
    with running():
        builds = Builds(monkeypatch, 0, 1, max_memory=100)
        assert_right(builds.error())
        assert builds.used == {0}
    with running():
        builds = Builds(monkeypatch, 0, 1)
        builds.jk.lists  # noqa: B018 makes them
        store = builds.jk.team.workers[0].store
        store.most = store.limit = 1
        assert_right(builds.error())
        assert builds.used == {0}
        assert_right(builds.error(with_k=False))
        assert builds.used == {0, 1, 2}


@pytest.mark.thorough
@pytest.mark.parametrize("number", [1, 5, 12])
def test_an_interrupt(number, monkeypatch):
    """At a launch: what tracks were given before is done before the context is used again."""
    with running(late={FIRST, SECOND}):
        builds, launch, count = Builds(monkeypatch, 1, 0), DeviceContext.launch, []
        assert_right(builds.error())
        right = builds.engine.compute([[0, 0]], [[0, 0]]).copy_to_host()

        def failing(context, *args):
            count.append(context.track)
            if len(count) == number:
                raise KeyboardInterrupt
            launch(context, *args)

        monkeypatch.setattr(DeviceContext, "launch", failing)
        with pytest.raises(KeyboardInterrupt):
            builds.error()
        monkeypatch.setattr(DeviceContext, "launch", launch)
        ours = builds.engine.compute([[0, 0]], [[0, 0]])
        builds.engine.stream.synchronize()
        np.testing.assert_array_equal(ours.copy_to_host(), right)
        for _ in range(3):
            assert_right(builds.error())


@pytest.mark.thorough
@pytest.mark.parametrize("next_is_a_build", [True, False])
def test_an_interrupt_at_the_end(next_is_a_build, monkeypatch):
    """Tracks that were not waited for: who takes memory waits for them, and so does the next build."""
    with running(late={FIRST, SECOND}):
        builds, join = Builds(monkeypatch, 1, 0), Tracks.join

        def failing(tracks, first, second):
            if (first, second) == (1, 0):
                raise KeyboardInterrupt
            join(tracks, first, second)

        assert_right(builds.error())
        right = builds.engine.compute([[0, 0]], [[0, 0]]).copy_to_host()
        monkeypatch.setattr(Tracks, "join", failing)
        with pytest.raises(KeyboardInterrupt):
            builds.error()
        monkeypatch.setattr(Tracks, "join", join)
        tracks = builds.engine.backend.context.tracks
        assert tracks.active == 3
        if not next_is_a_build:
            ours = builds.engine.compute([[0, 0]], [[0, 0]])
            builds.engine.stream.synchronize()
            np.testing.assert_array_equal(ours.copy_to_host(), right)
        assert_right(builds.error())
        assert tracks.active == 1


@pytest.mark.gpu
@pytest.mark.parametrize("with_k", [True, False])
def test_on_a_device(gpu, with_k, monkeypatch):
    """Long and short tasks on all tracks, builds one after the other: the same numbers as with one track."""
    mol = molecule(METHANE, "cc-pvtz")
    dm = random_densities(mol)[0]
    monkeypatch.setattr(tracks, "MOST_TRACKS", 1)
    expected = md4.get_jk(mol, dm, backend="cuda", with_k=with_k)
    monkeypatch.setattr(tracks, "MOST_TRACKS", 4)
    for seconds in (0.0, 1.5e-4, 1.0):
        monkeypatch.setattr(dealing, "TRACK_SECONDS", seconds)
        jk = md4.JK(mol, backend="cuda")
        for _ in range(4):
            for ours, right in zip(jk.get_jk(dm, with_k=with_k), expected):
                assert right is None or abs(ours - right).max() < 1e-12 * abs(right).max()
