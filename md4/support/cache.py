"""Where compiled code is kept: a folder of the user's, and in it one for each state of md4's source and toolchain.

A file of the cache is a line with a checksum, a line of JSON that says what it holds, and the code. A file that is
torn, that holds something else than its name says, or that somebody else may have written is as good as none: the code
is compiled again. No trouble with a file ends a calculation.
"""

import hashlib
import json
import os
import stat
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

from md4.support.files import replacing

TOOLCHAIN = (
    "numpy", "numba", "llvmlite", "numba-cuda", "cuda-core", "cuda-bindings", "nvidia-cuda-nvcc", "nvidia-nvjitlink",
)  # fmt: skip
SOURCES = Path(__file__).parent.parent
MAGIC = b"md4 cache 2 "
# Others may read what this user compiles, and must not change it.
PERMISSIONS = 0o644
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def version(package):
    """Installed version of a package, or 'none'."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def hash_of_sources():
    """Hash of md4's source as it is on disk; None where it cannot be read."""
    digest = hashlib.sha256()
    try:
        for path in sorted(SOURCES.rglob("*.py")):
            digest.update(path.relative_to(SOURCES).as_posix().encode() + path.read_bytes())
    except OSError:
        return None
    return digest.hexdigest()


# What this process runs: the source as it was when it was imported, though a file may be edited later.
IMPORTED = hash_of_sources()


@cache
def fingerprint():
    """Hash of md4's source and of the versions of Python and everything that takes part in compiling."""
    parts = [sys.version, str(IMPORTED), *(version(package) for package in TOOLCHAIN)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def cache_folder():
    """Folder of the disk cache: `MD4_CACHE_DIR`, or 'md4' in the user's cache folder."""
    if os.environ.get("MD4_CACHE_DIR"):
        return Path(os.environ["MD4_CACHE_DIR"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "md4"


def entry_path(name):
    """File of the entry `name` for this source and toolchain."""
    return cache_folder() / fingerprint() / name


def is_trusted(status):
    """Whether a file's owner may decide what this process executes, and nobody else can have written it.

    Trusted are this user, root, and the owner of md4's source, who decides that anyway.
    """
    owners = {os.geteuid(), 0, SOURCES.stat().st_uid}
    return stat.S_ISREG(status.st_mode) and status.st_uid in owners and not status.st_mode & WRITABLE_BY_OTHERS


def trusted_bytes(path):
    """Content of a file that `is_trusted`, or None."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe in its place must not be waited for
        with open(handle, "rb") as file:
            return file.read() if is_trusted(os.fstat(handle)) else None
    except (OSError, MemoryError):
        return None


def load(path, facts):
    """The code that `store` wrote to `path` for `facts`, or None where there is none that can be relied on."""
    data = trusted_bytes(path)
    if data is None or not data.startswith(MAGIC):
        return None
    head, _, rest = data.partition(b"\n")
    if head != MAGIC + checksum(rest):
        return None
    found, _, code = rest.partition(b"\n")
    return code if found == encoded(facts) else None


def store(path, facts, code):
    """Writes code in one step, so that no other process sees half of it; a cache that cannot be written to is none.

    Parameters
    ----------
    path : Path
    facts : dict
        What the code is, in terms that JSON knows; `load` asks for the same.
    code : bytes
    """
    if hash_of_sources() != IMPORTED:
        return  # edited since it was imported: the folder's name would not say what the code was made from
    rest = encoded(facts) + b"\n" + code
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, PERMISSIONS, anew=True) as beside:
            beside.write_bytes(MAGIC + checksum(rest) + b"\n" + rest)
    except OSError:
        pass  # costs time, not results


def checksum(data):
    return hashlib.sha256(data).hexdigest().encode()


def encoded(facts):
    return json.dumps(facts, sort_keys=True).encode()
