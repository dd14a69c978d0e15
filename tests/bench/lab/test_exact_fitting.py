"""bench/lab/exact_fitting.py: what it draws, that it finds the errors that there are, and its table."""

import sys

import numpy as np
import pytest
from places import ROOT

pytest.importorskip("pyscf")
sys.path.insert(0, str(ROOT / "bench" / "lab"))
import exact_fitting

from md4.engine import Engine


@pytest.mark.parametrize(("count", "l"), [(3, 2), (2, 3)])
def test_blocks_agree(count, l):
    basis = exact_fitting.random_basis(np.random.default_rng(1), l, count)
    assert basis.shells[0 if count == 2 else 2].l == l
    ours, theirs, bound = exact_fitting.blocks(basis, "cpu")
    assert ours.shape == theirs.shape
    assert abs(ours - theirs).max() < 1e-8 * abs(ours).max()  # libcint is off by 4e-10 in the first
    assert 0 < abs(ours).max() <= bound * (1 + 1e-12)


@pytest.mark.parametrize("count", [2, 3])
def test_errors_are_found(count, monkeypatch):
    seed = [0, count, 1]
    mine, other, bound = exact_fitting.judged(np.random.default_rng(seed), 1, count, "cpu")
    assert max(mine, other) < 1e-12
    assert bound < 1e-14
    compute = Engine.compute
    monkeypatch.setattr(Engine, "compute", lambda *args: compute(*args) * (1 + 1e-9))
    mine, again, _ = exact_fitting.judged(np.random.default_rng(seed), 1, count, "cpu")
    assert (mine, again) == (pytest.approx(1e-9, rel=1e-3), pytest.approx(other, rel=1e-3))


def test_table(tmp_path, capsys):
    path = tmp_path / "a.csv"
    exact_fitting.main(["--backend", "cpu", "--blocks", "2", "--lmax", "1", "--csv", str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[3:]] == ["| (ab|s)", "| (ab|p)", "| (s|Q)", "| (p|Q)"]
    assert all(float(number) < 1e-11 for line in lines[3:] for number in line.strip("| ").split(" | ")[2:])
    assert len(path.read_text().splitlines()) == 1 + 8
