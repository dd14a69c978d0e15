"""Code that digests a small quartet by one thread; the equations are in `md4.method.digestion`.

Words that are unrolled while code is generated, for given numbers of functions b, c and d and one function a at a
time. The integrals (ab|cd) of one a are nb nc nd successive doubles in shared memory at `place`. What a thread keeps of
D and X for all b are rows over c and d, `pair_rows(nb, nc, nd)` numbers in the order [b][c, then d]. In a matrix, `row`
is where the row of AO a, or of the first AO b, begins; `c` and `d` are the first AOs of the ket shells.

A warp goes through a row of D or X together. The numbers of its lanes over the functions of a ket shell are in a stage
in shared memory, [lane][function], and lanes take them in this order to and from the matrix. So neighbours have
neighbouring numbers, which memory loads or adds at once, where those of one lane would be as many requests.

`precision` is that of the integrals, the stage, densities, and of all that a thread keeps. X and Y are of doubles: sums
are converted before they are added.
"""

from functools import cache

from md4.gpu.emit.instructions import (
    add_double_if,
    global_number,
    load_if,
    shared_real,
    shuffled,
    store,
    warp_barrier,
)
from md4.gpu.emit.values import FP64, INT, OPEN, fma, i32, i64, select, tuple_of, word
from md4.gpu.emit.warp_sums import emit_run_sum


def pair_rows(nb, nc, nd):
    """Numbers in the rows of all b over c and d."""
    return nb * (nc + nd)


def functions_of_ket(nc, nd):
    """(shell 0 or 1 of the ket, number n) of all functions of c and d."""
    return [(shell, n) for shell, functions in enumerate((nc, nd)) for n in range(functions)]


def stage_parts(nc, nd):
    """Where in the stage the numbers over c and over d begin, counted in numbers, None without any, and its size.

    A shell of one function has none: each lane's number is the one that it takes in turn.
    """
    parts, size = [], 0
    for functions in (nc, nd):
        parts.append(size if functions > 1 else None)
        size += 32 * functions if functions > 1 else 0
    return parts, size


@cache
def make_columns_in_turn(nc, nd):
    """Intrinsic (c, d, count, lane) -> in which columns of a matrix the numbers stand that a lane takes.

    In bytes from the row's begin, -1 for none. `c` and `d` are the first AOs of the lane's own ket pair, which it tells
    the others; the first `count` lanes have one.
    """

    @word(tuple_of(INT, nc + nd), i64, i64, i64, i64)
    def columns_in_turn(c, d, count, lane):
        own, count, lane, columns = (c.i32, d.i32), count.i32, lane.i32, []
        for shell, n in functions_of_ket(nc, nd):
            functions, element = (nc, nd)[shell], lane + 32 * n
            pair = element // functions
            ao = own[shell] if stage_parts(nc, nd)[0][shell] is None else shuffled(own[shell], "idx", pair)
            ao = ao + (element - pair * functions)
            columns.append(select(pair < count, ao * 8, -1))
        return columns

    return columns_in_turn


class Stage:
    """The stage of a warp while code is generated: one row over c and d of each lane.

    Parameters
    ----------
    address, lane : Value
        Where it begins in shared memory (i32), and the lane (i64).
    precision : Precision
        Of its numbers.
    """

    def __init__(self, address, lane, nc, nd, precision):
        self.precision, lane = precision, lane.i32
        self.functions, (self.parts, _) = functions_of_ket(nc, nd), stage_parts(nc, nd)
        self.own = [address + lane * (precision.bytes * n) for n in (nc, nd)]
        self.in_turn = address + lane * precision.bytes

    def exchanged(self, values, own_first):
        """Numbers that each lane takes in turn for those of its own, if `own_first`, or its own for those in turn.

        `values` are those over c and d, or over c alone.
        """
        if all(self.parts[shell] is None for _, (shell, _) in zip(values, self.functions)):
            return values
        found = []
        for value, (shell, n) in zip(values, self.functions):
            if self.parts[shell] is not None:
                place, offset = self.place(shell, n, own_first)
                store(place, [value], offset)
        warp_barrier(self.in_turn)
        for value, (shell, n) in zip(values, self.functions):
            if self.parts[shell] is not None:
                place, offset = self.place(shell, n, not own_first)
                value = shared_real(place, offset, self.precision)  # noqa: PLW2901 the other lane's
            found.append(value)
        warp_barrier(self.in_turn)
        return found

    def place(self, shell, n, own):
        """(address, offset in bytes) of a lane's n-th number over the functions of a shell: its own, or in turn."""
        size = self.precision.bytes
        first = size * self.parts[shell]
        return (self.own[shell], first + size * n) if own else (self.in_turn, first + 32 * size * n)


@cache
def make_load_rows(nb, nc, nd, precision=FP64):
    """Intrinsic (array, row, nao, columns, stage, lane) -> the rows of all b, beginning with `row`."""

    @word(tuple_of(precision, pair_rows(nb, nc, nd)), OPEN, i64, i64, tuple_of(INT, nc + nd), i32, i64)
    def load_rows(array, row, nao, columns, stage, lane):
        address = array.at(row, precision.bytes)
        values, stage = [], Stage(stage, lane, nc, nd, precision)
        for _ in range(nb):
            found = []
            for column in columns:
                found += load_if(address + of_precision(column, precision).i64, (column, -1), precision)
            values += stage.exchanged(found, own_first=False)
            address = address + nao * precision.bytes
        return values

    return load_rows


def of_precision(offset, precision):
    """The offset of a number in an array of a precision, from that of a double."""
    return offset if precision is FP64 else offset.shifted(1)


@cache
def make_add_rows(nb, nc, nd, most, precision=FP64):
    """Intrinsic (array, row, nao, columns, left, firsts, stage, lane, values, scale) that adds to the rows of all b.

    It adds the values times `scale`, atomically; those over c of a run of lanes are summed up first. `left` and
    `firsts` are those of `md4.gpu.kernels.digest_in_place.Runs`, of at most `most` lanes; with 1 they are not asked.
    Lanes of pairs that do not count may hold anything.
    """
    width, rows = nc + nd, tuple_of(precision, pair_rows(nb, nc, nd))

    @word(None, OPEN, i64, i64, tuple_of(INT, width), i32, i32, i32, i64, rows, precision.numba)
    def add_rows(array, row, nao, columns, left, firsts, stage, lane, values, scale):
        address, stage = array.at(row), Stage(stage, lane, nc, nd, precision)
        values = [value * scale for value in values]
        for b in range(nb):
            over_c, over_d = values[b * width : b * width + nc], values[b * width + nc : (b + 1) * width]
            over_c = [emit_run_sum(value, left, most) for value in over_c]
            found = stage.exchanged(over_c + over_d, own_first=True)
            for n, (value, column) in enumerate(zip(found, columns)):
                here = address + column.i64
                if n < nc and most > 1:
                    add_double_if(here, value, firsts & (1 << n), "ne", 0)
                else:
                    add_double_if(here, value, column, "gt", -1)
            address = address + nao * 8

    return add_rows


@cache
def make_add_to_x(nb, nc, nd, precision=FP64):
    """Intrinsic (x_b, place, d_b, d_a) -> X of one a, then X of all b with its part added.

    `d_b` are the density's rows of all b, `d_a` that of a; X of a is a row [c, then d].
    """
    width = nc + nd
    rows, own, both = (tuple_of(precision, n * width) for n in (nb, 1, nb + 1))

    @word(both, rows, i32, rows, own)
    def add_to_x(x, place, d_b, d_a):
        x_a = [0.0] * width
        for n in range(nb * nc * nd):
            b, c, d = n // (nc * nd), n // nd % nc, nc + n % nd
            value = shared_real(place, precision.bytes * n, precision)
            x_a[c] = fma(value, d_b[b * width + d], x_a[c])
            x_a[d] = fma(value, d_b[b * width + c], x_a[d])
            x[b * width + c] = fma(value, d_a[d], x[b * width + c])
            x[b * width + d] = fma(value, d_a[c], x[b * width + d])
        return x_a + x

    return add_to_x


@cache
def make_add_to_y(nb, nc, nd, precision=FP64):
    """Intrinsic (y_cd, place, d_cd, array, row, weight) -> Y_ab of one a and all b, then Y_cd with its part added.

    `d_cd` are the lane's D + D^T of c and d; those of a and b are array[row:row + nb]. The weight is Y_cd's only.
    """
    block = tuple_of(precision, nc * nd)

    @word(tuple_of(precision, nb + nc * nd), block, i32, block, OPEN, i64, precision.numba)
    def add_to_y(y, place, d_cd, array, row, weight):
        address = array.at(row, precision.bytes)
        d_ab = [global_number(address, precision.bytes * n, precision) * weight for n in range(nb)]
        y_ab = [0.0] * nb
        for n in range(nb * nc * nd):
            b, cd = n // (nc * nd), n % (nc * nd)
            value = shared_real(place, precision.bytes * n, precision)
            y_ab[b] = fma(value, d_cd[cd], y_ab[b])
            y[cd] = fma(value, d_ab[b], y[cd])
        return y_ab + y

    return add_to_y


@cache
def make_rows_in_turn(nc):
    """Intrinsic (d, lane) -> first AOs of the shells d in whose rows those numbers over c stand that a lane takes."""

    @word(tuple_of(INT, nc), i64, i64)
    def rows_in_turn(d, lane):
        d, pairs = d.i32, [(lane.i32 + 32 * n) // nc for n in range(nc)]
        return [d] if nc == 1 else [shuffled(d, "idx", pair) for pair in pairs]

    return rows_in_turn


def places_in_turn(array, rows, columns, nao, precision):
    """Addresses of the numbers over c that a lane takes, in the rows of the first functions d."""
    places = []
    for row, column in zip(rows, columns):
        start = row.i64 * nao * precision.bytes
        places.append(array + (start + of_precision(column, precision).i64))
    return places


@cache
def make_load_block(nc, nd, precision=FP64):
    """Intrinsic (array, first, nao, columns, rows, stage, lane) -> the lane's block of a symmetric matrix.

    The matrix begins with array[first]. The block has all c and d in the order [c][d]; it is taken from rows d.
    """
    places = tuple_of(INT, nc + nd)

    @word(tuple_of(precision, nc * nd), OPEN, i64, i64, places, tuple_of(INT, nc), i32, i64)
    def load_block(array, first, nao, columns, rows, stage, lane):
        here = places_in_turn(array.at(first, precision.bytes), rows, columns, nao, precision)
        stage, values, step = Stage(stage, lane, nc, nd, precision), [], nao * precision.bytes
        for _ in range(nd):
            found = [load_if(at, (column, -1), precision)[0] for at, column in zip(here, columns)]
            values.append(stage.exchanged(found, own_first=False))
            here = [at + step for at in here]
        return [values[d][c] for c in range(nc) for d in range(nd)]

    return load_block


@cache
def make_add_block(nc, nd, precision=FP64):
    """Intrinsic (array, first, nao, columns, rows, stage, lane, values): adds the lane's block, atomically.

    As `make_load_block` loads it, to rows d. Lanes of pairs that do not count may hold anything.
    """
    places, block = tuple_of(INT, nc + nd), tuple_of(precision, nc * nd)

    @word(None, OPEN, i64, i64, places, tuple_of(INT, nc), i32, i64, block)
    def add_block(array, first, nao, columns, rows, stage, lane, values):
        here = places_in_turn(array.at(first), rows, columns, nao, FP64)
        stage = Stage(stage, lane, nc, nd, precision)
        for d in range(nd):
            found = stage.exchanged(values[d::nd], own_first=True)
            for at, value, column in zip(here, found, columns):
                add_double_if(at, value, column, "gt", -1)
            here = [at + nao * 8 for at in here]

    return add_block
