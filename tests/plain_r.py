"""r by the plain recurrence, for any kind of numbers."""

from md4.method.angular import nherm
from md4.method.recurrence import recurrence_table


def step(indices, rule, centre, old):
    """r[t]^(m) from the list of r^(m+1) by the two words of `recurrence_table`."""
    return (rule >> 8) * old[indices >> 16] + centre[rule & 255] * old[indices & 65535]


def plain_r(l, zeros, centre):
    """r[t]^(0) from the list [0]^(m), m = 0..l; `centre` is (R_z, R_y, R_x)."""
    words = recurrence_table(l).tolist()
    old = [zeros[l]]
    for m in range(l - 1, -1, -1):
        old = [zeros[m]] + [step(*words[t], centre, old) for t in range(1, nherm(l - m))]
    return old
