"""The CPU backend beside libcint and PySCF: the same work in one process with the same number of threads.

    python bench/cpu.py --threads 2 --csv cpu.csv               the table
    python bench/cpu.py --threads 2 --busy 2                    beside two busy processes
    python bench/cpu.py --kinds int2e jk --systems water/cc-pvtz methane/cc-pvtz       parts of it, or other molecules
    python bench/cpu.py --checkout ../before --csv cpu.csv      the md4 of another checkout, such as an older commit
    python bench/cpu.py --cold                                  first calls with an empty and with a filled cache

What is timed, md4's call and that with which it is compared:

    int2e       md4.int2e(mol, aosym="s8")       mol.intor("int2e", aosym="s8")
    jk          get_jk of a md4.JK that is kept  get_jk of a mean-field object that is kept, direct, with its bounds
    jk-fresh    md4.get_jk, from nothing         get_jk of a new mean-field object, direct
    scf         md4.attach(mol.RHF()).kernel()   mol.RHF().kernel(), which stores the integrals if they fit, as md4 does
    scf-direct  the same, direct                 the same, direct
    casscf      DFCASSCF(4, 4), three cycles,    the same by PySCF alone
                of an attached object
    forces      nuc_grad_method().kernel() of    the same of PySCF's object with the same orbitals
                an attached object
    class       engine.compute of (gg|gg) and    mol.intor of the same quartets of shells, on one core
                (ii|ii), primitive shells

A process with OMP_NUM_THREADS and NUMBA_NUM_THREADS set does all of it. 'first' is md4's first call of a row: what it
compiles or loads for this row is part of it, what rows before have compiled is not. Then both take turns; the seconds
are medians of these, and 'ratio' is md4's over the other's. 'cores' is md4's processor time over its wall time,
'others' the same of all other processes of the machine. Turns in which others compute do not count, unless all are so
or --busy asks for it. 'difference' is the largest one of the results over the largest element. The density is a random
symmetric matrix, or the converged one with --density scf.

With --cold each row is a process of its own that makes md4's call once: with an empty MD4_CACHE_DIR, then with what the
first process has left there. 'import' is the time of `import md4`, 'process' that of the whole process.

Only the public functions of md4 are used, so that the script also runs with older commits.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SIGN = "@@ "
KINDS = ("int2e", "jk", "jk-fresh", "scf", "scf-direct", "casscf", "forces", "class")
SYSTEMS = ["water/cc-pvdz", "water/cc-pvtz", "water/cc-pvqz", "water/cc-pv5z", "methane/cc-pvtz", "benzene/cc-pvdz"]
SCF_SYSTEMS = ["water/cc-pvdz", "water/cc-pvtz", "water/cc-pvqz", "methane/cc-pvtz", "benzene/cc-pvdz"]
CASSCF_SYSTEMS = ["water/cc-pvtz"]
FORCES_SYSTEMS = ["water/cc-pvtz", "water/cc-pvqz", "water/cc-pv5z", "benzene/cc-pvdz"]
# Letter of the class and number of shells on each of the four centres: n^4 quartets.
CLASSES = {"g": 8, "i": 6}
CH = 1.087 / 3**0.5  # Angstrom
METHANE = [("C", (0, 0, 0))] + [("H", (x * CH, y * CH, x * y * CH)) for x in (1, -1) for y in (1, -1)]
# A row has so many turns that count, and lasts so many seconds. No turn begins after --patience seconds.
TURNS, SECONDS = 15, 10.0
# A turn is quiet if other processes use less than this many seconds and this many cores together.
TICKS, OTHERS = 0.03, 0.05
# Seconds before each call, in which threads of the other one that still wait for work go to sleep.
PAUSE = 0.02
# Elements that are compared at once.
PIECE = 1 << 24
# Of kinds that are measured for other molecules than `SYSTEMS`.
USUAL = {"class": CLASSES, "scf": SCF_SYSTEMS, "scf-direct": SCF_SYSTEMS, "casscf": CASSCF_SYSTEMS,
         "forces": FORCES_SYSTEMS}  # fmt: skip


# what is timed --------------------------------------------------------------------------------------------------------


def molecule(system):
    """The built molecule of 'water/cc-pvtz'; water and benzene are those of docs/examples."""
    from pyscf import gto

    name, _, basis = system.partition("/")
    atoms = METHANE if name == "methane" else str(ROOT / "docs" / "examples" / f"{name}.xyz")
    return gto.M(atom=atoms, basis=basis, verbose=0)


def direct(mol):
    """A mean-field object of PySCF that never stores the integrals, however much memory there is."""
    return storing_nothing(mol.RHF())


def storing_nothing(mf):
    """The object, which from now on never stores the integrals."""
    mf._is_mem_enough = lambda: False
    return mf


def check_direct(mf):
    """RuntimeError unless the last J and K of PySCF were made directly, with Schwarz bounds."""
    if mf._eri is not None or mf._opt.get(None) is None:
        raise RuntimeError("PySCF has stored the integrals, or has no Schwarz bounds.")


def density(mol, which):
    """A random symmetric matrix, or the density of the converged SCF."""
    if which == "scf":
        mf = direct(mol)
        mf.kernel()
        return np.asarray(mf.make_rdm1())
    matrix = np.random.default_rng(0).standard_normal((mol.nao, mol.nao))
    return matrix + matrix.T


def int2e(system, _):
    """(md4's call, libcint's call) of a row; each returns a list of arrays."""
    import md4

    mol = molecule(system)
    return (
        lambda: [md4.int2e(mol, aosym="s8", backend="cpu", progress=False)],
        lambda: [mol.intor("int2e", aosym="s8")],
    )


def jk(system, which):
    """As `int2e`, for J and K whose bounds and pairs are kept."""
    import md4

    mol, kept = molecule(system), {}
    dm = density(mol, which)

    def ours():
        if "md4" not in kept:
            kept["md4"] = md4.JK(mol, backend="cpu", progress=False)
        return kept["md4"].get_jk(dm)

    def theirs():
        mf = kept.setdefault("pyscf", direct(mol))
        found = mf.get_jk(mol, dm)
        check_direct(mf)
        return found

    return ours, theirs


def jk_fresh(system, which):
    """As `int2e`, for J and K from nothing."""
    import md4

    mol = molecule(system)
    dm = density(mol, which)

    def theirs():
        mf = direct(mol)
        found = mf.get_jk(mol, dm)
        check_direct(mf)
        return found

    return lambda: md4.get_jk(mol, dm, backend="cpu", progress=False), theirs


def scf(system, _):
    """As `int2e`, for the energy of a whole SCF, as a user runs it."""
    import md4

    mol = molecule(system)
    return lambda: [md4.attach(mol.RHF(), backend="cpu").kernel()], lambda: [mol.RHF().kernel()]


def scf_direct(system, _):
    """As `scf`, where neither may store the integrals."""
    import md4

    mol = molecule(system)

    def theirs():
        mf = direct(mol)
        energy = mf.kernel()
        check_direct(mf)
        return [energy]

    return lambda: [storing_nothing(md4.attach(mol.RHF(), backend="cpu")).kernel()], theirs


def casscf(system, _):
    """As `int2e`, for a CASSCF with density fitting, in which PySCF's own products come between builds of J and K."""
    from pyscf import mcscf

    import md4

    mol = molecule(system)

    def energy(mf):
        return [mcscf.DFCASSCF(mf.run(), 4, 4).run(max_cycle_macro=3).e_tot]

    def ours():
        return energy(md4.attach(mol.RHF().density_fit(), backend="cpu"))

    return ours, lambda: energy(mol.RHF().density_fit())


def forces(system, _):
    """As `int2e`, for the gradient of a converged Hartree-Fock energy by the nuclei, bounds and pairs kept by both."""
    import md4

    mf = md4.attach(molecule(system).RHF(), backend="cpu").run()
    plain = md4.detach(mf.copy())

    def of(solver):
        return [solver.nuc_grad_method().kernel()]

    return lambda: of(mf), lambda: of(plain)


def shell_class(letter, _):
    """As `int2e`, for the quartets (ab|cd) of four groups of primitive shells of one l at random centres."""
    from pyscf import gto

    import md4

    n, l = CLASSES[letter], "spdfghi".index(letter)
    rng = np.random.default_rng(0)
    places, exponents = rng.uniform(-2.0, 2.0, (4 * n, 3)), rng.uniform(0.3, 3.0, 4 * n)
    mol = gto.M(
        atom=[(f"H{k}", place) for k, place in enumerate(places)], unit="Bohr", verbose=0,
        basis={f"H{k}": [[l, [exponent, 1.0]]] for k, exponent in enumerate(exponents)},
    )  # fmt: skip
    engine = md4.Engine(md4.Basis.from_mol(mol), backend="cpu")
    bra = np.stack(np.meshgrid(np.arange(n), np.arange(n, 2 * n), indexing="ij"), -1).reshape(-1, 2)
    shells = tuple(k * n for side in range(4) for k in (side, side + 1))

    def ours():
        return [engine.compute(bra, bra + 2 * n)]

    def theirs():
        found = mol.intor("int2e", shls_slice=shells).reshape((n, 2 * l + 1) * 4)
        return [found.transpose(0, 2, 4, 6, 1, 3, 5, 7).reshape((n * n, n * n) + (2 * l + 1,) * 4)]

    return ours, theirs


MAKERS = {
    "int2e": int2e, "jk": jk, "jk-fresh": jk_fresh, "scf": scf, "scf-direct": scf_direct, "casscf": casscf,
    "forces": forces, "class": shell_class,
}  # fmt: skip


# the process that works -----------------------------------------------------------------------------------------------


def timed(call):
    """(seconds, processor seconds, result) of a call."""
    sleep(PAUSE)
    wall, processor = perf_counter(), process_time()
    result = call()
    return perf_counter() - wall, process_time() - processor, result


def machine_time():
    """Processor seconds that all processes together have used since the machine was started."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Turn(NamedTuple):
    """A call of md4 and one of the other: their seconds, md4's cores, and what the rest of the machine used meanwhile.

    `others` are cores, `quiet` says that they are none, as far as the clock of the machine can tell.
    """

    seconds: float
    libcint: float
    cores: float
    others: float
    quiet: bool

    @classmethod
    def take(cls, ours, theirs):
        begin, own, total = perf_counter(), process_time(), machine_time()
        (mine, processor, _), (other, _, _) = timed(ours), timed(theirs)
        wall, rest = perf_counter() - begin, machine_time() - total - (process_time() - own)
        return cls(mine, other, processor / mine, max(0.0, rest / wall), rest < TICKS + OTHERS * wall)


def turns_of(ours, theirs, request):
    """The turns that count, for a row."""
    begin, turns, quiet = perf_counter(), [], []
    while not turns or perf_counter() - begin < (SECONDS if len(quiet) >= TURNS else request["patience"]):
        turns.append(Turn.take(ours, theirs))
        quiet = [turn for turn in turns if turn.quiet or request["busy"]]
    return quiet or turns


def difference(ours, theirs):
    """Largest difference of arrays over the largest element of each of `theirs`."""
    pairs = [(np.reshape(a, -1), np.reshape(b, -1)) for a, b in zip(ours, theirs, strict=True)]
    return max(flat_difference(a, b) for a, b in pairs)


def flat_difference(a, b):
    """`difference` of two arrays of one index, piece by piece, since an array may take most of the memory."""
    if a.shape != b.shape:
        raise RuntimeError(f"{a.size} and {b.size} elements cannot be compared.")
    pieces = [np.s_[first : first + PIECE] for first in range(0, a.size, PIECE)]
    return float(max(abs(a[p] - b[p]).max() for p in pieces) / max(abs(b[p]).max() for p in pieces))


def measured(kind, system, request):
    """One row."""
    ours, theirs = MAKERS[kind](system, request["density"])
    first, _, mine = timed(ours)
    theirs_first, _, other = timed(theirs)
    worst = difference(mine, other)
    del mine, other
    turns = turns_of(ours, theirs, request)
    median = {name: float(np.median([getattr(turn, name) for turn in turns])) for name in Turn._fields[:4]}
    return {
        "first": first, "libcint_first": theirs_first, **median, "ratio": median["seconds"] / median["libcint"],
        "turns": len(turns), "difference": worst, "quartets": CLASSES[system] ** 4 if kind == "class" else "",
    }  # fmt: skip


def first_call(kind, system, request):
    """A row of --cold: imports, then md4's call once."""
    import pyscf  # noqa: F401 its time is not md4's

    imported, _, _ = timed(lambda: __import__("md4"))
    ours, _ = MAKERS[kind](system, request["density"])
    return {"import": imported, "first": timed(ours)[0]}


def work(request):
    """Measures the rows of a request; prints a line of JSON for each."""
    make = first_call if request["cold"] else measured
    for kind, system in request["rows"]:
        row = {"kind": kind, "system": system, **make(kind, system, request)}
        print(SIGN + json.dumps(row | where(request)), flush=True)


def where(request):
    """Commit, processor and versions of this process, and what was asked for."""
    from importlib.metadata import version
    from platform import python_version

    import md4

    models = [text for text in Path("/proc/cpuinfo").read_text().splitlines() if text.startswith("model name")]
    return {
        "commit": commit(Path(md4.__file__).parent),
        "processor": models[0].partition(":")[2].strip() if models else "unknown",
        "processors": len(os.sched_getaffinity(0)),
        **{name: request[name] for name in ("threads", "busy", "density")},
        "python": python_version(),
        **{name: version(name) for name in ("numpy", "numba", "pyscf")},
    }  # fmt: skip


def commit(folder):
    """Short commit of the checkout of a package, '+' where the package has changes; and a hash of its source."""
    digest = sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())

    def git(*args):
        done = subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        head = git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        head = "unknown"
    return f"{head}/{digest.hexdigest()[:8]}"


# the process that asks ------------------------------------------------------------------------------------------------


def run(rows, args, threads, cache=None, cold=False):
    """Has a new process measure rows; yields them as they are done."""
    environment = {key: value for key, value in os.environ.items() if key != "OPENBLAS_NUM_THREADS"}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), str(threads))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(args.checkout), os.environ.get("PYTHONPATH")]))
    if cache is not None:
        environment["MD4_CACHE_DIR"] = str(cache)
    request = {"rows": rows, "threads": threads, "cold": cold}
    request |= {name: getattr(args, name) for name in ("busy", "density", "patience")}
    command = [sys.executable, __file__, "--worker", json.dumps(request)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}  # no terminal, so that no bar is drawn
    with subprocess.Popen(command, env=environment, text=True, **pipes) as child:
        for line in child.stdout:
            if line.startswith(SIGN):
                yield json.loads(line.removeprefix(SIGN))
            else:
                print(line, end="", file=sys.stderr)
    if child.returncode:
        raise SystemExit("the process that measures has failed; see above.")


@contextmanager
def busy_processes(count):
    """Processes that compute beside the measurement."""
    command = [sys.executable, "-c", "while True: pass"]
    children = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.wait()


def name_of(row):
    """What a row is about."""
    if row["kind"] == "class":
        return f"({2 * row['system']}\\|{2 * row['system']}) K = 1"
    return row["system"].replace("/", " ")


HEADER = """
| | | first s | s | PySCF s | ratio | cores | others | difference |
|---|---|---|---|---|---|---|---|---|"""
COLD_HEADER = """
| | | empty: import s | first s | process s | filled: import s | first s | process s |
|---|---|---|---|---|---|---|---|"""


def line(row):
    """A row of the Markdown table; of a class with the rates."""
    numbers = (f"{row[key]:.3g}" for key in ("first", "seconds", "libcint", "ratio"))
    cores = (f"{row[key]:.2f}" for key in ("cores", "others"))
    rates = [f"{row['quartets'] / row[key]:.3g}" for key in ("seconds", "libcint") if row["quartets"]]
    note = f" ({' and '.join(rates)} quartets/s)" if rates else ""
    return f"| {' | '.join([row['kind'], name_of(row), *numbers, *cores])} | {row['difference']:.1e}{note} |"


def measure(tasks, args):
    """Prints the table; returns its rows."""
    found = []
    print(HEADER, flush=True)
    for threads, kinds in ((args.threads, KINDS[:-1]), (1, KINDS[-1:])):
        rows = [task for task in tasks if task[0] in kinds]
        for row in run(rows, args, threads) if rows else ():
            print(line(row), flush=True)
            found.append(row)
    return found


def measure_cold(tasks, args):
    """Prints the table of first calls; returns its rows."""
    found = []
    print(COLD_HEADER, flush=True)
    for task in tasks:
        with tempfile.TemporaryDirectory(prefix="md4-cold.") as cache:
            cells = []
            for state in ("empty", "filled"):
                begin = perf_counter()
                (row,) = run([task], args, 1 if task[0] == "class" else args.threads, cache, cold=True)
                row |= {"cache": state, "process": perf_counter() - begin}
                cells += [f"{row[key]:.3g}" for key in ("import", "first", "process")]
                found.append(row)
        print(f"| {' | '.join([row['kind'], name_of(row), *cells])} |", flush=True)
    return found


def append_csv(path, rows):
    """Appends rows to a CSV; SystemExit if it has other columns."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists() or path.stat().st_size == 0
    with path.open("a+", newline="") as file:
        file.seek(0)
        columns = list(rows[0]) if new else next(csv.reader(file))
        if set(columns) != set(rows[0]):
            raise SystemExit(f"{path} has other columns than these rows; give another file.")
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows(rows)


def tasks_of(args):
    """[(kind, molecule and basis, or letter of a class)]."""
    found = []
    for kind in args.kinds:
        usual = USUAL.get(kind, SYSTEMS)
        found += [(kind, system) for system in (usual if kind == "class" or not args.systems else args.systems)]
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what is timed; see above")
    parser.add_argument("--systems", nargs="+", metavar="NAME/BASIS", help="of water, methane and benzene")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of both (%(default)s)")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="busy processes beside (%(default)s)")
    parser.add_argument("--density", choices=("random", "scf"), default="random", help="of J and K (%(default)s)")
    parser.add_argument(
        "--patience", type=float, default=12.0, metavar="SECONDS", help="for quiet turns of a row (%(default)s)"
    )
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose md4 is measured (this one)")
    parser.add_argument("--cold", action="store_true", help="first calls with an empty and with a filled cache")
    parser.add_argument("--csv", metavar="FILE", help="append the rows to FILE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        return work(json.loads(args.worker))
    args.checkout = args.checkout.resolve()
    beside = f", beside {args.busy} busy processes" if args.busy else ""
    print(f"{args.threads} threads on {len(os.sched_getaffinity(0))} processors{beside}; classes on one core")
    with busy_processes(args.busy):
        rows = (measure_cold if args.cold else measure)(tasks_of(args), args)
    names = ("processor", "commit", "python", "numpy", "numba", "pyscf")
    print("\n" + ", ".join(f"{name} {rows[0][name]}" for name in names))
    if args.csv:
        append_csv(args.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
