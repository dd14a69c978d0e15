"""Places that tests share: folders that they read from, and where the CPU backend decides on threads."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
EXAMPLES, NOTEBOOKS = ROOT / "docs" / "examples", ROOT / "docs" / "notebooks"
DATA = ROOT / "tests" / "data"

# Modules of `md4.cpu`, and the names of the least work for which they take a further thread.
LEAST_WORK = (
    ("run", "THREAD_WORK"), ("hermite_coulomb", "THREAD_WORK"), ("targets", "THREAD_INTEGRALS"),
    ("h_matrices", "THREAD_ELEMENTS"),
)  # fmt: skip
