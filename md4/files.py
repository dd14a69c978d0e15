"""Files that are there whole or not at all: written beside their place, then renamed."""

import os
import secrets
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path, mode=0o666):
    """Path of an empty file beside `path`, which takes its place when the block ends.

    If the block raises, be it on a full disk or an interrupt, that file is removed and `path` is what it was.

    Parameters
    ----------
    path : str or Path
        A symbolic link stays one: the file that it points to is replaced.
    mode : int
        Permissions of a new file, less the process's umask; one that is replaced keeps its own.

    Raises
    ------
    OSError
        The folder cannot be written to, or the disk is full.
    """
    path = Path(os.path.realpath(path))
    beside = path.parent / f".{path.name[:64]}.{secrets.token_hex(8)}.part"
    try:
        os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        if path.exists():
            os.chmod(beside, path.stat().st_mode & 0o7777)
        yield beside
        with open(beside, "rb") as file:
            os.fsync(file.fileno())  # a full disk may show only here
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
