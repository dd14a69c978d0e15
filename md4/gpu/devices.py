"""Which GPUs a call uses, and how much of their memory where other processes use them, too."""

from md4.errors import ArgumentError, DeviceError
from md4.gpu import available, device_count
from md4.support.arguments import as_list, shown, whole_number
from md4.support.display import size_text
from md4.support.log import log


def chosen(devices, backend="auto", rank=None):
    """The devices of a call, one for each worker, as numbers of GPUs; [None] is the current GPU or the CPU.

    Parameters
    ----------
    devices : None, 'all', int or sequence of int
        What the caller asks for.
    backend : {'auto', 'cuda', 'cpu'}
    rank : int, optional
        Of this process on its node, if there are several: without `devices`, each takes its GPU in turn.

    Raises
    ------
    ArgumentError
        Something else, a device twice, or devices for the CPU.
    DeviceError
        A device that does not exist.
    """
    on_cpu = isinstance(backend, str) and backend == "cpu"  # the backend is checked where it is made
    count = 0 if on_cpu else device_count()
    if devices is None:
        return [None] if rank is None or count == 0 else [rank % count]
    if isinstance(devices, str) and devices == "all" and not on_cpu:
        return list(range(count)) or [None]
    given = as_list(devices if whole_number(devices) is None else [devices])
    numbers = [whole_number(n) for n in given or [None]]
    if None in numbers or len(set(numbers)) < len(numbers) or on_cpu:
        remedy = "the CPU backend has none" if on_cpu else "give 'all', or numbers of GPUs such as [0, 1]"
        raise ArgumentError(f"devices cannot be {shown(devices)}: {remedy}.")
    missing = [n for n in numbers if not 0 <= n < count]
    if missing:
        there = f"the GPUs here are 0 to {count - 1}" if count else "there is no usable GPU; see `md4 info`"
        raise DeviceError(f"there is no GPU {missing[0]}: {there}.")
    return numbers


def identities(numbers):
    """What tells the GPUs of a call from all others, by their numbers from `chosen`; none where there is no GPU."""
    if not available():
        return {}
    from md4.gpu.context import current_device, free_memory, identity

    found = {}
    for number in numbers:
        device = current_device() if number is None else number
        free_memory(device)  # makes the context, which takes memory as well
        found[device] = identity(device)
    return found


def memory_facts(devices):
    """[(device, bytes free, bytes that md4 holds there in this process)]."""
    if not devices:
        return []
    from md4.gpu.context import free_memory
    from md4.gpu.device_shares import held_on

    return [(device, free_memory(device), held_on(device)) for device in devices]


def take_shares(divided):
    """This process takes shares of devices: {device: (bytes that are free or md4's, processes) or None}.

    Of each share, as much is left to the driver as by a process that has the device for itself.
    """
    if not divided:
        return
    from md4.gpu.device_shares import Share, take_share
    from md4.gpu.pool import RESERVE_BYTES

    for device, of_all in divided.items():
        share = None
        if of_all is not None:
            nbytes, processes = of_all
            share = Share(max(0, nbytes // processes - RESERVE_BYTES), processes)
            log.debug("%d processes share GPU %d: %s for each", processes, device, size_text(share.nbytes))
        take_share(device, share)
