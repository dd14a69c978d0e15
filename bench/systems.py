"""Molecules of the J/K and SCF benchmarks, and density matrices for them; needs PySCF.

Basis sets that PySCF does not bundle come from tests/data/basis_sets.json, so that the Basis Set Exchange need not be
installed.
"""

import itertools
import json
from dataclasses import dataclass

import numpy as np
from clock import ROOT
from pyscf import gto, scf

SPACING = 3.1  # Angstrom, between oxygens on the lattice
WATER = np.array([[0.0, 0.0, 0.0], [0.7572, 0.0, 0.5865], [-0.7572, 0.0, 0.5865]])  # O, H, H in Angstrom
MOLECULES = {"benzene": ROOT / "docs" / "examples" / "benzene.xyz"}
STORED = "vitaminc", "tamoxifen", "taxol", "naphthalene"
MOLECULES |= {name: ROOT / "bench" / "molecules" / f"{name}.xyz" for name in STORED}
NAMES = f"{'/BASIS, '.join(MOLECULES)}/BASIS, water/BASIS or NUMBERwaters/BASIS"


def rotation(quaternion):
    """Rotation matrix of a quaternion (w, x, y, z) of any norm."""
    w, x, y, z = quaternion / np.linalg.norm(quaternion)
    return np.array([
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ])  # fmt: skip


def water_cluster(n, seed=0):
    """[(element, position in Angstrom)] of n waters in random (seeded) orientations on a cubic lattice.

    The first n points of the smallest cube that has them, the last index fastest: 8 are 2 x 2 x 2, 27 are 3 x 3 x 3,
    16 a part of 3 x 3 x 3.
    """
    rng, edge = np.random.default_rng(seed), 1
    while edge**3 < n:
        edge += 1
    atoms = []
    for point in itertools.islice(itertools.product(range(edge), repeat=3), n):
        places = WATER @ rotation(rng.normal(size=4)).T + SPACING * np.array(point)
        atoms += [(element, tuple(place)) for element, place in zip("OHH", places)]
    return atoms


def stored(name):
    """As `water_cluster`, of one of `MOLECULES`."""
    lines = MOLECULES[name].read_text().splitlines()[2:]
    return [(element, tuple(map(float, place))) for element, *place in map(str.split, filter(str.strip, lines))]


def basis_set(name, elements):
    """What gto.M takes as basis: the stored set where there is one for all elements, else the name."""
    found = json.loads((ROOT / "tests" / "data" / "basis_sets.json").read_text()).get(name.lower(), {})
    return {e: found[e] for e in elements} if set(elements) <= set(found) else name


@dataclass(frozen=True)
class System:
    """A molecule in a basis.

    Attributes
    ----------
    name : str
        One of `MOLECULES` or a number of waters, as 'water' or '27 waters'.
    basis : str
    """

    name: str
    basis: str

    @classmethod
    def parse(cls, text):
        """From 'benzene/cc-pv5z', 'water/cc-pv6z' or '27waters/cc-pvtz'."""
        name, slash, basis = text.partition("/")
        if slash and name in MOLECULES:
            return cls(name, basis)
        if not slash or not name.removesuffix("s").endswith("water"):
            raise SystemExit(f"{text!r} is no system; write {NAMES}.")
        digits = name.removesuffix("s").removesuffix("water").strip()
        if digits in ("", "1"):
            return cls("water", basis)
        if not digits.isdigit():
            raise SystemExit(f"{text!r}: {digits!r} is no number of waters.")
        return cls(f"{digits} waters", basis)

    @property
    def waters(self):
        """Number of waters, 0 for another molecule."""
        return 0 if self.name in MOLECULES else 1 if self.name == "water" else int(self.name.split()[0])

    def mol(self, seed=0):
        """The built molecule."""
        atoms = water_cluster(self.waters, seed) if self.waters else stored(self.name)
        basis = basis_set(self.basis, {element for element, _ in atoms})
        return gto.M(atom=atoms, basis=basis, verbose=0)


def guess_density(mol):
    """A cheap density much like a converged one: superposed densities of atoms, projected on the basis.

    PySCF's 'minao' guess: occupied atomic orbitals of a minimal basis, fitted by mol's AOs in the metric of the whole
    molecule. It has the electrons, their shells and the decay with distance, but no bonds.
    """
    return np.asarray(scf.hf.init_guess_by_minao(mol))
