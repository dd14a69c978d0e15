"""Digestion of the even and the odd part of a block into J and K; the parts are those of `md4.method.mirror`.

As in `md4.gpu.kernels.digest_rows` a warp takes 32 elements (kl, c, d) of the ket, one a lane, and goes through the
functions ab of a few bra pairs in tiles. A lane whose c and d have the same parity reads its integrals from the even
part, any other lane from the odd one. Of the functions ab it has only those whose parity is that of cd:

    first list of a, with the even b        even a in lanes of the even part, odd a in those of the odd part
    second list of a, with the odd b        odd a in lanes of the even part, even a in those of the odd part

So a lane has half of the integrals, but all functions a and b. Hence the sums over lanes by which X is made are those
of whole blocks, and so is their number. A tile has `rows` functions of either list, `even` of the even and `odd` of the
odd functions b. Their AOs are not successive ones: they are in a table in shared memory, in this order:

    even b, odd b, `rows` even a, `rows` odd a

The rows of parts of X have the same order. Y_ab is summed apart for both parts, since the n-th number of a tile belongs
to another a in lanes of the other part.
"""

from functools import cache

from md4.gpu.compile import Kernel
from md4.gpu.device_code import cuda, i32, i64, jit_device, types, u64
from md4.gpu.emit.digest_mirrored import (
    make_load_listed,
    make_load_parts,
    make_mask_parts,
    make_sums_by_parity,
    make_sums_over_a,
    make_sums_over_b,
    padded,
)
from md4.gpu.emit.digest_rows import (
    make_load_tile,
    make_scale_tile,
    make_shared_dot,
    number_of_lane,
    store_number,
    sum_place,
)
from md4.gpu.emit.instructions import make_empty, shared_address
from md4.gpu.emit.scalars import add_at, address_at, quotient
from md4.gpu.emit.unrolled import store_shared
from md4.gpu.emit.vectors import make_store_vector
from md4.gpu.kernels.digest_lanes import (
    BLOCKS_OF_DOUBLES,
    SUM_ROW,
    THREADS,
    add_listed_sums,
    keep_lane,
    ket_element,
    lane_sum,
)
from md4.gpu.kernels.digest_parameters import Lists, Matrices, Share, share_of
from md4.gpu.kernels.digest_rows import ROW, make_walk
from md4.gpu.kernels.groups import Limits
from md4.gpu.kernels.mirrored_lanes import MirrorBlock, MirrorShape, Task, Tile, WarpMemory, part_of_lane

# Bytes of 13 32-bit numbers of each lane, and of the AOs of a tile.
LANE_BYTES, LIST_BYTES = 13 * 128, 128


def tile_doubles(rows, even, odd):
    """Doubles that a thread has in registers: integrals, and densities of c and of d."""
    return rows * (even + odd) + 2 * (2 * rows + even + odd)


def fits(rows, even, odd):
    """Whether a thread has room for a tile, and two lanes' numbers for (D + D^T)_ab of both parts."""
    doubles = tile_doubles(rows, even, odd)
    return doubles <= BLOCKS_OF_DOUBLES[-1][1] and padded(rows * (even + odd)) <= 32


@cache
def tile_parts(na_even, nb_even, nb_odd):
    """(rows, even, odd) of a tile for shells with so many functions, so that there are the fewest additions to X.

    There are never more odd functions than even ones. The walk over b ends with the even functions, so that only
    divisions count in which the odd ones end then, too.
    """
    tiles = {}
    for in_a in range(1, na_even + 1):
        for in_b in range(1, nb_even + 1):
            tile = -(-na_even // in_a), -(-nb_even // in_b), -(-nb_odd // in_b)
            if tile[1] * (in_b - 1) < nb_even and fits(*tile):
                tiles.setdefault((in_a * in_b * (2 * tile[0] + tile[1] + tile[2]), tile_doubles(*tile)), tile)
    return tiles[min(tiles)]


def tile_blocks(rows, even, odd):
    """Blocks that share a multiprocessor, by the doubles that a thread has in registers."""
    return next(blocks for blocks, most in BLOCKS_OF_DOUBLES if tile_doubles(rows, even, odd) <= most)


def ab_bytes(rows, even, odd):
    """Bytes of (D + D^T)_ab of a tile, for both parts."""
    return ROW * -(-2 * padded(rows * (even + odd)) // 32)


def warp_bytes(rows, even, odd):
    """Shared memory of a warp; see `WarpMemory`."""
    sums = SUM_ROW * (2 * rows + even + odd)
    return -(-(LANE_BYTES + LIST_BYTES + ab_bytes(rows, even, odd) + sums) // 16) * 16


def make_lists(rows, even, odd):
    """Device functions for the AOs of a tile: which one a lane finds, how it does that, and places of numbers ab."""
    count, integrals = even + odd, rows * (even + odd)
    half = padded(integrals)

    @jit_device
    def own_row(lane, shape):
        """Where the lane's function of the first tile stands in `MirrorShape.functions`, and how many follow it."""
        b, start, left = i32(shape.na_even + shape.na_odd), i32(0), i32(0)
        if lane < even:
            start, left = i32(b + lane), i32(shape.nb_even - lane)
        elif lane < count:
            n = i32(lane - even)
            start, left = i32(b + shape.nb_even + n), i32(shape.nb_odd - n)
        elif lane < count + rows:
            n = i32(lane - count)
            start, left = n, i32(shape.na_even - n)
        elif lane < count + 2 * rows:
            n = i32(lane - count - rows)
            start, left = i32(shape.na_even + n), i32(shape.na_odd - n)
        return start, left

    @jit_device
    def ao_of_lane(tile, shape, memory):
        """The lane's of the AOs of a tile, as `WarpMemory.rows` holds them."""
        lane, ao = number_of_lane(memory.mine, 0), tile.b
        start, left = number_of_lane(memory.mine, 7), number_of_lane(memory.mine, 8)
        offset = tile.first_even if lane < even else tile.first_odd
        if lane >= count:
            ao, offset = tile.a, tile.first_a
        there = offset < left
        function = shape.functions[u64(i32(start + offset if there else 0))]
        return i32(ao + function) if there else i32(-1 - ao)

    @jit_device
    def ab_place(n):
        """256 a + b with the rows of a and b of the n-th number of both parts, or -1."""
        part = i32(1 if n >= half else 0)
        n = i32(n - half * part)
        first, second = i32(count + rows * part), i32(count + rows - rows * part)
        a, b, second_n = i32(quotient(n, even)), i32(0), i32(n - rows * even)
        if second_n < 0:
            b, a = i32(n - a * even), i32(first + a)
        else:
            a = i32(quotient(second_n, max(odd, 1)))
            b, a = i32(even + second_n - a * odd), i32(second + a)
        return i32(256 * a + b) if n < integrals else i32(-1)

    return own_row, ao_of_lane, ab_place


def make_ab(rows, even, odd):
    """Device functions that load (D + D^T)_ab of a tile, that stage it in shared memory, and that add up Y_ab."""
    count, two = rows * (even + odd), 2 * padded(rows * (even + odd)) > 32
    load, sums, first_sum = make_load_tile(1, 1, True), make_sums_by_parity(count), jit_device(sum_place)

    @jit_device
    def place_ab(slot, memory, at):
        """The place of one of the lane's numbers in a matrix in bytes, and whether there is one."""
        rows_of = number_of_lane(memory.mine, slot)
        known = i32(max(rows_of, i32(0)))
        a = number_of_lane(i32(memory.rows + 4 * (known >> 8)), 0)
        b = number_of_lane(i32(memory.rows + 4 * (known & 255)), 0)
        there = i32(i32(rows_of | a) | b) >= 0
        return address_at(address_at(i64(0), i32(a if there else 0), at.row), i32(b if there else 0), 8), there

    @jit_device
    def number_ab(slot, memory, at):
        """One of the lane's numbers (D + D^T)_ab of a tile, or any other, and whether there is one."""
        place, there = place_ab(slot, memory, at)
        return load(at.twice + place, i32(0), i32(0), i32(1), i32(1))[0], there

    @jit_device
    def load_ab(memory, at):
        """The lane's numbers (D + D^T)_ab of a tile."""
        return number_ab(i32(5), memory, at), number_ab(i32(6), memory, at) if two else (0.0, False)

    @jit_device
    def stage_ab(numbers, memory):
        """Puts them to shared memory, and 0 where there is none."""
        address = i32(memory.ab + 8 * first_sum(number_of_lane(memory.mine, 0)))
        one, other = numbers
        store_shared(address, one[0] if one[1] else 0.0)
        if two:
            store_shared(i32(address + ROW), other[0] if other[1] else 0.0)

    @jit_device
    def add_part(total, slot, memory, at):
        """Adds a sum to Y, if there is one."""
        place, there = place_ab(slot, memory, at)
        if there:
            add_at(at.y + place, total)

    @jit_device
    def add_y_ab(integrals, d_cd, parity, memory, at):
        """Adds the warp's part of Y_ab."""
        lane = number_of_lane(memory.mine, 0)
        parts = sums(integrals, d_cd if parity == 0 else 0.0, d_cd if parity != 0 else 0.0, lane)
        add_part(parts[0], i32(5), memory, at)
        if two:
            add_part(parts[-1], i32(6), memory, at)

    return load_ab, stage_ab, add_y_ab


def make_x(rows, even, odd):
    """Device functions that load densities, that put the parts of X of a tile to shared memory, and that add them."""
    count, two, with_second = even + odd, even + odd + rows, rows if odd else 0  # rows of b, of the first a, as well
    every, load, no_a = two + with_second, make_load_listed((count, rows, with_second)), make_empty(rows)
    over_a, over_first = make_sums_over_a(rows, even, odd), make_sums_over_b(rows, even, odd, False)
    over_second = make_sums_over_b(rows, even, odd, True)
    store_a, store_b = make_store_vector(rows, SUM_ROW), make_store_vector(count, SUM_ROW)
    add_sums = jit_device(add_listed_sums)

    @jit_device
    def load_densities(ket, parity, memory, at):
        """D_bc, and D_ac of both lists of functions a, then the same with d."""
        c, d = address_at(at.d, ket.c, 8), address_at(at.d, ket.d, 8)
        to_first = i32(memory.rows + 4 * (count + rows * parity))
        to_second = i32(memory.rows + 4 * (count + rows - rows * parity))
        return load((memory.rows, to_first, to_second), c, d, at.row)

    @jit_device
    def stage_x(integrals, densities, parity, memory):
        c, d = densities[:every], densities[every:]
        first_c, first_d = c[count:two], d[count:two]
        second_c, second_d = (c[two:], d[two:]) if odd else (no_a(), no_a())
        to_b = i32(memory.sums + 8 * number_of_lane(memory.mine, 0))
        to_first = i32(to_b + SUM_ROW * (count + rows * parity))
        to_second = i32(to_b + SUM_ROW * (count + rows - rows * parity))
        store_b(over_a(integrals, first_d, second_d), to_b)
        store_b(over_a(integrals, first_c, second_c), i32(to_b + ROW))
        store_a(over_first(integrals, d[:count]), to_first)
        store_a(over_first(integrals, c[:count]), i32(to_first + ROW))
        store_a(over_second(integrals, d[:count]), to_second)
        store_a(over_second(integrals, c[:count]), i32(to_second + ROW))

    @jit_device
    def add_x(shape, memory, at):
        rows_of, n = memory.rows, i32(count + 2 * rows)
        ao, parts = number_of_lane(memory.mine, 1), number_of_lane(memory.mine, 2)
        add_sums(ao, parts, i32(8), memory.sums, rows_of, n, at.x, at.row)
        ao, parts = number_of_lane(memory.mine, 3), number_of_lane(memory.mine, 4)
        add_sums(ao, parts, i32(8 * shape.nd), i32(memory.sums + ROW), rows_of, n, at.x, at.row)

    return load_densities, stage_x, add_x


def make_digestion(rows, even, odd, with_k, with_j):
    """Device function that digests a tile, and returns its part of Y_cd."""
    facts, count = (rows, even, odd), rows * (even + odd)
    load_every, load_some = (make_load_parts(*facts, every) for every in (True, False))
    mask_every, mask_some = (make_mask_parts(*facts, every) for every in (True, False))
    scale, dot, half = make_scale_tile(count), make_shared_dot(count), padded(count)
    (load_ab, stage_ab, add_y_ab), (load_densities, stage_x, add_x) = make_ab(*facts), make_x(*facts)
    _, ao_of_lane, _ = make_lists(*facts)

    @jit_device
    def load(tile):
        first = tile.origin, tile.source, tile.row_step
        rest = tile.second, tile.second_step, tile.step, tile.rows, tile.second_rows, tile.even, tile.odd
        return load_every(*first, *rest) if tile.every else load_some(*first, *rest)

    @jit_device
    def mask(integrals, tile):
        there = tile.rows, tile.second_rows, tile.even, tile.odd
        return mask_every(integrals, *there) if tile.every else mask_some(integrals, *there)

    @jit_device
    def digest(tile, weight, scaled, d_cd, shape, task, memory, at):
        ao, integrals = ao_of_lane(tile, shape, memory), load(tile)
        cuda.syncwarp()  # the AOs of the tile before are not read any more
        store_number(i32(memory.rows + 4 * number_of_lane(memory.mine, 0)), ao)
        cuda.syncwarp()
        if with_j:
            numbers = load_ab(memory, at)
        if with_k:
            densities = load_densities(task.ket, task.parity, memory, at)
        if with_j:
            stage_ab(numbers, memory)
            cuda.syncwarp()
        integrals = mask(integrals, tile)
        if scaled:
            integrals = scale(integrals, weight)
        if with_k:
            stage_x(integrals, densities, task.parity, memory)
        y_cd = 0.0
        if with_j:
            y_cd = dot(integrals, i32(memory.ab + 8 * half * task.parity))
            add_y_ab(integrals, d_cd, task.parity, memory, at)
        cuda.syncwarp()
        if with_k:
            add_x(shape, memory, at)
        return y_cd

    return digest


def make_walk_pair(rows, even, odd, with_k, with_j):
    """Device function that digests all tiles of a bra pair with matrix s, and returns its part of Y_cd."""
    digest = make_digestion(rows, even, odd, with_k, with_j)

    @jit_device
    def walk_pair(block, pair, a, b, live, all_live, weight, scaled, d_cd, shape, task, memory, at):
        source = task.source + i64(pair) * block.nket * number_of_lane(memory.mine, 9)
        y_cd, n, na_even, nb = 0.0, i32(0), i32(shape.na_even), i32(shape.nb_even)
        while n < na_even:
            even_b, odd_b = i32(0), i32(0)
            while even_b < nb:
                na_odd, nb_odd, step = i32(shape.na_odd), i32(shape.nb_odd), number_of_lane(memory.mine, 10)
                evens, odds = i32(na_even - n if live else 0), i32(na_odd - n if live else 0)
                row_step, second_step = i32(step * nb), i32(step * nb_odd)
                first = address_at(source + number_of_lane(memory.mine, 11), n, row_step)
                second = address_at(source + number_of_lane(memory.mine, 12), n, second_step)
                tile = Tile(
                    a, b, n, even_b, odd_b,
                    evens if task.parity == 0 else odds, odds if task.parity == 0 else evens,
                    i32(nb - even_b), i32(nb_odd - odd_b),
                    all_live and na_odd - n >= max(rows - 1, 1) and even_b + even <= nb and odd_b + odd <= nb_odd,
                    source, address_at(first, even_b, step), address_at(second, odd_b, step),
                    row_step, second_step, step,
                )  # fmt: skip
                y_cd += digest(tile, weight, scaled, d_cd, shape, task, memory, at)
                even_b, odd_b = i32(even_b + even), i32(odd_b + odd)
            n = i32(n + rows)
        return y_cd

    return walk_pair


def digest_mirrored(rows, even, odd, blocks, with_k, with_j):
    """Kernel factory: tiles (`rows`, `even`, `odd`), `blocks` blocks a multiprocessor; X if `with_k`, Y if `with_j`."""
    warps, walk = THREADS // 32, make_walk(make_walk_pair(rows, even, odd, with_k, with_j), with_j)
    own_row, _, ab_place = make_lists(rows, even, odd)
    range_of, element_of, sum_of = jit_device(share_of), jit_device(ket_element), jit_device(lane_sum)
    part_of, first_sum, keep_sums = jit_device(part_of_lane), jit_device(sum_place), jit_device(keep_lane)
    size, ab_at = warp_bytes(rows, even, odd), LANE_BYTES + LIST_BYTES
    sums_at = ab_at + ab_bytes(rows, even, odd)

    @jit_device
    def keep(mine, lane, over_d, over_c, row, part):
        """Puts the lane's own numbers to shared memory; see `WarpMemory`."""
        keep_sums(mine, lane, over_d, over_c)
        n = first_sum(lane)
        store_number(i32(mine + 640), ab_place(n))
        store_number(i32(mine + 768), ab_place(i32(n + 32)))
        store_number(i32(mine + 896), row[0])
        store_number(i32(mine + 1024), row[1])
        store_number(i32(mine + 1152), part.quartet)
        store_number(i32(mine + 1280), part.step)
        store_number(i32(mine + 1408), part.first)
        store_number(i32(mine + 1536), part.second)

    def kernel(block: MirrorBlock, lists: Lists, limits: Limits, matrices: Matrices, share: Share, shape: MirrorShape):
        lane, warp = i32(i64(cuda.threadIdx.x) & 31), i64(cuda.threadIdx.x) >> 5
        start = i32(shared_address(cuda.shared.array(0, types.float64)) + warp * size)
        memory = WarpMemory(i32(start + 4 * lane), i32(start + LANE_BYTES), i32(start + ab_at), i32(start + sums_at))
        warp += i64(cuda.blockIdx.x) * warps
        first_bra, last_bra, first = range_of(share, warp, block)
        last = min(first + 32, block.nket * i32(shape.nc * shape.nd))
        ket = element_of(lane, first, last, lists, limits, shape)
        part = part_of(block, ket, shape)
        task = Task(ket, part.source, part.parity, i32(first_bra), i32(last_bra))
        over_d, over_c = sum_of(False, lane, first, last, lists, shape), sum_of(True, lane, first, last, lists, shape)
        keep(memory.mine, lane, over_d, over_c, own_row(lane, shape), part)
        s, end = i32(matrices.first), i32(matrices.last if first_bra < last_bra else matrices.first)
        while s < end:
            walk(s, block, lists, limits, matrices, shape, task, memory)
            s = i32(s + 1)

    return Kernel(kernel, (THREADS, blocks))
