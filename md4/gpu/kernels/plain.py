"""Steps 4 and 5 in plain multiply-adds: the ones to read first, and what runs where there are no FP64 tensor cores.

    [p|q]   = r[p + q]                        see `md4.gpu.kernels.recurrence`
    (ab|q]  = sum_p H[ab, p] [p|q]            step 4, p of every primitive pair of the bra pair
    (ab|cd) = sum_q H[cd, q] (ab|q]           step 5, q of every primitive pair of the ket pair

Both steps multiply H from the left by a matrix of many columns: the q of every ket primitive in step 4, the ab of every
bra pair in step 5. A block of 128 threads makes 32 rows and 32 columns of one pair, each thread 2 x 4 of them; operands
come through shared memory, 8 Hermite functions at a time.
"""

from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, cuda, f64, i64, jit_device
from md4.gpu.kernels.groups import (
    Grid,
    HalfTransformed,
    HermiteIntegrals,
    PairRange,
    Result,
    block_place,
    pair_range,
    primitives_of,
    result,
)
from md4.gpu.r_layout import r_stride
from md4.gpu.tiles import blocks_of_8
from md4.method.angular import packed_hermite, sum_ordinal

THREADS = 128
SIDE = 32  # rows and columns of a block
SLICE = 8 * SIDE  # numbers of an operand that are in shared memory


class Matrix(NamedTuple):
    """H of a whole list, [primitive pair][row][Hermite function].

    Attributes
    ----------
    numbers : float64 array
    rows, functions : int64
        Function pairs ab, and Hermite functions p.
    """

    numbers: F64
    rows: i64
    functions: i64


class Powers(NamedTuple):
    """The Hermite functions p and q in the packed form from which `sum_ordinal` finds the place of p + q.

    See `md4.method.angular.packed_hermite`.
    """

    p: I32
    q: I32


def multiply(left, right, row, column, tile):
    """tile[i, j] += sum_p left[row + i, p] right[column + j, p] over 8 Hermite functions (device function)."""
    for p in range(8):
        for i in range(2):
            for j in range(4):
                tile[i, j] += left[(row + i) * 8 + p] * right[(column + j) * 8 + p]


def make_product(matrix):
    """Device function (h, first, last, row, column, side, tile): adds H times a matrix to the thread's 2 x 4 `tile`.

    The sum goes over the Hermite functions of the primitive pairs from `first` to `last` - 1; the block's rows and
    columns begin at `row` and `column`. `matrix(prim, p, column, side)` is an element of the matrix on the right, zero
    outside of it.
    """
    matrix, add = jit_device(matrix), jit_device(multiply)

    def product(h, first, last, row, column, side, tile):
        left, right = cuda.shared.array(SLICE, f64), cuda.shared.array(SLICE, f64)
        tid = i64(cuda.threadIdx.x)
        own_row, own_column = tid // 8 * 2, tid % 8 * 4
        for prim in range(first, last):
            for step in range((h.functions + 7) // 8):
                for n in range(tid, SLICE, THREADS):
                    line, p = n // 8, 8 * step + n % 8
                    inside = row + line < h.rows and p < h.functions
                    left[n] = h.numbers[(prim * h.rows + row + line) * h.functions + p] if inside else 0.0
                    right[n] = matrix(prim, p, column + line, side)
                cuda.syncthreads()
                add(left, right, own_row, own_column, tile)
                cuda.syncthreads()

    return jit_device(product)


def empty(tile):
    """Fills a thread's tile with zeros (device function)."""
    for i in range(2):
        for j in range(4):
            tile[i, j] = 0.0


def plain_bra_transform():
    """Kernel factory for step 4: (ab|q] = sum_p H[ab, p] [p|q]."""
    ordinal = jit_device(sum_ordinal)

    def hermite_integral(prim, p, column, side):
        """[p|q] = r[p + q] of a bra primitive; columns are (k, q) of the ket primitives k."""
        bra, r, powers, width = side
        k, q = column // width, column % width
        if k >= r.nket or p >= powers.p.size or q >= powers.q.size:
            return 0.0
        quartet = (prim - bra.first_prim) * r.nket + k
        return r.numbers[quartet * r.stride + ordinal(powers.p[p], powers.q[q])]

    product = make_product(hermite_integral)
    clear, place, primitives = map(jit_device, (empty, block_place, primitives_of))

    def kernel(h: Matrix, bra: PairRange, r: HermiteIntegrals, powers: Powers, abq: HalfTransformed, grid: Grid):
        row_block, column_block, ij = place(grid)
        row, column, width = SIDE * row_block, SIDE * column_block, 8 * abq.nq8
        first, last = primitives(bra, ij)
        tile = cuda.local.array((2, 4), f64)
        clear(tile)
        product(h, first, last, row, column, (bra, r, powers, width), tile)
        for i in range(2):
            for j in range(4):
                ab, kq = row + cuda.threadIdx.x // 8 * 2 + i, column + cuda.threadIdx.x % 8 * 4 + j
                if ab < h.rows and kq < r.nket * width:
                    abq.numbers[((kq // 8 * abq.npair + ij) * abq.nab + ab) * 8 + kq % 8] = tile[i, j]

    return Kernel(kernel, (THREADS, 1))


def plain_ket_transform():
    """Kernel factory for step 5: (ab|cd) = sum_q H[cd, q] (ab|q]."""

    def half_transformed_integral(prim, q, column, side):
        """(ab|q] of a ket primitive; columns are (ij, ab) of the bra pairs ij."""
        ket, abq, columns = side
        if column >= columns or q >= 8 * abq.nq8:
            return 0.0
        return abq.numbers[(((prim - ket.first_prim) * abq.nq8 + q // 8) * columns + column) * 8 + q % 8]

    product = make_product(half_transformed_integral)
    clear, place, primitives = map(jit_device, (empty, block_place, primitives_of))

    def kernel(h: Matrix, ket: PairRange, abq: HalfTransformed, out: Result, grid: Grid):
        row_block, column_block, kl = place(grid)
        row, column, columns = SIDE * row_block, SIDE * column_block, abq.npair * abq.nab
        first, last = primitives(ket, kl)
        tile = cuda.local.array((2, 4), f64)
        clear(tile)
        product(h, first, last, row, column, (ket, abq, columns), tile)
        for i in range(2):
            for j in range(4):
                cd, ij_ab = row + cuda.threadIdx.x // 8 * 2 + i, column + cuda.threadIdx.x % 8 * 4 + j
                if cd < h.rows and ij_ab < columns:
                    ij, ab = ij_ab // abq.nab, ij_ab % abq.nab
                    out.numbers[out.first + ij * out.s_ij + kl * out.s_kl + ab * out.s_ab + cd * out.s_cd] = tile[i, j]

    return Kernel(kernel, (THREADS, 1))


# launchers


def blocks(nrow, ncol):
    """`Grid` of a product of `nrow` rows and `ncol` columns."""
    return Grid(-(-nrow // SIDE), -(-ncol // SIDE))


def packed_from(l, first):
    """`packed_hermite` from a Hermite function on."""
    return packed_hermite(l)[first:]


def launch_plain_bra(context, h, ab, cd, r, abq):
    """(ab|q] of a chunk; `h` is H of the whole bra list in the form BRA_MATRIX, `r` that of the chunk."""
    bra, ket = ab.facts, cd.facts
    nq8, stride = blocks_of_8(ket.nherm), r_stride(bra.l + ket.l)
    grid = blocks(bra.nab, 8 * cd.nprim * nq8)
    powers = Powers(*(context.table(packed_from, side.l, side.first) for side in (bra, ket)))
    context.launch(
        Variant(plain_bra_transform, ()), grid.row_blocks * grid.column_blocks * ab.npair, THREADS, 0,
        Matrix(h, bra.nab, bra.nherm), pair_range(ab), HermiteIntegrals(r, stride, cd.nprim), powers,
        HalfTransformed(abq, nq8, ab.npair, bra.nab), grid,
    )  # fmt: skip


def launch_plain_ket(context, abq, h, ab, cd, block):
    """(ab|cd) of a chunk into `block`; `h` is H of the whole ket list in the form KET_MATRIX."""
    bra, ket = ab.facts, cd.facts
    grid, nq8 = blocks(ket.nab, ab.npair * bra.nab), blocks_of_8(ket.nherm)
    context.launch(
        Variant(plain_ket_transform, ()), grid.row_blocks * grid.column_blocks * cd.npair, THREADS, 0,
        Matrix(h, ket.nab, ket.nherm), pair_range(cd), HalfTransformed(abq, nq8, ab.npair, bra.nab), result(block),
        grid,
    )  # fmt: skip
