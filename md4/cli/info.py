"""The text of `md4 info`: versions, GPUs, threads, and the cache of compiled code."""

import os
from collections import Counter

from md4.support.cache import cache_folder, cached_names
from md4.support.display import size_text
from md4.support.environment import gpus, one_line, versions


def folder_size(folder):
    """Bytes in all files below a folder; 0 if there is no such folder. Files that vanish meanwhile are not counted."""
    paths = [os.path.join(root, name) for root, _, files in os.walk(folder) for name in files]
    return sum(size_of(path) for path in paths)


def size_of(path):
    """Bytes of a file; 0 if they cannot be read."""
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def unusable(folder):
    """The reason why an existing folder cannot be used as the cache, or None."""
    if not os.path.lexists(folder):
        return None
    try:
        os.listdir(folder)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if os.access(folder, os.X_OK) else "cannot be entered"


def cpu_threads():
    """Number of threads of the CPU backend."""
    from md4.cpu.backend import CpuBackend
    from md4.method.operators import Operator

    return dict(CpuBackend(Operator.coulomb()).facts())["threads"]


def format_info():
    """All of this as text, with one fact in each line."""
    lines = [line(name, version or "not installed") for name, version in versions().items()]
    found, reason = gpus()
    lines += [line(f"GPU {i}", text) for i, text in enumerate(found)] or [line("GPU", f"none ({reason})")]
    lines.append(line("CPU", f"{os.cpu_count()} processors, threads of md4: {cpu_threads()}"))
    lines.append(line("backend", f"auto means {'cuda' if found else 'cpu'}"))
    return "\n".join(lines + cache_lines())


def line(name, text):
    return f"{name:<14}{text}"


def cache_lines():
    """Where the cache is, and what is in it for this source and toolchain: kernels of GPUs and functions of the CPU."""
    try:
        folder = cache_folder()
        reason = unusable(folder)
        if reason:
            return [line("cache", f"{folder} {reason}; set MD4_CACHE_DIR to a folder of yours")]
        size, kernels, functions = folder_size(folder), cached_names(".kernel"), cached_functions()
    except (OSError, RuntimeError) as error:  # the last where there is no home folder
        return [line("cache", f"unknown ({one_line(error)})")]
    return [
        line("cache", f"{folder} ({size_text(size)}; MD4_CACHE_DIR moves it)"),
        line("GPU kernels", f"{len(kernels)} compiled variants in the cache"),
        *(line("", name) for name in kernels),
        line("CPU functions", f"{functions.total()} compiled variants in the cache"),
        *(line("", name if count == 1 else f"{name}, {count} variants") for name, count in sorted(functions.items())),
    ]


def cached_functions():
    """How many compiled variants the cache has of each function of the CPU backend, by the function's name."""
    return Counter(name.rpartition("-")[0] for name in cached_names(".loop"))
