"""Threads of the CPU backend: Python's own, which run compiled loops without the interpreter's lock.

Threads that have nothing to do sleep. They are started when they are first needed, and kept. An interrupt may come
between any two steps of Python, also amid a method of `concurrent.futures`, whose locks would then stay taken. So all
that threads share is made in C, each step of it as a whole: a queue, locks, and dictionaries.
"""

import os
import threading
from contextlib import suppress
from queue import SimpleQueue

import numba

from md4.support.locks import Lock

lock = Lock()
pool = None


class Pool:
    """Threads that take shares of work from a queue."""

    def __init__(self):
        self.queue, self.threads = SimpleQueue(), []

    def grow(self, count):
        """Starts threads until there are `count`; RuntimeError where the system allows no more."""
        while len(self.threads) < count:
            thread = threading.Thread(target=serve, args=(self.queue,), name="md4", daemon=True)
            thread.start()
            self.threads.append(thread)


def serve(queue):
    """What the threads of a pool do."""
    while True:
        queue.get().run()


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


def workers(count):
    """The `Pool` of threads beside the one that calls, `count` of them or as many as can be started."""
    global pool  # noqa: PLW0603 the state of the whole process
    with lock:
        if pool is None:
            pool = Pool()
        with suppress(RuntimeError):
            pool.grow(min(count, numba.config.NUMBA_NUM_THREADS - 1))
        return pool


class Share:
    """work(n), for another thread than the caller's, unless the caller takes it back before it has begun."""

    def __init__(self, work, n):
        self.work, self.n, self.error, self.owner, self.ended = work, n, None, {}, False
        self.running = threading.Lock()
        self.running.acquire()

    def run(self):
        """Called by a thread of the pool."""
        if self.owner.setdefault("is", "thread") != "thread":
            return
        try:
            self.work(self.n)
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            self.running.release()

    def taken_back(self):
        """Whether no thread has begun it, and none will."""
        return self.owner.setdefault("is", "caller") == "caller"

    def wait(self):
        """Waits for its end; may be interrupted, and called again."""
        while not (self.ended or self.taken_back()):
            self.running.acquire()  # which nobody gets before it has ended


def run_threads(count, work, stop):
    """Calls work(0), ..., work(count - 1) at the same time, the first in the thread that calls.

    If one of them fails, `stop()` must make the others return soon. Those that have not begun when work(0) returns are
    left out: there is nothing left to do, or other calculations use the threads.
    """

    def guarded(n):
        try:
            work(n)
        except BaseException:
            stop()
            raise

    shares = [Share(guarded, n) for n in range(1, count)]
    try:
        if shares:
            queue = workers(len(shares)).queue
            for share in shares:
                queue.put(share)
        guarded(0)
    except BaseException:
        stop()
        raise
    finally:
        finish(shares, stop)
    for share in shares:
        if share.error is not None:
            raise share.error


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


def finish(shares, stop):
    """Waits for other threads, also if that is interrupted: they use memory of the one that calls."""
    interrupt = None
    while True:
        try:
            for share in shares:
                share.wait()
            break
        except BaseException as error:
            interrupt = error
            stop()
    if interrupt is not None:
        raise interrupt
