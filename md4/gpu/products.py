"""Products of matrices as cuBLAS takes them: their operands, and the pieces of which a product is made."""

from typing import NamedTuple

from md4.gpu.pool import ITEM_BYTES

# Rows and columns of a result that a multiprocessor makes at a time in the products of cuBLAS.
TILE = 128
# Rows of a long result beyond whole tiles, up to which these are a product of their own: cuBLAS would take as long for
# them as for a whole tile, but the second product reads the long operand again. Least length in tiles.
FEW_ROWS, LONG = 32, 128


def whole_rows(shape):
    """Of a result of this shape, how many rows one product makes; those that are left are another one."""
    rows, columns = shape
    whole = rows // TILE * TILE
    return whole if whole and rows - whole <= FEW_ROWS and columns >= LONG * TILE else rows


class Operand(NamedTuple):
    """A matrix as cuBLAS takes it.

    Attributes
    ----------
    pointer : int
    turned : bool
        Columns are contiguous rather than rows.
    step : int
        Numbers from one row, or column, to the next; of no meaning where there is one only.
    """

    pointer: int
    turned: bool
    step: int


def operand(array):
    """The `Operand` of a matrix; ValueError where neither rows nor columns are contiguous."""
    (rows, columns), (down, right) = array.shape, array.strides
    if right == ITEM_BYTES or columns <= 1:  # an empty array has any strides
        return Operand(array.data.ptr, False, max(1, columns, down // ITEM_BYTES if rows > 1 else 0))
    if down != ITEM_BYTES and rows > 1:
        raise ValueError(f"a matrix of strides {array.strides} has neither contiguous rows nor contiguous columns.")
    return Operand(array.data.ptr, True, max(1, rows, right // ITEM_BYTES if columns > 1 else 0))
