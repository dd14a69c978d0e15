"""Turns of processes that need the same compiled code: one compiles, and the others look again when it has.

Who has the turn holds a lock of the operating system (flock) on a file in the folder of the cache. It ends with the
process that has it, however that ends. Only work is saved by it: where a folder cannot be written, a disk is full or
has no locks, or the one whose turn it is makes nothing for long, a process compiles at the same time as others.

Nobody can wait without end: who has a turn waits for no other, and for nobody but processes that it started, which take
no turns. Of one who is stopped, a process finds this out once.
"""

import fcntl
import os
from contextlib import nullcontext, suppress
from math import inf
from threading import get_ident
from time import monotonic, sleep
from weakref import WeakValueDictionary

from md4.support.cache import entry_path
from md4.support.log import log
from md4.support.progress import compiling

# Seconds between two looks at the folder while another process compiles, and seconds in which it makes nothing of what
# is missing here, after which nobody waits for it any more.
PAUSE, PATIENCE = 0.2, 120.0
# Bytes for which there must be room, or else nothing of what others compile could be found there. Few files are larger.
ROOM = 1 << 20
WAITING = "another process compiles for this cache"

held = WeakValueDictionary()  # by thread, the file of the turn that it has or waits for
stopped = set()  # paths of turns for which this process has waited in vain


def close_all():
    """Called in a child process after a fork: the lock of a file is free when no process has the file open."""
    for file in list(held.values()):
        file.close()


os.register_at_fork(after_in_child=close_all)


def compile_in_turn(name, missing, work, progress=None, unit="kernel"):
    """Compiles what is missing, when no other process that uses the same cache and no other thread does so.

    Parameters
    ----------
    name : str
        What is compiled; different names do not wait for each other.
    missing : callable
        The list of what this process needs and the cache lacks.
    work : callable
        work(todo, bar) compiles what was missing when the turn came, and reports it to `bar`.
    progress, unit
        As for `md4.support.progress.compiling`.

    Returns
    -------
    todo : list
        What `work` was given; empty where nothing was missing, or others have made it meanwhile.
    """
    first = missing()
    if not first:
        return []
    with compiling(len(first), progress, unit) as bar:

        def left():
            number = len(missing())
            bar.remaining(number, WAITING)
            return number

        def turn():
            todo = missing()
            bar.remaining(len(todo))
            if todo:
                work(todo, bar)
            return todo

        return in_turn(name, turn, left)


def in_turn(name, work, left):
    """work(), once it is this thread's turn, or once left() is 0 while another one has it."""
    path, thread = entry_path(f"{name}.turn"), get_ident()
    mine = held.get(thread)
    if mine is not None and not mine.closed:
        return work()  # within the work of a turn
    with opened(path) as file:
        if not file:
            return work()
        held[thread] = file
        try:
            if has_room(file):
                wait(file, path, left)
            return work()
        finally:
            release(file)


def release(file):
    """Frees the lock of a file, also where a child that another thread has forked meanwhile has the file open."""
    with suppress(OSError):
        if not file.closed:
            fcntl.flock(file, fcntl.LOCK_UN)


def opened(path):
    """The file at a path, open for writing and made if need be; a context of None where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "wb", buffering=0, opener=private)
    except OSError:
        return nullcontext()


def private(path, flags):
    """Opens a file that only this user can open, so that nobody else can keep its lock."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def has_room(file):
    """Whether the disk of an open file is not full; the file is empty afterwards."""
    try:
        written = file.write(bytes(ROOM))
        file.truncate(0)
    except OSError:
        return False
    return written == ROOM


def wait(file, path, left):
    """Waits until this process has the lock of an open file, or need not have it."""
    seen, fewest, since = None, inf, monotonic()
    while not has_lock(file):
        if path in stopped:
            return
        if seen is None:
            log.info("waiting: %s", WAITING)
        if (change := last_change(path.parent)) != seen:
            seen, number = change, left()
            if number == 0:
                return
            if number < fewest:
                fewest, since = number, monotonic()
        if monotonic() - since > PATIENCE:
            stopped.add(path)
            log.info("not waiting any longer: nothing that is missing came into the cache for %d s", PATIENCE)
            return
        sleep(PAUSE)


def has_lock(file):
    """Whether this process has, or gets, the lock of a file, or there are no locks on its file system."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def last_change(folder):
    """The time of the last change of the files of a folder, in ns; 0 where there is no such folder any more."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0
