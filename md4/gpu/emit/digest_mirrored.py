"""Code that digests a tile of the even and odd parts of integrals by one lane; see `md4.gpu.kernels.digest_mirrored`.

Words in the manner of `md4.gpu.emit.vectors`. A tile (rows, even, odd) has `rows` functions a of two lists, the first
of which go with `even` functions b, the second with `odd` ones. Its integrals are a tuple: those of the first list in
the order [a][b], then those of the second.
"""

from functools import cache

from md4.gpu.emit.digest_rows import emit_dots, emit_tile_sums
from md4.gpu.emit.instructions import address_plus, global_number, shared_int
from md4.gpu.emit.values import FP64, f64, i32, i64, select, tuple_of, word


def split(values, rows, even, odd):
    """The integrals of a tile as lists of rows of the first and of the second list."""
    lists = (values[: rows * even], even), (values[rows * even :], odd)
    return [[found[a * width : (a + 1) * width] for a in range(rows)] for found, width in lists]


def presence(rows, columns, every, rows_left, columns_left):
    """Conditions: does the tile have each row of one list, and each column? None for those that it always has."""
    of_rows, of_columns = [rows_left > n for n in range(rows)], [columns_left > n for n in range(columns)]
    if every:
        return [None] * (rows - 1) + (of_rows[-1:] if rows > 1 else [None]), [None] * columns
    of_rows[0] = of_columns[0] = of_rows[0] & of_columns[0]
    return of_rows, of_columns


def emit_list(rows, columns, every, origin, first, row_step, step, rows_left, columns_left):
    """The loads of one list of functions a, see `make_load_parts`."""
    if not columns:
        return []
    of_rows, of_columns = presence(rows, columns, every, rows_left, columns_left)
    offsets = [step * b for b in range(columns)]
    if not every:
        first = select(of_rows[0], first, origin)
        offsets[1:] = [select(there, n, 0) for there, n in zip(of_columns[1:], offsets[1:])]
    values = []
    for a, there in enumerate(of_rows):
        row = address_plus(first, row_step, a)
        if a and there is not None:
            row = select(there, row, first)
        values += [global_number(address_plus(row, offset, 1)) for offset in offsets]
    return values


@cache
def make_load_parts(rows, even, odd, every):
    """Intrinsic (origin, address, row_step, address, row_step, step, rows, rows, even, odd) -> the integrals of a tile.

    They are at address + a row_step + b step, in bytes, of the first list and of the second, in global memory that no
    one writes meanwhile. For those that a tile with fewer functions does not have, another integral of the quartet is
    read, which begins at `origin`; see `make_mask_parts`. With `every` all are there but perhaps those of the last a of
    either list. Loads under a condition would wait for each other.
    """

    @word(tuple_of(FP64, rows * (even + odd)), i64, i64, i32, i64, *[i32] * 6)
    def load_parts(origin, first, row_step, second, second_step, step, rows_first, rows_second, evens, odds):
        values = emit_list(rows, even, every, origin, first, row_step, step, rows_first, evens)
        return values + emit_list(rows, odd, every, origin, second, second_step, step, rows_second, odds)

    return load_parts


def masked(value, *conditions):
    """A double, or 0 if one of the conditions is false; None is none."""
    for there in dict.fromkeys(conditions):
        value = value if there is None else select(there, value, 0.0)
    return value


@cache
def make_mask_parts(rows, even, odd, every):
    """Intrinsic (I, rows, rows, even, odd) -> I with zeros where the tile has no integrals; see `make_load_parts`."""
    kind = tuple_of(FP64, rows * (even + odd))

    @word(kind, kind, i32, i32, i32, i32)
    def mask_parts(integrals, rows_first, rows_second, evens, odds):
        values, lists = [], split(integrals, rows, even, odd)
        for found, height, columns, width in zip(lists, (rows_first, rows_second), (even, odd), (evens, odds)):
            if columns:
                of_rows, of_columns = presence(rows, columns, every, height, width)
                for row, of_row in zip(found, of_rows):
                    values += [masked(value, of_row, of_column) for value, of_column in zip(row, of_columns)]
        return values

    return mask_parts


@cache
def make_load_listed(counts):
    """Intrinsic (lists, c, d, row) -> D_nc, then D_nd, of the AOs n of several lists, one after the other.

    The AOs of a list are successive 32-bit numbers at a shared address, `counts` of them; n stands for itself or, where
    the tile has no such function, as -1 - n. `c` and `d` are the addresses of D_0c and D_0d in global memory that no
    one writes meanwhile, `row` the bytes of a row.
    """

    @word(tuple_of(FP64, 2 * sum(counts)), tuple_of(i32, len(counts)), i64, i64, i32)
    def load_listed(lists, c, d, row):
        aos = [shared_int(first + 4 * n) for first, count in zip(lists, counts) for n in range(count)]
        aos = [ao ^ ao.shifted(31) for ao in aos]
        return [global_number(address_plus(first, row, ao)) for first in (c, d) for ao in aos]

    return load_listed


@cache
def make_sums_over_a(rows, even, odd):
    """Intrinsic (I, x, y) -> sum_a I_ab x_a for each even b, and sum_a I_ab y_a for each odd one; x, y by the lists."""

    @word(tuple_of(FP64, even + odd), tuple_of(FP64, rows * (even + odd)), tuple_of(FP64, rows), tuple_of(FP64, rows))
    def sums_over_a(integrals, x, y):
        lists = split(integrals, rows, even, odd)
        return emit_dots(zip(line, factors) for found, factors in zip(lists, (x, y)) for line in zip(*found))

    return sums_over_a


@cache
def make_sums_over_b(rows, even, odd, second):
    """Intrinsic (I, x) -> sum_b I_ab x_b for each a of the first list, or of the `second`; 0 if it has no b."""

    @word(tuple_of(FP64, rows), tuple_of(FP64, rows * (even + odd)), tuple_of(FP64, even + odd))
    def sums_over_b(integrals, x):
        factors = x[even:] if second else x[:even]
        lines = split(integrals, rows, even, odd)[second]
        return emit_dots(zip(line, factors) for line in lines) if factors else [0.0] * rows

    return sums_over_b


def padded(count):
    """`count`, or one more if it is odd."""
    return count + count % 2


@cache
def make_sums_by_parity(count):
    """Intrinsic (I, s, t, lane) -> sums over the warp of s I_n and of t I_n, as `make_tile_sums` of two tiles.

    The second tile begins at `padded(count)`. The number between, if there is one, is of no use.
    """
    both = 2 * padded(count)

    @word(tuple_of(FP64, -(-both // 32)), tuple_of(FP64, count), f64, f64, i32)
    def sums_by_parity(integrals, s, t, lane):
        def value(n):
            second, n = divmod(n, padded(count))
            return integrals[min(n, count - 1)] * (t if second else s)

        return emit_tile_sums(both, value, lane)

    return sums_by_parity
