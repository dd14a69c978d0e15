"""Steps 4 and 5 in one kernel, for classes whose (ab|q] would cost more to store than to make.

A warp makes one quartet: `mt` fragments of 16 rows ab, all its cd at once, the blocks of 8 q `nq` at a time:

    left[ab, q] = sum_p H[ab, p] [p|q]          as in `md4.gpu.kernels.two_products`, p over all bra primitives
    acc[ab, cd] += sum_q left[ab, q] H[cd, q]   `left` as it comes out is the left operand

so that neither [p|q] nor (ab|q] leaves the registers. A block of threads keeps H[ab, p] of its bra pair in shared
memory and runs over ket pairs; each warp fetches r of its next primitive quartet while it works on this one. H[cd, q]
comes straight from memory, 16 bytes a lane. Where shared memory does not hold H of all bra primitives, they are taken
in groups, and the integrals of later ones added.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64, cuda, jit_device, types
from md4.gpu.emit.instructions import commit_copies, make_empty, make_wait_copies, shared_address
from md4.gpu.emit.stores import make_stage_tile, make_write_out
from md4.gpu.emit.tile_products import make_chain, make_stair_products
from md4.gpu.kernels.two_products import all_words, make_copy_range
from md4.gpu.staircases import class_of, level_ends, reach, row_table
from md4.gpu.tuning import (
    FEWEST_BLOCKS,
    FUSED_BLOCKS,
    FUSED_COLUMNS,
    FUSED_CONTRACTED_COLUMNS,
    FUSED_DOUBLES,
    FUSED_KETS,
    FUSED_PANELS,
    FUSED_PRIMITIVES,
    FUSED_ROWS,
    SHARED_BYTES,
    WARPS,
    WRITE_ROUNDS,
    blocks_of_8,
    panel_rows,
    r_stride,
)

i64 = types.int64


def following_primitive(ket, last, start, first_pair, pair, npair):
    """The primitive after `ket` in a pair up to `last`, or the first of `pair`; -1 at the end (device function)."""
    if ket + 1 < last:
        return ket + 1
    return start[first_pair + pair] if pair < npair else -1


def fused_transforms(mt, nq, nc, stair, warps, blocks, contracted, unit):
    """Kernel factory; `nc` is the number of blocks of 8 cd, `contracted` allows for several bra primitives.

    `stair`: of each of the `nq` blocks of q, how many blocks of 8 cd count.
    """
    threads, wide = 32 * warps, unit == "dmma16"
    zeros, zeros_left, chain = make_empty(4 * mt * nc), make_empty(4 * mt * nq), make_chain(mt, nq, nc, wide, stair)
    products, stage = make_stair_products(2 * mt, nq, wide, False, ahead=False), make_stage_tile(2 * mt, nc)
    write_out, add_out = make_write_out(WRITE_ROUNDS, 32), make_write_out(WRITE_ROUNDS, 32, add=True)
    following = jit_device(following_primitive)
    state = tuple(np.int32(offset) for j in range(nq) for offset in (128 * j, 0))  # blocks of q in a row, one r
    copy_panel, copy_r, wait_all = make_copy_range(threads), make_copy_range(32), make_wait_copies(0)

    def kernel(
        h, first_prim, start, first_pair, h_rows, group, ends, rows, r, r_stride, nket, offsets, np8, nq8, g,
        g_first_prim, g_start, g_first_pair, columns, nab, ncd, npair_cd, parts, out, out_first, s_ij, s_kl,
        s_ab, s_cd,
    ):  # fmt: skip
        panel = shared_address(cuda.shared.array(0, types.float64))
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        pair, part = i64(cuda.blockIdx.x) // parts, i64(cuda.blockIdx.x) % parts
        begin, end = start[first_pair + pair], start[first_pair + pair + 1]
        panel_doubles, panel_bytes = np8 * h_rows * 64, np8 * h_rows * 512
        table = panel + group * panel_bytes
        copy_panel(table, offsets, 0, offsets.size, tid)
        r_bytes = 8 * r_stride
        r_base = table + 8 * offsets.size + warp * 2 * r_bytes
        out_stage = panel + 8 * (group * panel_doubles + offsets.size + warps * 2 * r_stride + warp * nab * ncd)
        stride = parts * warps
        added, more = False, True
        while more:
            # as many primitives of the bra pair as shared memory holds
            count = min(group, end - begin)
            cuda.syncthreads()
            copy_panel(panel, h, begin * panel_doubles, count * panel_doubles, tid)
            commit_copies()
            wait_all()
            cuda.syncthreads()
            r_row = (begin - first_prim) * nket - g_first_prim  # of ket primitive 0
            fetched, buffer = i64(-1), 0
            pair_cd = part * warps + warp
            while pair_cd < npair_cd:
                acc = zeros()
                first, last = g_start[g_first_pair + pair_cd], g_start[g_first_pair + pair_cd + 1]
                for ket in range(first, last if count > 0 else first):
                    first_q = i64(0)
                    while first_q < nq8:
                        left, words = zeros_left(), table + first_q * 128 + 4 * lane
                        a_address = panel + 16 * lane
                        for i in range(count if contracted else 1):
                            row = r_row + i * nket + ket
                            if fetched != row:
                                copy_r(r_base + buffer * r_bytes, r, row * r_stride, r_stride, lane)
                                commit_copies()
                            wait_all()
                            cuda.syncwarp()
                            r_address = types.int32(r_base + buffer * r_bytes)
                            # fetch what comes next: another bra primitive, or the first one with the next ket primitive
                            fetched = row + nket
                            if not contracted or i + 1 == count:
                                coming = ket
                                if first_q + nq >= nq8:
                                    coming = following(ket, last, g_start, g_first_pair, pair_cd + stride, npair_cd)
                                fetched = r_row + coming if 0 <= coming < g_first_prim + nket else i64(-1)
                            if fetched != row:
                                buffer = 1 - buffer
                                if fetched >= 0:
                                    copy_r(r_base + buffer * r_bytes, r, fetched * r_stride, r_stride, lane)
                            commit_copies()
                            left = products(
                                left, a_address, h_rows * 512, words, nq8 * 128, r_address, state, ends, np8
                            )  # fmt: skip
                            a_address += panel_bytes
                        place = (ket * nq8 + first_q) * (nc * 64) + 2 * lane
                        acc = chain(acc, left, g, place, nq8 - first_q)
                        first_q += nq
                # the quartet's integrals are contiguous in the result: put them in order in shared memory, then write
                row_bytes, column_bytes = types.int32(8 * s_ab), types.int32(8 * s_cd)
                stage(acc, types.int32(out_stage), rows, lane >> 2, row_bytes, columns, 2 * (lane & 3), column_bytes)
                cuda.syncwarp()
                base, n = out_first + pair * s_ij + pair_cd * s_kl, lane
                while n < nab * ncd:
                    if contracted and added:
                        add_out(out, base + n, types.int32(out_stage + 8 * n), nab * ncd - n)
                    else:
                        write_out(out, base + n, types.int32(out_stage + 8 * n), nab * ncd - n)
                    n += 32 * WRITE_ROUNDS
                cuda.syncwarp()
                pair_cd += stride
            begin += group
            added, more = True, contracted and begin < end

    signature = (
        F64, i64, I64, *[i64] * 3, I32, I32, F64, i64, i64, F64, i64, i64, F64, i64, I64, i64, I32, *[i64] * 4,
        F64, *[i64] * 5,
    )  # fmt: skip
    return Kernel(kernel, (threads, blocks), signature)


# launcher

# Blocks of 8 q at most at a time, and so many that a table is padded by.
PADDING = 5


def gather_table(l_bra, l_ket):
    """`all_words` and PADDING blocks that are read, but not used."""
    return np.concatenate([all_words(l_bra, l_ket), np.zeros(16 * PADDING)])


@cache
def stair_of(shells, nq):
    """Blocks of 8 rows of a ket that count of each of `nq` blocks of q: the most in any pass over them."""
    found = reach(shells)
    return tuple(int(found[n::nq].max()) for n in range(nq))


@dataclass(frozen=True)
class FusedTile:
    """What a warp does: fragments of 16 rows, q blocks at a time, cd blocks."""

    mt: int
    nq: int
    nc: int


def fused_tile(nab, nq8, ncd, contracted):
    """The tile for a class, or None where it does not fit the registers."""
    mt, nc = (nab + 15) // 16, blocks_of_8(ncd)
    if mt > FUSED_ROWS or nc > (FUSED_CONTRACTED_COLUMNS if contracted and mt > 1 else FUSED_COLUMNS):
        return None
    most = FUSED_DOUBLES // (4 * mt) - nc
    if most < 1:
        return None
    passes = -(-nq8 // min(most, PADDING))
    return FusedTile(mt, -(-nq8 // passes), nc)


def fused_blocks(tile, bra, ket):
    """Blocks that share a multiprocessor: more of small tiles, as far as shared memory goes."""
    contracted, (panel, rest) = bra.max_prim > 1, fused_shared(bra, ket)
    load = tile.mt * (tile.nq + tile.nc)
    if contracted:
        by_registers = 4 if load <= 5 else 3 if load <= 8 else FUSED_BLOCKS
    else:
        by_registers = 4 if tile.mt == 1 else FUSED_BLOCKS
    by_memory = 2 * SHARED_BYTES // (rest + (FUSED_PANELS if contracted else 1) * panel)
    return max(FUSED_BLOCKS, min(by_registers, by_memory))


def choose_fused(unit, bra, ket):
    """The tile of the fused kernel for a bra and a ket list, or None where the two-kernel way serves better."""
    if unit == "fma" or bra.max_prim * ket.max_prim > FUSED_PRIMITIVES:
        return None
    panel, rest = fused_shared(bra, ket)
    if panel + rest > SHARED_BYTES:
        return None
    return fused_tile(bra.nab, blocks_of_8(ket.nherm), ket.nab, bra.max_prim > 1)


def fused_shared(bra, ket):
    """Bytes of shared memory: of the panel of one bra primitive, and of all else that a block has."""
    np8, nq8 = blocks_of_8(bra.nherm), blocks_of_8(ket.nherm)
    panel, table = np8 * panel_rows(bra.nab) * 512, (np8 * nq8 + PADDING) * 128
    return panel, table + WARPS * (16 * r_stride(bra.l + ket.l) + 8 * bra.nab * ket.nab)


def fused_variant(unit, bra, ket):
    """Variant for a class that `choose_fused` has a tile for."""
    tile = choose_fused(unit, bra, ket)
    blocks = fused_blocks(tile, bra, ket)
    stair = stair_of(class_of(ket), tile.nq)
    return Variant(fused_transforms, (tile.mt, tile.nq, tile.nc, stair, WARPS, blocks, bra.max_prim > 1, unit))


def fused_parts(nbra, nket):
    """Blocks that share the ket pairs of a bra pair: a warp takes several, unless that leaves too few blocks."""
    most = -(-nket // WARPS)
    return min(most, max(1, nket // (WARPS * FUSED_KETS), FEWEST_BLOCKS // nbra))


def launch_fused(context, h, r, g, ab, cd, block):
    """(ab|cd) of a chunk into `block`; `h` bra panels, `g` right operands of the ket list, `r` of the chunk."""
    bra, ket = ab.pairs, cd.pairs
    parts = fused_parts(len(bra), len(ket))
    panel, rest = fused_shared(bra, ket)
    tile = choose_fused(context.unit, bra, ket)
    blocks = fused_blocks(tile, bra, ket)
    group = max(1, min(bra.max_prim, (2 * SHARED_BYTES // blocks - rest) // panel))
    context.launch(
        fused_variant(context.unit, bra, ket), len(bra) * parts, 32 * WARPS, group * panel + rest,
        h, ab.first_prim, ab.data.start, ab.first, panel_rows(bra.nab), group,
        context.table(level_ends, class_of(bra), tile.mt, 2),
        context.table(row_table, class_of(bra), panel_rows(bra.nab)), r, r_stride(bra.l + ket.l), ket.nprim,
        context.table(gather_table, bra.l, ket.l), blocks_of_8(bra.nherm), blocks_of_8(ket.nherm), g, cd.first_prim,
        cd.data.start, cd.first, context.table(row_table, class_of(ket), blocks_of_8(ket.nab)), bra.nab, ket.nab,
        len(ket), parts, block.array, block.first, *block.strides,
    )  # fmt: skip
