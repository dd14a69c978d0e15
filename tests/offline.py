"""Compiles kernel variants to machine code without a GPU, and reads what ptxas says of them."""

import re
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

from numba import cuda


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
