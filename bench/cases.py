"""What is measured: classes of shell quartets with contraction, synthetic shells for them, and batch sizes.

K is the number of primitive quartets of a quartet, K = K_bra K_ket. A pair of K_side primitive pairs is one
K_side-fold contracted shell (the first of the pair) with a 1-fold one:

    K = 1    1 x 1        K = 5    5 x 1 (the bra is contracted)        K = 25    5 x 5

Other splits are written out, as '1x5' or '10x10'.
"""

import itertools
from dataclasses import dataclass

import numpy as np

import md4
from md4.method.angular import nherm
from md4.support.display import SPDF

SPLITS = {"1": (1, 1), "5": (5, 1), "25": (5, 5)}
MIXED = ["gs|dp", "fd|pp", "ds|ps", "hs|dd", "if|ds", "gd|fp", "hp|hp", "ig|ds", "dp|dp", "fd|fd", "gf|gf", "hg|hg"]


def table_classes():
    """All (ll|ll), (ll|ss) and (ls|ls), l = 0..6, and twelve mixed classes."""
    letters = SPDF[:7]
    names = [f"{x}{x}|{x}{x}" for x in letters] + [f"{x}{x}|ss" for x in letters] + [f"{x}s|{x}s" for x in letters]
    return list(dict.fromkeys(names + MIXED))


@dataclass(frozen=True)
class Case:
    """A class of quartets with its contraction.

    Attributes
    ----------
    l : tuple of int, length 4
        Angular momenta of a, b, c, d.
    k_bra, k_ket : int
        Primitive pairs of each bra and ket pair.
    """

    l: tuple
    k_bra: int = 1
    k_ket: int = 1

    @classmethod
    def parse(cls, name, k="1"):
        """From 'dd|dd' (parentheses allowed) and '1', '5', '25' or 'BRAxKET'."""
        letters = name.strip("() ").replace("|", "")
        if len(letters) != 4 or any(x not in SPDF for x in letters):
            raise SystemExit(f"{name!r} is no class of quartets; write it as dd|dd or gs|dp.")
        split = SPLITS.get(k) or tuple(int(n) for n in k.split("x"))
        if len(split) != 2:
            raise SystemExit(f"K = {k!r} is unknown; use {', '.join(SPLITS)} or BRAxKET, as in 1x5.")
        return cls(tuple(SPDF.index(x) for x in letters), *split)

    @property
    def name(self):
        a, b, c, d = (SPDF[l] for l in self.l)
        return f"{a}{b}|{c}{d}"

    @property
    def k(self):
        return self.k_bra * self.k_ket

    @property
    def nab(self):
        return (2 * self.l[0] + 1) * (2 * self.l[1] + 1)

    @property
    def ncd(self):
        return (2 * self.l[2] + 1) * (2 * self.l[3] + 1)

    @property
    def np(self):
        return nherm(self.l[0] + self.l[1])

    @property
    def nq(self):
        return nherm(self.l[2] + self.l[3])

    @property
    def output_bytes(self):
        """Bytes of one quartet's integrals."""
        return 8 * self.nab * self.ncd

    def orders(self):
        """FLOP of (transform 1, transform 2) a quartet, bra transformed first and ket transformed first.

        T1 = 2 Nab Np Nq K_bra K_ket and T2 = 2 Nab Nq Ncd K_ket for the bra first.
        """
        both = 2 * self.np * self.nq * self.k
        bra_first = self.nab * both, 2 * self.nab * self.nq * self.ncd * self.k_ket
        ket_first = self.ncd * both, 2 * self.ncd * self.np * self.nab * self.k_bra
        return bra_first, ket_first

    @property
    def flops(self):
        """Useful FLOP a quartet: both transforms in the cheaper order."""
        return min(map(sum, self.orders()))

    def r_bytes(self):
        """Bytes of r a quartet, all its primitive quartets together."""
        return 8 * self.k * nherm(sum(self.l))


def side(rng, la, lb, k, npair):
    """(Basis, pairs): about sqrt(npair) shells of la, k-fold contracted, and as many 1-fold ones of lb."""
    nb = int(np.ceil(np.sqrt(npair)))
    na = -(-npair // nb)
    l = [la] * na + [lb] * nb
    degree = [k] * na + [1] * nb
    basis = md4.Basis.from_arrays(
        l,
        [rng.uniform(0.3, 3.0, n) for n in degree],
        [rng.uniform(0.2, 1.0, n) for n in degree],
        rng.uniform(-1.0, 1.0, (na + nb, 3)),
    )
    pairs = np.array(list(itertools.product(range(na), range(na, na + nb))))[:npair]
    return basis, pairs


@dataclass(frozen=True)
class Sample:
    """Random shells of a case: a basis and a pair list for either side."""

    case: Case
    bra_basis: md4.Basis
    bra_pairs: np.ndarray
    ket_basis: md4.Basis
    ket_pairs: np.ndarray

    @classmethod
    def make(cls, case, nbra, nket, seed=0):
        rng = np.random.default_rng([seed, *case.l, case.k_bra, case.k_ket, nbra, nket])
        la, lb, lc, ld = case.l
        return cls(case, *side(rng, la, lb, case.k_bra, nbra), *side(rng, lc, ld, case.k_ket, nket))

    @property
    def quartets(self):
        return len(self.bra_pairs) * len(self.ket_pairs)

    @property
    def shape(self):
        """Shape of the result."""
        return (len(self.bra_pairs), len(self.ket_pairs), *(2 * l + 1 for l in self.case.l))


# What a batch may cost, by rough rates of each backend: seconds a primitive quartet, FLOP/s, bytes/s; and what it may
# take: seconds, output bytes.
ROUGH = {"cuda": (1e-10, 1.5e13, 1.5e12, 0.12, 4e9), "cpu": (2e-7, 1e10, 1e9, 0.2, 2.5e8)}


def batch(case, backend, seconds=None):
    """Pairs on either side for a batch that fills the machine: bounded by output bytes and by estimated time."""
    primitive, rate, bandwidth, usual, size = ROUGH[backend]
    seconds = usual if seconds is None else seconds
    estimate = case.k * primitive + case.flops / rate + (case.output_bytes + 2 * case.r_bytes()) / bandwidth
    quartets = min(size / case.output_bytes, seconds / estimate)
    return max(4, int(np.sqrt(quartets)))


def libintx_batch(case):
    """Pairs on either side in LibintX's protocol: a block of about 6000 x 6000 AO pairs."""
    return max(1, 6000 // case.nab), max(1, 6000 // case.ncd)
