"""Locks that survive a fork, and caches that threads fill once."""

import os
import threading
from functools import wraps


class Lock:
    """A lock that its thread may take again. In a forked process it is free, whoever held it before the fork.

    Copies, also by pickle, are locks of their own.
    """

    def __init__(self):
        self._made()

    def _made(self):
        self.process, self.lock = os.getpid(), threading.RLock()

    def __enter__(self):
        if self.process != os.getpid():
            self._made()
        self.lock.acquire()
        return self

    def __exit__(self, *_):
        self.lock.release()

    def __reduce__(self):
        return type(self), ()


def once(function):
    """As `functools.cache`, but threads that ask at the same time wait for one of them to make what they ask for.

    What has been made is in the dict `made` of the function that is returned, by the arguments.
    """
    made, lock = {}, Lock()

    @wraps(function)
    def asked(*args):
        if args in made:
            return made[args]
        with lock:
            if args not in made:
                made[args] = function(*args)
            return made[args]

    asked.made = made
    return asked


def locked(method):
    """A method that holds its object's `lock` while it runs."""

    @wraps(method)
    def alone(self, *args, **options):
        with self.lock:
            return method(self, *args, **options)

    return alone
