"""Files for the tensor: .npy, or the dataset 'eri' of an HDF5 file, whose other contents are kept.

A tensor is written as a whole (`write`), or row by row by one process or several (`begun` and `opened`). Tensors of
other names become datasets of these names, or a .npy file each. Only datasets have attributes that say what they hold.
"""

import os
import shutil
from contextlib import ExitStack, contextmanager
from math import prod

import numpy as np

from md4.cli.ending import HeldSignals
from md4.errors import ArgumentError, MD4Error
from md4.support.files import checked_target, replacing

DATASET = "eri"
CHUNK = 1 << 24  # bytes written at once: a signal waits for no more
# What the header of .npy and the metadata of HDF5 take at most.
OVERHEAD = 4096


def tensor_file(name, size, shared=False, attributes=None):
    """`NpyFile` or `H5File`, by the ending of the name; ArgumentError if `size` bytes could not be written to it.

    Parameters
    ----------
    name : str
    size : int
        Bytes of the tensor, or of all tensors.
    shared : bool
        Whether the ranks of MPI will write to it.
    attributes : dict of dict, optional
        Attributes of each tensor by name, which a dataset of HDF5 gets; of the tensor 'eri' by default.
    """
    kinds = {".npy": NpyFile, ".h5": H5File, ".hdf5": H5File}
    kind = kinds.get(os.path.splitext(name)[1])
    if kind is None:
        raise ArgumentError(f"cannot tell the format of {name!r}; the name must end in .npy, .h5 or .hdf5.")
    file = kind(name, size, attributes or {DATASET: {}})
    if shared:
        file.check_shared()
    return file


class NpyFile:
    """A .npy file that will be written: NAME.npy, or of several tensors NAME.TENSOR.npy each.

    Attributes
    ----------
    paths : dict
        Path of each tensor.
    names : list of str
        What is written, for a message.
    replaces : str or None
        What exists now and will be replaced.
    """

    def __init__(self, name, size, tensors):
        stem, end = os.path.splitext(name)
        names = {tensor: f"{stem}.{tensor}{end}" if len(tensors) > 1 else name for tensor in tensors}
        self.paths = {tensor: checked_target(own, size + OVERHEAD) for tensor, own in names.items()}
        self.names = list(names.values())
        old = [f"{names[tensor]} {shape_in(path)}" for tensor, path in self.paths.items() if path.exists()]
        self.replaces = ", ".join(old) or None

    def write(self, eri):
        """Writes the tensor. `np.save` is not used: it does not notice that a disk has no room for the last bytes."""
        with HeldSignals() as signals, replacing(self.paths[DATASET]) as beside, open(beside, "wb") as file:
            header = {"descr": eri.dtype.str, "fortran_order": False, "shape": eri.shape}
            np.lib.format.write_array_header_1_0(file, header)
            data = memoryview(eri.reshape(-1)).cast("B")
            for start in range(0, len(data), CHUNK):
                signals.check()
                file.write(data[start : start + CHUNK])

    def check_shared(self):
        """Several processes can write to a memory map of the file."""

    @contextmanager
    def begun(self, shapes):
        """Paths of files for tensors of `shapes`, both by name, which replace these ones when the block ends.

        They have their whole size on the disk, since a memory map cannot tell that the disk is full.
        """
        with ExitStack() as stack:
            beside = {tensor: stack.enter_context(replacing(self.paths[tensor])) for tensor in shapes}
            for tensor, shape in shapes.items():
                with open(beside[tensor], "wb") as file:
                    header = {"descr": np.dtype(np.float64).str, "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(file, header)
                    file.flush()
                    os.posix_fallocate(file.fileno(), 0, file.tell() + 8 * prod(shape))
            yield beside

    @contextmanager
    def opened(self, beside, comm=None, tensor=DATASET):
        """The tensor in a file that `begun` has made, as a memory map."""
        out = np.load(beside[tensor], mmap_mode="r+")
        yield out
        out.flush()


def shape_in(path):
    """Shape of the array that a .npy file holds, or a description if it holds no array."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False).shape
    except (OSError, ValueError, EOFError, SyntaxError):
        return f"({path.stat().st_size} bytes, not an array)"


class H5File:
    """The dataset 'eri' of an HDF5 file, or datasets of other names, which will be written.

    Attributes
    ----------
    path : Path
    attributes : dict of dict
        Attributes of each dataset by name.
    names : list of str
        What is written, for a message.
    replaces : str or None
        What exists now and will be replaced.
    """

    def __init__(self, name, size, attributes):
        try:
            import h5py  # noqa: F401
        except ModuleNotFoundError:
            raise ArgumentError(f"writing {name!r} needs h5py; pip install h5py, or write .npy.") from None
        self.path, self.attributes, self.names = checked_target(name), attributes, [name]
        self.replaces = self.checked()
        checked_target(name, size + self.old_size() + OVERHEAD)

    def old_size(self):
        """Bytes of the existing file, which is copied."""
        return self.path.stat().st_size if self.path.exists() else 0

    def checked(self):
        """What the file holds under the names of the datasets, or None; ArgumentError if it cannot be replaced."""
        import h5py

        if not self.old_size():  # an empty file, such as `mktemp` makes, has nothing to keep
            return None
        try:
            with h5py.File(self.path, "r") as file:
                old = [self.old_dataset(file, tensor) for tensor in self.attributes]
                return ", ".join(filter(None, old)) or None
        except (OSError, RuntimeError) as error:
            raise ArgumentError(
                f"{str(self.path)!r} is there, but cannot be used as an HDF5 file ({error}); choose another name."
            ) from error

    def old_dataset(self, file, tensor):
        """As `checked`, for one dataset."""
        import h5py

        old = file.get(tensor)
        if isinstance(old, (h5py.Group, h5py.Datatype)):
            raise ArgumentError(
                f"{str(self.path)!r} holds a {type(old).__name__.lower()} {tensor!r}, which is no dataset and is not "
                "replaced; choose another file."
            )
        if old is None:
            return f"the broken link {tensor!r} of {self.path}" if tensor in list(file) else None
        return f"dataset {tensor!r} of {self.path} {old.shape}"

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
        with HeldSignals() as signals:
            self.write_copy(eri, signals)

    def write_copy(self, eri, signals):
        """As `write`. At its end objects of h5py are gone, whose weak references have callbacks, while signals wait."""
        with self.copied() as beside, self.changed(beside) as file:
            write_rows(self.new_dataset(file, DATASET, eri.shape), eri, signals)

    @contextmanager
    def copied(self):
        """Path of a copy of the file, which replaces the file when the block ends."""
        with HeldSignals():
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

    def new_dataset(self, file, tensor, shape):
        """An empty dataset with its attributes, in the place of what has this name."""
        if tensor in list(file):
            del file[tensor]
        made = file.create_dataset(tensor, shape, np.float64, track_order=True)  # else attributes have 64 kB at most
        made.attrs.update(self.attributes[tensor])
        return made

    @contextmanager
    def begun(self, shapes):
        """As `NpyFile.begun`, but the path is one for all."""
        with self.copied() as beside:
            with HeldSignals():
                self.add_datasets(beside, shapes)
            yield beside

    def add_datasets(self, beside, shapes):
        """Empty datasets of `shapes`, both by name, in the copy of the file."""
        with self.changed(beside) as file:
            for tensor, shape in shapes.items():
                self.new_dataset(file, tensor, shape)

    @contextmanager
    def opened(self, beside, comm=None, tensor=DATASET):
        """The tensor in a file that `begun` has made, as a dataset for one process or for all ranks of `comm`."""
        import h5py

        options = {} if comm is None else {"driver": "mpio", "comm": comm}
        with errors_of_disk(), h5py.File(beside, "r+", **options) as file:
            yield file[tensor]


@contextmanager
def errors_of_disk():
    """OSError in place of the RuntimeError by which h5py tells that the disk is full when it closes a file."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, MD4Error):
            raise
        raise OSError(str(error)) from error


def write_rows(data, eri, signals, first=0):
    """Writes rows of a tensor, the first of which is row `first`, to a dataset or a memory map.

    This is done piece by piece, so that signals are handled in between.
    """
    rows = max(1, CHUNK * len(eri) // eri.nbytes)
    for start in range(0, len(eri), rows):
        signals.check()
        piece = eri[start : start + rows]
        data[first + start : first + start + len(piece)] = piece
