"""Both products of a warp that makes whole quartets: `md4.gpu.kernels.fused`.

Intrinsics on the tiles of `md4.gpu.emit.tile_products`. In a chain, left[ab, q] is the left operand of the second
product as it comes out of the first one, and H[cd, q] comes straight from memory.
"""

from functools import cache

from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.instructions import (
    DOUBLE,
    aggregate,
    call_asm,
    doubles_if,
    element_address,
    fields,
    mma_16x8x8,
    mma_by_halves,
)


@cache
def make_right_blocks(nc, reach):
    """Intrinsic (array, first, count) -> the lane's doubles of all blocks of B that `make_chain` multiplies."""
    operand = types.UniTuple(types.float64, 2 * sum(reach))

    @intrinsic
    def right_blocks(typingctx, array, first, count):
        def codegen(context, builder, signature, args):
            base = element_address(context, builder, signature.args[0], *args[:2])
            pairs = [b for j in range(len(reach)) for b in right_fragment(builder, base, args[2], j, nc, reach)]
            return aggregate(builder, context.get_value_type(operand), [x for pair in pairs for x in pair])

        return operand(array, types.int64, types.int64), codegen

    return right_blocks


def right_fragment(builder, base, count, j, nc, reach):
    """The lane's doubles of the column blocks that are not zero of fragment j of B, zeros from fragment `count` on."""
    return [doubles_if(builder, base, (count, j), 2, 512 * (nc * j + n)) for n in range(reach[j])]


@cache
def make_chain(mt, nq, nc, wide, reach, tiles=1, fetched=False):
    """Intrinsic (tile, left, array, first, count) -> tile + left B: a finished tile as left operand.

    `left` holds `nq` column fragments of 8 inner indices each, B's fragment j of 8 inner indices and `nc` column blocks
    lies in array[first + 64 nc j:], [column][k] blocks; `first` holds the lane's offset 2 lane. Fragments
    from `count` on count as zero; of fragment j the first reach[j] column blocks are not zero.

    `tiles`: so many such products, side by side in `tile` and in `left`; fragments of B follow each other, `nq` of each
    product. `fetched`: what `make_right_blocks` has found is in the place of `array`.
    """
    tile, left = (types.UniTuple(types.float64, 4 * mt * n * tiles) for n in (nc, nq))
    mma, starts = mma_16x8x8 if wide else mma_by_halves, [2 * sum(reach[:j]) for j in range(tiles * nq + 1)]
    source = types.UniTuple(types.float64, starts[-1]) if fetched else None

    @intrinsic
    def chain(typingctx, acc, operand, array, first, count):
        def codegen(context, builder, signature, args):
            c, left = (fields(builder, arg, 4 * mt * n * tiles) for arg, n in zip(args, (nc, nq)))
            if fetched:
                found = fields(builder, args[2], starts[-1])
            else:
                base = element_address(context, builder, signature.args[2], args[2], args[3])
            for j in range(tiles * nq):
                if fetched:
                    b = list(zip(*(found[starts[j] + n : starts[j + 1] : 2] for n in range(2))))
                else:
                    b = right_fragment(builder, base, args[4], j, nc, reach)
                for i in range(mt):
                    here = 4 * (i * nq * tiles + j)
                    operand = as_left_operand(builder, left[here : here + 4], args[4])
                    for n in range(reach[j]):
                        k = 4 * (nc * (i * tiles + j // nq) + n)
                        c[k : k + 4] = mma(builder, c[k : k + 4], operand, b[n])
            return aggregate(builder, context.get_value_type(tile), c)

        return tile(tile, left, source or array, types.int64, types.int64), codegen

    return chain


def as_left_operand(builder, c, positive):
    """c0, c2, c1, c3, where the compiler does not see that they change places, as `positive` might be 0.

    A left operand wants them in successive registers; if it knew, the compiler would make a copy for every instruction.
    """
    text = "{ .reg .pred p; setp.gt.s64 p, $3, 0; selp.f64 $0, $1, $2, p; }"
    pairs = (c[0], c[3]), (c[2], c[1]), (c[1], c[2]), (c[3], c[0])
    return [call_asm(builder, DOUBLE, [*pair, positive], text, "=d,d,d,l") for pair in pairs]
