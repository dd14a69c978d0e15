"""Steps 1 and 2 of gradients in one kernel, for classes whose U would cost more to store than to make.

    U[cd, p] = sum_q H[cd, q] [q|p]          Z[ab, p] += sum_cd Gamma[ab, cd] U[cd, p]

A block of threads takes a primitive bra pair, and goes through the ket pairs that count with it
(`md4.gpu.kernels.select_kets`). Its warps share the p among them; each keeps its columns of Z in registers, and so it
does those of U of one ket pair. A turned tile of U is, as it comes out, the left operand of the second product
(`md4.gpu.emit.tile_products`), on whose right is Gamma (`md4.gpu.kernels.reverse_sums`).

A step of the loop is a primitive pair of a ket pair. Its H and its r come to shared memory, and with the first one of
a ket pair its Gamma is made there, by all threads. With two `slots` this is begun one step ahead. The words that say
where [q|p] is in r stay in shared memory (`md4.gpu.gather_words`).
"""

from functools import cache
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I64, cuda, f64, i32, i64, jit_device, types
from md4.gpu.emit.instructions import commit_copies, make_empty, make_wait_copies, shared_address
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.tile_products import make_column_state, make_staircase_products, tile_kind, tile_products
from md4.gpu.emit.values import i32 as INT32
from md4.gpu.emit.values import word
from md4.gpu.gather_words import all_words, words_of
from md4.gpu.kernels.groups import Levels, Panel, levels_of
from md4.gpu.kernels.reverse_sums import Densities, FunctionPairs, ReverseSums, make_add_tile
from md4.gpu.kernels.ring import make_copy_range
from md4.gpu.kernels.select_kets import KetLists
from md4.gpu.r_layout import r_stride_of
from md4.gpu.tiles import blocks_of_8, turned_split
from md4.gpu.tuning import REVERSE, SHARED_BYTES


class BraPrimitives(NamedTuple):
    """The primitive bra pairs of a chunk.

    Attributes
    ----------
    owner, start : int64 array
        The pair of each primitive pair of the whole list, and the range of each pair.
    first, first_prim : int64
        First pair and first primitive pair of the chunk.
    """

    owner: I64
    start: I64
    first: i64
    first_prim: i64


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


def make_gamma(rows_ab, threads):
    """Device function: the threads make Gamma of a bra pair with the ket pair `kl`, at the place `first` of `gamma`.

    `places` has the functions a and b of the rows, then those of c and d, in the order of the tile, counted from the
    first of their shells. What stands for padding is zero before, and not written.
    """
    size_ab = 8 * rows_ab

    def fill(gamma, first, places, a0, b0, nab, ket, kl, ncd, densities):
        tid, nao, numbers = i64(cuda.threadIdx.x), densities.nao, densities.numbers
        c0, d0 = ket.aos[kl, 0], ket.aos[kl, 1]
        weight = (1.0 if a0 == b0 else 2.0) * (1.0 if c0 == d0 else 2.0)
        n = tid
        count = nab * ncd
        while n < count:
            row = quotient(n, ncd)
            own = n - row * ncd
            a, b = a0 + places[2 * row], b0 + places[2 * row + 1]
            c, d = c0 + places[2 * (size_ab + own)], d0 + places[2 * (size_ab + own) + 1]
            value = 0.0
            for s in range(densities.coulomb.size):
                of_a, of_b = (s * nao + a) * nao, (s * nao + b) * nao
                j, half_k = densities.coulomb[s], -0.5 * densities.exchange[s]
                if j != 0.0:
                    value += j * (numbers[of_a + b] * numbers[(s * nao + c) * nao + d])
                if half_k != 0.0:
                    value += half_k * (numbers[of_a + c] * numbers[of_b + d] + numbers[of_a + d] * numbers[of_b + c])
            gamma[first + (own >> 3) * (8 * size_ab) + 8 * row + (own & 7)] = weight * value
            n += threads

    return jit_device(fill)


def reverse_fused(rows_cd, rows_ab, nt, warps, slots, blocks, unit):
    """Kernel factory: 8 `rows_cd` and 8 `rows_ab` rows, `nt` blocks of 8 columns a warp; see above for `slots`."""
    threads, wide, gamma_size = 32 * warps, unit == "dmma16", 64 * rows_cd * rows_ab
    first_product = make_staircase_products(rows_cd, nt, wide, True, True)
    second_product = make_second_product(rows_cd, rows_ab, nt, wide)
    empty_u, empty_z, add_tile = make_empty(2 * rows_cd * nt), make_empty(2 * rows_ab * nt), make_add_tile(rows_ab, nt)
    column_state, copy, make = make_column_state(nt, False), make_copy_range(threads), make_gamma(rows_ab, threads)
    wait, all_places = make_wait_copies(0), 16 * (rows_ab + rows_cd)

    def kernel(
        bra: FunctionPairs, prims: BraPrimitives, panel: Panel, levels: Levels, ket: FunctionPairs, start: I64, r: R,
        words: F64, np8: i64, lists: KetLists, densities: Densities, z: ReverseSums, column_blocks: i64,
    ):  # fmt: skip
        shared, places = cuda.shared.array(0, f64), cuda.shared.array(all_places, types.int32)
        tid, block = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        lane, warp = tid & 31, tid >> 5
        column_block, rest = block % column_blocks, block // column_blocks
        part, own = rest % z.parts, rest // z.parts
        prim = prims.first_prim + own
        ab = prims.owner[prim]
        pair = ab - prims.first
        entry, behind = lists.first[pair, 0], lists.first[pair + 1, 0]
        each = quotient(behind - entry + z.parts - 1, z.parts)
        entry, behind = entry + part * each, min(behind, entry + (part + 1) * each)
        if entry >= behind:
            return
        # r of this primitive bra pair: as many rows for each of them
        first_quartet, nprim = lists.first[pair, 1], prims.start[ab + 1] - prims.start[ab]
        row_count = quotient(lists.first[pair + 1, 1] - first_quartet, nprim)
        first_row = first_quartet + (prim - prims.start[ab]) * row_count
        a0, b0, nab, ncd = bra.aos[ab, 0], bra.aos[ab, 1], bra.na * bra.nb, ket.na * ket.nb
        n = tid
        while n < nab:
            of_a = quotient(n, bra.nb)
            places[2 * n], places[2 * n + 1] = of_a, n - of_a * bra.nb
            n += threads
        n = tid
        while n < ncd:
            row = i64(levels.rows[n])
            of_c = quotient(row, ket.nb)
            places[2 * (8 * rows_ab + n)], places[2 * (8 * rows_ab + n) + 1] = of_c, row - of_c * ket.nb
            n += threads
        # shared memory: Gamma, words, then H and r of a step
        panel_size = panel.steps * (rows_cd * 64)
        base, words_size = shared_address(shared), np8 * panel.steps * 16
        words_first = slots * gamma_size
        ring, slot_size = words_first + words_size, panel_size + r.stride
        n = tid
        while n < words_first:
            shared[n] = 0.0
            n += threads
        copy(base + 8 * words_first, words, 0, words_size, tid)
        cuda.syncthreads()
        column = (column_block * warps + warp) * nt
        state = column_state(column, np8, i64(0), np8, i64(0))
        u, tile, slot, gamma_slot = empty_u(), empty_z(), i64(0), i64(0)
        kl = i64(lists.kets[entry])
        k, last = start[kl], start[kl + 1]
        row = first_row + lists.before[entry]
        next_kl, next_k, next_last, next_row, is_first = kl, k, last, row, True
        if slots == 2:
            copy(base + 8 * ring, panel.h, k * panel_size, panel_size, tid)
            copy(base + 8 * (ring + panel_size), r.numbers, row * r.stride, r.stride, tid)
            commit_copies()
            make(shared, i64(0), places, a0, b0, nab, ket, kl, ncd, densities)
        while entry < behind:
            ends = k + 1 == last
            next_kl, next_k, next_last, next_row = kl, k + 1, last, row + 1
            if ends and entry + 1 < behind:
                next_kl = i64(lists.kets[entry + 1])
                next_k, next_last = start[next_kl], start[next_kl + 1]
                next_row = first_row + lists.before[entry + 1]
            if slots == 2:
                wait()
                cuda.syncthreads()
                if not ends or entry + 1 < behind:
                    place = ring + (1 - slot) * slot_size
                    copy(base + 8 * place, panel.h, next_k * panel_size, panel_size, tid)
                    copy(base + 8 * (place + panel_size), r.numbers, next_row * r.stride, r.stride, tid)
                    commit_copies()
                    if ends:
                        make(
                            shared, (1 - gamma_slot) * gamma_size, places, a0, b0, nab, ket, next_kl, ncd, densities
                        )
            else:
                cuda.syncthreads()
                copy(base + 8 * ring, panel.h, k * panel_size, panel_size, tid)
                copy(base + 8 * (ring + panel_size), r.numbers, row * r.stride, r.stride, tid)
                commit_copies()
                if is_first:
                    make(shared, i64(0), places, a0, b0, nab, ket, kl, ncd, densities)
                wait()
                cuda.syncthreads()
            here = base + 8 * (ring + slot * slot_size)
            u = first_product(
                u, i32(here + 16 * lane), rows_cd * 512, i32(base + 8 * words_first + 4 * lane), np8 * 128,
                i32(here + 8 * panel_size), state, levels.ends, panel.steps,
            )  # fmt: skip
            if ends:
                tile = second_product(tile, u, i32(base + 8 * (gamma_slot * gamma_size) + 16 * lane))
                u = empty_u()
                entry += 1
            if slots == 2:
                slot = 1 - slot
                gamma_slot = 1 - gamma_slot if ends else gamma_slot
            is_first = ends
            kl, k, last, row = next_kl, next_k, next_last, next_row
        target = ((part * z.nprim + prim - z.first_prim) * np8 + column) * z.rows + 2 * (lane & 3)
        add_tile(tile, z.numbers, target * 8 + (lane >> 2), z.rows * 8, np8 - column)

    return Kernel(kernel, (threads, blocks))


# launcher


class FusedReverse(NamedTuple):
    """Facts of the variant for a class, its columns, and its bytes of shared memory."""

    rows_cd: int
    rows_ab: int
    nt: int
    warps: int
    slots: int
    blocks: int
    shared: int


def shared_bytes(bra, ket, hermite, slots):
    """Bytes of shared memory: Gamma, words, and H and r of a step."""
    rows_ab, rows_cd = blocks_of_8(bra.nab), blocks_of_8(ket.nab)
    steps, np8 = blocks_of_8(ket.nherm), blocks_of_8(hermite.nherm)
    step = 64 * steps * rows_cd + r_stride_of(ket, hermite)
    return 8 * (slots * (64 * rows_ab * rows_cd + step) + 16 * np8 * steps)


@cache
def fused_reverse(unit, bra, ket, hermite):
    """`FusedReverse` for `ListFacts` of the bra, the ket, and the Hermite functions of the bra; None if none fits."""
    rows_ab, rows_cd, np8 = blocks_of_8(bra.nab), blocks_of_8(ket.nab), blocks_of_8(hermite.nherm)
    if turned_split(ket.nab)[0] > 1 or rows_ab + rows_cd > REVERSE.most_fused:
        return None
    nt = 4 if rows_ab + rows_cd <= REVERSE.few_fused and np8 > 2 else 2
    warps = min(REVERSE.most_warps, -(-np8 // nt))
    for slots in (2, 1):
        shared = shared_bytes(bra, ket, hermite, slots)
        if 2 * SHARED_BYTES // shared * warps >= REVERSE.least_warps:
            blocks = REVERSE.blocks(2 * nt * (rows_ab + rows_cd), warps)
            return FusedReverse(rows_cd, rows_ab, nt, warps, slots, blocks, shared)
    return None


def launch_reverse_fused(context, plan, aos, ab, cd, h, start, hermite, r, lists, densities, z):
    """Adds what the listed ket pairs give the bra pairs `ab` to Z.

    Parameters
    ----------
    plan : FusedReverse
    aos : tuple of Buffer
        First AOs of the bra and of the ket list.
    ab, cd : md4.engine.PreparedPairs
        A slice of the bra list, and the ket list.
    h : Buffer
        H of the ket list in the form `BRA_TURNED`.
    hermite : ListFacts
        The Hermite functions of the bra.
    r : Buffer
    lists, densities, z : tuple
        Fields of `KetLists`, `Densities` and `ReverseSums`.
    """
    bra, ket, np8 = ab.facts, cd.facts, blocks_of_8(hermite.nherm)
    column_blocks = -(-np8 // (plan.nt * plan.warps))
    context.launch(
        Variant(reverse_fused, (*plan[:6], context.unit)), column_blocks * z[-1] * ab.nprim, 32 * plan.warps,
        plan.shared,
        (aos[0], ab.first, bra.na, bra.nb), (ab.data.owner, ab.data.start, ab.first, ab.first_prim),
        (h, plan.rows_cd, blocks_of_8(ket.nherm)), levels_of(context, ket, plan.rows_cd, True),
        (aos[1], cd.first, ket.na, ket.nb), start, (r, r_stride_of(ket, hermite)),
        context.table(all_words, *words_of(ket, hermite)), np8, lists, densities, z, column_blocks,
    )  # fmt: skip
