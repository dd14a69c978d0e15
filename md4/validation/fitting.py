"""Comparison of md4 with libcint for density fitting: integrals (ab|P) and (P|Q) over an auxiliary basis.

Classes, samples and errors are those of `md4.validation.libcint`, with shells of the auxiliary basis as P and Q. From g
functions on libcint's own error may be larger than the tolerance. Where the two differ, the oracle decides, which takes
less time here than for four centres.
"""

from itertools import combinations_with_replacement, product

from md4.engine import Engine
from md4.method.operators import Operator, check_order
from md4.shells.basis import Basis
from md4.validation.libcint import Libcint, checked_options, class_label, compare_classes, samples


def validate_fitting(
    mol, auxmol, backend="auto", tolerance=1e-12, abs_tolerance=1e-10, omega=None, max_quartets_per_class=1000, seed=0,
    max_memory=None, progress=None,
):  # fmt: skip
    """Compares md4 with libcint for every class (ab|P) and (P|Q) of a molecule and its auxiliary molecule.

    Parameters
    ----------
    mol, auxmol : pyscf.gto.Mole
        Both spherical, or both Cartesian.
    max_quartets_per_class : int
        Classes with more shell triples or shell pairs are sampled.

    Other parameters as `md4.validation.libcint.validate`.

    Returns
    -------
    list of md4.validation.libcint.Record
        The classes (ab|P), followed by the classes (P|Q). Shells are numbered as in `fitting_basis`.

    Raises
    ------
    ArgumentError, BasisError, UnsupportedError
        The input cannot be used; this is found before anything is computed.
    """
    tolerances, most, seed, omega = checked_options(
        mol, tolerance, abs_tolerance, omega, max_quartets_per_class, seed, progress
    )
    basis = fitting_basis(mol, auxmol)
    orbital, auxiliary = basis.parts
    check_order(max(2 * orbital.lmax, auxiliary.lmax) + auxiliary.lmax)
    engine = Engine(basis, operator=Operator.from_omega(omega), backend=backend, max_memory=max_memory)
    every = range(len(orbital)), range(len(orbital)), range(len(orbital), basis.unit)
    classes = [
        (class_label(ls), samples(basis, ls, most, seed, every[: len(ls)] if len(ls) == 3 else every[2:] * 2))
        for ls in fitting_classes(orbital, auxiliary)
    ]
    return compare_classes(engine, Libcint(mol, float(omega), auxmol), classes, *tolerances, progress)


def fitting_basis(mol, auxmol):
    """The shells of a molecule, followed by those of its auxiliary molecule and by the unit function."""
    return Basis.joined([Basis.from_mol(mol), Basis.from_mol(auxmol)])


def fitting_classes(orbital, auxiliary):
    """The distinct (la, lb, lP) with la >= lb of two bases, followed by the distinct (lP, lQ) with lP >= lQ."""
    pairs, aux_pairs = (
        [(a, b) for b, a in combinations_with_replacement(sorted({s.l for s in basis.shells}), 2)]
        for basis in (orbital, auxiliary)
    )
    ls = sorted({s.l for s in auxiliary.shells})
    return [(*pair, l) for pair, l in product(sorted(pairs), ls)] + sorted(aux_pairs)
