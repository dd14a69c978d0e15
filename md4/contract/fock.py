"""Coulomb and exchange matrices from blocks of integrals, which are made, digested and forgotten one by one.

    J_ij = sum_kl (ij|kl) D_lk          K_il = sum_jk (ij|kl) D_jk

Lists of shell pairs, their H matrices and their Schwarz bounds are made once. A build goes through all pairs of lists.
For each of them, a target of the backend makes and digests (`md4.method.digestion`) the quartets that survive
(`md4.contract.screening`). Nothing of the size nao^4 is stored. J alone needs no blocks: it is summed in the Hermite
basis (`md4.method.hermite_coulomb`).

Several devices and processes share a build: `md4.contract.team` says how, `md4.contract.worker` what each one does.
"""

import time
from hashlib import sha256
from typing import Any

import numpy as np

from md4.contract.densities import LAYOUT, by_parts, checked_densities
from md4.contract.frame import Frame
from md4.contract.gradient import Gradients
from md4.contract.ranks import collective, ranks_of
from md4.contract.screening import PairList, Statistics
from md4.contract.team import Team
from md4.contract.worker import Build
from md4.cpu.matrices import by_elements, plus_transposed
from md4.engine import Engine
from md4.method.operators import Operator, check_order
from md4.shells.basis import Basis, fingerprint
from md4.support.arguments import checked_flag, checked_mol, checked_progress, checked_real
from md4.support.cache import IMPORTED
from md4.support.locks import Lock, locked
from md4.support.log import log
from md4.support.types import BackendName, Densities, Devices, JKPair, Molecule, Stream

# Exponents (Bohr^-2) up to which J is made without K on a GPU.
STEEPEST_ALONE = 1e20
NOTHING = np.empty((0, 0, 0))


class JK(Gradients):
    """J and K of a basis set, for one build or many.

    Threads may share an object. Then their builds run one after the other. If the molecule is changed in place, pairs
    and bounds are made anew at the next build, and `update` starts again from zero.

    On a GPU, a planar molecule with f functions or higher ones is turned into a plane of constant z, unless all its
    atoms have the same x, y or z already. Fewer integrals are computed there, and J and K are turned back.

    Parameters
    ----------
    mol : pyscf.gto.Mole or Basis
        The molecule or its basis. General contractions are split where that saves work; see `Basis.regrouped`.
    omega : float, optional
        Range separation in Bohr^-1: erf(omega r)/r for omega > 0, erfc(-omega r)/r for omega < 0, and 1/r for 0. The
        default is `mol.omega`.
    backend : {'auto', 'cuda', 'cpu'}
    max_memory : float, optional
        Hard cap in MB on what md4 allocates. The default is what is free.
    stream : optional
        CUDA stream to work on; see `Engine`.
    direct_scf_tol : float
        A shell quartet is left out only if each order of its indices adds less than this (Hartree) to each element of
        J and K, unless D is very large (see the page "Theory"). A GPU computes small quartets in single precision where
        the error is smaller than this, too. With 0 no quartet is left out, and all are in double precision.
    progress : bool, optional
        Whether to show a progress bar. By default there is one on a terminal if the work takes long.
    devices : 'all', int or list of int, optional
        GPUs that share each build and each gradient, by their numbers. The default is the current one, or under MPI one
        for each rank. `max_memory` is that of each device.
    comm : mpi4py.MPI.Intracomm, optional
        Communicator whose ranks share each build. All ranks call the same methods with the same arguments, and get the
        same J and K. The densities are those of rank 0. See the page "Several GPUs and nodes".

    Attributes
    ----------
    stats : Statistics
        Statistics of the last build.

    Raises
    ------
    ArgumentError, BasisError, DeviceError
        As for `Engine`, and for a tolerance that is negative or not finite, or ranks that do not do the same.
    RankError
        Another rank failed. Its message is that rank's.
    UnsupportedError
        A periodic cell, or shells with l > 8, of which four would exceed L = 32.

    Examples
    --------
    >>> import md4, pyscf
    >>> mol = pyscf.M(atom="H 0 0 0; F 0 0 0.917", basis="6-31g")
    >>> dm = mol.RHF().get_init_guess()
    >>> jk = md4.JK(mol)
    >>> vj, vk = jk.get_jk(dm)
    >>> vj.shape
    (11, 11)

    The next density, by its change:

    >>> vj, vk = jk.update(dm)
    >>> vj, vk = jk.update(1.01 * dm)
    >>> jk.stats.wanted + jk.stats.skipped  # shell quartets
    406
    """

    def __init__(
        self, mol: Molecule | Basis, omega: float | None = None, backend: BackendName = "auto",
        max_memory: float | None = None, stream: Stream = None, direct_scf_tol: float = 1e-13,
        progress: bool | None = None, devices: Devices = None, comm: Any = None,
    ) -> None:  # fmt: skip
        self.lock, self.ranks, self._comm = Lock(), ranks_of(comm), comm

        def check():
            self.omega, self.progress = omega, checked_progress(progress)
            Operator.from_omega(omega)  # an error now rather than at the first build
            self.direct_scf_tol = self._finest = checked_tolerance(direct_scf_tol)
            self._options, self._devices = {"backend": backend, "stream": stream, "max_memory": max_memory}, devices
            return mol if isinstance(mol, Basis) else checked_mol(mol)

        self.reset(self.ranks.together(check))

    mol: Any
    basis: Basis
    team: Team
    stats: Statistics
    _made_for: tuple[Any, ...] | None  # the fingerprint of `mol` when it was read
    _frame: Frame  # of the AOs that the team has, in terms of those of the molecule
    _last: tuple[Any, Any, Any] | None  # what `update` was asked, the density matrices, J and K

    @locked
    @collective
    def reset(self, mol: Molecule | Basis | None = None) -> None:
        """Forgets pairs, H matrices, bounds and densities, and continues with `mol`, or the molecule as it is now.

        If that fails, the object stays as it was, without lists.
        """

        def read():
            given = self._given if mol is None else mol
            found = None if isinstance(given, Basis) else fingerprint(checked_mol(given))
            basis = given if found is None else Basis.from_mol(given)
            check_order(4 * basis.lmax)
            ends = basis.ao_loc[1:] if found is None else given.aoslice_by_atom()[:, 3]
            return given, found, ends, *basis.regrouped()

        given, found, ends, basis, order = self.ranks.together(read)
        molecule = None if found is None else given
        self._forget_lists()
        team = self.ranks.together(lambda: Team(basis, self._options, self._devices, self.ranks))
        frame = self.ranks.together(lambda: Frame(basis, order, team.engine.backend, self.ranks))
        team.use(frame.basis)
        own = {"the operator": self._operator_of(molecule), "direct_scf_tol": self.direct_scf_tol}
        self.ranks.same({**common_facts(basis), **team.facts(), **frame.facts(), **own})
        team.count()
        new = {"mol": molecule, "_made_for": found, "basis": basis, "_frame": frame, "team": team}
        new |= {"_given": given, "_ends": ends, "stats": Statistics()}
        new |= {"_last": None, "_primitives": None}
        self.__dict__.update(new)  # all at once, since an interrupt may come in between

    def _follow_molecule(self):
        """Makes all anew if the molecule was changed in place."""
        moved = self.mol is not None and fingerprint(self.mol) != self._made_for
        self.ranks.same({"a change of the molecule in place": moved})
        if moved:
            self.reset()

    def _forget_lists(self):
        """Drops the pair lists, their H matrices, and memory that is kept."""
        self._kept = NOTHING
        if hasattr(self, "team"):
            self.team.forget()

    @property
    def engine(self) -> Engine:
        """The engine, that of the first of several devices; its basis is that of the molecule as builds turn it."""
        return self.team.engine

    @property
    def lists(self) -> list[PairList]:
        """Pair lists of the last build, with the Schwarz bounds of Coulomb, which are bounds for erf and erfc, too."""
        self._make_lists()
        return self.team.lists

    def _refine(self, tolerance):
        """Forgets lists that were made for larger tolerances only."""
        if tolerance < self._finest:
            self._forget_lists()
            self._finest = tolerance  # last, since an interrupt may come in between

    def _make_lists(self):
        """Makes the pair lists where there are none."""
        if not self.team.lists:
            start = time.perf_counter()
            self.team.make_lists(self._finest * self._frame.sharpening)
            lists, seconds = self.team.lists, time.perf_counter() - start
            count = sum(map(len, lists))
            log.debug("%d lists of %d shell pairs and their bounds made in %.2f s", len(lists), count, seconds)

    @locked
    @collective
    def get_jk(
        self, dm: Densities, hermi: int = 1, with_j: bool = True, with_k: bool = True, omega: float | None = None,
        direct_scf_tol: float | None = None,
    ) -> JKPair:  # fmt: skip
        """J and K of density matrices, as PySCF's `get_jk`.

        Parameters
        ----------
        dm : array_like, shape (nao, nao) or (n, nao, nao)
            Real or complex numbers of any precision, which are converted to float64 or complex128. If it is a device
            array, the results are device arrays.
        hermi : {0, 1, 2}
            1: the matrices are Hermitian, 2: they are anti-Hermitian, 0: neither. This is not checked.
        with_j, with_k : bool
        omega : float, optional
            Replaces the omega of the constructor.
        direct_scf_tol : float, optional
            Replaces the tolerance of the constructor. If it is smaller than all before, pair lists are made again.

        Returns
        -------
        vj, vk : ndarray of dm's shape, float64 or complex128, in Hartree; None if not requested

        Raises
        ------
        ArgumentError
            Density matrices or options that cannot be used, or a device array with the backend 'cpu'.
        MemoryLimitError
            The matrices and the least workspace exceed `max_memory`.
        """
        self._follow_molecule()
        given = self._agreed("get_jk", dm, hermi, with_j, with_k, omega, direct_scf_tol)
        return self._sent(self._get_jk(*given), dm)

    def _agreed(self, name, dm, hermi, with_j, with_k, omega, direct_scf_tol=None):
        """The arguments of `_get_jk`, which are checked, and for which all ranks have the densities of rank 0."""

        def check():
            flags = checked_flag("with_j", with_j), checked_flag("with_k", with_k)
            densities, shape = checked_densities(self._fetched(dm), hermi, self.basis.nao)
            tolerance = self.direct_scf_tol if direct_scf_tol is None else checked_tolerance(direct_scf_tol)
            return densities, shape, hermi, *flags, self._operator(omega), tolerance

        densities, *options = self.ranks.together(check)
        facts = ("the shape of the densities", "hermi", "with_j", "with_k", "the operator", "direct_scf_tol")
        self.ranks.same({"the call": name, "the type of the densities": densities.dtype, **dict(zip(facts, options))})
        return self.ranks.broadcast(densities), *options

    def _get_jk(self, densities, shape, hermi, with_j, with_k, operator, tolerance):
        """J and K on the host, of checked densities with the shape (n, nao, nao), in another shape."""
        self._refine(tolerance)
        with self.engine.lock:
            results = self._real_or_complex(densities, hermi, with_j, with_k, operator, tolerance)
        return tuple(None if v is None else v.reshape(shape) for v in results)

    @locked
    @collective
    def update(
        self, dm: Densities, hermi: int = 1, with_j: bool = True, with_k: bool = True, omega: float | None = None
    ) -> JKPair:
        """As `get_jk`, but computed from the difference to the density matrices of the last `update`.

        The smaller the difference is, the fewer quartets survive. The errors of the builds add up; `reset` starts again
        from zero.
        """
        self._follow_molecule()
        name = "update, first" if self._last is None else "update"
        densities, *options = self._agreed(name, dm, hermi, with_j, with_k, omega)
        new, key = by_elements(np.positive, densities), (*options, densities.dtype)
        if self._last is None or self._last[0] != key:
            result = self._get_jk(new, *options)
        else:
            _, last, old = self._last
            change = self._get_jk(by_elements(np.subtract, new, last), *options)
            result = tuple(None if c is None else by_elements(np.add, c, o, out=c) for c, o in zip(change, old))
        self._last = key, new, result
        return self._sent([None if v is None else by_elements(np.positive, v) for v in result], dm)

    def _fetched(self, dm):
        """The density matrices on the host."""
        if not hasattr(dm, "__cuda_array_interface__"):
            return dm
        return self.engine.backend.fetch(dm)

    def _sent(self, results, dm):
        """J and K are returned where the density matrices are."""
        if not hasattr(dm, "__cuda_array_interface__"):
            return tuple(results)
        return tuple(None if v is None else self.engine.backend.send(v) for v in results)

    def _operator(self, omega):
        return self._operator_of(self.mol, omega)

    def _operator_of(self, mol, omega=None):
        """The operator for an argument `omega` and a molecule, which is None for a basis."""
        own = self.omega if self.omega is not None else getattr(mol, "omega", 0.0)
        return Operator.from_omega(own if omega is None else omega)

    def _real_or_complex(self, dm, hermi, *options):
        """J and K of the real and imaginary parts, whose symmetries differ."""
        hermi = 0 if np.iscomplexobj(dm) else hermi
        return by_parts(dm, lambda part: self._build(np.require(part, np.float64, LAYOUT), hermi, *options))

    def _build(self, dm, hermi, with_j, with_k, operator, tolerance):
        """J and K of real density matrices, shape (n, nao, nao)."""
        start = time.perf_counter()
        dm = self._in_frame(dm)
        general = self._counted(np.concatenate([dm, dm.transpose(0, 2, 1)])) if hermi == 0 else dm
        coulomb = self._twice(dm if with_j and hermi != 2 else dm[:0])
        # sums of J alone in fixed point would lose digits beside such functions
        beside = len(coulomb) > 0 and self.engine.backend.name != "cpu" and self.basis.exponents.max() > STEEPEST_ALONE
        exchange = general if with_k or beside else dm[:0]
        build = Build(operator, tolerance * self._frame.sharpening, exchange, coulomb, with_k or beside)
        x, y = map(self._frame.sums, self._sums(build, dm))
        self._kept = coulomb  # not after an error
        vj = vk = None
        if with_j:
            vj = plus_transposed(y, out=y) if hermi != 2 else np.zeros_like(dm)
        if with_k and hermi == 0:
            vk = plus_transposed(x[: len(dm)], x[len(dm) :])
        elif with_k:
            vk = plus_transposed(x, sign=-1 if hermi == 2 else 1, out=x)
        self.stats.seconds = time.perf_counter() - start
        return vj, vk

    def _twice(self, dm):
        """Memory for D + D^T, which is kept: to write new memory takes longer than the sum. `_sums` fills it."""
        kept, self._kept = self._kept, NOTHING
        if kept.shape != dm.shape:
            del kept  # before the next one is counted
            kept = self.engine.backend.watch(np.empty_like(dm))
        return kept

    def _sums(self, build, dm):
        """X and Y of a build (`md4.method.digestion`); without exchange, X has no matrices."""
        if build.matrices == 0:  # J of anti-Hermitian densities is zero
            self.stats = Statistics(skipped=self._quartets)
            return build.exchange, build.coulomb
        self.team.compile_ahead(build, dm, self._finest * self._frame.sharpening, self.progress)
        if len(build.coulomb):
            plus_transposed(dm, out=build.coulomb)
        self._make_lists()
        self.team.screen(build, dm)
        found, self.stats = self.team.run(build, self.progress)
        self.stats.skipped = self._quartets - self.stats.wanted
        return found if build.with_k else (build.exchange, *found)

    @property
    def _quartets(self):
        """Number of unique shell quartets."""
        total = self.basis.nshell * (self.basis.nshell + 1) // 2
        return total * (total + 1) // 2

    def __repr__(self):
        return f"JK({self.basis!r}, {self.engine.backend.name!r}, direct_scf_tol={self.direct_scf_tol:g})"

    def _repr_html_(self):
        from md4.support.display import jk_html

        return jk_html(self)


def common_facts(basis):
    """What has to be the same in all processes that share builds: md4's source, and the basis."""
    digest = sha256(repr((basis.pure, basis.classes.tolist(), basis.nprims.tolist())).encode())
    for array in (basis.centres, basis.exponents, basis.coefficients):
        digest.update(np.ascontiguousarray(array).tobytes())
    molecule = f"{basis.nshell} shells, {basis.nao} AOs, {digest.hexdigest()[:8]}"
    return {"the source of md4": IMPORTED, "the molecule or its basis": molecule}


def checked_tolerance(tolerance):
    """`tolerance` as a float; ArgumentError if it is negative or not finite."""
    return checked_real("direct_scf_tol", tolerance, 0)


def get_jk(
    mol: Molecule | Basis, dm: Densities, hermi: int = 1, with_j: bool = True, with_k: bool = True,
    omega: float | None = None, backend: BackendName = "auto", max_memory: float | None = None, stream: Stream = None,
    direct_scf_tol: float = 1e-13, progress: bool | None = None, devices: Devices = None, comm: Any = None,
) -> JKPair:  # fmt: skip
    """J and K matrices of a molecule, in a single build. For repeated builds use `JK`, which keeps what they share.

    Parameters, results and errors are those of `JK` and `JK.get_jk`.

    Examples
    --------
    >>> import md4, pyscf
    >>> mol = pyscf.M(atom="H 0 0 0; F 0 0 0.917", basis="6-31g")
    >>> mf = mol.RHF()
    >>> dm = mf.get_init_guess()
    >>> vj, vk = md4.get_jk(mol, dm)
    >>> print(abs(vj - mf.get_jk(mol, dm)[0]).max())
    1e-14
    """
    jk = JK(mol, omega, backend, max_memory, stream, direct_scf_tol, progress, devices, comm)
    return jk.get_jk(dm, hermi, with_j, with_k)
