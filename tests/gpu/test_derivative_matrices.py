"""`DeviceDerivatives` on the emulated GPU: as on the CPU, whatever is divided, and what it leaves out."""

import numpy as np
import pytest
from emulator import running
from gpu.kernels.test_plain_python import basis_of
from gpu.test_forces import PLANE
from molecules import molecule
from nuclear_forces import assert_small_ones_left_out, row_of_shells, scattered

import md4
from md4.errors import MemoryLimitError
from md4.gpu import derivative_matrices
from md4.gpu.context import DeviceContext
from md4.gpu.kernels import half_exchange
from md4.gpu.kernels.half_exchange import members_of

# Angular momenta, primitives and contracted functions of a few shells, whether they are spherical, and the unit.
CASES = {
    "(s, p)": ((0, 1), 1, 1, True, "dmma16"), "(p, s), dmma8": ((1, 0), 1, 1, True, "dmma8"),
    "(s, p) of two functions": ((0, 1), 2, 2, True, "dmma16"), "(d, p), Cartesian": ((2, 1), 1, 1, False, "dmma16"),
    "(f, s)": ((3, 0), 1, 1, True, "dmma16"), "(p, p, p)": ((1, 1, 1), 1, 1, True, "dmma16"),
    "p of three functions": ((1,), 3, 3, False, "dmma8"),
}  # fmt: skip
SMALL = basis_of((0, 1))


def any_matrices(nao, *count):
    """Without symmetry."""
    return np.random.default_rng(3).normal(size=(*count, nao, nao))


def assert_same(ours, right):
    """But for rounding errors, relative to the largest element."""
    for mine, theirs in zip(ours, right, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=3e-15 * abs(theirs).max())


def made_by(basis, **options):
    """The arguments of `DeviceDerivatives.run` for all terms, and a function of them, within `running`."""
    jk = md4.JK(basis, backend="cuda", direct_scf_tol=0)
    forces = jk._forces_of_lists(0.0)
    made = jk.engine.backend.sums.derivatives(jk.engine, forces, 0.0)
    return made, jk._frame.densities(any_matrices(basis.nao, 1))


@pytest.mark.sample("(s, p)")
@pytest.mark.parametrize("name", CASES)
def test_matrices(name):
    """Of two densities without symmetry."""
    *shells, unit = CASES[name]
    basis = basis_of(*shells)
    dm, options = any_matrices(basis.nao, 2), {"direct_scf_tol": 0, "omega": 0.4}
    with running(unit) as machine:
        found = md4.JK(basis, backend="cuda", **options).derivative_jk(dm)
    assert machine.kernels >= {"half_exchange", "exchange_derivatives"}
    assert "digest_rows" not in machine.kernels
    assert_same(found, md4.JK(basis, backend="cpu", **options).derivative_jk(dm))


def test_j_and_k_alone():
    basis = basis_of((0, 0))
    dm = any_matrices(basis.nao)
    right = md4.JK(basis, backend="cpu", direct_scf_tol=0).derivative_jk(dm)
    with running():
        jk = md4.JK(basis, backend="cuda", direct_scf_tol=0)
        vj, no_vk = jk.derivative_jk(dm, with_k=False)
        no_vj, vk = jk.derivative_jk(dm, with_j=False)
        assert jk.derivative_jk(dm, with_j=False, with_k=False) == (None, None)
    assert no_vj is no_vk is None
    assert_same((vj, vk), right)


@pytest.fixture
def launched(monkeypatch):
    """Bra and ket pairs of each chunk whose U is taken, how many launches, and blocks of functions of a warp."""
    found, take, launch = [], derivative_matrices.launch_half_exchange, DeviceContext.launch

    def noted(context, aos, ab, cd, *args):
        found.append([len(ab), len(cd), 0, 0])
        take(context, aos, ab, cd, *args)

    def counted(context, variant, *args):
        if variant.factory is half_exchange.half_exchange:
            found[-1][2:] = found[-1][2] + 1, variant.facts[0]
        launch(context, variant, *args)

    monkeypatch.setattr(derivative_matrices, "launch_half_exchange", noted)
    monkeypatch.setattr(DeviceContext, "launch", counted)
    return found


WHOLE = [[3, 3, 1, 1]]


@pytest.mark.parametrize("name, value, shells, whole, parts", [
    ("derivative_matrices.CHUNK_BYTES", 1, ((0, 0),), WHOLE, [[1, 1, 1, 1]] * 9),
    pytest.param(
        "derivative_matrices.CHUNK_BYTES", 1, ((1, 1),), WHOLE, [[1, 1, 1, 1]] * 9, marks=pytest.mark.thorough
    ),
    ("derivative_matrices.W_SHARE", 1e-12, ((0, 0),), WHOLE, [[1, 3, 1, 1]] * 3),
    ("kernels.half_exchange.MOST_WARPS", 2, ((0, 0),), WHOLE, [[3, 3, 3, 1]]),
    pytest.param(
        "kernels.half_exchange.HELD", (16,), ((1,), 2, 2), [[1, 1, 1, 2]], [[1, 1, 1, 1]], marks=pytest.mark.thorough
    ),
], ids=["chunks", "chunks of p", "pieces", "launches", "functions"])  # fmt: skip
def test_what_is_divided(name, value, shells, whole, parts, launched, monkeypatch):
    """A quartet at a time, or a bra pair, or a part of their functions."""
    with running():
        made, dm = made_by(basis_of(*shells))
        right = made.run(dm, True, True, 0.0)
        assert launched == whole
        monkeypatch.setattr(f"md4.gpu.{name}", value)
        launched.clear()
        for mine, theirs in zip(made.run(dm, True, True, 0.0), right):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=3e-15 * abs(theirs).max())
    assert launched == parts


def test_pairs_of_as_many_primitives(launched):
    """Each is a piece of its own."""
    shells = [md4.Shell(0, [1.1, 0.4][:n], [[1.0]] * n, [0, 0, n]) for n in (1, 2, 1)]
    basis = md4.Basis(shells)
    dm = any_matrices(basis.nao)
    right = md4.JK(basis, backend="cpu", direct_scf_tol=0).derivative_jk(dm)
    with running():
        assert_same(md4.JK(basis, backend="cuda", direct_scf_tol=0).derivative_jk(dm), right)
    assert [npair for npair, *_ in launched] == [3, 2, 1]


def test_the_same_bits():
    """In any order of the blocks and threads of a launch."""
    basis, found = basis_of((0, 0, 0)), []
    dm = any_matrices(basis.nao)
    for order in (range, lambda grid: reversed(range(grid))):
        with running() as machine:
            machine.blocks = order
            machine.lot.seed(len(found))
            found.append(md4.JK(basis, backend="cuda", direct_scf_tol=0).derivative_jk(dm))
    np.testing.assert_array_equal(*found)


def test_members():
    """Of each shell, pairs that rise, one of a shell with itself."""
    basis = basis_of((0, 1, 0))
    first, members, own, others = members_of(basis, np.array([[2, 0], [0, 0], [2, 2], [0, 2]]))
    assert [first.tolist(), own.tolist()] == [[0, 3, 6], [0, 4]]
    assert members.tolist() == [1, 2, 6, 0, 4, 7]
    assert others.tolist() == [4, 0, 4, 0, 4, 0]


def test_parts_of_the_terms():
    """They add up to all, and so does what is reported: all ordered pairs of AOs."""
    basis, told = basis_of((0, 0, 0)), []
    with running():
        made, dm = made_by(basis)
        parts = [made.run(dm, True, True, 0.0, part, 3, told.append) for part in range(3)]
        assert sum(told) == basis.nao**2
        assert all(vk.any() for _, vk in parts)
        assert_same([sum(of_all) for of_all in zip(*parts)], made.run(dm, True, True, 0.0))


@pytest.mark.sample("0")
@pytest.mark.parametrize("seed", range(3))
def test_what_is_left_out(seed):
    """By the blocks of D that belong to it."""
    basis, tolerance = row_of_shells(0, 0, 1, 0), 10.0 ** (seed - 4)
    dm = scattered(basis, seed)
    with running():
        found = md4.JK(basis, backend="cuda", direct_scf_tol=0).derivative_jk(dm, tolerance=tolerance)
    assert_small_ones_left_out(basis, dm, tolerance, found)


@pytest.mark.parametrize("steepest", [1e3, 1e9])
def test_steep_functions(steepest):
    """J in fixed point would lose digits beside the second, so it is made on the CPU."""
    exponents = [[steepest], [0.5], [0.8]]
    basis = md4.Basis.from_arrays([0, 0, 1], exponents, [[1.0]] * 3, [[0, 0, 0], [0, 0, 1], [0.3, 0.4, 0]])
    dm = any_matrices(basis.nao, 2)
    right = md4.JK(basis, backend="cpu", direct_scf_tol=0).derivative_jk(dm)
    with running() as machine:
        ours = md4.JK(basis, backend="cuda", direct_scf_tol=0).derivative_jk(dm)
    for mine, theirs in zip(ours, right, strict=True):
        assert abs(mine - theirs)[:, :, 1:, 1:].max() < 1e-13
        assert abs(mine - theirs).max() < 1e-14 * abs(theirs).max()
    assert ("correlation_by_threads" in machine.kernels) == (steepest < 1e6)


def test_tiny_densities():
    """Whose norms underflow: without a tolerance nothing is left out."""
    basis = row_of_shells(0, 0)
    dm = 1e-170 * any_matrices(basis.nao)
    right = md4.JK(basis, backend="cpu", direct_scf_tol=0).derivative_jk(dm)
    with running():
        assert_same(md4.JK(basis, backend="cuda", direct_scf_tol=0).derivative_jk(dm), right)


@pytest.mark.thorough
@pytest.mark.parametrize("pure", [True, False])
def test_a_molecule_in_a_plane(pure, monkeypatch):
    """It is turned, and its matrices are turned back; what is left out adds less than the tolerance to each of them."""
    monkeypatch.setattr("md4.gpu.part_plans.PLANE_L", 1)
    mol = molecule(PLANE, {"H": [[0, [1.2, 1.0]]], "O": [[1, [0.9, 1.0]]]}, cart=not pure)
    dm, limits = any_matrices(mol.nao), []
    exact = md4.JK(mol, backend="cpu", direct_scf_tol=0).derivative_jk(dm)
    with running():
        jk = md4.JK(mol, backend="cuda", direct_scf_tol=0)
        assert_same(jk.derivative_jk(dm), exact)
        assert jk._frame.rotation is not None
        run = derivative_matrices.DeviceDerivatives.run
        monkeypatch.setattr(
            derivative_matrices.DeviceDerivatives, "run",
            lambda self, *args: limits.append(args[3]) or run(self, *args),
        )  # fmt: skip
        assert not any(found.any() for found in jk.derivative_jk(dm, tolerance=1e9))
    assert limits == pytest.approx([1e9 * jk._frame.sharpening / 3**0.5])


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"with_j": False}, {"with_k": False}], ids=str)
def test_little_memory(options):
    """It is refused ahead, or enough, with lists that are there."""
    basis = basis_of((0, 0, 2))
    dm, messages = any_matrices(basis.nao, 2), []
    right = md4.JK(basis, backend="cpu", direct_scf_tol=0).derivative_jk(dm, **options)
    with running():
        jk = md4.JK(basis, backend="cuda", direct_scf_tol=0)
        jk._forces_of_lists(0.0)
        pool = jk.engine.backend.context.pool
        for more in np.geomspace(20e3, 2e6, 24):
            pool.trim()
            pool.cap = pool.held + int(more)
            try:
                found = jk.derivative_jk(dm, **options)
            except MemoryLimitError as error:
                messages.append(str(error))
            else:
                break
    for mine, theirs in zip(found, right):
        assert mine is theirs is None or abs(mine - theirs).max() < 1e-14 * abs(theirs).max()
    assert messages
    assert all(message.startswith("derivatives of J and K") for message in messages)


def test_too_many_warps(monkeypatch):
    """Of a bra pair, whose numbers kernels divide in 32 bits."""
    monkeypatch.setattr(half_exchange, "MOST_WARPS", 1)
    with running(), pytest.raises(MemoryLimitError, match=r"may have 4 warps, .* take 1; use"):
        md4.JK(SMALL, backend="cuda").derivative_jk(np.eye(SMALL.nao))


@pytest.mark.thorough
def test_memory_that_is_short(monkeypatch):
    """Whatever there is, K is refused ahead, or it is enough; of lists of several classes, whose kernels do nothing."""
    basis = basis_of((0, 0, 0, 0, 1, 1, 1), 2)
    dm, found = any_matrices(basis.nao, 2), []
    for name in ("launch_half_exchange", "launch_exchange_derivatives"):
        monkeypatch.setattr(derivative_matrices, name, lambda *_: None)
    monkeypatch.setattr("md4.gpu.forces.launch_r", lambda *_: None)
    monkeypatch.setattr("md4.gpu.forces.bra_launcher", lambda *_: lambda *_: None)
    with running():
        jk = md4.JK(basis, backend="cuda", direct_scf_tol=0)
        made, dm = jk.engine.backend.sums.derivatives(jk.engine, jk._forces_of_lists(0.0), 0.0), jk._frame.densities(dm)
        pool = jk.engine.backend.context.pool
        for more in np.geomspace(5e4, 1e6, 12):
            for this in made.lists:
                this.drop()
            pool.trim()
            pool.cap = pool.held + int(more)
            try:
                made.run(dm, False, True, 0.0)
            except MemoryLimitError as error:
                found.append(str(error).startswith("derivatives of J and K"))
            else:
                found.append(None)
    assert set(found[: found.index(None)]) == {True}
    assert set(found[found.index(None) :]) == {None}
