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

# The same for even r: the bank of each r[t] of even t_0, in the order of ordinals.
EVEN_TABLE = {
    4: "d049268b33c1f47515ea02",
    5: "98b71c65250de6a3e3f419c4bd10278f0a",
    6: "8604912f37ec5d7aefab16120c4b4d983d5fab16309e0725c8",
    7: "75dd29043f876608e4b1a9cf21b332cf47c9ab5a42e5ed605f3416e1c0d58028b37a19",
    8: "10457a2495b1d20ad397e8633b8c462c169ebc27fa5ba95082efd8256049c03de74f19eb78f4360d387daf1c5ab6e1c",
    9: (
        "089d7213adaf019bfc751e4625e7984608e0b548c2d3d2bf10c48f12639a83ae59a7e5c612c73db5bfe72ac6b243c96a3f57b45a9864"
        "1c64d390f87d01be0"
    ),
    10: (
        "968654384702945bfcba3137ce216d7fcd10e27ad6854e9b3f30cbd7405fbe821a8c217cf254a3e3c91285609d746e0afd483f8615b0"
        "674e0a6e5bcf39bd7ab1de650c207ae489df3cbdf29a128a50199"
    ),
    11: (
        "6d1f045da8962a1927e35b474ef0a18c60f1e88bdc9f94e2d14550cb61320875b37a5f3982f37ad4e5af916ce8946c3fb67ca621e9b7"
        "dbc74a602ad1e8256bd7cd31e5854f0a320e812d5b7b943afb08e300a1949284027dcbe1df394af083c627c5693c765"
    ),
    12: (
        "04f196bd375a208ce3ce40c352f18d96abdb7e76d98f1752e7b2214c34eaf5d0cfb43010e99a8dfc20b73216a89dc16486a5b05b2e61"
        "6d81cfd2e4bf28ea922757fd3e3714c875e94a65e930dc7304b27636a1448c9ba9a5fd31cb83172b48981f9ea5c6f0a5e9a39c871265"
        "f3d0be2948760acf5d0a6f5046b3d7184b05"
    ),
    13: (
        "584d0b618ac5034ef317af1b3627d9bc546afcb9de4681e2a53f67911a80c50f73401d2a9425edcf327640db86cf98bcae873b036129"
        "debf82d2ea5726a35ee67d20f448fa9cb1ca513e400f9c1b04de2c9012d5cab3757ed406fb7982dba788673a5c791359b3d9486ae860"
        "1df8219abc78f5630cf94e0fd48be2f6c7a5f672c43ef10829cb739453e6d4210e21dab6513287a09d5314e90c5b"
    ),
    14: (
        "ca0f132087f5a064249c17699bed68d3a5548dc1a73f0e2463385b7e5f042c9c175bcf49daa32108b96e5ba8d0ea9d30dcef5c689dad"
        "1738f09645b28601dfba2b2318547eb064acd21463fce97fc5a92d3f148076aebf3125d47b57feacbdf8b2413d47ea34ea196072c4d5"
        "f8ec89af60b780213985472c05f6b8912635e768fd3db54993120a67be235489d2e6cadf0613cfc40e7dca0b4f0776012b539ea16027"
        "4b5f83e91c1fa670b12c95e8b7942de1be83192635ec8adc"
    ),
    15: (
        "092a8fc9d54705653ea1bf2b4712d2830400a48aedb567ec90c4fe82f96c7895a1bf5739ef9d71b30125f663e84da3114176c5603829"
        "bed4a1b02fbc092633f7c23895caef4bac7208c3ed754d1f7eb01bfe86204dabc9d7156ef6541f9207eac863a5489ceb5e2d3a4c1f76"
        "e900283cab25a8c3ba54cf9dbf70d21603e5a498d15f176a283acb5171d94f76e96d20e86312c8a59cb4afd7b091bc89c365708bedc1"
        "d46f7982538cb231da5bb4a57f9db0761086e215c384a219472d6aabef1349235476ea3b1e6d9840f6794c802de3248ce5af3d8437f0"
        "d76b950edf60"
    ),
    16: (
        "0233d855ae49bd16ca0742320e7413cf09c197fb93256e8b4f780f8b586a4f3a1d925305a4a46d1017ed5407ce6a08bb53b672ce9fbc"
        "93b28198f92dcfe17bc69091ef0758a27a6ef703a65364b5932c41541ef8c52b736d4105a5d48b5ecfa0ad87106bd81cef2d28c94a63"
        "08acbef92cb497132694051f5e29c43792dc69da31a7b64d91efcd2868375ad6838becdf8b3ec4b76f0bae18071624f387bce03e15c0"
        "5637ab49e09fe14b759e2a609721ad6e70cd4532dfca354a8a1dbc9652a828fb49670fcd2153fccad268fcad62df8b534cf0b5a498e1"
        "b709862bd91ed7fe56945d4f37e1d3e1ca8d476a89b7462a7b13547e210f3091ed279683d2fb0c5af431e5086c200"
    ),
    17: (
        "071ff3659927d812d4ca960674bf85ebd3a2db08c1501f27359e748069aef34ca0418efdc6a9f21d47201a8d26bca06848b735e3dcab"
        "c85693235f17d2539065b41afc6780b5e4efd1c4e849bce68f7ec5ccefa9ed53b9421f675b5760abfde0d143a5b07edca6e9184b2876"
        "4903dcae924193128593c62f0826f9142a390b213727356e1afcbd2108b635d78c0a47df1ae374c37b50ecd682b0b8dad4596d0fcab8"
        "856e37a90ae9f014265f895bc680dbfc26f19a475f3e70a51837f9face251952347ffc4b1fde633bd7ce89ab7cd1ae394576e39592dc"
        "6b189c4dfb8cc3df1e2c5b8374f606deb198d5872a9c04720142356d142360b8d2fc0b8a1fc90a753e02a761e94a0b6ae218b46790d9"
        "a21e452ac7f34b2b1fd36b8e193efa80e79ac541d27456e3d245063e440865dfcb03827510a"
    ),
    18: (
        "0cfca6e9e4df10a712038dd806f5c94b0981b7db8937ec671b075fea4ec1568af524a033fb93c42a7fd0490d6e38c5f4256e2d01b6ab"
        "8236c187912b6e142c0f94983c7f5892d5ed04f23dac83f7d9bc80bca34d1a70e3e4ca7f59a6c5b791350e1a450f2eb15265b76eb562"
        "f81b6103db9c04e28d6ac5e396d73c16a70657f78e0821a5943cbde648275a6087fb791f0b28435a2b8f9e348c9f1d6c431abc93f4ed"
        "0a728159ae3df1ce43d5d6ac5de9f1c3dd1507625bd0a2f8e439a80cd2efb7625c9a3fbced43f59ba02789ba1c70682b4a650c3414ce"
        "31496e7319b65bcab12d576584ab130feb1d476819abc7686fe4356f0283487e91fd287e9fa2d0a25d0fc840de7452b36d14ef987391"
        "cdef262c57368b4e24d5012f9d57d9abc1de7abc165bc30465c1d034ef893ba26951ba8f02124a95ef87a3cb296065874ab3ef9ad12c"
        "f983ac7e6843a761560284f3509ed427892a7fb892765c1b0de71480d7fe40329a0"
    ),
}
