"""Compiles the loops of the CPU ahead of their first use, some of them in a second process.

There are few: their code is the same for all shells, and depends on the operator and the target only. They are compiled
for the types of examples, which are those of a call for two s shells.
"""

import subprocess
from functools import cache
from types import SimpleNamespace

import numpy as np

from md4.cpu.derivative_matrices import digest
from md4.cpu.derivatives import derivative_scatter
from md4.cpu.digestion import digest_blocks
from md4.cpu.fitting_forces import Factors, fitted_sums
from md4.cpu.gradient import KET, Tiles, derivative_norms, forces, reverse_sums, workspace
from md4.cpu.groups import FIELD, STATE, TASK, Groups, aligned_empty
from md4.cpu.h_matrices import h_matrices, numbers_of, shape_of
from md4.cpu.hermite_coulomb import contract_r
from md4.cpu.integrals import fill_blocks
from md4.cpu.matrices import transposed_sum
from md4.cpu.run import Sizes
from md4.cpu.screening import covering, norms_of_blocks, norms_of_density, survivors
from md4.cpu.targets import copy_blocks, scatter_blocks
from md4.method.operators import Mixture, kind_table
from md4.method.scatter import EVERY_SYMMETRY
from md4.shells.basis import Basis
from md4.shells.shell_pairs import shell_pairs
from md4.support.log import log
from md4.support.memory import HostMemory
from md4.support.processes import allowed_jobs, can_keep, can_start, collect_seldom, command, environment
from md4.support.turns import compile_in_turn

# Loops by name, and about how long each takes to compile, in tenths of a second.
COSTS = {"h": 10, "fill": 13, "copy": 2, "scatter": 3, "derivatives": 11, "digest": 8, "contract": 9, "transpose": 2,
         "blocks": 2, "norms": 2, "count": 3, "cover": 4, "reverse": 22, "fitted": 20, "bounds": 9,
         "forces": 7, "matrices": 11}  # fmt: skip
# Those of J and K besides, for each backend. The last one is for GPUs.
BESIDE = ["transpose", "blocks", "norms", "count", "cover"]
# How much a second process takes to start, in the same unit.
START = 3

ready = set()  # names of loops that this process has compiled or read


def names_for(use, kind):
    """Names of the loops for blocks of integrals ('blocks'), J alone ('j'), J and K, or their derivatives as forces
    ('forces', with density fitting 'fitting') or as matrices ('matrices').

    For 'tensor' and 'lists' those that all of them need. A tensor also needs `scatter_name`, which takes long for s1.
    """
    names = ["h", f"fill {kind}"]
    if use in ("lists", "tensor"):
        return names
    if use == "blocks":
        return [*names, "copy"]
    of_use = {"forces": [f"reverse {kind}", "forces"], "fitting": [f"fitted {kind}", "forces"],
              "matrices": [names[1], "matrices"]}  # fmt: skip
    if use in of_use:  # lists and bounds are those of 1/r
        return list(dict.fromkeys(["h", "fill coulomb", "bounds coulomb", *of_use[use]]))
    return [*names, f"contract {kind}" if use == "j" else "digest", *BESIDE[:-1]]


def scatter_name(aosym):
    """Name of the loop that writes a tensor of a symmetry."""
    return f"scatter {aosym}"


def every_name(kinds=("coulomb",)):
    """Names of all loops for some operators."""
    uses = "blocks", "j", "jk", "forces", "fitting", "matrices"
    names = [name for kind in kinds for use in uses for name in names_for(use, kind)]
    if "erf" in kinds:  # for range-separated functionals
        names += names_for("forces", Mixture.kind)
    return list(dict.fromkeys([*names, *map(scatter_name, EVERY_SYMMETRY), "derivatives", *BESIDE]))


@cache
def examples():
    """Arrays and numbers as in a call."""
    basis = Basis.from_arrays(l=[0, 0], exponents=[[1.0]] * 2, coefficients=[[1.0]] * 2, centres=np.zeros((2, 3)))
    pairs = shell_pairs(basis, [[1, 0]])
    groups, data = Groups.of(pairs), pairs.primitives
    shape, matrices = shape_of(*pairs.shell_class, pairs.single), np.zeros((1, 2, 2))
    return SimpleNamespace(
        h=(numbers_of(data), groups.members, 0, 0, shape, 0, 1, np.empty(1), aligned_empty((1,)), 0),
        tasks=np.zeros((1, TASK.size), dtype=np.int64), lists=np.zeros((1, FIELD.size), dtype=np.int64),
        items=np.zeros((1, 4), dtype=np.int64), matrices=matrices, matrix=matrices[0], numbers=np.zeros(1),
        integers=np.zeros(STATE.size, dtype=np.int64), four=np.zeros((1, 1, 1, 1)),
        work=Sizes(*[1] * 11).allocated(HostMemory()), indices=np.zeros(1, dtype=np.int64),
        small=np.zeros(1, dtype=np.int32), reverse=workspace(HostMemory(), *[1] * 6),
        kets=np.zeros((1, KET.size), dtype=np.int64),
    )  # fmt: skip


def arguments(name):
    """(loop, arguments) of a name."""
    of, (name, _, kind) = examples(), name.partition(" ")
    numbers, integers, matrices, matrix, small, table = (
        of.numbers, of.integers, of.matrices, of.matrix, of.small, of.tasks
    )  # fmt: skip
    blocks, norms, contracted = (of.items, of.tasks, of.lists, numbers), (matrix, numbers, numbers), (matrices, of.four)
    operator = ()
    if kind and name != "scatter":  # else it is a symmetry
        operator = Mixture(1.0, 1.0, 1.0).parameter if kind == Mixture.kind else 0.0, kind_table(kind)

    def reverse(terms):
        tiles = Tiles(of.items, integers, small, small)
        bounds = numbers, integers, tiles, 0.0
        return 0, 0, 1, of.lists, of.kets, integers, *bounds, *operator, terms, of.reverse, numbers, numbers

    return {
        "h": lambda: (h_matrices(), of.h),
        "fill": lambda: (fill_blocks(kind), (of.tasks, of.lists, integers, 0.0, *operator, of.work)),
        "copy": lambda: (copy_blocks(), (*blocks, 0)),
        "scatter": lambda: (scatter_blocks(kind), (*blocks, True, integers, numbers)),
        "derivatives": lambda: (derivative_scatter(), (*blocks, True, integers, numbers)),
        "digest": lambda: (digest_blocks(), (*blocks, matrices, matrices, numbers, matrices, matrices)),
        "contract": lambda: (
            contract_r(kind), (integers, of.lists, 0.0, *operator, *contracted, *contracted, matrices, of.work)
        ),
        "transpose": lambda: (transposed_sum(), (matrix, matrix, 1.0, 1.0, True, 0, 0, matrix, numbers)),
        "blocks": lambda: (norms_of_blocks(), (matrix, of.indices, 0, 0, matrix)),
        "norms": lambda: (norms_of_density(), (matrix, of.indices, numbers, table, table, numbers, *norms)),
        "count": lambda: (
            survivors(), (table, table, 0, 0, table, numbers, numbers, small, *norms, 0.0, small, table, numbers)
        ),
        "cover": lambda: (covering(), (small, 0.0, 0, table)),
        "forces": lambda: (forces(), of.h),
        "matrices": lambda: (digest(), (*blocks, matrices, True, True, numbers, of.four, of.four)),
        "bounds": lambda: (
            derivative_norms(kind), (of.lists, 0, 1, 1, integers, *operator, numbers, of.reverse, matrices)
        ),
        "reverse": lambda: (reverse_sums(kind), reverse((matrices, numbers, numbers, matrices, matrix))),
        "fitted": lambda: (fitted_sums(kind), reverse(Factors(numbers, numbers, numbers, integers))),
    }[name]()  # fmt: skip


def compile_ahead(names, progress=None):
    """Compiles the loops that neither this process nor the disk cache has.

    Half of them are left to a second process, where there is a processor for it and a cache by which it can hand them
    over. Errors there are left to the first use. Several processes that use the same cache do this in turn.
    """
    if ready.issuperset(names):
        return 0
    todo = compile_in_turn("functions", lambda: missing(names), compile_missing, progress, unit="function")
    ready.update(names)
    return len(todo)


def missing(names):
    """Those of some loops that neither this process nor the disk cache has."""
    todo = []
    for name in names:
        loop, these = arguments(name)
        if name not in ready and not loop.is_kept(these):
            todo.append(name)
    return todo


def lost(names):
    """Those of some loops that the disk cache does not have."""
    return [name for name in names for loop, these in [arguments(name)] if not loop.is_on_disk(these)]


def compile_missing(todo, bar):
    """Compiles loops, here and in the second process."""
    here, there = shared(todo) if allowed_jobs() > 1 and can_start() and can_keep() else (todo, [])
    log.info("%d functions are compiled for the CPU, once for this version of md4: %s", len(todo), ", ".join(todo))
    child = second_process(there) if there else None
    try:
        for name in here:
            compile_one(name)
            bar.update()
        for _ in child.stdout if child else ():
            bar.update()
    finally:
        if child:
            child.kill()
            child.wait()
            child.stdout.close()


def compile_one(name):
    """Compiles or reads the loop of a name."""
    loop, these = arguments(name)
    loop.compile(these)


def shared(names):
    """Two lists of names that take about equally long, the second in a process that has to start first."""
    lists, times = ([], []), [0, START]
    for name in sorted(names, key=lambda name: -COSTS[name.partition(" ")[0]]):
        n = int(times[1] < times[0])
        lists[n].append(name)
        times[n] += COSTS[name.partition(" ")[0]]
    return lists


def second_process(names):
    """A process that compiles loops, and writes a line for each; None if it cannot be started."""
    code = f"from md4.cpu.warmup import serve; serve({names!r})"
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        return subprocess.Popen(command(code), env=environment(), **pipes)
    except OSError:
        return None


def serve(names):
    """The other end of `second_process`."""
    collect_seldom()
    for name in names:
        compile_one(name)
        print(flush=True)


def warmup(kinds=("coulomb",), progress=None):
    """Compiles all loops for some kinds of operators; returns how many were missing, and how many there are."""
    names = every_name(kinds)
    return compile_ahead(names, progress), len(names)
