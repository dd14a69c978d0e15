"""The GPU backend: device and memory, compiled kernels, and the paths by which classes are computed.

Its modules need numba-cuda, which comes with the extras cu12 and cu13. This one does not: it is asked first.
"""

from md4.errors import DeviceError
from md4.support.environment import missing_for_gpu
from md4.support.log import log


def check_installed():
    """DeviceError without the packages for GPUs."""
    reason = missing_for_gpu()
    if reason:
        raise DeviceError(f"{reason}. backend='cpu' works without.")


def available():
    """Whether a usable GPU, a CUDA compiler and the packages for them are there."""
    reason = missing_for_gpu()
    if reason:
        log.debug("no GPU: %s", reason)
        return False
    from md4.gpu.context import gpu_available

    return gpu_available()


def device_count():
    """Number of usable GPUs of this process."""
    if not available():
        return 0
    from md4.gpu.context import device_count as count

    return count()


def make_backend(operator, stream, max_memory, device=None):
    """A `md4.gpu.backend.GpuBackend` on a device, the current one by default; DeviceError where there can be none."""
    check_installed()
    from md4.gpu.backend import GpuBackend

    return GpuBackend(operator, stream, max_memory, device)
