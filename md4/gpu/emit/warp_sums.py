"""Sums over the 32 lanes of a warp, and over runs of them."""

from functools import cache

from md4.gpu.emit.instructions import reversed_bits, shuffled
from md4.gpu.emit.values import FP64, i64, select, tuple_of, word


def emit_run_sum(value, left, most):
    """The first lane of each run of lanes gets the sum of the run's values; others get something else.

    `left` are the lanes from a lane up to the end of its run, itself included (i32), at most `most`. Values of lanes
    in no run may be anything.
    """
    step = 1
    while step < most:
        value += select(left > step, shuffled(value, "down", step), 0.0)
        step *= 2
    return value


@word(i64, i64)
def warp_place(lane):
    """Which of up to 32 values a lane gets from `make_warp_sums`: its number with the five bits reversed."""
    return emit_warp_place(lane.i32).u64


def emit_warp_place(lane):
    """The same of an i32."""
    return reversed_bits(lane) >> 27


def emit_warp_sum(values, lane):
    """The warp's sum of one of up to 32 values; see `make_warp_sums`."""
    for mask in (16, 8, 4, 2, 1):
        values = emit_halved(values, lane, mask)
    return values[0]


def emit_halved(values, lane, mask):
    """Sums of the values of two lanes whose numbers differ in the bit `mask`: each keeps one of two values.

    The lane with the bit keeps the second. Both keep the last of an odd number.
    """
    upper, kept = lane.has(mask), []
    for n in range(0, len(values) - 1, 2):
        own, other = select(upper, values[n + 1], values[n]), select(upper, values[n], values[n + 1])
        kept.append(own + shuffled(other, "bfly", mask))
    if len(values) % 2:
        kept.append(values[-1] + shuffled(values[-1], "bfly", mask))
    return kept


@cache
def make_warp_sums(count, precision=FP64):
    """Intrinsic (x, s, lane) -> the sum over the warp of s x_n with n = `warp_place` of the lane.

    Lanes for which that n is `count` or more get something else. Each of five rounds halves the number of values: a
    lane keeps one of two, gives the other to its partner and adds what it gets.
    """
    assert count <= 32

    @word(precision.numba, tuple_of(precision, count), precision.numba, i64)
    def warp_sums(x, s, lane):
        return emit_warp_sum([value * s for value in x], lane.i32)

    return warp_sums
