"""Kernel variants without a GPU: which ones the launchers and whole builds ask for, their machine code, and what ptxas
says of it.
"""

import pkgutil
import re
import shutil
import subprocess
import sysconfig
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations_with_replacement, product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
from numba.cuda.compiler import _compile_pyfunc_with_fixup

from md4 import engine
from md4.contract.screening import PairList
from md4.engine import Engine, PreparedPairs
from md4.gpu import forces, hermite_coulomb, kernels, machine_code
from md4.gpu.backend import GpuBackend
from md4.gpu.buffers import Buffer
from md4.gpu.dry_run import BLOCK_SHARED, NoArray
from md4.gpu.fitting_forces import TableTerms
from md4.gpu.force_planes import Plane
from md4.gpu.h_layout import KET_SINGLES
from md4.gpu.hermite_coulomb import DeviceCoulomb
from md4.gpu.kernels import scatter
from md4.gpu.kernels.bounds import launch_bounds
from md4.gpu.kernels.density_blocks import launch_density_blocks
from md4.gpu.kernels.derivative_norms import launch_derivative_norms
from md4.gpu.kernels.digest_in_place import launch_in_place
from md4.gpu.kernels.digestion import launch_digest, launch_mirrored
from md4.gpu.kernels.exchange_derivatives import launch_exchange_derivatives
from md4.gpu.kernels.gamma_table import launch_norms
from md4.gpu.kernels.half_exchange import launch_half_exchange
from md4.gpu.kernels.narrow import launch_narrow
from md4.gpu.kernels.primitive_quartets import Extent
from md4.gpu.kernels.select_kets import ROW_BYTES
from md4.gpu.kernels.select_quartets import Selected, launch_select
from md4.gpu.kernels.unpack import launch_unpack
from md4.gpu.paths import digest_order
from md4.gpu.reverse_ways import hermite_of
from md4.gpu.tiles import blocks_of_8
from md4.gpu.tuning import REVERSE
from md4.method.boys import MMAX
from md4.method.derivatives import OF_A, OF_B
from md4.method.operators import OPERATORS, Operator
from md4.method.scatter import DERIVATIVES, EVERY_SYMMETRY, SYMMETRIES
from md4.plan import QuartetRule
from md4.shells.basis import Basis
from md4.shells.schwarz import GradientBounds
from md4.shells.shell_pairs import shell_pairs

# The arithmetic unit that each architecture takes; see md4.gpu.context.arithmetic_unit.
UNITS = {(7, 0): "fma", (7, 5): "fma", (8, 0): "dmma8", (9, 0): "dmma16", (10, 0): "dmma16"}
CAPABILITIES = {unit: cc for cc, unit in reversed(UNITS.items())} | {"dmma16": (9, 0)}
# In place of device memory.
NOTHING = Buffer(0, (1,), 8, None)
HIGHEST_L = 31
REGISTERS = 255


@contextmanager
def capability(cc):
    """Lets kernels that call device functions compile where there is no device to ask for its capability."""
    from numba.cuda import api, dispatcher

    class Device:
        compute_capability = cc

    saved = dispatcher.get_current_device, api.get_current_device
    dispatcher.get_current_device = api.get_current_device = Device
    try:
        yield
    finally:
        dispatcher.get_current_device, api.get_current_device = saved


def compile_ptx(variant, capabilities):
    """{capability: PTX} of a variant: what `numba.cuda.compile` makes for each, but for the names of functions.

    Most of the time goes into Numba's typing and lowering, the same for all capabilities, which run once.
    """
    library = lowered(variant, capabilities[0])
    return {cc: library.get_asm_str(cc=cc) for cc in capabilities}


def compile_ltoir(variant, cc):
    """What the linker makes machine code of on a GPU, as a whole like the PTX that `assemble` takes."""
    return lowered(variant, cc, lto=True).get_ltoir(cc=(*cc, "a") if cc >= (9, 0) else cc)


def lowered(variant, cc, lto=False):
    """Numba's library of a variant, for a capability first."""
    kernel = variant.kernel()
    with capability(cc):
        return _compile_pyfunc_with_fixup(
            kernel.function, kernel.types(), device=False, abi="numba", cc=cc, lto=lto, **kernel.options()
        )[0]


def factories():
    """Names of all kernel factories of md4.gpu.kernels, as the sources have them."""
    made, pattern = set(), r'^def (\w+)\((?:[^\n]*|\n    [^\n]*\n)\):\n    """Kernel factory'
    for module in pkgutil.iter_modules(kernels.__path__):
        text = Path(kernels.__path__[0], f"{module.name}.py").read_text()
        made |= set(re.findall(pattern, text, re.MULTILINE))
    assert made
    return made


# ptxas ----------------------------------------------------------------------------------------------------------------


def sm(cc):
    """An architecture as ptxas calls it, such as 'sm_90'."""
    return f"sm_{cc[0]}{cc[1]}"


def find_ptxas():
    """The assembler of the CUDA wheels, or the one on the path; None where there is neither."""
    wheels = Path(sysconfig.get_path("purelib"), "nvidia")
    found = sorted(wheels.glob("cu*/bin/ptxas")) + sorted(wheels.glob("cuda_nvcc/bin/ptxas"))
    return str(found[-1]) if found else shutil.which("ptxas")


@cache
def known_architectures():
    """What the assembler knows, such as 'sm_90'; empty without one."""
    if find_ptxas() is None:
        return frozenset()
    told = subprocess.run([find_ptxas(), "--help"], capture_output=True, text=True, check=True).stdout
    return frozenset(re.findall(r"'(sm_\d+)'", told))


@dataclass(frozen=True)
class Usage:
    """What a kernel takes: registers of a thread, static shared memory of a block, bytes of spills and of the stack."""

    registers: int
    shared: int
    spill: int
    stack: int


def assemble(ptx, cc, registers=None):
    """(`Usage`, machine code) of a PTX text, by the options that `md4.gpu.compile` gives the assembler.

    `registers`: those of its `Kernel`.
    """
    limit = () if registers is None else (f"-maxrregcount={registers}",)
    usual = assemble_by(ptx, cc, limit)
    if usual[0].stack >= machine_code.STACK:
        for options in machine_code.OPTIONS:
            found = assemble_by(ptx, cc, (*limit, *options))
            if found[0].stack <= machine_code.LEFT * usual[0].stack:
                return found
    return usual


def assemble_by(ptx, cc, options):
    """As `assemble`, by the given options."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [find_ptxas(), "-v", *options, f"-arch={sm(cc)}", str(source), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{sm(cc)}: {done.stderr}"
        code = cubin.read_bytes()

    def largest(pattern):
        return max((int(n) for n in re.findall(pattern, done.stderr)), default=0)

    stores, loads = largest(r"(\d+) bytes spill stores"), largest(r"(\d+) bytes spill loads")
    registers, shared = largest(r"Used (\d+) registers"), largest(r"(\d+) bytes smem")
    return Usage(registers, shared, max(stores, loads), largest(r"(\d+) bytes stack frame")), code


def usage(variant, capabilities):
    """{capability: `Usage`} of a variant."""
    registers = variant.kernel().registers
    return {cc: assemble(ptx, cc, registers)[0] for cc, ptx in compile_ptx(variant, capabilities).items()}


# what the launchers ask for -------------------------------------------------------------------------------------------


def fake_backend(unit, operator):
    """A GPU backend that works on nothing; its context notes what is asked for.

    Without tensor cores all shared memory of sm_90 is allowed.
    """
    backend = GpuBackend.without_device(operator, CAPABILITIES[unit], 1 << 45)
    backend.context.block_shared = BLOCK_SHARED[(8, 0) if unit == "dmma8" else (9, 0)]
    return backend


def fake_prepared(pairs, backend):
    """Pairs as `GpuBackend.prepare` makes them, of those that the host made."""
    task = (pairs.la, pairs.lb, pairs.nctr_a, pairs.nctr_b), [None] * 7, 0.0
    return PreparedPairs(pairs, backend.pair_maker.write(task, pairs.pairs, pairs.start), backend)


def pair_list(a, b, nprim, count, pure):
    """`count` times the pair of shells a = (l, nctr) and b, of `nprim` primitives each, on one centre."""
    coefficients = [np.ones((n, nctr)) for n, (_, nctr) in ((nprim, a), (1, b))]
    basis = Basis.from_arrays([a[0], b[0]], [np.ones(nprim), [1.0]], coefficients, np.zeros((2, 3)), pure=pure)
    return shell_pairs(basis, np.repeat([[0, 1]], count, axis=0))


# Primitive pairs of bra and ket, and pairs in either list: kernels are chosen by these, too.
LENGTHS = ((1, 1, 1), (2, 1, 1), (2, 2, 1), (6, 6, 1), (30, 1, 300), (1, 1, 300))


def launch_coulomb(backend, lists, mirrored):
    """What J alone launches for all pairs of `lists`, in both precisions; `mirrored`: all centres lie in a plane."""
    centres = np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 0.0 if mirrored else 1.0]])
    basis, ones = Basis.from_arrays([0, 0], [[1.0]] * 2, [[1.0]] * 2, centres), np.ones(sum(map(len, lists)))
    rule = QuartetRule(1e-10, None, ones, ones, ones, ones, None)
    with patch.object(hermite_coulomb, "FEWEST_SINGLES", 0):
        target = DeviceCoulomb(backend, basis, [NOTHING], rule, lists)
        target.load(lists)
        for l_ket, l_bra in combinations_with_replacement(sorted({prepared.facts.l for prepared in lists}), 2):
            target.add(l_bra, l_ket, 0, 1)
        target.add_products(lists[0], lists[0], 1.0, (NOTHING, 0, 1, 8))
        target.collect(lists, [NOTHING])


def launch_gradient(backend, bras, kets):
    """What gradients launch for lists `bras` with lists `kets`, all quartets of which count."""
    lists = [PairList(side, *[np.ones(len(side))] * 3, (0, 0)) for side in (*bras, *kets)]
    basis = Basis.from_arrays([0, 0], [[1.0]] * 2, [[1.0]] * 2, np.zeros((2, 3)))
    bounds = [GradientBounds(this.pairs.pairs, basis.centres, this.exact, this.exact) for this in lists]
    planes = [None, *(Plane(0, mixed) for mixed in (False, True))]
    norms, numbers, of_d = [NOTHING] * 4, range(len(lists)), (*[NOTHING] * 3, 1)
    of_densities = [
        forces.Terms(of_d, (*norms, 1, 0.0), NOTHING, plane, True, (of_d, of_d), 0.0) for plane in planes
    ]  # fmt: skip
    of_table = TableTerms(NOTHING, NOTHING, 0.0, dict.fromkeys(numbers, (0, 0)), (1, 1), (1, 1), 0)
    ones = (np.ones(this.pairs.nprim) for this in lists)
    of_prims = [SimpleNamespace(own=these, derivative=these) for these in ones]
    made = forces.DeviceForces(basis, lists, bounds, of_prims)
    first, second = numbers[: len(bras)], numbers[len(bras) :]
    made.extent = Extent(dict.fromkeys(range(HIGHEST_L + 1), (1.0, 1.0)), 1.0, 1.0)
    made.ways = {plane: ways_with_singles(made, backend.context, plane) for plane in planes}
    launch_density_blocks(backend.context, *[NOTHING] * 5)
    launch_norms(backend.context, of_table.gamma_of(0, 1), bras[0], kets[0], of_table.norms_of(0, 1))
    for terms in (*of_densities, of_table):
        tasks = made.tasks(backend, first, second)
        limits = made.limits(backend.context, first, second, terms)
        counts, _ = made.count([backend], tasks, second, terms, limits)
        for task, of_task, out in zip(tasks, counts, made.outs(backend.context, tasks)):
            made.launch(backend, task, second, of_task, terms, limits[task.number], backend.context, out)
    # more densities than there is room for in shared memory
    norms[2] = Buffer(0, (ROW_BYTES,), 8, None)
    made.count([backend], tasks[:1], second, of_densities[0]._replace(norms=(*norms, 1, 0.0)), limits)


def ways_with_singles(made, context, plane):
    """Those of `DeviceForces`, with all variants in TF32, however little they are needed."""
    every = replace(REVERSE, single_share=0.0, single_seconds=0.0)
    with patch.object(forces, "REVERSE", every):
        return made.ways_of(context, [this.prepared for this in made.lists], plane)


def launch_exchange(backend, bra, ket):
    """What derivatives of K launch for the first list as bra and the second as ket."""
    two, hermite = Buffer(0, (2,), 8, None), hermite_of(bra.facts)
    w = NOTHING, 8 * blocks_of_8(hermite.nherm), bra.facts.na + bra.facts.nb, 1
    launch_half_exchange(backend.context, (NOTHING, NOTHING), bra, ket, (two,) * 4, hermite, *(NOTHING,) * 3, w)
    for by_b in (False, True):
        launch_exchange_derivatives(backend.context, bra, (two,) * 4, NOTHING, by_b, w, NOTHING)


def launch_parts(backend, bra, ket):
    """What J and K launch for the even and odd parts of two lists, in each of the planes."""
    for axis in range(3):
        if parts := backend.parts(bra, ket, axis):
            blocks = backend.part_blocks(parts)
            for block in blocks:
                block.limit(Buffer(0, (len(bra),), 4, None))
            backend.run_parts(parts, blocks)
            for counts in ((1, 1), (1, 0)):
                launch_mirrored(backend.context, blocks, axis, bra, ket, [None] * 2, False, [None] * 4, counts, 1)


def used_variants(unit, kind="coulomb", lmax=6, lengths=LENGTHS, kinds_of_shells=(True, False), general=()):
    """Variants that engines launch, with their shared memory, for all classes up to (ll|ll), l = `lmax`.

    `general` are shells (l, nctr) besides those of one contracted function.
    """
    shells = sorted([*((l, 1) for l in range(lmax + 1)), *general])
    sides = [(b, a) for a, b in combinations_with_replacement(shells, 2)]
    backend = fake_backend(unit, Operator(kind, 0.0 if kind == "coulomb" else 0.3))
    for pure, (k_bra, k_ket, count) in product(kinds_of_shells, lengths):
        bras, kets = (
            [fake_prepared(pair_list(*side, k, count, pure), backend) for side in sides] for k in (k_bra, k_ket)
        )
        # where lists of both sides are alike, each pair of them is met in both roles anyway
        exchanged = () if unit == "fma" else (False,) if k_bra == k_ket else (False, True)
        for bra, ket in product(bras, kets):
            shape = (len(bra), len(ket), bra.pairs.na, bra.pairs.nb, ket.pairs.na, ket.pairs.nb)
            block = backend.scratch(shape)
            Engine.run_steps(SimpleNamespace(backend=backend), bra, ket, block)
            if unit != "fma":  # where there are J and K, which leave quartets out
                block.limit(Buffer(0, (len(bra),), 4, None))
                Engine.run_steps(SimpleNamespace(backend=backend), bra, ket, block)
            for swapped in {digest_order(unit, bra.pairs, ket.pairs, long) for long in (True, False)}:
                order = (ket, bra) if swapped else (bra, ket)
                for counts in ((1, 1), (1, 0)):
                    launch_digest(backend.context, block, *order, [None] * 2, False, [None] * 4, counts, 1)
                if unit != "fma":
                    launch_parts(backend, *order)
            for turned in exchanged:
                launch_exchange(backend, *((ket, bra) if turned else (bra, ket)))
            plan = backend.plan(bra, ket)
            order = (ket, bra) if plan.swap else (bra, ket)
            if unit != "fma" and plan.path.digests(*(side.facts for side in order)):
                more = [None] * 2, False, [None] * 4, (1, 1), 1, Selected(None, [None] * 2, None, None, 1, 1)
                order[1].h(KET_SINGLES)
                for single in (False, True):
                    launch_in_place(backend.context, backend.operator, None, None, *order, *more, single)
        for turned in exchanged:
            launch_gradient(backend, *((kets, bras) if turned else (bras, kets)))
    for mirrored in (False, True):
        launch_coulomb(backend, bras, mirrored)
    launch_bounds(backend.context, block, None)
    launch_derivative_norms(backend.context, bra, None, 1, None, None)
    launch_narrow(backend.context, NOTHING, None)
    launch_select(backend.context, None, NOTHING, 0, (), (0, 1, 0, 1), (), Selected(None, (), None, None, 1, 1))
    for aosym in SYMMETRIES:
        scatter.launch_scatter(backend.context, aosym, None, 1, [None] * 4, None, False, False, None, None)
    return backend.context.asked


def single_list(l, nprim, count, pure):
    """`count` times the same single shell of degree l."""
    basis = Basis.from_arrays([l], [np.ones(nprim)], [np.ones(nprim)], np.zeros((1, 3)), pure=pure).with_unit
    return shell_pairs(basis, np.repeat([[0, basis.unit]], count, axis=0))


# Primitive pairs of pairs and primitives of single shells, and their numbers.
FEW_LENGTHS = ((1, 1, 1), (2, 1, 1), (1, 1, 300), (2, 2, 300))


def used_by_few_centres(unit, kind="coulomb", lmax=6, single_l=8, lengths=FEW_LENGTHS, pure=True, matrix=None):
    """As `used_variants`, for (ab|P) and (P|Q) with a and b up to l = `lmax`, P and Q up to `single_l`.

    Also for derivatives of pairs and of single shells, with some of the other lists.

    `matrix`: only those of `ThreeCentre`, or of tensors.
    """
    shells = [(l, 1) for l in range(lmax + 1)]
    backend = fake_backend(unit, Operator(kind, 0.0 if kind == "coulomb" else 0.3))
    for k_pairs, k_single, count in lengths:
        pairs = [
            fake_prepared(pair_list(b, a, k_pairs, count, pure), backend)
            for a, b in combinations_with_replacement(shells, 2)
        ]
        singles = [fake_prepared(single_list(l, k_single, count, pure), backend) for l in range(single_l + 1)]
        for (bra, ket), rows in product(
            [*product(pairs, singles), *product(singles, singles)], (False, True) if matrix is None else (matrix,)
        ):
            shape = (len(bra), len(ket), bra.facts.na, bra.facts.nb, ket.facts.na, ket.facts.nb)
            block = backend.matrix_block(NoArray((1, 1)), 0, 0, shape) if rows else backend.scratch(shape)
            Engine.run_steps(SimpleNamespace(backend=backend), bra, ket, block)
    for aosym in (*EVERY_SYMMETRY, DERIVATIVES):
        scatter.launch_scatter(backend.context, aosym, None, 1, [None] * 4, None, False, False, None, None)
    for side, ket in product([*pairs, *singles], (pairs[0], pairs[-1], singles[-1])):
        bra = side.derived(OF_A if side.facts.single else OF_A + OF_B)
        if bra.facts.l + ket.facts.l <= MMAX:
            block = backend.scratch((len(bra), len(ket), bra.facts.nab, 1, ket.facts.nab, 1))
            Engine.run_steps(SimpleNamespace(backend=backend), bra, ket, block)
    for density in (None, NOTHING):
        launch_unpack(backend.context, None, (1, 1), None, None, (1, 1), density)
    for count in (0, *range(1, 33, 8)):
        backend.rehearse_rows(9, count)
    backend.rehearse_pack()
    return backend.context.asked


@cache
def every_variant(cc):
    """All variants that classes up to (ii|ii), and (ii|l = 8), use on an architecture, plain multiply-adds included."""
    out = used_variants(UNITS[cc]) | used_variants("fma", lengths=LENGTHS[:1])
    for kind in OPERATORS[1:]:
        out |= used_variants(UNITS[cc], kind, lengths=LENGTHS[-1:])
    return out | used_by_few_centres(UNITS[cc]) | used_by_few_centres(UNITS[cc], pure=False, single_l=6)


# what whole tensors and builds ask for --------------------------------------------------------------------------------


@contextmanager
def devices_without_memory(unit, left=1 << 45):
    """Lets `backend="cuda"` go through all that a call does, as a dry run; yields the variants that it asks for.

    Results mean nothing. `left` are the bytes that seem to be free.
    """
    real, found = engine.make_backend, {}

    def backend(name, operator, *options):
        if name != "cuda":
            return real(name, operator, *options)
        made = GpuBackend.without_device(operator, CAPABILITIES[unit], left)
        made.context.asked = found
        return made

    nothing = patch.object(GpuBackend, "compile_ahead", lambda *_, **__: None)
    with patch.object(engine, "make_backend", backend), nothing:
        yield found
