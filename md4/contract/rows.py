"""AO tensors that several devices and ranks make together, each some of the rows.

Each rank makes neighbouring rows, about equal shares of the predicted work. Its workers, one a device, take slices of
them one after the other (`md4.contract.slices`). So a worker needs memory for one slice at a time, and all that workers
share is the number of the next slice.
"""

from itertools import count
from typing import Any, NamedTuple

import numpy as np

from md4.contract.fock import common_facts
from md4.contract.ranks import STOPPED
from md4.contract.slices import Cuts, halves
from md4.contract.stores import MemoryStore, checked_store
from md4.contract.tensor import add_slice, compile_ahead, least_bytes, segmented, slice_target
from md4.errors import ArgumentError, MemoryLimitError
from md4.method.scatter import first_row
from md4.support.display import size_text
from md4.support.log import log
from md4.support.memory import host_memory
from md4.support.progress import Progress
from md4.support.threads import run_each

# Slices that each of several workers should have, and bytes of a slice for which a further one is worth the set-up.
SLICES, SLICE_BYTES = 6, 1 << 26
# Share of the memory that may be used which a slice may take, where it is computed in memory of its own.
SLICE_SHARE = 0.25


class TensorRows(NamedTuple):
    """The rows of an AO tensor that a rank has made; ``first, last, array = md4.int2e(mol, comm=comm)``.

    Attributes
    ----------
    first, last : int
        `array` holds the rows first to last - 1 of the whole tensor, which are its elements first to last - 1 along the
        first axis. The rows of rank n + 1 begin where those of rank n end. A rank may have none.
    array : ndarray, shape (last - first, ...)
        The rows, in Hartree; a device array with ``device=True``.

    Examples
    --------
    Three rows, as a rank would get them:

    >>> import md4, pyscf
    >>> eri = md4.int2e(pyscf.M(atom="He 0 0 0", basis="cc-pvdz"), aosym="s4")
    >>> first, last, array = md4.TensorRows(3, 6, eri[3:6])
    >>> last - first, array.shape
    (3, (3, 15))
    """

    first: int
    last: int
    array: Any


def check_shared(engines, ranks, out, device, gather):
    """ArgumentError for arguments that do not go together."""
    if device and len(engines) > 1:
        raise ArgumentError(f"device=True keeps the tensor on one device, but devices names {len(engines)}.")
    if device and gather:
        raise ArgumentError("gather=True collects the rows on the host; leave out device=True.")
    if device and out is not None and ranks.size > 1:
        raise ArgumentError("with device=True and comm, each rank gets a new array of its rows; leave out `out`.")
    if gather and out is not None:
        raise ArgumentError("gather=True returns the tensor on rank 0; leave out `out`, to which all ranks write.")


def shared_tensor(engines, request, ranks, out=None, device=False, gather=False, progress=None):
    """The AO tensor of engines over the same basis, one a device, and of all ranks; results as in `md4.int2e`.

    If it fails on one rank, the caller has to see to it that it fails on all; see `Ranks.together`.

    Parameters
    ----------
    engines : list of Engine
        Of the workers of this rank.
    request : md4.contract.tensor.Request
    ranks : md4.contract.ranks.Alone or md4.contract.ranks.Ranks
    out, device, gather, progress
        As in `md4.int2e`.
    """
    check_shared(engines, ranks, out, device, gather)
    options = {"aosym": request.aosym, "shls_slice": request.ranges, "device": device, "gather": gather}
    common = {"the backend": engines[0].backend.name, "the operator": engines[0].operator, "out": out is not None}
    ranks.same({**common_facts(engines[0].bra_basis), **common, **options})
    team = TensorTeam(engines, request, ranks)
    if device:
        return team.on_device(out, progress)
    store = team.store(out, gather)
    ranks.once_a_node(lambda: team.compile_ahead(store, progress))
    with ranks.counter(len(engines)) as counter:
        team.fill(store, counter, progress)
    return team.result(store, out, gather)


class TensorTeam:
    """The workers of a rank, which make its rows of a tensor.

    Attributes
    ----------
    engines : list of Engine
    request : md4.contract.tensor.Request
        Over the basis of the engines, which has no needless general contractions.
    cuts : md4.contract.slices.Cuts
    edges : ndarray of int64, shape (nrank + 1,)
        The AOs i at which the rows of the ranks begin.
    mine : TensorLayout
        The rows of this rank.
    """

    def __init__(self, engines, request, ranks):
        made = [segmented(engine, request) for engine in engines]
        self.engines, self.request, self.ranks = [engine for engine, _ in made], made[0][1], ranks
        self.basis = self.engines[0].bra_basis
        self.cuts = Cuts(self.basis, self.request)
        self.edges = self.cuts.shares(ranks.size).tolist()
        self.mine = self.cuts.layout.slice(*self.edges[ranks.rank : ranks.rank + 2])

    def store(self, out, gather):
        """Where the rows of this rank go; errors as in `md4.int2e`."""
        whole = self.cuts.layout
        if out is not None:
            return checked_store(out, whole.shape, self.ranks.size)
        layout, engine = whole if gather and self.ranks.rank == 0 else self.mine, self.engines[0]
        with engine.lock:
            least = least_bytes(engine, self.request, self.mine)
            return MemoryStore(engine.backend.host_array(layout, least), layout.rows[0])

    def compile_ahead(self, store, progress):
        """Compiles what is missing, before the workers begin."""
        layouts = self.slices(store)
        for engine in self.engines:
            with engine.lock:
                compile_ahead(engine, self.request, layouts, progress)

    def slices(self, store):
        """The rows of this rank in slices for its workers, as layouts."""
        workers = len(self.engines)
        wanted = min(SLICES * workers, self.mine.nbytes // SLICE_BYTES) if workers > 1 else 1
        return self.cuts.slices(self.mine.ends, max(1, wanted), self.most(store))

    def most(self, store):
        """Bytes of the largest slice for which each worker has memory."""
        shares = [self.mine.nbytes]
        in_place = isinstance(store, MemoryStore)
        for engine in self.engines:
            with engine.lock:
                room = engine.backend.memory_left()
            if engine.backend.name == "cuda":
                shares.append(room * (2 * SLICE_SHARE if in_place else SLICE_SHARE))
            elif not in_place:
                shares.append(room * SLICE_SHARE / len(self.engines))
        if not in_place:
            shares.append(host_memory() * SLICE_SHARE / (len(self.engines) * self.ranks.node_size))
        return int(min(shares))

    def fill(self, store, counter, progress):
        """Makes the rows of this rank, unless another rank stops the counter because it has failed."""
        slices, numbers = self.slices(store), count()
        log.debug("rows %d to %d: %d slices for %d workers", *self.mine.rows, len(slices), len(self.engines))
        shown = progress if self.ranks.rank == 0 or progress is not None else False
        with Progress(self.cuts.work_of(self.mine), enabled=shown, label="ERI") as bar:

            def work(n):
                worker = TensorWorker(self.engines[n], self.request, store, self.cuts.work_of, bar.report)
                while (number := next(numbers)) < len(slices) and counter.next() < STOPPED:
                    worker.make(slices[number])

            run_each(len(self.engines), work, counter.stop)
        if self.ranks.size > self.ranks.node_size:
            store.flush()

    def result(self, store, out, gather):
        """What this rank returns."""
        if out is not None:
            return out
        if not gather:
            return TensorRows(*self.mine.rows, store.array)
        rows = [first_row(self.request.aosym, edge) for edge in self.edges]
        self.ranks.collect(store.array, rows)
        return store.array if self.ranks.rank == 0 else None

    def on_device(self, out, progress):
        """The rows of this rank in the memory of its device."""
        (engine,) = self.engines
        with engine.lock, Progress(1.0, enabled=progress, label="ERI") as bar:
            target = slice_target(engine, self.request, self.mine, out, device=True)
            compile_ahead(engine, self.request, [self.mine], progress)
            add_slice(engine, self.request, self.mine, target, bar.report)
            return TensorRows(*self.mine.rows, target.result())


class TensorWorker:
    """A device that makes slices, and its memory on the host for rows that go to a file.

    Parameters
    ----------
    engine, request
        As `md4.contract.tensor.segmented` returns them.
    store : MemoryStore or FileStore
    work_of : callable
        The predicted work of a slice, `md4.contract.slices.Cuts.work_of`.
    report : callable, optional
        Is told how much more of this work is done.
    """

    def __init__(self, engine, request, store, work_of, report=None):
        self.engine, self.request, self.store, self.work_of, self.report = engine, request, store, work_of, report
        self.buffer = np.empty(0)

    def make(self, layout):
        """Makes a slice, in smaller ones if the device runs out of memory."""
        try:
            self.compute(layout)
            return
        except MemoryLimitError:
            smaller = halves(layout)
            if not smaller:
                raise
        log.warning("no memory for a slice of %s, which is made in halves", size_text(layout.nbytes))
        self.buffer = np.empty(0)
        for half in smaller:
            self.make(half)

    def compute(self, layout):
        """Makes a slice and writes it to the store."""
        with self.engine.lock:
            target = slice_target(self.engine, self.request, layout, self.room(layout))
            add_slice(self.engine, self.request, layout, target, self.reporter(layout))
            rows = target.result()
        self.store.write(*layout.rows, rows)
        if self.store.room(*layout.rows) is None:
            self.buffer = max(self.buffer, rows.reshape(-1), key=len)

    def reporter(self, layout):
        """What is told how much more of a slice is done, of which 1 is all."""
        if self.report is None:
            return None
        whole = self.work_of(layout)
        return lambda share: self.report(share * whole)

    def room(self, layout):
        """Where a slice is computed: in the store, in the memory of an earlier one, or, if None, in new memory."""
        room, size = self.store.room(*layout.rows), layout.nbytes // 8
        return self.buffer[:size].reshape(layout.shape) if room is None and size <= len(self.buffer) else room
