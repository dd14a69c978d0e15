"""Integrals times amplitudes, made on the fly: what coupled-cluster theory needs of four virtual orbitals.

    H[x, a, b] = sum_cd t[x, c, d] (ac|bd)          over AOs, x is a pair of occupied orbitals

With M_P[a, c] = (ac|P) of the rows P = (lambda sigma) of `md4.contract.pair_rows`, which are made once,

    F(t)[x, a, lambda] += sum_c M_P[a, c] t[x, c, sigma] ,  and with lambda and sigma exchanged if the shells differ
    H = F(t) + F(t^T)^T

where integrals of a piece of rows with itself are halved. All rows of one lambda are one product.
"""

from itertools import pairwise

import numpy as np

from md4.contract.fitting_stores import WORK_SHARE, table_width
from md4.errors import MemoryLimitError
from md4.support.display import size_text
from md4.support.progress import Progress


class DirectContraction:
    """H of amplitudes in a basis.

    Parameters
    ----------
    team : md4.contract.row_team.RowTeam
        Its devices share each pass; H is added up on the host.
    """

    def __init__(self, team):
        self.team, self.algebra = team, team.algebra
        with team.engine.lock, self.algebra.working():
            self.rows = team.rows[0]

    def contracted(self, amplitudes):
        """H of amplitudes t, both of the shape (n, nao, nao).

        Raises
        ------
        MemoryLimitError
            One x and the least workspace do not fit.
        """
        found, order = np.empty(amplitudes.shape), self.rows.order
        with self.team.engine.lock, self.algebra.working():
            most = self._plan()
            pieces = self.rows.pieces(self.rows_at_once)
            self.team.compile_ahead(False)
            passes, costs = -(-len(found) // most), [(last - first) * last for first, last in pieces]
            with Progress(float(max(1, passes) * max(1, sum(costs))), label="vvvv") as bar:
                for first in range(0, len(found), most):
                    some = slice(first, first + most)
                    t = np.ascontiguousarray(amplitudes[some][:, order][:, :, order])
                    parts = self.team.deal(self, pieces, costs, lambda share, own, t=t: share._pass(t, own, bar))
                    found[some, order[:, None], order] = sum(parts)
        return found

    def _plan(self):
        """How many x at once, with how many rows and matrices; MemoryLimitError if the least does not fit."""
        algebra, rows, nao = self.algebra, self.rows, self.rows.nao
        one, row, matrix = 48 * nao**2, 16 * table_width(rows.nrow), 8 * nao * algebra.matrix_width(nao)
        left = self.team.memory_left()
        least = rows.workspace + 16 * nao**2 + rows.least_rows * row + matrix + one + 16 * nao
        if least > left:
            raise MemoryLimitError(
                f"amplitudes of one pair of {nao} AOs take {size_text(one)} and with the least workspace "
                f"{size_text(least)}, but {size_text(left)} may be used; raise max_memory."
            )
        room = WORK_SHARE * (left - least)
        most = max(1, int(room // one))
        longest, gathered = max(algebra.chunk_bytes, algebra.block_bytes), 16 * nao * most
        self.rows_at_once = max(rows.least_rows, int(min(longest, room / 4) // row))
        self.matrices_at_once = max(1, int(min(algebra.block_bytes, room / 4) // (matrix + gathered)))
        return most

    def _pass(self, t, pieces, bar):
        """H of some amplitudes and of the pieces of a device, on the host; AOs are in the order of `rows`."""
        algebra, rows, n = self.algebra, self.rows, len(t)
        self.places, t = algebra.send(rows.places()), algebra.send(t)
        both, made = (algebra.empty((rows.nao, rows.nao, 2 * n)) for _ in range(2))
        both[:, :, :n], both[:, :, n:], made[...] = t.transpose(2, 1, 0), t.transpose(1, 2, 0), 0.0
        del t
        longest, widest = max((last - first for first, last in pieces), default=0), table_width(rows.nrow)
        tables = [algebra.empty((longest * widest,)) for _ in range(2)]
        for first, last, table in rows.once(pieces, tables[0], bar):
            for aos, others, chosen in rows.both_orders(first, last):
                sorted_ = tables[1][: len(chosen) * table.shape[1]].reshape(len(chosen), table.shape[1])
                algebra.sorted_rows(table, algebra.send(chosen), sorted_)
                self._add(sorted_, last, aos, others, both, made)
        return algebra.fetch(made[:, :, :n].transpose(2, 1, 0) + made[:, :, n:].transpose(2, 0, 1))

    def _add(self, table, last, aos, sources, both, made):
        """Adds rows to F of t and t^T; their AOs lambda ascend, and `sources` are the AOs sigma."""
        algebra, reach = self.algebra, int(self.rows.reaches[last - 1])
        width = algebra.matrix_width(reach)
        here = algebra.xp.minimum(self.places[:reach, :reach], last)
        dense = algebra.empty((min(len(table), self.matrices_at_once), reach, width))
        for start in range(0, len(table), self.matrices_at_once):
            some = slice(start, start + self.matrices_at_once)
            matrices = algebra.unpack(table[some], here, dense[: len(table) - start])
            these, others = aos[some], algebra.send(sources[some])
            for begin, end in pairwise(np.flatnonzero(np.diff(these, prepend=-1, append=-1)).tolist()):
                left = matrices[begin:end].reshape((end - begin) * reach, reach).T
                right = both[:, :reach][others[begin:end]].reshape((end - begin) * reach, -1)
                algebra.product(left, right, made[int(these[begin]), :reach], add=True)
