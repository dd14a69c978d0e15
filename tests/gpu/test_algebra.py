"""Density fitting on a GPU: on the emulated device with a stand-in for CuPy, and on a real one."""

import gc
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from densities import random_densities
from emulator import host_array, running
from emulator.array_library import cupy
from molecules import WATER, molecule
from pyscf import df, gto

import md4
from md4.contract.density_fitting import DensityFitting
from md4.contract.exchange_factors import half_transformed
from md4.contract.fitted_mp2 import mp2
from md4.contract.fitting_orbitals import Pieces, integrals
from md4.contract.fitting_stores import Columns, block_rows
from md4.contract.fitting_team import density_fitting
from md4.contract.metric import Metric
from md4.contract.metric_rows import inverse
from md4.contract.mp2 import Spin
from md4.contract.three_centre import ThreeCentre
from md4.cpu.algebra import HostAlgebra
from md4.engine import make_backend
from md4.gpu import targets
from md4.gpu.algebra import DeviceAlgebra
from md4.gpu.buffers import as_buffer
from md4.gpu.pool import bucket
from md4.gpu.products import operand
from md4.method.operators import as_operator

STORES = ["device", "host", "direct"]
# Few functions, since the emulated device is slow.
FEW = gto.M(atom="H 0 0 0; H 0 0.3 1.1; H 0.7 0 0.4", basis={"H": [[0, [1.1, 1]]]}, spin=1, verbose=0)
MORE = gto.M(atom="H 0 0 0; F 0 0.3 1.1", basis="6-31g", verbose=0)
AUXILIARY = {"H": [[0, [2.0, 1]], [1, [0.7, 1]]], "F": [[l, [a, 1]] for l in (0, 1, 2) for a in (0.4, 1.5)]}
DEPENDENT = {symbol: [*shells, *shells] for symbol, shells in AUXILIARY.items()}


def fitting(mol, auxbasis, backend, **options):
    bases = (md4.Basis.from_mol(m) for m in (mol, df.make_auxmol(mol, auxbasis)))
    return DensityFitting(*bases, backend=backend, cutoff=0, **options)


@pytest.fixture(scope="module")
def emulated():
    with running("dmma16"), cupy() as library:
        yield library


@pytest.fixture
def host_integrals(monkeypatch):
    """Integrals on the device are those of the CPU backend, which saves the time of emulated kernels."""
    integrals, metric = ThreeCentre.integrals, ThreeCentre.metric

    def twin(three):
        return ThreeCentre(*three.basis.parts, backend="cpu")

    def copied(self, first, last, out):
        if self.engine.backend.name == "cpu":
            return integrals(self, first, last, out)
        out[...] = integrals(twin(self), first, last)
        return out

    def copied_metric(self):
        if self.engine.backend.name == "cpu":
            return metric(self)
        out = self.engine.backend.result((self.naux, self.naux))
        host_array(as_buffer(out), "float64").reshape(out.shape)[...] = metric(twin(self))
        return out

    monkeypatch.setattr(ThreeCentre, "integrals", copied)
    monkeypatch.setattr(ThreeCentre, "metric", copied_metric)


def compare(ours, theirs, mol):
    """J and K of two general densities and a symmetric one, of one alone, and rows of the tensor."""
    assert ours.metric.how == theirs.metric.how
    dm = random_densities(mol, 0, 3)
    dm[1] += dm[1].T
    for found, wanted in zip(ours.get_jk(dm, 0), theirs.get_jk(dm, 0), strict=True):
        assert type(found) is np.ndarray
        assert abs(found - wanted).max() < 1e-10
    for found, wanted in zip(ours.get_jk(dm[0]), theirs.get_jk(dm[0]), strict=True):  # J and K of one are made together
        assert abs(found - wanted).max() < 1e-10
    found, wanted = (made.rows(0, made.size) for made in (ours, theirs))
    assert abs(found.T @ found - wanted.T @ wanted).max() < 1e-10
    assert abs(ours.rows(1, 3) - found[1:3]).max() < 1e-14


def test_plain_python(emulated):
    """From the first kernel to the last product."""
    compare(*(fitting(FEW, AUXILIARY, name) for name in ("cuda", "cpu")), FEW)


@pytest.mark.thorough
def test_another_operator(emulated):
    """It shares all else, before and after."""
    ours, theirs = (fitting(FEW, AUXILIARY, name) for name in ("cuda", "cpu"))
    compare(ours, theirs, FEW)
    operator = md4.Operator.erf(0.4)
    other = ours.with_operator(operator)
    assert other.engine.backend.context is ours.engine.backend.context
    compare(other, fitting(FEW, AUXILIARY, "cpu", operator=operator), FEW)
    compare(ours, theirs, FEW)


@pytest.mark.sample("direct-*", "device-eigenvectors")
@pytest.mark.parametrize("auxbasis", [AUXILIARY, DEPENDENT], ids=["Cholesky", "eigenvectors"])
@pytest.mark.parametrize("store", STORES)
def test_stores(emulated, host_integrals, store, auxbasis, monkeypatch):
    """Blocks of few rows, so that both buffers of a streamed tensor are filled again."""
    monkeypatch.setattr("md4.gpu.algebra.DeviceAlgebra.block_bytes", 1 << 13)
    monkeypatch.setattr("md4.gpu.algebra.DeviceAlgebra.chunk_bytes", 1 << 13)
    monkeypatch.setattr("md4.gpu.algebra.SOLVED_ROWS", 8)
    for name in ("LEAST", "LEAST_SENT"):
        monkeypatch.setattr(f"md4.gpu.staging.{name}", 0)
    monkeypatch.setattr("md4.contract.exchange_factors.TILE", 1)
    ours = fitting(MORE, auxbasis, "cuda", store=store)
    assert ours.store == store
    assert len(ours.columns.cuts()) > 2
    compare(ours, fitting(MORE, auxbasis, "cpu"), MORE)


def watch(monkeypatch, name, calls):
    """Lets a method of the algebra note that it is called."""
    method = getattr(DeviceAlgebra, name)

    def watched(*args):
        calls.append(name)
        return method(*args)

    monkeypatch.setattr(DeviceAlgebra, name, watched)


def by_matrices(monkeypatch):
    """Rows become matrices, whose products the emulated device makes faster."""
    monkeypatch.setattr(DeviceAlgebra, "takes_rows", lambda *_: False)


@pytest.mark.parametrize("packed", [True, False], ids=["rows", "matrices"])
@pytest.mark.parametrize("store", ["device", "host"])
def test_exchange_of_rows_and_of_matrices(emulated, host_integrals, store, packed, monkeypatch):
    """Densities of both signs, of a negative one, of two sides and of none, together; one alone; orbitals."""
    calls = []
    for name in ("half_transform", "unpack", "unpack_and_sum"):
        watch(monkeypatch, name, calls)
    if not packed:
        by_matrices(monkeypatch)
    monkeypatch.setattr("md4.gpu.algebra.DeviceAlgebra.block_bytes", 1 << 10)
    auxiliary = {"H": [[0, [2.0, 1]], [0, [0.6, 1]]]}
    theirs, rng = fitting(FEW, auxiliary, "cpu"), np.random.default_rng(0)
    general, occupations = rng.normal(size=(3, 3)), np.array([2.0, 0.5, 0.0])
    square = general @ general.T
    densities = np.array([general + general.T, -square, np.outer(general[0], general[1]), 0 * square])
    of_orbitals = general * occupations @ general.T
    assert {-1.0, 1.0} == set(np.sign(np.linalg.eigvalsh(densities[0])))
    ours = fitting(FEW, auxiliary, "cuda", store=store)
    for dm in (densities, densities[2]):
        for found, right in zip(ours.get_jk(dm, 0), theirs.get_jk(dm, 0), strict=True):
            assert abs(found - right).max() < 1e-12
    found = ours.get_jk(of_orbitals, orbitals=[(general, occupations)])
    for one, right in zip(found, theirs.get_jk(of_orbitals), strict=True):
        assert abs(one - right).max() < 1e-12
    assert ("half_transform" in calls, any(name.startswith("unpack") for name in calls)) == (packed, not packed)


def compare_orbitals(ours, theirs, tolerance):
    """Rows over orbitals, integrals over four orbitals, energies and amplitudes of MP2, one spin and two."""
    rng, nao = np.random.default_rng(0), ours.nao
    a, b = rng.normal(size=(nao, 3)), rng.normal(size=(nao, 5))
    spins = [
        Spin(rng.normal(size=(nao, o)), rng.normal(size=(nao, v)), np.append(-np.ones(o), rng.uniform(size=v)))
        for o, v in ((3, 4), (2, 5))
    ]

    def results(fit):
        # Eigenvectors of the same eigenvalue, and so single rows, are not unique.
        yield np.tensordot(fit.mo_rows(a, b), fit.mo_rows(b, a), (0, 0))
        yield integrals(fit, (a, b))
        yield integrals(fit, (a, a), (b, b), (True, True))
        for some in (spins[:1], spins):
            *energies, t2 = mp2(fit, some, with_t2=True)
            yield from (*energies, *t2.values())

    for found, wanted in zip(results(ours), results(theirs), strict=True):
        assert type(found) in (float, np.ndarray)
        assert np.max(abs(found - wanted)) <= tolerance * np.max(abs(wanted))


@pytest.mark.sample("direct-*", "host-whole")
@pytest.mark.parametrize("ranges", [False, True], ids=["whole", "ranges"])
@pytest.mark.parametrize("store", STORES)
def test_orbitals(emulated, host_integrals, store, ranges, monkeypatch):
    """In blocks of few rows; as if there were memory for two orbitals at a time only, then with matrices of rows."""
    monkeypatch.setattr("md4.gpu.algebra.DeviceAlgebra.block_bytes", 1 << 13)
    monkeypatch.setattr("md4.gpu.algebra.DeviceAlgebra.chunk_bytes", 1 << 13)
    if ranges:
        by_matrices(monkeypatch)
        monkeypatch.setattr(Pieces, "bytes_of", lambda self, piece: 0 if piece.last == piece.first + 1 else 1 << 60)
    ours = fitting(MORE, AUXILIARY, "cuda", store=store)
    compare_orbitals(ours, fitting(MORE, AUXILIARY, "cpu"), 1e-12)


@pytest.mark.sample("direct*", "device*")
@pytest.mark.parametrize("store, cap", [("direct", 0.3), ("device", 0.66), ("host", 0.66)])
def test_orbitals_below_a_cap(emulated, host_integrals, store, cap, monkeypatch):
    """The pool lends no more than that; ranges of orbitals are as long as there is room for."""
    by_matrices(monkeypatch)
    rng = np.random.default_rng(0)
    ours, theirs = fitting(MORE, AUXILIARY, "cuda", store=store, max_memory=cap), fitting(MORE, AUXILIARY, "cpu")
    levels = np.append(-np.ones(40), rng.uniform(size=30))
    spin = Spin(rng.normal(size=(ours.nao, 40)), rng.normal(size=(ours.nao, 30)), levels)
    assert 1 < len(Pieces(ours, [(spin.occupied, spin.virtual)], beside=100_000).pieces) < 40
    for found, wanted in zip(mp2(ours, [spin])[:2], mp2(theirs, [spin])[:2]):
        assert abs(found - wanted) < 1e-12 * abs(wanted)


# products and triangular equations ------------------------------------------------------------------------------------


@pytest.fixture
def algebra(emulated):
    made = md4.Engine(md4.Basis.from_mol(FEW), backend="cuda").backend.algebra()
    with made.working():
        yield made


def sent(algebra, array):
    """A copy in device memory, contiguous, with a number more in each row where the array has two axes."""
    made = algebra.empty((len(array), array.shape[1] + 1))[:, :-1]
    made[...] = algebra.send(array)
    return made


@pytest.mark.parametrize("factor, add", [(1.0, False), (-2.0, False), (1.0, True), (-2.0, True)])
@pytest.mark.parametrize(
    "shape",
    [(3, 4, 5), (1, 4, 1), (3, 1, 5), (1, 1, 1), (4, 0, 2), (0, 3, 2), (3, 17, 5), (1, 12, 2), (3, 17, 0), (0, 17, 2)],
    ids=str,
)
def test_product(algebra, shape, factor, add):
    """Of matrices, parts of matrices and transposed ones; on the CPU as well."""
    (m, k, n), rng = shape, np.random.default_rng(0)
    a, b, c = rng.normal(size=(m, k)), rng.normal(size=(k, n)), rng.normal(size=(m, n))
    right = factor * a @ b + (c if add else 0)
    for one, other in ((a, b), (a.T.copy().T, b), (a, b.T.copy().T), (a.T.copy().T, b.T.copy().T)):
        given = [sent(algebra, x) if x.flags.c_contiguous else sent(algebra, x.T).T for x in (one, other)]
        out = sent(algebra, c if add else np.full((m, n), np.nan))
        assert algebra.product(*given, out, factor, add) is out
        assert np.allclose(algebra.fetch(out), right, rtol=1e-14, atol=1e-14)
        host = c.copy() if add else np.full((m, n), np.nan)
        assert HostAlgebra.product(None, one, other, host, factor, add) is host
        assert np.allclose(host, right, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("shape", [(3, 5), (1, 5), (5, 1), (1, 1), (0, 4), (4, 0)], ids=str)
def test_matrix_times_vector(algebra, shape):
    """Of a part of a matrix and a transposed one; on the CPU as well."""
    rng = np.random.default_rng(1)
    for turned in (False, True):
        matrix = rng.normal(size=shape)
        vector, before = rng.normal(size=shape[1]), rng.normal(size=shape[0])
        given, out = sent(algebra, matrix.T).T if turned else sent(algebra, matrix), algebra.send(before)
        assert algebra.add_times(given, algebra.send(vector), out) is out
        wanted = before + matrix @ vector
        assert np.allclose(algebra.fetch(out), wanted, rtol=1e-14, atol=1e-14)
        assert HostAlgebra.add_times(None, matrix, vector, before) is before
        assert np.allclose(before, wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("nao", [1, 16, 19])
def test_matrices_of_whole_lines(algebra, nao, monkeypatch):
    """Their rows begin at lines of the cache, and the half-transformation reads them without a copy."""
    width, rng = algebra.matrix_width(nao), np.random.default_rng(nao)
    assert width % 16 == 0
    assert nao <= width < nao + 16
    matrices = rng.normal(size=(2, nao, nao))
    matrices += matrices.transpose(0, 2, 1)
    places, out = algebra.send(np.arange(nao**2).reshape(nao, nao)), algebra.empty((2, nao, width))
    out[...] = np.nan
    block = algebra.unpack(algebra.send(matrices.reshape(2, -1)), places, out)
    assert np.array_equal(algebra.fetch(block), matrices)
    again = algebra.unpack(algebra.send(matrices.reshape(2, -1)), places, out[:1], algebra.send(np.array([1])))
    assert np.array_equal(algebra.fetch(again), matrices[1:])
    block = algebra.unpack(algebra.send(matrices.reshape(2, -1)), places, out)
    given, product = [], algebra.product
    monkeypatch.setattr(algebra, "product", lambda a, b, made: given.append(b) or product(a, b, made))
    vectors = rng.normal(size=(3, nao)).T
    made = half_transformed(algebra, block, algebra.send(vectors.T.copy()).T, algebra.empty((6 * nao,)))
    assert np.allclose(algebra.fetch(made).reshape(3, 2, nao), np.einsum("qij,jo->oqi", matrices, vectors), rtol=1e-12)
    assert np.shares_memory(given[0], out)


@pytest.mark.parametrize("least", [0, 1 << 20], ids=["pinned", "driver"])
def test_staging(algebra, least, monkeypatch):
    """Several arrays on their way at the same time; also where the system gives no pinned memory."""
    monkeypatch.setattr("md4.gpu.staging.LEAST", 0)
    monkeypatch.setattr("md4.gpu.staging.LEAST_SENT", least)
    for most in (1 << 20, 0):
        monkeypatch.setattr("emulator.array_library.PINNED_BYTES", most)
        arrays = [np.random.default_rng(n).normal(size=(3, 5)) for n in range(3)]
        sent = [algebra.send(array) for array in arrays]
        later = [algebra.later(array) for array in sent]
        for array, fetch in zip(arrays, later):
            assert np.array_equal(fetch(), array)
        out = np.empty((2, 3, 5))
        assert np.array_equal(algebra.later(sent[0], out[1])(), arrays[0])
        assert np.array_equal(out[1], arrays[0])
    assert not algebra.staging.takes(np.zeros(3, dtype=int))
    assert not algebra.staging.takes(np.zeros((4, 4))[:, ::2])


def test_staging_counts_against_the_cap(emulated, monkeypatch):
    """As long as a copy uses it, then CuPy gives it back; where little is left, copies do without."""
    monkeypatch.setattr("md4.gpu.staging.LEAST", 0)
    monkeypatch.setattr("md4.gpu.staging.LEAST_SENT", 0)
    algebra = md4.Engine(md4.Basis.from_mol(FEW), backend="cuda", max_memory=1).backend.algebra()
    pool, array = algebra.context.pool, np.random.default_rng(0).normal(size=(60, 60))
    with algebra.working():
        gc.collect()
        before = pool.held
        sent = algebra.send(array)
        fetch = algebra.later(sent)
        assert pool.held - pool.held_on_device >= 32768  # a power of two
        assert np.array_equal(fetch(), array)
        del fetch
        assert emulated.idle_pinned == 32768  # that of the first copy was given back before the second
        algebra.memory_left()
        assert emulated.idle_pinned == 0
        gc.collect()
        assert pool.held == pool.held_on_device
        kept = pool.watch(np.empty((1_000_000 - before) // 8 - 20_000))
        assert not algebra.staging.takes(array)
        monkeypatch.setattr(algebra.staging, "pinned", None)
        assert np.array_equal(algebra.later(algebra.send(array))(), array)
        assert pool.held <= 1_000_000
        del kept, sent
        gc.collect()


def test_staging_takes_little_of_the_host(emulated, monkeypatch):
    """Also without a cap. Then CuPy keeps what is idle."""
    monkeypatch.setattr("md4.gpu.staging.LEAST", 0)
    monkeypatch.setattr("md4.gpu.staging.LEAST_SENT", 0)
    algebra, array = md4.Engine(md4.Basis.from_mol(FEW), backend="cuda").backend.algebra(), np.ones((60, 60))
    emulated.free_pinned()  # of tests before this one
    with algebra.working():
        for free, takes in ((8 * 32768, True), (8 * 32768 - 1, False)):
            monkeypatch.setattr("md4.gpu.staging.host_memory", lambda free=free: free)
            assert algebra.staging.takes(array) is takes
            out = np.empty_like(array)
            assert algebra.later(algebra.send(array), out)() is out
            assert np.array_equal(out, array)
        algebra.memory_left()
        assert emulated.idle_pinned == 2 * 32768


@pytest.mark.parametrize("rows, products", [(7, [(7, 6)]), (8, [(8, 6)]), (9, [(8, 6), (1, 6)]), (11, [(11, 6)])])
@pytest.mark.parametrize("add", [False, True])
def test_few_rows_beyond_tiles(algebra, rows, products, add, monkeypatch):
    """They are a product of their own."""
    for name, value in (("TILE", 4), ("FEW_ROWS", 2), ("LONG", 1)):
        monkeypatch.setattr(f"md4.gpu.products.{name}", value)
    rng, made = np.random.default_rng(rows), []
    a, b, c = rng.normal(size=(rows, 5)), rng.normal(size=(5, 6)), rng.normal(size=(rows, 6))
    dgemm = algebra.cublas.dgemm
    monkeypatch.setattr(algebra.cublas, "dgemm", lambda *args: made.append((args[4], args[3])) or dgemm(*args))
    out = algebra.product(algebra.send(a.T.copy()).T, algebra.send(b), algebra.send(c), -2.0, add)
    assert np.allclose(algebra.fetch(out), -2 * a @ b + (c if add else 0), rtol=1e-14, atol=1e-14)
    assert made == products


def test_product_of_what_cublas_cannot_take(algebra):
    """Every second column, or a result that is transposed."""
    square = algebra.empty((4, 4))
    with pytest.raises(ValueError, match="neither contiguous rows"):
        algebra.product(algebra.empty((4, 8))[:, ::2], square, square)
    with pytest.raises(ValueError, match="rows of a product"):
        algebra.product(square, square, algebra.empty((4, 4)).T)


@pytest.mark.parametrize("count", [1, 5, 8, 19])
@pytest.mark.parametrize("transposed", [False, True])
def test_lower_solver(algebra, count, transposed, monkeypatch):
    """Several blocks of rows and pieces of columns, in place of a part of a matrix."""
    monkeypatch.setattr("md4.gpu.algebra.SOLVED_ROWS", 8)
    monkeypatch.setattr("md4.gpu.algebra.SOLVED_COLUMNS", 5)
    rng = np.random.default_rng(count)
    lower, given = np.tril(rng.normal(size=(count, count))) + 4 * np.eye(count), rng.normal(size=(count, 12))
    held = algebra.send(given)
    found = algebra.lower_solver(algebra.send(lower))(held[:, 2:10], transposed)
    right = np.linalg.solve(lower.T if transposed else lower, given[:, 2:10])
    assert np.allclose(algebra.fetch(found), right, rtol=1e-12, atol=1e-12)
    assert np.shares_memory(found, held)
    assert np.array_equal(held[:, :2], given[:, :2])


def test_lower_solver_of_a_metric_that_is_nearly_singular(algebra, monkeypatch):
    """Where inverses of diagonal blocks alone would lose digits, B^T B is as good as by substitution.

    It is (P|Q) once more for a tensor that is (P|Q) itself.
    """
    from scipy.linalg import solve_triangular

    auxiliary = md4.Basis.from_mol(df.make_auxmol(MORE, df.aug_etb(MORE, beta=1.55)))
    metric = ThreeCentre(md4.Basis.from_mol(MORE), auxiliary, backend="cpu").metric()
    metric = np.tril(metric) + np.tril(metric, -1).T
    assert 1e10 < np.linalg.cond(metric) < 1e15
    lower = np.linalg.cholesky(metric)
    monkeypatch.setattr("md4.gpu.algebra.SOLVED_ROWS", 64)
    ours = algebra.fetch(algebra.lower_solver(algebra.send(lower))(algebra.send(metric)))
    theirs = solve_triangular(lower, metric, lower=True)
    errors = [abs(found.T @ found - metric).max() for found in (ours, theirs)]
    assert errors[0] < 4 * errors[1] + 1e-14 * abs(metric).max()


@pytest.mark.parametrize("change, how, tolerance", [
    (0.0, "eigenvectors", 1e-11), (1e-8, "eigenvectors", 1e-11), (1e-3, "eigenvectors", 1e-8), (0.1, "Cholesky", 1e-9),
])  # fmt: skip
def test_metrics_of_functions_that_coincide(algebra, change, how, tolerance):
    """The way is that of the CPU, and so is (ij|P) (P|Q)^-1 (Q|kl)."""
    mol, shells = molecule(WATER, "6-31g"), [[l, [a, 1]] for l in (0, 1, 2) for a in (0.3, 0.9, 2.7)]
    again = [[l, [a * (1 + change), c]] for l, (a, c) in shells]
    auxmol = df.make_auxmol(mol, {"default": shells + again})
    metric, integrals = auxmol.intor("int2c2e"), df.incore.aux_e2(mol, auxmol, aosym="s2ij").T.copy()
    host = HostAlgebra(make_backend("cpu", as_operator("coulomb")))
    theirs, ours = Metric(metric, host), Metric(algebra.send(metric), algebra)
    assert (ours.how, theirs.how) == (how, how)
    if change == 1e-3:  # where functions coincide, there is an L by chance only
        assert None not in (ours.doubt, theirs.doubt)
    wanted = theirs.apply(integrals.copy())
    found = algebra.fetch(algebra.xp.ascontiguousarray(ours.apply(algebra.send(integrals))))
    assert abs(found.T @ found - wanted.T @ wanted).max() < tolerance


def test_no_wait_for_md4s_own_stream(emulated):
    """Arrays of its algebra, unlike those of other streams, need no wait before they are written."""
    backend = md4.Engine(md4.Basis.from_mol(FEW), backend="cuda").backend
    waits = targets.cuda.waits
    with backend.algebra().working():
        out = backend.algebra().empty((2, 3))
    waits.clear()
    backend.result((2, 3), out)
    assert waits == []
    backend.context.handle = 7
    backend.result((2, 3), out)
    assert waits == [1]


# memory ---------------------------------------------------------------------------------------------------------------


def test_memory_goes_back(emulated, host_integrals):
    """What CuPy asks for is from md4's pool, and returns to it."""
    ours = fitting(MORE, AUXILIARY, "cuda")
    pool = ours.engine.backend.context.pool
    pool.left()
    before = len(pool.lent)
    every = np.eye(ours.nao)
    a, spin = every[:, :3], Spin(every[:, :2], every[:, 2:], np.repeat([-1, 1], [2, 9]))
    uses = [lambda: ours.get_jk(random_densities(MORE, 0), 0), lambda: ours.rows(0, 2), lambda: ours.mo_rows(a, a)]
    for use in (*uses, lambda: integrals(ours, (a, a)), lambda: mp2(ours, [spin])):
        use()
        pool.left()  # takes back what was returned
        assert len(pool.lent) == before


@pytest.mark.sample("direct-*")
@pytest.mark.parametrize("auxbasis", [AUXILIARY, DEPENDENT], ids=["Cholesky", "eigenvectors"])
@pytest.mark.parametrize("store", STORES)
def test_several_devices(emulated, host_integrals, store, auxbasis, monkeypatch):
    """Three workers on the device, each with a pool of its own; the stand-in is one for one thread at a time."""
    monkeypatch.setattr("md4.contract.team.chosen", lambda *_: [None] * 3)
    monkeypatch.setattr("md4.contract.fitting_team.run_each", lambda count, work, start: [*map(work, range(count))])
    monkeypatch.setattr("md4.gpu.algebra.DeviceAlgebra.block_bytes", 1 << 13)
    monkeypatch.setattr("md4.gpu.algebra.DeviceAlgebra.chunk_bytes", 1 << 13)
    bases = (md4.Basis.from_mol(m) for m in (MORE, df.make_auxmol(MORE, auxbasis)))
    ours = density_fitting(*bases, backend="cuda", store=store, cutoff=0)
    assert len({share.engine.backend.context.pool for share in ours.shares}) == ours.count == 3
    compare(ours, fitting(MORE, auxbasis, "cpu"), MORE)
    compare_orbitals(ours, fitting(MORE, auxbasis, "cpu"), 1e-11)


@pytest.mark.parametrize("max_memory", [None, 50])
def test_blocks_of_rows(emulated, max_memory):
    """8 GB at most, and no more than half of what a cap leaves."""
    made = md4.Engine(md4.Basis.from_mol(FEW), backend="cuda", max_memory=max_memory).backend.algebra()
    left, row = made.memory_left(), 1 << 20
    assert block_rows(made, row) == (8192 if max_memory is None else left // 2 // row)
    assert 0 < block_rows(made, row) <= left / 2 / row
    with pytest.raises(md4.MemoryLimitError, match="raise max_memory"):
        block_rows(made, left + 1)


@pytest.mark.parametrize("limit", [1e6, 1e-6], ids=["product", "substitution"])
def test_rows_of_the_inverse(emulated, host_integrals, limit, monkeypatch):
    """Either way to make rows of B of one worker, in steps of few columns."""
    monkeypatch.setattr("md4.contract.metric_rows.LARGEST", limit)
    monkeypatch.setattr("md4.gpu.algebra.DeviceAlgebra.block_bytes", 1 << 13)
    ours, theirs = (fitting(MORE, AUXILIARY, name) for name in ("cuda", "cpu"))
    with ours.engine.lock, ours.algebra.working():
        whole = inverse(ours.sorted_metric(), ours.algebra)
        assert whole.by_substitution == (limit < 1)
        columns = Columns(ours.three, whole.rows(slice(1, None, 3), ours.algebra), ours.algebra)
        fetch, contiguous = ours.algebra.fetch, ours.algebra.xp.ascontiguousarray
        found = np.concatenate([fetch(contiguous(part)) for *_, part in columns.solved()], axis=1)
    ((_, wanted),) = theirs.table.blocks(0, theirs.size, theirs.size)
    assert abs(found - wanted[1::3, : ours.three.ncol]).max() < 1e-11


@pytest.mark.parametrize("limit", [1e6, 1e-6], ids=["product", "substitution"])
def test_memory_of_the_inverse(emulated, host_integrals, limit, monkeypatch):
    """What is asked for before is enough: three matrices, and the inverses and the work of `LowerSolver`."""
    monkeypatch.setattr("md4.contract.metric_rows.LARGEST", limit)
    monkeypatch.setattr("md4.gpu.algebra.SOLVED_ROWS", 4)
    ours, size = fitting(MORE, AUXILIARY, "cuda").algebra, 64
    pool = ours.context.pool
    matrix = np.random.default_rng(0).normal(size=(size, size))
    with ours.working():
        given = [ours.empty((size, size))]
        given[0][...] = ours.send(matrix @ matrix.T + np.eye(size))
        pool.trim()
        pool.peak = before = pool.held
        found = inverse(given.pop(), ours)
    assert found.by_substitution == (limit < 1)
    assert pool.peak - before <= 2 * bucket(8 * size**2) + 2 * bucket(8 * 4 * size)
    if not found.by_substitution:
        assert abs(found.matrix @ (matrix @ matrix.T + np.eye(size)) @ found.matrix.T - np.eye(size)).max() < 1e-11


def test_a_host_table_larger_than_the_device(emulated, host_integrals, monkeypatch):
    """The cap counts it, but the device need not have room for it."""
    for max_memory in (None, 50):
        small = fitting(MORE, AUXILIARY, "cuda", max_memory=max_memory).algebra
        free = small.host_left()
        with monkeypatch.context() as patches:
            patches.setattr("md4.gpu.pool.RESERVE_BYTES", 1 << 60)
            small.context.pool.trim()
            assert small.memory_left() < 1e6
            assert small.host_left() >= 0.9 * free


def test_no_pinned_memory(emulated, host_integrals, monkeypatch):
    monkeypatch.setattr("emulator.array_library.PINNED_BYTES", 100)
    with pytest.raises(md4.MemoryLimitError, match=r"pinned host memory \(cudaError.*store='direct'"):
        fitting(MORE, AUXILIARY, "cuda", store="host")


def test_without_cupy(emulated, monkeypatch):
    """The message has the remedy."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(md4.DeviceError, match=r"needs CuPy .*df-cu13.*backend='cpu'"):
        fitting(FEW, AUXILIARY, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("store", STORES)
def test_gpu(gpu, store):
    pytest.importorskip("cupy")
    mol = molecule(WATER, "cc-pvtz")
    both = random_densities(mol, 0, 2)
    ours, theirs = (md4.DF(mol, "cc-pvtz-jkfit", backend=name, store=store) for name in ("cuda", "cpu"))
    for dm in (both, both[0]):  # J and K of one are made together
        for found, wanted in zip(ours.get_jk(dm, 0), theirs.get_jk(dm, 0), strict=True):
            assert abs(found - wanted).max() < 1e-10
    both[1, 3, 2] = np.nan  # CuPy's maximum must not lose it
    with pytest.raises(md4.ArgumentError, match="elements that are not finite"):
        ours.get_jk(both, 0)
    assert abs(ours._cderi[5:40] - theirs._cderi[5:40]).max() < 1e-10


@pytest.mark.parametrize("shape", [(15, 0), (0, 15), (0, 0)])
def test_operand_of_an_empty_array(shape):
    """CuPy gives it strides of zero."""
    array = SimpleNamespace(shape=shape, strides=(0, 0), data=SimpleNamespace(ptr=0))
    assert operand(array).step >= 1
