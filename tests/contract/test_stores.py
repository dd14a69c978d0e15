"""Where the rows of a tensor go: datasets, memory maps and arrays that can and that cannot be used."""

from types import SimpleNamespace

import numpy as np
import pytest
from molecules import WATER, molecule

import md4
from md4.contract import stores
from md4.contract.stores import FileStore, MemoryStore, checked_store, is_file
from md4.errors import ArgumentError, MemoryLimitError

h5py = pytest.importorskip("h5py")
SHAPE = (28, 28)


@pytest.fixture(scope="module")
def water():
    return molecule(WATER, "sto-3g")


@pytest.fixture
def file(tmp_path):
    with h5py.File(tmp_path / "eri.h5", "w") as file:
        yield file


def memmap(path, dtype="f8", shape=SHAPE, **options):
    return np.lib.format.open_memmap(path, "w+", dtype, shape, **options)


@pytest.mark.parametrize("aosym", ["s1", "s4", "s8"])
@pytest.mark.parametrize("kind", ["dataset", "chunked dataset", "memory map", "memory map in Fortran's order"])
def test_tensors_in_pieces(backend, water, file, tmp_path, aosym, kind, monkeypatch):
    """In slices that are smaller than the tensor, and in more writes than slices."""
    theirs = water.intor("int2e", aosym=aosym)
    if "dataset" in kind:
        chunks = True if "chunked" in kind else None
        out = file.create_dataset("eri", theirs.shape, "f8", chunks=chunks, fillvalue=np.nan)
    else:
        out = memmap(tmp_path / "eri.npy", shape=theirs.shape, fortran_order="Fortran" in kind)
        out[...] = np.nan
    written = []
    monkeypatch.setattr("md4.contract.rows.host_memory", lambda: 2.5 * theirs.nbytes)
    monkeypatch.setattr(stores, "WRITE_BYTES", theirs.nbytes // 4)
    monkeypatch.setattr(FileStore, "write", noting(FileStore.write, written))
    assert md4.int2e(water, aosym, out=out, backend=backend) is out
    np.testing.assert_allclose(out[...], theirs, rtol=0, atol=1e-12)
    assert len(written) > 1
    assert [first for first, _ in written[1:]] == [last for _, last in written[:-1]]


def noting(write, written):
    """`write`, which notes the rows."""

    def noted(self, first, last, rows):
        written.append((first, last))
        write(self, first, last, rows)

    return noted


def test_tensor_larger_than_the_memory_that_may_be_used(water, file):
    """A cap below the tensor: it is refused in memory, and made in a file."""
    mol = molecule(WATER, "6-31g**")
    theirs = mol.intor("int2e", aosym="s1")
    assert theirs.nbytes > 2.6e6
    with pytest.raises(MemoryLimitError, match=r"takes 2\.65 MB"):
        md4.int2e(mol, backend="cpu", max_memory=2)
    out = file.create_dataset("eri", theirs.shape, "f8")
    md4.int2e(mol, out=out, backend="cpu", max_memory=2)
    np.testing.assert_allclose(out[...], theirs, rtol=0, atol=1e-12)


def test_not_even_one_row_fits(file):
    mol = molecule(WATER, "6-31g**")
    out = file.create_dataset("eri", (24,) * 4, "f8")
    with pytest.raises(MemoryLimitError, match=r"shape \(1, 24, 24, 24\) takes 111 kB .*but 120 kB may be used"):
        md4.int2e(mol, out=out, backend="cpu", max_memory=0.12)


def test_slices_and_parts_of_files(backend, water, file):
    """A part of the tensor, and `out` that is a part of a memory map."""
    shls_slice = (1, 4, 0, 5, 2, 3, 0, 5)
    theirs = water.intor("int2e", shls_slice=shls_slice)
    out = file.create_dataset("eri", theirs.shape, "f8")
    md4.int2e(water, shls_slice=shls_slice, out=out, backend=backend)
    np.testing.assert_allclose(out[...], theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        ("f4", SHAPE, r"'/eri' of shape \(28, 28\) and type float32"),
        ("f8", (28, 27), r"needs shape \(28, 28\) and float64"),
    ],
)
def test_wrong_datasets(water, file, dtype, shape, message):
    with pytest.raises(ArgumentError, match=message):
        md4.int2e(water, "s4", out=file.create_dataset("eri", shape, dtype), backend="cpu")


def test_datasets_that_cannot_be_written_to(water, tmp_path):
    with h5py.File(tmp_path / "eri.h5", "w") as file:
        file.create_dataset("eri", SHAPE, "f8")
    with h5py.File(tmp_path / "eri.h5", "r") as file:
        out = file["eri"]
        with pytest.raises(ArgumentError, match="is open to be read; open it with 'r\\+'"):
            md4.int2e(water, "s4", out=out, backend="cpu")
    with pytest.raises(ArgumentError, match="file that is closed; leave the file open"):
        md4.int2e(water, "s4", out=out, backend="cpu")


@pytest.mark.parametrize(("dtype", "shape"), [("f4", SHAPE), ("f8", (784,)), (">f8", SHAPE)])
def test_wrong_memory_maps(water, tmp_path, dtype, shape):
    with pytest.raises(ArgumentError, match=r"needs shape \(28, 28\) and float64; make it by numpy.lib.format"):
        md4.int2e(water, "s4", out=memmap(tmp_path / "eri.npy", dtype, shape), backend="cpu")


def test_memory_map_that_cannot_be_written_to(water, tmp_path):
    memmap(tmp_path / "eri.npy")
    out = np.load(tmp_path / "eri.npy", mmap_mode="r")
    with pytest.raises(ArgumentError, match="memmap that is open to be read; open it with mode='r\\+'"):
        md4.int2e(water, "s4", out=out, backend="cpu")


def test_stores_of_several_ranks(file, tmp_path):
    """What the ranks could not see of each other."""
    with pytest.raises(ArgumentError, match=r"one process can write, but comm has 2 ranks.*driver='mpio'.*npy"):
        checked_store(file.create_dataset("eri", SHAPE, "f8"), SHAPE, ranks=2)
    memmap(tmp_path / "eri.npy")
    out = np.load(tmp_path / "eri.npy", mmap_mode="c")
    with pytest.raises(ArgumentError, match="not written to the file"):
        checked_store(out, SHAPE, ranks=2)
    assert isinstance(checked_store(out, SHAPE), FileStore)
    assert isinstance(checked_store(np.load(tmp_path / "eri.npy", mmap_mode="r+"), SHAPE, ranks=2), FileStore)


def test_arrays_in_memory_are_no_files(monkeypatch):
    array = np.empty(SHAPE)
    assert not is_file(array)
    store = checked_store(array, SHAPE)
    assert isinstance(store, MemoryStore)
    assert np.shares_memory(store.room(3, 5), array[3:5])
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    assert not is_file(array)
    with pytest.raises(ArgumentError, match="out must be a C-contiguous float64 NumPy array"):
        checked_store(SimpleNamespace(shape=SHAPE), SHAPE)
