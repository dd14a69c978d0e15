"""Step 3 on the CPU: r[p+q] of LANES primitive quartets, in a cube, by code that is generated.

In the cube r[i, j, k], i + j + k <= L, is the vector (i S + j) S + k, so the place of p + q is the sum of the places of
p and of q. The equations are those of `md4.method.recurrence`, one axis after the other.
"""

from llvmlite import ir
from numba import types

from md4.cpu.emit.vectors import ARRAY, DOUBLE, I64, LANES, VECTOR, Memory, Value, i64, loop, multiply_add, vector, word
from md4.method.angular import hermite_triples
from md4.method.recurrence import by_axis

# Orders up to which there is code without loops.
STRAIGHT = 6


def cube_side(l):
    """S; odd, so that vectors spread over a cache."""
    return (l + 1) | 1


def straight(builder, l, zeros, separation, r):
    """Code without loops for one L."""
    side, triples = cube_side(l), hermite_triples(l).tolist()

    def number(a):
        return ir.Constant(VECTOR, [float(a)] * LANES) if isinstance(a, int) else a

    def multiply(a, b):
        return b if isinstance(a, int) and a == 1 else builder.fmul(number(a), b)

    def plus(a, b, c):
        return multiply_add(builder, number(a), b, c)

    values = [zeros[I64(m)].value for m in range(l + 1)]
    for n, value in by_axis(values, [x.value for x in separation], multiply, plus):
        i, j, k = triples[n]
        r[I64((i * side + j) * side + k)] = Value(builder, value)


def raise_axis(builder, rows, width, most, x):
    """rows[n][m] for n = 1..most, m = 0..most - n from rows[0][m]: the recurrence along one axis."""
    with loop(builder, I64(0), most) as n:
        first = builder.icmp_signed("==", n, I64(0))
        here, below = builder.mul(n, width), builder.mul(builder.select(first, n, builder.sub(n, I64(1))), width)
        above, factor = builder.mul(builder.add(n, I64(1)), width), builder.sitofp(n, DOUBLE)
        with loop(builder, I64(1), builder.add(builder.sub(most, n), I64(1))) as m:
            value = x * rows[builder.add(here, m)]
            value = rows[builder.add(below, m)].times_plus(factor, value)
            rows[builder.sub(builder.add(above, m), I64(1))] = value


def by_loops(builder, l, side, zeros, separation, work, r):
    """Code for any L. `work` has room for 3 (L+1)^2 vectors: rows of r[n]^(m) along each axis."""
    rz, ry, rx = separation
    width = builder.add(l, I64(1))
    size = builder.mul(width, width)
    of_x, of_y, of_z = work, work.from_here(size), work.from_here(builder.mul(I64(2), size))

    def lowest(source, begin, target, last):
        with loop(builder, I64(0), builder.add(last, I64(1))) as m:
            target[m] = source[builder.add(begin, m)]

    lowest(zeros, I64(0), of_x, l)
    raise_axis(builder, of_x, width, l, rx)
    with loop(builder, I64(0), width) as k:
        rest = builder.sub(l, k)
        lowest(of_x, builder.mul(k, width), of_y, rest)
        raise_axis(builder, of_y, width, rest, ry)
        with loop(builder, I64(0), builder.add(rest, I64(1))) as j:
            most = builder.sub(rest, j)
            lowest(of_y, builder.mul(j, width), of_z, most)
            raise_axis(builder, of_z, width, most, rz)
            with loop(builder, I64(0), builder.add(most, I64(1))) as i:
                row = builder.add(builder.mul(builder.add(builder.mul(i, side), j), side), k)
                r[row] = of_z[builder.mul(i, width)]


@word(types.void, i64, i64, ARRAY, vector, vector, vector, ARRAY, ARRAY)
def recur(builder, l, side, zeros, rz, ry, rx, work, r):
    """The cube `r` from the vectors [0]^(m) in `zeros` and R = P - Q. `work` has room for 3 (L+1)^2 vectors."""
    source, room, target = (Memory(builder, data) for data in (zeros, work, r))
    separation = [Value(builder, value) for value in (rz, ry, rx)]
    after, other = builder.append_basic_block("after"), builder.append_basic_block("by_loops")
    choice = builder.switch(l, other)
    for n in range(STRAIGHT + 1):
        block = builder.append_basic_block(f"straight{n}")
        choice.add_case(I64(n), block)
        builder.position_at_end(block)
        straight(builder, n, source, separation, target)
        builder.branch(after)
    builder.position_at_end(other)
    by_loops(builder, l, side, source, separation, room, target)
    builder.branch(after)
    builder.position_at_end(after)
