"""Linear algebra on a GPU by CuPy, that is cuBLAS and cuSOLVER, on the stream of md4."""

from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from md4.errors import DeviceError, MemoryLimitError
from md4.gpu.buffers import Buffer, as_buffer
from md4.gpu.kernels.grouped_rows import MOST_FACTORS8, Groups, launch_grouped_rows
from md4.gpu.kernels.half_transform import TILE, columns_at_once, launch_half_transform
from md4.gpu.kernels.pack import launch_pack
from md4.gpu.kernels.unpack import launch_unpack, parts_of_sums
from md4.gpu.pool import ITEM_BYTES
from md4.gpu.products import operand, whole_rows
from md4.gpu.staging import Staging
from md4.support.display import size_text
from md4.support.environment import way_to_cupy

# Rows that `LowerSolver` solves at once by the inverse of a diagonal block, and columns on which it works at a time.
SOLVED_ROWS, SOLVED_COLUMNS = 128, 1 << 16
# Numbers of a line of the cache.
LINE = 16
# One group without rows, for dry runs.
NO_GROUPS = Groups(Buffer(0, (2,), 4, None), *(Buffer(0, (0,), 4, None) for _ in range(3)))


def cupy_module():
    """CuPy; DeviceError with the remedy where it cannot be used."""
    try:
        import cupy
        import cupyx  # noqa: F401 it registers what the modules of CuPy need of each other
        from cupy.cuda import cublas, cusolver  # noqa: F401 wheels without the CUDA toolkit fail here

        if not hasattr(cupy.cuda.Stream, "from_external"):
            raise ImportError(f"CuPy {cupy.__version__} is older than 14")
    except Exception as error:  # an installation that does not fit the driver fails in many ways
        raise DeviceError(
            f"density fitting on a GPU needs CuPy with cuBLAS and cuSOLVER ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'}); {way_to_cupy()}. backend='cpu' works "
            "without."
        ) from error
    return cupy


def rehearse_rows(context, nao, count):
    """Asks for what `unpack`, `half_transform` and `add_groups` launch for so many AOs and orbitals, or fewer AOs.

    Without orbitals, rows may be chosen.
    """
    for rows in (None,) if count else (None, NO_GROUPS.rows):
        launch_unpack(context, None, (1, 1), None, None, (1, 1), rows=rows)
    if context.unit == "fma":
        return
    columns8 = columns_at_once(context, nao, count)
    if columns8 is not None:
        launch_half_transform(context, columns8, None, (1, 1), None, nao, None, None, count)
    for first in range(0, count, 8 * MOST_FACTORS8):
        factors8 = min(MOST_FACTORS8, -(-(count - first) // 8))
        launch_grouped_rows(context, None, (1, 1), NO_GROUPS, None, factors8, None, (1, 1), count)


def rehearse_pack(context):
    """Asks for what `pack` launches."""
    one = Buffer(0, (1,), ITEM_BYTES, None)
    launch_pack(context, one, (1, 1, 1), one, one, one)


class Handle:
    """A stream of md4 by the protocol of CUDA's libraries."""

    def __init__(self, stream):
        self.stream = stream

    def __cuda_stream__(self):
        return 0, int(self.stream.handle)


class DeviceAlgebra:
    """`md4.backends.Algebra` on a GPU; its arrays are CuPy arrays, work is asynchronous on the context's stream.

    All memory that CuPy asks for meanwhile is lent by md4's pool: the cap counts it, and it is used again in the order
    of the stream.

    Parameters
    ----------
    backend : md4.gpu.backend.GpuBackend
    """

    has_host_memory, block_bytes, chunk_bytes = True, 8 << 30, 2 << 30

    def __init__(self, backend):
        self.xp = cupy_module()
        from cupy.cuda import cublas, device

        self.cublas, self.handle_of_cublas = cublas, device.get_cublas_handle
        self.backend, self.context = backend, backend.context
        with self.context.lock:  # the device that is current is that of the stream for CuPy
            self.stream = self.xp.cuda.Stream.from_external(Handle(self.context.stream))
        self.copies, self.put, self.staging = None, None, Staging(self.xp, self.context.pool)

    @contextmanager
    def working(self):
        """Makes the device, the stream and md4's memory CuPy's current ones."""
        cuda = self.xp.cuda
        with cuda.Device(self.context.device), self.stream, cuda.using_allocator(self.allocated):
            yield

    def allocated(self, size):
        """Memory of md4's pool as CuPy takes it; it goes back when CuPy drops it."""
        cuda = self.xp.cuda
        buffer = self.context.pool.get(max(1, -(-size // ITEM_BYTES)))
        return cuda.MemoryPointer(cuda.UnownedMemory(buffer.pointer, size, buffer.owner), 0)

    # arrays

    def memory_left(self):
        """Bytes that may be allocated."""
        self.staging.forget_done()
        return self.backend.memory_left()

    def check_fits(self, need, what, remedy="raise max_memory"):
        """As the backend, once memory of copies that are done is free."""
        self.staging.forget_done()
        self.backend.check_fits(need, what, remedy)

    def held_bytes(self, nbytes):
        """What the pool lends for so many."""
        return self.backend.held_bytes(nbytes)

    def empty(self, shape):
        """An array in memory of the pool."""
        return self.xp.empty(shape)

    def send(self, array):
        """A copy on the device; of a large matrix by way of pinned memory."""
        if not self.staging.takes(array):
            return self.xp.asarray(array)
        return self.staging.send(array, self.empty(array.shape), self.stream)

    def wrapped(self, array):
        """A view of a device array of md4."""
        return self.xp.asarray(array)

    def fetch(self, array, out=None):
        """A copy on the host, which is complete."""
        return self.staging.fetched(array, self.stream, out)

    def later(self, array, out=None):
        """By the stream of copies, beside what the device does next."""
        copies = self.stream_of_copies()
        copies.wait_event(self.stream.record())
        return self.staging.later(array, copies, out)

    def taken(self, array):
        """By the link between the devices if there is one, on the stream of md4."""
        out = self.empty(array.shape)
        out.data.copy_from_device_async(array.data, array.nbytes, self.stream)
        return out

    def stream_of_copies(self):
        """A stream of CuPy's own, made when it is first needed."""
        if self.copies is None:
            self.copies = self.xp.cuda.Stream(non_blocking=True)
        return self.copies

    def host_table(self, shape):
        """Pinned memory: copies run at full speed beside the work of the device.

        It is not from CuPy's pool, which rounds sizes up to a power of two.
        """
        cuda, size, left = self.xp.cuda, 8 * int(np.prod(shape, dtype=object)), self.host_left()
        if size > left:
            raise MemoryLimitError(f"{size_text(size)} of host memory are needed, but {size_text(left)} may be used.")
        try:
            memory = cuda.PinnedMemoryPointer(cuda.PinnedMemory(max(1, size)), 0)
        except cuda.runtime.CUDARuntimeError as error:
            raise MemoryLimitError(
                f"the system does not give {size_text(size)} of pinned host memory ({error}); use store='direct'."
            ) from error
        return self.context.pool.watch(np.ndarray(shape, buffer=memory))

    def host_left(self):
        """Bytes of host memory that may be allocated; the cap counts these as well, whatever the device has free."""
        return self.staging.left()

    def put_columns(self, part, table, first):
        """Copies columns to a table on the host, by the stream of copies."""
        runtime = self.xp.cuda.runtime
        rows, columns = part.shape
        if rows * columns:
            copies = self.stream_of_copies()
            copies.wait_event(self.stream.record())
            runtime.memcpy2DAsync(
                table.ctypes.data + 8 * first, table.strides[0], part.data.ptr, part.strides[0], 8 * columns, rows,
                runtime.memcpyDeviceToHost, copies.ptr,
            )  # fmt: skip
            self.put = copies.record()

    def await_copies(self):
        """The stream of md4 waits; the host does not."""
        if self.put is not None:
            self.stream.wait_event(self.put)
            self.put = None

    def row_blocks(self, table, blocks):
        """Two buffers: while the device works with one, the other is filled by a stream of copies."""
        cuda, copies = self.xp.cuda, self.stream_of_copies()
        most = max((last - first for first, last in blocks), default=0)
        buffers = [self.empty((most, table.shape[1])) for _ in range(min(2, len(blocks)))]
        copied, used = [cuda.Event(disable_timing=True) for _ in buffers], [self.stream.record() for _ in buffers]

        def start(n):
            first, last = blocks[n]
            which = n % 2
            copies.wait_event(used[which])
            buffers[which][: last - first].set(table[first:last], stream=copies)
            copied[which].record(copies)

        try:
            for n in range(min(2, len(blocks))):
                start(n)
            for n, (first, last) in enumerate(blocks):
                self.stream.wait_event(copied[n % 2])
                yield first, buffers[n % 2][: last - first]
                used[n % 2] = self.stream.record()
                if n + 2 < len(blocks):
                    start(n + 2)
        finally:
            copies.synchronize()  # nothing may write to the buffers once they are given back

    def sorted_rows(self, array, places, out):
        """Rows in another order."""
        return self.xp.take(array, places, axis=0, out=out)

    def gather(self, table, columns, out):
        """Columns of each row."""
        return self.xp.take(table, columns, axis=1, out=out)

    def matrix_width(self, nao):
        """Rows of matrices begin at lines of the cache, so that warps write whole sectors."""
        return -(-nao // LINE) * LINE

    def unpack(self, table, places, out, rows=None):
        """Rows as symmetric matrices, by a kernel of md4."""
        nao, shape = out.shape[1], (len(table if rows is None else rows), table.shape[1])
        launch_unpack(
            self.context, as_buffer(table), shape, as_buffer(places), as_buffer(out), out.shape[1:],
            rows=None if rows is None else as_buffer(rows),
        )  # fmt: skip
        return out[:, :, :nao]

    def pack(self, squares, columns, weights, out, scales=None, row=None, add=False):
        """By a kernel of md4."""
        given = (None, None) if scales is None else (as_buffer(scales), as_buffer(row))
        launch_pack(
            self.context, as_buffer(squares), squares.shape, as_buffer(columns), as_buffer(weights), as_buffer(out),
            *given, add,
        )  # fmt: skip
        return out

    def unpack_and_sum(self, table, places, out, density):
        """As `unpack`, and the sums by the same kernel, whose warps each make parts of them."""
        nao = out.shape[1]
        part = self.empty((len(table), parts_of_sums(nao)))
        launch_unpack(
            self.context, as_buffer(table), table.shape, as_buffer(places), as_buffer(out), out.shape[1:],
            as_buffer(density), as_buffer(part),
        )  # fmt: skip
        return out[:, :, :nao], part.sum(axis=1)

    def half_transform(self, table, places, orbitals, out):
        """By a kernel of md4, which reads the table once."""
        xp, (nao, count) = self.xp, orbitals.shape
        columns8, tiles = columns_at_once(self.context, nao, count), -(-nao // TILE)
        side = tiles * TILE
        padded, factors = xp.full((side, side), 0, dtype=np.int32), xp.full((side, 8 * columns8), 0.0)
        padded[:nao, :nao], factors[:nao, :count] = places, orbitals
        below = self.send(np.stack(np.tril_indices(tiles)))
        of_tiles = self.empty((below.shape[1], TILE * TILE // 2)).view(np.int32).reshape(-1, TILE, TILE)
        of_tiles[...] = padded.reshape(tiles, TILE, tiles, TILE).transpose(0, 2, 1, 3)[below[0], below[1]]
        steps = [stride // ITEM_BYTES for stride in out.strides]
        length = 1 + sum((size - 1) * step for size, step in zip(out.shape, steps))
        launch_half_transform(
            self.context, columns8, as_buffer(table), table.shape,
            Buffer(of_tiles.data.ptr, (of_tiles.size,), 4, of_tiles), nao, as_buffer(factors),
            (Buffer(out.data.ptr, (length,), ITEM_BYTES, out), *steps), count,
        )  # fmt: skip
        return out

    def takes_rows(self, nao, count):
        """Where W of a row fits into shared memory, beside tiles."""
        return columns_at_once(self.context, nao, count) is not None

    @property
    def has_groups(self):
        """On tensor cores."""
        return self.context.unit != "fma"

    def add_groups(self, array, rows, factors, sources, targets, out):
        """By a kernel of md4."""
        xp, (nao, count) = self.xp, factors.shape
        begins = np.flatnonzero(np.diff(targets, prepend=-1))
        parts = np.append(begins, len(targets)), targets[begins], rows, sources
        edges = np.cumsum([0, *map(len, parts)]).tolist()
        sent = self.send(np.concatenate(parts).astype(np.int32))
        groups = Groups(*(Buffer(sent.data.ptr + 4 * at, (end - at,), 4, sent) for at, end in pairwise(edges)))
        steps = [stride // ITEM_BYTES for stride in out.strides[:2]]
        for first in range(0, count, 8 * MOST_FACTORS8):
            some = factors[:, first : first + 8 * MOST_FACTORS8]
            factors8 = -(-some.shape[1] // 8)
            padded = xp.full((nao, 8 * factors8), 0.0)
            padded[:, : some.shape[1]] = some
            launch_grouped_rows(
                self.context, as_buffer(array), (array.shape[1],) * 2, groups, as_buffer(padded), factors8,
                as_buffer(out).part(first * steps[1], (out.size - first * steps[1],)), steps, some.shape[1],
            )  # fmt: skip

    def sums_bytes(self, nao):
        """Parts of sums of a row."""
        return ITEM_BYTES * parts_of_sums(nao)

    def gather_to_host(self, table, columns, out):
        """As `gather`, and a copy to the host."""
        self.fetch(self.gather(table, columns, self.empty(out.shape)), out)

    # products and factorisations

    def product(self, a, b, out, factor=1.0, add=False):
        """By cuBLAS, which sees transposed arrays: out^T = b^T a^T. `whole_rows` may make it two products."""
        if operand(out).turned:
            raise ValueError("the rows of a product must be contiguous.")
        whole = whole_rows(out.shape)
        if whole < len(out):
            for rows in (slice(0, whole), slice(whole, None)):
                self.product(a[rows], b, out[rows], factor, add)
            return out
        if out.size and (a.shape[1] or not add):
            scales = np.array([factor, add], dtype=float)
            left, right, made = operand(a), operand(b), operand(out)
            self.cublas.dgemm(
                self.handle_of_cublas(), *self.operations(right, left), *out.shape[::-1], a.shape[1],
                scales.ctypes.data, right.pointer, right.step, left.pointer, left.step, scales[1:].ctypes.data,
                made.pointer, made.step,
            )  # fmt: skip
        return out

    def operations(self, *operands):
        """What cuBLAS calls them."""
        return [self.cublas.CUBLAS_OP_T if this.turned else self.cublas.CUBLAS_OP_N for this in operands]

    def add_times(self, matrix, vector, out):
        """By cuBLAS, which reads a matrix faster so than for a product of matrices."""
        if matrix.size:
            one, given = np.array(1.0), operand(matrix)
            shape = matrix.shape if given.turned else matrix.shape[::-1]
            self.cublas.dgemv(
                self.handle_of_cublas(), self.cublas.CUBLAS_OP_N if given.turned else self.cublas.CUBLAS_OP_T, *shape,
                one.ctypes.data, given.pointer, given.step, vector.data.ptr, 1, one.ctypes.data, out.data.ptr, 1,
            )  # fmt: skip
        return out

    def cholesky(self, matrix):
        """L, or None."""
        import cupyx

        try:
            with cupyx.errstate(linalg="raise"):
                return self.xp.ascontiguousarray(self.xp.linalg.cholesky(matrix))
        except np.linalg.LinAlgError:
            return None

    def eigh(self, matrix):
        """Eigenvalues and eigenvectors."""
        return self.xp.linalg.eigh(matrix)

    def svd(self, matrix):
        """Singular values and vectors."""
        return self.xp.linalg.svd(matrix, full_matrices=False)

    def lower_solver(self, lower):
        """Triangular equations by products."""
        return LowerSolver(self, lower)


class LowerSolver:
    """Solves equations of a lower triangular matrix L for many right-hand sides, in place.

    All is done by products. What the first half of the rows contributes to the second one is subtracted, and so on
    within the halves, down to diagonal blocks L_kk. Their inverses are made once. What an inverse makes of the
    right-hand side is corrected once, X_k += L_kk^-1 (A_k - L_kk X_k), so that X_k is as accurate as by substitution,
    also where L_kk is nearly singular.

    Parameters
    ----------
    algebra : DeviceAlgebra
    lower : array, shape (n, n)
    """

    def __init__(self, algebra, lower):
        self.algebra, self.lower, n = algebra, lower, len(lower)
        inverses, rows = algebra.empty((n, min(n, SOLVED_ROWS))), algebra.xp.arange(n)
        inverses[...] = 0.0
        inverses[rows, rows % SOLVED_ROWS] = 1.0
        blocks = [slice(first, min(first + SOLVED_ROWS, n)) for first in range(0, n, SOLVED_ROWS)]
        self.blocks = [
            (these, self.invert(lower[these, these], inverses[these, : these.stop - these.start])) for these in blocks
        ]

    def invert(self, block, inverse):
        """L_kk^-1 in place of the unit matrix, by cuBLAS, which sees transposed arrays: X^T L^T = 1."""
        one, given, made = np.array(1.0), operand(block), operand(inverse)
        handle, cublas = self.algebra.handle_of_cublas(), self.algebra.cublas
        cublas.dtrsm(
            handle, cublas.CUBLAS_SIDE_RIGHT, cublas.CUBLAS_FILL_MODE_UPPER, cublas.CUBLAS_OP_N,
            cublas.CUBLAS_DIAG_NON_UNIT, *inverse.shape, one.ctypes.data, given.pointer, given.step, made.pointer,
            made.step,
        )  # fmt: skip
        return inverse

    def __call__(self, array, transposed=False):
        """L^-1 or L^-T times `array`, shape (n, columns), which is overwritten and returned."""
        columns, rows = array.shape[1], min(len(array), SOLVED_ROWS)
        room = max(1, self.algebra.memory_left() // (2 * ITEM_BYTES * rows))
        pieces = max(1, -(-columns // min(SOLVED_COLUMNS, room)))
        step = max(1, -(-columns // pieces))
        work = self.algebra.empty((rows, step))
        for first in range(0, columns, step):
            self.solve(array[:, first : first + step], self.blocks, work, transposed)
        return array

    def solve(self, array, blocks, work, transposed):
        """The same of some columns, for rows of some blocks; `work` has room for one block."""
        if len(blocks) == 1:
            self.solve_block(array, *blocks[0], work, transposed)
            return
        halves = [blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]]
        before, after = (slice(half[0][0].start, half[-1][0].stop) for half in halves)
        factor = self.lower[after, before]
        if transposed:
            factor, before, after = factor.T, after, before
            halves.reverse()
        self.solve(array, halves[0], work, transposed)
        self.algebra.product(factor, array[before], array[after], -1.0, add=True)
        self.solve(array, halves[1], work, transposed)

    def solve_block(self, array, these, inverse, work, transposed):
        """The same for a diagonal block."""
        product, block = self.algebra.product, self.lower[these, these]
        if transposed:
            block, inverse = block.T, inverse.T
        right, solved = array[these], work[: len(inverse), : array.shape[1]]
        product(inverse, right, solved)
        product(block, solved, right, -1.0, add=True)
        right[...] = product(inverse, right, solved, add=True)
