"""J in the Hermite basis on the GPU; the equations are in `md4.method.hermite_coulomb`.

Densities and sums are stored [place][p], with the sign (-1)^|p|: places are those of the primitive pairs of a degree in
their order (`md4.gpu.pair_order`), and the order of p is that of `md4.gpu.hermite_rows`. Two kernels correlate r with
the densities of both sides. For small L a thread takes a primitive quartet (`md4.gpu.kernels.coulomb_threads`). For
larger L a warp takes a bra primitive, its lanes share the functions p, and goes through ket primitives, whose r it
copies to shared memory; J_q is summed over the warp.
"""

from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64, I64_2D, cuda, f64, i32, i64, jit_device, types
from md4.gpu.emit.correlation import make_correlate, make_load_words, make_signed
from md4.gpu.emit.instructions import address_of, commit_copies, make_empty, make_wait_copies, shared_address
from md4.gpu.emit.scalars import load_global, quotient
from md4.gpu.emit.vectors import make_add_vector, make_load_vector
from md4.gpu.h_layout import KET_BLOCKS, form_size
from md4.gpu.hermite_rows import row_parts, row_places, row_width, row_words
from md4.gpu.kernels.reverse_sums import ReverseSums
from md4.gpu.kernels.ring import make_copy_range
from md4.gpu.r_layout import r_stride
from md4.gpu.staircases import hermite_order
from md4.gpu.tiles import blocks_of_8
from md4.gpu.tuning import SHARED_BYTES

THREADS = 128  # of a block
LANE_FUNCTIONS = 5  # most Hermite functions p of a lane
FEWEST_WARPS = 16896  # that a launch should have before each takes several ket primitives
WARP_KETS = 32  # most ket primitives of a warp
flag = types.boolean
WARPS = THREADS // 32


class Panels(NamedTuple):
    """H of all primitive pairs of a list in the form `md4.gpu.h_layout.KET_BLOCKS`.

    Attributes
    ----------
    numbers : float64 array
    size : int64
        Numbers of one primitive pair.
    rows8 : int64
        Blocks of 8 rows ab.
    """

    numbers: F64
    size: i64
    rows8: i64


class PairFunctions(NamedTuple):
    """The functions of a list's pairs in AO matrices.

    Attributes
    ----------
    ao : int64 array, shape (npair, 2)
        First AOs of the two shells of each pair.
    nb, nab, nao : int64
    """

    ao: I64_2D
    nb: i64
    nab: i64
    nao: i64


class Sums(NamedTuple):
    """J of the rows of a degree in fixed point, and its scales."""

    numbers: I64
    scales: F64


class Rows(NamedTuple):
    """Where the Hermite functions of a list are in the rows of its degree.

    Attributes
    ----------
    places : int32 array
        The place of each primitive pair.
    columns : int32 array
        Where each function of a primitive pair is in its row; -1 for those that fill H up.
    width : int64
        Numbers of a row.
    """

    places: I32
    columns: I32
    width: i64


class Side(NamedTuple):
    """`count` places of a degree from `first` on; the arrays are those of `coulomb_threads.OrderedSide`."""

    first: i64
    count: i64
    d: F64
    j: I64
    scales: F64


class Functions(NamedTuple):
    """The Hermite functions of a bra, of which there are one or two parts (`md4.gpu.hermite_rows.row_parts`).

    Attributes
    ----------
    words : int32 array
        Their packed words.
    width : int64
        Numbers of a row.
    end : int64
        The place behind the first part.
    second, last : int64
        The first place of the second part, and the one behind it.
    groups : int64
        Warps that share the first part.
    """

    words: I32
    width: i64
    end: i64
    second: i64
    last: i64
    groups: i64


class Share(NamedTuple):
    """How warps share what is to be done.

    Attributes
    ----------
    warps : int64
        Warps of a block of threads.
    groups : int64
        Warps that share the functions p of a bra primitive.
    parts, step : int64
        Ranges of ket primitives, and ket primitives of each.
    """

    warps: i64
    groups: i64
    parts: i64
    step: i64


def sum_at(sums, place):
    """A sum of `Sums` as a double (device function)."""
    return float(sums.numbers[place]) / sums.scales[place]


def hermite_densities():
    """Kernel factory: D_p = sum_ab H[ab, p] w_ab D_ab of all primitive pairs, a warp for 8 functions p of one."""

    def kernel(
        h: Panels, owner: I64, functions: PairFunctions, matrix: F64, nprim: i64, np8: i64, rows: Rows, out: F64
    ):  # fmt: skip
        lane, work = i64(cuda.threadIdx.x) & 31, i64(cuda.blockIdx.x) * WARPS + (i64(cuda.threadIdx.x) >> 5)
        if work < nprim * np8:
            prim = quotient(work, np8)
            block = work - prim * np8
            pair = owner[prim]
            a, b, total = functions.ao[pair, 0], functions.ao[pair, 1], 0.0
            first, row = prim * h.size + block * h.rows8 * 64 + (lane & 7), lane >> 3
            while row < functions.nab:
                place = quotient(row, functions.nb)
                d_ab = load_global(matrix, (a + place) * functions.nao + b + row - place * functions.nb)
                total += load_global(h.numbers, first + 8 * row) * d_ab
                row += 4
            total += cuda.shfl_xor_sync(-1, total, 8)
            total += cuda.shfl_xor_sync(-1, total, 16)
            if lane < 8:
                column = i64(rows.columns[8 * block + lane])
                if column >= 0:
                    out[rows.places[prim] * rows.width + column] = 0.5 * total if a == b else total

    return Kernel(kernel, (THREADS, 4))


def hermite_sums():
    """Kernel factory: Y_ab = w_ab sum_p H[ab, p] J_p over the primitive pairs of each pair, a warp for 4 rows ab."""
    sum_of = jit_device(sum_at)

    def kernel(
        h: Panels, start: I64, functions: PairFunctions, sums: Sums, np8: i64, npair: i64, row_blocks: i64, rows: Rows,
        y: F64,
    ):  # fmt: skip
        lane, work = i64(cuda.threadIdx.x) & 31, i64(cuda.blockIdx.x) * WARPS + (i64(cuda.threadIdx.x) >> 5)
        if work < npair * row_blocks:
            pair = quotient(work, row_blocks)
            row, total = (work - pair * row_blocks) * 4 + (lane >> 3), 0.0
            for prim in range(start[pair], start[pair + 1]):
                block, source, first = i64(0), prim * h.size + 8 * row + (lane & 7), rows.places[prim] * rows.width
                while block < np8:
                    column = i64(rows.columns[8 * block + (lane & 7)])
                    if row < functions.nab and column >= 0:
                        value = load_global(h.numbers, source + block * h.rows8 * 64)
                        total += value * sum_of(sums, first + column)
                    block += 1
            total += cuda.shfl_xor_sync(-1, total, 1)
            total += cuda.shfl_xor_sync(-1, total, 2)
            total += cuda.shfl_xor_sync(-1, total, 4)
            if row < functions.nab and lane & 7 == 0:
                a, b, place = functions.ao[pair, 0], functions.ao[pair, 1], quotient(row, functions.nb)
                place = (a + place) * functions.nao + b + row - place * functions.nb
                y[place] = 0.5 * total if a == b else total

    return Kernel(kernel, (THREADS, 4))


def hermite_products():
    """Kernel factory: Z[ab, p] += factor w_ab D_ab J_p of gradients, p up to a higher degree; a warp a primitive pair.

    J_p has the sign that Z has (`md4.gpu.kernels.pair_forces`). `order` has the ordinals of the functions p of Z.
    """
    sum_of = jit_device(sum_at)

    def kernel(
        factor: f64, owner: I64, functions: PairFunctions, matrix: F64, sums: Sums, rows: Rows, order: I32,
        z: ReverseSums,
    ):  # fmt: skip
        lane, prim = i64(cuda.threadIdx.x) & 31, i64(cuda.blockIdx.x) * WARPS + (i64(cuda.threadIdx.x) >> 5)
        if prim < z.nprim:
            pair = owner[z.first_prim + prim]
            a, b, source = functions.ao[pair, 0], functions.ao[pair, 1], rows.places[z.first_prim + prim] * rows.width
            # `matrix` is D + D^T
            weight, n = factor * (0.5 if a == b else 1.0), lane
            while n < order.size * functions.nab:
                line = quotient(n >> 3, functions.nab)
                row, p = (n >> 3) - line * functions.nab, i64(order[8 * line + (n & 7)])
                if p >= 0:
                    place = quotient(row, functions.nb)
                    d_ab = matrix[(a + place) * functions.nao + b + row - place * functions.nb]
                    target = ((prim * (order.size >> 3) + line) * z.rows + row) * 8 + (n & 7)
                    z.numbers[target] += weight * d_ab * sum_of(sums, source + rows.columns[p])
                n += 32

    return Kernel(kernel, (THREADS, 4))


def make_along_kets(l_ket, count, mirrored, parity):
    """Device function: a warp's functions p of one bra primitive with the ket primitives `k` to `last` - 1.

    (words, d, j, ket, triangle, r, stride, bra_place, row, k, last, base, lane) -> j, see `make_correlate`; `bra_place`
    is the place of the bra primitive, `row` its number among those of r. The parities have a loop each: of one loop for
    both, the compiler takes out more than registers hold.
    """
    correlate, nq = make_correlate(l_ket, count, mirrored, parity), row_width(l_ket, mirrored)
    copy, wait_one, wait_all = make_copy_range(32), make_wait_copies(1), make_wait_copies(0)

    @jit_device
    def along_kets(words, d, j, ket, triangle, r, stride, bra_place, row, k, last, base, lane):
        # bra primitives that are taken at the same time begin at different kets, to whose sums they all add
        begin, left, buffer, buffer_bytes = k, last - k, i64(0), 8 * stride
        k += row - quotient(row, left) * left
        copy(base, r, (row * ket.count + k) * stride, stride, lane)
        commit_copies()
        while left > 0:
            here, this = base + buffer * buffer_bytes, k
            buffer = 1 - buffer
            k = k + 1 if k + 1 < last else begin
            if left > 1:
                copy(base + buffer * buffer_bytes, r, (row * ket.count + k) * stride, stride, lane)
                commit_copies()
                wait_one()
            else:
                wait_all()
            cuda.syncwarp()
            # both sums of a quartet of a primitive pair with itself are the same one
            weight = 0.0 if triangle and ket.first + this == bra_place else 1.0
            row_q = (ket.first + this) * nq
            j = correlate(words, i32(here), ket.d, d, j, weight, ket.j, ket.scales, row_q, lane)
            cuda.syncwarp()
            left -= 1
        return j

    return along_kets


def correlation_by_warps(l_ket, count, mirrored):
    """Kernel factory for larger L: J_p += r D_q and J_q += r D_p, r from memory, `count` functions p a lane.

    `mirrored`: all centres have the same coordinate on axis 0. Then a warp has functions p of one parity.
    """
    along_kets, along_odd_kets = (make_along_kets(l_ket, count, mirrored, n) for n in ((0, 1) if mirrored else (0, 0)))
    load, add = make_load_vector(count), make_add_vector(count)
    words_of, signed, empty = make_load_words(count), make_signed(count), make_empty(count)

    def kernel(functions: Functions, bra: Side, ket: Side, triangle: flag, r: F64, stride: i64, share: Share):
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        work = i64(cuda.blockIdx.x) * share.warps + warp
        part = quotient(work, bra.count * share.groups)
        work -= part * bra.count * share.groups
        i = quotient(work, share.groups)
        group, end, odd = work - i * share.groups, functions.end, False
        first = group * (32 * count) + lane
        if mirrored and group >= functions.groups:
            first, end, odd = functions.second + (group - functions.groups) * (32 * count) + lane, functions.last, True
        k, buffer_bytes = part * share.step, 8 * stride
        last = min(k + share.step, ket.count)
        if triangle:
            last = min(last, bra.first + i - ket.first + 1)
        base = shared_address(cuda.shared.array(0, types.float64)) + warp * 2 * buffer_bytes
        if part < share.parts and k < last:
            own, limit = (bra.first + i) * functions.width + first, (end - first + 31) >> 5
            words = words_of(functions.words, first, end - 1)
            d, j = signed(load(address_of(bra.d, own), i64(256), i32(limit)), words), empty()
            if mirrored and odd:
                j = along_odd_kets(words, d, j, ket, triangle, r, stride, bra.first + i, i, k, last, base, lane)
            else:
                j = along_kets(words, d, j, ket, triangle, r, stride, bra.first + i, i, k, last, base, lane)
            add(signed(j, words), bra.j, bra.scales, own, 32, limit)

    return Kernel(kernel, (THREADS, 1))


# launchers


def functions_of_a_lane(parts):
    """(functions p of a lane, warps that share each part), by the numbers of functions of the parts of a bra."""
    warps = [max(1, -(-count // (32 * LANE_FUNCTIONS))) for count in parts]
    lane = max(-(-count // (32 * some)) for count, some in zip(parts, warps))
    return lane, [-(-count // (32 * lane)) for count in parts]


def kets_of_a_warp(nket, warps):
    """Ket primitives that a warp goes through, `warps` warps each taking other functions of bra primitives."""
    return max(1, min(WARP_KETS, nket, nket * warps // FEWEST_WARPS))


def warps_of_a_block(warp_bytes):
    """(warps of a block, its shared memory): four warps, or fewer where two blocks of four would not fit."""
    warps = max(1, min(WARPS, SHARED_BYTES // warp_bytes))
    return warps, warps * warp_bytes


def rows_of(context, l, degree, places, axis):
    """`Rows` of a list of degree l in those of a degree; `axis` as in `md4.gpu.hermite_rows.row_places`."""
    return places, context.table(row_places, l, axis, degree), row_width(degree, axis is not None)


def panels(pairs, h):
    """`Panels` of a list."""
    return Panels(h, form_size(pairs, KET_BLOCKS), blocks_of_8(pairs.nab))


def launch_hermite_densities(context, prepared, h, ao, matrix, nao, degree, places, axis, out):
    """D_p of a whole list from `matrix`, D + D^T of nao x nao; `h` is in the form `KET_BLOCKS`.

    `places` are those of its primitive pairs in rows of a `degree`; `axis` as in `rows_of`.
    """
    pairs = prepared.pairs
    np8 = blocks_of_8(pairs.nherm)
    context.launch(
        Variant(hermite_densities, ()), -(-pairs.nprim * np8 // WARPS), THREADS, 0,
        panels(pairs, h), prepared.data.owner, PairFunctions(ao, pairs.nb, pairs.nab, nao), matrix, pairs.nprim, np8,
        rows_of(context, pairs.l, degree, places, axis), out,
    )  # fmt: skip


def launch_hermite_sums(context, prepared, h, ao, sums, nao, places, axis, y):
    """Y of a whole list from its J_p, `Sums`; `places` and `axis` as in `launch_hermite_densities`."""
    pairs = prepared.pairs
    row_blocks = -(-pairs.nab // 4)
    context.launch(
        Variant(hermite_sums, ()), -(-len(pairs) * row_blocks // WARPS), THREADS, 0,
        panels(pairs, h), prepared.data.start, PairFunctions(ao, pairs.nb, pairs.nab, nao), sums,
        blocks_of_8(pairs.nherm), len(pairs), row_blocks, rows_of(context, pairs.l, pairs.l, places, axis), y,
    )  # fmt: skip


def launch_hermite_products(context, ab, ao, matrix, nao, factor, sums, degree, places, axis, z):
    """Adds to Z of a slice of a list what its J_p of a higher `degree` give.

    Parameters
    ----------
    ab : md4.engine.PreparedPairs
    ao, places : Buffer
        First AOs and places of the whole list.
    matrix : Buffer
        D + D^T, `nao` by `nao`.
    factor : float
    sums : tuple
        `Sums` of the degree.
    axis
        As in `rows_of`.
    z : tuple
        Fields of `md4.gpu.kernels.reverse_sums.ReverseSums`.
    """
    pairs = ab.facts
    context.launch(
        Variant(hermite_products, ()), -(-ab.nprim // WARPS), THREADS, 0, factor, ab.data.owner,
        PairFunctions(ao, pairs.nb, pairs.nab, nao), matrix, sums, rows_of(context, degree, degree, places, axis),
        context.table(hermite_order, degree), z,
    )  # fmt: skip


def contraction_launcher(context, l_bra, l_ket, mirrored):
    """The function by which `launch_contraction` launches for two degrees."""
    stride, (first, *others) = r_stride(l_bra + l_ket), row_parts(l_bra, mirrored)
    second, (warps, shared) = others[0] if others else range(0), warps_of_a_block(16 * stride)
    lane, of_parts = functions_of_a_lane([len(first), len(second)])
    variant = Variant(correlation_by_warps, (l_ket, lane, mirrored))
    functions = (
        context.table(row_words, l_bra, mirrored), row_width(l_bra, mirrored), first.stop, second.start, second.stop,
        of_parts[0],
    )  # fmt: skip
    groups = sum(of_parts)

    def launch(context, ab, cd, triangle, r, bra, ket):
        nbra, nket = ab.nprim, cd.nprim
        step = kets_of_a_warp(nket, nbra * groups)
        parts = -(-nket // step)
        context.launch(
            variant, -(-nbra * groups * parts // warps), 32 * warps, shared,
            functions, (ab.first_prim, nbra, *bra), (cd.first_prim, nket, *ket), triangle, r, stride,
            (warps, groups, parts, step),
        )  # fmt: skip

    return launch


def launch_contraction(context, ab, cd, mirrored, r, bra, ket):
    """J of both sides of two ranges of places from their r; `bra` and `ket` are (D, J, its scales) of both degrees.

    `mirrored`: all centres have the same coordinate on axis 0.
    """
    launch = context.fixed(contraction_launcher, ab.facts.l, cd.facts.l, mirrored)
    launch(context, ab, cd, ab.facts.l == cd.facts.l, r, bra, ket)
