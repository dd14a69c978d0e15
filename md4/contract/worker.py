"""What one device does in a build of J and K: its pair lists, their H matrices, and its part of the sums."""

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np

from md4.contract.screening import Statistics
from md4.contract.workspace import HermiteStore, least_block

# Share of the memory that may be used, of the H matrices.
HERMITE_SHARE = 0.5
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
        self.spare()
        backend = self.backend
        return HermiteStore(int(HERMITE_SHARE * backend.memory_left()), backend, backend.forms)

    def list_bytes(self):
        """Largest number of bytes of the H matrices of one list in one form, for the memory that is free now."""
        return int(HERMITE_SHARE * self.backend.memory_left()) // (4 * self.backend.forms)

    def spare(self):
        """Drops the H matrices of forces, for builds, unless both have the same."""
        if self.forces is not None and self.forces.beside:
            self.forces.drop()

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
        if build.with_k:
            need += backend.sums.copies * backend.sums.copy_bytes(int(np.diff(basis.ao_loc).max()))
        else:
            need += len(build.coulomb) * sum(backend.sums.coulomb_bytes(this.pairs) for this in self.lists)
        if need > backend.memory_left():
            self.store.clear()
            self.spare()
        backend.check_fits(
            need, f"lists of shell pairs, {build.matrices} density matrices of {basis.nao} AOs, their J and K and the "
            "least workspace take", "raise max_memory or give fewer at once",
        )  # fmt: skip


class PartialSums:
    """What a worker adds up in one build.

    Parameters
    ----------
    worker : Worker
    build : Build
    """

    def __init__(self, worker, build):
        self.worker, self.build, self.store, self.stats = worker, build, worker.store, Statistics()
        engine = worker.engine.with_operator(build.operator)
        self.backend, lists = engine.backend, [this.prepared for this in worker.lists]
        worker.check_memory(build)
        if build.with_k:
            self.target = self.backend.sums.digest(engine, lists, build.survivors, build.exchange, build.coulomb)
        else:
            self.target = self.backend.sums.coulomb(engine, lists, build.survivors, build.coulomb)
        self.store.fit(HERMITE_SHARE)
        if not self.store.holds(lists):
            worker.spare()
            self.store.fit(HERMITE_SHARE)
        self.keeps_all = self.store.holds(lists)
        self.target.begin(self.touched(), self.keeps_all)
        self.begun = deque()

    def touched(self):
        """All lists, one after the other, each noted as used."""
        for this in self.worker.lists:
            self.store.touch(this.prepared, this.prepared)
            yield this.prepared

    def run(self, tasks, next_task=None):
        """Adds the integrals of `tasks`, and then of the tasks from `next_task()`, until there is none."""
        self.start = perf_counter()
        self.add(tasks)
        while next_task is not None and (task := self.in_time(next_task)) is not None:
            self.add([task])

    def in_time(self, next_task):
        """The next task, when the device has at most AHEAD left: others may be done with theirs earlier."""
        self.begun.append(self.backend.mark())
        if len(self.begun) > AHEAD:
            self.begun.popleft()()
        return next_task()

    def add(self, tasks):
        """Adds the integrals of tasks, of as many at once as the store has memory for.

        On a GPU, these are on their way when it returns.
        """
        if not self.keeps_all:
            tasks = sorted(tasks)  # so that H matrices are used one after the other
        pairs = [self.build.survivors.list_pair(self.worker.lists, task) for task in tasks]
        for batch in self.store.batches(pairs):
            self.target.take(batch, self.build.report)

    def end(self, fetched=True):
        """Ends the sums of this worker, and waits for its device; are they `fetched` then?"""
        self.stats.computed, self.stats.wanted = self.target.end(self.touched(), fetched)
        self.stats.seconds = perf_counter() - self.start

    def result(self):
        """[X, Y], or [Y] without exchange, as NumPy arrays."""
        found = self.target.result()
        return list(found) if self.build.with_k else [found]
