"""Densities whose blocks of two shells are contiguous, as `md4.gpu.kernels.gamma_blocks` reads them.

It reads six small blocks for each shell quartet. As rows of D they would be as many cache lines as rows, and what a
multiprocessor can look up is one line in a cycle.
"""

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F32, F64, I64, cuda, f32, i64, u64
from md4.gpu.emit.scalars import quotient

THREADS = 128


def density_blocks():
    """Kernel factory: D of several terms, `nao` by `nao`, with the blocks of two shells one after the other.

    The blocks of a shell with each shell follow each other, and in each of them rows do. `first` and `count` are, of
    the shell of each AO, the first AO and the number of AOs. D is also written to `singles`, in FP32, unless it is
    empty. A block of threads takes a row of D.
    """

    def kernel(densities: F64, first: I64, count: I64, blocks: F64, singles: F32):
        nao, row, column = first.size, i64(cuda.blockIdx.x), i64(cuda.threadIdx.x)
        term = quotient(row, nao)
        i = row - term * nao
        f, n = first[i], count[i]
        begin = (term * nao + f) * nao
        while column < nao:
            of_column = u64(column)
            g, m = first[of_column], count[of_column]
            place, value = begin + n * g + (i - f) * m + column - g, densities[u64(row * nao + column)]
            blocks[u64(place)] = value
            if singles.size > 0:
                singles[u64(place)] = f32(value)
            column += THREADS

    return Kernel(kernel)


# launcher


def launch_density_blocks(context, densities, first, count, blocks, singles):
    """Buffers as those of the kernel."""
    rows = densities.size // max(1, first.size)
    if rows:
        context.launch(Variant(density_blocks, ()), rows, THREADS, 0, densities, first, count, blocks, singles)
