"""J and K on the GPU: sums of blocks, and Schwarz bounds; J alone is in `md4.gpu.hermite_coulomb`."""

from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

from md4.errors import MemoryLimitError
from md4.gpu.buffers import Buffer, written_array
from md4.gpu.fitting_forces import DeviceFittingForces
from md4.gpu.forces import DeviceForces
from md4.gpu.h_layout import KET_SINGLES
from md4.gpu.hermite_coulomb import DeviceCoulomb, first_aos
from md4.gpu.hermite_rows import row_width
from md4.gpu.kernels.bounds import launch_bounds
from md4.gpu.kernels.derivative_norms import launch_derivative_norms
from md4.gpu.kernels.digest_in_place import item_entries, launch_in_place
from md4.gpu.kernels.digestion import launch_digest, launch_mirrored
from md4.gpu.kernels.narrow import launch_narrow
from md4.gpu.kernels.primitive_quartets import LARGEST_SINGLE, extent, fits_single
from md4.gpu.kernels.select_quartets import MOST_SHELLS, selects
from md4.gpu.part_plans import gains_by_plane, time_in_plane
from md4.gpu.paths import build_time, digest_order, square_pairs
from md4.gpu.predicted_times import Side, coulomb_time
from md4.gpu.quartet_lists import QuartetLists
from md4.gpu.targets import DeviceBlock
from md4.gpu.tracks import TRACK_SECONDS
from md4.gpu.tuning import SELECT, TRACK_BYTES
from md4.method.hermite_coulomb import hermite_bytes
from md4.shells.schwarz import GradientBounds
from md4.support.log import log

# Shells of one class that differ in their numbers of primitives share lists up to this many, where a list for each
# number would give a GPU less to do than a launch costs; more of them run faster apart.
MIXED_SHELLS = 40
BLOCK_BYTES = 2 << 30  # most bytes of a block of integrals that is digested
# Lists of pairs of at most so many functions ab are sorted by shells where their Schwarz bounds reach the same power of
# 2^BOUND_STEP: the larger, the more neighbours share a shell, and the more quartets are asked in vain.
ORDERED_FUNCTIONS, BOUND_STEP = 25, 2
# For each bra pair the device keeps how many ket pairs count with it. These numbers may take 1/LIMITS_SHARE of the
# memory that is left.
LIMITS_SHARE = 8


class DeviceSums:
    """How a GPU makes J and K; see `md4.backends.Sums`."""

    mixed_shells, block_bytes, copies, takes_lists = MIXED_SHELLS, BLOCK_BYTES, 1, False
    track_seconds, track_bytes = TRACK_SECONDS, TRACK_BYTES

    @property
    def makes_forces(self):
        """Whether there are the asynchronous copies that the kernels need."""
        return self.backend.context.unit != "fma"

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

    def digest(self, densities, twice):
        """Sums of J and K; see `DeviceDigest`."""
        self.backend.require_asynchronous_copies()
        return DeviceDigest(self.backend, densities, twice)

    def coulomb(self, basis, twice):
        """J alone; see `DeviceCoulomb`."""
        self.backend.require_asynchronous_copies()
        return DeviceCoulomb(self.backend, basis, twice)

    def forces(self, basis, lists):
        """Gradients; see `md4.gpu.forces.DeviceForces`."""
        self.backend.require_asynchronous_copies()
        return DeviceForces(basis, lists, *gradient_bounds(self.backend.context, basis, lists))

    def fitting_forces(self, basis, pairs, blocks):
        """Gradients of density fitting; see `md4.gpu.fitting_forces.DeviceFittingForces`."""
        self.backend.require_asynchronous_copies()
        every = [*pairs, *(this for block in blocks for this in block)]
        return DeviceFittingForces(basis, pairs, blocks, *gradient_bounds(self.backend.context, basis, every))

    def coulomb_bytes(self, pairs):
        """Bytes of D and J of a list for one density matrix, D in FP32 as well, and of its part of an order."""
        width = row_width(pairs.l, True)  # not less than without a plane
        return hermite_bytes(pairs, width) + pairs.nprim * (4 * width + 60) + 32 * len(pairs)


class DeviceBounds:
    """Schwarz bounds in device memory, and room for the blocks that they are taken from, one after the other.

    Parameters
    ----------
    context : md4.gpu.context.DeviceContext
    count : int
        Number of pairs.
    room : int
        Bytes of the largest block.
    """

    def __init__(self, context, count, room):
        self.context, self.count = context, count
        self.values, self.room = context.pool.get(count), context.pool.get(room // 8)
        context.clear(self.values)

    def pairs_at_once(self, prepared):
        """See `md4.gpu.paths.square_pairs`."""
        return square_pairs(self.context.unit, Side.of(prepared))

    def block(self, shape):
        """A block of six indices in the room."""
        return DeviceBlock.contiguous(self.room.part(0, (prod(shape),)), shape)

    def add(self, block, first):
        """R_ab of a block of pairs with themselves, from the place `first` on."""
        launch_bounds(self.context, block, self.values.part(first, (block.dims[0],)))

    def result(self):
        """R_ab on the host, shape (count,)."""
        host = np.empty(self.count)
        self.context.copy_out(host, self.values.pointer)
        for buffer in (self.values, self.room):
            self.context.pool.release(buffer)
        return host


def gradient_bounds(context, basis, lists):
    """`GradientBounds` of objects with the attribute `prepared` of `PairList`, and of the primitive pairs of each."""
    lists = [this.prepared for this in lists]
    shells = [this.pairs.pairs for this in lists]
    shells += [np.repeat(this.pairs.pairs, np.diff(this.pairs.start), axis=0) for this in lists]
    edges = np.cumsum([0, *map(len, shells)]).tolist()
    count, found = edges[-1], np.empty((2, edges[-1]))
    norms, each = context.pool.get(max(1, found.size)), np.arange(1 + max((this.nprim for this in lists), default=0))
    buffer, (one_by_one,) = context.pool.upload([each], context.stream)
    starts = [*(this.data.start for this in lists), *[one_by_one] * len(lists)]
    for side, start, (first, last) in zip(lists * 2, starts, pairwise(edges)):
        these = (norms.part(n * count + first, (last - first,)) for n in range(2))
        launch_derivative_norms(context, side, start, last - first, *these)
    context.copy_out(found, norms.pointer)
    for this in (norms, buffer):
        context.pool.release(this)
    bounds = [
        GradientBounds(these, basis.centres, *found[:, first:last])
        for these, (first, last) in zip(shells, pairwise(edges))
    ]
    return bounds[: len(lists)], bounds[len(lists) :]


class DeviceDigest:
    """X and Y of `md4.method.digestion` in device memory, summed block by block.

    Parameters
    ----------
    backend : md4.gpu.backend.GpuBackend
    densities, twice : ndarray, shape (n, nao, nao)
        D of X, and D + D^T of Y.
    """

    def __init__(self, backend, densities, twice):
        self.backend, self.context, self.nao = backend, backend.context, densities.shape[-1]
        self.shapes, context = (densities.shape, twice.shape), backend.context
        n, m = densities.size, twice.size
        # At the same address in each build, if possible, so that launches can be repeated.
        self.buffer = context.pool.own_room("densities and sums", max(1, 2 * (n + m)))
        places = (0, n), (n, m), (n + m, n), (2 * n + m, m)
        d, twice_d, self.x, self.y = (self.buffer.part(first, (size,)) for first, size in places)
        context.copy_in(d.pointer, np.ascontiguousarray(densities))
        context.copy_in(twice_d.pointer, np.ascontiguousarray(twice))
        context.clear(self.buffer.part(n + m, (n + m,)))
        self.matrices, self.counts = (d, self.x, twice_d, self.y), (len(densities), len(twice))
        self.host = self.lists = self.singles = self.extent = self.limits = None
        self.recorder, operator = context.recorder, backend.operator
        # What all launches of this build depend on.
        self.setting = operator.kind, operator.parameter, *self.counts, self.nao, self.buffer.pointer
        self.recorder.next_build()

    def ket_counts(self, first, rows):
        """A part of the rule's `counts` in device memory, or None."""
        return None if self.limits is None else self.limits.part(first, (rows,))

    def use(self, backend):
        """What follows works on the track of a backend."""
        self.backend, self.context = backend, backend.context
        if self.lists is not None:
            self.lists.context = backend.context

    def key(self, bra, ket, triangle, counts):
        """What the launches of a rectangle depend on, for `md4.gpu.recording.Recorder.repeat`."""
        sides = bra.data.number, bra.first, bra.npair, ket.data.number, ket.first, ket.npair
        limits = 0 if counts is None else counts.pointer
        return self.setting, *sides, triangle, limits, self.context.track

    def repeat(self, bra, ket, triangle, counts=None):
        """Launches again what an earlier build has recorded of two slices; False if it cannot."""
        return self.recorder.repeat(self.key(bra, ket, triangle, counts), bra, ket, self.context.handle)

    def done(self, bra, ket, triangle, counts=None, parts=()):
        """Keeps the launches of a rectangle if they are recorded; `parts` are the `ListParts` of its blocks."""
        if self.recorder.launches is None:
            return
        whole = None, self.backend.plan(bra, ket, None, counts is not None)
        plans = [(part.bra.facts.mirror, part.plan) for part in parts] or [whole]
        forms = [
            (mirror, *((plan.ket_form, plan.bra_form) if plan.swap else (plan.bra_form, plan.ket_form)))
            for mirror, plan in plans
        ]
        self.recorder.end(self.key(bra, ket, triangle, counts), bra, ket, forms, self.context.handle)

    def screen_by(self, rule):
        """`take_rows` selects quartets by a `md4.plan.QuartetRule`, whose `counts` limit blocks."""
        self.keep_counts(rule.counts)
        if len(rule.norms) > MOST_SHELLS:
            return
        try:
            self.lists = QuartetLists(self.context, rule)
        except MemoryLimitError:
            log.debug("no memory for lists of quartets; they are made in rectangles")

    def keep_counts(self, counts):
        """Copies `counts` to the device, at the same address in each build, unless memory is short."""
        try:
            little = LIMITS_SHARE * counts.nbytes > self.context.pool.left()
            room = None if little else self.context.pool.own_room("limits", max(1, -(-counts.size // 2)))
        except MemoryLimitError:
            room = None
        if room is None:
            log.debug("no memory for the numbers of quartets that survive; rectangles are made as a whole")
            return
        self.limits = Buffer(room.pointer, counts.shape, counts.itemsize, room)
        self.context.copy_in(room.pointer, counts)

    def take_rows(self, rows, basis):
        """Makes and digests the surviving quartets of a `md4.plan.QuartetRows`; False if no kernel does both."""
        bra, ket, plan = rows.bra, rows.ket, self.backend.plan(rows.bra, rows.ket)
        in_place = plan.path.digests(bra.facts, ket.facts) and not plan.swap
        if self.lists is None or not in_place or not selects(self.context, rows.shells):
            return False
        places = first_aos(self.context, bra, basis), first_aos(self.context, ket, basis)
        count = int(rows.counts.sum(dtype=np.int64))
        seconds = count * self.backend.sums.seconds(bra, ket, max(self.counts))
        with_single = seconds >= SELECT.single_seconds and self.has_singles(bra.facts, ket.facts, basis)
        # All memory is there before the first launch: if it is refused, rectangles begin anew.
        h_ab, in_double = bra.h(plan.bra_form).array, (False, ket.h(plan.ket_form).array, self.matrices)
        kinds = [in_double, (True, ket.h(KET_SINGLES).array, self.single_matrices)] if with_single else [in_double]
        size = item_entries(bra.facts, ket.facts, count)
        for quartets in self.lists.selected(rows, size, with_single):
            for single, h_cd, matrices in kinds:
                launch_in_place(
                    self.context, self.backend.operator, h_ab, h_cd, bra, ket, places, rows.same, matrices,
                    self.counts, self.nao, quartets, single,
                )  # fmt: skip
        return True

    def has_singles(self, bra, ket, basis):
        """Whether quartets of two lists, given by their `ListFacts`, may be computed in single precision."""
        if not SELECT.single_ratio or self.lists.largest > LARGEST_SINGLE:
            return False
        if self.extent is None:
            self.extent = extent(basis)
        return fits_single(self.extent, bra, ket)

    @cached_property
    def single_matrices(self):
        """The matrices with densities in FP32, made when they are first asked for."""
        d, x, twice, y = self.matrices
        doubles = [-(-part.size // 2) for part in (d, twice)]
        with self.context.alone():
            self.singles = self.context.pool.get(max(1, sum(doubles)))
            d, twice = (self.narrowed(part, first, n) for part, first, n in zip((d, twice), (0, doubles[0]), doubles))
        return d, x, twice, y

    def narrowed(self, values, first, doubles):
        """Doubles as floats, in so many doubles of their room."""
        room = self.singles.part(first, (doubles,))
        out = Buffer(room.pointer, (values.size,), 4, room.owner)
        launch_narrow(self.context, values, out)
        return out

    def selected(self):
        """Number of quartets that `take_rows` has selected; waits for the device."""
        return 0 if self.lists is None else self.lists.count()

    def add(self, block, bra, ket, basis, triangle):
        """Digests one block; `bra` and `ket` are slices of prepared lists, of one if `triangle`."""
        places = first_aos(self.context, bra, basis), first_aos(self.context, ket, basis)
        launch_digest(self.context, block, bra, ket, places, triangle, self.matrices, self.counts, self.nao)

    def add_parts(self, blocks, axis, bra, ket, basis, triangle):
        """Digests the even and the odd part of a block; `bra` and `ket` as in `add`, slices of whole lists."""
        places = first_aos(self.context, bra, basis), first_aos(self.context, ket, basis)
        matrices, counts = self.matrices, self.counts
        launch_mirrored(self.context, blocks, axis, bra, ket, places, triangle, matrices, counts, self.nao)

    def add_up(self, group):
        """Replaces the sums by those of all members of a `md4.gpu.collectives.Group`."""
        group.add_up((self.x, self.y))

    def expect_result(self):
        """Makes host memory for the result while the device is at work."""
        self.host = [written_array(shape) for shape in self.shapes]

    def result(self):
        """(X, Y) on the host."""
        if self.host is None:
            self.expect_result()
        for array, matrices in zip(self.host, (self.x, self.y)):
            self.context.copy_out(array, matrices.pointer)
        for buffer in (None if self.lists is None else self.lists.buffer, self.singles):
            if buffer is not None:
                self.context.pool.release(buffer)
        self.buffer = self.limits = self.matrices = self.x = self.y = None
        return self.host
