"""Digestion of blocks (ij, kl, a, b, c, d) into J and K: what both backends share, and the loops of the CPU.

Of the eight permutations of a unique shell quartet, four and two are summed,

    X_ad += (ab|cd) D_bc    X_bd += (ab|cd) D_ac    X_ac += (ab|cd) D_bd    X_bc += (ab|cd) D_ad
    Y_ab += (ab|cd) (D_cd + D_dc)                   Y_cd += (ab|cd) (D_ab + D_ba)

the others follow from transposition: J = Y + Y^T, and K[D] = X[D] + X[D^T]^T. A quartet counts half for each of
a, b one shell; c, d one shell; ab, cd one pair.
"""


HALF = 0.5


def digest_ranges(n_k, n_j):
    """(first, last) of the matrices of each digestion of blocks into n_k matrices X and n_j matrices Y.

    First those of which both are wanted, then the others' X or Y.
    """
    both, most = min(n_k, n_j), max(n_k, n_j)
    return tuple(ends for ends in ((0, both), (both, most)) if ends[0] < ends[1])


def digest_flags(n_k, n_j):
    """(exchange, coulomb) of each of `digest_ranges`."""
    return tuple((first < n_k, first < n_j) for first, _ in digest_ranges(n_k, n_j))


def quartet_weight(a, b, c, d, triangle, i, k):
    """Weight of a quartet by the first AOs of its shells; 0 for a ket pair k beyond bra pair i of the same list.

    Device function; `triangle` says that bra and ket are one list, i and k places in it.
    """
    weight = 1.0
    if a == b:
        weight *= HALF
    if c == d:
        weight *= HALF
    if triangle:
        if k > i:
            weight = 0.0
        elif k == i:
            weight *= HALF
    return weight


