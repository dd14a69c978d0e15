"""Steps 4 and 5 in one kernel, for classes whose (ab|q] would cost more to store than to make.

A warp makes the quartets of a group of `kets` successive ket pairs at once, `mt` fragments of 16 rows ab. The q of all
of them are columns of one product side by side:

    left[ab, (kl, q)] = sum_p H[ab, p] [p|q]_kl    as in `md4.gpu.kernels.two_products`, p over all bra primitives
    acc[ab, (kl, cd)] += sum_q left[ab, (kl, q)] H[cd, q]_kl    `left` as it comes out is the left operand

so that neither [p|q] nor (ab|q] leaves the registers, and that a fragment of H[ab, p] is read from shared memory once
for the group, as all else that a warp does between two products is done once for it. Columns do not mix: those of ket
pairs that do not count may hold anything. Ket pairs of several primitive pairs, or of more q than `left` has room for,
are taken one by one, in *rounds*: `nq` blocks of 8 q of a primitive pair in each.

A block of threads keeps H[ab, p] of its bra pair in shared memory and runs over ket pairs; each warp fetches r of what
comes next while it works on this. H[cd, q] comes straight from memory, 16 bytes a lane, before the first product where
there are registers for it. Where shared memory does not hold H of all bra primitives, they are taken in groups, and the
integrals of later ones added.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, cuda, f64, i32, i64, jit_device
from md4.gpu.emit.fused_products import make_chain, make_right_blocks
from md4.gpu.emit.instructions import (
    address_of,
    commit_copies,
    make_copies,
    make_empty,
    make_wait_copies,
    shared_address,
)
from md4.gpu.emit.tile_products import make_column_state, make_staircase_products
from md4.gpu.gather_words import PADDING, padded_words, words_of
from md4.gpu.kernels.fused_results import make_write
from md4.gpu.kernels.groups import (
    HermiteIntegrals,
    Levels,
    Limits,
    PairRange,
    Panel,
    Result,
    end_of_kets,
    levels_of,
    pair_range,
    primitives_of,
    result,
)
from md4.gpu.kernels.ring import make_copy_range
from md4.gpu.r_layout import r_stride_of
from md4.gpu.staircases import reach, row_table
from md4.gpu.tiles import WARPS, blocks_of_8, panel_rows
from md4.gpu.tuning import FEWEST_BLOCKS, SHARED_BYTES

# The tile of a warp
MOST_FRAGMENTS = 2  # fragments of 16 rows ab
MOST_COLUMNS = 5  # blocks of 8 cd
CONTRACTED_COLUMNS = 4  # the same for contracted bras of two fragments of rows
TILE_DOUBLES = 80  # accumulators that a lane has registers for
MOST_PRIMITIVES = 32  # primitive quartets of a quartet, which a warp goes through one after the other

# Blocks of threads
BLOCKS_TOGETHER = 2  # fewest blocks that share a multiprocessor
PART_PRODUCTS = 19  # most blocks of 8 q times blocks of 8 cd of a part, with which four share one
PANELS = 4  # primitives of a bra whose H is in shared memory at once, if it can be
FEWEST_KETS = 8  # ket pairs that a warp takes one after the other

# Groups of ket pairs of one primitive pair each
AT_ONCE = ((4, 2, 1), (2, 1))  # ket pairs of a group for 1, 2, ... fragments of rows: the first number that fits
CONTRACTED_AT_ONCE = ((3, 2, 1), (2, 1))  # the same for contracted bras
GROUP_DOUBLES = 48  # accumulators up to which several ket pairs fit
GROUPS = 8  # groups that a warp takes one after the other
CONTRACTED_GROUPS = 4  # the same for contracted bras
AHEAD_DOUBLES = 16  # doubles of H[cd, q] of a group up to which they are fetched before the products


class KetSide(NamedTuple):
    """H[cd, q] of a whole ket list as right operands, and the size of a chunk of it.

    Attributes
    ----------
    h : float64 array
        [ket primitive][block of 8 q][block of 8 cd][8 cd][8 q].
    rows : int32 array
        Place of each cd, -1 for padding.
    nq8, ncd, npair : int64
        Blocks of 8 q, functions cd, ket pairs of the chunk.
    """

    h: F64
    rows: I32
    nq8: i64
    ncd: i64
    npair: i64


class Work(NamedTuple):
    """How the quartets of a bra pair are shared out.

    Attributes
    ----------
    nab : int64
        Functions ab.
    group : int64
        Bra primitives whose H shared memory holds at once.
    parts : int64
        Blocks that share the ket pairs of a bra pair.
    """

    nab: i64
    group: i64
    parts: i64


# device functions


def make_next_group(kets):
    """Device function: the first of the groups that begin at `pair`, `pair` + `step`, ... that counts, or `end`.

    A group counts if one of its ket pairs does. Beyond the ket pairs that may count with the bra pair, which end at
    `end`, all are as good as `end`.
    """

    def next_group(limits, bra_pair, ket_first, pair, step, end):
        if limits.by_ket:
            while pair < end:
                most = limits.counts[ket_first + pair]
                for n in range(1, kets):
                    most = max(most, limits.counts[ket_first + min(pair + n, end - 1)])
                if most > bra_pair:
                    return pair
                pair += step
        return pair

    return jit_device(next_group)


def pairs_at_once(ket, pair, most):
    """How many ket pairs from `pair` on are taken at once: `most` if each has one primitive pair (device function)."""
    first = ket.first + pair
    return most if ket.start[first + most] - ket.start[first] == most else i64(1)


def make_copy_r(threads=32):
    """Device function: the `threads` of a warp, or of 2, 4, ..., start to copy `count` doubles from array[index:].

    As far as the array goes.
    """
    copies, shift = make_copies(4, 16 * threads), threads.bit_length() - 1

    def copy_r(address, array, index, count, thread):
        to, source = i32(address + 16 * thread), address_of(array, index + 2 * thread)
        left = i32(min(count, array.size - index) // 2 - thread)
        while left > 0:
            copies(to, source, i32((left + threads - 1) >> shift))
            to, source, left = i32(to + 64 * threads), source + 64 * threads, i32(left - 4 * threads)

    return jit_device(copy_r)


def fused_transforms(
    mt, nq, nc, ket_reach, warps, blocks, contracted, unit, kets=0, ahead=False, matrix=False, limited=False
):
    """Kernel factory; `kets`: ket pairs of a group, 0 if each is taken in rounds. `nc`: blocks of 8 cd.

    `ket_reach`: of each of the `nq` blocks of q, how many blocks of 8 cd count. `contracted` allows for several bra
    primitives. `ahead`: H[cd, q] is fetched before the first product, which there are no rounds of. `matrix`: the
    result is a part of a matrix. `limited`: only some quartets count; to ask for them takes registers.
    """
    rounds, kets, threads, wide = kets == 0, max(1, kets), 32 * warps, unit == "dmma16"
    empty, empty_left, reach = make_empty(4 * mt * nc * kets), make_empty(4 * mt * nq * kets), ket_reach * kets
    chain, right_blocks = make_chain(mt, nq, nc, wide, reach, kets, ahead), make_right_blocks(nc, reach)
    products = make_staircase_products(2 * mt, nq * kets, wide, False, ahead=False, same=kets)
    column_state, write = make_column_state(nq * kets, False), make_write(mt, nc, kets, matrix)
    primitives, end_of, at_once = map(jit_device, (primitives_of, end_of_kets, pairs_at_once))
    next_group, copy_panel, copy_r = make_next_group(kets), make_copy_range(threads), make_copy_r()
    wait_all = make_wait_copies(0)

    def kernel(
        panel: Panel, bra: PairRange, levels: Levels, r: HermiteIntegrals, words: F64, ket: PairRange, right: KetSide,
        work: Work, limits: Limits, out: Result,
    ):  # fmt: skip
        shared = shared_address(cuda.shared.array(0, f64))
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        pair, part = i64(cuda.blockIdx.x) // work.parts, i64(cuda.blockIdx.x) % work.parts
        nket = end_of(limits, bra.first + pair, ket.first + right.npair) - ket.first if limited else right.npair
        if limited and part * warps * kets >= nket:
            return
        begin, end = primitives(bra, pair)
        h_doubles, h_bytes = panel.steps * panel.rows8 * 64, panel.steps * panel.rows8 * 512
        table = i32(shared + work.group * h_bytes)
        copy_panel(table, words, 0, words.size, tid)
        r_count = kets * r.stride
        r_bytes, r_base = i32(8 * r_count), table + 8 * words.size
        out_stage = i32(r_base + warps * 2 * r_bytes + warp * kets * 8 * work.nab * right.ncd)
        r_here, table = i32(r_base + warp * 2 * r_bytes), i32(table + 4 * lane)
        r_coming = i32(r_here + r_bytes)
        state, nq8 = column_state(i64(0), i64(nq * kets), i64(0), i64(nq), r.stride), right.nq8 if rounds else i64(nq)
        stride = work.parts * warps * kets
        added, more = False, True
        while more:
            # as many primitives of the bra pair as shared memory holds
            count = min(work.group, end - begin)
            cuda.syncthreads()
            copy_panel(shared, panel.h, begin * h_doubles, count * h_doubles, tid)
            commit_copies()
            wait_all()
            cuda.syncthreads()
            r_row = (begin - bra.first_prim) * r.nket - ket.first_prim  # of ket primitive 0
            group_cd = (part * warps + warp) * kets
            if limited:
                group_cd = next_group(limits, bra.first + pair, ket.first, group_cd, stride, nket)
            pair_cd, k_end = group_cd, ket.first_prim + r.nket
            if pair_cd < nket:
                k = ket.start[ket.first + pair_cd]
                if count > 0 and k < k_end:
                    copy_r(r_here, r.numbers, (r_row + k) * r.stride, r_count, lane)
                commit_copies()
            while pair_cd < nket:
                k, k_last = primitives(ket, pair_cd)
                taken = at_once(ket, pair_cd, min(group_cd + kets, nket) - pair_cd) if kets > 1 else i64(1)
                next_cd = pair_cd + taken
                if kets == 1 or next_cd >= group_cd + kets:
                    group_cd += stride
                    if limited:
                        group_cd = next_group(limits, bra.first + pair, ket.first, group_cd, stride, nket)
                    next_cd = group_cd
                k_next = ket.start[ket.first + next_cd] if next_cd < nket else k_end
                live = count > 0 and k < k_last
                tile, first_q, going = empty(), i64(0), True
                while going:
                    left, place = empty_left(), (k * nq8 + first_q) * (nc * 64) + 2 * lane
                    if ahead:
                        found = right_blocks(right.h, place, taken * nq if live else i64(0))
                    # the round after this one, if there is one
                    k_round, q_round = k, first_q + nq
                    if q_round >= nq8:
                        k_round, q_round = k + 1, i64(0)
                    going = rounds and live and k_round < k_last
                    coming, stays = k_round if going else k_next, going and not contracted and k_round == k
                    h_address, words_address = i32(shared + 16 * lane), i32(table + 128 * first_q)
                    for i in range(count if contracted and live else 1):
                        wait_all()
                        cuda.syncwarp()
                        # fetch what comes next: another bra primitive, or the first one with the next ket primitives
                        row, fetched = r_row + coming, not stays and count > 0 and coming < k_end
                        if contracted and live and i + 1 < count:
                            row, fetched = r_row + (i + 1) * r.nket + k, True
                        if fetched:
                            copy_r(r_coming, r.numbers, row * r.stride, r_count, lane)
                        commit_copies()
                        if live:
                            left = products(
                                left, h_address, panel.rows8 * 512, words_address, nq8 * 128, r_here, state,
                                levels.ends, panel.steps,
                            )  # fmt: skip
                            h_address = i32(h_address + h_bytes)
                        if not stays:
                            r_here, r_coming = r_coming, r_here
                    if live:
                        if ahead:
                            tile = chain(tile, left, found, place, taken * nq)
                        else:
                            tile = chain(tile, left, right.h, place, nq8 - first_q if rounds else taken * nq)
                    k, first_q = k_round, q_round
                first_out = out.first + pair * out.s_ij + pair_cd * out.s_kl
                write(
                    tile, out_stage, taken, levels.rows, lane >> 2, right, work.nab, out, first_out, 0, lane,
                    contracted and added,
                )  # fmt: skip
                cuda.syncwarp()
                pair_cd = next_cd
            begin += work.group
            added, more = True, contracted and begin < end

    return Kernel(kernel, (threads, blocks))


# launcher


@cache
def reach_in_passes(facts, nq):
    """Blocks of 8 rows of a ket that count of each of `nq` blocks of q: the most in any pass over them."""
    found = reach(facts)
    return tuple(int(found[n::nq].max()) for n in range(nq))


@dataclass(frozen=True)
class FusedTile:
    """What a warp does: fragments of 16 rows, q blocks at a time, cd blocks; ket pairs of a group.

    `kets` is 0 if ket pairs are taken one by one in rounds: they may be contracted, and their q take several passes.
    """

    mt: int
    nq: int
    nc: int
    kets: int

    @property
    def doubles(self):
        """Accumulators of a lane."""
        return 4 * self.mt * (self.nq + self.nc) * max(1, self.kets)


def fused_tile(bra, ket):
    """The tile for a bra and a ket list, or None where it does not fit the registers."""
    contracted, nq8 = bra.max_prim > 1, blocks_of_8(ket.nherm)
    mt, nc = (bra.nab + 15) // 16, blocks_of_8(ket.nab)
    if mt > MOST_FRAGMENTS or nc > (CONTRACTED_COLUMNS if contracted and mt > 1 else MOST_COLUMNS):
        return None
    most = TILE_DOUBLES // (4 * mt) - nc
    if most < 1:
        return None
    passes = -(-nq8 // min(most, PADDING))
    tile = FusedTile(mt, -(-nq8 // passes), nc, 0)
    if ket.max_prim > 1 or passes > 1:
        return tile
    for kets in (CONTRACTED_AT_ONCE if contracted else AT_ONCE)[mt - 1]:
        wider = replace(tile, kets=kets)
        fits = kets == 1 or wider.doubles <= GROUP_DOUBLES
        if fits and sum(fused_shared(bra, ket, kets)) <= SHARED_BYTES:
            return wider
    return tile


def fused_blocks(tile, bra, ket):
    """Blocks that share a multiprocessor: more of small tiles, as far as shared memory goes."""
    contracted, (panel, rest) = bra.max_prim > 1, fused_shared(bra, ket, tile.kets)
    if contracted:
        by_registers = 4 if tile.doubles <= 20 else 3 if tile.doubles <= 32 else BLOCKS_TOGETHER
    elif tile.kets <= 1:
        many = ket.mirror and sum(reach_in_passes(ket.h_class, tile.nq)) > PART_PRODUCTS
        by_registers = BLOCKS_TOGETHER if tile.mt > 1 else 3 if many else 4
    else:
        by_registers = 4 if tile.doubles <= 32 else 3 if tile.doubles <= 48 else BLOCKS_TOGETHER
    by_memory = 2 * SHARED_BYTES // (rest + (PANELS if contracted else 1) * panel)
    return max(BLOCKS_TOGETHER, min(by_registers, by_memory))


def choose_fused(unit, bra, ket):
    """The tile of the fused kernel for a bra and a ket list, or None where the two-kernel way serves better."""
    if unit == "fma" or bra.max_prim * ket.max_prim > MOST_PRIMITIVES or sum(fused_shared(bra, ket)) > SHARED_BYTES:
        return None
    return fused_tile(bra, ket)


def fused_shared(bra, ket, kets=1):
    """As `shared_parts`, for groups of `kets` ket pairs, or ket pairs one by one."""
    return shared_parts(bra, ket, WARPS * max(1, kets), PADDING)


def shared_parts(bra, ket, quartets, padding=0):
    """Bytes of shared memory: of the panel of one bra primitive, and of all else of a block with so many quartets.

    The words have so many blocks of `padding`.
    """
    np8, nq8 = blocks_of_8(bra.nherm), blocks_of_8(ket.nherm)
    panel, table = np8 * panel_rows(bra.nab) * 512, (np8 * nq8 + padding) * 128
    return panel, table + quartets * (16 * r_stride_of(bra, ket) + 8 * bra.nab * ket.nab)


def parts_of(nbra, nket, at_once, several):
    """Blocks that share the ket pairs of a bra pair, of which a block takes `at_once` at a time.

    It goes through `several`, unless that leaves too few blocks.
    """
    return min(-(-nket // at_once), max(1, nket // several, FEWEST_BLOCKS // nbra))


def fused_launcher(context, bra, ket, matrix, limited):
    """As `make_launch`, for blocks that are a part of a `matrix` or `limited`, or not."""
    tile = choose_fused(context.unit, bra, ket)
    panel, rest = fused_shared(bra, ket, tile.kets)
    blocks = fused_blocks(tile, bra, ket)
    group = max(1, min(bra.max_prim, (2 * SHARED_BYTES // blocks - rest) // panel))
    passes, threads, target = reach_in_passes(ket.h_class, tile.nq), 32 * WARPS, (matrix, limited)
    facts = tile.mt, tile.nq, tile.nc, passes, WARPS, blocks, bra.max_prim > 1, context.unit, tile.kets
    facts = *facts, 0 < 2 * tile.kets * sum(passes) <= AHEAD_DOUBLES
    variant = Variant(fused_transforms, (*facts, *target) if any(target) else facts)
    tables = levels_of(context, bra, panel_rows(bra.nab), False), context.table(padded_words, *words_of(bra, ket))
    groups = CONTRACTED_GROUPS if bra.max_prim > 1 else GROUPS
    kets = WARPS * max(1, tile.kets), WARPS * max(FEWEST_KETS, groups * tile.kets)
    return make_launch(context, bra, ket, variant, (threads, group * panel + rest), tables, group, kets)


def make_launch(context, bra, ket, variant, block, tables, group, kets):
    """The function that launches a fused kernel for two `ListFacts`.

    It makes (ab|cd) of a chunk, and takes bra panels `h`, right operands `g` of the ket list, and `r` of the chunk.

    Parameters
    ----------
    block : tuple of int
        Threads of a block, and its shared memory.
    tables : tuple
        The kernel's tables of rows ab, and of words.
    group : int
        Bra primitives whose H shared memory holds at once.
    kets : tuple of int
        Ket pairs that a block takes at once, and one after the other; see `parts_of`.
    """
    nab, ncd, stride, (rows, words) = bra.nab, ket.nab, r_stride_of(bra, ket), tables
    rows8, steps, nq8 = panel_rows(nab), blocks_of_8(bra.nherm), blocks_of_8(ket.nherm)
    ket_rows = context.table(row_table, ket.h_class, blocks_of_8(ncd))

    def launch(context, h, r, g, ab, cd, out):
        nbra, nket = ab.npair, cd.npair
        parts = parts_of(nbra, nket, *kets)
        context.launch(
            variant, nbra * parts, *block,
            (h, rows8, steps), pair_range(ab), rows, (r, stride, cd.nprim), words, pair_range(cd),
            (g, ket_rows, nq8, ncd, nket), (nab, group, parts), out.limits, result(out),
        )  # fmt: skip

    return launch
