"""Digestion of blocks of small quartets into J and K, a thread each; the equations are in `md4.method.digestion`.

A warp takes 32 ket pairs, one a lane, and a few bra pairs. It copies the integrals of its 32 quartets to shared memory
together, where each lane reads its own; densities and sums of a quartet are in registers. To and from the rows of D and
X they go by way of a stage in shared memory, so that neighbouring lanes have neighbouring numbers. Neighbours whose ket
pairs have the same shell c add up their parts of X_ac and X_bc before one of them adds these to X.
"""

from typing import NamedTuple

from md4.gpu.compile import Kernel
from md4.gpu.device_code import cuda, i32, i64, jit_device, types, u32
from md4.gpu.emit.digest_quartets import (
    make_add_block,
    make_add_rows,
    make_add_to_x,
    make_add_to_y,
    make_columns_in_turn,
    make_load_block,
    make_load_rows,
    make_rows_in_turn,
    stage_parts,
)
from md4.gpu.emit.instructions import (
    FP64,
    address_of,
    commit_copies,
    make_copies,
    make_empty,
    make_wait_copies,
    shared_address,
)
from md4.gpu.emit.scalars import add_global
from md4.gpu.emit.unrolled import store_shared
from md4.gpu.emit.warp_sums import make_warp_sums, warp_place
from md4.gpu.kernels.digest_parameters import Block, Lists, Matrices, Share, share_of
from md4.gpu.kernels.groups import Limits, end_of_kets
from md4.gpu.tuning import DIGEST, DIGEST_QUARTETS, SHARED_BYTES
from md4.method.digestion import quartet_weight


class Runs(NamedTuple):
    """Runs of successive lanes whose ket pairs have the same shell c; lanes that do not count are in none.

    Attributes
    ----------
    left : int32
        Lanes from this one up to the end of its run, itself included.
    firsts : int32
        Bit n: the n-th number over c that the lane takes in turn is that of the first lane of a run.
    """

    left: i32
    firsts: i32


def make_runs_of(nc):
    """Device function: the `Runs` of a warp whose first `count` lanes count, for shells c of `nc` functions.

    `c` are their first AOs. A run is of at most `DIGEST_QUARTETS.run` lanes, and in lanes n run to (n + 1) run - 1.
    """
    within = DIGEST_QUARTETS.run - 1

    @jit_device
    def runs_of(c, count, lane):
        lane, before = i32(lane), cuda.shfl_sync(-1, i32(c), i32(max(lane - 1, 0)))
        begins = lane & within == 0 or before != c or lane >= count
        heads = u32(cuda.ballot_sync(-1, begins))
        # where the following run begins, as a bit whose number is that of lanes in between
        following = u32(u32(heads >> u32(lane)) >> u32(1)) | u32(u32(1) << u32(31 - lane))
        left = i32(cuda.popc(u32(u32(following & u32(u32(~following) + u32(1))) - u32(1))) + 1)
        firsts = i32(0)
        for n in range(nc):
            pair = i32((lane + 32 * n) // nc)
            if pair < count and u32(heads >> u32(pair)) & u32(1):
                firsts = i32(firsts | i32(1 << n))
        return Runs(left, firsts)

    return runs_of


def quartet_doubles(nb, nc, nd):
    """Doubles that a thread keeps: D and X of one a and of all b, D and Y of the ket."""
    return 2 * (nb + 1) * (nc + nd) + 2 * nc * nd


def quartet_bytes(na, nb, nc, nd):
    """Shared memory of a block of threads: the integrals of a quartet each, and a stage for each warp."""
    return 8 * (na * nb * nc * nd * DIGEST.threads + stage_parts(nc, nd)[1] * (DIGEST.threads // 32))


def quartet_blocks(na, nb, nc, nd):
    """Blocks that share a multiprocessor, by registers and by shared memory."""
    by_registers = 65536 // DIGEST.threads // (2 * quartet_doubles(nb, nc, nd) + 64)
    return max(1, min(by_registers, 2 * SHARED_BYTES // quartet_bytes(na, nb, nc, nd)))


def make_digest_quartet(na, nb, nc, nd, precision=FP64):
    """Device function: a thread's quartet into X and Y of one matrix, with others of its warp; returns Y_cd.

    The integrals are at `place`. `d_b` are the density's rows of all b, `d_cd` is D + D^T of c and d; there are none
    without K or J. `runs` are the warp's `Runs`. The row of a matrix's first AO begins at `origin`. All but the
    matrices is of `precision`.
    """
    size, width, nbytes = nb * nc * nd, nc + nd, precision.bytes
    # `Runs.firsts` has 32 bits
    most = DIGEST_QUARTETS.run if nc <= 32 else 1
    load_row, add_row = make_load_rows(1, nc, nd, precision), make_add_rows(1, nc, nd, most, precision)
    add_rows, warp_sums = make_add_rows(nb, nc, nd, most, precision), make_warp_sums(nb, precision)
    add_to_x, add_to_y = make_add_to_x(nb, nc, nd, precision), make_add_to_y(nb, nc, nd, precision)
    no_rows = make_empty(nb * width, precision)

    @jit_device
    def digest_quartet(
        matrices, origin, a_ao, b_ao, columns, runs, stage, lane, place, weight, d_b, d_cd, y_cd, with_k, with_j
    ):  # fmt: skip
        nao, x_b, mine = matrices.nao, no_rows(), warp_place(lane)
        for a in range(na):
            a_row, here = origin + (a_ao + a) * nao, i32(place + nbytes * size * a)
            if with_k:
                d_a = load_row(matrices.densities, a_row, nao, columns, stage, lane)
                done = add_to_x(x_b, here, d_b, d_a)
                add_row(
                    matrices.x, a_row, nao, columns, runs.left, runs.firsts, stage, lane, done[:width], weight
                )
                x_b = done[width:]
            if with_j:
                sums = add_to_y(y_cd, here, d_cd, matrices.twice, a_row + b_ao, weight)
                y_cd = sums[nb:]
                total = warp_sums(sums[:nb], weight, lane)
                if mine < nb:
                    add_global(matrices.y, a_row + b_ao + mine, total)
        cuda.syncwarp()
        if with_k:
            b_row = origin + b_ao * nao
            add_rows(matrices.x, b_row, nao, columns, runs.left, runs.firsts, stage, lane, x_b, weight)
        return y_cd

    return digest_quartet


def digest_quartets(na, nb, nc, nd, with_k, with_j):
    """Kernel factory for shells of `na`, `nb`, `nc`, `nd` functions; sums X if `with_k`, Y if `with_j`."""
    size, width = nb * nc * nd, nc + nd
    load_rows, digest = make_load_rows(nb, nc, nd), make_digest_quartet(na, nb, nc, nd)
    load_block, add_block = make_load_block(nc, nd), make_add_block(nc, nd)
    no_rows, no_block = make_empty(nb * width), make_empty(nc * nd)
    copy, wait_all = make_copies(na * size, 256, 256, 8), make_wait_copies(0)
    weight_of, range_of, end_of = jit_device(quartet_weight), jit_device(share_of), jit_device(end_of_kets)
    warps = DIGEST.threads // 32
    columns_in_turn, rows_in_turn, runs_of = make_columns_in_turn(nc, nd), make_rows_in_turn(nc), make_runs_of(nc)
    stage_size = stage_parts(nc, nd)[1]

    def kernel(block: Block, lists: Lists, limits: Limits, matrices: Matrices, share: Share):
        lane, warp = i64(cuda.threadIdx.x) & 31, i64(cuda.threadIdx.x) >> 5
        work = i64(cuda.blockIdx.x) * warps + warp
        start = shared_address(cuda.shared.array(0, types.float64))
        stage = i32(start + warps * (256 * na * size) + warp * (8 * stage_size))
        start += warp * (256 * na * size)
        place = i32(start + 8 * na * size * lane)
        (first_bra, last_bra, first), nao = range_of(share, work, block), matrices.nao
        count, first_lane = min(i64(32), block.nket - first), lists.first_ket + first
        kl = first_lane + min(lane, count - 1)
        c, d = lists.ao_ket[kl, 0], lists.ao_ket[kl, 1]
        columns, rows, runs = columns_in_turn(c, d, count, lane), rows_in_turn(d, lane), runs_of(c, count, lane)
        if lane >= count or limits.counts.size > 0:  # a lane may have weight 0, but what lies in shared memory be NaN
            for n in range(na * size):
                store_shared(i32(place + 8 * n), 0.0)
        cuda.syncwarp()
        for s in range(matrices.first, matrices.last):
            origin = s * nao * nao
            y_cd, d_cd = no_block(), no_block()
            if with_j:
                d_cd = load_block(matrices.twice, origin, nao, columns, rows, stage, lane)
            some = False
            for i in range(first_bra, last_bra):
                ij = lists.first_bra + i
                live = end_of(limits, ij, first_lane + count) - first_lane
                if live <= 0:
                    continue
                some, limit = True, i32((live * (na * size) - lane + 31) >> 5)
                source = address_of(block.integrals, (i * block.nket + first) * (na * size) + lane)
                copy(i32(start + 8 * lane), source, limit)
                commit_copies()
                a_ao, b_ao = lists.ao_bra[ij, 0], lists.ao_bra[ij, 1]
                weight = weight_of(a_ao, b_ao, c, d, lists.triangle, ij, kl)
                weight, d_b = weight if lane < live else 0.0, no_rows()
                if with_k:
                    d_b = load_rows(matrices.densities, origin + b_ao * nao, nao, columns, stage, lane)
                wait_all()
                cuda.syncwarp()
                y_cd = digest(
                    matrices, origin, a_ao, b_ao, columns, runs, stage, lane, place, weight, d_b, d_cd, y_cd, with_k,
                    with_j,
                )  # fmt: skip
            if with_j and some:
                add_block(matrices.y, origin, nao, columns, rows, stage, lane, y_cd)

    return Kernel(kernel, (DIGEST.threads, quartet_blocks(na, nb, nc, nd)))
