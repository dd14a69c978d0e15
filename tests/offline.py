"""Kernel variants without a GPU: which ones the launchers ask for, their machine code, and what ptxas says of it."""

import re
import shutil
import subprocess
import sysconfig
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from numba import cuda

from md4.basis import Basis
from md4.kernels import hermite, recurrence, scatter, transform
from md4.operators import OPERATORS, Operator
from md4.pairs import shell_pairs

# The arithmetic unit that each architecture takes; see md4.gpu.arithmetic_unit.
UNITS = {(8, 0): "dmma8", (9, 0): "dmma16", (10, 0): "dmma16"}
# Shared memory (bytes) that one block may have.
SHARED_LIMIT = {(8, 0): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
REGISTERS = 255


@contextmanager
def capability(cc):
    """Lets kernels that call device functions compile where there is no device to ask for its capability."""
    from numba.cuda import api, dispatcher

    class Device:
        compute_capability = cc

    saved = dispatcher.get_current_device, api.get_current_device
    dispatcher.get_current_device = api.get_current_device = Device
    try:
        yield
    finally:
        dispatcher.get_current_device, api.get_current_device = saved


def compile_ptx(variant, cc):
    """PTX of a variant."""
    kernel = variant.kernel()
    with capability(cc):
        ptx, _ = cuda.compile(
            kernel.function, kernel.signature, device=False, abi="numba", output="ptx", cc=cc, **kernel.options()
        )
    return ptx


# ptxas ----------------------------------------------------------------------------------------------------------------


def find_ptxas():
    """The assembler of the CUDA wheels, or the one on the path; None where there is neither."""
    wheels = Path(sysconfig.get_path("purelib"), "nvidia")
    found = sorted(wheels.glob("cu*/bin/ptxas")) + sorted(wheels.glob("cuda_nvcc/bin/ptxas"))
    return str(found[-1]) if found else shutil.which("ptxas")


@dataclass(frozen=True)
class Usage:
    """What a kernel takes: registers of a thread, static shared memory of a block, and bytes of spills."""

    registers: int
    shared: int
    spill: int


def assemble(ptx, cc):
    """`Usage` of the machine code of a PTX text."""
    arch = f"sm_{cc[0]}{cc[1]}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [find_ptxas(), "-v", f"-arch={arch}", str(source), "-o", str(source.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    def largest(pattern):
        return max((int(n) for n in re.findall(pattern, done.stderr)), default=0)

    stores, loads = largest(r"(\d+) bytes spill stores"), largest(r"(\d+) bytes spill loads")
    return Usage(largest(r"Used (\d+) registers"), largest(r"(\d+) bytes smem"), max(stores, loads))


def usage(job):
    """`Usage` of a (variant, capability)."""
    variant, cc = job
    return assemble(compile_ptx(variant, cc), cc)


# what the launchers ask for -------------------------------------------------------------------------------------------


class Recorder:
    """Stands in for `md4.dispatch.launch`: keeps each variant with the most dynamic shared memory asked for."""

    def __init__(self):
        self.shared = {}

    def __call__(self, variant, grid, block, stream, shared, *args):
        self.shared[variant] = max(shared, self.shared.get(variant, 0))


@contextmanager
def recording():
    """A `Recorder` behind all launchers; tables are not sent anywhere."""
    recorder = Recorder()
    with ExitStack() as stack:
        for module in (hermite, recurrence, scatter, transform):
            stack.enter_context(patch.object(module, "launch", recorder))
            if hasattr(module, "table_on_device"):
                stack.enter_context(patch.object(module, "table_on_device", lambda *args: None))
        yield recorder


def pair_list(la, lb, nprim, pure):
    """One prepared pair (la, lb) of `nprim` primitives, on one centre."""
    one = np.ones(nprim)
    basis = Basis.from_arrays([la, lb], [one, [1.0]], [one, [1.0]], np.zeros((2, 3)), pure=pure)
    data = SimpleNamespace(start=None, records=None, width=0)
    return SimpleNamespace(pairs=shell_pairs(basis, [[0, 1]]), first=0, first_prim=0, data=data)


def transform_variants(unit, lmax=6):
    """Variants of both transforms, with their shared memory, for all classes up to (ll|ll) with l = `lmax`."""
    sides = [(la, lb) for la in range(lmax + 1) for lb in range(la + 1)]
    lists = {(s, k, pure): pair_list(*s, k, pure) for s in sides for k in (1, 2) for pure in (True, False)}
    block = SimpleNamespace(array=None, first=0, strides=(0, 0, 0, 0))
    with recording() as recorder:
        for bra, ket, k, pure in product(sides, sides, (1, 2), (True, False)):
            ab, cd = lists[bra, k, pure], lists[ket, 1, pure]
            transform.launch_bra_transform(unit, None, ab, cd, None, None, None)
            transform.launch_ket_transform(unit, None, None, ab, cd, block, None)
    return recorder.shared


def other_variants(lmax=6, kinds=OPERATORS):
    """Variants of all other kernels, with their shared memory."""
    with recording() as recorder:
        for kind in kinds:
            operator = Operator(kind, 0.0 if kind == "coulomb" else 0.3)
            for l in range(4 * lmax + 1):
                recurrence.launch_r(l, operator, (None, 0, 0, 1), (None, 0, 0, 1), 1, None, None)
        hermite.launch_h_panels(pair_list(lmax, lmax, 1, False).pairs, None, False, None, None)
        for aosym in ("s1", "s4", "s8"):
            scatter.launch_scatter(aosym, None, 1, [None] * 4, None, False, False, None, None, None)
    return recorder.shared


def every_variant(cc):
    """All variants that classes up to (ii|ii) use on an architecture, plain multiply-adds included."""
    return transform_variants(UNITS[cc]) | transform_variants("fma") | other_variants()
