"""Who builds J and K of attached objects: the `md4.JK` of a molecule, or PySCF's loops over a tensor that md4 made.

On a CPU an attached object keeps the AO tensor where PySCF would, in `mf._eri`: if there is memory for it by PySCF's
measure, or `mol.incore_anyway` is set. PySCF's methods for correlated electrons find it there. It is tagged with the
molecule that it was made for, so that a tensor of another geometry is not used, and one that a user has put there is
known.
"""

import weakref

import numpy as np

from md4.contract.densities import checked_densities
from md4.contract.ranks import ranks_of
from md4.contract.tensor import ao_tensor
from md4.errors import MemoryLimitError, UnsupportedError
from md4.method.operators import Operator
from md4.shells.basis import Basis, fingerprint
from md4.support.arguments import checked_flag
from md4.support.locks import Lock, locked
from md4.support.log import log

# Shell quartets that are looked at in a tensor of a user, and the largest difference of what counts as the same.
SAMPLES, SAME = 32, 1e-8


class Builder:
    """The options of `attach`, and the `md4.JK` and the tensor of the last molecule, made when they are needed.

    Attributes
    ----------
    options : dict
        backend, max_memory, stream, devices and comm of the JK that will be made.
    ranks : md4.contract.ranks.Ranks or md4.contract.ranks.Alone
        The ranks of comm.
    mo_integrals : bool
        Whether md4 makes integrals over molecular orbitals, too; see `md4.pyscf.correlated`.
    solo : bool
        Whether rank 0 is at work for all.
    """

    def __init__(self, mo_integrals=True, **options):
        self.options, self.ranks, self.solo = options, ranks_of(options["comm"]), False
        self.mo_integrals = mo_integrals
        self._jk = self._basis = self._made_for = self._tensor = None
        self.lock = Lock()

    def fresh(self):
        """A new builder with the same options, without a JK. The old one may be shared by copies of the object."""
        return Builder(self.mo_integrals, **self.options)

    @locked
    def jk(self, mol, made=lambda jk: None):
        """The JK of `mol`. It is made again if shells or geometry have changed, even if `mol` is the same object.

        `made` is called with a JK that was made now.
        """
        from md4.contract.fock import JK

        found = fingerprint(mol)
        if found != self._made_for:
            self._jk = self._made_for = None  # frees its memory first; nothing is there if it fails
            self._basis = self.ranks.together(lambda: Basis.from_mol(mol))  # which stays when `mol` is moved
            self._jk, self._made_for = JK(self._basis, omega=0.0, **self.options), found
            made(self._jk)
        return self._jk

    @locked
    def engines(self, mol):
        """The engines of the JK of `mol`, one for each device, over its basis and with its operator."""
        operator, workers = Operator.from_omega(mol.omega), self.jk(mol).team.workers
        return [worker.engine.with_basis(self._basis).with_operator(operator) for worker in workers]

    @locked
    def tensor(self, mol):
        """The AO tensor of `mol`, the same array as long as an object keeps it; None if it does not fit."""
        from pyscf import lib

        found, known = fingerprint(mol), self._tensor and self._tensor()
        if known is None or known.md4_made_for != found:
            try:
                known = lib.tag_array(ao_tensor(self.engines(mol)[0], "s8"), md4_made_for=found)
            except MemoryLimitError as error:
                log.debug("J and K are built directly: %s", error)
                return None
            self._tensor = weakref.ref(known)
        return known

    def first(self, work):
        """work() of rank 0 alone, for all ranks."""
        if self.solo:
            return work()

        def alone():
            self.solo = True
            try:
                return work()
            finally:
                self.solo = False

        return self.ranks.first(alone)

    def same_on_all(self, value):
        """`value` of rank 0, for all ranks."""
        return value if self.solo else self.ranks.first(lambda: value)

    def __getstate__(self):
        """Only the options. Device data are made again; a stream and a communicator belong to this process."""
        return vars(Builder(self.mo_integrals, **self.options | {"stream": None, "comm": None}))

    def __repr__(self):
        options = self.options | {"comm": None if self.options["comm"] is None else self.ranks}
        options["mo_integrals"] = None if self.mo_integrals else False
        return ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)


def made_for(eri):
    """The fingerprint of the molecule that a tensor of md4 is of; None for another array."""
    return getattr(eri, "md4_made_for", None)


def kept_tensor(mf, mol):
    """The AO tensor that `mf` keeps for `mol`, which is made if PySCF would make one; else None."""
    found = fingerprint(mol)
    if made_for(mf._eri) == found:
        return mf._eri
    if mol is not mf.mol and fingerprint(mf.mol) != found:
        return None
    mf._eri = None  # frees the memory of another geometry first
    if mol.incore_anyway or mf._is_mem_enough():
        mf._eri = mf._md4_builder.tensor(mol)
    return mf._eri


def by_pyscf_itself(mf):
    """Whether `mf._eri` holds what PySCF puts there, by the integrals of some shell quartets."""
    mol = mf.mol
    npair = mol.nao * (mol.nao + 1) // 2
    if mol.nbas == 0 or np.shape(mf._eri) != (npair * (npair + 1) // 2,):
        return False
    for shells in np.random.default_rng(0).integers(mol.nbas, size=(SAMPLES, 4)).tolist():
        i, j, k, l = np.ix_(*(np.arange(mol.ao_loc[n], mol.ao_loc[n + 1]) for n in shells))
        found = mf._eri[triangular(triangular(i, j), triangular(k, l))]
        wanted = mol.intor("int2e", shls_slice=[edge for n in shells for edge in (n, n + 1)])
        if not abs(found - wanted.reshape(found.shape)).max() <= SAME * max(1.0, abs(wanted).max()):
            return False
    return True


def triangular(i, j):
    """The place of the pair ij among those with i >= j, whichever of both is the larger one."""
    return np.maximum(i, j) * (np.maximum(i, j) + 1) // 2 + np.minimum(i, j)


def check_no_integrals(mf, omega):
    """UnsupportedError if the object was given integrals: PySCF would contract them, but md4 would ignore them."""
    if mf._eri is not None and made_for(mf._eri) is None and not omega:
        raise UnsupportedError(
            f"mf._eri of {type(mf).__name__} holds integrals of its own, set after md4.attach, and md4 would ignore "
            "them; call md4.detach(mf) to use them, or set mf._eri = None."
        )


def build(mf, mol, jk, dm, hermi, with_j, with_k, omega):
    """J and K of `mf` for densities of any leading shape, from a tensor if it keeps one, else directly."""
    stack = dm.reshape(-1, *dm.shape[-2:])
    found = from_tensor(mf, mol, jk, stack, hermi, with_j, with_k, omega)
    if found is None:
        found = jk.get_jk(stack, hermi, with_j, with_k, omega, mf.direct_scf_tol)
    return [None if v is None else v.reshape(dm.shape) for v in found]


def from_tensor(mf, mol, jk, dm, hermi, with_j, with_k, omega):
    """J and K by PySCF's loops over a tensor; arguments and errors as for `md4.JK`. None if there is no tensor.

    It is that of 1/r, in a process without others. All else is built directly, as on a GPU. With `mol.omega` the tensor
    is dropped, as what looks into it would have another operator than J and K.
    """
    from pyscf.scf.hf import dot_eri_dm

    if mol is mf.mol and mol.omega and made_for(mf._eri) is not None:
        mf._eri = None
    if omega or mol.omega or jk.ranks.size > 1 or jk.engine.backend.name != "cpu":
        return None
    flags = checked_flag("with_j", with_j), checked_flag("with_k", with_k)
    densities, _ = checked_densities(dm, hermi, dm.shape[-1])
    eri = kept_tensor(mf, mol)
    return None if eri is None else dot_eri_dm(eri, densities, hermi, *flags)
