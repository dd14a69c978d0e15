"""Digestion of blocks (ij, kl, a, b, c, d) into J and K: which of the two kernels takes a class, and its launch.

Where a quartet is small, a thread digests it alone (`md4.gpu.kernels.digest_quartets`); of larger ones, a warp goes
through the rows ab (`md4.gpu.kernels.digest_rows`). The equations are in `md4.method.digestion`.
"""

from md4.gpu.compile import Variant
from md4.gpu.kernels.digest_quartets import digest_quartets, quartet_bytes, quartet_doubles
from md4.gpu.kernels.digest_rows import digest_rows, tile_blocks, tile_shape, warp_bytes
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
    shape = tile_shape(bra.na, bra.nb)
    return Variant(digest_rows, (*shape, tile_blocks(*shape), with_k, with_j))


def digest_swapped(bra, ket):
    """Whether bra and ket should be exchanged: for few numbers a thread, or else for many elements of the ket."""
    if by_quartets(bra, ket):
        return quartet_doubles(ket.nb, bra.na, bra.nb) < quartet_doubles(bra.nb, ket.na, ket.nb)
    return ket.nab < bra.nab


def bra_pairs_of_a_warp(most, warps):
    """Bra pairs that a warp takes one after the other, `most` at most; `warps` there are if each takes one."""
    return max(1, min(most, warps // DIGEST.warps))


def digest_launcher(context, bra, ket, counts):
    """The function by which `launch_digest` launches for two `ListFacts` and the same numbers of matrices."""
    ranges = [
        (digest_variant(bra, ket, *flags), ends) for ends, flags in zip(digest_ranges(*counts), digest_flags(*counts))
    ]
    # `elements` of a ket pair, and the most bra pairs that a warp takes one after the other
    threads = DIGEST.threads
    if by_quartets(bra, ket):
        shared, shape = quartet_bytes(bra.na, bra.nb, ket.na, ket.nb), ()
        elements, most = 1, DIGEST_QUARTETS.lane_integrals // (bra.nab * ket.nab)
    else:
        shared, shape = threads // 32 * warp_bytes(*tile_shape(bra.na, bra.nb)), ((bra.na, bra.nb, ket.na, ket.nb),)
        elements, most = ket.nab, DIGEST_ROWS.lane_integrals // bra.nab

    def launch(context, block, ab, cd, places, triangle, matrices, nao):
        nbra, nket = ab.npair, cd.npair
        warps = -(-nket * elements // 32)
        bra_pairs = bra_pairs_of_a_warp(most, warps * nbra)
        blocks = -(-warps * -(-nbra // bra_pairs) * 32 // threads)
        ao_bra, ao_ket = places
        lists = ab.first, cd.first, triangle, ao_bra, ao_ket
        for variant, ends in ranges:
            context.launch(
                variant, blocks, threads, shared,
                (block.array, nbra, nket), lists, block.limits, (*matrices, *ends, nao), (warps, bra_pairs), *shape,
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
