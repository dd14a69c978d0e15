"""Blocks (ij, kl, a, b, c, d) into AO tensors on the GPU; see `md4.method.scatter`."""

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I64, I64_2D, cuda, jit_device, types
from md4.gpu.tuning import SCATTER_THREADS
from md4.method import scatter


def scatter_block(aosym):
    """Kernel factory: one thread an element, whatever the number of blocks."""
    element = scatter.make_scatter_element(aosym, jit_device)

    def kernel(block, total, bra, ket, ao_bra, ao_ket, dims, same_pieces, swap, box, out):
        first = types.int64(cuda.blockIdx.x) * SCATTER_THREADS + cuda.threadIdx.x
        for n in range(first, total, types.int64(cuda.gridDim.x) * SCATTER_THREADS):
            element(n, block, bra, ket, ao_bra, ao_ket, dims, same_pieces, swap, box, out)

    i64 = types.int64
    flag = types.boolean
    return Kernel(kernel, signature=(F64, i64, I64_2D, I64_2D, I64_2D, I64_2D, I64, flag, flag, I64, F64))


# launcher

MAX_BLOCKS = 1 << 20


def scatter_variant(aosym):
    """Variant for a symmetry."""
    return Variant(scatter_block, (aosym,))


def launch_scatter(context, aosym, block, total, places, dims, same_pieces, swap, box, out):
    """Scatters `total` elements; `places` are (bra pairs, ket pairs, their AO offsets), all on the device."""
    blocks = min(MAX_BLOCKS, -(-total // SCATTER_THREADS))
    args = (block, total, *places, dims, same_pieces, swap, box, out)
    context.launch(scatter_variant(aosym), blocks, SCATTER_THREADS, 0, *args)
