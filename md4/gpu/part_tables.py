"""Where kernels write the even and the odd part of a class (`md4.method.mirror`) in blocks of all its functions.

The functions of one side run fastest in a quartet. For each function of its own on the other side, a part writes all of
a quartet's numbers: its integrals, and zeros between them for the functions of the other parity. So nothing is left of
what the block's memory held before, and no number is written by both parts.
"""

import numpy as np

from md4.gpu.staircases import mirror_of
from md4.method.mirror import part_rows


def rows_and_others(h_class):
    """Which functions of the whole class a part has, and which it has not; `h_class` is that of its `ListFacts`."""
    axis, parity = mirror_of(h_class)
    return [part_rows(*h_class[:5], axis, n) for n in (parity, 1 - parity)]


def quartet_words(bra, ket, turned, padding):
    """What `md4.gpu.emit.stores.make_write_words` writes of a quartet, int32; a multiple of `padding` words.

    Parameters
    ----------
    bra, ket : tuple
        `h_class` of two parts, whose integrals (ab|cd) are in C order; if `turned`, ab runs fastest.
    turned : bool
    padding : int
    """
    (outer, _), inner = map(rows_and_others, (ket, bra) if turned else (bra, ket))
    width, sources = sum(map(len, inner)), np.arange(1, len(outer) * len(inner[0]) + 1).reshape(len(outer), -1)
    words = (outer[:, None] * width + np.arange(width)) << 16
    words[:, inner[0]] += sources
    return np.pad(words.reshape(-1), (0, -words.size % padding), constant_values=-1).astype(np.int32)


def places_and_zeros(h_class, order=None):
    """Three places in the whole class for each function of a part, -1 for none; shape (3 nfunction,), int32.

    The first is its own. At the other two, if any, are functions that the part has not: they are never more than twice
    as many as its own. `order`, if given, is that of the functions, in which -1 stands for padding.
    """
    rows, others = rows_and_others(h_class)
    places = np.vstack([rows, np.pad(others, (0, 2 * len(rows) - len(others)), constant_values=-1).reshape(2, -1)])
    places = places if order is None else np.where(order < 0, -1, places[:, order])
    return places.reshape(-1).astype(np.int32)
