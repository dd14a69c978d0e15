"""Integrals over molecular orbitals with the functions, orders and files of `pyscf.ao2mo`.

>>> import md4, numpy, pyscf
>>> mol = pyscf.M(atom="H 0 0 0; F 0 0 0.917", basis="6-31g")
>>> md4.ao2mo.kernel(mol, numpy.eye(11)[:, :4]).shape
(10, 10)
"""

import os
import tempfile
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from md4.contract.four_index import FourIndex, Side
from md4.contract.ranks import Alone
from md4.contract.row_team import RowTeam
from md4.contract.team import shared_engines
from md4.contract.transform import OneIndexOfEachSide
from md4.errors import ArgumentError, DeviceError, UnsupportedError
from md4.pyscf import check_pyscf
from md4.pyscf.intor import DERIVATIVES, FEW_CENTRES, name_basis_operator
from md4.pyscf.orbitals import orbital_sets, same
from md4.support.arguments import checked_choice, checked_flag, checked_mol, checked_progress, shown, whole_number
from md4.support.memory import check_fits, host_array
from md4.support.types import BackendName, Devices, Molecule

__all__ = ["full", "general", "half_e1", "kernel"]

SYMMETRIES = ("s1", "s2ij", "s2kl", "s4")


def kernel(eri_or_mol: Any, mo_coeffs: Any, *args: Any, **options: Any) -> Any:
    """As `full` if `mo_coeffs` is a matrix, else as `general`."""
    one = isinstance(mo_coeffs, np.ndarray) and mo_coeffs.ndim == 2
    return (full if one else general)(eri_or_mol, mo_coeffs, *args, **options)


def full(eri_or_mol: Any, mo_coeff: Any, *args: Any, **options: Any) -> Any:
    """As `general`, with one set of orbitals for all four indices."""
    return general(eri_or_mol, (mo_coeff,) * 4, *args, **options)


def general(
    eri_or_mol: Any, mo_coeffs: Any, erifile: Any = None, dataname: str = "eri_mo", intor: str = "int2e",
    aosym: Any = "s4", comp: int | None = None, max_memory: float | None = None, ioblk_size: float | None = None,
    verbose: Any = None, compact: bool = True, *, backend: BackendName = "auto", device: bool = False,
    progress: bool | None = None, devices: Devices = None,
) -> Any:  # fmt: skip
    """(ij|kl) over four sets of orbitals, as `pyscf.ao2mo.general`.

    Parameters
    ----------
    eri_or_mol : pyscf.gto.Mole or ndarray
        An array, an AO tensor, is transformed by PySCF.
    mo_coeffs : sequence of four ndarray, shapes (nao, n)
        Real coefficients of the orbitals i, j, k, l.
    erifile : str, h5py.File or h5py.Group, optional
        Where the dataset `dataname` is written. In a file that is given by its name an old one is replaced.
    intor : str
        `int2e`, `int2e_yp`, `int2e_stg`, also with `_sph` or `_cart`.
    aosym : {'s4', 's2ij', 's2kl', 's1'}
        Which sides may be compact.
    comp : int, optional
        1.
    max_memory : float, optional
        Hard cap in MB on what md4 allocates, as everywhere in md4; not PySCF's size of a buffer.
    ioblk_size, verbose
        Of no effect.
    compact : bool
        Whether a side with the same set twice has the pairs i >= j only.
    backend : {'auto', 'cuda', 'cpu'}
        A GPU needs CuPy.
    device : bool
        On a GPU: whether the result is a CuPy array that stays there.
    progress : bool, optional
        As in `md4.int2e`.
    devices : 'all', int or sequence of int, optional
        GPUs that make the integrals together, by their numbers. The default is the current one. `max_memory` is that of
        each device.

    Returns
    -------
    ndarray, shape (pairs ij, pairs kl), in Hartree; or `erifile`

    Raises
    ------
    ArgumentError
        Orbitals or options that cannot be used.
    DeviceError
        No usable GPU or no CuPy, or a device that does not exist; `device` with the backend 'cpu'.
    UnsupportedError
        Complex orbitals, another integral, or shells with l > 8.
    MemoryLimitError
        The result or the least workspace does not fit.

    Examples
    --------
    >>> import md4, numpy, pyscf
    >>> mol = pyscf.M(atom="H 0 0 0; F 0 0 0.917", basis="6-31g")
    >>> orbitals = numpy.eye(11)
    >>> md4.ao2mo.full(mol, orbitals).shape
    (66, 66)
    >>> md4.ao2mo.general(mol, (orbitals[:, :5], orbitals, orbitals, orbitals)).shape
    (55, 66)
    """
    check_pyscf("md4.ao2mo")
    if isinstance(eri_or_mol, np.ndarray):
        from pyscf import ao2mo

        if erifile is not None or device:
            raise ArgumentError("an AO tensor is transformed in memory; leave erifile and device out.")
        return ao2mo.general(eri_or_mol, mo_coeffs, compact=compact)
    if comp is not None and whole_number(comp) != 1:
        raise UnsupportedError(f"md4.ao2mo has integrals of one component, but comp is {shown(comp)}.")
    if checked_flag("device", device) and erifile is not None:
        raise ArgumentError("device=True keeps the result on the GPU, but erifile is given; leave one of them out.")
    sym, compact, progress = symmetry(aosym), checked_flag("compact", compact), checked_progress(progress)
    team, orbitals = team_of(eri_or_mol, intor, backend, max_memory, devices, mo_coeffs, 4)
    sides = sides_of(orbitals, sym, compact)
    if device and team.engine.backend.name == "cpu":
        raise DeviceError("device=True keeps the result on a GPU; it needs backend='cuda'.")
    if device and len(team.engines) > 1:
        raise ArgumentError(f"device=True keeps the result on one device, but devices names {len(team.engines)}.")
    if erifile is None:
        return in_memory(team, sides, device, progress)
    write(team, sides, erifile, dataname, progress)
    return erifile


def half_e1(
    mol: Molecule, mo_coeffs: Any, swapfile: Any, intor: str = "int2e", aosym: Any = "s4", comp: int = 1,
    max_memory: float | None = None, ioblk_size: float | None = None, verbose: Any = None, compact: bool = True,
    ao2mopt: Any = None, *, backend: BackendName = "auto", progress: bool | None = None,
    devices: Devices = None,
) -> Any:  # fmt: skip
    """(ij|P) of pairs of orbitals and all pairs P of AOs, as `pyscf.ao2mo.outcore.half_e1`.

    The dataset `0/0` has a row for each pair ij. Its columns are PySCF's: shell pair by shell pair, in a pair as
    [a][b], in that of a shell with itself the lower triangle. This is not the lower triangle of AOs.

    Parameters
    ----------
    mo_coeffs : sequence of two ndarray, shapes (nao, n)
    swapfile : str, h5py.File or h5py.Group
    aosym : {'s4', 's2kl'}
    ao2mopt
        Of no effect. All else is as in `general`.

    Returns
    -------
    swapfile
    """
    check_pyscf("md4.ao2mo")
    if whole_number(comp) != 1:
        raise UnsupportedError(f"md4.ao2mo has integrals of one component, but comp is {shown(comp)}.")
    sym, compact, progress = symmetry(aosym), checked_flag("compact", compact), checked_progress(progress)
    if sym not in ("s4", "s2kl"):
        raise UnsupportedError(f"md4.ao2mo.half_e1 takes aosym 's4' or 's2kl', not {shown(aosym)}.")
    team, orbitals = team_of(mol, intor, backend, max_memory, devices, mo_coeffs, 2)
    (side,) = sides_of(orbitals, sym, compact)
    write_half(team, mol, side, swapfile, progress)
    return swapfile


# arguments ------------------------------------------------------------------------------------------------------------


def symmetry(aosym):
    """The name of a symmetry that may also be 4, '4' or 1."""
    name = f"s{aosym}"
    return name if name in SYMMETRIES else checked_choice("aosym", aosym, SYMMETRIES)


def sides_of(orbitals, aosym, compact):
    """The `Side` of each two sets."""
    may = {"s4": (True, True), "s2ij": (True, False), "s2kl": (False, True), "s1": (False, False)}[aosym]
    pairs = [orbitals[n : n + 2] for n in range(0, len(orbitals), 2)]
    return [Side(*two, bool(compact and allowed and same(*two))) for two, allowed in zip(pairs, may)]


def team_of(mol, intor, backend, max_memory, devices, mo_coeffs, count):
    """A `RowTeam` over the basis of the molecule, and so many sets of orbitals."""
    checked_mol(mol)
    basis, operator = name_basis_operator(mol, intor, None)
    if intor in FEW_CENTRES or intor in DERIVATIVES:
        raise UnsupportedError(f"md4.ao2mo transforms integrals over four centres without derivatives, not {intor}.")
    orbitals = orbital_sets(mo_coeffs, count, basis.nao)
    return RowTeam(shared_engines(basis, operator, backend, None, max_memory, devices, Alone())), orbitals


# results --------------------------------------------------------------------------------------------------------------


def planned(team, sides, progress, beside=0):
    """The `FourIndex` of two sides, and whether they are exchanged: the side with fewer pairs comes first."""
    turned = sides[1].pairs < sides[0].pairs
    return FourIndex(team, *(sides[::-1] if turned else sides), progress, beside), turned


def fill(four, turned, out, fetch):
    """Writes (ij|kl) to `out`, which takes what `fetch` makes of blocks."""

    def put(algebra, first, block):
        some = slice(first, first + len(block))
        if turned:
            out[:, some] = fetch(algebra, block.T)
        else:
            out[some] = fetch(algebra, block)

    four.integrals(put)


def fetched(algebra, block):
    """A part of an array on the host, of any strides."""
    return algebra.fetch(algebra.xp.ascontiguousarray(block))


def in_memory(team, sides, device, progress):
    """(ij|kl) as an array."""
    shape, engine, algebra = tuple(side.pairs for side in sides), team.engine, team.algebra
    size = 8 * shape[0] * shape[1]
    check_fits(
        size, algebra.memory_left() if device else algebra.host_left(),
        f"integrals of {shape[0]} x {shape[1]} pairs of orbitals take",
        "raise max_memory, or write to a file by erifile",
    )  # fmt: skip
    if not device:
        # on a CPU all is refused before the result is allocated, on a GPU it leaves less of the host
        plan = None if algebra.has_host_memory else planned(team, sides, progress, size)
        out = engine.backend.watch(np.empty(shape))
        fill(*(plan or planned(team, sides, progress)), out, fetched)
        return out
    with engine.lock, algebra.working():
        out = algebra.wrapped(engine.backend.result(shape))
    fill(*planned(team, sides, progress), out, lambda _, block: block)
    engine.backend.mark()()
    return out


def write(team, sides, erifile, dataname, progress=None):
    """(ij|kl) as a dataset of a file, as PySCF makes it."""
    shape, (four, turned) = tuple(side.pairs for side in sides), planned(team, sides, progress)
    chunks = {"chunks": tuple(side.other.shape[1] for side in sides)} if shape[0] * shape[1] else {}
    with opened(erifile, dataname) as file:
        data = file.create_dataset(dataname, shape, "f8", **chunks)
        fill(four, turned, data, fetched)


@contextmanager
def opened(erifile, dataname):
    """The group in which a dataset will be made; a file that was given by its name is closed in the end."""
    import h5py

    if not isinstance(dataname, str) or not dataname:
        raise ArgumentError(f"dataname must be the name of a dataset, not {shown(dataname)}.")
    if isinstance(erifile, h5py.Group):
        yield erifile
        return
    name = erifile.name if isinstance(erifile, tempfile._TemporaryFileWrapper) else erifile
    name = os.fspath(name) if isinstance(name, os.PathLike) else name
    if not isinstance(name, str):
        raise ArgumentError(f"a file is the name of one, or a group of h5py, not {shown(erifile)}.")
    with h5py.File(name, "a" if h5py.is_hdf5(name) else "w") as file:
        if dataname in file:
            del file[dataname]
        yield file


def write_half(team, mol, side, swapfile, progress=None):
    """(ij|P) in PySCF's order of columns."""
    half = FourIndex(team, side, progress=progress)
    rows, algebra = half.rows, half.algebra
    columns = rows.places()[tuple(np.argsort(rows.order)[pyscf_pairs(mol.ao_loc_nr(not rows.basis.pure))])]
    with opened(swapfile, "0") as file:
        data = file.create_dataset("0/0", (side.pairs, columns.shape[0]), "f8")
        with team.engine.lock, algebra.working():
            for first, _, table in half.passes():
                begin = int(side.edges[first])
                for at, block in half.row_blocks(table, half.cuts(table)):
                    data[begin + at : begin + at + len(block)] = algebra.fetch(block)[:, columns]


def pyscf_pairs(ao_loc):
    """AOs of the columns of PySCF's `half_e1`, shape (2, count)."""
    shells, found = [np.arange(*ends) for ends in pairwise(ao_loc)], [np.zeros((2, 0), dtype=np.int64)]
    for n, a in enumerate(shells):
        found += [np.stack([np.repeat(a, len(b)), np.tile(b, len(a))]) for b in shells[:n]]
        found.append(a[np.stack(np.tril_indices(len(a)))])
    return np.concatenate(found, axis=1)


def active_space(team, mo, ncore, ncas, with_core):
    """What CASSCF needs: (pp|cc), (pc|pc), (pq|ab), (pa|qb) of active orbitals a, b and core orbitals c.

    Parameters
    ----------
    mo : ndarray, shape (nao, nmo)
    ncore, ncas : int
    with_core : bool
        Else the first two are zero.

    Returns
    -------
    j_pc, k_pc : ndarray, shape (nmo, ncore)
    ppaa : ndarray, shape (nmo, nmo, ncas, ncas)
    papa : ndarray, shape (nmo, ncas, nmo, ncas)
    """
    nmo, core = mo.shape[1], ncore if with_core else 0
    cores, active = np.stack([np.arange(core)] * 2, axis=1), core + np.indices((ncas, ncas)).reshape(2, -1).T
    pairs = np.concatenate([cores, active])
    shapes, (j_pc, k_pc) = ((nmo, nmo, ncas, ncas), (nmo, ncas, nmo, ncas)), np.zeros((2, nmo, ncore))
    ppaa, papa = (host_array(shape, "integrals over active orbitals") for shape in shapes)
    one = OneIndexOfEachSide(team, mo[:, ncore - core : ncore + ncas], nmo, same_side=pairs)
    algebra = one.algebra
    with team.engine.lock, algebra.working():
        every = one.sorted(mo)
        for some, made in one.blocks(pairs, every, every):
            for (i, j), block in zip(some.tolist(), algebra.fetch(made).transpose(1, 0, 2)):
                if i < core:
                    k_pc[:, i] = block.diagonal()
                else:
                    papa[:, i - core, :, j - core] = block
        for at, made in one.over_same_side(every, every):
            blocks = fetched(algebra, made).transpose(1, 0, 2)
            for (i, j), block in zip(pairs[at:].tolist(), blocks):
                if i < core:
                    j_pc[:, i] = block.diagonal()
                else:
                    ppaa[:, :, i - core, j - core] = block
    return j_pc, k_pc, ppaa, papa
