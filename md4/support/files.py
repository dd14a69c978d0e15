"""Files that are written completely or not at all: they are written beside their final place, then renamed."""

import os
import secrets
import shutil
import stat
from contextlib import contextmanager, suppress
from pathlib import Path

from md4.errors import ArgumentError
from md4.support.display import size_text


def name_beside(path):
    """A new path in the folder of `path`, which begins with 16 characters of its name."""
    return path.parent / f".{path.name[:16]}.{secrets.token_hex(8)}.part"


@contextmanager
def replacing(path, mode=0o666, anew=False):
    """Path of an empty file beside `path`, which replaces `path` when the block ends.

    If the block raises, for example on a full disk or by an interrupt, this file is removed and `path` stays as it was.
    Only a process that is killed by SIGKILL leaves its `.part` file.

    Parameters
    ----------
    path : str or Path
        If it is a symbolic link, the file to which it points is replaced. If it is a hard link, the other names keep
        the old content.
    mode : int
        Permissions of a new file, less the umask of the process. A file that is replaced keeps its permissions, and
        its owner if the system allows that.
    anew : bool
        If true, whatever is at `path` is replaced itself, even a symbolic link, and nothing of it is kept.

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
            os.fsync(file.fileno())  # the error of a full disk may come only here
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def keep_owner_and_mode(old, path):
    """Gives the file at `path` the permissions of the file whose `stat` is `old` and, if possible, its owner."""
    with suppress(OSError):  # only root may change owners, and a user only to its own groups
        os.chown(path, old.st_uid, old.st_gid)
    os.chmod(path, old.st_mode & 0o777)


def checked_target(name, size=0):
    """`name` as a path; ArgumentError, before any work, if `replacing` could not write `size` bytes to it."""
    try:
        possible = b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise ArgumentError(f"{str(name)!r} cannot be the name of a file: it holds a zero byte or half a character.")
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
            f"{str(path)!r} would take {size_text(size)}, but its disk has {size_text(free)} left; "
            "free some space or choose another place."
        )
    return path


def check_replaceable(path, target):
    """ArgumentError or OSError if `target`, to which `path` points, may not be replaced by a new file."""
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
    os.close(os.open(target, os.O_WRONLY))  # renaming would not check whether the file is protected
