"""Gradients of the energies of J and K by density fitting.

For E = 1/2 sum_s [ j_s rho_P (P|Q)^-1 rho_Q - k_s D_ac D_bd (ab|P) (P|Q)^-1 (Q|cd) ], a sum over symmetric matrices D
with rho_P = sum_ab D_ab (ab|P), the derivative of the inverse metric gives

    dE = sum Gamma3[ab, P] d(ab|P) + sum Gamma2[P, Q] d(P|Q)
    Gamma3[ab, P] = sum_s [ j_s D_ab c_P - k_s sum_oo' L_ao s_o C_oo',P s_o' L_bo' ]
    Gamma2[P, Q] = 1/2 sum_s [ - j_s c_P c_Q + k_s sum_oo' s_o C_oo',P C_oo',Q s_o' ]

with D = L s L^T (`md4.contract.exchange_factors`), c = (P|Q)^-1 rho, and C_oo',P = sum_Q (oo'|Q) (Q|P)^-1. As rows of B
are W (P|ij), c and C are W^T times what is made of the rows. Of tensors with an auxiliary index only C is kept as a
whole, half of it, since it is symmetric. Gamma3 is made for one block of auxiliary shells after the other.

Where W is of eigenvectors (`md4.contract.metric`), those that stay turn towards those that are left out as atoms move.
Of W^T W = sum_m v_m w_m^-1 v_m^T this makes, with m of those that stay and n of those that are left out,

    sum_mn [ v_m (v_m d(P|Q) v_n) v_n^T + its transpose ] / (w_m (w_m - w_n))

which the derivative of the inverse metric does not contain. PySCF leaves it out. Beside differences of energies, the
gradient of water is right with it to 3e-10 Hartree/Bohr; without it, it is wrong by 6e-9 with erf(0.33 r)/r and
def2-universal-JKFIT, and by 2e-7 with 1/r and an even-tempered basis of ratio 1.4.
"""

from typing import NamedTuple

import numpy as np

from md4.contract.density_fitting import DensityFitting
from md4.contract.exchange_factors import factors, half_transformed
from md4.contract.gradient import energy_terms
from md4.contract.screening import schwarz_bounds
from md4.contract.team import shared_devices
from md4.errors import MemoryLimitError
from md4.method.operators import check_order
from md4.support.display import size_text
from md4.support.locks import locked

# Of the memory that is left: what Gamma3 of a block of auxiliary shells may take, and the rows of B that are read at
# once where they are kept, and where they are made anew.
BLOCK_SHARE, ROWS_SHARE, MADE_SHARE = 0.3, 0.1, 0.3
# Bytes of the matrices over AOs that are made together.
SQUARE_BYTES = 64 << 20


class Bounded(NamedTuple):
    """A prepared list of pairs and its two Schwarz bounds; see `md4.contract.screening.PairList`."""

    prepared: object
    exact: np.ndarray
    bound: np.ndarray


class Fitted(NamedTuple):
    """c or C of one density.

    Attributes
    ----------
    density : ndarray, shape (nao, nao)
    coulomb, exchange : float
        j and k.
    factors : md4.contract.exchange_factors.Factors or None
        L and s, if there is exchange.
    c : ndarray, shape (naux,), or None
        If there is Coulomb.
    orbital : ndarray, shape (naux, n (n + 1) / 2), or None
        C_oo',P of o >= o'.
    """

    density: np.ndarray
    coulomb: float
    exchange: float
    factors: object
    c: np.ndarray | None
    orbital: np.ndarray | None


class FittingGradient:
    """The gradients of a `DensityFitting` on the CPU.

    Parameters
    ----------
    fitting : DensityFitting

    Raises
    ------
    UnsupportedError
        Shells whose derivatives are beyond the limit of r.
    """

    def __init__(self, fitting):
        self.fitting, self.three, self.algebra = fitting, fitting.three, fitting.algebra
        self.lock = fitting.lock
        one, other = self.three.basis.parts
        check_order(max(self.three.order, 2 * max(2 * one.lmax, other.lmax) + 1), 1)

    @locked
    def run(self, dm, coulomb, exchange, orbitals=None, response=True, tolerance=0.0, part=0, parts=1):
        """The gradient of the energy of J and K by the centres of all shells.

        Parameters
        ----------
        dm : array_like, shape (nao, nao) or (2, nao, nao)
            As for `md4.JK.gradient`, as are the factors of J and K.
        coulomb, exchange : float
        orbitals : list of (coefficients, occupations), optional
            As for `DensityFitting.get_jk`, one for each matrix.
        response : bool
            Whether the centres of auxiliary functions move.
        tolerance : float
            Terms with a bound below this (Hartree/Bohr) are left out.
        part, parts : int
            The terms are divided into so many parts.

        Returns
        -------
        of_basis, of_auxiliary : ndarray, shapes (nshell, 3)
            For the shells of `three.basis.parts`, in Hartree/Bohr.

        Raises
        ------
        ArgumentError
            Densities that cannot be used.
        MemoryLimitError
            The least workspace does not fit.
        """
        terms = energy_terms(dm, coulomb, exchange, self.fitting.nao)
        with self.three.engine.lock, self.algebra.working():
            fitted, turned = self.fitted(terms, orbitals_of(terms, orbitals), response)
            backend = self.three.engine.backend
            backend.compile_ahead("fitting", self.three.basis, None)
            forces = self.host_forces()
            for block in range(len(forces.blocks)):
                first, last = forces.rows[forces.edges[block : block + 2]].tolist()
                gamma = self.gamma_of_three(fitted, self.three.auxiliary_order[first:last])
                forces.add_three(backend, block, gamma, tolerance, response, part, parts)
                del gamma
            if response:
                forces.add_two(backend, self.gamma_of_two(fitted, turned), tolerance, part, parts)
            found, count = forces.result(), len(self.three.basis.parts[0])
        return found[:count], found[count : self.three.basis.unit]

    def host_forces(self):
        """The lists of pairs and of single shells with their bounds, single shells in blocks."""
        three = self.three
        engine, singles = three.engine.with_operator("coulomb"), self.pieces()
        every = [*three.pairs, *(piece for block in singles for piece in block)]
        prepared, bounds = engine.prepare_lists(every, three.basis), schwarz_bounds(engine, every)
        lists = [Bounded(this, *both) for this, both in zip(prepared, bounds)]
        rest = iter(lists[len(three.pairs) :])
        blocks = [[next(rest) for _ in block] for block in singles]
        return engine.backend.sums.fitting_forces(three.basis, lists[: len(three.pairs)], blocks)

    def pieces(self):
        """Lists of single shells, in blocks for which Gamma3 fits into memory, in the order of the rows of `three`."""
        three, left = self.three, self.algebra.memory_left()
        row, sizes = 8 * (2 * three.ncol + self.fitting.nao**2), np.diff(three.basis.ao_loc)
        most, blocks, used = max(1, int(BLOCK_SHARE * left) // row), [[]], 0
        widest = int(sizes[len(three.basis.parts[0]) : three.basis.unit].max())
        if widest * row > left:
            raise MemoryLimitError(
                f"the gradient of density fitting needs {size_text(widest * row)} for one auxiliary shell, but "
                f"{size_text(left)} may be used; raise max_memory."
            )
        for shells in three.single:
            size, begin = int(sizes[shells[0, 0]]), 0
            while begin < len(shells):
                if used and used + size > most:
                    blocks.append([])
                    used = 0
                end = min(len(shells), begin + max(1, (most - used) // size))
                blocks[-1].append(shells[begin:end])
                used, begin = used + (end - begin) * size, end
        return blocks

    # c and C

    def fitted(self, terms, orbitals, response):
        """`Fitted` of each of some `Terms`, and what `turned` returns, None if nothing turns or nothing moves."""
        fitting, algebra, found = self.fitting, self.algebra, []
        for density, exchange, of_it in zip(terms.densities, terms.exchange, orbitals):
            found.append(factors(density, algebra, of_it, abs(density).max()) if exchange else None)
        size, naux = fitting.size, self.three.naux
        tri = [0 if f is None else f.rank * (f.rank + 1) // 2 for f in found]
        need, left = 8 * 2 * naux * (len(tri) + sum(tri)), algebra.memory_left()
        if need > left:
            raise MemoryLimitError(
                f"the gradient of density fitting needs {size_text(need)} for {naux} auxiliary functions and all pairs "
                f"of occupied orbitals, but {size_text(left)} may be used; raise max_memory."
            )
        others = fitting.left_out() if response and size < naux else None
        parts = [(0, None)] if others is None else [(0, None), (size, others)]
        rho, of_pairs = np.zeros((naux, len(tri))), [algebra.empty((naux, count)) for count in tri]
        for begin, columns in parts:
            for first, rows in self.rows(columns):
                self.add_rows(terms, found, begin + first, rows, rho, of_pairs)
        turned = None if others is None else self.turned(terms, found, rho, of_pairs, others.metric)
        c = np.ascontiguousarray(fitting.metric.apply_transposed(rho[:size]).T)
        made = []
        for n, (density, coulomb, exchange) in enumerate(zip(*terms)):
            orbital = None
            if found[n] is not None:
                orbital, of_pairs[n] = fitting.metric.apply_transposed(of_pairs[n][:size]), None
            made.append(Fitted(density, coulomb, exchange, found[n], c[n] if coulomb else None, orbital))
        return made, turned

    def rows(self, columns=None):
        """Yields (number of the first one, rows of B, or of `columns`, as matrices, shape (n, nao, nao))."""
        nao, left = self.fitting.nao, self.algebra.memory_left()
        size = self.fitting.size if columns is None else columns.metric.size
        share = MADE_SHARE if columns is not None or self.fitting.rows_are_made else ROWS_SHARE
        most = max(1, int(share * left) // (4 * nao * (nao + 1)))
        step = max(1, min(SQUARE_BYTES, int(ROWS_SHARE * left)) // (8 * nao**2))
        dense = self.algebra.empty((min(step, size), nao, nao))
        for first in range(0, size, most):
            rows = self.fitting.rows(first, min(first + most, size), columns)
            for start in range(0, len(rows), step):
                some = rows[start : start + step]
                yield first + start, self.algebra.gather(some, places_in_triangle(nao), dense[: len(some)])

    def add_rows(self, terms, found, first, rows, rho, of_pairs):
        """Writes what is made of rows from `first` on into rho, shape (naux, n), and into (oo'|Q), o >= o'."""
        algebra, last, nao = self.algebra, first + len(rows), self.fitting.nao
        flat = rows.reshape(len(rows), -1)
        for n, (density, coulomb, f) in enumerate(zip(terms.densities, terms.coulomb, found)):
            if coulomb:
                rho[first:last, n] = algebra.add_times(flat, density.reshape(-1), np.zeros(len(rows)))
            if f is not None:
                half = half_transformed(algebra, rows, f.left, np.empty(f.rank * len(rows) * nao))
                both = algebra.product(half, f.left, np.empty((len(half), f.rank))).reshape(f.rank, -1, f.rank)
                left, right = np.tril_indices(f.rank)
                of_pairs[n][first:last] = both[left, :, right].T

    def turned(self, terms, found, rho, of_pairs, others):
        """The part of Gamma2 by which eigenvectors turn, shape (naux, naux).

        `rho` and `of_pairs` have rows of B, and after them those of the `LeftOut` eigenvectors `others`.
        """
        algebra, size = self.algebra, self.fitting.size
        between = algebra.empty((size, others.size))
        between[...] = 0.0
        for n, (coulomb, exchange) in enumerate(zip(terms.coulomb, terms.exchange)):
            between += coulomb * np.outer(rho[:size, n], rho[size:, n])
            if found[n] is not None:
                algebra.product(
                    of_pairs[n][:size] * pair_weights(found[n]), of_pairs[n][size:].T, between, -exchange, add=True
                )
        between /= others.values[-size:, None] - others.values[:-size]
        part = self.fitting.metric.apply_transposed(between)
        made = algebra.product(part, others.vectors, algebra.empty((self.three.naux,) * 2))
        return (made + made.T) / 2

    # Gamma

    def gamma_of_three(self, fitted, functions):
        """f_ab Gamma3 of some auxiliary functions, shape (n, ncol)."""
        three, algebra, nao = self.three, self.algebra, self.fitting.nao
        gamma = algebra.empty((len(functions), three.ncol))
        gamma[...] = 0.0
        step = max(1, SQUARE_BYTES // (8 * nao**2))
        for this in fitted:
            if this.c is not None:
                row = this.density[three.rows, three.cols]
                gamma += (this.coulomb * this.c[functions])[:, None] * row
            for first in range(0, len(functions) if this.orbital is not None else 0, step):
                some = functions[first : first + step]
                squares = self.squares(this, some).reshape(len(some), -1)
                gamma[first : first + step] -= this.exchange * algebra.gather(
                    squares, self.fitting.columns_of, np.empty((len(some), three.ncol))
                )
        gamma *= three.weights
        return gamma

    def squares(self, this, functions):
        """sum_oo' L_ao s_o C_oo',P s_o' L_bo' of some P, shape (n, nao, nao)."""
        algebra, rank, nao, n = self.algebra, this.factors.rank, self.fitting.nao, len(functions)
        vectors = this.factors.left * signs(this.factors)
        dense = algebra.gather(this.orbital[functions], places_in_triangle(rank), np.empty((n, rank, rank)))
        half = algebra.product(dense.reshape(n * rank, rank), vectors.T, np.empty((n * rank, nao)))
        turned = np.ascontiguousarray(half.reshape(n, rank, nao).transpose(0, 2, 1)).reshape(n * nao, rank)
        return algebra.product(turned, vectors.T, np.empty((n * nao, nao))).reshape(n, nao, nao)

    def gamma_of_two(self, fitted, turned):
        """Gamma2 in the order of the rows of `three`, shape (naux, naux)."""
        naux, order = self.three.naux, self.three.auxiliary_order
        gamma = self.algebra.empty((naux, naux))
        gamma[...] = 0.0 if turned is None else turned
        for this in fitted:
            if this.c is not None:
                gamma -= 0.5 * this.coulomb * np.outer(this.c, this.c)
            if this.orbital is not None:
                weighted = this.orbital * pair_weights(this.factors)
                self.algebra.product(weighted, this.orbital.T, gamma, 0.5 * this.exchange, add=True)
        return np.ascontiguousarray(gamma[np.ix_(order, order)])


def signs(f):
    """s_o of `Factors`."""
    return np.where(np.arange(f.rank) < f.negative, -1.0, 1.0)


def pair_weights(f):
    """s_o s_o' of o >= o' of `Factors`, twice where these differ."""
    left, right = np.tril_indices(f.rank)
    return signs(f)[left] * signs(f)[right] * np.where(left == right, 1.0, 2.0)


def places_in_triangle(n):
    """Where each element of a symmetric matrix is in its lower triangle, shape (n, n)."""
    i, j = np.indices((n, n))
    return np.maximum(i, j) * (np.maximum(i, j) + 1) // 2 + np.minimum(i, j)


def orbitals_of(terms, orbitals):
    """Orbitals of each of the `Terms` of the energy of one density or of two; the sum of two has none."""
    count = len(terms.densities)
    if orbitals is None or len(orbitals) > count:
        return [None] * count
    return [*[None] * (count - len(orbitals)), *orbitals]


def on_host(fitting, ranks, max_memory, cutoff):
    """`fitting`, or if it is not a `DensityFitting` on the CPU, one that is, without a table; collective.

    `max_memory` and `cutoff` are those of `fitting`; the cap of a GPU is none of the host.
    """
    on_cpu = fitting.engine.backend.name == "cpu"
    if on_cpu and type(fitting) is DensityFitting:
        return fitting
    _, cap = shared_devices("cpu", None, max_memory if on_cpu else None, None, ranks)
    bases, operator = fitting.three.basis.parts, fitting.engine.operator
    return DensityFitting(*bases, operator, "cpu", max_memory=cap, store="direct", cutoff=cutoff)
