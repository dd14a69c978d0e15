"""Step 2 of gradients on FP64 tensor cores: Z[ab, p] += sum_cd Gamma[ab, cd] U[cd, p] over the ket pairs of a chunk.

With the densities D of `md4.gpu.forces` and f_ab = 1 if a and b are the same shell, else 2,

    Gamma[ab, cd] = f_ab f_cd sum_s [ j_s D_ab D_cd - k_s/2 (D_ac D_bd + D_ad D_bc) ]

is not in memory; that of density fitting is read from a table (`md4.gpu.kernels.gamma_table`). A block of threads takes
rows ab of one bra pair and some columns, the p of its primitive pairs. The inner index goes through the (cd) of all ket
pairs in a row, 16 at a time: while the tensor cores multiply Gamma of these, which is in shared memory, by U, the
threads make or read Gamma of the next 16. U is what step 4 has left
(`md4.gpu.kernels.groups.HalfTransformed`, with cd in place of ab and p in place of q): 8 p of successive (cd) are
contiguous, and come from there to registers. Z stays in registers for all of a chunk.

Where there are few bra pairs, several blocks divide the ket pairs of a chunk among them, each into a Z of its own.
"""

from functools import cache
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64_2D, cuda, i32, i64, jit_device, types
from md4.gpu.emit.instructions import load, load_if, make_empty, shared_address, store_if
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.tile_products import Lane, make_product_step, tile_kind
from md4.gpu.emit.values import FP64, OPEN, select, tuple_of, word
from md4.gpu.kernels.gamma_table import GammaTable
from md4.gpu.kernels.groups import Grid, HalfTransformed, PairRange, block_place, pair_range, primitives_of
from md4.gpu.staircases import whole_rows
from md4.gpu.tiles import blocks_of_8
from md4.gpu.tuning import REVERSE

# Inner indices that are multiplied between two barriers.
INNER = 16


class FunctionPairs(NamedTuple):
    """The functions of the shell pairs of a list, of which a chunk begins at `first`.

    Attributes
    ----------
    aos : int64 array, two-dimensional
        First AOs of both shells of each pair.
    first : int64
    na, nb : int64
        Functions of a and of b.
    """

    aos: I64_2D
    first: i64
    na: i64
    nb: i64


class Densities(NamedTuple):
    """The densities of Gamma.

    Attributes
    ----------
    numbers : float64 array
        D of each term, `nao` by `nao`.
    coulomb, exchange : float64 array
        j and k of each term.
    nao : int64
    """

    numbers: F64
    coulomb: F64
    exchange: F64
    nao: i64


class ReverseSums(NamedTuple):
    """Z of the bra pairs of a task: numbers[((part nprim + prim) np8 + block of p) rows + ab][8 p].

    Blocks of threads that divide the ket pairs of a chunk among them have a part each. Z is the sum of all parts.

    Attributes
    ----------
    numbers : float64 array
    first_prim, nprim : int64
        First primitive pair of the task, and how many it has.
    rows : int64
        Rows ab, filled up to those of whole tiles.
    """

    numbers: F64
    first_prim: i64
    nprim: i64
    rows: i64


def gamma_element(densities, a, b, c, d):
    """Gamma of four functions without the factors f (device function)."""
    nao, numbers, value = densities.nao, densities.numbers, 0.0
    for s in range(densities.coulomb.size):
        of_a, of_b = (s * nao + a) * nao, (s * nao + b) * nao
        j, half_k = densities.coulomb[s], -0.5 * densities.exchange[s]
        if j != 0.0:
            value += j * (numbers[of_a + b] * numbers[(s * nao + c) * nao + d])
        if half_k != 0.0:
            value += half_k * (numbers[of_a + c] * numbers[of_b + d] + numbers[of_a + d] * numbers[of_b + c])
    return value


@cache
def make_load_columns(nt):
    """Intrinsic (array, index, stride, room, columns): two successive inner indices of `nt` blocks of 8 p.

    Those of block j are array[index + j stride] and 8 further on. They are zero for j >= `columns`, and as far as there
    is no `room` for them.
    """

    @word(tuple_of(FP64, 2 * nt), OPEN, *[i64] * 4)
    def load_columns(array, index, stride, room, columns):
        values, base, step = [], array.at(index), stride * 8
        for j in range(nt):
            left, here = select(columns > j, room, 0), base + step * j
            values += [load_if(here, (left, n), offset=64 * n)[0] for n in range(2)]
        return values

    return load_columns


@cache
def make_add_tile(rows8, nt, single=False):
    """Intrinsic (tile, array, first, stride, columns): adds a turned tile, which may be `single`, to Z.

    Row n of block of columns j is added to array[first + j stride + 8 n], for j < `columns`.
    """
    lane = Lane(rows8, nt, turned=True)

    @word(None, tile_kind(rows8, nt, single), OPEN, *[i64] * 3)
    def add_tile(c, array, first, stride, columns):
        base, step = array.at(first), stride * 8
        for column in lane.columns:
            j = column // 8
            here = base + step * j
            for row in lane.rows:
                live = columns, j
                (old,) = load("global", here, 64 * row, live=live)
                store_if(here, [old + c[lane.index(row, column)].f64], live, offset=64 * row)

    return add_tile


def make_fill(rows8):
    """Device function: the threads make Gamma of the rows of a tile and `INNER` inner indices from n on.

    It goes to shared memory from the place `first` on, as blocks of 8 rows [row][8 inner indices]. Of each row,
    `row_aos` has its functions a and b, or -1 where there is none. `rows_cd` are those of the ket's functions.
    """
    rows, element = 8 * rows8, jit_device(gamma_element)

    def fill(gamma, first, row_aos, n, total, same, ket, rows_cd, densities):
        tid, step = i64(cuda.threadIdx.x), i64(cuda.blockDim.x) // INNER
        k, row = tid & (INNER - 1), tid // INNER
        n += k
        live, c, d, weight, ncd = n < total, i64(0), i64(0), 0.0, rows_cd.size
        if live:
            kl = quotient(n, ncd)
            cd = i64(rows_cd[n - kl * ncd])
            c0, d0 = ket.aos[ket.first + kl, 0], ket.aos[ket.first + kl, 1]
            c = quotient(cd, ket.nb)
            c, d = c0 + c, d0 + cd - c * ket.nb
            weight = (1.0 if c0 == d0 else 2.0) * (1.0 if same else 2.0)
        place = first + (k >> 3) * (8 * rows) + (k & 7)
        while row < rows:
            a, value = i64(row_aos[2 * row]), 0.0
            if live and a >= 0:
                value = weight * element(densities, a, i64(row_aos[2 * row + 1]), c, d)
            gamma[place + 8 * row] = value
            row += step

    return jit_device(fill)


def make_fill_of_table(rows8):
    """As `make_fill`, from a table: `row_aos` has the number of each row in place of b, `pair` is that of its pair."""
    rows = 8 * rows8

    def fill(gamma, first, row_aos, n, total, pair, ket, rows_cd, table):
        tid, step = i64(cuda.threadIdx.x), i64(cuda.blockDim.x) // INNER
        k, row = tid & (INNER - 1), tid // INNER
        n += k
        place = first + (k >> 3) * (8 * rows) + (k & 7)
        source = table.first + (ket.first * rows_cd.size + n) * table.of_ket
        while row < rows:
            value = 0.0
            if n < total and row_aos[2 * row] >= 0:
                value = table.numbers[source + (pair + row_aos[2 * row + 1]) * table.of_bra]
            gamma[place + 8 * row] = value
            row += step

    return jit_device(fill)


def reverse_sums(rows8, nt, unit, by_table=False):
    """Kernel factory; a block has 8 `rows8` rows, and `nt` blocks of 8 columns for each of its warps.

    `by_table`: Gamma is read from a table.
    """
    rows, places, size = 8 * rows8, 16 * rows8, 8 * rows8 * INNER
    empty, step = make_empty(2 * rows8 * nt), make_product_step(rows8, nt, unit == "dmma16", True)
    load_columns, add_tile = make_load_columns(nt), make_add_tile(rows8, nt)
    make, of_gamma = (make_fill_of_table, GammaTable) if by_table else (make_fill, Densities)
    fill = make(rows8)
    block, primitives = jit_device(block_place), jit_device(primitives_of)

    def kernel(
        bra: FunctionPairs, ab: PairRange, ket: FunctionPairs, rows_ab: I32, rows_cd: I32, u: HalfTransformed,
        limits: I32, densities: of_gamma, z: ReverseSums, parts: i64, grid: Grid,
    ):  # fmt: skip
        gamma, row_aos = cuda.shared.array(0, types.float64), cuda.shared.array(places, types.int32)
        tid, threads = i64(cuda.threadIdx.x), i64(cuda.blockDim.x)
        lane, warp = tid & 31, tid >> 5
        row_block, column_block, rest = block(grid)
        part, pair = rest % parts, rest // parts
        first, last = primitives(ab, pair)
        column, ncol = column_block * (nt * (threads >> 5)), (last - first) * u.nq8
        if column >= ncol:
            return
        column += warp * nt
        # the inner indices of this part
        total = max(i64(0), min(u.npair, i64(limits[bra.first + pair]) - ket.first)) * u.nab
        each = quotient(quotient(total + INNER - 1, i64(INNER)) + parts - 1, parts) * INNER
        n, end = part * each, min(total, (part + 1) * each)
        if n >= end:
            return
        a0, b0 = bra.aos[bra.first + pair, 0], bra.aos[bra.first + pair, 1]
        row = tid
        while row < rows:
            place = row_block * rows + row
            own = i64(rows_ab[min(place, rows_ab.size - 1)])
            of_a = quotient(own, bra.nb)
            row_aos[2 * row] = a0 + of_a if place < rows_ab.size else -1
            row_aos[2 * row + 1] = own if by_table else b0 + own - of_a * bra.nb
            row += threads
        cuda.syncthreads()
        slot, address = i64(0), shared_address(gamma) + 16 * lane
        this = (bra.first + pair) * bra.na * bra.nb if by_table else i64(a0 == b0)
        fill(gamma, i64(0), row_aos, n, end, this, ket, rows_cd, densities)
        cuda.syncthreads()
        tile, own, stride = empty(), 2 * (lane & 3), u.npair * u.nab * 8
        source = ((first - ab.first_prim) * u.nq8 + column) * stride + (lane >> 2)
        while n < end:
            here = n + own
            one = load_columns(u.numbers, source + here * 8, stride, end - here, ncol - column)
            two = load_columns(u.numbers, source + (here + 8) * 8, stride, end - here - 8, ncol - column)
            n += INNER
            if n < end:
                fill(gamma, (1 - slot) * size, row_aos, n, end, this, ket, rows_cd, densities)
            tile = step(tile, i32(address + slot * (8 * size)), one, i32(rows8))
            tile = step(tile, i32(address + slot * (8 * size) + 64 * rows), two, i32(rows8))
            slot = 1 - slot
            cuda.syncthreads()
        target = ((part * z.nprim + first - z.first_prim) * u.nq8 + column) * z.rows + row_block * rows + own
        add_tile(tile, z.numbers, target * 8 + (lane >> 2), z.rows * 8, ncol - column)

    return Kernel(kernel, (32 * REVERSE.most_warps, 1))


# launcher


class ReverseTile(NamedTuple):
    """Blocks of 8 rows of a block of threads, blocks of 8 columns of each of its warps, and how many warps it has."""

    rows8: int
    nt: int
    warps: int


def reverse_tile(nab, ncol):
    """(`ReverseTile`, row blocks) for `nab` functions of a bra pair and about `ncol` blocks of 8 p."""
    blocks = blocks_of_8(nab)
    row_blocks = -(-blocks // REVERSE.most_rows)
    nt = 2 if ncol <= 2 else 4
    warps = next((n for n in (1, 2, 4) if n * nt >= ncol), REVERSE.most_warps)
    return ReverseTile(-(-blocks // row_blocks), nt, warps), row_blocks


def launch_reverse(context, tile, row_blocks, aos, ab, cd, u, nq8, limits, densities, z, parts, by_table=False):
    """Adds what the ket pairs `cd` of a chunk give its bra pairs `ab` to Z.

    Parameters
    ----------
    tile, row_blocks
        As `reverse_tile` returns them.
    aos : tuple of Buffer
        First AOs of the bra and of the ket list.
    ab, cd : md4.engine.PreparedPairs
        Slices of both, with the functions that take part.
    u : Buffer
        U of the chunk, with `nq8` blocks of 8 p.
    limits : Buffer of int32
        With how many ket pairs, the first of their list, each bra pair of its list counts.
    densities : tuple
        Fields of `Densities`, or of `GammaTable` if `by_table`.
    z : tuple
        Fields of `ReverseSums`.
    parts : int
        Blocks of threads that divide the ket pairs among them.
    """
    bra, ket = ab.facts, cd.facts
    column_blocks = -(-bra.max_prim * nq8 // (tile.nt * tile.warps))
    variant = Variant(reverse_sums, (tile.rows8, tile.nt, context.unit, by_table))
    context.launch(
        variant, row_blocks * column_blocks * parts * ab.npair, 32 * tile.warps, 2 * 8 * 8 * tile.rows8 * INNER,
        (aos[0], ab.first, bra.na, bra.nb), pair_range(ab), (aos[1], cd.first, ket.na, ket.nb),
        context.table(whole_rows, bra.h_class), context.table(whole_rows, ket.h_class), (u, nq8, cd.npair, ket.nab),
        limits, densities, z, parts, (row_blocks, column_blocks),
    )  # fmt: skip
