"""Digestion of blocks (ij, kl, a, b, c, d) into J and K on the GPU; the equations are in `md4.method.digestion`.

A warp takes 32 columns (kl, c, d), one a lane, and goes through the rows ab of a few bra pairs. A lane keeps X_ac and
X_ad of its c and d for `rows` functions a, and sums X_bc and X_bd of one b after the other over them. The sums over the
d (or c) of other lanes go through shared memory, and from there by atomic addition to X; where a sum reaches into the
columns of another warp, both add their parts. The integrals and densities of the next b are copied to shared memory
while this one's are worked on. Y_cd needs no other lane; for Y_ab the warp reduces the `rows` integrals
of one b together, each lane ending up with the sum of one of them.
"""

import math

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I64_2D, cuda, jit_device, types
from md4.gpu.emit.digest_columns import (
    add_at,
    add_global,
    address_at,
    load_global,
    load_shared,
    make_add_scaled,
    make_column_sums,
    make_copy_column,
    make_dot,
    make_load_column,
    make_store_column,
    make_take_column,
    make_warp_sums,
    quotient,
    warp_place,
)
from md4.gpu.emit.digest_quartets import (
    make_add_block,
    make_add_rows,
    make_coulomb,
    make_exchange,
    make_load_block,
    make_load_rows,
    make_stage,
)
from md4.gpu.emit.instructions import address_of, commit_copies, make_empty, make_wait_copies, shared_address
from md4.gpu.emit.unrolled import store_shared
from md4.gpu.tuning import (
    DIGEST_ROW_BYTES,
    DIGEST_THREADS,
    QUARTET_INTEGRALS,
    STAGE_ROW,
    bra_pairs_of_a_warp,
    digest_shape,
    digest_shared,
    digest_stage,
    quartet_blocks,
    quartet_doubles,
)
from md4.method.digestion import digest_flags, digest_ranges, quartet_weight
from md4.shells.schwarz import larger

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


def add_sums(address, reach, step, row, sharing, rows_b, rows, to_b, to_a, row_bytes):
    """Adds a lane's sums to X (device function): of 32 values each, rows of b to those at to_b, of a at to_a."""
    v = row
    while v < rows:
        place = i32(address + DIGEST_ROW_BYTES * v)
        end, total = i32(place + reach), 0.0
        while place < end:
            total += load_shared(place)
            place = i32(place + step)
        if reach > 0:
            target = address_at(to_b, v, row_bytes) if v < rows_b else address_at(to_a, i32(v - rows_b), row_bytes)
            add_at(target, total)
        v = i32(v + sharing)


def digest_blocks(rows, blocks, exchange, coulomb):
    """Kernel factory; `rows` functions a at a time, `blocks` on a multiprocessor; whether X and whether Y is summed."""
    load, dot, add, zeros = make_load_column(rows), make_dot(rows), make_add_scaled(rows), make_empty(rows)
    copy, copy_one = make_copy_column(rows, STAGE_ROW), make_copy_column(1, STAGE_ROW)
    take, take_ab = make_take_column(rows, STAGE_ROW), make_take_column(rows, 8)
    store, column_sums, wait_older = make_store_column(rows), make_column_sums(rows, STAGE_ROW), make_wait_copies(1)
    weight_of, warps = jit_device(quartet_weight), DIGEST_THREADS // 32
    place_of, add_all = jit_device(place_sums), jit_device(add_sums)
    # what a warp reads for one b: integrals of all a, D_bd, D_bc, and D + D^T of all a
    stage_bytes, (at_bd, at_bc, at_ab) = digest_stage(rows), (STAGE_ROW * (rows + n) for n in range(3))

    @jit_device
    def fetch(stage, lane, source, step, limit, row_b, c, d, row_ab):
        """Starts to copy what a lane reads for one b."""
        mine = i32(stage + 8 * lane)
        copy(mine, source, step, limit)
        if exchange:
            copy_one(i32(mine + at_bd), address_at(row_b, d, 8), i64(0), 1)
            copy_one(i32(mine + at_bc), address_at(row_b, c, 8), i64(0), 1)
        if coulomb and lane < rows:
            copy_one(i32(mine + at_ab), row_ab, i64(0), i32(limit - lane))

    def kernel(
        block, nbra, nkl, first_bra, first_ket, triangle, ao_bra, ao_ket, densities, x, twice, y, first_s,
        last_s, nao, passes, bra_step, na, nb, nc, nd, b_step,
    ):  # fmt: skip
        lane, warp = i32(i64(cuda.threadIdx.x) & 31), i64(cuda.threadIdx.x) >> 5
        work, ncd, row_bytes = i64(cuda.blockIdx.x) * warps + warp, i32(nc * nd), i32(8 * nao)
        sums_bytes = DIGEST_ROW_BYTES * (rows + b_step)
        start = i32(shared_address(cuda.shared.array(0, types.float64)) + warp * (sums_bytes + 2 * stage_bytes + 256))
        stages, address = i32(start + sums_bytes), i32(start + 8 * lane)
        scaled = i32(stages + 2 * stage_bytes)  # weight (D + D^T)_cd of the columns
        i_first, first = work // passes * bra_step, work % passes * 32
        i_last, last = min(i_first + bra_step, nbra), min(first + 32, nkl * ncd)
        column = min(first + lane, last - 1)
        kl = quotient(column, ncd)
        cd = i32(column - kl * ncd)
        c_first, d_first = ao_ket[first_ket + kl, 0], ao_ket[first_ket + kl, 1]
        c = i32(quotient(cd, nd))
        c, d = i32(c_first + c), i32(d_first + cd - c * nd)
        live = first + lane < last
        begin_c, reach_c, step_c, kl_c, to_c, row_c, sharing_c = place_of(0, first, last, lane, nc, nd)
        begin_d, reach_d, step_d, kl_d, to_d, row_d, sharing_d = place_of(1, first, last, lane, nc, nd)
        if reach_c > 0:
            to_c = i32(ao_ket[first_ket + kl_c, 0] + to_c)
        if reach_d > 0:
            to_d = i32(ao_ket[first_ket + kl_d, 1] + to_d)
        of_row = min(i32(lane >> 2), i32(rows - 1))  # the lane's row of `column_sums`
        a_bytes, quartet = i64(8 * nb * ncd), i64(8 * na * nb * ncd)
        for s in range(first_s, last_s if i_first < i_last else first_s):
            if not exchange:
                cuda.syncwarp()  # lanes may still read what the last matrix left in shared memory
            origin, y_cd = s * nao * nao, 0.0
            at_d, at_x = address_of(densities, origin), address_of(x, origin)
            at_twice, at_y = address_of(twice, origin), address_of(y, origin)
            d_cd = load_global(twice, origin + c * nao + d) if coulomb else 0.0
            a_ao, b_ao = i32(ao_bra[first_bra + i_first, 0]), i32(ao_bra[first_bra + i_first, 1])
            source = address_of(block, (i_first * nkl + kl) * (na * nb * ncd) + cd)
            row_ab = address_at(address_at(at_twice, i32(a_ao + lane), row_bytes), b_ao, 8)
            rows_a, i, a, b, n, b_first = i32(min(i64(rows), na)), i_first, i32(0), i32(0), i32(0), i32(0)
            row_b = address_at(at_d, b_ao, row_bytes)
            fetch(stages, lane, source, a_bytes, rows_a, row_b, c, d, row_ab)
            commit_copies()
            buffer, weight = i32(0), 0.0
            ac, ad, d_ac, d_ad, y_tile = zeros(), zeros(), zeros(), zeros(), 0.0
            while i < i_last:
                if a == 0 and b == 0:  # another bra pair
                    weight = weight_of(a_ao, b_ao, c_first, d_first, triangle, first_bra + i, first_ket + kl)
                    weight = weight if live else 0.0
                    if not exchange:
                        cuda.syncwarp()  # lanes may still read those of the last bra pair
                    store_shared(i32(scaled + 8 * lane), weight * d_cd)
                if n == 0 and exchange:  # another tile of functions a and b
                    row_a = address_at(at_d, i32(a_ao + a), row_bytes)
                    d_ac = load(address_at(row_a, c, 8), i64(row_bytes), rows_a)
                    d_ad = load(address_at(row_a, d, 8), i64(row_bytes), rows_a)
                    ac, ad = zeros(), zeros()
                # the next b, functions a or bra pair
                next_i, next_a, next_b, next_a_ao, next_b_ao = i, a, i32(b + 1), a_ao, b_ao
                if next_b == nb:
                    next_a, next_b = i32(a + rows), i32(0)
                    if next_a >= na:
                        next_i, next_a = i + 1, i32(0)
                        if next_i < i_last:
                            next_a_ao = i32(ao_bra[first_bra + next_i, 0])
                            next_b_ao = i32(ao_bra[first_bra + next_i, 1])
                        source += nkl * quartet
                next_rows = i32(min(i64(rows), na - next_a))
                cuda.syncwarp()
                if next_i < i_last:
                    row_ab = address_at(at_twice, i32(next_a_ao + next_a + lane), row_bytes)
                    fetch(
                        i32(stages + (stage_bytes - buffer)), lane,
                        address_at(source, i32((next_a * nb + next_b) * ncd), 8), a_bytes, next_rows,
                        address_at(at_d, i32(next_b_ao + next_b), row_bytes), c, d,
                        address_at(row_ab, i32(next_b_ao + next_b), 8),
                    )  # fmt: skip
                commit_copies()
                wait_older()
                cuda.syncwarp()
                here = i32(stages + buffer)
                mine = i32(here + 8 * lane)
                row = take(mine)
                if exchange:
                    ac = add(ac, row, load_shared(i32(mine + at_bd)))
                    ad = add(ad, row, load_shared(i32(mine + at_bc)))
                    place = i32(address + DIGEST_ROW_BYTES * n)
                    store_shared(place, weight * dot(row, d_ad, 0.0))
                    store_shared(i32(place + 256), weight * dot(row, d_ac, 0.0))
                if coulomb:
                    y_tile = dot(row, take_ab(i32(here + at_ab)), y_tile)
                    total = column_sums(here, scaled, lane, of_row)
                    if (lane & 3) == 0 and (lane >> 2) < rows_a:
                        row_y = address_at(at_y, i32(a_ao + a + (lane >> 2)), row_bytes)
                        add_at(address_at(row_y, i32(b_ao + b), 8), total)
                n, buffer = i32(n + 1), i32(stage_bytes - buffer)
                if n == b_step or next_b == 0:  # the tile's end
                    y_cd += weight * y_tile
                    y_tile = 0.0
                    if exchange:
                        place = i32(address + DIGEST_ROW_BYTES * n)
                        store(ac, weight, place, i32(DIGEST_ROW_BYTES))
                        store(ad, weight, i32(place + 256), i32(DIGEST_ROW_BYTES))
                        cuda.syncwarp()
                        to_b = address_at(at_x, i32(b_ao + b_first), row_bytes)
                        to_a = address_at(at_x, i32(a_ao + a), row_bytes)
                        add_all(
                            i32(start + begin_c), reach_c, step_c, row_c, sharing_c, n, i32(n + rows_a),
                            address_at(to_b, to_c, 8), address_at(to_a, to_c, 8), row_bytes,
                        )  # fmt: skip
                        add_all(
                            i32(start + 256 + begin_d), reach_d, step_d, row_d, sharing_d, n, i32(n + rows_a),
                            address_at(to_b, to_d, 8), address_at(to_a, to_d, 8), row_bytes,
                        )  # fmt: skip
                    n, b_first = i32(0), next_b
                i, a, b, a_ao, b_ao, rows_a = next_i, next_a, next_b, next_a_ao, next_b_ao, next_rows
            if coulomb and live:
                add_global(y, origin + c * nao + d, y_cd)

    flag = types.boolean
    signature = (F64, *[i64] * 4, flag, I64_2D, I64_2D, *[F64] * 4, *[i64] * 10)
    return Kernel(kernel, (DIGEST_THREADS, blocks), signature)


def digest_quartets(na, nb, nc, nd, exchange, coulomb):
    """Kernel factory for small quartets, a thread each; a warp stages the integrals of 32. Flags as `digest_blocks`."""
    width, size = nc + nd, nb * nc * nd
    load_rows, add_rows, load_row, add_row = (
        make(n, nc, nd) for n in (nb, 1) for make in (make_load_rows, make_add_rows)
    )
    add_exchange, add_coulomb = make_exchange(nb, nc, nd), make_coulomb(nb, nc, nd)
    load_block, add_block = make_load_block(nc, nd), make_add_block(nc, nd)
    no_rows, no_block, warp_sums = make_empty(nb * width), make_empty(nc * nd), make_warp_sums(nb)
    stage, wait_all = make_stage(na * size), make_wait_copies(0)
    weight_of, warps, blocks = jit_device(quartet_weight), DIGEST_THREADS // 32, quartet_blocks(na, nb, nc, nd)

    def kernel(
        block, nbra, nkl, first_bra, first_ket, triangle, ao_bra, ao_ket, densities, x, twice, y, first_s,
        last_s, nao, passes, bra_step,
    ):  # fmt: skip
        lane, warp = i64(cuda.threadIdx.x) & 31, i64(cuda.threadIdx.x) >> 5
        work = i64(cuda.blockIdx.x) * warps + warp
        start = shared_address(cuda.shared.array(0, types.float64)) + warp * (256 * na * size)
        place = i32(start + 8 * na * size * lane)
        mine = warp_place(lane)
        i_first, first = work // passes * bra_step, work % passes * 32
        count = min(i64(32), nkl - first)
        limit = i32((count * (na * size) - lane + 31) >> 5)
        kl = first_ket + min(first + lane, nkl - 1)
        c, d = ao_ket[kl, 0], ao_ket[kl, 1]
        if lane >= count:  # of no weight, but what lies in shared memory may be no number
            for n in range(na * size):
                store_shared(i32(place + 8 * n), 0.0)
        for s in range(first_s, last_s):
            origin = s * nao * nao
            y_cd, d_cd = no_block(), no_block()
            if coulomb:
                d_cd = load_block(twice, origin + c * nao + d, nao)
            for i in range(i_first, min(i_first + bra_step, nbra)):
                stage(i32(start + 8 * lane), block, (i * nkl + first) * (na * size) + lane, limit)
                commit_copies()
                a_ao, b_ao = ao_bra[first_bra + i, 0], ao_bra[first_bra + i, 1]
                weight = weight_of(a_ao, b_ao, c, d, triangle, first_bra + i, kl)
                weight = weight if lane < count else 0.0
                x_b, d_b, b_row = no_rows(), no_rows(), origin + b_ao * nao
                if exchange:
                    d_b = load_rows(densities, b_row, nao, c, d)
                wait_all()
                cuda.syncwarp()
                for a in range(na):
                    a_row, here = origin + (a_ao + a) * nao, i32(place + 8 * size * a)
                    if exchange:
                        done = add_exchange(x_b, here, d_b, load_row(densities, a_row, nao, c, d))
                        add_row(x, a_row, nao, c, d, done[:width], weight)
                        x_b = done[width:]
                    if coulomb:
                        sums = add_coulomb(y_cd, here, d_cd, twice, a_row + b_ao, weight)
                        y_cd = sums[nb:]
                        total = warp_sums(sums[:nb], weight, lane)
                        if mine < nb:
                            add_global(y, a_row + b_ao + mine, total)
                cuda.syncwarp()
                if exchange:
                    add_rows(x, b_row, nao, c, d, x_b, weight)
            if coulomb:
                add_block(y, origin + c * nao + d, nao, y_cd)

    flag = types.boolean
    signature = (F64, *[i64] * 4, flag, I64_2D, I64_2D, *[F64] * 4, *[i64] * 5)
    return Kernel(kernel, (DIGEST_THREADS, blocks), signature)


def pair_bounds():
    """Kernel factory: R_ab (see `md4.shells.schwarz`) of the pairs of a block of a list with itself, a warp each."""
    larger_of = jit_device(larger)

    def kernel(block, npair, na, nb, out):
        lane, pair = i64(cuda.threadIdx.x) & 31, i64(cuda.blockIdx.x) * 8 + (i64(cuda.threadIdx.x) >> 5)
        if pair < npair:
            nab, best = na * nb, 0.0
            first = pair * (npair + 1) * nab * nab
            for n in range(lane, na + nb, 32):  # a row a of the diagonal (ab|ab), or a column b
                place, step, count = (n * nb, i64(1), nb) if n < na else (n - na, nb, na)
                total = 0.0
                for k in range(count):
                    value = block[first + (place + k * step) * (nab + 1)]
                    total += 0.0 if value < 0.0 else value  # NaN stays
                best = larger_of(best, total)
            other = 16
            while other > 0:
                best = larger_of(best, cuda.shfl_xor_sync(-1, best, other))
                other >>= 1
            if lane == 0:
                out[pair] = math.sqrt(best)

    return Kernel(kernel, signature=(F64, i64, i64, i64, F64))


# launchers


def by_quartets(bra, ket):
    """Whether a thread digests a quartet; where bra and ket have but one b and d, columns are faster."""
    slender = bra.nb == ket.nb == 1 and min(bra.nab, ket.nab) > 1
    return bra.nab * ket.nab <= QUARTET_INTEGRALS and not slender


def digest_variant(bra, ket, exchange=True, coulomb=True):
    """The variant that digests blocks of a class into K (`exchange`) and J."""
    if by_quartets(bra, ket):
        return Variant(digest_quartets, (bra.na, bra.nb, ket.na, ket.nb, exchange, coulomb))
    return Variant(digest_blocks, (*digest_shape(bra.na, bra.nb)[:2], exchange, coulomb))


def digest_swapped(bra, ket):
    """Whether bra and ket should change places: few numbers a thread, or else many columns."""
    if by_quartets(bra, ket):
        return quartet_doubles(ket.nb, bra.na, bra.nb) < quartet_doubles(bra.nb, ket.na, ket.nb)
    return ket.nab < bra.nab


def launch_digest(context, block, ab, cd, places, triangle, densities, x, twice, y, nao):
    """A block into X and Y.

    Parameters
    ----------
    block : DeviceBlock
    ab, cd : PreparedPairs
        Slices of lists, whose (npair, 2) first AOs are `places`.
    densities, x, twice, y : Buffer, shape (n, nao nao)
        See `md4.method.digestion`; n = 0 leaves out K or J.
    """
    bra, ket = ab.pairs, cd.pairs
    n_k, n_j = densities.shape[0], twice.shape[0]
    small = by_quartets(bra, ket)
    passes = -(-len(ket) * (1 if small else ket.nab) // 32)
    bra_step = bra_pairs_of_a_warp(bra.nab * ket.nab if small else bra.nab, passes * len(bra))
    blocks = -(-passes * -(-len(bra) // bra_step) * 32 // DIGEST_THREADS)
    if small:
        shape, shared = (), 8 * bra.nab * ket.nab * DIGEST_THREADS
    else:
        rows, _, b_step = digest_shape(bra.na, bra.nb)
        shape, shared = (bra.na, bra.nb, ket.na, ket.nb, b_step), digest_shared(rows, b_step)
    lists = block.array, len(bra), len(ket), ab.first, cd.first, triangle, *places
    matrices = densities.part(0, (densities.size,)), x, twice.part(0, (twice.size,)), y
    for (first, last), flags in zip(digest_ranges(n_k, n_j), digest_flags(n_k, n_j)):
        args = (*lists, *matrices, first, last, nao, passes, bra_step, *shape)
        context.launch(digest_variant(bra, ket, *flags), blocks, DIGEST_THREADS, shared, *args)


def launch_bounds(context, block, out):
    """R_ab of a block of a list with itself into `out`, shape (npair,)."""
    npair, _, na, nb = block.dims[:4]
    context.launch(Variant(pair_bounds, ()), -(-npair // 8), 256, 0, block.array, npair, na, nb, out)
