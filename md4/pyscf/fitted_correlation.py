"""PySCF's DFMP2, DFUMP2 and RPA objects that are attached: `md4.DF` in place of their fitting, MP2 energies by md4."""

import sys

import numpy as np

from md4 import gpu
from md4.contract.fitted_mp2 import mp2
from md4.contract.mp2 import Spin
from md4.errors import ArgumentError, UnsupportedError
from md4.pyscf.classes import Restorable, in_front
from md4.pyscf.correlated import as_amplitudes
from md4.pyscf.df import DF, by_md4, by_pyscf, check_replaceable
from md4.pyscf.orbitals import checked_orbitals, is_transformed_by_md4
from md4.support.arguments import checked_flag


class MD4FittedMP2(Restorable):
    """Mixin in front of PySCF's DFMP2 or DFUMP2, whose energy is made where the fitted integrals are.

    These are never on the host, and amplitudes are there only if they are asked for. Where PySCF's own integrals are
    given for `eris`, or a tensor to `with_df`, all is left to PySCF.
    """

    __name_mixin__ = "MD4"

    def kernel(self, mo_energy=None, mo_coeff=None, eris=None, with_t2=True):
        """PySCF's kernel, for which `with_df` stands for the integrals."""
        if eris is None and is_transformed_by_md4(self.with_df):
            eris = self.with_df
        return super().kernel(mo_energy, mo_coeff, eris, with_t2)

    def init_amps(self, mo_energy=None, mo_coeff=None, eris=None, with_t2=True):
        """(correlation energy with its parts, t2 or None), as PySCF's."""
        fitting = self.with_df if eris is None else eris
        if not is_transformed_by_md4(fitting):
            return super().init_amps(mo_energy, mo_coeff, eris, with_t2)
        sets = [self.split_mo_coeff(), self.split_mo_energy()]
        unrestricted = not hasattr(sets[0][0], "shape")
        spins = [
            Spin(*checked_orbitals(orbitals[1:3], self.mol.nao), np.concatenate(energies[1:3]))
            for orbitals, energies in (zip(*sets) if unrestricted else [sets])
        ]
        return as_amplitudes(*mp2(fitting._md4_fitting(), spins, with_t2))


def is_fitted_correlation(obj):
    """Whether an object is one of PySCF's DFMP2, DFUMP2, or of what is derived from them, as RPA."""
    found = ((sys.modules.get(f"pyscf.mp.{name.lower()}"), name) for name in ("DFMP2", "DFUMP2"))
    return any(isinstance(obj, getattr(module, name)) for module, name in found if module is not None)


def attach_correlation(obj, mo_integrals, **options):
    """`md4.attach` of such an object: its fitting, and the energy of MP2, are those of md4.

    MP2 alone has no use for a tensor over AOs, and to fit integrals over orbitals is less work, which binds a CPU.
    """
    name = type(obj).__name__
    if not hasattr(obj, "split_mo_coeff"):
        raise UnsupportedError(f"{name} is attached with PySCF 2.8 or newer; set its with_df = md4.DF(...) instead.")
    if not checked_flag("mo_integrals", mo_integrals):
        raise ArgumentError(f"{name} has no integrals but those over orbitals; leave mo_integrals=False out.")
    check_replaceable(obj.with_df)
    is_mp2 = type(obj).kernel.__module__.startswith(("pyscf.mp.", "md4."))  # RPA has a kernel of its own
    checked = DF(obj.with_df.mol, obj.with_df.auxbasis, **options)
    if not isinstance(obj.with_df, DF):
        on_cpu = options["backend"] == "cpu" or not gpu.available()
        store = "direct" if is_mp2 and on_cpu else "auto"
        obj.with_df = by_md4(obj.with_df, **checked._md4.options | {"store": store})
    return in_front(obj, MD4FittedMP2) if is_mp2 else obj


def detach_correlation(obj):
    """Inverse of `attach_correlation`."""
    from pyscf import lib

    if not isinstance(obj.with_df, DF):
        raise ArgumentError(f"{type(obj).__name__} is not attached to md4; nothing to detach.")
    obj.with_df = by_pyscf(obj.with_df)
    if isinstance(obj, MD4FittedMP2):
        obj.__class__ = lib.misc.drop_class(obj.__class__, MD4FittedMP2)
    return obj
