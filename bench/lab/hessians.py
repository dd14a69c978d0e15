"""What first derivatives take in a Hessian of PySCF, and what md4 would take for them: CPU seconds.

    OMP_NUM_THREADS=1 python bench/lab/hessians.py 4waters/6-31g water/cc-pvqz

The Hessian is that of RHF, of an object that is attached to md4 on the CPU. First come its parts, J and K of the
coupled-perturbed equations among them. Then for all atoms: the four sums over int2e_ip1 that PySCF's make_h1 needs, by
PySCF; md4's tensors int2e_ip1, and the same four sums over these by BLAS; and `derivative_jk`, which makes two of them.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from time import process_time

import numpy as np
import pyscf

import md4

sys.path.insert(0, str(Path(__file__).parents[1]))

from clock import describe
from systems import NAMES, System

IP1 = "int2e_ip1"


class Clock(Counter):
    """CPU seconds by name."""

    def timed(self, name, work, *args, **options):
        """The result of a call, whose time is added."""
        start = process_time()
        result = work(*args, **options)
        self[name] += process_time() - start
        return result

    def watch(self, owner, name, key=None):
        """Has all calls of an attribute timed, under its name or under an argument's value."""
        work = getattr(owner, name)

        def watched(*args, **options):
            return self.timed(name if key is None else args[key], work, *args, **options)

        setattr(owner, name, watched)


def parts_of_hessian(mol):
    """(the converged object, CPU seconds by part); the integrals' names are those of parts, too."""
    from pyscf.hessian import rhf

    clock, mf = Clock(), md4.attach(mol.RHF(), backend="cpu").set(conv_tol=1e-10)
    mf.kernel()
    hessian, theirs = mf.Hessian(), rhf._get_jk
    for name in ("partial_hess_elec", "make_h1", "solve_mo1"):
        clock.watch(hessian, name)
    clock.watch(rhf, "_get_jk", key=1)
    try:
        clock.timed("Hessian", hessian.kernel)
    finally:
        rhf._get_jk = theirs
    return mf, clock


def sums_by_pyscf(mol, density, shells, aos):
    """J and K by the derivatives of an atom's functions, as PySCF's make_h1 asks for them."""
    from pyscf.hessian import rhf

    own = density[:, slice(*aos)]
    scripts = ["ji->s2kl", own, "lk->s1ij", density, "li->s1kj", own, "jk->s1il", density]
    return rhf._get_jk(mol, IP1, 3, "s2kl", scripts, shls_slice=shells)


def sums_of_tensor(tensor, density, aos):
    """The same from a tensor (3, i, j, kl), for a symmetric density."""
    from pyscf import lib

    (_, ni, nj, _), own = tensor.shape, np.ascontiguousarray(density[slice(*aos)])
    doubled = lib.pack_tril(2 * density - np.diag(np.diag(density)))
    of_own, of_all = own.reshape(-1) @ tensor.reshape(3, ni * nj, -1), tensor @ doubled
    kj, il = np.zeros((3, nj, nj)), np.empty((3, ni, nj))
    for x in range(3):
        for i in range(ni):
            full = lib.unpack_tril(tensor[x, i])
            kj[x] += (full.reshape(-1, nj) @ own[i]).reshape(nj, nj).T
            il[x, i] = density.reshape(-1) @ full.reshape(-1, nj)
    return lib.unpack_tril(of_own), of_all, kj, il


def first_derivatives(mf):
    """CPU seconds of all atoms' int2e_ip1 and its sums; the largest difference between md4's and PySCF's sums."""
    clock, mol, density, worst = Clock(), mf.mol, mf.make_rdm1(), 0.0
    jk = md4.JK(mol, backend="cpu")
    jk.derivative_jk(density)  # loads what is compiled, and makes the lists of shell pairs
    md4.intor(mol, IP1, "s2kl", shls_slice=(0, mol.aoslice_by_atom()[0, 1], *(0, mol.nbas) * 3), backend="cpu")
    for first, last, *aos in mol.aoslice_by_atom():
        shells = (first, last, *(0, mol.nbas) * 3)
        want = clock.timed("sums by PySCF", sums_by_pyscf, mol, density, shells, aos)
        tensor = clock.timed("md4's tensors", md4.intor, mol, IP1, "s2kl", shls_slice=shells, backend="cpu")
        found = clock.timed("sums over md4's tensors", sums_of_tensor, tensor, density, aos)
        worst = max(worst, *(abs(one - other).max() for one, other in zip(found, want)))
    clock.timed("derivative_jk", jk.derivative_jk, density)
    return clock, worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="+", help=NAMES)
    args = parser.parse_args()
    print(describe(md4.JK(pyscf.M(atom="He 0 0 0", verbose=0), backend="cpu").engine.backend))
    for system in map(System.parse, args.systems):
        mf, clock = parts_of_hessian(system.mol())
        print(f"{system.name} {system.basis}, {mf.mol.nao} AOs")
        whole = clock["Hessian"]
        for name, seconds in clock.items():
            print(f"  {name:24} {seconds:8.2f} s {seconds / whole:6.1%}")
        others, worst = first_derivatives(mf)
        for name, seconds in others.items():
            print(f"  {name:24} {seconds:8.2f} s")
        print(f"  largest difference of the sums {worst:.1e}")


if __name__ == "__main__":
    main()
