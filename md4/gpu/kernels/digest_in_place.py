"""Steps 2 to 5 for the smallest classes, and the digestion of their integrals into J and K where they are made.

A thread computes a quartet as in `md4.gpu.kernels.thread_quartet` and digests it: the integrals are in shared memory
between the two, and never anywhere else. The equations are in `md4.method.digestion`.

A warp digests 32 quartets of one bra pair at once, a lane each. Densities and sums of a quartet are in registers. To
and from the rows of D and X they go by way of a stage in shared memory, so that neighbouring lanes have neighbouring
numbers. Neighbours whose ket pairs have the same shell c add up their parts of X_ac and X_bc before one of them adds
these to X.

Which quartets there are stands in lists (`md4.gpu.kernels.select_quartets`). A block of threads takes item after item.
An item is a bra pair with some of the ket pairs that survive with it, of which each thread takes one at a time. So H of
the bra pair is copied to shared memory once an item.
"""

from functools import cache
from itertools import chain
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import I32, I64, cuda, i32, i64, jit_device, types, u32
from md4.gpu.emit.digest_quartets import (
    make_add_block,
    make_add_rows,
    make_add_to_x,
    make_add_to_y,
    make_columns_in_turn,
    make_load_block,
    make_load_rows,
    make_rows_in_turn,
    stage_parts,
)
from md4.gpu.emit.instructions import make_empty, shared_address
from md4.gpu.emit.scalars import add_global
from md4.gpu.emit.values import FP64, precision_of
from md4.gpu.emit.warp_sums import make_warp_sums, warp_place
from md4.gpu.h_layout import BRA_ELEMENTS, form_size
from md4.gpu.kernels.digest_parameters import Lists, Matrices
from md4.gpu.kernels.groups import PairRange, Records, pair_range, records, with_floats
from md4.gpu.kernels.primitive_quartets import arguments_group, operator_arguments
from md4.gpu.kernels.thread_quartet import (
    PRIMITIVES,
    TENSOR_LIMITS,
    BraH,
    Slots,
    block_threads,
    make_integrals,
    single_h_size,
)
from md4.gpu.tuning import SHARED_BYTES
from md4.method.angular import ncart
from md4.method.digestion import quartet_weight

MOST_INTEGRALS = 135  # of a quartet
LANE_INTEGRALS = 512  # most integrals of a lane in an item
LANE_QUARTETS = 16  # most quartets of a lane in an item
FEWEST_ITEMS = 16896  # that should be there before each has several quartets of a lane
MOST_BLOCKS = 8448  # that share the items
RUN = 8  # most lanes with the same shell c that add up their parts of X first, a power of 2
# Blocks a multiprocessor: (highest L, most integrals, blocks), else one; and in FP32 for L = 0, 1, ...
BLOCKS_OF_DOUBLES = ((6, 9, 5), (6, 15, 4), (6, 27, 3), (4, 45, 3))
BLOCKS_OF_SINGLES = (5, 5, 5, 4, 4, 3, 2)


def blocks_in_place(l, count, single):
    """Blocks that a multiprocessor is to hold at once where quartets of `count` integrals are digested in place.

    `l` is their total angular momentum. Not more than shared memory has room for the integrals of.
    """
    if single:
        blocks = BLOCKS_OF_SINGLES[min(l, len(BLOCKS_OF_SINGLES) - 1)]
    else:
        fits = (entry for entry in BLOCKS_OF_DOUBLES if l <= entry[0] and count <= entry[1])
        blocks = next((entry[2] for entry in fits), 1)
    nbytes = (4 if single else 8) * block_threads(count, single) * count
    return max(1, min(blocks, 2 * SHARED_BYTES // nbytes))


class Work(NamedTuple):
    """What a launch works on.

    Attributes
    ----------
    items : int32 array
        (bra pair, first entry, number of entries) of each item.
    entries : int32 array
        Numbers of ket pairs.
    counts : int64 array
        Numbers of items in double precision and in single precision.
    exchange, coulomb : int64
        Numbers of matrices X and Y.
    """

    items: I32
    entries: I32
    counts: I64
    exchange: i64
    coulomb: i64


class Runs(NamedTuple):
    """Runs of successive lanes whose ket pairs have the same shell c; lanes that do not count are in none.

    Attributes
    ----------
    left : int32
        Lanes from this one up to the end of its run, itself included.
    firsts : int32
        Bit n: the n-th number over c that the lane takes in turn is that of the first lane of a run.
    """

    left: i32
    firsts: i32


def make_runs_of(nc):
    """Device function: the `Runs` of a warp whose first `count` lanes count, for shells c of `nc` functions.

    `c` are their first AOs. A run is of at most `RUN` lanes, and in lanes n run to (n + 1) run - 1.
    """
    within = RUN - 1

    @jit_device
    def runs_of(c, count, lane):
        lane, before = i32(lane), cuda.shfl_sync(-1, i32(c), i32(max(lane - 1, 0)))
        begins = lane & within == 0 or before != c or lane >= count
        heads = u32(cuda.ballot_sync(-1, begins))
        # where the following run begins, as a bit whose number is that of lanes in between
        following = u32(u32(heads >> u32(lane)) >> u32(1)) | u32(u32(1) << u32(31 - lane))
        left = i32(cuda.popc(u32(u32(following & u32(u32(~following) + u32(1))) - u32(1))) + 1)
        firsts = i32(0)
        for n in range(nc):
            pair = i32((lane + 32 * n) // nc)
            if pair < count and u32(heads >> u32(pair)) & u32(1):
                firsts = i32(firsts | i32(1 << n))
        return Runs(left, firsts)

    return runs_of


def quartet_doubles(nb, nc, nd):
    """Doubles that a thread keeps: D and X of one a and of all b, D and Y of the ket."""
    return 2 * (nb + 1) * (nc + nd) + 2 * nc * nd


def make_digest_quartet(na, nb, nc, nd, precision=FP64):
    """Device function: a thread's quartet into X and Y of one matrix, with others of its warp; returns Y_cd.

    The integrals are at `place`. `d_b` are the density's rows of all b, `d_cd` is D + D^T of c and d; there are none
    without K or J. `runs` are the warp's `Runs`. The row of a matrix's first AO begins at `origin`. All but the
    matrices is of `precision`.
    """
    size, width, nbytes = nb * nc * nd, nc + nd, precision.bytes
    # `Runs.firsts` has 32 bits
    most = RUN if nc <= 32 else 1
    load_row, add_row = make_load_rows(1, nc, nd, precision), make_add_rows(1, nc, nd, most, precision)
    add_rows, warp_sums = make_add_rows(nb, nc, nd, most, precision), make_warp_sums(nb, precision)
    add_to_x, add_to_y = make_add_to_x(nb, nc, nd, precision), make_add_to_y(nb, nc, nd, precision)
    no_rows = make_empty(nb * width, precision)

    @jit_device
    def digest_quartet(
        matrices, origin, a_ao, b_ao, columns, runs, stage, lane, place, weight, d_b, d_cd, y_cd, with_k, with_j
    ):  # fmt: skip
        nao, x_b, mine = matrices.nao, no_rows(), warp_place(lane)
        for a in range(na):
            a_row, here = origin + (a_ao + a) * nao, i32(place + nbytes * size * a)
            if with_k:
                d_a = load_row(matrices.densities, a_row, nao, columns, stage, lane)
                done = add_to_x(x_b, here, d_b, d_a)
                add_row(
                    matrices.x, a_row, nao, columns, runs.left, runs.firsts, stage, lane, done[:width], weight
                )
                x_b = done[width:]
            if with_j:
                sums = add_to_y(y_cd, here, d_cd, matrices.twice, a_row + b_ao, weight)
                y_cd = sums[nb:]
                total = warp_sums(sums[:nb], weight, lane)
                if mine < nb:
                    add_global(matrices.y, a_row + b_ao + mine, total)
        cuda.syncwarp()
        if with_k:
            b_row = origin + b_ao * nao
            add_rows(matrices.x, b_row, nao, columns, runs.left, runs.firsts, stage, lane, x_b, weight)
        return y_cd

    return digest_quartet


def digest_in_place(la, ca, lb, cb, lc, cc, ld, cd, pure, kind, single):
    """Kernel factory for the class (la lb|lc ld) of shells with ca, cb, cc, cd contracted functions.

    `single`: the items are those that count in single precision. Their integrals and digestion are computed in FP32,
    from densities and H of the ket in FP32, and added to X and Y in FP64.
    """
    na, nb, nc, nd = shells = [n * functions(l, pure) for l, n in ((la, ca), (lb, cb), (lc, cc), (ld, cd))]
    count, bra_class, ket_class = na * nb * nc * nd, (la, lb, pure, ca, cb, False), (lc, ld, pure, cc, cd, False)
    threads, precision = block_threads(count, single), precision_of(single)
    real, nbytes = precision.numba, precision.bytes
    integrals = make_integrals(bra_class, ket_class, False, kind, single)
    digest, weight_of = make_digest_quartet(*shells, precision), jit_device(quartet_weight)
    load_rows = make_load_rows(nb, nc, nd, precision)
    columns_in_turn, rows_in_turn, runs_of = make_columns_in_turn(nc, nd), make_rows_in_turn(nc), make_runs_of(nc)
    load_block, add_block = make_load_block(nc, nd, precision), make_add_block(nc, nd, precision)
    no_rows, no_block = make_empty(nb * (nc + nd), precision), make_empty(nc * nd, precision)
    stage_bytes, staged = nbytes * stage_parts(nc, nd)[1], single_h_size(bra_class)
    operator_group, place_of_count = arguments_group(kind, single), int(single)
    slots_group, matrices_group = Slots, Matrices
    if single:
        slots_group, matrices_group = with_floats(Slots, "h"), with_floats(Matrices, "densities", "twice")

    def kernel(
        bra: Records, bra_pairs: PairRange, h: BraH, ket: slots_group, ket_pairs: PairRange, operator: operator_group,
        lists: Lists, matrices: matrices_group, work: Work,
    ):  # fmt: skip
        tid, nao = i64(cuda.threadIdx.x), matrices.nao
        lane, warp = tid & 31, tid >> 5
        # shared memory: room for H, then integrals, stages of the warps
        h_bytes = nbytes * h.group * (staged if single else h.size)
        start = shared_address(cuda.shared.array(0, types.float64)) + h_bytes
        place = i32(start + nbytes * count * tid)
        stage = i32(start + nbytes * count * threads + warp * stage_bytes)
        for item in range(i32(cuda.blockIdx.x), i32(work.counts[place_of_count]), i32(cuda.gridDim.x)):
            ij, first, many = work.items[3 * item], work.items[3 * item + 1], work.items[3 * item + 2]
            for begin in range(i32(0), many, i32(threads)):
                left = i32(many - begin - 32 * warp)  # entries for this warp
                kl = work.entries[first + min(begin + tid, many - 1)]
                integrals(bra, bra_pairs, ij, h, begin == 0, ket, ket_pairs, kl, lane < left, operator)
                if left > 0:
                    a_ao, b_ao = lists.ao_bra[ij, 0], lists.ao_bra[ij, 1]
                    c, d = lists.ao_ket[kl, 0], lists.ao_ket[kl, 1]
                    columns, rows = columns_in_turn(c, d, left, lane), rows_in_turn(d, lane)
                    runs = runs_of(c, left, lane)
                    weight = weight_of(a_ao, b_ao, c, d, lists.triangle, ij, kl)
                    weight = real(weight if lane < left else 0.0)
                    for s in range(matrices.first, matrices.last):
                        origin, with_k, with_j = s * nao * nao, s < work.exchange, s < work.coulomb
                        d_b, d_cd = no_rows(), no_block()
                        if with_k:
                            d_b = load_rows(matrices.densities, origin + b_ao * nao, nao, columns, stage, lane)
                        if with_j:
                            d_cd = load_block(matrices.twice, origin, nao, columns, rows, stage, lane)
                        y_cd = digest(
                            matrices, origin, a_ao, b_ao, columns, runs, stage, lane, place, weight, d_b, d_cd,
                            no_block(), with_k, with_j,
                        )  # fmt: skip
                        if with_j:
                            add_block(matrices.y, origin, nao, columns, rows, stage, lane, y_cd)

    return Kernel(kernel, (threads, blocks_in_place(la + lb + lc + ld, count, single)))


def functions(l, pure):
    """Functions of a shell."""
    return 2 * l + 1 if pure else ncart(l)


# launcher


@cache
def takes(bra, ket):
    """Whether this kernel is for a class that a thread a quartet computes, of two `ListFacts`.

    There must be few enough integrals to digest alone, and shared memory for all besides H of a primitive bra pair:
    contracted kets can have long rows.
    """
    fits = bytes_besides_h(bra, ket) + 8 * form_size(bra, BRA_ELEMENTS) <= TENSOR_LIMITS.shared
    return fits and bra.nab * ket.nab <= MOST_INTEGRALS


def bytes_besides_h(bra, ket, single=False):
    """Shared memory of a block for the integrals and the stages of the warps."""
    count = bra.nab * ket.nab
    threads = block_threads(count, single)
    return precision_of(single).bytes * (threads * count + threads // 32 * stage_parts(ket.na, ket.nb)[1])


def item_entries(bra, ket, quartets):
    """Most entries of an item, where two `ListFacts` have at most so many quartets.

    A few for each thread, so that copying H is little beside them, if there are items enough for the whole device.
    """
    count = bra.nab * ket.nab
    threads = block_threads(count, True)  # in FP64 as many, or half of them
    most = min(LANE_QUARTETS, LANE_INTEGRALS // count)
    return threads * max(1, min(most, quartets // (threads * FEWEST_ITEMS)))


def in_place_launcher(context, kind, parameter, bra, ket, counts, single):
    """The function by which `launch_in_place` launches for two `ListFacts` and the same numbers of matrices."""
    count = bra.nab * ket.nab
    threads, size = block_threads(count, single), form_size(bra, BRA_ELEMENTS)
    others, h_bytes = bytes_besides_h(bra, ket, single), 4 * single_h_size(bra.structure) if single else 8 * size
    group = max(1, min(bra.max_prim, PRIMITIVES, (TENSOR_LIMITS.shared - others) // h_bytes))
    shells, shared = ((p.la, p.nctr_a, p.lb, p.nctr_b) for p in (bra, ket)), group * h_bytes + others
    variant = Variant(digest_in_place, (*chain.from_iterable(shells), bra.pure, kind, single))
    arguments = operator_arguments(context, kind, parameter, single, bra.l + ket.l)

    def launch(context, h, g, ab, cd, places, triangle, matrices, nao, quartets):
        slots = cd.data.slots
        context.launch(
            variant, min(quartets.most_items, MOST_BLOCKS), threads, shared,
            records(ab), pair_range(ab), (h, size, group), (slots.numbers, g, slots.first, slots.count),
            pair_range(cd), arguments, (0, 0, triangle, *places), (*matrices, 0, max(counts), nao),
            (quartets.items[single], quartets.entries, quartets.counts, *counts),
        )  # fmt: skip

    return launch


def launch_in_place(context, operator, h, g, ab, cd, places, triangle, matrices, counts, nao, quartets, single):
    """Quartets of two whole lists into X and Y.

    Parameters
    ----------
    operator : md4.method.operators.Operator
    h, g : Buffer
        H of the lists in the forms `BRA_ELEMENTS` and `KET_ELEMENTS`; in single precision `KET_SINGLES`.
    quartets : md4.gpu.kernels.select_quartets.Selected
    single : bool
        Those that count in single precision, or in double precision.
    ab, cd, places, triangle, matrices, counts, nao
        As for `md4.gpu.kernels.digestion.launch_digest`.
    """
    facts = ab.facts, cd.facts, counts, single
    launch = context.fixed(in_place_launcher, operator.kind, operator.parameter, *facts)
    launch(context, h, g, ab, cd, places, triangle, matrices, nao, quartets)
