"""Steps 1 and 2 of gradients as code without loops, a primitive quartet a lane; see `md4.gpu.kernels.reverse_lanes`."""

from functools import cache

from md4.gpu.emit.instructions import global_int, load, shared_real, store_if
from md4.gpu.emit.values import FP64, INT, OPEN, i32, i64, multiply_add, select, tuple_of, word
from md4.gpu.emit.warp_sums import emit_warp_place, emit_warp_sum


def rows_of(elements):
    """For each row cd, the elements (number, q) of H, from their (cd, q) in the order of memory."""
    rows = {}
    for n, (cd, q) in enumerate(elements):
        rows.setdefault(cd, []).append((n, q))
    return [rows[cd] for cd in sorted(rows)]


def successive(address, first, count, live=None):
    """So many numbers of global memory from the number `first` on, two at a time where these are 16 bytes together."""
    found, end = [], first + count
    while first < end:
        many = 1 if first % 2 or first + 1 == end else 2
        found += load("global.nc", address, 8 * first, count=many, live=live)
        first += many
    return found


def ahead_of(elements, nab):
    """How many numbers the products of the first cd need: its elements of H, and Gamma[cd] of each ab."""
    return len(rows_of(elements)[0]) + nab


@cache
def make_first_numbers(elements, nab, count):
    """Intrinsic (Z, h, gamma) -> Z, behind which the numbers of the first cd are on their way; `ahead_of` of them.

    Arguments as those of `make_reverse_products`.
    """
    size, of_h = nab * count, len(rows_of(elements)[0])
    tuples = tuple_of(FP64, size + of_h + nab)

    @word(tuples, tuples, i64, i64)
    def first_numbers(z, h, gamma):
        return [*z[:size], *successive(h, 0, of_h), *(load("global.nc", gamma, 256 * ab)[0] for ab in range(nab))]

    return first_numbers


@cache
def make_load_offsets(count, known):
    """Intrinsic (offsets, first) -> `count` of them (int32) from the number `first` on, or 0 if they are `known`."""

    @word(tuple_of(INT, 1 if known else count), OPEN, i64)
    def load_offsets(offsets, first):
        table = offsets.at(first, 4)
        return [0] if known else [global_int(table, 4 * n) for n in range(count)]

    return load_offsets


@cache
def make_reverse_products(elements, nd, functions, nab, count, known=None):
    """Intrinsic (Z, h, gamma, gamma_step, more, next_h, next_gamma, r, offsets) -> Z + Gamma U.

    Z[ab][p] of `count` Hermite functions p is a tuple; behind it are the numbers of the first cd, and come those of the
    products that are next, at the addresses `next_h` and `next_gamma`, if there are `more` (i32). The cd are those of
    two contracted functions, c times the `nd` components of d plus d. Addresses are the lane's: in global memory of H,
    whose `elements` (cd, q) follow each other, row by row, from a multiple of 16 bytes on, and of Gamma[cd][ab] in a
    tile of 32 quartets, `gamma_step` bytes from one c to the next, and in shared memory of r. `offsets` are the bytes
    from r to r[p + q], [p][q] for the `functions` q, from `make_load_offsets`; `known` is a tuple of them where the p
    are always the same.
    """
    rows, size, offsets = rows_of(elements), nab * count, tuple_of(INT, 1 if known else count * functions)
    tuples = tuple_of(FP64, size + len(rows[0]) + nab)

    @word(tuples, tuples, *[i64] * 3, i32, *[i64] * 2, i32, offsets)
    def reverse_products(z, h, gamma, gamma_step, more, next_h, next_gamma, r, offsets):
        of_c = [gamma]
        for _ in range(len(rows) // nd - 1):
            of_c.append(of_c[-1] + gamma_step)

        def r_number(p, q):
            n = p * functions + q
            return shared_real(r, known[n]) if known else shared_real(r + offsets[n])

        def loaded(cd):
            if cd == len(rows):
                of_h, place, number, live = next_h, next_gamma, 0, (more, 0)
            else:
                of_h, place, number, live = h, of_c[cd // nd], cd % nd * nab, None
            row = rows[cd % len(rows)]
            of_ab = [load("global.nc", place, 256 * (number + ab), live=live)[0] for ab in range(nab)]
            return successive(of_h, row[0][0], len(row), live), of_ab

        following = z[size : size + len(rows[0])], z[size + len(rows[0]) :]
        for cd, row in enumerate(rows):
            factors, gammas = following
            following = loaded(cd + 1)  # ahead of the products that hide its latency
            for p in range(count):
                u = None
                for factor, (_, q) in zip(factors, row):
                    u = multiply_add(factor, r_number(p, q), u)
                for ab in range(nab):
                    z[ab * count + p] = multiply_add(gammas[ab], u, z[ab * count + p])
        return [*z[:size], *following[0], *following[1]]

    return reverse_products


@cache
def make_add_sums(nab, count, ahead):
    """Intrinsic (Z, array, first, row, p, end, signs, lane): adds the sums over a warp to Z in memory.

    Z[ab][p] of `count` functions from the number p on, but not beyond `end`, times their `signs`, goes to
    array[first + (p // 8 row + ab) 8 + p % 8]. Behind Z the tuple has `ahead` numbers that are not used.
    """

    @word(None, tuple_of(FP64, nab * count + ahead), OPEN, i64, i64, i64, i64, OPEN, i64)
    def add_sums(z, array, first, row, p, end, signs, lane):
        base, own = array.at(first), emit_warp_place(lane.i32)
        # A product before the shuffles, which take halves of doubles: else ptxas has these apart in the loops before.
        sign = [load("global.nc", signs.at(select(p + n < end, p + n, 0)))[0] for n in range(count)]
        z = [z[n] * sign[n % count] for n in range(nab * count)]
        for begin in range(0, len(z), 32):
            values = z[begin : begin + 32]
            total, n = emit_warp_sum(values, lane.i32), own + begin
            ab = n // count
            function = (n - ab * count).u64 + p
            inside = select(n < min(len(z), begin + 32), function, end)
            live = end - inside
            # where it is not live, the place is that of the first function, and unused
            known = select(inside < end, inside, 0)
            place = base + (((known >> 3) * row + ab.u64) * 8 + (known & 7)) * 8
            (old,) = load("global", place, live=(live, 0))
            store_if(place, [old + total], (live, 0))

    return add_sums
