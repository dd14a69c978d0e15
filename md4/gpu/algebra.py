"""Linear algebra on a GPU by CuPy, that is cuBLAS and cuSOLVER, on the stream of md4."""

from contextlib import contextmanager

import numpy as np

from md4.errors import DeviceError, MemoryLimitError
from md4.gpu.pool import ITEM_BYTES, bucket
from md4.support.display import size_text
from md4.support.environment import way_to_cupy
from md4.support.memory import host_memory


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

    has_host_memory, block_bytes, chunk_bytes = True, 2 << 30, 2 << 30

    def __init__(self, backend):
        self.xp = cupy_module()
        self.backend, self.context = backend, backend.context
        self.stream = self.xp.cuda.Stream.from_external(Handle(self.context.stream))
        self.copies = None

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
        return self.backend.memory_left()

    def held_bytes(self, nbytes):
        """What the pool lends for so many."""
        return bucket(nbytes)

    def empty(self, shape):
        """An array in memory of the pool."""
        return self.xp.empty(shape)

    def send(self, array):
        """A copy on the device."""
        return self.xp.asarray(array)

    def wrapped(self, array):
        """A view of a device array of md4."""
        return self.xp.asarray(array)

    def fetch(self, array, out=None):
        """A copy on the host, which is complete."""
        found = array.get(stream=self.stream, out=out)
        self.stream.synchronize()
        return found

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
        pool = self.context.pool
        return host_memory() if pool.cap is None else min(host_memory(), pool.below_cap())

    def put_columns(self, part, table, first):
        """Copies columns to a table on the host."""
        runtime = self.xp.cuda.runtime
        rows, columns = part.shape
        if rows * columns:
            runtime.memcpy2DAsync(
                table.ctypes.data + 8 * first, table.strides[0], part.data.ptr, part.strides[0], 8 * columns, rows,
                runtime.memcpyDeviceToHost, self.stream.ptr,
            )  # fmt: skip
            self.stream.synchronize()  # `part` is used again

    def row_blocks(self, table, blocks):
        """Two buffers: while the device works with one, the other is filled by a stream of copies."""
        cuda = self.xp.cuda
        if self.copies is None:
            self.copies = cuda.Stream(non_blocking=True)
        most = max((last - first for first, last in blocks), default=0)
        buffers = [self.empty((most, table.shape[1])) for _ in range(min(2, len(blocks)))]
        copied, used = [cuda.Event(disable_timing=True) for _ in buffers], [self.stream.record() for _ in buffers]

        def start(n):
            first, last = blocks[n]
            which = n % 2
            self.copies.wait_event(used[which])
            buffers[which][: last - first].set(table[first:last], stream=self.copies)
            copied[which].record(self.copies)

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
            self.copies.synchronize()  # nothing may write to the buffers once they are given back

    def sorted_rows(self, array, places, out):
        """Rows in another order."""
        return self.xp.take(array, places, axis=0, out=out)

    def gather(self, table, columns, out):
        """Columns of each row."""
        return self.xp.take(table, columns, axis=1, out=out)

    def gather_to_host(self, table, columns, out):
        """As `gather`, and a copy to the host."""
        self.fetch(self.gather(table, columns, self.empty(out.shape)), out)

    # factorisations

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

    def solve_lower(self, lower, array, transposed=False):
        """Triangular equations by cuBLAS, in place."""
        from cupy.cuda import cublas, device

        # cuBLAS sees the transposed arrays: X^T L^T = A^T, or X^T L = A^T.
        rows, columns = array.shape
        one = np.array(1.0)
        cublas.dtrsm(
            device.get_cublas_handle(), cublas.CUBLAS_SIDE_RIGHT, cublas.CUBLAS_FILL_MODE_UPPER,
            cublas.CUBLAS_OP_T if transposed else cublas.CUBLAS_OP_N, cublas.CUBLAS_DIAG_NON_UNIT, columns, rows,
            one.ctypes.data, lower.data.ptr, rows, array.data.ptr, columns,
        )  # fmt: skip
        return array
