"""Loops of screening: norms of blocks of a density, the quartets that survive, and rectangles that cover them.

`md4.contract.screening` and `md4.contract.survivors` say what is computed, and use them for the CPU and for GPUs.
"""

import numpy as np

from md4.cpu.compile import Loop
from md4.cpu.groups import numbered
from md4.cpu.threads import in_threads
from md4.support.locks import once

# Columns of the table of lists: the first pair and the one behind the last, kinds of both shells, where the places of
# the list begin, the code of its largest bound, and the bits that codes leave out (`codes_of`).
LIST = numbered("List", "first end kind_a kind_b places highest shift")
# Columns of the table of pairs of lists: both lists, and where their counts begin.
PAIR = numbered("Pair", "bra ket first")
# What is told of a pair of lists: quartets that survive, rows until the last one that has any, and the longest row.
FOUND = numbered("Found", "quartets rows width")


# Rows of a density matrix whose norms are made together.
NORM_ROWS = 64
# Sums of squares below this may lack squares of elements that are too small for a double.
SMALL_SQUARE = 1e-290
# With this factor a quotient, times its divisor, is not less than its dividend.
ABOVE_ONE = 1 + 1e-15


def codes_of(bounds):
    """Codes of falling doubles >= 0, integers that fall with them, and the bits of doubles that codes leave out.

    There are at most three times as many codes as bounds.
    """
    bits = bounds.view(np.int64)
    shift = int((bits[0] - bits[-1]) // (2 * len(bits))).bit_length()
    return bits >> shift, shift


def block_norms(density, loc, first, end, norms):
    """Raises norms[a, b] to |D_ab|, for the shells a from `first` on; `loc` are the first AOs of all shells.

    Where squares may vanish, n^1/2 times the largest of n elements takes the place of the norm, which it exceeds.
    """
    nshell = len(loc) - 1
    row = np.empty(nshell)
    for a in range(first, end):
        row[:] = 0.0
        for i in range(loc[a], loc[a + 1]):
            for b in range(nshell):
                total = 0.0
                for j in range(loc[b], loc[b + 1]):
                    total += density[i, j] * density[i, j]
                row[b] += total
        for b in range(nshell):
            norm = np.sqrt(row[b])
            if row[b] < SMALL_SQUARE:
                for i in range(loc[a], loc[a + 1]):
                    for j in range(loc[b], loc[b + 1]):
                        norm = max(norm, abs(density[i, j]))
                norm *= np.sqrt((loc[a + 1] - loc[a]) * (loc[b + 1] - loc[b]))
            norms[a, b] = max(norms[a, b], norm)


def density_norms(norms, kind, width, lists, shells, bounds, exchange, own, beyond):
    """The norms of `md4.contract.survivors.Norms` from those of `block_norms`, which become symmetric.

    `width` is the square root of the number of AOs of each shell.
    """
    exchange[:] = 0.0
    for a in range(len(kind)):
        for b in range(a + 1):
            norm = max(norms[a, b], norms[b, a])
            norms[a, b] = norms[b, a] = norm
            exchange[kind[b], a] = max(exchange[kind[b], a], norm)
            exchange[kind[a], b] = max(exchange[kind[a], b], norm)
    for n in range(len(lists)):
        highest = 0.0
        for i in range(lists[n, LIST.end] - 1, lists[n, LIST.first] - 1, -1):
            a, b = shells[i, 0], shells[i, 1]
            own[i] = 2 * min(width[a], width[b]) * norms[a, b]
            highest = max(highest, bounds[i] * own[i])
            beyond[i] = highest


def count_survivors(
    lists, pairs, first, end, shells, bounds, exact, places, exchange, own, beyond, tolerance, counts, found, products
):  # fmt: skip
    """Counts the ket pairs that survive with each bra pair, for the pairs of lists from `first` on.

    The `bounds` of a list fall, which are not less than the `exact` ones, so the ket pairs that survive are the first
    of their list. They end where neither the norms of the bra pair nor those of the ket pairs that follow make quartets
    count. `places` has, for each code down from that of a list's largest bound, how many of its bounds have a higher
    code. `products`, unless it is empty, become bounds of the bra pairs whose products with those of the ket pairs tell
    the same.
    """
    for n in range(first, end):
        bra, ket, at = pairs[n, PAIR.bra], pairs[n, PAIR.ket], pairs[n, PAIR.first]
        start, c, d = lists[bra, LIST.first], lists[ket, LIST.kind_a], lists[ket, LIST.kind_b]
        ket_first, nket = lists[ket, LIST.first], lists[ket, LIST.end] - lists[ket, LIST.first]
        table, highest, shift = lists[ket, LIST.places], lists[ket, LIST.highest], lists[ket, LIST.shift]
        last = lists[ket + 1, LIST.places] - table - 2
        total, rows, width = 0, 0, 0
        for i in range(lists[bra, LIST.end] - start):
            a, b = shells[start + i, 0], shells[start + i, 1]
            beside = max(exchange[c, a], exchange[c, b], exchange[d, a], exchange[d, b])
            product = exact[start + i] * max(beside, own[start + i])
            least = tolerance / product
            count = nket
            if least > 0:  # else the tolerance is 0, and all survive
                step = highest - (np.float64(least).view(np.int64) >> shift)
                if step < 0:
                    count = 0
                elif step <= last:
                    low, count = places[table + step], places[table + step + 1]
                    while low < count:
                        middle = (low + count) // 2
                        if bounds[ket_first + middle] >= least:
                            low = middle + 1
                        else:
                            count = middle
            # those that count by their own norms follow; `beyond` falls, while the exact bounds of a bra list need not
            if count < nket and not exact[start + i] * beyond[ket_first + count] < tolerance:
                low, high = count + 1, nket
                while low < high:
                    middle = (low + high) // 2
                    if exact[start + i] * beyond[ket_first + middle] < tolerance:
                        high = middle
                    else:
                        low = middle + 1
                count, product = low, tolerance / bounds[ket_first + low - 1] * ABOVE_ONE
            if bra == ket and count > i + 1:
                count = i + 1
            counts[at + i] = count
            total += count
            width = max(width, count)
            if count:
                rows = i + 1
            if len(products):
                products[at + i] = product
        found[n, FOUND.quartets], found[n, FOUND.rows], found[n, FOUND.width] = total, rows, width


def cover_rows(counts, price, steps, out):
    """Rectangles (first, end, width) that cover the first counts[i] columns of all rows i; returns how many there are.

    The sum of their areas is the least, with `price` added for each rectangle, if they end after whole steps of rows
    only, of which there are about `steps`. Rows without columns may be left out.
    """
    rows = len(counts)
    while rows and counts[rows - 1] == 0:
        rows -= 1
    step = max(1, rows // steps)
    size = -(-rows // step)
    widest, least, begin = np.zeros(size, np.int64), np.zeros(size + 1), np.zeros(size + 1, np.int64)
    for k in range(1, size + 1):
        least[k], end, width = np.inf, min(k * step, rows), 0
        for i in range((k - 1) * step, end):
            width = max(width, counts[i])
        widest[k - 1] = width
        for first in range(k - 1, -1, -1):
            width = max(width, widest[first])
            area = float(width * (end - first * step))
            if area >= least[k]:
                break
            cost = least[first] + (area + price if width else 0.0)
            if cost < least[k]:
                least[k], begin[k] = cost, first
    found, k = 0, size
    while k:
        out[found, 0], out[found, 1], out[found, 2] = begin[k] * step, min(k * step, rows), 0
        for first in range(begin[k], k):
            out[found, 2] = max(out[found, 2], widest[first])
        k = begin[k]
        if out[found, 2]:
            found += 1
    return found


def raise_norms(norms, densities, basis):
    """Raises norms[n][a, b] to |D_ab| of the n-th density, in several threads; `norms` may be one array many times."""
    shells = -(-NORM_ROWS * basis.nshell // basis.nao)

    def rows(n):
        ends = n * shells, min((n + 1) * shells, basis.nshell)
        for density, out in zip(densities, norms):
            norms_of_blocks()(density, basis.ao_loc, *ends, out)

    in_threads(-(-basis.nshell // shells), rows, densities.size)
    return norms


norms_of_blocks = once(lambda: Loop(block_norms, allocates=True))
norms_of_density = once(lambda: Loop(density_norms))
survivors = once(lambda: Loop(count_survivors))
covering = once(lambda: Loop(cover_rows, allocates=True))
