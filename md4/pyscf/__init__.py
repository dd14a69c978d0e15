"""PySCF's side of md4: integrals under PySCF's names, mean-field objects, molecules from files."""

from contextlib import contextmanager
from importlib import util

from md4.errors import ArgumentError
from md4.method.operators import checked_omega
from md4.support.environment import way_to_extra


def check_pyscf(what):
    """ArgumentError if PySCF is not installed, which `what` needs."""
    if util.find_spec("pyscf") is None:
        raise ArgumentError(f"{what} needs PySCF, which is not installed; {way_to_extra('pyscf')}.")


def effective_omega(mol, omega):
    """`omega` with PySCF's meaning of None: the value of `mol`, which with_range_coulomb may have set.

    ArgumentError if there is no such operator.
    """
    return checked_omega(mol.omega if omega is None else omega)


@contextmanager
def timed(told, what):
    """Tells the log of an object of PySCF how long the block took, unless it fails."""
    from pyscf.lib import logger

    clock = logger.process_clock(), logger.perf_counter()
    yield
    logger.timer(told, what, *clock)


def check_density(dm, n):
    """ArgumentError unless `dm` consists of matrices of the shape (n, n)."""
    if dm.ndim < 2 or dm.shape[-2:] != (n, n) or dm.dtype.kind not in "fciu":
        raise ArgumentError(
            f"a density matrix of this object has shape (..., {n}, {n}) and numbers, not {dm.shape} of {dm.dtype}."
        )
