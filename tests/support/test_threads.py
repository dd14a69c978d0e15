"""Threads that stay, and work that is done at the same time in each of them."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest

from md4.support.threads import Standing, run_each


class Thing:
    """Something that a function refers to."""


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-3)


def test_each_number_has_its_thread():
    """The same in every call, and not the caller's."""
    standing, seen = Standing(), []
    for _ in range(3):
        found = [None] * 4
        run_each(4, lambda n: found.__setitem__(n, threading.get_ident()), start=standing.start)  # noqa: B023
        seen.append(found)
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] == threading.get_ident()
    assert len(set(seen[0])) == 4


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt])
def test_errors_arrive_and_threads_stay(number, fault):
    standing = Standing()

    def work(n):
        if n == number:
            raise fault(f"in {n}")

    with pytest.raises(fault, match=f"in {number}"):
        run_each(3, work, start=standing.start)
    done = []
    run_each(3, done.append, start=standing.start)
    assert sorted(done) == [0, 1, 2]


def test_nothing_is_kept():
    """Threads end with the object, and hold nothing of what they did."""
    standing, thing = Standing(), Thing()
    identities = []

    def work(n, thing=thing):
        identities.append(threading.get_ident())

    run_each(2, work, start=standing.start)
    kept = weakref.ref(thing)
    del thing, work
    wait_for(lambda: kept() is None)
    ended, queue = weakref.ref(standing), standing.queues[1]
    del standing
    gc.collect()
    assert ended() is None
    wait_for(queue.empty)  # the thread took the end


AT_EXIT = """
import atexit, os, threading, time
atexit.register(time.sleep, 0.5)  # called last
from md4.support.threads import Standing, run_each

class Data:
    def __del__(self, write=os.write, here=threading.get_ident, main=threading.get_ident()):
        if here() != main:
            write(1, b"freed")

local, standing = threading.local(), Standing()
run_each(2, lambda n: n and setattr(local, "data", Data()), start=standing.start)
os.write(1, b"done ")
"""


def test_threads_do_not_end_at_exit():
    """What libraries keep for a thread is not freed in an interpreter that is about to end."""
    ended = subprocess.run([sys.executable, "-c", AT_EXIT], check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "done ")


def test_after_a_fork():
    """The child has no threads of its parent, and starts its own."""
    standing = Standing()
    run_each(2, lambda n: None, start=standing.start)
    child = os.fork()
    if child == 0:
        done = []
        run_each(2, done.append, start=standing.start)
        os._exit(0 if sorted(done) == [0, 1] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
