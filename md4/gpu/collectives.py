"""Sums over several GPUs by NCCL, which is used through CuPy where that is installed."""

import socket

from cuda.bindings import driver

from md4.gpu.buffers import check
from md4.support.log import log


def nccl():
    """CuPy's module for NCCL; None where there is none."""
    try:
        from cupy.cuda import nccl as found
    except Exception as error:  # an installation that does not fit the driver fails in many ways
        log.debug("no NCCL: %s", error)
        return None
    return found if found.available else None


def place(device):
    """(host, address on its bus) of a GPU, if NCCL is there; else None."""
    if nccl() is None:
        return None
    error, address = driver.cuDeviceGetPCIBusId(32, device)
    check(error, "asking for the address of a GPU")
    return socket.gethostname(), bytes(address).partition(b"\0")[0].decode()


class Group:
    """One of several GPUs that add up what they have, each from a thread or a process of its own.

    Made by all members at the same time, each with its device current.

    Parameters
    ----------
    identity
        By `md4.gpu.backend.GpuBackend.new_group`, the same for all.
    number, size : int
        Of this member, counted from 0, and of all.
    stream
        On which this member works.
    """

    def __init__(self, identity, number, size, stream):
        self.module, self.stream = nccl(), int(stream.handle)
        self.communicator = self.module.NcclCommunicator(size, identity, number)

    def add_up(self, buffers):
        """Replaces numbers in device memory by their sums over all members, who give buffers of the same sizes."""
        for buffer in buffers:
            if buffer.size:
                self.communicator.allReduce(
                    buffer.pointer, buffer.pointer, buffer.size, self.module.NCCL_FLOAT64, self.module.NCCL_SUM,
                    self.stream,
                )  # fmt: skip
