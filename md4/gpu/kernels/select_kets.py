"""The ket pairs that count with each bra pair in a gradient, and the primitive quartets that count of these.

A quartet counts unless its bound is below the tolerance: with F' of the largest derivative of the bra pair, F of the
ket pair (`md4.shells.schwarz.GradientBounds`) and the norms |D| of blocks,

    F'_ab F_cd sum_s [ |j_s| |D_ab| |D_cd| + |k_s|/2 (|D_ac| |D_bd| + |D_ad| |D_bc|) ] < tolerance.

Where Gamma is read from a table, the norm of its block is in place of the sum, and F are without factors f. Of a
quartet that counts, primitive quartets are left out for which the same with F' and F of primitive pairs is below a
`limit`.

First the kernel counts, for each bra pair, the ket pairs, and for each primitive bra pair, the primitive ket pairs, and
adds up the bounds of what does not count, and their squares. Bounds of ket pairs fall, so it ends where those of all
others are below `EARLY` times the tolerance, with the largest |D| of any shells in place of those of the quartet. These
larger bounds are added up there, which hardly changes the sums. For classes whose quartets are listed the kernel runs
again when the host has made room: it lists the shell quartets, those of each bra pair together, and the primitive
quartets, those of each primitive bra pair together, both in the order of the ket pairs that a warp takes, and one warp
after the other. A warp leaves out the turns in which it had found nothing.

A block takes a bra pair, and each of its warps 32 ket pairs at a time, whose primitive pairs are divided among the
lanes, unless each has one only. In shared memory each warp has a number of each primitive bra pair: how many primitive
ket pairs it has found, or in the second pass where the next one goes. A warp lists what it finds behind what the warps
before it find.
"""

from typing import NamedTuple

import numpy as np

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64, I64_2D, cuda, i32, i64, jit_device, types, u32, u64
from md4.gpu.emit.instructions import address_of, shared_address
from md4.gpu.emit.scalars import load_at, load_shared, load_shared_int, store_shared_int
from md4.gpu.kernels.gamma_table import TableNorms

THREADS, WARPS, LOG2_THREADS = 128, 4, 7
# Shared memory of a block for norms of densities, at most.
ROW_BYTES = 48 << 10
# What else a block has there besides its numbers of primitive pairs, at most.
OTHER_BYTES = 128
# Ket pairs are left out together where none of their bounds can reach this part of the tolerance.
EARLY = 0.01


class BoundedPairs(NamedTuple):
    """Shell pairs of a whole list.

    Attributes
    ----------
    shells : int64 array
        `packed_shells` of each pair.
    start : int64 array
        Range of each pair in the primitive pairs.
    bounds : float64 array
        F' of the bra, or F of the ket.
    of_prims : float64 array
        F' or F of each primitive pair.
    tails : float64 array
        Of the ket: the largest F of all pairs from the first on, from the `THREADS`-th, from twice the `THREADS`-th
        and so on, and 0 behind the last; then their sum, and that of their squares, in the same way.
    norms : float64 array
        |D| of each pair, one density after the other.
    """

    shells: I64
    start: I64
    bounds: F64
    of_prims: F64
    tails: F64
    norms: F64


class Norms(NamedTuple):
    """Norms of the blocks of the densities.

    Attributes
    ----------
    numbers : float64 array
        |D| of all pairs of shells, `nshell` by `nshell` for each density.
    largest : float64 array
        The largest number in each row of `numbers`, and after those of a density the largest of all.
    coulomb, exchange : float64 array
        j and k of each.
    nshell : int64
    tolerance : float64
    """

    numbers: F64
    largest: F64
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
        For each bra pair the numbers that its warps have found, of its primitive pairs and then of itself, and for each
        warp a bit of each of its turns, which take 32 ket pairs: whether one of them counts. The second pass reads
        them.
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


def bound_from_memory(norms, ket, cd, shells, a, b):
    """What the densities give the bound of a quartet; `shells` are packed ones of the ket (device function)."""
    total, nshell, c, d = 0.0, norms.nshell, shells >> 32, shells & 0xFFFFFFFF
    for s in range(norms.coulomb.size):
        j, k, numbers = abs(norms.coulomb[s]), 0.5 * abs(norms.exchange[s]), norms.numbers
        of_a, of_b = (s * nshell + a) * nshell, (s * nshell + b) * nshell
        total += j * (numbers[of_a + b] * ket.norms[s * ket.bounds.size + i64(cd)])
        total += k * (numbers[of_a + c] * numbers[of_b + d] + numbers[of_a + d] * numbers[of_b + c])
    return total


def bound_from_shared(norms, ket, cd, shells, rows_at):
    """As `bound_from_memory`, of what `bring_norms` wrote to the shared address `rows_at` (device function)."""
    of_c, of_d = i32(rows_at + 8 * (shells >> 32)), i32(rows_at + 8 * i32(shells))
    row_bytes, left, total, at = i32(8 * norms.nshell), i32(norms.coulomb.size), 0.0, cd
    of_ab = i32(rows_at + 2 * left * row_bytes)
    while left > 0:
        total += load_shared(of_ab) * ket.norms[at] + (
            load_shared(of_c) * load_shared(i32(of_d + row_bytes))
            + load_shared(of_d) * load_shared(i32(of_c + row_bytes))
        )
        of_c, of_d, of_ab = i32(of_c + 2 * row_bytes), i32(of_d + 2 * row_bytes), i32(of_ab + 8)
        at, left = at + u64(ket.bounds.size), i32(left - 1)
    return total


def largest_bound(norms, a, b):
    """What the densities give the bound of a quartet of a and b with any other shells at most (device function)."""
    total, nshell = 0.0, norms.nshell
    for s in range(norms.coulomb.size):
        row = s * (nshell + 1)
        total += abs(norms.coulomb[s]) * norms.numbers[(s * nshell + a) * nshell + b] * norms.largest[row + nshell]
        total += abs(norms.exchange[s]) * norms.largest[row + a] * norms.largest[row + b]
    return total


def words_of_turns(nket):
    """Words of the bits of a warp for so many ket pairs (device function)."""
    return (nket + 32 * THREADS - 1) >> LOG2_THREADS + 5


def early_end(tails, reach, limit):
    """The n from which `reach` times `BoundedPairs.tails` are below a limit; all of them fall (device function)."""
    first, last = i64(0), tails.size // 3 - 1
    while first < last:
        middle = (first + last) >> 1
        if reach * tails[middle] < limit:
            last = middle
        else:
            first = middle + 1
    return first


def bring_norms(norms, rows, a, b, tid, threads):
    """Writes |k|/2 times the row a of |D|, the row b, for each density, and then |j| |D_ab| (device function)."""
    nshell, count = norms.nshell, norms.coulomb.size
    for s in range(count):
        half_k, of_row, row = 0.5 * abs(norms.exchange[s]), s * nshell * nshell, 2 * s * nshell
        n = tid
        while n < nshell:
            rows[u64(row + n)] = half_k * norms.numbers[u64(of_row + a * nshell + n)]
            rows[u64(row + nshell + n)] = norms.numbers[u64(of_row + b * nshell + n)]
            n += threads
        if tid == 0:
            place = 2 * count * nshell + s
            rows[u64(place)] = abs(norms.coulomb[s]) * norms.numbers[u64(of_row + a * nshell + b)]


def next_turn(of_warps, first, turn, bits, turns):
    """(the turn after `turn` in which something counts, what is left of its bits), or `turns` (device function).

    `bits` are those of later turns in the same word; the words begin at `first`.
    """
    while bits == 0:
        turn = i32((turn | 31) + 1)
        if turn >= turns:
            return turns, bits
        bits = i32(of_warps[u64(first + (turn >> 5))])
    return i32((turn & -32) + cuda.popc(i32((bits & -bits) - 1))), i32(bits & (bits - 1))


def norm_in_table(norms, cd, ab):
    """As `bound_from_memory`, from `TableNorms`; `ab` is the number of the bra pair (device function)."""
    return norms.numbers[u64(norms.first + ab * norms.of_bra + i64(cd) * norms.of_ket)]


def select_kets(by_table=False):
    """Kernel factory; all sizes are run-time numbers. `by_table`: the norms are those of a table of Gamma."""
    threads, warps, log2, words_of = THREADS, WARPS, LOG2_THREADS, jit_device(words_of_turns)
    from_memory, from_table = jit_device(bound_from_memory), jit_device(norm_in_table)
    from_shared, bring = jit_device(bound_from_shared), jit_device(bring_norms)
    of_all, end_of, after = jit_device(largest_bound), jit_device(early_end), jit_device(next_turn)
    of_gamma = TableNorms if by_table else Norms

    def kernel(
        bra: BoundedPairs, first_bra: i64, ket: BoundedPairs, nket: i64, norms: of_gamma, limit: types.float64,
        near: types.boolean, write: types.boolean, counts: KetCounts, table: QuartetTable,
    ):  # fmt: skip
        rows, found = cuda.shared.array(0, types.float64), cuda.shared.array(0, types.int32)
        ends, sums = cuda.shared.array(warps, types.int32), cuda.shared.array((warps, 2), types.float64)
        tid, pair = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        lane, warp, ab = tid & 31, tid >> 5, first_bra + pair
        a, b, own = bra.shells[ab] >> 32, bra.shells[ab] & 0xFFFFFFFF, bra.bounds[ab]
        first_prim, nprim = bra.start[ab], bra.start[ab + 1] - bra.start[ab]
        of_chunk, width, of_rows = first_prim - bra.start[first_bra], nprim + 1, i64(0)
        behind, left, squares = i32(table.first[pair, 1] if write else nket), 0.0, 0.0
        if not by_table and not write:
            reach = own * of_all(norms, a, b)
            early, count = end_of(ket.tails, reach, EARLY * norms.tolerance), ket.tails.size // 3
            behind = i32(min(nket, early * threads))
            if tid == 0 and early < count - 1:
                left = reach * ket.tails[count + early]
                squares = reach * reach * ket.tails[2 * count + early]
        if not by_table and near:
            of_rows = norms.coulomb.size * (2 * norms.nshell + 1)
            if behind > 0:
                bring(norms, rows, a, b, tid, threads)
        # the warp's numbers, behind the norms in shared memory, and those of all warps in memory, with their bits
        word_count = words_of(nket)
        mine, of_pair, n = 2 * of_rows + warp * width, (of_chunk + pair * (1 + word_count)) * warps, lane
        of_turns = of_pair + warps * width + warp * word_count
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
        many, below, last = i32(found[mine + nprim]), u32((i64(1) << lane) - 1), i32(0)
        rows_at, own_lane, turns = i32(shared_address(rows)), i32(lane), i32((behind + threads - 1) >> log2)
        mine_at, prims_at = i32(rows_at + 4 * mine), address_of(bra.of_prims, first_prim)
        turn, bits = i32(0), i32(0)
        if write:
            turn, bits = after(counts.of_warps, of_turns, i32(-1), bits, turns)
        next_cd = u64(u32(max(0, min(i32(turn * threads + tid), i32(behind - 1)))))
        next_shells, next_bound = ket.shells[next_cd], ket.bounds[next_cd]
        while turn < turns:
            # what the next turn needs is on its way during this one
            cd, shells, of_both, n = next_cd, next_shells, own * next_bound, i32(turn * threads + tid)
            this, turn = turn, i32(turn + 1)
            if write:
                turn, bits = after(counts.of_warps, of_turns, this, bits, turns)
            next_cd = u64(u32(min(i32(turn * threads + tid), i32(behind - 1))))
            next_shells, next_bound = ket.shells[next_cd], ket.bounds[next_cd]
            if by_table:
                of_d = from_table(norms, cd, ab)
            elif near:
                of_d = from_shared(norms, ket, cd, shells, rows_at)
            else:
                of_d = from_memory(norms, ket, cd, shells, a, b)
            size, k_first, k_prims = of_both * of_d, i64(0), i32(0)
            if n < behind and not size < norms.tolerance:
                k_first = ket.start[cd]
                k_prims = i32(ket.start[cd + u64(1)] - k_first)
            counting = k_prims > 0
            skipped = 0.0 if counting or n >= behind else size
            left += skipped
            squares += skipped * skipped
            last = i32(n + 1) if counting else last
            # votes in both passes: a loop that contains one is not duplicated, so that both decide alike
            votes = u32(cuda.ballot_sync(-1, counting))
            if not write:
                bits = i32(bits | ((1 if votes != 0 else 0) << (this & 31)))
                if (this & 31) == 31 or turn == turns:
                    if own_lane == 0:
                        counts.of_warps[u64(of_turns + (this >> 5))] = bits
                    bits = i32(0)
            if votes == 0:
                continue
            place, upto, end = i32(many + cuda.popc(u32(votes & below))), k_prims, i32(1)
            many = i32(many + cuda.popc(votes))
            if write and counting:
                table.bra[u64(place)], table.ket[u64(place)] = ab, cd
            # unless a ket pair has several primitive pairs, each lane keeps its own
            several = u32(cuda.ballot_sync(-1, k_prims > 1)) != 0
            if several:
                step = i32(1)
                while step < 32:
                    other = cuda.shfl_up_sync(-1, upto, step)
                    upto = i32(upto + (other if own_lane >= step else 0))
                    step = i32(2 * step)
                end = i32(cuda.shfl_sync(-1, upto, 31))
            own_first, tile = i32(k_first - upto + k_prims), i32(0)
            while tile < end:
                kl, listed, other_size, without, alive = own_first, place, of_d, 0.0, counting
                if several:
                    # the ket pair to which the k-th primitive pair belongs
                    k, owner, step = i32(tile + own_lane), i32(0), 16
                    while step > 0:
                        owner = i32(owner + (step if cuda.shfl_sync(-1, upto, owner + step - 1) <= k else 0))
                        step //= 2
                    kl, listed = i32(cuda.shfl_sync(-1, own_first, owner) + k), cuda.shfl_sync(-1, place, owner)
                    other_size, alive = cuda.shfl_sync(-1, of_d, owner), k < end
                if alive:
                    other_size *= ket.of_prims[u64(kl)]
                at, of_prim, prim = mine_at, prims_at, i32(first_prim)
                while at < i32(mine_at + 4 * nprim):
                    size = load_at(of_prim) * other_size
                    surviving = alive and not size < limit
                    without += size if alive and not surviving else 0.0
                    votes, quartet = u32(cuda.ballot_sync(-1, surviving)), load_shared_int(at)
                    cuda.syncwarp()
                    if own_lane == 0:
                        store_shared_int(at, i32(quartet + cuda.popc(votes)))
                    if write and surviving:
                        to = u64(quartet + cuda.popc(u32(votes & below)))
                        table.ket_prims[to], table.shells[to] = kl, listed
                        if table.bra_prims.size > 0:
                            table.bra_prims[to] = prim
                    at, of_prim, prim = i32(at + 4), of_prim + 8, i32(prim + 1)
                left += without
                squares += without * without
                tile = i32(tile + 32)
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
                last = max(last, ends[other_warp])
                left += sums[other_warp, 0]
                squares += sums[other_warp, 1]
            numbers[2 * pair + 1] = last
            counts.left_out[2 * ab] += left
            counts.left_out[2 * ab + 1] += squares

    return Kernel(kernel, (threads, 8))


# launcher


def tails_of(bounds):
    """`BoundedPairs.tails` of the bounds of a list."""
    steps = np.arange(0, len(bounds), THREADS)
    with np.errstate(over="ignore"):
        highest = np.maximum.reduceat(bounds, steps) if len(steps) else bounds
        sums = [np.add.reduceat(values, steps) if len(steps) else values for values in (bounds, bounds**2)]
        upto = [np.maximum.accumulate(highest[::-1]), *(np.cumsum(values[::-1]) for values in sums)]
    return np.concatenate([np.append(values[::-1], 0.0) for values in upto])


def largest_norms(norms):
    """`Norms.largest` of the norms of blocks of densities, shape (n, nshell, nshell)."""
    rows = norms.max(axis=2)
    return np.append(rows, rows.max(axis=1, keepdims=True), axis=1)


def packed_shells(pairs):
    """Both shells of each pair, given in shape (npair, 2), in one int64: the first one in its upper half."""
    return pairs[:, 0] << 32 | pairs[:, 1]


def count_sizes(npair, nprim, nket):
    """Numbers of `KetCounts.numbers` and `KetCounts.of_warps` of bra pairs, with primitive pairs, and ket pairs."""
    return 2 * npair + nprim, WARPS * (npair * (1 + words_of_turns(nket)) + nprim)


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
    nothing, nbytes = counts[0].part(0, (0,)), ROW_BYTES + 1 if by_table else 8 * norms[2].size * (2 * norms[4] + 1)
    near = nbytes <= ROW_BYTES
    context.launch(
        Variant(select_kets, (by_table,)), npair, THREADS, nbytes * near + 4 * WARPS * (most + 1), bra, first_bra, ket,
        nket, norms, limit, near, table is not None, counts, table or (bra[0].part(0, (0, 2)), bra[1], *[nothing] * 5),
    )  # fmt: skip
