"""Density matrices as callers give them: checks, and the order of their AOs."""

import numpy as np

from md4.cpu.matrices import all_finite
from md4.errors import ArgumentError
from md4.support.arguments import checked_array, shown, whole_number

# Of arrays for compiled loops, which are compiled for each layout.
LAYOUT = ["C_CONTIGUOUS", "ALIGNED", "WRITEABLE"]


def checked_densities(dm, hermi, nao, finite=True):
    """dm with the shape (n, nao, nao) as float64 or complex128, and the shape that it was given with.

    Without `finite` the caller looks for numbers that are not finite, where that takes less time than on the host.

    Raises
    ------
    ArgumentError
        Density matrices or a symmetry `hermi` that cannot be used.
    """
    dm = checked_array("the density matrices", dm)
    if dm.ndim not in (2, 3) or dm.shape[-2:] != (nao, nao) or dm.dtype.kind not in "fciu" or dm.size == 0:
        raise ArgumentError(
            f"density matrices must have shape ({nao}, {nao}) or (n, {nao}, {nao}) and numbers, "
            f"not shape {dm.shape} of {dm.dtype}."
        )
    if whole_number(hermi) not in (0, 1, 2):
        raise ArgumentError(f"hermi must be 0 (general), 1 (Hermitian) or 2 (anti-Hermitian), not {shown(hermi)}.")
    with np.errstate(over="ignore"):  # numbers beyond float64 are refused below
        values = dm.astype(np.complex128 if dm.dtype.kind == "c" else np.float64, copy=False)
    if finite and not all_finite(values):
        raise not_finite()
    return values.reshape(-1, nao, nao), dm.shape


def by_parts(dm, real):
    """J and K of densities, shape (n, nao, nao), by `real`; of complex ones it gets both parts, 2 n real matrices."""
    if not np.iscomplexobj(dm):
        return real(dm)
    found, n = real(np.concatenate([dm.real, dm.imag])), len(dm)
    return tuple(None if v is None else v[:n] + 1j * v[n:] for v in found)


def not_finite():
    """The error for a density matrix with infinite numbers or NaN."""
    return ArgumentError("a density matrix has elements that are not finite in double precision.")


def in_order(matrices, order):
    """Matrices with rows and columns order[0], order[1], ...; the same object if that is their order already."""
    if np.array_equal(order, np.arange(len(order))):
        return matrices
    return np.ascontiguousarray(matrices[:, order[:, None], order])
