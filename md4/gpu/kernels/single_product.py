"""Both transforms in one product, for kets of spherical single shells.

H of a single shell is one matrix for all shells of its l, H[P, q] = w C[m, q], where |q| = l and where w has the
contraction coefficient, the sign and (2 zeta)^-l of a primitive. So the sum over the primitives of a shell goes over r,
as for kets of two s shells (`md4.gpu.kernels.one_product`), and what remains is

    (ab|P) = sum_p H[ab, p] sum_q C[m, q] s[P][p + q],     s[P][t] = sum_k w_k r_k[t]

a product whose right operand has the (P, m) of all single shells side by side as columns. Its elements are sums over
the few monomials q of a solid harmonic: each lane adds them up from s in shared memory. Where it finds s[p + q] comes
through the ring, with H, as in `md4.gpu.kernels.two_products`; neither [p|P) nor (ab|q] is ever in memory. The s of
shells of one primitive and one function is r itself, and w is a factor of each column.
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, cuda, f64, i32, i64, jit_device
from md4.gpu.emit.instructions import commit_copies, make_empty, make_wait_copies, shared_address
from md4.gpu.emit.stores import make_store_columns
from md4.gpu.emit.tile_products import (
    make_gather_terms,
    make_group_state,
    make_group_weights,
    make_product_step,
    make_scale,
)
from md4.gpu.gather_words import words_of_terms
from md4.gpu.h_layout import BRA_ROWS, form_rows
from md4.gpu.kernels.groups import (
    Grid,
    HermiteIntegrals,
    PairRange,
    Panel,
    Result,
    Staircase,
    block_place,
    pair_range,
    primitives_of,
    result,
)
from md4.gpu.kernels.one_product import Weights, unit_weight
from md4.gpu.kernels.ring import Course, make_copy_panel, make_copy_range, make_ring
from md4.gpu.kernels.two_products import row_blocks_of, staircase_of
from md4.gpu.tuning import SHARED_BYTES, blocks_of_8, choose_tile, r_stride
from md4.method.hermite import solid_terms


class Terms(NamedTuple):
    """The solid harmonics of a degree as sums of `count` monomials, short ones filled up by zeros.

    Attributes
    ----------
    words : float64 array
        Where lanes find s[p + q]: [p block of 8][monomial][m][lane % 4], see `md4.gpu.gather_words.words_of_terms`.
    coefficients : float64 array
        C[m, q] as [monomial][m].
    count, nm : int64
        Monomials, and components m.
    """

    words: F64
    coefficients: F64
    count: i64
    nm: i64


class Operands(NamedTuple):
    """What the ring works on.

    Attributes
    ----------
    h, words : float64 array
        H of the list, and where lanes find s[p + q].
    row : int64
        Numbers of `words` for each block of 8 p.
    r : float64 array
    r_first, r_step, r_count : int64
        Place of the first bra primitive's s that the block needs, places to the next primitive's, numbers of each.
    r_address, coefficients : int32
        Shared memory for s, and that with the coefficients.
    count, terms, nm : int64
        Bra primitives, monomials and components.
    state, weights : tuple
        See `md4.gpu.emit.tile_products.make_group_state` and `make_group_weights`.
    own_h, own_words : int64
        Addresses of the lane's place in H and in the words, in the ring's first buffer.
    tid : int64
    """

    h: F64
    words: F64
    row: i64
    r: F64
    r_first: i64
    r_step: i64
    r_count: i64
    r_address: i32
    coefficients: i32
    count: i64
    terms: i64
    nm: i64
    state: tuple
    weights: tuple
    own_h: i64
    own_words: i64
    tid: i64


def single_ring(rows8, nt, warps, stages, unit, r_buffers, word_bytes):
    """(device function: the ring, device function that starts to copy s, bytes of the ring)."""
    threads, words_offset = 32 * warps, rows8 * 512
    copy_panel, copy_range, wait_all = make_copy_panel(rows8, threads), make_copy_range(threads), make_wait_copies(0)
    gather, scale, step = make_gather_terms(nt), make_scale(nt), make_product_step(rows8, nt, unit == "dmma16", False)
    empty = make_empty(2 * nt)

    @jit_device
    def r_address(n, side):
        """Shared memory for s of the n-th bra primitive."""
        return side.r_address if r_buffers == 1 else i32(side.r_address + (n & 1) * (8 * side.r_count))

    @jit_device
    def start_r(n, side):
        copy_range(r_address(n, side), side.r, side.r_first + n * side.r_step, side.r_count, side.tid)

    def fill(address, h, place, k, side):
        copy_panel(address, side.h, h, side.tid)
        copy_range(address + words_offset, side.words, place, side.row, side.tid)

    def begin(n, side):
        if r_buffers == 1 and n > 0:
            cuda.syncthreads()
            start_r(n, side)
            commit_copies()
            wait_all()

    def fetch(n, k, side):
        if r_buffers == 2 and k == 0 and n + 1 < side.count:
            start_r(n + 1, side)

    def multiply(tile, offset, n, count, side):
        r, words, coefficients = r_address(n, side), i32(side.own_words + offset), side.coefficients
        b = empty()
        for _ in range(side.terms):
            b = gather(b, r, words, coefficients, side.state)
            words, coefficients = i32(words + 16 * side.nm), i32(coefficients + 8 * side.nm)
        return step(tile, i32(side.own_h + offset), scale(b, side.weights), i32(rows8))

    stage_bytes = words_offset + word_bytes
    return make_ring(stages, stage_bytes, fill, multiply, begin, fetch), start_r, stages * stage_bytes


def single_product(rows8, nt, warps, stages, unit, r_buffers, word_bytes):
    """Kernel factory; the ring has room for `word_bytes` of words in each step, `r_buffers` as in `bra_transform`."""
    columns = 8 * nt * warps
    product, start_r, ring_bytes = single_ring(rows8, nt, warps, stages, unit, r_buffers, word_bytes)
    empty, group_state, group_weights = make_empty(2 * rows8 * nt), make_group_state(nt), make_group_weights(nt)
    copy_range, store = make_copy_range(32 * warps), make_store_columns(rows8, nt)
    place, primitives = jit_device(block_place), jit_device(primitives_of)

    def kernel(
        panel: Panel, bra: PairRange, staircase: Staircase, r: HermiteIntegrals, terms: Terms, weights: Weights,
        nab: i64, ncd: i64, out: Result, grid: Grid,
    ):  # fmt: skip
        ring = shared_address(cuda.shared.array(0, f64))
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        row_block, column_block, pair = place(grid)
        first, last = primitives(bra, pair)
        row, step = row_block * rows8, panel.rows8 * 64
        # s of the single shells that the block's columns touch, for one bra primitive at a time
        first_column, ncol = column_block * columns, r.nket * terms.nm
        shell = first_column // terms.nm
        r_count = ((min(first_column + columns, ncol) - 1) // terms.nm - shell + 1) * r.stride
        column, coefficients = first_column + 8 * nt * warp, i32(ring + ring_bytes)
        word_row = 2 * terms.count * terms.nm
        own = column + (lane >> 2)
        side = Operands(
            panel.h, terms.words, word_row, r.numbers, ((first - bra.first_prim) * r.nket + shell) * r.stride,
            r.nket * r.stride, r_count, i32(coefficients + 8 * terms.coefficients.size), coefficients, last - first,
            terms.count, terms.nm, group_state(own, ncol, shell, terms.nm, r.stride),
            group_weights(weights.numbers, weights.first, weights.step, own, ncol, terms.nm),
            ring + 16 * lane, ring + rows8 * 512 + 4 * (lane & 3), tid,
        )  # fmt: skip
        course = Course(
            last - first, panel.steps, staircase.reach, row,
            first * panel.steps * step + row * 64, step, i64(0), i64(0), word_row, -panel.steps * word_row,
        )  # fmt: skip
        if first < last:
            copy_range(coefficients, terms.coefficients, i64(0), terms.coefficients.size, tid)
            start_r(0, side)
        tile = product(empty(), ring, course, side)
        ab = 8 * row + (lane >> 2)
        store(
            tile, out.numbers, out.first + pair * out.s_ij + ab * out.s_ab, column + 2 * (lane & 3), ncol, ncd,
            out.s_kl, out.s_cd, out.s_ab, nab - ab,
        )  # fmt: skip

    return Kernel(kernel, (32 * warps, max(1, 8 // warps)))


# launchers

# Steps in which the room for words in the ring grows: variants are few.
WORD_STEP = 512


def coefficients_of(l):
    """`Terms.coefficients` in a row, of an even number."""
    numbers = solid_terms(l)[0].reshape(-1)
    return np.pad(numbers, (0, len(numbers) % 2))


@cache
def single_tile(unit, bra, ket):
    """(tile, buffers for s, bytes of words in each step, bytes of shared memory) for two `ListFacts` or `Side`.

    Of several bra primitives the next one's s is copied ahead, and of steps two, where that leaves two blocks a
    multiprocessor; None where nothing does.
    """
    tile = choose_tile(bra.nab, blocks_of_8(bra.nherm), unit)
    count, nm = solid_terms(ket.l)[0].shape
    words = -(-16 * count * nm // WORD_STEP) * WORD_STEP
    shells = (8 * tile.columns - 2 + nm) // nm + 1
    s, coefficients = 8 * r_stride(bra.l + ket.l) * shells, 8 * len(coefficients_of(ket.l))
    for buffers, stages in ((2, tile.stages), (1, tile.stages), (1, 2)):
        shared = stages * (tile.rows8 * 512 + words) + coefficients + buffers * s
        if (buffers == 1 or bra.max_prim > 1) and shared <= SHARED_BYTES:
            return replace(tile, stages=min(stages, tile.stages)), buffers, words, shared
    return None


def single_product_variant(unit, bra, ket):
    """Variant for two classes."""
    tile, buffers, words, _ = single_tile(unit, bra, ket)
    return Variant(single_product, (tile.rows8, tile.nt, tile.warps, tile.stages, unit, buffers, words))


def needs_sums(ket):
    """Whether s is a sum of several r, or of none."""
    return ket.facts.nctr_a > 1 or ket.facts.max_prim > 1 or ket.nprim < ket.npair


def sums_size(bra, ket):
    """Doubles of s of two slices."""
    return bra.nprim * ket.npair * ket.facts.nctr_a * r_stride(bra.facts.l + ket.facts.l)


def single_launcher(context, bra, ket):
    """The function by which `launch_single_product` launches for two `ListFacts`."""
    nab, ncd, nctr, stride = bra.nab, ket.nab, ket.nctr_a, r_stride(bra.l + ket.l)
    np8, (tile, _, _, shared) = blocks_of_8(bra.nherm), single_tile(context.unit, bra, ket)
    variant, row_blocks = single_product_variant(context.unit, bra, ket), row_blocks_of(tile, nab)
    columns, threads, rows8 = tile.columns, tile.threads, form_rows(nab, BRA_ROWS)
    staircase = staircase_of(context, bra, tile.rows8, row_blocks, flat=True)
    count, nm = solid_terms(ket.l)[0].shape
    terms = context.table(words_of_terms, bra.l, ket.l, bra.first), context.table(coefficients_of, ket.l), count, nm
    summed = context.table(unit_weight), 0, 0

    def launch(context, h, r, w, ab, cd, block):
        shells = cd.npair * nctr
        column_blocks = -(-blocks_of_8(shells * nm) // columns)
        context.launch(
            variant, row_blocks * column_blocks * ab.npair, threads, shared,
            (h, rows8, np8), pair_range(ab), staircase, (r, stride, shells), terms,
            summed if w is None else (w, cd.first_prim, 1), nab, ncd, result(block), (row_blocks, column_blocks),
        )  # fmt: skip

    return launch


def launch_single_product(context, h, r, w, ab, cd, block):
    """(ab|P) of a chunk into `block`; `r` of the chunk, or its sums if `w` is None."""
    context.fixed(single_launcher, ab.facts, cd.facts)(context, h, r, w, ab, cd, block)
