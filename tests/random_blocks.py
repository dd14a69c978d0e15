"""Blocks of random numbers and their digestion by NumPy, for tests of the kernels that digest."""

import numpy as np

from md4.gpu.buffers import Buffer, copy_to_device

NAO = 40


def right(integrals, aos, d, twice, triangle):
    """X and Y of all matrices; the equations of `md4.method.digestion`."""
    x, y, (na, nb, nc, nd) = np.zeros_like(d), np.zeros_like(twice), integrals.shape[2:]
    for i, k in np.ndindex(integrals.shape[:2]):
        if triangle and k > i:
            continue
        (first_a, first_b), (first_c, first_d) = aos[0][i], aos[1][k]
        weight = 0.5 ** sum(map(int, (first_a == first_b, first_c == first_d, triangle and i == k)))
        quartet, at = weight * integrals[i, k], [(first_a, na), (first_b, nb), (first_c, nc), (first_d, nd)]
        a, b, c, d_ = (slice(first, first + n) for first, n in at)
        x[:, a, d_] += np.einsum("abcd,sbc->sad", quartet, d[:, b, c])
        x[:, b, d_] += np.einsum("abcd,sac->sbd", quartet, d[:, a, c])
        x[:, a, c] += np.einsum("abcd,sbd->sac", quartet, d[:, b, d_])
        x[:, b, c] += np.einsum("abcd,sad->sbc", quartet, d[:, a, d_])
        y[:, a, b] += np.einsum("abcd,scd->sab", quartet, twice[:, c, d_])
        y[:, c, d_] += np.einsum("abcd,sab->scd", quartet, twice[:, a, b])
    return x, y


def on_device(context, array):
    """A copy in the pool's memory."""
    owner = context.pool.get(max(1, array.size))
    copy_to_device(owner.pointer, np.ascontiguousarray(array), context.stream)
    return Buffer(owner.pointer, array.shape, array.itemsize, owner)


def first_aos(rng, functions, count):
    """First AOs of random shells; of the first pair both are the same one."""
    aos = np.stack([rng.integers(0, NAO - n + 1, count) for n in functions], axis=1)
    if functions[0] == functions[1]:
        aos[0] = aos[0, 0]
    return aos
