"""Fixtures of all tests: the two backends, and the arithmetic units of the GPU; threads and workers."""

import logging
import os
from fnmatch import fnmatchcase
from functools import cache
from math import inf
from time import process_time
from zlib import crc32

# Workers of pytest-xdist use all cores. So BLAS, PySCF and md4 take one thread, and md4 two where a test says so (see
# `two_threads`); set before NumPy is imported, here and for the workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Kernels are compiled where they are used, unless a test says otherwise.
os.environ.setdefault("MD4_JOBS", "1")

import numba
import pytest
from hypothesis import settings
from numba.core.event import TimingListener, register
from places import LEAST_WORK

from md4.gpu import warmup
from md4.gpu.compile_worker import hasten
from md4.gpu.context import gpu_available
from md4.support.processes import processors

MOST_WORKERS = 8  # each takes a gigabyte
MANY_KERNELS = 24  # which one worker has all cores compile, while the others that need them wait
# Of `count_seconds` that a test without the marker `thorough` may take: 36 CPU seconds on a machine on which README's
# command takes 1310 s. They were 15 where it took 458 s.
MOST_COUNTS = 300
COLLECTED, STARTED = pytest.StashKey[list](), pytest.StashKey[float]()
COMPILING = TimingListener()  # whoever is the first to call a loop of the CPU compiles it
register("numba:compile", COMPILING)
settings.register_profile("md4", deadline=None, derandomize=True, max_examples=20)
settings.load_profile("md4")


def pytest_xdist_auto_num_workers(config):
    """Workers of `-n auto`: one a core that this process may use."""
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)))


def pytest_configure(config):
    """Tests of the GPU compile as md4's own processes do, the tests of the user's processes in children of theirs."""
    if config.option.markexpr.startswith("gpu"):
        hasten()
    if config.option.markexpr == "gpu":  # workers run cases of the same test at the same time, and compile in turn
        warmup.allowed_jobs, warmup.WORTH_PROCESSES = processors, MANY_KERNELS


def checked_share(text):
    """(K, N) of K/N."""
    share, shares = map(int, text.split("/"))
    if not 1 <= share <= shares:
        raise ValueError
    return share, shares


def pytest_addoption(parser):
    parser.addoption("--races", action="store_true", help="the emulated GPU looks for races in all tests")
    parser.addoption("--costs", action="store_true", help="tests that take long must be `thorough`")
    parser.addoption("--share", type=checked_share, metavar="K/N", help="the K-th of N shares of all tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Makes all cases of a test `thorough` but those that fit a pattern of its marker `sample`; before -m selects.

    With --share keeps the tests of a share, which is as good as at random, and always the same of a test.
    """
    config.stash[COLLECTED] = list(items)
    for item in items:
        sample = item.get_closest_marker("sample")
        if sample and not any(fnmatchcase(item.callspec.id, pattern) for pattern in sample.args):
            item.add_marker("thorough")
    if config.option.share:
        share, shares = config.option.share
        mine = [crc32(f"{item.path.name}::{item.name}".encode()) % shares == share % shares for item in items]
        config.hook.pytest_deselected(items=[item for item, one in zip(items, mine) if not one])
        items[:] = [item for item, one in zip(items, mine) if one]


def cpu_seconds():
    """CPU time of this process, but for the compilation of loops, and of its children that have ended."""
    return sum(os.times()[:4]) - (COMPILING.duration if COMPILING.done else 0.0)


def count_seconds(of_three=min):
    """CPU time of counting to two million, the least of three, or another one, as a measure of the machine."""
    found = []
    for _ in range(3):
        start, total = process_time(), 0
        for number in range(2_000_000):
            total += number
        found.append(process_time() - start)
    return of_three(found)


first_count = cache(count_seconds)


def takes_long(spent):
    """Whether so much CPU time is more than a test may take, by the speed of the machine before and now.

    On one machine the count took 0.18 to 0.36 s within minutes, and tests that nobody had changed were refused.
    """
    return spent > MOST_COUNTS * first_count() and spent > MOST_COUNTS * count_seconds(max)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """What fixtures make for several tests is nobody's."""
    item.stash[STARTED] = cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """With --costs, an error for a test that takes long and has no marker that says so."""
    report = yield
    spent = cpu_seconds() - item.stash.get(STARTED, inf)
    may = any(map(item.get_closest_marker, ("thorough", "slow", "gpu")))
    asked = item.config.getoption("--costs") and call.when == "teardown" and not may
    if asked and takes_long(spent):
        report.outcome = "failed"
        report.longrepr = f"{spent:.1f} CPU seconds: make it cheaper, or mark it as `thorough` (see CONTRIBUTING.md)"
    return report


@pytest.fixture(autouse=True)
def races(request, monkeypatch):
    """The emulated GPU looks for races where a test asks for it, or with the option --races."""
    if request.node.get_closest_marker("races") or request.config.getoption("--races"):
        monkeypatch.setattr("emulator.host.RACES", True)


@pytest.fixture
def root_log():
    """For tests that call geomeTRIC, which sets Python's logging for the whole process."""
    handlers, level = list(logging.root.handlers), logging.root.level
    yield
    logging.root.handlers[:], logging.root.level = handlers, level


@pytest.fixture(scope="session")
def collected(request):
    """All tests that were collected, before -m and -k select."""
    return request.config.stash[COLLECTED]


@pytest.fixture(scope="session")
def fast(collected):
    """Those that README's test command runs, if all were collected."""
    return [item for item in collected if not any(map(item.get_closest_marker, ("gpu", "slow", "thorough")))]


@pytest.fixture
def two_threads(monkeypatch):
    """Two threads share all work of the CPU backend, however small it is."""
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("md4 may use one thread only")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    for module, least in LEAST_WORK:
        monkeypatch.setattr(f"md4.cpu.{module}.{least}", 1)


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


@pytest.fixture
def kernels_package(tmp_path, monkeypatch):
    """The folder of a package md4-kernels, in which there is nothing yet."""
    import importlib

    from md4.support import bundle

    folder = tmp_path / "site" / bundle.PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(folder.parent)
    importlib.invalidate_caches()
    memories = bundle.installed.made, bundle.report_damage.made
    before = list(map(dict, memories))
    for memory in memories:
        memory.clear()
    yield folder
    for memory, then in zip(memories, before):
        memory.clear()
        memory.update(then)


@pytest.fixture(scope="session")
def filled(tmp_path_factory):
    """A cache that holds everything that the job of the fault tests needs."""
    from faults import files, run

    folder = tmp_path_factory.mktemp("filled") / "cache"
    assert run(folder).right()["compiled"] > 0
    assert run(folder).right()["compiled"] == 0
    assert files(folder)
    return folder
