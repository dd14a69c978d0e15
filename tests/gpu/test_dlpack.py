"""The protocol of DLPack, spoken by a consumer of plain ctypes to arrays of the emulated GPU."""

import ctypes
import gc
from types import SimpleNamespace

import numpy as np
import pytest
from emulator import running

import md4
from md4.errors import ArgumentError
from md4.gpu import dlpack
from md4.gpu.dlpack import DLManagedTensor, DLManagedTensorVersioned, alive, capsule_pointer, is_capsule

BASIS = md4.Basis([md4.Shell(l, [0.7], [1.0], [0.0, 0.1, l]) for l in (0, 1, 1)])
PAIRS = [[0, 1], [0, 2]]
CONSUMER = 5  # a stream
set_name = ctypes.pythonapi.PyCapsule_SetName
set_name.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
call_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture
def right():
    return md4.Engine(BASIS, backend="cpu").compute(PAIRS, PAIRS)


def made():
    """An array on the emulated GPU."""
    return md4.Engine(BASIS, backend="cuda", stream=0).compute(PAIRS, PAIRS)


def taken(capsule):
    """(managed tensor, a view of its memory, the deleter) of a capsule."""
    versioned = bool(is_capsule(id(capsule), b"dltensor_versioned"))
    address = capsule_pointer(id(capsule), dlpack.NAMES[versioned])
    managed = (DLManagedTensorVersioned if versioned else DLManagedTensor).from_address(address)
    tensor = managed.tensor
    shape = tuple(tensor.shape[: tensor.ndim])
    assert (tensor.code, tensor.bits, tensor.lanes, tensor.byte_offset) == (2, 64, 1, 0)
    memory = (ctypes.c_double * int(np.prod(shape))).from_address(tensor.data)
    view = np.frombuffer(memory).reshape(-1)
    strides = [8 * s for s in tensor.strides[: tensor.ndim]]
    found = np.lib.stride_tricks.as_strided(view, shape, strides)
    return managed, found, lambda: call_deleter(managed.deleter)(address)


def part_of(array, first, last, *gaps):
    """A part along the first axis as Numba makes it, which asks CUDA; `gaps`: every so many elements of the last."""
    memory = array.gpu_data.view(first * array.strides[0], last * array.strides[0])
    shape, strides = (last - first, *array.shape[1:]), array.strides
    for step in gaps:
        shape, strides = (*shape[:-1], shape[-1] // step), (*strides[:-1], strides[-1] * step)
    return type(array)(shape, strides, array.dtype, gpu_data=memory)


@pytest.mark.parametrize("stream, waits", [(CONSUMER, True), (-1, False)])
@pytest.mark.parametrize("copy", [None, True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_the_consumers_stream_comes_after_the_integrals(stream, waits, copy, first, right):
    """Also for a part of an array, and for a copy; -1 asks for no order."""
    with running(late=(0,)):
        engine = md4.Engine(BASIS, backend="cuda", stream=0)
        whole, seen = engine.compute(PAIRS, PAIRS), []
        part = part_of(whole, first, 2)
        capsule = part.__dlpack__(stream=stream, copy=copy)
        _, found, _ = taken(capsule)
        engine.stream.queues.give(CONSUMER, lambda: seen.append(found.copy()))
        assert np.allclose(seen[0], right[first:], rtol=0, atol=1e-13) is waits


@pytest.mark.parametrize("stream", [None, 1])
def test_the_default_stream_needs_no_order_with_itself(stream, right, monkeypatch):
    with running():
        array = made()
        monkeypatch.setattr(dlpack.cuda, "event", None, raising=False)
        capsule = array.__dlpack__(stream=stream)
        np.testing.assert_allclose(taken(capsule)[1], right, rtol=0, atol=1e-13)


@pytest.mark.parametrize("stream", [0, -2, "1", 1.5, 1 << 64])
def test_streams_that_are_none(stream):
    with running(), pytest.raises(ArgumentError, match="stream cannot be"):
        made().__dlpack__(stream=stream)


@pytest.mark.parametrize("version, versioned", [(None, False), ((0, 8), False), ((1, 0), True), ((1, 3), True)])
@pytest.mark.parametrize("copy", [None, True])
def test_versions(version, versioned, copy):
    """A consumer that knows none takes the old capsule; the new one says whether it is a copy."""
    with running():
        array = made()
        capsule = array.__dlpack__(max_version=version, copy=copy)
        assert bool(is_capsule(id(capsule), b"dltensor_versioned")) is versioned
        managed, found, _ = taken(capsule)
        assert (managed.tensor.device_type, managed.tensor.device_id) == array.__dlpack_device__() == (2, 0)
        assert (found.ctypes.data == array.device_ctypes_pointer.value) is (copy is None)
        if versioned:
            assert (managed.major, managed.minor, managed.flags) == (1, 0, 2 if copy else 0)


def test_the_device_is_that_of_the_array(monkeypatch):
    """Whichever is current."""
    with running():
        array = made()
        monkeypatch.setattr(array.gpu_data.context, "device", SimpleNamespace(id=3))
        monkeypatch.setattr(dlpack.cuda, "get_current_device", lambda: pytest.fail("nobody need ask"))
        assert array.__dlpack_device__() == (2, 3)
        assert part_of(array, 0, 1).__dlpack_device__() == (2, 3)


def test_to_the_host(right):
    """A copy, which waits for the integrals; NumPy asks for it."""
    with running(late=(0,)):
        engine = md4.Engine(BASIS, backend="cuda", stream=0)
        array = engine.compute(PAIRS, PAIRS)
        capsule = array.__dlpack__(dl_device=(1, 0))
        np.testing.assert_allclose(taken(capsule)[1], right, rtol=0, atol=1e-13)
        with pytest.raises(BufferError, match="copy=False"):
            array.__dlpack__(dl_device=(1, 0), copy=False)
        if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
            np.testing.assert_allclose(np.from_dlpack(array, device="cpu"), right, rtol=0, atol=1e-13)


@pytest.mark.parametrize("device", [(2, 1), (4, 0), (1,), "cpu"])
def test_other_devices_are_refused(device):
    with running(), pytest.raises(BufferError, match="but not to"):
        made().__dlpack__(dl_device=device)


def test_gaps_are_not_copied():
    with running():
        part = part_of(made(), 0, 2, 2)
        assert taken(part.__dlpack__())[1].shape == part.shape
        with pytest.raises(BufferError, match="gaps"):
            part.__dlpack__(copy=True)


def test_lifetime():
    """What a consumer has taken lives until it calls the deleter; what nobody takes goes with its capsule."""
    before = len(alive)
    with running():
        for version in (None, (1, 0)):
            capsule = made().__dlpack__(max_version=version)
            assert len(alive) == before + 1
            _, _, delete = taken(capsule)
            delete()
            assert len(alive) == before
            set_name(id(capsule), b"used")
            made().__dlpack__(max_version=version)
            gc.collect()
            assert len(alive) == before
