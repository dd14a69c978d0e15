"""bench/scaling_devices.py: rows of CPU ranks, files of tasks, fitted times, and simulated builds."""

import csv
import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import scaling_devices
import simulation
from simulation import Costs, Work, finish_times, simulated
from systems import System
from task_times import Fit, TaskTimes, listed, terms, trace

from md4.contract.work import Division, Task, divide

SCRIPT = ROOT / "bench" / "scaling_devices.py"
# A simulation in which nothing costs time but tasks.
FREE = Costs(0.0, 0.0, np.inf, np.inf, 8, 0.0)
NO_GPU = SimpleNamespace(seed=0, backend="cpu", warm=1)
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


def work(seconds, predicted=None, rows=10**6, least=0.0, **facts):
    """`Work` of pairs of lists with these times."""
    known = {"system": "x", "basis": "y", "matrices": "J, K", "nao": 10, "ahead": 0} | facts
    seconds = np.array(seconds, dtype=float)
    predicted = seconds if predicted is None else np.array(predicted, dtype=float)
    return Work(known, predicted, seconds, [rows] * len(seconds), least, "by hand")


def task(seconds, pair=0):
    return Task(pair, 0, 1, seconds)


# simulation -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_division(monkeypatch):
    """The division among workers takes no time."""
    monkeypatch.setattr(simulation, "perf_counter", lambda: 0.0)


@pytest.mark.parametrize("workers", [1, 2, 8, 64])
def test_work_that_divides_evenly(workers, no_division):
    row = simulated(work([1.0] * 64), workers, FREE)
    assert row["seconds"] == pytest.approx(64 / workers)
    assert row["efficiency"] == pytest.approx(1)
    assert [row[name] for name in ("uneven", "cutting", "sums", "beside")] == pytest.approx([0] * 4, abs=1e-12)


def test_one_giant_task(no_division):
    """A pair of lists that cannot be cut, and for which a short time was predicted."""
    row = simulated(work([8.0, *[0.1] * 80], [0.1] * 81, rows=1), 8, FREE)
    assert row["seconds"] >= 8
    assert row["limit"] == "longest task"
    assert row["longest"] == 8
    assert row["efficiency"] == pytest.approx(16 / 8 / row["seconds"])


def test_what_was_predicted_too_short_is_made_up_for():
    """One worker's share takes longer than predicted: the others take the rest."""
    division = Division([[task(4.0)], [task(1.0)]], [task(1.0)] * 5)
    assert finish_times(division, lambda task: task.seconds, FREE, 0).tolist() == [5.0, 5.0]


def test_nothing_but_latency():
    division = Division([[], []], [task(0.0)] * 10)
    costs = FREE._replace(latency=1.0)
    assert finish_times(division, lambda task: task.seconds, costs, 0).tolist() == [5.0, 5.0]
    one_by_one = FREE._replace(served=1.0)
    assert finish_times(division, lambda task: task.seconds, one_by_one, 0).max() == 10


def test_latency_is_hidden_by_tasks_that_are_begun():
    division = Division([[task(1.0)] * 4], [task(1.0)] * 4)
    costs = FREE._replace(latency=1.5)
    assert finish_times(division, lambda task: task.seconds, costs, 0).tolist() == [8 + 4 * 1.5]
    assert finish_times(division, lambda task: task.seconds, costs, 2).tolist() == [8]


def test_all_tasks_are_done_once(no_division):
    """In shares or by the counter: the devices are busy for as long as all tasks take."""
    rng = np.random.default_rng(1)
    these = work(rng.exponential(1, 200))
    tasks, seconds = these.tasks(8)
    done = []

    def noted(task):
        done.append((task.pair, task.part))
        return seconds[task.pair, task.parts]

    ends = finish_times(divide(tasks, 8), noted, FREE, 2)
    assert sorted(done) == sorted((task.pair, task.part) for task in tasks)
    assert ends.sum() <= these.seconds.sum() * (1 + 1e-12)
    assert ends.sum() == pytest.approx(these.seconds.sum(), rel=0.02)


def test_sums_and_what_all_workers_do(no_division):
    these = work([1.0] * 64, before=2.0, fetch=1.0, nao=1000)
    row = simulated(these, 64, FREE._replace(bandwidth=1e6, network=32e6))
    assert row["seconds"] == pytest.approx(1 + 3 + 2 * 63 / 64 * 16e6 / 32e6)
    assert row["limit"] == "beside"
    assert row["efficiency"] == pytest.approx(67 / 64 / row["seconds"])
    alone = simulated(these, 1, FREE._replace(bandwidth=1e6))
    assert (alone["seconds"], alone["efficiency"]) == (67, pytest.approx(1))


def test_sums_in_a_ring_or_a_tree():
    costs = Costs(bandwidth=1e9, network=1e8, node=8, step=1e-3)
    assert costs.adding(10**9, 1) == 0
    assert costs.adding(10**9, 8) == pytest.approx(2 * 7 * (1 / 8 + 1e-3))  # ring
    assert costs.adding(8, 8) == pytest.approx(2 * 3 * 1e-3, rel=1e-3)  # tree
    assert costs.adding(10**9, 9) == pytest.approx(2 * 8 * (10 / 9 + 1e-3))  # over the network


def test_the_least_time_of_tasks_that_are_cut(no_division):
    row = simulated(work([6.4], rows=64, least=0.01), 8, FREE)
    assert row["tasks"] == 64
    assert row["cutting"] == pytest.approx((64 - 1) * 0.01 / 8 / row["seconds"])
    assert row["longest"] == pytest.approx(0.11)


# files of tasks -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced():
    return trace(System.parse("water/cc-pvdz"), 4, True, NO_GPU)


def test_traced_tasks(traced, tmp_path):
    """They are a whole build, and a file gives them back."""
    assert traced.facts["difference"] < 1e-12
    assert sum(row["quartets"] for row in traced.rows) == 2211
    assert all(row["seconds"] > 0 for row in traced.rows)
    traced.save(tmp_path / "tasks.csv")
    loaded = TaskTimes.load(tmp_path / "tasks.csv")
    assert loaded.facts == traced.facts
    assert loaded.rows == traced.rows


def test_parts_are_put_together(traced):
    """Pairs of lists have the time of their parts, but for the least one of each task."""
    these = Work.of(traced)
    least = min(row["seconds"] for row in traced.rows)
    assert these.seconds.sum() + least * len(traced.rows) == pytest.approx(sum(row["seconds"] for row in traced.rows))
    assert these.predicted.sum() == pytest.approx(sum(row["predicted"] for row in traced.rows))
    assert len(these.seconds) == len({row["pair"] for row in traced.rows})


@pytest.mark.parametrize("with_k", [False, True])
def test_listed_tasks_are_predicted_anew(with_k, tmp_path):
    """From their columns, with the same result; those of J alone have several classes, and keep their times."""
    tasks = listed(System.parse("water/cc-pvtz"), with_k, NO_GPU)
    tasks.save(tmp_path / "tasks.csv")
    found = TaskTimes.load(tmp_path / "tasks.csv")
    for one, two in zip(tasks.rows, found.rows, strict=True):
        assert two == one | {"predicted": pytest.approx(one["predicted"], rel=0.05, abs=1e-16)}
    for row in found.rows:
        row["quartets"] *= 2
    before = [row["predicted"] for row in found.rows]
    found.predict()
    assert [row["predicted"] for row in found.rows] == [(1 + with_k) * seconds for seconds in before]


def test_listed_tasks_of_j_alone():
    """One for all pairs of lists of two degrees, as a GPU has them; all quartets of the lists are in one of them."""
    alone, both = (listed(System.parse("water/cc-pvtz"), with_k, NO_GPU) for with_k in (False, True))

    def degrees(row):
        return tuple(sorted((row["la"] + row["lb"], row["lc"] + row["ld"])))

    assert len({degrees(row) for row in alone.rows}) == len(alone.rows) < len(both.rows)
    assert sum(row["quartets"] for row in alone.rows) <= sum(row["quartets"] for row in both.rows)


def test_listed_tasks_are_corrected_class_by_class():
    """Measured were half of the predicted time in one class, and twice that in the others."""
    tasks = listed(System.parse("2waters/cc-pvdz"), True, NO_GPU)
    assert not tasks.measured
    assert "not measured" in Work.of(tasks).source
    like = listed(System.parse("2waters/cc-pvdz"), True, NO_GPU)
    odd = simulation.class_of(like.rows[3])
    for row in like.rows:
        row["seconds"] = 1e-5 + row["predicted"] * (0.5 if simulation.class_of(row) == odd else 2.0)
    like.rows[0]["seconds"] = 1e-5
    like.facts |= dict.fromkeys(("before", *simulation.COPIES), 0.5) | {"nao": 24, "counting": 0.1}
    these = Work.of(tasks, like)
    assert these.beside == pytest.approx(5 * 0.5 * (48 / 24) ** 2 + 0.1)
    assert "corrected" in these.source
    assert "100% of the time" in these.source
    expected = [0.5 if simulation.class_of(row) == odd else 2.0 for row in tasks.rows]
    np.testing.assert_allclose((these.seconds / these.predicted)[1:], expected[1:])


def test_a_fit_finds_its_coefficients():
    tasks = listed(System.parse("2waters/cc-pvtz"), True, NO_GPU)
    true = {
        "task": 2e4, "digest": 5e-3, "plan": 1.1, "low quartet": 0.05, "low r": 3e-3, "low products": 5e-4,
        "low result": 1e-3,
    }  # fmt: skip
    for row in tasks.rows:
        parts = terms(row, "dmma16")
        assert set(parts) <= set(true)
        row["seconds"] = 1e-9 * row["quartets"] * sum(true[name] * amount for name, amount in parts.items())
    fit = Fit(tasks)
    assert dict(zip(fit.names, fit.coefficients)) == pytest.approx(true)
    assert fit.error(fit.after) < 1e-8 < fit.error(fit.before)
    assert "digest               0.005" in str(fit)


def test_a_fit_needs_a_gpu(traced):
    with pytest.raises(SystemExit, match="measured on a GPU"):
        Fit(traced)


@pytest.mark.thorough
def test_the_commands(tmp_path):
    """Tasks listed and simulated by the script."""
    listing, table = tmp_path / "listed.csv", tmp_path / "simulated.csv"
    assert "tasks: nan s" in run("--list", listing, "--systems", "water/sto-3g")
    printed = run("--simulate", listing, "--workers", "1", "4", "--csv", table)
    assert "predicted, not measured" in printed
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["workers"] for row in rows] == ["1", "4"]
    assert float(rows[0]["efficiency"]) == pytest.approx(1)


# builds ---------------------------------------------------------------------------------------------------------------


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


def test_waters_that_grow_with_the_devices():
    assert [scaling_devices.grown(System.parse("27waters/sto-3g"), n).waters for n in (1, 2, 4, 8)] == [27, 38, 54, 76]
    with pytest.raises(SystemExit, match="takes waters"):
        scaling_devices.grown(System.parse("benzene/sto-3g"), 2)
