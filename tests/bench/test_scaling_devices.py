"""bench/scaling_devices.py: rows of one process and of CPU ranks."""

import csv
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import scaling_devices
from systems import System

SCRIPT = ROOT / "bench" / "scaling_devices.py"
SECONDS = 300


def run(*arguments):
    """What the script prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MD4_JOBS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--backend", "cpu", *map(str, arguments)], env=environment, capture_output=True,
        text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(rows):
    """What holds for each row of a table."""
    for row in rows:
        assert float(row["difference"]) < 1e-12
        assert float(row["speedup"]) == pytest.approx(int(row["devices"]) * float(row["efficiency"]))
        assert float(row["seconds"]) > 0
        shares = [float(row[name]) for name in ("uneven", "sums", "beside")]
        assert all(0 <= share < 1 for share in shares), row


@pytest.mark.thorough
def test_a_table_of_one_process(tmp_path):
    path = tmp_path / "rows.csv"
    once = ["--systems", "water/sto-3g", "--counts", "1", "--csv", path, "--append", "--repeats", "1", "--warm", "1"]
    assert run(*once, "--matrices", "J").count("| water | sto-3g | 7 |") == 1
    assert run(*once, "--matrices", "J, K").count("| water | sto-3g | 7 |") == 1
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    check(rows)
    assert [(row["matrices"], row["form"], row["efficiency"]) for row in rows] == [
        ("J", "process", "1.0"), ("J, K", "process", "1.0"),
    ]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.xdist_group("mpi")
@pytest.mark.skipif(
    find_spec("mpi4py") is None or scaling_devices.mpiexec() is None, reason="no mpi4py, or no mpiexec: install mpich"
)
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor")
def test_two_ranks(tmp_path):
    path = tmp_path / "rows.csv"
    run("--systems", "water/cc-pvdz", "--counts", "2", "--csv", path, "--repeats", "1", "--warm", "1")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    check(rows)
    assert [(row["devices"], row["form"]) for row in rows] == [("1", "process")] * 2 + [("2", "ranks")] * 2
    assert len({row["quartets"] for row in rows if row["matrices"] == "J, K"}) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("work, name", [("--forces", "forces"), ("--mp2", "MP2")])
def test_forces_and_mp2(tmp_path, work, name):
    path = tmp_path / "rows.csv"
    run(work, "--systems", "water/sto-3g", "--counts", "1", "--csv", path, "--repeats", "1", "--warm", "1")
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["matrices"], float(row["difference"]), float(row["efficiency"])) == (name, 0.0, 1.0)
    assert (row["uneven"] == "nan") == (name == "MP2")


def test_what_is_measured_by_default():
    for work, systems in scaling_devices.SYSTEMS.items():
        args = scaling_devices.parsed([] if work == "builds" else [f"--{work}"])
        assert (args.work, args.systems) == (work, systems)
        for system in systems:
            System.parse(system)
    with pytest.raises(SystemExit):
        scaling_devices.parsed(["--mp2", "--weak", "water/sto-3g"])


def test_waters_that_grow_with_the_devices():
    assert [scaling_devices.grown(System.parse("27waters/sto-3g"), n).waters for n in (1, 2, 4, 8)] == [27, 38, 54, 76]
    with pytest.raises(SystemExit, match="takes waters"):
        scaling_devices.grown(System.parse("benzene/sto-3g"), 2)
