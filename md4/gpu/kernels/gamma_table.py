"""Tables from which gradients read Gamma instead of making it of densities, and the norms of their blocks.

The functions of the pairs of a list follow each other in a table. So where an element is follows from the numbers of
both pairs in their lists, and of both functions in their pairs.
"""

from typing import NamedTuple

from md4.gpu.compile import Kernel, Variant
from md4.gpu.device_code import F64, cuda, i64, types

THREADS = 128


class GammaTable(NamedTuple):
    """Gamma of two lists, with the factors f of `md4.gpu.kernels.reverse_sums`.

    Attributes
    ----------
    numbers : float64 array
        The element ab of bra pair i and cd of ket pair k is numbers[first + (i nab + ab) of_bra + (k ncd + cd) of_ket].
    first, of_bra, of_ket : int64
    """

    numbers: F64
    first: i64
    of_bra: i64
    of_ket: i64


class TableNorms(NamedTuple):
    """Norms of the blocks of a `GammaTable`, in place of `md4.gpu.kernels.select_kets.Norms`.

    Attributes
    ----------
    numbers : float64 array
        The norm of the block of bra pair i and ket pair k is numbers[first + i of_bra + k of_ket].
    first, of_bra, of_ket : int64
    tolerance : float64
    """

    numbers: F64
    first: i64
    of_bra: i64
    of_ket: i64
    tolerance: types.float64


def table_norms():
    """Kernel factory; a thread takes a block. `bras` and `kets` are the numbers of pairs, `nab` and `ncd` their sizes.

    The kets are in the rows of the table, a row has the bras.
    """

    def kernel(table: GammaTable, bras: i64, kets: i64, nab: i64, ncd: i64, norms: TableNorms):
        n = i64(cuda.blockIdx.x) * THREADS + i64(cuda.threadIdx.x)
        if n >= bras * kets:
            return
        kl = n // bras  # of 64-bit numbers
        ij = n - kl * bras
        first, total = table.first + ij * nab * table.of_bra + kl * ncd * table.of_ket, 0.0
        for cd in range(ncd):
            place = first + cd * table.of_ket
            for _ in range(nab):
                total += table.numbers[place] * table.numbers[place]
                place += table.of_bra
        norms.numbers[norms.first + ij * norms.of_bra + kl * norms.of_ket] = total**0.5

    return Kernel(kernel, (THREADS, 8))


# launcher


def launch_norms(context, table, ab, cd, norms):
    """Writes the norms of the blocks of two `md4.engine.PreparedPairs`; fields of `GammaTable` and `TableNorms`."""
    context.launch(
        Variant(table_norms, ()), -(-ab.npair * cd.npair // THREADS), THREADS, 0, table, ab.npair, cd.npair,
        ab.facts.nab, cd.facts.nab, norms,
    )  # fmt: skip
