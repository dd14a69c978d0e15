"""Densities in single precision, for the quartets that are computed in it."""

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F32, F64, cuda, i64, types
from md4.gpu.tuning import FEWEST_BLOCKS

THREADS = 256


def narrowed():
    """Kernel factory: out[n] = values[n] for all n."""

    def kernel(values: F64, out: F32):
        n = i64(cuda.blockIdx.x) * THREADS + i64(cuda.threadIdx.x)
        while n < values.size:
            out[n] = types.float32(values[n])
            n += i64(cuda.gridDim.x) * THREADS

    return Kernel(kernel)


# launcher


def launch_narrow(context, values, out):
    """A buffer of doubles to one of floats of the same size, which may be 0."""
    if values.size:
        blocks = min(-(-values.size // THREADS), 4 * FEWEST_BLOCKS)
        context.launch(Variant(narrowed, ()), blocks, THREADS, 0, values, out)
