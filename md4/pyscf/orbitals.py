"""The part of `md4.DF` for pairs of orbitals, and the functions of PySCF that use it.

PySCF's DFMP2, DFUMP2 and RPA have no method to override: a function of their modules goes through all rows of the
tensor on the host. `install` replaces these functions, once, by ones that ask an `md4.DF` for rows over orbitals, and
call PySCF's for everything else. PySCF's `df.DF` may be given the rows of an `md4.DF` as its tensor.
"""

from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from md4.contract.fitting_orbitals import Pieces, integrals
from md4.cpu.matrices import all_finite
from md4.errors import ArgumentError, UnsupportedError
from md4.pyscf.classes import replace
from md4.pyscf.tensors import Rows
from md4.support.arguments import as_list, checked_array, checked_flag, shown
from md4.support.memory import host_array
from md4.support.types import HostArray

# Largest difference of orbitals that PySCF calls the same.
SAME = 1e-13


class OrbitalRows:
    """Base of `md4.DF`, which has the attributes."""

    mol: Any
    loop: Any
    _md4_fitting: Any
    _md4_pyscf: Any

    def mo_rows(self, mo_i: npt.ArrayLike, mo_j: npt.ArrayLike) -> HostArray:
        """Rows of the tensor over pairs of orbitals, transformed where the tensor is.

        Parameters
        ----------
        mo_i, mo_j : array_like, shapes (nao, n_i) and (nao, n_j)
            Real coefficients.

        Returns
        -------
        rows : ndarray, shape (naux, n_i * n_j)
            (ij|kl) is about ``rows_ij.T @ rows_kl``, in Hartree.

        Raises
        ------
        ArgumentError, UnsupportedError
            Orbitals of another shape or with numbers that are not finite, or complex ones.
        MemoryLimitError
            The rows do not fit into host memory, or the least workspace does not fit.

        Examples
        --------
        >>> import md4, pyscf
        >>> mf = pyscf.M(atom="H 0 0 0; F 0 0 0.917", basis="cc-pvdz").RHF().run()
        converged SCF energy = -100.0...
        >>> fit = md4.DF(mf.mol, auxbasis="cc-pvdz-ri")
        >>> fit.mo_rows(mf.mo_coeff[:, :5], mf.mo_coeff[:, 5:]).shape
        (70, 70)
        """
        left, right = checked_orbitals((mo_i, mo_j), self.mol.nao)
        if self._md4_pyscf is not None:
            return given_rows(self, left, right)
        rows = self._md4_fitting().mo_rows(left, right)
        return rows.reshape(len(rows), -1)

    def ao2mo(self, mo_coeffs: npt.ArrayLike | Sequence[npt.ArrayLike], compact: bool = True) -> HostArray:
        """Integrals (ij|kl) over orbitals, as `pyscf.df.DF.ao2mo`.

        Parameters
        ----------
        mo_coeffs : array_like
            Coefficients (nao, n) of all four indices, or four such arrays.
        compact : bool
            Of two indices with the same orbitals, only pairs with j <= i.

        Returns
        -------
        eri : ndarray, shape (pairs ij, pairs kl), in Hartree

        Raises
        ------
        ArgumentError, UnsupportedError, MemoryLimitError
            As `mo_rows`.
        """
        if self._md4_pyscf is not None:
            return super().ao2mo(mo_coeffs, compact)  # type: ignore[misc]
        one, compact = isinstance(mo_coeffs, np.ndarray) and mo_coeffs.ndim == 2, checked_flag("compact", compact)
        i, j, k, l = orbital_sets([mo_coeffs] * 4 if one else mo_coeffs, 4, self.mol.nao)
        triangles = [compact and same(i, j), compact and same(k, l)]
        bra, ket = (i, i if triangles[0] else j), (k, k if triangles[1] else l)
        if same(i, k) and same(j, l):
            return integrals(self._md4_fitting(), bra, None, triangles[:1])
        return integrals(self._md4_fitting(), bra, ket, triangles)

    get_mo_eri = ao2mo


def checked_orbitals(orbitals, nao):
    """Coefficients as float64 arrays (nao, n)."""
    found = [checked_array("the orbitals", one, "mf.mo_coeff") for one in orbitals]
    for one in found:
        if one.dtype.kind == "c":
            raise UnsupportedError("the orbitals are complex; md4 transforms integrals to real orbitals only.")
        if one.ndim != 2 or len(one) != nao or one.dtype.kind not in "fiu":
            raise ArgumentError(f"orbitals must have the shape ({nao}, n), not {one.shape} of {one.dtype}.")
    with np.errstate(over="ignore"):  # numbers beyond float64 are refused below
        found = [np.asarray(one, dtype=float) for one in found]
    if not all(map(all_finite, found)):
        raise ArgumentError("the orbitals have elements that are not finite in double precision.")
    return found


def orbital_sets(mo_coeffs, count, nao):
    """So many sets, one for each index, as of `checked_orbitals`."""
    sets = as_list(mo_coeffs)
    if sets is None or len(sets) != count:
        raise ArgumentError(
            f"mo_coeffs must hold {count} arrays of orbitals, one for each index, not {shown(mo_coeffs)}."
        )
    return checked_orbitals(sets, nao)


def same(one, other):
    """Whether PySCF calls two sets of orbitals the same."""
    return one is other or (one.shape == other.shape and abs(one - other).max(initial=0.0) < SAME)


def given_rows(fit, left, right):
    """`mo_rows` of a tensor that an object was given, perhaps in a file, by PySCF."""
    from pyscf.ao2mo import _ao2mo

    n, m = left.shape[1], right.shape[1]
    both = np.asarray(np.hstack([left, right]), order="F")
    rows = [_ao2mo.nr_e2(block, both, (0, n, n, n + m), aosym="s2") for block in fit.loop()]
    return np.concatenate(rows) if n * m else np.zeros((fit.get_naoaux(), 0))


# functions of PySCF ---------------------------------------------------------------------------------------------------


def is_transformed_by_md4(with_df):
    """Whether pairs of orbitals are those of an `md4.DF` with a tensor of its own."""
    return isinstance(with_df, OrbitalRows) and with_df._md4_pyscf is None


def install():
    """Makes PySCF's DFMP2, DFUMP2 and RPA ask an `md4.DF` for fitted integrals over orbitals; called once.

    Versions of PySCF before 2.8 have no such functions, and take rows over AOs.
    """
    replace(import_module("pyscf.ao2mo.addons").load, "__enter__", opened_rows)
    for name, transformed in (("dfmp2", of_closed_shells), ("dfump2", of_two_spins)):
        with suppress(ImportError):
            module = import_module(f"pyscf.mp.{name}")
            if hasattr(module, "_init_mp_df_eris"):
                replace(module, "_init_mp_df_eris", transformed)


def opened_rows(theirs, loaded):
    """`ao2mo.load.__enter__`, by which PySCF's `df.DF` reads the tensor that it was given."""
    return loaded.eri if isinstance(loaded.eri, Rows) else theirs(loaded)


def of_closed_shells(theirs, with_df, occ_coeff, vir_coeff, max_memory, h5obj=None, log=None):
    """PySCF's ovL, shape (o v, naux), in memory or as a dataset."""
    if not is_transformed_by_md4(with_df):
        return theirs(with_df, occ_coeff, vir_coeff, max_memory, h5obj, log)
    return fitted_pairs(with_df, [(occ_coeff, vir_coeff)], ["ovL"], h5obj)[0]


def of_two_spins(theirs, with_df, occ_coeff, vir_coeff, max_memory, h5obj=None, log=None):
    """The same for each spin."""
    if not is_transformed_by_md4(with_df):
        return theirs(with_df, occ_coeff, vir_coeff, max_memory, h5obj, log)
    return fitted_pairs(with_df, list(zip(occ_coeff, vir_coeff)), ["ovL0", "ovL1"], h5obj)


def fitted_pairs(with_df, pairs, names, h5obj):
    """B[ia, Q] of pairs of sets of orbitals, NumPy arrays or datasets of a file."""
    fit, out = with_df._md4_fitting(), []
    for name, (left, right) in zip(names, pairs):
        shape = left.shape[1] * right.shape[1], fit.size
        if h5obj is None:
            out.append(host_array(shape, "fitted integrals over pairs of orbitals"))
        else:
            out.append(h5obj.create_dataset(name, shape, "f8", chunks=(1, fit.size) if shape[0] else None))

    def use(piece, array):
        v = pairs[piece.number][1].shape[1]
        for i in range(piece.first, piece.last):
            with fit.working():
                found = fit.algebra.fetch(array[(i - piece.first) * v : (i - piece.first + 1) * v])
            out[piece.number][i * v : (i + 1) * v] = found

    Pieces(fit, pairs).each(use)
    return out
