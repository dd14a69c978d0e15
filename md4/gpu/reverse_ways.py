"""How steps 1 and 2 of gradients (`md4.gpu.forces`) are done for two lists, and what they take.

The quartets that count are listed where one of two kernels takes them (`Way`, `Listed`); else rectangles of U are made,
in chunks (`chunks`). Z of the bra pairs of a task is what both add to (`TaskSums`).
"""

from copy import copy
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from md4.gpu.buffers import Buffer
from md4.gpu.kernels.gamma_blocks import gamma_numbers, gamma_size
from md4.gpu.kernels.reverse_fused import fused_reverse
from md4.gpu.kernels.reverse_lanes import lane_plan
from md4.gpu.kernels.reverse_sums import reverse_tile
from md4.gpu.kernels.select_kets import WARPS
from md4.gpu.r_layout import r_stride_of
from md4.gpu.tiles import blocks_of_8
from md4.gpu.tuning import FEWEST_BLOCKS, REVERSE
from md4.method.angular import nherm
from md4.shells.shell_pairs import list_facts


@cache
def hermite_facts(l, first=0):
    """`ListFacts` of the Hermite functions up to degree l of primitive pairs, each of which is a pair of its own.

    Those before `first` are left out.
    """
    facts = list_facts(l, 0, False, 1, 1, nherm(l), 1, 1, False)
    return replace(facts, first=first, nherm=nherm(l) - first)


@cache
def hermite_of(facts):
    """`hermite_facts` of the derivatives of the pairs of a list, of one degree more.

    Single shells that have Hermite functions of one degree only have derivatives of one degree only.
    """
    one_degree = facts.single and facts.first == nherm(facts.l - 1)
    return hermite_facts(facts.l + 1, nherm(facts.l) if one_degree else 0)


def hermite_side(ab):
    """The primitive pairs of a slice of a prepared list as a ket of `hermite_of`."""
    side = copy(ab)
    side.facts = hermite_of(ab.facts)
    return side


class Way(NamedTuple):
    """How steps 1 and 2 are done for pairs of a bra list and a ket list.

    Attributes
    ----------
    lanes, fused : md4.gpu.kernels.reverse_lanes.LanePlan, md4.gpu.kernels.reverse_fused.FusedReverse
        The plan of the kernel that takes lists of what counts, and None; both are None where rectangles are taken.
    gamma, r : int
        Numbers of Gamma of a shell quartet, and of r of a primitive quartet.
    """

    lanes: Any
    fused: Any
    gamma: int
    r: int

    @classmethod
    def of(cls, context, bra, ket):
        """On a device, for `ListFacts` of both lists."""
        hermite = hermite_of(bra)
        lanes = lane_plan(bra, ket, hermite)
        fused = None if lanes else fused_reverse(context.unit, bra, ket, hermite, context.block_shared)
        return cls(lanes, fused, gamma_size(bra, ket, lanes is not None), r_stride_of(ket, hermite))

    @property
    def listed(self):
        """Whether quartets are listed."""
        return self.lanes is not None or self.fused is not None

    def divided(self, most, quartets):
        """(parts of Z, quartets of each of them) of primitive bra pairs with up to `most` of all `quartets`."""
        fewest, wanted = REVERSE.lane_pieces if self.lanes else REVERSE.fused_pieces
        each = max(fewest, -(-quartets // wanted), -(-most // REVERSE.most_parts))
        return -(-most // each), each

    def nbytes(self, shells, quartets):
        """Bytes of Gamma, lists and r of so many shell quartets and primitive quartets, or of several such numbers."""
        return (8 * self.gamma + 8) * shells + (8 if self.lanes else 12 + 8 * self.r) * quartets


class Listed(NamedTuple):
    """The quartets of some bra pairs that count with a ket list.

    Attributes
    ----------
    shells, quartets, most : int
        Shell quartets, primitive quartets, and the most of these that one primitive bra pair has.
    first, first_quartets, of_warps : Buffer
        Of `md4.gpu.kernels.select_kets.QuartetTable` and `KetCounts`.
    """

    shells: int
    quartets: int
    most: int
    first: Buffer
    first_quartets: Buffer
    of_warps: Buffer

    def slices(self, ab, way, shells, quartets, budget):
        """Yields (bra pairs, `Listed`) of slices that take at most `budget` bytes, or what a single pair takes.

        Parameters
        ----------
        ab : md4.engine.PreparedPairs
            All bra pairs.
        way : Way
        shells, quartets : ndarray
            The number of the first shell quartet of each of these pairs, and of the first primitive quartet of each
            primitive pair, and how many there are.
        """
        if way.nbytes(self.shells, self.quartets) <= budget:
            if self.quartets:
                yield ab, self
            return
        prims, begin = ab.whole.pairs.start[ab.first : ab.first + len(ab) + 1] - ab.first_prim, 0
        ends = way.nbytes(shells, quartets[prims])
        budget = max(budget, int(np.diff(ends).max()))
        while begin < len(ab):
            end = int(np.searchsorted(ends, ends[begin] + budget, side="right")) - 1
            (one, other), (first, last) = shells[[begin, end]].tolist(), prims[[begin, end]].tolist()
            counts = np.diff(quartets[first : last + 1])
            count = int(counts.sum())
            if count:
                yield ab[begin:end], Listed(
                    other - one, count, int(counts.max()), self.first.part(2 * begin, (end - begin + 1, 2)),
                    self.first_quartets.part(first, (last - first + 1,)),
                    self.of_warps.part(WARPS * (begin + first), (WARPS * (end - begin + last - first),)),
                )  # fmt: skip
            begin = end


class TaskSums:
    """Z of the bra pairs of a task, in as many parts as are used.

    Parameters
    ----------
    context : md4.gpu.context.DeviceContext
    ab : md4.engine.PreparedPairs
        The bra pairs.
    one_part : bool
        Whether there is room for one part only, in place of as many as kernels may fill.

    Attributes
    ----------
    hermite : ListFacts
        The Hermite functions of the bra.
    used : int
        Parts that are used.
    """

    def __init__(self, context, ab, one_part=False):
        self.context, self.used, self.hermite, rows = context, 0, hermite_of(ab.facts), rows_of(ab)
        self.of_task = ab.first_prim, ab.nprim, rows
        self.size = ab.nprim * 8 * blocks_of_8(self.hermite.nherm) * rows
        self.z = context.pool.room("z", max(1, (1 if one_part else REVERSE.most_parts) * self.size))

    def fields(self, parts):
        """Fields of `md4.gpu.kernels.reverse_sums.ReverseSums`, so many parts of which may be added to."""
        if parts > self.used:
            self.context.clear(self.z.part(self.used * self.size, ((parts - self.used) * self.size,)))
            self.used = parts
        return self.z, *self.of_task


def z_bytes(ab):
    """Bytes of Z of a primitive pair of a list, in as many parts as kernels may fill."""
    return 64 * blocks_of_8(hermite_of(ab.facts).nherm) * rows_of(ab) * REVERSE.most_parts


def least_bytes(context, bra, ket):
    """Bytes of Z of a bra pair, and of lists, Gamma, r and U with all pairs of a ket list."""
    one, other = bra.facts, ket.facts
    way, z = Way.of(context, one, other), one.max_prim * z_bytes(bra)
    if way.listed:
        gamma = gamma_numbers(len(ket), way.gamma, way.lanes is not None)
        return z + 8 * (gamma - len(ket) * way.gamma) + way.nbytes(len(ket), one.max_prim * ket.nprim)
    return z + rectangle_bytes(bra, ket)


def rectangle_bytes(bra, ket):
    """Bytes of r and U of a bra pair and a ket pair of two lists."""
    one, other, hermite = bra.facts, ket.facts, hermite_of(bra.facts)
    r = r_stride_of(other, hermite) * other.max_prim
    return 8 * one.max_prim * (r + 8 * blocks_of_8(hermite.nherm) * other.nab)


def columns(ab):
    """About how many blocks of 8 columns Z of a bra pair has."""
    return max(1, round(ab.nprim / max(1, ab.npair))) * blocks_of_8(hermite_of(ab.facts).nherm)


def rows_of(ab):
    """Rows of Z of the pairs of a list, filled up to whole tiles."""
    tile, row_blocks = reverse_tile(ab.facts.nab, columns(ab))
    return 8 * tile.rows8 * row_blocks


def parts_of(ab):
    """Among how many blocks of threads the ket pairs of a chunk are divided, to fill the device."""
    tile, row_blocks = reverse_tile(ab.facts.nab, columns(ab))
    blocks = ab.npair * row_blocks * -(-columns(ab) // (tile.nt * tile.warps))
    return min(REVERSE.most_parts, -(-FEWEST_BLOCKS // max(1, blocks)))


def chunks(bra, ket, counts, budget, prims=REVERSE.few_prims):
    """Slices (ab, cd) of a rectangle whose r and U take about `budget` bytes, without ket pairs that never count.

    `counts` says with how many ket pairs each bra pair counts. As few slices of the ket list are made as allow so many
    primitive pairs of the bra.
    """
    hermite = hermite_of(bra.facts)
    np8, stride = blocks_of_8(hermite.nherm), r_stride_of(ket.facts, hermite)
    budget, of_ket = max(1, budget // 8), ket.pairs.start
    start = bra.whole.pairs.start[bra.first : bra.first + bra.npair + 1]
    most = int(counts.max(initial=0))

    def numbers(first, last):
        """Numbers of r and U of each primitive bra pair with the ket pairs from `first` to `last`."""
        return int(of_ket[last] - of_ket[first]) * stride + (last - first) * ket.facts.nab * 8 * np8

    if most == 0 or bra.nprim == 0 or of_ket[most] == 0:
        return
    pieces = -(-numbers(0, most) * min(bra.nprim, prims) // budget)
    edges = np.unique(np.linspace(0, most, min(most, pieces) + 1).astype(int)).tolist()
    for first, last in pairwise(edges):
        room = max(1, budget // max(1, numbers(first, last)))
        at = 0
        while at < bra.npair:
            end = int(np.searchsorted(start, start[at] + room, side="right")) - 1
            end = min(max(end, at + 1), bra.npair)
            highest = min(last, int(counts[at:end].max()))
            if highest > first and start[end] > start[at] and of_ket[highest] > of_ket[first]:
                yield bra[at:end], ket[first:highest]
            at = end
