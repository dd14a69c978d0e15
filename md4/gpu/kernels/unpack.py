"""Rows of pairs of AOs as symmetric matrices on the GPU: what exchange by density fitting multiplies."""

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I64, cuda, f64, i64, jit_device
from md4.gpu.tuning import UNPACK

# Rows and columns of the part of a matrix that a block of threads writes. In shared memory rows are one longer, so that
# columns are read from different banks.
TILE, PITCH = 32, 33
BOTH_TILES = 2 * TILE * PITCH
# Rows of a tile that the threads of a block take together, and how many of its numbers each thread has.
LINES = UNPACK.threads // TILE
OWN = TILE // LINES


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


def unpack_rows():
    """Kernel factory: out[n, i, j] = out[n, j, i] = table[n, places[i, j]] for i >= j.

    A block takes one tile on or below the diagonal, of some rows n one after the other, so that a thread reads its
    places once. The tile is written as it is and, from shared memory, transposed: both times along rows of the matrix.
    So each number of the table is read once. On the diagonal all of the tile is read. A thread reads the next row
    before it waits for the others, and there are two tiles in shared memory, so that it waits once a row.
    """
    corner, read, many = jit_device(tile_corner), jit_device(read_row), UNPACK.rows

    def kernel(table: F64, count: i64, width: i64, places: I64, tiles: i64, nao: i64, out: F64):
        shared = cuda.shared.array(BOTH_TILES, f64)
        place, value = cuda.local.array(OWN, i64), cuda.local.array(OWN, f64)
        top, left = corner(i64(cuda.blockIdx.x) % tiles)
        first = i64(cuda.blockIdx.x) // tiles * many
        last = min(count, first + many)
        x, y, half = i64(cuda.threadIdx.x) % TILE, i64(cuda.threadIdx.x) // TILE, i64(0)
        for k in range(OWN):
            i, j = top + y + k * LINES, left + x
            place[k] = places[i * nao + j] if i < nao and j < nao else -1
        # where the thread writes in a matrix, and transposed; how many of its numbers are inside of it then
        step, straight, turned = LINES * nao, (top + y) * nao + left + x, (left + y) * nao + top + x
        inside = (nao - left - y + LINES - 1) // LINES if top != left and top + x < nao else 0
        read(table, first * width, place, value)
        for n in range(first, last):
            matrix = n * nao * nao
            for k in range(OWN):
                if place[k] >= 0:
                    out[matrix + straight + k * step] = value[k]
                    shared[half + (y + k * LINES) * PITCH + x] = value[k]
            if n + 1 < last:
                read(table, (n + 1) * width, place, value)
            if top != left:
                cuda.syncthreads()
                for k in range(OWN):
                    if k < inside:
                        out[matrix + turned + k * step] = shared[half + x * PITCH + y + k * LINES]
                half = TILE * PITCH - half

    return Kernel(kernel, launch_bounds=(UNPACK.threads, UNPACK.blocks))


# launcher


def unpack_variant():
    """The one variant."""
    return Variant(unpack_rows, ())


def launch_unpack(context, table, shape, places, out, nao):
    """Matrices of `nao` AOs from a table of `shape`, (rows, columns), all in device memory."""
    count, width = shape
    lines = -(-nao // TILE)
    tiles = lines * (lines + 1) // 2
    blocks = tiles * -(-count // UNPACK.rows)
    if blocks:
        context.launch(unpack_variant(), blocks, UNPACK.threads, 0, table, count, width, places, tiles, nao, out)
