"""Numbers while code is generated, and how a function that writes code becomes a word of kernels.

This module and `md4.gpu.emit.instructions` alone know the compiler: llvmlite, Numba's intrinsics, PTX. All other
emitters compute with `Value` as if it was a number, by +, -, *, //, >>, <<, &, ^, <, >, `fma` and `select`.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

DOUBLE, FLOAT, I32, I64 = ir.DoubleType(), ir.FloatType(), ir.IntType(32), ir.IntType(64)
i32, i64, f64 = types.int32, types.int64, types.float64
# The type of an argument that is not declared, of arrays above all.
OPEN = None


@dataclass(frozen=True, eq=False)
class Precision:
    """A type of real numbers, or of integers, by the names that it has. Each is one object, which is a quick key.

    Attributes
    ----------
    llvm : llvmlite.ir.Type
    numba : numba.cuda.types.Float
    ptx : str
        Suffix of PTX's instructions.
    letter : str
        Of operands of inline PTX.
    zero : str
        0 in PTX.
    bytes : int
    vector : int
        Numbers that one load from shared memory takes, 16 bytes.
    """

    llvm: ir.Type
    numba: types.Float
    ptx: str
    letter: str
    zero: str
    bytes: int
    vector: int


FP64 = Precision(DOUBLE, types.float64, "f64", "d", "0d0000000000000000", 8, 2)
FP32 = Precision(FLOAT, types.float32, "f32", "f", "0f00000000", 4, 4)
INT = Precision(I32, types.int32, "s32", "r", "0", 4, 4)


def precision_of(single):
    """FP32 if `single`, else FP64."""
    return FP32 if single else FP64


def tuple_of(kind, count):
    """The type of `count` numbers that a thread keeps: of integers, or of real numbers of a `Precision`."""
    return types.UniTuple(kind.numba if isinstance(kind, Precision) else kind, count)


# values


class Value:
    """A number of the thread, or a condition, while code is generated: an operator writes an instruction.

    The other operand is a `Value` of the same type or a Python number. `//` and `>>` take integers as unsigned.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
    llvm : llvmlite.ir.Value
    """

    __slots__ = ("builder", "llvm")

    def __init__(self, builder, llvm):
        self.builder, self.llvm = builder, llvm

    def __bool__(self):
        raise TypeError("a value is not known while code is generated.")

    def of(self, llvm):
        """Another value of the same code."""
        return Value(self.builder, llvm)

    def operand(self, other):
        """LLVM's value of another operand."""
        return llvm_value(self.llvm.type, other)

    def apply(self, name, other):
        """The result of a method of LLVM's builder."""
        return self.of(getattr(self.builder, name)(self.llvm, self.operand(other)))

    def arithmetic(self, name, other):
        """As `apply`, by the method for real numbers if they are."""
        return self.apply(name if isinstance(self.llvm.type, ir.IntType) else f"f{name}", other)

    def compare(self, sign, other):
        """A condition."""
        integer = isinstance(self.llvm.type, ir.IntType)
        write = self.builder.icmp_signed if integer else self.builder.fcmp_ordered
        return self.of(write(sign, self.llvm, self.operand(other)))

    def __add__(self, other):
        return self.arithmetic("add", other)

    def __sub__(self, other):
        return self.arithmetic("sub", other)

    def __mul__(self, other):
        return self.arithmetic("mul", other)

    def __rmul__(self, number):
        return self * number

    def __neg__(self):
        """Of a real number, as a difference: NVVM has no instruction fneg on all architectures."""
        return self.of(self.operand(-0.0)) - self

    def __floordiv__(self, other):
        return self.apply("udiv", other)

    def __rshift__(self, other):
        return self.apply("lshr", other)

    def __lshift__(self, other):
        return self.apply("shl", other)

    def __and__(self, other):
        return self.apply("and_", other)

    def __xor__(self, other):
        return self.apply("xor", other)

    def __lt__(self, other):
        return self.compare("<", other)

    def __gt__(self, other):
        return self.compare(">", other)

    def __ge__(self, other):
        return self.compare(">=", other)

    def has(self, bits):
        """Whether an integer has any of some bits."""
        return (self & bits).compare("!=", 0)

    def shifted(self, bits):
        """A signed integer over 2^bits."""
        return self.apply("ashr", bits)

    @property
    def i32(self):
        """The lower half of a 64-bit integer."""
        return self.of(self.builder.trunc(self.llvm, I32))

    @property
    def i64(self):
        """A signed integer in 64 bits."""
        return self if self.llvm.type == I64 else self.of(self.builder.sext(self.llvm, I64))

    @property
    def u64(self):
        """An unsigned 32-bit integer in 64 bits."""
        return self.of(self.builder.zext(self.llvm, I64))

    @property
    def bits(self):
        """The 32 bits of a float as an integer."""
        return self.of(self.builder.bitcast(self.llvm, I32))

    @property
    def float(self):
        """The float that has the bits of a 32-bit integer."""
        return self.of(self.builder.bitcast(self.llvm, FLOAT))

    @property
    def f64(self):
        """A real number as a double."""
        return self if self.llvm.type == DOUBLE else self.of(self.builder.fpext(self.llvm, DOUBLE))

    def narrowed(self, precision):
        """A double in a precision."""
        return self if precision is FP64 else self.of(self.builder.fptrunc(self.llvm, FLOAT))


def llvm_value(kind, value):
    """LLVM's value, of a type, of a `Value` or of a Python number."""
    if isinstance(value, Value):
        return value.llvm
    if isinstance(kind, ir.IntType):
        return ir.Constant(kind, value)
    # LLVM writes a float as the double that it is equal to
    return ir.Constant(kind, float(np.float32(value) if kind == FLOAT else value))


def call_function(builder, name, result, operands):
    """The result of a function of LLVM's or NVVM's."""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), operands)


def fma(a, b, c):
    """a b + c of doubles, or of floats, rounded once; `b` is a `Value`."""
    kind = b.llvm.type
    name = "llvm.fma.f64" if kind == DOUBLE else "llvm.fma.f32"
    return b.of(call_function(b.builder, name, kind, [b.operand(x) for x in (a, b, c)]))


def multiply_add(a, b, c):
    """a b + c, contracted; a b where `c` is None."""
    product = a.of(a.builder.fmul(a.llvm, b.llvm, flags=["contract"]))
    return product if c is None else a.of(a.builder.fadd(product.llvm, c.llvm, flags=["contract"]))


def select(condition, yes, no):
    """`yes` where a condition holds, else `no`; one of them may be a Python number."""
    like = yes if isinstance(yes, Value) else no
    return like.of(condition.builder.select(condition.llvm, like.operand(yes), like.operand(no)))


# branches


@contextmanager
def when(condition):
    """Code for where a condition holds."""
    with condition.builder.if_then(condition.llvm):
        yield


def first_case(builder, cases):
    """The real numbers of the first of several cases whose condition holds.

    `cases` are functions (condition, numbers) that write code and return it; the condition of the last one is None.
    Python numbers may be among the doubles.
    """
    found, after = [], builder.append_basic_block()
    for condition, numbers in cases:
        if condition is not None:
            here, further = builder.append_basic_block(), builder.append_basic_block()
            builder.cbranch(condition().llvm, here, further)
            builder.position_at_end(here)
        found.append((numbers(), builder.block))
        builder.branch(after)
        if condition is not None:
            builder.position_at_end(further)
    builder.position_at_end(after)
    kinds = [next((x.llvm.type for x in same if isinstance(x, Value)), DOUBLE) for same in zip(*(v for v, _ in found))]
    merged = [builder.phi(kind) for kind in kinds]
    for values, block in found:
        for phi, value in zip(merged, values, strict=True):
            phi.add_incoming(llvm_value(phi.type, value), block)
    return [Value(builder, phi) for phi in merged]


def repeat(values, end, body):
    """What becomes of values by a loop of body(values), as long as the first of them, an integer, is below `end`.

    A Python number among the values is the first of a 32-bit integer's.
    """
    builder = end.builder
    before, (head, inside, after) = builder.block, (builder.append_basic_block() for _ in range(3))
    builder.branch(head)
    builder.position_at_end(head)
    phis = [builder.phi(value.llvm.type if isinstance(value, Value) else I32) for value in values]
    here = [Value(builder, phi) for phi in phis]
    builder.cbranch((here[0] < end).llvm, inside, after)
    builder.position_at_end(inside)
    for phi, first, value in zip(phis, values, body(here), strict=True):
        phi.add_incoming(llvm_value(phi.type, first), before)
        phi.add_incoming(value.llvm, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return here


# words


class Array:
    """A contiguous array of one dimension in global memory, or a local one, that a word is given."""

    def __init__(self, builder, data):
        self.data = Value(builder, data)

    def at(self, index=0, size=8):
        """Global address of an item of `size` bytes."""
        data = self.data.of(self.data.builder.ptrtoint(self.data.llvm, I64))
        return data + (index.i64 * size if isinstance(index, Value) else index * size)


def word(result, *kinds):
    """Makes an intrinsic, which kernels call, of a function that writes code.

    The function gets a `Value` for each argument, a list of them for a tuple, an `Array` for an array, and returns what
    the intrinsic does. Python numbers may be among the values that it returns.

    Parameters
    ----------
    result, *kinds : types of Numba
        Of what it returns, None for nothing, and of the arguments; `OPEN` ones are of the type that they are given.
    """
    returned = types.void if result is None else result

    def declare(write):
        @wraps(write)
        def typed(typingctx, *given):
            def codegen(context, builder, signature, args):
                opened = [argument(context, builder, kind, arg) for kind, arg in zip(signature.args, args)]
                return answer(context, builder, returned, write(*opened))

            return returned(*(of if kind is OPEN else kind for kind, of in zip(kinds, given, strict=True))), codegen

        # Numba asks for the names of arguments
        names = ["typingctx", *(f"arg{n}" for n in range(len(kinds)))]
        typed.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_ONLY) for name in names])
        return intrinsic(typed)

    return declare


def argument(context, builder, kind, value):
    """What a function that writes code gets for an argument."""
    if isinstance(kind, types.Array):
        return Array(builder, context.make_array(kind)(context, builder, value).data)
    if isinstance(kind, types.BaseTuple):
        return fields(builder, value, len(kind))
    return Value(builder, value)


def answer(context, builder, kind, values):
    """LLVM's value of what such a function returns."""
    if kind == types.void:
        return context.get_dummy_value()
    made = context.get_value_type(kind)
    if not isinstance(kind, types.BaseTuple):
        return llvm_value(made, values)
    whole, values = ir.Constant(made, ir.Undefined), list(values)
    assert len(values) == len(kind), f"{len(values)} values for {kind}"
    for n, value in enumerate(values):
        whole = builder.insert_value(whole, llvm_value(made.element, value), n)
    return whole


def fields(builder, value, count):
    """The members of an LLVM aggregate."""
    return [Value(builder, builder.extract_value(value, n)) for n in range(count)]
