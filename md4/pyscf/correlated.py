"""MO integrals of md4 for PySCF's methods of correlated electrons, after `md4.attach`.

Without a tensor in memory, PySCF's methods make their integrals by functions of its modules, which no object can
override. The first `attach` puts functions of md4 in place of these. They ask who is responsible: the mean-field object
of the method where they are given the method, else the `Builder` that was entered for the molecule. If there is one,
md4 makes the integrals, else PySCF's own function runs as before.
"""

import inspect
import weakref
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from md4.contract.amplitudes import DirectContraction
from md4.contract.mp2 import OccupiedVirtual, Spin
from md4.contract.row_team import RowTeam
from md4.errors import DeviceError, MemoryLimitError, UnsupportedError
from md4.pyscf import ao2mo, timed
from md4.pyscf.classes import Restorable, in_front, replace
from md4.pyscf.df import DF
from md4.support.locks import Lock, once

# Names of (ia|jb) by the spins of i and j.
NAMES = {(0, 0): "ovov", (0, 1): "ovOV", (1, 1): "OVOV"}


# The builders of the attached objects of a molecule, as long as objects have them; those entered last at the end.
builders: weakref.WeakKeyDictionary[Any, list] = weakref.WeakKeyDictionary()
entering = Lock()


def enter(mol, builder):
    """MO integrals of `mol` are made with the options of `builder` from now on, as long as an object has it."""
    install()
    if builder.mo_integrals:
        with entering:
            others = [ref for ref in builders.get(mol, ()) if ref() not in (None, builder)]
            builders[mol] = [*others, weakref.ref(builder)]


def responsible_for(mol, *orbitals):
    """As `responsible`, for functions that are given the molecule only."""
    found = [builder for ref in builders.get(mol, ()) if (builder := ref()) is not None]
    return usable(found[-1], mol, orbitals) if found else None


def responsible(method, *orbitals):
    """The `RowTeam` that makes integrals over real orbitals for a method object; None where PySCF makes them."""
    builder = getattr(method._scf, "_md4_builder", None)
    return None if builder is None or not builder.mo_integrals else usable(builder, method.mol, orbitals)


def usable(builder, mol, orbitals):
    """The `RowTeam` of a builder; None for orbitals that are not real ones of `mol`, or if a device has no algebra."""
    from pyscf.lib import logger

    if any(np.iscomplexobj(one) or len(one) != mol.nao for one in orbitals):  # which PySCF refuses, or has ways for
        return None
    engines = builder.engines(mol)
    try:
        return RowTeam(engines)
    except DeviceError as error:
        logger.warn(mol, "MO integrals are PySCF's: %s", error)
        return None


@once
def install():
    """Puts md4's functions in place of PySCF's, for the rest of the process."""
    for name in ("mp2", "ump2"):
        replace(import_module(f"pyscf.mp.{name}"), "_ao2mo_ovov", occupied_virtual)
    outcore = import_module("pyscf.ao2mo.outcore")
    replace(outcore, "general", four_sets)
    replace(outcore, "half_e1", two_sets)
    replace(import_module("pyscf.mcscf.mc_ao2mo"), "trans_e1_outcore", active_orbitals)
    replace(import_module("pyscf.mcscf.umc_ao2mo"), "_ERIS", unrestricted_active_orbitals)
    replace(import_module("pyscf.cc.ccsd"), "_contract_s4vvvv_t2", times_amplitudes)
    for name in ("RCCSDT", "UCCSDT"):
        with suppress(ImportError):  # of older versions of PySCF
            replace(getattr(import_module(f"pyscf.cc.{name.lower()}"), name), "ao2mo", by_tensor)


def occupied_virtual(theirs, method, *args, **options):
    """`_ao2mo_ovov` of MP2 and UMP2: writes (ia|jb) to an HDF5 file; returns the dataset of MP2."""
    restricted = isinstance(method, import_module("pyscf.mp.mp2").RMP2)
    orbitals, feri = (args[:2], args[2]) if restricted else args[:2]
    team = responsible(method, *orbitals)
    if team is None:
        return theirs(method, *args, **options)
    spins = [Spin(*orbitals[n : n + 2]) for n in range(0, len(orbitals), 2)]
    made, data = OccupiedVirtual(team, spins), {}
    for t, there in enumerate(spins):
        for s, here in enumerate(spins[: t + 1]):
            (o, v), (other_o, other_v) = here.shape, there.shape
            if o * v * other_o * other_v:
                shape, chunks = (o * v, other_o * other_v), (v, other_v)
                data[s, t] = feri.create_dataset(NAMES[s, t], shape, "f8", chunks=chunks)

    def put(s, t, i, j, block):
        v, other_v = block.shape
        data[s, t][i * v : (i + 1) * v, j * other_v : (j + 1) * other_v] = block

    with timed(method, "(ia|jb) by md4"):
        made.integrals(put)
    return data.get((0, 0)) if restricted else None


def arguments_of(theirs, args, options):
    """The arguments of a call of PySCF's function, by name."""
    bound = inspect.signature(theirs).bind(*args, **options)
    bound.apply_defaults()
    return bound.arguments


def team_for(given, symmetries):
    """The `RowTeam` for a call of PySCF's `general` or `half_e1`, and the symmetry; None twice where PySCF goes on."""
    mol, name = given["mol"], given["intor"]
    if mol._add_suffix(name) != mol._add_suffix("int2e") or given["comp"] not in (None, 1):
        return None, None
    aosym = str(given["aosym"])
    aosym = aosym if aosym.startswith("s") else f"s{aosym}"
    team = responsible_for(mol, *given["mo_coeffs"]) if aosym in symmetries else None
    return team, aosym


def four_sets(theirs, *args, **options):
    """`outcore.general`, by which PySCF makes (ij|kl) of any orbitals."""
    from pyscf.lib import logger

    given = arguments_of(theirs, args, options)
    team, aosym = team_for(given, ao2mo.SYMMETRIES)
    if team is None:
        return theirs(*args, **options)
    sides = ao2mo.sides_of(given["mo_coeffs"], aosym, given["compact"])
    with timed(logger.new_logger(given["mol"], given["verbose"]), "AO->MO transformation by md4"):
        ao2mo.write(team, sides, given["erifile"], given["dataname"])
    return given["erifile"]


def two_sets(theirs, *args, **options):
    """`outcore.half_e1`, of which CCSD, NEVPT2 and ADC make theirs."""
    given = arguments_of(theirs, args, options)
    team, aosym = team_for(given, ("s4", "s2kl"))
    if team is None:
        return theirs(*args, **options)
    (side,) = ao2mo.sides_of(given["mo_coeffs"], aosym, given["compact"])
    ao2mo.write_half(team, given["mol"], side, given["swapfile"])
    return given["swapfile"]


def active_orbitals(theirs, *args, **options):
    """`mc_ao2mo.trans_e1_outcore`, the integrals of CASSCF."""
    given = arguments_of(theirs, args, options)
    mo, ncore, ncas = given["mo"], given["ncore"], given["ncas"]
    team = responsible_for(given["mol"], mo)
    if team is None:
        return theirs(*args, **options)
    j_pc, k_pc, ppaa, papa = ao2mo.active_space(team, np.asarray(mo), ncore, ncas, given["level"] == 1)
    for name, made in (("ppaa", ppaa), ("papa", papa)):
        with ao2mo.opened(given["erifile"], name) as file:
            file[name] = made
    return j_pc, k_pc


def unrestricted_active_orbitals(theirs, method, mo, *args, **options):
    """`umc_ao2mo._ERIS`, the integrals of UCASSCF. PySCF's refusal says neither what they take nor what to set."""
    try:
        return theirs(method, mo, *args, **options)
    except RuntimeError as error:
        if str(error) != ".max_memory not enough" or not hasattr(method._scf, "_md4_builder"):
            raise
        usage = import_module("pyscf.mcscf.umc_ao2mo")._mem_usage(method.ncore, method.ncas, mo[0].shape[1])
        raise MemoryLimitError(
            f"{type(method).__name__} may use max_memory = {method.max_memory} MB, what the process holds included, "
            f"and its integrals take {usage[1]:.1f} MB more; set max_memory of this object, which is else that of the "
            "mean-field object."
        ) from error


def times_amplitudes(theirs, *args, **options):
    """`ccsd._contract_s4vvvv_t2`, by which CCSD contracts (ac|bd) over AOs with amplitudes if `cc.direct` is set."""
    given = arguments_of(theirs, args, options)
    method, amplitudes = given["mycc"], given["t2"]
    over_aos = given["vvvv"] is None and amplitudes.shape[-2:] == (given["mol"].nao,) * 2
    team = responsible(method) if over_aos and amplitudes.size and amplitudes.dtype == float else None
    if team is None:
        return theirs(*args, **options)
    found = np.ndarray(amplitudes.shape, buffer=given["out"])
    stack = amplitudes.reshape(-1, *amplitudes.shape[-2:])
    with timed(method, "vvvv by md4"):
        DirectContraction(team).contracted(stack, found.reshape(stack.shape))
    return found


def by_tensor(theirs, method, *args, **options):
    """`ao2mo` of CCSDT and CCSDTQ, which takes a tensor over AOs only: without one, UCCSDT finds no correlation."""
    mf = method._scf
    if mf._eri is not None or getattr(mf, "with_df", None) or not hasattr(mf, "_md4_builder"):
        return theirs(method, *args, **options)
    method._scf = mf.copy().set(_eri=mf._md4_builder.tensor(mf.mol))
    try:
        if method._scf._eri is None:
            raise MemoryLimitError(
                f"{type(method).__name__} of PySCF needs all integrals over AOs in memory, and they do not fit; raise "
                "max_memory."
            )
        return theirs(method, *args, **options)
    finally:
        method._scf = mf


# method objects -------------------------------------------------------------------------------------------------------


class MadeLater:
    """In front of PySCF's `_ChemistsERIs` of MP2: (ia|jb) are made when somebody asks for them."""

    md4_made_by: Any
    md4_sizes: Any

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
        mf, restricted = self._scf, np.ndim(orbitals[0]) == 1
        sets = [orbitals] if restricted else orbitals
        if mf._eri is not None or getattr(mf, "with_df", None) or responsible(self, *sets) is None:
            return super().ao2mo(mo_coeff)
        eris = made_later("pyscf.mp.mp2" if restricted else "pyscf.mp.ump2")()
        for name in NAMES.values():
            eris.__dict__.pop(name, None)
        eris.md4_made_by, eris.md4_sizes = lambda: super(MD4MP2, self).ao2mo(mo_coeff), (self.nocc, self.nmo)
        eris._common_init_(self, orbitals)
        return eris

    def init_amps(self, mo_energy=None, mo_coeff=None, eris=None, with_t2=True):
        """PySCF's init_amps, with energies by md4."""
        eris = self.ao2mo(mo_coeff) if eris is None else eris
        given = mo_energy is not None or mo_coeff is not None
        other = not isinstance(eris, MadeLater) or eris.md4_sizes != (self.nocc, self.nmo)
        if other or (given and self.frozen is not None):
            return super().init_amps(mo_energy, mo_coeff, eris, with_t2)
        energies = eris.mo_energy if mo_energy is None else mo_energy
        restricted = isinstance(eris.mo_coeff, np.ndarray) and eris.mo_coeff.ndim == 2
        one = [(eris.mo_coeff, self.nocc, energies)]
        spins = [
            Spin(coefficients[:, :occupied], coefficients[:, occupied:], e)
            for coefficients, occupied, e in (one if restricted else zip(eris.mo_coeff, self.nocc, energies))
        ]
        with timed(self, "MP2 by md4"):
            return as_amplitudes(*OccupiedVirtual(responsible(self), spins).energies(with_t2))


def as_amplitudes(same, opposite, t2):
    """(correlation energy with its parts, t2 or None), as of PySCF's `init_amps`; from `md4.contract.mp2.Sums`."""
    from pyscf import lib

    energy = lib.tag_array(same + opposite, e_corr_ss=same, e_corr_os=opposite)
    if (1, 1) not in t2:
        return energy, t2.get((0, 0))
    for s in range(2):
        for of_i in t2[s, s]:
            of_i[...] -= of_i.transpose(0, 2, 1)
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
