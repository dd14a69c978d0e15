"""Random molecules and options for the fuzzing suite, and how its tests are run.

A property is checked on seeded random cases. In CI each takes a short sample; ``pytest -m slow tests/fuzzing``
takes the long run. Two environment variables change either:

    MD4_FUZZ_SEED=7         other cases (default 0); the same seed gives the same cases again
    MD4_FUZZ_EXAMPLES=5000  as many cases of each property

The same seed gives the same cases as long as sources and hypothesis stay as they are: it mixes in constants that it
finds in the code under test.

A failing case is shrunk and printed as a `Molecule` with its options, which a script can build again.
"""

import os
from collections import Counter
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from pyscf import gto

SEED = int(os.environ.get("MD4_FUZZ_SEED", "0"))
EXAMPLES = os.environ.get("MD4_FUZZ_EXAMPLES")
GPU_EXAMPLES = 10  # each new class costs the compilation of its kernels there
STEPS = 1000  # of the grid of exponents, for each power of ten
# Shells by how often they are drawn, with the most primitives and functions: the oracle must be able to judge them.
SHELL_KINDS = 4 * [(0, 4, 3), (1, 4, 3)] + 3 * [(2, 3, 2)] + 2 * [(3, 2, 2)] + [(4, 1, 2)]
RARE_KINDS = [(5, 1, 1), (6, 1, 1)]
GPU_KINDS = [(0, 3, 1), (2, 2, 1)]
ATOMS = ("H", "He", "O", "ghost-O", "ghost-H", "X-H", "K")
ECP_ATOMS = {"K": "lanl2dz"}


def fuzz(check, strategy, examples):
    """Runs check(case) for `examples` cases of a strategy, seeded by the name of the check."""
    count = int(EXAMPLES) if EXAMPLES else examples

    @seed(crc32(check.__qualname__.encode()) + SEED)
    @settings(
        max_examples=count, deadline=None, derandomize=False, database=None, print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )  # fmt: skip
    @given(strategy)
    def every(case):
        TALLY[check.__qualname__, "cases"] += 1
        check(case)

    every()


TALLY = Counter()  # of cases and of what became of them, by check; shown by `pytest -s` at the end of each test


def report(check):
    """Prints what became of the cases of a check."""
    found = ", ".join(f"{count} {what}" for (name, what), count in sorted(TALLY.items()) if name == check.__qualname__)
    print(f"\n{check.__qualname__}: {found}")


@dataclass(frozen=True)
class Molecule:
    """A molecule as plain data, so that what is printed can be built again.

    Attributes
    ----------
    atoms : tuple of (str, (float, float, float))
        Labels, each its own, and positions in Bohr.
    basis : dict
        Shells [l, [exponent, coefficient, ...], ...] of each label.
    cart : bool
    ecp : dict
        Names of effective core potentials by label.
    omega : float
        The molecule's own range separation, 0 for none.
    """

    atoms: tuple
    basis: dict
    cart: bool = False
    ecp: dict = None
    omega: float = 0.0

    def mol(self):
        mol = gto.M(
            atom=list(self.atoms), basis=self.basis, ecp=self.ecp or {}, cart=self.cart, unit="Bohr", spin=None,
            verbose=0,
        )  # fmt: skip
        mol.omega = self.omega
        return mol

    @property
    def nshell(self):
        return sum(len(shells) for shells in self.basis.values())


def functions(shell, cart):
    """Number of AOs of a shell in PySCF's format."""
    l = shell[0]
    return ((l + 1) * (l + 2) // 2 if cart else 2 * l + 1) * (len(shell[1]) - 1)


def exponents(count, low=-3, high=6):
    """As many different exponents between the two powers of ten, even in their logarithms."""
    grid = st.integers(low * STEPS, high * STEPS)
    return st.lists(grid, min_size=count, max_size=count, unique=True).map(lambda n: [10 ** (k / STEPS) for k in n])


@st.composite
def shells(draw, kinds):
    """A shell [l, [exponent, coefficient, ...], ...]; coefficients may be zero or negative, but no column is all 0."""
    l, most_primitives, most_functions = draw(st.sampled_from(kinds))
    nprim, nctr = draw(st.integers(1, most_primitives)), draw(st.integers(1, most_functions))
    zeta = draw(exponents(nprim))
    columns = []
    for n in range(nctr):
        column = draw(st.lists(st.sampled_from([0.0, 0.1, 1.0, -0.5, 2.0, -1e-3]), min_size=nprim, max_size=nprim))
        columns.append(column if any(column) else [float(k == n % nprim) for k in range(nprim)])
    return [l, *([z, *c] for z, c in zip(zeta, zip(*columns)))]


@st.composite
def positions(draw, count):
    """Centres in Bohr: anywhere, one on another, on a line, next to another, far away."""
    coordinate = st.integers(-3000, 3000).map(lambda n: n / 1000)
    anywhere = st.tuples(coordinate, coordinate, coordinate)
    found = [draw(anywhere)]
    for _ in range(count - 1):
        kind = draw(st.sampled_from(["anywhere", "anywhere", "anywhere", "same", "line", "near", "far"]))
        step = np.array(draw(anywhere)) * {"same": 0.0, "near": 1e-6}.get(kind, 1.0)
        if kind == "line":
            step[:2] = 0.0
        if kind == "far":
            step *= 50 / max(1e-3, np.linalg.norm(step))
        first = np.zeros(3) if kind == "anywhere" else np.array(found[draw(st.integers(0, len(found) - 1))])
        found.append(tuple(float(x) for x in first + step))
    return found


@st.composite
def molecules(draw, most=25, kinds=None, omegas=(0.0,)):
    """A `Molecule` of 1 to 4 centres and at most `most` AOs, shells of `kinds` on them, some of them twice."""
    cart = draw(st.booleans())
    if kinds is None:
        kinds = SHELL_KINDS + (4 * RARE_KINDS if draw(st.integers(0, 9)) == 9 else [])
    places = draw(positions(draw(st.integers(1, 4))))
    labels = [f"{draw(st.sampled_from(ATOMS))}{n}" for n in range(len(places))]
    basis, left = {}, most
    for n in range(draw(st.integers(len(places), 6))):
        shell = draw(shells(kinds))
        for again in (shell, shell) if draw(st.integers(0, 7)) == 7 else (shell,):
            if functions(again, cart) <= left:
                basis.setdefault(labels[n % len(labels)], []).append(again)
                left -= functions(again, cart)
    if not basis:
        basis[labels[0]] = [[0, [1.0, 1.0]]]
    atoms = tuple((label, place) for label, place in zip(labels, places) if label in basis)
    ecp = {label: ECP_ATOMS[label.rstrip("0123456789")] for label in basis if label.startswith(tuple(ECP_ATOMS))}
    return Molecule(atoms, basis, cart, ecp, draw(st.sampled_from(omegas)))


def range_separations():
    """omega as a caller may give it: None, 0, erf and erfc, ordinary, tiny and large, of several types."""
    ordinary = st.sampled_from([0.3, -0.3, 1.0, -1.0, 0.11, -2.5, np.float64(0.4), np.float32(-0.25), 2])
    extreme = st.sampled_from([1e-8, -1e-8, 1e-3, -1e-3, 1e3, -1e3, 1e8, -1e8])
    return st.one_of(st.none(), st.sampled_from([0, 0.0, -0.0]), ordinary, ordinary, extreme)


def memory_caps():
    """max_memory in MB, from too little for anything to enough for all that is drawn here; None as often."""
    return st.none() | st.integers(-3000, 1500).map(lambda n: 10 ** (n / 1000))
