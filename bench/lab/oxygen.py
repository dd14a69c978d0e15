"""The oxygen atom, triplet, in aug-cc-pV7Z (k functions) with md4's J and K: the energy to 1e-10 Hartree.

    python bench/lab/oxygen.py                                  ROHF in aug-cc-pV7Z
    python bench/lab/oxygen.py --method UHF
    python bench/lab/oxygen.py --basis aug-cc-pvtz --peer       another basis, PySCF beside it

No symmetry is imposed. The solutions are axial, with the doubly filled p orbital along an axis that the guess leaves
open; orbitals of pure l (mol.symmetry = 'SO3') are other, higher solutions: in UHF 4.8 mHartree in aug-cc-pVTZ.
`bench/lab/published.py` compares the ROHF energy with those of other programs.
"""

import argparse
import sys
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all scripts share
from clock import describe
from pyscf import gto, scf
from systems import basis_set

import md4


def solver(args):
    """UHF or ROHF as tight as double precision allows."""
    mol = gto.M(atom="O 0 0 0", basis=basis_set(args.basis, {"O"}), spin=2, verbose=args.verbose)
    method = {"ROHF": scf.ROHF, "UHF": scf.UHF}[args.method]
    return method(mol).set(conv_tol=args.conv_tol, direct_scf_tol=1e-15, max_cycle=100)


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
    parser.add_argument("--method", default="ROHF", choices=("ROHF", "UHF"))
    parser.add_argument("--conv-tol", type=float, default=1e-12, help="Hartree (%(default)g)")
    parser.add_argument("--peer", action="store_true", help="PySCF's own J and K, too")
    parser.add_argument("--backend", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--verbose", type=int, default=0, help="PySCF's; 4 shows every cycle")
    args = parser.parse_args()
    mf = md4.attach(solver(args), backend=args.backend)
    print(describe(mf.md4_jk.engine.backend).replace(", one core", ""))  # all cores of the CPU
    print(f"O, {args.method}, {args.basis}: {mf.mol.nao} AOs, "
          f"l up to {max(mf.mol.bas_angular(n) for n in range(mf.mol.nbas))}")  # fmt: skip
    energy = report("md4", mf)
    if args.peer:
        print(f"difference {energy - report('PySCF', solver(args)):.1e} Hartree")


if __name__ == "__main__":
    main()
