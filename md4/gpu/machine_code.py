"""From a kernel in Python to machine code for an architecture, which takes neither a device nor a driver."""

import struct

from cuda.bindings import nvrtc
from cuda.core import Linker, LinkerOptions, ObjectCode

from md4.gpu.device_code import cuda

# Kernels that spill many registers as the assembler usually orders their instructions
STACK = 600  # bytes of local memory of a thread from which on other options are tried
LEFT = 0.6  # share of them that may be left for these to be taken
OPTIONS = (("--register-usage-level=0",), ("-O1",))  # in turn: fewer registers are aimed at; hardly any reordering
# In a section .nv.info: the code of the size of a function's stack, and that of entries whose value has its own length.
FRAME_SIZE, SIZED = 0x11, 4


def machine_code(kernel, capability):
    """Machine code (cubin) of a `md4.gpu.compile.Kernel`: what is compiled as a whole when it is linked (LTO-IR)."""
    code, _ = cuda.compile(
        kernel.function, kernel.types(), device=False, abi="numba", cc=architecture(capability), output="ltoir",
        **kernel.options(),
    )  # fmt: skip
    cubin = linked(code, capability, (), kernel.registers)
    stack = stack_bytes(cubin)
    return (with_less_stack(code, capability, stack, kernel.registers) if stack >= STACK else None) or cubin


def architectures():
    """Names of the architectures that the compiler knows."""
    _, found = nvrtc.nvrtcGetSupportedArchs()
    return [f"sm_{number}" for number in found]


def architecture(capability):
    """(major, minor), followed by 'a' where instructions are only of this architecture."""
    return (*capability, "a") if capability >= (9, 0) else capability


def linked(code, capability, options=(), registers=None):
    """Machine code from LTO-IR, by options of the assembler, with so many registers of a thread at most."""
    arch = "sm_" + "".join(map(str, architecture(capability)))
    asked = LinkerOptions(
        arch=arch, link_time_optimization=True, max_register_count=registers, ptxas_options=list(options) or None
    )
    return bytes(Linker(ObjectCode.from_ltoir(code), options=asked).link("cubin").code)


def with_less_stack(code, capability, stack, registers=None):
    """Machine code by the first of the assembler's options that leave little of the `stack`, in bytes, or None."""
    for options in OPTIONS:
        try:
            cubin = linked(code, capability, options, registers)
        except Exception:  # of whatever type cuda.core makes it: an assembler may lack an option
            continue
        if stack_bytes(cubin) <= LEFT * stack:
            return cubin
    return None


def sections(cubin):
    """The sections of an ELF file of 64 bits, as {name: content}."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<I20xQQ", cubin, start + size * n) for n in range(count)]
    first = headers[names][1]
    return {
        cubin[first + name : cubin.index(b"\0", first + name)].decode(): cubin[place : place + length]
        for name, place, length in headers
    }


def entry_name(cubin):
    """Name of the kernel in machine code of one: only kernels have a bank of constants."""
    (name,) = [name for name in sections(cubin) if name.startswith(".nv.constant0.")]
    return name.removeprefix(".nv.constant0.")


def stack_bytes(cubin):
    """The largest stack of a function in machine code, where registers are spilled to."""
    info, place, largest = sections(cubin)[".nv.info"], 0, 0
    while place < len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, place)
        if attribute == FRAME_SIZE:
            largest = max(largest, struct.unpack_from("<I", info, place + 8)[0])
        place += 4 + length * (form == SIZED)
    return largest
