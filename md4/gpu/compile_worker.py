"""What lets a process that only compiles do so twice as fast, and without a device.

It patches Numba, so it is for processes that md4 starts for this (`md4.gpu.warmup`) and for the tests, never for the
user's. The machine code is the same.
"""

from functools import lru_cache

from numba.core.types.functions import BaseFunction
from numba.cuda import dispatcher

from md4.gpu import device_code
from md4.support.processes import collect_seldom

# Device functions that are shared. One of unrolled code holds megabytes.
FUNCTIONS = 50
PLAIN = (bool, int, str, bytes, type(None))


def start(capability):
    """Makes this process a compile worker for a compute capability (major, minor); to be called once."""
    compile_for(capability)
    hasten()


def compile_for(capability):
    """Lets Numba compile for a compute capability without asking a device, which takes a driver and a context."""
    device = type("Device", (), {"compute_capability": capability})
    dispatcher.get_current_device = lambda: device


def hasten():
    """Lets this process compile kernels in half the time; to be called once."""
    BaseFunction.get_call_type = remembered(BaseFunction.get_call_type)
    device_code.make_device = shared(device_code.make_device)
    collect_seldom()


def remembered(get_call_type):
    """`BaseFunction.get_call_type` of Numba with a memory in each function type: overloads are tried in turn once."""

    def asked(self, context, args, kws):
        if kws:
            return get_call_type(self, context, args, kws)
        memory, key = self.__dict__.setdefault("_md4_calls", {}), (context, *args)
        if key not in memory:
            signature = get_call_type(self, context, args, kws)
            memory[key] = signature, self._impl_keys[signature.args]
        signature, self._impl_keys[signature.args] = memory[key]
        return signature

    return asked


def shared(make_device):
    """`device_code.make_device` that makes one device function of Python functions that device code cannot tell apart.

    It keeps those that were asked for last.
    """

    @lru_cache(FUNCTIONS)
    def made(key):
        return make_device(key.function)

    return lambda function: made(FunctionKey(function))


class FunctionKey:
    """A Python function, equal to those of the same code that takes the same from elsewhere."""

    def __init__(self, function):
        cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
        taken = value_key((function.__defaults__, cells))
        self.function, self.parts = function, (function.__code__, Same(function.__globals__), taken)

    def __eq__(self, other):
        return self.parts == other.parts

    def __hash__(self):
        return hash(self.parts)


def value_key(value):
    """A key of a constant in device code, in which 1, 1.0 and True are equal, but not the same."""
    kind = type(value)
    if kind is tuple:
        return kind, *map(value_key, value)
    if kind is float:
        return kind, value.hex()
    return (kind, value) if kind in PLAIN else Same(value)


class Same:
    """A key that is equal to that of the same object only, which it keeps alive."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self):
        return id(self.value)
