"""K with a derivative on the first function (`md4.gpu.derivative_matrices`): what H of derivatives makes of W.

    K^x_il += sum_{p,j} H^{A_x}[ij, p] W[p, j, l]

W is that of `md4.gpu.kernels.half_exchange`. A block of threads takes rows (x, i) of a shell i and 32 l, and its warps
go through the bra pairs that have i, each through some of them. The order of the sums is fixed.
"""

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I64, cuda, f64, i64
from md4.gpu.emit.instructions import load
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.values import FP64, OPEN, fma, tuple_of, word
from md4.gpu.kernels.half_exchange import HalfExchange, Members
from md4.gpu.tiles import blocks_of_8

THREADS = 128
WARPS = THREADS // 32
DERIVED = 8  # rows (x, i) of a block of threads


@word(tuple_of(FP64, 8), OPEN, i64)
def load_eight(array, first):
    """array[first + n] for n < 8, which no one writes meanwhile; `first` is even."""
    address = array.at(first)
    return [number for n in range(0, 8, 2) for number in load("global.nc", address, 8 * n, count=2, effects=False)]


@word(f64, tuple_of(FP64, 8), tuple_of(FP64, 8), f64)
def add_products(x, y, total):
    """total + x . y"""
    for one, other in zip(x, y):
        total = fma(one, other, total)
    return total


def exchange_derivatives():
    """Kernel factory; all sizes are run-time numbers.

    H is that of derivatives by A, or by B if `by_b` is 1, and then i is the second shell.
    """
    warps, many = WARPS, DERIVED

    def kernel(
        start: I64, na: i64, nb: i64, shells: Members, h: F64, rows8: i64, by_b: i64, w: HalfExchange, row_parts: i64,
        k: F64,
    ):  # fmt: skip
        sums, rows = cuda.local.array(many, f64), cuda.local.array(many, i64)
        of_warps, tid = cuda.shared.array((warps, many, 32), f64), i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        nao, steps, blocks = w.nao, w.width >> 3, (w.nao + 31) >> 5
        rest = quotient(i64(cuda.blockIdx.x), blocks)
        l = (i64(cuda.blockIdx.x) - rest * blocks) * 32 + lane
        shell = quotient(rest, row_parts)
        first_row, n, end = (rest - shell * row_parts) * many, shells.first[shell], shells.first[shell + 1]
        # where a shell may be both of a pair, both have as many functions
        ni = na if shells.members[n] & 1 == 0 else nb
        if first_row >= 3 * ni:
            return
        n, l_here = n + warp, min(l, nao - 1)
        # from one i and one j to the next in rows of H, how many j there are, and their first place among functions
        step_i, step_j, nj, first_j = nb, i64(1), nb, na
        if by_b == 1:
            step_i, step_j, nj, first_j = i64(1), nb, na, i64(0)
        for m in range(many):
            row, sums[m] = min(first_row + m, 3 * ni - 1), 0.0
            x = quotient(row, ni)
            rows[m] = x * na * nb + (row - x * ni) * step_i
        while n < end:
            code = shells.members[n]
            n += warps
            if code & 1 != by_b:
                continue
            for prim in range(start[code >> 1], start[(code >> 1) + 1]):
                for j in range(nj):
                    source = ((prim * w.functions + first_j + j) * nao + l_here) * w.width
                    for step in range(steps):
                        value, of_h = load_eight(w.numbers, source + 8 * step), (prim * steps + step) * rows8 * 64
                        for m in range(many):
                            row = of_h + 8 * (rows[m] + j * step_j)
                            sums[m] = add_products(load_eight(h, row), value, sums[m])
        for m in range(many):
            of_warps[warp, m, lane] = sums[m]
        cuda.syncthreads()
        for m in range(warp, many, warps):
            row, total = first_row + m, 0.0
            if row < 3 * ni and l < nao:
                for other in range(warps):
                    total += of_warps[other, m, lane]
                x = quotient(row, ni)
                k[(x * nao + shells.own[shell] + row - x * ni) * nao + l] += total

    return Kernel(kernel, (THREADS, 4))


# launcher


def launch_exchange_derivatives(context, ab, shells, h, by_b, w, k):
    """Adds what W of a whole list gives to K, shape (3, nao, nao), by derivatives by A, or by B if `by_b`.

    `shells`: its fields of `Members`; `h`: H of these derivatives in the form `md4.gpu.h_layout.KET_STEPS`.
    """
    facts, row_parts = ab.facts, -(-3 * max(ab.facts.na, ab.facts.nb) // DERIVED)
    context.launch(
        Variant(exchange_derivatives, ()), -(-w[3] // 32) * row_parts * (shells[0].size - 1), THREADS, 0,
        ab.data.start, facts.na, facts.nb, shells, h, blocks_of_8(3 * facts.nab), int(by_b), w, row_parts, k,
    )  # fmt: skip
