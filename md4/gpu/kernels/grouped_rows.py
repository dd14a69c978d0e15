"""Rows of a matrix times factors, added up in groups of rows: what MP2 makes of half-transformed integrals.

    X[g, j, c] += sum_{n of group g} F[source of n, j] A[row of n, c]

A block of threads takes a group and some columns c, and each of its warps 32 or 64 of them, on tensor cores. So A is
read where it is, without copies of rows in another order, and X is read and written once.
"""

from functools import cache
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, cuda, i64
from md4.gpu.emit.instructions import address_of, load, load_if, make_empty, mma_8x8x4, store_if
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.values import FP64, OPEN, select, tuple_of, word
from md4.gpu.emit.values import i64 as INT64

# Threads of a block, and most factors of a row that a launch takes, in eights.
THREADS, MOST_FACTORS8 = 256, 4


class Groups(NamedTuple):
    """Rows of A in groups, int32 arrays.

    Attributes
    ----------
    edges, targets
        First row of each group and the number of all, and the number of its X.
    rows, sources
        Of each row: its number in A and in F.
    """

    edges: I32
    targets: I32
    rows: I32
    sources: I32


def columns_of(factors8):
    """Columns of a warp, in eights: X of one warp takes up to half of its registers."""
    return 8 if factors8 <= 2 else 4


@cache
def make_add_four(factors8):
    """Intrinsic (X, A, place, left, F, first, live) -> X + F^T A of four rows, which four lanes have.

    The lane's row of A has its numbers from `place` on, in steps of 8, as long as fewer than `left`, and its factors
    are from `first` on; they are zeros unless `live`.
    """
    columns8 = columns_of(factors8)
    kind = tuple_of(FP64, 2 * factors8 * columns8)

    @word(kind, kind, OPEN, INT64, INT64, OPEN, INT64, INT64)
    def add_four(x, array, place, left, factors, first, live):
        at, own = array.at(place), factors.at(first)
        numbers = [load_if(at, (left, 8 * n), offset=64 * n)[0] for n in range(columns8)]
        of_row = [load_if(own, (live, 0), offset=64 * m)[0] for m in range(factors8)]
        for m, factor in enumerate(of_row):
            for n, number in enumerate(numbers):
                k = 2 * (m * columns8 + n)
                x[k : k + 2] = mma_8x8x4(x[k : k + 2], number, factor)
        return x

    return add_four


@cache
def make_add_result(factors8):
    """Intrinsic (X, address, step, wanted, left): adds the lane's numbers of X to memory.

    Of each eight rows it has the two that begin at `address`, `step` bytes apart, and of these every eighth number;
    those count that are fewer than `wanted` and `left` further on.
    """

    columns8 = columns_of(factors8)

    @word(None, tuple_of(FP64, 2 * factors8 * columns8), INT64, INT64, INT64, INT64)
    def add_result(x, address, step, wanted, left):
        for m in range(factors8):
            for k in range(2):
                here, row = select(wanted > 8 * m + k, left, 0), address + step * (8 * m + k)
                before = [load("global", row, 64 * n, live=(here, 8 * n))[0] for n in range(columns8)]
                for n, old in enumerate(before):
                    store_if(row, [old + x[2 * (m * columns8 + n) + k]], (here, 8 * n), 64 * n)

    return add_result


def grouped_rows(factors8):
    """Kernel factory for so many factors of a row, in eights."""
    of_warp = 8 * columns_of(factors8)
    of_block, empty = of_warp * (THREADS // 32), make_empty(factors8 * of_warp // 4)
    add_four, add_result = make_add_four(factors8), make_add_result(factors8)

    def kernel(
        array: F64, width: i64, columns: i64, groups: Groups, factors: F64, out: F64, of_group: i64, step: i64,
        count: i64,
    ):  # fmt: skip
        # rows of A have `width` numbers, those of F 8 `factors8`, those of X, `of_group` apart from group to group,
        # `step`; `count` factors and `columns` of each row are wanted
        lane, warp = i64(cuda.threadIdx.x) & 31, i64(cuda.threadIdx.x) >> 5
        tiles = (columns + of_block - 1) // of_block
        group = quotient(i64(cuda.blockIdx.x), tiles)
        first = (i64(cuda.blockIdx.x) - group * tiles) * of_block + warp * of_warp
        if first >= columns:
            return
        own, inner, x = lane >> 2, lane & 3, empty()
        n, end = i64(groups.edges[group]), i64(groups.edges[group + 1])
        left = columns - first - own
        while n < end:
            mine = min(n + inner, end - 1)
            place = i64(groups.rows[mine]) * width + first + own
            of_row = i64(groups.sources[mine]) * (8 * factors8) + own
            x = add_four(x, array, place, left, factors, of_row, end - n - inner)
            n += 4
        target = i64(groups.targets[group]) * of_group + 2 * inner * step + first + own
        add_result(x, address_of(out, target), 8 * step, count - 2 * inner, left)

    return Kernel(kernel, (THREADS, 2))


# launcher


def launch_grouped_rows(context, array, shape, groups, factors, factors8, out, steps, count):
    """Adds to X.

    `shape` is (numbers from one row of A to the next, columns); `groups` are `Groups` in device memory; `factors` have
    rows of 8 `factors8` numbers; `steps` are (from one X to the next, from one of its rows to the next).
    """
    width, columns = shape
    blocks = (groups.edges.size - 1) * -(-columns // (THREADS // 4 * columns_of(factors8)))
    if blocks:
        context.launch(
            Variant(grouped_rows, (factors8,)), blocks, THREADS, 0, array, width, columns, groups, factors, out, *steps,
            count,
        )  # fmt: skip
