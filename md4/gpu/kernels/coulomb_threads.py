"""J in the Hermite basis for small L: a thread takes a primitive quartet, with r in its registers.

The lanes of a warp share the bra primitive and take ket primitives side by side, whose D_q and J_q each lane keeps
while it goes through bra primitives; J_p is summed over the warp. See `md4.gpu.kernels.hermite_coulomb`.

One launch takes all quartets of two lists, or of a range of their pairs. Which of them survive screening, a warp finds
by itself. A quartet counts if R_ab R_cd f_ab |D_ab| or R_ab R_cd f_cd |D_cd| reaches the tolerance
(`md4.contract.screening`), and for a warp the largest R_cd and the largest R_cd f_cd |D_cd| of its ket primitives stand
for all of them. So the primitives of a list are ordered such that neighbours have about the same of both
(`md4.gpu.pair_order`). Quartets that survive only just are taken by a second kernel, in single precision.
"""

from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F32, F64, I32, I64, cuda, f64, i32, i64, jit_device, types
from md4.gpu.emit.correlation import even_ranges, make_load_row, make_quartet_sums
from md4.gpu.emit.instructions import make_empty, precision_of, shared_address
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.vectors import make_add_vector
from md4.gpu.kernels.bounds import larger
from md4.gpu.kernels.groups import Records, records
from md4.gpu.kernels.primitive_quartets import (
    Separation,
    arguments_group,
    charge,
    make_single_zeros_upto,
    make_zeros_upto,
    operator_arguments,
    single_arguments,
)
from md4.gpu.tuning import HERMITE_COULOMB, SHARED_BYTES, blocks_of_8
from md4.method.angular import nherm

flag = types.boolean
# Blocks of a launch, whose numbers are divided as 32-bit integers.
MOST_BLOCKS = 1 << 29


class OrderedSide(NamedTuple):
    """A range of a list's primitive pairs in their order, with the Hermite densities and sums of the whole list.

    Attributes
    ----------
    order : int32 array
        The primitive pair at each place.
    reach : float64 array
        Two of each place: R of the pair, and R times 2 sqrt(min(n, n)) |D|.
    first, last : int64
        First place of the range, and the one behind its last.
    d, j : float64 array
    """

    order: I32
    reach: F64
    first: i64
    last: i64
    d: F64
    j: F64


class SingleSide(NamedTuple):
    """The same with densities in single precision."""

    order: I32
    reach: F64
    first: i64
    last: i64
    d: F32
    j: F64


class Limits(NamedTuple):
    """Products of bounds that decide about a quartet.

    Attributes
    ----------
    least : float64
        Below, it does not count.
    double : float64
        From here on it is computed in double precision.
    """

    least: f64
    double: f64


def expanded_order():
    """Kernel factory: `order` and `reach` of `OrderedSide` from those of pairs, a thread for each pair."""
    threads = HERMITE_COULOMB.threads

    def kernel(npair: i64, pairs: I64, places: I64, bounds: F64, products: F64, start: I64, order: I32, reach: F64):
        n = i64(cuda.blockIdx.x) * threads + i64(cuda.threadIdx.x)
        if n < npair:
            pair, place = pairs[n], places[n]
            for prim in range(start[pair], start[pair + 1]):
                order[place] = i32(prim)
                reach[2 * place], reach[2 * place + 1] = bounds[pair], products[pair]
                place += 1

    return Kernel(kernel)


def make_reach_of_warp():
    """Device function (reach, place, live) -> the largest of both numbers of the warp's places, 0 where not `live`."""
    larger_of = jit_device(larger)

    def reach_of_warp(reach, place, live):
        bound, product, other = 0.0, 0.0, 16
        if live:
            bound, product = reach[2 * place], reach[2 * place + 1]
        while other > 0:
            bound = larger_of(bound, cuda.shfl_xor_sync(-1, bound, other))
            product = larger_of(product, cuda.shfl_xor_sync(-1, product, other))
            other >>= 1
        return bound, product

    return jit_device(reach_of_warp)


def counts_in(single, bound, product, bound_of_warp, product_of_warp, limits):
    """Whether a bra primitive with a warp's ket primitives counts in single, or in double precision (device function).

    Where bounds are so large that a product is no number, in double precision.
    """
    one, two = bound * product_of_warp, product * bound_of_warp
    if not single:
        return not (one < limits.double and two < limits.double)
    return one < limits.double and two < limits.double and not (one < limits.least and two < limits.least)


def correlation_by_threads(l_bra, l_ket, kind, single, part):
    """Kernel factory for small L: a thread takes a primitive quartet, J_p += r D_q and J_q += r D_p.

    `single`: all but R and J is in FP32. `part`: which of `ket_parts` the functions q are.
    """
    l, functions, precision = l_bra + l_ket, ket_parts(l_ket)[part], precision_of(single)
    count, first_q = len(functions), functions[0]
    nbytes = precision.bytes
    staged, threads = is_staged(l, single), threads_of_a_block(l, single)
    np_, nq, real = 8 * blocks_of_8(nherm(l_bra)), 8 * blocks_of_8(nherm(l_ket)), precision.numba
    charge_at, reach_of_warp, counts = jit_device(charge), make_reach_of_warp(), jit_device(counts_in)
    zeros_of = (make_single_zeros_upto if single else make_zeros_upto)(kind, l)
    correlate, load = make_quartet_sums(l_bra, l_ket, functions, precision, staged), make_load_row(count, precision)
    add, empty = make_add_vector(count, precision), make_empty(count, precision)
    all_numbers, all_places, warp_bytes = 4 * threads, 2 * threads, stage_bytes(l, single)
    side, operator_group = SingleSide if single else OrderedSide, arguments_group(kind, single)

    def kernel(
        bra: side, bra_records: Records, ket: side, ket_records: Records, triangle: flag, operator: operator_group,
        limits: Limits, parts: i64, step: i64,
    ):  # fmt: skip
        # what the warp's next bra primitives are: four numbers, and the primitive and its place
        numbers, places = cuda.shared.array(all_numbers, f64), cuda.shared.array(all_places, i32)
        tid, stage = i64(cuda.threadIdx.x), i32(0)
        if staged:
            stage = i32(shared_address(cuda.shared.array(0, f64)) + (tid >> 5) * warp_bytes + (tid & 31) * nbytes)
        lane, block = tid & 31, quotient(i64(cuda.blockIdx.x), parts)
        m = bra.first + (i64(cuda.blockIdx.x) - block * parts) * step
        last, n = min(m + step, bra.last), ket.first + block * threads + tid
        if triangle:
            m = max(m, n - lane)  # from the first ket place of the warp on
        live, place = n < ket.last, min(n, ket.last - 1)
        k = i64(ket.order[place])
        bound_of_warp, product_of_warp = reach_of_warp(ket.reach, place, live)
        q = charge_at(ket_records.numbers, k * ket_records.width)
        d, j, found = load(ket.d, k * nq + first_q), empty(), i64(0)
        while m < last:
            mine, counting = m + lane, False
            if mine < last:
                counting = counts(
                    single, bra.reach[2 * mine], bra.reach[2 * mine + 1], bound_of_warp, product_of_warp, limits
                )
            votes = i64(cuda.ballot_sync(-1, counting))
            if counting:
                slot, prim = tid - lane + cuda.popc(votes & ((i64(1) << lane) - 1)), i64(bra.order[mine])
                places[2 * slot], places[2 * slot + 1] = i32(prim), i32(mine)
                for axis in range(4):
                    numbers[4 * slot + axis] = bra_records.numbers[prim * bra_records.width + axis]
            cuda.syncwarp()
            slot, end = tid - lane, tid - lane + cuda.popc(votes & 0xFFFFFFFF)
            found += end - slot
            while slot < end:
                i, at = i64(places[2 * slot]), i64(places[2 * slot + 1])
                weight = 1.0 if live else 0.0
                if triangle and n >= at:
                    weight *= 0.5 if n == at else 0.0
                # not by `charge` and `separate`, which take more registers here
                rz, ry, rx = numbers[4 * slot + 1] - q.z, numbers[4 * slot + 2] - q.y, numbers[4 * slot + 3] - q.x
                r = Separation(numbers[4 * slot], q.p, rz, ry, rx, rz * rz + ry * ry + rx * rx)
                zeros = zeros_of(r, operator)
                j = correlate(zeros, real(weight), r.rz, r.ry, r.rx, d, j, bra.d, i * np_, bra.j, i * np_, lane, stage)
                slot += 1
            cuda.syncwarp()
            m += 32
        if live and found > 0:
            add(j, ket.j, k * nq + first_q, 1, count)

    return Kernel(kernel, (threads, 1 if staged else HERMITE_COULOMB.blocks(l, single)))


# launchers


def by_threads(l_bra, l_ket):
    """Whether a thread takes a primitive quartet of a class, whose bra has the larger l."""
    return l_bra + l_ket <= HERMITE_COULOMB.thread_l and l_ket <= HERMITE_COULOMB.thread_ket_l


def is_staged(l, single):
    """Whether r is in shared memory, since registers do not hold it."""
    return l >= (HERMITE_COULOMB.staged_single_l if single else HERMITE_COULOMB.staged_l)


def stage_bytes(l, single):
    """Bytes of r of a warp in shared memory."""
    return 32 * precision_of(single).bytes * nherm(l) if is_staged(l, single) else 0


def threads_of_a_block(l, single):
    """One warp where r is so long that three warps, not four, share a multiprocessor."""
    if not is_staged(l, single):
        return HERMITE_COULOMB.threads
    return 64 if 4 * stage_bytes(l, single) <= 2 * SHARED_BYTES else 32


def ket_parts(l_ket):
    """Ranges of the functions q whose D_q and J_q registers hold; each is taken by a launch of its own."""
    return even_ranges(nherm(l_ket), HERMITE_COULOMB.ket_functions)


def in_single(l_bra, l_ket):
    """Whether there is a kernel in single precision, too."""
    return HERMITE_COULOMB.single_ratio > 0 and l_bra + l_ket <= HERMITE_COULOMB.single_l


def bras_of_a_block(nbra, blocks, filled):
    """Bra places that a block goes through, `blocks` blocks each taking other ket primitives.

    `filled`: the part of all quartets that survives.
    """
    most = HERMITE_COULOMB.thread_bras / max(filled, 1.0 / HERMITE_COULOMB.thin)
    wanted = min(int(most), nbra, nbra * blocks // HERMITE_COULOMB.thread_blocks)
    return max(1, wanted, -(-nbra * blocks // MOST_BLOCKS))


def threads_variants(l_bra, l_ket, kind, single):
    """The variants for a class, whose bra has the larger l."""
    return [
        Variant(correlation_by_threads, (l_bra, l_ket, kind, single, part)) for part in range(len(ket_parts(l_ket)))
    ]  # fmt: skip


def launch_order(context, count, uploaded, start, order, reach):
    """Places of all primitive pairs of a list of `count` pairs; `uploaded` are the arrays of `md4.gpu.pair_order`."""
    threads = HERMITE_COULOMB.threads
    context.launch(
        Variant(expanded_order, ()), -(-count // threads), threads, 0, count, *uploaded, start, order, reach
    )  # fmt: skip


def quartets_launcher(context, kind, parameter, bra, ket, single):
    """The function by which `launch_quartets` launches for two `ListFacts`."""
    l = bra.l + ket.l
    variants, threads = threads_variants(bra.l, ket.l, kind, single), threads_of_a_block(l, single)
    shared = threads // 32 * stage_bytes(l, single)
    if single:
        arguments = single_arguments(context, kind, parameter, l)
    else:
        arguments = operator_arguments(context, kind, parameter)

    def launch(context, ab, cd, triangle, bra, ket, limits, filled):
        nbra, blocks = bra[3] - bra[2], -(-(ket[3] - ket[2]) // threads)
        step = bras_of_a_block(nbra, blocks, filled)
        parts = -(-nbra // step)
        for variant in variants:
            context.launch(
                variant, blocks * parts, threads, shared,
                bra, records(ab), ket, records(cd), triangle, arguments, limits, parts, step,
            )  # fmt: skip

    return launch


def launch_quartets(context, operator, ab, cd, triangle, bra, ket, limits, filled, single):
    """J of both sides of two lists of small L.

    Parameters
    ----------
    operator : md4.method.operators.Operator
    ab, cd : md4.engine.PreparedPairs
        The whole lists. l of `ab` is not the smaller one.
    triangle : bool
        Whether they are one list.
    bra, ket : tuple
        `OrderedSide`, or `SingleSide` if `single`.
    limits : tuple of float
        `Limits`.
    filled : float
        Part of the quartets of the two ranges that survives, about.
    single : bool
    """
    facts = operator.kind, operator.parameter, ab.facts, cd.facts, single
    context.fixed(quartets_launcher, *facts)(context, ab, cd, triangle, bra, ket, limits, filled)
