"""The leaf words of md4 for a second compiler, numba-cuda-mlir: are its kernels compiled from the same bodies?

    python bench/lab/mlir_words.py [FOLDER]

Compiles `plain` and the ring with m16n8k8 for sm_90, without a GPU, and prints seconds and lines; the PTX goes to the
folder. It stands in for `md4.gpu.emit.values`, and in `md4.gpu.emit.instructions` for what is not PTX text, as far as
these kernels need it. To be run where numba, numba-cuda-mlir and its CUDA toolkit are installed, but not numba-cuda;
md4 does not depend on it. What was seen is in LAB_NOTES.md, 'A second compiler'.
"""

import importlib
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from time import perf_counter
from types import ModuleType

import numba
from numba_cuda_mlir import cuda, tools
from numba_cuda_mlir._mlir import ir
from numba_cuda_mlir._mlir.dialects import arith, llvm, math, memref, scf
from numba_cuda_mlir.extending import intrinsic, lower_builtin, refresh_registries
from numba_cuda_mlir.numba_cuda import types

CAPABILITY = (9, 0)
# MLIR's types exist while code is generated only; these are their names.
DOUBLE, FLOAT, I32, I64 = "f64", "f32", "i32", "i64"
i32, i64, f64 = types.int32, types.int64, types.float64
OPEN = None
COMPARISONS = {"<": "lt", ">": "gt", ">=": "ge"}


@dataclass(frozen=True, eq=False)
class Precision:
    """As that of `md4.gpu.emit.values`."""

    llvm: str
    numba: object
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
    """The type of `count` numbers that a thread keeps."""
    return types.UniTuple(kind.numba if isinstance(kind, Precision) else kind, count)


class Value:
    """A number while code is generated: an operator writes an operation of MLIR."""

    def __init__(self, builder, value):
        self.builder, self.llvm = builder, value

    def of(self, value):
        return Value(self.builder, value)

    @property
    def is_integer(self):
        return isinstance(self.llvm.type, ir.IntegerType)

    def operand(self, other):
        return llvm_value(self.llvm.type, other)

    def apply(self, name, other):
        return self.of(getattr(arith, name)(self.llvm, self.operand(other)))

    def arithmetic(self, name, other):
        return self.apply(name + ("i" if self.is_integer else "f"), other)

    def compare(self, sign, other):
        """A condition, of signed integers or of real numbers."""
        if self.is_integer:
            predicate, write = getattr(arith.CmpIPredicate, f"s{COMPARISONS[sign]}"), arith.cmpi
        else:
            predicate, write = getattr(arith.CmpFPredicate, f"O{COMPARISONS[sign].upper()}"), arith.cmpf
        return self.of(write(predicate, self.llvm, self.operand(other)))

    def __add__(self, other):
        return self.arithmetic("add", other)

    def __sub__(self, other):
        return self.arithmetic("sub", other)

    def __mul__(self, other):
        return self.arithmetic("mul", other)

    __rmul__ = __mul__

    def __floordiv__(self, other):
        return self.apply("divui", other)

    def __rshift__(self, other):
        return self.apply("shrui", other)

    def __lshift__(self, other):
        return self.apply("shli", other)

    def __and__(self, other):
        return self.apply("andi", other)

    def __lt__(self, other):
        return self.compare("<", other)

    def __gt__(self, other):
        return self.compare(">", other)

    def __ge__(self, other):
        return self.compare(">=", other)

    @property
    def i32(self):
        return self.of(arith.trunci(kind_named(I32), self.llvm))

    @property
    def i64(self):
        return self if self.llvm.type.width == 64 else self.of(arith.extsi(kind_named(I64), self.llvm))

    @property
    def u64(self):
        return self.of(arith.extui(kind_named(I64), self.llvm))


def kind_named(name):
    """MLIR's type."""
    return ir.Type.parse(name)


def llvm_value(kind, value):
    """MLIR's value, of a type, of a `Value` or of a Python number."""
    kind = kind_named(kind) if isinstance(kind, str) else kind
    if isinstance(value, Value):
        return value.llvm
    return arith.constant(kind, value if isinstance(kind, ir.IntegerType) else float(value))


def fma(a, b, c):
    """a b + c, rounded once."""
    return b.of(math.fma(*(b.operand(x) for x in (a, b, c))))


def multiply_add(a, b, c):
    """a b + c, contracted; a b where `c` is None."""
    return a * b if c is None else fma(a, b, c)


def select(condition, yes, no):
    """`yes` where a condition holds, else `no`."""
    like = yes if isinstance(yes, Value) else no
    return like.of(arith.select(condition.llvm, like.operand(yes), like.operand(no)))


@contextmanager
def when(condition):
    """Code for where a condition holds."""
    branch = scf.IfOp(condition.llvm)
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.yield_([])


def first_case(builder, cases):
    """The doubles of the first of several cases whose condition holds: branches in branches."""
    (condition, numbers), *others = cases
    if condition is None:
        return numbers()
    # how many numbers there are is known once the first case is written, but a branch wants it before: they all count
    holds = condition()
    here = ir.InsertionPoint.current.block
    count = len(probe(here, numbers))
    branch = scf.IfOp(holds.llvm, [kind_named(DOUBLE)] * count, has_else=True)
    for block, write in ((branch.then_block, numbers), (branch.else_block, lambda: first_case(builder, others))):
        with ir.InsertionPoint(block):
            scf.yield_([llvm_value(DOUBLE, value) for value in write()])
    return [Value(builder, result) for result in branch.results_]


def probe(block, numbers):
    """What a case returns, by writing it for a condition that never holds, which the compiler drops."""
    never = arith.constant(ir.IntegerType.get_signless(1), 0)
    branch = scf.IfOp(never)
    with ir.InsertionPoint(branch.then_block):
        found = numbers()
        scf.yield_([])
    return found


def not_written(*_):
    """In place of words that these kernels do not use."""
    raise NotImplementedError


repeat = call_function = fields = not_written


class Array:
    """An array that a word is given."""

    def __init__(self, builder, value):
        self.builder, self.array = builder, value

    def at(self, index=0, size=8):
        """Address of an item of `size` bytes; of an array in shared memory, in the window of shared memory."""
        base = arith.index_cast(kind_named(I64), memref.extract_aligned_pointer_as_index(self.array))
        offset = arith.index_cast(kind_named(I64), memref.extract_strided_metadata(self.array)[1])
        address = Value(self.builder, base) + Value(self.builder, offset) * size
        return address + (index.i64 * size if isinstance(index, Value) else index * size)


def word(result, *kinds):
    """Makes an intrinsic of a function that writes code."""
    returned = types.void if result is None else result

    def declare(write):
        @wraps(write)
        def typed(typingctx, *given):
            declared = [of if kind is OPEN else kind for kind, of in zip(kinds, given, strict=True)]

            def codegen(builder, target, args, kwargs):
                answer = write(*(argument(builder, kind, builder.load_var(arg)) for kind, arg in zip(declared, args)))
                builder.store_var(target, answered(builder, returned, answer))

            return returned(*declared), codegen

        names = ["typingctx", *(f"arg{n}" for n in range(len(kinds)))]
        typed.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])
        return intrinsic(typed)

    return declare


def argument(builder, kind, value):
    """What a function that writes code gets for an argument."""
    if isinstance(kind, types.Array):
        return Array(builder, value)
    if isinstance(kind, types.BaseTuple):
        return [argument(builder, of, part) for of, part in zip(kind, value, strict=True)]
    return Value(builder, builder.mlir_convert(value, kind_named(name_of(kind))))


def name_of(kind):
    """MLIR's name of a number's type."""
    return f"{'f' if isinstance(kind, types.Float) else 'i'}{kind.bitwidth}"


def answered(builder, kind, values):
    """What the compiler keeps of what such a function returns."""
    if kind == types.void:
        return None
    if isinstance(kind, types.BaseTuple):
        return tuple(llvm_value(name_of(of), value) for of, value in zip(kind, values, strict=True))
    return llvm_value(name_of(kind), values)


def call_asm(result, operands, text, constraints, effects=False):
    """Inline PTX, as in `md4.gpu.emit.instructions`."""
    names = result if isinstance(result, list) else [result] * (result is not None)
    kind = f"!llvm.struct<({', '.join(names)})>" if len(names) > 1 else "".join(names)
    constraints += ",~{memory}" if effects else ""
    values = [operand.llvm for operand in operands]
    found = llvm.inline_asm(kind_named(kind) if kind else None, values, text, constraints, has_side_effects=effects)
    if len(names) > 1:
        parts = [llvm.extractvalue(kind_named(name), found, [n]) for n, name in enumerate(names)]
        return [Value(operands[0].builder, part) for part in parts]
    found = Value(operands[0].builder, found)
    return [found] if isinstance(result, list) else found


def statement(text):
    """Intrinsic that is one instruction of PTX without operands."""

    @intrinsic
    def instruction(typingctx):
        def codegen(builder, target, args, kwargs):
            llvm.inline_asm(None, [], text, "~{memory}", has_side_effects=True)
            builder.store_var(target, None)

        return types.void(), codegen

    return instruction


@word(i32, OPEN)
def shared_address(array):
    """Address of a shared-memory array within the shared window."""
    return array.at().i32


# the seam -------------------------------------------------------------------------------------------------------------


def install():
    """Puts this compiler in the place of numba-cuda, and these words in the place of md4's."""
    tools._cached_cc = CAPABILITY  # it asks for a device otherwise
    stand_in, extending = ModuleType("numba.cuda"), ModuleType("numba.cuda.extending")
    stand_in.types, stand_in.__path__, stand_in.extending, extending.intrinsic = types, [], extending, intrinsic
    numba.cuda = cuda
    sys.modules |= {"numba.cuda": stand_in, "numba.cuda.extending": extending}
    sys.modules["md4.gpu.emit.values"] = sys.modules[__name__]
    instructions = importlib.import_module("md4.gpu.emit.instructions")
    instructions.call_asm, instructions.statement, instructions.shared_address = call_asm, statement, shared_address
    instructions.commit_copies = statement("cp.async.commit_group;")
    importlib.import_module("md4.gpu.device_code").jit_device = jit_device


def named_tuple(builder, target, args, kwargs):
    """What a kernel makes by calling a class of named tuples, which this compiler does not know."""
    kinds = builder.get_numba_type(target.name).types
    values = [builder.load_var(arg) for arg in args]
    numbers = [isinstance(kind, types.Number) for kind in kinds]
    made = [
        builder.mlir_convert(value, kind_named(name_of(kind))) if number else value
        for value, kind, number in zip(values, kinds, numbers, strict=True)
    ]
    builder.store_var(target, tuple(made))


def jit_device(function):
    """A device function. The product of plain is inlined: its static shared memory is not found otherwise."""
    inline = "always" if function.__module__ == "md4.gpu.kernels.plain" else "never"
    return cuda.jit(device=True, inline=inline)(function)


def kernels():
    """{name: kernel} of plain, and of step 4 by the ring as a large class takes it; of step 5 see LAB_NOTES.md."""
    plain, ring = (importlib.import_module(f"md4.gpu.kernels.{name}") for name in ("plain", "two_products"))
    for module in map(importlib.import_module, ("md4.gpu.kernels.two_products", "md4.gpu.kernels.ring")):
        for made in vars(module).values():
            if isinstance(made, type) and issubclass(made, tuple):
                lower_builtin(made, types.VarArg(types.Any))(named_tuple)
    return {
        "plain_bra_transform": plain.plain_bra_transform(),
        "plain_ket_transform": plain.plain_ket_transform(),
        "bra_transform": ring.bra_transform(6, 6, 4, 3, "dmma16", False, 2),
    }


def main():
    """Compiles the kernels."""
    install()
    made = kernels()
    refresh_registries()  # intrinsics that were made since it was imported are not seen otherwise
    for name, kernel in made.items():
        begin = perf_counter()
        bounds = kernel.options().get("launch_bounds")
        ptx, _ = cuda.compile_ptx(kernel.function, kernel.types(), cc=CAPABILITY, launch_bounds=bounds)
        print(f"{name}: {perf_counter() - begin:.2f} s, {len(ptx.splitlines())} lines", flush=True)
        if len(sys.argv) > 1:
            Path(sys.argv[1], f"{name}.ptx").write_text(ptx)


if __name__ == "__main__":
    main()
