"""Builds of J and K, forces and MP2 on 1, 2, 4, 8 devices of one machine, in one process and as MPI ranks.

    python bench/scaling_devices.py --csv bench/results/scaling-devices.csv        the table
    python bench/scaling_devices.py --systems 216waters/cc-pvdz --counts 1 4       parts of it, or others
    python bench/scaling_devices.py --forces --csv forces.csv                      forces in place of builds
    python bench/scaling_devices.py --mp2 --csv mp2.csv                            energies of MP2, in one process
    python bench/scaling_devices.py --weak 27waters/cc-pvtz --csv weak.csv         waters that grow with the devices
    python bench/scaling_devices.py --backend cpu --systems water/cc-pvdz --counts 1 2      without a GPU: ranks only

Each count of devices is measured by processes of its own: one with several devices, or one rank a device under mpiexec,
which is looked for beside Python and in PATH. 'seconds' is the wall time of `JK.get_jk` from a NumPy density to NumPy
matrices, of `JK.gradient`, or of PySCF's MP2 of an attached object without amplitudes, the longest of the ranks, median
of --repeats after --warm calls. Speed-up and efficiency refer to one device of the same run; under --weak, where
systems differ, they are those of the rate in shell quartets a second. 'difference' is the largest one of any element
from the result of one device. 'lists' are the seconds of pair lists and Schwarz bounds, which are made once. The shares
are of the median call: 'uneven' is 1 - mean / longest time of the workers, 'sums' the time in which J and K of all are
added up and fetched, 'beside' what comes before the workers begin and after they end (screening, division, copies; of
forces the sums as well). Of MP2 there are neither lists nor shares. 'peak' is the largest device memory that each
worker held.

The density is that of `systems.guess_density`, orbitals of MP2 are those of its Fock matrix.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
from clock import describe, write_csv
from pyscf import mp
from systems import System, guess_density

import md4
from md4 import gpu
from md4.errors import MD4Error

SYSTEMS = {
    "builds": ["benzene/cc-pv5z", "27waters/cc-pvtz", "64waters/cc-pvtz", "benzene/cc-pv6z"],
    "forces": ["64waters/cc-pvdz", "tamoxifen/def2-tzvpp"], "mp2": ["8waters/cc-pvqz", "benzene/cc-pv6z"],
}  # fmt: skip
COUNTS = [1, 2, 4, 8]
TOLERANCE = 1e-13  # direct_scf_tol
# What is built, in this order, so that the memory that was held until the end of the first one is its own.
MATRICES = {"J": {"with_k": False}, "J, K": {}}
# Longest time of one process or one mpiexec, in seconds.
LIMIT = 1500
BESIDE = Path(sys.executable).with_name("mpiexec")
# Without these, Open MPI starts neither as root nor with more ranks than cores, and holds each rank at one core.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_hwloc_base_binding_policy": "none", "PRTE_MCA_hwloc_default_binding_policy": "none",
}  # fmt: skip


# one process, or one rank ---------------------------------------------------------------------------------------------


class Place:
    """Where this process stands: its devices, the other ranks, and the folder that all processes of a run share.

    Attributes
    ----------
    form : {'process', 'ranks'}
    count : int
        Number of devices of all ranks.
    comm
        Communicator of mpi4py, or None.
    folder : Path
        Densities, matrices and seconds of one device, and the rows.
    """

    def __init__(self, text, backend):
        self.form, count, folder = text.split(":", 2)
        self.count, self.folder, self.comm = int(count), Path(folder), None
        if self.form == "ranks":
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD
        self.devices = list(range(self.count)) if self.form == "process" and backend == "cuda" else None

    @property
    def first(self):
        """Whether this is the only process or the first rank."""
        return self.comm is None or self.comm.rank == 0

    def gather(self, value):
        """The values of all ranks."""
        return [value] if self.comm is None else self.comm.allgather(value)

    def array(self, name, make, *args):
        """An array, which the first process that needs it makes for all."""
        path = self.folder / f"{name}.npy"
        if self.first and not path.exists():
            np.save(path, make(*args))
        self.gather(None)
        return np.load(path)

    def difference(self, name, matrices):
        """The largest one from the arrays of one device, which are stored if these are they; NaN without them."""
        path = self.folder / f"{name}.npz"
        if self.form == "process" and self.count == 1:
            np.savez(path, *matrices)
        if not path.exists():
            return np.nan
        with np.load(path) as stored:
            return max(float(abs(mine - theirs).max()) for mine, theirs in zip(matrices, stored.values()))

    def alone(self, name, row):
        """The row of one device of the same name, which is stored if this is it; None without it."""
        path = self.folder / f"{name}.json"
        if self.form == "process" and self.count == 1:
            path.write_text(json.dumps(row))
        return json.loads(path.read_text()) if path.exists() else None


class Timed:
    """Calls of a function that are timed on all ranks. It returns arrays, or numbers, and None for what is not wanted.

    `jk` has the devices, and the statistics of a call where `counted`.
    """

    def __init__(self, jk, call, place, args, counted=True):
        self.times, self.stats = [], []
        for n in range(args.warm + args.repeats):
            place.gather(None)
            begin = perf_counter()
            found = call()
            seconds = max(place.gather(perf_counter() - begin))
            if n >= args.warm:
                self.times.append(seconds)
                self.stats.append(jk.stats if counted else None)
        self.matrices = [v for v in found if v is not None]
        peaks = place.gather([peak_of(worker.backend) for worker in jk.team.workers])
        self.peaks = [peak for of_rank in peaks for peak in of_rank]

    def facts(self):
        """Columns of a row: seconds, and shares of the median build."""
        middle = int(np.argsort(self.times)[len(self.times) // 2])
        seconds, stats = self.times[middle], self.stats[middle]
        row = {
            "seconds": seconds, "spread": float(np.ptp(self.times)) / seconds, "uneven": np.nan, "sums": np.nan,
            "beside": np.nan, "quartets": 0, "peak_gb": " ".join(f"{peak / 1e9:.2f}" for peak in self.peaks),
        }  # fmt: skip
        if stats is None:
            return row
        longest = max(stats.busy)
        return row | {
            "uneven": 1 - sum(stats.busy) / (len(stats.busy) * longest), "sums": stats.sums / seconds,
            "beside": 1 - (longest + stats.sums) / seconds, "quartets": stats.wanted,
        }  # fmt: skip


def peak_of(backend):
    """The most bytes that a backend held on its device; NaN on the CPU, which does not note them."""
    return np.nan if backend.name == "cpu" else backend.context.pool.peak


def list_seconds(jk, place):
    """Seconds in which pair lists and bounds are made, with kernels that are compiled."""
    jk.team.forget()
    place.gather(None)
    begin = perf_counter()
    assert jk.lists
    jk.team.each(lambda worker: worker.backend.mark()())
    return max(place.gather(perf_counter() - begin))


def with_orbitals(mf, name, dm, place):
    """A mean-field object with the orbitals of the Fock matrix of a density, as if they had converged."""
    found = place.array(f"{name}-orbitals", lambda: np.vstack(mf.eig(mf.get_fock(dm=dm), mf.get_ovlp())))
    mf.mo_energy, mf.mo_coeff, mf.converged, mf.e_tot = found[0], found[1:], True, 0.0
    mf.mo_occ = mf.get_occ(mf.mo_energy, mf.mo_coeff)
    return mf


def timed_mp2(mol, name, dm, place, args):
    """(`JK`, {name: `Timed`}) of MP2 without the 1s orbitals of atoms heavier than helium."""
    mf = md4.attach(mol.RHF(), backend=args.backend, devices=place.devices).set(max_memory=0)
    with_orbitals(mf, name, dm, place)
    method = md4.attach(mp.MP2(mf, frozen=int((mol.atom_charges() > 2).sum())))
    return mf.md4_jk, {"MP2": Timed(mf.md4_jk, lambda: [method.kernel(with_t2=False)[0]], place, args, counted=False)}


def timed(mol, name, dm, place, args):
    """The same of builds or forces."""
    jk = md4.JK(
        mol, backend=args.backend, direct_scf_tol=TOLERANCE, progress=False, devices=place.devices, comm=place.comm
    )
    if args.work == "forces":
        return jk, {"forces": Timed(jk, lambda: [jk.gradient(dm)], place, args)}
    wanted = {which: options for which, options in MATRICES.items() if which in args.matrices}
    return jk, {
        which: Timed(jk, lambda options=options: jk.get_jk(dm, **options), place, args)
        for which, options in wanted.items()
    }


def measured(system, place, args):
    """Rows of a system: J, and J with K, or forces, or MP2."""
    mol = system.mol(args.seed)
    name = f"{system.name}-{system.basis}".replace(" ", "")
    dm = place.array(name, guess_density, mol)
    jk, found = (timed_mp2 if args.work == "mp2" else timed)(mol, name, dm, place, args)
    lists = np.nan if args.work == "mp2" else list_seconds(jk, place)
    for which, one in found.items():
        row = {"system": system.name, "basis": system.basis, "nao": mol.nao, "matrices": which, "form": place.form}
        row |= {"devices": place.count, **one.facts(), "lists": lists}
        if place.first:
            yield completed(row, one, f"{name}-{which}", place, args) | {"machine": describe(jk.engine.backend)}


def completed(row, timed, name, place, args):
    """The row with what compares it to one device."""
    row["difference"] = np.nan if args.weak else place.difference(name, timed.matrices)
    alone = place.alone("weak" + row["matrices"] if args.weak else name, row)
    speedup = np.nan
    if alone is not None:
        speedup = alone["seconds"] / row["seconds"] * (row["quartets"] / alone["quartets"] if args.weak else 1)
    return row | {"speedup": speedup, "efficiency": speedup / place.count}


HEADER = """
| system | basis | nao | matrices | devices | in | seconds | ± % | speed-up | efficiency | difference | lists s | uneven | sums | beside | peak GB |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""  # noqa: E501


def line(row):
    """A row of the Markdown table."""
    cells = [
        row["system"], row["basis"], row["nao"], row["matrices"], row["devices"], row["form"], f"{row['seconds']:.3g}",
        f"{100 * row['spread']:.0f}", f"{row['speedup']:.2f}", f"{100 * row['efficiency']:.0f}%",
        f"{row['difference']:.1e}", f"{row['lists']:.2g}",
        *(f"{100 * row[share]:.1f}%" for share in ("uneven", "sums", "beside")), row["peak_gb"],
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def inside(args):
    """What a process or a rank does: all systems, one after the other."""
    place = Place(args.inside, args.backend)
    try:
        for text in args.systems:
            system = grown(System.parse(text), place.count) if args.weak else System.parse(text)
            try:
                for row in measured(system, place, args):
                    print(line(row), flush=True)
                    with (place.folder / "rows").open("a") as file:
                        file.write(json.dumps(row) + "\n")
            except MD4Error as error:  # of this system, on all ranks
                if place.first:
                    print(f"{system.name} {system.basis}, {place.count} devices in {place.form}: {error}", flush=True)
    except BaseException:
        if place.comm is not None and place.comm.size > 1:
            import traceback

            traceback.print_exc()
            place.comm.Abort(1)  # the others wait for this one
        raise


def grown(system, count):
    """Waters for so many devices: work grows with the square of their number, about."""
    if not system.waters:
        raise SystemExit("--weak takes waters, such as 27waters/cc-pvtz.")
    return System(f"{round(system.waters * count**0.5)} waters", system.basis)


# all processes --------------------------------------------------------------------------------------------------------


def mpiexec():
    """Path of mpiexec, or None."""
    return str(BESIDE) if BESIDE.exists() else shutil.which("mpiexec")


def forms(args):
    """(form, number of devices) of the processes, the one with one device first."""
    limit = gpu.device_count() if args.backend == "cuda" else os.cpu_count()
    counts = [count for count in args.counts if 1 < count <= limit]
    left_out = sorted({*args.counts} - {1, *counts})
    if left_out:
        print(f"{limit} devices are here; not measured: {', '.join(map(str, left_out))}")
    in_process = [("process", count) for count in counts if args.backend == "cuda" and "process" in args.forms]
    as_ranks = [("ranks", count) for count in counts if "ranks" in args.forms and args.work != "mp2"]
    if as_ranks and mpiexec() is None:
        print("no mpiexec here: no MPI ranks are measured; pip install mpi4py mpich")
        as_ranks = []
    return [("process", 1), *in_process, *as_ranks]


def start(form, count, folder, args):
    """Runs this script again; its rows are added to the file in `folder`."""
    command = [sys.executable, __file__, *sys.argv[1:], "--inside", f"{form}:{count}:{folder}"]
    if form == "ranks":
        command = [mpiexec(), "-n", str(count), *command]
    threads = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"} if args.backend == "cpu" else {}
    process = subprocess.Popen(command, env=os.environ | OPEN_MPI | threads)
    try:
        status = process.wait(args.limit)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpiexec ends its ranks then
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        status = f"none within {args.limit} s"
    if status != 0:
        print(f"{count} devices in {form}: exit status {status}", flush=True)


def kept(args):
    """Rows of the CSV with --append, as they stand there."""
    if not args.append or not Path(args.csv).exists():
        return []
    with open(args.csv, newline="") as file:
        return list(csv.DictReader(file))


def measure_all(args):
    """The table, and the CSV after each process."""
    these, before = forms(args), kept(args)
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory(prefix="md4-scaling-") as folder:
        for form, count in these:
            start(form, count, folder, args)
            file = Path(folder) / "rows"
            rows = [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []
            if args.csv and rows:
                write_csv(args.csv, before + rows)
    if not rows:
        raise SystemExit("nothing was measured.")
    print(f"\n{rows[0]['machine']}")


def parsed(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = "; ".join(f"{work}: {' '.join(systems)}" for work, systems in SYSTEMS.items())
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", help=f"default: {defaults}")
    parser.add_argument("--forces", dest="work", action="store_const", const="forces", help="in place of J and K")
    parser.add_argument("--mp2", dest="work", action="store_const", const="mp2", help="in place of J and K, no ranks")
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS, help="of devices (1 2 4 8)")
    parser.add_argument("--forms", nargs="+", choices=("process", "ranks"), default=["process", "ranks"])
    parser.add_argument("--matrices", nargs="+", choices=[*MATRICES], default=[*MATRICES], help="J, or J and K")
    parser.add_argument("--weak", metavar="SYSTEM", help="waters for one device; more for more devices")
    parser.add_argument("--repeats", type=int, default=3, help="timed builds (%(default)s)")
    parser.add_argument("--warm", type=int, default=2, help="builds before (%(default)s)")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a process or of mpiexec (%(default)s)")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--append", action="store_true", help="keep the rows that the CSV has")
    parser.add_argument("--backend", default="auto", choices=("auto", "cuda", "cpu"), help="cpu: one thread a rank")
    parser.add_argument("--seed", type=int, default=0, help="of the waters' orientations")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.work = args.work or "builds"
    args.systems = [args.weak] if args.weak else args.systems or SYSTEMS[args.work]
    if args.weak and args.work == "mp2":
        parser.error("--weak counts shell quartets, of which --mp2 has none.")
    if args.append and not args.csv:
        parser.error("--append needs --csv.")
    if args.backend == "auto":
        args.backend = "cuda" if gpu.available() else "cpu"
    return args


def main():
    args = parsed()
    if args.inside:
        return inside(args)
    measure_all(args)


if __name__ == "__main__":
    main()
