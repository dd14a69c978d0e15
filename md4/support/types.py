"""Types of what the public functions take and return, for type checkers; md4 checks arguments by itself."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

BackendName: TypeAlias = Literal["auto", "cuda", "cpu"]
Symmetry: TypeAlias = Literal["s1", "s4", "s8"]
PairSymmetry: TypeAlias = Literal["s1", "s2ij"]
KetSymmetry: TypeAlias = Literal["s1", "s2kl"]
# Where density fitting keeps its tensor.
Store: TypeAlias = Literal["auto", "device", "host", "direct"]
HostArray: TypeAlias = npt.NDArray[np.float64]
# A handle, or a stream of Numba, CuPy or PyTorch, none of which has types for it.
Stream: TypeAlias = Any
# None for the current GPU or the CPU, "all", or numbers of GPUs.
Devices: TypeAlias = Literal["all"] | int | Sequence[int] | None
# J and K: arrays on the host or on a device, as the density matrices are; None for one that is not asked for.
JKPair: TypeAlias = tuple[Any, Any]


class DeviceArray(Protocol):
    """An array in the memory of a GPU, of md4 or of another library."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class Dataset(Protocol):
    """A dataset of h5py."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...

    @property
    def file(self) -> Any: ...

    def __setitem__(self, args: Any, val: Any, /) -> None: ...


# Density matrices, shape (nao, nao) or (n, nao, nao).
Densities: TypeAlias = npt.ArrayLike | DeviceArray


class Molecule(Protocol):
    """What md4 uses of a `pyscf.gto.Mole`, of which PySCF has no types."""

    @property
    def cart(self) -> Any: ...

    @property
    def nbas(self) -> Any: ...

    @property
    def _bas(self) -> Any: ...

    def bas_angular(self, bas_id: int, /) -> Any: ...

    def bas_exp(self, bas_id: int, /) -> Any: ...

    def bas_coord(self, bas_id: int, /) -> Any: ...

    def _libcint_ctr_coeff(self, bas_id: int, /) -> Any: ...


class MeanField(Protocol):
    """A mean-field object of PySCF, by its molecule."""

    @property
    def mol(self) -> Any: ...
