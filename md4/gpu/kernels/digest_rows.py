"""Digestion of blocks of larger quartets into J and K; the equations are in `md4.method.digestion`.

A warp takes 32 elements of the ket, triples (kl, c, d) with d running fastest, one a lane, and goes through the rows ab
of a few bra pairs. The rows of a pair are taken in tiles: `rows` functions a by up to `b_step` functions b. A lane
keeps X_ac and X_ad of its c and d for the functions a of a tile, and sums X_bc and X_bd of one b after the other over
them. Each of these also needs a sum over the d (or c) of other lanes. So all lanes write their parts to shared memory,
where each sum is then made by one lane, which adds it to X atomically. Where a sum reaches into the elements of another
warp, both warps add their parts. Y_cd needs no other lane. For Y_ab the warp sums the integrals of one b over its 32
elements.

While one b is worked on, the integrals and densities of the next b are copied to shared memory.
"""

from typing import NamedTuple

from md4.gpu.compile import Kernel
from md4.gpu.device_code import cuda, i32, i64, jit_device, types
from md4.gpu.emit.instructions import address_of, commit_copies, make_empty, make_wait_copies, shared_address
from md4.gpu.emit.scalars import add_at, add_global, address_at, load_global, load_shared, quotient
from md4.gpu.emit.unrolled import store_shared
from md4.gpu.emit.vectors import (
    make_add_scaled,
    make_copy_vector,
    make_dot,
    make_load_vector,
    make_read_vector,
    make_store_vector,
)
from md4.gpu.emit.warp_sums import make_row_sums
from md4.gpu.kernels.digest_lanes import SUM_ROW, KetElement, LaneSum, Shape, add_lane_sums, ket_element, lane_sum
from md4.gpu.kernels.digest_parameters import Block, Lists, Matrices, Share, share_of
from md4.gpu.kernels.groups import Limits, end_of_kets, survives
from md4.gpu.tuning import DIGEST, DIGEST_ROWS
from md4.method.digestion import quartet_weight

# Bytes of 32 doubles, one a lane, and from one row of a stage to the next.
ROW, STAGE_ROW = 256, DIGEST_ROWS.stage_row


def tile_shape(na, nb):
    """Most functions (a, b) of a tile, for shells of `na` and `nb` functions."""
    rows = -(-na // -(-na // DIGEST_ROWS.rows))
    return rows, min(nb, DIGEST_ROWS.sums - rows)


def stage_bytes(rows):
    """Bytes that a warp reads for one b: see `make_stage`."""
    return STAGE_ROW * (rows + 2) + 64


def sums_bytes(rows, b_step):
    """Bytes of the parts of X of a tile."""
    return SUM_ROW * (rows + b_step)


def warp_bytes(rows, b_step):
    """Shared memory of a warp: parts of X, what is read now and next, and factors; see `WarpMemory`."""
    return sums_bytes(rows, b_step) + 2 * stage_bytes(rows) + ROW


class WarpMemory(NamedTuple):
    """Addresses in the shared memory of a warp.

    Attributes
    ----------
    sums : int32
        Rows of parts of X: for each b, later for each a of a tile, 32 for (b or a, c), then 32 for (b or a, d).
    stages : int32
        Two buffers for what is read for one b.
    factors : int32
        weight (D + D^T)_cd of the 32 elements.
    """

    sums: i32
    stages: i32
    factors: i32


class Task(NamedTuple):
    """What a lane works on: its element of the ket, and the warp's bra pairs from `first_bra` to `last_bra` - 1.

    `over_d` and `over_c` are the lane's sums over d (for X_ac, X_bc) and over c (for X_ad, X_bd). The ket pair of the
    warp's first element is `first_ket`; bra pairs that do not count with it are left out.
    """

    lane: i32
    ket: KetElement
    over_d: LaneSum
    over_c: LaneSum
    first_bra: i64
    last_bra: i64
    first_ket: i64


class Place(NamedTuple):
    """Where a warp is among its bra functions.

    Attributes
    ----------
    pair : int64
        The bra pair in the chunk.
    a, b : int32
        First function a of the tile, and the function b, counted in their shells.
    a_ao, b_ao : int32
        First AOs of the two shells.
    rows : int32
        Functions a of the tile.
    source : int64
        Address of the first integral (ab = 0) of the bra pair with the lane's element, or, if their quartet does not
        count, with the same functions of the last ket pair that does.
    """

    pair: i64
    a: i32
    b: i32
    a_ao: i32
    b_ao: i32
    rows: i32
    source: i64


class Addresses(NamedTuple):
    """Addresses of one matrix D, X, D + D^T and Y, and bytes from one row to the next."""

    d: i64
    x: i64
    twice: i64
    y: i64
    row: i32


def addresses_of(matrices, s):
    """`Addresses` of matrix s (device function)."""
    origin = s * matrices.nao * matrices.nao
    return Addresses(
        address_of(matrices.densities, origin), address_of(matrices.x, origin), address_of(matrices.twice, origin),
        address_of(matrices.y, origin), i32(8 * matrices.nao),
    )  # fmt: skip


def make_places(rows):
    """Device functions (next pair, first place, next place) of a warp whose tiles have `rows` functions a."""
    end_of, counts = jit_device(end_of_kets), jit_device(survives)

    @jit_device
    def next_pair(pair, last, first_ket, lists, limits):
        """The first bra pair from `pair` to `last` - 1 that counts with a ket pair; `last` if there is none."""
        while pair < last and not counts(limits, lists.first_bra + pair, lists.first_ket + first_ket):
            pair += 1
        return pair

    @jit_device
    def source_of(pair, block, lists, limits, shape, task):
        """`Place.source` of a bra pair."""
        ncd = i32(shape.nc * shape.nd)
        nket = end_of(limits, lists.first_bra + pair, lists.first_ket + block.nket) - lists.first_ket
        first = (pair * block.nket + min(task.ket.pair, nket - 1)) * (shape.na * shape.nb * ncd)
        return address_of(block.integrals, first + task.ket.cd)

    @jit_device
    def first_place(block, lists, limits, shape, task):
        """The first function b, with the first functions a, of the warp's first bra pair."""
        ao_bra, pair = lists.ao_bra, task.first_bra
        return Place(
            pair, i32(0), i32(0), i32(ao_bra[lists.first_bra + pair, 0]), i32(ao_bra[lists.first_bra + pair, 1]),
            i32(min(i64(rows), shape.na)), source_of(pair, block, lists, limits, shape, task),
        )  # fmt: skip

    @jit_device
    def next_place(now, block, lists, limits, shape, task):
        """The next b, or else the next functions a, or else the next bra pair."""
        pair, a, b, a_ao, b_ao, source = now.pair, now.a, i32(now.b + 1), now.a_ao, now.b_ao, now.source
        if b == shape.nb:
            a, b = i32(now.a + rows), i32(0)
            if a >= shape.na:
                pair, a = next_pair(now.pair + 1, task.last_bra, task.first_ket, lists, limits), i32(0)
                if pair < task.last_bra:
                    a_ao = i32(lists.ao_bra[lists.first_bra + pair, 0])
                    b_ao = i32(lists.ao_bra[lists.first_bra + pair, 1])
                    source = source_of(pair, block, lists, limits, shape, task)
        return Place(pair, a, b, a_ao, b_ao, i32(min(i64(rows), shape.na - a)), source)

    return next_pair, first_place, next_place


def make_stage(rows, with_k, with_j):
    """Device functions that fill a stage, and read from it D_bd, D_bc and (D + D^T)_ab of all a.

    A stage is what a warp reads for one b. Its rows are the integrals of each a, D_bd and D_bc, all for 32 elements,
    and (D + D^T)_ab of all a.
    """
    copy, copy_one = make_copy_vector(rows, STAGE_ROW), make_copy_vector(1, STAGE_ROW)
    at_bd, at_bc, at_ab = (STAGE_ROW * (rows + n) for n in range(3))
    read_ab = make_read_vector(rows, 8)

    @jit_device
    def fetch(stage, place, shape, task, at):
        """Starts to copy the lane's part of what is read for the b of a place."""
        mine, ncd, ket = i32(stage + 8 * task.lane), i32(shape.nc * shape.nd), task.ket
        b = i32(place.b_ao + place.b)
        source = address_at(place.source, i32((place.a * shape.nb + place.b) * ncd), 8)
        copy(mine, source, i64(8 * shape.nb * ncd), place.rows)
        if with_k:
            row_b = address_at(at.d, b, at.row)
            copy_one(i32(mine + at_bd), address_at(row_b, ket.d, 8), i64(0), 1)
            copy_one(i32(mine + at_bc), address_at(row_b, ket.c, 8), i64(0), 1)
        if with_j and task.lane < rows:
            row_a = address_at(at.twice, i32(place.a_ao + place.a + task.lane), at.row)
            copy_one(i32(mine + at_ab), address_at(row_a, b, 8), i64(0), i32(place.rows - task.lane))

    @jit_device
    def staged_bd(stage, lane):
        """D_bd of the lane's d."""
        return load_shared(i32(i32(stage + 8 * lane) + at_bd))

    @jit_device
    def staged_bc(stage, lane):
        """D_bc of the lane's c."""
        return load_shared(i32(i32(stage + 8 * lane) + at_bc))

    @jit_device
    def staged_ab(stage):
        """(D + D^T)_ab of all a."""
        return read_ab(i32(stage + at_ab))

    return fetch, staged_bd, staged_bc, staged_ab


def make_digestion(rows, with_k, with_j):
    """Device function that digests a lane's element of the ket with all rows ab of its warp, for matrix s."""
    load, dot, add, empty = make_load_vector(rows), make_dot(rows), make_add_scaled(rows), make_empty(rows)
    read, store = make_read_vector(rows, STAGE_ROW), make_store_vector(rows)
    row_sums, wait_older = make_row_sums(rows, STAGE_ROW), make_wait_copies(1)
    fetch, staged_bd, staged_bc, staged_ab = make_stage(rows, with_k, with_j)
    _, first_place, next_place = make_places(rows)
    weight_of, add_sums, counts = jit_device(quartet_weight), jit_device(add_lane_sums), jit_device(survives)
    addresses, stage_size = jit_device(addresses_of), stage_bytes(rows)

    @jit_device
    def weight_at(place, lists, limits, ket):
        """Weight of the quartets of a bra pair with the lane's ket pair; 0 for a lane that only repeats another."""
        ij, kl = lists.first_bra + place.pair, lists.first_ket + ket.pair
        weight = weight_of(place.a_ao, place.b_ao, ket.c_first, ket.d_first, lists.triangle, ij, kl)
        return weight if ket.live and counts(limits, ij, kl) else 0.0

    @jit_device
    def add_y_ab(stage, factors, place, task, at):
        """Adds the warp's part of Y_ab for all a of a tile and one b, by every fourth lane."""
        mine = i32(task.lane >> 2)
        total = row_sums(stage, factors, task.lane, min(mine, i32(rows - 1)))
        if (task.lane & 3) == 0 and mine < place.rows:
            row_y = address_at(at.y, i32(place.a_ao + place.a + mine), at.row)
            add_at(address_at(row_y, i32(place.b_ao + place.b), 8), total)

    @jit_device
    def add_x(memory, n, place, b_first, task, at):
        """Adds the sums of a finished tile to X_bc, X_bd, X_ac and X_ad; its n functions b begin with `b_first`."""
        to_b = address_at(at.x, i32(place.b_ao + b_first), at.row)
        to_a = address_at(at.x, i32(place.a_ao + place.a), at.row)
        count = i32(n + place.rows)
        add_sums(task.over_d, memory.sums, n, count, to_b, to_a, at.row)
        add_sums(task.over_c, i32(memory.sums + ROW), n, count, to_b, to_a, at.row)

    @jit_device
    def digest(s, block, lists, limits, matrices, shape, task, memory):
        """Goes through the rows ab of the warp, one b after the other; sums of X are added where a tile ends."""
        ket, at = task.ket, addresses(matrices, s)
        element = s * matrices.nao * matrices.nao + ket.c * matrices.nao + ket.d
        d_cd = load_global(matrices.twice, element) if with_j else 0.0
        place = first_place(block, lists, limits, shape, task)
        fetch(memory.stages, place, shape, task, at)
        commit_copies()
        n, b_first = i32(0), i32(0)  # functions b of the tile so far, and the first of them
        offset, weight, y_cd, y_tile = i32(0), 0.0, 0.0, 0.0
        x_ac, x_ad, d_ac, d_ad = empty(), empty(), empty(), empty()
        while place.pair < task.last_bra:
            if place.a == 0 and place.b == 0:  # another bra pair
                weight = weight_at(place, lists, limits, ket)
                if not with_k:
                    cuda.syncwarp()  # lanes may still read the factors of the last bra pair
                store_shared(i32(memory.factors + 8 * task.lane), weight * d_cd)
            if n == 0 and with_k:  # another tile
                row_a = address_at(at.d, i32(place.a_ao + place.a), at.row)
                d_ac = load(address_at(row_a, ket.c, 8), i64(at.row), place.rows)
                d_ad = load(address_at(row_a, ket.d, 8), i64(at.row), place.rows)
                x_ac, x_ad = empty(), empty()
            following = next_place(place, block, lists, limits, shape, task)
            cuda.syncwarp()
            if following.pair < task.last_bra:
                fetch(i32(memory.stages + (stage_size - offset)), following, shape, task, at)
            commit_copies()
            wait_older()
            cuda.syncwarp()
            stage = i32(memory.stages + offset)
            integrals = read(i32(stage + 8 * task.lane))
            parts = i32(memory.sums + 8 * task.lane + SUM_ROW * n)
            if with_k:
                x_ac = add(x_ac, integrals, staged_bd(stage, task.lane))
                x_ad = add(x_ad, integrals, staged_bc(stage, task.lane))
                store_shared(parts, weight * dot(integrals, d_ad, 0.0))
                store_shared(i32(parts + ROW), weight * dot(integrals, d_ac, 0.0))
            if with_j:
                y_tile = dot(integrals, staged_ab(stage), y_tile)
                add_y_ab(stage, memory.factors, place, task, at)
            n, offset = i32(n + 1), i32(stage_size - offset)
            if n == shape.b_step or following.b == 0:  # the tile is finished
                y_cd += weight * y_tile
                y_tile = 0.0
                if with_k:
                    store(x_ac, weight, i32(parts + SUM_ROW), i32(SUM_ROW))
                    store(x_ad, weight, i32(parts + SUM_ROW + ROW), i32(SUM_ROW))
                    cuda.syncwarp()
                    add_x(memory, n, place, b_first, task, at)
                n, b_first = i32(0), following.b
            place = following
        if with_j and ket.live:
            add_global(matrices.y, element, y_cd)

    return digest


def digest_rows(rows, blocks, with_k, with_j):
    """Kernel factory: tiles of `rows` functions a, `blocks` blocks a multiprocessor; X if `with_k`, Y if `with_j`."""
    warps, digest = DIGEST.threads // 32, make_digestion(rows, with_k, with_j)
    next_pair, _, _ = make_places(rows)
    range_of, element_of, sum_of = jit_device(share_of), jit_device(ket_element), jit_device(lane_sum)
    both_stages = 2 * stage_bytes(rows)

    @jit_device
    def memory_of(base, warp, b_step):
        """`WarpMemory` of a warp, from the address of the block's shared memory; see `warp_bytes`."""
        sums = SUM_ROW * (rows + b_step)
        start = i32(base + warp * (sums + both_stages + ROW))
        stages = i32(start + sums)
        return WarpMemory(start, stages, i32(stages + both_stages))

    def kernel(block: Block, lists: Lists, limits: Limits, matrices: Matrices, share: Share, shape: Shape):
        lane, warp = i32(i64(cuda.threadIdx.x) & 31), i64(cuda.threadIdx.x) >> 5
        base = shared_address(cuda.shared.array(0, types.float64))
        memory = memory_of(base, warp, shape.b_step)
        warp += i64(cuda.blockIdx.x) * warps
        first_bra, last_bra, first = range_of(share, warp, block)
        ncd = i32(shape.nc * shape.nd)
        first_ket, last = quotient(first, ncd), min(first + 32, block.nket * ncd)
        first_bra = next_pair(first_bra, last_bra, first_ket, lists, limits)
        ket = element_of(lane, first, last, lists, shape)
        over_d = sum_of(False, lane, first, last, lists, shape)
        over_c = sum_of(True, lane, first, last, lists, shape)
        task = Task(lane, ket, over_d, over_c, first_bra, last_bra, first_ket)
        for s in range(matrices.first, matrices.last if first_bra < last_bra else matrices.first):
            if not with_k:
                cuda.syncwarp()  # lanes may still read what the last matrix left in shared memory
            digest(s, block, lists, limits, matrices, shape, task, memory)

    return Kernel(kernel, (DIGEST.threads, blocks))
