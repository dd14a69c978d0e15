"""Every kernel compiles to machine code for A100, H100 and B200, within its budget, without a GPU."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from offline import (
    REGISTERS,
    SHARED_LIMIT,
    UNITS,
    every_variant,
    find_ptxas,
    other_variants,
    transform_variants,
    usage,
)

architectures = pytest.mark.parametrize("cc", UNITS, ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
needs_ptxas = pytest.mark.skipif(find_ptxas() is None, reason="ptxas is missing; it comes with the extra cu13")

# Bytes that a thread of a kernel may spill, by the beginning of the variant's name, first match. All else: none.
SPILLS = {
    "r_integrals": 400,
    "bra_transform": 160,
    "ket_transform": 64,
}


def budget(variant):
    """Bytes that a variant may spill."""
    return next((spill for start, spill in SPILLS.items() if variant.name.startswith(start)), 0)


def excess(variant, found, dynamic, cc):
    """What is wrong with a compiled variant; an empty string if nothing."""
    wrong = []
    if found.registers > REGISTERS:
        wrong.append(f"{found.registers} registers")
    if found.spill > budget(variant):
        wrong.append(f"{found.spill} bytes of spills, {budget(variant)} allowed")
    if found.shared + dynamic > SHARED_LIMIT[cc]:
        wrong.append(f"{found.shared} + {dynamic} bytes of shared memory")
    return ", ".join(wrong)


def check(variants, cc, processes=1):
    """Compiles `variants`, a dict from variant to its dynamic shared memory, and checks their budgets."""
    jobs = [(variant, cc) for variant in variants]
    if processes == 1:
        found = [usage(job) for job in jobs]
    else:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(usage, jobs))
    for variant, this in zip(variants, found):
        print(f"{variant.name:<45} sm_{cc[0]}{cc[1]} {this}, {variants[variant]} dynamic")
    wrong = {v.name: text for v, this in zip(variants, found) if (text := excess(v, this, variants[v], cc))}
    assert not wrong, wrong


def sample(cc):
    """Some variants of every kernel: all that are one of a kind, the ends and the middle of each ladder."""
    out = dict(transform_variants("fma"))
    for name in ("bra_transform", "ket_transform"):
        family = {v: s for v, s in transform_variants(UNITS[cc]).items() if v.factory.__name__ == name}
        ordered = sorted(family, key=lambda v: v.facts)
        out |= {v: family[v] for v in (ordered[0], ordered[len(ordered) // 2], ordered[-1])}
    others = other_variants()
    chosen = {(0, "coulomb"), (24, "coulomb"), (8, "erf"), (12, "erfc"), (5, "slater"), (16, "gaussian"), (3, "yukawa")}
    return out | {v: s for v, s in others.items() if v.factory.__name__ != "r_integrals" or v.facts[:2] in chosen}


@needs_ptxas
@architectures
def test_sample_of_every_kernel(cc):
    variants = sample(cc)
    kernels = {v.factory.__name__ for v in variants}
    assert kernels == {
        "bra_transform", "ket_transform", "plain_bra_transform", "plain_ket_transform", "r_integrals", "h_panels",
        "scatter_block",
    }  # fmt: skip
    check(variants, cc)


@pytest.mark.slow
@needs_ptxas
@architectures
def test_every_variant(cc):
    check(every_variant(cc), cc, processes=2)


@architectures
def test_shared_memory_of_every_variant(cc):
    """What launchers ask for fits a block, of all classes up to (ii|ii) and of (kk|kk)."""
    for shared in (every_variant(cc), transform_variants(UNITS[cc], lmax=7)):
        assert max(shared.values()) <= SHARED_LIMIT[cc]
