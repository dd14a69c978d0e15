"""Gamma of gradients for listed shell quartets; see `md4.gpu.kernels.reverse_sums` for the equation.

Primitive quartets of a shell quartet have the same Gamma, whose densities lie far apart in memory. So it is made once.
"""

from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, cuda, i64, jit_device, types
from md4.gpu.emit.scalars import quotient
from md4.gpu.kernels.groups import levels_of
from md4.gpu.kernels.reverse_sums import Densities, FunctionPairs, gamma_element
from md4.gpu.tiles import blocks_of_8

# Threads of a block, and the quartets that it takes together.
THREADS, GROUP = 128, 32


class ShellQuartets(NamedTuple):
    """Numbers of both pairs of shell quartets in their whole lists, int32 arrays."""

    bra: I32
    ket: I32


def gamma_blocks(side_by_side):
    """Kernel factory: Gamma as blocks of 8 cd, [quartet][block][ab][8 cd], or [ab][cd][quartet] if `side_by_side`.

    In blocks the cd are in the `order` of a tile's rows (`md4.gpu.staircases.row_table`), filled up by zeros. Side by
    side there are zeros for one quartet more.
    """
    element = jit_device(gamma_element)

    def blocks(
        quartets: ShellQuartets, bra: FunctionPairs, ket: FunctionPairs, densities: Densities, order: I32, out: F64,
    ):  # fmt: skip
        aos, weights = cuda.shared.array((GROUP, 4), types.int32), cuda.shared.array(GROUP, types.float64)
        tid, first = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x) * GROUP
        many, nab, ncd = min(i64(GROUP), quartets.bra.size - first), bra.na * bra.nb, ket.na * ket.nb
        if tid < many:
            ab, kl = i64(quartets.bra[first + tid]), i64(quartets.ket[first + tid])
            a, b, c, d = bra.aos[ab, 0], bra.aos[ab, 1], ket.aos[kl, 0], ket.aos[kl, 1]
            aos[tid, 0], aos[tid, 1], aos[tid, 2], aos[tid, 3] = a, b, c, d
            weights[tid] = (1.0 if a == b else 2.0) * (1.0 if c == d else 2.0)
        cuda.syncthreads()
        # each thread has some elements, of every quartet or of each of so many `together`
        size = quotient(ncd + 7, i64(8)) * nab * 8
        step = min(size, i64(THREADS))
        together = quotient(i64(THREADS), step)
        own = quotient(tid, step)
        n = tid - own * step
        while own < together and n < size:
            block = quotient(n >> 3, nab)
            row, cd = (n >> 3) - block * nab, 8 * block + (n & 7)
            live = cd < ncd
            cd = i64(order[cd]) if live else i64(0)
            a, c = quotient(row, bra.nb), quotient(cd, ket.nb)
            b, d = row - a * bra.nb, cd - c * ket.nb
            quartet = own
            while quartet < many:
                value = 0.0
                if live:
                    value = weights[quartet] * element(
                        densities, aos[quartet, 0] + a, aos[quartet, 1] + b, aos[quartet, 2] + c, aos[quartet, 3] + d
                    )
                out[(first + quartet) * size + n] = value
                quartet += together
            n += step

    def lanes(
        quartets: ShellQuartets, bra: FunctionPairs, ket: FunctionPairs, densities: Densities, order: I32, out: F64,
    ):  # fmt: skip
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


def gamma_size(bra, ket, side_by_side):
    """Numbers of a shell quartet for `ListFacts` of both sides."""
    return bra.nab * (ket.nab if side_by_side else 8 * blocks_of_8(ket.nab))


def launch_gamma(context, side_by_side, quartets, aos, ab, cd, densities, out):
    """Gamma of shell quartets of two lists into `out`; arguments as those of the kernel and of `launch_reverse`."""
    bra, ket, count = ab.facts, cd.facts, quartets[0].size
    blocks = -(-(count + 1) // THREADS) if side_by_side else -(-count // GROUP)
    context.launch(
        Variant(gamma_blocks, (side_by_side,)), blocks, THREADS, 0, quartets, (aos[0], ab.first, bra.na, bra.nb),
        (aos[1], cd.first, ket.na, ket.nb), densities, levels_of(context, ket, blocks_of_8(ket.nab), True)[1], out,
    )  # fmt: skip
