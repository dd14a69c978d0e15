"""bench/cpu.py: what it compares, and what it prints and writes."""

import csv
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import cpu


@pytest.mark.parametrize("kind", ["int2e", "jk", "jk-fresh", "scf", "scf-direct", "casscf"])
def test_both_calls_give_the_same(kind):
    ours, theirs = cpu.MAKERS[kind]("water/cc-pvdz" if kind == "casscf" else "water/sto-3g", "scf")
    for _ in range(2):
        assert cpu.difference(ours(), theirs()) < 1e-10


def test_both_compute_the_same_quartets_of_a_class(monkeypatch):
    monkeypatch.setitem(cpu.CLASSES, "d", 2)
    ours, theirs = cpu.MAKERS["class"]("d", "random")
    (mine,), (other,) = ours(), theirs()
    assert mine.shape == other.shape == (4, 4, 5, 5, 5, 5)
    assert cpu.difference([mine], [other]) < 1e-12


def test_stored_integrals_are_an_error():
    mf = cpu.molecule("water/sto-3g").RHF()
    mf.get_jk(mf.mol, np.eye(mf.mol.nao))
    with pytest.raises(RuntimeError, match="has stored the integrals"):
        cpu.check_direct(mf)


def test_difference(monkeypatch):
    """Of any piece, and only of what has the same size."""
    monkeypatch.setattr(cpu, "PIECE", 2)
    for place in range(5):
        changed = np.arange(5.0)
        changed[place] += 0.2
        assert cpu.difference([changed], [np.arange(5.0)]) == pytest.approx(0.05)
    with pytest.raises(RuntimeError, match="cannot be compared"):
        cpu.difference([np.zeros(3)], [np.zeros(1)])


def test_methane():
    """Four hydrogens at the same distance from the carbon and from each other."""
    places = np.array([place for _, place in cpu.METHANE])
    np.testing.assert_allclose(np.linalg.norm(places[1:], axis=1), 1.087)
    apart = [np.linalg.norm(a - b) for k, a in enumerate(places[1:]) for b in places[2 + k :]]
    np.testing.assert_allclose(apart, 1.087 * np.sqrt(8 / 3))


@pytest.mark.thorough
def test_the_table_and_the_file(tmp_path, capfd):
    """Two runs append to one file: 'turns' may differ, columns may not."""
    path = tmp_path / "rows.csv"
    arguments = ["--systems", "water/sto-3g", "--kinds", "int2e", "--threads", "1", "--csv", str(path)]
    assert cpu.main(arguments) == 0
    assert cpu.main([*arguments, "--busy", "1"]) == 0
    printed = capfd.readouterr().out
    assert printed.count("| int2e | water sto-3g | ") == 2
    assert "beside 1 busy processes" in printed
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["busy"] for row in rows] == ["0", "1"]
    for row in rows:
        assert row["threads"] == "1"
        assert float(row["difference"]) < 1e-12
        assert float(row["ratio"]) == pytest.approx(float(row["seconds"]) / float(row["libcint"]))
    with pytest.raises(SystemExit, match="other columns"):
        cpu.append_csv(path, [{"kind": "int2e"}])


@pytest.mark.thorough
def test_first_calls(capfd):
    """With an empty cache the call compiles, with the same cache it does not."""
    assert cpu.main(["--cold", "--systems", "water/sto-3g", "--kinds", "int2e", "--threads", "1"]) == 0
    line = next(text for text in capfd.readouterr().out.splitlines() if text.startswith("| int2e"))
    empty, filled = (float(line.split("|")[column]) for column in (4, 7))
    assert filled < empty


def test_turns_that_count(monkeypatch):
    """Quiet ones, if there are any, and all of them beside busy processes."""
    quiet, noisy = (cpu.Turn(1.0, 1.0, 1.0, others, others == 0) for others in (0.0, 1.0))
    clock = iter(range(10**6))
    monkeypatch.setattr(cpu, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(cpu, "TURNS", 5)
    monkeypatch.setattr(cpu, "SECONDS", 1.0)
    for made, busy, counted in (
        ([quiet] * 9, 0, [quiet] * 5),
        ([noisy, quiet] * 9, 0, [quiet] * 5),
        ([noisy] * 9, 0, [noisy] * 6),
        ([noisy, quiet] * 9, 1, [noisy, quiet, noisy, quiet, noisy]),
    ):
        turns = iter(made)
        monkeypatch.setattr(cpu.Turn, "take", lambda *_, turns=turns: next(turns))
        patience = 6 if quiet not in made else 100
        assert cpu.turns_of(None, None, {"patience": patience, "busy": busy}) == counted


def test_what_others_use():
    """A busy process beside is seen."""
    with cpu.busy_processes(1):
        turn = cpu.Turn.take(lambda: cpu.sleep(0.3), lambda: cpu.sleep(0.3))
    assert turn.others > 0.3
    assert not turn.quiet


def test_busy_processes_end():
    with cpu.busy_processes(1) as children:
        (child,) = children
        assert child.poll() is None
    assert child.returncode is not None


def test_the_number_of_threads_and_the_checkout(tmp_path, monkeypatch):
    """They hold before anything is imported."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    script = tmp_path / "script.py"
    names = ["OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONPATH"]
    found = f"{{name: os.environ.get(name) for name in {names}}}"
    script.write_text(f"import json, os\nprint({cpu.SIGN!r} + json.dumps({found}))")
    monkeypatch.setattr(cpu, "__file__", str(script))
    args = SimpleNamespace(checkout=tmp_path, density="random", busy=0, patience=1)
    (row,) = cpu.run([], args, 3)
    assert (row["OMP_NUM_THREADS"], row["NUMBA_NUM_THREADS"], row["OPENBLAS_NUM_THREADS"]) == ("3", "3", None)
    assert row["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
    script.write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit, match="has failed"):
        list(cpu.run([], args, 1))
