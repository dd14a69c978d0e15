"""J and K on the GPU: what a device does of a build.

The quartets of two lists of shell pairs that survive screening are selected one by one, and made and digested by the
same kernel. Where there is none for a class, blocks of integrals are made of rectangles that cover them, and digested;
in a molecule in a plane these may be two blocks, of the integrals of even and of odd functions. The launches of a
rectangle are recorded, and repeated by later builds (`md4.gpu.recording`).
"""

from functools import cached_property

import numpy as np

from md4.errors import MemoryLimitError
from md4.gpu.buffers import Buffer
from md4.gpu.dealing import DealtTarget
from md4.gpu.h_layout import KET_SINGLES
from md4.gpu.hermite_coulomb import first_aos
from md4.gpu.kernels.digest_in_place import item_entries, launch_in_place
from md4.gpu.kernels.digestion import launch_digest, launch_mirrored
from md4.gpu.kernels.narrow import launch_narrow
from md4.gpu.kernels.primitive_quartets import LARGEST_SINGLE, extent, fits_single
from md4.gpu.kernels.select_quartets import MOST_SHELLS, selects
from md4.gpu.quartet_lists import QuartetLists
from md4.gpu.tuning import SELECT, TRACK_BYTES
from md4.plan import part_of
from md4.support.log import log

# A block of integrals takes at most this share of the memory that may be used, and at most so many bytes.
BLOCK_SHARE, BLOCK_BYTES = 0.15, 2 << 30
# What a rectangle costs, about, beside its quartets: for launches and for what of the device they leave idle.
RECTANGLE_SECONDS = 3e-5
# What a quartet of a rectangle costs that does not survive, in quartets, where kernels leave it out.
UNUSED_QUARTET = 0.03
# For each bra pair the device keeps how many ket pairs count with it. These numbers may take 1/LIMITS_SHARE of the
# memory that is left.
LIMITS_SHARE = 8


class DeviceDigest(DealtTarget):
    """X and Y of `md4.method.digestion` in device memory; see `md4.backends.Sums.digest`."""

    quartets = None  # `QuartetLists`, if there is room for them

    def __init__(self, engine, lists, survivors, densities, twice):
        super().__init__(engine, survivors, [densities.shape, twice.shape])
        context, self.nao = self.context, densities.shape[-1]
        self.kept = dict.fromkeys(lists)  # as keys, those of which H matrices may be there
        n, m = densities.size, twice.size
        # At the same address in each build, if possible, so that launches can be repeated.
        self.buffer = context.pool.own_room("densities and sums", max(1, 2 * (n + m)))
        places = (0, n), (n, m), (n + m, n), (2 * n + m, m)
        d, twice_d, self.x, self.y = (self.buffer.part(first, (size,)) for first, size in places)
        context.copy_in(d.pointer, np.ascontiguousarray(densities))
        context.copy_in(twice_d.pointer, np.ascontiguousarray(twice))
        context.clear(self.buffer.part(n + m, (n + m,)))
        self.matrices, self.counts = (d, self.x, twice_d, self.y), (len(densities), len(twice))
        self.singles = self.extent = self.limits = None
        self.recorder, operator = context.recorder, self.backend.operator
        # What all launches of this build depend on.
        self.setting = operator.kind, operator.parameter, *self.counts, self.nao, self.buffer.pointer
        self.recorder.next_build()
        self.screen_by(survivors.rule)

    def screen_by(self, rule):
        """Brings a `md4.plan.QuartetRule` to the device, where memory is not short."""
        self.keep_counts(rule.counts)
        if len(rule.norms) > MOST_SHELLS:
            return
        try:
            self.quartets = QuartetLists(self.context, rule)
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

    def begin(self, lists, keeps_all):
        """As `DealtTarget.begin`; how large blocks may be is known now."""
        self.block_bytes = min(BLOCK_BYTES, int(BLOCK_SHARE * self.backend.memory_left()))
        super().begin(lists, keeps_all)

    def use(self, track):
        """As `DealtTarget.use`."""
        super().use(track)
        if self.quartets is not None:
            self.quartets.context = self.context

    def add_pair(self, pair):
        """Adds the surviving quartets of a `ListPair`: row by row, or in rectangles that cover them."""
        survivors, bra, ket, number = self.survivors, pair.bra, pair.ket, pair.number
        self.kept[bra] = self.kept[ket] = None
        first, last, wanted = 0, bra.npair, survivors.quartets[number]
        if pair.parts > 1:
            counts = survivors.counts(number)
            first, last = part_of(counts, pair.part, pair.parts)
            wanted = int(counts[first:last].sum(dtype=np.int64))
        try:
            if self.take_rows(survivors.rows(pair, first, last)):
                return
        except MemoryLimitError:
            log.debug("no memory for lists of quartets of %r with %r", bra.pairs, ket.pairs)
        room = min(self.block_bytes, TRACK_BYTES) if self.track else self.block_bytes
        most = max(1, room // (8 * self.integrals(bra, ket)))
        price, limits = wanted / max(1e-9, pair.seconds) * RECTANGLE_SECONDS, None
        if self.limits is not None:  # rectangles of more than `most` quartets are several
            price /= UNUSED_QUARTET + price / most
            limits = self.limits.part(survivors.place(number), (bra.npair,))
        for ij, kl in survivors.tiles(number, first, last, most, price):
            ab, cd = bra[first + ij.start : first + ij.stop], ket[kl]
            self.add_rectangle(ab, cd, pair.same, limits)
            if limits is None:
                self.computed += ab.npair * cd.npair
        self.wanted += wanted
        self.computed += 0 if limits is None else wanted

    def integrals(self, bra, ket):
        """Integrals of a quartet of two lists that blocks hold: those of both parts where they are made in parts."""
        parts = self.backend.parts(bra, ket, self.engine.bra_basis.mirror_axis) or [(bra, ket)]
        return sum(one.facts.nab * other.facts.nab for one, other, *_ in parts)

    # rows of quartets

    def take_rows(self, rows):
        """Makes and digests the surviving quartets of a `md4.plan.QuartetRows`, if a kernel does both; does it?

        MemoryLimitError if there is not enough memory for lists of them; then nothing has been added.
        """
        bra, ket, plan = rows.bra, rows.ket, self.backend.plan(rows.bra, rows.ket)
        in_place = plan.path.digests(bra.facts, ket.facts) and not plan.swap
        if self.quartets is None or not in_place or not selects(self.context, rows.shells):
            return False
        places = self.first_aos(bra, ket)
        count = int(rows.counts.sum(dtype=np.int64))
        seconds = count * self.backend.sums.seconds(bra, ket, max(self.counts))
        with_single = seconds >= SELECT.single_seconds and self.has_singles(bra.facts, ket.facts)
        # All memory is there before the first launch: if it is refused, rectangles begin anew.
        h_ab, in_double = bra.h(plan.bra_form).array, (False, ket.h(plan.ket_form).array, self.matrices)
        kinds = [in_double, (True, ket.h(KET_SINGLES).array, self.single_matrices)] if with_single else [in_double]
        size = item_entries(bra.facts, ket.facts, count)
        for quartets in self.quartets.selected(rows, size, with_single):
            for single, h_cd, matrices in kinds:
                launch_in_place(
                    self.context, self.backend.operator, h_ab, h_cd, bra, ket, places, rows.same, matrices,
                    self.counts, self.nao, quartets, single,
                )  # fmt: skip
        return True

    def has_singles(self, bra, ket):
        """Whether quartets of two lists, given by their `ListFacts`, may be computed in single precision."""
        if not SELECT.single_ratio or self.quartets.largest > LARGEST_SINGLE:
            return False
        if self.extent is None:
            self.extent = extent(self.engine.bra_basis)
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

    # rectangles of quartets

    def add_rectangle(self, ab, cd, same, limits=None):
        """Adds a rectangle of quartets of slices of two lists, in halves where there is no memory for the whole.

        Of the ket list only the first `limits[i]` pairs count with bra pair i, if the device has these numbers.
        """
        try:
            self.add_block(ab, cd, same, limits)
            return
        except MemoryLimitError:
            if len(ab) * len(cd) == 1:
                raise
        # Only now is the memory free that the exception's frames referred to.
        for this in self.kept:
            this.drop()
        self.kept = {}
        log.debug("no memory for %r with %r at once; they are made in halves", ab.pairs, cd.pairs)
        for half in halves(max(ab, cd, key=len)):
            self.add_rectangle(*((half, cd) if len(ab) >= len(cd) else (ab, half)), same, limits)

    def add_block(self, ab, cd, same, limits):
        """Makes and digests the block of two slices, or those of both of their parts, or repeats what is recorded."""
        sides = ab.data.number, ab.first, ab.npair, cd.data.number, cd.first, cd.npair
        key = self.setting, *sides, same, 0 if limits is None else limits.pointer, self.context.track
        if self.recorder.repeat(key, ab, cd, self.context.handle):
            return
        backend, axis = self.backend, self.engine.bra_basis.mirror_axis
        parts = backend.parts(ab, cd, axis)
        if parts:
            blocks = backend.part_blocks(parts)
        else:
            a, b = ab.facts, cd.facts
            blocks = [backend.scratch((ab.npair, cd.npair, a.na, a.nb, b.na, b.nb))]
        for block in blocks if limits is not None else ():
            block.limit(limits)
        target = self.first_aos(ab, cd), same, self.matrices, self.counts, self.nao
        if parts:
            backend.run_parts(parts, blocks)
            launch_mirrored(self.context, blocks, axis, ab, cd, *target)
        else:
            self.engine.run_steps(ab, cd, *blocks)
            launch_digest(self.context, *blocks, ab, cd, *target)
        if self.recorder.launches is not None:
            self.recorder.end(key, ab, cd, self.forms(ab, cd, limits, parts), self.context.handle)

    def forms(self, ab, cd, limits, parts):
        """The forms of H that the blocks of two slices, or of their `ListParts`, use, for `Recorder.end`."""
        plans = [(part.bra.facts.mirror, part.plan) for part in parts]
        plans = plans or [(None, self.backend.plan(ab, cd, None, limits is not None))]
        return [
            (mirror, *((plan.ket_form, plan.bra_form) if plan.swap else (plan.bra_form, plan.ket_form)))
            for mirror, plan in plans
        ]

    def first_aos(self, bra, ket):
        """First AOs of the shells of both whole lists."""
        return tuple(first_aos(self.context, side, self.engine.bra_basis) for side in (bra, ket))

    # results

    def add_up(self, group):
        """Replaces the sums by those of all members of a `md4.gpu.collectives.Group`."""
        group.add_up((self.x, self.y))

    def end(self, lists, fetched=True):
        """As `DealtTarget.end`; quartets that were selected one by one count now."""
        super().end(lists, fetched)
        selected = 0 if self.quartets is None else self.quartets.count()
        return self.computed + selected, self.wanted + selected

    def result(self):
        """(X, Y) on the host."""
        found = self.on_host((self.x, self.y))
        for buffer in (None if self.quartets is None else self.quartets.buffer, self.singles):
            if buffer is not None:
                self.context.pool.release(buffer)
        self.buffer = self.limits = self.matrices = self.x = self.y = None
        return found


def halves(side):
    """A list, or a slice of one, in two slices."""
    middle = len(side) // 2
    return side[0:middle], side[middle : len(side)]
