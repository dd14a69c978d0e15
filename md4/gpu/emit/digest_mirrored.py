"""Code that digests a tile of the even and odd parts of integrals by one lane; see `md4.gpu.kernels.digest_mirrored`.

Intrinsics in the manner of `md4.gpu.emit.vectors`. A tile (rows, even, odd) has `rows` functions a of two lists, the
first of which go with `even` functions b, the second with `odd` ones. Its integrals are a tuple: those of the first
list in the order [a][b], then those of the second.
"""

from functools import cache

from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.digest_rows import address_after, emit_dots, emit_tile_sums
from md4.gpu.emit.instructions import DOUBLE, I32, I64, aggregate, call_asm, fields, global_double, shared_int

i32, i64, f64 = types.int32, types.int64, types.float64


def tuple_of(count):
    """The type of a tuple of doubles."""
    return types.UniTuple(f64, count)


def split(values, rows, even, odd):
    """The integrals of a tile as lists of rows of the first and of the second list."""
    lists = (values[: rows * even], even), (values[rows * even :], odd)
    return [[found[a * width : (a + 1) * width] for a in range(rows)] for found, width in lists]


def presence(builder, rows, columns, every, rows_left, columns_left):
    """Whether there are the rows, and the columns, of one list; None where that is known. See `make_load_parts`."""
    of_rows, of_columns = (
        [builder.icmp_signed(">", left, I32(n)) for n in range(count)]
        for left, count in ((rows_left, rows), (columns_left, columns))
    )
    if every:
        return [None] * (rows - 1) + (of_rows[-1:] if rows > 1 else [None]), [None] * columns
    of_rows[0] = of_columns[0] = builder.and_(of_rows[0], of_columns[0])
    return of_rows, of_columns


def emit_list(builder, rows, columns, every, origin, first, row_step, step, rows_left, columns_left):
    """The loads of one list of functions a, see `make_load_parts`."""
    if not columns:
        return []
    of_rows, of_columns = presence(builder, rows, columns, every, rows_left, columns_left)
    zero, offsets = I32(0), [builder.mul(step, I32(b)) for b in range(columns)]
    if not every:
        first = builder.select(of_rows[0], first, origin)
        offsets[1:] = [builder.select(there, n, zero) for there, n in zip(of_columns[1:], offsets[1:])]
    values = []
    for a, there in enumerate(of_rows):
        row = address_after(builder, first, a, row_step)
        if a and there is not None:
            row = builder.select(there, row, first)
        values += [global_double(builder, address_after(builder, row, 1, offset)) for offset in offsets]
    return values


@cache
def make_load_parts(rows, even, odd, every):
    """Intrinsic (origin, address, row_step, address, row_step, step, rows, rows, even, odd) -> the integrals of a tile.

    They are at address + a row_step + b step, in bytes, of the first list and of the second, in global memory that no
    one writes meanwhile. For those that a tile with fewer functions does not have, another integral of the quartet is
    read, which begins at `origin`; see `make_mask_parts`. With `every` all are there but perhaps those of the last a of
    either list. Loads under a condition would wait for each other.
    """
    kind = tuple_of(rows * (even + odd))

    @intrinsic
    def load_parts(typingctx, origin, first, row_step, second, second_step, step, rows_first, rows_second, evens, odds):
        def codegen(context, builder, signature, args):
            origin, first, row_step, second, second_step, step, rows_first, rows_second, evens, odds = args
            values = emit_list(builder, rows, even, every, origin, first, row_step, step, rows_first, evens)
            values += emit_list(builder, rows, odd, every, origin, second, second_step, step, rows_second, odds)
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(i64, i64, i32, i64, i32, i32, i32, i32, i32, i32), codegen

    return load_parts


def masked(builder, value, *conditions):
    """A double, or 0 if one of the conditions is false; None is none."""
    for there in dict.fromkeys(conditions):
        value = value if there is None else builder.select(there, value, DOUBLE(0.0))
    return value


@cache
def make_mask_parts(rows, even, odd, every):
    """Intrinsic (I, rows, rows, even, odd) -> I with zeros where the tile has no integrals; see `make_load_parts`."""
    kind = tuple_of(rows * (even + odd))

    @intrinsic
    def mask_parts(typingctx, integrals, rows_first, rows_second, evens, odds):
        def codegen(context, builder, signature, args):
            lists, values = split(fields(builder, args[0], rows * (even + odd)), rows, even, odd), []
            for found, height, columns, width in zip(lists, args[1:3], (even, odd), args[3:]):
                if not columns:
                    continue
                of_rows, of_columns = presence(builder, rows, columns, every, height, width)
                for row, of_row in zip(found, of_rows):
                    values += [masked(builder, value, of_row, of_column) for value, of_column in zip(row, of_columns)]
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(kind, i32, i32, i32, i32), codegen

    return mask_parts


@cache
def make_load_listed(counts):
    """Intrinsic (lists, c, d, row) -> D_nc, then D_nd, of the AOs n of several lists, one after the other.

    The AOs of a list are successive 32-bit numbers at a shared address, `counts` of them; n stands for itself or, where
    the tile has no such function, as -1 - n. `c` and `d` are the addresses of D_0c and D_0d in global memory that no
    one writes meanwhile, `row` the bytes of a row.
    """
    kind, places = tuple_of(2 * sum(counts)), types.UniTuple(i32, len(counts))

    @intrinsic
    def load_listed(typingctx, lists, c, d, row):
        def codegen(context, builder, signature, args):
            lists, *columns, row = args
            aos = []
            for first, count in zip(fields(builder, lists, len(counts)), counts):
                aos += [shared_int(builder, builder.add(first, I32(4 * n))) for n in range(count)]
            aos = [builder.xor(ao, builder.ashr(ao, I32(31))) for ao in aos]
            values = []
            for first in columns:
                for ao in aos:
                    text = "mad.wide.s32 $0, $1, $2, $3;"
                    values.append(global_double(builder, call_asm(builder, I64, [ao, row, first], text, "=l,r,r,l")))
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(places, i64, i64, i32), codegen

    return load_listed


@cache
def make_sums_over_a(rows, even, odd):
    """Intrinsic (I, x, y) -> sum_a I_ab x_a for each even b, and sum_a I_ab y_a for each odd one; x, y by the lists."""
    kind = tuple_of(even + odd)

    @intrinsic
    def sums_over_a(typingctx, integrals, x, y):
        def codegen(context, builder, signature, args):
            lists = split(fields(builder, args[0], rows * (even + odd)), rows, even, odd)
            groups = []
            for rows_of, vector in zip(lists, args[1:]):
                factors = fields(builder, vector, rows)
                groups += [list(zip(line, factors)) for line in zip(*rows_of)]
            return aggregate(builder, context.get_value_type(kind), emit_dots(builder, groups))

        return kind(tuple_of(rows * (even + odd)), tuple_of(rows), tuple_of(rows)), codegen

    return sums_over_a


@cache
def make_sums_over_b(rows, even, odd, second):
    """Intrinsic (I, x) -> sum_b I_ab x_b for each a of the first list, or of the `second`; 0 if it has no b."""
    kind = tuple_of(rows)

    @intrinsic
    def sums_over_b(typingctx, integrals, x):
        def codegen(context, builder, signature, args):
            lists = split(fields(builder, args[0], rows * (even + odd)), rows, even, odd)
            factors = fields(builder, args[1], even + odd)
            factors = factors[even:] if second else factors[:even]
            pairs, start = [list(zip(line, factors)) for line in lists[second]], None if factors else DOUBLE(0.0)
            sums = emit_dots(builder, pairs, start)
            return aggregate(builder, context.get_value_type(kind), sums)

        return kind(tuple_of(rows * (even + odd)), tuple_of(even + odd)), codegen

    return sums_over_b


def padded(count):
    """`count`, or one more if it is odd."""
    return count + count % 2


@cache
def make_sums_by_parity(count):
    """Intrinsic (I, s, t, lane) -> sums over the warp of s I_n and of t I_n, as `make_tile_sums` of two tiles.

    The second tile begins at `padded(count)`. The number between, if there is one, is of no use.
    """
    kind, both = tuple_of(count), 2 * padded(count)
    out = tuple_of(-(-both // 32))

    @intrinsic
    def sums_by_parity(typingctx, integrals, s, t, lane):
        def codegen(context, builder, signature, args):
            values, lane = fields(builder, args[0], count), args[3]

            def value(n):
                second, n = divmod(n, padded(count))
                return builder.fmul(values[min(n, count - 1)], args[1 + second])

            return aggregate(builder, context.get_value_type(out), emit_tile_sums(builder, both, value, lane))

        return out(kind, f64, f64, i32), codegen

    return sums_by_parity
