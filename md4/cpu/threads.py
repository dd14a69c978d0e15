"""Threads of the CPU backend: Python's own, which run compiled loops without the interpreter's lock.

Threads that have nothing to do sleep. They are started when they are first needed, and kept.
"""

import os
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

import numba

from md4.support.locks import Lock

lock = Lock()
pool = None


def forget_pool():
    """Called in a child process after a fork, which does not copy threads."""
    global pool  # noqa: PLW0603 the state of the whole process
    pool = None


os.register_at_fork(after_in_child=forget_pool)


def number_of_threads():
    """How many threads work: `NUMBA_NUM_THREADS` and `OMP_NUM_THREADS` limit the processors of this process."""
    most = numba.config.NUMBA_NUM_THREADS
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return max(1, min(most, int(asked))) if asked.isdecimal() else most


def workers():
    """The threads beside the one that calls, as an executor."""
    global pool  # noqa: PLW0603 the state of the whole process
    with lock:
        if pool is None:
            pool = ThreadPoolExecutor(max(1, numba.config.NUMBA_NUM_THREADS - 1), thread_name_prefix="md4")
        return pool


def run_threads(count, work, stop):
    """Calls work(0), ..., work(count - 1) at the same time, the first in the thread that calls.

    If one of them fails, `stop()` must make the others return soon. Those that have not begun when work(0) returns are
    left out: there is nothing left to do, or other calculations use the threads.
    """
    others = []

    def guarded(n):
        try:
            work(n)
        except BaseException:
            stop()
            raise

    try:
        with suppress(RuntimeError):  # no thread can be started, or no longer: the others do all of the work
            for n in range(1, count):
                others.append(workers().submit(guarded, n))
        guarded(0)
    except BaseException:
        stop()
        raise
    finally:
        finish([other for other in others if not other.cancel()], stop)
    for other in others:
        if not other.cancelled():
            other.result()


def run_all(count, work):
    """Calls work(0), ..., work(count - 1), each once, on several threads where they are free."""
    left = list(range(count))

    def worker(_):
        while left:
            try:
                n = left.pop()
            except IndexError:  # another thread took it
                return
            work(n)

    run_threads(count, worker, left.clear)


def finish(others, stop):
    """Waits for other threads, also if that is interrupted: they use memory of the one that calls."""
    try:
        wait(others)
    except BaseException:
        stop()
        wait(others)
        raise
