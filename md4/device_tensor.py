"""What takes blocks of integrals on the device: AO tensors, and sums of J and K."""

from math import prod

import numpy as np

from md4.cpu import HostTensor
from md4.device import as_buffer, copy_to_host
from md4.kernels.digest import launch_digest
from md4.kernels.scatter import launch_scatter


class DeviceTensor:
    """An AO tensor in device memory, filled block by block; copied to `host` at the end if there is one."""

    def __init__(self, backend, aosym, box, array, host):
        self.backend, self.aosym, self.box, self.array, self.host = backend, aosym, box, array, host
        self.flat = as_buffer(array)

    def scatter(self, block, bra, ket, basis, same_pieces, swap):
        pool, stream = self.backend.pool, self.backend.stream
        ao_loc, dims = basis.ao_loc, np.array(block.dims)
        tables = [bra.pairs, ket.pairs, ao_loc[bra.pairs], ao_loc[ket.pairs], dims, self.box]
        buffer, (*places, dims, box) = pool.upload(tables, stream)
        launch_scatter(
            self.aosym, block.array, prod(block.dims), places, dims, same_pieces, swap, box, self.flat, stream
        )
        pool.release(buffer)
        pool.release(block.array)

    def result(self):
        if self.host is None:
            return self.array
        self.array.copy_to_host(self.host, stream=self.backend.stream)
        self.backend.stream.synchronize()
        return self.host


class StagedTensor(HostTensor):
    """An AO tensor in host memory that the device has no room for: blocks are fetched and placed by the CPU."""

    def __init__(self, backend, aosym, box, out):
        super().__init__(aosym, box, out)
        self.backend = backend

    def scatter(self, block, *args):
        host = np.empty(block.dims)
        copy_to_host(host, block.array.pointer, self.backend.stream)
        self.backend.pool.release(block.array)
        super().scatter(host, *args)


class DeviceDigest:
    """X and Y of `md4.digest` in device memory, summed block by block.

    Parameters
    ----------
    densities, twice : ndarray, shape (n, nao, nao)
        As `md4.digest.HostDigest`.
    """

    def __init__(self, backend, densities, twice):
        self.backend, self.nao, self.shapes = backend, densities.shape[-1], (densities.shape, twice.shape)
        zeros = [np.zeros_like(densities), np.zeros_like(twice)]
        self.buffer, parts = backend.pool.upload([densities, twice, *zeros], backend.stream)
        self.densities, self.twice, self.x, self.y = (p.part(0, (p.shape[0], self.nao**2)) for p in parts)

    def add(self, block, bra, ket, basis, triangle):
        """Digests one block, and forgets it; `bra` and `ket` are slices of prepared lists, of one if `triangle`."""
        places = [self.backend.first_aos(side.whole, basis) for side in (bra, ket)]
        x, y = (m.part(0, (m.size,)) for m in (self.x, self.y))
        launch_digest(
            block, bra, ket, places, triangle, self.densities, x, self.twice, y, self.nao, self.backend.stream
        )
        self.backend.pool.release(block.array)

    def result(self):
        """(X, Y) on the host."""
        host = [np.empty(shape) for shape in self.shapes]
        for array, matrices in zip(host, (self.x, self.y)):
            copy_to_host(array, matrices.pointer, self.backend.stream)
        self.backend.pool.release(self.buffer)
        return host
