"""Where each lane of a tensor instruction finds [p|q] = r[p+q] in shared memory.

`gather_words` are for r in the order of `md4.gpu.banks`, words for single shells for r in the order of its ordinals. A
word holds the byte offsets of r[p+q] for a lane's two p. Tables are stored as float64, two words in one, since they
come to shared memory by the same copies as everything else.
"""

from functools import cache

import numpy as np

from md4.gpu.banks import r_places
from md4.gpu.staircases import gather_order, hermite_order
from md4.gpu.tuning import TILES
from md4.method.angular import packed_hermite, sum_ordinal
from md4.method.hermite import solid_terms

# Blocks of 8 q of which a kernel may read words beyond the last one, without using them.
PADDING = 5


def gather_words(l_bra, l_ket, first_p=0, first_q=0, mirror=None):
    """Words of every block of 8 p and of 8 q, from `first_p` and `first_q` on, or of those of a part.

    Shape (p blocks, q blocks, 16), words in order of lanes, p and q in that of `md4.gpu.staircases`; padding stands for
    0.
    """
    order_p, order_q = gather_order(l_bra, first_p, mirror), hermite_order(l_ket, first_q, mirror)
    p, q = packed_hermite(l_bra)[order_p], packed_hermite(l_ket)[order_q]
    p, q = np.where(order_p < 0, 0, p), np.where(order_q < 0, 0, q)
    p, q = p.reshape(-1, 1, 1, 4, 2), q.reshape(1, -1, 8, 1)
    places = r_places(l_bra + l_ket, mirror and mirror[0])
    low, high = (8 * places[sum_ordinal(p[..., n], q)] for n in range(2))
    words = (low + (high << 16)).astype(np.uint32)
    return words.reshape(*words.shape[:2], 32).view(np.float64)


def all_words(*sides):
    """`gather_words` in a row."""
    return gather_words(*sides).reshape(-1)


def padded_words(*sides):
    """`all_words`, and PADDING blocks that are read but not used."""
    return np.concatenate([all_words(*sides), np.zeros(16 * PADDING)])


def words_in_turn(*sides):
    """`gather_words` with blocks of q that begin anew, for the columns of a block of threads from any q on."""
    words = gather_words(*sides)
    return np.take(words, range(words.shape[1] + TILES.most_columns), axis=1, mode="wrap").reshape(-1)


@cache
def shared_components(l, parts, nt, slots):
    """Components m of single shells of degree `l` as `parts` warps share them: alike numbers of monomials together.

    Returns
    -------
    components : ndarray of int, shape (parts, nt, slots)
        m in `slots` of each of the `nt` blocks of 8 columns of a warp; -1 for padding.
    lengths : ndarray of int, shape (parts, nt)
        Most monomials of a component of each block.
    """
    lengths = np.count_nonzero(solid_terms(l)[0], axis=0)
    components = np.full(parts * nt * slots, -1)
    components[: 2 * l + 1] = np.argsort(-lengths, kind="stable")
    components = components.reshape(parts, nt, slots)
    return components, np.where(components < 0, 0, lengths[components]).max(axis=2)


@cache
def warp_terms(l, parts, nt, slots):
    """What lanes add up, for each warp: entries of two tables of its width, -1 for those that count as zero.

    Returns
    -------
    list of (m, term)
        Of each warp, ndarrays of int of shape (slots, width): component and number of its monomial. Those of a block of
        columns are neighbours, in the order of the blocks. Lanes read 4 entries at once: a width is an odd multiple of
        4, so that the rows of four lanes are in different banks.
    """
    components, lengths = shared_components(l, parts, nt, slots)
    full, found = np.count_nonzero(solid_terms(l)[0], axis=0), []
    for blocks, counts in zip(components, lengths):
        width = odd_width(int(counts.sum()))
        m, term = np.full((slots, width), -1), np.zeros((slots, width), dtype=int)
        m[:, : counts.sum()] = np.repeat(blocks.T, counts, axis=1)
        term[:, : counts.sum()] = np.concatenate([np.arange(n) for n in counts])
        found.append((np.where((m >= 0) & (term < full[m]), m, -1), term))
    return found


def odd_width(count):
    """The next odd multiple of 4."""
    return next(width for width in range(count, count + 8) if width % 8 == 4)


def term_places(l, parts, nt, slots):
    """Width of each warp's tables, where they begin, and components: `warp_terms` and `shared_components`, int32."""
    widths = np.array([m.shape[1] for m, _ in warp_terms(l, parts, nt, slots)])
    begins = slots * (np.cumsum(widths) - widths)
    components, _ = shared_components(l, parts, nt, slots)
    return np.concatenate([widths, begins, components.reshape(-1)]).astype(np.int32)


def term_words(l_bra, l_ket, first_p, *sharing):
    """Words for solid harmonics of degree `l_ket`: [p block][warp][slot][4 lanes][entry of `warp_terms`] in a row."""
    order = gather_order(l_bra, first_p)
    p = np.where(order < 0, 0, packed_hermite(l_bra)[order]).reshape(-1, 1, 4, 1, 2)
    functions, words = packed_hermite(l_ket)[solid_terms(l_ket)[1]], []
    for m, term in warp_terms(l_ket, *sharing):
        q, live = functions[term, m][None, :, None], (m >= 0)[None, :, None]
        low, high = (np.where(live, 8 * sum_ordinal(p[..., n], q), 0) for n in range(2))
        words.append((low + (high << 16)).reshape(len(p), -1))
    return np.concatenate(words, axis=1).astype(np.uint32).reshape(-1).view(np.float64)


def term_coefficients(l, *sharing):
    """C[m, q] of solid harmonics of degree `l`: [warp][slot][entry of `warp_terms`] in a row."""
    table = solid_terms(l)[0]
    return np.concatenate([np.where(m < 0, 0.0, table[term, m]).reshape(-1) for m, term in warp_terms(l, *sharing)])


def words_of(bra, ket):
    """The arguments of `gather_words` for two `ListFacts`, of all or of parts of one parity."""
    return bra.l, ket.l, bra.first, ket.first, bra.mirror


def ket_primitives_of(columns, nq8):
    """Most ket primitives that `columns` successive blocks of 8 q can belong to, `nq8` blocks each."""
    return (columns - 1 + nq8 - 1) // nq8 + 1
