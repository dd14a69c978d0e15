"""The versions of packages, the GPUs of this machine, and how md4 is installed with an extra."""

import json
import os
import platform
from functools import cache
from importlib import metadata, util
from shlex import quote
from urllib.parse import urlsplit
from urllib.request import url2pathname

PACKAGES = (
    "md4", "md4-kernels", "numpy", "numba", "numba-cuda", "llvmlite", "cuda-toolkit", "cuda-bindings", "pyscf",
)  # fmt: skip
# The series of numba-cuda whose internals md4 uses; pyproject.toml requires the same.
NUMBA_CUDA = "0.30"


def version(package):
    """The installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions():
    """{name: version} of Python and of the packages that md4 computes with; None if a package is not installed."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def installed_from():
    """What pip takes to install md4 again, without extras: options and a requirement; None if that is not known.

    pip writes down where a package came from unless this was a package index (PEP 610).
    """
    try:
        origin = json.loads(metadata.distribution("md4").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return None
    if not origin:
        return [], "md4"
    folder = url2pathname(urlsplit(origin.get("url", "")).path)
    if "dir_info" not in origin or not os.path.isfile(os.path.join(folder, "pyproject.toml")):
        return None
    return ["-e"] if origin["dir_info"].get("editable") else [], folder


def way_to_extra(extra):
    """How this md4 gets an extra, as the end of a sentence. A command is given only where it is known to work."""
    found = installed_from()
    if found is None:
        return f"install md4 with its extra {extra}, as its README shows"
    options, name = found
    return f"run `{' '.join(['pip install', *options, quote(f'{name}[{extra}]')])}`"


def way_to_gpu():
    """How md4 gets its packages for GPUs, as the end of a sentence."""
    return f"{way_to_extra('cu13')}, with cu12 in place of cu13 for a driver older than 580"


def way_to_cupy():
    """How md4 gets CuPy with the libraries it uses, as the end of a sentence."""
    return f"{way_to_extra('df-cu13')}, with df-cu12 in place of df-cu13 for a driver older than 580"


@cache
def missing_for_gpu():
    """The reason why md4 has no packages for GPUs, with the remedy; None if it has them.

    Numba has a module `numba.cuda` of its own, so that an import alone would not show that numba-cuda is missing.
    """
    found = version("numba-cuda") if util.find_spec("numba_cuda") else None
    if found is None:
        return f"numba-cuda is not installed; {way_to_gpu()}"
    if not found.startswith(f"{NUMBA_CUDA}."):
        return f"numba-cuda {found} is installed, but md4 needs {NUMBA_CUDA}; {way_to_gpu()}"
    return None


def gpus():
    """(list of GPU descriptions, reason). The reason says why the list is empty, else it is None.

    This looks for the driver, so it is called only on demand, never at import.
    """
    reason = missing_for_gpu()
    if reason:
        return [], reason
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
    return f"no usable CUDA driver or toolkit; {way_to_gpu()}"


def one_line(error):
    """The text of an exception on one line."""
    return " ".join(str(error).split()).rstrip(" :.") or type(error).__name__
