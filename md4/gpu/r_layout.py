"""How Hermite integrals r lie in memory: which of them are kept, and how far those of two quartets are apart."""

from md4.gpu.tuning import RECURRENCE
from md4.method.mirror import r_count


def r_stride(l, even=False):
    """Doubles from one quartet's r to the next: even, for 16-byte copies; the arguments are those of `r_count`."""
    return (r_count(l, even) + 1) // 2 * 2


def even_r(bra, ket):
    """Whether r of two `ListFacts` (or `Side`) is without r[t] of odd t on the mirror axis, which are zero.

    It is so for parts of classes (`md4.method.mirror`) up to the highest L that a lane makes axis by axis.
    """
    return bra.mirror is not None and ket.mirror is not None and bra.l + ket.l <= RECURRENCE.axis_l


def r_stride_of(bra, ket):
    """`r_stride` of two `ListFacts`."""
    return r_stride(bra.l + ket.l, even_r(bra, ket))
