"""Steps 2 and 3 on the GPU: r[t] of every primitive quartet of a chunk, specialised per L and operator.

There are three kernels. For small L a thread makes r of a quartet in its registers. For middle L it makes r axis by
axis, see `md4.method.recurrence`, and puts what it has into shared memory. For large L a group of threads shares a
quartet: r^(m) comes from r^(m+1) between two buffers in shared memory, for falling m. With the first two kernels, r
goes to memory by way of shared memory, so that a warp writes whole lines.

For molecules in a plane, the first two kernels make r without its odd elements, which are zero: see
`md4.gpu.r_layout.even_r`. The axis that they take in closed form is then the one along which R is zero.
"""

import numpy as np

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I64, cuda, i32, i64, jit_device, types
from md4.gpu.emit.instructions import shared_address
from md4.gpu.emit.unrolled import STAGE_BYTES, make_r_by_axis, make_write_r, make_write_row, r_update, store_shared
from md4.gpu.kernels.groups import NO_LIMITS, Limits, Owners, owners, records
from md4.gpu.kernels.primitive_quartets import (
    OperatorArguments,
    PrimitiveQuartets,
    make_any_counts,
    make_separation,
    make_zeros_upto,
    operator_arguments,
    primitive_quartets,
)
from md4.gpu.r_layout import AXIS_L, even_r, r_stride
from md4.gpu.tuning import SHARED_BYTES
from md4.method import operators, recurrence
from md4.method.angular import nherm
from md4.method.mirror import r_count

REGISTERS_L = 4  # highest L whose r a thread makes in registers; a lane axis by axis up to `AXIS_L`, a group above
THREADS = 128  # of a block, in registers
MOST_STAGE_BYTES = 75 << 10  # most shared memory of a warp, axis by axis: three warps share a multiprocessor's
# Threads that share a quartet: few up to some L, so that few idle at low degrees; and above.
SMALL_GROUP, SMALL_GROUP_L, LARGE_GROUP = 128, 20, 256


def lanes_of_a_warp(l, even=False):
    """Quartets of a warp that makes r axis by axis, a power of 2; the arguments are those of `r_count`."""
    return max(1, min(32, 1 << (MOST_STAGE_BYTES // (8 * (r_count(l, even) | 1))).bit_length() - 1))


def stage_bytes(l, even=False):
    """Bytes of shared memory of such a warp."""
    return 8 * lanes_of_a_warp(l, even) * (r_count(l, even) | 1)


def warps_together(l, even=False):
    """Such warps of a multiprocessor, by shared memory and by registers."""
    return max(1, min(8, 2 * SHARED_BYTES // stage_bytes(l, even)))


def group_of(l):
    """Threads that share a quartet."""
    return SMALL_GROUP if l <= SMALL_GROUP_L else LARGE_GROUP


def group_threads(l):
    """Threads of a block of such groups."""
    return max(THREADS, group_of(l))
# device functions


def separation_by_axes(s, axis):
    """R_z, R_y, R_x of a `Separation` (device function)."""
    return s.rz, s.ry, s.rx


def separation_in_plane(s, axis):
    """R along the mirror axis, which is zero, and along the other two axes in their order (device function)."""
    return 0.0, s.ry if axis == 0 else s.rz, s.ry if axis == 2 else s.rx


# kernels


def r_in_registers(l, kind, even=False):
    """Kernel factory for small L: a thread a quartet, r in registers; `axis` is the mirror axis of `even` r."""
    stride, threads, words = r_stride(l, even), THREADS, THREADS // 32 * STAGE_BYTES // 8
    separation, zeros_upto = make_separation(), make_zeros_upto(kind, l)
    write_r, any_counts = make_write_r(l, stride, even), make_any_counts(32)
    by_axes = jit_device(separation_in_plane if even else separation_by_axes)

    def kernel(
        quartets: PrimitiveQuartets, owners: Owners, limits: Limits, operator: OperatorArguments, axis: i64, r: F64
    ):
        stage = shared_address(cuda.shared.array(words, types.float64))
        tid = i64(cuda.threadIdx.x)
        n = i64(cuda.blockIdx.x) * threads + tid
        if not any_counts(quartets, owners, limits, n - (tid & 31)):
            return
        s = separation(quartets, min(n, quartets.count - 1))  # idle threads repeat the last quartet
        zeros, lane = zeros_upto(s, operator), tid & 31
        first, place = n - lane, i32(stage + (tid >> 5) * STAGE_BYTES)
        r0, r1, r2 = by_axes(s, axis)
        write_r(zeros, r0, r1, r2, r, first * stride, quartets.count - first, place, lane)

    return Kernel(kernel, (threads, 2))


def r_by_axis(l, kind, even=False):
    """Kernel factory for middle L: a lane a quartet, r axis by axis; the warp's r is put in order in shared memory.

    `axis` is the mirror axis of `even` r. If `single`, r is written as floats rounded to TF32.
    """
    separation, zeros_upto, make_r = make_separation(), make_zeros_upto(kind, l), make_r_by_axis(l, even)
    lanes, count, stride = lanes_of_a_warp(l, even), r_count(l, even), r_stride(l, even)
    row, write_row, any_counts = count | 1, make_write_row(count, stride), make_any_counts(lanes)
    single_stride = r_stride(l, even, True)
    write_single_row = make_write_row(count, single_stride, True)
    by_axes = jit_device(separation_in_plane if even else separation_by_axes)

    def kernel(
        quartets: PrimitiveQuartets, owners: Owners, limits: Limits, operator: OperatorArguments, axis: i64, r: F64,
        single: types.boolean,
    ):  # fmt: skip
        stage = shared_address(cuda.shared.array(0, types.float64))
        lane, first = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x) * lanes
        if not any_counts(quartets, owners, limits, first):
            return
        if lane < lanes:
            s = separation(quartets, min(first + lane, quartets.count - 1))  # idle lanes repeat the last quartet
            r0, r1, r2 = by_axes(s, axis)
            make_r(zeros_upto(s, operator), r0, r1, r2, i32(stage + lane * (8 * row)))
        cuda.syncwarp()
        place, left = i32(stage + 8 * lane), min(i64(lanes), quartets.count - first)
        if single:
            target = first * single_stride + lane
            for _ in range(left):
                write_single_row(place, r, target, lane)
                place, target = i32(place + 8 * row), target + single_stride
            return
        target = first * stride + lane
        for _ in range(left):
            write_row(place, r, target, lane)
            place, target = i32(place + 8 * row), target + stride

    return Kernel(kernel, (32, warps_together(l, even)))


def packed_rules(l):
    """`recurrence_table` in one int64 a triple, four byte offsets of 16 bits each.

    From low to high: r[t-e_i], r[t-2e_i], R_i among a quartet's constants (R_z, R_y, R_x, 0, 1, 2, ...), t_i - 1 there.
    """
    table = recurrence.recurrence_table(l).astype(np.int64)
    one, two, axis, factor = table[:, 0] & 65535, table[:, 0] >> 16, table[:, 1] & 255, table[:, 1] >> 8
    return 8 * (one + (two << 16) + (axis << 32) + ((factor + 3) << 48))


def r_by_group(l, kind, even=False):
    """Kernel factory for large L: a group of threads a quartet; none of these is `even`."""
    separation, zero_of = make_separation(), operators.zero_function(kind, jit_device)
    group, stride, size, threads = group_of(l), r_stride(l), nherm(l), group_threads(l)
    together, constants, orders = threads // group, l + 4, l + 2
    any_counts = make_any_counts(together)

    def kernel(
        quartets: PrimitiveQuartets, owners: Owners, limits: Limits, operator: OperatorArguments, rules: I64, r: F64
    ):
        shared = cuda.shared.array(0, types.float64)
        place, lane = cuda.threadIdx.x // group, cuda.threadIdx.x % group
        n = i64(cuda.blockIdx.x) * together + place
        if not any_counts(quartets, owners, limits, n - place):
            return
        s = separation(quartets, min(n, quartets.count - 1))  # idle groups repeat the last quartet
        fixed = place * (constants + orders)  # first of the quartet's constants; its [0]^(m) behind
        zeros = fixed + constants
        if lane == 0:
            shared[fixed], shared[fixed + 1], shared[fixed + 2] = s.rz, s.ry, s.rx
        m = lane
        while m <= l:
            shared[zeros + m] = zero_of(m, s.p, s.q, s.r2, operator.parameter, operator.table)
            shared[fixed + 3 + m] = float(m)
            m += group
        cuda.syncthreads()
        first = together * (constants + orders) + place * 2 * stride
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
                store_shared(i32(new), shared[zeros + m])
                t += group
            while t < reach:  # no `range`: it divides by its step
                store_shared(i32(new + 8 * t), r_update(rules[t], i32(old), i32(known)))
                t += group
            cuda.syncthreads()
            old, new = new, old
        if n < quartets.count:
            t = lane
            if lane == 0:
                r[n * stride] = shared[zeros]
                t += group
            while t < size:
                r[n * stride + t] = r_update(rules[t], i32(old), i32(known))
                t += group
            if size < stride and lane == 0:
                r[n * stride + size] = 0.0  # read, with the rest of its row, by copies of 16 bytes

    return Kernel(kernel, (threads, 1024 // threads))


# launcher


def r_launcher(context, kind, parameter, l, axis):
    """The function that makes r for an operator up to L = `l`; `axis`: the mirror axis of even r."""
    even, extra = axis is not None, axis or 0
    if l <= REGISTERS_L:
        factory, threads, together, shared = r_in_registers, THREADS, THREADS, 0
    elif l <= AXIS_L:
        factory, threads, together, shared = r_by_axis, 32, lanes_of_a_warp(l, even), stage_bytes(l, even)
    else:
        factory, threads, together = r_by_group, group_threads(l), group_threads(l) // group_of(l)
        shared, extra = 8 * together * (2 * l + 6 + 2 * r_stride(l)), context.table(packed_rules, l)
    variant = Variant(factory, (l, kind, True) if even else (l, kind))
    arguments = operator_arguments(context, kind, parameter)

    def launch(context, quartets, ab, cd, limits, r, single=False):
        count = quartets[-1]
        if count:
            blocks, more = -(-count // together), (single,) if factory is r_by_axis else ()
            context.launch(
                variant, blocks, threads, shared, quartets, owners(ab, cd), limits, arguments, extra, r, *more
            )  # fmt: skip

    return launch


def launch_listed_r(context, operator, ab, cd, table, count, r, single):
    """r of `count` primitive quartets, whose primitive pairs of both lists are in `table`, a pair of buffers.

    As `launch_r`; if `single`, as floats rounded to TF32, of an L that a lane makes `by_axis`.
    """
    launch = context.fixed(r_launcher, operator.kind, operator.parameter, *upto(ab.facts, cd.facts))
    launch(context, (records(ab), records(cd), 0, 0, 0, *table, count), ab, cd, NO_LIMITS, r, single)


def by_axis(bra, ket):
    """Whether a lane makes r of two `ListFacts` axis by axis."""
    return REGISTERS_L < bra.l + ket.l <= AXIS_L


def launch_r(context, operator, ab, cd, r, limits):
    """r of the primitive quartets of two chunks, of all that count.

    It is without odd elements if `md4.gpu.r_layout.even_r` says so of the chunks.
    """
    launch = context.fixed(r_launcher, operator.kind, operator.parameter, *upto(ab.facts, cd.facts))
    launch(context, primitive_quartets(ab, cd), ab, cd, limits, r)


def upto(bra, ket):
    """L of two `ListFacts`, and the mirror axis of even r."""
    return bra.l + ket.l, bra.mirror[0] if even_r(bra, ket) else None
