"""Lists of shell pairs and of single shells with their bounds, for the forces of density fitting."""

from typing import NamedTuple

import numpy as np

from md4.contract.gradient import host_norms
from md4.contract.screening import schwarz_bounds
from md4.shells.schwarz import GradientBounds
from md4.shells.shell_pairs import PRIMITIVE_CUTOFF


class Bounded(NamedTuple):
    """A prepared list of pairs and its two Schwarz bounds; see `md4.contract.screening.PairList`."""

    prepared: object
    exact: np.ndarray
    bound: np.ndarray


def norms_of(three):
    """`md4.contract.gradient.host_norms` of all lists of a `ThreeCentre`; None on a CPU, which does without."""
    if three.engine.backend.name == "cpu":
        return None
    return host_norms(three.basis, [*three.pairs, *three.single], PRIMITIVE_CUTOFF)


def forces_of(three, engine, singles, norms=None):
    """What makes the forces of a `ThreeCentre`: lists of pairs and of single shells with their bounds.

    Parameters
    ----------
    three : md4.contract.three_centre.ThreeCentre
    engine : md4.engine.Engine
        Over its joined basis.
    singles : list of list of (int, slice)
        Blocks of single shells, as of `FittingGradient.pieces`.
    norms : list of ndarray, optional
        As of `norms_of`, for a GPU; without them bounds of derivatives mean nothing there.
    """
    pieces, count = [piece for block in singles for piece in block], len(three.pairs)
    engine, every = engine.with_operator("coulomb"), [*three.pairs, *(three.single[n][some] for n, some in pieces)]
    prepared, bounds = engine.prepare_lists(every, three.basis), schwarz_bounds(engine, every)
    lists = [Bounded(this, *both) for this, both in zip(prepared, bounds)]
    rest, of_device = iter(lists[count:]), ()
    blocks = [[next(rest) for _ in block] for block in singles]
    if engine.backend.name != "cpu":
        given = [this.exact for this in lists]
        if norms is not None:
            given = [*norms[:count], *(norms[count + n][some] for n, some in pieces)]
        centres = three.basis.centres
        of_device = ([GradientBounds(this.prepared.pairs, centres, this.exact, n) for this, n in zip(lists, given)],)
    return engine.backend.sums.fitting_forces(three.basis, lists[:count], blocks, *of_device)


def rehearse(three, backend, response=True):
    """Asks a backend that launches nothing for the kernels of the forces of a `ThreeCentre`."""
    every = [(n, slice(None)) for n in range(len(three.single))]
    forces = forces_of(three, three.engine.with_backend(backend), [every])
    forces.add_three(backend, 0, backend.result((three.naux, three.ncol)), 0.0, response)
    if response:
        forces.add_two(backend, backend.result((three.naux, three.naux)), 0.0)
