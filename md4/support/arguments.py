"""Checks of arguments, which every entry point makes before it does any work.

Each `checked_*` returns the value in the form with which md4 works, or raises an error with the name of the argument,
the value and the remedy. NumPy's scalars are accepted like Python's. Truth values and strings are not numbers.
"""

import operator
import re
from math import inf, isfinite, nan

import numpy as np

from md4.errors import ArgumentError, UnsupportedError

ONE_MOLECULE = "pass a built molecule, e.g. pyscf.M(atom='H 0 0 0; F 0 0 0.917', basis='cc-pvdz')"
# The repr of an object whose class has none of its own.
BARE_REPR = re.compile(r"<.* at 0x[0-9a-fA-F]+>")


def shown(value):
    """`value` for a message: its repr, or its type if the repr is long, says no more, or fails."""
    try:
        text = repr(value)
    except Exception:  # the __repr__ of an unknown class may raise anything
        text = ""
    telling = 0 < len(text) <= 80 and "\n" not in text and not BARE_REPR.fullmatch(text)
    return text if telling else f"an object of type {type(value).__name__}"


def is_scalar(value):
    """Whether `value` can be a real number: not a string, truth value, complex number, or array with axes."""
    if isinstance(value, (str, bytes, bytearray, bool, np.ma.MaskedArray)):
        return False
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    return kind not in ("b", "c") and getattr(value, "shape", ()) == ()


def real_number(value):
    """`value` as a float; NaN if it is not a finite real number."""
    if not is_scalar(value):
        return nan
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return nan
    return number if isfinite(number) else nan


def whole_number(value):
    """`value` as an int; None if it is not an integer. 1.0 is not an integer."""
    if not is_scalar(value):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def checked_real(name, value, least=None):
    """A finite float, not below `least`."""
    number = real_number(value)
    if not (isfinite(number) and (least is None or number >= least)):
        bound = "" if least is None else ", not negative" if least == 0 else f", {least} or more"
        raise ArgumentError(f"{name} must be a finite real number{bound}, not {shown(value)}.")
    return number


def checked_integer(name, value, least):
    """An int, not below `least`."""
    number = whole_number(value)
    if number is None or number < least:
        raise ArgumentError(f"{name} must be an integer of {least} or more, not {shown(value)}.")
    return number


def checked_flag(name, value):
    """A bool; 0 and 1 are accepted."""
    if isinstance(value, (bool, np.bool_)) or whole_number(value) in (0, 1):
        return bool(value)
    raise ArgumentError(f"{name} must be True or False, not {shown(value)}.")


def checked_progress(progress):
    """A bool, or None, which means a bar if stderr is a terminal."""
    return None if progress is None else checked_flag("progress", progress)


def checked_choice(name, value, choices):
    """One of the strings in `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{name} {shown(value)} is unknown; use one of {', '.join(choices)}.")
    return value


def checked_memory(max_memory):
    """MB as a float, or None, which means what is free."""
    if max_memory is None:
        return None
    number = real_number(max_memory)
    if not 0 < number * 1e6 < inf:  # bytes
        raise ArgumentError(
            f"max_memory must be a positive, finite number of MB, not {shown(max_memory)}; None means what is free."
        )
    return number


def checked_stream(stream):
    """None, a stream of Numba, CuPy or PyTorch, or the integer handle of a stream. The check needs no GPU."""
    if stream is None or hasattr(stream, "auto_synchronize"):
        return stream
    handle = whole_number(getattr(stream, "cuda_stream", getattr(stream, "ptr", stream)))
    if isinstance(stream, type) or handle is None or not 0 <= handle < 1 << 64:
        what = "an integer handle or a Numba, CuPy or PyTorch stream"
        raise ArgumentError(f"stream must be {what}, not {shown(stream)}.")
    return stream


def as_list(values):
    """The items of a sequence as a list; None for a string, a mapping, a number, or an array without axes."""
    iterable = hasattr(values, "__iter__") and getattr(values, "shape", None) != ()
    return list(values) if iterable and not isinstance(values, (str, bytes, bytearray, dict, type)) else None


def checked_array(name, value, of_solver="mf.make_rdm1()"):
    """`value` as an ndarray; ArgumentError if NumPy cannot make one (rows of different lengths, a device array)."""
    if hasattr(value, "make_rdm1"):
        raise ArgumentError(f"{name} must be arrays, not {shown(value)}; pass {of_solver}.")
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{name} cannot be taken for an array: {error}.") from error


def checked_mol(mol, name="mol", way=None):
    """A `pyscf.gto.Mole` or an object with its methods. `md4.Basis.from_mol` checks whether it has shells.

    Raises
    ------
    ArgumentError
        It is something else; the message says how to get a molecule.
    UnsupportedError
        It is a periodic cell, which is recognised by the module of its class, without importing pyscf.pbc.
    """
    if any(cls.__module__.startswith("pyscf.pbc") for cls in type(mol).__mro__):
        raise UnsupportedError(
            f"{type(mol).__name__} of PySCF is periodic; md4 has the integrals of molecules only: {ONE_MOLECULE}."
        )
    if isinstance(mol, type) or not all(hasattr(mol, name) for name in ("_atm", "_bas", "_env", "bas_exp", "cart")):
        raise ArgumentError(f"{name} must be a pyscf.gto.Mole, not {shown(mol)}; {way or way_to_mol(mol)}.")
    return mol


def way_to_mol(mol):
    """What to pass in place of something that is not a molecule, for a message."""
    if hasattr(mol, "segmented") and hasattr(mol, "ao_loc"):
        return "an md4.Basis goes to md4.JK or md4.Engine"
    if not isinstance(mol, type) and hasattr(getattr(mol, "mol", None), "_bas"):
        return "pass its molecule, mf.mol; md4.attach(mf) gives a mean-field object md4's J and K"
    if isinstance(mol, str):
        return f"text becomes a molecule by pyscf.M(atom={shown(mol)}, basis='cc-pvdz')"
    return ONE_MOLECULE
