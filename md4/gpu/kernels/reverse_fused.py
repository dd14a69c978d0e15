"""Steps 1 and 2 of gradients in one kernel, for classes whose U would cost more to store than to make.

    U[cd, p] = sum_q H[cd, q] [q|p]          Z[ab, p] += sum_cd Gamma[ab, cd] U[cd, p]

A block of threads takes a primitive bra pair, and goes through the ket pairs that count with it
(`md4.gpu.kernels.select_kets`). Its warps share the p among them; each keeps its columns of Z in registers, and so it
does those of U of one ket pair. A turned tile of U is, as it comes out, the left operand of the second product
(`md4.gpu.emit.tile_products`), on whose right is Gamma (`md4.gpu.kernels.gamma_blocks`).

A step of the loop takes several primitive quartets, `together`, which wait for memory and for each other only once.
Their H, their r and Gamma of their shell quartets come to shared memory: a warp copies the H of every so many of them,
and every so many blocks of Gamma. With two `slots` this is begun one step ahead.
The words that say where [q|p] is in r (`md4.gpu.gather_words`) stay in registers, or in shared memory. Kets of few
functions, whose H has unlike staircases, share a variant, which has code for each of them.
"""

from functools import cache
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64, cuda, f64, i32, i64, jit_device
from md4.gpu.emit.instructions import (
    address_of,
    commit_copies,
    copy_number,
    copy_pair,
    make_copies,
    make_empty,
    make_wait_copies,
    shared_address,
)
from md4.gpu.emit.scalars import address_at, quotient
from md4.gpu.emit.tile_products import (
    make_column_state,
    make_known_products,
    make_load_words,
    make_staircase_products,
    tile_kind,
    tile_products,
)
from md4.gpu.emit.values import i32 as INT32
from md4.gpu.emit.values import word
from md4.gpu.gather_words import all_words, words_of
from md4.gpu.kernels.groups import Levels, Panel, levels_of
from md4.gpu.kernels.reverse_sums import ReverseSums, make_add_tile
from md4.gpu.r_layout import r_stride_of
from md4.gpu.staircases import level_ends
from md4.gpu.tiles import blocks_of_8, turned_split
from md4.gpu.tuning import REVERSE, SHARED_BYTES


class KetPrimitives(NamedTuple):
    """The primitive quartets of a chunk: `first_quartets`, `ket_prims` and `shells` of
    `md4.gpu.kernels.select_kets.QuartetTable`."""

    first: I64
    numbers: I32
    shells: I32


class R(NamedTuple):
    """r of the primitive quartets of the lists, `stride` numbers each."""

    numbers: F64
    stride: i64


@cache
def make_second_product(rows_cd, rows_ab, nt, wide):
    """Intrinsic (Z, U, address) -> Z + Gamma U, all turned tiles.

    Gamma is in shared memory, the lane's place in it at `address`, in blocks of 8 rows ab and of 8 cd
    [block of cd][block of ab][row][cd].
    """
    z_tile, u_tile = tile_kind(rows_ab, nt), tile_kind(rows_cd, nt)
    multiply, blocks = tile_products(rows_ab, nt, wide, True)

    @word(z_tile, z_tile, u_tile, INT32)
    def second_product(z, u, address):
        for j in range(rows_cd):
            operand = [u[4 * (i * rows_cd + j) + n] for i in range(nt // 2) for n in range(4)]
            z = multiply(z, address + 512 * rows_ab * j, operand, blocks)
        return z

    return second_product


def quartets_of(kets, own, part, each):
    """(first, end) of the quartets of a primitive bra pair of a chunk, of which a part has `each` (device function)."""
    first, end = kets.first[own] - kets.first[0], kets.first[own + 1] - kets.first[0]
    return first + part * each, min(end, first + (part + 1) * each)


def make_look():
    """Device function: `count` primitive quartets from n on, a lane each: (shell quartet, primitive ket pair, bits).

    A bit is set for each of them that is the first of its shell quartet.
    """

    def look(kets, n, count):
        lane = i64(cuda.threadIdx.x) & 31
        own = n + min(lane, count - 1)
        shells = kets.shells[own]
        before = cuda.shfl_up_sync(-1, shells, 1)
        bits = cuda.ballot_sync(-1, lane < count and (lane == 0 or shells != before))
        return shells, kets.numbers[own], i32(bits)

    return jit_device(look)


def make_copy_few():
    """Device function: as `md4.gpu.kernels.ring.make_copy_range`, by addresses that are counted up, in a short loop."""

    def copy_few(address, array, index, count, tid, threads):
        n, end = i32(tid), i32(count >> 1)
        to, source = i32(address + 16 * tid), address_of(array, index + 2 * tid)
        while n < end:
            copy_pair(to, source)
            n, to, source = i32(n + threads), i32(to + 16 * threads), source + 16 * threads

    return jit_device(copy_few)


def block_of(most):
    """Device function: (warp, warps) of a block that has up to `most` warps; with one it is known what they are."""

    def of_several():
        return i32(cuda.threadIdx.x >> 5), i32(cuda.blockDim.x >> 5)

    def of_one():
        return i32(0), i32(1)

    return jit_device(of_one if most == 1 else of_several)


def copy_pieces(to, source, panel_bytes, pieces, prim, together, count, warp, warps):
    """Starts to copy the panels of `count` primitive pairs: of their pieces a warp takes every `warps`-th.

    A device function. `prim` is the primitive pair of each lane; a piece has 64 numbers, the lane's are at `source` in
    the first panel of all, and come to the shared address `to`.
    """
    k, piece = i32(0), warp
    to = i32(to + 512 * piece)
    while True:
        while piece >= pieces:
            k, piece = i32(k + 1), i32(piece - pieces)
        if k >= count:
            break
        here = address_at(address_at(source, cuda.shfl_sync(-1, prim, k), panel_bytes), piece, 512)
        while piece < pieces:
            copy_pair(to, here)
            to, here, piece = i32(to + 512 * warps), address_at(here, warps, 512), i32(piece + warps)


def make_copy_panels(rows_cd, most, cases):
    """Device function: as `copy_pieces`, where a panel has `rows_cd` pieces for each step of one of the `cases`.

    A warp takes whole panels, in code without loops, unless half of the warps or more would have none.
    """
    by_pieces = jit_device(copy_pieces)
    copies = make_copies(rows_cd * cases[-1][-1], 512, rows_cd * cases[0][-1])

    def panels(to, source, panel_bytes, pieces, prim, together, count, warp, warps):
        k, to, step = warp, i32(to + warp * panel_bytes), i32(warps * panel_bytes)
        while k < count:
            copies(to, address_at(source, cuda.shfl_sync(-1, prim, k), panel_bytes), pieces)
            k, to = i32(k + warps), i32(to + step)

    whole = jit_device(panels)

    def either(to, source, panel_bytes, pieces, prim, together, count, warp, warps):
        if 2 * together > warps:
            whole(to, source, panel_bytes, pieces, prim, together, count, warp, warps)
        else:
            by_pieces(to, source, panel_bytes, pieces, prim, together, count, warp, warps)

    return jit_device(panels if most == 1 else either)


class Place(NamedTuple):
    """Where Gamma of a quartet goes in shared memory, of kets of up to 8 functions.

    Attributes
    ----------
    first, column : int32
        Bytes behind the first number of the one that a lane copies first, and its cd.
    step, columns : int32
        From there to the one that is 32 numbers further, unless a row of ab ends in between.
    """

    first: i32
    column: i32
    step: i32
    columns: i32


def make_place():
    """Device function: `Place` of a lane for `ncd` functions of a ket."""

    def place(lane, ncd):
        row, rows = quotient(lane, ncd), quotient(i64(32), ncd)
        column, columns = lane - row * ncd, 32 - rows * ncd
        return Place(i32(64 * row + 8 * column), i32(column), i32(64 * rows + 8 * columns), i32(columns))

    return jit_device(place)


def make_fetch(rows_cd, rows_ab, most, cases):
    """Device function: the threads start to copy what a step needs of `count` primitive quartets from n on.

    That is H and r to the shared address `at`, where there is room for `together` panels of `panel_size` numbers, and r
    behind, and Gamma of their shell quartets to the address `of_gamma`. `prim` and `shells` are the primitive ket pair
    and the shell quartet of each lane, and `bits` those of `look`. Gamma is filled up by zeros, which are there before.
    The panels are those of one of the `cases`, if there are any.
    """
    copy, block = make_copy_few(), block_of(most)
    panels = make_copy_panels(rows_cd, most, cases) if cases else jit_device(copy_pieces)
    row_blocks = make_copies(rows_ab, 512)

    def fetch(at, of_gamma, panel, panel_size, together, prim, r, n, count, gamma, nab, ncd, shells, bits, place):
        tid, (warp, warps), panel_bytes = i64(cuda.threadIdx.x), block(), i32(8 * panel_size)
        lane = i32(tid & 31)
        copy(at + together * 8 * panel_size, r.numbers, n * r.stride, count * r.stride, tid, i64(32 * warps))
        to, source, pieces = i32(at + 16 * lane), address_of(panel.h, 2 * lane), i32(panel.steps * rows_cd)
        panels(to, source, panel_bytes, pieces, prim, i32(together), i32(count), warp, warps)
        # of the blocks of 8 cd of the shell quartets, a warp takes every `warps`-th
        turn, pieces = warp, i32((4 * nab - lane + 31) >> 5)
        while bits != 0:
            # the lane of the lowest bit, the first of a shell quartet
            shell = i64(cuda.shfl_sync(-1, shells, cuda.popc((bits & -bits) - 1)))
            bits = i32(bits & (bits - 1))
            if rows_cd == 1:
                if turn == 0:
                    turn, left, column, to = warps, i32(nab * ncd - lane), place.column, i32(of_gamma + place.first)
                    source = address_of(gamma, shell * (nab * ncd) + lane)
                    while left > 0:
                        copy_number(to, source)
                        left, source = i32(left - 32), source + 256
                        to, column = i32(to + place.step), i32(column + place.columns)
                        if column >= ncd:
                            column, to = i32(column - ncd), i32(to + 64 - 8 * ncd)
                turn, of_gamma = i32(turn - 1), of_gamma + 512 * rows_ab
            else:
                source = address_of(gamma, shell * rows_cd * nab * 8 + 2 * lane)
                for _ in range(rows_cd):
                    if turn == 0:
                        turn = warps
                        row_blocks(i32(of_gamma + 16 * lane), source, pieces)
                    turn, source, of_gamma = i32(turn - 1), source + 64 * nab, of_gamma + 512 * rows_ab
        commit_copies()

    return jit_device(fetch)


def reverse_fused(rows_cd, rows_ab, nt, most, slots, blocks, ends, unit):
    """Kernel factory: 8 `rows_cd` and 8 `rows_ab` rows, `nt` blocks of 8 columns a warp; see above for `slots`.

    A block of threads has up to `most` warps. With `ends`, the last of `ends_together`, the first product is code
    without loops, and the words that say where [q|p] is are in registers; without, they are in shared memory.
    """
    wide, size, cases = unit == "dmma16", 64 * rows_cd * rows_ab, ends_together(ends) if ends else ()
    if ends:
        load_words, known_product = make_load_words(nt, ends[-1]), make_known_products(rows_cd, nt, wide, cases)
    else:
        first_product = make_staircase_products(rows_cd, nt, wide, True, True)
    known = bool(ends)
    second_product = make_second_product(rows_cd, rows_ab, nt, wide)
    empty_u, empty_z, add_tile = make_empty(2 * rows_cd * nt), make_empty(2 * rows_ab * nt), make_add_tile(rows_ab, nt)
    column_state, copy, look = make_column_state(nt, False), make_copy_few(), make_look()
    fetch, quartets, wait = make_fetch(rows_cd, rows_ab, most, cases), jit_device(quartets_of), make_wait_copies(0)
    of_block, place_of = block_of(most), make_place()

    def kernel(
        kets: KetPrimitives, panel: Panel, levels: Levels, r: R, words: F64, np8: i64,
        gamma: F64, nab: i64, ncd: i64, z: ReverseSums, first_prim: i64, parts: i64, each: i64, column_blocks: i64,
        together: i64, case: i64,
    ):  # fmt: skip
        shared = cuda.shared.array(0, f64)
        tid, block, (warp, warps) = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x), of_block()
        lane, threads = tid & 31, i64(32 * warps)
        rest = quotient(block, column_blocks)
        own, column_block = quotient(rest, parts), block - rest * column_blocks
        part = rest - own * parts
        n, behind = quartets(kets, own, part, each)
        if n >= behind:
            return
        # shared memory: Gamma, words, then H and r of each slot
        panel_size, base = panel.steps * (rows_cd * 64), shared_address(shared)
        words_first, words_size = slots * together * size, 0 if known else np8 * panel.steps * 16
        ring, slot_size = base + 8 * (words_first + words_size), 8 * together * (panel_size + r.stride)
        row = tid
        while row < words_first:
            shared[row] = 0.0
            row += threads
        place, column = place_of(lane, ncd), (column_block * warps + warp) * nt
        if known:
            own_words = load_words(words, column, np8, panel.steps, lane)
        else:
            copy(base + 8 * words_first, words, 0, words_size, tid, threads)
            state = column_state(column, np8, i64(0), np8, i64(0))
        cuda.syncthreads()
        u, tile, slot, count = empty_u(), empty_z(), i64(0), min(together, behind - n)
        shells, prim_kl, bits = look(kets, n, count)
        next_shells, next_prim_kl, next_bits = shells, prim_kl, bits
        if slots == 2:
            fetch(
                ring, base, panel, panel_size, together, prim_kl, r, n, count, gamma, nab, ncd, shells, bits, place
            )  # fmt: skip
        while n < behind:
            following = min(together, behind - n - count)
            if following > 0:
                next_shells, next_prim_kl, next_bits = look(kets, n + count, following)
            if slots == 2:
                wait()
                cuda.syncthreads()
                if following > 0:
                    fetch(
                        ring + (1 - slot) * slot_size, base + 8 * (1 - slot) * (together * size), panel, panel_size,
                        together, next_prim_kl, r, n + count, following, gamma, nab, ncd, next_shells, next_bits, place,
                    )  # fmt: skip
            else:
                cuda.syncthreads()
                fetch(
                    ring, base, panel, panel_size, together, prim_kl, r, n, count, gamma, nab, ncd, shells, bits, place
                )  # fmt: skip
                wait()
                cuda.syncthreads()
            here, of_gamma = ring + slot * slot_size + 16 * lane, base + 8 * slot * (together * size) + 16 * lane
            here, of_gamma, left, later = i32(here), i32(of_gamma), i32(count), i32(bits >> 1)
            r_here = i32(ring + slot * slot_size + together * 8 * panel_size)
            while left > 0:
                if known:
                    u = known_product(u, own_words, here, r_here, i32(case))
                else:
                    u = first_product(
                        u, here, rows_cd * 512, i32(base + 8 * words_first + 4 * lane), np8 * 128, r_here,
                        state, levels.ends, panel.steps,
                    )  # fmt: skip
                here, r_here, left = i32(here + 8 * panel_size), i32(r_here + 8 * r.stride), i32(left - 1)
                if left == 0 or later & 1:
                    tile = second_product(tile, u, of_gamma)
                    of_gamma = i32(of_gamma + 8 * size)
                    u = empty_u()
                later = i32(later >> 1)
            if slots == 2:
                slot = 1 - slot
            n += count
            count, shells, prim_kl, bits = following, next_shells, next_prim_kl, next_bits
        target = ((part * z.nprim + first_prim + own - z.first_prim) * np8 + column) * z.rows + 2 * (lane & 3)
        add_tile(tile, z.numbers, target * 8 + (lane >> 2), z.rows * 8, np8 - column)

    return Kernel(kernel, (32 * most, blocks))


# launcher


class FusedReverse(NamedTuple):
    """Facts of the variant for a class, then numbers of a launch.

    Those are the warps of a block, primitive quartets of a step, bytes of shared memory, and the place of the ends of
    the class among `ends_together`.
    """

    rows_cd: int
    rows_ab: int
    nt: int
    most: int
    slots: int
    blocks: int
    ends: tuple
    warps: int
    together: int
    shared: int
    case: int

    def column_blocks(self, hermite):
        """Blocks of threads for the Hermite functions of the bra."""
        return -(-blocks_of_8(hermite.nherm) // (self.nt * self.warps))


def ends_together(ends):
    """The `md4.gpu.staircases.level_ends` of classes that share a variant, among these `ends`; it is named by the last.
    """
    return next((several for several in REVERSE.ends_together if ends in several), (ends,))


def shared_bytes(bra, ket, hermite, known, together):
    """Bytes of shared memory: the words, unless they are `known`, and for each slot Gamma, H and r of a step."""
    rows_ab, rows_cd = blocks_of_8(bra.nab), blocks_of_8(ket.nab)
    steps, np8 = blocks_of_8(ket.nherm), blocks_of_8(hermite.nherm)
    quartet = 64 * rows_ab * rows_cd + 64 * steps * rows_cd + r_stride_of(ket, hermite)
    return 0 if known else 128 * np8 * steps, 8 * together * quartet


@cache
def fused_reverse(unit, bra, ket, hermite, room):
    """`FusedReverse` for `ListFacts` of the bra, the ket, and the Hermite functions of the bra; None if none fits.

    `room`: the bytes of shared memory that a block may have.
    """
    rows_ab, rows_cd, np8 = blocks_of_8(bra.nab), blocks_of_8(ket.nab), blocks_of_8(hermite.nherm)
    if turned_split(ket.nab)[0] > 1 or rows_ab + rows_cd > REVERSE.most_fused:
        return None
    few, by_four, by_two = rows_ab + rows_cd <= REVERSE.few_fused, -(-np8 // 4), -(-np8 // 2)
    nt = 4 if few and np8 > 4 and 2 * by_four <= by_two else 2
    warps = min(REVERSE.most_warps, -(-np8 // nt))
    most, words, ends, case = max(3, warps) if warps > 1 else 1, 0, (), 0
    if nt * blocks_of_8(ket.nherm) <= REVERSE.most_words:
        own = tuple(level_ends(ket.h_class, rows_cd, 1).tolist())
        several = ends_together(own)
        ends, case = several[-1], several.index(own)
        words = nt * ends[-1]
    blocks = REVERSE.blocks(2 * nt * (rows_ab + rows_cd + 1), words, most)
    for together, slots in REVERSE.steps:
        least = blocks * most // warps * warps
        least = min(REVERSE.least_warps, least) if together == 1 else least
        fixed, slot = shared_bytes(bra, ket, hermite, bool(ends), together)
        shared = fixed + slots * slot
        if shared <= room and 2 * SHARED_BYTES // shared * warps >= least:
            return FusedReverse(rows_cd, rows_ab, nt, most, slots, blocks, ends, warps, together, shared, case)
    return None


def launch_reverse_fused(context, plan, ab, cd, h, gamma, hermite, r, table, z, parts, each):
    """Adds what the listed primitive quartets give the bra pairs `ab` to Z.

    Parameters
    ----------
    plan : FusedReverse
    ab, cd : md4.engine.PreparedPairs
        A slice of the bra list, and the ket list.
    h : Buffer
        H of the ket list in the form `md4.gpu.h_layout.BRA_TURNED`.
    gamma : Buffer
        Of the shell quartets, one after the other.
    hermite : ListFacts
        The Hermite functions of the bra.
    r : Buffer
        Of the primitive quartets.
    table, z : tuple
        Fields of `md4.gpu.kernels.select_kets.QuartetTable` and `ReverseSums`.
    parts, each : int
        Among how many blocks the quartets of a primitive bra pair are divided, and how many each takes.
    """
    bra, ket, np8 = ab.facts, cd.facts, blocks_of_8(hermite.nherm)
    column_blocks, (_, first, *_, numbers, shells) = plan.column_blocks(hermite), table
    context.launch(
        Variant(reverse_fused, (*plan[:7], context.unit)), column_blocks * parts * ab.nprim, 32 * plan.warps,
        plan.shared,
        (first, numbers, shells), (h, plan.rows_cd, blocks_of_8(ket.nherm)),
        levels_of(context, ket, plan.rows_cd, True),
        (r, r_stride_of(ket, hermite)), context.table(all_words, *words_of(ket, hermite)), np8, gamma, bra.nab, ket.nab,
        z, ab.first_prim, parts, each, column_blocks, plan.together, plan.case,
    )  # fmt: skip
