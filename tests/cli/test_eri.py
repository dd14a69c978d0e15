"""What `md4 eri` says before the work, and where there is too little memory."""

import pytest
from places import EXAMPLES

from md4.__main__ import main
from md4.errors import MemoryLimitError

pytest.importorskip("pyscf")
WATER = str(EXAMPLES / "water.xyz")
BASIS = ["--basis", "sto-3g", "--backend", "cpu"]


def test_what_does_not_fit_is_told_in_options(capsys):
    """Sizes as one reads them, and no argument of Python; the molecule comes before the work."""
    arguments = ["eri", str(EXAMPLES / "benzene.xyz"), "--basis", "aug-cc-pv5z", "--backend", "cpu"]
    assert main([*arguments, "--max-memory", "1e4"]) == 2
    printed = capsys.readouterr()
    assert printed.err == (
        "md4: the AO tensor of shape (1242, 1242, 1242, 1242) takes 19 TB and with the least workspace 19.1 TB, but "
        "10 GB may be used; use --aosym s4 or s8, or -o FILE, to which a large tensor goes row by row, or a larger "
        "--max-memory.\n"
    )
    assert printed.out == "12 atoms, 276 shells, 1242 AOs in aug-cc-pv5z\n"


def test_the_molecule_is_printed_before_the_work(capsys, monkeypatch):
    """Also of `--df`."""
    seen = []

    def work(*_, **__):
        seen.append(capsys.readouterr().out)
        raise MemoryLimitError("too much; raise max_memory.")

    for name in ("int2e", "int3c2e"):
        monkeypatch.setattr(f"md4.{name}", work)
    assert main(["eri", WATER, *BASIS]) == main(["eri", WATER, *BASIS, "--df"]) == 2
    assert seen[0] == "3 atoms, 5 shells, 7 AOs in sto-3g\n"
    assert seen[1] == seen[0] + "37 shells, 113 functions in def2-svp-jkfit\n"
    assert "max_memory" not in capsys.readouterr().err
