"""Symmetric matrices as rows of pairs of AOs on the GPU, the reverse of `md4.gpu.kernels.unpack`: Gamma3."""

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I64, cuda, f64, i64, types
from md4.gpu.emit.scalars import quotient

THREADS = 256  # of a block
ROWS = 8  # rows of the result that a block makes
BLOCKS = 6  # blocks that a multiprocessor is to hold at once


def pack_rows():
    """Kernel factory: out[n, c] = weights[c] table[i, n, j] of the pair columns[c] = i nao + j, or j nao + i, i >= j.

    If there are `scales`, scales[n] row[c] is another term. With `add`, the sum is added to `out`. A thread has one c,
    and reads the numbers of all its rows before it writes them.
    """
    many = ROWS

    def kernel(
        table: F64, columns: I64, weights: F64, scales: F64, row: F64, count: i64, nao: i64, add: types.boolean,
        out: F64,
    ):  # fmt: skip
        width = columns.size
        pieces = quotient(width + THREADS - 1, i64(THREADS))
        part = quotient(i64(cuda.blockIdx.x), pieces)
        c, first = (i64(cuda.blockIdx.x) - part * pieces) * THREADS + i64(cuda.threadIdx.x), part * many
        if c >= width:
            return
        i = columns[c] // nao
        j, value, last = columns[c] - i * nao, cuda.local.array(many, f64), count - 1
        source, weight = max(i, j) * count * nao + min(i, j), weights[c]
        more = row[c] if scales.size > 0 else 0.0
        for k in range(many):
            value[k] = weight * table[source + min(first + k, last) * nao]
        if scales.size > 0:
            for k in range(many):
                value[k] += scales[min(first + k, last)] * more
        if add:
            for k in range(many):
                value[k] += out[min(first + k, last) * width + c]
        for k in range(many):
            if first + k < count:
                out[(first + k) * width + c] = value[k]

    return Kernel(kernel, launch_bounds=(THREADS, BLOCKS))


# launcher


def launch_pack(context, table, shape, columns, weights, out, scales=None, row=None, add=False):
    """Rows of a `table` of `shape`, (nao, rows, nao), whose numbers with i >= j are read, all in device memory."""
    nao, count, _ = shape
    blocks = -(-count // ROWS) * -(-columns.size // THREADS)
    if blocks:
        none = weights.part(0, (0,))
        given = (none, weights) if scales is None else (scales, row)
        context.launch(
            Variant(pack_rows, ()), blocks, THREADS, 0, table, columns, weights, *given, count, nao, add, out,
        )  # fmt: skip
