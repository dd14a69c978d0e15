"""Small quartets in single precision (FP32) on the emulated GPU, beside double precision, and where it is refused."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from emulator import host_array, running
from emulator.intrinsics import called
from emulator.machine import Machine

import md4
from md4.contract.screening import schwarz_bounds
from md4.gpu import digest, hermite_coulomb, paths, quartet_lists
from md4.gpu.buffers import Buffer, copy_to_device
from md4.gpu.emit.single_zeros import make_single_zeros
from md4.gpu.h_layout import BRA_ELEMENTS, KET_ELEMENTS, KET_SINGLES
from md4.gpu.kernels.digest_in_place import item_entries, launch_in_place
from md4.gpu.kernels.primitive_quartets import LARGEST_SINGLE_DISTANCE, extent, fits_single, operator_arguments
from md4.gpu.kernels.select_quartets import Selected
from md4.gpu.tuning import SELECT
from md4.method.boys import SINGLE_FAR, SINGLE_FAR_SLOPE, SINGLE_STEP, boys_table, make_scaled_boys, single_boys_table
from md4.method.operators import Operator, kind_table, zeros_function
from md4.shells.shell_pairs import list_facts

ORDERS = range(7)
# Largest relative error of [0]^(m), a few units in the last place times m + 1.
ZERO_ERROR = 2e-6


def as_it_is(function):
    """In place of a compiler."""
    return function


@pytest.fixture
def machine():
    """One whose kernels may read the tables of single precision."""
    made = Machine()
    tables = {}
    for l in ORDERS:
        table = single_boys_table(l)
        memory = made.memory.allocate(table.nbytes)
        tables[l] = memory[: table.nbytes].view(np.float32).reshape(table.shape)
        tables[l][...] = table
    made.tables = tables
    made.thread = type("Thread", (), {"local": made.memory})()
    made.window, made.window_address = np.empty(0, dtype=np.uint8), 0
    return made


def both_zeros(machine, l, p, q, separation, omega):
    """[0]^(m), m = 0..l, in single and in double precision; 1/r if `omega` is 0, else erf."""
    kind = "erf" if omega else "coulomb"
    of_operator, _ = operator_arguments(SimpleNamespace(table=lambda *_: None), kind, omega, True, l)
    arguments = (p, q, *separation, of_operator, machine.tables[l])
    single = np.array(called(make_single_zeros(l, kind == "erf"), machine, arguments))
    right, r2 = np.zeros(l + 1), float(separation @ separation)
    zeros_function(kind, as_it_is)(l, p, q, r2, omega, kind_table(kind), right, 0, 1)
    return single, right


@pytest.mark.parametrize("omega", [0.0, 0.3, 5.0])
@pytest.mark.parametrize("l", ORDERS)
def test_zeros(machine, l, omega):
    """Exponents from 1e-2 to 1e5; T = 0, small, about the end of the table, and large."""
    rng, end = np.random.default_rng(l), SINGLE_FAR + SINGLE_FAR_SLOPE * l
    for n in range(200):
        p, q = 10 ** rng.uniform(-2, 5, 2)
        near_end = end * (1 + rng.uniform(-1, 1) * 1e-6)
        t = (0.0, 10 ** rng.uniform(-8, 0), rng.uniform(0, 1.2 * end), near_end, 1e6)[n % 5]
        direction = rng.normal(size=3)
        separation = direction * np.sqrt(t * (p + q) / (p * q)) / np.linalg.norm(direction)
        ours, right = both_zeros(machine, l, p, q, separation, omega)
        np.testing.assert_allclose(ours, right, rtol=ZERO_ERROR, atol=1e-37)


@pytest.mark.parametrize("omega", [1e-20, 1e-18, 1e-12, 1e12, 1e20])
@pytest.mark.parametrize("exponent", [5e-13, 1e-2, 3.0, 1e5, 5e14])
def test_zeros_of_every_omega(machine, omega, exponent):
    """Finite and right within the limits of omega and of exponents, but for digits of -2 rho theta below 1e-38."""
    for separation in np.array([[0.0, 0.0, 0.0], [0.3, -1.0, 2.0]]):
        ours, right = both_zeros(machine, 1, exponent, 2 * exponent, separation, omega)
        np.testing.assert_allclose(ours, right, rtol=ZERO_ERROR, atol=1e-34 * max(1.0, right[0]))


def test_zeros_that_underflow(machine):
    """High orders of tight charges far apart are below FP32's range: they are zeros, and the others are right."""
    ours, right = both_zeros(machine, 6, 1e8, 1e8, np.array([3e4, -1e4, 2e4]), 0.0)
    assert abs(right[-1]) < 1e-45 < abs(right[0])
    np.testing.assert_allclose(ours, right, rtol=ZERO_ERROR, atol=1e-37)
    assert ours[-1] == 0.0 != ours[0]


@pytest.mark.parametrize("m", [0, 3, 6])
def test_table(m):
    """The Taylor series between grid points, and the asymptotic form from the table's end on."""
    table, boys = single_boys_table(m).astype(float), make_scaled_boys(as_it_is)
    rows = len(table)
    assert (rows - 1) * SINGLE_STEP == SINGLE_FAR + SINGLE_FAR_SLOPE * m
    for row, shift in product(range(0, rows, 40), (-0.5, 0.3)):
        t = max(0.0, (row + shift) * SINGLE_STEP)
        step = row * SINGLE_STEP - t
        series = sum(table[row, k] * step**k for k in range(table.shape[1]))
        assert series == pytest.approx(boys(m, 1.0, 1.0, t, boys_table()), rel=1.2e-7)
    end = (rows - 1) * SINGLE_STEP
    far = np.prod(np.arange(1, 2 * m, 2.0)) / (2 * end) ** m * np.sqrt(np.pi / end) / 2
    assert far == pytest.approx(boys(m, 1.0, 1.0, end, boys_table()), rel=6e-8)


def narrow(context, array):
    """An array on the device, of 4-byte numbers: as it is, if it is of integers, else in FP32."""
    array = np.ascontiguousarray(array if array.dtype == np.int32 else array.astype(np.float32))
    buffer = context.pool.get(-(-array.size // 2))
    copy_to_device(buffer.pointer, array, context.stream)
    return Buffer(buffer.pointer, (array.size,), 4, buffer)


def all_quartets(context, nbra, nket, size):
    """`Selected` of all quartets, as items in double and in single precision alike."""
    starts = range(0, nket, size)
    items = [(i, first, min(size, nket - first)) for i in range(nbra) for first in starts]
    entries, items = np.arange(nket, dtype=np.int32)[::-1], np.array(items, dtype=np.int32)
    entries, items = narrow(context, entries), narrow(context, items)
    _, (counts,) = context.pool.upload([np.full(2, items.size // 3)], context.stream)
    return Selected(entries, (items, items), counts, None, items.size // 3, size)


def digested(basis, operator, bra, ket, dm, twice, single, size=None):
    """X and Y of all quartets of two lists of pairs, by the kernel that digests in place."""
    with running():
        engine = md4.Engine(basis, operator=operator, backend="cuda")
        context = engine.backend.context
        bra, ket = engine.prepare(bra), engine.prepare(ket)
        first_aos = [basis.ao_loc[pairs.pairs.pairs] for pairs in (bra, ket)]
        given = [dm, np.zeros_like(dm), twice, np.zeros_like(twice), *first_aos]
        _, (d, x, d2, y, *places) = context.pool.upload([np.ascontiguousarray(a) for a in given], context.stream)
        if single:
            d, d2 = (narrow(context, array) for array in (dm, twice))
        matrices = [buffer.part(0, (buffer.size,)) for buffer in (d, x, d2, y)]
        size = size or item_entries(bra.facts, ket.facts, len(bra) * len(ket))
        quartets = all_quartets(context, len(bra), len(ket), size)
        h = bra.h(BRA_ELEMENTS).array, ket.h(KET_SINGLES if single else KET_ELEMENTS).array
        counts = len(dm), len(twice)
        launch_in_place(
            context, operator, *h, bra, ket, places, False, matrices, counts, basis.nao, quartets, single
        )  # fmt: skip
        return [host_array(buffer, "float64").reshape(dm.shape).copy() for buffer in (x, y)]


def random_basis(ls, nprim, nctr, pure):
    """Shells of the angular momenta `ls` near each other."""
    rng, shells = np.random.default_rng(len(ls)), []
    for l in ls:
        columns = rng.uniform(0.2, 1.0, (nprim, nctr))
        shells.append(md4.Shell(l, 10 ** rng.uniform(-1, 2, nprim), columns, rng.normal(size=3)))
    return md4.Basis(shells, pure=pure)


CASES = {
    "(ss|ss)": ((0, 0, 0, 0), 1, 1, True, "coulomb"),
    "(ps|ps), K = 4": ((1, 0, 1, 0), 2, 1, True, "coulomb"),
    "(pp|pp)": ((1, 1, 1, 1), 1, 1, True, "coulomb"),
    "(pp|pp) of erf, K = 4": ((1, 1, 1, 1), 2, 1, True, "erf"),
    "(dp|ps)": ((2, 1, 1, 0), 1, 1, True, "coulomb"),
    "(ds|ps), Cartesian": ((2, 0, 1, 0), 1, 1, False, "coulomb"),
    "(ps|ss) of erfc": ((1, 0, 0, 0), 1, 1, True, "erfc"),
    "(ps|ss) of two functions": ((1, 0, 0, 0), 2, 2, True, "coulomb"),
}


@pytest.mark.sample("(ss|ss)", "(ps|ps), K = 4", "(ds|ps), Cartesian", "(ps|ss) of erfc")
@pytest.mark.races
@pytest.mark.parametrize("name", CASES)
def test_quartets(name):
    """Two matrices, one of which has X only; several items of a bra pair, the last one with lanes that have nothing."""
    ls, nprim, nctr, pure, kind = CASES[name]
    basis, operator = random_basis(ls, nprim, nctr, pure), Operator(kind, 0.0 if kind == "coulomb" else 0.4)
    rng = np.random.default_rng(7)
    dm, twice = rng.normal(size=(2, basis.nao, basis.nao)), rng.normal(size=(2, basis.nao, basis.nao))
    given = basis, operator, [[0, 1]] * 2, [[2, 3]] * 3, dm, twice
    for ours, right in zip(digested(*given, True, 2), digested(*given, False, 2)):
        assert abs(ours - right).max() < 2e-6 * abs(right).max()
        assert not np.array_equal(ours, right)


@pytest.mark.sample("0-*")
@pytest.mark.parametrize("ls", [(0, 0, 0, 0), (1, 0, 1, 0), (1, 1, 1, 1), (2, 0, 1, 1)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_error_beside_the_bound(ls, seed):
    """Contracted shells, near and far, with coefficients of both signs, which cancel: below 1e-6 of T_ab T_cd |D|."""
    rng, shells = np.random.default_rng(seed), []
    for l in ls:
        columns = rng.uniform(0.1, 1.0, 3) * rng.choice([1, -1], 3)
        shells.append(md4.Shell(l, 10 ** rng.uniform(-2, 4, 3), columns, 10 ** rng.uniform(-1, 1) * rng.normal(size=3)))
    basis = md4.Basis(shells)
    bra, ket, cpu = [[0, 1]], [[2, 3]], md4.Engine(basis, backend="cpu")
    bound = np.prod([terms.item() for _, terms in schwarz_bounds(cpu, np.array([bra, ket]))])
    dm = rng.normal(size=(1, basis.nao, basis.nao))
    given = basis, Operator("coulomb"), bra, ket, dm, dm
    for ours, right in zip(digested(*given, True), digested(*given, False)):
        assert np.linalg.norm(ours - right) < 1e-6 * bound * np.linalg.norm(dm)


@pytest.mark.parametrize(
    "exponents, distance, ls, right",
    [
        ((2e4, 0.1), 1e3, (1, 1, 1, 1), True),
        ((1e6, 1e6), 1e3, (1, 1, 1, 1), True),
        ((1e8, 1e8), 1e3, (1, 1, 1, 1), False),  # (2 rho)^L
        ((1e8, 0.1), 1e3, (1, 1, 1, 1), True),  # s functions only are so tight
        ((1e-9, 1.0), 1e3, (0, 0, 0, 0), True),
        ((6e-16, 1.0), 1e3, (0, 0, 0, 0), False),  # 1 / (p q sqrt(p + q))
        ((1e17, 1.0), 1e3, (0, 0, 0, 0), False),  # p q
        ((1e39, 1e-10), 1e3, (0, 0, 1, 1), False),  # p
        ((2e4, 0.1), 2 * LARGEST_SINGLE_DISTANCE, (1, 1, 1, 1), False),
    ],
)
def test_limits(exponents, distance, ls, right):
    """Exponents and distances of a calculation are within the range of FP32; extremes are not."""
    basis = md4.Basis.from_arrays([0, 1], [[e] for e in exponents], [[1.0]] * 2, [[0.0] * 3, [0.0, 0.0, distance]])
    bra, ket = (list_facts(*side, True, 1, 1, 1, 1, 1, False) for side in (ls[:2], ls[2:]))
    assert fits_single(extent(basis), bra, ket) == right


@pytest.mark.sample("100000*")
@pytest.mark.parametrize("ratio, kinds", [(1e5, {False, True}), (0.0, {False})])
def test_a_build(ratio, kinds, monkeypatch):
    """J and K of a basis whose quartets are in part below the ratio: the errors stay below the tolerance."""
    tolerance, launched = 1e-8, set()
    for module in (quartet_lists, digest):
        monkeypatch.setattr(module, "SELECT", replace(SELECT, single_ratio=ratio, single_seconds=0.0))
    monkeypatch.setattr(paths, "FEWEST_QUARTETS", 1)

    def launch(*args):
        launched.add(args[-1])
        launch_in_place(*args)

    monkeypatch.setattr(digest, "launch_in_place", launch)
    shells = [md4.Shell(l, [e], [1.0], [1.3 * n, 0.2 * n, 0.0]) for n in range(3) for l, e in ((0, 1.1), (1, 0.8))]
    basis = md4.Basis(shells)
    dm = np.random.default_rng(1).normal(size=(basis.nao, basis.nao))
    dm = (dm + dm.T) * np.exp(-abs(np.subtract.outer(*[np.arange(basis.nao)] * 2)))
    with running() as machine:
        ours = md4.JK(basis, backend="cuda", direct_scf_tol=tolerance).get_jk(dm)
    for found, exact in zip(ours, md4.JK(basis, backend="cpu", direct_scf_tol=0.0).get_jk(dm)):
        error = abs(found - exact).max()
        assert error < 20 * tolerance
        assert (error > 1e-13) or not ratio
    assert launched == kinds
    assert ("narrowed" in machine.kernels) == (True in kinds)


@pytest.mark.parametrize("with_k", [True, False], ids=["J and K", "J alone"])
def test_a_build_where_coefficients_cancel(with_k, monkeypatch):
    """Contractions whose primitives are a hundred times as large as their sum: the errors stay below the tolerance.

    A tight shell without contraction has quartets in FP32 nevertheless.
    """
    monkeypatch.setattr(paths, "FEWEST_QUARTETS", 1)
    monkeypatch.setattr(hermite_coulomb, "FEWEST_SINGLES", 0)
    monkeypatch.setattr(digest, "SELECT", replace(SELECT, single_seconds=0.0))
    contracted = [md4.Shell(0, [1.0, 1.05], [24.0, -25.0], [0.0, 0.3 * n, 2.0 * n]) for n in range(2)]
    basis = md4.Basis([*contracted, md4.Shell(0, [30.0], [0.02], [0.0, 1.0, 1.0])])
    dm = np.array([[1.0, 0.4, 0.2], [0.4, 0.8, 0.3], [0.2, 0.3, 0.5]])
    exact = md4.JK(basis, backend="cpu", direct_scf_tol=0.0).get_jk(dm, with_k=with_k)
    tolerance = abs(exact[0]).max() / 1e4
    with running() as machine:
        ours = md4.JK(basis, backend="cuda", direct_scf_tol=tolerance).get_jk(dm, with_k=with_k)
    assert "narrowed" in machine.kernels
    for found, right in zip(ours, exact):
        assert right is None or abs(found - right).max() < tolerance


@pytest.mark.thorough
@pytest.mark.parametrize("ratio, limit", [(0.0, 1e-14), (1e30, 2e-6)])
def test_general_contractions_in_a_build(ratio, limit, monkeypatch):
    """(dp|ps) with two contracted s functions, 90 integrals: the side with d is the bra; in FP64 and all in FP32."""
    launched = set()

    def launch(*args):
        launched.add((args[4].facts.structure, args[5].facts.structure, args[-1]))
        launch_in_place(*args)

    for module in (quartet_lists, digest):
        monkeypatch.setattr(module, "SELECT", replace(SELECT, single_ratio=ratio, single_seconds=0.0))
    monkeypatch.setattr(paths, "FEWEST_QUARTETS", 1)
    monkeypatch.setattr(digest, "launch_in_place", launch)
    rng = np.random.default_rng(3)
    columns = {0: rng.uniform(0.2, 1.0, (2, 2)), 1: [[1.0]], 2: [[1.0]]}
    exponents = {0: [3.0, 0.8], 1: [1.3], 2: [0.9]}
    basis = md4.Basis([md4.Shell(l, exponents[l], columns[l], rng.normal(size=3)) for l in (2, 1, 0)])
    dm = rng.normal(size=(basis.nao, basis.nao))
    dm += dm.T
    with running():
        ours = md4.JK(basis, backend="cuda").get_jk(dm)
    for found, exact in zip(ours, md4.JK(basis, backend="cpu", direct_scf_tol=0.0).get_jk(dm)):
        assert abs(found - exact).max() < limit * abs(exact).max()
    dp, ps2 = (2, 1, True, 1, 1, False), (1, 0, True, 1, 2, False)
    assert {(dp, ps2, False), *([(dp, ps2, True)] if ratio else [])} <= launched
    assert not {sides[:2] for sides in launched} & {(ps2, dp)}
