"""`md4 warmup`: all kernels that a basis, or shells up to an angular momentum, may ask for are compiled ahead.

They are found by dry runs (`md4.gpu.dry_run`) of tensors and of builds of J and K, with plenty of memory and with
little, which cuts lists in other ways.
"""

import os
from dataclasses import dataclass
from itertools import product

import numpy as np

from md4 import gpu
from md4.contract.fitting_lists import rehearse
from md4.contract.frame import Frame
from md4.contract.gradient import rehearse_forces
from md4.contract.pair_rows import PairRows
from md4.contract.ranks import Alone
from md4.contract.team import Team
from md4.contract.tensor import Request, add_slice, segmented, slice_target
from md4.contract.three_centre import BELOW_COULOMB, ThreeCentre, tensor_request
from md4.contract.worker import Build
from md4.engine import Engine
from md4.errors import ArgumentError, DeviceError, MemoryLimitError
from md4.method.operators import Operator, check_order, checked_kind
from md4.method.scatter import SYMMETRIES, THREE_CENTRE
from md4.shells.basis import Basis
from md4.support.arguments import as_list, checked_flag, checked_integer, checked_progress, shown, whole_number

LARGEST_L = 8
# Bytes of device memory that seem to be free.
MEMORIES = (1 << 45, 3 << 26)
# Tolerance of builds, the default of `md4.JK`, and cutoffs of shell pairs in density fitting.
TOLERANCE, CUTOFFS = 1e-13, (0.0, 1e-10)
# Numbers of occupied orbitals: kernels depend on how many eights they are, and are the same for all above 32.
OCCUPIED = (8, 16, 24, 32)
# Shells of general contractions in the correlation-consistent basis sets of the elements up to argon, as (l, nctr).
# Segmented basis sets, as those of Pople and of Ahlrichs, have none.
GENERAL_CONTRACTIONS = ((0, 2), (0, 3), (1, 2))
# For shells up to an l: numbers of primitives for s, p and all higher shells, and numbers of shells of each kind.
PRIMITIVES, COPIES = ((1, 1, 1), (2, 2, 2), (8, 4, 1), (6, 3, 2), (21, 12, 8)), (2, 24)
PRIMITIVES_OF_GENERAL = 8
# Range separation in Bohr^-1, or exponents, of operators that have a parameter.
PARAMETER = 0.3


@dataclass(frozen=True)
class Warmup:
    """What a warm-up did.

    Attributes
    ----------
    missing : list of md4.gpu.compile.Variant
        Those that were compiled, or would be.
    kept : int
        Variants found in the cache or in md4-kernels.
    jobs : int
        Processes that compiled.
    asked : dict
        All variants, as keys.
    capability : tuple of int
        Compute capability (major, minor) of the GPU for which they are.
    """

    missing: list
    kept: int
    jobs: int
    asked: dict
    capability: tuple


def warmup(
    lmax, kinds=("coulomb",), jobs=None, pure=True, progress=None, basis=None, auxiliary=None, arch=None, listed=False,
    forces=False, mp2=False,
):
    """Compiles what shells up to l = `lmax` need, for the current device; or what a basis needs.

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
    arch : str, optional
        The architecture of the GPU, such as 'sm_90', in place of that of the current device. Then no GPU is needed, so
        that kernels can be compiled on a login node or for a container.
    listed : bool
        Compiles nothing: what would be compiled is only found.
    forces : bool
        With `basis`: what gradients of J and K need, too, or with `auxiliary` those of density fitting.
    mp2 : bool
        With `basis`, without `auxiliary`: what MP2 and integrals over molecular orbitals need, too.

    Raises
    ------
    ArgumentError
        `lmax` or `jobs` out of range, an unknown kind or architecture, or an argument of another type.
    UnsupportedError
        A basis of l > 8.
    DeviceError
        No usable GPU and no `arch`.
    """
    kinds = checked_kinds(kinds)
    check_arguments(lmax, jobs, pure, progress, basis, auxiliary, forces, mp2)
    capability = capability_of(arch)
    from md4.gpu.warmup import compile_all, missing

    lmax, jobs = whole_number(lmax), whole_number(jobs)  # Python's ints: NumPy's small ones overflow
    asked = {}
    for kind in kinds:
        if basis is None:
            asked |= asked_by_shells(lmax, pure, kind, capability)
        elif auxiliary is None:
            asked |= asked_by_basis(basis, kind, capability, forces=forces, mp2=mp2)
        else:
            asked |= asked_by_fitting(basis, auxiliary, kind, capability, forces=forces)
    todo = missing(asked, capability)
    jobs = min(jobs or os.cpu_count(), max(1, len(todo)))
    if todo and not listed:
        todo = compile_all(todo, jobs, capability, progress)
    return Warmup(todo, len(asked) - len(todo), jobs, asked, capability)


def asked_by(work, kind, capability, memories=MEMORIES):
    """The variants that `work(backend)` asks for, a dict.

    Parameters
    ----------
    work : callable
        work(backend): what is done with a backend that launches nothing.
    kind : str
        The operator's.
    capability : tuple of int
        Compute capability.
    memories : sequence of int
        Bytes of device memory, with each of which the work is done.
    """
    from md4.gpu.backend import GpuBackend

    asked = {}
    for left in memories:
        backend = GpuBackend.without_device(Operator(kind, 0.0 if kind == "coulomb" else PARAMETER), capability, left)
        try:
            work(backend)
        except MemoryLimitError:  # a large molecule, which cannot be computed with so little memory
            if left == memories[0]:
                raise
        asked |= backend.context.asked
    return asked


def asked_by_basis(basis, kind, capability, memories=MEMORIES, forces=False, mp2=False):
    """The variants that tensors and builds of J and K of a basis ask for, and gradients and MP2; see `asked_by`."""

    def work(backend):
        make_tensors(backend, basis)
        if kind in BELOW_COULOMB and backend.context.unit != "fma":
            make_builds(backend, basis)
            if forces:
                make_forces(backend, basis)
        if mp2:
            make_rows(backend, basis)

    return asked_by(work, kind, capability, memories)


def make_tensors(backend, basis):
    """All kinds of tensors of a basis."""
    for aosym in SYMMETRIES:
        make_tensor(Engine(basis, backend=backend), Request.checked(basis, aosym, None))


def make_tensor(engine, request):
    """A tensor, or what its symmetry needs of it."""
    engine, request = segmented(engine, request)
    layout = request.layout(engine.bra_basis)
    add_slice(engine, request, layout, slice_target(engine, request, layout))


def make_builds(backend, basis):
    """J and K of a basis, and J alone."""
    make_build(backend, basis, 2, 1)
    make_build(backend, basis, 0, 1)


def make_forces(backend, basis):
    """Gradients of J and K of a basis, and of J alone, for densities that are symmetric in its plane, if it has one."""
    frame = Frame(basis.regrouped()[0], np.arange(basis.nao), backend, Alone())
    one, density = np.ones(1), np.eye(basis.nao)[None]
    for exchange in (one, 0 * one):
        rehearse_forces(backend, frame.basis, TOLERANCE * frame.sharpening, (density, one, exchange), 0.0)


def make_rows(backend, basis):
    """Rows of pairs of AOs, whole and up to the piece, and what is made of them for numbers of occupied orbitals."""
    rows = PairRows(Engine(basis, backend=backend))
    for complete in (False, True):
        rows.rehearse(complete)
    for count in (0, *OCCUPIED):
        backend.rehearse_rows(rows.nao, count)


def make_build(backend, basis, exchange, coulomb):
    """X and Y of a basis (`md4.method.digestion`) for numbers of density matrices; without exchange J alone."""
    frame = Frame(basis.regrouped()[0], np.arange(basis.nao), backend, Alone())
    ones, tolerance = np.ones((2, basis.nao, basis.nao)), TOLERANCE * frame.sharpening
    build = Build(backend.operator, tolerance, ones[:exchange], ones[:coulomb], exchange > 0)
    Team.of(Engine(frame.basis, backend=backend.with_operator(Operator()))).rehearse(build, ones[:1], tolerance)


def asked_by_fitting(basis, auxiliary, kind, capability, memories=MEMORIES, forces=False):
    """The variants that integrals over three and two centres ask for, and gradients; see `asked_by`."""
    cutoffs = CUTOFFS if kind in BELOW_COULOMB else CUTOFFS[:1]

    def work(backend):
        joined = Basis.joined([basis, auxiliary])
        one, two = ((0, len(joined.parts[0])), (len(joined.parts[0]), joined.unit))
        for aosym in THREE_CENTRE:
            make_tensor(Engine(joined, backend=backend), tensor_request(joined, aosym, None, (one, one, two)))
        only = Basis.joined([auxiliary])
        every = (0, auxiliary.nshell)
        make_tensor(Engine(only, backend=backend), tensor_request(only, "s1", None, (every, every)))
        for cutoff in cutoffs:
            three = ThreeCentre(basis, auxiliary, backend.operator, backend, cutoff=cutoff)
            three.rehearse()
            if forces and kind in BELOW_COULOMB and backend.context.unit != "fma":
                rehearse(three, backend)

    return asked_by(work, kind, capability, memories)


# shells up to an angular momentum -------------------------------------------------------------------------------------


def asked_by_shells(lmax, pure, kind, capability):
    """The variants that shells up to an angular momentum ask for, contracted as common basis sets are."""
    asked = {}
    for primitives, copies, planar in product(PRIMITIVES, COPIES, (False, True)):
        basis = shells_up_to(lmax, pure, primitives, copies, planar)
        asked |= asked_by_basis(basis, kind, capability, MEMORIES[:1])
    return asked


def shells_up_to(lmax, pure, primitives, copies, planar):
    """A basis of so many shells of each kind on neighbouring centres, in a plane or not."""
    kinds = [(l, 1, primitives[min(l, 2)]) for l in range(lmax + 1)]
    kinds += [(l, nctr, PRIMITIVES_OF_GENERAL) for l, nctr in GENERAL_CONTRACTIONS if l <= lmax]
    rng, shells = np.random.default_rng(0), [kind for kind in kinds for _ in range(copies)]
    centres = rng.uniform(-2.0, 2.0, (len(shells), 3)) * (1.0, 1.0, 0.0 if planar else 1.0)
    return Basis.from_arrays(
        [l for l, *_ in shells], [np.geomspace(0.3, 0.3 * 2.0 ** (n - 1), n) for *_, n in shells],
        [rng.uniform(0.2, 1.0, (n, nctr)) for _, nctr, n in shells], centres, pure=pure,
    )  # fmt: skip


# arguments ------------------------------------------------------------------------------------------------------------


def capability_of(arch):
    """Compute capability (major, minor) of an architecture such as 'sm_90', or of the current device for None."""
    if arch is None:
        if not gpu.available():
            raise DeviceError(
                "there is nothing to warm up: kernels are compiled for the GPU of this machine, and none can be used; "
                "`md4 info` shows what is found. --arch sm_90 compiles for a GPU of another machine."
            )
        from md4.gpu.context import current_capability

        return current_capability()
    gpu.check_installed()
    from md4.gpu.machine_code import architectures

    known = architectures()
    if arch not in known:
        raise ArgumentError(f"arch must be one of {', '.join(known)}, not {shown(arch)}.")
    return int(arch[3:-1]), int(arch[-1])


def checked_kinds(kinds):
    """Kinds of operators as a tuple; ArgumentError for anything else."""
    found = as_list(kinds)
    if found is None:
        raise ArgumentError(f"kinds must be a sequence of operators such as ('coulomb',), not {shown(kinds)}.")
    return tuple(checked_kind(kind) for kind in found)


def check_arguments(lmax, jobs, pure, progress, basis, auxiliary, forces, mp2):
    """ArgumentError or UnsupportedError for what cannot be warmed up."""
    checked_flag("pure", pure)
    checked_progress(progress)
    if checked_flag("forces", forces) and basis is None:
        raise ArgumentError("forces=True takes a basis.")
    if checked_flag("mp2", mp2) and (basis is None or auxiliary is not None):
        raise ArgumentError("mp2=True (--mp2) takes a basis, and no auxiliary one (--df).")
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
        check_order(4 * basis.lmax, derivative=int(forces))
    elif basis.pure != auxiliary.pure:
        raise ArgumentError("the basis sets of an integral must be all spherical or all Cartesian.")
    else:
        check_order(2 * max(2 * basis.lmax, auxiliary.lmax) + int(forces), derivative=int(forces))
