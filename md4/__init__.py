"""md4: two-electron integrals of high angular momentum on GPUs and CPUs.

    eri = md4.int2e(mol)                    # pyscf.gto.Mole -> AO tensor
    vj, vk = md4.get_jk(mol, dm)            # Coulomb and exchange matrices of a density matrix
    fit = md4.DF(mol)                       # density fitting, as pyscf.df.DF
    engine = md4.Engine(basis)              # lists of shell pairs -> blocks (ij, kl, a, b, c, d)
"""

from md4.contract.fock import JK, get_jk
from md4.contract.rows import TensorRows
from md4.engine import Engine
from md4.errors import (
    ArgumentError,
    BasisError,
    DeviceError,
    MD4Error,
    MemoryLimitError,
    RankError,
    UnsupportedError,
)
from md4.method.operators import Operator
from md4.pyscf import ao2mo
from md4.pyscf.df import DF
from md4.pyscf.few_centres import int2c2e, int3c2e
from md4.pyscf.intor import int2e, intor
from md4.pyscf.scf import attach, detach
from md4.shells.basis import Basis
from md4.shells.shell import Shell
from md4.support.environment import version as _version

__version__ = _version("md4") or "0+unknown"  # unknown where md4 is imported from a folder and not installed

__all__ = [
    "DF",
    "JK",
    "ArgumentError",
    "Basis",
    "BasisError",
    "DeviceError",
    "Engine",
    "MD4Error",
    "MemoryLimitError",
    "Operator",
    "RankError",
    "Shell",
    "TensorRows",
    "UnsupportedError",
    "ao2mo",
    "attach",
    "detach",
    "get_jk",
    "int2c2e",
    "int2e",
    "int3c2e",
    "intor",
]
