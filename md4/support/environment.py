"""The versions of packages and the GPUs of this machine."""

import platform
from importlib import metadata

PACKAGES = ("md4", "numpy", "scipy", "numba", "numba-cuda", "llvmlite", "cuda-toolkit", "cuda-bindings", "pyscf")


def versions():
    """{name: version} of Python and of the packages that md4 computes with; None if a package is not installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def gpus():
    """(list of GPU descriptions, reason). The reason says why the list is empty, else it is None.

    This looks for the driver, so it is called only on demand, never at import.
    """
    try:
        from numba import cuda

        if not cuda.is_available():
            return [], driver_error()
        return [describe_gpu(device) for device in cuda.gpus], None
    except Exception as error:  # a broken driver may raise anything, and `md4 info` has to report it
        return [], one_line(error)


def describe_gpu(gpu):
    """Name, compute capability and memory of one GPU."""
    from numba import cuda

    with gpu:
        free, total = cuda.current_context().get_memory_info()
        device = cuda.get_current_device()
        name = device.name.decode() if isinstance(device.name, bytes) else device.name
        major, minor = device.compute_capability
        return f"{name}, sm_{major}{minor}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def driver_error():
    """The reason why there is no usable GPU, in the words of the driver interface."""
    from numba import cuda

    try:
        len(cuda.gpus)
    except Exception as error:  # as above
        return one_line(error)
    return "no usable CUDA driver or toolkit; pip install 'md4[cu13]' or 'md4[cu12]' to match the driver"


def one_line(error):
    """The text of an exception on one line."""
    return " ".join(str(error).split()).rstrip(" :.") or type(error).__name__
