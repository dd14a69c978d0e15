"""Entry points under PySCF's names: from a `pyscf.gto.Mole` to an AO tensor."""

from collections.abc import Sequence
from typing import Any, Literal, overload

from md4.contract.derivatives import TENSORS, DerivativeRequest
from md4.contract.ranks import ranks_of
from md4.contract.rows import TensorRows, shared_tensor
from md4.contract.stores import is_file
from md4.contract.team import shared_engines
from md4.contract.tensor import ao_tensor, checked_request
from md4.errors import ArgumentError, UnsupportedError
from md4.method.operators import Operator
from md4.pyscf.few_centres import INDICES, few_centre_tensor, tensor_of_one_device
from md4.shells.basis import Basis
from md4.support.arguments import checked_flag, checked_mol, checked_progress, shown
from md4.support.types import (
    BackendName,
    Dataset,
    DeviceArray,
    Devices,
    HostArray,
    KetSymmetry,
    Molecule,
    PairSymmetry,
    Stream,
    Symmetry,
)

# libcint keeps the exponent of the geminals in mol._env[PTR_F12_ZETA].
PTR_F12_ZETA = 9
SUFFIXES = ("", "_sph", "_cart")
KINDS = ("", "_yp", "_stg")
FEW_CENTRES = {f"{name}{suffix}": count for name, count in INDICES.items() for suffix in SUFFIXES}
# What the integral is without its operator, for those with a derivative.
DERIVATIVES = {f"int2e{kind}_ip1{suffix}": "int2e_ip1" for kind in KINDS for suffix in SUFFIXES} | {
    f"{name}{suffix}": name for name in TENSORS if name != "int2e_ip1" for suffix in SUFFIXES
}
NAMES = (*(f"int2e{kind}{suffix}" for kind in KINDS for suffix in SUFFIXES), *FEW_CENTRES, *DERIVATIVES)


def mol_operator(mol, kind, omega):
    """The operator of the integral family `kind` ('', '_yp', '_stg') with the parameters of `mol`."""
    if kind == "":
        return Operator.from_omega(mol.omega if omega is None else omega)
    zeta = float(mol._env[PTR_F12_ZETA])
    if not zeta > 0:
        raise ArgumentError(f"int2e{kind} needs the geminal's exponent; set it by mol.set_f12_zeta(zeta), zeta > 0.")
    return Operator.yukawa(zeta) if kind == "_yp" else Operator.slater(zeta)


def name_basis_operator(mol, name, omega):
    """The basis and the operator of an integral by PySCF's name; errors as in `intor`."""
    if isinstance(mol, str) and mol in NAMES:
        raise ArgumentError(f"the molecule comes first: md4.intor(mol, {mol!r}).")
    if not isinstance(name, str) or name not in NAMES:
        raise UnsupportedError(f"integral {shown(name)} is not offered; md4 has {', '.join(NAMES)}.")
    kind = "".join(k for k in ("_yp", "_stg") if k in name)
    basis = Basis.from_mol(checked_mol(mol))
    if name.endswith(("_sph", "_cart")):
        basis = Basis(basis.shells, pure=name.endswith("_sph"))
    return basis, mol_operator(mol, kind, omega)


def intor(
    mol: Molecule, name: str = "int2e", aosym: Symmetry | PairSymmetry | KetSymmetry = "s1", omega: float | None = None,
    shls_slice: Sequence[int] | None = None, out: HostArray | DeviceArray | Dataset | None = None,
    backend: BackendName = "auto", device: bool = False,
    max_memory: float | None = None, stream: Stream = None, progress: bool | None = None,
    devices: Devices = None, comm: Any = None, gather: bool = False,
) -> Any:  # fmt: skip
    """Two-electron integrals of a molecule, as returned by ``mol.intor(name, ...)``.

    The name says how many components there are, so PySCF's `comp` and `hermi` are left out. The result, the errors, and
    the parameters that are not listed here are those of `int2e`.

    Parameters
    ----------
    mol : pyscf.gto.Mole
    name : str
        'int2e' (Cartesian if `mol.cart` is set, else spherical), 'int2e_sph' or 'int2e_cart'. Likewise 'int2e_yp'
        (Yukawa) and 'int2e_stg' (Slater geminal), with the exponent that was set by ``mol.set_f12_zeta``; 'int3c2e',
        with all three indices over the shells of `mol`, which may be those of two molecules (``pyscf.gto.conc_mol``);
        and 'int2c2e'. The options of these two are those of `int3c2e` and `int2c2e`.

        With a derivative, in Hartree/Bohr, whose three components are the first index: 'int2e_ip1', (nabla i j|kl),
        also of both geminals ('int2e_yp_ip1', 'int2e_stg_ip1'); 'int3c2e_ip1', (nabla i j|P); 'int3c2e_ip2',
        (ij|nabla P); and 'int2c2e_ip1', (nabla P|Q). The nabla acts on the function: (nabla i j|kl) is minus the
        derivative by the centre of i. They are made by one device, and `out` is an array or a numpy.memmap.
    aosym : str
        Symmetry as in `int2e` and `int3c2e`. 'int2e_ip1' has 's1' and 's2kl', (3, nao, nao, nao (nao + 1) / 2), for
        which the ranges of k and l are equal; 'int3c2e_ip2' has 's1' and 's2ij'; the other derivatives have 's1'.

    Raises
    ------
    UnsupportedError
        Another name; the message lists the names that are offered. Or a derivative of shells whose angular momenta add
        up to more than 31.

    Examples
    --------
    >>> import md4, pyscf
    >>> mol = pyscf.M(atom="H 0 0 0; F 0 0 0.917", basis="6-31g")
    >>> mol.set_f12_zeta(1.2)
    >>> md4.intor(mol, "int2e_stg", aosym="s4").shape
    (66, 66)
    >>> gradient = md4.intor(mol, "int2e_ip1", aosym="s2kl")
    >>> gradient.shape
    (3, 11, 11, 66)
    >>> print(abs(gradient - mol.intor("int2e_ip1", aosym="s2kl")).max() < 1e-12)
    True
    """
    ranks = ranks_of(comm)

    def made():
        few = isinstance(name, str) and name in {**FEW_CENTRES, **DERIVATIVES}
        if few and (devices is not None or comm is not None or gather):
            raise ArgumentError(f"{name} is made by one device: leave out devices, comm and gather.")
        basis, operator = name_basis_operator(mol, name, omega)
        options = out, backend, device, max_memory, stream, progress
        if few and DERIVATIVES.get(name) != "int2e_ip1":
            basis = Basis.joined([basis])
        if name in DERIVATIVES:
            request = DerivativeRequest.of_name(basis, DERIVATIVES[name], aosym, shls_slice)
            return tensor_of_one_device(basis, operator, request, *options)
        if few:
            last = 0, len(basis.parts[0])
            return few_centre_tensor(basis, operator, FEW_CENTRES[name], last, aosym, shls_slice, *options)
        request = checked_request(basis, aosym, shls_slice, out, device)
        collected, shown_progress = checked_flag("gather", gather), checked_progress(progress)
        engines = shared_engines(basis, operator, backend, stream, max_memory, devices, ranks, collected)
        if devices is None and comm is None and not is_file(out):
            return ao_tensor(engines[0], aosym, shls_slice, out, device, shown_progress)
        return shared_tensor(engines, request, ranks, out, bool(device), collected, shown_progress)

    result = ranks.together(made, "md4.intor")
    return result.array if comm is None and isinstance(result, TensorRows) else result


@overload
def int2e(
    mol: Molecule, aosym: Symmetry = "s1", omega: float | None = None, shls_slice: Sequence[int] | None = None,
    out: HostArray | DeviceArray | None = None, backend: BackendName = "auto", device: Literal[False] = False,
    max_memory: float | None = None, stream: Stream = None, progress: bool | None = None,
    devices: Devices = None, comm: None = None, gather: bool = False,
) -> HostArray: ...  # fmt: skip


@overload
def int2e(
    mol: Molecule, aosym: Symmetry = "s1", omega: float | None = None, shls_slice: Sequence[int] | None = None,
    out: HostArray | DeviceArray | None = None, backend: BackendName = "auto", *, device: Literal[True],
    max_memory: float | None = None, stream: Stream = None, progress: bool | None = None,
    devices: Devices = None, comm: None = None, gather: bool = False,
) -> DeviceArray: ...  # fmt: skip


@overload
def int2e(
    mol: Molecule, aosym: Symmetry = "s1", omega: float | None = None, shls_slice: Sequence[int] | None = None,
    out: HostArray | DeviceArray | Dataset | None = None, backend: BackendName = "auto", device: bool = False,
    max_memory: float | None = None, stream: Stream = None, progress: bool | None = None,
    devices: Devices = None, comm: Any = None, gather: bool = False,
) -> HostArray | DeviceArray | Dataset | TensorRows | None: ...  # fmt: skip


def int2e(
    mol: Molecule, aosym: Symmetry = "s1", omega: float | None = None, shls_slice: Sequence[int] | None = None,
    out: HostArray | DeviceArray | Dataset | None = None, backend: BackendName = "auto", device: bool = False,
    max_memory: float | None = None, stream: Stream = None, progress: bool | None = None,
    devices: Devices = None, comm: Any = None, gather: bool = False,
) -> HostArray | DeviceArray | Dataset | TensorRows | None:  # fmt: skip
    """The electron repulsion integrals (ij|kl) of a molecule, in Hartree.

    Parameters
    ----------
    mol : pyscf.gto.Mole
        A built molecule. If ``mol.cart`` is set, AOs are Cartesian.
    aosym : {'s1', 's4', 's8'}
        's1': shape (nao, nao, nao, nao); 's4': (npair, npair), npair = nao (nao + 1) / 2; 's8': one row of
        npair (npair + 1) / 2.
    omega : float, optional
        Range separation in Bohr^-1: erf(omega r)/r for omega > 0, erfc(-omega r)/r for omega < 0, and 1/r for 0. The
        default is `mol.omega`.
    shls_slice : 8 ints, optional
        Shell ranges (i0, i1, j0, j1, k0, k1, l0, l1) of a part of the tensor; not with 's8'.
    out : array, numpy.memmap or h5py.Dataset, optional
        Where the result is written: float64 of the result's shape. Arrays must be C-contiguous. To a dataset or a
        memory map, complete rows are written one after the other, so that it may be larger than the memory.
    backend : {'auto', 'cuda', 'cpu'}
    device : bool
        Whether to keep the result on the GPU (backend 'cuda'), as a device array with ``__cuda_array_interface__`` and
        DLPack.
    max_memory : float, optional
        Hard cap in MB on what md4 allocates, for each device. The default is what is free.
    stream : optional
        CUDA stream to work on; see `Engine`.
    progress : bool, optional
        Whether to show a progress bar. By default there is one on a terminal if the work takes long.
    devices : 'all', int or sequence of int, optional
        GPUs that make the tensor together, by their numbers. The default is the current one; with `comm`, each rank of
        a node takes the next.
    comm : mpi4py.MPI.Intracomm, optional
        Ranks that make the tensor together. All of them call this function with the same arguments.
    gather : bool
        Whether rank 0 of `comm` gets the whole tensor.

    Returns
    -------
    ndarray, or a device array with `device`
        Or `out`, if it is given. With `comm` and without `out`, each rank gets its rows as `TensorRows`, or with
        `gather` rank 0 the whole tensor as an ndarray, and the other ranks None.

    Raises
    ------
    ArgumentError, BasisError
        The input cannot be used; the message says what and why. Or it is not the same on all ranks.
    UnsupportedError
        A periodic cell, or shells whose angular momenta add up to more than 32 in a quartet.
    MemoryLimitError
        The result and the least workspace exceed `max_memory`, or the memory that is free.
    DeviceError
        ``backend='cuda'`` or `device` without a usable GPU, or a device that does not exist.
    RankError
        Another rank has failed; the message says which one, and why.

    Examples
    --------
    >>> import md4, pyscf
    >>> mol = pyscf.M(atom="H 0 0 0; F 0 0 0.917", basis="6-31g")
    >>> eri = md4.int2e(mol)
    >>> eri.shape
    (11, 11, 11, 11)
    >>> print(abs(eri - mol.intor("int2e")).max())
    1.3e-14

    Two s shells with all pairs, and the long range alone:

    >>> md4.int2e(mol, shls_slice=(0, 2, 0, 2, 0, mol.nbas, 0, mol.nbas)).shape
    (2, 2, 11, 11)
    >>> long_range = md4.int2e(mol, aosym="s8", omega=0.3)
    """
    return intor(
        mol, "int2e", aosym, omega, shls_slice, out, backend, device, max_memory, stream, progress, devices, comm,
        gather,
    )  # fmt: skip
