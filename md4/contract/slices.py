"""Slices of an AO tensor: ranges of its first index that are made on their own, and the shell pairs that they need.

In every symmetry, the rows that belong to a range of AOs i are neighbours in memory; see `TensorLayout`. A slice is cut
between shells, or within a shell if the rows of a whole shell are too many.

Slices of an s8 tensor share no work. In s4, (ij|kl) and (kl|ij) are in two slices, which both compute it, and in s1 so
are (ij|kl) and (ji|kl). Only quartets whose pairs both belong to the slice are computed once.
"""

from bisect import bisect_right
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from md4.method.angular import nherm
from md4.method.scatter import ROW_BY_ROW
from md4.shells.shell_pairs import shell_kinds, unique_pairs_by_class


class SlicePairs(NamedTuple):
    """The shell pairs of a slice; each field is a list of arrays of one class, shape (npair, 2).

    Attributes
    ----------
    bra : list of ndarray
        The pairs to which the rows belong.
    ket : list of ndarray
        The pairs with which all of `bra` are combined.
    triangle : bool
        Whether, in addition, all of `bra` are combined with each other.
    """

    bra: list
    ket: list
    triangle: bool


def slice_pairs(basis, request, ends=None):
    """The `SlicePairs` of a request, or of its AOs (first, last + 1) of index i, counted from the first of them."""
    first, last = shells_of(basis, request.ranges[0], ends)
    if request.swap and (first, last) == request.ranges[0]:  # the whole: every ket pair is one of the bra pairs
        whole = (None if r == (0, basis.nshell) else np.arange(*r) for r in request.ranges[:2])
        return SlicePairs(unique_pairs_by_class(basis, *whole), [], True)
    rows, cols = np.arange(first, last), np.arange(*request.ranges[1])
    if request.aosym not in ROW_BY_ROW:
        cols = cols[cols < last]
    bra = unique_pairs_by_class(basis, rows, cols)
    if not request.swap:
        return SlicePairs(bra, unique_pairs_by_class(basis, *(np.arange(*r) for r in request.ranges[2:])), False)
    k, l = (np.arange(*r) for r in request.ranges[2:])
    if request.aosym == "s8":
        k, l = k[k < last], l[l < last]
    ket = [without(pairs, rows, cols) for pairs in unique_pairs_by_class(basis, k, l)]
    return SlicePairs(bra, [pairs for pairs in ket if len(pairs)], True)


def shells_of(basis, shells, ends):
    """The shells (first, last + 1) of a range to which its AOs `ends` belong; all of them without `ends`."""
    if ends is None:
        return shells
    start = basis.ao_loc[shells[0]]
    first = np.searchsorted(basis.ao_loc, start + ends[0], side="right") - 1
    return int(first), int(np.searchsorted(basis.ao_loc, start + ends[1]))


def without(pairs, rows, cols):
    """The pairs that have not one shell in `rows` and the other in `cols`."""
    row, col = np.isin(pairs, rows), np.isin(pairs, cols)
    return pairs[~(row[:, 0] & col[:, 1] | row[:, 1] & col[:, 0])]


class Cuts:
    """Where a tensor may be cut between shells, and the work up to each of these places.

    Parameters
    ----------
    basis : Basis
    request : md4.contract.tensor.Request

    Attributes
    ----------
    layout : TensorLayout
        Of the whole tensor.
    aos : ndarray of int64, shape (n + 1,)
        First AO of each of the n shells i, counted from the first one, and the number of AOs.
    work : ndarray, shape (n + 1,)
        The predicted work of a tensor that ends there, in arbitrary units.
    """

    def __init__(self, basis, request):
        self.layout = request.layout(basis)
        first, last = request.ranges[0]
        self.aos = basis.ao_loc[first : last + 1] - basis.ao_loc[first]
        self.work = np.concatenate([[0.0], np.cumsum(row_work(basis, request))])
        if request.aosym == "s8":
            self.work **= 2

    def work_of(self, layout):
        """The predicted work of a slice, which may begin and end within shells."""
        first, last = np.interp(layout.ends, self.aos, self.work)
        return float(last - first)

    def shares(self, count):
        """The places that cut all AOs i into `count` shares of about the same work, shape (count + 1,).

        There are empty shares if there are fewer shells.
        """
        wanted = self.work[-1] * np.arange(1, count) / count
        above = np.searchsorted(self.work, wanted)
        nearer = wanted - self.work[np.maximum(above - 1, 0)] < self.work[above] - wanted
        return np.array([0, *self.aos[np.maximum(above - nearer, 0)], self.aos[-1]])

    def slices(self, ends, count, most):
        """The AOs `ends` = (first, last + 1) in about `count` slices of at most `most` bytes, as layouts.

        A slice has at least one AO i, even if its rows take more than `most`.
        """
        first, last = ends
        here = (self.aos >= first) & (self.aos <= last)
        aos, work = self.aos[here], self.work[here]
        wanted = work[0] + (work[-1] - work[0]) * np.arange(1, count) / count
        edges = np.unique([first, *aos[np.searchsorted(work, wanted)], last]).tolist()
        return [part for a, b in pairwise(edges) for part in self._bounded(a, b, most)]

    def _bounded(self, first, last, most):
        """The AOs first to last - 1 in layouts of at most `most` bytes, cut between shells where that is possible."""
        while first < last:
            end = self._end(first, last, most)
            yield self.layout.slice(first, end)
            first = end

    def _end(self, first, last, most):
        """The last place where a slice may end that begins at the AO `first`."""
        shells = self.aos[(self.aos > first) & (self.aos < last)].tolist()
        for ends in ([*shells, last], range(first + 1, last)):
            fitting = bisect_right(ends, most, key=lambda end: self.layout.slice(first, end).nbytes)
            if fitting:
                return ends[fitting - 1]
        return first + 1


def halves(layout):
    """The two halves of a slice as layouts, by its AOs i; nothing if it has one AO only."""
    first, last = layout.ends
    middle = (first + last) // 2
    return (layout.slice(first, middle), layout.slice(middle, last)) if first < middle else ()


def row_work(basis, request):
    """The predicted work of the rows of each shell i with any fixed ket, shape (n,).

    That of a shell pair counts its functions, and the Hermite functions of its primitive pairs.
    """
    kind, first, last = shell_kinds(basis, 0), *request.ranges[0]
    _, one_each = np.unique(kind, return_index=True)
    l, nprim = basis.classes[one_each, 0], basis.nprims[one_each]
    naos = np.diff(basis.ao_loc)[one_each]
    work = np.outer(naos, naos) + np.outer(nprim, nprim) * nherm(l[:, None] + l)
    partners = np.zeros((basis.nshell, len(one_each)), dtype=np.int64)
    partners[np.arange(*request.ranges[1]), kind[slice(*request.ranges[1])]] = 1
    if request.aosym == "s1":
        partners[:] = partners.sum(axis=0)
    else:
        partners = np.cumsum(partners, axis=0)
    return (work[kind] * partners).sum(axis=1)[first:last].astype(float)
