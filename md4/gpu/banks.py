"""The order of r in memory where kernels gather [p|q] from it, so that few lanes read from one bank at the same time.

Shared memory has 16 banks of 8 bytes. When a warp gathers [p|q] = r[p+q], 16 lanes read at the same time, and those
that read different numbers of one bank are served one after the other. With r in the order of its ordinals that takes
1.0 to 2.1 accesses, as the mean over all p and q, with the order of this module 1.0 to 1.5. It is a permutation of the
ordinals: r takes no more room.

For parts of classes (`md4.method.mirror`) r is without the r[t] of odd t on the mirror axis, which are zero. Kernels
make it with this axis as axis 0, and the other two in their order behind it. So it has one order for all three axes,
which suits the gathers of axis 0 best.

`bench/banks.py` has found the tables by simulated annealing.
"""

from functools import cache

import numpy as np

from md4.gpu.tuning import RECURRENCE
from md4.method.angular import hermite_ordinal, hermite_triples, nherm
from md4.method.mirror import part_functions

BANKS = 16
# Lowest and highest L of the table.
SMALLEST, LARGEST = 2, 13


def in_banks(l):
    """Whether r up to L = `l` has an order of its own."""
    return SMALLEST <= l <= min(LARGEST, RECURRENCE.banks_l)


@cache
def places_of(l, banks, even=False):
    """Place of each r[t] up to L = `l`, shape (nherm(l),), int64.

    Parameters
    ----------
    l : int
    banks : bool
        In the order of the table, if it has one, else of ordinals.
    even : bool
        Without the r[t] of odd t_0, always in the order of its table, if it has one. The place of those that are left
        out is 0: who reads them multiplies them by zero.
    """
    if even:
        places, kept = np.zeros(nherm(l), dtype=np.int64), part_functions(l, 0, 0)
        places[kept] = places_in(EVEN_TABLE[l]) if l in EVEN_TABLE else np.arange(len(kept))
        return places
    return places_in(TABLE[l]) if banks and in_banks(l) else np.arange(nherm(l))


def places_in(banks):
    """Places of numbers of which each is in a given bank, a hexadecimal digit for each, int64."""
    chosen = np.array([int(bank, BANKS) for bank in banks])
    before = (chosen == chosen[:, None]) & np.tri(len(chosen), k=-1, dtype=bool)
    return chosen + BANKS * before.sum(axis=1)


@cache
def r_places(l, axis=None):
    """`places_of` for kernels that gather [p|q], shape (nherm(l),); `axis`: the mirror axis of two parts of classes."""
    if axis is None or l > RECURRENCE.axis_l:
        return places_of(l, True)
    others = [other for other in range(3) if other != axis]
    return places_of(l, True, True)[hermite_ordinal(*hermite_triples(l)[:, [axis, *others]].T)]


# The bank of each r[t] in the order of ordinals, a hexadecimal digit each, by L.
TABLE = {
    2: "9208674315",
    3: "57938da1402c0ef12b63",
    4: "8f0652e43dc3b7925a8c297d140f6ae1b01",
    5: "7d2b1e8c6569543030a2e0ad7216ce49b50384c518b9f7fa43d16f27",
    6: "6d5b10c24f08a1e73a5624d3f29d6b12b43a9e634c7be8520d70af86730c8b05179a8cf134e19ec529df",
    7: (
        "c0e2f45136436bc1872f9012ab9e044ad361ec85a5d6e82fc9b58e725a6b827d0f73cf9adb148109caf32f3e0749d3e367501b24c75a"
        "60d74d6b1895"
    ),
    8: (
        "ae9c2b5184f71d062f690864ca39eb3a1f46cb941032b871d50dc73ab4de9375fa8ed5c24f6a925698478308ea21c703846761a9ec30"
        "e8dfdeb12c5dec1f27b415df029be75da0f82b35425c167930f6a3b04"
    ),
    9: (
        "675d194083b3abfeeca6582c4012761025cc493e69f5da5dfeb78e01f62baead1c8714cc491264fa36b7e49d5067144583f3b906e083"
        "ba7dd95cd0fe98c7b68e3a2c0bf7902d72adf5c945fec269e238145381fb2daf15094c2d857961a6e4a3883721b0f30b14387dba7692"
        "ba50"
    ),
    10: (
        "ef2d1bca5986509863b0d734ad23178e75cf052e90bc1ef456fda62d5b4167f48b376a9ca90b84380beab7c8e0c2a95d13c2f45eb2d3"
        "17cf9cf54689918a49132b4fd65762ab8087c3d0ae6459b217032cfa173cf526de0c7f48e807c3f95ef4719ab1562038d0f1c3dbe45d"
        "3e6a8a610e374d1bca695e3121ab2d690d62a9b4f843c70de7456e2a84982fc1b975d0"
    ),
    11: (
        "db8c40617acebe97254f327f1d2ac8638520595ae63b9d4057edab318ed6284b1c280dcfe19ca97f608c1af71cbaf4936a5ef6574b63"
        "82fed254e325ac7465920e1c3650d74fe13a2b8dd07a49b2ab619adbc609e269b8a4a57397d8fb289bc0df91e470f1386cef30083746"
        "0817425fdb431520df6b61ced02ea4363561a4e76a53c61d975d9ba8425f295cf2ea9617e8a071c3cae844795b394fa309170df82b8f"
        "2cb9501b2408e53f8ce1f769cd03bd438b1507dc"
    ),
    12: (
        "3e14b25db96d9a6f6f818720847b1c0c3490e954de39d8025675fdc66bd1a2bc6157afce94abf2e1083a508ce8347fe0a5f2b80597d3"
        "c1e4a7b625d78912db690505ba2782d6ce63142b0852f6d71c94efb912a642f37acf42b1e1863f3491ef77fcdea57ba91348b9380263"
        "8cd479c57e06751e8db3dce0fc4975218ba50dc969104382652cdfe5102aefb10a76db3e01b9d08f39c2104f73e8a956b4db0ca43d24"
        "3f1e683cbde57f90e6378abc9df17295c4e125944cdf8632a44a56daefb435968acd17832f10fe265bc797ba09d2f1aa341c8ab354e6"
        "40523786c03a0678fdca05e"
    ),
    13: (
        "138b5e2049cabf68a7d2e9674d019ef3e472c78fa1235dca686b819b8fdd13e0b56b9cf74f32150cfa69b0537e28461c97aae0785b09"
        "edc4d324e83d51e6c284b69ac0b68d4bed1432ac5a68702617f0c52f9dc29f073d40cf927e51293205f68b9f6deb7f91b3fa95b6e847"
        "1bdc03746e57ada186cd37e50fd8437c19caebdf803149528d84ce2d1633a25036a4071269ba0f8c2b1e39ef2da8a46bc3a60bf19a74"
        "521074acadef03615bf70a5bc8e981f9cde29fbac4d8f314c5972504658797b034c619f2dea15e48d25e7c639dfeb84749b8cad29042"
        "d16347f081563841075e4d1e0f5790eba62d79adef36f2c4a1b85e1d2830485790bf6bf03148abc0125ac9603ef35674b31525acbe52"
        "da6ce3cd627af93b857c"
    ),
}
EVEN_TABLE = {}
