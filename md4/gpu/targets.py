"""Blocks of integrals on the device, and the AO tensors that take them."""

from math import prod

import numpy as np

from md4.errors import ArgumentError
from md4.gpu.buffers import as_buffer
from md4.gpu.device_code import cuda
from md4.gpu.kernels.groups import NO_LIMITS
from md4.gpu.kernels.scatter import launch_scatter


class DeviceBlock:
    """Integrals (ij, kl, ab, cd) in device memory.

    Attributes
    ----------
    array : Buffer
        A flat buffer.
    first : int
        Where the first element stands in it.
    strides : tuple of int
        Of ij, kl, ab and cd, in elements.
    dims : tuple of int
        Shape (n_ij, n_kl, n_a, n_b, n_c, n_d) of the whole, as it was made.
    turned : bool
        Bra and ket have changed names: ab runs faster than cd.
    matrix : bool
        It is a part of a matrix with longer rows: the integrals of a quartet are not contiguous. Then (ij, ab) are its
        columns if it is turned, its rows if not.
    limits : tuple
        `md4.gpu.kernels.groups.Limits`: the quartets that count. The others may be left out.
    """

    __slots__ = ("array", "dims", "first", "limits", "matrix", "strides", "turned")

    def __init__(self, array, first, strides, dims, turned=False, matrix=False, limits=NO_LIMITS):
        self.array, self.first, self.strides, self.dims = array, first, strides, dims
        self.turned, self.matrix, self.limits = turned, matrix, limits

    @classmethod
    def contiguous(cls, array, dims):
        """A block of six indices `dims` in C order."""
        _, nkl, na, nb, nc, nd = dims
        nab, ncd = na * nb, nc * nd
        return cls(array, 0, (nkl * nab * ncd, nab * ncd, ncd, 1), tuple(dims))

    def limit(self, counts):
        """From now on each bra pair of a whole list counts with so many ket pairs only, the first of theirs; int32."""
        self.limits = counts, False

    def swapped(self):
        """The same with bra and ket exchanged."""
        (ij, kl, ab, cd), (counts, by_ket) = self.strides, self.limits
        limits = counts, not by_ket
        return DeviceBlock(self.array, self.first, (kl, ij, cd, ab), self.dims, not self.turned, self.matrix, limits)

    def __getitem__(self, key):
        ij, kl = key
        first = self.first + ij.start * self.strides[0] + kl.start * self.strides[1]
        return DeviceBlock(self.array, first, self.strides, self.dims, self.turned, self.matrix, self.limits)


def checked_device_array(out, shape, stream):
    """`out` as a Numba device array; ArgumentError unless it is C-contiguous float64 of `shape` on a device.

    Numba waits for the stream that the array names. Work on `stream`, the handle of that on which `out` will be
    written, comes after it anyway.
    """
    if not hasattr(out, "__cuda_array_interface__"):
        raise ArgumentError(f"out must be a device array (with __cuda_array_interface__), not {type(out).__name__}.")
    interface = out.__cuda_array_interface__
    # where the default stream, whose handle is 0, has the number 1
    array = cuda.as_cuda_array(out, sync=interface.get("stream") != (stream or 1))
    if tuple(array.shape) != tuple(shape) or array.dtype != np.float64 or not array.is_c_contiguous():
        raise ArgumentError(
            f"out must be a C-contiguous float64 device array of shape {tuple(shape)}, "
            f"not {array.dtype} of shape {tuple(array.shape)}."
        )
    if interface["data"][1]:
        raise ArgumentError("out is a read-only device array; pass one that can be written to.")
    return array


class BlockTensor:
    """An AO tensor that takes blocks by `add`, one for each pair of lists.

    Parameters
    ----------
    engine : md4.Engine
    """

    def __init__(self, engine):
        self.engine, self.context = engine, engine.backend.context

    def take(self, pairs, report=None):
        """Makes the integrals of all `ListPair`, and writes each to all its places; see `md4.backends.Target`."""
        for pair in pairs:
            bra, ket, a, b = pair.bra, pair.ket, pair.bra.pairs, pair.ket.pairs
            # n_a: (derivative, a)
            block = self.engine.backend.scratch((len(a), len(b), a.nab // a.nb, a.nb, b.na, b.nb))
            self.engine.run_steps(bra, ket, block)
            self.add(block, bra, ket, self.engine.bra_basis, pair.same)
            if report is not None:
                report(pair.seconds)


class DeviceTensor(BlockTensor):
    """An AO tensor in device memory.

    Parameters
    ----------
    engine : md4.Engine
    layout : md4.method.scatter.TensorLayout
    array
        The tensor, a device array.
    host : ndarray or None
        Where it is copied to at the end.
    """

    def __init__(self, engine, layout, array, host):
        super().__init__(engine)
        self.layout, self.array, self.host = layout, array, host
        self.flat = as_buffer(array)

    def add(self, block, bra, ket, basis, triangle):
        """Writes one block wherever its integrals stand; `triangle`: `bra` and `ket` are the same pairs."""
        context, layout = self.context, self.layout
        shells, (placing, flag) = [side.pairs.pairs for side in (bra, ket)], layout.placing
        sizes = *block.dims, bra.pairs.na, *bra.pairs.derivatives[:1]
        tables = [*shells, *(basis.ao_loc[s] for s in shells), np.array(sizes), layout.box]
        buffer, (*places, dims, box) = context.pool.upload(tables, context.stream)
        launch_scatter(
            context, placing, block.array, prod(block.dims), places, dims, triangle, flag, box, self.flat
        )
        context.pool.release(buffer)

    def result(self):
        """The tensor, on the host if it goes there."""
        if self.host is None:
            return self.array
        self.array.copy_to_host(self.host, stream=self.context.stream)
        self.context.stream.synchronize()
        return self.host


class StagedTensor(BlockTensor):
    """An AO tensor in host memory that the device has no room for: blocks are fetched and placed by the CPU.

    Parameters
    ----------
    engine : md4.Engine
    tensor
        What `host_tensor` of `md4.backends.Backend.tensor` makes.
    """

    def __init__(self, engine, tensor):
        super().__init__(engine)
        self.tensor = tensor

    def add(self, block, bra, ket, basis, triangle):
        """Fetches one block, and has it placed."""
        host = np.empty(block.dims)
        self.context.copy_out(host, block.array.pointer)
        self.tensor.add(host, bra, ket, basis, triangle)

    def result(self):
        """The tensor."""
        return self.tensor.result()
