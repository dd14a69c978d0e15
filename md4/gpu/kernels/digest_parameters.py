"""Groups of parameters of the two kernels that digest blocks into J and K, and how their warps share the work."""

from typing import NamedTuple

from md4.gpu.device_code import F64, I64_2D, i64, types
from md4.gpu.emit.scalars import quotient


class Block(NamedTuple):
    """(ij|kl) of all bra pairs with all ket pairs of a chunk, in C order (ij, kl, a, b, c, d).

    Attributes
    ----------
    integrals : float64 array
    nbra, nket : int64
        Bra pairs and ket pairs.
    """

    integrals: F64
    nbra: i64
    nket: i64


class Lists(NamedTuple):
    """The lists that the pairs of a chunk belong to.

    Attributes
    ----------
    first_bra, first_ket : int64
        Places of the chunk's first pairs in their lists.
    triangle : bool
        Bra and ket are one list, of which ket pairs beyond the bra pair do not count.
    ao_bra, ao_ket : int64 array, shape (npair, 2)
        First AOs of the two shells of each pair.
    """

    first_bra: i64
    first_ket: i64
    triangle: types.boolean
    ao_bra: I64_2D
    ao_ket: I64_2D


class Matrices(NamedTuple):
    """Matrices of nao x nao numbers, one after the other; see `md4.method.digestion`.

    Attributes
    ----------
    densities, x : float64 array
        D, and the sums X that K is made of.
    twice, y : float64 array
        D + D^T, and the sums Y that J is made of.
    first, last : int64
        The matrices from `first` to `last` - 1 are worked on.
    nao : int64
    """

    densities: F64
    x: F64
    twice: F64
    y: F64
    first: i64
    last: i64
    nao: i64


class Share(NamedTuple):
    """How warps share a block.

    Attributes
    ----------
    warps : int64
        Warps that take the same bra pairs, each with other 32 elements of the ket.
    bra_pairs : int64
        Bra pairs that a warp takes one after the other.
    """

    warps: i64
    bra_pairs: i64


def share_of(share, warp, block):
    """First bra pair of a warp, the one after its last, and the first of its 32 elements of the ket (device function).

    The number of warps is below 2^32, as `quotient` needs, since each reads 32 integrals at least of one buffer.
    """
    group = quotient(warp, share.warps)
    first = group * share.bra_pairs
    return first, min(first + share.bra_pairs, block.nbra), (warp - group * share.warps) * 32
