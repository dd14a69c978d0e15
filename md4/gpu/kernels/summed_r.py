"""Sums of r over the primitives of ket pairs, which steps 2 and 3 add up while they make r.

    s[bra primitive, kl, cd][t] = sum_k g[k, cd] r_k[t]

over the primitives k of ket pair kl. A lane makes one such sum in shared memory, r of one primitive quartet after the
other, axis by axis as in `md4.gpu.kernels.recurrence`; r itself is never in memory. There must be many sums: where they
are few, `md4.gpu.kernels.one_product.launch_ket_sums` adds up r that has been stored.
"""

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I64, cuda, f64, i32, i64, jit_device
from md4.gpu.emit.instructions import shared_address
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.unrolled import make_add_r, make_write_row, store_shared
from md4.gpu.kernels.groups import Limits, PairRange, pair_range, primitives_of, survives
from md4.gpu.kernels.primitive_quartets import (
    OperatorArguments,
    PrimitiveQuartets,
    make_separation,
    make_zeros_upto,
    operator_arguments,
    primitive_quartets,
)
from md4.gpu.r_layout import r_stride
from md4.gpu.tuning import RECURRENCE, SUMS
from md4.method.angular import nherm


def summed_r(l, kind):
    """Kernel factory: a lane a sum."""
    separation, zeros_upto, add_r = make_separation(), make_zeros_upto(kind, l), make_add_r(l)
    primitives, counts = jit_device(primitives_of), jit_device(survives)
    size, lanes, row, stride = nherm(l), RECURRENCE.lanes(l), nherm(l) | 1, r_stride(l)
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

    return Kernel(kernel, (32, SUMS.blocks(l)))


# launcher


def sums_rows(bra, ket):
    """Number of sums of two slices."""
    return bra.nprim * ket.npair * ket.facts.nab


def serves(bra, ket):
    """Whether sums of two slices are made here."""
    return bra.facts.l + ket.facts.l <= SUMS.l and sums_rows(bra, ket) >= SUMS.fewest


def summed_r_variants(l, kind):
    """The variant for sums of r up to L = `l`, if there is one; only long lists take it."""
    if l <= SUMS.l:
        yield summed_r_variant(l, kind)


def summed_r_variant(l, kind):
    """Variant for sums of r up to L = `l`."""
    return Variant(summed_r, (l, kind))


def summed_r_launcher(context, kind, parameter, l):
    """The function by which `launch_summed_r` launches for an operator up to L = `l`."""
    lanes, shared = RECURRENCE.lanes(l), RECURRENCE.stage(l)
    variant, arguments = summed_r_variant(l, kind), operator_arguments(context, kind, parameter)

    def launch(context, ab, cd, g, out, limits):
        total = sums_rows(ab, cd)
        if total:
            context.launch(
                variant, -(-total // lanes), 32, shared,
                primitive_quartets(ab, cd), arguments, pair_range(cd), g, cd.facts.nab, cd.npair, total, ab.data.owner,
                limits, out,
            )  # fmt: skip

    return launch


def launch_summed_r(context, operator, ab, cd, g, out, limits):
    """s of two chunks, 0 of what does not count; `g` weights of the whole ket list."""
    l = ab.facts.l + cd.facts.l
    context.fixed(summed_r_launcher, operator.kind, operator.parameter, l)(context, ab, cd, g, out, limits)
