"""Both products of a warp that makes whole quartets: `md4.gpu.kernels.fused`, `fused_groups` and `fused_wide`.

Intrinsics on the tiles of `md4.gpu.emit.tile_products`. In a chain, left[ab, q] is the left operand of the second
product as it comes out of the first one, and H[cd, q] comes straight from memory. The exact ones are for warps that
have some of the rows only.
"""

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from md4.gpu.emit.instructions import (
    DOUBLE,
    I32,
    aggregate,
    call_asm,
    doubles_if,
    element_address,
    fields,
    global_pair,
    load_block,
    mma_16x8x8,
    mma_by_halves,
)
from md4.gpu.emit.tile_products import by_number, gathered, merge


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
    tile = types.UniTuple(types.float64, 4 * mt * nq)

    state = [I32(n) for j in range(nq) for n in (128 * j, 0)]

    def products(builder, panel, words, r, steps, depth):
        c, depth = [ir.Constant(DOUBLE, 0.0)] * tile.count, [count for count in depth if count]
        found, after = [], builder.append_basic_block()
        coming = gathered(builder, r, words, state) if depth else []
        for k, count in enumerate(depth):
            b, last, offset = coming, k + 1 == len(depth), 1024 * rows * k
            halves = [offset + 1024 * len(depths) * (n // 2) + 512 * (n % 2) for n in range(2 * count)]
            left = [x for half in halves for x in load_block(builder, panel, half)]
            if not last:
                coming = gathered(builder, r, builder.add(words, I32(128 * nq8 * (k + 1))), state)
            for i in range(count):
                a = left[4 * i : 4 * i + 4]
                for j in range(nq):
                    n = 4 * (i * nq + j)
                    c[n : n + 4] = mma_16x8x8(builder, c[n : n + 4], a, b[2 * j : 2 * j + 2])
            if not last:
                found.append((list(c), builder.block))
                further = builder.append_basic_block()
                builder.cbranch(builder.icmp_signed(">", steps, I32(k + 1)), further, after)
                builder.position_at_end(further)
        found.append((c, builder.block))
        builder.branch(after)
        builder.position_at_end(after)
        return merge(builder, found)

    @intrinsic
    def exact_products(typingctx, panel, words, r, share, steps):
        def codegen(context, builder, signature, args):
            panel, words, r, share, steps = args
            c = by_number(builder, share, depths, lambda depth: products(builder, panel, words, r, steps, depth))
            return aggregate(builder, context.get_value_type(tile), c)

        return tile(*[types.int32] * 5), codegen

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
    tile, left = (types.UniTuple(types.float64, 4 * mt * n) for n in (nc, nq))

    def products(builder, c, left, base, positive, reach, count):
        c = list(c)
        for j in range(nq):
            b = [global_pair(builder, base, 512 * (nc * j + n)) for n in range(reach[j])]
            for i in range(count):
                here = 4 * (i * nq + j)
                operand = as_left_operand(builder, left[here : here + 4], positive)
                for n in range(reach[j]):
                    k = 4 * (nc * i + n)
                    c[k : k + 4] = mma_16x8x8(builder, c[k : k + 4], operand, b[n])
        return c

    @intrinsic
    def exact_chain(typingctx, acc, operand, array, first, positive, number):
        def codegen(context, builder, signature, args):
            c, left = (fields(builder, arg, 4 * mt * n) for arg, n in zip(args, (nc, nq)))
            base = element_address(context, builder, signature.args[2], args[2], args[3])
            cases = [(reach, count) for reach in passes for count in rows]
            c = by_number(builder, args[5], cases, lambda case: products(builder, c, left, base, args[4], *case))
            return aggregate(builder, context.get_value_type(tile), c)

        return tile(tile, left, array, types.int64, types.int64, types.int32), codegen

    return exact_chain


def as_left_operand(builder, c, positive):
    """c0, c2, c1, c3, where the compiler does not see that they change places, as `positive` might be 0.

    A left operand wants them in successive registers; if it knew, the compiler would make a copy for every instruction.
    """
    text = "{ .reg .pred p; setp.gt.s64 p, $3, 0; selp.f64 $0, $1, $2, p; }"
    pairs = (c[0], c[3]), (c[2], c[1]), (c[1], c[2]), (c[3], c[0])
    return [call_asm(builder, DOUBLE, [*pair, positive], text, "=d,d,d,l") for pair in pairs]
