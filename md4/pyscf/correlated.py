"""MO integrals of md4 for PySCF's methods of correlated electrons, after `md4.attach`.

Without a tensor in memory, PySCF's methods make their integrals by functions of its modules, which no object can
override. The first `attach` puts functions of md4 in place of these. They ask who is responsible: the mean-field object
of the method. If it is attached, md4 makes the integrals, else PySCF's own function runs as before.
"""

from functools import cache, wraps
from importlib import import_module
from typing import Any

import numpy as np

from md4.contract.mp2 import OccupiedVirtual, Spin
from md4.errors import DeviceError, UnsupportedError
from md4.pyscf.classes import Restorable, in_front
from md4.pyscf.df import DF
from md4.support.locks import once

# Names of (ia|jb) by the spins of i and j.
NAMES = {(0, 0): "ovov", (0, 1): "ovOV", (1, 1): "OVOV"}


def responsible(method, *orbitals):
    """The engine that makes integrals over real orbitals for a method object; None where PySCF makes them."""
    from pyscf.lib import logger

    builder = getattr(method._scf, "_md4_builder", None)
    if builder is None or not builder.mo_integrals or any(map(np.iscomplexobj, orbitals)):
        return None
    engine = builder.engine(method.mol)
    try:
        engine.backend.algebra()
    except DeviceError as error:
        logger.warn(method, "MO integrals are PySCF's: %s", error)
        return None
    return engine


@once
def install():
    """Puts md4's functions in place of PySCF's, for the rest of the process."""
    for name in ("mp2", "ump2"):
        replace(import_module(f"pyscf.mp.{name}"), "_ao2mo_ovov", occupied_virtual)


def replace(module, name, ours):
    """Has `ours`, with PySCF's function as its first argument, called in its place."""
    theirs = getattr(module, name)

    @wraps(theirs)
    def chosen(*args, **options):
        return ours(theirs, *args, **options)

    setattr(module, name, chosen)


def occupied_virtual(theirs, method, *args, **options):
    """`_ao2mo_ovov` of MP2 and UMP2: writes (ia|jb) to an HDF5 file; returns the dataset of MP2."""
    from pyscf.lib import logger

    restricted = isinstance(method, import_module("pyscf.mp.mp2").RMP2)
    orbitals, feri = (args[:2], args[2]) if restricted else args[:2]
    engine = responsible(method, *orbitals)
    if engine is None:
        return theirs(method, *args, **options)
    clock = logger.process_clock(), logger.perf_counter()
    spins = [Spin(*orbitals[n : n + 2]) for n in range(0, len(orbitals), 2)]
    made, data = OccupiedVirtual(engine, spins), {}
    for t, there in enumerate(spins):
        for s, here in enumerate(spins[: t + 1]):
            (o, v), (other_o, other_v) = here.shape, there.shape
            if o * v * other_o * other_v:
                shape, chunks = (o * v, other_o * other_v), (v, other_v)
                data[s, t] = feri.create_dataset(NAMES[s, t], shape, "f8", chunks=chunks)

    def put(s, t, i, j, block):
        v, other_v = block.shape
        data[s, t][i * v : (i + 1) * v, j * other_v : (j + 1) * other_v] = block

    made.integrals(put)
    logger.timer(method, "(ia|jb) by md4", *clock)
    return data.get((0, 0)) if restricted else None


# method objects -------------------------------------------------------------------------------------------------------


class MadeLater:
    """In front of PySCF's `_ChemistsERIs` of MP2: (ia|jb) are made when somebody asks for them."""

    md4_made_by: Any

    def __getattr__(self, name):
        if name not in NAMES.values():
            raise AttributeError(name)
        made = vars(self.md4_made_by())
        self.__dict__.update({key: made[key] for key in (*NAMES.values(), "feri") if key in made})
        return self.__dict__[name]


@cache
def made_later(module):
    """The class of PySCF's module with `MadeLater` in front."""
    return type("_ChemistsERIs", (MadeLater, import_module(module)._ChemistsERIs), {})


class MD4MP2(Restorable):
    """Mixin in front of PySCF's RMP2 and UMP2: energies are summed where md4 makes the integrals.

    (ia|jb) are stored only if something else asks for them, and amplitudes only with `with_t2`.
    """

    __name_mixin__ = "MD4"

    # Of PySCF's class behind this one.
    _scf: Any
    mol: Any
    mo_coeff: Any
    frozen: Any

    def ao2mo(self, mo_coeff=None):
        """PySCF's ao2mo; without a tensor in memory, the integrals are made when they are asked for."""
        orbitals = self.mo_coeff if mo_coeff is None else mo_coeff
        mf = self._scf
        if mf._eri is not None or getattr(mf, "with_df", None) or responsible(self, *orbitals) is None:
            return super().ao2mo(mo_coeff)
        eris = made_later("pyscf.mp.mp2" if np.ndim(orbitals[0]) == 1 else "pyscf.mp.ump2")()
        for name in NAMES.values():
            eris.__dict__.pop(name, None)
        eris.md4_made_by = lambda: super(MD4MP2, self).ao2mo(mo_coeff)
        eris._common_init_(self, orbitals)
        return eris

    def init_amps(self, mo_energy=None, mo_coeff=None, eris=None, with_t2=True):
        """PySCF's init_amps, with energies by md4."""
        from pyscf import lib
        from pyscf.lib import logger

        eris = self.ao2mo(mo_coeff) if eris is None else eris
        given = mo_energy is not None or mo_coeff is not None
        if not isinstance(eris, MadeLater) or (given and self.frozen is not None):
            return super().init_amps(mo_energy, mo_coeff, eris, with_t2)
        clock = logger.process_clock(), logger.perf_counter()
        energies = eris.mo_energy if mo_energy is None else mo_energy
        restricted = isinstance(eris.mo_coeff, np.ndarray) and eris.mo_coeff.ndim == 2
        one = [(eris.mo_coeff, self.nocc, energies)]
        spins = [
            Spin(coefficients[:, :occupied], coefficients[:, occupied:], e)
            for coefficients, occupied, e in (one if restricted else zip(eris.mo_coeff, self.nocc, energies))
        ]
        same, opposite, t2 = OccupiedVirtual(responsible(self), spins).energies(with_t2)
        logger.timer(self, "MP2 by md4", *clock)
        energy = lib.tag_array(same + opposite, e_corr_ss=same, e_corr_os=opposite)
        if not with_t2:
            return energy, None
        if restricted:
            return energy, t2[0, 0]
        for spins in ((0, 0), (1, 1)):
            t2[spins] = t2[spins] - t2[spins].transpose(0, 1, 3, 2)
        return energy, (t2[0, 0], t2[0, 1], t2[1, 1])


def with_mean_field(method, change):
    """A method object, changed in place, with a copy of its mean-field object that `change` was called with."""
    method._scf = change(method._scf.copy())
    return method


def attached_method(method, change):
    """A method object, changed in place, whose mean-field object `change` has attached.

    Raises
    ------
    UnsupportedError
        It has density fitting of its own that is not md4's.
    """
    fit = getattr(method, "with_df", None)
    if fit and not isinstance(fit, DF):
        raise UnsupportedError(
            f"{type(method).__name__} has density fitting of its own; attach the mean-field object before you make the "
            "method, or set with_df to an md4.DF."
        )
    with_mean_field(method, change)
    mp2, ump2 = (import_module(f"pyscf.mp.{name}") for name in ("mp2", "ump2"))
    if type(method) in (mp2.RMP2, ump2.UMP2):
        in_front(method, MD4MP2)
    return method


def detached_method(method, change):
    """Undoes `attached_method`, with a `change` that detaches."""
    from pyscf import lib

    if isinstance(method, MD4MP2):
        method.__class__ = lib.misc.drop_class(method.__class__, MD4MP2)
    return with_mean_field(method, change)
