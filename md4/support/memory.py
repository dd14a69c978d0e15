"""Host memory: how much is free, how much the CPU backend holds, and checks of arrays to write to."""

import os
import resource
import weakref
from functools import cache
from itertools import count
from math import prod
from pathlib import Path

import numpy as np

from md4.errors import ArgumentError, MemoryLimitError
from md4.support.display import least_text, size_text

# Groups of version 1 without a limit report a number above this.
NO_LIMIT = 1 << 60
CGROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")


def check_out(out, shape):
    """Returns `out`; ArgumentError unless it is a writeable C-contiguous float64 NumPy array of `shape`."""
    plain = isinstance(out, np.ndarray) and not isinstance(out, (np.ma.MaskedArray, np.matrix))
    if not plain or out.shape != shape or out.dtype != np.float64 or not out.flags.c_contiguous:
        what = f"{type(out).__name__} {getattr(out, 'dtype', '')} of shape {getattr(out, 'shape', None)}"
        raise ArgumentError(f"out must be a C-contiguous float64 NumPy array of shape {shape}, not {what}.")
    if not out.flags.behaved:
        how = "aligned" if out.flags.writeable else "writeable"
        raise ArgumentError(f"out is not {how}; pass an array of your own, such as numpy.empty(shape).")
    return out


# What else may help where a tensor of each symmetry (`aosym` of its layout) does not fit.
SMALLER = {"s1": "use a higher aosym, ", "s4": "use a higher aosym, ", "three_s1": "use aosym='s2ij', "}
SMALLER |= {"int2e_ip1 s1": "use aosym='s2kl', ", "int3c2e_ip2 s1": "use aosym='s2ij', "}
SMALLER |= {"s8": "use aosym='s4' and "}
FILES = dict.fromkeys(("s1", "s4", "s8"), "numpy.memmap or h5py.Dataset")


def tensor_refusal(layout, need, limit, device=False):
    """The MemoryLimitError for the tensor of a layout of `md4.method.scatter` that does not fit.

    `need` are the bytes of the tensor and of the least workspace, `limit` those that may be used. `device`: the caller
    wants the tensor to stay on the GPU.
    """
    file = f"write to a file by out ({FILES.get(layout.aosym, 'numpy.memmap')})"
    return MemoryLimitError(
        f"the AO tensor of shape {layout.shape} takes {size_text(layout.nbytes)} and with the least workspace "
        f"{least_text(need)}, but {size_text(max(0, limit))} may be used; raise max_memory, "
        f"{SMALLER.get(layout.aosym, '')}take parts by shls_slice, or "
        f"{'leave it on the host (device=False)' if device else file}."
    )


# Memory of the operating system ---------------------------------------------------------------------------------------


def host_memory():
    """Bytes that this process can still allocate, by the machine, its control groups and its own limit."""
    return max(0, min(free_of_machine(), free_of_cgroups(), free_of_process()))


def check_fits(need, left, what, remedy="raise max_memory"):
    """MemoryLimitError if `need` bytes are more than are left; its message is `what`, both numbers, and a remedy."""
    if need > left:
        raise MemoryLimitError(f"{what} {least_text(need)}, but {size_text(max(0, left))} may be used; {remedy}.")


def host_array(shape, what):
    """A NumPy array for results; MemoryLimitError if the host has no memory for it."""
    need, left = 8 * int(np.prod(shape, dtype=object)), host_memory()
    if need > left:
        raise MemoryLimitError(f"{what} take {least_text(need)}, but the host has {size_text(left)} of memory.")
    return np.empty(shape)


def number_in(path, key=None):
    """The number in a file, or the number after `key` in a file of names and numbers; None if there is none."""
    try:
        text = Path(path).read_text()
    except OSError:
        return None
    words = text.split() if key is None else next((s.split()[1:] for s in text.splitlines() if s.startswith(key)), [])
    return int(words[0]) if words and words[0].isdecimal() else None


def free_of_machine():
    """Bytes that are available, according to the operating system."""
    free = number_in(PROC / "meminfo", "MemAvailable:")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if free is None else 1024 * free


def free_of_process():
    """Bytes of address space up to the limit that `ulimit -v` sets."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return float("inf")
    return limit - (number_in(PROC / "self" / "statm") or 0) * os.sysconf("SC_PAGE_SIZE")


def free_of_cgroups():
    """Bytes left to the control groups of the process, by which containers and batch systems limit memory."""
    return min((group_free(*files) for files in limited_groups(PROC, CGROUPS)), default=float("inf"))


def group_free(limit, used, statistics, reclaimable):
    """Bytes left to one group, including file pages that it can give up."""
    most, now = number_in(limit), number_in(used)
    if most is None or now is None:
        return float("inf")
    return most - now + (number_in(statistics, reclaimable) or 0)


@cache
def limited_groups(proc, cgroups):
    """`cgroup_files` of the groups that have a limit at the first call."""
    return tuple(files for files in cgroup_files(proc, cgroups) if (number_in(files[0]) or NO_LIMIT) < NO_LIMIT)


def cgroup_files(proc, cgroups):
    """(file of limit, file of use, file of statistics, name in it) of the process's groups and their parents.

    Both versions of control groups are known.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            root, names, key = cgroups, ("memory.max", "memory.current", "memory.stat"), "inactive_file "
        elif "memory" in controllers.split(","):
            root, key = cgroups / "memory", "total_inactive_file "
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
        else:
            continue
        group = root / place.lstrip("/")
        for folder in (group, *group.parents):
            if folder == cgroups.parent:
                break
            yield *(folder / name for name in names), key


# Memory of the CPU backend --------------------------------------------------------------------------------------------


class HostMemory:
    """Arrays of one engine on the CPU, which count against its cap as long as they live.

    Parameters
    ----------
    max_memory : float, optional
        Cap in MB. Without a cap nothing is counted.

    Attributes
    ----------
    kept : list of md4.cpu.run.Workspace
        Workspaces that wait for the next call. They go where an array does not fit beside them.
    """

    def __init__(self, max_memory=None):
        self.cap = None if max_memory is None else round(max_memory * 1e6)
        self.live, self.numbers, self.kept = {}, count(), []

    @property
    def held(self):
        """Bytes of the arrays that are counted."""
        return sum(list(self.live.values()))

    def watch(self, array, nbytes=None):
        """Counts an array, or another object of `nbytes`, until it is freed; returns it."""
        if self.cap is not None:
            number = next(self.numbers)
            weakref.finalize(array, self.live.pop, number, None)
            self.live[number] = array.nbytes if nbytes is None else nbytes
        return array

    def empty(self, shape, make=np.empty):
        """An array of float64 that is counted; its contents are undefined, or what `make` gives it."""
        if self.kept and 8 * prod(shape) > self.room():
            self.kept.clear()
        return self.watch(make(shape))

    def zeros(self, shape):
        """An array of zeros that is counted."""
        return self.empty(shape, np.zeros)

    @property
    def kept_bytes(self):
        """Bytes of the workspaces that are kept."""
        return sum(array.nbytes for work in self.kept for array in work)

    def left(self):
        """Bytes that can still be allocated beside the workspaces that are kept."""
        return host_memory() if self.cap is None else min(host_memory(), self.cap - self.held)

    def room(self):
        """Bytes up to the cap; infinite without a cap."""
        return float("inf") if self.cap is None else self.cap - self.held
