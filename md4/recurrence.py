"""1-index Hermite integrals r[t]^(m) from [0]^(m).

    r[t]^(m) = (t_i - 1) r[t - 2e_i]^(m+1) + R_i r[t - e_i]^(m+1),     R = P - Q  (Eq. 15 of the paper)

for m falling from L to 0; step m makes the triples of degree 1 to L - m. Any axis i with t_i > 0 will do.
"""

from functools import cache

import numpy as np

from md4.angular import hermite_ordinal, hermite_triples


@cache
def recurrence_table(l):
    """Shape (nherm(l), 2), int32: what `r_step` needs for each triple t.

    Word 0: idx(t - e_i) + 2^16 idx(t - 2e_i); word 1: axis i + 2^8 (t_i - 1).
    """
    words = np.zeros((len(hermite_triples(l)), 2), dtype=np.int32)
    for n, t in enumerate(hermite_triples(l).tolist()):
        if n == 0:
            continue
        axis = max(i for i in range(3) if t[i] > 0)
        one, two = list(t), list(t)
        one[axis] -= 1
        two[axis] -= 2
        second = hermite_ordinal(*two) if t[axis] > 1 else 0
        words[n] = hermite_ordinal(*one) + (second << 16), axis + ((t[axis] - 1) << 8)
    return words


def r_step(indices, rule, rx, ry, rz, old, base):
    """r[t]^(m) from r^(m+1) in old[base:] by the two words of `recurrence_table` (device function)."""
    axis = rule & 255
    r = rx if axis == 0 else (ry if axis == 1 else rz)
    return (rule >> 8) * old[base + (indices >> 16)] + r * old[base + (indices & 65535)]
