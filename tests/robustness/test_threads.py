"""What threads may share: builders of J and K, attached objects and their copies, engines; and Numba's layers."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import md4

THREADS, TIMES = 8, 32


def together(work):
    """Largest of what `work(n)` gives, n = 0, 1, ..., from several threads at once."""
    with ThreadPoolExecutor(THREADS) as pool:
        return max(pool.map(work, range(TIMES)))


@pytest.fixture(scope="module")
def densities(water):
    d = np.random.default_rng(0).normal(size=(TIMES, water.nao, water.nao))
    return d + d.transpose(0, 2, 1)


@pytest.fixture(scope="module")
def wanted(water, densities):
    from pyscf.scf.hf import dot_eri_dm

    vj, vk = dot_eri_dm(water.intor("int2e", aosym="s8"), densities, 1)
    return np.stack([vj, vk], axis=1)


def test_a_shared_jk(backend, water, densities, wanted):
    jk = md4.JK(water, backend=backend)
    assert together(lambda n: abs(np.array(jk.get_jk(densities[n])) - wanted[n]).max()) < 1e-9


def test_copies_of_an_attached_object(backend, water, densities, wanted):
    mf = md4.attach(water.RHF(), backend=backend)
    assert together(lambda n: abs(np.array(mf.copy().get_jk(dm=densities[n])) - wanted[n]).max()) < 1e-9


def test_a_shared_engine(backend):
    """Results of different sizes, so that work space is another's if it is shared."""
    basis = md4.Basis.from_arrays([1, 2, 1, 0], [[1.0, 0.4]] * 4, [[1.0, 0.5]] * 4, np.eye(4, 3))
    engine = md4.Engine(basis, backend=backend)
    lists = [[[0, 2]] * (1 + n % 5) for n in range(TIMES)], [[[1, 3]] * (1 + n % 7) for n in range(TIMES)]
    want = md4.Engine(basis, backend="cpu").compute([[0, 2]], [[1, 3]])[0, 0]

    def work(n):
        block = engine.compute(lists[0][n], lists[1][n])
        block = block.copy_to_host(stream=engine.backend.context.stream) if backend == "cuda" else block
        return abs(block - want).max()

    assert together(work) < 1e-12


def test_updates_from_threads_are_those_of_one(water, densities, wanted):
    """In whatever order they come, each is a build of its own density."""
    jk = md4.JK(water, backend="cpu")
    assert together(lambda n: abs(np.array(jk.update(densities[n])) - wanted[n]).max()) < 1e-9


LAYERS = """
import threading, numpy, numba, md4
basis = md4.Basis.from_arrays([1, 0], [[1.0]] * 2, [[1.0]] * 2, numpy.eye(2, 3))
want, wrong = md4.get_jk(basis, numpy.eye(basis.nao), backend="cpu")[1], []
def work():
    for _ in range(20):
        wrong.append(abs(md4.get_jk(basis, numpy.eye(basis.nao), backend="cpu")[1] - want).max())
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads], [t.join() for t in threads]
print(numba.threading_layer(), len(wrong), max(wrong) < 1e-12)
"""


@pytest.mark.parametrize("layer", ["workqueue", "omp"])
def test_threading_layers(layer):
    """'workqueue' ends a process whose threads start loops at the same time."""
    env = os.environ | {"NUMBA_THREADING_LAYER": layer}
    command = [sys.executable, "-c", LAYERS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [layer, "80", "True"]
