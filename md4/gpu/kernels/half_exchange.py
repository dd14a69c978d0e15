"""K with a derivative on the first function (`md4.gpu.derivative_matrices`): integrals times D, on tensor cores.

    W[p, j, l] = sum_k (p|kl) D_jk

of the Hermite functions p of primitive pairs ij, sums in a fixed order. (p|kl) are U of gradients
(`md4.gpu.kernels.reverse_sums`). A warp takes a bra pair and a shell l, and goes through the shells k with which l is
in a ket list, 8 rows (k, l) of U at a time, for all l of the shell side by side. Blocks of 8 p of an l, up to `EIGHTS`
of them, come from U to registers as they are, in pairs as left operands, and D of these k and of 8 functions of i and
of j, which both are a j of some derivative, as right ones.
"""

from functools import cache, partial
from typing import NamedTuple

import numpy as np

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64, cuda, i32, i64, jit_device
from md4.gpu.emit.instructions import (
    address_of,
    address_plus,
    global_int,
    load,
    load_if,
    make_empty,
    mma_16x8x8,
    mma_by_halves,
    store_if,
)
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.values import FP64, OPEN, first_case, select, tuple_of, word
from md4.gpu.kernels.groups import HalfTransformed, PairRange, pair_range, primitives_of
from md4.gpu.kernels.reverse_sums import FunctionPairs
from md4.gpu.staircases import hermite_order
from md4.gpu.tiles import blocks_of_8

EIGHTS = 8  # blocks of 8 p of an l that a warp has at most; `of_first_lanes` and `half_exchange` list them one by one
# Warps that a multiprocessor is to hold at once, if each has one block of 8 functions of i and j, or two, the most.
HELD = (16, 12)
MOST_WARPS = (1 << 31) - 1  # of a launch, whose numbers are divided as 32-bit integers


class Members(NamedTuple):
    """Which pairs of a list have each of its shells.

    Attributes
    ----------
    first : int64 array
        Those of the n-th shell are members[first[n]] to members[first[n + 1] - 1].
    members : int64 array
        2 n + 1 where the shell is the second one of pair n, else 2 n; they rise.
    own, others : int64 array
        First AO of each of these shells, and of the other shell of each of these pairs.
    """

    first: I64
    members: I64
    own: I64
    others: I64


class HalfExchange(NamedTuple):
    """W: numbers[((prim functions + f) nao + l) width + n] for the f-th of the functions of i, then of j.

    The n-th p is that of U, whose places for no p are zero.

    Attributes
    ----------
    numbers : float64 array
    width, functions, nao : int64
    """

    numbers: F64
    width: i64
    functions: i64
    nao: i64


@cache
def make_load_d(blocks):
    """Intrinsic (density, functions, limits, aos, row) -> D of two rows for each of `blocks` blocks of functions.

    They are density[functions[n] + aos[m]] where the row, or the fourth one after it, is below limits[n], else zero.
    """

    @word(tuple_of(FP64, 2 * blocks), OPEN, *[tuple_of(kind, 2) for kind in (i64, i32, i64)], i32)
    def load_d(density, functions, limits, aos, row):
        places = [density.at(ao) for ao in aos]
        return [
            load_if(place + functions[n] * 8, (limits[n] - row, 4 * m))[0]
            for n in range(blocks) for m, place in enumerate(places)
        ]  # fmt: skip

    return load_d


@cache
def make_add_rows(blocks, wide):
    """Intrinsic (sums, columns, own, rows, steps, d, count) -> sums, of two rows of U of each lane.

    The sums += U times D for the first `count` columns, that is, blocks of 8 p of an l: two of them are a fragment of
    16 rows. An odd number of them comes with the next one, which must be in U, too. U of the lane's p and row m has the
    address columns[n] + rows[m] + own[n] steps[m]. `wide`: m16n8k8 instructions, else m8n8k4.
    """
    tile, mma = tuple_of(FP64, 2 * blocks * EIGHTS), mma_16x8x8 if wide else mma_by_halves
    bytes_of = tuple_of(i64, EIGHTS), tuple_of(i32, EIGHTS), tuple_of(i64, 2), tuple_of(i32, 2)

    @word(tile, tile, *bytes_of, tuple_of(FP64, 2 * blocks), i32)
    def add_rows(sums, columns, own, rows, steps, d, count):
        def products(many):
            found = list(sums)
            numbers = [
                load("global.nc", address_plus(columns[n] + row, step, own[n]), effects=False)[0]
                for n in range(many) for row, step in zip(rows, steps)
            ]  # fmt: skip
            for n in range(0, many, 2):
                one, below, two, below_two = (numbers[2 * n + m] for m in (0, 2, 1, 3))
                for m in range(blocks):
                    k = 2 * n * blocks + 4 * m
                    found[k : k + 4] = mma(found[k : k + 4], [one, below, two, below_two], d[2 * m : 2 * m + 2])
            return found

        cases = [(partial(count.__lt__, n + 1), partial(products, n)) for n in range(2, EIGHTS, 2)]
        return first_case(count.builder, [*cases, (None, partial(products, EIGHTS))])

    return add_rows


@cache
def make_add_columns(blocks):
    """Intrinsic (sums, array, columns, stride, p, order, lane, count, functions): adds the sums to W.

    The lane's p of a column is p[n] + lane // 4, and it has the functions 2 (lane % 4) and the next one of each block,
    which go to array[columns[n] + lane // 4 + f stride], for columns below `count`, functions below `functions`, and p
    whose `order` is not negative.
    """
    tile, of_columns = tuple_of(FP64, 2 * blocks * EIGHTS), tuple_of(i64, EIGHTS)

    @word(None, tile, OPEN, of_columns, i64, tuple_of(i32, EIGHTS), OPEN, i64, i32, i64)
    def add_columns(sums, array, columns, stride, p, order, lane, count, functions):
        row, f, step = lane >> 2, (lane & 3) << 1, stride * 8
        for n in range(EIGHTS):
            here, no_p = array.at(columns[n] + row + f * stride), global_int(order.at(p[n].i64 + row, 4)) < 0
            left = select(count > n, select(no_p, 0, functions - f), 0)
            # places of the two functions of each block among the sums, and how many functions further on they are
            places = [(4 * (n // 2 * blocks + m) + 2 * (n % 2) + k, 8 * m + k) for m in range(blocks) for k in range(2)]
            old = [load("global", here + step * further, live=(left, further))[0] for _, further in places]
            for (place, further), before in zip(places, old):
                store_if(here + step * further, [before + sums[place]], (left, further))

    return add_columns


def first_member(members, begin, end, pair, lane):
    """The first place from `begin` to `end` of a pair with at least this number, by a whole warp (device function)."""
    while begin < end:
        step = (end - begin + 31) >> 5
        mine = begin + lane * step
        less = mine < end and members[min(mine, end - 1)] < 2 * pair
        count = i64(cuda.popc(i64(cuda.ballot_sync(-1, less)) & 0xFFFFFFFF))
        if count == 0:
            return begin
        end = min(end, begin + count * step)
        begin += (count - 1) * step + 1
    return begin


def of_first_lanes(value):
    """The values of the first `EIGHTS` lanes of the warp (device function)."""
    of = cuda.shfl_sync
    return (
        of(-1, value, 0), of(-1, value, 1), of(-1, value, 2), of(-1, value, 3),
        of(-1, value, 4), of(-1, value, 5), of(-1, value, 6), of(-1, value, 7),
    )  # fmt: skip


def address_in_u(u, source, p, row, order):
    """Address of the lane's p of a block of p; in place of no p, that of the first one (device function)."""
    return address_of(u.numbers, source + (row if order[p + row] >= 0 else 0))


def next_row(member, k, members, more, nk):
    """(member, k) of the row that is `members` members and `more` < nk rows further on (device function)."""
    member, k = i32(member + members), i32(k + more)
    return (member, k) if k < nk else (i32(member + 1), i32(k - nk))


def member_at(shells, low, member, newest):
    """Code of a member and first AO of its k; the `newest` one stands for those beyond it (device function)."""
    place = low + min(member, newest)
    return shells.members[place], shells.others[place]


def place_of(code, k, first_ket, nab_bytes, nb_bytes):
    """(bytes to the row k of a member in U, from one l to the next) (device function)."""
    place = i64(i32((code >> 1) - first_ket)) * nab_bytes
    of_k, step = (i32(64), nb_bytes) if code & 1 == 0 else (nb_bytes, i32(64))
    return place + i32(k * of_k), step


def half_exchange(blocks, unit):
    """Kernel factory for so many blocks of 8 functions of i and j of a warp."""
    most, functions, address = EIGHTS, 8 * blocks, jit_device(address_in_u)
    load_d, add_rows = make_load_d(blocks), make_add_rows(blocks, unit == "dmma16")
    add_columns = make_add_columns(blocks)
    empty, primitives, search = make_empty(2 * blocks * EIGHTS), jit_device(primitives_of), jit_device(first_member)
    broadcast, following, at = jit_device(of_first_lanes), jit_device(next_row), jit_device(member_at)
    place_in_u = jit_device(place_of)

    @jit_device
    def function_of(f, bra, pair, nao):
        j = bra.aos[bra.first + pair, 0] + f if f < bra.na else bra.aos[bra.first + pair, 1] + f - bra.na
        return j * nao

    def kernel(
        bra: FunctionPairs, ab: PairRange, ket: FunctionPairs, shells: Members, u: HalfTransformed,
        order: I32, limits: I32, density: F64, w: HalfExchange, pieces: i64, parts: i64,
    ):  # fmt: skip
        lane, work = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        rest = quotient(work, pieces)
        piece, part = work - rest * pieces, rest
        rest = quotient(rest, parts)
        part -= rest * parts
        nshell = shells.first.size - 1
        pair = quotient(rest, nshell)
        shell = rest - pair * nshell
        first, last = primitives(ab, pair)
        ncol = (last - first) * u.nq8
        if piece * most >= ncol * max(ket.na, ket.nb):
            return
        low, end = shells.first[shell], shells.first[shell + 1]
        high = search(shells.members, low, end, min(i64(limits[bra.first + pair]), ket.first + u.npair), lane)
        if ket.first > 0:
            low = search(shells.members, low, high, ket.first, lane)
        if low >= high:
            return
        nl, nk = (ket.na, ket.nb) if shells.members[low] & 1 == 0 else (ket.nb, ket.na)
        # the columns of this warp; those of all warps are as many
        own_pieces = quotient(ncol * nl + most - 1, i64(most))
        if piece >= own_pieces:
            return
        each = quotient(ncol * nl + own_pieces - 1, own_pieces)
        begin, count = piece * each, min(each, ncol * nl - piece * each)
        # a lane each: the last column stands for those beyond it
        n = begin + min(lane, count - 1)
        col = quotient(n, nl)
        own = n - col * nl
        prim = quotient(col, u.nq8)
        p = i32(8 * (col - prim * u.nq8))
        source = ((first - ab.first_prim) * u.nq8 + col) * (u.npair * u.nab * 8)
        target = ((first + prim) * w.functions * w.nao + shells.own[shell] + own) * w.width + p
        sources, of_p, owns, row = broadcast(source), broadcast(p), broadcast(i32(own)), lane >> 2
        columns = (
            address(u, sources[0], of_p[0], row, order), address(u, sources[1], of_p[1], row, order),
            address(u, sources[2], of_p[2], row, order), address(u, sources[3], of_p[3], row, order),
            address(u, sources[4], of_p[4], row, order), address(u, sources[5], of_p[5], row, order),
            address(u, sources[6], of_p[6], row, order), address(u, sources[7], of_p[7], row, order),
        )  # fmt: skip
        f0, total = part * functions, (high - low) * nk
        f = f0 + row
        rows = function_of(f, bra, pair, w.nao), function_of(f + 8, bra, pair, w.nao)
        row_limits = i32(total if f < w.functions else 0), i32(total if f + 8 < w.functions else 0)
        sums, many, n, nk = empty(), i32(count), i32(lane & 3), i32(nk)
        nab_bytes, nb_bytes, newest = i32(u.nab * 64), i32(ket.nb * 64), i32(high - low - 1)
        # what is 8 rows further on
        eight = i32(quotient(i64(8), i64(nk)))
        rest = i32(8 - eight * nk)
        # the rows n and n + 4
        member, other = i32(quotient(i64(n), i64(nk))), i32(quotient(i64(n + 4), i64(nk)))
        k, other_k = i32(n - member * nk), i32(n + 4 - other * nk)
        (code, ao), (other_code, other_ao) = at(shells, low, member, newest), at(shells, low, other, newest)
        begin, total = i32(0), i32(total)
        while begin < total:
            d = load_d(density, rows, row_limits, (ao + k, other_ao + other_k), n)
            place, step = place_in_u(code, k, ket.first, nab_bytes, nb_bytes)
            other_place, other_step = place_in_u(other_code, other_k, ket.first, nab_bytes, nb_bytes)
            # what the next turn needs is on its way during this one
            begin, n = i32(begin + 8), i32(n + 8)
            member, k = following(member, k, eight, rest, nk)
            other, other_k = following(other, other_k, eight, rest, nk)
            (code, ao), (other_code, other_ao) = at(shells, low, member, newest), at(shells, low, other, newest)
            sums = add_rows(sums, columns, owns, (place, other_place), (step, other_step), d, many)
        add_columns(
            sums, w.numbers, broadcast(target + f0 * w.nao * w.width), w.nao * w.width, broadcast(p), order, lane,
            many, w.functions - f0,
        )  # fmt: skip

    return Kernel(kernel, (32, HELD[blocks - 1]))


# launcher


def members_of(basis, pairs):
    """Fields of `Members` of pairs of shells, shape (npair, 2), as arrays, without shells that have no pair.

    A pair of a shell with itself is there once.
    """
    numbers = np.arange(len(pairs))
    second = numbers[np.not_equal(*pairs.T)]
    shells, members = np.concatenate([pairs[:, 0], pairs[second, 1]]), np.concatenate([2 * numbers, 2 * second + 1])
    order = np.lexsort([members, shells])
    counts, members = np.bincount(shells, minlength=basis.nshell), members[order]
    others = basis.ao_loc[pairs[members >> 1, 1 - (members & 1)]]
    return np.concatenate([[0], np.cumsum(counts[counts > 0])]), members, basis.ao_loc[np.flatnonzero(counts)], others


def shares(bra, ket, nq8, functions):
    """(blocks of 8 functions of a warp, parts of the functions, pieces of the columns) of a bra pair and a shell."""
    blocks = min(blocks_of_8(functions), len(HELD))
    return blocks, -(-functions // (8 * blocks)), -(-bra.max_prim * nq8 * max(ket.na, ket.nb) // EIGHTS)


def launch_half_exchange(context, aos, ab, cd, shells, hermite, u, limits, density, w):
    """Adds what the ket pairs `cd` of a chunk give its bra pairs `ab` to W.

    Parameters
    ----------
    aos, ab, cd, u, limits
        As for `md4.gpu.kernels.reverse_sums.launch_reverse`.
    shells : tuple
        Fields of `Members` of the whole ket list.
    hermite : ListFacts
        The Hermite functions p.
    density : Buffer
        D, nao by nao.
    w : tuple
        Fields of `HalfExchange`.
    """
    bra, ket, nq8 = ab.facts, cd.facts, blocks_of_8(hermite.nherm)
    blocks, parts, pieces = shares(bra, ket, nq8, w[2])
    of_pair = pieces * parts * (shells[0].size - 1)
    most = MOST_WARPS // of_pair
    order = context.table(hermite_order, hermite.l, hermite.first)
    for first in range(0, len(ab), most):
        count = min(most, len(ab) - first)
        start, first_pair, first_prim = pair_range(ab)
        context.launch(
            Variant(half_exchange, (blocks, context.unit)), count * of_pair, 32, 0,
            (aos[0], first_pair + first, bra.na, bra.nb), (start, first_pair + first, first_prim),
            (aos[1], cd.first, ket.na, ket.nb), shells, (u, nq8, cd.npair, ket.nab), order, limits, density, w, pieces,
            parts,
        )  # fmt: skip
