"""Steps 2 to 5 for the smallest classes: a thread a quartet, everything in registers.

Lanes of a warp share the bra pair and take ket pairs side by side: H[ab, p] of all bra primitives is in shared memory,
a broadcast, and the integrals of a block of threads are one contiguous piece of the result, to which they go through
shared memory; where bra and ket have changed names, those of each thread are. What a lane reads of its ket primitives,
H[cd, q] among it, lies in columns: the n-th primitives of 32 successive pairs side by side, so that a warp reads whole
lines however long the contractions are. Code is straight-line, specialised for the four angular momenta.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, F64_2D, I64, cuda, jit_device, types
from md4.gpu.emit.instructions import shared_address
from md4.gpu.emit.stores import make_write_out
from md4.gpu.emit.unrolled import make_low_quartet, make_pack
from md4.gpu.h_layout import BRA_ELEMENTS, form_size
from md4.gpu.tuning import (
    LOW_COMPONENTS,
    LOW_L,
    LOW_PLAIN,
    LOW_PRIMITIVES,
    LOW_QUARTETS,
    LOW_ROUNDS,
    LOW_SHARED,
    LOW_SINGLE,
    LOW_SWAP_L,
    LOW_THREADS,
    LOW_WRITTEN,
    SHARED_BYTES,
)
from md4.method import operators
from md4.method.hermite import structure

i64 = types.int64


def thread_quartet_integrals(la, ca, lb, cb, lc, cc, ld, cd, pure, turned, kind):
    """Kernel factory for the class (la lb|lc ld) of shells with ca, cb, cc, cd contracted functions.

    `turned`: bra and ket have changed names; ab runs faster than cd in the result.
    """
    orders, bra_class, ket_class = la + lb + lc + ld + 1, (la, ca, lb, cb), (lc, cc, ld, cd)
    count = rows(bra_class, pure) * rows(ket_class, pure)
    threads = threads_for(count)
    zeros_upto, pack = operators.zeros_function(kind, jit_device), make_pack(orders)
    quartet = make_low_quartet(bra_class, ket_class, pure, turned)
    write_out, several = make_write_out(LOW_ROUNDS, threads), 1 < count <= LOW_WRITTEN

    def kernel(
        bra, bra_width, start, first_pair, h, h_size, group, ket, ket_first, slots, g_start, g_first_pair, g, npair_cd,
        parts, parameter, table, out, out_first, s_ij, s_kl,
    ):  # fmt: skip
        shared = cuda.shared.array(0, types.float64)
        tid = i64(cuda.threadIdx.x)
        pair, part = i64(cuda.blockIdx.x) // parts, i64(cuda.blockIdx.x) % parts
        first, last = start[first_pair + pair], start[first_pair + pair + 1]
        address, shared_h = shared_address(shared), 8 * group * h_size
        pair_cd = part * threads + tid
        place, zero, add = types.int32(address + shared_h + 8 * count * tid), cuda.local.array(orders, types.float64), 0
        for n in range(count):
            shared[shared_h // 8 + count * tid + n] = 0.0
        while first < last:
            many = min(group, last - first)
            cuda.syncthreads()
            for n in range(tid, many * h_size, threads):
                shared[n] = h[first * h_size + n]
            cuda.syncthreads()
            if pair_cd < npair_cd:
                k = ket_first[g_first_pair + pair_cd]
                for _ in range(g_start[g_first_pair + pair_cd], g_start[g_first_pair + pair_cd + 1]):
                    q, qx, qy, qz = ket[k], ket[slots + k], ket[2 * slots + k], ket[3 * slots + k]
                    this, record = address, first * bra_width
                    for _ in range(many):
                        rx, ry, rz = bra[record + 1] - qx, bra[record + 2] - qy, bra[record + 3] - qz
                        r2 = rx * rx + ry * ry + rz * rz
                        zeros_upto(orders - 1, bra[record], q, r2, parameter, table, zero, 0, 1)
                        quartet(pack(zero), rx, ry, rz, types.int32(this), g, k, slots, place, types.int32(add))
                        this += 8 * h_size
                        record += bra_width
                        add = 1
                    k += COLUMN_LANES
            first += group
        cuda.syncthreads()
        base, here = out_first + pair * s_ij + part * threads * s_kl, min(i64(threads), npair_cd - part * threads)
        if turned:
            for row in range(tid >> 5, here, threads // 32):
                for n in range(tid & 31, count, 32):
                    out[base + row * s_kl + n] = shared[shared_h // 8 + row * count + n]
        elif several:
            n = tid
            while n < here * count:
                write_out(out, base + n, types.int32(address + shared_h + 8 * n), here * count - n)
                n += LOW_ROUNDS * threads
        else:
            for n in range(tid, here * count, threads):
                out[base + n] = shared[shared_h // 8 + n]

    signature = (F64, i64, I64, i64, F64, i64, i64, F64, I64, i64, I64, i64, F64, *[i64] * 2, types.float64, F64_2D)
    return Kernel(kernel, (threads, 1), (*signature, F64, *[i64] * 3))


def threads_for(count):
    """Threads of a block for `count` integrals each, which wait in shared memory: two blocks to a multiprocessor."""
    return LOW_THREADS if 8 * LOW_THREADS * count <= SHARED_BYTES else LOW_THREADS // 2


def rows(shells, pure):
    """Function pairs of a class (l_a, nctr_a, l_b, nctr_b)."""
    la, ca, lb, cb = shells
    return structure(la, lb, pure, ca, cb)[-1][0] + 1


# Pairs whose primitives stand side by side in columns.
COLUMN_LANES = 32


def column_starts(start):
    """(slot of each pair's first primitive, slots in all) of columns, from the pairs' ranges of primitives.

    The n-th primitive of pair m of a group of 32 is in slot m + 32 n of the group; groups are as long as they need be.
    """
    counts = np.diff(start)
    lengths = np.maximum.reduceat(counts, np.arange(0, len(counts), COLUMN_LANES))
    edges = COLUMN_LANES * np.concatenate([[0], np.cumsum(lengths)])
    m = np.arange(len(counts))
    return edges[m // COLUMN_LANES] + m % COLUMN_LANES, int(edges[-1])


@dataclass
class Columns:
    """Primitive pairs of a list in columns, on the device.

    Attributes
    ----------
    records : Buffer
        [p, P_z, P_y, P_x][slot].
    first, place : Buffer
        Slots of each pair's first primitive, and of each primitive.
    slots : int
    """

    records: object
    first: object
    place: object
    slots: int


# launcher


def takes(unit, bra, ket):
    """Whether this kernel is for a class: few enough components, fewer where one product is all, and on old devices."""
    if unit == "fma":
        most, l, _ = LOW_PLAIN
    else:
        most, l = LOW_SINGLE if 1 in (bra.nherm, ket.nherm) else LOW_COMPONENTS, LOW_L
    return bra.nab * ket.nab <= most and bra.l + ket.l <= l


def long_enough(bra, ket):
    """Whether two lists have quartets enough for a thread each."""
    return len(bra) * len(ket) >= LOW_QUARTETS


def swapped(bra, ket):
    """Whether bra and ket change names: H of the side of higher l in shared memory leaves more registers."""
    return bra.l + ket.l >= LOW_SWAP_L and (bra.l, bra.nab) < (ket.l, ket.nab)


def thread_quartet_variant(bra, ket, kind, swap):
    """Variant for a class, after bra and ket have changed names if `swap`."""
    shells = ((p.la, p.nctr_a, p.lb, p.nctr_b) for p in (bra, ket))
    return Variant(thread_quartet_integrals, (*chain.from_iterable(shells), bra.pure, swap, kind))


def launch_thread_quartet(context, operator, h, g, ab, cd, swap, block):
    """(ab|cd) of whole lists into `block`; bra and ket have changed names if `swap`."""
    bra, ket, columns = ab.pairs, cd.pairs, cd.data.columns
    count = bra.nab * ket.nab
    threads = threads_for(count)
    parts = -(-len(ket) // threads)
    h_size, shared = form_size(bra, BRA_ELEMENTS), LOW_PLAIN[2] if context.unit == "fma" else LOW_SHARED
    group = max(1, min(bra.max_prim, LOW_PRIMITIVES, (shared - 8 * threads * count) // (8 * h_size)))
    context.launch(
        thread_quartet_variant(bra, ket, operator.kind, swap), len(bra) * parts, threads,
        8 * (group * h_size + threads * count),
        ab.data.records, ab.data.width, ab.data.start, ab.first, h, h_size, group, columns.records, columns.first,
        columns.slots, cd.data.start, cd.first, g, len(ket), parts, operator.parameter,
        context.table(operators.operator_table, operator), block.array, block.first, *block.strides[:2],
    )  # fmt: skip
