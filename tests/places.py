"""Folders that tests read from."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
EXAMPLES, NOTEBOOKS = ROOT / "docs" / "examples", ROOT / "docs" / "notebooks"
DATA = ROOT / "tests" / "data"
