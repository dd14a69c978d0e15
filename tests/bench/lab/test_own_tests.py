"""bench/lab/own_tests.py: objects are attached, what md4 did is counted, and failures are compared."""

import sys
from pathlib import Path

import pytest
from places import ROOT

pytest.importorskip("pyscf")
sys.path.insert(0, str(ROOT / "bench" / "lab"))
import own_tests

TESTS = """
import unittest
from pyscf import gto, mp, scf

class Helium(unittest.TestCase):
    def test_energy(self):
        mf = scf.RHF(gto.M(atom="He", basis="6-31g", verbose=0)).run()
        self.assertAlmostEqual(mp.MP2(mf).run().e_tot, -2.8665, 2)

    def test_wrong_numbers(self):
        self.assertAlmostEqual(1.00000001, 2.0)
        self.assertAlmostEqual(3.0, 4.0)

    def test_tensor(self):
        mf = scf.RHF(gto.M(atom="He", basis="6-31g", verbose=0)).run()
        self.assertTrue(mf._eri is not None)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("mode, counts", [("plain", {}), ("direct", {"attached": 3, "MO sets": 1})])
def test_a_file(mode, counts, tmp_path):
    path = tmp_path / "test_helium.py"
    path.write_text(TESTS)
    tests, found, _, late = own_tests.run(path, mode, limit=300)
    outcomes = {name.split("::")[-1]: row["outcome"] for name, row in tests.items()}
    assert outcomes == {"test_energy": "passed", "test_wrong_numbers": "failed",
                        "test_tensor": "passed" if mode == "plain" else "failed"}  # fmt: skip
    assert "1.00000001 not 2.0, 3.0 not 4.0" in tests["Helium::test_wrong_numbers"]["why"]
    assert not late
    assert counts.items() <= found.items()
    assert ("builds" in found) == (mode != "plain")


def test_failures_as_without_md4(capsys):
    def row(why, outcome="failed"):
        return {"outcome": outcome, "why": why}

    alone = {"a": ["E  1.00000001 not 2.0 of RHF"], "b": ["E  1.0 not 2.0"]}
    tests = {"a": row("line\nE  1.00000002 not 2.0 of MD4RHF"), "b": row("E  1.1 not 2.0"), "c": row(None, "passed")}
    failed = own_tests.report(Path("/x/mp/test/test_a.py"), "attached", tests, {"attached": 2}, 1.0, False, alone)
    assert set(failed) == {"a", "b"}
    printed = capsys.readouterr().out
    assert "mp/test/test_a.py attached: 1 passed, 2 failed, 1 s; 2 attached" in printed
    assert "a: as without md4" in printed
    assert "E  1.1 not 2.0" in printed
