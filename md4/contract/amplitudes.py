"""Integrals times amplitudes, made on the fly: what coupled-cluster theory needs of four virtual orbitals.

    H[x, a, b] = sum_cd t[x, c, d] (ac|bd)          over AOs, x is a pair of occupied orbitals

With M_P[a, c] = (ac|P) of the rows P = (lambda sigma) of `md4.contract.pair_rows`, which are made once,

    F(t)[x, a, lambda] += sum_c M_P[a, c] t[x, c, sigma] ,  and with lambda and sigma exchanged if the shells differ
    H = F(t) + F(t^T)^T

where integrals of a piece of rows with itself are halved. Rows of one lambda whose AOs sigma follow one another are two
products, without a copy of t or F: one is summed over c and sigma, the other, for which lambda and sigma are exchanged,
has a result for each sigma. t and F are on the device, in the order of AOs of the rows, and x runs fastest. Of the AOs
they have those that have occurred so far.
"""

from functools import partial

import numpy as np

from md4.contract.fitting_stores import WORK_SHARE, table_width, zeros
from md4.support.display import size_text
from md4.support.progress import Progress

# Bytes of amplitudes that are copied at a time to the device and back, so that copies go beside its work.
COPIED_BYTES = 64 << 20


class DirectContraction:
    """H of amplitudes in a basis.

    Parameters
    ----------
    team : md4.contract.row_team.RowTeam
        Its devices share each pass; what several have made of H is added up on the host.
    """

    def __init__(self, team):
        self.team, self.algebra = team, team.algebra
        with team.engine.lock, self.algebra.working():
            self.rows = team.rows[0]

    def contracted(self, amplitudes, out=None):
        """H of amplitudes t, both of the shape (n, nao, nao), in `out`, a C-contiguous array, if it is given.

        Raises
        ------
        MemoryLimitError
            One x and the least workspace do not fit.
        """
        found = np.empty(amplitudes.shape) if out is None else out
        with self.team.engine.lock, self.algebra.working():
            most = self._plan(len(found))
            pieces = self.rows.pieces(self.rows_at_once)
            self.team.compile_ahead(False)
            passes, costs = -(-len(found) // most), [(last - first) * last for first, last in pieces]
            with Progress(float(max(1, passes) * max(1, sum(costs))), label="vvvv") as bar:

                def work(share, own, t, h):
                    return share._pass(t, own, bar, h if share is self else np.empty(h.shape))

                for first in range(0, len(found), most):
                    t, h = (array[first : first + most] for array in (amplitudes, found))
                    for other in self.team.deal(self, pieces, costs, partial(work, t=t, h=h))[1:]:
                        h += other
        return found

    def _plan(self, count):
        """How many x at once, with how many rows and matrices; MemoryLimitError if the least does not fit."""
        algebra, rows, nao = self.algebra, self.rows, self.rows.nao
        one, row, matrix = 48 * nao**2, 8 * table_width(rows.nrow) + 8, 8 * nao * algebra.matrix_width(nao)
        left = self.team.memory_left()
        least = rows.workspace + 24 * nao**2 + rows.least_rows * row + matrix + one + 16 * nao
        what = f"amplitudes of one pair of {nao} AOs take {size_text(one)} and with the least workspace"
        self.team.check_fits(least, what)
        most = max(1, min(count, int(WORK_SHARE * (left - least) // one)))
        room = WORK_SHARE * (left - least - (most - 1) * one)
        self.rows_at_once, self.matrices_at_once = rows.at_once(algebra, room, row, matrix + 16 * nao * most)
        return most

    def _pass(self, amplitudes, pieces, bar, out):
        """`out`, where H of some amplitudes and of the pieces of a device is put."""
        algebra, rows, longest = self.algebra, self.rows, max((last - first for first, last in pieces), default=0)
        t, h = self._sent(amplitudes), algebra.empty((0, 0, 2 * len(amplitudes)))
        places, numbers = algebra.send(rows.places()), algebra.empty((longest * table_width(rows.nrow),))
        dense = algebra.empty((min(longest, self.matrices_at_once) * rows.nao * algebra.matrix_width(rows.nao),))
        here = None
        for first, last, table in rows.once(pieces, numbers, bar):
            reach = int(rows.reaches[last - 1])
            if reach > len(h):
                here = None  # before there are two of h
                h = self._resized(h, reach)
                here = self._resized(t, reach)
            columns = algebra.xp.minimum(places[:reach, :reach], last)  # no integral yet: a column of zeros
            self._add(table, columns, rows.in_runs(first, last), dense, here, h)
        del t, here
        return self._fetched(self._resized(h, rows.nao), out)

    def _sent(self, amplitudes):
        """Array [sigma, c, x] of t[x, c, sigma], and behind them of t[x, sigma, c]; AOs are in the order of `rows`."""
        algebra, nao, count = self.algebra, self.rows.nao, len(amplitudes)
        both, pairs = algebra.empty((nao, nao, 2 * count)), algebra.send(pairs_of(self.rows.order))
        for some in slices(count, nao):
            t = algebra.send(np.ascontiguousarray(amplitudes[some])).reshape(-1, nao * nao)
            t = algebra.xp.ascontiguousarray(t.T)
            both[:, :, some], both[:, :, some.start + count : some.stop + count] = t[pairs.T], t[pairs]
        return both

    def _fetched(self, h, out):
        """`out`, where F(t) + F(t^T)^T is put, in the order of AOs of the basis."""
        algebra, nao, count = self.algebra, self.rows.nao, len(out)
        pairs, copies = algebra.send(pairs_of(np.argsort(self.rows.order))), []
        h = h.reshape(nao * nao, 2 * count)
        for some in slices(count, nao):
            part = h[:, some][pairs.T.reshape(-1)]
            part += h[:, some.start + count : some.stop + count][pairs.reshape(-1)]
            part = algebra.xp.ascontiguousarray(part.T)
            copies.append(algebra.later(part.reshape(-1, nao, nao), out[some]))
        for copied in copies:
            copied()
        return out

    def _resized(self, array, reach):
        """An array of AOs, AOs and x for so many AOs; there are zeros for those that it does not have."""
        kept = min(reach, len(array))
        if kept == reach == len(array):
            return array
        made = zeros(self.algebra, (reach, reach, array.shape[2]))
        made[:kept, :kept] = array[:kept, :kept]
        return made

    def _add(self, table, columns, runs, dense, t, h):
        """Adds rows of a table to F of t and t^T; `columns` are those of the pairs of AOs that have occurred."""
        algebra, reach = self.algebra, len(columns)
        chosen, width = algebra.send(runs.rows), algebra.matrix_width(reach)
        most = min(len(runs.rows), len(dense) // (reach * width))
        dense = dense[: most * reach * width].reshape(most, reach, width)
        for start in range(0, len(runs.rows), most):
            some = chosen[start : start + most]
            matrices = algebra.unpack(table, columns, dense[: len(some)], some)
            for begin, end in runs.between(start, start + len(some)):
                m, n = matrices[begin - start : end - start].reshape((end - begin) * reach, reach), int(runs.one[begin])
                others = slice(int(runs.other[begin]), int(runs.other[end - 1]) + 1)
                algebra.product(m.T, t[others].reshape(len(m), -1), h[n], add=True)
                if runs.twice[begin]:
                    algebra.product(m, t[n], h[others].reshape(len(m), -1), add=True)


def slices(count, nao):
    """Slices of `count` matrices over AOs that are copied at a time."""
    step = max(1, COPIED_BYTES // (8 * nao**2))
    return [slice(first, min(count, first + step)) for first in range(0, count, step)]


def pairs_of(aos):
    """Numbers of all pairs of AOs, which are given in any order; shape (nao, nao)."""
    return aos[:, None] * len(aos) + aos
