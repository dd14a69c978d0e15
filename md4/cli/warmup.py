"""The work of `md4 warmup`: it has all code compiled ahead of its first use, for the GPU or for the CPU.

On the CPU a few functions serve all classes and basis sets. A small calculation of each kind calls them all.
"""

import sys
from functools import partial
from time import perf_counter

import numpy as np

from md4 import gpu
from md4.contract.fock import JK
from md4.contract.tensor import ao_tensor
from md4.engine import Engine
from md4.method.operators import Operator
from md4.method.scatter import SYMMETRIES
from md4.shells.basis import Basis
from md4.support.cache import cached_names
from md4.support.progress import compiling

# Parameter of operators that have one, in Bohr^-1 or Bohr^-2.
PARAMETER = 0.3
# omega of the operators of J and K.
OMEGAS = {"coulomb": 0.0, "erf": PARAMETER, "erfc": -PARAMETER}


def warm_up(backend, lmax, kinds, jobs, pure, basis):
    """Compiles what is missing, and returns a sentence on what was done; arguments and errors as `md4.gpu.warmup`.

    `backend` is 'cuda', 'cpu', or 'auto' for that which calculations take.
    """
    if backend == "auto" and not gpu.available():
        print("md4: no GPU can be used (`md4 info` says why), so this is a warm-up of the CPU.", file=sys.stderr)
        backend = "cpu"
    start = perf_counter()
    if backend == "cpu":
        made, kept = warm_up_cpu(kinds)
        return f"{made} functions of the CPU compiled in {perf_counter() - start:.1f} s, {kept} were in the cache"
    gpu.check_installed()
    from md4.gpu.warmup import warmup

    done = warmup(lmax, kinds, jobs, pure, basis=basis)
    seconds = perf_counter() - start
    return f"{done.compiled} kernels compiled in {seconds:.1f} s by {done.jobs} processes, {done.kept} in the cache"


def warm_up_cpu(kinds, progress=None):
    """Calls all compiled functions of the CPU backend; returns how many entries of the cache are new, and were there.

    Parameters
    ----------
    kinds : sequence of str
        Kinds of operators.
    progress : bool, optional
        As for `md4.support.progress.Progress`.
    """
    before = set(cached_names(".loop"))
    calls = [call for kind in dict.fromkeys(kinds) for call in calls_of(kind)]
    with compiling(len(calls), progress) as bar:
        for call in calls:
            call()
            bar.update()
    return len(set(cached_names(".loop")) - before), len(before)


def calls_of(kind):
    """Calls that together use all compiled functions of the CPU for a kind of operators."""
    basis = Basis.from_arrays([1, 0], [[1.0, 0.5], [1.0]], [[1.0, 0.3], [1.0]], np.eye(2, 3))
    engine = Engine(basis, operator=Operator(kind, 0.0 if kind == "coulomb" else PARAMETER), backend="cpu")
    yield partial(engine.compute, [[0, 1]], [[0, 0]])
    yield from (partial(ao_tensor, engine, aosym, progress=False) for aosym in SYMMETRIES)
    if kind in OMEGAS:
        jk = JK(basis, OMEGAS[kind], backend="cpu", progress=False)
        yield from (partial(jk.get_jk, np.eye(basis.nao), with_k=with_k) for with_k in (True, False))
