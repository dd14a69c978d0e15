"""MP2 with fitted integrals, from orbitals to the energy, the set-up of the fitting included; PySCF beside it.

    python bench/ri_mp2.py --csv bench/results/ri_mp2.csv           the table
    python bench/ri_mp2.py --systems benzene/cc-pvtz --backend cpu --pyscf      others, PySCF's DFMP2 as well

Each row is one store of `md4.DF`. 'Set-up' is its `build`: pairs, the metric and, but for 'direct', the tensor.
'Energy' is the rest, by an attached object with `with_t2=False`: integrals over orbitals, and their products. Both are
those of the call with the median 'total' of --repeats, after one that compiles. Each call makes a new fitting.
Auxiliary functions are the RI set of the basis, and core orbitals are frozen. The orbitals are those of Hartree-Fock
with the JKFIT set, which is not timed. With --cycles it ends after so many iterations: times and differences need no
converged orbitals.

PySCF (--pyscf) is called once, on OMP_NUM_THREADS threads, with integrals that it makes directly for the orbitals, as
it does by default. 'Ratio' is its time over md4's total, 'difference' that of the correlation energies in Hartree.
"""

import argparse
import gc
from time import perf_counter

import numba
import pyscf
from clock import describe, write_csv
from pyscf import df, lib
from pyscf.mp.dfmp2 import DFMP2
from systems import NAMES, System

import md4
from md4.errors import MD4Error

SYSTEMS = ["benzene/cc-pv5z", "8waters/cc-pvqz"]
STORES = "direct", "device", "host"
HEADER = """
| system | basis | N | naux | o | v | store | set-up s | energy s | total s | E_corr | PySCF s | ratio | difference |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def orbitals(system, args):
    """A mean-field object, converged or called so."""
    mf = md4.attach(system.mol().RHF().density_fit(auxbasis=f"{system.basis}-jkfit"), backend=args.backend)
    mf.set(conv_tol=1e-9, max_cycle=args.cycles or mf.max_cycle, verbose=0).kernel()
    mf.converged = True
    return mf


def seconds(mf, fit, auxbasis):
    """(set-up, energy, correlation energy, object) of one call; `fit` makes the fitting, of md4 or PySCF."""
    mp = DFMP2(mf).set(with_df=fit(mf.mol, auxbasis), verbose=0).set_frozen()
    begin = perf_counter()
    if isinstance(mp.with_df, md4.DF):
        md4.attach(mp).with_df.build()
    middle = perf_counter()
    energy = mp.kernel(with_t2=False)[0]
    return middle - begin, perf_counter() - middle, float(energy), mp


def rows_of(system, args):
    """Yields the rows of a system, and the text of the machine with the first one."""
    mf, auxbasis, theirs = orbitals(system, args), f"{system.basis}-ri", None
    if args.pyscf:
        _, time, energy, _ = seconds(mf, df.DF, auxbasis)
        theirs = time, energy
    for store in args.stores:

        def fit(mol, auxbasis, store=store):
            return md4.DF(mol, auxbasis, backend=args.backend, store=store)

        try:
            calls = []
            for _ in range(args.repeats + 1):
                *found, mp = seconds(mf, fit, auxbasis)
                calls.append(found)
                facts = {"naux": mp.with_df.get_naoaux(), "o": int(mp.nocc), "v": int(mp.nmo - mp.nocc)}
                backend = mp.with_df._md4_fitting().engine.backend
                del mp
                gc.collect()
        except MD4Error as error:
            print(f"{system.name}/{system.basis}, store {store}: {error}", flush=True)
            continue
        setup, energy, value = sorted(calls[1:], key=lambda call: call[0] + call[1])[args.repeats // 2]
        row = {"system": system.name, "basis": system.basis, "nao": mf.mol.nao, **facts, "store": store}
        row |= {"setup": setup, "energy": energy, "total": setup + energy, "e_corr": value}
        time, reference = theirs or ("", "")
        row |= {"pyscf": time, "ratio": theirs and time / row["total"], "difference": theirs and value - reference}
        threads = f"{numba.get_num_threads()} threads, PySCF {pyscf.__version__} on {lib.num_threads()}"
        yield row | {"machine": f"{describe(backend).replace(', one core', '')}, {threads}"}


def line(row):
    """A row of the Markdown table."""
    forms = {"setup": ".3g", "energy": ".3g", "total": ".3g", "e_corr": ".9f", "pyscf": ".3g", "ratio": ".1f"}
    forms |= {"difference": ".1e"}
    plain = [str(row[name]) for name in ("system", "basis", "nao", "naux", "o", "v", "store")]
    cells = [format(row[name], form) if isinstance(row[name], float) else "" for name, form in forms.items()]
    return f"| {' | '.join(plain + cells)} |"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", default=SYSTEMS, help=NAMES)
    parser.add_argument("--stores", nargs="+", choices=STORES, default=STORES[:2])
    parser.add_argument("--repeats", type=int, default=3, help="timed calls (%(default)s)")
    parser.add_argument("--cycles", type=int, help="iterations of Hartree-Fock at most")
    parser.add_argument("--pyscf", action="store_true", help="PySCF's DFMP2 on the CPU, too")
    parser.add_argument("--backend", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--csv", metavar="FILE")
    args, rows = parser.parse_args(argv), []
    for system in map(System.parse, args.systems):
        for row in rows_of(system, args):
            if not rows:
                print(row["machine"], HEADER, sep="\n")
            rows.append(row)
            print(line(row), flush=True)
            if args.csv:
                write_csv(args.csv, rows)
    if not rows:
        raise SystemExit("nothing was measured.")


if __name__ == "__main__":
    main()
