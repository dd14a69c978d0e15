"""Locks in forked processes, and caches that threads fill once."""

import os
import signal
import threading

from md4.support.locks import Lock, once

THREADS = 8


def test_a_lock_that_another_thread_holds_is_free_in_a_forked_process():
    lock, taken, leave = Lock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            taken.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(60)
    child = os.fork()
    if not child:
        with lock:
            os._exit(7)
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_fork_of_the_thread_that_holds_a_lock():
    """Both processes release it."""
    lock = Lock()
    with lock:
        child = os.fork()
        if not child:
            try:
                lock.release()
                os._exit(7 if lock.acquire(blocking=False) else 8)
            finally:
                os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_an_interrupt_leaves_no_lock_taken():
    class Interrupt(Exception):
        pass

    def stop(*_):
        raise Interrupt

    def others():
        free.append(all(lock.acquire(blocking=False) for lock in taken))

    lock, free, count = Lock(), [], 0
    taken, before = [lock], signal.signal(signal.SIGALRM, stop)
    try:
        for n in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + 1e-7 * n)
                while True:
                    with lock:
                        pass
            except Interrupt:
                count += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    thread = threading.Thread(target=others)
    thread.start()
    thread.join()
    assert (count, free) == (300, [True])


def test_threads_wait_for_what_one_of_them_makes():
    made, barrier = [], threading.Barrier(THREADS)

    @once
    def make(n):
        made.append(n)
        return object()

    def work():
        barrier.wait()
        found.append(make(3))

    found = []
    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [3]
    assert len(set(found)) == 1
