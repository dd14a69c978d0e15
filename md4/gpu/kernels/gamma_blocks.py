"""Gamma of gradients for listed shell quartets; see `md4.gpu.kernels.reverse_sums` for the equation.

Primitive quartets of a shell quartet have the same Gamma, whose densities lie far apart in memory. So it is made once.
"""

from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, cuda, i64, jit_device
from md4.gpu.emit.scalars import quotient
from md4.gpu.kernels.reverse_sums import Densities, FunctionPairs

THREADS = 128


class ShellQuartets(NamedTuple):
    """Numbers of both pairs of shell quartets in their whole lists, int32 arrays."""

    bra: I32
    ket: I32


def gamma_element(densities, a, b, c, d):
    """Gamma of four functions without the weights of shells (device function)."""
    nao, numbers, value = densities.nao, densities.numbers, 0.0
    for s in range(densities.coulomb.size):
        of_a, of_b = (s * nao + a) * nao, (s * nao + b) * nao
        j, half_k = densities.coulomb[s], -0.5 * densities.exchange[s]
        value += j * (numbers[of_a + b] * numbers[(s * nao + c) * nao + d])
        value += half_k * (numbers[of_a + c] * numbers[of_b + d] + numbers[of_a + d] * numbers[of_b + c])
    return value


def gamma_blocks(side_by_side):
    """Kernel factory: Gamma[quartet][ab][cd], or Gamma[ab][cd][quartet] if `side_by_side`, with zeros for one more."""
    element = jit_device(gamma_element)

    def blocks(quartets: ShellQuartets, bra: FunctionPairs, ket: FunctionPairs, densities: Densities, out: F64):
        ncd = ket.na * ket.nb
        size, n = bra.na * bra.nb * ncd, i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        while n < quartets.bra.size * size:
            quartet = quotient(n, size)
            place = n - quartet * size
            ab, kl = i64(quartets.bra[quartet]), i64(quartets.ket[quartet])
            row = quotient(place, ncd)
            cd = place - row * ncd
            a, c = quotient(row, bra.nb), quotient(cd, ket.nb)
            a0, b0, c0, d0 = bra.aos[ab, 0], bra.aos[ab, 1], ket.aos[kl, 0], ket.aos[kl, 1]
            weight = (1.0 if a0 == b0 else 2.0) * (1.0 if c0 == d0 else 2.0)
            b, d = b0 + row - a * bra.nb, d0 + cd - c * ket.nb
            out[n] = weight * element(densities, a0 + a, b, c0 + c, d)
            n += i64(cuda.gridDim.x) * THREADS

    def lanes(quartets: ShellQuartets, bra: FunctionPairs, ket: FunctionPairs, densities: Densities, out: F64):
        quartet, step = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x, quartets.bra.size + 1
        if quartet < step:
            known = min(quartet, step - 2)
            ab, kl, place = i64(quartets.bra[known]), i64(quartets.ket[known]), quartet
            a0, b0, c0, d0 = bra.aos[ab, 0], bra.aos[ab, 1], ket.aos[kl, 0], ket.aos[kl, 1]
            weight = (1.0 if a0 == b0 else 2.0) * (1.0 if c0 == d0 else 2.0) if quartet == known else 0.0
            for a in range(a0, a0 + bra.na):
                for b in range(b0, b0 + bra.nb):
                    for c in range(c0, c0 + ket.na):
                        for d in range(d0, d0 + ket.nb):
                            out[place] = weight * element(densities, a, b, c, d)
                            place += step

    return Kernel(lanes if side_by_side else blocks, (THREADS, 8))


# launcher


def launch_gamma(context, side_by_side, quartets, aos, ab, cd, densities, out):
    """Gamma of shell quartets of two lists into `out`; arguments as those of the kernel and of `launch_reverse`."""
    bra, ket, count = ab.facts, cd.facts, quartets[0].size
    threads = count + 1 if side_by_side else min(count * bra.nab * ket.nab, 1 << 24)
    context.launch(
        Variant(gamma_blocks, (side_by_side,)), -(-threads // THREADS), THREADS, 0, quartets,
        (aos[0], ab.first, bra.na, bra.nb), (aos[1], cd.first, ket.na, ket.nb), densities, out,
    )  # fmt: skip
