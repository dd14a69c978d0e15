"""Rows of pairs of AOs times orbitals, without the matrices that the rows stand for: MP2, and exchange by fitting.

    W[n, mu, o] = sum_nu M_n[mu, nu] C[nu, o]          M_n[mu, nu] = M_n[nu, mu] = table[n, places[mu, nu]]

A block of threads takes a row n. Tiles of M_n on and below the diagonal come to shared memory by asynchronous copies,
number by number, a few tiles ahead. On tensor cores one half of the warps multiplies a tile by rows of C, and the other
half the transposed tile. W of a row n is in shared memory until it is complete. So each number of the table is read
once, and no more than W is written, where matrices would be written, and read again.
"""

from functools import cache
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, cuda, f64, i32, i64, jit_device
from md4.gpu.emit.instructions import (
    address_of,
    commit_copies,
    copy_number,
    make_copies,
    make_wait_copies,
    mma_8x8x4,
    shared_address,
    shared_real,
    shared_vector,
    store,
)
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.values import i32 as INT32
from md4.gpu.emit.values import word

# Rows and columns of a tile; in shared memory rows are further apart, so that both ways to read a tile meet all banks.
TILE, PITCH = 32, 36
TILE_BYTES = 8 * TILE * PITCH
# Threads of a block: a half has a warp for 8 rows of a tile.
THREADS = 256
# Tiles that are copied or multiplied at a time, and most columns of W, in eights.
STAGES, MOST_COLUMNS8 = 4, 4
# As often the table may be read, each time for other columns; more take longer than matrices would.
MOST_PASSES = 3


class Transformed(NamedTuple):
    """W, and how many numbers apart its successive rows n, AOs and orbitals are."""

    numbers: F64
    row: i64
    ao: i64
    orbital: i64


@cache
def make_add_products(columns8):
    """Intrinsic (t, t_step, c, w): W += T C for 8 rows of W, whose addresses in shared memory are those of the lane.

    `t` is that of a number of the tile; four columns of it on, or four rows if it is transposed, are `t_step` bytes.
    """
    pitch = c_pitch(columns8)

    @word(None, INT32, INT32, INT32, INT32)
    def add_products(t, t_step, c, w):
        sums = [shared_vector(w, 64 * n) for n in range(columns8)]
        for k in range(TILE // 4):
            number = shared_real(t)
            for n in range(columns8):
                sums[n] = mma_8x8x4(sums[n], number, shared_real(c, 32 * pitch * k + 64 * n))
            t = t + t_step
        for n in range(columns8):
            store(w, sums[n], 64 * n)

    return add_products


def c_pitch(columns8):
    """Numbers from one row of C to the next in shared memory: lanes meet all banks."""
    return 8 * columns8 + 4


def half_transform(columns8):
    """Kernel factory for so many columns of C, in eights."""
    pitch, width = c_pitch(columns8), 8 * columns8
    c_bytes, add_products = 8 * TILE * pitch, make_add_products(columns8)
    slot_bytes, wait, copy_16 = TILE_BYTES + c_bytes, make_wait_copies(STAGES - 2), make_copies(1, 16)

    @jit_device
    def copy_rows(to, source, tid):
        """Begins to copy 32 rows of C."""
        n = tid
        while n < TILE * width // 2:
            row = n // (width // 2)
            copy_16(i32(to + 8 * (row * pitch + 2 * (n - row * (width // 2)))), source + 16 * n, 1)
            n += THREADS

    @jit_device
    def copy_tile(slot, bra_rows, places, table, orbitals, side, i, j, tid):
        """Begins to copy tile (i, j) of M_n and rows j of C, and at the first tile of a row of them rows i of C."""
        lane, row = tid & 31, tid >> 5
        for k in range(TILE // (THREADS // 32)):
            place = i64(places[(TILE * i + row) * side + TILE * j + lane])
            copy_number(i32(slot + 8 * (row * PITCH + lane)), table + 8 * place)
            row += THREADS // 32
        copy_rows(slot + TILE_BYTES, orbitals + 8 * TILE * width * j, tid)
        if j == 0:
            copy_rows(bra_rows + (i & 1) * c_bytes, orbitals + 8 * TILE * width * i, tid)

    def kernel(
        table: F64, row_width: i64, places: I32, tiles: i64, orbitals: F64, out: Transformed, nao: i64, count: i64
    ):
        # places has rows of 32 `tiles` numbers; C has 32 `tiles` rows of all columns, of which `count` are wanted
        w = cuda.shared.array(0, f64)
        tid, n, side = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x), TILE * tiles
        lane, warp = tid & 31, tid >> 5
        numbers = side * width
        bra_rows = i64(shared_address(w)) + 8 * numbers
        ring, of_row, of_c = bra_rows + 2 * c_bytes, address_of(table, n * row_width), address_of(orbitals, 0)
        m = tid
        while m < numbers:
            w[m] = 0.0
            m += THREADS
        i, j, next_i, next_j = i64(0), i64(0), i64(0), i64(0)
        for step in range(STAGES - 1):
            if next_i < tiles:
                copy_tile(ring + step * slot_bytes, bra_rows, places, of_row, of_c, side, next_i, next_j, tid)
                next_i, next_j = (next_i, next_j + 1) if next_j < next_i else (next_i + 1, i64(0))
            commit_copies()
        # warps of the first half have rows of the tile, the others columns
        turned, rows = warp >> 2, 8 * (warp & 3)
        own, inner = lane >> 2, lane & 3
        if turned == 0:
            t_place, t_step = 8 * ((rows + own) * PITCH + inner), i64(32)
        else:
            t_place, t_step = 8 * (inner * PITCH + rows + own), i64(32 * PITCH)
        c_place, w_place = 8 * (inner * pitch + own), i64(shared_address(w)) + 8 * ((rows + own) * width + 2 * inner)
        slot = i64(0)
        while i < tiles:
            wait()
            cuda.syncthreads()
            if next_i < tiles:
                free = ring + (slot + STAGES - 1 if slot == 0 else slot - 1) * slot_bytes
                copy_tile(free, bra_rows, places, of_row, of_c, side, next_i, next_j, tid)
                next_i, next_j = (next_i, next_j + 1) if next_j < next_i else (next_i + 1, i64(0))
            commit_copies()
            here = ring + slot * slot_bytes
            if turned == 0:
                c, line = here + TILE_BYTES, i
            else:
                c, line = bra_rows + (i & 1) * c_bytes, j
            if turned == 0 or i != j:
                add_products(
                    i32(here + t_place), i32(t_step), i32(c + c_place), i32(w_place + 8 * TILE * width * line)
                )
            slot = slot + 1 if slot + 1 < STAGES else i64(0)
            i, j = (i, j + 1) if j < i else (i + 1, i64(0))
        cuda.syncthreads()
        m, first = tid, n * out.row
        if out.orbital == 1:
            while m < nao * count:
                ao = quotient(m, count)
                o = m - ao * count
                out.numbers[first + ao * out.ao + o] = w[ao * width + o]
                m += THREADS
        else:
            while m < nao * count:
                o = quotient(m, nao)
                ao = m - o * nao
                out.numbers[first + ao * out.ao + o * out.orbital] = w[ao * width + o]
                m += THREADS

    return Kernel(kernel, (THREADS, 1))


# launcher


def shared_bytes(columns8, tiles):
    """Bytes of shared memory of a block."""
    c = 8 * TILE * c_pitch(columns8)
    return 64 * columns8 * TILE * tiles + 2 * c + STAGES * (TILE_BYTES + c)


def columns_at_once(context, nao, count):
    """How many eights of columns of C a launch takes; None where matrices are faster, or the device has no room."""
    if context.unit == "fma":
        return None
    tiles, all8 = -(-nao // TILE), -(-count // 8)
    for passes in range(1, MOST_PASSES + 1):
        columns8 = -(-all8 // passes)
        if columns8 <= MOST_COLUMNS8 and shared_bytes(columns8, tiles) <= context.block_shared:
            return columns8
    return None


def launch_half_transform(context, columns8, table, shape, places, nao, orbitals, out, count):
    """Some columns of W.

    `table` has `shape`, (rows, width); `places` and `orbitals` are padded to whole tiles, (side, side) of int32 and
    (side, 8 columns8); `out` is a `Transformed`, `count` how many columns are wanted.
    """
    (rows, width), tiles = shape, -(-nao // TILE)
    if rows * count:
        context.launch(
            Variant(half_transform, (columns8,)), rows, THREADS, shared_bytes(columns8, tiles), table, width, places,
            tiles, orbitals, out, nao, count,
        )  # fmt: skip
