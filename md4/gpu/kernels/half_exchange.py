"""K with a derivative on the first function (`md4.gpu.derivative_matrices`), from half-transformed integrals.

    W[p, j, l] = sum_k (p|kl) D_jk          K^x_il += sum_{p,j} H^{A_x}[ij, p] W[p, j, l]

of the Hermite functions p of primitive pairs ij, in two kernels. What both find are sums in a fixed order.

`half_exchange`: (p|kl) are U of gradients (`md4.gpu.kernels.reverse_sums`). A warp takes a bra pair and a shell l, and
goes through the shells k with which l is in a ket list, some rows (k, l) of U at a time, for all l of the shell side by
side. D of these k, and of functions of i and of j, which both are a j of some derivative, is in shared memory. A lane
has two pairs of a p and an l, and keeps W of these in registers.

`exchange_derivatives`: a block of threads takes rows (x, i) of a shell i and 32 l, and its warps go through the bra
pairs that have i, each through some of them.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64, cuda, f64, i32, i64, jit_device
from md4.gpu.emit.instructions import load, make_empty, shared_address, shared_vector, store_if
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.values import FP64, INT, OPEN, fma, select, tuple_of, word
from md4.gpu.kernels.groups import HalfTransformed, PairRange, pair_range, primitives_of
from md4.gpu.kernels.reverse_sums import FunctionPairs
from md4.gpu.staircases import hermite_order
from md4.gpu.tiles import blocks_of_8

THREADS = 128  # of a block
WARPS = THREADS // 32
ROWS = 16  # rows (k, l) of U whose D is in shared memory at once
TOGETHER, FEWER = 8, 4  # and of these, whose numbers a lane loads at once, for few and for many functions
FEW_FUNCTIONS = 8
# Blocks that a multiprocessor is to hold at once.
BLOCKS = {4: 5, 8: 4, 12: 3, 16: 3}
MOST_FUNCTIONS = 16  # most functions of i and j of a warp
MOST_WARPS = (1 << 31) - WARPS  # of a launch, whose numbers are divided as 32-bit integers
DERIVED = 8  # rows (x, i) of a block of threads


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


class Column(NamedTuple):
    """A p and an l of a lane.

    Attributes
    ----------
    source : int64
        Where U of the p begins.
    first, second : int64
        Bytes from there to U of the l, if its shell is the first one of ket pairs, or the second one.
    target : int64
        The place of W of the first function, -1 where there is no p.
    """

    source: i64
    first: i64
    second: i64
    target: i64


@cache
def make_add_rows(functions, count, pitch):
    """Intrinsic (sums, u, source, first, second, source, first, second, rows, d) -> sums, of `count` rows of U.

    Sums of two columns, each by the fields of its `Column`, += rows of U times D. At the shared addresses `rows` and
    `d` are the places of the rows, plus 1 where the l are those of the second shell, and rows of D with a `pitch`.
    """
    tile = tuple_of(FP64, 2 * functions)

    @word(tile, tile, OPEN, i64, i64, i64, i64, i64, i64, i32, i32)
    def add_rows(sums, u, source, first, second, other_source, other_first, other_second, rows, d):
        columns, numbers = ((u.at(source), first, second), (u.at(other_source), other_first, other_second)), []
        for n in range(count):
            (place,) = load("shared", rows, 4 * n, INT)
            begin = (place & -8).u64 << 3
            numbers.append([
                load("global.nc", base + begin + select(place.has(1), two, one), effects=False)[0]
                for base, one, two in columns
            ])  # fmt: skip
        for n, both in enumerate(numbers):
            for f in range(0, functions, 2):
                for m, value in enumerate(shared_vector(d, 8 * (n * pitch + f)), f):
                    sums[2 * m : 2 * m + 2] = [fma(number, value, sums[2 * m + k]) for k, number in enumerate(both)]
        return sums

    return add_rows


@cache
def make_add_column(functions, column):
    """Intrinsic (sums, array, first, stride, count): array[first + f stride] += sums of a column for f < `count`."""

    @word(None, tuple_of(FP64, 2 * functions), OPEN, i64, i64, i64)
    def add_column(sums, array, first, stride, count):
        places, step = [array.at(first)], stride * 8
        for _ in range(functions - 1):
            places.append(places[-1] + step)
        old = [load("global", here, live=(count, f))[0] for f, here in enumerate(places)]
        for f, here in enumerate(places):
            store_if(here, [old[f] + sums[2 * f + column]], (count, f))

    return add_column


@word(tuple_of(FP64, 8), OPEN, i64)
def load_eight(array, first):
    """array[first + n] for n < 8, which no one writes meanwhile; `first` is even."""
    address = array.at(first)
    return [number for n in range(0, 8, 2) for number in load("global.nc", address, 8 * n, count=2, effects=False)]


@word(f64, tuple_of(FP64, 8), tuple_of(FP64, 8), f64)
def add_products(x, y, total):
    """total + x . y"""
    for one, other in zip(x, y):
        total = fma(one, other, total)
    return total


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


def half_exchange(functions):
    """Kernel factory for so many functions of i and j of a warp, an even number."""
    pitch, rows, warps, half = functions + 2, ROWS, WARPS, functions // 2
    together = TOGETHER if functions <= FEW_FUNCTIONS else FEWER
    size, add_rows = warps * rows, make_add_rows(functions, together, pitch)
    numbers = size * pitch
    empty, bytes_d = make_empty(2 * functions), 8 * pitch
    add_first, add_second = make_add_column(functions, 0), make_add_column(functions, 1)
    primitives, search = jit_device(primitives_of), jit_device(first_member)

    @jit_device
    def column_of(n, ab, first, nl, nb, ncol, u, order, w, l0):
        place = n >> 3
        col = quotient(place, nl)
        own = place - col * nl
        live = col < ncol
        if not live:
            col, own = i64(0), i64(0)
        prim = quotient(col, u.nq8)
        p, target = 8 * (col - prim * u.nq8) + (n & 7), i64(-1)
        source = ((first - ab.first_prim) * u.nq8 + col) * (u.npair * u.nab * 8)
        if live and order[p] >= 0:
            target = ((first + prim) * w.functions * w.nao + l0 + own) * w.width + p
            source += n & 7
        return Column(source, own * nb * 64, own * 64, target)

    def kernel(
        bra: FunctionPairs, ab: PairRange, npair: i64, ket: FunctionPairs, shells: Members, u: HalfTransformed,
        order: I32, limits: I32, density: F64, w: HalfExchange, pieces: i64, parts: i64,
    ):  # fmt: skip
        d, places, values = cuda.shared.array(numbers, f64), cuda.shared.array(size, i32), cuda.local.array(half, f64)
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        work = i64(cuda.blockIdx.x) * warps + warp
        rest = quotient(work, pieces)
        piece, part = work - rest * pieces, rest
        rest = quotient(rest, parts)
        part -= rest * parts
        nshell = shells.first.size - 1
        pair = quotient(rest, nshell)
        shell = rest - pair * nshell
        if pair >= npair:
            return
        first, last = primitives(ab, pair)
        ncol, n = (last - first) * u.nq8, piece * 64 + lane
        if piece * 64 >= ncol * max(ket.na, ket.nb) * 8:
            return
        low, end = shells.first[shell], shells.first[shell + 1]
        high = search(shells.members, low, end, min(i64(limits[bra.first + pair]), ket.first + u.npair), lane)
        if ket.first > 0:
            low = search(shells.members, low, high, ket.first, lane)
        if low >= high:
            return
        nl, nk = (ket.na, ket.nb) if shells.members[low] & 1 == 0 else (ket.nb, ket.na)
        if piece * 64 >= ncol * nl * 8:
            return
        l0 = shells.own[shell]
        one = column_of(n, ab, first, nl, ket.nb, ncol, u, order, w, l0)
        two = column_of(n + 32, ab, first, nl, ket.nb, ncol, u, order, w, l0)
        a0, b0, f0 = bra.aos[bra.first + pair, 0], bra.aos[bra.first + pair, 1], part * functions
        total, begin, row = (high - low) * nk, i64(0), lane & (rows - 1)
        own_row, sums = warp * rows + row, empty()
        of_d, of_places = shared_address(d) + warp * rows * bytes_d, shared_address(places) + 4 * warp * rows
        while begin < total:
            # the last row stands for those beyond it, with D = 0
            n = min(begin + row, total - 1)
            member = quotient(n, nk)
            k = n - member * nk
            code, ao = shells.members[low + member], shells.others[low + member] + k
            this, side = code >> 1, code & 1
            for m in range(half):
                values[m], f = 0.0, f0 + 2 * m + (lane >> 4)
                if begin + row < total and f < w.functions:
                    j = a0 + f if f < bra.na else b0 + f - bra.na
                    values[m] = density[j * w.nao + ao]
            if lane < rows:
                place = ((this - ket.first) * u.nab + (k if side == 0 else k * ket.nb)) * 8
                places[own_row] = i32(place + side)
            for m in range(half):
                d[own_row * pitch + 2 * m + (lane >> 4)] = values[m]
            cuda.syncwarp()
            n, last = i64(0), min(i64(rows), total - begin)
            while n < last:
                sums = add_rows(
                    sums, u.numbers, one.source, one.first, one.second, two.source, two.first, two.second,
                    i32(of_places + 4 * n), i32(of_d + n * bytes_d),
                )  # fmt: skip
                n += together
            cuda.syncwarp()
            begin += rows
        step, count = w.nao * w.width, min(i64(functions), w.functions - f0)
        add_first(sums, w.numbers, max(one.target, i64(0)) + f0 * step, step, count if one.target >= 0 else i64(0))
        add_second(sums, w.numbers, max(two.target, i64(0)) + f0 * step, step, count if two.target >= 0 else i64(0))

    return Kernel(kernel, (THREADS, BLOCKS[functions]))


def exchange_derivatives():
    """Kernel factory; all sizes are run-time numbers.

    H is that of derivatives by A, or by B if `by_b` is 1, and then i is the second shell.
    """
    warps, many = WARPS, DERIVED

    def kernel(
        start: I64, na: i64, nb: i64, shells: Members, h: F64, rows8: i64, by_b: i64, w: HalfExchange, row_parts: i64,
        k: F64,
    ):  # fmt: skip
        sums, rows = cuda.local.array(many, f64), cuda.local.array(many, i64)
        of_warps, tid = cuda.shared.array((warps, many, 32), f64), i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        nao, steps, blocks = w.nao, w.width >> 3, (w.nao + 31) >> 5
        rest = quotient(i64(cuda.blockIdx.x), blocks)
        l = (i64(cuda.blockIdx.x) - rest * blocks) * 32 + lane
        shell = quotient(rest, row_parts)
        first_row, n, end = (rest - shell * row_parts) * many, shells.first[shell], shells.first[shell + 1]
        # where a shell may be both of a pair, both have as many functions
        ni = na if shells.members[n] & 1 == 0 else nb
        if first_row >= 3 * ni:
            return
        n, l_here = n + warp, min(l, nao - 1)
        # from one i and one j to the next in rows of H, how many j there are, and their first place among functions
        step_i, step_j, nj, first_j = nb, i64(1), nb, na
        if by_b == 1:
            step_i, step_j, nj, first_j = i64(1), nb, na, i64(0)
        for m in range(many):
            row, sums[m] = min(first_row + m, 3 * ni - 1), 0.0
            x = quotient(row, ni)
            rows[m] = x * na * nb + (row - x * ni) * step_i
        while n < end:
            code = shells.members[n]
            n += warps
            if code & 1 != by_b:
                continue
            for prim in range(start[code >> 1], start[(code >> 1) + 1]):
                for j in range(nj):
                    source = ((prim * w.functions + first_j + j) * nao + l_here) * w.width
                    for step in range(steps):
                        value, of_h = load_eight(w.numbers, source + 8 * step), (prim * steps + step) * rows8 * 64
                        for m in range(many):
                            row = of_h + 8 * (rows[m] + j * step_j)
                            sums[m] = add_products(load_eight(h, row), value, sums[m])
        for m in range(many):
            of_warps[warp, m, lane] = sums[m]
        cuda.syncthreads()
        for m in range(warp, many, warps):
            row, total = first_row + m, 0.0
            if row < 3 * ni and l < nao:
                for other in range(warps):
                    total += of_warps[other, m, lane]
                x = quotient(row, ni)
                k[(x * nao + shells.own[shell] + row - x * ni) * nao + l] += total

    return Kernel(kernel, (THREADS, 4))


# launchers


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


def functions_of_a_warp(count):
    """How many functions of i and j a warp takes of `count`: a multiple of 4."""
    parts = -(-count // MOST_FUNCTIONS)
    return 4 * -(-count // (4 * parts))


def shares(bra, ket, nq8, functions):
    """(functions of a warp, parts of the functions, pieces of the columns) of a bra pair and a shell of ket pairs."""
    own = functions_of_a_warp(functions)
    return own, -(-functions // own), -(-bra.max_prim * nq8 * max(ket.na, ket.nb) // 8)


def launch_half_exchange(context, aos, ab, cd, shells, hermite, u, limits, density, w):
    """Adds what the ket pairs `cd` of a chunk give its bra pairs `ab` to W.

    Parameters
    ----------
    aos : tuple of Buffer
        First AOs of the bra and of the ket list.
    ab, cd : md4.engine.PreparedPairs
        Slices of both.
    shells : tuple
        Fields of `Members` of the whole ket list.
    hermite : ListFacts
        The Hermite functions p.
    u : Buffer
        U of the chunk.
    limits : Buffer of int32
        With how many ket pairs, the first of their list, each bra pair of its list counts.
    density : Buffer
        D, nao by nao.
    w : tuple
        Fields of `HalfExchange`.
    """
    bra, ket, nq8 = ab.facts, cd.facts, blocks_of_8(hermite.nherm)
    functions, parts, pieces = shares(bra, ket, nq8, w[2])
    of_pair = pieces * parts * (shells[0].size - 1)
    most = MOST_WARPS // of_pair
    order = context.table(hermite_order, hermite.l, hermite.first)
    for first in range(0, len(ab), most):
        count = min(most, len(ab) - first)
        start, first_pair, first_prim = pair_range(ab)
        context.launch(
            Variant(half_exchange, (functions,)), -(-count * of_pair // WARPS), THREADS, 0,
            (aos[0], first_pair + first, bra.na, bra.nb), (start, first_pair + first, first_prim), count,
            (aos[1], cd.first, ket.na, ket.nb), shells, (u, nq8, cd.npair, ket.nab), order, limits, density, w, pieces,
            parts,
        )  # fmt: skip


def launch_exchange_derivatives(context, ab, shells, h, by_b, w, k):
    """Adds what W of a whole list gives to K, shape (3, nao, nao), by derivatives by A, or by B if `by_b`.

    `shells`: its fields of `Members`; `h`: H of these derivatives in the form `md4.gpu.h_layout.KET_STEPS`.
    """
    facts, row_parts = ab.facts, -(-3 * max(ab.facts.na, ab.facts.nb) // DERIVED)
    context.launch(
        Variant(exchange_derivatives, ()), -(-w[3] // 32) * row_parts * (shells[0].size - 1), THREADS, 0,
        ab.data.start, facts.na, facts.nb, shells, h, blocks_of_8(3 * facts.nab), int(by_b), w, row_parts, k,
    )  # fmt: skip
