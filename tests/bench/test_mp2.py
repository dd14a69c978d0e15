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


def test_plot(tmp_path):
    """Of the changes of three energies, the extrapolated one from the third basis on."""
    pytest.importorskip("matplotlib")
    energies = zip(("cc-pvdz", "cc-pvtz", "cc-pvqz"), (-1.0, -1.5, -1.6), (-0.2, -0.26, -0.28))
    rows = [{"system": "water", "basis": b, "hf": hf, "correlation": c, "limit": ""} for b, hf, c in energies]
    rows[1]["limit"], rows[2]["limit"] = -1.8, -1.92
    (axis,) = mp2.plot(rows, tmp_path / "limit.svg").axes
    drawn = {line.get_label(): (list(line.get_xdata()), line.get_ydata()) for line in axis.get_lines()}
    assert {name: x for name, (x, _) in drawn.items()} == {"HF": [1, 2], "MP2": [1, 2], "MP2, extrapolated": [2]}
    found = [change for _, y in drawn.values() for change in y]
    assert found == pytest.approx([0.5, 0.1, 0.06, 0.02, 0.02])
    assert (tmp_path / "limit.svg").stat().st_size > 0


def test_plot_needs_limit(capsys):
    with pytest.raises(SystemExit):
        mp2.main(["--systems", "water/cc-pvdz", "--plot", "limit.svg"])
    assert "needs --limit" in capsys.readouterr().err
