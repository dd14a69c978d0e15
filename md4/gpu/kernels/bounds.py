"""Bounds of Schwarz on the GPU: R_ab of shell pairs from their own integrals (ab|ab); see `md4.shells.schwarz`."""

import math

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, cuda, i64, jit_device
from md4.shells.schwarz import larger

# Warps of a block of threads, one for each pair.
WARPS = 8


def pair_bounds():
    """Kernel factory: R_ab of the pairs of a block of a list with itself, a warp each."""
    larger_of = jit_device(larger)

    def kernel(block: F64, npair: i64, na: i64, nb: i64, out: F64):
        lane, pair = i64(cuda.threadIdx.x) & 31, i64(cuda.blockIdx.x) * WARPS + (i64(cuda.threadIdx.x) >> 5)
        if pair < npair:
            nab, best = na * nb, 0.0
            first = pair * (npair + 1) * nab * nab
            for n in range(lane, na + nb, 32):  # the functions a of the diagonal (ab|ab), then the functions b
                place, step, count = (n * nb, i64(1), nb) if n < na else (n - na, nb, na)
                total = 0.0
                for k in range(count):
                    value = block[first + (place + k * step) * (nab + 1)]
                    total += 0.0 if value < 0.0 else value  # NaN stays
                best = larger_of(best, total)
            other = 16
            while other > 0:
                best = larger_of(best, cuda.shfl_xor_sync(-1, best, other))
                other >>= 1
            if lane == 0:
                out[pair] = math.sqrt(best)

    return Kernel(kernel)


# launcher


def launch_bounds(context, block, out):
    """R_ab of a block of a list with itself into `out`, shape (npair,)."""
    npair, _, na, nb = block.dims[:4]
    context.launch(Variant(pair_bounds, ()), -(-npair // WARPS), 32 * WARPS, 0, block.array, npair, na, nb, out)
