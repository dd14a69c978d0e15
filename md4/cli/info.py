"""The text of `md4 info`: versions, GPUs, and the cache of compiled kernels."""

import os

from md4.support.environment import gpus, one_line, versions


def cache():
    """(folder, bytes in it, list of compiled variants) of the kernel cache."""
    from md4.gpu import compile as dispatch

    folder = dispatch.cache_folder()
    return folder, folder_size(folder), list(dispatch.cached_variants())


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


def format_info():
    """All of this as text, with one fact in each line."""
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
