"""Code without loops: r of a primitive quartet in the registers of one thread, and whole quartets of small classes.

Intrinsics that unroll `md4.method.recurrence` and the tables of `md4.method.hermite` while code is generated. Where one
takes rz, ry and rx, these are R = P - Q of the primitive quartet; `zeros` is the tuple of its [0]^(m).
"""

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.instructions import (
    DOUBLE,
    FP32,
    FP64,
    I32,
    I64,
    aggregate,
    call_asm,
    element_address,
    fields,
    fma,
    global_pointer,
    load_block,
    shared_double,
    shared_vector,
    store_pair,
)
from md4.gpu.hermite_rows import r_numbers
from md4.gpu.tuning import THREAD_QUARTET
from md4.method.angular import packed_hermite, sum_ordinal
from md4.method.hermite import structure
from md4.method.recurrence import by_axis, by_axis_in_plane

i32, i64, f64 = types.int32, types.int64, types.float64

# LLVM's address space of shared memory.
SHARED = 3


def multiply_add(builder, a, b, c):
    """a b + c, contracted; a b where `c` is None."""
    product = builder.fmul(a, b, flags=["contract"])
    return product if c is None else builder.fadd(product, c, flags=["contract"])


def store_doubles(builder, address, values, offset=0):
    """One or two doubles to shared memory, `offset` bytes after `address`, by one instruction; or a float.

    The offset is an index of the pointer: LLVM takes an addition for work, and then unrolls the loop around it less.
    """
    base = builder.inttoptr(address, ir.PointerType(values[0].type, SHARED))
    if len(values) == 1:
        builder.store(values[0], builder.gep(base, [I32(offset // (8 if values[0].type == DOUBLE else 4))]))
        return
    pair = ir.Constant(ir.VectorType(DOUBLE, 2), ir.Undefined)
    for n, value in enumerate(values):
        pair = builder.insert_element(pair, value, I32(n))
    pairs = builder.bitcast(base, ir.PointerType(pair.type, SHARED))
    builder.store(pair, builder.gep(pairs, [I32(offset // 16)]), align=16)


def warp_barrier(builder):
    """All lanes of the warp wait for each other, and see what each has written."""
    name = "llvm.nvvm.bar.warp.sync"
    kind = ir.FunctionType(ir.VoidType(), [I32])
    builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), [I32(-1)])


# r of a primitive quartet in registers


def emit_by_axis(builder, zeros, separation, even=False):
    """Yields (n, r[n]) of all n as code without loops, in the order of `md4.method.recurrence.by_axis`.

    `even`: of all t with even t_0, for R_0 = 0.
    """

    def number(a):
        return ir.Constant(separation[0].type, float(a)) if isinstance(a, int) else a

    def multiply(a, b):
        return b if isinstance(a, int) and a == 1 else builder.fmul(number(a), b)

    def multiply_add(a, b, c):
        return fma(builder, number(a), b, c)

    if even:
        return by_axis_in_plane(zeros, separation[1:], multiply, multiply_add)
    return by_axis(zeros, separation, multiply, multiply_add)


def emit_r(builder, zeros, separation, even=False):
    """r[t] of all t in their order, from [0]^(m) and (R_z, R_y, R_x); `even` as in `emit_by_axis`."""
    return [value for _, value in sorted(emit_by_axis(builder, zeros, separation, even), key=lambda pair: pair[0])]


@cache
def make_pack(count):
    """Intrinsic local array -> tuple of its first `count` doubles."""
    kind = types.UniTuple(f64, count)

    @intrinsic
    def pack(typingctx, array):
        def codegen(context, builder, signature, args):
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            values = [builder.load(builder.gep(data, [I64(n)])) for n in range(count)]
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(array), codegen

    return pack


# Shared memory through which a warp writes r of its 32 quartets: so many t at a time, and doubles from one quartet's
# row to the next, more than that lest rows share banks.
STAGED, STAGE_ROW = 16, 18
STAGE_BYTES = 32 * STAGE_ROW * 8


@cache
def make_write_r(l, stride, even):
    """Intrinsic (zeros, rz, ry, rx, array, first, live, stage, lane): r of a warp's 32 quartets, one a lane.

    `even`: those of even t_0 only, and rz stands for zero.

    r of the warp's n-th quartet goes to array[first + n stride:] for n < `live`. It goes by way of shared memory at
    `stage`, so that 8 lanes write 128 contiguous bytes.
    """
    zeros_type = types.UniTuple(f64, l + 1)

    def write_staged(builder, base, live, stage, lane, first, count):
        """Writes r[first] to r[first + count - 1] of all quartets: 8 lanes a quartet, 16 bytes each."""
        sub = builder.and_(lane, I64(7))
        with builder.if_then(builder.icmp_signed("<", builder.mul(sub, I64(2)), I64(count))):
            for n in range(8):
                row = builder.add(builder.lshr(lane, I64(3)), I64(4 * n))
                with builder.if_then(builder.icmp_signed("<", row, live)):
                    place = builder.add(builder.mul(row, I64(8 * STAGE_ROW)), builder.mul(sub, I64(16)))
                    values = load_block(builder, builder.add(stage, builder.trunc(place, I32)), 0)
                    target = builder.add(builder.mul(row, I64(8 * stride)), builder.mul(sub, I64(16)))
                    store_pair(builder, builder.add(base, builder.add(target, I64(8 * first))), values)

    @intrinsic
    def write_r(typingctx, zeros, rz, ry, rx, array, first, live, stage, lane):
        def codegen(context, builder, signature, args):
            r = emit_r(builder, fields(builder, args[0], l + 1), args[1:4], even)
            base = element_address(context, builder, signature.args[4], args[4], args[5])
            live, stage, lane = args[6:]
            r += [ir.Constant(DOUBLE, 0.0)] * (len(r) % 2)
            own = builder.add(stage, builder.trunc(builder.mul(lane, I64(8 * STAGE_ROW)), I32))
            for start in range(0, len(r), STAGED):
                piece = r[start : start + STAGED]
                for n in range(0, len(piece), 2):
                    store_doubles(builder, own, piece[n : n + 2], 8 * n)
                warp_barrier(builder)
                write_staged(builder, base, live, stage, lane, start, len(piece))
                warp_barrier(builder)
            return context.get_dummy_value()

        return types.void(zeros_type, f64, f64, f64, array, i64, i64, i32, i64), codegen

    return write_r


@cache
def make_r_by_axis(l, even):
    """Intrinsic (zeros, rz, ry, rx, address): r of a quartet, axis by axis, to successive doubles of shared memory.

    `even`: those of even t_0 only, and rz stands for zero.
    """
    zeros_type, places = types.UniTuple(f64, l + 1), r_numbers(l, even)

    @intrinsic
    def r_by_axis(typingctx, zeros, rz, ry, rx, address):
        def codegen(context, builder, signature, args):
            for n, value in emit_by_axis(builder, fields(builder, args[0], l + 1), args[1:4], even):
                store_doubles(builder, args[4], [value], 8 * places[n])
            return context.get_dummy_value()

        return types.void(zeros_type, f64, f64, f64, i32), codegen

    return r_by_axis


@cache
def make_add_r(l):
    """Intrinsic (zeros, weight, rz, ry, rx, address): adds r times a weight to successive doubles of shared memory."""
    zeros_type = types.UniTuple(f64, l + 1)

    @intrinsic
    def add_r(typingctx, zeros, weight, rz, ry, rx, address):
        def codegen(context, builder, signature, args):
            zeros = [builder.fmul(args[1], zero) for zero in fields(builder, args[0], l + 1)]
            for n, value in emit_by_axis(builder, zeros, args[2:5]):
                place = builder.add(args[5], I32(8 * n))
                store_doubles(builder, place, [builder.fadd(shared_double(builder, place), value)])
            return context.get_dummy_value()

        return types.void(zeros_type, f64, f64, f64, f64, i32), codegen

    return add_r


@cache
def make_write_row(count, stride):
    """Intrinsic (address, array, first, lane): `count` doubles of shared memory at `address` to array[first:].

    A warp's lanes take successive ones; `address` and `first` are the lane's own. A row of `stride` = count + 1 ends in
    a zero, so that whoever copies all of it reads nothing that nobody wrote.
    """

    @intrinsic
    def write_row(typingctx, address, array, first, lane):
        def codegen(context, builder, signature, args):
            target = element_address(context, builder, signature.args[1], args[1], args[2])

            def store(value, offset):
                builder.store(value, global_pointer(builder, target, offset, DOUBLE))

            rounds, rest = divmod(count, 32)
            values = [shared_double(builder, args[0], 256 * n) for n in range(rounds)]
            for n, value in enumerate(values):
                store(value, 256 * n)
            if rest:
                with builder.if_then(builder.icmp_signed("<", args[3], I64(rest))):
                    store(shared_double(builder, args[0], 256 * rounds), 256 * rounds)
            if stride > count:
                with builder.if_then(builder.icmp_signed("==", args[3], I64(rest))):
                    store(ir.Constant(DOUBLE, 0.0), 256 * rounds)
            return context.get_dummy_value()

        return types.void(i32, array, i64, i64), codegen

    return write_row


# r of a primitive quartet shared by a group of threads


@intrinsic
def r_update(typingctx, rule, old, constants):
    """r[t]^(m) by a word of `md4.gpu.kernels.recurrence.packed_rules`; `old` and `constants` are shared addresses."""

    def codegen(context, builder, signature, args):
        rule, old, constants = args

        def load(base, shift):
            offset = builder.and_(builder.trunc(builder.lshr(rule, I64(shift)), I32), I32(65535))
            return shared_double(builder, builder.add(base, offset))

        product = builder.fmul(load(constants, 32), load(old, 0))
        return multiply_add(builder, load(constants, 48), load(old, 16), product)

    return f64(i64, i32, i32), codegen


@intrinsic
def store_shared(typingctx, address, value):
    """A double to a shared address."""

    def codegen(context, builder, signature, args):
        store_doubles(builder, args[0], [args[1]])
        return context.get_dummy_value()

    return types.void(i32, f64), codegen


# a whole quartet of a small class


@cache
def make_thread_quartet(bra_class, ket_class, turned, precision=FP64):
    """Intrinsic (zeros, rz, ry, rx, address, array, first, stride, place, add): steps 3 to 5 of one primitive quartet.

    Classes are as in `md4.gpu.staircases`. Structural zeros of H are left out. H[ab, p] comes from shared memory at
    `address`, 16 bytes at a time; the n-th structural element of the lane's H[cd, q], ordered by q, from
    array[first + n stride] (offsets below 2^32 bytes). (ab|cd) goes to shared memory at `place`, cd running fastest (ab
    if `turned`), added to what is there if `add`; a few rows ab at a time, as many as the registers hold.

    All is computed in `precision`, that of the numbers in shared memory and of the array, too.
    """
    l_bra, l_ket, bra, ket = sum(bra_class[:2]), sum(ket_class[:2]), structure(*bra_class), structure(*ket_class)
    l = l_bra + l_ket
    nab, ncd = bra[-1][0] + 1, ket[-1][0] + 1
    by_q = sorted(ket, key=lambda element: element[::-1])
    p_words, q_words, used = packed_hermite(l_bra).tolist(), packed_hermite(l_ket).tolist(), sorted({q for _, q in ket})
    real, nbytes, together = precision.numba, precision.bytes, precision.vector
    zeros_type, batch = types.UniTuple(real, l + 1), THREAD_QUARTET.rows_at_once(ncd, precision is FP32)

    def elements_of(builder, base, step, q):
        """[(cd, H[cd, q])] of the lane's structural elements at q."""
        values = []
        for n, (cd, this) in enumerate(by_q):
            if this == q:
                # in PTX with the address inside: LLVM's loads take more registers, which addresses fill
                text = f"{{ .reg .u64 a; mad.wide.u32 a, $2, {n}, $1; ld.global.nc.{precision.ptx} $0, [a]; }}"
                constraints = f"={precision.letter},l,r"
                values.append((cd, call_asm(builder, precision.llvm, [base, step], text, constraints, effects=True)))
        return values

    def transform(builder, address, base, step, r, rows):
        acc, following = {}, elements_of(builder, base, step, used[0])
        for q, after in zip(used, [*used[1:], None]):
            # those of the next q are on their way while this q is worked on
            elements, following, word = following, elements_of(builder, base, step, after), q_words[q]
            abq = {}
            for n in range(0, len(bra), together):
                if not any(row in rows for row, _ in bra[n : n + together]):
                    continue
                # volatile: read anew for every q rather than kept, for which there are no registers
                elements_of_bra = shared_vector(builder, address, nbytes * n, precision)
                for (row, p), h in zip(bra[n : n + together], elements_of_bra):
                    if row in rows:
                        abq[row] = multiply_add(builder, h, r[sum_ordinal(p_words[p], word)], abq.get(row))
            for cd, h in elements:
                for ab in rows:
                    acc[ab, cd] = multiply_add(builder, abq[ab], h, acc.get((ab, cd)))
        return acc

    @intrinsic
    def thread_quartet(typingctx, zeros, rz, ry, rx, address, array, first, stride, place, add):
        def codegen(context, builder, signature, args):
            r = emit_r(builder, fields(builder, args[0], l + 1), args[1:4])
            base = element_address(context, builder, signature.args[5], args[5], args[6], nbytes)
            step = builder.trunc(builder.mul(args[7], I64(nbytes)), I32)
            for start in range(0, nab, batch):
                rows = range(start, min(start + batch, nab))
                acc = transform(builder, args[4], base, step, r, rows)
                for (ab, cd), value in acc.items():
                    n = cd * nab + ab if turned else ab * ncd + cd
                    add_to_shared(builder, args[8], nbytes * n, value, args[9], precision)
            return context.get_dummy_value()

        return types.void(zeros_type, real, real, real, i32, array, i64, i64, i32, i32), codegen

    return thread_quartet


def add_to_shared(builder, address, offset, value, add, precision):
    """The shared real number at address + offset: `value`, plus what is there if `add`.

    In PTX, whose predicate leaves out the load; LLVM's branch around it takes more registers.
    """
    real, zero = precision.ptx, precision.zero
    text = (
        f"{{ .reg .pred p; .reg .{real} old; setp.ne.s32 p, $2, 0; mov.{real} old, {zero}; "
        f"@p ld.shared.{real} old, [$0+{offset}]; add.{real} old, old, $1; st.shared.{real} [$0+{offset}], old; }}"
    )
    call_asm(builder, ir.VoidType(), [address, value, add], text, f"r,{precision.letter},r", effects=True)
