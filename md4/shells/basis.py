"""Basis sets: shells in their order, and all of their primitives as arrays."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from math import pi, sqrt

import numpy as np
import numpy.typing as npt

from md4.errors import ArgumentError, BasisError
from md4.method.angular import ncart, npure
from md4.method.mirror import mirror_axis
from md4.method.rotations import turned_to_plane
from md4.shells.limits import LARGEST_COEFFICIENT, LARGEST_COORDINATE, largest_exponent, smallest_exponent
from md4.shells.shell import (
    Shell,
    check_numbers,
    column_groups,
    normalised_shell,
    part_of_shell,
    radial_norm,
    typed_shell,
)
from md4.support.arguments import as_list, checked_flag, checked_mol, shown
from md4.support.display import basis_html, shell_letter
from md4.support.types import Molecule

# The coefficient by which an s shell of exponent 0 is 1 everywhere: 1 / S_00.
UNIT_COEFFICIENT = sqrt(4 * pi)


# Where geometry and basis begin in mol._env; what is before (omega, gauge origin, ...) may change at any time.
PTR_ENV_START = 20


def fingerprint(mol):
    """All data on which the integrals over the shells of `mol` depend, except the operator; can be compared."""
    return bool(mol.cart), mol._atm.tobytes(), mol._bas.tobytes(), mol._env[PTR_ENV_START:].tobytes()


def as_shells(shells):
    """`shells` as a list; BasisError if an item is not a `Shell`."""
    found = as_list(shells)
    if found is None:
        raise BasisError(f"a basis takes a sequence of md4.Shell, not {shown(shells)}; see Basis.from_mol.")
    for i, shell in enumerate(found):
        if not isinstance(shell, Shell):
            raise BasisError(f"shell {i} of the basis must be an md4.Shell, not {shown(shell)}; see Basis.from_arrays.")
    return found


def entries(name, values):
    """`values` as a list with one entry for each shell; BasisError if it is not a sequence."""
    found = as_list(values)
    if found is None:
        raise BasisError(f"{name} must be a sequence with one entry for each shell, not {shown(values)}.")
    return found


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
        There are no shells, or a shell cannot be used: a value is not a number, a shape is wrong, or a coordinate, a
        coefficient or an exponent is so large or small that integrals would leave the range of double precision
        (`md4.shells.limits`: exponents may be from 1e-10 to 1e10 at l = 8, and from 1.4e-22 to 1e22 at l = 4 if there
        is no higher l).
    UnsupportedError
        A shell of l > 32.

    Attributes
    ----------
    shells : tuple of Shell
    ao_loc : ndarray of int64, shape (nshell + 1,)
        First AO of each shell, followed by the number of AOs.
    classes : ndarray of int64, shape (nshell, 2)
        (l, nctr) of each shell.
    nprims : ndarray of int64, shape (nshell,)
        Number of primitives of each shell.
    prim_loc : ndarray of int64, shape (nshell,)
        Where the primitives of each shell begin in `exponents`.
    centres : ndarray, shape (nshell, 3)
        In Bohr.
    exponents : ndarray, shape (nprim,)
        Of all shells, one after the other, in Bohr^-2.
    coef_loc : ndarray of int64, shape (nprim,)
        Where the nctr coefficients of each primitive begin in the flat array `coefficients`.
    unit : int or None
        Number of the unit function, the last shell of a basis from `joined`.
    parts : tuple of Basis
        The bases of which `joined` made it.

    Examples
    --------
    >>> import md4, pyscf
    >>> basis = md4.Basis.from_mol(pyscf.M(atom="H 0 0 0; F 0 0 0.917", basis="cc-pvtz"))
    >>> basis
    Basis(15 spherical shells, 44 AOs: 7s5p3d1f)
    >>> basis.nshell, basis.nao, basis.lmax
    (15, 44, 3)
    >>> basis.classes[-1]
    array([3, 1])
    """

    unit: int | None = None
    parts: "tuple[Basis, ...]" = ()

    def __init__(self, shells: Iterable[Shell], pure: bool = True) -> None:
        self.shells = tuple(
            typed_shell(i, s.l, s.exponents, s.coefficients, s.centre) for i, s in enumerate(as_shells(shells))
        )
        if not self.shells:
            raise BasisError("the basis has no shells; give at least one.")
        self._flatten()
        if not self._numbers_are_usable():
            for i, shell in enumerate(self.shells):
                check_numbers(i, shell, self.lmax)
        self.pure = checked_flag("pure", pure)
        self._number_aos()

    def _number_aos(self):
        """Where the AOs of each shell begin."""
        sizes = [s.nctr * self.ncomp(s.l) for s in self.shells]
        self.ao_loc = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @classmethod
    def joined(cls, bases: "Sequence[Basis]") -> "Basis":
        """The shells of some bases, one basis after the other, followed by the *unit function*, which is 1 everywhere.

        The unit function is an s shell of exponent 0. A single shell P is the shell pair of P with it, so that
        integrals over two or three centres are integrals over shell pairs: (ij|P) = (ij|P 1).

        Raises
        ------
        ArgumentError
            Some of the bases are spherical, others Cartesian.
        """
        if len({basis.pure for basis in bases}) > 1:
            raise ArgumentError(
                "basis sets of an integral must be all spherical or all Cartesian; give the molecules the same cart."
            )
        made = cls.__new__(cls)
        unit = Shell(0, np.zeros(1), np.full((1, 1), UNIT_COEFFICIENT), np.zeros(3))
        made.parts, made.pure = tuple(bases), bases[0].pure
        made.shells = (*(shell for basis in bases for shell in basis.shells), unit)
        made.unit = len(made.shells) - 1
        made._flatten()
        made._number_aos()
        return made

    @cached_property
    def with_unit(self) -> "Basis":
        """This basis followed by the unit function; see `joined`."""
        return self if self.unit is not None else Basis.joined([self])

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

    def _numbers_are_usable(self):
        """Whether all shells pass `check_numbers`, all at once; false also for some at the very limit."""
        l, lmax = np.repeat(self.classes[:, 0], self.nprims), self.lmax
        smallest = np.array([smallest_exponent(n) for n in range(lmax + 1)])[l]
        largest = np.array([largest_exponent(n, lmax) for n in range(lmax + 1)])[l]
        with np.errstate(all="ignore"):
            most = LARGEST_COEFFICIENT * radial_norm(l, self.exponents)
            usable = (smallest <= self.exponents) & (self.exponents <= largest) & (self.largest_coefficients < most)
        return bool(usable.all() and (abs(self.centres) <= LARGEST_COORDINATE).all())

    @cached_property
    def largest_coefficients(self):
        """Modulus of each primitive's largest coefficient, shape (nprim,)."""
        return np.maximum.reduceat(abs(self.coefficients), self.coef_loc)

    @cached_property
    def log_coefficients(self):
        """Logarithm of each primitive's largest coefficient, shape (nprim,); minus infinity if all are 0."""
        with np.errstate(divide="ignore"):
            return np.log(self.largest_coefficients)

    @cached_property
    def alternating(self):
        """Whether a shell has coefficients of both signs, so that its primitives cancel; bool, shape (nshell,)."""
        first = self.coef_loc[self.prim_loc]
        return (np.minimum.reduceat(self.coefficients, first) < 0) & (
            np.maximum.reduceat(self.coefficients, first) > 0
        )

    @cached_property
    def absolute(self) -> "Basis":
        """The same shells with the moduli of their contraction coefficients."""
        if self.parts:
            return Basis.joined([basis.absolute for basis in self.parts])
        return Basis([replace(s, coefficients=abs(s.coefficients)) for s in self.shells], self.pure)

    @cached_property
    def mirror_axis(self):
        """The axis on which all centres have the same coordinate, as `md4.method.mirror` counts them, or None.

        A basis with the unit function has none.
        """
        return None if self.unit is not None else mirror_axis(self.centres)

    @cached_property
    def class_keys(self):
        """One number for each shell's class, ndarray of int64, shape (nshell,).

        That of the unit function is the lowest, so that it is the second of each of its pairs; see `unique_pairs`.
        """
        keys = (self.classes[:, 0] << 32) + self.classes[:, 1]
        if self.unit is not None:
            keys[self.unit] = 0
        return keys

    @classmethod
    def from_mol(cls, mol: Molecule) -> "Basis":
        """The basis of a built `pyscf.gto.Mole`, Cartesian if `mol.cart`, else spherical; errors as `md4.int2e`.

        Examples
        --------
        >>> import md4, pyscf
        >>> md4.Basis.from_mol(pyscf.M(atom="He 0 0 0", basis="cc-pvdz"))
        Basis(3 spherical shells, 5 AOs: 2s1p)
        """
        if len(checked_mol(mol)._bas) == 0:
            raise BasisError("the molecule has no shells; give it a basis set and call mol.build().")
        shells = [
            Shell(mol.bas_angular(i), mol.bas_exp(i), mol._libcint_ctr_coeff(i), mol.bas_coord(i))
            for i in range(mol.nbas)
        ]
        return cls(shells, pure=not mol.cart)

    @classmethod
    def from_arrays(
        cls, l: Sequence[int], exponents: Sequence[npt.ArrayLike], coefficients: Sequence[npt.ArrayLike],
        centres: npt.ArrayLike, pure: bool = True, normalise: bool = True,
    ) -> "Basis":  # fmt: skip
        """A basis from plain arrays with one entry for each shell.

        Parameters
        ----------
        l : sequence of int
        exponents : sequence of array_like, each (nprim,)
            In Bohr^-2.
        coefficients : sequence of array_like, each (nprim,) or (nprim, nctr)
            Coefficients of normalised primitives, as in basis-set files; the contracted functions are then normalised.
            With ``normalise=False`` they are those of the unnormalised radial primitives, and are used as they are.
        centres : array_like, shape (nshell, 3)
            In Bohr.

        Examples
        --------
        >>> import md4
        >>> md4.Basis.from_arrays(
        ...     l=[0, 6],
        ...     exponents=[[5.0, 0.8], [1.1]],
        ...     coefficients=[[0.4, 0.7], [1.0]],
        ...     centres=[[0.0, 0.0, 0.0], [0.0, 0.0, 1.8]],
        ... )
        Basis(2 spherical shells, 14 AOs: 1s0p0d0f0g0h1i)
        """
        normalise = checked_flag("normalise", normalise)
        given = {"l": l, "exponents": exponents, "coefficients": coefficients, "centres": centres}
        columns = [entries(name, values) for name, values in given.items()]
        if len({len(column) for column in columns}) > 1:
            raise BasisError("l, exponents, coefficients and centres must have one entry for each shell.")
        make = normalised_shell if normalise else typed_shell
        return cls([make(i, *entry) for i, entry in enumerate(zip(*columns))], pure)

    def segmented(self) -> "Basis":
        """A basis of the same AOs in the same order, without unnecessary zeros in general contractions.

        Basis-set files may give all functions of one l as one shell, in which most functions have one primitive. Such
        shells are split. Neighbouring functions that share at least half of their primitives stay together; in ANO
        bases these are all functions. If there is nothing to split, the basis itself is returned.
        """
        if self.parts:
            split = [basis.segmented() for basis in self.parts]
            return self if all(one is other for one, other in zip(split, self.parts)) else Basis.joined(split)
        return self._split(apart=False)[0]

    def regrouped(self) -> "tuple[Basis, npt.NDArray[np.int64]]":
        """As `segmented`, but functions of a shell can stay together if other functions are between them.

        Returns
        -------
        basis : Basis
        order : ndarray of int64, shape (nao,)
            AO n of `basis` is AO order[n] of this one.
        """
        return self._split(apart=True)

    def _split(self, apart):
        if self.coefficients.all():
            return self, np.arange(self.nao)
        groups = [column_groups(shell.coefficients, apart) for shell in self.shells]
        parts, order = [], []
        for shell, first, columns in zip(self.shells, self.ao_loc, groups):
            aos = first + np.arange(shell.nctr * self.ncomp(shell.l)).reshape(shell.nctr, -1)
            order += [aos[group].ravel() for group in columns]
            parts += [part_of_shell(shell, group) for group in columns]
        same = len(parts) == len(self) and all(p.nprim == s.nprim for p, s in zip(parts, self.shells))
        return self if same else Basis(parts, self.pure), np.concatenate(order)

    def decontracted(self) -> "tuple[Basis, npt.NDArray[np.int64], npt.NDArray[np.float64]]":
        """The basis whose shells of several contracted functions are primitive ones.

        Returns
        -------
        basis : Basis
        owner : ndarray of int64
            The shell of this basis to which each of its shells belongs.
        coefficients : ndarray, shape (nao of `basis`, nao)
            AO i of this one is the sum of coefficients[p, i] times AO p of `basis`. None has a modulus above 1.
        """
        shells, owner, rows = [], [], []
        for n, shell in enumerate(self.shells):
            first, last, one = self.ao_loc[n], self.ao_loc[n + 1], np.eye(self.ncomp(shell.l))
            parts = [(shell, np.eye(last - first))]
            if shell.nctr > 1:
                size = np.maximum(abs(shell.coefficients).max(axis=1), np.finfo(float).tiny)
                parts = [
                    (Shell(shell.l, np.array([z]), np.array([[most]]), shell.centre), np.kron(c / most, one))
                    for z, c, most in zip(shell.exponents, shell.coefficients, size)
                ]
            for part, block in parts:
                shells.append(part)
                owner.append(n)
                rows.append(np.zeros((len(block), self.nao)))
                rows[-1][:, first:last] = block
        return Basis(shells, self.pure), np.array(owner), np.concatenate(rows)

    def ncomp(self, l: int) -> int:
        """Number of angular components of a shell of angular momentum `l` in this basis."""
        return npure(l) if self.pure else ncart(l)

    @property
    def nshell(self) -> int:
        """Number of shells."""
        return len(self.shells)

    @property
    def nao(self) -> int:
        """Number of AOs."""
        return int(self.ao_loc[-1])

    @property
    def lmax(self) -> int:
        """Highest angular momentum of a shell."""
        return max(s.l for s in self.shells)

    def __len__(self) -> int:
        return self.nshell

    def __repr__(self) -> str:
        kind = "spherical" if self.pure else "Cartesian"
        letters = "".join(
            f"{sum(s.nctr for s in self.shells if s.l == l)}{shell_letter(l)}" for l in range(self.lmax + 1)
        )
        return f"Basis({self.nshell} {kind} shells, {self.nao} AOs: {letters})"

    def _repr_html_(self):
        return basis_html(self)


def turned_basis(basis):
    """The shells of a planar molecule that lies askew, turned into a plane of constant z (`md4.method.rotations`).

    Returns
    -------
    rotation : ndarray, shape (3, 3)
    turned : Basis
        Both are None where the molecule is not planar, has the same x, y or z at all centres already, or would get
        coordinates that are too large.
    """
    if mirror_axis(basis.centres) is not None:
        return None, None
    rotation, centres = turned_to_plane(basis.centres)
    if rotation is None or abs(centres).max() > LARGEST_COORDINATE:
        return None, None
    return rotation, Basis([replace(s, centre=centre) for s, centre in zip(basis.shells, centres)], basis.pure)
