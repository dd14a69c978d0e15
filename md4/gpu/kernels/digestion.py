"""Digestion of blocks (ij, kl, a, b, c, d) into J and K by `md4.gpu.kernels.digest_rows`: its tiles and its launch.

The equations are in `md4.method.digestion`.
"""

from md4.gpu.compile import Variant
from md4.gpu.kernels.digest_in_place import quartet_doubles
from md4.gpu.kernels.digest_rows import digest_rows, tile_blocks, tile_shape, warp_bytes
from md4.gpu.tuning import DIGEST, DIGEST_ROWS
from md4.method.digestion import digest_flags, digest_ranges


def slender(bra, ket):
    """Whether two lists have but one b and d, and more functions a and c."""
    return bra.nb == ket.nb == 1 and min(bra.nab, ket.nab) > 1


def digest_variant(bra, with_k=True, with_j=True):
    """The variant that digests blocks of a bra into K and J."""
    shape = tile_shape(bra.na, bra.nb)
    return Variant(digest_rows, (*shape, tile_blocks(*shape), with_k, with_j))


def digest_swapped(bra, ket, in_place=False):
    """Whether bra and ket should be exchanged: for many elements of the ket, or for few numbers a thread if `in_place`.

    Then a thread digests the quartets that it makes.
    """
    if in_place and not slender(bra, ket):
        return quartet_doubles(ket.nb, bra.na, bra.nb) < quartet_doubles(bra.nb, ket.na, ket.nb)
    return ket.nab < bra.nab


def bra_pairs_of_a_warp(most, warps):
    """Bra pairs that a warp takes one after the other, `most` at most; `warps` there are if each takes one."""
    return max(1, min(most, warps // DIGEST.warps))


def digest_launcher(context, bra, ket, counts):
    """The function by which `launch_digest` launches for two `ListFacts` and the same numbers of matrices."""
    variants = [digest_variant(bra, *flags) for flags in digest_flags(*counts)]
    ranges, threads = list(zip(variants, digest_ranges(*counts))), DIGEST.threads
    shared, most = threads // 32 * warp_bytes(*tile_shape(bra.na, bra.nb)), DIGEST_ROWS.lane_integrals // bra.nab
    shape = bra.na, bra.nb, ket.na, ket.nb

    def launch(context, block, ab, cd, places, triangle, matrices, nao):
        nbra, nket = ab.npair, cd.npair
        warps = -(-nket * ket.nab // 32)
        bra_pairs = bra_pairs_of_a_warp(most, warps * nbra)
        blocks = -(-warps * -(-nbra // bra_pairs) * 32 // threads)
        ao_bra, ao_ket = places
        lists = ab.first, cd.first, triangle, ao_bra, ao_ket
        for variant, ends in ranges:
            context.launch(
                variant, blocks, threads, shared,
                (block.array, nbra, nket), lists, block.limits, (*matrices, *ends, nao), (warps, bra_pairs), shape,
            )  # fmt: skip

    return launch


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
    launch(context, block, ab, cd, places, triangle, matrices, nao)

