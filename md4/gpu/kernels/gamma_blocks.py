"""Gamma of gradients for listed shell quartets; see `md4.gpu.kernels.reverse_sums` for the equation.

Primitive quartets of a shell quartet have the same Gamma, so it is made once. A block of threads brings the six blocks
of a density that some quartets need to shared memory, and makes Gamma of them from there. Where Gamma is in a table
already, it is brought into the same order.
"""

from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, cuda, i64, jit_device, types
from md4.gpu.emit.scalars import quotient
from md4.gpu.kernels.gamma_table import GammaTable
from md4.gpu.kernels.groups import levels_of
from md4.gpu.kernels.reverse_sums import Densities, FunctionPairs
from md4.gpu.tiles import blocks_of_8

# Threads of a block, quartets that it takes at most, and bytes of shared memory that their densities take, about.
THREADS, GROUP, GROUP_BYTES = 128, 32, 24 << 10


class ShellQuartets(NamedTuple):
    """Numbers of both pairs of shell quartets in their whole lists, int32 arrays."""

    bra: I32
    ket: I32


def density_place(n, na, nb, nc, nd):
    """Of the n-th number of the blocks ab, cd, ac, bd, ad, bc: both shells, row and column (device function)."""
    left, right, width = i64(0), i64(1), nb
    if n >= na * nb:
        n -= na * nb
        left, right, width = i64(2), i64(3), nd
        if n >= nc * nd:
            n -= nc * nd
            left, right, width = i64(0), i64(2), nc
            if n >= na * nc:
                n -= na * nc
                left, right, width = i64(1), i64(3), nd
                if n >= nb * nd:
                    n -= nb * nd
                    left, right, width = i64(0), i64(3), nd
                    if n >= na * nd:
                        n -= na * nd
                        left, right, width = i64(1), i64(2), nc
    row = quotient(n, width)
    return left, right, row, n - row * width


def gamma_of(d, at, coulomb, half_k, a, b, c, d_, na, nb, nc, nd):
    """Gamma of four functions of a quartet, whose blocks of D are in shared memory from `at` on (device function)."""
    cd = at + na * nb
    ac = cd + nc * nd
    bd = ac + na * nc
    ad = bd + nb * nd
    bc = ad + na * nd
    value = coulomb * (d[at + a * nb + b] * d[cd + c * nd + d_])
    return value + half_k * (d[ac + a * nc + c] * d[bd + b * nd + d_] + d[ad + a * nd + d_] * d[bc + b * nc + c])


def gamma_blocks(side_by_side):
    """Kernel factory: Gamma as blocks of cd, [quartet][block][ab][8 cd], or [ab][cd][quartet] if `side_by_side`.

    In blocks the cd are in the `order` of a tile's rows (`md4.gpu.staircases.row_table`). Several blocks are filled up
    by zeros, one has only what there is. Side by side there are zeros for one quartet more.
    """
    place_of, gamma, more = jit_device(density_place), jit_device(gamma_of), 1 if side_by_side else 0

    def kernel(
        quartets: ShellQuartets, group: i64, size: i64, bra: FunctionPairs, ket: FunctionPairs, densities: Densities,
        order: I32, out: F64,
    ):  # fmt: skip
        d, aos = cuda.shared.array(0, types.float64), cuda.shared.array((GROUP, 4), types.int32)
        weights = cuda.shared.array(GROUP, types.float64)
        tid, first, nao = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x) * group, densities.nao
        na, nb, nc, nd = bra.na, bra.nb, ket.na, ket.nb
        nab, ncd, count = na * nb, nc * nd, quartets.bra.size
        many = min(group, count + more - first)
        if tid < many:
            known = min(first + tid, count - 1)
            ab, kl = i64(quartets.bra[known]), i64(quartets.ket[known])
            a, b, c, e = bra.aos[ab, 0], bra.aos[ab, 1], ket.aos[kl, 0], ket.aos[kl, 1]
            aos[tid, 0], aos[tid, 1], aos[tid, 2], aos[tid, 3] = a, b, c, e
            weights[tid] = (1.0 if a == b else 2.0) * (1.0 if c == e else 2.0) if first + tid < count else 0.0
        for s in range(densities.coulomb.size):
            cuda.syncthreads()
            step = min(size, i64(THREADS))
            together = quotient(i64(THREADS), step)
            own = quotient(tid, step)
            n = tid - own * step
            while own < together and n < size:
                left, right, row, column = place_of(min(n, nab + ncd + (na + nb) * (nc + nd) - 1), na, nb, nc, nd)
                quartet = own
                while quartet < many:
                    at = (s * nao + aos[quartet, left] + row) * nao + aos[quartet, right] + column
                    d[quartet * size + n] = densities.numbers[at]
                    quartet += together
                n += step
            cuda.syncthreads()
            j, half_k = densities.coulomb[s], -0.5 * densities.exchange[s]
            if side_by_side:
                n = tid >> 5
                quartet = tid & 31
                while n < nab * ncd and quartet < many:
                    row = quotient(n, ncd)
                    cd = n - row * ncd
                    a, c = quotient(row, nb), quotient(cd, nd)
                    value = weights[quartet] * gamma(
                        d, quartet * size, j, half_k, a, row - a * nb, c, cd - c * nd, na, nb, nc, nd
                    )
                    place = n * (count + 1) + first + quartet
                    out[place] = value if s == 0 else out[place] + value
                    n += THREADS // 32
            else:
                width = i64(8) if ncd > 8 else ncd
                blocks = quotient(ncd + width - 1, width) * nab * width
                step = min(blocks, i64(THREADS))
                together = quotient(i64(THREADS), step)
                own = quotient(tid, step)
                n = tid - own * step
                while own < together and n < blocks:
                    line = quotient(n, width)
                    block = quotient(line, nab)
                    row, cd = line - block * nab, (block - line) * width + n
                    factor = 1.0 if cd < ncd else 0.0
                    cd = i64(order[min(cd, ncd - 1)])
                    a, c = quotient(row, nb), quotient(cd, nd)
                    quartet = own
                    while quartet < many:
                        value = factor * weights[quartet] * gamma(
                            d, quartet * size, j, half_k, a, row - a * nb, c, cd - c * nd, na, nb, nc, nd
                        )
                        place = (first + quartet) * blocks + n
                        out[place] = value if s == 0 else out[place] + value
                        quartet += together
                    n += step

    return Kernel(kernel, (THREADS, 8))


def gamma_of_table(side_by_side):
    """Kernel factory: as `gamma_blocks`, from a table. A thread takes a number, or a quartet if `side_by_side`."""

    def kernel(quartets: ShellQuartets, table: GammaTable, nab: i64, ncd: i64, order: I32, out: F64):
        n, count = i64(cuda.blockIdx.x) * THREADS + i64(cuda.threadIdx.x), quartets.bra.size
        width = i64(8) if ncd > 8 else ncd
        blocks = quotient(ncd + width - 1, width) * nab * width
        quartet = n if side_by_side else quotient(n, blocks)
        if quartet >= (count + 1 if side_by_side else count):
            return
        known = min(quartet, count - 1)
        ab, kl = i64(quartets.bra[known]) * nab, i64(quartets.ket[known]) * ncd
        first = table.first + ab * table.of_bra + kl * table.of_ket
        if side_by_side:
            for cd in range(ncd):
                for row in range(nab):
                    value = table.numbers[first + row * table.of_bra + cd * table.of_ket]
                    out[(row * ncd + cd) * (count + 1) + quartet] = value if quartet < count else 0.0
        else:
            place = n - quartet * blocks
            line = quotient(place, width)
            block = quotient(line, nab)
            row, cd = line - block * nab, (block - line) * width + place
            value = table.numbers[first + row * table.of_bra + i64(order[min(cd, ncd - 1)]) * table.of_ket]
            out[n] = value if cd < ncd else 0.0

    return Kernel(kernel, (THREADS, 8))


# launcher


def gamma_size(bra, ket, side_by_side):
    """Numbers of a shell quartet for `ListFacts` of both sides."""
    return bra.nab * (ket.nab if side_by_side or ket.nab <= 8 else 8 * blocks_of_8(ket.nab))


def launch_gamma(context, side_by_side, quartets, aos, ab, cd, densities, out):
    """Gamma of shell quartets of two lists into `out`; arguments as those of the kernel and of `launch_reverse`."""
    bra, ket, count = ab.facts, cd.facts, quartets[0].size + side_by_side
    # one more where it is even, so that quartets side by side are in different banks
    size = bra.nab + ket.nab + (bra.na + bra.nb) * (ket.na + ket.nb) | 1
    group = max(1, min(GROUP, GROUP_BYTES // (8 * size)))
    context.launch(
        Variant(gamma_blocks, (side_by_side,)), -(-count // group), THREADS, 8 * size * group, quartets, group, size,
        (aos[0], ab.first, bra.na, bra.nb), (aos[1], cd.first, ket.na, ket.nb), densities,
        levels_of(context, ket, blocks_of_8(ket.nab), True)[1], out,
    )  # fmt: skip


def launch_gamma_of_table(context, side_by_side, quartets, ab, cd, table, out):
    """As `launch_gamma`, with the fields of a `GammaTable`."""
    bra, ket, count = ab.facts, cd.facts, quartets[0].size
    threads = count + 1 if side_by_side else count * gamma_size(bra, ket, False)
    context.launch(
        Variant(gamma_of_table, (side_by_side,)), -(-threads // THREADS), THREADS, 0, quartets, table, bra.nab, ket.nab,
        levels_of(context, ket, blocks_of_8(ket.nab), True)[1], out,
    )  # fmt: skip
