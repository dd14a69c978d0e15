"""How many kernels are compiled for molecules of the table, as bench/RESULTS.md has it."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import md4
from md4.contract.gradient import rehearse_forces
from md4.contract.warmup import MEMORIES, asked_by, asked_by_basis, make_build

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from systems import System  # noqa: E402 a script beside the package

# Variants on sm_90 for a warm-up (tensors, J and K, J alone), for a first build of J and K, and how many gradients need
# besides the warm-up. A change that needs more has to be worth it, see 'What a new kernel has to win' in CONTRIBUTING.
COUNTS = {
    "27waters/cc-pvtz": (384, 234, 108), "8waters/cc-pvqz": (467, 282, 153), "benzene/cc-pv5z": (563, 334, 192),
}  # fmt: skip


@pytest.mark.sample("27waters/cc-pvtz")
@pytest.mark.parametrize("name", COUNTS)
def test_what_is_compiled(name):
    basis = md4.Basis.from_mol(System.parse(name).mol())
    warm = asked_by_basis(basis, "coulomb", (9, 0), MEMORIES[:1])
    forces = asked_by_basis(basis, "coulomb", (9, 0), MEMORIES[:1], forces=True)
    build = asked_by(lambda backend: make_build(backend, basis, 1, 1), "coulomb", (9, 0), MEMORIES[:1])
    assert (len(warm), len(build), len(forces) - len(warm)) == COUNTS[name]
    assert set(warm) <= set(forces)


@pytest.mark.parametrize(
    "name", ["vitaminc/def2-tzvpp", "8waters/cc-pvqz", "27waters/cc-pvtz", "64waters/cc-pvdz", "benzene/cc-pvqz"]
)
def test_forces_ask_for_half_as_many(name):
    """Beside a first build of J and K. Those of 27 and of 64 waters make J apart."""
    basis = md4.Basis.from_mol(System.parse(name).mol())
    build = asked_by(lambda backend: make_build(backend, basis, 1, 1), "coulomb", (9, 0), MEMORIES[:1])
    one, density = np.ones(1), np.zeros((1, basis.nao, basis.nao))
    forces = asked_by(
        lambda backend: rehearse_forces(backend, basis, 1e-13, (density, one, one), 0.0), "coulomb", (9, 0),
        MEMORIES[:1],
    )  # fmt: skip
    assert 0 < len(set(forces) - set(build)) <= len(build) // 2


def test_the_table_has_the_same_numbers():
    text = (BENCH / "RESULTS.md").read_text().split("## What is compiled")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\S+) \| (\d+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    assert {name: tuple(map(int, numbers)) for name, *numbers in rows} == COUNTS
