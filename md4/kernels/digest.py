"""Digestion of blocks (ij, kl, a, b, c, d) into J and K on the GPU; the equations are in `md4.digest`.

A warp takes 32 columns (kl, c, d), one a lane, and goes through the rows ab of a few bra pairs. A lane keeps X_ac and
X_ad of its c and d for `rows` functions a, and sums X_bc and X_bd of one b after the other over them. The sums over the
d (or c) of other lanes go through shared memory, and from there by atomic addition to X; where a sum reaches into the
columns of another warp, both add their parts. Y_cd needs no other lane; for Y_ab the warp reduces the `rows` integrals
of one b together, each lane ending up with the sum of one of them.
"""

from md4.columns import (
    add_global,
    load_global,
    load_shared,
    make_add_scaled,
    make_dot,
    make_load_column,
    make_store_column,
    make_warp_sums,
    quotient,
)
from md4.device import F64, I64_2D, cuda, jit_device, types
from md4.digest import quartet_weight
from md4.dispatch import Kernel, Variant, launch
from md4.ptx import commit_copies, make_wait_copies, make_zeros, shared_address
from md4.quartets import (
    make_add_block,
    make_add_rows,
    make_coulomb,
    make_exchange,
    make_load_block,
    make_load_rows,
    make_stage,
)
from md4.straight import store_shared
from md4.tiles import (
    DIGEST_THREADS,
    QUARTET_INTEGRALS,
    SCATTER_THREADS,
    bra_pairs_of_a_warp,
    digest_shape,
    quartet_blocks,
    quartet_doubles,
)

i32, i64 = types.int32, types.int64


def place_sums(side, first, last, lane, nc, nd):
    """What a lane sums of the columns `first` to `last` and where to (device function).

    `side` 0: sums over d, one for each (kl, c); 1: over c, one for each (kl, d). Returns the first column from `first`
    on, how far they reach, and their distance, all in bytes of a row; the ket pair and the function of the sum; the
    first of the rows that the lane takes, and how many lanes share the rows of one sum. A lane with nothing to do has
    columns that reach nowhere.
    """
    ncd = nc * nd
    if side:
        width, shift, step, run = nd, 1, nd, ncd
        start, end = quotient(first, ncd) * nd, (quotient(last - 1, ncd) + 1) * nd
    else:
        width, shift, step, run = nc, nd, 1, nd
        start, end = quotient(first, nd), quotient(last - 1, nd) + 1
    count = end - start
    sharing, row = quotient(32, count), quotient(lane, count)
    u = start + lane - row * count
    if count > 32:  # of so many d, hardly one stands in two columns: every lane takes its own
        sharing, row, run = i64(1), i64(0), i64(1)
        place = min(first + lane, last)
        kl = quotient(place, ncd)
        u = kl * nd + (place - kl * ncd) - quotient(place - kl * ncd, nd) * nd
        begin = place
    else:
        kl = quotient(u, width)
        begin = kl * ncd + (u - kl * width) * shift
    stop = min(begin + run, last)
    if begin < first:
        begin += quotient(first - begin + step - 1, step) * step
    if row >= sharing:
        stop = begin
    first_byte, bytes_ = i32(8 * (begin - first)), i32(8 * (stop - begin))
    return first_byte, bytes_, i32(8 * step), i32(kl), i32(u - kl * width), i32(row), i32(sharing)


def add_sums(address, reach, step, row, sharing, rows_b, rows, to_b, to_a, nao, x):
    """Adds a lane's sums to X (device function): of row v of 32 values to x[to + v nao], first b's, then a's."""
    v = row
    while v < rows:
        place = i32(address + 512 * v)
        end, total = i32(place + reach), 0.0
        while place < end:
            total += load_shared(place)
            place = i32(place + step)
        if reach > 0:
            add_global(x, to_b + v * nao if v < rows_b else to_a + (v - rows_b) * nao, total)
        v = i32(v + sharing)


def digest_blocks(rows, blocks):
    """Kernel factory; `rows` functions a at a time, `blocks` blocks on a multiprocessor."""
    load, dot, add = make_load_column(rows), make_dot(rows), make_add_scaled(rows)
    store, warp_sums, zeros = make_store_column(rows), make_warp_sums(rows), make_zeros(rows)
    weight_of, warps = jit_device(quartet_weight), DIGEST_THREADS // 32
    place_of, add_all = jit_device(place_sums), jit_device(add_sums)

    def kernel(
        block, nbra, nkl, first_bra, first_ket, triangle, ao_bra, ao_ket, na, nb, nc, nd, densities, n_k, x, twice,
        n_j, y, nao, passes, bra_step, b_step,
    ):  # fmt: skip
        shared = cuda.shared.array(0, types.float64)
        lane, warp = i64(cuda.threadIdx.x) & 31, i64(cuda.threadIdx.x) >> 5
        work, ncd, nab = i64(cuda.blockIdx.x) * warps + warp, nc * nd, na * nb
        start = shared_address(shared) + warp * 512 * (rows + b_step)
        address = start + 8 * lane
        mine = i64(cuda.brev(types.uint32(lane)) >> types.uint32(27))  # see `make_warp_sums`
        i_first, first = work // passes * bra_step, work % passes * 32
        last = min(first + 32, nkl * ncd)
        column = min(first + lane, last - 1)
        kl = quotient(column, ncd)
        cd = column - kl * ncd
        c_first, d_first = ao_ket[first_ket + kl, 0], ao_ket[first_ket + kl, 1]
        c = quotient(cd, nd)
        c, d = i32(c_first + c), i32(d_first + cd - c * nd)
        live = first + lane < last
        begin_c, reach_c, step_c, kl_c, to_c, row_c, sharing_c = place_of(0, first, last, lane, nc, nd)
        begin_d, reach_d, step_d, kl_d, to_d, row_d, sharing_d = place_of(1, first, last, lane, nc, nd)
        if reach_c > 0:
            to_c = i32(ao_ket[first_ket + kl_c, 0] + to_c)
        if reach_d > 0:
            to_d = i32(ao_ket[first_ket + kl_d, 1] + to_d)
        for s in range(max(n_k, n_j)):
            origin, y_cd = s * nao * nao, 0.0
            d_cd = load_global(twice, origin + c * nao + d) if s < n_j else 0.0
            for i in range(i_first, min(i_first + bra_step, nbra)):
                a_ao, b_ao = ao_bra[first_bra + i, 0], ao_bra[first_bra + i, 1]
                weight = weight_of(a_ao, b_ao, c_first, d_first, triangle, first_bra + i, first_ket + kl)
                weight = weight if live else 0.0
                source = (i * nkl + kl) * nab * ncd + cd
                a, b_first = i64(0), i64(0)
                while a < na:
                    rows_a, rows_b = min(i64(rows), na - a), min(b_step, nb - b_first)
                    ac, ad, d_ac, d_ad, y_tile = zeros(), zeros(), zeros(), zeros(), 0.0
                    if s < n_k:
                        d_ac = load(densities, origin + (a_ao + a) * nao + c, nao, rows_a)
                        d_ad = load(densities, origin + (a_ao + a) * nao + d, nao, rows_a)
                    for n in range(rows_b):
                        b = b_first + n
                        row = load(block, source + (a * nb + b) * ncd, nb * ncd, rows_a)
                        if s < n_k:
                            at = origin + (b_ao + b) * nao
                            ac = add(ac, row, load_global(densities, at + d))
                            ad = add(ad, row, load_global(densities, at + c))
                            store_shared(i32(address + 512 * n), weight * dot(row, d_ad, 0.0))
                            store_shared(i32(address + 512 * n + 256), weight * dot(row, d_ac, 0.0))
                        if s < n_j:
                            d_ab = load(twice, origin + (a_ao + a) * nao + b_ao + b, nao, rows_a)
                            y_tile = dot(row, d_ab, y_tile)
                            total = warp_sums(row, weight * d_cd, lane)
                            if mine < rows_a:
                                add_global(y, origin + (a_ao + a + mine) * nao + b_ao + b, total)
                    y_cd += weight * y_tile
                    if s < n_k:
                        place = address + 512 * rows_b
                        store(ac, weight, i32(place), i32(512))
                        store(ad, weight, i32(place + 256), i32(512))
                        cuda.syncwarp()
                        to_b, to_a = origin + (b_ao + b_first) * nao, origin + (a_ao + a) * nao
                        add_all(
                            start + begin_c, reach_c, step_c, row_c, sharing_c, rows_b, rows_b + rows_a, to_b + to_c,
                            to_a + to_c, nao, x,
                        )  # fmt: skip
                        add_all(
                            start + 256 + begin_d, reach_d, step_d, row_d, sharing_d, rows_b, rows_b + rows_a,
                            to_b + to_d, to_a + to_d, nao, x,
                        )  # fmt: skip
                        cuda.syncwarp()
                    b_first += b_step
                    if b_first >= nb:
                        a, b_first = a + rows, i64(0)
            if s < n_j and live:
                add_global(y, origin + c * nao + d, y_cd)

    flag = types.boolean
    signature = (F64, *[i64] * 4, flag, I64_2D, I64_2D, *[i64] * 4, F64, i64, F64, F64, i64, F64, *[i64] * 4)
    return Kernel(kernel, signature, (DIGEST_THREADS, blocks))


def digest_quartets(na, nb, nc, nd):
    """Kernel factory for small quartets, a thread each; a warp stages the integrals of 32."""
    width, size = nc + nd, nb * nc * nd
    load_rows, add_rows, load_row, add_row = (
        make(n, nc, nd) for n in (nb, 1) for make in (make_load_rows, make_add_rows)
    )
    exchange, coulomb = make_exchange(nb, nc, nd), make_coulomb(nb, nc, nd)
    load_block, add_block = make_load_block(nc, nd), make_add_block(nc, nd)
    no_rows, no_block, warp_sums = make_zeros(nb * width), make_zeros(nc * nd), make_warp_sums(nb)
    stage, wait_all = make_stage(na * size), make_wait_copies(0)
    weight_of, warps, blocks = jit_device(quartet_weight), DIGEST_THREADS // 32, quartet_blocks(na, nb, nc, nd)

    def kernel(
        block, nbra, nkl, first_bra, first_ket, triangle, ao_bra, ao_ket, densities, n_k, x, twice, n_j, y, nao, passes,
        bra_step,
    ):  # fmt: skip
        lane, warp = i64(cuda.threadIdx.x) & 31, i64(cuda.threadIdx.x) >> 5
        work = i64(cuda.blockIdx.x) * warps + warp
        start = shared_address(cuda.shared.array(0, types.float64)) + warp * (256 * na * size)
        place = i32(start + 8 * na * size * lane)
        mine = i64(cuda.brev(types.uint32(lane)) >> types.uint32(27))  # see `make_warp_sums`
        i_first, first = work // passes * bra_step, work % passes * 32
        count = min(i64(32), nkl - first)
        limit = i32((count * (na * size) - lane + 31) >> 5)
        kl = first_ket + min(first + lane, nkl - 1)
        c, d = ao_ket[kl, 0], ao_ket[kl, 1]
        for s in range(max(n_k, n_j)):
            origin = s * nao * nao
            y_cd, d_cd = no_block(), no_block()
            if s < n_j:
                d_cd = load_block(twice, origin + c * nao + d, nao)
            for i in range(i_first, min(i_first + bra_step, nbra)):
                stage(i32(start + 8 * lane), block, (i * nkl + first) * (na * size) + lane, limit)
                commit_copies()
                a_ao, b_ao = ao_bra[first_bra + i, 0], ao_bra[first_bra + i, 1]
                weight = weight_of(a_ao, b_ao, c, d, triangle, first_bra + i, kl)
                weight = weight if lane < count else 0.0
                x_b, d_b, b_row = no_rows(), no_rows(), origin + b_ao * nao
                if s < n_k:
                    d_b = load_rows(densities, b_row, nao, c, d)
                wait_all()
                cuda.syncwarp()
                for a in range(na):
                    a_row, here = origin + (a_ao + a) * nao, i32(place + 8 * size * a)
                    if s < n_k:
                        done = exchange(x_b, here, d_b, load_row(densities, a_row, nao, c, d))
                        add_row(x, a_row, nao, c, d, done[:width], weight)
                        x_b = done[width:]
                    if s < n_j:
                        sums = coulomb(y_cd, here, d_cd, twice, a_row + b_ao, weight)
                        y_cd = sums[nb:]
                        total = warp_sums(sums[:nb], weight, lane)
                        if mine < nb:
                            add_global(y, a_row + b_ao + mine, total)
                cuda.syncwarp()
                if s < n_k:
                    add_rows(x, b_row, nao, c, d, x_b, weight)
            if s < n_j:
                add_block(y, origin + c * nao + d, nao, y_cd)

    flag = types.boolean
    signature = (F64, *[i64] * 4, flag, I64_2D, I64_2D, F64, i64, F64, F64, i64, F64, *[i64] * 3)
    return Kernel(kernel, signature, (DIGEST_THREADS, blocks))


def pair_diagonals():
    """Kernel factory: (ab|ab) of a block of a pair list with itself."""

    def kernel(block, npair, nab, out):
        n = i64(cuda.blockIdx.x) * SCATTER_THREADS + cuda.threadIdx.x
        if n < npair * nab:
            i, ab = n // nab, n % nab
            out[n] = block[((i * npair + i) * nab + ab) * nab + ab]

    return Kernel(kernel, (F64, i64, i64, F64))


# launchers


def by_quartets(bra, ket):
    """Whether a thread digests a quartet; where bra and ket have but one b and d, columns are faster."""
    slender = bra.nb == ket.nb == 1 and min(bra.nab, ket.nab) > 1
    return bra.nab * ket.nab <= QUARTET_INTEGRALS and not slender


def digest_variant(bra, ket):
    """The variant that digests blocks of a class into J and K."""
    if by_quartets(bra, ket):
        return Variant(digest_quartets, (bra.na, bra.nb, ket.na, ket.nb))
    return Variant(digest_blocks, digest_shape(bra.na, bra.nb)[:2])


def digest_swapped(bra, ket):
    """Whether bra and ket should change places: few numbers a thread, or else many columns."""
    if by_quartets(bra, ket):
        return quartet_doubles(ket.nb, bra.na, bra.nb) < quartet_doubles(bra.nb, ket.na, ket.nb)
    return ket.nab < bra.nab


def launch_digest(block, ab, cd, places, triangle, densities, x, twice, y, nao, stream):
    """A block into X and Y.

    Parameters
    ----------
    block : DeviceBlock
    ab, cd : PreparedPairs
        Slices of lists, whose (npair, 2) first AOs are `places`.
    densities, x, twice, y : Buffer, shape (n, nao nao)
        See `md4.digest`; n = 0 leaves out K or J.
    """
    bra, ket = ab.pairs, cd.pairs
    matrices = (
        densities.part(0, (densities.size,)), densities.shape[0], x, twice.part(0, (twice.size,)), twice.shape[0], y,
    )  # fmt: skip
    lists = block.array, len(bra), len(ket), ab.first, cd.first, triangle, *places
    small = by_quartets(bra, ket)
    passes = -(-len(ket) * (1 if small else ket.nab) // 32)
    bra_step = bra_pairs_of_a_warp(bra.nab * ket.nab if small else bra.nab, passes * len(bra))
    blocks = -(-passes * -(-len(bra) // bra_step) * 32 // DIGEST_THREADS)
    if small:
        shape, shared, rest = (), 8 * bra.nab * ket.nab * DIGEST_THREADS, ()
    else:
        rows, _, b_step = digest_shape(bra.na, bra.nb)
        shape, shared, rest = (bra.na, bra.nb, ket.na, ket.nb), 16 * (rows + b_step) * DIGEST_THREADS, (b_step,)
    launch(
        digest_variant(bra, ket), blocks, DIGEST_THREADS, stream, shared,
        *lists, *shape, *matrices, nao, passes, bra_step, *rest,
    )  # fmt: skip


def launch_diagonal(block, npair, nab, out, stream):
    """(ab|ab) of a block into `out`, shape (npair, nab)."""
    blocks = -(-npair * nab // SCATTER_THREADS)
    launch(Variant(pair_diagonals, ()), blocks, SCATTER_THREADS, stream, 0, block.array, npair, nab, out)
