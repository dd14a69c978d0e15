"""How two lists of shell pairs are computed: by which path, which side first, with H matrices in which form."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """What a backend decides for a bra and a ket list.

    Attributes
    ----------
    path : md4.backends.Path
        The way through steps 2 to 5.
    swap : bool
        Whether the ket is transformed first. Then bra and ket change names, which (ab|cd) = (cd|ab) allows.
    bra_form, ket_form
        Forms of the H matrices of the side transformed first and second, as the backend knows them.
    """

    path: object
    swap: bool
    bra_form: object
    ket_form: object

    def __str__(self):
        return self.path.name + (", ket first" if self.swap else "")


def bra_first_flops(bra, ket):
    """FLOP of both transforms if the bra is transformed first: 2 N_ab Q (P + N_cd).

    P and Q count the Hermite functions of all primitives of a pair.
    """
    p, q = bra.mean_prim * bra.nherm, ket.mean_prim * ket.nherm
    return 2 * bra.nab * q * (p + ket.nab)


def cheaper_swapped(bra, ket):
    """Whether transforming the ket first costs fewer operations."""
    return bra_first_flops(ket, bra) < bra_first_flops(bra, ket)


def chunks(nbra, nket, chunk_bra, chunk_ket):
    """Slices of bra and ket pairs that cover nbra x nket."""
    for i in range(0, nbra, chunk_bra):
        for k in range(0, nket, chunk_ket):
            yield slice(i, min(i + chunk_bra, nbra)), slice(k, min(k + chunk_ket, nket))
