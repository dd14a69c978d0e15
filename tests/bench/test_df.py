"""bench/df.py on the CPU: what it counts, prints and writes, and that it finds wrong integrals."""

import csv
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from places import ROOT

import md4

sys.path.insert(0, str(ROOT / "bench"))
import common
import df
from df import FewCase, Lists, Run

MACHINE = {"peak": 1e10, "copy": 1e10, "device": "none", "commit": "none"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nothing is measured of the machine, and threads are left as they are."""
    monkeypatch.setattr(common, "one_thread", lambda: None)
    monkeypatch.setattr(df, "machine_of", lambda backend: MACHINE)


def test_useful_flops():
    """In the cheaper order; there are 36 Hermite functions of degree 7, 455 up to degree 12."""
    assert FewCase.parse("ii|k").flops == 2 * 15 * 455 * (36 + 169)
    assert FewCase.parse("ps|i").flops == 2 * 3 * 28 * (4 + 13)
    assert FewCase.parse("(pp|d)", "25").flops == 2 * 5 * 10 * (6 * 25 + 9 * 5)
    assert FewCase.parse("pp|d").output_bytes == 8 * 45


@pytest.mark.parametrize("name", df.CLASSES)
def test_batches(name):
    """They fill a GPU, and fit it."""
    case = FewCase.parse(name)
    pairs, singles = case.counts("cuda")
    assert 2 <= singles <= df.MOST_SINGLES
    assert 1e6 < pairs * singles * case.output_bytes < 5e9


@pytest.mark.parametrize("wrong", ["pp|dd", "p1|d"])
def test_no_class(wrong):
    with pytest.raises(SystemExit, match="is no class of three shells"):
        FewCase.parse(wrong)


@pytest.mark.parametrize("target", df.TARGETS)
def test_wrong_integrals_are_found(target):
    lists = Lists(FewCase.parse("dp|d"), (5, 3), "cpu")
    run = Run(lists, target, common.Output("cpu"))
    assert np.isnan(run.error())
    run.evaluate()
    assert run.error() < 1e-13
    run.out[-1] *= 1.001
    assert run.error() > 1e-5


def test_a_plan_that_writes_nothing_is_found(monkeypatch):
    """Though another one has written before."""
    run = Run(Lists(FewCase.parse("ps|p"), (5, 3), "cpu"), "matrix", common.Output("cpu"))
    args = SimpleNamespace(repeats=1, seed=0)
    assert df.class_row(run, MACHINE, args)["error"] < 1e-13
    monkeypatch.setattr(Run, "evaluate", lambda run: None)
    assert np.isnan(df.class_row(run, MACHINE, args)["error"])


def test_tables_and_files(tmp_path, capsys):
    """A molecule in several turns: each ends between two shell pairs."""
    path = tmp_path / "rows.csv"
    rows, systems = df.main([
        "ps|p", "dp|f", "--K", "1", "5", "--backend", "cpu", "--pairs", "6", "--singles", "4", "--repeats", "1",
        "--systems", "water,sto-3g,weigend", "nowhere.xyz,sto-3g,weigend", "--gb", "2e-6", "--csv", str(path),
    ])  # fmt: skip
    assert [(row["class"], row["target"]) for row in rows[:4]] == [
        ("ps|p", "block"), ("ps|p", "matrix"), ("dp|f", "block"), ("dp|f", "matrix")
    ]  # fmt: skip
    assert len(rows) == 8
    assert max(row["error"] for row in rows) < 1e-13
    for row in rows:
        assert row["share_of_limit"] == pytest.approx(max(row["share_of_peak"], row["share_of_copy"]))
        assert row["share_of_copy"] == pytest.approx(row["written_tbs"] * 1e12 / MACHINE["copy"])
    (system,) = systems
    assert system["turns"] > 1
    assert system["error"] < 1e-12
    printed = capsys.readouterr().out
    assert "(dp|f)  5x1" in printed
    assert "nowhere.xyz" in printed
    for file, count in ((path, 8), (path.with_suffix(".systems.csv"), 1)):
        with file.open(newline="") as text:
            assert len(list(csv.DictReader(text))) == count


def test_turns():
    three = type("Matrix", (), {"naux": 10, "ncol": 30, "edges": np.array([0, 9, 12, 15, 30])})
    assert df.columns_at_once(three, 80 * 15e-9) == [(0, 15), (15, 30)]
    assert df.columns_at_once(three, 80 * 10e-9) == [(0, 9), (9, 15), (15, 30)]
    assert df.columns_at_once(three, 1.0) == [(0, 30)]


def test_integrals_of_a_molecule_are_compared(monkeypatch):
    """With PySCF's."""
    made = df.ThreeCentre.integrals
    monkeypatch.setattr(df.ThreeCentre, "integrals", lambda *args: 1.001 * made(*args))
    mol, auxmol = df.molecules("water,sto-3g,weigend", None)
    three = df.ThreeCentre(*map(md4.Basis.from_mol, (mol, auxmol)), backend="cpu")
    flat = three.integrals().reshape(-1)
    error = df.error_of_columns(three, flat, (0, three.ncol), mol, auxmol)
    assert error == pytest.approx(1e-3, rel=1e-3)
