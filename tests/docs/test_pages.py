"""The Python code of README and of the site's pages runs, in the order in which it stands on a page.

A block whose fence says ``python gpu`` needs a GPU, and the blocks before it that need none.
"""

import argparse
import re
import warnings

import pytest
from places import ROOT

from md4.cli.commands import parser

PAGES = sorted(p.relative_to(ROOT).as_posix() for p in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```python( gpu)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Bases of examples that take seconds on a CPU, and what stands for them here.
QUICK = dict.fromkeys(("cc-pvqz", "cc-pvdz", "6-31g"), "sto-3g")
# What a page's code takes for granted.
GIVEN = {"docs/scf.md": "import numpy as np\ndm = np.eye(mol.nao)"}


def blocks(page):
    """(needs a GPU, code) of each Python block of a page, with smaller bases."""
    text = (ROOT / page).read_text()
    for slow, quick in QUICK.items():
        text = text.replace(f'basis="{slow}"', f'basis="{quick}"')
    return [(bool(gpu), code) for gpu, code in FENCE.findall(text)]


def run(page, codes):
    """Runs codes one after the other with the same names."""
    names = {}
    for n, code in enumerate(codes):
        exec(compile(code, f"{page}, code {n + 1}", "exec"), names)


def with_given(page, codes):
    """The codes, what they take for granted after the first."""
    return [*codes[:1], GIVEN[page], *codes[1:]] if page in GIVEN else codes


@pytest.mark.parametrize("page", [p for p in PAGES if any(not gpu for gpu, _ in blocks(p))])
def test_page(page):
    run(page, with_given(page, [code for gpu, code in blocks(page) if not gpu]))


@pytest.mark.gpu
@pytest.mark.parametrize("page, block", [(p, n) for p in PAGES for n, (gpu, _) in enumerate(blocks(p)) if gpu], ids=str)
def test_gpu_block(page, block, gpu):
    code = blocks(page)[block][1]
    for module in ("cupy", "torch"):
        if f"import {module}" in code:
            pytest.importorskip(module)
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # of other libraries
        run(page, [c for on_gpu, c in blocks(page)[:block] if not on_gpu] + [code])


def test_printed_message_of_memory():
    """The page shows what md4 says."""
    import pyscf

    import md4

    mol = pyscf.M(atom="O 0 0 0.118; H 0 0.755 -0.471; H 0 -0.755 -0.471", basis="cc-pvdz", verbose=0)
    with pytest.raises(md4.MemoryLimitError) as caught:
        md4.int2e(mol, backend="cpu", max_memory=2)
    text = " ".join((ROOT / "docs/memory.md").read_text().split())
    assert " ".join(str(caught.value).split()) in text


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
