"""What tests of pages share: a strict reader of HTML's tables, and what a Markdown page's code prints."""

import contextlib
import io
import re
import sys
from html.parser import HTMLParser
from itertools import zip_longest

import pytest

VOID = ("br", "img", "meta", "hr")

# A number that stands by itself or at the beginning or end of a word, as in "energy=-1.5)".
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
# Largest difference of a printed number from the one that a page shows, relative to the larger of it and 1. Rounding
# errors, which differ from machine to machine, are far below.
TOLERANCE = 1e-8
# The same for numbers that depend on the backend and its tunable numbers, such as how many quartets are left out.
ROUGHLY = 0.3


class Page(HTMLParser):
    """Rows of all tables of a piece of HTML, as lists of texts; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.cells = [], [], None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


class Stdout:
    """The standard output of the moment."""

    def write(self, text):
        sys.stdout.write(text)

    def flush(self):
        sys.stdout.flush()


@contextlib.contextmanager
def printing():
    """What is printed, also by PySCF's objects, which took their stdout when PySCF was imported."""
    from pyscf.gto.mole import MoleBase

    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoleBase, "stdout", Stdout())
        yield printed


def same_word(printed, shown, tolerance=TOLERANCE):
    """Whether a word is that of the page: '...' stands for anything, and numbers may differ by the tolerance."""
    if printed is None or shown is None:
        return False
    if "..." in shown:
        return re.fullmatch(".*".join(map(re.escape, shown.split("..."))), printed) is not None
    if NUMBER.sub("#", printed) != NUMBER.sub("#", shown):
        return False
    pairs = zip(map(float, NUMBER.findall(printed)), map(float, NUMBER.findall(shown)))
    return all(abs(a - b) <= tolerance * max(1, abs(b)) for a, b in pairs)


def same_output(printed, shown, tolerance=TOLERANCE):
    """Whether a program printed what a page shows, word by word."""
    return all(same_word(a, b, tolerance) for a, b in zip_longest(printed.split(), shown.split()))
