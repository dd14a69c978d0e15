"""Files for the tensor: .npy, or the dataset 'eri' of an HDF5 file, whose other contents are kept.

A tensor is written as a whole (`write`), or row by row by one process or several (`begun` and `opened`).
"""

import os
import shutil
from contextlib import contextmanager
from math import prod

import numpy as np

from md4.cli.ending import HeldSignals
from md4.errors import ArgumentError, MD4Error
from md4.support.files import checked_target, replacing

DATASET = "eri"
CHUNK = 1 << 24  # bytes written at once: a signal waits for no more
# What the header of .npy and the metadata of HDF5 take at most.
OVERHEAD = 4096


def tensor_file(name, size, shared=False):
    """`NpyFile` or `H5File`, by the ending of the name; ArgumentError if `size` bytes could not be written to it.

    Parameters
    ----------
    name : str
    size : int
        Bytes of the tensor.
    shared : bool
        Whether the ranks of MPI will write to it.
    """
    kinds = {".npy": NpyFile, ".h5": H5File, ".hdf5": H5File}
    kind = kinds.get(os.path.splitext(name)[1])
    if kind is None:
        raise ArgumentError(f"cannot tell the format of {name!r}; the name must end in .npy, .h5 or .hdf5.")
    file = kind(name, size)
    if shared:
        file.check_shared()
    return file


class NpyFile:
    """A .npy file that will be written.

    Attributes
    ----------
    path : Path
    replaces : str or None
        What exists now and will be replaced.
    """

    def __init__(self, name, size):
        self.path = checked_target(name, size + OVERHEAD)
        self.replaces = f"{name} {self.shape()}" if self.path.exists() else None

    def shape(self):
        """Shape of the array that the file holds now, or a description if it holds no array."""
        try:
            return np.load(self.path, mmap_mode="r", allow_pickle=False).shape
        except (OSError, ValueError, EOFError, SyntaxError):
            return f"({self.path.stat().st_size} bytes, not an array)"

    def write(self, eri):
        """Writes the tensor. `np.save` is not used: it does not notice that a disk has no room for the last bytes."""
        with HeldSignals() as signals, replacing(self.path) as beside, open(beside, "wb") as file:
            header = {"descr": eri.dtype.str, "fortran_order": False, "shape": eri.shape}
            np.lib.format.write_array_header_1_0(file, header)
            data = memoryview(eri.reshape(-1)).cast("B")
            for start in range(0, len(data), CHUNK):
                signals.check()
                file.write(data[start : start + CHUNK])


    def check_shared(self):
        """Several processes can write to a memory map of the file."""

    @contextmanager
    def begun(self, shape):
        """Path of a file for a tensor of `shape`, which replaces this one when the block ends.

        It has its whole size on the disk, since a memory map cannot tell that the disk is full.
        """
        with replacing(self.path) as beside:
            with open(beside, "wb") as file:
                header = {"descr": np.dtype(np.float64).str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
                file.flush()
                os.posix_fallocate(file.fileno(), 0, file.tell() + 8 * prod(shape))
            yield beside

    @contextmanager
    def opened(self, beside, comm):
        """The tensor in a file that `begun` has made, as a memory map."""
        out = np.load(beside, mmap_mode="r+")
        yield out
        out.flush()


class H5File:
    """The dataset 'eri' of an HDF5 file, which will be written; attributes as `NpyFile`."""

    def __init__(self, name, size):
        try:
            import h5py  # noqa: F401
        except ModuleNotFoundError:
            raise ArgumentError(f"writing {name!r} needs h5py; pip install h5py, or write .npy.") from None
        self.path = checked_target(name)
        self.replaces = self.checked()
        checked_target(name, size + self.old_size() + OVERHEAD)

    def old_size(self):
        """Bytes of the existing file, which is copied."""
        return self.path.stat().st_size if self.path.exists() else 0

    def checked(self):
        """What the file holds under the name of the dataset, or None; ArgumentError if it cannot be replaced."""
        import h5py

        if not self.old_size():  # an empty file, such as `mktemp` makes, has nothing to keep
            return None
        try:
            with h5py.File(self.path, "r") as file:
                old = file.get(DATASET)
                if isinstance(old, (h5py.Group, h5py.Datatype)):
                    raise ArgumentError(
                        f"{str(self.path)!r} holds a {type(old).__name__.lower()} {DATASET!r}, which is no dataset and "
                        "is not replaced; choose another file."
                    )
                if old is None:
                    return f"the broken link {DATASET!r} of {self.path}" if DATASET in list(file) else None
                return f"dataset {DATASET!r} of {self.path} {old.shape}"
        except (OSError, RuntimeError) as error:
            raise ArgumentError(
                f"{str(self.path)!r} is there, but cannot be used as an HDF5 file ({error}); choose another name."
            ) from error

    def check_shared(self):
        """ArgumentError where this h5py cannot write from several processes."""
        import h5py

        if not h5py.get_config().mpi:
            raise ArgumentError(
                f"with --mpi, writing {str(self.path)!r} needs an h5py that was built with MPI; write .npy, which "
                "needs nothing."
            )

    def write(self, eri):
        """Writes the tensor to a copy of the file, which then replaces the file."""
        with HeldSignals() as signals, self.copied() as beside, self.changed(beside) as file:
            write_rows(new_dataset(file, eri.shape), eri, signals)

    @contextmanager
    def copied(self):
        """Path of a copy of the file, which replaces the file when the block ends."""
        self.checked()
        with replacing(self.path) as beside:
            if self.old_size():
                shutil.copyfile(self.path, beside)
            yield beside

    @contextmanager
    def changed(self, beside):
        """The copy, open to be written to."""
        import h5py

        with errors_of_disk(), h5py.File(beside, "r+" if self.old_size() else "w") as file:
            yield file

    @contextmanager
    def begun(self, shape):
        """As `NpyFile.begun`."""
        with self.copied() as beside:
            with self.changed(beside) as file:
                new_dataset(file, shape)
            yield beside

    @contextmanager
    def opened(self, beside, comm):
        """The tensor in a file that `begun` has made, as a dataset for one process or for all ranks of `comm`."""
        import h5py

        options = {} if comm is None else {"driver": "mpio", "comm": comm}
        with errors_of_disk(), h5py.File(beside, "r+", **options) as file:
            yield file[DATASET]


@contextmanager
def errors_of_disk():
    """OSError in place of the RuntimeError by which h5py tells that the disk is full when it closes a file."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, MD4Error):
            raise
        raise OSError(str(error)) from error


def new_dataset(file, shape):
    """An empty dataset 'eri', in the place of what has this name."""
    if DATASET in list(file):
        del file[DATASET]
    return file.create_dataset(DATASET, shape, np.float64)


def write_rows(data, eri, signals):
    """Writes a tensor to a dataset, piece by piece, so that signals are handled in between."""
    rows = max(1, CHUNK * len(eri) // eri.nbytes)
    for start in range(0, len(eri), rows):
        signals.check()
        data[start : start + rows] = eri[start : start + rows]
