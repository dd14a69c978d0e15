"""Several devices that make rows of pairs together, and who makes which pieces (`md4.contract.pair_rows`).

What each device has made of its pieces is added up on the first one, or put together on the host. Pieces are divided
beforehand: their number of integrals is known, so the same devices add up the same numbers each time.
"""

from copy import copy

from md4.contract.pair_rows import PairRows
from md4.support.threads import Standing, run_each


def divided(pieces, costs, count):
    """`count` lists of pieces, in their order: the most expensive one first, each goes to the list that has least."""
    found, loads = [[] for _ in range(count)], [0] * count
    for cost, piece in sorted(zip(costs, pieces), reverse=True):
        least = loads.index(min(loads))
        found[least].append(piece)
        loads[least] += cost
    return [sorted(some) for some in found]


class RowTeam:
    """The devices of a process.

    Parameters
    ----------
    engines : list of md4.engine.Engine
        One for each device, all over the same basis. Threads may share them.

    Attributes
    ----------
    engine : md4.engine.Engine
        That of the first device. Who uses the team holds its lock, so that only one thread does.
    algebra : md4.backends.Algebra
        That of the first device.
    """

    def __init__(self, engines):
        self.engines, self.algebras = engines, [engine.backend.algebra() for engine in engines]
        self.engine, self.algebra, self._rows, self._threads = engines[0], self.algebras[0], [], Standing()

    @property
    def rows(self):
        """`PairRows` of each device, with the shell pairs that the first one has found; errors as there."""
        if not self._rows:
            with self.engine.lock, self.algebra.working():
                first = PairRows(self.engine)
            rows = [first, *(first.on(engine) for engine in self.engines[1:])]
            self.each(lambda n: rows[n].prepared)  # now, since the memory that is left after it is looked at
            self._rows = rows
        return self._rows

    def each(self, work, count=None, stop=lambda: None):
        """[work(n) for the first `count` devices n, or for all].

        Each is done in a thread of the device, always the same, that holds the lock of its engine.
        """

        def one(n):
            with self.engines[n].lock, self.algebras[n].working():
                return work(n)

        return run_each(len(self.engines) if count is None else count, one, stop, self._threads.start)

    def memory_left(self):
        """Bytes that each device may still allocate."""
        return min(self.each(lambda n: self.algebras[n].memory_left()))

    def check_fits(self, need, what, remedy="raise max_memory"):
        """MemoryLimitError, as of `Backend.check_fits`, unless each device may allocate so many bytes."""
        self.each(lambda n: self.algebras[n].check_fits(need, what, remedy))

    def compile_ahead(self, complete, progress=None, orbitals=0):
        """As `PairRows.compile_ahead`, for all devices."""
        for rows, algebra in zip(self.rows, self.algebras):
            with rows.engine.lock, algebra.working():
                rows.compile_ahead(complete, progress, orbitals)

    def deal(self, whole, pieces, costs, work):
        """[work(share, some of the pieces)] of all devices that have a piece, at the same time.

        If one of them fails, the others begin no further piece, and its error is raised here.

        Parameters
        ----------
        whole : object
            The share of the first device. That of another one is a copy with `algebra` and `rows` of the device.
        pieces : list of (int, int)
        costs : list of int
            What they cost, in any unit.
        work : callable
        """
        own = divided(pieces, costs, max(1, min(len(self.engines), len(pieces))))
        shares = [whole, *(copy(whole) for _ in own[1:])]
        for share, algebra, rows in zip(shares, self.algebras, self.rows):
            share.algebra, share.rows = algebra, rows

        def stop():
            for some in own:
                some.clear()

        return self.each(lambda n: work(shares[n], own[n]), len(own), stop)
