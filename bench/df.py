"""Density fitting: rates of the classes (ab|P) of integrals over three centres, and the parts of its set-up.

    python bench/df.py                          classes from (ss|s) to (ii|k), and molecules
    python bench/df.py 'pp|d' 'ff|g' --K 1 25   some classes
    python bench/df.py --plans 'dd|f'           every plan of a class, the one that md4 takes first
    python bench/df.py --systems 8waters,cc-pvqz,cc-pvqz-jkfit taxol.xyz,def2-tzvpp,def2-universal-jkfit

A timed call of a class makes the H matrices, r and both products, and leaves the integrals in device memory: as a
`block`, quartet by quartet, or as a part of the `matrix` of `md4.contract.three_centre.ThreeCentre`. Useful FLOP are
those of both products in the cheaper order, with the (l + 1)(l + 2) / 2 Hermite functions of degree l of a single
shell. The limit of a class is the larger of its useful FLOP at the measured peak and its output at the measured copy
bandwidth; all are measured in the same run. Of a molecule, what is timed is `ThreeCentre` itself (lists and Schwarz
bounds), the compilation of kernels, all columns of the matrix (for the first time, and again), and (P|Q). Columns that
exceed the memory for them (--gb) are made in turns, in the same place.
"""

import argparse
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from pathlib import Path
from time import perf_counter

import numpy as np
from cases import SPLITS, side
from clock import ROOT, median_seconds, synchronize, wall_seconds, write_csv
from common import Output, add_backend, nans, poison, settle
from eri import machine_of

import md4
from md4.contract.three_centre import ThreeCentre, block_shape
from md4.method.angular import ncart, nherm
from md4.support.display import SPDF

CLASSES = (
    "ss|s", "ss|d", "ps|p", "ps|f", "pp|s", "pp|p", "pp|d", "pp|f", "ds|d", "dp|d", "dp|f", "dd|d", "dd|f", "dd|g",
    "fp|f", "fd|f", "fd|g", "ff|d", "ff|g", "gs|g", "gd|g", "gf|g", "gg|g", "gg|h", "hh|h", "hh|i", "ii|s", "ii|i",
    "ii|k",
)  # fmt: skip
SYSTEMS = (
    "27waters,cc-pvtz,cc-pvtz-jkfit", "8waters,cc-pvqz,cc-pvqz-jkfit", "benzene,cc-pv5z,cc-pv5z-jkfit",
    "tamoxifen.xyz,def2-tzvpp,def2-universal-jkfit", "taxol.xyz,def2-tzvpp,def2-universal-jkfit",
)  # fmt: skip
TARGETS = ("block", "matrix")
# Rough rates of each backend, seconds of a batch and bytes of its results, as in `cases.ROUGH`; most single shells.
ROUGH = {"cuda": (2e-11, 2e13, 2e12, 0.05, 4e9), "cpu": (2e-7, 1e10, 1e9, 0.1, 1e8)}
MOST_SINGLES = 512
COLUMNS = (
    "class     K    target  plan                          triples  seconds    ± %  triples/s  TFLOP/s  % peak  TB/s out"
    "  % copy  % limit  bound     error"
)


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", help="as pp|d; default: a table, or none with --systems")
    parser.add_argument("--K", nargs="+", metavar="K", default=["1"], help="1, 5 (= 5x1), 25 (= 5x5), or PAIRxSINGLE")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--plans", action="store_true", help="every plan (GPU)")
    parser.add_argument("--pairs", type=int, help="shell pairs instead of an automatic number")
    parser.add_argument("--singles", type=int, help="single shells instead of an automatic number")
    parser.add_argument("--systems", nargs="*", metavar="NAME,BASIS,AUXBASIS", help="default: a table, or none")
    parser.add_argument("--molecules", type=Path, default=ROOT / "bench" / "molecules", help="folder of xyz files")
    parser.add_argument("--cutoff", type=float, default=1e-12, help="of pairs of a molecule (%(default)s)")
    parser.add_argument("--gb", type=float, default=60.0, help="memory for columns (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls (%(default)s)")
    parser.add_argument("--csv", metavar="FILE", help="rows of classes; those of molecules go to *.systems.csv")
    add_backend(parser)
    args = settle(parser.parse_args(argv))
    everything = not args.classes and args.systems is None
    args.classes, args.systems = args.classes or (CLASSES if everything else ()), args.systems or []
    args.systems = SYSTEMS if everything else args.systems
    return args


# classes --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FewCase:
    """A class (ab|P) with its contraction.

    Attributes
    ----------
    l : tuple of int, length 3
    k_pair, k_single : int
        Primitive pairs of each pair, and primitives of each single shell.
    """

    l: tuple
    k_pair: int = 1
    k_single: int = 1

    @classmethod
    def parse(cls, name, k="1"):
        """From 'pp|d' and '1', '5', '25' or 'PAIRxSINGLE'."""
        letters = name.strip("() ").replace("|", "")
        if len(letters) != 3 or any(x not in SPDF for x in letters):
            raise SystemExit(f"{name!r} is no class of three shells; write it as pp|d.")
        split = SPLITS.get(k) or tuple(int(n) for n in k.split("x"))
        if len(split) != 2:
            raise SystemExit(f"K = {k!r} is unknown; use {', '.join(SPLITS)} or PAIRxSINGLE, as in 1x5.")
        return cls(tuple(SPDF.index(x) for x in letters), *split)

    @property
    def name(self):
        a, b, c = (SPDF[l] for l in self.l)
        return f"{a}{b}|{c}"

    @property
    def nab(self):
        return (2 * self.l[0] + 1) * (2 * self.l[1] + 1)

    @property
    def nc(self):
        return 2 * self.l[2] + 1

    @property
    def output_bytes(self):
        """Bytes of the integrals of one pair with one single shell."""
        return 8 * self.nab * self.nc

    @property
    def flops(self):
        """Useful FLOP of one pair with one single shell: both products in the cheaper order."""
        np_, nq, k = nherm(self.l[0] + self.l[1]), ncart(self.l[2]), self.k_pair * self.k_single
        pair_first = 2 * self.nab * nq * (np_ * k + self.nc * self.k_single)
        single_first = 2 * self.nc * np_ * (nq * k + self.nab * self.k_pair)
        return min(pair_first, single_first)

    def counts(self, backend):
        """(pairs, single shells) of a batch that fills the machine."""
        primitive, rate, bandwidth, seconds, size = ROUGH[backend]
        k, r_bytes = self.k_pair * self.k_single, 8 * nherm(sum(self.l))
        estimate = k * (primitive + 2 * r_bytes / bandwidth) + self.flops / rate + self.output_bytes / bandwidth
        triples = min(size / self.output_bytes, seconds / estimate)
        singles = max(2, min(MOST_SINGLES, int(sqrt(triples))))
        return max(4, int(triples / singles)), singles


class Lists:
    """Random shells of a case: pairs and single shells, prepared."""

    def __init__(self, case, counts, backend, seed=0):
        rng = np.random.default_rng([seed, *case.l, case.k_pair, case.k_single])
        self.case, (npair, nsingle) = case, counts
        one, self.pairs = side(rng, *case.l[:2], case.k_pair, npair)
        shape = nsingle, case.k_single
        exponents, coefficients = rng.uniform(0.3, 3.0, shape), rng.uniform(0.2, 1.0, shape)
        centres = rng.uniform(-1.0, 1.0, (nsingle, 3))
        two = md4.Basis.from_arrays([case.l[2]] * nsingle, exponents, coefficients, centres)
        self.basis, self.singles = md4.Basis.joined([one, two]), len(one) + np.arange(nsingle)
        self.engine = md4.Engine(self.basis, backend=backend)
        self.bra, self.ket = self.engine.prepare(self.pairs), self.engine.prepare(self.singles)

    def plans(self, target):
        """All plans on a GPU, the one that is taken first."""
        from md4.gpu.paths import plans

        return list(plans(self.engine.backend.context.unit, self.bra.pairs, self.ket.pairs, target == "matrix"))


class Run:
    """Lists and the memory for their integrals, as a block or as a matrix."""

    def __init__(self, lists, target, output):
        self.lists, self.case, self.target, self.backend = lists, lists.case, target, lists.engine.backend
        shape = block_shape(lists.bra, lists.ket)
        if target == "block":
            self.out = output.shaped(shape)
            self.block = self.backend.block(self.out)
        else:
            self.out = output.shaped((shape[1] * self.case.nc, shape[0] * self.case.nab))
            self.block = self.backend.matrix_block(self.out, 0, 0, shape)

    def evaluate(self):
        """What is timed: H matrices, r, both products."""
        self.lists.bra.drop()
        self.lists.ket.drop()
        self.lists.engine.evaluate(self.lists.bra, self.lists.ket, self.block)

    def plan_name(self):
        """The plan that is taken."""
        return str(self.backend.plan(self.lists.bra, self.lists.ket, self.block))

    def integrals(self, n, k):
        """(ab|P) of pair n and single shell k from the result, shape (nab, nc)."""
        case = self.case
        if self.target == "block":
            size = case.nab * case.nc
            first = (n * len(self.lists.singles) + k) * size
            return on_host(self.out.reshape(self.out.size)[first : first + size]).reshape(case.nab, case.nc)
        rows = on_host(self.out[k * case.nc : (k + 1) * case.nc])
        return rows[:, n * case.nab : (n + 1) * case.nab].T

    def error(self):
        """Largest error of some blocks over the largest element of each, by the CPU; NaN if something is unwritten."""
        synchronize(self.backend)
        if nans(self.out.reshape(self.out.size), self.backend.name):
            return np.nan
        cpu, found = md4.Engine(self.lists.basis, backend="cpu"), []
        pairs, singles = self.lists.pairs, self.lists.singles
        for n, k in ((0, 0), (len(pairs) - 1, len(singles) - 1), (len(pairs) // 2, len(singles) // 3)):
            want = cpu.compute(pairs[n : n + 1], singles[k : k + 1]).reshape(self.case.nab, self.case.nc)
            found.append(abs(self.integrals(n, k) - want).max() / abs(want).max())
        return max(found)


def on_host(array):
    """A part of a result as an ndarray."""
    return array.copy_to_host() if hasattr(array, "copy_to_host") else array


def class_row(run, machine, args):
    """One row of the table of classes."""
    case = run.case
    poison(run.out.reshape(run.out.size), run.backend.name)
    seconds, spread = median_seconds(run.backend, run.evaluate, args.repeats, 2)
    npair, nsingle = len(run.lists.pairs), len(run.lists.singles)
    rate = npair * nsingle / seconds
    compute, write = case.flops / machine["peak"], case.output_bytes / machine["copy"]
    return {
        "class": case.name, "K_pair": case.k_pair, "K_single": case.k_single, "target": run.target,
        "plan": run.plan_name(), "pairs": npair, "singles": nsingle, "triples": npair * nsingle,
        "seconds": seconds, "spread": spread, "triples_per_s": rate, "flop": case.flops,
        "output_bytes": case.output_bytes, "tflops": case.flops * rate / 1e12,
        "share_of_peak": compute * rate, "written_tbs": case.output_bytes * rate / 1e12,
        "share_of_copy": write * rate, "share_of_limit": max(compute, write) * rate,
        "bound": "compute" if compute > write else "write", "error": run.error(),
        "peak_tflops": machine["peak"] / 1e12, "copy_tbs": machine["copy"] / 1e12, "device": machine["device"],
        "commit": machine["commit"], "seed": args.seed,
    }  # fmt: skip


def class_line(row):
    """A row of the printed table."""
    return (
        f"({row['class']}) {row['K_pair']:>2}x{row['K_single']:<2} {row['target']:>7} {row['plan']:<26} "
        f"{row['triples']:>10} {row['seconds']:>8.3g} {100 * row['spread']:>6.1f} {row['triples_per_s']:>10.3e} "
        f"{row['tflops']:>8.3f} {100 * row['share_of_peak']:>7.1f} {row['written_tbs']:>9.3f} "
        f"{100 * row['share_of_copy']:>7.1f} {100 * row['share_of_limit']:>8.1f} {row['bound']:>7} {row['error']:>9.1e}"
    )


def compile_classes(all_lists, args):
    """Compiles the kernels of all cases in parallel; those of further plans where they are used."""
    from md4.gpu.warmup import compile_ahead

    asked = {}
    for lists in all_lists:

        def work(backend, lists=lists):
            engine = lists.engine.with_backend(backend)
            bra, ket = engine.prepare(lists.pairs), engine.prepare(lists.singles)
            shape = block_shape(bra, ket)
            blocks = {"block": backend.scratch(shape)}
            rows = backend.result((shape[1] * lists.case.nc, shape[0] * lists.case.nab))
            blocks["matrix"] = backend.matrix_block(rows, 0, 0, shape)
            for target in args.targets:
                engine.evaluate(bra, ket, blocks[target])

        asked |= lists.engine.backend.asked_by(work)
    compile_ahead(lambda: asked)


def measure_classes(args, machine, output):
    """Prints the table of classes, and returns its rows."""
    cases, rows = [FewCase.parse(name, k) for k in args.K for name in args.classes], []

    def lists_of(case):
        pairs, singles = case.counts(args.backend)
        return Lists(case, (args.pairs or pairs, args.singles or singles), args.backend, args.seed)

    if args.backend == "cuda" and args.jobs:
        begin = perf_counter()
        compile_classes(map(lists_of, cases), args)
        print(f"kernels compiled or loaded in {perf_counter() - begin:.1f} s")
    print(COLUMNS)
    for case in cases:
        lists = lists_of(case)
        for target in args.targets:
            run = Run(lists, target, output)
            for plan in lists.plans(target) if args.plans else [None]:
                if plan is not None:
                    run.backend.plan = lambda *_, plan=plan: plan
                rows.append(class_row(run, machine, args))
                print(class_line(rows[-1]), flush=True)
            run.backend.__dict__.pop("plan", None)
            if args.csv:
                write_csv(args.csv, rows)
    return rows


# molecules ------------------------------------------------------------------------------------------------------------


def molecules(text, folder):
    """(molecule, auxiliary molecule) of 'NAME,BASIS,AUXBASIS', where NAME is one of `systems.System` or an xyz file."""
    from pyscf import df
    from systems import System

    from md4.pyscf.geometry import load_molecule

    name, basis, auxiliary = text.split(",")
    mol = load_molecule(folder / name, basis) if name.endswith(".xyz") else System.parse(f"{name}/{basis}").mol()
    return mol, df.make_auxmol(mol, auxiliary)


def columns_at_once(three, gb):
    """[first, last] columns of each turn, cut between shell pairs so that none takes more than `gb` GB."""
    most, cuts = max(1, int(gb * 1e9 / (8 * three.naux))), [0]
    while cuts[-1] < three.ncol:
        place = int(np.searchsorted(three.edges, cuts[-1] + most, side="right")) - 1
        cuts.append(int(three.edges[max(place, np.searchsorted(three.edges, cuts[-1], side="right"))]))
    return list(pairwise(cuts))


def measure_system(text, args, output):
    """Prints and returns what the set-up of a molecule takes."""
    mol, auxmol = molecules(text, args.molecules)
    basis, auxiliary = map(md4.Basis.from_mol, (mol, auxmol))
    begin = perf_counter()
    three = ThreeCentre(basis, auxiliary, backend=args.backend, cutoff=args.cutoff)
    backend = three.engine.backend
    synchronize(backend)
    lists, begin = perf_counter() - begin, perf_counter()
    three.compile_ahead(False)
    compiled = perf_counter() - begin
    turns = columns_at_once(three, args.gb)
    flat = output.shaped((three.naux * max(last - first for first, last in turns),))

    def integrals():
        for first, last in turns:
            size = three.naux * (last - first)
            three.integrals(first, last, flat[:size].reshape(three.naux, last - first))

    once = wall_seconds(backend, integrals)
    error = error_of_columns(three, flat, turns[-1], mol, auxmol)
    again, spread = median_seconds(backend, integrals, args.repeats, 0, wall_seconds)
    metric, _ = median_seconds(backend, three.metric, args.repeats, 1, wall_seconds)
    gigabytes = 8e-9 * three.naux * three.ncol
    print(
        f"{text}: {mol.nao} AOs, {three.naux} auxiliary functions, {three.ncol} columns, {gigabytes:.1f} GB in "
        f"{len(turns)} turns; lists and bounds {lists:.3g} s, compilation {compiled:.3g} s, integrals {once:.3g} s, "
        f"again {again:.3g} s (± {100 * spread:.1f}%), {gigabytes / again:.4g} GB/s, (P|Q) {metric:.3g} s, "
        f"error {error:.1e}", flush=True,
    )  # fmt: skip
    return {
        "system": text, "nao": mol.nao, "naux": three.naux, "ncol": three.ncol, "gigabytes": gigabytes,
        "turns": len(turns), "lists": lists, "compilation": compiled, "first": once, "again": again, "spread": spread,
        "metric": metric, "error": error, "cutoff": args.cutoff,
    }  # fmt: skip


def error_of_columns(three, flat, turn, mol, auxmol):
    """Largest error of three shell pairs of the last turn against PySCF, over the largest of their integrals."""
    from pyscf import df

    (first, last), found, largest = turn, 0.0, 0.0
    pairs = np.flatnonzero((three.edges >= first) & (three.edges < last))
    matrix = flat[: three.naux * (last - first)].reshape(three.naux, last - first)
    rows = on_host(matrix) if matrix.size < 1 << 27 else None
    loc = mol.ao_loc
    for pair in pairs[[0, len(pairs) // 2, -1]]:
        here = slice(*three.edges[pair : pair + 2])
        i, j = three.rows[here], three.cols[here]
        a, b = (int(np.searchsorted(loc, n[0], side="right")) - 1 for n in (i, j))
        theirs = df.incore.aux_e2(mol, auxmol, shls_slice=(a, a + 1, b, b + 1, 0, auxmol.nbas))
        theirs = theirs[i - loc[a], j - loc[b]][:, three.auxiliary_order]
        if rows is None:
            mine = on_host(three.integrals(*map(int, three.edges[pair : pair + 2]))).T
        else:
            mine = rows[:, here.start - first : here.stop - first].T
        found, largest = max(found, abs(mine - theirs).max()), max(largest, abs(theirs).max())
    return found / largest


def main(argv=None):
    args = arguments(argv)
    begin = perf_counter()
    backend = md4.Engine(md4.Basis.from_arrays([0], [[1.0]], [[1.0]], [[0, 0, 0]]), backend=args.backend).backend
    machine, output = machine_of(backend), Output(args.backend)
    rows = measure_classes(args, machine, output) if args.classes else []
    systems = []
    for text in args.systems:
        try:
            systems.append(measure_system(text, args, output))
        except md4.MD4Error as error:
            print(f"{text}: {error}", flush=True)
        if args.csv and systems:
            write_csv(Path(args.csv).with_suffix(".systems.csv"), systems)
    print(f"{len(rows)} rows, {len(systems)} molecules, {perf_counter() - begin:.0f} s in all")
    return rows, systems


if __name__ == "__main__":
    main()
