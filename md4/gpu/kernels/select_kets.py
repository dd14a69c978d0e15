"""The ket pairs that count with each bra pair in a gradient, and the primitive quartets that count of these.

A quartet counts unless its bound is below the tolerance: with F' of the largest derivative of the bra pair, F of the
ket pair (`md4.shells.schwarz.GradientBounds`) and the norms |D| of blocks,

    F'_ab F_cd sum_s [ |j_s| |D_ab| |D_cd| + |k_s|/2 (|D_ac| |D_bd| + |D_ad| |D_bc|) ] < tolerance.

Where Gamma is read from a table, the norm of its block is in place of the sum, and F are without factors f. Of a
quartet that counts, primitive quartets are left out for which the same with F' and F of primitive pairs is below a
`limit`.

First the kernel counts, for each bra pair, the ket pairs, and for each primitive bra pair, the primitive ket pairs, and
adds up the bounds of what does not count, and their squares. For classes whose quartets are listed it runs again when
the host has made room: it lists the shell quartets, those of each bra pair together, and the primitive quartets, those
of each primitive bra pair together, both in the order of the ket pairs that a warp takes, and one warp after the other.

A block takes a bra pair, and each of its warps 32 ket pairs at a time, whose primitive pairs are divided among the
lanes. In shared memory each warp has a number of each primitive bra pair: how many primitive ket pairs it has found, or
in the second pass where the next one goes. A warp lists what it finds behind what the warps before it find.
"""

from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64, I64_2D, cuda, i32, i64, jit_device, types
from md4.gpu.emit.scalars import quotient
from md4.gpu.kernels.gamma_table import TableNorms

THREADS, WARPS = 128, 4
# Shared memory of a block for norms of densities, at most.
ROW_BYTES = 48 << 10
# What else a block has there besides its numbers of primitive pairs, at most.
OTHER_BYTES = 128


class BoundedPairs(NamedTuple):
    """Shell pairs of a whole list.

    Attributes
    ----------
    shells : int64 array, two-dimensional
    start : int64 array
        Range of each pair in the primitive pairs.
    bounds : float64 array
        F' of the bra, or F of the ket.
    of_prims : float64 array
        F' or F of each primitive pair.
    norms : float64 array
        |D| of each pair, one density after the other.
    """

    shells: I64_2D
    start: I64
    bounds: F64
    of_prims: F64
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
        For each bra pair: how many ket pairs count, and the end of the last one. Then for each primitive bra pair: how
        many primitive ket pairs count.
    of_warps : int32 array
        For each bra pair the numbers that its warps have found, of its primitive pairs and then of itself. The second
        pass reads them.
    left_out : float64 array
        For each bra pair, the bounds of what does not count, and their squares, are added to these two. Those of the
        primitive quartets of a primitive ket pair are added up before they are squared.
    """

    numbers: I32
    of_warps: I32
    left_out: F64


class QuartetTable(NamedTuple):
    """The quartets that count with the bra pairs of a chunk.

    Attributes
    ----------
    first : int64 array, two-dimensional
        For each bra pair of the chunk, and behind the last: the number of the first shell quartet, that of a whole list
        of kets, and the end of the last ket pair that counts.
    first_quartets : int64 array
        For each primitive bra pair of the chunk, and behind the last: the number of the first primitive quartet. The
        first shell quartet and primitive quartet of the chunk stand at 0 in what follows.
    bra, ket : int32 array
        Numbers of both pairs of each shell quartet in their whole lists.
    bra_prims, ket_prims, shells : int32 array
        Numbers of both primitive pairs of each primitive quartet in their whole lists, and that of its shell quartet.
        The first of them may be empty, and is not written then.
    """

    first: I64_2D
    first_quartets: I64
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
        bra: BoundedPairs, first_bra: i64, ket: BoundedPairs, nket: i64, norms: of_gamma, limit: types.float64,
        near: types.boolean, write: types.boolean, counts: KetCounts, table: QuartetTable,
    ):  # fmt: skip
        rows, found = cuda.shared.array(0, types.float64), cuda.shared.array(0, types.int32)
        ends, sums = cuda.shared.array(warps, types.int32), cuda.shared.array((warps, 2), types.float64)
        tid, pair = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        lane, warp, ab = tid & 31, tid >> 5, first_bra + pair
        a, b, own = bra.shells[ab, 0], bra.shells[ab, 1], bra.bounds[ab]
        first_prim, nprim = bra.start[ab], bra.start[ab + 1] - bra.start[ab]
        of_chunk, width, of_rows = first_prim - bra.start[first_bra], nprim + 1, i64(0)
        if by_table:
            which = ab
        else:
            which, n = near, tid
            of_rows = 2 * norms.coulomb.size * norms.nshell if near else i64(0)
            while n < of_rows:
                of = quotient(n, norms.nshell)
                shell = (of >> 1) * norms.nshell + (a if of & 1 == 0 else b)
                rows[n] = norms.numbers[shell * norms.nshell + n - of * norms.nshell]
                n += threads
        # the warp's numbers, behind the norms in shared memory, and those of all warps in memory
        mine, of_pair, n = 2 * of_rows + warp * width, (of_chunk + pair) * warps, lane
        while n < width:
            place = i64(0)
            if write:
                if n < nprim:
                    place = table.first_quartets[of_chunk + n] - table.first_quartets[0]
                else:
                    place = table.first[pair, 0] - table.first[0, 0]
                for other_warp in range(warp):
                    place += counts.of_warps[of_pair + other_warp * width + n]
            found[mine + n] = place
            n += 32
        cuda.syncthreads()
        if write:
            nket = table.first[pair, 1]
        many, below, last, left, squares = i64(found[mine + nprim]), (i64(1) << lane) - 1, i64(0), 0.0, 0.0
        for begin in range(0, nket, threads):
            n = begin + tid
            cd = min(n, nket - 1)
            of_d = bound(norms, ket, cd, rows, which, a, b)
            size, k_first, k_prims = own * ket.bounds[cd] * of_d, ket.start[cd], ket.start[cd + 1] - ket.start[cd]
            counting = n < nket and k_prims > 0 and not size < norms.tolerance
            if n < nket and not counting:
                left += size
                squares += size * size
            last = n + 1 if counting else last
            # votes in both passes: a loop that contains one is not duplicated, so that both decide alike
            votes = i64(cuda.ballot_sync(-1, counting)) & 0xFFFFFFFF
            if votes == 0:
                continue
            place, upto, step = i32(many + cuda.popc(votes & below)), i32(k_prims if counting else 0), 1
            many += cuda.popc(votes)
            if write and counting:
                table.bra[place], table.ket[place] = ab, cd
            own_first = k_first + upto
            while step < 32:
                other = cuda.shfl_up_sync(-1, upto, step)
                upto = i32(upto + (other if lane >= step else 0))
                step *= 2
            own_first, end = i32(own_first - upto), i64(cuda.shfl_sync(-1, upto, 31))
            for tile in range(0, end, 32):
                # the ket pair to which the k-th primitive pair belongs
                k, owner, step = tile + lane, 0, 16
                while step > 0:
                    owner += step if cuda.shfl_sync(-1, upto, owner + step - 1) <= k else 0
                    step //= 2
                kl, shells = cuda.shfl_sync(-1, own_first, owner) + k, cuda.shfl_sync(-1, place, owner)
                other_size, without = cuda.shfl_sync(-1, of_d, owner), 0.0
                if k < end:
                    other_size *= ket.of_prims[kl]
                for i in range(nprim):
                    size = bra.of_prims[first_prim + i] * other_size
                    surviving = k < end and not size < limit
                    if k < end and not surviving:
                        without += size
                    votes, quartet = i64(cuda.ballot_sync(-1, surviving)) & 0xFFFFFFFF, i64(found[mine + i])
                    cuda.syncwarp()
                    if lane == 0:
                        found[mine + i] = quartet + cuda.popc(votes)
                    if write and surviving:
                        quartet += cuda.popc(votes & below)
                        table.ket_prims[quartet], table.shells[quartet] = kl, shells
                        if table.bra_prims.size > 0:
                            table.bra_prims[quartet] = first_prim + i
                left += without
                squares += without * without
                cuda.syncwarp()
        if write:
            return
        other = 16
        while other > 0:
            last = max(last, cuda.shfl_xor_sync(-1, last, other))
            left += cuda.shfl_xor_sync(-1, left, other)
            squares += cuda.shfl_xor_sync(-1, squares, other)
            other >>= 1
        cuda.syncwarp()
        if lane == 0:
            found[mine + nprim], ends[warp], sums[warp, 0], sums[warp, 1] = many, last, left, squares
        cuda.syncthreads()
        n, numbers, of_prims = tid, counts.numbers, 2 * i64(cuda.gridDim.x) + of_chunk
        while n < width:
            many = i64(0)
            for other_warp in range(warps):
                at = other_warp * width + n
                counts.of_warps[of_pair + at] = found[2 * of_rows + at]
                many += found[2 * of_rows + at]
            numbers[of_prims + n if n < nprim else 2 * pair] = many
            n += threads
        if tid == 0:
            for other_warp in range(1, warps):
                last = max(last, i64(ends[other_warp]))
                left += sums[other_warp, 0]
                squares += sums[other_warp, 1]
            numbers[2 * pair + 1] = last
            counts.left_out[2 * ab] += left
            counts.left_out[2 * ab + 1] += squares

    return Kernel(kernel, (threads, 6))


# launcher


def count_sizes(npair, nprim):
    """Numbers of `KetCounts.numbers` and `KetCounts.of_warps` of so many pairs with so many primitive pairs."""
    return 2 * npair + nprim, WARPS * (npair + nprim)


def launch_select(context, npair, most, bra, first_bra, ket, nket, norms, limit, counts, table=None, by_table=False):
    """Counts the pairs of a ket list that count with `npair` bra pairs, or writes the `table`.

    Parameters
    ----------
    most : int
        Primitive pairs of a bra pair, at most.
    bra, ket : tuple
        Fields of `BoundedPairs` of whole lists, of which the pairs from `first_bra` on and all `nket` take part, or
        those that `table` says.
    norms, counts, table : tuple
        Fields of `Norms`, or of `TableNorms` if `by_table`, `KetCounts` and `QuartetTable`.
    limit : float
        Bounds below which primitive quartets are left out.
    """
    nothing, nbytes = counts[0].part(0, (0,)), ROW_BYTES + 1 if by_table else 16 * norms[1].size * norms[3]
    near = nbytes <= ROW_BYTES
    context.launch(
        Variant(select_kets, (by_table,)), npair, THREADS, nbytes * near + 4 * WARPS * (most + 1), bra, first_bra, ket,
        nket, norms, limit, near, table is not None, counts, table or (*bra[:2], *[nothing] * 5),
    )  # fmt: skip
