"""J in the Hermite basis on the GPU; the equations are in `md4.method.hermite_coulomb`.

Densities and sums of a list are stored [primitive pair][p], rows padded to blocks of 8, both with the sign (-1)^|p|.
Two kernels correlate r with the densities of both sides. For small L a thread takes a primitive quartet
(`md4.gpu.kernels.coulomb_threads`). For larger L a warp takes a bra primitive, its lanes share the functions p, and
goes through ket primitives, whose r it copies to shared memory; J_q is summed over the warp.
"""

from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, I64, I64_2D, cuda, i32, i64, types
from md4.gpu.emit.correlation import make_correlate, make_load_words, make_signed
from md4.gpu.emit.instructions import address_of, commit_copies, make_empty, make_wait_copies, shared_address
from md4.gpu.emit.scalars import load_global, quotient
from md4.gpu.emit.vectors import make_add_vector, make_load_vector
from md4.gpu.h_layout import KET_BLOCKS, form_size
from md4.gpu.kernels.ring import make_copy_range
from md4.gpu.tuning import HERMITE_COULOMB, SHARED_BYTES, blocks_of_8, r_stride
from md4.method.angular import nherm, packed_hermite

flag = types.boolean
WARPS = HERMITE_COULOMB.threads // 32


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


class Side(NamedTuple):
    """A range of primitive pairs of a list, with the Hermite densities and sums of the whole list.

    Attributes
    ----------
    first, count : int64
    d, j : float64 array
    """

    first: i64
    count: i64
    d: F64
    j: F64


class Functions(NamedTuple):
    """The Hermite functions of a bra.

    Attributes
    ----------
    words : int32 array
        `md4.method.angular.packed_hermite`.
    count, blocks : int64
        Their number, and blocks of 8 that hold them.
    """

    words: I32
    count: i64
    blocks: i64


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


def hermite_densities():
    """Kernel factory: D_p = sum_ab H[ab, p] w_ab D_ab of all primitive pairs, a warp for 8 functions p of one."""

    def kernel(h: Panels, owner: I64, functions: PairFunctions, matrix: F64, nprim: i64, np8: i64, out: F64):
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
                out[work * 8 + lane] = 0.5 * total if a == b else total

    return Kernel(kernel, (HERMITE_COULOMB.threads, 4))


def hermite_sums():
    """Kernel factory: Y_ab = w_ab sum_p H[ab, p] J_p over the primitive pairs of each pair, a warp for 4 rows ab."""

    def kernel(
        h: Panels, start: I64, functions: PairFunctions, sums: F64, np8: i64, npair: i64, row_blocks: i64, y: F64
    ):
        lane, work = i64(cuda.threadIdx.x) & 31, i64(cuda.blockIdx.x) * WARPS + (i64(cuda.threadIdx.x) >> 5)
        if work < npair * row_blocks:
            pair = quotient(work, row_blocks)
            row, total = (work - pair * row_blocks) * 4 + (lane >> 3), 0.0
            for prim in range(start[pair], start[pair + 1]):
                block, source = i64(0), prim * h.size + 8 * row + (lane & 7)
                while block < np8:
                    if row < functions.nab:
                        value = load_global(h.numbers, source + block * h.rows8 * 64)
                        total += value * load_global(sums, (prim * np8 + block) * 8 + (lane & 7))
                    block += 1
            total += cuda.shfl_xor_sync(-1, total, 1)
            total += cuda.shfl_xor_sync(-1, total, 2)
            total += cuda.shfl_xor_sync(-1, total, 4)
            if row < functions.nab and lane & 7 == 0:
                a, b, place = functions.ao[pair, 0], functions.ao[pair, 1], quotient(row, functions.nb)
                place = (a + place) * functions.nao + b + row - place * functions.nb
                y[place] = 0.5 * total if a == b else total

    return Kernel(kernel, (HERMITE_COULOMB.threads, 4))


def correlation_by_warps(l_ket, count):
    """Kernel factory for larger L: J_p += r D_q and J_q += r D_p, r from memory, `count` functions p a lane."""
    correlate, load, add = make_correlate(l_ket, count), make_load_vector(count), make_add_vector(count)
    words_of, signed, empty = make_load_words(count), make_signed(count), make_empty(count)
    copy, wait_one, wait_all = make_copy_range(32), make_wait_copies(1), make_wait_copies(0)
    nq = 8 * blocks_of_8(nherm(l_ket))

    def kernel(functions: Functions, bra: Side, ket: Side, triangle: flag, r: F64, stride: i64, share: Share):
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        work = i64(cuda.blockIdx.x) * share.warps + warp
        part = quotient(work, bra.count * share.groups)
        work -= part * bra.count * share.groups
        i = quotient(work, share.groups)
        first = (work - i * share.groups) * (32 * count) + lane
        k, buffer_bytes = part * share.step, 8 * stride
        last = min(k + share.step, ket.count)
        if triangle:
            last = min(last, bra.first + i - ket.first + 1)
        base = shared_address(cuda.shared.array(0, types.float64)) + warp * 2 * buffer_bytes
        if part < share.parts and k < last:
            own, limit = (bra.first + i) * (8 * functions.blocks) + first, (functions.count - first + 31) >> 5
            words = words_of(functions.words, first, functions.count - 1)
            d, j, buffer = signed(load(address_of(bra.d, own), i64(256), i32(limit)), words), empty(), i64(0)
            # bra primitives that are taken at the same time begin at different kets, to whose sums they all add
            begin, left = k, last - k
            k += i - quotient(i, left) * left
            copy(base, r, (i * ket.count + k) * stride, stride, lane)
            commit_copies()
            while left > 0:
                here, this = base + buffer * buffer_bytes, k
                buffer = 1 - buffer
                k = k + 1 if k + 1 < last else begin
                if left > 1:
                    copy(base + buffer * buffer_bytes, r, (i * ket.count + k) * stride, stride, lane)
                    commit_copies()
                    wait_one()
                else:
                    wait_all()
                cuda.syncwarp()
                # both sums of a quartet of a primitive pair with itself are the same one
                scale = 0.0 if triangle and ket.first + this == bra.first + i else 1.0
                j = correlate(words, i32(here), ket.d, d, j, scale, ket.j, (ket.first + this) * nq, lane)
                cuda.syncwarp()
                left -= 1
            add(signed(j, words), bra.j, own, 32, limit)

    return Kernel(kernel, (HERMITE_COULOMB.threads, 1))


# launchers


def functions_of_a_lane(count):
    """(functions p of a lane, warps that share the `count` functions of a bra primitive)."""
    groups = -(-count // (32 * HERMITE_COULOMB.lane_functions))
    return -(-count // (32 * groups)), groups


def kets_of_a_warp(nket, warps):
    """Ket primitives that a warp goes through, `warps` warps each taking other functions of bra primitives."""
    return max(1, min(HERMITE_COULOMB.warp_kets, nket, nket * warps // HERMITE_COULOMB.warps))


def warps_of_a_block(warp_bytes):
    """(warps of a block, its shared memory): four warps, or fewer where two blocks of four would not fit."""
    warps = max(1, min(WARPS, SHARED_BYTES // warp_bytes))
    return warps, warps * warp_bytes


def hermite_width(pairs):
    """Doubles of D or J of one primitive pair."""
    return 8 * blocks_of_8(pairs.nherm)


def correlation_variant(bra, ket):
    """The variant that contracts r of a class with the densities of both sides; the bra's l is the larger."""
    return Variant(correlation_by_warps, (ket.l, functions_of_a_lane(nherm(bra.l))[0]))


def panels(pairs, h):
    """`Panels` of a list."""
    return Panels(h, form_size(pairs, KET_BLOCKS), blocks_of_8(pairs.nab))


def launch_hermite_densities(context, prepared, h, ao, matrix, nao, out):
    """D_p of a whole list from `matrix`, D + D^T of nao x nao; `h` is in the form `KET_BLOCKS`."""
    pairs = prepared.pairs
    np8 = blocks_of_8(pairs.nherm)
    context.launch(
        Variant(hermite_densities, ()), -(-pairs.nprim * np8 // WARPS), HERMITE_COULOMB.threads, 0,
        panels(pairs, h), prepared.data.owner, PairFunctions(ao, pairs.nb, pairs.nab, nao), matrix, pairs.nprim, np8,
        out,
    )  # fmt: skip


def launch_hermite_sums(context, prepared, h, ao, sums, nao, y):
    """Y of a whole list from its J_p."""
    pairs = prepared.pairs
    row_blocks = -(-pairs.nab // 4)
    context.launch(
        Variant(hermite_sums, ()), -(-len(pairs) * row_blocks // WARPS), HERMITE_COULOMB.threads, 0,
        panels(pairs, h), prepared.data.start, PairFunctions(ao, pairs.nb, pairs.nab, nao), sums,
        blocks_of_8(pairs.nherm), len(pairs), row_blocks, y,
    )  # fmt: skip


def contraction_launcher(context, bra, ket):
    """The function by which `launch_contraction` launches for two `ListFacts` of larger L."""
    variant, count, stride = correlation_variant(bra, ket), nherm(bra.l), r_stride(bra.l + ket.l)
    functions = context.table(packed_hermite, bra.l), count, blocks_of_8(count)
    groups, (warps, shared) = functions_of_a_lane(count)[1], warps_of_a_block(16 * stride)

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


def launch_contraction(context, ab, cd, triangle, r, bra, ket):
    """J of both sides of a chunk of larger L from its r; `bra` and `ket` are (D, J) of the whole lists."""
    context.fixed(contraction_launcher, ab.facts, cd.facts)(context, ab, cd, triangle, r, bra, ket)
