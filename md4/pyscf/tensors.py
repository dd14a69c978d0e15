"""What an `md4.DF` makes: the tensors of a molecule, their rows as an array, and orbitals from PySCF's tags."""

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from md4.contract.fitting_team import density_fitting
from md4.contract.ranks import ranks_of
from md4.errors import ArgumentError, BasisError
from md4.method.operators import Operator
from md4.shells.basis import Basis, fingerprint
from md4.support.arguments import shown
from md4.support.locks import Lock, locked


class Tensors:
    """The options of a `DF`, and the tensors of its molecule, one an operator, made when they are first needed.

    Attributes
    ----------
    options : dict
        backend, max_memory, stream, devices, comm, store and cutoff as for `DF`.
    ranks : md4.contract.ranks.Ranks or md4.contract.ranks.Alone
        The ranks of comm.
    auxmol : pyscf.gto.Mole or None
        The auxiliary basis of the tensors.
    replaces : bool
        Whether the `DF` was made in place of PySCF's, by `md4.attach`.
    """

    def __init__(self, replaces=False, **options):
        self.options, self.ranks, self.lock, self.replaces = options, ranks_of(options["comm"]), Lock(), replaces
        self.auxmol, self.made_for, self.made = None, None, {}

    def fresh(self):
        """New ones with the same options. The old ones may be shared by copies of the object."""
        return Tensors(self.replaces, **self.options)

    @locked
    def has(self, mol, omega):
        """Whether the tensor of a molecule for an operator is there."""
        return fingerprint(mol) == self.made_for and omega in self.made

    @locked
    def of(self, mol, auxbasis):
        """The auxiliary molecule of `mol`; what was made for other shells or another geometry is forgotten."""
        found = fingerprint(mol)
        if found != self.made_for:
            self.made.clear()  # frees its memory first
            self.auxmol, self.made_for = make_auxmol(mol, auxbasis), found
        return self.auxmol

    @locked
    def fitting(self, mol, auxbasis, omega):
        """The `DensityFitting` for an operator."""
        auxmol = self.of(mol, auxbasis)
        if omega not in self.made:
            operator, first = Operator.from_omega(omega), next(iter(self.made.values()), None)
            self.made[omega] = self.first(mol, auxmol, operator) if first is None else first.with_operator(operator)
        return self.made[omega]

    def first(self, mol, auxmol, operator):
        """A `DensityFitting` or `FittingTeam`, of which those for other operators are made."""
        options = {name: value for name, value in self.options.items() if name != "comm"}
        return density_fitting(Basis.from_mol(mol), Basis.from_mol(auxmol), operator, ranks=self.ranks, **options)

    def __repr__(self):
        options = self.options | {"comm": None if self.options["comm"] is None else self.ranks}
        return ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)

    def __getstate__(self):
        """Only the options. Tensors are made again; a stream and a communicator belong to this process."""
        return vars(Tensors(self.replaces, **self.options | {"stream": None, "comm": None}))


def make_auxmol(mol, auxbasis):
    """PySCF's auxiliary molecule.

    BasisError if it has no auxiliary functions for an element, ArgumentError if it can make nothing of what is given.
    """
    from pyscf.df import addons
    from pyscf.lib.exceptions import BasisNotFoundError

    try:
        # for a name alone PySCF would also print its advice, which is in the message below
        made = addons.make_auxmol(mol, {"default": auxbasis} if isinstance(auxbasis, str) else auxbasis)
        made.basis = made.basis if auxbasis is None else auxbasis
    except (BasisNotFoundError, KeyError) as error:
        elements = ", ".join(sorted({mol.atom_pure_symbol(n) for n in range(mol.natm)}))
        raise BasisError(
            f"the auxiliary basis {shown(auxbasis)} does not have all of {elements}; use another one, None for PySCF's "
            "choice, or pyscf.df.autoaux(mol), which makes one."
        ) from error
    except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"PySCF makes no auxiliary basis of {shown(auxbasis)} ({type(error).__name__}: {error}); give a name, or a "
            "dict with a name or the shells of each element."
        ) from error
    without = {mol.atom_symbol(n) for n in range(mol.natm) if mol.atom_nshells(n) and not made.atom_nshells(n)}
    if without:
        raise BasisError(
            f"the auxiliary basis {shown(auxbasis)} has no functions for {', '.join(sorted(without))}; add them to the "
            "dict, whose key 'default' stands for all elements that it does not name, or use None for PySCF's choice."
        )
    return made


class Rows(NDArrayOperatorsMixin):
    """The tensor as an array of rows, shape (naux, nao (nao + 1) / 2), of which only what is asked for is made.

    Arithmetic makes arrays of its own.
    """

    dtype, ndim = np.dtype(float), 2

    def __init__(self, fitting):
        self.fitting, self.whole = fitting, None
        self.shape = fitting.size, fitting.nao * (fitting.nao + 1) // 2

    def __len__(self):
        return self.shape[0]

    def __array__(self, dtype=None, copy=None):
        if self.whole is None:
            self.whole = self.fitting.rows(0, len(self))
        return self.whole.astype(self.dtype if dtype is None else dtype, copy=bool(copy))

    def __array_ufunc__(self, function, method, *inputs, out=(), **options):
        given = [np.asarray(this) if isinstance(this, Rows) else this for this in inputs]
        if out and not any(isinstance(this, Rows) for this in out):  # else the result takes the place of the tensor
            options["out"] = out
        return getattr(function, method)(*given, **options)

    def __getitem__(self, key):
        if self.whole is None and isinstance(key, slice) and key.step in (None, 1):
            first, last, _ = key.indices(len(self))
            return self.fitting.rows(first, max(first, last))
        return np.asarray(self)[key]

    def __getattr__(self, name):
        """All else is asked of the whole tensor, which is kept from then on."""
        if name.startswith("__") or name in ("fitting", "whole", "shape"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)


def tagged_orbitals(dm, count):
    """(coefficients, occupations) of each of `count` matrices, from PySCF's tags; None where there are none.

    The tags of a restricted open shell have both spins in one set of occupations.
    """
    coefficients, occupations = getattr(dm, "mo_coeff", None), getattr(dm, "mo_occ", None)
    if coefficients is None or occupations is None:
        return None
    try:
        coefficients, occupations = np.asarray(coefficients), np.asarray(occupations)
    except ValueError:  # spins with different numbers of orbitals
        return None
    if occupations.ndim < 1 or coefficients.ndim < 2 or coefficients.shape[-1] != occupations.shape[-1]:
        return None
    occupations = occupations.reshape(-1, occupations.shape[-1])
    coefficients = coefficients.reshape(-1, *coefficients.shape[-2:])
    if 2 * len(occupations) == count:
        coefficients = np.concatenate([coefficients] * 2)
        occupations = np.concatenate([occupations > 0, occupations == 2]).astype(float)
    if len(coefficients) != count or len(occupations) != count:
        return None
    return list(zip(coefficients, occupations))
