"""PySCF's side of md4: integrals under PySCF's names, mean-field objects, molecules from files."""

from importlib import util

from md4.errors import ArgumentError
from md4.support.environment import way_to_extra


def check_pyscf(what):
    """ArgumentError if PySCF is not installed, which `what` needs."""
    if util.find_spec("pyscf") is None:
        raise ArgumentError(f"{what} needs PySCF, which is not installed; {way_to_extra('pyscf')}.")
