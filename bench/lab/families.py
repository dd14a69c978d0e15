"""Small work for every kernel family of md4, checked against the CPU backend; what `bench/lab/sanitize.py` runs.

A family is a list of jobs, each a function without arguments that raises `Wrong` where the GPU and the CPU differ. Jobs
are as small as they can be and still reach padding, several blocks of rows and the edges of chunks.
"""

import pkgutil
import re
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise, product
from pathlib import Path
from unittest.mock import patch

import numpy as np

import md4
from md4.contract.derivatives import DerivativeRequest
from md4.contract.fitting_lists import forces_of
from md4.contract.screening import sorted_lists
from md4.contract.survivors import ListPairs
from md4.contract.tensor import ao_tensor, locked_tensor
from md4.contract.three_centre import ThreeCentre, tensor_request
from md4.contract.work import make_tasks
from md4.contract.worker import Build, PartialSums, Worker
from md4.gpu import backend as gpu
from md4.gpu import digest as gpu_digest
from md4.gpu import forces as gpu_forces
from md4.gpu import hermite_coulomb as gpu_coulomb
from md4.gpu import kernels, paths, quartet_lists
from md4.gpu import reverse_ways as gpu_ways
from md4.gpu.buffers import Buffer, copy_to_host
from md4.gpu.context import DeviceContext
from md4.gpu.kernels import fused, summed_r
from md4.gpu.kernels.grouped_rows import Groups, launch_grouped_rows
from md4.gpu.kernels.half_transform import TILE, launch_half_transform
from md4.gpu.kernels.pack import launch_pack
from md4.gpu.kernels.unpack import launch_unpack
from md4.gpu.paths import plans
from md4.gpu.tuning import REVERSE, SELECT
from md4.method.operators import OPERATORS
from md4.shells.basis import Basis
from md4.shells.shell import Shell
from md4.shells.shell_pairs import check_side, pairs_by_kind, shell_pairs

# Errors over the largest element; they are to find what is wrong, accuracy is tested elsewhere.
TOLERANCE = 1e-10
# The same in single precision, and a tolerance of a build and its ratio by which all quartets are computed in it.
SINGLE_TOLERANCE, SMALLEST, ALL_IN_SINGLE = 1e-5, 1e-30, 1e60
# The same in TF32.
TF32_TOLERANCE, SMALLEST_IN_TF32 = 2**-8, 1e-25
PARAMETERS = dict.fromkeys(OPERATORS[1:], 0.6)


class Wrong(Exception):
    """The GPU's numbers are not the CPU's."""


# shells ---------------------------------------------------------------------------------------------------------------


def crowd(l, nprims, nctr, seed, far=False):
    """Six shells of degree l on a centre each, whose numbers of primitives run through `nprims`.

    `far`: on centres so far apart that most pairs of shells lose all their primitive pairs.
    """
    rng = np.random.default_rng([seed, l, nctr])
    shells = []
    for n in range(6):
        k = nprims[n % len(nprims)]
        exponents, columns = rng.uniform(0.3, 3.0, k), rng.uniform(0.2, 1.0, (k, nctr))
        centre = rng.uniform(-1.0, 1.0, 3) + far * (n % 3) * 30.0
        shells.append(Shell(l, 4 * exponents if far else exponents, columns, centre))
    return shells


def quartets(ls, nprims=(1,), nctr=1, pure=True, far=False, count=(5, 7), ket_nprims=None):
    """(basis, bra pairs, ket pairs) of the class (la lb|lc ld), with single shells c of (la lb|lc).

    Shells a and c have `nprims` primitives, c `ket_nprims` if these are given.
    """
    of_shells = nprims, (1,), ket_nprims or nprims, (1,)
    shells = [s for n, (l, k) in enumerate(zip(ls, of_shells)) for s in crowd(l, k, nctr, n, far)]
    sides = [np.array(list(product(range(6 * n, 6 * n + 6), range(6 * n + 6, 6 * n + 12)))) for n in (0, 2)]
    bra, ket = sides if len(ls) == 4 else (sides[0], np.arange(12, 18))
    return Basis(shells, pure), bra[: count[0]], ket[: count[1]]


def few_shells(*kinds, pure=True, axis=None):
    """A basis of shells (l, primitives, contracted functions, how many), near to each other.

    `axis`: all centres have the same x, y or z (0, 1, 2).
    """
    rng = np.random.default_rng(len(kinds))
    shells = []
    for l, nprim, nctr, count in kinds:
        for _ in range(count):
            columns = rng.uniform(0.2, 1.0, (nprim, nctr))
            exponents, centre = rng.uniform(0.3, 3.0, nprim), rng.uniform(-1.0, 1.0, 3)
            if axis is not None:
                centre[axis] = 0.5
            shells.append(Shell(l, exponents, columns, centre))
    return Basis(shells, pure)


# jobs -----------------------------------------------------------------------------------------------------------------


def reference(work):
    """What `work` gives on the CPU."""
    return work("cpu")


def compare(ours, right, what, tolerance=TOLERANCE):
    """`Wrong` where two results, arrays or tuples of such, differ."""
    for mine, his in zip(ours, right) if isinstance(right, tuple) else [(ours, right)]:
        if his is None or his.size == 0:
            continue
        error = abs(on_host(mine) - his).max() / (abs(his).max() or 1.0)
        if not error < tolerance:  # NaN is wrong, too
            raise Wrong(f"{what}: error {error:.1e}")


def on_host(array):
    """A result as an ndarray."""
    return array.copy_to_host() if hasattr(array, "copy_to_host") else array


def both(what, work):
    """`work`, a function of the backend's name, on the GPU and on the CPU."""
    compare(work("cuda"), reference(work), what)


def blocks(ls, path=None, unit=None, operator="coulomb", chunk=None, shared=None, summed=False, **options):
    """Every plan (of `path`) of a class of three or four shells, on an arithmetic `unit`; see `quartets`.

    `chunk`: bytes of a chunk. `shared`: bra primitives whose H the fused kernel has room for at once. `summed`: sums of
    r are made with r, however few they are.
    """
    basis, bra, ket = quartets(ls, **options)
    operator = (operator, PARAMETERS[operator]) if operator in PARAMETERS else operator
    right = reference(lambda name: md4.Engine(basis, operator=operator, backend=name).compute(bra, ket))
    engine = md4.Engine(basis, operator=operator, backend="cuda")
    (a, b), steps = (shell_pairs(*check_side(basis, side)) for side in (bra, ket)), engine.backend
    steps.context.unit = unit or steps.context.unit
    panel, rest = fused.fused_shared(a, b)
    changes = [
        (paths, "FEWEST_QUARTETS", 1),
        (gpu, "CHUNK_BYTES", chunk or gpu.CHUNK_BYTES),
        (fused, "SHARED_BYTES", shared * panel + rest if shared else fused.SHARED_BYTES),
        (summed_r, "FEWEST_SUMS", 1 if summed else summed_r.FEWEST_SUMS),
    ]
    with patched(changes):
        chosen = [plan for plan in plans(steps.context.unit, a, b) if path in (None, plan.path.name)]
        if not chosen:
            raise Wrong(f"no plan {path} for {ls} {options}")
        for plan in chosen:
            steps.plan = lambda *_, plan=plan: plan
            compare(engine.compute(bra, ket), right, f"{ls} {options} {plan}")


@contextmanager
def patched(changes):
    """(object, attribute, value) as long as the block runs."""
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(patch.object(*change))
        yield


def matrix(ls, path, nprims=(1,), pure=True):
    """(P|ab) as a matrix, by a path, or by the first plan of a class that it does not serve; (P|Q) as well."""
    basis, *_ = quartets(ls, nprims, pure=pure)
    parts = [Basis(basis.shells[first:last], pure) for first, last in ((0, 12), (12, 18))]

    def plan(bra, ket, block):
        every = plans(three.engine.backend.context.unit, bra, ket, block.matrix)
        return next((plan for plan in every if plan.path.name == path), every[0])

    def made(name):
        return ThreeCentre(*parts, backend=name).integrals()

    right = reference(made)
    three = ThreeCentre(*parts, backend="cuda")
    three.engine.backend.plan = plan
    with patched([(paths, "FEWEST_QUARTETS", 1)]):
        compare(three.integrals(), right, f"matrix {ls} {path}")
        three.metric()


def few_centres(basis):
    """Tensors of three and of two centres."""
    joined, shells = md4.Basis.joined([basis]), (0, basis.nshell)
    for aosym, count in (("s1", 3), ("s2ij", 3), ("s1", 2)):
        request = tensor_request(joined, aosym, None, (shells,) * count)
        both(f"{count} centres {aosym}", lambda name, request=request: locked_tensor(
            md4.Engine(joined, backend=name), request, None, False, False))  # fmt: skip


def tensor(basis, aosym, shls_slice=None):
    """An AO tensor."""
    both(f"int2e {aosym}", lambda name: ao_tensor(md4.Engine(basis, backend=name), aosym, shls_slice))


def derivatives(basis, name, aosym):
    """A tensor of derivatives."""
    basis = basis if name == "int2e_ip1" else md4.Basis.joined([basis])
    request = DerivativeRequest.of_name(basis, name, aosym, None)
    both(f"{name} {aosym}", lambda backend: locked_tensor(md4.Engine(basis, backend=backend), request))


def matrices(basis, count, hermi, with_k=True, omega=None):
    """J and K, or J alone, by way of Schwarz bounds."""
    dm = general(basis.nao, count)
    if hermi:
        dm = dm + (1 if hermi == 1 else -1) * dm.transpose(0, 2, 1)
    options = {"hermi": hermi, "with_k": with_k, "omega": omega}
    both(f"get_jk {options}", lambda name: tuple(md4.get_jk(basis, dm, backend=name, **options)))


def single_j(basis, omega=None):
    """J alone, whose quartets are all computed in single precision where a thread takes a primitive quartet."""
    dm = symmetric(basis.nao, 1)
    changes = [(gpu_coulomb, "SINGLE_RATIO", ALL_IN_SINGLE), (gpu_coulomb, "FEWEST_SINGLES", 0)]

    def j(name):
        return md4.get_jk(basis, dm, with_k=False, omega=omega, backend=name, direct_scf_tol=SMALLEST)[0]

    with patched(changes):
        compare(j("cuda"), reference(j), "J alone in single precision", SINGLE_TOLERANCE)


def gradient(basis, omega=None, tolerance=0.0, exchange=1.0):
    """Derivatives of the energy of J and K of a closed shell by the centres of the shells."""
    dm = symmetric(basis.nao, 1)[0]
    options = {"omega": omega, "tolerance": tolerance, "exchange": exchange}
    both("gradient", lambda name: md4.JK(basis, backend=name).gradient(dm, **options))


def single_gradient(basis):
    """The same, with all quartets in TF32 that can be, of small classes, too."""
    dm = symmetric(basis.nao, 1)[0]
    every = replace(REVERSE, single_ratio=ALL_IN_SINGLE, single_share=0.0, single_seconds=0.0)

    def found(name):
        return md4.JK(basis, backend=name).gradient(dm, tolerance=SMALLEST_IN_TF32)

    with patched([(gpu_forces, "REVERSE", every), (gpu_ways, "lane_plan", lambda *_: None)]):
        compare(found("cuda"), reference(found), "gradient in TF32", TF32_TOLERANCE)


def derivative_matrices(basis, omega=None):
    """J and K with a derivative on the first function, of two densities without symmetry."""
    dm = general(basis.nao, 2)
    both("derivative_jk", lambda name: md4.JK(basis, backend=name).derivative_jk(dm, omega=omega, tolerance=0.0))


def fitted_forces(shells, singles, tolerance=0.0, pure=True):
    """Derivatives of sums of integrals over three and two centres with random factors, in two blocks if it may be."""
    bases = few_shells(shells, pure=pure), few_shells(singles, pure=pure)
    rng, three = np.random.default_rng(1), ThreeCentre(*bases, backend="cpu")
    of_three, of_two = rng.normal(size=(three.naux, three.ncol)), rng.normal(size=(three.naux,) * 2)

    def work(name):
        three = ThreeCentre(*bases, backend=name)
        backend, every = three.engine.backend, [(n, slice(None)) for n in range(len(three.single))]
        half = max(1, len(every) // 2)
        blocks = [part for part in (every[:half], every[half:]) if part]
        made = forces_of(three, three.engine, blocks)
        for block in range(len(made.blocks)):
            rows = slice(*made.rows[made.edges[block : block + 2]])
            made.add_three(backend, block, backend.send(of_three[rows]), tolerance, True)
        made.add_two(backend, backend.send(of_two + of_two.T), tolerance)
        return made.result()

    both("forces of density fitting", work)


def unpacked(nao, count):
    """Rows of pairs as symmetric matrices, a pair in seven left out."""
    rng, i, j = np.random.default_rng(nao), *np.tril_indices(nao)
    width = len(i) + 1
    places = np.full((nao, nao), width - 1)
    places[i, j] = places[j, i] = np.where(np.arange(len(i)) % 7, rng.permutation(len(i)), width - 1)
    table = rng.normal(size=(count, width))
    context = md4.Engine(SP, backend="cuda").backend.context
    buffer, (rows, numbers) = context.pool.upload([table.ravel(), places.ravel()], context.stream)
    out, found = context.pool.get(count * nao**2), np.empty((count, nao, nao))
    launch_unpack(context, rows, table.shape, numbers, out, (nao, nao))
    copy_to_host(found, out.pointer, context.stream)
    context.pool.release(buffer)
    compare(found, table[:, places], f"{count} matrices of {nao} AOs")
    chosen = rng.permutation(count)
    buffer, (rows, numbers, of_table) = context.pool.upload([table.ravel(), places.ravel(), chosen], context.stream)
    launch_unpack(context, rows, table.shape, numbers, out, (nao, nao), rows=of_table)
    copy_to_host(found, out.pointer, context.stream)
    context.pool.release(buffer)
    compare(found, table[chosen][:, places], f"{count} matrices of {nao} AOs of rows in another order")


def packed(nao, count):
    """Lower triangles as rows of pairs, a pair in seven left out, then added to with what J adds."""
    rng, i, j = np.random.default_rng(nao), *np.tril_indices(nao)
    chosen = rng.permutation(len(i))[: len(i) - len(i) // 7]
    squares, weights, row = rng.normal(size=(nao, count, nao)), *rng.normal(size=(2, len(chosen)))
    columns, scales = i[chosen] * nao + j[chosen], rng.normal(size=count)
    right = weights * squares[i[chosen], :, j[chosen]].T
    context = md4.Engine(SP, backend="cuda").backend.context
    arrays = [squares.ravel(), columns, weights, scales, row]
    buffer, (table, *given, factors, values) = context.pool.upload(arrays, context.stream)
    out, found = context.pool.get(right.size), np.empty(right.shape)
    launch_pack(context, table, squares.shape, *given, out)
    launch_pack(context, table, squares.shape, *given, out, factors, values, add=True)
    copy_to_host(found, out.pointer, context.stream)
    context.pool.release(buffer)
    compare(found, 2 * right + scales[:, None] * row, f"{count} rows of {nao} AOs")


def times_orbitals(nao, count, columns8):
    """Rows of pairs times orbitals, which are the last index of what is made."""
    rng, i, j = np.random.default_rng(nao), *np.tril_indices(nao)
    tiles = -(-nao // TILE)
    places, side = np.zeros((nao, nao), dtype=np.int32), TILE * tiles
    places[i, j] = places[j, i] = rng.permutation(len(i))
    padded, factors = np.zeros((side, side), dtype=np.int32), np.zeros((side, 8 * columns8))
    padded[:nao, :nao], factors[:nao, :count] = places, rng.normal(size=(nao, count))
    of_tiles = padded.reshape(tiles, TILE, tiles, TILE).transpose(0, 2, 1, 3)[np.tril_indices(tiles)]
    table, context = rng.normal(size=(5, len(i))), md4.Engine(SP, backend="cuda").backend.context
    given, numbers = [factors.ravel(), table.ravel()], of_tiles.size  # factors begin at a multiple of 16 bytes
    buffer, (orbitals, rows, kept) = context.pool.upload([*given, of_tiles.reshape(-1).view(np.int64)], context.stream)
    out, found = context.pool.get(5 * nao * count), np.empty((5, nao, count))
    launch_half_transform(
        context, columns8, rows, table.shape, Buffer(kept.pointer, (numbers,), 4, kept), nao, orbitals,
        (out, nao * count, count, 1), count,
    )  # fmt: skip
    copy_to_host(found, out.pointer, context.stream)
    context.pool.release(buffer)
    compare(found, table[:, places] @ factors[:nao, :count], f"rows of {nao} AOs times {count} orbitals")


def grouped(width, factors8, sizes):
    """Rows that are added up in groups."""
    rng, count, step = np.random.default_rng(width), 8 * factors8 - 3, width + 2
    edges, many = np.cumsum([0, *sizes]), sum(sizes)
    rows, sources = rng.integers(0, 9, many), rng.integers(0, 7, many)
    array, factors = rng.normal(size=(9, width)), rng.normal(size=(7, 8 * factors8))
    before = rng.normal(size=(len(sizes), count, step))
    right = before.copy()
    for group, (first, last) in enumerate(pairwise(edges)):
        right[group, :, :width] += factors[sources[first:last], :count].T @ array[rows[first:last]]
    parts = [edges, np.arange(len(sizes)), rows, sources]
    integers = np.zeros(2 * sum(map(len, parts)), dtype=np.int32)
    context, begins = md4.Engine(SP, backend="cuda").backend.context, np.cumsum([0, *map(len, parts)]).tolist()
    integers[: begins[-1]] = np.concatenate(parts)
    given = [array.ravel(), factors.ravel(), before.ravel(), integers.view(np.int64)]
    buffer, (one, other, out, kept) = context.pool.upload(given, context.stream)
    groups = Groups(*(Buffer(kept.pointer + 4 * at, (len(part),), 4, kept) for at, part in zip(begins, parts)))
    launch_grouped_rows(context, one, (width, width), groups, other, factors8, out, (count * step, step), count)
    found = np.empty(before.shape)
    copy_to_host(found, out.pointer, context.stream)
    context.pool.release(buffer)
    compare(found, right, f"{many} rows of {width} in {len(sizes)} groups")


def digestion(basis, n_k, n_j, in_place=False, operator="coulomb", single=False):
    """All blocks of a basis into `n_k` matrices X and `n_j` matrices Y; see `md4.method.digestion`.

    X and Y depend on which pair is the bra, which backends choose; with their transposes added they are K and J. What
    is right is contracted from the CPU's tensor. `in_place`: they are digested where they are made, however few;
    `single`: in FP32.
    """
    densities, twice = symmetric(basis.nao, n_k), symmetric(basis.nao, n_j)
    operator = (operator, PARAMETERS[operator]) if operator in PARAMETERS else operator
    changes = [(paths, "FEWEST_QUARTETS", 1)] if in_place else []
    if single:
        modules = (gpu_digest, quartet_lists)
        every = replace(SELECT, single_ratio=ALL_IN_SINGLE, single_seconds=0.0)
        changes += [(module, "SELECT", every) for module in modules]

    def contracted(name):
        integrals = ao_tensor(md4.Engine(basis, operator=operator, backend=name), "s1")
        return np.einsum("abcd,nbd->nac", integrals, densities), np.einsum("abcd,ncd->nab", integrals, twice) / 2

    with patched(changes):
        ours = digested(basis, densities, twice, operator, SMALLEST if single else 0.0)
        compare(ours, reference(contracted), f"digestion {n_k} {n_j}", SINGLE_TOLERANCE if single else TOLERANCE)


def digested(basis, densities, twice, operator, tolerance):
    """(K, J) of all quartets on the GPU; `tolerance` is one that leaves out none."""
    engine = md4.Engine(basis, operator=operator, backend="cuda")
    sums, worker = engine.backend.sums, Worker(engine)
    every = pairs_by_kind(basis, sums.mixed_shells)
    worker.lists = sorted_lists(engine, every, [np.ones((2, len(pairs))) for pairs in every], 0.0, worker.list_bytes())
    pairs = ListPairs(worker.lists, basis, sums.swapped)
    norms = pairs.norms(np.ones((1, basis.nao, basis.nao)), True, True)
    survivors = pairs.survivors(norms, tolerance, False)
    build = Build(engine.operator, 0.0, densities, twice, True, survivors, lambda count: None)
    with engine.lock:
        part = PartialSums(worker, build)
        part.run(make_tasks([0.0] * len(survivors), survivors.used, 1))
        part.end()
        return tuple(m + m.transpose(0, 2, 1) for m in part.result())


def general(nao, count):
    """Density matrices without symmetry."""
    return np.random.default_rng(nao).normal(size=(count, nao, nao))


def symmetric(nao, count):
    """Symmetric density matrices."""
    dm = general(nao, count)
    return dm + dm.transpose(0, 2, 1)


# families -------------------------------------------------------------------------------------------------------------

SP = few_shells((0, 3, 1, 3), (1, 2, 1, 3))
MIXED, LONG = (1, 4, 2), (40, 1)


def each(function, *cases, **options):
    """A job for each case: positional arguments, the last of which may be a dict of named ones."""
    jobs = []
    for case in cases:
        more = case[-1] if isinstance(case[-1], dict) else {}
        jobs.append(partial(function, *(case[:-1] if more else case), **options, **more))
    return jobs


def class_of(name):
    """(la, lb, lc, ld) of a class such as 'ddps'."""
    return tuple("spdfghik".index(letter) for letter in name)


def classes(text, **options):
    """A job `blocks` for each class of a text such as 'dddd fdps'."""
    return each(blocks, *((class_of(name),) for name in text.split()), **options)


# Names of paths.
THREAD, ONE, FUSED, TWO, PLAIN = "thread_quartet", "one_product", "fused", "two_products", "plain"
WIDE = "fused_wide"

FAMILIES = {
    # pair data; pairs without primitives, long contractions
    "pairs": classes("psps fdss", far=True, nprims=(1, 3)) + classes("ssss", nprims=LONG)
    + classes("dddd gffd", far=True, nprims=(1, 3)),
    # r: registers up to L = 4, shared memory up to 18, a group of threads above
    "r in registers": [
        *classes("ssss pspp", nprims=MIXED, path=TWO),
        *classes("ddss", path=TWO), *classes("psss", nprims=MIXED, path=TWO),
        *(job for kind in OPERATORS[1:] for job in classes("psps", operator=kind, path=TWO)),
    ],
    "r by axis": classes("ddps ddfs ddds fdff ffff gfff ggfg gggg hggg hhgg", path=TWO, count=(3, 5)),
    "r by axis, by operator": [
        job for kind in OPERATORS[1:] for job in classes("ddps", operator=kind, path=TWO)
    ],
    "r by group": classes("hhhg hhhh ihhh iiii", path=TWO, count=(2, 3)),
    "r by group, by operator": [
        job for kind in OPERATORS[1:] for job in classes("hhhg", operator=kind, path=TWO, count=(1, 2))
    ],
    # a thread a quartet
    "thread a quartet": [
        *classes("ssss psps pppp dsps", nprims=MIXED, path=THREAD), *classes("dsfs", nprims=MIXED, path=THREAD),
        *classes("psps", nprims=LONG, path=THREAD, count=(2, 3)), *classes("ssss", nctr=2, path=THREAD),
        *classes("dsds", pure=False, path=THREAD, count=(4, 36)), *classes("fdps", path=THREAD),
        *classes("psps dsss", unit="fma", path=THREAD),
    ],
    "thread a quartet by operator": [
        job for kind in OPERATORS[1:] for job in classes("psps", operator=kind, path=THREAD)
    ],
    # kets of two s shells
    "one product": [
        *classes("ssss fdss ssgg", path=ONE), *classes("psss fdss ddss", nprims=MIXED, path=ONE),
        *classes("ddss", nprims=(2,), nctr=3, path=ONE), *classes("fdss", nprims=(1, 3), chunk=1, count=(3, 5)),
        *classes("iiss", pure=False, path=ONE, count=(2, 3)),
        *classes("fdss ffss", nprims=MIXED, unit="dmma8", path=ONE),
    ],
    # r and its sums over the primitives of such kets by one kernel, which is for many of them
    "summed r": [
        *classes("fdss psss", nprims=MIXED, path=ONE, summed=True),
        *classes("ddss", nprims=(2,), nctr=3, path=ONE, summed=True),
        *classes("iiss", nprims=(3, 1), path=ONE, count=(2, 5), summed=True),
        *(job for kind in OPERATORS[1:] for job in classes("psss", nprims=MIXED, operator=kind, path=ONE, summed=True)),
    ],
    # one kernel for both transforms
    "fused": [
        *classes("pppp dpps dddd fdpp fpfd", path=FUSED),
        *classes("pppp dpps dddd", nprims=(1, 3), path=FUSED), *classes("ddds", pure=False, path=FUSED),
        *classes("dddd", nprims=(5, 1), path=FUSED, shared=2), *classes("dddd", chunk=300_000, path=FUSED),
        *classes("dddd pppp", unit="dmma8", nprims=(1, 3), path=FUSED),
    ],
    # the same for groups of several ket pairs of one primitive pair each, of which the last one is not full
    "fused, groups": [
        *classes("psps dpps fpps fdds dppp", path=FUSED),
        *classes("psps dpps fpds ddpp", nprims=(1, 3), ket_nprims=(1,), path=FUSED),
        *classes("dpps", nprims=(5, 1), ket_nprims=(1,), path=FUSED, shared=2),
        *classes("dppp", chunk=30_000, path=FUSED), *classes("psps dpps", unit="dmma8", path=FUSED),
    ],
    # the same with warps that share a quartet, on GPUs that have its instructions
    "fused, wide": [
        *classes("fdfp fdfd gddd ffdd gdfd gdgd", path=WIDE), *classes("fdfp", pure=False, path=WIDE, count=(2, 3)),
        *classes("gddd", far=True, path=WIDE), *classes("ffdd", chunk=300_000, path=WIDE),
        *each(digestion, (few_shells((3, 1, 1, 2), (2, 1, 1, 2)), 1, 1)),
        *each(digestion, (few_shells((3, 1, 1, 2), (2, 1, 1, 2), (4, 1, 1, 1), axis=1), 1, 1)),
    ],
    # step 4 with panels of H in shared memory, for K = 1 and for contracted bras of few functions, and step 5
    "two, whole panel": [
        *classes("pppp dddd fdpp ddff hshs ggps", path=TWO), *classes("fddd", pure=False, path=TWO),
        *classes("ffff", chunk=300_000, path=TWO), *classes("dddd", chunk=1, path=TWO, count=(3, 3)),
        *classes("ffdd dddd", unit="dmma8", path=TWO),
        *classes("pppp dpdd dddd fdpp", nprims=(1, 3), path=TWO), *classes("ddds", nprims=(7,), path=TWO),
        *classes("psfs dpps", nprims=MIXED, path=TWO), *classes("ddff", chunk=300_000, nprims=(1, 3), path=TWO),
        *classes("fdpp dpps", unit="dmma8", nprims=(1, 3), path=TWO),
    ],
    # step 4 with H through a ring of copies
    "two, ring": [
        *classes("ffff", nprims=(1, 3), path=TWO),
        *classes("ffff gggg", chunk=300_000, nprims=(1, 3), path=TWO, count=(3, 4)),
        *classes("isii", path=TWO, count=(2, 2)), *classes("isii", nprims=(3, 1), path=TWO, count=(2, 2)),
        *classes("ffff", unit="dmma8", nprims=(1, 3), path=TWO),
    ],
    "two, rows in blocks": [
        *classes("ggdd", pure=False, path=TWO), *classes("ggdd", pure=False, nprims=(1, 3), path=TWO),
        *classes("pppp", nprims=(4, 1), nctr=5, path=TWO), *classes("dpps", nprims=(4, 1), nctr=4, path=TWO),
        *classes("iiff", path=TWO, count=(2, 3)),
    ],
    # plain multiply-adds
    "plain": [
        *classes("pppp dddd fdss", unit="fma", path=PLAIN), *classes("dddd gfds", nprims=MIXED, unit="fma"),
        *classes("ddds", nctr=2, pure=False, chunk=1, unit="fma", count=(3, 3)),
    ],
    # single shells, and parts of a matrix
    "single shells": [
        *classes("psp ppd dpf", nprims=MIXED, path=THREAD), *classes("psh", path=THREAD),
        *classes("ppd ddf", path=FUSED), *classes("ppd", nprims=(1, 3), path=FUSED), *classes("fds ssd", path=ONE),
        *classes("ddf ffg", path=TWO), *classes("dpf", nprims=(1, 3), path=TWO),
        *classes("dpd", pure=False, path=TWO), *classes("ppd", unit="fma", path=PLAIN), *each(few_centres, (SP,)),
    ],
    "matrix": [
        *(partial(matrix, class_of(name), THREAD, nprims=MIXED) for name in ("psp", "ppd", "psh")),
        *(partial(matrix, class_of(name), FUSED, nprims=(1, 3)) for name in ("ppd", "ddf")),
        *(partial(matrix, class_of(name), TWO) for name in ("ffg", "dpf")), partial(matrix, class_of("fds"), ONE),
    ],
    "scatter": each(
        tensor, (SP, "s1"), (SP, "s4"), (SP, "s8"), (SP, "s1", (0, 2, 1, 5, 3, 6, 0, 6)),
        (SP, "s4", (0, 6, 0, 6, 2, 5, 2, 5)), (few_shells((2, 2, 2, 2), (0, 1, 1, 1), pure=False), "s8"),
    ),
    "derivatives": each(
        derivatives, (few_shells((0, 1, 1, 1), (1, 2, 1, 2)), "int2e_ip1", "s2kl"),
        (few_shells((2, 1, 1, 1), (0, 2, 2, 1)), "int2e_ip1", "s1"), (few_shells((3, 1, 1, 2)), "int3c2e_ip1", "s1"),
        (few_shells((1, 2, 1, 2), (2, 1, 1, 1), pure=False), "int3c2e_ip2", "s2ij"),
        (few_shells((0, 3, 1, 1), (4, 1, 1, 1)), "int2c2e_ip1", "s1"),
    ),
    # rows of density fitting, of one tile and of several
    "unpack": each(unpacked, (1, 1), (32, 9), (70, 20), (133, 17)),
    "pack": each(packed, (1, 1), (32, 9), (70, 20), (133, 17)),
    "rows times orbitals": [
        *each(times_orbitals, (1, 1, 2), (33, 9, 2), (70, 20, 3), (130, 32, 4)),
        *each(grouped, (1, 1, [1]), (700, 2, [5, 3, 12]), (130, 4, [4, 9])),
    ],
    # J and K; quartets small and large
    "digest small blocks": each(
        digestion, (SP, 1, 1), (few_shells((1, 2, 1, 4)), 2, 1), (few_shells((1, 2, 1, 4)), 0, 2),
        (few_shells((2, 1, 1, 2), (0, 2, 1, 3)), 2, 2), (few_shells((1, 1, 1, 12)), 1, 1),
    ),
    "digest in place": each(
        digestion, (few_shells((0, 3, 1, 3), (1, 2, 1, 3)), 1, 1), (few_shells((1, 3, 1, 3)), 2, 1),
        (few_shells((0, 2, 1, 2), (2, 2, 1, 3)), 1, 2), (few_shells((0, 3, 2, 2), (1, 2, 1, 2)), 0, 1),
        (few_shells((0, 1, 1, 3), (1, 2, 1, 3)), 1, 1, {"operator": "erf"}),
        (few_shells((0, 1, 1, 3), (1, 2, 1, 3)), 1, 1, {"operator": "erfc"}), in_place=True,
    ),
    "digest in place, single precision": each(
        digestion, (few_shells((0, 3, 1, 3), (1, 2, 1, 3)), 1, 1), (few_shells((0, 2, 1, 2), (2, 2, 1, 3)), 1, 2),
        (few_shells((0, 1, 1, 3), (1, 2, 1, 3)), 1, 1, {"operator": "erf"}),
        (few_shells((0, 1, 1, 3), (1, 2, 1, 3)), 1, 1, {"operator": "erfc"}), in_place=True, single=True,
    ),
    "digest blocks": each(
        digestion, (few_shells((2, 2, 1, 3)), 2, 1), (few_shells((2, 2, 1, 3)), 0, 2), (few_shells((3, 1, 1, 3)), 1, 1),
        (few_shells((4, 1, 1, 2), (0, 1, 1, 2)), 1, 1), (few_shells((1, 2, 2, 3)), 1, 1),
        (few_shells((0, 4, 20, 2)), 1, 1), (few_shells((0, 2, 1, 2), (0, 3, 35, 1)), 1, 1),
    ),
    # even and odd parts, each with the zeros beside its integrals
    "digest parts": each(
        digestion, (few_shells((3, 1, 1, 2), (2, 1, 1, 2), (4, 1, 1, 1), axis=1), 1, 1),
        (few_shells((2, 2, 1, 2), (2, 2, 3, 1), axis=0), 1, 1), (few_shells((2, 2, 1, 2), pure=False, axis=2), 1, 1),
    ),
    "get_jk": each(
        matrices, (SP, 1, 1), (SP, 2, 0), (few_shells((2, 2, 1, 2), pure=False), 1, 2),
        (few_shells((3, 1, 1, 3)), 1, 1),
    ),
    # J in the Hermite basis
    "J alone, straight": each(
        matrices, (SP, 1, 1), (SP, 2, 1), (few_shells((2, 2, 1, 3)), 1, 1), (few_shells((1, 2, 1, 9)), 1, 1),
        with_k=False,
    ),
    "J alone, r in shared memory": each(
        matrices, (few_shells((3, 2, 1, 3)), 2, 1), (few_shells((2, 2, 1, 3)), 1, 1), with_k=False,
    ),
    "J alone, by warps": each(
        matrices, (few_shells((4, 1, 1, 2)), 1, 1), (few_shells((4, 1, 1, 2), (2, 2, 1, 2)), 1, 1), with_k=False,
    ),
    "J alone in single precision": each(
        single_j, (SP,), (SP, 0.4), (SP, -0.4), (few_shells((3, 1, 1, 3)),), (few_shells((2, 2, 1, 2), (1, 1, 1, 2)),),
    ),
    "J alone in a plane": each(
        matrices, (few_shells((2, 2, 1, 3), axis=0), 1, 1), (few_shells((3, 1, 1, 3), axis=1), 2, 1),
        (few_shells((4, 1, 1, 2), (2, 2, 1, 2), axis=2), 1, 1), with_k=False,
    ),
    "J alone in a plane, in single precision": each(
        single_j, (few_shells((3, 1, 1, 3), axis=2),), (few_shells((2, 2, 1, 2), (1, 1, 1, 2), axis=0),),
    ),
    "J alone by operator": each(
        matrices, *((basis, 1, 1, {"omega": w}) for basis in (SP, few_shells((3, 1, 1, 3))) for w in (0.4, -0.4)),
        with_k=False,
    ),
    # forces: lists of what counts, rectangles of large classes, and J alone
    "gradients": each(
        gradient, (SP,), (SP, {"omega": 0.4}), (SP, {"tolerance": 1e-8}), (SP, {"exchange": 0.0}),
        (few_shells((1, 2, 3, 3)),),
        (few_shells((3, 1, 1, 2), (2, 2, 1, 2)),), (few_shells((2, 2, 1, 2), (1, 3, 1, 1), pure=False),),
        (few_shells((4, 1, 1, 2), (0, 2, 1, 2)),), (few_shells((3, 1, 1, 2), axis=1),),
    ),
    "gradients in TF32": each(
        single_gradient, (few_shells((1, 2, 1, 2)),), (few_shells((1, 2, 1, 1), axis=1),),
    ),
    "derivatives of J and K": each(
        derivative_matrices, (SP,), (SP, 0.4), (few_shells((3, 1, 1, 2), (2, 2, 1, 2)),),
        (few_shells((2, 2, 1, 2), (1, 3, 1, 1), pure=False),), (few_shells((3, 1, 1, 2), axis=1),),
    ),
    # forces with a table of Gamma
    "gradients of density fitting": each(
        fitted_forces, ((2, 1, 1, 2), (3, 1, 1, 2)), ((2, 1, 1, 2), (3, 1, 1, 2), 1e-8), ((3, 1, 1, 2), (5, 1, 1, 2)),
        ((2, 2, 1, 2), (3, 1, 1, 2), 0.0, False),
    ),
}  # fmt: skip


# which kernels ran ----------------------------------------------------------------------------------------------------


def kernel_modules():
    """The modules of `md4.gpu.kernels`."""
    return [import_module(f"md4.gpu.kernels.{m.name}") for m in pkgutil.iter_modules(kernels.__path__)]


def factories():
    """Names of all kernel factories, by their docstrings."""
    texts = (Path(module.__file__).read_text() for module in kernel_modules())
    pattern = re.compile(r'^def (\w+)\((?:[^\n]*|\n    [^\n]*\n)\):\n    """Kernel factory', re.MULTILINE)
    return {name for text in texts for name in pattern.findall(text)}


@contextmanager
def counted_launches(around=lambda variant: nullcontext()):
    """Yields a Counter of the variants launched as long as the block runs.

    The first launch of each, which loads or compiles it, runs within the context manager that `around` gives.
    """
    found = Counter()

    launch = DeviceContext.launch

    def counted(context, variant, *args):
        found[variant] += 1
        with around(variant) if found[variant] == 1 else nullcontext():
            return launch(context, variant, *args)

    with patched([(DeviceContext, "launch", counted)]):
        yield found


def run(name):
    """Runs a family; returns what was wrong, a list of sentences."""
    wrong = []
    for job in FAMILIES[name]:
        try:
            job()
        except Exception as error:  # the other jobs are to run all the same
            wrong.append(f"{type(error).__name__}: {error}")
    return wrong
