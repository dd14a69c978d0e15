"""How the GPU makes J and K, and Schwarz bounds; the sums are in `md4.gpu.digest` and `md4.gpu.hermite_coulomb`."""

from itertools import pairwise
from math import isqrt, prod

import numpy as np

from md4.gpu.derivative_matrices import DeviceDerivatives
from md4.gpu.digest import DeviceDigest
from md4.gpu.fitting_forces import DeviceFittingForces
from md4.gpu.forces import DeviceForces
from md4.gpu.hermite_coulomb import CoulombTarget
from md4.gpu.hermite_rows import row_width
from md4.gpu.kernels.bounds import launch_bounds
from md4.gpu.kernels.derivative_norms import launch_derivative_norms
from md4.gpu.part_plans import gains_by_plane, time_in_plane
from md4.gpu.paths import build_time, digest_order, square_pairs
from md4.gpu.predicted_times import Side, coulomb_time
from md4.gpu.targets import DeviceBlock
from md4.gpu.tracks import in_turn
from md4.method.hermite_coulomb import hermite_bytes
from md4.plan import even_pieces
from md4.shells.schwarz import GradientBounds

# Shells of one class that differ in their numbers of primitives share lists up to this many, where a list for each
# number would give a GPU less to do than a launch costs; more of them run faster apart.
MIXED_SHELLS = 40
# Lists of pairs of at most so many functions ab are sorted by shells where their Schwarz bounds reach the same power of
# 2^BOUND_STEP: the larger, the more neighbours share a shell, and the more quartets are asked in vain.
ORDERED_FUNCTIONS, BOUND_STEP = 25, 2


class DeviceSums:
    """How a GPU makes J and K; see `md4.backends.Sums`."""

    mixed_shells, copies, takes_bounds = MIXED_SHELLS, 1, False

    @property
    def makes_forces(self):
        """Whether there are the asynchronous copies that the kernels need."""
        return self.backend.context.unit != "fma"

    def copy_bytes(self, widest):
        """Nothing: there are no blocks beside."""
        return 0

    def gains_by_plane(self, basis):
        """See `md4.gpu.part_plans.gains_by_plane`."""
        return gains_by_plane(basis)

    def bound_step(self, functions):
        """Pairs of few functions ab are sorted by shells: additions to J and K bind the time of their quartets."""
        return BOUND_STEP if functions <= ORDERED_FUNCTIONS else 0

    def seconds(self, bra, ket, matrices, axis=None):
        """Predicted time of a quartet of two lists in J and K."""
        unit = self.backend.context.unit
        if axis is not None:
            return 1e-9 * time_in_plane(unit, bra, ket, matrices, axis)
        return 1e-9 * build_time(unit, Side.of(bra), Side.of(ket), matrices)

    def coulomb_seconds(self, bra, ket, matrices, axis=None):
        """Predicted time of a quartet of two lists in J alone, with or without an axis."""
        return 1e-9 * coulomb_time(Side.of(bra), Side.of(ket), matrices)

    def swapped(self, bra, ket):
        """Whether two lists change places for J and K; see `md4.gpu.paths.digest_order`."""
        return digest_order(self.backend.context.unit, bra, ket)

    def coulomb_swapped(self, bra, ket):
        """Whether the ket list has fewer function pairs than the bra list."""
        return ket.nab < bra.nab

    def __init__(self, backend):
        self.backend = backend

    def coulomb_key(self, bra, ket):
        """l_a + l_b of both lists, the larger one first: J alone takes the quartets of two degrees together."""
        return max(bra.l, ket.l), min(bra.l, ket.l)

    def digest(self, *build):
        """Sums of J and K; see `DeviceDigest`."""
        self.backend.require_asynchronous_copies()
        return DeviceDigest(*build)

    def coulomb(self, *build):
        """J alone; see `md4.gpu.hermite_coulomb.CoulombTarget`."""
        self.backend.require_asynchronous_copies()
        return CoulombTarget(*build)

    def forces(self, basis, lists, beside=()):
        """Gradients; see `md4.gpu.forces.DeviceForces`."""
        self.backend.require_asynchronous_copies()
        return DeviceForces(basis, lists, *gradient_bounds(self.backend, basis, lists), beside)

    def derivatives(self, engine, forces, cutoff):
        """J and K of derivatives; see `md4.gpu.derivative_matrices.DeviceDerivatives`."""
        return DeviceDerivatives(engine, forces, cutoff)

    def fitting_forces(self, basis, pairs, blocks):
        """Gradients of density fitting; see `md4.gpu.fitting_forces.DeviceFittingForces`."""
        self.backend.require_asynchronous_copies()
        every = [*pairs, *(this for block in blocks for this in block)]
        return DeviceFittingForces(basis, pairs, blocks, *gradient_bounds(self.backend, basis, every))

    def coulomb_bytes(self, pairs):
        """Bytes of D, J and its scales of a list for one density, D in FP32 as well, and of its part of an order."""
        width = row_width(pairs.l, True)  # not less than without a plane
        return hermite_bytes(pairs, width) + pairs.nprim * (12 * width + 60) + 32 * len(pairs)


class DeviceBounds:
    """Schwarz bounds in device memory, and room for the blocks that they are taken from, one after the other.

    Parameters
    ----------
    engine : md4.Engine
    count : int
        Number of pairs.
    room : int
        Bytes of the largest block.
    """

    def __init__(self, engine, count, room):
        context = engine.backend.context
        self.engine, self.context, self.count = engine, context, count
        self.values, self.room = context.pool.get(count), context.pool.get(room // 8)
        context.clear(self.values)

    def take(self, prepared, first):
        """R_ab of all pairs of a prepared list, from the place `first` on."""
        facts, most = prepared.facts, square_pairs(self.context.unit, Side.of(prepared))
        for where in even_pieces(len(prepared), min(most, isqrt(self.room.size) // facts.nab)):
            piece, count = prepared[where], where.stop - where.start
            shape = count, count, facts.na, facts.nb, facts.na, facts.nb
            block = DeviceBlock.contiguous(self.room.part(0, (prod(shape),)), shape)
            self.engine.run_steps(piece, piece, block)
            launch_bounds(self.context, block, self.values.part(first + where.start, (count,)))

    def result(self):
        """R_ab on the host, shape (count,)."""
        host = np.empty(self.count)
        self.context.copy_out(host, self.values.pointer)
        for buffer in (self.values, self.room):
            self.context.pool.release(buffer)
        return host


def gradient_bounds(backend, basis, lists):
    """`GradientBounds` of objects with the attribute `prepared` of `PairList`, and of the primitive pairs of each.

    Where each pair has one primitive pair, they are the same. All tracks of the backend make them.
    """
    context, lists = backend.context, [this.prepared for this in lists]
    counts = [np.diff(this.pairs.start) for this in lists]
    several = [bool((of_pairs != 1).any()) for of_pairs in counts]
    contracted = [this for this, some in zip(lists, several) if some]
    shells = [this.pairs.pairs for this in lists]
    shells += [np.repeat(*both, axis=0) for *both, some in zip(shells, counts, several) if some]
    edges = np.cumsum([0, *map(len, shells)]).tolist()
    count, found = edges[-1], np.empty((2, edges[-1]))
    norms, most = context.pool.get(max(1, found.size)), max((this.nprim for this in contracted), default=0)
    buffer, (one_by_one,) = context.pool.upload([np.arange(1 + most)], context.stream)
    starts = [*(this.data.start for this in lists), *[one_by_one] * len(contracted)]
    with in_turn(backend.tracks()) as contexts:
        for here, side, start, (first, last) in zip(contexts, [*lists, *contracted], starts, pairwise(edges)):
            these = (norms.part(n * count + first, (last - first,)) for n in range(2))
            launch_derivative_norms(here, side, start, last - first, *these)
    context.copy_out(found, norms.pointer)
    for this in (norms, buffer):
        context.pool.release(this)
    bounds = [
        GradientBounds(these, basis.centres, *found[:, first:last])
        for these, (first, last) in zip(shells, pairwise(edges))
    ]
    of_prims = iter(bounds[len(lists) :])
    return bounds[: len(lists)], [next(of_prims) if some else made for made, some in zip(bounds, several)]
