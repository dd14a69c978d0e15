"""PTX that Numba has no word for: FP64 tensor-core tiles, asynchronous copies, 16-byte accesses.

One intrinsic is one operation on a whole register tile, unrolled while code is generated, so that a tile lives in
registers as one UniTuple.

A tile is `mt` x `nt` fragments of 16 x 8, four doubles a lane: c0, c1 in row lane/4 and columns 2(lane%4)+{0,1}, c2, c3
eight rows below. For one step of 8 in the inner index k, the lane's left operand is a0..a3 = (row, k), (row+8, k),
(row, k+1), (row+8, k+1) with row = lane/4 and k = 2(lane%4), its right operand b0, b1 = (k, column), (k+1, column) with
column = lane/4. (The instruction calls these k indices lane%4 and lane%4 + 4; a sum does not care, if both operands
agree.) So 16 bytes of a right operand lie in a row of an 8 x 8 block [column][k], and a tile of columns is, as it
comes out, a right operand of the next product.
"""

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.tuning import reach_levels

DOUBLE, I32, I64 = ir.DoubleType(), ir.IntType(32), ir.IntType(64)


def call_asm(builder, result, operands, text, constraints, effects=False):
    """Inline PTX; `effects` for anything that touches memory or must keep its place."""
    function = ir.FunctionType(result, [o.type for o in operands])
    constraints = ",".join(filter(None, (constraints, "~{memory}" if effects else "")))
    return builder.call(ir.InlineAsm(function, text, constraints, side_effect=effects), operands)


def element_address(context, builder, array_type, array, index, size=8):
    """Global address of array[index] (1-D, contiguous, items of `size` bytes) as an i64."""
    data = context.make_array(array_type)(context, builder, array).data
    base = builder.ptrtoint(data, I64)
    return builder.add(base, builder.mul(builder.sext(index, I64) if index.type != I64 else index, I64(size)))


def aggregate(builder, kind, values):
    """LLVM array value of a homogeneous tuple."""
    tuple_value = ir.Constant(kind, ir.Undefined)
    for n, v in enumerate(values):
        tuple_value = builder.insert_value(tuple_value, v, n)
    return tuple_value


def fields(builder, value, count):
    """The members of an LLVM aggregate."""
    return [builder.extract_value(value, n) for n in range(count)]


def fma(builder, a, b, c):
    """a b + c, rounded once."""
    kind = ir.FunctionType(DOUBLE, [DOUBLE] * 3)
    function = builder.module.globals.get("llvm.fma.f64") or ir.Function(builder.module, kind, "llvm.fma.f64")
    return builder.call(function, [a, b, c])


def shared_double(builder, address, offset=0):
    """The double in shared memory `offset` bytes after `address`."""
    return call_asm(builder, DOUBLE, [address], f"ld.shared.f64 $0, [$1+{offset}];", "=d,r", effects=True)


def global_double(builder, address, offset=0):
    """The double in global memory `offset` bytes after `address`, which no one writes meanwhile."""
    return call_asm(builder, DOUBLE, [address], f"ld.global.nc.f64 $0, [$1+{offset}];", "=d,l")


def global_int(builder, address, offset=0):
    """The 32-bit number in global memory `offset` bytes after `address`, which no one writes meanwhile.

    Loaded where it is used: kept from one turn of a loop to the next, it would cost a register.
    """
    return call_asm(builder, I32, [address], f"ld.global.nc.s32 $0, [$1+{offset}];", "=r,l", effects=True)


def add_double(builder, address, value, offset=0):
    """Atomic addition to the double in global memory `offset` bytes after `address`."""
    text = f"red.global.add.f64 [$0+{offset}], $1;"
    call_asm(builder, ir.VoidType(), [address, value], text, "l,d", effects=True)


@intrinsic
def shared_address(typingctx, array):
    """Address of a shared-memory array within the shared window, int32."""

    def codegen(context, builder, signature, args):
        base = element_address(context, builder, signature.args[0], args[0], I64(0))
        text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
        return call_asm(builder, I32, [base], text, "=r,l")

    return types.int32(array), codegen


@cache
def make_copy_async(count, stride):
    """Intrinsic (address, array, index, limit): the thread starts `count` copies of 16 bytes to shared memory.

    Copy n goes from array[index + 2 stride n] to address + 16 stride n, for n < limit; the others do nothing.
    """

    @intrinsic
    def copies(typingctx, address, array, index, limit):
        def codegen(context, builder, signature, args):
            source = element_address(context, builder, signature.args[1], args[1], args[2])
            for n in range(count):
                text = f"cp.async.cg.shared.global [$0+{16 * stride * n}], [$1+{16 * stride * n}], 16;"
                text = f"{{ .reg .pred p; setp.gt.s64 p, $2, {n}; @p {text} }}"
                call_asm(builder, ir.VoidType(), [args[0], source, args[3]], text, "r,l,l", effects=True)
            return context.get_dummy_value()

        return types.void(types.int32, array, types.int64, types.int64), codegen

    return copies


@cache
def make_copy_rows(count, stride):
    """Intrinsic (address, array, index, step, limit, size): the thread starts `count` copies of `size` <= 16 bytes.

    Copy n goes from array[index + step n] to address + 16 stride n, for n < limit, and fills up 16 bytes with zeros.
    """

    @intrinsic
    def copy_rows(typingctx, address, array, index, step, limit, size):
        def codegen(context, builder, signature, args):
            address, array, index, step, limit, size = args
            source = element_address(context, builder, signature.args[1], array, index)
            for n in range(count):
                text = f"cp.async.cg.shared.global [$0+{16 * stride * n}], [$1], 16, $3;"
                text = f"{{ .reg .pred p; setp.gt.s64 p, $2, {n}; @p {text} }}"
                call_asm(builder, ir.VoidType(), [address, source, limit, size], text, "r,l,l,r", effects=True)
                source = builder.add(source, builder.mul(step, I64(8)))
            return context.get_dummy_value()

        index = types.int64
        return types.void(types.int32, array, index, index, index, types.int32), codegen

    return copy_rows


@intrinsic
def commit_copies(typingctx):
    """Closes a group of asynchronous copies."""

    def codegen(context, builder, signature, args):
        call_asm(builder, ir.VoidType(), [], "cp.async.commit_group;", "", effects=True)
        return context.get_dummy_value()

    return types.void(), codegen


@cache
def make_wait_copies(pending):
    """Intrinsic that waits until at most `pending` groups of copies are under way."""

    @intrinsic
    def wait_copies(typingctx):
        def codegen(context, builder, signature, args):
            call_asm(builder, ir.VoidType(), [], f"cp.async.wait_group {pending};", "", effects=True)
            return context.get_dummy_value()

        return types.void(), codegen

    return wait_copies


@cache
def make_zeros(count):
    """Intrinsic () -> tuple of `count` zeros."""
    kind = types.UniTuple(types.float64, count)

    @intrinsic
    def zeros(typingctx):
        def codegen(context, builder, signature, args):
            return ir.Constant(context.get_value_type(kind), None)

        return kind(), codegen

    return zeros


def load_block(builder, address, offset):
    """The lane's two doubles of an 8 x 8 block in shared memory."""
    kind = ir.LiteralStructType([DOUBLE, DOUBLE])
    text = f"ld.shared.v2.f64 {{$0, $1}}, [$2+{offset}];"
    return fields(builder, call_asm(builder, kind, [address], text, "=d,=d,r", effects=True), 2)


def mma_16x8x8(builder, c, a, b):
    """c += a b on one fragment, one instruction (compute capability 9.0)."""
    kind = ir.LiteralStructType([DOUBLE] * 4)
    text = (
        "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    constraints = ",".join(["=d"] * 4 + ["d"] * 10)
    return fields(builder, call_asm(builder, kind, [*a, *b, *c], text, constraints), 4)


def mma_8x8x4(builder, c, a, b):
    """c += a b on 8 x 8, one instruction (compute capability 8.0)."""
    kind = ir.LiteralStructType([DOUBLE] * 2)
    text = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {$0,$1}, {$2}, {$3}, {$4,$5};"
    return fields(builder, call_asm(builder, kind, [a, b, *c], text, "=d,=d,d,d,d,d"), 2)


def mma_by_halves(builder, c, a, b):
    """c += a b on one fragment as four instructions of half the rows and half the inner index (from 8.0)."""
    halves = []
    for row in range(2):
        half = c[2 * row : 2 * row + 2]
        for inner in range(2):
            half = mma_8x8x4(builder, half, a[row + 2 * inner], b[inner])
        halves += half
    return halves


def merge(builder, values):
    """Phi nodes in the current block of lists of doubles [(list, block), ...] that come into it."""
    merged = []
    for n in range(len(values[0][0])):
        phi = builder.phi(DOUBLE)
        for numbers, block in values:
            phi.add_incoming(numbers[n], block)
        merged.append(phi)
    return merged


def by_levels(builder, c, reach, step, count, multiply):
    """Products of as many blocks as `reach` counts, in units of `step`; multiply(c, n) takes the first n of `count`.

    Straight code for every level of `reach_levels`: with branches in between, operands are not fetched ahead.
    """
    results, levels, after = [], reach_levels(count), builder.append_basic_block()
    for n, lower in zip(levels, [*levels[1:], None]):
        if lower is not None:
            here, further = builder.append_basic_block(), builder.append_basic_block()
            builder.cbranch(builder.icmp_signed(">", reach, I32(lower * step)), here, further)
            builder.position_at_end(here)
        sums = list(c)
        multiply(sums, n)
        results.append((sums, builder.block))
        builder.branch(after)
        if lower is not None:
            builder.position_at_end(further)
    builder.position_at_end(after)
    return merge(builder, results)


def tile_products(builder, mt, nt, mma):
    """multiply(c, address, b, n): c += A b of the first n of `mt` row fragments; see `make_mma_tile`."""

    def multiply(c, address, b, count):
        for i in range(count):
            a = [x for half in range(2) for x in load_block(builder, address, 1024 * i + 512 * half)]
            for j in range(nt):
                n = 4 * (i * nt + j)
                c[n : n + 4] = mma(builder, c[n : n + 4], a, b[2 * j : 2 * j + 2])

    return multiply


def turned_products(builder, mq, nb, mma):
    """multiply(c, address, a, n): c += A B of the first n of `nb` blocks of rows; see `make_mma_turned`."""

    def multiply(c, address, a, count):
        for j in range(count):
            b = load_block(builder, address, 512 * j)
            for i in range(mq):
                n, (a0, a2, a1, a3) = 4 * (i * nb + j), a[4 * i : 4 * i + 4]
                c[n : n + 4] = mma(builder, c[n : n + 4], [a0, a1, a2, a3], b)

    return multiply


@cache
def make_mma_tile(mt, nt, wide):
    """Intrinsic (tile, address, b, reach) -> tile + A b for one step of 8 in the inner index.

    `address`: the lane's place in the left operand in shared memory, per 16 rows [k half][lane][row half], 1024 bytes;
    `b`: two doubles a column block; `reach`: blocks of 8 rows of A that count, the others are zero;
    `wide`: m16n8k8 instructions, else m8n8k4.
    """
    tile, operand = types.UniTuple(types.float64, 4 * mt * nt), types.UniTuple(types.float64, 2 * nt)
    mma = mma_16x8x8 if wide else mma_by_halves

    @intrinsic
    def mma_tile(typingctx, acc, address, b, reach):
        def codegen(context, builder, signature, args):
            c, b = fields(builder, args[0], 4 * mt * nt), fields(builder, args[2], 2 * nt)
            products = tile_products(builder, mt, nt, mma)
            c = by_levels(builder, c, args[3], 2, mt, lambda c, count: products(c, args[1], b, count))
            return aggregate(builder, context.get_value_type(tile), c)

        return tile(tile, types.int32, operand, types.int32), codegen

    return mma_tile


@cache
def make_mma_turned(mq, nb, wide):
    """Intrinsic (tile, address, a, reach) -> tile + A B for one step of 8 in the inner index, B being that of H.

    The tile has `mq` fragments of 16 rows and `nb` of 8 columns. `a`: two doubles for each of 2 mq blocks of 8 rows, as
    right operands are; `address`: the lane's place in the right operand in shared memory, `nb` blocks [column][k], of
    which `reach` count, the others are zero.
    """
    tile, operand = types.UniTuple(types.float64, 4 * mq * nb), types.UniTuple(types.float64, 4 * mq)
    mma = mma_16x8x8 if wide else mma_by_halves

    @intrinsic
    def mma_turned(typingctx, acc, address, a, reach):
        def codegen(context, builder, signature, args):
            c, a = fields(builder, args[0], 4 * mq * nb), fields(builder, args[2], 4 * mq)
            products = turned_products(builder, mq, nb, mma)
            c = by_levels(builder, c, args[3], 1, nb, lambda c, count: products(c, args[1], a, count))
            return aggregate(builder, context.get_value_type(tile), c)

        return tile(tile, types.int32, operand, types.int32), codegen

    return mma_turned


@cache
def make_stair_products(rows8, nt, wide, turned, ahead):
    """Intrinsic that adds all steps of a product to a tile, [p|q] gathered, blocks of rows as far as they count.

    (tile, panel, panel_step, words, words_step, r, state, ends, steps) -> tile: addresses of the lane's place in shared
    memory and what they move by in bytes; `state` as of `make_column_state`; with the n-th of `reach_levels` blocks of
    rows the steps up to ends[n] are done, of `steps` in all. `ahead` gathers one step ahead of the products.
    """
    tile, operand = types.UniTuple(types.float64, 2 * rows8 * nt), types.UniTuple(types.int32, 2 * nt)
    mma, blocks = mma_16x8x8 if wide else mma_by_halves, rows8 if turned else rows8 // 2

    @intrinsic
    def stair_products(typingctx, acc, panel, panel_step, words, words_step, r, state, ends, steps):
        def codegen(context, builder, signature, args):
            c, state = fields(builder, args[0], 2 * rows8 * nt), fields(builder, args[6], 2 * nt)
            panel, panel_step, words, words_step, r, steps = (args[n] for n in (1, 2, 3, 4, 5, 8))
            if turned:
                products = turned_products(builder, nt // 2, rows8, mma)
            else:
                products = tile_products(builder, blocks, nt, mma)
            table = element_address(context, builder, signature.args[7], args[7], I64(0), 4)

            def gather(words):
                values = []
                for j in range(nt):
                    place, offset = builder.add(words, state[2 * j]), builder.add(r, state[2 * j + 1])
                    values += gathered(builder, offset, place)
                return values

            numbers = [*c, *(gather(words) if ahead else [])]
            k, counters = I32(0), [panel, words]
            for n, level in enumerate(reach_levels(blocks)):
                end = global_int(builder, table, 4 * n)
                before = builder.block
                head, body, after = (builder.append_basic_block() for _ in range(3))
                builder.branch(head)
                builder.position_at_end(head)
                integers = [builder.phi(I32) for _ in range(3)]
                doubles = [builder.phi(DOUBLE) for _ in numbers]
                for phi, value in zip([*integers, *doubles], [k, *counters, *numbers]):
                    phi.add_incoming(value, before)
                builder.cbranch(builder.icmp_signed("<", integers[0], end), body, after)
                builder.position_at_end(body)
                (k, panel, words), sums = integers, doubles[: len(c)]
                following = builder.add(k, I32(1))
                next_words = builder.add(words, words_step)
                if ahead:
                    last = builder.icmp_signed("<", following, steps)
                    b, next_b = doubles[len(c) :], gather(builder.select(last, next_words, words))
                else:
                    b, next_b = gather(words), []
                products(sums, panel, b, level)
                values = [following, builder.add(panel, panel_step), next_words, *sums, *next_b]
                for phi, value in zip([*integers, *doubles], values):
                    phi.add_incoming(value, builder.block)
                builder.branch(head)
                builder.position_at_end(after)
                k, *counters = integers
                numbers = doubles
            return aggregate(builder, context.get_value_type(tile), numbers[: len(c)])

        i32 = types.int32
        return tile(tile, i32, i32, i32, i32, i32, operand, ends, i32), codegen

    return stair_products


def gathered(builder, address, table):
    """The two doubles of r whose byte offsets from `address` share the word at `table`, both in shared memory."""
    word = call_asm(builder, I32, [table], "ld.shared.b32 $0, [$1];", "=r,r", effects=True)
    offsets = builder.and_(word, I32(65535)), builder.lshr(word, I32(16))
    return [shared_double(builder, builder.add(address, offset)) for offset in offsets]


@cache
def make_load_blocks(nt, singly=False):
    """Intrinsic address -> the lane's doubles of `nt` successive 8 x 8 blocks in shared memory.

    `singly`: not the two of a block by one instruction. Where they are left operands, they are no neighbours among an
    instruction's registers, and were copied, often once for every instruction. (Volatile loads are not joined.)
    """
    operand = types.UniTuple(types.float64, 2 * nt)

    @intrinsic
    def load_blocks(typingctx, address):
        def codegen(context, builder, signature, args):
            values = []
            for j in range(nt):
                if singly:
                    for n in range(2):
                        text = f"ld.volatile.shared.f64 $0, [$1+{512 * j + 8 * n}];"
                        values.append(call_asm(builder, DOUBLE, [args[0]], text, "=d,r", effects=True))
                else:
                    values += load_block(builder, args[0], 512 * j)
            return aggregate(builder, context.get_value_type(operand), values)

        return operand(types.int32), codegen

    return load_blocks


@cache
def make_column_state(nt, in_turn):
    """Intrinsic that finds, for the `nt` column fragments from `column` on, the words and the r of their gather.

    (column, ncol, k_first, nq8, r_stride) -> (offset of words, offset of r) of each fragment in bytes, where column c
    stands for block c % nq8 of ket primitive c // nq8. Words are those of all blocks, or `in_turn` of the fragments
    one after the other. Columns beyond `ncol`, which is below 2^31, take the r of the last one.
    """
    state = types.UniTuple(types.int32, 2 * nt)

    @intrinsic
    def column_state(typingctx, column, ncol, k_first, nq8, r_stride):
        def codegen(context, builder, signature, args):
            column, ncol, k_first, nq8, r_stride = (builder.trunc(arg, I32) for arg in args)
            values = []
            for j in range(nt):
                c = builder.add(column, I32(j))
                c = builder.select(builder.icmp_signed("<", c, ncol), c, builder.sub(ncol, I32(1)))
                k = builder.udiv(c, nq8)
                words = builder.mul(builder.sub(c, builder.mul(k, nq8)), I32(128))
                offset = builder.mul(builder.sub(k, k_first), builder.mul(r_stride, I32(8)))
                values += [I32(128 * j) if in_turn else words, offset]
            return aggregate(builder, context.get_value_type(state), values)

        return state(*[types.int64] * 5), codegen

    return column_state


@cache
def make_gather_columns(nt):
    """Intrinsic (address of r, address of words, state) -> right operand [p0|q], [p1|q] of each column fragment."""
    operand, state = types.UniTuple(types.float64, 2 * nt), types.UniTuple(types.int32, 2 * nt)

    @intrinsic
    def gather_columns(typingctx, address, words, columns):
        def codegen(context, builder, signature, args):
            columns, values = fields(builder, args[2], 2 * nt), []
            for j in range(nt):
                values += gathered(builder, *(builder.add(args[n], columns[2 * j + 1 - n]) for n in range(2)))
            return aggregate(builder, context.get_value_type(operand), values)

        return operand(types.int32, types.int32, state), codegen

    return gather_columns


@cache
def make_chain(mt, nq, nc, wide, reach):
    """Intrinsic (tile, left, array, first, count) -> tile + left B: a finished tile as left operand.

    `left` holds `nq` column fragments of 8 inner indices each, B's fragment j of 8 inner indices and `nc` column blocks
    lies in array[first + 64 nc j:], [column][k] blocks; `first` holds the lane's offset 2 lane. Fragments
    from `count` on count as zero; of fragment j the first reach[j] column blocks are not zero.
    """
    tile, left = types.UniTuple(types.float64, 4 * mt * nc), types.UniTuple(types.float64, 4 * mt * nq)
    mma = mma_16x8x8 if wide else mma_by_halves

    @intrinsic
    def chain(typingctx, acc, operand, array, first, count):
        def codegen(context, builder, signature, args):
            c, left = fields(builder, args[0], 4 * mt * nc), fields(builder, args[1], 4 * mt * nq)
            base = element_address(context, builder, signature.args[2], args[2], args[3])
            for j in range(nq):
                b = [load_if(builder, base, 512 * (nc * j + n), args[4], j) for n in range(reach[j])]
                for i in range(mt):
                    operand = swapped(builder, left[4 * (i * nq + j) : 4 * (i * nq + j) + 4], args[4])
                    for n in range(reach[j]):
                        k = 4 * (i * nc + n)
                        c[k : k + 4] = mma(builder, c[k : k + 4], operand, b[n])
            return aggregate(builder, context.get_value_type(tile), c)

        return tile(tile, left, array, types.int64, types.int64), codegen

    return chain


def swapped(builder, c, positive):
    """c0, c2, c1, c3, where the compiler does not see that they change places, as `positive` might be 0.

    A left operand wants them in successive registers; if it knew, the compiler would make a copy for every instruction.
    """
    text = "{ .reg .pred p; setp.gt.s64 p, $3, 0; selp.f64 $0, $1, $2, p; }"
    pairs = (c[0], c[3]), (c[2], c[1]), (c[1], c[2]), (c[3], c[0])
    return [call_asm(builder, DOUBLE, [*pair, positive], text, "=d,d,d,l") for pair in pairs]


def load_if(builder, base, offset, count, j):
    """Two doubles of global memory if j < count, else zeros."""
    kind = ir.LiteralStructType([DOUBLE, DOUBLE])
    text = (
        f"{{ .reg .pred p; setp.gt.s64 p, $3, {j}; mov.f64 $0, 0d0000000000000000; mov.f64 $1, 0d0000000000000000; "
        f"@p ld.global.nc.v2.f64 {{$0, $1}}, [$2+{offset}]; }}"
    )
    return fields(builder, call_asm(builder, kind, [base, count], text, "=&d,=&d,l,l"), 2)
