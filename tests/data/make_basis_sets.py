"""Writes basis_sets.json: sets that PySCF has from the Basis Set Exchange, for machines where that is not installed.

    python tests/data/make_basis_sets.py

The format is PySCF's: {set: {element: [[l, [exponent, coefficient, ...], ...], ...]}}.
tests/contract/test_tensor.py compares the file with the Exchange where there is one.
"""

import json
from pathlib import Path

from pyscf import gto

SETS = {
    "x2c-svpall": ("I", "H"),
    "cc-pv6z": ("H", "He", "Be", "C", "N", "O", "F", "Ne"),
    "cc-pv8z": ("Ne",),
    "aug-cc-pv6z": ("H", "C", "O"),
    "aug-cc-pv6z-rifit": ("H", "C", "O"),
    "aug-cc-pv7z": ("C", "N", "O"),
    "aug-mcc-pv7z": ("H",),
    "aug-mcc-pv8z": ("H",),
}


def main():
    sets = {name: {e: gto.basis.load(name, e) for e in elements} for name, elements in SETS.items()}
    Path(__file__).with_name("basis_sets.json").write_text(json.dumps(sets) + "\n")


if __name__ == "__main__":
    main()
