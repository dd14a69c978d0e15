"""Device arrays that speak DLPack besides ``__cuda_array_interface__``, so that any array library takes them uncopied.

The structures are those of dlpack.h, version 0.8 (the unversioned capsule that every consumer accepts).
"""

import ctypes

from numba.cuda.cudadrv.devicearray import DeviceNDArray

CUDA = 2  # kDLCUDA
CODES = {"f": 2, "c": 5}  # kDLFloat, kDLComplex
NAME, USED = b"dltensor", b"used_dltensor"


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
    pass


DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(DLManagedTensor))
DLManagedTensor._fields_ = [("tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", DELETER)]

CAPSULE_DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, CAPSULE_DESTRUCTOR]
is_capsule = ctypes.pythonapi.PyCapsule_IsValid
is_capsule.restype, is_capsule.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]
capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.restype, capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]

alive = {}  # managed tensors that a consumer or a capsule still holds, by address


@DELETER
def release(managed):
    alive.pop(ctypes.addressof(managed.contents), None)


@CAPSULE_DESTRUCTOR
def drop_unused(capsule):
    if is_capsule(capsule, NAME):  # nobody took it
        alive.pop(capsule_pointer(capsule, NAME), None)


class DeviceArray(DeviceNDArray):
    """A Numba device array with ``__dlpack__``."""

    def __dlpack_device__(self):
        from numba import cuda

        return CUDA, cuda.get_current_device().id

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Capsule for another library; `stream` (its stream) will wait for nothing: synchronise the engine's first."""
        if copy:
            raise BufferError("md4 exports without copying; copy in the receiving library.")
        managed = DLManagedTensor()
        shape = (ctypes.c_int64 * self.ndim)(*self.shape)
        strides = (ctypes.c_int64 * self.ndim)(*(s // self.dtype.itemsize for s in self.strides))
        managed.tensor = DLTensor(
            self.device_ctypes_pointer.value, *self.__dlpack_device__(), self.ndim, CODES[self.dtype.kind],
            8 * self.dtype.itemsize, 1, shape, strides, 0,
        )  # fmt: skip
        managed.deleter = release
        address = ctypes.addressof(managed)
        alive[address] = (managed, shape, strides, self)
        return new_capsule(address, NAME, drop_unused)
