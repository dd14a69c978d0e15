"""Gamma H by polynomials, beside the H of `md4.method.hermite`."""

from itertools import product

import numpy as np
import pytest
from emulator.intrinsics import called
from plain_h import plain_h

from md4.gpu.emit.polynomials import components, product_polynomial, to_hermite
from md4.gpu.emit.values import FP64, tuple_of, word
from md4.method.angular import hermite_triples


def both(lc, ld, pure, p, from_c, from_d, gamma):
    """Gamma H of the Hermite functions up to lc + ld by polynomials, and by H."""
    of_c, of_d, triples = components(lc, pure), components(ld, pure), hermite_triples(lc + ld)

    def write(numbers):
        of_gamma, c, d, half = numbers[: gamma.size], numbers[-7:-4], numbers[-4:-1], numbers[-1]
        w = product_polynomial(lambda n: of_gamma[n :: len(of_d)], of_c, of_d, lc, ld, c, d)
        to_hermite(w, lc + ld, half)
        return [w.get(tuple(powers), 0.0) for powers in triples.tolist()]

    given = *gamma.reshape(-1).tolist(), *from_c, *from_d, 0.5 / p
    declared = word(tuple_of(FP64, len(triples)), tuple_of(FP64, len(given)))
    found = (0.5 / p) ** triples.sum(axis=1) * called(declared(write), None, (given,))
    h = plain_h(lc, ld, pure, p, from_c, from_d, product(range(gamma.size), range(len(triples))))
    return found, gamma.reshape(-1) @ h.reshape(gamma.size, -1)


@pytest.mark.parametrize("pure", [True, False])
@pytest.mark.parametrize("lc, ld", [(0, 0), (1, 0), (3, 0), (1, 1), (2, 1), (2, 2), (4, 1), (3, 2)])
def test_gamma_h(lc, ld, pure):
    rng = np.random.default_rng(lc + ld)
    gamma = rng.normal(size=(len(components(lc, pure)), len(components(ld, pure))))
    found, right = both(lc, ld, pure, 2.0, *rng.normal(size=(2, 3)).tolist(), gamma)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-13 * abs(right).max())


@pytest.mark.parametrize("lc, ld", [(1, 1), (2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("tight", [0, 1])
def test_tight_beside_diffuse(lc, ld, tight):
    """P is 1e7 times as close to one centre as to the other one, whose polynomials would lose that many digits."""
    rng, p = np.random.default_rng(lc + ld), 1e8
    from_c, from_d = rng.normal(size=(2, 3)) * np.array([7e-7, 7.0] if tight == 0 else [7.0, 7e-7])[:, None]
    gamma = rng.normal(size=(2 * lc + 1, 2 * ld + 1))
    found, right = (w * p ** (0.5 * hermite_triples(lc + ld).sum(axis=1))
                    for w in both(lc, ld, True, p, from_c.tolist(), from_d.tolist(), gamma))  # fmt: skip
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-13 * abs(right).max())
