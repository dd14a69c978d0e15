"""What the tests of the engine share: molecules, libcint's blocks, the oracle's cases, and the transfer to the host."""

import json
from dataclasses import dataclass
from itertools import combinations_with_replacement, product

import numpy as np
from places import DATA
from pyscf import gto

from md4.method.angular import cartesian_triples, component_coefficients
from md4.shells.basis import Basis
from md4.shells.shell import Shell
from md4.support.display import shell_letter
from md4.validation import oracle as reference

WATER = "O 0 0 0.1173; H 0 0.7572 -0.4692; H 0 -0.7572 -0.4692"
HYDROGEN_FLUORIDE = "H 0 0 0; F 0 0 0.917"
METHANE = "C 0 0 0; H 0.63 0.63 0.63; H -0.63 -0.63 0.63; H -0.63 0.63 -0.63; H 0.63 -0.63 -0.63"
LMAX = 6  # i functions
# Four centres whose shells overlap well, so that no block is small by cancellation of multipoles.
CENTRES = np.array([[0.1, -0.2, 0.3], [-0.4, 0.5, -0.1], [0.3, 0.4, -0.5], [-0.2, -0.3, -0.6]])


def host(result):
    """A result of the engine as an ndarray on the host."""
    return result.copy_to_host() if hasattr(result, "copy_to_host") else np.asarray(result)


# Basis sets of the Basis Set Exchange, so that tests run where it is not installed.
STORED = json.loads((DATA / "basis_sets.json").read_text())


def molecule(atom, basis, spin=None, **kwargs):
    """A built molecule, quietly; the lowest spin by default."""
    return gto.M(atom=atom, basis=STORED[basis] if str(basis) in STORED else basis, verbose=0, spin=spin, **kwargs)


def joined(basis, symbols):
    """A basis set with all functions of one l in one shell, zeros in its coefficients, by element."""
    return {symbol: [joined_shell(shells) for shells in by_l(gto.basis.load(basis, symbol))] for symbol in symbols}


def by_l(shells):
    """Shells in PySCF's format, grouped by l."""
    return [[s for s in shells if s[0] == l] for l in sorted({s[0] for s in shells})]


def joined_shell(shells):
    """One shell [l, [exponent, coefficient, ...], ...] with the functions of all, the first one last."""
    columns = [(s, k) for s, shell in enumerate(shells) for k in range(1, len(shell[1]))]
    order = columns[1:] + columns[:1]
    rows = [
        [row[0], *(row[k] if n == s else 0.0 for n, k in order)]
        for s, shell in enumerate(shells)
        for row in shell[1:]
    ]
    return [shells[0][0], *rows]


def relative_error(ours, theirs):
    """Largest absolute error over the largest element."""
    return abs(ours - theirs).max() / abs(theirs).max()


# classes --------------------------------------------------------------------------------------------------------------


def class_name(ls):
    """(la, lb, lc, ld) as '(ab|cd)'."""
    a, b, c, d = map(shell_letter, ls)
    return f"({a}{b}|{c}{d})"


def all_classes(lmax=LMAX):
    """Every (la lb|lc ld) up to `lmax`, one for its eight permutations."""
    pairs = [(a, b) for b, a in combinations_with_replacement(range(lmax + 1), 2)]
    return [(*bra, *ket) for ket, bra in combinations_with_replacement(sorted(pairs), 2)]


def ladder(lmax=LMAX):
    """The families (ll|ll), (ls|ls) and (ll|ss)."""
    return sorted({ls for l in range(lmax + 1) for ls in ((l, l, l, l), (l, 0, l, 0), (l, l, 0, 0))})


def mixed_classes(count, lmax=LMAX, seed=0):
    """A seeded choice of the classes that are not in `ladder`, in random order of shells."""
    rng = np.random.default_rng(seed)
    rest = [ls for ls in all_classes(lmax) if ls not in set(ladder(lmax))]
    chosen = [rest[i] for i in rng.choice(len(rest), count, replace=False)]
    return [tuple(int(l) for l in rng.permutation(ls)) for ls in chosen]


@dataclass(frozen=True)
class Quartet:
    """Four shells, one on each of `CENTRES`, with `nprim[i]` primitives; the same for libcint and for md4."""

    ls: tuple
    nprim: tuple = (1, 1, 1, 1)
    cart: bool = False
    seed: int = 0

    def mol(self):
        rng = np.random.default_rng([self.seed, *self.ls])
        basis = {}
        for i, (l, n) in enumerate(zip(self.ls, self.nprim)):
            exponents = np.geomspace(0.4, 6.0, n) * rng.uniform(0.9, 1.2) if n > 1 else [rng.uniform(0.6, 1.5)]
            basis[f"H{i}"] = [[l, *([float(e), float(c)] for e, c in zip(exponents, rng.uniform(0.2, 1.0, n)))]]
        atoms = [(f"H{i}", r) for i, r in enumerate(CENTRES)]
        return gto.M(atom=atoms, basis=basis, unit="Bohr", cart=self.cart, verbose=0)


# Contractions of K = 1, 5 and 25 primitive pairs on either side.
NPRIM = {1: (1, 1, 1, 1), 5: (5, 1, 1, 5), 25: (5, 5, 5, 5)}


def tensor_error(ours, theirs):
    """Largest error of an 's8' tensor, relative to what each element may have: 2e-12 of its Schwarz bound, and 2e-14.

    libcint drops what it takes for negligible, 1e-14 in benzene where the oracle has md4 right, hence the second. The
    first is twice 1e-12 since libcint's tensors (not its single blocks) are off by 1.1e-12 of the bound in water in
    cc-pVQZ and by 1.4e-12 in CH4 in roosdz; at both places the oracle has md4 right to 3e-15 of it.
    """
    return max(error for error, *_ in tensor_errors(ours, theirs))


def tensor_errors(ours, theirs):
    """For each pair ij, (largest error as in `tensor_error`, ij, the kl where it stands, what it is relative to)."""
    assert ours.shape == theirs.shape
    npair = int((np.sqrt(8 * len(ours) + 1) - 1) / 2)
    rows = np.arange(npair)
    bound = np.sqrt(abs(ours[rows * (rows + 1) // 2 + rows]))
    found = []
    for n in rows:
        piece = slice(n * (n + 1) // 2, n * (n + 1) // 2 + n + 1)
        allowed = 2e-12 * bound[n] * bound[: n + 1] + 2e-14
        error = abs(ours[piece] - theirs[piece]) / allowed
        assert np.all(np.isfinite(error))
        worst = int(np.argmax(error))
        found.append((float(error[worst]), int(n), worst, float(allowed[worst])))
    return found


def arbitrate(mol, ours, theirs, count=3):
    """Errors of `ours` and of `theirs` against the oracle, as in `tensor_error`, where they differ most."""
    basis = Basis.from_mol(mol)

    def pair(n):
        i = int((np.sqrt(8 * n + 1) - 1) / 2)
        return i, n - i * (i + 1) // 2

    for _, ij, kl, allowed in sorted(tensor_errors(ours, theirs))[-count:]:
        aos = np.array([*pair(ij), *pair(kl)])
        numbers = np.searchsorted(basis.ao_loc, aos, side="right") - 1
        element = tuple(int(n) for n in aos - basis.ao_loc[numbers])
        exact = reference.eri([basis.shells[n] for n in numbers], basis.pure, elements=[element], dps=30)[0]
        place = ij * (ij + 1) // 2 + kl
        yield abs(ours[place] - exact) / allowed, abs(theirs[place] - exact) / allowed


def libcint_block(mol, shells=(0, 1, 2, 3), omega=0.0):
    """One block of libcint's; that of erfc as Coulomb minus erf.

    libcint's own erfc is good to 2e-11 only, from d functions on (md4.validation.oracle agrees with the difference).
    """
    name = "int2e_cart" if mol.cart else "int2e_sph"
    with mol.with_range_coulomb(abs(omega)):
        block = mol.intor_by_shell(name, shells)
    if omega >= 0:
        return block
    with mol.with_range_coulomb(0.0):
        return mol.intor_by_shell(name, shells) - block


# the oracle -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OracleCase:
    """A case of tests/data/reference.json; see make_reference.py."""

    name: str
    basis: Basis
    operator: tuple
    elements: list
    values: np.ndarray
    scale: float
    full: bool

    def error(self, block):
        """Largest error relative to the block's largest element.

        Where the file does not know the whole block, md4's own counts; it is checked no less at the file's elements.
        """
        ours = np.array([block[tuple(e)] for e in self.elements])
        scale = self.scale if self.full else max(self.scale, abs(block).max())
        return abs(ours - self.values).max() / max(scale, np.finfo(float).tiny)


def oracle_cases():
    """All cases of reference.json."""
    text = (DATA / "reference.json").read_text()
    arrays = "exponents", "coefficients", "centre"
    out = []
    for case in json.loads(text):
        shells = [Shell(s["l"], *(np.array(s[k]) for k in arrays)) for s in case["shells"]]
        name, parameter = case["operator"]
        out.append(
            OracleCase(
                case["name"], Basis(shells, case["pure"]), (name, parameter or 0.0), case["elements"],
                np.array([float(v) for v in case["values"]]), float(case["scale"]), case["full"],
            )
        )  # fmt: skip
    return out


def oracle_error(mol, ours, theirs, operator=("coulomb", None), count=3):
    """Largest error over the block's largest element, at the `count` elements where md4 and libcint differ most."""
    worst = np.argsort(abs(ours - theirs), axis=None)[::-1][:count]
    elements = [tuple(int(i) for i in np.unravel_index(w, ours.shape)) for w in worst]
    shells = Basis.from_mol(mol).shells
    values = reference.eri(shells, not mol.cart, operator, elements)
    return max(abs(ours[e] - v) for e, v in zip(elements, values)) / abs(theirs).max()


# symmetries -----------------------------------------------------------------------------------------------------------


def permutations():
    """The eight orders of (0 1|2 3) under which an integral stays the same."""
    bra, ket = ((0, 1), (1, 0)), ((2, 3), (3, 2))
    return [i + j for x, y in ((bra, ket), (ket, bra)) for i, j in product(x, y)]


def monomials(l, points):
    """Values of the Cartesian components of degree `l`, shape (npoint, ncart)."""
    return np.prod(points[:, None, :] ** cartesian_triples(l), axis=2)


def component_rotation(l, pure, rotation):
    """D with S_m(R^-1 x) = sum_n S_n(x) D_nm, by least squares over random points."""
    points = np.random.default_rng(l).normal(size=(200, 3))
    c = component_coefficients(l, pure)
    return np.linalg.lstsq(monomials(l, points) @ c, monomials(l, points @ rotation) @ c, rcond=None)[0]
