"""Compiled loops of the CPU: they are kept on disk by `md4.support.cache`, and run by threads if threads can run.

Numba's own disk cache is not used, for three reasons. It looks at one source file only and misses an edit of another
file. Two processes can leave its index wrong. It needs a folder to which it can write.
"""

import hashlib
import os
import pickle
from types import FunctionType

import numba
from numba import njit
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from md4.support import cache
from md4.support.locks import Lock

# The threading layer 'workqueue' ends the process if two threads start a parallel loop at the same time.
one_at_a_time = Lock()


class LoopCache:
    """Disk cache of one function, with the interface of `numba.core.caching.Cache`.

    There is a file for each signature and processor. A file is a pickle, so it can execute anything when it is read.
    `md4.support.cache` makes sure that it was written by this user, or by one whom this user trusts.
    """

    cache_path = None

    def __init__(self, name):
        self.name = name

    def entry(self, signature, codegen):
        """(path, facts) of the code for a signature."""
        facts = {"loop": self.name, "signature": str(signature), "processor": [str(s) for s in codegen.magic_tuple()]}
        return cache.entry_path(f"{self.name}-{hashlib.sha256(cache.encoded(facts)).hexdigest()[:16]}.loop"), facts

    def load_overload(self, signature, target):
        """The code that `save_overload` saved, or None."""
        target.refresh()
        data = cache.load(*self.entry(signature, target.codegen()))
        return None if data is None else CompileResult._rebuild(target, *pickle.loads(data))

    def save_overload(self, signature, result):
        """Saves the code that Numba compiled."""
        if not result.library.has_dynamic_globals:
            cache.store(*self.entry(signature, result.codegen), dumps(result._reduce()))

    def enable(self):
        """Does nothing: the cache is always enabled."""

    disable = flush = enable


def forked():
    """Whether this process was forked from one whose threads had run loops. A fork does not copy these threads."""
    return os.getpid() != first_process and started_before_fork


first_process, started_before_fork = os.getpid(), False


def note_fork():
    """Called in a child process after a fork; notes whether threads had been started before."""
    global started_before_fork  # noqa: PLW0603 the state of the whole process
    started_before_fork = started_before_fork or layer() is not None


os.register_at_fork(after_in_child=note_fork)


def layer():
    """The name of Numba's threading layer; None before the first loop."""
    try:
        return numba.threading_layer()
    except ValueError:
        return None


class Loop:
    """A loop that is compiled at its first call for each signature.

    Numba's threads run it in parallel. In a child process that was forked after these threads had started, it runs on
    one thread.

    Parameters
    ----------
    function : callable
        The function; its prange loops run in parallel.
    name : str, optional
        The name of the files on disk; by default that of the function.
    callees
        Device functions that the function calls by these names. They are bound as globals, because Numba's pickles
        would contain them if they were in a closure.
    """

    def __init__(self, function, name=None, **callees):
        self.function, self.name, self.callees = function, name or function.__name__, callees
        self.dispatchers = {}

    def dispatcher(self, parallel):
        """Numba's dispatcher of the loop, with or without threads."""
        if parallel not in self.dispatchers:
            name = self.name if parallel else f"{self.name}_serial"
            names = {**self.function.__globals__, **self.callees}
            bound = FunctionType(self.function.__code__, names, name)
            bound.__qualname__, bound.__module__ = name, self.function.__module__
            dispatcher = njit(parallel=parallel, error_model="numpy")(bound)
            dispatcher._cache = LoopCache(name)
            self.dispatchers[parallel] = dispatcher
        return self.dispatchers[parallel]

    def __call__(self, *args):
        if forked():
            return self.dispatcher(False)(*args)
        loop = self.dispatcher(True)
        if layer() not in ("tbb", "omp"):  # not known before the first loop
            with one_at_a_time:
                return loop(*args)
        return loop(*args)

    @property
    def hits(self):
        """Number of signatures that were found on disk."""
        return sum(sum(d.stats.cache_hits.values()) for d in self.dispatchers.values())
