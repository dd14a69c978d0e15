"""Parameters that all fused kernels take: `md4.gpu.kernels.fused`, `fused_groups` and `fused_wide`."""

from typing import NamedTuple

from md4.gpu.device_code import F64, I32, i64


class KetSide(NamedTuple):
    """H[cd, q] of a whole ket list as right operands, and the size of a chunk of it.

    Attributes
    ----------
    h : float64 array
        [ket primitive][block of 8 q][block of 8 cd][8 cd][8 q].
    rows : int32 array
        Place of each cd, -1 for padding.
    nq8, ncd, npair : int64
        Blocks of 8 q, functions cd, ket pairs of the chunk.
    """

    h: F64
    rows: I32
    nq8: i64
    ncd: i64
    npair: i64


class Work(NamedTuple):
    """How the quartets of a bra pair are shared out.

    Attributes
    ----------
    nab : int64
        Functions ab.
    group : int64
        Bra primitives whose H shared memory holds at once.
    parts : int64
        Blocks that share the ket pairs of a bra pair.
    """

    nab: i64
    group: i64
    parts: i64
