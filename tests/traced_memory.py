"""What work takes by what Python and NumPy ask for, and the least memory that a refusal names."""

import re
import tracemalloc
from functools import partial

from md4.errors import MemoryLimitError

# Python's own objects beside the arrays.
OBJECTS_MB = 0.4
# Of messages.
UNITS = {"B": 1e-6, "kB": 1e-3, "MB": 1.0}


def traced(work):
    """(result, or the MemoryLimitError; most MB held meanwhile)."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1] * 1e-6
    except MemoryLimitError as error:
        return error, tracemalloc.get_traced_memory()[1] * 1e-6
    finally:
        tracemalloc.stop()


def named(error):
    """The memory in MB that a refusal says is needed: the largest before "but"."""
    sizes = re.findall(r"([\d.]+) (B|kB|MB)\b", str(error).partition(", but ")[0])
    return max(float(number) * UNITS[unit] for number, unit in sizes)


def until_enough(work, cap, beside=0.0):
    """(result of work(cap), cap, refusals) of the first cap that is enough; the next one is what a refusal names.

    Each is larger than the one before, and no call takes more than its cap and `beside` (MB), the J and K that
    it returns. All is compiled before.
    """
    work(None)
    refusals, more = [], beside + OBJECTS_MB
    while isinstance((found := traced(partial(work, cap)))[0], MemoryLimitError):
        error, peak = found
        assert peak < cap + more, (cap, peak, error)
        assert named(error) > cap, (cap, error)
        refusals.append(str(error))
        cap = named(error)
    result, peak = found
    assert peak < cap + more, (cap, peak)
    return result, cap, refusals
