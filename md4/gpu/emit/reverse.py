"""Steps 1 and 2 of gradients as code without loops, a primitive quartet a lane; see `md4.gpu.kernels.reverse_lanes`."""

from functools import cache

from md4.gpu.emit.instructions import global_int, load, shared_real, store_if
from md4.gpu.emit.values import FP64, OPEN, i32, i64, multiply_add, select, tuple_of, word
from md4.gpu.emit.warp_sums import emit_warp_place, emit_warp_sum


def rows_of(elements):
    """For each row cd, the elements (number, q) of H, from their (cd, q) in the order of memory."""
    rows = {}
    for n, (cd, q) in enumerate(elements):
        rows.setdefault(cd, []).append((n, q))
    return [rows[cd] for cd in sorted(rows)]


def successive(address, first, count):
    """So many numbers of global memory from the number `first` on, two at a time where these are 16 bytes together."""
    found, end = [], first + count
    while first < end:
        many = 1 if first % 2 or first + 1 == end else 2
        found += load("global.nc", address, 8 * first, count=many)
        first += many
    return found


@cache
def make_reverse_products(elements, functions, nab, count, known=None):
    """Intrinsic (Z, h, r, gamma, offsets, first) -> Z + Gamma U of `count` Hermite functions p.

    Z[ab][p] is a tuple. Addresses are the lane's: in global memory of H, whose `elements` (cd, q) follow each other,
    row by row, from a multiple of 16 bytes on, and of Gamma[ab][cd] in a tile of 32 quartets, and in shared memory of
    r. `offsets` are the bytes from r to r[p + q], [p][q] for the `functions` q, from the one with the number `first`
    on; `known` is a tuple of them where the p are always the same.
    """
    rows, z_tuple = rows_of(elements), tuple_of(FP64, nab * count)

    @word(z_tuple, z_tuple, i64, i32, i64, OPEN, i64)
    def reverse_products(z, h, r, gamma, offsets, first):
        table = offsets.at(first, 4)

        def r_number(p, q):
            n = p * functions + q
            return shared_real(r + global_int(table, 4 * n)) if known is None else shared_real(r, known[n])

        def loaded(cd):
            factors = successive(h, rows[cd][0][0], len(rows[cd]))
            return factors, [load("global.nc", gamma, 256 * (ab * len(rows) + cd))[0] for ab in range(nab)]

        following = loaded(0)
        for cd, row in enumerate(rows):
            factors, gammas = following
            if cd + 1 < len(rows):  # ahead of the products that hide its latency
                following = loaded(cd + 1)
            for p in range(count):
                u = None
                for factor, (_, q) in zip(factors, row):
                    u = multiply_add(factor, r_number(p, q), u)
                for ab in range(nab):
                    z[ab * count + p] = multiply_add(gammas[ab], u, z[ab * count + p])
        return z

    return reverse_products


@cache
def make_add_sums(nab, count):
    """Intrinsic (Z, array, first, row, p, end, signs, lane): adds the sums over a warp to Z in memory.

    Z[ab][p] of `count` functions from the number p on, but not beyond `end`, times their `signs`, goes to
    array[first + (p // 8 row + ab) 8 + p % 8].
    """

    @word(None, tuple_of(FP64, nab * count), OPEN, i64, i64, i64, i64, OPEN, i64)
    def add_sums(z, array, first, row, p, end, signs, lane):
        base, own = array.at(first), emit_warp_place(lane.i32)
        for begin in range(0, len(z), 32):
            values = z[begin : begin + 32]
            total, n = emit_warp_sum(values, lane.i32), own + begin
            ab = n // count
            function = (n - ab * count).u64 + p
            inside = select(n < min(len(z), begin + 32), function, end)
            live = end - inside
            # where it is not live, the sign and the place are those of the first function, and unused
            known = select(inside < end, inside, 0)
            sign = global_int(signs.at(known, 4))
            place = base + (((known >> 3) * row + ab.u64) * 8 + (known & 7)) * 8
            (old,) = load("global", place, live=(live, 0))
            value = select(sign < 0, -total, total)
            store_if(place, [old + value], (live, 0))

    return add_sums
