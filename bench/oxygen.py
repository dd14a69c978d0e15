"""The oxygen atom, UHF triplet, in aug-cc-pV7Z (k functions) with md4's J and K: the energy to 1e-10 Hartree.

    python bench/oxygen.py                                  aug-cc-pV7Z
    python bench/oxygen.py --basis aug-cc-pvtz --peer       another basis, PySCF beside it

No symmetry is imposed. The UHF solution is axial, its singly filled beta p orbital along an axis that the guess leaves
open; orbitals of pure l (mol.symmetry = 'SO3') are another, higher solution: 4.8 mHartree in aug-cc-pVTZ.
"""

import argparse
from time import perf_counter

from clock import describe
from common import settle
from pyscf import gto, scf
from systems import basis_set

import md4


def solver(args):
    """UHF as tight as double precision allows."""
    mol = gto.M(atom="O 0 0 0", basis=basis_set(args.basis, {"O"}), spin=2, verbose=args.verbose)
    return scf.UHF(mol).set(conv_tol=args.conv_tol, direct_scf_tol=1e-15, max_cycle=100)


def report(name, mf):
    """Runs and prints one line."""
    begin = perf_counter()
    energy = mf.kernel()
    state = f"converged in {mf.cycles} cycles" if mf.converged else f"NOT converged in {mf.cycles} cycles"
    print(f"{name:<6} E = {energy:.12f} Hartree, <S^2> = {mf.spin_square()[0]:.6f}, {state}, "
          f"{perf_counter() - begin:.1f} s", flush=True)  # fmt: skip
    return energy


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--basis", default="aug-cc-pv7z")
    parser.add_argument("--conv-tol", type=float, default=1e-12, help="Hartree (%(default)g)")
    parser.add_argument("--peer", action="store_true", help="PySCF's own J and K, too")
    parser.add_argument("--backend", default="auto", choices=("auto", "cuda", "cpu"), help="cpu runs on one thread")
    parser.add_argument("--verbose", type=int, default=0, help="PySCF's; 4 shows every cycle")
    args = parser.parse_args()
    args.jobs = 0
    mf = md4.attach(solver(settle(args)), backend=args.backend)
    print(describe(mf.md4_jk.engine.backend))
    print(f"O, {args.basis}: {mf.mol.nao} AOs, l up to {max(mf.mol.bas_angular(n) for n in range(mf.mol.nbas))}")
    energy = report("md4", mf)
    if args.peer:
        print(f"difference {energy - report('PySCF', solver(args)):.1e} Hartree")


if __name__ == "__main__":
    main()
