"""Who builds J and K, and forces: the workers of this process, one for each device, and the processes beside it.

Every worker makes sums X and Y of the tasks that are its own (`md4.contract.work`). They are added up by NCCL, through
CuPy, if they are large and each worker has a GPU of its own; else on the host, and then over the processes.
"""

from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from time import perf_counter
from zlib import crc32

import numpy as np

from md4 import gpu
from md4.contract.ranks import Alone
from md4.contract.screening import Statistics, merged_lists, pair_bounds, sorted_lists
from md4.contract.survivors import ListPairs
from md4.contract.work import divide, make_tasks
from md4.contract.worker import PartialSums, Worker
from md4.engine import BACKENDS, Engine
from md4.errors import ArgumentError
from md4.gpu.devices import chosen, identities, memory_facts, take_shares
from md4.method.digestion import digest_flags
from md4.method.operators import Operator
from md4.shells.shell_pairs import ordered_pairs, pairs_by_kind
from md4.support.arguments import checked_choice
from md4.support.log import log
from md4.support.memory import host_memory
from md4.support.progress import Progress
from md4.support.threads import run_each

# The text before the progress bar.
LABEL = "J and K"
# Sizes of densities for which kernels are compiled ahead: a build of a small one takes other parts of lists.
SIZES = (1.0, 1e-3, 1e-6)
# Bytes of sums from which on NCCL is worth its start, which takes about a second.
NCCL_BYTES = 32 << 20


def shared_devices(backend, stream, max_memory, devices, ranks, gather=False):
    """(numbers of the devices of a rank, cap in MB of each or None); errors as in `md4.int2e`.

    Ranks of a node that work on the CPU have equal shares of the memory that is free, unless `max_memory` is given. If
    they `gather`, rank 0 needs more than the others, and no rank has a limit of its own. Ranks that share a GPU divide
    its memory. Collective.
    """
    checked_choice("backend", backend, BACKENDS)
    numbers = chosen(devices, backend, None if ranks.size == 1 else ranks.node_rank)
    if stream is not None and len(numbers) > 1:
        raise ArgumentError(f"a stream belongs to one device, but devices names {len(numbers)}; leave one out.")
    on_cpu = backend == "cpu" or (backend == "auto" and not gpu.available())
    if max_memory is None and on_cpu and ranks.node_size > 1 and not gather:
        max_memory = host_memory() / ranks.node_size / 1e6
    divide_devices({} if on_cpu or ranks.size == 1 else identities(numbers), ranks)
    return numbers, max_memory


def divide_devices(own, ranks):
    """Divides the memory of GPUs that several ranks use among them; collective.

    Each may hold an equal part of what is free, or held by md4 in these ranks, at this moment.

    Parameters
    ----------
    own : dict
        Identities of the GPUs of this rank, by their numbers.
    ranks : md4.contract.ranks.Ranks or md4.contract.ranks.Alone
    """
    every = [identity for of_rank in ranks.gather(list(own.values())) for identity in of_rank]
    counts = {identity: every.count(identity) for identity in every if every.count(identity) > 1}
    totals = {}
    if counts:  # on all ranks, or on none
        facts = memory_facts([device for device, identity in own.items() if identity in counts])
        found = ranks.gather([(own[device], *sizes) for device, *sizes in facts])
        for identity, free, held in [fact for of_rank in found for fact in of_rank]:
            least, total = totals.get(identity, (free, 0))
            totals[identity] = min(least, free), total + held
    take_shares({
        device: (sum(totals[identity]), counts[identity]) if identity in counts else None
        for device, identity in own.items()
    })  # fmt: skip


def shared_engines(basis, operator, backend, stream, max_memory, devices, ranks, gather=False):
    """The engines of a rank, one a device of `shared_devices`."""
    numbers, max_memory = shared_devices(backend, stream, max_memory, devices, ranks, gather)
    return [Engine(basis, None, operator, backend, stream, max_memory, device) for device in numbers]


class Stopped(Exception):
    """Another worker has failed."""


class Team:
    """The workers of this process.

    Parameters
    ----------
    basis : Basis
    options : dict
        backend, stream and max_memory of each worker's engine.
    devices
        As in `md4.JK`.
    ranks : md4.contract.ranks.Ranks or md4.contract.ranks.Alone
        The processes that build together.

    Attributes
    ----------
    workers : list of Worker
    size : int
        Number of the workers of all processes.
    list_bytes : int
        Bytes of the H matrices of a list in one form, at most, once there are lists.
    """

    def __init__(self, basis, options, devices, ranks):
        self._have(basis, shared_engines(basis, None, **options, devices=devices, ranks=ranks), ranks)

    @classmethod
    def of(cls, engine):
        """A team of one engine."""
        team = object.__new__(cls)
        team._have(engine.bra_basis, [engine], Alone())
        return team

    def _have(self, basis, engines, ranks):
        self.basis, self.ranks, self._list_pairs, self.list_bytes = basis, ranks, {}, 0
        self.workers = [Worker(engine) for engine in engines]
        self.size = len(self.workers)

    def use(self, basis):
        """Has the workers build with another basis of the same shells; before they have lists."""
        self.basis = basis
        for worker in self.workers:
            worker.engine = worker.engine.with_basis(basis)

    def count(self):
        """Numbers the workers of all processes; every process calls it."""
        counts = self.ranks.gather(len(self.workers))
        first, self.size = sum(counts[: self.ranks.rank]), sum(counts)
        for n, worker in enumerate(self.workers):
            worker.number = first + n

    @property
    def engine(self):
        """The engine of the first worker."""
        return self.workers[0].engine

    def facts(self):
        """What has to be the same in all processes, or they would divide the work in different ways."""
        backends = {worker.backend.division_facts() for worker in self.workers}
        return {"the backend": " and ".join(sorted(backends))}

    def each(self, work, stop=lambda: None):
        """[work(worker) for all workers], at the same time, each on its device."""

        def one(n):
            with self.workers[n].engine.lock:
                return work(self.workers[n])

        return run_each(len(self.workers), one, stop)

    # pair lists

    def make_lists(self, tolerance):
        """Makes the pair lists of all workers; each makes its part of the Schwarz bounds."""
        every = pairs_by_kind(self.basis, self.engine.backend.sums.mixed_shells)

        def bounds(worker):
            return pair_bounds(worker.engine, every, tolerance, worker.number, self.size), worker.list_bytes()

        found = self.ranks.gather(self.ranks.together(lambda: self.each(bounds)))
        parts, limits = zip(*(each for of_rank in found for each in of_rank))
        whole = [np.concatenate(pieces, axis=1) for pieces in zip(*parts)]
        self.list_bytes = min(limits)

        def prepare(worker):
            return sorted_lists(worker.engine, every, whole, tolerance, self.list_bytes)

        # The first worker is the last to get its lists: `lists` asks it whether all have theirs.
        self._list_pairs = {}
        for worker, lists in reversed([*zip(self.workers, self.ranks.together(lambda: self.each(prepare)))]):
            worker.lists = lists

    @property
    def lists(self):
        """The pair lists of the first worker; empty before they are made."""
        return self.workers[0].lists

    def make_forces(self, tolerance):
        """Makes the `forces` of all workers, of lists that were made for a tolerance.

        A list of a class whose pairs differ in their primitives costs forces nothing, and saves them many launches.
        """

        def make(worker):
            lists = merged_lists(worker.engine, worker.lists, tolerance, self.list_bytes)
            beside = () if lists is worker.lists else worker.lists
            return worker.backend.sums.forces(self.basis, lists, beside)

        # the first worker, which is asked, is the last
        for worker, forces in reversed([*zip(self.workers, self.each(make))]):
            worker.forces = forces

    def forget(self):
        """Drops all pair lists."""
        self._list_pairs = {}
        for worker in self.workers:
            worker.forget()

    def list_pairs(self, with_k):
        """`ListPairs` of the lists, for J alone or also for K; they are kept as long as the lists."""
        if with_k not in self._list_pairs:
            sums = self.engine.backend.sums
            swapped = sums.swapped if with_k else sums.coulomb_swapped
            key = None if with_k else sums.coulomb_key
            self._list_pairs[with_k] = ListPairs(self.lists, self.basis, swapped, key)
        return self._list_pairs[with_k]

    # builds

    def compile_ahead(self, build, densities, finest, progress):
        """Compiles the missing kernels of a build, on the first rank of each node before the others.

        Parameters
        ----------
        build : md4.contract.worker.Build
        densities : ndarray, shape (n, nao, nao)
        finest : float
            The tolerance for which lists are made.
        """
        from md4.cpu.warmup import BESIDE, compile_ahead

        flags = digest_flags(len(build.exchange), len(build.coulomb)) if build.with_k else "j"

        def work(backend):
            compile_ahead(BESIDE, progress)
            Team.of(Engine(self.basis, backend=backend.with_operator(Operator()))).rehearse(build, densities, finest)

        self.compile_for(flags, build.operator, work, progress)

    def compile_for(self, use, operator, work, progress, part=None):
        """As `compile_ahead`, for any work with an operator; other arguments are those of `md4.backends.Backend`."""

        def compile_all():
            for worker in self.workers:
                with worker.engine.lock:
                    backend = worker.backend.with_operator(operator)
                    backend.compile_ahead(use, self.basis, work, progress, part)

        self.ranks.together(lambda: self.ranks.once_a_node(compile_all))

    def rehearse(self, build, densities, finest):
        """Makes lists and builds, also for smaller densities, as those of later cycles of an SCF are."""
        self.make_lists(finest)
        for size in SIZES:
            smaller = replace(build, tolerance=build.tolerance / size, report=None)
            self.screen(smaller, densities)
            self.run(smaller, False)

    def screen(self, build, densities):
        """Finds the quartets of a build that survive; `densities` have the shape (n, nao, nao)."""
        pairs, bounded = self.list_pairs(build.with_k), self.engine.backend.sums.takes_bounds
        norms = pairs.norms(densities, len(build.coulomb) > 0, build.with_k)
        build.survivors = pairs.survivors(norms, build.tolerance, bounded)

    def seconds(self, build):
        """Predicted seconds of each pair of lists in a build."""
        sums, survivors = self.engine.backend.sums, build.survivors
        predicted = sums.seconds if build.with_k else sums.coulomb_seconds
        return survivors.pairs.seconds(predicted, build.matrices) * survivors.quartets

    def tasks(self, build):
        """The `md4.contract.work.Task` of a build."""
        by_task = build.survivors.by_task
        return make_tasks(by_task(self.seconds(build)), by_task(build.survivors.used), self.size)

    def run(self, build, progress):
        """(sums, `Statistics`) of a build: the list [X, Y], or [Y] without exchange.

        Parameters
        ----------
        build : md4.contract.worker.Build
        progress : bool or None
            As in `md4.JK`. Processes beside the first one show no bar.
        """
        tasks = self.tasks(build)
        if self.ranks.size > 1:
            self.ranks.same({"the division of the work": self.checksum(build, tasks)})
        division = divide(tasks, self.size)
        by_nccl = self.size > 1 and build.nbytes >= NCCL_BYTES and self.joined
        total = float(self.seconds(build).sum()) * len(self.workers) / self.size
        with (
            Progress(total, enabled=progress if self.ranks.rank == 0 else False, label=LABEL) as bar,
            self.ranks.counter(len(self.workers)) as counter,
        ):
            build.report = bar.report

            def next_task():
                n = counter.next()
                return division.rest[n] if n < len(division.rest) else None

            def work(worker):
                part = PartialSums(worker, build)
                part.run(division.shares[worker.number], next_task if division.rest else None)
                part.end(fetched=not by_nccl or worker is self.workers[0])
                return part

            parts = self.ranks.together(lambda: self.each(work, counter.stop))
        found = self.ranks.gather([(part.stats.computed, part.stats.wanted, part.stats.seconds) for part in parts])
        computed, wanted, busy = zip(*(each for of_rank in found for each in of_rank))
        start = perf_counter()
        total = self.total_of(parts, by_nccl)
        return total, Statistics(sum(computed), 0, sum(wanted), busy=busy, sums=perf_counter() - start)

    def forces(self, operator, terms, tolerance, progress, meanwhile):
        """What the workers of this process, which have their `forces`, make of a gradient.

        Parameters
        ----------
        operator : md4.method.operators.Operator
        terms, tolerance
            As of `md4.cpu.forces.HostForces.run`.
        progress : bool or None
            As in `run`.
        meanwhile : callable
            The first worker of this process may call it once, where it would wait for its device.

        Returns
        -------
        gradient : ndarray, shape (nshell, 3)
            What the workers have made, added up in their order, so that the bits are the same in each run.
        counts : ndarray, shape (3,)
            Quartets, and the sums over those that were left out.
        busy : ndarray, shape (size,)
            Seconds of each worker, 0 of those of other processes.
        """
        busy = np.zeros(self.size)

        def work(worker, report):
            start, backend = perf_counter(), worker.backend.with_operator(operator)
            found, quartets, left_out = worker.forces.run(
                backend, *terms, tolerance, worker.number, self.size, report,
                meanwhile if worker is self.workers[0] else None,
            )  # fmt: skip
            busy[worker.number] = perf_counter() - start
            return found, np.array([float(quartets), *left_out])

        parts = self.each_reports(work, self.workers[0].forces.seconds(), progress, "Forces")
        return [*map(sum, zip(*parts)), busy]

    def matrices(self, operator, densities, with_j, with_k, tolerance, cutoff, progress):
        """What the workers of this process, which have their `forces`, make of J and K of derivatives.

        Parameters
        ----------
        operator, progress
            As of `forces`.
        densities, with_j, with_k, tolerance
            As of `md4.cpu.derivative_matrices.HostDerivatives.run`.
        cutoff : float
            Primitive pairs below it are in no list.

        Returns
        -------
        vj, vk : ndarray, shape (n, 3, nao, nao)
        """

        def work(worker, report):
            engine = worker.engine.with_operator(operator)
            made = engine.backend.sums.derivatives(engine, worker.forces, cutoff)
            return made.run(densities, with_j, with_k, tolerance, worker.number, self.size, report)

        count = sum(ordered_pairs(this.pairs) for this in self.lists)
        return [sum(parts) for parts in zip(*self.each_reports(work, count, progress, "Derivatives of J and K"))]

    def each_reports(self, work, total, progress, label):
        """[work(worker, report) for all workers], with a bar for the `total` that those of all processes report.

        If one of them fails, the others of this process end when they next report.
        """
        stopped = []
        total *= len(self.workers) / self.size
        with Progress(total, enabled=progress if self.ranks.rank == 0 else False, label=label) as bar:

            def report(amount):
                if stopped:
                    raise Stopped
                bar.update(amount)

            def one(worker):
                with suppress(Stopped):
                    return work(worker, report if len(self.workers) > 1 else bar.report)

            return self.each(one, lambda: stopped.append(True))

    def checksum(self, build, tasks):
        """A number that differs, in all likelihood, if two processes have not the same tasks, survivors and lists."""
        numbers = [[task.pair, task.part, task.parts] for task in tasks], build.survivors.quartets
        return crc32(repr((*numbers, [this.pairs.nprim for this in self.lists])).encode())

    def total_of(self, parts, by_nccl):
        """The sums of all workers added up, as NumPy arrays."""
        places = dict(zip(self.workers, parts))
        if by_nccl:
            self.each(lambda worker: places[worker].target.add_up(worker.group))

            def fetch(worker):
                return parts[0].result() if worker is self.workers[0] else worker.backend.mark()()

            return self.ranks.together(lambda: self.each(fetch)[0])
        results = self.ranks.together(lambda: self.each(lambda worker: places[worker].result()))
        for other in results[1:]:
            for total, array in zip(results[0], other):
                np.add(total, array, out=total)
        self.ranks.sum(results[0])
        return results[0]

    @cached_property
    def joined(self):
        """Whether the workers of all processes are a group whose sums NCCL adds up; they become one when asked."""
        places = self.ranks.gather(self.ranks.together(lambda: self.each(lambda worker: worker.backend.place())))
        places = [place for of_rank in places for place in of_rank]
        if None in places or len(set(places)) < len(places):
            return False
        identity = self.ranks.first(self.engine.backend.new_group)

        def join(worker):
            worker.group = worker.backend.join(identity, worker.number, self.size)

        self.ranks.together(lambda: self.each(join))
        log.debug("the sums of %d GPUs are added up by NCCL", self.size)
        return True
