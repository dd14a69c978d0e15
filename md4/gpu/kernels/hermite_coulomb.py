"""J in the Hermite basis on the GPU; the equations are in `md4.method.hermite_coulomb`.

Densities and sums of a list are stored [primitive pair][p], rows padded to blocks of 8, both with the sign (-1)^|p|.
Two kernels make the sums. For small L a thread takes a primitive quartet, with r in its registers: the lanes of a warp
share the bra primitive and take ket primitives side by side, whose D_q and J_q each lane keeps while it goes through
bra primitives; J_p is summed over the warp. For larger L a warp takes a bra primitive, its lanes share the functions p,
and goes through ket primitives, whose r it copies to shared memory; J_q is summed over the warp.
"""

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, F64_2D, I32, I64, I64_2D, cuda, jit_device, types
from md4.gpu.emit.correlation import make_add_column, make_correlate, make_load_words, make_quartet_sums, make_signed
from md4.gpu.emit.digest_columns import load_global, make_load_column, quotient
from md4.gpu.emit.instructions import address_of, commit_copies, make_empty, make_wait_copies, shared_address
from md4.gpu.emit.unrolled import make_pack
from md4.gpu.h_layout import KET_BLOCKS, form_size
from md4.gpu.kernels.ring import make_copy_range
from md4.gpu.tuning import (
    COULOMB_THREADS,
    blocks_of_8,
    coulomb_chunk,
    coulomb_functions,
    coulomb_kets,
    coulomb_straight,
    coulomb_warps,
    r_stride,
)
from md4.method import operators
from md4.method.angular import nherm, packed_hermite

i32, i64 = types.int32, types.int64


def hermite_densities():
    """Kernel factory: D_p = sum_ab H[ab, p] w_ab D_ab of all primitive pairs, a warp for 8 functions p of one."""

    def kernel(h, size, rows8, owner, ao, nb, nab, matrix, nao, nprim, np8, out):
        lane, work = i64(cuda.threadIdx.x) & 31, i64(cuda.blockIdx.x) * 4 + (i64(cuda.threadIdx.x) >> 5)
        if work < nprim * np8:
            prim = quotient(work, np8)
            block = work - prim * np8
            pair = owner[prim]
            a, b, total = ao[pair, 0], ao[pair, 1], 0.0
            first, row = prim * size + block * rows8 * 64 + (lane & 7), lane >> 3
            while row < nab:
                place = quotient(row, nb)
                total += load_global(h, first + 8 * row) * load_global(matrix, (a + place) * nao + b + row - place * nb)
                row += 4
            total += cuda.shfl_xor_sync(-1, total, 8)
            total += cuda.shfl_xor_sync(-1, total, 16)
            if lane < 8:
                out[work * 8 + lane] = 0.5 * total if a == b else total

    signature = (F64, i64, i64, I64, I64_2D, i64, i64, F64, i64, i64, i64, F64)
    return Kernel(kernel, (COULOMB_THREADS, 4), signature)


def hermite_sums():
    """Kernel factory: Y_ab = w_ab sum_p H[ab, p] J_p over the primitive pairs of each pair, a warp for 4 rows ab."""

    def kernel(h, size, rows8, start, ao, nb, nab, sums, np8, npair, row_blocks, nao, y):
        lane, work = i64(cuda.threadIdx.x) & 31, i64(cuda.blockIdx.x) * 4 + (i64(cuda.threadIdx.x) >> 5)
        if work < npair * row_blocks:
            pair = quotient(work, row_blocks)
            row, total = (work - pair * row_blocks) * 4 + (lane >> 3), 0.0
            for prim in range(start[pair], start[pair + 1]):
                block, source = i64(0), prim * size + 8 * row + (lane & 7)
                while block < np8:
                    if row < nab:
                        value = load_global(h, source + block * rows8 * 64)
                        total += value * load_global(sums, (prim * np8 + block) * 8 + (lane & 7))
                    block += 1
            total += cuda.shfl_xor_sync(-1, total, 1)
            total += cuda.shfl_xor_sync(-1, total, 2)
            total += cuda.shfl_xor_sync(-1, total, 4)
            if row < nab and lane & 7 == 0:
                a, b, place = ao[pair, 0], ao[pair, 1], quotient(row, nb)
                y[(a + place) * nao + b + row - place * nb] = 0.5 * total if a == b else total

    signature = (F64, i64, i64, I64, I64_2D, i64, i64, F64, i64, i64, i64, i64, F64)
    return Kernel(kernel, (COULOMB_THREADS, 4), signature)


def coulomb_quartets(l_bra, l_ket, kind):
    """Kernel factory for small L: a thread a primitive quartet, J_p += r D_q and J_q += r D_p."""
    orders, np_, nq = l_bra + l_ket + 1, 8 * blocks_of_8(nherm(l_bra)), 8 * blocks_of_8(nherm(l_ket))
    count, threads = nherm(l_ket), COULOMB_THREADS
    zeros_upto, pack = operators.zeros_function(kind, jit_device), make_pack(orders)
    quartet, load, add, none = (
        make_quartet_sums(l_bra, l_ket), make_load_column(count), make_add_column(count), make_empty(count)
    )  # fmt: skip

    def kernel(
        bra, bra_width, bra_first, nbra, ket, ket_width, ket_first, nket, triangle, d_bra, d_ket, j_bra, j_ket,
        parameter, table, parts, step,
    ):  # fmt: skip
        tid = i64(cuda.threadIdx.x)
        block = quotient(i64(cuda.blockIdx.x), parts)
        i = bra_first + (i64(cuda.blockIdx.x) - block * parts) * step
        last, n = min(i + step, bra_first + nbra), block * threads + tid
        least = ket_first + n - (tid & 31)  # first ket primitive of the warp
        live, k = n < nket, ket_first + min(n, nket - 1)
        if triangle and i < least:
            i = least
        source = k * ket_width
        q, x, y, z = ket[source], ket[source + 1], ket[source + 2], ket[source + 3]
        d, j = load(address_of(d_ket, k * nq), i64(8), i32(count)), none()
        zero = cuda.local.array(orders, types.float64)
        while i < last:
            source, weight = i * bra_width, 1.0 if live else 0.0
            if triangle and k >= i:
                weight *= 0.5 if k == i else 0.0
            rx, ry, rz = bra[source + 1] - x, bra[source + 2] - y, bra[source + 3] - z
            r2 = rx * rx + ry * ry + rz * rz
            zeros_upto(orders - 1, bra[source], q, r2, parameter, table, zero, 0, 1)
            j = quartet(pack(zero), weight, rx, ry, rz, d, j, d_bra, i * np_, j_bra, i * np_, tid & 31)
            i += 1
        if live:
            add(j, j_ket, k * nq, 1, count)

    flag, f64 = types.boolean, types.float64
    signature = (F64, i64, i64, i64, F64, i64, i64, i64, flag, F64, F64, F64, F64, f64, F64_2D, i64, i64)
    return Kernel(kernel, (threads, 2), signature)


def coulomb_contraction(l_ket, functions):
    """Kernel factory for larger L: J_p += r D_q and J_q += r D_p, r from memory, `functions` p a lane."""
    correlate, load, add = make_correlate(l_ket, functions), make_load_column(functions), make_add_column(functions)
    words_of, signed, none = make_load_words(functions), make_signed(functions), make_empty(functions)
    copy, wait_one, wait_all = make_copy_range(32), make_wait_copies(1), make_wait_copies(0)
    nq = 8 * blocks_of_8(nherm(l_ket))

    def kernel(
        words, np_, np8, bra_first, nbra, ket_first, nket, triangle, r, stride, d_bra, d_ket, j_bra, j_ket, groups,
        parts, step, warps,
    ):  # fmt: skip
        tid = i64(cuda.threadIdx.x)
        lane, warp = tid & 31, tid >> 5
        work = i64(cuda.blockIdx.x) * warps + warp
        part = quotient(work, nbra * groups)
        work -= part * nbra * groups
        i = quotient(work, groups)
        first = (work - i * groups) * (32 * functions) + lane
        k, bytes_ = part * step, 8 * stride
        last = min(k + step, nket)
        if triangle:
            last = min(last, bra_first + i - ket_first + 1)
        base = shared_address(cuda.shared.array(0, types.float64)) + warp * 2 * bytes_
        if part < parts and k < last:
            own, limit = (bra_first + i) * (8 * np8) + first, (np_ - first + 31) >> 5
            places = words_of(words, first, np_ - 1)
            d, j, buffer = signed(load(address_of(d_bra, own), i64(256), i32(limit)), places), none(), i64(0)
            copy(base, r, (i * nket + k) * stride, stride, lane)
            commit_copies()
            while k < last:
                here = base + buffer * bytes_
                buffer = 1 - buffer
                if k + 1 < last:
                    copy(base + buffer * bytes_, r, (i * nket + k + 1) * stride, stride, lane)
                    commit_copies()
                    wait_one()
                else:
                    wait_all()
                cuda.syncwarp()
                # both sums of a quartet of a primitive pair with itself are the same one
                scale = 0.0 if triangle and ket_first + k == bra_first + i else 1.0
                j = correlate(places, i32(here), d_ket, d, j, scale, j_ket, (ket_first + k) * nq, lane)
                cuda.syncwarp()
                k += 1
            add(signed(j, places), j_bra, own, 32, limit)

    flag = types.boolean
    signature = (I32, *[i64] * 6, flag, F64, i64, F64, F64, F64, F64, *[i64] * 4)
    return Kernel(kernel, (COULOMB_THREADS, 1), signature)


# launchers


def hermite_width(pairs):
    """Doubles of D or J of one primitive pair."""
    return 8 * blocks_of_8(pairs.nherm)


def coulomb_variant(bra, ket, kind):
    """The variant that contracts r of a class with the densities of both sides; the bra's l is the larger."""
    if coulomb_straight(bra.l, ket.l):
        return Variant(coulomb_quartets, (bra.l, ket.l, kind))
    return Variant(coulomb_contraction, (ket.l, coulomb_functions(nherm(bra.l))[0]))


def launch_hermite_densities(context, prepared, h, ao, matrix, nao, out):
    """D_p of a whole list from `matrix`, D + D^T of nao x nao; `h` is in the form 'right'."""
    pairs = prepared.pairs
    np8 = blocks_of_8(pairs.nherm)
    context.launch(
        Variant(hermite_densities, ()), -(-pairs.nprim * np8 // 4), COULOMB_THREADS, 0,
        h, form_size(pairs, KET_BLOCKS), blocks_of_8(pairs.nab), prepared.data.owner, ao, pairs.nb, pairs.nab, matrix,
        nao, pairs.nprim, np8, out,
    )  # fmt: skip


def launch_hermite_sums(context, prepared, h, ao, sums, nao, y):
    """Y of a whole list from its J_p."""
    pairs = prepared.pairs
    row_blocks = -(-pairs.nab // 4)
    context.launch(
        Variant(hermite_sums, ()), -(-len(pairs) * row_blocks // 4), COULOMB_THREADS, 0,
        h, form_size(pairs, KET_BLOCKS), blocks_of_8(pairs.nab), prepared.data.start, ao, pairs.nb, pairs.nab, sums,
        blocks_of_8(pairs.nherm), len(pairs), row_blocks, nao, y,
    )  # fmt: skip


def launch_quartets(context, operator, ab, cd, triangle, bra, ket):
    """J of both sides of a tile of small L; `bra` and `ket` are (D, J) of the whole lists."""
    blocks = -(-cd.pairs.nprim // COULOMB_THREADS)
    step = coulomb_chunk(ab.pairs.nprim, blocks)
    parts = -(-ab.pairs.nprim // step)
    sides = [(s.data.records, s.data.width, s.first_prim, s.pairs.nprim) for s in (ab, cd)]
    context.launch(
        coulomb_variant(ab.pairs, cd.pairs, operator.kind), blocks * parts, COULOMB_THREADS, 0,
        *sides[0], *sides[1], triangle, bra[0], ket[0], bra[1], ket[1], operator.parameter,
        context.table(operators.operator_table, operator), parts, step,
    )  # fmt: skip


def launch_contraction(context, ab, cd, triangle, r, bra, ket):
    """J of both sides of a chunk of larger L from its r."""
    l_bra, l_ket = ab.pairs.l, cd.pairs.l
    nbra, nket, stride = ab.pairs.nprim, cd.pairs.nprim, r_stride(l_bra + l_ket)
    groups = coulomb_functions(nherm(l_bra))[1]
    warps, shared = coulomb_warps(16 * stride)
    step = coulomb_kets(nket, nbra * groups)
    parts = -(-nket // step)
    context.launch(
        coulomb_variant(ab.pairs, cd.pairs, None), -(-nbra * groups * parts // warps), 32 * warps,
        shared, context.table(packed_hermite, l_bra), nherm(l_bra), blocks_of_8(nherm(l_bra)), ab.first_prim, nbra,
        cd.first_prim, nket, triangle, r, stride, bra[0], ket[0], bra[1], ket[1], groups, parts, step, warps,
    )  # fmt: skip
