"""How a command ends: signals, pipes that nobody reads, and errors, each as one line and an exit status."""

import errno
import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress

from md4.errors import MD4Error

INTERRUPTED = 128 + signal.SIGINT
UNREAD = 128 + signal.SIGPIPE
# What ends a process at once unless it is handled: temporary files would stay.
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def exit_by_signal(number, _frame):
    """Handler: ends the process as an exception does, so that everything is cleaned up on the way."""
    raise SystemExit(128 + number)


@contextmanager
def signals_exit():
    """Signals end the block by SystemExit; those that are ignored, or handled by somebody else, stay so.

    For short blocks that write: Python handles a signal only once compiled code returns, and work that does not is to
    be ended at once.
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


class HeldSignals:
    """Signals that come inside the block wait for its end, or for `check`.

    An exception that a handler raises is lost where it meets a callback of a C library, as h5py has many, and may break
    off the cleaning up after another. Only signals with a handler in Python are held.
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
        """Lets the handler of a signal that has come do what it does, which is to raise."""
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
    """Prints what the terminal's encoding lacks, such as a file name that is not text, by its number."""
    stream, errors = sys.stdout, getattr(sys.stdout, "errors", None)
    if errors not in ("strict", "surrogateescape") or not hasattr(stream, "reconfigure"):
        yield
        return
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        with suppress(OSError):  # it flushes, and whoever reads may have gone
            stream.reconfigure(errors=errors)


def exit_status(command):
    """Runs `command`; its status, or that of the error that ended it, after one line on stderr.

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
    """As `complain`, of an allocation that failed."""
    details = f" ({error})" if str(error) else ""
    return complain(
        f"out of memory{details}; give a --max-memory below what this process may use, or ask for less, "
        "for instance by --aosym s8."
    )


def complain(reason):
    """Prints `reason` on one line; returns the exit status of a command that could not be done."""
    with suppress(OSError):
        print(f"md4: {' '.join(str(reason).split())}", file=sys.stderr)
    return 2


def drop_output():
    """Sends what stdout still holds to nowhere: the interpreter would complain, on its way out, that it cannot."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        return
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
