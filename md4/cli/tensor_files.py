"""Files for the tensor: .npy, or the dataset 'eri' of an HDF5 file, whose other contents are kept."""

import os
import shutil

import numpy as np

from md4.cli.ending import HeldSignals
from md4.errors import ArgumentError
from md4.support.files import checked_target, replacing

DATASET = "eri"
CHUNK = 1 << 24  # bytes written at once: a signal waits for no more
# What the header of .npy and the metadata of HDF5 take at most.
OVERHEAD = 4096


def tensor_file(name, size):
    """`NpyFile` or `H5File`, by the ending of the name; ArgumentError if `size` bytes could not be written to it.

    Parameters
    ----------
    name : str
    size : int
        Bytes of the tensor.
    """
    kinds = {".npy": NpyFile, ".h5": H5File, ".hdf5": H5File}
    kind = kinds.get(os.path.splitext(name)[1])
    if kind is None:
        raise ArgumentError(f"cannot tell the format of {name!r}; the name must end in .npy, .h5 or .hdf5.")
    return kind(name, size)


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

    def write(self, eri):
        """Writes the tensor to a copy of the file, which then replaces the file."""
        import h5py

        self.checked()
        with HeldSignals() as signals, replacing(self.path) as beside:
            if self.old_size():
                shutil.copyfile(self.path, beside)
            try:
                with h5py.File(beside, "r+" if self.old_size() else "w") as file:
                    write_dataset(file, eri, signals)
            except RuntimeError as error:  # so h5py tells of a disk that is full when it closes the file
                raise OSError(str(error)) from error


def write_dataset(file, eri, signals):
    """Replaces the dataset 'eri' by the tensor, piece by piece, so that signals are handled in between."""
    if DATASET in list(file):
        del file[DATASET]
    data, rows = file.create_dataset(DATASET, eri.shape, eri.dtype), max(1, CHUNK * len(eri) // eri.nbytes)
    for start in range(0, len(eri), rows):
        signals.check()
        data[start : start + rows] = eri[start : start + rows]
