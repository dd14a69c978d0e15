"""PySCF's density-fitted objects that are attached. PySCF is imported with this module, so functions import it."""

from pyscf.df.df_jk import _DFHF

from md4.pyscf.classes import in_front
from md4.pyscf.gradients import MD4FittedForces


class MD4DFHF(_DFHF):
    """PySCF's class of density fitting, whose gradients have two-electron forces by md4."""

    def nuc_grad_method(self):
        return in_front(super().nuc_grad_method(), MD4FittedForces)

    Gradients = nuc_grad_method
