"""Steps 2 and 3 on the GPU: r[t] of every primitive quartet of a chunk, specialised per L and operator.

Three kernels: for small L a thread makes r of a quartet in registers; for middle ones a lane makes it axis by axis,
column by column, see `md4.method.recurrence`; for large ones a group of threads shares a quartet, r^(m) comes from
r^(m+1) between two buffers in shared memory, m falling. The first two go through shared memory to write whole lines.
"""

import numpy as np

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, F64_2D, I64, cuda, jit_device, types
from md4.gpu.emit.instructions import shared_address
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.unrolled import (
    STAGE_BYTES,
    make_column_r,
    make_pack,
    make_straight_r,
    make_write_row,
    r_update,
    store_shared,
)
from md4.gpu.tuning import (
    COLUMN_L,
    R_THREADS,
    STRAIGHT_L,
    r_column_blocks,
    r_column_bytes,
    r_group,
    r_lanes,
    r_stride,
    r_threads,
)
from md4.method import operators, recurrence
from md4.method.angular import nherm


def packed_rules(l):
    """`recurrence_table` in one int64 a triple, four byte offsets of 16 bits each.

    From low to high: r[t-e_i], r[t-2e_i], R_i among a quartet's constants (R_x, R_y, R_z, 0, 1, 2, ...), t_i - 1 there.
    """
    table = recurrence.recurrence_table(l).astype(np.int64)
    one, two, axis, factor = table[:, 0] & 65535, table[:, 0] >> 16, table[:, 1] & 255, table[:, 1] >> 8
    return 8 * (one + (two << 16) + (axis << 32) + ((factor + 3) << 48))


def r_integrals(l, kind):
    """Kernel factory; records of the bra and ket primitives and a chunk of them -> r."""
    zero = operators.zero_function(kind, jit_device)
    group, stride, count, threads = r_group(l), r_stride(l), nherm(l), r_threads(l)
    quartets, constants, orders = threads // group, l + 4, l + 2

    def kernel(bra, bra_width, bra_first, ket, ket_width, ket_first, nket, total, parameter, table, rules, r):
        shared = cuda.shared.array(0, types.float64)
        place, lane = cuda.threadIdx.x // group, cuda.threadIdx.x % group
        n = types.int64(cuda.blockIdx.x) * quartets + place
        mine = min(n, total - 1)  # idle groups repeat the last quartet
        i = (bra_first + mine // nket) * bra_width
        k = (ket_first + mine % nket) * ket_width
        rx, ry, rz = bra[i + 1] - ket[k + 1], bra[i + 2] - ket[k + 2], bra[i + 3] - ket[k + 3]
        fixed = place * (constants + orders)  # first of the quartet's constants; its [0]^(m) behind
        zeros = fixed + constants
        m = lane
        while m <= l:
            shared[zeros + m] = zero(m, bra[i], ket[k], rx * rx + ry * ry + rz * rz, parameter, table)
            shared[fixed + 3 + m] = float(m)
            m += group
        if lane == 0:
            shared[fixed], shared[fixed + 1], shared[fixed + 2] = rx, ry, rz
        cuda.syncthreads()
        first = quartets * (constants + orders) + place * 2 * stride
        if lane == 0:
            shared[first] = shared[zeros + l]
        cuda.syncthreads()
        base = shared_address(shared)
        known, old, new = base + 8 * fixed, base + 8 * first, base + 8 * (first + stride)
        reach = 1
        for m in range(l - 1, 0, -1):
            reach += (l - m + 1) * (l - m + 2) // 2  # triples of degree up to l - m
            t = lane
            if lane == 0:
                store_shared(types.int32(new), shared[zeros + m])
                t += group
            while t < reach:  # no `range`: it divides by its step
                value = r_update(rules[t], types.int32(old), types.int32(known))
                store_shared(types.int32(new + 8 * t), value)
                t += group
            cuda.syncthreads()
            old, new = new, old
        if n < total:
            t = lane
            if lane == 0:
                r[n * stride] = shared[zeros]
                t += group
            while t < count:
                r[n * stride + t] = r_update(rules[t], types.int32(old), types.int32(known))
                t += group
            if count < stride and lane == 0:
                r[n * stride + count] = 0.0  # read, with the rest of its row, by copies of 16 bytes

    i64, f64 = types.int64, types.float64
    signature = (F64, i64, i64, F64, i64, i64, i64, i64, f64, F64_2D, I64, F64)
    return Kernel(kernel, (threads, 1024 // threads), signature)


def straight_r_integrals(l, kind):
    """Kernel factory for small L: a thread a quartet, r in registers."""
    zeros_upto, pack = operators.zeros_function(kind, jit_device), make_pack(l + 1)
    straight = make_straight_r(l, r_stride(l))
    stride, threads, orders, words = r_stride(l), R_THREADS, l + 1, R_THREADS // 32 * STAGE_BYTES // 8

    def kernel(bra, bra_width, bra_first, ket, ket_width, ket_first, nket, total, parameter, table, r):
        stage = shared_address(cuda.shared.array(words, types.float64))
        tid = types.int64(cuda.threadIdx.x)
        n = types.int64(cuda.blockIdx.x) * threads + tid
        mine = min(n, total - 1)  # idle threads repeat the last quartet
        i = (bra_first + mine // nket) * bra_width
        k = (ket_first + mine % nket) * ket_width
        rx, ry, rz = bra[i + 1] - ket[k + 1], bra[i + 2] - ket[k + 2], bra[i + 3] - ket[k + 3]
        zeros = cuda.local.array(orders, types.float64)
        zeros_upto(l, bra[i], ket[k], rx * rx + ry * ry + rz * rz, parameter, table, zeros, 0, 1)
        lane = tid & 31
        first, place = n - lane, types.int32(stage + (tid >> 5) * STAGE_BYTES)
        straight(pack(zeros), rx, ry, rz, r, first * stride, total - first, place, lane)

    i64, f64 = types.int64, types.float64
    signature = (F64, i64, i64, F64, i64, i64, i64, i64, f64, F64_2D, F64)
    return Kernel(kernel, (threads, 2), signature)


def column_r_integrals(l, kind):
    """Kernel factory: a lane a quartet, by columns; the warp's r is put in order in shared memory."""
    zeros_upto, pack, column_r = operators.zeros_function(kind, jit_device), make_pack(l + 1), make_column_r(l)
    lanes, row, stride, orders = r_lanes(l), nherm(l) | 1, r_stride(l), l + 1
    write_row = make_write_row(nherm(l), stride)

    def kernel(bra, bra_width, bra_first, ket, ket_width, ket_first, nket, total, parameter, table, r):
        stage = shared_address(cuda.shared.array(0, types.float64))
        lane, first = types.int64(cuda.threadIdx.x), types.int64(cuda.blockIdx.x) * lanes
        n = min(first + lane, total - 1)
        if lane < lanes:
            before = quotient(n, nket)
            i, k = (bra_first + before) * bra_width, (ket_first + n - before * nket) * ket_width
            rx, ry, rz = bra[i + 1] - ket[k + 1], bra[i + 2] - ket[k + 2], bra[i + 3] - ket[k + 3]
            zeros = cuda.local.array(orders, types.float64)
            zeros_upto(l, bra[i], ket[k], rx * rx + ry * ry + rz * rz, parameter, table, zeros, 0, 1)
            column_r(pack(zeros), rx, ry, rz, types.int32(stage + lane * (8 * row)))
        cuda.syncwarp()
        place, target = types.int32(stage + 8 * lane), first * stride + lane
        for _ in range(min(types.int64(lanes), total - first)):
            write_row(place, r, target, lane)
            place, target = types.int32(place + 8 * row), target + stride

    i64, f64 = types.int64, types.float64
    signature = (F64, i64, i64, F64, i64, i64, i64, i64, f64, F64_2D, F64)
    return Kernel(kernel, (32, r_column_blocks(l)), signature)


# launcher


def r_variant(l, kind):
    """Variant for r up to L = `l`."""
    factory = straight_r_integrals if l <= STRAIGHT_L else column_r_integrals if l <= COLUMN_L else r_integrals
    return Variant(factory, (l, kind))


def launch_r(context, l, operator, bra, ket, total, r):
    """r of all quartets; `bra` and `ket` are (records, width, first primitive, number of primitives)."""
    if total == 0:
        return
    threads, quartets, shared, rules = R_THREADS, R_THREADS, 0, ()
    if STRAIGHT_L < l <= COLUMN_L:
        threads, quartets, shared = 32, r_lanes(l), r_column_bytes(l)
    elif l > COLUMN_L:
        threads, quartets = r_threads(l), r_threads(l) // r_group(l)
        shared, rules = 8 * quartets * (2 * l + 6 + 2 * r_stride(l)), (context.table(packed_rules, l),)
    context.launch(
        r_variant(l, operator.kind), -(-total // quartets), threads, shared,
        *bra[:3], *ket[:3], ket[3], total, operator.parameter,
        context.table(operators.operator_table, operator), *rules, r,
    )  # fmt: skip
