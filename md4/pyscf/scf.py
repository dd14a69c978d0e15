"""PySCF's mean-field objects with J and K by md4, and methods that start from them: `attach` and `detach`.

`attach` puts the class `MD4SCF` in front of the class of an object, as PySCF's density_fit() and newton() do. Then
get_jk is that of md4 (`md4.pyscf.builder`), and everything else is that of PySCF. With density fitting, whose class
stays in front, J and K are those of an `md4.DF`, which replaces PySCF's. get_j, get_k, get_veff, the response functions
of newton(), stability() and TDDFT, and the exchange of range-separated functionals all call get_jk. Gradients have
classes of their own (`md4.pyscf.gradients`).

With a communicator of MPI, every rank runs the same calculation. Its ranks build J and K together, and what decides how
PySCF goes on is that of rank 0 on all of them: the guess, orbitals, energies and gradients. So they cannot drift apart.
"""

from collections.abc import Callable
from importlib import import_module, util
from typing import Any, TypeVar

from md4.engine import BACKENDS
from md4.errors import ArgumentError, UnsupportedError
from md4.gpu.devices import chosen
from md4.method.operators import check_order, checked_omega
from md4.pyscf import check_density, check_pyscf, effective_omega, timed
from md4.pyscf.builder import Builder, build, by_pyscf_itself, check_no_integrals, made_for
from md4.pyscf.classes import Restorable, in_front, with_mixin
from md4.pyscf.correlated import attached_method, detached_method, enter
from md4.pyscf.df import DF, by_md4, by_pyscf, check_replaceable
from md4.pyscf.fitted_correlation import attach_correlation, detach_correlation, is_fitted_correlation
from md4.pyscf.gradients import MD4Excited, MD4Forces
from md4.support.arguments import (
    checked_array,
    checked_choice,
    checked_flag,
    checked_memory,
    checked_mol,
    checked_stream,
)
from md4.support.display import backend_text
from md4.support.types import BackendName, Devices, MeanField, Stream

# A mean-field class of PySCF, or a method that starts from one: an object keeps its class when it is attached.
Solver = TypeVar("Solver", bound=MeanField)
# The column of mol._bas that holds the angular momenta.
ANG_OF = 1
# What decides which builds PySCF asks for, and how it continues.
SETTINGS = (
    "conv_tol", "conv_tol_grad", "conv_check", "max_cycle", "direct_scf", "direct_scf_tol", "diis_space", "diis_damp",
    "level_shift", "init_guess", "xc", "omega",
)  # fmt: skip


def of_first(name):
    """PySCF's attribute, the name of a file, on rank 0. On the others it is None: they would write to the same file."""

    def value(self):
        return self.__dict__.get(name) if self._md4_builder.ranks.rank == 0 else None

    return property(value, lambda self, given: self.__dict__.update({name: given}))


class MD4SCF(Restorable):
    """Mixin in front of a PySCF SCF class; see `attach`."""

    __name_mixin__ = "MD4"

    # Of PySCF's class behind this one.
    _scf: Any
    copy: Callable[[], Any]

    def get_jk(self, mol=None, dm=None, hermi=None, with_j=True, with_k=True, omega=None):
        """J and K by md4. Arguments and results are those of the class behind this one."""
        ranks = self._md4_builder.ranks
        with timed(self, "vj and vk"):
            return ranks.together(lambda: self._md4_get_jk(mol, dm, hermi, with_j, with_k, omega), "mf.get_jk")

    def _md4_get_jk(self, mol, dm, hermi, with_j, with_k, omega):
        from pyscf.scf import ghf

        mol, omega = checked_mol(self.mol if mol is None else mol), None if omega is None else checked_omega(omega)
        check_no_integrals(self, omega)
        dm = checked_array("the density matrices", self.make_rdm1() if dm is None else dm)
        jk = self._md4_builder.jk(mol, self._tell_backend)
        generalised = isinstance(self, ghf.GHF)
        check_density(dm, jk.basis.nao * (2 if generalised else 1))
        operator = effective_omega(mol, omega)
        if not generalised:
            return build(self, mol, jk, dm, 1 if hermi is None else hermi, with_j, with_k, operator)

        def blocks(_mol, dms, _hermi, with_j, with_k, _omega):
            # For J alone PySCF calls the blocks symmetric, whether they are or not.
            return build(self, mol, jk, dms, 0, with_j, with_k, operator)

        return ghf.get_jk(mol, dm, 0 if hermi is None else hermi, with_j, with_k, blocks, omega)

    def _tell_backend(self, jk):
        """Tells PySCF's log, from verbose = 4 on, by which backend a new JK computes."""
        from pyscf.lib import logger

        logger.info(self, "J and K by md4: backend %s", backend_text(jk.engine.backend))
        if self.mol.incore_anyway and jk.engine.backend.name != "cpu":
            logger.warn(
                self, "mol.incore_anyway asks for the AO tensor, which a GPU does not keep, so that PySCF's correlated "
                "methods fail; set it to False, and they get their integrals from md4.",
            )  # fmt: skip

    @property
    def _md4_builder(self):
        """The builder. newton() wraps an object that does some of the builds, and both use the same pairs."""
        inner = self.__dict__.get("_scf")
        return inner._md4_builder if isinstance(inner, MD4SCF) else self._md4

    @property
    def md4_jk(self):
        """The `md4.JK` that builds J and K of `mol` directly; its `stats` are those of the last such build."""
        return self._md4_builder.jk(self.mol)

    # gradients

    def nuc_grad_method(self):
        """PySCF's gradients with two-electron forces by md4; see `md4.pyscf.gradients`."""
        return in_front(super().nuc_grad_method(), MD4Forces)

    def Gradients(self, *args, **options):
        """As `nuc_grad_method`."""
        import_module("pyscf.grad")  # which gives PySCF's classes their `Gradients`
        return in_front(super().Gradients(*args, **options), MD4Forces)

    def TDA(self, *args, **options):
        return in_front(super().TDA(*args, **options), MD4Excited)

    def TDHF(self, *args, **options):
        return in_front(super().TDHF(*args, **options), MD4Excited)

    def TDDFT(self, *args, **options):
        return in_front(super().TDDFT(*args, **options), MD4Excited)

    # ranks of a communicator

    def scf(self, *args, **options):
        """PySCF's scf, which kernel() calls. If it fails on one rank, it fails on all."""
        return self._md4_builder.ranks.together(lambda: super(MD4SCF, self).scf(*args, **options), "mf.kernel")

    def build(self, *args, **options):
        """PySCF's build; compares the settings of the ranks."""
        result = super().build(*args, **options)
        if self._md4_builder.ranks.size > 1 and not self._md4_builder.solo:
            self._md4_builder.ranks.same({"the object": type(self).__name__, **settings(self)})
        return result

    def get_init_guess(self, *args, **options):
        return self._md4_builder.first(lambda: super(MD4SCF, self).get_init_guess(*args, **options))

    def init_guess_by_chkfile(self, *args, **options):
        return self._md4_builder.first(lambda: super(MD4SCF, self).init_guess_by_chkfile(*args, **options))

    def eig(self, *args, **options):
        return self._md4_builder.first(lambda: super(MD4SCF, self).eig(*args, **options))

    def canonicalize(self, *args, **options):
        return self._md4_builder.first(lambda: super(MD4SCF, self).canonicalize(*args, **options))

    def energy_elec(self, *args, **options):
        return self._md4_builder.same_on_all(super().energy_elec(*args, **options))

    def energy_tot(self, *args, **options):
        return self._md4_builder.same_on_all(super().energy_tot(*args, **options))

    def get_grad(self, *args, **options):
        return self._md4_builder.same_on_all(super().get_grad(*args, **options))

    chkfile, diis_file = of_first("chkfile"), of_first("diis_file")

    def dump_chk(self, *args, **options):
        """PySCF's dump_chk on rank 0."""
        return super().dump_chk(*args, **options) if self._md4_builder.ranks.rank == 0 else self

    def density_fit(self, *args, **options):
        """PySCF's density_fit. An `md4.DF` makes J and K unless the caller gives an object of his own for `with_df`."""
        from pyscf import df

        fitted = super().density_fit(*args, **options)
        given = options.get("with_df", args[1] if len(args) > 1 else None)
        if given is None and type(fitted.with_df) is df.DF:
            fitted.with_df = by_md4(fitted.with_df, **self._md4_builder.options)
        return with_fitted_forces(fitted)

    def reset(self, mol=None):
        """PySCF's reset; pairs and bounds are made again at the next build."""
        self._md4 = self._md4.fresh()
        result = super().reset(mol)
        enter(self.mol, self._md4_builder)
        return result

    def _transfer_attrs_(self, dst):
        """Called by to_ks() and to_hf(): the object of the other class gets its J and K from md4, too."""
        return super()._transfer_attrs_(attached(dst, self._md4))

    def dump_flags(self, verbose=None):
        from pyscf.lib import logger

        super().dump_flags(verbose)
        logger.new_logger(self, verbose).info("J and K by md4: %r", self._md4)
        return self

    def __repr__(self):
        size = f"{self.mol.natm} atoms, {self.mol.nao} AOs"
        first = "by md4" if by_md4_alone(self) else "not by md4 alone"
        return f"<{type(self).__name__}: {size}, J and K {first}, {self._md4!r}>"

    def __setstate__(self, state):
        super().__setstate__(state)
        enter(self.mol, self._md4)
        self._opt = {None: None}  # PySCF sets None, which its own get_jk cannot use after `detach`


def is_fitted(mf):
    """Whether PySCF's density fitting makes J, or J and K, of an object."""
    from pyscf.df.df_jk import _DFHF

    return isinstance(mf, _DFHF) and bool(mf.with_df)


def by_md4_alone(mf):
    """Whether both J and K are those of md4."""
    from pyscf.df.df_jk import _DFHF

    return type(mf).get_jk is (_DFHF.get_jk if is_fitted(mf) else MD4SCF.get_jk) and (
        not is_fitted(mf) or isinstance(mf.with_df, DF)
    )


def settings(mf):
    """The settings of a mean-field object that all ranks must share."""
    found = {name: getattr(mf, name, None) for name in SETTINGS}
    if "_scf" in vars(mf):  # newton() diagonalises once more if it tells that much
        found["verbose of 5 or more"] = mf.verbose >= 5
    return found


def check_supported(mf):
    """ArgumentError or UnsupportedError if md4's J and K would not be those that `mf` needs."""
    check_pyscf("md4.attach")
    from pyscf import gto
    from pyscf.df.df_jk import _DFHF
    from pyscf.scf import ghf, hf, uhf

    name = type(mf).__name__
    if not isinstance(mf, hf.SCF):
        raise ArgumentError(f"attach takes a mean-field object of PySCF such as scf.RHF(mol), not {name}.")
    if not isinstance(mf.mol, gto.Mole):
        raise UnsupportedError(f"{name} is periodic; md4 has the integrals of molecules only.")
    if not isinstance(mf, (hf.RHF, uhf.UHF, ghf.GHF)):
        raise UnsupportedError(
            f"{full_name(mf)} has no J and K over real functions; attach takes RHF, UHF, ROHF, GHF, RKS, UKS, ROKS and "
            "GKS of pyscf.scf and pyscf.dft, with scalar relativity as mol.RHF().x2c() or mf.x2c1e(), and with "
            "spin-orbit coupling as mol.GHF().x2c1e()."
        )
    owner = next(cls for cls in type(mf).__mro__ if "get_jk" in vars(cls) and cls is not _DFHF)
    if "get_jk" in vars(mf) or owner not in (hf.SCF, hf.RHF, uhf.UHF, ghf.GHF, MD4SCF):
        whose = "the object itself" if "get_jk" in vars(mf) else owner.__name__
        raise UnsupportedError(f"J and K of {name} are those of {whose}, which md4 would replace; undo that first.")
    if is_fitted(mf):
        check_replaceable(mf.with_df)
    if mf._eri is not None and made_for(mf._eri) is None and (mf.mol.incore_anyway or not by_pyscf_itself(mf)):
        raise UnsupportedError(
            f"{name} has integrals of its own in mf._eri, not those of its molecule, and md4 would ignore them; set "
            "mf._eri = None and mol.incore_anyway = False if they are not meant."
        )


def full_name(mf):
    """The class of a relativistic object with its module, as two-component ones are called UHF, too."""
    cls, modules = type(mf), [base.__module__ for base in type(mf).__mro__]
    kinds = {"pyscf.x2c.x2c": "two-component X2C ", "pyscf.scf.dhf": "four-component "}
    kind = next((kind for module, kind in kinds.items() if module in modules), "")
    return f"the {kind}object {cls.__module__}.{cls.__name__}"


def with_fitted_forces(mf):
    """A density-fitted object, changed in place so that md4 makes the forces of its gradients."""
    from pyscf.df.df_jk import _DFHF
    from pyscf.lib.misc import replace_class

    from md4.pyscf.fitted import MD4DFHF

    if isinstance(mf, _DFHF) and not isinstance(mf, MD4DFHF):
        mf.__class__ = replace_class(type(mf), _DFHF, MD4DFHF)
    return mf


def attached(mf, builder):
    """`mf`, changed in place so that its J and K come from `builder`."""
    inner = mf.__dict__.get("_scf")
    if inner is not None:  # of newton(); another object may use it as well
        check_supported(inner)
        mf._scf = attached(inner.copy(), builder)
    if is_fitted(mf):
        shared = inner is not None and is_fitted(inner) and inner.with_df is mf.with_df
        mf.with_df = mf._scf.with_df if shared else by_md4(mf.with_df, **builder.options)
    mf._md4 = builder
    enter(mf.mol, builder)
    mf._eri = None  # made by PySCF
    if not isinstance(mf, MD4SCF):
        mf.__class__ = with_mixin(type(mf), MD4SCF)
    return with_fitted_forces(mf)


def attach(
    mf: Solver, backend: BackendName = "auto", max_memory: float | None = None, stream: Stream = None,
    devices: Devices = None, comm: Any = None, mo_integrals: bool = True,
) -> Solver:  # fmt: skip
    """Makes md4 build J and K of a mean-field object of PySCF, and the MO integrals of methods that start from it.

    On a CPU the AO tensor is kept in `mf._eri` where PySCF would keep its own, and J and K are made of it; elsewhere
    they are direct. Before the first build nothing is computed and no GPU is looked for. Copies, scanners, newton(),
    conversions such as to_uhf() and to_ks(), pickles and reset() keep md4. With density_fit(), before or after, J and K
    are those of an `md4.DF` until undo_df(); with ``only_dfj=True`` K is exact. An object that is given for ``with_df``
    is used as it is. The gradients of the object have two-electron forces by md4.

    Where there is no tensor in `mf._eri`, PySCF's correlated methods get their integrals over real orbitals from md4,
    which puts functions of its own in place of PySCF's for that. While no object of a molecule is attached, these call
    PySCF's for it. See the page "Correlated methods".

    Parameters
    ----------
    mf : pyscf.scf.hf.SCF, or a method such as mp.MP2
        RHF, UHF, ROHF, GHF, RKS, UKS, ROKS or GKS of a molecule, symmetry-adapted or not. It is changed in place. Its
        direct_scf and direct_scf_tol have the same meaning as without md4, but direct_scf_tol is used in all direct
        builds. A method gets an attached copy of its mean-field object, or keeps one that is attached already. MP2 and
        UMP2 then also sum their energy where the integrals are, and store integrals and amplitudes only on request
        (``with_t2``). The fitting of DFMP2, DFUMP2 and RPA objects becomes an `md4.DF`, which makes energies of MP2.
    backend : {'auto', 'cuda', 'cpu'}
    max_memory : float, optional
        Hard cap in MB on what md4 allocates. The default is what is free; `mf.max_memory` has no effect on it.
    stream : optional
        CUDA stream to work on; see `md4.Engine`.
    devices : 'all', int or list of int, optional
        GPUs that share each build, forces and MO integrals; see `md4.JK`.
    comm : mpi4py.MPI.Intracomm, optional
        Communicator whose ranks share each build; see `md4.JK`. Every rank runs the same script. Guess, orbitals,
        energies and gradients are those of rank 0, which alone writes `mf.chkfile`; on the other ranks it is None.
        Pickles and deep copies have no communicator.
    mo_integrals : bool
        With False, MO integrals are left to PySCF.

    Returns
    -------
    mf
        The same object.

    Raises
    ------
    ArgumentError
        `mf` is not a mean-field object, or an option cannot be used, or ranks do not do the same.
    RankError
        Another rank failed. Its message is that rank's.
    UnsupportedError
        The object is periodic, a relativistic four- or two-component object, has integrals, fitted integrals or a
        get_jk of its own, or has shells with l > 8. Integrals that are put into ``mf._eri`` later are refused at the
        next build.

    Examples
    --------
    >>> import md4, pyscf
    >>> mol = pyscf.M(atom="H 0 0 0; F 0 0 0.917", basis="6-31g")
    >>> mf = md4.attach(mol.RHF())
    >>> energy = mf.kernel()
    converged SCF energy = -99.98...
    >>> mf.md4_jk.stats.skipped
    0
    """
    options = {"backend": backend, "max_memory": max_memory, "stream": stream, "devices": devices, "comm": comm}
    if is_fitted_correlation(mf):
        return attach_correlation(mf, mo_integrals, **options)
    if start_of(mf) is not None:

        def attach_it(inner):
            return inner if isinstance(inner, MD4SCF) else attach(inner, mo_integrals=mo_integrals, **options)

        return attached_method(mf, attach_it)
    builder = Builder(mo_integrals, **options)

    def check():
        checked_choice("backend", backend, BACKENDS)
        checked_memory(max_memory)
        checked_stream(stream)
        checked_flag("mo_integrals", mo_integrals)
        if backend == "cpu":
            chosen(devices, backend)
        check_supported(mf)
        check_order(4 * int(mf.mol._bas[:, ANG_OF].max(initial=0)) if len(mf.mol._bas) else 0)

    builder.ranks.together(check, "md4.attach")
    builder.ranks.same({"the object": type(mf).__name__})
    return attached(mf, builder)


def start_of(method: Any) -> Any:
    """The mean-field object of PySCF from which a method such as MP2 starts; None of anything else."""
    if util.find_spec("pyscf") is None:
        return None
    from pyscf.scf import hf

    found = getattr(method, "_scf", None)
    return found if isinstance(found, hf.SCF) and not isinstance(method, hf.SCF) else None


def detach(mf: Solver) -> Solver:
    """Undoes `attach` in place and returns `mf`, with PySCF's own J and K; ArgumentError if `mf` is not attached.

    A method such as MP2 gets a copy of its mean-field object.

    Examples
    --------
    >>> import md4, pyscf
    >>> mf = md4.attach(pyscf.M(atom="He 0 0 0", basis="6-31g").RHF())
    >>> mf = md4.detach(mf)
    >>> type(mf).__name__
    'RHF'
    """
    if is_fitted_correlation(mf):
        return detach_correlation(mf)
    if isinstance(start_of(mf), MD4SCF):
        return detached_method(mf, detach)
    if not isinstance(mf, MD4SCF):
        raise ArgumentError(f"{type(mf).__name__} is not attached to md4; nothing to detach.")
    from pyscf import lib

    inner = mf.__dict__.get("_scf")
    if isinstance(inner, MD4SCF):
        mf._scf = detach(inner.copy())
    if is_fitted(mf):
        mf.with_df = by_pyscf(mf.with_df)
    if made_for(mf._eri) is not None:
        mf._eri = None
    mf.__class__ = lib.misc.drop_class(mf.__class__, MD4SCF)
    if is_fitted(mf):
        from pyscf.df.df_jk import _DFHF

        from md4.pyscf.fitted import MD4DFHF

        mf.__class__ = lib.misc.replace_class(mf.__class__, MD4DFHF, _DFHF)
    del mf._md4
    return mf
