"""Random blocks and builds of J and K on the emulated GPU of `emulator`; see `strategies` for seeds.

Tunable numbers are at their borders, so that small molecules take the ways of large ones.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from unittest.mock import patch

import numpy as np
import pytest
from emulator import running
from fuzzing.test_fock import Sequence, check_builds, sequences
from gpu.kernels.test_digest_rows import digested
from hypothesis import strategies as st
from random_blocks import NAO, first_aos, right
from strategies import fuzz, report

from md4.gpu import dealing, digest, paths, quartet_lists, sums, tracks
from md4.gpu.kernels import digest_in_place, digestion, fused, fused_wide, recurrence
from md4.gpu.tuning import SELECT

MOST_INTEGRALS = 1 << 10  # of a block

# Numbers that are drawn, by the modules that use them, and their values.
NUMBERS = {
    paths: {"FEWEST_QUARTETS": [1, 1, 1 << 16]},
    quartet_lists: {"SELECT": [replace(SELECT, entries=entries) for entries in (7, 1 << 26)]},
    digest: {"SELECT": [replace(SELECT, single_seconds=0.0)]},
    sums: {"ORDERED_FUNCTIONS": [0, 25, 1000], "BOUND_STEP": [1, 2, 40]},
    dealing: {"TRACK_SECONDS": [0.0, 2e-3]},
    tracks: {"MOST_TRACKS": [1, 3]},
    digest_in_place: {"FEWEST_ITEMS": [1, 1 << 14], "MOST_BLOCKS": [1, 2, 1 << 13], "RUN": [1, 2, 8, 32]},
    digestion: {"LANE_INTEGRALS": [1, 256, 1 << 20], "FEWEST_WARPS": [1, 3, 1 << 13]},
    fused: {"FEWEST_KETS": [1, 8], "GROUPS": [1, 8], "CONTRACTED_GROUPS": [1, 4]},
    fused_wide: {"FEWEST_FUNCTIONS": [1, 21], "FEWEST_KETS": [1, 8]},
    recurrence: {"REGISTERS_L": [-1, 4, 18]},
}  # fmt: skip


@st.composite
def tunings(draw):
    """Numbers of some modules: tuples (module, name, value)."""
    chosen = draw(st.lists(st.sampled_from(list(NUMBERS)), max_size=6, unique=True))
    return tuple(
        (module, name, draw(st.sampled_from(values)))
        for module in chosen for name, values in NUMBERS[module].items()
    )  # fmt: skip


def tuned(stack, tuning):
    """Sets the numbers until a stack ends."""
    for change in tuning:
        stack.enter_context(patch.object(*change))


# blocks ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A block of random integrals that is digested.

    Attributes
    ----------
    shape : tuple of int
        Functions of the four shells.
    pairs : tuple of int
        Bra pairs and ket pairs; the same ones where `triangle`.
    counts : tuple of int
        Numbers of matrices X and Y.
    limited : bool
        Each bra pair counts with the first ket pairs only.
    """

    shape: tuple
    pairs: tuple
    triangle: bool
    counts: tuple
    limited: bool
    tuning: tuple
    seed: int


@st.composite
def blocks(draw):
    """One shell at most has many functions: contractions may give it more than a warp has lanes.

    It is not b: in a pair the first shell is the one of higher l or of more contracted functions, so that a quartet
    with more than 32 functions b is too large for a thread.
    """
    shape = [draw(st.sampled_from([1, 1, 2, 2, 3, 5])) for _ in range(4)]
    if draw(st.booleans()):
        shape = [draw(st.sampled_from([1, 1, 1, 2])) for _ in range(4)]
        shape[draw(st.sampled_from([0, 2, 2, 3]))] = draw(st.sampled_from([31, 32, 33, 34, 36]))
    triangle = prod(shape[:2]) <= 9 and draw(st.integers(0, 3)) == 3
    if triangle:
        shape[2:] = shape[:2]
        pairs = 2 * (draw(st.integers(1, 6)),)
    else:
        pairs = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 7, 8, 9, 31, 32, 33]))
        pairs = pairs[0], max(1, min(pairs[1], MOST_INTEGRALS // (prod(shape) * pairs[0])))
    counts = draw(st.sampled_from([(1, 1), (1, 0), (0, 1), (2, 1), (1, 2)]))
    others = draw(st.booleans()), draw(tunings()), draw(st.integers(0, 10**6))
    return Block(tuple(shape), pairs, triangle, counts, *others)


def in_runs(rng, aos):
    """First AOs of which neighbours often have the same first shell."""
    aos[:, 0] = aos[np.sort(rng.integers(0, len(aos), len(aos))), 0]
    return aos


def check_block(block):
    """X and Y are those of NumPy. What does not count is not looked at."""
    rng, (nbra, nket), shape = np.random.default_rng(block.seed), block.pairs, block.shape
    integrals, live = rng.normal(size=(nbra, nket, *shape)), np.ones((nbra, nket), dtype=bool)
    aos = [in_runs(rng, first_aos(rng, part, count)) for part, count in ((shape[:2], nbra), (shape[2:], nket))]
    aos[1] = aos[0] if block.triangle else aos[1]
    limits = None
    if block.limited:
        limits = rng.integers(0, nket + 1, nbra).astype(np.int32)
        live = np.arange(nket) < limits[:, None]
    d, half = (rng.normal(size=(count, NAO, NAO)) for count in block.counts)
    twice = half + half.swapaxes(1, 2)
    integrals[~live] = 0.0
    expected = right(integrals, aos, d, twice, block.triangle)
    integrals[~live] = np.nan
    with ExitStack() as stack:
        tuned(stack, block.tuning)
        found = digested(integrals, aos, d, twice, block.triangle, limits)
    # Y of a pair may stand in either triangle
    for ours, theirs in zip(map(folded, found, (False, True)), map(folded, expected, (False, True))):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13 * max(1.0, abs(theirs).max(initial=0.0)))


def folded(matrices, both):
    """Matrices, plus their transposes if `both`."""
    return matrices + matrices.swapaxes(1, 2) if both else matrices


def test_blocks():
    fuzz(check_block, blocks(), 20)
    report(check_block)


@pytest.mark.slow
def test_blocks_at_length():
    fuzz(check_block, blocks(), 1000)
    report(check_block)


# builds ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Builds on a device of a unit; streams of some numbers are late, see `emulator.running`."""

    sequence: Sequence
    unit: str
    late: frozenset
    tuning: tuple


@st.composite
def cases(draw):
    kinds = [(0, 1, 1), (0, 2, 2), (1, 1, 1), (1, 2, 1)]
    late = draw(st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, 4))))
    unit = draw(st.sampled_from(["dmma16", "dmma16", "dmma8"]))
    return Case(draw(sequences(most=5, kinds=kinds, backend="cuda")), unit, late, draw(tunings()))


def check_case(case):
    """J and K are right, as `check_builds` has it."""
    with ExitStack() as stack:
        tuned(stack, case.tuning)
        stack.enter_context(running(case.unit, case.late))
        check_builds(case.sequence)


@pytest.mark.thorough
def test_builds():
    fuzz(check_case, cases(), 5)
    report(check_builds)


@pytest.mark.slow
def test_builds_at_length():
    fuzz(check_case, cases(), 300)
    report(check_builds)
