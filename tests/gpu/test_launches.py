"""Launches that a GPU refuses: the emulated one refuses them as well, and md4 asks for none of them."""

import pytest
from emulator import running
from emulator.machine import DeviceFault

from md4.gpu import device_code
from md4.gpu.buffers import Buffer
from md4.gpu.compile import Kernel, Variant
from md4.gpu.context import DeviceContext
from md4.gpu.device_code import F64, f64
from md4.gpu.kernels.narrow import launch_narrow


def with_array(bounds):
    """A factory: thread 0 writes to the last of 1024 doubles of static shared memory."""

    def kernel(out: F64):
        cuda = device_code.cuda  # that of the emulator
        static = cuda.shared.array(1024, f64)
        if cuda.threadIdx.x == 0:
            static[1023] = 1.0

    return Kernel(kernel, bounds)


def launch(grid, block, shared, bounds=None):
    """Does nothing with 8 kB of static shared memory."""
    context = DeviceContext()
    context.launch(Variant(with_array, (bounds,)), grid, block, shared, context.pool.get(1).part(0, (1,)))


KB = 1 << 10
REFUSED = {
    "no blocks": (0, 32, 0),
    "too many blocks": (1 << 31, 32, 0),
    "no threads": (1, 0, 0),
    "more registers than there are": (1, 288, 0),
    "more threads than its bounds": (1, 128, 0, (64, 1)),
    "static shared memory beside all there is": (1, 32, 224 * KB),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with running(), pytest.raises(DeviceFault):
        launch(*REFUSED[name])


def test_shared_memory_by_unit():
    """Of an H100 a block may have 227 kB, of an A100 163 kB."""
    for unit, most in (("dmma16", 227), ("dmma8", 163)):
        with running(unit):
            launch(1, 32, (most - 8) * KB)
            with pytest.raises(DeviceFault):
                launch(1, 32, (most - 7) * KB)


def test_no_numbers_in_single_precision():
    """Nothing is launched for them, as for a degree without primitive pairs in J alone."""
    with running() as machine:
        launch_narrow(DeviceContext(), *(Buffer(0, (0,), size, None) for size in (8, 4)))
    assert not machine.kernels
