"""The frame in which J and K are made: the order of AOs, and for planar molecules a plane of constant z.

A molecule in such a plane has AOs that are even or odd in z, so that half of the integrals are zero
(`md4.method.mirror`). One that lies askew is turned, D with it, and J and K are turned back (`md4.method.rotations`).
"""

from dataclasses import replace
from zlib import crc32

import numpy as np

from md4.contract.densities import in_order
from md4.method.mirror import mirror_axis
from md4.method.rotations import component_rotation, turned_to_plane
from md4.shells.basis import Basis
from md4.shells.limits import LARGEST_COORDINATE


class Frame:
    """How matrices over the caller's AOs become those over the AOs of which J and K are made.

    Parameters
    ----------
    basis : Basis
        The shells as they are.
    order : ndarray of int64, shape (nao,)
        AO n of `basis` is AO order[n] of the caller.
    in_plane : bool
        Whether planar molecules are turned.
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

    def __init__(self, basis, order, in_plane, ranks):
        self.basis, self.order, self.rotation, self.sharpening, self.ranks = basis, order, None, 1.0, ranks
        if not in_plane or mirror_axis(basis.centres) is not None:
            return
        rotation, centres = turned_to_plane(basis.centres)
        if rotation is None or abs(centres).max() > LARGEST_COORDINATE:
            return
        self.rotation = rotation
        self.basis = Basis([replace(s, centre=centre) for s, centre in zip(basis.shells, centres)], basis.pure)
        self._turns = [*map(self._turn, sorted({shell.l for shell in basis.shells}))]
        self.sharpening = 1 / (2 * basis.lmax + 1 if basis.pure else 3**basis.lmax)

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
        return self.ranks.broadcast(on_both_sides(matrices, [(self.order[n], n, turn.T) for n, turn in self._turns]))

    def sums(self, matrices):
        """J, K or parts of them over the caller's AOs from those over the AOs of `basis`, shape (n, nao, nao)."""
        if self.rotation is None:
            return in_order(matrices, np.argsort(self.order))
        return self.ranks.broadcast(on_both_sides(matrices, [(n, self.order[n], turn) for n, turn in self._turns]))


def on_both_sides(matrices, turns):
    """T X T^T for matrices X, shape (n, nao, nao), where T has few blocks that are not zero.

    Parameters
    ----------
    matrices : ndarray, shape (n, nao, nao)
    turns : list of (ndarray, ndarray, ndarray)
        Columns and rows of some equal blocks of T, one block after the other, and the block.
    """
    count, _, nao = matrices.shape
    for _ in range(2):
        turned = np.empty(matrices.shape)
        for columns, rows, turn in turns:
            shape = count, len(rows) // len(turn), len(turn), nao
            turned[:, rows] = (turn @ matrices[:, columns].reshape(shape)).reshape(count, len(rows), nao)
        matrices = np.ascontiguousarray(turned.transpose(0, 2, 1))
    return matrices
