"""Pair data on the GPU: which primitive pairs count, their records, and the records in columns.

See `md4.shells.shell_pairs`.

One kernel decides which primitive pairs of a shell pair count, a warp each, its lanes side by side. It runs twice:
first it counts, then, when the host knows how many there are and has made room, it writes their records
[p, P, P - A, P - B, coefficients of a times exp(-za zb/p |AB|^2), coefficients of b]. Both passes go through the same
loop of the same machine code, so that they decide alike to the last bit: a compiler duplicates no loop with a vote.
"""

import math

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I64, I64_2D, cuda, jit_device, types
from md4.gpu.emit.scalars import quotient
from md4.gpu.kernels.h_matrices import RECORD
from md4.gpu.kernels.thread_quartet import COLUMN_LANES
from md4.shells import shell_pairs as pairs

i64 = types.int64
THREADS = 128


def pair_primitives():
    """Kernel factory; all sizes are run-time numbers."""
    estimate, product, on_axis = map(
        jit_device, (pairs.make_schwarz_estimate(math), pairs.make_gaussian_product(math), pairs.product_axis)
    )

    def kernel(
        shells, npair, la, lb, nctr_a, nctr_b, exponents, log_coefficients, coefficients, coef_loc, prim_loc, nprims,
        centres, least, write, start, records, owner,
    ):  # fmt: skip
        lane, pair = i64(cuda.threadIdx.x) & 31, i64(cuda.blockIdx.x) * 4 + (i64(cuda.threadIdx.x) >> 5)
        if pair < npair:
            a, b = shells[pair, 0], shells[pair, 1]
            nb = nprims[b]
            total, width = nprims[a] * nb, RECORD + nctr_a + nctr_b
            distance2 = 0.0
            for axis in range(3):
                distance2 += (centres[3 * a + axis] - centres[3 * b + axis]) ** 2
            # `start` takes the counts of the first pass
            first, found = i64(0), start[pair] if write else i64(0)
            while first < total:
                n = min(first + lane, total - 1)
                rank = quotient(n, nb)
                ka, kb = prim_loc[a] + rank, prim_loc[b] + n - rank * nb
                za, zb = exponents[ka], exponents[kb]
                bound = estimate(za, zb, la, lb, log_coefficients[ka] + log_coefficients[kb], distance2)
                counts = first + lane < total and not bound < least
                votes = cuda.ballot_sync(-1, counts)
                if write and counts:
                    prim = found + cuda.popc(i64(votes) & ((i64(1) << lane) - 1))
                    owner[prim] = pair
                    record = prim * width
                    p, share_a, share_b, overlap = product(za, zb, distance2)
                    records[record] = p
                    for axis in range(3):
                        x, xpa, xpb = on_axis(centres[3 * a + axis], centres[3 * b + axis], share_a, share_b)
                        records[record + 1 + axis] = x
                        records[record + 4 + axis] = xpa
                        records[record + 7 + axis] = xpb
                    for c in range(nctr_a):
                        records[record + RECORD + c] = coefficients[coef_loc[ka] + c] * overlap
                    for c in range(nctr_b):
                        records[record + RECORD + nctr_a + c] = coefficients[coef_loc[kb] + c]
                found += cuda.popc(votes)
                first += 32
            if lane == 0 and not write:
                start[pair] = found

    basis = (F64, F64, F64, I64, I64, I64, F64)
    return Kernel(kernel, signature=(I64_2D, *[i64] * 5, *basis, types.float64, types.boolean, I64, F64, I64))


def pair_columns():
    """Kernel factory: slot of each primitive pair, a thread each, and [p, P] by slot.

    See `md4.gpu.kernels.thread_quartet`.
    """

    def kernel(records, width, nprim, owner, start, first, slots, place, columns):
        n = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if n < nprim:
            pair = owner[n]
            slot = first[pair] + COLUMN_LANES * (n - start[pair])
            place[n] = slot
            for k in range(4):
                columns[k * slots + slot] = records[n * width + k]

    return Kernel(kernel, signature=(F64, i64, i64, I64, I64, I64, i64, I64, F64))


# launchers


def primitives_variant():
    """The one variant."""
    return Variant(pair_primitives, ())


def columns_variant():
    """The one variant."""
    return Variant(pair_columns, ())


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
    npair = shells.shape[0]
    records, owner = written or (start, start)
    context.launch(
        primitives_variant(), -(-npair // (THREADS // 32)), THREADS, 0,
        shells, npair, *sizes, *basis, least, written is not None, start, records, owner,
    )  # fmt: skip


def launch_columns(context, data, nprim, columns):
    """Columns of a list from its records; `columns.first` is there already."""
    context.launch(
        columns_variant(), -(-nprim // THREADS), THREADS, 0,
        data.records, data.width, nprim, data.owner, data.start, columns.first, columns.slots, columns.place,
        columns.records,
    )  # fmt: skip
