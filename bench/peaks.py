"""The two ceilings of the machine, measured in the same run: FP64 arithmetic and memory bandwidth.

On the GPU the arithmetic ceiling is a loop of matrix instructions on registers, 2 x 4 independent accumulators a warp;
the bandwidth is a device-to-device copy, bytes read plus bytes written. On the CPU, both of one core: a matrix product
and a copy.
"""

from functools import reduce
from operator import add
from time import perf_counter

import numpy as np
from clock import median_seconds

from md4.gpu.compile import Kernel
from md4.gpu.device_code import F64, cuda, types
from md4.gpu.emit.instructions import mma, mma_by_halves
from md4.gpu.emit.values import FP64, f64, fma, tuple_of, word

ROWS, COLUMNS = 2, 4
THREADS, STEPS, BLOCKS_PER_SM = 256, 4000, 4
# Doubles of a lane's operands of one fragment, and FLOP of one fragment's instructions in a warp.
OPERANDS = {"dmma16": (8, 4), "dmma8": (4, 2), "fma": (4, 4)}
FLOP = {"dmma16": 2 * 16 * 8 * 16, "dmma8": 2 * 16 * 8 * 8, "fma": 2 * 32 * 4}


def mma_16x8x16(c, a, b):
    """c += a b on one fragment, the widest instruction (compute capability 9.0)."""
    return mma("m16n8k16", c, a, b)


def multiply_adds(c, a, b):
    """Four multiply-adds a lane."""
    return [fma(x, y, z) for x, y, z in zip(a, b, c)]


INSTRUCTION = {"dmma16": mma_16x8x16, "dmma8": mma_by_halves, "fma": multiply_adds}


def make_powers(count):
    """Intrinsic (x, y) -> (x, x y, x y^2, ...): operands that are neither zero nor equal."""

    @word(tuple_of(FP64, count), f64, f64)
    def powers(x, y):
        values = [x]
        for _ in range(count - 1):
            values.append(values[-1] * y)
        return values

    return powers


def make_step(unit):
    """Intrinsic (acc, a, b) -> acc + a b on all ROWS x COLUMNS fragments."""
    na, nb = OPERANDS[unit]
    tile = tuple_of(FP64, 4 * ROWS * COLUMNS)

    @word(tile, tile, tuple_of(FP64, na * ROWS), tuple_of(FP64, nb * COLUMNS))
    def step(c, a, b):
        for i in range(ROWS):
            for j in range(COLUMNS):
                n = 4 * (i * COLUMNS + j)
                operands = a[na * i : na * (i + 1)], b[nb * j : nb * (j + 1)]
                c[n : n + 4] = INSTRUCTION[unit](c[n : n + 4], *operands)
        return c

    return step


def make_total(count):
    """Intrinsic tuple -> the sum of its members."""

    @word(f64, tuple_of(FP64, count))
    def total(values):
        return reduce(add, values)

    return total


def peak_kernel(unit):
    """Kernel factory: `steps` steps on registers; the sum keeps the compiler from dropping them."""
    na, nb = OPERANDS[unit]
    left, right = make_powers(na * ROWS), make_powers(nb * COLUMNS)
    zeros, step, total = make_powers(4 * ROWS * COLUMNS), make_step(unit), make_total(4 * ROWS * COLUMNS)

    def kernel(x: F64, steps: types.int64, out: F64):
        tid = cuda.threadIdx.x
        a, b = left(x[2 * tid], x[2 * tid + 1]), right(x[2 * tid + 1], x[2 * tid])
        acc = zeros(x[tid], 0.5)
        for _ in range(steps):
            acc = step(acc, a, b)
        out[types.int64(cuda.blockIdx.x) * THREADS + tid] = total(acc)

    return Kernel(kernel, (THREADS, 1))


def gpu_peak(backend, repeats=7):
    """FLOP/s of the arithmetic unit that the transforms use."""
    made = peak_kernel(backend.context.unit)
    kernel = cuda.jit(made.types(), **made.options())(made.function)
    blocks = BLOCKS_PER_SM * cuda.get_current_device().MULTIPROCESSOR_COUNT
    x = cuda.to_device(np.random.default_rng().uniform(0.5, 0.99, 2 * THREADS))
    out = cuda.device_array(blocks * THREADS)
    stream = backend.context.stream
    seconds, _ = median_seconds(backend, lambda: kernel[blocks, THREADS, stream](x, STEPS, out), repeats)
    if not np.isfinite(out.copy_to_host()).all():
        raise RuntimeError("the peak kernel made numbers that are not finite.")
    return FLOP[backend.context.unit] * ROWS * COLUMNS * (THREADS // 32) * blocks * STEPS / seconds


def gpu_bandwidth(backend, size=1 << 31, repeats=9):
    """Bytes per second of a device-to-device copy, read plus written, of random data."""
    chunk = np.random.default_rng().random(1 << 24)
    count = size // chunk.nbytes
    source, target = cuda.device_array(count * chunk.size), cuda.device_array(count * chunk.size)
    for n in range(count):
        source[n * chunk.size : (n + 1) * chunk.size].copy_to_device(chunk)
    seconds, _ = median_seconds(backend, lambda: target.copy_to_device(source, stream=backend.context.stream), repeats)
    return 2 * source.nbytes / seconds


def best(call, repeats=5):
    """Shortest wall time of a call."""
    times = []
    for _ in range(repeats):
        begin = perf_counter()
        call()
        times.append(perf_counter() - begin)
    return min(times)


def cpu_peaks():
    """(FLOP/s, bytes/s) of one core: a matrix product of 1024, and a copy of 256 MB."""
    rng = np.random.default_rng()
    a, b = rng.random((1024, 1024)), rng.random((1024, 1024))
    source = rng.random(1 << 25)
    target = np.empty_like(source)
    return 2 * 1024**3 / best(lambda: a @ b), 2 * source.nbytes / best(lambda: np.copyto(target, source))


def peaks(backend):
    """(FLOP/s, bytes/s) of the machine that a backend works on."""
    return cpu_peaks() if backend.name == "cpu" else (gpu_peak(backend), gpu_bandwidth(backend))
