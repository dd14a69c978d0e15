"""Shells and basis sets: what the integrals are taken over.

A contracted shell of angular momentum l at centre A carries the functions

    chi_{c m}(r) = sum_k  c_kc  S_{l m}(r - A)  exp(-zeta_k |r - A|^2)

with S_{l m} the real solid harmonics of unit angular norm (or the Cartesian monomials of that degree) in PySCF's
order and normalisation; see `md4.angular`. AOs of a shell run [contraction c][component m].
"""

from dataclasses import dataclass, field
from functools import cached_property
from math import gamma

import numpy as np

from md4.angular import ncart, npure
from md4.errors import BasisError

SPDF = "spdfghiklmnoqrtuvwxyz"
# Columns of a general contraction stay together while they share at least this part of their primitives.
SHARED_PRIMITIVES = 0.5


def shell_letter(l):
    """Spectroscopic letter of angular momentum `l`, e.g. 'i' for 6."""
    return SPDF[l] if l < len(SPDF) else f"[l={l}]"


@dataclass(frozen=True)
class Shell:
    """One contracted shell.

    Attributes
    ----------
    l : int
        Angular momentum.
    exponents : ndarray, shape (nprim,)
        Primitive exponents zeta, in Bohr^-2.
    coefficients : ndarray, shape (nprim, nctr)
        Coefficients of the unnormalised radial primitives r^l exp(-zeta r^2), one column a contracted function.
    centre : ndarray, shape (3,)
        Position in Bohr.
    """

    l: int
    exponents: np.ndarray = field(repr=False)
    coefficients: np.ndarray = field(repr=False)
    centre: np.ndarray

    @property
    def nprim(self):
        return len(self.exponents)

    @property
    def nctr(self):
        return self.coefficients.shape[1]


def checked_shell(index, l, exponents, coefficients, centre):
    """A `Shell` from loosely typed input, or a `BasisError` that names shell `index`, the value and the remedy."""
    where = f"shell {index} (l = {l})"
    if int(l) != l or l < 0:
        raise BasisError(f"{where}: the angular momentum must be a non-negative integer.")
    exponents = np.ascontiguousarray(exponents, dtype=np.float64).reshape(-1)
    coefficients = np.asarray(coefficients, dtype=np.float64)
    if len(exponents) == 0 or coefficients.size == 0:
        raise BasisError(f"{where} has no primitives or no contracted function; drop the shell or give it some.")
    coefficients = np.ascontiguousarray(coefficients.reshape(len(coefficients), -1))
    centre = np.ascontiguousarray(centre, dtype=np.float64)
    if coefficients.shape[0] != len(exponents):
        raise BasisError(
            f"{where}: {len(exponents)} exponents but coefficients of shape {coefficients.shape}; "
            "the shape must be (nprim, nctr)."
        )
    if not np.all(np.isfinite(exponents)) or np.any(exponents <= 0):
        bad = exponents[~(np.isfinite(exponents) & (exponents > 0))][0]
        raise BasisError(f"{where}: exponent {bad!r} is not a positive finite number; check the basis set.")
    if not np.all(np.isfinite(coefficients)):
        raise BasisError(f"{where}: a contraction coefficient is not finite; check the basis set.")
    if centre.shape != (3,) or not np.all(np.isfinite(centre)):
        raise BasisError(f"{where}: the centre must be three finite coordinates in Bohr, not {centre!r}.")
    return Shell(int(l), exponents, coefficients, centre)


def radial_norm(l, exponents):
    """Norms of the radial primitives r^l exp(-zeta r^2): 1 / sqrt(int r^(2l+2) exp(-2 zeta r^2) dr)."""
    integral = gamma(l + 1.5) / (2 * (2 * np.asarray(exponents)) ** (l + 1.5))
    return 1 / np.sqrt(integral)


def normalised_coefficients(l, exponents, coefficients):
    """Coefficients of normalised primitives (as basis-set files list them) to those of `Shell.coefficients`."""
    c = np.asarray(coefficients, dtype=float).reshape(len(exponents), -1) * radial_norm(l, exponents)[:, None]
    sums = np.add.outer(exponents, exponents)
    overlap = gamma(l + 1.5) / (2 * sums ** (l + 1.5))
    norms = np.einsum("ic,ij,jc->c", c, overlap, c)
    if np.any(norms <= 0):
        raise BasisError(f"a contracted function of l = {l} has zero norm; its coefficients must not all vanish.")
    return c / np.sqrt(norms)


def column_groups(coefficients, apart):
    """Columns that share most of their primitives (coefficients that are not zero); `apart`: not only neighbours.

    Returns
    -------
    list of list of int
    """
    used, groups = coefficients != 0, []
    for column in range(used.shape[1]):
        for group in groups if apart else groups[-1:]:
            primitives = used[:, group].any(axis=1)
            shared, either = primitives & used[:, column], primitives | used[:, column]
            if shared.sum() >= SHARED_PRIMITIVES * either.sum():
                group.append(column)
                break
        else:
            groups.append([column])
    return groups


def part_of_shell(shell, columns):
    """The shell of some contracted functions of `shell`, without primitives that all of them lack."""
    coefficients = shell.coefficients[:, columns]
    used = np.flatnonzero(coefficients.any(axis=1))
    used = used if len(used) else [0]  # a function that vanishes is still one
    return Shell(shell.l, shell.exponents[used], coefficients[used], shell.centre)


class Basis:
    """An ordered list of shells, all spherical (`pure`) or all Cartesian.

    Parameters
    ----------
    shells : sequence of Shell
    pure : bool
        True for real solid harmonics (2l+1 functions), False for Cartesians ((l+1)(l+2)/2).

    Raises
    ------
    BasisError
        No shells, or a shell that cannot be used.

    Attributes
    ----------
    shells : tuple of Shell
    ao_loc : ndarray of int64, shape (nshell + 1,)
        First AO of each shell, and the number of AOs last.
    classes : ndarray of int64, shape (nshell, 2)
        (l, nctr) of each shell.
    nprims : ndarray of int64, shape (nshell,)
        Primitives of each shell.
    prim_loc : ndarray of int64, shape (nshell,)
        The first of them in `exponents`.
    centres : ndarray, shape (nshell, 3)
        In Bohr.
    exponents : ndarray, shape (nprim,)
        Of all shells, one after the other, in Bohr^-2.
    coef_loc : ndarray of int64, shape (nprim,)
        Where the nctr coefficients of each primitive begin in the flat array `coefficients`.
    """

    def __init__(self, shells, pure=True):
        self.shells = tuple(checked_shell(i, s.l, s.exponents, s.coefficients, s.centre) for i, s in enumerate(shells))
        if not self.shells:
            raise BasisError("the basis has no shells; give at least one.")
        self.pure = bool(pure)
        sizes = [s.nctr * self.ncomp(s.l) for s in self.shells]
        self.ao_loc = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._flatten()

    def _flatten(self):
        """The shells' primitives as flat arrays, for vectorised pair set-up."""
        self.classes = np.array([(s.l, s.nctr) for s in self.shells], dtype=np.int64)
        self.nprims = np.array([s.nprim for s in self.shells], dtype=np.int64)
        self.prim_loc = np.cumsum(self.nprims) - self.nprims
        self.centres = np.array([s.centre for s in self.shells])
        self.exponents = np.concatenate([s.exponents for s in self.shells])
        self.coefficients = np.concatenate([s.coefficients.ravel() for s in self.shells])
        nctr = np.repeat(self.classes[:, 1], self.nprims)
        self.coef_loc = np.cumsum(nctr) - nctr

    @cached_property
    def log_coefficients(self):
        """Logarithm of each primitive's largest coefficient, shape (nprim,); minus infinity where all are 0."""
        with np.errstate(divide="ignore"):
            return np.log(np.maximum.reduceat(abs(self.coefficients), self.coef_loc))

    @cached_property
    def class_keys(self):
        """One number for each shell's class, ndarray of int64, shape (nshell,)."""
        return (self.classes[:, 0] << 32) + self.classes[:, 1]

    @classmethod
    def from_mol(cls, mol):
        """The basis of a `pyscf.gto.Mole` (built), spherical or Cartesian as `mol.cart` says."""
        if mol.nbas == 0:
            raise BasisError("the molecule has no shells; give it a basis set and call mol.build().")
        shells = [
            checked_shell(i, mol.bas_angular(i), mol.bas_exp(i), mol._libcint_ctr_coeff(i), mol.bas_coord(i))
            for i in range(mol.nbas)
        ]
        return cls(shells, pure=not mol.cart)

    @classmethod
    def from_arrays(cls, l, exponents, coefficients, centres, pure=True, normalise=True):
        """A basis from plain arrays, one entry a shell.

        Parameters
        ----------
        l : sequence of int
        exponents : sequence of array_like, each (nprim,)
            In Bohr^-2.
        coefficients : sequence of array_like, each (nprim,) or (nprim, nctr)
            Of normalised primitives, as in basis-set files; the contracted functions are then normalised.
            With ``normalise=False``, of the unnormalised radial primitives, used as they are.
        centres : array_like, shape (nshell, 3)
            In Bohr.
        """
        if not len(l) == len(exponents) == len(coefficients) == len(centres):
            raise BasisError("l, exponents, coefficients and centres must have one entry for each shell.")
        shells = []
        for i, given in enumerate(zip(l, exponents, coefficients, centres)):
            shell = checked_shell(i, *given)
            if normalise:
                c = normalised_coefficients(shell.l, shell.exponents, shell.coefficients)
                shell = Shell(shell.l, shell.exponents, c, shell.centre)
            shells.append(shell)
        return cls(shells, pure)

    def segmented(self):
        """A basis of the same AOs in the same order without needless zeros in general contractions.

        Basis-set files may give all functions of one l as one shell, in which most functions have one primitive. Such
        shells are split; neighbouring functions that share at least half of their primitives stay together, as all do
        in ANO bases. A basis with nothing to split is returned itself.
        """
        return self._split(apart=False)[0]

    def regrouped(self):
        """As `segmented`, but functions of a shell stay together also where others stand between them.

        Returns
        -------
        basis : Basis
        order : ndarray of int64, shape (nao,)
            AO n of `basis` is AO order[n] of this one.
        """
        return self._split(apart=True)

    def _split(self, apart):
        groups = [column_groups(shell.coefficients, apart) for shell in self.shells]
        parts, order = [], []
        for shell, first, columns in zip(self.shells, self.ao_loc, groups):
            aos = first + np.arange(shell.nctr * self.ncomp(shell.l)).reshape(shell.nctr, -1)
            order += [aos[group].ravel() for group in columns]
            parts += [part_of_shell(shell, group) for group in columns]
        same = len(parts) == len(self) and all(p.nprim == s.nprim for p, s in zip(parts, self.shells))
        return self if same else Basis(parts, self.pure), np.concatenate(order)

    def ncomp(self, l):
        """Number of angular components of a shell of angular momentum `l` in this basis."""
        return npure(l) if self.pure else ncart(l)

    @property
    def nshell(self):
        return len(self.shells)

    @property
    def nao(self):
        return int(self.ao_loc[-1])

    @property
    def lmax(self):
        return max(s.l for s in self.shells)

    def __len__(self):
        return self.nshell

    def __repr__(self):
        kind = "spherical" if self.pure else "Cartesian"
        letters = "".join(
            f"{sum(s.nctr for s in self.shells if s.l == l)}{shell_letter(l)}" for l in range(self.lmax + 1)
        )
        return f"Basis({self.nshell} {kind} shells, {self.nao} AOs: {letters})"

    def _repr_html_(self):
        from md4.display import basis_html

        return basis_html(self)
