"""Random integrals over three and two centres against libcint, and against the oracle where the two differ.

As in `test_integrals`; the scale of the rounding errors of (ij|P) is B_ij B_P with B_P = sqrt((P|P)).
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from arbitration import (
    MOST_COST,
    NEGLIGIBLE,
    ORACLE_TOLERANCE,
    TOLERANCE,
    function_size,
    operator_of,
    pair_bounds,
    positive,
)
from hypothesis import strategies as st
from pyscf import df
from strategies import GPU_EXAMPLES, GPU_KINDS, TALLY, Molecule, fuzz, memory_caps, molecules, range_separations, report

import md4
from md4.validation import arbiter
from md4.validation import oracle as reference

ASKED = 2  # elements of a case that the oracle computes


@dataclass(frozen=True)
class FewCall:
    """A call of `md4.int3c2e`, or of `md4.int2c2e` for `auxiliary` alone."""

    molecule: Molecule
    auxiliary: Molecule
    three: bool = True
    aosym: str = "s1"
    omega: float = None
    shls_slice: tuple = None
    with_out: bool = False
    max_memory: float = None
    backend: str = "cpu"

    def run(self, mol, auxmol, shape):
        """md4's tensor; MemoryLimitError as from md4."""
        options = {"omega": self.omega, "shls_slice": self.shls_slice, "max_memory": self.max_memory,
                   "backend": self.backend, "out": np.full(shape, np.nan) if self.with_out else None}  # fmt: skip
        result = md4.int3c2e(mol, auxmol, self.aosym, **options) if self.three else md4.int2c2e(auxmol, **options)
        assert result is options["out"] or not self.with_out
        return result


@st.composite
def few_calls(draw, most=20, kinds=None, omegas=None, backend="cpu"):
    own = (0.0,) if backend == "cuda" else (0.0, 0.0, 0.3, -0.4)
    molecule, auxiliary = (draw(molecules(most, kinds, omegas=own)) for _ in range(2))
    auxiliary = replace(auxiliary, cart=molecule.cart)
    three, aosym = draw(st.integers(0, 3)) > 0, draw(st.sampled_from(["s1", "s2ij"]))
    i, j, k, l = (draw(ranges(part.nshell)) for part in (molecule, molecule, auxiliary, auxiliary))
    cut = (*i, *(i if aosym == "s2ij" else j), *k) if three else (*k, *l)
    return FewCall(
        molecule, auxiliary, three, aosym, draw(range_separations() if omegas is None else omegas),
        cut if draw(st.booleans()) else None, draw(st.booleans()), draw(memory_caps()), backend,
    )  # fmt: skip


def ranges(count):
    """First shell, and the one after the last."""
    return st.lists(st.integers(0, count), min_size=2, max_size=2, unique=True).map(sorted)


def libcint(call, mol, auxmol, omega):
    """libcint's whole tensor in s1; erfc as Coulomb minus erf, since its own is good to 1e-10 only."""
    if omega < 0:
        return libcint(call, mol, auxmol, 0.0) - libcint(call, mol, auxmol, -omega)
    with mol.with_range_coulomb(omega), auxmol.with_range_coulomb(omega):
        return df.incore.aux_e2(mol, auxmol) if call.three else auxmol.intor("int2c2e")


def single_bounds(mol):
    """B_P, shape (nao,), the same for all components of a function."""
    with mol.with_range_coulomb(0.0):
        square = abs(np.diag(positive(mol).intor("int2c2e")))
    sizes = [function_size(mol, i) for i in range(mol.nbas) for _ in range(mol.bas_nctr(i))]
    return np.sqrt(np.repeat(np.maximum.reduceat(square, np.cumsum(sizes) - sizes), sizes))


def part_of(call, mol, auxmol, whole):
    """The part of a whole tensor that a call asks for, in s1, and the AO with which each index begins."""
    parts = (mol, mol, auxmol) if call.three else (auxmol, auxmol)
    ends = call.shls_slice or sum(((0, part.nbas) for part in parts), ())
    cut = [part.ao_loc[list(pair)] for part, pair in zip(parts, zip(ends[::2], ends[1::2]))]
    return whole[tuple(slice(*pair) for pair in cut)], [int(first) for first, _ in cut]


def check_few_centres(call):
    """md4's tensor is right, or refused for its memory."""
    mol, auxmol = call.molecule.mol(), call.auxiliary.mol()
    omega = float((mol if call.three else auxmol).omega if call.omega is None else call.omega)
    theirs, begin = part_of(call, mol, auxmol, libcint(call, mol, auxmol, omega))
    single = single_bounds(auxmol)
    bounds, _ = part_of(call, mol, auxmol, np.multiply.outer(pair_bounds(mol) if call.three else single, single))
    packed = call.three and call.aosym == "s2ij"
    rows = np.tril_indices(len(theirs)) if packed else ...
    name = check_few_centres.__qualname__
    try:
        ours = call.run(mol, auxmol, theirs[rows].shape)
    except md4.MemoryLimitError:
        assert call.max_memory is not None
        TALLY[name, "refused for its memory"] += 1
        return
    assert ours.shape == theirs[rows].shape
    assert np.isfinite(ours).all()
    excess = np.zeros(theirs.shape)
    excess[rows] = abs(ours - theirs[rows]) / (TOLERANCE * bounds[rows] + NEGLIGIBLE)
    if excess.max() <= 1:
        return
    TALLY[name, "arbitrated"] += 1
    whole = np.zeros(theirs.shape)
    whole[rows] = ours
    judge(name, call, (mol, auxmol), begin, whole, bounds, excess, operator_of(omega))


def judge(name, call, mols, begin, ours, bounds, excess, operator):
    """The oracle on the worst elements that it can afford."""
    mol, auxmol = (md4.Basis.from_mol(each) for each in mols)
    parts, asked = ((mol, mol, auxmol) if call.three else (auxmol, auxmol)), 0
    for place in np.argsort(-excess, axis=None)[:2000]:
        element = np.unravel_index(place, excess.shape)
        if excess[element] <= 1 or asked == ASKED:
            break
        exact = exactly(parts, [int(n) + first for n, first in zip(element, begin)], operator)
        if exact is None:
            continue
        asked += 1
        error, allowed = abs(ours[element] - exact), ORACLE_TOLERANCE * bounds[element] + NEGLIGIBLE
        assert error <= allowed, (
            f"element {tuple(map(int, element))} of {operator}: md4 {ours[element]!r}, oracle {exact!r}; md4 is off by "
            f"{error:.1e}, allowed are {allowed:.1e}"
        )
    TALLY[name, "decided by the oracle" if asked else "undecided"] += 1


def exactly(parts, aos, operator):
    """The oracle's integral over AOs of some bases, None where it would take too long."""
    shells, element = [], []
    for basis, ao in zip(parts, aos):
        n = int(np.searchsorted(basis.ao_loc, ao, side="right")) - 1
        shells.append(basis.shells[n])
        element.append(ao - int(basis.ao_loc[n]))
    if arbiter.cost(shells, parts[0].pure, element) > MOST_COST:
        return None
    quartet, place = arbiter.as_quartet(shells, None), arbiter.as_quartet(element, 0)
    return reference.eri(quartet, parts[0].pure, operator, [place], dps=30)[0]


def test_few_centres(backend):
    few = st.sampled_from([None, 0.0, 0.3, 1e-3])
    options = {} if backend == "cpu" else {"kinds": GPU_KINDS, "backend": backend, "omegas": few, "most": 16}
    fuzz(check_few_centres, few_calls(**options), 25 if backend == "cpu" else GPU_EXAMPLES)
    report(check_few_centres)


@pytest.mark.slow
def test_few_centres_at_length():
    fuzz(check_few_centres, few_calls(), 1500)
    report(check_few_centres)
