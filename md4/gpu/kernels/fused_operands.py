"""What the fused kernels share: `md4.gpu.kernels.fused`, `fused_groups` and `fused_wide`."""

from typing import NamedTuple

from md4.gpu.device_code import F64, I32, cuda, i32, i64, jit_device
from md4.gpu.emit.instructions import address_of, make_copies
from md4.gpu.kernels.groups import end_of_kets


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


# device functions


def make_pairs_of_block(limited):
    """Device function: a block's bra pair, which of this pair's blocks it is, and the number of their ket pairs.

    `limited`: only those that may count with the bra pair.
    """
    end_of = jit_device(end_of_kets)

    def pairs_of_block(work, bra, ket, right, limits):
        pair, part = i64(cuda.blockIdx.x) // work.parts, i64(cuda.blockIdx.x) % work.parts
        nket = end_of(limits, bra.first + pair, ket.first + right.npair) - ket.first if limited else right.npair
        return pair, part, nket

    return jit_device(pairs_of_block)


def next_pair(limits, bra_pair, ket_first, pair, step, end):
    """The first of the ket pairs `pair`, `pair` + `step`, ... of a chunk that counts, or `end` (device function).

    Beyond the ket pairs that may count with the bra pair, which end at `end`, all are as good as `end`.
    """
    if limits.by_ket:
        while pair < end and limits.counts[ket_first + pair] <= bra_pair:
            pair += step
    return pair


def make_copy_r(threads=32):
    """Device function: the `threads` of a warp, or of 2, 4, ..., start to copy `count` doubles from array[index:].

    As far as the array goes.
    """
    copies, shift = make_copies(4, 16 * threads, 16 * threads), threads.bit_length() - 1

    def copy_r(address, array, index, count, thread):
        to, source = i32(address + 16 * thread), address_of(array, index + 2 * thread)
        left = i32(min(count, array.size - index) // 2 - thread)
        while left > 0:
            copies(to, source, i32((left + threads - 1) >> shift))
            to, source, left = i32(to + 64 * threads), source + 64 * threads, i32(left - 4 * threads)

    return jit_device(copy_r)
