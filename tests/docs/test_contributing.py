"""CONTRIBUTING's tables are those of the folders, and the rules for results that a tool can check."""

import re

import pytest
from places import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
RESULTS = ROOT / "bench" / "results"
MOST_LINES = 185  # of bench/RESULTS.md, which has about 180


def rows(header):
    """Rows of the table whose header begins so, without the header: lists of the names in backticks of each cell."""
    lines = TEXT[TEXT.index(f"\n| {header} ") + 1 :].split("\n\n")[0].splitlines()
    return [[re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")] for line in lines[2:]]


FAMILIES, OTHERS = rows("family"), rows("other modules of `md4/`")


def named(table, column):
    return {name for row in table for name in row[column]}


def modules(folder):
    """Names of the modules of a package and of those below it."""
    found = (path.relative_to(ROOT / folder).with_suffix("") for path in (ROOT / folder).rglob("*.py"))
    return {path.as_posix() for path in found if path.name != "__init__"}


@pytest.mark.parametrize("column, package", [(1, "kernels"), (2, "emit")])
def test_every_kernel_belongs_to_a_family(column, package):
    """And no family has one that is gone."""
    assert named(FAMILIES, column) == modules(f"md4/gpu/{package}"), "adapt the table of families in CONTRIBUTING.md"


def test_every_other_module_has_tests():
    """By its name, or as the table says."""
    these = {name for name in modules("md4") if not name.startswith(("gpu/kernels/", "gpu/emit/"))}
    tests = {name.replace("test_", "") for name in modules("tests")}
    assert not these - tests - named(OTHERS, 0), "name the tests by the module, or add a row in CONTRIBUTING.md"
    assert not named(OTHERS, 0) - these, "gone"


def test_tests_are_there():
    assert not {name for name in named(FAMILIES, 3) | named(OTHERS, 1) if not (ROOT / "tests" / name).exists()}


def test_every_script_has_a_row():
    """Those of bench/ that take arguments, and all of bench/lab but what one of them runs."""
    scripts = {path.name for path in (ROOT / "bench").glob("*.py") if "argparse" in path.read_text()}
    assert named(rows("script in `bench/`"), 0) == scripts
    assert named(rows("script in `bench/lab/`"), 0) == {path.name for path in (ROOT / "bench" / "lab").glob("*.py")} - {
        "families.py"
    }


def test_results_are_short():
    assert len((ROOT / "bench" / "RESULTS.md").read_text().splitlines()) <= MOST_LINES


def test_the_diary_is_not_on_the_site():
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "docs" / "conf.py"]
    included = re.compile(r"include\} *\S*LAB_NOTES|\]\(\S*LAB_NOTES|LAB_NOTES\S* *:")
    assert not [page.name for page in pages if included.search(page.read_text())]


def test_every_file_of_results_is_named():
    """By a page, a module, a test or a script."""
    folders = [ROOT / name for name in ("bench", "docs", "md4", "tests")]
    texts = [ROOT / "README.md", *(path for folder in folders for path in folder.rglob("*") if path.suffix in
             (".md", ".py", ".ipynb") and RESULTS not in path.parents)]  # fmt: skip
    everything = "\n".join(path.read_text() for path in texts)
    assert not [path.name for path in RESULTS.iterdir() if path.name not in everything]
