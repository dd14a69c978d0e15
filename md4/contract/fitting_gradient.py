"""Gradients of the energies of J and K by density fitting.

For E = 1/2 sum_s [ j_s rho_P (P|Q)^-1 rho_Q - k_s D_ac D_bd (ab|P) (P|Q)^-1 (Q|cd) ], a sum over symmetric matrices D
with rho_P = sum_ab D_ab (ab|P), the derivative of the inverse metric gives

    dE = sum Gamma3[ab, P] d(ab|P) + sum Gamma2[P, Q] d(P|Q)
    Gamma3[ab, P] = sum_s [ j_s D_ab c_P - k_s sum_oo' L_ao s_o C_oo',P s_o' L_bo' ]
    Gamma2[P, Q] = 1/2 sum_s [ - j_s c_P c_Q + k_s sum_oo' s_o C_oo',P C_oo',Q s_o' ]

with D = L s L^T (`md4.contract.exchange_factors`), c = (P|Q)^-1 rho, and C_oo',P = sum_Q (oo'|Q) (Q|P)^-1. As rows of B
are W (P|ij), c and C are W^T times what is made of the rows. Of tensors with an auxiliary index only C is kept as a
whole, half of it, since it is symmetric. Gamma3 is made for one block of auxiliary shells after the other.
`md4.contract.fitting_force_team` divides the work among several devices.

Where W is of eigenvectors (`md4.contract.metric`), those that stay turn towards those that are left out as atoms move.
Of W^T W = sum_m v_m w_m^-1 v_m^T this makes, with m of those that stay and n of those that are left out,

    sum_mn [ v_m (v_m d(P|Q) v_n) v_n^T + its transpose ] / (w_m (w_m - w_n))

which the derivative of the inverse metric does not contain. PySCF leaves it out. Beside differences of energies, the
gradient of water is right with it to 3e-10 Hartree/Bohr; without it, it is wrong by 6e-9 with erf(0.33 r)/r and
def2-universal-JKFIT, and by 2e-7 with 1/r and an even-tempered basis of ratio 1.4.
"""

from typing import Any, NamedTuple

import numpy as np

from md4.contract.exchange_factors import factors
from md4.contract.fitting_lists import forces_of, rehearse
from md4.contract.fitting_orbitals import transform
from md4.contract.fitting_stores import Columns, block_rows, zeros
from md4.contract.gradient import energy_terms
from md4.contract.metric import LeftOut
from md4.contract.three_centre import aos_of
from md4.method.operators import check_order
from md4.support.locks import locked

# Of the memory that is left: what Gamma3 of a block of auxiliary shells may take.
BLOCK_SHARE = 0.3
# Columns of Gamma3 that a product makes, in the rows on and below the diagonal.
SQUARE_COLUMNS = 256


class Fitted(NamedTuple):
    """c or C of one density, on the device.

    Attributes
    ----------
    density : array, shape (nao, nao)
    coulomb, exchange : float
        j and k.
    factors : md4.contract.exchange_factors.Factors or None
        L and s, if there is exchange.
    c : array, shape (naux,), or None
        If there is Coulomb.
    orbital : array, shape (naux, n (n + 1) / 2), or None
        C_oo',P of o >= o'.
    """

    density: Any
    coulomb: float
    exchange: float
    factors: Any
    c: Any
    orbital: Any


class FittingGradient:
    """The gradients of a `DensityFitting`.

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
        self.lock, self.metric, self.size = fitting.lock, fitting.metric, fitting.size
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
        if not self.three.ncol:  # the cutoff leaves out all pairs
            return self.nothing()
        with self.fitting.working():
            self.compile_ahead(response)
            fitted, two = self.fitted(terms, orbitals_of(terms, orbitals), response)
            return self.forces(fitted, two, tolerance, part, parts)

    def nothing(self):
        """What `run` returns where no pairs are left."""
        return tuple(np.zeros((len(part), 3)) for part in self.three.basis.parts)

    def forces(self, fitted, two, tolerance, part, parts):
        """The forces of a part: Gamma3 of some auxiliary shells, and some rows of Gamma2, if it is not None."""
        three, backend = self.three, self.three.engine.backend
        blocks, own = self.pieces(part, parts)
        forces = forces_of(three, three.engine, blocks)
        order = aos_of(three.basis, [three.single[n][some, :1] for block in blocks for n, some in block])[0] - three.nao
        for block in own:
            first, last = forces.rows[forces.edges[block : block + 2]].tolist()
            gamma = self.gamma_of_three(fitted, order[first:last])
            forces.add_three(backend, block, gamma, tolerance, two is not None)
            del gamma
        if two is not None:
            order = self.algebra.send(order)
            forces.add_two(backend, self.algebra.xp.ascontiguousarray(two[order][:, order]), tolerance, part, parts)
        found, count = forces.result(), len(three.basis.parts[0])
        return found[:count], found[count : three.basis.unit]

    def compile_ahead(self, response):
        """Compiles what is missing for the forces."""
        backend = self.three.engine.backend
        part = None if response else "one centre"
        backend.compile_ahead("fitting", self.three.basis, lambda dry: rehearse(self.three, dry, response), part=part)

    def pieces(self, part=0, parts=1):
        """All single shells in blocks of (number of the list, slice), and the numbers of the blocks of a part.

        Gamma3 of each of these fits into memory. All have the shells of the first part first, and so on.
        """
        three, left = self.three, self.algebra.memory_left()
        row, sizes = 8 * 2 * three.ncol, np.diff(three.basis.ao_loc)
        most, blocks, own = max(1, int(BLOCK_SHARE * left) // row), [], range(0)
        widest = int(sizes[len(three.basis.parts[0]) : three.basis.unit].max())
        # as `add_exchange` at most for a function, and rows of D
        need = widest * row + 8 * ((2 * self.fitting.nao + 8) ** 2 + 3 * three.ncol)
        self.algebra.check_fits(need, "the gradient of density fitting with one auxiliary shell at a time needs")
        for this in range(parts):
            before, used = len(blocks), most
            for n, shells in enumerate(three.single):
                turn, size = (this + n) % parts, int(sizes[shells[0, 0]])
                begin, last = (len(shells) * edge // parts for edge in (turn, turn + 1))
                while begin < last:
                    if len(blocks) == before or (this == part and used + size > most):
                        blocks.append([])
                        used = 0
                    end = min(last, begin + max(1, (most - used) // size)) if this == part else last
                    blocks[-1].append((n, slice(begin, end)))
                    used, begin = used + (end - begin) * size, end
            own = range(before, len(blocks)) if this == part else own
        return blocks, own

    # c and C

    def fitted(self, terms, orbitals, response):
        """`Fitted` of each of some `Terms`, and Gamma2, None if auxiliary functions do not move."""
        algebra, densities = self.algebra, self.algebra.send(np.ascontiguousarray(terms.densities))
        found, size, naux = self.factors(terms, densities, orbitals), self.size, self.three.naux
        tri = self.numbers_of_pairs([0 if f is None else f.rank for f in found])
        others = self.left_out() if response and size < naux else None
        rho, of_pairs = zeros(algebra, (naux, len(tri))), [algebra.empty((naux, count)) for count in tri]
        for first, last, columns in [(0, size, None), *([] if others is None else [(size, naux, others)])]:
            if any(terms.coulomb):
                rho[first:last] = self.coulomb_sums(densities, columns)
            sides = [None if f is None else algebra.fetch(f.left) for f in found]
            self.add_orbital_pairs(sides, [this[first:last] for this in of_pairs], columns)
        turned = None if others is None else self.turned(terms, found, rho, of_pairs, others.metric)
        c = algebra.xp.ascontiguousarray(self.metric.apply_transposed(rho[:size]).T)
        made = []
        for n, (coulomb, exchange) in enumerate(zip(terms.coulomb.tolist(), terms.exchange.tolist())):
            orbital = None
            if found[n] is not None:
                orbital, of_pairs[n] = self.metric.apply_transposed(of_pairs[n][:size]), None
            made.append(Fitted(densities[n], coulomb, exchange, found[n], c[n] if coulomb else None, orbital))
        return made, self.gamma_of_two(made, turned) if response else None

    def factors(self, terms, densities, orbitals):
        """`Factors` of the densities with exchange, None for the others."""
        every = zip(densities, terms.densities, terms.exchange, orbitals)
        return [factors(one, self.algebra, of_it, abs(given).max()) if k else None for one, given, k, of_it in every]

    def numbers_of_pairs(self, counts, copies=2):
        """n (n + 1) / 2 of each number of orbitals; MemoryLimitError if that times naux does not fit so many times."""
        naux, tri = self.three.naux, [n * (n + 1) // 2 for n in counts]
        what = f"the gradient of density fitting with {naux} auxiliary functions and all pairs of occupied orbitals"
        self.algebra.check_fits(8 * copies * naux * (len(tri) + sum(tri)), f"{what} needs")
        return tri

    def left_out(self):
        """`Columns` of a `LeftOut`: the eigenvectors that `metric` leaves out, which are made anew, times (P|ij)."""
        return Columns(self.three, LeftOut(self.fitting.sorted_metric(), self.metric), self.algebra)

    def coulomb_sums(self, densities, columns, *ranges):
        """rho_Q of all rows of B, or of `columns` in place of B, shape (n, number of densities).

        Without a table the sums may go over some ranges of columns only.
        """
        fitting, algebra = self.fitting, self.algebra
        of_columns = algebra.xp.ascontiguousarray(densities.reshape(len(densities), -1)[:, fitting.columns_of])
        of_columns *= fitting.weights
        ncol = of_columns.shape[1]
        if columns is None and fitting.table is not None:
            rho = algebra.empty((fitting.size, len(densities)))
            most = block_rows(algebra, 8 * (1 + fitting.table.copies))
            for first, rows in fitting.table.blocks(0, fitting.size, most):
                algebra.product(rows[:, :ncol], of_columns.T, rho[first : first + len(rows)])
            return rho
        columns = columns or fitting.columns
        rho = zeros(algebra, (self.three.naux, len(densities)))
        for first, last, chunk in columns.chunks(*ranges):
            algebra.product(chunk, of_columns[:, first:last].T, rho, add=True)
        return columns.metric.apply(rho)

    def add_orbital_pairs(self, sides, out, columns, own=slice(None)):
        """Writes (oo'|Q), o >= o', of all rows of B, or of `columns`, for each L on the host that is not None.

        `own`: the orbitals o for which that is done.
        """
        algebra, numbers = self.algebra, [n for n, left in enumerate(sides) if left is not None and left.shape[1]]

        def take(number, rows, some, _, block):
            of_rows, count = out[numbers[number]][rows], sides[numbers[number]].shape[1]
            chosen = np.arange(count)[own][some]
            i, j = np.nonzero(np.arange(count) <= chosen[:, None])
            if len(i) == of_rows.shape[1]:
                table = algebra.xp.ascontiguousarray(block.transpose(1, 0, 2)).reshape(len(of_rows), -1)
                algebra.gather(table, algebra.send(i * count + j), of_rows)
            else:
                i, j, places = map(algebra.send, (i, j, chosen[i] * (chosen[i] + 1) // 2 + j))
                of_rows[:, places] = block.transpose(1, 0, 2)[:, i, j]

        transform(self.fitting, [(sides[n][:, own], sides[n]) for n in numbers], take, columns)

    def turned(self, terms, found, rho, of_pairs, others):
        """The part of Gamma2 by which eigenvectors turn, shape (naux, naux).

        `rho` and `of_pairs` have rows of B, and after them those of the `LeftOut` eigenvectors `others`.
        """
        algebra, size = self.algebra, self.size
        between = zeros(algebra, (size, others.size))
        for n, (coulomb, exchange) in enumerate(zip(terms.coulomb.tolist(), terms.exchange.tolist())):
            between += coulomb * rho[:size, n, None] * rho[size:, n]
            if found[n] is not None:
                algebra.product(
                    of_pairs[n][:size] * self.pair_weights(found[n]), of_pairs[n][size:].T, between, -exchange, add=True
                )
        between /= others.values[-size:, None] - others.values[:-size]
        part = self.metric.apply_transposed(between)
        made = algebra.product(part, others.vectors, algebra.empty((self.three.naux,) * 2))
        return (made + made.T) / 2

    # Gamma

    def gamma_of_three(self, fitted, functions):
        """f_ab Gamma3 of some auxiliary functions, shape (n, ncol)."""
        algebra, fitting, add = self.algebra, self.fitting, False
        functions, shape = algebra.send(functions), (len(functions), self.three.ncol)
        gamma = algebra.empty(shape) if fitted else zeros(algebra, shape)
        for this in fitted:
            coulomb = ()
            if this.c is not None:
                row = this.density.reshape(-1)[fitting.columns_of] * fitting.weights
                coulomb = this.c[functions], row * this.coulomb
            if this.orbital is not None:
                self.add_exchange(this, functions, gamma, coulomb, add)
            elif coulomb:
                algebra.product(coulomb[0][:, None], coulomb[1][None], gamma, add=add)
            add = True
        return gamma

    def add_exchange(self, this, functions, gamma, coulomb, add):
        """Adds what J and exchange of a `Fitted` give Gamma3 of some auxiliary functions, or writes it.

        `coulomb`: nothing, or c of the functions and j D_ab of the columns, with their weights.
        """
        algebra, fitting, nao = self.algebra, self.fitting, self.fitting.nao
        step = block_rows(algebra, 8 * (this.factors.rank + 8 + nao) ** 2)
        for first in range(0, len(functions), step):
            some = slice(first, first + step)
            squares, of_j = self.squares(this, functions[some]), (coulomb[0][some], coulomb[1]) if coulomb else ()
            algebra.pack(squares, fitting.columns_of, fitting.weights, gamma[some], *of_j, add=add)

    def squares(self, this, functions):
        """-k sum_oo' L_ao s_o C_oo',P s_o' L_bo' of some P, shape (nao, n, nao), b <= a; the rest may be anything.

        Rows of products have whole units of 8 orbitals, for which cuBLAS is faster, the last ones with L = 0.
        """
        algebra, nao, n = self.algebra, self.fitting.nao, len(functions)
        vectors = padded(algebra, this.factors)
        rank = vectors.shape[1]
        places = algebra.send(places_in_triangle(this.factors.rank, rank))
        dense = algebra.gather(this.orbital[functions], places, algebra.empty((n, rank, rank)))
        half = algebra.product(dense.reshape(n * rank, rank), vectors.T, algebra.empty((n * rank, nao)), -this.exchange)
        turned = algebra.xp.ascontiguousarray(half.reshape(n, rank, nao).transpose(2, 0, 1)).reshape(nao * n, rank)
        out = algebra.empty((nao * n, nao))
        for first in range(0, nao, SQUARE_COLUMNS):
            below, some = slice(first * n, None), slice(first, first + SQUARE_COLUMNS)
            algebra.product(turned[below], vectors[some].T, out[below, some])
        return out.reshape(nao, n, nao)

    def gamma_of_two(self, fitted, turned):
        """Gamma2, shape (naux, naux)."""
        algebra, naux = self.algebra, self.three.naux
        gamma = zeros(algebra, (naux, naux))
        if turned is not None:
            gamma += turned
        for this in fitted:
            if this.c is not None:
                algebra.product(this.c[:, None], this.c[None], gamma, -0.5 * this.coulomb, add=True)
            if this.orbital is not None:
                weighted = this.orbital * self.pair_weights(this.factors)
                algebra.product(weighted, this.orbital.T, gamma, 0.5 * this.exchange, add=True)
        return gamma

    def pair_weights(self, f):
        """s_o s_o' of o >= o' of `Factors`, twice where these differ, on the device."""
        left, right = np.tril_indices(f.rank)
        return self.algebra.send(signs(f)[left] * signs(f)[right] * np.where(left == right, 1.0, 2.0))


def signs(f):
    """s_o of `Factors`."""
    return np.where(np.arange(f.rank) < f.negative, -1.0, 1.0)


def padded(algebra, f):
    """L_ao s_o of `Factors`, shape (nao, n), with zeros up to a whole multiple of 8."""
    out = zeros(algebra, (len(f.left), -(-f.rank // 8) * 8))
    out[:, : f.rank] = f.left * algebra.send(signs(f))
    return out


def places_in_triangle(n, width):
    """Where each element of a symmetric matrix is in its lower triangle, shape (width, width); 0 beyond n."""
    i, j = np.indices((width, width))
    return np.where(np.maximum(i, j) < n, np.maximum(i, j) * (np.maximum(i, j) + 1) // 2 + np.minimum(i, j), 0)


def orbitals_of(terms, orbitals):
    """Orbitals of each of the `Terms` of the energy of one density or of two; the sum of two has none."""
    count = len(terms.densities)
    if orbitals is None or len(orbitals) > count:
        return [None] * count
    return [*[None] * (count - len(orbitals)), *orbitals]
