"""J and K of md4, of GPU4PySCF and of PySCF in one process: the same molecules, the same densities, one GPU.

    python bench/peers.py --csv bench/results/peers.csv         the table
    python bench/peers.py --systems 8waters/cc-pvqz             parts of it, or others
    python bench/peers.py --methods direct                      no density fitting
    python bench/peers.py --check                               errors of both against libcint, too
    python bench/peers.py --methods fitting --pyscf 50          PySCF's df.DF beside them, for tensors up to 50 GB

GPU4PySCF has to be installed; where it is not, the script says so and measures md4 alone. On a machine without
internet, `bench/lab/pack_peers.py` brings it:

    python bench/lab/pack_peers.py                                                  # here; then carry .gpu/peers.tar.xz
    export PYTHONPATH=$(python bench/lab/pack_peers.py --unpack /tmp/peers)         # there
    python bench/peers.py --limit 240 --csv peers.csv

Each row is one kind of build. 'direct' builds make all integrals anew, with direct_scf_tol 1e-13 for both. J alone is
made by the J engine of GPU4PySCF, and by that of md4. 'fitting' builds take the tensor from memory, and both get the
occupied orbitals of the density with it. The density is that of `bench/scf.py`; for fitting it is the closed shell of
its natural orbitals of the highest occupation. Auxiliary functions are the JKFIT set of the basis, or def2-universal.

Seconds are wall times from NumPy matrices to NumPy matrices: the median of some builds after one, which makes pairs and
bounds and compiles. There are --repeats of them, but no more than two once they have taken two seconds. 'Set-up' is the
time to make the integrals, the metric and the tensor of density fitting, after it was done once to compile. 'Ratio' is
GPU4PySCF's time over md4's, so above 1 md4 is faster. 'Difference' is the largest one of any element of the matrices,
in Hartree. 'Store' is where md4 keeps the tensor, and 'peak' the most device memory that it has held. --check contracts
libcint's integrals with the density, for blocks of a few pairs of shells, and gives the largest difference of each
program from that.

PySCF's df.DF runs on all cores (OMP_NUM_THREADS). It has nothing to compile, so that its set-up and its builds are
timed once each. --pyscf says of how many GB its tensor may be, because PySCF writes larger ones than its max_memory to
a disk; the script raises that to the memory of the machine.

GPU4PySCF computes shells above g on the CPU. Without cuTENSOR, it multiplies the tensors of density fitting by CuPy's
einsum instead; the line of versions tells which one it is.
"""

import argparse
import gc
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import pyscf
import scipy.linalg
from clock import describe, write_csv
from pyscf import df, lib
from pyscf.df.addons import make_auxmol
from scaling_devices import peak_of
from scf import TOLERANCE, sampled_error
from systems import NAMES, System, guess_density

import md4
from md4.gpu.context import cuda
from md4.support.memory import host_memory

TABLE = [
    "8waters/cc-pvtz", "27waters/cc-pvtz", "benzene/cc-pvqz", "64waters/cc-pvdz", "8waters/cc-pvqz",
    "vitaminc/def2-tzvpp", "tamoxifen/def2-tzvpp", "taxol/def2-svp",
]  # fmt: skip
FITTED = ["27waters/cc-pvtz", "8waters/cc-pvqz", "benzene/cc-pv5z", "tamoxifen/def2-tzvpp", "taxol/def2-tzvpp"]
METHODS = "direct", "fitting"
MATRICES = "J, K", "J", "K"
LONG = 2.0  # seconds of timed builds after which two are enough
NOT_RUN = "not run"


# programs -------------------------------------------------------------------------------------------------------------
# `direct` and `fitted` return {matrices: function without arguments that returns these as NumPy arrays}. What a program
# `compiles` is done once before it is timed. `facts` are further columns of its last fitting.


class MD4:
    """md4 with one of its backends, 'cuda' or 'cpu'."""

    compiles = True

    def __init__(self, backend):
        self.backend, self.fit = backend, None

    def direct(self, mol, dm):
        jk = md4.JK(mol, backend=self.backend, direct_scf_tol=TOLERANCE, progress=False)
        return self.calls(jk, dm)

    def fitted(self, mol, dm, auxbasis):
        """Of a density with its orbitals as PySCF tags it."""
        self.fit = md4.DF(mol, auxbasis=auxbasis, backend=self.backend).build()
        return self.calls(self.fit, dm)

    def facts(self):
        """The store, and the peak of device memory in GB."""
        if self.fit is None:
            return {}
        peak = peak_of(self.fit._md4_fitting().engine.backend)
        return {"store": self.fit.store, "peak_gb": "" if np.isnan(peak) else peak / 1e9}

    @staticmethod
    def calls(maker, dm):
        return {
            "J, K": lambda: maker.get_jk(dm),
            "J": lambda: maker.get_jk(dm, with_k=False)[:1],
            "K": lambda: maker.get_jk(dm, with_j=False)[1:],
        }

    def release(self):
        """Gives back device memory, also what Numba would free later."""
        self.fit = None
        gc.collect()
        if self.backend != "cpu":
            cuda.current_context().deallocations.clear()


class PySCF:
    """PySCF's density fitting on the CPU."""

    compiles, text = False, f"PySCF {pyscf.__version__} on {lib.num_threads()} threads"

    def fitted(self, mol, dm, auxbasis):
        fit = df.DF(mol, auxbasis=auxbasis)
        fit.max_memory = host_memory() / 1e6
        return MD4.calls(fit.build(), dm)

    def facts(self):
        return {}

    def release(self):
        """Gives back memory."""
        gc.collect()


class GPU4PySCF:
    """GPU4PySCF, which is imported here: anything may be raised where it does not fit the machine."""

    compiles = True

    def __init__(self):
        import cupy
        import gpu4pyscf.df
        import gpu4pyscf.scf
        from gpu4pyscf.lib import cupy_helper, cutensor

        self.cupy, self.scf, self.df, self.tagged = cupy, gpu4pyscf.scf, gpu4pyscf.df, cupy_helper.tag_array
        products = "cuTENSOR" if cutensor.contract_engine is None else f"{cutensor.contract_engine}, no cuTENSOR"
        self.text = f"GPU4PySCF {gpu4pyscf.__version__}, CuPy {cupy.__version__}, products of tensors by {products}"

    def direct(self, mol, dm):
        mf = self.scf.RHF(mol).set(direct_scf_tol=TOLERANCE)
        return {
            "J, K": lambda: mf.get_jk(mol, dm, hermi=1),
            "J": lambda: (mf.get_j(mol, dm, hermi=1),),
            "K": lambda: (mf.get_k(mol, dm, hermi=1),),
        }

    def fitted(self, mol, dm, auxbasis):
        """As `MD4.fitted`. GPU4PySCF sees tags of CuPy arrays only."""
        fit = self.df.DF(mol, auxbasis=auxbasis).build()
        self.cupy.cuda.Device().synchronize()

        def build(with_j=True, with_k=True):
            send = self.cupy.asarray
            sent = self.tagged(send(np.asarray(dm)), mo_coeff=send(dm.mo_coeff), mo_occ=send(dm.mo_occ))
            found = fit.get_jk(sent, hermi=1, with_j=with_j, with_k=with_k)
            return [v.get() for v, wanted in zip(found, (with_j, with_k)) if wanted]

        return {"J, K": build, "J": lambda: build(with_k=False), "K": lambda: build(with_j=False)}

    def facts(self):
        return {}

    def release(self):
        """Gives back device memory, and pinned memory."""
        gc.collect()
        self.cupy.get_default_memory_pool().free_all_blocks()
        self.cupy.get_default_pinned_memory_pool().free_all_blocks()


def find_peer():
    """(GPU4PySCF, its versions), or (None, why not)."""
    try:
        peer = GPU4PySCF()
    except Exception as error:  # an installation that does not fit the machine fails in many ways
        return None, f"GPU4PySCF: {NOT_RUN} ({reason(error)})"
    return peer, peer.text


def reason(error):
    """An exception in a line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"


# measurements ---------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What one program needs for one kind of build."""

    seconds: float
    spread: float
    setup: float | str
    matrices: Any
    facts: dict


def closed_shell(mol, dm):
    """The density of doubly occupied natural orbitals, as many as there are pairs of electrons, tagged with them."""
    overlap = mol.intor("int1e_ovlp")
    count = mol.nelectron // 2
    orbitals = scipy.linalg.eigh(overlap @ dm @ overlap, overlap)[1][:, -count:]
    return lib.tag_array(2 * orbitals @ orbitals.T, mo_coeff=orbitals, mo_occ=np.full(count, 2.0))


def auxiliary(basis):
    """Name of the auxiliary basis for J and K."""
    return "def2-universal-jkfit" if basis.startswith("def2") else f"{basis}-jkfit"


def timed(call, repeats, first=True):
    """(median, spread as in `clock.median_seconds`, result) of a call, after a `first` one."""
    result, times = call() if first else None, []
    while len(times) < repeats and (len(times) < 2 or sum(times) < LONG):
        begin = perf_counter()
        result = call()
        times.append(perf_counter() - begin)
    median = float(np.median(times))
    return median, float(np.ptp(times)) / median, result


def results(program, method, problem, repeats):
    """{matrices: Result} of a program, or {} and why it has none."""
    calls = None
    try:
        setup = ""
        if method == "direct":
            calls = program.direct(*problem)
        else:
            for _ in range(1 + program.compiles):
                calls = None
                program.release()
                begin = perf_counter()
                calls = program.fitted(*problem)
                setup = perf_counter() - begin
        found = {}
        for name in MATRICES:
            seconds, spread, matrices = timed(calls[name], repeats if program.compiles else 1, program.compiles)
            found[name] = Result(seconds, spread, setup, [np.asarray(v) for v in matrices], {})
        for result in found.values() if method == "fitting" else ():
            result.facts = program.facts()
        return found, ""
    except Exception as error:  # another program may raise anything; the other rows do not need this one
        return {}, reason(error)
    finally:
        calls = None
        program.release()


def measure(system, method, ours, peer, args):
    """The rows of a system, one for each kind of build."""
    mol = system.mol(args.seed)
    dm, auxbasis = guess_density(mol), auxiliary(system.basis)
    if method == "fitting":
        dm = closed_shell(mol, dm)
    problem = (mol, dm) if method == "direct" else (mol, dm, auxbasis)
    mine, trouble = results(ours, method, problem, args.repeats)
    notes = [f"md4: {trouble}"] if trouble else []
    theirs, trouble = results(peer, method, problem, args.repeats) if peer else ({}, NOT_RUN)
    notes += [f"GPU4PySCF: {trouble}"] if trouble else []
    on_cpu, trouble = {}, ""
    if method == "fitting" and tensor_gb(mol, auxbasis) <= args.pyscf:
        on_cpu, trouble = results(PySCF(), method, problem, 1)
    notes += [f"PySCF: {trouble}"] if trouble else []
    for name in MATRICES:
        row = {
            "system": system.name, "basis": system.basis, "nao": mol.nao,
            "lmax": max(mol.bas_angular(n) for n in range(mol.nbas)),
            "naux": make_auxmol(mol, auxbasis).nao if method == "fitting" else "", "method": method, "matrices": name,
        }  # fmt: skip
        row |= columns("", mine.get(name)) | columns("peer_", theirs.get(name)) | {"ratio": "", "difference": ""}
        row |= columns("pyscf_", on_cpu.get(name)) | {"pyscf_difference": "", "store": "", "peak_gb": ""}
        row |= mine[name].facts if name in mine else {}
        if name in mine and name in theirs:
            row["ratio"] = theirs[name].seconds / mine[name].seconds
            row["difference"] = largest_difference(mine[name], theirs[name])
        if name in mine and name in on_cpu:
            row["pyscf_difference"] = largest_difference(mine[name], on_cpu[name])
        checked = args.check and method == "direct" and name == "J, K"
        row["error"], row["peer_error"] = (
            sampled_error(mol, dm, *found[name].matrices) if checked and found else "" for found in (mine, theirs)
        )
        yield row | {"note": "; ".join(notes)}


def columns(prefix, result):
    """A program's columns of the CSV."""
    cells = ("", "", "") if result is None else (result.seconds, result.spread, result.setup)
    return dict(zip([prefix + name for name in ("seconds", "spread", "setup")], cells))


def tensor_gb(mol, auxbasis):
    """Size of PySCF's tensor."""
    return 4e-9 * make_auxmol(mol, auxbasis).nao * mol.nao * (mol.nao + 1)


def largest_difference(one, other):
    """That of the matrices of two results."""
    return max(difference(*pair) for pair in zip(one.matrices, other.matrices))


def difference(a, b):
    """Largest difference of two matrices, NaN if an element is NaN."""
    return float(abs(a - b).max())


# output ---------------------------------------------------------------------------------------------------------------

HEADER = """
| system | basis | nao | naux | builds | matrices | md4 s | ± % | set-up s | GPU4PySCF s | ± % | set-up s | ratio | \
difference | error | GPU4PySCF's | PySCF s | set-up s | difference | store | peak GB |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


def line(row):
    """A row of the Markdown table."""
    cells = [row[name] for name in ("system", "basis", "nao", "naux", "method", "matrices")]
    for prefix in ("", "peer_"):
        missing = row[f"{prefix}seconds"] == ""
        cells += [NOT_RUN if missing else f"{row[f'{prefix}seconds']:.3g}"]
        cells += ["" if missing else f"{100 * row[f'{prefix}spread']:.0f}", number(row[f"{prefix}setup"], ".3g")]
    cells += [number(row["ratio"], ".2f")]
    cells += [number(row[name], ".1e") for name in ("difference", "error", "peer_error")]
    cells += [number(row[name], ".3g") for name in ("pyscf_seconds", "pyscf_setup")]
    cells += [number(row["pyscf_difference"], ".1e"), row["store"], number(row["peak_gb"], ".1f")]
    return f"| {' | '.join(map(str, cells))} |"


def number(value, form):
    return "" if value == "" else format(value, form)


def run_all(jobs, ours, peer, args):
    """All rows, printed as they come; no system begins after the limit of time."""
    rows, begin = [], perf_counter()
    print(HEADER)
    for system, method in jobs:
        if perf_counter() - begin > args.limit:
            print(f"no time for {system.name} {system.basis}, {method}")
            continue
        found = list(measure(system, method, ours, peer, args))
        rows += [row | {"machine": args.machine} for row in found]
        print(*map(line, found), sep="\n", flush=True)
        if found[0]["note"] not in ("", f"GPU4PySCF: {NOT_RUN}"):
            print(f"{system.name} {system.basis}, {method}: {found[0]['note']}", flush=True)
        if args.csv:
            write_csv(args.csv, rows)
    return rows


def chosen(args):
    """[(system, method)]: direct builds first."""
    fitted = args.systems or FITTED
    if "fitting" in args.methods and not hasattr(md4, "DF"):
        print(f"density fitting: {NOT_RUN}, as this md4 has no md4.DF")
        fitted = []
    names = {"direct": args.systems or TABLE, "fitting": fitted}
    return [(System.parse(name), method) for method in METHODS if method in args.methods for name in names[method]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", help=NAMES)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--repeats", type=int, default=5, help="timed builds at most (%(default)s)")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which no system begins (%(default)g)")
    parser.add_argument(
        "--pyscf", type=float, default=0, metavar="GB", help="PySCF's df.DF beside them, for tensors up to so many GB"
    )
    parser.add_argument("--check", action="store_true", help="errors of direct builds against libcint, in some blocks")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--backend", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--seed", type=int, default=0, help="of the waters' orientations")
    args = parser.parse_args()
    jobs = chosen(args)
    peer, text = find_peer()
    backend = md4.JK(System("water", "sto-3g").mol(), backend=args.backend).engine.backend
    args.machine = f"{describe(backend).replace(', one core', '')}, {text}"  # all cores of the CPU
    args.machine += f", {PySCF.text}" if args.pyscf else ""
    print(args.machine)
    run_all(jobs, MD4(backend.name), peer, args)


if __name__ == "__main__":
    main()
