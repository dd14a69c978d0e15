"""The work of `md4 warmup`: code is compiled ahead of its first use, for the GPU or for the CPU."""

import os
import sys
from time import perf_counter

from md4 import gpu
from md4.cli.ending import writing
from md4.errors import ArgumentError
from md4.support.cache import cache_folder
from md4.support.display import size_text


def warm_up(backend, arch, listed, export, lmax, kinds, jobs, pure, basis, auxiliary, forces, mp2):
    """Compiles what is missing, and returns a sentence on what was done; arguments and errors as `md4.contract.warmup`.

    `backend` is 'cuda', 'cpu', or 'auto' for that which calculations take. On the CPU the code is the same for all
    shells, so only the kinds of operators count. `export` is the file for all kernels of the GPU that are asked for, or
    None.
    """
    if backend == "auto" and arch is None and export is None and not gpu.available():
        print("md4: no GPU can be used (`md4 info` says why), so this is a warm-up of the CPU.", file=sys.stderr)
        backend = "cpu"
    start = perf_counter()
    if backend == "cpu":
        from md4.cpu.warmup import every_name, lost, missing, warmup

        names = every_name(tuple(kinds))
        if listed:
            todo = missing(names)
            text = f"{len(todo)} functions of the CPU would be compiled, {len(names) - len(todo)} are there"
            return "\n".join([*todo, text])
        made, every = warmup(tuple(kinds))
        if gone := lost(names):
            raise ArgumentError(
                f"{len(gone)} functions were compiled, but the cache {cache_folder()} did not keep them; set "
                "MD4_CACHE_DIR to a folder that can be written."
            )
        seconds = perf_counter() - start
        return f"{made} functions of the CPU compiled in {seconds:.1f} s, {every - made} were in the cache"
    gpu.check_installed()
    from md4.contract.warmup import warmup
    from md4.cpu.warmup import BESIDE, compile_ahead

    done = warmup(
        lmax, kinds, jobs, pure, basis=basis, auxiliary=auxiliary, arch=arch, listed=listed, forces=forces, mp2=mp2
    )  # fmt: skip
    if listed:
        return listing(done)
    compile_ahead(BESIDE)
    seconds = perf_counter() - start
    text = f"{len(done.missing)} kernels compiled in {seconds:.1f} s by {done.jobs} processes, {done.kept} were there"
    return text if export is None else f"{text}\n{exported(done, export)}"


def exported(done, name):
    """Writes the kernels of a warm-up to a file, and returns a sentence on it."""
    from md4.gpu.warmup import export_kernels

    with writing(name):
        export_kernels(done.asked, done.capability, name)
        size = os.path.getsize(name)
    return f"{len(done.asked)} kernels written to {name} ({size_text(size)})"


def imported(name, arch):
    """Puts the kernels of a file into the cache, and returns a sentence on it.

    What the CPU does beside them, which no file holds, is compiled. The kernels must be for the architecture `arch`, by
    default for that of this machine's GPU; where there is none, for any.
    """
    gpu.check_installed()
    from md4.contract.warmup import capability_of
    from md4.cpu.warmup import BESIDE, compile_ahead
    from md4.gpu.warmup import import_kernels

    number, architecture = import_kernels(name, capability_of(arch) if arch or gpu.available() else None)
    compile_ahead(BESIDE)
    return f"{number} kernels for {architecture} read from {name}"


def listing(done):
    """What would be compiled, the longest first, and about how long it would take."""
    from md4.gpu.warmup import expected_seconds

    times = sorted(((expected_seconds(variant), variant.name) for variant in done.missing), reverse=True)
    lines = [f"{seconds:6.1f} s  {name}" for seconds, name in times]
    total = sum(seconds for seconds, _ in times)
    text = f"{len(times)} kernels would be compiled, {done.kept} are there; about {total:.0f} s of a processor"
    return "\n".join([*lines, f"{text}, {total / done.jobs:.0f} s with {done.jobs} processes"])
