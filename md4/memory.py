"""What both backends say of memory and of arrays to write to."""

import numpy as np

from md4.errors import ArgumentError, MemoryLimitError


def check_out(out, shape):
    """ArgumentError unless `out` is a C-contiguous float64 NumPy array of `shape` that can be written to."""
    plain = isinstance(out, np.ndarray) and not isinstance(out, (np.ma.MaskedArray, np.matrix))
    if not plain or out.shape != shape or out.dtype != np.float64 or not out.flags.c_contiguous:
        what = f"{type(out).__name__} {getattr(out, 'dtype', '')} of shape {getattr(out, 'shape', None)}"
        raise ArgumentError(f"out must be a C-contiguous float64 NumPy array of shape {shape}, not {what}.")
    if not out.flags.behaved:
        how = "aligned" if out.flags.writeable else "writeable"
        raise ArgumentError(f"out is not {how}; pass an array of your own, such as numpy.empty(shape).")
    return out


def tensor_refusal(shape, need, limit):
    """The MemoryLimitError for a tensor that cannot fit."""
    size = 8 * int(np.prod(shape, dtype=object))
    return MemoryLimitError(
        f"the AO tensor of shape {shape} takes {size / 1e6:.1f} MB and with the least workspace {need / 1e6:.1f} MB, "
        f"but {limit / 1e6:.1f} MB may be used; raise max_memory, use a higher aosym, or take parts by shls_slice."
    )
