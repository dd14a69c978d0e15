"""Rows of pairs of AOs as symmetric matrices on the GPU: what exchange by density fitting multiplies."""

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I64, cuda, f64, i64, jit_device

THREADS = 256  # of a block, a multiple of 32
ROWS = 8  # rows of the table that a block takes
BLOCKS = 5  # blocks that a multiprocessor is to hold at once
SUMS_BLOCKS = 4  # the same of the kernel that also makes sums, which needs more registers
# Rows and columns of the part of a matrix that a block of threads writes. In shared memory rows are one longer, so that
# columns are read from different banks.
TILE, PITCH = 32, 33
BOTH_TILES = 2 * TILE * PITCH
# Rows of a tile that the threads of a block take together, and how many of its numbers each thread has.
LINES = THREADS // TILE
OWN = TILE // LINES
# Warps of a block: TILE is also the number of threads of a warp, so that each has one row of a tile at a time.
WARPS = LINES


def tile_corner(tile):
    """First row and column of a tile; the tiles on and below the diagonal are counted row by row."""
    line = i64(0)
    while (line + 1) * (line + 2) // 2 <= tile:
        line += 1
    return line * TILE, (tile - line * (line + 1) // 2) * TILE


def read_row(table, first, place, value):
    """A thread's numbers of the row of the table that begins at `first`."""
    for k in range(OWN):
        if place[k] >= 0:
            value[k] = table[first + place[k]]


def read_density(density, place, top, left, lane, line, nao, weight):
    """A thread's weights of pairs i >= j in a sum: 2 D_ij of a symmetric density, D_ii; 0 above the diagonal."""
    for k in range(OWN):
        i, j = top + line + k * LINES, left + lane
        weight[k] = 0.0
        if place[k] >= 0 and i >= j:
            weight[k] = density[i * nao + j] * (1.0 if i == j else 2.0)


def warp_sum(value):
    """The sum of a number over the lanes of a warp, known to all of them."""
    other = 16
    while other > 0:
        value += cuda.shfl_xor_sync(-1, value, other)
        other >>= 1
    return value


def unpack_rows(sums, chosen):
    """Kernel factory: out[n, i, j] = out[n, j, i] = table[n, places[i, j]] for i >= j.

    With `sums` also parts of sum_ij density[i, j] out[n, i, j] for a symmetric density: those of warp w of a tile's
    block in part[n, tile * WARPS + w]. So J need not read the rows of the table for them. With `chosen`, rows[n] is the
    row of the table in place of n.

    A block takes one tile on or below the diagonal, of some rows n one after the other, so that a thread reads its
    places once. The tile is written as it is and, from shared memory, transposed: both times along rows of the matrix.
    Rows of a matrix are `pitch` numbers apart: where these are whole sectors, a warp writes no part of one.
    So each number of the table is read once. On the diagonal all of the tile is read. A thread reads the next row
    before it waits for the others, and there are two tiles in shared memory, so that it waits once a row.
    """
    corner, read, many = jit_device(tile_corner), jit_device(read_row), ROWS
    weigh, added = jit_device(read_density), jit_device(warp_sum)

    def kernel(
        table: F64, rows: I64, count: i64, width: i64, places: I64, tiles: i64, nao: i64, pitch: i64, out: F64,
        density: F64, part: F64,
    ):  # fmt: skip
        shared = cuda.shared.array(BOTH_TILES, f64)
        place, value, weight = cuda.local.array(OWN, i64), cuda.local.array(OWN, f64), cuda.local.array(OWN, f64)
        tile = i64(cuda.blockIdx.x) % tiles
        top, left = corner(tile)
        first = i64(cuda.blockIdx.x) // tiles * many
        last = min(count, first + many)
        x, y, half = i64(cuda.threadIdx.x) % TILE, i64(cuda.threadIdx.x) // TILE, i64(0)
        for k in range(OWN):
            i, j = top + y + k * LINES, left + x
            place[k] = places[i * nao + j] if i < nao and j < nao else -1
        if sums:
            weigh(density, place, top, left, x, y, nao, weight)
        # where the thread writes in a matrix, and transposed; how many of its numbers are inside of it then
        step, straight, turned = LINES * pitch, (top + y) * pitch + left + x, (left + y) * pitch + top + x
        inside = (nao - left - y + LINES - 1) // LINES if top != left and top + x < nao else 0
        read(table, (rows[first] if chosen else first) * width, place, value)
        for n in range(first, last):
            matrix, total = n * nao * pitch, 0.0
            for k in range(OWN):
                if place[k] >= 0:
                    out[matrix + straight + k * step] = value[k]
                    shared[half + (y + k * LINES) * PITCH + x] = value[k]
                    if sums:
                        total += weight[k] * value[k]
            if n + 1 < last:
                read(table, (rows[n + 1] if chosen else n + 1) * width, place, value)
            if sums:
                total = added(total)
                if x == 0:
                    part[(n * tiles + tile) * WARPS + y] = total
            if top != left:
                cuda.syncthreads()
                for k in range(OWN):
                    if k < inside:
                        out[matrix + turned + k * step] = shared[half + x * PITCH + y + k * LINES]
                half = TILE * PITCH - half

    return Kernel(kernel, launch_bounds=(THREADS, SUMS_BLOCKS if sums else BLOCKS))


# launcher


def parts_of_sums(nao):
    """Number of parts of the sums over pairs of `nao` AOs."""
    return tiles_of(nao) * WARPS


def tiles_of(nao):
    """Number of tiles on and below the diagonal."""
    lines = -(-nao // TILE)
    return lines * (lines + 1) // 2


def launch_unpack(context, table, shape, places, out, square, density=None, part=None, rows=None):
    """Matrices from a table of `shape`, (rows, columns), all in device memory; with a density also sums.

    `square` is the number of AOs, and the numbers from one row of a matrix to the next. `part` has the shape
    (rows, parts_of_sums(nao)). Of a table, `rows` of int64 says which rows, so many as `shape` says; without it, all.
    """
    (count, width), (nao, pitch) = shape, square
    tiles, sums, chosen = tiles_of(nao), density is not None, rows is not None
    blocks = tiles * -(-count // ROWS)
    if blocks:
        given = (density, part) if sums else (out, out)  # which are not used
        context.launch(
            Variant(unpack_rows, (sums, chosen)), blocks, THREADS, 0,
            table, rows if chosen else places, count, width, places, tiles, nao, pitch, out, *given,
        )  # fmt: skip
