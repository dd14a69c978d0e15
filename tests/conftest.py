"""Fixtures of all tests: the two backends, and the arithmetic units of the GPU."""

import os

import numba
import pytest
from hypothesis import settings

from md4.gpu.context import gpu_available

# Kernels are compiled where they are used, unless a test says otherwise: workers of xdist are many already.
os.environ.setdefault("MD4_JOBS", "1")
settings.register_profile("md4", deadline=None, derandomize=True, max_examples=20)
settings.load_profile("md4")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    """Name of each backend; 'cuda' under ``-m gpu`` only."""
    if request.param == "cuda":
        request.getfixturevalue("gpu")
    return request.param


@pytest.fixture(scope="session")
def gpu():
    """Skips where there is no GPU."""
    if not gpu_available():
        pytest.skip("no usable NVIDIA GPU")


@pytest.fixture(params=["dmma16", "dmma8", "fma"])
def unit(request, gpu):
    """Each arithmetic unit that the device has."""
    from md4.gpu.context import current_capability

    least = {"dmma16": (9, 0), "dmma8": (8, 0), "fma": (0, 0)}[request.param]
    if current_capability() < least or (request.param == "dmma16" and (9, 0) < current_capability() < (10, 0)):
        pytest.skip(f"the GPU has no {request.param}")
    return request.param


@pytest.fixture(scope="module")
def one_thread():
    """Hundreds of builds of a tenth of a second: waking up threads takes longer, seconds where others use the cores."""
    threads = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(threads)


@pytest.fixture(scope="module")
def water():
    from molecules import WATER, molecule

    return molecule(WATER, "6-31g")


@pytest.fixture(scope="module")
def cation():
    from molecules import WATER, molecule

    return molecule(WATER, "6-31g", charge=1)


@pytest.fixture
def rhf(water):
    """A solver with md4's J and K, not run."""
    from pyscf import scf

    import md4

    return md4.attach(scf.RHF(water), backend="cpu")


@pytest.fixture(scope="session")
def filled(tmp_path_factory):
    """A cache that holds everything that the job of the fault tests needs."""
    from faults import files, run

    folder = tmp_path_factory.mktemp("filled") / "cache"
    assert run(folder).right()["compiled"] > 0
    assert run(folder).right()["compiled"] == 0
    assert files(folder)
    return folder
