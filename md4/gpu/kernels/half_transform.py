"""Rows of pairs of AOs times orbitals, without the matrices that the rows stand for: MP2, and exchange by fitting.

    W[n, mu, o] = sum_nu M_n[mu, nu] C[nu, o]          M_n[mu, nu] = M_n[nu, mu] = table[n, places[mu, nu]]

A block of threads takes a row n. Tiles of M_n on and below the diagonal come to shared memory by asynchronous copies,
number by number, a few tiles ahead; where the numbers are in the row is read one tile earlier still. On tensor cores
one half of the warps multiplies a tile by rows of C, and the other half the transposed tile. W of a row n is in shared
memory until it is complete. So each number of the table is read once, and no more than W is written, where matrices
would be written, and read again.
"""

from functools import cache
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, cuda, f64, i32, i64, jit_device
from md4.gpu.emit.instructions import (
    address_of,
    commit_copies,
    copy_async,
    global_int,
    make_copies,
    make_wait_copies,
    mma_16x8x8,
    mma_by_halves,
    shared_address,
    shared_real,
    shared_vector,
    store,
)
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.values import INT, tuple_of, word
from md4.gpu.emit.values import i32 as INT32
from md4.gpu.emit.values import i64 as INT64

# Rows and columns of a tile; in shared memory rows are further apart, so that both ways to read a tile meet all banks.
TILE, PITCH = 32, 36
TILE_BYTES = 8 * TILE * PITCH
# Threads of a block: for each product two warps for 16 rows of a tile, which share the columns of C.
THREADS = 256
# Numbers of a tile that a thread copies, and the rows between them.
OWN, LINES = TILE * TILE // THREADS, THREADS // TILE
# Tiles that are copied or multiplied at a time, and numbers of columns of W, in eights, that a launch may have.
STAGES, COLUMNS8 = 4, (2, 4)
# As often the table may be read, each time for other columns; more take longer than matrices would.
MOST_PASSES = 3


class Transformed(NamedTuple):
    """W, and how many numbers apart its successive rows n, AOs and orbitals are."""

    numbers: F64
    row: i64
    ao: i64
    orbital: i64


@cache
def make_add_products(columns8, wide):
    """Intrinsic (t, row_step, k_step, c, w): W += T C for 16 rows and half of the columns of W.

    Addresses in shared memory are those of the lane: `t` of a number of the tile, from which 8 rows are `row_step` and
    4 columns `k_step` bytes, or rows and columns exchanged; `c` and `w` of its first ones. The columns of a warp are
    every other eight.
    """
    pitch, mma = c_pitch(columns8), mma_16x8x8 if wide else mma_by_halves
    w_step, eights = 512 * columns8, range(0, columns8, 2)

    @word(None, INT32, INT32, INT32, INT32, INT32)
    def add_products(t, row_step, k_step, c, w):
        sums = [[*shared_vector(w, 64 * n), *shared_vector(w, 64 * n + w_step)] for n in eights]
        for k in range(0, TILE, 8):
            a = [shared_real(address) for four in (t, t + k_step) for address in (four, four + row_step)]
            for m, n in enumerate(eights):
                b = [shared_real(c, 8 * pitch * (k + four) + 64 * n) for four in (0, 4)]
                sums[m] = mma(sums[m], a, b)
            t = t + k_step + k_step
        for total, n in zip(sums, eights):
            store(w, total[:2], 64 * n)
            store(w, total[2:], 64 * n + w_step)

    return add_products


@word(tuple_of(INT, OWN), INT64, INT32)
def load_places(address, step):
    """Where the thread's numbers of a tile are in a row; places are `step` bytes apart."""
    found = []
    for _ in range(OWN):
        found.append(global_int(address))
        address = address + step.i64
    return found


@word(None, INT32, INT64, tuple_of(INT, OWN))
def copy_places(to, row, places):
    """Begins to copy the thread's numbers of a tile."""
    for n, place in enumerate(places):
        copy_async(to, row + place.i64 * 8, (row, 0), 8 * LINES * PITCH * n, nbytes=8)


def c_pitch(columns8):
    """Numbers from one row of C to the next in shared memory: lanes meet all banks."""
    return 8 * columns8 + 4


def half_transform(columns8, unit):
    """Kernel factory for so many columns of C, in eights."""
    pitch, width = c_pitch(columns8), 8 * columns8
    c_bytes, add_products = 8 * TILE * pitch, make_add_products(columns8, unit == "dmma16")
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
    def copy_tile(slot, bra_rows, row, places, orbitals, i, j, tid):
        """Begins to copy tile (i, j) of M_n and rows j of C, and at the first tile of a row of them rows i of C."""
        copy_places(i32(slot + 8 * ((tid >> 5) * PITCH + (tid & 31))), row, places)
        copy_rows(slot + TILE_BYTES, orbitals + 8 * TILE * width * j, tid)
        if j == 0:
            copy_rows(bra_rows + (i & 1) * c_bytes, orbitals + 8 * TILE * width * i, tid)

    def kernel(
        table: F64, row_width: i64, places: I32, tiles: i64, orbitals: F64, out: Transformed, nao: i64, count: i64
    ):
        # places has 1024 numbers for each tile on and below the diagonal; C has 32 `tiles` rows of all columns, of
        # which `count` are wanted
        w = cuda.shared.array(0, f64)
        tid, n, numbers = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x), TILE * tiles * width
        lane, warp, many = tid & 31, tid >> 5, tiles * (tiles + 1) // 2
        bra_rows = i64(shared_address(w)) + 8 * numbers
        ring, of_row, of_c = bra_rows + 2 * c_bytes, address_of(table, n * row_width), address_of(orbitals, 0)
        of_places = address_of(places, 0) + 4 * tid
        m = tid
        while m < numbers:
            w[m] = 0.0
            m += THREADS
        i, j, next_i, next_j = i64(0), i64(0), i64(0), i64(0)
        coming = load_places(of_places, 4 * THREADS)
        for step in range(STAGES - 1):
            if step < many:
                copy_tile(ring + step * slot_bytes, bra_rows, of_row, coming, of_c, next_i, next_j, tid)
                next_i, next_j = (next_i, next_j + 1) if next_j < next_i else (next_i + 1, i64(0))
            commit_copies()
            coming = load_places(of_places + 4 * TILE * TILE * min(step + 1, many - 1), 4 * THREADS)
        # warps of the first half have rows of the tile, the others columns
        turned, rows, half = warp >> 2, 16 * (warp & 1), (warp >> 1) & 1
        own, inner = lane >> 2, lane & 3
        if turned == 0:
            t_place, row_step, k_step = 8 * ((rows + own) * PITCH + inner), i64(64 * PITCH), i64(32)
        else:
            t_place, row_step, k_step = 8 * (inner * PITCH + rows + own), i64(64), i64(32 * PITCH)
        c_place = 8 * (inner * pitch + own + 8 * half)
        w_place = i64(shared_address(w)) + 8 * ((rows + own) * width + 2 * inner + 8 * half)
        slot = i64(0)
        for step in range(many):
            wait()
            cuda.syncthreads()
            ahead = step + STAGES - 1
            if ahead < many:
                free = ring + (slot + STAGES - 1 if slot == 0 else slot - 1) * slot_bytes
                copy_tile(free, bra_rows, of_row, coming, of_c, next_i, next_j, tid)
                next_i, next_j = (next_i, next_j + 1) if next_j < next_i else (next_i + 1, i64(0))
                coming = load_places(of_places + 4 * TILE * TILE * min(ahead + 1, many - 1), 4 * THREADS)
            commit_copies()
            here = ring + slot * slot_bytes
            if turned == 0:
                c, line = here + TILE_BYTES, i
            else:
                c, line = bra_rows + (i & 1) * c_bytes, j
            if turned == 0 or i != j:
                add_products(
                    i32(here + t_place), i32(row_step), i32(k_step), i32(c + c_place),
                    i32(w_place + 8 * TILE * width * line),
                )  # fmt: skip
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
    for columns8 in COLUMNS8[::-1] if count > 8 * COLUMNS8[0] else COLUMNS8[:1]:
        fits = shared_bytes(columns8, -(-nao // TILE)) <= context.block_shared
        if fits and count <= 8 * columns8 * MOST_PASSES:
            return columns8
    return None


def launch_half_transform(context, columns8, table, shape, places, nao, orbitals, out, count):
    """Some columns of W.

    `table` has `shape`, (rows, width); `places` are those of tiles, as the kernel takes them; `orbitals` are padded to
    whole tiles, (side, 8 columns8); `out` is a `Transformed`, `count` how many columns are wanted.
    """
    (rows, width), tiles = shape, -(-nao // TILE)
    if rows * count:
        context.launch(
            Variant(half_transform, (columns8, context.unit)), rows, THREADS, shared_bytes(columns8, tiles), table,
            width, places, tiles, orbitals, out, nao, count,
        )  # fmt: skip
