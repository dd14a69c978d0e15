"""Code for J in the Hermite basis: r[p+q] of one primitive quartet times the Hermite densities of either side.

Intrinsics that are unrolled while code is generated. Densities and sums are those of `md4.method.hermite_coulomb` and
carry the sign (-1)^|q|. Of the bra, the sign is taken off when a density is read, and put on again when a sum is
written. The order of functions in a row is that of `md4.gpu.hermite_rows`.
"""

from functools import cache
from itertools import product

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.instructions import (
    FP64,
    I32,
    I64,
    add_double,
    aggregate,
    call_asm,
    element_address,
    fields,
    fma,
    narrowed,
    shared_double,
    widened,
)
from md4.gpu.emit.scalars import add_double_if
from md4.gpu.emit.unrolled import emit_by_axis, store_doubles
from md4.gpu.emit.warp_sums import emit_warp_place, emit_warp_sum
from md4.gpu.hermite_rows import r_numbers, row_parts, row_words
from md4.method.angular import hermite_ordinal, sum_ordinal

i32, i64, f64 = types.int32, types.int64, types.float64
# Numbers that a warp sums at once; see `md4.gpu.emit.warp_sums`.
LANES = 32
# The same where r is in shared memory, for want of registers.
FEW_SUMS = 16
# Functions p whose D_p are loaded together, and whose r[p+q] are where r is in shared memory: a multiple of 4.
ROWS = 4


def even_ranges(count, most):
    """Ranges that cover range(count), of at most `most` numbers each; all lengths but the last are even."""
    parts = max(1, -(-count // most))
    size = max(2, -(-count // parts) + 1 & ~1)
    return [range(n, min(n + size, count)) for n in range(0, count, size)]


def pieces(places, ranges):
    """The parts of a sequence of places that are at some ranges of it."""
    return [places[some.start : some.stop] for some in ranges]


def degree(word):
    """Degree of a packed Hermite triple."""
    return word >> 24


def minus(builder, value):
    """-value, as a difference: NVVM has no instruction fneg."""
    return builder.fsub(ir.Constant(value.type, -0.0), value)


def add_groups(builder, values, base, lane, limit):
    """Adds the sums of `values` over the warp to the first `limit` doubles at `base`; `lane` is an i32.

    The values are doubles or floats.
    """
    mine = emit_warp_place(builder, lane)
    for first in range(0, len(values), LANES):
        total = emit_warp_sum(builder, values[first : first + LANES], lane)
        place = builder.add(mine, I32(first))
        address = builder.add(base, builder.mul(builder.zext(place, I64), I64(8)))
        add_double_if(builder, address, widened(builder, total), place, "lt", limit)


def load_numbers(builder, address, offset, precision=FP64):
    """`precision.vector` real numbers of global memory that no one writes meanwhile.

    PTX, so that they are loaded where they are used: kept longer, they would take registers that are missing.
    """
    count = precision.vector
    names = ", ".join(f"${n}" for n in range(count))
    text = f"ld.global.nc.v{count}.{precision.ptx} {{{names}}}, [${count}+{offset}];"
    kind, constraints = ir.LiteralStructType([precision.llvm] * count), f"={precision.letter}," * count + "l"
    return fields(builder, call_asm(builder, kind, [address], text, constraints, effects=True), count)


def volatile_shared(builder, address, offset, precision):
    """The real number in shared memory `offset` bytes after `address`.

    Volatile, since ptxas would keep a number that it has read before, for which there are no registers.
    """
    text, constraints = f"ld.volatile.shared.{precision.ptx} $0, [$1+{offset}];", f"={precision.letter},r"
    return call_asm(builder, precision.llvm, [address], text, constraints, effects=True)


def load_places(builder, address, places, precision):
    """{place: number} of some places of a row at `address`, by loads of `precision.vector` numbers each.

    Of these numbers, all of which are there, the row begins with the first.
    """
    found, at_once = {}, precision.vector
    for first in sorted({place // at_once * at_once for place in places}):
        numbers = load_numbers(builder, address, precision.bytes * first, precision)
        found.update(zip(range(first, first + at_once), numbers))
    return {place: found[place] for place in places}


@cache
def make_load_row(places, precision):
    """Intrinsic (array, first) -> array[first + n] for the n of `places`; see `load_places`."""
    kind = types.UniTuple(precision.numba, len(places))

    @intrinsic
    def load_row(typingctx, array, first):
        def codegen(context, builder, signature, args):
            address = element_address(context, builder, signature.args[0], *args, precision.bytes)
            values = load_places(builder, address, places, precision).values()
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(array, i64), codegen

    return load_row


@cache
def make_add_row(places, precision):
    """Intrinsic (x, array, first): array[first + place] += x_n atomically for the n-th of `places`.

    x is in a precision, the array in FP64.
    """
    kind = types.UniTuple(precision.numba, len(places))

    @intrinsic
    def add_row(typingctx, x, array, first):
        def codegen(context, builder, signature, args):
            address = element_address(context, builder, signature.args[1], args[1], args[2])
            for place, value in zip(places, fields(builder, args[0], len(places))):
                add_double(builder, address, widened(builder, value), 8 * place)
            return context.get_dummy_value()

        return types.void(kind, array, i64), codegen

    return add_row


@cache
def make_quartet_sums(l_bra, l_ket, functions, precision=FP64, staged=False, mirrored=False):
    """Intrinsic (zeros, weight, rz, ry, rx, d_ket, j_ket, d, d_first, j, j_first, lane, stage) -> j_ket.

    A lane has one primitive quartet; the lanes of a warp share the bra primitive. `zeros` are its [0]^(0..L), `d_ket`
    and `j_ket` its D_q and J_q for the `functions` q, by their places; no others take part. D_p of the bra begins at
    d[d_first]. The sum over p of r[p+q] D_p is added to J_q. The sum of r[p+q] D_q over q and the warp is added to
    j[j_first:]. All of r is scaled by `weight`. R and j are doubles, all other real numbers are in `precision`. If
    `mirrored`, R_z is zero, and r[p+q] with it unless p and q have the same parity.

    r is in registers; or, if `staged`, in shared memory: the m-th of lane n at `stage` + (32 m + n) numbers, where
    `stage` is the lane's own address. From there each is loaded once for `ROWS` functions p and the q of a degree,
    which have most sums p + q in common.
    """
    l, nq, real, nbytes = l_bra + l_ket, len(functions), precision.numba, precision.bytes
    p_words, q_words = row_words(l_bra, mirrored).tolist(), row_words(l_ket, mirrored).tolist()
    orders, ket, places = types.UniTuple(real, l + 1), types.UniTuple(real, nq), r_numbers(l, mirrored)

    # functions p whose sums over the warp are made at once, and the q of each degree that go with them
    most, groups = FEW_SUMS if staged else LANES, []
    for of_p, of_q in zip(row_parts(l_bra, mirrored), row_parts(l_ket, mirrored)):
        mine = [q for q in functions if q in of_q]
        degrees = [[q for q in mine if degree(q_words[q]) == n] for n in range(l_ket + 1)]
        groups += [(group, degrees) for group in pieces(of_p, even_ranges(len(of_p), most)) if mine]

    def load_bra(builder, source, some):
        """{p: D_p without its sign} of some functions p."""
        found = load_places(builder, source, some, precision)
        return {p: minus(builder, value) if degree(p_words[p]) % 2 else value for p, value in found.items()}

    def numbers_of_quartet(builder, zeros, separation, stage):
        """A function t -> r[t], which loads it if it is staged."""
        r = emit_by_axis(builder, zeros, separation, mirrored)
        if not staged:
            return dict(r).__getitem__
        for t, value in r:
            store_doubles(builder, stage, [value], 32 * nbytes * places[t])
        return lambda t: volatile_shared(builder, stage, 32 * nbytes * places[t], precision)

    @intrinsic
    def quartet_sums(typingctx, zeros, weight, rz, ry, rx, d_ket, j_ket, d, d_first, j, j_first, lane, stage):
        def codegen(context, builder, signature, args):
            zeros = [builder.fmul(zero, args[1]) for zero in fields(builder, args[0], l + 1)]
            separation = [narrowed(builder, x, precision) for x in args[2:5]]
            number = numbers_of_quartet(builder, zeros, separation, args[12])
            d_q, j_q = (dict(zip(functions, fields(builder, x, nq))) for x in args[5:7])
            source = element_address(context, builder, signature.args[7], *args[7:9], nbytes)
            target = element_address(context, builder, signature.args[9], *args[9:11])
            lane = builder.trunc(args[11], I32)
            for group, degrees in groups:
                j_p = dict.fromkeys(group, ir.Constant(precision.llvm, 0.0))
                for n in range(0, len(group), ROWS):
                    d_p = load_bra(builder, source, group[n : n + ROWS])
                    for of_degree in degrees:
                        known = {}
                        for q, p in product(of_degree, group[n : n + ROWS]):
                            t = sum_ordinal(p_words[p], q_words[q])
                            value = known[t] if t in known else known.setdefault(t, number(t))
                            j_q[q] = fma(builder, value, d_p[p], j_q[q])
                            j_p[p] = fma(builder, value, d_q[q], j_p[p])
                sums = [minus(builder, j_p[p]) if degree(p_words[p]) % 2 else j_p[p] for p in group]
                add_groups(builder, sums, builder.add(target, I64(8 * group[0])), lane, len(group))
            return aggregate(builder, context.get_value_type(ket), j_q.values())

        return ket(orders, real, f64, f64, f64, ket, ket, d, i64, j, i64, i64, i32), codegen

    return quartet_sums


@cache
def make_load_words(count):
    """Intrinsic (words, first, last) -> words[min(first + 32 n, last)] for n < count, of an int32 array."""
    kind = types.UniTuple(i32, count)

    @intrinsic
    def load_words(typingctx, words, first, last):
        def codegen(context, builder, signature, args):
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            base, values = builder.ptrtoint(data, I64), []
            for n in range(count):
                place = builder.add(args[1], I64(32 * n))
                place = builder.select(builder.icmp_signed("<", place, args[2]), place, args[2])
                address = builder.add(base, builder.mul(place, I64(4)))
                word = builder.load(builder.inttoptr(address, ir.PointerType(I32, 1)), align=4, typ=I32)
                word.set_metadata("invariant.load", builder.module.add_metadata([]))
                values.append(word)
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(words, i64, i64), codegen

    return load_words


@cache
def make_signed(count):
    """Intrinsic (x, words) -> (-1)^|p| x_p."""
    kind, words = types.UniTuple(f64, count), types.UniTuple(i32, count)

    @intrinsic
    def signed(typingctx, x, places):
        def codegen(context, builder, signature, args):
            values = []
            for value, word in zip(fields(builder, args[0], count), fields(builder, args[1], count)):
                odd = builder.icmp_signed("!=", builder.and_(word, I32(1 << 24)), I32(0))
                values.append(builder.select(odd, minus(builder, value), value))
            return aggregate(builder, context.get_value_type(kind), values)

        return kind(kind, words), codegen

    return signed


class Walk:
    """Shared addresses of r[p + q] as q goes through its groups of one degree and one s, for one p.

    idx(p+q) = idx(p) + idx(q) + s_p s_q + l_p l_q (l_p + l_q + 2)/2, whose last term grows by
    l_p (l_p + 2 l_q + 3)/2 from l_q to l_q + 1.
    """

    def __init__(self, builder, start, word):
        self.builder = builder
        s, l = (builder.and_(builder.lshr(word, I32(bits)), I32(255)) for bits in (16, 24))
        ordinal = builder.and_(word, I32(65535))
        self.row = self.base = builder.add(start, builder.shl(ordinal, I32(3)))
        self.s_step, self.growth = (builder.shl(x, I32(3)) for x in (s, l))
        self.l_step = builder.shl(builder.mul(l, builder.add(l, I32(3))), I32(2))

    def next_s(self):
        self.row = self.builder.add(self.row, self.s_step)

    def next_degree(self):
        self.row = self.base = self.builder.add(self.base, self.l_step)
        self.l_step = self.builder.add(self.l_step, self.growth)


@cache
def make_correlate(l_ket, count, mirrored, parity):
    """Intrinsic (words, r, d, d_bra, j_bra, scale, j, first, lane) -> j_bra, for one primitive quartet of a warp.

    A lane has `count` functions p of the bra, by their packed words, and their D_p and J_p. r of the quartet is at the
    shared address `r`, D_q of the ket begins at d[first]. The sum over q of r[p+q] D_q is added to J_p. The sum of
    r[p+q] D_p over the warp's functions p, times `scale`, is added to j[first:]. If `mirrored`, all p and q are of one
    `parity`.
    """
    bra, words, part = types.UniTuple(f64, count), types.UniTuple(i32, count), row_parts(l_ket, mirrored)[parity]

    @intrinsic
    def correlate(typingctx, places, r, d, d_bra, j_bra, scale, j, first, lane):
        def codegen(context, builder, signature, args):
            walks = [Walk(builder, args[1], word) for word in fields(builder, args[0], count)]
            source = element_address(context, builder, signature.args[2], args[2], args[7])
            d_p, j_p = (fields(builder, x, count) for x in args[3:5])
            target = element_address(context, builder, signature.args[6], *args[6:8])
            lane, sums, pair, place = builder.trunc(args[8], I32), [], None, part.start
            for lq in range(l_ket + 1):
                for s in range(lq + 1):
                    for z in range(s + 1 if not mirrored or (lq - s) % 2 == parity else 0):
                        q = hermite_ordinal(lq - s, s - z, z)
                        if place % 2 == 0:
                            pair = load_numbers(builder, source, 8 * place)
                        total = None
                        for n, walk in enumerate(walks):
                            value = shared_double(builder, walk.row, 8 * q)
                            j_p[n] = fma(builder, value, pair[place % 2], j_p[n])
                            total = builder.fmul(value, d_p[n]) if n == 0 else fma(builder, value, d_p[n], total)
                        sums.append(builder.fmul(total, args[5]))
                        place += 1
                        if len(sums) == LANES or place == part.stop:
                            first = builder.add(target, I64(8 * (place - len(sums))))
                            add_groups(builder, sums, first, lane, len(sums))
                            sums = []
                    for walk in walks:
                        walk.next_s()
                for walk in walks:
                    walk.next_degree()
            return aggregate(builder, context.get_value_type(bra), j_p)

        return bra(words, i32, d, bra, bra, f64, j, i64, i64), codegen

    return correlate
