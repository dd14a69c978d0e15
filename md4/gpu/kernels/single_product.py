"""Both transforms in one product, for kets of spherical single shells.

H of a single shell is one matrix for all shells of its l, H[P, q] = w C[m, q], where |q| = l and where w has the
contraction coefficient, the sign and (2 zeta)^-l of a primitive. So the sum over the primitives of a shell goes over r,
as for kets of two s shells (`md4.gpu.kernels.one_product`), and what remains is

    (ab|P) = sum_p H[ab, p] sum_q C[m, q] s[P][p + q],     s[P][t] = sum_k w_k r_k[t]

a product whose right operand has the (m, P) of all single shells as columns. Its elements are sums over the few
monomials q of a solid harmonic: each lane adds them up from s in shared memory, whose bandwidth is what this kernel has
least of. So a block of 8 columns is one component m of 8 shells, or 2 of 4, 4 of 2. Its lanes find s[p + q] in the same
place of each shell: they read the same words and coefficients at once, no more monomials than m has, and the shells'
rows are spaced such that few lanes read from the same bank. The warps of a block share the components of a group of
shells. The words, places of s[p + q], come through the ring, with H, as in `md4.gpu.kernels.two_products`; neither
[p|P) nor (ab|q] is ever in memory. The s of shells of one primitive and one function is r itself, and w is a factor of
each column.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, cuda, f64, i32, i64, jit_device
from md4.gpu.emit.instructions import make_empty, shared_address
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.stores import make_store_shells
from md4.gpu.emit.tile_products import make_gather_terms, make_product_step
from md4.gpu.gather_words import shared_components, term_coefficients, term_places, term_words, warp_terms
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
from md4.gpu.kernels.ring import Course, make_copy_panel, make_copy_pieces, make_copy_range, make_r_in_turn, make_ring
from md4.gpu.kernels.two_products import row_blocks_of, staircase_of
from md4.gpu.r_layout import r_stride
from md4.gpu.staircases import natural_rows
from md4.gpu.tiles import Tile, blocks_of_8, choose_tile
from md4.gpu.tuning import SHARED_BYTES, SINGLE_PRODUCT
from md4.method.hermite import solid_terms


class Terms(NamedTuple):
    """The solid harmonics of a degree as sums of monomials, as the warps of a group share them.

    Attributes
    ----------
    words : float64 array
        Where lanes find s[p + q], see `md4.gpu.gather_words.term_words`.
    coefficients : float64 array
        C[m, q], see `md4.gpu.gather_words.term_coefficients`.
    places : int32 array
        Where each warp begins, see `md4.gpu.gather_words.term_places`.
    nm, nctr : int64
        Components m, and contracted functions of a shell of the list.
    row : int64
        Doubles from one shell's s to the next one's in shared memory.
    """

    words: F64
    coefficients: F64
    places: I32
    nm: i64
    nctr: i64
    row: i64


class Sharing(NamedTuple):
    """How warps share the components of a group of shells; the arguments of the tables in `md4.gpu.gather_words`.

    Attributes
    ----------
    parts : int
        Warps that share them.
    nt : int
        Blocks of 8 columns of each warp.
    slots : int
        Components of a block of 8 columns, of which each has 8 / `slots` shells.
    """

    parts: int
    nt: int
    slots: int


class Operands(NamedTuple):
    """What the ring works on.

    Attributes
    ----------
    h, words : float64 array
        H of the list, and where lanes find s[p + q].
    r : float64 array
    r_first, r_step, stride : int64
        Place of the first bra primitive's s that the block needs, places to the next primitive's, and from one shell's
        to the next one's.
    r_row, r_count : int64
        Doubles from one shell's s to the next one's in shared memory, and of s of one bra primitive.
    r_address : int32
        Shared memory for s.
    shells, count, part : int64
        Shells of the block, bra primitives, and which warp it is of those that share a group of shells.
    own_r, own_words, coefficients : int32
        Place of the lane's shell in s, in bytes; addresses of the lane's words in the ring's first buffer, and of its
        coefficients.
    own_h : int64
        Address of the lane's place in H, in the ring's first buffer.
    tid : int64
    """

    h: F64
    words: F64
    r: F64
    r_first: i64
    r_step: i64
    stride: i64
    r_row: i64
    r_count: i64
    r_address: i32
    shells: i64
    count: i64
    part: i64
    own_r: i32
    own_words: i32
    coefficients: i32
    own_h: i64
    tid: i64


def shell_place(n, terms, out):
    """Where the n-th contracted function of the chunk begins in a `Result` (device function)."""
    shell = quotient(n, terms.nctr)
    return shell * out.s_kl + (n - shell * terms.nctr) * terms.nm * out.s_cd


def single_ring(rows8, sharing, l, warps, stages, unit, r_buffers):
    """(device function: the ring, device function that starts to copy s, bytes of the ring)."""
    threads, words_offset, nt = 32 * warps, rows8 * 512, sharing[1]
    copy_panel, copy_words = make_copy_panel(rows8, threads), make_copy_pieces(entries(l, sharing), threads)
    copy_row, gather = make_copy_range(32), make_gather_terms(*terms_of(l, sharing))
    step = make_product_step(rows8, nt, unit == "dmma16", False)

    def copy_next_r(address, n, side):
        """A warp copies s of every `warps`-th shell."""
        shell = side.tid >> 5
        while shell < side.shells:
            copy_row(
                address + 8 * shell * side.r_row, side.r, side.r_first + n * side.r_step + shell * side.stride,
                side.stride, side.tid & 31,
            )  # fmt: skip
            shell += warps

    def fill(address, h, place, k, side):
        copy_panel(address, side.h, h, side.tid)
        copy_words(address + words_offset, side.words, place, side.tid)

    def multiply(tile, offset, n, count, side):
        r, words, coefficients = i32(r_address(n, side) + side.own_r), i32(side.own_words + offset), side.coefficients
        b = gather(side.part, r, words, coefficients)
        return step(tile, i32(side.own_h + offset), b, i32(rows8))

    stage_bytes = words_offset + 16 * entries(l, sharing)
    begin, fetch, start_r, r_address = make_r_in_turn(r_buffers, copy_next_r)
    return make_ring(stages, stage_bytes, fill, multiply, begin, fetch), start_r, stages * stage_bytes


def terms_of(l, sharing):
    """Arguments of `make_gather_terms`."""
    lengths, terms = shared_components(l, *sharing)[1], warp_terms(l, *sharing)
    numbers = None
    if sharing.slots == 1:
        table = solid_terms(l)[0]
        numbers = tuple(tuple(table[term[0], m[0]][m[0] >= 0].tolist()) for m, term in terms)
    return tuple(map(tuple, lengths.tolist())), numbers


def entries(l, sharing):
    """Entries of the tables of all warps; see `md4.gpu.gather_words.warp_terms`."""
    return sum(m.size for m, _ in warp_terms(l, *sharing))


def single_product(rows8, nt, parts, groups, slots, l, stages, unit, r_buffers, blocks):
    """Kernel factory; `parts` warps share the components of 8 / `slots` shells, `groups` times in a block of threads.

    `l` is the degree of the single shells, `r_buffers` as in `bra_transform`; `blocks` share a multiprocessor.
    """
    warps, shells, sharing = parts * groups, 8 // slots, Sharing(parts, nt, slots)
    product, start_r, ring_bytes = single_ring(rows8, sharing, l, warps, stages, unit, r_buffers)
    empty, store = make_empty(2 * rows8 * nt), make_store_shells(rows8, nt, slots)
    copy_range = make_copy_range(32 * warps)
    place, primitives, shell_at = jit_device(block_place), jit_device(primitives_of), jit_device(shell_place)
    row_words, loaded = 2 * entries(l, sharing), entries(l, sharing) if slots > 1 else 0

    def kernel(
        panel: Panel, bra: PairRange, staircase: Staircase, r: HermiteIntegrals, terms: Terms, weights: Weights,
        out: Result, grid: Grid,
    ):  # fmt: skip
        ring = shared_address(cuda.shared.array(0, f64))
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        part, group = warp % parts, warp // parts
        row_block, column_block, pair = place(grid)
        first, last = primitives(bra, pair)
        row, step = row_block * rows8, panel.rows8 * 64
        # the shells of the block, for one bra primitive at a time, and that of the lane's columns
        first_shell = column_block * groups * shells
        count = min(i64(groups * shells), r.nket - first_shell)
        column = lane >> 2
        own_shell = min(group * shells + column % shells, count - 1)
        width, begin = i64(terms.places[part]), i64(terms.places[parts + part])
        slot, coefficients = column // shells, i32(ring + ring_bytes)
        side = Operands(
            panel.h, terms.words, r.numbers,
            ((first - bra.first_prim) * r.nket + first_shell) * r.stride, r.nket * r.stride, r.stride,
            terms.row, groups * shells * terms.row, i32(coefficients + 8 * loaded), count, last - first, part,
            i32(8 * own_shell * terms.row), i32(ring + rows8 * 512 + 16 * begin + 4 * width * (4 * slot + (lane & 3))),
            i32(coefficients + 8 * (begin + width * slot)), ring + 16 * lane, tid,
        )  # fmt: skip
        course = Course(
            last - first, panel.steps, staircase.reach, row,
            first * panel.steps * step + row * 64, step, i64(0),
            i64(0), i64(row_words), -panel.steps * row_words,
        )  # fmt: skip
        if first < last:
            copy_range(coefficients, terms.coefficients, i64(0), loaded, tid)
            start_r(0, side)
        tile = product(empty(), ring, course, side)
        # two neighbouring columns belong to two shells
        column = 2 * (lane & 3)
        shell = first_shell + group * shells + column % shells
        own = weights.first + weights.step * min(shell, r.nket - 1)
        other = weights.first + weights.step * min(shell + 1, r.nket - 1)
        bra_place = out.first + pair * out.s_ij
        store(
            tile, out.numbers, bra_place + shell_at(shell, terms, out), bra_place + shell_at(shell + 1, terms, out),
            out.s_ab, r.nket - shell, weights.numbers[own], weights.numbers[other],
            terms.places, i64(2 * parts) + part * (nt * slots) + column // shells, out.s_cd,
            staircase.rows, 8 * row + (lane >> 2),
        )  # fmt: skip

    return Kernel(kernel, (32 * warps, blocks))


# launchers


@dataclass(frozen=True)
class SingleTile:
    """How a class is shared among the warps of a block of threads.

    Attributes
    ----------
    tile : Tile
        A warp's register tile, all warps of the block, and the ring.
    sharing : Sharing
    groups : int
        Groups of shells of a block of threads.
    r_buffers, blocks : int
        Buffers for s, and blocks that share a multiprocessor.
    row, shared : int
        Doubles from one shell's s to the next one's in shared memory, and bytes of shared memory of a block.
    cycles : float
        Estimated cycles of a multiprocessor for a step and a column of a shell.
    """

    tile: Tile
    sharing: Sharing
    groups: int
    r_buffers: int
    blocks: int
    row: int
    shared: int
    cycles: float

    @property
    def shells(self):
        """Shells of a block of threads."""
        return 8 // self.sharing.slots * self.groups


def work(mt, l, sharing):
    """Cycles of a multiprocessor for a step and a column of a shell: of tensor instructions, of loads, of the rest."""
    fragments = SINGLE_PRODUCT.fragment * mt * sharing.parts
    loads = fragments + SINGLE_PRODUCT.gather * int(shared_components(l, *sharing)[1].sum())
    cycles = fragments * sharing.nt + loads + SINGLE_PRODUCT.step * sharing.parts
    return cycles * sharing.slots / (2 * l + 1)


def sharings(mt, l):
    """Every `Sharing` of the components of degree `l` among few enough warps, with tiles that registers hold."""
    for slots in (1, 2, 4):
        for nt in range(SINGLE_PRODUCT.columns[mt - 1], 0, -1):
            parts = -(-(2 * l + 1) // (slots * nt))
            if parts <= SINGLE_PRODUCT.warps:
                yield Sharing(parts, nt, slots)


@cache
def single_tile(unit, bra, ket):
    """`SingleTile` for two `ListFacts` or `Side`; None where shared memory holds nothing.

    Of several bra primitives the next one's s is copied ahead, and of steps two, where there is room for it.
    """
    wide, stride = choose_tile(bra.nab, blocks_of_8(bra.nherm), unit), r_stride(bra.l + ket.l)
    for buffers, stages in ((2, wide.stages), (1, wide.stages), (1, 2)):
        if buffers == 2 and bra.max_prim == 1:
            continue
        tile = replace(wide, stages=min(stages, wide.stages))
        made = [sharing_tile(tile, buffers, stride, ket.l, sharing) for sharing in sharings(wide.mt, ket.l)]
        made = [entry for entry in made if entry is not None]
        if made:
            return min(made, key=lambda entry: entry.cycles)
    return None


def sharing_tile(tile, buffers, stride, l, sharing):
    """`SingleTile` where warps share components in this way; None where shared memory does not hold it.

    With few warps of a multiprocessor much time is lost: with n warps 1/n of it, and more where they wait together.
    """
    parts, nt, slots = sharing
    count, row = entries(l, sharing), spaced_row(stride)
    fixed = tile.stages * (tile.rows8 * 512 + 16 * count) + (8 * count if slots > 1 else 0)
    s = 8 * (8 // slots) * row * buffers
    groups = max(1, min(SINGLE_PRODUCT.few_warps // parts, (SHARED_BYTES - fixed) // s))
    shared, tile = fixed + groups * s, replace(tile, nt=nt, warps=parts * groups)
    if shared > SINGLE_PRODUCT.shared[tile.unit]:
        return None
    blocks = max(1, min(SINGLE_PRODUCT.blocks(tile), 2 * SHARED_BYTES // shared))
    cycles = work(tile.mt, l, sharing) * (1 + 1 / (blocks * tile.warps) + SINGLE_PRODUCT.alone / blocks)
    return SingleTile(tile, sharing, groups, buffers, blocks, row, shared, cycles)


def spaced_row(stride):
    """Doubles from one shell's s to the next one's in shared memory, `stride` or more.

    Four lanes of each of four shells read at once, one number each. Where rows begin 4 or 12 of the 16 pairs of banks
    apart, fewest of them meet in one.
    """
    return next(row for row in range(stride, stride + 16) if row % 8 == 4)


def single_product_variant(unit, bra, ket):
    """Variant for two classes."""
    made = single_tile(unit, bra, ket)
    tile, (parts, nt, slots) = made.tile, made.sharing
    facts = tile.rows8, nt, parts, made.groups, slots, ket.l, tile.stages, unit, made.r_buffers, made.blocks
    return Variant(single_product, facts)


def needs_sums(ket):
    """Whether s is a sum of several r, or of none."""
    return ket.facts.nctr_a > 1 or ket.facts.max_prim > 1 or ket.nprim < ket.npair


def sums_size(bra, ket):
    """Doubles of s of two slices."""
    return bra.nprim * ket.npair * ket.facts.nctr_a * r_stride(bra.facts.l + ket.facts.l)


def single_launcher(context, bra, ket):
    """The function by which `launch_single_product` launches for two `ListFacts`."""
    nab, nctr, stride, np8 = bra.nab, ket.nctr_a, r_stride(bra.l + ket.l), blocks_of_8(bra.nherm)
    made = single_tile(context.unit, bra, ket)
    tile, threads, shared = made.tile, made.tile.threads, made.shared
    variant, row_blocks = single_product_variant(context.unit, bra, ket), row_blocks_of(tile, nab)
    rows8, (reach, depths, _) = form_rows(nab, BRA_ROWS), staircase_of(context, bra, tile.rows8, row_blocks, flat=True)
    staircase = reach, depths, context.table(natural_rows, nab, tile.rows8 * row_blocks)
    terms = (
        context.table(term_words, bra.l, ket.l, bra.first, *made.sharing),
        context.table(term_coefficients, ket.l, *made.sharing), context.table(term_places, ket.l, *made.sharing),
        2 * ket.l + 1, nctr, made.row,
    )  # fmt: skip
    summed = context.table(unit_weight), 0, 0

    def launch(context, h, r, w, ab, cd, block):
        shells = cd.npair * nctr
        column_blocks = -(-shells // made.shells)
        context.launch(
            variant, row_blocks * column_blocks * ab.npair, threads, shared,
            (h, rows8, np8), pair_range(ab), staircase, (r, stride, shells), terms,
            summed if w is None else (w, cd.first_prim, 1), result(block), (row_blocks, column_blocks),
        )  # fmt: skip

    return launch


def launch_single_product(context, h, r, w, ab, cd, block):
    """(ab|P) of a chunk into `block`; `r` of the chunk, or its sums if `w` is None."""
    context.fixed(single_launcher, ab.facts, cd.facts)(context, h, r, w, ab, cd, block)
