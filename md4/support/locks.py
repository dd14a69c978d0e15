"""Locks that survive a fork, and caches whose entries are made once, whatever the number of threads."""

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast


def note_fork():
    """Called in a child process: locks that its parent made count as held by nobody."""
    global forks  # noqa: PLW0603 a fork concerns the whole process
    forks += 1


forks = 0
os.register_at_fork(after_in_child=note_fork)


class Lock:
    """A lock that a thread may take repeatedly. In a forked process it is free, even if it was held before the fork.

    A copy, also one by pickle, is a new lock.
    """

    def __init__(self):
        self._made()

    def _made(self):
        self.forks, self.lock = forks, threading.RLock()

    def __enter__(self):
        if self.forks != forks:
            self._made()
        self.lock.acquire()
        return self

    def __exit__(self, *_):
        self.lock.release()

    def __reduce__(self):
        return type(self), ()


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
