"""The Python code of README and of the site's pages runs as it stands there, and prints what the pages say.

A block whose fence says ``python gpu`` needs a GPU, and the blocks before it that need none. A block ``text output``
shows what the Python block before it prints, and ``text output roughly`` what depends on the backend.
"""

import argparse
import re
import warnings

import pytest
from pages import ROUGHLY, TOLERANCE, printing, same_output
from places import ROOT

from md4.cli.commands import parser

PAGES = sorted(p.relative_to(ROOT).as_posix() for p in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(
    r"^```python( gpu)?\n(.*?)^```$(?:\n+```text output( roughly)?\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)


def blocks(page):
    """(needs a GPU, code, what it prints with the tolerance of its numbers, or None) of a page's Python blocks."""
    found = FENCE.findall((ROOT / page).read_text())
    return [
        (bool(gpu), code, (output, ROUGHLY if roughly else TOLERANCE) if output else None)
        for gpu, code, roughly, output in found
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


@pytest.mark.parametrize("page", [p for p in PAGES if any(not gpu for gpu, *_ in blocks(p))])
def test_page(page):
    run(page, [(code, output) for gpu, code, output in blocks(page) if not gpu])


GPU_BLOCKS = [(page, n) for page in PAGES for n, (gpu, *_) in enumerate(blocks(page)) if gpu]


@pytest.mark.gpu
@pytest.mark.parametrize("page, block", GPU_BLOCKS, ids=str)
def test_gpu_block(page, block, gpu):
    _, code, output = blocks(page)[block]
    for module in ("cupy", "torch"):
        if f"import {module}" in code:
            pytest.importorskip(module)
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # of other libraries
        before = [(code, None) for on_gpu, code, _ in blocks(page)[:block] if not on_gpu]
        run(page, [*before, (code, output)])


def test_options_of_the_command_line():
    """docs/cli.md has all options, and no other."""
    commands = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    real = {o for c in commands.values() for a in c._actions for o in a.option_strings if o not in ("-h", "--help")}
    text = (ROOT / "docs/cli.md").read_text()
    assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text)) - {"--help", "--version", "-m"} == real
    assert set(re.findall(r"^## md4 (\w+)", text, re.MULTILINE)) == set(commands)


def test_public_names_are_in_the_reference():
    import md4

    text = (ROOT / "docs/api.md").read_text()
    assert set(re.findall(r"^\.\. auto\w+:: md4\.(\w+)$", text, re.MULTILINE)) == set(md4.__all__)
