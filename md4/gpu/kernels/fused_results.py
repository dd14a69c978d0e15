"""How the fused kernels write their results: `md4.gpu.kernels.fused`, `fused_groups` and `fused_wide`.

The threads that have made a tile put its integrals in order in shared memory and meet. Then successive threads write
successive integrals.
"""

from md4.gpu.device_code import cuda, i32, i64, jit_device
from md4.gpu.emit.scalars import quotient
from md4.gpu.emit.stores import make_stage_tile, make_write_out
from md4.gpu.tuning import FUSED


def meet_in_warp(team):
    """The threads of a warp wait for each other (device function)."""
    cuda.syncwarp()


def make_write(mt, nc, kets, matrix, threads=32, meet=None, number=i32):
    """Device function that writes quartets, or adds them to what is there if `added`.

    The memory at `address`, which it uses, is free when all threads have met once more.

    Parameters
    ----------
    mt, nc : int
        Fragments of 16 rows of each thread's tile, and blocks of 8 columns of a quartet.
    kets : int
        Quartets side by side in a tile, the first `count` of which are written. 0 if there is one always.
    matrix : bool
        The result is a part of a matrix. If not, the integrals of a quartet are contiguous.
    threads : int
        Threads that share the quartets, a warp or a team of warps.
    meet : device function, optional
        (team): these threads wait for each other. There is no need of one for a warp.
    number : Numba type
        Of addresses in shared memory and of what is counted.
    """
    maker = make_write_rows if matrix else make_write_quartets
    return maker(mt, nc, kets, threads, meet or jit_device(meet_in_warp), number)


def make_write_quartets(mt, nc, kets, threads, meet, number):
    """`make_write` where the integrals of a quartet are contiguous."""
    stage, rounds = make_stage_tile(2 * mt, nc, max(1, kets)), FUSED.write_rounds
    write_out, add_out = make_write_out(rounds, threads), make_write_out(rounds, threads, add=True)

    def write_quartet(tile, address, count, rows, first_row, right, nab, out, first, team, thread, added):
        row_bytes, column_bytes, size = i32(8 * out.s_ab), i32(8 * out.s_cd), nab * right.ncd
        stage(tile, i32(address), rows, first_row, row_bytes, right.rows, 2 * (thread & 3), column_bytes, i32(0))
        meet(team)
        n, count = number(thread), number(size)
        while n < count:
            if added:
                add_out(out.numbers, first + n, i32(address + 8 * n), i64(count - n))
            else:
                write_out(out.numbers, first + n, i32(address + 8 * n), i64(count - n))
            n = number(n + threads * rounds)

    def write_quartets(tile, address, count, rows, first_row, right, nab, out, first, team, thread, added):
        row_bytes, column_bytes, size = i32(8 * out.s_ab), i32(8 * out.s_cd), nab * right.ncd
        stage(tile, address, rows, first_row, row_bytes, right.rows, 2 * (thread & 3), column_bytes, i32(8 * size))
        meet(team)
        # quartets that follow each other are written as one
        joined = out.s_kl == size
        run, runs = (number(size * count), i32(1)) if joined else (number(size), i32(count))
        while runs > 0:
            n = number(thread)
            while n < run:
                if added:
                    add_out(out.numbers, first + n, i32(address + 8 * n), i64(run - n))
                else:
                    write_out(out.numbers, first + n, i32(address + 8 * n), i64(run - n))
                n = number(n + threads * rounds)
            runs, address, first = i32(runs - 1), number(address + 8 * size), first + out.s_kl

    return jit_device(write_quartets if kets else write_quartet)


def make_write_rows(mt, nc, kets, threads, meet, number):
    """`make_write` where the integrals of a quartet are a part of a matrix, contiguous within rows."""
    stage = make_stage_tile(2 * mt, nc, max(1, kets))
    write_one, add_one = make_write_out(1, threads), make_write_out(1, threads, add=True)

    def write_rows(tile, address, count, rows, first_row, right, nab, out, first, team, thread, added):
        # (ij, ab) are columns, or (kl, cd)
        turned, size = out.s_ab == 1, nab * right.ncd
        run, step = (nab, out.s_cd) if turned else (right.ncd, out.s_ab)
        row_bytes, column_bytes = (i32(8), i32(8 * nab)) if turned else (i32(8 * right.ncd), i32(8))
        columns, column, next_tile = right.rows, 2 * (thread & 3), i32(8 * size if kets else 0)
        stage(tile, i32(address), rows, first_row, row_bytes, columns, column, column_bytes, next_tile)
        meet(team)
        left = i32(count if kets else 1)
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
            left, address, first = i32(left - 1), number(address + 8 * size), first + out.s_kl

    return jit_device(write_rows)
