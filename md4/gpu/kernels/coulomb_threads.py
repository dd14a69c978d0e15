"""J in the Hermite basis for small L: a thread takes a primitive quartet, with r in its registers.

The lanes of a warp share the bra primitive and take ket primitives side by side, whose D_q and J_q each lane keeps
while it goes through bra primitives; J_p is summed over the warp. See `md4.gpu.kernels.hermite_coulomb`.

One launch takes all quartets of two degrees (`md4.gpu.hermite_coulomb.Degree`), or of a range of primitive pairs. Which
of them survive screening, a warp finds by itself. A quartet counts if R_ab R_cd f_ab |D_ab| or R_ab R_cd f_cd |D_cd|
reaches the tolerance (`md4.contract.screening`), and for a warp the largest R_cd and the largest R_cd f_cd |D_cd| of
its ket primitives stand for all of them. So the primitives are ordered such that neighbours have about the same of both
(`md4.gpu.pair_order`). Quartets that survive only just are taken by a second kernel, in single precision, unless their
exponents are too large for it. For molecules in a plane there are kernels that know what is zero
(`md4.gpu.hermite_rows`), and for derivatives, whose D has no functions of the highest degree.
"""

from functools import cache
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64, cuda, f64, i32, i64, jit_device, types
from md4.gpu.emit.correlation import (
    even_ranges,
    make_add_row,
    make_load_row,
    make_quartet_sums,
    pieces,
    with_density,
)
from md4.gpu.emit.instructions import make_empty, shared_address
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.values import precision_of
from md4.gpu.hermite_rows import row_parts, row_width
from md4.gpu.kernels.bounds import larger
from md4.gpu.kernels.groups import Records, with_floats
from md4.gpu.kernels.primitive_quartets import (
    Separation,
    arguments_group,
    charge,
    make_zeros_upto,
    operator_arguments,
)
from md4.method.mirror import r_count

THREADS = 128  # of a block
THREAD_L, THREAD_KET_L = 12, 6  # highest L of two degrees of which a thread takes a primitive quartet, and of the ket
SINGLE_L = 12  # highest L in single precision
KET_FUNCTIONS = 35  # most functions q of the ket whose D_q and J_q are in registers at once
# L from which on r is in shared memory, in FP64 and in FP32, in any molecule and where all centres lie in a plane.
STAGED_L = ((7, 9), (8, 10))
THREAD_BLOCKS = 8192  # blocks that a launch should have before each takes several bra primitives
THREAD_BRAS = 64  # most bra primitives of a block, about
THIN = 4  # a block goes through so many times as many, most of which do not count, at most
# Blocks of threads that a multiprocessor is to hold in FP64, for L = 0, 1, ...; and in FP32.
BLOCKS_OF_DOUBLES, BLOCKS_OF_SINGLES = (5, 5, 5, 4, 3, 2), (8, 7, 6, 6, 5, 4, 3, 2)
flag = types.boolean
# Shared memory of a multiprocessor from compute capability 9.0 on, what each block takes of it beside its own, and what
# a block may have from 8.0 on.
MULTIPROCESSOR_BYTES, BESIDE_BYTES, LARGEST_BLOCK_BYTES = 228 << 10, 1 << 10, 163 << 10
# Bytes of a warp's next bra primitives, and warps for which the registers of a multiprocessor always suffice.
RECORD_BYTES, MOST_WARPS = 32 * (4 * 8 + 4), 8
# Blocks of a launch, whose numbers are divided as 32-bit integers.
MOST_BLOCKS = 1 << 29


class OrderedSide(NamedTuple):
    """A range of the primitive pairs of a degree in their order, with the Hermite densities and sums of all of them.

    Attributes
    ----------
    records : float64 array
        Exponent and centre (z, y, x) at each place.
    reach : float64 array
        Three of each place: R of the pair, R times 2 sqrt(min(n, n)) |D|, and T / R (`md4.contract.screening`).
    first, last : int64
        First place of the range, and the one behind its last.
    d : float64 array
    j : int64 array
        In fixed point.
    scales : float64 array
        Those of j; see `md4.gpu.kernels.hermite_scales`.
    """

    records: F64
    reach: F64
    first: i64
    last: i64
    d: F64
    j: I64
    scales: F64


class Reach(NamedTuple):
    """R, R f |D|, T / R and the exponent of a primitive pair, or the largest of several."""

    bound: f64
    product: f64
    terms: f64
    exponent: f64


class Limits(NamedTuple):
    """Products of bounds that decide about a quartet.

    Attributes
    ----------
    least : float64
        Below, it does not count.
    double : float64
        From here on, with T in place of R, it is computed in double precision.
    exponent : float64
        So are those whose exponents p and q are both larger.
    """

    least: f64
    double: f64
    exponent: f64


def expanded_order():
    """Kernel factory: `records` and `reach` of `OrderedSide`, and the places of a list, a thread for each of its pairs.

    `axis` changes places with axis 0.
    """
    threads = THREADS

    def kernel(
        npair: i64, first: I64, bounds: F64, products: F64, terms: F64, start: I64, pair_records: Records, axis: i64,
        places: I32, reach: F64, records: F64,
    ):  # fmt: skip
        n = i64(cuda.blockIdx.x) * threads + i64(cuda.threadIdx.x)
        if n < npair:
            place = first[n]
            for prim in range(start[n], start[n + 1]):
                places[prim], source = i32(place), prim * pair_records.width
                reach[3 * place], reach[3 * place + 1], reach[3 * place + 2] = bounds[n], products[n], terms[n]
                for k in range(4):
                    records[4 * place + k] = pair_records.numbers[source + k]
                if axis > 0:
                    records[4 * place + 1] = pair_records.numbers[source + 1 + axis]
                    records[4 * place + 1 + axis] = pair_records.numbers[source + 1]
                place += 1

    return Kernel(kernel)


def make_reach_of_warp():
    """Device function (side, place, live) -> `Reach` of the warp's places, 0 where not `live`."""
    larger_of = jit_device(larger)

    def reach_of_warp(side, place, live):
        bound, product, terms, exponent, other = 0.0, 0.0, 0.0, 0.0, 16
        if live:
            bound, product = side.reach[3 * place], side.reach[3 * place + 1]
            terms, exponent = side.reach[3 * place + 2], side.records[4 * place]
        while other > 0:
            bound = larger_of(bound, cuda.shfl_xor_sync(-1, bound, other))
            product = larger_of(product, cuda.shfl_xor_sync(-1, product, other))
            terms = larger_of(terms, cuda.shfl_xor_sync(-1, terms, other))
            exponent = larger_of(exponent, cuda.shfl_xor_sync(-1, exponent, other))
            other >>= 1
        return Reach(bound, product, terms, exponent)

    return jit_device(reach_of_warp)


def counts_in(single, own, warp, limits):
    """Whether a bra primitive with a warp's ket primitives counts in single, or in double precision (device function).

    `own`, `warp`: the `Reach` of both. Where bounds are so large that a product is no number, in double precision.
    """
    one, two, terms = own.bound * warp.product, own.product * warp.bound, own.terms * warp.terms
    is_single = one * terms < limits.double and two * terms < limits.double
    is_single = is_single and (own.exponent <= limits.exponent or warp.exponent <= limits.exponent)
    return is_single == single and not (one < limits.least and two < limits.least)


def correlation_by_threads(l_bra, l_ket, kind, single, part, mirrored, more):
    """Kernel factory for small L: a thread takes a primitive quartet, J_p += r D_q and J_q += r D_p.

    `single`: all but R and J is in FP32. `part`: which of `ket_parts` the functions q are. `mirrored`: all centres have
    the same coordinate on axis 0. `more`: D has no functions of the highest degree (1, for derivatives), or has (0).
    """
    l, functions, precision = l_bra + l_ket - more, ket_parts(l_ket, mirrored)[part], precision_of(single)
    count, nbytes, real = len(functions), precision.bytes, precision.numba
    staged, threads = is_staged(l, single, mirrored), threads_of_a_block(l, single, mirrored)
    np_, nq = row_width(l_bra, mirrored), row_width(l_ket, mirrored)
    charge_at, reach_of_warp, counts = jit_device(charge), make_reach_of_warp(), jit_device(counts_in)
    zeros_of = make_zeros_upto(kind, l, single)
    correlate = make_quartet_sums(l_bra, l_ket, functions, precision, staged, mirrored, more)
    load = make_load_row(with_density(functions, l_ket, mirrored, more), precision)
    add = make_add_row(functions, precision)
    empty = make_empty(count, precision)
    all_numbers, warp_bytes = 4 * threads, stage_bytes(l, single, mirrored)
    side = with_floats(OrderedSide, "d") if single else OrderedSide
    operator_group = arguments_group(kind, single)

    def kernel(
        bra: side, ket: side, triangle: flag, operator: operator_group, limits: Limits, parts: i64, step: i64
    ):  # fmt: skip
        # the records and places of the warp's next bra primitives
        numbers, places = cuda.shared.array(all_numbers, f64), cuda.shared.array(threads, i32)
        tid, stage = i64(cuda.threadIdx.x), i32(0)
        if staged:
            stage = i32(shared_address(cuda.shared.array(0, f64)) + (tid >> 5) * warp_bytes + (tid & 31) * nbytes)
        lane, block = tid & 31, quotient(i64(cuda.blockIdx.x), parts)
        m = bra.first + (i64(cuda.blockIdx.x) - block * parts) * step
        last, n = min(m + step, bra.last), ket.first + block * threads + tid
        if triangle:
            m = max(m, n - lane)  # from the first ket place of the warp on
        live, place = n < ket.last, min(n, ket.last - 1)
        of_warp, q = reach_of_warp(ket, place, live), charge_at(ket.records, 4 * place)
        d, j, found = load(ket.d, place * nq), empty(), i64(0)
        while m < last:
            mine, counting = m + lane, False
            if mine < last:
                bound, product, terms = bra.reach[3 * mine], bra.reach[3 * mine + 1], bra.reach[3 * mine + 2]
                counting = counts(single, Reach(bound, product, terms, bra.records[4 * mine]), of_warp, limits)
            votes = i64(cuda.ballot_sync(-1, counting))
            if counting:
                slot = tid - lane + cuda.popc(votes & ((i64(1) << lane) - 1))
                places[slot] = i32(mine)
                for axis in range(4):
                    numbers[4 * slot + axis] = bra.records[4 * mine + axis]
            cuda.syncwarp()
            slot, end = tid - lane, tid - lane + cuda.popc(votes & 0xFFFFFFFF)
            found += end - slot
            while slot < end:
                at = i64(places[slot])
                weight = 1.0 if live else 0.0
                if triangle and n >= at:
                    weight *= 0.5 if n == at else 0.0
                # not by `charge` and `separate`, which take more registers here
                rz, ry, rx = 0.0, numbers[4 * slot + 2] - q.y, numbers[4 * slot + 3] - q.x
                if not mirrored:
                    rz = numbers[4 * slot + 1] - q.z
                r = Separation(numbers[4 * slot], q.p, rz, ry, rx, rz * rz + ry * ry + rx * rx)
                zeros = zeros_of(r, operator)
                row = at * np_
                j = correlate(zeros, real(weight), r.rz, r.ry, r.rx, d, j, bra.d, bra.j, bra.scales, row, lane, stage)
                slot += 1
            cuda.syncwarp()
            m += 32
        if live and found > 0:
            add(j, ket.j, ket.scales, place * nq)

    return Kernel(kernel, (threads, 1 if staged else blocks_together(l, single)))


# launchers


def by_threads(l_bra, l_ket):
    """Whether a thread takes a primitive quartet of two degrees, that of the bra being the larger one."""
    return l_bra + l_ket <= THREAD_L and l_ket <= THREAD_KET_L


def blocks_together(l, single):
    """Blocks that a multiprocessor is to hold at once where r is in registers."""
    blocks = BLOCKS_OF_SINGLES if single else BLOCKS_OF_DOUBLES
    return blocks[min(l, len(blocks) - 1)]


def is_staged(l, single, mirrored):
    """Whether r is in shared memory, since registers do not hold it."""
    return l >= STAGED_L[mirrored][single]


def stage_bytes(l, single, mirrored):
    """Bytes of r of a warp in shared memory."""
    return 32 * precision_of(single).bytes * r_count(l, mirrored) if is_staged(l, single, mirrored) else 0


def warps_together(warps, bytes_of_warp):
    """Warps that shared memory lets a multiprocessor have, in blocks of so many."""
    own = warps * bytes_of_warp
    return warps * (MULTIPROCESSOR_BYTES // (own + BESIDE_BYTES)) if own <= LARGEST_BLOCK_BYTES else 0


def threads_of_a_block(l, single, mirrored):
    """As many as leave room for most warps where r is in shared memory; rather more than fewer."""
    if not is_staged(l, single, mirrored):
        return THREADS
    nbytes = stage_bytes(l, single, mirrored) + RECORD_BYTES
    return 32 * max((4, 2, 1), key=lambda warps: min(MOST_WARPS, warps_together(warps, nbytes)))


@cache
def ket_parts(l_ket, mirrored):
    """The places q in a row of the ket whose D_q and J_q registers hold together; each part is a launch of its own."""
    parts, most = row_parts(l_ket, mirrored), KET_FUNCTIONS
    if sum(map(len, parts)) <= most:
        return [tuple(place for part in parts for place in part)]
    return [tuple(piece) for part in parts for piece in pieces(part, even_ranges(len(part), most))]


def in_single(l_bra, l_ket):
    """Whether there is a kernel in single precision, too."""
    return l_bra + l_ket <= SINGLE_L


def bras_of_a_block(nbra, blocks, filled):
    """Bra places that a block goes through, `blocks` blocks each taking other ket primitives.

    `filled`: the part of all quartets that survives.
    """
    most = THREAD_BRAS / max(filled, 1.0 / THIN)
    wanted = min(int(most), nbra, nbra * blocks // THREAD_BLOCKS)
    return max(1, wanted, -(-nbra * blocks // MOST_BLOCKS))


def launch_order(context, prepared, of_pairs, axis, places, reach, records):
    """Writes what belongs to a whole list into its degree's `reach` and `records`, and the `places` of its primitives.

    `of_pairs`: the first place, R, R f |D| and T / R of each pair. `axis` changes places with axis 0.
    """
    threads, count, data = THREADS, len(prepared), prepared.data
    context.launch(
        Variant(expanded_order, ()), -(-count // threads), threads, 0, count, *of_pairs, data.start,
        (data.records, data.width), axis, places, reach, records,
    )  # fmt: skip


def quartets_launcher(context, kind, parameter, l_bra, l_ket, single, mirrored, more):
    """The function by which `launch_quartets` launches for two degrees."""
    l, facts = l_bra + l_ket - more, (mirrored, more)
    parts = range(len(ket_parts(l_ket, mirrored)))
    variants = [Variant(correlation_by_threads, (l_bra, l_ket, kind, single, n, *facts)) for n in parts]
    threads = threads_of_a_block(l, single, mirrored)
    shared = threads // 32 * stage_bytes(l, single, mirrored)
    arguments = operator_arguments(context, kind, parameter, single, l)

    def launch(context, triangle, bra, ket, limits, filled):
        nbra, blocks = bra[3] - bra[2], -(-(ket[3] - ket[2]) // threads)
        step = bras_of_a_block(nbra, blocks, filled)
        parts = -(-nbra // step)
        for variant in variants:
            context.launch(
                variant, blocks * parts, threads, shared, bra, ket, triangle, arguments, limits, parts, step
            )  # fmt: skip

    return launch


def launch_quartets(context, operator, degrees, mirrored, more, bra, ket, limits, filled, single):
    """J of both sides of two degrees.

    Parameters
    ----------
    operator : md4.method.operators.Operator
    degrees : tuple of int
        l of bra and ket; the first is not the smaller one. Where both are the same, so are the primitive pairs.
    mirrored : bool
        Whether all centres have the same coordinate on axis 0.
    more : int
        How many degrees less than J D has, 0 or 1.
    bra, ket : tuple
        `OrderedSide`, with densities in FP32 if `single`.
    limits : tuple of float
        `Limits`.
    filled : float
        Part of the quartets of the two ranges that survives, about.
    single : bool
    """
    facts = operator.kind, operator.parameter, *degrees, single, mirrored, more
    context.fixed(quartets_launcher, *facts)(context, degrees[0] == degrees[1], bra, ket, limits, filled)
