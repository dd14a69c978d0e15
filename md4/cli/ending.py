"""The end of a command: signals, closed pipes and errors become one line on stderr and an exit status."""

import errno
import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress

from md4.errors import ArgumentError, MD4Error

INTERRUPTED = 128 + signal.SIGINT
UNREAD = 128 + signal.SIGPIPE
# Signals that end a process at once unless they are handled, so that temporary files would stay.
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def exit_by_signal(number, _frame):
    """Handler of signals: ends the process by an exception, so that everything is cleaned up."""
    raise SystemExit(128 + number)


@contextmanager
def signals_exit():
    """Signals end the block by SystemExit, unless they are ignored or handled already.

    This is for blocks that write files. Python handles a signal only when compiled code returns, and other long
    computations should end at once.
    """
    ours = []
    try:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    ours.append(number)
                    signal.signal(number, exit_by_signal)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def writing(name):
    """For a block that writes a file, which a signal ends with cleaning up; ArgumentError if the system refuses."""
    try:
        with signals_exit():
            yield
    except OSError as error:
        raise ArgumentError(
            f"cannot write {name!r}: {os.strerror(error.errno) if error.errno else error}. "
            "What was there is as it was; choose another place."
        ) from error


class HeldSignals:
    """Signals that arrive inside the block are handled at its end, or at `check`.

    An exception of a handler is lost if it is raised inside a callback of a C library or of a weak reference (h5py has
    many of both, of the latter when its objects are freed), and it may interrupt the cleaning up after another
    exception. Only signals with a handler in Python are held.
    """

    def __enter__(self):
        self.came, self.before = [], {}
        if threading.current_thread() is threading.main_thread():
            for number in [signal.SIGINT, *SIGNALS]:
                if callable(signal.getsignal(number)):
                    self.before[number] = signal.signal(number, self.note)
        return self

    def note(self, number, _frame):
        self.came.append(number)

    def check(self):
        """Calls the handlers of the signals that have arrived, which raise exceptions."""
        while self.came:
            number = self.came.pop(0)
            self.before[number](number, None)

    def __exit__(self, kind, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if kind is None:
            self.check()


@contextmanager
def any_character():
    """Inside this context, characters that the encoding of stdout lacks are printed as numbers."""
    stream, errors = sys.stdout, getattr(sys.stdout, "errors", None)
    if errors not in ("strict", "surrogateescape") or not hasattr(stream, "reconfigure"):
        yield
        return
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        with suppress(OSError):  # it flushes, and the reader may be gone
            stream.reconfigure(errors=errors)


def exit_status(command):
    """Runs `command`. Returns its exit status, or that of an error, about which it prints one line on stderr.

    Parameters
    ----------
    command : callable
        Takes nothing and returns an exit status.
    """
    try:
        with any_character():
            try:
                return command()
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
    except MD4Error as error:
        return complain(error)
    except MemoryError as error:
        return out_of_memory(error)
    except KeyboardInterrupt:
        complain("interrupted.")
        return INTERRUPTED
    except BrokenPipeError:
        drop_output()
        return UNREAD
    except (OSError, ImportError) as error:
        drop_output()
        lacks_memory = getattr(error, "errno", None) == errno.ENOMEM or "failed to map segment" in str(error)
        return out_of_memory(error) if lacks_memory else complain(f"{error}.")


def out_of_memory(error):
    """As `complain`, for an allocation that failed."""
    details = f" ({error})" if str(error) else ""
    return complain(
        f"out of memory{details}; give a --max-memory below what this process may use, or ask for less, "
        "for instance by --aosym s8."
    )


def complain(reason):
    """Prints `reason` on one line; returns the exit status of a command that failed."""
    with suppress(OSError):
        print(f"md4: {' '.join(str(reason).split())}", file=sys.stderr)
    return 2


def drop_output():
    """Discards what stdout still holds, because the interpreter would complain at its end that it cannot write it."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
