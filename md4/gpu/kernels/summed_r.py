"""Sums of r over the primitives of ket pairs, for `md4.gpu.kernels.one_product`.

    s[bra primitive, kl, cd][t] = sum_k g[k, cd] r_k[t]

over the primitives k of ket pair kl. Where there are many such sums, steps 2 and 3 add r up while they make it: a lane
makes a sum in shared memory, r of one primitive quartet after the other, axis by axis as in
`md4.gpu.kernels.recurrence`; r itself is never in memory. Where they are few, many lanes would have nothing to do.
There a second kernel adds up r that has been stored.
"""

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I64, cuda, f64, i32, i64, jit_device
from md4.gpu.emit.instructions import shared_address
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.unrolled import make_add_r, make_write_row, store_shared
from md4.gpu.kernels.groups import HermiteIntegrals, Limits, PairRange, pair_range, primitives_of, survives
from md4.gpu.kernels.primitive_quartets import (
    OperatorArguments,
    PrimitiveQuartets,
    make_separation,
    make_zeros_upto,
    operator_arguments,
    primitive_quartets,
)
from md4.gpu.kernels.recurrence import lanes_of_a_warp, stage_bytes
from md4.gpu.r_layout import r_stride
from md4.gpu.tuning import SHARED_BYTES
from md4.method.angular import nherm

MOST_L = 14  # highest L of sums that are made with r
FEWEST_SUMS = 1 << 14  # fewest such sums
MOST_BLOCKS = 16  # most warps of a multiprocessor that make them
WARPS = 8  # of a block that adds up r in memory
MOST_WARPS = 16896  # up to which several warps share a ket pair, where there are few


def summed_r(l, kind):
    """Kernel factory: r and its sums, a lane a sum."""
    separation, zeros_upto, add_r = make_separation(), make_zeros_upto(kind, l), make_add_r(l)
    primitives, counts = jit_device(primitives_of), jit_device(survives)
    size, lanes, row, stride = nherm(l), lanes_of_a_warp(l), nherm(l) | 1, r_stride(l)
    write_row = make_write_row(size, stride)

    def kernel(
        quartets: PrimitiveQuartets, operator: OperatorArguments, ket: PairRange, weights: F64, ncd: i64, npair: i64,
        total: i64, owner: I64, limits: Limits, out: F64,
    ):  # fmt: skip
        # `owner`: the pair of each bra primitive of the whole list
        stage = shared_address(cuda.shared.array(0, f64))
        lane, first = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x) * lanes
        n = first + lane
        if lane < lanes and n < total:
            place = i32(stage + lane * (8 * row))
            for t in range(size):
                store_shared(i32(place + 8 * t), 0.0)
            pairs = quotient(n, ncd)
            bra = quotient(pairs, npair)
            pair = pairs - bra * npair
            k, last = primitives(ket, pair)
            if limits.counts.size > 0 and not counts(limits, owner[quartets.first_bra + bra], ket.first + pair):
                last = k
            weight, quartet = k * ncd + n - pairs * ncd, bra * quartets.nket - ket.first_prim
            while k < last:
                s = separation(quartets, quartet + k)
                add_r(zeros_upto(s, operator), weights[weight], s.rz, s.ry, s.rx, place)
                weight += ncd
                k += 1
        cuda.syncwarp()
        place, target = i32(stage + 8 * lane), first * stride + lane
        for _ in range(min(i64(lanes), total - first)):
            write_row(place, out, target, lane)
            place, target = i32(place + 8 * row), target + stride

    return Kernel(kernel, (32, max(1, min(MOST_BLOCKS, 2 * SHARED_BYTES // stage_bytes(l)))))


def ket_sums():
    """Kernel factory: sums of r in memory, `pieces` warps for each bra primitive and ket pair."""
    primitives, counts, warps = jit_device(primitives_of), jit_device(survives), WARPS

    def kernel(
        r: HermiteIntegrals, ket: PairRange, weights: F64, ncd: i64, npair: i64, total: i64, pieces: i64, owner: I64,
        first_bra: i64, limits: Limits, out: F64,
    ):  # fmt: skip
        # `owner`: the pair of each bra primitive of the whole list, of which the chunk begins with `first_bra`
        lane, warp = i64(cuda.threadIdx.x) & 31, i64(cuda.threadIdx.x) >> 5
        row = i64(cuda.blockIdx.x) * warps + warp
        n = quotient(row, pieces)
        if n >= total:
            return
        bra = quotient(n, npair)
        if limits.counts.size > 0 and not counts(limits, owner[first_bra + bra], ket.first + n - bra * npair):
            return
        first, last = primitives(ket, n - bra * npair)
        source, step = (bra * r.nket + first - ket.first_prim) * r.stride, r.stride
        for cd in range(ncd):
            t = (row - n * pieces) * 32 + lane
            while t < r.stride:
                # four at a time, whose loads are under way together
                value, other, place, k = 0.0, 0.0, source + t, first
                while k + 4 <= last:
                    one, two = r.numbers[place], r.numbers[place + step]
                    three, four = r.numbers[place + 2 * step], r.numbers[place + 3 * step]
                    weight = k * ncd + cd
                    value += weights[weight] * one
                    other += weights[weight + ncd] * two
                    value += weights[weight + 2 * ncd] * three
                    other += weights[weight + 3 * ncd] * four
                    place += 4 * step
                    k += 4
                while k < last:
                    value += weights[k * ncd + cd] * r.numbers[place]
                    place += step
                    k += 1
                out[(n * ncd + cd) * r.stride + t] = value + other
                t += 32 * pieces

    return Kernel(kernel, (32 * warps, 1))


# launcher


def needed(ket):
    """Whether columns of a ket list or slice are sums of several r, or of none."""
    return ket.facts.nab > 1 or ket.facts.max_prim > 1 or ket.nprim < ket.npair


def sums_of(steps, g, ab, cd, out):
    """s of two chunks but for what a block `out` leaves out, by the steps of a backend; `g` weights of the ket list."""
    l, total = ab.facts.l + cd.facts.l, ab.nprim * cd.npair * cd.facts.nab
    s = steps.context.pool.room("sums", max(1, total * r_stride(l)))
    if l <= MOST_L and total >= FEWEST_SUMS:
        launch = steps.context.fixed(summed_r_launcher, steps.operator.kind, steps.operator.parameter, l)
        launch(steps.context, ab, cd, g, total, s, out.limits)
    else:
        launch_ket_sums(steps.context, g, steps.r(ab, cd, out), ab, cd, s, out.limits)
    return s


def summed_r_launcher(context, kind, parameter, l):
    """The function by which `sums_of` launches for an operator up to L = `l`."""
    lanes, shared = lanes_of_a_warp(l), stage_bytes(l)
    variant, arguments = Variant(summed_r, (l, kind)), operator_arguments(context, kind, parameter)

    def launch(context, ab, cd, g, total, out, limits):
        context.launch(
            variant, -(-total // lanes), 32, shared,
            primitive_quartets(ab, cd), arguments, pair_range(cd), g, cd.facts.nab, cd.npair, total, ab.data.owner,
            limits, out,
        )  # fmt: skip

    return launch


def launch_ket_sums(context, g, r, ab, cd, out, limits):
    """s of two chunks from their r."""
    total, stride = ab.nprim * cd.npair, r_stride(ab.facts.l + cd.facts.l)
    if total:
        pieces = max(1, min(-(-stride // 32), MOST_WARPS // total))
        context.launch(
            Variant(ket_sums, ()), -(-total * pieces // WARPS), 32 * WARPS, 0,
            (r, stride, cd.nprim), pair_range(cd), g, cd.facts.nab, cd.npair, total, pieces, ab.data.owner,
            ab.first_prim, limits, out,
        )  # fmt: skip
