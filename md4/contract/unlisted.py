"""What gradients lack because it is in no list: shell pairs, and primitive pairs of those that are in lists.

`md4.shells.shell_pairs.make_schwarz_estimate` gives an E of each primitive pair, from which a bound follows. With R =
|A - B|, mu = za zb/p, L = la + lb, n^2 = (2 l + 1)/(4 pi) of spherical functions and 1 of Cartesian ones, and the sum
over the functions of both shells,

    sum_ab |ab|^2 <= g^2,     g(r) = c n_a n_b exp(-mu R^2) (zb/p R + r)^la (za/p R + r)^lb exp(-p r^2)

at a distance r from P. As (d + r) exp(-p r^2/2L) <= d + (L/ep)^1/2, g is below exp(-p r^2/2) times its factors at r =
((L + 1)/p)^1/2, and

    (sum_ab (ab|ab))^1/2 <= (g|g)^1/2 <= 2 n_a n_b E <= 3 E         for l <= 8.

A derivative has 2 za r_A + (la (2 la + 1))^1/2 / r_A besides, because the squares of the gradients of solid harmonics
add up to l (2 l + 1) n^2 r^(2 l - 2). At the same r this is at most 2 mu R + 4 (p (L + 1))^1/2. By the triangle
inequality such bounds of primitive pairs add up, with a factor for the numbers of contracted functions.
"""

import numpy as np

from md4.shells.shell_pairs import log_cutoff, primitive_estimates

# Pairs whose primitive pairs are looked at together.
PAIRS = 1 << 11


@np.errstate(under="ignore")  # as of lists
def unlisted(basis, lists, cutoff):
    """Bounds of what no list has, shape (2, nshell, nshell), symmetric.

    Parameters
    ----------
    basis : md4.Basis
    lists : list of md4.contract.screening.PairList
    cutoff : float
        With which they were made.

    Returns
    -------
    ndarray
        Of (sum_ab (ab|ab))^1/2 of the sum of all primitive pairs of a and b that no list has, and of its derivatives.
    """
    n = basis.nshell
    found, listed = np.zeros((2, n, n)), np.zeros((n, n), dtype=bool)
    for this in lists:
        listed[tuple(this.pairs.pairs.T)] = True
    listed |= listed.T
    every = np.stack(np.tril_indices(n), axis=1)
    for pairs in np.array_split(every, 1 + len(every) // PAIRS):
        owner, ka, kb, distance2, estimate = primitive_estimates(basis, pairs)
        za, zb, (l, nctr) = basis.exponents[ka], basis.exponents[kb], basis.classes[pairs].T
        size = 3 * np.sqrt(nctr.prod(axis=0))[owner] * np.exp(estimate)
        missing = ~listed[tuple(pairs.T)][owner] | (estimate < log_cutoff(cutoff))
        p = za + zb
        derived = size * (2 * za * zb / p * np.sqrt(distance2) + 4 * np.sqrt(p * (l.sum(axis=0)[owner] + 1)))
        for values, out in zip((size, derived), found):
            sums = np.bincount(owner, missing * values, len(pairs))
            out[tuple(pairs.T)] = out[tuple(pairs.T[::-1])] = sums
    return found


def unlisted_bound(lists, bounds, missing, norms, coulomb, exchange):
    """What that could add to any component of a gradient at most, in Hartree/Bohr.

    Parameters
    ----------
    lists : list of md4.contract.screening.PairList
    bounds : list of md4.shells.schwarz.GradientBounds
        Those of each list.
    missing : ndarray
        By `unlisted`.
    norms, coulomb, exchange : ndarray, shapes (n, nshell, nshell), (n,) and (n,)
        `norms`: the `block_norms` of the densities.
    """
    whole, derived = np.zeros_like(missing)
    for this, of_pairs in zip(lists, bounds):
        places = tuple(this.pairs.pairs.T)
        whole[places], derived[places] = of_pairs.own, of_pairs.derivative
    pairs, derivatives = missing
    total = 0.0
    for d, j, k in zip(norms, abs(coulomb), abs(exchange)):
        for bra, ket in ((2 * derivatives, whole + pairs), (derived, pairs)):
            total += j * (d * bra).sum() * (d * ket).sum()
            if k:
                total += k * (bra * (d @ ket @ d)).sum()
    return float(total)
