"""Threads of the CPU backend: Python's own, which run compiled loops without the interpreter's lock.

Threads that have nothing to do sleep. They are started when they are first needed, and kept. They may be interrupted at
any step, as those of `md4.support.threads`; so their queue is made in C, too.
"""

import os
import threading
from contextlib import suppress
from queue import SimpleQueue

import numba

from md4.support.locks import Lock
from md4.support.threads import Share, complete, guarded, serve

# Elements for which a further thread of Python is worth waking, and how many there are at most: they share one lock.
THREAD_ELEMENTS, MOST_IN_PYTHON = 1 << 18, 8

lock = Lock()
queue, started = None, 0  # of functions that the threads call, and their number


def forget_threads():
    """Called in a child process after a fork, which does not copy threads."""
    global queue  # noqa: PLW0603 the state of the whole process
    queue = None


os.register_at_fork(after_in_child=forget_threads)


def number_of_threads():
    """How many threads work: `NUMBA_NUM_THREADS` and `OMP_NUM_THREADS` limit the processors of this process."""
    most = numba.config.NUMBA_NUM_THREADS
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return max(1, min(most, int(asked))) if asked.isdecimal() else most


def queue_of(count):
    """The queue of the threads beside the one that calls, `count` of them or as many as can be started."""
    global queue, started  # noqa: PLW0603 the state of the whole process
    with lock:
        if queue is None:
            started, queue = 0, SimpleQueue()
        with suppress(RuntimeError):
            while started < min(count, numba.config.NUMBA_NUM_THREADS - 1):
                threading.Thread(target=serve, args=(queue,), name="md4", daemon=True).start()
                started += 1
        return queue


def run_threads(count, work, stop):
    """Calls work(0), ..., work(count - 1) at the same time, the first in the thread that calls.

    If one of them fails, `stop()` must make the others return soon. Those that have not begun when work(0) returns are
    left out: there is nothing left to do, or other calculations use the threads.
    """
    call = guarded(work, stop)
    shares = [Share(call, n) for n in range(1, count)]

    def work_here():
        if shares:
            waiting = queue_of(len(shares))
            for share in shares:
                waiting.put(share.run)
        call(0)

    complete(shares, stop, work_here)


def in_threads(count, work, elements):
    """Calls work(0), ..., work(count - 1), each once, by several threads if they go through enough elements of arrays.

    For long functions of NumPy, which let other threads run meanwhile.
    """
    threads = min(count, elements // THREAD_ELEMENTS, MOST_IN_PYTHON)
    threads = min(threads, number_of_threads()) if threads > 1 else 1

    def some(thread):
        for n in range(thread, count, threads):
            work(n)

    if threads == 1:
        some(0)
    else:
        run_all(threads, some)


def taken_from(left):
    """Yields the items of a list, the last one first, from which other threads take some, too."""
    while left:
        try:
            item = left.pop()
        except IndexError:  # another thread took it
            return
        yield item


def run_all(count, work, threads=None):
    """Calls work(0), ..., work(count - 1), each once, on several threads, or at most so many, where they are free."""
    left = list(range(count))

    def worker(_):
        for n in taken_from(left):
            work(n)

    run_threads(count if threads is None else min(count, threads), worker, left.clear)


def in_parts(count, threads, work):
    """Calls work(first, last) for parts of `count` things of about the same length, one for each of some threads."""
    threads = max(1, min(threads, number_of_threads()))
    edges = [count * n // threads for n in range(threads + 1)]
    run_all(threads, lambda n: work(*edges[n : n + 2]))
