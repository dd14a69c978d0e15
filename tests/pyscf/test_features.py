"""Each row of the table of docs/attach.md: the numbers are those of PySCF alone, and the integrals are made as it says.

Whatever of this is missing on the page, or is there and was not run, fails as well.
"""

from functools import partial

import feature_methods
import features
import numpy as np
import pytest
from feature_rows import REFUSED, water
from solvers import solver

import md4

# PySCF calls a function of its own that it will drop.
pytestmark = [
    pytest.mark.filterwarnings("ignore:remove_linear_dep_:DeprecationWarning"), pytest.mark.usefixtures("root_log"),
]  # fmt: skip


def test_the_table_is_that_of_the_rows():
    text = features.PAGE.read_text()
    assert len(features.MARK.findall(text)) == 1
    assert features.filled(text) == text, f"run python {feature_methods.__file__}"
    assert all(f"- {name}\n" in text for name in REFUSED)


@pytest.mark.parametrize("row", features.ROWS, ids=lambda row: row.name)
def test_row(row, backend):
    if row.needs:
        pytest.importorskip(row.needs)
    want = np.asarray(row.run(features.plain), float)
    with features.counted() as makers:
        found = np.asarray(row.run(partial(row.attach, backend=backend)), float)
    assert want.shape == found.shape
    assert np.all(np.isfinite(want))
    assert abs(found - want).max() < row.tol
    assert (makers.md4, makers.pyscf) == (row.md4, row.pyscf)


def test_integrals_of_pyscf_are_counted():
    """Also those that it keeps, and those whose function it has looked up before."""
    for options, want in (({}, "`int2e`"), ({"max_memory": 0}, "`int2e`")):
        with features.counted() as makers:
            solver("RHF", water(), **options).kernel()
        assert (makers.md4, makers.pyscf) == ("", want)
    with features.counted() as makers:
        solver("RHF", water()).density_fit().kernel()
    assert (makers.md4, makers.pyscf) == ("", "`int2c2e`, `int3c2e`")


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_refused(make):
    mf = make()
    with pytest.raises(md4.UnsupportedError):
        md4.attach(mf)
