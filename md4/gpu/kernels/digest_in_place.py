"""Steps 2 to 5 for the smallest classes, and the digestion of their integrals into J and K where they are made.

A thread computes a quartet as in `md4.gpu.kernels.thread_quartet` and digests it as in
`md4.gpu.kernels.digest_quartets`: the integrals are in shared memory between the two, and never anywhere else. A block
of threads takes a few bra pairs one after the other, each thread with one ket pair. Its Y_cd of the first matrix waits
in shared memory until the last of these bra pairs.
"""

from functools import cache
from itertools import chain
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import cuda, i32, i64, jit_device, types
from md4.gpu.emit.digest_quartets import (
    make_add_block,
    make_columns_in_turn,
    make_load_block,
    make_load_rows,
    stage_parts,
)
from md4.gpu.emit.instructions import make_empty, precision_of, shared_address
from md4.gpu.emit.vectors import make_read_vector, make_write_vector
from md4.gpu.h_layout import BRA_ELEMENTS, form_size
from md4.gpu.kernels.digest_parameters import Lists, Matrices
from md4.gpu.kernels.digest_quartets import make_digest_quartet
from md4.gpu.kernels.groups import PairRange, Records, pair_range, records
from md4.gpu.kernels.primitive_quartets import arguments_group, operator_arguments
from md4.gpu.kernels.thread_quartet import BraH, Slots, make_integrals, single_h_size
from md4.gpu.tuning import DIGEST_QUARTETS, THREAD_QUARTET
from md4.method.angular import ncart
from md4.method.digestion import quartet_weight


class Work(NamedTuple):
    """What a launch works on, and how its blocks of threads share it.

    Attributes
    ----------
    nbra, nket : int64
        Bra pairs and ket pairs of the slices.
    parts : int64
        Blocks that take the same bra pairs, each with other ket pairs.
    bra_pairs : int64
        Bra pairs that a block takes one after the other.
    exchange, coulomb : int64
        Numbers of matrices X and Y.
    """

    nbra: i64
    nket: i64
    parts: i64
    bra_pairs: i64
    exchange: i64
    coulomb: i64


def digest_in_place(la, ca, lb, cb, lc, cc, ld, cd, pure, kind, single=False):
    """Kernel factory for the class (la lb|lc ld) of shells with ca, cb, cc, cd contracted functions.

    `single`: integrals and their digestion are computed in FP32, and added to X and Y in FP64.
    """
    na, nb, nc, nd = shells = [n * functions(l, pure) for l, n in ((la, ca), (lb, cb), (lc, cc), (ld, cd))]
    count, ncd = na * nb * nc * nd, nc * nd
    threads, precision = THREAD_QUARTET.block_threads(count, single), precision_of(single)
    real, nbytes, bra_class = precision.numba, precision.bytes, (la, lb, pure, ca, cb, False)
    integrals = make_integrals(bra_class, (lc, ld, pure, cc, cd, False), False, kind, single)
    digest, weight_of = make_digest_quartet(*shells, precision), jit_device(quartet_weight)
    load_rows, columns_in_turn = make_load_rows(nb, nc, nd, precision), make_columns_in_turn(nc, nd)
    load_block, add_block = make_load_block(nc, nd, precision), make_add_block(nc, nd, precision)
    load_y, store_y = (make(ncd, nbytes * threads, precision) for make in (make_read_vector, make_write_vector))
    no_rows, no_block = make_empty(nb * (nc + nd), precision), make_empty(ncd, precision)
    stage_bytes, staged = nbytes * stage_parts(nc, nd)[1], single_h_size(bra_class)
    operator_group = arguments_group(kind, single)

    def kernel(
        bra: Records, bra_pairs: PairRange, h: BraH, ket: Slots, ket_pairs: PairRange, operator: operator_group,
        lists: Lists, matrices: Matrices, work: Work,
    ):  # fmt: skip
        tid, nao = i64(cuda.threadIdx.x), matrices.nao
        lane, warp = tid & 31, tid >> 5
        group, part = i64(cuda.blockIdx.x) // work.parts, i64(cuda.blockIdx.x) % work.parts
        # shared memory: room for H, then integrals, stages of the warps, Y_cd
        start = shared_address(cuda.shared.array(0, types.float64))
        h_bytes = nbytes * h.group * (staged if single else h.size)
        place = i32(start + h_bytes + nbytes * count * tid)
        stages = start + h_bytes + nbytes * count * threads
        stage, own_y = i32(stages + warp * stage_bytes), i32(stages + threads // 32 * stage_bytes + nbytes * tid)
        # the warp's ket pairs: none, if it is behind the last one
        first = part * threads + 32 * warp
        many = min(i64(32), work.nket - first)
        kl = lists.first_ket + min(first + lane, work.nket - 1)
        c, d = lists.ao_ket[kl, 0], lists.ao_ket[kl, 1]
        columns = columns_in_turn(lists.ao_ket, lists.first_ket + min(first, work.nket - 1), many, lane)
        store_y(own_y, no_block())
        for pair in range(group * work.bra_pairs, min((group + 1) * work.bra_pairs, work.nbra)):
            integrals(bra, bra_pairs, pair, h, ket, ket_pairs, part, work.nket, operator)
            ij = lists.first_bra + pair
            a_ao, b_ao = lists.ao_bra[ij, 0], lists.ao_bra[ij, 1]
            weight = weight_of(a_ao, b_ao, c, d, lists.triangle, ij, kl)
            weight = real(weight if lane < many else 0.0)
            for s in range(matrices.first, matrices.last):
                origin, with_k, with_j = s * nao * nao, s < work.exchange, s < work.coulomb
                d_b, d_cd, y_cd = no_rows(), no_block(), no_block()
                if with_k:
                    d_b = load_rows(matrices.densities, origin + b_ao * nao, nao, columns, stage, lane)
                if with_j:
                    d_cd = load_block(matrices.twice, origin + c * nao + d, nao)
                    if s == 0:
                        y_cd = load_y(own_y)
                y_cd = digest(
                    matrices, origin, a_ao, b_ao, columns, stage, lane, place, weight, d_b, d_cd, y_cd, with_k, with_j
                )  # fmt: skip
                if with_j and s == 0:
                    store_y(own_y, y_cd)
                elif with_j and lane < many:
                    add_block(matrices.y, origin + c * nao + d, nao, y_cd)
        if work.coulomb > 0 and lane < many:
            add_block(matrices.y, c * nao + d, nao, load_y(own_y))

    import os
    SINGLE_BLOCKS = int(os.environ.get('SB', '1'))
    return Kernel(kernel, (threads, SINGLE_BLOCKS if single else 1))


def functions(l, pure):
    """Functions of a shell."""
    return 2 * l + 1 if pure else ncart(l)


# launcher


@cache
def takes(bra, ket):
    """Whether this kernel is for a class that a thread a quartet computes, of two `ListFacts`.

    There must be few enough integrals to digest alone, and shared memory for all besides H of a primitive bra pair:
    contracted kets can have many Y_cd and long rows.
    """
    fits = bytes_besides_h(bra, ket) + 8 * form_size(bra, BRA_ELEMENTS) <= THREAD_QUARTET.tensor.shared
    return fits and bra.nab * ket.nab <= DIGEST_QUARTETS.in_place


def bytes_besides_h(bra, ket):
    """Shared memory of a block for the integrals, the stages of the warps and Y_cd."""
    count = bra.nab * ket.nab
    threads = THREAD_QUARTET.block_threads(count)
    return 8 * (threads * (count + ket.nab) + threads // 32 * stage_parts(ket.na, ket.nb)[1])


def in_place_variant(bra, ket, kind):
    """Variant for a class."""
    shells = ((p.la, p.nctr_a, p.lb, p.nctr_b) for p in (bra, ket))
    return Variant(digest_in_place, (*chain.from_iterable(shells), bra.pure, kind))


def in_place_launcher(context, kind, parameter, bra, ket, counts):
    """The function by which `launch_in_place` launches for two `ListFacts` and the same numbers of matrices."""
    count = bra.nab * ket.nab
    threads, size = THREAD_QUARTET.block_threads(count), form_size(bra, BRA_ELEMENTS)
    others = bytes_besides_h(bra, ket)
    room = THREAD_QUARTET.tensor.shared - others
    group = max(1, min(bra.max_prim, THREAD_QUARTET.primitives, room // (8 * size)))
    variant, arguments = in_place_variant(bra, ket, kind), operator_arguments(context, kind, parameter)
    most, shared = max(1, DIGEST_QUARTETS.lane_integrals // count), 8 * group * size + others

    def launch(context, h, g, ab, cd, places, triangle, matrices, nao):
        nbra, nket, slots = ab.npair, cd.npair, cd.data.slots
        parts = -(-nket // threads)
        bra_pairs = max(1, min(most, parts * nbra // DIGEST_QUARTETS.blocks))
        context.launch(
            variant, parts * -(-nbra // bra_pairs), threads, shared,
            records(ab), pair_range(ab), (h, size, group), (slots.numbers, g, slots.first, slots.count),
            pair_range(cd), arguments, (ab.first, cd.first, triangle, *places), (*matrices, 0, max(counts), nao),
            (nbra, nket, parts, bra_pairs, *counts),
        )  # fmt: skip

    return launch


def launch_in_place(context, operator, h, g, ab, cd, places, triangle, matrices, counts, nao):
    """The quartets of two slices into X and Y; `h` and `g` are H of their lists, the rest as for `launch_digest`."""
    launch = context.fixed(in_place_launcher, operator.kind, operator.parameter, ab.facts, cd.facts, counts)
    launch(context, h, g, ab, cd, places, triangle, matrices, nao)
