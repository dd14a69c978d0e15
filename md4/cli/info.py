"""What md4 finds on this machine: versions, GPUs, and the cache of compiled kernels."""

import os
import platform
from importlib import metadata

PACKAGES = ("md4", "numpy", "scipy", "numba", "numba-cuda", "llvmlite", "cuda-toolkit", "cuda-bindings", "pyscf")


def versions():
    """{name: version} of Python and of the packages that md4 computes with; None where one is not installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def gpus():
    """(list of GPU descriptions, reason); the reason says why the list is empty, else it is None.

    Looks for the driver, so it is called on demand only, never at import.
    """
    try:
        from numba import cuda

        if not cuda.is_available():
            return [], driver_error()
        return [describe_gpu(device) for device in cuda.gpus], None
    except Exception as error:  # a broken driver may raise anything; `md4 info` is there to say so
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
    """Why there is no usable GPU, in the driver interface's own words."""
    from numba import cuda

    try:
        len(cuda.gpus)
    except Exception as error:  # as above
        return one_line(error)
    return "no usable CUDA driver or toolkit; pip install 'md4[cu13]' or 'md4[cu12]' to match the driver"


def one_line(error):
    """An exception's text on one line."""
    return " ".join(str(error).split()).rstrip(" :.") or type(error).__name__


def cache():
    """(folder, bytes in it, list of compiled variants) of the kernel cache."""
    from md4.gpu import compile as dispatch

    folder = dispatch.cache_folder()
    return folder, folder_size(folder), list(dispatch.cached_variants())


def folder_size(folder):
    """Bytes in all files below a folder; 0 where there is none. Files that vanish meanwhile count nothing."""
    paths = [os.path.join(root, name) for root, _, files in os.walk(folder) for name in files]
    return sum(size_of(path) for path in paths)


def size_of(path):
    """Bytes of a file, 0 if it cannot be asked."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def unusable(folder):
    """Why a folder that is there cannot be used as the cache, or None."""
    if not os.path.lexists(folder):
        return None
    try:
        os.listdir(folder)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if os.access(folder, os.X_OK) else "cannot be entered"


def format_info():
    """All of it as text, one fact a line."""
    lines = [f"{name:<14}{version or 'not installed'}" for name, version in versions().items()]
    found, reason = gpus()
    lines += [f"{'GPU ' + str(i):<14}{text}" for i, text in enumerate(found)] or [f"{'GPU':<14}none ({reason})"]
    lines.append(f"{'backend':<14}auto means {'cuda' if found else 'cpu'} on {os.cpu_count()} CPU threads")
    return "\n".join(lines + cache_lines())


def cache_lines():
    """Where the kernel cache is, and what is in it."""
    from md4.support.cache import cache_folder

    try:
        reason = unusable(cache_folder())
        if reason:
            return [f"{'cache':<14}{cache_folder()} {reason}; set MD4_CACHE_DIR to a folder of yours"]
        folder, size, variants = cache()
    except (ImportError, OSError, RuntimeError) as error:  # the last where there is no home folder
        return [f"{'cache':<14}unknown ({one_line(error)})"]
    lines = [
        f"{'cache':<14}{folder} ({size / 2**20:.1f} MiB; MD4_CACHE_DIR moves it)",
        f"{'kernels':<14}{len(variants)} compiled variants in the cache",
    ]
    return lines + [f"{'':<14}{variant}" for variant in variants]
