"""libcint through PySCF, on one core: the oracle of each run, and the time to compare with; LibintX's own figures."""

from time import perf_counter

import numpy as np

# Shell quartets per second on an H200, measured with LibintX's own md4 perf program (a89e526, CUDA 13.0, sm_90).
LIBINTX = {
    1: {
        "ss|ss": 6.82e9, "pp|pp": 4.56e8, "dd|dd": 3.19e7, "ff|ff": 3.08e6, "gg|gg": 6.58e5, "hh|hh": 2.00e5,
        "ii|ii": 7.20e4, "ps|ps": 2.91e9, "ds|ds": 1.21e9, "fs|fs": 2.65e8, "gs|gs": 1.29e8, "hs|hs": 5.03e7,
        "is|is": 2.35e7, "pp|ss": 1.09e9, "dd|ss": 2.38e8, "ff|ss": 4.83e7, "gg|ss": 8.34e7, "hh|ss": 4.54e7,
        "ii|ss": 2.87e7,
    },
    5: {
        "ss|ss": 6.13e9, "pp|pp": 4.32e8, "dd|dd": 2.33e7, "ff|ff": 7.88e5, "gg|gg": 1.66e5, "hh|hh": 5.38e4,
        "ii|ii": 1.69e4,
    },
    25: {
        "ss|ss": 2.40e9, "pp|pp": 1.34e8, "dd|dd": 4.81e6, "ff|ff": 1.58e5, "gg|gg": 3.41e4, "hh|hh": 1.09e4,
        "ii|ii": 3.43e3,
    },
}  # fmt: skip


def libintx_rate(case, device):
    """LibintX's quartets per second for a case on this device, or None."""
    return LIBINTX.get(case.k, {}).get(case.name) if "H200" in device else None


class Libcint:
    """int2e_sph over the shells of several bases, numbered one basis after the other."""

    def __init__(self, *bases):
        from pyscf.gto import moleintor

        self.getints = moleintor.getints4c
        shells = [s for basis in bases for s in basis.shells]
        self.first = np.cumsum([0, *(len(b) for b in bases)])
        env, self.atm, self.bas = [0.0] * 20, [], []
        for n, s in enumerate(shells):
            centre, exponents = len(env), len(env) + 3
            env += [*s.centre, *s.exponents, *s.coefficients.T.ravel()]
            self.atm.append([0, centre, 1, 0, 0, 0])
            self.bas.append([n, s.l, s.nprim, s.nctr, 0, exponents, exponents + s.nprim, 0])
        self.atm, self.bas = np.array(self.atm, np.int32), np.array(self.bas, np.int32)
        self.env = np.array(env)
        self.opt = moleintor.make_cintopt(self.atm, self.bas, self.env, "int2e_sph")

    def block(self, ranges):
        """(ab|cd) of four ranges of shells (first, last), on one thread."""
        from pyscf import lib

        piece = tuple(int(n) for r in ranges for n in r)
        with lib.with_omp_threads(1):
            return self.getints("int2e_sph", self.atm, self.bas, self.env, shls_slice=piece, cintopt=self.opt)

    def shells(self, basis, pair):
        """A pair of shells of the first (0) or second (1) basis by their numbers here."""
        return self.first[basis] + np.asarray(pair)

    def quartet(self, bra, ket):
        """Integrals of one shell quartet."""
        return self.block([(n, n + 1) for n in (*bra, *ket)])


def libcint_seconds(sample, budget=0.2):
    """libcint's time for one quartet on one core: blocks of quartets that grow until one takes about `budget`."""
    libcint = Libcint(sample.bra_basis, sample.ket_basis)
    starts, room = [], []
    for first, basis in zip(libcint.first, (sample.bra_basis, sample.ket_basis)):
        # the two kinds of shells of a side, see `cases.side`: the pairs run over their product
        pairs = sample.bra_pairs if basis is sample.bra_basis else sample.ket_pairs
        na = int(pairs[:, 1].min())
        starts += [first, first + na]
        room += [na, len(basis) - na]
    count = [1, 1, 1, 1]
    seconds = timed_block(libcint, starts, count)
    while seconds < budget / 4 and any(c < min(r, 16) for c, r in zip(count, room)):
        grown = min((n for n in range(4) if count[n] < min(room[n], 16)), key=lambda n: count[n])
        count[grown] = min(2 * count[grown], room[grown], 16)
        seconds = timed_block(libcint, starts, count)
    return min(seconds, *(timed_block(libcint, starts, count) for _ in range(2))) / np.prod(count)


def timed_block(libcint, starts, count):
    """Seconds of one block."""
    begin = perf_counter()
    libcint.block([(s, s + c) for s, c in zip(starts, count)])
    return perf_counter() - begin
