"""A contracted shell, its checks and its normalisation.

A contracted shell of angular momentum l at centre A carries the functions

    chi_{c m}(r) = sum_k  c_kc  S_{l m}(r - A)  exp(-zeta_k |r - A|^2)

with S_{l m} the real solid harmonics of unit angular norm (or the Cartesian monomials of that degree) in PySCF's
order and normalisation; see `md4.method.angular`. The AOs of a shell are ordered as [contraction c][component m].
"""

from dataclasses import dataclass, field, replace
from math import gamma

import numpy as np

from md4.errors import BasisError, UnsupportedError
from md4.shells.limits import LARGEST_COEFFICIENT, LARGEST_COORDINATE, MMAX, largest_exponent, smallest_exponent
from md4.support.arguments import shown, whole_number
from md4.support.types import HostArray

# Functions of a general contraction stay together if they share at least this part of their primitives.
SHARED_PRIMITIVES = 0.5
# A norm is taken as zero if it is smaller than this times the sum of the moduli of its terms.
ZERO_NORM = 1e-14
# Gamma(l + 3/2) for each l.
GAMMA = np.array([gamma(l + 1.5) for l in range(MMAX + 1)])


@dataclass(frozen=True)
class Shell:
    """One contracted shell. `Basis` checks it, with the limits of `md4.shells.limits`.

    Attributes
    ----------
    l : int
        Angular momentum.
    exponents : ndarray, shape (nprim,)
        Primitive exponents zeta, in Bohr^-2.
    coefficients : ndarray, shape (nprim, nctr)
        Coefficients of the unnormalised radial primitives r^l exp(-zeta r^2), one column for each contracted function.
    centre : ndarray, shape (3,)
        Position in Bohr.

    Examples
    --------
    >>> import md4, pyscf
    >>> basis = md4.Basis.from_mol(pyscf.M(atom="He 0 0 0", basis="cc-pvdz"))
    >>> [(shell.l, shell.nprim, shell.nctr) for shell in basis.shells]
    [(0, 3, 1), (0, 1, 1), (1, 1, 1)]
    """

    l: int
    exponents: HostArray = field(repr=False)
    coefficients: HostArray = field(repr=False)
    centre: HostArray

    @property
    def nprim(self) -> int:
        """Number of primitives."""
        return len(self.exponents)

    @property
    def nctr(self) -> int:
        """Number of contracted functions."""
        return np.shape(self.coefficients)[1]


def typed_shell(index, l, exponents, coefficients, centre):
    """A `Shell` from loosely typed input, whose types and shapes are checked; its numbers are not.

    BasisError with the number of the shell, the wrong value and the remedy.
    """
    number = whole_number(l)
    where = f"shell {index} (l = {shown(l) if number is None else number})"
    if number is None or number < 0:
        raise BasisError(f"{where}: the angular momentum must be a non-negative integer.")
    if number > MMAX:
        raise UnsupportedError(f"{where}: the angular momenta of a quartet may add up to {MMAX}; leave out this shell.")
    exponents, coefficients = floats(where, "the exponents", exponents), floats(where, "the coefficients", coefficients)
    centre = floats(where, "the centre", centre)
    exponents = exponents if exponents.ndim else exponents.reshape(1)
    coefficients = coefficients if coefficients.ndim > 1 else coefficients.reshape(-1, 1)
    check_shapes(where, exponents, coefficients)
    if centre.shape != (3,):
        raise BasisError(f"{where}: the centre must be three finite coordinates in Bohr, not {shown(centre)}.")
    return Shell(number, exponents, coefficients, centre)


def check_numbers(index, shell, lmax):
    """BasisError for a number of a shell that cannot be used, in a basis with shells up to l = `lmax`."""
    where, l, centre = f"shell {index} (l = {shell.l})", shell.l, shell.centre
    check_exponents(where, shell.exponents, smallest_exponent(l), largest_exponent(l, lmax))
    check_coefficients(where, shell.coefficients, radial_norm(l, shell.exponents)[:, None])
    if not np.all(np.isfinite(centre)):
        raise BasisError(f"{where}: the centre must be three finite coordinates in Bohr, not {shown(centre)}.")
    if np.any(abs(centre) > LARGEST_COORDINATE):
        raise BasisError(
            f"{where}: the centre {centre.tolist()} is further out than {LARGEST_COORDINATE:g} Bohr; "
            "check its unit, which is Bohr."
        )


def floats(where, what, values):
    """`values` as an array of float64 of its own; strings, truth values and complex numbers are refused."""
    if type(values) is np.ndarray and values.dtype == np.float64 and values.flags.c_contiguous:
        return values.copy()
    try:
        array = np.asarray(values)
        if array.dtype.kind in "fiuO":
            with np.errstate(over="ignore"):  # of long doubles, which become infinite
                return np.array(array, dtype=np.float64, order="C")
    except (TypeError, ValueError, OverflowError):
        pass
    raise BasisError(f"{where}: {what} must be real numbers, not {shown(values)}.")


def check_shapes(where, exponents, coefficients):
    """BasisError unless the shapes are (nprim,) and (nprim,) or (nprim, nctr), with nprim and nctr at least 1."""
    if len(exponents) == 0 or coefficients.size == 0:
        raise BasisError(f"{where} has no primitives or no contracted function; drop the shell or give it some.")
    if exponents.ndim > 1 or coefficients.ndim > 2 or len(coefficients) != len(exponents):
        raise BasisError(
            f"{where}: {len(exponents)} exponents but coefficients of shape {coefficients.shape}; "
            "the shapes must be (nprim,) and (nprim, nctr)."
        )


def check_exponents(where, exponents, smallest, largest):
    """BasisError for exponents that are not positive and finite, or outside the limits of double precision."""
    usable = np.isfinite(exponents) & (exponents > 0)
    if not np.all(usable):
        raise BasisError(
            f"{where}: exponent {exponents[~usable][0]!r} is not a positive finite number; check the basis set."
        )
    if exponents.max() > largest:
        raise BasisError(
            f"{where}: exponent {exponents.max():g} is beyond {largest:.1e}, the largest in double precision for this "
            "l and the highest l beside it; leave the primitive out, or the shells of highest l."
        )
    if exponents.min() < smallest:
        raise BasisError(
            f"{where}: exponent {exponents.min():g} is below {smallest:.1e}, the smallest in double precision for "
            "this l; leave the primitive out."
        )


def check_coefficients(where, coefficients, norms):
    """BasisError for coefficients that are not finite, or too large relative to those of normalised primitives."""
    if not np.all(np.isfinite(coefficients)):
        raise BasisError(f"{where}: a contraction coefficient is not finite; check the basis set.")
    with np.errstate(over="ignore"):
        largest = abs(coefficients / norms).max()
    if largest > LARGEST_COEFFICIENT:
        raise BasisError(
            f"{where}: a contraction coefficient is {largest:.1e} times that of a normalised primitive, beyond "
            f"{LARGEST_COEFFICIENT:g}; scale the function, or pass normalise=True to Basis.from_arrays."
        )


def radial_norm(l, exponents):
    """Norms of the radial primitives r^l exp(-zeta r^2): 1 / sqrt(int r^(2l+2) exp(-2 zeta r^2) dr)."""
    integral = GAMMA[l] / (2 * (2 * np.asarray(exponents)) ** (l + 1.5))
    return 1 / np.sqrt(integral)


def normalised_coefficients(l, exponents, coefficients):
    """`Shell.coefficients` from coefficients of normalised primitives, as basis-set files list them."""
    c = np.asarray(coefficients, dtype=float).reshape(len(exponents), -1)
    c = c / np.maximum(abs(c).max(axis=0), np.finfo(float).tiny) * radial_norm(l, exponents)[:, None]
    sums = np.add.outer(exponents, exponents)
    overlap = GAMMA[l] / (2 * sums ** (l + 1.5))
    norms, terms = (np.einsum("ic,ij,jc->c", x, overlap, x) for x in (c, abs(c)))
    if np.any(norms <= ZERO_NORM * terms):
        raise BasisError(f"a contracted function of l = {l} has zero norm; its coefficients must not all cancel.")
    return c / np.sqrt(norms)


def normalised_shell(index, l, exponents, coefficients, centre):
    """As `typed_shell`, but from coefficients of normalised primitives, which may have any scale."""
    where = f"shell {index} (l = {shown(l)})"
    given = floats(where, "the coefficients", coefficients)
    if not np.all(np.isfinite(given)):
        raise BasisError(f"{where}: a contraction coefficient is not finite; check the basis set.")
    shell = typed_shell(index, l, exponents, np.zeros_like(given), centre)
    check_numbers(index, shell, shell.l)
    return replace(shell, coefficients=normalised_coefficients(shell.l, shell.exponents, given))


def column_groups(coefficients, apart):
    """Groups of columns that share most of their primitives, which are those with nonzero coefficients.

    If `apart` is false, only neighbouring columns can be in one group.

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
    """A shell with some of the contracted functions of `shell`, without primitives that none of them uses."""
    coefficients = shell.coefficients[:, columns]
    used = np.flatnonzero(coefficients.any(axis=1))
    used = used if len(used) else [0]  # a function that vanishes keeps one primitive
    return Shell(shell.l, shell.exponents[used], coefficients[used], shell.centre)
