"""Products on md4's threads: what they give, and that BLAS and md4 leave the cores alone afterwards."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from scipy import linalg

from md4.cpu import blas
from md4.cpu.blas import add_matrix_vector, cut, in_tiles, matrix_product, one_thread, solve_lower

BURNT = """
import time
import numpy as np
import pyscf
import md4
from md4.cpu import blas

blas.PRODUCT_WORK = blas.VECTOR_WORK = 1
mol = pyscf.M(atom="O 0 0 0.118; H 0 0.755 -0.471; H 0 -0.755 -0.471", basis="cc-pvtz")
dm = np.random.default_rng(0).normal(size=(3, mol.nao, mol.nao))
jk, table, direct = md4.JK(mol, backend="cpu"), md4.DF(mol, backend="cpu"), md4.DF(mol, backend="cpu", store="direct")

def burnt(call):
    "Processor seconds of 0.1 s in which this thread sleeps after a call; the least of three."
    found = []
    for _ in range(3):
        call()
        begin = time.process_time()
        time.sleep(0.1)
        found.append(time.process_time() - begin)
    return min(found)

symmetric = dm + dm.transpose(0, 2, 1)
print(*map(burnt, (
    lambda: md4.int2e(mol, aosym="s8", backend="cpu"), lambda: jk.get_jk(dm), lambda: jk.get_jk(dm, with_k=False),
    lambda: table.reset().build(), lambda: table.get_jk(dm), lambda: table.get_jk(symmetric),
    lambda: list(table.loop()), lambda: direct.get_jk(symmetric[0]), lambda: md4.int2c2e(table.auxmol, backend="cpu"),
)))
"""


def test_no_thread_holds_a_core_after_a_call():
    """Neither those of md4 nor those of NumPy's and SciPy's BLAS, which by themselves wait for the next product."""
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "2")
    done = subprocess.run([sys.executable, "-c", BURNT], capture_output=True, text=True, check=True, env=environment)
    found = [float(text) for text in done.stdout.split()]
    assert len(found) == 9
    assert max(found) < 0.004


@pytest.fixture
def many_threads(two_threads, monkeypatch):
    """Products are divided, however small they are."""
    monkeypatch.setattr(blas, "PRODUCT_WORK", 1)
    monkeypatch.setattr(blas, "VECTOR_WORK", 1)
    monkeypatch.setattr(blas, "COLUMNS", 3)
    with one_thread():
        yield


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 3, 1), (1, 3, 9), (20, 4, 30), (5, 0, 4), (0, 3, 2)])
def test_products(many_threads, shape, add):
    rows, inner, columns = shape
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(rows, inner)), rng.normal(size=(columns, inner)).T
    out = rng.normal(size=(rows, columns + 2))
    wanted, given = -0.5 * (a @ b) + add * out[:, 1:-1], out[:, 1:-1]
    assert matrix_product(a, b, given, -0.5, add) is given
    np.testing.assert_allclose(given, wanted, rtol=0, atol=1e-14)
    vector = rng.normal(size=inner)
    for matrix in (a, np.asfortranarray(a)):
        np.testing.assert_allclose(add_matrix_vector(matrix, vector, np.ones(rows)), 1 + a @ vector, rtol=0, atol=1e-14)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columns", [0, 1, 2, 17])
def test_triangular_equations(many_threads, columns, transposed):
    rng = np.random.default_rng(0)
    lower, array = np.tril(rng.normal(size=(6, 6))) + 5 * np.eye(6), rng.normal(size=(6, columns))
    wanted = linalg.solve_triangular(lower, array, lower=True, trans=int(transposed))
    assert solve_lower(lower, array, transposed) is array
    np.testing.assert_allclose(array, wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("threads", [1, 2, 5, 16])
@pytest.mark.parametrize("shape", [(1, 1), (2, 700), (300, 300), (1000, 3)])
def test_tiles_make_up_a_matrix(shape, threads):
    counts, tiles = np.zeros(shape, dtype=int), []

    def tile(rows, columns):
        counts[rows, columns] += 1
        tiles.append((rows, columns))

    in_tiles(*shape, threads, tile)
    assert (counts == 1).all()
    assert len(tiles) == min(threads, shape[0] * shape[1])


def test_parts():
    assert [range(10)[part] for part in cut(10, 3)] == [range(3), range(3, 6), range(6, 10)]
    assert cut(0, 2) == []


class Fake:
    """A library that has as many threads as it was told last."""

    def __init__(self, count):
        self.count = count
        self.library = blas.Library(lambda: self.count, lambda count: setattr(self, "count", count))


@pytest.fixture
def fake(monkeypatch):
    found = Fake(7)
    monkeypatch.setattr(blas, "libraries", lambda: [found.library])
    return found


def test_threads_of_blas_are_given_back(fake):
    """With the last user, be it another thread's, and after an error."""
    inside, leave = threading.Event(), threading.Event()

    def other():
        with one_thread():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=other)

    def failing():
        with one_thread():
            thread.start()
            assert inside.wait(60)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert fake.count == 1
    leave.set()
    thread.join()
    assert fake.count == 7


def test_after_an_interrupt_the_next_user_gives_them_back(fake):
    """As if it had come between the end of the only user and what follows it."""
    fake.library.limit()
    with one_thread():
        assert fake.count == 1
    assert fake.count == 7


def test_in_a_forked_process(fake):
    """Which has none of the threads that were amid a calculation."""
    with one_thread():
        blas.forget_users()
        assert fake.count == 7


def test_libraries():
    """Those of NumPy and SciPy are found where they are OpenBLAS with threads of its own."""
    for library in blas.libraries():
        before = library.get()
        with one_thread():
            assert library.get() == 1
        assert library.get() == before
    assert blas.opened("/nowhere/libopenblas.so") is None
