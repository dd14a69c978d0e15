"""A GPU of plain Python: md4's kernels run on host memory as the Python functions that they are.

`running` gives a device. The bodies of kernels and device functions are executed by Python. The intrinsics among them
exist as generators of LLVM IR only, with PTX in it: what they generate is translated to Python, IR by
`emulator.intrinsics` and PTX by `emulator.assembly`. Threads, warps and memory are those of `emulator.machine`,
what the host asks of CUDA is in `emulator.host`, and `emulator.races` finds races.

It checks what kernels compute, that they stay within the memory that is theirs, read nothing that nobody wrote (it
would not be a number), and wait for each other where they must. It refuses launches that a GPU refuses. It is slow: a
quartet takes milliseconds.
"""

from emulator.host import host_array, running

__all__ = ["host_array", "running"]
