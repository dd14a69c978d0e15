"""Numbers while code is generated, branches and loops, and where compilers are known."""

import re
from pathlib import Path

import pytest
from emulator.intrinsics import called

from md4 import gpu
from md4.gpu.emit.instructions import new_block
from md4.gpu.emit.values import FP32, FP64, INT, first_case, fma, i32, i64, repeat, select, tuple_of, word

LEAVES = {"values.py", "instructions.py"}


def computed(write, result, kinds, *args):
    """What a function that writes code returns for numbers."""
    return called(word(result, *kinds)(write), None, args)


@pytest.mark.parametrize("a, b", [(7, 3), (-7, 3), (1 << 30, 5)])
def test_integers(a, b):
    """In 32 bits; quotients and shifts are of unsigned numbers."""

    def write(a, b):
        return [a + b, a - 5, 3 * a, a // b, a >> 3, a << 2, a & 6, a.shifted(1), select(a < b, a, 0)]

    unsigned = a & 0xFFFFFFFF
    right = [
        a + b, a - 5, 3 * a, unsigned // b, unsigned >> 3, a << 2, a & 6, a >> 1, a if a < b else 0,
    ]  # fmt: skip
    found = computed(write, tuple_of(INT, 9), (i32, i32), a, b)
    assert [(value - other) % (1 << 32) for value, other in zip(found, right, strict=True)] == [0] * 9


@pytest.mark.parametrize("a", [5, -5, (1 << 40) + 3])
def test_widths(a):
    """A signed and an unsigned 32-bit integer in 64 bits."""
    low = (a + (1 << 31)) % (1 << 32) - (1 << 31)
    found = computed(lambda a: [a.i32.i64, a.i32.u64], tuple_of(i64, 2), (i64,), a)
    assert found == (low, a % (1 << 32))


@pytest.mark.parametrize("precision", [FP64, FP32])
def test_real_numbers(precision):
    def write(a, b):
        return [a * b + 2, fma(0.5, a, b), -a, select(a > b, 1.0, a)]

    found = computed(write, tuple_of(precision, 4), (precision.numba,) * 2, 1.5, 4.25)
    assert found == (8.375, 5.0, -1.5, 1.5)


def test_narrowed():
    found = computed(lambda a: a.narrowed(FP32).f64 - a, FP64.numba, (FP64.numba,), 0.1)
    assert 0 < abs(found) < 1e-8


@pytest.mark.parametrize("n, right", [(9, 3.0), (5, 2.0), (0, 1.0)])
def test_first_case(n, right):
    def write(n, x):
        cases = [(lambda: n > 8, lambda: [x * 3]), (lambda: n > 4, lambda: [x * 2]), (None, lambda: [x])]
        return first_case(n.builder, cases)[0]

    assert computed(write, FP64.numba, (i32, FP64.numba), n, 1.0) == right


@pytest.mark.parametrize("end", [0, 1, 10])
def test_repeat(end):
    """A loop of no turn, one, and several: the sum of squares."""

    def write(end, zero):
        return repeat([0, 0, zero], end, lambda x: [x[0] + 1, x[1] + x[0] * x[0], x[2] + 0.5])[1:]

    squares, halves = sum(n * n for n in range(end)), 0.5 * end
    assert computed(lambda *args: write(*args)[0], i32, (i32, FP64.numba), end, 0.0) == squares
    assert computed(lambda *args: write(*args)[1], FP64.numba, (i32, FP64.numba), end, 0.0) == halves


@pytest.mark.parametrize("n", [5, -5])
def test_new_block(n):
    """Numbers of one block are those of the next, whichever way the branch around nothing goes."""

    def write(n, x):
        twice, before = x + x, n.builder.block
        new_block(n)
        assert n.builder.block is not before
        return twice + x

    assert computed(write, FP64.numba, (i32, FP64.numba), n, 1.5) == 4.5


def test_what_is_not_known():
    """A value is no condition of Python, and a word returns as many numbers as it declares."""
    with pytest.raises(TypeError, match="not known"):
        computed(lambda a: a if a < 3 else -a, i32, (i32,), 1)
    with pytest.raises(AssertionError, match="1 values"):
        computed(lambda a: [a], tuple_of(INT, 2), (i32,), 1)


def test_where_compilers_are_known():
    """llvmlite, intrinsics of Numba and PTX stand in two modules of the GPU backend; a port is these two."""
    pattern = re.compile(r"llvmlite|numba\.cuda\.extending|call_asm|\b(?:ld|st|mov|mad|setp|selp|cp|mma)\.[a-z]")
    sources = sorted(Path(gpu.__file__).parent.rglob("*.py"))
    knowing = {source.name for source in sources if pattern.search(source.read_text())}
    assert len(sources) > 60
    assert knowing == LEAVES
