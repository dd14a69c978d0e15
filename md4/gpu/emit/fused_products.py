"""Both products of a warp that makes whole quartets: `md4.gpu.kernels.fused`.

Words on the tiles of `md4.gpu.emit.tile_products`. In a chain, left[ab, q] is the left operand of the second
product as it comes out of the first one, and H[cd, q] comes straight from memory.
"""

from functools import cache

from md4.gpu.emit.instructions import chosen, load_if, mma_16x8x8, mma_by_halves
from md4.gpu.emit.values import FP64, OPEN, i64, tuple_of, word


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


def as_left_operand(c, positive):
    """c0, c2, c1, c3, where the compiler does not see that they change places, as `positive` might be 0.

    A left operand wants them in successive registers; if it knew, the compiler would make a copy for every instruction.
    """
    return [chosen(c[n], c[3 - n], positive) for n in (0, 2, 1, 3)]
