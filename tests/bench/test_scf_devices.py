"""bench/scf_devices.py on the CPU."""

import re
import sys

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import scf_devices


def test_an_scf(capsys):
    scf_devices.main(["--system", "water/6-31g", "--backend", "cpu", "--devices", "0"])
    machine, line = capsys.readouterr().out.splitlines()
    assert ", md4 " in machine
    found = re.fullmatch(r"devices 0: (-\S+) Hartree after (\d+) cycles, \S+ s", line)
    assert float(found[1]) == pytest.approx(-75.98397447, abs=1e-7)
    assert 4 < int(found[2]) < 12
