"""Locks that survive a fork, and caches whose entries are made once, whatever the number of threads."""

import _thread
import os
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakSet


class Lock(_thread.RLock):
    """A lock that a thread may take repeatedly. In a forked process it is free, even if another thread held it before.

    A thread that forks while it holds the lock holds it in both processes. A copy, also one by pickle, is a new lock.
    `__enter__` must be that of C: an interrupt at the end of one in Python would leave the lock taken for good, and
    other threads would wait for it without end.
    """

    def __init__(self):
        locks.add(self)

    def __reduce__(self):
        return type(self), ()


locks: WeakSet[Lock] = WeakSet()


def free_all():
    """Called in a child process after a fork, which does not copy the threads that hold locks."""
    for lock in locks:
        if not lock._is_owned():  # else the thread that forked releases it later
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=free_all)


def once(function):
    """As `functools.cache`, but if several threads need the same value, one makes it and the others wait.

    The values are in the dict `made` of the function that is returned, with the arguments as keys.
    """
    made, lock = {}, Lock()

    @wraps(function)
    def asked(*args):
        try:
            return made[args]
        except KeyError:
            pass
        with lock:
            if args not in made:
                made[args] = function(*args)
            return made[args]

    asked.made = made
    return asked


Method = TypeVar("Method", bound=Callable[..., Any])


def locked(method: Method) -> Method:
    """Makes a method hold the `lock` of its object while it runs."""

    @wraps(method)
    def alone(self, *args, **options):
        with self.lock:
            return method(self, *args, **options)

    return cast(Method, alone)
