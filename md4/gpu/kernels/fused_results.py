"""How the fused kernels write their results: `md4.gpu.kernels.fused` and `fused_wide`.

The threads that have made a tile put its integrals in order in shared memory and meet. Then successive threads write
successive integrals.
"""

from md4.gpu.device_code import cuda, i32, i64, jit_device
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.stores import make_stage_tile, make_write_out

WRITE_ROUNDS = 10  # doubles that a lane writes at a time


def meet_in_warp(team):
    """The threads of a warp wait for each other (device function)."""
    cuda.syncwarp()


def make_write(mt, nc, kets, matrix, threads=32, meet=None):
    """Device function that writes quartets, or adds them to what is there if `added`.

    The memory at `address`, which it uses, is free when all threads have met once more.

    Parameters
    ----------
    mt, nc : int
        Fragments of 16 rows of a tile, and blocks of 8 columns of a quartet.
    kets : int
        Quartets side by side in a tile, the first `count` of which are written.
    matrix : bool
        The result is a part of a matrix. If not, the integrals of a quartet are contiguous.
    threads : int
        Threads that share the quartets, a warp or a team of warps.
    meet : device function, optional
        (team): these threads wait for each other. There is no need of one for a warp.
    """
    maker = make_write_rows if matrix else make_write_quartets
    return maker(make_stage_tile(2 * mt, nc, kets), threads, meet or jit_device(meet_in_warp))


def make_write_quartets(stage, threads, meet):
    """`make_write` where the integrals of a quartet are contiguous."""
    rounds = WRITE_ROUNDS
    write_out, add_out = make_write_out(rounds, threads), make_write_out(rounds, threads, add=True)

    def write_quartets(tile, address, count, rows, first_row, right, nab, out, first, team, thread, added):
        row_bytes, column_bytes, size = i32(8 * out.s_ab), i32(8 * out.s_cd), nab * right.ncd
        stage(tile, address, rows, first_row, row_bytes, right.rows, 2 * (thread & 3), column_bytes, i32(8 * size))
        meet(team)
        # quartets that follow each other are written as one
        joined = out.s_kl == size
        run, runs = (i32(size * count), i32(1)) if joined else (i32(size), i32(count))
        while runs > 0:
            n = i32(thread)
            while n < run:
                if added:
                    add_out(out.numbers, first + n, i32(address + 8 * n), i64(run - n))
                else:
                    write_out(out.numbers, first + n, i32(address + 8 * n), i64(run - n))
                n = i32(n + threads * rounds)
            runs, address, first = i32(runs - 1), i32(address + 8 * size), first + out.s_kl

    return jit_device(write_quartets)


def make_write_rows(stage, threads, meet):
    """`make_write` where the integrals of a quartet are a part of a matrix, contiguous within rows."""
    write_one, add_one = make_write_out(1, threads), make_write_out(1, threads, add=True)

    def write_rows(tile, address, count, rows, first_row, right, nab, out, first, team, thread, added):
        # (ij, ab) are columns, or (kl, cd)
        turned, size = out.s_ab == 1, nab * right.ncd
        run, step = (nab, out.s_cd) if turned else (right.ncd, out.s_ab)
        row_bytes, column_bytes = (i32(8), i32(8 * nab)) if turned else (i32(8 * right.ncd), i32(8))
        stage(tile, address, rows, first_row, row_bytes, right.rows, 2 * (thread & 3), column_bytes, i32(8 * size))
        meet(team)
        left = i32(count)
        while left > 0:
            n = thread
            while n < size:
                row = quotient(n, run)
                place = first + row * step + n - row * run
                if added:
                    add_one(out.numbers, place, i32(address + 8 * n), size - n)
                else:
                    write_one(out.numbers, place, i32(address + 8 * n), size - n)
                n += threads
            left, address, first = i32(left - 1), i32(address + 8 * size), first + out.s_kl

    return jit_device(write_rows)
