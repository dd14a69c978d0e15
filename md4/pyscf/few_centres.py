"""Integrals over three and two centres under PySCF's names, for density fitting."""

from collections.abc import Sequence
from typing import Literal, overload

from md4.contract.tensor import locked_tensor
from md4.contract.three_centre import tensor_request
from md4.engine import Engine
from md4.method.operators import Operator
from md4.shells.basis import Basis
from md4.support.arguments import checked_flag, checked_mol, checked_progress
from md4.support.memory import check_out
from md4.support.types import BackendName, DeviceArray, HostArray, Molecule, PairSymmetry, Stream

# Number of indices of each integral.
INDICES = {"int3c2e": 3, "int2c2e": 2}


def few_centre_tensor(
    basis, operator, indices, last, aosym, shls_slice, out, backend, device, max_memory, stream, progress
):
    """The tensor (ij|k) or (i|k) over a basis from `Basis.joined`.

    `last` is the range of the last index, if there is no slice; the others have the shells of the first basis. The
    other arguments, results and errors are those of `int3c2e`.
    """
    ranges = *((0, len(basis.parts[0])),) * (indices - 1), last
    request = tensor_request(basis, aosym, shls_slice, ranges)
    return tensor_of_one_device(basis, operator, request, out, backend, device, max_memory, stream, progress)


def tensor_of_one_device(basis, operator, request, out, backend, device, max_memory, stream, progress):
    """The tensor of a `Request`; the other arguments, results and errors are those of `int3c2e`."""
    if not checked_flag("device", device) and out is not None:
        check_out(out, request.layout(basis).shape)
    engine = Engine(basis, None, operator, backend, stream, max_memory)
    with engine.lock:
        return locked_tensor(engine, request, out, device, checked_progress(progress))


def checked_auxmol(auxmol):
    """The molecule of auxiliary functions; errors as of `checked_mol`."""
    return checked_mol(auxmol, "auxmol", "pyscf.df.make_auxmol(mol, 'cc-pvdz-jkfit') makes one")


def operator_of(mol, omega):
    """The operator of `omega`, by default that of `mol`."""
    return Operator.from_omega(mol.omega if omega is None else omega)


@overload
def int3c2e(
    mol: Molecule, auxmol: Molecule, aosym: PairSymmetry = "s1", omega: float | None = None,
    shls_slice: Sequence[int] | None = None, out: HostArray | DeviceArray | None = None, backend: BackendName = "auto",
    device: Literal[False] = False, max_memory: float | None = None, stream: Stream = None,
    progress: bool | None = None,
) -> HostArray: ...  # fmt: skip


@overload
def int3c2e(
    mol: Molecule, auxmol: Molecule, aosym: PairSymmetry = "s1", omega: float | None = None,
    shls_slice: Sequence[int] | None = None, out: HostArray | DeviceArray | None = None, backend: BackendName = "auto",
    *, device: Literal[True], max_memory: float | None = None, stream: Stream = None, progress: bool | None = None,
) -> DeviceArray: ...  # fmt: skip


def int3c2e(
    mol: Molecule, auxmol: Molecule, aosym: PairSymmetry = "s1", omega: float | None = None,
    shls_slice: Sequence[int] | None = None, out: HostArray | DeviceArray | None = None, backend: BackendName = "auto",
    device: bool = False, max_memory: float | None = None, stream: Stream = None, progress: bool | None = None,
) -> HostArray | DeviceArray:  # fmt: skip
    """The integrals (ij|P) of a molecule and an auxiliary basis, in Hartree, as ``pyscf.df.incore.aux_e2``.

    Parameters
    ----------
    mol, auxmol : pyscf.gto.Mole
        Built molecules with the orbital and with the auxiliary basis, as from ``pyscf.df.make_auxmol``; both spherical
        or, with ``cart``, both Cartesian. The auxiliary functions may have any l, if that of a triple adds up to at
        most 32.
    aosym : {'s1', 's2ij'}
        's1': shape (nao, nao, naux); 's2ij': (nao (nao + 1) / 2, naux).
    omega : float, optional
        Range separation as in `int2e`; the default is `mol.omega`.
    shls_slice : 6 ints, optional
        Shell ranges (i0, i1, j0, j1, k0, k1) of a part of the tensor, the last two of `auxmol`. With 's2ij', j may have
        the range of i, or from 0 at least that of all j <= i: rows of the triangle, as PySCF has it.
    out : array, optional
        Where the result is written: C-contiguous float64 of the result's shape.
    backend : {'auto', 'cuda', 'cpu'}
    device : bool
        Whether to keep the result on the GPU (backend 'cuda').
    max_memory : float, optional
        Hard cap in MB on what md4 allocates. The default is what is free.
    stream : optional
        CUDA stream to work on; see `Engine`.
    progress : bool, optional
        Whether to show a progress bar. By default there is one on a terminal if the work takes long.

    Returns
    -------
    ndarray, or a device array with `device`
        In C order; or `out`, if it is given.

    Raises
    ------
    ArgumentError, BasisError
        The input cannot be used; the message says what and why.
    UnsupportedError
        A periodic cell, or shells whose angular momenta add up to more than 32.
    MemoryLimitError
        The result and the least workspace exceed `max_memory`, or the memory that is free.
    DeviceError
        ``backend='cuda'`` or `device` without a usable GPU.

    Examples
    --------
    >>> import md4, pyscf
    >>> from pyscf import df
    >>> mol = pyscf.M(atom="H 0 0 0; F 0 0 0.917", basis="cc-pvdz")
    >>> auxmol = df.make_auxmol(mol, "cc-pvdz-jkfit")
    >>> md4.int3c2e(mol, auxmol, aosym="s2ij").shape
    (190, 93)
    """
    operator = operator_of(checked_mol(mol), omega)
    parts = [Basis.from_mol(mol), Basis.from_mol(checked_auxmol(auxmol))]
    joined, last = Basis.joined(parts), (len(parts[0]), len(parts[0]) + len(parts[1]))
    options = aosym, shls_slice, out, backend, device, max_memory, stream, progress
    return few_centre_tensor(joined, operator, 3, last, *options)


@overload
def int2c2e(
    auxmol: Molecule, omega: float | None = None, shls_slice: Sequence[int] | None = None,
    out: HostArray | DeviceArray | None = None, backend: BackendName = "auto", device: Literal[False] = False,
    max_memory: float | None = None, stream: Stream = None, progress: bool | None = None,
) -> HostArray: ...  # fmt: skip


@overload
def int2c2e(
    auxmol: Molecule, omega: float | None = None, shls_slice: Sequence[int] | None = None,
    out: HostArray | DeviceArray | None = None, backend: BackendName = "auto", *, device: Literal[True],
    max_memory: float | None = None, stream: Stream = None, progress: bool | None = None,
) -> DeviceArray: ...  # fmt: skip


def int2c2e(
    auxmol: Molecule, omega: float | None = None, shls_slice: Sequence[int] | None = None,
    out: HostArray | DeviceArray | None = None, backend: BackendName = "auto", device: bool = False,
    max_memory: float | None = None, stream: Stream = None, progress: bool | None = None,
) -> HostArray | DeviceArray:  # fmt: skip
    """The integrals (P|Q) of an auxiliary basis, in Hartree, as ``auxmol.intor("int2c2e")``.

    The parameters and errors that are not listed here are those of `int3c2e`.

    Parameters
    ----------
    auxmol : pyscf.gto.Mole
        A built molecule with the auxiliary basis. The angular momenta of two shells may add up to 32.
    omega : float, optional
        The default is `auxmol.omega`.
    shls_slice : 4 ints, optional
        Shell ranges (i0, i1, k0, k1) of a part.

    Returns
    -------
    ndarray, shape (naux, naux), or a device array with `device`
        Symmetric to the last bit; or `out`, if it is given.

    Examples
    --------
    >>> import md4, pyscf
    >>> from pyscf import df
    >>> auxmol = df.make_auxmol(pyscf.M(atom="He 0 0 0", basis="cc-pvtz"), "cc-pvtz-ri")
    >>> metric = md4.int2c2e(auxmol)
    >>> print(metric.shape, abs(metric - auxmol.intor("int2c2e")).max() < 1e-12)
    (27, 27) True
    """
    operator, basis = operator_of(checked_auxmol(auxmol), omega), Basis.from_mol(auxmol)
    options = "s1", shls_slice, out, backend, device, max_memory, stream, progress
    return few_centre_tensor(Basis.joined([basis]), operator, 2, (0, len(basis)), *options)
