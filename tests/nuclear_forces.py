"""What tests of gradients share: molecules without symmetry, densities, and references by PySCF."""

import numpy as np
from molecules import molecule
from pyscf import grad, scf

from md4.contract.derivatives import DerivativeRequest
from md4.contract.tensor import locked_tensor
from md4.engine import Engine
from md4.shells.basis import Basis

# Without any symmetry, so that no component of a force is zero.
WATER = "O 0.1 0.05 0.118; H 0.02 0.755 -0.471; H -0.03 -0.79 -0.44"
# Functions s to f, general contractions, one of which is split, a ghost with functions, and an atom without any.
SHELLS = {
    "O": [[0, [8.0, 0.3, 0.1], [2.0, 0.5, -0.2], [0.5, 0.4, 0.9]], [1, [2.0, 0.4, 0.2], [0.6, 0.7, -0.5]],
          [2, [1.1, 1.0]]],
    "H": [[0, [1.2, 1, 0], [0.3, 0, 1]], [3, [0.9, 1.0]]],
    "ghost-He": [[1, [0.7, 1.0]]],
}  # fmt: skip
MIXED = "O 0 0 0; C 1.1 0.3 -0.2; H 0.1 0.7 -0.4; ghost-He 0.5 -0.3 0.8"


# Some of them: a third of the kernels that a GPU compiles for all. Operators and Cartesian functions are tested with
# these, since each has kernels of its own.
FEW_SHELLS = {"O": SHELLS["O"][::2], "H": SHELLS["H"]}


def mixed(cart=False):
    """The molecule of `SHELLS`."""
    return molecule(MIXED, SHELLS, cart=cart)


def few(cart=False):
    """The molecule of `FEW_SHELLS`."""
    return molecule(MIXED, FEW_SHELLS, cart=cart)


def symmetric(nao, count=None, seed=0):
    """A random density matrix or `count` of them, with elements near 1."""
    d = np.random.default_rng(seed).normal(size=(nao, nao) if count is None else (count, nao, nao))
    return (d + d.swapaxes(-1, -2)) / 2


def derivatives_of_jk(mol, dm, omega=0.0):
    """PySCF's J and K of derivatives, shape (n, 3, nao, nao); erfc as Coulomb minus erf, as its own is less exact."""
    if omega < 0:
        return tuple(a - b for a, b in zip(derivatives_of_jk(mol, dm), derivatives_of_jk(mol, dm, -omega)))
    with mol.with_range_coulomb(omega):
        found = grad.RHF(scf.RHF(mol)).get_jk(mol, dm)
    return tuple(this.reshape(len(dm), 3, *dm.shape[1:]) for this in found)


def forces_by_pyscf(mol, dm, coulomb=1.0, exchange=1.0, omega=0.0):
    """What `md4.JK.gradient` should find, by PySCF's derivatives of J and K."""
    spins = np.asarray(dm).reshape(-1, mol.nao, mol.nao)
    vj, vk = derivatives_of_jk(mol, spins, omega)
    factor = exchange / 2 if len(spins) == 1 else exchange
    of_aos = coulomb * np.einsum("xij,ij->xi", vj.sum(0), spins.sum(0)) - factor * np.einsum("nxij,nij->xi", vk, spins)
    return 2 * rows_of_atoms(mol, of_aos)


def rows_of_atoms(mol, of_aos):
    """Sums over the AOs of each atom, shape (natm, 3), of an array (3, nao)."""
    return np.array([of_aos[:, first:last].sum(axis=1) for *_, first, last in mol.aoslice_by_atom()])


def forces_by_tensor(tensor, left, right, coulomb=1.0, exchange=1.0):
    """The derivative of 1/2 [ j L_ab R_cd - k L_ac R_bd ] (ab|cd) by the centre of each AO, shape (3, nao).

    `tensor` is int2e_ip1, whose sign is that of the derivative by the electron. Each of the four functions is moved.
    """
    gamma = coulomb * np.einsum("ij,kl->ijkl", left, right) - exchange * np.einsum("ik,jl->ijkl", left, right)
    moved = sum(gamma.transpose(axes) for axes in ((0, 1, 2, 3), (1, 0, 2, 3), (2, 3, 0, 1), (3, 2, 0, 1)))
    return -0.5 * np.einsum("xijkl,ijkl->xi", tensor, moved)


def row_of_shells(*ls):
    """Shells in a row, the first ones with the last ones hardly overlap."""
    places = [[0.3 * np.sin(n), 0.2 * n * n % 0.5, 1.3 * n] for n in range(len(ls))]
    return Basis.from_arrays(ls, [[0.7 + 0.1 * n] for n in range(len(ls))], [[1.0]] * len(ls), places)


def scattered(basis, seed=0):
    """A matrix without symmetry, half of whose blocks are zero, and the others of many magnitudes."""
    rng, counts = np.random.default_rng(seed), np.diff(basis.ao_loc)
    factors = 10 ** rng.uniform(-6, 2, (basis.nshell,) * 2) * rng.integers(0, 2, (basis.nshell,) * 2)
    return np.repeat(np.repeat(factors, counts, 0), counts, 1) * rng.normal(size=(basis.nao,) * 2)


def assert_small_ones_left_out(basis, dm, tolerance, found):
    """J or K of derivatives, or both, lack some of what quartets add that add less than the tolerance to an element."""
    request, first = DerivativeRequest.of_name(basis, "int2e_ip1", "s1", None), basis.ao_loc[:-1]
    tensor = locked_tensor(Engine(basis, backend="cpu"), request)
    of_j, of_k = np.einsum("xijkl,lk->xijkl", tensor, dm), np.einsum("xijkl,jk->xiljk", tensor, dm)
    errors = 0.0
    for mine, terms in zip(found, (of_j, of_k)):
        if mine is None:
            continue
        added = np.add.reduceat(np.add.reduceat(terms, first, axis=3), first, axis=4)
        if terms is of_j:  # by (kl| and (lk|
            added = np.tril(added + added.swapaxes(3, 4)) * np.where(np.eye(basis.nshell), 0.5, 1.0)
        small = abs(added) * (abs(added) < tolerance)
        lacking = abs(mine + terms.sum(axis=(3, 4)))
        assert (lacking <= small.sum(axis=(3, 4)) + 1e-13 * abs(terms).sum(axis=(3, 4))).all()
        errors = max(errors, lacking.max())
    assert errors > 1e-6 * tolerance
