"""How the fused kernel writes its results.

The lanes of a warp put the integrals of a tile in order in shared memory and meet. Then successive lanes write
successive integrals.
"""

from md4.gpu.device_code import cuda, i32, i64, jit_device
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.stores import make_stage_tile, make_write_out, make_write_words
from md4.gpu.tuning import FUSED

# Words of the table of a part that a lane goes through at a time.
PART_ROUNDS = 4


def make_write(mt, nc, kets, matrix, part=False):
    """Device function that writes quartets, or adds them to what is there if `added`.

    The memory at `address`, which it uses, is free when the warp has met once more.

    Parameters
    ----------
    mt, nc : int
        Fragments of 16 rows of a tile, and blocks of 8 columns of a quartet.
    kets : int
        Quartets side by side in a tile, the first `count` of which are written.
    matrix : bool
        The result is a part of a matrix. If not, the integrals of a quartet are contiguous.
    part : bool
        The integrals are a part of a class, written by the table of a `md4.gpu.kernels.groups.PartResult`.
    """
    maker = make_write_part if part else make_write_rows if matrix else make_write_quartets
    return maker(make_stage_tile(2 * mt, nc, kets))


def make_write_quartets(stage):
    """`make_write` where the integrals of a quartet are contiguous."""
    rounds = FUSED.write_rounds
    write_out, add_out = make_write_out(rounds, 32), make_write_out(rounds, 32, add=True)

    def write_quartets(tile, address, count, rows, right, nab, out, first, lane, added):
        row_bytes, column_bytes, size = i32(8 * out.s_ab), i32(8 * out.s_cd), nab * right.ncd
        stage(tile, address, rows, lane >> 2, row_bytes, right.rows, 2 * (lane & 3), column_bytes, i32(8 * size))
        cuda.syncwarp()
        # quartets that follow each other are written as one
        joined = out.s_kl == size
        run, runs = (i32(size * count), i32(1)) if joined else (i32(size), i32(count))
        while runs > 0:
            n = i32(lane)
            while n < run:
                if added:
                    add_out(out.numbers, first + n, i32(address + 8 * n), i64(run - n))
                else:
                    write_out(out.numbers, first + n, i32(address + 8 * n), i64(run - n))
                n = i32(n + 32 * rounds)
            runs, address, first = i32(runs - 1), i32(address + 8 * size), first + out.s_kl

    return jit_device(write_quartets)


def make_write_rows(stage):
    """`make_write` where the integrals of a quartet are a part of a matrix, contiguous within rows."""
    write_one, add_one = make_write_out(1, 32), make_write_out(1, 32, add=True)

    def write_rows(tile, address, count, rows, right, nab, out, first, lane, added):
        # (ij, ab) are columns, or (kl, cd)
        turned, size = out.s_ab == 1, nab * right.ncd
        run, step = (nab, out.s_cd) if turned else (right.ncd, out.s_ab)
        row_bytes, column_bytes = (i32(8), i32(8 * nab)) if turned else (i32(8 * right.ncd), i32(8))
        stage(tile, address, rows, lane >> 2, row_bytes, right.rows, 2 * (lane & 3), column_bytes, i32(8 * size))
        cuda.syncwarp()
        left = i32(count)
        while left > 0:
            n = lane
            while n < size:
                row = quotient(n, run)
                place = first + row * step + n - row * run
                if added:
                    add_one(out.numbers, place, i32(address + 8 * n), size - n)
                else:
                    write_one(out.numbers, place, i32(address + 8 * n), size - n)
                n += 32
            left, address, first = i32(left - 1), i32(address + 8 * size), first + out.s_kl

    return jit_device(write_rows)


def make_write_part(stage):
    """`make_write` where the integrals are a part of a class: with zeros for the functions of the other parity."""
    write_words, add_words = (make_write_words(PART_ROUNDS, 32, add) for add in (False, True))

    def write_part(tile, address, count, rows, right, nab, out, first, lane, added):
        turned, size = out.s_ab == 1, nab * right.ncd
        row_bytes, column_bytes = (i32(8), i32(8 * nab)) if turned else (i32(8 * right.ncd), i32(8))
        stage(tile, address, rows, lane >> 2, row_bytes, right.rows, 2 * (lane & 3), column_bytes, i32(8 * size))
        cuda.syncwarp()
        left = i32(count)
        while left > 0:
            n = lane
            while n < out.table.size:
                if added:
                    add_words(out.numbers, first, out.table, n, i32(address))
                else:
                    write_words(out.numbers, first, out.table, n, i32(address))
                n += 32 * PART_ROUNDS
            left, address, first = i32(left - 1), i32(address + 8 * size), first + out.s_kl

    return jit_device(write_part)
