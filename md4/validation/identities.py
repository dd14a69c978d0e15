"""Checks of an installation that need no molecule of the caller: oracle, contractions, symmetries.

Each check makes small random shells with a fixed seed. They are on four centres whose functions overlap well, so that
no integral is small by cancellation. Errors are relative to the largest element of a block.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np

from md4.engine import Engine
from md4.method import operators
from md4.method.operators import Operator
from md4.method.rotations import component_rotation
from md4.shells.basis import Basis
from md4.support.display import operator_text
from md4.validation.arbiter import MISSING, as_quartet, load_oracle
from md4.validation.libcint import class_label, host, sides, validate

CENTRES = np.array([[0.1, -0.2, 0.3], [-0.4, 0.5, -0.1], [0.3, 0.4, -0.5], [-0.2, -0.3, -0.6]])
OPERATORS = (Operator.coulomb(), *(Operator(kind, 0.7) for kind in operators.OPERATORS[1:]))
# Of four centres, and of three and two, (ab|c) and (a|b).
SMALL_CLASSES = ((1, 0, 0, 0), (2, 1, 1, 0), (3, 2, 1, 2), (2, 1, 3), (3, 2))
HIGH_CLASSES = ((4, 4, 4, 4), (6, 0, 6, 0), (5, 5, 5, 5), (6, 6, 6, 6), (6, 6, 7), (3, 2, 10), (8, 8))
SYMMETRY_CLASSES = ((1, 1, 1, 0), (2, 1, 1, 2), (3, 2, 1, 3), (4, 1, 3, 2))
ELEMENTS = 6  # number of elements of a block that the oracle computes
SHIFT = np.array([3.0, -7.0, 5.0])  # Bohr


@dataclass(frozen=True)
class Check:
    """One line of a report.

    Attributes
    ----------
    name : str
        What was checked.
    against : str
        The program or the identity with which md4 was compared.
    count : str
        How much was compared.
    error : float
        The largest error, relative to a block's largest element; NaN if the check was not made.
    tolerance : float
    note : str
    passed : bool or None
        None if the check was not made.
    """

    name: str
    against: str
    count: str
    error: float
    tolerance: float
    note: str = ""
    passed: bool | None = None

    @classmethod
    def of(cls, name, against, count, error, tolerance, note=""):
        """A check that was made. It fails if the error is NaN."""
        return cls(name, against, count, float(error), tolerance, note, bool(error <= tolerance))


def quartet_basis(ls, centres=CENTRES):
    """Primitive shells of two, three or four `ls`, one on each centre, with random exponents from 0.6 to 1.5."""
    count = len(ls)
    exponents = np.random.default_rng([7, *ls]).uniform(0.6, 1.5, (count, 1))
    return Basis.from_arrays(ls, exponents, np.ones((count, 1)), centres[:count])


def quartet_block(basis, backend, operator=None, order=None):
    """(ab|cd), (ab|c) or (a|b) of the shells of a basis in an order, shape (na, nb, nc, nd) and the like."""
    engine = Engine(basis, operator=operator, backend=backend)
    bra, ket = ([side] if len(side) == 2 else side for side in sides(range(len(basis)) if order is None else order))
    return host(engine.compute(bra, ket))[0, 0]


def relative(differences, block):
    """The largest difference divided by the block's largest element; NaN if an element of the block is not finite."""
    if not np.isfinite(block).all():
        return np.nan
    return np.abs(differences).max() / max(np.abs(block).max(), np.finfo(float).tiny)


# ---- the oracle ------------------------------------------------------------------------------------------------------


def oracle_checks(backend, tolerance):
    """Every operator for small quartets, and 1/r for high ones, against the oracle."""
    cases = [*product(OPERATORS, SMALL_CLASSES), *((OPERATORS[0], ls) for ls in HIGH_CLASSES)]
    return [oracle_check(operator, ls, backend, tolerance) for operator, ls in cases]


def oracle_check(operator, ls, backend, tolerance):
    """One class with one operator."""
    parameter = operator.parameter or None
    name = f"{operator_text(operator)} {class_label(ls)}"
    oracle = load_oracle()
    if oracle is None:
        return Check(name, "oracle", "0 elements", np.nan, tolerance, MISSING)
    basis = quartet_basis(ls)
    block = quartet_block(basis, backend, operator)
    elements = some_elements(block.shape)
    shells, places = as_quartet(basis.shells, None), [as_quartet(e, 0) for e in elements]
    exact = oracle.eri(shells, basis.pure, (operator.kind, parameter), places, dps=30)
    error = relative([block[e] - x for e, x in zip(elements, exact)], block)
    return Check.of(name, "oracle", f"{len(elements)} elements", error, tolerance)


def some_elements(shape):
    """Up to ELEMENTS random places of a block, with a fixed seed."""
    size = int(np.prod(shape))
    flat = np.random.default_rng(3).choice(size, min(size, ELEMENTS), replace=False)
    return [tuple(map(int, np.unravel_index(n, shape))) for n in np.sort(flat)]


# ---- contractions ----------------------------------------------------------------------------------------------------


def contracted_basis(kind):
    """s, p and d shells in PySCF's format: 'uncontracted', 'segmented' (five primitives) or 'general' (of three)."""
    exponents = np.geomspace(0.3, 20.0, 5)
    shells = []
    for l in range(3):
        c = np.random.default_rng([11, l]).uniform(0.2, 1.0, (5, 3))
        rows, columns = {"uncontracted": (1, 1), "segmented": (5, 1), "general": (5, 3)}[kind]
        shells.append([l, *([float(e), *map(float, x[:columns])] for e, x in zip(exponents[:rows], c))])
    return {"He": shells}


def contraction_checks(backend, tolerance, abs_tolerance):
    """The kinds of contraction against libcint."""
    from pyscf import gto

    checks = []
    for kind in ("uncontracted", "segmented", "general"):
        mol = gto.M(atom="He 0 0 0; He 0.3 -0.2 0.9", basis=contracted_basis(kind), verbose=0)
        records = validate(mol, backend, tolerance, abs_tolerance, progress=False)
        count = f"{sum(r.quartets for r in records)} quartets of {len(records)} classes"
        error = np.max([r.max_rel for r in records])
        checks.append(Check.of(f"{kind}, s to d", "libcint", count, error, tolerance))
    return checks


# ---- symmetries ------------------------------------------------------------------------------------------------------


def symmetry_checks(backend, tolerance):
    """Permutations of the shells, a translation and a rotation of the four centres, for a few classes."""
    makers = (("permutations", permuted), ("translation", translated), ("rotation", rotated))
    checks = []
    for (name, make), ls in product(makers, SYMMETRY_CLASSES):
        basis = quartet_basis(ls)
        block = quartet_block(basis, backend)
        with np.errstate(invalid="ignore"):
            others = make(basis, ls, backend)
            error = relative([other - block for other in others], block)
        checks.append(Check.of(f"{name} {class_label(ls)}", "identity", f"{block.size} integrals", error, tolerance))
    return checks


def permuted(basis, ls, backend):
    """The blocks of the seven other orders of (ab|cd) with the same integrals, transposed to this order."""
    bra, ket = ((0, 1), (1, 0)), ((2, 3), (3, 2))
    orders = [i + j for x, y in ((bra, ket), (ket, bra)) for i, j in product(x, y)][1:]
    return [quartet_block(basis, backend, order=order).transpose(np.argsort(order)) for order in orders]


def translated(basis, ls, backend):
    """The block at shifted centres."""
    return [quartet_block(quartet_basis(ls, CENTRES + SHIFT), backend)]


def rotated(basis, ls, backend):
    """The block at rotated centres, with its components rotated back."""
    turn = rotation_matrix()
    block = quartet_block(quartet_basis(ls, CENTRES @ turn.T), backend)
    back = (component_rotation(l, True, turn.T) for l in ls)
    return [np.einsum("abcd,Aa,Bb,Cc,Dd->ABCD", block, *back, optimize=True)]


def rotation_matrix():
    """A proper rotation that mixes all axes."""
    q, _ = np.linalg.qr(np.random.default_rng(5).normal(size=(3, 3)))
    return q * np.sign(np.linalg.det(q))
