"""Steps 1 and 2 of gradients in one kernel, for classes whose U would cost more to store than to make.

    U[cd, p] = sum_q H[cd, q] [q|p]          Z[ab, p] += sum_cd Gamma[ab, cd] U[cd, p]

A block of threads takes a primitive bra pair, and goes through the ket pairs that count with it
(`md4.gpu.kernels.select_kets`). Its warps share the p among them; each keeps its columns of Z in registers, and so it
does those of U of one ket pair. A turned tile of U is, as it comes out, the left operand of the second product
(`md4.gpu.emit.tile_products`), on whose right is Gamma (`md4.gpu.kernels.reverse_sums`).

A step of the loop takes several primitive quartets, `together`, which wait for memory and for each other only once.
Their H and their r come to shared memory, where all threads make Gamma of their ket pairs. With two `slots` this is
begun one step ahead. The words that say where [q|p] is in r stay in shared memory (`md4.gpu.gather_words`).
"""

from functools import cache
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64, cuda, f64, i32, i64, jit_device, types
from md4.gpu.emit.instructions import commit_copies, make_empty, make_wait_copies, shared_address
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.tile_products import make_column_state, make_staircase_products, tile_kind, tile_products
from md4.gpu.emit.values import i32 as INT32
from md4.gpu.emit.values import word
from md4.gpu.gather_words import all_words, words_of
from md4.gpu.kernels.groups import Levels, Panel, levels_of
from md4.gpu.kernels.reverse_sums import Densities, FunctionPairs, ReverseSums, make_add_tile
from md4.gpu.kernels.ring import make_copy_range
from md4.gpu.r_layout import r_stride_of
from md4.gpu.tiles import blocks_of_8, turned_split
from md4.gpu.tuning import REVERSE, SHARED_BYTES


class BraPrimitives(NamedTuple):
    """The primitive bra pairs of a chunk.

    Attributes
    ----------
    owner, start : int64 array
        The pair of each primitive pair of the whole list, and the range of each pair.
    first_prim : int64
        First primitive pair of the chunk.
    """

    owner: I64
    start: I64
    first_prim: i64


class KetPrimitives(NamedTuple):
    """The primitive ket pairs of the primitive quartets of a chunk.

    Attributes
    ----------
    owner : int64 array
        The pair of each primitive pair of the whole list.
    first, numbers
        `first` and `ket` of `md4.gpu.kernels.select_kets.QuartetTable`.
    """

    owner: I64
    first: I64
    numbers: I32


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


@cache
def make_look():
    """Device function: `count` primitive quartets from n on, a lane each: (ket pair, primitive pair, bits of a warp).

    A bit is set for each of them that is the first of its ket pair.
    """

    def look(kets, n, count):
        lane = i64(cuda.threadIdx.x) & 31
        prim = i64(kets.numbers[n + min(lane, count - 1)])
        kl = kets.owner[prim]
        before = cuda.shfl_up_sync(-1, kl, 1)
        return kl, prim, i64(cuda.ballot_sync(-1, lane < count and (lane == 0 or kl != before)))

    return jit_device(look)


def make_gamma(rows_ab, size, threads, together):
    """Device function: the threads make Gamma of a bra pair with the ket pairs `kl` of the lanes whose `bits` are set.

    They stand one behind the other from the place `first` of `gamma` on, `size` numbers each. `places` has the
    functions a and b of the rows, then those of c and d, in the order of the tile, counted from the first of their
    shells. What stands for padding is zero before, and not written. `chosen` has room for the ket pairs.
    """

    def fill(gamma, first, places, chosen, a0, b0, nab, ket, kl, bits, ncd, densities):
        tid, nao, numbers = i64(cuda.threadIdx.x), densities.nao, densities.numbers
        lane, own_chosen, count = tid & 31, (tid >> 5) * together, nab * ncd
        if (bits >> lane) & 1:
            chosen[own_chosen + cuda.popc(bits & ((i64(1) << lane) - 1))] = kl
        cuda.syncwarp()
        n, end = tid, cuda.popc(bits & 0xFFFFFFFF) * count
        while n < end:
            which = quotient(n, count)
            row = quotient(n - which * count, ncd)
            own = n - which * count - row * ncd
            c0, d0 = ket.aos[chosen[own_chosen + which], 0], ket.aos[chosen[own_chosen + which], 1]
            weight = (1.0 if a0 == b0 else 2.0) * (1.0 if c0 == d0 else 2.0)
            a, b = a0 + places[2 * row], b0 + places[2 * row + 1]
            c, d = c0 + places[2 * (8 * rows_ab + own)], d0 + places[2 * (8 * rows_ab + own) + 1]
            value = 0.0
            for s in range(densities.coulomb.size):
                of_a, of_b = (s * nao + a) * nao, (s * nao + b) * nao
                j, half_k = densities.coulomb[s], -0.5 * densities.exchange[s]
                if j != 0.0:
                    value += j * (numbers[of_a + b] * numbers[(s * nao + c) * nao + d])
                if half_k != 0.0:
                    value += half_k * (numbers[of_a + c] * numbers[of_b + d] + numbers[of_a + d] * numbers[of_b + c])
            gamma[first + which * size + (own >> 3) * (64 * rows_ab) + 8 * row + (own & 7)] = weight * value
            n += threads
        cuda.syncwarp()

    return jit_device(fill)


def make_fetch(threads, together):
    """Device function: the threads start to copy H and r of `count` primitive quartets from n on to shared memory.

    There are panels of `panel_size` numbers, `together` of them, and r behind. `prim` is the primitive ket pair of each
    lane.
    """
    copy = make_copy_range(threads)

    def fetch(address, panel, panel_size, prim, r, n, count):
        tid = i64(cuda.threadIdx.x)
        copy(address + together * 8 * panel_size, r.numbers, n * r.stride, count * r.stride, tid)
        for k in range(count):
            copy(address + k * 8 * panel_size, panel.h, cuda.shfl_sync(-1, prim, k) * panel_size, panel_size, tid)
        commit_copies()

    return jit_device(fetch)


def reverse_fused(rows_cd, rows_ab, nt, warps, together, slots, blocks, unit):
    """Kernel factory: 8 `rows_cd` and 8 `rows_ab` rows, `nt` blocks of 8 columns a warp; see above for the others."""
    threads, wide, size = 32 * warps, unit == "dmma16", 64 * rows_cd * rows_ab
    first_product = make_staircase_products(rows_cd, nt, wide, True, True)
    second_product = make_second_product(rows_cd, rows_ab, nt, wide)
    empty_u, empty_z, add_tile = make_empty(2 * rows_cd * nt), make_empty(2 * rows_ab * nt), make_add_tile(rows_ab, nt)
    column_state, copy, look = make_column_state(nt, False), make_copy_range(threads), make_look()
    make, fetch = make_gamma(rows_ab, size, threads, together), make_fetch(threads, together)
    wait, all_places, all_chosen = make_wait_copies(0), 16 * (rows_ab + rows_cd), warps * together

    def kernel(
        bra: FunctionPairs, prims: BraPrimitives, panel: Panel, levels: Levels, ket: FunctionPairs, kets: KetPrimitives,
        r: R, words: F64, np8: i64, densities: Densities, z: ReverseSums, column_blocks: i64,
    ):  # fmt: skip
        shared, places = cuda.shared.array(0, f64), cuda.shared.array(all_places, types.int32)
        chosen = cuda.shared.array(all_chosen, types.int64)
        tid, block = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        lane, warp = tid & 31, tid >> 5
        column_block, rest = block % column_blocks, block // column_blocks
        part, own = rest % z.parts, rest // z.parts
        prim = prims.first_prim + own
        ab = prims.owner[prim]
        # the quartets of this primitive bra pair, as many as of the other ones of its pair, and of them those of a part
        n, nprim = kets.first[ab - bra.first], prims.start[ab + 1] - prims.start[ab]
        count = quotient(kets.first[ab - bra.first + 1] - n, nprim)
        n += (prim - prims.start[ab]) * count
        each = quotient(count + z.parts - 1, z.parts)
        behind = n + min(count, (part + 1) * each)
        n += part * each
        if n >= behind:
            return
        a0, b0, nab, ncd = bra.aos[ab, 0], bra.aos[ab, 1], bra.na * bra.nb, ket.na * ket.nb
        row = tid
        while row < nab:
            of_a = quotient(row, bra.nb)
            places[2 * row], places[2 * row + 1] = of_a, row - of_a * bra.nb
            row += threads
        row = tid
        while row < ncd:
            cd = i64(levels.rows[row])
            of_c = quotient(cd, ket.nb)
            places[2 * (8 * rows_ab + row)], places[2 * (8 * rows_ab + row) + 1] = of_c, cd - of_c * ket.nb
            row += threads
        # shared memory: Gamma, words, then H and r of each slot
        panel_size, base = panel.steps * (rows_cd * 64), shared_address(shared)
        words_first, words_size = slots * together * size, np8 * panel.steps * 16
        ring, slot_size = base + 8 * (words_first + words_size), 8 * together * (panel_size + r.stride)
        row = tid
        while row < words_first:
            shared[row] = 0.0
            row += threads
        copy(base + 8 * words_first, words, 0, words_size, tid)
        cuda.syncthreads()
        column = (column_block * warps + warp) * nt
        state = column_state(column, np8, i64(0), np8, i64(0))
        u, tile, slot, count = empty_u(), empty_z(), i64(0), min(i64(together), behind - n)
        kl, prim_kl, bits = look(kets, n, count)
        next_kl, next_prim_kl, next_bits = kl, prim_kl, bits
        if slots == 2:
            fetch(ring, panel, panel_size, prim_kl, r, n, count)
            make(shared, i64(0), places, chosen, a0, b0, nab, ket, kl, bits, ncd, densities)
        while n < behind:
            following = min(i64(together), behind - n - count)
            if following > 0:
                next_kl, next_prim_kl, next_bits = look(kets, n + count, following)
            if slots == 2:
                wait()
                cuda.syncthreads()
                if following > 0:
                    fetch(ring + (1 - slot) * slot_size, panel, panel_size, next_prim_kl, r, n + count, following)
                    make(
                        shared, (1 - slot) * (together * size), places, chosen, a0, b0, nab, ket, next_kl, next_bits,
                        ncd, densities,
                    )  # fmt: skip
            else:
                cuda.syncthreads()
                fetch(ring, panel, panel_size, prim_kl, r, n, count)
                make(shared, i64(0), places, chosen, a0, b0, nab, ket, kl, bits, ncd, densities)
                wait()
                cuda.syncthreads()
            here, gamma = ring + slot * slot_size + 16 * lane, base + 8 * slot * (together * size) + 16 * lane
            r_here = ring + slot * slot_size + together * 8 * panel_size
            for k in range(count):
                u = first_product(
                    u, i32(here), rows_cd * 512, i32(base + 8 * words_first + 4 * lane), np8 * 128, i32(r_here), state,
                    levels.ends, panel.steps,
                )  # fmt: skip
                here += 8 * panel_size
                r_here += 8 * r.stride
                if k + 1 == count or (bits >> (k + 1)) & 1:
                    tile = second_product(tile, u, i32(gamma))
                    gamma += 8 * size
                    u = empty_u()
            if slots == 2:
                slot = 1 - slot
            n += count
            count, kl, prim_kl, bits = following, next_kl, next_prim_kl, next_bits
        target = ((part * z.nprim + prim - z.first_prim) * np8 + column) * z.rows + 2 * (lane & 3)
        add_tile(tile, z.numbers, target * 8 + (lane >> 2), z.rows * 8, np8 - column)

    return Kernel(kernel, (threads, blocks))


# launcher


class FusedReverse(NamedTuple):
    """Facts of the variant for a class, and its bytes of shared memory."""

    rows_cd: int
    rows_ab: int
    nt: int
    warps: int
    together: int
    slots: int
    blocks: int
    shared: int


def shared_bytes(bra, ket, hermite, together):
    """Bytes of shared memory: the words, and for each slot Gamma, H and r of the quartets of a step."""
    rows_ab, rows_cd = blocks_of_8(bra.nab), blocks_of_8(ket.nab)
    steps, np8 = blocks_of_8(ket.nherm), blocks_of_8(hermite.nherm)
    quartet = 64 * rows_ab * rows_cd + 64 * steps * rows_cd + r_stride_of(ket, hermite)
    return 128 * np8 * steps, 8 * together * quartet


@cache
def fused_reverse(unit, bra, ket, hermite, room):
    """`FusedReverse` for `ListFacts` of the bra, the ket, and the Hermite functions of the bra; None if none fits.

    `room`: the bytes of shared memory that a block may have.
    """
    rows_ab, rows_cd, np8 = blocks_of_8(bra.nab), blocks_of_8(ket.nab), blocks_of_8(hermite.nherm)
    if turned_split(ket.nab)[0] > 1 or rows_ab + rows_cd > REVERSE.most_fused:
        return None
    nt = 4 if rows_ab + rows_cd <= REVERSE.few_fused and np8 > 2 else 2
    warps = min(REVERSE.most_warps, -(-np8 // nt))
    blocks = REVERSE.blocks(2 * nt * (rows_ab + rows_cd), warps)
    for together, slots in REVERSE.steps:
        least = min(REVERSE.least_warps, blocks * warps) if together == 1 else blocks * warps
        fixed, slot = shared_bytes(bra, ket, hermite, together)
        shared, static = fixed + slots * slot, 64 * (rows_ab + rows_cd) + 8 * warps * together
        if shared + static <= room and 2 * SHARED_BYTES // shared * warps >= least:
            return FusedReverse(rows_cd, rows_ab, nt, warps, together, slots, blocks, shared)
    return None


def launch_reverse_fused(context, plan, aos, ab, cd, h, hermite, r, table, densities, z):
    """Adds what the listed primitive quartets give the bra pairs `ab` to Z.

    Parameters
    ----------
    plan : FusedReverse
    aos : tuple of Buffer
        First AOs of the bra and of the ket list.
    ab, cd : md4.engine.PreparedPairs
        A slice of the bra list, and the ket list.
    h : Buffer
        H of the ket list in the form `md4.gpu.h_layout.BRA_TURNED`.
    hermite : ListFacts
        The Hermite functions of the bra.
    r : Buffer
        Of the primitive quartets.
    table, densities, z : tuple
        Fields of `md4.gpu.kernels.select_kets.QuartetTable`, `Densities` and `ReverseSums`.
    """
    bra, ket, np8 = ab.facts, cd.facts, blocks_of_8(hermite.nherm)
    column_blocks, (first, _, numbers) = -(-np8 // (plan.nt * plan.warps)), table
    context.launch(
        Variant(reverse_fused, (*plan[:7], context.unit)), column_blocks * z[-1] * ab.nprim, 32 * plan.warps,
        plan.shared,
        (aos[0], ab.first, bra.na, bra.nb), (ab.data.owner, ab.data.start, ab.first_prim),
        (h, plan.rows_cd, blocks_of_8(ket.nherm)), levels_of(context, ket, plan.rows_cd, True),
        (aos[1], cd.first, ket.na, ket.nb), (cd.data.owner, first, numbers), (r, r_stride_of(ket, hermite)),
        context.table(all_words, *words_of(ket, hermite)), np8, densities, z, column_blocks,
    )  # fmt: skip
