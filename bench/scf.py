"""Direct J and K of whole molecules: one build, warm, with PySCF beside it and its matrices as the check.

    python bench/scf.py --csv scf.csv                                   the table
    python bench/scf.py --systems benzene/cc-pv5z 8waters/cc-pvqz       parts of it, or others
    python bench/scf.py --peer                                          PySCF's get_jk on all cores, too
    python bench/scf.py --scaling --csv scf-scaling.csv                 time against waters and against the basis

The density matrix is PySCF's 'minao' guess: superposed densities of atoms, projected on the basis (`systems`). The
waters stand 3.1 Angstrom apart on a cubic lattice in random orientations (seeded).

'seconds' is the wall time of `JK.get_jk` from a NumPy density to NumPy J and K, median of three (--repeats) after two;
pairs, H matrices and Schwarz bounds are kept between builds, kernels are compiled. 'first' is the first build, with all
of these (compiling where the cache is empty). 'computed' are unique shell quartets evaluated, 'skipped' those that the
Schwarz bounds ruled out.

'error' is the largest absolute difference of J and K from PySCF's: of all elements with --peer (where PySCF takes
minutes at most), else of the blocks of a few shell pairs, that of the highest l among them, for which libcint's
integrals are contracted with the density unscreened. libcint itself is wrong in the high classes; see RESULTS.md.
"""

import argparse
import gc
import os
from time import perf_counter

import numpy as np
from clock import describe, median_seconds, wall_seconds, write_csv
from common import settle
from systems import NAMES, System, guess_density

import md4
from md4.support.display import SPDF

TABLE = [
    "benzene/cc-pv5z", "8waters/cc-pvqz", "27waters/cc-pvtz", "water/cc-pv6z", "water/aug-cc-pv6z", "benzene/cc-pv6z",
]  # fmt: skip
WATERS = [f"{n}waters/{basis}" for basis in ("cc-pvdz", "cc-pvtz") for n in (1, 2, 4, 8, 16, 27, 32, 64)]
BASES = [f"benzene/cc-pv{x}z" for x in "dtq56"]
TOLERANCE = 1e-13  # direct_scf_tol of both
PEER_SIZE = 5000  # nao times the highest l beyond which PySCF is not asked for all of J and K
CHECK_BYTES = 1 << 28


class Build:
    """A molecule, its density and its JK."""

    def __init__(self, system, args):
        self.mol = system.mol(args.seed)
        self.dm = guess_density(self.mol)
        begin = perf_counter()
        self.jk = md4.JK(self.mol, backend=args.backend, direct_scf_tol=TOLERANCE, progress=False)
        self.result = self.run()
        self.first = perf_counter() - begin

    def run(self):
        return self.jk.get_jk(self.dm)

    def seconds(self, repeats=3):
        """(median, spread); the first build was one of the two before."""
        return median_seconds(self.jk.engine.backend, self.run, repeats, 1, wall_seconds)

    @property
    def lmax(self):
        return max(self.mol.bas_angular(n) for n in range(self.mol.nbas))

    @property
    def affordable(self):
        """Whether PySCF's build takes minutes at most."""
        return self.mol.nao * self.lmax < PEER_SIZE


def sampled_pairs(mol, count=6, seed=1):
    """Shell pairs to check: that of the highest l, then random ones."""
    l = np.array([mol.bas_angular(n) for n in range(mol.nbas)])
    high = np.flatnonzero(l == l.max())
    rng = np.random.default_rng(seed)
    return [(int(high[0]), int(high[-1])), *(tuple(map(int, rng.integers(mol.nbas, size=2))) for _ in range(count - 1))]


def shell_chunks(mol, size):
    """Ranges of shells (first, last + 1) of about `size` AOs."""
    loc, first = mol.ao_loc, 0
    while first < mol.nbas:
        last = max(first + 1, int(np.searchsorted(loc, loc[first] + size, side="right")) - 1)
        yield first, last
        first = last


def libcint_blocks(mol, dm, i, j):
    """J_ij and K_ij of two shells: sum_kl (ij|kl) D_lk and sum_kl (ik|lj) D_kl, chunk by chunk of k, unscreened."""
    loc, n = mol.ao_loc, mol.nbas
    ni, nj = loc[i + 1] - loc[i], loc[j + 1] - loc[j]
    vj, vk = np.zeros((ni, nj)), np.zeros((ni, nj))
    for k0, k1 in shell_chunks(mol, max(1, CHECK_BYTES // (8 * ni * nj * mol.nao))):
        part = dm[loc[k0] : loc[k1]]
        ijkl = mol.intor("int2e", shls_slice=(i, i + 1, j, j + 1, k0, k1, 0, n))
        vj += np.einsum("ijkl,kl->ij", ijkl, part)
        iklj = mol.intor("int2e", shls_slice=(i, i + 1, k0, k1, 0, n, j, j + 1))
        vk += np.einsum("iklj,kl->ij", iklj, part)
    return vj, vk


def sampled_error(mol, dm, vj, vk):
    """Largest absolute error of the blocks of `sampled_pairs`."""
    loc, worst = mol.ao_loc, 0.0
    for i, j in sampled_pairs(mol):
        block = np.s_[loc[i] : loc[i + 1], loc[j] : loc[j + 1]]
        worst = max(worst, *(abs(a[block] - b).max() for a, b in zip((vj, vk), libcint_blocks(mol, dm, i, j))))
    return worst


def peer_build(mol, dm):
    """(seconds, vj, vk) of PySCF's direct get_jk on all cores, its own Schwarz bounds made before."""
    from pyscf import lib, scf

    with lib.with_omp_threads(os.cpu_count()):
        mf = scf.RHF(mol).set(direct_scf_tol=TOLERANCE)
        prescreen = mf.init_direct_scf(mol)
        begin = perf_counter()
        vj, vk = scf.hf.get_jk(mol, dm, 1, prescreen)
        return perf_counter() - begin, vj, vk


def measure(system, args):
    """One row."""
    build = Build(system, args)
    seconds, spread = build.seconds(args.repeats)
    vj, vk = build.result
    stats = build.jk.stats
    peer, checked = "", "blocks"
    if args.peer and build.affordable:
        peer, *theirs = peer_build(build.mol, build.dm)
        error, checked = max(abs(a - b).max() for a, b in zip((vj, vk), theirs)), "all"
    elif args.no_check:
        error, checked = np.nan, "none"
    else:
        error = sampled_error(build.mol, build.dm, vj, vk)
    return {
        "system": system.name, "basis": system.basis, "waters": system.waters, "nao": build.mol.nao,
        "lmax": build.lmax, "computed": stats.computed, "skipped": stats.skipped, "seconds": seconds,
        "spread": spread, "first": build.first, "error": float(error), "checked": checked, "pyscf": peer,
        "machine": f"{describe(build.jk.engine.backend)}, PySCF on {os.cpu_count()} cores",
    }  # fmt: skip


HEADER = """
| system | basis | nao | l up to | computed | skipped | seconds | ± % | first s | error | of | PySCF s | ratio |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def line(row):
    """A row of the Markdown table."""
    peer = ["", ""] if row["pyscf"] == "" else [f"{row['pyscf']:.3g}", f"{row['pyscf'] / row['seconds']:.3g}"]
    cells = [
        row["system"], row["basis"], row["nao"], SPDF[int(row["lmax"])], f"{row['computed']:.3e}",
        f"{row['skipped']:.3e}", f"{row['seconds']:.3g}", f"{100 * row['spread']:.0f}", f"{row['first']:.3g}",
        "" if np.isnan(row["error"]) else f"{row['error']:.1e}", row["checked"], *peer,
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def run_all(systems, args):
    """All rows, printed as they come; a system that fails is named and left out."""
    rows = []
    for system in systems:
        gc.collect()  # device memory of the system before
        try:
            row = measure(system, args)
        except md4.MD4Error as error:
            print(f"{system.name} {system.basis}: {error}", flush=True)
            continue
        if not rows:
            print(row["machine"], HEADER, sep="\n")
        rows.append(row)
        print(line(row), flush=True)
        if args.csv:
            write_csv(args.csv, rows)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", help=NAMES)
    parser.add_argument("--scaling", action="store_true", help="against the number of waters and against the basis")
    parser.add_argument("--peer", action="store_true", help="time and compare with PySCF's whole J and K")
    parser.add_argument("--no-check", action="store_true", help="no comparison with libcint: it takes longer from i on")
    parser.add_argument("--repeats", type=int, default=3, help="timed builds (%(default)s)")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--backend", default="auto", choices=("auto", "cuda", "cpu"), help="cpu runs on one thread")
    parser.add_argument("--seed", type=int, default=0, help="of the waters' orientations")
    args = parser.parse_args()
    args.jobs = 0
    names = args.systems or (WATERS + BASES if args.scaling else TABLE)
    run_all([System.parse(name) for name in names], settle(args))


if __name__ == "__main__":
    main()
