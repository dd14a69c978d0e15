"""HF and MP2 of molecules with exact integrals: seconds and energies of md4, and of PySCF beside it.

    python bench/mp2.py --csv bench/results/mp2.csv                 the table
    python bench/mp2.py --systems water/cc-pvqz --pyscf             parts of it, or others; PySCF's MP2, too
    python bench/mp2.py --limit benzene --plot limit.svg            the basis set limit, from cc-pVDZ to cc-pV6Z

The 1s orbitals of atoms heavier than helium are frozen. 'HF' is the wall time of `mf.kernel()` of an attached object,
compilation included where the cache is empty. 'First' and 'MP2' are wall times from the orbitals to the energy,
without amplitudes (`with_t2=False`): of the first call, and the median of --repeats further ones. 'PySCF' is the same
of PySCF's MP2 on all cores, with the same orbitals, and 'difference' that of both correlation energies in Hartree.
PySCF writes integrals to a file, and does not keep the AO tensor.

With --limit, correlation energies of two neighbouring cardinal numbers X are extrapolated by E + A X^-3, and added to
the HF energy of the larger one. --plot draws what each basis changes in the energies, in the looks of bench/plots.py.
"""

import argparse
from time import perf_counter

import numpy as np
from clock import describe, write_csv
from plots import legend, panels, settled
from pyscf import mp
from systems import NAMES, System
from tables import basis_name

import md4

SYSTEMS = [
    "benzene/cc-pvtz", "benzene/cc-pvqz", "benzene/cc-pv5z", "benzene/cc-pv6z", "water/aug-cc-pv6z", "8waters/cc-pvqz",
    "naphthalene/cc-pvqz",
]  # fmt: skip
CARDINAL = {f"cc-pv{x}z": n for n, x in enumerate("dtq56", 2)}
FORMS = {
    "system": "", "basis": "", "nao": "", "occupied": "", "virtual": "", "hf_seconds": ".3g", "first": ".3g",
    "mp2_seconds": ".3g", "pyscf": ".3g", "difference": ".1e", "hf": ".6f", "correlation": ".6f", "limit": ".6f",
}  # fmt: skip
HEADER = """
| system | basis | nao | occupied | virtual | HF s | first s | MP2 s | PySCF s | difference | HF, Hartree | MP2 | \
limit |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def seconds(call):
    """(wall time, result)"""
    begin = perf_counter()
    result = call()
    return perf_counter() - begin, result


def measured(system, args):
    """(the row of a system, the backend)."""
    mol = system.mol()
    mf = md4.attach(mol.RHF(), backend=args.backend).set(max_memory=0, conv_tol=1e-10)
    hf_seconds, hf = seconds(mf.kernel)
    method = md4.attach(mp.MP2(mf, frozen=int((mol.atom_charges() > 2).sum())))
    first, (correlation, _) = seconds(lambda: method.kernel(with_t2=False))
    times = [seconds(lambda: method.kernel(with_t2=False))[0] for _ in range(args.repeats)]
    row = dict.fromkeys(FORMS, "") | {
        "system": system.name, "basis": system.basis, "nao": mol.nao, "occupied": int(method.nocc),
        "virtual": int(method.nmo - method.nocc), "hf_seconds": hf_seconds, "first": first,
        "mp2_seconds": float(np.median(times)) if times else "", "hf": hf, "correlation": correlation,
    }  # fmt: skip
    if args.pyscf:
        theirs = mp.MP2(md4.detach(mf.copy()), frozen=method.frozen).set(max_memory=mol.max_memory)
        row["pyscf"], (energy, _) = seconds(lambda: theirs.kernel(with_t2=False))
        row["difference"] = abs(energy - correlation)
    return row, mf.md4_jk.engine.backend


def limit(before, row):
    """The energy at the basis set limit, from rows of two cardinal numbers."""
    x, y = (CARDINAL[this["basis"]] ** 3 for this in (before, row))
    return row["hf"] + (y * row["correlation"] - x * before["correlation"]) / (y - x)


def plot(rows, path):
    """Draws by how much the HF, MP2 and extrapolated MP2 energies of rows differ from those of the basis before."""
    figure, (axis,) = panels(settled(), 1, 3.4)
    energies = {
        "HF": [row["hf"] for row in rows], "MP2": [row["correlation"] for row in rows],
        "MP2, extrapolated": [row["limit"] - row["hf"] for row in rows[1:]],
    }  # fmt: skip
    for marker, (name, values) in zip("so^", energies.items()):
        axis.semilogy(range(len(rows) - len(values) + 1, len(rows)), abs(np.diff(values)), f"{marker}-", label=name)
    axis.set_xticks(range(1, len(rows)), [basis_name(row["basis"]) for row in rows[1:]])
    axis.set(ylabel="change from basis before / Hartree")
    axis.set_title(f"{rows[0]['system']}, HF + MP2 at the limit:\n{rows[-1]['limit']:.4f} Hartree")
    axis.grid()
    legend(figure, columns=3)
    figure.savefig(path)
    return figure


def line(row):
    """A row of the Markdown table."""
    return "| " + " | ".join(str(row[k]) if row[k] == "" else format(row[k], form) for k, form in FORMS.items()) + " |"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", default=SYSTEMS, help=NAMES)
    parser.add_argument("--limit", metavar="MOLECULE", help="instead: a molecule in " + ", ".join(CARDINAL))
    parser.add_argument("--largest", choices=[*CARDINAL][1:], default="cc-pv6z", help="last of --limit (%(default)s)")
    parser.add_argument("--plot", metavar="FILE", help="a picture of --limit, which needs Matplotlib")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls after the first one (%(default)s)")
    parser.add_argument("--pyscf", action="store_true", help="PySCF's MP2 on the CPU, too")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--backend", default="auto", choices=("auto", "cuda", "cpu"))
    args, rows = parser.parse_args(argv), []
    names = args.systems
    if args.plot and not args.limit:
        parser.error("--plot draws the basis set limit, and needs --limit.")
    if args.limit:
        names = [f"{args.limit}/{basis}" for basis, x in CARDINAL.items() if x <= CARDINAL[args.largest]]
    for system in map(System.parse, names):
        row, backend = measured(system, args)
        if args.limit and rows:
            row["limit"] = limit(rows[-1], row)
        if not rows:
            print(describe(backend), HEADER, sep="\n")
        rows.append(row)
        print(line(row), flush=True)
        if args.csv:
            write_csv(args.csv, rows)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
