"""Steps 4 and 5 in one kernel, for classes of more rows ab or columns cd than a warp has registers for.

As in `md4.gpu.kernels.fused`, both products of a quartet follow each other in registers, and [p|q] and (ab|q] are
nowhere else. Here the rows ab of a quartet are divided among the warps of a *team*, one or two of them:

    left[ab, q] = sum_p H[ab, p] [p|q]          each warp for rows of its own, all of which need the same r
    acc[ab, cd] += sum_q left[ab, q] H[cd, q]   and the same H[cd, q]

Warp n of `shares` warps has the fragments n, n + shares, ... of 16 rows, so that the staircase of H leaves all of them
about the same work. The team fetches r of its next quartet while it works on this one, each thread a piece, and puts
the integrals in order in shared memory before it writes them. So its warps meet twice in a quartet: when r is there,
which is also when the integrals before have been written, and when all integrals are in shared memory.

Each pair has one primitive pair, or none: then its integrals are zero.
"""

from dataclasses import dataclass

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, cuda, f64, i32, i64, jit_device
from md4.gpu.emit.fused_products import make_exact_chain, make_exact_products
from md4.gpu.emit.instructions import (
    commit_copies,
    make_empty,
    make_meet,
    make_wait_copies,
    shared_address,
)
from md4.gpu.gather_words import all_words, words_of
from md4.gpu.kernels.fused import KetSide, Work, make_copy_r, make_launch, make_next_group, shared_parts
from md4.gpu.kernels.fused_results import make_write
from md4.gpu.kernels.groups import (
    HermiteIntegrals,
    Limits,
    PairRange,
    Panel,
    Result,
    end_of_kets,
    primitives_of,
)
from md4.gpu.kernels.ring import make_copy_range
from md4.gpu.staircases import reach, shared_out, shared_rows
from md4.gpu.tiles import blocks_of_8
from md4.gpu.tuning import SHARED_BYTES

SHARES = (1, 2)  # warps that may share a quartet, powers of 2; the first with a tile
FEWEST_FUNCTIONS = 21  # functions ab, and cd
MOST_FRAGMENTS = 4  # fragments of 16 rows ab
MOST_COLUMNS = 8  # blocks of 8 cd
TILE_DOUBLES = (72, 72, 84)  # most accumulators of a lane, for 1, 2, ... fragments of a warp
LEAST_Q = 2  # fewest blocks of 8 q at a time, if there are as many
BLOCKS_OF_WARPS = ((4, 2), (8, 1))  # (warps of a block, blocks a multiprocessor); the first that shared memory holds
FEWEST_KETS = 8  # ket pairs that the warps of a quartet take one after the other


def make_pass(nq, nc, passes, depths, fragments, nq8):
    """Device function: a tile of a share of the rows plus what `nq` blocks of q, of `nq8`, add to it in pass `n`.

    `passes` and `depths` as in `md4.gpu.emit.fused_products`, `fragments` are those of each share.
    """
    mt = max(fragments)
    products = make_exact_products(mt, nq, nq8, sum(fragments), depths)
    chain, shares = make_exact_chain(mt, nq, nc, passes, fragments), len(fragments)

    def add_pass(tile, h_address, words, r, steps, right, place, n, share):
        left = products(h_address, words, r, share, i32(steps))
        return chain(tile, left, right.h, place, right.nq8, i32(n * shares + share))

    return jit_device(add_pass)


def fused_wide(rows, bra_reach, nq, nc, ket_reach, shares, warps, blocks, matrix=False, limited=False):
    """Kernel factory; `rows` fragments of 16 rows ab, `shares` warps of a quartet, `warps` of a block.

    `bra_reach`: of each block of 8 p, how many fragments count. `nq` blocks of 8 q are taken at a time, and there are
    `nc` blocks of 8 cd. `ket_reach`: of each block of q, how many blocks of cd count. `matrix`: the result is a part of
    a matrix. `limited`: only some quartets count.
    """
    fragments, depths = shared_out(rows, shares), tuple(zip(*(shared_out(count, shares) for count in bra_reach)))
    mt, nq8 = max(fragments), len(ket_reach)
    threads, of_team, teams = 32 * warps, 32 * shares, warps // shares
    full, tail = divmod(nq8, nq)
    passes = tuple(ket_reach[nq * n : nq * n + nq] for n in range(full))
    empty, add_pass = make_empty(4 * mt * nc), make_pass(nq, nc, passes, depths, fragments, nq8)
    add_tail = make_pass(tail, nc, (ket_reach[nq * full :],), depths, fragments, nq8) if tail else add_pass
    primitives, end_of, next_of = jit_device(primitives_of), jit_device(end_of_kets), make_next_group(1)
    copy_panel, copy_r, meet = make_copy_range(threads), make_copy_r(of_team), make_meet(of_team)
    wait_all, write = make_wait_copies(0), make_write(mt, nc, 1, matrix, of_team, meet)

    def kernel(
        panel: Panel, bra: PairRange, places: I32, r: HermiteIntegrals, words: F64, ket: PairRange, right: KetSide,
        work: Work, limits: Limits, out: Result,
    ):  # fmt: skip
        shared = shared_address(cuda.shared.array(0, f64))
        tid = i64(cuda.threadIdx.x)
        thread, team, lane = tid % of_team, tid // of_team, tid & 31
        share = i32(((thread >> 5) + team) % shares)
        pair, part = i64(cuda.blockIdx.x) // work.parts, i64(cuda.blockIdx.x) % work.parts
        nket = end_of(limits, bra.first + pair, ket.first + right.npair) - ket.first if limited else right.npair
        if limited and part * teams >= nket:
            return
        i, i_end = primitives(bra, pair)
        h_doubles, h_bytes = panel.steps * panel.rows8 * 64, panel.steps * panel.rows8 * 512
        copy_panel(shared, panel.h, i * h_doubles, h_doubles if i < i_end else i64(0), tid)
        table = i32(shared + h_bytes)
        copy_panel(table, words, 0, words.size, tid)
        commit_copies()
        wait_all()
        cuda.syncthreads()
        r_bytes, r_base = i32(8 * r.stride), i32(table + 8 * words.size)
        out_stage = i32(r_base + teams * 2 * r_bytes + team * 8 * work.nab * right.ncd)
        r_here = i32(r_base + team * 2 * r_bytes)
        r_coming = i32(r_here + r_bytes)
        table = i32(table + 4 * lane)
        row = (i - bra.first_prim) * r.nket - ket.first_prim  # of r of ket primitive 0
        stride, k_end = work.parts * teams, ket.first_prim + r.nket if i < i_end else i64(0)
        pair_cd = part * teams + team
        if limited:
            pair_cd = next_of(limits, bra.first + pair, ket.first, pair_cd, stride, nket)
        if pair_cd < nket:
            k = ket.start[ket.first + pair_cd]
            if k < k_end:
                copy_r(r_here, r.numbers, (row + k) * r.stride, r.stride, thread)
        commit_copies()
        while pair_cd < nket:
            k, k_last = primitives(ket, pair_cd)
            next_cd = pair_cd + stride
            if limited:
                next_cd = next_of(limits, bra.first + pair, ket.first, next_cd, stride, nket)
            wait_all()
            meet(i32(team))
            if next_cd < nket:
                coming = ket.start[ket.first + next_cd]
                if coming < k_end:
                    copy_r(r_coming, r.numbers, (row + coming) * r.stride, r.stride, thread)
            commit_copies()
            tile = empty()
            if k < min(k_last, k_end):
                n, words_here, place = i32(0), table, k * right.nq8 * (nc * 64) + 2 * lane
                h_address = i32(shared + 1024 * share + 16 * lane)
                while n < full:
                    tile = add_pass(tile, h_address, words_here, r_here, panel.steps, right, place, n, share)
                    n, words_here, place = i32(n + 1), i32(words_here + 128 * nq), place + nq * nc * 64
                if tail:
                    tile = add_tail(tile, h_address, words_here, r_here, panel.steps, right, place, i32(0), share)
            first_out = out.first + pair * out.s_ij + pair_cd * out.s_kl
            first_row = 16 * mt * share + (lane >> 2)
            write(tile, out_stage, 1, places, first_row, right, work.nab, out, first_out, i32(team), thread, False)
            # a tensor core has the work of all shares in turn
            r_here, r_coming, share = r_coming, r_here, i32((share + 1) % shares)
            pair_cd = next_cd

    return Kernel(kernel, (threads, blocks))


# launcher


@dataclass(frozen=True)
class WideTile:
    """What warps and blocks do.

    Attributes
    ----------
    fragments : tuple of int
        Fragments of 16 rows of each warp of a quartet.
    nq, nc : int
        Blocks of 8 q at a time, and blocks of 8 cd.
    warps : int
        Warps of a block.
    blocks : int
        Blocks that share a multiprocessor.
    """

    fragments: tuple
    nq: int
    nc: int
    warps: int
    blocks: int

    @property
    def mt(self):
        """Most fragments of a warp."""
        return max(self.fragments)

    @property
    def shares(self):
        """Warps of a quartet."""
        return len(self.fragments)


def wide_tile(unit, bra, ket):
    """The tile for a bra and a ket list, or None where there is none."""
    if unit != "dmma16" or max(bra.max_prim, ket.max_prim) > 1:
        return None
    rows, nq8, nc = (bra.nab + 15) // 16, blocks_of_8(ket.nherm), blocks_of_8(ket.nab)
    if min(bra.nab, ket.nab) < FEWEST_FUNCTIONS or rows > MOST_FRAGMENTS or nc > MOST_COLUMNS:
        return None
    for shares in SHARES:
        fragments = shared_out(rows, shares)
        mt = max(fragments)
        if mt > len(TILE_DOUBLES):
            continue
        most = TILE_DOUBLES[mt - 1] // (4 * mt) - nc
        if most < min(nq8, LEAST_Q):
            continue
        passes = -(-nq8 // most)
        for warps, blocks in BLOCKS_OF_WARPS:
            if sum(shared_parts(bra, ket, warps // shares)) <= 2 * SHARED_BYTES // blocks:
                return WideTile(fragments, -(-nq8 // passes), nc, warps, blocks)
    return None


def wide_launcher(context, bra, ket, matrix, limited):
    """As `md4.gpu.kernels.fused.fused_launcher`."""
    tile = wide_tile(context.unit, bra, ket)
    bra_reach, ket_reach = (tuple(map(int, reach(pairs.h_class))) for pairs in (bra, ket))
    facts = sum(tile.fragments), tuple((n + 1) // 2 for n in bra_reach), tile.nq, tile.nc, ket_reach
    facts = *facts, tile.shares, tile.warps, tile.blocks
    variant = Variant(fused_wide, (*facts, matrix, limited) if matrix or limited else facts)
    teams, places = tile.warps // tile.shares, context.table(shared_rows, bra.h_class, tile.mt, tile.shares)
    tables = places, context.table(all_words, *words_of(bra, ket))
    block = 32 * tile.warps, sum(shared_parts(bra, ket, teams))
    return make_launch(context, bra, ket, variant, block, tables, 1, (teams, teams * FEWEST_KETS))
