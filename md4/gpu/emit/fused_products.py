"""Both products of a warp that makes whole quartets: `md4.gpu.kernels.fused` and `fused_wide`.

Words on the tiles of `md4.gpu.emit.tile_products`. In a chain, left[ab, q] is the left operand of the second
product as it comes out of the first one, and H[cd, q] comes straight from memory. The exact ones are for warps that
have some of the rows only.
"""

from functools import cache

from md4.gpu.emit.instructions import chosen, load, load_if, mma_16x8x8, mma_by_halves, shared_vector
from md4.gpu.emit.tile_products import by_number, gathered
from md4.gpu.emit.values import FP64, OPEN, first_case, i32, i64, tuple_of, word


@cache
def make_right_blocks(nc, reach):
    """Intrinsic (array, first, count) -> the lane's doubles of all blocks of B that `make_chain` multiplies."""

    @word(tuple_of(FP64, 2 * sum(reach)), OPEN, i64, i64)
    def right_blocks(array, first, count):
        base = array.at(first)
        pairs = [b for j in range(len(reach)) for b in right_fragment(base, count, j, nc, reach)]
        return [x for pair in pairs for x in pair]

    return right_blocks


def right_fragment(base, count, j, nc, reach):
    """The lane's doubles of the column blocks that are not zero of fragment j of B, zeros from fragment `count` on."""
    return [load_if(base, (count, j), count=2, offset=512 * (nc * j + n)) for n in range(reach[j])]


@cache
def make_chain(mt, nq, nc, wide, reach, tiles=1, fetched=False):
    """Intrinsic (tile, left, array, first, count) -> tile + left B: a finished tile as left operand.

    `left` holds `nq` column fragments of 8 inner indices each, B's fragment j of 8 inner indices and `nc` column blocks
    lies in array[first + 64 nc j:], [column][k] blocks; `first` holds the lane's offset 2 lane. Fragments
    from `count` on count as zero; of fragment j the first reach[j] column blocks are not zero.

    `tiles`: so many such products, side by side in `tile` and in `left`; fragments of B follow each other, `nq` of each
    product. `fetched`: what `make_right_blocks` has found is in the place of `array`.
    """
    tile, left = (tuple_of(FP64, 4 * mt * n * tiles) for n in (nc, nq))
    mma, starts = mma_16x8x8 if wide else mma_by_halves, [2 * sum(reach[:j]) for j in range(tiles * nq + 1)]
    source = tuple_of(FP64, starts[-1]) if fetched else OPEN

    @word(tile, tile, left, source, i64, i64)
    def chain(c, left, right, first, count):
        base = None if fetched else right.at(first)
        for j in range(tiles * nq):
            if fetched:
                b = list(zip(*(right[starts[j] + n : starts[j + 1] : 2] for n in range(2))))
            else:
                b = right_fragment(base, count, j, nc, reach)
            for i in range(mt):
                here = 4 * (i * nq * tiles + j)
                operand = as_left_operand(left[here : here + 4], count)
                for n in range(reach[j]):
                    k = 4 * (nc * (i * tiles + j // nq) + n)
                    c[k : k + 4] = mma(c[k : k + 4], operand, b[n])
        return c

    return chain


# both products of a warp that has some of the rows only (`md4.gpu.kernels.fused_wide`)


@cache
def make_exact_products(mt, nq, nq8, rows, depths):
    """Intrinsic (panel, words, r, share, steps) -> `mt` x `nq` fragments, a product's sum of all steps, [p|q] gathered.

    As `make_staircase_products`, in code without loops for each share of the rows. Addresses of the lane's place in
    shared memory: of the first fragment of the share in a panel of `rows` fragments, of the first word, which has those
    of `nq8` blocks of q beside it, and of r. [p|q] is gathered one step ahead. `steps` is the number of steps, which
    the compiler does not know: a branch after each step keeps it from fetching more ahead than registers hold.

    Parameters
    ----------
    mt, nq, nq8, rows : int
    depths : tuple of tuples of int
        Of each share, how many of its fragments count in each step. They are len(depths) apart in the panel.
    """
    state = [n for j in range(nq) for n in (128 * j, 0)]

    @word(tuple_of(FP64, 4 * mt * nq), *[i32] * 5)
    def exact_products(panel, words, r, share, steps):
        def fragment(step, i):
            place = 1024 * (rows * step + len(depths) * i)
            return [x for half in range(2) for x in shared_vector(panel, place + 512 * half)]

        def from_step(k, c, b, counts):
            left, last = [fragment(k, i) for i in range(counts[k])], k + 1 == len(counts)
            coming = [] if last else gathered(r, words + 128 * nq8 * (k + 1), state)
            for n, i, j in ((4 * (i * nq + j), i, j) for i in range(counts[k]) for j in range(nq)):
                c[n : n + 4] = mma_16x8x8(c[n : n + 4], left[i], b[2 * j : 2 * j + 2])
            if last:
                return c
            further = (lambda: steps > k + 1), lambda: from_step(k + 1, list(c), coming, counts)
            return first_case(steps.builder, [further, (None, lambda: c)])

        def products(depth):
            counts, c = [count for count in depth if count], [0.0] * (4 * mt * nq)
            return from_step(0, c, gathered(r, words, state), counts) if counts else c

        return by_number(share, depths, products)

    return exact_products


@cache
def make_exact_chain(mt, nq, nc, passes, rows):
    """Intrinsic (tile, left, array, first, positive, number) -> tile + left B, as `make_chain`, without idle products.

    Code of its own for each pass over B and each share of the rows: `number` is len(rows) times that of the pass, plus
    that of the share. `positive` is any positive number that the compiler does not know.

    Parameters
    ----------
    mt, nq, nc : int
        Fragments of rows, of `left` and of `tile`.
    passes : tuple of tuples of int
        Of each pass, how many column blocks of each of the `nq` fragments of B are not zero.
    rows : tuple of int
        Of each share, how many fragments it has; the others of `left` do not count.
    """
    tile, left = (tuple_of(FP64, 4 * mt * n) for n in (nc, nq))

    @word(tile, tile, left, OPEN, i64, i64, i32)
    def exact_chain(tile, left, right, first, positive, number):
        base = right.at(first)

        def products(case):
            (reach, count), c = case, list(tile)
            for j in range(nq):
                places = [512 * (nc * j + n) for n in range(reach[j])]
                b = [load("global.nc", base, place, count=2, effects=False) for place in places]
                for i in range(count):
                    here = 4 * (i * nq + j)
                    operand = as_left_operand(left[here : here + 4], positive)
                    for n in range(reach[j]):
                        k = 4 * (nc * i + n)
                        c[k : k + 4] = mma_16x8x8(c[k : k + 4], operand, b[n])
            return c

        return by_number(number, [(reach, count) for reach in passes for count in rows], products)

    return exact_chain


def as_left_operand(c, positive):
    """c0, c2, c1, c3, where the compiler does not see that they change places, as `positive` might be 0.

    A left operand wants them in successive registers; if it knew, the compiler would make a copy for every instruction.
    """
    return [chosen(c[n], c[3 - n], positive) for n in (0, 2, 1, 3)]
