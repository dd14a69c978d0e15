"""Both transforms in one product, for ket pairs of two s shells.

With N_q = 1, (ab|q] = sum_p H[ab, p] r[p] is all that there is to do: the sum over ket primitives, weighted by
H[cd, 0], is done on r beforehand, and what remains is

    (ab|cd) = sum_p H[ab, p] s[kl, cd][p],     s[kl, cd][t] = sum_k H[cd, 0]_k r_k[t]

a plain product with the (kl, cd) of all ket pairs side by side as columns. Ket pairs of one primitive each and one
function pair need no sum: r itself is the right operand, and the columns are weighted when they are done.
"""

import numpy as np

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I64, cuda, types
from md4.gpu.emit.instructions import (
    address_of,
    commit_copies,
    make_copy_rows,
    make_empty,
    make_wait_copies,
    shared_address,
)
from md4.gpu.emit.stores import make_scale_columns, make_store_columns
from md4.gpu.emit.tile_products import make_load_blocks, make_product_step
from md4.gpu.kernels.two_products import grid, make_copy_panel
from md4.gpu.tuning import SUM_WARPS, blocks_of_8, choose_tile, panel_rows, r_stride

i64 = types.int64


def single_product(mt, nt, warps, stages, unit):
    """Kernel factory; both operands come through a ring, rows of r filled up with zeros to blocks of 8."""
    threads, columns = 32 * warps, nt * warps
    b_offset, stage_bytes = mt * 1024, mt * 1024 + nt * warps * 512
    zeros, mma, scale = make_empty(4 * mt * nt), make_product_step(2 * mt, nt, unit == "dmma16", False), make_scale_columns(2 * mt, nt)
    copy_panel, copy_rows = make_copy_panel(2 * mt, threads), make_copy_rows(nt, 16 * threads)
    load, wait, store = make_load_blocks(nt), make_wait_copies(stages - 2), make_store_columns(2 * mt, nt)

    def kernel(
        h, first_prim, start, first_pair, h_rows, r, r_stride, ncol, weights, first_weight, weight_step, nherm, np8,
        nab, ncd, out, out_first, s_ij, s_kl, s_ab, s_cd, row_blocks, column_blocks,
    ):  # fmt: skip
        ring = shared_address(cuda.shared.array(0, types.float64))
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        row_block, rest = i64(cuda.blockIdx.x) % row_blocks, i64(cuda.blockIdx.x) // row_blocks
        first_column, pair = rest % column_blocks * (8 * columns), rest // column_blocks
        first, last = start[first_pair + pair], start[first_pair + pair + 1]
        panel = h_rows * 64
        source, steps = first * np8 * panel + row_block * (mt * 128), (last - first) * np8
        b_ring, inner, b_step = ring + b_offset + 16 * tid, 2 * (tid & 3), 8 * warps * r_stride
        b_column = first_column + (tid >> 2)
        b_source = ((first - first_prim) * ncol + b_column) * r_stride + inner
        b_live = (ncol - b_column + 8 * warps - 1) // (8 * warps)

        acc, k = zeros(), i64(0)
        slot, step = 0, i64(1 - stages)
        while step < steps:
            if step >= 0:
                wait()
                cuda.syncthreads()
            if step + stages - 1 < steps:
                filled = slot + stages - 1 if slot == 0 else slot - 1
                copy_panel(ring + filled * stage_bytes, h, source, tid)
                size = types.int32(8 * min(max(nherm - 8 * k - inner, i64(0)), i64(2)))
                copy_rows(types.int32(b_ring + filled * stage_bytes), address_of(r, b_source + 8 * k), 8 * b_step, b_live, size)
                source += panel
                k += 1
                if k == np8:
                    k = i64(0)
                    b_source += ncol * r_stride
            commit_copies()
            if step >= 0:
                here = ring + slot * stage_bytes + 16 * lane
                b = load(types.int32(here + b_offset + warp * (nt * 512)))
                acc = mma(acc, types.int32(here), b, types.int32(2 * mt))
            slot = slot + 1 if slot + 1 < stages else 0
            step += 1

        ab, column = row_block * (mt * 16) + (lane >> 2), first_column + warp * (nt * 8) + 2 * (lane & 3)
        acc = scale(acc, weights, first_weight + column * weight_step, weight_step, ncol - column)
        store(acc, out, out_first + pair * s_ij + ab * s_ab, column, ncol, ncd, s_kl, s_cd, s_ab, nab - ab)

    signature = (F64, i64, I64, i64, i64, F64, i64, i64, F64, *[i64] * 6, F64, *[i64] * 7)
    return Kernel(kernel, (threads, max(1, 8 // warps)), signature)


def ket_sums():
    """Kernel factory: s[bra primitive][kl, cd][t], a warp for each bra primitive and ket pair."""

    def kernel(r, r_stride, nket, weights, start, first_pair, first_prim, ncd, npair, total, out):
        lane, warp = i64(cuda.threadIdx.x) & 31, i64(cuda.threadIdx.x) >> 5
        n = i64(cuda.blockIdx.x) * SUM_WARPS + warp
        if n >= total:
            return
        pair = first_pair + n % npair
        first, last = start[pair], start[pair + 1]
        source = (n // npair * nket + first - first_prim) * r_stride
        for cd in range(ncd):
            t = lane
            while t < r_stride:
                value, place = 0.0, source + t
                for k in range(first, last):
                    value += weights[k * ncd + cd] * r[place]
                    place += r_stride
                out[(n * ncd + cd) * r_stride + t] = value
                t += 32

    signature = (F64, i64, i64, F64, I64, *[i64] * 5, F64)
    return Kernel(kernel, (32 * SUM_WARPS, 1), signature)


# launchers


def unit_weight():
    """The weight of columns that are summed up already."""
    return np.ones(1)


def needs_sums(ket):
    """Whether columns of a ket list are sums of several r, or of none."""
    return ket.nab > 1 or ket.max_prim > 1 or ket.nprim < len(ket)


def sums_size(bra, ket):
    """Doubles of s of a chunk."""
    return bra.nprim * len(ket) * ket.nab * r_stride(bra.l + ket.l)


def sums_variant():
    """The one variant of the sums."""
    return Variant(ket_sums, ())


def launch_ket_sums(context, g, r, ab, cd, out):
    """s of a chunk from its r; `g` weights of the whole ket list."""
    bra, ket = ab.pairs, cd.pairs
    total = bra.nprim * len(ket)
    if total:
        context.launch(
            sums_variant(), -(-total // SUM_WARPS), 32 * SUM_WARPS, 0,
            r, r_stride(bra.l + ket.l), ket.nprim, g, cd.data.start, cd.first, cd.first_prim, ket.nab, len(ket), total,
            out,
        )  # fmt: skip


def one_product_variant(unit, bra):
    """Variant for a class."""
    tile = choose_tile(bra.nab, blocks_of_8(bra.nherm), unit)
    return Variant(single_product, (tile.mt, tile.nt, tile.warps, tile.stages, unit))


def launch_one_product(context, h, r, g, ab, cd, block):
    """(ab|cd) of a chunk into `block`; `r` of the chunk, or its sums if `g` is None."""
    bra, ket = ab.pairs, cd.pairs
    np8, ncol = blocks_of_8(bra.nherm), len(ket) * ket.nab
    tile = choose_tile(bra.nab, np8, context.unit)
    row_blocks, column_blocks = grid(tile, bra.nab, blocks_of_8(ncol))
    weights = (context.table(unit_weight), 0, 0) if g is None else (g, cd.first_prim, 1)
    context.launch(
        one_product_variant(context.unit, bra), row_blocks * column_blocks * len(bra), tile.threads,
        tile.stages * (tile.mt * 1024 + tile.columns * 512),
        h, ab.first_prim, ab.data.start, ab.first, panel_rows(bra.nab), r, r_stride(bra.l + ket.l), ncol, *weights,
        bra.nherm, np8, bra.nab, ket.nab, block.array, block.first, *block.strides, row_blocks, column_blocks,
    )  # fmt: skip
