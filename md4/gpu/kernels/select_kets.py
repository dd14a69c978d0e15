"""The ket pairs that count with each bra pair in a gradient, and the primitive quartets that count of these.

A quartet counts unless its bound is below the tolerance: with F' of the largest derivative of the bra pair, F of the
ket pair (`md4.shells.schwarz.GradientBounds`) and the norms |D| of blocks,

    F'_ab F_cd sum_s [ |j_s| |D_ab| |D_cd| + |k_s|/2 (|D_ac| |D_bd| + |D_ad| |D_bc|) ] < tolerance.

Where Gamma is read from a table, the norm of its block is in place of the sum, and F are without factors f. Of a
quartet that counts, primitive quartets are left out for which the same with F' and F of primitive pairs is below a
limit. Quartets are `single` if this bound is below another limit, after factors by which the bounds of the primitive
pairs of bra and ket may add up to more than that of the pair: they are listed apart, behind all others.

First the kernel counts, for each bra pair and each ket list, the ket pairs, and for each primitive bra pair, the
primitive ket pairs, and adds up the bounds of what does not count, and their squares. Bounds of the ket pairs of a list
fall, so it ends where those of all others are below `EARLY` times the tolerance, with the largest |D| of any shells in
place of those of the quartet. These larger bounds are added up there, which hardly changes the sums. For classes whose
quartets are listed the kernel runs again for that ket list when the host has made room: it lists the shell quartets,
those of each bra pair together, and the primitive quartets, those of each primitive bra pair together, both in the
order of the ket pairs that a warp takes, and one warp after the other.

A block takes a bra pair with one list after the other, and each of its warps 32 ket pairs at a time, whose primitive
pairs are divided among the lanes, unless each has one only. In shared memory each warp has two numbers of each
primitive bra pair, of quartets that are not single and of those that are: how many primitive ket pairs it has found, or
in the second pass where the next one goes. A warp lists what it finds behind what the warps before it find.
"""

from typing import NamedTuple

import numpy as np

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, F64_2D, I32, I64, I64_2D, cuda, f64, i32, i64, jit_device, types, u32, u64
from md4.gpu.emit.instructions import address_of, shared_address
from md4.gpu.emit.scalars import (
    address_at,
    load_at,
    load_shared,
    load_shared_int,
    load_two_ints,
    quotient,
    store_shared_int,
)
from md4.gpu.kernels.gamma_table import TableNorms

THREADS, WARPS = 128, 4
# Shared memory of a block for norms of densities, at most.
ROW_BYTES = 48 << 10
# What else a block has there besides its numbers of primitive pairs, at most.
OTHER_BYTES = 128
# Ket pairs are left out together where none of their bounds can reach this part of the tolerance.
EARLY = 0.01


class BoundedPairs(NamedTuple):
    """Shell pairs of all lists, one list after the other.

    Attributes
    ----------
    shells : int64 array
        `packed_shells` of each pair.
    prims : int64 array
        `packed_prims` of each pair, with its `excess` as a bra and as a ket.
    bounds : float64 array
        F' of the bra, or F of the ket.
    of_prims : float64 array
        F' or F of each primitive pair.
    tails : float64 array
        Of the ket, for each list: the largest F of all pairs from the first on, from the `THREADS`-th, from twice the
        `THREADS`-th and so on, and 0 behind the last; then their sum, and that of their squares, in the same way.
    norms : float64 array
        |D| of each pair, one density after the other; empty without J.
    """

    shells: I64
    prims: I64
    bounds: F64
    of_prims: F64
    tails: F64
    norms: F64


class FirstPair(NamedTuple):
    """The bra pair of the first block.

    Attributes
    ----------
    pair, of_list : int64
        Its number among the pairs of all lists, and that of the first pair of its list.
    prim : int64
        The number of the first primitive pair of its list among those of all lists.
    """

    pair: i64
    of_list: i64
    prim: i64


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
        For each ket list, of each bra pair: with how many ket pairs it is in quartets that count and are not single, in
        single ones, and the end of the last one that counts. Then of each primitive bra pair: how many primitive ket
        pairs count in quartets that are not single, and in single ones.
    of_warps : int32 array
        For each ket list, of each bra pair the two numbers that its warps have found, of its primitive pairs and then
        of itself. The second pass reads them.
    left_out : float64 array
        Of each bra pair the sum of the bounds of what does not count, and then of each that of their squares. Bounds of
        the primitive quartets of a primitive ket pair are added up before they are squared.
    """

    numbers: I32
    of_warps: I32
    left_out: F64


class QuartetTable(NamedTuple):
    """The quartets that count with the bra pairs of a chunk.

    Attributes
    ----------
    first : int64 array, two-dimensional
        For each bra pair of the chunk, and behind the last: the number of the first shell quartet that is not single,
        that of the first single one, those of a whole list of kets, and the end of the last ket pair that counts.
    first_quartets : int64 array
        For each primitive bra pair of the chunk, and behind the last: the number of the first primitive quartet that is
        not single, and that of the first single one. The first ones of the chunk stand in what follows at 0, and
    single_shells, single_quartets : int64
        at these places.
    bra, ket : int32 array
        Numbers of both pairs of each shell quartet in their whole lists.
    bra_prims, ket_prims, shells : int32 array
        Numbers of both primitive pairs of each primitive quartet in their whole lists, and that of its shell quartet
        among those of its kind. The first of them may be empty, and is not written then.
    """

    first: I64_2D
    first_quartets: I64
    single_shells: i64
    single_quartets: i64
    bra: I32
    ket: I32
    bra_prims: I32
    ket_prims: I32
    shells: I32


def bound_from_memory(norms, ket, cd, c, d, a, b, with_j):
    """What the densities give the bound of a quartet of shells (device function)."""
    total, nshell = 0.0, norms.nshell
    for s in range(norms.coulomb.size):
        k, numbers = 0.5 * abs(norms.exchange[s]), norms.numbers
        of_a, of_b = (s * nshell + a) * nshell, (s * nshell + b) * nshell
        if with_j:
            total += abs(norms.coulomb[s]) * (numbers[of_a + b] * ket.norms[s * ket.bounds.size + cd])
        total += k * (numbers[of_a + c] * numbers[of_b + d] + numbers[of_a + d] * numbers[of_b + c])
    return total


def exchange_from_shared(of_c, of_d, row_bytes):
    """Those of exchange of one density, from the places of c and d in a shared row (device function)."""
    first = load_shared(of_c) * load_shared(i32(of_d + row_bytes))
    return first + load_shared(of_d) * load_shared(i32(of_c + row_bytes))


def make_bound_from_shared():
    """Device function: as `bound_from_memory`, of what `bring_norms` wrote to the shared address `rows_at`."""
    of_exchange = jit_device(exchange_from_shared)

    def bound_from_shared(norms, ket, cd, c, d, rows_at, with_j):
        of_c, of_d, row_bytes = i32(rows_at + 8 * c), i32(rows_at + 8 * d), i32(8 * norms.nshell)
        total, count = of_exchange(of_c, of_d, row_bytes), i32(norms.coulomb.size)
        left = i32(count - 1)
        while left > 0:
            of_c, of_d, left = i32(of_c + 2 * row_bytes), i32(of_d + 2 * row_bytes), i32(left - 1)
            total += of_exchange(of_c, of_d, row_bytes)
            cuda.syncwarp()  # a loop that contains one is not unrolled
        if with_j:
            of_ab, left = i32(rows_at + 2 * count * row_bytes), count
            while left > 0:
                total += load_shared(of_ab) * ket.norms[u64(cd)]
                of_ab, left = i32(of_ab + 8), i32(left - 1)
                cd += ket.bounds.size
        return total

    return jit_device(bound_from_shared)


def largest_bound(norms, a, b):
    """What the densities give the bound of a quartet of a and b with any other shells at most (device function)."""
    total, nshell = 0.0, norms.nshell
    for s in range(norms.coulomb.size):
        row = s * (nshell + 1)
        total += abs(norms.coulomb[s]) * norms.numbers[(s * nshell + a) * nshell + b] * norms.largest[row + nshell]
        total += abs(norms.exchange[s]) * norms.largest[row + a] * norms.largest[row + b]
    return total


def early_end(tails, begin, count, reach, limit):
    """The n from which `reach` times the `count` tails of a list are below a limit; they fall (device function).

    They begin at `begin` in `BoundedPairs.tails`.
    """
    first, last = i64(0), count - 1
    while first < last:
        middle = (first + last) >> 1
        if reach * tails[begin + middle] < limit:
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


def norm_in_table(norms, cd, ab):
    """As `bound_from_memory`, from `TableNorms` of all pairs of all lists (device function)."""
    return norms.numbers[u64(norms.first + ab * norms.of_bra + cd * norms.of_ket)]


def select_kets(norms_in):
    """Kernel factory; all sizes are run-time numbers.

    norms_in : {'shared', 'memory', 'table'}
        Where a block has the norms of densities: in shared memory what it needs of them, if there is room; else in
        memory; or the norms are those of a table of Gamma.
    """
    threads, warps, near, by_table = THREADS, WARPS, norms_in == "shared", norms_in == "table"
    from_memory, from_table = jit_device(bound_from_memory), jit_device(norm_in_table)
    from_shared = make_bound_from_shared()
    of_all, end_of, bring = map(jit_device, (largest_bound, early_end, bring_norms))
    of_gamma = TableNorms if by_table else Norms

    def kernel(
        bra: BoundedPairs, first: FirstPair, npair: i64, nprim: i64, ket: BoundedPairs, lists: I64_2D, limits: F64_2D,
        norms: of_gamma, with_j: types.boolean, write: types.boolean, counts: KetCounts, table: QuartetTable,
    ):  # fmt: skip
        rows, found = cuda.shared.array(0, types.float64), cuda.shared.array(0, types.int32)
        ends, sums = cuda.shared.array(warps, types.int32), cuda.shared.array((warps, 2), types.float64)
        tid, pair = i32(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        lane, warp, ab = i32(tid & 31), i32(tid >> 5), first.pair + pair
        a, b, own, of_bra = bra.shells[ab] >> 32, bra.shells[ab] & 0xFFFFFFFF, bra.bounds[ab], bra.prims[ab]
        bra_prim, of_chunk = i32(of_bra >> 32), (of_bra >> 32) - (bra.prims[first.pair] >> 32)
        # numbers of a warp: two of each primitive pair, and of the pair itself
        width, of_rows, number = i32(2 * (of_bra & 0xFFFF) + 2), i64(0), i64(0)
        reach, left, squares = 0.0, 0.0, 0.0
        if not by_table and not write:
            reach = own * of_all(norms, a, b)
        if near:
            of_rows = norms.coulomb.size * (2 * norms.nshell + 1)
            bring(norms, rows, a, b, i64(tid), i64(threads))
        # the warp's numbers, behind the norms in shared memory
        mine, below, rows_at = i32(2 * of_rows + warp * width), u32((i64(1) << lane) - 1), i32(shared_address(rows))
        mine_at, prims_at = i32(rows_at + 4 * mine), address_of(bra.of_prims, first.prim + i64(bra_prim))
        while number < lists.shape[0] - 1:
            first_cd, begin, limit = lists[number, 0], lists[number, 1], limits[number, 0]
            least = limits[number, 1] / (i64(1) << ((of_bra >> 24) & 31))
            behind = i32(table.first[pair, 2] if write else lists[number + 1, 0] - lists[number, 0])
            if not by_table and not write:
                count = quotient(lists[number + 1, 1] - begin, i64(3))
                early = end_of(ket.tails, begin, count, reach, EARLY * norms.tolerance)
                behind = i32(min(i64(behind), early * threads))
                if tid == 0 and early < count - 1:
                    left += reach * ket.tails[begin + count + early]
                    squares += reach * reach * ket.tails[begin + 2 * count + early]
            # the numbers of all warps are in memory
            of_pair, n = 2 * (number * (npair + nprim) + of_chunk + pair) * warps, lane
            while n < width:
                place = i64(0)
                if write:
                    kind = i64(n & 1)
                    if n < width - 2:
                        place = table.first_quartets[2 * of_chunk + n] - table.first_quartets[kind]
                        place += kind * table.single_quartets
                    else:
                        place = table.first[pair, kind] - table.first[0, kind]
                    for other_warp in range(warp):
                        place += counts.of_warps[of_pair + other_warp * width + n]
                found[u64(i32(mine + n))] = place
                n = i32(n + 32)
            cuda.syncthreads()
            many, singles = i32(found[u64(i32(mine + width - 2))]), i32(found[u64(i32(mine + width - 1))])
            last, n = i32(0), tid
            ket_prims_at = address_of(ket.of_prims, lists[number, 2])
            shells_at, bounds_at = address_of(ket.shells, first_cd), address_of(ket.bounds, first_cd)
            cd = i32(max(0, min(n, i32(behind - 1))))
            next_d, next_c = load_two_ints(address_at(shells_at, cd, 8))
            next_bound = load_at(address_at(bounds_at, cd, 8))
            while i32(n - lane) < behind:
                # what the next turn needs is on its way during this one
                c, d, of_both, here = next_c, next_d, own * next_bound, first_cd + i64(cd)
                cd = i32(min(i32(n + threads), i32(behind - 1)))
                next_d, next_c = load_two_ints(address_at(shells_at, cd, 8))
                next_bound = load_at(address_at(bounds_at, cd, 8))
                if by_table:
                    of_d = from_table(norms, here, ab)
                elif near:
                    of_d = from_shared(norms, ket, here, c, d, rows_at, with_j)
                else:
                    of_d = from_memory(norms, ket, here, c, d, a, b, with_j)
                size, of_ket = of_both * of_d, i64(0)
                if n < behind and not size < norms.tolerance:
                    of_ket = ket.prims[u64(first_cd + n)]
                k_first, k_prims, excess = i32(of_ket >> 32), i32(of_ket & 0xFFFF), i32((of_ket >> 16) & 31)
                counting = k_prims > 0
                skipped = 0.0 if counting or n >= behind else size
                left += skipped
                squares += skipped * skipped
                last = i32(n + 1) if counting else last
                n = i32(n + threads)
                # votes in both passes: a loop that contains one is not duplicated, so that both decide alike
                votes = u32(cuda.ballot_sync(-1, counting))
                if votes == 0:
                    continue
                single = counting and size * f64(i32(i32(1) << excess)) < least
                of_singles, kind = u32(cuda.ballot_sync(-1, single)), i32(0)
                votes = u32(votes & ~of_singles)
                # the single ones after the others
                while kind < 2:
                    if votes != 0:
                        own_kind = u32(votes >> u32(lane)) & 1 != 0
                        place = i32((singles if kind > 0 else many) + cuda.popc(u32(votes & below)))
                        if kind > 0:
                            singles = i32(singles + cuda.popc(votes))
                        else:
                            many = i32(many + cuda.popc(votes))
                        if write and own_kind:
                            to = u64(place + (table.single_shells if kind > 0 else i64(0)))
                            table.bra[to], table.ket[to] = ab - first.of_list, n - threads
                        prims, end = i32(k_prims if own_kind else 0), i32(1)
                        # unless a ket pair has several primitive pairs, each lane keeps its own
                        upto, several = prims, u32(cuda.ballot_sync(-1, prims > 1)) != 0
                        if several:
                            step = i32(1)
                            while step < 32:
                                other = cuda.shfl_up_sync(-1, upto, step)
                                upto = i32(upto + (other if lane >= step else 0))
                                step = i32(2 * step)
                            end = i32(cuda.shfl_sync(-1, upto, 31))
                        own_first, tile = i32(k_first - upto + prims), i32(0)
                        while tile < end:
                            kl, listed, other_size, without, alive = own_first, place, of_d, 0.0, own_kind
                            if several:
                                # the ket pair to which the k-th primitive pair belongs
                                k, owner, step = i32(tile + lane), i32(0), 16
                                while step > 0:
                                    behind_it = cuda.shfl_sync(-1, upto, owner + step - 1) <= k
                                    owner = i32(owner + (step if behind_it else 0))
                                    step //= 2
                                kl = i32(cuda.shfl_sync(-1, own_first, owner) + k)
                                listed = cuda.shfl_sync(-1, place, owner)
                                other_size, alive = cuda.shfl_sync(-1, of_d, owner), k < end
                            if alive:
                                other_size *= load_at(address_at(ket_prims_at, kl, 8))
                            at, of_prim, prim = i32(mine_at + 4 * kind), prims_at, bra_prim
                            while at < i32(mine_at + 4 * width - 8):
                                size = load_at(of_prim) * other_size
                                surviving = alive and not size < limit
                                without += size if alive and not surviving else 0.0
                                votes_here, quartet = u32(cuda.ballot_sync(-1, surviving)), load_shared_int(at)
                                cuda.syncwarp()
                                if lane == 0:
                                    store_shared_int(at, i32(quartet + cuda.popc(votes_here)))
                                if write and surviving:
                                    to = u64(quartet + cuda.popc(u32(votes_here & below)))
                                    table.ket_prims[to], table.shells[to] = kl, listed
                                    if table.bra_prims.size > 0:
                                        table.bra_prims[to] = prim
                                at, of_prim, prim = i32(at + 8), of_prim + 8, i32(prim + 1)
                            left += without
                            squares += without * without
                            tile = i32(tile + 32)
                            cuda.syncwarp()
                    votes, kind = of_singles, i32(kind + 1)
            number += 1
            if write:
                continue
            other = 16
            while other > 0:
                last = max(last, cuda.shfl_xor_sync(-1, last, other))
                other >>= 1
            cuda.syncwarp()
            if lane == 0:
                found[u64(i32(mine + width - 2))], found[u64(i32(mine + width - 1))], ends[warp] = many, singles, last
            cuda.syncthreads()
            n, of_list = tid, (number - 1) * (3 * npair + 2 * nprim)
            while n < width:
                many = i32(0)
                for other_warp in range(warps):
                    one = i32(found[u64(2 * of_rows + other_warp * width + n)])
                    counts.of_warps[of_pair + other_warp * width + n] = one
                    many = i32(many + one)
                place = 3 * npair + 2 * of_chunk + n if n < width - 2 else 3 * pair + n - (width - 2)
                counts.numbers[of_list + place] = many
                n = i32(n + threads)
            if tid == 0:
                for other_warp in range(1, warps):
                    last = max(last, ends[other_warp])
                counts.numbers[of_list + 3 * pair + 2] = last
            cuda.syncthreads()
        if write:
            return
        other = 16
        while other > 0:
            left += cuda.shfl_xor_sync(-1, left, other)
            squares += cuda.shfl_xor_sync(-1, squares, other)
            other >>= 1
        if lane == 0:
            sums[warp, 0], sums[warp, 1] = left, squares
        cuda.syncthreads()
        if tid == 0:
            for other_warp in range(1, warps):
                left += sums[other_warp, 0]
                squares += sums[other_warp, 1]
            counts.left_out[pair], counts.left_out[npair + pair] = left, squares

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


def packed_prims(start, excess=(0, 0)):
    """In one int64 for each pair of a list: its first primitive pair, in the upper half, `excess`, and how many it has.

    Those are 8 bits for it as a bra, 8 bits as a ket, and 16 bits.
    """
    return start[:-1] << 32 | excess[1] << 24 | excess[0] << 16 | np.diff(start)


def excess_of(start, bounds, of_prims):
    """For each pair of a list the n up to 30 for which the bounds of its primitive pairs add up to 2^n times its own.

    At most, or n is 30.
    """
    sums = np.bincount(np.repeat(np.arange(len(bounds)), np.diff(start)), of_prims, len(bounds))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(sums > bounds, sums / bounds, 1.0)
    return np.ceil(np.log2(np.minimum(ratios, 2.0**30))).astype(np.int64)


def count_sizes(npair, nprim):
    """Numbers of `KetCounts.numbers` and `KetCounts.of_warps` of so many pairs with so many primitive pairs and a list.
    """
    return 3 * npair + 2 * nprim, 2 * WARPS * (npair + nprim)


def launch_select(
    context, first, npair, nprim, most, bra, ket, lists, limits, norms, with_j, counts, table=None, by_table=False
):  # fmt: skip
    """Counts the pairs of ket lists that count with bra pairs, or writes the `table` of one ket list.

    Parameters
    ----------
    first : tuple
        Fields of `FirstPair`.
    npair, nprim, most : int
        Bra pairs from that one on, primitive pairs of these, and how many one of them has at most.
    bra, ket : tuple
        Fields of `BoundedPairs` of all lists.
    lists : Buffer of int64, shape (nlist + 1, 3)
        Where each ket list begins in the pairs of all lists, in `BoundedPairs.tails` and in the primitive pairs of all
        lists, and where the last ends. All pairs of a list take part, or those that `table` says.
    limits : Buffer, shape (nlist, 2)
        For each ket list, the bounds below which primitive quartets are left out, and below which quartets are single.
    norms, counts, table : tuple
        Fields of `Norms`, or of `TableNorms` if `by_table`, `KetCounts` and `QuartetTable`.
    with_j : bool
        Whether a factor j is not zero.
    """
    nothing, nbytes = counts[0].part(0, (0,)), 0 if by_table else 8 * norms[2].size * (2 * norms[4] + 1)
    norms_in = "table" if by_table else "shared" if nbytes <= ROW_BYTES else "memory"
    context.launch(
        Variant(select_kets, (norms_in,)), npair, THREADS, nbytes * (norms_in == "shared") + 8 * WARPS * (most + 1),
        bra, first, npair, nprim, ket, lists, limits, norms, with_j, table is not None, counts,
        table or (lists.part(0, (0, 3)), bra[1], 0, 0, *[nothing] * 5),
    )  # fmt: skip
