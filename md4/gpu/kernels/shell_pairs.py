"""Pair lists on the GPU: which primitive pairs count, their records, and their slots; see `md4.gpu.pair_layout`.

One kernel decides which primitive pairs of a shell pair count: a warp takes a shell pair, its lanes take primitive
pairs side by side. It runs twice. First it counts; then, when the host knows how many there are and has made room, it
writes their records. Both passes go through the same loop of the same machine code, so that they decide alike to the
last bit: a compiler does not duplicate a loop that contains a vote.
"""

import math
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I64, I64_2D, cuda, i64, jit_device, types
from md4.gpu.emit.scalars import quotient
from md4.gpu.kernels.groups import Records
from md4.gpu.pair_layout import CENTRE, EXPONENTS, FROM_A, FROM_B, RECORD, SIDE_BY_SIDE
from md4.shells import shell_pairs as pairs

# Threads, and warps, of a block.
THREADS, WARPS = 128, 4


class PairClass(NamedTuple):
    """Angular momenta and numbers of contracted functions of a list's pairs."""

    la: i64
    lb: i64
    nctr_a: i64
    nctr_b: i64


class BasisArrays(NamedTuple):
    """What the kernel reads of a basis, see `md4.shells.basis.Basis`; centres are in the order z, y, x."""

    exponents: F64
    log_coefficients: F64
    coefficients: F64
    coef_loc: I64
    prim_loc: I64
    nprims: I64
    centres: F64


def pair_primitives():
    """Kernel factory; all sizes are run-time numbers."""
    estimate, product, on_axis = map(
        jit_device, (pairs.make_schwarz_estimate(math), pairs.make_gaussian_product(math), pairs.product_axis)
    )
    warps = WARPS

    def kernel(
        shells: I64_2D, npair: i64, of: PairClass, basis: BasisArrays, least: types.float64, write: types.boolean,
        start: I64, records: Records, owner: I64,
    ):  # fmt: skip
        lane, pair = i64(cuda.threadIdx.x) & 31, i64(cuda.blockIdx.x) * warps + (i64(cuda.threadIdx.x) >> 5)
        if pair < npair:
            a, b, numbers = shells[pair, 0], shells[pair, 1], records.numbers
            nb = basis.nprims[b]
            total, distance2 = basis.nprims[a] * nb, 0.0
            for axis in range(3):
                distance2 += (basis.centres[3 * a + axis] - basis.centres[3 * b + axis]) ** 2
            # `start` takes the counts of the first pass
            first, found = i64(0), start[pair] if write else i64(0)
            while first < total:
                n = min(first + lane, total - 1)
                rank = quotient(n, nb)
                ka, kb = basis.prim_loc[a] + rank, basis.prim_loc[b] + n - rank * nb
                za, zb = basis.exponents[ka], basis.exponents[kb]
                log_coefficients = basis.log_coefficients[ka] + basis.log_coefficients[kb]
                bound = estimate(za, zb, of.la, of.lb, log_coefficients, distance2)
                counts = first + lane < total and not bound < least
                votes = cuda.ballot_sync(-1, counts)
                if write and counts:
                    prim = found + cuda.popc(i64(votes) & ((i64(1) << lane) - 1))
                    owner[prim] = pair
                    record = prim * records.width
                    p, share_a, share_b, overlap = product(za, zb, distance2)
                    numbers[record] = p
                    for axis in range(3):
                        centre, from_a, from_b = on_axis(
                            basis.centres[3 * a + axis], basis.centres[3 * b + axis], share_a, share_b
                        )
                        numbers[record + CENTRE + axis] = centre
                        numbers[record + FROM_A + axis] = from_a
                        numbers[record + FROM_B + axis] = from_b
                    numbers[record + EXPONENTS], numbers[record + EXPONENTS + 1] = za, zb
                    for c in range(of.nctr_a):
                        numbers[record + RECORD + c] = basis.coefficients[basis.coef_loc[ka] + c] * overlap
                    for c in range(of.nctr_b):
                        numbers[record + RECORD + of.nctr_a + c] = basis.coefficients[basis.coef_loc[kb] + c]
                found += cuda.popc(votes)
                first += 32
            if lane == 0 and not write:
                start[pair] = found

    return Kernel(kernel)


def pair_slots():
    """Kernel factory: slot of each primitive pair, a thread each, and [p, P] by slot."""
    threads = THREADS

    def kernel(pairs: Records, nprim: i64, owner: I64, start: I64, first: I64, slots: i64, place: I64, out: F64):
        n = i64(cuda.blockIdx.x) * threads + cuda.threadIdx.x
        if n < nprim:
            pair = owner[n]
            slot = first[pair] + SIDE_BY_SIDE * (n - start[pair])
            place[n] = slot
            for k in range(4):
                out[k * slots + slot] = pairs.numbers[n * pairs.width + k]

    return Kernel(kernel)


# launchers


def launch_primitives(context, sizes, basis, least, shells, start, written):
    """Counts the primitive pairs of `shells` into `start`, or writes them from there on.

    Parameters
    ----------
    sizes : tuple of int
        (la, lb, nctr_a, nctr_b).
    basis : sequence of Buffer
        What `md4.gpu.shell_pairs.basis_arrays` lists.
    least : float
        See `md4.shells.shell_pairs.log_cutoff`.
    shells : Buffer, shape (npair, 2)
    start : Buffer
        Counts, to be written; or the beginnings of each pair.
    written : tuple of Buffer, optional
        (records, owner: the pair of each primitive pair), to be written.
    """
    npair, of = shells.shape[0], PairClass(*sizes)
    records, owner = written or (start, start)
    context.launch(
        Variant(pair_primitives, ()), -(-npair // WARPS), THREADS, 0,
        shells, npair, of, BasisArrays(*basis), least, written is not None, start,
        Records(records, RECORD + of.nctr_a + of.nctr_b), owner,
    )  # fmt: skip


def launch_slots(context, data, nprim, slots):
    """`PairSlots` of a list from its records; `slots.first` is there already."""
    context.launch(
        Variant(pair_slots, ()), -(-nprim // THREADS), THREADS, 0,
        Records(data.records, data.width), nprim, data.owner, data.start, slots.first, slots.count, slots.place,
        slots.numbers,
    )  # fmt: skip
