"""Register tiles of the products on tensor cores, and what rows are padded to for them."""

from functools import cache
from math import prod
from typing import NamedTuple

# Blocks of 8 columns of a warp for 1, 2, ... fragments of 16 rows: as many as registers hold.
COLUMNS = (8, 8, 6, 4, 4, 3, 3, 2, 2, 2, 2)
# The same of a turned tile for 1, 2, ... blocks of 8 rows; even numbers.
TURNED_COLUMNS = (8, 8, 8, 8, 8, 6, 6, 4, 4, 4, 4)
TURNED_ROWS = 4  # blocks of 8 rows from which on step 4 is turned in any case: its staircase is finer
WARPS = 4  # of a block
STAGES = 3  # steps that the ring of copies has room for
MOST_ROWS = len(COLUMNS)  # fragments of 16 rows of a tile, and blocks of 8 rows of a turned one
MOST_COLUMNS = WARPS * max(*COLUMNS, *TURNED_COLUMNS)  # blocks of 8 columns of a block of threads


def blocks_of_8(n):
    """Number of 8-wide blocks that hold n."""
    return (n + 7) // 8


class Tile(NamedTuple):
    """A warp's register tile and the block around it: the first compile-time facts of kernels that have one.

    Attributes
    ----------
    rows8, nt : int
        Blocks of 8 rows and of 8 columns.
    warps : int
        Warps of a block, side by side along the columns.
    stages : int
        Buffers of the ring through which the operands come.
    unit : {'dmma16', 'dmma8', 'fma'}
        Arithmetic: m16n8k8 (compute capability 9.0+), m8n8k4 (8.0+), or plain multiply-adds.
    turned : bool
        Rows of the product are on the side of an instruction that is 8 wide, columns on that of 16.
    """

    rows8: int
    nt: int
    warps: int
    stages: int
    unit: str
    turned: bool = False

    @property
    def mt(self):
        """Fragments of 16 rows."""
        return self.rows8 // 2

    @property
    def threads(self):
        return 32 * self.warps

    @property
    def columns(self):
        """Column fragments of a block."""
        return self.nt * self.warps


def row_split(nrow):
    """(row blocks, row fragments of each) of a matrix of `nrow` rows."""
    fragments = (nrow + 15) // 16
    blocks = -(-fragments // MOST_ROWS)
    return blocks, -(-fragments // blocks)


def reach_levels(count):
    """Numbers of row blocks that a tile of `count` has code for, the largest first: all of few, fewer of many."""
    return [n for n in range(count, 0, -1) if count <= 6 or n >= count - 3 or n % 2 == 0]


def turned_split(nrow):
    """(row blocks, blocks of 8 rows of each) of a turned tile for `nrow` rows."""
    blocks = -(-blocks_of_8(nrow) // MOST_ROWS)
    return blocks, -(-blocks_of_8(nrow) // blocks)


def panel_rows(nrow, turned=False):
    """Blocks of 8 rows that a panel of `nrow` rows is padded to, one for turned tiles or for others."""
    return prod(turned_split(nrow)) if turned else 2 * prod(row_split(nrow))


@cache
def choose_tile(nrow, steps, unit, turned=False):
    """The tile for `nrow` rows and `steps` inner blocks of 8 a primitive."""
    _, rows = turned_split(nrow) if turned else row_split(nrow)
    rows8, columns = (rows, TURNED_COLUMNS) if turned else (2 * rows, COLUMNS)
    return Tile(rows8, columns[rows - 1], WARPS, min(STAGES, steps + 1), unit, turned)


def turned_is_better(nrow):
    """Whether the tile of step 4 is turned: not where it has few rows and would not save 8 of padding."""
    return blocks_of_8(nrow) >= TURNED_ROWS or turned_split(nrow)[1] % 2 > 0
