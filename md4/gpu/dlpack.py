"""Device arrays that speak DLPack besides ``__cuda_array_interface__``, so that any array library takes them uncopied.

The protocol is that of the array API standard 2023.12. The structures are those of dlpack.h 1.0, and those of 0.8 (the
capsule without a version) for consumers that do not name a version.

Work on the consumer's stream comes after all that the engine's stream was given before ``__dlpack__`` was called.
"""

import ctypes
from contextlib import nullcontext

import numpy as np
from numba.cuda.cudadrv.devicearray import DeviceNDArray

from md4.errors import ArgumentError
from md4.gpu.buffers import copy_on_device, copy_to_host
from md4.gpu.device_code import cuda
from md4.support.arguments import as_list, shown, whole_number

HOST, CUDA = (1, 0), 2  # kDLCPU, and kDLCUDA with the number of the device
CODES = {"f": 2, "c": 5}  # kDLFloat, kDLComplex
VERSION, COPIED = (1, 0), 2  # of the structures; DLPACK_FLAG_BITMASK_IS_COPIED
# The default stream is 0 for the driver and 1 for consumers, to whom 0 says nothing; -1 is no stream at all.
DEFAULT_STREAM, NO_ORDER = 1, -1
NAMES = b"dltensor", b"dltensor_versioned"


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


CAPSULE_DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, CAPSULE_DESTRUCTOR]
is_capsule = ctypes.pythonapi.PyCapsule_IsValid
is_capsule.restype, is_capsule.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]
capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.restype, capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]

alive = {}  # managed tensors that a consumer or a capsule still holds, by address


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def release(managed):
    """The deleter."""
    alive.pop(managed, None)


@CAPSULE_DESTRUCTOR
def drop_unused(capsule):
    for name in NAMES:
        if is_capsule(capsule, name):  # nobody took it
            alive.pop(capsule_pointer(capsule, name), None)


class DeviceArray(DeviceNDArray):
    """A Numba device array with ``__dlpack__``.

    Its memory, which slices and other views share, has `made_on`: the stream that makes its contents.
    """

    def __dlpack_device__(self):
        return CUDA, self.gpu_data.context.device.id

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Capsule for another library.

        Parameters
        ----------
        stream : int, optional
            The consumer's: None or 1 for the legacy default stream, 2 for that of the thread, else a handle; -1: the
            consumer orders its work itself.
        max_version : tuple of int, optional
            The newest version of DLPack that the consumer knows; None is one before 1.0.
        dl_device : tuple of int, optional
            Where the consumer wants the array: on its device, or (1, 0), in host memory.
        copy : bool, optional
            True: a copy in any case. False: none in any case.

        Raises
        ------
        ArgumentError
            No such stream.
        BufferError
            Another device, or the host without a copy.
        """
        here, stream = self.__dlpack_device__(), checked_handle(stream)
        there = here if dl_device is None else tuple(map(whole_number, as_list(dl_device) or ()))
        if there not in (here, HOST):
            raise BufferError(f"the array is on device {here}; it goes to {HOST}, host memory, but not to {there}.")
        if there == HOST and copy is False:
            raise BufferError("the array is in device memory; copy=False leaves it there.")
        made_on = self.gpu_data._mem.made_on
        with cuda.gpus[here[1]] if cuda.get_current_device().id != here[1] else nullcontext():
            exported = self._on_host(made_on) if there == HOST else self._copied(made_on) if copy else self
            if there != HOST:
                put_in_order(made_on, stream)
        versioned = max_version is not None and max_version[0] >= VERSION[0]
        return capsule(exported, there, exported is not self, versioned)

    def _on_host(self, stream):
        """A NumPy array of the same contents."""
        out = np.empty(self.shape, self.dtype)
        copy_to_host(out, self._contiguous_pointer(), stream)
        return out

    def _copied(self, stream):
        """An array of its own with the same contents; its memory is in no cap of an engine."""
        memory = cuda.current_context().memalloc(max(1, self.nbytes))
        copy_on_device(memory.device_ctypes_pointer.value, self._contiguous_pointer(), self.nbytes, stream)
        memory._mem.made_on = stream
        return DeviceArray(self.shape, self.strides, self.dtype, gpu_data=memory)

    def _contiguous_pointer(self):
        """The address; BufferError for an array with gaps, which is not copied."""
        if not self.is_c_contiguous():
            raise BufferError("the array has gaps between its elements; copy it in the receiving library.")
        return self.device_ctypes_pointer.value


def checked_handle(stream):
    """The consumer's stream as the driver knows it, or `NO_ORDER`."""
    number = DEFAULT_STREAM if stream is None else whole_number(stream)
    if number is None or number == 0 or not NO_ORDER <= number < 1 << 64:
        raise ArgumentError(
            f"stream cannot be {shown(stream)}: it is None, -1, 1 (the default stream), 2 (that of the thread), or the "
            "handle of a CUDA stream."
        )
    return number


def put_in_order(made_on, stream):
    """What `stream` will be given comes after what the stream `made_on` was given."""
    if stream in (NO_ORDER, int(made_on.handle) or DEFAULT_STREAM):
        return
    event = cuda.event(timing=False)
    event.record(made_on)
    event.wait(cuda.external_stream(stream))


def capsule(array, device, copied, versioned):
    """The capsule of an array of Numba or NumPy, which lives as long as the consumer wants it."""
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    strides = (ctypes.c_int64 * array.ndim)(*(s // array.dtype.itemsize for s in array.strides))
    pointer = array.ctypes.data if device == HOST else array.device_ctypes_pointer.value
    bits, code = 8 * array.dtype.itemsize, CODES[array.dtype.kind]
    tensor = DLTensor(pointer, *device, array.ndim, code, bits, 1, shape, strides, 0)
    deleter = ctypes.cast(release, ctypes.c_void_p)
    if versioned:
        managed = DLManagedTensorVersioned(*VERSION, None, deleter, COPIED if copied else 0, tensor)
    else:
        managed = DLManagedTensor(tensor, None, deleter)
    address = ctypes.addressof(managed)
    alive[address] = (managed, shape, strides, array)
    return new_capsule(address, NAMES[versioned], drop_unused)
