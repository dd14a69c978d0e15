"""Many kernels in one file: what `md4 warmup --export` writes, and what the package md4-kernels holds.

A file has a line with the checksum and the length of an index, the index, and the kernels. Each kernel is compressed by
itself, so that one can be read without the others. The first line of the index says for what the kernels are made: a
state of md4's source, a major version of CUDA, and an architecture. Each further line has the name of a kernel, its
length in the file, its length when it is decompressed, and its checksum. The versions of Python and of the compiler's
packages, which are in the fingerprint of the cache, are not asked for: machine code that is there does not depend on
them.

A kernel is machine code for a GPU, nothing that the host would execute. Checksums find damage, but no forgery.
"""

import os
import re
import zlib
from importlib.util import find_spec
from pathlib import Path

from md4.support import cache
from md4.support.environment import version
from md4.support.files import replacing
from md4.support.locks import once
from md4.support.log import log

PACKAGE = "md4_kernels"
HEAD, LONGEST_HEAD = re.compile(rb"md4 kernels 1 ([0-9a-f]{64}) (\d{1,9})\n"), 128
# The name of a kernel becomes that of a file of the cache. No kernel takes a gigabyte.
ENTRY = re.compile(r"([\w.-]{1,200}) (\d{1,9}) (\d{1,9}) ([0-9a-f]{64})", re.ASCII)
ARCHITECTURE = re.compile(r"sm_\d{2,4}", re.ASCII)


def made_for():
    """For what this process needs kernels besides an architecture: (hash of md4's source, major version of CUDA).

    A driver takes machine code of its own CUDA and of older ones.
    """
    return str(cache.IMPORTED), str(version("cuda-bindings")).partition(".")[0]


def write(path, architecture, kernels):
    """Writes (name, kernel) pairs to a file, completely or not at all; OSError if the system refuses."""
    lines, packed = [" ".join([*made_for(), architecture])], []
    for name, kernel in kernels:
        packed.append(zlib.compress(kernel))
        lines.append(f"{name} {len(packed[-1])} {len(kernel)} {cache.checksum(kernel).decode()}")
    index = "\n".join(lines).encode()
    with replacing(path) as beside, open(beside, "wb") as file:
        file.writelines([b"md4 kernels 1 %b %d\n" % (cache.checksum(index), len(index)), index, *packed])


class Bundle:
    """A file of kernels. Its index is read and checked at once, a kernel when it is asked for.

    Parameters
    ----------
    path : str or Path
    architecture : str, optional
        Such as 'sm_90'; by default whichever the file has.

    Attributes
    ----------
    architecture : str
    entries : dict
        Of each kernel, by its name: place in the file, length there, length of the kernel, and checksum.

    Raises
    ------
    ValueError
        The file is damaged or not of use here. The message is the end of a sentence that begins with its name.
    OSError
        The file cannot be read.
    """

    def __init__(self, path, architecture=None):
        self.path, self.entries = path, {}
        with open(path, "rb") as file:
            head = HEAD.fullmatch(file.readline(LONGEST_HEAD))
            index = file.read(int(head[2])) if head else b""
            place, size = file.tell(), os.fstat(file.fileno()).st_size
        if not head or cache.checksum(index) != head[1]:
            raise ValueError("is damaged, or was not written by `md4 warmup --export`")
        facts, *lines = index.decode("ascii", "replace").split("\n")
        self.architecture = checked_facts(*facts.split(" "), wanted=architecture)
        for line in lines:
            entry = ENTRY.fullmatch(line)
            if not entry:
                raise ValueError(f"holds {line[:80]!r}, which no kernel of md4 is called")
            self.entries[entry[1]] = place, int(entry[2]), int(entry[3]), entry[4].encode()
            place += int(entry[2])
        if place != size:
            raise ValueError("is damaged: it is not as long as it says")

    def load(self, name):
        """The kernel of a name as `write` was given it, bytes; None if it cannot be read or is damaged."""
        place, length, size, check = self.entries[name]
        try:
            with open(self.path, "rb") as file:
                file.seek(place)
                kernel = zlib.decompressobj().decompress(file.read(length), size + 1)
        except (OSError, MemoryError, zlib.error):
            return None
        return kernel if cache.checksum(kernel) == check else None


def checked_facts(source, cuda="", found="", *more, wanted=None):
    """The architecture in the first line of an index, if its kernels can be used here; ValueError if not."""
    ours, our_cuda = made_for()
    if source != ours or cache.IMPORTED is None:
        raise ValueError("holds kernels of another version of md4")
    if cuda != our_cuda:
        raise ValueError(f"holds kernels made by CUDA {cuda}, but md4 is installed with CUDA {our_cuda}")
    if more or found != (wanted or found) or not ARCHITECTURE.fullmatch(found):
        raise ValueError(f"holds kernels for {' '.join([found, *more])}, not for {wanted or 'an architecture'}")
    return found


# the package md4-kernels ----------------------------------------------------------------------------------------------


@once
def installed(architecture):
    """The `Bundle` of the package md4-kernels; None where there is none that can be used, which the log says once."""
    try:
        package = find_spec(PACKAGE)
    except ValueError:  # a module of this name that came from nowhere
        return None
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder, f"{architecture}.kernels")
        try:
            if not cache.is_trusted(path.stat()) and not as_the_source(path.stat()):
                raise ValueError("can be written by others")
            return Bundle(path, architecture)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            log.info("%s %s, so it is not used; install the md4-kernels of this version of md4", path, error)
    return None


def as_the_source(status):
    """Whether the owner, group and permissions of a file are those of md4's source: who can write one can the other."""
    source = Path(cache.__file__).stat()
    return (status.st_uid, status.st_gid, status.st_mode) == (source.st_uid, source.st_gid, source.st_mode)


def is_installed(name, architecture):
    """Whether the package md4-kernels has a kernel, which is not read for this."""
    found = installed(architecture)
    return found is not None and name in found.entries


def installed_kernel(name, architecture):
    """A kernel of the package md4-kernels; None where it has none, or a damaged one, which the log says once."""
    if not is_installed(name, architecture):
        return None
    kernel = installed(architecture).load(name)
    if kernel is None:
        report_damage(installed(architecture).path)
    return kernel


@once
def report_damage(path):
    log.info("%s is damaged, and kernels are compiled in place of those that cannot be read; install it again", path)
