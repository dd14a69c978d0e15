"""Steps 4 and 5 in plain multiply-adds: the readable baseline, and what runs where there are no FP64 tensor cores.

Same products as in `md4.gpu.kernels.two_products`, all of them, rows and inner indices in their own order. A block of
128 threads makes a tile of 32 rows and 32 columns, a thread 2 x 4 of it; operands of one inner block of 8 pass through
shared memory.
"""

from md4.gpu.compile import Kernel
from md4.gpu.device_code import F64, I32, I64, cuda, jit_device, types
from md4.gpu.h_layout import panel_inner, panel_row
from md4.method.angular import sum_ordinal

THREADS = 128
TILE_BLOCKS = 4  # blocks of 8 along either side of the tile
i64 = types.int64


def accumulate(a, b, c, row, column):
    """c[2, 4] += rows of a times columns of b over one inner block of 8 (device function)."""
    for p in range(8):
        for i in range(2):
            for j in range(4):
                c[i, j] += a[(row + i) * 8 + p] * b[(column + j) * 8 + p]


def plain_bra_transform():
    """Kernel factory for step 4."""
    add, ordinal = jit_device(accumulate), jit_device(sum_ordinal)
    row_of, inner_of = jit_device(panel_row), jit_device(panel_inner)

    def kernel(
        h, first_prim, start, first_pair, h_rows, r, r_stride, nket, pwords, qwords, np8, nq8, abq, nab, npair,
        row_blocks, column_blocks,
    ):  # fmt: skip
        a, b = cuda.shared.array(256, types.float64), cuda.shared.array(256, types.float64)
        c = cuda.local.array((2, 4), types.float64)
        for i in range(2):
            for j in range(4):
                c[i, j] = 0.0
        tid = i64(cuda.threadIdx.x)
        first_row, rest = i64(cuda.blockIdx.x) % row_blocks * 4, i64(cuda.blockIdx.x) // row_blocks
        first_column, pair = rest % column_blocks * 4, rest // column_blocks
        first, last = start[first_pair + pair], start[first_pair + pair + 1]
        row, column, ncol = tid // 8 * 2, tid % 8 * 4, nket * nq8
        for prim in range(first, last):
            for k in range(np8):
                for n in range(tid, 256, THREADS):
                    fragment = min(first_row // 2 + n // 128, h_rows // 2 - 1)
                    place = (n // 128 * 16 + row_of(n)) * 8 + inner_of(n)
                    a[place] = h[((prim * np8 + k) * (h_rows // 2) + fragment) * 128 + n % 128]
                    this = min(first_column + n // 64, ncol - 1)
                    q = qwords[this % nq8 * 8 + n // 8 % 8]
                    source = ((prim - first_prim) * nket + this // nq8) * r_stride
                    b[n] = r[source + ordinal(pwords[k * 8 + n % 8], q)]
                cuda.syncthreads()
                add(a, b, c, row, column)
                cuda.syncthreads()
        for i in range(2):
            for j in range(4):
                this, ab = first_column + (column + j) // 8, first_row * 8 + row + i
                if this < ncol and ab < nab:
                    abq[((this * npair + pair) * nab + ab) * 8 + (column + j) % 8] = c[i, j]

    signature = (F64, i64, I64, i64, i64, F64, i64, i64, I32, I32, i64, i64, F64, i64, i64, i64, i64)
    return Kernel(kernel, (THREADS, 1), signature)


def plain_ket_transform():
    """Kernel factory for step 5."""
    add, row_of, inner_of = jit_device(accumulate), jit_device(panel_row), jit_device(panel_inner)

    def kernel(
        h, first_prim, start, first_pair, h_rows, abq, npair, nq8, nab, ncd, out, out_first, s_ij, s_kl, s_ab, s_cd,
        row_blocks, column_blocks,
    ):  # fmt: skip
        a, b = cuda.shared.array(256, types.float64), cuda.shared.array(256, types.float64)
        c = cuda.local.array((2, 4), types.float64)
        for i in range(2):
            for j in range(4):
                c[i, j] = 0.0
        tid = i64(cuda.threadIdx.x)
        first_row, rest = i64(cuda.blockIdx.x) % row_blocks * 4, i64(cuda.blockIdx.x) // row_blocks
        first_column, pair = rest % column_blocks * 4, rest // column_blocks
        first, last = start[first_pair + pair], start[first_pair + pair + 1]
        row, column, ncol = tid // 8 * 2, tid % 8 * 4, npair * nab
        for step in range(first * nq8, last * nq8):
            for n in range(tid, 256, THREADS):
                fragment = min(first_row // 2 + n // 128, h_rows // 2 - 1)
                place = (n // 128 * 16 + row_of(n)) * 8 + inner_of(n)
                a[place] = h[(step * (h_rows // 2) + fragment) * 128 + n % 128]
                this = min(first_column * 8 + n // 8, ncol - 1)
                b[n] = abq[((step - first_prim * nq8) * ncol + this) * 8 + n % 8]
            cuda.syncthreads()
            add(a, b, c, row, column)
            cuda.syncthreads()
        for i in range(2):
            for j in range(4):
                this, cd = first_column * 8 + column + j, first_row * 8 + row + i
                if this < ncol and cd < ncd:
                    out[out_first + this // nab * s_ij + pair * s_kl + this % nab * s_ab + cd * s_cd] = c[i, j]

    signature = (F64, i64, I64, i64, i64, F64, *[i64] * 4, F64, *[i64] * 7)
    return Kernel(kernel, (THREADS, 1), signature)
