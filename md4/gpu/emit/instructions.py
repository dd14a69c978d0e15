"""Words of the device that all emitters use: loads, stores, asynchronous copies, shuffles, FP64 tensor instructions.

Functions of `Value` write instructions into the code that is being generated; intrinsics are what kernels call. LLVM's
own words stand where it has them. PTX is left where LLVM has none (copies that are asynchronous, tensor instructions,
predicates), for loads that have to stay where they are written, and for loads from shared memory: LLVM takes its own
loads for so much code that it does not unroll the loops in which [p|q] is gathered.
"""

from functools import cache
from itertools import pairwise

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.values import (
    DOUBLE,
    FLOAT,
    FP32,
    FP64,
    I32,
    I64,
    INT,
    OPEN,
    Value,
    call_function,
    fields,
    i32,
    i64,
    llvm_value,
    tuple_of,
    when,
    word,
)

BYTE = ir.IntType(8)
# LLVM's address spaces.
GLOBAL, SHARED = 1, 3


def call_asm(result, operands, text, constraints, effects=False):
    """Inline PTX; `effects` for anything that touches memory or must keep its place.

    `operands` are values; `result` is an LLVM type, None for nothing, or a list of types for a list of values.
    """
    if isinstance(result, list) and len(result) == 1:
        return [call_asm(result[0], operands, text, constraints, effects)]
    several, builder = isinstance(result, list), operands[0].builder
    kind = ir.LiteralStructType(result) if several else result or ir.VoidType()
    function = ir.FunctionType(kind, [o.llvm.type for o in operands])
    asm = ir.InlineAsm(function, text, constraints + (",~{memory}" if effects else ""), side_effect=effects)
    found = builder.call(asm, [o.llvm for o in operands])
    return fields(builder, found, len(result)) if several else Value(builder, found)


def statement(text):
    """Intrinsic that is one instruction of PTX without operands."""

    @intrinsic
    def instruction(typingctx):
        def codegen(context, builder, signature, args):
            asm = ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), text, "~{memory}", side_effect=True)
            builder.call(asm, [])
            return context.get_dummy_value()

        return types.void(), codegen

    return instruction


@cache
def make_empty(count, precision=FP64):
    """Intrinsic () -> tuple of `count` real numbers, all zero: an empty tile."""

    @word(tuple_of(precision, count))
    def empty():
        return [0.0] * count

    return empty


# addresses


@word(i32, OPEN)
def shared_address(array):
    """Address of a shared-memory array within the shared window, int32.

    PTX, which hides from LLVM that the address is a constant: it would unroll loops over rows in shared memory.
    """
    return call_asm(I32, [array.at()], "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }", "=r,l")


@word(i64, OPEN, i64)
def address_of(array, index):
    """Global address of array[index], int64."""
    return array.at(index)


def address_plus(address, step, n):
    """address + n step, `step` an i32, `n` another or a Python number: one instruction.

    PTX, as LLVM would compute parts of such addresses ahead of loops and keep them, for which there are no registers.
    """
    if isinstance(n, Value):
        return call_asm(I64, [step, n, address], "mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l")
    return call_asm(I64, [step, address], f"mad.wide.s32 $0, $1, {n}, $2;", "=l,r,l") if n else address


def pointer(address, offset, kind, space):
    """LLVM's pointer to an item of LLVM type `kind`, `offset` bytes after `address`.

    The offset is an index of the pointer: LLVM takes an addition for work, and then unrolls the loop around it less.
    """
    first = address.builder.inttoptr(address.llvm, ir.PointerType(BYTE, space))
    place = address.builder.gep(first, [I32(offset) if space == SHARED else I64(offset)], source_etype=BYTE)
    return address.builder.bitcast(place, ir.PointerType(kind, space))


# Loads and stores may be under a condition `live`, (an integer, a number): only where the integer is greater. PTX,
# since LLVM would branch around each of them, and they could not be under way together.


def condition(live, n):
    """(operand, its constraint, PTX that sets p) for a condition that is operand n."""
    value, least = live
    width = value.llvm.type.width
    return value, "l" if width == 64 else "r", f".reg .pred p; setp.gt.s{width} p, ${n}, {least};"


def load(space, address, offset=0, kind=FP64, count=1, live=None, effects=True):
    """A list of `count` successive numbers of a `Precision`, `offset` bytes after `address`, by an instruction of PTX.

    It stays where it is written if it has `effects`. Zeros where `live` does not hold. `space` 'global.nc' is global
    memory that no one writes meanwhile. 'volatile.shared' is not joined with another load, nor left out: ptxas would
    keep a number that it has read before, for which there may be no registers.
    """
    names, operands = [f"${n}" for n in range(count)], [address]
    vector, target = (f".v{count}", f"{{{', '.join(names)}}}") if count > 1 else ("", "$0")
    text = f"ld.{space}{vector}.{kind.ptx} {target}, [${count}+{offset}];"
    constraints = ["r" if "shared" in space else "l"]
    if live is not None:
        value, constraint, test = condition(live, count + 1)
        zeros = " ".join(f"mov.{kind.ptx} {name}, {kind.zero};" for name in names)
        text, operands, constraints = f"{{ {test} {zeros} @p {text} }}", [address, value], [*constraints, constraint]
    constraints = [f"={'&' if live else ''}{kind.letter}"] * count + constraints
    return call_asm([kind.llvm] * count, operands, text, ",".join(constraints), effects)


def shared_real(address, offset=0, precision=FP64):
    """The real number in shared memory `offset` bytes after `address`."""
    return load("shared", address, offset, precision)[0]


def shared_vector(address, offset=0, precision=FP64):
    """`precision.vector` successive real numbers of shared memory, by one instruction.

    PTX, as LLVM would keep them in registers rather than load them again, and there are none to spare.
    """
    return load("shared", address, offset, precision, precision.vector)


def shared_int(address):
    """The 32-bit number in shared memory at `address`."""
    return load("shared", address, kind=INT)[0]


def global_int(address, offset=0):
    """The 32-bit number in global memory `offset` bytes after `address`, which no one writes meanwhile.

    PTX, to be loaded where it is used: kept from one turn of a loop to the next, it would cost a register.
    """
    return load("global.nc", address, offset, INT)[0]


def load_if(address, live, precision=FP64, count=1, offset=0):
    """`count` real numbers of global memory that no one writes meanwhile, or zeros."""
    return load("global.nc", address, offset, precision, count, live, effects=False)


def global_after(address, step, n, precision):
    """The real number `n` unsigned steps after `address`, which no one writes meanwhile.

    PTX with the address inside: LLVM's loads take more registers, which addresses fill.
    """
    text = f"{{ .reg .u64 a; mad.wide.u32 a, $2, {n}, $1; ld.global.nc.{precision.ptx} $0, [a]; }}"
    return call_asm(precision.llvm, [address, step], text, f"={precision.letter},l,r", effects=True)


def global_number(address, offset=0, kind=FP64):
    """A number of global memory `offset` bytes after `address`, which no one writes meanwhile; LLVM may move it."""
    builder = address.builder
    value = builder.load(pointer(address, offset, kind.llvm, GLOBAL), align=kind.bytes, typ=kind.llvm)
    value.set_metadata("invariant.load", builder.module.add_metadata([]))
    return Value(builder, value)


def local_double(array, n):
    """The n-th double of a local array."""
    builder = array.data.builder
    return Value(builder, builder.load(builder.gep(array.data.llvm, [I64(n)])))


# stores and atomic additions


def store(address, values, offset=0, space=SHARED):
    """A number, or two doubles by one instruction, to shared or `GLOBAL` memory `offset` bytes after `address`."""
    builder, first = address.builder, llvm_value(DOUBLE, values[0])
    if len(values) == 1:
        builder.store(first, pointer(address, offset, first.type, space))
        return
    pair = ir.Constant(ir.VectorType(first.type, 2), ir.Undefined)
    for n, value in enumerate(values):
        pair = builder.insert_element(pair, llvm_value(first.type, value), I32(n))
    builder.store(pair, pointer(address, offset, pair.type, space), align=16)


def store_if(address, values, live, offset=0, space="global"):
    """One or two doubles to successive places."""
    value, constraint, test = condition(live, 1 + len(values))
    vector, numbers = ("", "$1") if len(values) == 1 else (".v2", "{$1, $2}")
    text = f"{{ {test} @p st.{space}{vector}.f64 [$0+{offset}], {numbers}; }}"
    constraints = ",".join(["r" if space == "shared" else "l", *["d"] * len(values), constraint])
    call_asm(None, [address, *values, value], text, constraints, effects=True)


def add_to_shared(address, offset, value, add, precision):
    """The shared real number at address + offset: `value`, plus what is there if `add`.

    In PTX, whose predicate leaves out the load; LLVM's branch around it takes more registers.
    """
    real, zero = precision.ptx, precision.zero
    text = (
        f"{{ .reg .pred p; .reg .{real} old; setp.ne.s32 p, $2, 0; mov.{real} old, {zero}; "
        f"@p ld.shared.{real} old, [$0+{offset}]; add.{real} old, old, $1; st.shared.{real} [$0+{offset}], old; }}"
    )
    call_asm(None, [address, value, add], text, f"r,{precision.letter},r", effects=True)


def add_double(address, value, offset=0):
    """Atomic addition of a real number to the double in global memory `offset` bytes after `address`."""
    operands = [pointer(address, offset, DOUBLE, GLOBAL), value.f64.llvm]
    call_function(value.builder, "llvm.nvvm.atomic.load.add.f64.p1f64", DOUBLE, operands)


def add_double_if(address, value, n, comparison, limit):
    """Atomic addition to the double in global memory at `address`, if `n` compares with `limit` in a certain way.

    The i32 `n` is to be less ('lt'), greater ('gt') or another number ('ne'). PTX, since LLVM would branch around each
    addition: code around it would be scheduled worse and take more registers.
    """
    text = f"{{ .reg .pred p; setp.{comparison}.s32 p, $2, {limit}; @p red.global.add.f64 [$0], $1; }}"
    call_asm(None, [address, value.f64, n], text, "l,d,r", effects=True)


def add_scaled(address, scale, value, offset=0, live=None):
    """Atomic addition to a sum in fixed point: a real number times a scale, rounded, to a 64-bit integer.

    The sum is in global memory `offset` bytes after `address`, and its scale, a double, as many after `scale`. `live`
    is (an i32, a comparison, a limit) as in `add_double_if`. If the scaled number is none, or above 2^62, which no
    scale allows, the scale becomes no number, and with it what is made of the sum.
    """
    operands, constraints = [address, scale, value.f64], "l,l,d"
    if live is None:
        test, where, bad = "", "", "setp.gtu.f64 q, y, 0d43D0000000000000;"
    else:
        n, comparison, limit = live
        operands, constraints, where = [*operands, n], f"{constraints},r", "@p "
        test = f".reg .pred p; setp.{comparison}.s32 p, $3, {limit};"
        bad = "setp.gtu.and.f64 q, y, 0d43D0000000000000, p;"
    text = (
        f"{{ {test} .reg .pred q; .reg .f64 x, y; .reg .s64 n; mov.f64 x, 0d0000000000000000; "
        f"{where}ld.global.f64 x, [$1+{offset}]; mul.f64 x, x, $2; cvt.rni.s64.f64 n, x; abs.f64 y, x; {bad} "
        f"@q st.global.f64 [$1+{offset}], 0d7FF8000000000000; {where}red.global.add.u64 [$0+{offset}], n; }}"
    )
    call_asm(None, operands, text, constraints, effects=True)


# asynchronous copies


def copy_async(to, source, live=None, to_offset=0, from_offset=0, filled=None, nbytes=16):
    """Starts a copy from global memory (i64) to shared memory (i32); all asynchronous copies are of it.

    Parameters
    ----------
    to, source : Value
        Addresses.
    live : (Value, int), optional
        Only under this condition.
    to_offset, from_offset : int
        Bytes after them.
    filled : Value, optional
        Of so many bytes (i32); the others are zeros.
    nbytes : {16, 8, 4}
    """
    operands = [to, source, *([] if filled is None else [filled])]
    constraints = ["r", "l", "r"][: len(operands)]
    size, cached = str(nbytes) if filled is None else f"{nbytes}, $2", "cg" if nbytes == 16 else "ca"
    text = f"cp.async.{cached}.shared.global [$0+{to_offset}], [$1+{from_offset}], {size};"
    if live is not None:
        value, constraint, test = condition(live, len(operands))
        text, operands, constraints = f"{{ {test} @p {text} }}", [*operands, value], [*constraints, constraint]
    call_asm(None, operands, text, ",".join(constraints), effects=True)


@cache
def make_copies(count, step, least=0):
    """Intrinsic (to, address, limit): the thread starts `count` copies of 16 bytes to shared memory.

    Copy n goes from the global address + n step to `to` + n step, for n < limit; the others do nothing. The limit is
    `least` or more.
    """

    @word(None, i32, i64, OPEN)
    def copies(to, source, limit):
        for n in range(count):
            copy_async(to, source, (limit, n) if n >= least else None, step * n, step * n)

    return copies


@word(None, i32, i64)
def copy_pair(to, source):
    """The thread starts to copy 16 bytes from a global address to shared memory."""
    copy_async(to, source)


@cache
def make_copy_number(nbytes):
    """Intrinsic (to, source): the thread starts to copy 4 or 8 bytes from a global address to shared memory."""

    @word(None, i32, i64)
    def copy_number(to, source):
        copy_async(to, source, nbytes=nbytes)

    return copy_number


@cache
def make_copy_rows(count, to_step):
    """Intrinsic (to, address, step, limit, filled): as `make_copies`, steps known when the kernel runs.

    Of each copy the first `filled` bytes, and zeros behind them.
    """

    @word(None, i32, i64, i64, OPEN, i32)
    def copy_rows(to, source, step, limit, filled):
        for n in range(count):
            copy_async(to, source, (limit, n), to_step * n, filled=filled)
            source = source + step

    return copy_rows


# Closes a group of asynchronous copies.
commit_copies = statement("cp.async.commit_group;")


@cache
def make_wait_copies(pending):
    """Intrinsic that waits until at most `pending` groups of copies are under way."""
    return statement(f"cp.async.wait_group {pending};")


@cache
def make_meet(threads):
    """Intrinsic (n): the `threads` threads of team n of the block, whole warps, wait for each other; n is below 15."""

    @word(None, i32)
    def meet(team):
        # Barrier 0 is that of the whole block. PTX, as LLVM's own word is for threads that come one by one.
        kind = ir.FunctionType(ir.VoidType(), [I32])
        asm = ir.InlineAsm(kind, f"bar.sync $0, {threads};", "r,~{memory}", side_effect=True)
        team.builder.call(asm, [(team + 1).llvm], attrs=("convergent",))

    return meet


# blocks of code


def new_block(value):
    """What follows is another basic block: LLVM takes more than linear time for one. `value` is any i32 at hand.

    A branch around nothing, whose condition PTX hides from LLVM; ptxas leaves it out.
    """
    hidden = call_asm(I32, [value], "mov.b32 $0, $1;", "=r,r", effects=True)
    with when(hidden < 0):
        call_asm(None, [hidden], "", "r", effects=True)


# lanes of a warp


def warp_barrier(value):
    """All lanes of the warp wait for each other, and see what each has written; `value` tells the code."""
    call_function(value.builder, "llvm.nvvm.bar.warp.sync", ir.VoidType(), [I32(-1)])


def shuffled(value, how, by):
    """The 32-bit integer, float or double of another lane: `how` and `by` are those of PTX's shfl."""
    builder, kind, by = value.builder, value.llvm.type, llvm_value(I32, by)

    def shuffle(half):
        return call_function(builder, f"llvm.nvvm.shfl.sync.{how}.i32", I32, [I32(-1), half, by, I32(31)])

    if kind == I32:
        return value.of(shuffle(value.llvm))
    if kind == FLOAT:
        return value.of(builder.bitcast(shuffle(builder.bitcast(value.llvm, I32)), FLOAT))
    halves = builder.bitcast(value.llvm, ir.VectorType(I32, 2))
    for n in range(2):
        halves = builder.insert_element(halves, shuffle(builder.extract_element(halves, I32(n))), I32(n))
    return value.of(builder.bitcast(halves, DOUBLE))


def reversed_bits(value):
    """A 32-bit integer with the order of its bits reversed."""
    return value.of(call_function(value.builder, "llvm.bitreverse.i32", I32, [value.llvm]))


# arithmetic


def approximate(name, x):
    """The device's approximation 'rcp' (1/x), 'rsqrt' (1/sqrt(x)) or 'ex2' (2^x); subnormal numbers count as 0."""
    return call_asm(FLOAT, [x], f"{name}.approx.ftz.f32 $0, $1;", "=f,f")


def one_where(n, m):
    """1 where the i32 `n` is the number `m`, else 0, as doubles."""
    text = f"{{ .reg .pred p; setp.eq.s32 p, $1, {m}; selp.f64 $0, 0d3FF0000000000000, {FP64.zero}, p; }}"
    return call_asm(DOUBLE, [n], text, "=d,r")


def chosen(yes, no, n):
    """The double `yes` if the i64 `n` is positive, else `no`; in PTX, so that LLVM does not see which."""
    return call_asm(DOUBLE, [yes, no, n], "{ .reg .pred p; setp.gt.s64 p, $3, 0; selp.f64 $0, $1, $2, p; }", "=d,d,d,l")


def mma(shape, c, a, b):
    """c += a b by one tensor instruction; accumulators may be Python numbers."""
    counts, names = (len(c), len(a), len(b), len(c)), []
    for n, count in enumerate(counts):
        first = sum(counts[:n])
        names.append("{" + ",".join(f"${m}" for m in range(first, first + count)) + "}")
    text = f"mma.sync.aligned.{shape}.row.col.f64.f64.f64.f64 {', '.join(names)};"
    operands = [*a, *b, *(b[0].of(b[0].operand(x)) for x in c)]
    return call_asm([DOUBLE] * len(c), operands, text, ",".join(["=d"] * len(c) + ["d"] * len(operands)))


def mma_16x8x8(c, a, b):
    """c += a b on one fragment, one instruction (compute capability 9.0)."""
    return mma("m16n8k8", c, a, b)


def mma_tf32(c, a, b):
    """c += a b on one fragment in TF32, sums in FP32, one instruction (from 8.0); a and b are 32-bit integers.

    TF32 is a float with 10 bits behind the point: of a and b the device reads no more.
    """
    ends = pairwise((0, 4, 8, 10, 14))
    names = ("{" + ",".join(f"${n}" for n in range(first, end)) + "}" for first, end in ends)
    text = f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {', '.join(names)};"
    sums = [b[0].of(llvm_value(FLOAT, x)) for x in c]
    return call_asm([FLOAT] * 4, [*a, *b, *sums], text, ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4))


def rounded_to_tf32(value):
    """32 bits: a real number rounded to TF32, halves away from zero, and 13 bits behind it that do not count."""
    value = value if value.llvm.type == FLOAT else value.narrowed(FP32)
    return value.bits + (1 << 12)


def in_tf32(value):
    """The float that TF32 reads of a real number, rounded."""
    return (rounded_to_tf32(value) & -(1 << 13)).float


def mma_8x8x4(c, a, b):
    """c += a b on 8 x 8, one instruction (compute capability 8.0)."""
    return mma("m8n8k4", c, [a], [b])


def mma_by_halves(c, a, b):
    """c += a b on one fragment as four instructions of half the rows and half the inner index (from 8.0)."""
    halves = []
    for row in range(2):
        half = c[2 * row : 2 * row + 2]
        for inner in range(2):
            half = mma_8x8x4(half, a[row + 2 * inner], b[inner])
        halves += half
    return halves
