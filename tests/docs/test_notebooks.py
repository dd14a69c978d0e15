"""Notebooks are in git as they are meant to be: no outputs, one title, stable cells. CI runs them, by nbmake."""

import json

import places
import pytest

NOTEBOOKS = sorted(places.NOTEBOOKS.glob("*.ipynb"))


def cells(path, kind=None):
    """The cells of a notebook, or those of one kind."""
    return [cell for cell in json.loads(path.read_text())["cells"] if kind in (None, cell["cell_type"])]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return request.param


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} >= {"first_integrals", "accuracy", "speed", "basis_set_limit"}


def test_no_outputs(notebook):
    for cell in cells(notebook, "code"):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
        assert "execution" not in cell["metadata"]


def test_cells_have_names_of_their_own(notebook):
    names = [cell["id"] for cell in cells(notebook)]
    assert len(set(names)) == len(names)


def test_the_first_cell_is_the_only_title(notebook):
    first, *rest = cells(notebook, "markdown")
    assert cells(notebook)[0] == first
    assert "".join(first["source"]).startswith("# ")
    assert not any(line.startswith("# ") for cell in rest for line in "".join(cell["source"]).splitlines())


def test_titles_differ():
    titles = [cells(path)[0]["source"][0] for path in NOTEBOOKS]
    assert len(set(titles)) == len(titles)
