"""The cache of compiled code: a folder of the user, with a folder in it for each state of md4's source and toolchain.

A file of the cache consists of a line with a checksum, a line of JSON that says what the file holds, and the code. A
file is ignored, and the code compiled again, if the file is damaged, if it holds something else than its name says, or
if somebody else may have written it. No problem with a file ends a calculation.
"""

import hashlib
import json
import os
import stat
import sys
import tempfile
from functools import cache
from pathlib import Path

from md4.support.environment import version
from md4.support.files import replacing

TOOLCHAIN = (
    "numpy", "numba", "llvmlite", "numba-cuda", "cuda-core", "cuda-bindings", "nvidia-cuda-nvcc", "nvidia-nvjitlink",
)  # fmt: skip
SOURCES = Path(__file__).parent.parent
MAGIC = b"md4 cache 2 "
# Others may read the files of this user, but must not change them.
PERMISSIONS = 0o644
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def hash_of_sources():
    """Hash of md4's source as it is on disk; None if it cannot be read."""
    digest = hashlib.sha256()
    try:
        for path in sorted(SOURCES.rglob("*.py")):
            digest.update(path.relative_to(SOURCES).as_posix().encode() + path.read_bytes())
    except OSError:
        return None
    return digest.hexdigest()


# The source that this process runs, as it was when it was imported. A file may be edited later.
IMPORTED = hash_of_sources()


@cache
def fingerprint():
    """Hash of md4's source and of the versions of Python and of all packages that take part in compiling."""
    parts = [sys.version, str(IMPORTED), *(version(package) or "none" for package in TOOLCHAIN)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def cache_folder():
    """The folder of the cache: `MD4_CACHE_DIR`, or 'md4' in the cache folder of the user.

    A user without a home, as in a container, has a folder among the temporary ones.
    """
    if os.environ.get("MD4_CACHE_DIR"):
        return Path(os.environ["MD4_CACHE_DIR"])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "md4"
    try:
        return Path.home() / ".cache" / "md4"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"md4-{os.geteuid()}"


def entry_path(name):
    """The file of the entry `name` for this source and toolchain."""
    return cache_folder() / fingerprint() / name


def cached_names(suffix):
    """Names of the entries with a suffix, such as '.kernel', that are there for this source and toolchain."""
    return sorted(path.stem for path in (cache_folder() / fingerprint()).glob(f"*{suffix}"))


def is_trusted(status):
    """Whether a file's owner may decide what this process executes, and nobody else can have written it.

    Trusted are this user, root, and the owner of md4's source, who decides what is executed anyway.
    """
    owners = {os.geteuid(), 0, SOURCES.stat().st_uid}
    return stat.S_ISREG(status.st_mode) and status.st_uid in owners and not status.st_mode & WRITABLE_BY_OTHERS


def trusted_bytes(path):
    """The content of a file that `is_trusted`, or None."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # not waiting if the name is that of a pipe
        with open(handle, "rb") as file:
            return file.read() if is_trusted(os.fstat(handle)) else None
    except (OSError, MemoryError):
        return None


def load(path, facts):
    """The code that `store` wrote to `path` for `facts`; None if there is none that can be trusted."""
    data = trusted_bytes(path)
    if data is None or not data.startswith(MAGIC):
        return None
    head, _, rest = data.partition(b"\n")
    if head != MAGIC + checksum(rest):
        return None
    found, _, code = rest.partition(b"\n")
    return code if found == encoded(facts) else None


def store(path, facts, code):
    """Writes code that this process compiled, unless md4 was edited since it was imported; see `write`."""
    if hash_of_sources() == IMPORTED:  # else the name of the folder would not fit the code
        write(path, facts, code)


def write(path, facts, code):
    """Writes code in one step, so that no other process sees half of it.

    Parameters
    ----------
    path : Path
    facts : dict
        What the code is, in types that JSON can represent; `load` must be given the same.
    code : bytes

    Returns
    -------
    written : bool
        Whether the cache could be written. If not, this costs time, but no results.
    """
    rest = encoded(facts) + b"\n" + code
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, PERMISSIONS, anew=True) as beside:
            beside.write_bytes(MAGIC + checksum(rest) + b"\n" + rest)
    except OSError:
        return False
    return True


def checksum(data):
    return hashlib.sha256(data).hexdigest().encode()


def encoded(facts):
    return json.dumps(facts, sort_keys=True).encode()
