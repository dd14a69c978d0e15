"""Compiles kernels ahead of their first use, in parallel processes; see `md4 warmup`."""

import multiprocessing
import os
from dataclasses import dataclass

from md4.device import cuda, current_capability, gpu_available
from md4.dispatch import capability_of, kernel_path, launcher
from md4.errors import ArgumentError, DeviceError
from md4.gpu import arithmetic_unit
from md4.operators import checked_kind
from md4.progress import Progress
from md4.variants import all_variants, basis_variants

LARGEST_L = 8


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


def compile_variant(variant):
    """Compiles a variant for the current device into the disk cache, in a process of the pool."""
    device = cuda.current_context().device.id
    launcher(variant, capability_of(device), device)


def missing(variants, capability):
    """Those that the disk cache does not hold."""
    return [variant for variant in variants if not kernel_path(variant, capability).exists()]


def warmup(lmax, kinds=("coulomb",), jobs=None, pure=True, progress=None, basis=None):
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

    Raises
    ------
    ArgumentError
        `lmax` or `jobs` out of range, or an unknown kind.
    DeviceError
        No usable GPU.
    """
    check_arguments(lmax, kinds, jobs)
    if not gpu_available():
        raise DeviceError(
            "there is nothing to warm up: kernels are compiled for the GPU of this machine, and none can be used; "
            "`md4 info` shows what is found."
        )
    capability = current_capability()
    unit = arithmetic_unit(capability)
    if basis is None:
        wanted = dict.fromkeys(v for kind in kinds for v in all_variants(unit, kind, lmax, pure))
    else:
        parts = dict.fromkeys((basis.segmented(), basis.regrouped()[0]))  # of whole tensors; of J and K
        wanted = dict.fromkeys(v for kind in kinds for part in parts for v in basis_variants(unit, kind, part))
    todo = missing(wanted, capability)
    jobs = min(jobs or os.cpu_count(), max(1, len(todo)))
    if todo:
        compile_all(todo, jobs, progress)
    return Warmup(len(todo), len(wanted) - len(todo), jobs)


def compile_all(variants, jobs, progress):
    """Compiles variants in `jobs` processes."""
    with (
        Progress(len(variants), progress, delay=0.5, label="md4 warmup", unit="kernel") as bar,
        multiprocessing.get_context("spawn").Pool(jobs) as pool,
    ):
        for _ in pool.imap_unordered(compile_variant, variants):
            bar.update()


def check_arguments(lmax, kinds, jobs):
    """ArgumentError for what cannot be warmed up."""
    if not 0 <= lmax <= LARGEST_L:
        raise ArgumentError(f"lmax must be between 0 and {LARGEST_L}, the highest of a whole quartet, not {lmax}.")
    if jobs is not None and jobs < 1:
        raise ArgumentError(f"jobs must be 1 or more, not {jobs}.")
    for kind in kinds:
        checked_kind(kind)
