"""Gradients of `md4.JK` on the emulated GPU: as on the CPU, whatever is divided, and what is promised of errors."""

from dataclasses import replace

import numpy as np
import pytest
from emulator import running
from gpu.kernels.test_plain_python import basis_of
from molecules import molecule
from nuclear_forces import symmetric

import md4
from md4 import Basis, Engine
from md4.contract.team import Team
from md4.errors import DeviceError, MemoryLimitError
from md4.gpu import coulomb_forces, force_tasks, forces, hermite_coulomb, reverse_ways
from md4.gpu.backend import GpuBackend
from md4.gpu.context import DeviceContext
from md4.gpu.dry_run import NoMemory
from md4.gpu.pool import Pool
from md4.gpu.sums import DeviceSums
from md4.method.operators import Operator
from md4.shells.schwarz import GradientBounds, block_norms
from md4.shells.shell import Shell

# Angular momenta, primitives and contracted functions of a few shells, whether they are spherical, and the unit.
CASES = {
    "(p, s)": ((1, 0), 1, 1, True, "dmma16"), "(p, s), dmma8": ((1, 0), 1, 1, True, "dmma8"),
    "(s, p), K = 4": ((0, 1), 2, 1, True, "dmma16"), "(s, p) of two functions": ((0, 1), 2, 2, True, "dmma16"),
    "(d, p), Cartesian": ((2, 1), 1, 1, False, "dmma16"), "(f, s)": ((3, 0), 1, 1, True, "dmma16"),
    "(f, s), dmma8": ((3, 0), 1, 1, True, "dmma8"), "(f, d)": ((3, 2), 1, 1, True, "dmma16"),
    "(d, s), K = 4": ((2, 0), 2, 1, True, "dmma8"),
}  # fmt: skip
SMALL = basis_of((0, 1))
# What limits batches of ket lists, chunks of rectangles and tasks: where it is, and a small value.
LIMITS = {"H_SHARE": (force_tasks, 1e-12), "CHUNK_BYTES": (forces, 1000), "Z_BYTES": (force_tasks, 1)}
# Atoms in a plane askew, with an f function.
PLANE = "O 0 0 0.1; H 0.4 0.7 -0.4; H -0.4 -0.7 -0.4"


def assert_same(ours, right):
    np.testing.assert_allclose(ours, right, rtol=0, atol=1e-13 * abs(right).max())


def both(mol, call, unit="dmma16"):
    """What a call finds with a `md4.JK` on the emulated GPU, and with one on the CPU."""
    right = call(md4.JK(mol, backend="cpu"))
    with running(unit) as machine:
        ours = call(md4.JK(mol, backend="cuda"))
    assert "pair_forces" in machine.kernels
    return ours, right


@pytest.fixture(params=["lanes", "fused", "rectangles"])
def way(request, monkeypatch):
    """How steps 1 and 2 are done: for lists of what counts, a lane a quartet where that serves, or on tensor cores; or
    for rectangles, as of large classes."""
    if request.param != "lanes":
        monkeypatch.setattr(reverse_ways, "lane_plan", lambda *_: None)
    if request.param == "rectangles":
        monkeypatch.setattr(reverse_ways, "fused_reverse", lambda *_: None)
    return request.param


@pytest.mark.sample("fused-(p, s)*", "lanes-(s, p), K*", "rectangles-(d, p)*")
@pytest.mark.parametrize("name", CASES)
def test_shells(name, way):
    """Each row is the derivative by the centre of a shell."""
    *shells, unit = CASES[name]
    basis = basis_of(*shells)
    dm = symmetric(basis.nao)
    ours, right = both(basis, lambda jk: jk.gradient(dm, tolerance=0), unit)
    assert ours.shape == (basis.nshell, 3)
    assert_same(ours, right)
    assert abs(ours.sum(axis=0)).max() < 1e-13 * abs(ours).max()


@pytest.mark.sample("lanes-closed*long_range*", "lanes-two spins-{'coulomb': 0.0*", "*-closed*0.3*")
@pytest.mark.parametrize("options", [
    {"exchange": 0.0}, {"coulomb": 0.0}, {"coulomb": 0.3, "exchange": -2.0}, {"omega": 0.4}, {"omega": -0.4},
    {"exchange": 0.2, "long_range": (0.4, 0.6)},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("count", [None, 2], ids=["closed shell", "two spins"])
def test_energies(count, options, way):
    dm = symmetric(SMALL.nao, count)
    assert_same(*both(SMALL, lambda jk: jk.gradient(dm, tolerance=0, **options)))


@pytest.fixture
def apart(monkeypatch):
    """J is made apart from exchange, whatever overlaps."""
    monkeypatch.setattr(coulomb_forces, "SHELLS", 0)
    monkeypatch.setattr(coulomb_forces, "OVERLAPPING", 2.0)


@pytest.mark.parametrize("options, passes", [
    ({}, 2), ({"coulomb": -0.3, "exchange": 0.2, "long_range": (0.4, 0.6)}, 3), ({"coulomb": 0.0}, 1),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("count", [None, 2], ids=["closed shell", "two spins"])
def test_j_apart(count, options, passes, apart):
    dm, computed = symmetric(SMALL.nao, count), {}

    def call(jk):
        found = jk.gradient(dm, tolerance=0, **options)
        assert jk.stats.skipped == 0
        computed[jk.engine.backend.name] = jk.stats.computed, sum(map(len, jk.lists)) ** 2
        return found

    assert_same(*both(SMALL, call))
    count, every = computed["cuda"]
    assert count == passes * every


@pytest.mark.thorough
@pytest.mark.parametrize("call", [
    lambda jk, dm: jk.gradient(dm, tolerance=0), lambda jk, dm: np.array(jk.derivative_jk(dm, tolerance=0)),
], ids=["forces", "matrices"])  # fmt: skip
def test_lists_of_whole_classes(call, apart, monkeypatch):
    """Pairs of one class are in one list, whatever their primitives, though builds have several lists."""
    monkeypatch.setattr(DeviceSums, "mixed_shells", 0)
    shells = [Shell(l, [1.3, 0.4][:count], [0.8, 0.5][:count], centre) for l, count, centre in (
        (0, 1, (0, 0, 0.0)), (0, 2, (0, 0, 1.1)), (1, 1, (0, 0.9, 0.3)), (1, 2, (0.5, 0, 0.7)),
    )]  # fmt: skip
    basis, seen = Basis(shells), []
    dm = symmetric(basis.nao)

    def of(backend):
        jk = md4.JK(basis, backend=backend)
        found = call(jk, dm)
        seen.append((len(jk.lists), len(jk.team.workers[0].forces.lists)))
        return found

    right = of("cpu")
    with running():
        assert_same(of("cuda"), right)
    assert seen == [(3, 3), (10, 3)]


@pytest.mark.thorough
def test_products_with_j_apart(apart):
    """Two of them have both, one has J and one exchange only."""
    left, right = np.random.default_rng(0).normal(size=(2, 4, SMALL.nao, SMALL.nao))
    factors = [1.0, 0.3, 0.7, 0.0], [0.5, -1.0, 0.0, 0.4]

    def call(jk):
        found = jk.product_gradient(left, right, *factors, tolerance=0)
        assert jk.stats.skipped == 0
        return found

    assert_same(*both(SMALL, call))


def test_where_j_is_apart(monkeypatch):
    """In large molecules that do not overlap as a whole; the lists do not matter."""
    chains = [molecule("; ".join(f"He 0 0 {gap * n}" for n in range(30)), "6-31g") for gap in (2.5, 0.05)]
    spread, close = (md4.Basis.from_mol(mol) for mol in chains)
    found = forces.DeviceForces(spread, [], [], [])
    assert not found.apart  # it has few shells
    monkeypatch.setattr(coulomb_forces, "SHELLS", spread.nshell)
    assert coulomb_forces.apart_from_exchange(spread)
    assert not coulomb_forces.apart_from_exchange(close)
    factors = [([1, 0, 0], [0, 1, 1]), ([1, 1], [1, 1]), ([1, 1], [0, 0]), ([0], [1]), ([], [])]
    factors = [[np.array(given) for given in both] for both in factors]
    norms = [np.zeros((len(both[0]), 1, 1)) for both in factors]

    def passes(digits):
        monkeypatch.setattr(forces.DeviceForces, "has_digits", lambda *_: digits)
        counts = [found.passes(these, *both, 0.0) for these, both in zip(norms, factors, strict=True)]
        assert {type(count) for count in counts} <= {int}
        return counts

    assert passes(True) == [1, 1, 2, 1, 0]
    assert passes(False) == [1, 1, 1, 1, 0]
    found.apart = True
    assert passes(True) == [2, 3, 2, 1, 0]
    assert passes(False) == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("beside", [True, False])
def test_j_begins_where_there_is_memory(beside, apart, monkeypatch):
    """While the device is at work on exchange, or after it."""
    real, order = forces.DeviceForces.check_memory_for_coulomb, []

    def check(self, *args):
        if len(order) == 1 and not beside:
            order.append("no room")
            raise MemoryLimitError("no room")
        order.append("room")
        real(self, *args)

    def noted(name, method):
        def call(self, *args):
            if name != "take" or args[-1]:
                order.append(name)
            return method(self, *args)

        return call

    monkeypatch.setattr(forces.DeviceForces, "check_memory_for_coulomb", check)
    monkeypatch.setattr(forces.DeviceForces, "take", noted("take", forces.DeviceForces.take))
    launched = coulomb_forces.CoulombForces.launched
    monkeypatch.setattr(coulomb_forces.CoulombForces, "launched", noted("J", launched))
    dm = symmetric(SMALL.nao)
    assert_same(*both(SMALL, lambda jk: jk.gradient(dm, tolerance=0)))
    assert order == (["room", "room", "J", "take", "take"] if beside else ["room", "no room", "take", "J", "take"])


@pytest.mark.parametrize("call", [
    lambda jk, dm: jk.gradient(dm, exchange=0.0, tolerance=1e-30), lambda jk, dm: jk.derivative_jk(dm, with_k=False)[0],
], ids=["forces", "derivatives"])  # fmt: skip
def test_j_alone_in_single_precision(call, monkeypatch):
    """All quartets."""
    monkeypatch.setattr(hermite_coulomb, "SINGLE_RATIO", 1e60)
    monkeypatch.setattr(hermite_coulomb, "FEWEST_SINGLES", 0)
    basis = basis_of((1, 0))
    dm = symmetric(basis.nao)
    right = call(md4.JK(basis, backend="cpu"), dm)
    with running() as machine:
        ours = call(md4.JK(basis, backend="cuda", direct_scf_tol=1e-30), dm)
    assert "narrowed" in machine.kernels
    assert 1e-10 < abs(ours - right).max() / abs(right).max() < 1e-6


@pytest.mark.thorough
def test_where_primitives_cancel(monkeypatch):
    """Quartets whose bound would leave them to single precision, and whose terms are much larger, are in double."""
    monkeypatch.setattr(hermite_coulomb, "FEWEST_SINGLES", 0)
    pairs = [[1.0, -1.0], [1.0, -0.99], [0.4, 0.6]]
    basis = md4.Basis.from_arrays([0, 1, 0], [[1.0, 0.98]] * 3, pairs, [[0, 0, 0], [0, 0.7, 0.3], [0.5, 0, 0]])
    dm, launched, launch = symmetric(basis.nao), set(), hermite_coulomb.launch_quartets
    monkeypatch.setattr(hermite_coulomb, "launch_quartets", lambda *args: launched.add(args[-1]) or launch(*args))
    right = md4.JK(basis, backend="cpu").gradient(dm, exchange=0.0, tolerance=0)
    for tolerance in (1e-5, 1e-3):
        with running():
            found = md4.JK(basis, backend="cuda", direct_scf_tol=1e-30).gradient(dm, exchange=0.0, tolerance=tolerance)
        assert abs(found - right).max() < 3 * tolerance
    assert launched == {False, True}


@pytest.mark.parametrize("steepest, alone", [(1e3, True), (1e6, False), (1e10, False), (1e30, False)])
@pytest.mark.parametrize("exchange", [0.0, 1.0])
def test_steep_functions(steepest, alone, exchange, apart):
    """J in fixed point would lose digits, as its scales go by bounds that the steepest function raises."""
    basis = Basis.from_arrays([0, 0, 1], [[steepest], [0.5], [0.8]], [[1.0]] * 3, [[0, 0, 0], [0, 0, 1], [0.3, 0.4, 0]])
    dm, found = 2 * np.eye(basis.nao), []
    right = md4.JK(basis, backend="cpu").gradient(dm, exchange=exchange, tolerance=0)
    with running(), pytest.MonkeyPatch.context() as patch:
        add = coulomb_forces.CoulombForces.launched
        patch.setattr(coulomb_forces.CoulombForces, "launched", lambda *of: found.append(1) or add(*of))
        jk = md4.JK(basis, backend="cuda")
        ours = jk.gradient(dm, exchange=exchange, tolerance=0)
    assert abs(ours - right).max() < 1e-13 * max(1.0, abs(right).max())
    assert bool(found) == alone
    assert jk.stats.skipped == 0


def test_steep_functions_far_from_others():
    """Large densities and many pairs need no other way."""
    basis = Basis.from_arrays([0] * 12, [[300.0], [0.5]] * 6, [[1.0]] * 12, np.arange(36.0).reshape(12, 3))
    given, found = md4.JK(basis, backend="cpu")._forces_of_lists(1e-12), coulomb_forces.CoulombBounds()
    found.lists, found.bounds, found.term_ratios = given.lists, given.bounds, 1.0
    for size in (1.0, 1e6):
        norms = np.full((1, basis.nshell, basis.nshell), size)
        assert found.has_digits(norms[0], 1.0, 1e-12)
        assert found.has_digits_of_matrices(norms, 1e-13)


def test_terms_of_derivatives():
    """T of pairs whose primitives cancel is not less than the bound of a derivative with the moduli of coefficients."""
    exponents, coefficients = [[2.0, 1.7]] * 2, [[0.9, -1.0], [0.9, 1.0]]
    basis = md4.Basis.from_arrays([0, 0], exponents, coefficients, [[0, 0, 0], [0, 0.7, 0.3]])
    found = []
    for this in (basis, basis.absolute):
        with running():
            made = md4.JK(this, backend="cuda", direct_scf_tol=1e-30)._forces_of_lists(1e-30)
        pairs = np.concatenate([these.pairs.pairs for these in made.lists])
        of_pairs = [np.concatenate([these.largest for these in made.bounds]), made.term_ratios]
        found.append([np.array(values)[np.lexsort(pairs.T)] for values in of_pairs])
    (largest, ratios), (signless, _) = found
    growth = signless / largest
    assert (ratios >= 0.999 * growth).all()
    assert ratios.max() < 4 * growth.max()
    assert growth.max() > 3


def test_nothing():
    """Neither J nor K, or no density; Gamma would have no terms."""
    dm = symmetric(SMALL.nao)
    with running():
        jk = md4.JK(SMALL, backend="cuda")
        for found in (jk.gradient(dm, 0.0, 0.0, tolerance=0), jk.gradient(0 * dm)):
            np.testing.assert_array_equal(found, np.zeros((SMALL.nshell, 3)))
            assert jk.stats.computed == jk.stats.skipped == jk.stats.error_bound == 0


@pytest.mark.sample("lanes*", "fused-0.0")
@pytest.mark.parametrize("exchange", [[0.5, -1.0], 0.0])
def test_products(exchange, way):
    """Of matrices without symmetry; every quartet counts, also where there is more than one term."""
    left, right = np.random.default_rng(0).normal(size=(2, 2, SMALL.nao, SMALL.nao))

    def call(jk):
        found = jk.product_gradient(left, right, [1.0, 0.3], exchange, tolerance=0)
        assert jk.stats.skipped == jk.stats.error_bound == jk.stats.error_estimate == 0
        return found

    assert_same(*both(SMALL, call))


@pytest.mark.thorough
def test_a_molecule():
    """General contractions, a ghost, an atom without functions: rows are those of atoms, shells of the basis sorted."""
    shells = {
        "O": [[0, [2.0, 0.5, -0.2], [0.5, 0.4, 0.9]]], "H": [[0, [1.2, 1.0]]], "ghost-He": [[1, [0.7, 1.0]]],
    }  # fmt: skip
    mol = molecule("H 0.1 0.7 -0.4; C 1.1 0.3 -0.2; O 0 0 0; ghost-He 0.5 -0.3 0.8", shells)
    dm = symmetric(mol.nao)
    ours, right = both(mol, lambda jk: jk.gradient(dm, tolerance=0))
    assert_same(ours, right)
    assert not ours[1].any()


@pytest.mark.sample("p-True")
@pytest.mark.parametrize("highest, pure", [
    ("p", True), ("p", False), ("f", True), pytest.param("f", False, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_molecule_in_a_plane(highest, pure, monkeypatch):
    """It is turned for its f functions, and its forces are turned back; the density breaks the plane."""
    monkeypatch.setattr("md4.gpu.part_plans.PLANE_L", "spdf".index(highest))
    shells = {"H": [[0, [1.2, 1.0]]], "O": [["spdf".index(highest), [0.9, 1.0]]]}
    mol = molecule(PLANE, shells, cart=not pure)
    dm = symmetric(mol.nao)
    exact = md4.JK(mol, backend="cpu").gradient(dm, tolerance=0)
    with running():
        jk = md4.JK(mol, backend="cuda")
        assert_same(jk.gradient(dm, tolerance=0), exact)
        assert jk._frame.rotation is not None
        assert jk.stats.error_bound == 0
        assert not jk.gradient(dm, tolerance=1e9).any()
        assert abs(exact).max() < jk.stats.error_estimate < jk.stats.error_bound


# what is left out -----------------------------------------------------------------------------------------------------

CHAIN = "; ".join(f"H {0.1 * (n % 2)} {0.2 * (n % 3)} {1.5 * n}" for n in range(4))


def test_errors_are_bounded_with_j_apart(apart):
    check_bounds(1.0, 2)


@pytest.mark.sample("lanes-*")
@pytest.mark.parametrize("exchange", [1.0, 0.0])
def test_errors_are_bounded(way, exchange):
    check_bounds(exchange, 1)


def check_bounds(exchange, passes):
    """Errors of a chain for four tolerances, and statistics of a gradient that goes through all quartets so often."""
    mol = molecule(CHAIN, {"H": [[0, [0.9, 1.0]]]})
    dm = symmetric(mol.nao)
    exact, before = md4.JK(mol, backend="cpu").gradient(dm, exchange=exchange, tolerance=0), (0.0, 0)
    with running():
        jk = md4.JK(mol, backend="cuda", direct_scf_tol=1e-12)
        for tolerance in (1e-8, 1e-4, 1e-2, 1e3):
            found, stats = jk.gradient(dm, exchange=exchange, tolerance=tolerance), jk.stats
            assert 0 < stats.error_estimate <= stats.error_bound
            assert abs(found - exact).max() <= stats.error_bound
            assert stats.computed + stats.skipped == passes * sum(map(len, jk.lists)) ** 2
            assert before < (stats.error_bound, stats.skipped)
            before = stats.error_bound, stats.skipped
    assert not found.any()
    assert stats.computed == 0


@pytest.mark.sample("lanes-*")
@pytest.mark.parametrize("exchange", [1.0, 0.0])
def test_the_bounds_are_those_of_what_is_left_out(way, exchange):
    """With s functions and blocks of D of the same size, where all bounds of densities are the same: (1 + 1/2) |D|^2.

    Rectangles may contain quartets whose bounds are smaller than the tolerance; they count as left out all the same.
    """
    mol = molecule(CHAIN, {"H": [[0, [0.9, 1.0]]]})
    norms, dm = mol.intor("int2e_ip1ip2").reshape(3, 3, *[mol.nao] * 4), np.ones((mol.nao, mol.nao))
    with running():
        jk = md4.JK(mol, backend="cuda", direct_scf_tol=1e-12)
        (this,) = jk.lists
        a, b = this.pairs.pairs.T
        squares = np.maximum(norms[range(3), range(3)][:, a, b, a, b], norms[range(3), range(3)][:, b, a, b, a])
        bounds = GradientBounds(this.pairs.pairs, jk.basis.centres, this.exact, np.sqrt(squares.max(axis=0)))
        of_quartets = (1 + exchange / 2) * np.outer(bounds.derivative, bounds.own)
        for tolerance in (1e-7, 1e-3, 1e3):
            jk.gradient(dm, exchange=exchange, tolerance=tolerance)
            left = of_quartets[of_quartets < tolerance]
            assert jk.stats.error_bound == pytest.approx(left.sum(), rel=1e-9)
            assert jk.stats.error_estimate == pytest.approx(np.sqrt((left**2).sum()), rel=1e-9)
            rectangles = way == "rectangles" and exchange
            assert jk.stats.skipped == len(left) or (rectangles and jk.stats.skipped < len(left))
    assert len(left) == of_quartets.size


@pytest.mark.thorough
@pytest.mark.parametrize("part", [1.0, 1e20])
def test_errors_of_primitive_quartets_are_bounded(part, way, monkeypatch):
    """Steep and diffuse primitives of both signs in a shell; some of their quartets, or all, are left out."""
    monkeypatch.setattr(forces, "limit_of", lambda way, tolerance: part * tolerance * way.listed)
    mol = molecule("H 0 0 0; H 0.3 -0.2 1.9; H 0.1 0.4 4.5", {"H": [[0, [900.0, 0.4], [7.0, -0.6], [0.07, 0.8]]]})
    dm = symmetric(mol.nao)
    exact = md4.JK(mol, backend="cpu").gradient(dm, tolerance=0)
    with running():
        jk = md4.JK(mol, backend="cuda", direct_scf_tol=1e-13)
        for tolerance in (1e-12, 1e-8, 1e-4, 1e-2):
            found, stats = jk.gradient(dm, tolerance=tolerance), jk.stats
            assert 0 < abs(found - exact).max() <= stats.error_bound
            assert stats.error_estimate <= stats.error_bound
            if way != "rectangles":
                assert stats.computed > 0
                assert found.any() == (part == 1)


@pytest.mark.thorough
def test_any_primitive_quartets_may_be_left_out(monkeypatch):
    """By random bounds: also all of a shell quartet for some primitive bra pairs, whose Gamma is not read then."""
    monkeypatch.setattr(forces, "limit_of", lambda way, tolerance: 2e11 * tolerance * way.listed)
    shells = [[0, [6.0, 0.5], [0.3, 0.7]], [1, [0.8, 1.0]]]
    mol = molecule("H 0 0 0; H 0.3 -0.2 1.9; H 0.3 0.9 3.1", {"H": shells})
    dm, found = symmetric(mol.nao), []
    for way in ("reverse_lanes", "reverse_fused"):
        with running() as machine:
            jk, rng = md4.JK(mol, backend="cuda", direct_scf_tol=1e-13), np.random.default_rng(1)
            for of_prims in jk._forces_of_lists(1e-12).of_prims:
                of_prims.own = rng.uniform(0, 1, of_prims.own.shape) ** 4
                of_prims.derivative = rng.uniform(0, 1, of_prims.own.shape)
            found.append(jk.gradient(dm, tolerance=1e-12))
        assert way in machine.kernels
        monkeypatch.setattr(reverse_ways, "lane_plan", lambda *_: None)
    assert_same(*found)


# what is divided ------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch):
    """Factories of the kernels that are launched, one after the other."""
    found, real = [], DeviceContext.launch

    def launch(self, variant, *args):
        found.append(variant.factory.__name__)
        real(self, variant, *args)

    monkeypatch.setattr(DeviceContext, "launch", launch)
    return found


@pytest.mark.sample("lanes-H*", "fused-Z*", "rectangles-CHUNK*")
@pytest.mark.parametrize("name", LIMITS)
def test_batches_chunks_and_tasks(name, way, launches, monkeypatch):
    """As wholes, whatever fits: H of all kets, r and U of a rectangle, Z of a list."""
    basis, (module, value) = basis_of((0, 1, 0)), LIMITS[name]
    dm = symmetric(basis.nao)
    right = md4.JK(basis, backend="cpu").gradient(dm, tolerance=0)
    with running():
        jk, counts = md4.JK(basis, backend="cuda"), []
        jk._forces_of_lists(0.0)
        for _ in range(2):
            launches.clear()
            assert_same(jk.gradient(dm, tolerance=0), right)
            assert jk.stats.computed == sum(map(len, jk.lists)) ** 2
            counts.append((len(launches) - launches.count("h_matrices"), launches.count("pair_forces")))
            monkeypatch.setattr(module, name, value if way == "rectangles" else min(1, value))
        count, pairs = len(jk.lists), sum(map(len, jk.lists))
    assert counts[0][0] < counts[1][0]
    tasks = {"H_SHARE": count**2, "CHUNK_BYTES": count, "Z_BYTES": pairs}  # each batch of kets has its own
    assert (counts[0][1], counts[1][1]) == (count, tasks[name])


def test_many_parts_of_the_kets(way, monkeypatch):
    """Z has so many parts that some have no kets."""
    monkeypatch.setattr(reverse_ways, "REVERSE", replace(reverse_ways.REVERSE, most_parts=40))
    dm = symmetric(SMALL.nao)
    assert_same(*both(SMALL, lambda jk: jk.gradient(dm, tolerance=0)))


@pytest.mark.parametrize("exchange, j_apart", [(1.0, False), (0.0, False), (1.0, True)])
def test_a_part_of_the_terms(exchange, j_apart, request, monkeypatch):
    """Parts add up to all, in gradients, quartets and bounds; progress is told of all work."""
    if j_apart:
        request.getfixturevalue("apart")
    mol, told = molecule(CHAIN, {"H": [[0, [0.9, 1.0]]], "O": [[1, [0.9, 1.0]]]}), []
    with running():
        jk = md4.JK(mol, backend="cuda")
        made, dm = jk._forces_of_lists(jk.direct_scf_tol), jk._frame.densities(symmetric(mol.nao, 1))
        given = jk.engine.backend, dm, block_norms(made.basis, dm), np.ones(1), np.full(1, exchange), 1e-4
        whole, quartets, left_out = made.run(*given, report=told.append)
        parts = []
        for part, (of_h, of_z) in enumerate(((0.4, 1 << 30), (0.4, 1), (1e-9, 1 << 30))):  # on unlike machines
            monkeypatch.setattr(force_tasks, "H_SHARE", of_h)
            monkeypatch.setattr(force_tasks, "Z_BYTES", of_z)
            parts.append(made.run(*given, part, 3))
        assert sum(told) == pytest.approx(made.seconds())
    assert left_out[0] > 0
    assert sum(part[1] for part in parts) == quartets
    assert_same(sum(part[0] for part in parts), whole)
    np.testing.assert_allclose(sum(part[2] for part in parts), left_out, rtol=1e-10)


@pytest.mark.parametrize("parts", [2, 3])
def test_which_lists_are_divided(parts):
    """Lists of much work are divided among all parts, others belong to one; each pair to one, and all have as much."""
    mol = molecule("; ".join(f"{name} 0 0 {z}" for z, name in enumerate("OHHOHHOHH")), "cc-pvtz")
    backend = GpuBackend.without_device(Operator("coulomb"), (9, 0), 1 << 36)
    team = Team.of(Engine(Basis.from_mol(mol), backend=backend))
    team.make_lists(1e-13)
    made, loads, divided = backend.sums.forces(team.basis, team.lists), np.zeros(parts), 0
    every = range(len(team.lists))
    for number, this in enumerate(team.lists):
        own, owners = np.zeros((parts, len(this)), dtype=int), []
        for part in range(parts):
            for where in made.own_pairs(number, part, parts):
                own[part, where] += 1
                owners.append(part)
        assert (own.sum(axis=0) == 1).all()
        assert len(owners) == 1 or set(owners) == set(range(parts))
        divided += len(owners) > 1
        loads += made.seconds_of(number, every) * own.mean(axis=1)
    assert 0 < divided < len(team.lists)
    assert loads.max() < 1.1 * loads.mean()


def in_two_orders(call):
    """What a function finds on two emulated GPUs that run blocks and threads in other orders."""
    for seed, order in enumerate((range, lambda grid: reversed(range(grid)))):
        with running() as machine:
            machine.blocks = order
            machine.lot.seed(seed)
            yield call()


@pytest.mark.sample("J")
@pytest.mark.parametrize("call", [
    lambda jk, dm: jk.get_jk(dm, with_k=False)[0], lambda jk, dm: jk.gradient(dm, exchange=0.0),
    lambda jk, dm: jk.gradient(dm),
], ids=["J", "forces of J", "forces"])  # fmt: skip
def test_j_has_the_same_bits(call, apart):
    """In any order of atomic additions, of which there are enough to tell doubles."""
    basis = basis_of((0, 0, 1), 2)
    dm = symmetric(basis.nao)
    np.testing.assert_array_equal(*in_two_orders(lambda: call(md4.JK(basis, backend="cuda", direct_scf_tol=0), dm)))


def test_sums_beyond_their_bounds(monkeypatch):
    """Scales that are too large for what is added make no number of it."""
    dm = symmetric(SMALL.nao)
    with running():
        jk = md4.JK(SMALL, backend="cuda", direct_scf_tol=0)
        assert np.isfinite(jk.get_jk(dm, with_k=False)[0]).all()
        monkeypatch.setattr("md4.gpu.kernels.hermite_scales.TOP", 2.0**70)
        assert np.isnan(md4.JK(SMALL, backend="cuda", direct_scf_tol=0).get_jk(dm, with_k=False)[0]).any()


@pytest.mark.parametrize("scale", [0.0, 1e-170, 1e80])
def test_scales_of_j(scale):
    """For densities of any size, two of which may be together."""
    dm = scale * symmetric(SMALL.nao)
    dm = np.array([dm, symmetric(SMALL.nao)])
    right = md4.JK(SMALL, backend="cpu", direct_scf_tol=0).get_jk(dm, with_k=False)[0]
    with running():
        found = md4.JK(SMALL, backend="cuda", direct_scf_tol=0).get_jk(dm, with_k=False)[0]
    for mine, theirs in zip(found, right):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-14 * abs(theirs).max())


@pytest.mark.sample("lanes")
def test_the_same_bits(way):
    """In each run, and by a second object."""
    dm = symmetric(SMALL.nao)
    with running():
        jk = md4.JK(SMALL, backend="cuda")
        first = jk.gradient(dm)
        for found in (jk.gradient(dm), md4.JK(SMALL, backend="cuda").gradient(dm)):
            np.testing.assert_array_equal(found, first)


@pytest.mark.sample("lanes-True", "fused-False")
@pytest.mark.parametrize("batches", [True, False])
def test_late_streams_with_j_apart(batches, apart, way, monkeypatch):
    """J begins behind all tracks, and tracks behind J where there are more batches of kets."""
    if batches:
        monkeypatch.setattr(force_tasks, "H_SHARE", 1e-12)
    test_streams_that_are_late({0, 1, 2, 3}, way, monkeypatch)


@pytest.mark.sample("lanes-{0, 1, 2, 3}", "fused-{2}")
@pytest.mark.parametrize("late", [{0}, {1}, {2}, {0, 1, 2, 3}], ids=str)
def test_streams_that_are_late(late, way, monkeypatch):
    """The host waits for what it reads, copies wait for what they copy, and tracks for each other; 1 is beside."""
    dm, tracks, launch = symmetric(SMALL.nao), set(), forces.DeviceForces.launch

    def noted(self, backend, *args):
        tracks.add(backend.context.track)
        return launch(self, backend, *args)

    monkeypatch.setattr(forces.DeviceForces, "launch", noted)
    right = md4.JK(SMALL, backend="cpu").gradient(dm, tolerance=0)
    with running(late=late):
        assert_same(md4.JK(SMALL, backend="cuda").gradient(dm, tolerance=0), right)
    assert tracks == {0, 1, 2}


# limits ---------------------------------------------------------------------------------------------------------------


def test_memory_is_asked_for_with_each_list(monkeypatch):
    """By then Z and the H of the lists before are there."""
    backend, asked = GpuBackend.without_device(Operator("coulomb"), (9, 0), 1 << 36), []
    team = Team.of(Engine(SMALL, backend=backend))
    team.make_lists(1e-13)
    monkeypatch.setattr(NoMemory, "share", lambda _, most: asked.append(most) or most)
    made, ones = backend.sums.forces(SMALL, team.lists), np.ones((1, SMALL.nao, SMALL.nao))
    made.run(backend, ones, block_norms(SMALL, ones), np.ones(1), np.ones(1), 0.0)
    assert asked.count(forces.CHUNK_BYTES) >= len(team.lists) ** 2


def test_tracks_in_little_memory(way, monkeypatch):
    """What all of them take must fit beside H."""
    dm, tracks, launch = symmetric(SMALL.nao), set(), forces.DeviceForces.launch
    backend = GpuBackend.without_device(Operator("coulomb"), (9, 0), 1 << 30)
    team = Team.of(Engine(SMALL, backend=backend))
    team.make_lists(1e-13)
    monkeypatch.setattr(
        forces.DeviceForces, "launch",
        lambda self, backend, *args: tracks.add(backend.context.track) or launch(self, backend, *args),
    )  # fmt: skip
    made = backend.sums.forces(SMALL, team.lists)
    for room, expected in ((8 << 30, {0}), (1 << 20, {0, 1, 2})):
        monkeypatch.setattr(force_tasks, "TRACK_ROOM", room)
        monkeypatch.setattr("md4.gpu.tracks.TRACK_SHARE", 1 << 20)
        tracks.clear()
        made.run(backend, dm[None], block_norms(SMALL, dm[None]), np.ones(1), np.ones(1), 0.0)
        assert tracks == expected


@pytest.mark.parametrize("what, call", [
    ("gradients", lambda jk, dm: jk.gradient(dm, tolerance=0)),
    ("gradients", lambda jk, dm: jk.gradient(dm, exchange=0.0, tolerance=0)),
    ("derivatives of J and K", lambda jk, dm: jk.derivative_jk(dm, tolerance=0)),
    ("derivatives of J and K", lambda jk, dm: jk.derivative_jk(dm, with_j=False, tolerance=0)),
])  # fmt: skip
def test_no_memory(what, call, monkeypatch):
    """It is refused with its size before anything is allocated."""
    dm = symmetric(SMALL.nao)
    with running():
        jk = md4.JK(SMALL, backend="cuda")
        jk._forces_of_lists(0.0)
        asked = []
        monkeypatch.setattr(GpuBackend, "memory_left", lambda backend: 1000)
        for method in ("get", "fresh", "room"):
            monkeypatch.setattr(f"md4.gpu.pool.Pool.{method}", lambda *args: asked.append(args))
        message = rf"^{what} of Basis\(.* take at least .*B \(.*\), but 1 kB may be used; raise max_memory\.$"
        with pytest.raises(MemoryLimitError, match=message):
            call(jk, dm)
    assert not asked


def test_h_makes_room(monkeypatch):
    """For forces that of builds is given up, for builds that of forces, where there is no memory for both."""
    monkeypatch.setattr(DeviceSums, "mixed_shells", 0)
    monkeypatch.setattr(reverse_ways, "lane_plan", lambda *_: None)  # which take no H
    basis = Basis([Shell(0, [1.3, 0.4][:count], [0.8, 0.5][:count], (0, 0, 1.1 * count)) for count in (1, 2)])
    dm = symmetric(basis.nao)
    with running():
        jk = md4.JK(basis, backend="cuda")
        builds, right = jk.get_jk(dm), jk.gradient(dm)
        worker = jk.team.workers[0]
        of_builds, of_forces = ([this.prepared for this in lists] for lists in (jk.lists, worker.forces.lists))
        assert not {id(this) for this in of_builds} & {id(this) for this in of_forces}
        assert all(any(this.h_bytes for this in these) for these in (of_builds, of_forces))
        # as if what H takes were all that is missing
        held = sum(this.h_bytes for this in [*of_builds, *of_forces])
        left, least = GpuBackend.memory_left, []

        def memory_left(backend):
            return 0 if any(this.h_bytes for this in least) else left(backend)

        monkeypatch.setattr(GpuBackend, "memory_left", memory_left)
        least[:] = of_builds
        np.testing.assert_array_equal(jk.gradient(dm), right)
        assert sum(this.h_bytes for this in of_builds) == 0
        least[:] = of_forces
        for found, first in zip(jk.get_jk(dm), builds):
            assert_same(found, first)
        assert sum(this.h_bytes for this in of_forces) == 0 < held
        # where the least fits, but not H of all lists of a build
        least.clear()
        jk.gradient(dm)
        assert any(this.h_bytes for this in of_forces)
        monkeypatch.setattr(worker.store, "holds", lambda pieces: False)
        for found, first in zip(jk.get_jk(dm), builds):
            assert_same(found, first)
        assert sum(this.h_bytes for this in of_forces) == 0


def test_h_of_the_same_lists(monkeypatch):
    """Forces on the lists of builds are not asked to give up what builds keep."""
    monkeypatch.setattr(reverse_ways, "lane_plan", lambda *_: None)  # which take no H
    with running():
        jk = md4.JK(SMALL, backend="cuda")
        jk.gradient(symmetric(SMALL.nao))
        worker = jk.team.workers[0]
        assert worker.forces.lists is worker.lists
        held = [this.prepared.h_bytes for this in worker.lists]
        worker.spare()
        assert held == [this.prepared.h_bytes for this in worker.lists]
        assert any(held)


@pytest.mark.thorough
def test_more_primitive_pairs_than_shared_memory_has_room_for(monkeypatch):
    """They are refused; those of this basis set, of 4 primitive pairs at most, have room for 4, but not for 3."""
    basis, dm = basis_of((0, 1), 2), np.eye(4)
    with running("dmma16"):
        jk = md4.JK(basis, backend="cuda")
        shared = jk.engine.backend.context.block_shared
        monkeypatch.setattr(force_tasks, "ROW_BYTES", shared - force_tasks.OTHER_BYTES - 32 * 5)
        jk.gradient(dm)
        monkeypatch.setattr(force_tasks, "ROW_BYTES", shared - force_tasks.OTHER_BYTES - 32 * 4)
        with pytest.raises(MemoryLimitError, match="4 primitive pairs, but gradients on this GPU take 3"):
            md4.JK(basis, backend="cuda").gradient(dm)


@pytest.mark.thorough
def test_lists_of_many_quartets_of_other_classes():
    """Only quartets that are listed are counted: Gamma of rectangles is in no memory."""
    rng = np.random.default_rng(0)
    shells = [Shell(3, np.geomspace(0.1, 30, 8), rng.normal(size=(8, 8)), np.zeros(3))]
    many = np.geomspace(0.1, 30, 4)
    shells += [Shell(1, many, rng.normal(size=(4, 4)), 6 * rng.normal(size=3)) for _ in range(102)]
    backend, basis = GpuBackend.without_device(Operator("coulomb"), (9, 0), 1 << 37), Basis(shells)
    team = Team.of(Engine(basis, backend=backend))
    team.make_lists(1e-13)
    made = backend.sums.forces(basis, team.lists)
    numbers = [(this.pairs.nab, this.pairs.nab * len(this)) for this in made.lists]
    assert np.prod(np.max(numbers, axis=0)) > force_tasks.MOST_NUMBERS
    made.check_memory(backend, np.ones((1, basis.nao, basis.nao)), None)


@pytest.mark.parametrize("ls, count, pure, capability", [
    ((1,), 24, True, (9, 0)), ((1, 2, 3), 12, False, (9, 0)), ((1,), 20, True, (8, 0)), ((0, 1), 2, True, (9, 0)),
])  # fmt: skip
def test_many_contracted_functions(ls, count, pure, capability):
    """No kernel is asked for more shared memory than a block may have."""
    rng = np.random.default_rng(0)
    exponents = np.geomspace(0.05, 50, count)
    basis = Basis([Shell(l, exponents, rng.normal(size=(count, count)), rng.normal(size=3)) for l in ls], pure)
    backend = GpuBackend.without_device(Operator("coulomb"), capability, 1 << 37)
    team = Team.of(Engine(basis, backend=backend))
    team.make_lists(1e-13)
    ones, one = np.ones((1, basis.nao, basis.nao)), np.ones(1)
    backend.sums.forces(basis, team.lists).run(backend, ones, block_norms(basis, ones), one, one, 1e-12)
    assert 0 < max(backend.context.asked.values()) <= backend.context.block_shared


def test_gamma_without_room(monkeypatch):
    """Its classes are taken as rectangles."""
    monkeypatch.setattr(reverse_ways, "gamma_fits", lambda *_: False)
    dm = symmetric(SMALL.nao)
    right = md4.JK(SMALL, backend="cpu").gradient(dm, tolerance=0)
    with running() as machine:
        ours = md4.JK(SMALL, backend="cuda").gradient(dm, tolerance=0)
    assert_same(ours, right)
    assert "reverse_sums" in machine.kernels
    assert not {"gamma_blocks", "reverse_lanes", "reverse_fused"} & machine.kernels


@pytest.mark.parametrize("track", range(3))
def test_rooms_without_memory(track, monkeypatch):
    """On any track what earlier chunks have left is given back, and the next try has room."""
    monkeypatch.setattr(reverse_ways, "gamma_fits", lambda *_: False)
    dm, left, room = symmetric(SMALL.nao), [1], Pool.room
    right = md4.JK(SMALL, backend="cpu").gradient(dm, tolerance=0)

    def without_memory(pool, name, items, of_track=0):
        if of_track == track and "abq" in name and left:
            left.pop()
            raise MemoryLimitError("no room")
        return room(pool, name, items, of_track)

    monkeypatch.setattr(Pool, "room", without_memory)
    with running():
        assert_same(md4.JK(SMALL, backend="cuda").gradient(dm, tolerance=0), right)
    assert not left


def test_no_pair_is_in_a_list():
    """No kernel is launched for nothing."""
    dm = np.eye(SMALL.nao)
    with running():
        jk = md4.JK(SMALL, backend="cuda", direct_scf_tol=1e10)
        assert not jk.gradient(dm).any()
        assert not np.any(jk.derivative_jk(dm))


def test_little_memory():
    """It is refused, or enough: the smallest caps by lists or single buffers, others by the check ahead."""
    basis = basis_of((1, 2, 0))
    dm, messages = symmetric(basis.nao), []
    right = md4.JK(basis, backend="cpu").gradient(dm)
    with running():
        for cap in np.geomspace(0.05, 30, 10):
            try:
                found = md4.JK(basis, backend="cuda", max_memory=cap).gradient(dm)
            except MemoryLimitError as error:
                messages.append(str(error))
            else:
                break
    assert_same(found, right)
    assert messages
    assert all("raise max_memory" in message for message in messages)


def test_devices_without_asynchronous_copies():
    with running("fma"), pytest.raises(DeviceError, match=r"compute capability 8.0 .*backend='cpu'"):
        md4.JK(SMALL, backend="cuda").gradient(symmetric(SMALL.nao))


@pytest.mark.parametrize("norm, bound, terms, fits", [
    (1.0, 1.0, 1, True), (1e6, 1.0, 1, True), (1.1e6, 1.0, 1, False), (1.0, 0.9e19, 1, True), (1.0, 1.1e19, 1, False),
    (1.0, 1.0, 1 << 10, True), (1.0, 1.0, (1 << 10) + 1, False), (np.nan, 1.0, 1, False), (1.0, np.inf, 1, False),
])  # fmt: skip
def test_where_quartets_may_be_single(norm, bound, terms, fits):
    """Where FP32 has the range of Gamma, what underflows is less than the tolerance, and sums keep their digits."""
    factors = np.ones(terms)
    found = forces.single_limit(np.full((terms, 1, 1), norm), factors, factors, 1e-10, bound)
    assert found == (forces.REVERSE.single_ratio * 1e-10 if fits else 0.0)
