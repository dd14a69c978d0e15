"""Both products of several ket pairs at once, where these have one primitive pair each: `md4.gpu.kernels.fused`.

A warp makes the quartets of a group of `kets` successive ket pairs. Their q are columns of one product side by side,

    left[ab, (kl, q)] = sum_p H[ab, p] [p|q]_kl
    acc[ab, (kl, cd)] = sum_q left[ab, (kl, q)] H[cd, q]_kl

so that a fragment of H[ab, p] is read from shared memory for all of them, and that all else that a warp does between
two products is done for a group. Columns do not mix: those of ket pairs that do not count may hold anything. All q are
in `left` at once. H[cd, q] is fetched before the first product where there are registers for it.
"""

from md4.gpu.compile import Kernel
from md4.gpu.device_code import F64, cuda, f64, i32, i64, jit_device
from md4.gpu.emit.fused_products import make_chain, make_right_blocks
from md4.gpu.emit.instructions import (
    commit_copies,
    make_empty,
    make_wait_copies,
    shared_address,
)
from md4.gpu.emit.tile_products import make_column_state, make_staircase_products
from md4.gpu.kernels.fused_operands import KetSide, Work, make_copy_r, make_pairs_of_block
from md4.gpu.kernels.fused_results import make_write
from md4.gpu.kernels.groups import (
    HermiteIntegrals,
    Levels,
    Limits,
    PairRange,
    Panel,
    Result,
    primitives_of,
)
from md4.gpu.kernels.ring import make_copy_range


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


def fused_groups(mt, nq, nc, ket_reach, warps, blocks, contracted, unit, kets, ahead, matrix=False, limited=False):
    """Kernel factory; `kets`: ket pairs of a group, of one primitive pair each at most. `nq` are all blocks of q.

    `ahead`: H[cd, q] is fetched before the first product. The rest as of `md4.gpu.kernels.fused.fused_transforms`.
    """
    threads, wide, reach = 32 * warps, unit == "dmma16", ket_reach * kets
    empty, empty_left = make_empty(4 * mt * nc * kets), make_empty(4 * mt * nq * kets)
    chain, right_blocks = make_chain(mt, nq, nc, wide, reach, kets, ahead), make_right_blocks(nc, reach)
    products = make_staircase_products(2 * mt, nq * kets, wide, False, ahead=False, same=kets)
    column_state = make_column_state(nq * kets, False)
    write = make_write(mt, nc, kets, matrix)
    primitives, pairs_of, next_group = jit_device(primitives_of), make_pairs_of_block(limited), make_next_group(kets)
    at_once, copy_panel, copy_r = jit_device(pairs_at_once), make_copy_range(threads), make_copy_r()
    wait_all = make_wait_copies(0)

    def kernel(
        panel: Panel, bra: PairRange, levels: Levels, r: HermiteIntegrals, words: F64, ket: PairRange, right: KetSide,
        work: Work, limits: Limits, out: Result,
    ):  # fmt: skip
        shared = shared_address(cuda.shared.array(0, f64))
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        pair, part, nket = pairs_of(work, bra, ket, right, limits)
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
        state = column_state(i64(0), i64(nq * kets), i64(0), i64(nq), r.stride)
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
                tile, left, place = empty(), empty_left(), k * (nq * nc * 64) + 2 * lane
                if ahead:
                    found = right_blocks(right.h, place, taken * nq if live else i64(0))
                h_address = i32(shared + 16 * lane)
                for i in range(count if contracted and live else 1):
                    wait_all()
                    cuda.syncwarp()
                    # fetch what comes next: another bra primitive, or the first one with the next ket pairs
                    coming = r_row + k_next
                    if contracted and live and i + 1 < count:
                        coming = r_row + (i + 1) * r.nket + k
                        copy_r(r_coming, r.numbers, coming * r.stride, r_count, lane)
                    elif count > 0 and k_next < k_end:
                        copy_r(r_coming, r.numbers, coming * r.stride, r_count, lane)
                    commit_copies()
                    if live:
                        left = products(
                            left, h_address, panel.rows8 * 512, table, nq * 128, r_here, state, levels.ends, panel.steps
                        )
                        h_address = i32(h_address + h_bytes)
                    r_here, r_coming = r_coming, r_here
                if live:
                    if ahead:
                        tile = chain(tile, left, found, place, taken * nq)
                    else:
                        tile = chain(tile, left, right.h, place, taken * nq)
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
