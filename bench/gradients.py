"""Forces beside a build of J and K of the same molecule: md4 and GPU4PySCF on one GPU, and PySCF on the CPU.

    python bench/gradients.py --csv bench/results/gradients.csv     the table
    python bench/gradients.py --systems 27waters/cc-pvtz            parts of it, or others
    python bench/gradients.py --kinds jk j                          J without K as well, as for functionals such as PBE
    python bench/gradients.py --kinds matrices                      the same forces from derivatives of J and K
    python bench/gradients.py --fitted                              by density fitting
    python bench/gradients.py --backend cpu --no-peer --pyscf --systems water/cc-pvtz       without a GPU

GPU4PySCF has to be installed; `bench/peers.py` says how it comes to a machine without internet. Each system has a
process of its own, which --limit-s ends. What is measured stands on stderr at once, and in the row if the process ends.

'Gradient' is that of the two-electron energy D.J[D]/2 - D.K[D]/4 at a fixed density, or of D.J[D]/2 (kind j), by
`JK.gradient`, and by `jk_energy_per_atom` of GPU4PySCF's gradients, of which its forces are made. 'Build' is one of J
and K, or of J, by the objects that make the gradients, too. They keep pairs, bounds and H matrices. Seconds are wall
times from a NumPy density to NumPy results: the median of --repeats calls, but of no more than two once they have taken
two seconds. Two calls come before; 'first' is the first one, which makes what is kept, and compiles where the cache is
empty. The density is that of `bench/scf.py`, in each call multiplied by another factor near 1.

'Ratio' is md4's gradient over md4's build, 'speed-up' GPU4PySCF's gradient over md4's. 'Difference' is the largest one
of any component from md4's forces, in Hartree/Bohr. 'Tolerance' is md4's own, 'bound' and 'estimate' are what md4 says
of the error by the quartets that it left out (`Statistics`). By density fitting, a build is one of `md4.DF` and of
GPU4PySCF's `DF`, whose tensors are there, the density is that of `bench/peers.py`, which both are given with its
orbitals, and there are no bounds. GPU4PySCF has the direct_scf_tol of both builds, 1e-13,
and no forces of shells above g: 'none'. With the kind 'matrices' md4's forces are made of `JK.derivative_jk`, which
has no bounds, and GPU4PySCF is left out. PySCF (--pyscf) is called once, for its derivatives of J and K.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numba
import numpy as np
from clock import describe, write_csv
from peers import LONG, MD4, NOT_RUN, PySCF, auxiliary, closed_shell, difference, find_peer, number, reason
from pyscf import grad, lib
from scf import TOLERANCE
from systems import NAMES, System, guess_density

import md4
from md4.contract.fitting_gradient import FittingGradient
from md4.contract.gradient import FACTOR

SYSTEMS = [
    "vitaminc/def2-tzvpp", "27waters/cc-pvtz", "64waters/cc-pvdz", "benzene/cc-pvqz", "8waters/cc-pvqz",
    "benzene/cc-pv5z", "tamoxifen/def2-tzvpp",
]  # fmt: skip
FITTED_SYSTEMS = ["27waters/cc-pvtz", "8waters/cc-pvqz"]
EXCHANGE = {"jk": 1.0, "j": 0.0, "matrices": 1.0}  # kinds, with the factor of the exchange energy
STEP = 1e-3  # by which the factors of the densities differ
TIMED = "build", "gradient", "peer_build", "peer_gradient"
COLUMNS = (
    "system", "basis", "nao", "kind", *(name + of for name in TIMED for of in ("", "_spread", "_first")), "ratio",
    "speedup", "difference", "error_bound", "error_estimate", "tolerance", "pyscf", "pyscf_difference", "note",
    "machine",
)  # fmt: skip


def by_md4(jk, kind):
    """(build, gradient), functions of a density."""

    def gradient(dm):
        if kind == "matrices":
            return forces_of(jk.mol, dm, *jk.derivative_jk(dm))
        return jk.gradient(dm, exchange=EXCHANGE[kind])

    return lambda dm: jk.get_jk(dm, with_k=kind != "j"), gradient


def by_gpu4pyscf(mf, kind):
    """As `by_md4`."""
    build = mf.get_jk if kind == "jk" else mf.get_j
    gradients = mf.Gradients()
    return lambda dm: build(mf.mol, dm, hermi=1), lambda dm: gradients.jk_energy_per_atom(dm, 1.0, EXCHANGE[kind])


def fitted_by_md4(fit, kind):
    """As `by_md4`, of an `md4.DF`; the forces are those of the two-electron part of `attach(mf).nuc_grad_method()`."""

    def gradient(dm):
        found = FittingGradient(fit._md4_fitting()).run(
            np.asarray(dm), 1.0, EXCHANGE[kind], [(dm.mo_coeff, dm.mo_occ)], tolerance=FACTOR * TOLERANCE
        )
        forces = np.zeros((fit.mol.natm, 3))
        for mol, of_shells, basis in zip((fit.mol, fit.auxmol), found, fit._md4_fitting().three.basis.parts):
            ends = mol.aoslice_by_atom()[:, 3]
            np.add.at(forces, np.searchsorted(ends, basis.ao_loc[:-1], side="right"), of_shells)
        return forces

    return lambda dm: fit.get_jk(dm, with_k=kind == "jk"), gradient


def fitted_by_gpu4pyscf(peer, mf, kind):
    """As `by_md4`. GPU4PySCF sees tags of CuPy arrays only, and drops its tensor for a gradient."""
    gradients, with_k = mf.Gradients(), kind == "jk"
    mf.with_df.build(build_cderi=False)

    def sent(dm):
        send = peer.cupy.asarray
        return peer.tagged(send(np.asarray(dm)), mo_coeff=send(dm.mo_coeff), mo_occ=send(dm.mo_occ))

    def build(dm):
        found = mf.with_df.get_jk(sent(dm), hermi=1, with_k=with_k)
        return [v.get() for v, wanted in zip(found, (True, with_k)) if wanted]

    return build, lambda dm: gradients.jk_energy_per_atom(sent(dm), 1.0, EXCHANGE[kind], hermi=1)


def scaled(dm, factor):
    """A density times a factor, as its orbitals are if it has some."""
    made = factor * np.asarray(dm)
    return lib.tag_array(made, mo_coeff=dm.mo_coeff, mo_occ=factor * dm.mo_occ) if hasattr(dm, "mo_occ") else made


def forces_by_pyscf(mol, dm, kind):
    """Shape (natm, 3), in Hartree/Bohr."""
    gradients = grad.RHF(mol.RHF())
    return forces_of(mol, dm, *(gradients.get_jk(mol, dm) if kind != "j" else (gradients.get_j(mol, dm), 0.0)))


def forces_of(mol, dm, vj, vk):
    """The same from derivatives of J and K, shapes (3, nao, nao)."""
    of_aos = 2 * np.einsum("xij,ij->xi", vj - vk / 2, dm)
    return np.array([of_aos[:, first:last].sum(axis=1) for *_, first, last in mol.aoslice_by_atom()])


def seconds(call, dm):
    """(wall time, result) of a call."""
    begin = perf_counter()
    result = call(dm)
    return perf_counter() - begin, result


def timed(name, call, dm, repeats):
    """(columns of a call that start with its `name`, its result)."""
    first, result = seconds(call, dm)
    seconds(call, scaled(dm, 1 + STEP))
    times = []
    while len(times) < repeats and (len(times) < 2 or sum(times) < LONG):
        times.append(seconds(call, scaled(dm, 1 + STEP * (2 + len(times))))[0])
    median = float(np.median(times))
    return {name: median, f"{name}_spread": float(np.ptp(times)) / median, f"{name}_first": first}, result


class Measurement:
    """By kind, the rows of a system, '' where nothing is measured yet, and md4's forces, shape (natm, 3)."""

    def __init__(self, system, args):
        self.args, self.mol, self.forces = args, system.mol(), {}
        self.dm, self.auxbasis = guess_density(self.mol), auxiliary(system.basis) if args.fitted else None
        if args.fitted:
            self.dm = closed_shell(self.mol, self.dm)
        facts = {"system": system.name, "basis": system.basis, "nao": self.mol.nao}
        self.rows = {kind: dict.fromkeys(COLUMNS, "") | facts | {"kind": kind} for kind in args.kinds}

    def tell(self, kind, columns):
        """Adds columns to a row, says so, and keeps all rows for the process that waits for them."""
        self.rows[kind] |= columns
        shown = (f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in columns.items() if k != "machine")
        print(f"{self.rows[kind]['system']} {self.rows[kind]['basis']} {kind}:", *shown, file=sys.stderr, flush=True)
        if self.args.inside:
            new = self.args.inside.with_suffix(".new")
            new.write_text(json.dumps(list(self.rows.values())))
            new.replace(self.args.inside)

    def measure(self, peer, peer_text):
        """All programs, one after the other; each gives back its memory before the next one begins."""
        backend = self.measure_md4(peer_text)
        MD4(backend).release()
        if peer:
            self.measure_peer(peer)
        for kind in self.args.kinds if self.args.pyscf else ():
            time, forces = seconds(lambda dm, kind=kind: forces_by_pyscf(self.mol, dm, kind), self.dm)
            self.tell(kind, {"pyscf": time, "pyscf_difference": difference(forces, self.forces[kind])})

    def measure_md4(self, peer_text):
        """Returns the name of the backend."""
        if self.args.fitted:
            jk = md4.DF(self.mol, self.auxbasis, backend=self.args.backend).build()
            backend = jk._md4_fitting().engine.backend
        else:
            jk = md4.JK(self.mol, backend=self.args.backend, direct_scf_tol=TOLERANCE, progress=False)
            backend = jk.engine.backend
        machine = f"{describe(backend).replace(', one core', '')}, {numba.get_num_threads()} threads, {peer_text}"
        machine += f", {PySCF.text}" if self.args.pyscf else ""
        for kind in self.args.kinds:
            build, gradient = (fitted_by_md4 if self.args.fitted else by_md4)(jk, kind)
            columns = timed("build", build, self.dm, self.args.repeats)[0]
            self.tell(kind, columns | {"machine": machine})
            columns, self.forces[kind] = timed("gradient", gradient, self.dm, self.args.repeats)
            tolerance = TOLERANCE if kind == "matrices" else FACTOR * TOLERANCE
            columns |= {"ratio": columns["gradient"] / self.rows[kind]["build"], "tolerance": tolerance}
            if not self.args.fitted and kind != "matrices":
                columns |= {"error_bound": jk.stats.error_bound, "error_estimate": jk.stats.error_estimate}
            self.tell(kind, columns)
        return backend.name

    def measure_peer(self, peer):
        """GPU4PySCF, which may raise anything; then its columns are empty, and the note says why."""
        mf = peer.scf.RHF(self.mol).set(direct_scf_tol=TOLERANCE)
        mf = mf.density_fit(auxbasis=self.auxbasis) if self.args.fitted else mf
        for kind in [kind for kind in self.args.kinds if kind != "matrices"]:
            try:
                build, gradient = fitted_by_gpu4pyscf(peer, mf, kind) if self.args.fitted else by_gpu4pyscf(mf, kind)
                columns, forces = timed("peer_gradient", gradient, self.dm, self.args.repeats)
                columns |= {"speedup": columns["peer_gradient"] / self.rows[kind]["gradient"]}
                self.tell(kind, columns | {"difference": difference(forces, self.forces[kind])})
                self.tell(kind, timed("peer_build", build, self.dm, self.args.repeats)[0])
            except Exception as error:
                self.tell(kind, {"note": f"GPU4PySCF: {reason(error)}"})


HEADER = """
| system | basis | nao | of | md4: build s | gradient s | ± % | ratio | first build s | first gradient s | \
GPU4PySCF: build s | gradient s | ± % | speed-up | difference | bound | estimate | tolerance | PySCF s | difference |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""
FORMS = {
    "build": ".3g", "gradient": ".3g", "gradient_spread": ".0%", "ratio": ".2f", "build_first": ".3g",
    "gradient_first": ".3g", "peer_build": ".3g", "peer_gradient": ".3g", "peer_gradient_spread": ".0%",
    "speedup": ".1f", "difference": ".1e", "error_bound": ".1e", "error_estimate": ".1e", "tolerance": ".0e",
    "pyscf": ".3g", "pyscf_difference": ".1e",
}  # fmt: skip


def line(row):
    """A row of the Markdown table."""
    cells = {name: number(row[name], form).rstrip("%") for name, form in FORMS.items()}
    cells["peer_gradient"] = cells["peer_gradient"] or ("none" if row["note"] else NOT_RUN)
    return f"| {' | '.join([*(str(row[name]) for name in COLUMNS[:4]), *cells.values()])} |"


def rows_of(name, argv, limit):
    """The rows of a system, by a process of its own, as far as it came."""
    with tempfile.TemporaryDirectory(prefix="md4-gradients-") as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, __file__, *argv, "--systems", name, "--inside", str(file)]
        try:
            status = subprocess.run(command, timeout=limit, check=False).returncode
        except subprocess.TimeoutExpired:
            status = f"none within {limit:g} s"
        if status:
            print(f"{name}: exit status {status}", flush=True)
        return json.loads(file.read_text()) if file.exists() else []


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", help=NAMES)
    parser.add_argument("--kinds", nargs="+", choices=[*EXCHANGE], default=["jk"], help="J and K, J alone, or matrices")
    parser.add_argument("--fitted", action="store_true", help="by density fitting, with the JKFIT set of the basis")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls at most (%(default)s)")
    parser.add_argument("--limit-s", type=float, default=180, help="seconds of a system at most (%(default)g)")
    parser.add_argument("--no-peer", action="store_true", help="without GPU4PySCF")
    parser.add_argument("--pyscf", action="store_true", help="PySCF's forces on the CPU, too")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--backend", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if args.fitted and args.pyscf:
        parser.error("--pyscf is for forces without density fitting.")
    if args.fitted and "matrices" in args.kinds:
        parser.error("matrices are made without density fitting.")
    args.systems = args.systems or (FITTED_SYSTEMS if args.fitted else SYSTEMS)
    systems, rows = [System.parse(name) for name in args.systems], []
    if args.inside:
        peer = (None, f"GPU4PySCF: {NOT_RUN}") if args.no_peer else find_peer()
        return Measurement(systems[0], args).measure(*peer)
    for name in args.systems:
        found = rows_of(name, argv, args.limit_s)
        if found and not rows:
            print(found[0]["machine"], HEADER, sep="\n")
        rows += found
        for text in [*map(line, found), *(row["note"] for row in found if row["note"])]:
            print(text, flush=True)
        if args.csv and rows:
            write_csv(args.csv, rows)
    if not rows:
        raise SystemExit("nothing was measured.")


if __name__ == "__main__":
    main()
