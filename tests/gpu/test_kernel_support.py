"""The table of what kernels support, in docs/design.md."""

import re

import kernel_support as support
import pytest
from offline import factories


def written():
    """The table in the page."""
    return support.PAGE.read_text().split(support.BEGIN)[1].split(support.END)[0]


def test_the_table_has_all_kernels():
    assert set(re.findall(r"^\| `\w+\.(\w+)`", written(), re.MULTILINE)) == factories()


@pytest.mark.thorough
def test_the_table_is_what_dry_runs_ask_for():
    """`python tests/kernel_support.py` writes it anew."""
    assert written() == support.table()
