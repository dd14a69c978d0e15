"""Words of the device that all emitters use: loads, stores, asynchronous copies, FP64 tensor instructions.

Functions that take a `builder` write instructions into the code that is being generated; intrinsics are what kernels
call. LLVM's own words stand where it has them. PTX is left where LLVM has none (copies that are asynchronous, tensor
instructions, predicates), for loads that have to stay where they are written, and for loads from shared memory: LLVM
takes its own loads for so much code that it does not unroll the loops in which [p|q] is gathered.
"""

from dataclasses import dataclass
from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

DOUBLE, I8, I32, I64 = ir.DoubleType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
FLOAT = ir.FloatType()
# LLVM's address space of global memory.
GLOBAL = 1


@dataclass(frozen=True, eq=False)
class Precision:
    """A type of real numbers, by the names that it has. Each is one object, which is a quick key.

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


def precision_of(single):
    """FP32 if `single`, else FP64."""
    return FP32 if single else FP64


def call_asm(builder, result, operands, text, constraints, effects=False, attributes=()):
    """Inline PTX; `effects` for anything that touches memory or must keep its place. `attributes` are LLVM's."""
    function = ir.FunctionType(result, [o.type for o in operands])
    constraints = ",".join(filter(None, (constraints, "~{memory}" if effects else "")))
    asm = ir.InlineAsm(function, text, constraints, side_effect=effects)
    return builder.call(asm, operands, attrs=attributes)


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
    """a b + c of doubles, or of floats, rounded once."""
    name = "llvm.fma.f64" if b.type == DOUBLE else "llvm.fma.f32"
    function = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(b.type, [b.type] * 3), name
    )
    return builder.call(function, [a, b, c])


def narrowed(builder, value, precision):
    """A double in a precision."""
    return value if precision is FP64 else builder.fptrunc(value, FLOAT)


def widened(builder, value):
    """A real number as a double."""
    return value if value.type == DOUBLE else builder.fpext(value, DOUBLE)


@cache
def make_empty(count, precision=FP64):
    """Intrinsic () -> tuple of `count` real numbers, all zero: an empty tile."""
    kind = types.UniTuple(precision.numba, count)

    @intrinsic
    def empty(typingctx):
        def codegen(context, builder, signature, args):
            return ir.Constant(context.get_value_type(kind), None)

        return kind(), codegen

    return empty


# addresses


def element_address(context, builder, array_type, array, index, size=8):
    """Global address of array[index] (1-D, contiguous, items of `size` bytes) as an i64."""
    data = context.make_array(array_type)(context, builder, array).data
    base = builder.ptrtoint(data, I64)
    return builder.add(base, builder.mul(builder.sext(index, I64) if index.type != I64 else index, I64(size)))


@intrinsic
def shared_address(typingctx, array):
    """Address of a shared-memory array within the shared window, int32.

    PTX, which hides from LLVM that the address is a constant: it would unroll loops over rows in shared memory.
    """

    def codegen(context, builder, signature, args):
        base = element_address(context, builder, signature.args[0], args[0], I64(0))
        text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
        return call_asm(builder, I32, [base], text, "=r,l")

    return types.int32(array), codegen


@intrinsic
def address_of(typingctx, array, index):
    """Global address of array[index], int64."""

    def codegen(context, builder, signature, args):
        return element_address(context, builder, signature.args[0], *args)

    return types.int64(array, types.int64), codegen


def global_pointer(builder, address, offset, kind):
    """A pointer to what global memory holds `offset` bytes after `address`, an item of LLVM type `kind`."""
    first = builder.inttoptr(address, ir.PointerType(I8, GLOBAL))
    return builder.bitcast(builder.gep(first, [I64(offset)], source_etype=I8), ir.PointerType(kind, GLOBAL))


# loads and stores


def global_pair(builder, address, offset):
    """Two successive doubles of global memory, `offset` bytes after `address`, which no one writes meanwhile."""
    kind, text = ir.LiteralStructType([DOUBLE] * 2), f"ld.global.nc.v2.f64 {{$0, $1}}, [$2+{offset}];"
    return fields(builder, call_asm(builder, kind, [address], text, "=d,=d,l"), 2)


def shared_real(builder, address, offset=0, precision=FP64):
    """The real number in shared memory `offset` bytes after `address`."""
    text, constraints = f"ld.shared.{precision.ptx} $0, [$1+{offset}];", f"={precision.letter},r"
    return call_asm(builder, precision.llvm, [address], text, constraints, effects=True)


def shared_double(builder, address, offset=0):
    """The double in shared memory `offset` bytes after `address`."""
    return shared_real(builder, address, offset)


def shared_vector(builder, address, offset, precision):
    """`precision.vector` successive real numbers of shared memory, by one instruction; see `load_block`."""
    count, letter = precision.vector, precision.letter
    names = ", ".join(f"${n}" for n in range(count))
    text = f"ld.shared.v{count}.{precision.ptx} {{{names}}}, [${count}+{offset}];"
    constraints, kind = ",".join([f"={letter}"] * count + ["r"]), ir.LiteralStructType([precision.llvm] * count)
    return fields(builder, call_asm(builder, kind, [address], text, constraints, effects=True), count)


def shared_int(builder, address):
    """The 32-bit number in shared memory at `address`."""
    return call_asm(builder, I32, [address], "ld.shared.b32 $0, [$1];", "=r,r", effects=True)


def load_block(builder, address, offset):
    """The lane's two doubles of an 8 x 8 block in shared memory, by one instruction.

    PTX, as LLVM would keep such a pair in registers rather than load it again, and there are none to spare.
    """
    return shared_vector(builder, address, offset, FP64)


def global_double(builder, address, offset=0):
    """The double in global memory `offset` bytes after `address`, which no one writes meanwhile."""
    return global_real(builder, address, offset, FP64)


def global_real(builder, address, offset, precision):
    """The same of a real number."""
    kind = precision.llvm
    value = builder.load(global_pointer(builder, address, offset, kind), align=precision.bytes, typ=kind)
    value.set_metadata("invariant.load", builder.module.add_metadata([]))
    return value


def global_int(builder, address, offset=0):
    """The 32-bit number in global memory `offset` bytes after `address`, which no one writes meanwhile.

    PTX, to be loaded where it is used: kept from one turn of a loop to the next, it would cost a register.
    """
    return call_asm(builder, I32, [address], f"ld.global.nc.s32 $0, [$1+{offset}];", "=r,l", effects=True)


def store_pair(builder, address, values):
    """16 bytes to global memory."""
    pair = ir.VectorType(DOUBLE, 2)(ir.Undefined)
    for n, value in enumerate(values):
        pair = builder.insert_element(pair, value, I32(n))
    builder.store(pair, global_pointer(builder, address, 0, pair.type), align=16)


def add_double(builder, address, value, offset=0):
    """Atomic addition to the double in global memory `offset` bytes after `address`."""
    target, name = global_pointer(builder, address, offset, DOUBLE), "llvm.nvvm.atomic.load.add.f64.p1f64"
    kind = ir.FunctionType(DOUBLE, [target.type, DOUBLE])
    builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), [target, value])


# Loads and stores under a condition `live`, (an integer, a number): only where the integer is greater. PTX, since LLVM
# would branch around each of them, and they could not be under way together.


def condition(live, n):
    """(operand, its constraint, PTX that sets p) for a condition that is operand n."""
    value, least = live
    width = value.type.width
    return value, "l" if width == 64 else "r", f".reg .pred p; setp.gt.s{width} p, ${n}, {least};"


def real_if(builder, address, live, precision):
    """The real number in global memory at `address`, which no one writes meanwhile, or 0."""
    value, constraint, test = condition(live, 2)
    text = f"{{ {test} mov.{precision.ptx} $0, {precision.zero}; @p ld.global.nc.{precision.ptx} $0, [$1+0]; }}"
    return call_asm(builder, precision.llvm, [address, value], text, f"=&{precision.letter},l,{constraint}")


def doubles_if(builder, address, live, count=1, offset=0, space="global.nc"):
    """`count` (1 or 2) successive doubles, or zeros; `space` 'global.nc' is global memory that no one writes."""
    shared, names = space == "shared", [f"${n}" for n in range(count)]
    value, constraint, test = condition(live, count + 1)
    zeros = " ".join(f"mov.f64 {name}, 0d0000000000000000;" for name in names)
    load = f"ld.{space}.f64 $0" if count == 1 else f"ld.{space}.v2.f64 {{{', '.join(names)}}}"
    text = f"{{ {test} {zeros} @p {load}, [${count}+{offset}]; }}"
    constraints = ",".join(["=&d"] * count + ["r" if shared else "l", constraint])
    kind = DOUBLE if count == 1 else ir.LiteralStructType([DOUBLE] * count)
    found = call_asm(builder, kind, [address, value], text, constraints, effects=space != "global.nc")
    return [found] if count == 1 else fields(builder, found, count)


def store_if(builder, address, values, live, offset=0, space="global"):
    """One or two doubles to successive places."""
    value, constraint, test = condition(live, 1 + len(values))
    numbers = "$1" if len(values) == 1 else "{$1, $2}"
    vector = "" if len(values) == 1 else ".v2"
    text = f"{{ {test} @p st.{space}{vector}.f64 [$0+{offset}], {numbers}; }}"
    constraints = ",".join(["r" if space == "shared" else "l", *["d"] * len(values), constraint])
    call_asm(builder, ir.VoidType(), [address, *values, value], text, constraints, effects=True)


# asynchronous copies


def copy_async(builder, to, source, to_offset=0, from_offset=0, size=16, filled=None, live=None):
    """Starts a copy of `size` bytes (8 or 16) from global memory to shared memory; all asynchronous copies are of it.

    Parameters
    ----------
    to, source : LLVM value
        Addresses in shared (i32) and in global memory (i64).
    to_offset, from_offset : int
        Bytes after them.
    filled : LLVM value, optional
        Of so many bytes (i32); the others are zeros.
    live : (LLVM value, int), optional
        Only under this condition.
    """
    level, operands, constraints = "cg" if size == 16 else "ca", [to, source], "r,l"
    text = f"cp.async.{level}.shared.global [$0+{to_offset}], [$1+{from_offset}], {size}"
    if filled is not None:
        text, constraints = f"{text}, ${len(operands)}", constraints + ",r"
        operands.append(filled)
    if live is not None:
        value, constraint, test = condition(live, len(operands))
        text, constraints = f"{{ {test} @p {text}; }}", f"{constraints},{constraint}"
        operands.append(value)
    call_asm(builder, ir.VoidType(), operands, text if live else text + ";", constraints, effects=True)


@cache
def make_copies(count, to_step, from_step, size=16):
    """Intrinsic (to, address, limit): the thread starts `count` copies of `size` bytes to shared memory.

    Copy n goes from the global address + n from_step to `to` + n to_step, for n < limit; the others do nothing.
    """

    @intrinsic
    def copies(typingctx, to, address, limit):
        def codegen(context, builder, signature, args):
            to, source, limit = args
            for n in range(count):
                copy_async(builder, to, source, to_step * n, from_step * n, size, live=(limit, n))
            return context.get_dummy_value()

        return types.void(types.int32, types.int64, limit), codegen

    return copies


@cache
def make_copy_rows(count, to_step):
    """Intrinsic (to, address, step, limit, filled): as `make_copies` of 16 bytes, steps known when the kernel runs.

    Of each copy the first `filled` bytes, and zeros behind them.
    """

    @intrinsic
    def copy_rows(typingctx, to, address, step, limit, filled):
        def codegen(context, builder, signature, args):
            to, source, step, limit, filled = args
            for n in range(count):
                copy_async(builder, to, source, to_step * n, filled=filled, live=(limit, n))
                source = builder.add(source, step)
            return context.get_dummy_value()

        return types.void(types.int32, types.int64, types.int64, limit, types.int32), codegen

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


# tensor instructions


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
