"""Code that digests a tile of integrals by one lane: `rows` functions a by `columns` functions b with one c and d.

Intrinsics in the manner of `md4.gpu.emit.vectors`. The integrals I_ab of a tile are a tuple in the order [a][b].
"""

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.instructions import (
    DOUBLE,
    FP64,
    I32,
    I64,
    aggregate,
    call_asm,
    doubles_if,
    fields,
    fma,
    global_double,
    mma_8x8x4,
    shared_double,
    shared_int,
    shared_vector,
)
from md4.gpu.emit.warp_sums import emit_halved

i32, i64, f64 = types.int32, types.int64, types.float64


@intrinsic
def store_number(typingctx, address, number):
    """A 32-bit number to shared memory."""

    def codegen(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], ir.PointerType(I32, 3)), align=4)
        return context.get_dummy_value()

    return types.void(i32, i32), codegen


@intrinsic
def number_of_lane(typingctx, address, n):
    """The 32-bit number in shared memory 128 n bytes after an address."""

    def codegen(context, builder, signature, args):
        return shared_int(builder, builder.add(args[0], builder.mul(args[1], I32(128))))

    return i32(i32, i32), codegen


def address_after(builder, address, n, step):
    """address + n step, `step` an i32; PTX for the reasons of `scalars.address_at`."""
    if n == 0:
        return address
    return call_asm(builder, I64, [step, address], f"mad.wide.s32 $0, $1, {n}, $2;", "=l,r,l")


def emit_tile(builder, rows, columns, sure, first, row_step, step, rows_left, columns_left):
    """The integrals of a tile, see `make_load_tile`; of the first `sure` rows all are there, and no one asks."""
    values = []
    for a in range(rows):
        row, live = address_after(builder, first, a, row_step), None
        if a >= sure:
            live = builder.select(builder.icmp_signed(">", rows_left, I32(a)), columns_left, I32(0))
        for b in range(columns):
            address = address_after(builder, row, b, step)
            values += [global_double(builder, address)] if a < sure else doubles_if(builder, address, (live, b))
    return values


@cache
def make_load_tile(rows, columns, every):
    """Intrinsic (address, row_step, step, rows, columns) -> the integrals of a tile.

    They are at address + a row_step + b step, in bytes, in global memory that no one writes meanwhile. Those of a tile
    with fewer functions a or b are zeros there, and nothing is read for them. With `every` the last two arguments are
    not looked at.
    """
    kind = types.UniTuple(f64, rows * columns)

    @intrinsic
    def load_tile(typingctx, address, row_step, step, rows_left, columns_left):
        def codegen(context, builder, signature, args):
            sure = rows if every else 0
            return aggregate(builder, context.get_value_type(kind), emit_tile(builder, rows, columns, sure, *args))

        return kind(i64, i32, i32, i32, i32), codegen

    return load_tile


def emit_dots(builder, groups, start=None):
    """A sum of products for each list of pairs."""
    totals = []
    for pairs in groups:
        total = start
        for x, y in pairs:
            total = builder.fmul(x, y) if total is None else fma(builder, x, y, total)
        totals.append(total)
    return totals


@cache
def make_tile_times(rows, columns, over_a):
    """Intrinsic (I, x) -> sum_a I_ab x_a for each b if `over_a`, else sum_b I_ab x_b for each a."""
    inner, outer = (rows, columns) if over_a else (columns, rows)
    tile, vector, sums = (types.UniTuple(f64, n) for n in (rows * columns, inner, outer))

    @intrinsic
    def tile_times(typingctx, integrals, x):
        def codegen(context, builder, signature, args):
            values, factors = fields(builder, args[0], rows * columns), fields(builder, args[1], inner)
            lines = [values[b::columns] if over_a else values[b * columns : (b + 1) * columns] for b in range(outer)]
            return aggregate(
                builder, context.get_value_type(sums), emit_dots(builder, [zip(line, factors) for line in lines])
            )

        return sums(tile, vector), codegen

    return tile_times


@cache
def make_scale_tile(count):
    """Intrinsic (I, s) -> s I."""
    kind = types.UniTuple(f64, count)

    @intrinsic
    def scale_tile(typingctx, integrals, s):
        def codegen(context, builder, signature, args):
            values = [builder.fmul(x, args[1]) for x in fields(builder, args[0], count)]
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(kind, f64), codegen

    return scale_tile


@cache
def make_shared_dot(count):
    """Intrinsic (I, address) -> sum_n I_n x_n with the doubles x at a shared address, a multiple of 16."""
    kind = types.UniTuple(f64, count)

    @intrinsic
    def shared_dot(typingctx, integrals, address):
        def codegen(context, builder, signature, args):
            values, factors = fields(builder, args[0], count), []
            for n in range(0, count - 1, 2):
                factors += shared_vector(builder, args[1], 8 * n, FP64)
            if count % 2:
                factors.append(shared_double(builder, args[1], 8 * (count - 1)))
            chains = [list(zip(values, factors))[n::4] for n in range(min(4, count))]  # four, for the latency of one
            total, *others = emit_dots(builder, chains)
            for other in others:
                total = builder.fadd(total, other)
            return total

        return f64(kind, i32), codegen

    return shared_dot


def sum_place(lane):
    """The first of the sums that a lane gets from `make_tile_sums` (device function)."""
    return i32((lane & 1) * 16 + (lane >> 1 & 1) * 8 + (lane >> 2))


@cache
def make_tile_sums(count):
    """Intrinsic (I, s, lane) -> sums over the warp of s I_n, some of the `count` in each lane.

    The m-th number of a lane is the sum n = 32 m + `sum_place`, if that is below `count`, else nothing of use.
    """
    kind, out = types.UniTuple(f64, count), types.UniTuple(f64, -(-count // 32))

    @intrinsic
    def tile_sums(typingctx, integrals, s, lane):
        def codegen(context, builder, signature, args):
            values, factor, lane = fields(builder, args[0], count), args[1], args[2]
            sums = emit_tile_sums(builder, count, lambda n: builder.fmul(values[n], factor), lane)
            return aggregate(builder, context.get_value_type(out), sums)

        return out(kind, f64, i32), codegen

    return tile_sums


def emit_tile_sums(builder, count, value, lane):
    """The sums over the warp of `count` values, of which value(n) makes the n-th, in the order of `sum_place`.

    Tensor instructions sum over four lanes each: with a value as the right operand, columns are the groups of four
    lanes, and a left operand with ones in the row n % 8 puts their sums there. The eight columns of a row come to four
    lanes.
    """
    zero = ir.Constant(DOUBLE, 0.0)
    row, groups = builder.lshr(lane, I32(2)), [[zero, zero] for _ in range(0, count, 8)]
    for m in range(min(8, count)):
        text = f"{{ .reg .pred p; setp.eq.s32 p, $1, {m}; selp.f64 $0, 0d3FF0000000000000, {FP64.zero}, p; }}"
        chosen = call_asm(builder, DOUBLE, [row], text, "=d,r")
        for g, n in enumerate(range(m, count, 8)):
            groups[g] = mma_8x8x4(builder, groups[g], chosen, value(n))
    sums = [builder.fadd(*group) for group in groups]
    for mask in (2, 1):
        sums = emit_halved(builder, sums, lane, mask)
    return sums
