"""Digestion of blocks of larger quartets into J and K; the equations are in `md4.method.digestion`.

A warp takes 32 elements of the ket, triples (kl, c, d) with d running fastest, one a lane, and goes through the
functions ab of a few bra pairs in tiles: `rows` functions a by `columns` functions b. A lane loads all integrals of a
tile with its c and d at once, and the densities that belong to them, so that their latencies pass together. Of these it
makes its parts of X_ac and X_ad for the functions a of the tile, and of X_bc and X_bd for the functions b.

Each of these also needs a sum over the d (or c) of other lanes. So all lanes write their parts to shared memory, where
each sum is then made by one lane, which adds it to X atomically. Where a sum reaches into the elements of another warp,
both warps add their parts. Y_cd needs no other lane. For Y_ab tensor instructions sum over the lanes.
"""

from typing import NamedTuple

from md4.gpu.compile import Kernel
from md4.gpu.device_code import cuda, i32, i64, jit_device, types
from md4.gpu.emit.digest_rows import (
    make_load_tile,
    make_scale_tile,
    make_shared_dot,
    make_tile_sums,
    make_tile_times,
    number_of_lane,
    sum_place,
)
from md4.gpu.emit.instructions import address_of, make_empty, shared_address
from md4.gpu.emit.scalars import add_at, address_at, quotient
from md4.gpu.emit.unrolled import store_shared
from md4.gpu.emit.vectors import make_store_vector
from md4.gpu.kernels.digest_lanes import (
    BLOCKS_OF_DOUBLES,
    SUM_ROW,
    THREADS,
    KetElement,
    Shape,
    add_lane_sums,
    bra_pair,
    keep_lane,
    ket_element,
    lane_sum,
)
from md4.gpu.kernels.digest_parameters import Block, Lists, Matrices, Share, share_of
from md4.gpu.kernels.groups import Limits
from md4.method.digestion import quartet_weight

# Most functions a, or b, of a tile, and most of its integrals.
MOST_ROWS, MOST_OF_A_TILE = 7, 35
# Bytes of 32 doubles, one a lane, and of five 32-bit numbers of each lane.
ROW, LANE_BYTES = 256, 5 * 128


def evenly(count, most):
    """The largest part of `count` in as few and as equal parts as there can be of at most `most`."""
    return -(-count // -(-count // most))


def tile_shape(na, nb):
    """Most functions (a, b) of a tile, for shells of `na` and `nb` functions."""
    rows = evenly(na, MOST_ROWS)
    return rows, evenly(nb, min(MOST_ROWS, MOST_OF_A_TILE // rows))


def tile_blocks(rows, columns):
    """Blocks that share a multiprocessor, by the doubles that a thread has in registers: integrals and densities."""
    doubles = rows * columns + 2 * (rows + columns)
    return next(blocks for blocks, most in BLOCKS_OF_DOUBLES if doubles <= most)


def ab_bytes(rows, columns):
    """Bytes of (D + D^T)_ab of a tile."""
    return ROW * -(-rows * columns // 32)


def warp_bytes(rows, columns):
    """Shared memory of a warp: numbers of each lane, (D + D^T)_ab of a tile, and parts of X; see `WarpMemory`."""
    return -(-(LANE_BYTES + ab_bytes(rows, columns) + SUM_ROW * (rows + columns)) // 16) * 16


class WarpMemory(NamedTuple):
    """Addresses in the shared memory of a warp.

    Attributes
    ----------
    mine : int32
        The lane's own numbers, 128 bytes apart: its number, AO and parts of its sum over d, and those of its sum over
        c (see `lane_sum`). From shared memory, since a tile leaves few registers for what is used once in it.
    ab : int32
        (D + D^T)_ab of a tile, in the order of its integrals.
    sums : int32
        Rows of parts of X: for each b, later for each a of a tile, 32 for (b or a, c), then 32 for (b or a, d).
    """

    mine: i32
    ab: i32
    sums: i32


class Task(NamedTuple):
    """What a lane works on: its element of the ket, and the warp's bra pairs from `first_bra` to `last_bra` - 1."""

    ket: KetElement
    first_bra: i32
    last_bra: i32


class Tile(NamedTuple):
    """Functions a and b of a bra pair with the lane's element of the ket.

    Attributes
    ----------
    a, b : int32
        AOs of the first ones.
    rows, columns : int32
        How many functions a and b.
    live : bool
        The lane's quartet counts.
    every : bool
        The lanes' quartets all count, and the tile has as many functions as there can be.
    source : int64
        Address of the first integral.
    row_step, step : int32
        Bytes from one a, and from one b, to the next.
    """

    a: i32
    b: i32
    rows: i32
    columns: i32
    live: types.boolean
    every: types.boolean
    source: i64
    row_step: i32
    step: i32


class Addresses(NamedTuple):
    """Addresses of one matrix D, X, D + D^T and Y, and bytes from one row to the next."""

    d: i64
    x: i64
    twice: i64
    y: i64
    row: i32


def addresses_of(matrices, s):
    """`Addresses` of matrix s (device function)."""
    row = i32(8 * matrices.nao)
    origin = address_at(i64(0), i32(s * matrices.nao), row)
    return Addresses(
        address_of(matrices.densities, i64(0)) + origin, address_of(matrices.x, i64(0)) + origin,
        address_of(matrices.twice, i64(0)) + origin, address_of(matrices.y, i64(0)) + origin, row,
    )  # fmt: skip


def make_loads(rows, columns, every, with_k):
    """Device function that loads the integrals of a tile, D_ac and D_ad of its functions a, D_bc and D_bd of its b.

    Zeros where there are none; `every` is that of the tile.
    """
    load, no_a, no_b = make_load_tile(rows, columns, every), make_empty(rows), make_empty(columns)
    load_a, load_b = make_load_tile(1, rows, every), make_load_tile(1, columns, every)

    @jit_device
    def loads(tile, ket, at):
        live = i32(tile.columns if tile.live else 0)
        integrals = load(tile.source, tile.row_step, tile.step, tile.rows, live)
        d_ac, d_ad, d_bc, d_bd = no_a(), no_a(), no_b(), no_b()
        if with_k:
            row_a, row_b = address_at(at.d, tile.a, at.row), address_at(at.d, tile.b, at.row)
            d_bd = load_b(address_at(row_b, ket.d, 8), i32(0), at.row, i32(1), tile.columns)
            d_bc = load_b(address_at(row_b, ket.c, 8), i32(0), at.row, i32(1), tile.columns)
            d_ad = load_a(address_at(row_a, ket.d, 8), i32(0), at.row, i32(1), tile.rows)
            d_ac = load_a(address_at(row_a, ket.c, 8), i32(0), at.row, i32(1), tile.rows)
        return integrals, d_ac, d_ad, d_bc, d_bd

    return loads


def make_ab(rows, columns):
    """Device functions that load (D + D^T)_ab of a tile, that stage it in shared memory, and that add up Y_ab."""
    count, load, sums = rows * columns, make_load_tile(1, 1, False), make_tile_sums(rows * columns)
    first_sum = jit_device(sum_place)

    @jit_device
    def place_in(tile, n):
        """a and b of the n-th number of a tile, and whether there is one."""
        a = i32(quotient(n, columns))
        b = i32(n - a * columns)
        return a, b, n < count and a < tile.rows and b < tile.columns

    @jit_device
    def number_ab(tile, n, at):
        """The n-th number (D + D^T)_ab of a tile, or 0."""
        a, b, there = place_in(tile, n)
        source = address_at(address_at(at.twice, i32(tile.a + a), at.row), i32(tile.b + b), 8)
        return load(source, i32(0), i32(0), i32(1), i32(1 if there else 0))[0]

    @jit_device
    def load_ab(tile, memory, at):
        """The lane's numbers (D + D^T)_ab of a tile."""
        lane = number_of_lane(memory.mine, 0)
        return number_ab(tile, lane, at), number_ab(tile, i32(lane + 32), at) if count > 32 else 0.0

    @jit_device
    def stage_ab(numbers, memory):
        """Puts them to shared memory."""
        address = i32(memory.ab + 8 * number_of_lane(memory.mine, 0))
        store_shared(address, numbers[0])
        if count > 32:
            store_shared(i32(address + ROW), numbers[1])

    @jit_device
    def add_part(total, tile, n, at):
        """Adds the sum of the n-th number, if there is one."""
        a, b, there = place_in(tile, n)
        if there:
            add_at(address_at(address_at(at.y, i32(tile.a + a), at.row), i32(tile.b + b), 8), total)

    @jit_device
    def add_y_ab(integrals, d_cd, tile, memory, at):
        """Adds the warp's part of Y_ab."""
        lane = number_of_lane(memory.mine, 0)
        parts, n = sums(integrals, d_cd, lane), first_sum(lane)
        add_part(parts[0], tile, n, at)
        if count > 32:
            add_part(parts[-1], tile, i32(n + 32), at)

    return load_ab, stage_ab, add_y_ab


def make_x(rows, columns):
    """Device functions that put the parts of X of a tile to shared memory, and that add their sums to X."""
    sum_a, sum_b = make_tile_times(rows, columns, True), make_tile_times(rows, columns, False)
    store_a, store_b = make_store_vector(rows, SUM_ROW), make_store_vector(columns, SUM_ROW)
    add_sums = jit_device(add_lane_sums)

    @jit_device
    def stage_x(integrals, d_ac, d_ad, d_bc, d_bd, tile, memory):
        of_b = i32(memory.sums + 8 * number_of_lane(memory.mine, 0))
        of_a = i32(of_b + SUM_ROW * tile.columns)
        store_b(sum_a(integrals, d_ad), of_b)
        store_b(sum_a(integrals, d_ac), i32(of_b + ROW))
        store_a(sum_b(integrals, d_bd), of_a)  # after those of b, some of whose places it takes if the tile has fewer b
        store_a(sum_b(integrals, d_bc), i32(of_a + ROW))

    @jit_device
    def add_x(tile, shape, memory, at):
        to_a, to_b = address_at(at.x, tile.a, at.row), address_at(at.x, tile.b, at.row)
        ao, parts, count = number_of_lane(memory.mine, 1), number_of_lane(memory.mine, 2), i32(tile.columns + tile.rows)
        add_sums(ao, parts, i32(8), memory.sums, tile.columns, count, to_b, to_a, at.row)
        ao, parts = number_of_lane(memory.mine, 3), number_of_lane(memory.mine, 4)
        add_sums(ao, parts, i32(8 * shape.nd), i32(memory.sums + ROW), tile.columns, count, to_b, to_a, at.row)

    return stage_x, add_x


def make_digestion(rows, columns, with_k, with_j):
    """Device function that digests a tile, and returns its part of Y_cd."""
    load_every, load_some = (make_loads(rows, columns, every, with_k) for every in (True, False))
    scale, dot = make_scale_tile(rows * columns), make_shared_dot(rows * columns)
    (load_ab, stage_ab, add_y_ab), (stage_x, add_x) = make_ab(rows, columns), make_x(rows, columns)

    @jit_device
    def digest(tile, weight, scaled, d_cd, shape, task, memory, at):
        if with_j:
            numbers_ab = load_ab(tile, memory, at)
        integrals, d_ac, d_ad, d_bc, d_bd = (
            load_every(tile, task.ket, at) if tile.every else load_some(tile, task.ket, at)
        )
        if with_j:
            stage_ab(numbers_ab, memory)
        cuda.syncwarp()
        if scaled:
            integrals = scale(integrals, weight)
        if with_k:
            stage_x(integrals, d_ac, d_ad, d_bc, d_bd, tile, memory)
        y_cd = 0.0
        if with_j:
            y_cd = dot(integrals, memory.ab)
            add_y_ab(integrals, d_cd, tile, memory, at)
        cuda.syncwarp()
        if with_k:
            add_x(tile, shape, memory, at)
        return y_cd

    return digest


def make_walk_pair(rows, columns, with_k, with_j):
    """Device function that digests all tiles of a bra pair with matrix s, and returns its part of Y_cd."""
    digest = make_digestion(rows, columns, with_k, with_j)

    @jit_device
    def walk_pair(block, pair, first_a, first_b, live, all_live, weight, scaled, d_cd, shape, task, memory, at):
        ket, step = task.ket, i32(8 * i32(shape.nc * shape.nd))
        row_step, quartet = i32(step * i32(shape.nb)), i32(shape.na * shape.nb * i32(shape.nc * shape.nd))
        first = address_of(block.integrals, (i64(pair) * block.nket + ket.pair) * quartet + ket.cd)
        y_cd, a, na, nb = 0.0, i32(0), i32(shape.na), i32(shape.nb)
        while a < na:
            height, b = i32(min(i32(rows), i32(na - a))), i32(0)
            while b < nb:
                width = i32(min(i32(columns), i32(nb - b)))
                source = address_at(address_at(first, a, row_step), b, step)
                tile = Tile(
                    i32(first_a + a), i32(first_b + b), height, width, live,
                    all_live and height == rows and width == columns, source, row_step, step,
                )  # fmt: skip
                y_cd += digest(tile, weight, scaled, d_cd, shape, task, memory, at)
                b = i32(b + columns)
            a = i32(a + rows)
        return y_cd

    return walk_pair


def make_walk(walk_pair, with_j):
    """Device function that digests all bra pairs of a warp, each by `walk_pair`, with matrix s."""
    weight_of, pair_of = jit_device(quartet_weight), jit_device(bra_pair)
    addresses, load_number = jit_device(addresses_of), make_load_tile(1, 1, True)

    @jit_device
    def walk(s, block, lists, limits, matrices, shape, task, memory):
        ket, at = task.ket, addresses(matrices, s)
        row_y = address_at(at.twice, ket.c, at.row)
        d_cd = load_number(address_at(row_y, ket.d, 8), i32(0), i32(0), i32(1), i32(1))[0] if with_j else 0.0
        y_cd, pair = 0.0, task.first_bra
        following = pair_of(lists, limits, pair)
        while pair < task.last_bra:
            a, b, end = following
            following = pair_of(lists, limits, min(i32(pair + 1), i32(task.last_bra - 1)))
            weight = ket.weight * weight_of(a, b, 0, 1, lists.triangle, pair, ket.place)
            live = weight != 0.0 and pair < ket.bras and ket.place < end
            all_live, scaled = cuda.ballot_sync(-1, not live) == 0, cuda.ballot_sync(-1, live and weight != 1.0) != 0
            if all_live or cuda.ballot_sync(-1, live) != 0:
                y_cd += walk_pair(
                    block, pair, a, b, live, all_live, weight, scaled, d_cd, shape, task, memory, at
                )  # fmt: skip
            pair = i32(pair + 1)
        if with_j and ket.weight != 0.0:
            add_at(address_at(address_at(at.y, ket.c, at.row), ket.d, 8), y_cd)

    return walk


def digest_rows(rows, columns, blocks, with_k, with_j):
    """Kernel factory: tiles of `rows` x `columns`, `blocks` blocks a multiprocessor; X if `with_k`, Y if `with_j`."""
    warps, walk = THREADS // 32, make_walk(make_walk_pair(rows, columns, with_k, with_j), with_j)
    range_of, element_of, sum_of = jit_device(share_of), jit_device(ket_element), jit_device(lane_sum)
    keep = jit_device(keep_lane)
    size, sums_at = warp_bytes(rows, columns), LANE_BYTES + ab_bytes(rows, columns)

    def kernel(block: Block, lists: Lists, limits: Limits, matrices: Matrices, share: Share, shape: Shape):
        lane, warp = i32(i64(cuda.threadIdx.x) & 31), i64(cuda.threadIdx.x) >> 5
        start = i32(shared_address(cuda.shared.array(0, types.float64)) + warp * size)
        memory = WarpMemory(i32(start + 4 * lane), i32(start + LANE_BYTES), i32(start + sums_at))
        warp += i64(cuda.blockIdx.x) * warps
        first_bra, last_bra, first = range_of(share, warp, block)
        last = min(first + 32, block.nket * i32(shape.nc * shape.nd))
        task = Task(element_of(lane, first, last, lists, limits, shape), i32(first_bra), i32(last_bra))
        over_d, over_c = sum_of(False, lane, first, last, lists, shape), sum_of(True, lane, first, last, lists, shape)
        keep(memory.mine, lane, over_d, over_c)
        s, end = i32(matrices.first), i32(matrices.last if first_bra < last_bra else matrices.first)
        while s < end:
            walk(s, block, lists, limits, matrices, shape, task, memory)
            s = i32(s + 1)

    return Kernel(kernel, (THREADS, blocks))
