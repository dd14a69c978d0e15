"""Time to the first integral: fresh processes with an empty kernel cache, then again with the cache they left.

    python bench/lab/coldstart.py --jobs 16

Each job has its own empty cache: water in cc-pVTZ through md4.int2e, its J and K, and its J alone; one class, (dd|dd);
every class of pairs to (ii|ii), 406 of them, by `--jobs` processes that share one cache. The warm line is one new
process with that cache. The job 'warmup' runs `md4 warmup` for the molecule and then the first three, the job 'lmax'
`md4 warmup --lmax 3`, after which nothing is left to compile.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

WATER = "O 0 0 0.118; H 0 0.755 -0.471; H 0 -0.755 -0.471"
LETTERS = "spdfghi"
MOLECULE = {"water": "water, cc-pVTZ, s8", "jk": "water, cc-pVTZ, J and K", "j": "water, cc-pVTZ, J alone"}
WARMUPS = {"warmup": [WATER, "--basis", "cc-pvtz"], "lmax": ["--lmax", "3"]}


def all_classes(lmax):
    """Every class (ab|cd) with la >= lb, lc >= ld, bra >= ket."""
    pairs = [(a, b) for a in range(lmax + 1) for b in range(a + 1)]
    return list(itertools.combinations_with_replacement(pairs, 2))


def worker(job, backend, part, parts, lmax):
    """In a fresh process: imports, runs a job, prints its times and how many kernels were compiled."""
    begin = perf_counter()
    import md4

    imported = perf_counter() - begin
    if job in MOLECULE:
        import numpy as np
        import pyscf

        mol = pyscf.M(atom=WATER, basis="cc-pvtz", verbose=0)
        start = perf_counter()
        if job == "water":
            md4.int2e(mol, aosym="s8", backend=backend)
        else:
            md4.get_jk(mol, np.eye(mol.nao), with_k=job == "jk", backend=backend)
    else:
        start = perf_counter()
        run_classes([((2, 2), (2, 2))] if job == "class" else all_classes(lmax)[part::parts], backend)
    seconds = perf_counter() - start
    print(json.dumps({"import": imported, "seconds": seconds, "kernels": kernels_compiled(backend)}))


def run_classes(classes, backend):
    """One quartet of each class, results waited for."""
    import md4

    for (la, lb), (lc, ld) in classes:
        centres = [[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]
        basis = md4.Basis.from_arrays([la, lb, lc, ld], [[1.0]] * 4, [[1.0]] * 4, centres)
        engine = md4.Engine(basis, backend=backend)
        engine.compute([[0, 1]], [[2, 3]])
        if engine.backend.name != "cpu":
            engine.backend.context.stream.synchronize()


def kernels_compiled(backend):
    """Kernel variants that this process compiled rather than loaded; None on the CPU."""
    if backend == "cpu":
        return None
    from md4.gpu import compile as dispatch

    return dispatch.compile_count


def environment(cache):
    """The environment of a process with a cache folder."""
    env = {**os.environ, "MD4_CACHE_DIR": str(cache), "CUDA_CACHE_PATH": str(cache / "driver")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]),
                                                      env.get("PYTHONPATH")]))  # fmt: skip
    return env


def warmed(job, args, cache):
    """Has `md4 warmup` fill a cache folder, and reports it and the first calls that follow."""
    options = ["--backend", args.backend, "--jobs", str(args.jobs)]
    command = [sys.executable, "-m", "md4", "warmup", *WARMUPS[job], *options]
    begin = perf_counter()
    done = subprocess.run(command, env=environment(cache), capture_output=True, text=True, check=True)
    seconds, name = perf_counter() - begin, "md4 warmup" if job == "warmup" else "md4 warmup --lmax 3"
    print(f"{name:<44} {seconds:8.2f} {'':>8} {'':>8} {done.stdout.split()[0]:>8}", flush=True)
    for part, label in MOLECULE.items():
        report(f"{label}: after {name}", *fresh(part, args, cache))


def fresh(job, args, cache, parts=1):
    """Wall seconds of `parts` new processes at once that share the cache folder, and what they printed."""
    env = environment(cache)
    command = [sys.executable, __file__, "--backend", args.backend, "--lmax", str(args.lmax), "--worker", job]
    begin = perf_counter()
    commands = [[*command, "--part", str(n), "--parts", str(parts)] for n in range(parts)]
    children = [subprocess.Popen(c, env=env, stdout=subprocess.PIPE, text=True) for c in commands]
    replies = [child.communicate()[0] for child in children]
    seconds = perf_counter() - begin
    if any(child.returncode for child in children):
        raise SystemExit(f"a process of job {job!r} failed; see above.")
    return seconds, [json.loads(reply.strip().splitlines()[-1]) for reply in replies]


def report(label, seconds, replies):
    kernels = sum(r["kernels"] or 0 for r in replies)
    slowest = max(r["seconds"] for r in replies)
    print(f"{label:<44} {seconds:8.2f} {max(r['import'] for r in replies):8.2f} {slowest:8.2f} {kernels:8d}",
          flush=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes of the last jobs (%(default)s)")
    parser.add_argument("--lmax", type=int, default=6, help="highest l of the job 'all' (%(default)s)")
    jobs = [*MOLECULE, "class", "all", *WARMUPS]
    parser.add_argument("--only", nargs="+", choices=jobs, default=jobs, help="some of the jobs")
    for name in ("--worker", "--part", "--parts"):
        parser.add_argument(name, help=argparse.SUPPRESS, type=str if name == "--worker" else int)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker, args.backend, args.part, args.parts, args.lmax)
    last = LETTERS[args.lmax] if args.lmax < len(LETTERS) else f"l={args.lmax}"
    names = {**MOLECULE, "class": "(dd|dd)", "all": f"all classes to ({last * 2}|{last * 2})"}
    print(f"{'job':<44} {'wall s':>8} {'import':>8} {'work s':>8} {'compiled':>8}")
    for job in args.only:
        with tempfile.TemporaryDirectory(prefix="md4-cold.") as cache:
            if job in WARMUPS:
                warmed(job, args, Path(cache))
                continue
            parts = args.jobs if job == "all" else 1
            note = f", {parts} processes" if parts > 1 else ""
            report(f"{names[job]}: empty cache{note}", *fresh(job, args, Path(cache), parts))
            report(f"{names[job]}: warm cache", *fresh(job, args, Path(cache)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
