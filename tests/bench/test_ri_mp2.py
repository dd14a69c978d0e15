"""bench/ri_mp2.py: what it prints and writes, with PySCF beside md4 on the CPU."""

import sys

import pytest
from places import ROOT

pytest.importorskip("pyscf")
sys.path.insert(0, str(ROOT / "bench"))
import ri_mp2
from clock import read_csv


def test_table(tmp_path, capsys):
    file = tmp_path / "rows.csv"
    ri_mp2.main(["--systems", "water/cc-pvdz", "--backend", "cpu", "--pyscf", "--repeats", "1", "--csv", str(file)])
    rows, printed = read_csv(file), capsys.readouterr().out
    assert [row["store"] for row in rows] == ["direct", "device"]
    for row in rows:
        assert (row["nao"], row["naux"], row["o"], row["v"]) == (24, 84, 4, 19)
        assert abs(row["difference"]) < 1e-9
        assert row["total"] == pytest.approx(row["setup"] + row["energy"])
        assert ri_mp2.line(row).count("|") == ri_mp2.HEADER.splitlines()[1].count("|")
        assert f"| {row['store']} |" in printed


def test_alone(capsys, monkeypatch):
    """Without PySCF its columns are empty; a store that does not fit is said, and nothing at all is an error."""
    arguments = ["--systems", "water/cc-pvdz", "--backend", "cpu", "--repeats", "1", "--stores", "direct"]
    ri_mp2.main(arguments)
    assert "|  |  |  |" in capsys.readouterr().out
    monkeypatch.setattr(ri_mp2, "seconds", refuse)
    with pytest.raises(SystemExit, match="nothing was measured"):
        ri_mp2.main(arguments)
    assert "store direct: too large" in capsys.readouterr().out


def refuse(*_, **options):
    raise ri_mp2.MD4Error("too large")
