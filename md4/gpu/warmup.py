"""Compiles kernels ahead of their first use, in parallel processes.

`compile_all` is for a user (`md4.contract.warmup`), who can also carry kernels to another machine: `export_kernels` and
`import_kernels`. `compile_ahead` is what a first call does by itself where many kernels are missing: from a process of
its own, since processes that a caller's starts would import the caller's script again.
"""

import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from math import comb, prod
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread
from time import perf_counter, process_time

from md4.errors import ArgumentError
from md4.gpu import compile_worker
from md4.gpu.compile import compile_kernel, is_kept, kept_kernels, kernel_entry, sm
from md4.gpu.context import current_capability
from md4.support import bundle
from md4.support.cache import cache_folder, write
from md4.support.log import log
from md4.support.processes import allowed_jobs, can_keep, can_start, command, environment
from md4.support.turns import compile_in_turn

# Fewer missing kernels than this are compiled where they are used.
WORTH_PROCESSES = 12


def start_worker(capability):
    """The first that a spawned process of a pool does, which compiles for a compute capability and needs no device."""
    end_with_parent()
    compile_worker.start(capability)


def start_fork(pipe):
    """The first that a forked process of a pool does: it closes the descriptor of `serve`'s pipe."""
    end_with_parent()
    os.close(pipe)


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
    return 1.2 if name in ("digest_rows", "correlation_by_warps", "r_by_axis") else 0.8


def compiled(variants, capability, jobs, *start):
    """Compiles variants in `jobs` processes, the longest first; yields a line for the log as each is done.

    `start`: the context of `multiprocessing`, and what processes do first with which arguments.
    """
    with ProcessPoolExecutor(jobs, *start) as pool:
        wanted = sorted(variants, key=expected_seconds, reverse=True)
        runs = [pool.submit(compile_variant, capability, variant) for variant in wanted]
        try:
            for run in as_completed(runs):
                yield run.result()
        finally:  # where one failed, the others are left to their first use
            pool.shutdown(cancel_futures=True)


def missing(variants, capability):
    """Those that neither the disk cache nor md4-kernels holds."""
    return [variant for variant in variants if not is_kept(variant, capability)]


def compile_all(variants, jobs, capability, progress):
    """Compiles variants in `jobs` processes, in turn (`md4.support.turns`); returns those that others have not made."""

    def work(todo, bar):
        number = min(jobs, len(todo))
        log.info("%d kernels are compiled by %d processes, once for this version of md4", len(todo), number)
        for line in compiled(todo, capability, number, get_context("spawn"), start_worker, (capability,)):
            log.debug("compiled %s", line)
            bar.update()

    return compile_in_turn("kernels", lambda: missing(variants, capability), work, progress)


def export_kernels(variants, capability, path):
    """Writes kernels of variants to a file (`md4.support.bundle`), wherever they are kept.

    Raises
    ------
    ArgumentError
        One is kept nowhere, since the cache cannot be written.
    OSError
        The file cannot be written.
    """

    def kernels():
        for variant in sorted(variants, key=lambda variant: variant.name):
            kernel = next(kept_kernels(variant, capability), None)
            if kernel is None:
                raise ArgumentError(
                    f"the kernel {variant.name} was compiled, but the cache {cache_folder()} did not keep it; "
                    "set MD4_CACHE_DIR to a folder of yours with enough space."
                )
            yield variant.name, kernel

    bundle.write(path, sm(capability), kernels())


def import_kernels(path, capability=None):
    """Puts the kernels of a file into the disk cache, all or, where the file is not as it should be, none.

    Parameters
    ----------
    path : str or Path
        Of what `export_kernels` wrote.
    capability : tuple of int, optional
        Compute capability for which the kernels must be; by default any.

    Returns
    -------
    number : int
        Of kernels.
    architecture : str
        For which they are, such as 'sm_90'.

    Raises
    ------
    ArgumentError
        The file cannot be used here, or the cache cannot be written.
    """
    try:
        found = bundle.Bundle(path, capability and sm(capability))
        kernels = {name: found.load(name) for name in found.entries}
        if None in kernels.values():
            raise ValueError("is damaged")
    except OSError as error:
        raise ArgumentError(f"cannot read {str(path)!r}: {error.strerror}.") from error
    except ValueError as error:
        text = "Nothing was imported; write the file anew by `md4 warmup --export` of this version of md4."
        raise ArgumentError(f"{str(path)!r} {error}. {text}") from error
    if not all(write(*kernel_entry(name, found.architecture), kernel) for name, kernel in kernels.items()):
        text = "set MD4_CACHE_DIR to a folder of yours with enough space"
        raise ArgumentError(f"the cache {cache_folder()} cannot be written; {text}.")
    return len(kernels), found.architecture


def compile_ahead(asked, progress=None):
    """Compiles, in parallel, what the disk cache lacks, if that is worth it; errors are left to the first use.

    Processes that use the same cache do this in turn (`md4.support.turns`): the next one finds what others have made.

    Parameters
    ----------
    asked : callable
        Finds the variants, if they may be compiled ahead.
    progress : bool, optional
        Show a bar; default: where stderr is a terminal.
    """
    jobs = allowed_jobs()
    if (jobs < 2 and os.environ.get("MD4_JOBS")) or not can_start() or not can_keep():
        return  # a process that may use one processor only, as ranks often may, has another one compile on it
    capability, variants = current_capability(), asked()
    if len(missing(variants, capability)) < WORTH_PROCESSES:
        return
    compile_in_turn(
        "kernels", lambda: missing(variants, capability), lambda todo, bar: compile_there(todo, jobs, capability, bar),
        progress,
    )  # fmt: skip


def compile_there(todo, jobs, capability, bar):
    """Has a process of its own compile variants, in `jobs` processes at most, if that is worth it."""
    jobs = min(jobs, len(todo))
    if len(todo) < WORTH_PROCESSES:
        return
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        child = subprocess.Popen(command("from md4.gpu.warmup import serve; serve()"), env=environment(), **pipes)
    except OSError:
        return
    log.info("%d kernels are compiled by %d processes, once for this version of md4", len(todo), jobs)
    with child:
        try:
            child.stdin.write(pickle.dumps((todo, jobs, capability)))
            child.stdin.close()
        except BrokenPipeError:
            return  # it did not get as far as reading
        for line in child.stdout:
            log.debug("compiled %s", line.decode().strip())
            bar.update()


def serve():
    """The other end of `compile_there`: writes a line of the log for each kernel.

    Its own processes are forks, which is safe without a device and without threads. They have all that the first kernel
    took to be loaded. They do not keep the pipe: the caller would wait for them if this one were killed.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    variants, jobs, capability = pickle.load(sys.stdin.buffer)
    compile_worker.start(capability)
    quickest, *others = sorted(variants, key=expected_seconds)
    print(compile_variant(capability, quickest), file=out, flush=True)
    for line in compiled(others, capability, jobs, get_context("fork"), start_fork, (out.fileno(),)):
        print(line, file=out, flush=True)
