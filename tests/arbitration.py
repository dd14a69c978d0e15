"""PySCF's tensor and its error bounds, and the oracle's word where md4 differs from it.

The scale of rounding errors of (ij|kl) is B_ij B_kl with

    B_ij = sqrt((ij|ij)) , the largest over the components of the two shells' functions,

over functions whose contraction coefficients are all taken as positive: where large primitives cancel, md4 and libcint
cancel alike. Unlike the bound of `md4.validation.libcint`, contracted functions of one shell have their own.
"""

import numpy as np
from strategies import TALLY

from md4.shells.basis import Basis
from md4.validation import arbiter
from md4.validation import oracle as reference

TOLERANCE = 1e-11  # of B_ij B_kl: where md4 and libcint differ by more, the oracle is asked
ORACLE_TOLERANCE = 1e-12  # of the same: what md4 may be off from the oracle
NEGLIGIBLE = 1e-15  # Hartree; libcint drops what it takes for nothing
MOST_COST = arbiter.MOST_COST / 4  # of an element for the oracle: some seconds
ASKED = 2  # elements of a case


def tensor(mol, omega=0.0, name="int2e"):
    """libcint's (ij|kl), shape (nao,) * 4; erfc as Coulomb minus erf, since its own is good to 1e-10 only."""
    if omega < 0:
        return tensor(mol, 0.0, name) - tensor(mol, -omega, name)
    with mol.with_range_coulomb(omega):
        return mol.intor(name)


def positive(mol):
    """The same molecule with the absolute values of its contraction coefficients."""
    other = mol.copy()
    other._env = mol._env.copy()
    for i in range(mol.nbas):
        first = mol._bas[i, 6]
        size = mol._bas[i, 2] * mol._bas[i, 3]
        other._env[first : first + size] = abs(other._env[first : first + size])
    return other


def pair_bounds(mol):
    """B_ij, shape (nao, nao)."""
    with mol.with_range_coulomb(0.0):
        square = np.einsum("ijij->ij", positive(mol).intor("int2e"))
    sizes = [function_size(mol, i) for i in range(mol.nbas) for _ in range(mol.bas_nctr(i))]
    first = np.cumsum(sizes) - sizes
    largest = np.sqrt(np.maximum.reduceat(np.maximum.reduceat(abs(square), first, axis=0), first, axis=1))
    return np.repeat(np.repeat(largest, sizes, axis=0), sizes, axis=1)


def function_size(mol, shell):
    """Components of one contracted function of a shell."""
    l = mol.bas_angular(shell)
    return (l + 1) * (l + 2) // 2 if mol.cart else 2 * l + 1


def agree(name, mol, ours, theirs, bounds, operator):
    """AssertionError if a whole tensor by md4 is wrong: beyond its bounds from libcint's, and from the oracle.

    Parameters
    ----------
    name : str
        Under which what became of the case is tallied.
    ours, theirs : ndarray, shape (nao,) * 4
        NaN in `ours` stands for what md4 was not asked for.
    bounds : ndarray, shape (nao, nao)
    operator : tuple (str, float or None)
        For the oracle.
    """
    scale = np.multiply.outer(bounds, bounds)
    with np.errstate(invalid="ignore"):
        excess = abs(ours - theirs) / (TOLERANCE * scale + NEGLIGIBLE)
    excess[~np.isfinite(theirs)] = np.inf
    excess[np.isnan(ours)] = 0.0
    if excess.max() > 1:
        TALLY[name, "arbitrated"] += 1
        judge(name, mol, ours, theirs, scale, operator, excess)


def judge(name, mol, ours, theirs, scale, operator, excess):
    """The oracle on the worst elements that it can afford."""
    basis = Basis.from_mol(mol)
    asked = 0
    for place in np.argsort(-excess, axis=None)[:2000]:
        aos = np.unravel_index(place, excess.shape)
        if excess[aos] <= 1 or asked == ASKED:
            break
        exact = exactly(basis, aos, operator)
        if exact is None:
            continue
        asked += 1
        error, allowed = abs(ours[aos] - exact), ORACLE_TOLERANCE * scale[aos] + NEGLIGIBLE
        assert error <= allowed, (
            f"element {tuple(map(int, aos))} of {operator}: md4 {ours[aos]!r}, libcint {theirs[aos]!r}, "
            f"oracle {exact!r}; md4 is off by {error:.1e}, allowed are {allowed:.1e}"
        )
    TALLY[name, "decided by the oracle" if asked else "undecided"] += 1


def exactly(basis, aos, operator):
    """The oracle's (ij|kl) of four AOs, None where it would take too long."""
    numbers = np.searchsorted(basis.ao_loc, aos, side="right") - 1
    chosen = [basis.shells[n] for n in numbers]
    element = tuple(int(n) for n in aos - basis.ao_loc[numbers])
    if arbiter.cost(chosen, basis.pure, element) > MOST_COST:
        return None
    return reference.eri(chosen, basis.pure, operator, [element], dps=30)[0]


def operator_of(omega):
    """(kind, parameter) of PySCF's omega."""
    return ("coulomb", None) if omega == 0 else ("erf", float(omega)) if omega > 0 else ("erfc", float(-omega))
