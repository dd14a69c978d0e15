"""What takes blocks of integrals on the device: AO tensors, and sums of J and K."""

from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numba import cuda

from md4.cpu.targets import HostTensor
from md4.errors import ArgumentError
from md4.gpu.buffers import as_buffer, copy_to_host
from md4.gpu.kernels.digestion import launch_digest
from md4.gpu.kernels.scatter import launch_scatter


class DeviceTensor:
    """An AO tensor in device memory, filled block by block; copied to `host` at the end if there is one."""

    def __init__(self, backend, aosym, box, array, host):
        self.backend, self.aosym, self.box, self.array, self.host = backend, aosym, box, array, host
        self.flat = as_buffer(array)

    def scatter(self, block, bra, ket, basis, same_pieces, swap):
        context = self.backend.context
        pool, stream = context.pool, context.stream
        ao_loc, dims = basis.ao_loc, np.array(block.dims)
        tables = [bra.pairs, ket.pairs, ao_loc[bra.pairs], ao_loc[ket.pairs], dims, self.box]
        buffer, (*places, dims, box) = pool.upload(tables, stream)
        launch_scatter(
            context, self.aosym, block.array, prod(block.dims), places, dims, same_pieces, swap, box, self.flat
        )
        pool.release(buffer)
        pool.release(block.array)

    def result(self):
        if self.host is None:
            return self.array
        self.array.copy_to_host(self.host, stream=self.backend.context.stream)
        self.backend.context.stream.synchronize()
        return self.host


class StagedTensor(HostTensor):
    """An AO tensor in host memory that the device has no room for: blocks are fetched and placed by the CPU."""

    def __init__(self, backend, aosym, box, out):
        super().__init__(aosym, box, out)
        self.backend = backend

    def scatter(self, block, *args):
        host = np.empty(block.dims)
        copy_to_host(host, block.array.pointer, self.backend.context.stream)
        self.backend.context.pool.release(block.array)
        super().scatter(host, *args)


class DeviceDigest:
    """X and Y of `md4.method.digestion` in device memory, summed block by block.

    Parameters
    ----------
    densities, twice : ndarray, shape (n, nao, nao)
        As `md4.cpu.targets.HostDigest`.
    """

    def __init__(self, backend, densities, twice):
        self.backend, self.nao, self.shapes = backend, densities.shape[-1], (densities.shape, twice.shape)
        zeros = [np.zeros_like(densities), np.zeros_like(twice)]
        self.buffer, parts = backend.context.pool.upload([densities, twice, *zeros], backend.context.stream)
        self.densities, self.twice, self.x, self.y = (p.part(0, (p.shape[0], self.nao**2)) for p in parts)

    def add(self, block, bra, ket, basis, triangle):
        """Digests one block, and forgets it; `bra` and `ket` are slices of prepared lists, of one if `triangle`."""
        places = [self.backend.first_aos(side.whole, basis) for side in (bra, ket)]
        x, y = (m.part(0, (m.size,)) for m in (self.x, self.y))
        launch_digest(
            self.backend.context, block, bra, ket, places, triangle, self.densities, x, self.twice, y, self.nao
        )
        self.backend.context.pool.release(block.array)

    def result(self):
        """(X, Y) on the host."""
        host = [np.empty(shape) for shape in self.shapes]
        for array, matrices in zip(host, (self.x, self.y)):
            copy_to_host(array, matrices.pointer, self.backend.context.stream)
        self.backend.context.pool.release(self.buffer)
        return host


@dataclass(frozen=True)
class DeviceBlock:
    """Integrals (ij, kl, ab, cd) in device memory: flat buffer, first element, strides in elements."""

    array: object
    first: int
    strides: tuple
    dims: tuple

    @classmethod
    def contiguous(cls, array, dims):
        """A block of six indices `dims` in C order."""
        _, nkl, na, nb, nc, nd = dims
        nab, ncd = na * nb, nc * nd
        return cls(array, 0, (nkl * nab * ncd, nab * ncd, ncd, 1), tuple(dims))

    def swapped(self):
        """The same with bra and ket exchanged."""
        ij, kl, ab, cd = self.strides
        return replace(self, strides=(kl, ij, cd, ab))

    def __getitem__(self, key):
        ij, kl = key
        return replace(self, first=self.first + ij.start * self.strides[0] + kl.start * self.strides[1])


def checked_device_array(out, shape):
    """`out` as a Numba device array; ArgumentError unless it is C-contiguous float64 of `shape` on a device."""
    if not hasattr(out, "__cuda_array_interface__"):
        raise ArgumentError(f"out must be a device array (with __cuda_array_interface__), not {type(out).__name__}.")
    array = cuda.as_cuda_array(out)
    if tuple(array.shape) != tuple(shape) or array.dtype != np.float64 or not array.is_c_contiguous():
        raise ArgumentError(
            f"out must be a C-contiguous float64 device array of shape {tuple(shape)}, "
            f"not {array.dtype} of shape {tuple(array.shape)}."
        )
    if out.__cuda_array_interface__["data"][1]:
        raise ArgumentError("out is a read-only device array; pass one that can be written to.")
    return array
