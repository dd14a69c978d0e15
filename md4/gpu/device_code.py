"""What kernels are written with: Numba's words for device code, and the types of their arguments."""

from contextvars import ContextVar

from numba import cuda
from numba.cuda import types

__all__ = [
    "F32", "F32_2D", "F64", "F64_2D", "I32", "I64", "I64_2D", "cuda", "f32", "f64", "i32", "i64", "jit_device", "types",
    "u32", "u64",
]  # fmt: skip

i32, i64, u32, u64 = types.int32, types.int64, types.uint32, types.uint64
f32, f64 = types.float32, types.float64
F64, F64_2D = f64[::1], f64[:, ::1]
F32, F32_2D = f32[::1], f32[:, ::1]
I32 = i32[::1]
I64, I64_2D = i64[::1], i64[:, ::1]


make_device = cuda.jit(device=True)
# Whether factories are only asked for the parameters of a kernel.
describing = ContextVar("describing", default=False)


def jit_device(function):
    """A device function from plain Python, or the function itself where nobody will compile the kernel."""
    return function if describing.get() else make_device(function)  # which a compile worker replaces
