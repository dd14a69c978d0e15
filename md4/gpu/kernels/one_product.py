"""Both transforms in one product, for ket pairs of two s shells.

With N_q = 1, (ab|q] = sum_p H[ab, p] r[p] is all that there is to do: the sum over ket primitives, weighted by
H[cd, 0], is done on r beforehand, and what remains is

    (ab|cd) = sum_p H[ab, p] s[kl, cd][p],     s[kl, cd][t] = sum_k H[cd, 0]_k r_k[t]

a plain product with the (kl, cd) of all ket pairs side by side as columns. Ket pairs of one primitive each and one
function pair need no sum: r itself is the right operand, and the columns are weighted when they are done.
"""

from typing import NamedTuple

import numpy as np

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, cuda, f64, i32, i64, jit_device
from md4.gpu.emit.instructions import address_of, make_copy_rows, make_empty, shared_address
from md4.gpu.emit.stores import make_scale_columns, make_store_columns
from md4.gpu.emit.tile_products import make_load_blocks, make_product_step
from md4.gpu.h_layout import BRA_FLAT, even, form_rows
from md4.gpu.kernels.groups import (
    Grid,
    HermiteIntegrals,
    Limits,
    PairRange,
    Panel,
    Result,
    Staircase,
    any_survives,
    block_place,
    pair_range,
    primitives_of,
    result,
)
from md4.gpu.kernels.ring import Course, make_copy_panel, make_ring
from md4.gpu.kernels.two_products import row_blocks_of, staircase_of
from md4.gpu.r_layout import r_stride
from md4.gpu.tiles import blocks_of_8, choose_tile


class Weights(NamedTuple):
    """Weights of columns: column c has numbers[first + c step]."""

    numbers: F64
    first: i64
    step: i64


class Columns(NamedTuple):
    """What the ring works on.

    Attributes
    ----------
    h, s : float64 array
        H of the list, and r or its sums.
    step : int64
        Bytes from one column that this thread copies to the next.
    copies, inner : int64
        Columns that this thread copies, and its first inner index.
    nherm : int64
        Numbers of a column that count; those behind are filled up with zeros.
    own : int64
        Address of the lane's place in H, in the ring's first buffer.
    tid : int64
    """

    h: F64
    s: F64
    step: i64
    copies: i64
    inner: i64
    nherm: i64
    own: i64
    tid: i64


def product_ring(rows8, nt, warps, stages, unit):
    """Device function: the ring, both operands of which come from memory, a column of r after the other."""
    threads, columns_offset = 32 * warps, rows8 * 512
    copy_panel, copy_rows = make_copy_panel(rows8, threads), make_copy_rows(nt, 16 * threads)
    load, step = make_load_blocks(nt), make_product_step(rows8, nt, unit == "dmma16", False)

    def fill(address, h, place, k, side):
        copy_panel(address, side.h, h, side.tid)
        filled = i32(8 * min(max(side.nherm - 8 * k - side.inner, i64(0)), i64(2)))
        here = i32(address + columns_offset + 16 * side.tid)
        copy_rows(here, address_of(side.s, place), side.step, side.copies, filled)

    def multiply(tile, offset, n, count, side):
        here = side.own + offset
        b = load(i32(here + columns_offset + (side.tid >> 5) * (nt * 512)))
        return step(tile, i32(here), b, i32(rows8))

    return make_ring(stages, (rows8 + nt * warps) * 512, fill, multiply)


def one_product(rows8, nt, warps, stages, unit):
    """Kernel factory; the ket's (kl, cd) are columns, of which there are `r.nket`."""
    columns, product = 8 * nt * warps, product_ring(rows8, nt, warps, stages, unit)
    empty, scale, store = make_empty(2 * rows8 * nt), make_scale_columns(rows8, nt), make_store_columns(rows8, nt)
    place, primitives, any_of = jit_device(block_place), jit_device(primitives_of), jit_device(any_survives)

    def kernel(
        panel: Panel, bra: PairRange, staircase: Staircase, r: HermiteIntegrals, weights: Weights, nherm: i64, nab: i64,
        ncd: i64, first_ket: i64, limits: Limits, out: Result, grid: Grid,
    ):  # fmt: skip
        ring = shared_address(cuda.shared.array(0, f64))
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        row_block, column_block, pair = place(grid)
        row, first_column, step = row_block * rows8, column_block * columns, panel.rows8 * 64
        if limits.counts.size > 0:
            begin = first_ket + first_column // ncd
            end = first_ket + (min(first_column + columns, r.nket) - 1) // ncd
            if not any_of(limits.counts, not limits.by_ket, bra.first + pair, begin, end):
                return
        first, last = primitives(bra, pair)
        # a thread copies two inner indices of every (8 warps)th column
        inner, own = 2 * (tid & 3), first_column + (tid >> 2)
        copies = (r.nket - own + 8 * warps - 1) // (8 * warps)
        course = Course(
            last - first, panel.steps, staircase.reach, row,
            first * panel.steps * step + row * 64, step, i64(0),
            ((first - bra.first_prim) * r.nket + own) * r.stride + inner, i64(8), r.nket * r.stride - 8 * panel.steps,
        )  # fmt: skip
        side = Columns(panel.h, r.numbers, 64 * warps * r.stride, copies, inner, nherm, ring + 16 * lane, tid)
        tile = product(empty(), ring, course, side)
        ab, column = 8 * row + (lane >> 2), first_column + 8 * nt * warp + 2 * (lane & 3)
        tile = scale(tile, weights.numbers, weights.first + column * weights.step, weights.step, r.nket - column)
        store(
            tile, out.numbers, out.first + pair * out.s_ij + ab * out.s_ab, column, r.nket, ncd, out.s_kl, out.s_cd,
            out.s_ab, nab - ab,
        )  # fmt: skip

    return Kernel(kernel, (32 * warps, max(1, 8 // warps)))


# launcher


def one_product_launcher(context, bra, ket):
    """The function by which (ab|cd) of a chunk is made for two `ListFacts`; of r, or of its sums if `g` is None."""
    nab, ncd, np8, stride = bra.nab, ket.nab, blocks_of_8(bra.nherm), r_stride(bra.l + ket.l)
    tile = choose_tile(nab, np8, context.unit)
    variant, row_blocks = Variant(one_product, tile[:5]), row_blocks_of(tile, nab)
    columns, threads = tile.columns, tile.threads
    rows8, shared = form_rows(nab, BRA_FLAT), tile.stages * 512 * (tile.rows8 + columns)
    staircase = staircase_of(context, bra, tile.rows8, row_blocks, flat=True)
    summed, first = (context.table(np.ones, 1), 0, 0), even(bra.first)  # columns of weight 1
    count = bra.nherm + bra.first - first

    def launch(context, h, r, g, ab, cd, block):
        ncol = cd.npair * ncd
        column_blocks = -(-blocks_of_8(ncol) // columns)
        context.launch(
            variant, row_blocks * column_blocks * ab.npair, threads, shared,
            (h, rows8, np8), pair_range(ab), staircase, (r.part(first, (r.size - first,)), stride, ncol),
            summed if g is None else (g, cd.first_prim, 1), count, nab, ncd, cd.first, block.limits, result(block),
            (row_blocks, column_blocks),
        )  # fmt: skip

    return launch
