"""bench/mp2.py on the CPU: its table, its file, and the extrapolation."""

import csv
import sys

import pytest
from places import ROOT

pytest.importorskip("pyscf")
sys.path.insert(0, str(ROOT / "bench"))
import mp2


def test_table(capsys, tmp_path):
    file = tmp_path / "mp2.csv"
    mp2.main(["--systems", "water/cc-pvdz", "--pyscf", "--repeats", "1", "--backend", "cpu", "--csv", str(file)])
    (row,) = csv.DictReader(file.read_text().splitlines())
    assert (row["nao"], row["occupied"], row["virtual"]) == ("24", "4", "19")
    assert float(row["difference"]) < 1e-9
    assert min(float(row[name]) for name in ("hf_seconds", "first", "mp2_seconds", "pyscf")) > 0
    text = capsys.readouterr().out
    assert "| water | cc-pvdz | 24 | 4 | 19 |" in text
    assert row["limit"] == ""


def test_limit(capsys):
    mp2.main(["--limit", "water", "--largest", "cc-pvtz", "--repeats", "0", "--backend", "cpu"])
    double, triple = ([cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()[-2:])
    assert double[-2] == ""
    hf, correlation, found = map(float, triple[-4:-1])
    assert found == pytest.approx(hf + (27 * correlation - 8 * float(double[-3])) / 19, abs=5e-6)
