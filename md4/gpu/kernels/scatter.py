"""Blocks (ij, kl, a, b, c, d) into AO tensors on the GPU; see `md4.method.scatter`."""

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I64, I64_2D, cuda, i64, jit_device, types
from md4.method import scatter

# Threads of a block, and most blocks of a launch.
THREADS, MOST_BLOCKS = 256, 1 << 20


def scatter_block(aosym):
    """Kernel factory: one thread an element, whatever the number of blocks."""
    element, threads, flag = scatter.make_scatter_element(aosym, jit_device), THREADS, types.boolean

    def kernel(
        block: F64, total: i64, bra: I64_2D, ket: I64_2D, ao_bra: I64_2D, ao_ket: I64_2D, dims: I64, same_pieces: flag,
        swap: flag, box: I64, out: F64,
    ):  # fmt: skip
        first = i64(cuda.blockIdx.x) * threads + cuda.threadIdx.x
        for n in range(first, total, i64(cuda.gridDim.x) * threads):
            element(n, block, bra, ket, ao_bra, ao_ket, dims, same_pieces, swap, box, out)

    return Kernel(kernel)


# launcher


def launch_scatter(context, aosym, block, total, places, dims, same_pieces, swap, box, out):
    """Scatters `total` elements; `places` are (bra pairs, ket pairs, their AO offsets), all on the device."""
    blocks = min(MOST_BLOCKS, -(-total // THREADS))
    args = (block, total, *places, dims, same_pieces, swap, box, out)
    context.launch(Variant(scatter_block, (aosym,)), blocks, THREADS, 0, *args)
