"""Random command lines and damaged geometry files: an exit status and a sentence, never a traceback.

Other cases and more of them: see `strategies`.
"""

import json
import warnings
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest
from hypothesis import strategies as st
from public import counted
from strategies import TALLY, fuzz, report

from md4.__main__ import main

XYZ = "2\nwater's cousin\nHe 0.0 0.0 0.0\nH 0.0 0.0 0.9\n"
QCSCHEMA = json.dumps({
    "schema_name": "qcschema_molecule", "schema_version": 2, "symbols": ["He", "H"],
    "geometry": [0.0, 0.0, 0.0, 0.0, 0.0, 1.4], "molecular_charge": 1, "molecular_multiplicity": 1,
})  # fmt: skip
# What damage may put into a file; digits make other numbers of those that are there.
SCRAPS = ["", "0", "-", "9" * 400, "1e400", "NaN", "Infinity", "null", "[", "{", "[" * 5000, '"', "\n", "\x00",
          "\ufeff", "é", "Zz", "ghost-H", ",", "true", "\\ud800"]  # fmt: skip
GEOMETRIES = [*(9 * ["He 0 0 0"]), "He 0 0 0; H 0 0 0.9", "", "x", "He 0 0",
              "He 0 0 nan", "He 0 0 1e400", "Zz 0 0 0", ".", "/",
              "missing.xyz", "missing.json", "/dev/null", "He 0 0 0; He 0 0 0", "1", "He 0 0 0 0", "\x00", "He 0 0 x",
              "x" * 5000, "/root/../", "He 1e300 0 0"]  # fmt: skip
NUMBERS = ["0", "1", "-1", "2", "0.3", "-0.3", "nan", "inf", "-inf", "1e400", "x", "", "1e-9", "9" * 400, "1_0", "0x1"]
BASES = [*(9 * ["sto-3g"]), "6-31g", "", "nope", "/", "../x", "\x00", "{}", "sto-3g@1s", "x" * 5000]
OUTPUTS = ["t.npy", "t.h5", "t.txt", "t", "", ".", "no/t.npy", "folder.npy", "folder.h5", "/proc/t.npy",
           "/dev/full.npy", "t.NPY", ".npy", "x" * 300 + ".npy", "\x00.npy", "file.npy/t.npy"]  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A command line; `text` is what the geometry file holds, None where there is none."""

    arguments: tuple
    text: str = None


def options(**choices):
    """Some options, each with one of its values."""
    each = [st.sampled_from(values).map(lambda v, name=name: (name, *([v] if isinstance(v, str) else v)))
            for name, values in choices.items()]  # fmt: skip
    return st.lists(st.one_of(each), max_size=2, unique_by=lambda o: o[0]).map(lambda found: tuple(chain(*found)))


def named(prefix="--", **choices):
    return options(**{prefix + name.replace("_", "-"): values for name, values in choices.items()})


MOLECULE = {"charge": NUMBERS, "spin": NUMBERS, "omega": NUMBERS, "max_memory": [*NUMBERS, "100"], "cart": [()],
            "backend": ["cpu", "abacus", "", "CPU"]}  # fmt: skip
ERI = named(**MOLECULE, aosym=["s1", "s4", "s8", "s2", ""], output=OUTPUTS)
VALIDATE = named(**MOLECULE, tolerance=NUMBERS, abs_tolerance=NUMBERS, max_quartets=NUMBERS, seed=NUMBERS)
REFUSED = st.sampled_from([
    (), ("",), ("x",), ("eri",), ("eri", "He"), ("validate", "--seed"), ("warmup", "--lmax", "-1"),
    ("warmup", "--lmax", "x"),
    ("warmup", "--jobs", "0"), ("warmup", "--operator", "x"), ("warmup", "--basis", "sto-3g"), ("warmup", "He 0 0 0"),
    ("warmup", "nope", "--basis", "sto-3g"), ("info", "x"), ("--version", "x"), ("eri", "--help=1"),
])  # fmt: skip


@st.composite
def damaged(draw):
    """The text of a geometry file, some pieces of it replaced by scraps."""
    suffix = draw(st.sampled_from([".xyz", ".json"]))
    text = XYZ if suffix == ".xyz" else QCSCHEMA
    for _ in range(draw(st.integers(0, 3))):
        first = draw(st.integers(0, len(text)))
        text = text[:first] + draw(st.sampled_from(SCRAPS)) + text[first + draw(st.sampled_from([0, 1, 1, 3, 30])) :]
    return "geometry" + suffix, text


@st.composite
def lines(draw):
    """A `Line` of `md4 eri` or `md4 validate`, rarely another."""
    if draw(st.integers(0, 9)) == 9:
        return Line(draw(REFUSED))
    command = draw(st.sampled_from(["eri", "eri", "validate"]))
    geometry, text = draw(damaged()) if draw(st.booleans()) else (draw(st.sampled_from(GEOMETRIES)), None)
    basis = draw(st.sampled_from(BASES))
    more = draw(ERI if command == "eri" else VALIDATE)
    if "--backend" not in more:
        more = (*more, "--backend", "cpu")
    return Line((command, geometry, "--basis", basis, *more), text)


def checker(folder, capsys):
    """The check of a line, its files in a folder that is the current one."""

    def check_line(line):
        if line.text is not None:
            (folder / line.arguments[1]).write_text(line.text, encoding="utf-8", errors="surrogatepass")
        with warnings.catch_warnings(), counted() as work:
            warnings.simplefilter("ignore")  # PySCF's; a command line does not stop at one
            try:
                status = main(list(line.arguments))
            except SystemExit as leave:
                status = leave.code
        output = capsys.readouterr()
        TALLY[check_line.__qualname__, f"of status {status}"] += 1
        assert status in (0, 1, 2)
        assert "Traceback" not in output.err
        if status == 2:
            assert "md4" in output.err, "a refusal says why"
            assert not work or "MB" in output.err, "refused after work"
        if "--output" in line.arguments and status == 0 and line.arguments[0] == "eri":
            written(folder / line.arguments[line.arguments.index("--output") + 1])

    return check_line


def written(path):
    """The file holds a tensor."""
    if path.suffix == ".npy":
        assert np.isfinite(np.load(path)).all()
    else:
        import h5py

        with h5py.File(path) as file:
            assert np.isfinite(file["eri"][:]).all()


@pytest.fixture
def check_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("folder.npy", "folder.h5"):
        (tmp_path / name).mkdir()
    (tmp_path / "file.npy").write_text("x")
    return checker(tmp_path, capsys)


def test_lines(check_line):
    fuzz(check_line, lines(), 60)
    report(check_line)


@pytest.mark.slow
def test_lines_at_length(check_line):
    fuzz(check_line, lines(), 2000)
    report(check_line)
