"""How J alone is divided among threads, warps and blocks, and where they find r[p+q]."""


import numpy as np
import pytest

from md4.gpu.emit.correlation import Walk, even_ranges
from md4.gpu.hermite_rows import row_ordinals
from md4.gpu.kernels.coulomb_threads import (
    KET_FUNCTIONS,
    bras_of_a_block,
    by_threads,
    ket_parts,
    stage_bytes,
    threads_of_a_block,
)
from md4.gpu.kernels.hermite_coulomb import LANE_FUNCTIONS, functions_of_a_lane, kets_of_a_warp
from md4.method.angular import hermite_ordinal, packed_hermite, sum_ordinal


@pytest.mark.parametrize("l_ket", range(7))
def test_walk(l_ket):
    """The addresses of r[p+q], from one group of a degree and an s of q to the next."""
    for word in packed_hermite(6).tolist():
        walk, found = Walk(0, word), []
        for degree in range(l_ket + 1):
            for s in range(degree + 1):
                found += [walk.row + 8 * hermite_ordinal(degree - s, s - z, z) for z in range(s + 1)]
                walk.next_s()
            walk.next_degree()
        assert found == [8 * sum_ordinal(word, q) for q in packed_hermite(l_ket).tolist()]


@pytest.mark.parametrize("count", [1, 4, 10, 20, 35, 56, 84, 120, 165, 455])
def test_functions_of_a_warp(count):
    """Ranges and lanes cover all functions."""
    assert [n for r in even_ranges(count, 32) for n in r] == list(range(count))
    assert all(len(r) <= 32 and r[0] % 2 == 0 for r in even_ranges(count, 32))
    for parts in ([count], [count, count - 1], [count, count // 2]):
        functions, warps = functions_of_a_lane(parts)
        assert functions <= LANE_FUNCTIONS
        for part, some in zip(parts, warps, strict=True):
            assert 32 * functions * some >= part > 32 * functions * (some - 1)


@pytest.mark.parametrize("count", [1, 31, 1000, 10**6])
def test_work_of_a_block(count):
    assert 1 <= kets_of_a_warp(count, 7) <= count
    for filled in (0.0, 1e-3, 1.0):
        assert 1 <= bras_of_a_block(count, 7, filled) <= count


def test_blocks_can_be_counted():
    """A launch over lists of tens of millions of primitive pairs has fewer than 2^31 blocks."""
    nbra, blocks = 50_000_000, 400_000
    assert -(-nbra // bras_of_a_block(nbra, blocks, 1.0)) * blocks < 1 << 31


@pytest.mark.parametrize("mirrored", [False, True])
def test_degrees_of_a_thread(mirrored):
    """All functions of a ket have a part, and r of a warp fits shared memory."""
    for l_bra in range(17):
        for l_ket in (l for l in range(l_bra + 1) if by_threads(l_bra, l)):
            parts = ket_parts(l_ket, mirrored)
            assert [q for part in parts for q in part] == np.flatnonzero(row_ordinals(l_ket, mirrored) >= 0).tolist()
            assert all(len(part) <= KET_FUNCTIONS for part in parts)
            for single in (False, True):
                warps = threads_of_a_block(l_bra + l_ket, single, mirrored) // 32
                assert warps * (stage_bytes(l_bra + l_ket, single, mirrored) + 1152) <= 163 << 10
