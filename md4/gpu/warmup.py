"""Compiles kernels ahead of their first use, in parallel processes.

`warmup` is for a user (`md4 warmup`). `compile_ahead` is what a first call does by itself where many kernels are
missing: from a process of its own, since processes that a caller's starts would import the caller's script again.
"""

import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from math import comb, prod
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread
from time import perf_counter, process_time

from md4.errors import ArgumentError, DeviceError
from md4.gpu import compile_worker
from md4.gpu.compile import compile_kernel, kernel_path
from md4.gpu.context import arithmetic_unit, current_capability, gpu_available
from md4.gpu.variants import all_variants, basis_variants, fitting_variants
from md4.method.operators import check_order, checked_kind
from md4.shells.basis import Basis
from md4.support.arguments import as_list, checked_flag, checked_integer, checked_progress, shown, whole_number
from md4.support.log import log
from md4.support.processes import allowed_jobs, can_keep, can_start, command, environment
from md4.support.progress import compiling

LARGEST_L = 8
# Fewer missing kernels than this are compiled where they are used.
WORTH_PROCESSES = 12


@dataclass(frozen=True)
class Warmup:
    """What a warm-up did.

    Attributes
    ----------
    compiled, kept : int
        Variants compiled, and found in the cache.
    jobs : int
        Processes that compiled.
    """

    compiled: int
    kept: int
    jobs: int


def start_worker(capability):
    """The first that a process of the pool does, which compiles for a compute capability and needs no device."""
    end_with_parent()
    compile_worker.start(capability)


def end_with_parent():
    """Ends a process of the pool with the one that made the pool: it would wait for work forever."""

    def watch():
        wait([parent_process().sentinel])
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def compile_variant(capability, variant):
    """Compiles a variant into the disk cache, in a process of the pool; returns a line for the log."""
    start, spent = perf_counter(), process_time()
    compile_kernel(variant, capability, variant.kernel())
    return f"{variant.name} in {perf_counter() - start:.2f} s, {process_time() - spent:.2f} s of the processor"


def expected_seconds(variant):
    """About how long a variant takes to compile. What matters is which ones are long: they begin first."""
    name, facts = variant.factory.__name__, variant.facts
    if name in ("digest_in_place", "thread_quartet_integrals"):
        return 0.6 + 0.025 * prod(2 * l + 1 for l in facts[:8:2])
    if name == "correlation_by_threads":
        return 0.6 + 7e-4 * prod(comb(l + 3, 3) for l in facts[:2])
    return 1.2 if name in ("digest_rows", "digest_mirrored", "correlation_by_warps", "r_by_axis") else 0.8


def compiled(variants, jobs, capability):
    """Compiles variants in `jobs` processes, the longest first; yields a line for the log as each is done."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), start_worker, (capability,)) as pool:
        wanted = sorted(variants, key=expected_seconds, reverse=True)
        runs = [pool.submit(compile_variant, capability, variant) for variant in wanted]
        try:
            for run in as_completed(runs):
                yield run.result()
        finally:  # where one failed, the others are left to their first use
            pool.shutdown(cancel_futures=True)


def missing(variants, capability):
    """Those that the disk cache does not hold."""
    return [variant for variant in variants if not kernel_path(variant, capability).exists()]


def warmup(lmax, kinds=("coulomb",), jobs=None, pure=True, progress=None, basis=None, auxiliary=None):
    """Compiles what classes up to (ll|ll), l = `lmax`, need, for the current device; or what a basis needs.

    Parameters
    ----------
    lmax : int
    kinds : sequence of str
        Kinds of operators.
    jobs : int, optional
        Processes; default: one a processor.
    pure : bool
        Spherical functions, else Cartesian ones.
    progress : bool, optional
        Show a bar; default: where stderr is a terminal.
    basis : Basis, optional
        In place of `lmax` and `pure`: what its shells need in `int2e`, J and K, general contractions included.
    auxiliary : Basis, optional
        With `basis`: what density fitting with these auxiliary functions needs, `int3c2e` and `int2c2e`, and no more.

    Raises
    ------
    ArgumentError
        `lmax` or `jobs` out of range, an unknown kind, or an argument of another type.
    UnsupportedError
        A basis of l > 8.
    DeviceError
        No usable GPU.
    """
    kinds = checked_kinds(kinds)
    check_arguments(lmax, jobs, pure, progress, basis, auxiliary)
    if not gpu_available():
        raise DeviceError(
            "there is nothing to warm up: kernels are compiled for the GPU of this machine, and none can be used; "
            "`md4 info` shows what is found."
        )
    lmax, jobs = whole_number(lmax), whole_number(jobs)  # Python's ints: NumPy's small ones overflow
    capability = current_capability()
    unit = arithmetic_unit(capability)
    if basis is None:
        wanted = dict.fromkeys(v for kind in kinds for v in all_variants(unit, kind, lmax, pure))
    elif auxiliary is None:
        wanted = dict.fromkeys(v for kind in kinds for v in basis_variants(unit, kind, basis))
    else:
        wanted = dict.fromkeys(v for kind in kinds for v in fitting_variants(unit, kind, basis, auxiliary))
    todo = missing(wanted, capability)
    jobs = min(jobs or os.cpu_count(), max(1, len(todo)))
    if todo:
        compile_all(todo, jobs, capability, progress)
    return Warmup(len(todo), len(wanted) - len(todo), jobs)


def compile_all(variants, jobs, capability, progress):
    """Compiles variants in `jobs` processes."""
    log.info("%d kernels are compiled by %d processes, once for this version of md4", len(variants), jobs)
    with compiling(len(variants), progress) as bar:
        for line in compiled(variants, jobs, capability):
            log.debug("compiled %s", line)
            bar.update()


def compile_ahead(variants, progress=None):
    """Compiles, in parallel, what the disk cache lacks, if that is worth it; errors are left to the first use.

    Parameters
    ----------
    variants : iterable of Variant
    progress : bool, optional
        Show a bar; default: where stderr is a terminal.
    """
    jobs = allowed_jobs()
    if jobs < 2:
        return
    capability = current_capability()
    todo = missing(dict.fromkeys(variants), capability)
    jobs = min(jobs, len(todo))
    if len(todo) < WORTH_PROCESSES or not can_start() or not can_keep():
        return
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        child = subprocess.Popen(command("from md4.gpu.warmup import serve; serve()"), env=environment(), **pipes)
    except OSError:
        return
    log.info("%d kernels are compiled by %d processes, once for this version of md4", len(todo), jobs)
    with compiling(len(todo), progress) as bar, child:
        try:
            child.stdin.write(pickle.dumps((todo, jobs, capability)))
            child.stdin.close()
        except BrokenPipeError:
            return  # it did not get as far as reading
        for line in child.stdout:
            log.debug("compiled %s", line.decode().strip())
            bar.update()


def serve():
    """The other end of `compile_ahead`: writes a line of the log for each kernel.

    Its own processes do not inherit the pipe: the caller would wait for them if this one were killed.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in compiled(*pickle.load(sys.stdin.buffer)):
        print(line, file=out, flush=True)


def checked_kinds(kinds):
    """Kinds of operators as a tuple; ArgumentError for anything else."""
    found = as_list(kinds)
    if found is None:
        raise ArgumentError(f"kinds must be a sequence of operators such as ('coulomb',), not {shown(kinds)}.")
    return tuple(checked_kind(kind) for kind in found)


def check_arguments(lmax, jobs, pure, progress, basis, auxiliary):
    """ArgumentError or UnsupportedError for what cannot be warmed up."""
    checked_flag("pure", pure)
    checked_progress(progress)
    if jobs is not None:
        checked_integer("jobs", jobs, 1)
    if basis is None:
        number = whole_number(lmax)
        if number is None or not 0 <= number <= LARGEST_L:
            what = f"between 0 and {LARGEST_L}, the highest of a whole quartet"
            raise ArgumentError(f"lmax must be {what}, not {shown(lmax)}.")
        if auxiliary is not None:
            raise ArgumentError("an auxiliary basis needs the basis that it belongs to; give both.")
        return
    for name, given in (("basis", basis), ("auxiliary", basis if auxiliary is None else auxiliary)):
        if not isinstance(given, Basis):
            raise ArgumentError(f"{name} must be an md4.Basis, not {shown(given)}; see Basis.from_mol.")
    if auxiliary is None:
        check_order(4 * basis.lmax)
    elif basis.pure != auxiliary.pure:
        raise ArgumentError("the basis sets of an integral must be all spherical or all Cartesian.")
    else:
        check_order(2 * max(2 * basis.lmax, auxiliary.lmax))
