"""`md4 eri --mpi` under mpiexec."""

import os
import subprocess
import sys

import numpy as np
import pytest
from molecules import molecule
from mpi_jobs import MARKS, MPIEXEC, OPEN_MPI, SECONDS, SOURCES
from places import EXAMPLES

pytestmark = MARKS

WATER = str(EXAMPLES / "water.xyz")


def eri(folder, *arguments):
    """`md4 eri` for water in STO-3G on two ranks of the CPU."""
    command = [MPIEXEC, "-n", "2", sys.executable, "-m", "md4", "eri", WATER, "--basis", "sto-3g", "--backend", "cpu"]
    paths = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
    one_thread = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "MD4_JOBS": "1", "PYTHONPATH": paths}
    return subprocess.run(
        [*command, "--mpi", *arguments], env=os.environ | OPEN_MPI | one_thread, cwd=folder, text=True,
        stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def right():
    return molecule(WATER, "sto-3g").intor("int2e", aosym="s4")


def norm(printed):
    return float(printed.split("norm ")[1].split(",")[0])


@pytest.mark.sample("file")
@pytest.mark.parametrize("file", [["-o", "eri.npy"], []], ids=["file", "no file"])
def test_eri(tmp_path, right, file):
    """Both ranks write to the file, rank 0 prints once."""
    done = eri(tmp_path, "--aosym", "s4", *file)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("eri s4 (28, 28) float64") == 1
    assert norm(done.stdout) == pytest.approx(np.linalg.norm(right), rel=1e-11)
    assert [entry.name for entry in tmp_path.iterdir()] == file[1:]
    if file:
        np.testing.assert_allclose(np.load(tmp_path / "eri.npy"), right, rtol=0, atol=1e-12)


@pytest.mark.thorough
def test_a_file_that_only_one_process_can_write(tmp_path):
    h5py = pytest.importorskip("h5py")
    if h5py.get_config().mpi:
        pytest.skip("this h5py can write from several processes")
    done = eri(tmp_path, "-o", "eri.h5")
    assert done.returncode == 2
    assert "needs an h5py that was built with MPI; write .npy" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_no_memory(tmp_path):
    done = eri(tmp_path, "-o", "eri.npy", "--max-memory", "0.001")
    assert done.returncode == 2
    assert "larger --max-memory" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
