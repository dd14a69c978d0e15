"""Where each lane of a tensor instruction finds [p|q] = r[p+q] in shared memory.

A word holds the byte offsets of r[p+q] for a lane's two p. Tables are stored as float64, two words in one, since they
come to shared memory by the same copies as everything else.
"""


import numpy as np

from md4.gpu.r_layout import r_places
from md4.gpu.staircases import gather_order, hermite_order
from md4.gpu.tiles import MOST_COLUMNS
from md4.method.angular import packed_hermite, sum_ordinal

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
    return np.take(words, range(words.shape[1] + MOST_COLUMNS), axis=1, mode="wrap").reshape(-1)


def words_of(bra, ket):
    """The arguments of `gather_words` for two `ListFacts`, of all or of parts of one parity."""
    return bra.l, ket.l, bra.first, ket.first, bra.mirror


def ket_primitives_of(columns, nq8):
    """Most ket primitives that `columns` successive blocks of 8 q can belong to, `nq8` blocks each."""
    return (columns - 1 + nq8 - 1) // nq8 + 1
