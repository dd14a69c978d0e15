"""Digestion of blocks (ij, kl, a, b, c, d) into J and K: what both backends share.

Of the eight permutations of a unique shell quartet, four are summed to X and two to Y,

    X_ad += (ab|cd) D_bc    X_bd += (ab|cd) D_ac    X_ac += (ab|cd) D_bd    X_bc += (ab|cd) D_ad
    Y_ab += (ab|cd) (D_cd + D_dc)                   Y_cd += (ab|cd) (D_ab + D_ba)

and the others follow by transposition: J = Y + Y^T, and K[D] = X[D] + X[D^T]^T. A quartet has the weight 1, times 1/2
for each of these that is true: a and b are the same shell, c and d are the same shell, ab and cd are the same pair.
"""

HALF = 0.5


def digest_ranges(n_k, n_j):
    """Ranges (first, last) of the densities that are digested together, into n_k matrices X and n_j matrices Y.

    Densities that need both J and K come first. The second range, if any, needs one of them.
    """
    both, most = min(n_k, n_j), max(n_k, n_j)
    return tuple(ends for ends in ((0, both), (both, most)) if ends[0] < ends[1])


def digest_flags(n_k, n_j):
    """Whether each of `digest_ranges` needs X (for K) and Y (for J): tuples (with_k, with_j)."""
    return tuple((first < n_k, first < n_j) for first, _ in digest_ranges(n_k, n_j))


def quartet_weight(a, b, c, d, triangle, i, k):
    """Weight of a quartet, whose shells are given by their first AOs (device function).

    If `triangle` is true, bra and ket are the same list, and i and k are the places of the pairs in it. Then the weight
    is 0 for k > i, because each unordered quartet counts once.
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


