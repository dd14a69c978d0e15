"""Checks of the command line, made before anything is read or computed."""

import os
import sys
from contextlib import contextmanager

from md4.errors import ArgumentError, MemoryLimitError
from md4.support.environment import missing_for_gpu
from md4.support.files import checked_target

LARGEST_WHOLE = 2**63 - 1
LARGEST_NUMBER = sys.float_info.max
MOST_JOBS = max(64, os.cpu_count() or 1)
# Least and largest value of each numerical option, and in words what it takes.
LIMITS = {
    "tolerance": (0, LARGEST_NUMBER, "a number, 0 or above"),
    "abs_tolerance": (0, LARGEST_NUMBER, "a number, 0 or above"),
    "max_quartets": (1, LARGEST_WHOLE, "a whole number, 1 or above, of at most 18 digits"),
    "seed": (0, LARGEST_WHOLE, "a whole number, 0 or above, of at most 18 digits"),
    "lmax": (0, 8, "the highest l of a class, from 0 to 8"),
    "jobs": (1, MOST_JOBS, f"a number of processes from 1 to {MOST_JOBS}"),
    "max_memory": (1e-6, 1e12, "a number of MB, above 0"),
    "omega": (-LARGEST_NUMBER, LARGEST_NUMBER, "a number, positive for erf and negative for erfc"),
    "charge": (-(10**6), 10**6, "a whole number, such as -1"),
    "spin": (0, 10**6, "the number of unpaired electrons, 0 or above"),
}


def check_options(options):
    """ArgumentError for values of options that cannot be used.

    Parameters
    ----------
    options : dict
        Values by the names of `argparse`; None if an option was not given.
    """
    for name, (least, most, words) in LIMITS.items():
        value = options.get(name)
        if value is not None and not least <= value <= most:
            raise ArgumentError(f"--{name.replace('_', '-')} takes {words}, not {shortened(value)}.")
    for name, example in (("basis", "cc-pvdz"), ("df", "cc-pvdz-jkfit")):
        if isinstance(options.get(name), str) and not options[name].strip():
            raise ArgumentError(f"--{name} is empty; give the name of a basis set, such as {example}.")
    if options.get("df") is not None and (options.get("mpi") or options.get("devices") is not None):
        raise ArgumentError("--df is for one process and one device: leave out --mpi and --devices.")
    check_names(options)
    check_kernel_files(options)
    chosen_devices(options.get("devices"))


def check_kernel_files(options):
    """ArgumentError for what does not go with --export or --import, and for a file that cannot be written."""
    if options.get("imported") is not None:
        given = (options[name] for name in ("geometry", "basis", "df", "forces", "mp2", "list"))
        if any(value not in (None, False) for value in given):
            others = "the molecule, --basis, --df, --forces, --mp2 and --list"
            raise ArgumentError(f"--import takes all kernels of a file; leave out {others}.")
    elif options.get("export") is None:
        return
    elif options["list"]:
        raise ArgumentError("--list compiles nothing that --export could write; leave out one of them.")
    else:
        checked_target(options["export"])
    if options["backend"] == "cpu":
        raise ArgumentError("--export and --import are for kernels of GPUs; leave out --backend cpu.")


@contextmanager
def memory_in_options(args, remedies=()):
    """Inside this context, what does not fit into the memory is told with remedies in options of the command line.

    The messages of md4's functions end, behind a semicolon, with those in arguments of Python.
    """
    try:
        yield
    except MemoryLimitError as error:
        more = "a machine with more memory" if args.max_memory is None else "a larger --max-memory"
        raise MemoryLimitError(f"{str(error).partition(';')[0]}; use {', or '.join([*remedies, more])}.") from error


def chosen_devices(text):
    """What `--devices` names, as `md4.int2e` takes it."""
    if text is None or text == "all":
        return text
    numbers = text.split(",")
    if not all(number.isascii() and number.isdecimal() and len(number) < 9 for number in numbers):
        raise ArgumentError(f"--devices takes all, or numbers of GPUs such as 0,1, not {text!r}.")
    return [int(number) for number in numbers]


def shortened(value):
    """A number as text, or the number of its digits if these are too many to show."""
    digits = abs(value).bit_length() * 0.30103 if isinstance(value, int) else 0
    return f"one of {digits:.0f} digits" if digits > 60 else f"{value}"


def check_names(options):
    """ArgumentError for an unknown kind of operator, symmetry or backend, an impossible omega, or a wrong MD4_JOBS."""
    from md4.engine import BACKENDS
    from md4.method.operators import Operator, checked_kind
    from md4.method.scatter import SYMMETRIES, THREE_CENTRE

    Operator.from_omega(options.get("omega"))
    for kind in options.get("operator") or ():
        checked_kind(kind)
    symmetries = SYMMETRIES if options.get("df") is None else tuple(THREE_CENTRE)
    for name, names in (("aosym", symmetries), ("backend", BACKENDS)):
        if options.get(name) is not None and options[name] not in names:
            raise ArgumentError(f"--{name} {options[name]!r} is unknown; use one of {', '.join(names)}.")
    if "backend" in options:
        check_jobs_variable()


def check_jobs_variable():
    """ArgumentError if MD4_JOBS, which a first call on a GPU reads, is not a number of processes."""
    if missing_for_gpu():  # nothing is compiled ahead
        return
    from md4.gpu.warmup import allowed_jobs

    allowed_jobs()
