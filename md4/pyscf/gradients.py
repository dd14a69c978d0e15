"""Nuclear gradients of attached objects: PySCF's, whose two-electron forces are those of md4.

Mixins in front of PySCF's classes. `MD4Derivatives` has the three methods from which PySCF takes derivatives of J and K
as matrices. `MD4Forces` needs no matrices for the gradient of a mean-field object: `md4.JK.gradient` makes the forces
of all J and K together, and PySCF's get_veff finds zeros where it asks for derivatives of J and K. So functionals,
nonlocal correlation, grids, one-electron integrals, solvents and whatever else adds to the gradient stay PySCF's.
"""

import time

import numpy as np

from md4.contract.fitting_force_team import gradient_of
from md4.contract.fock import checked_tolerance
from md4.contract.gradient import FACTOR
from md4.pyscf import effective_omega
from md4.pyscf.classes import Restorable, in_front
from md4.pyscf.tensors import tagged_orbitals
from md4.shells.basis import fingerprint
from md4.support.arguments import checked_array, checked_mol
from md4.support.display import backend_text

# The column of mol._bas that holds the number of the atom.
ATOM_OF = 0
METHODS = ("get_jk", "get_j", "get_k")


class MD4Derivatives(Restorable):
    """Mixin in front of a class of PySCF's gradients: derivatives of J and K by md4, for any density matrices.

    Arguments and results of the methods are those of the class behind this one.
    """

    __name_mixin__ = "MD4"

    def get_jk(self, mol=None, dm=None, hermi=0, omega=None):
        return self._md4_matrices(super().get_jk, True, True, mol, dm, hermi, omega)

    def get_j(self, mol=None, dm=None, hermi=0, omega=None):
        return self._md4_matrices(super().get_j, True, False, mol, dm, hermi, omega)[0]

    def get_k(self, mol=None, dm=None, hermi=0, omega=None):
        return self._md4_matrices(super().get_k, False, True, mol, dm, hermi, omega)[1]

    def _md4_matrices(self, by_pyscf, with_j, with_k, mol, dm, hermi, omega):
        """Derivatives of J and K, None where they are not wanted; by PySCF if the object is no longer attached."""
        mf = self._md4_attached
        if mf is None:
            found = by_pyscf(mol, dm, hermi, omega)
            return found if with_j and with_k else (found, found)
        return self._md4_timed(
            "Derivatives of J and K", mol, dm, lambda jk, mol, dm: jk.derivative_jk(
                dm, hermi, with_j, with_k, effective_omega(mol, omega), mf.direct_scf_tol
            ),
        )  # fmt: skip

    @property
    def _md4_attached(self):
        """The mean-field object, or that of the excited states; None if it is no longer attached."""
        mf = getattr(self.base, "_scf", self.base)
        return mf if hasattr(mf, "_md4_builder") else None

    def _md4_timed(self, what, mol, dm, work):
        """work(jk, mol, dm) on all ranks, with a line in PySCF's log."""
        from pyscf.lib import logger

        mf, start = self._md4_attached, time.perf_counter()

        def together():
            own = checked_mol(self.mol if mol is None else mol)
            given = checked_array("the density matrices", mf.make_rdm1() if dm is None else dm)
            jk = mf._md4_builder.jk(own, mf._tell_backend)
            return backend_text(jk.engine.backend), work(jk, own, given)

        text, found = mf._md4_builder.ranks.together(together, what)
        logger.info(self, "%s by md4: backend %s, %.2f s", what, text, time.perf_counter() - start)
        return found


class MD4Forces(MD4Derivatives):
    """Mixin in front of PySCF's gradients of RHF, UHF, ROHF, RKS, UKS and ROKS; see the module."""

    # While grad_elec runs: the forces, (natm, 3) in Hartree/Bohr. And whether PySCF's get_veff is to find zeros.
    _md4_forces, _md4_zeros = None, False

    def kernel(self, *args, **options):
        """PySCF's kernel. All ranks get the gradient of rank 0."""
        mf = self._md4_attached
        if mf is None:
            return super().kernel(*args, **options)
        de = mf._md4_builder.ranks.together(lambda: super(MD4Forces, self).kernel(*args, **options), "the gradient")
        self.de = mf._md4_builder.same_on_all(de)
        return self.de

    def grad_elec(self, mo_energy=None, mo_coeff=None, mo_occ=None, atmlst=None):
        """PySCF's grad_elec and the forces of two-electron integrals."""
        from pyscf.lib import logger

        self._md4_forces = np.zeros((self.mol.natm, 3))
        try:
            rest = super().grad_elec(mo_energy, mo_coeff, mo_occ, atmlst)
            forces = self._md4_forces if atmlst is None else self._md4_forces[atmlst]
        finally:
            self._md4_forces = None
        if self.verbose >= logger.DEBUG:
            logger.debug(self, "forces of two-electron integrals, which the gradients above do not contain")
            self._write(self.mol, forces, atmlst)
        return rest + forces

    def get_veff(self, mol=None, dm=None):
        """PySCF's get_veff; within grad_elec without J and K, whose forces are summed here."""
        if self._md4_forces is None or self._md4_attached is None or not self._md4_own():
            return super().get_veff(mol, dm)
        self._md4_forces += self._md4_two_electrons(mol, dm)
        self._md4_zeros = True
        try:
            return super().get_veff(mol, dm)
        finally:
            self._md4_zeros = False

    def _md4_own(self):
        """Whether the methods for J and K are those of md4, and nobody has replaced them."""
        return not any(name in vars(self) for name in METHODS)

    def _md4_two_electrons(self, mol, dm):
        """Forces of J and of all exchange of the functional, (natm, 3)."""
        return self._md4_exact(mol, dm, 1.0)

    def _md4_exact(self, mol, dm, coulomb):
        """Forces of so many times J and of all exchange of the functional without fitting, (natm, 3)."""
        omega, alpha, hyb = self._md4_factors()
        if omega < 0:  # erfc has the factor alpha - hyb then, erf what makes alpha of 1/r hyb
            omega, alpha, hyb = -omega, hyb, alpha
        long_range = (omega, alpha - hyb) if omega and alpha != hyb else None

        def work(jk, mol, dm):
            tolerance, forces = FACTOR * checked_tolerance(self.base.direct_scf_tol), np.zeros((mol.natm, 3))
            of_shells = jk.gradient(dm, coulomb, hyb, effective_omega(mol, None), tolerance, long_range)
            np.add.at(forces, mol._bas[:, ATOM_OF], of_shells)
            return forces

        return self._md4_timed("Forces of two-electron integrals", mol, dm, work)

    def _md4_factors(self):
        """(omega, alpha, hyb) of the functional; (0, 1, 1) of Hartree-Fock.

        Without exchange where PySCF takes the functional for one that is not hybrid, whatever its factors are.
        """
        from pyscf.scf.hf import KohnShamDFT

        mf = self.base
        if not isinstance(mf, KohnShamDFT):
            return 0.0, 1.0, 1.0
        numint = mf._numint
        hybrid = numint.libxc.is_hybrid_xc(mf.xc)
        return numint.rsh_and_hybrid_coeff(mf.xc, mf.mol.spin) if hybrid else (0.0, 0.0, 0.0)

    def _md4_parts(self):
        """Factors of fitted J and K and the omega of each operator, the ones that PySCF takes for the gradient."""
        omega, alpha, hyb = self._md4_factors()
        if omega and alpha == 0:
            return [(1.0, 0.0, None), (0.0, hyb, -omega)]
        if omega and alpha != hyb:
            return [(1.0, hyb, None), (0.0, alpha - hyb, omega)]
        return [(1.0, hyb, None)]

    def _md4_matrices(self, by_pyscf, with_j, with_k, mol, dm, hermi, omega):
        if not self._md4_zeros:
            return super()._md4_matrices(by_pyscf, with_j, with_k, mol, dm, hermi, omega)
        shape = np.shape(dm)
        return [np.zeros((*shape[:-2], 3, *shape[-2:])) for _ in "jk"]


class MD4FittedForces(MD4Forces):
    """The same in front of PySCF's gradients of density-fitted objects, whose forces are those of an `md4.DF`.

    Exchange that is not fitted has the forces of `md4.JK`. Derivatives of J and K as matrices are PySCF's.
    """

    def get_jk(self, mol=None, dm=None, hermi=0, with_j=True, with_k=True, omega=None):
        if self._md4_zeros:
            return self._md4_zero(dm), self._md4_zero(dm)
        return super(MD4Derivatives, self).get_jk(mol, dm, hermi, with_j, with_k, omega)

    def get_j(self, mol=None, dm=None, hermi=0, omega=None):
        return self._md4_zero(dm) if self._md4_zeros else super(MD4Derivatives, self).get_j(mol, dm, hermi, omega)

    def get_k(self, mol=None, dm=None, hermi=0, omega=None):
        return self._md4_zero(dm) if self._md4_zeros else super(MD4Derivatives, self).get_k(mol, dm, hermi, omega)

    def _md4_zero(self, dm):
        """Derivatives of J or K that are zero, with those by the centres of auxiliary functions."""
        from pyscf import lib

        shape = np.shape(dm)
        sets = int(np.prod(shape[:-2]))
        aux = np.zeros((sets, sets, self.mol.natm, 3))
        return lib.tag_array(np.zeros((*shape[:-2], 3, *shape[-2:])), aux=aux)

    def _md4_own(self):
        """Also whether an `md4.DF` of the same molecule makes what is fitted."""
        from md4.pyscf.df import DF

        fit = getattr(self.base, "with_df", None)
        return (
            super()._md4_own() and isinstance(fit, DF) and fit._md4_pyscf is None
            and fingerprint(fit.mol) == fingerprint(self.mol)
        )  # fmt: skip

    def _md4_two_electrons(self, mol, dm):
        """Made by the backend and the devices of the `md4.DF`, or by CPUs for a GPU that makes no forces."""
        from pyscf.lib import logger

        mf, parts, start = self.base, self._md4_parts(), time.perf_counter()
        dm = mf.make_rdm1() if dm is None else dm
        exact = mf.only_dfj and any(k for _, k, _ in parts)
        fitted = [(j, 0.0, omega) for j, _, omega in parts if j] if mf.only_dfj else parts
        forces, name = mf._md4_builder.ranks.together(lambda: self._md4_fitted(dm, fitted), "fitted forces")
        logger.info(self, "Forces of density fitting by md4: backend %s, %.2f s", name, time.perf_counter() - start)
        return forces + self._md4_exact(mol, dm, 0.0) if exact else forces

    def _md4_fitted(self, dm, parts):
        """(forces of `parts` of J and K, (natm, 3), of all ranks; the backend that made them)."""
        ranks, mol, fit = self.base._md4_builder.ranks, self.mol, self.base.with_df
        matrices = ranks.broadcast(np.array(checked_array("the density matrices", dm)))
        orbitals = tagged_orbitals(dm, 1 if matrices.ndim == 2 else len(matrices))
        tolerance, forces = FACTOR * checked_tolerance(self.base.direct_scf_tol), np.zeros((mol.natm, 3))
        name = "none"
        for coulomb, exchange, omega in parts:
            made = gradient_of(fit._md4_fitting(omega), ranks, fit._md4.options["cutoff"])
            name = made.fitting.engine.backend.name
            found = made.run(matrices, coulomb, exchange, orbitals, self.auxbasis_response, tolerance)
            for this, of_shells, basis in zip((mol, fit.auxmol), found, made.fitting.three.basis.parts):
                ends = this.aoslice_by_atom()[:, 3]
                np.add.at(forces, np.searchsorted(ends, basis.ao_loc[:-1], side="right"), of_shells)
        return forces, name


class MD4Excited(Restorable):
    """Mixin in front of a class of excited states: their gradients take derivatives of J and K from md4."""

    __name_mixin__ = "MD4"

    def Gradients(self, *args, **options):
        return in_front(super().Gradients(*args, **options), MD4Derivatives)
