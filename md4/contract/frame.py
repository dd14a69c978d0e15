"""The frame in which J and K are made: the order of AOs, and for planar molecules a plane of constant z.

A molecule in such a plane has AOs that are even or odd in z, so that half of the integrals are zero
(`md4.method.mirror`). One that lies askew is turned, D with it, and J and K are turned back (`md4.method.rotations`).
"""

from functools import cached_property
from zlib import crc32

import numpy as np

from md4.contract.densities import in_order
from md4.method.rotations import component_rotation
from md4.shells.basis import turned_basis


class Frame:
    """How matrices over the caller's AOs become those over the AOs of which J and K are made.

    Parameters
    ----------
    basis : Basis
        The shells as they are.
    order : ndarray of int64, shape (nao,)
        AO n of `basis` is AO order[n] of the caller.
    backend
        Whether planar molecules are turned is up to its `Sums.gains_by_plane`.
    ranks : md4.contract.ranks.Ranks or md4.contract.ranks.Alone
        The processes that build together. They get the turned matrices of rank 0, since a product of matrices may have
        other bits on another processor.

    Attributes
    ----------
    basis : Basis
        The same shells, at turned centres if `rotation` is not None.
    rotation : ndarray or None, shape (3, 3)
        R of a molecule that is turned. One that lies in a plane of constant x, y or z already stays as it is.
    sharpening : float
        Factor of the tolerance of shell quartets, at most 1. An element of J or K is a sum of elements of turned
        matrices with factors B_ia B_jb, the moduli of which add up to s at most. So a quartet that adds less than
        tolerance / s to each turned element adds less than the tolerance to each of the caller's. The moduli of a row
        of B add up to sqrt(2 l + 1) at most for spherical functions, by the Schwarz inequality, and to sqrt(3)^l for
        Cartesian ones, by that for a row of R. So s is 2 l + 1 or 3^l of the highest l.
    """

    def __init__(self, basis, order, backend, ranks):
        self.basis, self.order, self.rotation, self.sharpening = basis, order, None, 1.0
        self._backend, self._ranks = backend, ranks
        rotation, turned = turned_basis(basis) if backend.sums.gains_by_plane(basis) else (None, None)
        if rotation is None:
            return
        self.basis, self.rotation = turned, rotation
        self.sharpening = 1 / (2 * basis.lmax + 1 if basis.pure else 3**basis.lmax)
        self._turns = [*map(self._turn, sorted({shell.l for shell in basis.shells}))]

    def _turn(self, l):
        """(AOs of all shells of an l, component by component, and B of these); shapes (n ncomp,), (ncomp, ncomp)."""
        ranges = zip(self.basis.ao_loc, self.basis.ao_loc[1:], self.basis.classes[:, 0])
        aos = np.concatenate([np.arange(first, last) for first, last, of in ranges if of == l])
        return aos, component_rotation(l, self.basis.pure, self.rotation.T)

    def facts(self):
        """What has to be the same in all processes, since all make the frame by themselves."""
        text = "as it is" if self.rotation is None else f"turned {crc32(self.basis.centres.tobytes()):08x}"
        return {"the frame of the molecule": text}

    def densities(self, matrices):
        """D' of density matrices D over the caller's AOs, shape (n, nao, nao)."""
        if self.rotation is None:
            return in_order(matrices, self.order)
        turns = [(self.order[aos], aos, turn.T) for aos, turn in self._turns]
        return self._on_both_sides(matrices, turns, np.empty(matrices.shape))

    def sums(self, matrices):
        """J, K or parts of them over the caller's AOs, from `matrices` over those of `basis`, which it may overwrite.

        The shape is (n, nao, nao).
        """
        if self.rotation is None:
            return in_order(matrices, np.argsort(self.order))
        turns = [(aos, self.order[aos], turn) for aos, turn in self._turns]
        return self._on_both_sides(matrices, turns, matrices)

    def _on_both_sides(self, matrices, turns, out):
        """`out` = T X T^T for all matrices X, which may be `out`; T as in `turn_rows`."""
        one, two = self._room
        for matrix, result in zip(matrices, out):
            turn_rows(matrix, turns, one)
            two[:] = one.T
            turn_rows(two, turns, one)
            result[:] = one.T
        return self._ranks.broadcast(out)

    @cached_property
    def _room(self):
        """Two matrices for intermediate results. They are kept, since to write new memory takes longer than to turn."""
        return self._backend.watch(np.empty((2, self.basis.nao, self.basis.nao)))


def turn_rows(matrix, turns, out):
    """`out` = T X for a matrix X; `turns` are triples of columns and rows of some equal blocks of T, and the block.

    The columns and rows of a block follow those of the one before. All other elements of T are zero.
    """
    for columns, rows, turn in turns:
        blocks = matrix[columns].reshape(-1, len(turn), matrix.shape[1])
        out[rows] = (turn @ blocks).reshape(len(rows), -1)
