"""Steps 1 and 2 of gradients in one kernel, for classes whose U would cost more to store than to make.

    U[cd, p] = sum_q H[cd, q] [q|p]          Z[ab, p] += sum_cd Gamma[ab, cd] U[cd, p]

A block of threads takes a primitive bra pair, and goes through the ket pairs that count with it
(`md4.gpu.kernels.select_kets`). Its warps share the p among them; each keeps its columns of Z in registers, and so it
does those of U of one ket pair. A turned tile of U is, as it comes out, the left operand of the second product
(`md4.gpu.emit.tile_products`), on whose right is Gamma (`md4.gpu.kernels.gamma_blocks`).

A step of the loop takes several primitive quartets, `together`, which wait for memory and for each other only once.
Their H, their r and Gamma of their shell quartets come to shared memory: a warp copies the H of every so many of them,
and every so many blocks of Gamma. With two `slots` this is begun one step ahead. How many warps and slots there are is
known at a launch only.
The words that say where [q|p] is in r (`md4.gpu.gather_words`) stay in registers, or in shared memory. Kets of few
functions, whose H has unlike staircases, share a variant, which has code for each of them.

Quartets whose bounds are small are taken by variants for the unit `TF32`: H, r, Gamma and U have 10 bits behind the
point there, sums are in FP32, and Z in memory is in FP64 as ever.
"""

from functools import cache
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64, cuda, f64, i32, i64, jit_device, u32, u64
from md4.gpu.emit.instructions import (
    address_of,
    commit_copies,
    copy_pair,
    make_copies,
    make_empty,
    make_wait_copies,
    rounded_to_tf32,
    shared_address,
    shared_int,
    shared_real,
)
from md4.gpu.emit.scalars import address_at, quotient
from md4.gpu.emit.tile_products import (
    block_of_8,
    make_column_state,
    make_known_products,
    make_load_words,
    make_staircase_products,
    single_block_of_8,
    tile_kind,
    tile_products,
)
from md4.gpu.emit.values import FP32, FP64, precision_of, word
from md4.gpu.emit.values import i32 as INT32
from md4.gpu.gather_words import all_words, words_of
from md4.gpu.h_layout import blocks_of_h
from md4.gpu.kernels.gamma_blocks import gamma_size
from md4.gpu.kernels.groups import Levels, Panel, levels_of
from md4.gpu.kernels.reverse_sums import ReverseSums, make_add_tile
from md4.gpu.r_layout import r_stride_of
from md4.gpu.staircases import level_ends
from md4.gpu.tiles import blocks_of_8, turned_split
from md4.gpu.tuning import REVERSE, SHARED_BYTES

# The unit of quartets with small bounds.
TF32 = "tf32"


class KetPrimitives(NamedTuple):
    """The primitive quartets of a chunk, of one kind: `first_quartets` from the first one of that kind on, `ket_prims`
    and `shells` of `md4.gpu.kernels.select_kets.QuartetTable`."""

    first: I64
    numbers: I32
    shells: I32


class R(NamedTuple):
    """r of the primitive quartets of the lists, `stride` numbers each."""

    numbers: F64
    stride: i64


@cache
def make_second_product(rows_cd, rows_ab, nt, unit):
    """Intrinsic (Z, U, address, row_bytes) -> Z + Gamma U, all turned tiles.

    Gamma is in shared memory, the lane's place in it at `address`, in blocks of 8 cd [block of cd][ab][cd]. A row ab
    has the bytes of 8 numbers, or where one block has fewer than 8 cd, `row_bytes`, as many as these take. What a lane
    reads behind its row is finite, and U of such cd is zero.
    """
    single, block_bytes = unit == TF32, 64 * number_bytes(unit)
    z_tile, u_tile = tile_kind(rows_ab, nt, single), tile_kind(rows_cd, nt, single)
    of_blocks = single_block_of_8 if single else block_of_8

    @word(z_tile, z_tile, u_tile, INT32, INT32)
    def second_product(z, u, address, row_bytes):
        def packed(address, j):
            here = address + row_bytes * (8 * j)
            if single:
                return [shared_int(here), shared_int(here + 4)]
            return [shared_real(here), shared_real(here, 8)]

        right = of_blocks if rows_cd > 1 else packed
        multiply, blocks = tile_products(rows_ab, nt, unit == "dmma16", True, right, single)
        for j in range(rows_cd):
            left = [x for i in range(j, nt // 2 * rows_cd, rows_cd) for x in u[4 * i : 4 * i + 4]]
            left = list(map(rounded_to_tf32, left)) if single else left
            z = multiply(z, address + block_bytes * rows_ab * j, left, blocks)
        return z

    return second_product


def register_needs(rows_cd, rows_ab, nt, ends, unit):
    """Registers of a thread, about: those of U, Z and an operand, the words, and others."""
    numbers = nt * (rows_ab + rows_cd + 1) * number_bytes(unit) // 2
    return numbers + (nt * ends[-1] + REVERSE.registers[0] if ends else REVERSE.registers[1])


def number_bytes(unit):
    """Bytes of a number of H, r and Gamma."""
    return (FP32 if unit == TF32 else FP64).bytes


def quartets_of(kets, own, part, each):
    """(first, end) of the quartets of a primitive bra pair of a chunk, of which a part has `each` (device function)."""
    first, end = kets.first[2 * own] - kets.first[0], kets.first[2 * own + 2] - kets.first[0]
    return first + part * each, min(end, first + (part + 1) * each)


def look(kets, n, count):
    """Of `count` primitive quartets from n on, one a lane: (shell quartet, primitive ket pair, bits) (device function).

    A bit is set for each of them that is the first of its shell quartet.
    """
    lane = i32(cuda.threadIdx.x & 31)
    own = u64(u32(n + min(lane, i32(count - 1))))
    shells = kets.shells[own]
    before = cuda.shfl_up_sync(-1, shells, 1)
    bits = cuda.ballot_sync(-1, lane < count and (lane == 0 or shells != before))
    return shells, kets.numbers[own], i32(bits)


def copy_run(to, source, pairs, tid, threads):
    """The threads start to copy so many successive pairs of numbers to a shared address (device function).

    The first pairs of a thread come from the global address `source` and go to `to`.
    """
    n, step = i32(tid), 16 * i64(threads)
    while n < pairs:
        copy_pair(to, source)
        n, to, source = i32(n + threads), i32(to + step), source + step


def copy_pieces(to, source, panel_bytes, pieces, prim, together, count, warp, warps):
    """Starts to copy the panels of `count` primitive pairs: of their pieces a warp takes every `warps`-th.

    A device function. `prim` is the primitive pair of each lane; a piece has 512 bytes, the lane's are at `source` in
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


def make_copy_panels(rows_cd, cases, unit):
    """Device function: as `copy_pieces`, where a panel has `rows_cd` blocks for each step of one of the `cases`.

    A warp takes whole panels, in code without loops, unless half of the warps or more would have none.
    """
    by_pieces, nbytes = jit_device(copy_pieces), number_bytes(unit)
    least, largest = (-(-rows_cd * case[-1] * nbytes // 8) for case in (cases[0], cases[-1]))
    copies = make_copies(largest, 512, least)

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

    return jit_device(either)


def make_fetch(rows_cd, rows_ab, cases, unit):
    """Device function: the threads start to copy what a step needs of `count` primitive quartets from n on.

    That is H and r to the shared address `at`, where there is room for `together` panels of `panel_size` numbers, and r
    behind, and Gamma of their shell quartets, whose blocks of 8 cd have `block` numbers, to the address `of_gamma`.
    `prim` and `shells` are the primitive ket pair and the shell quartet of each lane, and `bits` those of `look`. The
    panels are those of one of the `cases`, if there are any.
    """
    run, number = jit_device(copy_run), number_bytes(unit)
    panels = make_copy_panels(rows_cd, cases, unit) if cases else jit_device(copy_pieces)
    gamma_step, row_blocks = 64 * number * rows_ab, make_copies(-(-rows_ab * number // 8), 512)

    def fetch(at, of_gamma, panel, panel_size, together, prim, r, n, count, gamma, block, shells, bits):
        tid, warp, warps = i32(cuda.threadIdx.x), i32(cuda.threadIdx.x >> 5), i32(cuda.blockDim.x >> 5)
        lane, panel_bytes, r_bytes = i32(tid & 31), i32(number * panel_size), i32(number * r.stride)
        source = address_at(address_of(r.numbers, i64(2 * tid)), n, r_bytes)
        run(i32(at + together * panel_bytes + 16 * tid), source, i32(count * r_bytes) >> 4, tid, i32(32 * warps))
        to, source, pieces = i32(at + 16 * lane), address_of(panel.h, i64(2 * lane)), i32(panel_bytes >> 9)
        panels(to, source, panel_bytes, pieces, prim, together, count, warp, warps)
        # of the blocks of 8 cd of the shell quartets, a warp takes every `warps`-th
        turn, to, pieces = warp, i32(of_gamma + 16 * lane), i32(((number * block >> 4) - lane + 31) >> 5)
        of_all, shell_bytes = address_of(gamma, i64(2 * lane)), number * rows_cd * block
        while bits != 0:
            # the lane of the lowest bit, the first of a shell quartet
            shell = cuda.shfl_sync(-1, shells, cuda.popc(i32((bits & -bits) - 1)))
            bits, source = i32(bits & (bits - 1)), address_at(of_all, shell, shell_bytes)
            for _ in range(rows_cd):
                if turn == 0:
                    turn = warps
                    row_blocks(to, source, pieces)
                turn, source, to = i32(turn - 1), source + number * block, i32(to + gamma_step)
        commit_copies()

    return jit_device(fetch)


def reverse_fused(rows_cd, rows_ab, nt, ends, unit):
    """Kernel factory: 8 `rows_cd` and 8 `rows_ab` rows, 8 `nt` columns of a warp; `unit` as of the device, or `TF32`.

    With `ends`, the last of `ends_together`, the first product is code without loops, and the words that say where
    [q|p] is are in registers; without, they are in shared memory.
    """
    wide, single, number, size = unit == "dmma16", unit == TF32, number_bytes(unit), 64 * rows_cd * rows_ab
    cases, precision = ends_together(ends) if ends else (), precision_of(single)
    if ends:
        load_words = make_load_words(nt, ends[-1], single)
        known_product = make_known_products(rows_cd, nt, wide, cases, single)
    else:
        first_product = make_staircase_products(rows_cd, nt, wide, True, True)
    known = bool(ends)
    second_product, add_tile = make_second_product(rows_cd, rows_ab, nt, unit), make_add_tile(rows_ab, nt, single)
    empty_u, empty_z = (make_empty(2 * rows * nt, precision) for rows in (rows_cd, rows_ab))
    column_state, run, look_at = make_column_state(nt, False), jit_device(copy_run), jit_device(look)
    fetch, quartets = make_fetch(rows_cd, rows_ab, cases, unit), jit_device(quartets_of)
    wait, blocks_in_panel = make_wait_copies(0), jit_device(blocks_of_h)

    def kernel(
        kets: KetPrimitives, panel: Panel, levels: Levels, r: R, words: F64, np8: i64,
        gamma: F64, block: i64, row_bytes: i64, z: ReverseSums, first_prim: i64, parts: i64, each: i64,
        column_blocks: i64, together: i64, slots: i64, case: i64,
    ):  # fmt: skip
        shared = cuda.shared.array(0, f64)
        tid, place, threads = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x), i64(cuda.blockDim.x)
        lane, warp, warps = tid & 31, tid >> 5, threads >> 5
        rest = quotient(place, column_blocks)
        own, column_block = quotient(rest, parts), place - rest * column_blocks
        part = rest - own * parts
        n, behind = quartets(kets, own, part, each)
        if n >= behind:
            return
        n, left = i32(n), i32(behind - n)
        # shared memory: Gamma, words, then H and r of each slot
        panel_size, base = 64 * blocks_in_panel(panel.steps * rows_cd, single), shared_address(shared)
        words_first, words_size = (number * slots * together * size) >> 3, 0 if known else np8 * panel.steps * 16
        ring, slot_size = base + 8 * (words_first + words_size), number * together * (panel_size + r.stride)
        row = tid
        while row < words_first:
            shared[row] = 0.0
            row += threads
        column = (column_block * warps + warp) * nt
        if known:
            own_words = load_words(words, column, np8, panel.steps, lane)
        else:
            source = address_of(words, 2 * tid)
            run(i32(base + 8 * words_first + 16 * tid), source, i32(words_size >> 1), i32(tid), i32(threads))
            state = column_state(column, np8, i64(0), np8, i64(0))
        cuda.syncthreads()
        steps = i32(together)
        tile, slot, count, bits, of_slot = empty_z(), i64(0), i32(0), i32(0), i32(0)
        of_lane = i32(row_bytes * (lane >> 2) + 2 * number * (lane & 3))
        shells, prim_kl = i32(0), i32(0)
        # the `count` primitive quartets of a slot are fetched in the turn before, or with one slot in the same turn
        while i32(count + left) > 0:
            following = min(steps, left)
            if following > 0:
                shells, prim_kl, bits = look_at(kets, n, following)
            wait()
            cuda.syncthreads()
            other = (slots - 1) * (1 - slot)
            if following > 0:
                fetch(
                    ring + other * slot_size, base + number * other * (together * size), panel, panel_size, steps,
                    prim_kl, r, n, following, gamma, block, shells, bits,
                )  # fmt: skip
            if slots == 1:
                wait()
                cuda.syncthreads()
                count, of_slot = following, bits
            here = ring + slot * slot_size + 2 * number * lane
            of_gamma = base + number * slot * (together * size) + of_lane
            here, of_gamma, later = i32(here), i32(of_gamma), i32(of_slot >> 1)
            r_here = i32(ring + slot * slot_size + together * number * panel_size)
            while count > 0:
                # the primitive quartets of a shell quartet
                u, more = empty_u(), True
                while more:
                    if known:
                        u = known_product(u, own_words, here, r_here, i32(case))
                    else:
                        u = first_product(
                            u, here, rows_cd * 512, i32(base + 8 * words_first + 4 * lane), np8 * 128, r_here,
                            state, levels.ends, panel.steps,
                        )  # fmt: skip
                    here, r_here = i32(here + number * panel_size), i32(r_here + number * r.stride)
                    count = i32(count - 1)
                    more, later = count > 0 and later & 1 == 0, i32(later >> 1)
                tile = second_product(tile, u, of_gamma, i32(row_bytes))
                of_gamma = i32(of_gamma + number * size)
            n, left, slot = i32(n + following), i32(left - following), other
            if slots == 2:
                count, of_slot = following, bits
        target = ((part * z.nprim + first_prim + own - z.first_prim) * np8 + column) * z.rows + 2 * (lane & 3)
        add_tile(tile, z.numbers, target * 8 + (lane >> 2), z.rows * 8, np8 - column)

    return Kernel(kernel, registers=REVERSE.registers_for(register_needs(rows_cd, rows_ab, nt, ends, unit)))


# launcher


class FusedReverse(NamedTuple):
    """Facts of the variant for a class, then numbers of a launch.

    Those are the warps of a block, primitive quartets of a step, slots, bytes of shared memory, and the place of the
    ends of the class among `ends_together`.
    """

    rows_cd: int
    rows_ab: int
    nt: int
    ends: tuple
    unit: str
    warps: int
    together: int
    slots: int
    shared: int
    case: int

    @property
    def variant(self):
        """The facts of the variant."""
        return self[:5]

    def column_blocks(self, hermite):
        """Blocks of threads for the Hermite functions of the bra."""
        return -(-blocks_of_8(hermite.nherm) // (self.nt * self.warps))


def ends_together(ends):
    """The `md4.gpu.staircases.level_ends` of classes that share a variant, among these `ends`; it is named by the last.
    """
    return next((several for several in REVERSE.ends_together if ends in several), (ends,))


def filled_rows(nab):
    """Blocks of 8 rows of the variant that takes so many functions of the bra; the last ones may be empty."""
    blocks = blocks_of_8(nab)
    return next((rows for rows in REVERSE.bra_rows if rows >= blocks), blocks)


def shared_bytes(unit, bra, ket, hermite, known, together):
    """Bytes of shared memory: the words, unless they are `known`, and for each slot Gamma, H and r of a step."""
    rows_ab, rows_cd, single = filled_rows(bra.nab), blocks_of_8(ket.nab), unit == TF32
    steps, np8 = blocks_of_8(ket.nherm), blocks_of_8(hermite.nherm)
    quartet = 64 * rows_ab * rows_cd + blocks_of_h(rows_cd * steps, single) * 64 + r_stride_of(ket, hermite, single)
    return 0 if known else 128 * np8 * steps, number_bytes(unit) * together * quartet


@cache
def fused_reverse(unit, bra, ket, hermite, room):
    """`FusedReverse` for `ListFacts` of the bra, the ket, and the Hermite functions of the bra; None if none fits.

    `room`: the bytes of shared memory that a block may have. In `TF32` a warp has four blocks of columns, if there are
    more than two, as it reads less H and Gamma for each.
    """
    single, np8 = unit == TF32, blocks_of_8(hermite.nherm)
    nt = 4 if single and np8 > 2 else 2
    rows_ab, rows_cd = filled_rows(bra.nab), blocks_of_8(ket.nab)
    if turned_split(ket.nab)[0] > 1 or rows_ab + rows_cd > (REVERSE.most_singles if single else REVERSE.most_fused):
        return None
    warps = min(REVERSE.most_warps, -(-np8 // nt))
    ends, case = (), 0
    if nt * blocks_of_8(ket.nherm) <= REVERSE.most_words * (2 if single else 1):
        own = tuple(level_ends(ket.h_class, rows_cd, 1).tolist())
        several = ends_together(own)
        ends, case = several[-1], several.index(own)
    if single and not ends:
        return None
    resident = REVERSE.resident_warps(register_needs(rows_cd, rows_ab, nt, ends, unit)) // warps * warps
    for together, slots in REVERSE.steps[: -1 if single else None]:
        least = min(REVERSE.least_warps, resident) if together == 1 else resident
        fixed, slot = shared_bytes(unit, bra, ket, hermite, bool(ends), together)
        shared = fixed + slots * slot
        if shared <= room and 2 * SHARED_BYTES // shared * warps >= least:
            return FusedReverse(rows_cd, rows_ab, nt, ends, unit, warps, together, slots, shared, case)
    return None


def launch_reverse_fused(context, plan, ab, cd, h, gamma, hermite, r, kets, z, parts, each):
    """Adds what the listed primitive quartets give the bra pairs `ab` to Z.

    Parameters
    ----------
    plan : FusedReverse
    ab, cd : md4.engine.PreparedPairs
        A slice of the bra list, and the ket list.
    h : Buffer
        H of the ket list in the form `md4.gpu.h_layout.BRA_TURNED`, or `BRA_SINGLES` in `TF32`.
    gamma : Buffer
        Of the shell quartets, one after the other.
    hermite : ListFacts
        The Hermite functions of the bra.
    r : Buffer
        Of the primitive quartets.
    kets, z : tuple
        Fields of `KetPrimitives` and `ReverseSums`.
    parts, each : int
        Among how many blocks the quartets of a primitive bra pair are divided, and how many each takes.
    """
    bra, ket, np8, single = ab.facts, cd.facts, blocks_of_8(hermite.nherm), plan.unit == TF32
    column_blocks = plan.column_blocks(hermite)
    context.launch(
        Variant(reverse_fused, plan.variant), column_blocks * parts * ab.nprim, 32 * plan.warps, plan.shared,
        kets, (h, plan.rows_cd, blocks_of_8(ket.nherm)), levels_of(context, ket, plan.rows_cd, True),
        (r, r_stride_of(ket, hermite, single)), context.table(all_words, *words_of(ket, hermite)), np8, gamma,
        gamma_size(bra, ket, False, single) // plan.rows_cd, number_bytes(plan.unit) * min(8, ket.nab),
        z, ab.first_prim, parts, each, column_blocks, plan.together, plan.slots, plan.case,
    )  # fmt: skip
