"""Files that are there whole or not at all: written beside their place, then renamed."""

import os
import secrets
import shutil
import stat
from contextlib import contextmanager, suppress
from pathlib import Path

from md4.errors import ArgumentError


def name_beside(path):
    """A path in the folder of `path` that nothing has yet: 64 bytes at most of its name, as a name may have 255."""
    return path.parent / f".{path.name[:16]}.{secrets.token_hex(8)}.part"


@contextmanager
def replacing(path, mode=0o666, anew=False):
    """Path of an empty file beside `path`, which takes its place when the block ends.

    If the block raises, be it on a full disk or an interrupt, that file is removed and `path` is what it was. Only a
    process that is killed outright (SIGKILL) leaves its `.part` file.

    Parameters
    ----------
    path : str or Path
        A symbolic link stays one: the file that it points to is replaced. A hard link does not: its other names keep
        what they had.
    mode : int
        Permissions of a new file, less the process's umask; one that is replaced keeps its own, and its owner where
        the system allows that.
    anew : bool
        Whatever stands at `path` is replaced itself, also a symbolic link, and nothing of it is kept.

    Raises
    ------
    OSError
        The folder cannot be written to, or the disk is full.
    """
    path = Path(path if anew else os.path.realpath(path))
    beside = name_beside(path)
    try:
        os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        if not anew and path.exists():
            keep_owner_and_mode(path.stat(), beside)
        yield beside
        with open(beside, "rb") as file:
            os.fsync(file.fileno())  # a full disk may show only here
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def keep_owner_and_mode(old, path):
    """Gives the file at `path` the owner of a file whose `stat` is `old`, if that may be done, and its permissions."""
    with suppress(OSError):  # only root may give files away, and a group must be one's own
        os.chown(path, old.st_uid, old.st_gid)
    os.chmod(path, old.st_mode & 0o777)


def checked_target(name, size=0):
    """`name` as a path that `replacing` can write `size` bytes to; ArgumentError, before any work, where it cannot."""
    if "\0" in str(name):
        raise ArgumentError(f"{str(name)!r} cannot be the name of a file: it holds a zero byte.")
    path = Path(name)
    if not os.path.isdir(path.parent):
        raise ArgumentError(f"there is no folder {str(path.parent)!r} to write {path.name!r} into; make it first.")
    target = Path(os.path.realpath(path))
    try:
        check_replaceable(path, target)
        probe = name_beside(target)
        try:
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        finally:
            probe.unlink(missing_ok=True)
        free = shutil.disk_usage(target.parent).free
    except OSError as error:
        raise ArgumentError(f"cannot write {str(path)!r}: {error.strerror}; choose another place.") from error
    if size > free:
        raise ArgumentError(
            f"{str(path)!r} would take {amount(size)}, but its disk has {amount(free)} left; "
            "free some space or choose another place."
        )
    return path


def amount(size):
    """A number of bytes in words."""
    return f"{size} bytes" if size < 1e5 else f"{size / 1e6:.1f} MB"


def check_replaceable(path, target):
    """ArgumentError or OSError if what stands at `target`, to which `path` leads, may not be replaced by a new file."""
    try:
        status = os.lstat(target)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(status.st_mode):
        raise ArgumentError(f"{str(path)!r} is a folder; give the name of a file.")
    if not stat.S_ISREG(status.st_mode):
        raise ArgumentError(f"{str(path)!r} is a device, a pipe or the like; give the name of an ordinary file.")
    folder, user = os.stat(target.parent), os.geteuid()
    sticky = folder.st_mode & stat.S_ISVTX and user not in (0, status.st_uid, folder.st_uid)
    if sticky:
        raise ArgumentError(f"{str(path)!r} is there and may not be replaced by you; choose another name.")
    os.close(os.open(target, os.O_WRONLY))  # renaming would not ask whether the file is protected
