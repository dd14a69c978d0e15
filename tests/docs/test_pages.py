"""The Python code of README and of the site's pages runs as it stands there, and prints what the pages say.

A block whose fence says ``python gpu`` needs a GPU, and the blocks before it that need none. A block ``python mpi`` is
a program for mpiexec. A block ``text output`` shows what the Python block before it prints, and ``text output roughly``
what depends on the backend.
"""

import argparse
import re
import warnings

import mpi_jobs
import pytest
from mpi_jobs import needs_mpi
from pages import ROUGHLY, TOLERANCE, printing, same_output
from places import ROOT

from md4.cli.commands import parser

PAGES = sorted(p.relative_to(ROOT).as_posix() for p in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(
    r"^```python( gpu| mpi)?\n(.*?)^```$(?:\n+```text output( roughly)?\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)


def blocks(page):
    """("gpu", "mpi" or "", code, what it prints with the tolerance of its numbers, or None) of Python blocks."""
    found = FENCE.findall((ROOT / page).read_text())
    return [
        (kind.strip(), code, (output, ROUGHLY if roughly else TOLERANCE) if output else None)
        for kind, code, roughly, output in found
    ]


def run(page, codes):
    """Runs (code, output of `blocks`) one after the other with the same names."""
    names = {}
    for n, (code, output) in enumerate(codes):
        with printing() as printed:
            exec(compile(code, f"{page}, code {n + 1}", "exec"), names)
        if output is not None:
            assert same_output(printed.getvalue(), *output), f"{page}, code {n + 1} printed:\n{printed.getvalue()}"


def test_words_of_output():
    assert same_output("energy = -1.00000000001, (2, 3)", "energy = -1.0,  (2, 3)")
    assert same_output("seconds=0.123) 4e-16", "seconds=...) 1e-15")
    assert same_output("120 quartets", "100 quartets", ROUGHLY)
    assert not same_output("140 quartets", "100 quartets", ROUGHLY)
    for other in ("energy = -1.0, (2, 4)", "energy = -1.001, (2, 3)", "energy = -1.0, (2, 3) x", "energy = -1.0,"):
        assert not same_output("energy = -1.0, (2, 3)", other)


def test_every_output_belongs_to_code():
    for page in PAGES:
        shown = (ROOT / page).read_text().count("```text output")
        assert shown == sum(output is not None for *_, output in blocks(page)), page


@pytest.mark.parametrize("page", [p for p in PAGES if any(not kind for kind, *_ in blocks(p))])
def test_page(page, root_log):
    run(page, [(code, output) for kind, code, output in blocks(page) if not kind])


@pytest.mark.thorough
def test_optimisation_in_cc_pv5z(root_log):
    """The block of docs/forces.md with the basis, and the bond length, that the text after it names."""
    page = "docs/forces.md"
    (code,) = (code for _, code, _ in blocks(page) if "optimize(" in code)
    bond = re.search(r"In cc-pV5Z, .*?finds (\d\.\d+) Å", (ROOT / page).read_text(), re.DOTALL)[1]
    run(page, [("import md4, pyscf", None), (code.replace('"cc-pvqz"', '"cc-pv5z"'), (bond, 2e-4))])


GPU_BLOCKS, MPI_BLOCKS = (
    [(page, n) for page in PAGES for n, (kind, *_) in enumerate(blocks(page)) if kind == wanted]
    for wanted in ("gpu", "mpi")
)


@pytest.mark.gpu
@pytest.mark.parametrize("page, block", GPU_BLOCKS, ids=str)
def test_gpu_block(page, block, gpu):
    _, code, output = blocks(page)[block]
    for module in ("cupy", "torch"):
        if f"import {module}" in code:
            pytest.importorskip(module)
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # of other libraries
        before = [(code, None) for kind, code, _ in blocks(page)[:block] if not kind]
        run(page, [*before, (code, output)])


@pytest.mark.thorough
@pytest.mark.parametrize("page, block", MPI_BLOCKS, ids=str)
@needs_mpi
def test_mpi_block(page, block, tmp_path):
    _, code, output = blocks(page)[block]
    done = mpi_jobs.run(tmp_path, 2, code, prelude="")
    done.check()
    assert same_output(done.printed, *output), done.printed


def test_options_of_the_command_line():
    """docs/cli.md has all options, and no other."""
    commands = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    real = {o for c in commands.values() for a in c._actions for o in a.option_strings if o not in ("-h", "--help")}
    text = (ROOT / "docs/cli.md").read_text()
    assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text)) - {"--help", "--version", "-m", "-n"} == real
    assert set(re.findall(r"^## md4 (\w+)", text, re.MULTILINE)) == set(commands)


def test_public_names_are_in_the_reference():
    import md4

    text = (ROOT / "docs/api.md").read_text()
    assert set(re.findall(r"^\.\. auto\w+:: md4\.(\w+)(?:\.\w+)?$", text, re.MULTILINE)) == set(md4.__all__)
