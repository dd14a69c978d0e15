"""Gamma of gradients for listed shell quartets; see `md4.gpu.kernels.reverse_sums` for the equation.

Primitive quartets of a shell quartet have the same Gamma, so it is made once. A block of threads brings the blocks of a
density that some quartets need to shared memory, two for J and four for exchange, and makes Gamma of them from there.
In memory the numbers of each block of two shells follow each other (`md4.gpu.kernels.density_blocks`). For quartets in
TF32 it makes all of that in FP32, and rounds the sum over densities once. Where Gamma is in a table already, it is
brought into the same order.
"""

from itertools import accumulate
from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, I32, cuda, f32, f64, i32, i64, jit_device, types, u64
from md4.gpu.emit.instructions import address_of, commit_copies, make_copy_number, make_wait_copies, shared_address
from md4.gpu.emit.scalars import (
    add_at,
    add_tf32_at,
    address_at,
    load_shared,
    load_shared_float,
    load_shared_int,
    quotient,
    store_at,
    store_tf32_at,
)
from md4.gpu.kernels.gamma_table import GammaTable
from md4.gpu.kernels.groups import levels_of
from md4.gpu.kernels.reverse_sums import Densities, FunctionPairs
from md4.gpu.staircases import whole_row_table, whole_rows
from md4.gpu.tiles import blocks_of_8

# Threads of a block, most quartets of one, and bytes of shared memory that the densities of its quartets take, about.
THREADS, GROUP, GROUP_BYTES = 128, 128, 24 << 10
# Quartets of a tile side by side: the lanes of a warp, no tunable number.
TILE = 32


class Functions(NamedTuple):
    """The functions ab and cd that meet.

    Attributes
    ----------
    rows, order : int32 array
        Those of the bra, and of the ket in the order of a tile's rows: `md4.gpu.staircases.whole_rows` and
        `whole_row_table`.
    columns : int64
        How many the ket has.
    """

    rows: I32
    order: I32
    columns: i64


class ShellQuartets(NamedTuple):
    """Numbers of both pairs of shell quartets in their whole lists, int32 arrays."""

    bra: I32
    ket: I32


def density_place(n, na, nb, nc, nd):
    """Of the n-th number of the blocks ab, cd, ac, bd, ad, bc: both shells, functions of the first, and which it is.

    A device function.
    """
    left, right, rows = i64(0), i64(1), na
    if n >= na * nb:
        n -= na * nb
        left, right, rows = i64(2), i64(3), nc
        if n >= nc * nd:
            n -= nc * nd
            left, right, rows = i64(0), i64(2), na
            if n >= na * nc:
                n -= na * nc
                left, right, rows = i64(1), i64(3), nb
                if n >= nb * nd:
                    n -= nb * nd
                    left, right, rows = i64(0), i64(3), na
                    if n >= na * nd:
                        n -= na * nd
                        left, right, rows = i64(1), i64(2), nb
    return left, right, rows, n


def tile_place(quartet, size):
    """Of quartets side by side, of `size` numbers each: where the first number of one is (device function)."""
    return (quartet >> 5) * (TILE * size) + (quartet & (TILE - 1))


def places_of(na, nb, nc, nd, nbytes):
    """Bytes in shared memory from the block ab to cd, ac, bd, ad and bc, `nbytes` a number (device function)."""
    cd = nbytes * na * nb
    ac = cd + nbytes * nc * nd
    bd = ac + nbytes * na * nc
    ad = bd + nbytes * nb * nd
    return cd, ac, bd, ad, ad + nbytes * na * nd


def size_of_blocks(functions, together):
    """Numbers of a quartet, a multiple of so many (device function)."""
    nrow, columns = functions.rows.size, functions.columns
    return (nrow * columns + together - 1) & -together if columns <= 8 else nrow * ((columns + 7) & -8)


def function_in_blocks(functions, n):
    """Of the n-th number of a quartet: ab, cd, and 0.0 where blocks are filled up, else 1.0 (device function)."""
    width, nrow = min(functions.columns, i64(8)), functions.rows.size
    line = quotient(n, width)
    block = quotient(line, nrow)
    row, column = i64(functions.rows[u64(line - block * nrow)]), (block - line) * width + n
    factor = 1.0 if column < functions.columns else 0.0
    return row, i64(functions.order[u64(min(column, functions.columns - 1))]), factor


def store_double(to, value, complete):
    """Writes a double; whether the sum is complete is for floats (device function)."""
    store_at(to, value)


def add_to_double(to, value, complete):
    """Adds to a double (device function)."""
    add_at(to, value)


def make_value_of(load):
    """Device function: Gamma of a density without weight, from places of its blocks after the shared address `here`."""

    def value_of(here, ab_at, cd_at, ac_at, bd_at, ad_at, bc_at, of_j, of_k):
        value = load(i32(here + ac_at)) * load(i32(here + bd_at))
        value = of_k * (value + load(i32(here + ad_at)) * load(i32(here + bc_at)))
        if of_j != 0:
            value += of_j * (load(i32(here + ab_at)) * load(i32(here + cd_at)))
        return value

    return jit_device(value_of)


def gamma_blocks(single):
    """Kernel factory: Gamma as blocks of cd, [quartet][block][ab][8 cd], or in tiles of quartets `side_by_side`.

    In blocks there are the functions `even`, and those that are `odd` for all quartets behind them, from the number
    `behind` on; all count as even where they are not apart. Several blocks are filled up by zeros. One has only what
    there is, and zeros up to whole 16 bytes, which are copied at once; if `single`, numbers are floats rounded to TF32.
    Side by side, which `single` ones are not, there are all ab and cd, and zeros for one quartet more; a tile is
    [cd][ab][32 quartets].
    """
    block_place, in_tile = jit_device(density_place), jit_device(tile_place)
    places, wait = jit_device(places_of), make_wait_copies(0)
    size_of, function_at = jit_device(size_of_blocks), jit_device(function_in_blocks)
    real, nbytes = (f32, 4) if single else (f64, 8)
    store, add = (store_tf32_at, add_tf32_at) if single else map(jit_device, (store_double, add_to_double))
    load = load_shared_float if single else load_shared
    copy, value_of = make_copy_number(nbytes), make_value_of(load)

    def kernel(
        quartets: ShellQuartets, group: i64, size: i64, bra: FunctionPairs, ket: FunctionPairs, densities: Densities,
        even: Functions, odd: Functions, behind: i64, out: F64, side_by_side: types.boolean,
    ):  # fmt: skip
        d, aos = cuda.shared.array(0, types.float64), cuda.shared.array((GROUP, 4), types.int32)
        weights = cuda.shared.array(GROUP, real)
        tid, first, nao = i64(cuda.threadIdx.x), i64(cuda.blockIdx.x) * group, densities.nao
        na, nb, nc, nd = bra.na, bra.nb, ket.na, ket.nb
        nab, ncd, count = na * nb, nc * nd, quartets.bra.size
        many = min(group, count + (i64(1) if side_by_side else i64(0)) - first)
        if tid < many:
            known = min(first + tid, count - 1)
            ab, kl = u64(quartets.bra[u64(known)]), u64(quartets.ket[u64(known)])
            a, b, c, e = bra.aos[ab, 0], bra.aos[ab, 1], ket.aos[kl, 0], ket.aos[kl, 1]
            own = u64(tid)
            aos[own, 0], aos[own, 1], aos[own, 2], aos[own, 3] = a, b, c, e
            weight = (1.0 if a == b else 2.0) * (1.0 if c == e else 2.0) if first + tid < count else 0.0
            weights[own] = real(weight)
        row_bytes = i32(nbytes * nao)
        d_at, aos_at, weights_at = i32(shared_address(d)), i32(shared_address(aos)), i32(shared_address(weights))
        of_cd, of_ac, of_bd, of_ad, of_bc = places(na, nb, nc, nd, nbytes)
        for s in range(densities.coulomb.size):
            cuda.syncthreads()
            j, half_k = densities.coulomb[s], -0.5 * densities.exchange[s]
            # the blocks ab and cd are for J only
            with_j, last = j != 0.0, nab + ncd + (na + nb) * (nc + nd)
            complete = i32(1 if s + 1 == densities.coulomb.size else 0)
            n = i64(0) if with_j else nab + ncd
            step = min(last - n, i64(THREADS))
            together = quotient(i64(THREADS), step)
            own = quotient(tid, step)
            n += tid - own * step
            while own < together and n < last:
                left, right, rows, place = block_place(n, na, nb, nc, nd)
                source = address_of(densities.numbers, i64(0)) + nbytes * (s * nao * nao + place)
                to, of_right = i32(d_at + nbytes * (own * size + n)), nbytes * rows
                left, right, end = i32(aos_at + 16 * own + 4 * left), 4 * i32(right - left), i32(aos_at + 16 * many)
                while left < end:
                    of_row = address_at(source, load_shared_int(left), row_bytes)
                    copy(to, address_at(of_row, load_shared_int(i32(left + right)), of_right))
                    left, to = i32(left + 16 * together), i32(to + nbytes * size * together)
                n += step
            commit_copies()
            wait()
            cuda.syncthreads()
            if not single and side_by_side:
                # a lane takes a quartet, a warp a range of functions (ab, d) with all c, which are mostly more than d
                tiles = max(i64(1), group >> 5)
                share = quotient(tid >> 5, tiles)
                quartet = tid - TILE * share * tiles
                n, last = (nab * nd * share * tiles) >> 2, (nab * nd * (share + 1) * tiles) >> 2
                row = quotient(n, nd)
                a, e = quotient(row, nb), n - row * nd
                b, here = row - a * nb, d_at + 8 * size * quartet
                ab_at, cd_at = i32(here + 8 * row), i32(here + of_cd + 8 * e)
                ac_at, bc_at = i32(here + of_ac + 8 * a * nc), i32(here + of_bc + 8 * b * nc)
                ad_at, bd_at = i32(here + of_ad + 8 * (a * nd + e)), i32(here + of_bd + 8 * (b * nd + e))
                weight, place = load_shared(i32(weights_at + 8 * quartet)), in_tile(first + quartet, nab * ncd)
                of_j, of_k, next_d = weight * j, weight * half_k, 8 * TILE * nab
                to, next_c = address_of(out, place + TILE * (e * nab + row)), next_d * nd
                e_left, b_left, turns = i32(nd - e), i32(nb - b), i32(last - n if quartet < many else 0)
                row_bc, all_bc, row_ad, all_bd = i32(8 * nc), i32(8 * nb * nc), i32(8 * nd), i32(8 * nb * nd)
                while turns > 0:
                    own_cd, own_ac, own_bc, of_c, end = cd_at, ac_at, bc_at, to, i32(ac_at + row_bc)
                    d_ab = of_j * load_shared(ab_at) if with_j else 0.0
                    d_ad, d_bd = of_k * load_shared(ad_at), of_k * load_shared(bd_at)
                    while own_ac < end:
                        value = d_bd * load_shared(own_ac) + d_ad * load_shared(own_bc)
                        if with_j:
                            value += d_ab * load_shared(own_cd)
                        if s == 0:
                            store_at(of_c, value)
                        else:
                            add_at(of_c, value)
                        own_cd, own_ac, own_bc = i32(own_cd + row_ad), i32(own_ac + 8), i32(own_bc + 8)
                        of_c += next_c
                    ad_at, bd_at, cd_at = i32(ad_at + 8), i32(bd_at + 8), i32(cd_at + 8)
                    to, turns, e_left = to + next_d, i32(turns - 1), i32(e_left - 1)
                    if e_left == 0:
                        # from (a, b) to (a, b + 1), or from there to (a + 1, 0)
                        e_left, b_left, ab_at, cd_at = i32(nd), i32(b_left - 1), i32(ab_at + 8), i32(cd_at - row_ad)
                        to, bc_at = to + 8 * TILE - next_c, i32(bc_at + row_bc)
                        if b_left > 0:
                            ad_at = i32(ad_at - row_ad)
                        else:
                            b_left, ac_at = i32(nb), i32(ac_at + row_bc)
                            bc_at, bd_at = i32(bc_at - all_bc), i32(bd_at - all_bd)
            else:
                blocks, more_blocks = size_of(even, 16 // nbytes), size_of(odd, 16 // nbytes)
                every = blocks + more_blocks
                step = min(every, i64(THREADS))
                together = quotient(i64(THREADS), step)
                own = quotient(tid, step)
                n, step_bytes, step_weights = tid - own * step, i32(nbytes * size * together), i32(nbytes * together)
                while own < together and n < every:
                    if n < blocks:
                        row, column, factor = function_at(even, n)
                        place, count_of = (first + own) * blocks + n, blocks
                    else:
                        row, column, factor = function_at(odd, n - blocks)
                        place, count_of = behind + (first + own) * more_blocks + n - blocks, more_blocks
                    a, c = quotient(row, nb), quotient(column, nd)
                    b, e, here = row - a * nb, column - c * nd, i32(d_at + nbytes * size * own)
                    of_j, of_k = real(factor * j), real(factor * half_k)
                    ab_at, cd_at = i32(nbytes * row), i32(of_cd + nbytes * column)
                    ac_at, bd_at = i32(of_ac + nbytes * (a * nc + c)), i32(of_bd + nbytes * (b * nd + e))
                    ad_at, bc_at = i32(of_ad + nbytes * (a * nd + e)), i32(of_bc + nbytes * (b * nc + c))
                    weight_at, end = i32(weights_at + nbytes * own), i32(weights_at + nbytes * many)
                    to, next_number = address_of(out, i64(0)) + nbytes * place, nbytes * together * count_of
                    # a loop for the first density, in which nothing is added
                    while s == 0 and weight_at < end:
                        value = value_of(here, ab_at, cd_at, ac_at, bd_at, ad_at, bc_at, of_j, of_k)
                        store(to, value * load(weight_at), complete)
                        here, to, weight_at = i32(here + step_bytes), to + next_number, i32(weight_at + step_weights)
                    while weight_at < end:
                        value = value_of(here, ab_at, cd_at, ac_at, bd_at, ad_at, bc_at, of_j, of_k)
                        add(to, value * load(weight_at), complete)
                        here, to, weight_at = i32(here + step_bytes), to + next_number, i32(weight_at + step_weights)
                    n += step

    return Kernel(kernel, (THREADS, 8))


def gamma_of_table(side_by_side):
    """Kernel factory: as `gamma_blocks`, from a table. A thread takes a number, or a quartet if `side_by_side`."""
    in_tile = jit_device(tile_place)

    def kernel(quartets: ShellQuartets, table: GammaTable, nab: i64, ncd: i64, order: I32, out: F64):
        n, count = i64(cuda.blockIdx.x) * THREADS + i64(cuda.threadIdx.x), quartets.bra.size
        width = i64(8) if ncd > 8 else ncd
        blocks = (quotient(ncd + width - 1, width) * nab * width + 1) & -2
        quartet = n if side_by_side else quotient(n, blocks)
        if quartet >= (count + 1 if side_by_side else count):
            return
        known = min(quartet, count - 1)
        ab, kl = i64(quartets.bra[known]) * nab, i64(quartets.ket[known]) * ncd
        first = table.first + ab * table.of_bra + kl * table.of_ket
        if side_by_side:
            here = in_tile(quartet, nab * ncd)
            for cd in range(ncd):
                for row in range(nab):
                    value = table.numbers[first + row * table.of_bra + cd * table.of_ket]
                    out[here + TILE * (cd * nab + row)] = value if quartet < count else 0.0
        else:
            place = n - quartet * blocks
            line = quotient(place, width)
            block = quotient(line, nab)
            row, cd = line - block * nab, (block - line) * width + place
            value = table.numbers[first + row * table.of_bra + i64(order[min(cd, ncd - 1)]) * table.of_ket]
            out[n] = value if cd < ncd else 0.0

    return Kernel(kernel, (THREADS, 8))


# launcher


def gamma_size(bra, ket, side_by_side, single=False):
    """Numbers of a shell quartet for `ListFacts` of both sides; floats if `single`."""
    if side_by_side:
        return bra.nab * ket.nab
    together = 4 if single else 2
    return bra.nab * 8 * blocks_of_8(ket.nab) if ket.nab > 8 else -(-bra.nab * ket.nab // together) * together


def gamma_numbers(count, sizes, side_by_side):
    """Where Gamma of so many quartets of each of some `sizes` begins, and where the last ends.

    Side by side they are in whole tiles, with one quartet more.
    """
    if side_by_side:
        return 0, sizes[0] * TILE * (count // TILE + 1)
    return *accumulate((-(-count * size // TILE) * TILE for size in sizes), initial=0),


def functions_of(context, bra, ket):
    """`Functions` of two `ListFacts`."""
    columns = context.table(whole_row_table, ket.h_class, blocks_of_8(ket.nab))
    return context.table(whole_rows, bra.h_class), columns, ket.nab


def gamma_place(bra, ket):
    """Numbers of the densities of a quartet in shared memory, for `ListFacts` of both sides."""
    # one more where it is even, so that quartets side by side are in different banks
    return bra.nab + ket.nab + (bra.na + bra.nb) * (ket.na + ket.nb) | 1


def gamma_fits(bra, ket, room):
    """Whether that of one quartet has room in shared memory of so many bytes, beside what all quartets have there."""
    return 8 * gamma_place(bra, ket) + 24 * GROUP <= room


def launch_gamma(context, side_by_side, quartets, aos, ab, cd, densities, out, facts=None, single=False):
    """Gamma of shell quartets of two lists into `out`; arguments as those of the kernel and of `launch_reverse`.

    facts : list of tuple of ListFacts, optional
        Those of bra and ket of the even and of the odd functions where they are apart.
    single : bool
        Whether numbers are floats rounded to TF32; not side by side.
    """
    bra, ket, count = ab.facts, cd.facts, quartets[0].size + side_by_side
    size, nbytes = gamma_place(bra, ket), 4 if single else 8
    group = max(1, min(GROUP, GROUP_BYTES // (nbytes * size)))
    if side_by_side:
        group = 1 << group.bit_length() - 1  # no block begins within a sector of another's
    even, *odd = facts or [(bra, ket)]
    one = functions_of(context, *even)
    behind = gamma_numbers(quartets[0].size, [gamma_size(*even, False, single)], False)[1]
    context.launch(
        Variant(gamma_blocks, (single,)), -(-count // group), THREADS, nbytes * size * group, quartets, group, size,
        (aos[0], ab.first, bra.na, bra.nb), (aos[1], cd.first, ket.na, ket.nb), densities, one,
        functions_of(context, *odd[0]) if odd else (*one[:2], 0), behind, out, side_by_side,
    )  # fmt: skip


def launch_gamma_of_table(context, side_by_side, quartets, ab, cd, table, out):
    """As `launch_gamma`, with the fields of a `GammaTable`."""
    bra, ket, count = ab.facts, cd.facts, quartets[0].size
    threads = count + 1 if side_by_side else count * gamma_size(bra, ket, False)
    context.launch(
        Variant(gamma_of_table, (side_by_side,)), -(-threads // THREADS), THREADS, 0, quartets, table, bra.nab, ket.nab,
        levels_of(context, ket, blocks_of_8(ket.nab), True)[1], out,
    )  # fmt: skip
