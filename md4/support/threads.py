"""Threads of Python's own for compiled work, which an interrupt may meet at any step.

An interrupt may come between any two steps of Python, also amid a method of `concurrent.futures`, whose locks would
then stay taken. So all that threads share is made in C, each step of it as a whole: locks and dictionaries.
"""

import _thread
import os
import threading
import weakref
from queue import SimpleQueue


class Share:
    """work(n), for another thread than the caller's, unless the caller takes it back before it has begun."""

    def __init__(self, work, n):
        self.work, self.n, self.error, self.owner, self.ended = work, n, None, {}, False
        self.running = threading.Lock()
        self.running.acquire()

    def run(self):
        """Called by the other thread."""
        if self.owner.setdefault("is", "thread") != "thread":
            return
        try:
            self.work(self.n)
        except BaseException as error:
            self.error = error
        finally:
            self.work, self.ended = None, True  # this thread may hold the share for longer than the caller does
            self.running.release()

    def taken_back(self):
        """Whether no thread has begun it, and none will; a queue that still has it keeps nothing else alive."""
        mine = self.owner.setdefault("is", "caller") == "caller"
        if mine:
            self.work = None
        return mine

    def wait(self, begun=False):
        """Waits for its end; can be called again. Where no thread need have `begun`, it is taken back instead."""
        while not (self.ended or (not begun and self.taken_back())):
            self.running.acquire()  # which nobody gets before it has ended


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


def guarded(work, stop):
    """`work`, after whose errors `stop()` is called."""

    def call(n):
        try:
            work(n)
        except BaseException:
            stop()
            raise

    return call


def complete(shares, stop, work_here):
    """work_here(), and then the end of all shares; raises its error, or that of the first share that has one."""
    try:
        work_here()
    except BaseException:
        stop()
        raise
    finally:
        finish(shares, stop)
    for share in shares:
        if share.error is not None:
            raise share.error


class Standing:
    """Threads that stay: number n runs one function after the other that is given to it, until the object is freed.

    Libraries keep for each thread what takes long to make. A forked process, which has no other threads, gets new ones.
    """

    def __init__(self):
        self.process, self.queues = os.getpid(), {}

    def start(self, n, function):
        """Has thread n call function(), after what it was given before."""
        if self.process != os.getpid():
            self.process, self.queues = os.getpid(), {}
        queue = self.queues.get(n)
        if queue is None:
            queue = SimpleQueue()
            _thread.start_new_thread(serve, (queue,))
            self.queues[n] = queue  # now that it is served
            # Not at the exit of Python: a thread that ended then would free its libraries' data in a dying interpreter.
            weakref.finalize(self, queue.put, None).atexit = False
        queue.put(function)


def serve(queue):
    """Calls the functions in a queue until there is None."""
    while (function := queue.get()) is not None:
        function()
        del function  # and with it what it refers to


def start_new(n, function):
    """Calls function() in a new thread."""
    _thread.start_new_thread(function, ())


def run_each(count, work, stop=lambda: None, start=start_new):
    """[work(0), ..., work(count - 1)], made at the same time, each in a thread of its own, the first in the caller's.

    If one of them fails, `stop()` should make the others return soon. Their errors are raised here, the first one of
    the first that has one. `start` may be that of a `Standing`.
    """
    results = [None] * count

    def made(n):
        results[n] = work(n)

    call = guarded(made, stop)
    shares = [Share(call, n) for n in range(1, count)]

    def work_here():
        for share in shares:
            start(share.n, share.run)
        call(0)
        for share in shares:
            share.wait(begun=True)

    complete(shares, stop, work_here)
    return results
