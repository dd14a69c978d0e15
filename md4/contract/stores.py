"""Where the rows of an AO tensor go: an array in memory, or a dataset or memory map that may be larger than memory.

A tensor is written to an array in memory in any order, an integral to all its places. A file is written row by row, in
slices that are complete. So it has the methods of `FileStore`, and needs memory for the slices at work only.
"""

import sys

import numpy as np

from md4.errors import ArgumentError
from md4.support.locks import Lock
from md4.support.memory import check_out

# Bytes that are written to a file at once. MPI libraries count the bytes of a call in 32 bits.
WRITE_BYTES = 1 << 28


def is_file(out):
    """Whether `out` is a dataset of h5py or a memory map of NumPy."""
    return isinstance(out, np.memmap) or is_dataset(out)


def is_dataset(out):
    """Whether `out` is a dataset of h5py, which need not be installed."""
    h5py = sys.modules.get("h5py")
    return h5py is not None and isinstance(out, h5py.Dataset)


def checked_store(out, shape, ranks=1):
    """The `MemoryStore` or `FileStore` of an `out` for a tensor of `shape`, to which so many ranks write.

    Raises
    ------
    ArgumentError
        It is something else, has another shape or type, or cannot be written to.
    """
    if not is_file(out):
        return MemoryStore(check_out(out, shape))
    if is_dataset(out):
        check_dataset(out, shape, ranks)
    else:
        check_memmap(out, shape, ranks)
    return FileStore(out)


def check_dataset(out, shape, ranks):
    """ArgumentError for a dataset that cannot take a tensor of `shape` from so many ranks."""
    if not out:
        raise ArgumentError("out is a dataset of an HDF5 file that is closed; leave the file open during the call.")
    if out.shape != shape or out.dtype != np.float64:
        raise ArgumentError(
            f"out is the dataset {out.name!r} of shape {out.shape} and type {out.dtype}, but the tensor needs shape "
            f"{shape} and float64; make it by file.create_dataset(name, {shape}, 'f8')."
        )
    if out.file.mode == "r":
        raise ArgumentError(f"out is a dataset of {out.file.filename!r}, which is open to be read; open it with 'r+'.")
    if ranks > 1 and out.file.driver != "mpio":
        raise ArgumentError(
            f"out is a dataset of {out.file.filename!r}, to which one process can write, but comm has {ranks} ranks; "
            "open the file on all ranks with driver='mpio', or give a numpy.memmap of the same .npy file."
        )


def check_memmap(out, shape, ranks):
    """ArgumentError for a memory map that cannot take a tensor of `shape` from so many ranks."""
    if out.shape != shape or out.dtype != np.float64:
        raise ArgumentError(
            f"out is a numpy.memmap of shape {out.shape} and type {out.dtype}, but the tensor needs shape {shape} and "
            "float64; make it by numpy.lib.format.open_memmap(path, 'w+', 'f8', shape)."
        )
    if not out.flags.writeable:
        raise ArgumentError("out is a numpy.memmap that is open to be read; open it with mode='r+'.")
    if ranks > 1 and out.mode == "c":
        raise ArgumentError(
            "out is a numpy.memmap whose changes are not written to the file (mode 'c'), but comm has "
            f"{ranks} ranks, which meet in the file; open it with mode='r+'."
        )


class MemoryStore:
    """Rows of a tensor in memory, which are computed where they stay.

    Parameters
    ----------
    array : ndarray, C-contiguous
    first : int
        The row of the whole tensor with which it begins.
    """

    def __init__(self, array, first=0):
        self.array, self.first = array, first

    def room(self, first, last):
        """The array for the rows first to last - 1."""
        return self.array[first - self.first : last - self.first]

    def write(self, first, last, rows):
        """Nothing is left to do."""

    def flush(self):
        """Nothing is left to do."""


class FileStore:
    """A tensor in a dataset or a memory map. Slices are computed elsewhere and written by one thread at a time."""

    def __init__(self, out):
        self.array, self.lock = out, Lock()

    def room(self, first, last):
        """None: the rows need memory of their own."""

    def write(self, first, last, rows):
        """Writes the rows first to last - 1."""
        step = max(1, WRITE_BYTES * len(rows) // max(1, rows.nbytes))
        with self.lock:
            for start in range(0, last - first, step):
                stop = min(start + step, last - first)
                self.array[first + start : first + stop] = rows[start:stop]

    def flush(self):
        """Makes the rows visible to other nodes."""
        with self.lock:
            (self.array.file if is_dataset(self.array) else self.array).flush()
