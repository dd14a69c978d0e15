"""Compiles kernels ahead of their first use, in parallel processes.

`compile_all` is for a user (`md4.contract.warmup`). `compile_ahead` is what a first call does by itself where many
kernels are missing: from a process of its own, since processes that a caller's starts would import the caller's script
again.
"""

import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread

from md4.gpu.compile import capability_of, kernel_path, launcher
from md4.gpu.context import current_capability, current_device
from md4.gpu.device_code import cuda
from md4.support.log import log
from md4.support.processes import allowed_jobs, can_keep, can_start, command, environment
from md4.support.progress import compiling

# Fewer missing kernels than this are compiled where they are used.
WORTH_PROCESSES = 12


def compile_variant(device, variant):
    """Compiles a variant for a device into the disk cache, in a process of the pool."""
    cuda.select_device(device)
    launcher(variant, capability_of(device), device)


def end_with_parent():
    """Ends a process of the pool with the one that made the pool: it would wait for work forever, on the GPU."""

    def watch():
        wait([parent_process().sentinel])
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def compiled(variants, jobs, device):
    """Compiles variants in `jobs` processes; yields as each is done."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), end_with_parent) as pool:
        yield from pool.map(partial(compile_variant, device), variants)


def missing(variants, capability):
    """Those that the disk cache does not hold."""
    return [variant for variant in variants if not kernel_path(variant, capability).exists()]


def compile_all(variants, jobs, progress):
    """Compiles variants in `jobs` processes, for the current device."""
    log.info("%d kernels are compiled by %d processes, once for this version of md4", len(variants), jobs)
    with compiling(len(variants), progress) as bar:
        for _ in compiled(variants, jobs, current_device()):
            bar.update()


def compile_ahead(asked, progress=None):
    """Compiles, in parallel, what the disk cache lacks, if that is worth it; errors are left to the first use.

    Parameters
    ----------
    asked : callable
        Finds the variants, if they may be compiled ahead.
    progress : bool, optional
        Show a bar; default: where stderr is a terminal.
    """
    jobs = allowed_jobs()
    if jobs < 2 or not can_start() or not can_keep():
        return
    todo = missing(asked(), current_capability())
    jobs = min(jobs, len(todo))
    if len(todo) < WORTH_PROCESSES:
        return
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        child = subprocess.Popen(command("from md4.gpu.warmup import serve; serve()"), env=environment(), **pipes)
    except OSError:
        return
    log.info("%d kernels are compiled by %d processes, once for this version of md4", len(todo), jobs)
    with compiling(len(todo), progress) as bar, child:
        try:
            child.stdin.write(pickle.dumps((todo, jobs, current_device())))
            child.stdin.close()
        except BrokenPipeError:
            return  # it did not get as far as reading
        for _ in child.stdout:
            bar.update()


def serve():
    """The other end of `compile_ahead`: writes a line for each kernel.

    Its own processes do not inherit the pipe: the caller would wait for them if this one were killed.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for _ in compiled(*pickle.load(sys.stdin.buffer)):
        print(file=out, flush=True)
