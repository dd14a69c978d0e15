"""Digestion of blocks (ij, kl, a, b, c, d) into J and K: which of the two kernels takes a class, and its launch.

Where a quartet is small, a thread digests it alone (`md4.gpu.kernels.digest_quartets`); of larger ones, a warp goes
through the rows ab (`md4.gpu.kernels.digest_rows`). The equations are in `md4.method.digestion`.
"""

from typing import NamedTuple

from md4.gpu.compile import Variant
from md4.gpu.kernels.digest_lanes import Shape
from md4.gpu.kernels.digest_parameters import Block, Lists, Matrices, Share
from md4.gpu.kernels.digest_quartets import digest_quartets, quartet_bytes, quartet_doubles
from md4.gpu.kernels.digest_rows import digest_rows, tile_shape, warp_bytes
from md4.gpu.tuning import DIGEST, DIGEST_QUARTETS, DIGEST_ROWS
from md4.method.digestion import digest_flags, digest_ranges


def by_quartets(bra, ket):
    """Whether a thread digests a quartet; where bra and ket have but one b and d, rows are faster."""
    slender = bra.nb == ket.nb == 1 and min(bra.nab, ket.nab) > 1
    return bra.nab * ket.nab <= DIGEST_QUARTETS.integrals and not slender


def digest_variant(bra, ket, with_k=True, with_j=True):
    """The variant that digests blocks of a class into K and J."""
    if by_quartets(bra, ket):
        return Variant(digest_quartets, (bra.na, bra.nb, ket.na, ket.nb, with_k, with_j))
    rows, _ = tile_shape(bra.na, bra.nb)
    return Variant(digest_rows, (rows, DIGEST_ROWS.blocks[rows - 1], with_k, with_j))


def digest_swapped(bra, ket):
    """Whether bra and ket should be exchanged: for few numbers a thread, or else for many elements of the ket."""
    if by_quartets(bra, ket):
        return quartet_doubles(ket.nb, bra.na, bra.nb) < quartet_doubles(bra.nb, ket.na, ket.nb)
    return ket.nab < bra.nab


def bra_pairs_of_a_warp(most, warps):
    """Bra pairs that a warp takes one after the other, `most` at most; `warps` there are if each takes one."""
    return max(1, min(most, warps // DIGEST.warps))


class DigestLaunch(NamedTuple):
    """What launches for two classes and the same numbers of matrices have in common.

    Attributes
    ----------
    shared : int
        Bytes of shared memory of a block.
    elements, bra_pairs : int
        Elements of a ket pair, and most bra pairs that a warp takes one after the other.
    shape : tuple
        Last arguments of the kernel: a `Shape` where a warp goes through rows.
    ranges : list of (Variant, tuple of int)
        Which matrices each kernel works on.
    """

    shared: int
    elements: int
    bra_pairs: int
    shape: tuple
    ranges: list


def digest_launch(context, bra, ket, counts):
    """`DigestLaunch` of two `ListFacts`."""
    ranges = [
        (digest_variant(bra, ket, *flags), ends) for ends, flags in zip(digest_ranges(*counts), digest_flags(*counts))
    ]
    if by_quartets(bra, ket):
        bra_pairs = DIGEST_QUARTETS.lane_integrals // (bra.nab * ket.nab)
        return DigestLaunch(quartet_bytes(bra.na, bra.nb, ket.na, ket.nb), 1, bra_pairs, (), ranges)
    rows, b_step = tile_shape(bra.na, bra.nb)
    shape = Shape(bra.na, bra.nb, ket.na, ket.nb, b_step)
    shared, bra_pairs = DIGEST.threads // 32 * warp_bytes(rows, b_step), DIGEST_ROWS.lane_integrals // bra.nab
    return DigestLaunch(shared, ket.nab, bra_pairs, (shape,), ranges)


def launch_digest(context, block, ab, cd, places, triangle, matrices, counts, nao):
    """A block into X and Y.

    Parameters
    ----------
    block : DeviceBlock
    ab, cd : PreparedPairs
        Slices of lists, whose (npair, 2) first AOs are `places`.
    triangle : bool
        Bra and ket are slices of one list.
    matrices : tuple of Buffer
        D, X, D + D^T and Y of `md4.method.digestion`, each in a row.
    counts : tuple of int
        Numbers of matrices X and Y; 0 leaves out K or J.
    nao : int
    """
    fixed = context.fixed(digest_launch, ab.facts, cd.facts, counts)
    warps = -(-cd.npair * fixed.elements // 32)
    bra_pairs = bra_pairs_of_a_warp(fixed.bra_pairs, warps * ab.npair)
    blocks = -(-warps * -(-ab.npair // bra_pairs) * 32 // DIGEST.threads)
    chunk = Block(block.array, ab.npair, cd.npair), Lists(ab.first, cd.first, triangle, *places)
    for variant, ends in fixed.ranges:
        context.launch(
            variant, blocks, DIGEST.threads, fixed.shared,
            *chunk, Matrices(*matrices, *ends, nao), Share(warps, bra_pairs), *fixed.shape,
        )  # fmt: skip
