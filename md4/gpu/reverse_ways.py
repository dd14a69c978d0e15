"""How steps 1 and 2 of gradients (`md4.gpu.forces`) are done for two lists, and what they take.

The quartets that count are listed where one of two kernels takes them (`Way`, `Listed`); else rectangles of U are made,
in chunks (`chunks`). Z of the bra pairs of a task is what both add to (`TaskSums`).

In a molecule in a plane (`md4.gpu.force_planes`) even and odd functions meet apart, and have a Z each (`Meeting`).
"""

from copy import copy
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from md4.gpu.buffers import Buffer
from md4.gpu.kernels.gamma_blocks import gamma_fits, gamma_numbers, gamma_size
from md4.gpu.kernels.primitive_quartets import fits_single
from md4.gpu.kernels.recurrence import by_axis
from md4.gpu.kernels.reverse_fused import TF32, filled_rows, fused_reverse
from md4.gpu.kernels.reverse_lanes import lane_plan
from md4.gpu.kernels.reverse_sums import reverse_tile
from md4.gpu.kernels.select_kets import WARPS
from md4.gpu.r_layout import r_stride_of
from md4.gpu.tiles import blocks_of_8
from md4.gpu.tuning import FEWEST_BLOCKS, REVERSE
from md4.method.angular import nherm
from md4.method.mirror import part_functions
from md4.shells.shell_pairs import list_facts, part_facts

# What `md4.gpu.kernels.reverse_fused` takes: predicted seconds of a product of blocks of 8, and such products as whose
# the rest of what a warp does for a primitive quartet counts. What lanes take, over `LanePlan.cycles`. What must be
# saved by even and odd functions that meet apart, without screening: there are more launches.
WORK, WARP_WORK, LANE_WORK, LEAST_SAVED = 2.4e-11, 4, 1.9e-13, 1e-4


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


def hermite_side(ab, hermite):
    """The primitive pairs of a slice of a prepared list as a ket, whose functions are the `ListFacts` given."""
    side = copy(ab)
    side.facts = hermite
    return side


class Meeting(NamedTuple):
    """`ListFacts` of the functions ab, cd and p that meet: all, or those of one parity."""

    bra: Any
    ket: Any
    hermite: Any

    @property
    def parity(self):
        """0 for even and 1 for odd functions p, or None for all."""
        return self.hermite.mirror and self.hermite.mirror[1]


def part_of(prepared, facts):
    """The part of a prepared list, or of a slice of one, that has these facts, or all of it."""
    return prepared.part(*facts.mirror) if facts.mirror else prepared


@cache
def meetings(bra, ket, plane):
    """Every `Meeting` of a bra list and a ket list, given by their `ListFacts`.

    plane : md4.gpu.force_planes.Plane or None
    """
    hermite = hermite_of(bra)
    if plane is None:
        return (Meeting(bra, ket, hermite),)
    found = []
    for parity in range(2):
        mirror = plane.axis, parity
        of_bra, of_ket = bra if plane.mixed else part_facts(bra, *mirror), part_facts(ket, *mirror)
        functions = replace(hermite, nherm=len(part_functions(hermite.l, *mirror)), mirror=mirror)
        if of_bra.nab and of_ket.nab:
            found.append(Meeting(of_bra, of_ket, functions))
    return tuple(found)


class Way(NamedTuple):
    """How steps 1 and 2 are done for pairs of a bra list and a ket list.

    Attributes
    ----------
    lanes : md4.gpu.kernels.reverse_lanes.LanePlan or None
        Where lanes take lists of what counts.
    fused : tuple of md4.gpu.kernels.reverse_fused.FusedReverse
        The plan for each of the `meetings` where they take such lists. Without either, rectangles are taken.
    singles : tuple of md4.gpu.kernels.reverse_fused.FusedReverse
        Plans in TF32 besides `fused`, or none.
    meetings : tuple of Meeting
    gamma : tuple of int
        Numbers of Gamma of a shell quartet, for each of them.
    r : int
        Numbers of r of a primitive quartet.
    """

    lanes: Any
    fused: tuple
    singles: tuple
    meetings: tuple
    gamma: tuple
    r: int

    @classmethod
    def of(cls, context, ab, cd, plane):
        """On a device, for two prepared lists, and as for `meetings`."""
        bra, ket = ab.facts, cd.facts
        if not gamma_fits(bra, ket, context.block_shared):
            return cls.in_meetings(context, meetings(bra, ket, plane))._replace(fused=())
        lanes, whole = lane_plan(bra, ket, hermite_of(bra), context.block_shared), meetings(bra, ket, None)
        if lanes:
            return cls(lanes, (), (), whole, (gamma_size(bra, ket, True),), 0)
        found = cls.in_meetings(context, whole)
        if plane is not None:
            apart = cls.in_meetings(context, meetings(bra, ket, plane))
            saved = (found.seconds - apart.seconds) * ab.nprim * cd.nprim
            if not (found.fused and apart.fused) or saved > LEAST_SAVED:
                return apart
        return found

    @classmethod
    def in_meetings(cls, context, every):
        """Of functions that meet so, on tensor cores."""
        fused = tuple(fused_reverse(context.unit, *one, context.block_shared) for one in every)
        gamma = tuple(gamma_size(one.bra, one.ket, False) for one in every)
        return cls(None, () if None in fused else fused, (), every, gamma, r_stride_of(*every[0][1:]))

    def with_singles(self, context, where, bra, ket):
        """The same with plans for `singles`, if the device has instructions for them and each of the meetings fits.

        where : md4.gpu.kernels.primitive_quartets.Extent
            Of the basis.
        bra, ket : ListFacts
        """
        fits = context.unit.startswith("dmma") and by_axis(*self.meetings[0][1:]) and fits_single(where, bra, ket, 1)
        if not fits:
            return self
        plans = tuple(fused_reverse(TF32, *one, context.block_shared) for one in self.meetings)
        return self if None in plans else self._replace(singles=plans)

    @property
    def seconds(self):
        """About what `lanes` or `fused` take for a primitive quartet; 0 of rectangles."""
        return LANE_WORK * self.lanes.cycles if self.lanes else WORK * self.work

    @property
    def work(self):
        """About what `fused` takes for a primitive quartet, in products of blocks of 8."""
        return sum(
            plan.column_blocks(one.hermite) * plan.warps
            * (WARP_WORK + plan.nt * plan.rows_cd * (blocks_of_8(one.ket.nherm) + plan.rows_ab))
            for plan, one in zip(self.fused, self.meetings)
        )

    @property
    def listed(self):
        """Whether quartets are listed."""
        return self.lanes is not None or len(self.fused) > 0

    def divided(self, most, quartets):
        """(parts of Z, quartets of each of them) of primitive bra pairs with up to `most` of all `quartets`."""
        fewest, wanted = REVERSE.lane_pieces if self.lanes else REVERSE.fused_pieces
        each = max(fewest, -(-quartets // wanted), -(-most // REVERSE.most_parts))
        return -(-most // each), each

    def nbytes(self, shells, quartets):
        """Bytes of Gamma, lists and r of so many shell quartets and primitive quartets, or of several such numbers."""
        return (8 * sum(self.gamma) + 8) * shells + (8 if self.lanes else 12 + 8 * self.r) * quartets


class Listed(NamedTuple):
    """The quartets of some bra pairs that count with a ket list.

    Attributes
    ----------
    shells, quartets, most : list of int
        Shell quartets, primitive quartets, and the most of these that one primitive bra pair has, of those that are not
        single and of those that are.
    first, first_quartets, of_warps : Buffer
        Of `md4.gpu.kernels.select_kets.QuartetTable` and `KetCounts`.
    limit : Buffer, shape (1, 2)
        The bounds below which primitive quartets are left out, and below which shell quartets are single.
    """

    shells: list
    quartets: list
    most: list
    first: Buffer
    first_quartets: Buffer
    of_warps: Buffer
    limit: Buffer

    def slices(self, ab, way, shells, quartets, budget):
        """Yields (bra pairs, `Listed`) of slices that take at most `budget` bytes, or what a single pair takes.

        Parameters
        ----------
        ab : md4.engine.PreparedPairs
            All bra pairs.
        way : Way
        shells, quartets : ndarray, shape (n, 2)
            The numbers of the first shell quartets of each of these pairs, and of the first primitive quartets of each
            primitive pair, and how many there are.
        """
        if way.nbytes(sum(self.shells), sum(self.quartets)) <= budget:
            if any(self.quartets):
                yield ab, self
            return
        prims, begin = ab.whole.pairs.start[ab.first : ab.first + len(ab) + 1] - ab.first_prim, 0
        ends = way.nbytes(shells.sum(axis=1), quartets[prims].sum(axis=1))
        budget = max(budget, int(np.diff(ends).max()))
        while begin < len(ab):
            end = int(np.searchsorted(ends, ends[begin] + budget, side="right")) - 1
            first, last = prims[[begin, end]].tolist()
            counts = np.diff(quartets[first : last + 1], axis=0)
            if counts.any():
                yield ab[begin:end], Listed(
                    (shells[end] - shells[begin]).tolist(), counts.sum(axis=0).tolist(), counts.max(axis=0).tolist(),
                    self.first.part(3 * begin, (end - begin + 1, 3)),
                    self.first_quartets.part(2 * first, (2 * (last - first + 1),)),
                    self.of_warps.part(2 * WARPS * (begin + first), (2 * WARPS * (end - begin + last - first),)),
                    self.limit,
                )  # fmt: skip
            begin = end


class TaskSums:
    """Z of the bra pairs of a task, in as many parts as are used.

    Parameters
    ----------
    context : md4.gpu.context.DeviceContext
    ab : md4.engine.PreparedPairs
        The bra pairs, with the functions that take part.
    hermite : ListFacts
        The Hermite functions of derivatives, see `Meeting`.
    one_part : bool
        Whether there is room for one part only, in place of as many as kernels may fill.

    Attributes
    ----------
    ab, hermite
        As given.
    used : int
        Parts that are used.
    """

    def __init__(self, context, ab, hermite, one_part=False):
        self.context, self.used, self.ab, self.hermite, rows = context, 0, ab, hermite, rows_of(ab.facts)
        self.of_task = ab.first_prim, ab.nprim, rows
        self.size = ab.nprim * 8 * blocks_of_8(hermite.nherm) * rows
        name = "z", hermite.mirror and hermite.mirror[1]
        self.z = context.pool.room(name, max(1, (1 if one_part else REVERSE.most_parts) * self.size))

    def fields(self, parts):
        """Fields of `md4.gpu.kernels.reverse_sums.ReverseSums`, so many parts of which may be added to."""
        if parts > self.used:
            self.context.clear(self.z.part(self.used * self.size, ((parts - self.used) * self.size,)))
            self.used = parts
        return self.z, *self.of_task


def z_bytes(ab, plane=None):
    """Bytes of Z of a primitive pair of a list, in as many parts as kernels may fill."""
    facts, found = ab.facts, 0
    for one in {None, plane}:
        # the even functions ab and p of a list are as many as the odd ones, or more
        of_bra, _, hermite = meetings(facts, facts, one)[0]
        found += 64 * blocks_of_8(hermite.nherm) * rows_of(of_bra) * REVERSE.most_parts * (1 if one is None else 2)
    return found


def least_bytes(context, bra, ket, plane):
    """Bytes of Z of a bra pair, and of lists, Gamma, r and U with all pairs of a ket list."""
    one = bra.facts
    way, z = Way.of(context, bra, ket, plane), one.max_prim * z_bytes(bra, plane)
    if way.listed:
        gamma = gamma_numbers(len(ket), way.gamma, way.lanes is not None)[-1]
        return z + 8 * (gamma - len(ket) * sum(way.gamma)) + way.nbytes(len(ket), one.max_prim * ket.nprim)
    return z + rectangle_bytes(bra, ket)


def listed_numbers(context, bra, ket, plane):
    """Primitive quartets, or elements of Gamma, of a bra pair with a ket list; 0 where quartets are not listed."""
    way = Way.of(context, bra, ket, plane)
    return max(bra.pairs.max_prim * ket.nprim, sum(way.gamma) * len(ket)) if way.listed else 0


def rectangle_bytes(bra, ket):
    """Bytes of r and U of a bra pair and a ket pair of two lists."""
    one, other, hermite = bra.facts, ket.facts, hermite_of(bra.facts)
    r = r_stride_of(other, hermite) * other.max_prim
    return 8 * one.max_prim * (r + 8 * blocks_of_8(hermite.nherm) * other.nab)


def columns(ab, hermite):
    """About how many blocks of 8 columns Z of a bra pair has."""
    return max(1, round(ab.nprim / max(1, ab.npair))) * blocks_of_8(hermite.nherm)


def rows_of(facts):
    """Rows of Z of the pairs of a list, filled up to whole tiles."""
    tile, row_blocks = reverse_tile(facts.nab, 1)
    return 8 * max(tile.rows8 * row_blocks, filled_rows(facts.nab))


def parts_of(ab, hermite):
    """Among how many blocks of threads the ket pairs of a chunk are divided, to fill the device."""
    tile, row_blocks = reverse_tile(ab.facts.nab, columns(ab, hermite))
    blocks = ab.npair * row_blocks * -(-columns(ab, hermite) // (tile.nt * tile.warps))
    return min(REVERSE.most_parts, -(-FEWEST_BLOCKS // max(1, blocks)))


def chunks(bra, ket, hermite, counts, budget, prims=REVERSE.few_prims):
    """Slices (ab, cd) of a rectangle whose r and U take about `budget` bytes, without ket pairs that never count.

    U has the functions `hermite`. `counts` says with how many ket pairs each bra pair counts. As few slices of the ket
    list are made as allow so many primitive pairs of the bra.
    """
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
