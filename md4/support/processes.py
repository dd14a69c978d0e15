"""Other processes of this interpreter, which compile what the disk cache lacks."""

import gc
import os
import sys

from md4.errors import ArgumentError
from md4.support.cache import SOURCES, cache_folder, fingerprint

# Most processes that compile unasked.
MOST_PROCESSES = 16
# What says how many threads libraries of linear algebra start, which a process that compiles does not need.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Of the C library: memory that is free is not given back to the system, from which a compiler would take it again.
KEPT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_MMAP_THRESHOLD_": "33554432",
               "MALLOC_TOP_PAD_": "67108864"}  # fmt: skip


def processors():
    """Number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allowed_jobs():
    """Processes that may compile: MD4_JOBS, or one for each processor that this one may use, 16 at most."""
    wish = os.environ.get("MD4_JOBS")
    if not wish:
        return min(MOST_PROCESSES, processors())
    if not wish.isdecimal() or int(wish) < 1:
        raise ArgumentError(f"MD4_JOBS must be a number of processes, 1 or more, not {wish!r}.")
    return int(wish)


def can_keep():
    """Whether the disk cache can be written."""
    folder = cache_folder() / fingerprint()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def can_start():
    """Whether this interpreter can be started again: that of a frozen program is the program itself."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def command(code):
    """Command of a process of this interpreter that runs `code` with this md4 and the modules that this one can import.

    Their folders come after the interpreter's own: a file beside a user's script may have the name of one of Python's
    modules. Folders with another md4, such as the current one or that of an installed version, come last.
    """
    home = str(SOURCES.parent)
    paths = [*(path or os.getcwd() for path in sys.path if isinstance(path, str)), home]
    own = (
        f"import os, sys; own = [p for p in sys.path if p]; own += [p for p in {paths!r} if p not in own]; "
        f"sys.path = sorted(own, key=lambda p: p != {home!r} and os.path.exists(os.path.join(p, 'md4')))"
    )
    return [sys.executable, "-c", f"{own}; {code}"]


def environment():
    """Environment of such a process: its processes compile, each in one thread, and keep the memory that they have had.

    Its processes start no further ones.
    """
    return os.environ | dict.fromkeys(THREADS, "1") | KEPT_MEMORY | {"MD4_JOBS": "1"}


def collect_seldom():
    """Has this process, which only compiles, look for garbage seldom: nearly all of Numba's many objects live on."""
    gc.freeze()
    gc.set_threshold(100_000, 10, 3)
