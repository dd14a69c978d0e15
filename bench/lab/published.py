"""Hartree-Fock energies with md4's J and K beside published ones: programs, and numerical limits from above.

    python bench/lab/published.py                                all systems, up to 100 AOs
    python bench/lab/published.py --backend cuda --max-ao 600 --limit 240 --csv published.csv
    python bench/lab/published.py --systems O --max-ao 300       the oxygen atom up to aug-cc-pV7Z

The limits are those of numerical programs, which use no basis set (HelFEM: finite elements; x2dhf: finite differences).
Energies along a family of basis sets must fall and stay above the limit. The oxygen atom has the energies that other
programs find in the same basis set. The script says what is violated and ends with status 1 then. Small calculations
come first, and none begins after the limit of time.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what all scripts share
from clock import describe, write_csv
from pyscf import gto, scf
from systems import basis_set

import md4

CC = "cc-pvdz", "cc-pvtz", "cc-pvqz", "cc-pv5z", "cc-pv6z"
CONVERGED = 1e-12  # Hartree, of the energy from one cycle to the next
SLACK = 1e-7  # Hartree by which an energy may lie below a limit: the digits to which runs of x2dhf agree
AGREEMENT = 1e-10  # Hartree by which energies in the same basis set may differ


@dataclass(frozen=True)
class System:
    """An atom or a diatomic molecule whose Hartree-Fock energies were published.

    Attributes
    ----------
    name : str
    elements : tuple of str
        Of the one or two atoms.
    distance : float
        In Bohr; 0 for an atom.
    published : dict of str to float
        Energies in Hartree by their sources.
    bases : tuple of str
        In the order of falling energy.
    spin : int
        Number of unpaired electrons; the method is ROHF then, else RHF.
    limit : bool
        Whether the published energies are limits that no basis set reaches, or energies in the last of `bases`.
    """

    name: str
    elements: tuple
    distance: float
    published: dict
    bases: tuple = CC
    spin: int = 0
    limit: bool = True

    def mol(self, basis):
        atoms = [(element, (0.0, 0.0, n * self.distance)) for n, element in enumerate(self.elements)]
        return gto.M(atom=atoms, unit="Bohr", basis=basis_set(basis, set(self.elements)), spin=self.spin, verbose=0)

    def solver(self, basis):
        method = scf.ROHF if self.spin else scf.RHF
        return method(self.mol(basis)).set(conv_tol=CONVERGED, direct_scf_tol=1e-15, max_cycle=100)


SYSTEMS = [
    System("O", ("O",), 0.0, {"CFOUR": -74.812392791678, "MRCC": -74.812392791685},
           ("aug-cc-pvdz", "aug-cc-pvtz", "aug-cc-pvqz", "aug-cc-pv5z", "aug-cc-pv6z", "aug-cc-pv7z"), 2, False),
    System("He", ("He",), 0.0, {"HelFEM": -2.8616799956}),
    System("Be", ("Be",), 0.0, {"HelFEM": -14.5730231683}),
    System("Ne", ("Ne",), 0.0, {"HelFEM": -128.5470981094}, (*CC, "cc-pv8z")),
    System("H2", ("H", "H"), 1.4, {"HelFEM": -1.1336295702}, (*CC, "aug-mcc-pv7z", "aug-mcc-pv8z")),
    System("N2", ("N", "N"), 2.068, {"x2dhf": -108.99382564}, (*CC, "aug-cc-pv7z")),
    System("CO", ("C", "O"), 2.132, {"x2dhf": -112.79090719}, (*CC, "aug-cc-pv7z")),
    System("FH", ("F", "H"), 1.7328, {"x2dhf": -100.07080249}),
]  # fmt: skip


# ---- calculations ----------------------------------------------------------------------------------------------------


def jobs(args):
    """(number of AOs, system, basis) of all calculations that are small enough, in this order."""
    chosen = [s for s in SYSTEMS if args.systems is None or s.name in args.systems]
    found = [(s.mol(basis).nao, s, basis) for s in chosen for basis in s.bases]
    return sorted([job for job in found if job[0] <= args.max_ao], key=lambda job: job[0])


def calculate(nao, system, basis, backend):
    """A row of the CSV: the energy, and how far it is above each published one."""
    mf = md4.attach(system.solver(basis), backend=backend)
    begin = perf_counter()
    energy = mf.kernel()
    seconds = perf_counter() - begin
    source, published = next(iter(system.published.items()))
    mol = mf.mol
    return {
        "system": system.name, "distance": system.distance, "method": "ROHF" if system.spin else "RHF",
        "basis": basis, "l": max(mol.bas_angular(n) for n in range(mol.nbas)), "aos": nao,
        "energy": f"{energy:.12f}", "source": source, "published": published,
        "above": f"{energy - published:.3e}" if system.limit or basis == system.bases[-1] else "",
        "converged": int(mf.converged), "cycles": mf.cycles, "seconds": round(seconds, 2),
    }  # fmt: skip


def violations(rows):
    """What the rows of a system, in the order of its basis sets, say against their energies: sentences."""
    found = [f"{r['system']} in {r['basis']} did not converge." for r in rows if not int(r["converged"])]
    for system in SYSTEMS:
        mine = sorted((r for r in rows if r["system"] == system.name), key=lambda r: system.bases.index(r["basis"]))
        energies = [float(r["energy"]) for r in mine]
        lowest = min(system.published.values())
        for row, energy, before in zip(mine, energies, [0.0, *energies]):
            if energy > before:
                found.append(f"{system.name} in {row['basis']} is above the energy in the smaller set.")
            if system.limit and energy < lowest - SLACK:
                found.append(f"{system.name} in {row['basis']} is below the limit.")
            if not system.limit and row["basis"] == system.bases[-1]:
                off = min(abs(energy - value) for value in system.published.values())
                found += [f"{system.name} in {row['basis']} is off by {off:.1e}."] if off > AGREEMENT else []
    return found


def print_tables(rows):
    """Energies in the same basis set, and energies above the limits."""
    energies = {(r["system"], r["basis"]): r for r in rows}
    for system in (s for s in SYSTEMS if not s.limit):
        print(f"\n| {system.name} | AOs | energy / Hartree |\n|---|---|---|")
        for row in (energies[system.name, b] for b in system.bases if (system.name, b) in energies):
            print(f"| {row['basis']} | {row['aos']} | {row['energy']} |")
        for source, value in system.published.items():
            print(f"| {system.bases[-1]}, {source} | | {value} |")
    names = [basis.removeprefix("cc-pv").upper() for basis in CC]
    print(f"\n| system | R / Bohr | limit / Hartree | {' | '.join(names)} | beyond |\n|" + "---|" * (4 + len(names)))
    for system in (s for s in SYSTEMS if s.limit):
        source, value = next(iter(system.published.items()))
        found = {
            b: f"{float(energies[system.name, b]['above']):.1e}" for b in system.bases if (system.name, b) in energies
        }
        beyond = ", ".join(f"{found[b]} in {b}" for b in system.bases if b in found and b not in CC)
        cells = [system.name, f"{system.distance:g}" if system.distance else "", f"{value}, {source}"]
        print("| " + " | ".join([*cells, *(found.get(b, "") for b in CC), beyond]) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--systems", nargs="*", choices=[s.name for s in SYSTEMS], help="default: all")
    parser.add_argument("--max-ao", type=int, default=100, help="leaves larger calculations out (%(default)d)")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which none begins (%(default)g)")
    parser.add_argument("--csv", help="file for all rows")
    args = parser.parse_args()
    begin, rows = perf_counter(), []
    backend = md4.attach(SYSTEMS[0].solver("aug-cc-pvdz"), backend=args.backend).md4_jk.engine.backend
    print(describe(backend).replace(", one core", ""))  # all cores of the CPU
    for nao, system, basis in jobs(args):
        if perf_counter() - begin > args.limit:
            print(f"no time for {system.name} in {basis}, {nao} AOs")
            continue
        row = calculate(nao, system, basis, args.backend)
        print(f"{perf_counter() - begin:6.1f} s  {system.name:3} {basis:13} {row['energy']} Hartree", flush=True)
        rows.append(row)
        if args.csv:
            write_csv(args.csv, rows)
    print_tables(rows)
    wrong = violations(rows)
    print("\n" + ("\n".join(wrong) if wrong else "All energies fall with the basis set and stay above the limits."))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
