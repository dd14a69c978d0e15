"""Which GPUs a call uses."""

from md4.errors import ArgumentError, DeviceError
from md4.gpu import device_count
from md4.support.arguments import as_list, shown, whole_number


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
