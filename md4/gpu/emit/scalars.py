"""Single numbers of a thread: loads, atomic additions, addresses and quotients of indices."""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.instructions import (
    I32,
    I64,
    add_double,
    call_asm,
    element_address,
    global_double,
    shared_double,
    widened,
)

i64, f64 = types.int64, types.float64


def add_double_if(builder, address, value, n, comparison, limit):
    """Atomic addition to the double in global memory at `address`, if `n` compares with `limit` in a certain way.

    The i32 `n` is to be less ('lt'), greater ('gt') or another number ('ne'). PTX, since LLVM would branch around each
    addition: code around it would be scheduled worse and take more registers.
    """
    text = f"{{ .reg .pred p; setp.{comparison}.s32 p, $2, {limit}; @p red.global.add.f64 [$0], $1; }}"
    call_asm(builder, ir.VoidType(), [address, value, n], text, "l,d,r", effects=True)


@intrinsic
def load_shared(typingctx, address):
    """The double at a shared address."""

    def codegen(context, builder, signature, args):
        return shared_double(builder, args[0])

    return f64(types.int32), codegen


@intrinsic
def load_global(typingctx, array, index):
    """array[index] of an array that no one writes meanwhile."""

    def codegen(context, builder, signature, args):
        address = element_address(context, builder, signature.args[0], *args)
        return global_double(builder, address)

    return f64(array, i64), codegen


@intrinsic
def add_global(typingctx, array, index, value):
    """array[index] += value, atomically; the value may be a float."""

    def codegen(context, builder, signature, args):
        address = element_address(context, builder, signature.args[0], *args[:2])
        add_double(builder, address, widened(builder, args[2]))
        return context.get_dummy_value()

    return types.void(array, i64, value if value == types.float32 else f64), codegen


@intrinsic
def add_at(typingctx, address, value):
    """Atomic addition to the double of global memory at an address."""

    def codegen(context, builder, signature, args):
        add_double(builder, *args)
        return context.get_dummy_value()

    return types.void(i64, f64), codegen


@intrinsic
def address_at(typingctx, address, index, stride):
    """address + index stride, of 32-bit numbers: one instruction.

    PTX, as LLVM would compute parts of such addresses ahead of loops and keep them, for which there are no registers.
    """

    def codegen(context, builder, signature, args):
        text = "mad.wide.s32 $0, $1, $2, $3;"
        return call_asm(builder, I64, [args[1], builder.trunc(args[2], I32), args[0]], text, "=l,r,r,l")

    return i64(i64, types.int32, i64), codegen


@intrinsic
def quotient(typingctx, n, by):
    """n // by of non-negative numbers below 2^31: in 64 bits the device divides by a long subroutine."""

    def codegen(context, builder, signature, args):
        return builder.zext(builder.udiv(*(builder.trunc(x, I32) for x in args)), I64)

    return i64(i64, i64), codegen
