"""Digestion of blocks (ij, kl, a, b, c, d) into J and K by `md4.gpu.kernels.digest_rows`: its tiles and its launch.

The even and odd parts of a block (`md4.method.mirror`) have a kernel of their own
(`md4.gpu.kernels.digest_mirrored`). The equations are in `md4.method.digestion`.
"""

import numpy as np

from md4.gpu.compile import Variant
from md4.gpu.kernels import digest_mirrored as mirrored
from md4.gpu.kernels.digest_in_place import quartet_doubles
from md4.gpu.kernels.digest_lanes import THREADS
from md4.gpu.kernels.digest_mirrored import digest_mirrored
from md4.gpu.kernels.digest_rows import digest_rows, tile_blocks, tile_shape, warp_bytes
from md4.method.digestion import digest_flags, digest_ranges
from md4.method.mirror import function_counts, function_parities, part_rows

FEWEST_WARPS = 8448  # that should be there before each takes several bra pairs
LANE_INTEGRALS = 256  # most integrals of a lane in several bra pairs


def slender(bra, ket):
    """Whether two lists have but one b and d, and more functions a and c."""
    return bra.nb == ket.nb == 1 and min(bra.nab, ket.nab) > 1


def digest_swapped(bra, ket, in_place=False):
    """Whether bra and ket should be exchanged: for many elements of the ket, or for few numbers a thread if `in_place`.

    Then a thread digests the quartets that it makes.
    """
    if in_place and not slender(bra, ket):
        return quartet_doubles(ket.nb, bra.na, bra.nb) < quartet_doubles(bra.nb, ket.na, ket.nb)
    return ket.nab < bra.nab


def variants_of(factory, facts, counts):
    """(variant, its range of matrices) for each range of such numbers of matrices X and Y."""
    flags = digest_flags(*counts)
    return [(Variant(factory, (*facts, *these)), ends) for these, ends in zip(flags, digest_ranges(*counts))]


def share_out(nbra, elements, most):
    """(blocks, `Share`) for `nbra` bra pairs and so many elements of the ket, 32 a warp.

    A warp takes `most` bra pairs one after the other at most, and fewer if there would be too few warps.
    """
    warps = -(-elements // 32)
    bra_pairs = max(1, min(most, warps * nbra // FEWEST_WARPS))
    return -(-warps * -(-nbra // bra_pairs) * 32 // THREADS), (warps, bra_pairs)


def make_launch(variants, warp_bytes, most, ncd, shape):
    """The function that digests one block, or both parts of one, by the variants of a kernel.

    A warp has `warp_bytes` of shared memory, and `most` bra pairs at most; see `share_out`. A ket pair has `ncd`
    elements.
    """
    shared = THREADS // 32 * warp_bytes

    def launch(context, blocks, ab, cd, places, triangle, matrices, nao):
        nbra, nket = ab.npair, cd.npair
        grid, share = share_out(nbra, nket * ncd, most)
        given, lists = (*(block.array for block in blocks), nbra, nket), (ab.first, cd.first, triangle, *places)
        for variant, ends in variants:
            context.launch(
                variant, grid, THREADS, shared, given, lists, blocks[0].limits, (*matrices, *ends, nao), share, shape
            )  # fmt: skip

    return launch


def digest_launcher(context, bra, ket, counts):
    """The function by which `launch_digest` launches for two `ListFacts` and the same numbers of matrices."""
    tile = tile_shape(bra.na, bra.nb)
    variants = variants_of(digest_rows, (*tile, tile_blocks(*tile)), counts)
    shape = bra.na, bra.nb, ket.na, ket.nb
    return make_launch(variants, warp_bytes(*tile), LANE_INTEGRALS // bra.nab, ket.nab, shape)


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
    launch = context.fixed(digest_launcher, ab.facts, cd.facts, counts)
    launch(context, (block,), ab, cd, places, triangle, matrices, nao)


# even and odd parts ---------------------------------------------------------------------------------------------------


def counts_of(pairs, axis):
    """Numbers of even a, odd a, even b and odd b of `ListFacts`, or of a list."""
    shells = (pairs.la, pairs.nctr_a), (pairs.lb, pairs.nctr_b)
    return sum((function_counts(l, pairs.pure, nctr, axis) for l, nctr in shells), ())


def mirrored_functions(la, lb, pure, nctr_a, nctr_b, axis):
    """The even functions a as they are counted in their shell, the odd ones, and the same of b; int32."""
    parities = [function_parities(l, pure, nctr, axis) for l, nctr in ((la, nctr_a), (lb, nctr_b))]
    return np.concatenate([np.argsort(parity, kind="stable") for parity in parities]).astype(np.int32)


def mirrored_columns(lc, ld, pure, nctr_c, nctr_d, axis):
    """2 n + parity for each c nd + d, with the place n in the rows cd of this parity; int32."""
    parts = [part_rows(lc, ld, pure, nctr_c, nctr_d, axis, parity) for parity in range(2)]
    columns = np.empty(sum(map(len, parts)), dtype=np.int32)
    for parity, rows in enumerate(parts):
        columns[rows] = 2 * np.arange(len(rows)) + parity
    return columns


def mirrored_launcher(context, bra, ket, axis, counts):
    """The function by which `launch_mirrored` launches for two `ListFacts` and the same numbers of matrices."""
    na_even, _, nb_even, nb_odd = counts_of(bra, axis)
    tile = mirrored.tile_parts(na_even, nb_even, nb_odd)
    variants = variants_of(digest_mirrored, (*tile, mirrored.tile_blocks(*tile)), counts)
    c_even, c_odd, d_even, d_odd = counts_of(ket, axis)
    functions = context.table(mirrored_functions, *bra.shell_class, axis)
    columns = context.table(mirrored_columns, *ket.shell_class, axis)
    shape = (*counts_of(bra, axis), ket.na, ket.nb, c_even * d_even + c_odd * d_odd, functions, columns)
    return make_launch(variants, mirrored.warp_bytes(*tile), 2 * LANE_INTEGRALS // bra.nab, ket.nab, shape)


def launch_mirrored(context, blocks, axis, ab, cd, places, triangle, matrices, counts, nao):
    """The even and the odd part of a block into X and Y.

    Parameters
    ----------
    blocks : tuple of DeviceBlock
        The even and the odd part, each (ij, kl, ab, cd) in C order with the rows of `md4.method.mirror.part_rows`, and
        with the same limits.
    axis : int
        That of the reflection, as in `md4.method.mirror`.
    ab, cd : PreparedPairs
        Slices of whole lists.
    places, triangle, matrices, counts, nao
        As in `launch_digest`.
    """
    launch = context.fixed(mirrored_launcher, ab.facts, cd.facts, axis, counts)
    launch(context, blocks, ab, cd, places, triangle, matrices, nao)
