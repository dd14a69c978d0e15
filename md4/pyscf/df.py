"""`md4.DF`: density fitting by md4 behind the interface of PySCF's `df.DF`.

PySCF's mean-field objects, MP2, RPA, CASSCF and CCSD ask a `DF` for J and K, for rows of the three-centre tensor, or
for integrals over orbitals made of these rows. An `md4.DF` is a `pyscf.df.DF`, whose class is put together when the
first one is made, since PySCF is not imported before.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np

from md4.contract.density_fitting import CUTOFF
from md4.contract.fitting_stores import STORES
from md4.contract.ranks import ranks_of
from md4.engine import BACKENDS
from md4.errors import MD4Error, UnsupportedError
from md4.gpu.devices import chosen
from md4.method.operators import checked_omega
from md4.pyscf import check_density, check_pyscf, effective_omega
from md4.pyscf.ao2mo import opened
from md4.pyscf.orbitals import OrbitalRows, install
from md4.pyscf.tensors import Rows, Tensors, tagged_orbitals
from md4.support.arguments import (
    checked_array,
    checked_choice,
    checked_flag,
    checked_integer,
    checked_memory,
    checked_mol,
    checked_real,
    checked_stream,
    shown,
)
from md4.support.display import backend_text
from md4.support.memory import host_memory
from md4.support.types import BackendName, Devices, JKPair, Molecule, Store, Stream

# Of the host memory that is free: what rows of a tensor may take that is made anew for each block of them.
ROWS_SHARE = 0.25


@cache
def combined():
    """The class of the objects that `DF` makes: that class and PySCF's."""
    check_pyscf("md4.DF")
    from pyscf import df

    install()
    cls = type("DF", (DF, df.DF), {"__doc__": DF.__doc__, "__module__": DF.__module__})
    return cls


def restored():
    """An empty object, for pickle to fill."""
    return object.__new__(combined())


class DF(OrbitalRows):
    """Density fitting: J, K and the three-centre tensor of a molecule, as `pyscf.df.DF`.

    Nothing is computed before it is needed. What PySCF does with a `pyscf.df.DF` it does with this object, too.

    Parameters
    ----------
    mol : pyscf.gto.Mole
    auxbasis : str or dict, optional
        Auxiliary basis as for PySCF, which chooses one by default.
    backend : {'auto', 'cuda', 'cpu'}
        A GPU needs CuPy.
    max_memory : float, optional
        Hard cap in MB on what md4 allocates. The default is what is free. The attribute of the same name is PySCF's.
    stream : optional
        CUDA stream to work on; see `md4.Engine`.
    devices : 'all', int or list of int, optional
        GPUs that share the tensor and each build; see `md4.JK`. `max_memory` is that of each device.
    comm : mpi4py.MPI.Intracomm, optional
        Communicator whose ranks share the tensor and each build. All ranks make this object, call `build` and `get_jk`
        with the same arguments, the first time also what else needs the tensor, and get the same J and K. Each rank may
        then ask for rows of the tensor by itself, which makes all integrals. See the page "Several GPUs and nodes".
    store : {'auto', 'device', 'host', 'direct'}
        Where the tensor is: on the device (with backend 'cpu' in host memory), in pinned host memory, or nowhere, so
        that the integrals are made anew in each build. 'auto' takes the first one that fits.
    cutoff : float
        Hartree. A pair of shells is left out if its Schwarz bound with every auxiliary function is below it.

    Attributes
    ----------
    auxmol : pyscf.gto.Mole
        The auxiliary basis, made from `mol` and `auxbasis` by `build`.

    Raises
    ------
    ArgumentError, UnsupportedError
        Not a molecule, or an option that cannot be used.
    BasisError
        From the first build: an element has no auxiliary functions, or all of them are linearly dependent.
    DeviceError
        From the first build: no usable GPU, or no CuPy.
    RankError
        Another rank failed. Its message is that rank's.
    MemoryLimitError
        From a build: the tensor or the least workspace does not fit.

    Examples
    --------
    >>> import md4, pyscf
    >>> mol = pyscf.M(atom="H 0 0 0; F 0 0 0.917", basis="cc-pvdz")
    >>> fit = md4.DF(mol, auxbasis="cc-pvdz-jkfit")
    >>> fit.get_naoaux()
    93
    >>> vj, vk = fit.get_jk(mol.RHF().get_init_guess())
    >>> vj.shape
    (19, 19)
    """

    _md4: Tensors
    # Of PySCF's class behind this one.
    mol: Any
    auxmol: Any
    auxbasis: Any
    blockdim: int
    check_sanity: Any
    copy: Any
    _cderi_to_save: Any
    _dataname: Any

    def __new__(cls, *args: Any, **options: Any) -> "DF":
        return object.__new__(combined() if cls is DF else cls)

    def __init__(
        self, mol: Molecule, auxbasis: Any = None, backend: BackendName = "auto", max_memory: float | None = None,
        stream: Stream = None, devices: Devices = None, store: Store = "auto", cutoff: float = CUTOFF, comm: Any = None,
    ) -> None:  # fmt: skip
        def checked():
            checked_choice("backend", backend, BACKENDS)
            checked_choice("store", store, STORES)
            if devices is not None:
                chosen(devices, backend)
            checked_mol(mol)
            return {
                "max_memory": checked_memory(max_memory), "stream": checked_stream(stream),
                "cutoff": checked_real("cutoff", cutoff, 0),
            }  # fmt: skip

        options = ranks_of(comm).together(checked, "md4.DF")
        self._md4 = Tensors(backend=backend, devices=devices, comm=comm, store=store, **options)
        super().__init__(mol, auxbasis)  # type: ignore[call-arg]

    # what is made

    def _md4_fitting(self, omega=None):
        """The `DensityFitting` of `mol` for an omega of PySCF, which all ranks make together if there is none."""
        if self._md4_has(omega):
            return self._md4_made(omega)
        return self._md4.ranks.together(lambda: self._md4_made(omega), "tensor of an md4.DF")

    def _md4_has(self, omega=None):
        """Whether the tensor for an omega is there; a molecule that cannot be used has none, and making it says why."""
        with suppress(MD4Error):
            mol = checked_mol(self.mol)
            return self._md4.has(mol, effective_omega(mol, omega))
        return False

    def _md4_made(self, omega=None):
        """`_md4_fitting` for this rank; sets `auxmol`."""
        mol, tensors, own = checked_mol(self.mol), self._md4, omega is None
        omega = effective_omega(mol, omega)
        known = tensors.has(mol, omega)
        self.auxmol = tensors.of(mol, self.auxbasis)
        fitting = tensors.fitting(mol, self.auxbasis, omega)
        if not known:
            self._md4_tell(fitting)
            if own:
                self._md4_save()
        return fitting

    def _md4_tell(self, fitting):
        """Tells PySCF's log, from verbose = 4 on, how a new tensor is kept; always, if digits are lost."""
        from pyscf.lib import logger

        logger.info(
            self, "density fitting by md4: backend %s, %d auxiliary functions, store %s, metric by %s",
            backend_text(fitting.engine.backend), fitting.three.naux, fitting.store, fitting.metric.how,
        )  # fmt: skip
        if fitting.metric.doubt is not None:
            logger.warn(self, "%s", fitting.metric.doubt.text(self.auxmol.ao_labels()))

    @property
    def store(self) -> str:
        """Where the tensor is: 'device', 'host' or 'direct'; what was asked for as long as there is none."""
        made = next(iter(self._md4.made.values()), None)
        return self._md4.options["store"] if made is None else made.store

    @property
    def _cderi(self):
        """The tensor that was given to this object, or md4's as an array of rows."""
        given = self.__dict__.get("_cderi")
        return Rows(self._md4_fitting()) if given is None else given

    @_cderi.setter
    def _cderi(self, tensor):
        self.__dict__["_cderi"] = tensor

    @property
    def _md4_pyscf(self):
        """PySCF's methods if this object was given a tensor, which they read; else None."""
        return super() if self.__dict__.get("_cderi") is not None else None

    # PySCF's interface

    def build(self) -> "DF":
        """Makes the tensor, and writes it to the file `_cderi_to_save` if that is set, of several ranks rank 0.

        A tensor that is made without this call is written when it is made, too.
        """

        def made():
            self.check_sanity()
            self.dump_flags()
            if self._md4_pyscf is None:
                known = self._md4_has()
                self._md4_made()
                if known:
                    self._md4_save()

        if self._md4_pyscf is not None:
            made()
        else:
            self._md4.ranks.together(made, "tensor of an md4.DF")
        return self

    def _md4_save(self):
        """Writes the tensor to the file that is wanted, if there is one, on rank 0."""
        if isinstance(self._cderi_to_save, str) and self._md4.ranks.rank == 0:
            self._md4_write(self._cderi_to_save)

    def _md4_write(self, name):
        """Writes the tensor to an HDF5 file as PySCF reads it; what else is in the file stays."""
        with opened(name, self._dataname) as file:
            data = file.create_dataset(self._dataname, Rows(self._md4_fitting()).shape, "f8")
            first = 0
            for rows in self.loop():
                data[first : first + len(rows)] = rows
                first += len(rows)

    def reset(self, mol: Molecule | None = None) -> "DF":
        """PySCF's reset; tensors are made again when they are needed."""
        self._md4 = self._md4.fresh()
        super().reset(mol)  # type: ignore[misc]
        return self

    def get_naoaux(self) -> int:
        """Number of rows of the tensor."""
        return self._md4_fitting().size if self._md4_pyscf is None else self._md4_pyscf.get_naoaux()

    def loop(self, blksize: int | None = None) -> Any:
        """Yields rows of the tensor, shapes (n, nao (nao + 1) / 2), `blksize` at a time or fewer."""
        if self._md4_pyscf is not None:
            yield from self._md4_pyscf.loop(blksize)
            return
        fitting = self._md4_fitting()  # first, since other ranks may be about to make it, too
        many = step = checked_integer("blksize", self.blockdim if blksize is None else blksize, 1)
        if fitting.rows_are_made:
            row = 4 * fitting.nao * (fitting.nao + 1)
            room = min(host_memory(), fitting.algebra.host_left())
            many = max(step, int(ROWS_SHARE * room) // row // step * step)
        for first in range(0, fitting.size, many):
            rows = fitting.rows(first, min(first + many, fitting.size))
            for start in range(0, len(rows), step):
                yield rows[start : start + step]

    def get_jk(
        self, dm: Any, hermi: int = 1, with_j: bool = True, with_k: bool = True, direct_scf_tol: float = 1e-13,
        omega: float | None = None,
    ) -> JKPair:  # fmt: skip
        """J and K of density matrices of any leading shape.

        Parameters
        ----------
        dm : array_like, shape (..., nao, nao)
            Real or complex. Orbitals that PySCF has tagged it with are used for K if they make up the density.
        hermi : {0, 1, 2}
            As for PySCF; the matrices are looked at, so it does not matter.
        with_j, with_k : bool
        direct_scf_tol : float
            Of no effect, as with PySCF.
        omega : float, optional
            Of the operator; by default that of `mol`.

        Returns
        -------
        vj, vk : ndarray of dm's shape, in Hartree; None if not requested
        """
        given = self._md4_pyscf
        if given is not None:
            name = "DF.get_jk of a tensor that was given"
            return self._md4.ranks.together(
                lambda: given.get_jk(dm, hermi, with_j, with_k, direct_scf_tol, omega), name
            )
        return self._md4.ranks.together(lambda: self._md4_get_jk(dm, hermi, with_j, with_k, omega), "DF.get_jk")

    def _md4_get_jk(self, dm, hermi, with_j, with_k, omega):
        matrices = checked_array("the density matrices", dm)
        with_j, with_k = checked_flag("with_j", with_j), checked_flag("with_k", with_k)
        fitting = self._md4_fitting(omega)
        check_density(matrices, fitting.nao)
        stack = np.asarray(matrices).reshape(-1, fitting.nao, fitting.nao)
        found = fitting.get_jk(stack, hermi, with_j, with_k, tagged_orbitals(dm, len(stack)))
        vj, vk = (None if v is None else v.reshape(matrices.shape) for v in found)
        return vj, vk

    def _md4_auxmol(self):
        """The auxiliary molecule of `mol`. If this rank cannot make it, the others, which make theirs, hear of it."""
        tensors = self._md4

        def made():
            return tensors.of(checked_mol(self.mol), self.auxbasis)

        return made() if tensors.made else tensors.ranks.together(made, "auxiliary basis of an md4.DF")

    @contextmanager
    def range_coulomb(self, omega: float | None) -> Iterator[Any]:
        """Within it, `mol` and the object that it yields have the operator of `omega`."""
        if self._md4_pyscf is not None:
            with self._md4_pyscf.range_coulomb(omega) as other:
                yield other
            return
        mol, auxmol = self.mol, self._md4_auxmol()
        before, omega, other = (mol.omega, auxmol.omega), checked_omega(omega), self.copy()
        other._dataname = f"{self._dataname}-lr/{omega:.6f}"  # in a file that is wanted, as PySCF's
        mol.omega = auxmol.omega = omega
        try:
            yield other
        finally:
            mol.omega, auxmol.omega = before

    def dump_flags(self, verbose: Any = None) -> "DF":
        """PySCF's, and md4's options. It makes nothing."""
        from pyscf.lib import logger

        told = self.copy()
        if self._md4_pyscf is None:
            told._cderi = ()  # PySCF's asks whether the tensor is the name of a file, for which md4's would be made
        super(DF, told).dump_flags(verbose)  # type: ignore[misc]
        logger.new_logger(self, verbose).info("density fitting by md4: %r", self._md4)
        return self

    def __repr__(self):
        return f"<md4.DF: {self.mol.natm} atoms, {self.mol.nao} AOs, auxbasis {shown(self.auxbasis)}, {self._md4!r}>"

    def __reduce_ex__(self, protocol):
        """For pickle, which cannot find the class that `combined` makes."""
        return restored, (), self.__getstate__()


# mean-field objects ---------------------------------------------------------------------------------------------------


def check_replaceable(with_df):
    """UnsupportedError for another kind of density fitting, or one with a tensor of its own."""
    from pyscf import df

    if not isinstance(with_df, DF) and type(with_df) is not df.DF:
        raise UnsupportedError(
            f"with_df is of the class {type(with_df).__name__}, and md4 replaces pyscf.df.DF only; use undo_df() first."
        )
    if not isinstance(with_df, DF) and with_df._cderi is not None and with_df.auxmol is None:
        raise UnsupportedError(
            "with_df holds a tensor of its own, which md4 would ignore; set with_df._cderi = None if it is not meant."
        )


def by_md4(with_df, **options):
    """A `DF` in place of PySCF's, with the same molecule, auxiliary basis and output; also in place of such a `DF`.

    That stays if its options are the same. The caller's own stays in any case.
    """
    if isinstance(with_df, DF):
        own = with_df._md4
        given = with_df.__dict__.get("_cderi") is not None  # a tensor, which md4 would ignore
        if given or not own.replaces or own.options == {**own.options, **options}:
            return with_df
    made = restored()
    made._md4 = Tensors(True, **{"store": "auto", "cutoff": CUTOFF, **options})
    kept = {name: value for name, value in vars(with_df).items() if name not in ("_cderi", "auxmol", "_md4")}
    # PySCF's AGF2 makes a DF of its own class of it, whose _cderi is what `__dict__` has
    made.__dict__.update(kept, auxmol=None, _cderi=None, _vjopt=None, _rsh_df={})
    return made


def by_pyscf(with_df):
    """Inverse of `by_md4`."""
    from pyscf import df

    if not isinstance(with_df, DF):
        return with_df
    made = object.__new__(df.DF)
    kept = {name: value for name, value in vars(with_df).items() if name != "_md4"}
    made.__dict__.update({"_cderi": None, **kept})
    return made
