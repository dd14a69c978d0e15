"""Lists of shell pairs and of single shells with their bounds, for the forces of density fitting."""

from itertools import repeat
from typing import NamedTuple

import numpy as np

from md4.contract.screening import schwarz_bounds


class Bounded(NamedTuple):
    """A prepared list of pairs, and on a CPU its two Schwarz bounds; see `md4.contract.screening.PairList`."""

    prepared: object
    exact: np.ndarray | None
    bound: np.ndarray | None


def forces_of(three, engine, singles):
    """What makes the forces of a `ThreeCentre`: lists of pairs and of single shells with their bounds.

    Parameters
    ----------
    three : md4.contract.three_centre.ThreeCentre
    engine : md4.engine.Engine
        Over its joined basis.
    singles : list of list of (int, slice)
        Blocks of single shells, as of `FittingGradient.pieces`.
    """
    pieces, count = [piece for block in singles for piece in block], len(three.pairs)
    engine, every = engine.with_operator("coulomb"), [*three.pairs, *(three.single[n][some] for n, some in pieces)]
    prepared, bounds = engine.prepare_lists(every, three.basis), repeat((None, None))
    if engine.backend.name == "cpu":  # a GPU makes all bounds together
        bounds = schwarz_bounds(engine, every)
    lists = [Bounded(this, *both) for this, both in zip(prepared, bounds)]
    rest = iter(lists[count:])
    blocks = [[next(rest) for _ in block] for block in singles]
    return engine.backend.sums.fitting_forces(three.basis, lists[:count], blocks)


def rehearse(three, backend, response=True):
    """Asks a backend that launches nothing for the kernels of the forces of a `ThreeCentre`."""
    every = [(n, slice(None)) for n in range(len(three.single))]
    forces = forces_of(three, three.engine.with_backend(backend), [every])
    forces.add_three(backend, 0, backend.result((three.naux, three.ncol)), 0.0, response)
    backend.rehearse_pack()
    if response:
        forces.add_two(backend, backend.result((three.naux, three.naux)), 0.0)
