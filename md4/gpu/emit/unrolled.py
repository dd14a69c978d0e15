"""Straight-line code: r of a quartet in the registers of one thread, and whole quartets of the smallest classes.

Intrinsics unrolled from `md4.method.recurrence` and the tables of `md4.method.hermite` while code is generated.
"""

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.instructions import (
    DOUBLE,
    I32,
    I64,
    aggregate,
    call_asm,
    element_address,
    fields,
    fma,
    load_block,
    shared_double,
    store_pair,
)
from md4.gpu.tuning import LOW_ROWS, LOW_TILE
from md4.method.angular import packed_hermite, sum_ordinal
from md4.method.hermite import structure
from md4.method.recurrence import by_columns


def multiply_add(builder, a, b, c):
    """a b + c, contracted; a b where `c` is None."""
    product = builder.fmul(a, b, flags=["contract"])
    return product if c is None else builder.fadd(product, c, flags=["contract"])


@intrinsic
def r_update(typingctx, rule, old, constants):
    """r[t]^(m) by a word of `md4.gpu.kernels.recurrence.packed_rules`; `old` and `constants` are shared addresses."""

    def codegen(context, builder, signature, args):
        rule, old, constants = args

        def load(base, shift, bits):
            offset = builder.and_(builder.trunc(builder.lshr(rule, I64(shift)), I32), I32((1 << bits) - 1))
            address = builder.add(base, offset)
            return shared_double(builder, address)

        product = builder.fmul(load(constants, 32, 16), load(old, 0, 16))
        return multiply_add(builder, load(constants, 48, 16), load(old, 16, 16), product)

    return types.float64(types.int64, types.int32, types.int32), codegen


@intrinsic
def store_shared(typingctx, address, value):
    """A double to a shared address."""

    def codegen(context, builder, signature, args):
        call_asm(builder, ir.VoidType(), args, "st.shared.f64 [$0], $1;", "r,d", effects=True)
        return context.get_dummy_value()

    return types.void(types.int32, types.float64), codegen


# Shared memory through which a warp writes r, 16 items of its 32 quartets at a time, rows padded against conflicts.
STAGE_ITEMS, STAGE_ROW = 16, 18
STAGE_BYTES = 32 * STAGE_ROW * 8


@cache
def make_straight_r(l, stride):
    """Intrinsic (zeros, rx, ry, rz, array, first, nlive, stage, lane): r of a warp's 32 quartets, a lane each.

    `zeros` are the lane's [0]^(0..l). r goes to array[first + lane stride:] for lanes below `nlive`, by way of shared
    memory at `stage`, so that 8 lanes write 128 contiguous bytes.
    """
    zeros = types.UniTuple(types.float64, l + 1)

    def write_out(builder, base, nlive, stage, lane, first, count):
        """Items first..first+count of all rows: 8 lanes a row, 16 bytes each."""
        sub = builder.and_(lane, I64(7))
        with builder.if_then(builder.icmp_signed("<", builder.mul(sub, I64(2)), I64(count))):
            for n in range(8):
                row = builder.add(builder.lshr(lane, I64(3)), I64(4 * n))
                with builder.if_then(builder.icmp_signed("<", row, nlive)):
                    place = builder.add(builder.mul(row, I64(8 * STAGE_ROW)), builder.mul(sub, I64(16)))
                    values = load_block(builder, builder.add(stage, builder.trunc(place, I32)), 0)
                    target = builder.add(builder.mul(row, I64(8 * stride)), builder.mul(sub, I64(16)))
                    store_pair(builder, builder.add(base, builder.add(target, I64(8 * first))), values)

    @intrinsic
    def straight_r(typingctx, zero, rx, ry, rz, array, first, nlive, stage, lane):
        def codegen(context, builder, signature, args):
            r = emit_r(builder, fields(builder, args[0], l + 1), args[1:4])
            base = element_address(context, builder, signature.args[4], args[4], args[5])
            nlive, stage, lane = args[6:]
            r += [ir.Constant(DOUBLE, 0.0)] * (len(r) % 2)
            own = builder.add(stage, builder.trunc(builder.mul(lane, I64(8 * STAGE_ROW)), I32))
            for start in range(0, len(r), STAGE_ITEMS):
                piece = r[start : start + STAGE_ITEMS]
                for n in range(0, len(piece), 2):
                    text = f"st.shared.v2.f64 [$0+{8 * n}], {{$1, $2}};"
                    call_asm(builder, ir.VoidType(), [own, *piece[n : n + 2]], text, "r,d,d", effects=True)
                call_asm(builder, ir.VoidType(), [], "bar.warp.sync -1;", "", effects=True)
                write_out(builder, base, nlive, stage, lane, start, len(piece))
                call_asm(builder, ir.VoidType(), [], "bar.warp.sync -1;", "", effects=True)
            return context.get_dummy_value()

        kinds, index = (types.float64,) * 3, types.int64
        return types.void(zeros, *kinds, array, index, index, types.int32, index), codegen

    return straight_r


def emit_columns(builder, zero, axes):
    """(n, r[n]) for all n as straight-line code, column by column: `md4.method.recurrence.by_columns`."""

    def number(a):
        return ir.Constant(DOUBLE, float(a)) if isinstance(a, int) else a

    def multiply(a, b):
        return b if isinstance(a, int) and a == 1 else builder.fmul(number(a), b)

    def multiply_add(a, b, c):
        return fma(builder, number(a), b, c)

    return by_columns(zero, axes, multiply, multiply_add)


def emit_r(builder, zero, axes):
    """r[t] for all t in their order, from [0]^(m) and (rx, ry, rz)."""
    return [value for _, value in sorted(emit_columns(builder, zero, axes), key=lambda pair: pair[0])]


@cache
def make_column_r(l):
    """Intrinsic (zeros, rx, ry, rz, address): r of a quartet, by columns, to successive doubles of shared memory."""
    zeros, f64 = types.UniTuple(types.float64, l + 1), types.float64

    @intrinsic
    def column_r(typingctx, zero, rx, ry, rz, address):
        def codegen(context, builder, signature, args):
            for n, value in emit_columns(builder, fields(builder, args[0], l + 1), args[1:4]):
                text = f"st.shared.f64 [$0+{8 * n}], $1;"
                call_asm(builder, ir.VoidType(), [args[4], value], text, "r,d", effects=True)
            return context.get_dummy_value()

        return types.void(zeros, f64, f64, f64, types.int32), codegen

    return column_r


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
                text = f"st.global.f64 [$0+{offset}], $1;"
                call_asm(builder, ir.VoidType(), [target, value], text, "l,d", effects=True)

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

        return types.void(types.int32, array, types.int64, types.int64), codegen

    return write_row


@cache
def make_low_quartet(bra_class, ket_class, pure, turned):
    """Intrinsic (zeros, rx, ry, rz, address, array, first, stride, place, add): one primitive quartet of a small class.

    Either class is (l_a, nctr_a, l_b, nctr_b). Everything is straight-line code on registers, structural zeros of H
    left out. H[ab, p] comes from shared memory at `address`, two doubles at a time; the n-th structural element of the
    lane's H[cd, q], ordered by q, from array[first + n stride] (offsets below 2^32 bytes). (ab|cd) goes to shared
    memory at `place`, cd running fastest (ab if `turned`), added to what is there if `add`; a few rows ab at a time, as
    many as the registers hold.
    """
    (la, ca, lb, cb), (lc, cc, ld, cd) = bra_class, ket_class
    l, bra, ket = la + lb + lc + ld, structure(la, lb, pure, ca, cb), structure(lc, ld, pure, cc, cd)
    nab, ncd = bra[-1][0] + 1, ket[-1][0] + 1
    by_q = sorted(ket, key=lambda element: element[::-1])
    p_words, q_words = packed_hermite(la + lb).tolist(), packed_hermite(lc + ld).tolist()
    zeros, batch = types.UniTuple(types.float64, l + 1), max(LOW_ROWS, LOW_TILE // ncd)

    def elements_of(builder, base, step, q):
        """[(cd, H[cd, q])] of the lane's structural elements at q."""
        values = []
        for n, (cd, this) in enumerate(by_q):
            if this == q:
                # the address inside: LLVM would keep hundreds of them for the next rows
                text = f"{{ .reg .u64 a; mad.wide.u32 a, $2, {n}, $1; ld.global.nc.f64 $0, [a]; }}"
                values.append((cd, call_asm(builder, DOUBLE, [base, step], text, "=d,l,r", effects=True)))
        return values

    def transform(builder, address, base, step, r, rows):
        acc, following = {}, elements_of(builder, base, step, 0)
        for q, word in enumerate(q_words):
            # those of the next q are on their way while this q is worked on
            elements, following = following, elements_of(builder, base, step, q + 1)
            abq = {}
            for n in range(0, len(bra), 2):
                if not any(row in rows for row, _ in bra[n : n + 2]):
                    continue
                # `effects`: read anew for every q rather than kept, for which there are no registers
                for (row, p), h in zip(bra[n : n + 2], load_block(builder, address, 8 * n)):
                    if row in rows:
                        abq[row] = multiply_add(builder, h, r[sum_ordinal(p_words[p], word)], abq.get(row))
            for cd, h in elements:
                for ab in rows:
                    acc[ab, cd] = multiply_add(builder, abq[ab], h, acc.get((ab, cd)))
        return acc

    @intrinsic
    def low_quartet(typingctx, zero, rx, ry, rz, address, array, first, stride, place, add):
        def codegen(context, builder, signature, args):
            r = emit_r(builder, fields(builder, args[0], l + 1), args[1:4])
            base = element_address(context, builder, signature.args[5], args[5], args[6])
            step = builder.trunc(builder.mul(args[7], I64(8)), I32)
            for start in range(0, nab, batch):
                rows = range(start, min(start + batch, nab))
                acc = transform(builder, args[4], base, step, r, rows)
                for (ab, cd), value in acc.items():
                    n = cd * nab + ab if turned else ab * ncd + cd
                    add_to_shared(builder, args[8], 8 * n, value, args[9])
            return context.get_dummy_value()

        f64 = types.float64
        return types.void(zeros, f64, f64, f64, types.int32, array, *[types.int64] * 2, *[types.int32] * 2), codegen

    return low_quartet


def add_to_shared(builder, address, offset, value, add):
    """Shared double at address + offset: `value`, plus what is there if `add`."""
    text = (
        f"{{ .reg .pred p; .reg .f64 old; setp.ne.s32 p, $2, 0; mov.f64 old, 0d0000000000000000; "
        f"@p ld.shared.f64 old, [$0+{offset}]; add.f64 old, old, $1; st.shared.f64 [$0+{offset}], old; }}"
    )
    call_asm(builder, ir.VoidType(), [address, value, add], text, "r,d,r", effects=True)


@cache
def make_pack(count):
    """Intrinsic local array -> tuple of its first `count` doubles."""
    kind = types.UniTuple(types.float64, count)

    @intrinsic
    def pack(typingctx, array):
        def codegen(context, builder, signature, args):
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            values = [builder.load(builder.gep(data, [I64(n)])) for n in range(count)]
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(array), codegen

    return pack
