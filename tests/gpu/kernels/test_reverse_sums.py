"""Steps 2 and 3 of gradients on the emulated GPU: Z from random U, and forces from random Z, beside NumPy."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from emulator import host_array, running
from gpu.kernels.test_limits import on_device, sent
from gpu.kernels.test_plain_python import basis_of
from method.test_derivatives import dense_h

import md4
from md4.cpu.groups import functions_of
from md4.gpu.hermite_coulomb import first_aos
from md4.gpu.kernels.pair_forces import launch_forces
from md4.gpu.kernels.reverse_sums import INNER, launch_reverse, reverse_tile
from md4.gpu.reverse_ways import hermite_facts
from md4.gpu.staircases import hermite_order
from md4.gpu.tiles import blocks_of_8
from md4.method.angular import nherm
from md4.method.derivatives import OF_A, OF_B
from md4.shells.shell_pairs import shell_pairs


@dataclass(frozen=True)
class Case:
    """Shells of bra and ket, their primitives and contracted functions, terms of Gamma, and parts of the ket pairs."""

    bra: tuple
    ket: tuple
    nprim: int = 1
    nctr: int = 1
    pure: bool = True
    terms: int = 1
    parts: int = 1
    unit: str = "dmma16"


CASES = {
    "(ps|ss)": Case((1, 0), (0, 0)),
    "(ps|ss), dmma8": Case((1, 0), (0, 0), unit="dmma8"),
    "(pp|ps), three terms": Case((1, 1), (1, 0), terms=3),
    "(ps|ps), K = 4, three parts": Case((1, 0), (1, 0), nprim=2, parts=3),
    "(ss|ps) of two functions, K = 9": Case((0, 0), (1, 0), nprim=3, nctr=2, terms=2, parts=2),
    "(dp|dd), dmma8": Case((2, 1), (2, 2), unit="dmma8", parts=2),
    "(ff|ps), Cartesian: two blocks of rows": Case((3, 3), (1, 0), pure=False),
    "(dd|ss), K = 4: more than one block of columns": Case((2, 2), (0, 0), nprim=2),
}
COULOMB, EXCHANGE = np.array([0.0, 1.5, -0.7]), np.array([0.8, 0.0, 2.0])


def gamma_of(basis, densities, bra, ket):
    """Gamma[ab, cd] of `md4.gpu.kernels.reverse_sums`, from blocks of the densities."""
    a, b, c, d = (slice(*basis.ao_loc[shell : shell + 2]) for shell in (*bra, *ket))
    factor, found = (1 + (bra[0] != bra[1])) * (1 + (ket[0] != ket[1])), 0.0
    for matrix, j, k in zip(densities, COULOMB, EXCHANGE):
        found = found + j * np.einsum("ab,cd->abcd", matrix[a, b], matrix[c, d])
        found = found - k / 2 * np.einsum("ac,bd->abcd", matrix[a, c], matrix[b, d])
        found = found - k / 2 * np.einsum("ad,bc->abcd", matrix[a, d], matrix[b, c])
    return factor * found.reshape(found.shape[0] * found.shape[1], -1)


@pytest.mark.races
@pytest.mark.parametrize("name", CASES)
def test_sums_over_kets(name):
    """Of slices of both lists. Ket pairs that do not count are never read, and Z of other bra pairs stays as it is."""
    case, rng = CASES[name], np.random.default_rng(1)
    basis = basis_of((*case.bra, *case.ket, *case.bra, *case.ket), case.nprim, case.nctr, case.pure)
    own = case.bra[0] == case.bra[1]
    bra = np.array([[4, 5], [0, 1], [0, 0] if own else [0, 5], [4, 1], [0, 5]])
    ket = np.array([[2, 2] if case.ket[0] == case.ket[1] else [2, 7], *[[2, 3], [6, 7], [6, 3], [2, 7]] * 3])
    counts = np.array([0, 0, len(ket), 6, 3], dtype=np.int32)
    densities = rng.normal(size=(case.terms, basis.nao, basis.nao))
    with running(case.unit) as machine:
        engine = md4.Engine(basis, backend="cuda")
        context, lists = engine.backend.context, [engine.prepare(pairs) for pairs in (bra, ket)]
        task, (ab, cd) = lists[0][1 : len(bra)], (lists[0][1:4], lists[1][2:11])
        starts, nab, ncd, np8 = ab.whole.pairs.start, ab.facts.nab, cd.facts.nab, blocks_of_8(nherm(ab.facts.l + 1))
        u, want = rng.normal(size=(ab.nprim, np8, cd.npair, ncd, 8)), np.zeros((task.nprim, nab, np8, 8))
        for n in range(1, 4):
            live, of_pair = max(0, min(counts[n] - cd.first, cd.npair)), slice(*starts[n : n + 2] - ab.first_prim)
            u[of_pair, :, live:] = np.nan
            for kl in range(live):
                gamma = gamma_of(basis, densities, bra[n], ket[cd.first + kl])
                place = slice(*starts[n : n + 2] - task.first_prim)
                want[place] += np.einsum("rc,kbcp->krbp", gamma, u[of_pair, :, kl])
        tile, row_blocks = reverse_tile(nab, ab.facts.max_prim * np8)
        rows, factors = 8 * tile.rows8 * row_blocks, (COULOMB[: case.terms], EXCHANGE[: case.terms])
        room = context.pool.get(case.parts * task.nprim * np8 * rows * 8)
        z = room.part(0, (case.parts * task.nprim * np8 * rows * 8,))
        context.clear(z)
        terms = *(sent(context, numbers) for numbers in (densities, *factors)), basis.nao
        launch_reverse(
            context, tile, row_blocks, [first_aos(context, side, basis) for side in lists], ab, cd, sent(context, u),
            np8, on_device(context, counts), terms, (z, task.first_prim, task.nprim, rows), case.parts,
        )  # fmt: skip
        found = host_array(z, "float64").reshape(case.parts, task.nprim, np8, rows, 8).copy()
    assert machine.kernels >= {"reverse_sums"}
    assert nab < rows or not found[:, :, :, nab:].any()
    inner = [max(0, min(count - cd.first, cd.npair)) * ncd for count in counts[1:4]]
    assert found[-1].any() == (-(-max(inner) // INNER) >= case.parts)
    assert row_blocks == (2 if "rows" in name else 1)
    found = found.sum(axis=0)[:, :, :nab].transpose(0, 2, 1, 3)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-13 * abs(want).max())


# Angular momenta, primitives and contracted functions of a pair.
PAIRS = [((0, 0), 1, 1), ((1, 0), 2, 1), ((2, 1), 1, 2), ((1, 1), 2, 2), ((3, 2), 1, 1), ((4, 3), 1, 1)]


@pytest.mark.races
@pytest.mark.parametrize("pure", [True, False])
@pytest.mark.parametrize("ls, nprim, nctr", PAIRS)
def test_forces_of_pairs(ls, nprim, nctr, pure):
    """The derivatives of H times Z, which is summed over parts; the task begins behind the first pair."""
    rng, parts, width = np.random.default_rng(2), 2, sum(ls) + 1
    basis = basis_of((*ls, *ls), nprim, nctr, pure)
    pairs = np.array([[0, 1], [2, 1], [0, 3]])[: 3 if sum(ls) < 4 else 2]
    host = shell_pairs(basis, pairs, cutoff=0).derived(OF_A + OF_B)
    order, nab = hermite_order(width), host.na * host.nb
    rows = 8 * blocks_of_8(nab)
    with running() as machine:
        engine = md4.Engine(basis, backend="cuda")
        context, ab = engine.backend.context, engine.prepare(pairs)[1 : len(pairs)]
        z = rng.normal(size=(parts, ab.nprim, len(order) // 8, rows, 8))
        z[:, :, :, nab:] = np.nan  # rows and columns of padding are not read
        z[..., -1, :, :][..., order[-8:] < 0] = np.nan
        out = context.pool.get(6 * ab.nprim)
        launch_forces(context, ab, hermite_facts(width), (sent(context, z), ab.first_prim, ab.nprim, rows), parts, out)
        found = host_array(out, "float64")[: 6 * ab.nprim].reshape(6, ab.nprim).T.copy()
    assert machine.kernels >= {"pair_forces"}
    functions, triples = functions_of(host)
    place = {p: n for n, p in enumerate(order.tolist()) if p >= 0}
    columns = [place[p] for p in functions.tolist()]
    of_p = z.sum(axis=0).transpose(0, 2, 1, 3).reshape(ab.nprim, rows, -1)[:, :nab, columns]
    signs = (-1.0) ** triples.reshape(-1, 3).sum(axis=1)
    want = np.einsum("kdrp,krp,p->kd", dense_h(host)[ab.first_prim :], of_p, signs)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-12 * abs(want).max())


@pytest.mark.parametrize("nab, ncol", [*product([1, 9, 64, 65, 200, 700], [1, 2, 3, 7, 8, 70])])
def test_tiles(nab, ncol):
    """All rows have a place, and no block of threads has only padding."""
    tile, row_blocks = reverse_tile(nab, ncol)
    rows = 8 * tile.rows8
    assert (row_blocks - 1) * rows < nab <= row_blocks * rows
    assert 2 * tile.rows8 * tile.nt <= 64  # numbers of Z of a thread
    assert 32 * tile.warps <= 256
