"""Where compiled code is kept: a folder of the user's, and in it one for each state of md4's source and toolchain."""

import hashlib
import os
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

TOOLCHAIN = (
    "numpy", "numba", "llvmlite", "numba-cuda", "cuda-core", "cuda-bindings", "nvidia-cuda-nvcc", "nvidia-nvjitlink",
)  # fmt: skip


def version(package):
    """Installed version of a package, or 'none'."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


@cache
def fingerprint():
    """Hash of md4's source and of the versions of Python and everything that takes part in compiling."""
    digest = hashlib.sha256(sys.version.encode())
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    digest.update(" ".join(version(p) for p in TOOLCHAIN).encode())
    return digest.hexdigest()[:16]


def cache_folder():
    """Folder of the disk cache: `MD4_CACHE_DIR`, or 'md4' in the user's cache folder."""
    if os.environ.get("MD4_CACHE_DIR"):
        return Path(os.environ["MD4_CACHE_DIR"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "md4"
