"""Tables of README and of bench/RESULTS.md are those of the CSV files in bench/results."""

import sys

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import tables


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_files(page):
    text = page.read_text()
    assert text.count("<!-- table ") == len(tables.MARK.findall(text)) > 0
    assert tables.filled(text) == text, "run python bench/tables.py"


def test_times_of_other_runs_are_marked():
    found = {row["label"]: row["times"] for row in tables.builds()}
    assert found["water aug-cc-pV6Z"]["PySCF"][1]
    assert found["(H2O)8 cc-pVQZ"]["GPU4PySCF"][1]
    assert not found["water cc-pV6Z"]["PySCF"][1]
    assert not found["benzene cc-pV5Z"]["PySCF"][1]
    assert tables.seconds(found["benzene cc-pV5Z"]["PySCF"]) == "108 *"
    assert tables.seconds((8.1931, True)) == "8.19"


HEADER = "kind,system,first,seconds,libcint,ratio,threads,busy,commit,processor,processors,python,numpy,numba,pyscf"
WHERE = "abc1234,Some CPU,2,3.12.3,2.4.6,0.68.0,2.14.0"


def test_tables_of_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    names = [name for name in tables.TABLES if name.startswith("cpu")]
    assert all(tables.TABLES[name]() == tables.MISSING for name in names)
    rows = ["int2e,water/cc-pvdz,1,0.02,0.01,2,2,0", "jk,water/cc-pvdz,1,0.3,0.6,0.5,2,0", "class,g,1,3,12,0.25,1,0",
            "scf,water/cc-pvdz,1,4,5,0.8,2,0", "scf-direct,water/cc-pvdz,1,4,8,0.5,2,0",
            "jk,water/cc-pvdz,1,9,1,9,2,2"]  # fmt: skip
    (tmp_path / "cpu.csv").write_text("\n".join([HEADER, *(f"{row},{WHERE}" for row in rows)]))
    found = tables.cpu_table().splitlines()
    assert found[2:4] == [
        "| water cc-pVDZ | 2 | 0.02 | 0.01 | 2 | 0.3 | 0.6 | 0.5 | 4 | 5 | 0.8 |",
        r"| (gg\|gg) | 1 | 3 | 12 | 0.25 |  |  |  |  |  |  |",
    ]
    assert found[5].startswith("Commit abc1234; Some CPU, 2 processors; Python 3.12.3")
    short = tables.cpu_short().splitlines()
    assert "SCF as it is, PySCF = 1 | SCF, both direct, PySCF = 1" in short[0]
    assert short[2] == "| water cc-pVDZ | 2 | 2 | 0.5 | 0.8 | 0.5 |"


def test_tables_of_several_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.device_table() == tables.MISSING
    columns = "system,basis,matrices,form,devices,seconds,spread,speedup,efficiency,difference,lists,uneven,sums,beside"
    rows = [
        '8 waters,cc-pvtz,"J, K",process,1,4,0.01,1,1,0,0.3,0,0.01,0.02,3.10,A machine',
        '8 waters,cc-pvtz,"J, K",process,2,2.5,0.01,1.6,0.8,1e-14,0.2,0.1,0.01,0.02,3.10 3.20,A machine',
        '8 waters,cc-pvtz,"J, K",ranks,2,2,0.01,2,1,1e-14,0.2,0.1,0.01,0.02,3.10 3.20,A machine',
    ]
    (tmp_path / "scaling-devices.csv").write_text("\n".join([f"{columns},peak_gb,machine", *rows]))
    found = tables.device_table().splitlines()
    assert found[0] == "| system | matrices | 1 GPU | 2 GPUs, one process | 2 GPUs, ranks |"
    assert found[2] == "| (H2O)8 cc-pVTZ | J, K | 4 s | 2.5 s, 1.60x, 80% | 2 s, 2.00x, 100% |"
    assert found[-1] == "A machine."
