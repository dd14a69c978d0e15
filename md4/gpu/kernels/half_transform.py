"""Rows of pairs of AOs times orbitals, without the matrices that the rows stand for: MP2, and exchange by fitting.

    W[n, mu, o] = sum_nu M_n[mu, nu] C[nu, o]          M_n[mu, nu] = M_n[nu, mu] = table[n, places[mu, nu]]

A block of threads takes a row n. Tiles of M_n on and below the diagonal come to registers a few tiles ahead, number by
number, and from there to shared memory; where the numbers are in the row is read one tile earlier still. (Asynchronous
copies of single numbers took 3 to 17% longer.) On tensor cores one half of the warps multiplies a tile by rows of C,
and the other half the transposed tile. W of a row n is in shared memory until it is complete. So each number of the
table is read once, and no more than W is written, where matrices would be written, and read again.
"""

from functools import cache
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, cuda, f64, i32, i64, jit_device
from md4.gpu.emit.instructions import (
    address_of,
    commit_copies,
    global_int,
    load,
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
from md4.gpu.emit.values import FP64, INT, tuple_of, word
from md4.gpu.emit.values import i32 as INT32
from md4.gpu.emit.values import i64 as INT64

# Rows and columns of a tile; in shared memory rows are further apart, so that both ways to read a tile meet all banks.
TILE, PITCH = 32, 36
TILE_BYTES = 8 * TILE * PITCH
# Threads of a block: for each product two warps for 16 rows of a tile, which share the columns of C.
THREADS = 256
# Numbers of a tile that a thread copies, and the rows between them.
OWN, LINES = TILE * TILE // THREADS, THREADS // TILE
# By how many tiles the table is read ahead, and the numbers of columns of W, in eights, that a launch may have.
AHEAD, COLUMNS8 = 3, (2, 3, 4)


class Transformed(NamedTuple):
    """W, and how many numbers apart its successive rows n, AOs and orbitals are."""

    numbers: F64
    row: i64
    ao: i64
    orbital: i64


class Shared(NamedTuple):
    """Addresses in shared memory: two tiles, rows C of two tiles' columns, and of two tiles' rows.

    `own` is where the first number that the thread copies is in a tile, in bytes.
    """

    tiles: i64
    of_ket: i64
    of_bra: i64
    own: i64


class LanePlaces(NamedTuple):
    """Whether the thread multiplies transposed tiles, and arguments of `make_add_products`; t and c in bytes."""

    turned: i64
    half: i64
    t: i64
    row_step: i64
    k_step: i64
    c: i64
    w: i64


@cache
def make_add_products(columns8, half, wide):
    """Intrinsic (t, row_step, k_step, c, w): W += T C for 16 rows and a half (0 or 1) of the eights of columns.

    Addresses in shared memory are those of the lane: `t` of a number of the tile, from which 8 rows are `row_step` and
    4 columns `k_step` bytes, or rows and columns exchanged; `c` and `w` of its first ones. The columns of a warp are
    every other eight.
    """
    pitch, mma = c_pitch(columns8), mma_16x8x8 if wide else mma_by_halves
    w_step, eights = 512 * columns8, range(0, columns8 - half, 2)

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


@word(tuple_of(FP64, OWN), INT64, tuple_of(INT, OWN))
def load_numbers(row, places):
    """The thread's numbers of a tile."""
    return [load("global.nc", row + place.i64 * 8)[0] for place in places]


@word(None, INT32, tuple_of(FP64, OWN))
def store_numbers(to, numbers):
    """The thread's numbers to shared memory."""
    for n, number in enumerate(numbers):
        store(to, [number], 8 * LINES * PITCH * n)


def c_pitch(columns8):
    """Numbers from one row of C to the next in shared memory: lanes meet all banks."""
    return 8 * columns8 + 4


def half_transform(columns8, unit):
    """Kernel factory for so many columns of C, in eights."""
    pitch, width = c_pitch(columns8), 8 * columns8
    add_first, add_others = (make_add_products(columns8, half, unit == "dmma16") for half in (0, 1))
    c_bytes = 8 * TILE * pitch
    # in every other row of W eights of columns are exchanged, so that lanes meet all banks; three eights do without
    exchanged = 8 if columns8 % 2 == 0 else 0
    wait, copy_16 = make_wait_copies(0), make_copies(1, 16)

    @jit_device
    def copy_rows(to, orbitals, line, tid):
        """Begins to copy 32 rows of C."""
        n, source = tid, orbitals + 8 * TILE * width * line
        while n < TILE * width // 2:
            row = n // (width // 2)
            copy_16(i32(to + 8 * (row * pitch + 2 * (n - row * (width // 2)))), source + 16 * n, 1)
            n += THREADS

    @jit_device
    def take_tile(step, i, j, numbers, many, shared, orbitals, lane, tid):
        """Multiplies tile (i, j), the one of number `step`, by rows of C; the numbers are those of the thread."""
        tiles, of_bra = shared.tiles + (step & 1) * TILE_BYTES, shared.of_bra + (i & 1) * c_bytes
        of_ket = shared.of_ket + (step & 1) * c_bytes
        store_numbers(i32(tiles + shared.own), numbers)
        wait()
        cuda.syncthreads()
        next_i, next_j = (i, j + 1) if j < i else (i + 1, i64(0))
        if step + 1 < many:
            copy_rows(shared.of_ket + (step + 1 & 1) * c_bytes, orbitals, next_j, tid)
            if next_j == 0:
                copy_rows(shared.of_bra + (next_i & 1) * c_bytes, orbitals, next_i, tid)
        commit_copies()
        c, line = (of_ket, i) if lane.turned == 0 else (of_bra, j)
        if lane.turned == 0 or i != j:
            t, of_c, of_w = i32(tiles + lane.t), i32(c + lane.c), i32(lane.w + 8 * TILE * width * line)
            if lane.half == 0:
                add_first(t, i32(lane.row_step), i32(lane.k_step), of_c, of_w)
            else:
                add_others(t, i32(lane.row_step), i32(lane.k_step), of_c, of_w)
        return next_i, next_j

    def kernel(
        table: F64, row_width: i64, places: I32, tiles: i64, orbitals: F64, out: Transformed, nao: i64, count: i64
    ):
        # places has 1024 numbers for each tile on and below the diagonal; C has 32 `tiles` rows of all columns, of
        # which `count` are wanted
        w = cuda.shared.array(0, f64)
        tid, n, numbers = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x), TILE * tiles * width
        begin, many = i64(shared_address(w)), tiles * (tiles + 1) // 2
        of_tiles = begin + 8 * numbers
        of_c = of_tiles + 2 * TILE_BYTES
        own, inner = (tid & 31) >> 2, tid & 3
        shared = Shared(of_tiles, of_c, of_c + 2 * c_bytes, 8 * ((tid >> 5) * PITCH + (tid & 31)))
        # warps of the first half have rows of the tile, the others columns
        turned, rows, half = tid >> 7, 16 * (tid >> 5 & 1), tid >> 6 & 1
        if turned == 0:
            t_place, row_step, k_step = 8 * ((rows + own) * PITCH + inner), i64(64 * PITCH), i64(32)
        else:
            t_place, row_step, k_step = 8 * (inner * PITCH + rows + own), i64(64), i64(32 * PITCH)
        c_place = 8 * (inner * pitch + own + 8 * half)
        w_place = begin + 8 * ((rows + own) * width + 2 * inner + (8 * half ^ (exchanged & 8 * own)))
        lane = LanePlaces(turned, half, t_place, row_step, k_step, c_place, w_place)
        of_row, of_orbitals, last = address_of(table, n * row_width), address_of(orbitals, 0), many - 1
        of_places, tile_bytes, step_bytes = address_of(places, 0) + 4 * tid, 4 * TILE * TILE, 4 * THREADS
        m = tid
        while m < numbers:
            w[m] = 0.0
            m += THREADS
        copy_rows(shared.of_ket, of_orbitals, i64(0), tid)
        commit_copies()
        # numbers of the next three tiles, in variables of their own: to copy one that is under way would wait for it
        one = load_numbers(of_row, load_places(of_places, step_bytes))
        two = load_numbers(of_row, load_places(of_places + tile_bytes * min(i64(1), last), step_bytes))
        three = load_numbers(of_row, load_places(of_places + tile_bytes * min(i64(2), last), step_bytes))
        coming = load_places(of_places + tile_bytes * min(i64(3), last), step_bytes)
        i, j, step = i64(0), i64(0), i64(0)
        while step < many:
            i, j = take_tile(step, i, j, one, many, shared, of_orbitals, lane, tid)
            one = load_numbers(of_row, coming)
            coming = load_places(of_places + tile_bytes * min(step + AHEAD + 1, last), step_bytes)
            if step + 1 < many:
                i, j = take_tile(step + 1, i, j, two, many, shared, of_orbitals, lane, tid)
                two = load_numbers(of_row, coming)
                coming = load_places(of_places + tile_bytes * min(step + AHEAD + 2, last), step_bytes)
            if step + 2 < many:
                i, j = take_tile(step + 2, i, j, three, many, shared, of_orbitals, lane, tid)
                three = load_numbers(of_row, coming)
                coming = load_places(of_places + tile_bytes * min(step + AHEAD + 3, last), step_bytes)
            step += AHEAD
        cuda.syncthreads()
        m, first = tid, n * out.row
        if out.orbital == 1:
            while m < nao * count:
                ao = quotient(m, count)
                o = m - ao * count
                out.numbers[first + ao * out.ao + o] = w[ao * width + (o ^ (exchanged & 8 * ao))]
                m += THREADS
        else:
            while m < nao * count:
                o = quotient(m, nao)
                ao = m - o * nao
                out.numbers[first + ao * out.ao + o * out.orbital] = w[ao * width + (o ^ (exchanged & 8 * ao))]
                m += THREADS

    return Kernel(kernel, (THREADS, 1))


# launcher


def shared_bytes(columns8, tiles):
    """Bytes of shared memory of a block."""
    return 64 * columns8 * TILE * tiles + 2 * TILE_BYTES + 32 * TILE * c_pitch(columns8)


def columns_at_once(context, nao, count):
    """For how many eights of columns of C there is a kernel; None where matrices are faster, or without room."""
    if context.unit == "fma":
        return None
    for columns8 in COLUMNS8:
        if count <= 8 * columns8:
            return columns8 if shared_bytes(columns8, -(-nao // TILE)) <= context.block_shared else None
    return None


def launch_half_transform(context, columns8, table, shape, places, nao, orbitals, out, count):
    """W of `count` columns.

    `table` has `shape`, (rows, width); `places` are those of tiles, as the kernel takes them; `orbitals` are padded to
    whole tiles, (side, 8 columns8); `out` is a `Transformed`.
    """
    (rows, width), tiles = shape, -(-nao // TILE)
    if rows * count:
        context.launch(
            Variant(half_transform, (columns8, context.unit)), rows, THREADS, shared_bytes(columns8, tiles), table,
            width, places, tiles, orbitals, out, nao, count,
        )  # fmt: skip
