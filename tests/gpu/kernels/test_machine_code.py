"""Every kernel compiles to machine code for A100, H100 and B200, within its budget, without a GPU.

For V100 and T4 (where the toolkit still has them) all but some that J and K need.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context

import pytest
from offline import (
    LENGTHS,
    REGISTERS,
    UNITS,
    compile_ptx,
    every_variant,
    factories,
    find_ptxas,
    known_architectures,
    sm,
    usage,
    used_by_few_centres,
    used_variants,
)

from md4.gpu.compile import Variant
from md4.gpu.compile_worker import hasten
from md4.gpu.dry_run import BLOCK_SHARED
from md4.gpu.hermite_rows import row_parts
from md4.gpu.kernels.digest_in_place import digest_in_place, functions
from md4.gpu.kernels.hermite_coulomb import correlation_by_warps, functions_of_a_lane
from md4.gpu.kernels.reverse_lanes import reverse_lanes
from md4.gpu.kernels.shell_pairs import pair_primitives
from md4.gpu.kernels.thread_quartet import thread_quartet_integrals
from md4.method.operators import OPERATORS

# What launchers ask for is found once for all of these.
pytestmark = pytest.mark.xdist_group("offline")

CURRENT = [cc for cc in UNITS if cc >= (8, 0)]
OLDER = [cc for cc in UNITS if cc < (8, 0)]
# The architecture for which samples have the smallest and the largest variant of each kernel, and every operator.
WITH_LARGEST = (9, 0)
needs_ptxas = pytest.mark.skipif(
    find_ptxas() is None, reason="ptxas is missing; it comes with the extra cu12, or with nvidia-cuda-nvcc"
)
# Kernels, by the factory's name, for which compute capability 8.0 is needed: they copy asynchronously, use tensor
# instructions whatever the unit, or nothing uses them without those.
ASYNCHRONOUS = {"correlation_by_warps", "correlation_by_threads", "digest_rows", "digest_mirrored"}

# Bytes that a thread of a kernel may spill, by the factory's name; all other kernels none. The tables come from what
# ptxas 13.0 reports for all variants on all three.
SPILLS = {
    "r_by_group": 300,  # 288 for erfc on sm_80, 8 at most for other operators
    "fused_transforms": 180,  # 172 of contracted bras, two fragments of rows, five blocks of q, on sm_90
    "fused_wide": 180,  # 176 at two fragments of rows a warp and six blocks of cd, on sm_100; 152 at most on sm_90
    "bra_transform": 76,  # 72 turned, eleven blocks of rows and four of columns, on sm_80; 40 at most on sm_90
    # 352 for erfc on sm_80, of derivatives, 300 otherwise; 276 for Coulomb at (4, 4), derivatives in a plane, on sm_100
    "correlation_by_threads": 360,
    # 380 at (12, 4) in a plane, 208 at (8, 5) otherwise, on sm_90; 52 before addends were checked, which costs no time
    # (bench/LAB_NOTES.md)
    "correlation_by_warps": 390,
    "whole_panel": 240,  # 232 of contracted bras at four blocks of rows on sm_100; 28 at most on sm_90
    "ket_transform": 130,  # turned, on sm_100: 128 at seven blocks of rows and six of columns
    "digest_rows": 100,  # at tiles of 5 x 7 on sm_100, 60 at 7 x 3 on sm_90
    # at three and eight blocks on sm_90, 212 at most otherwise
    "reverse_fused": 270,
    "derivative_norms": 12,  # 8 on sm_90
    # 200 on sm_80, 168 on sm_90 where norms of thousands of shells stay in memory, else 76 at most; none of it is in
    # the loop over primitive pairs
    "select_kets": 205,
    "half_exchange": 20,  # two blocks of functions on sm_80; 8 on sm_90
    "exchange_derivatives": 60,  # on sm_100; 8 on sm_90
    "digest_mirrored": 160,  # 156 at tiles of 5 x (4 + 2) on sm_80, 144 at 3 x (6 + 4) on sm_100
}


# The same of lanes of gradients by l of the ket, whose polynomials registers do not hold beside Z: 344 bytes at (dd|
# with 35 functions p on sm_80, 400 with erfc, 576 at (fd|, 916 at (gd| on sm_100. Up to l = 3 it is 428 with erfc at
# (ss|, whose [0]^(m) need more registers than Z and W, and 36 with Coulomb's.
LANE_SPILLS, SMALL_LANE_SPILLS = {4: 410, 5: 580, 6: 920}, {"coulomb": 44}
# The same of a thread a quartet by L, 64 up to L = 4: 464 bytes at (gs|ps) on sm_90, 2920 at (dd|ds), Gaussian times
# Coulomb, on sm_100, 2896 with Coulomb's. Faster than the fused kernel all the same (bench/results/low_l6.log). Kernels
# with large stacks have been assembled with other options (`OPTIONS` in md4/gpu/machine_code.py), as on a GPU.
THREAD_QUARTET_SPILLS = {5: 490, 6: 2930}
# The same where single shells take part and several blocks share a multiprocessor, which makes up for it: 200 bytes at
# (pp|d), Gaussian times Coulomb, on sm_80, 184 with Coulomb's (bench/results/three_centre_kernels.log).
FEW_SPILLS = 210
# With digestion in the same kernel: 664 bytes at (dp|ds), 744 with erfc, and 3428 at (dd|ds), Gaussian operator, 3364
# with Coulomb's. Several blocks share a multiprocessor up to L = 4 and 45 integrals, so that 380, 584, 788 and 1692 are
# spilled from L = 1 on with erfc, from L = 2 on in Cartesian functions and in orders that builds do not take; Coulomb's
# has 656 at (ss|fs) and 1676 at (ss|gs). All on sm_80.
IN_PLACE_SPILLS = {1: 380, 2: 590, 3: 790, 4: 1700, 5: 750, 6: 3430}
# The same in FP32, where several blocks share a multiprocessor, on sm_80: 336 bytes at L = 1, 520 at L = 2 and 328 at
# L = 3 for erfc, 500 at L = 4, 644 at (dp|pp), 152 at L = 6.
IN_PLACE_SINGLE_SPILLS = {1: 340, 2: 520, 3: 330, 4: 500, 5: 650, 6: 160}
# And for kets of many functions, whose part of the densities a thread keeps, and from f functions on: 780 at (ss|dp)
# and 1192 at (ss|gs), Cartesian, on sm_80, 480 at L = 5, 672 at (dp|fs) on sm_90.
MANY_FUNCTIONS = 11
WIDE_SINGLE_SPILLS = {3: 790, 4: 1200, 5: 490, 6: 680}


def budget(variant):
    """Bytes that a variant may spill."""
    if variant.factory is thread_quartet_integrals:
        several = variant.facts[13:] and variant.facts[13] > 1
        return FEW_SPILLS if several else THREAD_QUARTET_SPILLS.get(total_l(variant), 64)
    if variant.factory is digest_in_place:
        lc, cc, ld, cd, pure = variant.facts[4:9]
        many = functions(lc, pure) * cc * functions(ld, pure) * cd >= MANY_FUNCTIONS
        wide = many or max(variant.facts[0:8:2]) > 2
        single = WIDE_SINGLE_SPILLS if wide else IN_PLACE_SINGLE_SPILLS
        return (single if variant.facts[-1] else IN_PLACE_SPILLS).get(total_l(variant), 64)
    if variant.factory is reverse_lanes:
        lc, ld, kind = *variant.facts[:2], variant.facts[-1]
        return LANE_SPILLS.get(lc + ld, SMALL_LANE_SPILLS.get(kind, 440))
    return SPILLS.get(variant.factory.__name__, 0)


def total_l(variant):
    """L of the class of a thread a quartet, whose facts begin with l and nctr of each shell."""
    return sum(variant.facts[0:8:2])


def excess(variant, found, dynamic, cc):
    """What is wrong with a compiled variant; an empty string if nothing."""
    wrong = []
    if found.registers > REGISTERS:
        wrong.append(f"{found.registers} registers")
    if found.spill > budget(variant):
        wrong.append(f"{found.spill} bytes of spills, {budget(variant)} allowed")
    if found.shared + dynamic > BLOCK_SHARED[cc]:
        wrong.append(f"{found.shared} + {dynamic} bytes of shared memory")
    return ", ".join(wrong)


def check(wanted, processes):
    """Compiles `wanted`, {capability: {variant: its dynamic shared memory}}, each variant once, and checks budgets."""
    capabilities, wrong = {}, []
    for cc, variants in wanted.items():
        for variant in variants:
            capabilities.setdefault(variant, []).append(cc)
    with ProcessPoolExecutor(processes, get_context("spawn"), hasten) as pool:
        runs = {variant: pool.submit(usage, variant, ccs) for variant, ccs in capabilities.items()}
        for variant, run in runs.items():
            if error := run.exception():
                wrong.append(f"{variant.name} for {', '.join(map(sm, capabilities[variant]))}: {error}")
                continue
            for cc, found in run.result().items():
                dynamic = wanted[cc][variant]
                print(f"{variant.name:<45} {sm(cc)} {found}, {dynamic} dynamic")
                if text := excess(variant, found, dynamic, cc):
                    wrong.append(f"{variant.name} for {sm(cc)}: {text}")
    assert not wrong, "\n".join(wrong)


def sample(cc):
    """Some variants of every kernel; for one architecture, every operator, too."""
    out = some_of_each(used(cc), cc)
    for kind in OPERATORS[1:] if cc == WITH_LARGEST else ():
        others = used_variants(UNITS[cc], kind, lmax=1, lengths=LENGTHS[:1])
        out |= {v: others[v] for v in [v for v in others if v.factory.__name__ == "r_in_registers"][-1:]}
    return out


def some_of_each(variants, cc):
    """The variant in the middle of each kernel's, with its shared memory; for one architecture the first and last, too.

    The last one's code is the longest. `test_every_variant` compiles all.
    """
    families = {}
    for variant in sorted(variants, key=lambda v: [str(f).rjust(4) for f in v.facts]):
        families.setdefault(variant.factory.__name__, []).append(variant)
    chosen = []
    for family in families.values():
        chosen += [family[len(family) // 2]] + ([family[0], family[-1]] if cc == WITH_LARGEST else [])
    return {v: variants[v] for v in chosen}


def sample_of_few_centres(cc):
    """Some of the variants that only integrals over three and two centres use."""
    return some_of_each({v: n for v, n in used_by_few_centres(UNITS[cc]).items() if v not in used(cc)}, cc)


def used(cc):
    """Variants for the Coulomb operator."""
    return used_by(UNITS[cc])


@cache
def used_by(unit):
    """The same of an arithmetic unit."""
    return used_variants(unit) | used_variants("fma", lmax=1)


@needs_ptxas
def test_one_kernel():
    """By the same way as all others, within seconds."""
    variant = Variant(pair_primitives, ())
    for cc, found in usage(variant, CURRENT).items():
        assert not excess(variant, found, 0, cc)


@pytest.mark.thorough
@needs_ptxas
def test_sample_of_every_kernel():
    """On older devices, as far as the toolkit knows them, without those that copy asynchronously."""
    wanted = {cc: sample(cc) for cc in CURRENT}
    for cc in OLDER:
        if sm(cc) in known_architectures():
            wanted[cc] = {v: n for v, n in sample(cc).items() if v.factory.__name__ not in ASYNCHRONOUS}
    check(wanted, processes=2)


@pytest.mark.thorough
@needs_ptxas
def test_sample_of_few_centres():
    check({cc: sample_of_few_centres(cc) for cc in CURRENT}, processes=2)


@pytest.mark.slow
@needs_ptxas
def test_every_variant():
    check({cc: every_variant(cc) for cc in CURRENT}, processes=os.cpu_count())


@pytest.mark.thorough
@needs_ptxas
def test_j_alone_of_a_molecule_in_a_plane():
    """Degrees whose functions of both parities go to the warps of one kernel, which do not spill for that."""
    lanes = {l: functions_of_a_lane(list(map(len, row_parts(l, True))))[0] for l in (7, 10)}
    variants = [Variant(correlation_by_warps, (l, lane, True)) for l, lane in lanes.items()]
    check({cc: dict.fromkeys(variants, 0) for cc in CURRENT}, processes=1)


@pytest.mark.thorough
def test_shared_memory_of_every_variant():
    """What launchers ask for fits a block, of all classes up to (ii|ii)."""
    of_all = ((cc, used(cc) | used_by_few_centres(UNITS[cc])) for cc in CURRENT)
    large = [(v.name, sm(cc), n) for cc, found in of_all for v, n in found.items() if n > BLOCK_SHARED[cc]]
    assert not large


@pytest.mark.sample("sm_90")
@pytest.mark.parametrize("cc", CURRENT, ids=sm)
def test_shared_memory_of_general_contractions(cc):
    """Also of kets of twelve contracted p functions, whose Y_cd and rows would not fit beside the integrals."""
    found = used_variants(UNITS[cc], lmax=1, lengths=LENGTHS[-1:], general=[(0, 7), (1, 12)])
    assert digest_in_place in {variant.factory for variant in found}
    assert not [(v.name, n) for v, n in found.items() if n > BLOCK_SHARED[cc]]


@pytest.mark.thorough
def test_shared_memory_on_older_devices():
    """Of integrals the same, but for the r that docs/compatibility.md names."""
    asked = [(v, cc, n) for cc in OLDER for v, n in used(cc).items() if v.factory.__name__ not in ASYNCHRONOUS]
    large = {(v.name, cc) for v, cc, n in asked if n > BLOCK_SHARED[cc]}
    assert large == {(f"r_by_axis-{l}-coulomb", (7, 5)) for l in (10, 13, 17)}


def test_both_passes_over_primitive_pairs_take_the_same_decision():
    """One vote in the text: no compiler made a loop of its own for counting, whose rounding might differ."""
    for cc, ptx in compile_ptx(Variant(pair_primitives, ()), CURRENT).items():
        assert ptx.count("vote.sync.ballot") == 1, sm(cc)


@pytest.mark.thorough
def test_every_kernel_is_used():
    """No factory of md4.gpu.kernels is left out of the sample."""
    assert factories() <= {v.factory.__name__ for v in (*sample((9, 0)), *sample_of_few_centres((9, 0)))}
