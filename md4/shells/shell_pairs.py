"""Shell pairs of one class and their primitive pairs, as flat arrays.

A class is (l_a, nctr_a, l_b, nctr_b), so that all pairs of a list have the same number of rows in their H matrices. The
pairs may have different numbers of primitive pairs. All primitive pairs are in one flat list, and ``start`` says where
those of each pair begin. So contraction only makes the inner dimensions of the two transforms longer, and a primitive
pair that is left out costs nothing.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from operator import attrgetter

import numpy as np

from md4.errors import ArgumentError
from md4.method.angular import AXES, nherm
from md4.method.hermite import first_function
from md4.method.mirror import part_functions, part_rows
from md4.support.arguments import checked_array
from md4.support.display import pairs_html, shell_letter

# A primitive pair is dropped if a bound on (ab|ab)^(1/2) of it is below this (atomic units). Its largest contribution
# to any integral is then far below 1e-16 times the smallest integral that matters.
PRIMITIVE_CUTOFF = 1e-25
# Shells overlap if a bound on (ab|ab)^(1/2) of a primitive pair of theirs is larger; see `overlapping`.
OVERLAP = 1e-13
LOG_OF_UNITS = float(0.5 * np.log(2 * np.pi**2.5))


@dataclass(frozen=True)
class Primitives:
    """The data of primitive pairs from which integrals are computed, in host memory.

    Attributes
    ----------
    exponent : ndarray, shape (nprim,)
        p = za + zb, in Bohr^-2.
    centre, pa, pb : ndarray, shape (nprim, 3)
        P, P - A and P - B, in Bohr, in the order z, y, x (`md4.method.angular.AXES`).
    coef_a : ndarray, shape (nprim, nctr_a)
        Contraction coefficients of the primitive of a, times exp(-za zb/p |A - B|^2).
    coef_b : ndarray, shape (nprim, nctr_b)
        Contraction coefficients of the primitive of b.
    exponent_a, exponent_b : ndarray, shape (nprim,)
        za and zb, for derivatives.
    """

    exponent: np.ndarray
    centre: np.ndarray
    pa: np.ndarray
    pb: np.ndarray
    coef_a: np.ndarray
    coef_b: np.ndarray
    exponent_a: np.ndarray
    exponent_b: np.ndarray

    @property
    def arrays(self):
        return tuple(self.__dict__.values())

    def __getitem__(self, piece):
        return Primitives(*(array[piece] for array in self.arrays))


@dataclass(frozen=True, eq=False)
class ListFacts:
    """What all pairs of a list have in common. Lists that have the same facts have one object, from `list_facts`.

    Attributes
    ----------
    shell_class : tuple
        (l_a, l_b, pure, nctr_a, nctr_b), on which the structure of H depends.
    la, lb, l : int
        Angular momenta, and the degree of the highest Hermite function: their sum, one more for derivatives.
    nctr_a, nctr_b, na, nb : int
        Numbers of contracted functions, and of all functions of a shell.
    nab : int
        The number of function pairs of one shell pair, or of their derivatives: the number of rows of H.
    first : int
        Ordinal of the first Hermite function that counts: of spherical single shells only those of degree l do.
    nherm : int
        N_p, the number of Hermite functions of one primitive pair, from the first that counts up to degree l.
    max_prim : int
        The largest number of primitive pairs of a shell pair.
    pure : bool
    single : bool
        Whether b is the unit function in all pairs, so that they are single shells; see `Basis.joined`.
    mirror : tuple of int or None
        (axis, parity) of the even or of the odd part of a list, see `md4.method.mirror`; None of all of a list. Of a
        part, `nab` and `nherm` are its rows and its Hermite functions.
    derivatives : tuple of int
        Which derivatives of a pair are its functions: by x, y and z of A (1, 2, 3) and of B (4, 5, 6), a block of rows
        of H each; see `md4.method.derivatives`. Without any they are the pairs themselves.
    """

    shell_class: tuple
    la: int
    lb: int
    l: int
    nctr_a: int
    nctr_b: int
    na: int
    nb: int
    nab: int
    first: int
    nherm: int
    max_prim: int
    pure: bool
    single: bool
    mirror: tuple | None = None
    derivatives: tuple = ()

    @property
    def structure(self):
        """Arguments of `md4.method.hermite.structure`; H of single s shells is that of a pair."""
        return *self.shell_class, self.single and self.l > 0

    @cached_property
    def h_class(self):
        """The same of one primitive pair a pair: one object for all lists whose H have the same structure."""
        whole = list_facts(*self.shell_class, self.na, self.nb, 1, self.single)
        if self.mirror:
            return part_facts(whole, *self.mirror)
        return derived_facts(whole, self.derivatives) if self.derivatives else whole


@cache
def list_facts(la, lb, pure, nctr_a, nctr_b, na, nb, max_prim, single):
    """The `ListFacts` of lists."""
    shells, l, first = (la, lb, pure, nctr_a, nctr_b), la + lb, first_function(la + lb, pure, single)
    sizes = na, nb, na * nb, first, nherm(l) - first, max_prim
    return ListFacts(shells, la, lb, l, nctr_a, nctr_b, *sizes, pure, single)


@cache
def part_facts(facts, axis, parity):
    """The `ListFacts` of the part of one parity of lists of shell pairs; see `md4.method.mirror`."""
    nab, count = len(part_rows(*facts.shell_class, axis, parity)), len(part_functions(facts.l, axis, parity))
    return replace(facts, nab=nab, nherm=count, mirror=(axis, parity))


@cache
def derived_facts(facts, derivatives):
    """The `ListFacts` of derivatives of the pairs of lists."""
    l, first = facts.l + 1, first_function(facts.l + 1, facts.pure, facts.single)
    sizes = {"nab": len(derivatives) * facts.nab, "first": first, "nherm": nherm(l) - first}
    return replace(facts, l=l, **sizes, derivatives=derivatives)


def of_facts(name):
    """The property of `ShellPairs` that is one of its `facts`."""
    return property(attrgetter(f"facts.{name}"))


@dataclass(frozen=True, eq=False)
class ShellPairs:
    """Shell pairs of one class.

    Attributes
    ----------
    pairs : ndarray of int64, shape (npair, 2)
        Shell indices (a, b).
    start : ndarray of int64, shape (npair + 1,)
        Where the primitive pairs of each pair begin, followed by their number.
    primitives : Primitives or None
        The primitive pairs; None if they are in the memory of a GPU.
    facts : ListFacts
        What they have in common, whose attributes they have as well; those of a slice are of the whole list.
    """

    pairs: np.ndarray
    start: np.ndarray
    primitives: Primitives | None
    facts: ListFacts

    shell_class, pure, single, derivatives, mirror = map(
        of_facts, ("shell_class", "pure", "single", "derivatives", "mirror")
    )
    la, lb, l, nctr_a, nctr_b = map(of_facts, ("la", "lb", "l", "nctr_a", "nctr_b"))
    na, nb, nab, first, nherm, max_prim = map(of_facts, ("na", "nb", "nab", "first", "nherm", "max_prim"))

    @classmethod
    def of_basis(cls, basis, pairs, start, primitives=None, max_prim=None):
        """`ShellPairs` of a checked list of pairs of a basis, with their primitive pairs."""
        max_prim = int(np.diff(start).max(initial=0)) if max_prim is None else max_prim
        a, b = (basis.shells[shell] for shell in pairs[0].tolist())
        sizes = a.nctr * basis.ncomp(a.l), b.nctr * basis.ncomp(b.l), max_prim
        single = basis.unit is not None and int(pairs[0, 1]) == basis.unit
        return cls(pairs, start, primitives, list_facts(a.l, b.l, basis.pure, a.nctr, b.nctr, *sizes, single))

    @property
    def npair(self):
        return len(self.pairs)

    @property
    def nprim(self):
        return int(self.start[-1])

    def derived(self, derivatives):
        """The derivatives of these pairs, a tuple of their numbers."""
        return replace(self, facts=derived_facts(self.facts, derivatives))

    @property
    def mean_prim(self):
        """The mean number of primitive pairs of a shell pair."""
        return self.nprim / max(1, self.npair)

    @property
    def nbytes(self):
        """Bytes of all arrays in host memory."""
        primitives = () if self.primitives is None else self.primitives.arrays
        return sum(array.nbytes for array in (self.pairs, self.start, *primitives))

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, piece):
        """The pairs of a slice."""
        first, last, step = piece.indices(self.npair)
        if step != 1:
            raise ArgumentError("shell pairs take slices of step 1 only.")
        last = max(first, last)
        if last - first == self.npair:
            return self
        start = self.start[first : last + 1]
        primitives = None if self.primitives is None else self.primitives[start[0] : start[-1]]
        return ShellPairs(self.pairs[first:last], start - start[0], primitives, self.facts)

    def __repr__(self):
        if self.single:
            shells = f"{self.npair} single {shell_letter(self.la)} shells"
            return f"ShellPairs({shells}, {self.nprim} primitives, {self.nab} functions each)"
        name = shell_letter(self.la) + shell_letter(self.lb)
        return f"ShellPairs({self.npair} {name} pairs, {self.nprim} primitive pairs, {self.nab} function pairs each)"

    def _repr_html_(self):
        return pairs_html(self)


def check_side(basis, given, side="pair"):
    """(basis, pair list) of a list of shell pairs or of single shells, which are pairs with the unit function.

    The basis of single shells is `basis.with_unit`.

    Raises
    ------
    ArgumentError
        For the first pair or shell that cannot be used.
    """
    shells = checked_array(f"the {side} list", given)
    if shells.ndim != 1 or shells.dtype.kind not in "iu" or len(shells) == 0:
        return basis, check_pairs(basis, shells, side)
    check_range(basis, shells[:, None], side)
    mixed = basis.class_keys[shells] != basis.class_keys[shells[0]]
    if mixed.any():
        n = int(np.argmax(mixed))
        first, other = (tuple(basis.classes[shells[k]].tolist()) for k in (0, n))
        raise ArgumentError(
            f"the {side} list mixes classes of single shells: shell {shells[0]} has (l, nctr) = {first}, "
            f"shell {shells[n]} has {other}; give one list for each class."
        )
    basis = basis.with_unit
    if (shells == basis.unit).any():
        raise ArgumentError(f"the {side} list has shell {basis.unit}, the unit function, which has no integrals.")
    return basis, np.stack([shells, np.full_like(shells, basis.unit)], axis=1).astype(np.int64)


def check_range(basis, shells, side):
    """ArgumentError unless all shells of a list, shape (n, 1 or 2), are among those of the basis."""
    if shells.min() < 0 or shells.max() >= basis.nshell:
        n, k = np.argwhere((shells < 0) | (shells >= basis.nshell))[0]
        raise ArgumentError(f"{side} {n} names shell {shells[n, k]}, but the basis has shells 0 to {basis.nshell - 1}.")


def check_pairs(basis, pairs, side="pair"):
    """A pair list of one class as int64, shape (npair, 2); ArgumentError with the first pair that cannot be used."""
    pairs = checked_array(f"the {side} list", pairs)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.shape[0] == 0 or pairs.dtype.kind not in "iu":
        raise ArgumentError(
            f"the {side} list must hold pairs of shell indices, shape (n, 2) with n >= 1 and integer type, or single "
            f"shells, shape (n,), not shape {pairs.shape} of {pairs.dtype}."
        )
    check_range(basis, pairs, side)
    pairs = np.ascontiguousarray(pairs, dtype=np.int64)
    keys = basis.class_keys[pairs]
    mixed = keys != keys[0]
    if mixed.any():
        n = np.argwhere(mixed)[0, 0]
        first, other = (tuple(basis.classes[pairs[k]].reshape(-1).tolist()) for k in (0, n))
        raise ArgumentError(
            f"the {side} list mixes classes: pair 0 has (l_a, nctr_a, l_b, nctr_b) = {first}, "
            f"pair {n} has {other}; give one list for each class."
        )
    return pairs


# The formulas of a primitive pair. With `lib` = `numpy` they are functions of arrays. With `lib` = `math` they are
# device functions of numbers, for `md4.gpu.kernels.shell_pairs`.


def make_schwarz_estimate(lib):
    """The function that returns the logarithm of a bound on (ab|ab)^(1/2) of a primitive pair.

    `coefficients` is the logarithm of the product of the largest coefficients of both primitives, `distance2` is
    |A - B|^2. The polynomial part is bounded by its value at the edge of the Gaussian, so the bound is generous.
    """

    def schwarz_estimate(za, zb, la, lb, coefficients, distance2):
        p, distance = za + zb, lib.sqrt(distance2)
        width = lib.sqrt((la + lb + 1) / p)
        reach = la * lib.log(zb / p * distance + width) + lb * lib.log(za / p * distance + width)
        return coefficients - za * zb / p * distance2 + reach + LOG_OF_UNITS - 1.25 * lib.log(p)

    return schwarz_estimate


def make_gaussian_product(lib):
    """The function that returns (p, za/p, zb/p, exp(-za zb/p |A - B|^2)) of a primitive pair."""

    def gaussian_product(za, zb, distance2):
        p = za + zb
        return p, za / p, zb / p, lib.exp(-(za * zb / p) * distance2)

    return gaussian_product


def product_axis(a, b, share_a, share_b):
    """(P, P - A, P - B) along one axis from A and B, with za/p and zb/p."""
    x = a - b
    xpa = -share_b * x
    return a + xpa, xpa, share_a * x


def log_cutoff(cutoff):
    """The logarithm with which the estimate is compared; a primitive pair counts unless its estimate is smaller."""
    return float(np.log(cutoff)) if cutoff > 0 else -np.inf


def spans(first, counts):
    """The integers first[n], first[n] + 1, ..., counts[n] of them, one span after the other."""
    return np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)


def primitive_pairs(basis, pairs):
    """For all primitive pairs: the number of the shell pair, and the flat indices of the primitives of a and b."""
    counts = basis.nprims[pairs]
    total = counts[:, 0] * counts[:, 1]
    owner, rank = np.repeat(np.arange(len(pairs)), total), spans(np.zeros_like(total), total)
    of_a, of_b = np.divmod(rank, counts[owner, 1])
    first = basis.prim_loc[pairs][owner]
    return owner, first[:, 0] + of_a, first[:, 1] + of_b


def primitive_estimates(basis, pairs):
    """As `primitive_pairs`, followed by |A - B|^2 and the logarithm of a bound on (ab|ab)^(1/2) of each of them."""
    owner, ka, kb = primitive_pairs(basis, pairs)
    distance2 = (np.subtract(*basis.centres.take(AXES, axis=1)[pairs.T]) ** 2).sum(axis=1)[owner]
    la, lb = basis.classes[pairs, 0].T
    coefficients = basis.log_coefficients[ka] + basis.log_coefficients[kb]
    given = basis.exponents[ka], basis.exponents[kb], la[owner], lb[owner], coefficients, distance2
    return owner, ka, kb, distance2, make_schwarz_estimate(np)(*given)


def overlapping(basis, count):
    """About which part of all pairs of shells have (ab|ab)^(1/2) above `OVERLAP`, by `count` random pairs."""
    pairs = -np.sort(-np.random.default_rng(0).integers(basis.nshell, size=(count, 2)))
    owner, *_, estimates = primitive_estimates(basis, pairs)
    return len(np.unique(owner[estimates > log_cutoff(OVERLAP)])) / count


def shell_pairs(basis, pairs, cutoff=PRIMITIVE_CUTOFF):
    """`ShellPairs` of a list of pairs of shell indices, without negligible primitive pairs.

    Parameters
    ----------
    basis : Basis
    pairs : array_like of int, shape (npair, 2)
    cutoff : float
        Primitive pairs with a smaller bound on (ab|ab)^(1/2) are dropped; 0 keeps all.

    Raises
    ------
    ArgumentError
        Wrong shape or type, a shell index out of range, or mixed classes.
    """
    return shell_pair_lists(basis, [check_pairs(basis, pairs)], cutoff)[0]


@np.errstate(under="ignore")  # of exponentials of pairs that are far apart
def shell_pair_lists(basis, lists, cutoff):
    """As `shell_pairs`, for checked lists, whose primitive pairs are made together.

    A molecule has many lists, most of them short. What NumPy does for one of them takes as long as for all.

    Returns
    -------
    list of ShellPairs
        Their arrays are slices of arrays of all lists.
    """
    pairs, first_pair = np.concatenate(lists), starts_of([len(this) for this in lists])
    owner, ka, kb, distance2, estimate = primitive_estimates(basis, pairs)
    centre_a, centre_b = basis.centres.take(AXES, axis=1)[pairs.T]
    nctr_a, nctr_b = basis.classes[pairs, 1].T
    keep = np.flatnonzero(~(estimate < log_cutoff(cutoff)))
    owner, ka, kb = owner[keep], ka[keep], kb[keep]
    za, zb = basis.exponents[ka], basis.exponents[kb]
    p, share_a, share_b, overlap = make_gaussian_product(np)(za, zb, distance2[keep])
    axes = product_axis(centre_a[owner], centre_b[owner], share_a[:, None], share_b[:, None])
    counts_a, counts_b = nctr_a[owner], nctr_b[owner]
    coef_a = basis.coefficients[spans(basis.coef_loc[ka], counts_a)] * np.repeat(overlap, counts_a)
    coef_b = basis.coefficients[spans(basis.coef_loc[kb], counts_b)]
    counts = np.bincount(owner, minlength=len(pairs))
    start, most = starts_of(counts), np.maximum.reduceat(counts, first_pair[:-1]).tolist()
    ends = start[first_pair]  # of the lists, in primitive pairs
    places = zip(*map(slices, (first_pair, ends, starts_of(counts_a)[ends], starts_of(counts_b)[ends])))
    made = []
    for this, max_prim, (here, prims, of_a, of_b) in zip(lists, most, places):
        contracted = coef_a[of_a].reshape(-1, nctr_a[here.start]), coef_b[of_b].reshape(-1, nctr_b[here.start])
        primitives = Primitives(p[prims], *(axis[prims] for axis in axes), *contracted, za[prims], zb[prims])
        of_pairs = start[here.start : here.stop + 1] - prims.start
        made.append(ShellPairs.of_basis(basis, this, of_pairs, primitives, max_prim))
    return made


def slices(start):
    """The slices between the numbers of `starts_of`."""
    return [slice(first, last) for first, last in pairwise(start.tolist())]


def starts_of(counts):
    """Where the primitive pairs of each pair begin, followed by their total number, from the numbers `counts`."""
    start = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=start[1:])
    return start


def ordered_pairs(pairs):
    """Number of ordered pairs of AOs in a `ShellPairs` of pairs: both orders of its pairs of different shells."""
    return int(np.where(pairs.pairs[:, 0] == pairs.pairs[:, 1], 1, 2).sum()) * pairs.na * pairs.nb


def unique_pairs_by_class(basis, rows=None, cols=None):
    """`unique_pairs` with the classes (l, nctr) of the shells as labels."""
    _, label = np.unique(basis.class_keys, return_inverse=True)
    return unique_pairs(label, rows, cols)


def unique_pairs(label, rows=None, cols=None):
    """The unordered shell pairs {a, b}, a in `rows` and b in `cols` (default: all), with one list for each two labels.

    Parameters
    ----------
    label : ndarray of int, shape (nshell,)
        The label of each shell, counted from 0.

    Returns
    -------
    list of ndarray of int64, each (npair, 2)
        Lists and pairs are in ascending order. Within a pair the shell of higher label, then of higher index, is first.
    """
    shells = np.argsort(label, kind="stable")
    places = np.stack(np.tril_indices(len(shells)), axis=1)
    pairs = shells[places]
    if rows is not None or cols is not None:
        row, col = (chosen_of(len(label), chosen)[pairs] for chosen in (rows, cols))
        pairs = pairs[row[:, 0] & col[:, 1] | col[:, 0] & row[:, 1]]
    of_pairs = label[pairs]
    key = of_pairs[:, 0] * len(label) + of_pairs[:, 1]
    order = np.argsort(key, kind="stable")
    pairs, ends = pairs[order], np.flatnonzero(np.diff(key[order])) + 1
    return [pairs[i:j] for i, j in pairwise([0, *ends.tolist(), len(pairs)]) if i < j]


def chosen_of(count, chosen):
    """Whether each of `count` shells is among the chosen ones, of which None means all."""
    among = np.zeros(count, dtype=bool)
    among[slice(None) if chosen is None else chosen] = True
    return among


def shell_kinds(basis, mixed):
    """Kind of each shell, counted from 0.

    Shells with the same (l, nctr, nprim) are of one kind. If there are at most `mixed` shells of an (l, nctr), all of
    them are of one kind, whatever their nprim.
    """
    _, label, count = np.unique(basis.class_keys, return_inverse=True, return_counts=True)
    nprim = np.where(count[label] > mixed, basis.nprims, 0)
    return np.unique(label * (nprim.max() + 1) + nprim, return_inverse=True)[1]


def pairs_by_kind(basis, mixed):
    """`unique_pairs` with the kinds of shells as labels (see `shell_kinds`); lists of the same class are neighbours."""
    lists = unique_pairs(shell_kinds(basis, mixed))
    return sorted(lists, key=lambda pairs: basis.classes[pairs[0]].tolist())
