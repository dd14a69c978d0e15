"""Work on all elements of matrices, by one thread and by several, against NumPy."""

import numpy as np
import pytest

from md4.cpu.matrices import all_finite, by_elements, plus_transposed, symmetric_parts


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch):
    """Numbers of threads, also for small matrices."""
    monkeypatch.setattr("md4.cpu.threads.THREAD_ELEMENTS", 1)
    monkeypatch.setattr("md4.cpu.threads.number_of_threads", lambda: request.param)


@pytest.fixture(params=[(1, 1), (2, 31), (1, 300)])
def matrices(request):
    count, nao = request.param
    return np.random.default_rng(0).normal(size=(count, nao, nao))


@pytest.mark.parametrize("sign", [1, -1])
def test_plus_transposed(threads, matrices, sign):
    """Of the same and of other matrices, in new memory and in their own."""
    others, before = matrices[::-1] + 1.0, matrices.copy()
    assert np.array_equal(plus_transposed(matrices, others, sign), matrices + sign * others.transpose(0, 2, 1))
    expected = matrices + sign * matrices.transpose(0, 2, 1)
    assert np.array_equal(plus_transposed(matrices, sign=sign), expected)
    assert np.array_equal(matrices, before)
    assert plus_transposed(matrices, sign=sign, out=matrices) is matrices
    assert np.array_equal(matrices, expected)


def test_symmetric_parts(threads, matrices):
    """With the largest element, here a negative one, and what the matrices lack of being symmetric."""
    matrices[-1, 0, -1] = -10.0
    found, largest, difference = symmetric_parts(matrices)
    assert np.array_equal(found, (matrices + matrices.transpose(0, 2, 1)) / 2)
    assert largest == 10.0
    assert difference == pytest.approx(abs(matrices - matrices.transpose(0, 2, 1)).max(), rel=1e-14)


@pytest.mark.parametrize("order", ["C", "F"])
def test_by_elements(threads, matrices, order):
    one, two = np.asarray(matrices, order=order), 1j * matrices[0]
    assert np.array_equal(by_elements(np.subtract, one, matrices + 1), one - (matrices + 1))
    copied = by_elements(np.positive, two)
    assert copied is not two
    assert np.array_equal(copied, two)
    assert by_elements(np.add, two, copied, out=copied) is copied
    assert np.array_equal(copied, 2 * two)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1j * np.inf])
def test_all_finite(threads, matrices, bad):
    matrices = matrices * (1j if isinstance(bad, complex) else 1.0)
    assert all_finite(matrices)
    matrices[-1, -1, 0] = bad
    assert not all_finite(matrices)
