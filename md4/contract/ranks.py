"""The processes that share a build: those of an MPI communicator (`Ranks`), or this one only (`Alone`).

Both classes have the same methods, so that what divides work asks no further question. This is the only module that
uses mpi4py, besides the command line, and only if the caller gives a communicator. So `import md4` does not start MPI.

All methods except `next` and `stop` of a counter are collective: every rank calls them, in the same order and from one
thread at a time. Each of them first exchanges what the ranks are about to do, and whether the work of one has failed
(`Ranks.together`). If it has, or if they are about to do different things, all ranks raise an exception. So none waits
in vain, wherever in the work of `together` the failure is and whatever the others do meanwhile. Only a failure of MPI
itself amid a message is beyond this.

md4 sends its messages through a duplicate of the caller's communicator, so that they never meet the caller's own. The
duplicate belongs to the communicator: it is made once, however many objects use it, and freed by `comm.Free()`, which
is collective. It is not freed by `__del__`, since ranks may collect garbage at different times.
"""

import itertools
import pickle
import sys
import threading
import time
from contextlib import contextmanager
from functools import wraps
from typing import cast
from zlib import crc32

import numpy as np

from md4.errors import ArgumentError, MD4Error, RankError
from md4.support.arguments import shown
from md4.support.environment import way_to_extra
from md4.support.locks import Lock, Method, once

# Bytes of one message, which caches hold and every MPI can count.
MESSAGE_BYTES = 1 << 24
# What `next` returns after `stop`. Up to 2**22 ranks may stop the same counter without an overflow of 64 bits.
STOPPED = 1 << 40
# How long a rank that waits for others asks without a pause, and how long the pauses are afterwards, in seconds.
EAGER, PAUSE = 2e-4, 5e-4


class Alone:
    """This process without others. The methods are those of `Ranks`."""

    rank, size = 0, 1
    node_rank, node_size = 0, 1

    def same(self, facts):
        pass

    def together(self, work, name="end of a step"):
        return work()

    def first(self, work):
        return work()

    def once_a_node(self, work):
        return work()

    def broadcast(self, array):
        return array

    def sum(self, arrays):
        pass

    def gather(self, value):
        return [value]

    def collect(self, array, rows):
        pass

    @contextmanager
    def counter(self, workers=1):
        yield LocalCounter()

    def __repr__(self):
        return "Alone()"


class LocalCounter:
    """The counter of a single process, which its threads share."""

    def __init__(self):
        self._numbers, self._stopped = itertools.count(), False

    def next(self):
        return STOPPED if self._stopped else next(self._numbers)

    def stop(self):
        self._stopped = True


class Ranks:
    """The ranks of an MPI communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Making the object is collective. It may be made repeatedly for the same communicator.

    Attributes
    ----------
    rank, size : int
        Of this process in the communicator.
    node_rank, node_size : int
        Of this process among the ranks of its node.

    Raises
    ------
    ArgumentError
        `comm` is not a communicator of mpi4py whose ranks can talk to each other.
    """

    def __init__(self, comm):
        self._channel = channel(checked_comm(comm))
        self.rank, self.size = self._channel.comm.rank, self._channel.comm.size
        self.node_rank, self.node_size = self._channel.node.rank, self._channel.node.size

    def _exchange(self, what, value=None, failure=None):
        """The values of all ranks.

        All ranks raise an exception if one of them comes with a failure, which is its own exception, or if `what` they
        do is not the same.
        """
        if not self._channel.differ(what, more=value is not None or failure is not None):
            return [None] * self.size
        with self._channel.lock:
            found = self._channel.comm.allgather((what, value, failure and f"{type(failure).__name__}: {failure}"))
        failed = [rank for rank, (*_, text) in enumerate(found) if text is not None]
        if failed:
            more = f" ({ranks_text(failed[1:])} failed as well)" if failed[1:] else ""
            raise known_to_all(failure or RankError(f"rank {failed[0]}: {found[failed[0]][2]}{more}"))
        self._compare("the call", [this[0] for this in found], "call the same functions in the same order on all ranks")
        return [value for _, value, _ in found]

    def _compare(self, name, values, remedy):
        """ArgumentError if the values of the ranks differ."""
        groups = {}
        for rank, value in enumerate(values):
            groups.setdefault(value, []).append(rank)
        if len(groups) > 1:
            text = "; ".join(f"{ranks_text(ranks)}: {value}" for value, ranks in groups.items())
            raise known_to_all(ArgumentError(f"{name} differs between the ranks of comm ({text}); {remedy}."))

    def same(self, facts):
        """Compares what must be the same on all ranks.

        Parameters
        ----------
        facts : dict
            Name -> short value, which is compared by its repr.

        Raises
        ------
        ArgumentError
            On all ranks, if a value differs. The message has the name, the ranks and their values.
        """
        found = self._exchange("comparison", {name: repr(value) for name, value in facts.items()})
        for name in dict.fromkeys(name for one in found for name in one):
            self._compare(name, [one.get(name, "not known") for one in found], "give all ranks the same")

    def together(self, work, name="end of a step"):
        """Returns work(). If it raises an exception on any rank, all ranks raise one.

        `work` may itself call collective methods, also this one. `name` says in messages what ends with it.

        Raises
        ------
        RankError
            On the ranks whose own work did not fail, if that of another rank did. Ranks that failed raise the exception
            of their work.
        """
        channel = self._channel
        channel.depth += 1
        what = f"{name} (level {channel.depth})"
        try:
            result = work()
        except (Exception, SystemExit) as error:
            if not is_known_to_all(error):
                self._exchange(what, failure=error)
            raise
        finally:
            channel.depth -= 1
        self._exchange(what)
        return result

    def first(self, work):
        """work() of rank 0, for all ranks. The others do not call it, and wait for its result, which is pickled."""


        def pickled():
            result = work()
            return result, pickle.dumps(result, protocol=5)

        own, data = self.together(pickled if self.rank == 0 else lambda: (None, None), "work of rank 0")
        data = self._channel.large.bcast(data, root=0)
        return own if self.rank == 0 else pickle.loads(data)

    def once_a_node(self, work):
        """work() on the first rank of each node, and then on the others, which find what the first ones cached."""
        first = self.node_rank == 0
        result = self.together(work if first else lambda: None)
        other = self.together(work if not first else lambda: None)
        return result if first else other

    def broadcast(self, array):
        """The array of rank 0. The array of each rank must have the same shape and type; it is not changed."""
        self._exchange(f"broadcast of an array of shape {array.shape} and type {array.dtype}")
        array = np.ascontiguousarray(array) if self.rank == 0 else np.empty(array.shape, array.dtype)
        for part in parts(array.reshape(-1)):
            self._channel.comm.Bcast(part.view(np.uint8), root=0)
        return array

    def sum(self, arrays):
        """Sums each of the arrays over all ranks, in place. All ranks get the same bits.

        Each element is summed by one rank, which sends the sum to the others. MPI's Allreduce does not promise that
        its results are the same on all ranks.
        """
        self._exchange("sum of arrays " + ", ".join(f"of shape {a.shape} and type {a.dtype}" for a in arrays))
        for array in arrays:
            whole = np.ascontiguousarray(array)
            for part in parts(whole.reshape(-1)):
                self._sum(part)
            if whole is not array:
                array[...] = whole

    def _sum(self, part):
        """`sum` of a part that is one message."""
        comm, size = self._channel.comm, self.size
        counts = [len(part) * (r + 1) // size - len(part) * r // size for r in range(size)]
        own = np.empty(counts[self.rank], part.dtype)
        comm.Reduce_scatter(part, own, counts)
        comm.Allgatherv(own, [part, counts])

    def gather(self, value):
        """List of each rank's value, which is pickled."""
        return self._exchange("gather", value)

    def collect(self, array, rows):
        """Collects large arrays on rank 0.

        Parameters
        ----------
        array : ndarray, C-contiguous
            On rank 0 the whole, to which the rows of the other ranks are written. On other ranks, their own rows.
        rows : list of int
            Rank r has the rows rows[r] to rows[r + 1] - 1.
        """
        self._exchange(f"collection of the rows {rows}")
        if self.rank > 0:
            for part in parts(array.reshape(-1)):
                self._channel.comm.Send(part.view(np.uint8), dest=0)
            return
        for other in range(1, self.size):
            for part in parts(array[rows[other] : rows[other + 1]].reshape(-1)):
                self._channel.comm.Recv(part.view(np.uint8), source=other)

    @contextmanager
    def counter(self, workers=1):
        """Context manager with a `SharedCounter`, from which `workers` threads of this process take numbers.

        Entering and leaving are collective. If a rank fails inside, all ranks raise an exception.

        Raises
        ------
        ArgumentError
            `workers` threads may not call MPI as it was started.
        """
        channel = self._channel
        self.together(lambda: check_threads(channel.mpi, workers), "start of a counter")
        window = channel.mpi.Win.Allocate(8 if self.rank == 0 else 0, 8, comm=channel.comm)
        # MPI need not check for other locks, which would take an answer of rank 0: no rank takes an exclusive lock.
        window.Lock_all(channel.mpi.MODE_NOCHECK)
        if self.rank == 0:
            window.Put(np.zeros(1, np.int64), 0)
            window.Flush(0)
        channel.wait(channel.comm.Ibarrier())
        try:
            with channel.attended():
                yield SharedCounter(channel, window)
            self._exchange("end of a counter")
        except (Exception, SystemExit) as error:
            try:
                if not is_known_to_all(error):
                    self._exchange("end of a counter", failure=error)
            finally:
                free(window)
            raise
        free(window)

    def __repr__(self):
        return f"Ranks({self.rank} of {self.size}, {self.node_rank} of {self.node_size} on this node)"


class SharedCounter:
    """0, 1, 2, ... for the threads of all ranks: each number goes to one of them."""

    def __init__(self, channel, window):
        self._channel, self._window = channel, window

    def next(self):
        """The next number; `STOPPED` after any rank has called `stop`."""
        return min(self._fetch_and_add(1), STOPPED)

    def stop(self):
        """Makes `next` return `STOPPED` on all ranks from now on."""
        self._fetch_and_add(STOPPED)

    def _fetch_and_add(self, number):
        given, found = np.full(1, number, np.int64), np.empty(1, np.int64)
        with self._channel.lock:
            self._window.Fetch_and_op(given, found, 0, 0, self._channel.mpi.SUM)
            self._window.Flush(0)
        return int(found[0])


class Channel:
    """What md4 keeps for a communicator: a duplicate, and the communicator of the ranks of its node.

    Attributes
    ----------
    comm, node : mpi4py.MPI.Intracomm
    large : mpi4py.util.pkl5.Intracomm
        `comm` for objects of any size.
    mpi : module
        mpi4py.MPI
    lock
        Held by a thread while it calls MPI and other threads may do so as well.
    depth : int
        How many calls of `together` are open, one inside the other.
    """

    def __init__(self, mpi, comm):
        from mpi4py.util import pkl5

        self.mpi, self.lock, self.depth = mpi, Lock(), 0
        self.comm = comm.Dup()
        self.large = pkl5.Intracomm(self.comm)
        self.node = self.comm.Split_type(mpi.COMM_TYPE_SHARED, key=self.comm.rank)

    def differ(self, what, more):
        """Whether the ranks are about to do different things, or one of them has `more` to say."""
        own, found = np.array([crc32(what.encode()), more], np.int64), np.empty((self.comm.size, 2), np.int64)
        with self.lock:
            request = self.comm.Iallgather(own, found)
        self.wait(request)
        return bool(found[:, 1].any() or (found[:, 0] != own[0]).any())

    def wait(self, request):
        """Waits for the other ranks. Inside MPI this would keep a core busy, which ranks of the node may need."""
        start = time.perf_counter()
        while True:
            with self.lock:
                if request.Test():
                    return
            if time.perf_counter() - start > EAGER:
                time.sleep(PAUSE)

    @contextmanager
    def attended(self):
        """While the context is open, a thread of rank 0 lets MPI answer the other ranks.

        Within a node they reach the counter through shared memory. But a network that cannot add by itself needs a call
        of MPI on rank 0, which may be in compiled code or wait for its GPU. Where MPI allows no thread, they wait.
        """
        allowed = self.mpi.Query_thread() >= self.mpi.THREAD_SERIALIZED
        needed = allowed and self.comm.rank == 0 and self.comm.size > 1
        done = threading.Event()
        thread = threading.Thread(target=self._attend, args=(done,), name="md4 counter", daemon=True)
        if needed:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if needed:
                thread.join()

    def _attend(self, done):
        while not done.wait(PAUSE):
            with self.lock:
                self.comm.Iprobe(self.mpi.ANY_SOURCE, self.mpi.ANY_TAG)

    def close(self):
        """Frees both communicators; collective."""
        self.node.Free()
        self.comm.Free()


def channel(comm):
    """The `Channel` of a communicator, which is made by the first call. That call is collective.

    So no lock is held: threads of other ranks may begin with another one of their communicators.
    """
    found = comm.Get_attr(attribute())
    if found is None:
        found = Channel(sys.modules["mpi4py.MPI"], comm)
        comm.Set_attr(attribute(), found)
    return found


@once
def attribute():
    """MPI's key of the attribute of communicators that is the `Channel`. `comm.Free()` frees it; a Dup has its own."""
    return sys.modules["mpi4py.MPI"].Comm.Create_keyval(delete_fn=lambda _comm, _key, made: made.close())


def ranks_of(comm):
    """`Ranks` of a communicator, or `Alone` without one."""
    return Alone() if comm is None else Ranks(comm)


def checked_comm(comm):
    """`comm`; ArgumentError if it is not an intracommunicator of mpi4py that can be used.

    Who has a communicator has imported mpi4py.MPI. So nothing is imported here, which would start MPI.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(comm, mpi.Comm):
        raise ArgumentError(
            f"comm must be a communicator of mpi4py such as MPI.COMM_WORLD of `from mpi4py import MPI`, not "
            f"{shown(comm)}; to install mpi4py, {way_to_extra('mpi')}."
        )
    if not mpi.Is_initialized() or mpi.Is_finalized():
        raise ArgumentError("comm cannot be used because MPI is not running; call MPI.Init() first.")
    if comm == mpi.COMM_NULL or not isinstance(comm, mpi.Intracomm):
        kind = "MPI.COMM_NULL" if comm == mpi.COMM_NULL else type(comm).__name__
        raise ArgumentError(f"comm must be an intracommunicator to which this process belongs, not {kind}.")
    return comm


def check_threads(mpi, workers):
    """ArgumentError if `workers` threads may not call MPI."""
    if workers > 1 and mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise ArgumentError(
            f"{workers} devices of one process need an MPI that was started for several threads; set "
            "mpi4py.rc.thread_level = 'serialized' before MPI is imported, or start one rank a device."
        )


def free(window):
    """Ends the use of the memory of a counter, and frees it; collective."""
    window.Unlock_all()
    window.Free()


def known_to_all(error):
    """`error`, marked: all ranks raise an exception at this place, so nobody need be told of it."""
    error.md4_known_to_all = True
    return error


def is_known_to_all(error):
    """Whether an error is marked by `known_to_all`, or is md4's own and was caused by one that is.

    An error of a caller may be that of one rank, whatever its cause is.
    """
    while isinstance(error, MD4Error) and not hasattr(error, "md4_known_to_all"):
        error = error.__cause__
    return hasattr(error, "md4_known_to_all")


def collective(method: Method) -> Method:
    """If a method of an object with `ranks` fails on one rank, it fails on all."""

    @wraps(method)
    def together(self, *args, **options):
        return self.ranks.together(lambda: method(self, *args, **options), method.__name__)

    return cast(Method, together)


def parts(flat):
    """Slices of a flat array that are one message each."""
    step = MESSAGE_BYTES // flat.itemsize
    return (flat[first : first + step] for first in range(0, len(flat), step))


def ranks_text(ranks):
    """'rank 3', or 'ranks 1, 2, 5'; of many the first ones."""
    shown_ranks = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)})" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown_ranks}"
