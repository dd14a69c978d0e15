"""The ket pairs that count with each bra pair in a gradient, one by one.

A quartet counts unless its bound is below the tolerance: with F' of the largest derivative of the bra pair, F of the
ket pair (`md4.shells.schwarz.GradientBounds`) and the norms |D| of blocks,

    F'_ab F_cd sum_s [ |j_s| |D_ab| |D_cd| + |k_s|/2 (|D_ac| |D_bd| + |D_ad| |D_bc|) ] < tolerance.

Where Gamma is read from a table, the norm of its block is in place of the sum, and F are without factors f.

The kernel runs twice. First it counts, for each bra pair, the ket pairs and their primitive pairs, and adds up the
bounds of those that do not count, and their squares. When the host has made room it lists the shell quartets, those of
each bra pair together, and the primitive quartets, those of each primitive bra pair together, both in the order of the
ket pairs.
"""

from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64, I64_2D, cuda, i64, jit_device, types
from md4.gpu.emit.scalars import quotient
from md4.gpu.kernels.gamma_table import TableNorms

THREADS, WARPS = 128, 4
# Shared memory of a block for norms of densities, at most.
ROW_BYTES = 48 << 10


class BoundedPairs(NamedTuple):
    """Shell pairs of a whole list.

    Attributes
    ----------
    shells : int64 array, two-dimensional
    start : int64 array
        Range of each pair in the primitive pairs.
    bounds : float64 array
        F' of the bra, or F of the ket.
    norms : float64 array
        |D| of each pair, one density after the other.
    """

    shells: I64_2D
    start: I64
    bounds: F64
    norms: F64


class Norms(NamedTuple):
    """Norms of the blocks of the densities.

    Attributes
    ----------
    numbers : float64 array
        |D| of all pairs of shells, `nshell` by `nshell` for each density.
    coulomb, exchange : float64 array
        j and k of each.
    nshell : int64
    tolerance : float64
    """

    numbers: F64
    coulomb: F64
    exchange: F64
    nshell: i64
    tolerance: types.float64


class KetCounts(NamedTuple):
    """What the first pass writes.

    Attributes
    ----------
    numbers : int32 array
        For each bra pair: how many ket pairs count, their primitive pairs, and the end of the last one that counts.
    left_out : float64 array
        For each bra pair, the bounds that are below the tolerance, and their squares, are added to these two.
    """

    numbers: I32
    left_out: F64


class QuartetTable(NamedTuple):
    """The quartets that count with the bra pairs of a chunk.

    Attributes
    ----------
    first : int64 array, two-dimensional
        For each bra pair of the chunk, and behind the last: the numbers of the first shell quartet and of the first
        primitive quartet, those of a whole list of kets. The first of the chunk stand at 0 in what follows. The third
        number is the end of the last ket pair that counts.
    bra, ket : int32 array
        Numbers of both pairs of each shell quartet in their whole lists.
    bra_prims, ket_prims, shells : int32 array
        Numbers of both primitive pairs of each primitive quartet in their whole lists, and that of its shell quartet.
        The first of them may be empty, and is not written then.
    """

    first: I64_2D
    bra: I32
    ket: I32
    bra_prims: I32
    ket_prims: I32
    shells: I32


def bound_of(norms, ket, cd, rows, near, a, b):
    """What the densities give the bound of a quartet (device function).

    `rows`, in shared memory, has those of a and of b of each density if `near`.
    """
    total, nshell, c, d = 0.0, norms.nshell, ket.shells[cd, 0], ket.shells[cd, 1]
    for s in range(norms.coulomb.size):
        j, k = abs(norms.coulomb[s]), 0.5 * abs(norms.exchange[s])
        if near:
            at = 2 * s * nshell
            ab, ac, ad = rows[at + b], rows[at + c], rows[at + d]
            bc, bd = rows[at + nshell + c], rows[at + nshell + d]
        else:
            of_a, of_b, numbers = (s * nshell + a) * nshell, (s * nshell + b) * nshell, norms.numbers
            ab, ac, ad = numbers[of_a + b], numbers[of_a + c], numbers[of_a + d]
            bc, bd = numbers[of_b + c], numbers[of_b + d]
        total += j * (ab * ket.norms[s * ket.bounds.size + cd])
        total += k * (ac * bd + ad * bc)
    return total


def norm_in_table(norms, ket, cd, rows, ab, a, b):
    """As `bound_of`, from `TableNorms`; `ab` is the number of the bra pair (device function)."""
    return norms.numbers[norms.first + ab * norms.of_bra + cd * norms.of_ket]


def select_kets(by_table=False):
    """Kernel factory; all sizes are run-time numbers. `by_table`: the norms are those of a table of Gamma."""
    threads, warps, bound = THREADS, WARPS, jit_device(norm_in_table if by_table else bound_of)
    of_gamma = TableNorms if by_table else Norms

    def kernel(
        bra: BoundedPairs, first_bra: i64, ket: BoundedPairs, nket: i64, norms: of_gamma,
        near: types.boolean, write: types.boolean, counts: KetCounts, table: QuartetTable,
    ):  # fmt: skip
        rows = cuda.shared.array(0, types.float64)
        found, prims = cuda.shared.array(warps, types.int32), cuda.shared.array(warps, types.int32)
        ends, sums = cuda.shared.array(warps, types.int32), cuda.shared.array((warps, 2), types.float64)
        # of the ket pairs of a round: end of the primitive pairs, the first one less those before, shell quartet
        upto_this, own_first, own_shells = (
            cuda.shared.array(threads, types.int32), cuda.shared.array(threads, types.int32),
            cuda.shared.array(threads, types.int32),
        )  # fmt: skip
        tid, pair = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        lane, warp, ab = tid & 31, tid >> 5, first_bra + pair
        a, b, own = bra.shells[ab, 0], bra.shells[ab, 1], bra.bounds[ab]
        first_prim, nprim = bra.start[ab], bra.start[ab + 1] - bra.start[ab]
        first_shells, first_quartet, row = i64(0), i64(0), i64(0)
        if write:
            first_shells, first_quartet = table.first[pair, 0], table.first[pair, 1]
            row = quotient(table.first[pair + 1, 1] - first_quartet, max(i64(1), nprim))
            first_shells -= table.first[0, 0]
            first_quartet -= table.first[0, 1]
            nket = table.first[pair, 2]
        if by_table:
            which = ab
        else:
            which, n = near, tid
            while near and n < 2 * norms.coulomb.size * norms.nshell:
                of = quotient(n, norms.nshell)
                shell = (of >> 1) * norms.nshell + (a if of & 1 == 0 else b)
                rows[n] = norms.numbers[shell * norms.nshell + n - of * norms.nshell]
                n += threads
        cuda.syncthreads()
        # how many of both kinds, before this round or of this thread, and the end of the last one
        many, many_prims, last, left, squares = i64(0), i64(0), i64(0), 0.0, 0.0
        for begin in range(0, nket, threads):
            n = begin + tid
            cd = min(n, nket - 1)
            size = own * ket.bounds[cd] * bound(norms, ket, cd, rows, which, a, b)
            k_first, k_prims = ket.start[cd], ket.start[cd + 1] - ket.start[cd]
            counting = n < nket and k_prims > 0 and not size < norms.tolerance
            if n < nket and not counting:
                left += size
                squares += size * size
            k_prims = k_prims if counting else i64(0)
            last = n + 1 if counting else last
            # a vote in both passes: a loop that contains one is not duplicated, so that both decide alike
            votes, upto, step = i64(cuda.ballot_sync(-1, counting)) & 0xFFFFFFFF, k_prims, 1
            if not write:
                many += 1 if counting else 0
                many_prims += k_prims
                continue
            while step < 32:
                other = cuda.shfl_up_sync(-1, upto, step)
                upto += other if lane >= step else 0
                step *= 2
            if lane == 31:
                found[warp], prims[warp] = cuda.popc(votes), upto
            cuda.syncthreads()
            place, before_prims, all_found, all_prims = first_shells + many, i64(0), i64(0), i64(0)
            for other_warp in range(warps):
                if other_warp < warp:
                    place += found[other_warp]
                    before_prims += prims[other_warp]
                all_found += found[other_warp]
                all_prims += prims[other_warp]
            if counting:
                place += cuda.popc(votes & ((i64(1) << lane) - 1))
                table.bra[place], table.ket[place] = ab, cd
            upto_this[tid], own_shells[tid] = before_prims + upto, place
            own_first[tid] = k_first - (before_prims + upto - k_prims)
            cuda.syncthreads()
            k = tid
            while k < all_prims:
                # the ket pair to which the k-th primitive pair belongs
                owner, step = i64(0), threads // 2
                while step > 0:
                    if upto_this[owner + step - 1] <= k:
                        owner += step
                    step //= 2
                quartet, kl, shells = first_quartet + many_prims + k, own_first[owner] + k, own_shells[owner]
                for i in range(nprim):
                    table.ket_prims[quartet], table.shells[quartet] = kl, shells
                    if table.bra_prims.size > 0:
                        table.bra_prims[quartet] = first_prim + i
                    quartet += row
                k += threads
            many += all_found
            many_prims += all_prims
        if write:
            return
        other = 16
        while other > 0:
            many += cuda.shfl_xor_sync(-1, many, other)
            many_prims += cuda.shfl_xor_sync(-1, many_prims, other)
            last = max(last, cuda.shfl_xor_sync(-1, last, other))
            left += cuda.shfl_xor_sync(-1, left, other)
            squares += cuda.shfl_xor_sync(-1, squares, other)
            other >>= 1
        if lane == 0:
            found[warp], prims[warp], ends[warp], sums[warp, 0], sums[warp, 1] = many, many_prims, last, left, squares
        cuda.syncthreads()
        if tid == 0:
            for other_warp in range(1, warps):
                many += found[other_warp]
                many_prims += prims[other_warp]
                last = max(last, i64(ends[other_warp]))
                left += sums[other_warp, 0]
                squares += sums[other_warp, 1]
            numbers = counts.numbers
            numbers[3 * pair], numbers[3 * pair + 1], numbers[3 * pair + 2] = many, many_prims, last
            counts.left_out[2 * ab] += left
            counts.left_out[2 * ab + 1] += squares

    return Kernel(kernel, (threads, 6))


# launcher


def launch_select(context, npair, bra, first_bra, ket, nket, norms, counts, table=None, by_table=False):
    """Counts the pairs of a ket list that count with `npair` bra pairs, or writes the `table`.

    Parameters
    ----------
    bra, ket : tuple
        Fields of `BoundedPairs` of whole lists, of which the pairs from `first_bra` on and all `nket` take part, or
        those that `table` says.
    norms, counts, table : tuple
        Fields of `Norms`, or of `TableNorms` if `by_table`, `KetCounts` and `QuartetTable`.
    """
    nothing, nbytes = counts[0].part(0, (0,)), ROW_BYTES + 1 if by_table else 16 * norms[1].size * norms[3]
    near = nbytes <= ROW_BYTES
    context.launch(
        Variant(select_kets, (by_table,)), npair, THREADS, nbytes if near else 0, bra, first_bra, ket, nket, norms,
        near, table is not None, counts, table or (bra[0], *[nothing] * 5),
    )  # fmt: skip
