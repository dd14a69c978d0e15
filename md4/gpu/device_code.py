"""What kernels are written with: Numba's words for device code, and the types of their arguments."""

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


def jit_device(function):
    """A device function from plain Python."""
    return make_device(function)  # looked up here, since a compile worker replaces it
