"""Write reference.json: quartets of every kind with values from `md4.validation.oracle`, good to 25 digits.

    python tests/data/make_reference.py          (some minutes on one core; the result is reproducible)

Each case of the file is an object

    name          what is special about it
    pure          real solid harmonics (true) or Cartesians (false)
    operator      [name, parameter or null], as `md4.validation.oracle.eri` takes it
    shells        four of {"l", "exponents" (nprim), "coefficients" (nprim x nctr), "centre"}; the decimal numbers are
                  the shortest that name the doubles meant, coefficients are of unnormalised radial primitives
    elements      index tuples (a, b, c, d), each running [contraction][component]
    values        the integrals, as strings
    scale         largest magnitude in the whole block if `full`, else among `elements` (a smaller, stricter scale)
    full          whether `scale` is that of the block

Values may lie below the range of doubles (1e-1416 occurs): such integrals must come out as zeros.
"""

import json
from itertools import product
from math import prod
from pathlib import Path
from time import perf_counter

import numpy as np
from mpmath import mp, mpf

from md4.shells.shell import Shell, radial_norm
from md4.validation.oracle import components, eri

TARGET = Path(__file__).with_name("reference.json")
SEED = 20240607
COULOMB = ("coulomb", None)
OPERATORS = (COULOMB, ("erf", 0.3), ("erfc", 0.3), ("yukawa", 1.2), ("slater", 1.2), ("gaussian", 0.7))
FULL_BLOCK = 1300  # elements up to which the whole block is computed for its scale
MOST_TERMS = 4000  # Cartesian terms that a random pure element may have; the chosen ones may have more
ONE, OTHER = (0.3, -0.2, 0.5), (-0.7, 0.9, 0.1)


def shell(l, exponents, centre, coefficients=None):
    """A shell of normalised primitives, or with the given coefficients (nprim, nctr) of normalised primitives."""
    exponents = np.asarray(exponents, dtype=float)
    norms = radial_norm(l, exponents)[:, None]
    c = norms if coefficients is None else norms * np.asarray(coefficients, dtype=float)
    return Shell(l, exponents, c, np.asarray(centre, dtype=float))


class Cases:
    """Collects (name, shells, pure, operator) and draws the random numbers of one seeded generator."""

    def __init__(self):
        self.rng = np.random.default_rng(SEED)
        self.list = []

    def add(self, name, shells, pure=True, operator=COULOMB):
        self.list.append((name, shells, pure, operator))

    def centres(self):
        return np.round(self.rng.uniform(-1.5, 1.5, (4, 3)), 3)

    def exponents(self, nprim=1, low=0.2, high=4.0):
        return np.round(np.exp(self.rng.uniform(np.log(low), np.log(high), nprim)), 4)

    def quartet(self, ls, centres=None, exponents=None, nprim=1, nctr=1):
        """Four shells; whatever is not given is random."""
        centres = self.centres() if centres is None else centres
        shells = []
        for i, l in enumerate(ls):
            e = self.exponents(nprim) if exponents is None else [exponents[i]]
            c = np.round(self.rng.uniform(-0.3, 1.0, (len(e), nctr)), 3) if nprim > 1 or nctr > 1 else None
            shells.append(shell(l, e, centres[i], c))
        return shells


def add_operators(cases):
    """Every operator over low, mixed and high angular momenta."""
    for operator in OPERATORS:
        cases.add(f"{operator[0]} ssss", cases.quartet((0, 0, 0, 0)), True, operator)
        cases.add(f"{operator[0]} spds", cases.quartet((0, 1, 2, 0)), True, operator)
        cases.add(f"{operator[0]} dddd", cases.quartet((2, 2, 2, 2)), True, operator)
        cases.add(f"{operator[0]} fdpg cartesian", cases.quartet((3, 2, 1, 4)), False, operator)
        cases.add(f"{operator[0]} iiii", cases.quartet((6, 6, 6, 6)), operator[1] is None, operator)
        cases.add(f"{operator[0]} kkkk cartesian", cases.quartet((7, 7, 7, 7)), False, operator)


def add_angular(cases):
    """High and mixed angular momenta, Coulomb."""
    for name, ls in (("isdp", (6, 0, 2, 1)), ("ksks", (7, 0, 7, 0)), ("kkss", (7, 7, 0, 0)), ("kihg", (7, 6, 5, 4))):
        cases.add(f"{name}", cases.quartet(ls), True)
        cases.add(f"{name} cartesian", cases.quartet(ls), False)
    cases.add("gggg", cases.quartet((4, 4, 4, 4)), True)
    cases.add("hhhh", cases.quartet((5, 5, 5, 5)), True)
    cases.add("kkkk", cases.quartet((7, 7, 7, 7)), True)


def add_geometry(cases):
    """Coincident, paired and distant centres."""
    aaaa, aabb, abab = [ONE] * 4, [ONE, ONE, OTHER, OTHER], [ONE, OTHER, ONE, OTHER]
    cases.add("dddd on one centre", cases.quartet((2, 2, 2, 2), aaaa), True)
    cases.add("spdf on one centre", cases.quartet((0, 1, 2, 3), aaaa), True)
    cases.add("kkkk on one centre, cartesian", cases.quartet((7, 7, 7, 7), aaaa), False)
    cases.add("iiii on one centre, erfc", cases.quartet((6, 6, 6, 6), aaaa), False, ("erfc", 0.3))
    cases.add("gggg on one centre, yukawa", cases.quartet((4, 4, 4, 4), aaaa), True, ("yukawa", 1.2))
    cases.add("gggg on one centre, slater", cases.quartet((4, 4, 4, 4), aaaa), True, ("slater", 1.2))
    cases.add("ffff, centres AABB", cases.quartet((3, 3, 3, 3), aabb), True)
    cases.add("iiii, centres ABAB", cases.quartet((6, 6, 6, 6), abab), False)
    far, near = (30.0, 40.0, 0.0), (0.0, 0.0, 0.0)
    for name, ls in (("ssss", (0, 0, 0, 0)), ("pdsf", (1, 2, 0, 3)), ("kkkk", (7, 7, 7, 7))):
        cases.add(f"{name} at 50 Bohr, AABB", cases.quartet(ls, [near, near, far, far]), False)
    cases.add("dddd at 50 Bohr, AABB", cases.quartet((2, 2, 2, 2), [near, near, far, far]), True)
    cases.add("ksks at 50 Bohr, AABB", cases.quartet((7, 0, 7, 0), [near, near, far, far]), True)
    cases.add("ddpp at 50 Bohr, ABAB", cases.quartet((2, 2, 1, 1), [near, far] * 2, [0.01, 0.02, 0.004, 0.03]), True)
    cases.add("ssss at 50 Bohr, ABAB, underflows", cases.quartet((0, 0, 0, 0), [near, far] * 2), True)
    middle = [near, near, (12.0, 16.0, 0.0), (12.0, 16.0, 0.0)]
    for omega in (0.11, 0.3):
        cases.add(f"ddpp at 20 Bohr, erfc {omega}", cases.quartet((2, 2, 1, 1), middle), True, ("erfc", omega))
    cases.add("iiii at 20 Bohr, erfc 0.3", cases.quartet((6, 6, 6, 6), middle), False, ("erfc", 0.3))
    cases.add("dsps at 20 Bohr, erf 0.11", cases.quartet((2, 0, 1, 0), middle), True, ("erf", 0.11))
    cases.add("dsps at 20 Bohr, slater 0.5", cases.quartet((2, 0, 1, 0), middle), True, ("slater", 0.5))


def add_exponents(cases):
    """Exponents from 1e-3 to 1e5, alone and mixed."""
    tight, diffuse, mixed, crossed = [1e5] * 4, [1e-3] * 4, [1e5, 1e-3] * 2, [1e5, 1e5, 1e-3, 1e-3]
    aabb = [ONE, ONE, OTHER, OTHER]
    for name, e in (("tight", tight), ("diffuse", diffuse), ("mixed in pairs", mixed), ("tight|diffuse", crossed)):
        for letters, ls in (("ssss", (0, 0, 0, 0)), ("pdfs", (1, 2, 3, 0)), ("kkkk", (7, 7, 7, 7))):
            cases.add(f"{letters}, exponents {name}", cases.quartet(ls, aabb, e), letters != "kkkk")
    cases.add("pdfs mixed in pairs, four centres", cases.quartet((1, 2, 3, 0), None, mixed), True)
    cases.add("ddss mixed in pairs, erfc", cases.quartet((2, 2, 0, 0), None, mixed), True, ("erfc", 0.3))
    cases.add("ddss mixed in pairs, yukawa", cases.quartet((2, 2, 0, 0), None, mixed), True, ("yukawa", 1.2))
    cases.add("ppdd diffuse, slater", cases.quartet((1, 1, 2, 2), None, diffuse), True, ("slater", 1.2))


def add_contractions(cases):
    """Contractions of three primitives, segmented and general."""
    for operator in OPERATORS:
        cases.add(f"{operator[0]} psps K 3", cases.quartet((1, 0, 1, 0), nprim=3), True, operator)
    cases.add("pppp K 3, nctr 2", cases.quartet((1, 1, 1, 1), nprim=3, nctr=2), True)
    cases.add("ddsp K 3, nctr 2, cartesian", cases.quartet((2, 2, 0, 1), nprim=3, nctr=2), False)
    cases.add("ffff K 3", cases.quartet((3, 3, 3, 3), nprim=3), True)
    cases.add("dfpg K 3, nctr 2, erf", cases.quartet((2, 3, 1, 4), nprim=3, nctr=2), True, ("erf", 0.3))


def add_gaussian_coulomb(cases):
    """The operator exp(-omega r^2)/r over low, mixed and high angular momenta, tight, diffuse and distant shells."""
    near, far = (0.0, 0.0, 0.0), (12.0, 16.0, 0.0)
    for name, ls, pure, omega in (
        ("ssss", (0, 0, 0, 0), True, 0.7),
        ("spds", (0, 1, 2, 0), True, 0.7),
        ("dddd", (2, 2, 2, 2), True, 1e-3),
        ("fdpg cartesian", (3, 2, 1, 4), False, 0.7),
        ("iiii", (6, 6, 6, 6), False, 0.7),
        ("kkkk cartesian", (7, 7, 7, 7), False, 20.0),
    ):
        cases.add(f"gaussian_coulomb {name}", cases.quartet(ls), pure, ("gaussian_coulomb", omega))
    cases.add("gaussian_coulomb psps K 3", cases.quartet((1, 0, 1, 0), nprim=3), True, ("gaussian_coulomb", 0.7))
    mixed = cases.quartet((1, 2, 3, 0), None, [1e5, 1e-3, 30.0, 0.2])
    cases.add("gaussian_coulomb pdfs mixed exponents", mixed, True, ("gaussian_coulomb", 0.7))
    distant = cases.quartet((2, 2, 1, 1), [near, near, far, far])
    cases.add("gaussian_coulomb ddpp at 20 Bohr", distant, True, ("gaussian_coulomb", 0.01))


# Each batch has random numbers of its own: a new batch leaves the values of the others as they are.
BATCHES = (
    (add_operators, add_angular, add_geometry, add_exponents, add_contractions),
    (add_gaussian_coulomb,),
)


def drawn_elements(rng, shells, pure, count=16):
    """Elements: ends and middles of the components, pairs that symmetry does not kill, and random ones."""
    parts = [components(s.l, pure) for s in shells]
    shape = [s.nctr * len(p) for s, p in zip(shells, parts)]
    out = [tuple(int(f * (n - 1)) for f, n in zip(fs, shape)) for fs in ((0,) * 4, (0.5,) * 4, (1,) * 4, (0, 0, 1, 1))]
    tries = 0
    while len(out) < count and tries < 5000:
        tries += 1
        i, j, k, l = (int(rng.integers(n)) for n in shape)
        pattern = (i, j, k, l), (i, i % shape[1], k, k % shape[3]), (i, j, i % shape[2], j % shape[3])
        element = pattern[tries % 3]
        if prod(len(p[x % len(p)]) for p, x in zip(parts, element)) <= MOST_TERMS:
            out.append(element)
    return sorted(set(out))


def evaluated(rng, name, shells, pure, operator):
    """The case as a JSON object."""
    shape = tuple(s.nctr * len(components(s.l, pure)) for s in shells)
    full = prod(shape) <= FULL_BLOCK
    elements = drawn_elements(rng, shells, pure)
    if full:
        block = eri(shells, pure, operator, exact=True)
        largest = max(product(*map(range, shape)), key=lambda e: abs(block[e]))
        elements = sorted({*elements, largest})
        values, scale = [block[e] for e in elements], abs(block[largest])
    else:
        values = eri(shells, pure, operator, elements, exact=True)
        scale = max(abs(v) for v in values)
    values = [v if abs(v) > scale * mpf("1e-38") else mpf(0) for v in values]  # zeros by symmetry
    return {
        "name": name,
        "pure": pure,
        "operator": list(operator),
        "shells": [
            {"l": s.l} | {k: getattr(s, k).tolist() for k in ("exponents", "coefficients", "centre")} for s in shells
        ],
        "elements": [list(e) for e in elements],
        "values": [mp.nstr(v, 25) for v in values],
        "scale": mp.nstr(scale, 25),
        "full": full,
    }


def main():
    lines, start = [], perf_counter()
    for batch in BATCHES:
        cases = Cases()
        for add in batch:
            add(cases)
        for case in cases.list:
            begin = perf_counter()
            with mp.workdps(40):
                lines.append(json.dumps(evaluated(cases.rng, *case)))
            print(f"{perf_counter() - begin:7.2f} s  {case[0]}", flush=True)
    TARGET.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"{len(lines)} cases, {TARGET.stat().st_size} bytes, {perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
