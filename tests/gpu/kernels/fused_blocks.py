"""What tests of the fused kernels share: integrals by one path of `md4.gpu.paths`, on the emulated GPU."""

from dataclasses import dataclass

import numpy as np
from emulator import host_array, running
from gpu.kernels.test_limits import on_device
from gpu.kernels.test_plain_python import assert_same, basis_of

import md4
from md4.gpu import paths
from md4.gpu.buffers import as_buffer
from md4.method.mirror import part_rows


@dataclass(frozen=True)
class Way:
    """A path, by its name, and the kernel that it launches."""

    path: str
    kernel: str

    def make(self, engine, ab, cd, block):
        """Puts the integrals of two prepared lists into a block, the second list as ket."""
        (path,) = (path for path in paths.PATHS if path.name == self.path)
        forms = (side.h(form) for side, form in zip((ab, cd), path.forms(None)))
        path.run(engine.backend, *forms, ab, cd, block)

    def made(self, basis, bra, ket, shape, limits=None):
        """The integrals of all quartets of two lists in an array of a shape; `limits` as those of a block."""
        with running() as machine:
            engine = md4.Engine(basis, backend="cuda")
            block = engine.backend.scratch(shape)
            if limits is not None:
                counts, by_ket = limits
                block.limits = on_device(engine.backend.context, counts.astype(np.int32)), by_ket
            self.make(engine, engine.prepare(bra), engine.prepare(ket), block)
            assert self.kernel in machine.kernels
            return host_array(block.array, "float64").reshape(shape).copy()


def sides(ls, nprim, nbra, nket):
    """A basis with bra pairs of two kinds and ket pairs of two kinds, and the integrals by the CPU."""
    rng, basis = np.random.default_rng(5), basis_of((*ls, *ls))
    if nprim > 1:
        contracted = basis_of((*ls, *ls), nprim).shells
        basis = md4.Basis([s if n % 4 > 1 else contracted[n] for n, s in enumerate(basis.shells)])
    bra = rng.choice([[0, 1], [4, 5], [0, 5], [4, 1]], nbra)
    ket = rng.choice([[2, 3], [6, 7], [2, 7], [6, 3]], nket)
    return basis, bra, ket, md4.Engine(basis, backend="cpu").compute(bra, ket)


def check_limits(way, ls, by_ket):
    """Compares what counts, whatever neighbours have in memory that nobody wrote; returns the rest."""
    basis, bra, ket, right = sides(ls, 1, 4, 9)
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 5, 9) if by_ket else np.array([9, 0, 5, 4])
    counts[2:6] = (0, 4, 0, 1) if by_ket else counts[2:6]
    live = np.arange(4)[:, None] < counts if by_ket else np.arange(9) < counts[:, None]
    found = way.made(basis, bra, ket, right.shape, (counts, by_ket))
    np.testing.assert_allclose(found[live], right[live], rtol=0, atol=1e-14 * abs(right).max())
    return found[~live]


def check_without_primitives(way, ls, far):
    """Compares where shells are so far apart that no primitive pair is left: zeros, and their neighbours are right.

    `far` are degrees: of the far shell that ket pairs have and that which bra pairs have, or of one for both.
    """
    near, rng = basis_of(ls), np.random.default_rng(2)
    basis = md4.Basis([*near.shells, *(md4.Shell(l, [0.5], [[1.0]], np.full(3, 60.0)) for l in far)])
    for order in range(3):
        bra = [[0, 1], [0, 3 + len(far)], [0, 1]]
        ket = rng.permutation([[2, 3]] * 5 + [[2, 4]] * 4) if order else [[2, 4]] * 4
        right = md4.Engine(basis, backend="cpu").compute(bra, ket)
        assert not right[:, np.asarray(ket)[:, 1] == 4].any()
        found = way.made(basis, bra, ket, right.shape)
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-14 * max(1e-3, abs(right).max()))


def check_part(way, ls, parity):
    """Compares the functions ab of the even or the odd part in a molecule in a plane; no others are written."""
    shells = basis_of(ls).shells
    flat = md4.Basis([md4.Shell(s.l, s.exponents, s.coefficients, np.array([*s.centre[:2], 0.3])) for s in shells])
    right = md4.Engine(flat, backend="cpu").compute([[0, 1]] * 2, [[2, 3]] * 5)
    with running():
        engine = md4.Engine(flat, backend="cuda")
        ab, cd = engine.prepare([[0, 1]] * 2).part(0, parity), engine.prepare([[2, 3]] * 5).part(0, parity)
        block = engine.backend.scratch(right.shape)
        way.make(engine, ab, cd, block)
        found = host_array(block.array, "float64").reshape(2, 5, (2 * ls[0] + 1) * (2 * ls[1] + 1), -1)
    rows, others = (part_rows(*ls[:2], True, 1, 1, 0, n) for n in (parity, 1 - parity))
    assert_same(found[:, :, rows], right.reshape(found.shape)[:, :, rows])
    assert np.isnan(found[:, :, others]).all()


def check_matrix(way, ls, swapped):
    """Compares integrals that are a part of a matrix: those of a quartet are contiguous within rows only."""
    basis, bra, ket, right = sides(ls, 1, 2, 5)
    nbra, nket, na, nb, nc, nd = right.shape
    with running():
        engine = md4.Engine(basis, backend="cuda")
        context, (ab, cd) = engine.backend.context, (engine.prepare(bra), engine.prepare(ket))
        shape = (nket, nbra, nc, nd, na, nb) if swapped else right.shape
        columns, rows = shape[0] * shape[2] * shape[3], shape[1] * shape[4] * shape[5]
        matrix = context.pool.array((rows + 2, columns + 3))
        block = engine.backend.matrix_block(matrix, 1, 2, shape)
        way.make(engine, ab, cd, block.swapped() if swapped else block)
        found = host_array(as_buffer(matrix), "float64").reshape(rows + 2, columns + 3)[1 : rows + 1, 2 : columns + 2]
    expected = right.transpose(1, 0, 4, 5, 2, 3) if swapped else right
    assert_same(found, expected.transpose(1, 4, 5, 0, 2, 3).reshape(rows, columns))
