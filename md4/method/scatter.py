"""From blocks (ij, kl, ab, cd) to AO tensors in PySCF's symmetries: s1, s4 and s8, and those of fewer centres.

One thread takes an element of a block, finds its AO indices, and writes the integral to all its places in the tensor.
An element is skipped if it is a permutation of another element of the same launch. So no place is written twice, and
tensors are symmetric to the last bit. Device functions are plain Python.

A tensor can be made in slices, which are ranges of its first index. In each symmetry the rows that belong to a range of
AOs i (in s4 and s8: the larger AO of the first pair) are neighbours in memory. Of the places of an integral, those
outside of the slice are left out.

Tensors over three centres, (ij|k), and over two, (i|k), have the unit function (`md4.shells.basis.Basis.joined`) in
place of the other indices, which have no place in the tensor.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from md4.method.derivatives import OF_A, OF_B

SYMMETRIES = ("s1", "s4", "s8")
# Of (ij|k) in s1 and in s2ij, and of (i|k).
THREE_CENTRE, TWO_CENTRE = {"s1": "three_s1", "s2ij": "three_s2ij"}, "two"
EVERY_SYMMETRY = (*SYMMETRIES, *THREE_CENTRE.values(), TWO_CENTRE)
# Those whose rows are the functions i, not pairs of them.
ROW_BY_ROW = ("s1", "three_s1", "two")
# How derivatives of any tensor are placed.
DERIVATIVES = "derivatives"


def is_repeated(same_ab, same_cd, same_pieces, n, m, a, b, c, d, nb, nd):
    """True if an element (ab|cd) of pairs n and m is also given by a permutation (device function)."""
    if (same_ab and a < b) or (same_cd and c < d):
        return True
    return same_pieces and (m > n or (m == n and c * nd + d > a * nb + b))


def write_in_box(i, j, k, l, value, box, out):
    """out[i, j, k, l] = value if the AO ranges of the box contain it; see `TensorLayout.box` (device function)."""
    i, j, k, l = i - box[0], j - box[1], k - box[2], l - box[3]
    if 0 <= i < box[4] and 0 <= j < box[5] and 0 <= k < box[6] and 0 <= l < box[7]:
        out[((i * box[5] + j) * box[6] + k) * box[7] + l] = value


def triangle(i, j):
    """Ordinal of the unordered pair {i, j} in a lower triangle, whose rows belong to the larger (device function)."""
    return i * (i + 1) // 2 + j if i >= j else j * (j + 1) // 2 + i


def make_place(aosym, jit):
    """Device function ``place(value, i, j, k, l, swap, box, out)`` that writes one integral to all its places.

    If `swap` is true, bra and ket range over the same pairs, so that (kl|ij) is written as well.
    """
    inside, tri = jit(write_in_box), jit(triangle)

    def place_s1(value, i, j, k, l, swap, box, out):
        inside(i, j, k, l, value, box, out)
        inside(j, i, k, l, value, box, out)
        inside(i, j, l, k, value, box, out)
        inside(j, i, l, k, value, box, out)
        if swap:
            inside(k, l, i, j, value, box, out)
            inside(l, k, i, j, value, box, out)
            inside(k, l, j, i, value, box, out)
            inside(l, k, j, i, value, box, out)

    def place_s4(value, i, j, k, l, swap, box, out):
        width = box[6] * (box[6] + 1) // 2
        ij, kl = tri(i - box[0], j - box[0]), tri(k - box[2], l - box[2])
        place, first, last = ij * width + kl, box[8], box[9]
        if first <= place < last:
            out[place - first] = value
        place = kl * width + ij
        if swap and first <= place < last:
            out[place - first] = value

    def place_s8(value, i, j, k, l, swap, box, out):
        place, first, last = tri(tri(i, j), tri(k, l)), box[8], box[9]
        if first <= place < last:
            out[place - first] = value

    def place_three_s1(value, i, j, k, l, swap, box, out):
        i, j, k = i - box[0], j - box[1], k - box[2]
        if 0 <= i < box[4] and 0 <= j < box[5]:
            out[(i * box[5] + j) * box[6] + k] = value
        i, j = j + box[1] - box[0], i + box[0] - box[1]
        if 0 <= i < box[4] and 0 <= j < box[5]:
            out[(i * box[5] + j) * box[6] + k] = value

    def place_three_s2ij(value, i, j, k, l, swap, box, out):
        place, first, last = tri(i - box[0], j - box[0]) * box[6] + k - box[2], box[8], box[9]
        if first <= place < last:
            out[place - first] = value

    def place_two(value, i, j, k, l, swap, box, out):
        out[(i - box[0]) * box[6] + k - box[2]] = value
        if swap:
            out[(k - box[0]) * box[6] + i - box[2]] = value

    places = {"s1": place_s1, "s4": place_s4, "s8": place_s8}
    places |= {"three_s1": place_three_s1, "three_s2ij": place_three_s2ij, "two": place_two}
    return jit(places[aosym])


def make_place_derivative(jit):
    """Device function ``place(value, derivative, i, j, k, l, in_triangle, box, out)`` that writes the integral with a
    nabla, minus a derivative of (ij|kl) by its number, to all its places; see `DerivativeLayout.box`."""
    tri = jit(triangle)

    def place(value, derivative, i, j, k, l, in_triangle, box, out):
        if derivative > 3:
            i, j = j, i
        first = (derivative - 1) % 3 * box[9] + ((i - box[0]) * box[4] + j - box[1]) * box[7]
        if in_triangle:
            kl = tri(k - box[2], l - box[3]) - box[10]
            if 0 <= kl < box[11]:
                out[first + kl * box[8]] = -value
            return
        m, n = k - box[2], l - box[3]
        if 0 <= m < box[5] and 0 <= n < box[6]:
            out[first + (m * box[6] + n) * box[8]] = -value
        m, n = l - box[2], k - box[3]
        if 0 <= m < box[5] and 0 <= n < box[6]:
            out[first + (m * box[6] + n) * box[8]] = -value

    return jit(place)


def make_scatter_derivative(jit):
    """As `make_scatter_element`, for a bra list of derivatives, with `in_triangle` in place of `swap`.

    n_a of `dims` counts (derivative, a); behind its six numbers are the functions a of a shell, and the number of the
    first derivative. If a and b are of the same shell, the derivatives by A are all.
    """
    place = make_place_derivative(jit)

    def element(index, block, bra, ket, ao_bra, ao_ket, dims, same_pieces, in_triangle, box, out):
        rest, d = index // dims[5], index % dims[5]
        rest, c = rest // dims[4], rest % dims[4]
        rest, b = rest // dims[3], rest % dims[3]
        rest, a = rest // dims[2], rest % dims[2]
        n, m = rest // dims[1], rest % dims[1]
        derivative, a = dims[7] + a // dims[6], a % dims[6]
        if (bra[n, 0] == bra[n, 1] and derivative > 3) or (ket[m, 0] == ket[m, 1] and c < d):
            return
        i, j, k, l = ao_bra[n, 0] + a, ao_bra[n, 1] + b, ao_ket[m, 0] + c, ao_ket[m, 1] + d
        place(block[index], derivative, i, j, k, l, in_triangle, box, out)

    return jit(element)


def make_scatter_element(aosym, jit):
    """Device function that reads one element of a block and places it.

    ``element(index, block, bra, ket, ao_bra, ao_ket, dims, same_pieces, swap, box, out)``: `index` is the flat position
    in the block, `bra` and `ket` are the shell pairs, `ao_bra` and `ao_ket` the first AOs of their shells, and `dims`
    is the shape of the block, (n_ij, n_kl, n_a, n_b, n_c, n_d). If `same_pieces` is true, bra and ket are the same
    list.
    """
    if aosym == DERIVATIVES:
        return make_scatter_derivative(jit)
    place, repeated = make_place(aosym, jit), jit(is_repeated)

    def element(index, block, bra, ket, ao_bra, ao_ket, dims, same_pieces, swap, box, out):
        rest, d = index // dims[5], index % dims[5]
        rest, c = rest // dims[4], rest % dims[4]
        rest, b = rest // dims[3], rest % dims[3]
        rest, a = rest // dims[2], rest % dims[2]
        n, m = rest // dims[1], rest % dims[1]
        same_ab, same_cd = bra[n, 0] == bra[n, 1], ket[m, 0] == ket[m, 1]
        if repeated(same_ab, same_cd, same_pieces, n, m, a, b, c, d, dims[3], dims[5]):
            return
        i, j, k, l = ao_bra[n, 0] + a, ao_bra[n, 1] + b, ao_ket[m, 0] + c, ao_ket[m, 1] + d
        place(block[index], i, j, k, l, swap, box, out)

    return jit(element)


@dataclass(frozen=True, eq=False)
class TensorLayout:
    """The symmetry and the AO ranges of an AO tensor, or of a slice of it.

    Attributes
    ----------
    aosym : str
        The symmetry of the tensor, one of `EVERY_SYMMETRY`.
    aos : ndarray of int64, shape (8,)
        First AO and number of AOs of each index of the whole tensor: i0, j0, k0, l0, ni, nj, nk, nl.
    swap : bool
        Whether bra and ket range over the same pairs, so that (kl|ij) is written where (ij|kl) is computed.
    ends : tuple of int, optional
        The AOs (first, last + 1) of index i that the slice contains, counted from i0. The default is all.
    """

    aosym: str
    aos: np.ndarray
    swap: bool
    ends: tuple | None = None

    @property
    def placing(self):
        """How integrals are placed: the name of `make_scatter_element`, and its `swap`."""
        return self.aosym, self.swap

    @property
    def derivatives(self):
        """The functions of bras are the pairs themselves; see `md4.shells.shell_pairs.ListFacts`."""
        return ()

    def slice(self, first, last):
        """The layout of the rows that belong to the AOs first to last - 1 of index i, counted from i0."""
        return replace(self, ends=(first, last))

    @property
    def rows(self):
        """The rows (first, last + 1) of the whole tensor that the slice contains."""
        first, last = (0, int(self.aos[4])) if self.ends is None else self.ends
        return first_row(self.aosym, first), first_row(self.aosym, last)

    @property
    def shape(self):
        """Shape of the tensor, or of the slice."""
        first, last = self.rows
        return last - first, *tensor_shape(self.aosym, self.aos[4:])[1:]

    @property
    def nbytes(self):
        """Bytes of the tensor, or of the slice."""
        return 8 * prod(self.shape)

    @cached_property
    def box(self):
        """What `make_place` reads, ndarray of int64, shape (10,).

        As `aos`, for the AOs i of the slice in s1. In other symmetries the last two numbers are the first place of the
        slice in the whole tensor, and the place after its last one.
        """
        aos, (first, last) = self.aos.copy(), self.rows
        if self.aosym in ROW_BY_ROW:
            aos[[0, 4]] = aos[0] + first, last - first
        width = prod(self.shape[1:])
        places = (min(row * width, np.iinfo(np.int64).max) for row in (first, last))
        return np.array([*aos.tolist(), *places], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class DerivativeLayout:
    """The AO ranges of a tensor of derivatives by x, y and z, which are its first index.

    Attributes
    ----------
    aosym : str
        The name of the integral and its symmetry.
    aos : ndarray of int64, shape (8,)
        As that of `TensorLayout`; i is the index with the derivative, also where that comes last in the tensor.
    singles : tuple of bool
        Whether j is the unit function, and whether l is.
    in_triangle : bool
        Whether k and l have one place for (k, l) and (l, k).
    last : bool
        Whether i and j come after k and l in the tensor.
    ends : tuple of int, optional
        The AOs (first, last + 1) of the larger of k and l to which the rows of a triangle belong.
    """

    aosym: str
    aos: np.ndarray
    singles: tuple
    in_triangle: bool
    last: bool
    ends: tuple | None = None

    @property
    def placing(self):
        """As that of `TensorLayout`, with `in_triangle`."""
        return DERIVATIVES, self.in_triangle

    @property
    def derivatives(self):
        """The most that a bra has: by both centres of a pair, or by that of a single shell."""
        return OF_A if self.singles[0] else OF_A + OF_B

    @property
    def rows(self):
        """The rows (first, last + 1) of the triangle of k and l that the tensor contains."""
        return tuple(triangle(n, 0) for n in ((0, int(self.aos[6])) if self.ends is None else self.ends))

    @property
    def shape(self):
        """Shape of the tensor."""
        sides = [tuple(self.aos[n : n + 2 - single].tolist()) for n, single in zip((4, 6), self.singles)]
        if self.in_triangle:
            sides[1] = (self.rows[1] - self.rows[0],)
        return 3, *(sides[1] + sides[0] if self.last else sides[0] + sides[1])

    @property
    def nbytes(self):
        """Bytes of the tensor."""
        return 8 * prod(self.shape)

    @cached_property
    def box(self):
        """What `make_place_derivative` and `md4.cpu.derivatives` read, ndarray of int64, shape (12,).

        i0, j0, k0, l0, nj, nk, nl, what one step of (i, j), of (k, l) and of the derivative is in the tensor, and the
        first place in the triangle and the number of places.
        """
        i0, j0, k0, l0, ni, nj, nk, nl = self.aos.tolist()
        first, last = self.rows
        of_kl = last - first if self.in_triangle else nk * nl
        steps = (1, ni * nj) if self.last else (of_kl, 1)
        return np.array([i0, j0, k0, l0, nj, nk, nl, *steps, ni * nj * of_kl, first, last - first], dtype=np.int64)


def first_row(aosym, n):
    """The row of a tensor with which those of AO n of index i begin, counted from the first AO of this index."""
    if aosym in ROW_BY_ROW:
        return n
    pairs = n * (n + 1) // 2
    return pairs * (pairs + 1) // 2 if aosym == "s8" else pairs


def tensor_shape(aosym, counts):
    """Shape of the AO tensor with `counts` = (ni, nj, nk, nl) AOs of each index."""
    ni, nj, nk, nl = (int(n) for n in counts)
    rows = first_row(aosym, ni)
    shapes = {"s1": (rows, nj, nk, nl), "s4": (rows, nk * (nk + 1) // 2), "s8": (rows,)}
    return (shapes | {"three_s1": (rows, nj, nk), "three_s2ij": (rows, nk), "two": (rows, nk)})[aosym]


def ao_ranges(basis, ranges):
    """`TensorLayout.aos` for shell ranges ((i0, i1), (j0, j1), (k0, k1), (l0, l1))."""
    ends = basis.ao_loc[np.array(ranges)]
    return np.concatenate([ends[:, 0], ends[:, 1] - ends[:, 0]]).astype(np.int64)
