"""Vectors of LANES doubles, which the compiled loops of the CPU use as numbers, and code that is generated with them.

A vector holds one number of LANES shell quartets, side by side. The intrinsics below are the operations that loops
need. They are one machine instruction each, where LLVM could not be relied on to find it.
"""

from contextlib import contextmanager
from functools import cache, wraps
from inspect import Parameter, Signature

from llvmlite import ir
from llvmlite.ir import IRBuilder
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic, models, register_model


def lanes_of_host():
    """Doubles in a vector register of the processor for which Numba compiles; at least 4, of which others make two.

    That may be an older processor than this one (`NUMBA_CPU_NAME`), for a cache that several machines share. Compiled
    code is kept under the features of the processor, so code with other lanes is never taken.
    """
    features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return 8 if "+avx512f" in features.split(",") else 4


LANES = lanes_of_host()
DOUBLE, I32, I64 = ir.DoubleType(), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(DOUBLE, LANES)


class Vector(types.Type):
    """Numba's type of LANES doubles in a register."""

    def __init__(self):
        super().__init__("Vector")


vector = Vector()
f64, i64 = types.float64, types.int64


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """A vector is a value of LLVM's vector type."""

    def __init__(self, manager, numba_type):
        super().__init__(manager, numba_type, VECTOR)


# Of arguments of a word that may be arrays of any type: it gets the pointer to the first element, or LLVM's structure.
ARRAY, TABLE = types.Dummy("array"), types.Dummy("table")


def word(result, *kinds):
    """Makes an intrinsic, which loops call, of a function (builder, *arguments) that writes code and returns a value.

    Parameters
    ----------
    result, *kinds : types of Numba
        Of what it returns, `types.void` for nothing, and of the arguments; `ARRAY` or `TABLE` for any array.
    """

    def declare(write):
        @wraps(write)
        def typed(typingctx, *given):
            def codegen(context, builder, signature, args):
                opened = list(args)
                for n, kind in enumerate(kinds):
                    if kind in (ARRAY, TABLE):
                        array = context.make_array(signature.args[n])(context, builder, args[n])
                        opened[n] = array if kind is TABLE else array.data
                made = write(builder, *opened)
                return context.get_dummy_value() if result is types.void else made

            taken = (of if kind in (ARRAY, TABLE) else kind for kind, of in zip(kinds, given, strict=True))
            return result(*taken), codegen

        # Numba asks for the names of arguments
        names = ["typingctx", *(f"arg{n}" for n in range(len(kinds)))]
        typed.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_ONLY) for name in names])
        return intrinsic(typed)

    return declare


# operations -----------------------------------------------------------------------------------------------------------


def all_lanes(builder, value):
    """A vector with `value` in all lanes."""
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))


def multiply_add(builder, a, b, c):
    """a b + c, fused where the processor can."""
    return call_on_vectors(builder, "fmuladd", a, b, c)


def call_on_vectors(builder, name, *vectors):
    """LLVM's function `name` of vectors, lane by lane."""
    name = f"llvm.{name}.v{LANES}f64"
    kind = ir.FunctionType(VECTOR, [VECTOR] * len(vectors))
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), vectors)


def load_at(builder, data, index):
    """The vector at data[index:]."""
    return builder.load(builder.bitcast(builder.gep(data, [index]), VECTOR.as_pointer()), align=8)


def store_at(builder, data, index, value):
    """data[index:] = value."""
    builder.store(value, builder.bitcast(builder.gep(data, [index]), VECTOR.as_pointer()), align=8)


# load(array, index) is the vector array[index : index + LANES] of a contiguous array.
load, store = word(vector, ARRAY, i64)(load_at), word(types.void, ARRAY, i64, vector)(store_at)
broadcast, fma = word(vector, f64)(all_lanes), word(vector, vector, vector, vector)(multiply_add)
subtract, multiply, divide = map(word(vector, vector, vector), (IRBuilder.fsub, IRBuilder.fmul, IRBuilder.fdiv))
negative = word(vector, vector)(IRBuilder.fneg)


@word(vector, ARRAY, i64, types.boolean)
def take(builder, data, index, by_lane):
    """The vector array[index : index + LANES] if `by_lane`, else a vector of equal numbers array[index]."""
    with builder.if_else(by_lane) as (then, otherwise):
        with then:
            vectors = load_at(builder, data, index)
            of_vectors = builder.block
        with otherwise:
            number = all_lanes(builder, builder.load(builder.gep(data, [index])))
            of_number = builder.block
    value = builder.phi(VECTOR)
    value.add_incoming(vectors, of_vectors)
    value.add_incoming(number, of_number)
    return value


@word(f64, vector)
def total(builder, value):
    """The sum of all lanes."""
    parts = [builder.extract_element(value, I32(lane)) for lane in range(LANES)]
    while len(parts) > 1:
        parts = [builder.fadd(a, b) for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]


@cache
def make_add_lanes(distance):
    """Intrinsic that adds to each lane the one whose number differs in the bit `distance`."""
    order = ir.Constant(ir.VectorType(I32, LANES), [lane ^ distance for lane in range(LANES)])
    return word(vector, vector)(lambda builder, value: builder.fadd(value, builder.shuffle_vector(value, value, order)))


@word(vector, vector)
def magnitude(builder, value):
    """The modulus."""
    return call_on_vectors(builder, "fabs", value)


@word(vector, vector, vector)
def noise_removed(builder, value, least):
    """The value; zero where its modulus is not above `least`."""
    above = builder.fcmp_unordered(">", call_on_vectors(builder, "fabs", value), least)
    return builder.select(above, value, ir.Constant(VECTOR, None))


def of_two_integers(condition):
    """The intrinsic of a where a `condition` b holds, else b. Each `min` of Numba is one more function to compile."""
    return word(i64, i64, i64)(lambda builder, a, b: builder.select(builder.icmp_signed(condition, a, b), a, b))


least, largest = of_two_integers("<"), of_two_integers(">")


# memory ---------------------------------------------------------------------------------------------------------------


def array_of(context, builder, element, data, count):
    """An array of `count` elements at a pointer, which nobody frees, while code is generated."""
    made = context.make_array(types.Array(element, 1, "C"))(context, builder)
    size = I64(context.get_abi_sizeof(context.get_data_type(element)))
    shape, strides = (cgutils.pack_array(builder, [n]) for n in (count, size))
    context.populate_array(made, data=data, shape=shape, strides=strides, itemsize=size, meminfo=None)
    return made._getvalue()


def array_at(element):
    """The intrinsic (address, count) -> array of `count` elements at an address, which nobody frees."""

    @intrinsic
    def array(typingctx, address, count):
        def codegen(context, builder, signature, args):
            data = builder.inttoptr(args[0], context.get_data_type(element).as_pointer())
            return array_of(context, builder, element, data, args[1])

        return types.Array(element, 1, "C")(i64, i64), codegen

    return array


doubles, integers, halves = array_at(types.float64), array_at(types.int64), array_at(types.int32)


def array_on_stack(element):
    """The intrinsic that makes an array of LANES elements, which lasts until the function returns."""

    @intrinsic
    def array(typingctx):
        def codegen(context, builder, signature, args):
            data = cgutils.alloca_once(builder, context.get_data_type(element), LANES)
            return array_of(context, builder, element, data, I64(LANES))

        return types.Array(element, 1, "C")(), codegen

    return array


lane_doubles, lane_integers, lane_halves = map(array_on_stack, (types.float64, types.int64, types.int32))


@intrinsic
def view(typingctx, array, first, count):
    """`count` elements of a contiguous array of any shape from `first` on; a slice is twice as much code."""

    def codegen(context, builder, signature, args):
        data = context.make_array(array)(context, builder, args[0]).data
        return array_of(context, builder, array.dtype, builder.gep(data, [args[1]]), args[2])

    return types.Array(array.dtype, 1, "C")(array, i64, i64), codegen


@word(i64, ARRAY)
def take_next(builder, counter):
    """counter[0] += 1 by one thread at a time; what it was before."""
    return builder.atomic_rmw("add", counter, I64(1), "monotonic")


# products -------------------------------------------------------------------------------------------------------------


@contextmanager
def walk(builder, first, last, other, step):
    """Code that is repeated for two pointers: from `first` to before `last`, and from `other` on by `step` elements.

    An index instead would take more of the few registers for addresses.
    """
    head, body, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    before = builder.block
    builder.branch(head)
    builder.position_at_end(head)
    here, there = builder.phi(first.type), builder.phi(other.type)
    builder.cbranch(builder.icmp_unsigned("!=", here, last), body, after)
    builder.position_at_end(body)
    yield here, there
    for pointer, start, by in ((here, first, 1), (there, other, step)):
        pointer.add_incoming(start, before)
        pointer.add_incoming(builder.gep(pointer, [I64(by)]), builder.block)
    builder.branch(head)
    builder.position_at_end(after)


@cache
def make_tile(height, width, by_lane):
    """Intrinsic that adds up one or two rows of H times `width` columns: the inner loop of steps 4 and 5.

        target[place + a[i] da + b[column + j] db:] (+)= sum_n h_in source[columns[column + j] + offsets[n]:]

    for i = row and, if `height` is 2, other; j < width and first <= n < last. The arguments are

        (h, place of h, offsets, first, last, below, source, columns, column, target, place, a, row, other, da, b, db,
         add)

    and all offsets count doubles. Both rows have the same columns: h_in is element `place of h` + n of h, or that after
    `below` further elements for the other row. The other row may be the same. An element is one number for all lanes,
    or, with `by_lane`, a vector. What the target holds is added to if `add`.
    """

    @word(
        types.void, ARRAY, i64, ARRAY, i64, i64, i64, ARRAY, ARRAY, i64, ARRAY, i64, ARRAY, i64, i64, i64, ARRAY, i64,
        types.boolean,
    )  # fmt: skip
    def tile(
        builder, h, h0, offsets, first, last, below, source, columns, column, target, place, a, row, other, da, b, db,
        more,
    ):  # fmt: skip
        def entry(array, at):
            return builder.sext(builder.load(builder.gep(array, [at])), I64)

        at_rows = [builder.add(place, builder.mul(entry(a, this), da)) for this in (row, other)[:height]]
        starts, cells = [], []
        for j in range(width):
            here = builder.add(column, I64(j))
            starts.append(builder.gep(source, [entry(columns, here)]))
            at_column = builder.mul(entry(b, here), db)
            for at in at_rows:
                zero = ir.Constant(VECTOR, None)
                cells.append((builder.add(at, at_column), cgutils.alloca_once_value(builder, zero)))
        sums = [cell for _, cell in cells]
        with builder.if_then(more):
            for at, cell in cells:
                builder.store(load_at(builder, target, at), cell)
        step = LANES if by_lane else 1
        below = builder.mul(below, I64(step))
        h = builder.gep(h, [builder.mul(builder.add(h0, first), I64(step))])
        ends = builder.gep(offsets, [first]), builder.gep(offsets, [last])
        with walk(builder, *ends, h, step) as (of_offset, of_h):
            factors = []
            for i in range(height):
                at = builder.gep(of_h, [builder.mul(below, I64(i))])
                factors.append(load_at(builder, at, I64(0)) if by_lane else all_lanes(builder, builder.load(at)))
            offset = builder.sext(builder.load(of_offset), I64)
            for j, start in enumerate(starts):
                value = load_at(builder, start, offset)
                for i, factor in enumerate(factors):
                    cell = sums[j * height + i]
                    builder.store(multiply_add(builder, factor, value, builder.load(cell)), cell)
        for at, cell in cells:
            store_at(builder, target, at, builder.load(cell))

    return tile


# formulas -------------------------------------------------------------------------------------------------------------


class Value:
    """A vector while code is generated: formulas of such values become instructions. Other operands are numbers."""

    def __init__(self, builder, value):
        self.builder, self.value = builder, value

    def of(self, value):
        """A `Value` of the same code."""
        return Value(self.builder, value)

    def operand(self, other):
        """LLVM's value of an operand: a `Value`, a number, or a double of LLVM's, which all lanes get."""
        if isinstance(other, Value):
            return other.value
        if isinstance(other, (int, float)):
            return ir.Constant(VECTOR, [float(other)] * LANES)
        return all_lanes(self.builder, other)

    def __add__(self, other):
        return self.of(self.builder.fadd(self.value, self.operand(other)))

    def __sub__(self, other):
        return self.of(self.builder.fsub(self.value, self.operand(other)))

    def __mul__(self, other):
        return self.of(self.builder.fmul(self.value, self.operand(other)))

    def __truediv__(self, other):
        return self.of(self.builder.fdiv(self.value, self.operand(other)))

    def __rtruediv__(self, other):
        return self.of(self.builder.fdiv(self.operand(other), self.value))

    __radd__, __rmul__ = __add__, __mul__

    def times_plus(self, factor, term):
        """self factor + term, fused where the processor can."""
        return self.of(multiply_add(self.builder, self.value, self.operand(factor), self.operand(term)))

    def function(self, name):
        """A function of LLVM's."""
        return self.of(call_on_vectors(self.builder, name, self.value))

    def above(self, limit):
        """Where it is larger than `limit`, for `choose` and `anywhere`."""
        return self.builder.fcmp_ordered(">", self.value, self.operand(limit))

    def choose(self, condition, otherwise):
        """This value in the lanes where a condition holds, in the others `otherwise`."""
        return self.of(self.builder.select(condition, self.value, self.operand(otherwise)))


def anywhere(builder, condition):
    """Whether a condition holds in any lane."""
    bits = builder.bitcast(condition, ir.IntType(LANES))
    return builder.icmp_unsigned("!=", bits, ir.Constant(ir.IntType(LANES), 0))


class Memory:
    """Vectors in memory, one after the other, while code is generated."""

    def __init__(self, builder, data):
        self.builder, self.data = builder, data

    def __getitem__(self, n):
        return Value(self.builder, load_at(self.builder, self.data, self.builder.mul(n, I64(LANES))))

    def __setitem__(self, n, value):
        store_at(self.builder, self.data, self.builder.mul(n, I64(LANES)), value.value)

    def from_here(self, n):
        """The vectors from the n-th on."""
        return Memory(self.builder, self.builder.gep(self.data, [self.builder.mul(n, I64(LANES))]))


@contextmanager
def loop(builder, first, last):
    """Code that is repeated for n = first, ..., last - 1."""
    with cgutils.for_range_slice(builder, first, last, I64(1), intp=I64) as (n, _):
        yield n


def table_entries(builder, array, rows, column):
    """table[row, column] of a C-contiguous table, while code is generated; each lane of `rows` is a whole number."""
    width = builder.extract_value(array.shape, 1)
    value, rows_of = ir.Constant(VECTOR, ir.Undefined), builder.fptosi(rows.value, ir.VectorType(I64, LANES))
    for lane in range(LANES):
        place = builder.add(builder.mul(builder.extract_element(rows_of, I32(lane)), width), column)
        number = builder.load(builder.gep(array.data, [place]))
        value = builder.insert_element(value, number, I32(lane))
    return rows.of(value)
