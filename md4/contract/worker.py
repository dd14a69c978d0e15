"""What one device does in a build of J and K: its pair lists, their H matrices, and its part of the sums."""

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np

from md4.contract.screening import Statistics
from md4.contract.work import EACH, Dealer
from md4.contract.workspace import HermiteStore, least_block
from md4.errors import MemoryLimitError
from md4.plan import part_of
from md4.support.display import size_text
from md4.support.log import log

# Shares of the memory that may be used: of one block of integrals, and of the H matrices.
BLOCK_SHARE = 0.15
HERMITE_SHARE = 0.5
# What a rectangle costs, about, beside its quartets: for launches and for what of the device they leave idle.
RECTANGLE_SECONDS = 3e-5
# What a quartet of a rectangle costs that does not survive, in quartets, where kernels leave it out.
UNUSED_QUARTET = 0.03
# Number of tasks that a worker may have begun, but not ended, when it takes the next one.
AHEAD = 2


@dataclass
class Build:
    """What is to be built: sums over all surviving quartets.

    Attributes
    ----------
    operator : md4.method.operators.Operator
    tolerance : float
    exchange, coulomb : ndarray, shapes (n_k, nao, nao) and (n_j, nao, nao)
        D of X, and D + D^T of Y (`md4.method.digestion`). Without exchange, Y is summed in the Hermite basis.
    with_k : bool
    survivors : md4.contract.survivors.Survivors
        The quartets to compute.
    report : callable
        Is told how much more is done, in predicted seconds; None if nobody wants to know.
    """

    operator: Any
    tolerance: float
    exchange: np.ndarray = field(repr=False)
    coulomb: np.ndarray = field(repr=False)
    with_k: bool
    survivors: Any = field(repr=False, default=None)
    report: Any = field(repr=False, default=None)

    @property
    def matrices(self):
        """Number of density matrices."""
        return len(self.exchange) + len(self.coulomb)

    @property
    def nbytes(self):
        """Bytes of the sums of a worker."""
        return self.exchange.nbytes + self.coulomb.nbytes


class Worker:
    """Builds on one device: an engine, the pair lists of the basis set with their bounds, and their H matrices.

    Attributes
    ----------
    engine : md4.Engine
    number : int
        Of this worker among those of all processes.
    lists : list of md4.contract.screening.PairList
    store : md4.contract.workspace.HermiteStore
        Keeps the H matrices of the lists from one build to the next.
    forces
        What makes the derivatives of the lists (`Sums.forces`), if it is there.
    group
        What it has joined by `Backend.join`, if it has.
    """

    def __init__(self, engine):
        self.engine, self.number, self.lists, self.forces, self.group = engine, 0, [], None, None

    @property
    def backend(self):
        return self.engine.backend

    @cached_property
    def store(self):
        backend = self.backend
        return HermiteStore(int(HERMITE_SHARE * backend.memory_left()), backend, backend.forms)

    def list_bytes(self):
        """Largest number of bytes of the H matrices of one list in one form, for the memory that is free now."""
        return int(HERMITE_SHARE * self.backend.memory_left()) // (4 * self.backend.forms)

    def forget(self):
        """Drops pair lists, H matrices and what forces need."""
        if "store" in self.__dict__:
            self.store.clear()
            del self.store
        self.lists, self.forces = [], None

    def check_memory(self, build):
        """MemoryLimitError if densities, J, K and least workspace do not fit; kept H matrices are dropped first."""
        backend, basis = self.backend, self.engine.bra_basis
        least = least_block(self.engine, (0, basis.nshell))
        need = 2 * build.matrices * 8 * basis.nao**2 * backend.sums.copies + least
        if not build.with_k:
            need += len(build.coulomb) * sum(backend.sums.coulomb_bytes(this.pairs) for this in self.lists)
        if need > backend.memory_left():
            self.store.clear()
        limit = backend.memory_left()
        if need > limit:
            raise MemoryLimitError(
                f"{build.matrices} density matrices of {basis.nao} AOs, their J and K and the least workspace take "
                f"{size_text(need)}, but {size_text(limit)} may be used; raise max_memory or give fewer at once."
            )


class PartialSums:
    """What a worker adds up in one build.

    Parameters
    ----------
    worker : Worker
    build : Build
    """

    def __init__(self, worker, build):
        self.worker, self.build, self.store = worker, build, worker.store
        self.engine = worker.engine.with_operator(build.operator)
        self.backend, self.stats = self.engine.backend, Statistics()
        worker.check_memory(build)
        self.tracks = self.backend.tracks()  # first, since it waits for those of a build that was interrupted
        sums, basis = self.backend.sums, self.engine.bra_basis
        if build.with_k:
            self.target = sums.digest(build.exchange, build.coulomb)
            if not sums.takes_lists:
                self.target.screen_by(build.survivors.rule)
        else:
            self.target = sums.coulomb(basis, build.coulomb)
            if not sums.takes_lists:
                self.target.screen_by(build.survivors.rule, [this.prepared for this in worker.lists])
        self.store.fit(HERMITE_SHARE)
        self.block_bytes = min(sums.block_bytes, int(BLOCK_SHARE * self.backend.memory_left()))
        self.begun = deque()
        self.share_among([self.backend])
        if not build.with_k:
            self.target.load(self.touched())

    def touched(self):
        """All lists, one after the other, each noted as used."""
        for this in self.worker.lists:
            self.store.touch(this.prepared, this.prepared)
            yield this.prepared

    def run(self, tasks, next_task=None):
        """Adds the integrals of `tasks`, and then of the tasks from `next_task()`, until there is none."""
        self.start = perf_counter()
        # One track if H matrices are dropped and made again, for which all would have to wait.
        tracks = self.tracks if self.holds_all() or not self.build.with_k else self.tracks[:1]
        with self.backend.at_once(tracks):
            self.share_among(tracks)
            self.add(tasks)
            while next_task is not None and (task := self.in_time(next_task)) is not None:
                self.add([task])
        self.use(0)
        self.share_among([self.backend])

    def holds_all(self):
        """Whether the store has room for the H matrices of all lists."""
        return self.store.holds(this.prepared for this in self.worker.lists)

    def share_among(self, tracks):
        """Tasks are dealt out to these tracks from now on."""
        self.engines, self.track = [self.engine.with_backend(track) for track in tracks], 0
        self.dealer = Dealer(len(tracks), self.backend.sums.track_seconds)

    def use(self, track):
        """What follows is done on the track of this number."""
        if track != self.track:
            self.track, self.engine = track, self.engines[track]
            self.target.use(self.engine.backend)

    def in_time(self, next_task):
        """The next task, when the device has at most AHEAD left: others may be done with theirs earlier."""
        self.begun.append(self.backend.mark())
        if len(self.begun) > AHEAD:
            self.begun.popleft()()
        return next_task()

    def add(self, tasks):
        """Adds the integrals of tasks; on a GPU, these are on their way when it returns."""
        if self.backend.sums.takes_lists:
            self.take(tasks)
            return
        if not self.holds_all():
            tasks = sorted(tasks)  # so that H matrices are used one after the other
        for track, task in self.dealer.deal(tasks):
            self.use(track)
            self.add_task(task)
            if self.build.report is not None:
                self.build.report(task.seconds - EACH)

    def take(self, tasks):
        """Gives pairs of lists to a `ListTarget`, as many at once as the store has memory for."""
        build, basis, report = self.build, self.engine.bra_basis, self.build.report
        pairs = [build.survivors.list_pair(self.worker.lists, task) for task in tasks]
        for batch in self.store.batches(pairs):
            count = self.target.take(batch, basis, build.tolerance, report)
            self.stats.computed += count
            self.stats.wanted += count

    def add_coulomb(self, task):
        """Gives a task of J alone to its target."""
        survivors = self.build.survivors
        ends = (survivors.task_quartets[task.pair] * n // task.parts for n in (task.part, task.part + 1))
        wanted = -int(np.subtract(*ends))
        self.target.take(*survivors.pairs.degrees(task.pair), task.part, task.parts)
        self.stats.computed += wanted
        self.stats.wanted += wanted

    def add_task(self, task):
        """Gives the quartets of a task to a target of blocks: row by row, or in rectangles that cover them."""
        if not self.build.with_k:
            self.add_coulomb(task)
            return
        survivors, lists, pair = self.build.survivors, self.worker.lists, task.pair
        i, k = survivors.pairs.numbers[pair]
        bra, ket, same = lists[i].prepared, lists[k].prepared, i == k
        first, last, wanted = 0, bra.npair, survivors.quartets[pair]
        if task.parts > 1:
            n = survivors.counts(pair)
            first, last = part_of(n, task.part, task.parts)
            wanted = int(n[first:last].sum(dtype=np.int64))
        rate = wanted / max(1e-9, task.seconds - EACH)  # quartets a second
        self.store.touch(ket, bra)
        self.store.touch(bra, ket)
        if self.take_rows(survivors.rows(lists, pair, first, last)):
            return
        room = min(self.block_bytes, self.backend.sums.track_bytes) if self.track else self.block_bytes
        most = max(1, room // (8 * self.integrals(bra, ket)))
        price, counts = rate * RECTANGLE_SECONDS, self.target.ket_counts(survivors.place(pair), bra.npair)
        if counts is not None:  # rectangles of more than `most` quartets are several
            price /= UNUSED_QUARTET + price / most
        for ij, kl in survivors.tiles(pair, first, last, most, price):
            ab, cd = bra[first + ij.start : first + ij.stop], ket[kl]
            self.add_rectangle(ab, cd, same, counts)
            if counts is None:
                self.stats.computed += ab.npair * cd.npair
        self.stats.wanted += wanted
        self.stats.computed += 0 if counts is None else wanted

    def integrals(self, bra, ket):
        """Integrals of a quartet of two lists that blocks hold: those of both parts where they are made in parts."""
        parts = self.backend.parts(bra, ket, self.engine.bra_basis.mirror_axis) or [(bra, ket)]
        return sum(one.facts.nab * other.facts.nab for one, other, *_ in parts)

    def take_rows(self, rows):
        """Gives rows of quartets to the target; False if it does not select the surviving ones by itself."""
        try:
            return self.target.take_rows(rows, self.engine.bra_basis)
        except MemoryLimitError:
            log.debug("no memory for lists of quartets of %r with %r", rows.bra.pairs, rows.ket.pairs)
            return False

    def add_rectangle(self, ab, cd, same, counts=None):
        """Adds a rectangle of quartets, in halves where there is no memory for the whole.

        Of the ket list only the first `counts[i]` pairs count with bra pair i, if the device has these numbers.
        """
        try:
            self.add_block(ab, cd, same, counts)
            return
        except MemoryLimitError:
            if len(ab) * len(cd) == 1:
                raise
        # Only now is the memory free that the exception's frames referred to.
        self.store.clear()
        log.debug("no memory for %r with %r at once; they are made in halves", ab.pairs, cd.pairs)
        for half in halves(max(ab, cd, key=len)):
            self.add_rectangle(*((half, cd) if len(ab) >= len(cd) else (ab, half)), same, counts)

    def add_block(self, ab, cd, same, counts):
        """Makes the block of two slices, and gives it to the target, unless that repeats what it has recorded.

        In a molecule in a plane it may be two blocks, of the integrals of even and of odd functions.
        """
        if self.target.repeat(ab, cd, same, counts):
            return
        backend, basis = self.engine.backend, self.engine.bra_basis
        parts = backend.parts(ab, cd, basis.mirror_axis)
        if parts:
            blocks = backend.part_blocks(parts)
        else:
            a, b = ab.facts, cd.facts
            blocks = [backend.scratch((ab.npair, cd.npair, a.na, a.nb, b.na, b.nb))]
        for block in blocks if counts is not None else ():
            block.limit(counts)
        if parts:
            self.engine.run_parts(parts, blocks)
            self.target.add_parts(blocks, basis.mirror_axis, ab, cd, basis, same)
        else:
            self.engine.run_steps(ab, cd, *blocks)
            self.target.add(*blocks, ab, cd, basis, same)
        self.target.done(ab, cd, same, counts, parts)

    def end(self, fetched=True):
        """Ends the sums of this worker, and waits for its device; are they `fetched` then?"""
        if not self.build.with_k:
            self.target.collect(self.touched())
        if fetched and not self.backend.sums.takes_lists:
            self.target.expect_result()
        self.backend.mark()()
        self.stats.seconds = perf_counter() - self.start
        if self.build.with_k and not self.backend.sums.takes_lists:
            count = self.target.selected()
            self.stats.computed += count
            self.stats.wanted += count

    def result(self):
        """[X, Y], or [Y] without exchange, as NumPy arrays."""
        found = self.target.result()
        return list(found) if self.build.with_k else [found]


def halves(side):
    """A list, or a slice of one, in two slices."""
    middle = len(side) // 2
    return side[0:middle], side[middle : len(side)]
