"""Vectors: their width on this processor and on one with narrower registers, and the operations on them."""

import os
import subprocess
import sys

import numpy as np
import pytest
from molecules import WATER, molecule
from numba import config, njit
from numba.core.registry import cpu_target
from places import ROOT

import md4
from md4.cpu.emit import vectors
from md4.cpu.emit.vectors import LANES, lanes_of_host


def test_lanes_fill_a_register():
    """One of the processor for which Numba compiles, under whose features compiled code is kept."""
    features = cpu_target.target_context.codegen().magic_tuple()[2]
    assert LANES == lanes_of_host() == (8 if "+avx512f" in features.split(",") else 4)


@pytest.mark.parametrize(("features", "lanes"), [("", 4), ("+avx2,+fma", 4), ("+avx512f,+fma", 8), ("-avx512f", 4)])
def test_lanes_of_another_processor(features, lanes, monkeypatch):
    monkeypatch.setattr(config, "CPU_FEATURES", features)
    assert lanes_of_host() == lanes


def test_operations():
    neighbour, far = vectors.make_add_lanes(1), vectors.make_add_lanes(2)

    @njit
    def all_of_them(a, b, c, out):
        x, y, z = vectors.load(a, 1), vectors.load(b, 0), vectors.load(c, 0)
        results = (
            vectors.subtract(x, y), vectors.multiply(x, y), vectors.negative(x),
            vectors.fma(x, y, z), vectors.magnitude(x), vectors.noise_removed(x, vectors.magnitude(y)),
            vectors.broadcast(2.5), neighbour(x), far(x),
        )  # fmt: skip
        for n in range(len(results)):
            vectors.store(out, n * vectors.LANES, results[n])
        return vectors.total(x)

    rng = np.random.default_rng(0)
    a, b, c = rng.normal(size=LANES + 1), rng.normal(size=LANES), rng.normal(size=LANES)
    out, x, lanes = np.empty((9, LANES)), a[1:], np.arange(LANES)
    b[0] = x[0]  # not above its own modulus, so noise
    total = all_of_them(a, b, c, out.reshape(-1))
    np.testing.assert_allclose(total, x.sum(), rtol=1e-14)
    expected = (
        x - b, x * b, -x, x * b + c, abs(x), np.where(abs(x) > abs(b), x, 0.0), np.full(LANES, 2.5),
        x + x[lanes ^ 1], x + x[lanes ^ 2],
    )  # fmt: skip
    np.testing.assert_allclose(out, expected, rtol=1e-14, atol=1e-14)
    assert out[5, 0] == 0.0


@pytest.mark.parametrize("by_lane", [True, False])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("height", [1, 2])
def test_tiles(height, width, by_lane):
    """Sums over some elements of rows of H, which replace what is there or are added to it."""
    tile, rng, count = vectors.make_tile(height, width, by_lane), np.random.default_rng(width), 5
    h = rng.normal(size=(2 + height * count, LANES) if by_lane else 2 + height * count)
    offsets = rng.integers(0, 9, 7).astype(np.int32) * LANES
    columns = np.arange(width + 3, dtype=np.int32)[::-1] * 9 * LANES
    source = rng.normal(size=(9 * (width + 3), LANES))
    a, b = rng.permutation(height + 1), rng.permutation(width + 2)

    @njit
    def run(h, offsets, source, columns, target, a, b, first, last, other, more):
        lanes, da = vectors.LANES, len(b) * vectors.LANES
        below = (other - 1) * (last - first)
        tile(h, 1, offsets, first, last, below, source, columns, 2, target, lanes, a, 1, other, da, b, lanes, more)

    for more in (False, True):
        for here in (count, 0):  # the place of h is that of the second element, and the first element of a row is 1
            target = rng.normal(size=(1 + len(a) * len(b), LANES))
            expected = target.copy()
            for i in range(height):
                for j in range(width):
                    place = 1 + a[1 + i] * len(b) + b[2 + j]
                    sums = expected[place] if more else np.zeros(LANES)
                    for n in range(1, 1 + here):
                        sums = sums + h[1 + n + i * here] * source[(columns[2 + j] + offsets[n]) // LANES]
                    expected[place] = sums
            arrays = h.reshape(-1), offsets, source.reshape(-1), columns, target.reshape(-1), a, b
            run(*arrays, 1, 1 + here, height, more)
            np.testing.assert_allclose(target, expected, rtol=0, atol=1e-13)


NARROW = """
import sys
import numpy, md4
from md4.cpu.emit.vectors import LANES
sys.path.insert(0, sys.argv[2])
from molecules import WATER, molecule
water = molecule(WATER, "6-31g*")
dm = numpy.cos(numpy.arange(water.nao**2.0)).reshape(water.nao, -1)
tensor, (j, k) = md4.int2e(water, "s8", backend="cpu"), md4.get_jk(water, dm, 0, backend="cpu")
alone = md4.get_jk(water, dm, 0, with_k=False, backend="cpu")[0]
numpy.savez(sys.argv[1], lanes=LANES, tensor=tensor, j=j, k=k, alone=alone)
"""


@pytest.mark.thorough
def test_narrow_registers(tmp_path):
    """Code for processors without AVX-512 has four lanes."""
    command = [sys.executable, "-c", NARROW, str(tmp_path / "results.npz"), str(ROOT / "tests")]
    numba = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma"}
    env = os.environ | numba | {"MD4_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "results.npz")
    assert found["lanes"] == 4
    water = molecule(WATER, "6-31g*")
    dm = np.cos(np.arange(water.nao**2.0)).reshape(water.nao, -1)
    j, k = md4.get_jk(water, dm, 0, backend="cpu")
    expected = {"tensor": md4.int2e(water, "s8", backend="cpu"), "j": j, "k": k, "alone": j}
    for name, theirs in expected.items():
        np.testing.assert_allclose(found[name], theirs, rtol=0, atol=1e-12 * abs(theirs).max())
