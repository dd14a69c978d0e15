"""Examples in the docstrings of md4's public names run and print what they show; the reference has all properties."""

import doctest
import inspect
import re

import pytest
from pages import printing, same_output
from places import ROOT

import md4

CLASSES = [name for name in md4.__all__ if inspect.isclass(getattr(md4, name))]
# Properties that are no part of the interface.
HIDDEN = {"Engine": {"lock"}, "JK": {"lists"}}
FINDER = doctest.DocTestFinder(exclude_empty=True)
EXAMPLES = [t for name in md4.__all__ for t in FINDER.find(getattr(md4, name), f"md4.{name}") if t.examples]


class Checker(doctest.OutputChecker):
    """Compares as the pages' outputs are compared: word by word, numbers up to rounding."""

    def check_output(self, want, got, optionflags):
        return same_output(got, want)


def test_objects_have_examples():
    missing = {n for n in md4.__all__ if not n.endswith("Error")} - {t.name.removeprefix("md4.") for t in EXAMPLES}
    assert not missing


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example(example):
    said = []
    with printing() as printed:
        doctest.DocTestRunner(Checker(), verbose=False).run(example, out=said.append)
    assert not said, "".join(said)
    assert printed.getvalue() == ""


@pytest.mark.parametrize("name", CLASSES)
def test_properties_are_in_the_reference(name):
    own = vars(getattr(md4, name))
    public = {n for n, value in own.items() if isinstance(value, property) and not n.startswith("_")}
    text = (ROOT / "docs/api.md").read_text()
    listed = re.search(rf"^\.\. auto\w+:: md4\.{name}\n(?:   :members: (.*)\n)?", text, re.MULTILINE)[1] or ""
    documented = {n for n in public if own[n].__doc__}
    assert public <= documented, "autodoc leaves out what has no docstring"
    assert public - HIDDEN.get(name, set()) <= set(listed.split(", "))
