"""J and K with a derivative on the first function, for any densities, on the GPU; equations as for the CPU's.

    J^x_ij = sum_kl (d/dA_x i j|kl) D_lk          K^x_il = sum_jk (d/dA_x i j|kl) D_jk

**J** is made in the Hermite basis as J alone is (`md4.gpu.hermite_coulomb`): J^x_ij = sum_p H^{A_x}[ij, p] J_p.

**K** is digested from blocks of integrals. They are made of derivatives of ordered pairs of shells, (i, j) and (j, i),
by i, with the lists of pairs of J and K, and digested by the kernel that digests blocks of J and K
(`md4.gpu.kernels.digest_rows`). To the kernel a block has bra pairs ab of n_x n_i functions a, the derivatives of i one
after the other, and n_j functions b. It adds

    X_ac += (ab|cd) D_bd       X_ad += (ab|cd) D_bc

and the same with a and b exchanged, which nobody wants. So the derivatives have rows of their own, below those of the
AOs: X has four rows for each AO, the last three of which are K.
"""

from itertools import combinations_with_replacement

import numpy as np

from md4.errors import MemoryLimitError
from md4.gpu.digest import halves
from md4.gpu.hermite_coulomb import DeviceCoulomb, first_aos
from md4.gpu.kernels.digestion import launch_digest
from md4.method.derivatives import OF_A
from md4.plan import even_pieces, own_ranges
from md4.shells.schwarz import block_norms, exchange_norms
from md4.shells.shell_pairs import ShellPairs, ordered_pairs

# Rows of X for each AO.
ROWS = 4
# Integrals that a shell quartet may have: of three derivatives their numbers are int32, and so are bytes of a row b.
MOST_INTEGRALS = (1 << 28) - 1
# Share of the memory that may be used, of the H matrices of a piece of a list of derivatives, in one form.
H_SHARE = 0.1


def derivative_rows(ao_loc):
    """The row of X of each derivative and AO, shape (3, nao), counted from the first derivative."""
    counts = np.diff(ao_loc)
    first, count = np.repeat(ao_loc[:-1], counts), np.repeat(counts, counts)
    return 2 * first + np.arange(ao_loc[-1]) + np.arange(3)[:, None] * count


def limits_of_kets(tolerance, bounds, norms):
    """Bounds of ket pairs from which they count with bra pairs of such bounds, for such norms of the density."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # all of them without a tolerance, as in dry runs, and where a bound is not known
        return np.nan_to_num(tolerance / (bounds * norms), nan=0.0, posinf=np.inf)


class ExchangeSums:
    """X of some densities in device memory.

    Parameters
    ----------
    context : md4.gpu.context.DeviceContext
    densities : ndarray, shape (n, nao, nao)

    Attributes
    ----------
    matrices : list of tuple
        Of each density, what `md4.gpu.kernels.digestion.launch_digest` takes.
    """

    def __init__(self, context, densities):
        count, self.context, self.nao = len(densities), context, densities.shape[-1]
        # D of derivatives is read, too, below the last matrix, and is of no use
        inputs, sums, square = (count + ROWS - 1) * self.nao**2, count * ROWS * self.nao**2, self.nao**2
        self.buffer = context.pool.get(inputs + sums)
        context.clear(self.buffer)
        context.copy_in(self.buffer.pointer, np.ascontiguousarray(densities))
        places = [(n * square, inputs + n * ROWS * square) for n in range(count)]
        pairs = [[self.buffer.part(first, (ROWS * square,)) for first in both] for both in places]
        self.matrices = [(d, x, d, x) for d, x in pairs]

    @staticmethod
    def nbytes(densities):
        """Bytes for as many densities of the same size."""
        return 8 * (len(densities) * (ROWS + 1) + ROWS - 1) * densities.shape[-1] ** 2

    def add(self, block, ab, cd, places):
        """Adds a block of two slices of lists, whose first rows or AOs are `places`."""
        for matrices in self.matrices:
            launch_digest(self.context, block, ab, cd, places, False, matrices, (1, 0), self.nao)

    def result(self, rows):
        """K, shape (n, 3, nao, nao), by `derivative_rows`."""
        found = np.empty((len(self.matrices), (ROWS - 1) * self.nao, self.nao))
        for (_, x, *_), out in zip(self.matrices, found):
            self.context.copy_out(out, x.part(self.nao**2, (out.size,)).pointer)
        self.context.pool.release(self.buffer)
        return found[:, rows]


class DeviceDerivatives:
    """J and K of derivatives; see `md4.cpu.derivative_matrices.HostDerivatives`.

    Parameters
    ----------
    engine : md4.Engine
        With the operator.
    forces : md4.gpu.forces.DeviceForces
        Of the lists of pairs.
    cutoff : float
        Primitive pairs below it are left out, as those of the lists.
    """

    def __init__(self, engine, forces, cutoff):
        self.engine, self.backend, self.basis, self.forces = engine, engine.backend, engine.bra_basis, forces
        self.cutoff, self.kets = cutoff, [this.prepared for this in forces.lists]

    def run(self, densities, with_j, with_k, tolerance, part=0, parts=1, report=None):
        """As `md4.cpu.derivative_matrices.HostDerivatives.run`; what takes long is K."""
        self.check_memory(densities, with_j, with_k)
        given, nothing = (densities, tolerance, part, parts), np.zeros((len(densities), 3, *densities.shape[1:]))
        vj = self.coulomb(*given) if with_j else nothing
        if with_k:
            return vj, self.exchange(*given, report)
        if report is not None:
            report(sum(ordered_pairs(this.pairs) for this in self.kets) / parts)
        return vj, nothing

    def coulomb(self, densities, tolerance, part, parts):
        """J^x_ij = sum_p H^{A_x}[ij, p] J_p, with the J_p of J alone."""
        twice = densities + densities.swapaxes(1, 2)
        norms = block_norms(self.basis, twice / 2).max(axis=0)
        own, largest = (np.concatenate([getattr(of, name) for of in self.forces.bounds]) for name in ("own", "largest"))
        rule = self.forces.product_rule(tolerance, largest, own * norms[tuple(self.forces.shells.T)], norms)
        target = DeviceCoulomb(self.backend, self.basis, twice, rule, self.kets, more=1)
        target.load(self.forces.with_room_for_h(self.backend, self.kets))
        for l_ket, l_bra in combinations_with_replacement(sorted(target.degrees), 2):
            target.add(l_bra, l_ket, part, parts)
        return target.collect_derivatives(self.kets)

    def exchange(self, densities, tolerance, part, parts, report):
        """K from blocks of integrals of derivatives."""
        sums, norms = ExchangeSums(self.backend.context, densities), block_norms(self.basis, densities).max(axis=0)
        # the largest bound from each pair to the end of its list, the last one first, and norms of D for each j
        of_kets = [
            (np.maximum.accumulate(this.exact[::-1]), exchange_norms(norms, this.pairs.pairs))
            for this in self.forces.lists
        ]
        done, wait = 0, None
        for bra, bounds in self.bras(part, parts):
            shells = bra.pairs.pairs
            rows = self.basis.nao + 3 * self.basis.ao_loc[shells[:, 0]], self.basis.ao_loc[shells[:, 1]]
            buffer, (places,) = self.backend.context.pool.upload([np.stack(rows, axis=1)], self.backend.context.stream)
            for ket, (highest, of_j) in zip(self.forces.with_room_for_h(self.backend, self.kets), of_kets):
                limits = limits_of_kets(tolerance, bounds, of_j[shells[:, 1]])
                self.add(bra, ket, len(ket) - np.searchsorted(highest, limits), places, sums)
            self.backend.context.pool.release(buffer)
            bra.drop()
            if report is not None:  # what the device has done of the pieces before
                if wait is not None:
                    wait()
                    report(done)
                done, wait = len(bra) * bra.pairs.na * bra.pairs.nb, self.backend.mark()
        found = sums.result(derivative_rows(self.basis.ao_loc))
        if wait is not None:
            report(done)
        return found

    def bras(self, part, parts):
        """Derivatives by the first shell of all ordered pairs of a part, in pieces, with bounds of each pair."""
        for number, (this, of_pairs) in enumerate(zip(self.forces.lists, self.forces.bounds)):
            shells = this.pairs.pairs
            for own in own_ranges(len(shells), (part + number) % parts, parts):
                chosen = np.arange(own.start, own.stop)
                yield from self.pieces(shells[chosen], of_pairs.largest[chosen])
                chosen = chosen[np.not_equal(*shells[chosen].T)]
                yield from self.pieces(shells[chosen, ::-1], of_pairs.largest[chosen])

    def pieces(self, shells, bounds):
        """Prepared derivatives of a list of pairs of shells, in pieces whose H fits the memory, with their bounds."""
        if len(shells) == 0:
            return
        counts = self.basis.nprims[shells].prod(axis=1)
        most = int(np.argmax(counts))
        largest = ShellPairs.of_basis(self.basis, shells[most : most + 1], np.array([0, counts[most]])).derived(OF_A)
        room = int(H_SHARE * self.backend.memory_left()) // self.backend.hermite_bytes(largest)
        where = even_pieces(len(shells), max(1, room))
        lists = [shells[piece] for piece in where]
        for piece, made in zip(where, self.engine.prepare_lists(lists, self.basis, self.cutoff)):
            yield made.derived(OF_A), bounds[piece]

    def add(self, bra, ket, counts, places, sums):
        """Adds what the first ones of a list of pairs give the derivatives of a list; `counts`: of each, so many."""
        context = self.backend.context
        if 0 in (counts.max(), bra.nprim, ket.nprim):
            return
        limits = self.forces.sent(context, counts.astype(np.int32))
        places = places, first_aos(context, ket, self.basis)
        most = max(1, self.backend.block_bytes() // (8 * bra.facts.nab * ket.facts.nab))
        for ij, kl in self.rectangles(counts, most):
            self.add_block(bra[ij], ket[kl], limits, places, sums)

    def add_block(self, ab, cd, limits, places, sums):
        """Adds a rectangle, in halves where there is no memory for the whole."""
        one, other = ab.facts, cd.facts
        try:
            block = self.backend.scratch((len(ab), len(cd), one.nab // one.nb, one.nb, other.na, other.nb))
            block.limit(limits)
            self.engine.run_steps(ab, cd, block)
            sums.add(block, ab, cd, places)
            return
        except MemoryLimitError:
            if len(ab) * len(cd) == 1:
                raise
        for this in (ab, *self.kets, *(this.prepared for this in self.forces.beside)):
            this.drop()
        for half in halves(max(ab, cd, key=len)):
            self.add_block(*((half, cd) if len(ab) >= len(cd) else (ab, half)), limits, places, sums)

    def rectangles(self, counts, most):
        """Slices of both lists that cover what counts, of at most `most` quartets; in a dry run one of each shape."""
        pieces = even_pieces(len(counts), max(1, most // int(counts.max())))
        found = [(ij, kl) for ij in pieces for kl in even_pieces(int(counts[ij].max()), most)]
        if self.backend.dry:
            return {(ij.stop - ij.start, kl.stop - kl.start): (ij, kl) for ij, kl in found}.values()
        return found

    def check_memory(self, densities, with_j, with_k):
        """MemoryLimitError, before anything is allocated, if there is no room for matrices and one list or quartet."""
        lists, made, needs = [this.pairs for this in self.kets], "derivatives of J and K", []
        most = max(this.nab for this in lists) ** 2
        if with_k and most > MOST_INTEGRALS:
            raise MemoryLimitError(
                f"a shell quartet of {self.basis!r} may have {most} integrals, but derivatives of K on a GPU take "
                f"{MOST_INTEGRALS}; use backend='cpu'."
            )
        if with_j:
            h, sums = DeviceCoulomb.derived_bytes(self.backend, self.kets), self.forces.coulomb_bytes(len(densities))
            # buffers are rounded up by an eighth at most
            matrices, sums = 72 * densities.size, sums * 9 // 8
            needs.append({"densities and sums": matrices, "Hermite functions": sums, "H of one list": h})
        if with_k:
            pairs = [(this[:1].derived(OF_A), other[:1]) for this in lists for other in lists]
            least = max(8 * bra.nab * ket.nab + self.backend.least_workspace(bra, ket) for bra, ket in pairs)
            needs.append({"densities and sums": ExchangeSums.nbytes(densities) * 9 // 8, "a shell quartet": least})
        for need in needs:
            self.forces.require(self.backend, need, made)
