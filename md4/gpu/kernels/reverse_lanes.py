"""Steps 1 and 2 of gradients for the smallest classes: a lane a primitive quartet.

A block of threads takes a primitive bra pair, and goes through the primitive ket pairs that count with it
(`md4.gpu.kernels.select_kets`). Each lane makes r of a quartet, which goes to shared memory, with the numbers of the
ket and of the shell quartet behind it. Then U[cd, p] = sum_q H[cd, q] [p|q] and Z[ab, p] += sum_cd Gamma[ab, cd]
U[cd, p] are code without loops and without the zeros of H (`md4.gpu.emit.reverse`), with Gamma from memory
(`md4.gpu.kernels.gamma_blocks`). It is the same code for each pair of contracted functions of the ket, as their H have
the same zeros; the first numbers of what comes next are on their way meanwhile. Z stays in registers; the sums over the
lanes are added to it in memory at the end. Where Z of a class has too many numbers for a warp, several warps divide the
p among them; each makes r of 32 quartets for all.

H of the kets has the sign (-1)^|q|, and R = P - Q. So U lacks no sign here, and gets the one that Z has in the other
kernels, (-1)^|p|, when it is added to memory. All numbers of a ket follow each other: lanes have any kets, and should
read few sectors of memory.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, cuda, i32, i64, jit_device, types, u32, u64
from md4.gpu.emit.instructions import address_of, make_empty, prefetch, shared_address
from md4.gpu.emit.reverse import (
    ahead_of,
    make_add_sums,
    make_first_numbers,
    make_load_offsets,
    make_reverse_products,
)
from md4.gpu.emit.scalars import load_shared_int, quotient, store_shared_int
from md4.gpu.emit.unrolled import make_r_by_axis
from md4.gpu.kernels.gamma_blocks import TILE, tile_place
from md4.gpu.kernels.groups import Records
from md4.gpu.kernels.primitive_quartets import (
    Charge,
    OperatorArguments,
    charge,
    make_zeros_upto,
    operator_arguments,
    separate,
)
from md4.gpu.kernels.reverse_fused import KetPrimitives, quartets_of
from md4.gpu.kernels.reverse_sums import ReverseSums
from md4.gpu.staircases import hermite_order
from md4.gpu.tiles import blocks_of_8
from md4.gpu.tuning import REVERSE
from md4.method.angular import component_coefficients, hermite_ordinal, hermite_triples, nherm
from md4.method.hermite import nonzero_elements
from md4.method.mirror import class_elements


class Kets(NamedTuple):
    """The primitive pairs of the ket's list.

    Attributes
    ----------
    records : Records
    h : float64 array
        H in the form `KET_ROWS`, that of each pair one after the other.
    nctr_c, nctr_d : int64
        Contracted functions of both shells.
    """

    records: Records
    h: F64
    nctr_c: i64
    nctr_d: i64


class Columns(NamedTuple):
    """The Hermite functions p of derivatives, in the order of Z.

    Attributes
    ----------
    offsets : int32 array
        Bytes from r to r[p + q], [p][q].
    signs : float64 array
        (-1)^|p|.
    functions : int64
        Numbers of `offsets` of each p.
    count, blocks : int64
        Number of p, and of blocks of 8.
    """

    offsets: I32
    signs: F64
    functions: i64
    count: i64
    blocks: i64


def column_offsets(l, first, l_ket, chunk):
    """`Columns.offsets` of derivatives of degree l; functions are repeated so that whole chunks may be read."""
    p, q = hermite_triples(l)[columns_of(l, first)], hermite_triples(l_ket)
    offsets = 8 * hermite_ordinal(*np.moveaxis(p[:, None] + q, -1, 0))
    return np.concatenate([offsets, np.repeat(offsets[-1:], chunk, axis=0)]).astype(np.int32).reshape(-1)


def column_signs(l, first):
    """`Columns.signs`."""
    return (1 - 2 * (hermite_triples(l)[columns_of(l, first)].sum(axis=1) % 2)).astype(float)


def columns_of(l, first):
    """Ordinals of the Hermite functions from `first` on in the order of Z."""
    order = hermite_order(l, first)
    return order[order >= 0]


def lane_set_bytes(row):
    """Bytes of shared memory of 32 quartets: `row` doubles for r of each, and two numbers."""
    return 256 * (row + 1)


def bring_tiles(gamma, size, shells, lane):
    """Gamma of a warp's shell quartets, which follow each other, is to come to the L2 cache (device function)."""
    first, last = i64(cuda.shfl_sync(-1, shells, 0) >> 5), i64(cuda.shfl_sync(-1, shells, 31) >> 5) + 1
    address, end = address_of(gamma, first * (TILE * size)), address_of(gamma, last * (TILE * size))
    address += 128 * lane
    while address < end:
        prefetch(address)
        address += 128 * 32


def reverse_lanes(nab, chunk, warps, lc, ld, pure, single, l, lowest, kind):
    """Kernel factory: `nab` functions of the bra, the ket's shells, and for each warp `chunk` of the p up to degree l.

    The p begin with the ordinal `lowest`. How many contracted functions the ket's shells have is a run-time number.
    """
    l_ket = lc + ld
    # in the order of `KET_ROWS`, of a number that is even for each pair of contracted functions
    elements = tuple(map(tuple, nonzero_elements(lc, ld, pure, single=single).tolist()))
    size, nc, nd = -(-len(elements) // 2) * 2, *(component_coefficients(l, pure).shape[1] for l in (lc, ld))
    functions, row = nherm(l_ket), nherm(l + l_ket) | 1
    known = tuple(column_offsets(l, lowest, l_ket, 0).tolist()) if chunk == nherm(l) - lowest else None
    products, first_numbers = (
        make_reverse_products(elements, nd, functions, nab, chunk, known), make_first_numbers(elements, nab, chunk)
    )  # fmt: skip
    load_offsets, ahead = make_load_offsets(chunk * functions, known is not None), ahead_of(elements, nab)
    add_sums, empty = make_add_sums(nab, chunk, ahead), make_empty(nab * chunk + ahead)
    zeros_upto, make_r = make_zeros_upto(kind, l + l_ket), make_r_by_axis(l + l_ket, False)
    charge_at, separation_of, set_bytes = jit_device(charge), jit_device(separate), lane_set_bytes(row)
    quartets = jit_device(quartets_of)
    in_tile, bring = jit_device(tile_place), jit_device(bring_tiles)

    def kernel(
        records: Records, first_prim: i64, kets: KetPrimitives, of_kets: Kets, gamma: F64, dead: i64,
        operator: OperatorArguments, columns: Columns, z: ReverseSums, parts: i64, each: i64,
    ):  # fmt: skip
        shared = cuda.shared.array(0, types.float64)
        tid, block = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        lane, first, own = tid & 31, (tid >> 5) * chunk, quotient(block, parts)
        part, prim = block - own * parts, first_prim + own
        n, behind = quartets(kets, own, part, each)
        if n >= behind:
            return
        place, address = charge_at(records.numbers, prim * records.width), i32(shared_address(shared) + 8 * row * lane)
        own_r = i32(address + (tid >> 5) * set_bytes)
        sums, pairs, width = empty(), of_kets.records.numbers, u64(of_kets.records.width)
        offsets = load_offsets(columns.offsets, first * columns.functions)
        nctr_c, nctr_d = i32(of_kets.nctr_c), i32(of_kets.nctr_d)
        h_size, gamma_step = i64(nctr_c * nctr_d) * size, i64(nctr_d) * (256 * nab * nd)
        of_quartet = nctr_c * i64(nctr_d) * (nab * nc * nd)
        # of each quartet the ket and the shell quartet stand behind r
        numbers_at = i32(shared_address(shared) + 256 * row + 8 * lane)
        own_numbers, number = i32(numbers_at + (tid >> 5) * set_bytes), u64(min(n + tid, behind - 1))
        ket, shells = u64(u32(kets.numbers[number])), i64(kets.shells[number])
        while n < behind:
            # each warp makes r of 32 quartets; where several wait for one Gamma, it is on its way meanwhile
            if warps > 1:
                bring(gamma, of_quartet, i32(shells), lane)
            at, shells = ket * width, shells if n + tid < behind else dead
            h, of_cd = address_of(of_kets.h, i64(ket) * h_size), address_of(gamma, in_tile(shells, of_quartet))
            if warps == 1:
                sums = first_numbers(sums, h, of_cd)
            s = separation_of(place, Charge(pairs[at], pairs[at + u64(1)], pairs[at + u64(2)], pairs[at + u64(3)]))
            make_r(zeros_upto(s, operator), s.rz, s.ry, s.rx, own_r)
            if warps > 1:
                store_shared_int(own_numbers, i32(ket))
                store_shared_int(i32(own_numbers + 4), i32(shells))
            # those of the next turn are on their way during the products
            number = u64(min(n + tid + 32 * warps, behind - 1))
            ket, shells = u64(u32(kets.numbers[number])), i64(kets.shells[number])
            r, behind_r, end = address, numbers_at, min(behind, n + 32 * warps)
            if warps > 1:
                cuda.syncthreads()
                h = address_of(of_kets.h, i64(u32(load_shared_int(behind_r))) * h_size)
                of_cd = address_of(gamma, in_tile(i64(load_shared_int(i32(behind_r + 4))), of_quartet))
                sums = first_numbers(sums, h, of_cd)
            # one loop over quartets and their pairs of contracted functions: more would be spilled around an inner one
            c_left, d_left = nctr_c, nctr_d
            while n < end:
                r_here, more, d_left = r, i32(1), i32(d_left - 1)
                next_h, next_cd = h + 8 * size, of_cd + 256 * nab * nd
                if d_left == 0:
                    next_cd, c_left, d_left = next_cd + (nc - 1) * gamma_step, i32(c_left - 1), nctr_d
                    if c_left == 0:
                        n, r, behind_r, c_left = n + 32, i32(r + set_bytes), i32(behind_r + set_bytes), nctr_c
                        if warps > 1 and n < end:
                            next_h = address_of(of_kets.h, i64(u32(load_shared_int(behind_r))) * h_size)
                            next_cd = address_of(gamma, in_tile(i64(load_shared_int(i32(behind_r + 4))), of_quartet))
                        else:
                            more = i32(0)
                sums = products(sums, h, of_cd, gamma_step, more, next_h, next_cd, r_here, offsets)
                h, of_cd = next_h, next_cd
            if warps > 1:
                cuda.syncthreads()
        target = (part * z.nprim + prim - z.first_prim) * columns.blocks * z.rows * 8
        add_sums(sums, z.numbers, target, z.rows, first, columns.count, columns.signs, lane)

    return Kernel(kernel, (32 * warps, max(1, REVERSE.lane_blocks(set_bytes, nab * chunk) // warps)))


# launcher


class LanePlan(NamedTuple):
    """Functions p that a warp takes, and how many warps of a block share those of a primitive bra pair."""

    chunk: int
    warps: int


@cache
def lane_plan(bra, ket, hermite):
    """`LanePlan` for `ListFacts` of the bra, the ket, and the Hermite functions of the bra; None for larger classes."""
    if hermite.l + ket.l > REVERSE.lane_l:
        return None
    # in the code, for a pair of contracted functions
    of_one = (len(class_elements(ket.h_class)) + bra.nab * ket.nab) // (ket.nctr_a * ket.nctr_b)
    most = min(hermite.nherm, REVERSE.lane_doubles // bra.nab, REVERSE.lane_products // of_one)
    warps = -(-hermite.nherm // most) if most else REVERSE.lane_warps + 1
    return LanePlan(-(-hermite.nherm // warps), warps) if warps <= REVERSE.lane_warps else None


def launch_reverse_lanes(context, operator, plan, ab, cd, h, gamma, shells, hermite, kets, z, parts, each):
    """Adds what the listed primitive quartets give the bra pairs `ab` to Z.

    Parameters
    ----------
    operator : md4.method.operators.Operator
    plan : LanePlan
    ab, cd : md4.engine.PreparedPairs
        A slice of the bra list, and the ket list.
    h : Buffer
        H of the ket list in the form `md4.gpu.h_layout.KET_ROWS`.
    gamma : Buffer
        Of the shell quartets, side by side in tiles.
    shells : int
        How many shell quartets there are.
    hermite : ListFacts
        The Hermite functions of the bra.
    kets, z : tuple
        Fields of `md4.gpu.kernels.reverse_fused.KetPrimitives` and `ReverseSums`.
    parts, each : int
        As for `md4.gpu.kernels.reverse_fused.launch_reverse_fused`.
    """
    bra, ket, l = ab.facts, cd.facts, hermite.l
    of_ket = ket.la, ket.lb, ket.pure, ket.structure[-1]
    variant = Variant(reverse_lanes, (bra.nab, *plan, *of_ket, l, hermite.first, operator.kind))
    offsets = context.table(column_offsets, l, hermite.first, ket.l, plan.chunk)
    signs = context.table(column_signs, l, hermite.first)
    context.launch(
        variant, parts * ab.nprim, 32 * plan.warps, plan.warps * lane_set_bytes(nherm(l + ket.l) | 1),
        (ab.data.records, ab.data.width), ab.first_prim, kets,
        ((cd.data.records, cd.data.width), h, ket.nctr_a, ket.nctr_b), gamma, shells,
        operator_arguments(context, operator.kind, operator.parameter),
        (offsets, signs, nherm(ket.l), hermite.nherm, blocks_of_8(hermite.nherm)), z, parts, each,
    )  # fmt: skip
