"""What threads may share: builders of J and K, attached objects and their copies, engines; and md4's own threads."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from places import LEAST_WORK

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


FIRST = """
import importlib, json, sys, threading, numpy, md4
for module, least in json.loads(sys.argv[1]):
    setattr(importlib.import_module(f"md4.cpu.{module}"), least, 1)
basis = md4.Basis.from_arrays([1, 0], [[1.0]] * 2, [[1.0]] * 2, numpy.eye(2, 3))
made, start = [], threading.Barrier(4)
def work():
    start.wait()
    for _ in range(20):
        made.append(md4.get_jk(basis, numpy.eye(basis.nao), backend="cpu")[1])
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads], [t.join() for t in threads]
print(len(made), max(abs(one - made[0]).max() for one in made) < 1e-12, made[0][0, 0] > 0.1)
"""


def test_first_use_by_threads_at_once():
    """Loops are loaded and threads of md4 started by several threads, while others wait for the same."""
    env = os.environ | {"NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", FIRST, json.dumps(LEAST_WORK)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["80", "True", "True"]
