"""Other processes of this interpreter, which compile what the disk cache lacks."""

import os
import sys

from md4.errors import ArgumentError
from md4.support.cache import cache_folder, fingerprint

# Most processes that compile unasked.
MOST_PROCESSES = 16


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
    """Command of a process of this interpreter that runs `code` with the modules that this one can import.

    Their folders come after the interpreter's own: a file beside a user's script may have the name of one of Python's
    modules. The current folder is one of them only if it is here: it may have another version of md4.
    """
    paths = [path or os.getcwd() for path in sys.path if isinstance(path, str)]
    own = f"import sys; sys.path = [p for p in sys.path if p]; sys.path += [p for p in {paths!r} if p not in sys.path]"
    return [sys.executable, "-c", f"{own}; {code}"]


def environment():
    """Environment of such a process, which starts no further ones."""
    return os.environ | {"MD4_JOBS": "1"}
